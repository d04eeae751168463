"""Reward processes of known value: finite chains by a linear solve, linear-quadratic systems by a Lyapunov equation.

They are what estimates and intervals are tested against, and what pretraining can draw tasks from.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import solve_discrete_lyapunov

from valueformer.arguments import check_gamma
from valueformer.errors import InputError
from valueformer.transitions import Transitions

__all__ = [
    "DrawnValue",
    "FiniteMRP",
    "LinearQuadratic",
    "RewardProcess",
    "boyan_chain",
    "drawn_value",
    "linear_quadratic",
    "loop",
    "random_loop",
    "sample",
    "sample_with_states",
]

Array = NDArray[Any]


class RewardProcess(Protocol):
    """A Markov reward process that can be sampled and whose value is known."""

    def start(self, count: int, generator: np.random.Generator) -> Array:
        """Draw initial states ``(count, k)``, in the process's own coordinates."""
        ...

    def step(self, states: Array, generator: np.random.Generator) -> tuple[Array, Array, NDArray[np.bool_]]:
        """Return successors ``(count, k)``, rewards ``(count,)`` and whether each transition terminates."""
        ...

    def observe(self, states: Array) -> Array:
        """Return what is logged of states: ``(count, d)``."""
        ...

    def value(self, states: Array, gamma: float) -> Array:
        """Return exact V ``(count,)``."""
        ...

    def initial_value(self, gamma: float) -> float:
        """Return the exact mean of V over initial states."""
        ...


@dataclass(frozen=True, eq=False)
class FiniteMRP:
    """A finite chain, ``V = (I - gamma P)^{-1} r``; a row of the transition matrix that sums to less than 1 terminates.

    ``transition``: ``(s, s)``; ``rewards``: ``(s,)``, earned on leaving a state; ``features``: ``(s, d)``;
    ``initial``: ``(s,)``.
    """

    transition: Array
    rewards: Array
    features: Array
    initial: Array

    def __post_init__(self) -> None:
        size = len(self.rewards)
        shapes = (self.transition.shape, self.features.shape[:1], self.initial.shape)
        if shapes != ((size, size), (size,), (size,)):
            raise InputError("FiniteMRP", f"arrays of {size} states", str(shapes))
        rows = self.transition.sum(axis=1)
        if (self.transition < 0).any() or (rows > 1 + 1e-9).any() or abs(self.initial.sum() - 1) > 1e-9:
            raise InputError("FiniteMRP", "probabilities", f"rows that sum to {rows.min():g} .. {rows.max():g}")

    def start(self, count: int, generator: np.random.Generator) -> Array:
        """Draw initial states ``(count, 1)``: their numbers."""
        return generator.choice(len(self.initial), size=(count, 1), p=self.initial).astype(float)

    def step(self, states: Array, generator: np.random.Generator) -> tuple[Array, Array, NDArray[np.bool_]]:
        """Return successors, rewards and ends."""
        index = states[:, 0].astype(int)
        draw = generator.random(len(index))
        following = (np.cumsum(self.transition[index], axis=1) <= draw[:, None]).sum(axis=1)
        ended = following >= len(self.rewards)
        return np.where(ended, index, following)[:, None].astype(float), self.rewards[index], ended

    def observe(self, states: Array) -> Array:
        """Return features ``(count, d)``."""
        return self.features[states[:, 0].astype(int)]

    def value(self, states: Array, gamma: float) -> Array:
        """Return exact V ``(count,)``; raises InputError where it is infinite."""
        check_gamma(gamma)
        system = np.eye(len(self.rewards)) - gamma * self.transition
        if np.linalg.cond(system) > 1e12:
            raise InputError("gamma", "a chain that ends, or a gamma < 1", str(gamma))
        return np.linalg.solve(system, self.rewards)[states[:, 0].astype(int)]

    def initial_value(self, gamma: float) -> float:
        """Return the exact mean of V over initial states."""
        return float(self.initial @ self.value(np.arange(len(self.rewards))[:, None].astype(float), gamma))


