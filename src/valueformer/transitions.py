"""Transitions, the one data currency: logged steps (s, r, s') of any task, validated once and immutable.

Without a target policy everything computed from them concerns the BEHAVIOUR policy, the one that made the log.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from valueformer import fields
from valueformer.errors import InputError
from valueformer.inspection import DataReport, inspect

__all__ = ["FIELDS", "Returns", "Transitions", "concatenate", "followers"]

Array = NDArray[Any]
FIELDS = (
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


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class Transitions:
    """Logged transitions, one row each.

    Arguments are array-likes of one length n; ``float32`` and ``float64`` are kept, other numbers become ``float64``.

    - ``observations``, ``next_observations``: ``(n, d)`` or ``(n,)``, finite; d = 1 for the latter. The next observation of a
      terminated row is never read and may be NaN.
    - ``rewards``: ``(n,)`` or ``(n, 1)``, finite.
    - ``terminated``, ``truncated``: ``(n,)`` flags (Gymnasium's meaning). A terminal state is worth 0; a truncated one keeps
      its value, estimated from its next observation.
    - ``actions``, ``next_actions``: ``(n, a)`` or ``(n,)``, optional; next actions are the target policy's at s',
      and may be NaN where terminated.
    - ``discounts``: ``(n,)`` in [0, 1], multiply gamma per transition; None = 1.
    - ``episode_ids``: ``(n,)`` integers or strings. None: an episode ends after each terminated or truncated row,
      and nowhere else.
    - ``steps``: ``(n,)`` integers that order the rows of an episode; None: counted from 0 in order of appearance.
    - ``sample_weight``: ``(n,)`` finite and >= 0, not all 0; None = 1.
    - ``obs_names``: d names of features, where the source has them; queries are matched by them.
    - ``source``, ``format``, ``dropped`` (reason: rows), ``assumed`` (what the file did not say: rows), ``unused`` (names of
      columns): where the data come from, what was left out and what was taken for granted.

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
    obs_names: tuple[str, ...] | None = None
    source: str = "memory"
    format: str = "arrays"
    dropped: Mapping[str, int] = field(default_factory=dict)
    assumed: Mapping[str, int] = field(default_factory=dict)
    unused: tuple[str, ...] = ()

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
            obs_names: Sequence[str] | None = None,
            source: str = "memory",
            format: str = "arrays",
            dropped: Mapping[str, int] = ...,
            assumed: Mapping[str, int] = ...,
            unused: Sequence[str] = ...,
        ) -> None: ...

    def __post_init__(self) -> None:
        rewards = fields.vector("rewards", self.rewards)
        n = len(rewards)
        if n == 0:
            raise InputError("rewards", "at least one transition", "none", "check the file and its filters")
        self._set("rewards", fields.finite("rewards", rewards))
        observations = fields.length("observations", fields.matrix("observations", self.observations), n)
        self._set("terminated", fields.length("terminated", fields.flags("terminated", self.terminated), n))
        truncated = np.zeros(n, bool) if self.truncated is None else fields.flags("truncated", self.truncated)
        self._set("truncated", fields.length("truncated", truncated, n))

        successors = fields.length("next_observations", fields.matrix("next_observations", self.next_observations), n)
        if successors.shape[1] != observations.shape[1]:
            raise InputError(
                "next_observations",
                f"{observations.shape[1]} columns, as in observations",
                str(successors.shape[1]),
                "store the same features for s and s'",
            )
        ends = np.flatnonzero(self.terminated)
        if len(ends) and len(bad := ends[~np.isfinite(successors[ends]).all(axis=1)]):
            successors = successors.astype(np.result_type(observations, successors))  # a copy
            successors[bad] = np.where(
                np.isfinite(successors[bad]), successors[bad], observations[bad]
            )  # never read, but finite
        dtype = np.result_type(observations, successors)
        self._set("observations", fields.finite("observations", observations).astype(dtype, copy=False))
        self._set("next_observations", fields.finite("next_observations", successors).astype(dtype, copy=False))
        for name in ("actions", "next_actions"):
            if (value := getattr(self, name)) is not None:
                array = fields.length(name, fields.matrix(name, value), n)
                if name == "next_actions":  # there is no action after a terminal: never read
                    array = np.where(self.terminated[:, None] & ~np.isfinite(array), 0.0, array)
                self._set(name, fields.finite(name, array))
        for name, high in (("discounts", 1.0), ("sample_weight", np.inf)):
            if (value := getattr(self, name)) is not None:
                array = fields.finite(name, fields.length(name, fields.vector(name, value), n))
                fields.within(name, array, 0.0, high)
                self._set(name, array)
        if self.sample_weight is not None and not self.sample_weight.any():
            raise InputError("sample_weight", "at least one weight > 0", "only zeros")
        self._set_episodes(n)
        if self.obs_names is not None:
            object.__setattr__(self, "obs_names", tuple(map(str, self.obs_names)))
            if len(self.obs_names) != self.obs_dim:
                raise InputError("obs_names", f"{self.obs_dim} names, one per feature", str(len(self.obs_names)))
            if len(set(self.obs_names)) < len(self.obs_names):
                raise InputError("obs_names", "a name of its own for each feature", f"{', '.join(self.obs_names)[:80]}")
        # a path may hold bytes that are no text; reports and JSON need text
        object.__setattr__(self, "source", str(self.source).encode("utf-8", "replace").decode())
        for name in ("dropped", "assumed"):
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))
        object.__setattr__(self, "unused", tuple(self.unused))

    def _set(self, name: str, value: Array) -> None:
        object.__setattr__(self, name, _frozen(value))

    def _set_episodes(self, n: int) -> None:
        ends = self.terminated | self.truncated
        if self.episode_ids is None:
            self._set("episode_ids", np.concatenate([[0], np.cumsum(ends[:-1])]).astype(np.int64))
        else:
            ids = fields.identifiers("episode_ids", self.episode_ids)
            self._set("episode_ids", fields.length("episode_ids", ids, n))
        if self.steps is None:
            order = np.argsort(self.episode_index, kind="stable")
            starts = np.concatenate([[0], np.cumsum(np.bincount(self.episode_index))[:-1]])
            steps = np.empty(n, np.int64)
            steps[order] = np.arange(n) - starts[self.episode_index[order]]
            self._set("steps", steps)
        else:
            self._set("steps", fields.length("steps", fields.whole("steps", self.steps), n))
        early = np.flatnonzero(ends & (self.steps < self.last_steps[self.episode_index]))
        if len(early):
            row = int(early[0])
            raise InputError(
                "terminated" if self.terminated[row] else "truncated",
                f"only the last step of episode {self.episode_ids[row].item()!r} to end it",
                f"an end at row {row} and later steps after it",
                "give each episode its own id, or leave episode_ids out so that flags end episodes",
            )

    def __getstate__(self) -> dict[str, Any]:
        state = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return state | {"dropped": dict(self.dropped), "assumed": dict(self.assumed)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            if isinstance(value, np.ndarray):
                value.flags.writeable = False
            object.__setattr__(self, name, value)
        for name in ("dropped", "assumed"):
            object.__setattr__(self, name, MappingProxyType(state[name]))

    # -- shape ------------------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self.rewards)

    @property
    def obs_dim(self) -> int:
        """Number of observation features d."""
        return self.observations.shape[1]

    @cached_property
    def episode_index(self) -> NDArray[np.int64]:
        """``(n,)`` number of each row's episode, in order of appearance."""
        change = np.append(False, self.episode_ids[1:] != self.episode_ids[:-1])
        firsts = self.episode_ids[change]
        if len(np.unique(firsts)) == len(firsts) and self.episode_ids[0] not in firsts:  # episodes in one piece each
            return np.cumsum(change)
        _, first, inverse = np.unique(self.episode_ids, return_index=True, return_inverse=True)
        rank = np.empty(len(first), np.int64)
        rank[np.argsort(first)] = np.arange(len(first))
        return rank[inverse]

    @cached_property
    def last_steps(self) -> NDArray[np.int64]:
        """``(n_episodes,)`` largest step of each episode."""
        last = np.full(self.n_episodes, np.iinfo(np.int64).min)
        np.maximum.at(last, self.episode_index, self.steps)
        return last

    @cached_property
    def episode_rows(self) -> tuple[slice | Array, ...]:
        """Rows of each episode in order of appearance: slices where contiguous (the usual case), else index arrays."""
        index = self.episode_index
        if (np.diff(index) >= 0).all():
            ends = np.cumsum(np.bincount(index)).tolist()
            return tuple(slice(a, b) for a, b in zip([0, *ends], ends, strict=False))
        groups = np.split(np.argsort(index, kind="stable"), np.cumsum(np.bincount(index))[:-1])
        return tuple(groups)

    @property
    def n_episodes(self) -> int:
        """Number of episodes."""
        return int(self.episode_index.max()) + 1

    def __getitem__(self, index: slice | ArrayLike) -> Transitions:
        rows = index if isinstance(index, slice) else np.atleast_1d(np.asarray(index))
        if not isinstance(rows, slice) and rows.dtype.kind not in "biu" and rows.size:
            raise InputError("index", "a slice, a boolean mask or integer indices", f"dtype {rows.dtype}")
        if len(self.rewards[rows]) == 0:
            raise InputError("index", "at least one row", "none", "check the mask")
        arrays = {n: None if (a := getattr(self, n)) is None else a[rows] for n in FIELDS}
        none: Mapping[str, int] = MappingProxyType({})  # what reading the whole left out is no part's
        return self._trusted(**arrays, dropped=none, assumed=none)

    def _trusted(self, **arrays: Any) -> Transitions:
        """Return a copy with other arrays, whose validity the caller answers for: rows of valid data need no second check."""
        new = object.__new__(Transitions)
        for f in dataclasses.fields(self):
            value = arrays.get(f.name, getattr(self, f.name))
            if isinstance(value, np.ndarray):
                value = np.ascontiguousarray(value) if any(stride < 0 for stride in value.strides) else value.view()
                value.flags.writeable = False
            object.__setattr__(new, f.name, value)
        return new

    def with_numbers(
        self, *, observations: Array, next_observations: Array, rewards: Array, sample_weight: Array | None
    ) -> Transitions:
        """Return the same rows and episodes with transformed states (n, d), rewards and weights (n,), which must be finite."""
        for name, array in (("observations", observations), ("next_observations", next_observations), ("rewards", rewards)):
            fields.length(name, fields.finite(name, array), len(self))
        states: dict[str, Any] = {"observations": observations, "next_observations": next_observations, "obs_names": None}
        return self._trusted(**states, rewards=rewards, sample_weight=sample_weight)

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
        """``(n_episodes, d)`` observation of each episode's first step."""
        return self.observations[self.initial_rows]

    @cached_property
    def initial_rows(self) -> NDArray[np.int64]:
        """``(n_episodes,)`` row of each episode's first step."""
        order = np.lexsort((self.steps, self.episode_index))
        return order[np.flatnonzero(np.diff(self.episode_index[order], prepend=-1))]

    def discount(self, gamma: float) -> NDArray[np.float64]:
        """Return ``gamma_i = gamma * discounts_i * (1 - terminated_i)``, ``(n,)``."""
        own = 1.0 if self.discounts is None else self.discounts.astype(np.float64)
        return gamma * own * ~self.terminated

    @cached_property
    def follower(self) -> NDArray[np.int64]:
        """``(n,)`` row that continues each row (same episode, next step); -1 where the record stops."""
        return followers(self.episode_index, self.steps)

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
        return inspect(self)


def followers(episode: NDArray[np.int64], steps: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return for each row the row of the same episode with the next step, the first of several, or -1: ``(n,)``."""
    n = len(steps)
    same, change = episode[1:] == episode[:-1], np.diff(steps)
    if (np.diff(episode) >= 0).all() and (change[same] > 0).all():  # in order, each step once: the usual case
        return np.where(np.append(same & (change == 1), False), np.arange(1, n + 1), -1)
    order = np.lexsort((steps, episode))
    episode, steps = episode[order], steps[order]
    # rows with equal (episode, step) form a group; the first row of the next group may continue them
    starts = np.flatnonzero(np.diff(episode, prepend=-1) | np.diff(steps, prepend=steps[0]))
    group = np.searchsorted(starts, np.arange(n), side="right")
    following = starts[np.minimum(group, len(starts) - 1)]
    continues = (episode[following] == episode) & (steps[following] == steps + 1)
    follower = np.full(n, -1, np.int64)
    follower[order[continues]] = order[following[continues]]
    return follower


def concatenate(parts: Iterable[Transitions]) -> Transitions:
    """Join logs row by row; episodes are renumbered so that equal ids in two parts stay two episodes.

    Optional fields must be present in all parts or in none; raises InputError otherwise.
    """
    parts = list(parts)
    if not parts or not all(isinstance(part, Transitions) for part in parts):
        raise InputError("parts", "at least one Transitions, and nothing else", str([type(part).__name__ for part in parts]))
    for what in ("obs_dim", "obs_names"):
        if len({getattr(part, what) for part in parts}) > 1:
            raise InputError("parts", f"one {what}", str([getattr(part, what) for part in parts]), "same features in all")
    arrays: dict[str, Any] = {}
    for name in FIELDS:
        present = [getattr(part, name) is not None for part in parts]
        if any(present) and not all(present):
            raise InputError(name, "the field in every part or in none", f"{sum(present)} of {len(parts)} parts have it")
        if all(present) and name != "episode_ids":
            widths = {getattr(part, name).shape[1:] for part in parts}
            if len(widths) > 1:
                raise InputError(name, "one width in all parts", str(sorted(widths)))
            arrays[name] = np.concatenate([getattr(part, name) for part in parts])
    ids, offset = [], 0
    for part in parts:
        ids.append(part.episode_index + offset)
        offset += part.n_episodes
    counts: dict[str, Counter[str]] = {"dropped": Counter(), "assumed": Counter()}
    for part in parts:
        for name, count in counts.items():
            count.update(getattr(part, name))
    source = ", ".join(dict.fromkeys(part.source for part in parts))
    form = ", ".join(dict.fromkeys(part.format for part in parts))
    unused = tuple(dict.fromkeys(name for part in parts for name in part.unused))
    about: dict[str, Any] = {"source": source, "format": form, **counts, "unused": unused}
    return Transitions(episode_ids=np.concatenate(ids), obs_names=parts[0].obs_names, **about, **arrays)


def _frozen(array: Array) -> Array:
    """Return a read-only array, copied if anybody could still write to it, be it through the array that it is a view of."""
    owner = array
    while isinstance(owner.base, np.ndarray) and not owner.flags.writeable:
        owner = owner.base
    array = (array.copy() if owner.flags.writeable else array).view()
    array.flags.writeable = False
    return array
