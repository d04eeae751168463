"""Write the golden files: ``python tests/golden/make_golden.py WRITER --out tests/golden``, one writer after the other.

The packages' pins clash, so each writer needs an environment of its own (Python 3.11; versions as used):

- ``minari``: ``pip install minari==0.5.4 gymnasium==1.0.0 h5py==3.16.0 pyarrow==26.0.1 pillow==13.0.0``
- ``d3rlpy``: ``pip install d3rlpy==2.8.1 h5py==3.16.0``
- ``lerobot``: ``pip install lerobot==0.4.4`` (here with numpy 2.2.6, datasets 4.8.5, and torch 2.14.1 and others newer than its pins)
- ``rlds-records``: ``pip install tensorflow-cpu==2.21.0 tensorflow-datasets==4.9.10 importlib_resources``
- ``rollouts``: ``pip install gymnasium==1.4.0`` (1.1 or newer, for autoreset_mode)
- ``schemas``: ``pip install h5py==3.16.0 pyarrow==26.0.1``; formats written to their documented schema, no package of theirs needed

What a writer makes replaces what is there.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from episodes import GARBAGE, LENGTHS, Episode, action, episodes, reward, state

# pyright: reportMissingImports=false

FPS = 10
TASK = "golden"


def main() -> None:
    """Run one writer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("writer", choices=WRITERS)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    chosen = parser.parse_args()
    WRITERS[chosen.writer](chosen.out.resolve())


def fresh(path: Path) -> Path:
    """Return a path at which nothing is, in a folder that exists."""
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def flat(parts: Sequence[Episode], name: str) -> np.ndarray:
    """Return one field of all episodes, joined."""
    return np.concatenate([getattr(part, name) for part in parts])


def before(parts: Sequence[Episode]) -> np.ndarray:
    """Return the state before each step."""
    return np.concatenate([part.observations[:-1] for part in parts])


def after(parts: Sequence[Episode]) -> np.ndarray:
    """Return the state after each step."""
    return np.concatenate([part.observations[1:] for part in parts])


# -- Minari ---------------------------------------------------------------------------------------------------------------------


def minari(out: Path) -> None:
    """Write data sets with the package's own storage; t-states-parquet is given T observations instead of T + 1."""
    from gymnasium import spaces

    box, force = (spaces.Box(-np.inf, np.inf, (n,), np.float32) for n in (3, 2))
    half = spaces.Box(-np.inf, np.inf, (3,), np.float16)
    one, two, column = (spaces.Box(-np.inf, np.inf, shape, np.float32) for shape in ((1,), (2,), (2, 1)))
    named, ordered = spaces.Dict({"a": one, "b": column}), spaces.Tuple((one, two))
    four = spaces.Discrete(4)

    def in_dict(states: np.ndarray) -> dict[str, np.ndarray]:
        return {"a": states[:, :1], "b": states[:, 1:].reshape(-1, 2, 1)}

    def in_tuple(states: np.ndarray) -> tuple[np.ndarray, ...]:
        return states[:, :1], states[:, 1:]

    def as_half(states: np.ndarray) -> np.ndarray:
        return states.astype(np.float16)

    def as_is(states: np.ndarray) -> np.ndarray:
        return states

    def all_but_last(states: np.ndarray) -> np.ndarray:
        return states[:-1]

    with tempfile.TemporaryDirectory() as root:
        os.environ["MINARI_DATASETS_PATH"] = root
        for form in ("hdf5", "arrow", "parquet"):
            _minari_set(out, f"box-{form}", form, box, force, as_is)
        for form in ("hdf5", "arrow"):
            _minari_set(out, f"dict-{form}", form, named, force, in_dict)
            _minari_set(out, f"tuple-{form}", form, ordered, force, in_tuple)
        for name in ("dict-hdf5", "tuple-hdf5"):
            _repack(out / "minari" / name / "data" / "main_data.hdf5")
        _minari_set(out, "discrete-hdf5", "hdf5", box, four, as_is)
        _minari_set(out, "float16-hdf5", "hdf5", half, force, as_half)
        _minari_set(out, "t-states-parquet", "parquet", box, force, all_but_last)
    _minari_schema(out)


