"""One episode: the policy's actions, noise on them, and what the simulator answered."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import numpy as np
from numpy.typing import NDArray

from valueformer.collection.simulators import Policy, Simulator
from valueformer.errors import InputError
from valueformer.writers import Record

__all__ = ["NOISE", "generator", "leaves", "rollout"]

Array = NDArray[Any]
NOISE: Mapping[str, float] = {"high": 1.0, "medium": 0.5, "low": 0.1}
"""Standard deviation of action noise, in units of half the action range: the levels of the bundled samples."""


def generator(*name: object) -> np.random.Generator:
    """Return a stream of random numbers that depends on an episode's name only, not on who collects it, or in what order."""
    digest = hashlib.sha256("/".join(map(str, name)).encode()).digest()
    return np.random.default_rng(int.from_bytes(digest[:8], "little"))


def rollout(
    simulator: Simulator, policy: Policy, *, noise: float, max_steps: int, seed: int, random: np.random.Generator
) -> Record:
    """Run one episode: action = clip(policy(s) + noise * half range * N(0, I)), and record the actions really executed.

    The episode ends where the simulator says so, or is truncated after ``max_steps``. Raises InputError for an action that
    does not fit, or is not finite.
    """
    space = simulator.environment.action_space
    observation = simulator.reset(seed)
    states, actions, rewards, infos = [deepcopy(observation)], [], [], []
    terminated = truncated = False
    while not (terminated or truncated):
        action = _executed(policy(deepcopy(observation), random), space, noise, random)
        actions.append(deepcopy(action))  # an environment may use its arrays again, and a policy change what it is given
        observation, reward, terminated, truncated, info = simulator.environment.step(action)
        states.append(deepcopy(observation))
        rewards.append(float(reward))
        infos.append({name: float(info[name]) for name in simulator.records if name in info})
        truncated = truncated or (not terminated and len(rewards) >= max_steps)
    flags = np.zeros((2, len(rewards)), bool)
    flags[:, -1] = terminated, truncated
    kept = {name: np.array([math.nan, *(info.get(name, math.nan) for info in infos)]) for name in simulator.records}
    return Record(_stack(states), _stack(actions), np.array(rewards), flags[0], flags[1], kept)


def _executed(action: Any, space: Any, noise: float, random: np.random.Generator) -> Any:
    low, high = getattr(space, "low", None), getattr(space, "high", None)
    if low is None or high is None:  # discrete, or a composite of spaces
        if not space.contains(action) and np.ndim(action) == 0 and action == np.floor(action):
            action = np.int64(action)  # a number of another type
        if not space.contains(action):
            raise InputError("--policy", f"an action in {space}", repr(action)[:80], "check what the policy returns")
        return action
    action = np.asarray(action, dtype=np.float64)
    if action.size != low.size or not np.isfinite(action).all():
        raise InputError(
            "--policy", f"{low.size} finite numbers per action", repr(action)[:80], "check what the policy returns"
        )
    action, low, high = action.reshape(low.shape), low.astype(np.float64), high.astype(np.float64)
    if noise:
        half = np.where(np.isfinite(high - low), (high - low) / 2.0, 1.0)
        action = action + noise * half * random.standard_normal(low.shape)
    return np.clip(action, low, high).astype(space.dtype)


def leaves(value: Any, prefix: str = "") -> dict[str, Any]:
    """Return the parts of a dict or tuple observation by path: ``a/b``, ``_index_0``; a single one is ``""``."""
    if isinstance(value, Mapping):
        items = list(value.items())
    elif isinstance(value, tuple):
        items = [(f"_index_{i}", part) for i, part in enumerate(value)]
    else:
        return {prefix: value}
    return {k: v for name, part in items for k, v in leaves(part, f"{prefix}/{name}".lstrip("/")).items()}


def _stack(values: list[Any]) -> dict[str, Array]:
    """Stack observations or actions; float64 becomes float32, the precision that values are computed in."""
    parts = [leaves(value) for value in values]
    stacked = {name: np.array([part[name] for part in parts]) for name in parts[0]}
    if odd := next((name for name, array in stacked.items() if array.dtype.kind not in "fiub"), None):
        raise InputError(f"observation {odd!r}", "numbers", str(stacked[odd].dtype), "environments with text are not supported")
    return {name: array.astype(np.float32) if array.dtype == np.float64 else array for name, array in stacked.items()}
