"""Rows that once were shifted, joined, or read as what they are not; each test failed before its fault was mended."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet
import pytest

import valueformer as vf
from tests.test_golden import GOLDEN, MEMORY, tensordict
from valueformer.sources.alignment import LOST


def column(*values: float) -> np.ndarray:
    """Return one environment's numbers as (T, 1, 1)."""
    return np.array(values, float)[:, None, None]


def joined(source: Any, size: int) -> vf.Transitions:
    return vf.concatenate(vf.load(source, stream=True, block_size=size))


def test_a_rollout_never_takes_a_time_limit_for_a_terminal() -> None:
    done = np.zeros((6, 2))
    done[[2, 5]] = 1
    rollout = {"observations": np.arange(14.0).reshape(7, 2, 1), "rewards": np.ones((6, 2)), "done": done}
    with pytest.raises(vf.InputError, match="max_episode_steps: expected an option that the format rollout understands"):
        vf.load(rollout, done_column="done", max_episode_steps=3, autoreset="same-step")
    data = vf.load(rollout | {"limit": done}, done_column="done", truncated_column="limit", autoreset="same-step")
    assert not data.terminated.any()


def test_a_reset_step_beside_stored_successors_is_seen() -> None:
    ends = np.zeros((6, 1))
    ends[2] = 1
    flags = {"rewards": np.ones((6, 1)), "terminated": ends, "truncated": 0 * ends}
    resets = flags | {"observations": column(0, 1, 2, 3, 10, 11), "next_observations": column(1, 2, 3, 10, 11, 12)}
    with pytest.raises(vf.InputError, match=r"autoreset: .* begins where the episode ended"):
        vf.load(resets)
    data = vf.load(resets, autoreset="next-step")
    assert data.observations[:, 0].tolist() == [0, 1, 2, 10, 11]
    assert len(vf.load(resets, autoreset="same-step")) == 6
    plain = flags | {"observations": column(0, 1, 2, 9, 10, 11), "next_observations": column(1, 2, 3, 10, 11, 12)}
    assert len(vf.load(plain)) == 6


def test_lerobot_done_alone_stays_ambiguous(tmp_path: Path) -> None:
    frames = {"observation.state": [[0.0], [1.0], [2.0]], "action": [[0.0]] * 3, "next.reward": [1.0] * 3}
    frames |= {"next.done": [False, False, True], "episode_index": [0] * 3, "frame_index": [0, 1, 2]}
    pyarrow.parquet.write_table(pa.table(frames), tmp_path / "file.parquet")
    with pytest.raises(vf.InputError, match="alone does not say"):
        vf.load(tmp_path / "file.parquet")
    with pytest.raises(vf.InputError, match="a way to tell time limits"):
        vf.load(tmp_path / "file.parquet", done_column="next.done")
    assert len(vf.load(tmp_path / "file.parquet", terminated_column="next.done")) == 3


def test_a_lerobot_file_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "lerobot" / "v3", tmp_path / "set")
    file = next(iter((tmp_path / "set").glob("data/**/*.parquet")))
    shutil.copy(file, file.with_name("copy of it.parquet"))
    with pytest.raises(vf.InputError, match="is a file there twice"):
        vf.load(tmp_path / "set")


def test_successors_belong_to_the_chosen_observations() -> None:
    rows = {"observations": np.zeros((3, 1)), "next_observations": np.full((3, 1), 7.0), "features": np.arange(3.0)[:, None]}
    rows |= {"rewards": np.ones(3), "terminated": [0, 0, 1], "truncated": np.zeros(3)}
    with pytest.raises(vf.InputError, match="successors of obs_columns, got those of other observations"):
        vf.load(rows, obs_columns="features")
    frame = pd.DataFrame(
        {"pos_x": [0.0, 1, 2], "pos_y": [10.0, 11, 12], "next_pos_y": [11.0, 12, 13], "next_pos_x": [1.0, 2, 3]}
    )
    frame = frame.assign(reward=1.0, terminated=[0, 0, 1], truncated=0)
    data = vf.load(frame, obs_columns="pos_*", next_obs_columns="next_pos_*")
    assert data.next_observations.tolist() == [[1, 11], [2, 12], [3, 13]]
    with pytest.raises(vf.InputError, match="the same names as obs_"):
        vf.load(
            frame.rename(columns={"next_pos_x": "after_x", "next_pos_y": "after_y"}),
            obs_columns="pos_*",
            next_obs_columns="after_*",
        )
    named = vf.load(frame, obs_columns="pos_y,pos_x", next_obs_columns="next_pos_y,next_pos_x")
    assert named.next_observations[0].tolist() == [11, 1]


