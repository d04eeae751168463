"""Tables of steps: data frames, Parquet, Arrow and CSV.

Columns: ``obs_0 ..`` (or ``obs_NAME``), ``next_obs_*``, ``action_*``, ``next_action_*``, ``reward``, ``terminated``,
``truncated``, ``discount``, ``episode_id``, ``step``, ``sample_weight``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.ipc
import pyarrow.parquet
from numpy.typing import NDArray

from valueformer.errors import InputError
from valueformer.sources.npz import from_arrays
from valueformer.transitions import Transitions

_VECTORS = {"obs": "observations", "next_obs": "next_observations", "action": "actions", "next_action": "next_actions"}
_LEADERS = {"next_obs": "obs", "next_action": "action"}  # whose columns a family must repeat
_SCALARS = {
    "reward": "rewards",
    "terminated": "terminated",
    "truncated": "truncated",
    "discount": "discounts",
    "episode_id": "episode_ids",
    "step": "steps",
    "sample_weight": "sample_weight",
    "done": "done",
}


def _starts_with(path: Path, magic: bytes) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(magic)) == magic


def is_parquet(path: Path) -> bool:
    """Whether a file starts with Parquet's magic bytes."""
    return _starts_with(path, b"PAR1")


def is_arrow(path: Path) -> bool:
    """Whether a file starts with the magic bytes of an Arrow IPC (Feather v2) file."""
    return _starts_with(path, b"ARROW1")


def is_text(path: Path) -> bool:
    """Whether a file's beginning is non-empty UTF-8 text."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        head = file.read(4096)
    try:
        head[:4093].decode() if len(head) == 4096 else head.decode()
    except UnicodeDecodeError as error:
        return len(head) == 4096 and error.start >= 4090
    return bool(head.strip()) and b"\0" not in head


def read(path: Path) -> Transitions:
    """Read a table of steps from Parquet, Arrow IPC (Feather), or text separated by comma, semicolon or tab."""
    form = "parquet" if is_parquet(path) else "arrow" if is_arrow(path) else "csv"
    return from_columns(read_columns(path), source=str(path), form=form)


def read_columns(path: Path) -> dict[str, NDArray[Any]]:
    """Read a table's columns by name; raises InputError where the file is not a readable table."""
    try:
        if is_parquet(path):
            table = pyarrow.parquet.read_table(path)
        elif is_arrow(path):
            table = pyarrow.ipc.open_file(path).read_all()
        elif is_text(path):
            table = _read_text(path)
        else:
            raise InputError(str(path), "a Parquet, Arrow or CSV table", "unknown content", "convert it")
    except (pa.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(str(path), "a readable table", f"a damaged one ({reason})", "export it again") from None
    return {name: _column(table, name) for name in table.column_names}


def _read_text(path: Path) -> pa.Table:
    with path.open(encoding="utf-8", errors="replace") as file:
        header = file.readline()
    delimiter = max(",;\t", key=header.count)
    return pyarrow.csv.read_csv(path, parse_options=pyarrow.csv.ParseOptions(delimiter=delimiter))


def _column(table: pa.Table, name: str) -> NDArray[Any]:
    column = table.column(name)
    if pa.types.is_list(column.type) or pa.types.is_fixed_size_list(column.type):
        return np.array(column.to_pylist(), dtype=np.float64)
    return column.to_numpy()


def from_frame(frame: Any) -> Transitions:
    """Read a data frame (pandas, or anything with ``columns`` and ``frame[name]`` convertible to numpy)."""
    columns = {str(name): np.asarray(frame[name]) for name in frame.columns}
    return from_columns(columns, source=f"{type(frame).__name__} in memory", form="frame")


def from_columns(columns: dict[str, NDArray[Any]], *, source: str, form: str) -> Transitions:
    """Gather ``obs_*`` and its kin into matrices and build Transitions."""
    arrays: dict[str, Any] = {_SCALARS[name]: value for name, value in columns.items() if name in _SCALARS}
    arrays["observations"] = gather(columns, "obs", source=source)
    for kind, name in _VECTORS.items():
        leader = _LEADERS.get(kind, kind)
        if name not in arrays and _suffixes(columns, kind):
            wanted, found = _suffixes(columns, leader), _suffixes(columns, kind)
            if wanted and set(wanted) != set(found):
                odd = sorted(set(wanted) ^ set(found))[0]
                expected = f"the same {len(wanted)} names as {leader}_*"
                raise InputError(f"{source}: columns {kind}_*", expected, f"{len(found)}, differing in {odd!r}")
            arrays[name] = gather(columns, kind, source=source, order=wanted)
    return from_arrays(arrays, source=source, form=form)


def gather(columns: dict[str, NDArray[Any]], kind: str, *, source: str, order: list[str] | None = None) -> NDArray[Any]:
    """Return the columns ``kind_*`` as one matrix, numbered suffixes in numeric order; raises InputError if there are none."""
    suffixes = order or _suffixes(columns, kind)
    if not suffixes:
        shown = ", ".join(map(repr, list(columns)[:6])) + (", .." if len(columns) > 6 else "")
        raise InputError(f"{source}: columns", f"{kind}_0 .. or {kind}_NAME", shown or "none", "rename the columns")
    parts = []
    for suffix in suffixes:
        name = f"{kind}_{suffix}" if suffix else kind
        part = columns[name]
        if part.dtype.kind in "OUS":
            try:
                part = part.astype(np.float64)
            except (TypeError, ValueError):
                raise InputError(f"{source}: column {name}", "numbers", "text", "one-hot encode categories") from None
        parts.append(part if part.ndim == 2 else part[:, None])
    return np.concatenate(parts, axis=1)


def _suffixes(columns: dict[str, NDArray[Any]], kind: str) -> list[str]:
    """Return the suffixes of a family of columns: numbered ones in numeric order, named ones in the table's."""
    found = [name[len(kind) + 1 :] for name in columns if name.startswith(f"{kind}_") or name == kind]
    return sorted(found, key=int) if all(suffix.isdigit() for suffix in found) else found