def _minari_set(out: Path, name: str, form: str, space: Any, acts: Any, states: Callable[[np.ndarray], Any]) -> None:
    import minari
    from gymnasium.spaces import Discrete
    from minari.data_collector import EpisodeBuffer

    buffers = []
    for part in episodes():
        acted: Any = part.choices if isinstance(acts, Discrete) else part.actions
        buffer = EpisodeBuffer(
            observations=states(part.observations),
            actions=acted,
            rewards=part.rewards.tolist(),
            terminations=part.terminated.tolist(),
            truncations=part.truncated.tolist(),
        )
        buffers.append(buffer)
    made = minari.create_dataset_from_buffers(
        f"{name}-v0",
        buffers,
        observation_space=space,
        action_space=acts,
        data_format=form,
        algorithm_name="none",
        author="valueformer",
        author_email="none",
        code_permalink="none",
        description="golden",
    )
    shutil.copytree(Path(made.storage.data_path).parent, fresh(out / "minari" / name))


def _repack(path: Path) -> None:
    """Copy a file into HDF5 1.10's layout, a quarter of the size: same groups, attributes, arrays and chunks."""
    import h5py

    packed = path.with_suffix(".packed")
    with h5py.File(path) as old, h5py.File(packed, "w", libver=("v110", "v110"), track_order=True) as new:

        def copy(name: str, item: Any) -> None:
            if isinstance(item, h5py.Dataset):
                new.create_dataset(name, data=item[()], chunks=item.chunks, maxshape=item.maxshape)
            else:
                new.create_group(name).attrs.update(item.attrs)

        old.visititems(copy)
    packed.replace(path)


def _minari_schema(out: Path) -> None:
    """Write t-states-hdf5 to the schema of box-hdf5 with h5py: T observations, arrays without chunks, no infos."""
    import h5py

    data = fresh(out / "minari" / "t-states-hdf5") / "data"
    data.mkdir(parents=True)
    said = json.loads((out / "minari" / "box-hdf5" / "data" / "metadata.json").read_text(encoding="utf-8"))
    (data / "metadata.json").write_text(json.dumps(said | {"dataset_id": "t-states-hdf5-v0"}), encoding="utf-8")
    with h5py.File(data / "main_data.hdf5", "w") as file:
        for part in episodes():
            group = file.create_group(f"episode_{part.number}")
            group.attrs.update({"id": part.number, "total_steps": len(part)})
            group["observations"] = part.observations[:-1]
            group["actions"], group["rewards"] = part.actions, part.rewards.astype(np.float64)
            group["terminations"], group["truncations"] = part.terminated, part.truncated


# -- d3rlpy ---------------------------------------------------------------------------------------------------------------------


def d3rlpy(out: Path) -> None:
    """Write version 2 files with the package's own ReplayBuffer.dump."""
    from d3rlpy.dataset import Episode as Recorded
    from d3rlpy.dataset import create_infinite_replay_buffer

    kinds = {
        "v2": lambda part: (part.observations[:-1], part.actions),
        "v2-tuple": lambda part: ((part.observations[:-1, :1], part.observations[:-1, 1:]), part.actions),
        "v2-discrete": lambda part: (part.observations[:-1], part.choices[:, None]),
    }
    for name, fields in kinds.items():
        parts = []
        for part in episodes():
            states, acts = fields(part)
            ended = bool(part.terminated[-1])
            parts.append(Recorded(observations=states, actions=acts, rewards=part.rewards[:, None], terminated=ended))
        buffer = create_infinite_replay_buffer(episodes=parts)
        with fresh(out / "d3rlpy" / f"{name}.h5").open("w+b") as file:
            buffer.dump(file)


# -- LeRobot --------------------------------------------------------------------------------------------------------------------


def _lerobot_flags(part: Episode, t: int) -> dict[str, Any]:
    done = bool(part.terminated[t] or part.truncated[t])
    return {"next.reward": part.rewards[t], "next.done": done, "next.truncated": bool(part.truncated[t])}


