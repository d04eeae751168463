"""Evaluate a log: values from the whole context, and their test on whole episodes left out of it."""

from __future__ import annotations

import dataclasses
import platform
import time
import warnings
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import sklearn
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.base import clone

from valueformer.errors import InputError
from valueformer.estimator import DivergenceWarning, ValueFormer
from valueformer.intervals import initial_value
from valueformer.metrics import MAX_REMAINING, HeldOut, held_out_metrics
from valueformer.results import Evaluation
from valueformer.solvers import StepSchedule
from valueformer.storage import bundled, bundled_heads
from valueformer.transitions import Returns, Transitions
from valueformer.trust import FAR_OUT, judge
from valueformer.version import __version__

__all__ = ["evaluate", "unfitted"]

MAX_FOLDS = 10


def evaluate(
    data: Transitions,
    model: ValueFormer | None = None,
    *,
    queries: ArrayLike | None = None,
    level: float = 0.95,
    intervals: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> Evaluation:
    """Return V of the behaviour policy on its own log, with held-out errors from K = min(10, episodes) folds.

    Folds are whole episodes, each row is held out once and scalers are fitted per fold; with one episode nothing can be held
    out and those numbers are None. ``queries``: ``(m, d)`` further states to ask about. ``level``: of the interval of the
    initial value, by a bootstrap over episodes; left out with ``intervals=False`` or a single episode.
    ``progress(done, total)`` is called after each fit. ``model`` itself is not fitted; None: the frozen model in the package.
    Raises InputError for bad parameters or queries.
    """
    start = time.perf_counter()
    model = unfitted(model or ValueFormer())
    if not 0.5 <= level < 1.0:
        raise InputError("level of the interval", "a number in [0.5, 1)", repr(level))
    n_folds = min(MAX_FOLDS, data.n_episodes) if data.n_episodes > 1 else 0
    report = progress or (lambda done, total: None)
    total = n_folds + 1 + intervals
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DivergenceWarning)  # the result's status says it
        model.fit(data)
        values, td = model.values_and_td_errors(data)
        answers = None if queries is None else query_table(model, queries, intervals)
        report(1, total)
        held_value, held_td = np.full(len(data), np.nan), np.full(len(data), np.nan)
        far = np.zeros(len(data), bool)
        fold, stuck = _folds(data, n_folds), 0
        for k in range(n_folds):
            rows = np.flatnonzero(fold == k)
            held_out, fitted = data[rows], unfitted(model).fit(data[np.flatnonzero(fold != k)])
            held_value[rows], held_td[rows] = fitted.values_and_td_errors(held_out)
            far[rows] = fitted.check(held_out).far
            stuck += fitted.solution_.status == "max_layers" and not fitted.solution_.stats["improved"]
            report(k + 2, total)
        initial = initial_value(model, data, level if intervals else None)
        report(total, total)
    returns = data.monte_carlo_returns(model.gamma)
    heldout = HeldOut(None, None, None, None, None, 0)
    if n_folds:
        heldout = held_out_metrics(data, model.gamma, values=held_value, td=held_td, n_folds=n_folds)
    shift = _level(held_value if n_folds else values, returns)
    solution = model.solution_
    message = solution.message
    if stuck:
        note = f"in {stuck} of {n_folds} folds no layer improved on the start: try more layers or a smaller temperature"
        message = f"{message}; {note}" if message else note
    checked = model.check(data)
    trust = judge(
        data,
        heldout,
        gamma=model.gamma,
        status=solution.status,
        message=solution.message,
        level=shift,
        far=float(far.mean()) if n_folds else 0.0,
        out_of_range=float((checked.excess > FAR_OUT).mean()),
    )
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
        kernel=_kernel_name(model),
        heads=solution.stats["heads"],
        layout=model.layout,
        status=solution.status,
        message=message,
        verdict=str(trust),
        trust=dataclasses.asdict(trust),
        context_td_error=model.td_error_,
        heldout=heldout,
        initial_value=initial,
        table={
            "episode_id": data.episode_ids,
            "step": data.steps,
            "value": values,
            "td_error": td,
            "advantage": held_td,
            "heldout_value": held_value,
            "monte_carlo_return": returns.values,
            "missing_weight": returns.remaining,
            "far_from_others": far,
            "out_of_range": checked.out_of_range,
        },
        initial_td_error=solution.stats["initial_td_error"],
        rewinds=solution.stats["rewinds"],
        level=shift,
        queries=answers,
        query_states=None if queries is None else np.asarray(queries).reshape(len(np.asarray(queries)), -1),
        seconds=time.perf_counter() - start,
        config=_config(model),
        model=model,
    )


def query_table(model: ValueFormer, queries: ArrayLike, intervals: bool) -> dict[str, NDArray[Any]]:
    """Return what there is to say about each state asked about: value, spread, distance to the data, flags."""
    check = model.check(queries)
    table = {"value": model.predict(queries)}
    if intervals and model.context_.n_episodes > 1:
        table["std"] = model.predict(queries, return_std=True)[1]
    return table | {"distance": check.distance, "far": check.far, "out_of_range": check.out_of_range}


def unfitted(model: ValueFormer) -> ValueFormer:
    """Return a new, unfitted model with the same parameters."""
    return cast(ValueFormer, clone(model))


def _folds(data: Transitions, n_folds: int) -> NDArray[np.int64]:
    """Return the fold of each row: episodes in turn, so that drift over the log spreads over all folds."""
    return data.episode_index % max(n_folds, 1)


def _level(values: NDArray[np.float64], returns: Returns) -> dict[str, Any]:
    """Return the mean value, and mean and spread of recorded returns, over rows whose return is recorded; None without any."""
    kept = returns.remaining <= MAX_REMAINING
    if not kept.any():
        return {"mean_value": None, "mean_return": None, "return_spread": None, "rows": 0}
    return {
        "mean_value": float(values[kept].mean()),
        "mean_return": float(returns.values[kept].mean()),
        "return_spread": float(returns.values[kept].std()),
        "rows": int(kept.sum()),
    }


def _kernel_name(model: ValueFormer) -> str:
    if isinstance(model.kernel, str):
        return model.kernel
    trained = isinstance(model.step_size, StepSchedule)  # one kernel by name then says less than its heads
    known = None if trained else next((name for name in bundled() if bundled_heads(name) == model.heads_), None)
    return known or ", ".join(str(head.kernel) for head in model.heads_)


def _config(model: ValueFormer) -> dict[str, Any]:
    parameters = model.get_params(deep=False)
    parameters["kernel"] = [head.to_config() for head in model.heads_]
    if isinstance(steps := model.step_size, StepSchedule):
        parameters["step_size"] = {"unit": steps.unit, "factors": steps.rows().tolist()}
    versions = {"valueformer": __version__, "torch": torch.__version__, "numpy": np.__version__}
    versions |= {"scikit-learn": sklearn.__version__, "python": platform.python_version()}
    return {"parameters": parameters, "versions": versions}
