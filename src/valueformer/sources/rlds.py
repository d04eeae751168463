"""RLDS: episodes of steps ``is_first, is_last, is_terminal, observation, action, reward, discount``.

Step i pairs with observation i + 1. On the last step of an episode action, reward and discount are invalid: it is a successor
only. Last and not terminal means truncated.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from valueformer import fields
from valueformer.errors import InputError, MissingExtraError
from valueformer.sources import hdf5
from valueformer.sources.alignment import Rows, episode
from valueformer.sources.columns import Table, is_arrow, is_parquet, is_text, numbers
from valueformer.sources.options import Options

__all__ = ["recognises_records", "recognises_table", "record_blocks", "table_blocks"]

_MARKS = ("is_first", "is_last", "is_terminal")
FINAL = "final step of an episode, whose action and reward are invalid (its observation is used)"
INVALID = "step of an episode marked invalid"


def recognises_table(path: Path) -> bool:
    """Whether a table has the columns is_first, is_last and is_terminal."""
    try:
        return (is_parquet(path) or is_arrow(path) or is_text(path)) and set(Table(path).names) >= set(_MARKS)
    except Exception:  # damage: whoever reads it reports it
        return False


def recognises_records(path: Path) -> bool:
    """Whether a folder holds TensorFlow Datasets' features.json and record files, itself or in one version below it."""
    return _version(path) is not None


def _version(path: Path) -> Path | None:
    if not path.is_dir():
        return None
    for folder in (path, *sorted(child for child in path.iterdir() if child.is_dir())):
        if (folder / "features.json").is_file() and (folder / "dataset_info.json").is_file():
            return folder
    return None


def table_blocks(path: Path, options: Options, block_size: int | None) -> Iterator[Rows]:
    """Yield the episodes of a step table: the columns above, observation and action as lists, structs, or ``observation_*``.

    Rows are in order; is_first begins an episode. Optional: discount, and ``invalid``, true on every step of a bad episode.
    """
    table = Table(path)
    inner = {kind: _inner(table.names, kind) for kind in ("observation", "action")}
    chosen = {}
    for kind, option in (("observation", "obs_columns"), ("action", "action_columns")):
        labels = {_label(name, kind): name for name in inner[kind]}  # asked for as they are called inside the step
        chosen[kind] = [labels[label] for label in options.select(option, list(labels), str(path)) or labels]
    lower = {name.lower(): name for name in table.names}
    scalars = {name: lower[name] for name in (*_MARKS, "reward", "discount", "invalid") if name in lower}
    if not chosen["observation"] or "reward" not in scalars:
        lacking = "observation" if not chosen["observation"] else "reward"
        raise InputError(f"{path}: columns", "observation, reward, is_first, is_last, is_terminal", f"no {lacking}")
    wanted = [*chosen["observation"], *chosen["action"], *scalars.values()]
    unused = tuple(name for name in table.names if name not in wanted)
    waiting: list[dict[str, NDArray[Any]]] = []
    number = 0
    for batch in table.batches(wanted, block_size):
        part = {name: numbers(name, column) for name, column in batch.items()}
        first = fields.flags("is_first", part[scalars["is_first"]])
        cuts = np.flatnonzero(first).tolist()
        for start, stop in zip([0, *cuts], [*cuts, len(first)], strict=True):
            if start < len(first) and first[start] and waiting:
                yield _steps(path, number, waiting, chosen, scalars, unused)
                number, waiting = number + 1, []
            if stop > start:
                waiting.append({name: value[start:stop] for name, value in part.items()})
    if waiting:
        yield _steps(path, number, waiting, chosen, scalars, unused)


def _inner(names: list[str], kind: str) -> list[str]:
    return [name for name in names if name == kind or name.startswith((f"{kind}.", f"{kind}_", f"{kind}/"))]


def _label(name: str, kind: str) -> str:
    return name if name == kind else name[len(kind) + 1 :]


