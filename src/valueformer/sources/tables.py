"""Tables of steps: data frames, Parquet, Arrow and CSV.

Columns: ``obs_0 ..`` (or ``obs_NAME``), ``next_obs_*``, ``action_*``, ``next_action_*``, ``reward``, ``terminated``,
``truncated``, ``discount``, ``episode_id``, ``step``, ``sample_weight``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
}
Columns = dict[str, NDArray[Any]]


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
        head.decode()
    except UnicodeDecodeError as error:
        return len(head) == 4096 and error.start >= 4093  # a character cut in two
    return bool(head.strip()) and b"\0" not in head


def _starts_with(path: Path, magic: bytes) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(magic)) == magic


def read(path: Path) -> Transitions:
    """Read a table of steps from Parquet, Arrow IPC (Feather), or text separated by comma, semicolon, tab or bar."""
    form = "parquet" if is_parquet(path) else "arrow" if is_arrow(path) else "csv"
    return from_columns(read_columns(path), source=str(path), form=form)


def read_columns(path: Path) -> Columns:
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
    except InputError:
        raise
    except Exception as error:  # whatever a parser raises on a damaged file
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise InputError(str(path), "a readable table", f"a damaged one ({reason})", "export it again") from None
    return table_columns(table, str(path))


def _read_text(path: Path) -> pa.Table:
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        header = file.readline()
    delimiter = max(",;\t|", key=header.count)
    parse = pyarrow.csv.ParseOptions(delimiter=delimiter)
    convert = pyarrow.csv.ConvertOptions(strings_can_be_null=True)
    return pyarrow.csv.read_csv(path, parse_options=parse, convert_options=convert)


def table_columns(table: Any, source: str) -> Columns:
    """Return the columns of an Arrow table that this module knows, and None in the place of others."""
    names = _unique((str(name) for name in table.column_names), source)
    columns: Columns = {}
    for index, name in enumerate(names):
        column = table.column(index)
        try:
            nested = pa.types.is_list(column.type) or pa.types.is_fixed_size_list(column.type)
            columns[name] = np.array(column.to_pylist(), dtype=np.float64) if nested else column.to_numpy()
        except Exception:
            if _family(name) is None and name not in _SCALARS:
                columns[name] = np.empty(0)  # never read
                continue
            got = f"type {column.type} with {column.null_count} empty cells"
            raise InputError(f"{source}: column {name}", "numbers, or lists of one length", got, "flatten or drop it") from None
    return columns


def from_frame(frame: Any) -> Transitions:
    """Read a data frame (pandas, or anything with ``columns`` and ``frame[name]`` convertible to numpy)."""
    source = f"{type(frame).__name__} in memory"
    names = list(frame.columns)
    _unique(map(str, names), source)
    return from_columns({str(name): np.asarray(frame[name]) for name in names}, source=source, form="frame")


def _unique(names: Iterable[str], source: str) -> list[str]:
    """Return names without surrounding space, scalars in lower case; raise InputError if two are equal."""
    clean = [name.strip() for name in names]
    clean = [name.lower() if name.lower() in _SCALARS else name for name in clean]
    twice = next((name for name in clean if clean.count(name) > 1), None)
    if twice is not None:
        raise InputError(f"{source}: columns", "each name once", f"{twice!r} {clean.count(twice)} times", "rename or drop one")
    return clean


def from_columns(columns: Columns, *, source: str, form: str) -> Transitions:
    """Gather ``obs_*`` and its kin into matrices and build Transitions."""
    names = _unique(columns, source)
    columns = dict(zip(names, columns.values(), strict=True))
    arrays: dict[str, Any] = {_SCALARS[name]: value for name, value in columns.items() if name in _SCALARS}
    arrays["observations"] = gather(columns, "obs", source=source)
    for kind, field in _VECTORS.items():
        found = suffixes(columns, kind)
        if field in arrays or not found:
            continue
        wanted = suffixes(columns, _LEADERS.get(kind, kind))
        if wanted and set(wanted) != set(found):
            leader, odd = _LEADERS[kind], sorted(set(wanted) ^ set(found))
            raise InputError(f"{source}: columns {kind}_*", f"the same names as {leader}_*", f"a difference in {odd[0]!r}")
        arrays[field] = gather(columns, kind, source=source, order=wanted)
    unused = [name for name in columns if name not in _SCALARS and _family(name) is None]
    return from_arrays(
        arrays, source=source, form=form, obs_names=_feature_names(columns, arrays["observations"]), unused=unused
    )


def _feature_names(columns: Columns, observations: NDArray[Any]) -> list[str] | None:
    names = suffixes(columns, "obs")
    return names if len(names) == observations.shape[1] and "" not in names else None  # one list column has no names


def gather(columns: Columns, kind: str, *, source: str, order: Sequence[str] | None = None) -> NDArray[Any]:
    """Return the columns ``kind_*`` as one matrix, numbered suffixes in numeric order; raises InputError if there are none."""
    wanted = order or suffixes(columns, kind)
    if not wanted:
        shown = ", ".join(map(repr, list(columns)[:6])) + (", .." if len(columns) > 6 else "")
        raise InputError(f"{source}: columns", f"{kind}_0 .. or {kind}_NAME", shown or "none", "rename the columns")
    parts = []
    for suffix in wanted:
        name = f"{kind}_{suffix}" if suffix else kind
        part = columns[name]
        if part.dtype.kind not in "fiub":
            try:
                part = part.astype(np.float64) if part.dtype.kind == "O" else None
            except (TypeError, ValueError):
                part = None
            if part is None:
                got = "times" if columns[name].dtype.kind in "mM" else "text"
                mend = "convert to seconds" if got == "times" else "one-hot encode categories"
                raise InputError(f"{source}: column {name}", "numbers", got, mend)
        parts.append(part if part.ndim == 2 else part[:, None])
    return np.concatenate(parts, axis=1)


def suffixes(columns: Columns, kind: str) -> list[str]:
    """Return the suffixes of a family of columns: numbered ones in numeric order, named ones in the table's."""
    found = [name[len(kind) + 1 :] for name in columns if _family(name) == kind]
    return sorted(found, key=int) if all(suffix.isascii() and suffix.isdecimal() for suffix in found) else found


def _family(name: str) -> str | None:
    return next((kind for kind in _VECTORS if name == kind or name.startswith(f"{kind}_")), None)
