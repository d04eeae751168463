"""The attention block and the stack: one forward pass for weights of every origin, constructed or trained.

    Z <- Z R^T + sum_h diag(mq_h) A_h diag(mk_h) Z V_h^T,      A_h[i, j] = h(<Q_h z_i, K_h z_j>)

Rows of Z are tokens, i the query and j the key; no layer normalisation, no MLP (theory 1). R is the residual
stream, the identity unless it leaks (ridge).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from valueformer.errors import InputError
from valueformer.feature_prompt import FeaturePrompt
from valueformer.kernels import HeadKernel
from valueformer.kernels.families import ROUNDING_ERRORS
from valueformer.prompt import Layout, Prompt
from valueformer.streams import StreamPrompt

__all__ = ["AttentionBlock", "Head", "Transformer", "TransformerOutput"]

AnyPrompt = Prompt | StreamPrompt | FeaturePrompt


@dataclass(frozen=True)
class Head:
    """What a head does with its scores: the activation, the role whose masks it obeys, and whether tokens gate it."""

    kernel: HeadKernel
    role: int
    gated: bool
    """True: gates are channels that the score already contains (exponential heads). False: masks."""


class AttentionBlock(nn.Module):
    """One layer of attention, one step of kernel TD when its matrices are constructed.

    ``key``, ``query``: ``(heads, k, c)``; ``value``: ``(heads, c, c)``; ``residual``: ``(c, c)``. Leading dimensions are
    models side by side, one per batch entry of the prompt. Tensors become buffers (frozen), parameters stay parameters.
    """

    key: Tensor
    query: Tensor
    value: Tensor
    residual: Tensor

    def __init__(self, heads: Sequence[Head], *, key: Tensor, query: Tensor, value: Tensor, residual: Tensor) -> None:
        super().__init__()
        self.heads = tuple(heads)
        for name, matrix in (("key", key), ("query", query), ("value", value), ("residual", residual)):
            if isinstance(matrix, nn.Parameter):
                self.register_parameter(name, matrix)
            else:
                self.register_buffer(name, matrix)

    def forward(self, tokens: Float[Tensor, "*batch t c"], prompt: AnyPrompt) -> Float[Tensor, "*batch t c"]:
        """Return the next layer's tokens; ``prompt`` supplies the masks."""
        stream = tokens @ self.residual.mT
        for h in range(len(self.heads)):
            attention = self.attention(h, tokens, prompt)  # (..., t queries, t keys)
            stream = stream + attention @ (tokens @ self.value[..., h, :, :].mT)
        return stream

    def attention(self, h: int, tokens: Float[Tensor, "*batch t c"], prompt: AnyPrompt) -> Float[Tensor, "*batch t t"]:
        """Return head h's attention matrix, queries by keys."""
        head = self.heads[h]
        queries = tokens @ self.query[..., h, :, :].mT  # (..., t, k)
        keys = tokens @ self.key[..., h, :, :].mT  # (..., t, k)
        score = queries @ keys.mT  # (..., t, t)
        if head.kernel.score == "sqdist":
            score = _nonnegative(score, queries, keys, flush=head.kernel.has_kink)
        key_mask = prompt.key_mask[..., head.role, None, :]  # (..., 1, t)
        if head.gated:  # the score holds the weights already
            return head.kernel.activation(score.masked_fill(~key_mask, -torch.inf))
        if head.kernel.normalised:
            logits = head.kernel.factors[0].log_activation(score)
            weights = torch.softmax(logits.masked_fill(~key_mask, -torch.inf), dim=-1)
        else:
            weights = head.kernel.activation(score).masked_fill(~key_mask, 0.0)
        return weights * prompt.key_weight[..., head.role, None, :] * prompt.query_weight[..., head.role, :, None]


