"""How many chains per second does pretraining get through, against one prompt and one model at a time?"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from valueformer.feature_prompt import FeaturePrompt
from valueformer.pretraining.batch import WindowBatch
from valueformer.pretraining.models import MatrixTransformer
from valueformer.pretraining.recipes import RECIPES
from valueformer.pretraining.training import Training

__all__ = ["run"]

_REPEATS = 3
_REFERENCE_CHAINS = 1


def run(models: int, chains: int, *, progress: Callable[[int, int], None] | None = None) -> dict[str, Any]:
    """Time the setting of Wang et al. (2025): d 4, 10 states, n 30, L 3, 64 windows x 5 updates of Adam per chain.

    The reference runs the same loss of one model through the literal attention stack, one prompt after the other, as the
    public code does. Rates are medians of repeats, summed over models; validation and checkpoints are left out.
    """
    config = dataclasses.replace(RECIPES["boyan"], models=models, updates=2**31 - 1, validate_every=2**31 - 1)
    training = Training(config)
    per_chain = config.updates_per_task
    training.run(until=2 * per_chain)  # warm-up
    rates = []
    for repeat in range(_REPEATS):
        before, start = training.step, time.perf_counter()
        training.run(until=before + chains * per_chain)
        rates.append(models * chains / (time.perf_counter() - start))
        if progress:
            progress(repeat + 1, _REPEATS + 1)
    single = Training(dataclasses.replace(config, models=1))
    single._batch(0)  # the walks of all its chains are drawn at once, and are no part of the comparison
    start = time.perf_counter()
    _one_at_a_time(single, _REFERENCE_CHAINS * per_chain)
    reference = _REFERENCE_CHAINS / (time.perf_counter() - start)
    if progress:
        progress(_REPEATS + 1, _REPEATS + 1)
    rate = statistics.median(rates)
    return {
        "setting": {"models": models, "chains": chains, "updates per chain": per_chain, "threads": torch.get_num_threads()},
        "chains per second": {"side by side": rate, "one prompt at a time": reference, "least": min(rates), "most": max(rates)},
        "ratio": {"side by side / one prompt at a time": rate / reference},
    }


def _one_at_a_time(training: Training, updates: int) -> None:
    """Train one model with a forward pass per prompt."""
    model = training.learner
    assert isinstance(model, MatrixTransformer)
    for step in range(updates):
        batch: WindowBatch = training._batch(step)
        stack = model.transformer(0)

        def predict(window: int, query: Tensor, batch: WindowBatch = batch, stack: Any = stack) -> Tensor:
            return stack(FeaturePrompt.of(batch.contexts[0, window], query[None])).query_values[0]

        targets, total = batch.targets, torch.zeros(())
        for w in range(batch.queries.shape[1]):
            with torch.no_grad():
                v_next = predict(w + 1, batch.successors[0, w])
            error = targets.rewards[0, w] + targets.discounts[0, w] * v_next - predict(w, batch.queries[0, w])
            total = total + error.square()
        training.optimiser.zero_grad()
        (total / batch.queries.shape[1]).backward()
        training.optimiser.step()
