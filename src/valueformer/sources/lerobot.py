"""LeRobot datasets, versions 2 and 3: a folder with ``meta/info.json`` and Parquet files of frames, or one such file.

A frame holds the observation, the action taken in it, and, where recorded, ``next.reward`` and flags. No final observation is
stored, so an episode's last frame is kept only where it is terminal.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from valueformer.errors import InputError
from valueformer.sources.alignment import Rows
from valueformer.sources.columns import Table, is_parquet
from valueformer.sources.options import NONE, Options
from valueformer.sources.tables import Plan

__all__ = ["blocks", "recognises"]

_MARKS = {"episode_index", "frame_index"}
_BOOKKEEPING = ("timestamp", "index", "task_index", "next.success")
ABSENT = "a frame that meta/info.json counts and the folder does not hold"


def recognises(path: Path) -> bool:
    """Whether a folder has meta/info.json with a codebase version, or a Parquet file has LeRobot's columns."""
    if path.is_dir():
        return "codebase_version" in _info(path)
    try:
        return is_parquet(path) and set(Table(path).names) >= _MARKS
    except Exception:  # damage: whoever reads it reports it
        return False


def _info(folder: Path) -> dict[str, Any]:
    file = folder / "meta" / "info.json"
    if not file.is_file():
        return {}
    try:
        info = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        return {"codebase_version": None, "damaged": True}
    return info if isinstance(info, dict) else {}


def blocks(path: Path, options: Options, block_size: int | None) -> Iterator[Rows]:
    """Yield frames in order of ``index``; ``next.reward`` is the reward, ``observation.state`` the observation.

    ``next.done`` alone is refused, beside ``next.truncated`` it is split into the two. Options name other columns;
    ``terminated_column="none"`` says that no frame is terminal. Frames that the folder lacks are counted.
    """
    info = _info(path) if path.is_dir() else {}
    if info.get("damaged"):
        raise InputError(str(path / "meta" / "info.json"), "a JSON object", "a damaged one", "download it again")
    files = sorted(path.glob("data/**/*.parquet")) if path.is_dir() else [path]
    if not files:
        raise InputError(str(path), "data/chunk-000/*.parquet", "no such file", "is the download complete?")
    tables = sorted((Table(file) for file in files), key=_first_index)
    plan = Plan(tables[0].names, _completed(options, tables[0].names, str(path)), str(path), ignore=_BOOKKEEPING)
    names, count = _feature_names(info, plan.vectors["observations"]), 0
    rows = Rows({})
    for table in tables:
        if missing := [name for name in plan.used if name not in table.names]:
            raise InputError(table.source, f"the columns of {tables[0].source}", f"no {missing[0]!r}", "download it again")
        for batch in table.batches(plan.used, block_size):
            rows = plan.rows(batch)
            count += len(rows)
            width = rows.arrays["observations"].shape[1]
            rows = replace(rows, obs_names=names if names and len(names) == width else None)
            yield rows
    said = info.get("total_frames")
    if isinstance(said, int) and said < count:
        mend = "is a file there twice? download it again"
        raise InputError(f"{path}: frames", f"{said}, as meta/info.json says", str(count), mend)
    if isinstance(said, int) and said > count:
        empty = {name: value[:0] for name, value in rows.arrays.items()}
        yield Rows(empty, rows.obs_names, plan.unused, assumed={ABSENT: said - count})


def _first_index(table: Table) -> int:
    """Return the first frame's ``index``, from which the order of files follows whatever they are called."""
    if "index" not in table.names:
        return 0
    first = next((batch["index"][0].as_py() for batch in table.batches(["index"], 1) if len(batch["index"])), 0)
    return first if isinstance(first, int) else 0


def _completed(options: Options, names: Sequence[str], source: str) -> Options:
    """Fill in what LeRobot's own names say."""
    given = {name: getattr(options, name) for name in options.given()}
    if "observation.state" in names:
        given.setdefault("obs_columns", ("observation.state",))
    if "obs_columns" not in given:
        found = [name for name in names if name.startswith("observation")]
        mend = "choose with obs_columns (--obs-columns)"
        raise InputError(f"{source}: columns", "'observation.state'", ", ".join(map(repr, found)) or "none of the kind", mend)
    if "reward_column" not in given:
        if "next.reward" not in names:
            mend = "name a column of rewards: reward_column (--reward-column)"
            raise InputError(f"{source}: columns", "'next.reward'", ", ".join(map(repr, names)), mend)
        given["reward_column"] = "next.reward"
    if "next.truncated" in names and "truncated_column" not in given:
        given["truncated_column"] = "next.truncated"
    if "next.terminated" in names and not {"terminated_column", "done_column"} & set(given):
        given["terminated_column"] = "next.terminated"
    if not {"terminated_column", "done_column"} & set(given):
        if "next.done" in names and "truncated_column" in given:
            given["done_column"] = "next.done"
        else:
            flag = "next.done" if "next.done" in names else None
            say = "terminated_column (--terminated-column): 'next.success' if success ends the task, or 'none'"
            got = f"{flag!r}, which alone does not say which ends are terminal" if flag else "neither"
            raise InputError(
                f"{source}: flags", "'next.terminated', or 'next.done' and 'next.truncated'", got, f"say it with {say}"
            )
    given["episode_column"] = given.get("episode_column", "episode_index")
    given["step_column"] = given.get("step_column", "frame_index")
    if "done_column" not in given:
        given.setdefault("truncated_column", NONE)
    return Options(**given)


def _feature_names(info: dict[str, Any], columns: Sequence[str]) -> tuple[str, ...] | None:
    """Return the names of the features as info.json gives them: a list, or lists in a mapping."""
    if not isinstance(info.get("features"), dict):
        return None
    found: list[str] = []
    for column in columns:
        feature = info["features"].get(column)
        names = feature.get("names") if isinstance(feature, dict) else None
        if isinstance(names, dict):
            names = [name for group in names.values() for name in (group if isinstance(group, list) else [group])]
        if not isinstance(names, list):
            return None
        found += [str(name) for name in names]
    return tuple(found) if len(set(found)) == len(found) else None
