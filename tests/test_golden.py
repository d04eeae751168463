"""One contract over files that the formats' own packages wrote: every row of every episode is aligned, loaded or streamed.

Each state is a tag that names its episode and step (tests/golden/episodes.py), so a shifted row cannot pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import valueformer as vf
from tests.golden.episodes import ENDS, LENGTHS, SCALE, choice, discount
from tests.golden.episodes import episodes as golden_episodes
from valueformer.sources.alignment import LOST, PADDING
from valueformer.transitions import Transitions

GOLDEN = Path(__file__).parent / "golden"
ALL = "term", "trunc", "both", "open"


@dataclass(frozen=True)
class Case:
    """A golden set: how to load it, and what it says about the ends of episodes."""

    path: str
    options: Mapping[str, Any] = field(default_factory=dict)
    final: tuple[str, ...] = ALL  # ends after which the final state is known
    says: Mapping[str, str] = field(default_factory=dict)  # ends that the format takes for another
    dropped: Mapping[str, int] = field(default_factory=dict)  # besides rows without successor
    assumed: int = 0
    lengths: Mapping[int, int] = field(default_factory=dict)  # episodes that the record cuts short; their last state is known
    discrete: bool = False
    discounts: bool = False
    in_order: bool = True
    names: tuple[str, ...] | None = None
    form: str = ""


FLAG = {"both": "term"}  # a format that cannot say both
NAMED = {"obs_columns": "joint_*", "action_columns": "torque_*", "reward_column": "r", "terminated_column": "ended",
         "truncated_column": "timeout", "episode_column": "run", "step_column": "t"}  # fmt: skip
ONE_FLAG = {"both": "term", "open": "trunc"}
RLDS_FINAL = {"final step of an episode, whose action and reward are invalid (its observation is used)": 11}
TAGS = ("tag", "episode", "step")
CASES = [
    Case("minari/box-hdf5", form="minari-hdf5"),
    Case("minari/box-arrow", dropped={PADDING: 12}, form="minari-arrow"),
    Case("minari/box-parquet", dropped={PADDING: 12}, form="minari-arrow"),
    Case("minari/dict-hdf5", names=("a", "b_0", "b_1")),
    Case("minari/dict-arrow", dropped={PADDING: 12}, names=("a", "b_0", "b_1")),
    Case("minari/tuple-hdf5", names=("_index_0", "_index_1_0", "_index_1_1")),
    Case("minari/tuple-arrow", dropped={PADDING: 12}, names=("0", "1_0", "1_1")),
    Case("minari/discrete-hdf5", discrete=True),
    Case("minari/float16-hdf5"),
    Case("minari/t-states-hdf5", final=()),
    Case("minari/t-states-parquet", final=()),
    Case("d3rlpy/v2.h5", final=(), says=ONE_FLAG, form="d3rlpy-v2"),
    Case("d3rlpy/v2-tuple.h5", final=(), says=ONE_FLAG, names=("0", "1_0", "1_1")),
    Case("d3rlpy/v2-discrete.h5", final=(), says=ONE_FLAG, discrete=True),
    Case("d3rlpy/v1.h5", final=(), says=FLAG, form="d3rlpy-v1"),
    Case("d4rl/plain.hdf5", final=(), form="d4rl"),
    Case("d4rl/next.hdf5"),
    Case("d4rl/next-no-timeouts.hdf5", says=FLAG, assumed=3),
    Case("d4rl/column.hdf5", final=()),
    Case("d4rl/virtual.hdf5", final=()),
    Case("d4rl/maze2d.hdf5", final=(), says={"term": "trunc", "both": "trunc"}, assumed=1),
    Case("lerobot/v3", final=(), says={"both": "trunc"}, names=TAGS, form="lerobot"),
    Case("lerobot/v2", final=(), says={"both": "trunc"}, names=TAGS),
    Case("lerobot/v3-no-reward", {"reward_column": "score", "terminated_column": "none"}, final=(), says=dict.fromkeys(ALL, "open"), names=TAGS),
    Case("rlds/steps.parquet", final=("term", "trunc", "both"), says=FLAG, dropped=RLDS_FINAL, discounts=True, names=("a", "b_0", "b_1"), form="rlds-table"),
    Case("rlds/flat.parquet", final=("term", "trunc", "both"), says=FLAG, dropped=RLDS_FINAL, discounts=True),
    Case("rollouts/next-step.npz", {"autoreset": "next-step"}, dropped={"reset step after the end of an episode, whose action was ignored": 10}, lengths={11: 1}, form="npz"),
    Case("rollouts/same-step.npz", {"autoreset": "same-step"}, final=("open",), lengths={5: 2, 11: 0}),
    Case("rollouts/same-step-final.npz", lengths={5: 2, 11: 0}),
    Case("tables/steps.parquet", names=("x", "y", "z"), form="parquet"),
    Case("tables/steps.arrow", names=("x", "y", "z"), form="arrow"),
    Case("tables/steps.csv", names=("x", "y", "z"), form="csv"),
    Case("tables/custom.parquet", NAMED, final=(), in_order=False, names=("joint_0", "joint_1", "joint_2")),
    Case("tables/interleaved.csv", final=(), in_order=False, names=("x", "y", "z")),
    Case("npz/arrays.npz"),
    Case("npz/float16.npz"),
]  # fmt: skip


def expected(case: Case) -> tuple[dict[tuple[int, int], tuple[bool, bool, bool]], int]:
    """Return ``(episode, step) -> (terminated, truncated, successor known)`` of every row that must be there, and the lost ones."""
    rows, lost = {}, 0
    for e, (length, end) in enumerate(zip(LENGTHS, ENDS, strict=True)):
        steps, end = case.lengths.get(e, length), case.says.get(end, end)
        known = end in case.final
        if e in case.lengths and case.lengths[e] < length:
            end, known = "open", True
        terminated, truncated = end in ("term", "both"), end in ("trunc", "both")
        for t in range(steps):
            last = t == steps - 1
            rows[e, t] = (last and terminated, last and truncated, not last or known)
        if steps and not known and not terminated:  # the last row has no successor, and its flag moves up with the cut
            del rows[e, steps - 1]
            lost += 1
            if truncated and steps > 1:
                rows[e, steps - 2] = (False, True, True)
    return rows, lost


def check(data: Transitions, case: Case) -> None:
    rows, lost = expected(case)
    states = data.observations.astype(int)
    np.testing.assert_array_equal(states[:, 0], SCALE * states[:, 1] + states[:, 2])
    keys = [(int(e), int(t)) for e, t in states[:, 1:]]
    assert len(set(keys)) == len(keys)
    assert set(keys) == set(rows)
    index = {key: row for row, key in enumerate(keys)}
    for (e, t), (terminated, truncated, known) in rows.items():
        row = index[e, t]
        assert data.rewards[row] == SCALE * e + t
        assert (bool(data.terminated[row]), bool(data.truncated[row])) == (terminated, truncated), (e, t)
        if known or not terminated:
            assert data.next_observations[row].tolist() == [SCALE * e + t + 1, e, t + 1], (e, t)
        assert data.steps[row] == t
        if data.actions is not None:
            assert data.actions[row].tolist() == ([choice(e, t)] if case.discrete else [e, -t])
        if case.discounts:
            assert data.discounts is not None
            assert data.discounts[row] == np.float32(discount(e, t))
    assert data.actions is not None
    for part in data.episodes():  # rows of one id are one episode
        assert len(np.unique(part.observations[:, 1])) == 1
    assert data.n_episodes == len({e for e, _ in rows})
    assert dict(data.dropped) == {**case.dropped, **({LOST: lost} if lost else {})}
    assert sum(data.assumed.values()) == case.assumed
    assert data.obs_names == case.names
    assert case.form in (data.format, "")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.path)
def test_every_row_is_aligned(case: Case) -> None:
    check(vf.load(GOLDEN / case.path, **case.options), case)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("case", [case for case in CASES if case.in_order], ids=lambda case: case.path)
def test_blocks_are_the_rows_of_the_whole(case: Case, size: int) -> None:
    whole = vf.load(GOLDEN / case.path, **case.options)
    blocks = list(vf.load(GOLDEN / case.path, stream=True, block_size=size, **case.options))
    assert max(map(len, blocks)) <= size
    for name in ("observations", "next_observations", "rewards", "terminated", "truncated", "actions", "episode_ids", "steps"):
        joined = np.concatenate([getattr(block, name) for block in blocks])
        np.testing.assert_array_equal(joined, getattr(whole, name), err_msg=name)
        assert joined.dtype == getattr(whole, name).dtype
    for counts in ("dropped", "assumed"):
        total: dict[str, int] = {}
        for block in blocks:
            for reason, count in getattr(block, counts).items():
                total[reason] = total.get(reason, 0) + count
        assert total == dict(getattr(whole, counts))


@pytest.mark.parametrize("case", [case for case in CASES if not case.in_order], ids=lambda case: case.path)
def test_a_stream_out_of_order_is_refused(case: Case) -> None:
    with pytest.raises(vf.InputError, match="rows sorted by episode and step, to stream them"):
        list(vf.load(GOLDEN / case.path, stream=True, block_size=4, **case.options))


REFUSED = {
    "d4rl/no-timeouts.hdf5": ({}, "other ends are unknown; say how long an episode may last: max_episode_steps"),
    "d3rlpy/v1-no-episode-terminals.h5": ({}, "max_episode_steps"),
    "lerobot/v3-no-reward": ({}, "name a column of rewards: reward_column"),
    "rollouts/next-step.npz": ({}, "autoreset='next-step' .* or 'same-step'"),
    "tables/custom.parquet": ({"obs_columns": "joint_*", "truncated_column": "timeout"}, "no rewards, terminated"),
    "minari/box-hdf5": ({"reward_column": "r"}, "reward_column: expected an option that the format minari-hdf5 understands"),
    "tables/steps.csv": ({"obs_columns": "nothing_*"}, "obs_columns: expected a column that fits 'nothing_\\*'"),
}


@pytest.mark.parametrize("path", REFUSED)
def test_what_a_file_does_not_say_is_asked_for(path: str) -> None:
    options, message = REFUSED[path]
    with pytest.raises(vf.InputError, match=message):
        vf.load(GOLDEN / path, **options)


def test_done_alone_is_split_by_the_time_limit_or_refused(tmp_path: Path) -> None:
    states = np.arange(7.0)
    arrays = {"observations": states, "rewards": states, "done": np.array([0, 0, 1, 0, 1, 0, 0], bool)}
    np.savez(tmp_path / "log.npz", **arrays)
    with pytest.raises(vf.InputError, match=r"'done', which alone does not say .* --terminated-column, --truncated-column"):
        vf.load(tmp_path / "log.npz")
    with pytest.raises(vf.InputError, match="a way to tell time limits from terminal states"):
        vf.load(tmp_path / "log.npz", done_column="done")
    data = vf.load(tmp_path / "log.npz", done_column="done", max_episode_steps=3)
    # the first end is at the limit: a truncation, which loses its last row; the second comes before it: a terminal
    assert data.observations[:, 0].tolist() == [0, 1, 3, 4, 5]
    assert data.terminated.tolist() == [False, False, False, True, False]
    assert data.truncated.tolist() == [False, True, False, False, False]
    data = vf.load(tmp_path / "log.npz", terminated_column="done")
    assert data.terminated.tolist() == [False, False, True, False, True, False]
    assert data.n_episodes == 3
    data = vf.load(tmp_path / "log.npz", terminated_column="none", truncated_column="done")
    assert not data.terminated.any()
    assert data.observations[:, 0].tolist() == [0, 1, 3, 5]


def test_a_time_limit_that_no_flag_marks(tmp_path: Path) -> None:
    import h5py

    with h5py.File(tmp_path / "log.hdf5", "w") as file:
        file["observations"] = np.arange(10.0)[:, None]
        file["actions"], file["rewards"] = np.zeros((10, 1)), np.arange(10.0)
        file["terminals"] = np.arange(10) == 5
    with pytest.raises(vf.InputError, match="max_episode_steps"):
        vf.load(tmp_path / "log.hdf5")
    for size in (1, 2, 3, 4, 100):  # episodes 0-3, 4-5 (terminal), 6-9
        whole = vf.load(tmp_path / "log.hdf5", max_episode_steps=4)
        blocks = vf.load(tmp_path / "log.hdf5", max_episode_steps=4, stream=True, block_size=size)
        joined = np.concatenate([block.observations[:, 0] for block in blocks])
        assert joined.tolist() == whole.observations[:, 0].tolist() == [0, 1, 2, 4, 5, 6, 7, 8]
        assert whole.truncated.tolist() == [False, False, True, False, False, False, False, True]
        assert whole.episode_ids.tolist() == [0, 0, 0, 1, 1, 2, 2, 2]
        assert sum(whole.assumed.values()) == 2


def test_content_that_fits_two_formats_names_both(tmp_path: Path) -> None:
    import h5py

    with h5py.File(tmp_path / "log.h5", "w") as file:
        for name in ("rewards", "terminals", "timeouts", "episode_terminals"):
            file[name] = np.zeros(3)
        file["observations"], file["actions"] = np.arange(3.0)[:, None], np.zeros((3, 1))
    with pytest.raises(vf.InputError, match=r"content that fits d3rlpy-v1, d4rl; say which: format='\.\.' \(--format\)"):
        vf.load(tmp_path / "log.h5")
    assert len(vf.load(tmp_path / "log.h5", format="d4rl")) == 2
    with pytest.raises(vf.InputError, match="format: expected one of minari-hdf5"):
        vf.load(tmp_path / "log.h5", format="h5")


def test_rows_that_are_not_finite_are_left_out_and_never_bridged() -> None:
    states = np.array([0.0, 1, np.nan, 3, 4, 5])
    arrays = {"observations": states, "rewards": np.arange(6.0), "terminated": [0, 0, 0, 0, 0, 1]}
    with pytest.raises(vf.InputError, match="finite"):
        vf.load(arrays)
    data = vf.load(arrays, drop_nonfinite=True)
    assert data.observations[:, 0].tolist() == [0, 3, 4, 5]
    assert data.next_observations[:3, 0].tolist() == [1, 4, 5]
    assert data.dropped == {"a number that is not finite": 1, LOST: 1}


def test_a_step_that_comes_twice_has_no_one_successor() -> None:
    rows = {"observations": [0.0, 1, 5, 2], "rewards": np.zeros(4), "terminated": np.zeros(4), "episode_ids": np.zeros(4)}
    with pytest.raises(vf.InputError, match="step 1 of episode 0 twice, unequal"):
        vf.load(rows | {"steps": [0, 1, 1, 2]})
    data = vf.load(rows | {"observations": [0.0, 1, 1, 2], "steps": [0, 1, 1, 2]})  # resampled, say: equal rows do no harm
    assert data.next_observations[:, 0].tolist() == [1, 2, 2]


def test_steps_that_start_again_begin_an_episode() -> None:
    data = vf.load(
        {"observations": np.arange(5.0), "rewards": np.zeros(5), "terminated": np.zeros(5), "steps": [0, 1, 2, 0, 1]}
    )
    assert data.observations[:, 0].tolist() == [0, 1, 3]
    assert data.episode_ids.tolist() == [0, 0, 1]
    assert "an episode start that only the step numbers show" in data.assumed


# -- logs in memory -------------------------------------------------------------------------------------------------------------


def flat(final: bool = True) -> dict[str, np.ndarray]:
    with np.load(GOLDEN / "npz" / "arrays.npz") as archive:
        arrays = {name: archive[name] for name in archive.files}
    if not final:
        del arrays["next_observations"]
    return arrays


def tensors() -> dict[str, Any]:
    import torch

    return {name: torch.tensor(value) for name, value in flat().items()}


def polars_lists() -> Any:
    import polars

    arrays = flat(final=False)
    columns = {"obs": arrays["observations"].tolist(), "action": arrays["actions"].tolist(), "reward": arrays["rewards"][:, 0]}
    columns |= {"terminated": arrays["terminated"], "truncated": arrays["truncated"], "step": arrays["steps"]}
    return polars.DataFrame(columns | {"episode_id": arrays["episode_ids"]})


def polars_columns() -> Any:
    import polars

    return polars.read_parquet(GOLDEN / "tables" / "steps.parquet")


def pandas_arrow() -> Any:
    import pandas as pd

    return pd.read_parquet(GOLDEN / "tables" / "steps.parquet", dtype_backend="pyarrow")


def arrow_table() -> Any:
    import pyarrow.parquet

    return pyarrow.parquet.read_table(GOLDEN / "tables" / "steps.parquet")


def buffer() -> Any:
    """A stand-in with the attributes of d3rlpy's ReplayBuffer."""
    parts = [
        SimpleNamespace(
            observations=e.observations[:-1], actions=e.actions, rewards=e.rewards[:, None], terminated=bool(e.terminated.any())
        )
        for e in golden_episodes()
    ]
    return SimpleNamespace(episodes=parts)


