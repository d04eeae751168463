"""What every solver returns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from valueformer.errors import InputError
from valueformer.results import Status

__all__ = ["Solution", "StepSchedule", "StepSize"]


@dataclass(frozen=True)
class StepSchedule:
    """One step size per layer, in units of what the context allows: what pretraining learns.

    ``unit``: "plain" (1), "safe" or "fast" as in :meth:`valueformer.solvers.Context.choose_step`. ``factors``: one row per
    layer, with one number > 0 for all heads or one per head; a tensor ``(L, 1 | h)`` may carry gradients.
    """

    unit: Literal["plain", "safe", "fast"]
    factors: tuple[tuple[float, ...], ...] | Tensor

    def __post_init__(self) -> None:
        if self.unit not in ("plain", "safe", "fast"):
            raise InputError("StepSchedule.unit", "'plain', 'safe' or 'fast'", repr(self.unit))
        if isinstance(self.factors, Tensor):
            return
        try:
            rows = torch.tensor(self.factors, dtype=torch.float64)
        except (TypeError, ValueError) as error:
            raise InputError("StepSchedule.factors", "one row of numbers per layer", str(error)) from None
        if rows.ndim != 2 or not rows.numel() or not bool((rows.isfinite() & (rows > 0)).all()):
            raise InputError("StepSchedule.factors", "rows of finite numbers > 0, one per layer", str(self.factors)[:80])

    def __len__(self) -> int:
        return len(self.factors)

    @property
    def width(self) -> int:
        """Number of heads it is for; 1: any."""
        return len(self.factors[0])

    def rows(self) -> Tensor:
        """Return the factors ``(L, 1 | h)``."""
        return self.factors if isinstance(self.factors, Tensor) else torch.tensor(self.factors, dtype=torch.float64)

    def of_heads(self, start: int, stop: int) -> StepSchedule:
        """Return the schedule of some of the heads."""
        return self if self.width == 1 else StepSchedule(self.unit, self.rows()[:, start:stop])


StepSize = float | Sequence[float] | Literal["safe", "fast"] | StepSchedule


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