def test_part_files_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    folder = tmp_path / "set" / "data" / "0"
    folder.mkdir(parents=True)
    for part in range(12):
        rows = np.arange(2 * part, 2 * part + 2)
        table = {"observations": [[float(i)] for i in rows], "actions": [[0.0]] * 2, "rewards": rows.astype(float)}
        flags = {"terminations": [False] * 2, "truncations": [bool(i == 22) for i in rows]}
        pyarrow.parquet.write_table(pa.table(table | flags), folder / f"part-{part}.parquet")
    data = vf.load(tmp_path / "set")
    assert data.observations[:, 0].tolist() == list(range(23))
    assert data.next_observations[:, 0].tolist() == list(range(1, 24))


def test_a_tensordict_has_one_reward_per_entry_of_its_batch() -> None:
    import torch

    class Batch(dict[str, Any]):
        batch_size = (2,)

    after = Batch(
        observation=torch.ones(2, 3, 1), reward=torch.ones(2, 3, 1), terminated=torch.zeros(2, 3, 1, dtype=torch.bool)
    )
    with pytest.raises(vf.InputError, match="set batch_size to batch and time"):
        vf.load(Batch(observation=torch.zeros(2, 3, 1), next=after))
    two = tensordict()
    two["next"]["reward"] = two["next"]["reward"].repeat(1, 2)
    with pytest.raises(vf.InputError, match="set batch_size to batch and time"):
        vf.load(two)


@pytest.mark.parametrize("size", [None, 1, 2, 3, 100])
def test_rows_after_an_end_are_refused_whatever_the_block(size: int | None) -> None:
    frames = [
        pd.DataFrame({"obs_0": [0.0, 1, 2, 3], "reward": 1.0, "terminated": [1, 0, 0, 1], "episode_id": 0}),
        pd.DataFrame({"obs_0": np.arange(6.0), "reward": 1.0, "terminated": 0, "truncated": [0, 1, 0, 0, 1, 0], "episode_id": [0] * 3 + [1] * 3}),
    ]  # fmt: skip
    for frame in frames:
        load = partial(vf.load, frame) if size is None else partial(joined, frame, size)
        with pytest.raises(vf.InputError, match="only the last step of episode 0 to end it"):
            load()


