"""One contract that every source inherits: each transition carries a tag, so alignment is asserted on every row."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
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
from valueformer.sources import load_observations, samples

# Twelve episodes of unequal length, one of a single step, one that is terminated and truncated at once, an unflagged tail.
LENGTHS = (3, 1, 5, 2, 4, 3, 2, 6, 2, 3, 4, 5)
ENDS = ("term", "term", "trunc", "both", "term", "trunc", "term", "term", "trunc", "term", "term", "open")
N = sum(LENGTHS)


def state(episode: int, step: int) -> list[float]:
    """Return an observation that says which it is."""
    return [100.0 * episode + step, float(episode), float(step)]


def steps() -> list[dict]:
    rows = []
    for e, (length, end) in enumerate(zip(LENGTHS, ENDS, strict=True)):
        for t in range(length):
            last = t == length - 1
            rows.append(
                {
                    "obs": state(e, t),
                    "next": state(e, t + 1),
                    "action": [float(e), float(-t)],
                    "reward": 1000.0 * e + t,
                    "terminated": last and end in ("term", "both"),
                    "truncated": last and end in ("trunc", "both"),
                    "episode": e,
                    "step": t,
                }
            )
    return rows


def column(name: str) -> np.ndarray:
    return np.array([row[name] for row in steps()])


def arrays(successors: bool = True) -> dict[str, Any]:
    out: dict[str, Any] = {
        "observations": column("obs").astype(np.float32),
        "rewards": column("reward"),
        "terminated": column("terminated"),
        "truncated": column("truncated"),
        "actions": column("action"),
        "episode_ids": column("episode"),
        "steps": column("step"),
    }
    return out | ({"next_observations": column("next").astype(np.float32)} if successors else {})


def table(successors: bool = True) -> dict[str, np.ndarray]:
    out = {f"obs_{i}": column("obs")[:, i].astype(np.float32) for i in range(3)}
    if successors:
        out |= {f"next_obs_{i}": column("next")[:, i].astype(np.float32) for i in range(3)}
    out |= {f"action_{i}": column("action")[:, i] for i in range(2)}
    names = {"reward": "reward", "terminated": "terminated", "truncated": "truncated", "episode_id": "episode", "step": "step"}
    return out | {name: column(source) for name, source in names.items()}


def npz(path: Path, successors: bool) -> Path:
    np.savez(path / "log.npz", **arrays(successors))
    return path / "log.npz"


def npz_column_rewards(path: Path, successors: bool) -> Path:
    changed = arrays(successors)
    changed["rewards"] = changed["rewards"][:, None]
    np.savez_compressed(path / "log.bin", **changed)  # content decides, not the name
    return path / "log.bin.npz"


def npz_shuffled(path: Path, successors: bool) -> Path:
    order = np.random.default_rng(0).permutation(N)
    np.savez(path / "log.npz", **{name: value[order] for name, value in arrays(successors).items()})
    return path / "log.npz"


def mapping(path: Path, successors: bool) -> dict[str, np.ndarray]:
    return arrays(successors)


def csv(path: Path, successors: bool) -> Path:
    pd.DataFrame(table(successors)).to_csv(path / "log.csv", index=False)
    return path / "log.csv"


def csv_semicolons_shuffled(path: Path, successors: bool) -> Path:
    frame = pd.DataFrame(table(successors)).sample(frac=1.0, random_state=0)
    frame.to_csv(path / "log.txt", index=False, sep=";", encoding="utf-8-sig", lineterminator="\r\n")
    return path / "log.txt"


def csv_string_ids(path: Path, successors: bool) -> Path:
    frame = pd.DataFrame(table(successors))
    frame["episode_id"] = [f"run {e:x}" for e in frame["episode_id"]]
    frame.to_csv(path / "log.csv", index=False)
    return path / "log.csv"


def csv_interleaved(path: Path, successors: bool) -> Path:
    pd.DataFrame(table(successors)).sort_values(["step", "episode_id"]).to_csv(path / "log.csv", index=False)
    return path / "log.csv"


def parquet(path: Path, successors: bool) -> Path:
    pd.DataFrame(table(successors)).to_parquet(path / "log.parquet")
    return path / "log.parquet"


def parquet_named_list_columns(path: Path, successors: bool) -> Path:
    out: dict = {"obs": pa.array(column("obs").tolist(), pa.list_(pa.float32(), 3)), "reward": column("reward")}
    if successors:
        out["next_obs"] = pa.array(column("next").tolist())
    for name, source in (("terminated", "terminated"), ("truncated", "truncated"), ("episode_id", "episode"), ("step", "step")):
        out[name] = column(source)
    out["action"] = pa.array(column("action").tolist())
    pyarrow.parquet.write_table(pa.table(out), path / "log.parquet")
    return path / "log.parquet"


def arrow(path: Path, successors: bool) -> Path:
    pyarrow.feather.write_feather(pa.table(table(successors)), path / "log.feather", compression="uncompressed")
    return path / "log.feather"


def frame(path: Path, successors: bool) -> pd.DataFrame:
    return pd.DataFrame(table(successors)).set_index(np.random.default_rng(0).permutation(N))


def minari(path: Path, successors: bool) -> Path:
    folder = path / "dataset-v0"
    (folder / "data").mkdir(parents=True)
    with h5py.File(folder / "data" / "main_data.hdf5", "w") as file:
        for e, (length, end) in enumerate(zip(LENGTHS, ENDS, strict=True)):
            group = file.create_group(f"episode_{e}")
            observations = np.array([state(e, t) for t in range(length + successors)], np.float32)
            spaces = group.create_group("observations")  # a dict space
            spaces["a"], spaces["b"] = observations[:, :1], observations[:, 1:].reshape(-1, 2, 1)
            group["actions"] = [[float(e), float(-t)] for t in range(length)]
            group["rewards"] = [1000.0 * e + t for t in range(length)]
            flags = np.zeros((2, length), bool)
            flags[0, -1], flags[1, -1] = end in ("term", "both"), end in ("trunc", "both")
            group["terminations"], group["truncations"] = flags
    return folder


SOURCES: list[Callable] = [
    npz, npz_column_rewards, npz_shuffled, mapping, csv, csv_semicolons_shuffled, csv_string_ids, csv_interleaved,
    parquet, parquet_named_list_columns, arrow, frame, minari,
]  # fmt: skip


@pytest.mark.parametrize("successors", [True, False], ids=["T+1 states", "T states"])
@pytest.mark.parametrize("write", SOURCES, ids=lambda f: f.__name__)
def test_every_row_is_aligned(write: Callable, successors: bool, tmp_path: Path) -> None:
    data = vf.load(write(tmp_path, successors))
    episode, step = data.observations[:, 1].astype(int), data.observations[:, 2].astype(int)
    np.testing.assert_array_equal(data.observations[:, 0], 100 * episode + step)
    np.testing.assert_array_equal(data.rewards, 1000.0 * episode + step)
    assert data.actions is not None
    np.testing.assert_array_equal(data.actions, np.column_stack([episode, -step]))
    alive = ~data.terminated if not successors else np.ones(len(data), bool)
    np.testing.assert_array_equal(data.next_observations[alive, 0], (100 * episode + step + 1)[alive])
    lengths, ends = np.array(LENGTHS), np.array(ENDS)
    last = step == lengths[episode] - 1
    np.testing.assert_array_equal(data.terminated, last & np.isin(ends[episode], ("term", "both")))
    # one state per step: the last row of a truncated or open episode has no successor, is dropped and counted, and a
    # truncation moves one row up with the cut
    cut = last if successors else last & (ends[episode] == "both") | (step == lengths[episode] - 2)
    np.testing.assert_array_equal(
        data.truncated, cut & np.isin(ends[episode], ("trunc", "both")) & (last | (ends[episode] == "trunc"))
    )
    lost = 0 if successors else int(np.isin(ends, ("trunc", "open")).sum())
    assert len(data) == N - lost
    assert dict(data.dropped) == ({"no next observation at the end of a record": lost} if lost else {})
    assert data.n_episodes == len(LENGTHS)
    assert len(np.unique(episode * 100 + step)) == len(data)
    for part in data.episodes():
        assert len(np.unique(part.observations[:, 1])) == 1
        assert (np.diff(part.observations[:, 2]) == 1).all()


def test_numbered_columns_sort_as_numbers_and_names_keep_their_order() -> None:
    n = 12
    columns = {f"obs_{i}": [float(i), float(i)] for i in reversed(range(n))} | {"reward": [0.0, 1.0], "terminated": [0, 1]}
    np.testing.assert_array_equal(vf.load(pd.DataFrame(columns)).observations[0], np.arange(n))
    named = pd.DataFrame({"obs_z": [1.0, 2.0], "obs_a": [3.0, 4.0], "next_obs_a": [4.0, 5.0], "next_obs_z": [2.0, 3.0]})
    data = vf.load(named.assign(reward=0.0, terminated=False))
    np.testing.assert_array_equal(data.observations, [[1, 3], [2, 4]])
    np.testing.assert_array_equal(data.next_observations, [[2, 4], [3, 5]])


def test_gap_in_steps_never_joins_rows() -> None:
    frame = pd.DataFrame(
        {"obs_0": [0.0, 1.0, 5.0, 6.0], "reward": 0.0, "terminated": [0, 0, 0, 1], "episode_id": 0, "step": [0, 1, 5, 6]}
    )
    data = vf.load(frame)
    np.testing.assert_array_equal(data.observations[:, 0], [0, 5, 6])
    np.testing.assert_array_equal(data.next_observations[:2, 0], [1, 6])
    assert sum(data.dropped.values()) == 1


def write_bytes(name: str, content: bytes) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        (folder / name).write_bytes(content)
        return folder / name

    return write


def write_npz(**content: Any) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        np.savez(folder / "log.npz", **content)
        return folder / "log.npz"

    return write


def write_truncated_npz(folder: Path) -> Path:
    path = npz(folder, True)
    path.write_bytes(path.read_bytes()[:-400])
    return path


def write_flipped_npz(folder: Path) -> Path:
    path = npz(folder, True)
    content = bytearray(path.read_bytes())
    content[200] ^= 0xFF  # inside the first array: the checksum no longer fits
    path.write_bytes(content)
    return path


def write_other_zip(folder: Path) -> Path:
    with zipfile.ZipFile(folder / "log.npz", "w") as archive:
        archive.writestr("readme.txt", "hello")
    return folder / "log.npz"


def write_odd_minari(folder: Path) -> Path:
    path = minari(folder, True) / "data" / "main_data.hdf5"
    with h5py.File(path, "a") as file:
        del file["episode_3/truncations"]
    return path


def broken_minari(change: Callable[[h5py.File], object]) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        path = minari(folder, True)
        with h5py.File(path / "data" / "main_data.hdf5", "a") as file:
            change(file)
        return path

    return write


def other_actions(file: h5py.File) -> None:
    del file["episode_2/actions"]
    file["episode_2/actions"] = np.zeros((5, 3))


def odd_flags(file: h5py.File) -> None:
    del file["episode_2/terminations"]
    file["episode_2/terminations"] = np.full(5, 2)


def scalar_observations(file: h5py.File) -> None:
    del file["episode_2/observations"]
    file["episode_2/observations"] = 1.0


def unequal_spaces(file: h5py.File) -> None:
    del file["episode_2/observations/b"]
    file["episode_2/observations/b"] = np.zeros((3, 2))


def write_empty_hdf5(folder: Path) -> Path:
    h5py.File(folder / "x.hdf5", "w").close()
    return folder / "x.hdf5"


GOOD = arrays()
NO_FLAG = {k: v for k, v in GOOD.items() if k not in ("terminated", "truncated")}
REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda p: p / "nowhere.csv", "expected an existing file or folder"),
    "empty": (write_bytes("a.csv", b""), "an empty file"),
    "binary": (write_bytes("a.csv", bytes(range(256)) * 10), "expected one of minari-hdf5, minari-arrow"),
    "text named npz": (write_bytes("a.npz", b"hello world\n"), "expected obs_0 .. or obs_NAME, got 'hello world'"),
    "prose": (write_bytes("a.csv", b"a,b\n1\n2,3,4\n"), "a damaged one"),
    "no reward column": (write_bytes("a.csv", b"obs_0,terminated\n1,0\n"), "no rewards among"),
    "no flags": (write_npz(**NO_FLAG), "no terminated among"),
    "done alone": (write_npz(**NO_FLAG, done=GOOD["terminated"]), "got 'done', which alone does not say"),
    "time limit under another name": (write_npz(**NO_FLAG, terminated=GOOD["terminated"], timeouts=GOOD["truncated"]), "timeouts: expected the flags"),
    "done beside terminated": (write_bytes("a.csv", b"obs_0,reward,terminated,done\n1,0,0,1\n2,0,0,1\n"), "done: expected the flags"),
    "duplicate names": (write_bytes("a.csv", b"obs_0,obs_0,reward,terminated\n1,2,0,0\n"), "'obs_0' 2 times"),
    "missing string id": (write_bytes("a.csv", b"obs_0,reward,terminated,episode_id\n1,0,0,a\n2,0,0,\n"), "episode_ids: expected an id in every row"),
    "ids beyond int64": (write_bytes("a.csv", b"obs_0,reward,terminated,episode_id\n1,0,0,9223372036854775809\n2,0,0,9223372036854775810\n"), "no row with a successor"),
    "ragged lists": (lambda p: pyarrow.parquet.write_table(pa.table({"obs": [[1.0], [1.0, 2.0]], "reward": [0.0, 0.0], "terminated": [0, 1]}), p / "a.parquet") or p / "a.parquet", "column obs: expected numbers, or lists of one length"),
    "times": (lambda p: pyarrow.parquet.write_table(pa.table({"obs_0": pa.array([1, 2], pa.duration("s")), "reward": [0.0, 0.0], "terminated": [0, 1]}), p / "a.parquet") or p / "a.parquet", "column obs_0: expected numbers, got times"),
    "null ids": (lambda p: pyarrow.parquet.write_table(pa.table({"obs_0": [1.0, 2.0], "reward": [0.0, 0.0], "terminated": [0, 1], "episode_id": pa.nulls(2)}), p / "a.parquet") or p / "a.parquet", "episode_ids"),
    "yes and no": (write_bytes("a.csv", b"obs_0,reward,terminated\n1,0,no\n2,0,maybe\n"), "terminated: expected numbers, got 'no' at position 0"),
    "long name": (lambda p: p / ("x" * 300), "expected a path|nothing there"),
    "no such user": (lambda p: "~nobody-of-that-name/x.csv", "expected a path"),
    "empty name": (lambda p: "", "nothing there"),
    "text column": (write_bytes("a.csv", b"obs_0,reward,terminated\nred,1,0\nblue,1,1\n"), "column obs_0: expected numbers, got text"),
    "null observation": (write_bytes("a.csv", b"obs_0,reward,terminated\n1,1,0\n,1,1\n"), "observations: expected finite numbers"),
    "header only": (write_bytes("a.csv", b"obs_0,reward,terminated\n"), "at least one transition"),
    "half a family": (write_bytes("a.csv", b"obs_0,obs_1,next_obs_0,reward,terminated\n1,2,3,4,0\n"), "the same names as obs_.*, got a difference in '1'"),
    "truncated npz": (write_truncated_npz, "expected"),
    "flipped bit": (write_flipped_npz, "a damaged one"),
    "other zip": (write_other_zip, "expected one of"),
    "pickled objects": (write_npz(observations=np.array([{}, {}], dtype=object)), "pickled Python objects, which are never read"),
    "pickled among good": (write_npz(**GOOD, info=np.array([{}], dtype=object)), "array 'info'"),
    "truncated parquet": (write_bytes("a.parquet", b"PAR1" + b"\0" * 50), "a damaged one"),
    "truncated hdf5": (write_bytes("a.hdf5", b"\x89HDF\r\n\x1a\n" + b"\0" * 50), "a damaged HDF5 file"),
    "hdf5 without episodes": (write_empty_hdf5, "an HDF5 file with nothing in it"),
    "minari without truncations": (write_odd_minari, "episode_3: expected observations, rewards, terminations, truncations"),
    "minari actions of another width": (broken_minari(other_actions), "episode 2: expected actions of shape .2,. per step, as in the first episode"),
    "minari actions missing once": (broken_minari(lambda f: f.__delitem__("episode_0/actions")), "actions"),
    "minari odd flags": (broken_minari(odd_flags), "episode_2: terminations: expected flags"),
    "minari scalar observations": (broken_minari(scalar_observations), "expected one row per step"),
    "minari unequal spaces": (broken_minari(unequal_spaces), "one length in all parts of a space"),
    "folder": (lambda p: p, "main_data.hdf5"),
    "unknown sample": (lambda p: "sample:pick-place-v3/lowest", "one of pick-place-v3/high"),
    "wrong type": (lambda p: 3, "got int"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_read_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    make, message = REFUSED[name]
    with pytest.raises(vf.InputError, match=message) as caught:
        vf.load(make(tmp_path))
    assert "\n" not in str(caught.value)


def test_bundled_samples_are_what_their_manifest_says() -> None:
    import hashlib

    assert len(samples.names()) == 15
    for entry in samples.manifest()["files"]:
        content = (Path(vf.__file__).parent / "samples" / entry["file"]).read_bytes()
        assert hashlib.sha256(content).hexdigest() == entry["sha256"]
        assert entry["episodes_saw_reward"] >= 3
        data = vf.load(f"sample:{entry['task']}/{entry['noise']}")
        assert (len(data), data.n_episodes, data.obs_dim) == (2000, 10, 39)
        assert data.observations.dtype == np.float32
        assert int(data.truncated.sum()) == 10
        # MetaWorld repeats the previous frame in columns 18 to 35: every successor is the next frame of its own episode
        np.testing.assert_array_equal(data.next_observations[:, 18:36], data.observations[:, :18])
        report = data.validate()
        assert "next observation differs" not in " ".join(p.what for p in report.problems)
    assert sum(p.stat().st_size for p in (Path(vf.__file__).parent / "samples").iterdir()) < 6_000_000


def test_query_files(tmp_path: Path) -> None:
    expected = GOOD["observations"]
    pd.DataFrame(expected, columns=["obs_0", "obs_1", "obs_2"]).to_csv(tmp_path / "q.csv", index=False)
    np.savez(tmp_path / "q.npz", observations=expected)
    np.save(tmp_path / "q.npy", expected)
    for name in ("q.csv", "q.npz", "q.npy"):
        np.testing.assert_allclose(load_observations(tmp_path / name), expected)
    np.savez(tmp_path / "other.npz", states=expected)
    with pytest.raises(vf.InputError, match="'observations', got 'states'"):
        load_observations(tmp_path / "other.npz")
    np.save(tmp_path / "o.npy", np.array([{}], dtype=object))
    with pytest.raises(vf.InputError, match="never read"):
        load_observations(tmp_path / "o.npy")
    with pytest.raises(vf.InputError, match="no such file"):
        load_observations(tmp_path / "none.csv")


def test_queries_are_matched_by_name(tmp_path: Path) -> None:
    log = pd.DataFrame({"obs_pos": [0.0, 1.0, 2.0], "obs_vel": [5.0, 6.0, 7.0], "reward": 1.0, "terminated": [0, 0, 1]})
    data = vf.load(log)
    assert data.obs_names == ("pos", "vel")
    pd.DataFrame({"obs_vel": [-2.0], "obs_pos": [0.5]}).to_csv(tmp_path / "q.csv", index=False)
    np.testing.assert_array_equal(load_observations(tmp_path / "q.csv", data.obs_names), [[0.5, -2.0]])
    pd.DataFrame({"obs_foo": [-2.0], "obs_bar": [0.5]}).to_csv(tmp_path / "q.csv", index=False)
    for names in (data.obs_names, None):
        with pytest.raises(vf.InputError, match="expected those of the log: obs_"):
            load_observations(tmp_path / "q.csv", names)
    pd.DataFrame({"obs_pos": [-2.0]}).to_csv(tmp_path / "q.csv", index=False)
    with pytest.raises(vf.InputError, match="got no obs_vel"):
        load_observations(tmp_path / "q.csv", data.obs_names)
    pd.DataFrame({"obs_1": [1.0], "obs_0": [0.0]}).to_csv(tmp_path / "q.csv", index=False)
    np.testing.assert_array_equal(load_observations(tmp_path / "q.csv", ("0", "1")), [[0.0, 1.0]])


def test_unused_columns_are_reported_and_odd_headers_understood() -> None:
    frame = pd.DataFrame(
        {"obs_0": [0.0, 1.0], " Reward": [1.0, 2.0], "Terminated": [0, 1], "note": ["a", "b"], "step": [0, 1], "episode_id": 0}
    )
    data = vf.load(frame)
    np.testing.assert_array_equal(data.rewards, [1.0, 2.0])
    assert data.unused == ("note",)
    assert [p.what for p in data.validate().problems] == ["columns not used"]


def test_other_end_flags_are_fine_beside_the_two_that_mean_something() -> None:
    data = vf.load({**arrays(), "dones": column("terminated")})
    assert data.n_episodes == len(LENGTHS)
    assert data.unused == ("dones",)


def test_empty_episodes_of_a_minari_set_are_skipped(tmp_path: Path) -> None:
    path = minari(tmp_path, True)
    with h5py.File(path / "data" / "main_data.hdf5", "a") as file:
        group = file.create_group("episode_12")
        for name in ("observations", "actions", "rewards", "terminations", "truncations"):
            group[name] = np.zeros(0)
    assert len(vf.load(path)) == N


def test_the_current_folder_is_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(minari(tmp_path, True))
    assert len(vf.load(".")) == N


def test_arrow_tables_in_memory() -> None:
    data = vf.load(pa.table(table()))
    np.testing.assert_array_equal(data.observations, column("obs"))
