"""Pictures and pages from stored results: reads result.json and values.parquet, never a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import altair as alt
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from valueformer import page
from valueformer.files import write_text
from valueformer.metrics import MAX_REMAINING
from valueformer.page import BLUE, GREY, ORANGE, banner, heading, number
from valueformer.results import read_stored, to_json

__all__ = ["evaluation_chart", "write_report"]

Panel = alt.Chart | alt.LayerChart | alt.FacetChart

_EPISODES = 4
_LINE = 400  # points of a line: about one per pixel
_POINTS = 2000  # of the scatter plot: more only hide each other
_VALUE, _RETURN, _PARTIAL = "V(s), held out", "Monte Carlo return", "return, record cut short"


def write_report(folder: str | Path) -> dict[str, str]:
    """Draw report.png and the self-contained, interactive report.html from the results stored in ``folder``."""
    folder = Path(folder)
    document, columns = read_stored(folder)
    chart = evaluation_chart(document, columns)
    title = f"valueformer: {document['source']}"
    files = page.write(folder / "report", chart, title=title, lead=document["verdict"], rows=summary_rows(document))
    write_text(folder / "result.json", to_json(document | {"files": document["files"] | files}))
    return files


def evaluation_chart(document: dict[str, Any], columns: dict[str, NDArray[Any]]) -> alt.VConcatChart:
    """Return the picture of an evaluation: values along episodes, TD error by layer, values against returns."""
    held_out = bool(np.isfinite(columns["heldout_value"].astype(float)).any())
    value = "heldout_value" if held_out else "value"
    label = _VALUE if held_out else "V(s), fitted"
    episodes = _episode_panels(columns, value, label)
    lower = [_layer_panel(document)]
    if (scatter := _scatter_panel(columns, value, label)) is not None:
        lower.append(scatter)
    title = banner(
        f"Value of the behaviour policy: {document['source']}",
        f"gamma = {document['gamma']:g}, model {document['kernel']}, {document['num_layers']} layers",
    )
    return (
        alt.vconcat(episodes, alt.hconcat(*lower, spacing=120), spacing=28, title=title, padding=14)
        .configure_view(stroke=None)
        .configure_axis(grid=True, gridColor="#eceef1", domainColor="#999", titleFontWeight="normal", labelFontSize=11)
        .configure_header(labelFontSize=12, titleFontSize=12, titleFontWeight="normal")
        .configure_legend(orient="top", labelFontSize=12, symbolStrokeWidth=3, symbolSize=200)
    )


def _episode_panels(columns: dict[str, NDArray[Any]], value: str, label: str) -> alt.FacetChart:
    ids = list(dict.fromkeys(columns["episode_id"].tolist()))
    shown = [ids[i] for i in np.unique(np.linspace(0, len(ids) - 1, min(_EPISODES, len(ids))).round().astype(int))]
    complete = columns["missing_weight"] <= MAX_REMAINING
    rows: dict[str, list[Any]] = {"episode": [], "step": [], "y": [], "what": []}
    for episode in shown:
        mask = np.flatnonzero(columns["episode_id"] == episode)
        mask = mask[np.argsort(columns["step"][mask], kind="stable")]
        if len(mask) > _LINE:
            mask = mask[np.linspace(0, len(mask) - 1, _LINE).round().astype(int)]
        steps = columns["step"][mask].tolist()
        returns, full = columns["monte_carlo_return"][mask], complete[mask]
        # the two parts of the return share one row, so that the line does not break where it changes style
        series = (
            (label, columns[value][mask]),
            (_RETURN, np.where(full, returns, np.nan)),
            (_PARTIAL, np.where(~full | ~np.concatenate([full[1:], [True]]), returns, np.nan)),
        )
        for name, y in series:
            rows["episode"] += [f"episode {episode}"] * len(steps)
            rows["step"] += steps
            rows["y"] += [None if not np.isfinite(v) else float(v) for v in y]
            rows["what"] += [name] * len(steps)
    domain = [label, _RETURN, _PARTIAL]
    picked = alt.selection_point(fields=["what"], bind="legend")  # click on the legend to single a line out
    base = (
        alt.Chart(pa.table(rows))
        .mark_line(strokeWidth=2, clip=True)
        .encode(
            x=alt.X("step:Q", title="step"),
            y=alt.Y("y:Q", title="value, in units of reward", scale=alt.Scale(zero=False)),
            color=alt.Color("what:N", title=None, scale=alt.Scale(domain=domain, range=[BLUE, ORANGE, ORANGE])),
            strokeDash=alt.StrokeDash("what:N", title=None, scale=alt.Scale(domain=domain, range=[[1, 0], [1, 0], [3, 3]])),
            opacity=alt.condition(picked, alt.value(1.0), alt.value(0.12)),
            tooltip=[
                alt.Tooltip("episode:N"),
                alt.Tooltip("what:N", title="line"),
                alt.Tooltip("step:Q"),
                alt.Tooltip("y:Q", title="value", format=".4g"),
            ],
        )
        .properties(width=420, height=170)
        .add_params(picked, alt.selection_interval(bind="scales"))  # drag and scroll to zoom
    )
    order = [f"episode {episode}" for episode in shown]
    title = "Value along episodes that the context left out" if label == _VALUE else "Value along the episode, fitted to it"
    facet = alt.Facet("episode:N", title=None, sort=order, header=alt.Header(labelAnchor="start"))
    return base.facet(facet, columns=2, spacing=24).properties(title=heading(title))


def _layer_panel(document: dict[str, Any]) -> Panel:
    errors = [document["initial_td_error"], *document["context_td_error"]]
    layers = pa.table({"layer": list(range(len(errors))), "error": [max(e, 1e-300) for e in errors]})
    axis = alt.Axis(format="~g", labelOverlap="greedy", titlePadding=14)
    tooltip = [alt.Tooltip("layer:Q"), alt.Tooltip("error:Q", format=".3g")]
    line = (
        alt.Chart(layers)
        .mark_line(color=BLUE, strokeWidth=2, point=alt.OverlayMarkDef(size=18, color=BLUE))
        .encode(
            x=alt.X("layer:Q", title="layer (one TD step each)", axis=alt.Axis(tickMinStep=1)),
            y=alt.Y("error:Q", title="mean squared TD error (log)", scale=alt.Scale(type="log"), axis=axis),
            tooltip=tooltip,
        )
    )
    marks = []
    held = document["heldout"]
    if held["td_error"]:
        reference = {"what": ["held out, last layer"], "error": [held["td_error"]]}
        if held["tdc"]:
            reference["what"].append("best constant")
            reference["error"].append(held["td_error"] / held["tdc"])
        highest = max(reference["error"])
        for what, error in zip(reference["what"], reference["error"], strict=True):
            rule = alt.Chart(pa.table({"what": [what], "error": [error]}))
            marks.append(rule.mark_rule(strokeDash=[5, 4], color=GREY).encode(y="error:Q"))
            above = error == highest  # two labels at one height would cover each other
            text = rule.mark_text(align="left", baseline="bottom" if above else "top", dx=5, color="#555", fontSize=11)
            marks.append(text.encode(y="error:Q", x=alt.value(330), text="what:N"))
    taken_back = f" ({document['rewinds']} steps taken back)" if document["rewinds"] else ""
    title = heading(f"TD error on the context, layer by layer{taken_back}")
    return alt.layer(line, *marks).properties(width=330, height=230, title=title)


def _scatter_panel(
    columns: dict[str, NDArray[Any]], value: str, label: str
) -> alt.Chart | alt.LayerChart | alt.FacetChart | None:
    kept = np.flatnonzero((columns["missing_weight"] <= MAX_REMAINING) & np.isfinite(columns[value].astype(float)))
    if len(kept) < 2:
        return None
    if len(kept) > _POINTS:
        kept = np.sort(np.random.default_rng(0).choice(kept, _POINTS, replace=False))
    returns, values = columns["monte_carlo_return"][kept], columns[value][kept]
    low, high = float(min(returns.min(), values.min())), float(max(returns.max(), values.max()))
    scale = alt.Scale(domain=[low, high], nice=True, zero=False)
    table = {"ret": returns, "val": values, "episode": [str(e) for e in columns["episode_id"][kept].tolist()]}
    points = (
        alt.Chart(pa.table(table))
        .mark_circle(size=16, opacity=0.35, color=BLUE)
        .encode(
            x=alt.X("ret:Q", title=_RETURN, scale=scale, axis=alt.Axis(tickCount=6)),
            y=alt.Y("val:Q", title=label, scale=scale),
            tooltip=[
                "episode:N",
                alt.Tooltip("ret:Q", title=_RETURN, format=".4g"),
                alt.Tooltip("val:Q", title=label, format=".4g"),
            ],
        )
    )
    diagonal = alt.Chart(pa.table({"ret": [low, high], "val": [low, high]})).mark_line(color=GREY, strokeDash=[5, 4])
    both = alt.layer(diagonal.encode(x=alt.X("ret:Q", scale=scale), y=alt.Y("val:Q", scale=scale)), points)
    return both.interactive().properties(width=330, height=230, title=heading("Values against returns (dashed: equal)"))


def summary_rows(document: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the evaluation as (what, number) pairs, for the terminal and the page alike."""
    data, held, initial, level = document["data"], document["heldout"], document["initial_value"], document["level"]
    status = "max_layers (the normal end)" if document["status"] == "max_layers" else document["status"]
    rows = [
        ("what is estimated", document["estimand"]),
        ("log", f"{data['n_transitions']} transitions, {data['n_episodes']} episodes, {data['obs_dim']} features"),
        ("ends", f"{data['terminated']} terminated, {data['truncated']} truncated"),
        ("initial value, mean", _interval(initial)),
        ("mean value / recorded return", f"{number(level['mean_value'])} / {number(level['mean_return'])}"),
        ("TD error, held out / mean r²", number(held["td_ratio"])),
        ("  of the best constant value", number(held["td_ratio_constant"])),
        ("  ours / the constant's (TDc)", number(held["tdc"])),
        ("explained variance of returns", number(held["explained_variance"])),
        ("folds of whole episodes", str(held["n_folds"])),
        ("model", document["kernel"]),
        *(("  " + _head(row), f"{row['weight']:.0%}") for row in document["heads"] if len(document["heads"]) > 2),
        ("layers, status", f"{document['num_layers']}, {status}"),
    ]
    return [*rows, ("note", document["message"])] if document["message"] else rows


def _interval(initial: dict[str, Any]) -> str:
    if initial["lower"] is None:
        return number(initial["mean"])
    return (
        f"{number(initial['mean'])}, {initial['level']:.0%} interval {number(initial['lower'])} to {number(initial['upper'])}"
    )


def _head(row: dict[str, Any]) -> str:
    return row["kernel"] if row["scaler"] is None else f"{row['kernel']}, {row['scaler']}"
