"""How sure is the initial value? A bootstrap over episodes."""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy.stats import t as student

from valueformer.estimator import ValueFormer
from valueformer.transitions import Transitions

__all__ = ["initial_value"]

_NEGLIGIBLE = 1e-6  # weight of a value


def initial_value(model: ValueFormer, data: Transitions, level: float | None) -> dict[str, Any]:
    """Return the value of the first states of a fitted model's own log, on average, with an interval of confidence ``level``.

    Per episode V(s_0) corrected by its own TD errors, ``V(s_0) + sum_t gamma^t delta_t``, which telescopes to the recorded
    return plus ``gamma^T V(s_T)`` where the record stops before a terminal (doubly robust estimation, Jiang & Li 2016, on
    policy): the model only stands in for what was not recorded. A replicate draws episodes, and reads V from them; the
    interval is the mean -+ Student's t quantile times the replicates' standard deviation. With one episode, or ``level``
    None, it has no ends.
    """
    first, last = data.initial_rows, _last_rows(data)
    returns = data.monte_carlo_returns(model.gamma_)
    recorded, rest = returns.values[first], returns.remaining[first]  # (episodes,)
    ends = np.where(data.terminated[last, None], data.observations[last], data.next_observations[last])
    weight = np.ones(len(first)) if data.sample_weight is None else data.sample_weight[first].astype(np.float64)
    if not weight.any():
        weight = np.ones(len(first))
    per_episode = recorded + rest * model.predict(ends).astype(np.float64)
    answer: dict[str, Any] = {
        "mean": float(np.average(per_episode, weights=weight)),
        "lower": None,
        "upper": None,
        "level": level,
        "predicted_mean": float(np.average(model.predict(data.observations[first]).astype(np.float64), weights=weight)),
        "per_episode": per_episode,
    }
    episodes = data.n_episodes
    if level is not None and int((weight > 0).sum()) > 1:
        draws = model.draws() * weight  # (b, episodes)
        # where all is recorded V has no part in the answer, and replicates of it are not worth computing
        stand_in = rest * model.replicate_values(ends) if rest.max() > _NEGLIGIBLE else 0.0
        replicates = recorded + stand_in
        means = (draws * replicates).sum(axis=1) / draws.sum(axis=1)
        # n - 1 degrees of freedom, and the bootstrap's variance lacks a factor n / (n - 1)
        spread = float(means.std(ddof=1)) * np.sqrt(episodes / (episodes - 1)) * student.ppf(0.5 + level / 2.0, episodes - 1)
        answer |= {"lower": answer["mean"] - float(spread), "upper": answer["mean"] + float(spread)}
    return answer


def _last_rows(data: Transitions) -> Any:
    """Return the row of each episode's last step."""
    order = np.lexsort((data.steps, data.episode_index))
    return order[np.flatnonzero(np.diff(data.episode_index[order], append=data.n_episodes))]
