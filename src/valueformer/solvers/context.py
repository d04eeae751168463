"""The kernel matrices of a context, and the linear operator that one layer applies."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from valueformer.arguments import check_states
from valueformer.errors import InputError
from valueformer.kernels import AttentionKernel, Kernel
from valueformer.transitions import Transitions

__all__ = ["Context", "distinct_rows", "distinct_states", "evaluate_kernel_sum", "kernel_matrices", "matrix_bytes", "memory"]

_POWER_ITERATIONS = 10
_WARM_ITERATIONS = 3
_BATCHED = 1024  # up to this length one batched product is the fastest
_TILE = 1 << 19  # kernel entries evaluated at a time: intermediates stay in cache instead of tripling peak memory


class Context:
    """Kernel matrices of a context, built once: per head, rows are its distinct states, columns the kernel centres s_j.

    In contiguous episodes s'_j is s_{j+1}, so one (n + episodes) x n matrix holds both K and K' and a layer reads it once.
    ``h`` heads run side by side, each with its own kernel of its own ``view`` of the states; ``b`` columns (folds,
    bootstrap replicates) share each matrix and differ by their weights and rewards alone.

    ``views``: per head the context to read states from, in that head's units (None: ``data`` for all);
    ``weights``, ``rewards``: ``(b, n)``, a row per column (None: one column, those of ``data``).
    """

    def __init__(
        self,
        kernel: Kernel | Sequence[Kernel],
        data: Transitions,
        *,
        gamma: float,
        dtype: torch.dtype,
        device: Any = "cpu",
        views: Sequence[Transitions] | None = None,
        weights: NDArray[Any] | None = None,
        rewards: NDArray[Any] | None = None,
    ) -> None:
        self.kernels = (kernel,) if isinstance(kernel, Kernel) else tuple(kernel)
        views = [data] * len(self.kernels) if views is None else views
        successor, extra = distinct_rows(data, gamma)
        self.discount: Float[Tensor, " n"] = torch.tensor(data.discount(gamma), dtype=dtype, device=device)
        column = data.rewards[None] if rewards is None else rewards
        self.rewards: Float[Tensor, "b n"] = torch.tensor(column, dtype=dtype, device=device)
        if not bool(self.rewards.isfinite().all()):
            raise InputError("rewards", f"numbers that {dtype} holds", "an overflow", "rescale them, or use float64")
        if weights is None:
            weights = np.ones((1, len(data))) if data.sample_weight is None else data.sample_weight[None]
        self.weight: Float[Tensor, "b n"] = torch.tensor(weights, dtype=dtype, device=device)
        self._share = _share(self.weight)
        self.successor: Int[Tensor, " n"] = torch.tensor(successor, device=device)
        _check_memory(len(self.kernels), len(data) + len(extra), len(data), dtype, torch.device(device))
        self.matrix: Float[Tensor, "h u n"] = self._matrices(views, extra)

    @classmethod
    def of_tasks(
        cls,
        kernels: Sequence[Kernel],
        matrix: Float[Tensor, "h u n"],
        *,
        rewards: Float[Tensor, "h b n"],
        discount: Float[Tensor, "h 1 n"],
        weight: Float[Tensor, "h b n"],
    ) -> Context:
        """Return several contexts of one length as heads side by side, each with its own rewards, discounts and weights.

        ``matrix``: rows are the n states and then the n next states; it may carry gradients, and so may what is computed.
        """
        self = cls.__new__(cls)
        self.kernels, self.matrix = tuple(kernels), matrix
        self.rewards, self.discount, self.weight, self._share = rewards, discount, weight, _share(weight)
        n = rewards.shape[-1]
        self.successor = torch.arange(n, 2 * n, device=matrix.device)
        return self

    def _matrices(self, views: Sequence[Transitions], extra: NDArray[np.int64]) -> Float[Tensor, "h u n"]:
        groups: dict[int, list[int]] = {}  # heads that see the same states share their distances
        for h, view in enumerate(views):
            groups.setdefault(id(view), []).append(h)
        matrix = self.rewards.new_empty(len(views), len(self) + len(extra), len(self))  # (h, u, n)
        for heads in groups.values():
            view = views[heads[0]]
            states = np.concatenate([view.observations, view.next_observations[extra]])
            check_states("context states", states, self.rewards.dtype)
            rows = torch.tensor(states).to(self.rewards)  # (u, d)
            centres = rows[: len(self)]  # (n, d)
            for start, end in _tiles(len(rows), len(centres)):
                for h, part in zip(
                    heads, kernel_matrices([self.kernels[h] for h in heads], rows[start:end], centres), strict=True
                ):
                    matrix[h, start:end] = _without_overflow(self.kernels[h], part, "context states")
        return matrix

    def __len__(self) -> int:
        return self.rewards.shape[-1]

    @property
    def reward_square(self) -> Float[Tensor, " b"]:
        """Mean squared reward of each column, the unit of the tolerance."""
        return self.mean_square(self.rewards)

    def mean_square(self, x: Float[Tensor, "*h b n"]) -> Float[Tensor, "*h b"]:
        """Return the mean of ``x^2`` over transitions, weighted as they are, in float64."""
        return (self._share * x.double().square()).sum(-1)

    def values(self, dual_coef: Float[Tensor, "h b n"]) -> Float[Tensor, "h b u"]:
        """Return V at the distinct states."""
        if dual_coef.shape[1] == 1 or len(self) <= _BATCHED:
            return torch.bmm(dual_coef, self.matrix.mT)
        # For a few columns of a large matrix, BLAS libraries take two to three times as long in any other order of the factors.
        return torch.stack([(K @ a.T).T for K, a in zip(self.matrix, dual_coef, strict=True)])

    def apply(self, dual_coef: Float[Tensor, "h b n"]) -> Float[Tensor, "h b n"]:
        """Return ``M a``: V(s_i) - gamma_i V(s'_i) for every head, column and transition."""
        values = self.values(dual_coef)
        return values[..., : len(self)] - self.discount * values[..., self.successor]

    def apply_transpose(self, y: Float[Tensor, "h b n"]) -> Float[Tensor, "h b n"]:
        """Return ``M^T y``."""
        scattered = y.new_zeros(*y.shape[:2], self.matrix.shape[1])  # (h, b, u)
        scattered[..., : len(self)] = y
        scattered.index_add_(2, self.successor, -self.discount * y)
        return torch.bmm(scattered, self.matrix)

    def lambda_max_bound(self) -> Float[Tensor, "h b"]:
        """Return a rigorous upper bound on the largest eigenvalue of ``K W`` (W = sample weights).

        Non-negative kernels: Collatz-Wielandt, ``max_i (K v)_i / v_i`` for any v > 0, improved by power iteration; power
        iteration alone bounds from below (theory 3). Others: the smaller of the largest absolute row sum and the
        Frobenius norm.
        """
        return torch.stack([self._lambda_max_bound(h) for h in range(len(self.kernels))])

    def _lambda_max_bound(self, h: int) -> Float[Tensor, " b"]:
        K = self.matrix[h, : len(self)]  # (n, n)
        weight = self.weight if self.weight.ndim == 2 else self.weight[h]  # (b, n)
        if not self.kernels[h].nonnegative:
            weighted = [K * column for column in weight]
            return torch.stack([torch.minimum(A.abs().sum(1).max(), torch.linalg.matrix_norm(A)) for A in weighted])
        v, bound = torch.ones_like(weight), torch.full_like(weight[:, 0], math.inf)  # (b, n), (b,)
        for _ in range(_POWER_ITERATIONS):
            image = (weight * v) @ K.mT
            bound = torch.minimum(bound, (image / v).amax(-1))
            v = (image / image.amax(-1, keepdim=True).clamp_min(torch.finfo(v.dtype).tiny)).clamp_min(1e-6)
        return bound

    def sigma_max(self) -> Float[Tensor, "h b"]:
        """Return an estimate, from below, of the largest singular value of ``W M``, by power iteration on its square.

        Columns after the first start from the first one's vector, and need few iterations of their own.
        """
        generator = torch.Generator().manual_seed(0)
        start = torch.randn(len(self), generator=generator, dtype=torch.float64).to(self.rewards)
        v = start.expand(len(self.kernels), 1, -1)  # (h, 1, n)
        first, v = self._power(v, self.weight[..., :1, :], _POWER_ITERATIONS)
        if self.weight.shape[-2] == 1:
            return first
        others = self.weight[..., 1:, :]
        v = v + 0.1 * torch.linalg.vector_norm(v, dim=-1, keepdim=True) * start / torch.linalg.vector_norm(start)
        rest, _ = self._power(v.expand(-1, others.shape[-2], -1), others, _WARM_ITERATIONS)
        return torch.cat([first, rest], dim=1)

    def _power(self, v: Float[Tensor, "h b n"], weight: Float[Tensor, "b n"], count: int) -> tuple[Tensor, Tensor]:
        """Return the singular value ``(h, b)`` that power iterations from ``v`` reach, and its vector ``(h, b, n)``."""
        sigma = v.new_zeros(v.shape[:2])
        for _ in range(count):
            v = v / torch.linalg.vector_norm(v, dim=-1, keepdim=True).clamp_min(torch.finfo(v.dtype).tiny)
            image = weight * self.apply(v)
            sigma = torch.linalg.vector_norm(image, dim=-1)
            with torch.no_grad():  # sigma is stationary in v: its gradient is that of |W M v| at a fixed v
                v = self.apply_transpose(weight * image)
        return sigma, v

    def choose_step(self, rule: Literal["safe", "fast"], ridge: float) -> Float[Tensor, "h b"]:
        """Return the step size that the context's own operator allows each head and column.

        ``"safe"``: 1 / (1.05 (lambda_max(K) + ridge)), the lemma of theory 3. ``"fast"``: 1 / (sigma_max(M) + ridge), longer
        on-policy because the slow mode of M is about (1 - gamma) lambda_max(K); not covered by the lemma, so use the guard.
        """
        if rule == "safe":
            norm = 1.05 * (self.lambda_max_bound().double() + ridge)
        elif rule == "fast":
            norm = self.sigma_max().double() + ridge
        else:
            raise InputError("step_size", "'safe', 'fast', a number or a sequence of numbers", repr(rule))
        return 1.0 / torch.where(norm > 0, norm, 1.0)  # a zero operator (constant states, linear kernel) moves nothing


def _share(weight: Tensor) -> Tensor:
    """Return weights with sum one, in float64."""
    return (double := weight.double()) / double.sum(-1, keepdim=True)


def distinct_rows(data: Transitions, gamma: float) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return where each successor ``(n,)`` lies among a context's distinct states, and whose successors those beyond n are.

    The first n states are the s_j; a successor is stored only if it is read (discount > 0) and differs from the
    state of the row that continues it.
    """
    n = len(data)
    successor = np.arange(n)
    follows = data.follower >= 0
    follows[follows] = (data.next_observations[follows] == data.observations[data.follower[follows]]).all(axis=1)
    read = data.discount(gamma) > 0
    successor[read & follows] = data.follower[read & follows]
    extra = np.flatnonzero(read & ~follows)
    successor[extra] = n + np.arange(len(extra))
    return successor, extra


def distinct_states(data: Transitions, gamma: float) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Return the distinct states ``(u, d)`` of :func:`distinct_rows`, and each successor's index among them."""
    successor, extra = distinct_rows(data, gamma)
    return np.concatenate([data.observations, data.next_observations[extra]]), successor


def kernel_matrices(
    kernels: Sequence[Kernel], queries: Float[Tensor, "m d"], keys: Float[Tensor, "n d"]
) -> Iterator[Float[Tensor, "m n"]]:
    """Yield ``kernel(queries, keys)`` for each kernel; kernels of the same score share it."""
    scores: dict[Any, Tensor] = {}
    for kernel in kernels:
        if isinstance(kernel, AttentionKernel) and not kernel.normalised:
            kind = (kernel.score, kernel.has_kink)
            if kind not in scores:
                scores[kind] = kernel.scores(queries, keys)
            yield kernel.activation(scores[kind])
        else:
            yield kernel(queries, keys)


def evaluate_kernel_sum(
    kernels: Sequence[Kernel],
    queries: Float[Tensor, "m d"],
    centres: Float[Tensor, "n d"],
    dual_coef: Float[Tensor, "h b n"],
) -> Float[Tensor, "h b m"]:
    """Return ``sum_j a_j kappa(x, s_j)`` of every head and column at the queries, in chunks so that memory stays bounded."""
    values = dual_coef.new_empty(*dual_coef.shape[:2], len(queries))
    for start, end in _tiles(len(queries), len(centres)):
        for h, part in enumerate(kernel_matrices(kernels, queries[start:end], centres)):
            values[h, :, start:end] = _without_overflow(kernels[h], dual_coef[h] @ part.mT, "queries")
    return values


def _tiles(rows: int, columns: int) -> Iterator[tuple[int, int]]:
    tile = max(1, _TILE // max(columns, 1))
    return ((start, min(start + tile, rows)) for start in range(0, rows, tile))


def _without_overflow(kernel: Kernel, numbers: Tensor, what: str) -> Tensor:
    """Return ``numbers``, or raise InputError if an unbounded kernel overflowed: it would turn into NaN one product later."""
    if not kernel.stationary and not bool(numbers.isfinite().all()):
        raise InputError(
            what,
            f"states on which {kernel} stays finite",
            "an overflow",
            "scale the states, or use a higher temperature or RBF",
        )
    return numbers


def matrix_bytes(rows: int, columns: int, dtype: torch.dtype) -> int:
    """Return the size of one head's kernel matrix."""
    return rows * columns * torch.empty((), dtype=dtype).element_size()


def memory(device: torch.device) -> float:
    """Return the bytes of memory that a device has."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")) if hasattr(os, "sysconf") else math.inf


def _check_memory(heads: int, rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> None:
    needed, total = heads * matrix_bytes(rows, columns, dtype), memory(device)
    if needed > 0.8 * total:
        fits = int(math.sqrt(0.8 * total / needed) * columns)
        raise InputError(
            "context",
            f"at most about {fits} transitions, whose kernel matrix fits into memory",
            f"{columns} ({needed / 1e9:.1f} GB)",
            "pass fewer, for example every k-th episode",
        )
