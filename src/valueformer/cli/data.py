"""Commands about logs: ``inspect``, ``collect``, ``convert``, ``samples``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from valueformer.cli.shared import Data, Json, check_out, data_options, findings, print_table, shown, with_progress, writing
from valueformer.errors import InputError

__all__ = ["collect", "convert", "inspect", "samples"]


@data_options
def inspect(
    data: Data,
    out: Annotated[Path | None, typer.Option(help="Folder for inspection.json, .png and .html.")] = None,
    json: Json = False,
    *,
    reading: dict[str, Any],
) -> None:
    """Say what a log contains and what is odd about it."""
    from valueformer.results import to_json
    from valueformer.sources import load

    if out is not None:
        check_out(out, ("inspection.json", "inspection.png", "inspection.html"))
    transitions = load(data, **reading)
    report = transitions.validate()
    files: dict[str, str] = {}
    if out is not None:
        from valueformer.inspection_report import store, write_report

        files = writing(f"--out {out}", "a folder that can be written to", lambda: store(transitions, out) | write_report(out))
    if json:
        sys.stdout.write(to_json(report.to_dict()))
        return
    findings(report)
    if files:
        print_table("", [(f"file: {what}", path) for what, path in files.items()])


def collect(
    simulator: Annotated[str, typer.Argument(help="gymnasium:ENV_ID or metaworld:TASK.", metavar="SIMULATOR")],
    out: Annotated[Path, typer.Option(help="New folder: a Minari dataset in HDF5.")],
    episodes: Annotated[int, typer.Option(help="Number of episodes in all.")] = 10,
    policy: Annotated[
        str | None, typer.Option(help="random, scripted (MetaWorld), or module:function of (observation[, generator]).")
    ] = None,
    noise: Annotated[
        str, typer.Option(help="Action noise: high (1), medium (0.5), low (0.1) or a number; unit: half range.")
    ] = "0",
    goals: Annotated[int, typer.Option(help="Number of goals, played in turn (MetaWorld).")] = 1,
    seed: Annotated[int, typer.Option(help="Seeds starts, goals and noise.")] = 0,
    max_steps: Annotated[int | None, typer.Option(help="Truncate episodes after so many steps.")] = None,
    workers: Annotated[int, typer.Option(help="Processes; the result does not depend on them.")] = 1,
    json: Json = False,
) -> None:
    """Collect episodes from a simulator; run the same command again to go on after an interruption."""
    from valueformer.collection import Request, run
    from valueformer.results import to_json
    from valueformer.sources import load

    scheme, _, name = simulator.partition(":")
    options: dict[str, Any] = {"policy": policy, "noise": noise, "goals": goals, "seed": seed, "max_steps": max_steps}
    request = Request(scheme=scheme, name=name, episodes=episodes, **options)
    try:
        writing(
            f"--out {out}",
            "a folder that can be written to",
            lambda: with_progress("collecting", lambda report: run(request, out, workers=workers, progress=report)),
        )
    except KeyboardInterrupt:
        sys.stderr.write("finished episodes are kept; the same command goes on from there\n")
        raise
    report = load(out).validate()
    if json:
        sys.stdout.write(to_json(report.to_dict()))
    else:
        findings(report)


@data_options
def convert(
    data: Data,
    to: Annotated[str, typer.Option(help="npz, parquet or minari.")],
    out: Annotated[Path, typer.Option(help="File (npz, parquet) or new folder (minari) to write.")],
    json: Json = False,
    *,
    reading: dict[str, Any],
) -> None:
    """Write a log in another format, equal row by row."""
    from valueformer.results import to_json
    from valueformer.sources import load
    from valueformer.writers import FORMATS, export

    if to not in FORMATS:
        raise InputError("--to", f"one of {', '.join(FORMATS)}", repr(to))
    if to != "minari":
        check_out(out.absolute().parent, ())
        if writing(f"--out {out}", "a file", lambda: out.exists() or out.is_symlink()):
            what = "a folder" if out.is_dir() else "something that exists"
            raise InputError(f"--out {out}", "a new file", what, "choose another name, or remove it")
    transitions = load(data, **reading)
    writing(f"--out {out}", "a path that can be written to", lambda: export(transitions, to, out))
    document = {"source": transitions.source, "format": to, "out": shown(out), "n_transitions": len(transitions)}
    document |= {"dropped": dict(transitions.dropped), "assumed": dict(transitions.assumed), "unused": list(transitions.unused)}
    if json:
        sys.stdout.write(to_json(document))
        return
    typer.echo(f"{len(transitions)} transitions in {transitions.n_episodes} episodes written to {shown(out)}")
    for what, counts in (("dropped", transitions.dropped), ("assumed", transitions.assumed)):
        for reason, count in counts.items():
            typer.echo(f"{what}: {reason} ({count})")
    if transitions.unused:
        typer.echo(f"columns not used: {', '.join(transitions.unused)}")


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


def weights(json: Json = False) -> None:
    """List the frozen models in the package, and their heads."""
    from valueformer.results import to_json
    from valueformer.storage import WEIGHTS, bundled, bundled_heads, is_trained

    models = {name: [f"{head.kernel}, {head.scaler}" for head in bundled_heads(name)] for name in bundled()}
    if json:
        sys.stdout.write(to_json({"weights": models, "folder": str(WEIGHTS)}))
        return
    table = Table("name", "heads, beside a constant", "trained", box=None)
    for name, heads in models.items():
        table.add_row(name, Text("\n".join(heads)), "steps, temperature" if is_trained(name) else "nothing")
    Console().print(table)
    typer.echo(f"\nThe model card lies beside them: {WEIGHTS / 'README.md'}")
