"""Distributions of tasks: random processes of known value, logs, simulators, and mixtures of them.

Every draw is a function of a generator alone, and generators are made from (seed, number of the task): the position in the
data is a number, so a run that is resumed, or spread over processes, sees the same tasks.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl

import numpy as np
from numpy.typing import NDArray

from valueformer import mrp
from valueformer.errors import InputError
from valueformer.mrp import FiniteMRP, RewardProcess, sample_with_states
from valueformer.transitions import Transitions, concatenate

__all__ = ["LogTasks", "Mixture", "ProcessTasks", "Task", "TaskDistribution", "Walks", "generator", "parse", "successors"]

_KNOWN = 0.05
Array = NDArray[Any]
Generator = np.random.Generator


def generator(*key: int) -> Generator:
    """Return the random numbers of one task, from the numbers that name it."""
    return np.random.default_rng(key)


@dataclass(frozen=True, eq=False)
class Task:
    """A context, and other transitions of the same task to be asked about."""

    context: Transitions
    queries: Transitions
    values: Array
    """``(m,)`` exact V at the queries' states, NaN where it is not known."""
    returns: Array
    """``(m,)`` Monte Carlo returns, NaN where the episode ends too soon to know."""


@dataclass(frozen=True, eq=False)
class Walks:
    """Consecutive transitions: ``(p, w, rows, ..)`` for p tasks and w walks of each."""

    states: Array
    next_states: Array
    rewards: Array
    discounts: Array
    """gamma d (1 - terminated)."""
    values: Array
    """Exact V of the states, NaN where it is not known."""
    returns: Array
    """Monte Carlo returns, NaN where they are not known."""


class TaskDistribution(ABC):
    """Where tasks come from."""

    @abstractmethod
    def draw(self, rng: Generator, context: int, queries: int, gamma: float) -> Task:
        """Return a task: ``context`` consecutive transitions, and ``queries`` of other episodes."""

    @abstractmethod
    def walks(self, rngs: Sequence[Generator], walks: int, rows: int, gamma: float) -> Walks:
        """Return one task per generator, ``walks`` times ``rows`` consecutive transitions of each."""

    @property
    def components(self) -> Sequence[TaskDistribution]:
        """The distributions that this one mixes."""
        return [self]


