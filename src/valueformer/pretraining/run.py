"""A pretraining run in a folder: checkpoints, a log that others can plot, and the frozen weights at the end."""

from __future__ import annotations

import atexit
import csv
import io
import json
import os
import platform
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import save_file
from safetensors.torch import load_file

from valueformer.errors import InputError
from valueformer.files import write_atomically, write_text
from valueformer.pretraining.checkpoints import Checkpoint
from valueformer.pretraining.config import PretrainConfig
from valueformer.pretraining.models import KernelTD, MatrixTransformer, matrix_stack
from valueformer.pretraining.training import Row, Share, Training
from valueformer.results import plain, to_json
from valueformer.transformer import Transformer
from valueformer.version import __version__

__all__ = ["load_transformer", "pretrain", "stored_config"]

SIMILARITIES = ("value_difference", "implicit_weight_similarity", "sensitivity_similarity")
_COLUMNS = ("step", "loss", "held_out_tdc", "skipped", *SIMILARITIES)
Progress = Callable[[int, int, Row], None]


def pretrain(
    config: PretrainConfig,
    out: str | Path,
    *,
    resume: bool = False,
    device: str = "auto",
    progress: Progress = lambda done, total, row: None,
) -> dict[str, Any]:
    """Pretrain by multi-task TD, and write the frozen weights to ``out/weights``.

    ``resume``: go on from the last checkpoint in ``out``, or start where there is none; the result is that of a run which was
    never stopped, to the bit on one thread. Under torchrun each process computes its share of every batch. Returns what
    ``out/result.json`` holds. Raises InputError for a folder in use, or tasks that cannot be had.
    """
    folder = Path(out)
    where = _join(device)
    first = Share.current().rank == 0
    if first:
        _check_folder(folder, config, resume)
    elif dist.is_initialized():
        dist.barrier()  # the first process collects what is missing, the others find it
    checkpoint = Checkpoint.read(folder, config) if resume else None
    training = Training(config, device=where, checkpoint=checkpoint)  # tasks that cannot be had leave no folder behind
    if first:
        _write_config(folder, config)
        if dist.is_initialized():
            dist.barrier()
    with _interruption() as interrupted, _events(folder, training.step if checkpoint else 0, first) as event:

        def keep() -> None:
            if first:
                training.checkpoint().write(folder, config)
                _write_log(folder, training.history)

        def after(step: int) -> None:
            progress(step, config.updates, training.history[-1] if training.history else {})
            if interrupted():
                keep()
                raise KeyboardInterrupt

        training.run(on_step=after, on_row=event, on_checkpoint=keep)
    model = training.chosen()
    result = _result(training, model)
    if first:
        _write_log(folder, training.history)
        _save_weights(model, folder / "weights")
        write_text(folder / "result.json", to_json(result))
    if dist.is_initialized():
        dist.barrier()
    return result


def stored_config(folder: Path) -> PretrainConfig:
    """Return the configuration of the run in a folder; raises InputError."""
    if not (folder / "config.json").is_file():
        raise InputError(str(folder), "a folder with a pretraining run", "no config.json in it", "check the path")
    return PretrainConfig.read(folder / "config.json")


