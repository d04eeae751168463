"""Pretraining: what trains is the solver itself, tasks are what they say, and a run that is killed goes on to the bit."""

from __future__ import annotations

import csv
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import valueformer as vf
from tests.conftest import FULL, walk
from valueformer import mrp
from valueformer.feature_prompt import FeaturePrompt
from valueformer.kernels import RBF, Laplace, Linear, Matern
from valueformer.pretraining import run as running
from valueformer.pretraining.batch import GAP, KernelBatch, Targets, WindowBatch
from valueformer.pretraining.checkpoints import Checkpoint
from valueformer.pretraining.config import PretrainConfig
from valueformer.pretraining.emergence import Examination
from valueformer.pretraining.losses import loss
from valueformer.pretraining.models import KernelTD, MatrixTransformer, linear_td_weights
from valueformer.pretraining.recipes import RECIPES
from valueformer.pretraining.tasks import LogTasks, generator, parse
from valueformer.pretraining.training import Share, Training
from valueformer.solvers import StepSchedule

SMALL = PretrainConfig(
    tasks=("mrp:gp?dim=2&length=20",),
    validation=("mrp:lq?dim=3&length=20",),
    context_length=30,
    queries=10,
    num_layers=4,
    tasks_per_update=3,
    updates=12,
    validate_every=4,
    validation_tasks=3,
    checkpoint_every=5,
    heads=(vf.Head(RBF(0.5)), vf.Head(Laplace(1.0), "standardize")),
)
FIELDS = ("observations", "next_observations", "rewards", "terminated", "truncated", "episode_ids")
MATRICES = dataclasses.replace(
    RECIPES["boyan"], models=2, context_length=12, windows=8, num_layers=2, updates=12, validate_every=4, checkpoint_every=5
)


def run_through(config: PretrainConfig, until: int | None = None) -> Training:
    training = Training(config)
    training.run(until=until)
    return training


