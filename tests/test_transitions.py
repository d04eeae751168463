"""The data currency: validation, episodes, returns, reports."""

from __future__ import annotations

import dataclasses
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import valueformer as vf
from tests.conftest import walk

N = 6


def fields(**changes: object) -> dict:
    rng = np.random.default_rng(0)
    base = {
        "observations": rng.normal(size=(N, 2)),
        "next_observations": rng.normal(size=(N, 2)),
        "rewards": np.arange(float(N)),
        "terminated": [0, 0, 1, 0, 0, 0],
        "truncated": [0, 0, 0, 0, 0, 1],
    }
    return base | changes


def with_nan(shape: tuple[int, ...], at: tuple[int, ...], value: float = np.nan) -> np.ndarray:
    array = np.zeros(shape)
    array[at] = value
    return array


BAD = {
    "NaN observation": (
        {"observations": with_nan((N, 2), (4, 1))},
        "observations: expected finite numbers, got nan at row 4, column 1",
    ),
    "infinite reward": ({"rewards": with_nan((N,), (2,), np.inf)}, "rewards: expected finite numbers, got inf at row 2"),
    "NaN successor of a row that goes on": (
        {"next_observations": with_nan((N, 2), (0, 0))},
        "next_observations: expected finite",
    ),
    "unequal lengths": ({"rewards": np.zeros(N - 1)}, "observations: expected 5 rows, as in rewards, got 6"),
    "T + 1 observations": ({"observations": np.zeros((N + 1, 2))}, r"pass observations\[:-1\]"),
    "short flags": ({"terminated": [0, 1]}, "terminated: expected 6 rows"),
    "nothing": ({"rewards": [], "observations": np.zeros((0, 2))}, "at least one transition"),
    "other width": (
        {"next_observations": np.zeros((N, 3))},
        "next_observations: expected 2 columns, as in observations, got 3",
    ),
    "image observations": ({"observations": np.zeros((N, 2, 2))}, "flatten each observation"),
    "text": ({"observations": np.full((N, 2), "a")}, "observations: expected numbers, got 'a' at position 0"),
    "ragged": ({"observations": [[1.0]] * 5 + [[1.0, 2.0]]}, "observations: expected numbers in one rectangular array"),
    "a probability as flag": (
        {"terminated": [0, 0, 0.5, 0, 0, 0]},
        "terminated: expected flags, true or false, got the value 0.5",
    ),
    "two rewards": ({"rewards": np.zeros((N, 2))}, r"rewards: expected shape \(n,\) or \(n, 1\)"),
    "discount above one": ({"discounts": [1, 1, 1, 1, 1.5, 1]}, r"discounts: expected numbers in \[0, 1\], got 1.5 at row 4"),
    "negative weight": ({"sample_weight": [1, 1, -1, 1, 1, 1]}, "sample_weight: expected numbers >= 0, got -1 at row 2"),
    "terminal inside an episode": ({"episode_ids": [0] * N}, "terminated: expected only the last step of episode 0 to end it"),
    "end before the last step": (
        {"steps": [0, 1, 2, 0, 5, 3], "episode_ids": [0, 0, 0, 1, 1, 1]},
        "truncated: expected only the last step",
    ),
    "all weights zero": ({"sample_weight": np.zeros(N)}, "sample_weight: expected at least one weight > 0"),
    "huge ids": ({"episode_ids": np.full(N, 1e19)}, "episode_ids: expected whole numbers"),
    "huge step": ({"steps": np.full(N, 1e300)}, "steps: expected whole numbers"),
    "names": ({"obs_names": ["x"]}, "obs_names: expected 2 names"),
    "fractional steps": ({"steps": np.arange(N) + 0.5}, "steps: expected whole numbers"),
    "missing episode id": (
        {"episode_ids": ["a", "a", "a", None, "b", "b"]},
        "episode_ids: expected an id in every row, got none at row 3",
    ),
    "NaN action": ({"actions": with_nan((N, 1), (0, 0))}, "actions: expected finite numbers"),
}


