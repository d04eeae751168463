"""Collecting, converting, and the whole way from a simulator to a value."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

import valueformer as vf
from tests.conftest import FULL
from valueformer import collection
from valueformer.collection import simulators
from valueformer.collection.rollout import generator
from valueformer.sources import samples
from valueformer.transitions import Transitions

FIELDS = ("observations", "next_observations", "rewards", "terminated", "truncated", "actions", "steps")
TASKS = ("reach-v3", "button-press-v3", "drawer-open-v3")


def equal(a: Transitions, b: Transitions) -> None:
    """Assert equality to the bit, dtypes included; ids may be called otherwise."""
    for name in FIELDS:
        x, y = getattr(a, name), getattr(b, name)
        assert x.dtype == y.dtype, name
        assert x.tobytes() == y.tobytes(), name
    np.testing.assert_array_equal(a.episode_index, b.episode_index)


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Small logs of two Gymnasium environments and three MetaWorld tasks."""
    folder = tmp_path_factory.mktemp("logs")
    vf.collect("gymnasium:CartPole-v1", folder / "cartpole", episodes=12, seed=3)
    vf.collect("gymnasium:Pendulum-v1", folder / "pendulum", episodes=4, seed=3)
    for task in TASKS:
        vf.collect(f"metaworld:{task}", folder / task, episodes=6, noise="low", goals=2, max_steps=60)
    return {path.name: path for path in folder.iterdir()}


@pytest.mark.parametrize("name", ["cartpole", "pendulum", *TASKS])
def test_from_a_simulator_to_values(run, logs: dict[str, Path], name: str, tmp_path: Path) -> None:
    out = ("--out", tmp_path / "out") if name == "pendulum" else ()  # drawing takes seconds
    outcome = run("evaluate", logs[name], "--gamma", "0.9", "--json", *out)
    assert outcome.code == 0
    result = json.loads(outcome.out)
    assert result["status"] in ("converged", "max_layers")
    assert result["heldout"]["n_folds"] == {"cartpole": 10, "pendulum": 4}.get(name, 6)
    # a random policy leaves little to tell: rewards are all 1 in the one, and swings aimless in the other
    assert result["heldout"]["tdc"] < (1.0 if name in TASKS else 1.2)
    assert not out or (tmp_path / "out" / "report.png").stat().st_size > 10_000


def test_cartpole_is_what_gymnasium_plays(logs: dict[str, Path]) -> None:
    import gymnasium

    data = vf.load(logs["cartpole"])
    assert data.terminated.sum() == 12
    assert (data.rewards == 1).all()
    environment = gymnasium.make("CartPole-v1")
    for number, part in enumerate(data.episodes()):
        seed = int.from_bytes(generator("reset", "CartPole-v1", 3, number).bytes(4), "little") >> 1
        state, _ = environment.reset(seed=seed)
        assert part.actions is not None
        for row in range(len(part)):
            np.testing.assert_array_equal(part.observations[row], state)
            state, _, terminated, _, _ = environment.step(int(part.actions[row, 0]))
            np.testing.assert_array_equal(part.next_observations[row], state)
            assert terminated == part.terminated[row]


def test_goals_take_turns_and_noise_stays_in_range(logs: dict[str, Path]) -> None:
    data = vf.load(logs["reach-v3"])
    assert (data.n_episodes, data.obs_dim, data.observations.dtype) == (6, 39, np.float32)
    starts = data.initial_observations[:, -3:]  # the goal
    np.testing.assert_array_equal(starts[::2], np.repeat(starts[:1], 3, axis=0))
    np.testing.assert_array_equal(starts[1::2], np.repeat(starts[1:2], 3, axis=0))
    assert not np.array_equal(starts[0], starts[1])
    assert data.actions is not None
    assert np.abs(data.actions).max() <= 1
    assert data.truncated.sum() == 6
    # the simulator repeats the previous frame in columns 18 to 35
    np.testing.assert_array_equal(data.next_observations[:, 18:36], data.observations[:, :18])


