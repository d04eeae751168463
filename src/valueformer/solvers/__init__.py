"""Kernel temporal-difference learning without tokens: the numbers of the transformer's forward pass, computed directly.

With K_ij = kappa(s_i, s_j), K'_ij = kappa(s'_i, s_j) and gamma_i = gamma * discount_i * (1 - terminated_i), one layer is

    a <- (1 - alpha lambda) a + alpha w (r - M a),        M = K - diag(gamma_i) K'

and V(x) = sum_j a_j kappa(x, s_j) (claim P4, theory 1 and 3; w are sample weights, lambda the ridge).
This package knows neither prompts nor transformers: the tests compare the two as independent programs.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import torch
from numpy.typing import NDArray

from valueformer import fields
from valueformer.arguments import check_gamma, check_states
from valueformer.errors import InputError
from valueformer.kernels import Kernel
from valueformer.solvers.context import Context, distinct_states, evaluate_kernel_sum
from valueformer.solvers.exact import fixed_point
from valueformer.solvers.iteration import MAX_LAYERS, TOLERANCE, Path, iterate
from valueformer.solvers.solution import Solution, StepSchedule, StepSize
from valueformer.transitions import Transitions

__all__ = [
    "MAX_LAYERS",
    "TOLERANCE",
    "Context",
    "Path",
    "Solution",
    "StepSchedule",
    "StepSize",
    "distinct_states",
    "evaluate_kernel_sum",
    "fixed_point",
    "iterate",
    "solve",
]


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
    path = iterate(context, step_size=step_size, num_layers=num_layers, ridge=ridge, guard=guard, record=record)
    rows = torch.tensor(points, dtype=number, device=device)
    centres = torch.tensor(data.observations, dtype=number, device=device)
    last = path.dual_coef if path.history is None else torch.cat([path.history[:, :, 0].transpose(0, 1), path.dual_coef], dim=1)
    values = evaluate_kernel_sum([kernel], rows, centres, last)[0]  # (1 or L + 1, m)
    trace = values[:-1] if record else None
    return dataclasses.replace(path.solution(), values=values[-1], trace=trace)
