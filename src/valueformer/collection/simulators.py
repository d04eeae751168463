"""The simulators that logs can be collected from: Gymnasium's environments and MetaWorld's fifty tasks."""

from __future__ import annotations

import hashlib
import importlib
import inspect
import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from valueformer.errors import InputError, MissingExtraError

__all__ = ["SCHEMES", "Policy", "Simulator", "make", "make_policy", "policy_digest", "tasks", "versions"]

SCHEMES = ("gymnasium", "metaworld")
Policy = Callable[[Any, np.random.Generator], Any]
"""``policy(observation, generator) -> action``."""


class _Environment(Protocol):
    observation_space: Any
    action_space: Any

    def reset(self, *, seed: int | None = ...) -> tuple[Any, Any]: ...

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Simulator:
    """An environment, how to begin an episode in it, and how long one may last."""

    environment: _Environment
    reset: Callable[[int], Any]
    max_steps: int | None
    records: tuple[str, ...] = ()
    """Numbers of ``info`` that are worth keeping."""


def make(scheme: str, name: str, goal: int) -> Simulator:
    """Return a new simulator; raises InputError for a name it does not know, MissingExtraError without its package."""
    return _metaworld(name, goal) if scheme == "metaworld" else _gymnasium(name)


def _gymnasium(name: str) -> Simulator:
    gymnasium = _import("gymnasium", "gymnasium")
    try:
        with warnings.catch_warnings():  # about older versions of the same environment, most of them
            warnings.simplefilter("ignore")
            environment: Any = gymnasium.make(name)
    except (gymnasium.error.Error, ImportError, ValueError, TypeError) as error:  # each of them for some missing piece
        reason = " ".join(str(error).split())[:200]
        raise InputError(
            f"gymnasium:{name}", "an environment that gymnasium.make knows", reason, "install its package?"
        ) from error
    limit = environment.spec.max_episode_steps if environment.spec is not None else None
    return Simulator(environment, lambda seed: environment.reset(seed=seed)[0], limit)


def _metaworld(name: str, goal: int) -> Simulator:
    if name not in tasks():
        raise InputError(f"metaworld:{name}", f"one of the tasks {', '.join(tasks())}", repr(name))
    classes = _import("metaworld.env_dict", "metaworld").ALL_V3_ENVIRONMENTS_GOAL_OBSERVABLE
    environment: Any = classes[f"{name}-goal-observable"](seed=goal)  # the seed draws the goal and freezes it
    # MetaWorld's own reset ignores seeds; it returns to the start that the goal's seed drew.
    return Simulator(environment, lambda _: environment.reset()[0], environment.max_path_length, ("success",))


def tasks() -> list[str]:
    """Return the names of MetaWorld's tasks that have a scripted policy."""
    return sorted(_import("metaworld.policies", "metaworld").ENV_POLICY_MAP)


def make_policy(spec: str, scheme: str, name: str, action_space: Any) -> Policy:
    """Return the policy called ``random``, ``scripted`` (MetaWorld's own for the task), or ``module:function``.

    A function takes an observation, or an observation and a ``numpy.random.Generator`` from which all its randomness must come.
    Raises InputError where there is none.
    """
    if spec == "random":
        return lambda _, generator: _sample(action_space, generator)
    if spec == "scripted":
        if scheme != "metaworld":
            mend = "name a function of yours (module:function), or 'random'"
            raise InputError("--policy scripted", "a metaworld: task", f"{scheme}:{name}", mend)
        policy: Any = _import("metaworld.policies", "metaworld").ENV_POLICY_MAP[name]()

        def scripted(observation: Any, _: np.random.Generator) -> NDArray[Any]:
            with warnings.catch_warnings():  # the scripts warn on every step that exceeds the range, which is clipped here
                warnings.simplefilter("ignore")
                return np.clip(policy.get_action(observation), -1.0, 1.0)

        return scripted
    return _imported_policy(spec)


def _imported_policy(spec: str) -> Policy:
    where = f"--policy {spec}"
    module, colon, attribute = spec.partition(":")
    if not (colon and module and attribute):
        raise InputError(where, "'random', 'scripted' or module:function", repr(spec))
    if (here := os.getcwd()) not in sys.path:  # a script's own folder, as with `python -m`
        sys.path.insert(0, here)
    try:
        function = getattr(importlib.import_module(module), attribute)
        parameters = inspect.signature(function).parameters.values()
        count = sum(p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)
    except (Exception, SystemExit) as error:  # importing runs somebody's module
        raise InputError(
            where, "a function that can be imported", f"{type(error).__name__}: {error}", "check the name"
        ) from error
    if not callable(function) or count not in (1, 2):
        raise InputError(where, "a function of (observation) or (observation, generator)", f"{count} arguments without default")
    return function if count == 2 else lambda observation, _: function(observation)


def policy_digest(spec: str) -> str | None:
    """Return the SHA-256 of the module that a policy ``module:function`` comes from; None for the built-in ones."""
    if ":" not in spec:
        return None
    _imported_policy(spec)
    try:
        return hashlib.sha256(inspect.getsource(sys.modules[spec.partition(":")[0]]).encode()).hexdigest()
    except (OSError, TypeError):  # a module without source
        return None


def _sample(space: Any, generator: np.random.Generator) -> Any:
    """Draw an action uniformly; Gymnasium's own sampling keeps a generator inside the space, which is seeded from ours."""
    space.seed(int(generator.integers(2**31)))
    return space.sample()


def _import(module: str, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtraError(module.partition(".")[0], extra) from error


def versions(scheme: str) -> dict[str, str]:
    """Return the versions on which a collected log depends."""
    names = ("gymnasium", "numpy") + (("metaworld", "mujoco") if scheme == "metaworld" else ())
    return {name: version(name) for name in names}
