"""Writing Transitions for others, and for later: NPZ, Parquet, and a Minari folder. Nothing is ever half-written."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet
from numpy.typing import NDArray

from valueformer.errors import InputError, MissingExtraError
from valueformer.files import write_atomically
from valueformer.transitions import FIELDS, Transitions

__all__ = ["FORMATS", "Record", "box", "check_new", "dataset_id", "export", "write_minari"]

Array = NDArray[Any]
FORMATS = ("npz", "parquet", "minari")
MINARI_VERSION = "0.5.3"  # of the layout written here, which Minari >= 0.5 reads


class Record(NamedTuple):
    """One episode as Minari stores it: parts by path (``""`` for a single one), T + 1 observations and infos, T of the rest."""

    observations: Mapping[str, Array]
    actions: Mapping[str, Array]
    rewards: Array
    terminated: Array
    truncated: Array
    infos: Mapping[str, Array]
    seed: int | None = None


def export(data: Transitions, form: str, path: Path) -> None:
    """Write ``data`` as ``npz``, ``parquet`` or ``minari``; read back, it is equal row by row.

    Minari holds less: raises InputError where a next observation is not the following row's observation, and for discounts,
    weights, next actions, and steps other than 0, 1, 2, ... Its episodes are renumbered from 0 and its features unnamed.
    """
    if form not in FORMATS:
        raise InputError("--to", f"one of {', '.join(FORMATS)}", repr(form))
    if form == "minari":
        records = list(_records(data))
        spaces = {"observation_space": box(data.observations), "action_space": box(records[0].actions[""])}
        write_minari(path, records, {**spaces, "dataset_id": dataset_id(path.name)})
    elif form == "npz":
        arrays = {name: value for name in FIELDS if (value := getattr(data, name)) is not None}
        names = {} if data.obs_names is None else {"obs_names": np.array(data.obs_names)}
        write_atomically(path, lambda file: _savez(file, arrays | names))
    else:
        write_atomically(path, lambda file: _write_table(_table(data), file))


def _write_table(table: pa.Table, path: Path) -> None:
    with path.open("wb") as file:  # Arrow takes no path whose bytes are not text
        pyarrow.parquet.write_table(table, file, write_page_checksum=True)


def _savez(path: Path, arrays: Mapping[str, Any]) -> None:
    with path.open("wb") as file:  # numpy would add .npz to a name
        np.savez_compressed(file, **arrays)  # numbers and text: nothing to pickle


def _table(data: Transitions) -> pa.Table:
    columns: dict[str, Array] = {}
    labels = data.obs_names or [str(i) for i in range(data.obs_dim)]
    for kind, matrix in (("obs", data.observations), ("next_obs", data.next_observations)):
        columns |= {f"{kind}_{name}": matrix[:, i] for i, name in enumerate(labels)}
    for kind, matrix in (("action", data.actions), ("next_action", data.next_actions)):
        if matrix is not None:
            columns |= {f"{kind}_{i}": matrix[:, i] for i in range(matrix.shape[1])}
    scalars = {
        "reward": data.rewards, "terminated": data.terminated, "truncated": data.truncated, "episode_id": data.episode_ids,
        "step": data.steps, "discount": data.discounts, "sample_weight": data.sample_weight,
    }  # fmt: skip
    return pa.table(columns | {name: value for name, value in scalars.items() if value is not None})


def _records(data: Transitions) -> Iterable[Record]:
    for name in ("discounts", "sample_weight", "next_actions"):
        if getattr(data, name) is not None:
            raise InputError(f"--to minari: {name}", "a log without them", "a log with them", "Parquet and NPZ keep them")
    for part in data.episodes():
        part = part[np.argsort(part.steps, kind="stable")]
        what = f"episode {part.episode_ids[0].item()!r}"
        if not np.array_equal(part.steps, np.arange(len(part))):
            raise InputError(f"--to minari: {what}", "steps 0, 1, 2, ..", "others", "Parquet and NPZ keep them")
        odd = np.flatnonzero((part.next_observations[:-1] != part.observations[1:]).any(axis=1))
        if len(odd):
            got = f"another one at step {int(part.steps[odd[0]])} ({len(odd)} in this episode)"
            expected = "each next observation to be the following row's observation"
            raise InputError(f"--to minari: {what}", expected, got, "Parquet and NPZ keep them")
        observations = np.concatenate([part.observations, part.next_observations[-1:]])
        actions = np.zeros((len(part), 0), np.float32) if part.actions is None else part.actions
        yield Record({"": observations}, {"": actions}, part.rewards, part.terminated, part.truncated, {})


def box(array: Array, low: float | None = None, high: float | None = None) -> dict[str, Any]:
    """Return Minari's description of a space of arrays such as the rows of ``array``."""
    shape = list(array.shape[1:])
    bounds = (np.full(shape, -np.inf if low is None else low), np.full(shape, np.inf if high is None else high))
    return {"type": "Box", "dtype": str(array.dtype), "shape": shape, "low": bounds[0].tolist(), "high": bounds[1].tolist()}