def load_transformer(folder: str | Path, *, model: int = 0) -> Transformer:
    """Return the literal attention stack of pretrained matrices, for a :class:`FeaturePrompt`; frozen.

    ``folder``: the ``weights`` of a run of model "matrices"; ``model``: which of those trained side by side. Raises InputError.
    """
    path = Path(folder)
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
        matrices = load_file(path / "model.safetensors")
        P, Q = matrices["P"][model], matrices["Q"][model]  # (sets, c, c)
        layers = [(P[min(i, len(P) - 1)], Q[min(i, len(Q) - 1)]) for i in range(int(config["num_layers"]))]
        return matrix_stack(layers, config["activation"])
    except (OSError, ValueError, KeyError, IndexError, TypeError, SafetensorError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise InputError(str(folder), f"weights of model 'matrices' with a model {model}", reason) from None


def _check_folder(folder: Path, config: PretrainConfig, resume: bool) -> None:
    try:
        if resume and (folder / "config.json").is_file():
            if stored_config(folder) != config:
                raise InputError(str(folder), "a run of this configuration", "one of another", "resume without options")
            return
        if folder.exists() and any(folder.iterdir()):
            raise InputError(str(folder), "a new or empty folder", "a folder in use", "choose another, or --resume")
    except OSError as error:
        raise InputError(str(folder), "a folder that can be written to", error.strerror or str(error)) from None


def _write_config(folder: Path, config: PretrainConfig) -> None:
    try:
        write_text(folder / "config.json", to_json(config.to_config()))
    except OSError as error:
        raise InputError(str(folder), "a folder that can be written to", error.strerror or str(error)) from None


def _join(device: str) -> str:
    """Join the processes that torchrun started, if it did and this one has not yet; return its device."""
    cuda = torch.cuda.is_available()
    where = ("cuda" if cuda else "cpu") if device == "auto" else device
    if where == "cuda":
        where = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    try:
        torch.empty(0, device=where)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise InputError("--device", "'auto' or a torch device of this machine", repr(device), reason) from None
    if where.startswith("cuda"):
        torch.cuda.set_device(where)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized():
        dist.init_process_group("nccl" if where.startswith("cuda") else "gloo")
        atexit.register(dist.destroy_process_group)  # not after each run: a group that is joined twice may hang
    return where


@contextmanager
def _interruption() -> Iterator[Callable[[], bool]]:
    """Let Ctrl-C wait for the end of an update: parameters are never caught between two states."""
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked.is_set
        return
    before = signal.signal(signal.SIGINT, lambda *_: asked.set())
    try:
        yield asked.is_set
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _events(folder: Path, start: int, first: bool) -> Iterator[Callable[[Row], None]]:
    """Write TensorBoard events where that package is installed; rows after the checkpoint gone back to are purged."""
    writer: Any = None
    if first:
        with suppress(ImportError):  # the CSV holds the same figures
            from torch.utils.tensorboard.writer import SummaryWriter

            writer = SummaryWriter(str(folder), purge_step=start + 1 if start else None)

    def event(row: Row) -> None:
        if writer is None:
            return
        for name in _COLUMNS[1:]:
            if row.get(name) is not None:
                writer.add_scalar(name, float(np.mean(row[name])), row["step"])
        writer.flush()

    try:
        yield event
    finally:
        if writer is not None:
            writer.close()


def _write_log(folder: Path, history: list[Row]) -> None:
    names = [name for name in _COLUMNS if any(name in row for row in history)] or list(_COLUMNS[:4])
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(names)
    for row in history:
        table.writerow([row["step"], *("" if row[name] is None else float(np.mean(row[name])) for name in names[1:])])
    write_text(folder / "log.csv", text.getvalue())


def _save_weights(model: KernelTD | MatrixTransformer, folder: Path) -> None:
    """Write what is used afterwards: a frozen estimator, or matrices under the names of the literature."""
    if isinstance(model, KernelTD):
        model.frozen().save_pretrained(folder)
        return
    matrices = _matrices(model)
    config = {"model": "valueformer-matrices", "format": 1, "num_layers": model.num_layers, "activation": model.activation}
    write_atomically(folder / "model.safetensors", lambda path: save_file(matrices, path))
    write_text(folder / "config.json", to_json(config))


def _matrices(model: MatrixTransformer) -> dict[str, NDArray[Any]]:
    with torch.no_grad():
        layers = model.layers()[: next(iter(model.parameters())).shape[1]]
        stacked = {"P": torch.stack([p for p, _ in layers], 1), "Q": torch.stack([q for _, q in layers], 1)}
    return {name: np.ascontiguousarray(matrix.cpu().numpy()) for name, matrix in stacked.items()}  # (models, sets, c, c)


def _result(training: Training, model: KernelTD | MatrixTransformer) -> dict[str, Any]:
    config, history = training.config, training.history
    tasks = training.step * (config.tasks_per_update if config.model == "kernel" else config.models / config.updates_per_task)
    result: dict[str, Any] = {
        "config": config.to_config(),
        "updates": training.step,
        "stopped": "patience" if training.exhausted else "updates",
        "skipped": training.skipped,
        "seconds": training.seconds,
        "tasks_per_second": tasks / training.seconds if training.seconds else None,
        "processes": training.share.world,
        "chosen_step": training.best_row["step"] if training.best_row else training.step,
        "history": history,
        "versions": {"valueformer": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "threads": torch.get_num_threads(),
    }
    if isinstance(model, KernelTD):
        frozen = model.frozen()
        step: Any = frozen.step_size
        heads: Any = frozen.kernel
        result["trained"] = {
            "step_unit": step.unit,
            "steps": step.factors,
            "heads": [str(head) for head in heads],
            "temperatures": [getattr(head.kernel, "temperature", None) for head in heads],
            "mixing": None if isinstance(frozen.mix, str) else frozen.mix,
            "metric": frozen.metric,
        }
    else:
        matrices = _matrices(model)
        # (P, Q) and (-P, -Q) are one linear layer: of each pair, show the one whose P adds to the TD error's channel
        sign = np.where(matrices["P"][..., -1:, -1:] < 0, -1.0, 1.0) if model.activation == "linear" else 1.0
        result["trained"] = {name: (sign * m).mean(0) for name, m in matrices.items()}
        if history and SIMILARITIES[0] in history[-1]:
            result["similarities"] = {name: _interval(history[-1][name]) for name in SIMILARITIES}
            result["td_step"] = _interval(training.td_step.tolist())
    return plain(result)


def _interval(values: list[float]) -> dict[str, Any]:
    """Return the mean over models with Student's 95 % interval."""
    from scipy import stats  # two seconds to import, for one number at the end

    n, mean = len(values), float(np.mean(values))
    half = float(stats.t.ppf(0.975, n - 1) * np.std(values, ddof=1) / np.sqrt(n)) if n > 1 else None
    bounds = {"lower": None, "upper": None} if half is None else {"lower": mean - half, "upper": mean + half}
    return {"mean": mean, **bounds, "level": 0.95, "models": n, "least": float(np.min(values))}
