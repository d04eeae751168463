"""NPZ archives, and single arrays in NumPy's own format. Objects are refused: reading them would execute code from the file."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from valueformer.errors import InputError
from valueformer.sources import rollouts
from valueformer.sources.alignment import Rows
from valueformer.sources.arrays import from_arrays
from valueformer.sources.limits import check_size
from valueformer.sources.options import Options

__all__ = ["blocks", "is_npy", "read_arrays", "read_npy", "recognises"]


def recognises(path: Path) -> bool:
    """Whether a file is a zip archive of .npy members."""
    if not path.is_file() or not zipfile.is_zipfile(path):
        return False
    try:
        with zipfile.ZipFile(path) as archive:
            return bool(archive.namelist()) and all(name.endswith(".npy") for name in archive.namelist())
    except Exception:  # a damaged directory fails in many ways
        return False


def is_npy(path: Path) -> bool:
    """Whether a file is one array in NumPy's own format."""
    with path.open("rb") as file:
        return file.read(6) == b"\x93NUMPY"


def read_npy(path: Path) -> NDArray[Any]:
    """Read one array; objects are refused."""
    try:
        return np.load(path, allow_pickle=False)
    except Exception as error:  # whatever a parser raises on a damaged file
        got = "pickled Python objects, which are never read" if "allow_pickle" in str(error) else f"a damaged one ({error})"
        raise InputError(str(path), "a complete array of numbers", got, "save array.astype(np.float32)") from None


def blocks(path: Path, options: Options, block_size: int | None) -> Iterator[Rows]:
    """Yield the rows of an archive: fields of Transitions, or a rollout of several environments, time first."""
    arrays = read_arrays(path)
    read = rollouts.from_time_major if rollouts.recognises(arrays) else from_arrays
    yield read(arrays, options, str(path))


def read_arrays(path: Path) -> dict[str, Any]:
    """Read all arrays of an archive; raises InputError for objects and for more than the size limit."""
    try:
        with zipfile.ZipFile(path) as archive:
            check_size(str(path), sum(member.file_size for member in archive.infolist()), streams=False)
        with np.load(path, allow_pickle=False) as archive:
            return {name: _member(path, archive, name) for name in archive.files}
    except InputError:
        raise
    except Exception as error:  # zip, zlib and the .npy header parser each have their own
        raise InputError(str(path), "a complete NPZ archive", f"a damaged one ({error})", "copy or export it again") from error


def _member(path: Path, archive: Any, name: str) -> Any:
    try:
        return archive[name]
    except ValueError as error:
        if "allow_pickle" not in str(error):
            raise
        raise InputError(
            f"{path}: array {name!r}",
            "plain numbers or text",
            "pickled Python objects, which are never read because they can execute code",
            "save numeric arrays: array.astype(np.float32)",
        ) from None
