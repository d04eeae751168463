"""Checks of an estimator's parameters, made at fit as scikit-learn asks for."""

from __future__ import annotations

import math
import numbers
from typing import Any, get_args

import numpy as np

from valueformer.arguments import check_gamma, check_ridge, check_steps
from valueformer.errors import InputError
from valueformer.heads import Head, check_mix
from valueformer.kernels import Kernel
from valueformer.prompt import Layout
from valueformer.solvers import MAX_LAYERS, StepSchedule

__all__ = ["LARGEST_REWARD", "check_parameters"]

LARGEST_REWARD = 1e150  # squares of TD errors stay finite


def check_parameters(model: Any) -> None:
    """Raise InputError for a parameter of a ValueFormer that is out of range."""
    check_gamma(model.gamma)
    several = isinstance(model.kernel, (list, tuple)) and model.kernel and all(isinstance(h, Head) for h in model.kernel)
    if not isinstance(model.kernel, (Kernel, str)) and not several:
        raise InputError("kernel", "a vf.kernels.Kernel, a name, or a list of vf.Head", repr(model.kernel))
    check_mix(model.mix)
    if model.algorithm not in ("td", "lstd"):
        raise InputError("algorithm", "'td' or 'lstd'", repr(model.algorithm))
    if model.layout != "fast" and model.layout not in get_args(Layout):
        raise InputError("layout", " | ".join(("fast", *get_args(Layout))), repr(model.layout))
    if model.layout != "fast" and model.algorithm == "lstd":
        raise InputError("layout", "'fast' with algorithm 'lstd'", repr(model.layout), "a fixed point has no layers")
    if model.dtype not in ("float32", "float64"):
        raise InputError("dtype", "'float32' or 'float64'", repr(model.dtype))
    level = model.initial_level
    number = isinstance(level, numbers.Real) and not isinstance(level, bool) and math.isfinite(level)
    if not number and level not in ("context", "mean"):
        raise InputError("initial_level", "'context', 'mean' or a finite number", repr(level))
    check_ridge(model.ridge)
    if isinstance(model.step_size, str) and model.step_size not in ("fast", "safe"):
        raise InputError("step_size", "'fast', 'safe', a number or a sequence of numbers", repr(model.step_size))
    if model.guard not in ("auto", True, False):
        raise InputError("guard", "'auto', True or False", repr(model.guard))
    _check_metric(model.metric)
    layers = MAX_LAYERS if model.num_layers == "auto" else model.num_layers
    if isinstance(model.step_size, StepSchedule):
        check_steps([1.0] * len(model.step_size), len(model.step_size) if model.num_layers == "auto" else layers)
    else:
        check_steps(1.0 if isinstance(model.step_size, str) else model.step_size, layers)
    n = model.n_replicates
    if isinstance(n, bool) or not isinstance(n, (int, np.integer)) or not 2 <= n <= 100_000:
        raise InputError("n_replicates", "a whole number from 2 to 100000", repr(n))
    if isinstance(model.random_state, bool) or not isinstance(model.random_state, numbers.Integral) or model.random_state < 0:
        raise InputError("random_state", "a whole number >= 0", repr(model.random_state))


def _check_metric(metric: Any) -> None:
    if metric is None:
        return
    try:
        array = np.asarray(metric, dtype=np.float64)
    except (TypeError, ValueError):
        array = np.full(1, np.nan)
    if array.ndim not in (1, 2) or not array.size or not np.isfinite(array).all():
        raise InputError("metric", "finite numbers, (d,) or (k, d), or None", repr(metric)[:80])
