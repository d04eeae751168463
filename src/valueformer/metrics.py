"""How good is a value estimate? Every metric is defined once, here, on plain arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from valueformer.errors import InputError
from valueformer.transitions import Transitions

__all__ = ["HeldOut", "best_constant", "explained_variance", "held_out_metrics", "mean_constant"]

# Rows whose return misses more than this weight of what comes after the record are left out of explained variance.
MAX_REMAINING = 0.05

Vector = NDArray[np.float64]


@dataclass(frozen=True)
class HeldOut:
    """Errors on transitions that the context did not contain; None where undefined."""

    td_error: float | None
    """Mean squared TD error."""
    td_ratio: float | None
    """TD error / mean squared reward: that of V = 0 is 1."""
    td_ratio_constant: float | None
    """The same for the best constant V, chosen with hindsight."""
    tdc: float | None
    """TD error / that of the best constant: below 1, states explain something that a number does not."""
    explained_variance: float | None
    """Of Monte Carlo returns: 1 - Var(G - V) / Var(G)."""
    n_folds: int


def best_constant(rewards: NDArray[Any], discount: Vector, weight: NDArray[Any] | None = None) -> float:
    """Return the constant V of least TD error, ``c = sum r w / sum w^2`` with ``w_i = 1 - gamma_i`` (theory 7.1).

    0 where every gamma_i is 1: no constant changes the TD error then.
    """
    w = 1.0 - discount
    share = np.ones_like(w) if weight is None else weight.astype(np.float64)
    energy = float((share * w * w).sum())
    return float((share * w * rewards.astype(np.float64)).sum()) / energy if energy > 0 else 0.0


def mean_constant(rewards: NDArray[Any], discount: Vector, weight: NDArray[Any] | None = None) -> float:
    """Return the constant V whose TD errors average to zero, ``sum r / sum w`` with ``w_i = 1 - gamma_i``; 0 where all w are 0.

    It is what TD converges to with a constant as its only feature.
    """
    w = 1.0 - discount
    share = np.ones_like(w) if weight is None else weight.astype(np.float64)
    total = float((share * w).sum())
    return float((share * rewards.astype(np.float64)).sum()) / total if total > 0 else 0.0


def explained_variance(values: Vector, returns: Vector, remaining: Vector) -> float | None:
    """Return ``1 - Var(G - V) / Var(G)`` over rows whose return is at least 95 % recorded; None if G does not vary there."""
    kept = remaining <= MAX_REMAINING
    if kept.sum() < 2:
        return None
    spread = float(np.var(returns[kept]))
    if not spread > 1e-12 * float(np.mean(np.square(returns[kept]))):
        return None
    return 1.0 - float(np.var(returns[kept] - values[kept])) / spread


def held_out_metrics(data: Transitions, gamma: float, *, values: Vector, td: Vector, n_folds: int) -> HeldOut:
    """Pool held-out values and TD errors ``(n,)`` on ``data`` into the metrics above, each row by its sample weight.

    The explained variance counts rows, not weights.
    """
    r, discount, weight = data.rewards.astype(np.float64), data.discount(gamma), data.sample_weight
    if weight is not None and not weight.any():
        raise InputError("sample_weight", "at least one weight > 0", "only zeros", "score other rows")
    unit = float(np.abs(r).max()) or 1.0  # squares of huge rewards stay in range
    error = float(np.average(np.square(td / unit), weights=weight))
    power = float(np.average(np.square(r / unit), weights=weight))
    constant = best_constant(r / unit, discount, weight)
    constant_error = float(np.average(np.square(r / unit - (1.0 - discount) * constant), weights=weight))
    significant = constant_error > 1e-12 * power  # else the constant is exact up to rounding
    returns, remaining = data.monte_carlo_returns(gamma)
    return HeldOut(
        td_error=error * unit**2,
        td_ratio=error / power if power > 0 else None,
        td_ratio_constant=constant_error / power if power > 0 else None,
        tdc=error / constant_error if significant else None,
        explained_variance=explained_variance(values / unit, returns / unit, remaining),
        n_folds=n_folds,
    )