def _nonnegative(score: Tensor, queries: Tensor, keys: Tensor, flush: bool) -> Tensor:
    """Clamp squared distances at zero; where a kink amplifies it, flush what is within its own rounding error."""
    if flush:  # in float64: squares of a far query's norm would overflow
        far, near = (torch.linalg.vector_norm(x.double(), dim=-1) for x in (queries, keys))
        rounding = ROUNDING_ERRORS * torch.finfo(score.dtype).eps * far[..., :, None] * near[..., None, :]
        score = score.masked_fill(score <= rounding.to(score.dtype), 0.0)
    return score.clamp_min(0.0)


@dataclass(frozen=True, eq=False)
class TransformerOutput:
    """What a forward pass read and how it got there."""

    query_values: Tensor
    """``(..., m)`` V at the queries after the last layer."""
    trace: Tensor
    """``(L, ..., m)`` V at the queries after each layer."""
    td_error: Tensor
    """``(L, ...)`` mean squared TD error on the context after each layer, weighted as the transitions are."""
    td_errors: Tensor
    """``(L, ..., n)`` the TD errors themselves."""
    tokens: Tensor
    """``(..., t, c)`` the last layer's tokens."""


class Transformer(nn.Module):
    """A stack of attention blocks that evaluates the policy behind a context, in one forward pass.

    ``layers``: blocks, or a function of (obs_dim, dtype) that makes them for the first prompt seen.
    """

    def __init__(
        self,
        layers: Sequence[AttentionBlock] | Callable[[int, torch.dtype], Sequence[AttentionBlock]],
        *,
        layout: Layout | Literal["feature"],
        gamma: float,
    ) -> None:
        super().__init__()
        self.layout: Layout | Literal["feature"] = layout
        self.gamma = gamma
        self._build = layers if callable(layers) else None
        self.layers = nn.ModuleList([] if callable(layers) else layers)  # of AttentionBlock

    def forward(self, prompt: AnyPrompt) -> TransformerOutput:
        """Run all layers on a prompt. Raises InputError if the prompt's layout, width or dtype is another one."""
        if not len(self.layers) and self._build is not None:
            built = self._build(prompt.obs_dim, prompt.tokens.dtype)
            self.layers.extend(block.to(prompt.tokens.device) for block in built)
        self._check(prompt)
        tokens, trace, errors = prompt.tokens, [], []
        for block in self.layers:
            tokens = block(tokens, prompt)
            trace.append(prompt.query_values(tokens))
            errors.append(prompt.td_errors(tokens, self.gamma))
        squares = torch.stack([prompt.mean_square(td) for td in errors])
        return TransformerOutput(trace[-1], torch.stack(trace), squares, torch.stack(errors), tokens)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the matrices; raises InputError before they exist (obs_dim was not given and no prompt was seen)."""
        self._require_layers()
        return super().state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load matrices; raises InputError before they exist."""
        self._require_layers()
        return super().load_state_dict(*args, **kwargs)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        self._require_layers()  # .to(dtype) would silently do nothing
        return super()._apply(*args, **kwargs)

    def _require_layers(self) -> None:
        if not len(self.layers):
            raise InputError("transformer", "matrices", "none yet", "pass obs_dim to construct, or run a prompt first")

    def _check(self, prompt: AnyPrompt) -> None:
        if prompt.layout != self.layout:
            raise InputError("prompt.layout", repr(self.layout), repr(prompt.layout), "build both with one layout")
        residual = cast(AttentionBlock, self.layers[0]).residual
        if prompt.tokens.shape[-1] != residual.shape[-1]:
            raise InputError("prompt.tokens", f"{residual.shape[-1]} channels", str(prompt.tokens.shape[-1]), "same obs_dim")
        if prompt.tokens.device != residual.device:
            raise InputError(
                "prompt.tokens", f"device {residual.device}", str(prompt.tokens.device), "build both on one device"
            )
        if prompt.tokens.dtype != residual.dtype:
            raise InputError("prompt.tokens", str(residual.dtype), str(prompt.tokens.dtype), "call transformer.to(dtype)")
