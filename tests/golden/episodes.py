"""The twelve synthetic episodes that every golden file holds, and what a file cannot say about them.

A state is a tag: it names its episode and step, so a row shifted by one shows. All numbers are exact in float16.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "ENDS", "GARBAGE", "LENGTHS", "NOTES", "SCALE", "Episode", "action", "choice", "discount", "episodes", "reward", "state",
]  # fmt: skip

LENGTHS = (3, 1, 5, 2, 4, 3, 2, 6, 2, 3, 4, 5)
"""Steps of each episode; it has one state more."""

ENDS = ("term", "term", "trunc", "both", "term", "trunc", "term", "term", "trunc", "term", "term", "open")
"""How each episode ends: "both" flags on the same step, "open" has none."""

SCALE = 32
GARBAGE = -999.0
"""What stands where a format says that a number means nothing."""


def state(e: int, t: int) -> list[float]:
    """Return the state of episode ``e`` before step ``t``; ``t`` = its length gives the final one."""
    return [float(SCALE * e + t), float(e), float(t)]


def action(e: int, t: int) -> list[float]:
    """Return the continuous action of a step."""
    return [float(e), float(-t)]


def choice(e: int, t: int) -> int:
    """Return the discrete action of a step, 0 to 3."""
    return (e + t) % 4


def reward(e: int, t: int) -> float:
    """Return the reward of a step."""
    return float(SCALE * e + t)


def discount(e: int, t: int) -> float:
    """Return the discount of a step, in formats that have one: a tag of its own, not a realistic number."""
    return 1.0 - t / 64


@dataclass(frozen=True)
class Episode:
    """One episode of T steps: T + 1 observations, and T of everything else."""

    number: int
    end: str
    observations: NDArray[Any]
    actions: NDArray[Any]
    choices: NDArray[Any]
    rewards: NDArray[Any]
    discounts: NDArray[Any]
    terminated: NDArray[Any]
    truncated: NDArray[Any]

    def __len__(self) -> int:
        return len(self.rewards)


def episodes(dtype: Any = np.float32) -> list[Episode]:
    """Return all episodes in order, their numbers as ``dtype``."""
    return [_episode(e, dtype) for e in range(len(LENGTHS))]


def _episode(e: int, dtype: Any) -> Episode:
    length, end = LENGTHS[e], ENDS[e]
    steps = range(length)
    last = np.arange(length) == length - 1
    return Episode(
        number=e,
        end=end,
        observations=np.array([state(e, t) for t in range(length + 1)], dtype),
        actions=np.array([action(e, t) for t in steps], dtype),
        choices=np.array([choice(e, t) for t in steps], np.int64),
        rewards=np.array([reward(e, t) for t in steps], dtype),
        discounts=np.array([discount(e, t) for t in steps], dtype),
        terminated=last & (end in ("term", "both")),
        truncated=last & (end in ("trunc", "both")),
    )


NOTES = {
    "minari/t-states-hdf5": "T observations: the final state of every episode is absent",
    "minari/t-states-parquet": "T observations and no padding row: the final state of every episode is absent",
    "d3rlpy/v2.h5": "T observations; one flag, terminated: 'open' and 'trunc' are both False, 'both' is True. Also v2-*",
    "d3rlpy/v1.h5": "T observations; 'both' reads as terminated, since an end is a truncation only where it is no terminal",
    "d3rlpy/v1-no-episode-terminals.h5": "T observations; truncations are absent, so episodes 2-3, 5-6 and 8-9 run together",
    "d4rl/plain.hdf5": "T observations. Also column and virtual",
    "d4rl/no-timeouts.hdf5": "T observations; truncations are absent, and no single limit of steps restores them (5, 3 and 2)",
    "d4rl/next-no-timeouts.hdf5": "truncations show only where a next observation is not the following row's; 'both' is terminated",
    "d4rl/maze2d.hdf5": "T observations; no terminals, and timeouts at every end but the open one",
    "lerobot/v3": "T observations; 'both' has next.done and next.truncated, so it cannot be told from 'trunc'. Also v2",
    "lerobot/v3-no-reward": "T observations; no flags at all, and the reward is called score",
    "rlds/records": "'both' reads as terminated; the open episode has T observations; a 13th episode is invalid",
    "rlds/steps.parquet": "'both' reads as terminated; the open episode has T observations. Also flat",
    "rollouts/next-step.npz": "23 steps: episode 11 is cut after its first",
    "rollouts/same-step.npz": "17 steps: episode 5 is cut after two, 11 has none; final states are lost where an episode ended",
    "rollouts/same-step-final.npz": "17 steps: episode 5 is cut after two, 11 has none; final states are in final_observations",
    "tables/custom.parquet": "T observations; rows in random order",
    "tables/interleaved.csv": "T observations; step 0 of every episode, then step 1, ..",
}
"""What a file says otherwise than :func:`episodes`, or not at all; files not named here hold everything."""
