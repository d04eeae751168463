"""Files that mean harm: they may not run code, reach outside, or fill the memory."""

from __future__ import annotations

import json
import shutil
import zipfile
from pathlib import Path

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet
import pytest

import valueformer as vf
from tests.test_golden import GOLDEN
from valueformer.sources.limits import max_bytes

MIB = 2**20


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VALUEFORMER_MAX_BYTES", str(MIB))


def bomb(path: Path, form: str) -> Path:
    """Write a few kilobytes that unpack to several times the limit of the tests."""
    n = 4 * MIB // 8
    columns = {"obs_0": np.zeros(n), "reward": np.zeros(n), "terminated": np.zeros(n, bool)}
    if form == "npz":
        np.savez_compressed(path, observations=columns["obs_0"], rewards=columns["reward"], terminated=columns["terminated"])
        return path.with_suffix(".npz")
    if form == "parquet":
        pyarrow.parquet.write_table(pa.table(columns), path, compression="zstd")
    elif form == "arrow":
        pyarrow.feather.write_feather(pa.table(columns), path, compression="zstd")
    else:
        with h5py.File(path, "w") as file:
            for name, value in (
                ("observations", columns["obs_0"]),
                ("rewards", columns["reward"]),
                ("terminals", columns["terminated"]),
            ):
                file.create_dataset(name, data=value, compression="gzip")
            file["timeouts"] = file["terminals"]
    return path


@pytest.mark.usefixtures("limit")
@pytest.mark.parametrize("form", ["npz", "parquet", "arrow", "hdf5"])
def test_a_bomb_is_refused_by_the_limit(form: str, tmp_path: Path) -> None:
    path = bomb(tmp_path / "log", form)
    assert path.stat().st_size < MIB / 4
    with pytest.raises(vf.InputError, match=r"at most 0\.000977 GiB when unpacked, got .* GiB; .*VALUEFORMER_MAX_BYTES"):
        vf.load(path)


@pytest.mark.usefixtures("limit")
@pytest.mark.parametrize("form", ["parquet", "hdf5"])
def test_a_large_file_streams_in_what_its_blocks_take(form: str, tmp_path: Path) -> None:
    path = bomb(tmp_path / "log", form)
    if form == "parquet":  # a bomb has one row group; an honest large file has many
        table = pyarrow.parquet.read_table(path)
        pyarrow.parquet.write_table(table, path, row_group_size=20_000)
    assert sum(len(block) for block in vf.load(path, stream=True, block_size=10_000)) == 4 * MIB // 8 - 1


def test_the_limit_is_stated_and_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VALUEFORMER_MAX_BYTES", raising=False)
    assert max_bytes() == 8 * 2**30
    monkeypatch.setenv("VALUEFORMER_MAX_BYTES", "lots")
    with pytest.raises(vf.InputError, match="VALUEFORMER_MAX_BYTES: expected a whole number of bytes"):
        max_bytes()


@pytest.mark.usefixtures("limit")
@pytest.mark.parametrize("path", ["minari/box-hdf5", "d3rlpy/v2.h5", "d4rl/next.hdf5"])
def test_a_declared_size_is_believed_before_anything_is_read(path: str, tmp_path: Path) -> None:
    """HDF5 lets a file of a few kilobytes declare terabytes that were never written."""
    copy = tmp_path / Path(path).name
    source = GOLDEN / path
    shutil.copytree(source, copy) if source.is_dir() else shutil.copy(source, copy)
    name = {"minari/box-hdf5": "episode_3/rewards", "d3rlpy/v2.h5": "rewards_3", "d4rl/next.hdf5": "rewards"}[path]
    with h5py.File(copy / "data" / "main_data.hdf5" if copy.is_dir() else copy, "a") as file:
        del file[name]
        file.create_dataset(name, shape=(10**12,), dtype=np.float64, chunks=(1000,), compression="gzip")
    with pytest.raises(vf.InputError, match="GiB when unpacked"):
        vf.load(copy)