def check_new(path: Path, what: str = "--out") -> None:
    """Raise InputError unless a folder can be made at ``path``: it must not exist, or be empty."""
    if path.resolve() == Path.cwd() or not path.name:
        raise InputError(f"{what} {path}", "a new folder", "the one at work in", "name a folder inside it")
    try:
        taken = path.is_symlink() or (path.exists() and (not path.is_dir() or any(path.iterdir())))
        parent = next(p for p in path.absolute().parents if p.exists())
        usable = parent.is_dir() and os.access(parent, os.W_OK | os.X_OK)
    except OSError as error:
        raise InputError(f"{what} {path}", "a new folder", error.strerror or str(error), "choose another") from None
    if taken:
        raise InputError(f"{what} {path}", "a new or empty folder", "something that exists", "choose another, or remove it")
    if not usable:
        raise InputError(f"{what} {path}", "a folder that can be written to", f"{parent} is not one", "choose another")


def write_minari(folder: Path, records: Iterable[Record], metadata: Mapping[str, Any]) -> None:
    """Write ``folder/data/main_data.hdf5`` and ``metadata.json``, which the minari package and :func:`valueformer.load` read.

    ``metadata``: observation_space and action_space as mappings, dataset_id, and anything else. The folder appears when
    complete.
    """
    try:
        import h5py
    except ImportError:
        raise MissingExtraError("h5py", "hdf5") from None
    check_new(folder)
    folder.absolute().parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=folder.absolute().parent, prefix=f".{folder.name}-"))
    try:
        os.chmod(temporary, 0o755)
        (temporary / "data").mkdir()
        steps = episodes = 0
        with h5py.File(temporary / "data" / "main_data.hdf5", "w", track_order=True) as file:
            for number, record in enumerate(records):
                group = file.create_group(f"episode_{number}")
                group.attrs.update({"id": number, "total_steps": len(record.rewards)})
                if record.seed is not None:
                    group.attrs["seed"] = record.seed
                for kind in ("observations", "actions", "infos"):
                    for name, array in getattr(record, kind).items():
                        group[f"{kind}/{name}".rstrip("/")] = array
                group["rewards"] = record.rewards
                group["terminations"], group["truncations"] = record.terminated, record.truncated
                steps, episodes = steps + len(record.rewards), episodes + 1
        size = (temporary / "data" / "main_data.hdf5").stat().st_size
        document = dict(metadata) | {name: json.dumps(metadata[name]) for name in ("observation_space", "action_space")}
        document |= {
            "total_episodes": episodes, "total_steps": steps, "data_format": "hdf5", "jpeg_encoding": False,
            "minari_version": MINARI_VERSION, "dataset_size": round(size / 1e6, 3),
        }  # fmt: skip
        (temporary / "data" / "metadata.json").write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
        if folder.is_dir():
            folder.rmdir()  # empty, as checked
        try:
            os.replace(temporary, folder)
        except OSError:
            raise InputError(str(folder), "a new folder", "one that appeared meanwhile", "is another run at work?") from None
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def dataset_id(name: str) -> str:
    """Return an id that Minari accepts, made from any text."""
    return "valueformer/" + ("".join(c if c.isascii() and c.isalnum() else "-" for c in name).strip("-") or "log") + "-v0"
