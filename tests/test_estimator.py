"""The estimator: scikit-learn's manners, exact invariances, ugly contexts, files."""

from __future__ import annotations

import copy
import json
import pickle
import warnings
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.utils import estimator_checks

import valueformer as vf
from tests.conftest import walk
from valueformer.kernels import RBF, Laplace, Linear

LAYOUTS = ("fast", "pair", "residual", "trajectory", "two_group")
QUERIES = np.random.default_rng(5).normal(size=(40, 3))


def fresh(model: vf.ValueFormer) -> vf.ValueFormer:
    return cast(vf.ValueFormer, clone(model))


@pytest.mark.parametrize(
    "check",
    [
        "check_no_attributes_set_in_init",
        "check_parameters_default_constructible",
        "check_get_params_invariance",
        "check_set_params",
        "check_estimator_cloneable",
        "check_estimator_repr",
        "check_valid_tag_types",
    ],
)
def test_applicable_scikit_learn_checks(check: str) -> None:
    getattr(estimator_checks, check)("ValueFormer", vf.ValueFormer())


def test_not_fitted_features_and_kind_are_checked() -> None:
    with pytest.raises(NotFittedError):
        vf.ValueFormer().predict(QUERIES)
    with pytest.raises(NotFittedError):
        vf.ValueFormer().score(walk(0))
    model = vf.ValueFormer().fit(walk(0))
    assert model.n_features_in_ == 3
    with pytest.raises(vf.InputError, match="observations: expected 3 features, as in the context, got 2"):
        model.predict(QUERIES[:, :2])
    with pytest.raises(vf.InputError, match="observations: expected finite numbers"):
        model.predict(np.full((2, 3), np.nan))
    with pytest.raises(vf.InputError, match=r"data: expected vf\.Transitions, got ndarray"):
        vf.ValueFormer().fit(cast(Any, QUERIES))


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"gamma": 1.01}, "gamma"),
        ({"kernel": "cubic"}, "kernel"),
        ({"kernel": 3}, "kernel"),
        ({"algorithm": "sarsa"}, "algorithm"),
        ({"layout": "pairs"}, "layout: expected fast | pair"),
        ({"layout": "pair", "algorithm": "lstd"}, "a fixed point has no layers"),
        ({"dtype": "float16"}, "dtype"),
        ({"initial_level": "zero"}, "initial_level"),
        ({"scaler": "robust"}, "scaler"),
        ({"num_layers": 2.5}, "num_layers"),
        ({"ridge": -1.0}, "ridge"),
        ({"step_size": 0.0}, "step_size"),
        ({"step_size": None}, "step_size"),
        ({"step_size": ["a"] * 40}, "step_size"),
        ({"gamma": None}, "gamma"),
        ({"gamma": "0.9"}, "gamma"),
        ({"ridge": None}, "ridge"),
        ({"ridge": -1.0, "algorithm": "lstd"}, "ridge"),
        ({"device": "abacus"}, "device"),
        ({"num_layers": 10**12}, "num_layers"),
        ({"initial_level": 1e300}, "initial_level"),
    ],
)
def test_bad_parameters_are_named_by_fit(parameters: dict, message: str) -> None:
    model = vf.ValueFormer(**parameters)  # constructors only store
    with pytest.raises(vf.InputError, match=message.replace("|", r"\|")):
        model.fit(walk(0))


def test_fit_and_predict_change_no_parameter_and_repeat_to_the_bit() -> None:
    model = vf.ValueFormer(kernel=RBF(0.5), gamma=0.9)
    before = repr(model.get_params())
    first = model.fit(walk(0)).predict(QUERIES)
    model.fit(walk(1)).predict(QUERIES)
    assert repr(model.get_params()) == before
    np.testing.assert_array_equal(fresh(model).fit(walk(0)).predict(QUERIES), first)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("layout", LAYOUTS[1:])
