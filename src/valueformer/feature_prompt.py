"""The prompt of linear transformers (Wang et al. 2025): three rows per transition, ``[s; gamma d s'; r]``, and a query column.

Attention averages over the context: key weights sum to one, so weights trained at one context length serve another, and a
step size alpha here is alpha / n in :func:`valueformer.construct`. The reward's slot becomes the TD error, the query's reads
``-V(s)``. With gamma d already in the next state only a homogeneous activation, linear or ReLU, does TD here (theory 1).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor

from valueformer.transitions import Transitions

__all__ = ["FeaturePrompt"]


@dataclass(frozen=True, eq=False)
class FeaturePrompt:
    """Contexts of n transitions and m queries each, as tokens of ``2 d + 1`` channels; leading dimensions are a batch."""

    tokens: Float[Tensor, "*batch t c"]
    num_queries: int
    weight: Float[Tensor, "*batch n"]
    """Share of each transition, summing to one."""
    layout: Literal["feature"] = "feature"

    @classmethod
    def of(
        cls,
        context: Float[Tensor, "*batch n c"],
        queries: Float[Tensor, "*batch m d"],
        weight: Float[Tensor, "*batch n"] | None = None,
    ) -> FeaturePrompt:
        """Build tokens; ``context``: rows ``[s; gamma d s'; r]``, gamma d 0 at a terminal; ``weight`` None: all alike."""
        asked = torch.cat([queries, torch.zeros_like(queries), torch.zeros_like(queries[..., :1])], dim=-1)  # (..., m, c)
        share = torch.ones_like(context[..., 0]) if weight is None else weight
        return cls(torch.cat([context, asked], dim=-2), queries.shape[-2], share / share.sum(-1, keepdim=True))

    @classmethod
    def from_transitions(
        cls, data: Transitions, queries: NDArray[Any], *, gamma: float, dtype: torch.dtype = torch.float64
    ) -> FeaturePrompt:
        """Build the tokens of a log and of queries ``(m, d)``."""
        discounted = data.discount(gamma)[:, None] * data.next_observations
        context = np.column_stack([data.observations, discounted, data.rewards])  # (n, c)
        weight = None if data.sample_weight is None else torch.tensor(data.sample_weight, dtype=dtype)
        return cls.of(torch.tensor(context, dtype=dtype), torch.tensor(queries, dtype=dtype), weight)

    @property
    def obs_dim(self) -> int:
        """Dimension d of a state."""
        return (self.tokens.shape[-1] - 1) // 2

    @property
    def key_mask(self) -> Bool[Tensor, "*batch roles t"]:
        """Queries are no keys; there is one role."""
        return self.key_weight > 0

    @property
    def key_weight(self) -> Float[Tensor, "*batch roles t"]:
        """Shares of the transitions, 0 for queries."""
        none = self.weight.new_zeros(*self.weight.shape[:-1], self.num_queries)
        return torch.cat([self.weight, none], dim=-1)[..., None, :]

    @property
    def query_weight(self) -> Float[Tensor, "*batch roles t"]:
        """Every token is updated."""
        return torch.ones_like(self.key_weight)

    @property
    def context_length(self) -> Int[Tensor, "*batch"]:
        """Number n of transitions."""
        return torch.full(self.weight.shape[:-1], self.weight.shape[-1], device=self.weight.device)

    def query_values(self, tokens: Float[Tensor, "*batch t c"]) -> Float[Tensor, "*batch m"]:
        """Read V out of the queries' last channel (claim P6)."""
        return -tokens[..., tokens.shape[-2] - self.num_queries :, -1]

    def td_errors(self, tokens: Float[Tensor, "*batch t c"], gamma: float) -> Float[Tensor, "*batch n"]:
        """Read the context's TD errors; gamma is in the tokens already."""
        return tokens[..., : tokens.shape[-2] - self.num_queries, -1]

    def mean_square(self, td: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch"]:
        """Return the mean squared TD error, weighted as the transitions are, in float64."""
        return (self.weight * td.double().square()).sum(-1)
