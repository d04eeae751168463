"""Is a state among those that the context knows? Distances to it, calibrated on the context's own episodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from valueformer.features import ScalerKind
from valueformer.kernels import squared_distances

__all__ = ["ALPHA", "QueryCheck", "Support", "excess", "value_range"]

ALPHA = 0.01  # share of an unseen episode's states that are flagged by chance
_ROWS = 2000  # of the context that the calibration looks at
_TILE = 1 << 20

Vector = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class QueryCheck:
    """What to know about each answer before using it."""

    distance: Vector
    """``(m,)`` distance to the nearest context state, as a multiple of the largest at which a state still counts as known."""
    far: NDArray[np.bool_]
    """``(m,)`` further from the context than 99 % of the states of an episode that it does not contain."""
    excess: Vector
    """``(m,)`` how far V lies beyond what rewards like the context's could add up to, as a share of that range's width."""

    @property
    def out_of_range(self) -> NDArray[np.bool_]:
        """``(m,)`` V beyond what rewards like the context's could add up to, by more than rounding."""
        return self.excess > 1e-5


@dataclass(frozen=True, eq=False)
class Support:
    """The context's states in each view, and how far the states of an unseen episode lie from them.

    Each episode's states are compared with the other episodes' (conformal prediction, Vovk et al. 2005): a state is far if it
    lies further, in some view, than all but ``ALPHA / views`` of those. One episode is cut into parts instead.
    """

    states: Mapping[ScalerKind, Vector]
    limits: Mapping[ScalerKind, float]

    @classmethod
    def of(cls, views: Mapping[ScalerKind, Vector], groups: NDArray[np.int64], seed: int) -> Support:
        """Calibrate on scaled states ``(n, d)`` and the group (episode) of each."""
        n = len(groups)
        rows = np.arange(n) if n <= _ROWS else np.sort(np.random.default_rng(seed).choice(n, _ROWS, replace=False))
        limits = {}
        for kind, states in views.items():
            if groups.max() == 0:
                limits[kind] = 0.0  # nothing to compare with: only the states themselves are known
                continue
            nearest = np.sort(_nearest(states[rows], states, groups[rows], groups))
            # conformal: of k + 1 exchangeable distances the new one exceeds this order statistic with probability <= alpha
            order = int(np.ceil((1.0 - ALPHA / len(views)) * (len(nearest) + 1))) - 1
            limits[kind] = float(nearest[min(order, len(nearest) - 1)])
        return cls(dict(views), limits)

    def distance(self, queries: Mapping[ScalerKind, Vector]) -> Vector:
        """Return ``(m,)`` distances as multiples of the limit, the largest over views; above 1 a state is far."""
        found = np.zeros(len(next(iter(queries.values()))))
        for kind, points in queries.items():
            nearest = _nearest(points, self.states[kind])
            limit = self.limits[kind]
            # states within rounding of one another are the same
            tiny = 1e-6 * max(1.0, float(np.abs(self.states[kind]).max()))
            found = np.maximum(found, nearest / max(limit, tiny))
        return found


def _nearest(
    points: Vector, states: Vector, own: NDArray[np.int64] | None = None, groups: NDArray[np.int64] | None = None
) -> Vector:
    """Return each point's distance to the nearest state of another group."""
    x, y = torch.tensor(points, dtype=torch.float64), torch.tensor(states, dtype=torch.float64)
    nearest = []
    tile = max(1, _TILE // max(len(y), 1))
    for start in range(0, len(x), tile):
        squares = squared_distances(x[start : start + tile], y)
        if own is not None and groups is not None:
            same = torch.tensor(own[start : start + tile])[:, None] == torch.tensor(groups)
            squares = squares.masked_fill(same, torch.inf)
        nearest.append(squares.amin(-1).sqrt())
    return torch.cat(nearest).numpy() if nearest else np.zeros(0)


def excess(values: Vector, low: float, high: float) -> Vector:
    """Return how far values lie outside ``[low, high]``, as a share of its width (of its size, where the width is 0)."""
    finite = [abs(x) for x in (low, high) if np.isfinite(x)]
    beyond = np.maximum(np.maximum(low - values, values - high), 0.0)
    width = high - low
    if not np.isfinite(width):
        width = max(finite, default=1.0)
    # below this, a difference is rounding of the values
    beyond = np.where(beyond > 1e-5 * max(finite, default=0.0), beyond, 0.0)
    return beyond / (width or max(finite, default=1.0) or 1.0)


def value_range(rewards: Vector, gamma: float, ends: bool) -> tuple[float, float]:
    """Return the least and the largest discounted sum of rewards like these, of one step or more.

    Without ends every sum is infinite: ``r / (1 - gamma)``; with ends it may stop after one step.
    """
    low, high = float(rewards.min()), float(rewards.max())
    weight = np.inf if gamma >= 1.0 else 1.0 / (1.0 - gamma)
    sums = [r * weight if r else 0.0 for r in (low, high)]
    return (min(low, sums[0]), max(high, sums[1])) if ends else (sums[0], sums[1])