@pytest.mark.parametrize("name", BAD)
def test_errors_say_field_expected_got(name: str) -> None:
    changes, message = BAD[name]
    with pytest.raises(vf.InputError, match=message):
        vf.Transitions(**fields(**changes))


def test_input_error_survives_pickling() -> None:
    error = vf.InputError("a", "b", "c", "d")
    assert str(pickle.loads(pickle.dumps(error))) == str(error) == "a: expected b, got c; d"


def test_fields_are_kept_converted_and_frozen() -> None:
    source = np.zeros((N, 2), np.float32)
    successors = np.zeros((N, 2), np.float32)
    data = vf.Transitions(
        **fields(observations=source, next_observations=successors, rewards=np.arange(N)[:, None], actions=np.arange(N))
    )
    source[:] = 7.0  # the log does not change under a later write
    assert data.observations.dtype == np.float32
    assert data.observations.max() == 0.0
    assert data.rewards.dtype == np.float64
    assert data.rewards.shape == (N,)
    assert data.actions is not None
    assert data.actions.shape == (N, 1)
    with pytest.raises(ValueError, match="read-only"):
        data.observations[0] = 1.0
    with pytest.raises(dataclasses.FrozenInstanceError):
        data.rewards = np.zeros(N)  # pyright: ignore[reportAttributeAccessIssue]
    one_dimensional = vf.Transitions(**fields(observations=np.arange(6.0), next_observations=np.arange(6.0)))
    assert one_dimensional.obs_dim == 1


def test_terminal_row_without_successor_is_kept_and_finite() -> None:
    successors = fields()["next_observations"].copy()
    successors[2] = np.nan
    data = vf.Transitions(**fields(next_observations=successors))
    np.testing.assert_array_equal(data.next_observations[2], data.observations[2])


def test_flags_end_episodes_when_there_are_no_ids() -> None:
    data = vf.Transitions(**fields())
    assert data.episode_ids.tolist() == [0, 0, 0, 1, 1, 1]
    assert data.steps.tolist() == [0, 1, 2, 0, 1, 2]
    both = vf.Transitions(**fields(terminated=[1, 1, 0, 0, 0, 1], truncated=[1, 0, 0, 0, 0, 1]))
    assert both.episode_ids.tolist() == [0, 1, 2, 2, 2, 2]


def test_episodes_are_views_and_split_and_join() -> None:
    data = walk(0)
    parts = list(data.episodes())
    assert [len(p) for p in parts] == [9, 8, 7]
    assert all(np.shares_memory(p.observations, data.observations) for p in parts)
    joined = vf.concatenate([*parts, parts[0]])
    assert joined.n_episodes == 4  # equal ids of two parts stay two episodes
    np.testing.assert_array_equal(joined.rewards[:24], data.rewards)
    np.testing.assert_array_equal(data.initial_observations, data.observations[[0, 9, 17]])
    np.testing.assert_array_equal(data[[5, 3]].rewards, data.rewards[[5, 3]])
    np.testing.assert_array_equal(data[data.rewards > 0].observations, data.observations[data.rewards > 0])
    with pytest.raises(vf.InputError, match="at least one row"):
        data[data.rewards > 1e9]
    with pytest.raises(vf.InputError, match="1 of 2 parts have it"):
        vf.concatenate([data, data.replace(discounts=np.ones(24))])


def test_report_finds_a_sensor_fault_but_not_a_rare_flag() -> None:
    data = walk(0, (60,), ("truncated",))
    x = data.observations.copy()
    x[:, 2] = np.arange(60) == 30
    assert "values far outside" not in str(data.replace(observations=x).validate().problems)
    x[2, 0] = 1e6
    found = {p.what: p for p in data.replace(observations=x).validate().problems}
    far = found["values far outside the rest of their column"]
    assert (far.count, far.first) == (1, "row 2, column 0: 1e+06")