# -- what trains ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("unit", ["plain", "safe", "fast"])
@pytest.mark.parametrize("train", [("steps", "temperatures"), ("steps", "mixing"), ("metric", "temperatures")])
def test_what_trains_computes_what_the_frozen_estimator_computes(unit: Any, train: Any) -> None:
    heads = (vf.Head(RBF(0.5)), vf.Head(Laplace(1.0), "standardize"), vf.Head(Matern(2.0)))
    config = dataclasses.replace(SMALL, heads=heads, dtype="float64", step_unit=unit, train=train, guard=unit == "fast")
    source = parse(("mrp:gp?dim=3&length=20",))
    tasks = [source.draw(generator(1, i), 30, 10, 0.9) for i in range(3)]
    model = KernelTD(config, 3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    batch = KernelBatch.of(tasks, heads, 0.9, model.gated, torch.float64)
    values, following = model.values(batch)
    for task, v, v_next in zip(tasks, values, following, strict=True):
        frozen = model.frozen().set_params(dtype="float64", guard=config.guard).fit(task.context)
        for own, states in ((v, task.queries.observations), (v_next, task.queries.next_observations)):
            expected = frozen.predict(states) / frozen.reward_unit_
            assert np.abs(own.detach().numpy() - expected).max() <= 1e-11 * np.abs(expected).max()


@pytest.mark.parametrize(("unit", "tolerance"), [("safe", 1e-4), ("plain", 1e-4), ("fast", 0.1)])
def test_gradients_equal_differences(unit: Any, tolerance: float) -> None:
    """Steps, temperatures and metric, through the gate and through steps in units of the context's own operator.

    The gradient of sigma_max holds its singular vector fixed, which is exact only where power iteration has converged.
    """
    config = dataclasses.replace(SMALL, dtype="float64", train=("steps", "temperatures", "metric"), step_unit=unit)
    source = parse(SMALL.tasks)
    batch = KernelBatch.of([source.draw(generator(2), 30, 10, 0.9)], config.heads, 0.9, True, torch.float64)
    model = KernelTD(config, 2)

    def value() -> torch.Tensor:
        return model.values(batch)[0].square().sum()

    value().backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        flat, gradient = parameter.data.view(-1), parameter.grad.view(-1)
        for i in range(min(3, len(flat))):
            numbers = []
            for sign in (1, -1):
                flat[i] += sign * 1e-5
                numbers.append(float(value().detach()))
                flat[i] -= sign * 1e-5
            assert float(gradient[i]) == pytest.approx((numbers[0] - numbers[1]) / 2e-5, rel=tolerance, abs=1e-7)


def wang_loss(
    P: np.ndarray, Q: np.ndarray, layers: int, rows: dict[str, np.ndarray], n: int, windows: int, gamma: float
) -> float:
    """Wang et al.'s loss by direct loops: Z (2 d + 1, n + 1), a query column, -Z[-1, -1]; window w + 1 bootstraps window w."""

    def predict(start: int, query: np.ndarray) -> float:
        columns = [np.concatenate([rows["s"][j], gamma * rows["next"][j], [rows["r"][j]]]) for j in range(start, start + n)]
        Z = np.stack([*columns, np.concatenate([query, np.zeros(len(query) + 1)])], axis=1)
        mask = np.diag([1.0] * n + [0.0])
        for _ in range(layers):
            Z = Z + P @ Z @ mask @ Z.T @ Q @ Z / n
        return -Z[-1, -1]

    total = 0.0
    for w in range(windows):
        j = w + n + GAP
        error = rows["r"][j] + gamma * predict(w + 1, rows["next"][j]) - predict(w, rows["s"][j])
        total += error**2
    return total / windows


@pytest.mark.parametrize("activation", ["linear", "literal"])
def test_the_windows_loss_is_wang_s_by_direct_loops(activation: str) -> None:
    config = dataclasses.replace(MATRICES, dtype="float64", num_layers=3, gain=1.0)
    model = MatrixTransformer(config, 4)
    walks = parse(("mrp:boyan",)).walks([generator(0, i) for i in range(2)], 1, 12 + GAP + 8, 0.9)
    batch = WindowBatch.of(walks, 0, 12, 8, torch.float64)
    if activation == "literal":  # the same stack with tokens and attention matrices
        zero = torch.zeros_like(batch.queries[:, :1])
        asked = torch.stack([torch.cat([batch.queries, zero], 1), torch.cat([zero, batch.successors], 1)], dim=2)
        values = model.transformer()(FeaturePrompt.of(batch.contexts, asked)).query_values
        v, v_next = values[:, :-1, 0], values[:, 1:, 1]
    else:
        v, v_next = model.values(batch)
    found = loss("td", v, v_next, batch.targets, False)
    matrices = [dict(model.named_parameters())[name][:, 0] for name in ("value", "product")]
    for i, (P, Q) in enumerate(zip(*matrices, strict=True)):
        rows = {"s": walks.states[i, 0], "next": walks.next_states[i, 0], "r": walks.rewards[i, 0]}
        expected = wang_loss(P.detach().numpy(), Q.detach().numpy(), 3, rows, 12, 8, 0.9)
        assert float(found[i].detach()) == pytest.approx(expected, rel=1e-11)


def test_constructed_linear_attention_is_batch_td_and_the_solver() -> None:
    """Q = [-I, I; 0, 0], P = alpha e_y e_y^T: layer for layer TD with step alpha / n (Wang et al., theorem 1)."""
    data, queries = walk(3), np.random.default_rng(0).normal(size=(5, 3))
    config = dataclasses.replace(MATRICES, dtype="float64", models=1, num_layers=4)
    model = MatrixTransformer(config, 3)
    P, Q = torch.zeros(7, 7, dtype=torch.float64), torch.zeros(7, 7, dtype=torch.float64)
    P[-1, -1], Q[:3, :3], Q[:3, 3:6] = 0.3, -torch.eye(3), torch.eye(3)
    with torch.no_grad():
        model.value.copy_(P)  # pyright: ignore[reportCallIssue]
        model.product.copy_(Q)  # pyright: ignore[reportCallIssue]
    prompt = FeaturePrompt.from_transitions(data, queries, gamma=0.9)
    output = model.transformer(0)(prompt)
    expected = vf.solve(Linear(), data, queries, gamma=0.9, step_size=0.3 / len(data), num_layers=4, record=True)
    assert expected.trace is not None
    assert (output.trace - expected.trace).abs().max() <= 1e-13 * expected.values.abs().max()
    assert torch.allclose(output.td_error, expected.td_error, rtol=1e-12)
    rows = prompt.tokens[None, None, : len(data)]
    weights = linear_td_weights(rows.mT @ rows / len(data), torch.tensor([0.3], dtype=torch.float64), 4)
    assert np.allclose(queries @ weights[0, 0].numpy(), expected.values.numpy(), rtol=1e-12)


@pytest.mark.parametrize("activation", ["relu", "softmax", "exp"])
def test_other_activations_and_factored_untied_matrices_train(activation: Any) -> None:
    config = dataclasses.replace(MATRICES, activation=activation, tied=False, factored=True, updates=2, learning_rate=0.01)
    training = Training(config)
    before = {name: p.detach().clone() for name, p in training.learner.named_parameters()}
    training.run()
    assert set(before) == {"value", "key", "query"}
    assert all(not torch.equal(p, before[name]) and bool(p.isfinite().all()) for name, p in training.learner.named_parameters())
    assert before["value"].shape == (2, 2, 9, 9)  # models, layers, channels


def test_td_emerges_in_attention_that_was_not_told_of_it() -> None:
    config = dataclasses.replace(RECIPES["boyan"], tied=False, models=2, updates=600, validate_every=600, learning_rate=3e-3)
    training = Training(config)
    before = training.examination.compare(training.learner, training.td_step.detach())  # type: ignore[union-attr, arg-type]
    training.run()
    row = training.history[-1]
    assert np.abs(before.implicit_weight_similarity).max() < 0.4
    assert min(row["implicit_weight_similarity"]) > 0.7
    assert min(row["sensitivity_similarity"]) > 0.7
    assert max(row["value_difference"]) < 0.7 * before.value_difference.min()


def test_td_is_exactly_like_td() -> None:
    """The measures themselves: a transformer whose weights are TD's has similarities 1 and value difference 0."""
    config = dataclasses.replace(MATRICES, models=1, dtype="float64", context_length=30, num_layers=3)
    examination = Examination.of(parse(("mrp:loop",)), n=30, gamma=0.9, seed=0, chains=8)
    assert examination is not None
    model = MatrixTransformer(config, 4)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.value[0, 0, -1, -1] = 0.7  # pyright: ignore[reportIndexIssue]
        model.product[0, 0, :4, :8] = torch.cat([-torch.eye(4), torch.eye(4)], dim=1)  # pyright: ignore[reportIndexIssue]
    found = examination.compare(model, torch.tensor([0.7], dtype=torch.float64))
    assert found.value_difference[0] < 1e-25
    assert found.implicit_weight_similarity[0] == pytest.approx(1.0, abs=1e-12)
    assert found.sensitivity_similarity[0] == pytest.approx(1.0, abs=1e-12)


# -- tasks ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [mrp.boyan_chain, mrp.random_loop, mrp.drawn_value, mrp.linear_quadratic])
def test_values_of_random_processes_agree_with_monte_carlo(make: Any) -> None:
    process = make(3)
    data, states = mrp.sample_with_states(process, 800, 60, 1)
    returns = data.rewards.reshape(800, 60) @ 0.9 ** np.arange(60)
    difference = returns - process.value(states, 0.9).reshape(800, 60)[:, 0]
    bias = 0.9**60 * np.abs(process.value(states, 0.9)).max()
    assert abs(difference.mean()) <= 4.0 * difference.std() / np.sqrt(800) + bias
    start = process.value(process.start(5_000, np.random.default_rng(0)), 0.9)
    assert abs(start.mean() - process.initial_value(0.9)) <= 4.0 * start.std() / np.sqrt(5_000)


def test_a_representable_value_is_linear_in_the_features() -> None:
    for make in (mrp.boyan_chain, mrp.random_loop):
        chain = make(0, representable=True)
        values = chain.value(np.arange(10.0)[:, None], 0.9)
        fit = np.linalg.lstsq(chain.features, values, rcond=None)[0]
        assert np.abs(chain.features @ fit - values).max() < 1e-12


@pytest.mark.parametrize("name", ["boyan", "loop", "gp", "lq"])
def test_walks_are_consecutive_and_their_values_exact(name: str) -> None:
    walks = parse((f"mrp:{name}?dim=3",)).walks([generator(5, i) for i in range(3)], 2, 60, 0.9)
    assert walks.states.shape == (3, 2, 60, 3)
    assert np.array_equal(walks.next_states[:, :, :-1], walks.states[:, :, 1:])  # none of these ends
    assert (walks.discounts == 0.9).all()
    again = parse((f"mrp:{name}?dim=3",)).walks([generator(5, 1)], 2, 60, 0.9)
    assert np.array_equal(walks.states[1], again.states[0])  # a task depends on its own numbers alone
    if name in ("boyan", "loop"):  # V(s) = r + gamma E V(s'), so the TD errors of the true V have mean zero in each state
        td = walks.rewards[:, :, :-1] + 0.9 * walks.values[:, :, 1:] - walks.values[:, :, :-1]
        many = parse((f"mrp:{name}",)).walks([generator(9)], 200, 100, 0.9)
        td = many.rewards[:, :, :-1] + 0.9 * many.values[:, :, 1:] - many.values[:, :, :-1]
        assert abs(td.mean()) <= 4.0 * td.std() / np.sqrt(td.size)


def test_walks_start_anew_where_a_chain_ends() -> None:
    chain = mrp.loop(6, stop=0.3)
    source = dataclasses.replace(parse(("mrp:boyan",)), make=lambda rng, gamma: chain)  # type: ignore[type-var]
    walks = source.walks([generator(0)], 3, 400, 0.9)  # type: ignore[attr-defined]
    ended = walks.discounts == 0.0
    assert ended.mean() == pytest.approx(0.3, abs=0.06)
    assert np.array_equal(walks.next_states[ended], walks.states[ended])
    goes_on = ~ended[:, :, :-1]
    assert np.array_equal(walks.next_states[:, :, :-1][goes_on], walks.states[:, :, 1:][goes_on])


def test_queries_come_from_episodes_that_the_context_does_not_touch() -> None:
    data = walk(0, (15,) * 8, ("truncated", "terminated") * 4)
    source = LogTasks((data,), "log")
    for i in range(20):
        task = source.draw(generator(i), 40, 20, 0.9)
        seen = {tuple(s) for s in task.context.observations} | {tuple(s) for s in task.context.next_observations}
        assert not any(tuple(s) in seen for s in task.queries.observations)
        assert np.isnan(task.values).all()
        known = ~np.isnan(task.returns)
        assert known.any()
        assert not known.all()  # truncated too soon
    first = source.draw(generator(3), 40, 20, 0.9)
    assert np.array_equal(first.context.observations, source.draw(generator(3), 40, 20, 0.9).context.observations)


def test_a_mixture_keeps_its_shares_and_goals_are_tasks(tmp_path: Path) -> None:
    data = walk(1, (30,) * 6, ("truncated",) * 6)
    np.savez(tmp_path / "log.npz", **{name: getattr(data, name) for name in FIELDS})
    source = parse((f"3*{tmp_path / 'log.npz'}", "mrp:lq?dim=3"))
    known = [bool(np.isnan(source.draw(generator(i), 20, 5, 0.9).values).all()) for i in range(80)]
    assert np.mean(known) == pytest.approx(0.75, abs=0.15)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mrp:nothing", "one of boyan, loop, gp, lq"),
        ("mrp:boyan?colour=3", "options among states, dim, representable, length"),
        ("mrp:boyan?states=two", "states: a number > 0"),
        ("mrp:boyan?states=2", "at least 3 states"),
        ("mrp:boyan?representable=maybe", "true or false"),
        ("0*mrp:boyan", "a share > 0"),
        ("nowhere.npz", "nowhere.npz"),
    ],
)
def test_bad_tasks_are_refused_in_one_line(text: str, message: str) -> None:
    with pytest.raises(vf.InputError, match=message.replace("*", r"\*")):
        parse((text,))


