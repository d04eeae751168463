"""Transitions and queries as tokens (claim P3): four layouts with named channels, gates and masks.

A token is a row of channels. Attention cannot square, so every layout carries two points, their squared norms and a
constant 1 (theory 1). Gates are channels too: an exponential head adds them to its score, ``log w`` for a
weight w and -1e4 for silence. Heads of other activations take the same weights as masks. Queries are the last tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from valueformer import fields
from valueformer.arguments import check_states
from valueformer.errors import InputError
from valueformer.transitions import Transitions

__all__ = ["CHANNELS", "Layout", "Prompt", "channel_slices"]

Layout = Literal["pair", "residual", "trajectory", "two_group"]

# exp(-1e4) is exactly 0 in every dtype and 1e4 fits into float16. Keys are masked as well: beside a huge score, rounding
# could swallow a gate.
SILENT = -1e4

# Scalar channels of each layout, after the two points. In all layouts "point" is what keys read first.
CHANNELS: dict[Layout, tuple[str, ...]] = {
    # point s_i, other s'_i; V(s_i) and the discounted V(s'_i) each have a slot
    "pair": ("point_norm", "other_norm", "one", "key_gate", "next_gate", "reward", "value", "other_value"),
    # point s_i, other s'_i; one slot, the TD error
    "residual": ("point_norm", "other_norm", "one", "key_gate", "next_gate", "reward", "residual"),
    # point s_j, other s_{j-1}: one token per visited state, the final ones too
    "trajectory": ("point_norm", "other_norm", "one", "out_gate", "in_gate", "bootstrap_gate", "reward", "value"),
    # tokens A_j: point s_j, other s_j; tokens B_j: point s_j, other s'_j
    "two_group": ("point_norm", "other_norm", "one", "state_gate", "next_gate", "reward", "value"),
}


def channel_slices(layout: Layout, obs_dim: int) -> dict[str, slice]:
    """Return where each named channel lies in a token."""
    slices = {"point": slice(0, obs_dim), "other": slice(obs_dim, 2 * obs_dim)}
    for position, name in enumerate(CHANNELS[layout], 2 * obs_dim):
        slices[name] = slice(position, position + 1)
    return slices


@dataclass(frozen=True, eq=False)
class Prompt:
    """Context and queries as one token matrix, with what each head role may read. Leading dimensions are a batch."""

    layout: Layout
    obs_dim: int
    num_queries: int
    tokens: Float[Tensor, "*batch t c"]
    key_mask: Bool[Tensor, "*batch roles t"]
    """Keys that take part, before any softmax."""
    key_weight: Float[Tensor, "*batch roles t"]
    """Weight of each key after the activation: sample weight, and in "trajectory" and "two_group" the discount."""
    query_weight: Float[Tensor, "*batch roles t"]
    """Weight of each token's update: the discount in "pair" and "residual"."""
    state_token: Int[Tensor, "*batch n"]
    """Token whose value slot holds V(s_i)."""
    next_token: Int[Tensor, "*batch n"]
    """Token that holds V(s'_i); the same token where the layout has a slot for it."""
    discount: Float[Tensor, "*batch n"]
    """``discounts_i (1 - terminated_i)``, without gamma; 0 for padding."""

    @classmethod
    def from_transitions(
        cls,
        data: Transitions,
        queries: ArrayLike | None = None,
        *,
        layout: Layout = "pair",
        gate_queries: bool = True,
        centre: ArrayLike | None = None,
        dtype: torch.dtype | None = None,
        device: Any = "cpu",
    ) -> Prompt:
        """Build the tokens of a context and of queries ``(m, d)``.

        ``gate_queries=False`` leaves the query's (zero) next state readable: layout "residual" then reads
        ``V(s_q) - gamma V(0)``, the constant offset of claim P8. ``centre`` ``(d,)`` is subtracted from all states. Under a
        stationary kernel that changes nothing but rounding, and float32 tokens need states near the origin: an RBF is off by
        1e-4 where their mean is 10 lengthscales away, and useless at 1000 (theory 6). Raises InputError for an unknown
        layout, queries of another dimension or not finite, or "trajectory" on rows whose s'_j is not s_{j+1}.
        """
        if layout not in get_args(Layout):
            raise InputError("layout", " | ".join(get_args(Layout)), repr(layout))
        number = dtype or getattr(torch, str(data.observations.dtype))
        points = np.empty((0, data.obs_dim)) if queries is None else fields.finite("queries", fields.matrix("queries", queries))
        if points.shape[1] != data.obs_dim:
            raise InputError("queries", f"shape (m, {data.obs_dim})", str(points.shape), "same features as the context")
        # A terminal successor is never read, so it must not even overflow: its token gets s' := s.
        states = data.observations
        successors = np.where(data.terminated[:, None], states, data.next_observations)
        for what, array in (("context states", states), ("context states", successors), ("queries", points)):
            check_states(what, array, number)
        shift = np.zeros(data.obs_dim) if centre is None else np.asarray(centre, dtype=np.float64)
        context = data.with_numbers(
            observations=states.astype(np.float64) - shift,
            next_observations=successors.astype(np.float64) - shift,
            rewards=data.rewards,
            sample_weight=data.sample_weight,
        )
        rows = _BUILDERS[layout](context, points - shift, gate_queries)
        slices = channel_slices(layout, data.obs_dim)
        tokens = np.zeros((rows.length, slices[CHANNELS[layout][-1]].stop))
        for name, value in rows.channels.items():
            tokens[:, slices[name]] = value if value.ndim == 2 else value[:, None]

        def tensor(array: NDArray[Any], to: torch.dtype = number) -> Tensor:
            return torch.tensor(array, dtype=to, device=device)

        return cls(
            layout=layout,
            obs_dim=data.obs_dim,
            num_queries=len(points),
            tokens=tensor(tokens),
            key_mask=tensor(np.stack(rows.key_mask), torch.bool),
            key_weight=tensor(np.stack(rows.key_weight)),
            query_weight=tensor(np.stack(rows.query_weight)),
            state_token=tensor(rows.state_token, torch.int64),
            next_token=tensor(rows.next_token, torch.int64),
            discount=tensor(data.discount(1.0)),
        )

    @classmethod
    def stack(cls, prompts: Sequence[Prompt]) -> Prompt:
        """Batch prompts of one layout and one number of queries; shorter contexts get silent padding tokens."""
        if not prompts:
            raise InputError("prompts", "at least one prompt", "none")
        first = prompts[0]
        for prompt in prompts:
            if (prompt.layout, prompt.obs_dim, prompt.num_queries) != (first.layout, first.obs_dim, first.num_queries):
                raise InputError("prompts", "one layout, dimension and number of queries", "several", "pad the queries")
        length = max(p.tokens.shape[-2] for p in prompts)
        rows = max(p.state_token.shape[-1] for p in prompts)
        slices = channel_slices(first.layout, first.obs_dim)
        padding = first.tokens.new_zeros(first.tokens.shape[-1])  # (c,)
        padding[slices["one"]] = 1.0  # a zero key would still have weight exp(0) = 1
        for name in slices:
            if name.endswith("gate"):
                padding[slices[name]] = SILENT

        def pad(value: Tensor, fill: Tensor | float, size: int, queries: int) -> Tensor:
            missing = size - value.shape[0]
            block = torch.zeros_like(value[:1]).expand(missing, *value.shape[1:]) + fill
            return torch.cat([value[: len(value) - queries], block.to(value.dtype), value[len(value) - queries :]])

        def stacked(name: str, fill: Tensor | float, size: int, transpose: bool = False, queries: int = 0) -> Tensor:
            values = [getattr(p, name) for p in prompts]
            values = [v.mT if transpose else v for v in values]
            out = torch.stack([pad(v, fill, size, queries) for v in values])
            return out.mT if transpose else out

        m = first.num_queries
        return cls(
            layout=first.layout,
            obs_dim=first.obs_dim,
            num_queries=m,
            tokens=stacked("tokens", padding, length, queries=m),
            key_mask=stacked("key_mask", 0.0, length, transpose=True, queries=m),
            key_weight=stacked("key_weight", 0.0, length, transpose=True, queries=m),
            query_weight=stacked("query_weight", 0.0, length, transpose=True, queries=m),
            state_token=stacked("state_token", 0.0, rows),
            next_token=stacked("next_token", 0.0, rows),
            discount=stacked("discount", 0.0, rows),
        )

    @property
    def context_length(self) -> Int[Tensor, "*batch"]:
        """Number n of transitions in each context of the batch, padding left out."""
        return self.key_mask[..., 0, :].sum(-1)

    @property
    def _transition_mask(self) -> Bool[Tensor, "*batch n"]:
        """Which of the n transitions are real rather than padding."""
        rows = torch.arange(self.state_token.shape[-1], device=self.state_token.device)
        return rows < self.context_length[..., None]

    def channel(self, tokens: Tensor, name: str) -> Float[Tensor, "*batch t"]:
        """Return one scalar channel of a token matrix in this prompt's layout."""
        return tokens[..., channel_slices(self.layout, self.obs_dim)[name].start]

    def query_values(self, tokens: Float[Tensor, "*batch t c"]) -> Float[Tensor, "*batch m"]:
        """Read the queries' values out of a layer's tokens (claim P6): the value slot, or minus the residual slot."""
        slot = -self.channel(tokens, "residual") if self.layout == "residual" else self.channel(tokens, "value")
        return slot[..., slot.shape[-1] - self.num_queries :]

    def td_errors(self, tokens: Float[Tensor, "*batch t c"], gamma: float) -> Float[Tensor, "*batch n"]:
        """Read the context's TD errors ``r + gamma d (1 - terminated) V(s') - V(s)`` out of a layer's tokens; 0 for padding."""
        return self._td_errors(tokens, gamma) * self._transition_mask

    def mean_square(self, td: Float[Tensor, "*batch n"]) -> Float[Tensor, "*batch"]:
        """Return the mean squared TD error, weighted as the transitions are, in float64."""
        weight = self.key_weight[..., 0, :].gather(-1, self.state_token) * self._transition_mask
        return (weight * td.double().square()).sum(-1) / weight.sum(-1)

    def _td_errors(self, tokens: Tensor, gamma: float) -> Tensor:
        if self.layout == "residual":
            return self.channel(tokens, "residual").gather(-1, self.state_token)
        value = self.channel(tokens, "value")
        reward_token = self.next_token if self.layout == "trajectory" else self.state_token
        reward = self.channel(tokens, "reward").gather(-1, reward_token)
        if self.layout == "pair":  # its slot holds the discounted value
            bootstrap = self.channel(tokens, "other_value").gather(-1, self.next_token)
        else:
            bootstrap = self.discount * value.gather(-1, self.next_token)
        return reward + gamma * bootstrap - value.gather(-1, self.state_token)


