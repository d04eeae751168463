"""The picture of a diagnosis, from its stored numbers: curves over temperature, with the frozen heads marked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import altair as alt
import pyarrow as pa

from valueformer import page
from valueformer.diagnostics import Diagnosis
from valueformer.files import write_text
from valueformer.page import BLUE, GREY, ORANGE, banner, heading, number
from valueformer.results import to_json

Panel = alt.LayerChart | alt.FacetChart

__all__ = ["FILES", "diagnosis_chart", "store", "summary_rows", "write_report"]

FILES = ("diagnosis.json", "diagnosis.png", "diagnosis.html")
_SINGLE, _MODEL = "one kernel at this lengthscale", "the frozen model"


def store(diagnosis: Diagnosis, folder: Path) -> dict[str, str]:
    """Write diagnosis.json; returns its path."""
    write_text(folder / FILES[0], to_json(diagnosis.to_dict()))
    return {"diagnosis": str(folder / FILES[0])}


def write_report(folder: Path) -> dict[str, str]:
    """Draw diagnosis.png and diagnosis.html from the stored diagnosis.json; returns their paths."""
    document = json.loads((folder / FILES[0]).read_text(encoding="utf-8"))
    title = f"valueformer diagnose: {document['source']}"
    chart = diagnosis_chart(document)
    return page.write(folder / "diagnosis", chart, title=title, lead=document["verdict"], rows=summary_rows(document))


def diagnosis_chart(document: dict[str, Any]) -> alt.VConcatChart:
    """Return the picture: held-out TD error and evidence over lengthscales, and how much each frozen head counts."""
    lengthscales = [t**0.5 for t in document["temperatures"]]
    left_out = _curve(
        lengthscales,
        document["left_out"],
        document["model_left_out"],
        "TD error on episodes left out / best constant's",
        "TD error on episodes left out (lower is better)",
        document["heads"],
        log=True,
    )
    evidence = _curve(
        lengthscales,
        document["evidence"],
        document["model_evidence"],
        "log evidence per transition, nats",
        "Evidence (higher is better)",
        document["heads"],
        log=False,
    )
    title = banner(
        f"What sharing one frozen model costs on {document['source']}",
        f"gamma = {document['gamma']:g}; {document['family']} kernels; lengthscale 1 = {document['typical_distance']:.3g}, "
        f"the typical distance between states; a step moves {document['typical_step']:.2g} of it",
    )
    return (
        alt.vconcat(
            alt.hconcat(left_out, evidence, spacing=60), _weights(document["heads"]), spacing=30, title=title, padding=14
        )
        .configure_view(stroke=None)
        .configure_axis(grid=True, gridColor="#eceef1", domainColor="#999", titleFontWeight="normal", labelFontSize=11)
        .configure_legend(orient="top", labelFontSize=12, symbolSize=160)
    )


def _curve(
    lengthscales: list[float],
    values: list[float | None],
    model: float | None,
    label: str,
    title: str,
    heads: list[dict[str, Any]],
    *,
    log: bool,
) -> Panel:
    kept = [(x, y) for x, y in zip(lengthscales, values, strict=True) if y is not None]
    scale = alt.Scale(type="log", nice=False) if log else alt.Scale(zero=False)
    x_scale = alt.Scale(type="log", domain=[lengthscales[0], lengthscales[-1]], nice=False)
    x = alt.X("x:Q", title="lengthscale, in typical distances", scale=x_scale, axis=alt.Axis(values=_TICKS, format="~g"))
    domain = [_SINGLE, *([] if model is None else [_MODEL])]
    color = alt.Color("what:N", title=None, scale=alt.Scale(domain=domain, range=[BLUE, ORANGE][: len(domain)]))
    table = pa.table({"x": [a for a, _ in kept], "y": [b for _, b in kept], "what": [_SINGLE] * len(kept)})
    tooltip = [alt.Tooltip("x:Q", title="lengthscale", format=".3g"), alt.Tooltip("y:Q", title=label, format=".4g")]
    curve = (
        alt.Chart(table)
        .mark_line(strokeWidth=2, point=alt.OverlayMarkDef(size=30))
        .encode(x=x, y=alt.Y("y:Q", title=label, scale=scale), color=color, tooltip=tooltip)
    )
    layers: list[Any] = []
    marks = [(h, _lengthscale(h["kernel"])) for h in heads]
    marks = [(h, s) for h, s in marks if s is not None and lengthscales[0] <= s <= lengthscales[-1]]
    if marks:
        at = pa.table({"x": [s for _, s in marks], "head": [f"{h['scaler']} {h['kernel']}" for h, _ in marks]})
        layers.append(
            alt.Chart(at)
            .mark_rule(color=GREY, strokeDash=[2, 3])
            .encode(x=x, tooltip=[alt.Tooltip("head:N", title="frozen head")])
        )
        top = alt.Chart(pa.table({"x": [max(s for _, s in marks)]}))
        layers.append(
            top.mark_text(align="left", dx=5, dy=8, color="#666", fontSize=11, text="frozen heads").encode(x=x, y=alt.value(0))
        )
    layers.append(curve)
    if model is not None:
        line = alt.Chart(pa.table({"y": [model], "what": [_MODEL]}))
        layers.append(line.mark_rule(strokeWidth=2).encode(y=alt.Y("y:Q", scale=scale), color=color, tooltip=tooltip[1:]))
    return alt.layer(*layers).properties(width=380, height=250, title=heading(title))


_TICKS = [0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10]


def _lengthscale(kernel: str) -> float | None:
    """Return the lengthscale that a kernel's description names."""
    _, found, rest = kernel.partition("temperature=")
    try:
        return float(rest.split(",")[0].rstrip(")")) ** 0.5 if found else None
    except ValueError:
        return None


