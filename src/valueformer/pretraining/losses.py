"""Multi-task losses: what a prediction of V is held against."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from valueformer.errors import InputError
from valueformer.pretraining.batch import Targets
from valueformer.pretraining.config import Loss

__all__ = ["loss", "td_errors"]


def td_errors(v: Tensor, v_next: Tensor, targets: Targets) -> Tensor:
    """Return ``r + gamma d V(s') - V(s)`` of each query."""
    return targets.rewards + targets.discounts * v_next - v


def loss(
    kind: Loss, v: Float[Tensor, "*t q"], v_next: Float[Tensor, "*t q"], targets: Targets, normalise: bool
) -> Float[Tensor, "*t"]:
    """Return the mean squared error of each task or model.

    "td": TD error with a detached target, the semi-gradient of Wang et al. (2025); "residual": the gradient passes through
    the target too; "value": against the exact V; "monte-carlo": against returns, over the queries where they are known.
    Raises InputError where nothing is known.
    """
    if kind == "td":
        error = td_errors(v, v_next.detach(), targets)
    elif kind == "residual":
        error = td_errors(v, v_next, targets)
    else:
        truth = targets.values if kind == "value" else targets.returns
        known = ~truth.isnan()
        if not bool(known.any()):
            what = "tasks of known value (mrp:..)" if kind == "value" else "returns whose episodes end or are long enough"
            raise InputError(f"loss '{kind}'", what, "none in this batch", "use --loss td")
        error = torch.where(known, torch.where(known, truth, v.detach()) - v, 0.0)
        square = error.square().sum(-1) / known.sum(-1).clamp_min(1)
        return square / targets.scale if normalise else square
    square = error.square().mean(-1)
    return square / targets.scale if normalise else square
