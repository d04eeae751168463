"""How fast is a forward pass? Ratios to attention recomputed in every layer, and to the machine's memory bandwidth."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from valueformer.construction import construct
from valueformer.estimator import ValueFormer
from valueformer.kernels import DEFAULT_TEMPERATURE, RBF, Laplace
from valueformer.prompt import Prompt
from valueformer.solvers import Context, iterate
from valueformer.transitions import Transitions
from valueformer.version import __version__

__all__ = ["contiguous_context", "run"]


def contiguous_context(length: int, dim: int) -> Transitions:
    """Return one long random-walk episode of ``length`` transitions in float32, whose states lie about 1 apart."""
    rng = np.random.default_rng(0)
    states = rng.normal(size=(length + 1, dim)).cumsum(axis=0)
    states = (states - states.mean(axis=0)) / states.std(axis=0) / np.sqrt(2 * dim)
    states = states.astype(np.float32)
    flags = np.zeros(length, bool)
    return Transitions(
        observations=states[:-1],
        next_observations=states[1:],
        rewards=rng.normal(size=length).astype(np.float32),
        terminated=flags,
        truncated=np.arange(length) == length - 1,
    )


def run(
    length: int, dim: int, layers: int, *, repeats: int = 3, progress: Callable[[int, int], None] | None = None
) -> dict[str, dict[str, Any]]:
    """Time the fast path, its floor and the recomputing transformer; medians of ``repeats`` after one warm-up each.

    - ``fast``: kernel matrix once, then one read of it per layer, with a fixed step.
    - ``floor``: one build of the same matrix, plus ``layers`` reads of as many bytes at the bandwidth of a plain sum.
    - ``recompute``: the literal transformer ("residual" layout), which computes attention from tokens in every layer; timed on
      two layers and scaled, since all layers do the same work.
    - ``one head``, ``model ..``: fitting a plain Laplace kernel, and the frozen models with their heads and folds, on the same
      context cut into episodes of 100.
    """
    data, kernel, gamma, dtype = contiguous_context(length, dim), RBF(DEFAULT_TEMPERATURE), 0.9, torch.float32
    step = 1.0 / length  # a fixed, safe step: lambda_max(K) <= n
    episodes = _in_episodes(data)
    plain = ValueFormer(kernel=Laplace(1.0), gamma=gamma, num_layers=layers, device="cpu")
    modes = {name: ValueFormer(kernel=name, gamma=gamma, num_layers=layers, device="cpu") for name in ("default", "fast")}
    context = Context(kernel, data, gamma=gamma, dtype=dtype)
    matrix = context.matrix
    prompt = Prompt.from_transitions(data, data.observations[:1], layout="residual", dtype=dtype)
    timed_layers = min(2, layers)
    model = construct(kernel, layout="residual", gamma=gamma, step_size=step, num_layers=timed_layers, obs_dim=dim, dtype=dtype)

    def fast() -> None:
        iterate(Context(kernel, data, gamma=gamma, dtype=dtype), step_size=step, num_layers=layers)

    def build() -> None:
        Context(kernel, data, gamma=gamma, dtype=dtype)

    def read() -> None:
        for _ in range(layers):
            matrix.sum()

    def recompute() -> None:
        with torch.no_grad():
            model(prompt)

    seconds = {}
    tasks: list[tuple[str, Callable[[], Any]]] = [("fast", fast), ("build", build), ("read", read), ("recompute", recompute)]
    tasks.append(("one head", lambda: plain.fit(episodes)))
    tasks += [(f"model {name}", lambda model=model: model.fit(episodes)) for name, model in modes.items()]
    for done, (name, task) in enumerate(tasks, 1):
        seconds[name] = _median(task, repeats)
        if progress:
            progress(done, len(tasks))
    seconds["recompute"] *= layers / timed_layers
    floor = seconds["build"] + seconds["read"]
    return {
        "setting": {"length": length, "dim": dim, "layers": layers, "dtype": "float32", "repeats": repeats},
        "ratio": {
            "recompute / fast": seconds["recompute"] / seconds["fast"],
            "fast / (one build + reads at bandwidth)": seconds["fast"] / floor,
            "model 'default' (6 heads, 3 folds) / one head": seconds["model default"] / seconds["one head"],
            "model 'fast' (2 heads, 3 folds) / one head": seconds["model fast"] / seconds["one head"],
        },
        "seconds": seconds,
        "machine": {
            "bandwidth GB/s": layers * matrix.numel() * matrix.element_size() / seconds["read"] / 1e9,
            "threads": torch.get_num_threads(),
            "processor": platform.machine(),
            "torch": torch.__version__,
            "valueformer": __version__,
        },
    }


def _in_episodes(data: Transitions) -> Transitions:
    """Return the same walk in episodes of 100 steps."""
    episode = np.arange(len(data)) // 100
    return data.replace(episode_ids=episode, truncated=np.append(episode[1:] != episode[:-1], True), steps=None)


def _median(task: Callable[[], None], repeats: int) -> float:
    task()  # warm-up
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        task()
        times.append(time.perf_counter() - start)
    return statistics.median(times)
