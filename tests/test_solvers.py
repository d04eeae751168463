"""Fixed points, the stability lemma, step sizes, the guard and statuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import valueformer as vf
from tests.conftest import FULL, walk
from valueformer import kernels, solvers
from valueformer.kernels import RBF, ExpDot, Kernel, Laplace, Linear, Matern, RationalQuadratic, ReLU, Softmax
from valueformer.solvers import Context
from valueformer.solvers import context as solver_context

ALL_KERNELS: list[Kernel] = [
    RBF(1.0),
    ExpDot(2.0),
    Linear(),
    ReLU(),
    Laplace(1.0),
    Matern(1.0, nu=1.5),
    Matern(1.0, nu=2.5),
    RationalQuadratic(1.0),
    Softmax(RBF(1.0)),
    Softmax(ExpDot(2.0)),
    RBF(0.1) + Laplace(4.0) * 0.5,
]


def td_matrix(kernel: Kernel, data: vf.Transitions, gamma: float) -> tuple[np.ndarray, np.ndarray]:
    """K and M = K - diag(gamma_i) K', assembled directly."""
    s, s_next = torch.tensor(data.observations), torch.tensor(data.next_observations)
    K = kernel(s, s).numpy()
    return K, K - (gamma * ~data.terminated)[:, None] * kernel(s_next, s).numpy()


def pairs(seed: int, n: int = 25, dim: int = 2) -> vf.Transitions:
    """Off-policy transitions: successors independent of states."""
    rng = np.random.default_rng(seed)
    return vf.Transitions(
        observations=rng.normal(size=(n, dim)),
        next_observations=rng.normal(size=(n, dim)),
        rewards=rng.normal(size=n),
        terminated=rng.random(n) < 0.1,
        episode_ids=np.arange(n),
    )


def test_ten_thousand_layers_reach_kernel_lstd() -> None:
    """n = 30, d = 3, walks of step 1 that end in a terminal: to 1e-6 wherever the spectrum lets 10,000 layers get there.

    A walk that returns almost exactly to a former state has an eigenvalue near zero, whose mode decays as (1 - alpha mu)^L.
    """
    reached = 0
    seeds = range(20 if FULL else 4)
    for seed in seeds:
        data = walk(seed, (30,), ("terminated",), step=1.0)
        _, M = td_matrix(RBF(1.0), data, 0.95)
        truth = np.linalg.solve(M, data.rewards)
        context = Context(RBF(1.0), data, gamma=0.95, dtype=torch.float64)
        closed = solvers.fixed_point(context).solution()
        np.testing.assert_allclose(closed.dual_coef.numpy(), truth, rtol=1e-7, atol=1e-9)
        assert closed.status == "converged"
        step = float(context.choose_step("fast", 0.0))
        slowest = np.abs(1 - step * np.linalg.eigvals(M)).max()
        if slowest**10_000 > 1e-7:
            continue
        reached += 1
        queries = np.random.default_rng(seed).normal(size=(20, 3))
        deep = vf.solve(RBF(1.0), data, queries, gamma=0.95, step_size=step, num_layers=10_000)
        kq = RBF(1.0)(torch.tensor(queries), torch.tensor(data.observations)).numpy()
        assert np.abs(deep.values.numpy() - kq @ truth).max() / np.abs(kq @ truth).max() < 1e-6
        assert deep.status == "converged"
    assert reached >= 0.8 * len(seeds)


def test_ridge_limit_is_regularised_kernel_lstd() -> None:
    data = walk(1, (30,), ("terminated",), step=1.0)
    _, M = td_matrix(RBF(1.0), data, 0.9)
    truth = np.linalg.solve(M + 0.2 * np.eye(30), data.rewards)
    deep = vf.solve(RBF(1.0), data, gamma=0.9, step_size="safe", num_layers=3000, ridge=0.2)
    closed = solvers.fixed_point(Context(RBF(1.0), data, gamma=0.9, dtype=torch.float64), ridge=0.2).solution()
    np.testing.assert_allclose(deep.dual_coef.numpy(), truth, rtol=1e-8)
    np.testing.assert_allclose(closed.dual_coef.numpy(), truth, rtol=1e-10)
    assert deep.status == "converged"


