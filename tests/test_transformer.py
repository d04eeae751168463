"""The module itself: weights, masks, batches, dtypes, errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import valueformer as vf
from tests.conftest import walk
from valueformer.kernels import RBF, ExpDot, Laplace, Linear, ReLU, Softmax
from valueformer.prompt import Layout, channel_slices
from valueformer.transformer import AttentionBlock

LAYOUTS = ("pair", "residual", "trajectory", "two_group")
KERNELS = [RBF(1.0), ExpDot(4.0), Laplace(1.0), ReLU(), Linear(), Softmax(RBF(1.0)), RBF(0.5) + Laplace(2.0)]
QUERIES = np.random.default_rng(9).normal(size=(4, 3))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kernel", KERNELS, ids=str)
def test_batch_with_padding_equals_singles(kernel: vf.kernels.Kernel, layout: Layout) -> None:
    contexts = [walk(0), walk(1, (5,), ("truncated",)), walk(2, (3, 11), ("open", "terminated"))]
    prompts = [vf.Prompt.from_transitions(c, QUERIES, layout=layout) for c in contexts]
    model = vf.construct(kernel, layout=layout, gamma=0.9, step_size=0.02, num_layers=5, ridge=0.1)
    batched = model(vf.Prompt.stack(prompts))
    for i, prompt in enumerate(prompts):
        single = model(prompt)
        torch.testing.assert_close(batched.trace[:, i], single.trace, rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(batched.td_error[:, i], single.td_error, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_queries_never_affect_the_context_or_each_other(layout: Layout) -> None:
    data = walk(0)
    model = vf.construct(RBF(1.0), layout=layout, gamma=0.9, step_size=0.05, num_layers=6)
    both = model(vf.Prompt.from_transitions(data, np.concatenate([QUERIES, 100 * QUERIES]), layout=layout))
    alone = model(vf.Prompt.from_transitions(data, QUERIES, layout=layout))
    torch.testing.assert_close(both.query_values[:4], alone.query_values, rtol=0, atol=1e-14)
    torch.testing.assert_close(both.td_error, alone.td_error, rtol=1e-14, atol=0)


def test_state_dict_holds_the_matrices_and_round_trips() -> None:
    model = vf.construct(RBF(1.0) + RBF(4.0), layout="pair", gamma=0.9, step_size=[0.1, 0.2], num_layers=2, obs_dim=3)
    state = model.state_dict()
    assert set(state) == {f"layers.{i}.{name}" for i in (0, 1) for name in ("key", "query", "value", "residual")}
    assert state["layers.0.key"].shape == (4, 5, 14)  # two heads per temperature; 3 + 2 rows; 14 channels
    torch.testing.assert_close(state["layers.1.value"], 2 * state["layers.0.value"])
    assert not list(model.parameters())  # fixed weights are buffers
    other = vf.construct(RBF(1.0) + RBF(4.0), layout="pair", gamma=0.9, step_size=0.7, num_layers=2, obs_dim=3)
    other.load_state_dict(state)
    prompt = vf.Prompt.from_transitions(walk(0), QUERIES)
    assert torch.equal(other(prompt).trace, model(prompt).trace)


def test_value_matrix_is_the_papers_td_step() -> None:
    """Layout pair, head 1: value <- alpha (reward + gamma other_value - value), and nothing else."""
    model = vf.construct(RBF(1.0), layout="pair", gamma=0.9, step_size=0.25, num_layers=1, obs_dim=2)
    value = model.state_dict()["layers.0.value"][0]
    at = {name: s.start for name, s in channel_slices("pair", 2).items()}
    expected = torch.zeros(12, 12, dtype=torch.float64)
    expected[at["value"], at["reward"]] = 0.25
    expected[at["value"], at["other_value"]] = 0.25 * 0.9
    expected[at["value"], at["value"]] = -0.25
    assert torch.equal(value, expected)


def test_parameters_stay_parameters_and_get_gradients() -> None:
    """Trained weights run through the same forward pass."""
    built = vf.construct(RBF(1.0), layout="pair", gamma=0.9, step_size=0.1, num_layers=2, obs_dim=3)
    blocks = []
    for block in built.layers:
        assert isinstance(block, AttentionBlock)
        matrices = {n: getattr(block, n) for n in ("key", "query", "residual")}
        blocks.append(AttentionBlock(block.heads, value=torch.nn.Parameter(block.value.clone()), **matrices))
    model = vf.Transformer(blocks, layout="pair", gamma=0.9)
    prompt = vf.Prompt.from_transitions(walk(0), QUERIES)
    output = model(prompt)
    assert torch.equal(output.trace, built(prompt).trace)
    output.query_values.square().mean().backward()
    assert all(p.grad is not None and bool(p.grad.abs().sum() > 0) for p in model.parameters())
    assert len(list(model.parameters())) == 2


def test_dtype_follows_the_prompt_or_is_checked() -> None:
    lazy = vf.construct(RBF(1.0), gamma=0.9, step_size=0.1, num_layers=2)
    single = vf.Prompt.from_transitions(walk(0, dtype=np.float32), QUERIES)
    assert lazy(single).query_values.dtype == torch.float32
    with pytest.raises(vf.InputError, match=r"expected torch.float32, got torch.float64; call transformer.to"):
        lazy(vf.Prompt.from_transitions(walk(0), QUERIES))
    assert lazy.double()(vf.Prompt.from_transitions(walk(0), QUERIES)).query_values.dtype == torch.float64


def test_mismatched_prompts_are_refused() -> None:
    model = vf.construct(RBF(1.0), layout="pair", gamma=0.9, step_size=0.1, num_layers=1, obs_dim=3)
    with pytest.raises(vf.InputError, match=r"prompt\.layout: expected 'pair', got 'residual'"):
        model(vf.Prompt.from_transitions(walk(0), QUERIES, layout="residual"))
    with pytest.raises(vf.InputError, match=r"prompt\.tokens: expected 14 channels, got 12"):
        model(vf.Prompt.from_transitions(walk(0, dim=2), QUERIES[:, :2]))
    with pytest.raises(vf.InputError, match=r"queries: expected shape \(m, 3\), got \(4, 2\)"):
        vf.Prompt.from_transitions(walk(0), QUERIES[:, :2])
    with pytest.raises(vf.InputError, match="prompts: expected one layout"):
        vf.Prompt.stack([vf.Prompt.from_transitions(walk(0), QUERIES[:k]) for k in (1, 2)])
    for changes, message in (
        ({"step_size": [0.1]}, "step_size: expected 2 numbers"),
        ({"step_size": float("nan")}, "step_size"),
        ({"step_size": -1.0}, "step_size"),
        ({"step_size": "fast"}, "step_size"),
        ({"ridge": float("nan")}, "ridge"),
        ({"ridge": -1.0}, "ridge"),
        ({"num_layers": "auto"}, "num_layers"),
        ({"num_layers": 2.5}, "num_layers"),
        ({"layout": "pairs"}, "layout"),
        ({"gamma": 2.0}, "gamma"),
    ):
        arguments: dict[str, Any] = {"gamma": 0.9, "step_size": 0.1, "num_layers": 2} | changes
        with pytest.raises(vf.InputError, match=message):
            vf.construct(RBF(1.0), **arguments)


def test_trajectory_layout_refuses_rows_that_do_not_follow() -> None:
    data = walk(0)
    broken = data.replace(next_observations=np.where(np.arange(24)[:, None] == 4, 9.0, data.next_observations))
    with pytest.raises(vf.InputError, match="another one after row 4"):
        vf.Prompt.from_transitions(broken, layout="trajectory")
    vf.Prompt.from_transitions(broken, layout="pair")


def test_prompts_check_and_centre() -> None:
    data = walk(0, dtype=np.float32)
    with pytest.raises(vf.InputError, match="queries: expected finite numbers"):
        vf.Prompt.from_transitions(data, np.full((1, 3), np.nan))
    with pytest.raises(vf.InputError, match="prompts: expected at least one"):
        vf.Prompt.stack([])
    line = vf.Prompt.from_transitions(walk(0, dim=1), np.zeros(4))
    assert line.num_queries == 4
    far = data.replace(observations=data.observations + 1000, next_observations=data.next_observations + 1000)
    centre = far.observations.mean(axis=0)
    exact = vf.solve(RBF(1.0), data, QUERIES, gamma=0.9, step_size=0.05, num_layers=10, dtype=torch.float64).values
    model = vf.construct(RBF(1.0), gamma=0.9, step_size=0.05, num_layers=10)
    values = model(vf.Prompt.from_transitions(far, QUERIES + 1000, centre=centre)).query_values
    assert float((values.double() - exact).abs().max()) < 2e-3 * float(exact.abs().max())


def test_a_transformer_without_matrices_says_so() -> None:
    lazy = vf.construct(RBF(1.0), gamma=0.9, step_size=0.1, num_layers=2)
    for use in (lazy.state_dict, lambda: lazy.load_state_dict({}), lazy.float):
        with pytest.raises(vf.InputError, match="pass obs_dim to construct, or run a prompt first"):
            use()


def test_shuffled_rows_make_the_same_trajectory() -> None:
    data = walk(0)
    shuffled = data[np.random.default_rng(0).permutation(24)]
    model = vf.construct(RBF(1.0), layout="trajectory", gamma=0.9, step_size=0.05, num_layers=5)
    a, b = (model(vf.Prompt.from_transitions(d, QUERIES, layout="trajectory")).trace for d in (data, shuffled))
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


def test_interleaved_episodes_make_the_same_trajectory_values() -> None:
    data = walk(0, (4, 4), ("terminated", "truncated"))
    order = np.array([0, 4, 1, 5, 2, 6, 3, 7])
    model = vf.construct(RBF(1.0), layout="trajectory", gamma=0.9, step_size=0.05, num_layers=5)
    straight = model(vf.Prompt.from_transitions(data, QUERIES, layout="trajectory"))
    mixed = model(vf.Prompt.from_transitions(data[order], QUERIES, layout="trajectory"))
    torch.testing.assert_close(mixed.trace, straight.trace, rtol=1e-12, atol=0)
    torch.testing.assert_close(mixed.td_error, straight.td_error, rtol=1e-12, atol=0)


def test_empty_queries_still_run_the_context() -> None:
    output = vf.construct(RBF(1.0), gamma=0.9, step_size=0.1, num_layers=3)(vf.Prompt.from_transitions(walk(0)))
    assert output.query_values.shape == (0,)
    assert bool((output.td_error > 0).all())
