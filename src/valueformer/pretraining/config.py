"""What to pretrain, on what, and how: one frozen, documented, JSON-ready description."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from typing_extensions import Self

from valueformer.arguments import check_gamma
from valueformer.errors import InputError
from valueformer.heads import Head, head_from_config
from valueformer.kernels import RBF

__all__ = ["PretrainConfig"]

Model = Literal["kernel", "matrices"]
Trained = Literal["steps", "temperatures", "mixing", "metric"]
Unit = Literal["plain", "safe", "fast"]
Loss = Literal["td", "residual", "value", "monte-carlo"]
Activation = Literal["linear", "relu", "softmax", "exp"]


@dataclass(frozen=True, kw_only=True)
class PretrainConfig:
    """A pretraining run. Equal configurations give equal weights, to the bit on one thread.

    **Tasks**

    - ``tasks``, ``validation``: specifications (:func:`valueformer.pretraining.tasks.parse`) to train on, and from other
      domains to choose the checkpoint by; a leading ``2*`` doubles a specification's share.
    - ``gamma``: discount, in [0, 1]. ``context_length``: transitions n per context.

    **Model "kernel"**: heads of kernel TD, whose constructed matrices are scaled by what trains.

    - ``heads``: the heads at the start. ``num_layers``: L.
    - ``train``: any of "steps" (one per layer and head), "temperatures" (one per head), "mixing" (fixed head weights instead
      of the gate) and "metric" (weights of the state's coordinates).
    - ``step_unit``: "plain", or relative to the context's own "safe" (1 / 1.05 lambda_max(K)) or "fast" (1 / sigma_max(M))
      step. ``step_bound``: upper bound of relative steps, approached by a sigmoid; plain steps are exp(parameter), unbounded.
      ``step_start``: relative steps start uniform in this range, so that not all get one gradient (theory 7.7); plain ones
      start at this range divided by the context length.
    - ``temperature_range``: a temperature stays within this factor of its start, either way.
    - ``metric_rank``: 0 for weights of coordinates within a factor of 4 of one, k for a free map to k dimensions.
    - ``guard``: whether the guard works during training too.

    **Model "matrices"**: unconstrained key-query and value matrices on the prompt of Wang et al. (2025).

    - ``activation``; ``tied``: one set of matrices for all layers ("auto" there) or one per layer ("sequential").
    - ``gain``: of the Glorot normal law that matrices start from (divided by L where layers are not tied).
    - ``factored``: train K and Q rather than their product. ``models``: so many seeds are trained side by side.
    - ``windows``: predictions per update along a sliding window; ``updates_per_task``: updates before the next task.

    **Loss**, over held-out queries of the same task: "td" (detached target), "residual" (gradient through the target), "value"
    (against the exact V, where it is known), "monte-carlo" (against returns, where they are known).

    - ``normalise``: divide each task's loss by the best constant's over context and queries, so that no reward scale rules.
    - ``tasks_per_update``, ``queries``: tasks in a batch and held-out transitions per task (model "kernel").

    **Optimisation**: Adam with ``learning_rate`` and ``weight_decay``; gradients longer than ``clip_norm`` are shortened (0:
    never); an update whose gradient is not finite is skipped and counted.

    - ``updates``: how many. ``seed``: of everything random. ``dtype``: of the computation.
    - ``validate_every``, ``validation_tasks``, ``patience``: how often to validate, on how many tasks, and after how many
      validations without improvement to stop (0: never).
    - ``checkpoint_every``: updates between checkpoints.
    """

    tasks: tuple[str, ...]
    validation: tuple[str, ...] = ()
    gamma: float = 0.9
    context_length: int = 300

    model: Model = "kernel"
    heads: tuple[Head, ...] = (Head(RBF(0.64)),)
    num_layers: int = 40
    train: tuple[Trained, ...] = ("steps", "temperatures")
    step_unit: Unit = "fast"
    step_bound: float = 2.0
    step_start: tuple[float, float] = (0.5, 1.5)
    temperature_range: float = 16.0
    metric_rank: int = 0
    guard: bool = False

    activation: Activation = "linear"
    tied: bool = True
    factored: bool = False
    gain: float = 0.1
    models: int = 1
    windows: int = 64
    updates_per_task: int = 1

    loss: Loss = "td"
    normalise: bool = True
    tasks_per_update: int = 8
    queries: int = 200

    learning_rate: float = 0.02
    weight_decay: float = 0.0
    clip_norm: float = 1.0
    updates: int = 300
    seed: int = 0
    dtype: Literal["float32", "float64"] = "float32"
    validate_every: int = 25
    validation_tasks: int = 16
    patience: int = 0
    checkpoint_every: int = 25

    def __post_init__(self) -> None:
        for name in ("tasks", "validation", "heads", "train", "step_start"):
            value = getattr(self, name)
            if not isinstance(value, (tuple, list)):
                raise InputError(name, "a sequence", repr(value))
            object.__setattr__(self, name, tuple(value))
        check_gamma(self.gamma)
        if not self.tasks or not all(isinstance(t, str) and t for t in (*self.tasks, *self.validation)):
            raise InputError("tasks", "specifications such as 'mrp:boyan'", repr(self.tasks), "valueformer pretrain --help")
        if not self.heads or not all(isinstance(h, Head) for h in self.heads):
            raise InputError("heads", "vf.Head objects", repr(self.heads))
        for name, kind in (("model", Model), ("step_unit", Unit), ("activation", Activation), ("loss", Loss)):
            _one_of(name, getattr(self, name), get_args(kind))
        _one_of("dtype", self.dtype, ("float32", "float64"))
        for what in self.train:
            _one_of("train", what, get_args(Trained))
        for name, least in (
            ("context_length", 2), ("num_layers", 1), ("metric_rank", 0), ("models", 1), ("windows", 1),
            ("updates_per_task", 1), ("tasks_per_update", 1), ("queries", 1), ("updates", 1), ("seed", 0),
            ("validate_every", 1), ("validation_tasks", 1), ("patience", 0), ("checkpoint_every", 1),
        ):  # fmt: skip
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**31:
                raise InputError(name, f"a whole number >= {least}", repr(value))
        for name, least in (
            ("step_bound", 0.0), ("gain", 0.0), ("learning_rate", 0.0), ("temperature_range", 1.0),
            ("weight_decay", -1e-300), ("clip_norm", -1e-300),
        ):  # fmt: skip
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not least < value < math.inf:
                raise InputError(name, f"a finite number {'>= 0' if least < 0 else f'> {least:g}'}", repr(value))
        start = self.step_start
        if len(start) != 2 or not all(isinstance(x, (int, float)) for x in start) or not 0 < start[0] <= start[1] < math.inf:
            raise InputError("step_start", "two numbers, 0 < low <= high", repr(start))
        if self.step_unit != "plain" and not start[1] < self.step_bound:
            raise InputError("step_start", f"below the bound {self.step_bound:g}", str(start[1]), "raise step_bound")
        if self.model == "kernel" and self.models > 1:
            raise InputError("models", "1 for model 'kernel'", str(self.models), "run once per seed")
        if self.model == "kernel" and not self.train:
            raise InputError("train", " | ".join(get_args(Trained)), "nothing")
        if self.patience and not self.validation:
            raise InputError("patience", "validation tasks to be patient about", "none", "add --validate TASKS")

    def to_config(self) -> dict[str, Any]:
        """Return a JSON-ready description; :meth:`from_config` reads it."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return fields | {"heads": [head.to_config() for head in self.heads]}

    @classmethod
    def from_config(cls, config: Any) -> Self:
        """Build the configuration that :meth:`to_config` described; raises InputError."""
        if not isinstance(config, dict):
            raise InputError("pretraining configuration", "a JSON object", type(config).__name__)
        known = {f.name for f in dataclasses.fields(cls)}
        if unknown := set(config) - known:
            raise InputError(
                "pretraining configuration", f"fields among {', '.join(sorted(known))}", ", ".join(sorted(unknown))
            )
        fields = dict(config)
        if isinstance(fields.get("heads"), list):
            fields["heads"] = tuple(head_from_config(h) for h in fields["heads"])
        try:
            return cls(**fields)
        except TypeError as error:  # no tasks
            raise InputError("pretraining configuration", "tasks to train on", str(error)) from None

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a configuration from a JSON file; raises InputError."""
        try:
            return cls.from_config(json.loads(path.read_text(encoding="utf-8")))
        except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
            raise InputError(str(path), "a JSON file", str(error)) from None


def _one_of(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise InputError(name, " | ".join(allowed), repr(value))
