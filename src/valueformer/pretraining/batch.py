"""Tasks as tensors: contexts of one length side by side, and the states that are asked about."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from valueformer.features import ScalerKind, fit_scaler
from valueformer.fitting import Columns, reward_unit, scaled_states
from valueformer.heads import Head
from valueformer.metrics import best_constant
from valueformer.mixing import FOLDS, fold_of_rows
from valueformer.pretraining.tasks import Task, Walks, successors

__all__ = ["KernelBatch", "Targets", "WindowBatch"]


@dataclass(frozen=True, eq=False)
class Targets:
    """What the values of q states are compared with; leading dimensions are models or tasks."""

    rewards: Float[Tensor, "*t q"]
    discounts: Float[Tensor, "*t q"]
    values: Float[Tensor, "*t q"]
    returns: Float[Tensor, "*t q"]
    constant: Float[Tensor, "*t"]
    """Mean squared TD error of the best constant V."""
    scale: Float[Tensor, "*t"]
    """The same over context and queries together: what a normalised loss is divided by, since rewards may be rare."""


@dataclass(frozen=True, eq=False)
class KernelBatch:
    """B tasks for heads of kernel TD: views of their states (one per scaler), columns for the gate's folds."""

    views: dict[ScalerKind, tuple[Tensor, Tensor, Tensor]]
    """Context states, next states ``(B, n, d)`` and points asked about ``(B, 2 q, d)``: the queries' states and next states."""
    rewards: Float[Tensor, "B c n"]
    """What each column's level leaves unexplained, in units of the task's rewards."""
    discounts: Float[Tensor, "B n"]
    weights: Float[Tensor, "B c n"]
    levels: Float[Tensor, " B"]
    fold: Int[Tensor, "B n"] | None
    targets: Targets

    @classmethod
    def of(cls, tasks: Sequence[Task], heads: Sequence[Head], gamma: float, mixes: bool, dtype: torch.dtype) -> KernelBatch:
        """Return tasks as tensors; shorter states are padded with zeros, which distances do not see."""
        width = max(task.context.obs_dim for task in tasks)
        number = np.dtype(str(dtype).removeprefix("torch."))
        views: dict[ScalerKind, tuple[Tensor, Tensor, Tensor]] = {}
        kinds: list[ScalerKind] = list(dict.fromkeys(head.scaler for head in heads))
        for kind in kinds:
            stationary = all(head.kernel.stationary for head in heads if head.scaler == kind)
            parts: list[list[Tensor]] = [[], [], []]
            for task in tasks:
                scaler = fit_scaler(kind, task.context.observations)
                asked = np.concatenate([task.queries.observations, successors(task.queries)])
                for part, states in zip(parts, (task.context.observations, successors(task.context), asked), strict=True):
                    own = scaled_states(states, scaler, stationary, number)
                    part.append(torch.tensor(np.pad(own, ((0, 0), (0, width - own.shape[1])))))
            views[kind] = (torch.stack(parts[0]), torch.stack(parts[1]), torch.stack(parts[2]))
        columns = [_columns(task, gamma, mixes) for task in tasks]

        def stacked(arrays: list[np.ndarray]) -> Tensor:
            return torch.tensor(np.stack(arrays), dtype=dtype)

        targets = Targets(
            rewards=stacked([task.queries.rewards / c.unit for task, c in zip(tasks, columns, strict=True)]),
            discounts=stacked([task.queries.discount(gamma) for task in tasks]),
            values=stacked([task.values / c.unit for task, c in zip(tasks, columns, strict=True)]),
            returns=stacked([task.returns / c.unit for task, c in zip(tasks, columns, strict=True)]),
            constant=stacked([np.array(c.constant) for c in columns]),
            scale=stacked([np.array(c.scale) for c in columns]),
        )
        return cls(
            views=views,
            rewards=stacked([c.rewards for c in columns]),
            discounts=stacked([task.context.discount(gamma) for task in tasks]),
            weights=stacked([c.weights for c in columns]),
            levels=stacked([np.array(c.level) for c in columns]),
            fold=torch.tensor(np.stack([c.fold for c in columns])) if mixes else None,
            targets=targets,
        )


@dataclass(frozen=True)
class _TaskColumns:
    unit: float
    rewards: np.ndarray
    weights: np.ndarray
    level: float
    fold: np.ndarray
    constant: float
    scale: float