def test_every_layout_computes_the_fast_path(layout: Any, dtype: Any) -> None:
    data = walk(2, discounts=np.random.default_rng(0).uniform(0.5, 1.0, 24))
    parameters: dict[str, Any] = {"gamma": 0.9, "dtype": dtype, "kernel": RBF(0.3) + Laplace(2.0)}
    fast = vf.ValueFormer(**parameters).fit(data)
    literal = vf.ValueFormer(layout=layout, **parameters).fit(data)
    tolerance = 1e-12 if dtype == "float64" else 1e-4
    a, b = fast.predict(QUERIES), literal.predict(QUERIES)
    assert np.abs(a - b).max() <= tolerance * np.abs(a).max()
    np.testing.assert_allclose(literal.td_error_, fast.td_error_, rtol=tolerance)
    assert len(literal.td_error_) == 40


def test_values_scale_exactly_with_rewards() -> None:
    data = walk(0)
    base = vf.ValueFormer(gamma=0.9).fit(data).predict(QUERIES)
    for factor in (2.0**40, -(2.0**-30)):  # a power of two changes no digit
        scaled = vf.ValueFormer(gamma=0.9).fit(data.replace(rewards=data.rewards * factor))
        np.testing.assert_array_equal(scaled.predict(QUERIES), base * factor)
    for factor in (1e12, 3.0, 1e-12):
        scaled = vf.ValueFormer(gamma=0.9, dtype="float64").fit(data.replace(rewards=data.rewards * factor))
        exact = vf.ValueFormer(gamma=0.9, dtype="float64").fit(data).predict(QUERIES) * factor
        np.testing.assert_allclose(scaled.predict(QUERIES), exact, rtol=1e-9, atol=1e-9 * abs(factor))


@pytest.mark.parametrize("scaler", ["isotropic", "standardize"])
def test_a_shift_or_unit_of_all_states_changes_nothing_but_rounding(scaler: Any) -> None:
    data = walk(0)

    def values(shift: float, scale: float, dtype: Any) -> np.ndarray:
        moved = data.replace(
            observations=data.observations * scale + shift, next_observations=data.next_observations * scale + shift
        )
        return vf.ValueFormer(gamma=0.9, scaler=scaler, dtype=dtype).fit(moved).predict(QUERIES * scale + shift)

    base = values(0.0, 1.0, "float64")
    size = np.abs(base).max()
    # a shift of 1e6 leaves float64 states 10 digits; the iteration amplifies them by its condition
    assert np.abs(values(1e6, 1.0, "float64") - base).max() < 1e-7 * size
    for scale in (1e8, 1e-8, 1e100):
        assert np.abs(values(0.0, scale, "float64") - base).max() < 1e-9 * size
    assert np.abs(values(0.0, 1.0, "float32") - base).max() < 1e-4 * size


def test_predictions_do_not_depend_on_chunks_or_other_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    from valueformer.solvers import context as solvers

    many = np.random.default_rng(0).normal(size=(3000, 3))
    model = vf.ValueFormer(gamma=0.9).fit(walk(0))
    whole = model.predict(many)
    scale = np.abs(whole).max()
    assert np.abs(np.concatenate([model.predict(many[i : i + 7]) for i in range(0, 3000, 7)]) - whole).max() < 1e-5 * scale
    assert np.abs(model.predict(np.vstack([many, many * 1e6]))[:3000] - whole).max() < 1e-5 * scale
    monkeypatch.setattr(solvers, "_TILE", 100)
    assert np.abs(model.predict(many) - whole).max() < 1e-5 * scale
    np.testing.assert_allclose(vf.ValueFormer(gamma=0.9).fit(walk(0)).predict(many), whole, atol=1e-5 * scale)


def test_literal_queries_do_not_depend_on_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    from valueformer import incontext

    model = vf.ValueFormer(gamma=0.9, layout="residual", kernel="laplace", dtype="float64").fit(walk(0))
    many = np.random.default_rng(0).normal(size=(1100, 3))
    whole = model.predict(many)
    monkeypatch.setattr(incontext, "_LITERAL_TOKENS", 1)
    np.testing.assert_allclose(model.predict(many), whole, rtol=0, atol=1e-12 * np.abs(whole).max())


