"""Does TD emerge in attention that was not told of it? How alike a trained transformer and batch TD are (Wang et al. 2025)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from valueformer.mrp import FiniteMRP
from valueformer.pretraining.batch import second_moments
from valueformer.pretraining.models import MatrixTransformer, linear_td_weights
from valueformer.pretraining.tasks import ProcessTasks, TaskDistribution, generator

__all__ = ["Examination", "Similarities"]

_STREAM = 2  # of the random numbers, apart from training's and validation's


@dataclass(frozen=True, eq=False)
class Similarities:
    """Per model ``(s,)``, means over chains."""

    value_difference: NDArray[np.float64]
    """``sum_s d(s) (V_TF(s) - V_TD(s))^2``, d the stationary distribution."""
    implicit_weight_similarity: NDArray[np.float64]
    """Cosine of TD's weights and of the weighted least squares fit of V_TF by linear functions."""
    sensitivity_similarity: NDArray[np.float64]
    """Expected cosine of the gradients of V_TF and V_TD with respect to the query."""


@dataclass(frozen=True, eq=False)
class Examination:
    """Fixed chains on which a transformer is compared with batch TD of as many layers."""

    contexts: Float[Tensor, "e n c"]
    features: Float[Tensor, "e k d"]
    stationary: Float[Tensor, "e k"]

    @classmethod
    def of(cls, tasks: TaskDistribution, *, n: int, gamma: float, seed: int, chains: int) -> Examination | None:
        """Draw chains; None where the tasks are no finite chains, or contexts have too few states to fit weights to."""
        if not isinstance(tasks, ProcessTasks):
            return None
        rngs = [generator(seed, _STREAM, i) for i in range(chains)]
        processes = [tasks.make(generator(seed, _STREAM, i), gamma) for i in range(chains)]
        finite = [p for p in processes if isinstance(p, FiniteMRP)]
        if len(finite) < chains or finite[0].features.shape[0] < finite[0].features.shape[1]:
            return None
        walks = tasks.walks(rngs, 1, n, gamma)  # of the same chains: the same generators
        following = walks.discounts[..., None] * walks.next_states
        rows = np.concatenate([walks.states, following, walks.rewards[..., None]], axis=-1)[:, 0]
        return cls(
            torch.tensor(rows), torch.tensor(np.stack([p.features for p in finite])),
            torch.tensor(np.stack([_stationary(p.transition) for p in finite])),
        )  # fmt: skip

    def compare(self, model: MatrixTransformer, td_step: Float[Tensor, " s"]) -> Similarities:
        """Return how alike V_TF and V_TD are, V_TD of each model's own trained TD step."""
        models = len(td_step)
        dtype = next(model.parameters()).dtype
        contexts = self.contexts.to(dtype).expand(models, -1, -1, -1)  # (s, e, n, c)
        points = self.features.to(dtype).expand(models, -1, -1, -1).clone().requires_grad_()  # (s, e, k, d)
        values = model.values_at(contexts, points)  # (s, e, k)
        (gradient,) = torch.autograd.grad(values.sum(), points)  # queries do not read one another
        with torch.no_grad():
            weights = linear_td_weights(second_moments(contexts), td_step, model.num_layers).double()  # (s, e, d)
            d, X = self.stationary, self.features  # (e, k), (e, k, d)
            v = values.double()
            td = (X @ weights[..., None])[..., 0]
            root = d.clamp_min(0.0).sqrt()  # (e, k)
            fitted = (torch.linalg.pinv(root[..., None] * X) @ (root * v)[..., None])[..., 0]  # (s, e, d)
            cosine = torch.nn.functional.cosine_similarity
            sensitivity = (d * cosine(gradient.double(), weights[:, :, None], dim=-1)).sum(-1)
            found = ((d * (v - td).square()).sum(-1), cosine(fitted, weights, dim=-1), sensitivity)
        return Similarities(*(x.mean(1).numpy() for x in found))


def _stationary(P: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the distribution d with ``d P = d``."""
    size = len(P)
    system = np.vstack([np.eye(size) - P.T, np.ones(size)])
    found: NDArray[np.float64] = np.linalg.lstsq(system, np.append(np.zeros(size), 1.0), rcond=None)[0].astype(float)
    return found
