"""Tables of steps: data frames, Parquet, Arrow and CSV.

Columns: ``obs_0 ..`` (or ``obs_NAME``), ``next_obs_*``, ``action_*``, ``next_action_*``, ``reward``, ``terminated``,
``truncated``, ``discount``, ``episode_id``, ``step``, ``sample_weight``; or whatever the options name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from valueformer.errors import InputError
from valueformer.sources.alignment import Rows
from valueformer.sources.columns import Batch, Table, numbers, unique
from valueformer.sources.options import COLUMNS, NONE, Options, resolve

__all__ = ["Plan", "blocks", "frame", "gather", "in_memory", "read_columns", "suffixes"]

_KINDS = {"observations": "obs", "next_observations": "next_obs", "actions": "action", "next_actions": "next_action"}
_LEADERS = {"next_observations": "observations", "next_actions": "actions"}  # whose columns a family must repeat


class Plan:
    """Which columns hold which field, decided from their names alone, so that only those need to be read.

    Raises InputError where a field is missing or ambiguous.
    """

    def __init__(self, names: Sequence[str], options: Options, source: str, ignore: Sequence[str] = ()) -> None:
        self.source = source
        self.vectors: dict[str, list[str]] = {}
        self.scalars: dict[str, str] = {}
        taken = [name for field, option in COLUMNS.items() if field not in _KINDS and (name := getattr(options, option))]
        families = [name for name in names if _family(name)]
        for field, kind in _KINDS.items():
            chosen = options.select(COLUMNS[field], names, source, taken) if field in COLUMNS else None
            explicit = chosen is not None
            chosen = chosen or _ordered(names, kind) or [name for name in names if name == field]  # as arrays are called
            if chosen and field in _LEADERS:
                chosen = self._like_leader(field, chosen, explicit, options.next_obs_columns)
            if chosen:
                self.vectors[field] = chosen
        if "observations" not in self.vectors:
            gather({}, "obs", source=source, known=names)  # raises
        used = set(chain(*self.vectors.values()))
        others = [name for name in names if name not in used and (name not in families or name in taken)]
        self.scalars = resolve(others, options, source)
        self.used = list(dict.fromkeys([*used, *(name for name in self.scalars.values() if name in names)]))
        self.unused = tuple(name for name in names if name not in self.used and name not in ignore)

    def _like_leader(self, field: str, chosen: list[str], explicit: bool, asked: Sequence[str] | None) -> list[str]:
        """Put successors in the order of the columns that they repeat; unless named, those of columns left out are too."""
        leader = self.vectors.get(_LEADERS[field], [])
        kind, lead = _KINDS[field], _KINDS[_LEADERS[field]]
        mine, theirs = ([_label(name, k) for name in columns] for columns, k in ((chosen, kind), (leader, lead)))
        if set(mine) == set(theirs) or (not explicit and set(theirs) <= set(mine)):
            return [chosen[mine.index(label)] for label in theirs]
        bare = [name.removeprefix("next_") for name in chosen]
        if explicit and set(bare) == set(leader):  # pos_x, next_pos_x
            return [chosen[bare.index(name)] for name in leader]
        if explicit and len(mine) == len(theirs) and set(asked or ()) <= set(chosen):  # named one by one
            return chosen
        odd = sorted(set(mine) ^ set(theirs))[0]
        mend = f"name them with {COLUMNS[field]}" if field in COLUMNS else ""
        raise InputError(f"{self.source}: columns {kind}_*", f"the same names as {lead}_*", f"a difference in {odd!r}", mend)

    @property
    def floats(self) -> list[str]:
        """Columns known to hold numbers."""
        scalars = [self.scalars[field] for field in ("rewards", "discounts", "sample_weight") if field in self.scalars]
        return [*chain(*self.vectors.values()), *scalars]

    @property
    def texts(self) -> list[str]:
        """Columns of ids."""
        return [self.scalars["episode_ids"]] if "episode_ids" in self.scalars else []

    def rows(self, batch: Batch) -> Rows:
        """Return the rows of a batch of columns."""
        arrays: dict[str, NDArray[Any]] = {}
        for field, columns in self.vectors.items():
            arrays[field] = _matrix([(name, batch[name]) for name in columns], self.source)
        for field, name in self.scalars.items():
            n = len(arrays["observations"])
            arrays[field] = np.zeros(n, bool) if name == NONE and name not in batch else numbers(name, batch[name])
        if "episode_ids" in arrays:
            arrays["episode_ids"] = _whole_ids(arrays["episode_ids"])
        labels = [_label(name, "obs") for name in self.vectors["observations"]]
        named = len(labels) == arrays["observations"].shape[1] and "" not in labels  # one list column has no names
        named = named and labels != [str(i) for i in range(len(labels))]
        return Rows(arrays, tuple(labels) if named else None, self.unused)


def blocks(path: Path, options: Options, block_size: int | None) -> Iterator[Rows]:
    """Yield a table of steps from Parquet, Arrow IPC (Feather), or text separated by comma, semicolon, tab or bar."""
    return in_memory(Table(path), options, block_size)


def in_memory(table: Table, options: Options, block_size: int | None) -> Iterator[Rows]:
    """Yield the rows of an opened table."""
    plan = Plan(table.names, options, table.source)
    return map(plan.rows, table.batches(plan.used, block_size, plan.floats, plan.texts))


def frame(data: Any, options: Options) -> Rows:
    """Return the rows of a data frame: pandas, or anything with ``columns`` and ``frame[name]`` convertible to numpy."""
    source = f"{type(data).__name__} in memory"
    names = list(data.columns)
    clean = dict(zip(unique(names, source), names, strict=True))
    plan = Plan(list(clean), options, source)
    return plan.rows({name: np.asarray(data[clean[name]]) for name in plan.used})


def read_columns(path: Path) -> Mapping[str, Any]:
    """Read a table's columns by name; raises InputError where the file is not a readable table."""
    table = Table(path)
    return next(table.batches(table.names, None))


