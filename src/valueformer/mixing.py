"""The gate: how much each head counts on this context, read off episodes that the head has not seen.

With E the TD errors ``(n, h)`` of all heads on the episodes left out of their context, the mixture ``sum_h w_h V_h``,
``sum_h w_h = 1``, has TD errors ``E w``, since a TD error is affine in V. The gate lowers ``|E w|^2`` over the simplex
(stacking, Breiman 1996) by mirror descent from equal weights, stopped early: ``w <- softmax(log w - eta G w)``,
``G = E^T E`` in units of the best head. Each step is a softmax attention of the heads on one another's errors.
"""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from valueformer.errors import InputError
from valueformer.heads import Mix

__all__ = ["fold_of_rows", "gate"]

FOLDS = 3  # episodes left out by turns to choose the weights
STEPS = 50
RATE = 1.0
_EXACT = 1e-24  # of the largest squared TD error: such a head is exact up to rounding


def gate(td: Float[Tensor, "n h"], weight: Float[Tensor, " n"] | None, mix: Mix) -> Float[Tensor, " h"]:
    """Return mixing weights >= 0 with sum 1, in float64, from held-out TD errors; the last head is the constant.

    ``"context"``: as above; ``"equal"``: the same for every kernel head, 0 for the constant; ``"first"``: the first head alone;
    a sequence: those weights, divided by their sum.
    """
    heads = td.shape[-1]
    if not isinstance(mix, str):
        if len(mix) != heads:
            raise InputError("mix", f"{heads} weights: one per head and one for the constant", str(len(mix)))
        return torch.tensor(mix, dtype=torch.float64, device=td.device) / sum(mix)
    if mix != "context":
        chosen = torch.arange(heads, device=td.device) < (heads - 1 if mix == "equal" else 1)
        return chosen.double() / chosen.sum()
    share = (
        torch.full_like(td[:, 0], 1.0 / len(td), dtype=torch.float64)
        if weight is None
        else weight.double() / weight.double().sum()
    )
    scaled = td.double() / td.detach().abs().max().double().clamp_min(1e-300)  # squares of tiny errors must not vanish
    gram = scaled.mT @ (share[:, None] * scaled)  # (h, h)
    errors = gram.diagonal()
    best = errors.min()
    if float(best.detach()) <= _EXACT:  # those heads share alike
        exact = errors <= _EXACT
        return exact.double() / exact.sum()
    logits = torch.zeros_like(errors)
    for _ in range(STEPS):
        logits = logits - RATE * (gram @ torch.softmax(logits, dim=-1)) / best
    return torch.softmax(logits, dim=-1)


def fold_of_rows(episodes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the fold of each row from its episode's index: whole episodes in turn; a single episode is cut into parts."""
    count = int(episodes.max()) + 1
    if count > 1:
        return episodes % min(FOLDS, count)
    n = len(episodes)
    return np.arange(n) * min(FOLDS, n) // n