def test_matrix_of_distinct_states_equals_the_direct_one() -> None:
    """One (u x n) matrix serves K and K': contiguous rows share states, others get their own."""
    data = vf.concatenate([walk(0), walk(1), pairs(2, n=7, dim=3)])
    for kernel in ALL_KERNELS:
        context = Context(kernel, data, gamma=0.8, dtype=torch.float64)
        _, M = td_matrix(kernel, data, 0.8)
        a = np.random.default_rng(0).normal(size=(2, len(data)))
        there, back = context.apply(torch.tensor(a)[None])[0], context.apply_transpose(torch.tensor(a)[None])[0]
        np.testing.assert_allclose(there.numpy(), a @ M.T, rtol=1e-12, atol=1e-12)
        np.testing.assert_allclose(back.numpy(), a @ M, rtol=1e-12, atol=1e-12)
    context = Context(RBF(1.0), data, gamma=0.8, dtype=torch.float64)
    # n states, the final one of the truncated episode in each walk, and the pairs' successors that are read
    read_pairs = int((~data.terminated[-7:]).sum())
    assert context.matrix.shape[1] == len(data) + 2 + read_pairs


@pytest.mark.parametrize("gamma", [0.5, 0.9, 0.99])
def test_lemma_error_norm_never_grows_on_terminal_contexts(gamma: float) -> None:
    """theory 3: alpha <= 1 / lambda_max(K) never increases the RKHS norm of the error; 200 random contexts."""
    for seed in range(200 if FULL else 67):
        rng = np.random.default_rng(seed)
        lengths = tuple(rng.integers(1, 14, size=rng.integers(1, 4)))
        data = walk(seed, lengths, ("terminated",) * len(lengths), step=float(rng.uniform(0.1, 2.0)))
        kernel = [RBF(1.0), Laplace(1.0), Matern(1.0), RationalQuadratic(1.0)][seed % 4]
        K, M = td_matrix(kernel, data, gamma)
        target = np.linalg.solve(M, data.rewards)
        context = Context(kernel, data, gamma=gamma, dtype=torch.float64)
        history = solvers.iterate(context, step_size="safe", num_layers=60, record=True).history
        assert history is not None
        errors = np.concatenate([np.zeros((1, len(data))), history[:, 0, 0].numpy()]) - target
        norms = np.einsum("li,ij,lj->l", errors, K, errors)
        assert (np.diff(norms) <= 1e-9 * norms[0]).all(), seed


def test_lambda_max_bound_is_an_upper_bound_and_tight() -> None:
    """Collatz-Wielandt never falls below the eigenvalue, and is closer than the largest row sum."""
    for seed in range(40):
        data = walk(seed, step=float(np.random.default_rng(seed).uniform(0.05, 3.0)))
        for kernel in ALL_KERNELS:
            context = Context(kernel, data, gamma=0.9, dtype=torch.float64)
            K = context.matrix[0, : len(data)]
            true = float(torch.linalg.eigvals(K).abs().max())
            bound = float(context.lambda_max_bound())
            assert bound >= true * (1 - 1e-12)
            assert bound <= float(K.abs().sum(1).max()) * (1 + 1e-12)
    rbf = Context(RBF(1.0), walk(3), gamma=0.9, dtype=torch.float64)
    assert float(rbf.lambda_max_bound()) <= 1.02 * float(torch.linalg.eigvalsh(rbf.matrix[0, :24]).max())


def test_lambda_max_bound_with_sample_weights() -> None:
    weight = np.random.default_rng(0).uniform(0.0, 3.0, 24)
    data = walk(0, sample_weight=weight)
    context = Context(RBF(1.0), data, gamma=0.9, dtype=torch.float64)
    weighted = np.sqrt(weight)[:, None] * context.matrix[0, :24].numpy() * np.sqrt(weight)
    assert float(context.lambda_max_bound()) >= np.linalg.eigvalsh(weighted).max()


def test_sigma_max_estimates_the_singular_value() -> None:
    ratios = []
    for seed in range(30):
        data = walk(seed)
        _, M = td_matrix(RBF(1.0), data, 0.9)
        ratios.append(float(Context(RBF(1.0), data, gamma=0.9, dtype=torch.float64).sigma_max()) / np.linalg.norm(M, 2))
    assert max(ratios) <= 1 + 1e-12  # from below
    assert min(ratios) > 0.9


def ugly_context(seed: int) -> vf.Transitions:
    data = _ugly_context(seed)
    clip = lambda x: np.clip(x, -9.0, 9.0)  # noqa: E731  # exp(<x, y> / 2) stays finite
    return data.replace(observations=clip(data.observations), next_observations=clip(data.next_observations))