def _lerobot_features(*, rewarded: bool) -> dict[str, Any]:
    scalar = {"shape": (1,), "names": None}
    own = {
        "observation.state": {"dtype": "float32", "shape": (3,), "names": ["tag", "episode", "step"]},
        "action": {"dtype": "float32", "shape": (2,), "names": ["x", "y"]},
    }
    if not rewarded:
        return {**own, "score": {"dtype": "float32", **scalar}}
    flags = {name: {"dtype": "bool", **scalar} for name in ("next.done", "next.truncated")}
    return {**own, "next.reward": {"dtype": "float32", **scalar}, **flags}


def lerobot(out: Path) -> None:
    """Write version 3 folders with the package's own LeRobotDataset; a tiny limit of size makes several files."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    with tempfile.TemporaryDirectory() as cache:
        os.environ["HF_HOME"] = cache
        from lerobot.datasets.lerobot_dataset import LeRobotDataset

        for name, rewarded in (("v3", True), ("v3-no-reward", False)):
            root = fresh(out / "lerobot" / name)
            made = LeRobotDataset.create(
                repo_id=f"golden/{name}",
                fps=FPS,
                features=_lerobot_features(rewarded=rewarded),
                root=root,
                use_videos=False,
                metadata_buffer_size=100,
            )
            made.meta.update_chunk_settings(data_files_size_in_mb=0.008)
            for part in episodes():
                for t in range(len(part)):
                    scores = _lerobot_flags(part, t) if rewarded else {"score": part.rewards[t]}
                    frame = {"observation.state": part.observations[t], "action": part.actions[t], "task": TASK}
                    kind = {"next.done": bool, "next.truncated": bool}
                    made.add_frame(frame | {k: np.array([v], kind.get(k, np.float32)) for k, v in scores.items()})
                made.save_episode()
            made.finalize()


def lerobot_v2(out: Path) -> None:
    """Write a version 2.1 folder to its documented schema: a file per episode, five episodes in a chunk."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    root, size, parts = fresh(out / "lerobot" / "v2"), 5, episodes()
    (root / "meta").mkdir(parents=True)
    path = "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet"
    stored = {
        "timestamp": {"dtype": "float32", "shape": [1], "names": None},
        **{k: {"dtype": "int64", "shape": [1], "names": None} for k in ("frame_index", "episode_index", "index", "task_index")},
    }
    features = _lerobot_features(rewarded=True)
    features["observation.state"]["names"] = {"motors": features["observation.state"]["names"]}
    info = {
        "codebase_version": "v2.1",
        "robot_type": "golden",
        "total_episodes": len(parts),
        "total_frames": sum(LENGTHS),
        "total_tasks": 1,
        "total_videos": 0,
        "total_chunks": -(-len(parts) // size),
        "chunks_size": size,
        "fps": FPS,
        "splits": {"train": f"0:{len(parts)}"},
        "data_path": path,
        "video_path": None,
        "features": features | stored,
    }
    _write_lines(root / "meta" / "info.json", [json.dumps(info, indent=2)])
    _write_lines(root / "meta" / "tasks.jsonl", [json.dumps({"task_index": 0, "task": TASK})])
    lines = [json.dumps({"episode_index": p.number, "tasks": [TASK], "length": len(p)}) for p in parts]
    _write_lines(root / "meta" / "episodes.jsonl", lines)
    index = 0
    for part in parts:
        n, file = len(part), root / path.format(episode_chunk=part.number // size, episode_index=part.number)
        file.parent.mkdir(parents=True, exist_ok=True)
        flags = [_lerobot_flags(part, t) for t in range(n)]
        table = {
            "observation.state": pa.array(part.observations[:-1].tolist(), pa.list_(pa.float32(), 3)),
            "action": pa.array(part.actions.tolist(), pa.list_(pa.float32(), 2)),
            "next.reward": pa.array(part.rewards, pa.float32()),
            "next.done": pa.array([flag["next.done"] for flag in flags]),
            "next.truncated": pa.array([flag["next.truncated"] for flag in flags]),
            "timestamp": pa.array(np.arange(n) / FPS, pa.float32()),
            "frame_index": pa.array(range(n), pa.int64()),
            "episode_index": pa.array([part.number] * n, pa.int64()),
            "index": pa.array(range(index, index + n), pa.int64()),
            "task_index": pa.array([0] * n, pa.int64()),
        }
        pq.write_table(pa.table(table), file)
        index += n


def _write_lines(path: Path, lines: Sequence[str]) -> None:
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


# -- RLDS -----------------------------------------------------------------------------------------------------------------------


def _steps(part: Episode) -> list[dict[str, Any]]:
    """Return an episode as RLDS steps: T + 1 where it ended, the last one holding only an observation; else T."""
    ended = part.end != "open"
    n = len(part)
    return [
        {
            "is_first": t == 0,
            "is_last": t == n,
            "is_terminal": t == n and bool(part.terminated[-1]),
            "observation": part.observations[t],
            "action": part.actions[t] if t < n else np.full_like(part.actions[0], GARBAGE),
            "reward": part.rewards[t] if t < n else part.rewards.dtype.type(GARBAGE),
            "discount": part.discounts[t] if t < n else part.rewards.dtype.type(0),
        }
        for t in range(n + ended)
    ]


def rlds_records(out: Path) -> None:
    """Write TFRecords with TensorFlow Datasets; a thirteenth episode is marked invalid."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import tensorflow_datasets as tfds

    numbers = {n: tfds.features.Tensor(shape=(n,), dtype=np.float32) for n in (1, 2)}
    scalar, flag = np.float32, np.bool_
    step = {
        "is_first": flag,
        "is_last": flag,
        "is_terminal": flag,
        "observation": {"a": numbers[1], "b": numbers[2]},
        "action": numbers[2],
        "reward": scalar,
        "discount": scalar,
    }
    features = tfds.features.FeaturesDict({"steps": tfds.features.Dataset(step), "invalid": flag})
    records = [{"steps": [_in_parts(row) for row in _steps(part)], "invalid": False} for part in episodes()]
    garbage = {"reward": np.float32(GARBAGE), "observation": np.full(3, GARBAGE, np.float32)}
    records.append({"steps": [_in_parts(row | garbage) for row in _steps(episodes()[0])], "invalid": True})
    with tempfile.TemporaryDirectory() as root:
        made = tfds.dataset_builders.store_as_tfds_dataset(
            name="golden",
            version="1.0.0",
            features=features,
            split_datasets={"train": list(enumerate(records))},
            data_dir=root,
            description="golden",
            disable_shuffling=True,
        )
        shutil.copytree(made.data_dir, fresh(out / "rlds" / "records"))


def _in_parts(row: dict[str, Any]) -> dict[str, Any]:
    return row | {"observation": {"a": row["observation"][:1], "b": row["observation"][1:]}}


def rlds_tables(out: Path) -> None:
    """Write the step table, with the observation as a struct and as one list."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    for name, dtype, real in (("steps", np.float32, pa.float32()), ("flat", np.float64, pa.float64())):
        rows = [row for part in episodes(dtype) for row in _steps(part)]
        several = pa.list_(real)
        whole = name == "flat"
        columns = {k: pa.array([row[k] for row in rows], pa.bool_()) for k in ("is_first", "is_last", "is_terminal")}
        seen = [row["observation"] if whole else _in_parts(row)["observation"] for row in rows]
        columns["observation"] = pa.array(seen, several if whole else pa.struct({"a": several, "b": several}))
        columns["action"] = pa.array([row["action"] for row in rows], several)
        columns |= {k: pa.array([row[k] for row in rows], real) for k in ("reward", "discount")}
        pq.write_table(pa.table(columns), fresh(out / "rlds" / f"{name}.parquet"))


# -- Rollouts of Gymnasium's vector environments --------------------------------------------------------------------------------


def rollouts(out: Path) -> None:
    """Record two sub-environments that reset themselves: the first plays episodes 0 to 5, the second 6 to 11.

    The number of time steps is the largest at which neither needs a further episode.
    """
    import gymnasium as gym
    from gymnasium.vector import AutoresetMode, SyncVectorEnv

    every, half = episodes(), len(LENGTHS) // 2

    class Golden(gym.Env):
        observation_space = gym.spaces.Box(-np.inf, np.inf, (3,), np.float32)
        action_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)

        def __init__(self, index: int) -> None:
            self.episode, self.time = half * index - 1, 0

        def _state(self) -> np.ndarray:
            return np.array(state(self.episode, self.time), np.float32)

        def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
            super().reset(seed=seed)
            self.episode, self.time = self.episode + 1, 0
            return self._state(), {}

        def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict]:
            part, t = every[self.episode], self.time
            self.time += 1
            return self._state(), reward(self.episode, t), bool(part.terminated[t]), bool(part.truncated[t]), {}

    def record(mode: Any, steps: int) -> dict[str, Any]:
        envs = SyncVectorEnv([lambda i=i: Golden(i) for i in range(2)], autoreset_mode=mode)
        seen = [envs.reset()[0]]
        names = ("actions", "rewards", "terminated", "truncated", "final_observations")
        log: dict[str, list[Any]] = {name: [] for name in names}
        for _ in range(steps):
            acts = np.array([action(int(e), int(t)) for _, e, t in seen[-1]], np.float32)
            following, rewards, terminated, truncated, infos = envs.step(acts)
            final = np.full_like(following, np.nan)
            for i in np.flatnonzero(infos.get("_final_obs", [])):
                final[i] = infos["final_obs"][i]
            seen.append(following)
            for name, value in zip(names, (acts, rewards, terminated, truncated, final), strict=True):
                log[name].append(value.copy())
        return {"observations": np.stack(seen), **{name: np.stack(values) for name, values in log.items()}}

    waiting = half - 1  # resets of the first environment, each a step of its own
    for name, mode in (("next-step", AutoresetMode.NEXT_STEP), ("same-step", AutoresetMode.SAME_STEP)):
        first = sum(LENGTHS[:half])
        arrays = record(mode, first + waiting if name == "next-step" else first - 1)
        final = arrays.pop("final_observations")
        np.savez(fresh(out / "rollouts" / f"{name}.npz"), **arrays)
        if name == "same-step":
            np.savez(fresh(out / "rollouts" / "same-step-final.npz"), **arrays, final_observations=final)


