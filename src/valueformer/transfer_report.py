"""The picture of the transfer benchmark: a heat map of held-out TD error and cost per domain and noise."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import altair as alt
import numpy as np
import pyarrow as pa

from valueformer import page
from valueformer.files import write_text
from valueformer.page import banner, heading
from valueformer.results import to_json

Panel = alt.LayerChart | alt.FacetChart

__all__ = ["FILES", "transfer_chart", "write_report"]

FILES = ("transfer.json", "transfer.png", "transfer.html")


def write_report(result: Mapping[str, Any], folder: Path) -> dict[str, str]:
    """Write transfer.json, and draw its heat map for the first model; returns the paths."""
    write_text(folder / FILES[0], to_json(dict(result)))
    name = next(iter(result["summary"]))
    numbers = result["summary"][name]["all"]
    rows = [
        (what, "—" if v is None else f"{v:.3g}" if isinstance(v, float) else str(v))
        for what, v in numbers.items()
        if what != "trust"
    ]
    files = page.write(
        folder / "transfer",
        transfer_chart(result, name),
        title=f"valueformer bench transfer: {name}",
        lead=f"One frozen model, {numbers['contexts']} contexts: cost {numbers['cost (b) median']:.2f} at the median, "
        f"{numbers['cost (b) 90 %']:.2f} at 90 %, against the best of nine temperatures, chosen per context with hindsight.",
        rows=rows,
    )
    return {"result": str(folder / FILES[0])} | files


def transfer_chart(result: Mapping[str, Any], name: str) -> alt.HConcatChart:
    """Return heat maps over domain x noise of medians over data seeds: TDc, cost of sharing, explained variance."""
    cells: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in result["contexts"]:
        gym = row["domain"].rsplit("-v", 1)[1] != "3"
        domain = f"{row['domain']}, {row['policy']}" if gym else row["domain"]
        cells.setdefault((domain, "—" if gym else row["noise"]), []).append(row)
    names = list(dict.fromkeys(domain for domain, _ in cells))
    panels = [
        _panel(cells, names, "TD error / best constant's (TDc)", lambda r: r["models"][name]["tdc"], [0, 0.5, 1, 1.5], True),
        _panel(
            cells,
            names,
            "TD error / best temperature's, equal solver",
            lambda r: None if r["models"][name]["tdc"] is None else r["models"][name]["td_error"] / min(r["equal"]),
            [0.5, 0.85, 1, 1.5],
            False,
        ),
        _panel(
            cells,
            names,
            "explained variance of returns",
            lambda r: r["models"][name]["explained_variance"],
            [1, 0.75, 0.5, 0],
            False,
        ),
    ]
    seeds = len(result["setting"]["seeds"])
    title = banner(
        f"Frozen model '{name}' on every domain, held-out episodes",
        f"gamma = {result['setting']['gamma']:g}, median of {seeds} data seed{'s' if seeds > 1 else ''}; blue is better",
    )
    return (
        alt.hconcat(*panels, spacing=24, title=title, padding=14)
        .resolve_scale(color="independent")
        .configure_view(stroke=None)
        .configure_axis(grid=False, domain=False, ticks=False, labelFontSize=10, titleFontWeight="normal")
    )


def _panel(cells: Any, names: list[str], title: str, read: Any, stops: list[float], labels: bool) -> Panel:
    table: dict[str, list[Any]] = {"domain": [], "noise": [], "value": [], "text": []}
    for (domain, noise), rows in cells.items():
        found = [v for v in map(read, rows) if v is not None]
        value = float(np.median(found)) if found else None
        table["domain"].append(domain)
        table["noise"].append(noise)
        table["value"].append(value)
        table["text"].append("" if value is None else f"{value:.2f}")
    noises = [n for n in ("high", "medium", "low", "—") if n in table["noise"]]
    axis = alt.Axis(labelLimit=260) if labels else None
    base = alt.Chart(pa.table(table)).encode(
        x=alt.X("noise:N", sort=noises, title=None, axis=alt.Axis(labelAngle=0, orient="top")),
        y=alt.Y("domain:N", sort=names, title=None, axis=axis),
    )
    colors = ["#2a6fb0", "#9cc3e4", "#f4f4f2", "#e07b39"]
    fill = alt.Color("value:Q", scale=alt.Scale(domain=stops, range=colors, clamp=True), legend=None)
    cell = base.mark_rect().encode(
        color=fill, tooltip=["domain:N", "noise:N", alt.Tooltip("value:Q", title=title, format=".3f")]
    )
    text = base.mark_text(fontSize=9, color="#222").encode(text="text:N")
    width = 48 * len(noises)
    return alt.layer(cell, text).properties(width=max(width, 150), height=14 * len(names), title=heading(title))
