"""The frozen model: heads, gate, literal transformer, trust, intervals, diagnosis."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from sklearn.base import clone

import valueformer as vf
from tests.conftest import FULL, walk
from valueformer.bench import transfer
from valueformer.bench.domains import FIVE, Domain, domains, split
from valueformer.collection import Request
from valueformer.diagnosis_report import store, write_report
from valueformer.diagnostics import TEMPERATURES, evidence
from valueformer.features import Scaler
from valueformer.fitting import Columns
from valueformer.intervals import initial_value
from valueformer.kernels import RBF, ExpDot, Laplace, Matern, Softmax
from valueformer.mixing import fold_of_rows, gate
from valueformer.mrp import LinearQuadratic, boyan_chain, loop, sample
from valueformer.sources.simulated import text
from valueformer.storage import bundled, bundled_heads
from valueformer.transfer_report import write_report as write_transfer

LAYOUTS = ("pair", "residual", "trajectory", "two_group")
QUERIES = np.random.default_rng(5).normal(size=(9, 3))
HEADS = [
    vf.Head(RBF(0.3)),
    vf.Head(Laplace(1.0), "standardize"),
    vf.Head(Matern(1.0) + RBF(0.1) * 0.5),
    vf.Head(Softmax(RBF(1.0))),
]


def several(seed: int = 0, **fields: Any) -> vf.Transitions:
    return walk(seed, (6, 5, 7, 4), ("terminated", "truncated", "truncated", "terminated"), **fields)


# -- heads and gate ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("mix", ["context", "equal", "first"])
def test_the_literal_transformer_equals_the_solver(layout: Any, mix: Any) -> None:
    """Heads of several families and scalers, folds, ridge and sample weights: values, TD errors and mixing weights agree."""
    data = several(sample_weight=np.random.default_rng(1).uniform(0.2, 2.0, 22))
    options: dict[str, Any] = {"kernel": HEADS, "mix": mix, "gamma": 0.9, "num_layers": 5, "ridge": 0.05, "dtype": "float64"}
    fast = vf.ValueFormer(**options).fit(data)
    literal = vf.ValueFormer(**options, layout=layout).fit(data)
    assert literal.transformer_ is not None
    scale = np.abs(fast.predict(QUERIES)).max()
    np.testing.assert_allclose(literal.predict(QUERIES), fast.predict(QUERIES), rtol=0, atol=1e-11 * scale)
    np.testing.assert_allclose(literal.td_error_, fast.td_error_, rtol=1e-10)
    weights = literal.transformer_(literal._prompt(QUERIES)).weights.numpy()
    np.testing.assert_allclose(weights, fast.mixing_weights_, rtol=0, atol=1e-10)
    expected = {"equal": [0.25, 0.25, 0.25, 0.25, 0.0], "first": [1.0, 0.0, 0.0, 0.0, 0.0]}
    if mix in expected:
        np.testing.assert_array_equal(weights, expected[mix])


def test_the_literal_transformer_follows_the_guard() -> None:
    """Heads whose steps are taken back leave gaps in their own streams only."""
    rng = np.random.default_rng(3)
    data = vf.Transitions(
        observations=rng.normal(size=(20, 3)), next_observations=3 * rng.normal(size=(20, 3)), rewards=rng.normal(size=20),
        terminated=np.zeros(20), episode_ids=np.arange(20) // 4, steps=np.arange(20) % 4,
    )  # fmt: skip
    options: dict[str, Any] = {
        "kernel": [vf.Head(ExpDot(2.0)), vf.Head(RBF(1.0))],
        "gamma": 0.99,
        "num_layers": 30,
        "dtype": "float64",
    }
    fast, literal = vf.ValueFormer(**options).fit(data), vf.ValueFormer(**options, layout="pair").fit(data)
    assert fast.solution_.stats["rewinds"] > 0
    np.testing.assert_allclose(literal.predict(QUERIES), fast.predict(QUERIES), rtol=1e-8, atol=1e-10)


def test_each_head_is_kernel_td_on_its_own_and_the_mixture_their_sum() -> None:
    data = several()
    model = vf.ValueFormer(kernel=HEADS, gamma=0.9, dtype="float64").fit(data)
    alone = [
        vf.ValueFormer(kernel=h.kernel, scaler=h.scaler, gamma=0.9, dtype="float64").fit(data).predict(QUERIES) for h in HEADS
    ]
    mixed = np.tensordot(model.mixing_weights_, [*alone, np.full(len(QUERIES), model.level_)], axes=1)
    np.testing.assert_allclose(model.predict(QUERIES), mixed, rtol=1e-9)
    assert model.mixing_weights_.sum() == pytest.approx(1.0)


def test_left_out_errors_are_those_of_fits_without_the_fold() -> None:
    """A column of zero weights on a fold is the fit on the other episodes (same scaler), with its own level and step."""
    data = several()
    model = vf.ValueFormer(kernel=HEADS[:2], gamma=0.9, dtype="float64", step_size=0.05).fit(data)
    fold = fold_of_rows(data.episode_index)
    assert set(fold) == {0, 1, 2}
    assert model.left_out_ is not None
    for k in range(3):
        kept, left = data[np.flatnonzero(fold != k)], data[np.flatnonzero(fold == k)]
        scaled = [model._scale(h.scaler, kept.observations) for h in HEADS[:2]]
        assert len(scaled) == 2
        columns = Columns.of(np.ones((1, len(kept))), kept.rewards, kept.discount(0.9), "context")
        for h, head in enumerate(HEADS[:2]):
            own = kept.with_numbers(
                observations=scaled[h], next_observations=model._scale(head.scaler, kept.next_observations),
                rewards=kept.rewards - (1 - kept.discount(0.9)) * columns.levels[0], sample_weight=None,
            )  # fmt: skip
            both = np.concatenate([left.observations, left.next_observations])
            V = vf.solve(
                head.kernel, own, model._scale(head.scaler, both), gamma=0.9, step_size=0.05, num_layers=40
            ).values.numpy()
            V = V + columns.levels[0]
            td = left.rewards + left.discount(0.9) * V[len(left) :] - V[: len(left)]
            np.testing.assert_allclose(model.left_out_[fold == k, h] * model.reward_unit_, td, rtol=1e-9, atol=1e-12)


def test_gate_finds_the_good_head_and_never_leaves_the_simplex() -> None:
    rng = np.random.default_rng(0)
    good, bad = rng.normal(size=200) * 0.1, rng.normal(size=200)
    weights = gate(torch.tensor(np.column_stack([bad, good, bad * 2])), None, "context")
    assert float(weights[1]) > 0.9
    # errors that cancel: the best mixture is better than the best head
    noise = rng.normal(size=200)
    td = torch.tensor(np.column_stack([noise + 0.3 * bad, -noise + 0.3 * bad, 5 + 0 * bad]))
    weights = gate(td, None, "context")
    assert float((td @ weights).square().mean()) < 0.2 * float(td.square().mean(0).min())
    for scale in (1e-200, 1e-30, 1e30, 1e140):
        scaled = gate(td * scale, torch.rand(200, dtype=torch.float64), "context")
        assert float(scaled.sum()) == pytest.approx(1.0)
        assert bool((scaled >= 0).all())
    exact = gate(torch.tensor([[0.0, 1.0, 0.0], [0.0, 1.0, 0.0]]), None, "context")
    np.testing.assert_array_equal(exact.numpy(), [0.5, 0.0, 0.5])


def test_a_single_episode_is_cut_into_folds() -> None:
    np.testing.assert_array_equal(fold_of_rows(np.zeros(7, int)), [0, 0, 0, 1, 1, 2, 2])
    model = vf.ValueFormer(gamma=0.9).fit(walk(0, (24,), ("truncated",)))
    assert model.left_out_ is not None
    one = vf.ValueFormer(gamma=0.9).fit(walk(0)[:1])
    assert np.isfinite(one.predict(QUERIES)).all()


def test_heads_run_one_after_the_other_where_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    data = several()
    whole = vf.ValueFormer(gamma=0.9, dtype="float64", num_layers="auto").fit(data)
    monkeypatch.setattr("valueformer.fitting._SHARE", 1e-12)
    apart = vf.ValueFormer(gamma=0.9, dtype="float64", num_layers="auto").fit(data)
    assert len(apart.problem_._groups(apart.heads_, torch.float64)) == 6
    np.testing.assert_allclose(apart.predict(QUERIES), whole.predict(QUERIES), rtol=1e-3, atol=1e-3)


# -- frozen weights ---------------------------------------------------------------------------------------------------------


def test_the_default_model_is_in_the_package_and_never_changes() -> None:
    assert bundled() == ["default", "fast", "metaworld-pick-place"]
    before = {name: bundled_heads(name) for name in bundled()}
    assert [len(h) for h in before.values()] == [6, 2, 1]
    data = several()
    model = vf.ValueFormer.from_pretrained("default", gamma=0.9)
    plain = cast(vf.ValueFormer, clone(model)).fit(data)
    parameters = json.dumps([h.to_config() for h in cast(Any, model.kernel)])
    plain.predict(QUERIES)
    np.testing.assert_array_equal(plain.predict(QUERIES), vf.ValueFormer(gamma=0.9).fit(data).predict(QUERIES))
    assert json.dumps([h.to_config() for h in cast(Any, plain.kernel)]) == parameters
    assert plain.heads_ == bundled_heads("default") == before["default"]
    with pytest.raises(vf.InputError, match="model: expected default, fast, metaworld-pick-place or a folder"):
        vf.ValueFormer.from_pretrained("nonesuch")


def test_frozen_matrices_are_the_same_for_every_context() -> None:
    """With steps given, two contexts meet the same attention matrices: only the tokens differ."""
    options: dict[str, Any] = {"gamma": 0.9, "layout": "pair", "num_layers": 2, "step_size": 0.05}
    one, two = (vf.ValueFormer(**options).fit(several(seed)).transformer_ for seed in (0, 1))
    assert one is not None
    assert two is not None
    states = one.state_dict(), two.state_dict()
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert not list(one.parameters())  # nothing to train: buffers


def test_saved_models_with_heads_come_back(tmp_path: Path) -> None:
    for layout in ("fast", "pair"):
        model = vf.ValueFormer(kernel=HEADS, gamma=0.9, layout=cast(Any, layout), num_layers=4, n_replicates=7).fit(several())
        model.save(tmp_path / layout)
        loaded = vf.load_model(tmp_path / layout)
        np.testing.assert_array_equal(loaded.predict(QUERIES), model.predict(QUERIES))
        np.testing.assert_allclose(loaded.replicate_values(QUERIES), model.replicate_values(QUERIES), rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(loaded.check(QUERIES).far, model.check(QUERIES).far)
    model.save_pretrained(tmp_path / "frozen")
    assert vf.ValueFormer.from_pretrained(tmp_path / "frozen").kernel == tuple(HEADS)


# -- trust, intervals -------------------------------------------------------------------------------------------------------


def test_replicates_are_fits_to_drawn_episodes() -> None:
    """A replicate that draws each episode once is the fit itself; one that doubles an episode is a fit to it twice."""
    data = several()
    model = vf.ValueFormer(kernel="rbf", gamma=0.9, dtype="float64", n_replicates=3, step_size=0.05).fit(data)
    draws = np.array([[1, 1, 1, 1], [2, 0, 1, 1], [1, 1, 1, 1]])
    model.draws = lambda: draws  # type: ignore[method-assign]
    values = model.replicate_values(QUERIES)
    np.testing.assert_allclose(values[0], model.predict(QUERIES), rtol=1e-9)
    twice = vf.ValueFormer(kernel="rbf", gamma=0.9, dtype="float64", step_size=0.05 * 23 / 22).fit(
        data.replace(sample_weight=draws[1][data.episode_index].astype(float))
    )
    np.testing.assert_allclose(values[1], twice.predict(QUERIES), rtol=1e-9)


def test_standard_deviation_shrinks_with_more_episodes() -> None:
    process = loop()
    few, many = (vf.ValueFormer(gamma=0.9, kernel="rbf").fit(sample(process, n, 20, seed=3)) for n in (10, 80))
    states = process.features
    assert np.median(many.predict(states, return_std=True)[1]) < 0.6 * np.median(few.predict(states, return_std=True)[1])
    with pytest.raises(vf.InputError, match="at least two episodes"):
        vf.ValueFormer(gamma=0.9).fit(walk(0, (24,), ("truncated",))).predict(QUERIES, return_std=True)


SYSTEMS = {
    "boyan": boyan_chain(0),
    "loop": loop(),
    "linear-quadratic": LinearQuadratic(np.array([[0.9, 0.2], [-0.2, 0.8]]), np.eye(2), 0.3, 1.0),
}


@pytest.mark.parametrize("name", SYSTEMS)
def test_intervals_of_the_initial_value_cover_it(name: str) -> None:
    """A small slice of tools/coverage.py: 95 % intervals on 30 logs of 30 episodes; 24 or fewer hits have probability .003."""
    process, hits, logs = SYSTEMS[name], 0, 100 if FULL else 30
    truth = process.initial_value(0.9)
    for seed in range(logs):
        data = sample(process, 30, 20, seed)
        model = vf.ValueFormer(gamma=0.9, kernel="rbf", n_replicates=50).fit(data)
        found = initial_value(model, data, 0.95)
        hits += found["lower"] <= truth <= found["upper"]
    assert hits >= 0.83 * logs


def test_far_from_data_is_calibrated_and_sees_what_is_far() -> None:
    """States of unseen episodes are flagged about 1 time in 100, those of elsewhere always."""
    rng = np.random.default_rng(0)

    def episodes(count: int) -> vf.Transitions:
        return vf.concatenate([walk(int(rng.integers(10**9)), (25,), ("truncated",), dim=2) for _ in range(count)])

    rates = [float(vf.ValueFormer(gamma=0.9).fit(episodes(40)).check(episodes(40)).far.mean()) for _ in range(5)]
    assert 0.001 < np.mean(rates) < 0.03
    model = vf.ValueFormer(gamma=0.9).fit(episodes(40))
    assert model.check(np.full((3, 2), 100.0)).far.all()
    assert not model.check(model.context_).far.any()
    # far in one small coordinate only, which the isotropic view cannot see
    thin = episodes(40)
    flat = thin.replace(observations=thin.observations * [1.0, 0.05], next_observations=thin.next_observations * [1.0, 0.05])
    off = flat.observations[:5] + np.array([0.0, 3.0])
    assert vf.ValueFormer(gamma=0.9).fit(flat).check(off).far.all()


def test_values_beyond_what_rewards_can_add_up_to_are_flagged() -> None:
    data = several().replace(rewards=np.ones(22))
    model = vf.ValueFormer(gamma=0.9, initial_level=50.0, num_layers=1, kernel="rbf").fit(data)
    check = model.check(QUERIES * 1e3)  # far away V is the level, 50, where rewards of 1 add up to 10
    assert check.far.all()
    assert check.out_of_range.all()
    assert not vf.ValueFormer(gamma=0.9, kernel="rbf").fit(data).check(QUERIES).out_of_range.any()


def test_mean_level_follows_recorded_returns_where_few_steps_end() -> None:
    """theory 7.1's constant is far below the returns of episodes that end: each end weighs 1, each other step 1 - gamma."""
    data = walk(0, (60, 50, 70), ("terminated",) * 3).replace(rewards=np.ones(180))
    context, mean = (
        vf.ValueFormer(gamma=0.99, initial_level=cast(Any, level)).fit(data).level_ for level in ("context", "mean")
    )
    assert context < 4.0
    assert mean == pytest.approx(180 / (177 * 0.01 + 3))


