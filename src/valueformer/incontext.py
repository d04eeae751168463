"""A fitted context: its columns, the mixture that was read off them, and how states are asked about."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, cast

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import ArrayLike, NDArray
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from valueformer import fields
from valueformer.construction import construct_streams
from valueformer.errors import InputError
from valueformer.features import Scaler, ScalerKind, fit_scaler
from valueformer.fitting import Columns, Pass, Problem, scaled, scaled_states
from valueformer.gated import GatedTransformer
from valueformer.heads import Mix
from valueformer.mixing import gate
from valueformer.prompt import Layout
from valueformer.results import Status
from valueformer.solvers import TOLERANCE, Path, Solution, StepSchedule, StepSize, evaluate_kernel_sum
from valueformer.storage import PersistentModel
from valueformer.streams import StreamPrompt
from valueformer.support import Support
from valueformer.transitions import Transitions

__all__ = ["InContextModel"]

_LITERAL_TOKENS = 8192  # per prompt of the literal transformer: its attention matrices are tokens^2


class InContextModel(PersistentModel):
    """The part of an estimator that turns a context into a mixture of heads and evaluates it."""

    algorithm: Literal["td", "lstd"]
    step_size: StepSize
    num_layers: int | Literal["auto"]
    initial_level: Literal["context", "mean"] | float
    mix: Mix
    guard: bool | Literal["auto"]
    metric: ArrayLike | None
    device: str
    dtype: Literal["float32", "float64"]
    n_replicates: int
    random_state: int

    def _fit_scaler(self, kind: ScalerKind, data: Transitions) -> Scaler:
        scaler = fit_scaler(kind, data.observations, self.random_state)
        if self.metric is not None:
            scaler = dataclasses.replace(scaler, metric=np.asarray(self.metric, dtype=np.float64))
        if kind == "none" and self._stationary(kind):  # the kernel cannot tell, and float32 keeps its digits
            return dataclasses.replace(scaler, centre=data.observations.astype(np.float64).mean(axis=0))
        return scaler

    def _stationary(self, kind: ScalerKind) -> bool:
        return all(head.kernel.stationary for head in self.heads_ if head.scaler == kind)

    def _prepare(self) -> None:
        """Scale the context for each head; a fitted model that is read from files starts here too."""
        dtype = np.dtype(self.dtype)
        views: dict[ScalerKind, Transitions] = {}
        for kind, scaler in self.scalers_.items():
            views[kind] = scaled(self.context_, scaler, self._stationary(kind), dtype)
        self.problem_ = Problem(
            data=self.context_,
            views=views,
            rewards=self.context_.rewards,
            gamma=self.gamma_,
            algorithm=self.algorithm,
            step_size=self.step_size,
            num_layers=self.num_layers,
            ridge=self.ridge_,
            guard=_guarded(self.step_size) if self.guard == "auto" else bool(self.guard),
            dtype=getattr(torch, self.dtype),
            device=self._device,
        )
        self.replicates_: tuple[Tensor, NDArray[np.float64]] | None = None
        self.support_: Support | None = None

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

    def _gate(self, weight: NDArray[np.float64] | None) -> NDArray[np.float64]:
        """Return mixing weights, from TD errors on episodes left out where there are any."""
        if self.left_out_ is None:
            none = torch.zeros(1, len(self.heads_) + 1)
            return gate(none, None, "equal" if self.mix == "context" else self.mix).numpy()
        return gate(torch.tensor(self.left_out_), None if weight is None else torch.tensor(weight), "context").numpy()

    def _solution(self, done: Pass) -> Solution:
        """Return the mixture's result, in units of the rewards."""
        path, weights, power = done.path, self.mixing_weights_, self.reward_unit_**2
        single = [path.solution(h) for h in range(len(self.heads_))]
        initial, errors = done.mixed(weights)
        used = [s for s, w in zip(single, weights, strict=False) if w > 0] or single
        last = float(errors[-1]) if len(errors) else initial  # every layer may have overflowed
        closed = path.singular is not None
        status: Status = "converged" if closed or last <= TOLERANCE**2 * done.reward_square else "max_layers"
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
            errors = np.average(np.square(self.left_out_), axis=0, weights=share) * self.reward_unit_**2
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
            layout=cast(Layout, self.layout_),
            gamma=self.gamma_,
            step_sizes=steps,
            ridge=self.ridge_,
            obs_dim=next(iter(self.problem_.views.values())).obs_dim,
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

    def _narrow(self, values: NDArray[np.float64]) -> NDArray[Any]:
        dtype = np.dtype(self.dtype_)
        with np.errstate(over="ignore"):
            values = values.astype(dtype)
        if not np.isfinite(values).all():
            largest = np.finfo(dtype).max
            raise InputError("values", f"numbers below {largest:.2g}", "an overflow", "use dtype='float64' or rescale rewards")
        return values

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
        """Return how often each replicate drew each episode, ``(replicates, episodes)``; InputError with fewer than two."""
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


def _guarded(step_size: StepSize) -> bool:
    """Return whether steps are chosen from the context, and not given literally."""
    return isinstance(step_size, str) or (isinstance(step_size, StepSchedule) and step_size.unit != "plain")
