"""Commands ``bench ..``: ratios measured in one run on this machine."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from valueformer.cli.shared import Json, check_out, print_table, with_progress, writing
from valueformer.errors import InputError

__all__ = ["app"]

GROUPS = ("five", "metaworld", "gymnasium", "all")

app = typer.Typer(help="Ratios measured in one run on this machine.", rich_markup_mode=None)


@app.command("forward")
def forward(
    length: Annotated[int, typer.Option(help="Context length n.", min=2)] = 4096,
    dim: Annotated[int, typer.Option(help="State dimension d.", min=1)] = 39,
    layers: Annotated[int, typer.Option(help="Number of layers L.", min=1)] = 40,
    repeats: Annotated[int, typer.Option(help="Timed repeats; medians are reported.", min=1)] = 3,
    out: Annotated[Path | None, typer.Option(help="File to store the JSON result in.")] = None,
    json: Json = False,
) -> None:
    """Time the cached forward pass against attention recomputed in every layer and against memory bandwidth."""
    from valueformer.bench.forward import run

    result = with_progress("timing", lambda report: run(length, dim, layers, repeats=repeats, progress=report))
    _finish("bench forward", result, out, json)


@app.command("load")
def load(
    rows: Annotated[int, typer.Option(help="Rows of the table.", min=1000)] = 2_000_000,
    columns: Annotated[int, typer.Option(help="Columns of the table, flags and reward included.", min=6)] = 39,
    block_size: Annotated[int, typer.Option(help="Rows per block.", min=1)] = 32_768,
    repeats: Annotated[int, typer.Option(help="Timed repeats; medians are reported.", min=1)] = 3,
    out: Annotated[Path | None, typer.Option(help="File to store the JSON result in.")] = None,
    json: Json = False,
) -> None:
    """Stream a Parquet table into aligned Transitions, against pyarrow's own read of it; time and peak memory."""
    from valueformer.bench.load import run

    result = with_progress("timing", lambda report: run(rows, columns, block_size, repeats=repeats, progress=report))
    _finish("bench load", result, out, json)


@app.command("pretrain")
def pretrain(
    models: Annotated[int, typer.Option(help="Seeds trained side by side.", min=1)] = 30,
    chains: Annotated[int, typer.Option(help="Timed chains per seed, five updates each.", min=2)] = 60,
    out: Annotated[Path | None, typer.Option(help="File to store the JSON result in.")] = None,
    json: Json = False,
) -> None:
    """Pretrain linear attention on Boyan chains (Wang et al.), against one prompt at a time; chains per second."""
    from valueformer.bench.pretrain import run

    result = with_progress("timing", lambda report: run(models, chains, progress=report))
    _finish("bench pretrain", result, out, json)


@app.command("transfer")
def transfer(
    domains: Annotated[str, typer.Option(help="five, metaworld, gymnasium or all.")] = "five",
    weights: Annotated[list[str] | None, typer.Option(help="A frozen model: default, fast, or a folder; repeatable.")] = None,
    seeds: Annotated[int, typer.Option(help="Data seeds per domain.", min=1)] = 3,
    gamma: Annotated[float, typer.Option(help="Discount per step, in [0, 1].")] = 0.9,
    unguarded: Annotated[bool, typer.Option("--unguarded", help="Each model also without its guard.")] = False,
    verdicts: Annotated[bool, typer.Option(help="Cross-validate inside each context for the verdict: ten fits more.")] = True,
    store: Annotated[
        Path | None, typer.Option(help="File of finished contexts, from which an interrupted run goes on.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for transfer.json, transfer.png, transfer.html.")] = None,
    json: Json = False,
) -> None:
    """Evaluate frozen models on many domains against kernels chosen for each with hindsight; collects what is missing."""
    from valueformer.bench.transfer import run
    from valueformer.results import to_json
    from valueformer.transfer_report import FILES, write_report

    if domains not in GROUPS:
        raise InputError("--domains", ", ".join(GROUPS), repr(domains))
    if out is not None:
        check_out(out, FILES)
    names = weights or ["default", "fast"]
    result = with_progress(
        "evaluating",
        lambda report: run(
            domains,
            names,
            seeds=range(seeds),
            gamma=gamma,
            unguarded=unguarded,
            verdicts=verdicts,
            store=store,
            progress=report,
        ),
    )
    files = {} if out is None else writing(f"--out {out}", "a folder that can be written to", lambda: write_report(result, out))
    if json:
        sys.stdout.write(to_json(result | {"files": files}))
        return
    for name in result["summary"]:
        for part, numbers in result["summary"][name].items():
            flat = [(what, _shown(value)) for what, value in numbers.items() if what != "trust"]
            flat += [
                (f"called {level}", ", ".join(f"{w} {_shown(x)}" for w, x in t.items()))
                for level, t in numbers["trust"].items()
            ]
            print_table(f"{name}: {part}", flat)
    print_table("", [(f"file: {what}", path) for what, path in files.items()])


def _shown(value: Any) -> str:
    return "—" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)


def _finish(title: str, result: dict[str, Any], out: Path | None, json: bool) -> None:
    from valueformer.files import write_text
    from valueformer.results import to_json

    if out is not None:
        writing(f"--out {out}", "a file that can be written to", lambda: write_text(out, to_json(result)))
    if json:
        sys.stdout.write(to_json(result))
        return
    flat = [
        (f"{group}: {name}", f"{value:.4g}" if isinstance(value, float) else str(value))
        for group, part in result.items()
        for name, value in part.items()
    ]
    print_table(title, flat)
