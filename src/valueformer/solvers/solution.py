"""What every solver returns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

from valueformer.results import Status

__all__ = ["Solution", "StepSize"]

StepSize = float | Sequence[float] | Literal["safe", "fast"]


@dataclass(frozen=True, eq=False)
class Solution:
    """What a solver found, and how it went."""

    values: Tensor
    """``(m,)`` V at the queries; with status ``diverged`` those of the layer with the least residual."""
    dual_coef: Tensor
    """``(n,)`` coefficients a: V(x) = sum_j a_j kappa(x, s_j)."""
    td_error: Tensor
    """``(L,)`` float64, on the CPU: mean squared TD error on the context after each layer, weighted as the transitions are."""
    status: Status
    message: str
    stats: Mapping[str, Any] = field(default_factory=dict)
    """``step_sizes``: those on the path to ``dual_coef``; ``rewinds``; ``layers`` run; ``initial_td_error``;
    ``improved``: whether any layer has a smaller residual than the start, or the start was within the tolerance."""
    trace: Tensor | None = None
    """``(L, m)`` query values after each layer, if asked for."""
