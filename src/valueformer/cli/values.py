"""The command ``evaluate``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from valueformer.cli.shared import Data, Json, Model, check_out, data_options, print_table, with_progress, writing
from valueformer.errors import InputError

__all__ = ["OUTPUTS", "build", "diagnose", "evaluate"]

OUTPUTS = ("values.parquet", "queries.parquet", "result.json", "report.png", "report.html")


@data_options
def evaluate(
    data: Data,
    gamma: Annotated[float, typer.Option(help="Discount per step, in [0, 1].")] = 0.99,
    layers: Annotated[str | None, typer.Option(help="Number of layers (TD steps), or 'auto'.")] = None,
    model: Model = "default",
    mix: Annotated[str | None, typer.Option(help="How heads are mixed: context, equal or first.")] = None,
    kernel: Annotated[
        str | None, typer.Option(help="One kernel instead of a model: rbf, laplace, matern15, rational-quadratic, linear, ..")
    ] = None,
    temperature: Annotated[float | None, typer.Option(help="Its temperature, lengthscale squared, in scaled units.")] = None,
    step_size: Annotated[str | None, typer.Option(help="'fast', 'safe' or a number.")] = None,
    scaler: Annotated[str | None, typer.Option(help="isotropic, standardize or none, for all heads.")] = None,
    level: Annotated[str | None, typer.Option(help="V before the first layer: context, mean or a number.")] = None,
    layout: Annotated[
        str | None, typer.Option(help="fast (solver), or pair, residual, trajectory, two_group (transformer).")
    ] = None,
    algorithm: Annotated[str | None, typer.Option(help="td (layers) or lstd (their limit, in closed form).")] = None,
    ridge: Annotated[float | None, typer.Option(help="Leak of the residual stream, in units of the kernel.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32 or float64.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, ..")] = "auto",
    confidence: Annotated[float, typer.Option(help="Of the initial value's interval, in [0.5, 1).")] = 0.95,
    replicates: Annotated[int, typer.Option(help="Bootstrap replicates behind intervals; 0 for none.")] = 100,
    seed: Annotated[int, typer.Option(help="Seeds the scaler's subsample and the bootstrap.")] = 0,
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

    from valueformer.evaluation import evaluate as run
    from valueformer.report import summary_rows, write_report
    from valueformer.results import to_json

    asked = build(
        model,
        kernel,
        temperature,
        gamma=gamma,
        device=device,
        random_state=seed,
        n_replicates=replicates or None,
        mix=mix,
        num_layers=None if layers is None else _layers(layers),
        step_size=None if step_size is None else _step_size(step_size),
        scaler=scaler,
        initial_level=None if level is None else _level(level),
        algorithm=algorithm,
        ridge=ridge,
        dtype=dtype,
        layout=layout,
    )
    result = with_progress(
        "evaluating",
        lambda report: run(transitions, asked, queries=queries, level=confidence, intervals=replicates > 0, progress=report),
    )
    files: dict[str, str] = {}
    if out is not None:
        files = writing(f"--out {out}", "a folder that can be written to", lambda: result.save(out) | write_report(out))
    document = result.to_dict(files)
    if json:
        sys.stdout.write(to_json(document))
    else:
        rows = summary_rows(document) + [(f"file: {what}", path) for what, path in files.items()]
        if result.queries is not None:
            values, far = result.queries["value"], int(result.queries["far"].sum())
            shown = ", ".join(f"{v:.4g}" for v in values[:5]) + (", .." if len(values) > 5 else "")
            rows.append((f"values at {len(values)} queries", f"{shown} ({far} far from the data)"))
        print_table(document["source"], rows)
        Console().print(f"\n{document['verdict']}", highlight=False, markup=False)
    if result.status in ("diverged", "singular"):
        raise typer.Exit(1)


@data_options
def diagnose(
    data: Data,
    gamma: Annotated[float, typer.Option(help="Discount per step, in [0, 1].")] = 0.99,
    model: Model = "default",
    kernel: Annotated[str | None, typer.Option(help="One kernel instead of a model.")] = None,
    temperature: Annotated[float | None, typer.Option(help="Its temperature, in scaled units.")] = None,
    confidence: Annotated[float, typer.Option(help="Of the intervals, in [0.5, 1).")] = 0.95,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, ..")] = "auto",
    seed: Annotated[int, typer.Option(help="Seeds the scaler's subsample and the bootstrap.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Folder for diagnosis.json, diagnosis.png, diagnosis.html.")] = None,
    json: Json = False,
    *,
    reading: dict[str, Any],
) -> None:
    """Say how far to trust a frozen model on a log, and what another temperature would gain."""
    from valueformer.diagnosis_report import FILES, store, summary_rows, write_report
    from valueformer.sources import load

    if out is not None:
        check_out(out, FILES)
    transitions = load(data, **reading)

    from valueformer.diagnostics import diagnose as run
    from valueformer.results import to_json

    asked = build(model, kernel, temperature, gamma=gamma, device=device, random_state=seed)
    found = with_progress("diagnosing", lambda report: run(transitions, asked, level=confidence, progress=report))
    files: dict[str, str] = {}
    if out is not None:
        files = writing(f"--out {out}", "a folder that can be written to", lambda: store(found, out) | write_report(out))
    document = found.to_dict() | {"files": files}
    if json:
        sys.stdout.write(to_json(document))
        return
    print_table(document["source"], summary_rows(document) + [(f"file: {what}", path) for what, path in files.items()])
    Console().print(f"\n{document['verdict']}", highlight=False, markup=False)


def build(name: str, kernel: str | None, temperature: float | None, **parameters: Any) -> Any:
    """Return the model that the options ask for: a frozen one, or one kernel; options left out (None) keep its own values."""
    from valueformer import kernels
    from valueformer.estimator import ValueFormer

    given = {key: value for key, value in parameters.items() if value is not None}
    if kernel is None and temperature is not None:
        raise InputError("--temperature", "a --kernel, whose temperature it is", "none", "add --kernel rbf")
    if kernel is not None:
        if name != "default":
            raise InputError("--kernel", "no --model beside it", f"--model {name}", "leave one of them out")
        return ValueFormer(kernel=kernels.by_name(kernel, temperature) if temperature is not None else kernel, **given)
    return ValueFormer.from_pretrained(name, **given)


def _level(text: str) -> Any:
    if text in ("context", "mean"):
        return text
    try:
        return float(text)
    except ValueError:
        raise InputError("--level", "'context', 'mean' or a number", repr(text)) from None


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
