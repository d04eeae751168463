"""Minari datasets in HDF5, read directly: ``<folder>/data/main_data.hdf5`` with one group ``episode_<k>`` per episode."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from valueformer.errors import InputError, MissingExtraError
from valueformer.transitions import Transitions

_MAGIC = b"\x89HDF\r\n\x1a\n"


def _file(path: Path) -> Path:
    for candidate in (path / "data" / "main_data.hdf5", path / "main_data.hdf5"):
        if candidate.is_file():
            return candidate
    return path


def recognises(path: Path) -> bool:
    """Whether a folder holds main_data.hdf5, or a file is HDF5."""
    file = _file(path)
    if not file.is_file():
        return False
    with file.open("rb") as stream:
        return stream.read(len(_MAGIC)) == _MAGIC


def read(path: Path) -> Transitions:
    """Read all episodes in numeric order (``episode_10`` sorts before ``episode_2`` as text).

    Observations are stored T + 1 per episode; where a set stores T, the last row of a truncated episode has no successor and
    is dropped and counted. An episode without end flag stays unfinished. Dict and tuple spaces are flattened by sorted key.
    """
    try:
        import h5py
    except ImportError:
        raise MissingExtraError("h5py", "minari") from None
    file = _file(path)
    try:
        with h5py.File(file, "r") as root:
            groups = {int(m[1]): root[name] for name in map(str, root) if (m := re.fullmatch(r"episode_(\d+)", name))}
            if not groups:
                raise InputError(str(path), "groups episode_0, episode_1, ..", f"{list(root)[:4]}", "is it a Minari dataset?")
            parts, dropped = [], 0
            for index in sorted(groups):
                episode, lost = _episode(groups[index], f"{path}: episode_{index}")
                dropped += lost
                if len(episode["rewards"]):
                    parts.append((index, episode))
    except (OSError, KeyError, RuntimeError) as error:
        raise InputError(str(path), "a readable Minari HDF5 dataset", str(error).splitlines()[0], "download it again") from None
    if not parts:
        raise InputError(str(path), "at least one transition", "none")
    arrays: dict[str, Any] = {name: np.concatenate([e[name] for _, e in parts]) for name in parts[0][1]}
    arrays["episode_ids"] = np.repeat([i for i, _ in parts], [len(e["rewards"]) for _, e in parts])
    lost_rows = {"no next observation at the end of a record": dropped} if dropped else {}
    return Transitions(**arrays, source=str(path), format="minari-hdf5", dropped=lost_rows)


def _episode(group: Any, where: str) -> tuple[dict[str, NDArray[Any]], int]:
    missing = [n for n in ("observations", "rewards", "terminations", "truncations") if n not in group]
    if missing:
        raise InputError(where, "observations, rewards, terminations, truncations", f"no {', '.join(missing)}")
    rewards = np.asarray(group["rewards"]).reshape(-1)
    observations = _flatten(group["observations"], where)
    terminated = np.asarray(group["terminations"], dtype=bool).reshape(-1)
    truncated = np.asarray(group["truncations"], dtype=bool).reshape(-1)
    steps = len(rewards)
    if len(observations) not in (steps, steps + 1) or len(terminated) != steps or len(truncated) != steps:
        got = f"{len(observations)} observations, {len(terminated)} terminations, {len(truncated)} truncations"
        raise InputError(where, f"T + 1 (or T) observations and T flags for T = {steps} rewards", got)
    kept = steps
    successors = observations[1:]
    if len(observations) == steps and steps:
        if terminated[-1]:  # never read
            successors = np.concatenate([successors, observations[-1:]])
        else:
            kept -= 1
    episode = {
        "observations": observations[:kept],
        "next_observations": successors[:kept],
        "rewards": rewards[:kept],
        "terminated": terminated[:kept],
        "truncated": truncated[:kept],
    }
    if "actions" in group:
        episode["actions"] = _flatten(group["actions"], where)[:kept]
    return episode, steps - kept


def _flatten(node: Any, where: str) -> NDArray[Any]:
    if hasattr(node, "keys"):
        parts = [_flatten(node[key], where) for key in sorted(node, key=_natural)]
        return np.concatenate(parts, axis=1)
    array = np.asarray(node)
    if array.dtype.kind not in "fiub":
        raise InputError(where, "numeric observations and actions", f"dtype {array.dtype}", "leave text features out")
    return array.reshape(len(array), -1)


def _natural(key: str) -> tuple[str, int]:
    match = re.fullmatch(r"(.*?)(\d*)", key)
    return (match[1], int(match[2] or -1)) if match else (key, -1)