# -- losses ---------------------------------------------------------------------------------------------------------------------


def test_losses_mean_what_they_say() -> None:
    truth = torch.tensor([[1.0, 2.0, float("nan")]])
    targets = Targets(torch.ones(1, 3), torch.full((1, 3), 0.9), truth, truth, torch.ones(1), torch.tensor([4.0]))
    v, v_next = torch.zeros(1, 3, requires_grad=True), torch.ones(1, 3, requires_grad=True)
    td, residual, value = (loss(kind, v, v_next, targets, False) for kind in ("td", "residual", "value"))
    assert td.item() == residual.item() == pytest.approx(1.9**2)
    assert value.item() == pytest.approx((1.0 + 4.0) / 2)  # over what is known
    assert loss("monte-carlo", v, v_next, targets, True).item() == pytest.approx(2.5 / 4.0)
    assert torch.autograd.grad(td.sum(), v_next, retain_graph=True, allow_unused=True)[0] is None  # a detached target
    (through,) = torch.autograd.grad(residual.sum(), v_next)
    assert torch.allclose(through, torch.full((1, 3), 2 * 1.9 * 0.9 / 3))
    (gradient,) = torch.autograd.grad(value.sum(), v)
    assert gradient[0, 2] == 0.0
    assert bool(gradient.isfinite().all())
    unknown = dataclasses.replace(targets, values=torch.full((1, 3), float("nan")))
    with pytest.raises(vf.InputError, match="use --loss td"):
        loss("value", v, v_next, unknown, False)