@dataclass(frozen=True, eq=False)
class LinearQuadratic:
    """``x' = A x + N(0, noise^2 I)``, reward ``-x^T cost x``, starts at N(0, spread^2 I), never ends.

    ``V(x) = -x^T S x - gamma noise^2 tr(S) / (1 - gamma)`` with ``S = cost + gamma A^T S A`` (Bertsekas 2012, 4.1).
    """

    dynamics: Array
    cost: Array
    noise: float
    spread: float

    def start(self, count: int, generator: np.random.Generator) -> Array:
        """Draw initial states ``(count, d)``."""
        return self.spread * generator.standard_normal((count, len(self.cost)))

    def step(self, states: Array, generator: np.random.Generator) -> tuple[Array, Array, NDArray[np.bool_]]:
        """Return successors, rewards, and no ends."""
        successors = states @ self.dynamics.T + self.noise * generator.standard_normal(states.shape)
        rewards = -np.einsum("ni,ij,nj->n", states, self.cost, states)
        return successors, rewards, np.zeros(len(states), bool)

    def observe(self, states: Array) -> Array:
        """Return the states as they are."""
        return states

    def _quadratic(self, gamma: float) -> Array:
        check_gamma(gamma)
        scaled = np.sqrt(gamma) * self.dynamics
        if not (gamma < 1 and np.abs(np.linalg.eigvals(scaled)).max() < 1):
            raise InputError("gamma", "a value that is finite", str(gamma), "a smaller gamma")
        return solve_discrete_lyapunov(scaled.T, self.cost)

    def value(self, states: Array, gamma: float) -> Array:
        """Return exact V ``(count,)``; raises InputError where it is infinite."""
        S = self._quadratic(gamma)
        constant = gamma * self.noise**2 * np.trace(S) / (1.0 - gamma)
        return -np.einsum("ni,ij,nj->n", states, S, states) - constant

    def initial_value(self, gamma: float) -> float:
        """Return the exact mean of V over initial states."""
        S = self._quadratic(gamma)
        return float(-(self.spread**2) * np.trace(S) - gamma * self.noise**2 * np.trace(S) / (1.0 - gamma))


@dataclass(frozen=True, eq=False)
class DrawnValue:
    """Random linear dynamics with a value drawn first: V a draw from an RBF Gaussian process, rewards whatever makes it true.

    ``x' = A x + N(0, noise^2 I)``, ``V(x) = sum_k a_k cos(w_k x + b_k)`` (random Fourier features, Rahimi & Recht 2007) and
    ``r(x) = V(x) - gamma E V(x')`` in closed form, ``E cos(w x' + b) = exp(-noise^2 |w|^2 / 2) cos(w A x + b)``.
    """

    dynamics: Array
    noise: float
    spread: float
    frequencies: Array
    phases: Array
    amplitudes: Array
    gamma: float

    def start(self, count: int, generator: np.random.Generator) -> Array:
        """Draw initial states ``(count, d)``."""
        return self.spread * generator.standard_normal((count, len(self.dynamics)))

    def step(self, states: Array, generator: np.random.Generator) -> tuple[Array, Array, NDArray[np.bool_]]:
        """Return successors, rewards, and no ends."""
        mean = states @ self.dynamics.T
        successors = mean + self.noise * generator.standard_normal(states.shape)
        rewards = self._mean(states, 0.0) - self.gamma * self._mean(mean, self.noise)
        return successors, rewards, np.zeros(len(states), bool)

    def observe(self, states: Array) -> Array:
        """Return the states as they are."""
        return states

    def _mean(self, centres: Array, noise: float) -> Array:
        """Return the mean of V over ``N(centre, noise^2 I)``."""
        damping = np.exp(-0.5 * noise**2 * np.square(self.frequencies).sum(1))  # (k,)
        return np.cos(centres @ self.frequencies.T + self.phases) @ (damping * self.amplitudes)

    def value(self, states: Array, gamma: float) -> Array:
        """Return exact V ``(count,)``; raises InputError for another gamma than the one the rewards were made for."""
        if gamma != self.gamma:
            raise InputError("gamma", f"{self.gamma:g}, for which this value was drawn", str(gamma))
        return self._mean(states, 0.0)

    def initial_value(self, gamma: float) -> float:
        """Return the exact mean of V over initial states."""
        return float(self._mean(np.zeros((1, len(self.dynamics))), self.spread)[0])


Seed = int | np.random.Generator


def boyan_chain(
    seed: Seed = 0, *, states: int = 10, dim: int = 4, representable: bool = False, gamma: float = 0.9
) -> FiniteMRP:
    """Return the random Boyan chain of Wang et al. (2025): each state goes one or two further, the last one starts anew.

    Transition probabilities and the initial law from U(.01, .99), features and rewards from U(-1, 1). ``representable``: V is
    linear in the features with weights from N(0, I), and rewards are ``(I - gamma P) V``.
    """
    generator = np.random.default_rng(seed)
    P = np.zeros((states, states))
    one = generator.uniform(0.01, 0.99, size=states)
    for i in range(states - 2):
        P[i, i + 1], P[i, i + 2] = one[i], 1.0 - one[i]
    P[-2, -1] = 1.0
    P[-1] = generator.uniform(0.01, 0.99, size=states)
    P[-1] /= P[-1].sum()
    initial = generator.uniform(0.01, 0.99, size=states)
    return _with_rewards(P, initial, generator, dim, gamma if representable else None)


