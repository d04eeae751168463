"""Models on disk: config.json beside safetensors, nothing executable, nothing half-written."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
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
from valueformer.features import Scaler
from valueformer.files import write_atomically, write_text
from valueformer.kernels import Kernel
from valueformer.prompt import Layout
from valueformer.results import Status, plain, to_json
from valueformer.solvers import Solution
from valueformer.transformer import Transformer
from valueformer.transitions import Transitions

__all__ = ["PersistentModel"]

FORMAT = 1
_NOT_FROZEN = ("gamma", "device", "random_state")  # the user's question and machine, not the model
_CONTEXT = (
    "observations", "next_observations", "rewards", "terminated", "truncated", "discounts", "steps", "sample_weight",
)  # fmt: skip
Tensors = dict[str, NDArray[Any]]


class PersistentModel(BaseEstimator, ABC):
    """The part of an estimator that knows files: frozen parameters, and a fitted context."""

    kernel: Kernel | str
    kernel_: Kernel
    context_: Transitions
    scaler_: Scaler
    solution_: Solution
    td_error_: NDArray[np.float64]
    transformer_: Transformer | None
    gamma_: float
    ridge_: float
    level_: float
    reward_unit_: float
    n_features_in_: int

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the frozen model without any context: config.json and model.safetensors (step sizes given as numbers).

        gamma, device and random_state are the user's question and machine, not part of the model.
        """
        parameters, tensors = self._encode()
        frozen = {name: value for name, value in parameters.items() if name not in _NOT_FROZEN}
        _write(Path(folder), {"parameters": frozen}, "model.safetensors", tensors)

    @classmethod
    def from_pretrained(cls, folder: str | Path, **parameters: Any) -> Self:
        """Return the model that :meth:`save_pretrained` wrote; ``parameters`` (such as gamma) override or complete it."""
        config, tensors = _read(Path(folder), "model.safetensors")
        return cls(**(cls._decode(config, tensors, folder) | parameters))

    def save(self, folder: str | Path) -> None:
        """Write the fitted model: config.json and context.safetensors. Read it with ``vf.load_model``."""
        check_is_fitted(self)
        parameters, tensors = self._encode()
        solution = self.solution_
        arrays = {name: getattr(self.context_, name) for name in _CONTEXT} | {"episode_ids": self.context_.episode_index}
        tensors |= {f"context.{name}": np.ascontiguousarray(a) for name, a in arrays.items() if a is not None}
        tensors |= {
            "dual_coef": solution.dual_coef.cpu().numpy(),
            "td_error": solution.td_error.cpu().numpy(),
            "scaler.centre": self.scaler_.centre,
            "scaler.factor": self.scaler_.factor,
        }
        del parameters["device"]  # the machine's, not the model's
        fitted = {
            "kernel": _kernel_config(self.kernel_),
            "gamma": self.gamma_,
            "ridge": self.ridge_,
            "layout": "fast" if self.transformer_ is None else self.transformer_.layout,
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
            model.kernel_ = kernels.from_config(fitted["kernel"])
            model.gamma_, model.ridge_ = float(fitted["gamma"]), float(fitted["ridge"])
            model.context_ = Transitions(**arrays, source=str(folder), format="fitted")
            model.n_features_in_ = model.context_.obs_dim
            model.scaler_ = Scaler(tensors["scaler.centre"], tensors["scaler.factor"])
            model.level_, model.reward_unit_ = float(fitted["level"]), float(fitted["reward_unit"])
            dual_coef = torch.tensor(tensors["dual_coef"], device=model._device)
            errors = torch.tensor(tensors["td_error"])
            model.solution_ = Solution(dual_coef[:0], dual_coef, errors, fitted["status"], fitted["message"], fitted["stats"])
            model.td_error_ = tensors["td_error"]
            if fitted["status"] not in get_args(Status) or not all(isinstance(s, float) for s in fitted["stats"]["step_sizes"]):
                raise TypeError("status or step sizes")
            model._check_parameters()
            layout, steps = fitted["layout"], fitted["stats"]["step_sizes"]
            model.transformer_ = None if layout == "fast" else model._transformer(layout, steps)
            model.predict(model.context_.observations[:1])
        except InputError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InputError(str(folder), "a model written by ValueFormer.save", f"a damaged one ({error})") from None
        return model

    @abstractmethod
    def _check_parameters(self) -> None: ...

    @abstractmethod
    def _transformer(self, layout: Layout, steps: Sequence[float]) -> Transformer: ...

    @property
    @abstractmethod
    def _device(self) -> torch.device: ...

    @abstractmethod
    def predict(self, observations: ArrayLike) -> NDArray[Any]:
        """Return values ``(m,)`` at observations ``(m, d)``."""

    def _encode(self) -> tuple[dict[str, Any], Tensors]:
        parameters, tensors = self.get_params(deep=False), {}
        if isinstance(self.kernel, Kernel):
            parameters["kernel"] = _kernel_config(self.kernel)
        if not isinstance(parameters["step_size"], (str, int, float)):
            tensors["step_sizes"] = np.asarray(parameters["step_size"], dtype=np.float64)
            parameters["step_size"] = "tensor"
        return plain(parameters), tensors

    @classmethod
    def _decode(cls, config: dict[str, Any], tensors: Tensors, folder: str | Path) -> dict[str, Any]:
        parameters = dict(config["parameters"])
        if unknown := set(parameters) - set(cls().get_params(deep=False)):
            raise InputError(f"{folder}: parameters", "those of this version", f"unknown {sorted(unknown)}", "update it")
        if isinstance(parameters.get("kernel"), dict):
            parameters["kernel"] = kernels.from_config(parameters["kernel"])
        if parameters.get("step_size") == "tensor":
            parameters["step_size"] = tensors["step_sizes"].tolist()
        return parameters


def _kernel_config(kernel: Kernel) -> dict[str, Any]:
    config = plain(kernel.to_config())
    kernels.from_config(config)  # refuses a kernel that could not be read back
    return config


def _write(folder: Path, config: dict[str, Any], name: str, tensors: Tensors) -> None:
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
