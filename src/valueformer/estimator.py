"""ValueFormer: fit a context, predict values, in scikit-learn's manners."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from valueformer import fields, kernels
from valueformer.construction import construct
from valueformer.errors import InputError
from valueformer.features import ScalerKind, fit_scaler
from valueformer.kernels import Kernel
from valueformer.metrics import best_constant, held_out_metrics
from valueformer.prompt import Layout, Prompt
from valueformer.solvers import Context, StepSize, check_gamma, distinct_states, evaluate_kernel_sum, fixed_point, iterate
from valueformer.storage import PersistentModel
from valueformer.transitions import Transitions

__all__ = ["DivergenceWarning", "ValueFormer"]

_LARGEST_REWARD = 1e150  # squares of TD errors stay finite
_LITERAL_TOKENS = 8192  # per prompt of the literal transformer: its attention matrices are tokens^2


class DivergenceWarning(UserWarning):
    """The iteration did not settle; values are those of its best layer."""


class ValueFormer(PersistentModel):
    """Evaluate the policy behind a log, in context: V(s) = E[sum_t gamma^t r_t | s_0 = s, behaviour policy].

    ``fit`` reads transitions as context and changes no weights; ``predict`` asks about states. With layout "fast" the numbers
    come from the solver, otherwise from the literal transformer's forward pass; both compute the same map.

    Parameters
    ----------
    kernel : Kernel or str
        A kernel of scaled states, or its name (:func:`valueformer.kernels.by_name`).
    num_layers : int or "auto"
        Depth L, one TD step per layer; "auto" runs until converged.
    algorithm : "td" or "lstd"
        L layers of kernel TD, or its fixed point in closed form (kernel LSTD).
    step_size : "fast", "safe", float or sequence of L floats
        "fast": 1 / sigma_max(M). "safe": 1 / (1.05 (lambda_max(K) + ridge)). Both are guarded: a step after which the residual
        exceeds twice its best is taken back and halved (THEORY section 7.3). Numbers are taken literally.
    gamma : float in [0, 1]
        Discount per step; a transition's own ``discounts`` multiply it.
    ridge : float >= 0
        Leak of the residual stream, in units of the kernel.
    initial_level : "context" or float
        V before the first layer: the context's constant of least TD error (THEORY section 7.1), or a number.
    scaler : "isotropic", "standardize" or "none"
        Fitted on the context's states alone (:func:`valueformer.features.fit_scaler`).
    layout : "fast", "pair", "residual", "trajectory" or "two_group"
        The solver, or the literal transformer with that token layout.
    device, dtype : str
        "auto" takes CUDA where there is one; "float32" or "float64".
    random_state : int
        Seeds the scaler's subsample.

    Attributes
    ----------
    solution_ : Solution
        Status, message and statistics, in units of the rewards.
    td_error_ : ndarray (L,)
        Mean squared TD error on the context after each layer.
    level_ : float
        The initial level.
    scaler_ : Scaler
    kernel_ : Kernel
    n_features_in_ : int
    """

    # Declared, because constructors only store: scikit-learn's clone compares what it stored.
    kernel: Kernel | str
    num_layers: int | Literal["auto"]
    step_size: StepSize
    scaler: ScalerKind
    layout: Literal["fast"] | Layout
    dtype: Literal["float32", "float64"]

    def __init__(
        self,
        *,
        kernel: Kernel | str = "rbf",
        num_layers: int | Literal["auto"] = 40,
        algorithm: Literal["td", "lstd"] = "td",
        step_size: StepSize = "fast",
        gamma: float = 0.99,
        ridge: float = 0.0,
        initial_level: Literal["context"] | float = "context",
        scaler: ScalerKind = "isotropic",
        layout: Literal["fast"] | Layout = "fast",
        device: str = "auto",
        dtype: Literal["float32", "float64"] = "float32",
        random_state: int = 0,
    ) -> None:
        self.kernel = kernel
        self.num_layers = num_layers
        self.algorithm = algorithm
        self.step_size = step_size
        self.gamma = gamma
        self.ridge = ridge
        self.initial_level = initial_level
        self.scaler = scaler
        self.layout = layout
        self.device = device
        self.dtype = dtype
        self.random_state = random_state

    # -- fit ----------------------------------------------------------------------------------------------------------------

    def fit(self, data: Transitions, y: None = None) -> ValueFormer:
        """Read a context. No weight changes; everything that adapts is computed from the context and stored.

        Raises InputError for parameters out of range or data that are not Transitions. Warns with DivergenceWarning where
        the iteration left its start behind; values are then those of the best layer.
        """
        self._check_parameters()
        if not isinstance(data, Transitions):
            raise InputError("data", "vf.Transitions", type(data).__name__, "load it first: vf.load(data)")
        self.kernel_ = kernels.by_name(self.kernel) if isinstance(self.kernel, str) else self.kernel
        self.n_features_in_ = data.obs_dim
        self.scaler_ = fit_scaler(self.scaler, data.observations, self.random_state)
        discount = data.discount(self.gamma)
        # A power of two: dividing by it is exact, so values scale exactly with rewards, and squares cannot overflow.
        largest = float(np.abs(data.rewards).max())
        if largest > _LARGEST_REWARD:
            raise InputError("rewards", f"magnitudes up to {_LARGEST_REWARD:g}", f"{largest:g}", "rescale the rewards")
        self.reward_unit_ = float(2.0 ** np.floor(np.log2(largest or 1.0)))
        rewards = data.rewards.astype(np.float64) / self.reward_unit_
        if self.initial_level == "context":
            level = best_constant(rewards, discount, data.sample_weight)
        else:
            level = float(self.initial_level) / self.reward_unit_
        self.level_ = level * self.reward_unit_
        # V = level + f: kernel TD for f sees the rewards that the level leaves unexplained.
        kept = {name: getattr(data, name) for name in _CONTEXT_FIELDS}
        self.context_ = Transitions(
            observations=self._scale(data.observations),
            next_observations=self._scale(data.next_observations),
            rewards=(rewards - (1.0 - discount) * level).astype(self.dtype),
            **kept,
        )
        self._solve()
        if self.solution_.status in ("diverged", "singular"):
            warnings.warn(f"{self.solution_.status}: {self.solution_.message}", DivergenceWarning, stacklevel=2)
        return self

    def _solve(self) -> None:
        context = Context(self.kernel_, self.context_, gamma=self.gamma, dtype=self._dtype, device=self._device)
        if self.algorithm == "lstd":
            solution = fixed_point(context, ridge=self.ridge)
        else:
            guard = isinstance(self.step_size, str)
            solution, _ = iterate(context, step_size=self.step_size, num_layers=self.num_layers, ridge=self.ridge, guard=guard)
        steps = solution.stats["step_sizes"]
        if self.layout != "fast" and steps:
            output = self._transformer(steps)(Prompt.from_transitions(self.context_, layout=self.layout))
            solution = dataclasses.replace(solution, td_error=output.td_error)
        power = self.reward_unit_**2
        stats = dict(solution.stats) | {
            "initial_td_error": solution.stats["initial_td_error"] * power,
            "level": self.level_,
        }
        self.solution_ = dataclasses.replace(solution, td_error=solution.td_error * power, stats=stats)
        self.td_error_ = self.solution_.td_error.numpy()

    def _transformer(self, steps: Sequence[float]) -> torch.nn.Module:
        assert self.layout != "fast"
        return construct(
            self.kernel_,
            layout=self.layout,
            gamma=self.gamma,
            step_size=steps,
            num_layers=len(steps),
            ridge=self.ridge,
            obs_dim=self.n_features_in_,
            dtype=self._dtype,
        ).to(self._device)

    # -- predict ------------------------------------------------------------------------------------------------------------

    def predict(self, observations: ArrayLike | Transitions) -> NDArray[Any]:
        """Return V(s) of the behaviour policy at observations ``(m, d)``, as ``(m,)``, in units of the rewards.

        Raises NotFittedError before fit, InputError for another dimension or numbers that are not finite.
        """
        check_is_fitted(self)
        if isinstance(observations, Transitions):
            observations = observations.observations
        points = fields.finite("observations", fields.matrix("observations", observations))
        if points.shape[1] != self.n_features_in_:
            raise InputError(
                "observations",
                f"{self.n_features_in_} features, as in the context",
                str(points.shape[1]),
                "same columns",
            )
        states = torch.tensor(self._scale(points), dtype=self._dtype, device=self._device)  # (m, d)
        steps = self.solution_.stats["step_sizes"]
        if self.layout == "fast" or not steps:
            centres = torch.tensor(self.context_.observations, dtype=self._dtype, device=self._device)
            values = evaluate_kernel_sum(self.kernel_, states, centres, self.solution_.dual_coef)
        else:
            values = self._read_out(states, steps)
        result = (self.level_ + values.double().cpu().numpy() * self.reward_unit_).astype(self.dtype)
        if not np.isfinite(result).all():
            largest = np.finfo(self.dtype).max
            raise InputError("values", f"numbers below {largest:.2g}", "an overflow", "use dtype='float64' or rescale rewards")
        return result

    def _read_out(self, states: Tensor, steps: Sequence[float]) -> Tensor:
        assert self.layout != "fast"
        transformer, parts = self._transformer(steps), []
        size = max(512, _LITERAL_TOKENS - 2 * len(self.context_))
        for start in range(0, len(states), size):
            chunk = states[start : start + size].cpu().numpy()
            prompt = Prompt.from_transitions(self.context_, chunk, layout=self.layout, dtype=self._dtype, device=self._device)
            parts.append(transformer(prompt).query_values)
        return torch.cat(parts) if parts else states.new_zeros(0)

    def values_and_td_errors(self, data: Transitions) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return V(s_i) and ``delta_i = r_i + gamma_i V(s'_i) - V(s_i)``, each ``(n,)``, on any transitions."""
        states, successor = distinct_states(data, self.gamma)
        values = self.predict(states).astype(np.float64)  # (u,): a state that is also a successor is asked about once
        bootstrap = data.discount(self.gamma) * values[successor]
        values = values[: len(data)]
        return values, data.rewards.astype(np.float64) + bootstrap - values

    def score(self, data: Transitions, y: None = None) -> float:
        """Return 1 - TDc on transitions, best held out: 1 is a perfect fit, 0 no better than the best constant.

        NaN never leaves: where a constant is exact (TDc undefined) the score is 0.
        """
        values, td = self.values_and_td_errors(data)
        metrics = held_out_metrics(data, self.gamma, values=values, td=td, n_folds=1)
        return 0.0 if metrics.tdc is None else 1.0 - metrics.tdc

    # -- details ------------------------------------------------------------------------------------------------------------

    def _scale(self, observations: NDArray[Any]) -> NDArray[Any]:
        with np.errstate(over="ignore"):
            states = self.scaler_.transform(observations).astype(self.dtype)
        # A query may lie so far away that its state overflows; any finite far point has the same (zero) similarity.
        limit = np.sqrt(np.finfo(self.dtype).max) / 1e3
        return np.clip(states, -limit, limit)

    @property
    def _dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def _device(self) -> torch.device:
        if self.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return torch.device(self.device)

    def _check_parameters(self) -> None:
        check_gamma(self.gamma)
        if not isinstance(self.kernel, (Kernel, str)):
            raise InputError("kernel", "a vf.kernels.Kernel or its name", repr(self.kernel))
        if self.algorithm not in ("td", "lstd"):
            raise InputError("algorithm", "'td' or 'lstd'", repr(self.algorithm))
        if self.layout != "fast" and self.layout not in get_args(Layout):
            raise InputError("layout", " | ".join(("fast", *get_args(Layout))), repr(self.layout))
        if self.layout != "fast" and self.algorithm == "lstd":
            raise InputError("layout", "'fast' with algorithm 'lstd'", repr(self.layout), "a fixed point has no layers")
        if self.dtype not in ("float32", "float64"):
            raise InputError("dtype", "'float32' or 'float64'", repr(self.dtype))
        level = self.initial_level
        if level != "context" and not (isinstance(level, (int, float)) and np.isfinite(level)):
            raise InputError("initial_level", "'context' or a finite number", repr(level))


_CONTEXT_FIELDS = (
    "terminated", "truncated", "discounts", "episode_ids", "steps", "sample_weight", "source", "format", "dropped",
)  # fmt: skip
