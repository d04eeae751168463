"""How far to trust an answer: three plain levels, each with its reason and what would help."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from valueformer.metrics import HeldOut
from valueformer.transitions import Transitions

__all__ = ["FAR_OUT", "Level", "Verdict", "judge"]

Level = Literal["trust", "caution", "doubt"]

_GOOD_TDC, _POOR_TDC = 0.8, 0.97
_GOOD_EV, _POOR_EV = 0.6, 0.3
_GOOD_TDC_ALONE = 0.5  # asked for where no return is recorded long enough to compare with
_LEVEL_TOLERANCE = 0.25  # of the mean recorded return's size, or of the returns' spread: the larger
FAR_OUT = 0.1  # of the range that rewards allow: values so far beyond it are no rounding
_MANY_OUT, _MANY_FAR = 0.05, 0.25
_BEYOND = 0.05  # weight of what comes after the longest record; more, and no return was ever seen


@dataclass(frozen=True)
class Verdict:
    """A level, the reason for it, and a remedy where there is one."""

    level: Level
    reason: str
    remedy: str = ""

    def __str__(self) -> str:
        words = {
            "trust": "Trust these values",
            "caution": "Read these values with caution",
            "doubt": "Do not rely on these values",
        }
        helps = f" What would help: {self.remedy}." if self.remedy else ""
        return f"{words[self.level]}: {self.reason}.{helps}"


def judge(
    data: Transitions,
    heldout: HeldOut,
    *,
    gamma: float,
    status: str,
    message: str = "",
    level: Mapping[str, Any] | None = None,
    far: float = 0.0,
    out_of_range: float = 0.0,
) -> Verdict:
    """Say what the held-out numbers mean, from the worst finding to the mildest.

    ``level``: mean_value, mean_return and return_spread of held-out values and recorded returns, where recorded;
    ``far``: share of states far from the other episodes; ``out_of_range``: share of values far beyond what rewards add up to.
    """
    remedy = _remedy(data, gamma)
    if status in ("diverged", "singular"):
        return Verdict("doubt", f"the computation ended {status} ({message})", "step_size='fast', or a ridge such as 1e-3")
    if not data.rewards.any():
        return Verdict("doubt", "rewards are all zero: V is zero", "check the reward column")
    if heldout.td_error is None:
        return Verdict(
            "caution", "with a single episode nothing could be held out: these values fit the log, untested", "more episodes"
        )
    if heldout.tdc is None:
        return Verdict("caution", "a constant explains this log exactly, so the states have nothing to add")
    tdc, explained = heldout.tdc, heldout.explained_variance
    numbers = f"on episodes left out their TD error is {tdc:.2f} times that of the best constant"
    if explained is not None:
        numbers += f" and they explain {max(explained, 0.0):.0%} of the variance of the returns"
    if out_of_range > _MANY_OUT:
        return Verdict("doubt", f"{out_of_range:.0%} of them lie beyond what such rewards can add up to", remedy)
    if tdc >= _POOR_TDC or (explained is not None and explained < _POOR_EV):
        return Verdict("doubt", f"{numbers}: they say little beyond one average number", remedy)
    if (off := _level_off(level)) is not None:
        mend = "initial_level='mean' (--level mean), which follows recorded returns" if data.terminated.any() else remedy
        return Verdict("caution", f"{numbers}, but {off}", mend)
    if far > _MANY_FAR:
        return Verdict("caution", f"{numbers}, but {far:.0%} of the states are far from all other episodes", "more episodes")
    if explained is None and tdc > _GOOD_TDC_ALONE:
        return Verdict("caution", f"{numbers}, and no return is recorded long enough to compare with", remedy)
    if tdc > _GOOD_TDC or (explained is not None and explained < _GOOD_EV):
        return Verdict("caution", numbers, remedy)
    return Verdict("trust", numbers)


def _level_off(level: Mapping[str, Any] | None) -> str | None:
    if level is None or level.get("mean_value") is None:
        return None
    value, recorded = level["mean_value"], level["mean_return"]
    if abs(value - recorded) <= _LEVEL_TOLERANCE * max(abs(recorded), level["return_spread"]):
        return None
    return f"their level is off: they average {value:.3g} where recorded returns average {recorded:.3g}"


def _remedy(data: Transitions, gamma: float) -> str:
    """Return the likeliest cause of poor values that the log itself shows."""
    if looks_like_ids(data.observations, data.next_observations):
        return "states look like ids, one-hot them"
    horizon = int(np.bincount(data.episode_index).max())
    if not data.terminated.any() and gamma**horizon > _BEYOND:
        short = f"gamma {gamma:g} is too close to 1 for episodes of {horizon} steps that never end"
        return f"{short}: a smaller gamma, or longer episodes"
    if data.n_episodes < 20:
        return f"more episodes (there are {data.n_episodes})"
    return "states that tell more about the rewards to come, or more episodes"


def looks_like_ids(states: NDArray[Any], successors: NDArray[Any]) -> bool:
    """Whether states are whole numbers between which distance means nothing: a step goes as far as a jump to a random state."""
    if states.shape[1] > 2 or not np.isfinite(states).all() or (states != np.round(states)).any():
        return False
    distinct = np.unique(states, axis=0)
    if not 3 <= len(distinct) <= max(3, len(states) // 2):
        return False
    moved = (states != successors).any(axis=1)
    if not moved.any():
        return False
    step = np.abs(states[moved].astype(float) - successors[moved]).sum(axis=1).mean()
    shuffled = successors[moved][np.random.default_rng(0).permutation(int(moved.sum()))]
    jump = np.abs(states[moved].astype(float) - shuffled).sum(axis=1).mean()
    return bool(step > 0.75 * jump)
