"""Where logs come from: one module per origin, and :func:`load`, which dispatches on content rather than on file names."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from valueformer import fields
from valueformer.errors import InputError
from valueformer.sources import minari, npz, samples, tables
from valueformer.transitions import Transitions

__all__ = ["Source", "load", "load_observations", "names"]


@dataclass(frozen=True)
class Source:
    """A file format: how to recognise it by content, and how to read it."""

    name: str
    recognises: Callable[[Path], bool]
    read: Callable[[Path], Transitions]


# In order of recognition; text comes last because it is recognised by elimination.
FILES = (
    Source("minari-hdf5", minari.recognises, minari.read),
    Source("npz", npz.recognises, npz.read),
    Source("parquet", tables.is_parquet, tables.read),
    Source("arrow", tables.is_arrow, tables.read),
    Source("csv", tables.is_text, tables.read),
)
SCHEMES: Mapping[str, Callable[[str], Transitions]] = {"sample": samples.load}


def names() -> list[str]:
    """Return the names of all formats and schemes that :func:`load` knows."""
    return [source.name for source in FILES] + [f"{scheme}:" for scheme in SCHEMES] + ["DataFrame", "mapping of arrays"]


def load(source: Any) -> Transitions:
    """Read logged transitions from a path, a ``scheme:name``, a data frame, a mapping of arrays, or Transitions.

    Raises InputError where nothing is found, the format is unknown, or the content would make values wrong. User files are
    never unpickled.
    """
    if isinstance(source, Transitions):
        return source
    if isinstance(source, Mapping):
        return npz.from_arrays(source, source="memory", form="arrays")
    if isinstance(source, (str, os.PathLike)):
        scheme, colon, rest = str(source).partition(":")
        if colon and scheme in SCHEMES:
            return SCHEMES[scheme](rest)
        return _load_path(Path(source), str(source) or "''")
    if hasattr(source, "column_names"):  # an Arrow table
        return tables.from_columns(tables.table_columns(source, "Table in memory"), source="Table in memory", form="table")
    if hasattr(source, "columns"):
        return tables.from_frame(source)
    raise InputError("data", "a path, a table, a mapping of arrays or Transitions", type(source).__name__)


def _load_path(path: Path, shown: str) -> Transitions:
    try:
        path = path.expanduser()
        exists = path.exists()
    except (OSError, RuntimeError) as error:
        raise InputError(shown, "a path", str(error), "check the path") from None
    if not exists or shown == "''":
        mend = "check the path; bundled logs are listed by `valueformer samples`"
        raise InputError(shown, "an existing file or folder", "nothing there", mend)
    if not os.access(path, os.R_OK):
        raise InputError(shown, "a readable file", "no permission to read it")
    for candidate in FILES:
        if candidate.recognises(path):
            try:
                return candidate.read(path)
            except InputError as error:  # name the file, once
                if str(path) in error.what:
                    raise
                raise InputError(f"{path}: {error.what}", error.expected, error.got, error.mend) from None
    if path.is_dir():
        raise InputError(shown, "a folder with data/main_data.hdf5 (Minari)", "another folder", "name the file inside it")
    kind = "an empty file" if path.is_file() and path.stat().st_size == 0 else "unknown content"
    raise InputError(shown, f"one of {', '.join(s.name for s in FILES)}", kind, "convert it to Parquet, CSV or NPZ")


def load_observations(path: Path, names: Sequence[str] | None = None) -> NDArray[Any]:
    """Read states ``(m, d)`` to ask about: an array ``observations`` in NPZ or NPY, or ``obs_*`` columns of a table.

    Columns are matched to ``names``, the features of the log, where it has them; otherwise they must be numbered. Raises
    InputError where there is no such file, array or column, or a number is not finite.
    """
    try:
        readable = path.is_file()
    except OSError:
        readable = False
    if not readable:
        raise InputError(str(path) or "''", "a file of observations", "no such file", "check the path")
    if npz.is_npy(path):
        found = npz.read_npy(path)
    elif npz.recognises(path):
        arrays = npz.read_arrays(path)
        if "observations" not in arrays:
            raise InputError(f"{path}: arrays", "'observations'", ", ".join(map(repr, arrays)) or "none")
        found = arrays["observations"]
    else:
        columns = tables.read_columns(path)
        given = tables.suffixes(columns, "obs")
        wanted = list(names) if names is not None else [str(i) for i in range(len(given))]
        if given and given != [""] and set(given) != set(wanted):
            shown = ", ".join(f"obs_{name}" for name in wanted[:4]) + (" .." if len(wanted) > 4 else "")
            lacking = [f"no obs_{name}" for name in wanted if name not in given]
            foreign = [f"obs_{name}" for name in given if name not in wanted]
            got = ", ".join([*lacking[:3], *foreign[:3]])
            raise InputError(f"{path}: columns", f"those of the log: {shown}", got, "name them alike; the order is free")
        found = tables.gather(columns, "obs", source=str(path), order=None if given == [""] else wanted if given else None)
    return fields.finite(f"{path}: observations", fields.matrix(f"{path}: observations", found))
