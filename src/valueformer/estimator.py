"""ValueFormer: fit a context, predict values, in scikit-learn's manners."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence
from typing import Any, Literal, cast

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import ArrayLike, NDArray
from sklearn.utils.validation import check_is_fitted
from torch import Tensor
from typing_extensions import Self

from valueformer import fields, kernels
from valueformer.construction import construct_streams
from valueformer.errors import InputError
from valueformer.features import Scaler, ScalerKind, fit_scaler
from valueformer.fitting import Columns, Pass, Problem, scaled, scaled_states
from valueformer.gated import GatedTransformer
from valueformer.heads import Head, Mix, with_scaler
from valueformer.kernels import Kernel
from valueformer.metrics import held_out_metrics
from valueformer.mixing import fold_of_rows, gate
from valueformer.parameters import LARGEST_REWARD, check_parameters
from valueformer.prompt import Layout
from valueformer.results import Status
from valueformer.solvers import TOLERANCE, Path, Solution, StepSize, distinct_states, evaluate_kernel_sum
from valueformer.storage import PersistentModel, bundled, bundled_heads
from valueformer.streams import StreamPrompt
from valueformer.support import QueryCheck, Support, excess, value_range
from valueformer.transitions import Transitions

__all__ = ["DivergenceWarning", "ValueFormer", "load_model"]

_LITERAL_TOKENS = 8192  # per prompt of the literal transformer: its attention matrices are tokens^2


class DivergenceWarning(UserWarning):
    """The iteration did not settle; values are those of its best layer."""


class ValueFormer(PersistentModel):
    """Evaluate the policy behind a log, in context: V(s) = E[sum_t gamma^t r_t | s_0 = s, behaviour policy].

    ``fit`` reads transitions as context and changes no weights; ``predict`` asks about states. With layout "fast" the numbers
    come from the solver, otherwise from the literal transformer's forward pass; both compute the same map.

    Parameters
    ----------
    kernel : str, Kernel or sequence of Head
        "default" or "fast", the frozen models in the package: several heads and a constant, mixed in context; or one kernel of
        scaled states, by itself or by name (:func:`valueformer.kernels.by_name`); or heads of your own.
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
    initial_level : "context", "mean" or float
        V before the first layer. "context": the constant of least mean squared TD error (theory 7.1). "mean": the constant whose
        TD errors average to zero, TD's own fixed point for a constant: nearer to recorded returns where few steps end an episode
        and gamma is near 1, at a larger TD error. Or a number.
    scaler : "isotropic", "standardize", "none" or None
        Fitted on the context's states alone (:func:`valueformer.features.fit_scaler`). None: each head's own, isotropic for
        a single kernel; a name puts all heads on that scaler.
    mix : "context", "equal" or "first"
        How several heads are mixed: by their TD errors on episodes left out of their context (:func:`valueformer.mixing.gate`),
        alike, or not at all.
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
    num_layers: int | Literal["auto"]
    step_size: StepSize
    scaler: ScalerKind | None
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
        gamma: float = 0.99,
        ridge: float = 0.0,
        initial_level: Literal["context", "mean"] | float = "context",
        scaler: ScalerKind | None = None,
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
        self.gamma = gamma
        self.ridge = ridge
        self.initial_level = initial_level
        self.scaler = scaler
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
        self.heads_ = self._heads()
        self.n_features_in_ = data.obs_dim
        self.gamma_, self.ridge_, self.layout_ = float(self.gamma), float(self.ridge), self.layout
        self.scalers_ = {kind: self._fit_scaler(kind, data) for kind in dict.fromkeys(h.scaler for h in self.heads_)}
        # A power of two: dividing by it is exact, so values scale exactly with rewards, and squares cannot overflow.
        largest = float(np.abs(data.rewards).max())
        if largest > LARGEST_REWARD:
            raise InputError("rewards", f"magnitudes up to {LARGEST_REWARD:g}", f"{largest:g}", "rescale the rewards")
        self.reward_unit_ = float(2.0 ** np.floor(np.log2(largest or 1.0)))
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
            return with_scaler(bundled_heads(self.kernel), self.scaler)
        kernel = kernels.by_name(self.kernel) if isinstance(self.kernel, str) else self.kernel
        return (Head(kernel, self.scaler or "isotropic"),)

    def _fit_scaler(self, kind: ScalerKind, data: Transitions) -> Scaler:
        scaler = fit_scaler(kind, data.observations, self.random_state)
        if kind == "none" and self._stationary(kind):  # the kernel cannot tell, and float32 keeps its digits
            return Scaler(data.observations.astype(np.float64).mean(axis=0), scaler.factor)
        return scaler

    def _stationary(self, kind: ScalerKind) -> bool:
        return all(head.kernel.stationary for head in self.heads_ if head.scaler == kind)

    def _prepare(self) -> None:
        """Scale the context for each head; a fitted model that is read from files starts here too."""
        dtype = np.dtype(self.dtype)
        views = {kind: scaled(self.context_, s, self._stationary(kind), dtype) for kind, s in self.scalers_.items()}
        self.problem_ = Problem(
            data=self.context_,
            views=views,
            rewards=self.context_.rewards,
            gamma=self.gamma_,
            algorithm=self.algorithm,
            step_size=self.step_size,
            num_layers=self.num_layers,
            ridge=self.ridge_,
            dtype=getattr(torch, self.dtype),
            device=self._device,
        )
        self.replicates_: tuple[Tensor, NDArray[np.float64]] | None = None
        self.support_: Support | None = None

    def _columns(self) -> Columns:
        """Return the context as a whole, then without each fold."""
        weights = np.ones((1, len(self.context_)))
        if self.fold_ is not None:
            weights = np.concatenate([weights, self.fold_ != np.arange(int(self.fold_.max()) + 1)[:, None]])
        return self._weighted(weights)

    def _weighted(self, weights: NDArray[np.float64]) -> Columns:
        """Return copies of the context under weights ``(b, n)`` on top of its own."""
        if self.context_.sample_weight is not None:
            weights = weights * self.context_.sample_weight
        level = self.initial_level
        if not isinstance(level, str):
            level = float(level) / self.reward_unit_
        return Columns.of(weights, self.context_.rewards, self.context_.discount(self.gamma_), level)

    def _solve(self) -> None:
        n, mixes = len(self.context_), len(self.heads_) > 1
        self.fold_ = fold_of_rows(self.context_.episode_index) if mixes and self.mix == "context" and n > 1 else None
        columns = self._columns()
        done = self.problem_.run(self.heads_, columns, values=self.fold_ is not None)
        self.left_out_ = None if self.fold_ is None else done.left_out(self.fold_)
        self.mixing_weights_ = self._gate(self.context_.sample_weight)
        self.level_ = float(columns.levels[0]) * self.reward_unit_
        self.solution_ = self._solution(done)
        self._literal(done.path.steps)
        if self.transformer_ is not None:
            errors = self.transformer_(self._prompt(self.context_.observations[:0])).td_error.cpu()
            self.solution_ = dataclasses.replace(self.solution_, td_error=errors * self.reward_unit_**2)
        self.td_error_ = self.solution_.td_error.numpy()

    def _gate(self, weight: NDArray[np.float64] | None) -> NDArray[np.float64]:
        """Return mixing weights, from TD errors on episodes left out where there are any."""
        if self.left_out_ is None:
            none = torch.zeros(1, len(self.heads_) + 1)
            return gate(none, None, "equal" if self.mix == "context" else self.mix).numpy()
        return gate(torch.tensor(self.left_out_[0]), None if weight is None else torch.tensor(weight), "context").numpy()

    def _solution(self, done: Pass) -> Solution:
        """Return the mixture's result, in units of the rewards."""
        path, weights, power = done.path, self.mixing_weights_, self.reward_unit_**2
        single = [path.solution(h) for h in range(len(self.heads_))]
        initial, errors = done.mixed(weights)
        if not len(errors):  # every layer overflowed
            errors = np.zeros(0)
        used = [s for s, w in zip(single, weights, strict=False) if w > 0] or single
        last = float(errors[-1]) if len(errors) else initial
        status: Status = "converged" if last <= TOLERANCE**2 * done.reward_square else "max_layers"
        message = ""
        worst = next((s for kind in ("diverged", "singular") for s in used if s.status == kind), None)
        if worst is not None:
            status, message = worst.status, worst.message
        elif len(single) == 1:
            status, message = single[0].status, single[0].message
        elif status != "converged":
            share = np.sqrt(last / initial) if initial > 0 else 0.0
            message = f"rms TD error after {path.layers} layers is {share:.2g} of its start"
        stats = {
            "level": self.level_,
            "layers": path.layers,
            "rewinds": int(path.rewinds[:, 0].sum()),
            "improved": any(s.stats["improved"] for s in used),
            "initial_td_error": initial * power,
            "step_sizes": [s.stats["step_sizes"] for s in single],
            "heads": self._head_stats(path),
        }
        dual_coef = path.dual_coef[:, 0]  # (h, n)
        return Solution(dual_coef[:0, 0], dual_coef, torch.tensor(errors * power), status, message, stats)

    def _head_stats(self, path: Path) -> list[dict[str, Any]]:
        table = []
        for h, head in enumerate(self.heads_):
            steps = path.steps[:, h, 0]
            row = {
                "scaler": head.scaler,
                "kernel": str(head.kernel),
                "weight": float(self.mixing_weights_[h]),
                "step_size": float(steps[steps > 0][-1]) if bool((steps > 0).any()) else None,
                "rewinds": int(path.rewinds[h, 0]),
            }
            table.append(row)
        table.append({"scaler": None, "kernel": "constant", "weight": float(self.mixing_weights_[-1])})
        if self.left_out_ is not None:
            share = self.context_.sample_weight
            errors = np.average(np.square(self.left_out_[0]), axis=0, weights=share) * self.reward_unit_**2
            table = [row | {"left_out_td_error": float(e)} for row, e in zip(table, errors, strict=True)]
        return table

    def _literal(self, steps: Float[Tensor, "l h b"] | None) -> None:
        """Build the transformer of what was fitted: parameters may have been set to something else since."""
        self.transformer_: GatedTransformer | None = None
        if steps is not None:
            steps = steps[(steps > 0).flatten(1).any(1)]  # layers that every stream took back leave no trace
        if self.layout_ == "fast" or steps is None or not len(steps):
            return
        self._steps = steps.numpy()
        kinds = list(self.problem_.views)
        transformer = construct_streams(
            [head.kernel for head in self.heads_],
            views=[kinds.index(head.scaler) for head in self.heads_],
            layout=self.layout_,
            gamma=self.gamma_,
            step_sizes=steps,
            ridge=self.ridge_,
            obs_dim=self.n_features_in_,
            dtype=getattr(torch, self.dtype_),
        )
        self.transformer_ = GatedTransformer(transformer, self.mix).to(self._device)

    @property
    def steps_(self) -> NDArray[np.float64]:
        """``(layers, heads, columns)`` step sizes of the literal transformer."""
        return self._steps

    def _prompt(self, points: NDArray[Any]) -> StreamPrompt:
        """Return the tokens of the context, its folds, and states asked about."""
        kinds = list(self.problem_.views)
        columns = self._columns()
        w = 1.0 - self.context_.discount(self.gamma_)
        return StreamPrompt.from_transitions(
            list(self.problem_.views.values()),
            [kinds.index(head.scaler) for head in self.heads_],
            columns.weights,
            self.context_.rewards - w * columns.levels[:, None],
            [self._scale(kind, points) for kind in kinds],
            layout=cast(Layout, self.layout_),
            fold=self.fold_,
            device=self._device,
        )

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

    def _narrow(self, values: NDArray[np.float64]) -> NDArray[Any]:
        dtype = np.dtype(self.dtype_)
        with np.errstate(over="ignore"):
            values = values.astype(dtype)
        if not np.isfinite(values).all():
            largest = np.finfo(dtype).max
            raise InputError("values", f"numbers below {largest:.2g}", "an overflow", "use dtype='float64' or rescale rewards")
        return values

    def _predict(self, observations: ArrayLike | Transitions) -> NDArray[np.float64]:
        """Return values in float64, so that differences of large ones keep their digits."""
        points = self._points(observations)
        if self.transformer_ is None:
            coefficients = self.solution_.dual_coef * torch.tensor(self.mixing_weights_[:-1, None]).to(self.solution_.dual_coef)
            values = self._kernel_sum(points, coefficients[:, None])[0]
        else:
            size = max(512, _LITERAL_TOKENS - 2 * len(self.context_))
            parts = [
                self.transformer_(self._prompt(points[start : start + size])).query_values.double().cpu().numpy()
                for start in range(0, len(points), size)
            ]
            values = np.concatenate(parts) if parts else np.zeros(0)
        return self.level_ + values * self.reward_unit_

    def _points(self, observations: ArrayLike | Transitions) -> NDArray[Any]:
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
        return points

    def _kernel_sum(self, points: NDArray[Any], coefficients: Float[Tensor, "h b n"]) -> NDArray[np.float64]:
        """Return the sum over heads of their kernel sums at points: ``(b, m)``."""
        total = np.zeros((coefficients.shape[1], len(points)))
        for kind, view in self.problem_.views.items():
            used = [h for h, head in enumerate(self.heads_) if head.scaler == kind and bool(coefficients[h].any())]
            if used:
                states = self._scale(kind, points)  # (m, d)
                centres = torch.tensor(view.observations).to(coefficients)  # (n, d)
                own = [self.heads_[h].kernel for h in used]
                parts = evaluate_kernel_sum(own, torch.tensor(states).to(coefficients), centres, coefficients[used])
                total += parts.double().sum(0).cpu().numpy()
        return total

    def replicate_values(self, observations: ArrayLike | Transitions) -> NDArray[np.float64]:
        """Return V(s) under each bootstrap replicate of the context's episodes, ``(replicates, m)``, in units of the rewards.

        A replicate weights each episode by how often it was drawn, takes its own level, steps and mixing weights, and is
        one more column of the same matrix products. Replicates are computed at the first call.
        """
        points = self._points(observations)
        if self.replicates_ is None:
            self.replicates_ = self._resample()
        coefficients, levels = self.replicates_
        return (self._kernel_sum(points, coefficients) + levels[:, None]) * self.reward_unit_

    def draws(self) -> NDArray[np.int64]:
        """Return how often each replicate drew each episode, ``(replicates, episodes)``; raises InputError with fewer than two."""
        weight = np.bincount(self.context_.episode_index, weights=self.context_.sample_weight)
        counted = weight > 0  # an episode without weight says nothing
        if counted.sum() < 2:
            raise InputError("context", "at least two episodes, to draw from", "one", "a spread needs more than one")
        share = counted / counted.sum()
        return np.random.default_rng(self.random_state).multinomial(int(counted.sum()), share, size=self.n_replicates)

    def _resample(self) -> tuple[Float[Tensor, "h b n"], NDArray[np.float64]]:
        """Return the coefficients, times mixing weights, and the levels ``(b,)`` of all replicates."""
        draws = self.draws()
        columns = self._weighted(draws[:, self.context_.episode_index].astype(np.float64))
        done = self.problem_.run(self.heads_, columns)
        gates = np.array([self._gate(column) for column in columns.weights])  # (b, h + 1)
        coefficients = done.path.dual_coef * torch.tensor(gates[:, :-1].T[..., None]).to(done.path.dual_coef)
        return coefficients, columns.levels

    def check(self, observations: ArrayLike | Transitions) -> QueryCheck:
        """Return what to know about each answer: is the state far from the data, is V beyond what rewards could add up to?"""
        points = self._points(observations)
        if self.support_ is None:
            views = {kind: view.observations.astype(np.float64) for kind, view in self.problem_.views.items()}
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

    def _scale(self, kind: ScalerKind, observations: NDArray[Any]) -> NDArray[Any]:
        return scaled_states(observations, self.scalers_[kind], self._stationary(kind), np.dtype(self.dtype_))

    @property
    def dtype_(self) -> str:
        """The dtype of what was fitted."""
        return str(next(iter(self.problem_.views.values())).observations.dtype)

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