@pytest.mark.parametrize("kind", ["td", "residual", "value"])
def test_every_loss_lowers_itself(kind: Any) -> None:
    """On one set of tasks, Adam lowers each loss below that of the start."""
    config = dataclasses.replace(SMALL, loss=kind, updates=30, learning_rate=0.05, heads=(vf.Head(RBF(4.0)),), validation=())
    training = Training(config)
    fixed = training._batch(0)
    training._batch = lambda step: fixed  # type: ignore[method-assign]
    first = float(training._losses(fixed).detach())
    training.run()
    assert float(training._losses(fixed).detach()) < 0.97 * first


# -- the run --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [SMALL, MATRICES], ids=["kernel", "matrices"])
def test_a_resumed_run_equals_the_uninterrupted_one_to_the_bit(config: PretrainConfig, tmp_path: Path) -> None:
    running.pretrain(config, tmp_path / "whole", device="cpu")
    running._write_config(tmp_path / "parts", config)
    for until in (3, 7):  # neither is a multiple of any interval
        part = Training(config, checkpoint=Checkpoint.read(tmp_path / "parts", config))
        part.run(until=until)
        part.checkpoint().write(tmp_path / "parts", config)
    running.pretrain(config, tmp_path / "parts", resume=True, device="cpu")
    for file in ("checkpoint.safetensors", "weights/model.safetensors"):
        whole, parts = (load_file(tmp_path / run / file) for run in ("whole", "parts"))
        assert whole.keys() == parts.keys()
        assert all(torch.equal(whole[name], parts[name]) for name in whole)
    assert (tmp_path / "whole" / "log.csv").read_bytes() == (tmp_path / "parts" / "log.csv").read_bytes()
    rows = list(csv.DictReader((tmp_path / "whole" / "log.csv").read_text().splitlines()))
    assert [row["step"] for row in rows] == ["4", "8", "12"]


