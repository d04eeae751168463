"""The picture of a pretraining run, redrawn from its stored result."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import altair as alt
import numpy as np
import pyarrow as pa

from valueformer import page
from valueformer.errors import InputError
from valueformer.page import BLUE, GREY, ORANGE, banner, heading, number

__all__ = ["pretrain_chart", "summary_rows", "write_report"]

_WIDTH, _HEIGHT = 330, 210
_COLORS = [BLUE, ORANGE, GREY, "#4c9f70", "#9c6ade", "#c4a000"]
_SIMILARITIES = {"implicit_weight_similarity": "implicit weights", "sensitivity_similarity": "sensitivity"}


def write_report(folder: Path) -> dict[str, str]:
    """Draw pretrain.png and pretrain.html from result.json in a folder; returns the paths. Raises InputError."""
    try:
        result = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(str(folder), "the result.json of a finished run", str(error).splitlines()[0]) from None
    return page.write(
        folder / "pretrain",
        pretrain_chart(result),
        title="valueformer pretrain",
        lead=_lead(result),
        rows=summary_rows(result),
    )


def _lead(result: Mapping[str, Any]) -> str:
    found = result.get("similarities")
    if found:
        one = found["implicit_weight_similarity"]
        return (
            f"After {result['updates']} updates the trained transformer's implicit weights and TD's have cosine {_with(one)}."
        )
    last = result["history"][-1]["held_out_tdc"] if result["history"] else None
    return f"{result['updates']} updates; held-out TD error is {number(last)} of the best constant's on validation tasks."


def _with(interval: Mapping[str, Any]) -> str:
    if interval["lower"] is None:
        return number(interval["mean"])
    return f"{number(interval['mean'])} [{number(interval['lower'])}, {number(interval['upper'])}]"


def summary_rows(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return what to know about a run, as names and texts."""
    config, history = result["config"], result["history"]
    rows = [
        ("tasks", _listed(config["tasks"])),
        ("validation", _listed(config["validation"]) or "fresh training tasks"),
        ("updates", f"{result['updates']} of {config['updates']} ({result['stopped']}), {sum(result['skipped'])} skipped"),
        ("weights from update", str(result["chosen_step"])),
        ("seconds", f"{result['seconds']:.0f}"),
        ("tasks per second", number(result["tasks_per_second"])),
    ]
    if history:
        chosen = next(row for row in reversed(history) if row["step"] <= result["chosen_step"])
        rows += [("loss, first and last", f"{number(history[0]['loss'])}, {number(history[-1]['loss'])}")]
        rows += [("held-out TDc", number(chosen["held_out_tdc"]))]
    for name, interval in result.get("similarities", {}).items():
        rows.append((name.replace("_", " "), f"{_with(interval)}, {interval['models']} models"))
    trained = result["trained"]
    if "steps" in trained:
        steps = np.array(trained["steps"])
        rows.append((f"steps ({trained['step_unit']})", f"{steps.min():.3g} to {steps.max():.3g}"))
        rows.append(("heads", "; ".join(map(_short, trained["heads"]))))
    return rows


def _listed(tasks: list[str]) -> str:
    return ", ".join(tasks[:4]) + (f" and {len(tasks) - 4} more" if len(tasks) > 4 else "")


def pretrain_chart(result: Mapping[str, Any]) -> Any:
    """Return loss and validation over updates, and what was learned: steps per layer, or the matrices P and Q."""
    panels = [_curves(result), _similarities(result) if "similarities" in result else _steps(result)]
    rows: list[Any] = [alt.hconcat(*panels, spacing=40).resolve_scale(color="independent", strokeDash="independent")]
    if "P" in result["trained"]:
        rows.append(_matrix_panels(result))
    config = result["config"]
    what = f"{config['models']} models" if config["model"] == "matrices" else f"{config['num_layers']} layers"
    tasks = ", ".join(config["tasks"]) if len(config["tasks"]) < 3 else f"{len(config['tasks'])} task specifications"
    title = banner("Pretraining by multi-task TD", f"{tasks}; gamma = {config['gamma']:g}, {what}")
    return (
        alt.vconcat(*rows, spacing=28, title=title, padding=14).resolve_scale(color="independent").configure_view(stroke=None)
    )


def _curves(result: Mapping[str, Any]) -> Any:
    table: dict[str, list[Any]] = {"update": [], "value": [], "what": []}
    for row in result["history"]:
        for name, text in (("loss", "training loss"), ("held_out_tdc", "held-out TDc")):
            table["update"].append(row["step"])
            table["value"].append(row[name])
            table["what"].append(text)
    base = alt.Chart(pa.table(table)).encode(
        x=alt.X("update:Q", title="update"),
        y=alt.Y("value:Q", title="squared TD error, relative" if result["config"]["normalise"] else "squared TD error"),
        color=alt.Color(
            "what:N",
            scale=alt.Scale(domain=["training loss", "held-out TDc"], range=[GREY, BLUE]),
            legend=alt.Legend(title=None, orient="top"),
        ),
        tooltip=["update:Q", "what:N", alt.Tooltip("value:Q", format=".4f")],
    )
    chosen = alt.Chart(pa.table({"update": [result["chosen_step"]]})).mark_rule(strokeDash=[4, 3], color=ORANGE)
    layers = alt.layer(base.mark_line(strokeWidth=2), chosen.encode(x="update:Q"))
    return layers.properties(width=_WIDTH, height=_HEIGHT, title=heading("Loss, and what validation chose (dashed)"))


