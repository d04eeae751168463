"""Flat HDF5 files, D4RL's and others' alike: ``observations (N, d)``, ``actions``, ``rewards``, ``terminals``, ``timeouts``."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from valueformer import fields
from valueformer.errors import InputError
from valueformer.sources import hdf5
from valueformer.sources.alignment import Rows
from valueformer.sources.arrays import Plan
from valueformer.sources.options import Options, in_order

__all__ = ["blocks", "flat_blocks", "recognises", "recognises_arrays"]

INFERRED = "an episode end where the next observation is not the following row's"
GOALS = "timeouts that mean 'goal reached' (maze2d): taken as truncations, whose state keeps its value"


def recognises(path: Path) -> bool:
    """Whether an HDF5 file has flat observations and D4RL's ``terminals`` or ``timeouts``, at the top or in ``virtual/0``."""
    names = hdf5.top_names(path)
    if "virtual" in names or {"observations", "timeouts"} <= names:
        return True
    return {"observations", "terminals"} <= names and not {"episode_terminals", "discrete_action"} & names


def recognises_arrays(path: Path) -> bool:
    """Whether an HDF5 file has flat arrays under the field names of Transitions, or others for the options to name."""
    names = hdf5.top_names(path)
    return "rewards" in names and "observations" in names and not {"terminals", "timeouts", "columns"} & names


def blocks(path: Path, options: Options, block_size: int | None) -> Iterator[Rows]:
    """Yield D4RL's rows. Stored next observations are preferred; else the successor is the next row of the same episode.

    ``terminals`` are terminal states and ``timeouts`` time limits. Without ``timeouts``, ends are inferred from stored next
    observations; without those, InputError asks for max_episode_steps. Chunks ``virtual/{k}`` are read in order and never
    joined. The unflagged tail is kept.
    """
    defaults = {"terminated_column": "terminals", "truncated_column": "timeouts"}
    with hdf5.opened(path) as file:
        roots = [file]
        if "virtual" in file:
            chunks = hdf5.node(file, "virtual")
            roots = [hdf5.node(chunks, name) for name in sorted(map(str, chunks), key=in_order)]
        for root in roots:
            fresh = True  # chunks are separate records
            here = {option: name for option, name in defaults.items() if name in root and getattr(options, option) is None}
            known = {*options.given(), *here}
            unbounded = "truncated_column" not in known and "truncated" not in root and "done_column" not in known
            if unbounded and "next_observations" not in root and options.max_episode_steps is None:
                mend = "say how long an episode may last: max_episode_steps (--max-episode-steps)"
                raise InputError(str(path), "timeouts, or next observations", "terminals alone: other ends are unknown", mend)
            goals = {GOALS: 1} if "infos/goal" in root and here.get("truncated_column") else {}
            chosen = dataclasses.replace(options, **here)
            for rows in _flat(root, path, chosen, block_size, infer=unbounded and "next_observations" in root):
                starts = np.zeros(len(rows), bool)
                starts[:1] = fresh
                yield dataclasses.replace(rows, arrays=rows.arrays | {"starts": starts}, assumed={**rows.assumed, **goals})
                goals, fresh = {}, False


def flat_blocks(path: Path, options: Options, block_size: int | None) -> Iterator[Rows]:
    """Yield the rows of flat arrays under the field names of Transitions, or under the names that the options give."""
    with hdf5.opened(path) as file:
        yield from _flat(file, path, options, block_size)


def _flat(root: Any, path: Path, options: Options, block_size: int | None, *, infer: bool = False) -> Iterator[Rows]:
    datasets = hdf5.leaves(root, skip=("infos", "metadata", "virtual"))
    plan = Plan(list(datasets), options, str(path))
    used: Mapping[str, Any] = {name: datasets[name] for name in plan.used}
    hdf5.check_all(str(path), used.values(), block_size)
    lengths = {name: dataset.shape[0] if dataset.shape else 0 for name, dataset in used.items()}
    n = lengths[plan.scalars["rewards"]]
    if odd := next((name for name, length in lengths.items() if length != n), None):
        mend = "N + 1 observations of several episodes cannot be told apart: store next_observations"
        raise InputError(f"{path}: {odd}", f"{n} rows, as in rewards", str(lengths[odd]), mend)
    for start in range(0, n, block_size or max(n, 1)):
        stop = n if block_size is None else min(start + block_size, n)
        rows = plan.rows({name: dataset[start:stop] for name, dataset in used.items()})
        if infer:
            parts = [used[name][stop : stop + 1] for name in plan.vectors["observations"]]
            rows = _infer_ends(rows, [part.reshape(len(part), -1) if part.size else part.reshape(0, 1) for part in parts])
        yield rows


def _infer_ends(rows: Rows, following: Sequence[NDArray[Any]]) -> Rows:
    """Mark a cut where a stored next observation is not the next row's; ``following``: the next block's first observation."""
    arrays = rows.arrays
    states = arrays["observations"].reshape(len(rows), -1)
    after = states[1:]
    if len(following[0]):
        after = np.concatenate([after, np.concatenate(following, axis=1)])
    apart = (arrays["next_observations"].reshape(len(rows), -1)[: len(after)] != after).any(axis=1)
    cut = np.zeros(len(rows), bool)
    cut[: len(after)] = apart & ~fields.flags("terminated", arrays["terminated"])[: len(after)]
    assumed = {INFERRED: int(cut.sum())} if cut.any() else {}
    return Rows(arrays | {"truncated": cut}, rows.obs_names, rows.unused, assumed=assumed)
