"""No damage to a file gets past the readers: see tests/fuzz.py. ``make test-full`` runs the whole of it."""

from __future__ import annotations

import shutil
import string
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import valueformer as vf
from tests import fuzz
from tests.conftest import FULL
from tests.test_golden import CASES, GOLDEN
from valueformer.transitions import Transitions

SLICES = 22 if FULL else 1


@pytest.mark.parametrize("part", range(SLICES))
def test_damaged_files_end_in_transitions_or_a_typed_error(part: int) -> None:
    results = list(fuzz.run(100, seed=part))
    found = fuzz.summary(results)
    assert found["findings"] == []
    assert found["loads"]["refused"] > 50  # the damage is real
    assert found["loads"]["loaded"] > 20


def test_the_check_sees_a_shifted_row() -> None:
    case = CASES[0]
    data = vf.load(GOLDEN / case.path, **case.options)
    assert fuzz.misaligned(data) == 0
    assert fuzz.misaligned(data.replace(rewards=np.roll(data.rewards, 1))) > 20
    successors = data.next_observations.copy()
    successors[20:24] = data.observations[20:24]
    assert fuzz.misaligned(data.replace(next_observations=successors)) == 4


numbers = st.floats(width=32, allow_nan=True, allow_infinity=True) | st.integers(-3, 3) | st.booleans()
cells = numbers | st.none() | st.text(string.printable, max_size=3) | st.lists(numbers, max_size=2)
names = st.sampled_from(
    ["obs_0", "obs_1", "obs", "next_obs_0", "next_obs_1", "action", "action_0", "reward", "rewards", "terminated", "terminations",
     "truncated", "done", "episode_id", "step", "discount", "sample_weight", "is_first", "note", " Reward", ""]
)  # fmt: skip


@st.composite
def tables(draw: st.DrawFn) -> dict[str, list[Any]]:
    n = draw(st.integers(0, 6))
    flag = st.lists(st.sampled_from([0, 1, False, True]), min_size=n, max_size=n)
    columns = draw(st.dictionaries(names, st.lists(cells, min_size=n, max_size=n), max_size=5))
    sound = {
        "obs_0": st.lists(numbers, min_size=n, max_size=n),
        "reward": st.lists(numbers, min_size=n, max_size=n),
        "terminated": flag,
    }
    return {name: draw(values) for name, values in sound.items() if draw(st.integers(0, 7))} | columns


def load_or_reason(source: Any, **options: Any) -> Any:
    try:
        data = vf.load(source, **options)
        return data if isinstance(data, Transitions) else list(data)
    except vf.InputError as error:
        return str(error)


@given(tables(), st.integers(1, 4), st.booleans())
def test_any_table_ends_in_transitions_or_a_typed_error(columns: dict[str, list[Any]], size: int, drop: bool) -> None:
    import pandas as pd

    for source in (pd.DataFrame({name: pd.Series(values, dtype=object) for name, values in columns.items()}), columns):
        data = load_or_reason(source, drop_nonfinite=drop)
        if isinstance(data, str):
            assert "\n" not in data
            continue
        assert isinstance(data, Transitions)
        assert np.isfinite(data.observations).all()
        assert np.isfinite(data.next_observations).all()
        data.validate()
        blocks = load_or_reason(source, drop_nonfinite=drop, stream=True, block_size=size)
        if isinstance(blocks, str):
            assert "sorted" in blocks or "after the end" in blocks
            continue
        assert np.array_equal(np.concatenate([block.observations for block in blocks]), data.observations)
        assert np.array_equal(np.concatenate([block.next_observations for block in blocks]), data.next_observations)


def test_damaged_statistics_of_a_parquet_file_do_not_end_the_process(tmp_path: Path) -> None:
    """One bit in the footer, on which pyarrow aborts if asked for the metadata of a column that it has not read."""
    shutil.copytree(GOLDEN / "lerobot" / "v3", tmp_path / "set")
    file = tmp_path / "set" / "data" / "chunk-000" / "file-001.parquet"
    content = bytearray(file.read_bytes())
    content[5617] ^= 64
    file.write_bytes(content)
    program = "import sys, valueformer as vf; print(len(vf.load(sys.argv[1])))"
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path / "set")], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, str(len(vf.load(GOLDEN / "lerobot" / "v3"))))
