"""How sure is the initial value? A bootstrap over episodes."""

from __future__ import annotations

from typing import Any

import numpy as np

from valueformer.estimator import ValueFormer
from valueformer.transitions import Transitions

__all__ = ["initial_value"]


def initial_value(model: ValueFormer, data: Transitions, level: float | None) -> dict[str, Any]:
    """Return the mean of V over the first states of a fitted model's own log, with an interval of confidence ``level``.

    Each replicate draws episodes: their first states, and the transitions that V is read from. The interval spans
    the replicates' quantiles (percentile bootstrap, Efron 1979). With one episode, or ``level`` None, it has no ends.
    """
    first = data.initial_rows
    values = model.predict(data.observations[first]).astype(np.float64)  # (episodes,)
    answer: dict[str, Any] = {"mean": float(values.mean()), "lower": None, "upper": None, "level": level}
    if level is not None and data.n_episodes > 1:
        draws, replicates = model.draws(), model.replicate_values(data.observations[first])  # (b, episodes) each
        means = (draws * replicates).sum(axis=1) / draws.sum(axis=1)
        tail = 50.0 * (1.0 - level)
        lower, upper = np.percentile(means, [tail, 100.0 - tail])
        answer |= {"lower": float(lower), "upper": float(upper)}
    return answer | {"per_episode": values}