def tensordict(mask: bool = False, ids: bool = False) -> dict[str, Any]:
    """TorchRL's episode format as nested mappings: one batch entry per episode, padded if masked, else end to end."""
    import torch

    steps, parts = max(LENGTHS), golden_episodes()

    def column(get: Callable[[Any], np.ndarray]) -> Any:
        rows = [get(e).reshape(len(e), -1) for e in parts]
        if mask:
            rows = [np.pad(row, ((0, steps - len(row)), (0, 0))) for row in rows]
            return torch.tensor(np.stack(rows))
        return torch.tensor(np.concatenate(rows))

    after = {
        "observation": column(lambda e: e.observations[1:]),
        "reward": column(lambda e: e.rewards),
        "done": column(lambda e: e.terminated | e.truncated),
        "terminated": column(lambda e: e.terminated),
        "truncated": column(lambda e: e.truncated),
    }
    data: dict[str, Any] = {
        "observation": column(lambda e: e.observations[:-1]),
        "action": column(lambda e: e.actions),
        "next": after,
    }
    collector = {}
    if mask:
        collector["mask"] = torch.arange(steps) < torch.tensor(LENGTHS)[:, None]
    if ids:
        collector["traj_ids"] = column(lambda e: np.full(len(e), e.number))[:, 0]
    return data | ({"collector": collector} if collector else {})