def test_a_model_does_not_depend_on_those_trained_beside_it() -> None:
    both = run_through(MATRICES)
    alone = run_through(dataclasses.replace(MATRICES, models=1, seed=MATRICES.seed + 1))
    for name, parameter in alone.learner.named_parameters():
        beside = dict(both.learner.named_parameters())[name]
        assert torch.allclose(parameter[0], beside[1], rtol=1e-4, atol=1e-7)


def test_an_update_that_is_not_finite_is_skipped_and_counted_for_that_model_alone() -> None:
    clean, hurt = Training(MATRICES), Training(MATRICES)
    own = hurt._losses
    hurt._losses = lambda batch: own(batch) * torch.tensor([1.0, float("nan") if hurt.step == 2 else 1.0])  # type: ignore[method-assign]
    for training in (clean, hurt):
        training.run(until=2)
    before = hurt.learner.value[1].detach().clone()  # pyright: ignore[reportIndexIssue]
    for training in (clean, hurt):
        training.run(until=3)
    assert hurt.skipped == [0, 1]
    assert torch.equal(hurt.learner.value[1], before)  # pyright: ignore[reportIndexIssue]
    assert torch.equal(hurt.learner.value[0], clean.learner.value[0])  # pyright: ignore[reportIndexIssue]
    hurt.run()
    assert all(bool(p.isfinite().all()) for p in hurt.learner.parameters())


def test_validation_elsewhere_chooses_the_weights_and_ends_the_run() -> None:
    config = dataclasses.replace(SMALL, validate_every=1, patience=2, updates=40, learning_rate=0.5)
    training = run_through(config)
    values = [row["held_out_tdc"] for row in training.history]
    assert training.best_row is not None
    assert training.best_row["held_out_tdc"] == min(values)
    assert training.step < 40  # such a learning rate cannot keep improving
    assert training.step == training.best_row["step"] + 2
    chosen = {name: p.clone() for name, p in training.chosen().state_dict().items()}
    again = run_through(config, until=training.best_row["step"])
    assert all(torch.equal(p, chosen[name]) for name, p in again.learner.state_dict().items())


_RUN = """
import sys, torch
from pathlib import Path
torch.set_num_threads(1)
from valueformer.pretraining.config import PretrainConfig
from valueformer.pretraining.run import pretrain
for name in sys.argv[2:]:
    config = PretrainConfig.read(Path(sys.argv[1]) / f"{name}.json")
    pretrain(config, Path(sys.argv[1]) / name, resume=True, device="cpu")
"""


def test_kills_never_leave_an_unreadable_checkpoint_and_lose_no_more_than_since_the_last(tmp_path: Path) -> None:
    kills, out = (20 if FULL else 2), tmp_path / "run"
    config = dataclasses.replace(SMALL, updates=10_000, checkpoint_every=1)
    (tmp_path / "run.json").write_text(json.dumps(config.to_config()))
    rng, done, checkpoint = np.random.default_rng(0), 0, None
    for _ in range(kills):
        process = subprocess.Popen([sys.executable, "-c", _RUN, str(tmp_path), "run"])
        deadline = time.monotonic() + 60.0
        while time.monotonic() < deadline:  # until it has gone beyond the last one's end
            checkpoint = Checkpoint.read(out, config) if (out / "checkpoint.safetensors").exists() else None
            if checkpoint is not None and checkpoint.state["step"] > done:
                break
            time.sleep(0.02)
        time.sleep(float(rng.uniform(0.0, 0.4)))
        process.send_signal(signal.SIGKILL)
        process.wait()
        checkpoint = Checkpoint.read(out, config)
        assert checkpoint is not None
        assert checkpoint.state["step"] > done  # the resumed run did not start anew
        done = checkpoint.state["step"]
    assert checkpoint is not None
    straight = Training(config)
    straight.run(until=min(done, 40))
    if done <= 40:  # what the killed runs computed together is what one run computes
        assert all(torch.equal(p, checkpoint.tensors[f"model.{name}"]) for name, p in straight.learner.state_dict().items())