def test_level_is_the_best_constant_and_far_queries_return_to_it() -> None:
    data = walk(0).replace(rewards=walk(0).rewards + 5.0)
    model = vf.ValueFormer(gamma=0.9, dtype="float64").fit(data)
    w = 1 - data.discount(0.9)
    assert model.level_ == pytest.approx((data.rewards * w).sum() / (w * w).sum())
    np.testing.assert_allclose(model.predict(np.full((1, 3), 1e30)), model.level_)
    zero = vf.ValueFormer(gamma=0.9, dtype="float64", initial_level=0.0).fit(data)
    assert zero.predict(np.full((1, 3), 1e30))[0] == 0.0
    assert model.solution_.stats["initial_td_error"] < zero.solution_.stats["initial_td_error"]
    with pytest.raises(vf.InputError, match="rewards: expected magnitudes up to 1e\\+150"):
        vf.ValueFormer().fit(data.replace(rewards=data.rewards * 1e200))


def test_gamma_one_on_terminal_data_is_the_undiscounted_return() -> None:
    """A deterministic corridor: V(k steps from the end) = k, exactly at the fixed point."""
    steps = 8
    eye = np.eye(steps)
    data = vf.Transitions(
        observations=eye,
        next_observations=np.roll(eye, -1, axis=0),
        rewards=np.ones(steps),
        terminated=np.arange(steps) == steps - 1,
    )
    for algorithm in ("td", "lstd"):
        model = vf.ValueFormer(kernel=RBF(0.05), gamma=1.0, num_layers=4000, algorithm=algorithm, dtype="float64")
        np.testing.assert_allclose(model.fit(data).predict(eye), np.arange(steps, 0, -1), rtol=1e-6)


def test_lstd_is_the_limit_of_depth() -> None:
    data = walk(4, (30,), ("terminated",), step=1.0)
    common: dict[str, Any] = {"kernel": RBF(0.1), "gamma": 0.9, "dtype": "float64"}
    deep = vf.ValueFormer(num_layers=20_000, **common).fit(data).predict(QUERIES)
    closed = vf.ValueFormer(algorithm="lstd", **common).fit(data)
    np.testing.assert_allclose(closed.predict(QUERIES), deep, rtol=1e-6, atol=1e-6)
    assert closed.solution_.status == "converged"


def test_divergence_warns_and_returns_the_best_layer() -> None:
    with pytest.warns(vf.DivergenceWarning, match="diverged: the residual (overflowed|grew)"):
        model = vf.ValueFormer(gamma=0.9, step_size=5.0).fit(walk(0))
    assert model.solution_.status == "diverged"
    np.testing.assert_allclose(model.predict(QUERIES), model.level_, rtol=1e-6)  # the best layer was the start


def replace_states(data: vf.Transitions, change) -> vf.Transitions:
    return data.replace(observations=change(data.observations), next_observations=change(data.next_observations))


UGLY = {
    "all-zero rewards": walk(0).replace(rewards=np.zeros(24)),
    "constant rewards": walk(0).replace(rewards=np.ones(24)),
    "constant states": replace_states(walk(0), np.ones_like),
    "one transition": walk(0)[:1],
    "one terminal transition": walk(0)[8:9],
    "one episode": walk(0)[:9],
    "one dimension": walk(0, dim=1),
    "duplicated states": vf.concatenate([walk(0), walk(0), walk(0)]),
    "states times 1e8": replace_states(walk(0), lambda x: x * 1e8),
    "states times 1e-8": replace_states(walk(0), lambda x: x * 1e-8),
    "states shifted by 1e6": replace_states(walk(0), lambda x: x + 1e6),
    "float32 states shifted by 1e6": replace_states(walk(0), lambda x: (x + 1e6).astype(np.float32)),
    "rewards of 1e12": walk(0).replace(rewards=walk(0).rewards * 1e12),
    "one huge reward": walk(0).replace(rewards=np.where(np.arange(24) == 3, 1e30, 1e-30)),
    "denormal rewards": walk(0).replace(rewards=np.full(24, 1e-310)),
    "500 dimensions, 40 rows": walk(1, (20, 20), ("terminated", "truncated"), dim=500),
    "zero discounts": walk(0, discounts=np.zeros(24)),
    "one weight": walk(0, sample_weight=(np.arange(24) == 5).astype(float)),
    "mixed scales": replace_states(walk(0), lambda x: x * [1e-6, 1.0, 1e6]),
    "off-policy successors": walk(0).replace(next_observations=walk(0).next_observations[::-1] * 5, episode_ids=np.arange(24)),
}


