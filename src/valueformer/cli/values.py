"""The command ``evaluate``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from valueformer.cli.shared import Data, Json, check_out, data_options, print_table, with_progress, writing
from valueformer.errors import InputError

__all__ = ["OUTPUTS", "evaluate"]

OUTPUTS = ("values.parquet", "queries.parquet", "result.json", "report.png", "report.html")


@data_options
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
    *,
    reading: dict[str, Any],
) -> None:
    """Estimate V(s) of the policy that made a log, and test it on episodes left out."""
    from valueformer.sources import load, load_observations

    if out is not None:
        check_out(out, OUTPUTS)
    transitions = load(data, **reading)  # before torch is imported: what cannot be read is said at once
    queries = None if query is None else load_observations(query, transitions.obs_names)

    from valueformer import kernels
    from valueformer.estimator import ValueFormer
    from valueformer.evaluation import evaluate as run
    from valueformer.report import summary_rows, write_report
    from valueformer.results import to_json

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
    result = with_progress("evaluating", lambda report: run(transitions, model, queries=queries, progress=report))
    files: dict[str, str] = {}
    if out is not None:
        files = writing(f"--out {out}", "a folder that can be written to", lambda: result.save(out) | write_report(out))
    document = result.to_dict(files)
    if json:
        sys.stdout.write(to_json(document))
    else:
        rows = summary_rows(document) + [(f"file: {what}", path) for what, path in files.items()]
        if result.queries is not None:
            shown = ", ".join(f"{v:.4g}" for v in result.queries[:5]) + (", .." if len(result.queries) > 5 else "")
            rows.append((f"values at {len(result.queries)} queries", shown))
        print_table(document["source"], rows)
        Console().print(f"\n{document['verdict']}", highlight=False, markup=False)
    if result.status in ("diverged", "singular"):
        raise typer.Exit(1)


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
