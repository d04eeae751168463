"""HDF5 files, opened with care: they may link to other files and claim more than fits in memory."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from valueformer.errors import InputError, MissingExtraError
from valueformer.sources.limits import check_size
from valueformer.sources.options import in_order

__all__ = ["check_all", "describe", "features", "is_hdf5", "leaves", "node", "opened", "top_names"]

_MAGIC = b"\x89HDF\r\n\x1a\n"


def is_hdf5(path: Path) -> bool:
    """Whether a file starts with HDF5's magic bytes."""
    if not path.is_file():
        return False
    with path.open("rb") as stream:
        return stream.read(len(_MAGIC)) == _MAGIC


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """Open a file for reading; raises MissingExtraError without h5py."""
    try:
        import h5py
    except ImportError:
        raise MissingExtraError("h5py", "hdf5") from None
    with h5py.File(path, "r") as file:
        yield file


def top_names(path: Path) -> set[str]:
    """Return the names at the top of an HDF5 file; none where it cannot be opened."""
    if not is_hdf5(path):
        return set()
    try:
        with opened(path) as file:
            return set(map(str, file))
    except MissingExtraError:
        raise
    except Exception:  # damage: whoever reads it reports it
        return set()


def describe(path: Path) -> str:
    """Return what an HDF5 file holds at its top, or why it cannot be opened, for an error message."""
    try:
        with opened(path) as file:
            return f"an HDF5 file with {', '.join(map(repr, list(file)[:8])) or 'nothing in it'}"
    except MissingExtraError:
        raise
    except Exception as error:
        return f"a damaged HDF5 file ({' '.join(str(error).split())[:200]})"


def node(group: Any, name: str) -> Any:
    """Return a member of a group; raises InputError where it lies in another file."""
    import h5py

    if isinstance(group.get(name, getlink=True), h5py.ExternalLink):
        raise InputError(
            f"{group.name.rstrip('/')}/{name}", "data inside the file", "a link to another file", "copy the data in"
        )
    item = group[name]
    if item.file.filename != group.file.filename:  # through a soft link
        raise InputError(f"{group.name.rstrip('/')}/{name}", "data inside the file", "data of another file", "copy the data in")
    if isinstance(item, h5py.Dataset) and (item.external or item.is_virtual):
        raise InputError(str(item.name), "data inside the file", "data kept in another file", "copy the data in")
    return item


def leaves(group: Any, prefix: str = "", skip: Collection[str] = ()) -> dict[str, Any]:
    """Return the datasets under a group by name, ``parent/child`` for nested ones, in order of name with numbers as numbers.

    ``skip``: members that are not even looked at.
    """
    import h5py

    found: dict[str, Any] = {}
    for name in sorted(map(str, group), key=in_order):
        if name in skip:
            continue
        try:
            item = node(group, name)
        except KeyError:  # a link that leads nowhere
            continue
        if isinstance(item, h5py.Dataset):
            found[prefix + name] = item
        elif isinstance(item, h5py.Group):
            found |= leaves(item, f"{prefix}{name}/")
    return found


def check_all(where: str, datasets: Iterable[Any], rows: int | None = None) -> None:
    """Raise InputError if reading ``rows`` rows (None: all) of every dataset takes more than the size limit.

    A chunk is unpacked as a whole, however few of its rows are asked for.
    """
    total = 0
    for dataset in datasets:
        shape = dataset.shape or ()
        n = shape[0] if shape else 1
        row = int(np.prod(shape[1:], dtype=object)) * max(dataset.dtype.itemsize, 1)
        chunk = int(np.prod(dataset.chunks, dtype=object)) * dataset.dtype.itemsize if dataset.chunks else 0
        total += max(int(row * (n if rows is None else min(rows, n))), chunk)
    check_size(where, total)


def features(parts: dict[str, NDArray[Any]], where: str) -> tuple[NDArray[Any], tuple[str, ...] | None]:
    """Join parts of a space, each ``(n, ..)``, to ``(n, d)`` with a name per column (None for one unnamed part).

    Raises InputError for text, single numbers, and parts of unequal length.
    """
    columns, names = [], []
    for name, array in parts.items():
        array = np.asarray(array)
        if array.dtype.kind not in "fiub":
            mend = "choose others with obs_columns, action_columns" if name else "leave text and pictures out"
            raise InputError(f"{where}/{name}".rstrip("/"), "numeric observations and actions", f"dtype {array.dtype}", mend)
        if array.ndim == 0:
            raise InputError(where, "one row per step", "a single number")
        flat = array.reshape(len(array), -1) if array.size else array.reshape(len(array), 0)
        columns.append(flat)
        names += [name] if flat.shape[1] == 1 else [f"{name}_{i}" for i in range(flat.shape[1])]
    if len({len(column) for column in columns}) != 1:
        raise InputError(where, "one length in all parts of a space", str([len(column) for column in columns]))
    unnamed = list(parts) == [""]
    return (columns[0] if len(columns) == 1 else np.concatenate(columns, axis=1)), None if unnamed else tuple(names)
