"""The domains of the transfer benchmark: MetaWorld's tasks at three noise levels, and Gymnasium environments with policies."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from valueformer.collection import Request
from valueformer.collection.rollout import NOISE
from valueformer.collection.simulators import tasks
from valueformer.transitions import Transitions

__all__ = ["FIVE", "Domain", "Group", "domains", "split"]

Group = Literal["five", "all", "gymnasium", "metaworld"]

CONTEXT = 600  # transitions, rounded up to whole episodes
# Held out: three times as many, so that a rare event in one episode does not decide a figure.
HELD_OUT = 1800
FIVE = ("pick-place-v3", "pick-place-wall-v3", "shelf-place-v3", "plate-slide-v3", "button-press-v3")
_HORIZON = 100
_OWN = "valueformer.bench.policies:"

# environment, policy, noise, episodes, limit: enough episodes for context and held-out part
_GYMNASIUM: tuple[tuple[str, str, float, int, int], ...] = (
    ("Acrobot-v1", "acrobot", 0.0, 36, 300),
    ("Ant-v5", "random", 0.0, 52, _HORIZON),
    ("CartPole-v1", "cartpole", 0.0, 20, 200),
    ("CartPole-v1", "random", 0.0, 150, _HORIZON),
    ("HalfCheetah-v5", "random", 0.0, 24, _HORIZON),
    ("Hopper-v5", "random", 0.0, 150, _HORIZON),
    ("Humanoid-v5", "random", 0.0, 130, _HORIZON),
    ("InvertedDoublePendulum-v5", "random", 0.0, 560, _HORIZON),
    ("InvertedPendulum-v5", "inverted_pendulum", 0.1, 56, 200),
    ("MountainCar-v0", "mountain_car", 0.0, 18, 200),
    ("MountainCarContinuous-v0", "mountain_car_continuous", 0.5, 24, 200),
    ("Pendulum-v1", "pendulum", 0.3, 24, _HORIZON),
    ("Pendulum-v1", "random", 0.0, 24, _HORIZON),
    ("Pusher-v5", "random", 0.0, 24, _HORIZON),
    ("Reacher-v5", "random", 0.0, 50, _HORIZON),
    ("Reacher-v5", "reacher", 0.1, 50, _HORIZON),
    ("Swimmer-v5", "random", 0.0, 24, _HORIZON),
    ("Walker2d-v5", "random", 0.0, 150, _HORIZON),
)


@dataclass(frozen=True)
class Domain:
    """An environment, a policy and a noise level."""

    name: str
    policy: str
    noise: str
    requested: Request
    chosen_on: bool
    """Whether the default model's heads and mixing rule were chosen with this domain in view (data seed 0 only)."""

    def request(self, seed: int) -> Request:
        """Return the log to collect for a data seed, which draws goals, starts and noise."""
        fields = {k: v for k, v in vars(self.requested).items() if k != "seed"}
        return Request(**fields, seed=seed)


def domains(group: Group) -> Iterator[Domain]:
    """Yield the domains of a group: the paper's five tasks, all of MetaWorld, Gymnasium, or both (``all``).

    Every second name of the alphabetical lists was in view while choosing, and the paper's five.
    """
    if group != "gymnasium":
        for i, task in enumerate(tasks()):
            if group != "five" or task in FIVE:
                for noise in NOISE:
                    request = Request(scheme="metaworld", name=task, episodes=24, noise=noise, max_steps=_HORIZON)
                    yield Domain(task, "scripted", noise, request, i % 2 == 0 or task in FIVE)
    if group in ("gymnasium", "all"):
        for i, (name, policy, noise, episodes, limit) in enumerate(_GYMNASIUM):
            spec = policy if policy == "random" else _OWN + policy
            request = Request(scheme="gymnasium", name=name, episodes=episodes, policy=spec, noise=noise, max_steps=limit)
            yield Domain(name, policy, f"{noise:g}", request, i % 2 == 0)


def split(data: Transitions) -> tuple[Transitions, Transitions]:
    """Return the context, the first whole episodes that reach 600 transitions, and the next, 1800."""
    ends = np.cumsum(np.bincount(data.episode_index))
    first = int(np.searchsorted(ends, CONTEXT)) + 1
    second = int(np.searchsorted(ends, ends[first - 1] + HELD_OUT)) + 1
    return data[data.episode_index < first], data[(data.episode_index >= first) & (data.episode_index < second)]