def _similarities(result: Mapping[str, Any]) -> Any:
    table: dict[str, list[Any]] = {"update": [], "mean": [], "low": [], "high": [], "what": []}
    for row in result["history"]:
        for name, text in _SIMILARITIES.items():
            values = np.array(row[name])
            table["update"].append(row["step"])
            table["mean"].append(float(values.mean()))
            table["low"].append(float(np.percentile(values, 10)))
            table["high"].append(float(np.percentile(values, 90)))
            table["what"].append(text)
    color = alt.Color(
        "what:N",
        scale=alt.Scale(domain=list(_SIMILARITIES.values()), range=[BLUE, ORANGE]),
        legend=alt.Legend(title=None, orient="top"),
    )
    scale = alt.Scale(domain=[min(0.0, *table["low"]), 1.0])
    base = alt.Chart(pa.table(table)).encode(x=alt.X("update:Q", title="update"), color=color)
    band = base.mark_area(opacity=0.15).encode(y=alt.Y("low:Q", scale=scale, title="cosine"), y2="high:Q")
    line = base.mark_line(strokeWidth=2).encode(
        y=alt.Y("mean:Q", scale=scale), strokeDash=alt.StrokeDash("what:N", legend=None)
    )
    level = alt.Chart(pa.table({"y": [0.95]})).mark_rule(color=GREY, strokeDash=[2, 2]).encode(y=alt.Y("y:Q", scale=scale))
    title = heading("Likeness to TD: mean, 10 to 90 % of models; .95 dotted")
    return alt.layer(level, band, line).properties(width=_WIDTH, height=_HEIGHT, title=title)


def _steps(result: Mapping[str, Any]) -> Any:
    trained = result["trained"]
    if "steps" not in trained:
        return alt.layer().properties(width=_WIDTH, height=_HEIGHT)
    steps = np.array(trained["steps"])  # (L, h)
    table = {
        "layer": np.repeat(np.arange(1, len(steps) + 1), steps.shape[1]),
        "step": steps.ravel(),
        "head": [f"{i + 1} {_short(trained['heads'][i])}" for _ in steps for i in range(steps.shape[1])],
    }
    unit = {"plain": "step size", "safe": "step / safe step", "fast": "step / fast step"}[trained["step_unit"]]
    legend = alt.Legend(title=None, orient="bottom", columns=1, labelLimit=320)
    color: Any = alt.value(BLUE)
    if steps.shape[1] > 1:
        names = list(dict.fromkeys(table["head"]))
        color = alt.Color("head:N", legend=legend, scale=alt.Scale(domain=names, range=_COLORS))
    chart = alt.Chart(pa.table(table)).encode(
        x=alt.X("layer:Q", title="layer"),
        y=alt.Y("step:Q", title=unit),
        color=color,
        tooltip=["layer:Q", alt.Tooltip("step:Q", format=".3f"), "head:N"],
    )
    points = alt.layer(chart.mark_line(opacity=0.5), chart.mark_point(filled=True, size=28))
    return points.properties(width=_WIDTH, height=_HEIGHT, title=heading("Learned step of each layer"))


def _short(head: str) -> str:
    """Return a head's name with three digits of its temperature."""
    return re.sub(r"\d+\.\d+", lambda match: f"{float(match[0]):.3g}", head)


def _matrix_panels(result: Mapping[str, Any]) -> Any:
    """Return heat maps of P and Q, averaged over models, each over its largest entry: where TD puts its ones and minus ones."""
    rows = []
    for name in ("P", "Q"):
        panels = []
        sets = np.array(result["trained"][name])  # (sets, c, c)
        for i, matrix in enumerate(sets):
            width = len(matrix)
            d = (width - 1) // 2
            labels = [f"s{k + 1}" for k in range(d)] + [f"s'{k + 1}" for k in range(d)] + ["r"]
            table = {
                "row": [label for label in labels for _ in labels],
                "column": labels * width,
                "value": (matrix / np.abs(matrix).max()).ravel(),
            }
            base = alt.Chart(pa.table(table)).encode(
                x=alt.X("column:N", sort=labels, title=None, axis=alt.Axis(orient="top", labelAngle=0)),
                y=alt.Y("row:N", sort=labels, title=None),
            )
            color = alt.Color(
                "value:Q", scale=alt.Scale(domain=[-1, 0, 1], range=[ORANGE, "#f4f4f2", BLUE], interpolate="rgb"), legend=None
            )
            cells = base.mark_rect().encode(color=color, tooltip=["row:N", "column:N", alt.Tooltip("value:Q", format=".2f")])
            text = base.mark_text(fontSize=9).encode(text=alt.Text("value:Q", format=".1f"))
            layer = "" if len(sets) == 1 else f", layer {i + 1}"
            side = 25 * width
            panels.append(
                alt.layer(cells, text).properties(
                    width=side, height=side, title=heading(f"{name}{layer}, of its largest entry")
                )
            )
        rows.append(alt.hconcat(*panels, spacing=40))
    return alt.hconcat(*rows, spacing=40) if len(result["trained"]["P"]) == 1 else alt.vconcat(*rows, spacing=20)
