"""Many heads and columns in one token matrix: shared points, gates and rewards, a value slot for each.

Head h reads the states through its own view (scaler); column c weights the transitions in its own way: column 0 is the whole
context, the others leave a fold of episodes out. A stream is one head on one column. Streams do not read one another, so a
block computes them as attention heads side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor

from valueformer.prompt import CHANNELS, Layout, Prompt
from valueformer.transitions import Transitions

__all__ = ["StreamPrompt", "StreamSlices", "stream_slices"]

StreamSlices = list[list[dict[str, slice]]]
_SLOTS = ("value", "other_value", "residual")
_POINTS = ("point", "other", "point_norm", "other_norm")


def stream_slices(layout: Layout, obs_dim: int, views: Sequence[int], columns: int) -> tuple[StreamSlices, int]:
    """Return where each head's and column's channels lie, by name, and the tokens' width; ``views``: each head's view."""
    owner: dict[tuple[str, Any], slice] = {}
    width = 0
    streams: StreamSlices = []
    for h, view in enumerate(views):
        streams.append([])
        for c in range(columns):
            slices = {}
            for name in ("point", "other", *CHANNELS[layout]):
                whose = view if name in _POINTS else None if name == "one" else (h, c) if name in _SLOTS else ("column", c)
                if (name, whose) not in owner:
                    size = obs_dim if name in ("point", "other") else 1
                    owner[name, whose] = slice(width, width + size)
                    width += size
                slices[name] = owner[name, whose]
            streams[h].append(slices)
    return streams, width


@dataclass(frozen=True, eq=False)
class StreamPrompt:
    """A context and queries for several heads and columns; what an attention block reads of a :class:`Prompt`, and more."""

    layout: Layout
    obs_dim: int
    tokens: Float[Tensor, "t c"]
    key_mask: Bool[Tensor, "roles t"]
    """Roles of column 0, then of column 1, .."""
    key_weight: Float[Tensor, "roles t"]
    query_weight: Float[Tensor, "roles t"]
    columns: tuple[Prompt, ...]
    """Each column's own prompt, for its masks and reading rules."""
    channels: Int[Tensor, "h b s"]
    """Channels of each stream, in the order of its layout."""
    fold: Int[Tensor, " n"] | None
    """Fold of each transition: column 1 + fold left it out."""

    @classmethod
    def from_transitions(
        cls,
        views: Sequence[Transitions],
        heads: Sequence[int],
        weights: NDArray[Any],
        rewards: NDArray[Any],
        queries: Sequence[NDArray[Any]] | None,
        *,
        layout: Layout,
        fold: NDArray[np.int64] | None = None,
        device: Any = "cpu",
    ) -> StreamPrompt:
        """Build the tokens of a context seen through several views.

        ``heads``: the view that each head reads; ``weights``, ``rewards``: ``(b, n)``, a row per column; ``queries``:
        ``(m, d)`` states in each view's units.
        """
        streams, width = stream_slices(layout, views[0].obs_dim, heads, len(weights))
        dtype = views[0].observations.dtype
        tokens: Tensor | None = None
        columns: list[Prompt] = []
        channels = []
        for h, view in enumerate(heads):
            channels.append([])
            for c, slices in enumerate(streams[h]):
                data = views[view].with_numbers(
                    observations=views[view].observations,
                    next_observations=views[view].next_observations,
                    rewards=rewards[c].astype(dtype),
                    sample_weight=weights[c],
                )
                prompt = Prompt.from_transitions(data, None if queries is None else queries[view], layout=layout, device=device)
                if h == 0:
                    columns.append(prompt)
                if tokens is None:
                    tokens = prompt.tokens.new_zeros(prompt.tokens.shape[0], width)
                index = torch.cat([torch.arange(s.start, s.stop, device=device) for s in slices.values()])
                tokens[:, index] = prompt.tokens
                channels[h].append(index)
        assert tokens is not None
        return cls(
            layout=layout,
            obs_dim=views[0].obs_dim,
            tokens=tokens,
            key_mask=torch.cat([p.key_mask for p in columns]),
            key_weight=torch.cat([p.key_weight for p in columns]),
            query_weight=torch.cat([p.query_weight for p in columns]),
            columns=tuple(columns),
            channels=torch.stack([torch.stack(row) for row in channels]),
            fold=None if fold is None else torch.tensor(fold, device=device),
        )

    def query_values(self, tokens: Float[Tensor, "t c"]) -> Float[Tensor, "h b m"]:
        """Read every stream's values at the queries out of a layer's tokens."""
        return self._read(tokens, lambda prompt, own: prompt.query_values(own))

    def td_errors(self, tokens: Float[Tensor, "t c"], gamma: float) -> Float[Tensor, "h b n"]:
        """Read every stream's TD errors on all transitions, those that its column leaves out too."""
        return self._read(tokens, lambda prompt, own: prompt.td_errors(own, gamma))

    def mean_square(self, td: Float[Tensor, "h b n"]) -> Float[Tensor, "h b"]:
        """Return each stream's mean squared TD error, weighted as its column is, in float64."""
        return torch.stack([prompt.mean_square(td[:, c]) for c, prompt in enumerate(self.columns)], dim=-1)

    def constant(self) -> Float[Tensor, "b n"]:
        """Return the TD errors of V = 0 in every column: what the level leaves unexplained."""
        return torch.stack([prompt.td_errors(prompt.tokens, 0.0) for prompt in self.columns])

    def _read(self, tokens: Tensor, read: Any) -> Tensor:
        return torch.stack(
            [
                torch.stack([read(prompt, tokens[..., index]) for prompt, index in zip(self.columns, row, strict=True)])
                for row in self.channels
            ]
        )
