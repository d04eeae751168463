"""Evaluating a log: folds without leakage, metrics, verdicts, stored results, pictures."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

import valueformer as vf
from tests.conftest import walk
from valueformer.metrics import HeldOut
from valueformer.report import write_report
from valueformer.results import plain, read_stored, to_json
from valueformer.trust import judge


def goal_walk(episodes: int = 8, length: int = 15, dim: int = 2) -> vf.Transitions:
    """Noisy walks towards the origin, reward = closeness: a value that states explain."""
    rng = np.random.default_rng(0)
    states, successors = [], []
    for _ in range(episodes):
        x = rng.uniform(-3, 3, size=dim)
        for _ in range(length):
            states.append(x)
            x = 0.9 * x + 0.02 * rng.normal(size=dim)
            successors.append(x)
    states, successors = np.array(states), np.array(successors)
    last = np.tile(np.arange(length) == length - 1, episodes)
    return vf.Transitions(
        observations=states,
        next_observations=successors,
        rewards=np.exp(-np.square(successors).sum(1)),
        terminated=np.zeros(len(states)),
        truncated=last,
        source="walks",
    )


@pytest.fixture(scope="module")
def result() -> vf.Evaluation:
    queries = np.array([[0.0, 0.0], [3.0, 3.0]])
    return vf.evaluate(goal_walk(), vf.ValueFormer(gamma=0.7, dtype="float64", kernel="rbf"), queries=queries)


def test_held_out_numbers_equal_folds_done_by_hand(result: vf.Evaluation) -> None:
    data = goal_walk()
    held = np.empty(len(data))
    for episode in range(8):
        out = data.episode_ids == episode
        model = vf.ValueFormer(gamma=0.7, dtype="float64", kernel="rbf").fit(data[~out])
        held[out] = model.predict(data[out])
    np.testing.assert_allclose(result.table["heldout_value"], held, rtol=1e-12)
    assert result.heldout.n_folds == 8
    full = vf.ValueFormer(gamma=0.7, dtype="float64", kernel="rbf").fit(data)
    np.testing.assert_array_equal(result.table["value"], full.predict(data))
    assert result.initial_value["predicted_mean"] == pytest.approx(full.predict(data.initial_observations).mean())
    # recorded returns, and V where the record stops after 15 steps
    returns = np.array([sum(0.7**t * r for t, r in enumerate(data.rewards[15 * e : 15 * e + 15])) for e in range(8)])
    returns += 0.7**15 * full.predict(data.next_observations[14::15])
    np.testing.assert_allclose(result.initial_value["per_episode"], returns, rtol=1e-9)
    assert result.initial_value["mean"] == pytest.approx(returns.mean())
    assert result.queries is not None
    np.testing.assert_array_equal(result.queries["value"], full.predict([[0.0, 0.0], [3.0, 3.0]]))
    advantage = result.table["advantage"]
    assert result.heldout.td_error == pytest.approx(np.mean(advantage**2))
    assert np.mean(result.table["td_error"] ** 2) == pytest.approx(result.context_td_error[-1])


def test_values_are_right_on_a_system_whose_value_is_known(result: vf.Evaluation) -> None:
    """The noise is small: V(x) is nearly the discounted sum along the deterministic contraction."""
    data = goal_walk(episodes=30)
    model = vf.ValueFormer(gamma=0.7, num_layers=200).fit(data)
    x = data.observations
    truth = sum(0.7**t * np.exp(-np.sum((0.9 ** (t + 1) * x) ** 2, axis=1)) for t in range(100))
    assert np.sqrt(np.mean((model.predict(x) - truth) ** 2)) < 0.08 * np.std(truth)
    assert result.heldout.tdc is not None
    assert result.heldout.tdc < 0.2
    assert result.heldout.explained_variance is not None
    assert result.heldout.explained_variance > 0.8
    assert result.trust["level"] == "trust"


def test_shuffled_rows_give_the_same_answers() -> None:
    data = goal_walk()
    rows = np.random.default_rng(0).permutation(len(data))
    model = vf.ValueFormer(gamma=0.7, dtype="float64", kernel="rbf")  # folds follow the order of episodes
    straight, mixed = vf.evaluate(data, model), vf.evaluate(data[rows], model)
    np.testing.assert_allclose(
        np.sort(mixed.initial_value["per_episode"]), np.sort(straight.initial_value["per_episode"]), rtol=1e-6
    )
    np.testing.assert_allclose(mixed.table["value"], straight.table["value"][rows], rtol=1e-6, atol=1e-6)


def test_no_leakage_between_folds() -> None:
    """Rewards of a held-out episode must not reach its own held-out values."""
    data = goal_walk()
    changed = data.replace(rewards=np.where(data.episode_ids == 3, 1000.0, data.rewards))
    model = vf.ValueFormer(gamma=0.7, dtype="float64")
    before, after = vf.evaluate(data, model).table, vf.evaluate(changed, model).table
    own = data.episode_ids == 3
    np.testing.assert_allclose(after["heldout_value"][own], before["heldout_value"][own], rtol=1e-9)
    assert np.abs(after["heldout_value"][~own] - before["heldout_value"][~own]).max() > 1.0


def test_more_than_ten_episodes_make_ten_folds() -> None:
    assert vf.evaluate(goal_walk(episodes=13), vf.ValueFormer(gamma=0.7)).heldout.n_folds == 10


def test_one_episode_has_no_held_out_numbers() -> None:
    result = vf.evaluate(goal_walk(episodes=1), vf.ValueFormer(gamma=0.7))
    assert result.heldout == HeldOut(None, None, None, None, None, 0)
    assert "single episode" in result.verdict
    assert plain(result.table["heldout_value"])[0] is None


def test_the_given_model_stays_unfitted_and_progress_is_reported() -> None:
    model, seen = vf.ValueFormer(gamma=0.7), []
    vf.evaluate(goal_walk(episodes=3), model, progress=lambda done, total: seen.append((done, total)))
    assert not hasattr(model, "solution_")
    assert seen == [(1, 5), (2, 5), (3, 5), (4, 5), (5, 5)]


def held(tdc: float | None, ev: float | None) -> HeldOut:
    return HeldOut(1.0, 0.5, 0.5, tdc, ev, 5)


@pytest.mark.parametrize(
    ("heldout", "status", "level", "words"),
    [
        (held(0.2, 0.9), "diverged", "doubt", "the computation ended diverged (why)"),
        (held(1.2, 0.9), "max_layers", "doubt", "they say little beyond one average number"),
        (held(0.2, 0.1), "max_layers", "doubt", "they explain 10% of the variance"),
        (held(None, None), "max_layers", "caution", "a constant explains this log exactly"),
        (held(0.5, 0.5), "max_layers", "caution", "they explain 50% of the variance"),
        (held(0.6, None), "max_layers", "caution", "no return is recorded long enough"),
        (held(0.2, None), "max_layers", "trust", "0.20 times that of the best constant"),
        (held(0.2, 0.9), "converged", "trust", "they explain 90% of the variance"),
        (HeldOut(None, None, None, None, None, 0), "max_layers", "caution", "with a single episode nothing could be held out"),
    ],
)
def test_verdict_in_plain_words(heldout: HeldOut, status: str, level: str, words: str) -> None:
    """Three levels, the reason, and a remedy wherever the level is not the best one."""
    near = {"mean_value": 10.0, "mean_return": 12.0, "return_spread": 1.0}
    found = judge(walk(0), heldout, gamma=0.9, status=status, message="why", level=near)
    assert (found.level, words in found.reason) == (level, True)
    assert "level is off" not in found.reason
    far_off = {"mean_value": -1.3, "mean_return": -35.0, "return_spread": 1.0}
    off = judge(walk(0), heldout, gamma=0.9, status=status, message="why", level=far_off)
    if level == "trust" or (level == "caution" and (heldout.tdc or 1.0) < 0.97):
        assert off.level == "caution"
        assert "their level is off: they average -1.3 where recorded returns average -35" in off.reason
        assert "initial_level='mean'" in off.remedy
    else:
        assert off == found


def test_verdict_names_what_the_log_itself_shows() -> None:
    poor = held(1.0, 0.0)

    def remedy(data: vf.Transitions, gamma: float = 0.9) -> str:
        return judge(data, poor, gamma=gamma, status="max_layers").remedy

    assert remedy(walk(0)) == "more episodes (there are 3)"
    cut_short = walk(0, ends=("truncated", "truncated", "truncated"))
    assert "gamma 0.999 is too close to 1 for episodes of 9 steps that never end" in remedy(cut_short, 0.999)
    rng = np.random.default_rng(0)
    chain = rng.integers(0, 6, size=121).astype(float)
    ids = vf.Transitions(
        observations=chain[:-1], next_observations=chain[1:], rewards=rng.normal(size=120), terminated=np.zeros(120),
        truncated=np.arange(120) % 30 == 29, episode_ids=np.arange(120) // 30,
    )  # fmt: skip
    assert remedy(ids) == "states look like ids, one-hot them"
    counter = ids.replace(observations=np.arange(120.0) % 30, next_observations=np.arange(120.0) % 30 + 1)
    assert "ids" not in remedy(counter)  # whole numbers, but a step is a step
    far = judge(walk(0), held(0.2, 0.9), gamma=0.9, status="max_layers", far=0.5)
    assert (far.level, "far from all other episodes" in far.reason) == ("caution", True)
    out = judge(walk(0), held(0.2, 0.9), gamma=0.9, status="max_layers", out_of_range=0.5)
    assert (out.level, "what such rewards can add up to" in out.reason) == ("doubt", True)


def reaching(seed: int = 0, episodes: int = 20) -> vf.Transitions:
    """Episodes that walk to a goal and end there, reward 1 on arrival: the residual rises before it falls."""
    rng = np.random.default_rng(seed)
    rows: list[tuple[np.ndarray, np.ndarray, bool]] = []
    for _ in range(episodes):
        x, done = rng.uniform(-1, 1, 2), False
        while not done:
            following = x - 0.08 * x / max(float(np.linalg.norm(x)), 1e-9) + 0.05 * rng.normal(size=2)
            done = bool(np.linalg.norm(following) < 0.12)
            rows.append((x, following, done))
            x = following
    s, s_next, ends = (np.array(column) for column in zip(*rows, strict=True))
    return vf.Transitions(observations=s, next_observations=s_next, rewards=ends.astype(float), terminated=ends)


def test_the_guard_lets_a_passing_rise_of_the_residual_through() -> None:
    for seed in range(3):
        result = vf.evaluate(reaching(seed), vf.ValueFormer(gamma=0.99, kernel="rbf"))
        assert result.heldout.tdc is not None
        assert result.heldout.tdc < 0.8
        assert result.heldout.explained_variance is not None
        assert result.heldout.explained_variance > 0.4
        assert max(result.context_td_error) > 4.0 * result.initial_td_error  # more than twice, in rms


def test_folds_that_fell_back_to_the_start_are_counted() -> None:
    stuck = vf.evaluate(reaching(), vf.ValueFormer(gamma=0.999, num_layers=3, step_size="safe"))
    assert "in 10 of 10 folds no layer improved on the start: try more layers" in stuck.message


def test_the_level_is_compared_with_recorded_returns(result: vf.Evaluation) -> None:
    returns, remaining = goal_walk().monte_carlo_returns(0.7)
    kept = remaining <= 0.05
    assert result.level["rows"] == kept.sum()
    assert result.level["mean_return"] == pytest.approx(returns[kept].mean())
    assert result.level["mean_value"] == pytest.approx(result.table["heldout_value"][kept].mean())
    assert repr(result).startswith("Evaluation(walks, gamma=0.7, status='max_layers': Trust these values")


def test_zero_rewards_verdict() -> None:
    assert "rewards are all zero: V is zero" in vf.evaluate(walk(0).replace(rewards=np.zeros(24))).verdict


def test_json_is_strict_and_undefined_is_null() -> None:
    text = to_json({"a": np.float32("nan"), "b": [np.inf, np.int64(3)], "c": np.array([1.0, np.nan]), "d": (True, None, "x")})
    assert json.loads(text) == {"a": None, "b": [None, 3], "c": [1.0, None], "d": [True, None, "x"]}


def test_stored_results_and_pictures(result: vf.Evaluation, tmp_path: Path) -> None:
    files = result.save(tmp_path) | write_report(tmp_path)
    assert {Path(f).name for f in files.values()} == {p.name for p in tmp_path.iterdir()}
    document, columns = read_stored(tmp_path)
    assert document["verdict"] == result.verdict
    np.testing.assert_array_equal(columns["heldout_value"], result.table["heldout_value"])
    assert list(columns)[:6] == ["episode_id", "step", "value", "td_error", "advantage", "heldout_value"]
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "report.png").stat().st_size > 20_000
    page = (tmp_path / "report.html").read_text()
    assert result.verdict.split(":")[0] in page
    markup = re.sub(r"<script[^>]*>.*?</script>", "", page, flags=re.DOTALL)
    assert "<table>" in markup
    assert not re.search(r"<(script|link|img|iframe)\b|https?://", markup)  # self-contained: works offline
    assert not re.search(r"<script[^>]+src=", page)


def test_pictures_of_meagre_results(tmp_path: Path) -> None:
    """One episode, no variance, one transition: still a picture and a page."""
    for name, data in {
        "one": goal_walk(episodes=1),
        "zero": walk(0).replace(rewards=np.zeros(24)),
        "row": walk(0)[:1],
        "ids": walk(0).replace(episode_ids=np.repeat(["<b>a</b>", "b", "c"], [9, 8, 7]), source="<script>x</script>"),
    }.items():
        vf.evaluate(data).save(tmp_path / name)
        write_report(tmp_path / name)
        assert (tmp_path / name / "report.png").stat().st_size > 5_000
    assert "<script>x</script>" not in (tmp_path / "ids" / "report.html").read_text()


def test_pictures_of_long_episodes_and_big_endian_ids(tmp_path: Path) -> None:
    n = 2400
    x = np.cumsum(np.random.default_rng(0).normal(size=n + 1))
    data = vf.Transitions(
        observations=x[:-1], next_observations=x[1:], rewards=np.ones(n), terminated=np.zeros(n), truncated=np.arange(n) % 600 == 599,
        episode_ids=np.repeat([3, 5, 7, 9], 600).astype(">i4"),
    )  # fmt: skip
    vf.evaluate(data, vf.ValueFormer(num_layers=2)).save(tmp_path)
    write_report(tmp_path)
    assert (tmp_path / "report.html").exists()


def test_a_single_episode_is_not_called_held_out(tmp_path: Path) -> None:
    vf.evaluate(goal_walk(episodes=1)).save(tmp_path)
    write_report(tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert "fitted to it" in page
    assert "that the context left out" not in page


def test_a_robot_log_is_evaluated_well() -> None:
    """Bundled pick-place, low noise, the fast model; the README holds the default model's figures, and is tested."""
    model = vf.ValueFormer.from_pretrained("fast", gamma=0.9)
    result = vf.evaluate(vf.load("sample:pick-place-v3/low"), model, intervals=False)
    assert result.heldout.td_ratio == pytest.approx(0.0145, rel=0.05)
    assert result.heldout.tdc == pytest.approx(0.0676, rel=0.05)
    assert result.heldout.explained_variance == pytest.approx(0.956, abs=0.005)