def test_ids_in_text_files_are_taken_as_they_stand(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("obs_0,reward,terminated,episode_id\n0,1,0,01\n1,1,0,01\n2,1,0,1\n3,1,1,1\n")
    data = vf.load(tmp_path / "a.csv")
    assert data.episode_ids.tolist() == ["01", "1", "1"]
    assert data.next_observations[0].tolist() == [1]
    (tmp_path / "b.csv").write_text("obs_0,reward,terminated,episode\n0,1,0,7\n1,1,1,7\n2,1,0,8\n3,1,1,8\n")
    assert vf.load(tmp_path / "b.csv").episode_ids.tolist() == [7, 7, 8, 8]


def test_masked_numbers_are_missing() -> None:
    rewards = np.ma.masked_array([1.0, 2, 3], mask=[False, True, False])
    with pytest.raises(vf.InputError, match="rewards: expected finite numbers, got nan at row 1"):
        vf.load({"observations": np.arange(3.0), "rewards": rewards, "terminated": [0, 0, 1]})


@pytest.mark.parametrize("name", ["episode_starts", "is_first"])
def test_starts_are_boundaries(name: str) -> None:
    rows = {"observations": np.arange(4.0), "rewards": np.ones(4), "terminated": [0, 0, 0, 1], "truncated": np.zeros(4)}
    data = vf.load(rows | {name: [1, 0, 1, 0]})
    assert data.observations[:, 0].tolist() == [0, 2, 3]
    assert data.dropped == {LOST: 1}


def test_a_soft_link_does_not_lead_into_another_file(tmp_path: Path) -> None:
    shutil.copy(GOLDEN / "minari" / "box-hdf5" / "data" / "main_data.hdf5", tmp_path / "other.h5")
    with h5py.File(tmp_path / "log.h5", "w") as file:
        file["elsewhere"] = h5py.ExternalLink(str(tmp_path / "other.h5"), "/")
        file["episode_0"] = h5py.SoftLink("/elsewhere/episode_0")
    with pytest.raises(vf.InputError, match="expected data inside the file"):
        vf.load(tmp_path / "log.h5")


def test_two_names_of_one_episode_are_refused(tmp_path: Path) -> None:
    shutil.copy(GOLDEN / "minari" / "box-hdf5" / "data" / "main_data.hdf5", tmp_path / "log.h5")
    with h5py.File(tmp_path / "log.h5", "a") as file:
        file.copy("episode_0", "episode_00")
    with pytest.raises(vf.InputError, match="each episode number once"):
        vf.load(tmp_path / "log.h5")


def test_a_broken_link_that_nobody_reads_does_no_harm(tmp_path: Path) -> None:
    shutil.copy(GOLDEN / "d4rl" / "next.hdf5", tmp_path / "log.h5")
    with h5py.File(tmp_path / "log.h5", "a") as file:
        file["infos/lost"] = h5py.SoftLink("/nowhere")
    assert len(vf.load(tmp_path / "log.h5")) == 40


def test_counts_are_the_same_for_every_block_size() -> None:
    rows = {
        "observations": np.arange(9.0),
        "rewards": np.ones(9),
        "terminated": np.zeros(9),
        "steps": [0, 1, 2, 0, 1, 0, 1, 2, 0],
    }
    whole = vf.load(rows, max_episode_steps=3)
    assert whole.assumed == {
        "an end that no flag marks, set by max_episode_steps": 2,
        "an episode start that only the step numbers show": 1,
    }
    for size in (1, 2, 3, 4):
        blocks = list(vf.load(rows, max_episode_steps=3, stream=True, block_size=size))
        for counts in ("assumed", "dropped"):
            names = {name for block in blocks for name in getattr(block, counts)}
            assert {name: sum(getattr(block, counts).get(name, 0) for block in blocks) for name in names} == dict(
                getattr(whole, counts)
            )
    assert dict(vf.concatenate(whole.episodes()).dropped) == {}  # what reading left out is no part's


def test_flags_in_words() -> None:
    frame = pd.DataFrame({"obs_0": [0.0, 1.0], "reward": 1.0, "terminated": ["False", "TRUE"], "truncated": ["0", "0"]})
    assert vf.load(frame).terminated.tolist() == [False, True]


def test_list_columns_count_towards_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VALUEFORMER_MAX_BYTES", "10000000")
    table = pa.table({"obs": [np.zeros(2_000_000)] * 2, "reward": np.zeros(2), "terminated": np.ones(2, bool)})
    pyarrow.parquet.write_table(table, tmp_path / "a", compression="zstd")
    pyarrow.feather.write_feather(table, tmp_path / "b", compression="zstd")
    for name in ("a", "b"):
        with pytest.raises(vf.InputError, match="GiB when unpacked"):
            vf.load(tmp_path / name)


ODD: dict[str, tuple[Any, str]] = {
    "set": ({"observations": [0.0], "rewards": {1.0}, "terminated": [1]}, "a number per row, got set"),
    "generator": ({"observations": [0.0], "rewards": (x for x in [1.0]), "terminated": [1]}, "a number per row, got generator"),
    "scalar": ({"observations": [0.0], "rewards": 1.0, "terminated": [1]}, "a number per row, got float"),
    "rollout with flat steps": (
        {"observations": np.zeros((3, 2, 1)), "rewards": np.zeros((3, 2)), "terminated": np.zeros((3, 2)), "steps": [0, 1, 2]},
        "in a rollout, got 'steps'",
    ),
    "huge": (pd.DataFrame({"obs_0": [10**400], "reward": [1], "terminated": [1]}), "an object that cannot be read|numbers"),
    "columns that are none": (type("Odd", (), {"columns": 5})(), "an object that cannot be read as one"),
    "column names that are none": (type("Odd", (), {"column_names": 1})(), "an object that cannot be read as one"),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_objects_are_refused_in_one_line(name: str) -> None:
    source, message = ODD[name]
    for load in (vf.load, lambda source: list(vf.load(source, stream=True))):
        with pytest.raises(vf.InputError, match=message) as caught:
            load(source)
        assert "\n" not in str(caught.value)


def test_names_of_features_survive_where_they_say_something(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("obs_0,obs_1,reward,terminated\n0,1,1,0\n1,2,1,1\n")
    assert vf.load(tmp_path / "a.csv").obs_names is None  # numbers say nothing
    vf.export(vf.load(tmp_path / "a.csv"), "minari", tmp_path / "set")  # without actions
    assert vf.load(tmp_path / "set").actions is None
    assert json.loads((tmp_path / "set" / "data" / "metadata.json").read_text())["total_steps"] == 2


def test_a_rollout_has_no_ids_of_its_own() -> None:
    rollout = {"observations": np.arange(12.0).reshape(6, 2, 1), "rewards": np.ones((6, 2)), "terminated": np.zeros((6, 2))}
    with pytest.raises(vf.InputError, match="episodes that follow from the flags, in a rollout, got 'episode_ids'"):
        vf.load(rollout | {"episode_ids": np.repeat([[0], [1]], 3, axis=0) * np.ones((6, 2))})


def test_reset_steps_go_even_where_final_observations_are_kept() -> None:
    ends = np.zeros((5, 1))
    ends[2] = 1
    rows = {"observations": column(0, 1, 2, 3, 10), "rewards": np.ones((5, 1)), "terminated": 0 * ends, "truncated": ends}
    data = vf.load(rows | {"final_observations": column(0, 0, 3, 0, 0)}, autoreset="next-step")
    assert data.observations[:, 0].tolist() == [0, 1, 2]
    assert data.next_observations[:, 0].tolist() == [1, 2, 3]


def test_a_log_does_not_change_with_the_table_it_came_from() -> None:
    frame = pd.DataFrame({"obs_0": np.arange(3.0), "obs_1": np.arange(3.0), "reward": np.ones(3), "terminated": [0, 0, 1]})
    data = vf.load(frame)
    frame.loc[0, "reward"] = 99.0
    frame.iloc[0, 0] = 99.0
    assert data.rewards[0] == 1
    assert data.observations[0, 0] == 0
    base = np.ones(3)
    view = base.view()
    view.flags.writeable = False
    data = vf.Transitions(observations=base, next_observations=base, rewards=view, terminated=np.zeros(3))
    base[0] = 5
    assert data.rewards[0] == data.observations[0, 0] == 1


def test_pieces_of_an_episode_are_reported() -> None:
    rows = {"observations": np.array([0.0, 1, 10, 11, 20, 21]), "rewards": np.ones(6), "terminated": np.zeros(6)}
    data = vf.load(rows | {"episode_ids": [0, 0, 1, 1, 0, 0]})
    assert [reason for reason in data.assumed if "in order of appearance" in reason]
    assert not vf.load(rows | {"episode_ids": [0, 0, 1, 1, 0, 0], "steps": [0, 1, 0, 1, 2, 3]}).assumed


def test_frames_that_are_lacking_are_counted_in_streams_of_any_size(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "lerobot" / "v3", tmp_path / "set")
    info = tmp_path / "set" / "meta" / "info.json"
    document = json.loads(info.read_text())
    info.write_text(json.dumps(document | {"total_frames": document["total_frames"] + 5}))
    for size in (1, 2, 3, 1000):
        blocks = vf.load(tmp_path / "set", stream=True, block_size=size)
        assert sum(sum(block.assumed.values()) for block in blocks) == 5


def test_ids_are_text_or_numbers() -> None:
    rows = {"observations": np.arange(4.0), "rewards": np.ones(4), "terminated": np.zeros(4)}
    data = vf.load(rows | {"episode_ids": np.array([b"a", b"a", b"b", b"b"])})
    assert data.episode_ids.tolist() == ["a", "b"]
    with pytest.raises(vf.InputError, match="whole numbers or text, got both"):
        vf.load(rows | {"episode_ids": np.array([1, "1", 1, 1], dtype=object)})


def test_exports_keep_the_order_of_features_and_refuse_what_they_cannot_hold(tmp_path: Path) -> None:
    data = vf.Transitions(
        observations=[[1.0, 2.0], [3.0, 4.0]], next_observations=[[3.0, 4.0], [5.0, 6.0]], rewards=[0.0, 1.0],
        terminated=[False, True], obs_names=("j_2", "j_1"), steps=[5, 6],
    )  # fmt: skip
    vf.export(data, "parquet", tmp_path / "log")
    back = vf.load(tmp_path / "log")
    assert (back.obs_names, back.observations.tolist()) == (data.obs_names, data.observations.tolist())
    with pytest.raises(vf.InputError, match=r"steps 0, 1, 2, \.\."):
        vf.export(data, "minari", tmp_path / "set")
    with pytest.raises(vf.InputError, match="a name of its own for each feature"):
        data.replace(obs_names=("a", "a"))


def test_the_limit_counts_only_what_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VALUEFORMER_MAX_BYTES", str(2**20))
    pictures = [np.random.default_rng(i).bytes(300_000) for i in range(10)]
    table = pa.table({"obs": np.arange(10.0), "obs_picture": pictures, "reward": np.ones(10), "terminated": np.arange(10) == 9})
    pyarrow.parquet.write_table(table, tmp_path / "log")
    assert len(vf.load(tmp_path / "log", obs_columns="obs")) == 10
    assert sum(map(len, vf.load(tmp_path / "log", obs_columns="obs", stream=True, block_size=4))) == 10


def test_a_stream_of_text_meets_decimals_late(tmp_path: Path) -> None:
    rows = ["0,1,0,1"] * 300_000 + ["0.5,0.5,0,0.5"]
    (tmp_path / "log.csv").write_text("obs_0,reward,terminated,discount\n" + "\n".join(rows) + "\n")
    last = list(vf.load(tmp_path / "log.csv", stream=True))[-1]
    assert last.next_observations[-1, 0] == 0.5


def test_shuffled_rows_without_their_steps_are_noticed() -> None:
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(
        {"obs_0": np.arange(100.0), "reward": 1.0, "run": np.repeat(np.arange(10), 10), "k": np.tile(np.arange(10), 10)}
    )
    frame = frame.assign(terminated=0).iloc[rng.permutation(100)]
    with pytest.raises(vf.InputError, match="name episode_column and step_column"):
        vf.load(frame, step_column="k")
    data = vf.load(frame, step_column="k", episode_column="run")
    np.testing.assert_array_equal(data.next_observations, data.observations + 1)
    ended = frame.assign(terminated=frame.k == 9)
    with pytest.raises(vf.InputError, match="shuffled rows need a step_column"):
        vf.load(ended, episode_column="run")
    timed = vf.load(frame.assign(seconds=frame.k * 0.02), step_column="seconds", episode_column="run")  # a clock orders as well
    assert timed.observations.tobytes() == data.observations.tobytes()
    assert timed.steps.tolist() == data.steps.tolist()
    assert sum(timed.assumed.values()) == 100


def test_two_flags_that_explain_each_other() -> None:
    rows = {"observations": np.arange(4.0), "rewards": np.ones(4)}
    data = vf.load(rows | {"is_terminal": [0, 1, 0, 0], "timeout": [0, 0, 0, 1]})
    assert data.terminated.tolist() == [False, True, False]
    assert data.truncated.tolist() == [False, False, True]
    with pytest.raises(vf.InputError, match="alone does not say"):
        vf.load(rows | {"done": [0, 1, 0, 1], "timeout": [0, 0, 0, 1]})


@pytest.mark.parametrize("name", ["arrays", "tensordict", "polars with lists", "d3rlpy buffer"])
def test_logs_in_memory_stream_as_they_load(name: str) -> None:
    make, _ = MEMORY[name]
    whole = vf.load(make())
    blocks = list(vf.load(make(), stream=True, block_size=7))
    assert max(map(len, blocks)) <= 7
    for field in ("observations", "next_observations", "rewards", "truncated", "steps", "episode_ids"):
        np.testing.assert_array_equal(np.concatenate([getattr(block, field) for block in blocks]), getattr(whole, field))
