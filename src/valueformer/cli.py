"""The command line: ``valueformer evaluate | inspect | samples | bench``.

Exit 0: done. Exit 1: a result whose status is diverged or singular. Exit 2: bad usage or input, in one line on stderr.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from valueformer.errors import InputError, MissingExtraError

app = typer.Typer(
    name="valueformer",
    help="Policy evaluation by in-context learning: values of a log's policy, with no training.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
bench_app = typer.Typer(help="Ratios measured in one run on this machine.", rich_markup_mode=None)
app.add_typer(bench_app, name="bench")

_INTERRUPTED = 130  # the shell's code for Ctrl-C
_UsageError: Any = typer.BadParameter.__mro__[1]  # click's, or the copy of it that newer versions of typer carry

OUTPUTS = ("values.parquet", "queries.parquet", "result.json", "report.png", "report.html")

Data = Annotated[str, typer.Argument(help="A file, a folder, or sample:NAME (see `valueformer samples`).")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]


def _version(wanted: bool) -> None:
    if wanted:
        from valueformer.version import __version__

        typer.echo(f"valueformer {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    """Read the global options."""


@app.command()
def evaluate(
    data: Data,
    gamma: Annotated[float, typer.Option(help="Discount per step, in [0, 1].")] = 0.99,
    layers: Annotated[str, typer.Option(help="Number of layers (TD steps), or 'auto'.")] = "40",
    kernel: Annotated[
        str, typer.Option(help="rbf, laplace, matern15, matern25, rational-quadratic, expdot, linear, ..")
    ] = "rbf",
    temperature: Annotated[float | None, typer.Option(help="Kernel temperature, lengthscale squared, in scaled units.")] = None,
    step_size: Annotated[str, typer.Option(help="'fast', 'safe' or a number.")] = "fast",
    scaler: Annotated[str, typer.Option(help="isotropic, standardize or none.")] = "isotropic",
    layout: Annotated[
        str, typer.Option(help="fast (solver), or pair, residual, trajectory, two_group (transformer).")
    ] = "fast",
    algorithm: Annotated[str, typer.Option(help="td (layers) or lstd (their limit, in closed form).")] = "td",
    ridge: Annotated[float, typer.Option(help="Leak of the residual stream, in units of the kernel.")] = 0.0,
    dtype: Annotated[str, typer.Option(help="float32 or float64.")] = "float32",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, ..")] = "auto",
    seed: Annotated[int, typer.Option(help="Seeds the scaler's subsample.")] = 0,
    query: Annotated[
        Path | None, typer.Option(help="File of states to ask about: obs_* columns or an observations array.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for values.parquet, report.html, report.png, result.json.")] = None,
    json: Json = False,
) -> None:
    """Estimate V(s) of the policy that made a log, and test it on episodes left out."""
    from valueformer import kernels, load
    from valueformer.estimator import ValueFormer
    from valueformer.evaluation import evaluate as run
    from valueformer.report import summary_rows, write_report
    from valueformer.results import to_json
    from valueformer.sources import load_observations

    if out is not None:
        _check_out(out)
    model = ValueFormer(
        kernel=kernel if temperature is None else kernels.by_name(kernel, temperature),
        num_layers=_layers(layers),
        step_size=_step_size(step_size),
        gamma=gamma,
        scaler=scaler,  # pyright: ignore[reportArgumentType]  # checked by fit
        layout=layout,  # pyright: ignore[reportArgumentType]
        algorithm=algorithm,  # pyright: ignore[reportArgumentType]
        dtype=dtype,  # pyright: ignore[reportArgumentType]
        ridge=ridge,
        device=device,
        random_state=seed,
    )
    transitions = load(data)
    queries = None if query is None else load_observations(query, transitions.obs_names)
    result = _with_progress("evaluating", lambda report: run(transitions, model, queries=queries, progress=report))
    files: dict[str, str] = {}
    if out is not None:
        try:
            files = result.save(out)
            files |= write_report(out)
        except OSError as error:
            raise InputError(f"--out {out}", "a folder that can be written to", error.strerror or str(error)) from None
    document = result.to_dict(files)
    if json:
        sys.stdout.write(to_json(document))
    else:
        rows = summary_rows(document) + [(f"file: {what}", path) for what, path in files.items()]
        if result.queries is not None:
            shown = ", ".join(f"{v:.4g}" for v in result.queries[:5]) + (", .." if len(result.queries) > 5 else "")
            rows.append((f"values at {len(result.queries)} queries", shown))
        _print_table(document["source"], rows)
        Console().print(f"\n{document['verdict']}", highlight=False, markup=False)
    if result.status in ("diverged", "singular"):
        raise typer.Exit(1)


@app.command()
def inspect(data: Data, json: Json = False) -> None:
    """Say what a log contains and what is odd about it."""
    from valueformer import load
    from valueformer.results import to_json

    report = load(data).validate()
    if json:
        sys.stdout.write(to_json(report.to_dict()))
        return
    rows = [
        ("format", report.format),
        ("transitions", f"{report.n_transitions} in {report.n_episodes} episodes"),
        ("episode length", f"{report.length['min']:g} to {report.length['max']:g}, median {report.length['median']:g}"),
        ("observation", f"{report.obs_dim} features"),
        ("action", report.action),
        ("ends", f"{report.terminated} terminated, {report.truncated} truncated, {report.unfinished} without flag"),
        ("reward", ", ".join(f"{name} {value:.4g}" for name, value in report.reward.items())),
    ]
    _print_table(report.source, rows)
    if report.problems:
        table = Table("what", "how many", "first", "what to do", title="Worth a look", title_justify="left", box=None)
        for problem in report.problems:
            table.add_row(*map(Text, (problem.what, str(problem.count), problem.first, problem.mend)))
        Console().print(table, markup=False)
    else:
        typer.echo("\nNothing odd found.")


@app.command()
def samples(json: Json = False) -> None:
    """List the bundled logs."""
    from valueformer.results import to_json
    from valueformer.sources.samples import manifest

    entries = manifest()["files"]
    if json:
        sys.stdout.write(to_json({"samples": entries}))
        return
    table = Table("name", "transitions", "episodes that reached the goal", box=None)
    for entry in entries:
        table.add_row(
            f"sample:{entry['task']}/{entry['noise']}",
            str(entry["rows"]["rewards"]),
            f"{entry['episodes_saw_reward']} of {entry['episodes']}",
        )
    Console().print(table)
    typer.echo(
        "\nMetaWorld's scripted policies under action noise; try: valueformer evaluate sample:pick-place-v3/low --gamma 0.9"
    )


@bench_app.command("forward")
def bench_forward(
    length: Annotated[int, typer.Option(help="Context length n.", min=2)] = 4096,
    dim: Annotated[int, typer.Option(help="State dimension d.", min=1)] = 39,
    layers: Annotated[int, typer.Option(help="Number of layers L.", min=1)] = 40,
    repeats: Annotated[int, typer.Option(help="Timed repeats; medians are reported.", min=1)] = 3,
    out: Annotated[Path | None, typer.Option(help="File to store the JSON result in.")] = None,
    json: Json = False,
) -> None:
    """Time the cached forward pass against attention recomputed in every layer and against memory bandwidth."""
    from valueformer.bench.forward import run
    from valueformer.files import write_text
    from valueformer.results import to_json

    result = _with_progress("timing", lambda report: run(length, dim, layers, repeats=repeats, progress=report))
    if out is not None:
        try:
            write_text(out, to_json(result))
        except OSError as error:
            raise InputError(f"--out {out}", "a file that can be written to", error.strerror or str(error)) from None
    if json:
        sys.stdout.write(to_json(result))
        return
    flat = [(f"{group}: {name}", f"{v:.4g}" if isinstance(v, float) else str(v)) for group, part in result.items()
            for name, v in part.items()]  # fmt: skip
    _print_table("bench forward", flat)


def main() -> None:
    """Run the command line; bad usage and bad input end in one line and exit code 2."""
    try:
        code = app(standalone_mode=False)
    except _UsageError as error:
        code = _fail(error.format_message())
    except (InputError, MissingExtraError) as error:
        code = _fail(str(error))
    except (typer.Abort, KeyboardInterrupt):
        code = _INTERRUPTED
    if code == _INTERRUPTED:
        sys.stderr.write("interrupted\n")
    sys.exit(code)


def _fail(message: str) -> int:
    sys.stderr.write("error: " + " ".join(message.split()) + "\n")
    return 2


def _layers(text: str) -> Any:
    if text == "auto":
        return text
    if not (text.isascii() and text.isdecimal()):
        raise InputError("--layers", "a whole number >= 1 or 'auto'", repr(text))
    return int(text)


def _step_size(text: str) -> Any:
    if text in ("fast", "safe"):
        return text
    try:
        return float(text)
    except ValueError:
        raise InputError("--step-size", "'fast', 'safe' or a number", repr(text)) from None


def _check_out(folder: Path) -> None:
    """Refuse an unusable folder before the work, without leaving anything behind."""
    where = f"--out {folder}"
    try:
        existing = next(path for path in (folder, *folder.absolute().parents) if path.exists() or path.is_symlink())
        usable = existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)
        taken = [name for name in OUTPUTS if (folder / name).is_dir()]
    except OSError as error:
        raise InputError(where, "a folder", error.strerror or str(error), "choose another") from None
    if not usable:
        raise InputError(where, "a folder that can be written to", f"{existing} is not one", "choose another")
    if taken:
        raise InputError(where, "files of this name or none", f"a folder {taken[0]}", "choose another folder")


def _with_progress(label: str, work: Callable[[Callable[[int, int], None]], Any]) -> Any:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(label, total=None)
        return work(lambda done, total: bar.update(task, completed=done, total=total))


def _print_table(title: str, rows: list[tuple[str, str]]) -> None:
    table = Table(title=Text(title), title_justify="left", show_header=False, box=None, pad_edge=False)
    table.add_column(style="cyan")
    table.add_column(overflow="fold")
    for what, text in rows:
        table.add_row(what, Text(text))
    Console().print(table, markup=False)
