"""Where logs come from: one module per origin, and :func:`load`, which dispatches on content rather than on file names."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
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
    if hasattr(source, "columns") and not isinstance(source, (str, os.PathLike)):
        return tables.from_frame(source)
    if not isinstance(source, (str, os.PathLike)):
        raise InputError("data", "a path, a data frame, a mapping of arrays or Transitions", type(source).__name__)
    scheme, colon, rest = str(source).partition(":")
    if colon and scheme in SCHEMES:
        return SCHEMES[scheme](rest)
    path = Path(source).expanduser()
    if not path.exists():
        mend = "check the path; bundled logs are listed by `valueformer samples`"
        raise InputError(str(source), "an existing file or folder", "nothing there", mend)
    if not os.access(path, os.R_OK):
        raise InputError(str(source), "a readable file", "no permission to read it")
    for candidate in FILES:
        if candidate.recognises(path):
            return candidate.read(path)
    kind = "an empty file" if path.is_file() and path.stat().st_size == 0 else "unknown content"
    raise InputError(str(source), f"one of {', '.join(s.name for s in FILES)}", kind, "convert it to Parquet, CSV or NPZ")


def load_observations(path: Path) -> NDArray[Any]:
    """Read states ``(m, d)`` to ask about: an array ``observations`` in NPZ or NPY, or ``obs_*`` columns of a table.

    Raises InputError where there is no file, no such array or column, or a number is not finite.
    """
    if not path.is_file():
        raise InputError(str(path), "a file of observations", "no such file", "check the path")
    if npz.is_npy(path):
        found = npz.read_npy(path)
    elif npz.recognises(path):
        arrays = npz.read_arrays(path)
        if "observations" not in arrays:
            raise InputError(f"{path}: arrays", "'observations'", ", ".join(map(repr, arrays)) or "none")
        found = arrays["observations"]
    else:
        columns = tables.read_columns(path)
        found = tables.gather(columns, "obs", source=str(path))
    return fields.finite(f"{path}: observations", fields.matrix(f"{path}: observations", found))