def _steps(
    path: Path,
    number: int,
    parts: list[dict[str, NDArray[Any]]],
    chosen: Mapping[str, list[str]],
    scalars: Mapping[str, str],
    unused: tuple[str, ...],
) -> Rows:
    where = f"{path}: episode {number}"
    columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    joined = {}
    for kind, names in chosen.items():
        labels = {_label(name, kind).removeprefix(kind): columns[name] for name in names}
        joined[kind] = hdf5.features(labels, f"{where}: {kind}") if names else (None, None)
    steps = {name: columns[column] for name, column in scalars.items()}
    rows = _episode(where, number, joined["observation"][0], joined["action"][0], steps)
    return Rows(rows.arrays, joined["observation"][1], unused, rows.dropped)


def _episode(
    where: str, number: int, observations: NDArray[Any], actions: NDArray[Any] | None, steps: Mapping[str, NDArray[Any]]
) -> Rows:
    n = len(observations)
    flags = {name: fields.length(name, fields.flags(f"{where}: {name}", steps[name]), n) for name in _MARKS}
    if flags["is_last"][:-1].any():
        at = int(np.argmax(flags["is_last"]))
        raise InputError(f"{where}: is_last", "true on the last step only", f"true at step {at} of {n}", "is is_first set?")
    if flags["is_terminal"][:-1].any():
        at = int(np.argmax(flags["is_terminal"]))
        raise InputError(f"{where}: is_terminal", "true on the last step only", f"true at step {at} of {n}")
    invalid = "invalid" in steps and bool(fields.flags(f"{where}: invalid", steps["invalid"]).any())
    final = bool((flags["is_last"] | flags["is_terminal"])[-1])
    count = n - 1 if final else n
    terminated, truncated = np.zeros(count, bool), np.zeros(count, bool)
    if final:
        terminated[-1:] = flags["is_terminal"][-1]
        truncated[-1:] = not flags["is_terminal"][-1]
    rewards = fields.vector(f"{where}: reward", steps["reward"])[:count]
    rows = episode(where, number, observations, rewards, terminated, truncated, None if actions is None else actions[:count])
    arrays, dropped = dict(rows.arrays), dict(rows.dropped)
    if "discount" in steps:
        arrays["discounts"] = fields.vector(f"{where}: discount", steps["discount"])[: len(rows)]
    if final:
        dropped[FINAL] = 1
    if invalid:
        arrays, dropped = {name: value[:0] for name, value in arrays.items()}, {INVALID: n}
    return Rows(arrays, dropped=dropped)


def record_blocks(path: Path, options: Options, block_size: int | None) -> Iterator[Rows]:
    """Yield the episodes of a TFRecord folder, read through the installed ``tensorflow_datasets``.

    Raises MissingExtraError without it; a Parquet step table (see :func:`table_blocks`) needs no TensorFlow.
    """
    try:
        import tensorflow_datasets as tfds  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise MissingExtraError("tensorflow-datasets", "rlds") from None
    builder = tfds.builder_from_directory(str(_version(path)))
    number = 0
    for split in sorted(builder.info.splits):
        for record in builder.as_dataset(split=split, shuffle_files=False):
            steps = tfds.as_numpy(record["steps"].batch(2**20))  # one batch: the whole episode
            whole = next(iter(steps), None)
            if whole is None:
                continue
            where = f"{path}: {split} episode {number}"
            joined = {}
            for kind, option in (("observation", "obs_columns"), ("action", "action_columns")):
                members = _flatten(whole.get(kind, {}))
                names = options.select(option, list(members), where) or list(members)
                joined[kind] = (
                    hdf5.features({name: members[name] for name in names}, f"{where}: {kind}") if names else (None, None)
                )
            scalars = {name: np.asarray(whole[name]) for name in (*_MARKS, "reward", "discount") if name in whole}
            if missing := [name for name in (*_MARKS, "reward") if name not in scalars]:
                raise InputError(where, "is_first, is_last, is_terminal, reward", f"no {', '.join(missing)}")
            if bool(np.asarray(record.get("invalid", False))):
                scalars["invalid"] = np.ones(len(scalars["reward"]), bool)
            rows = _episode(where, number, joined["observation"][0], joined["action"][0], scalars)
            yield Rows(rows.arrays, joined["observation"][1], dropped=rows.dropped)
            number += 1


def _flatten(value: Any, prefix: str = "") -> dict[str, NDArray[Any]]:
    if not isinstance(value, Mapping):
        return {prefix.rstrip("/"): np.asarray(value)}
    return {k: v for name in sorted(value) for k, v in _flatten(value[name], f"{prefix}{name}/").items()}
