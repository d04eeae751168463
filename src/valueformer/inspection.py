"""What a log contains, and what is odd about it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

_DROPPED = {
    "no next observation at the end of a record": "store the final observation of each episode",
    "a number that is not finite": "repair them where they come from; their neighbours were not joined",
}

if TYPE_CHECKING:
    from valueformer.transitions import Transitions

__all__ = ["HEADER", "DataReport", "Problem", "facts", "inspect"]

HEADER = ("what", "how many", "first", "what to do")
"""Of a table of problems."""


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


def inspect(data: Transitions) -> DataReport:
    """Report what a log contains and every oddity that a person should know of."""
    ended = np.zeros(data.n_episodes, bool)
    np.logical_or.at(ended, data.episode_index, data.terminated | data.truncated)
    is_last = data.steps == data.last_steps[data.episode_index]
    unfinished = np.flatnonzero(is_last & ~ended[data.episode_index])
    lengths = np.bincount(data.episode_index)
    rewards = data.rewards.astype(np.float64)
    unit = float(np.abs(rewards).max()) or 1.0  # the square of a huge reward would overflow
    action = "none" if data.actions is None else f"{_count(data.actions.shape[1], 'column')}, {data.actions.dtype}"
    return DataReport(
        source=data.source,
        format=data.format,
        n_transitions=len(data),
        n_episodes=data.n_episodes,
        obs_dim=data.obs_dim,
        action=action,
        terminated=int(data.terminated.sum()),
        truncated=int(data.truncated.sum()),
        unfinished=int((~ended).sum()),
        dropped=data.dropped,
        problems=tuple(_problems(data, unfinished)),
        reward={
            "min": float(rewards.min()),
            "max": float(rewards.max()),
            "mean": float((rewards / unit).mean()) * unit,
            "sd": float((rewards / unit).std()) * unit,
        },
        length={"min": int(lengths.min()), "median": float(np.median(lengths)), "max": int(lengths.max())},
    )


def facts(document: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return what a log contains as (what, text) pairs, for the terminal and the page alike."""
    length, reward = document["length"], document["reward"]
    dropped = ", ".join(f"{count} ({reason})" for reason, count in document["dropped"].items())
    return [
        ("format", document["format"]),
        ("transitions", f"{document['n_transitions']} in {document['n_episodes']} episodes"),
        ("episode length", f"{length['min']:g} to {length['max']:g}, median {length['median']:g}"),
        ("observation", f"{document['obs_dim']} feature{'' if document['obs_dim'] == 1 else 's'}"),
        ("action", document["action"]),
        (
            "ends",
            f"{document['terminated']} terminated, {document['truncated']} truncated, {document['unfinished']} without flag",
        ),
        ("reward", ", ".join(f"{name} {value:.4g}" for name, value in reward.items())),
        ("rows dropped", dropped or "none"),
    ]


def _problems(data: Transitions, unfinished: NDArray[np.int64]) -> Iterator[Problem]:
    for reason, count in data.dropped.items():
        yield Problem(f"dropped rows: {reason}", count, "", _DROPPED.get(reason, "harmless"))
    for reason, count in data.assumed.items():
        yield Problem(f"assumed: {reason}", count, "", "check that this is what the log means")
    if data.unused:
        yield Problem(
            "columns not used",
            len(data.unused),
            ", ".join(map(repr, data.unused[:8])) + (", .." if len(data.unused) > 8 else ""),
            "harmless, unless one is a field under another name: ids, steps, a flag",
        )
    order = np.lexsort((data.steps, data.episode_index))
    twice = int(((np.diff(data.episode_index[order]) == 0) & (np.diff(data.steps[order]) == 0)).sum())
    if twice:
        yield Problem("rows with the same episode and step", twice, "", "harmless after resampling, else ids are not unique")
    if len(unfinished):
        yield Problem(
            "episodes without an end flag",
            len(unfinished),
            f"row {unfinished[0]}",
            "treated as cut off (bootstrapped); set terminated or truncated on their last row",
        )
    continued = np.flatnonzero(data.follower >= 0)
    mismatch = continued[(data.next_observations[continued] != data.observations[data.follower[continued]]).any(axis=1)]
    if len(mismatch):
        yield Problem(
            "next observation differs from the following row's observation",
            len(mismatch),
            f"row {mismatch[0]}",
            "harmless if the log is subsampled on purpose, else observations are misaligned",
        )
    both = np.flatnonzero(data.terminated & data.truncated)
    if len(both):
        yield Problem("terminated and truncated on one row", len(both), f"row {both[0]}", "counted as terminated")
    constant = np.flatnonzero((data.observations == data.observations[0]).all(axis=0))
    if len(constant):
        yield Problem("constant observation columns", len(constant), f"column {constant[0]}", "harmless; may be dropped")
    low, middle, high = np.percentile(data.observations.astype(np.float64), [5, 50, 95], axis=0)
    # a column that is nearly always the same (a gripper, a flag) has no scale to be far in
    far = (np.abs(data.observations - middle) > 100.0 * (high - low)) & (high > low)
    if far.any():
        row, column = np.argwhere(far)[0]
        first = f"row {row}, column {column}: {data.observations[row, column]:.4g}"
        yield Problem("values far outside the rest of their column", int(far.sum()), first, "a sensor fault? drop or repair it")
    duplicates = _duplicate_columns(data.observations, skip=constant)
    if duplicates:
        a, b = duplicates[0]
        yield Problem("duplicate observation columns", len(duplicates), f"column {b} = {a}", "harmless; may be dropped")
    if not data.rewards.any():
        yield Problem("all rewards are zero", len(data), "row 0", "the value is zero everywhere; check the reward column")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def _duplicate_columns(matrix: NDArray[Any], skip: NDArray[Any]) -> list[tuple[int, int]]:
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
