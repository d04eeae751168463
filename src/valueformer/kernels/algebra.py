"""The algebra of kernels: sums, products and multiples, and the attention heads that compute them."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import numbers
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from valueformer.errors import InputError

if TYPE_CHECKING:
    from valueformer.kernels.families import AttentionKernel

Score = Literal["dot", "sqdist"]


class Kernel(ABC):
    """A similarity of two points, evaluated on all pairs of two point sets."""

    @abstractmethod
    def __call__(self, queries: Float[Tensor, "*batch n d"], keys: Float[Tensor, "*batch m d"]) -> Float[Tensor, "*batch n m"]:
        """Return ``kappa(queries[i], keys[j])`` for every pair; leading dimensions are batches."""

    @property
    @abstractmethod
    def psd(self) -> bool:
        """Whether every kernel matrix is symmetric positive semi-definite (what the lemma of theory 3 asks for)."""

    @property
    @abstractmethod
    def nonnegative(self) -> bool:
        """Whether no value is negative (what the Collatz-Wielandt bound asks for)."""

    @property
    @abstractmethod
    def stationary(self) -> bool:
        """Whether a common shift of all points changes nothing; such kernels are also bounded."""

    @abstractmethod
    def heads(self) -> list[HeadKernel]:
        """Return the attention heads whose weighted sum is this kernel; raise InputError where there are none."""

    def __add__(self, other: Kernel) -> Sum:
        return Sum((self, other))

    def __radd__(self, other: Any) -> Kernel:
        return self if other == 0 else NotImplemented  # sum([k1, k2]) starts at 0

    def __mul__(self, other: Kernel | float) -> Kernel:
        if isinstance(other, Kernel):
            return Product((self, other))
        return Scale(self, float(other)) if isinstance(other, numbers.Real) else NotImplemented

    __rmul__ = __mul__

    def to_config(self) -> dict[str, Any]:
        """Return a JSON-ready description that :func:`from_config` turns back into an equal kernel."""
        fields = {f.name: _encode(getattr(self, f.name)) for f in dataclasses.fields(self)}  # pyright: ignore
        return {"name": type(self).__name__, **fields}


@dataclass(frozen=True)
class HeadKernel:
    """One attention head: ``coefficient * prod_k kappa_k``, all factors functions of the same score."""

    coefficient: float
    factors: tuple[AttentionKernel, ...]

    @property
    def score(self) -> Score:
        """What the head's key-query product computes: ``<x, y>`` or ``|x - y|^2``."""
        return self.factors[0].score

    @property
    def normalised(self) -> bool:
        """Whether the head's weights are divided by their sum over the context (softmax)."""
        return any(factor.normalised for factor in self.factors)

    @property
    def has_kink(self) -> bool:
        """Whether the activation has a kink at score zero, so that rounding must be flushed there."""
        return any(factor.has_kink for factor in self.factors)

    def activation(self, score: Tensor) -> Tensor:
        """Return the weights before any normalisation, elementwise in the score."""
        return functools.reduce(torch.mul, (factor.activation(score) for factor in self.factors))


@dataclass(frozen=True)
class Scale(Kernel):
    """``factor * kernel``, factor > 0."""

    kernel: Kernel
    factor: float

    def __post_init__(self) -> None:
        check_positive(self, factor=self.factor)

    def __call__(self, queries: Float[Tensor, "*batch n d"], keys: Float[Tensor, "*batch m d"]) -> Float[Tensor, "*batch n m"]:
        return self.factor * self.kernel(queries, keys)

    @property
    def psd(self) -> bool:
        return self.kernel.psd

    @property
    def nonnegative(self) -> bool:
        return self.kernel.nonnegative

    @property
    def stationary(self) -> bool:
        return self.kernel.stationary

    def heads(self) -> list[HeadKernel]:
        return [dataclasses.replace(head, coefficient=self.factor * head.coefficient) for head in self.kernel.heads()]


@dataclass(frozen=True)
class Sum(Kernel):
    """Sum of kernels; as attention, one head (pair) per term."""

    terms: tuple[Kernel, ...]

    def __post_init__(self) -> None:
        _check_operands(self, self.terms)

    def __call__(self, queries: Float[Tensor, "*batch n d"], keys: Float[Tensor, "*batch m d"]) -> Float[Tensor, "*batch n m"]:
        return functools.reduce(torch.add, (term(queries, keys) for term in self.terms))

    @property
    def psd(self) -> bool:
        return all(term.psd for term in self.terms)

    @property
    def nonnegative(self) -> bool:
        return all(term.nonnegative for term in self.terms)

    @property
    def stationary(self) -> bool:
        return all(term.stationary for term in self.terms)

    def heads(self) -> list[HeadKernel]:
        return [head for term in self.terms for head in term.heads()]


@dataclass(frozen=True)
class Product(Kernel):
    """Elementwise product of kernels (Schur: positive semi-definite if its factors are)."""

    factors: tuple[Kernel, ...]

    def __post_init__(self) -> None:
        _check_operands(self, self.factors)

    def __call__(self, queries: Float[Tensor, "*batch n d"], keys: Float[Tensor, "*batch m d"]) -> Float[Tensor, "*batch n m"]:
        return functools.reduce(torch.mul, (factor(queries, keys) for factor in self.factors))

    @property
    def psd(self) -> bool:
        return all(factor.psd for factor in self.factors)

    @property
    def nonnegative(self) -> bool:
        return all(factor.nonnegative for factor in self.factors)

    @property
    def stationary(self) -> bool:
        return all(factor.stationary for factor in self.factors)

    def heads(self) -> list[HeadKernel]:
        """Expand ``(a + b) c`` into ``a c + b c``; each product must be a function of one score."""
        heads = []
        for combination in itertools.product(*(factor.heads() for factor in self.factors)):
            factors = tuple(kernel for head in combination for kernel in head.factors)
            if len({kernel.score for kernel in factors}) > 1 or any(kernel.normalised for kernel in factors):
                raise InputError(
                    "kernel",
                    "products whose factors are all functions of the distance, or all of the inner product, and no Softmax",
                    str(self),
                    "no attention head computes it, but the solver (layout='fast') does",
                )
            heads.append(HeadKernel(math.prod(head.coefficient for head in combination), factors))
        return heads


def _check_operands(kernel: Kernel, operands: Sequence[Any]) -> None:
    if not operands or not all(isinstance(operand, Kernel) for operand in operands):
        raise InputError(type(kernel).__name__, "at least one kernel, and kernels only", str(operands))


def check_positive(kernel: Kernel, **values: float) -> None:
    """Raise InputError unless all values are numbers in [1e-30, 1e30], whose inverses float32 can hold."""
    for name, value in values.items():
        if not (isinstance(value, numbers.Real) and 1e-30 <= value <= 1e30):
            raise InputError(f"{type(kernel).__name__}.{name}", "a number > 0 (1e-30 to 1e30)", repr(value))
        object.__setattr__(kernel, name, float(value))


def _encode(value: Any) -> Any:
    if isinstance(value, Kernel):
        return value.to_config()
    if isinstance(value, tuple):
        return [_encode(item) for item in value]
    return value
