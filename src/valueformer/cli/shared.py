"""What the commands share: how data are named on the command line, progress, tables, checks of output."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from valueformer.errors import InputError

__all__ = ["Data", "Json", "Model", "check_out", "data_options", "findings", "print_table", "shown", "with_progress", "writing"]

Data = Annotated[
    str,
    typer.Argument(
        help="A file, a folder, sample:NAME, minari:ID, or metaworld:TASK and gymnasium:ENV (collected on first use)."
    ),
]
Model = Annotated[str, typer.Option(help="A frozen model: default, fast, metaworld-pick-place, or a folder.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]

_GROUP = "How to read DATA"
# name -> (type, help)
_OPTIONS: dict[str, tuple[Any, str]] = {
    "format": (str | None, "The format, where content fits several."),
    "obs_columns": (str | None, "Columns of the state: names or patterns, separated by commas ('obs_*')."),
    "next_obs_columns": (str | None, "Columns of the next state, likewise."),
    "action_columns": (str | None, "Columns of the action, likewise."),
    "reward_column": (str | None, "Column of the reward."),
    "terminated_column": (str | None, "Flag of terminal states; 'none' if the task has none."),
    "truncated_column": (str | None, "Flag of time limits; 'none' if there is none."),
    "done_column": (str | None, "Flag of both; needs --truncated-column or --max-episode-steps to tell them apart."),
    "episode_column": (str | None, "Column of episode ids."),
    "step_column": (str | None, "Column that orders the steps of an episode."),
    "max_episode_steps": (int | None, "Time limit, where no flag marks it."),
    "autoreset": (str | None, "For rollouts (time x environment): next-step (Gymnasium >= 1.0) or same-step."),
    "drop_nonfinite": (bool, "Leave out rows with NaN or infinity, and count them."),
}


def data_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options of :func:`valueformer.load`, handed to it as the mapping ``reading``."""
    signature = inspect.signature(command, eval_str=True)
    extra = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=False if kind is bool else None,
            annotation=Annotated[kind, typer.Option(f"--{name.replace('_', '-')}", help=text, rich_help_panel=_GROUP)],
        )
        for name, (kind, text) in _OPTIONS.items()
    ]

    @wraps(command)
    def wrapped(**arguments: Any) -> Any:
        reading = {name: value for name in _OPTIONS if (value := arguments.pop(name)) is not None and value is not False}
        return command(**arguments, reading=reading)

    own = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in signature.parameters.values() if p.name != "reading"]
    wrapped.__signature__ = signature.replace(parameters=[*own, *extra])  # pyright: ignore[reportAttributeAccessIssue]
    wrapped.__annotations__ = {p.name: p.annotation for p in (*own, *extra)}
    return wrapped


def shown(path: Path) -> str:
    """Return a path as text that can be printed, whatever bytes it holds."""
    return str(path).encode("utf-8", "replace").decode()


def writing(where: str, expected: str, write: Callable[[], Any]) -> Any:
    """Return what ``write`` does; a failing disk becomes one line that names ``where``."""
    try:
        return write()
    except OSError as error:
        raise InputError(where, expected, error.strerror or str(error)) from None


def check_out(folder: Path, names: tuple[str, ...]) -> None:
    """Refuse an unusable folder before the work, without leaving anything behind."""
    where = f"--out {folder}"
    try:
        existing = next(path for path in (folder, *folder.absolute().parents) if path.exists() or path.is_symlink())
        usable = existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)
        taken = [name for name in names if (folder / name).is_dir()]
    except OSError as error:
        raise InputError(where, "a folder", error.strerror or str(error), "choose another") from None
    if not usable:
        raise InputError(where, "a folder that can be written to", f"{existing} is not one", "choose another")
    if taken:
        raise InputError(where, "files of this name or none", f"a folder {taken[0]}", "choose another folder")


def with_progress(label: str, work: Callable[[Callable[..., None]], Any]) -> Any:
    """Run ``work(report)`` under a progress bar on stderr, where that is a terminal; ``report(done, total, note="")``."""
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )  # fmt: skip
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(label, total=None, note="")
        return work(lambda done, total, note="": bar.update(task, completed=done, total=total, note=note))


def print_table(title: str, rows: list[tuple[str, str]]) -> None:
    """Print names and values."""
    table = Table(title=Text(title), title_justify="left", show_header=False, box=None, pad_edge=False)
    table.add_column(style="cyan")
    table.add_column(overflow="fold")
    for what, text in rows:
        table.add_row(what, Text(text))
    Console().print(table, markup=False)


def findings(report: Any) -> None:
    """Print what a log contains, and each problem with what to do about it."""
    from valueformer.inspection import HEADER, facts

    print_table(report.source, facts(report.to_dict()))
    if not report.problems:
        typer.echo("\nNothing odd found.")
        return
    table = Table(*HEADER, title="Worth a look", title_justify="left", box=None)
    for problem in report.problems:
        table.add_row(*map(Text, (problem.what, str(problem.count), problem.first, problem.mend)))
    typer.echo()
    Console().print(table, markup=False)
