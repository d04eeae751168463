"""From theorem to weights: key, query and value matrices with which attention performs kernel TD (claim P5, theory 1).

| layout     | keys read        | queries read | value matrix                                              |
|------------|------------------|--------------|-----------------------------------------------------------|
| pair       | s_j              | s_i          | value <- alpha (reward + gamma other_value - value)       |
|            | s_j              | s'_i         | other_value <- the same                                   |
| residual   | s_j              | s_i          | residual <- -alpha residual                               |
|            | s_j              | s'_i         | residual <- +alpha gamma residual                         |
| trajectory | s_j              | s_i          | value <- -alpha value                                     |
|            | s_{j-1}          | s_i          | value <- alpha reward                                     |
|            | s_{j-1}          | s_i          | value <- alpha gamma value                                |
| two_group  | s_j of A tokens  | s_i or s'_i  | value <- alpha (reward - value)                           |
|            | s_j of B tokens  | s_i or s'_i  | value <- alpha gamma value                                |

The paper's two trajectory heads are three here: splitting the target's reward from its bootstrap lets a gate carry terminals
and per-transition discounts; without them the last two merge. Terminal tokens need no update mask, since nothing reads their
value. A kernel that is a sum of attention heads repeats the table for each of its terms.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from valueformer.arguments import check_gamma, check_ridge, check_steps
from valueformer.errors import InputError
from valueformer.kernels import RBF, ExpDot, HeadKernel, Kernel, Softmax
from valueformer.prompt import CHANNELS, Layout, channel_slices
from valueformer.streams import stream_slices
from valueformer.transformer import AttentionBlock, Head, Transformer

__all__ = ["construct", "construct_streams"]


@dataclass(frozen=True)
class _Role:
    """One row of the table above: the channels a head reads, and its value map {(to, from): coefficient of alpha}."""

    key: str
    key_gate: str
    query: str
    query_gate: str | None
    value: dict[tuple[str, str], float]


def _roles(layout: Layout, gamma: float) -> list[_Role]:
    if layout == "pair":
        error = {"reward": 1.0, "other_value": gamma, "value": -1.0}
        return [
            _Role("point", "key_gate", "point", None, {("value", c): x for c, x in error.items()}),
            _Role("point", "key_gate", "other", "next_gate", {("other_value", c): x for c, x in error.items()}),
        ]
    if layout == "residual":
        return [
            _Role("point", "key_gate", "point", None, {("residual", "residual"): -1.0}),
            _Role("point", "key_gate", "other", "next_gate", {("residual", "residual"): gamma}),
        ]
    if layout == "trajectory":
        return [
            _Role("point", "out_gate", "point", None, {("value", "value"): -1.0}),
            _Role("other", "in_gate", "point", None, {("value", "reward"): 1.0}),
            _Role("other", "bootstrap_gate", "point", None, {("value", "value"): gamma}),
        ]
    return [
        _Role("point", "state_gate", "other", None, {("value", "reward"): 1.0, ("value", "value"): -1.0}),
        _Role("point", "next_gate", "other", None, {("value", "value"): gamma}),
    ]


def construct(
    kernel: Kernel,
    *,
    layout: Layout = "pair",
    gamma: float,
    step_size: float | Sequence[float],
    num_layers: int,
    ridge: float = 0.0,
    obs_dim: int | None = None,
    dtype: torch.dtype = torch.float64,
) -> Transformer:
    """Return the transformer whose l-th layer is the l-th step of kernel TD from V = 0, with exactly these step sizes.

    ``step_size``: > 0, one number or one per layer; ``ridge`` >= 0 makes the residual stream leak.
    In the limit V(x) = k_x (G + ridge I)^{-1} r (theory 3).
    ``obs_dim`` None: the matrices are built, in the prompt's dtype, for the first prompt that the transformer sees.
    Raises InputError for arguments out of range and for kernels that no attention head computes.
    """
    check_gamma(gamma)
    if layout not in CHANNELS:
        raise InputError("layout", " | ".join(CHANNELS), repr(layout))
    check_ridge(ridge)
    steps = check_steps(step_size, num_layers)
    build = _Builder(tuple(kernel.heads()), layout, gamma, tuple(steps), ridge)
    return Transformer(build if obs_dim is None else build(obs_dim, dtype), layout=layout, gamma=gamma)


def construct_streams(
    kernels: Sequence[Kernel],
    *,
    views: Sequence[int],
    layout: Layout = "pair",
    gamma: float,
    step_sizes: Float[Tensor, "l h b"],
    ridge: float = 0.0,
    obs_dim: int,
    dtype: torch.dtype = torch.float64,
) -> Transformer:
    """Return the transformer that runs every head on every column of a :class:`StreamPrompt`, each with its own steps.

    ``views``: the view that each head reads; a step of 0 is a layer that leaves its stream as it is. Layers with equal steps
    are one module.
    """
    check_gamma(gamma)
    check_ridge(ridge)
    slices, width = stream_slices(layout, obs_dim, views, step_sizes.shape[-1])
    roles = _roles(layout, gamma)
    own = [tuple(kernel.heads()) for kernel in kernels]
    blocks: dict[tuple[float, ...], AttentionBlock] = {}
    layers = []
    for steps in step_sizes.double():
        key = tuple(steps.flatten().tolist())
        if key not in blocks:
            streams = [
                _Stream(own[h], slices[h][c], float(step), c * len(roles))
                for h, row in enumerate(steps)
                for c, step in enumerate(row)
            ]
            blocks[key] = _block(streams, roles, ridge, obs_dim, width).to(dtype)
        layers.append(blocks[key])
    return Transformer(layers, layout=layout, gamma=gamma)


@dataclass(frozen=True)
class _Builder:
    """The blocks of a construction, as a function of the states' dimension."""

    kernels: tuple[HeadKernel, ...]
    layout: Layout
    gamma: float
    steps: tuple[float, ...]
    ridge: float

    def __call__(self, obs_dim: int, dtype: torch.dtype) -> list[AttentionBlock]:
        roles, slices = _roles(self.layout, self.gamma), channel_slices(self.layout, obs_dim)
        width = slices[CHANNELS[self.layout][-1]].stop
        streams = [[_Stream(self.kernels, slices, step, 0)] for step in self.steps]
        return [_block(one, roles, self.ridge, obs_dim, width).to(dtype) for one in streams]


