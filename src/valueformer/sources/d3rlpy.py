"""d3rlpy's HDF5 files: version 2 (arrays ``observations_{i}`` per episode) and version 1 (flat arrays)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from valueformer import fields
from valueformer.errors import InputError
from valueformer.sources import hdf5
from valueformer.sources.alignment import Rows, episode
from valueformer.sources.options import Options

__all__ = ["blocks", "from_buffer", "is_buffer", "recognises", "recognises_v1", "v1_blocks"]


def recognises(path: Path) -> bool:
    """Whether an HDF5 file has ``columns`` and ``num_episodes``."""
    return {"columns", "num_episodes"} <= hdf5.top_names(path)


def recognises_v1(path: Path) -> bool:
    """Whether an HDF5 file has flat observations and d3rlpy 1's ``episode_terminals`` or ``discrete_action``."""
    names = hdf5.top_names(path)
    return "observations" in names and bool({"episode_terminals", "discrete_action"} & names)


def blocks(path: Path, options: Options, block_size: int | None) -> Iterator[Rows]:
    """Yield the episodes of a version 2 file, which stores T observations and one flag ``terminated`` per episode.

    A terminated episode gives T transitions; a truncated one T - 1, its last row having no successor.
    """
    with hdf5.opened(path) as file:
        datasets = {name: hdf5.node(file, name) for name in map(str, file)}
        hdf5.check_all(str(path), [datasets["num_episodes"]])
        count = np.asarray(datasets["num_episodes"]).reshape(-1)
        found = sum(re.fullmatch(r"rewards_\d+", name) is not None for name in datasets)
        if count.size != 1 or int(count[0]) != found:
            raise InputError(f"{path}: num_episodes", f"{found}, as there are rewards_*", str(count), "export it again")
        for number in range(found):
            where = f"{path}: episode {number}"
            parts = {kind: _parts(datasets, kind, number) for kind in ("observations", "actions", "rewards", "terminated")}
            if missing := [kind for kind, members in parts.items() if not members]:
                raise InputError(where, ", ".join(parts), f"no {', '.join(missing)}")
            members = [dataset for part in parts.values() for dataset in part.values()]
            hdf5.check_all(where, members)
            arrays = {kind: {n: np.asarray(d) for n, d in part.items()} for kind, part in parts.items()}
            yield _episode(where, number, arrays)


def _parts(datasets: dict[str, Any], kind: str, number: int) -> dict[str, Any]:
    """Return an episode's arrays of one kind: one, or several where the space is a tuple."""
    if (one := f"{kind}_{number}") in datasets:
        return {"": datasets[one]}
    found: dict[str, Any] = {}
    while (name := f"{kind}_{number}_{len(found)}") in datasets:
        found[str(len(found))] = datasets[name]
    return found


def _episode(where: str, number: int, parts: dict[str, dict[str, NDArray[Any]]]) -> Rows:
    observations, names = hdf5.features(parts["observations"], f"{where}: observations")
    actions, _ = hdf5.features(parts["actions"], f"{where}: actions")
    rewards = next(iter(parts["rewards"].values()))
    ended = fields.flags(f"{where}: terminated", np.asarray(next(iter(parts["terminated"].values()))).reshape(-1))
    if len(ended) != 1:
        raise InputError(f"{where}: terminated", "one flag per episode", f"{len(ended)} of them")
    terminated, truncated = np.zeros(len(rewards), bool), np.zeros(len(rewards), bool)
    terminated[-1:], truncated[-1:] = ended, ~ended
    rows = episode(where, number, observations, rewards, terminated, truncated, actions)
    return Rows(rows.arrays, names, dropped=rows.dropped)


def v1_blocks(path: Path, options: Options, block_size: int | None) -> Iterator[Rows]:
    """Yield the rows of a version 1 file; an episode ends at ``episode_terminals``.

    Where those are absent, InputError asks for max_episode_steps: ends that are not terminal would join two episodes."""
    with hdf5.opened(path) as file:
        names = ("observations", "actions", "rewards", "terminals", "episode_terminals")
        datasets = {name: hdf5.node(file, name) for name in names if name in file}
        if missing := [name for name in names[:4] if name not in datasets]:
            raise InputError(str(path), ", ".join(names[:4]), f"no {', '.join(missing)}", "export it again")
        if "episode_terminals" not in datasets and options.max_episode_steps is None:
            mend = "say how long an episode may last: max_episode_steps (--max-episode-steps)"
            raise InputError(str(path), "episode_terminals", "terminals alone: other ends are unknown", mend)
        hdf5.check_all(str(path), datasets.values(), block_size)
        n = len(datasets["rewards"])
        if odd := next((name for name, dataset in datasets.items() if len(dataset) != n), None):
            raise InputError(f"{path}: {odd}", f"{n} rows, as in rewards", str(len(datasets[odd])), "export it again")
        for start in range(0, n, block_size or max(n, 1)):
            stop = n if block_size is None else start + block_size
            part = {name: dataset[start:stop] for name, dataset in datasets.items()}
            terminated = fields.flags("terminals", part["terminals"])
            arrays = {
                "observations": hdf5.features({"": part["observations"]}, f"{path}: observations")[0],
                "actions": hdf5.features({"": part["actions"]}, f"{path}: actions")[0],
                "rewards": part["rewards"],
                "terminated": terminated,
            }
            if "episode_terminals" in part:
                arrays["truncated"] = fields.flags("episode_terminals", part["episode_terminals"]) & ~terminated
            yield Rows(arrays)


def is_buffer(data: Any) -> bool:
    """Whether an object looks like d3rlpy's ReplayBuffer: episodes of observations, actions, rewards and a flag."""
    episodes = getattr(data, "episodes", None)
    return isinstance(episodes, (list, tuple)) and all(hasattr(episode, "terminated") for episode in episodes[:1])


def from_buffer(data: Any) -> Iterator[Rows]:
    """Yield the episodes of a d3rlpy ReplayBuffer or MDPDataset."""
    for number, part in enumerate(data.episodes):
        arrays = {kind: _members(getattr(part, kind)) for kind in ("observations", "actions", "rewards")}
        arrays["terminated"] = {"": np.asarray(part.terminated)}
        yield _episode(f"episode {number}", number, arrays)


def _members(value: Any) -> dict[str, NDArray[Any]]:
    if isinstance(value, (list, tuple)):
        return {str(i): np.asarray(part) for i, part in enumerate(value)}
    return {"": np.asarray(value)}