@dataclass
class _Rows:
    """Channels and masks of all tokens in numpy; what a layout's builder returns."""

    channels: dict[str, NDArray[Any]]
    key_mask: list[NDArray[Any]]
    key_weight: list[NDArray[Any]]
    query_weight: list[NDArray[Any]]
    state_token: NDArray[Any]
    next_token: NDArray[Any]

    @property
    def length(self) -> int:
        return len(self.channels["one"])


def _log(weight: NDArray[Any]) -> NDArray[np.float64]:
    """Log of a weight as a gate: never -inf, since 0 * inf is NaN."""
    return np.log(np.maximum(weight, np.finfo(np.float64).tiny), where=weight > 0, out=np.full(weight.shape, SILENT))


def _points(point: NDArray[Any], other: NDArray[Any]) -> dict[str, NDArray[Any]]:
    return {
        "point": point,
        "other": other,
        "point_norm": np.square(point).sum(1),
        "other_norm": np.square(other).sum(1),
        "one": np.ones(len(point)),
    }


def _weights(data: Transitions) -> NDArray[np.float64]:
    return np.ones(len(data)) if data.sample_weight is None else data.sample_weight.astype(np.float64)


def _transition_rows(data: Transitions, queries: NDArray[Any], gate_queries: bool) -> _Rows:
    """Layouts "pair" and "residual": one token per transition, then the queries."""
    n, m = len(data), len(queries)
    weight, discount = _weights(data), data.discount(1.0)
    none, every = np.zeros(m), np.ones(n + m)
    query_discount = none if gate_queries else np.ones(m)
    key_weight = np.concatenate([weight, none])
    next_weight = np.concatenate([discount, query_discount])
    mask = np.arange(n + m) < n
    reward = np.concatenate([data.rewards, none])
    point = np.concatenate([data.observations, queries])
    other = np.concatenate([data.next_observations, np.zeros_like(queries)])
    gates = {"key_gate": _log(key_weight), "next_gate": _log(next_weight), "reward": reward}
    index = np.arange(n)
    return _Rows(_points(point, other) | gates, [mask] * 2, [key_weight] * 2, [every, next_weight], index, index)