@pytest.mark.filterwarnings("ignore::valueformer.DivergenceWarning")
@pytest.mark.parametrize("gamma", [0.0, 0.99, 1.0])
@pytest.mark.parametrize("name", UGLY)
def test_ugly_contexts_give_finite_values(name: str, gamma: float) -> None:
    data = UGLY[name]
    queries = np.concatenate([data.observations, data.observations * 1e9, np.zeros((1, data.obs_dim))])
    variants: tuple[dict[str, Any], ...] = (
        {},
        {"scaler": "standardize", "step_size": "safe"},
        {"kernel": "laplace", "dtype": "float64", "num_layers": "auto"},
        {"kernel": "softmax-rbf", "layout": "residual", "num_layers": 5},
        {"kernel": "linear", "layout": "pair", "num_layers": 5},
        {"algorithm": "lstd", "ridge": 1e-3},
        {"algorithm": "lstd"},
    )
    for parameters in variants:
        model = vf.ValueFormer(gamma=gamma, **parameters).fit(data)
        values = model.predict(queries)
        assert np.isfinite(values).all(), parameters
        assert np.isfinite(model.td_error_).all()
        assert np.isfinite(model.score(data))


def test_zero_rewards_have_zero_value_everywhere() -> None:
    np.testing.assert_array_equal(vf.ValueFormer().fit(UGLY["all-zero rewards"]).predict(QUERIES), 0.0)


def test_score_is_one_minus_tdc() -> None:
    data = walk(0, (12, 12), ("terminated", "terminated"))
    model = vf.ValueFormer(gamma=0.5).fit(data)
    _, td = model.values_and_td_errors(data)
    w = 1 - data.discount(0.5)
    constant = np.mean((data.rewards - w * (data.rewards * w).sum() / (w * w).sum()) ** 2)
    assert model.score(data) == pytest.approx(1 - np.mean(td**2) / constant)
    assert model.td_error_[-1] == pytest.approx(np.mean(td**2), rel=1e-4)
    assert model.score(data.replace(rewards=np.zeros(24))) == 0.0


@pytest.mark.parametrize("kernel", ["laplace", RBF(0.3) * 0.5 + Linear()])
@pytest.mark.parametrize("layout", ["fast", "trajectory"])
def test_a_saved_context_predicts_the_same(kernel: str | vf.kernels.Kernel, layout: Any, tmp_path: Path) -> None:
    data = walk(0).replace(episode_ids=np.repeat(["x", "y", "z"], [9, 8, 7]), discounts=np.full(24, 0.9))
    model = vf.ValueFormer(kernel=kernel, gamma=0.9, layout=layout, step_size=[0.01] * 5, num_layers=5).fit(data)
    model.save(tmp_path / "fitted")
    assert sorted(p.name for p in (tmp_path / "fitted").iterdir()) == ["config.json", "context.safetensors"]
    loaded = vf.load_model(tmp_path / "fitted")
    np.testing.assert_array_equal(loaded.predict(QUERIES), model.predict(QUERIES))
    np.testing.assert_array_equal(loaded.td_error_, model.td_error_)
    assert loaded.solution_.status == model.solution_.status
    assert loaded.score(data) == model.score(data)
    with pytest.raises(NotFittedError):
        vf.ValueFormer().save(tmp_path / "unfitted")
    assert not (tmp_path / "unfitted").exists()


def test_pretrained_models_carry_no_gamma_and_no_data(tmp_path: Path) -> None:
    model = vf.ValueFormer(kernel=RBF(0.3) + Laplace(2.0), step_size=[0.1, 0.05], num_layers=2, gamma=0.5, ridge=0.01)
    model.fit(walk(0)).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert "gamma" not in config["parameters"]
    assert {p.name for p in tmp_path.iterdir()} == {"config.json", "model.safetensors"}
    again = vf.ValueFormer.from_pretrained(tmp_path, gamma=0.5)
    assert again.get_params() == fresh(model).get_params()
    np.testing.assert_array_equal(again.fit(walk(1)).predict(QUERIES), model.fit(walk(1)).predict(QUERIES))
    assert vf.ValueFormer.from_pretrained(tmp_path).gamma == 0.99


