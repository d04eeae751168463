"""Reading one field of a log: numbers of the right shape, or an error that names the field."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from valueformer.errors import InputError

Array = NDArray[Any]


def numeric(name: str, value: Any) -> Array:
    """Return float32 or float64 as they are, other numbers as float64."""
    try:
        array = np.asarray(value)
        if array.dtype.kind == "O":
            array = array.astype(np.float64)
    except (TypeError, ValueError):
        raise InputError(name, "numbers in one rectangular array", "something else", "convert or drop odd rows") from None
    if array.dtype.kind not in "fiub":
        raise InputError(name, "numbers", f"dtype {array.dtype}", "encode text as numbers (one-hot)")
    return array if array.dtype in (np.float32, np.float64) else array.astype(np.float64)


def matrix(name: str, value: Any) -> Array:
    """Return an ``(n, d)`` array; ``(n,)`` becomes ``(n, 1)``."""
    array = numeric(name, value)
    if array.ndim == 1:
        array = array[:, None]
    if array.ndim != 2 or array.shape[1] == 0:
        raise InputError(name, "shape (n, d) with d >= 1", str(array.shape), "flatten each observation to one row")
    return array


def vector(name: str, value: Any) -> Array:
    """Return an ``(n,)`` array; ``(n, 1)`` loses its last axis."""
    array = numeric(name, value)
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if array.ndim != 1:
        raise InputError(name, "shape (n,) or (n, 1)", str(array.shape))
    return array


def flags(name: str, value: Any) -> Array:
    """Return booleans from flags stored as booleans or as 0 and 1."""
    array = vector(name, value)
    if not np.isin(array, (0, 1)).all():
        raise InputError(name, "flags, true or false", f"the value {array[~np.isin(array, (0, 1))][0]:g}")
    return array.astype(bool)


def length(name: str, array: Array, n: int) -> Array:
    """Return ``array`` if it has n rows."""
    if len(array) != n:
        mend = ""
        if name == "observations" and len(array) == n + 1:
            mend = "one more observation than rewards: pass observations[:-1] and next_observations=observations[1:]"
        raise InputError(name, f"{n} rows, as in rewards", str(len(array)), mend or "all fields need one row per transition")
    return array


def finite(name: str, array: Array) -> Array:
    """Return ``array`` if it has no NaN or infinity."""
    bad = ~np.isfinite(array)
    if bad.any():
        where = np.argwhere(bad)[0]
        column = f", column {where[1]}" if array.ndim == 2 else ""
        raise InputError(
            name,
            "finite numbers",
            f"{array[tuple(where)]} at row {where[0]}{column} ({int(bad.sum())} in all)",
            "drop or repair those rows",
        )
    return array


def within(name: str, array: Array, low: float, high: float) -> None:
    """Raise unless every number lies in ``[low, high]``."""
    bad = np.flatnonzero((array < low) | (array > high))
    if len(bad):
        bound = f"numbers in [{low:g}, {high:g}]" if np.isfinite(high) else f"numbers >= {low:g}"
        raise InputError(name, bound, f"{array[bad[0]]:g} at row {bad[0]}")


def has_missing(ids: Array) -> bool:
    """Return whether an object array holds None or NaN."""
    return any(value is None or value != value for value in ids.tolist())
