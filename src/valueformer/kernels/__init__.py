"""Kernels that an attention activation can compute (claim P2; Cheng, Chen & Sra 2024).

A kernel is one method on two point sets: ``kernel(queries, keys)`` maps ``(..., n, d)`` and ``(..., m, d)`` to
``(..., n, m)``. Temperatures follow one convention, ``lengthscale = sqrt(temperature)``. Kernels compose with ``+`` and
``*``; :meth:`Kernel.heads` rewrites any composition as a weighted sum of attention heads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from valueformer.errors import InputError
from valueformer.kernels.algebra import HeadKernel, Kernel, Product, Scale, Score, Sum
from valueformer.kernels.families import (
    RBF,
    AttentionKernel,
    ExpDot,
    Laplace,
    Linear,
    Matern,
    RationalQuadratic,
    ReLU,
    Softmax,
    squared_distances,
)

__all__ = [
    "RBF",
    "AttentionKernel",
    "ExpDot",
    "HeadKernel",
    "Kernel",
    "Laplace",
    "Linear",
    "Matern",
    "Product",
    "RationalQuadratic",
    "ReLU",
    "Scale",
    "Score",
    "Softmax",
    "Sum",
    "by_name",
    "from_config",
    "squared_distances",
]

_KINDS: dict[str, type[Kernel]] = {
    kind.__name__: kind
    for kind in (RBF, ExpDot, Linear, ReLU, Laplace, Matern, RationalQuadratic, Softmax, Scale, Sum, Product)
}


def from_config(config: Mapping[str, Any]) -> Kernel:
    """Build the kernel that :meth:`Kernel.to_config` described.

    Raises InputError for an unknown name or unknown fields; nothing in the configuration is executed.
    """
    name = config.get("name")
    if name not in _KINDS:
        raise InputError("kernel config: name", f"one of {', '.join(_KINDS)}", repr(name))
    fields = {key: _decode(value) for key, value in config.items() if key != "name"}
    try:
        return _KINDS[name](**fields)
    except TypeError as error:
        raise InputError(f"kernel config: {name}", "the fields of that kernel", str(error)) from None


def _decode(value: Any) -> Any:
    if isinstance(value, Mapping):
        return from_config(value)
    if isinstance(value, list):
        return tuple(_decode(item) for item in value)
    return value


# Lengthscale 0.8 in units of a typical distance: docs/results/foundation.md tells how it was chosen.
DEFAULT_TEMPERATURE = 0.64


def by_name(name: str, temperature: float | None = None) -> Kernel:
    """Return a kernel by its command-line name, at a temperature (None: the default, 0.64, where it has one).

    Names: rbf, laplace, matern15, matern25, rational-quadratic, expdot, linear, relu, softmax-rbf, softmax-dot.
    Raises InputError for another name, or for a temperature given to a kernel that has none.
    """
    if name in ("linear", "relu"):
        if temperature is not None:
            raise InputError("temperature", f"none for the {name} kernel", str(temperature), "leave it out")
        return Linear() if name == "linear" else ReLU()
    delta = DEFAULT_TEMPERATURE if temperature is None else temperature
    families: dict[str, Callable[[], Kernel]] = {
        "rbf": lambda: RBF(delta),
        "laplace": lambda: Laplace(delta),
        "matern15": lambda: Matern(delta, nu=1.5),
        "matern25": lambda: Matern(delta, nu=2.5),
        "rational-quadratic": lambda: RationalQuadratic(delta),
        "expdot": lambda: ExpDot(delta),
        "softmax-rbf": lambda: Softmax(RBF(delta)),
        "softmax-dot": lambda: Softmax(ExpDot(delta)),
    }
    if name not in families:
        raise InputError("kernel", f"one of {', '.join([*families, 'linear', 'relu'])}", repr(name))
    return families[name]()