@pytest.mark.parametrize("config", [SMALL, MATRICES], ids=["kernel", "matrices"])
def test_shares_of_a_batch_add_up_to_its_loss_and_gradient(config: PretrainConfig) -> None:
    config = dataclasses.replace(config, dtype="float64")

    def gradients(share: Share) -> tuple[torch.Tensor, list[torch.Tensor]]:
        training = Training(config)
        training.share = share
        losses = training._losses(training._batch(3))
        return losses.detach(), list(torch.autograd.grad(losses.sum(), list(training.learner.parameters())))

    whole, parts = gradients(Share()), [gradients(Share(rank, 3)) for rank in range(3)]
    assert torch.allclose(sum(part[0] for part in parts), whole[0], rtol=1e-12)  # pyright: ignore[reportArgumentType]
    for i, gradient in enumerate(whole[1]):
        assert torch.allclose(torch.stack([part[1][i] for part in parts]).sum(0), gradient, rtol=1e-9, atol=1e-15)


@pytest.mark.skipif(not FULL, reason="three processes: make test-full")
def test_processes_that_share_batches_compute_the_loss_of_one(tmp_path: Path) -> None:
    (tmp_path / "shares.py").write_text(_RUN)
    configs = {
        name: dataclasses.replace(c, updates=4, dtype="float64") for name, c in (("kernel", SMALL), ("matrices", MATRICES))
    }
    for name, config in configs.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(config.to_config()))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, str(tmp_path / "shares.py"), str(tmp_path), *configs],
        env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    for name, config in configs.items():
        one = run_through(config)
        result = json.loads((tmp_path / name / "result.json").read_text())
        assert result["processes"] == 2
        assert result["history"][0]["loss"] == pytest.approx(one.history[0]["loss"], rel=1e-9)
        shared = load_file(tmp_path / name / "checkpoint.safetensors")
        for key, parameter in one.learner.state_dict().items():
            assert torch.allclose(shared[f"model.{key}"], parameter, rtol=1e-6, atol=1e-9)


# -- the command ----------------------------------------------------------------------------------------------------------------


def test_the_command_writes_weights_that_evaluate_uses(run, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(dataclasses.replace(SMALL, updates=6).to_config()))
    out = tmp_path / "run"
    outcome = run("pretrain", "--config", config, "--out", out, "--json")
    assert outcome.code == 0, outcome.err
    result = json.loads(outcome.out)
    assert result["updates"] == 6
    assert np.array(result["trained"]["steps"]).shape == (4, 2)
    assert {"picture", "page", "weights", "log"} <= result["files"].keys()
    assert (out / "pretrain.png").read_bytes()[:4] == b"\x89PNG"
    data = mrp.sample(mrp.linear_quadratic(0, dim=2), 6, 30)
    np.savez(tmp_path / "log.npz", **{name: getattr(data, name) for name in FIELDS})
    log = run("evaluate", tmp_path / "log.npz", "--model", out / "weights", "--gamma", "0.9", "--replicates", "0", "--json")
    assert json.loads(log.out)["heldout"]["tdc"] < 1.0
    again = run("pretrain", "--resume", "--out", out)  # a finished run stays as it is
    assert again.code == 0
    assert "6 of 6" in again.out