def _residual_rows(data: Transitions, queries: NDArray[Any], gate_queries: bool) -> _Rows:
    rows = _transition_rows(data, queries, gate_queries)
    rows.channels["residual"] = rows.channels["reward"]  # V = 0: the TD error is the reward
    return rows


def _trajectory_rows(data: Transitions, queries: NDArray[Any], gate_queries: bool) -> _Rows:
    """One token per visited state: T + 1 for an episode of T transitions."""
    states, previous, source = [], [], []  # source: row of the transition that arrives at the token, or -1
    state_token = np.empty(len(data), np.int64)
    for rows in data.episode_rows:
        index = np.arange(len(data))[rows]
        index = index[np.argsort(data.steps[index], kind="stable")]
        broken = np.flatnonzero((data.next_observations[index[:-1]] != data.observations[index[1:]]).any(axis=1))
        if len(broken):
            raise InputError(
                "layout 'trajectory'",
                "episodes in which each next observation is the following row's observation",
                f"another one after row {index[broken[0]]}",
                "use layout 'pair', 'residual' or 'two_group' for arbitrary transitions",
            )
        state_token[index] = len(source) + np.arange(len(index))
        visited = np.concatenate([data.observations[index], data.next_observations[index[-1:]]])
        states.append(visited)
        previous.append(np.concatenate([np.zeros_like(visited[:1]), visited[:-1]]))
        source.extend([-1, *index])
    arrives = np.array(source)
    t, m = len(arrives), len(queries)
    weight, discount = _weights(data), data.discount(1.0)
    leaving, arriving, bootstrap = np.zeros(t + m), np.zeros(t + m), np.zeros(t + m)
    reward = np.zeros(t + m)
    leaving[state_token] = weight
    incoming = np.flatnonzero(arrives >= 0)
    arriving[incoming] = weight[arrives[incoming]]
    bootstrap[incoming] = (weight * discount)[arrives[incoming]]
    reward[incoming] = data.rewards[arrives[incoming]]
    has_next, has_previous = np.zeros(t + m, bool), np.zeros(t + m, bool)
    has_next[state_token], has_previous[incoming] = True, True
    channels = _points(np.concatenate([*states, queries]), np.concatenate([*previous, np.zeros_like(queries)]))
    channels |= {
        "out_gate": _log(leaving),
        "in_gate": _log(arriving),
        "bootstrap_gate": _log(bootstrap),
        "reward": reward,
    }
    masks = [has_next, has_previous, has_previous]
    return _Rows(channels, masks, [leaving, arriving, bootstrap], [np.ones(t + m)] * 3, state_token, state_token + 1)


