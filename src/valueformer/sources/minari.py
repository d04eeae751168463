"""Minari datasets, read directly: HDF5 (a group per episode), Arrow or Parquet (a folder per episode).

Dict and tuple spaces become named columns: ``achieved_goal_0``, ``_index_1``, ``a/b``.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray

from valueformer import fields
from valueformer.errors import InputError
from valueformer.sources import hdf5
from valueformer.sources.alignment import PADDING, Rows, episode
from valueformer.sources.columns import Table, is_arrow, is_parquet, numbers
from valueformer.sources.options import Options, in_order

__all__ = ["blocks", "partition_blocks", "recognises", "recognises_partitions", "resolve_id"]

_PARTS = ("observations", "rewards", "terminations", "truncations")


def _file(path: Path) -> Path:
    for candidate in (path / "data" / "main_data.hdf5", path / "main_data.hdf5"):
        if candidate.is_file():
            return candidate
    return path


def recognises(path: Path) -> bool:
    """Whether a folder holds main_data.hdf5, or an HDF5 file has groups ``episode_0``, .."""
    file = _file(path)
    return file != path or any(re.fullmatch(r"episode_\d+", name) for name in hdf5.top_names(file))


def blocks(path: Path, options: Options, block_size: int | None) -> Iterator[Rows]:
    """Yield all episodes in numeric order (``episode_10`` sorts before ``episode_2`` as text).

    Observations are stored T + 1 per episode; where a set stores T, the last row of a truncated episode has no successor and
    is dropped and counted. An episode without end flag stays unfinished.
    """
    with hdf5.opened(_file(path)) as root:
        names = [name for name in map(str, root) if re.fullmatch(r"episode_\d+", name)]
        numbered = {int(name.removeprefix("episode_")): name for name in names}
        if len(numbered) < len(names):
            raise InputError(
                str(path), "each episode number once", f"two of one: {', '.join(sorted(names)[:4])}", "export it again"
            )
        if not numbered:
            raise InputError(str(path), "groups episode_0, episode_1, ..", str(list(root)[:4]), "is it a Minari dataset?")
        for number in sorted(numbered):
            where = f"{path}: episode_{number}"
            group = hdf5.node(root, numbered[number])
            if not hasattr(group, "keys"):
                raise InputError(where, "a group", "a single array")
            if missing := [name for name in _PARTS if name not in group]:
                raise InputError(where, ", ".join(_PARTS), f"no {', '.join(missing)}")
            members = {name: _members(group, name) for name in (*_PARTS, "actions") if name in group}
            datasets = [dataset for part in members.values() for dataset in part.values()]
            hdf5.check_all(where, datasets)
            yield _episode(where, number, members, options)


def _members(group: Any, name: str) -> dict[str, Any]:
    item = hdf5.node(group, name)
    return hdf5.leaves(item) if hasattr(item, "keys") else {"": item}


def _episode(where: str, number: int, parts: Mapping[str, Mapping[str, Any]], options: Options) -> Rows:
    """Return one episode from its members: part -> name inside the part -> array, one row per step."""
    single = {}
    for name in ("rewards", "terminations", "truncations"):
        if list(parts[name]) != [""]:
            raise InputError(f"{where}: {name}", "one array", f"a group of {len(parts[name])}")
        single[name] = np.asarray(parts[name][""]).reshape(-1)
    observations, names = _chosen(where, "observations", parts["observations"], options)
    actions = _chosen(where, "actions", parts["actions"], options)[0] if parts.get("actions") else None
    if actions is not None and actions.shape[1] == 0:  # a log without actions, in a format that asks for them
        actions = None
    terminated, truncated = (fields.flags(f"{where}: {name}", single[name]) for name in ("terminations", "truncations"))
    if len(single["rewards"]) == 0:  # nothing happened; its single observation leads nowhere
        observations, actions = observations[:0], None if actions is None else actions[:0]
    rows = episode(where, number, observations, single["rewards"], terminated, truncated, actions)
    return Rows(rows.arrays, names, dropped=rows.dropped)


def _chosen(where: str, part: str, members: Mapping[str, Any], options: Options) -> tuple[NDArray[Any], tuple[str, ...] | None]:
    option = {"observations": "obs_columns", "actions": "action_columns"}[part]
    chosen = options.select(option, list(members), f"{where}: {part}") or list(members)
    if not chosen:
        raise InputError(f"{where}: {part}", "at least one array", "an empty group")
    return hdf5.features({name: np.asarray(members[name]) for name in chosen}, f"{where}: {part}")


# -- Arrow and Parquet: a folder per episode ---------------------------------------------------------------------------------


def _data(path: Path) -> Path:
    return path / "data" if (path / "data").is_dir() else path


def _partitions(path: Path) -> dict[int, list[Path]]:
    found: dict[int, list[Path]] = {}
    if path.is_dir():
        for folder in _data(path).iterdir():
            if folder.is_dir() and folder.name.isascii() and folder.name.isdecimal():
                members = sorted(folder.iterdir(), key=lambda file: in_order(file.name))
                files = [file for file in members if file.name[0] not in "._" and file.name != "metadata.json"]
                if files and all(is_parquet(file) or is_arrow(file) for file in files):
                    found[int(folder.name)] = files
    return found


def recognises_partitions(path: Path) -> bool:
    """Whether a folder holds folders ``0``, ``1``, .. of Arrow or Parquet files."""
    return bool(_partitions(path))


def partition_blocks(path: Path, options: Options, block_size: int | None) -> Iterator[Rows]:
    """Yield all episodes in numeric order; the padding of actions, rewards and flags to T + 1 rows is counted and dropped."""
    return (_partition(path, n, files, options) for n, files in sorted(_partitions(path).items()))


def _partition(path: Path, number: int, files: Sequence[Path], options: Options) -> Rows:
    where = f"{path}: episode {number}"
    columns: dict[str, list[NDArray[Any]]] = {}
    for file in files:
        table = Table(file)
        for batch in table.batches([name for name in table.names if name.split(".")[0] in (*_PARTS, "actions")], None):
            for name, column in batch.items():
                columns.setdefault(name, []).append(column)
    arrays = {name: np.concatenate([numbers(name, part) for part in parts]) for name, parts in columns.items()}
    if missing := [part for part in _PARTS if not any(name.split(".")[0] == part for name in arrays)]:
        raise InputError(where, ", ".join(_PARTS), f"no {', '.join(missing)}")
    rows = len(arrays["rewards"])
    steps = _total_steps(files[0].parent, rows)
    parts: dict[str, dict[str, NDArray[Any]]] = {}
    for name in sorted(arrays, key=in_order):
        part, _, inner = name.partition(".")
        parts.setdefault(part, {})[inner.replace(".", "/")] = arrays[name] if part == "observations" else arrays[name][:steps]
    found = _episode(where, number, parts, options)
    return Rows(found.arrays, found.obs_names, dropped={**found.dropped, **({PADDING: rows - steps} if rows > steps else {})})


def _total_steps(folder: Path, rows: int) -> int:
    """Return how many of the rows are steps: as metadata.json says, else all but the padding of the final observation."""
    file = folder / "metadata.json"
    said = json.loads(file.read_text(encoding="utf-8")).get("total_steps") if file.is_file() else None
    if said is None:
        return rows - 1
    if said not in (rows, rows - 1):
        raise InputError(str(file), f"total_steps {rows - 1} or {rows}, as there are {rows} rows", str(said), "export it again")
    return int(said)


# -- minari:ID ---------------------------------------------------------------------------------------------------------------


def resolve_id(name: str) -> Path:
    """Return the folder of a dataset by its id, downloading it with the installed ``minari`` package where it is absent.

    The root is MINARI_DATASETS_PATH or ``~/.minari/datasets``. Raises InputError for an id that is none, and where the
    download fails or brings nothing.
    """
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or ".." in parts or "\\" in name or "\0" in name:
        raise InputError(f"minari:{name}", "a dataset id such as D4RL/door/human-v2", repr(name))
    root = Path(os.environ.get("MINARI_DATASETS_PATH") or Path.home() / ".minari" / "datasets")
    folder = root.joinpath(*parts)
    if not (recognises(folder) or recognises_partitions(folder)):
        _download(name, folder)
    if not (recognises(folder) or recognises_partitions(folder)):
        raise InputError(f"minari:{name}", f"a dataset in {folder}", "nothing that can be read", "see `minari list remote`")
    return folder


def _download(name: str, folder: Path) -> None:
    try:
        import minari
    except ImportError:
        mend = "pip install minari, or copy the dataset there"
        raise InputError(f"minari:{name}", f"a dataset in {folder}", "none, and no minari package to fetch it", mend) from None
    try:
        minari.download_dataset(name)
    except Exception as error:  # no network, no such dataset, another version: the package has many errors for each
        reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
        mend = "check the network and the id (`minari list remote`), or copy the dataset there"
        raise InputError(f"minari:{name}", f"a dataset in {folder}, or a download", reason, mend) from error