# -- exact systems ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SYSTEMS)
def test_exact_values_solve_bellman_and_match_monte_carlo(name: str) -> None:
    process, gamma = SYSTEMS[name], 0.8
    rng = np.random.default_rng(0)
    states = process.start(4000, rng)
    values = process.value(states, gamma)
    assert values.mean() == pytest.approx(process.initial_value(gamma), abs=5 * values.std() / 4000**0.5)
    total, weight, running = np.zeros(4000), 1.0, np.ones(4000, bool)
    x = states
    for _ in range(60):
        x, rewards, ended = process.step(x, rng)
        total += weight * rewards * running
        running &= ~ended
        weight *= gamma
    assert total.mean() == pytest.approx(values.mean(), abs=5 * (total - values).std() / 4000**0.5)


def test_sampled_logs_are_aligned() -> None:
    data = sample(loop(), 12, 15, seed=1)
    assert data.n_episodes == 12
    for episode in data.episodes():
        np.testing.assert_array_equal(episode.next_observations[:-1], episode.observations[1:])
        assert episode.terminated[-1] != episode.truncated[-1]
    with pytest.raises(vf.InputError, match="a chain that ends, or a gamma < 1"):
        boyan_chain(0).value(np.zeros((1, 1)), 1.0)
    with pytest.raises(vf.InputError, match="a value that is finite"):
        SYSTEMS["linear-quadratic"].value(np.zeros((1, 2)), 1.0)


