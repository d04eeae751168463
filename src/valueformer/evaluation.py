"""Evaluate a log: values from the whole context, and their test on whole episodes left out of it."""

from __future__ import annotations

import platform
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any, cast

import numpy as np
import sklearn
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.base import clone

from valueformer import kernels
from valueformer.errors import InputError
from valueformer.estimator import DivergenceWarning, ValueFormer
from valueformer.kernels import Kernel
from valueformer.metrics import MAX_REMAINING, HeldOut, held_out_metrics
from valueformer.results import Evaluation
from valueformer.transitions import Returns, Transitions
from valueformer.version import __version__

__all__ = ["evaluate"]

MAX_FOLDS = 10
_LEVEL_TOLERANCE = 0.25  # of the mean recorded return, before the verdict mentions it


def evaluate(
    data: Transitions,
    model: ValueFormer | None = None,
    *,
    queries: ArrayLike | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Evaluation:
    """Return V of the behaviour policy on its own log, with held-out errors from K = min(10, episodes) folds.

    Folds are whole episodes, each row is held out once and the scaler is fitted per fold; with one episode nothing can be held
    out and those numbers are None. ``queries``: ``(m, d)`` further states to ask about. ``progress(done, total)`` is called
    after each fit. ``model`` itself is not fitted. Raises InputError for bad parameters or queries.
    """
    start = time.perf_counter()
    model = _unfitted(model or ValueFormer())
    n_folds = min(MAX_FOLDS, data.n_episodes) if data.n_episodes > 1 else 0
    report = progress or (lambda done, total: None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DivergenceWarning)  # the result's status says it
        model.fit(data)
        values, td = model.values_and_td_errors(data)
        answers = None if queries is None else model.predict(queries)
        report(1, n_folds + 1)
        held_value, held_td = np.full(len(data), np.nan), np.full(len(data), np.nan)
        fold, stuck = _folds(data, n_folds), 0
        for k in range(n_folds):
            rows = np.flatnonzero(fold == k)
            held_out, fitted = data[rows], _unfitted(model).fit(data[np.flatnonzero(fold != k)])
            held_value[rows], held_td[rows] = fitted.values_and_td_errors(held_out)
            stuck += fitted.solution_.status == "max_layers" and not fitted.solution_.stats["improved"]
            report(k + 2, n_folds + 1)
    returns = data.monte_carlo_returns(model.gamma)
    heldout = HeldOut(None, None, None, None, None, 0)
    if n_folds:
        heldout = held_out_metrics(data, model.gamma, values=held_value, td=held_td, n_folds=n_folds)
    first = data.initial_rows
    level = _level(held_value if n_folds else values, returns)
    message = model.solution_.message
    if stuck:
        note = f"in {stuck} of {n_folds} folds no layer improved on the start: try more layers or a smaller temperature"
        message = f"{message}; {note}" if message else note
    solution, steps = model.solution_, model.solution_.stats["step_sizes"]
    return Evaluation(
        source=data.source,
        data={
            "n_transitions": len(data),
            "n_episodes": data.n_episodes,
            "obs_dim": data.obs_dim,
            "terminated": int(data.terminated.sum()),
            "truncated": int(data.truncated.sum()),
        },
        estimand=f"discounted value (gamma = {model.gamma:g}) of the behaviour policy, the one that made this log",
        gamma=model.gamma,
        num_layers=solution.stats["layers"],
        kernel=_kernel_name(model.kernel),
        temperature=_temperature(model.kernel_),
        layout=model.layout,
        step_size=None if not steps else steps[0] if len(set(steps)) == 1 else steps,
        status=solution.status,
        message=message,
        verdict=verdict(data, heldout, solution.status, solution.message, level),
        context_td_error=model.td_error_,
        heldout=heldout,
        initial_value={"mean": float(values[first].mean()), "per_episode": values[first]},
        table={
            "episode_id": data.episode_ids,
            "step": data.steps,
            "value": values,
            "td_error": td,
            "advantage": held_td,
            "heldout_value": held_value,
            "monte_carlo_return": returns.values,
            "missing_weight": returns.remaining,
        },
        initial_td_error=solution.stats["initial_td_error"],
        rewinds=solution.stats["rewinds"],
        level=level,
        queries=answers,
        query_states=None if queries is None else np.asarray(queries).reshape(len(np.asarray(queries)), -1),
        seconds=time.perf_counter() - start,
        config=_config(model),
    )


def _unfitted(model: ValueFormer) -> ValueFormer:
    """Return a new, unfitted model with the same parameters."""
    return cast(ValueFormer, clone(model))


def _folds(data: Transitions, n_folds: int) -> NDArray[np.int64]:
    """Return the fold of each row: episodes in turn, so that drift over the log spreads over all folds."""
    return data.episode_index % max(n_folds, 1)


def _level(values: NDArray[np.float64], returns: Returns) -> dict[str, Any]:
    """Return the mean value and the mean recorded return over rows whose return is recorded, None where there are none."""
    kept = returns.remaining <= MAX_REMAINING
    if not kept.any():
        return {"mean_value": None, "mean_return": None, "rows": 0}
    return {
        "mean_value": float(values[kept].mean()),
        "mean_return": float(returns.values[kept].mean()),
        "rows": int(kept.sum()),
    }


def verdict(data: Transitions, heldout: HeldOut, status: str, message: str, level: Mapping[str, Any]) -> str:
    """Say in plain words what the held-out numbers mean, and whether the level agrees with recorded returns."""
    words = _verdict(data, heldout, status, message)
    value, recorded = level.get("mean_value"), level.get("mean_return")
    if status in ("diverged", "singular") or value is None or recorded is None:
        return words
    if abs(value - recorded) > _LEVEL_TOLERANCE * abs(recorded):
        return f"{words} Their level is off: they average {value:.3g} where recorded returns average {recorded:.3g}."
    return words


def _verdict(data: Transitions, heldout: HeldOut, status: str, message: str) -> str:
    if status in ("diverged", "singular"):
        return f"Do not use these values: the computation ended {status} ({message})."
    if not data.rewards.any():
        return "All rewards are zero, so the value is zero everywhere; check the reward column."
    if heldout.td_error is None:
        return "With a single episode nothing could be held out: these values fit the log, untested on anything else."
    if heldout.tdc is None:
        return "A constant value explains this log exactly, so the states have nothing to add."
    if heldout.tdc >= 1:
        does = "better" if heldout.tdc > 1.2 else "as well"
        return (
            f"Do not read differences between states: on episodes left out, one constant value does {does} "
            f"(TD error {heldout.tdc:.2f} times the best constant's); more layers, more episodes or a smaller gamma may help."
        )
    explained = heldout.explained_variance
    part = "" if explained is None else f", and they explain {max(explained, 0.0):.0%} of the variance of the returns"
    quality = f"their TD error is {heldout.tdc:.2f} times that of the best constant"
    if explained is not None and explained < 0.5:
        return f"Read these values with caution: on episodes left out {quality}{part}."
    if heldout.tdc > 0.9:
        return f"These values say little beyond their average: on episodes left out {quality}{part}."
    return f"These values hold on episodes left out: {quality}{part}."


def _kernel_name(kernel: Kernel | str) -> str:
    return kernel if isinstance(kernel, str) else str(kernel)


def _temperature(kernel: Kernel) -> float | list[float] | None:
    try:
        heads = kernel.heads()
    except InputError:
        return None
    found = [t for head in heads for factor in head.factors if (t := _own_temperature(factor)) is not None]
    return (found[0] if len(found) == 1 else found) if found else None


def _own_temperature(kernel: Any) -> float | None:
    inner = kernel.kernel if isinstance(kernel, kernels.Softmax) else kernel
    return getattr(inner, "temperature", None)


def _config(model: ValueFormer) -> dict[str, Any]:
    parameters = model.get_params(deep=False)
    parameters["kernel"] = model.kernel_.to_config()
    versions = {"valueformer": __version__, "torch": torch.__version__, "numpy": np.__version__}
    versions |= {"scikit-learn": sklearn.__version__, "python": platform.python_version()}
    return {"parameters": parameters, "versions": versions}