def _ugly_context(seed: int) -> vf.Transitions:
    rng = np.random.default_rng(seed)
    kind = seed % 4
    if kind == 0:
        return pairs(seed, n=int(rng.integers(2, 30)))
    if kind == 1:  # off-policy successors in a far or concentrated place
        data = pairs(seed, n=int(rng.integers(2, 30)))
        return data.replace(next_observations=data.next_observations * rng.choice([0.01, 3.0]))
    lengths = tuple(rng.integers(1, 15, size=rng.integers(1, 4)))
    ends = rng.choice(["truncated", "terminated", "open"], size=len(lengths), p=[0.6, 0.2, 0.2])
    data = walk(seed, lengths, tuple(ends), dim=int(rng.integers(1, 5)), step=float(10 ** rng.uniform(-3, 1)))
    if kind == 3:  # duplicated transitions
        return data[np.sort(rng.integers(0, len(data), size=len(data)))].replace(episode_ids=np.arange(len(data)))
    return data


@pytest.mark.parametrize("rule", ["fast", "safe"])
def test_guard_leaves_no_divergence(rule: Any) -> None:
    """1,000 (a third in the quick run) random truncated, off-policy and degenerate contexts, every kernel in turn (theory 7.3)."""
    rewinds = 0
    for seed in range(1000 if FULL else 350):
        data, kernel = ugly_context(seed), ALL_KERNELS[seed % len(ALL_KERNELS)]
        gamma = [0.5, 0.9, 0.99, 1.0][(seed // 4) % 4]
        solution = vf.solve(kernel, data, data.next_observations, gamma=gamma, step_size=rule, num_layers=40, guard=True)
        assert solution.status in ("converged", "max_layers"), seed
        assert bool(solution.values.isfinite().all()), seed
        assert float(solution.td_error[-1]) <= min(float(solution.td_error.min()), solution.stats["initial_td_error"]) * (
            1 + 1e-9
        ), seed
        rewinds += solution.stats["rewinds"]
    assert rewinds > 0  # the guard had work to do


def test_without_guard_some_of_them_diverge_and_say_so() -> None:
    diverged = 0
    for seed in range(0, 200):
        data = ugly_context(seed)
        solution = vf.solve(ExpDot(2.0), data, data.observations, gamma=0.99, step_size="fast", num_layers=40)
        assert bool(solution.values.isfinite().all())
        if solution.status == "diverged":
            diverged += 1
            assert "best layer" in solution.message
            assert "ridge" in solution.message
    assert diverged > 10


def test_theory_smallest_divergent_example_and_its_ridge() -> None:
    """theory 3: pairs {0 -> -1, .2 -> 1.2}, gamma .9 has an eigenvalue -.088; ridge .1 repairs it."""
    data = vf.Transitions(
        observations=[0.0, 0.2], next_observations=[-1.0, 1.2], rewards=[1.0, -1.0], terminated=[0, 0], episode_ids=[0, 1]
    )
    _, M = td_matrix(RBF(1.0), data, 0.9)
    np.testing.assert_allclose(np.sort(np.linalg.eigvals(M).real), [-0.088, 0.996], atol=5e-4)
    bad = vf.solve(RBF(1.0), data, gamma=0.9, step_size=0.1, num_layers=3000)
    good = vf.solve(RBF(1.0), data, gamma=0.9, step_size=0.5, num_layers=6_000, ridge=0.1)
    assert (bad.status, good.status) == ("diverged", "converged")


def test_kernel_that_overflows_is_refused_by_name() -> None:
    data = walk(0)
    far = data.replace(observations=data.observations * 100)
    with pytest.raises(vf.InputError, match=r"context states: expected states on which ExpDot.*an overflow"):
        vf.solve(ExpDot(1.0), far, gamma=0.9, step_size=0.1, num_layers=2)
    with pytest.raises(vf.InputError, match="queries: expected states on which ExpDot"):
        vf.solve(ExpDot(1.0), data, 1e4 * data.observations, gamma=0.9, step_size=0.001, num_layers=2)
    assert bool(
        vf.solve(RBF(1.0), far, 1e4 * data.observations, gamma=0.9, step_size=0.1, num_layers=2).values.isfinite().all()
    )


def test_overflow_is_reported_not_returned() -> None:
    data = walk(0, dtype=np.float32)
    solution = vf.solve(RBF(1.0), data, data.observations, gamma=0.9, step_size=1e6, num_layers=100)
    assert solution.status == "diverged"
    assert bool((solution.values == 0).all())  # the best layer is the start
    assert "overflowed" in solution.message
    for step in (1e6, 1e37, 1e200):
        solution = vf.solve(RBF(1.0), data, data.observations, gamma=0.9, step_size=step, num_layers=100, record=True)
        assert solution.trace is not None
        assert bool(solution.td_error.isfinite().all())
        assert bool(solution.trace.isfinite().all())
        assert len(solution.trace) == len(solution.td_error) == solution.stats["layers"] < 100


def test_status_under_weights_follows_the_weighted_error() -> None:
    data = walk(0, sample_weight=(np.arange(24) == 5).astype(float))
    solution = vf.solve(RBF(1.0), data, gamma=0.9, step_size=0.2, num_layers=3)
    assert float(solution.td_error[-1]) > 1e-6 * data.rewards[5] ** 2
    assert solution.status == "max_layers"
    deep = vf.solve(RBF(1.0), data, gamma=0.9, step_size=0.2, num_layers=2000)
    assert deep.status == "converged"
    assert float(deep.td_error[-1]) <= 1e-6 * data.rewards[5] ** 2
    ridged = vf.solve(RBF(1.0), data, gamma=0.9, step_size=0.2, num_layers=2000, ridge=0.1)
    closed = solvers.fixed_point(Context(RBF(1.0), data, gamma=0.9, dtype=torch.float64), ridge=0.1).solution()
    assert ridged.status == "converged"
    np.testing.assert_allclose(ridged.dual_coef.numpy(), closed.dual_coef.numpy(), atol=1e-9)


def test_status_is_that_of_the_iterate_returned() -> None:
    """A start within the tolerance of large rewards, from which off-policy layers only lead away: the start is returned."""
    data = vf.Transitions(
        observations=[0.0, 0.2], next_observations=[-1.0, 1.2], rewards=[1.0, -1.0], terminated=[0, 0], episode_ids=[0, 1]
    )
    context = Context(RBF(1.0), data, gamma=0.9, dtype=torch.float64)
    seen = 0
    for step in (0.3, 1.0, 3.0, 30.0):
        arguments: dict[str, Any] = {"step_size": step, "num_layers": 25, "guard": True}
        solution = solvers.iterate(context, reward_square=1.05e6, **arguments).solution()
        if float(solution.td_error[-1]) <= 1.05:
            seen += 1
            assert solution.status == "converged"
            assert solution.message == ""
        assert solvers.iterate(context, **arguments).solution().status == "max_layers"
    assert seen == 4


def test_shuffled_rows_share_states_too() -> None:
    data = walk(0)
    shuffled = data[np.random.default_rng(0).permutation(24)]
    sizes = [Context(RBF(1.0), d, gamma=0.9, dtype=torch.float64).matrix.shape[1] for d in (data, shuffled)]
    assert sizes == [25, 25]


def test_guarded_path_reproduces_the_solution() -> None:
    """``stats['step_sizes']`` is the schedule that a transformer needs to return the same values."""
    seen = 0
    for seed in range(200):
        data = ugly_context(seed)
        guarded = vf.solve(ExpDot(2.0), data, data.observations, gamma=0.99, step_size="fast", num_layers=30, guard=True)
        path = guarded.stats["step_sizes"]
        if guarded.stats["rewinds"] and path:
            seen += 1
            again = vf.solve(ExpDot(2.0), data, data.observations, gamma=0.99, step_size=path, num_layers=len(path))
            assert torch.equal(again.dual_coef, guarded.dual_coef)
            literal = vf.construct(ExpDot(2.0), gamma=0.99, step_size=path, num_layers=len(path))
            values = literal(vf.Prompt.from_transitions(data, data.observations)).query_values
            assert float((values - guarded.values).abs().max()) <= 1e-10 * max(1.0, float(guarded.values.abs().max()))
    assert seen > 5


def test_auto_depth_stops_at_the_tolerance() -> None:
    data = walk(0, (30,), ("terminated",), step=1.5)
    auto = vf.solve(RBF(1.0), data, gamma=0.9, step_size="fast", num_layers="auto", guard=True)
    assert auto.status == "converged"
    layers = auto.stats["layers"]
    rms = float(data.rewards.std() ** 2 + data.rewards.mean() ** 2) ** 0.5
    assert float(auto.td_error[-1]) ** 0.5 <= 1e-3 * rms < float(auto.td_error[-2]) ** 0.5
    fixed = vf.solve(RBF(1.0), data, gamma=0.9, step_size="fast", num_layers=layers, guard=True)
    assert torch.equal(auto.dual_coef, fixed.dual_coef)


def test_singular_system_is_named_and_finite() -> None:
    data = walk(0, (6,), ("terminated",))
    twice = vf.concatenate([data, data])
    twice = twice.replace(rewards=twice.rewards + np.arange(12) * 0.1)
    closed = solvers.fixed_point(Context(RBF(1.0), twice, gamma=0.9, dtype=torch.float64)).solution()
    assert closed.status == "singular"
    assert "ridge" in closed.message
    assert bool(closed.dual_coef.isfinite().all())
    assert float(closed.dual_coef.abs().max()) < 100
    repaired = solvers.fixed_point(Context(RBF(1.0), twice, gamma=0.9, dtype=torch.float64), ridge=1e-3).solution()
    assert repaired.status == "converged"


def test_tabular_context_is_exact_policy_evaluation() -> None:
    """One-hot states and a kernel that separates them: the fixed point is (I - gamma P)^{-1} r of the empirical chain."""
    rng = np.random.default_rng(0)
    n, gamma = 7, 0.9
    successor = rng.permutation(n)
    eye = np.eye(n)
    r = rng.normal(size=n)
    data = vf.Transitions(
        observations=eye, next_observations=eye[successor], rewards=r, terminated=np.zeros(n), episode_ids=np.arange(n)
    )
    truth = np.linalg.solve(eye - gamma * eye[successor], r)
    for kernel in (Linear(), RBF(0.01)):
        solution = vf.solve(kernel, data, eye, gamma=gamma, step_size="safe", num_layers=5000)
        np.testing.assert_allclose(solution.values.numpy(), truth, rtol=1e-9)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gamma": 1.5}, "gamma: expected a number in"),
        ({"gamma": float("nan")}, "gamma"),
        ({"ridge": -1.0}, "ridge"),
        ({"num_layers": 0}, "num_layers"),
        ({"step_size": "quick"}, "step_size"),
        ({"step_size": -0.1}, "step_size"),
        ({"step_size": [0.1, 0.2]}, "step_size: expected 3 numbers, one per layer, got 2"),
        ({"step_size": float("inf")}, "step_size"),
        ({"queries": np.full((1, 3), np.nan)}, "queries: expected finite"),
        ({"queries": np.zeros((2, 2))}, r"queries: expected shape \(m, 3\)"),
        ({"queries": np.full((1, 3), 1e200)}, "queries: expected finite numbers up to"),
        ({"kernel": "rbf"}, "kernel: expected a vf.kernels.Kernel"),
    ],
)
def test_bad_arguments_are_named(changes: dict, message: str, context: vf.Transitions) -> None:
    arguments = {"kernel": kernels.RBF(1.0), "gamma": 0.9, "step_size": 0.1, "num_layers": 3} | changes
    with pytest.raises(vf.InputError, match=message):
        vf.solve(data=context, **arguments)


def test_states_and_rewards_that_overflow_the_dtype_are_refused(context: vf.Transitions) -> None:
    far = context.replace(observations=context.observations * 1e200)
    with pytest.raises(vf.InputError, match="context states: expected finite numbers up to"):
        vf.solve(RBF(1.0), far, gamma=0.9, step_size=0.1, num_layers=3)
    rich = walk(0, dtype=np.float32).replace(rewards=np.full(24, 1e60))
    with pytest.raises(vf.InputError, match=r"rewards: expected numbers that torch\.float32 holds"):
        vf.solve(RBF(1.0), rich, gamma=0.9, step_size=0.1, num_layers=3)


def test_context_that_cannot_fit_into_memory_is_refused_before_it_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(solver_context.os, "sysconf", lambda name: 1000 if name == "SC_PAGE_SIZE" else 4)
    with pytest.raises(vf.InputError, match=r"context: expected at most about 19 transitions"):
        vf.solve(RBF(1.0), walk(0), gamma=0.9, step_size=0.1, num_layers=1)
