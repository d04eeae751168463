"""Layers of kernel TD: many heads and columns at once, each with its own step and its own guard."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from valueformer.arguments import check_ridge, check_steps
from valueformer.errors import InputError
from valueformer.results import Status
from valueformer.solvers.context import Context
from valueformer.solvers.solution import Solution, StepSchedule, StepSize

__all__ = ["GUARD", "MAX_LAYERS", "TOLERANCE", "Path", "iterate"]

TOLERANCE = 1e-3  # of the rms reward: `converged`
MAX_LAYERS = 10_000  # num_layers="auto" gives up here
# A residual this many times the best so far is taken back. On goal-reaching episodes that end in a terminal the residual first
# rises 2.2-fold and then falls, so 2 would stop every layer there (theory 7.3).
GUARD = 4.0


_PER_HEAD = (
    "dual_coef", "td", "rewinds", "best", "initial", "final", "reached", "improved", "diverged", "overflowed",
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class Path:
    """What L layers did, for every head (h) and column (b)."""

    dual_coef: Float[Tensor, "h b n"]
    td: Float[Tensor, "h b n"]
    """TD errors r - M a of ``dual_coef``."""
    td_error: Float[Tensor, "l h b"]
    """Their mean square after each layer, in float64 on the CPU."""
    trace: Float[Tensor, "l h n"]
    """TD errors of the first column after each layer."""
    steps: Float[Tensor, "l h b"]
    """Steps on the path to ``dual_coef``; 0 for a layer that was taken back or came after the best one."""
    rewinds: Int[Tensor, "h b"]
    best: Float[Tensor, "h b"]
    """Least mean squared residual (TD error less the ridge's part) on the path, and where it started and ended."""
    initial: Float[Tensor, "h b"]
    final: Float[Tensor, "h b"]
    reached: Bool[Tensor, "h b"]
    """Within the tolerance, or still up to rounding."""
    improved: Bool[Tensor, "h b"]
    """Some layer has a smaller residual than the start, or the start was within the tolerance."""
    diverged: Bool[Tensor, "h b"]
    overflowed: Bool[Tensor, "h b"]
    history: Float[Tensor, "l h b n"] | None = None
    singular: Bool[Tensor, "h b"] | None = None
    """Of a closed form: no unique solution to working precision."""

    @property
    def layers(self) -> int:
        """Number of layers run, 0 for a closed form; those after an overflow are left out."""
        return len(self.steps)

    @classmethod
    def join(cls, paths: Sequence[Path]) -> Path:
        """Return the paths of several groups of heads as one; a group that stopped early stays where it was."""
        if len(paths) == 1:
            return paths[0]
        layers = max(p.layers for p in paths)

        def padded(x: Tensor, fill: Tensor | float) -> Tensor:
            short = layers - len(x)
            return x if short <= 0 else torch.cat([x, torch.zeros_like(x[:1]).expand(short, *x.shape[1:]) + fill])

        def column(name: str, axis: int = 0) -> Tensor:
            return torch.cat([getattr(p, name) for p in paths], dim=axis)

        return cls(
            td_error=torch.cat([padded(p.td_error, p.td_error[-1:]) for p in paths], dim=1),
            trace=torch.cat([padded(p.trace, p.trace[-1:]) for p in paths], dim=1),
            steps=torch.cat([padded(p.steps, 0.0) for p in paths], dim=1),
            singular=None if paths[0].singular is None else column("singular"),
            **{name: column(name) for name in _PER_HEAD},
        )

    def solution(self, h: int = 0, b: int = 0) -> Solution:
        """Return one head's and column's result, with its status in words."""
        initial, best, final = (float(x[h, b]) for x in (self.initial, self.best, self.final))
        steps = self.steps[:, h, b]
        diverged, reached, improved = (bool(x[h, b]) for x in (self.diverged, self.reached, self.improved))
        status: Status = "diverged" if diverged else "converged" if reached else "max_layers"
        message = "" if reached else f"rms TD error after {self.layers} layers is {_ratio(best, initial):.2g} of its start"
        if diverged:
            grew = "overflowed" if bool(self.overflowed[h, b]) else f"grew to {_ratio(final, initial):.2g} times its start"
            message = (
                f"the residual {grew}; the best layer ({int((steps > 0).sum())}) is returned: "
                "use step_size='fast' or 'safe', a ridge, or a smaller gamma"
            )
        elif self.singular is not None and bool(self.singular[h, b]):
            status = "singular"
            message = "the context's TD system is singular; least-norm coefficients are returned: use a ridge such as 1e-3"
        elif not improved:
            message = "no layer improved on the start, which is returned: try more layers, a ridge or a smaller gamma"
        stats: dict[str, Any] = {
            "step_sizes": steps[steps > 0].tolist(),
            "rewinds": int(self.rewinds[h, b]),
            "layers": self.layers,
            "improved": improved,
            "initial_td_error": initial,
        }
        a = self.dual_coef[h, b]
        return Solution(a.new_zeros(0), a, self.td_error[:, h, b], status, message, stats)


def iterate(
    context: Context,
    *,
    step_size: StepSize,
    num_layers: int | Literal["auto"],
    ridge: float = 0.0,
    guard: bool = False,
    record: bool = False,
    reward_square: float | None = None,
) -> Path:
    """Run kernel TD from V = 0 for every head and column of a context.

    The guard (theory 7.3): when the residual of the linear system exceeds 4 times the best so far, or stops being finite,
    go back to the best iterate and halve the step. A layer spent that way counts, and the result is the best iterate.
    ``num_layers="auto"``: until all have converged, as measured against ``reward_square``, the mean squared reward (None: the
    context's). Without a guard what overflows stays at its last finite layer; ``record`` keeps every layer's coefficients.
    A :class:`StepSchedule` runs all its layers, unless ``"auto"`` ends it sooner.
    """
    check_ridge(ridge)
    heads, columns = len(context.kernels), context.rewards.shape[-2]
    unit, schedule = _schedule(step_size, num_layers, heads)
    plain = context.rewards.new_ones(heads, columns, dtype=torch.float64)
    step = plain if unit == "plain" else context.choose_step(unit, ridge)  # (h, b)
    r, weight = context.rewards.expand(heads, -1, -1), context.weight  # (h, b, n), (b, n)
    alike = bool((weight == 1).all())
    leak = ridge / torch.where(weight > 0, weight, 1.0)  # a_j stays 0 where the weight is 0
    a, td = torch.zeros_like(r), r
    error = td  # what the iteration drives to zero: the TD error, less ridge a / w
    size = initial = best_size = context.mean_square(error.detach())  # (h, b)
    best, length = (a, td, error), torch.zeros_like(size, dtype=torch.int64)
    rewinds, overflowed = torch.zeros_like(length), torch.zeros_like(size, dtype=torch.bool)
    limit = TOLERANCE**2 * (context.reward_square if reward_square is None else reward_square)  # (b,) or a number
    reached = torch.zeros_like(overflowed)
    path, errors, trace, history = [], [], [], []
    for layer, factor in enumerate(schedule, start=1):
        previous = (a, td, error)
        taken = step * factor  # (h, b)
        change = taken[..., None].to(r) * (error if alike else weight * error)
        a = a + change
        td = r - context.apply(a)
        error = td - leak * a if ridge else td
        new = context.mean_square(error.detach())
        back = ~(new <= GUARD**2 * best_size) if guard else ~new.isfinite()
        turned = bool(back.any())
        if turned:
            a, td, error = _where(back, best if guard else previous, (a, td, error))
            if guard:
                step, rewinds = torch.where(back, step / 2.0, step), rewinds + back
                # what came after the best iterate is no longer on the path
                path = [torch.where(back & (length < i), 0.0, s) for i, s in enumerate(path, start=1)]
                new = torch.where(back, best_size, new)
            else:
                overflowed = overflowed | back
                new = torch.where(back, size, new)
            taken = torch.where(back, 0.0, taken)
            if bool(overflowed.all()):
                break  # only finite layers are kept
        size = new
        better = (size < best_size) & ~back if turned else size < best_size
        if bool(better.all()):
            best, best_size, length = (a, td, error), size, torch.full_like(length, layer)
        elif bool(better.any()):
            best = _where(better, (a, td, error), best)
            best_size, length = torch.where(better, size, best_size), torch.where(better, layer, length)
        path.append(taken)
        errors.append(context.mean_square(td.detach()) if ridge else size)
        trace.append(td[:, 0])
        if record:
            history.append(a)
        if num_layers == "auto" or layer == len(schedule):
            noise = 8.0 * torch.finfo(a.dtype).eps * a.abs().amax(-1)  # (h, b)
            moved = change.abs().amax(-1)
            reached = (size <= limit) | ((moved > 0) & (moved <= noise))
            if num_layers == "auto" and bool(reached.all()):
                break
    overflowed = overflowed if not guard else torch.zeros_like(overflowed)
    diverged = overflowed | ~(size <= initial) if not guard else overflowed
    end = diverged | (size > best_size) if guard else diverged  # end on the best iterate; under a guard the record shows it
    if bool(end.any()):
        a, td, error = _where(end, best, (a, td, error))
        path = [torch.where(end & (length < i), 0.0, s) for i, s in enumerate(path, start=1)]
        if guard:
            errors[-1] = torch.where(end, context.mean_square(td), errors[-1])
            trace[-1] = torch.where(end[:, :1], td[:, 0], trace[-1])
            reached = torch.where(end, best_size <= limit, reached)
    empty = r.new_zeros(0, heads, columns, dtype=torch.float64)
    return Path(
        dual_coef=a,
        td=td,
        td_error=(torch.stack(errors) if errors else empty).cpu(),
        trace=torch.stack(trace) if trace else r.new_zeros(0, heads, len(context)),
        steps=(torch.stack(path) if path else empty).cpu(),
        rewinds=rewinds,
        best=best_size,
        initial=initial,
        final=size,
        reached=reached & ~diverged,
        improved=(length > 0) | (initial <= limit),
        diverged=diverged,
        overflowed=overflowed,
        history=None if not record else torch.stack(history) if history else r.new_zeros(0, *r.shape),
    )


def _schedule(
    step_size: StepSize, num_layers: int | Literal["auto"], heads: int
) -> tuple[Literal["plain", "safe", "fast"], Sequence[float] | Tensor]:
    """Return the unit of the steps and a factor per layer: a number, or ``(1 | h, 1)``."""
    layers = MAX_LAYERS if num_layers == "auto" else num_layers
    if isinstance(step_size, str):
        return step_size, [1.0] * check_layers(layers)
    if not isinstance(step_size, StepSchedule):
        return "plain", check_steps(step_size, layers)
    shape = (len(step_size), step_size.width)
    if num_layers not in ("auto", shape[0]) or shape[1] not in (1, heads):
        raise InputError("step_size", f"{num_layers} rows of 1 or {heads} factors", f"{shape[0]} rows of {shape[1]}")
    return step_size.unit, step_size.rows().double()[..., None]


def check_layers(num_layers: Any) -> int:
    """Return a number of layers that :func:`check_steps` accepts."""
    return len(check_steps(1.0, num_layers))


def _where(choice: Bool[Tensor, "h b"], new: tuple[Tensor, ...], old: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(torch.where(choice[..., None], x, y) for x, y in zip(new, old, strict=True))


def _ratio(a: float, b: float) -> float:
    return math.sqrt(a / b) if b > 0 else 0.0
