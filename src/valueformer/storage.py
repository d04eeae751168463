"""Models on disk: config.json beside safetensors, nothing executable, nothing half-written."""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file
from sklearn.base import BaseEstimator
from sklearn.utils.validation import check_is_fitted
from typing_extensions import Self

from valueformer import kernels
from valueformer.errors import InputError
from valueformer.features import Scaler, ScalerKind
from valueformer.files import write_atomically, write_text
from valueformer.gated import GatedTransformer
from valueformer.heads import Head, head_from_config
from valueformer.kernels import Kernel
from valueformer.results import Status, plain, to_json
from valueformer.solvers import Solution, StepSchedule
from valueformer.transitions import Transitions

__all__ = ["WEIGHTS", "PersistentModel", "bundled", "bundled_heads", "is_trained"]

FORMAT = 1
_NOT_FROZEN = ("gamma", "device", "random_state", "n_replicates")  # the user's question and machine, not the model
WEIGHTS = Path(__file__).parent / "weights"  # the frozen models in the package
_CONTEXT = (
    "observations", "next_observations", "rewards", "terminated", "truncated", "discounts", "steps", "sample_weight",
)  # fmt: skip
Tensors = dict[str, NDArray[Any]]


class PersistentModel(BaseEstimator, ABC):
    """The part of an estimator that knows files: frozen parameters, and a fitted context."""

    kernel: Kernel | str | Sequence[Head]
    metric: ArrayLike | None
    asked_: dict[str, Any]
    """The parameters at fit; they may have been set to something else since."""
    heads_: tuple[Head, ...]
    mixing_weights_: NDArray[np.float64]
    context_: Transitions
    scalers_: dict[ScalerKind, Scaler]
    fold_: NDArray[np.int64] | None
    left_out_: NDArray[np.float64] | None
    solution_: Solution
    td_error_: NDArray[np.float64]
    transformer_: GatedTransformer | None
    gamma_: float
    ridge_: float
    level_: float
    layout_: str
    reward_unit_: float
    n_features_in_: int

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the frozen model without any context: config.json and model.safetensors (step sizes given as numbers).

        gamma, device and random_state are the user's question and machine, not part of the model.
        """
        parameters, tensors = self._encode(self.get_params(deep=False))
        frozen = {name: value for name, value in parameters.items() if name not in _NOT_FROZEN}
        _write(Path(folder), {"parameters": frozen}, "model.safetensors", tensors)

    @classmethod
    def from_pretrained(cls, name: str | Path, **parameters: Any) -> Self:
        """Return a frozen model: of the package by name ("default"), or the folder that :meth:`save_pretrained` wrote.

        ``parameters`` (such as gamma) override or complete it. Raises InputError for what is neither.
        """
        known = isinstance(name, str) and name in bundled()
        if not known and isinstance(name, str) and not Path(name).exists():
            raise InputError("model", f"{', '.join(bundled())} or a folder", repr(name))
        folder = WEIGHTS / name if known else Path(name)
        config, tensors = _read(folder, "model.safetensors")
        return cls(**(cls._decode(config, tensors, folder) | parameters))

    def save(self, folder: str | Path) -> None:
        """Write the fitted model: config.json and context.safetensors. Read it with ``vf.load_model``."""
        check_is_fitted(self)
        parameters, tensors = self._encode(dict(self.asked_))
        solution = self.solution_
        arrays = {name: getattr(self.context_, name) for name in _CONTEXT} | {"episode_ids": self.context_.episode_index}
        tensors |= {f"context.{name}": a for name, a in arrays.items() if a is not None}
        tensors |= {
            "dual_coef": solution.dual_coef.cpu().numpy(),
            "td_error": solution.td_error.cpu().numpy(),
            "mixing_weights": self.mixing_weights_,
        }
        for kind, scaler in self.scalers_.items():
            tensors |= {f"scaler.{kind}.centre": scaler.centre, f"scaler.{kind}.factor": scaler.factor}
        if self.left_out_ is not None and self.fold_ is not None:
            tensors |= {"fold": self.fold_, "left_out": self.left_out_}
        if self.transformer_ is not None:
            tensors["steps"] = self.steps_
        del parameters["device"]  # the machine's, not the model's
        fitted = {
            "heads": [_head_config(head) for head in self.heads_],
            "gamma": self.gamma_,
            "ridge": self.ridge_,
            "layout": self.layout_,
            "level": self.level_,
            "reward_unit": self.reward_unit_,
            "status": solution.status,
            "message": solution.message,
            "stats": dict(solution.stats),
        }
        _write(Path(folder), {"parameters": parameters, "fitted": fitted}, "context.safetensors", tensors)

    @classmethod
    def load(cls, folder: str | Path, *, device: str = "auto") -> Self:
        """Return the fitted model that :meth:`save` wrote, on a device; it predicts the same values. Raises InputError."""
        config, tensors = _read(Path(folder), "context.safetensors")
        model = cls(**(cls._decode(config, tensors, folder) | {"device": device}))
        try:
            fitted = config["fitted"]
            arrays: dict[str, Any] = {n.removeprefix("context."): a for n, a in tensors.items() if n.startswith("context.")}
            model.heads_ = tuple(head_from_config(head) for head in fitted["heads"])
            model.gamma_, model.ridge_, model.layout_ = float(fitted["gamma"]), float(fitted["ridge"]), fitted["layout"]
            model.context_ = Transitions(**arrays, source=str(folder), format="fitted")
            model.n_features_in_ = model.context_.obs_dim
            kinds: list[ScalerKind] = list(dict.fromkeys(head.scaler for head in model.heads_))
            metric = None if model.metric is None else np.asarray(model.metric)
            model.scalers_ = {k: Scaler(tensors[f"scaler.{k}.centre"], tensors[f"scaler.{k}.factor"], metric) for k in kinds}
            model.level_, model.reward_unit_ = float(fitted["level"]), float(fitted["reward_unit"])
            model.mixing_weights_ = tensors["mixing_weights"]
            model.fold_ = tensors.get("fold")
            model.left_out_ = tensors["left_out"] if "fold" in tensors else None
            dual_coef, errors = torch.tensor(tensors["dual_coef"], device=model._device), torch.tensor(tensors["td_error"])
            if dual_coef.shape != (len(model.heads_), len(model.context_)) or len(model.mixing_weights_) != len(dual_coef) + 1:
                raise TypeError("coefficients of another shape")
            if fitted["status"] not in get_args(Status) or not {"layers", "heads", "improved"} <= set(fitted["stats"]):
                raise TypeError("status or statistics")
            model.solution_ = Solution(
                dual_coef[:0, 0], dual_coef, errors, fitted["status"], fitted["message"], fitted["stats"]
            )
            model.td_error_ = tensors["td_error"]
            model._check_parameters()
            model.asked_ = model.get_params(deep=False)
            model._prepare()
            model._literal(torch.tensor(tensors["steps"]) if "steps" in tensors else None)
            model.predict(model.context_.observations[:1])
        except InputError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InputError(str(folder), "a model written by ValueFormer.save", f"a damaged one ({error})") from None
        return model

    @abstractmethod
    def _check_parameters(self) -> None: ...

    @abstractmethod
    def _prepare(self) -> None: ...

    @abstractmethod
    def _literal(self, steps: torch.Tensor | None) -> None: ...

    @property
    @abstractmethod
    def _device(self) -> torch.device: ...

    @abstractmethod
    def predict(self, observations: ArrayLike) -> NDArray[Any]:
        """Return values ``(m,)`` at observations ``(m, d)``."""

    @property
    @abstractmethod
    def steps_(self) -> NDArray[np.float64]:
        """``(layers, heads, columns)`` step sizes of the literal transformer."""

    def _encode(self, parameters: dict[str, Any]) -> tuple[dict[str, Any], Tensors]:
        kernel, tensors = parameters["kernel"], {}
        if isinstance(kernel, Kernel):
            parameters["kernel"] = _kernel_config(kernel)
        elif not isinstance(kernel, str):
            parameters["kernel"] = [_head_config(head) for head in kernel]
            temperatures = [head["kernel"].pop("temperature", math.nan) for head in parameters["kernel"]]
            tensors["temperatures"] = np.array(temperatures)  # the weights of the model; NaN: inside a composite kernel
        if parameters["metric"] is not None:
            tensors["metric"] = np.asarray(parameters["metric"], dtype=np.float64)
            parameters["metric"] = "tensor"
        if isinstance(schedule := parameters["step_size"], StepSchedule):
            tensors["step_sizes"] = schedule.rows().numpy()
            parameters["step_size"] = {"unit": schedule.unit}
        elif not isinstance(parameters["step_size"], (str, int, float)):
            tensors["step_sizes"] = np.asarray(parameters["step_size"], dtype=np.float64)
            parameters["step_size"] = "tensor"
        return plain(parameters), tensors

    @classmethod
    def _decode(cls, config: dict[str, Any], tensors: Tensors, folder: str | Path) -> dict[str, Any]:
        parameters = dict(config["parameters"])
        if unknown := set(parameters) - set(cls().get_params(deep=False)):
            raise InputError(f"{folder}: parameters", "those of this version", f"unknown {sorted(unknown)}", "update it")
        try:
            if isinstance(parameters.get("kernel"), dict):
                parameters["kernel"] = kernels.from_config(parameters["kernel"])
            elif isinstance(parameters.get("kernel"), list):
                parameters["kernel"] = _decode_heads(parameters["kernel"], tensors["temperatures"])
            if parameters.get("step_size") == "tensor":
                parameters["step_size"] = tensors["step_sizes"].tolist()
            elif isinstance(parameters.get("step_size"), dict):
                rows = tuple(map(tuple, tensors["step_sizes"].tolist()))
                parameters["step_size"] = StepSchedule(parameters["step_size"]["unit"], rows)
            if isinstance(parameters.get("mix"), list):
                parameters["mix"] = tuple(parameters["mix"])
            if parameters.get("metric") is not None:
                parameters["metric"] = tensors["metric"]
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InputError(
                str(folder), "a model written by ValueFormer", f"a damaged one ({error})", "save it again"
            ) from None
        return parameters


def bundled() -> list[str]:
    """Return the names of the frozen models in the package."""
    return sorted(path.parent.name for path in WEIGHTS.glob("*/config.json"))


@lru_cache
def bundled_heads(name: str) -> tuple[Head, ...]:
    """Return the heads of a frozen model in the package."""
    config, tensors = _read(WEIGHTS / name, "model.safetensors")
    return _decode_heads(config["parameters"]["kernel"], tensors["temperatures"])


@lru_cache
def is_trained(name: str) -> bool:
    """Return whether a frozen model in the package has trained steps: it is more than its heads."""
    return isinstance(_read(WEIGHTS / name, "model.safetensors")[0]["parameters"]["step_size"], dict)


def _decode_heads(heads: list[dict[str, Any]], temperatures: NDArray[Any]) -> tuple[Head, ...]:
    own = [{} if math.isnan(t) else {"temperature": float(t)} for t in temperatures]
    return tuple(head_from_config({**h, "kernel": h["kernel"] | t}) for h, t in zip(heads, own, strict=True))


def _head_config(head: Head) -> dict[str, Any]:
    return {"scaler": head.scaler, "kernel": _kernel_config(head.kernel)}


def _kernel_config(kernel: Kernel) -> dict[str, Any]:
    config = plain(kernel.to_config())
    kernels.from_config(config)  # refuses a kernel that could not be read back
    return config


def _write(folder: Path, config: dict[str, Any], name: str, tensors: Tensors) -> None:
    tensors = {key: np.ascontiguousarray(value) for key, value in tensors.items()}  # strides are not stored
    document = {"format": FORMAT, "model": "valueformer"} | config
    text = to_json(document)
    try:
        write_atomically(folder / name, lambda path: save_file(tensors, path))
        write_text(folder / "config.json", text)
    except OSError as error:
        raise InputError(str(folder), "a folder that can be written to", error.strerror or str(error)) from None


def _read(folder: Path, name: str) -> tuple[dict[str, Any], Tensors]:
    for file in (folder / "config.json", folder / name):
        if not file.is_file():
            raise InputError(str(folder), f"a folder with config.json and {name}", f"no {file.name}", "check the path")
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        tensors = load_file(folder / name)
    except (ValueError, OSError, SafetensorError) as error:
        raise InputError(str(folder), "a readable model", str(error).splitlines()[0], "save it again") from None
    if not isinstance(config, dict) or config.get("model") != "valueformer" or config.get("format") != FORMAT:
        raise InputError(f"{folder}/config.json", f"a valueformer model of format {FORMAT}", "another document")
    if not isinstance(config.get("parameters"), dict):
        raise InputError(f"{folder}/config.json", "parameters", "none", "save it again")
    return config, tensors
