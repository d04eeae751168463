"""Transitions, the one data currency: logged steps (s, r, s') of any task, validated once and immutable.

Without a target policy everything computed from them concerns the BEHAVIOUR policy, the one that made the log.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from valueformer import fields
from valueformer.errors import InputError

__all__ = ["DataReport", "Problem", "Returns", "Transitions", "concatenate"]

Array = NDArray[Any]
_ARRAYS = (
    "observations",
    "next_observations",
    "rewards",
    "terminated",
    "truncated",
    "actions",
    "next_actions",
    "discounts",
    "episode_ids",
    "steps",
    "sample_weight",
)


class Returns(NamedTuple):
    """Monte Carlo returns and how much of each is missing."""

    values: NDArray[np.float64]
    """``(n,)`` discounted sum of the rewards from each row to the end of its episode's record."""
    remaining: NDArray[np.float64]
    """``(n,)`` weight in [0, 1] of the value of the state where the record stops; 0 when a terminal is reached."""


@dataclass(frozen=True)
class Problem:
    """One finding about the data: what it is, how many rows or columns, where first, and what to do."""

    what: str
    count: int
    first: str
    mend: str


@dataclass(frozen=True)
class DataReport:
    """What a log contains and what is odd about it. JSON-ready through :meth:`to_dict`."""

    source: str
    format: str
    n_transitions: int
    n_episodes: int
    obs_dim: int
    action: str
    terminated: int
    truncated: int
    unfinished: int
    dropped: Mapping[str, int]
    problems: tuple[Problem, ...]
    reward: Mapping[str, float]
    length: Mapping[str, float]

    def to_dict(self) -> dict[str, Any]:
        """Return plain dictionaries, lists, numbers and strings."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)} | {
            "dropped": dict(self.dropped),
            "problems": [dataclasses.asdict(problem) for problem in self.problems],
            "reward": dict(self.reward),
            "length": dict(self.length),
        }


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class Transitions:
    """Logged transitions, one row each.

    Arguments are array-likes of one length n; ``float32`` and ``float64`` are kept, other numbers become ``float64``.

    - ``observations``, ``next_observations``: ``(n, d)`` or ``(n,)``, finite; d = 1 for the latter. The next observation of a
      terminated row is never read and may be NaN.
    - ``rewards``: ``(n,)`` or ``(n, 1)``, finite.
    - ``terminated``, ``truncated``: ``(n,)`` flags (Gymnasium's meaning). A terminal state is worth 0; a truncated one keeps
      its value, estimated from its next observation.
    - ``actions``, ``next_actions``: ``(n, a)`` or ``(n,)``, optional; next actions are the target policy's at s'.
    - ``discounts``: ``(n,)`` in [0, 1], multiply gamma per transition; None = 1.
    - ``episode_ids``: ``(n,)`` integers or strings. None: an episode ends after each terminated or truncated row,
      and nowhere else.
    - ``steps``: ``(n,)`` integers, increasing inside an episode; None: counted from 0.
    - ``sample_weight``: ``(n,)`` finite and >= 0; None = 1.

    Raises :class:`~valueformer.errors.InputError` naming the field, what was expected and got, and the mend.
    ``data[mask | slice | indices]`` is again Transitions; slices share memory.
    """

    observations: Array
    next_observations: Array
    rewards: Array
    terminated: Array
    truncated: Array = None  # pyright: ignore[reportAssignmentType]  # always an array after construction
    actions: Array | None = None
    next_actions: Array | None = None
    discounts: Array | None = None
    episode_ids: Array = None  # pyright: ignore[reportAssignmentType]
    steps: Array = None  # pyright: ignore[reportAssignmentType]
    sample_weight: Array | None = None
    source: str = "memory"
    format: str = "arrays"
    dropped: Mapping[str, int] = field(default_factory=dict)

    if TYPE_CHECKING:  # what the generated constructor accepts, which is more than what the fields hold afterwards

        def __init__(
            self,
            *,
            observations: ArrayLike,
            next_observations: ArrayLike,
            rewards: ArrayLike,
            terminated: ArrayLike,
            truncated: ArrayLike | None = None,
            actions: ArrayLike | None = None,
            next_actions: ArrayLike | None = None,
            discounts: ArrayLike | None = None,
            episode_ids: ArrayLike | None = None,
            steps: ArrayLike | None = None,
            sample_weight: ArrayLike | None = None,
            source: str = "memory",
            format: str = "arrays",
            dropped: Mapping[str, int] = ...,
        ) -> None: ...

    def __post_init__(self) -> None:
        rewards = fields.vector("rewards", self.rewards)
        n = len(rewards)
        if n == 0:
            raise InputError("rewards", "at least one transition", "none", "check the file and its filters")
        set_ = lambda name, value: object.__setattr__(self, name, _frozen(value))  # noqa: E731
        set_("rewards", fields.finite("rewards", fields.length("rewards", rewards, n)))
        observations = fields.finite(
            "observations", fields.length("observations", fields.matrix("observations", self.observations), n)
        )
        set_("terminated", fields.length("terminated", fields.flags("terminated", self.terminated), n))
        truncated = np.zeros(n, bool) if self.truncated is None else fields.flags("truncated", self.truncated)
        set_("truncated", fields.length("truncated", truncated, n))
        successors = fields.length("next_observations", fields.matrix("next_observations", self.next_observations), n)
        if successors.shape[1] != observations.shape[1]:
            raise InputError(
                "next_observations",
                f"{observations.shape[1]} columns, as in observations",
                str(successors.shape[1]),
                "store the same features for s and s'",
            )
        if self.terminated.any():  # s' := s where no successor exists: never read, but always finite
            successors = np.where(self.terminated[:, None] & ~np.isfinite(successors), observations, successors)
        set_("observations", observations)
        set_("next_observations", fields.finite("next_observations", successors.astype(observations.dtype, copy=False)))
        for name in ("actions", "next_actions"):
            if (value := getattr(self, name)) is not None:
                set_(name, fields.finite(name, fields.length(name, fields.matrix(name, value), n)))
        if self.discounts is not None:
            discounts = fields.finite("discounts", fields.length("discounts", fields.vector("discounts", self.discounts), n))
            fields.within("discounts", discounts, 0.0, 1.0)
            set_("discounts", discounts)
        if self.sample_weight is not None:
            weight = fields.finite(
                "sample_weight", fields.length("sample_weight", fields.vector("sample_weight", self.sample_weight), n)
            )
            fields.within("sample_weight", weight, 0.0, np.inf)
            set_("sample_weight", weight)
        self._set_episodes(n, set_)
        object.__setattr__(self, "dropped", MappingProxyType(dict(self.dropped)))

    def _set_episodes(self, n: int, set_: Any) -> None:
        ends = self.terminated | self.truncated
        if self.episode_ids is None:
            set_("episode_ids", np.concatenate([[0], np.cumsum(ends[:-1])]).astype(np.int64))
        else:
            ids = np.asarray(self.episode_ids).reshape(-1) if np.ndim(self.episode_ids) > 1 else np.asarray(self.episode_ids)
            if ids.dtype.kind == "f" and np.array_equal(ids, np.round(ids)):
                ids = ids.astype(np.int64)
            if ids.dtype.kind not in "iubU":
                ids = ids.astype(str) if ids.dtype.kind in "OST" and not fields.has_missing(ids) else ids
            if ids.dtype.kind not in "iubU":
                raise InputError("episode_ids", "integers or strings without gaps", f"dtype {ids.dtype}", "fill missing ids")
            set_("episode_ids", fields.length("episode_ids", ids, n))
        if self.steps is None:
            steps = np.empty(n, np.int64)
            for rows in self.episode_rows:
                steps[rows] = np.arange(len(steps[rows]))
            set_("steps", steps)
        else:
            steps = fields.vector("steps", self.steps)
            if not np.array_equal(steps, np.round(steps)):
                raise InputError("steps", "whole numbers", "fractions or NaN", "number the steps of each episode from 0")
            set_("steps", fields.length("steps", steps.astype(np.int64), n))
        for rows in self.episode_rows:
            self._check_episode(rows, ends)

    def _check_episode(self, rows: slice | Array, ends: Array) -> None:
        name = self.episode_ids[rows][0]
        early = np.flatnonzero(ends[rows][:-1])
        if len(early):
            row = int(np.arange(len(ends))[rows][early[0]])
            flag = "terminated" if self.terminated[row] else "truncated"
            raise InputError(
                flag,
                f"only the last row of episode {name!r} to end it",
                f"{flag} at row {row} with {len(ends[rows]) - 1 - early[0]} rows of the episode after it",
                "give each episode its own id, or leave episode_ids out so that flags end episodes",
            )
        backwards = np.flatnonzero(np.diff(self.steps[rows]) <= 0)
        if len(backwards):
            row = int(np.arange(len(ends))[rows][backwards[0] + 1])
            raise InputError(
                "steps",
                f"increasing numbers inside episode {name!r}",
                f"no increase at row {row}",
                "sort rows by episode, step",
            )

    # -- shape ------------------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self.rewards)

    @property
    def obs_dim(self) -> int:
        """Number of observation features d."""
        return self.observations.shape[1]

    @cached_property
    def episode_rows(self) -> tuple[slice | Array, ...]:
        """Rows of each episode in order of appearance: slices where contiguous (the usual case), else index arrays."""
        ids = self.episode_ids
        starts = np.flatnonzero(np.concatenate([[True], ids[1:] != ids[:-1]]))
        if len(np.unique(ids[starts])) == len(starts):
            return tuple(slice(int(a), int(b)) for a, b in zip(starts, [*starts[1:], len(ids)], strict=True))
        _, first, inverse = np.unique(ids, return_index=True, return_inverse=True)
        order = np.argsort(inverse, kind="stable")
        groups = np.split(order, np.cumsum(np.bincount(inverse))[:-1])
        return tuple(groups[k] for k in np.argsort(first))

    @property
    def n_episodes(self) -> int:
        """Number of episodes."""
        return len(self.episode_rows)

    def __getitem__(self, index: slice | ArrayLike) -> Transitions:
        rows = index if isinstance(index, slice) else np.atleast_1d(np.asarray(index))
        if not isinstance(rows, slice) and rows.dtype.kind not in "biu" and rows.size:
            raise InputError("index", "a slice, a boolean mask or integer indices", f"dtype {rows.dtype}")
        taken = object.__new__(Transitions)  # rows of validated data need no second validation
        for name in _ARRAYS:
            value = getattr(self, name)
            if value is not None:
                value = value[rows]
                value.flags.writeable = False
            object.__setattr__(taken, name, value)
        for name in ("source", "format", "dropped"):
            object.__setattr__(taken, name, getattr(self, name))
        if len(taken) == 0:
            raise InputError("index", "at least one row", "none", "check the mask")
        return taken

    def episodes(self) -> Iterator[Transitions]:
        """Yield each episode as Transitions; contiguous episodes are views."""
        return (self[rows] for rows in self.episode_rows)

    def replace(self, **changes: Any) -> Transitions:
        """Return a validated copy with some fields replaced."""
        current = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return Transitions(**(current | changes))

    def __repr__(self) -> str:
        return f"Transitions({len(self)} rows, {self.n_episodes} episodes, obs_dim={self.obs_dim}, source={self.source!r})"

    # -- meaning ----------------------------------------------------------------------------------------------------------

    @property
    def initial_observations(self) -> Array:
        """``(n_episodes, d)`` observation of each episode's first row."""
        return np.stack([self.observations[rows][0] for rows in self.episode_rows])

    def discount(self, gamma: float) -> NDArray[np.float64]:
        """Return ``gamma_i = gamma * discounts_i * (1 - terminated_i)``, ``(n,)``."""
        own = 1.0 if self.discounts is None else self.discounts.astype(np.float64)
        return gamma * own * ~self.terminated

    @cached_property
    def follower(self) -> NDArray[np.int64]:
        """``(n,)`` row that continues each row (same episode, next step); -1 where the record stops."""
        follower = np.full(len(self), -1, np.int64)
        for rows in self.episode_rows:
            index = np.arange(len(self))[rows]
            adjacent = np.diff(self.steps[rows]) == 1
            follower[index[:-1][adjacent]] = index[1:][adjacent]
        return follower

    def monte_carlo_returns(self, gamma: float) -> Returns:
        """Return ``G_t = r_t + gamma_t G_{t+1}`` to the end of each record, and the weight of what lies beyond it.

        Terminated rows end the sum exactly (remaining weight 0). Truncated and unfinished episodes, and gaps in ``steps``, stop
        it early: the true return is ``values + remaining * V(state where the record stops)``.
        """
        discount = self.discount(gamma).tolist()
        rewards, follower = self.rewards.astype(np.float64).tolist(), self.follower.tolist()
        values, remaining = [0.0] * len(self), [0.0] * len(self)
        for t in np.argsort(-self.steps, kind="stable").tolist():  # a follower has a larger step: last steps first
            k = follower[t]
            values[t] = rewards[t] + (discount[t] * values[k] if k >= 0 else 0.0)
            remaining[t] = discount[t] * (remaining[k] if k >= 0 else 1.0)
        return Returns(np.array(values), np.array(remaining))

    def validate(self) -> DataReport:
        """Report what the log contains and every oddity that a person should know of."""
        last = np.array([np.arange(len(self))[rows][-1] for rows in self.episode_rows])
        unfinished = last[~(self.terminated | self.truncated)[last]]
        lengths = np.array([len(self.rewards[rows]) for rows in self.episode_rows])
        rewards = self.rewards.astype(np.float64)
        action = "none" if self.actions is None else f"{self.actions.shape[1]} columns, {self.actions.dtype}"
        return DataReport(
            source=self.source,
            format=self.format,
            n_transitions=len(self),
            n_episodes=self.n_episodes,
            obs_dim=self.obs_dim,
            action=action,
            terminated=int(self.terminated.sum()),
            truncated=int(self.truncated.sum()),
            unfinished=len(unfinished),
            dropped=self.dropped,
            problems=tuple(self._problems(unfinished)),
            reward={name: float(getattr(np, name)(rewards)) for name in ("min", "max", "mean")} | {"sd": float(rewards.std())},
            length={"min": int(lengths.min()), "median": float(np.median(lengths)), "max": int(lengths.max())},
        )

    def _problems(self, unfinished: Array) -> Iterator[Problem]:
        for reason, count in self.dropped.items():
            yield Problem(f"dropped rows: {reason}", count, "", "store the final observation of each episode")
        if len(unfinished):
            yield Problem(
                "episodes without an end flag",
                len(unfinished),
                f"row {unfinished[0]}",
                "treated as cut off (bootstrapped); set terminated or truncated on their last row",
            )
        continued = np.flatnonzero(self.follower >= 0)
        mismatch = continued[(self.next_observations[continued] != self.observations[self.follower[continued]]).any(axis=1)]
        if len(mismatch):
            yield Problem(
                "next observation differs from the following row's observation",
                len(mismatch),
                f"row {mismatch[0]}",
                "harmless if the log is subsampled on purpose, else observations are misaligned",
            )
        both = np.flatnonzero(self.terminated & self.truncated)
        if len(both):
            yield Problem("terminated and truncated on one row", len(both), f"row {both[0]}", "counted as terminated")
        constant = np.flatnonzero((self.observations == self.observations[0]).all(axis=0))
        if len(constant):
            yield Problem("constant observation columns", len(constant), f"column {constant[0]}", "harmless; may be dropped")
        duplicates = _duplicate_columns(self.observations, skip=constant)
        if duplicates:
            a, b = duplicates[0]
            yield Problem("duplicate observation columns", len(duplicates), f"column {b} = {a}", "harmless; may be dropped")
        if not self.rewards.any():
            yield Problem("all rewards are zero", len(self), "row 0", "the value is zero everywhere; check the reward column")


def concatenate(parts: Sequence[Transitions]) -> Transitions:
    """Join logs row by row; episodes are renumbered so that equal ids in two parts stay two episodes.

    Optional fields must be present in all parts or in none; raises InputError otherwise.
    """
    if not parts:
        raise InputError("parts", "at least one Transitions", "none")
    arrays: dict[str, Any] = {}
    for name in _ARRAYS:
        present = [getattr(part, name) is not None for part in parts]
        if any(present) and not all(present):
            raise InputError(name, "the field in every part or in none", f"{sum(present)} of {len(parts)} parts have it")
        if all(present) and name != "episode_ids":
            arrays[name] = np.concatenate([getattr(part, name) for part in parts])
    ids, offset = [], 0
    for part in parts:
        _, inverse = np.unique(part.episode_ids, return_inverse=True)
        ids.append(inverse + offset)
        offset += part.n_episodes
    dropped: dict[str, int] = {}
    for part in parts:
        for reason, count in part.dropped.items():
            dropped[reason] = dropped.get(reason, 0) + count
    source = ", ".join(dict.fromkeys(part.source for part in parts))
    form = ", ".join(dict.fromkeys(part.format for part in parts))
    return Transitions(episode_ids=np.concatenate(ids), source=source, format=form, dropped=dropped, **arrays)


def _frozen(array: Array) -> Array:
    """Return a read-only array, copied if its owner could still write to it."""
    array = (array.copy() if array.flags.writeable else array).view()
    array.flags.writeable = False
    return array


def _duplicate_columns(matrix: Array, skip: Array) -> list[tuple[int, int]]:
    """Return pairs (kept, duplicate) of equal columns, in order, leaving out ``skip``."""
    seen: dict[bytes, int] = {}
    pairs = []
    for column in np.setdiff1d(np.arange(matrix.shape[1]), skip):
        key = np.ascontiguousarray(matrix[:, column]).tobytes()
        if key in seen:
            pairs.append((seen[key], int(column)))
        else:
            seen[key] = int(column)
    return pairs
