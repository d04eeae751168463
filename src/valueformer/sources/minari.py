"""Minari datasets in HDF5, read directly: ``<folder>/data/main_data.hdf5`` with one group ``episode_<k>`` per episode."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from valueformer import fields
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
    try:
        with h5py.File(_file(path), "r") as root:
            groups = {int(m[1]): root[name] for name in map(str, root) if (m := re.fullmatch(r"episode_(\d+)", name))}
            episodes = {index: _episode(groups[index], f"{path}: episode_{index}") for index in sorted(groups)}
            found = list(root)[:4]
    except InputError:
        raise
    except Exception as error:  # HDF5 reports damage as OSError, KeyError, RuntimeError, ValueError or TypeError
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise InputError(str(path), "a readable Minari HDF5 dataset", reason, "download it again") from None
    if not episodes:
        raise InputError(str(path), "groups episode_0, episode_1, ..", f"{found}", "is it a Minari dataset?")
    parts = {index: arrays for index, (arrays, _) in episodes.items() if len(arrays["rewards"])}
    if not parts:
        raise InputError(str(path), "at least one transition with its next observation", "none")
    first_index, first = next(iter(parts.items()))
    for index, arrays in parts.items():
        shapes, wanted = ({n: a.shape[1:] for n, a in part.items()} for part in (arrays, first))
        if shapes != wanted:
            odd = next(n for n in sorted({*shapes, *wanted}) if shapes.get(n) != wanted.get(n))
            expected = f"{odd} of shape {wanted.get(odd)} per step, as in episode_{first_index}"
            raise InputError(f"{path}: episode_{index}", expected, str(shapes.get(odd)), "all episodes need the same spaces")
    columns: dict[str, Any] = {name: np.concatenate([arrays[name] for arrays in parts.values()]) for name in first}
    columns["episode_ids"] = np.repeat(list(parts), [len(arrays["rewards"]) for arrays in parts.values()])
    lost = sum(dropped for _, dropped in episodes.values())
    dropped = {"no next observation at the end of a record": lost} if lost else {}
    return Transitions(**columns, source=str(path), format="minari-hdf5", dropped=dropped)


def _episode(group: Any, where: str) -> tuple[dict[str, NDArray[Any]], int]:
    """Return an episode's arrays, one row per transition, and the number of rows that had no next observation."""
    missing = [n for n in ("observations", "rewards", "terminations", "truncations") if n not in group]
    if missing:
        raise InputError(where, "observations, rewards, terminations, truncations", f"no {', '.join(missing)}")
    rewards = np.asarray(group["rewards"]).reshape(-1)
    steps = len(rewards)
    if steps == 0:
        return {"rewards": rewards}, 0
    observations = _flatten(group["observations"], where)
    terminated = fields.flags(f"{where}: terminations", np.asarray(group["terminations"]).reshape(-1))
    truncated = fields.flags(f"{where}: truncations", np.asarray(group["truncations"]).reshape(-1))
    if len(observations) not in (steps, steps + 1) or len(terminated) != steps or len(truncated) != steps:
        got = f"{len(observations)} observations, {len(terminated)} terminations, {len(truncated)} truncations"
        raise InputError(where, f"T + 1 (or T) observations and T flags for T = {steps} rewards", got)
    kept = steps
    successors = observations[1:]
    if len(observations) == steps:
        if terminated[-1]:  # never read
            successors = np.concatenate([successors, observations[-1:]])
        else:  # the record is cut one step earlier, and so is its flag
            kept -= 1
            truncated[max(kept - 1, 0)] |= truncated[-1]
    episode = {
        "observations": observations[:kept],
        "next_observations": successors[:kept],
        "rewards": rewards[:kept],
        "terminated": terminated[:kept],
        "truncated": truncated[:kept],
    }
    if "actions" in group:
        episode["actions"] = fields.length(f"{where}: actions", _flatten(group["actions"], where), steps)[:kept]
    return episode, steps - kept


def _flatten(node: Any, where: str) -> NDArray[Any]:
    if hasattr(node, "keys"):
        parts = [_flatten(node[key], where) for key in sorted(node, key=_natural)]
        if len({len(part) for part in parts}) != 1:
            raise InputError(where, "one length in all parts of a space", str([len(part) for part in parts]))
        return np.concatenate(parts, axis=1)
    array = np.asarray(node)
    if array.dtype.kind not in "fiub":
        raise InputError(where, "numeric observations and actions", f"dtype {array.dtype}", "leave text features out")
    if array.ndim == 0:
        raise InputError(where, "one row per step", "a single number")
    return array.reshape(len(array), -1)


def _natural(key: str) -> tuple[str, int]:
    match = re.fullmatch(r"(.*?)(\d*)", key)
    return (match[1], int(match[2] or -1)) if match else (key, -1)