def test_hdf5_does_not_reach_into_other_files(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "secret.h5", "w") as file:
        file["rewards"] = np.arange(3.0)
    sound = {"observations": np.zeros((3, 2)), "terminals": np.zeros(3), "timeouts": np.zeros(3)}
    layout = h5py.VirtualLayout(shape=(3,), dtype=float)
    layout[:] = h5py.VirtualSource(str(tmp_path / "secret.h5"), "rewards", shape=(3,))
    (tmp_path / "raw").write_bytes(np.arange(3.0).tobytes())
    makers = {
        "link": lambda file: file.__setitem__("rewards", h5py.ExternalLink(str(tmp_path / "secret.h5"), "/rewards")),
        "virtual": lambda file: file.create_virtual_dataset("rewards", layout),
        "external": lambda file: file.create_dataset("rewards", (3,), float, external=[(str(tmp_path / "raw"), 0, 24)]),
    }
    for name, make in makers.items():
        with h5py.File(tmp_path / f"{name}.h5", "w") as file:
            for key, value in sound.items():
                file[key] = value
            make(file)
        with pytest.raises(vf.InputError, match="expected data inside the file"):
            vf.load(tmp_path / f"{name}.h5")


def test_lerobot_reads_only_its_own_folder(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    shutil.copytree(GOLDEN / "lerobot" / "v3", folder)
    expected = vf.load(folder)
    info = json.loads((folder / "meta" / "info.json").read_text())
    for path in ("../../{chunk_index}/{file_index}.parquet", "/etc/{chunk_index}", "{0.__class__}"):
        (folder / "meta" / "info.json").write_text(json.dumps(info | {"data_path": path}))
        assert vf.load(folder).observations.tobytes() == expected.observations.tobytes()  # the template is never followed


def test_frames_that_the_folder_lacks_are_counted(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    shutil.copytree(GOLDEN / "lerobot" / "v2", folder)
    whole = len(vf.load(folder))
    next(iter(sorted(folder.glob("data/**/*.parquet")))).unlink()  # the first episode, of three steps
    for data in (vf.load(folder), *vf.load(folder, stream=True, block_size=1000)):
        assert len(data) == whole - 3
        assert data.assumed == {"a frame that meta/info.json counts and the folder does not hold": 3}


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/../../b", "", "a\\b", "a\0b"])
def test_a_minari_id_stays_under_the_root(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "root"))
    with pytest.raises(vf.InputError, match="a dataset id such as"):
        vf.load(f"minari:{name}")


def test_a_minari_id_is_found_under_the_root_or_the_network_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys
    from types import SimpleNamespace

    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    shutil.copytree(GOLDEN / "minari" / "box-hdf5", tmp_path / "group" / "box-v0")
    assert len(vf.load("minari:group/box-v0")) == 40
    monkeypatch.setitem(sys.modules, "minari", None)
    with pytest.raises(vf.InputError, match="no minari package to fetch it; pip install minari"):
        vf.load("minari:group/other-v0")

    def unreachable(name: str) -> None:
        raise ConnectionError("Name or service not known")

    monkeypatch.setitem(sys.modules, "minari", SimpleNamespace(download_dataset=unreachable))
    with pytest.raises(vf.InputError, match="Name or service not known; check the network and the id"):
        vf.load("minari:group/other-v0")
    monkeypatch.setitem(sys.modules, "minari", SimpleNamespace(download_dataset=lambda name: None))
    with pytest.raises(vf.InputError, match="nothing that can be read"):  # "succeeds" and brings nothing
        vf.load("minari:group/other-v0")


def test_no_module_unpickles() -> None:
    """Neither pickle nor an option that allows it appears in the package."""
    for file in Path(vf.__file__).parent.rglob("*.py"):
        text = file.read_text()
        assert "allow_pickle=True" not in text
        assert "import pickle" not in text
        assert "torch.load" not in text
        assert "joblib" not in text


def test_members_of_an_archive_are_read_in_place(tmp_path: Path) -> None:
    with np.load(GOLDEN / "npz" / "arrays.npz") as archive, zipfile.ZipFile(tmp_path / "log.npz", "w") as out:
        for name in archive.files:
            with out.open(f"{name}.npy", "w") as member:
                np.save(member, archive[name])
        with out.open("../../escape.npy", "w") as member:
            np.save(member, np.zeros(3))
    data = vf.load(tmp_path / "log.npz")
    assert data.unused == ("../../escape",)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log.npz"]
