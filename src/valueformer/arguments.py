"""Checks of the arguments that solvers, constructions and estimators share."""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from valueformer.errors import InputError

MAX_DEPTH = 1_000_000


def check_gamma(gamma: float) -> None:
    """Raise InputError unless gamma is a number in [0, 1]."""
    if isinstance(gamma, bool) or not (isinstance(gamma, numbers.Real) and 0.0 <= gamma <= 1.0):
        raise InputError("gamma", "a number in [0, 1]", repr(gamma), "0.99 looks about 100 steps ahead, 0.9 about 10")


def check_ridge(ridge: float) -> None:
    """Raise InputError unless the ridge is a finite number >= 0."""
    if isinstance(ridge, bool) or not (isinstance(ridge, numbers.Real) and 0.0 <= ridge < math.inf):
        raise InputError("ridge", "a finite number >= 0", repr(ridge))


def check_steps(step_size: float | Sequence[float], num_layers: int) -> list[float]:
    """Return one step per layer; raise InputError unless there are as many finite numbers > 0 as layers."""
    whole = isinstance(num_layers, numbers.Integral) and not isinstance(num_layers, bool)
    if not whole or not 1 <= num_layers <= MAX_DEPTH:
        raise InputError("num_layers", f"a whole number from 1 to {MAX_DEPTH}", repr(num_layers))
    if isinstance(step_size, numbers.Real) and not isinstance(step_size, bool):
        steps = [float(step_size)] * int(num_layers)
    elif isinstance(step_size, (Sequence, np.ndarray)) and all(isinstance(step, numbers.Real) for step in step_size):
        steps = [float(step) for step in step_size]
    else:
        raise InputError("step_size", "a number, or one number per layer", repr(step_size))
    if len(steps) != num_layers:
        raise InputError("step_size", f"{num_layers} numbers, one per layer", str(len(steps)))
    odd = next((step for step in steps if not (math.isfinite(step) and step > 0)), None)
    if odd is not None:
        raise InputError("step_size", "finite numbers > 0", str(odd))
    return steps


def check_states(what: str, states: NDArray[Any], dtype: torch.dtype) -> None:
    """Raise InputError for states whose squared distances would overflow in ``dtype``."""
    limit = math.sqrt(torch.finfo(dtype).max) / 1e3
    if states.size and not float(np.abs(states).max()) <= limit:
        raise InputError(what, f"finite numbers up to {limit:.1e}", f"{np.abs(states).max():g}", "scale the states")