def test_the_matrices_command_draws_p_and_q(run, tmp_path: Path) -> None:
    out = tmp_path / "run"
    options = ("--models", "2", "--updates", "10", "--context", "12", "--layers", "2")
    outcome = run("pretrain", "--recipe", "boyan", *options, "--out", out)
    assert outcome.code == 0, outcome.err
    assert "implicit weight similarity" in outcome.out
    assert load_file(out / "weights" / "model.safetensors")["P"].shape == (2, 1, 9, 9)
    data = mrp.sample(mrp.boyan_chain(0), 1, 12)
    prompt = vf.FeaturePrompt.from_transitions(data, data.observations[:3], gamma=0.9, dtype=torch.float32)
    one, other = (vf.load_transformer(out / "weights", model=m)(prompt).query_values for m in (0, 1))
    assert not torch.equal(one, other)
    with pytest.raises(vf.InputError, match="a model 2"):
        vf.load_transformer(out / "weights", model=2)
    with pytest.raises(vf.InputError):
        vf.load_transformer(tmp_path)
    assert '"text": "Q, of its largest entry"' in (out / "pretrain.html").read_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "tasks to train on, a --recipe or a --config"),
        (("--recipe", "unknown"), "boyan, boyan-sequential"),
        (("--recipe", "boyan", "--config", "x.json"), "no --recipe beside it"),
        (("--config", "missing.json"), "missing.json: expected a JSON file"),
        (("--tasks", "mrp:boyan", "--gamma", "1.5"), "gamma: expected a number in [0, 1]"),
        (("--tasks", "mrp:boyan", "--loss", "huber"), "loss: expected td | residual | value | monte-carlo"),
        (("--tasks", "mrp:boyan", "--train", "everything"), "train: expected"),
        (("--tasks", "mrp:boyan", "--models", "3"), "1 for model 'kernel'"),
        (("--tasks", "mrp:boyan", "--heads", "cubic"), "kernel: expected"),
        (("--tasks", "mrp:boyan", "--patience", "3"), "validation tasks to be patient about"),
        (("--tasks", "mrp:boyan", "--device", "abacus"), "a torch device of this machine"),
        (("--tasks", "sample:plate-slide-v3/low", "--context", "5000"), "logs of at least 5200 transitions"),
        (("--tasks", "sample:plate-slide-v3/low", "--loss", "value", "--updates", "2"), "use --loss td"),
        (("--tasks", "mrp:boyan?dim=3", "--tasks", "mrp:boyan?dim=4", "--model", "matrices"), "states of one dimension"),
        (("--tasks", "mrp:gp?dim=3", "--validate", "mrp:gp?dim=4", "--train", "metric"), "states of one dimension"),
    ],
)
def test_bad_options_are_one_line(run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: Any, message: str) -> None:
    monkeypatch.chdir(tmp_path)
    outcome = run("pretrain", "--out", tmp_path / "out", *options)
    assert outcome.code == 2, outcome.out
    assert message in outcome.err
    assert outcome.err.count("\n") == 1
    if "--updates" not in options:  # nothing is left behind that would be in the way of the next try
        assert not (tmp_path / "out").exists()


def test_folders_in_use_and_damaged_checkpoints_are_refused(run, tmp_path: Path) -> None:
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "thesis.tex").write_text("x")
    outcome = run("pretrain", "--tasks", "mrp:boyan", "--out", tmp_path / "used")
    assert outcome.code == 2
    assert "a new or empty folder" in outcome.err
    config = dataclasses.replace(SMALL, updates=2)
    running.pretrain(config, tmp_path / "run", device="cpu")
    outcome = run("pretrain", "--resume", "--tasks", "mrp:boyan", "--out", tmp_path / "run")
    assert outcome.code == 2
    assert "a run of this configuration" in outcome.err
    for content in (b"", b"\x08\x00\x00\x00\x00\x00\x00\x00{}", b"no checkpoint at all"):
        (tmp_path / "run" / "checkpoint.safetensors").write_bytes(content)
        outcome = run("pretrain", "--resume", "--out", tmp_path / "run")
        assert outcome.code == 2
        assert "checkpoint" in outcome.err
    assert run("pretrain", "--resume", "--out", tmp_path / "nowhere").code == 2


@pytest.mark.parametrize(
    "change",
    [{"tasks": ()}, {"num_layers": 0}, {"step_start": (0.5, 2.5)}, {"learning_rate": float("nan")}, {"heads": ("rbf",)}, {"seed": True},
     {"train": ()}, {"weight_decay": -1.0}, {"dtype": "float16"}, {"tasks": ("",)}],
)  # fmt: skip
def test_configurations_out_of_range_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(vf.InputError):
        dataclasses.replace(SMALL, **change)


def test_configurations_survive_json() -> None:
    for config in (SMALL, MATRICES, *RECIPES.values()):
        assert PretrainConfig.from_config(json.loads(json.dumps(config.to_config()))) == config
    with pytest.raises(vf.InputError, match="fields among"):
        PretrainConfig.from_config({"tasks": ["mrp:boyan"], "optimizer": "sgd"})
    with pytest.raises(vf.InputError, match="tasks to train on"):
        PretrainConfig.from_config({})


SAMPLES = [f"{task}-v3/{noise}" for task in ("plate-slide", "button-press") for noise in ("high", "medium", "low")]


@pytest.mark.parametrize("sample", SAMPLES if FULL else SAMPLES[4:5])
def test_weights_trained_on_pick_place_alone_serve_other_domains(sample: str) -> None:
    model = vf.ValueFormer.from_pretrained("metaworld-pick-place", gamma=0.9)
    result = vf.evaluate(vf.load(f"sample:{sample}"), model, intervals=False)
    assert result.status != "diverged"
    assert result.heldout.tdc is not None
    assert result.heldout.td_ratio is not None
    if sample.startswith("button"):
        assert result.heldout.td_ratio <= 0.15
        assert result.heldout.tdc <= 0.75
    elif not sample.endswith("high"):
        assert result.heldout.td_ratio <= 0.05
    assert result.heldout.tdc < 1.0


