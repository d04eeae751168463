"""The command line: answers, JSON, exit codes, one clear line for every bad input, nothing half-written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import valueformer as vf
from tests.conftest import walk


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return save(tmp_path / "log.npz", walk(0, (9, 8, 7)))


def save(path: Path, data: vf.Transitions, **changes: Any) -> Path:
    names = ("observations", "next_observations", "rewards", "terminated", "truncated", "episode_ids")
    arrays: dict[str, Any] = {name: getattr(data, name) for name in names} | changes
    np.savez(path, **arrays)
    return path


KEYS = {
    "data", "estimand", "gamma", "num_layers", "kernel", "heads", "trust", "status", "message",
    "context_td_error", "heldout", "initial_value", "seconds", "files",
}  # fmt: skip


def test_evaluate_json_holds_the_documented_keys_and_nothing_else_is_printed(run, log: Path, tmp_path: Path) -> None:
    pd.DataFrame(np.zeros((2, 3)), columns=["obs_0", "obs_1", "obs_2"]).to_csv(tmp_path / "q.csv", index=False)
    outcome = run("evaluate", log, "--gamma", "0.9", "--json", "--query", tmp_path / "q.csv", "--out", tmp_path / "out")
    assert outcome.code == 0
    result = json.loads(outcome.out)
    assert set(result) >= KEYS | {"queries"}
    assert set(result["data"]) == {"n_transitions", "n_episodes", "obs_dim", "terminated", "truncated"}
    assert set(result["heldout"]) == {"td_error", "td_ratio", "td_ratio_constant", "tdc", "explained_variance", "n_folds"}
    assert len(result["context_td_error"]) == result["num_layers"] == 40
    initial = result["initial_value"]
    assert set(initial) == {"mean", "lower", "upper", "level", "predicted_mean", "per_episode"}
    assert initial["lower"] < initial["mean"] < initial["upper"]
    assert set(result["trust"]) == {"level", "reason", "remedy"}
    asked_about = result["queries"]
    assert set(asked_about) == {"value", "std", "distance", "far", "out_of_range"}
    assert asked_about["value"][0] == asked_about["value"][1]
    written = {"queries.parquet", "report.html", "report.png", "result.json", "values.parquet"}
    assert {p.name for p in (tmp_path / "out").iterdir()} == written
    assert set(result["files"].values()) == {str(p) for p in (tmp_path / "out").iterdir()}
    assert json.loads((tmp_path / "out" / "result.json").read_text())["files"] == result["files"]
    asked = pd.read_parquet(tmp_path / "out" / "queries.parquet")
    assert list(asked) == ["obs_0", "obs_1", "obs_2", "value", "std", "distance", "far", "out_of_range"]
    np.testing.assert_allclose(asked["value"], asked_about["value"], rtol=1e-6)
    columns = pd.read_parquet(tmp_path / "out" / "values.parquet")
    assert list(columns)[:6] == ["episode_id", "step", "value", "td_error", "advantage", "heldout_value"]
    assert len(columns) == 24


def test_evaluate_for_people_ends_with_a_verdict(run, log: Path) -> None:
    outcome = run("evaluate", log, "--gamma", "0.9")
    assert outcome.code == 0
    assert "behaviour policy" in " ".join(outcome.out.split())
    assert outcome.out.rstrip().endswith(".")
    assert "explained variance" in outcome.out


@pytest.mark.parametrize("layout", ["pair", "residual", "trajectory", "two_group"])
def test_layouts_agree_with_the_fast_path(run, log: Path, layout: str) -> None:
    arguments = ("evaluate", log, "--gamma", "0.9", "--json", "--kernel", "laplace", "--temperature", "1.5")
    fast, literal = (json.loads(run(*arguments, "--layout", name).out) for name in ("fast", layout))
    assert literal["layout"] == layout
    assert "temperature=1.5" in literal["heads"][0]["kernel"]
    np.testing.assert_allclose(literal["context_td_error"], fast["context_td_error"], rtol=1e-3)
    assert literal["heldout"]["tdc"] == pytest.approx(fast["heldout"]["tdc"], rel=1e-3)


def test_a_singular_closed_form_is_exit_code_one_and_a_ridge_mends_it(run, tmp_path: Path) -> None:
    data = vf.concatenate([walk(0), walk(0)])
    path = save(tmp_path / "twice.npz", data.replace(rewards=data.rewards + np.arange(48) * 0.1))
    singular = run("evaluate", path, "--algorithm", "lstd", "--gamma", "0.9", "--json")
    assert (singular.code, json.loads(singular.out)["status"]) == (1, "singular")
    mended = run("evaluate", path, "--algorithm", "lstd", "--ridge", "0.01", "--gamma", "0.9", "--dtype", "float64", "--json")
    assert (mended.code, json.loads(mended.out)["status"]) == (0, "converged")


def test_divergence_is_exit_code_one(run, log: Path) -> None:
    outcome = run("evaluate", log, "--step-size", "50", "--json")
    assert outcome.code == 1
    result = json.loads(outcome.out)
    assert result["status"] == "diverged"
    assert "Do not rely" in result["verdict"]
    assert result["trust"]["level"] == "doubt"


def test_inspect_samples_version(run, log: Path) -> None:
    report = json.loads(run("inspect", log, "--json").out)
    assert {"source", "format", "n_transitions", "n_episodes", "obs_dim", "action", "terminated", "truncated",
            "unfinished", "dropped", "problems", "reward", "length"} == set(report)  # fmt: skip
    assert set(report["reward"]) == {"min", "max", "mean", "sd"}
    assert set(report["length"]) == {"min", "median", "max"}
    assert "constant observation columns" in run("inspect", "sample:button-press-v3/low").out
    assert "Nothing odd found" in run("inspect", log).out
    assert len(json.loads(run("samples", "--json").out)["samples"]) == 15
    assert "sample:shelf-place-v3/medium" in run("samples").out
    assert run("--version").out.startswith("valueformer 0.")


def test_bench_forward_measures_ratios(run, tmp_path: Path) -> None:
    outcome = run("bench", "forward", "--length", "300", "--dim", "5", "--layers", "8", "--json", "--out", tmp_path / "b.json")
    assert outcome.code == 0
    result = json.loads(outcome.out)
    assert json.loads((tmp_path / "b.json").read_text()) == result
    assert result["ratio"]["recompute / fast"] == pytest.approx(result["seconds"]["recompute"] / result["seconds"]["fast"])
    assert run("bench", "forward", "--length", "50", "--layers", "2").code == 0


def bad_cases(folder: Path) -> dict[str, list[str | Path]]:
    data = walk(0)
    nan = data.observations.copy()
    nan[3, 1] = np.nan
    infinite = data.rewards.copy()
    infinite[4] = np.inf
    good = save(folder / "good.npz", data)
    (folder / "text.npz").write_text("this is not an archive\n")
    (folder / "noise.bin").write_bytes(bytes(range(256)))
    np.savez(folder / "objects.npz", observations=np.array([{"a": 1}], dtype=object))
    np.savez(folder / "q2.npz", observations=np.zeros((3, 2)))
    (folder / "file").write_text("x")
    taken = folder / "taken"
    (taken / "report.html").mkdir(parents=True)
    link = folder / "link"
    link.symlink_to(folder / "gone")
    return {
        "missing file": ["evaluate", folder / "none.npz"],
        "unknown format": ["evaluate", folder / "noise.bin"],
        "text named npz": ["evaluate", folder / "text.npz"],
        "pickled objects": ["evaluate", folder / "objects.npz"],
        "unequal lengths": ["evaluate", save(folder / "a.npz", data, rewards=data.rewards[:-1])],
        "NaN observation": ["evaluate", save(folder / "b.npz", data, observations=nan)],
        "infinite reward": ["evaluate", save(folder / "c.npz", data, rewards=infinite)],
        "no transitions": [
            "evaluate",
            save(
                folder / "d.npz",
                data,
                **{
                    k: np.zeros((0, 3)) if "obs" in k else np.zeros(0)
                    for k in ("observations", "next_observations", "rewards", "terminated", "truncated", "episode_ids")
                },
            ),
        ],
        "queries of another dimension": ["evaluate", good, "--query", folder / "q2.npz"],
        "missing query file": ["evaluate", good, "--query", folder / "none.csv"],
        "gamma above one": ["evaluate", good, "--gamma", "1.2"],
        "gamma below zero": ["evaluate", good, "--gamma", "-0.1"],
        "gamma no number": ["evaluate", good, "--gamma", "much"],
        "gamma nan": ["evaluate", good, "--gamma", "nan"],
        "negative temperature": ["evaluate", good, "--temperature", "-1"],
        "unknown kernel": ["evaluate", good, "--kernel", "cubic"],
        "unknown scaler": ["evaluate", good, "--scaler", "robust"],
        "unknown layout": ["evaluate", good, "--layout", "pairs"],
        "no layers": ["evaluate", good, "--layers", "0"],
        "step size": ["evaluate", good, "--step-size", "brisk"],
        "negative step": ["evaluate", good, "--step-size", "-1"],
        "out is a file": ["evaluate", good, "--out", folder / "file"],
        "out below a file": ["evaluate", good, "--out", folder / "file" / "deeper"],
        "unknown option": ["evaluate", good, "--gama", "0.9"],
        "unknown command": ["evaluat", good],
        "no argument": ["evaluate"],
        "inspect missing": ["inspect", folder / "none.npz"],
        "unknown sample": ["inspect", "sample:pick-up"],
        "layers that are no ascii digits": ["evaluate", good, "--layers", "²"],
        "too many layers": ["evaluate", good, "--layers", "1000000000000"],
        "tiny temperature": ["evaluate", good, "--temperature", "1e-300"],
        "name too long": ["evaluate", folder / ("x" * 300)],
        "query name too long": ["evaluate", good, "--query", folder / ("x" * 300)],
        "out name too long": ["evaluate", good, "--out", folder / ("x" * 300)],
        "no such user": ["evaluate", "~nobody-of-that-name/x"],
        "empty name": ["evaluate", ""],
        "query is a folder": ["evaluate", good, "--query", folder],
        "out holds a folder of a file's name": ["evaluate", good, "--out", taken],
        "out is a dangling link": ["evaluate", good, "--out", link],
        "no benchmark": ["bench"],
        "bench length": ["bench", "forward", "--length", "one"],
    }


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str | Path]]:
    return bad_cases(tmp_path_factory.mktemp("bad"))


def test_bad_input_is_one_clear_line_and_exit_two(run, cases: dict[str, list[str | Path]], tmp_path: Path) -> None:
    for name, arguments in cases.items():
        extra = (
            ["--out", tmp_path / "out"]
            if arguments[:1] == ["evaluate"] and "--out" not in arguments and len(arguments) > 1
            else []
        )
        outcome = run(*arguments, *extra)
        assert outcome.code == 2, name
        assert outcome.out == "", name
        lines = outcome.err.strip().splitlines()
        assert len(lines) == 1, (name, outcome.err)
        assert lines[0].startswith("error: "), name
        assert "Traceback" not in outcome.err, name
        assert len(lines[0]) > 20, name
        assert not (tmp_path / "out").exists(), name


def test_unwritable_out_is_refused_before_the_work(run, log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write anywhere
    outcome = run("evaluate", log, "--out", tmp_path / "locked" / "out")
    assert outcome.code == 2
    assert "a folder that can be written to" in outcome.err
    assert not (tmp_path / "locked").exists()


def test_odd_names_of_files_are_shown_as_they_are(run, tmp_path: Path) -> None:
    folder = tmp_path / "x["
    folder.mkdir()
    for name in ("[red]a.npz", "b].npz", os.fsdecode(b"caf\xe9.npz")):
        path = save(folder / name, walk(0))
        assert run("inspect", path).code == 0
        outcome = run("evaluate", path, "--layers", "2", "--out", tmp_path / "out")
        assert outcome.code == 0, outcome.err
        assert name.split(".")[0][:2] in "".join(outcome.out.split())
        assert (tmp_path / "out" / "report.html").exists()


def test_an_interrupt_is_clean(run, log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("valueformer.evaluation.evaluate", interrupt)
    outcome = run("evaluate", log, "--out", tmp_path / "out")
    assert (outcome.code, outcome.out, outcome.err) == (130, "", "interrupted\n")
    assert not (tmp_path / "out").exists()


def test_the_installed_command_runs_as_a_process(log: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", "from valueformer.cli import main; main()"]
    done = subprocess.run([*command, "evaluate", str(log), "--json"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["status"] in ("converged", "max_layers")
    assert done.stderr == ""
    broken = subprocess.run([*command, "inspect", str(tmp_path / "none")], capture_output=True, text=True, check=False)
    assert (broken.returncode, broken.stdout, broken.stderr.count("\n")) == (2, "", 1)


def test_without_arguments_the_help_is_shown(run) -> None:
    outcome = run()
    assert (outcome.code, outcome.err) == (0, "")
    assert "Usage:" in outcome.out
    assert "convert" in outcome.out
