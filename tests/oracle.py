"""Kernel TD by direct loops over transitions, in numpy: shares no code with the library."""

from __future__ import annotations

import math

import numpy as np


def kernel_value(name: str, x: np.ndarray, y: np.ndarray, temperature: float) -> float:
    """One kernel value, from its textbook formula."""
    dot = sum(float(a) * float(b) for a, b in zip(x, y, strict=True))
    distance = math.sqrt(sum((float(a) - float(b)) ** 2 for a, b in zip(x, y, strict=True)))
    length = math.sqrt(temperature)
    z = distance / length
    formulas = {
        "rbf": lambda: math.exp(-(distance**2) / (2 * temperature)),
        "expdot": lambda: math.exp(dot / temperature),
        "laplace": lambda: math.exp(-z),
        "matern15": lambda: (1 + math.sqrt(3) * z) * math.exp(-math.sqrt(3) * z),
        "matern25": lambda: (1 + math.sqrt(5) * z + 5 * z**2 / 3) * math.exp(-math.sqrt(5) * z),
        "rq": lambda: (1 + distance**2 / (2 * 0.5 * temperature)) ** -0.5,
        "relu": lambda: max(0.0, dot),
        "linear": lambda: dot,
    }
    return formulas[name]()


def weights(heads: list[tuple[float, str, float]], softmax: bool, x: np.ndarray, centres: np.ndarray) -> np.ndarray:
    """How strongly each centre acts on x: sum over heads (coefficient, kernel, temperature)."""
    total = np.zeros(len(centres))
    for coefficient, name, temperature in heads:
        row = np.array([kernel_value(name, x, centre, temperature) for centre in centres])
        total += coefficient * (row / row.sum() if softmax else row)
    return total


def kernel_td(
    *,
    heads: list[tuple[float, str, float]],
    softmax: bool,
    states: np.ndarray,
    next_states: np.ndarray,
    rewards: np.ndarray,
    terminated: np.ndarray,
    discounts: np.ndarray,
    sample_weight: np.ndarray,
    queries: np.ndarray,
    gamma: float,
    steps: list[float],
    ridge: float,
) -> tuple[np.ndarray, np.ndarray]:
    """Return V at the queries (L, m) and the TD errors (L, n) after each layer, starting at V = 0."""
    n = len(states)
    on_state = [weights(heads, softmax, x, states) for x in states]
    on_next = [np.zeros(n) if terminated[i] else weights(heads, softmax, next_states[i], states) for i in range(n)]
    on_query = [weights(heads, softmax, x, states) for x in queries]
    v, v_next, v_query = np.zeros(n), np.zeros(n), np.zeros(len(queries))
    values, errors = [], []

    def td() -> np.ndarray:
        bootstrap = np.array([0.0 if terminated[i] else gamma * discounts[i] * v_next[i] for i in range(n)])
        return rewards + bootstrap - v

    for step in steps:
        delta = sample_weight * td()
        v = np.array([(1 - step * ridge) * v[i] + step * float(on_state[i] @ delta) for i in range(n)])
        v_next = np.array([(1 - step * ridge) * v_next[i] + step * float(on_next[i] @ delta) for i in range(n)])
        v_query = np.array([(1 - step * ridge) * v_query[q] + step * float(on_query[q] @ delta) for q in range(len(queries))])
        values.append(v_query)
        errors.append(td())
    return np.array(values), np.array(errors)