def test_any_order_of_rows_keeps_its_meaning() -> None:
    """Permuted, reversed or resampled rows are Transitions again, with the same returns."""
    data = walk(0, discounts=np.random.default_rng(0).uniform(size=24))
    values = data.monte_carlo_returns(0.9).values
    rng = np.random.default_rng(1)
    for rows in (rng.permutation(24), np.arange(24)[::-1], rng.integers(0, 24, size=200)):
        part = data[rows]
        if len(rows) == 24:
            np.testing.assert_allclose(part.monte_carlo_returns(0.9).values, values[rows])
            assert sorted(part.initial_rows) == sorted(np.flatnonzero(part.steps == 0))
            np.testing.assert_array_equal(
                np.sort(part.initial_observations, axis=0), np.sort(data.initial_observations, axis=0)
            )
        again = part.replace(rewards=part.rewards)
        vf.ValueFormer(gamma=0.9).fit(again)
        vf.solve(vf.kernels.RBF(1.0), data[::-1], gamma=0.9, step_size=0.01, num_layers=2)
    twice = data[[0, 0, 1, 1, 1]].validate().problems
    assert {p.what: p.count for p in twice}["rows with the same episode and step"] == 3


def test_interleaved_string_ids() -> None:
    data = vf.Transitions(**fields(episode_ids=["b", "a", "b", "a", "c", "c"], terminated=np.zeros(N), truncated=None))
    assert [e.rewards.tolist() for e in data.episodes()] == [[0, 2], [1, 3], [4, 5]]
    assert data.follower.tolist() == [2, 3, -1, -1, 5, -1]


def brute_returns(data: vf.Transitions, gamma: float) -> tuple[list[float], list[float]]:
    values, remaining = [], []
    for t in range(len(data)):
        total, weight, row = 0.0, 1.0, t
        while True:
            total += weight * float(data.rewards[row])
            own = 1.0 if data.discounts is None else float(data.discounts[row])
            weight *= 0.0 if data.terminated[row] else gamma * own
            following = [
                j
                for j in range(len(data))
                if data.episode_ids[j] == data.episode_ids[row] and data.steps[j] == data.steps[row] + 1
            ]
            if not following:
                break
            row = following[0]
        values.append(total)
        remaining.append(weight)
    return values, remaining


@given(st.integers(0, 10_000), st.sampled_from([0.0, 0.5, 0.97, 1.0]))
def test_monte_carlo_returns_equal_brute_force(seed: int, gamma: float) -> None:
    rng = np.random.default_rng(seed)
    lengths = tuple(rng.integers(1, 7, size=rng.integers(1, 5)))
    data = walk(seed, lengths, tuple(rng.choice(["terminated", "truncated", "open"], size=len(lengths))))
    data = data.replace(discounts=rng.uniform(size=len(data)))
    data = data[np.sort(rng.permutation(len(data))[: max(1, len(data) - 2)])]  # leaves gaps in steps
    values, remaining = data.monte_carlo_returns(gamma)
    expected = brute_returns(data, gamma)
    np.testing.assert_allclose(values, expected[0], rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(remaining, expected[1], rtol=1e-12, atol=1e-12)


def test_report_counts_and_names_what_is_odd() -> None:
    data = walk(0, (4, 1, 5), ("truncated", "terminated", "open"))
    x = np.column_stack([data.observations, np.ones(10), data.observations[:, 1]])
    y = np.column_stack([data.next_observations, np.ones(10), data.next_observations[:, 1]])
    y[6] += 1.0
    report = data.replace(observations=x, next_observations=y, rewards=np.zeros(10), dropped={"why": 3}).validate()
    assert (report.n_transitions, report.n_episodes, report.obs_dim) == (10, 3, 5)
    assert (report.terminated, report.truncated, report.unfinished) == (1, 1, 1)
    assert report.length == {"min": 1, "median": 4.0, "max": 5}
    found = {problem.what: problem for problem in report.problems}
    assert found["dropped rows: why"].count == 3
    assert found["episodes without an end flag"].first == "row 9"
    assert found["next observation differs from the following row's observation"].first == "row 6"
    assert found["constant observation columns"].first == "column 3"
    assert found["duplicate observation columns"].first == "column 4 = 1"
    assert found["all rewards are zero"].count == 10
    assert report.to_dict()["dropped"] == {"why": 3}
    assert walk(0).validate().problems == ()
