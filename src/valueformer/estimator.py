"""ValueFormer: fit a context, predict values, in scikit-learn's manners."""

from __future__ import annotations

import dataclasses
import numbers
import warnings
from collections.abc import Sequence
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.utils.validation import check_is_fitted

from valueformer import fields, kernels
from valueformer.arguments import check_gamma, check_ridge, check_states, check_steps
from valueformer.construction import construct
from valueformer.errors import InputError
from valueformer.features import Scaler, ScalerKind, fit_scaler
from valueformer.kernels import Kernel
from valueformer.metrics import best_constant, held_out_metrics
from valueformer.prompt import Layout, Prompt
from valueformer.solvers import MAX_LAYERS, Context, StepSize, distinct_states, evaluate_kernel_sum, fixed_point, iterate
from valueformer.storage import PersistentModel
from valueformer.transformer import Transformer
from valueformer.transitions import Transitions

__all__ = ["DivergenceWarning", "ValueFormer", "load_model"]

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
        exceeds 4 times its best is taken back and halved (theory 7.3). Numbers are taken literally.
    gamma : float in [0, 1]
        Discount per step; a transition's own ``discounts`` multiply it.
    ridge : float >= 0
        Leak of the residual stream, in units of the kernel.
    initial_level : "context" or float
        V before the first layer: the context's constant of least TD error (theory 7.1), or a number.
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
        Mean squared TD error on the context after each layer, weighted as the transitions are. With a literal layout one per
        layer of the transformer, which leaves out the layers that the guard took back.
    level_ : float
        The initial level.
    scaler_ : Scaler
    kernel_ : Kernel
    transformer_ : Transformer or None
        The literal transformer, with a layout other than "fast".
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
        self.gamma_, self.ridge_ = float(self.gamma), float(self.ridge)
        self.scaler_ = fit_scaler(self.scaler, data.observations, self.random_state)
        if self.scaler == "none" and self.kernel_.stationary:  # the kernel cannot tell, and float32 keeps its digits
            self.scaler_ = Scaler(data.observations.astype(np.float64).mean(axis=0), self.scaler_.factor)
        discount = data.discount(self.gamma)
        # A power of two: dividing by it is exact, so values scale exactly with rewards, and squares cannot overflow.
        largest = float(np.abs(data.rewards).max())
        if largest > _LARGEST_REWARD:
            raise InputError("rewards", f"magnitudes up to {_LARGEST_REWARD:g}", f"{largest:g}", "rescale the rewards")
        self.reward_unit_ = float(2.0 ** np.floor(np.log2(largest or 1.0)))
        rewards = data.rewards.astype(np.float64) / self.reward_unit_
        weight = _relative(data.sample_weight)
        if self.initial_level == "context":
            level = best_constant(rewards, discount, weight)
        else:
            level = float(self.initial_level) / self.reward_unit_
            if not abs(level) <= _LARGEST_REWARD:
                raise InputError("initial_level", "a level within 1e150 times the rewards", str(self.initial_level))
        self.level_ = level * self.reward_unit_
        # V = level + f: kernel TD for f sees the rewards that the level leaves unexplained.
        successors = np.where(data.terminated[:, None], data.observations, data.next_observations)  # the rest is never read
        self.context_ = data.with_numbers(
            observations=self._scale(data.observations, np.dtype(self.dtype)),
            next_observations=self._scale(successors, np.dtype(self.dtype)),
            rewards=(rewards - (1.0 - discount) * level).astype(self.dtype),
            sample_weight=weight,
        )
        self._solve(float(np.average(np.square(rewards), weights=weight)))
        if self.solution_.status in ("diverged", "singular"):
            warnings.warn(f"{self.solution_.status}: {self.solution_.message}", DivergenceWarning, stacklevel=2)
        return self

    def _solve(self, reward_square: float) -> None:
        dtype = torch.float64 if self.algorithm == "lstd" else self._dtype  # a linear system amplifies rounding
        context = Context(self.kernel_, self.context_, gamma=self.gamma, dtype=dtype, device=self._device)
        if self.algorithm == "lstd":
            solution = fixed_point(context, ridge=self.ridge)
        else:
            solution, _ = iterate(
                context,
                step_size=self.step_size,
                num_layers=self.num_layers,
                ridge=self.ridge,
                guard=isinstance(self.step_size, str),
                reward_square=reward_square,
            )
        steps = solution.stats["step_sizes"]
        self.transformer_ = self._transformer(self.layout, steps) if self.layout != "fast" and steps else None
        if self.transformer_ is not None:
            output = self.transformer_(self._prompt(self.transformer_, None))
            solution = dataclasses.replace(solution, td_error=output.td_error.cpu())
        power = self.reward_unit_**2
        stats = dict(solution.stats) | {
            "initial_td_error": solution.stats["initial_td_error"] * power,
            "level": self.level_,
        }
        self.solution_ = dataclasses.replace(solution, td_error=solution.td_error * power, stats=stats)
        self.td_error_ = self.solution_.td_error.numpy()

    def _transformer(self, layout: Layout, steps: Sequence[float]) -> Transformer:
        """Return the transformer of what was fitted: parameters may have been set to something else since."""
        return construct(
            self.kernel_,
            layout=layout,
            gamma=self.gamma_,
            step_size=steps,
            num_layers=len(steps),
            ridge=self.ridge_,
            obs_dim=self.n_features_in_,
            dtype=getattr(torch, str(self.context_.observations.dtype)),
        ).to(self._device)

    def _prompt(self, transformer: Transformer, states: NDArray[Any] | None) -> Prompt:
        device = next(transformer.buffers()).device
        return Prompt.from_transitions(self.context_, states, layout=transformer.layout, device=device)

    # -- predict ------------------------------------------------------------------------------------------------------------

    def predict(self, observations: ArrayLike | Transitions) -> NDArray[Any]:
        """Return V(s) of the behaviour policy at observations ``(m, d)``, as ``(m,)``, in units of the rewards.

        Raises NotFittedError before fit, InputError for another dimension or numbers that are not finite.
        """
        values = self._predict(observations)
        dtype = self.context_.observations.dtype
        with np.errstate(over="ignore"):
            values = values.astype(dtype)
        if not np.isfinite(values).all():
            largest = np.finfo(dtype).max
            raise InputError("values", f"numbers below {largest:.2g}", "an overflow", "use dtype='float64' or rescale rewards")
        return values

    def _predict(self, observations: ArrayLike | Transitions) -> NDArray[np.float64]:
        """Return values in float64, so that differences of large ones keep their digits."""
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
        states = self._scale(points, self.context_.observations.dtype)  # (m, d)
        if self.transformer_ is None:
            dual_coef = self.solution_.dual_coef
            centres = torch.tensor(self.context_.observations).to(dual_coef)  # (n, d)
            values = evaluate_kernel_sum(self.kernel_, torch.tensor(states).to(dual_coef), centres, dual_coef)
        else:
            size = max(512, _LITERAL_TOKENS - 2 * len(self.context_))
            prompts = (self._prompt(self.transformer_, states[start : start + size]) for start in range(0, len(states), size))
            parts = [self.transformer_(prompt).query_values for prompt in prompts]
            values = torch.cat(parts) if parts else torch.zeros(0)
        return self.level_ + values.double().cpu().numpy() * self.reward_unit_

    def values_and_td_errors(self, data: Transitions) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return V(s_i) and ``delta_i = r_i + gamma_i V(s'_i) - V(s_i)``, each ``(n,)``, on any transitions."""
        check_is_fitted(self)
        states, successor = distinct_states(data, self.gamma_)
        values = self._predict(states)  # (u,): a state that is also a successor is asked about once
        bootstrap = data.discount(self.gamma_) * values[successor]
        values = values[: len(data)]
        return values, data.rewards.astype(np.float64) + bootstrap - values

    def score(self, data: Transitions, y: None = None) -> float:
        """Return 1 - TDc on transitions, best held out: 1 is a perfect fit, 0 no better than the best constant.

        NaN never leaves: where a constant is exact (TDc undefined) the score is 0.
        """
        values, td = self.values_and_td_errors(data)
        metrics = held_out_metrics(data, self.gamma_, values=values, td=td, n_folds=1)
        return 0.0 if metrics.tdc is None else 1.0 - metrics.tdc

    # -- details ------------------------------------------------------------------------------------------------------------

    def _scale(self, observations: NDArray[Any], dtype: np.dtype[Any]) -> NDArray[Any]:
        with np.errstate(over="ignore"):
            states = self.scaler_.transform(observations)
        if self.kernel_.stationary:
            # A query may lie so far away that its state overflows: to the kernel all far points are alike.
            limit = np.sqrt(np.finfo(dtype).max) / 2e3
            states = np.clip(states, -limit, limit)
        check_states("observations", states, getattr(torch, str(dtype)))
        return states.astype(dtype)

    @property
    def _dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def _device(self) -> torch.device:
        if self.device == "auto":
            return torch.device("cuda" if torch.cuda.is_available() else "cpu")
        try:
            return torch.empty(0, device=self.device).device
        except (RuntimeError, AssertionError, TypeError) as error:
            reason = (str(error).splitlines() or [""])[0]
            raise InputError("device", "'auto' or a torch device of this machine", repr(self.device), reason) from None

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
        if level != "context" and not (isinstance(level, numbers.Real) and not isinstance(level, bool) and np.isfinite(level)):
            raise InputError("initial_level", "'context' or a finite number", repr(level))
        check_ridge(self.ridge)
        if isinstance(self.step_size, str) and self.step_size not in ("fast", "safe"):
            raise InputError("step_size", "'fast', 'safe', a number or a sequence of numbers", repr(self.step_size))
        layers = MAX_LAYERS if self.num_layers == "auto" else self.num_layers
        check_steps(1.0 if isinstance(self.step_size, str) else self.step_size, layers)
        if isinstance(self.random_state, bool) or not isinstance(self.random_state, numbers.Integral) or self.random_state < 0:
            raise InputError("random_state", "a whole number >= 0", repr(self.random_state))


def _relative(weight: NDArray[Any] | None) -> NDArray[np.float64] | None:
    """Return weights divided by their mean: only their proportions say anything, and a ridge keeps its meaning."""
    if weight is None:
        return None
    relative = weight.astype(np.float64) / max(float(weight.max()), np.finfo(np.float64).tiny)
    if not relative.any():
        raise InputError("sample_weight", "at least one weight > 0 in the context", "only zeros")
    return relative / relative.mean()


load_model = ValueFormer.load