def test_large_levels_do_not_swamp_td_errors_in_float32() -> None:
    """V is c + f: TD errors of float32 values around 1e8 must not be differences of rounded numbers."""
    data = walk(0, ends=("truncated",) * 3)
    shifted = data.replace(rewards=data.rewards + 1e6)
    scores = [vf.ValueFormer(gamma=0.99, dtype=t).fit(shifted).score(shifted) for t in ("float32", "float64")]
    assert scores[0] == pytest.approx(scores[1], rel=1e-3)
    model = vf.ValueFormer(gamma=0.99).fit(shifted)
    assert np.mean(model.values_and_td_errors(shifted)[1] ** 2) == pytest.approx(model.td_error_[-1], rel=1e-2)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_unscaled_states_far_from_the_origin_keep_their_digits(layout: Any) -> None:
    data = walk(0)
    base = vf.ValueFormer(scaler="none", gamma=0.9, dtype="float64").fit(data).predict(QUERIES)
    far = replace_states(data, lambda x: x + 1000.0)
    moved = vf.ValueFormer(scaler="none", gamma=0.9, layout=layout).fit(far).predict(QUERIES + 1000.0)
    assert np.abs(moved - base).max() < 2e-3 * np.abs(base).max()


def test_a_linear_system_is_solved_in_float64_whatever_the_dtype() -> None:
    x = np.linspace(0, 3, 81)[:, None]
    data = vf.Transitions(
        observations=x[:-1], next_observations=x[1:], rewards=np.sin(3 * x[:-1, 0]), terminated=np.arange(80) == 79
    )
    for kernel, ridge in (("linear", 1e-6), ("linear", 0.0), ("expdot", 0.0), ("relu", 1e-6), ("rbf", 1e-6)):
        errors = []
        for dtype in ("float32", "float64"):
            model = vf.ValueFormer(algorithm="lstd", gamma=0.9, kernel=kernel, ridge=ridge, dtype=dtype)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", vf.DivergenceWarning)
                model.fit(data)
            errors.append(np.mean(model.values_and_td_errors(data)[1] ** 2))
        assert errors[0] == pytest.approx(errors[1], rel=1e-2, abs=1e-8), kernel


def test_states_too_large_for_an_unbounded_kernel_are_refused_not_clipped() -> None:
    data = replace_states(walk(0), lambda x: x * 1e16)
    with pytest.raises(vf.InputError, match=r"observations: expected finite numbers up to 1\.8e\+16"):
        vf.ValueFormer(kernel="linear", scaler="none").fit(data)
    model = vf.ValueFormer(kernel="linear", gamma=0.9).fit(walk(0))
    with pytest.raises(vf.InputError, match="observations"):
        model.predict(QUERIES * 1e30)


def test_only_proportions_of_sample_weights_matter() -> None:
    weight = np.random.default_rng(0).uniform(0.1, 1.0, 24)
    common: dict[str, Any] = {"gamma": 0.9, "dtype": "float64", "ridge": 0.1}
    for algorithm in ("td", "lstd"):
        values = [
            vf.ValueFormer(algorithm=algorithm, **common).fit(walk(0, sample_weight=weight * scale)).predict(QUERIES)
            for scale in (1.0, 1e300, 1e-300)
        ]
        np.testing.assert_allclose(values[1], values[0], rtol=1e-9)
        np.testing.assert_allclose(values[2], values[0], rtol=1e-9)
    partial = walk(0, sample_weight=(np.arange(24) >= 9).astype(float))
    with pytest.raises(vf.InputError, match="sample_weight: expected at least one weight > 0"):
        vf.ValueFormer().fit(partial[:9])
    with pytest.raises(vf.InputError, match="sample_weight"):
        vf.ValueFormer().fit(partial).score(partial[:9])


