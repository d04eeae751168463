"""Kernels that an attention activation can compute (claim P2; Cheng, Chen & Sra 2024).

A kernel is one method on two point sets: ``kernel(queries, keys)`` maps ``(..., n, d)`` and ``(..., m, d)`` to
``(..., n, m)``. Temperatures follow one convention, ``lengthscale = sqrt(temperature)``. Kernels compose with ``+`` and
``*``; :meth:`Kernel.heads` rewrites any composition as a weighted sum of attention heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
    "from_config",
    "squared_distances",
]

_KINDS: dict[str, type[Kernel]] = {
    kind.__name__: kind
    for kind in (RBF, ExpDot, Linear, ReLU, Laplace, Matern, RationalQuadratic, Softmax, Scale, Sum, Product)
}


def from_config(config: Mapping[str, Any]) -> Kernel:
    """Build the kernel that :meth:`Kernel.to_config` described.

    Raises ValueError for an unknown name or unknown fields; nothing in the configuration is executed.
    """
    name = config.get("name")
    if name not in _KINDS:
        raise ValueError(f"kernel config: unknown name {name!r}; known: {', '.join(_KINDS)}")
    fields = {key: _decode(value) for key, value in config.items() if key != "name"}
    try:
        return _KINDS[name](**fields)
    except TypeError as error:
        raise ValueError(f"kernel config for {name}: {error}") from None


def _decode(value: Any) -> Any:
    if isinstance(value, Mapping):
        return from_config(value)
    if isinstance(value, list):
        return tuple(_decode(item) for item in value)
    return value