def test_trained_weights_are_more_than_their_heads() -> None:
    with pytest.raises(vf.InputError, match="from_pretrained"):
        vf.ValueFormer(kernel="metaworld-pick-place").fit(walk(0))
    model = vf.ValueFormer.from_pretrained("metaworld-pick-place")
    assert isinstance(model.step_size, StepSchedule)
    assert np.ptp(model.step_size.rows().numpy()) > 0.5
    assert float(model.step_size.rows().max()) < 2.0


# -- what a pretrained model may set ----------------------------------------------------------------------------------------------


def test_schedules_metrics_and_given_weights_survive_files_and_equal_the_literal_transformer(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    heads = [vf.Head(RBF(0.5)), vf.Head(Laplace(1.0), "standardize")]
    steps = StepSchedule("safe", tuple(map(tuple, rng.uniform(0.5, 1.5, (6, 2)).tolist())))
    model = vf.ValueFormer(
        kernel=heads,
        gamma=0.9,
        num_layers=6,
        step_size=steps,
        mix=(0.3, 0.5, 0.2),
        metric=rng.normal(size=(2, 3)),
        dtype="float64",
    )
    data = walk(1)
    values = model.fit(data).predict(data.observations)
    assert model.mixing_weights_ == pytest.approx([0.3, 0.5, 0.2])
    model.save(tmp_path / "fitted")
    assert np.array_equal(vf.load_model(tmp_path / "fitted").predict(data.observations), values)
    model.save_pretrained(tmp_path / "frozen")
    frozen = vf.ValueFormer.from_pretrained(tmp_path / "frozen", gamma=0.9)
    assert frozen.step_size == steps
    assert np.array_equal(frozen.fit(data).predict(data.observations), values)
    for layout in ("pair", "residual", "two_group", "trajectory"):
        literal = frozen.set_params(layout=layout).fit(data).predict(data.observations)
        assert np.abs(literal - values).max() <= 1e-12 * np.abs(values).max()
    mapped = vf.ValueFormer(kernel=RBF(0.5), scaler="none", metric=[2.0, 1.0, 0.0], gamma=0.9, dtype="float64").fit(data)
    states = data.observations * [2.0, 1.0, 0.0]
    plain = vf.ValueFormer(kernel=RBF(0.5), scaler="none", gamma=0.9, dtype="float64").fit(
        data.replace(observations=states, next_observations=data.next_observations * [2.0, 1.0, 0.0])
    )
    assert np.allclose(mapped.predict(data.observations), plain.predict(states), rtol=1e-10)


def test_the_guard_can_be_asked_for_and_left_out() -> None:
    data = walk(0, (40,), ("truncated",))
    long = StepSchedule("fast", ((30.0,),) * 20)
    guarded = vf.ValueFormer(kernel="rbf", num_layers=20, step_size=long, gamma=0.9).fit(data)
    assert guarded.solution_.stats["rewinds"] > 0
    assert guarded.td_error_[-1] <= guarded.solution_.stats["initial_td_error"]
    with pytest.warns(vf.DivergenceWarning):
        assert (
            vf.ValueFormer(kernel="rbf", num_layers=20, step_size=long, gamma=0.9, guard=False).fit(data).solution_.status
            == "diverged"
        )
    plain = vf.ValueFormer(kernel="rbf", num_layers=20, step_size=5.0, gamma=0.9, guard=True).fit(data)
    assert plain.solution_.status != "diverged"


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"step_size": StepSchedule("fast", ((1.0,),) * 3)}, "40 numbers, one per layer"),
        ({"step_size": StepSchedule("fast", ((1.0, 1.0),) * 40), "kernel": "rbf"}, "rows of 1 or 1 factors"),
        ({"guard": "sometimes"}, "'auto', True or False"),
        ({"metric": [1.0, float("nan"), 1.0]}, "finite numbers"),
        ({"metric": [1.0, 1.0]}, "weights of 3 coordinates"),
        ({"mix": (1.0, 2.0)}, "7 weights"),
        ({"mix": (-1.0, 2.0)}, "weights >= 0"),
    ],
)
def test_parameters_of_pretrained_models_are_checked(parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(vf.InputError, match=message):
        vf.ValueFormer(gamma=0.9, **parameters).fit(walk(0))
    with pytest.raises(vf.InputError):
        StepSchedule("fast", ((0.0,),))
    with pytest.raises(vf.InputError):
        StepSchedule("fast", ())