MEMORY: dict[str, tuple[Callable[[], Any], Case]] = {
    "arrays": (flat, Case("")),
    "arrays without next": (lambda: flat(final=False), Case("", final=())),
    "tensors": (tensors, Case("")),
    "polars with lists": (polars_lists, Case("", final=())),
    "polars": (polars_columns, Case("", names=("x", "y", "z"))),
    "pandas on Arrow": (pandas_arrow, Case("", names=("x", "y", "z"))),
    "Arrow table": (arrow_table, Case("", names=("x", "y", "z"))),
    "d3rlpy buffer": (buffer, Case("", final=(), says=ONE_FLAG)),
    "tensordict": (tensordict, Case("")),
    "tensordict with ids": (lambda: tensordict(ids=True), Case("")),
    "padded tensordict": (lambda: tensordict(mask=True), Case("", dropped={PADDING: 12 * 6 - sum(LENGTHS)})),
}


@pytest.mark.parametrize("name", MEMORY)
def test_logs_in_memory_are_aligned(name: str) -> None:
    make, case = MEMORY[name]
    check(vf.load(make()), case)


def test_an_option_that_would_be_ignored_is_refused() -> None:
    message = "expected an option that the format"
    with pytest.raises(vf.InputError, match=f"autoreset: {message} arrays"):
        vf.load(flat(), autoreset="same-step")
    with pytest.raises(vf.InputError, match=f"reward_column: {message} d3rlpy-buffer"):
        vf.load(buffer(), reward_column="r")
    with pytest.raises(vf.InputError, match=f"step_column: {message} tensordict"):
        vf.load(tensordict(), step_column="t")


