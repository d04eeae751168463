"""One contract that every kernel inherits, and the formulas themselves."""

from __future__ import annotations

import dataclasses
import json
from typing import Any, cast

import numpy as np
import pytest
import torch

from tests import oracle
from valueformer import InputError, kernels
from valueformer.kernels import (
    RBF,
    ExpDot,
    Kernel,
    Laplace,
    Linear,
    Matern,
    RationalQuadratic,
    ReLU,
    Softmax,
)

FORMULAS: dict[str, tuple[Kernel, list[tuple[float, str, float]]]] = {
    "rbf": (RBF(0.7), [(1, "rbf", 0.7)]),
    "expdot": (ExpDot(1.5), [(1, "expdot", 1.5)]),
    "laplace": (Laplace(0.7), [(1, "laplace", 0.7)]),
    "matern15": (Matern(0.7, nu=1.5), [(1, "matern15", 0.7)]),
    "matern25": (Matern(0.7, nu=2.5), [(1, "matern25", 0.7)]),
    "rq": (RationalQuadratic(0.7, alpha=0.5), [(1, "rq", 0.7)]),
    "relu": (ReLU(), [(1, "relu", 1)]),
    "linear": (Linear(), [(1, "linear", 1)]),
    "sum": (RBF(0.5) * 0.3 + Laplace(2.0), [(0.3, "rbf", 0.5), (1, "laplace", 2.0)]),
}
ALL: dict[str, Kernel] = {
    **{name: kernel for name, (kernel, _) in FORMULAS.items()},
    "product": Matern(1.0) * RationalQuadratic(2.0),
    "expanded": (RBF(0.5) + Laplace(1.0) * 2.0) * Matern(3.0, nu=1.5),
    "mixed product": Linear() * RBF(1.0),
    "softmax-rbf": Softmax(RBF(0.7)),
    "softmax-dot": Softmax(ExpDot(1.5)),
    "softmax-matern": Softmax(Matern(1.0)),
}


@pytest.fixture
def points() -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(12, 3, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("name", ALL)
class TestContract:
    def test_shape_and_batch_equals_stacked_singles(self, name: str) -> None:
        generator = torch.Generator().manual_seed(2)
        x = torch.randn(4, 5, 3, generator=generator, dtype=torch.float64)
        y = torch.randn(4, 6, 3, generator=generator, dtype=torch.float64)
        batched = ALL[name](x, y)
        assert batched.shape == (4, 5, 6)
        torch.testing.assert_close(
            batched, torch.stack([ALL[name](a, b) for a, b in zip(x, y, strict=True)]), rtol=0, atol=1e-13
        )

    def test_symmetry_and_psd_where_claimed(self, name: str, points: torch.Tensor) -> None:
        kernel = ALL[name]
        matrix = kernel(points, points)
        if kernel.nonnegative:
            assert bool((matrix >= 0).all())
        if isinstance(kernel, Softmax):
            torch.testing.assert_close(matrix.sum(-1), torch.ones(12, dtype=torch.float64))
            assert not kernel.psd
            return
        torch.testing.assert_close(matrix, matrix.mT, rtol=0, atol=1e-13)
        if kernel.psd:
            assert float(torch.linalg.eigvalsh(matrix).min()) > -1e-10

    def test_gradcheck(self, name: str, points: torch.Tensor) -> None:
        x = points[:4].clone().requires_grad_()
        y = points[4:9].clone().requires_grad_()
        assert torch.autograd.gradcheck(ALL[name], (x, y))

    def test_gradient_at_coincident_points_is_finite(self, name: str, points: torch.Tensor) -> None:
        x = points.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(ALL[name](x, points).sum(), x)
        assert bool(gradient.isfinite().all())

    def test_config_round_trip_through_json(self, name: str) -> None:
        assert kernels.from_config(json.loads(json.dumps(ALL[name].to_config()))) == ALL[name]

    def test_heads_sum_to_the_kernel(self, name: str, points: torch.Tensor) -> None:
        kernel = ALL[name]
        if name == "mixed product":
            with pytest.raises(InputError, match="no attention head computes it"):
                kernel.heads()
            return
        total = torch.zeros(12, 12, dtype=torch.float64)
        for head in kernel.heads():
            score = points @ points.mT if head.score == "dot" else kernels.squared_distances(points, points, flush=True)
            weights = head.activation(score)
            total += head.coefficient * (weights / weights.sum(-1, keepdim=True) if head.normalised else weights)
        torch.testing.assert_close(total, kernel(points, points), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["rbf", "laplace", "matern15", "matern25", "rq", "sum", "product", "expanded"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-6)])
