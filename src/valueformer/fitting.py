"""Heads on a context: scaled views of its states, columns for folds and replicates, and what one pass over them gives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from valueformer.arguments import check_states
from valueformer.features import Scaler, ScalerKind
from valueformer.heads import Head
from valueformer.metrics import best_constant, mean_constant
from valueformer.solvers import Context, Path, StepSchedule, StepSize, fixed_point, iterate
from valueformer.solvers.context import matrix_bytes, memory
from valueformer.transitions import Transitions

__all__ = ["Columns", "Pass", "Problem", "reward_unit", "scaled", "scaled_states"]

Vector = NDArray[np.float64]
_SHARE = 0.25  # of the memory, for kernel matrices of heads that run side by side; beyond it, one after the other


@dataclass(frozen=True, eq=False)
class Columns:
    """Weighted copies of a context, side by side: weights ``(b, n)`` and levels ``(b,)``, in units of the rewards."""

    weights: Vector
    levels: Vector

    @classmethod
    def of(cls, weights: Vector, rewards: Vector, discount: Vector, level: float | str) -> Columns:
        """Return columns of these weights, each at its own constant ("context" or "mean"), or all at ``level``."""
        if not isinstance(level, str):
            return cls(weights, np.full(len(weights), level))
        rule = best_constant if level == "context" else mean_constant
        return cls(weights, np.array([rule(rewards, discount, column) for column in weights]))


@dataclass(frozen=True, eq=False)
class Problem:
    """A context and how to run kernel TD on it."""

    data: Transitions
    views: Mapping[ScalerKind, Transitions]
    """The same rows with scaled states, in the dtype of the computation."""
    rewards: Vector
    """In units of :attr:`ValueFormer.reward_unit_`."""
    gamma: float
    algorithm: Literal["td", "lstd"]
    step_size: StepSize
    num_layers: int | Literal["auto"]
    ridge: float
    guard: bool
    dtype: torch.dtype
    device: torch.device

    def run(self, heads: Sequence[Head], columns: Columns) -> Pass:
        """Run all heads on all columns."""
        dtype = torch.float64 if self.algorithm == "lstd" else self.dtype  # a linear system amplifies rounding
        w = 1.0 - self.data.discount(self.gamma)  # (n,)
        rewards = self.rewards - w * columns.levels[:, None]  # (b, n): what the level leaves unexplained
        square = float(np.average(np.square(self.rewards), weights=columns.weights[0]))
        paths, step = [], self.step_size
        for start, group in self._groups(heads, dtype):
            context = Context(
                [head.kernel for head in group],
                self.data,
                gamma=self.gamma,
                dtype=dtype,
                device=self.device,
                views=[self.views[head.scaler] for head in group],
                weights=columns.weights,
                rewards=rewards,
            )
            if self.algorithm == "lstd":
                path = fixed_point(context, ridge=self.ridge)
            else:
                path = iterate(
                    context,
                    step_size=step.of_heads(start, start + len(group)) if isinstance(step, StepSchedule) else step,
                    num_layers=self.num_layers,
                    ridge=self.ridge,
                    guard=self.guard,
                    reward_square=square,
                )
            paths.append(path)
        return Pass(Path.join(paths), rewards, columns, square)

    def _groups(self, heads: Sequence[Head], dtype: torch.dtype) -> list[tuple[int, Sequence[Head]]]:
        one = matrix_bytes(len(self.data) + self.data.n_episodes, len(self.data), dtype)
        size = max(1, int(_SHARE * memory(self.device) / one))
        return [(i, heads[i : i + size]) for i in range(0, len(heads), size)]


@dataclass(frozen=True, eq=False)
class Pass:
    """All heads on all columns of a context."""

    path: Path
    rewards: Vector
    """``(b, n)`` what the levels leave unexplained: the TD errors of the constant head."""
    columns: Columns
    reward_square: float

    def left_out(self, fold: NDArray[np.int64]) -> Vector:
        """Return TD errors ``(n, h + 1)`` of each row from the column that left its fold out; column 0 left none.

        The last entry is the constant head's.
        """
        rows, column = np.arange(len(fold)), 1 + fold
        constant = self.rewards[column, rows]
        td = self.path.td.double().cpu().numpy()[:, column, rows].T  # (n, h)
        return np.column_stack([td, constant])

    def mixed(self, weights: Vector) -> tuple[Vector, Vector]:
        """Return the mixture's mean squared TD error on column 0: before the first layer, and after each ``(l,)``."""
        share = self.columns.weights[0] / self.columns.weights[0].sum()
        start = self.rewards[0]
        trace = self.path.trace.double().cpu().numpy()  # (l, h, n)
        td = np.einsum("lhn,h->ln", trace, weights[:-1]) + weights[-1] * start
        return np.sum(share * np.square(start)), np.square(td) @ share


def reward_unit(rewards: NDArray[Any]) -> float:
    """Return the power of two at or below the largest reward: values scale exactly with rewards, and squares stay finite."""
    return float(2.0 ** np.floor(np.log2(float(np.abs(rewards).max()) or 1.0)))


def scaled(data: Transitions, scaler: Scaler, stationary: bool, dtype: np.dtype[Any]) -> Transitions:
    """Return a context whose states are scaled, in ``dtype``; rewards and flags are left as they are."""
    return data.with_numbers(
        observations=scaled_states(data.observations, scaler, stationary, dtype),
        next_observations=scaled_states(data.next_observations, scaler, stationary, dtype),
        rewards=data.rewards,
        sample_weight=data.sample_weight,
    )


def scaled_states(observations: NDArray[Any], scaler: Scaler, stationary: bool, dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return scaled states ``(m, d)`` in ``dtype``; raises InputError where squared distances would overflow."""
    with np.errstate(over="ignore"):
        states = scaler.transform(observations)
    if stationary:
        # A query may lie so far away that its state overflows: to the kernel all far points are alike.
        limit = np.sqrt(np.finfo(dtype).max) / 2e3
        states = np.clip(states, -limit, limit)
    check_states("observations", states, getattr(torch, str(dtype)))
    return states.astype(dtype)