@dataclass(frozen=True)
class ProcessTasks(TaskDistribution):
    """A fresh random process for every task. ``make``: a generator and gamma to the process; ``length``: of its episodes."""

    make: Callable[[Generator, float], RewardProcess]
    length: int = 100

    def draw(self, rng: Generator, context: int, queries: int, gamma: float) -> Task:
        """Return a task whose value is known."""
        process = self.make(rng, gamma)
        data, states = self._enough(process, context + queries, rng)
        rest = data.episode_index > data.episode_index[context - 1]
        index = rng.choice(np.flatnonzero(rest), queries, replace=False)
        asked = data[index]
        return Task(data[:context], asked, process.value(states[index], gamma), _returns(data, gamma)[index])

    def _enough(self, process: RewardProcess, rows: int, rng: Generator) -> tuple[Transitions, Array]:
        """Return episodes with at least ``rows`` transitions beyond the one episode that a context may cut."""
        episodes = -(-rows // self.length) + 2
        while True:
            data, states = sample_with_states(process, episodes, self.length, rng)
            if len(data) - self.length >= rows:
                return data, states
            episodes *= 2

    def walks(self, rngs: Sequence[Generator], walks: int, rows: int, gamma: float) -> Walks:
        """Return walks that start anew where an episode ends."""
        processes = [self.make(rng, gamma) for rng in rngs]
        chains = [p for p in processes if isinstance(p, FiniteMRP)]
        if len(chains) == len(processes) and len({p.features.shape for p in chains}) == 1:
            return _finite_walks(chains, rngs, walks, rows, gamma)
        return _stacked([self._walk(p, rng, walks, rows, gamma) for p, rng in zip(processes, rngs, strict=True)])

    def _walk(self, process: RewardProcess, rng: Generator, walks: int, rows: int, gamma: float) -> list[Array]:
        parts = []
        for _ in range(walks):
            data, states = sample_with_states(process, 1, rows, rng)
            while len(data) < rows:  # it ended: start anew
                more, other = sample_with_states(process, 1, rows - len(data), rng)
                data, states = concatenate([data, more]), np.concatenate([states, other])
            parts.append(_columns(data, gamma, process.value(states, gamma), np.full(rows, np.nan)))
        return [np.stack(column) for column in zip(*parts, strict=True)]


@dataclass(frozen=True, eq=False)
class LogTasks(TaskDistribution):
    """Logs of one policy each; a task is a stretch of one of them."""

    logs: tuple[Transitions, ...]
    name: str
    _known: dict[tuple[int, float], Array] = field(default_factory=dict)

    def draw(self, rng: Generator, context: int, queries: int, gamma: float) -> Task:
        """Return a stretch of a log as context, and transitions of episodes that it does not touch."""
        which, data = self._log(rng, context + queries)
        start = int(rng.integers(len(data) - context + 1))
        rows = slice(start, start + context)
        rest = np.flatnonzero(~np.isin(data.episode_index, data.episode_index[rows]))
        if len(rest) < queries:
            raise InputError(
                self.name, f"{queries} transitions of other episodes than a context of {context} takes", str(len(rest)),
                "a longer log, or smaller --context or --queries",
            )  # fmt: skip
        index = rng.choice(rest, queries, replace=False)
        if (which, gamma) not in self._known:
            self._known[which, gamma] = _returns(data, gamma)
        return Task(data[rows], data[index], np.full(queries, np.nan), self._known[which, gamma][index])

    def walks(self, rngs: Sequence[Generator], walks: int, rows: int, gamma: float) -> Walks:
        """Return stretches of logs, which may cross the ends of episodes."""
        tasks = []
        for rng in rngs:
            _, data = self._log(rng, rows)
            parts = []
            for start in rng.integers(len(data) - rows + 1, size=walks):
                part = data[int(start) : int(start) + rows]
                parts.append(_columns(part, gamma, np.full(rows, np.nan), _returns(part, gamma)))
            tasks.append([np.stack(column) for column in zip(*parts, strict=True)])
        return _stacked(tasks)

    def _log(self, rng: Generator, rows: int) -> tuple[int, Transitions]:
        which = int(rng.integers(len(self.logs)))
        data = self.logs[which]
        if len(data) < rows:
            raise InputError(self.name, f"logs of at least {rows} transitions", str(len(data)), "a smaller --context")
        return which, data


@dataclass(frozen=True)
class Mixture(TaskDistribution):
    """Each task comes from one of several distributions, drawn by weight."""

    parts: tuple[TaskDistribution, ...]
    weights: tuple[float, ...]

    @property
    def components(self) -> Sequence[TaskDistribution]:
        """The distributions that this one mixes."""
        return self.parts

    def _pick(self, rng: Generator) -> int:
        return int(np.searchsorted(np.cumsum(self.weights), rng.random() * sum(self.weights), side="right"))

    def draw(self, rng: Generator, context: int, queries: int, gamma: float) -> Task:
        """Return a task of one of the distributions."""
        return self.parts[self._pick(rng)].draw(rng, context, queries, gamma)

    def walks(self, rngs: Sequence[Generator], walks: int, rows: int, gamma: float) -> Walks:
        """Return tasks of the distributions, in the order of the generators."""
        chosen = np.array([self._pick(rng) for rng in rngs])
        tasks: list[list[Array]] = [[]] * len(rngs)
        for k in np.unique(chosen).tolist():
            own = np.flatnonzero(chosen == k).tolist()
            drawn = self.parts[k].walks([rngs[i] for i in own], walks, rows, gamma)
            columns = [getattr(drawn, name) for name in Walks.__dataclass_fields__]
            for position, i in enumerate(own):
                tasks[i] = [column[position] for column in columns]
        return _stacked(tasks)


def _returns(data: Transitions, gamma: float) -> Array:
    """Return Monte Carlo returns, NaN where more than a twentieth of the sum lies beyond the record."""
    returns = data.monte_carlo_returns(gamma)
    return np.where(returns.remaining <= _KNOWN, returns.values, np.nan)


def successors(data: Transitions) -> Array:
    """Return next states ``(n, d)``; a terminal one, which nobody reads, is the state itself."""
    return np.where(data.terminated[:, None], data.observations, data.next_observations)


def _columns(data: Transitions, gamma: float, values: Array, returns: Array) -> list[Array]:
    return [data.observations, successors(data), data.rewards, data.discount(gamma), values, returns]


def _stacked(tasks: Sequence[list[Array]]) -> Walks:
    if len({task[0].shape for task in tasks}) > 1:
        raise InputError("tasks", "states of one dimension for model 'matrices'", "several", "leave some tasks out")
    return Walks(*(np.stack(column).astype(np.float64) for column in zip(*tasks, strict=True)))


def _finite_walks(chains: Sequence[FiniteMRP], rngs: Sequence[Generator], walks: int, rows: int, gamma: float) -> Walks:
    """Walk on many chains of one size at once; a walk whose chain ends starts anew."""
    size = len(chains[0].rewards)
    cumulated = np.stack([np.cumsum(p.transition, axis=1) for p in chains])  # (p, s, s)
    initial = np.stack([np.cumsum(p.initial) for p in chains])  # (p, s)
    draws = np.stack([rng.random((walks, rows + 1, 2)) for rng in rngs])  # (p, w, rows + 1, 2)
    task = np.arange(len(chains))[:, None]
    state = np.empty((len(chains), walks, rows + 1), np.int64)
    ended = np.zeros((len(chains), walks, rows), bool)
    fresh = np.minimum((initial[:, None, None] <= draws[..., 1:]).sum(-1), size - 1)  # (p, w, rows + 1)
    state[..., 0] = fresh[..., 0]
    for t in range(rows):
        row = cumulated[task, state[..., t]]  # (p, w, s)
        following = (row <= draws[..., t, 0, None]).sum(-1)
        # Rounding may leave the last cumulated probability a hair below one: that is not an end.
        ended[..., t] = (following >= size) & (row[..., -1] < 1.0 - 1e-9)
        state[..., t + 1] = np.where(ended[..., t], fresh[..., t + 1], np.minimum(following, size - 1))
    features = np.stack([p.features for p in chains])  # (p, s, d)
    every = np.arange(size)[:, None].astype(float)
    values = np.stack([p.value(every, gamma) for p in chains])  # (p, s)
    here = state[..., :-1]  # (p, w, rows)
    there = np.where(ended, here, state[..., 1:])
    p = task[..., None]
    rewards = np.stack([chain.rewards for chain in chains])
    unknown = np.full(here.shape, np.nan)
    return Walks(features[p, here], features[p, there], rewards[p, here], gamma * ~ended, values[p, here], unknown)


# -- specifications ------------------------------------------------------------------------------------------------------

_PROCESSES: dict[str, Callable[..., RewardProcess]] = {
    "boyan": mrp.boyan_chain,
    "loop": mrp.random_loop,
    "gp": mrp.drawn_value,
    "lq": mrp.linear_quadratic,
}


def parse(specifications: Sequence[str]) -> TaskDistribution:
    """Return the distribution behind specifications; several are a mixture, of equal shares or as a leading ``2*`` says.

    ``mrp:boyan``, ``mrp:loop`` (Wang et al. 2025), ``mrp:gp`` (a value drawn from an RBF Gaussian process on random linear
    dynamics) and ``mrp:lq`` (linear-quadratic), with options as in ``mrp:boyan?states=10&dim=4``; ``length``: episodes'.
    Anything else is read by :func:`valueformer.load`: files, ``sample:..``, ``minari:..``, ``gymnasium:..``, and
    ``metaworld:TASK?noise=high&goals=10&episodes=100``, each of whose goals is a task. Raises InputError.
    """
    parts, weights = [], []
    for text in specifications:
        weight, star, rest = text.partition("*")
        number = _number(weight) if star else None
        if star and number is not None and not 0.0 < number < np.inf:
            raise InputError("tasks", "a share > 0, as in '2*mrp:boyan'", repr(text))
        weights.append(1.0 if number is None else number)
        parts.append(_distribution(text if number is None else rest))
    return parts[0] if len(parts) == 1 else Mixture(tuple(parts), tuple(weights))


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _distribution(text: str) -> TaskDistribution:
    if text.startswith("mrp:"):
        return _process(text)
    from valueformer.sources import load
    from valueformer.sources.simulated import parse as parse_request

    scheme, _, rest = text.partition(":")
    data = load(text)
    goals = parse_request(scheme, rest).goals if scheme in ("metaworld", "gymnasium") else 1
    logs = [data] if goals == 1 else [data[data.episode_index % goals == g] for g in range(goals)]
    return LogTasks(tuple(logs), text)


def _process(text: str) -> ProcessTasks:
    name, _, query = text.removeprefix("mrp:").partition("?")
    if name not in _PROCESSES:
        raise InputError(f"tasks: {text}", f"mrp: and one of {', '.join(_PROCESSES)}", repr(name))
    make = _PROCESSES[name]
    known = {k: p.default for k, p in inspect.signature(make).parameters.items() if k not in ("seed", "gamma")}
    options: dict[str, Any] = {}
    length = 100
    for key, value in parse_qsl(query, keep_blank_values=True):
        kind = int if key == "length" else type(known[key]) if key in known else None
        if kind is None:
            raise InputError(f"tasks: {text}", f"options among {', '.join([*known, 'length'])}", repr(key))
        number = {"true": 1.0, "false": 0.0}.get(value) if kind is bool else _number(value)
        if number is None or not 0.0 <= number < 1e9 or (kind is int and (number % 1 or number < 1)):
            raise InputError(f"tasks: {text}", f"{key}: {'true or false' if kind is bool else 'a number > 0'}", repr(value))
        if key == "length":
            length = int(number)
        else:
            options[key] = kind(number)
    if options.get("states", 10) < 3:
        raise InputError(f"tasks: {text}", "at least 3 states", str(options["states"]))
    return ProcessTasks(lambda rng, gamma: make(rng, gamma=gamma, **options) if name != "lq" else make(rng, **options), length)