def test_rounding_never_separates_a_point_from_itself(
    name: str, dtype: torch.dtype, tolerance: float, points: torch.Tensor
) -> None:
    origin = torch.zeros(1, 3, dtype=torch.float64)
    x = (points + 3.0).to(dtype)
    diagonal = ALL[name](x, x).diagonal().double()
    torch.testing.assert_close(diagonal, ALL[name](origin, origin)[0].expand(12), rtol=0, atol=tolerance)


@pytest.mark.parametrize("name", FORMULAS)
def test_values_equal_the_textbook_formula(name: str, points: torch.Tensor) -> None:
    kernel, heads = FORMULAS[name]
    x, y = points[:5].numpy(), points[5:].numpy()
    expected = np.stack([oracle.weights(heads, False, a, y) for a in x])
    np.testing.assert_allclose(kernel(points[:5], points[5:]).numpy(), expected, rtol=1e-13, atol=1e-14)


def test_kernels_add_up_with_sum_and_refuse_other_things(points: torch.Tensor) -> None:
    both = sum([RBF(1.0), Laplace(2.0)])
    assert isinstance(both, kernels.Sum)
    torch.testing.assert_close(both(points, points), RBF(1.0)(points, points) + Laplace(2.0)(points, points))
    with pytest.raises(TypeError):
        _ = RBF(1.0) * "2"  # pyright: ignore[reportOperatorIssue]


def test_relu_is_rightly_declared_indefinite() -> None:
    generator = torch.Generator().manual_seed(0)
    smallest = [
        float(torch.linalg.eigvalsh(ReLU()(x, x)).min())
        for x in torch.randn(20, 12, 3, generator=generator, dtype=torch.float64)
    ]
    assert min(smallest) < -0.1


def test_softmax_of_far_queries_is_finite() -> None:
    """exp underflows to 0/0 for a far query; log-sum-exp does not (theory 1)."""
    keys = torch.zeros(3, 2) + torch.arange(3.0)[:, None]
    weights = Softmax(RBF(0.01))(torch.full((1, 2), 1e4), keys)
    torch.testing.assert_close(weights, torch.tensor([[0.0, 0.0, 1.0]]))


@pytest.mark.parametrize("name", ["rbf", "laplace", "matern15", "matern25", "rq", "softmax-rbf", "softmax-matern"])
@pytest.mark.parametrize("temperature_scale", [1e-15, 1.0, 1e15])
def test_stationary_kernels_are_finite_at_any_distance(name: str, temperature_scale: float) -> None:
    kernel: Any = ALL[name]
    if isinstance(kernel, Softmax):
        kernel = Softmax(dataclasses.replace(cast(Any, kernel.kernel), temperature=temperature_scale))
    else:
        kernel = dataclasses.replace(kernel, temperature=temperature_scale)
    assert kernel.stationary
    x = torch.tensor([[0.0, 0.0], [1e-10, 0.0], [1e3, 1e3], [1e15, -1e15]])
    assert bool(kernel(x, x).isfinite().all())


def test_float32_distances_do_not_lose_digits_to_the_offset() -> None:
    """theory 6: uncentred float32 logits are off by 1.7 at a mean shift of 1000."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(20, 3, generator=generator)
    shifted = x + 1000.0
    exact = RBF(1.0)((shifted.double()), shifted.double())
    assert float((RBF(1.0)(shifted, shifted).double() - exact).abs().max()) < 1e-5


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RBF(-1.0), "RBF.temperature: expected a number > 0"),
        (lambda: RBF(float("nan")), "got nan"),
        (lambda: RBF(1e-320), "1e-30 to 1e30"),
        (lambda: Matern(1.0, nu=2.0), "Matern.nu"),
        (lambda: RBF(1.0) * -2.0, "Scale.factor"),
        (lambda: Softmax(Linear()), "strictly positive"),
        (lambda: Softmax(Softmax(RBF(1.0))), "elementary kernel"),
        (lambda: kernels.by_name("cubic"), "rbf, laplace"),
        (lambda: kernels.by_name("linear", 1.0), "temperature"),
        (lambda: kernels.from_config({"name": "os.system"}), "kernel config"),
        (lambda: kernels.from_config({"name": "RBF", "lengthscale": 1.0}), "fields of that kernel"),
        (lambda: kernels.Sum(()), "at least one kernel"),
    ],
)
def test_bad_parameters_are_named(make, message: str) -> None:
    with pytest.raises(InputError, match=message):
        make()
