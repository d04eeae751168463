"""Heads of the model: a kernel of its own view of the states each, mixed in context."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from valueformer import kernels
from valueformer.errors import InputError
from valueformer.features import ScalerKind
from valueformer.kernels import Kernel

__all__ = ["Head", "Mix", "check_mix", "head_from_config", "with_scaler"]

MIXES = ("context", "equal", "first")
Mix = Literal["context", "equal", "first"] | tuple[float, ...]


@dataclass(frozen=True)
class Head:
    """Kernel TD with one kernel, on states scaled in one way."""

    kernel: Kernel
    scaler: ScalerKind = "isotropic"

    def __post_init__(self) -> None:
        if not isinstance(self.kernel, Kernel):
            raise InputError("Head.kernel", "a vf.kernels.Kernel", repr(self.kernel))
        if self.scaler not in get_args(ScalerKind):
            raise InputError("Head.scaler", " | ".join(get_args(ScalerKind)), repr(self.scaler))

    def __str__(self) -> str:
        return f"{self.scaler} {self.kernel}"

    def to_config(self) -> dict[str, Any]:
        """Return a JSON-ready description."""
        return {"scaler": self.scaler, "kernel": self.kernel.to_config()}


def head_from_config(config: Any) -> Head:
    """Build the head that :meth:`Head.to_config` described; raises InputError."""
    if not isinstance(config, dict) or set(config) != {"scaler", "kernel"} or not isinstance(config["kernel"], dict):
        raise InputError("head config", "a scaler and a kernel", repr(config)[:80])
    return Head(kernels.from_config(config["kernel"]), config["scaler"])


def with_scaler(heads: Sequence[Head], scaler: ScalerKind | None) -> tuple[Head, ...]:
    """Return the heads, all on one scaler if that is given; heads that become equal are one."""
    if scaler is None:
        return tuple(heads)
    return tuple(dict.fromkeys(Head(head.kernel, scaler) for head in heads))


def check_mix(mix: Any) -> None:
    """Raise InputError unless ``mix`` is one of the ways to mix heads, or weights >= 0 with a sum > 0."""
    if isinstance(mix, (list, tuple)):
        numbers = all(isinstance(w, (int, float)) and not isinstance(w, bool) and 0.0 <= w < math.inf for w in mix)
        if not (numbers and sum(mix) > 0):
            raise InputError("mix", "weights >= 0, one per head and one for the constant", str(mix)[:80])
    elif mix not in MIXES:
        raise InputError("mix", " | ".join(MIXES), repr(mix))