def test_convergence_is_measured_against_the_rewards() -> None:
    """rms TD error <= 1e-3 rms r; what the level already explains counts as converged."""
    data = walk(0).replace(rewards=10.0 + 0.005 * walk(0).rewards)
    assert vf.ValueFormer(gamma=0.9).fit(walk(0)).solution_.status == "max_layers"
    discounted = data.replace(terminated=np.zeros(24), truncated=None)
    model = vf.ValueFormer(gamma=0.9).fit(discounted)
    assert np.sqrt(model.td_error_[-1]) < 1e-3 * 10
    assert model.solution_.status == "converged"
    assert vf.ValueFormer(gamma=0.9, step_size=1e-300).fit(walk(0)).solution_.status == "max_layers"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_parameters_set_after_fit_change_nothing_fitted(layout: Any) -> None:
    data = walk(0)
    model = vf.ValueFormer(gamma=0.9, layout=layout, num_layers=3).fit(data)
    values, score = model.predict(QUERIES), model.score(data)
    model.set_params(gamma=0.5, dtype="float64", ridge=1.0, layout="two_group", scaler="none", kernel="laplace")
    np.testing.assert_array_equal(model.predict(QUERIES), values)
    assert model.score(data) == score


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_saved_is_what_was_fitted_not_later_parameters(layout: Any, tmp_path: Path) -> None:
    data = walk(0)
    model = vf.ValueFormer(gamma=0.9, layout=layout, kernel="rbf", ridge=0.1).fit(data)
    values, score = model.predict(QUERIES), model.score(data)
    model.set_params(gamma=0.5, ridge=1.0, kernel="laplace", layout="two_group", dtype="float64").save(tmp_path)
    loaded = vf.load_model(tmp_path)
    np.testing.assert_array_equal(loaded.predict(QUERIES), values)
    assert loaded.score(data) == score
    assert (loaded.gamma, loaded.kernel) == (0.9, "rbf")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_far_queries_read_the_level_in_every_layout(layout: Any) -> None:
    """A far query scores itself with a rounding error larger than any gate; it must stay silent as a key."""
    model = vf.ValueFormer(gamma=0.9, layout=layout, num_layers=3).fit(walk(0))
    for scale in (1e4, 1e6, 1e9, 1e12):
        far = model.predict(np.concatenate([QUERIES[:3] * scale, QUERIES[:3]]))
        np.testing.assert_allclose(far[:3], model.level_, rtol=1e-5)
        np.testing.assert_allclose(far[3:], model.predict(QUERIES[:3]), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kernel", ["rbf", "linear", "laplace", "softmax-rbf"])
def test_junk_behind_a_terminal_is_never_read(layout: Any, kernel: str) -> None:
    data = walk(0)
    junk = data.replace(next_observations=np.where(data.terminated[:, None], 1e200, data.next_observations))
    a, b = (vf.ValueFormer(gamma=0.9, layout=layout, kernel=kernel).fit(d).predict(QUERIES) for d in (data, junk))
    np.testing.assert_array_equal(a, b)


def test_data_and_fitted_models_survive_pickle_and_deepcopy() -> None:
    data = walk(0).replace(dropped={"why": 1})
    for layout in ("fast", "pair"):
        model = vf.ValueFormer(gamma=0.9, layout=layout, num_layers=3).fit(data)
        for twin in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
            np.testing.assert_array_equal(twin.predict(QUERIES), model.predict(QUERIES))
    twin = pickle.loads(pickle.dumps(data))
    assert dict(twin.dropped) == {"why": 1}
    with pytest.raises(ValueError, match="read-only"):
        twin.rewards[0] = 1.0
    lazy = vf.construct(RBF(1.0), gamma=0.9, step_size=0.1, num_layers=2)
    prompt = vf.Prompt.from_transitions(data, QUERIES)
    torch.testing.assert_close(pickle.loads(pickle.dumps(lazy))(prompt).trace, lazy(prompt).trace)


def test_numpy_step_sizes_and_early_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = np.full(5, 0.01)
    model = vf.ValueFormer(step_size=steps, num_layers=5).fit(walk(0))  # pyright: ignore[reportArgumentType]
    np.testing.assert_array_equal(
        model.predict(QUERIES), vf.ValueFormer(step_size=0.01, num_layers=5).fit(walk(0)).predict(QUERIES)
    )
    monkeypatch.setattr("valueformer.fitting.Context", None)  # refused before the kernel matrix is built
    refused: list[dict[str, Any]] = [
        {"num_layers": 0, "algorithm": "lstd"},
        {"step_size": "quick"},
        {"random_state": "a"},
        {"gamma": True},
    ]
    for parameters in refused:
        with pytest.raises(vf.InputError):
            vf.ValueFormer(**parameters).fit(walk(0))


def test_td_errors_are_weighted_alike_everywhere() -> None:
    data = walk(0, sample_weight=np.where(np.arange(24) == 5, 1.0, 1e-3))
    for layout in LAYOUTS:
        model = vf.ValueFormer(gamma=0.9, dtype="float64", layout=layout, num_layers=3).fit(data)
        _, td = model.values_and_td_errors(data)
        assert model.td_error_[-1] == pytest.approx(np.average(td**2, weights=data.sample_weight))


def test_a_kernel_that_could_not_be_read_back_is_refused_at_save(tmp_path: Path) -> None:
    class Mine(RBF):
        pass

    with pytest.raises(vf.InputError, match="kernel config: name"):
        vf.ValueFormer(kernel=Mine(1.0)).fit(walk(0)).save(tmp_path / "m")
    assert not (tmp_path / "m").exists()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("device", ["cpu", *(["cuda"] if torch.cuda.is_available() else [])])
def test_every_layout_runs_on_every_device(device: str, layout: Any, tmp_path: Path) -> None:
    model = vf.ValueFormer(gamma=0.9, device=device, layout=layout, num_layers=3).fit(walk(0))
    assert np.isfinite(model.predict(QUERIES)).all()
    model.save(tmp_path)
    assert "device" not in json.loads((tmp_path / "config.json").read_text())["parameters"]
    np.testing.assert_allclose(vf.ValueFormer.load(tmp_path, device="cpu").predict(QUERIES), model.predict(QUERIES), rtol=1e-4)


def test_numpy_numbers_are_parameters_too(tmp_path: Path) -> None:
    model = vf.ValueFormer(
        gamma=np.float32(0.5),  # pyright: ignore[reportArgumentType]
        random_state=np.int64(1),  # pyright: ignore[reportArgumentType]
        num_layers=np.int64(7),  # pyright: ignore[reportArgumentType]
        initial_level=np.int64(2),  # pyright: ignore[reportArgumentType]
    )
    model.fit(walk(0)).save(tmp_path)
    np.testing.assert_array_equal(vf.load_model(tmp_path).predict(QUERIES), model.predict(QUERIES))


def test_damaged_models_are_refused_in_one_line(tmp_path: Path) -> None:
    vf.ValueFormer().fit(walk(0)).save(tmp_path)
    cases = {
        "config.json": ['{"model": "other"}', "[]", "{", '{"format": 1, "model": "valueformer", "parameters": {"evil": 1}}'],
        "context.safetensors": ["not tensors", ""],
    }
    for name, contents in cases.items():
        good = (tmp_path / name).read_bytes()
        for content in contents:
            (tmp_path / name).write_text(content)
            with pytest.raises(vf.InputError):
                vf.load_model(tmp_path)
        (tmp_path / name).write_bytes(good)
    vf.load_model(tmp_path)
    document = json.loads((tmp_path / "config.json").read_text())
    for section, name, value in (
        ("fitted", "level", "abc"), ("fitted", "stats", {}), ("fitted", "stats", 3), ("fitted", "status", "x"),
        ("parameters", "kernel", 7), ("parameters", "dtype", "int8"), ("parameters", "gamma", 5), ("parameters", "step_size", "x"),
    ):  # fmt: skip
        changed = document | {section: document[section] | {name: value}}
        (tmp_path / "config.json").write_text(json.dumps(changed))
        with pytest.raises(vf.InputError):
            vf.load_model(tmp_path).fit(walk(0))
    (tmp_path / "config.json").unlink()
    with pytest.raises(vf.InputError, match=r"no config\.json"):
        vf.load_model(tmp_path)
