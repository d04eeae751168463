"""The literal transformer, the solver and an independent oracle agree at every layer (claim P4 to P6)."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import valueformer as vf
from tests import oracle
from tests.conftest import FULL, walk
from valueformer.kernels import RBF, ExpDot, Kernel, Laplace, Linear, Matern, RationalQuadratic, ReLU, Softmax
from valueformer.prompt import Layout

GAMMA = 0.9
LAYOUTS: tuple[Layout, ...] = ("pair", "residual", "trajectory", "two_group")
Heads = list[tuple[float, str, float]]
KERNELS: dict[str, tuple[Kernel, Heads, bool]] = {
    "rbf": (RBF(1.3), [(1, "rbf", 1.3)], False),
    "expdot": (ExpDot(8.0), [(1, "expdot", 8.0)], False),
    "laplace": (Laplace(1.5), [(1, "laplace", 1.5)], False),
    "relu": (ReLU(), [(1, "relu", 1)], False),
    "linear": (Linear(), [(1, "linear", 1)], False),
    "softmax-rbf": (Softmax(RBF(1.3)), [(1, "rbf", 1.3)], True),
    "softmax-dot": (Softmax(ExpDot(2.0)), [(1, "expdot", 2.0)], True),
    "matern": (Matern(1.5, nu=1.5), [(1, "matern15", 1.5)], False),
    "rational-quadratic": (RationalQuadratic(1.5), [(1, "rq", 1.5)], False),
    "matern25": (Matern(1.5), [(1, "matern25", 1.5)], False),
    "softmax-laplace": (Softmax(Laplace(1.5)), [(1, "laplace", 1.5)], True),
    "scaled softmax": (Softmax(RBF(1.3)) * 0.7, [(0.7, "rbf", 1.3)], True),
    "two temperatures": (RBF(0.5) * 0.7 + RBF(4.0), [(0.7, "rbf", 0.5), (1, "rbf", 4.0)], False),
    "mixed heads": (
        RBF(0.5) + Laplace(2.0) * 0.5 + Linear() * 0.1,
        [(1, "rbf", 0.5), (0.5, "laplace", 2.0), (0.1, "linear", 1)],
        False,
    ),
}
ENDS = {
    "open": ("open", "open", "open"),
    "terminals": ("terminated", "terminated", "terminated"),
    "truncations": ("truncated", "truncated", "truncated"),
    "both": ("terminated", "truncated", "terminated"),
}


def case(seed: int, ends: str, discounts: bool, weights: bool, dtype: type) -> tuple[vf.Transitions, np.ndarray]:
    rng = np.random.default_rng(seed)
    fields = {}
    if discounts:
        d = rng.uniform(0.2, 1.0, 24)
        d[[3, 12]] = 0.0, 1.0
        fields["discounts"] = d.astype(dtype)
    if weights:
        fields["sample_weight"] = rng.uniform(0.3, 2.0, 24).astype(dtype)
    data = walk(seed, (9, 8, 7), ENDS[ends], dtype=dtype, **fields)
    return data, rng.normal(size=(5, 3)).astype(dtype)


def expected(
    data: vf.Transitions, queries: np.ndarray, heads: Heads, softmax: bool, steps: list[float], ridge: float
) -> tuple[np.ndarray, np.ndarray]:
    ones = np.ones(len(data))
    return oracle.kernel_td(
        heads=heads,
        softmax=softmax,
        states=data.observations.astype(float),
        next_states=data.next_observations.astype(float),
        rewards=data.rewards.astype(float),
        terminated=data.terminated,
        discounts=ones if data.discounts is None else data.discounts.astype(float),
        sample_weight=ones if data.sample_weight is None else data.sample_weight.astype(float),
        queries=queries.astype(float),
        gamma=GAMMA,
        steps=steps,
        ridge=ridge,
    )


def error(actual: torch.Tensor, truth: np.ndarray) -> float:
    """Largest over layers of max |error| / max |value| in the layer."""
    return float((np.abs(actual.detach().double().numpy() - truth).max(axis=1) / np.abs(truth).max(axis=1)).max())


def step_for(softmax: bool) -> float:
    return 0.5 if softmax else 0.02


VARIANTS = ("plain", "ridge", "discounts", "weights", "everything")
SLICE = [("open", "plain"), ("terminals", "ridge"), ("truncations", "weights"), ("both", "discounts"), ("both", "everything")]
GRID = [(ends, variant) for ends in ENDS for variant in VARIANTS]


@pytest.mark.parametrize(("ends", "variant"), GRID if FULL else SLICE)
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float64, 1e-12), (np.float32, 1e-4)])
def test_transformer_solver_and_oracle_agree(name: str, ends: str, variant: str, dtype: type, tolerance: float) -> None:
    kernel, heads, softmax = KERNELS[name]
    discounts, weights = variant in ("discounts", "everything"), variant in ("weights", "everything")
    ridge = 0.3 if variant in ("ridge", "everything") else 0.0
    data, queries = case(7, ends, discounts, weights, dtype)
    # unequal steps: one per layer
    steps = [step_for(softmax) * (1.0 + 0.5 * np.sin(layer)) for layer in range(40)]
    values, errors = expected(data, queries, heads, softmax, steps, ridge)
    squares = np.average(np.square(errors), axis=1, weights=data.sample_weight)[:, None]

    solution = vf.solve(kernel, data, queries, gamma=GAMMA, step_size=steps, num_layers=40, ridge=ridge, record=True)
    assert solution.trace is not None
    assert error(solution.trace, values) <= tolerance
    assert error(solution.td_error[:, None], squares) <= tolerance
    for layout in LAYOUTS:
        prompt = vf.Prompt.from_transitions(data, queries, layout=layout)
        for depth in (1, 3, 40):
            model = vf.construct(kernel, layout=layout, gamma=GAMMA, step_size=steps[:depth], num_layers=depth, ridge=ridge)
            output = model(prompt)
            assert output.trace.shape == (depth, 5)
            assert error(output.trace, values[:depth]) <= tolerance, (layout, depth)
            assert error(output.td_error[:, None], squares[:depth]) <= tolerance, (layout, depth)
            torch.testing.assert_close(output.query_values, output.trace[-1])


def wang_linear_td(
    features: np.ndarray,
    next_features: np.ndarray,
    rewards: np.ndarray,
    query: np.ndarray,
    gamma: float,
    alpha: float,
    layers: int,
) -> list[float]:
    """Wang et al. (2025), TD(0): Z <- Z + P Z M (Z^T Q Z) / n with prompt [phi; gamma phi'; r], readout -Z[-1, -1]."""
    n, d = features.shape
    Z = np.zeros((2 * d + 1, n + 1))
    Z[:d, :n], Z[d : 2 * d, :n], Z[2 * d, :n] = features.T, gamma * next_features.T, rewards
    Z[:d, n] = query
    P = np.zeros((2 * d + 1, 2 * d + 1))
    P[-1, -1] = 1.0
    Q = np.zeros((2 * d + 1, 2 * d + 1))
    Q[:d, :d], Q[:d, d : 2 * d] = -alpha * np.eye(d), alpha * np.eye(d)
    M = np.eye(n + 1)
    M[n, n] = 0.0
    out = []
    for _ in range(layers):
        Z = Z + P @ Z @ M @ (Z.T @ Q @ Z) / n
        out.append(-Z[-1, -1])
    return out


def test_residual_layout_with_linear_kernel_is_wang_et_al() -> None:
    rng = np.random.default_rng(3)
    n, d, layers, alpha, gamma = 30, 4, 15, 0.5, 0.9
    phi, phi_next, r, query = rng.normal(size=(n, d)), rng.normal(size=(n, d)), rng.normal(size=n), rng.normal(size=d)
    truth = np.array(wang_linear_td(phi, phi_next, r, query, gamma, alpha, layers))[:, None]
    flags = np.zeros(n, bool)
    data = vf.Transitions(observations=phi, next_observations=phi_next, rewards=r, terminated=flags)
    model = vf.construct(Linear(), layout="residual", gamma=gamma, step_size=alpha / n, num_layers=layers)
    for gate in (True, False):  # kappa(., 0) = 0: the gate makes no difference to a linear kernel
        prompt = vf.Prompt.from_transitions(data, query[None], layout="residual", gate_queries=gate)
        assert error(model(prompt).trace, truth) <= 1e-12


OFFSET_KERNELS = ["rbf", "expdot", "laplace", "relu", "linear", "softmax-rbf", "softmax-dot", "mixed heads"]


@pytest.mark.parametrize("name", OFFSET_KERNELS)
def test_ungated_query_reads_the_constant_offset(name: str) -> None:
    """claim P8, theory 2: output = V_L(s) - gamma V_L(0), at every depth; zero for kernels that vanish at 0."""
    kernel, _, softmax = KERNELS[name]
    data, queries = case(5, "both", False, False, np.float64)
    queries = np.concatenate([queries, np.zeros((1, 3))])
    model = vf.construct(kernel, layout="residual", gamma=GAMMA, step_size=step_for(softmax), num_layers=12)
    gated = model(vf.Prompt.from_transitions(data, queries, layout="residual")).trace.numpy()
    ungated = model(vf.Prompt.from_transitions(data, queries, layout="residual", gate_queries=False)).trace
    assert error(ungated, gated - GAMMA * gated[:, -1:]) <= 1e-12
    if name in ("relu", "linear"):
        assert np.abs(gated[:, -1]).max() == 0.0
    else:
        assert np.abs(gated[-1, -1]) > 1e-3  # the offset is really there
        # the second remedy: a zero-state query estimates it, o_0 = (1 - gamma) V(0)
        offset = ungated[:, -1:].numpy()
        assert error(ungated + torch.tensor(GAMMA * offset / (1 - GAMMA)), gated) <= 1e-12


@pytest.mark.parametrize("layout", ["pair", "trajectory", "two_group"])
@pytest.mark.parametrize("name", ["rbf", "softmax-rbf", "linear"])
def test_other_layouts_have_no_offset(name: str, layout: Layout) -> None:
    kernel, _, softmax = KERNELS[name]
    data, queries = case(5, "both", False, False, np.float64)
    model = vf.construct(kernel, layout=layout, gamma=GAMMA, step_size=step_for(softmax), num_layers=6)
    gated = model(vf.Prompt.from_transitions(data, queries, layout=layout)).trace
    ungated = model(vf.Prompt.from_transitions(data, queries, layout=layout, gate_queries=False)).trace
    assert torch.equal(gated, ungated)


def test_gamma_zero_is_functional_gradient_descent_for_regression() -> None:
    """Cheng, Chen & Sra (2024): f <- f + alpha sum_j (y_j - f(x_j)) kappa(x_j, .)."""
    data, queries = case(1, "open", False, False, np.float64)
    x, y = data.observations, data.rewards
    gram = np.exp(-np.square(x[:, None] - x[None]).sum(-1) / 2.6)
    cross = np.exp(-np.square(queries[:, None] - x[None]).sum(-1) / 2.6)
    a, truth = np.zeros(len(y)), []
    for _ in range(9):
        a = a + 0.1 * (y - gram @ a)
        truth.append(cross @ a)
    model = vf.construct(RBF(1.3), layout="pair", gamma=0.0, step_size=0.1, num_layers=9)
    assert error(model(vf.Prompt.from_transitions(data, queries, layout="pair")).trace, np.array(truth)) <= 1e-12