def _two_group_rows(data: Transitions, queries: NDArray[Any], gate_queries: bool) -> _Rows:
    """Tokens A_j, which carry V(s_j), then B_j, which carry V(s'_j), then the queries."""
    n, m = len(data), len(queries)
    weight, discount = _weights(data), data.discount(1.0)
    none = np.zeros(n)
    query_zeros = np.zeros(m)
    state_weight = np.concatenate([weight, none, query_zeros])
    next_weight = np.concatenate([none, weight * discount, query_zeros])
    point = np.concatenate([data.observations, data.observations, queries])
    other = np.concatenate([data.observations, data.next_observations, queries])
    reward = np.concatenate([data.rewards, none, query_zeros])
    channels = _points(point, other) | {
        "state_gate": _log(state_weight),
        "next_gate": _log(next_weight),
        "reward": reward,
    }
    position = np.arange(2 * n + m)
    masks = [position < n, (position >= n) & (position < 2 * n)]
    every = [np.ones(2 * n + m)] * 2
    return _Rows(channels, masks, [state_weight, next_weight], every, np.arange(n), n + np.arange(n))


_BUILDERS: dict[Layout, Callable[[Transitions, NDArray[Any], bool], _Rows]] = {
    "pair": _transition_rows,
    "residual": _residual_rows,
    "trajectory": _trajectory_rows,
    "two_group": _two_group_rows,
}
