"""ValueFormer: fit a context, predict values, in scikit-learn's manners."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import ArrayLike, NDArray
from sklearn.utils.validation import check_is_fitted
from typing_extensions import Self

from valueformer import kernels
from valueformer.errors import InputError
from valueformer.features import ScalerKind
from valueformer.fitting import reward_unit
from valueformer.heads import Head, Mix, with_scaler
from valueformer.incontext import InContextModel
from valueformer.kernels import Kernel
from valueformer.metrics import held_out_metrics
from valueformer.mixing import fold_of_rows
from valueformer.parameters import LARGEST_REWARD, check_parameters
from valueformer.prompt import Layout
from valueformer.solvers import StepSchedule, StepSize, distinct_states
from valueformer.storage import bundled, bundled_heads, is_trained
from valueformer.support import QueryCheck, Support, excess, value_range
from valueformer.transitions import Transitions

__all__ = ["DivergenceWarning", "ValueFormer", "load_model"]

_LITERAL_TOKENS = 8192  # per prompt of the literal transformer: its attention matrices are tokens^2


class DivergenceWarning(UserWarning):
    """The iteration did not settle; values are those of its best layer."""


class ValueFormer(InContextModel):
    """Evaluate the policy behind a log, in context: V(s) = E[sum_t gamma^t r_t | s_0 = s, behaviour policy].

    ``fit`` reads transitions as context and changes no weights; ``predict`` asks about states. With layout "fast" the numbers
    come from the solver, otherwise from the literal transformer's forward pass; both compute the same map.

    Parameters
    ----------
    kernel : str, Kernel or sequence of Head
        "default" or "fast", the frozen models in the package: several heads and a constant, mixed in context; or one
        kernel of scaled states, by itself or by name (:func:`valueformer.kernels.by_name`); or heads of your own.
    num_layers : int or "auto"
        Depth L, one TD step per layer; "auto" runs until converged.
    algorithm : "td" or "lstd"
        L layers of kernel TD, or its fixed point in closed form (kernel LSTD).
    step_size : "fast", "safe", float, sequence of L floats or StepSchedule
        "fast": 1 / sigma_max(M). "safe": 1 / (1.05 (lambda_max(K) + ridge)). Both are guarded: a step after which the residual
        exceeds 4 times its best is taken back and halved (theory 7.3). Numbers are taken literally. A schedule gives every
        layer, and if it likes every head, its own multiple of those steps: what pretraining learns.
    guard : "auto" or bool
        Whether such steps are taken back; "auto": unless they are given literally.
    gamma : float in [0, 1]
        Discount per step; a transition's own ``discounts`` multiply it.
    ridge : float >= 0
        Leak of the residual stream, in units of the kernel.
    initial_level : "context", "mean" or float
        V before the first layer. "context": the constant of least mean squared TD error (theory 7.1). "mean": the constant
        whose TD errors average to zero, TD's own fixed point for a constant: nearer to recorded returns where few steps end
        an episode and gamma is near 1, at a larger TD error. Or a number.
    scaler : "isotropic", "standardize", "none" or None
        Fitted on the context's states alone (:func:`valueformer.features.fit_scaler`). None: each head's own, isotropic for
        a single kernel; a name puts all heads on that scaler.
    metric : array (d,) or (k, d), or None
        Weights of the scaled coordinates, or a linear map of them, before any kernel: a pretrained one fits one state space.
    mix : "context", "equal", "first" or sequence of h + 1 floats
        How several heads are mixed: by their TD errors on episodes left out of their context (:func:`valueformer.mixing.gate`),
        alike, not at all, or with given weights, the last one the constant's.
    layout : "fast", "pair", "residual", "trajectory" or "two_group"
        The solver, or the literal transformer with that token layout.
    device, dtype : str
        "auto" takes CUDA where there is one; "float32" or "float64".
    n_replicates : int >= 2
        Bootstrap replicates behind standard deviations and intervals.
    random_state : int
        Seeds the scaler's subsample and the bootstrap.

    Attributes
    ----------
    solution_ : Solution
        Status, message and statistics, in units of the rewards.
    td_error_ : ndarray (L,)
        Mean squared TD error on the context after each layer, weighted as the transitions are. With a literal layout one per
        layer of the transformer, which leaves out the layers that the guard took back.
    level_ : float
        The initial level.
    heads_ : tuple of Head
    mixing_weights_ : ndarray (heads + 1,)
        How much each head counts; the last entry is the constant's. ``solution_.stats["heads"]`` tells more.
    scalers_ : dict of Scaler
    transformer_ : GatedTransformer or None
        The literal transformer, with a layout other than "fast".
    n_features_in_ : int
    """

    # Declared, because constructors only store: scikit-learn's clone compares what it stored.
    kernel: Kernel | str | Sequence[Head]
    algorithm: Literal["td", "lstd"]
    num_layers: int | Literal["auto"]
    step_size: StepSize
    guard: bool | Literal["auto"]
    scaler: ScalerKind | None
    metric: ArrayLike | None
    mix: Mix
    layout: Literal["fast"] | Layout
    dtype: Literal["float32", "float64"]

    def __init__(
        self,
        *,
        kernel: Kernel | str | Sequence[Head] = "default",
        num_layers: int | Literal["auto"] = 40,
        algorithm: Literal["td", "lstd"] = "td",
        step_size: StepSize = "fast",
        guard: bool | Literal["auto"] = "auto",
        gamma: float = 0.99,
        ridge: float = 0.0,
        initial_level: Literal["context", "mean"] | float = "context",
        scaler: ScalerKind | None = None,
        metric: ArrayLike | None = None,
        mix: Mix = "context",
        layout: Literal["fast"] | Layout = "fast",
        device: str = "auto",
        dtype: Literal["float32", "float64"] = "float32",
        n_replicates: int = 100,
        random_state: int = 0,
    ) -> None:
        self.kernel = kernel
        self.num_layers = num_layers
        self.algorithm = algorithm
        self.step_size = step_size
        self.guard = guard
        self.gamma = gamma
        self.ridge = ridge
        self.initial_level = initial_level
        self.scaler = scaler
        self.metric = metric
        self.mix = mix
        self.layout = layout
        self.device = device
        self.dtype = dtype
        self.n_replicates = n_replicates
        self.random_state = random_state

    # -- fit ----------------------------------------------------------------------------------------------------------------

    def fit(self, data: Transitions, y: None = None) -> Self:
        """Read a context; no weights change. ``y`` is ignored (scikit-learn's convention). Returns self.

        Raises InputError for bad parameters or data that do not fit them; warns with DivergenceWarning where the iteration
        did not settle.
        """
        check_parameters(self)
        if not isinstance(data, Transitions):
            raise InputError("data", "vf.Transitions", type(data).__name__, "load it first: vf.load(data)")
        self.asked_ = self.get_params(deep=False)
        self.heads_ = self._heads()
        if isinstance(self.step_size, StepSchedule) and self.step_size.width not in (1, len(self.heads_)):
            width = str(self.step_size.width)
            raise InputError("step_size", f"rows of 1 or {len(self.heads_)} factors, one per head", width)
        self.n_features_in_ = data.obs_dim
        if self.metric is not None and (width := np.asarray(self.metric).shape[-1]) != data.obs_dim:
            raise InputError("metric", f"weights of {data.obs_dim} coordinates, as in the context", str(width))
        self.gamma_, self.ridge_, self.layout_ = float(self.gamma), float(self.ridge), self.layout
        kinds: list[ScalerKind] = list(dict.fromkeys(head.scaler for head in self.heads_))
        self.scalers_ = {kind: self._fit_scaler(kind, data) for kind in kinds}
        largest = float(np.abs(data.rewards).max())
        if largest > LARGEST_REWARD:
            raise InputError("rewards", f"magnitudes up to {LARGEST_REWARD:g}", f"{largest:g}", "rescale the rewards")
        self.reward_unit_ = reward_unit(data.rewards)
        level = self.initial_level
        if not isinstance(level, str) and not abs(float(level) / self.reward_unit_) <= LARGEST_REWARD:
            raise InputError("initial_level", "a level within 1e150 times the rewards", str(self.initial_level))
        self.context_ = data.with_numbers(
            observations=data.observations,
            next_observations=np.where(data.terminated[:, None], data.observations, data.next_observations),  # never read
            rewards=data.rewards.astype(np.float64) / self.reward_unit_,
            sample_weight=_relative(data.sample_weight),
        )
        self._prepare()
        self._solve()
        if self.solution_.status in ("diverged", "singular"):
            warnings.warn(f"{self.solution_.status}: {self.solution_.message}", DivergenceWarning, stacklevel=2)
        return self

    def _heads(self) -> tuple[Head, ...]:
        if isinstance(self.kernel, (list, tuple)):
            return with_scaler(self.kernel, self.scaler)
        if isinstance(self.kernel, str) and self.kernel in bundled():
            if is_trained(self.kernel):
                mend = f"ValueFormer.from_pretrained({self.kernel!r})"
                raise InputError("kernel", "a model of heads alone", f"{self.kernel!r}, which has trained steps too", mend)
            return with_scaler(bundled_heads(self.kernel), self.scaler)
        kernel = kernels.by_name(self.kernel) if isinstance(self.kernel, str) else self.kernel
        return (Head(cast(Kernel, kernel), self.scaler or "isotropic"),)

    def _solve(self) -> None:
        n, mixes = len(self.context_), len(self.heads_) > 1
        self.fold_ = fold_of_rows(self.context_.episode_index) if mixes and self.mix == "context" and n > 1 else None
        columns = self._columns()
        done = self.problem_.run(self.heads_, columns)
        self.left_out_ = None if self.fold_ is None else done.left_out(self.fold_)
        self.mixing_weights_ = self._gate(self.context_.sample_weight)
        self.level_ = float(columns.levels[0]) * self.reward_unit_
        self.solution_ = self._solution(done)
        self._literal(done.path.steps)
        if self.transformer_ is not None:
            errors = self.transformer_(self._prompt(self.context_.observations[:0])).td_error.cpu()
            self.solution_ = dataclasses.replace(self.solution_, td_error=errors * self.reward_unit_**2)
        self.td_error_ = self.solution_.td_error.numpy()

    # -- predict ------------------------------------------------------------------------------------------------------------

    def predict(self, observations: ArrayLike | Transitions, *, return_std: bool = False) -> Any:
        """Return V(s) of the behaviour policy at observations ``(m, d)``, as ``(m,)``, in units of the rewards.

        With ``return_std`` also its standard deviation ``(m,)`` over bootstrap replicates of the context's episodes: what
        another log of as many episodes would change. Raises NotFittedError before fit, InputError for another dimension,
        numbers that are not finite, or a context of one episode, which has no replicates.
        """
        values = self._narrow(self._predict(observations))
        if not return_std:
            return values
        return values, self._narrow(self.replicate_values(observations).std(axis=0, ddof=1))

    def check(self, observations: ArrayLike | Transitions) -> QueryCheck:
        """Return what to know about each answer: is the state far from the data, is V beyond what rewards could add up to?"""
        points = self._points(observations)
        if self.support_ is None:
            views: dict[ScalerKind, NDArray[np.float64]] = {}
            for kind, view in self.problem_.views.items():
                views[kind] = view.observations.astype(np.float64)
            groups = fold_of_rows(self.context_.episode_index) if self.context_.n_episodes == 1 else self.context_.episode_index
            self.support_ = Support.of(views, groups, self.random_state)
        distance = self.support_.distance({kind: self._scale(kind, points).astype(np.float64) for kind in self.problem_.views})
        low, high = value_range(self.context_.rewards, self.gamma_, bool(self.context_.terminated.any()))
        values = self._predict(points) / self.reward_unit_
        return QueryCheck(distance, distance > 1.0, excess(values, low, high))

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

    def _check_parameters(self) -> None:
        check_parameters(self)


def _relative(weight: NDArray[Any] | None) -> NDArray[np.float64] | None:
    """Return weights divided by their mean: only their proportions say anything, and a ridge keeps its meaning."""
    if weight is None:
        return None
    relative = weight.astype(np.float64) / max(float(weight.max()), np.finfo(np.float64).tiny)
    if not relative.any():
        raise InputError("sample_weight", "at least one weight > 0 in the context", "only zeros")
    return relative / relative.mean()


load_model = ValueFormer.load
