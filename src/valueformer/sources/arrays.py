"""Mappings of arrays under the field names of Transitions: NPZ, flat HDF5 and arrays in memory end here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from valueformer import fields
from valueformer.errors import InputError
from valueformer.sources.alignment import Rows
from valueformer.sources.options import COLUMNS, NONE, Options, resolve

__all__ = ["Plan", "as_array", "from_arrays"]

_VECTORS = {
    "observations": ("observations", "obs"),
    "next_observations": ("next_observations", "next_obs"),
    "actions": ("actions", "action"),
    "next_actions": ("next_actions", "next_action"),
}


class Plan:
    """Which arrays hold which field, decided from their names alone, so that only those need to be read.

    Raises InputError where a field is missing or ambiguous.
    """

    def __init__(self, names: Sequence[str], options: Options, source: str, ignore: Sequence[str] = ()) -> None:
        self.source = source
        self.scalars = resolve(names, options, source)
        taken = set(self.scalars.values())
        self.vectors: dict[str, list[str]] = {}
        for field, known in _VECTORS.items():
            chosen = options.select(COLUMNS[field], names, source, taken) if field in COLUMNS else None
            named = chosen is not None
            chosen = chosen or [name for name in known if name in names][:1]
            leader = self.vectors.get("observations", [])
            if field == "next_observations" and chosen and not named and leader != [chosen[0].removeprefix("next_")]:
                mend = "name those of obs_columns with next_obs_columns (--next-obs-columns)"
                raise InputError(f"{source}: {chosen[0]}", "successors of obs_columns", "those of other observations", mend)
            if chosen:
                self.vectors[field] = chosen
        if "observations" not in self.vectors:
            mend = "name them with obs_columns (--obs-columns)"
            raise InputError(f"{source}: fields", "observations", f"no observations among {', '.join(map(repr, names))}", mend)
        self.used = [*(n for n in self.scalars.values() if n in names), *chain(*self.vectors.values())]
        self.unused = tuple(name for name in names if name not in self.used and name not in ignore)

    def rows(self, arrays: Mapping[str, Any]) -> Rows:
        """Return the rows that the chosen arrays hold."""
        n = np.atleast_1d(as_array(arrays[self.scalars["rewards"]])).shape[0]
        out: dict[str, NDArray[Any]] = {}
        for field, name in self.scalars.items():
            out[field] = np.zeros(n, bool) if name == NONE and name not in arrays else as_array(arrays[name])
            if out[field].ndim == 0:
                got = type(arrays[name]).__name__
                raise InputError(f"{self.source}: {name}", "an array with a number per row", got, "a list or an array will do")
        for field, names in self.vectors.items():
            parts = [as_array(arrays[name]) for name in names]
            if len(parts) == 1:
                out[field] = parts[0]
            else:
                parts = [fields.length(name, p.reshape(len(p), -1), n) for name, p in zip(names, parts, strict=True)]
                out[field] = np.concatenate(parts, axis=1)
        return Rows(out, unused=self.unused)


def from_arrays(arrays: Mapping[str, Any], options: Options, source: str) -> Rows:
    """Return the rows of a mapping of arrays; None values are as good as absent. Raises InputError as :class:`Plan` does."""
    present = {str(name): value for name, value in arrays.items() if value is not None}
    labels = present.pop("obs_names", None)
    rows = Plan(list(present), options, source).rows(present)
    return rows if labels is None else replace(rows, obs_names=tuple(map(str, np.atleast_1d(as_array(labels)).tolist())))


def as_array(value: Any) -> NDArray[Any]:
    """Return a NumPy array of anything array-like, a torch tensor on any device included."""
    if isinstance(value, np.ma.MaskedArray):
        return np.ma.filled(value.astype(np.float64), np.nan) if np.ma.is_masked(value) else value.data
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        if str(value.dtype) == "torch.bfloat16":  # NumPy has no such type
            value = value.float()
        return value.numpy()
    try:
        return np.asarray(value)
    except (TypeError, ValueError):
        raise InputError("data", "arrays of numbers", f"{type(value).__name__} of unequal rows", "drop odd rows") from None
