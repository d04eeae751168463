"""Logs bundled with the package: MetaWorld's scripted policies under action noise (see samples/README.md)."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any

import numpy as np

from valueformer.errors import InputError
from valueformer.transitions import Transitions

_FOLDER = files("valueformer") / "samples"


def manifest() -> dict[str, Any]:
    """Return how the samples were made: task, noise, goal, seeds, checksums."""
    return json.loads((_FOLDER / "manifest.json").read_text())


def names() -> list[str]:
    """Return the bundled logs as ``task/noise``."""
    return [f"{entry['task']}/{entry['noise']}" for entry in manifest()["files"]]


def load(name: str) -> Transitions:
    """Read one bundled log, for example ``pick-place-v3/low``. Files hold T + 1 observations per episode."""
    if name not in names():
        raise InputError(f"sample:{name}", f"one of {', '.join(names())}", repr(name), "see `valueformer samples`")
    task, noise = name.split("/")
    with (_FOLDER / f"{task}_{noise}.npz").open("rb") as file, np.load(file, allow_pickle=False) as archive:
        arrays = {key: archive[key] for key in archive.files}
    lengths = arrays["lengths"]
    ends = np.cumsum(lengths + 1)  # one past each episode's final observation
    first = np.ones(len(arrays["observations"]), bool)
    first[ends - 1] = False  # the final observation of an episode is a successor only
    rows = np.flatnonzero(first)
    last = np.zeros(len(rows), bool)
    last[np.cumsum(lengths) - 1] = True
    return Transitions(
        observations=arrays["observations"][rows],
        next_observations=arrays["observations"][rows + 1],
        rewards=arrays["rewards"],
        actions=arrays["actions"],
        terminated=np.zeros(len(rows), bool),
        truncated=last,
        episode_ids=np.repeat(np.arange(len(lengths)), lengths),
        source=f"sample:{name}",
        format="sample",
    )
