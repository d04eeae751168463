"""Observations to state vectors: scalers that are fitted on the context alone.

In scaled units a typical distance between two context states is about 1, so that one kernel temperature can serve
every domain (theory 7.4).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray
from scipy.spatial.distance import pdist

from valueformer.errors import InputError

__all__ = ["Scaler", "ScalerKind", "fit_scaler"]

ScalerKind = Literal["isotropic", "standardize", "none"]

_SUBSAMPLE = 1000  # states whose pairwise distances the median is taken over
_DEAD = 0.01  # a column with less than this share of the largest standard deviation carries noise, not state


@dataclass(frozen=True, eq=False)
class Scaler:
    """The map ``(x - centre) * factor``, per coordinate, and then a metric; a factor of 0 drops the coordinate."""

    centre: NDArray[np.float64]
    factor: NDArray[np.float64]
    metric: NDArray[np.float64] | None = None
    """``(d,)`` weights of the scaled coordinates, or ``(k, d)``, a map to k of them."""

    def transform(self, observations: NDArray[Any]) -> NDArray[np.float64]:
        """Return scaled states ``(n, d | k)`` in float64: centring must not lose digits to the offset."""
        states = (observations.astype(np.float64) - self.centre) * self.factor
        if self.metric is None:
            return states
        return states * self.metric if self.metric.ndim == 1 else states @ self.metric.T


def fit_scaler(kind: ScalerKind, observations: NDArray[Any], random_state: int = 0) -> Scaler:
    """Fit a scaler on context states ``(n, d)``.

    - ``"isotropic"``: centre, divide all coordinates by the median pairwise distance (of a seeded subsample). Keeps the
      geometry; where more than half of the pairs coincide the root mean square distance is used.
    - ``"standardize"``: per coordinate zero mean and unit variance, columns below 1 % of the largest standard deviation
      dropped, then divided by ``sqrt(2 k)``, the root mean square distance over the k columns kept.
    - ``"none"``: the states as they are.

    Raises InputError for another kind.
    """
    if kind not in get_args(ScalerKind):
        raise InputError("scaler", " | ".join(get_args(ScalerKind)), repr(kind))
    x = observations.astype(np.float64)
    d = x.shape[1]
    largest = float(np.abs(x).max())
    if kind == "none":
        return Scaler(np.zeros(d), np.ones(d))
    if largest < 1e-290:  # denormal: nothing is left to divide by
        return Scaler(np.zeros(d), np.zeros(d))
    magnitude = largest  # squares of huge or tiny states stay in range
    centre = (x / magnitude).mean(axis=0) * magnitude
    unit = x / magnitude - centre / magnitude
    if kind == "standardize":
        sd = unit.std(axis=0)
        alive = sd > _DEAD * sd.max()
        factor = np.where(alive, 1.0 / np.where(alive, sd, 1.0), 0.0) / np.sqrt(2.0 * max(int(alive.sum()), 1))
        return Scaler(centre, factor / magnitude)
    if len(unit) > _SUBSAMPLE:
        rows = np.random.default_rng(random_state).choice(len(unit), _SUBSAMPLE, replace=False)
        unit = unit[np.sort(rows)]
    distances = pdist(unit) if len(unit) > 1 else np.zeros(1)
    typical = float(np.median(distances)) or float(np.sqrt(np.mean(np.square(distances))))
    # States that differ by rounding alone are constant; dividing by their distance would turn rounding into features.
    if typical <= np.finfo(observations.dtype if observations.dtype.kind == "f" else np.float64).eps:
        return Scaler(centre, np.zeros(d))
    return Scaler(centre, np.full(d, 1.0 / typical / magnitude))