@dataclass(frozen=True)
class _Stream:
    """What one step of kernel TD reads and writes: attention heads, channels, step size, and its first role's masks."""

    kernels: tuple[HeadKernel, ...]
    slices: dict[str, slice]
    step: float
    first_role: int


def _block(streams: Sequence[_Stream], roles: list[_Role], ridge: float, obs_dim: int, width: int) -> AttentionBlock:
    heads, keys, queries, values = [], [], [], []
    residual = torch.eye(width, dtype=torch.float64)
    for stream in streams:
        slices = stream.slices
        for kernel in stream.kernels:
            for number, role in enumerate(roles):
                activation, gated, key, query = _projections(kernel, role, slices, width, obs_dim)
                value = torch.zeros(width, width, dtype=torch.float64)  # (c to, c from)
                for (to, source), coefficient in role.value.items():
                    value[slices[to], slices[source]] = stream.step * kernel.coefficient * coefficient
                heads.append(Head(activation, stream.first_role + number, gated))
                keys.append(key)
                queries.append(query)
                values.append(value)
        for slot in ("value", "other_value", "residual"):
            if slot in slices:
                residual[slices[slot], slices[slot]] -= stream.step * ridge
        if "residual" in slices:  # y = r - M a: the rewards leak back in
            residual[slices["residual"], slices["reward"]] = stream.step * ridge
    return AttentionBlock(
        heads, key=torch.stack(keys), query=torch.stack(queries), value=torch.stack(values), residual=residual
    )


def _projections(
    kernel: HeadKernel, role: _Role, slices: dict[str, slice], width: int, obs_dim: int
) -> tuple[HeadKernel, bool, Tensor, Tensor]:
    """Return the activation, whether tokens gate it, and the key and query matrices ``(k, c)``.

    Exponential kernels: exp(<Kz, Qz>) with the norms and gates inside the score. Radial kernels: the score is |x - y|^2.
    """
    d, one = obs_dim, slices["one"]
    key = torch.zeros(d + 2, width, dtype=torch.float64)
    query = torch.zeros(d + 2, width, dtype=torch.float64)
    key[:d, slices[role.key]] = query[:d, slices[role.query]] = torch.eye(d, dtype=torch.float64)
    factor = kernel.factors[0]
    inner = factor.kernel if isinstance(factor, Softmax) else factor
    if len(kernel.factors) > 1 or not isinstance(inner, (RBF, ExpDot)):
        if kernel.score == "sqdist":  # |x|^2 - 2 <x, y> + |y|^2
            key[:d] *= -2.0
            key[d, slices[f"{role.key}_norm"]] = query[d + 1, slices[f"{role.query}_norm"]] = 1.0
            key[d + 1, one] = query[d, one] = 1.0
        return kernel, False, key, query
    key[d + 1, one] = query[d, one] = 1.0
    key[:d] /= inner.temperature**0.5
    query[:d] /= inner.temperature**0.5
    if isinstance(inner, RBF):
        key[d, slices[f"{role.key}_norm"]] = -0.5 / inner.temperature
        query[d + 1, slices[f"{role.query}_norm"]] = -0.5 / inner.temperature
    if kernel.normalised:  # a bias on the query cancels under softmax: masks do the work
        return HeadKernel(1.0, (Softmax(ExpDot(1.0)),)), False, key, query
    key[d, slices[role.key_gate]] = 1.0
    if role.query_gate is not None:
        query[d + 1, slices[role.query_gate]] = 1.0
    return HeadKernel(1.0, (ExpDot(1.0),)), True, key, query