def test_collecting_again_gives_the_bundled_samples() -> None:
    """Every bit of a published file follows from its name, whatever has been collected since."""
    import metaworld  # noqa: F401

    entry = next(e for e in samples.manifest()["files"] if e["file"] == "button-press-v3_low.npz")
    request = collection.Request(
        scheme="metaworld", name="button-press-v3", episodes=10, noise="low", seed=entry["goal_seed"], max_steps=200
    )
    data = vf.load("sample:button-press-v3/low")
    for episode in (7, 2):  # in any order
        found = collection.play(request, episode)
        rows = data.episode_ids == episode
        np.testing.assert_array_equal(found.observations[""][:-1], data.observations[rows])
        np.testing.assert_array_equal(found.actions[""], data.actions[rows])  # pyright: ignore[reportOptionalSubscript]
        np.testing.assert_array_equal(found.rewards.astype(np.float32), data.rewards[rows])


def test_the_log_does_not_depend_on_workers(logs: dict[str, Path], tmp_path: Path) -> None:
    vf.collect("metaworld:reach-v3", tmp_path / "two", episodes=6, noise="low", goals=2, max_steps=60, workers=2)
    equal(vf.load(tmp_path / "two"), vf.load(logs["reach-v3"]))
    with (
        h5py.File(tmp_path / "two" / "data" / "main_data.hdf5") as a,
        h5py.File(logs["reach-v3"] / "data" / "main_data.hdf5") as b,
    ):
        np.testing.assert_array_equal(a["episode_5/infos/success"][()], b["episode_5/infos/success"][()])  # pyright: ignore


@pytest.mark.parametrize("name", ["cartpole", "reach-v3"])
def test_minari_reads_what_is_collected_and_converted(logs: dict[str, Path], name: str, tmp_path: Path) -> None:
    minari = pytest.importorskip("minari")
    data = vf.load(logs[name])
    vf.export(data, "minari", tmp_path / "again")
    for folder in (logs[name], tmp_path / "again"):
        dataset = minari.MinariDataset(folder / "data")
        parts = list(dataset.iterate_episodes())
        assert (len(parts), int(dataset.total_steps)) == (data.n_episodes, len(data))
        for part, own in zip(parts, data.episodes(), strict=True):
            np.testing.assert_array_equal(part.observations[:-1], own.observations)
            np.testing.assert_array_equal(part.observations[1:], own.next_observations)
            np.testing.assert_array_equal(part.rewards, own.rewards)
            np.testing.assert_array_equal(part.terminations, own.terminated)
            np.testing.assert_array_equal(part.truncations, own.truncated)


@pytest.mark.parametrize("name", ["cartpole", "pendulum", "reach-v3"])
@pytest.mark.parametrize("form", ["npz", "parquet", "minari"])
def test_round_trips_are_equal_to_the_bit(run, logs: dict[str, Path], name: str, form: str, tmp_path: Path) -> None:
    data = vf.load(logs[name])
    assert data.observations.dtype == np.float32
    outcome = run("convert", logs[name], "--to", form, "--out", tmp_path / "there", "--json")
    assert outcome.code == 0
    assert json.loads(outcome.out)["n_transitions"] == len(data)
    equal(vf.load(tmp_path / "there"), data)
    outcome = run("convert", tmp_path / "there", "--to", "parquet", "--out", tmp_path / "back.parquet")
    assert outcome.code == 0
    equal(vf.load(tmp_path / "back.parquet"), data)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["back.parquet", "there"]