# -- diagnosis --------------------------------------------------------------------------------------------------------------


def test_evidence_is_the_gaussian_log_density() -> None:
    from scipy.stats import multivariate_normal

    data = several()
    scaler = Scaler(np.zeros(3), np.ones(3))
    parts = evidence([(1.0, RBF(0.5), scaler)], data, data.rewards, 0.9)
    s, s_next = torch.tensor(data.observations), torch.tensor(data.next_observations)
    d = 0.9 * ~data.terminated
    k = RBF(0.5)
    psi = (
        k(s, s).numpy()
        - d * k(s, s_next).numpy()
        - d[:, None] * k(s_next, s).numpy()
        + np.outer(d, d) * k(s_next, s_next).numpy()
    )
    scale, best = np.trace(psi) / 22, -np.inf
    for noise in (1e-4, 1e-3, 1e-2, 1e-1, 1.0):
        C = psi + (noise + 1e-10) * scale * np.eye(22)
        variance = data.rewards @ np.linalg.solve(C, data.rewards) / 22
        best = max(best, multivariate_normal.logpdf(data.rewards, np.zeros(22), variance * C))
    assert parts.sum() == pytest.approx(best, rel=1e-9)


def test_diagnosis_finds_the_temperature_and_the_cost_of_a_wrong_one() -> None:
    """Values of a narrow kernel: a far too wide frozen kernel costs, the default mixture hardly does."""
    data = vf.load("sample:plate-slide-v3/low")[:800]
    wide = vf.diagnose(data, vf.ValueFormer(gamma=0.9, kernel=RBF(400.0), dtype="float64"))
    good = vf.diagnose(data, vf.ValueFormer(gamma=0.9))
    ratio, regret, cost = (cast(dict[str, float], x) for x in (wide.left_out_ratio, wide.evidence_regret, good.left_out_ratio))
    assert ratio["value"] > 3.0
    assert ratio["lower"] > 1.2
    assert wide.compatible is False
    assert regret["value"] > 0.5
    assert good.family == "Laplace"
    assert cost["value"] < 1.1
    assert good.compatible is True
    assert good.trust["level"] == "trust"
    assert len(good.left_out) == len(good.evidence) == 9