def _weights(heads: list[dict[str, Any]]) -> Panel:
    names = [h["kernel"] if h["scaler"] is None else f"{h['kernel']}, {h['scaler']}" for h in heads]
    table = pa.table({"head": names, "weight": [h["weight"] for h in heads]})
    base = alt.Chart(table).encode(y=alt.Y("head:N", title=None, sort=names, axis=alt.Axis(labelLimit=300)))
    bars = base.mark_bar(color=BLUE).encode(
        x=alt.X("weight:Q", title="share of the mixture", axis=alt.Axis(format="%"), scale=alt.Scale(domain=[0, 1]))
    )
    text = base.mark_text(align="left", dx=4, fontSize=11).encode(x="weight:Q", text=alt.Text("weight:Q", format=".0%"))
    return alt.layer(bars, text).properties(width=380, height=22 * len(names), title=heading("How the context mixes the heads"))


def summary_rows(document: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the diagnosis as (what, number) pairs, for the terminal and the page alike."""
    held = document["heldout"]
    best = min((y for y in document["left_out"] if y is not None), default=None)
    compatible = {True: "yes", False: "no", None: "—"}[document["compatible"]]
    return [
        ("TD error left out / constant's, model", number(document["model_left_out"])),
        ("  best single temperature", number(best)),
        ("  ratio (cost of sharing)", _spread(document["left_out_ratio"])),
        ("evidence regret, nats per transition", _spread(document["evidence_regret"])),
        ("compatible (ratio surely < 1.2)", compatible),
        ("TDc over folds", number(held["tdc"])),
        ("explained variance of returns", number(held["explained_variance"])),
        ("states far from all other episodes", "—" if document["far"] is None else f"{document['far']:.1%}"),
        ("typical distance, typical step", f"{number(document['typical_distance'])}, {number(document['typical_step'])} of it"),
    ]


def _spread(found: dict[str, Any]) -> str:
    if found["value"] is None:
        return "—"
    if found["lower"] is None:
        return number(found["value"])
    return f"{number(found['value'])}, {found['level']:.0%} interval {number(found['lower'])} to {number(found['upper'])}"
