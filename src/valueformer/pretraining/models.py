"""What trains: heads of kernel TD whose constants are parameters, or attention matrices without any constraint."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from valueformer.errors import InputError
from valueformer.estimator import ValueFormer
from valueformer.feature_prompt import FeaturePrompt
from valueformer.kernels import AttentionKernel, ExpDot, HeadKernel, Kernel, Linear, ReLU, Softmax
from valueformer.mixing import gate
from valueformer.pretraining.batch import KernelBatch, WindowBatch, second_moments
from valueformer.pretraining.config import Activation, PretrainConfig
from valueformer.solvers import Context, StepSchedule, iterate
from valueformer.transformer import AttentionBlock, Head, Transformer

__all__ = ["KernelTD", "MatrixTransformer", "linear_td_weights", "matrix_stack"]

_METRIC_RANGE = math.log(4.0)


class KernelTD(nn.Module):
    """Heads of kernel TD that differ from constructed ones in trained numbers only: the solver's own layers, differentiated.

    Parameters are kept in bounds: relative steps ``bound * sigmoid(x)``, temperatures ``start * range^tanh(x)``, weights of
    coordinates ``4^tanh(x)``, mixing weights ``softmax(x)``. Numbers that do not train are buffers.
    """

    def __init__(self, config: PretrainConfig, obs_dim: int) -> None:
        super().__init__()
        self.config = config
        heads = len(config.heads)
        rng = torch.Generator().manual_seed(config.seed)
        low, high = config.step_start
        start = low + (high - low) * torch.rand(config.num_layers, heads, generator=rng, dtype=torch.float64)
        plain = config.step_unit == "plain"
        raw = (start / config.context_length).log() if plain else torch.logit(start / config.step_bound)
        if "steps" not in config.train:
            raw = raw.new_zeros(raw.shape)  # step 1, or 1 / n: see schedule()
        self._own("raw_steps", raw, "steps")
        self._own("raw_temperatures", torch.zeros(heads, dtype=torch.float64), "temperatures")
        self._own("raw_mixing", torch.zeros(heads + 1, dtype=torch.float64), "mixing")
        if "metric" in config.train:
            rank = config.metric_rank
            free = torch.randn(rank, obs_dim, generator=rng, dtype=torch.float64) / math.sqrt(max(rank, 1))
            self._own("raw_metric", free if rank else torch.zeros(obs_dim, dtype=torch.float64), "metric")
        for head in config.heads:
            if "temperatures" in config.train and not hasattr(head.kernel, "temperature"):
                raise InputError("train", "heads of a single kernel with a temperature", str(head.kernel), "leave it out")

    def _own(self, name: str, value: Tensor, what: str) -> None:
        if what in self.config.train:
            self.register_parameter(name, nn.Parameter(value))
        else:
            self.register_buffer(name, value)

    def schedule(self) -> StepSchedule:
        """Return the steps, ``(L, h)``, in their unit."""
        raw = cast(Tensor, self.raw_steps)
        plain = self.config.step_unit == "plain"
        if "steps" not in self.config.train:
            factors = torch.ones_like(raw) / (self.config.context_length if plain else 1)
        else:
            factors = raw.exp() if plain else self.config.step_bound * torch.sigmoid(raw)
        return StepSchedule(self.config.step_unit, factors)

    def scales(self) -> Float[Tensor, " h"]:
        """Return each head's temperature over that at the start."""
        return torch.exp(math.log(self.config.temperature_range) * torch.tanh(cast(Tensor, self.raw_temperatures)))

    def metric(self) -> Tensor | None:
        """Return the weights of the coordinates ``(d,)``, or a map ``(k, d)``; None: none trains."""
        if "metric" not in self.config.train:
            return None
        raw = cast(Tensor, self.raw_metric)
        return raw if raw.ndim == 2 else torch.exp(_METRIC_RANGE * torch.tanh(raw))

    def mixing(self) -> Float[Tensor, " h1"] | None:
        """Return the trained head weights, the last one the constant's; None: the gate reads them off the context."""
        return torch.softmax(cast(Tensor, self.raw_mixing), 0) if "mixing" in self.config.train else None

    @property
    def gated(self) -> bool:
        """Whether heads are mixed in context, by their TD errors on folds left out."""
        return len(self.config.heads) > 1 and "mixing" not in self.config.train

    def values(self, batch: KernelBatch, guard: bool | None = None) -> tuple[Float[Tensor, "B q"], Float[Tensor, "B q"]]:
        """Return V at the queries and at their successors, in units of each task's rewards; ``guard`` None: as configured."""
        matrix, asked = self._matrices(batch)  # (B, h, 2 n, n), (B, h, 2 q, n)
        tasks, heads = matrix.shape[:2]

        def per_head(x: Tensor) -> Tensor:
            return x[:, None].expand(-1, heads, -1, -1).flatten(0, 1)  # (B h, c, n)

        context = Context.of_tasks(
            [head.kernel for head in self.config.heads] * tasks,
            matrix.flatten(0, 1),
            rewards=per_head(batch.rewards),
            discount=per_head(batch.discounts[:, None]),
            weight=per_head(batch.weights),
        )
        schedule = self.schedule()
        factors = cast(Tensor, schedule.factors).repeat(1, tasks)  # (L, B h)
        path = iterate(
            context,
            step_size=StepSchedule(schedule.unit, factors),
            num_layers=self.config.num_layers,
            guard=self.config.guard if guard is None else guard,
        )
        a = path.dual_coef.unflatten(0, (tasks, heads))  # (B, h, c, n)
        weights = self._weights(batch, path.td.unflatten(0, (tasks, heads)))  # (B, h + 1)
        by_head = torch.einsum("bhpn,bhn->bhp", asked, a[:, :, 0])
        values = batch.levels[:, None] + torch.einsum("bhp,bh->bp", by_head, weights[:, :-1].to(by_head))
        return tuple(values.chunk(2, dim=1))  # type: ignore[return-value]

    def _matrices(self, batch: KernelBatch) -> tuple[Tensor, Tensor]:
        scores: dict[Any, Tensor] = {}
        kernels, metric, scales = [], self.metric(), self.scales()
        for head, scale in zip(self.config.heads, scales, strict=True):
            kernel = cast(AttentionKernel, head.kernel)
            kind = (head.scaler, kernel.score, kernel.has_kink)
            if kind not in scores:
                states, following, points = (self._measured(x, metric) for x in batch.views[head.scaler])
                scores[kind] = kernel.scores(torch.cat([states, following, points], dim=1), states)  # (B, 2 n + 2 q, n)
            kernels.append(kernel.activation(scores[kind] / scale.to(scores[kind])))
        every = torch.stack(kernels, dim=1)  # (B, h, 2 n + 2 q, n)
        n = every.shape[-1]
        return every[:, :, : 2 * n], every[:, :, 2 * n :]

    @staticmethod
    def _measured(states: Tensor, metric: Tensor | None) -> Tensor:
        if metric is None:
            return states
        own = metric.to(states)
        return states * own if own.ndim == 1 else states @ own.mT

    def _weights(self, batch: KernelBatch, td: Float[Tensor, "B h c n"]) -> Float[Tensor, "B h1"]:
        tasks = len(td)
        given = self.mixing()
        if given is not None:
            return given.expand(tasks, -1)
        if batch.fold is None:
            return torch.cat([td.new_ones(tasks, 1), td.new_zeros(tasks, 1)], dim=1).double()
        rows = torch.arange(td.shape[-1])
        weights = []
        for errors, constant, fold in zip(td, batch.rewards, batch.fold, strict=True):
            left_out = torch.cat([errors[:, 1 + fold, rows], constant[1 + fold, rows][None]])  # (h + 1, n)
            weights.append(gate(left_out.mT, None, "context"))
        return torch.stack(weights)

    def frozen(self) -> ValueFormer:
        """Return the model as it is now, as an estimator: what is saved and used."""
        with torch.no_grad():
            steps = cast(Tensor, self.schedule().factors).double()
            given, metric = self.mixing(), self.metric()
            scales = self.scales().tolist()
        heads = []
        for head, scale in zip(self.config.heads, scales, strict=True):
            kernel: Kernel = head.kernel
            if "temperatures" in self.config.train:
                kernel = dataclasses.replace(cast(Any, kernel), temperature=cast(Any, kernel).temperature * scale)
            heads.append(dataclasses.replace(head, kernel=kernel))
        return ValueFormer(
            kernel=heads,
            num_layers=self.config.num_layers,
            step_size=StepSchedule(self.config.step_unit, tuple(map(tuple, steps.tolist()))),
            gamma=self.config.gamma,
            mix="context" if given is None else tuple(given.tolist()),
            metric=None if metric is None else np.asarray(metric.tolist()),
        )


