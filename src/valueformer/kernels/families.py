"""Kernel families: each is one activation of one score, hence one attention head."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from valueformer.errors import InputError
from valueformer.kernels.algebra import HeadKernel, Kernel, Score, check_positive

# A score this many rounding errors away from zero is zero. Only a profile with a kink at zero (Laplace) needs to know:
# its square root turns a rounding error of eps into one of sqrt(eps).
ROUNDING_ERRORS = 8.0


class AttentionKernel(Kernel):
    """A kernel that is one activation of one score: ``kappa(x, y) = activation(score(x, y))``."""

    @property
    @abstractmethod
    def score(self) -> Score:
        """What the activation is a function of: ``<x, y>`` or ``|x - y|^2``."""

    @abstractmethod
    def activation(self, score: Tensor) -> Tensor:
        """Map scores to kernel values, elementwise."""

    @property
    def psd(self) -> bool:
        return True

    @property
    def nonnegative(self) -> bool:
        return True

    @property
    def stationary(self) -> bool:
        return self.score == "sqdist"

    @property
    def has_kink(self) -> bool:
        """Whether the activation is not differentiable at score zero."""
        return False

    @property
    def normalised(self) -> bool:
        """Whether each query's weights are divided by their sum over the keys."""
        return False

    def log_activation(self, score: Tensor) -> Tensor:
        """Return ``log(activation(score))``; raises InputError for a kernel that is not strictly positive."""
        raise InputError(
            "Softmax.kernel",
            "a strictly positive kernel",
            type(self).__name__,
            "use RBF, ExpDot, Laplace, Matern or RationalQuadratic",
        )

    def __call__(self, queries: Float[Tensor, "*batch n d"], keys: Float[Tensor, "*batch m d"]) -> Float[Tensor, "*batch n m"]:
        return self.activation(self.scores(queries, keys))

    def scores(self, queries: Float[Tensor, "*batch n d"], keys: Float[Tensor, "*batch m d"]) -> Float[Tensor, "*batch n m"]:
        """Return the scores of all pairs: inner products or squared distances."""
        if self.score == "dot":
            return queries @ keys.mT
        if not self.has_kink:
            return squared_distances(queries, keys)
        # sqrt of the score: computed in float64, so that only exact coincidence rounds to distance zero.
        return squared_distances(queries.double(), keys.double(), flush=True).to(queries.dtype)

    def heads(self) -> list[HeadKernel]:
        return [HeadKernel(1.0, (self,))]


def squared_distances(
    queries: Float[Tensor, "*batch n d"], keys: Float[Tensor, "*batch m d"], flush: bool = False
) -> Float[Tensor, "*batch n m"]:
    """Return ``|x - y|^2`` for all pairs, never negative.

    Points are centred on the keys first: the expanded square loses ``eps * |x|^2``, and distances do not know the origin
    (theory 6). With ``flush`` a distance within its own rounding error is zero.
    """
    centre = keys.detach().mean(dim=-2, keepdim=True)  # (..., 1, d)
    queries, keys = queries - centre, keys - centre
    query_norms = queries.square().sum(-1).unsqueeze(-1)  # (..., n, 1)
    key_norms = keys.square().sum(-1).unsqueeze(-2)  # (..., 1, m)
    squares = (queries @ keys.mT).mul_(-2.0).add_(query_norms).add_(key_norms)  # (..., n, m)
    if flush:
        rounding = ROUNDING_ERRORS * torch.finfo(squares.dtype).eps
        squares = squares.masked_fill_(squares <= (rounding * query_norms) + (rounding * key_norms), 0.0)
    return squares.clamp_min_(0.0)


def _sqrt(square: Tensor) -> Tensor:
    """Square root whose gradient at zero is zero rather than infinite."""
    if not square.requires_grad:
        return square.clamp_min(0.0).sqrt()
    positive = square > 0
    return torch.where(positive, torch.where(positive, square, 1.0).sqrt(), 0.0)


@dataclass(frozen=True)
class _Tempered(AttentionKernel):
    """A kernel of states measured in units of ``sqrt(temperature)``."""

    temperature: float = 1.0

    def __post_init__(self) -> None:
        check_positive(self, temperature=self.temperature)


class _Radial(_Tempered):
    @property
    def score(self) -> Score:
        return "sqdist"


@dataclass(frozen=True)
class RBF(_Radial):
    """Gaussian kernel ``exp(-|x - y|^2 / (2 temperature))``; lengthscale ``sqrt(temperature)``, in units of the state."""

    def activation(self, score: Tensor) -> Tensor:
        return self.log_activation(score).exp()

    def log_activation(self, score: Tensor) -> Tensor:
        return score * (-0.5 / self.temperature)


