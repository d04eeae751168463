"""Rollouts of vector environments: arrays ``(T, E, ..)`` of T time steps in E environments that reset themselves.

What the observation after an end is depends on the mode. Gymnasium >= 1.0 resets in the next step: the observation after an
end is the final one, and the step after it is a reset whose action was ignored. Stable-Baselines3 and older Gymnasium reset in
the same step: it is the first one of the next episode, and the final one is kept elsewhere or lost.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from valueformer import fields
from valueformer.errors import InputError
from valueformer.sources.alignment import LOST, Rows
from valueformer.sources.arrays import Plan, as_array
from valueformer.sources.options import NONE, Options

__all__ = ["from_sb3", "from_time_major", "is_sb3", "recognises"]

RESET = "reset step after the end of an episode, whose action was ignored"
_FINAL = ("final_observations", "final_obs", "final_observation", "terminal_observations")


def recognises(arrays: Mapping[str, Any]) -> bool:
    """Whether rewards are (T, E) and observations (T, E, ..) or (T + 1, E, ..)."""
    shapes: dict[str, tuple[int, ...]] = {str(name): getattr(value, "shape", ()) for name, value in arrays.items()}
    reward = _shape(shapes, "rewards", "reward")
    state = _shape(shapes, "observations", "obs")
    return len(reward) == 2 <= len(state) and state[1] == reward[1] and (len(state) > 2 or reward[1] > 1)


def _shape(shapes: Mapping[str, tuple[int, ...]], *names: str) -> tuple[int, ...]:
    return next((shapes[name] for name in names if name in shapes), ())


def from_time_major(arrays: Mapping[str, Any], options: Options, source: str) -> Rows:
    """Return the rows of all environments, one after the other.

    ``arrays``: observations (T or T + 1), rewards, terminated, truncated, and optionally actions, next_observations,
    ``final_observations`` (read where an episode ended) and ``episode_starts``. A row without successor is dropped and counted.
    Raises InputError where ends exist, neither kind of successor is stored and ``autoreset`` is not given.
    """
    if options.max_episode_steps is not None:
        mend = "name the flag of time limits: truncated_column (--truncated-column)"
        raise InputError("max_episode_steps", "a log of single episodes", f"the rollout {source}", mend)
    extra = {name: arrays[name] for name in (*_FINAL, "episode_starts") if arrays.get(name) is not None}
    names = [str(name) for name, value in arrays.items() if value is not None and name not in extra]
    plan = Plan(names, options, source)
    if own := next((plan.scalars[field] for field in ("episode_ids", "steps") if field in plan.scalars), None):
        mend = "leave it out, or flatten the rollout into rows"
        raise InputError(f"{source}: {own}", "episodes that follow from the flags, in a rollout", repr(own), mend)
    chosen = {field: as_array(arrays[name]) for field, name in plan.scalars.items() if name != NONE or name in names}
    rewards = chosen["rewards"]
    if rewards.ndim != 2:
        raise InputError(f"{source}: rewards", "shape (T, E): time steps, environments", str(rewards.shape))
    steps, envs = rewards.shape
    for field, name in plan.vectors.items():
        parts = [_wide(as_array(arrays[n]), steps, envs, f"{source}: {n}", field == "observations") for n in name]
        chosen[field] = np.concatenate(parts, axis=2)
    for field in ("terminated", "truncated", "done"):
        if field in plan.scalars:
            value = chosen.get(field, np.zeros((steps, envs)))
            if value.shape != (steps, envs):
                raise InputError(f"{source}: {field}", f"shape {(steps, envs)}, as rewards", str(value.shape))
            chosen[field] = fields.flags(f"{source}: {field}", value.reshape(-1)).reshape(steps, envs)
    truncated = chosen.setdefault("truncated", np.zeros((steps, envs), bool))
    if "done" in chosen:
        chosen["terminated"] = chosen.pop("done") & ~truncated
    final = next((_wide(as_array(extra[n]), steps, envs, n) for n in _FINAL if n in extra), None)
    chosen["next_observations"], keep, dropped = _successors(chosen, final, options.autoreset, source)
    ends = chosen["terminated"] | truncated
    lag = 2 if options.autoreset == "next-step" else 1  # a reset step lies between
    starts = np.zeros(ends.shape, bool)
    starts[lag:] = ends[:-lag]
    if "episode_starts" in extra:
        starts |= fields.flags("episode_starts", as_array(extra["episode_starts"]).reshape(-1)).reshape(steps, envs)
    starts[0] = True
    # where a truncated last row is dropped, its flag moves one row up with the cut
    lost = ~keep & truncated
    chosen["truncated"] = truncated | np.append(lost[1:] & ~starts[1:], np.zeros((1, envs), bool), axis=0)
    chosen["observations"] = chosen["observations"][:steps]
    first = np.cumsum(starts.T.reshape(-1)) - 1  # episodes are numbered environment by environment
    position = np.arange(steps * envs) - np.maximum.accumulate(np.where(starts.T.reshape(-1), np.arange(steps * envs), 0))
    flat = {name: value.swapaxes(0, 1).reshape(steps * envs, *value.shape[2:]) for name, value in chosen.items()}
    flat |= {"episode_ids": first, "steps": position}
    kept = keep.T.reshape(-1)
    return Rows({name: value[kept] for name, value in flat.items()}, unused=plan.unused, dropped=dropped)


def _wide(array: NDArray[Any], steps: int, envs: int, name: str, longer: bool = False) -> NDArray[Any]:
    if array.shape[:2] not in ((steps, envs), *([(steps + 1, envs)] if longer else [])):
        wanted = f"shape ({steps}{' or ' + str(steps + 1) if longer else ''}, {envs}, ..)"
        raise InputError(name, wanted, str(array.shape), "time first, then environments")
    return fields.numeric(name, array.reshape(*array.shape[:2], -1))


def _successors(
    chosen: Mapping[str, NDArray[Any]], final: NDArray[Any] | None, mode: str | None, source: str
) -> tuple[NDArray[Any], NDArray[Any], dict[str, int]]:
    """Return next observations (T, E, d), which rows to keep (T, E), and why others are dropped."""
    states, terminated = chosen["observations"], chosen["terminated"]
    ends = terminated | chosen["truncated"]
    steps, keep = len(ends), np.ones(ends.shape, bool)
    if (following := chosen.get("next_observations")) is not None:
        return _stored(states, following, ends, mode, source)
    following = states[1:] if len(states) > steps else np.append(states[1:], states[-1:], axis=0)
    lacking = np.zeros(ends.shape, bool)
    lacking[-1:] = len(states) == steps
    if final is not None:
        following, lacking = np.where(ends[..., None], final, following), lacking & ~ends
    elif mode == "same-step":
        lacking |= ends
    elif mode is None and ends[:-1].any():
        raise _unsaid(source, "episodes that end, without next_observations or final_observations")
    dropped: dict[str, int] = {}
    if mode == "next-step":
        keep, dropped = _without_resets(ends)
    lacking &= ~terminated & keep
    if lacking.any():
        dropped[LOST] = int(lacking.sum())
    return following, keep & ~lacking, dropped


def _stored(
    states: NDArray[Any], following: NDArray[Any], ends: NDArray[Any], mode: str | None, source: str
) -> tuple[NDArray[Any], NDArray[Any], dict[str, int]]:
    """Return stored successors; the row after an end is a reset step if it begins where the episode ended."""
    last = min(len(states) - 1, len(ends))
    begins_there = (states[1 : last + 1] == following[:last]).all(axis=2) & ends[:last]
    if mode is None and begins_there[: len(ends) - 1].any():
        raise _unsaid(source, "a row after an end that begins where the episode ended: a reset step, or an episode of its own?")
    keep, dropped = _without_resets(ends) if mode == "next-step" else (np.ones(ends.shape, bool), {})
    return following, keep, dropped


def _without_resets(ends: NDArray[Any]) -> tuple[NDArray[Any], dict[str, int]]:
    keep = np.ones(ends.shape, bool)
    keep[1:] = ~ends[:-1]
    return keep, {} if keep.all() else {RESET: int((~keep).sum())}


def _unsaid(source: str, got: str) -> InputError:
    mend = (
        "autoreset='next-step' (Gymnasium >= 1.0) or 'same-step' (Stable-Baselines3, older Gymnasium); on the command line "
        "--autoreset"
    )
    return InputError(f"{source}: autoreset", "how the environments reset themselves", got, mend)


def is_sb3(data: Any) -> bool:
    """Whether an object looks like a buffer of Stable-Baselines3."""
    return all(hasattr(data, name) for name in ("observations", "rewards", "pos", "full", "n_envs"))


def from_sb3(data: Any, options: Options) -> Rows:
    """Return the rows of a Stable-Baselines3 ReplayBuffer, oldest first; time limits are told from terminals by ``timeouts``.

    A buffer that does not handle time limits needs ``terminated_column="dones"``, which says that every end is terminal. A
    RolloutBuffer is refused: it has no such flag, and its rewards at time limits contain a bootstrapped value.
    """
    source = f"{type(data).__name__} in memory"
    if not hasattr(data, "dones"):
        mend = "pass the rollout as arrays (T, E): observations, actions, rewards, terminated, truncated, final_observations"
        got = "a buffer without them, whose rewards at time limits hold an estimate of the value"
        raise InputError(source, "terminated and truncated flags", got, mend)
    if not getattr(data, "handle_timeout_termination", True) and options.terminated_column != "dones":
        mend = "terminated_column='dones' if every end is terminal; else collect with handle_timeout_termination=True"
        raise InputError(f"{source}: timeouts", "time limits marked", "handle_timeout_termination=False", mend)
    size, after = len(data.rewards), getattr(data, "next_observations", None)
    # Without next observations the newest successor lies where the oldest row began, which is lost.
    first = (data.pos + (after is None)) % size if data.full else 0
    steps = size - (after is None) if data.full else data.pos

    def ordered(array: Any, more: int = 0) -> NDArray[Any]:
        rows = np.roll(np.asarray(array), -first, axis=0)[: steps + more]
        return rows.reshape(len(rows), data.n_envs, -1)

    def joined(parts: Any, more: int = 0) -> NDArray[Any]:
        members = [parts[name] for name in parts] if isinstance(parts, Mapping) else [parts]
        return np.concatenate([ordered(member, more) for member in members], axis=2)

    timeouts = ordered(data.timeouts)[..., 0].astype(bool)
    arrays = {
        "observations": joined(data.observations, more=after is None),
        "actions": ordered(data.actions),
        "rewards": ordered(data.rewards)[..., 0],
        "terminated": ordered(data.dones)[..., 0].astype(bool) & ~timeouts,
        "truncated": timeouts,
    }
    if after is not None:
        arrays["next_observations"] = joined(after)
    return from_time_major(arrays, Options(autoreset="same-step" if after is None else None), source)
