"""Properties that hold for every context hypothesis can think of; `make test-full` tries forty times as many."""

from __future__ import annotations

import io
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import valueformer as vf
from valueformer.kernels import RBF, ExpDot, Kernel, Laplace, Linear, Matern, RationalQuadratic, ReLU, Softmax

NUMBERS = st.floats(-10, 10, allow_nan=False).map(lambda x: round(x, 3))
KERNELS: list[Kernel] = [
    RBF(1.0),
    Laplace(0.3),
    Matern(2.0),
    RationalQuadratic(1.0),
    ReLU(),
    Linear(),
    ExpDot(100.0),
    Softmax(RBF(1.0)),
]


@st.composite
def contexts(draw: st.DrawFn) -> vf.Transitions:
    """Any small log: repeated states, huge and tiny units, every kind of end."""
    n, d = draw(st.integers(1, 12)), draw(st.integers(1, 3))
    unit = 10.0 ** draw(st.integers(-6, 6))
    states = draw(hnp.arrays(np.float64, (n, d), elements=NUMBERS))
    successors = draw(hnp.arrays(np.float64, (n, d), elements=NUMBERS))
    if draw(st.booleans()):  # contiguous
        successors[:-1] = states[1:]
    return vf.Transitions(
        observations=states * unit,
        next_observations=successors * unit,
        rewards=draw(hnp.arrays(np.float64, n, elements=NUMBERS)) * 10.0 ** draw(st.integers(-9, 9)),
        terminated=draw(hnp.arrays(bool, n)),
        truncated=draw(hnp.arrays(bool, n)),
        discounts=draw(st.none() | hnp.arrays(np.float64, n, elements=st.floats(0, 1))),
    )


@given(contexts(), st.sampled_from(KERNELS), st.sampled_from(["isotropic", "standardize"]), st.sampled_from([0.0, 0.9, 1.0]))
def test_values_are_finite_and_scale_with_rewards(data: vf.Transitions, kernel: Kernel, scaler: Any, gamma: float) -> None:
    model = vf.ValueFormer(kernel=kernel, scaler=scaler, gamma=gamma, num_layers=15)
    values = model.fit(data).predict(data)
    assert np.isfinite(values).all()
    assert np.isfinite(model.td_error_).all()
    assert model.solution_.status in ("converged", "max_layers")
    assert model.td_error_[-1] <= model.solution_.stats["initial_td_error"] * (1 + 1e-6)
    doubled = vf.ValueFormer(kernel=kernel, scaler=scaler, gamma=gamma, num_layers=15)
    np.testing.assert_array_equal(doubled.fit(data.replace(rewards=data.rewards * 4.0)).predict(data), values * 4.0)


@given(contexts(), st.sampled_from(KERNELS), st.sampled_from(["pair", "residual", "two_group"]), st.sampled_from([0.0, 0.9]))
def test_the_transformer_equals_the_solver_on_any_context(
    data: vf.Transitions, kernel: Kernel, layout: Any, gamma: float
) -> None:
    fast = vf.ValueFormer(kernel=kernel, gamma=gamma, num_layers=6, dtype="float64").fit(data)
    literal = vf.ValueFormer(kernel=kernel, gamma=gamma, num_layers=6, dtype="float64", layout=layout).fit(data)
    a, b = fast.predict(data.next_observations), literal.predict(data.next_observations)
    size = max(np.abs(a).max(), np.abs(data.rewards).max(), np.finfo(float).tiny)
    # a distance within rounding of zero may be flushed by one path and not by the other: sqrt(eps) for the kinked kernel
    assert np.abs(a - b).max() <= (1e-6 if isinstance(kernel, Laplace) else 1e-10) * size


@given(contexts())
def test_evaluation_reports_only_finite_numbers(data: vf.Transitions) -> None:
    result = vf.evaluate(data, vf.ValueFormer(gamma=0.9, num_layers=5))

    def check(value: Any) -> None:
        if isinstance(value, dict):
            [check(item) for item in value.values()]
        elif isinstance(value, list):
            [check(item) for item in value]
        elif isinstance(value, float):
            assert np.isfinite(value)

    check(result.to_dict())
    assert result.heldout.n_folds == (min(10, data.n_episodes) if data.n_episodes > 1 else 0)
    if result.heldout.n_folds:
        assert np.isfinite(result.table["heldout_value"]).all()


def valid_npz() -> bytes:
    buffer, rng = io.BytesIO(), np.random.default_rng(0)
    x = rng.normal(size=(13, 2))
    np.savez_compressed(
        buffer,
        observations=x[:-1],
        next_observations=x[1:],
        rewards=rng.normal(size=12),
        terminated=np.arange(12) % 4 == 3,
        truncated=np.zeros(12, bool),
    )
    return buffer.getvalue()


NPZ = valid_npz()
CSV = b"obs_0,obs_1,reward,terminated,truncated,episode_id\n" + b"".join(
    f"{i}.5,{-i},{i % 3},{int(i % 4 == 3)},0,{i // 4}\n".encode() for i in range(12)
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


@given(
    st.sampled_from([NPZ, CSV]),
    st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), max_size=4),
    st.integers(0, 10**6),
)
def test_damaged_files_end_in_transitions_or_in_one_line(
    folder: Path, content: bytes, flips: list[tuple[int, int]], cut: int
) -> None:
    damaged = bytearray(content)
    for position, byte in flips:
        damaged[position % len(damaged)] = byte
    if cut % 3 == 0:
        damaged = damaged[: cut % len(damaged)]
    path = folder / "log"
    path.write_bytes(bytes(damaged))
    message = ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a zip library's own remarks
        try:
            data = vf.load(path)
        except vf.InputError as error:
            data, message = None, str(error)
    if data is None:
        assert "\n" not in message
        return
    assert np.isfinite(data.observations).all()
    assert np.isfinite(data.rewards).all()