class MatrixTransformer(nn.Module):
    """Attention without constraints on the prompt of Wang et al. (2025): ``Z <- Z + mean_j h(z_i^T Q^T K z_j) V z_j``.

    ``value``: ``(s, l, c, c)``, and ``product`` = K^T Q, or ``key`` and ``query``, likewise, for s models side by side and one
    set of matrices (tied, "auto" there) or L. Their P is ``value``, their Q is ``product``.
    """

    def __init__(self, config: PretrainConfig, obs_dim: int) -> None:
        super().__init__()
        self.num_layers = config.num_layers
        self.activation: Activation = config.activation
        width, sets = 2 * obs_dim + 1, 1 if config.tied else config.num_layers
        gain = config.gain if config.tied else config.gain / config.num_layers
        gains = {"value": gain, "product": gain}
        if config.factored:
            gains = {"value": gain, "key": math.sqrt(gain), "query": math.sqrt(gain)}
        dtype = getattr(torch, config.dtype)
        drawn: dict[str, list[Tensor]] = {name: [] for name in gains}
        for model in range(config.models):  # a model's start does not depend on how many are trained beside it
            rng = torch.Generator().manual_seed(config.seed + model)
            for name, gain in gains.items():
                matrix = torch.randn(sets, width, width, generator=rng, dtype=torch.float64)
                drawn[name].append(matrix * gain / math.sqrt(width))  # Glorot's normal law with a gain
        for name, matrices in drawn.items():
            self.register_parameter(name, nn.Parameter(torch.stack(matrices).to(dtype)))

    def layers(self) -> list[tuple[Tensor, Tensor]]:
        """Return value and product matrices ``(s, c, c)`` of every layer."""
        value = cast(Tensor, self.value)
        factored = hasattr(self, "key")
        product = cast(Tensor, self.key).mT @ cast(Tensor, self.query) if factored else cast(Tensor, self.product)
        pairs = [(value[:, i], product[:, i]) for i in range(value.shape[1])]
        return pairs if len(pairs) > 1 else pairs * self.num_layers

    def values(self, batch: WindowBatch) -> tuple[Float[Tensor, "s w"], Float[Tensor, "s w"]]:
        """Return each window's value of the state after it, and the next window's value of that state's successor."""
        if self.activation == "linear":
            weights = self.weights(batch.moments)  # (s, W + 1, d)
            return (batch.queries * weights[:, :-1]).sum(-1), (batch.successors * weights[:, 1:]).sum(-1)
        zero = torch.zeros_like(batch.queries[:, :1])
        asked = (torch.cat([batch.queries, zero], dim=1), torch.cat([zero, batch.successors], dim=1))
        values = self.values_at(batch.contexts, torch.stack(asked, dim=2))  # (s, W + 1, 2)
        return values[:, :-1, 0], values[:, 1:, 1]

    def values_at(self, contexts: Float[Tensor, "s w n c"], points: Float[Tensor, "s w m d"]) -> Float[Tensor, "s w m"]:
        """Return V at points, from each context."""
        if self.activation == "linear":
            return (points @ self.weights(second_moments(contexts))[..., None])[..., 0]
        return self.transformer()(FeaturePrompt.of(contexts, points)).query_values

    def weights(self, moments: Float[Tensor, "s w c c"]) -> Float[Tensor, "s w d"]:
        """Return the weights w of ``V(s) = <w, s>`` that linear attention computes from contexts' second moments alone.

        A layer multiplies every token by ``I + A``, ``A = Q^T S V^T``, S the mean of ``z z^T``; so it turns S into
        ``(I + A)^T S (I + A)``, and ``-V(s)`` is the last channel of ``[s; 0; 0] (I + A_1) .. (I + A_L)``.
        """
        _, windows, width, _ = moments.shape
        layers, steps = self.layers(), []
        for value, product in layers[:-1]:
            right = moments.flatten(1, 2) @ product  # (s, w c, c): S K^T Q, one product per model
            step = right.unflatten(1, (windows, width)).mT.flatten(1, 2) @ value.mT
            step = step.unflatten(1, (windows, width))  # (s, w, c, c)
            steps.append(step)
            moments = moments + moments @ step
            moments = moments + step.mT @ moments
        value, product = layers[-1]  # of the last layer only the last channel is read
        read = (moments.flatten(1, 2) @ value[:, -1, :, None]).unflatten(1, (windows, width))  # (s, w, c, 1): S V^T e_y
        column = (read.flatten(2) @ product).unsqueeze(-1)  # (s, w, c, 1): Q^T S V^T e_y
        column = torch.cat([column[..., :-1, :], column[..., -1:, :] + 1.0], dim=-2)
        for step in reversed(steps):
            column = column + step @ column
        return -column[..., : (width - 1) // 2, 0]

    def transformer(self, model: int | None = None) -> Transformer:
        """Return the literal stack of one model, or of all side by side, for prompts ``(s, w, ..)``."""
        if model is not None:
            return matrix_stack([(value[model], product[model]) for value, product in self.layers()], self.activation)
        return matrix_stack([(value[:, None], product[:, None]) for value, product in self.layers()], self.activation)


def matrix_stack(layers: Sequence[tuple[Tensor, Tensor]], activation: Activation) -> Transformer:
    """Return the attention stack of value and product matrices ``(*models, c, c)``, for a :class:`FeaturePrompt`."""
    kernels: dict[Activation, AttentionKernel] = {
        "linear": Linear(), "relu": ReLU(), "exp": ExpDot(), "softmax": Softmax(ExpDot()),
    }  # fmt: skip
    heads = [Head(HeadKernel(1.0, (kernels[activation],)), 0, False)]
    blocks = []
    for value, product in layers:
        eye = torch.eye(value.shape[-1], dtype=value.dtype, device=value.device)
        key = eye.expand_as(product)[..., None, :, :]  # the score is z_j^T (K^T Q) z_i: the product stands in for Q
        blocks.append(
            AttentionBlock(heads, key=key, query=product[..., None, :, :], value=value[..., None, :, :], residual=eye)
        )
    return Transformer(blocks, layout="feature", gamma=1.0)


def linear_td_weights(moments: Float[Tensor, "s w c c"], step_size: Float[Tensor, " s"], layers: int) -> Float[Tensor, "s w d"]:
    """Return the weights after L layers of batch TD, ``w <- w + alpha mean_j delta_j s_j`` from w = 0 (Wang et al. 2025)."""
    d = (moments.shape[-1] - 1) // 2
    operator = moments[..., :d, :d] - moments[..., :d, d : 2 * d]  # (s, w, d, d): mean of s (s - gamma s')^T
    target = moments[..., :d, 2 * d :]  # (s, w, d, 1): mean of s r
    weights = torch.zeros_like(target)
    alpha = step_size[:, None, None, None]
    for _ in range(layers):
        weights = weights + alpha * (target - operator @ weights)
    return weights[..., 0]
