"""Logs in memory, recognised by what they can do: nothing here imports torch, pandas, polars, d3rlpy or TorchRL."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from valueformer.errors import InputError
from valueformer.sources import d3rlpy, hdf5, rollouts, tables
from valueformer.sources.alignment import PADDING, Rows
from valueformer.sources.arrays import as_array, from_arrays
from valueformer.sources.columns import Table
from valueformer.sources.options import CHOICE, MEANING, PLAIN, TABLE, Options, resolve

__all__ = ["KINDS", "rows"]

KINDS = ("pandas or polars DataFrame", "Arrow table", "mapping of arrays or tensors", "TensorDict", "ReplayBuffer")

_COLLECTOR = "collector/"
_NEXT = "next/"
_ACCEPTS = {
    "tensordict": CHOICE | MEANING,
    "rollout": (TABLE | {"autoreset"}) - {"episode_column", "step_column", "max_episode_steps"},
    "d3rlpy-buffer": PLAIN,
    "sb3-buffer": PLAIN | {"terminated_column"},
}


def rows(data: Any, options: Options) -> tuple[str, str, Iterable[Rows]]:
    """Return the source's description, the name of its format, and its rows; raises InputError for anything else."""
    form = _form(data)
    options.check(_ACCEPTS.get(form, TABLE), form)
    source = "memory" if form in ("arrays", "rollout") else f"{type(data).__name__} in memory"
    return source, form, _READERS[form](data, options, source)


def _form(data: Any) -> str:
    """Tell what an object is by what it can do."""
    if isinstance(data, Mapping) or (hasattr(data, "batch_size") and hasattr(data, "keys")):
        if hasattr(data, "batch_size") or hasattr(data.get("next"), "keys"):
            return "tensordict"
        return "rollout" if rollouts.recognises(data) else "arrays"
    if d3rlpy.is_buffer(data):
        return "d3rlpy-buffer"
    if rollouts.is_sb3(data):
        return "sb3-buffer"
    if hasattr(data, "to_arrow") or hasattr(data, "column_names"):
        return "table"
    if hasattr(data, "columns"):
        return "frame"
    raise InputError("data", f"a path, Transitions, or a {', '.join(KINDS)}", type(data).__name__)


def _table(data: Any, options: Options, source: str) -> Iterable[Rows]:
    return tables.in_memory(Table(data.to_arrow() if hasattr(data, "to_arrow") else data, source), options, None)


def _tensordict(data: Any, options: Options, source: str) -> Rows:
    """Return the rows of TorchRL's episode format: what a step led to lies under ``next``.

    Leading dimensions are batch and time; each batch entry is a record of its own. Padding (``collector/mask``) is left out.
    """
    leaves = {name: as_array(value) for name, value in _leaves(data).items()}
    after = {name.removeprefix(_NEXT): value for name, value in leaves.items() if name.startswith(_NEXT)}
    root = {name: value for name, value in leaves.items() if not name.startswith((_NEXT, _COLLECTOR))}
    if not after:
        raise InputError(f"{source}: 'next'", "reward and flags under 'next'", "nothing there", "pass arrays instead")
    asked = {getattr(options, option) for option in MEANING} | {"reward", "done", "terminated", "truncated"}
    scalars = {name: value for name, value in after.items() if name in asked or name.split("/")[-1] in asked}
    if {"terminated", "done"} <= set(scalars) and "truncated" not in scalars:
        scalars["truncated"] = scalars["done"] & ~scalars["terminated"]
    chosen = resolve(list(scalars), options, source)
    shape = scalars[chosen["rewards"]].shape
    batch = tuple(data.batch_size) if hasattr(data, "batch_size") else shape[:-1] if shape[-1:] == (1,) else shape
    if not batch:
        raise InputError(f"{source}: batch_size", "at least a time dimension", "none", "stack the steps first")
    n = int(np.prod(batch))
    if odd := next((name for name in chosen.values() if scalars[name].size != n), None):
        got = f"shape {scalars[odd].shape}, batch_size {batch}"
        raise InputError(f"{source}: {odd}", "one number per entry of the batch", got, "set batch_size to batch and time")

    def flat(name: str, value: NDArray[Any]) -> NDArray[Any]:
        if value.shape[: len(batch)] != batch:
            raise InputError(f"{source}: {name}", f"leading shape {batch}", str(value.shape))
        return value.reshape(n, -1)

    known = ("observation",) if "observation" in root else tuple(n for n, v in root.items() if n in after and n not in scalars)
    states = options.select("obs_columns", list(root), source) or list(known)
    if missing := [name for name in states if name not in after]:
        raise InputError(f"{source}: 'next'", f"{missing[0]!r}, as in the root", f"{', '.join(map(repr, after))}")
    if not states:
        raise InputError(f"{source}: observations", "'observation'", ", ".join(map(repr, root)) or "nothing")
    parts = {name: flat(name, root[name]) for name in states}
    joined, names = hdf5.features(parts if len(parts) > 1 else {"": next(iter(parts.values()))}, source)
    arrays = {"observations": joined}
    arrays["next_observations"] = hdf5.features({name: flat(name, after[name]) for name in states}, source)[0]
    arrays |= {field: flat(name, scalars[name])[:, 0] for field, name in chosen.items()}
    actions = options.select("action_columns", list(root), source) or [name for name in ("action",) if name in root]
    if actions:
        arrays["actions"] = np.concatenate([flat(name, root[name]) for name in actions], axis=1)
    if (ids := leaves.get(f"{_COLLECTOR}traj_ids")) is not None:
        arrays["episode_ids"] = flat("traj_ids", ids)[:, 0]
    starts = np.zeros(batch, bool)
    starts[..., 0] = True
    arrays["starts"] = starts.reshape(-1)
    found = Rows(arrays, names)
    if (mask := leaves.get(f"{_COLLECTOR}mask")) is not None:
        keep = flat("mask", mask)[:, 0].astype(bool)
        found = Rows(
            {k: v[keep] for k, v in arrays.items()}, names, dropped={PADDING: int((~keep).sum())} if not keep.all() else {}
        )
    return found


def _leaves(data: Any, prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in data.keys():  # noqa: SIM118  # a TensorDict iterates over its batch
        value = data.get(name) if hasattr(data, "get") else data[name]
        if hasattr(value, "keys"):
            found |= _leaves(value, f"{prefix}{name}/")
        elif value is not None and hasattr(value, "shape"):
            found[f"{prefix}{name}"] = value
    return found


_READERS: dict[str, Callable[[Any, Options, str], Iterable[Rows]]] = {
    "arrays": lambda data, options, source: [from_arrays(data, options, source)],
    "rollout": lambda data, options, source: [rollouts.from_time_major(data, options, source)],
    "tensordict": lambda data, options, source: [_tensordict(data, options, source)],
    "d3rlpy-buffer": lambda data, options, source: d3rlpy.from_buffer(data),
    "sb3-buffer": lambda data, options, source: [rollouts.from_sb3(data, options)],
    "table": _table,
    "frame": lambda data, options, source: [tables.frame(data, options)],
}