@dataclass(frozen=True)
class Laplace(_Radial):
    """Laplace (exponential, Matern-1/2) kernel ``exp(-|x - y| / sqrt(temperature))``."""

    @property
    def has_kink(self) -> bool:
        return True

    def activation(self, score: Tensor) -> Tensor:
        return self.log_activation(score).exp()

    def log_activation(self, score: Tensor) -> Tensor:
        return -_sqrt(score / self.temperature)


@dataclass(frozen=True)
class Matern(_Radial):
    """Matern kernel of smoothness ``nu`` 1.5 or 2.5 (Rasmussen & Williams 2006, eq. 4.17).

    With ``z = sqrt(2 nu / temperature) |x - y|``: ``(1 + z) exp(-z)`` for 1.5, ``(1 + z + z^2 / 3) exp(-z)`` for 2.5.
    """

    nu: float = 2.5

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.nu not in (1.5, 2.5):
            raise InputError("Matern.nu", "1.5 or 2.5", str(self.nu), "for nu = 0.5 use Laplace, for infinity RBF")

    def activation(self, score: Tensor) -> Tensor:
        z = self._distance(score)
        return self._polynomial(z) * (-z).exp()

    def log_activation(self, score: Tensor) -> Tensor:
        z = self._distance(score)
        return self._polynomial(z).log() - z

    def _distance(self, score: Tensor) -> Tensor:
        # exp(-1e4) is 0; beyond it the polynomial would overflow and inf * 0 is NaN
        return _sqrt(score * (2.0 * self.nu / self.temperature)).clamp_max(1e4)

    def _polynomial(self, z: Tensor) -> Tensor:
        return 1.0 + z if self.nu == 1.5 else 1.0 + z + z.square() / 3.0


@dataclass(frozen=True)
class RationalQuadratic(_Radial):
    """Rational quadratic ``(1 + |x - y|^2 / (2 alpha temperature))^-alpha``: a scale mixture of RBF kernels."""

    alpha: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, alpha=self.alpha)

    def activation(self, score: Tensor) -> Tensor:
        return self.log_activation(score).exp()

    def log_activation(self, score: Tensor) -> Tensor:
        return -self.alpha * torch.log1p(score / (2.0 * self.alpha * self.temperature))


@dataclass(frozen=True)
class ExpDot(_Tempered):
    """Exponential dot-product kernel ``exp(<x, y> / temperature)``: unnormalised softmax attention."""

    @property
    def score(self) -> Score:
        return "dot"

    def activation(self, score: Tensor) -> Tensor:
        return self.log_activation(score).exp()

    def log_activation(self, score: Tensor) -> Tensor:
        return score / self.temperature


@dataclass(frozen=True)
class Linear(AttentionKernel):
    """Linear kernel ``<x, y>``: linear attention, linear value functions (Wang et al. 2025)."""

    @property
    def score(self) -> Score:
        return "dot"

    @property
    def nonnegative(self) -> bool:
        return False

    def activation(self, score: Tensor) -> Tensor:
        return score


@dataclass(frozen=True)
class ReLU(AttentionKernel):
    """ReLU attention ``max(0, <x, y>)``. Indefinite on most contexts: read its iterates at finite depth only."""

    @property
    def score(self) -> Score:
        return "dot"

    @property
    def psd(self) -> bool:
        return False

    def activation(self, score: Tensor) -> Tensor:
        return score.relu()


@dataclass(frozen=True)
class Softmax(AttentionKernel):
    """Softmax attention ``kappa(x, y) / sum_k kappa(x, y_k)``: each query's weights over the keys sum to one.

    The normaliser depends on the keys, so the matrix is not symmetric and the lemma does not hold (theory 1).
    Computed with log-sum-exp: far queries underflow to 0/0 otherwise.
    """

    kernel: AttentionKernel

    def __post_init__(self) -> None:
        if not isinstance(self.kernel, AttentionKernel) or self.kernel.normalised:
            raise InputError("Softmax.kernel", "an elementary kernel such as RBF", str(self.kernel))
        self.kernel.log_activation(torch.zeros(()))  # raises for a kernel that is not strictly positive

    @property
    def score(self) -> Score:
        return self.kernel.score

    @property
    def psd(self) -> bool:
        return False

    @property
    def has_kink(self) -> bool:
        return self.kernel.has_kink

    @property
    def normalised(self) -> bool:
        return True

    def __call__(self, queries: Float[Tensor, "*batch n d"], keys: Float[Tensor, "*batch m d"]) -> Float[Tensor, "*batch n m"]:
        return torch.softmax(self.kernel.log_activation(self.kernel.scores(queries, keys)), dim=-1)

    def activation(self, score: Tensor) -> Tensor:
        return self.kernel.activation(score)

    def log_activation(self, score: Tensor) -> Tensor:
        return self.kernel.log_activation(score)
