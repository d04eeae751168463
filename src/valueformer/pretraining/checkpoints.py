"""Checkpoints: one safetensors file, written beside the old one and renamed over it, nothing executable."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from valueformer.errors import InputError
from valueformer.files import write_atomically
from valueformer.pretraining.config import PretrainConfig

__all__ = ["Checkpoint"]

FILE = "checkpoint.safetensors"
_FORMAT = "1"


class Checkpoint:
    """All that a run needs to go on: parameters, optimiser, the best model so far, and its position.

    Tasks are functions of (seed, number of the task), so the number of updates done is the state of every generator.
    """

    def __init__(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        self.tensors, self.state = dict(tensors), dict(state)

    def write(self, folder: Path, config: PretrainConfig) -> None:
        """Replace the checkpoint in a folder; whoever reads it sees the old or the new one."""
        document = {"format": _FORMAT, "config": json.dumps(config.to_config()), "state": json.dumps(self.state)}
        own = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in self.tensors.items()}
        write_atomically(folder / FILE, lambda path: save_file(own, path, metadata=document))

    @classmethod
    def read(cls, folder: Path, config: PretrainConfig) -> Checkpoint | None:
        """Return the checkpoint of this very configuration, None where there is none yet; raises InputError for another one."""
        path = folder / FILE
        if not path.exists():
            return None
        try:
            with safe_open(path, framework="pt") as file:
                document = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            if document.get("format") != _FORMAT:
                raise InputError(str(path), f"a checkpoint of format {_FORMAT}", repr(document.get("format")))
            if PretrainConfig.from_config(json.loads(document["config"])) != config:
                raise InputError(str(path), "a checkpoint of this configuration", "one of another", "choose another --out")
            return cls(tensors, json.loads(document["state"]))
        except (SafetensorError, OSError, KeyError, ValueError) as error:
            raise InputError(
                str(path), "a readable checkpoint", str(error).splitlines()[0], "remove it to start anew"
            ) from None


def optimiser_tensors(optimiser: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return an optimiser's state by name."""
    state = optimiser.state_dict()["state"]
    return {f"optimiser.{i}.{name}": torch.as_tensor(value) for i, own in state.items() for name, value in own.items()}


def restore_optimiser(optimiser: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Put a state by name back into an optimiser."""
    document = optimiser.state_dict()
    state: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        if name.startswith("optimiser."):
            _, index, what = name.split(".", 2)
            state.setdefault(int(index), {})[what] = tensor
    optimiser.load_state_dict(document | {"state": state})
