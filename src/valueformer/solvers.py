"""Kernel temporal-difference learning without tokens: the numbers of the transformer's forward pass, computed directly.

With K_ij = kappa(s_i, s_j), K'_ij = kappa(s'_i, s_j) and gamma_i = gamma * discount_i * (1 - terminated_i), one layer is

    a <- (1 - alpha lambda) a + alpha w (r - M a),        M = K - diag(gamma_i) K'

and V(x) = sum_j a_j kappa(x, s_j) (claim P4, theory 1 and 3; w are sample weights, lambda the ridge).
This module knows neither prompts nor transformers: the tests compare the two as independent programs.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor

from valueformer import fields
from valueformer.arguments import check_gamma, check_ridge, check_states, check_steps
from valueformer.errors import InputError
from valueformer.kernels import Kernel
from valueformer.results import Status
from valueformer.transitions import Transitions

__all__ = [
    "Context",
    "Solution",
    "StepSize",
    "distinct_states",
    "evaluate_kernel_sum",
    "fixed_point",
    "iterate",
    "solve",
]

StepSize = float | Sequence[float] | Literal["safe", "fast"]

TOLERANCE = 1e-3  # of the rms reward: `converged`
MAX_LAYERS = 10_000  # num_layers="auto" gives up here
_POWER_ITERATIONS = 10
# A residual this many times the best so far is taken back. On goal-reaching episodes that end in a terminal the residual first
# rises 2.2-fold and then falls, so 2 would stop every layer there (theory 7.3).
GUARD = 4.0
_TILE = 1 << 22  # kernel entries evaluated at a time: intermediates stay in cache instead of tripling peak memory


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


class Context:
    """The kernel matrix of a context, built once: rows are its distinct states, columns the kernel centres s_j.

    In contiguous episodes s'_j is s_{j+1}, so one (n + episodes) x n matrix holds both K and K' and a layer reads it once.
    """

    def __init__(self, kernel: Kernel, data: Transitions, *, gamma: float, dtype: torch.dtype, device: Any = "cpu") -> None:
        states, successor = distinct_states(data, gamma)
        check_states("context states", states, dtype)
        self.kernel = kernel
        self.discount: Float[Tensor, " n"] = torch.tensor(data.discount(gamma), dtype=dtype, device=device)
        self.rewards: Float[Tensor, " n"] = torch.tensor(data.rewards, dtype=dtype, device=device)
        if not bool(self.rewards.isfinite().all()):
            raise InputError("rewards", f"numbers that {dtype} holds", "an overflow", "rescale them, or use float64")
        self.weight: Float[Tensor, " n"] | None = None
        if data.sample_weight is not None:
            self.weight = torch.tensor(data.sample_weight, dtype=dtype, device=device)
        self.centres: Float[Tensor, "n d"] = torch.tensor(data.observations, dtype=dtype, device=device)
        self.successor: Int[Tensor, " n"] = torch.tensor(successor, device=device)
        _check_memory(len(states), len(data), dtype, torch.device(device))
        rows = torch.tensor(states, dtype=dtype, device=device)
        self.matrix: Float[Tensor, "u n"] = kernel_matrix(kernel, rows, self.centres)

    def __len__(self) -> int:
        return len(self.rewards)

    @property
    def reward_square(self) -> float:
        """Mean squared reward, the unit of the tolerance."""
        return self.mean_square(self.rewards)

    def mean_square(self, x: Float[Tensor, " n"]) -> float:
        """Return the mean of ``x^2`` over transitions, weighted as they are, in float64."""
        squares = x.double().square()
        if self.weight is None:
            return float(squares.mean())
        weight = self.weight.double()
        return float((weight * squares).sum() / weight.sum())

    def apply(self, dual_coef: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
        """Return ``M a``: V(s_i) - gamma_i V(s'_i) for every transition."""
        values = self.matrix @ dual_coef  # (u,)
        return values[: len(self)] - self.discount * values[self.successor]

    def apply_transpose(self, y: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
        """Return ``M^T y``."""
        scattered = y.new_zeros(len(self.matrix))  # (u,)
        scattered[: len(self)] = y
        scattered.index_add_(0, self.successor, -self.discount * y)
        return self.matrix.mT @ scattered

    def lambda_max_bound(self) -> float:
        """Return a rigorous upper bound on the largest eigenvalue of ``K W`` (W = sample weights).

        Non-negative kernels: Collatz-Wielandt, ``max_i (K v)_i / v_i`` for any v > 0, improved by power iteration; power
        iteration alone bounds from below (theory 3). Others: the smaller of the largest absolute row sum and the
        Frobenius norm.
        """
        K = self.matrix[: len(self)]  # (n, n)
        weight = torch.ones_like(self.rewards) if self.weight is None else self.weight
        if not self.kernel.nonnegative:
            K = K * weight
            return min(float(K.abs().sum(1).max()), float(torch.linalg.matrix_norm(K)))
        v, bound = torch.ones_like(self.rewards), math.inf
        for _ in range(_POWER_ITERATIONS):
            image = K @ (weight * v)
            bound = min(bound, float((image / v).max()))
            v = (image / image.max().clamp_min(torch.finfo(v.dtype).tiny)).clamp_min(1e-6)
        return bound

    def sigma_max(self) -> float:
        """Return an estimate, from below, of the largest singular value of ``W M``, by power iteration on its square."""
        generator = torch.Generator().manual_seed(0)
        v = torch.randn(len(self), generator=generator, dtype=torch.float64).to(self.rewards)
        weight = 1.0 if self.weight is None else self.weight
        sigma = 0.0
        for _ in range(_POWER_ITERATIONS):
            v = v / torch.linalg.vector_norm(v).clamp_min(torch.finfo(v.dtype).tiny)
            image = weight * self.apply(v)
            sigma = float(torch.linalg.vector_norm(image))
            v = self.apply_transpose(weight * image)
        return sigma

    def choose_step(self, rule: Literal["safe", "fast"], ridge: float) -> float:
        """Return the step size that the context's own operator allows.

        ``"safe"``: 1 / (1.05 (lambda_max(K) + ridge)), the lemma of theory 3. ``"fast"``: 1 / (sigma_max(M) + ridge), longer
        on-policy because the slow mode of M is about (1 - gamma) lambda_max(K); not covered by the lemma, so use the guard.
        """
        if rule == "safe":
            norm = 1.05 * (self.lambda_max_bound() + ridge)
        elif rule == "fast":
            norm = self.sigma_max() + ridge
        else:
            raise InputError("step_size", "'safe', 'fast', a number or a sequence of numbers", repr(rule))
        return 1.0 / norm if norm > 0 else 1.0  # a zero operator (constant states, linear kernel) moves nothing


def distinct_states(data: Transitions, gamma: float) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Return the context's states ``(u, d)`` and the index ``(n,)`` of each successor among them.

    The first n are the s_j; a successor is stored only if it is read (discount > 0) and differs from the
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
    return np.concatenate([data.observations, data.next_observations[extra]]), successor


def kernel_matrix(kernel: Kernel, queries: Float[Tensor, "m d"], centres: Float[Tensor, "n d"]) -> Float[Tensor, "m n"]:
    """Return ``kernel(queries, centres)``, built in row tiles into one buffer."""
    matrix = queries.new_empty(len(queries), len(centres))
    tile = max(1, _TILE // max(len(centres), 1))
    for start in range(0, len(queries), tile):
        matrix[start : start + tile] = kernel(queries[start : start + tile], centres)
    return _without_overflow(kernel, matrix, "context states")


def evaluate_kernel_sum(
    kernel: Kernel,
    queries: Float[Tensor, "m d"],
    centres: Float[Tensor, "n d"],
    dual_coef: Float[Tensor, "n ..."],
) -> Float[Tensor, "m ..."]:
    """Return ``sum_j a_j kappa(x, s_j)`` at the queries, in chunks so that memory stays bounded."""
    chunk = max(1, _TILE // max(len(centres), 1))
    parts = [kernel(queries[i : i + chunk], centres) @ dual_coef for i in range(0, len(queries), chunk)]
    values = torch.cat(parts) if parts else dual_coef.new_zeros((0, *dual_coef.shape[1:]))
    return _without_overflow(kernel, values, "queries")


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


def iterate(
    context: Context,
    *,
    step_size: StepSize,
    num_layers: int | Literal["auto"],
    ridge: float = 0.0,
    guard: bool = False,
    record: bool = False,
    reward_square: float | None = None,
) -> tuple[Solution, Tensor | None]:
    """Run kernel TD from V = 0 and return the solution (without query values) and, if asked, ``(L, n)`` coefficients.

    The guard (theory 7.3): when the residual of the linear system exceeds 4 times the best so far, or stops being finite,
    go back to the best iterate and halve the step. A layer spent that way counts, and the result is the best iterate.
    ``num_layers="auto"``: until converged, as measured against ``reward_square``, the mean squared reward (None: the
    context's). Layers after an overflow are left out.
    """
    check_ridge(ridge)
    if isinstance(step_size, str):
        step_size = context.choose_step(step_size, ridge)
    steps = check_steps(step_size, MAX_LAYERS if num_layers == "auto" else num_layers)
    r = context.rewards
    weight = torch.ones_like(r) if context.weight is None else context.weight
    leak = ridge / torch.where(weight > 0, weight, 1.0)  # a_j stays 0 where the weight is 0
    a, td = torch.zeros_like(r), r
    error = td  # (n,) what the iteration drives to zero: the TD error, less ridge a / w
    initial = best_size = size = context.mean_square(error)
    best, best_length, shrink, rewinds = (a, td, error), 0, 1.0, 0
    path: list[float] = []
    errors: list[float] = []
    history: list[Tensor] = []
    limit = TOLERANCE**2 * (context.reward_square if reward_square is None else reward_square)
    reached = overflowed = False
    for step in steps:
        step *= shrink
        change = step * weight * error
        a = a + change
        path.append(step)
        td = r - context.apply(a)
        error = td - leak * a if ridge else td
        size = context.mean_square(error)
        if guard and not size <= GUARD**2 * best_size:
            a, td, error = best
            del path[best_length:]
            shrink, rewinds, size = shrink / 2.0, rewinds + 1, best_size
        elif size < best_size:
            best, best_size, best_length = (a, td, error), size, len(path)
        if overflowed := not math.isfinite(size):
            break  # only finite layers are kept
        errors.append(context.mean_square(td))
        if record:
            history.append(a)
        noise = 8.0 * torch.finfo(a.dtype).eps * float(a.abs().max())
        reached = size <= limit or 0.0 < float(change.abs().max()) <= noise
        if reached and num_layers == "auto":
            break
    layers = len(errors)
    diverged = not guard and (overflowed or not size <= initial)
    grew = "overflowed" if overflowed else f"grew to {_ratio(size, initial):.2g} times its start"
    if diverged or (guard and size > best_size):  # end on the best iterate; under a guard the record shows it
        a, td, error = best
        del path[best_length:]
        if guard:
            errors[-1], reached = context.mean_square(td), best_size <= limit
    improved = best_length > 0 or initial <= limit
    status: Status = "diverged" if diverged else "converged" if reached else "max_layers"
    message = "" if reached else f"rms TD error after {layers} layers is {_ratio(best_size, initial):.2g} of its start"
    if diverged:
        message = (
            f"the residual {grew}; the best layer ({best_length}) is returned: "
            "use step_size='fast' or 'safe', a ridge, or a smaller gamma"
        )
    elif guard and not improved:
        message = "no layer improved on the start, which is returned: try more layers, a ridge or a smaller gamma"
    stats = {"step_sizes": path, "rewinds": rewinds, "layers": layers, "improved": improved, "initial_td_error": initial}
    solution = Solution(a.new_zeros(0), a, torch.tensor(errors, dtype=torch.float64), status, message, stats)
    return solution, torch.stack(history) if history else a.new_zeros(0, len(context)) if record else None


def fixed_point(context: Context, *, ridge: float = 0.0) -> Solution:
    """Return kernel LSTD, ``a = (W M + ridge I)^{-1} W r``: the limit of infinitely many layers (theory 3).

    Status ``singular`` where the system has no unique solution to working precision (duplicated states without ridge);
    the coefficients are then those of least norm. The context must be in float64; raises InputError otherwise.
    """
    check_ridge(ridge)
    n, target = len(context), context.rewards
    if context.rewards.dtype != torch.float64:
        raise InputError("context", "float64, which a linear system needs", str(context.rewards.dtype))
    system = context.matrix[:n] - context.discount[:, None] * context.matrix[context.successor]  # (n, n)
    if context.weight is not None:
        system, target = context.weight[:, None] * system, context.weight * target
    system.diagonal().add_(ridge)
    a, info = torch.linalg.solve_ex(system, target)
    status: Status = "converged"
    message = ""
    # A huge solution of a small system is rounding amplified: the matrix is singular to working precision.
    amplified = not float(a.abs().max()) * float(system.abs().max()) <= 1e12 * float(target.abs().max())
    missed = not float(torch.linalg.vector_norm(system @ a - target)) <= 1e-6 * float(torch.linalg.vector_norm(target))
    if int(info) or missed or amplified:
        a = torch.linalg.lstsq(system.cpu(), target.cpu()[:, None], rcond=1e-12, driver="gelsd").solution[:, 0].to(target)
        status = "singular"
        message = "the context's TD system is singular; least-norm coefficients are returned: use a ridge such as 1e-3"
    errors = torch.tensor([context.mean_square(context.rewards - context.apply(a))], dtype=torch.float64)
    stats = {"step_sizes": [], "rewinds": 0, "layers": 0, "improved": True, "initial_td_error": context.reward_square}
    return Solution(a.new_zeros(0), a, errors, status, message, stats)


def solve(
    kernel: Kernel,
    data: Transitions,
    queries: NDArray[Any] | None = None,
    *,
    gamma: float,
    step_size: StepSize,
    num_layers: int | Literal["auto"],
    ridge: float = 0.0,
    guard: bool = False,
    record: bool = False,
    dtype: torch.dtype | None = None,
    device: Any = "cpu",
) -> Solution:
    """Run kernel TD from V = 0 on a context, without tokens, and evaluate V of the behaviour policy at the queries.

    ``queries``: ``(m, d)``; None: none. ``gamma`` in [0, 1], ``ridge`` >= 0, ``num_layers`` >= 1 or ``"auto"``. With ``record``
    every layer's query values are kept in ``trace``. ``dtype`` defaults to the observations'. States are taken as they are:
    scale and centre them first. Raises InputError for arguments out of range.
    """
    check_gamma(gamma)
    if not isinstance(kernel, Kernel):
        raise InputError("kernel", "a vf.kernels.Kernel", repr(kernel), "by name: vf.kernels.by_name('rbf')")
    number = dtype or getattr(torch, str(data.observations.dtype))
    points = data.observations[:0] if queries is None else fields.finite("queries", fields.matrix("queries", queries))
    if points.shape[1] != data.obs_dim:
        raise InputError("queries", f"shape (m, {data.obs_dim})", str(points.shape), "same features as the context")
    check_states("queries", points, number)
    context = Context(kernel, data, gamma=gamma, dtype=number, device=device)
    solution, history = iterate(context, step_size=step_size, num_layers=num_layers, ridge=ridge, guard=guard, record=record)
    rows = torch.tensor(points, dtype=number, device=device)
    values = evaluate_kernel_sum(kernel, rows, context.centres, solution.dual_coef)
    trace = None if history is None else evaluate_kernel_sum(kernel, rows, context.centres, history.mT).mT
    return Solution(values, solution.dual_coef, solution.td_error, solution.status, solution.message, solution.stats, trace)


def _ratio(a: float, b: float) -> float:
    return math.sqrt(a / b) if b > 0 else 0.0


def _check_memory(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> None:
    needed = rows * columns * torch.empty((), dtype=dtype).element_size()
    if device.type == "cuda":
        total = float(torch.cuda.mem_get_info(device)[0])
    else:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else math.inf
    if needed > 0.8 * total:
        fits = int(math.sqrt(0.8 * total / needed) * columns)
        raise InputError(
            "context",
            f"at most about {fits} transitions, whose kernel matrix fits into memory",
            f"{columns} ({needed / 1e9:.1f} GB)",
            "pass fewer, for example every k-th episode",
        )