def _columns(task: Task, gamma: float, mixes: bool) -> _TaskColumns:
    """Return the columns of :meth:`ValueFormer.fit`, in the same units; a fold that does not exist is the whole context."""
    data = task.context
    unit = reward_unit(data.rewards)
    rewards, discount = data.rewards.astype(np.float64) / unit, data.discount(gamma)
    fold = fold_of_rows(data.episode_index)
    weights = np.ones((1 + FOLDS * mixes, len(data)))
    weights[1:] = fold != np.arange(len(weights) - 1)[:, None]
    columns = Columns.of(weights, rewards, discount, "context")
    left = rewards - (1.0 - discount) * columns.levels[:, None]
    asked, ahead = task.queries.rewards.astype(np.float64) / unit, task.queries.discount(gamma)
    both = _constant(np.concatenate([rewards, asked]), np.concatenate([discount, ahead]))
    return _TaskColumns(unit, left, weights, float(columns.levels[0]), fold, _constant(asked, ahead), both)


def _constant(rewards: np.ndarray, discount: np.ndarray) -> float:
    """Return the mean squared TD error of the best constant; where that is exact, something to divide by."""
    error = float(np.mean(np.square(rewards - (1.0 - discount) * best_constant(rewards, discount))))
    return max(error, 1e-6 * float(np.mean(np.square(rewards)))) or 1.0


GAP = 1  # states between a window's last successor and its query, as in Wang et al.'s public code


@dataclass(frozen=True, eq=False)
class WindowBatch:
    """Windows that slide along a walk: window w predicts the state after it, and window w + 1 bootstraps it (Wang et al.).

    Leading dimension: models side by side, each on a task of its own.
    """

    contexts: Float[Tensor, "s w1 n c"]
    """``W + 1`` windows of ``[s; gamma d s'; r]``."""
    moments: Float[Tensor, "s w1 c c"]
    """Their second moments: all that linear attention reads of them."""
    queries: Float[Tensor, "s w d"]
    successors: Float[Tensor, "s w d"]
    targets: Targets

    @classmethod
    def of(cls, walks: Walks, walk: int, n: int, windows: int, dtype: torch.dtype) -> WindowBatch:
        """Return the windows of one of the walks of each task; ``walks`` has ``n + GAP + windows`` rows."""

        def tensor(array: np.ndarray) -> Tensor:
            return torch.tensor(array[:, walk], dtype=dtype)

        states, following = tensor(walks.states), tensor(walks.next_states)
        rewards, discounts = tensor(walks.rewards), tensor(walks.discounts)
        asked = slice(n + GAP, n + GAP + windows)
        constant = torch.tensor(
            [_constant(*pair) for pair in zip(walks.rewards[:, walk], walks.discounts[:, walk], strict=True)]
        )
        rows = torch.cat([states, discounts[..., None] * following, rewards[..., None]], dim=-1)  # (s, rows, c)
        contexts = rows.unfold(1, n, 1).mT[:, : windows + 1]  # (s, W + 1, n, c), a view
        targets = Targets(
            rewards=rewards[:, asked],
            discounts=discounts[:, asked],
            values=tensor(walks.values)[:, asked],
            returns=tensor(walks.returns)[:, asked],
            constant=constant.to(dtype),
            scale=constant.to(dtype),
        )
        return cls(contexts, second_moments(contexts), states[:, asked], following[:, asked], targets)

    def part(self, rank: int, world: int) -> WindowBatch:
        """Return every world-th share of the windows, with the one more that bootstraps the last."""
        count = self.queries.shape[1]
        start, stop = rank * count // world, (rank + 1) * count // world
        own = slice(start, stop)
        t = self.targets
        targets = Targets(t.rewards[:, own], t.discounts[:, own], t.values[:, own], t.returns[:, own], t.constant, t.scale)
        windows = slice(start, stop + 1)
        return WindowBatch(
            self.contexts[:, windows], self.moments[:, windows], self.queries[:, own], self.successors[:, own], targets
        )


def second_moments(contexts: Float[Tensor, "*batch n c"]) -> Float[Tensor, "*batch c c"]:
    """Return the mean of ``z z^T`` over each context's tokens."""
    return contexts.mT @ contexts / contexts.shape[-2]