# -- Formats written to their documented schema ---------------------------------------------------------------------------------


def schemas(out: Path) -> None:
    """Write D4RL, d3rlpy version 1, LeRobot version 2, RLDS step tables, tables of steps, and NPZ."""
    for write in (d4rl, d3rlpy_v1, lerobot_v2, rlds_tables, tables, npz):
        write(out)


def d4rl(out: Path) -> None:
    """Write D4RL's flat HDF5 in its variants."""
    parts = episodes()
    base = {
        "observations": before(parts),
        "actions": flat(parts, "actions"),
        "rewards": flat(parts, "rewards"),
        "terminals": flat(parts, "terminated"),
    }
    ends = {"timeouts": flat(parts, "truncated")}
    following = {"next_observations": after(parts)}
    extras = {"infos/qpos": before(parts) + 0.5, "metadata/algorithm": "golden"}
    _hdf5(out / "d4rl" / "plain.hdf5", base | ends)
    _hdf5(out / "d4rl" / "next.hdf5", base | ends | following | extras)
    _hdf5(out / "d4rl" / "no-timeouts.hdf5", base)
    _hdf5(out / "d4rl" / "next-no-timeouts.hdf5", base | following)
    column = {name: (base | ends)[name].reshape(-1, 1) for name in ("rewards", "terminals", "timeouts")}
    column["terminals"] = column["terminals"].astype(np.uint8)
    _hdf5(out / "d4rl" / "column.hdf5", base | column | {"observations": before(episodes(np.float16))})
    chunks = [parts[:2], *([part] for part in parts[2:])]
    _hdf5(
        out / "d4rl" / "virtual.hdf5",
        {
            f"virtual/{k}/{name}": value
            for k, chunk in enumerate(chunks)
            for name, value in {
                "observations": before(chunk),
                "actions": flat(chunk, "actions"),
                "rewards": flat(chunk, "rewards"),
                "terminals": flat(chunk, "terminated"),
                "timeouts": flat(chunk, "truncated"),
            }.items()
        },
    )
    reached = {"terminals": np.zeros_like(base["terminals"]), "timeouts": base["terminals"] | ends["timeouts"]}
    _hdf5(out / "d4rl" / "maze2d.hdf5", base | reached | {"infos/goal": np.full((len(base["rewards"]), 2), 7, np.float32)})


