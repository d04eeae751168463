"""NPZ archives and mappings of arrays under the field names of Transitions."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from valueformer import fields
from valueformer.errors import InputError
from valueformer.sources.alignment import from_step_rows, sort_rows
from valueformer.transitions import Transitions

FIELDS = (
    "observations", "next_observations", "rewards", "terminated", "truncated", "actions",
    "next_actions", "discounts", "episode_ids", "steps", "sample_weight",
)  # fmt: skip

# Names under which other libraries store the end of an episode. Ignoring one would join two episodes.
_END_FLAGS = (
    "done", "dones", "terminal", "terminals", "termination", "terminations", "terminateds", "is_terminal", "timeout",
    "timeouts", "truncation", "truncations", "truncateds", "timelimit.truncated", "is_last", "episode_terminals", "end",
)  # fmt: skip


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


def read(path: Path) -> Transitions:
    """Read an NPZ archive of the fields of Transitions."""
    return from_arrays(read_arrays(path), source=str(path), form="npz")


def read_arrays(path: Path) -> dict[str, Any]:
    """Read all arrays of an archive; object arrays are refused, since reading them would execute code from the file."""
    try:
        with np.load(path, allow_pickle=False) as archive:
            return {name: _member(path, archive, name) for name in archive.files}
    except InputError:
        raise
    except Exception as error:  # zip, zlib and the .npy header parser each have their own
        raise InputError(str(path), "a complete NPZ archive", f"a damaged one ({error})", "copy or export it again") from None


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


def from_arrays(
    arrays: Mapping[str, Any], *, source: str, form: str, obs_names: Sequence[str] | None = None, unused: Sequence[str] = ()
) -> Transitions:
    """Build Transitions from named arrays; without ``next_observations`` rows are aligned inside their episodes.

    ``unused``: names that the caller already left out. Raises InputError for end flags under other names, which would
    join episodes if they were ignored, unless both ``terminated`` and ``truncated`` say what they mean.
    """
    known: dict[str, Any] = {name: value for name, value in arrays.items() if name in FIELDS and value is not None}
    others = [*unused, *(name for name in arrays if name not in FIELDS)]
    flag = next((name for name in others if str(name).strip().lower() in _END_FLAGS), None)
    if flag is not None and not {"terminated", "truncated"} <= set(known):
        raise InputError(
            f"{source}: {flag}",
            "the flags 'terminated' (a terminal state) and 'truncated' (a time limit)",
            f"{flag!r}, which alone does not say which ends are terminal",
            "rename it to the one it means and add the other",
        )
    missing = [name for name in ("observations", "rewards", "terminated") if name not in known]
    if missing:
        names = [*known, *others]
        raise InputError(
            f"{source}: fields",
            "observations, rewards, terminated" + (" and truncated" if "truncated" not in known else ""),
            f"no {', '.join(missing)} among {', '.join(map(repr, names)) or 'nothing'}",
            "rename the columns or arrays; a task that never ends has terminated = all false",
        )
    known = {name: np.asarray(value) for name, value in known.items()}
    about: dict[str, Any] = {"source": source, "format": form, "obs_names": obs_names, "unused": tuple(map(str, others))}
    if "episode_ids" in known:
        known["episode_ids"] = fields.identifiers("episode_ids", known["episode_ids"])
    if "steps" in known:
        known["steps"] = fields.whole("steps", known["steps"])
    if len({len(np.atleast_1d(value)) for value in known.values()}) == 1:  # else Transitions names the odd one
        known = sort_rows(known)
    if "next_observations" in known:
        return Transitions(**known, **about)
    return from_step_rows(**known, **about)
