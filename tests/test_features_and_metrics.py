from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
from scipy.spatial.distance import pdist
from sklearn.metrics import explained_variance_score

import valueformer as vf
from tests.conftest import walk
from valueformer.features import fit_scaler
from valueformer.metrics import best_constant, explained_variance, held_out_metrics


@pytest.fixture
def states() -> np.ndarray:
    return np.random.default_rng(0).normal(size=(300, 4)) * [1.0, 5.0, 0.2, 1e-4] + [0.0, 3.0, -1.0, 2.0]


def test_isotropic_scaling_makes_the_median_distance_one(states: np.ndarray) -> None:
    scaled = fit_scaler("isotropic", states).transform(states)
    assert np.median(pdist(scaled)) == pytest.approx(1.0, rel=1e-12)
    np.testing.assert_allclose(scaled.mean(axis=0), 0.0, atol=1e-12)
    np.testing.assert_allclose(np.ptp(scaled, axis=0) / np.ptp(states, axis=0), 1 / np.median(pdist(states)), rtol=1e-9)


def test_subsampling_is_seeded_and_close() -> None:
    states = np.random.default_rng(1).normal(size=(5000, 3))
    one, two, other = (fit_scaler("isotropic", states, seed).factor[0] for seed in (0, 0, 1))
    assert one == two != other
    assert one == pytest.approx(1 / np.median(pdist(states[:2000])), rel=0.05)


def test_standardize_drops_dead_columns_and_has_unit_mean_square_distance(states: np.ndarray) -> None:
    scaler = fit_scaler("standardize", states)
    scaled = scaler.transform(states)
    assert scaler.factor[3] == 0.0  # sd below 1 % of the largest
    np.testing.assert_allclose(scaled[:, :3].std(axis=0), 1 / np.sqrt(6), rtol=1e-12)
    assert np.mean(pdist(scaled) ** 2) == pytest.approx(1.0, rel=0.01)


@pytest.mark.parametrize("kind", ["isotropic", "standardize"])
@pytest.mark.parametrize("scale", [1e-150, 1e-8, 1.0, 1e8, 1e150])
def test_scaling_undoes_units(kind: Any, scale: float, states: np.ndarray) -> None:
    plain = fit_scaler(kind, states).transform(states)
    scaled = fit_scaler(kind, states * scale).transform(states * scale)
    np.testing.assert_allclose(scaled, plain, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", ["isotropic", "standardize"])
def test_constant_states_scale_to_zero(kind: Any) -> None:
    states = np.full((20, 3), 1e6 + 0.1, np.float32)
    np.testing.assert_array_equal(fit_scaler(kind, states).transform(states), 0.0)
    np.testing.assert_array_equal(fit_scaler(kind, states[:1]).transform(states[:1]), 0.0)


def test_mostly_duplicated_states_use_the_mean_square_distance() -> None:
    states = np.zeros((20, 1))
    states[-1] = 3.0
    assert fit_scaler("isotropic", states).factor[0] == pytest.approx(1 / np.sqrt(np.mean(pdist(states) ** 2)))


def test_none_and_unknown_scalers(states: np.ndarray) -> None:
    np.testing.assert_array_equal(fit_scaler("none", states).transform(states), states)
    with pytest.raises(vf.InputError, match="scaler: expected isotropic"):
        fit_scaler(cast(Any, "whiten"), states)


def test_best_constant_minimises_the_td_error() -> None:
    data = walk(0, discounts=np.random.default_rng(0).uniform(size=24), sample_weight=np.random.default_rng(1).uniform(size=24))
    g = data.discount(0.95)

    def error(c: float) -> float:
        return float(np.average((data.rewards + g * c - c) ** 2, weights=data.sample_weight))

    c = best_constant(data.rewards, g, data.sample_weight)
    assert all(error(c) < error(c + step) for step in (-1e-3, 1e-3))
    assert best_constant(np.ones(3), np.ones(3)) == 0.0  # gamma 1 without terminals: no constant matters


def test_held_out_metrics_by_hand() -> None:
    data = walk(3)
    rng = np.random.default_rng(0)
    values, td = rng.normal(size=24), rng.normal(size=24)
    metrics = held_out_metrics(data, 0.3, values=values, td=td, n_folds=3)
    power = np.mean(data.rewards**2)
    w = 1 - data.discount(0.3)
    c = np.linalg.lstsq(w[:, None], data.rewards, rcond=None)[0][0]
    constant = np.mean((data.rewards - c * w) ** 2)
    returns, remaining = data.monte_carlo_returns(0.3)
    kept = remaining <= 0.05
    assert kept.sum() not in (0, 24)
    assert metrics.td_error == pytest.approx(np.mean(td**2))
    assert metrics.td_ratio == pytest.approx(np.mean(td**2) / power)
    assert metrics.td_ratio_constant == pytest.approx(constant / power)
    assert metrics.tdc == pytest.approx(np.mean(td**2) / constant)
    assert metrics.explained_variance == pytest.approx(explained_variance_score(returns[kept], values[kept]))


def test_undefined_metrics_are_none() -> None:
    data = walk(0, ends=("truncated",) * 3)
    zero = data.replace(rewards=np.zeros(24))
    metrics = held_out_metrics(zero, 0.99, values=np.zeros(24), td=np.zeros(24), n_folds=3)
    assert (metrics.td_ratio, metrics.td_ratio_constant, metrics.tdc, metrics.explained_variance) == (None,) * 4
    assert metrics.td_error == 0.0
    ones = held_out_metrics(data.replace(rewards=np.ones(24)), 0.9, values=np.zeros(24), td=np.ones(24), n_folds=3)
    assert ones.tdc is None  # a constant is exact
    assert explained_variance(np.zeros(3), np.ones(3), np.zeros(3)) is None


def test_metrics_of_huge_rewards_do_not_overflow() -> None:
    data = walk(0)
    big = data.replace(rewards=data.rewards * 1e150)
    small = held_out_metrics(data, 0.5, values=data.rewards, td=data.rewards / 2, n_folds=2)
    large = held_out_metrics(big, 0.5, values=big.rewards, td=big.rewards / 2, n_folds=2)
    assert large.tdc == pytest.approx(small.tdc)
    assert large.explained_variance == pytest.approx(small.explained_variance)
