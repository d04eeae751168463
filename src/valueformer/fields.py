"""Reading one field of a log: numbers of the right shape, or an error that names the field."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from valueformer.errors import InputError

Array = NDArray[Any]

_EXACT = 2.0**53  # whole numbers beyond it are not exact in float64


def numeric(name: str, value: Any) -> Array:
    """Return float32 or float64 in native byte order as they are, other numbers as float64."""
    try:
        array = np.asarray(value)
    except (TypeError, ValueError):  # rows of unequal length
        raise InputError(name, "numbers in one rectangular array", "rows of unequal length", "drop odd rows") from None
    if array.dtype.kind in "OUS":
        array = _from_objects(name, array)
    if array.dtype.kind not in "fiub":
        raise InputError(
            name, "numbers", f"dtype {array.dtype}", "convert to numbers: one-hot for categories, seconds for times"
        )
    target = array.dtype if array.dtype.kind == "f" and array.dtype.itemsize in (4, 8) else np.dtype(np.float64)
    return array.astype(target.newbyteorder("="), copy=False)


def _from_objects(name: str, array: Array) -> Array:
    if array.dtype.kind == "O":
        try:
            return array.astype(np.float64)
        except (TypeError, ValueError, OverflowError):
            pass
    odd = next(((i, v) for i, v in enumerate(array.reshape(-1).tolist()) if not isinstance(v, (int, float))), None)
    got = "something else" if odd is None else f"{str(odd[1])[:40]!r} at position {odd[0]}"
    raise InputError(name, "numbers", got, "encode text as numbers (one-hot for categories, 0 and 1 for flags)")


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
    array = vector(name, _flags_from_text(np.asarray(value)))
    odd = np.flatnonzero(~np.isin(array, (0, 1)))
    if len(odd):
        raise InputError(name, "flags, true or false", f"the value {array[odd[0]]:g} at row {odd[0]}")
    return array.astype(bool)


def _flags_from_text(array: Array) -> Array:
    """Return flags written as ``true`` or ``yes``, ``false`` or ``no`` (in any case), ``1``, ``0``; anything else as it is."""
    if array.dtype.kind not in "OU":
        return array
    known = {"true": True, "false": False, "yes": True, "no": False, "1": True, "0": False}
    words = [known.get(v.strip().lower()) if isinstance(v, str) else v if isinstance(v, bool) else None for v in array.flat]
    return array if None in words else np.array(words, bool).reshape(array.shape)


def whole(name: str, value: Any) -> NDArray[np.int64]:
    """Return an ``(n,)`` array of int64 from whole numbers."""
    array = np.asarray(value)
    if array.dtype.kind in "iu" and array.ndim == 1:
        if array.size and int(array.max()) > np.iinfo(np.int64).max:
            raise InputError(name, "whole numbers below 2^63", str(array.max()), "store them as text")
        return array.astype(np.int64)
    array = vector(name, value)
    odd = np.flatnonzero(~(np.isfinite(array) & (array == np.round(array)) & (np.abs(array) <= _EXACT)))
    if len(odd):
        raise InputError(name, "whole numbers", f"{array[odd[0]]} at row {odd[0]}", "number steps and episodes from 0")
    return array.astype(np.int64)


def identifiers(name: str, value: Any) -> Array:
    """Return an ``(n,)`` array of int64 or of text; nothing may be missing."""
    array = np.asarray(value)
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if array.ndim != 1:
        raise InputError(name, "shape (n,)", str(array.shape), "one id per transition")
    if array.dtype.kind in "fiub":
        return whole(name, array)
    try:
        values = array.tolist()
        missing = next((i for i, v in enumerate(values) if v is None or v != v), None)
        if missing is not None:
            raise InputError(name, "an id in every row", f"none at row {missing}", "fill missing ids")
        values = [v.decode("utf-8", "replace") if isinstance(v, bytes) else v for v in values]
        texts = sum(isinstance(v, str) for v in values)
        if 0 < texts < len(values):
            raise InputError(name, "whole numbers or text", "both", "write all ids alike")
        return np.array([str(v) for v in values], dtype=str)
    except TypeError:
        raise InputError(name, "whole numbers or text", f"dtype {array.dtype}") from None


def length(name: str, array: Array, n: int) -> Array:
    """Return ``array`` if it has n rows."""
    if len(array) != n:
        mend = "all fields need one row per transition"
        if name == "observations" and len(array) == n + 1:
            mend = "one more observation than rewards: pass observations[:-1] and next_observations=observations[1:]"
        raise InputError(name, f"{n} rows, as in rewards", str(len(array)), mend)
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
            "repair those rows, or leave them out of the log: drop_nonfinite=True (--drop-nonfinite)",
        )
    return array


def within(name: str, array: Array, low: float, high: float) -> None:
    """Raise unless every number lies in ``[low, high]``."""
    bad = np.flatnonzero((array < low) | (array > high))
    if len(bad):
        bound = f"numbers in [{low:g}, {high:g}]" if np.isfinite(high) else f"numbers >= {low:g}"
        raise InputError(name, bound, f"{array[bad[0]]:g} at row {bad[0]}")
