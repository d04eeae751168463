"""What does it cost this log to share a frozen model? Evidence and held-out TD errors over temperatures (claim P7, theory 5).

Every strictly positive-definite kernel interpolates any finite context, so whether V lies in a kernel's RKHS cannot be read off
data; what another temperature would have gained can.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.linalg import cholesky, solve_triangular

from valueformer.errors import InputError
from valueformer.estimator import ValueFormer
from valueformer.evaluation import evaluate, unfitted
from valueformer.features import Scaler, fit_scaler
from valueformer.fitting import Columns, Problem, scaled
from valueformer.heads import Head
from valueformer.kernels import RBF, Kernel
from valueformer.mixing import fold_of_rows
from valueformer.results import plain
from valueformer.solvers import distinct_states
from valueformer.transitions import Transitions

__all__ = ["TEMPERATURES", "Diagnosis", "diagnose", "evidence"]

# Lengthscales .05 to 12.8, in units of a typical distance between the context's states.
TEMPERATURES = tuple((0.05 * 2.0**k) ** 2 for k in range(9))
_NOISE = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)  # of the evidence, relative to the kernel's part: profiled
_ROWS = 800  # whole episodes up to about so many transitions: Cholesky factors cost n^3
_REPLICATES = 500
_RATIO = 1.2  # theory 5

Vector = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Diagnosis:
    """The cost of the shared kernel on one log, and how far to trust the answer."""

    source: str
    gamma: float
    family: str
    """The kernels compared: the model's own family, RBF where it has several or none."""
    temperatures: tuple[float, ...]
    """Of single kernels of that family, in squared units of ``typical_distance``."""
    typical_distance: float
    """Median distance between states, in the log's units."""
    typical_step: float
    """Median distance ``|s - s'|``, in the same scaled units as the kernels'."""
    evidence: Vector
    """``(9,)`` log evidence per transition of each temperature, in nats (theory 5.1)."""
    model_evidence: float
    """The same for the frozen model's mixed kernel."""
    evidence_regret: Mapping[str, float | None]
    """Best temperature's evidence less the model's, per transition: value, lower, upper, level. Below 0 the model is better."""
    left_out: Vector
    """``(9,)`` TD error on episodes left out, over the best constant's."""
    model_left_out: float | None
    left_out_ratio: Mapping[str, float | None]
    """The model's TD error on episodes left out over the best temperature's: value, lower, upper, level."""
    heads: list[dict[str, Any]]
    """The frozen heads: as in ``solution_.stats['heads']``."""
    compatible: bool | None
    """The ratio's upper end is below 1.2: no single temperature would do much better. None where nothing could be left out.

    Theory 5 also asks for a regret below .05 nats. Evidence judges the exact posterior, layers stop early: on the bundled
    logs it prefers wide kernels whose 40 layers err more on episodes left out, so it is reported and not ruled on.
    """
    far: float | None
    """Share of states that are far from all other episodes: about 1 % if all episodes look alike."""
    trust: Mapping[str, str]
    """level, reason, remedy."""
    verdict: str
    heldout: Mapping[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON document."""
        return plain({f.name: getattr(self, f.name) for f in dataclasses.fields(self)})

    def __repr__(self) -> str:
        return f"Diagnosis({self.source}, gamma={self.gamma:g}: {self.verdict})"


def diagnose(data: Transitions, model: ValueFormer | None = None, *, level: float = 0.95, progress: Any = None) -> Diagnosis:
    """Compare a model with nine temperatures of its kernel on a log, by evidence and on episodes left out.

    Both are compared with the best temperature, chosen with hindsight; intervals resample whole episodes. ``model`` None:
    the frozen one in the package. ``progress(done, total)`` is called now and then. Raises InputError for bad parameters.
    """
    model = unfitted(model or ValueFormer())
    if model.algorithm != "td":
        raise InputError("model.algorithm", "'td'", repr(model.algorithm), "a fixed point is not what layers compute")
    result = evaluate(data, model, intervals=False, progress=progress)
    fitted: ValueFormer = result.model
    context = fitted.context_
    scaler = fit_scaler("isotropic", context.observations, model.random_state)
    moved = np.linalg.norm(scaler.transform(context.next_observations) - scaler.transform(context.observations), axis=1)
    span = float(scaler.factor.max())
    family = _family([head.kernel for head in fitted.heads_])
    by_evidence, by_error = _evidence_part(fitted, family, scaler, level), _left_out_part(fitted, family, scaler, level)
    ratio = by_error["left_out_ratio"]["upper"]
    return Diagnosis(
        source=data.source,
        gamma=model.gamma,
        family=type(family[0]).__name__,
        temperatures=TEMPERATURES,
        typical_distance=1.0 / span if span > 0 else 0.0,
        typical_step=float(np.median(moved)),
        **by_evidence,
        **by_error,
        compatible=None if ratio is None else bool(ratio < _RATIO),
        heads=fitted.solution_.stats["heads"],
        far=float(result.table["far_from_others"].mean()) if result.heldout.n_folds else None,
        trust=result.trust,
        verdict=result.verdict,
        heldout=dataclasses.asdict(result.heldout),
    )


def _family(kernels: Sequence[Kernel]) -> list[Kernel]:
    """Return the first kernel at all temperatures if all are of its kind and differ by temperature alone, else RBF kernels."""
    first = kernels[0]
    if first.stationary and hasattr(first, "temperature"):
        unit = {str(_at(kernel, 1.0)) for kernel in kernels if hasattr(kernel, "temperature")}
        if unit == {str(_at(first, 1.0))} and all(hasattr(kernel, "temperature") for kernel in kernels):
            return [_at(first, t) for t in TEMPERATURES]
    return [RBF(t) for t in TEMPERATURES]


def _at(kernel: Any, temperature: float) -> Kernel:
    return dataclasses.replace(kernel, temperature=temperature)


def _left_out_part(model: ValueFormer, family: Sequence[Kernel], scaler: Scaler, level: float) -> dict[str, Any]:
    """Return TD errors on episodes left out: of each temperature with the model's level, step and guard, and of the model."""
    context, unit = model.context_, model.reward_unit_
    if context.n_episodes < 2:
        none = {"value": None, "lower": None, "upper": None, "level": level}
        return {"left_out": np.full(len(TEMPERATURES), np.nan), "model_left_out": None, "left_out_ratio": none}
    fold = fold_of_rows(context.episode_index)
    weights = np.concatenate([np.ones((1, len(fold))), fold != np.arange(int(fold.max()) + 1)[:, None]])
    single = dataclasses.replace(
        model.problem_, views={"isotropic": scaled(context, scaler, True, np.dtype(model.dtype))}, step_size="fast", guard=True
    )
    td = _errors(single, [Head(kernel) for kernel in family], weights, fold)
    own = _errors(model.problem_, model.heads_, weights, fold) @ model.mixing_weights_
    share = context.sample_weight if context.sample_weight is not None else np.ones(len(fold))
    squares = np.column_stack([np.square(td), np.square(own)]) * share[:, None] * unit**2  # (n, 9 + constant + model)
    per_episode = np.stack([np.bincount(context.episode_index, weights=column) for column in squares.T])  # (11, episodes)
    total = per_episode.sum(axis=1)
    constant = total[-2]
    undefined = not constant > 1e-12 * float(np.sum(share * np.square(context.rewards)) * unit**2)
    draws = _draws(context.n_episodes, model.random_state)
    drawn = draws @ per_episode.T  # (replicates, 11)
    best = float(total[:-2].min())
    ratio = None if undefined or best <= 0 else float(total[-1] / best)
    with np.errstate(divide="ignore", invalid="ignore"):
        spread = _interval(drawn[:, -1] / drawn[:, :-2].min(axis=1), level)
    return {
        "left_out": np.full(len(TEMPERATURES), np.nan) if undefined else total[:-2] / constant,
        "model_left_out": None if undefined else float(total[-1] / constant),
        "left_out_ratio": {"value": ratio, **(spread if ratio is not None else {"lower": None, "upper": None}), "level": level},
    }


def _errors(problem: Problem, heads: Sequence[Head], weights: Vector, fold: NDArray[np.int64]) -> Vector:
    """Return TD errors ``(n, heads + 1)`` on the fold that was left out; the last are the constant's."""
    own = problem.data.sample_weight
    columns = Columns.of(
        weights if own is None else weights * own, problem.rewards, problem.data.discount(problem.gamma), "context"
    )
    return problem.run(heads, columns).left_out(fold)


def _evidence_part(model: ValueFormer, family: Sequence[Kernel], scaler: Scaler, level: float) -> dict[str, Any]:
    """Return the log evidence of each temperature and of the model's mixed kernel, per transition."""
    context = model.context_
    ends = np.cumsum(np.bincount(context.episode_index))
    kept = context.episode_index <= int(np.searchsorted(ends, _ROWS))
    rows = np.flatnonzero(kept)
    if len(rows) > 2 * _ROWS:  # a single long episode: its beginning
        rows = rows[:_ROWS]
    rows = rows[np.argsort(context.episode_index[rows], kind="stable")]
    part = context[rows]
    rewards = part.rewards - (1.0 - part.discount(model.gamma_)) * model.level_ / model.reward_unit_
    grid = [evidence([(1.0, kernel, scaler)], part, rewards, model.gamma_) for kernel in family]
    own = [(w, h.kernel, model.scalers_[h.scaler]) for w, h in zip(model.mixing_weights_, model.heads_, strict=False) if w > 0]
    mixed = evidence(own, part, rewards, model.gamma_) if own else np.full(len(part), -np.inf)
    gains = np.stack([*grid, mixed])  # (10, n)
    _, episode = np.unique(part.episode_index, return_inverse=True)
    per_episode = np.stack([np.bincount(episode, weights=row) for row in gains])
    draws = _draws(per_episode.shape[1], model.random_state)
    counts = draws @ np.bincount(episode)
    drawn = (draws @ per_episode.T) / counts[:, None]
    finite = bool(np.isfinite(gains).all())
    means = gains.mean(axis=1)
    regret = float(means[:-1].max() - means[-1]) if finite else None
    spread = _interval(drawn[:, :-1].max(axis=1) - drawn[:, -1], level) if finite else {"lower": None, "upper": None}
    return {
        "evidence": means[:-1],
        "model_evidence": float(means[-1]),
        "evidence_regret": {"value": regret, **spread, "level": level},
    }


def evidence(
    kernels: Sequence[tuple[float, Kernel, Scaler]], data: Transitions, rewards: Vector, gamma: float
) -> NDArray[np.float64]:
    """Return each transition's part ``(n,)`` of the log evidence of rewards, ``r ~ N(0, tau^2 (Psi + rho I))`` (theory 5.1).

    ``Psi`` is the Gram matrix of ``psi_j = kappa_{s_j} - gamma_j kappa_{s'_j}`` under ``kappa = sum w kappa_h`` of
    ``(w, kernel, scaler)``; tau and rho are profiled. By the chain rule the parts are log densities of each reward given those
    before it, so that sums over episodes can be resampled.
    """
    states, successor = distinct_states(data, gamma)
    K = np.zeros((len(states), len(states)))
    for weight, kernel, scaler in kernels:
        x = torch.tensor(scaler.transform(states))
        K += weight * kernel(x, x).numpy()
    n, discount = len(data), data.discount(gamma)
    half = K[:n] - discount[:, None] * K[successor]  # (n, u)
    psi = half[:, :n] - half[:, successor] * discount  # (n, n)
    psi = 0.5 * (psi + psi.T)
    scale = float(np.trace(psi)) / n or 1.0
    best: NDArray[np.float64] | None = None
    for noise in _NOISE:
        L = cholesky(psi + (noise * scale + 1e-10 * scale) * np.eye(n), lower=True)
        z = solve_triangular(L, rewards, lower=True)
        variance = float(np.mean(np.square(z))) or np.finfo(float).tiny
        parts = -0.5 * (np.square(z) / variance + np.log(2.0 * np.pi * variance)) - np.log(np.diag(L))
        if best is None or parts.sum() > best.sum():
            best = parts
    assert best is not None
    return best


def _draws(episodes: int, seed: int) -> Vector:
    share = np.full(episodes, 1.0 / episodes)
    return np.random.default_rng(seed).multinomial(episodes, share, size=_REPLICATES).astype(float)


def _interval(values: Vector, level: float) -> dict[str, float | None]:
    tail = 50.0 * (1.0 - level)
    lower, upper = np.nanpercentile(values, [tail, 100.0 - tail]) if np.isfinite(values).any() else (np.nan, np.nan)
    return {"lower": float(lower), "upper": float(upper)}