def test_npz_and_parquet_keep_everything(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    n = 20
    data = vf.Transitions(
        observations=rng.standard_normal((n, 2)), next_observations=rng.standard_normal((n, 2)), rewards=rng.standard_normal(n),
        terminated=np.arange(n) % 10 == 9, truncated=np.arange(n) == 4, actions=rng.standard_normal((n, 1)),
        next_actions=rng.standard_normal((n, 1)), discounts=rng.random(n), episode_ids=[f"run {i // 10 if i > 4 else 'a'}" for i in range(n)],
        steps=[*range(5), *range(7, 12), *range(10)], sample_weight=rng.random(n), obs_names=("angle", "speed"),
    )  # fmt: skip
    for form in ("npz", "parquet"):
        vf.export(data, form, tmp_path / form)
        back = vf.load(tmp_path / form)
        equal(back, data)
        for name in ("next_actions", "discounts", "sample_weight", "episode_ids"):
            np.testing.assert_array_equal(getattr(back, name), getattr(data, name))
        assert back.obs_names == data.obs_names
        assert back.unused == ()
    with pytest.raises(vf.InputError, match="discounts: expected a log without them"):
        vf.export(data, "minari", tmp_path / "minari")
    plain = data.replace(discounts=None, sample_weight=None, next_actions=None, steps=None)
    with pytest.raises(vf.InputError, match="next observation to be the following row's"):
        vf.export(plain, "minari", tmp_path / "minari")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["npz", "parquet"]


def test_load_collects_into_a_cache_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setenv("VALUEFORMER_CACHE", str(tmp_path / "cache"))
    name = "metaworld:reach-v3?noise=high&episodes=2&max_steps=15"
    first = vf.load(name)
    assert len(first) == 30
    assert f"collecting 2 episodes of metaworld:reach-v3 into {tmp_path}" in capsys.readouterr().err.replace("\n", "")
    equal(vf.load(name), first)
    assert capsys.readouterr().err == ""
    assert len(list((tmp_path / "cache").iterdir())) == 1
    with pytest.raises(vf.InputError, match="keys episodes, policy, noise"):
        vf.load("metaworld:reach-v3?noises=high")


POLICY = """
import numpy as np
def pushes(observation):
    return [float(np.clip(-observation[2], -2, 2))]
def shakes(observation, generator):
    return generator.uniform(-2, 2, 1)
def crashes(observation):
    raise RuntimeError("no")
def nothing(observation):
    return [float("nan")]
def wide(observation):
    return [0.0, 0.0]
def three(a, b, c):
    return a
"""


def test_policies_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_policy.py").write_text(POLICY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    simulator = "gymnasium:Pendulum-v1"
    vf.collect(simulator, "pushes", episodes=2, policy="own_policy:pushes", max_steps=20)
    data = vf.load("pushes")
    assert data.actions is not None
    np.testing.assert_allclose(data.actions[:, 0], np.clip(-data.observations[:, 2], -2, 2), rtol=1e-6)
    vf.collect(simulator, "noisy", episodes=2, policy="own_policy:pushes", max_steps=20, noise=0.25)
    noisy = vf.load("noisy")
    assert noisy.actions is not None
    off = noisy.actions[:, 0] - np.clip(-noisy.observations[:, 2], -2, 2)
    assert 0.2 < off.std() < 0.8  # 0.25 of the half range, 2
    for workers in (1, 2):
        vf.collect(simulator, f"shakes{workers}", episodes=3, policy="own_policy:shakes", max_steps=20, workers=workers)
    equal(vf.load("shakes1"), vf.load("shakes2"))
    refused = {
        "crashes": "RuntimeError: no",
        "nothing": "1 finite numbers per action",
        "wide": "1 finite numbers per action",
        "three": "a function of .observation. or .observation, generator., got 3 arguments",
        "absent": "AttributeError",
    }
    for name, message in refused.items():
        with pytest.raises(vf.InputError, match=message):
            vf.collect(simulator, "refused", episodes=1, policy=f"own_policy:{name}", max_steps=20)
    assert not Path("refused").exists()


def test_an_interrupted_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    """Ctrl-C after the first episodes: one line, exit code 130, nothing half-written; the same command completes the log."""
    command = [sys.executable, "-c", "from valueformer.cli import main; main()", "collect", "gymnasium:Pendulum-v1"]
    command += ["--episodes", "150", "--out", str(tmp_path / "log"), "--seed", "5", "--max-steps", "30"]
    partial = tmp_path / ".log.partial"
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while len(list(partial.glob("episode_*.npz"))) < 5 and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    kept = len(list(partial.glob("episode_*.npz")))
    assert (process.returncode, out) == (130, "")
    assert err.strip().splitlines()[-1].startswith("interrupted")
    assert 5 <= kept < 150
    assert not (tmp_path / "log").exists()
    with pytest.raises(vf.InputError, match="an interrupted run of another one"):
        vf.collect("gymnasium:Pendulum-v1", tmp_path / "log", episodes=151, seed=5, max_steps=30)
    written = {path: path.stat().st_mtime_ns for path in partial.glob("episode_*.npz")}
    seen: list[int] = []
    request = collection.Request(scheme="gymnasium", name="Pendulum-v1", episodes=150, seed=5, max_steps=30)
    collection.run(request, tmp_path / "log", progress=lambda done, total: seen.append(done))
    assert seen[0] == len(written)  # those were kept
    assert not partial.exists()
    vf.collect("gymnasium:Pendulum-v1", tmp_path / "at-once", episodes=150, seed=5, max_steps=30)
    equal(vf.load(tmp_path / "log"), vf.load(tmp_path / "at-once"))


BAD = {
    "no scheme": (("CartPole-v1",), "expected gymnasium:ENV_ID or metaworld:TASK"),
    "no name": (("gymnasium:",), "expected gymnasium:ENV_ID or metaworld:TASK"),
    "no such environment": (("gymnasium:CartPole-v99",), "an environment that gymnasium.make knows"),
    "no such task": (("metaworld:reach-v4",), "one of the tasks"),
    "no episodes": (("gymnasium:CartPole-v1", "--episodes", "0"), "--episodes: expected a whole number >= 1"),
    "goals": (("gymnasium:CartPole-v1", "--goals", "2"), "only metaworld: tasks have goals"),
    "too many goals": (("metaworld:reach-v3", "--goals", "20"), "at most the number of episodes"),
    "noise": (("metaworld:reach-v3", "--noise", "loud"), "--noise: expected high, medium, low or a number >= 0"),
    "negative noise": (("metaworld:reach-v3", "--noise", "-1"), "--noise"),
    "noise on random": (("gymnasium:Pendulum-v1", "--noise", "low"), "no noise on random actions"),
    "scripted elsewhere": (("gymnasium:CartPole-v1", "--policy", "scripted"), "a metaworld: task"),
    "policy": (("gymnasium:CartPole-v1", "--policy", "magic"), "'random', 'scripted' or module:function"),
    "no such module": (("gymnasium:CartPole-v1", "--policy", "no_such:thing"), "ModuleNotFoundError"),
    "workers": (("gymnasium:CartPole-v1", "--workers", "0"), "--workers"),
    "seed": (("gymnasium:CartPole-v1", "--seed", "-1"), "--seed: expected a whole number >= 0"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_requests_are_one_line_and_leave_nothing(run, name: str, tmp_path: Path) -> None:
    arguments, message = BAD[name]
    outcome = run("collect", *arguments, "--out", tmp_path / "log")
    assert outcome.code == 2
    assert message in outcome.err
    assert outcome.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_an_existing_folder_is_never_overwritten(run, logs: dict[str, Path], tmp_path: Path) -> None:
    before = sorted(os.listdir(logs["cartpole"] / "data"))
    for command in (("collect", "gymnasium:CartPole-v1"), ("convert", logs["pendulum"], "--to", "minari")):
        outcome = run(*command, "--out", logs["cartpole"])
        assert (outcome.code, "a new or empty folder" in outcome.err) == (2, True)
    assert sorted(os.listdir(logs["cartpole"] / "data")) == before
    for arguments, message in (
        (("--to", "csv", "--out", tmp_path / "x"), "--to: expected one of npz, parquet, minari"),
        (("--to", "npz", "--out", tmp_path), "expected a new file, got a folder"),
        (("--to", "npz", "--out", logs["pendulum"] / "data" / "metadata.json" / "x.npz"), "is not one"),
    ):
        outcome = run("convert", logs["cartpole"], *arguments)
        assert (outcome.code, message in outcome.err) == (2, True), outcome.err


def test_inspect_draws_what_it_says(run, logs: dict[str, Path], tmp_path: Path) -> None:
    outcome = run("inspect", logs["pendulum"], "--out", tmp_path / "seen")
    assert outcome.code == 0
    assert {p.name for p in (tmp_path / "seen").iterdir()} == {"inspection.json", "inspection.png", "inspection.html"}
    document = json.loads((tmp_path / "seen" / "inspection.json").read_text())
    data = vf.load(logs["pendulum"])
    drawn = document["picture"]
    np.testing.assert_allclose(drawn["episodes"]["return"], [part.rewards.sum() for part in data.episodes()])
    assert drawn["episodes"]["length"] == [200] * 4
    assert drawn["episodes"]["end"] == ["truncated"] * 4
    assert sum(drawn["rewards"]["count"]) == len(data)
    np.testing.assert_allclose(drawn["features"]["quantiles"][2], np.median(data.observations, axis=0), rtol=1e-5)
    assert (tmp_path / "seen" / "inspection.png").stat().st_size > 10_000


def test_every_task_has_a_policy_that_plays() -> None:
    """All fifty in the full run, five of them otherwise."""
    names = simulators.tasks()
    assert len(names) == 50
    for name in names if FULL else names[::11]:
        found = collection.play(collection.Request(scheme="metaworld", name=name, episodes=1, noise=0.3, max_steps=5), 0)
        assert found.observations[""].shape == (6, 39)
        assert np.isfinite(found.rewards).all()
        assert np.abs(found.actions[""]).max() <= 1


OTHERS = """
import sys
import numpy as np
def edits(observation):
    observation -= 1000
    return 0
def says(observation):
    print("hello")
    return 1
def half(observation):
    return 0.7
def leaves(observation):
    sys.exit(7)
def greedy(observation, epsilon=0.1):
    assert epsilon == 0.1
    return 1
"""


def test_policies_that_do_what_they_should_not(run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "other_policy.py").write_text(OTHERS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    simulator = "gymnasium:CartPole-v1"
    vf.collect(simulator, "edited", episodes=2, policy="other_policy:edits")
    assert np.abs(vf.load("edited").observations).max() < 10  # what was seen, not what the policy made of it
    vf.collect(simulator, "greedy", episodes=1, policy="other_policy:greedy")
    outcome = run("collect", simulator, "--episodes", "1", "--policy", "other_policy:says", "--out", "said", "--json")
    assert json.loads(outcome.out)["n_episodes"] == 1
    for name, message in (("half", "an action in Discrete"), ("leaves", "SystemExit: 7")):
        outcome = run("collect", simulator, "--episodes", "1", "--policy", f"other_policy:{name}", "--out", "x")
        assert (outcome.code, message in outcome.err, outcome.err.count("\n")) == (2, True, 1)


def test_an_interrupted_run_is_not_mixed_with_another_version_of_the_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import importlib

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "edited_policy.py").write_text("def act(observation):\n    return 0\n")
    request = collection.Request(scheme="gymnasium", name="CartPole-v1", policy="edited_policy:act", episodes=3)

    def stop(done: int, total: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        collection.run(request, tmp_path / "log", progress=stop)
    (tmp_path / "edited_policy.py").write_text("def act(observation):\n    return 1  # longer than it was\n")
    importlib.reload(sys.modules["edited_policy"])
    with pytest.raises(vf.InputError, match="an interrupted run of another one"):
        collection.run(request, tmp_path / "log")


def test_devices_and_odd_paths_are_left_alone(run, logs: dict[str, Path], tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for out in (tmp_path / "pipe", tmp_path / ("a" * 300)):
        outcome = run("convert", logs["cartpole"], "--to", "npz", "--out", out)
        assert (outcome.code, outcome.err.count("\n")) == (2, 1)
    assert (tmp_path / "pipe").is_fifo()
    assert run("convert", logs["cartpole"], "--to", "parquet", "--out", str(tmp_path / "bad\udcff.parquet")).code in (0, 2)
    outcome = run("inspect", logs["cartpole"], "--max-episode-steps", "0")
    assert (outcome.code, "max_episode_steps" in outcome.err) == (2, True)
    outcome = run("collect", "gymnasium:CartPole-v1", "--seed", "99999999999999999999", "--out", tmp_path / "x")
    assert (outcome.code, "--seed" in outcome.err) == (2, True)