def random_loop(
    seed: Seed = 0, *, states: int = 10, dim: int = 4, threshold: float = 0.5, representable: bool = False, gamma: float = 0.9
) -> FiniteMRP:
    """Return the random loop of Wang et al. (2025): each state leads to the next, and to others with chance 1 - ``threshold``.

    Probabilities and the initial law from U(.01, .99), features, rewards and ``representable`` as in :func:`boyan_chain`.
    """
    generator = np.random.default_rng(seed)
    connected = generator.uniform(0.01, 0.99, size=(states, states)) > threshold
    np.fill_diagonal(connected, False)
    connected[np.arange(states), (np.arange(states) + 1) % states] = True
    P = generator.uniform(0.01, 0.99, size=(states, states)) * connected
    initial = generator.uniform(0.01, 0.99, size=states)
    return _with_rewards(P / P.sum(axis=1, keepdims=True), initial, generator, dim, gamma if representable else None)


def _with_rewards(P: Array, initial: Array, generator: np.random.Generator, dim: int, gamma: float | None) -> FiniteMRP:
    """Draw features, and rewards: for a value that is linear in them if gamma is given."""
    features = generator.uniform(-1.0, 1.0, size=(len(P), dim))
    if gamma is None:
        rewards = generator.uniform(-1.0, 1.0, size=len(P))
    else:
        rewards = (np.eye(len(P)) - gamma * P) @ features @ generator.standard_normal(dim)
    return FiniteMRP(P, rewards, features, initial / initial.sum())


def drawn_value(
    seed: Seed = 0, *, dim: int = 4, temperature: float = 1.0, noise: float = 0.1, gamma: float = 0.9, features: int = 200
) -> DrawnValue:
    """Return random linear dynamics of spectral radius .8 to .98 whose value is drawn at an RBF temperature."""
    generator = np.random.default_rng(seed)
    return DrawnValue(
        dynamics=_dynamics(generator, dim),
        noise=noise,
        spread=1.0,
        frequencies=generator.standard_normal((features, dim)) / np.sqrt(temperature),
        phases=generator.uniform(0.0, 2.0 * np.pi, features),
        amplitudes=generator.standard_normal(features) * np.sqrt(2.0 / features),
        gamma=gamma,
    )


def linear_quadratic(seed: Seed = 0, *, dim: int = 4, noise: float = 0.1) -> LinearQuadratic:
    """Return random linear dynamics of spectral radius .8 to .98 with a random quadratic cost of trace 1."""
    generator = np.random.default_rng(seed)
    dynamics = _dynamics(generator, dim)
    root = generator.standard_normal((dim, dim))
    cost = root @ root.T
    return LinearQuadratic(dynamics, cost / np.trace(cost), noise, 1.0)


def _dynamics(generator: np.random.Generator, dim: int) -> Array:
    rotation, _ = np.linalg.qr(generator.standard_normal((dim, dim)))
    return generator.uniform(0.8, 0.98) * rotation


def loop(states: int = 12, *, stop: float = 0.05) -> FiniteMRP:
    """Return a lazy random walk on a circle that ends with probability ``stop`` at each step; reward: the height."""
    angle = 2.0 * np.pi * np.arange(states) / states
    P = np.zeros((states, states))
    for i in range(states):
        for move, p in ((-1, 0.25), (0, 0.25), (1, 0.5)):
            P[i, (i + move) % states] += (1.0 - stop) * p
    return FiniteMRP(P, np.sin(angle), np.column_stack([np.cos(angle), np.sin(angle)]), np.full(states, 1.0 / states))


def sample(process: RewardProcess, episodes: int, length: int, seed: Seed = 0) -> Transitions:
    """Return logged episodes of at most ``length`` steps each; those that did not end are truncated."""
    return sample_with_states(process, episodes, length, seed)[0]


def sample_with_states(process: RewardProcess, episodes: int, length: int, seed: Seed = 0) -> tuple[Transitions, Array]:
    """Return logged episodes as :func:`sample` does, and the states ``(n, k)`` behind them, whose value is known."""
    generator = np.random.default_rng(seed)
    states = process.start(episodes, generator)
    running = np.ones(episodes, bool)
    rows: dict[str, list[Any]] = {name: [] for name in ("state", "s", "r", "next", "end", "id", "t")}
    for t in range(length):
        successors, rewards, ended = process.step(states, generator)
        for name, array in (
            ("state", states), ("s", process.observe(states)), ("r", rewards), ("end", ended),
            ("next", process.observe(successors)), ("id", np.arange(episodes)), ("t", np.full(episodes, t)),
        ):  # fmt: skip
            rows[name].append(array[running])
        running = running & ~ended
        states = successors
        if not running.any():
            break
    column: dict[str, NDArray[Any]] = {name: np.concatenate(parts) for name, parts in rows.items()}
    order = np.lexsort((column["t"], column["id"]))
    column = {name: array[order] for name, array in column.items()}
    last = np.append(column["id"][1:] != column["id"][:-1], True)
    data = Transitions(
        observations=column["s"],
        next_observations=column["next"],
        rewards=column["r"],
        terminated=column["end"],
        truncated=last & ~column["end"],
        episode_ids=column["id"],
        steps=column["t"],
        source=type(process).__name__,
    )
    return data, column["state"]