def test_diagnose_on_the_command_line(run, tmp_path: Path) -> None:
    outcome = run(
        "diagnose", "sample:button-press-v3/low", "--gamma", "0.9", "--model", "fast", "--out", tmp_path / "d", "--json"
    )
    assert outcome.code == 0
    document = json.loads(outcome.out)
    assert document["trust"]["level"] == "trust"
    assert {p.name for p in (tmp_path / "d").iterdir()} == {"diagnosis.json", "diagnosis.png", "diagnosis.html"}
    assert (tmp_path / "d" / "diagnosis.png").stat().st_size > 20_000
    assert run("weights").code == 0
    assert json.loads(run("weights", "--json").out)["weights"]["fast"] == [
        "Laplace(temperature=1.0), isotropic", "Laplace(temperature=1.0), standardize",
    ]  # fmt: skip
    assert run("evaluate", "sample:button-press-v3/low", "--temperature", "1").code == 2
    assert run("evaluate", "sample:button-press-v3/low", "--model", "nonesuch").code == 2
    assert run("bench", "transfer", "--domains", "seven").code == 2


@pytest.mark.parametrize("data", [walk(0, (24,), ("truncated",)), walk(0)[:1], walk(0).replace(rewards=np.zeros(24))])
def test_diagnosis_of_meagre_logs(data: vf.Transitions, tmp_path: Path) -> None:
    found = vf.diagnose(data, vf.ValueFormer(gamma=0.9))
    store(found, tmp_path)
    write_report(tmp_path)
    assert found.trust["level"] != "trust"
    assert (tmp_path / "diagnosis.png").stat().st_size > 5_000


