"""The frozen model on contexts of every ugly kind: finite numbers, and a flag on whatever rewards cannot add up to."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

import valueformer as vf
from tests.conftest import FULL, walk

COUNT = 10_000 if FULL else 160
CHUNKS = 20 if FULL else 4
KINDS = (
    "truncated", "terminal", "off-policy", "duplicated", "near-singular", "huge", "tiny", "mixed scales", "constant states",
    "one row", "rare reward", "ids", "far apart", "weights",
)  # fmt: skip


def ugly(seed: int) -> tuple[vf.Transitions, float]:
    """One random context of the kind that its seed asks for, and a discount."""
    rng = np.random.default_rng(seed)
    kind = KINDS[seed % len(KINDS)]
    lengths = tuple(int(x) for x in rng.integers(1, 12, size=rng.integers(1, 5)))
    ends = "terminated" if kind == "terminal" else str(rng.choice(["truncated", "open", "terminated"]))
    data = walk(seed, lengths, (ends,) * len(lengths), dim=int(rng.integers(1, 6)), step=float(10 ** rng.uniform(-2, 1)))
    s, t, r = np.array(data.observations), np.array(data.next_observations), np.array(data.rewards)
    n, d = s.shape
    gamma = float(rng.choice([0.0, 0.5, 0.9, 0.99, 0.999]))
    if kind == "terminal":
        gamma = float(rng.choice([0.9, 0.99, 1.0]))
    if kind == "off-policy":
        t = rng.normal(size=(n, d)) * rng.choice([0.01, 1.0, 10.0])
    if kind == "near-singular":
        s = s[:1] + 1e-7 * rng.normal(size=(n, d))
        t = s[:1] + 1e-7 * rng.normal(size=(n, d))
    if kind in ("huge", "tiny"):
        power = rng.uniform(6, 12) * (1 if kind == "huge" else -1)
        s, t, r = s * 10**power, t * 10**power, r * 10 ** (rng.uniform(6, 30) * np.sign(power))
    if kind == "mixed scales":
        scales = 10 ** rng.uniform(-8, 8, size=d)
        s, t = s * scales, t * scales
    if kind == "constant states":
        s, t = np.full_like(s, 3.0), np.full_like(t, 3.0)
    if kind == "rare reward":
        r = np.where(rng.random(n) < 0.05, 1000.0, 0.0)
    if kind == "ids":
        s, t = rng.integers(0, 5, size=(n, d)).astype(float), rng.integers(0, 5, size=(n, d)).astype(float)
    if kind == "far apart":
        s[0] += 1e8
    weight = rng.choice([0.0, 1e-6, 1.0, 1e6], size=n) if kind == "weights" else None
    if weight is not None:
        weight[0] = 1.0
    data = data.replace(observations=s, next_observations=t, rewards=r, sample_weight=weight)
    if kind == "duplicated":
        data = data[np.sort(rng.integers(0, n, size=n))].replace(episode_ids=np.arange(n), steps=np.zeros(n, int))
    return (data[:1] if kind == "one row" else data), gamma


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_no_nan_and_nothing_beyond_the_rewards_without_a_flag(chunk: int) -> None:
    size = COUNT // CHUNKS
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for seed in range(chunk * size, (chunk + 1) * size):
            data, gamma = ugly(seed)
            name = "fast" if seed % 3 else "default"
            model = vf.ValueFormer(kernel=name, gamma=gamma, n_replicates=5).fit(data)
            points = np.concatenate([data.observations, data.next_observations, 10.0 * data.observations + 1.0])
            values, check = model.predict(points), model.check(points)
            assert np.isfinite(values).all(), seed
            assert np.isfinite(model.td_error_).all(), seed
            assert np.isfinite(check.distance).all(), seed
            assert np.isfinite(check.excess).all(), seed
            assert model.solution_.status in ("converged", "max_layers"), seed
            assert model.solution_.stats["rewinds"] >= 0, seed
            assert abs(model.mixing_weights_.sum() - 1.0) < 1e-9, seed
            if gamma < 1.0:
                bounds = np.array([data.rewards.min(), data.rewards.max()]) / (1.0 - gamma)
                if data.terminated.any():  # a sum may be as short as one reward
                    bounds = np.array([min(bounds[0], data.rewards.min()), max(bounds[1], data.rewards.max())])
                rounding = 1e-4 * np.abs(bounds).max()
                beyond = (values < bounds[0] - rounding) | (values > bounds[1] + rounding)
                assert not (beyond & ~check.out_of_range).any(), seed
            if data.n_episodes > 1 and seed % 5 == 0 and (model.draws().sum() > 0):
                assert np.isfinite(model.predict(points, return_std=True)[1]).all(), seed


def test_gamma_one_is_exact_where_episodes_end() -> None:
    """Undiscounted time to the end of a deterministic chain, gamma 1: every step costs 1."""
    n, episodes = 12, 6
    x = np.tile(np.arange(n, dtype=float), episodes)[:, None]
    data = vf.Transitions(
        observations=x,
        next_observations=x + 1.0,
        rewards=-np.ones(n * episodes),
        terminated=np.tile(np.arange(n) == n - 1, episodes),
    )
    model = vf.ValueFormer(gamma=1.0, kernel="laplace", num_layers=4000, dtype="float64").fit(data)
    np.testing.assert_allclose(model.predict(x[:n]), np.arange(n) - n, atol=0.05)
    mixed = vf.ValueFormer(gamma=1.0, num_layers=400).fit(data)
    assert np.corrcoef(mixed.predict(x[:n]), np.arange(n) - n)[0, 1] > 0.95