def gather(
    columns: Mapping[str, Any], kind: str, *, source: str, order: Sequence[str] | None = None, known: Sequence[str] = ()
) -> NDArray[Any]:
    """Return the columns ``kind_*`` as one matrix, numbered suffixes in numeric order; raises InputError if there are none."""
    wanted = [f"{kind}_{suffix}" for suffix in order] if order else _ordered(list(columns), kind)
    if not wanted:
        names = list(columns) or known
        shown = ", ".join(map(repr, names[:6])) + (", .." if len(names) > 6 else "")
        mend = f"rename the columns, or name them with {kind}_columns (--{kind.replace('_', '-')}-columns)"
        raise InputError(f"{source}: columns", f"{kind}_0 .. or {kind}_NAME", shown or "none", mend)
    return _matrix([(name, columns[name]) for name in wanted], source)


def suffixes(names: Sequence[str], kind: str) -> list[str]:
    """Return the suffixes of a family of columns: numbered ones in numeric order, named ones in the table's."""
    return [_label(name, kind) for name in _ordered(names, kind)]


def _whole_ids(ids: NDArray[Any]) -> NDArray[Any]:
    """Return ids written as whole numbers as such, if each is written in the one usual way."""
    if ids.dtype.kind != "O" or not all(isinstance(value, str) for value in ids):
        return ids
    usual = (re.fullmatch(r"0|-?[1-9][0-9]{0,17}", text) for text in set(ids.tolist()))
    return ids.astype(np.int64) if all(usual) else ids


def _ordered(names: Sequence[str], kind: str) -> list[str]:
    found = [name for name in names if _family(name) == kind]
    labels = [_label(name, kind) for name in found]
    numbered = all(label.isascii() and label.isdecimal() for label in labels)
    return sorted(found, key=lambda name: int(_label(name, kind))) if numbered else found


def _label(name: str, kind: str) -> str:
    return "" if name == kind else name.removeprefix(f"{kind}_")


def _family(name: str) -> str | None:
    kinds = ("next_obs", "next_action", "obs", "action")
    return next((kind for kind in kinds if name == kind or name.startswith(f"{kind}_")), None)


def _matrix(columns: Sequence[tuple[str, Any]], source: str) -> NDArray[Any]:
    """Return columns of numbers side by side, ``(n, d)``."""
    parts = []
    for name, column in columns:
        part = numbers(name, column)
        if part.dtype.kind not in "fiub":
            try:
                part = part.astype(np.float64) if part.dtype.kind == "O" else None
            except (TypeError, ValueError):
                part = None
            if part is None:
                got = "times" if numbers(name, column).dtype.kind in "mM" else "text"
                mend = "convert to seconds" if got == "times" else "one-hot encode categories"
                raise InputError(f"{source}: column {name}", "numbers", got, mend)
        parts.append(part)
    if len(parts) == 1:
        return parts[0] if parts[0].ndim == 2 else parts[0][:, None]
    dtype = np.result_type(*(part.dtype for part in parts))
    out = np.empty((len(parts[0]), sum(part.shape[1] if part.ndim == 2 else 1 for part in parts)), dtype)
    for start in range(0, len(out), _TILE):  # a tile of the row-major result stays in cache while its columns are filled
        rows, at = slice(start, start + _TILE), 0
        for part in parts:
            if part.ndim == 1:
                out[rows, at] = part[rows]
                at += 1
            else:
                out[rows, at : at + part.shape[1]] = part[rows]
                at += part.shape[1]
    return out


_TILE = 2048