def d3rlpy_v1(out: Path) -> None:
    """Write d3rlpy's version 1 file, with and without episode_terminals."""
    parts = episodes()
    arrays = {
        "observations": before(parts),
        "actions": flat(parts, "actions"),
        "rewards": flat(parts, "rewards")[:, None],
        "terminals": flat(parts, "terminated").astype(np.float32),
        "discrete_action": False,
        "version": "1.0",
    }
    ends = (flat(parts, "terminated") | flat(parts, "truncated")).astype(np.float32)
    _hdf5(out / "d3rlpy" / "v1.h5", arrays | {"episode_terminals": ends})
    _hdf5(out / "d3rlpy" / "v1-no-episode-terminals.h5", arrays)


def _hdf5(path: Path, arrays: dict[str, Any]) -> None:
    import h5py

    with h5py.File(fresh(path), "w") as file:
        for name, value in arrays.items():
            file.create_dataset(name, data=value)


def tables(out: Path) -> None:
    """Write tables of steps: complete ones in three formats, one with other names in random order, an interleaved one."""
    import pyarrow as pa
    import pyarrow.csv
    import pyarrow.feather
    import pyarrow.parquet as pq

    parts = episodes()
    ids, steps = np.repeat(np.arange(len(parts)), LENGTHS), np.concatenate([np.arange(n) for n in LENGTHS])
    states, following, acts = before(parts), after(parts), flat(parts, "actions")
    scalars = {"reward": flat(parts, "rewards"), "terminated": flat(parts, "terminated"), "truncated": flat(parts, "truncated")}
    seen = {f"obs_{axis}": states[:, i] for i, axis in enumerate("xyz")}
    moved = {f"next_obs_{axis}": following[:, i] for i, axis in enumerate("xyz")}
    done = {f"action_{i}": acts[:, i] for i in range(2)}
    full = pa.table(seen | moved | done | scalars | {"episode_id": ids, "step": steps})
    folder = out / "tables"
    pq.write_table(full, fresh(folder / "steps.parquet"))
    pyarrow.feather.write_feather(full, str(fresh(folder / "steps.arrow")), compression="uncompressed")
    pyarrow.csv.write_csv(full, fresh(folder / "steps.csv"))

    custom = pa.table(
        {f"joint_{i}": states[:, i] for i in range(3)}
        | {f"torque_{i}": acts[:, i] for i in range(2)}
        | {"r": scalars["reward"], "ended": scalars["terminated"], "timeout": scalars["truncated"]}
        | {"run": [f"run-{e}" for e in ids], "t": steps}
    )
    pq.write_table(custom.take(np.random.default_rng(0).permutation(len(ids))), fresh(folder / "custom.parquet"))

    columns = seen | done | {"reward": scalars["reward"]}
    rows = [
        [*(column[i].item() for column in columns.values()), *(int(scalars[k][i]) for k in ("terminated", "truncated")),
         f"ep-{ids[i]}", steps[i]]
        for i in np.lexsort((ids, steps))
    ]  # fmt: skip
    with fresh(folder / "interleaved.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([*columns, "terminated", "truncated", "episode_id", "step"])
        writer.writerows(rows)


def npz(out: Path) -> None:
    """Write archives under the field names of Transitions, in single and half precision."""
    for name, dtype in (("arrays", np.float32), ("float16", np.float16)):
        parts = episodes(dtype)
        np.savez(
            fresh(out / "npz" / f"{name}.npz"),
            observations=before(parts),
            next_observations=after(parts),
            rewards=flat(parts, "rewards")[:, None],
            terminated=flat(parts, "terminated"),
            truncated=flat(parts, "truncated"),
            actions=flat(parts, "actions"),
            episode_ids=np.repeat(np.arange(len(parts)), LENGTHS),
            steps=np.concatenate([np.arange(n) for n in LENGTHS]),
        )


WRITERS: dict[str, Callable[[Path], None]] = {
    "minari": minari,
    "d3rlpy": d3rlpy,
    "lerobot": lerobot,
    "rlds-records": rlds_records,
    "rollouts": rollouts,
    "schemas": schemas,
}

if __name__ == "__main__":
    main()
