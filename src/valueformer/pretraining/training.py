"""The loop: draw tasks, take the gradient of their loss, validate elsewhere, checkpoint, go on as if never stopped."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from valueformer.errors import InputError
from valueformer.pretraining.batch import GAP, KernelBatch, WindowBatch
from valueformer.pretraining.checkpoints import Checkpoint, optimiser_tensors, restore_optimiser
from valueformer.pretraining.config import PretrainConfig
from valueformer.pretraining.emergence import Examination
from valueformer.pretraining.losses import loss, td_errors
from valueformer.pretraining.models import KernelTD, MatrixTransformer, linear_td_weights
from valueformer.pretraining.tasks import TaskDistribution, Walks, generator, parse

__all__ = ["Training"]

_TRAIN, _VALIDATE = 0, 1  # streams of random numbers
_CHUNK = 256  # walks of so many tasks are drawn at a time
_WORST = 10.0  # a validation task counts at most this many times the best constant's TD error
_CHAINS = 64  # on which similarities to TD are measured

Row = dict[str, Any]


@dataclass(frozen=True)
class Share:
    """Which part of every batch this process computes."""

    rank: int = 0
    world: int = 1

    @classmethod
    def current(cls) -> Share:
        """Return the part of this process among those that torchrun started; alone: all of it."""
        return cls(dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else cls()


class Training:
    """One pretraining run, from its configuration to its last update.

    All processes of a data-parallel run hold the same model; each draws its share of a batch, and gradients are summed, so the
    loss is that of one process at the same global batch up to the order of the sum.
    """

    def __init__(self, config: PretrainConfig, *, device: str = "cpu", checkpoint: Checkpoint | None = None) -> None:
        self.config, self.device, self.share = config, torch.device(device), Share.current()
        self.tasks = parse(config.tasks)
        self.validation = parse(config.validation) if config.validation else self.tasks
        self.dtype: torch.dtype = getattr(torch, config.dtype)
        self.learner = self._learner().to(self.device)
        self.td_step = nn.Parameter(torch.ones(config.models, dtype=self.dtype, device=self.device))
        self.examination = self._examination()
        parameters = [*self.learner.parameters(), *([self.td_step] if self.examination else [])]
        self.optimiser = torch.optim.Adam(parameters, lr=config.learning_rate, weight_decay=config.weight_decay)
        self.step, self.seconds = 0, 0.0
        self.history: list[Row] = []
        self.skipped = [0] * config.models
        self._since = [0.0, 0]  # sum of losses, and their number, since the last row
        self.best: dict[str, Tensor] = {}
        self.best_row: Row | None = None
        self._walks: tuple[int, Walks] | None = None
        self._held_out: Any = None
        if checkpoint is not None:
            self._restore(checkpoint)

    # -- set-up -------------------------------------------------------------------------------------------------------------

    def _learner(self) -> KernelTD | MatrixTransformer:
        c = self.config
        dims = {self._first_dim(part) for part in (*self.tasks.components, *self.validation.components)}
        if len(dims) > 1 and (c.model == "matrices" or "metric" in c.train):
            what = "model 'matrices'" if c.model == "matrices" else "a metric"
            raise InputError("tasks", f"states of one dimension for {what}", f"{sorted(dims)}", "leave some tasks out")
        return KernelTD(c, max(dims)) if c.model == "kernel" else MatrixTransformer(c, max(dims))

    def _first_dim(self, part: TaskDistribution) -> int:
        """Draw a first task, so that what does not fit is said before any work; return its states' dimension."""
        c, rng = self.config, generator(self.config.seed, _TRAIN, 0)
        if c.model == "kernel":
            return part.draw(rng, c.context_length, c.queries, c.gamma).context.obs_dim
        return part.walks([rng], 1, c.context_length + GAP + c.windows, c.gamma).states.shape[-1]

    def _examination(self) -> Examination | None:
        c = self.config
        if c.model != "matrices":
            return None
        return Examination.of(self.validation, n=c.context_length, gamma=c.gamma, seed=c.seed, chains=_CHAINS)

    # -- updates ------------------------------------------------------------------------------------------------------------

    def run(
        self,
        *,
        until: int | None = None,
        on_step: Callable[[int], None] = lambda step: None,
        on_row: Callable[[Row], None] = lambda row: None,
        on_checkpoint: Callable[[], None] = lambda: None,
    ) -> None:
        """Train to the last update, or to ``until``; validate and hand out rows and checkpoints on the way."""
        c = self.config
        last = c.updates if until is None else min(until, c.updates)
        began = time.perf_counter() - self.seconds
        while self.step < last and not self.exhausted:
            value = self._update()
            self.step += 1
            self.seconds = time.perf_counter() - began
            if math.isfinite(value):
                self._since = [self._since[0] + value, self._since[1] + 1]
            if self.step % c.validate_every == 0 or self.step == c.updates:
                row = self._row()
                self.history.append(row)
                on_row(row)
            if self.step % c.checkpoint_every == 0 or self.step == c.updates:
                on_checkpoint()
            on_step(self.step)

    @property
    def exhausted(self) -> bool:
        """Whether validation has not improved for as long as the configuration is patient."""
        if not self.config.patience or self.best_row is None:
            return False
        since = sum(row["step"] > self.best_row["step"] for row in self.history)
        return since >= self.config.patience

    def _update(self) -> float:
        """Take one step of Adam; return the loss, averaged over models."""
        batch = self._batch(self.step)
        losses = self._losses(batch)  # (models,)
        total = losses.sum()
        if self.examination is not None:
            total = total + self._td_losses(batch).sum()
        self.optimiser.zero_grad()
        total.backward()
        losses = losses.detach()
        owned = [p for group in self.optimiser.param_groups for p in group["params"]]
        if self.share.world > 1:
            for p in owned:
                dist.all_reduce(p.grad)
            dist.all_reduce(losses)
        finite = losses.isfinite()
        for p in owned:
            finite = finite & self._per_model(p.grad).isfinite().all(-1)
        self.skipped = [k + int(not ok) for k, ok in zip(self.skipped, finite.tolist(), strict=True)]
        if bool(finite.any()):
            self._apply(owned, finite)
        return float(losses[finite].mean()) if bool(finite.any()) else math.nan

    def _per_model(self, x: Tensor) -> Tensor:
        return x.reshape(self.config.models, -1) if self.config.model == "matrices" else x.reshape(1, -1)

    def _apply(self, owned: list[Any], finite: Tensor) -> None:
        """Step the models whose gradient is finite; the others, and their optimiser's memory, stay as they are."""
        kept = [] if bool(finite.all()) else [(p, p.detach().clone(), self._memory(p)) for p in owned]
        clip = self.config.clip_norm
        norm = torch.stack([self._per_model(p.grad).square().sum(-1) for p in owned]).sum(0).sqrt()  # (models,)
        scale = torch.where(norm > clip, clip / norm, 1.0) if clip else torch.ones_like(norm)
        for p in owned:
            own = self._per_model(p.grad)
            p.grad = torch.where(finite[:, None], own * scale.to(own)[:, None], 0.0).reshape(p.shape)
        self.optimiser.step()
        with torch.no_grad():
            for p, before, memory in kept:
                bad = ~finite
                p[bad] = before[bad]
                for name, tensor in memory.items():
                    self.optimiser.state[p][name][bad] = tensor[bad]

    def _memory(self, p: Tensor) -> dict[str, Tensor]:
        return {name: t.clone() for name, t in self.optimiser.state.get(p, {}).items() if t.ndim}

    def _losses(self, batch: Any) -> Tensor:
        c = self.config
        v, v_next = self.learner.values(batch)
        each = loss(c.loss, v, v_next, batch.targets, c.normalise)
        if c.model == "kernel":
            return each.sum(0, keepdim=True) / c.tasks_per_update
        return each * (v.shape[1] / c.windows)

    def _td_losses(self, batch: WindowBatch) -> Tensor:
        """Return the loss of batch TD, whose own step trains beside each model (Wang et al. 2025)."""
        weights = linear_td_weights(batch.moments, self.td_step, self.config.num_layers)  # (s, w + 1, d)
        v, v_next = (batch.queries * weights[:, :-1]).sum(-1), (batch.successors * weights[:, 1:]).sum(-1)
        return loss("td", v, v_next, batch.targets, False) * (v.shape[1] / self.config.windows)

    # -- data ---------------------------------------------------------------------------------------------------------------

    def _batch(self, step: int) -> Any:
        c = self.config
        if c.model == "matrices":
            return self._windows(step)
        mine = range(self.share.rank, c.tasks_per_update, self.share.world)
        return self._kernel_batch([generator(c.seed, _TRAIN, step, i) for i in mine], self.tasks)

    def _kernel_batch(self, rngs: list[np.random.Generator], source: Any) -> KernelBatch:
        c = self.config
        tasks = [source.draw(rng, c.context_length, c.queries, c.gamma) for rng in rngs]
        gated = isinstance(self.learner, KernelTD) and self.learner.gated
        return _to(KernelBatch.of(tasks, c.heads, c.gamma, gated, self.dtype), self.device)

    def _windows(self, step: int) -> WindowBatch:
        """Return the windows of one walk on each model's task; walks of many tasks are drawn at once."""
        c = self.config
        task, walk = divmod(step, c.updates_per_task)
        size = max(1, _CHUNK // c.models)
        chunk, position = divmod(task, size)
        if self._walks is None or self._walks[0] != chunk:
            rngs = [
                generator(c.seed + model, _TRAIN, chunk * size + i) for i in range(size) for model in range(c.models)
            ]  # a model's tasks do not depend on how many are trained beside it
            rows = c.context_length + GAP + c.windows
            self._walks = (chunk, self.tasks.walks(rngs, c.updates_per_task, rows, c.gamma))
        own = slice(position * c.models, (position + 1) * c.models)
        walks = Walks(*(getattr(self._walks[1], name)[own] for name in Walks.__dataclass_fields__))
        batch = WindowBatch.of(walks, walk, c.context_length, c.windows, self.dtype)
        return _to(batch.part(self.share.rank, self.share.world) if self.share.world > 1 else batch, self.device)

    # -- validation ---------------------------------------------------------------------------------------------------------

    def _row(self) -> Row:
        """Return what is logged: the mean loss since the last row, and figures on tasks that nothing was trained on."""
        row: Row = {"step": self.step, "loss": self._since[0] / self._since[1] if self._since[1] else None}
        self._since = [0.0, 0]
        with torch.no_grad():
            row["held_out_tdc"] = self._held_out_tdc()
        if self.examination is not None:
            found = self.examination.compare(self.learner, self.td_step.detach())  # type: ignore[arg-type]
            row |= {name: value.tolist() for name, value in vars(found).items()}
        row["skipped"] = sum(self.skipped)
        value = row["held_out_tdc"]
        if self.config.validation and value is not None and (self.best_row is None or value < self.best_row["held_out_tdc"]):
            self.best_row = row
            self.best = {name: p.detach().clone() for name, p in self.learner.state_dict().items()}
        return row

    def _held_out_tdc(self) -> float | None:
        """Return the mean over validation tasks of held-out TD error over the best constant's, each at most 10.

        Model "kernel" is guarded here, as it is when used. The tasks are the same every time.
        """
        c = self.config
        if self._held_out is None:
            if c.model == "kernel":
                rngs = [generator(c.seed, _VALIDATE, i) for i in range(c.validation_tasks)]
                self._held_out = self._kernel_batch(rngs, self.validation)
            else:
                rngs = [generator(c.seed, _VALIDATE, i) for i in range(c.models)]
                rows = c.context_length + GAP + c.windows
                walks = self.validation.walks(rngs, 1, rows, c.gamma)
                self._held_out = _to(WindowBatch.of(walks, 0, c.context_length, c.windows, self.dtype), self.device)
        batch = self._held_out
        if c.model == "kernel":
            v, v_next = self.learner.values(batch, guard=True)  # type: ignore[call-arg]
        else:
            v, v_next = self.learner.values(batch)
        ratio = td_errors(v, v_next, batch.targets).square().mean(-1) / batch.targets.constant
        return float(torch.nan_to_num(ratio, _WORST, _WORST).clamp_max(_WORST).mean())

    # -- files --------------------------------------------------------------------------------------------------------------

    def checkpoint(self) -> Checkpoint:
        """Return all that it takes to go on."""
        tensors = {f"model.{name}": p for name, p in self.learner.state_dict().items()}
        tensors |= {"td_step": self.td_step, **{f"best.{name}": p for name, p in self.best.items()}}
        state = {
            "step": self.step,
            "seconds": self.seconds,
            "history": self.history,
            "skipped": self.skipped,
            "since": self._since,
            "best_row": self.best_row,
        }
        return Checkpoint(tensors | optimiser_tensors(self.optimiser), state)

    def _restore(self, checkpoint: Checkpoint) -> None:
        tensors, state = checkpoint.tensors, checkpoint.state

        def own(prefix: str) -> dict[str, Tensor]:
            return {n.removeprefix(prefix): t.to(self.device) for n, t in tensors.items() if n.startswith(prefix)}

        try:
            self.learner.load_state_dict(own("model."))
            with torch.no_grad():
                self.td_step.copy_(tensors["td_step"])
            restore_optimiser(self.optimiser, tensors)
            self.best = own("best.")
            self.step, self.seconds = int(state["step"]), float(state["seconds"])
            self.history, self.skipped = list(state["history"]), list(state["skipped"])
            self._since, self.best_row = list(state["since"]), state["best_row"]
        except (KeyError, RuntimeError, TypeError, ValueError) as error:
            raise InputError(
                "checkpoint", "all parts of a run", str(error).splitlines()[0], "remove it to start anew"
            ) from None

    def chosen(self) -> KernelTD | MatrixTransformer:
        """Return the model that validation chose, or the last one where there is no validation."""
        if self.best:
            self.learner.load_state_dict(self.best)
        return self.learner


def _to(value: Any, device: torch.device) -> Any:
    """Return a batch, or a part of one, on a device."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {k: _to(v, device) for k, v in value.items()}
    if isinstance(value, tuple):
        return tuple(_to(v, device) for v in value)
    if hasattr(value, "__dataclass_fields__"):
        return type(value)(**{name: _to(getattr(value, name), device) for name in value.__dataclass_fields__})
    return value
