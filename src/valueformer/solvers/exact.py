"""The fixed point of kernel TD, in closed form."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from valueformer.arguments import check_ridge
from valueformer.errors import InputError
from valueformer.solvers.context import Context
from valueformer.solvers.iteration import Path

__all__ = ["fixed_point"]


def fixed_point(context: Context, *, ridge: float = 0.0) -> Path:
    """Return kernel LSTD, ``a = (W M + ridge I)^{-1} W r``: the limit of infinitely many layers (theory 3).

    Status ``singular`` where the system has no unique solution to working precision (duplicated states without ridge);
    the coefficients are then those of least norm. The context must be in float64; raises InputError otherwise.
    """
    check_ridge(ridge)
    r = context.rewards  # (b, n)
    if r.dtype != torch.float64:
        raise InputError("context", "float64, which a linear system needs", str(r.dtype))
    heads, (columns, n) = len(context.kernels), r.shape
    a = r.new_zeros(heads, columns, n)
    singular = torch.zeros(heads, columns, dtype=torch.bool, device=r.device)
    for h, matrix in enumerate(context.matrix):  # (u, n)
        M = matrix[:n] - context.discount[:, None] * matrix[context.successor]  # (n, n)
        for b in range(columns):
            a[h, b], singular[h, b] = _solve(context.weight[b][:, None] * M, context.weight[b] * r[b], ridge)
    td = r - context.apply(a)
    errors, initial = context.mean_square(td), context.reward_square.expand(heads, -1)
    never = torch.zeros_like(singular)
    return Path(
        dual_coef=a,
        td=td,
        td_error=errors[None].cpu(),
        trace=td[None, :, 0],
        steps=torch.zeros(0, heads, columns, dtype=torch.float64),
        rewinds=torch.zeros(heads, columns, dtype=torch.int64),
        best=errors,
        initial=initial,
        final=errors,
        reached=~singular,
        improved=~never,
        diverged=never,
        overflowed=never,
        history=None,
        singular=singular,
    )


def _solve(system: Float[Tensor, "n n"], target: Float[Tensor, " n"], ridge: float) -> tuple[Float[Tensor, " n"], bool]:
    """Return the solution of ``(system + ridge I) a = target`` and whether the system is singular."""
    system.diagonal().add_(ridge)
    a, info = torch.linalg.solve_ex(system, target)
    # A huge solution of a small system is rounding amplified: the matrix is singular to working precision.
    amplified = not float(a.abs().max()) * float(system.abs().max()) <= 1e12 * float(target.abs().max())
    missed = not float(torch.linalg.vector_norm(system @ a - target)) <= 1e-6 * float(torch.linalg.vector_norm(target))
    if not (int(info) or missed or amplified):
        return a, False
    least = torch.linalg.lstsq(system.cpu(), target.cpu()[:, None], rcond=1e-12, driver="gelsd").solution[:, 0]
    return least.to(target), True
