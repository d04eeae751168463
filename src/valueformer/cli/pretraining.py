"""The command ``pretrain``."""

from __future__ import annotations

import dataclasses
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from valueformer.cli.shared import Json, print_table, with_progress, writing
from valueformer.errors import InputError

__all__ = ["pretrain"]

_SETTINGS = "What to train (over --recipe or --config)"


def pretrain(
    out: Annotated[Path, typer.Option(help="Folder of the run: checkpoint, log.csv, TensorBoard events, weights/, pictures.")],
    tasks: Annotated[
        list[str] | None,
        typer.Option(
            help="Tasks to train on, repeatable: mrp:boyan|loop|gp|lq, metaworld:TASK?noise=high&goals=10, or any log."
        ),
    ] = None,
    validate: Annotated[list[str] | None, typer.Option(help="Tasks of other domains to choose the checkpoint by.")] = None,
    recipe: Annotated[
        str | None, typer.Option(help="boyan, boyan-sequential, metaworld-pick-place, pick-place-plain or pick-place-linear.")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="JSON file of a PretrainConfig, such as a run's config.json.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint in --out.")] = False,
    updates: Annotated[int | None, typer.Option(help="Steps of Adam.", rich_help_panel=_SETTINGS)] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of everything random.", rich_help_panel=_SETTINGS)] = None,
    gamma: Annotated[float | None, typer.Option(help="Discount per step.", rich_help_panel=_SETTINGS)] = None,
    context: Annotated[int | None, typer.Option(help="Transitions per context.", rich_help_panel=_SETTINGS)] = None,
    queries: Annotated[int | None, typer.Option(help="Held-out transitions per task.", rich_help_panel=_SETTINGS)] = None,
    layers: Annotated[int | None, typer.Option(help="Number of layers L.", rich_help_panel=_SETTINGS)] = None,
    model: Annotated[str | None, typer.Option(help="kernel or matrices.", rich_help_panel=_SETTINGS)] = None,
    heads: Annotated[
        str | None, typer.Option(help="Heads to start from: default, fast, or a kernel by name.", rich_help_panel=_SETTINGS)
    ] = None,
    train: Annotated[
        list[str] | None, typer.Option(help="steps, temperatures, mixing, metric; repeatable.", rich_help_panel=_SETTINGS)
    ] = None,
    step_unit: Annotated[str | None, typer.Option(help="plain, safe or fast.", rich_help_panel=_SETTINGS)] = None,
    loss: Annotated[str | None, typer.Option(help="td, residual, value or monte-carlo.", rich_help_panel=_SETTINGS)] = None,
    learning_rate: Annotated[float | None, typer.Option(help="Of Adam.", rich_help_panel=_SETTINGS)] = None,
    models: Annotated[int | None, typer.Option(help="Seeds side by side (matrices).", rich_help_panel=_SETTINGS)] = None,
    patience: Annotated[
        int | None, typer.Option(help="Stop after so many validations without improvement.", rich_help_panel=_SETTINGS)
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, ..")] = "auto",
    json: Json = False,
) -> None:
    """Pretrain by multi-task TD; the frozen weights then serve any log: valueformer evaluate DATA --model OUT/weights."""
    from valueformer.pretrain_report import summary_rows, write_report
    from valueformer.pretraining.run import pretrain as run
    from valueformer.results import to_json

    given: dict[str, Any] = {
        "tasks": tasks, "validation": validate, "updates": updates, "seed": seed, "gamma": gamma, "context_length": context,
        "queries": queries, "num_layers": layers, "model": model, "heads": None if heads is None else _heads(heads),
        "train": train, "step_unit": step_unit, "loss": loss, "learning_rate": learning_rate, "models": models,
        "patience": patience,
    }  # fmt: skip
    asked = _config(out, recipe, config, resume, {name: value for name, value in given.items() if value is not None})
    first = os.environ.get("RANK", "0") == "0"

    def work(report: Any) -> Any:
        return run(asked, out, resume=resume, device=device, progress=lambda done, total, row: report(done, total, _note(row)))

    result = writing(
        f"--out {out}",
        "a folder that can be written to",
        lambda: with_progress("pretraining", work) if first else work(lambda *_: None),
    )
    if not first:
        return
    files = writing(f"--out {out}", "a folder that can be written to", lambda: write_report(out))
    files |= {"weights": str(out / "weights"), "log": str(out / "log.csv")}
    if json:
        sys.stdout.write(to_json(result | {"files": files}))
        return
    print_table("valueformer pretrain", summary_rows(result) + [(f"file: {what}", path) for what, path in files.items()])


def _config(out: Path, recipe: str | None, config: Path | None, resume: bool, given: dict[str, Any]) -> Any:
    """Return the configuration asked for: a stored run's, a recipe, a file, or tasks alone, with options on top."""
    from valueformer.pretraining.config import PretrainConfig
    from valueformer.pretraining.recipes import recipe as named
    from valueformer.pretraining.run import stored_config

    if recipe is not None and config is not None:
        raise InputError("--config", "no --recipe beside it", f"--recipe {recipe}", "leave one of them out")
    if recipe is not None:
        base = named(recipe)
    elif config is not None:
        base = PretrainConfig.read(config)
    elif resume and (not given or (out / "config.json").is_file()):
        base = stored_config(out)
    elif "tasks" in given:
        return PretrainConfig(**given)
    else:
        raise InputError("--tasks", "tasks to train on, a --recipe or a --config", "none of them", "--tasks mrp:boyan")
    return dataclasses.replace(base, **given)


def _heads(name: str) -> Any:
    from valueformer import kernels
    from valueformer.heads import Head
    from valueformer.storage import bundled, bundled_heads

    return bundled_heads(name) if name in bundled() else (Head(kernels.by_name(name)),)


def _note(row: dict[str, Any]) -> str:
    """Return the loss and the held-out TDc of a row of the log, for the progress bar."""
    figures = (("loss", row.get("loss")), ("TDc", row.get("held_out_tdc")))
    return ", ".join(f"{what} {value:.3g}" for what, value in figures if value is not None)
