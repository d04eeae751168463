"""Hand-written controllers for Gymnasium's environments: behaviour policies whose logs the transfer benchmark evaluates.

Each is ``policy(observation, generator) -> action``, as ``--policy valueformer.bench.policies:NAME`` asks for. They are meant
to be decent, not optimal; discrete ones explore by a random action now and then, continuous ones take ``--noise``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["acrobot", "cartpole", "inverted_pendulum", "mountain_car", "mountain_car_continuous", "pendulum", "reacher"]

Observation = NDArray[Any]


def cartpole(observation: Observation, generator: np.random.Generator) -> int:
    """Push the cart under the falling pole; every second action is random, so that it falls in the end."""
    position, velocity, angle, rate = observation
    push = 0.05 * position + 0.1 * velocity + angle + 0.3 * rate > 0.0
    return int(generator.integers(2)) if generator.random() < 0.5 else int(push)


def mountain_car(observation: Observation, generator: np.random.Generator) -> int:
    """Push along the velocity, which adds energy; one action in five is random."""
    along = 2 if observation[1] >= 0.0 else 0
    return int(generator.integers(3)) if generator.random() < 0.2 else along


def mountain_car_continuous(observation: Observation) -> NDArray[np.float64]:
    """Push along the velocity with 80 % of full force."""
    return np.array([0.8 if observation[1] >= 0.0 else -0.8])


def acrobot(observation: Observation, generator: np.random.Generator) -> int:
    """Torque along the second joint's velocity, which adds energy; one action in five is random."""
    torque = 2 if observation[5] >= 0.0 else 0
    return int(generator.integers(3)) if generator.random() < 0.2 else torque


def pendulum(observation: Observation) -> NDArray[np.float64]:
    """Swing up by steering the energy to that of rest at the top, catch with a proportional-derivative law there."""
    cosine, sine, rate = observation
    if cosine > 0.8:
        return np.array([-(12.0 * sine + 3.0 * rate)])
    along = 2.0 if rate >= 0.0 else -2.0
    return np.array([along if 0.5 * rate**2 + 15.0 * cosine < 15.0 else -along])


def inverted_pendulum(observation: Observation) -> NDArray[np.float64]:
    """Linear feedback on angle and angular velocity that holds the pole for a while."""
    position, angle, velocity, rate = observation
    return np.array([0.3 * position + 2.5 * angle + 0.3 * velocity + 0.4 * rate])


def reacher(observation: Observation) -> NDArray[np.float64]:
    """Drive the fingertip to the target along the arm's Jacobian transpose, damped."""
    cosine, sine, rate, error = observation[:2], observation[2:4], observation[6:8], observation[8:10]
    a, b = np.arctan2(sine, cosine)
    upper = 0.1 * np.array([-np.sin(a), np.cos(a)])
    lower = 0.11 * np.array([-np.sin(a + b), np.cos(a + b)])
    torque = -np.array([(upper + lower) @ error, lower @ error])
    return 20.0 * torque - 0.03 * rate