# -- transfer benchmark -----------------------------------------------------------------------------------------------------


def test_transfer_benchmark_on_one_domain_and_its_resumption(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Costs are held-out errors over those of kernels fitted one by one; a finished context is not computed again."""
    pytest.importorskip("gymnasium")
    monkeypatch.setenv("VALUEFORMER_CACHE", str(tmp_path / "cache"))
    request = Request(scheme="gymnasium", name="Pendulum-v1", episodes=8, policy="random", max_steps=40)
    domain = Domain("Pendulum-v1", "random", "0", request, True)
    monkeypatch.setattr(transfer, "domains", lambda group: [domain])
    monkeypatch.setattr("valueformer.bench.domains.CONTEXT", 160)
    kept = tmp_path / "store.jsonl"
    result = transfer.run("gymnasium", ["fast"], seeds=[0], store=kept)
    row = result["contexts"][0]
    context, test = split(vf.load(f"gymnasium:{text(domain.request(0))}"))
    assert (len(context), len(test), row["n"], row["held_out"]) == (160, 160, 160, 160)
    for j, temperature in enumerate(TEMPERATURES[2:5], start=2):
        plain = vf.ValueFormer(kernel=RBF(temperature), gamma=0.9, step_size="safe", initial_level=0.0, dtype="float64").fit(
            context
        )
        equal = vf.ValueFormer(kernel=RBF(temperature), gamma=0.9, dtype="float64").fit(context)
        for name, model in (("plain", plain), ("equal", equal)):
            assert row[name][j] == pytest.approx(np.mean(model.values_and_td_errors(test)[1] ** 2), rel=1e-6)
    own = vf.ValueFormer(kernel="fast", gamma=0.9).fit(context)
    assert row["models"]["fast"]["td_error"] == pytest.approx(np.mean(own.values_and_td_errors(test)[1] ** 2), rel=1e-4)
    summary = result["summary"]["fast"]["all"]
    assert summary["cost (b) median"] == pytest.approx(row["models"]["fast"]["td_error"] / min(row["equal"]))
    with kept.open("a") as file:
        file.write('{"gamma": 0.9, "half a li')  # where it was interrupted
    monkeypatch.setattr(transfer, "_context", None)  # nothing is left to compute
    assert transfer.run("gymnasium", ["fast"], seeds=[0], store=kept)["contexts"] == result["contexts"]
    with pytest.raises(vf.InputError, match=r"contexts at gamma 0\.5"):
        transfer.run("gymnasium", ["fast"], seeds=[0], gamma=0.5, store=kept)
    files = write_transfer(result, tmp_path / "out")
    assert {Path(f).name for f in files.values()} == {"transfer.json", "transfer.png", "transfer.html"}


def test_every_domain_is_named_once_and_half_were_not_looked_at() -> None:
    pytest.importorskip("metaworld")
    found = list(domains("all"))
    assert len({(d.name, d.policy, d.noise) for d in found}) == len(found) == 50 * 3 + 18
    assert sum(not d.chosen_on for d in found) >= len(found) / 3
    assert {d.name for d in domains("five")} == set(FIVE)
    assert len(list(domains("gymnasium"))) == 18