@pytest.mark.parametrize("keep_next", [True, False])
def test_a_ring_buffer_of_stable_baselines_is_unrolled_oldest_first(keep_next: bool) -> None:
    """A stand-in with the attributes of its ReplayBuffer: two environments, a full ring whose oldest row is row 3."""
    envs = [golden_episodes()[:6], golden_episodes()[6:]]
    steps, pos = 17, 3
    rows = [[(e, t) for e in parts for t in range(len(e))][:steps] for parts in envs]

    def column(get: Callable[[Any, int], Any]) -> np.ndarray:
        return np.roll(np.stack([np.array([get(e, t) for e, t in part]) for part in rows], axis=1), pos, axis=0)

    data = SimpleNamespace(
        observations=column(lambda e, t: e.observations[t]),
        actions=column(lambda e, t: e.actions[t]),
        rewards=column(lambda e, t: e.rewards[t]),
        dones=column(lambda e, t: float(e.terminated[t] or e.truncated[t])),
        timeouts=column(lambda e, t: float(e.truncated[t] and not e.terminated[t])),
        pos=pos,
        full=True,
        n_envs=2,
    )
    if keep_next:
        data.next_observations = column(lambda e, t: e.observations[t + 1])
        check(vf.load(data), Case("", says=FLAG, lengths={5: 2, 11: 0}))
    else:  # the newest successor has overwritten the oldest row's state
        data.observations[pos] = [[0, 0, 0], golden_episodes()[5].observations[2]][::-1]
        loaded = vf.load(data)
        states = loaded.observations
        assert {(0, 0), (6, 0)}.isdisjoint({(int(e), int(t)) for e, t in states[:, 1:]})
        assert loaded.dropped[LOST] == 2  # the two truncations
        alive = ~loaded.terminated
        np.testing.assert_array_equal(loaded.next_observations[alive, 0], states[alive, 0] + 1)
    data.handle_timeout_termination = False
    with pytest.raises(vf.InputError, match="terminated_column='dones' if every end is terminal"):
        vf.load(data)
    del data.dones
    with pytest.raises(vf.InputError, match="terminated and truncated flags"):
        vf.load(data)


def test_records_of_tensorflow_datasets() -> None:
    """Where the package is installed; elsewhere the message names the extra, and the step table needs nothing."""
    case = Case("rlds/records", final=("term", "trunc", "both"), says=FLAG, discounts=True, names=("a", "b_0", "b_1"))
    try:
        import tensorflow_datasets  # noqa: F401  # pyright: ignore[reportMissingImports]
    except ImportError:
        with pytest.raises(vf.MissingExtraError, match=r"pip install 'valueformer\[rlds\]'"):
            vf.load(GOLDEN / case.path)
        return
    dropped = {**RLDS_FINAL, "step of an episode marked invalid": 4}
    check(vf.load(GOLDEN / case.path), replace(case, dropped=dropped))
