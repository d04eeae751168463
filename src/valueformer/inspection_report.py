"""The picture of a log, from the stored numbers of its inspection: returns, lengths, rewards, range of every feature."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import altair as alt
import numpy as np
import pyarrow as pa

from valueformer import page
from valueformer.files import write_text
from valueformer.inspection import HEADER, facts
from valueformer.page import BLUE, GREY, ORANGE, heading
from valueformer.results import to_json
from valueformer.transitions import Transitions

__all__ = ["FILES", "inspection_chart", "store", "write_report"]

FILES = ("inspection.json", "inspection.png", "inspection.html")

_EPISODES = 2000  # of the scatter plot: more only hide each other
_FEATURES = 60
_ENDS = ("terminated", "truncated", "no end flag")


def store(data: Transitions, folder: Path) -> dict[str, str]:
    """Write inspection.json: the report, and the numbers that its picture shows. Returns its path."""
    report = data.validate()
    episodes = np.arange(data.n_episodes)
    unit = float(np.abs(data.rewards).max()) or 1.0  # sums of huge rewards would overflow
    returns = np.bincount(data.episode_index, weights=data.rewards / unit) * unit
    ends = np.full(data.n_episodes, 2)
    ends[data.episode_index[data.truncated]] = 1
    ends[data.episode_index[data.terminated]] = 0
    shown = episodes if len(episodes) <= _EPISODES else np.linspace(0, len(episodes) - 1, _EPISODES).astype(int)
    lengths = np.bincount(data.episode_index)
    quantiles = np.percentile(data.observations[:, :_FEATURES].astype(np.float64), [0, 5, 50, 95, 100], axis=0)
    names = data.obs_names or [f"obs {i}" for i in range(data.obs_dim)]
    counts, edges = np.histogram(data.rewards.astype(np.float64) / unit, bins=40)
    document = report.to_dict() | {
        "picture": {
            "episodes": {
                "number": shown,
                "return": returns[shown],
                "length": lengths[shown],
                "end": [_ENDS[i] for i in ends[shown]],
            },
            "features": {"name": list(names[:_FEATURES]), "quantiles": quantiles, "of": data.obs_dim},
            "rewards": {"count": counts, "edge": edges * unit},
        }
    }
    write_text(folder / FILES[0], to_json(document))
    return {"report": str(folder / FILES[0])}


def write_report(folder: Path) -> dict[str, str]:
    """Draw inspection.png and inspection.html from the stored inspection.json; returns their paths."""
    document = json.loads((folder / FILES[0]).read_text(encoding="utf-8"))
    problems = document["problems"]
    lead = "Nothing odd found." if not problems else f"{len(problems)} thing{'s' if len(problems) > 1 else ''} worth a look."
    table = [HEADER, *((p["what"], str(p["count"]), p["first"], p["mend"]) for p in problems)] if problems else []
    title = f"valueformer inspect: {document['source']}"
    chart = inspection_chart(document)
    return page.write(folder / "inspection", chart, title=title, lead=lead, rows=facts(document), findings=table)


def inspection_chart(document: dict[str, Any]) -> alt.HConcatChart:
    """Return the picture: returns and lengths of episodes, rewards, and the range of each feature."""
    drawn = document["picture"]
    episodes, rewards, features = drawn["episodes"], drawn["rewards"], drawn["features"]
    ends = {end: hue for end, hue in zip(_ENDS, (BLUE, ORANGE, GREY), strict=True) if end in episodes["end"]}
    scale = alt.Scale(domain=list(ends), range=list(ends.values()))
    legend = alt.Legend(orient="top", title="how it ended", titleFontWeight=400, direction="horizontal")
    table = pa.table({name: episodes[name] for name in ("number", "return", "length", "end")})

    def scatter(field: str, title: str, text: str, legend: alt.Legend | None) -> alt.Chart:
        mark = alt.Chart(table).mark_circle(size=40, opacity=0.75)
        return mark.encode(
            x=alt.X(
                "number:Q", title="episode", scale=alt.Scale(padding=8, nice=False), axis=alt.Axis(tickMinStep=1, tickCount=6)
            ),
            y=alt.Y(f"{field}:Q", title=title, scale=alt.Scale(zero=False, padding=8)),
            color=alt.Color("end:N", scale=scale, legend=legend),
            tooltip=["number:Q", alt.Tooltip("return:Q", format=".4g"), "length:Q", "end:N"],
        ).properties(width=330, height=140, title=heading(text))

    edge = rewards["edge"]
    bars = pa.table({"low": edge[:-1], "high": edge[1:], "count": rewards["count"]})
    histogram = (
        alt.Chart(bars)
        .mark_rect(color=BLUE)
        .encode(
            x=alt.X("low:Q", title="reward", scale=alt.Scale(zero=False)),
            x2="high:Q",
            y=alt.Y("count:Q", title="transitions", scale=alt.Scale(type="symlog", domainMin=0), axis=alt.Axis(tickCount=4)),
            y2=alt.datum(0),
        )
        .properties(width=330, height=120, title=heading("Rewards of all transitions (logarithmic count)"))
    )
    left = alt.vconcat(
        scatter("return", "sum of rewards", "Return of each episode, undiscounted", legend),
        scatter("length", "steps", "Length of each episode", None),
        histogram,
        spacing=22,
    ).resolve_legend(color="independent")
    title = alt.TitleParams(f"Log: {document['source']}", anchor="start", fontSize=16, offset=12)
    joined = alt.hconcat(left, _features(features), spacing=36, title=title)
    return joined.configure_view(stroke=None).configure_axis(grid=True, gridColor="#eceff3", domain=False, tickSize=3)


def _features(features: dict[str, Any]) -> alt.LayerChart | alt.FacetChart:
    """Return a row per feature: all of it (thin), 90 % of it (thick), its median; on a scale that shows small and large."""
    low, lower, middle, upper, high = features["quantiles"]
    names = [name if len(name) <= 28 else f"{name[:13]}…{name[-14:]}" for name in features["name"]]
    spread = float(np.median(np.abs(np.array([lower, upper])))) or 1.0
    table = pa.table({"name": names, "low": low, "lower": lower, "middle": middle, "upper": upper, "high": high})
    more = f" (first {len(names)} of {features['of']})" if features["of"] > len(names) else ""
    base = alt.Chart(table).encode(y=alt.Y("name:N", sort=None, title=None, axis=alt.Axis(grid=False, labelLimit=170)))
    scale = alt.Scale(type="symlog", constant=spread)
    axis = alt.Axis(tickCount=5, labelOverlap="greedy", labelSeparation=8, format=".3~r")
    x = alt.X("low:Q", title="5 % to 95 % (thick), all (thin), median (mark); logarithmic away from 0", scale=scale, axis=axis)
    tooltip = ["name:N", *(alt.Tooltip(f"{k}:Q", format=".4g") for k in ("low", "lower", "middle", "upper", "high"))]
    height = len(names) * min(40, max(13, 460 // len(names)))
    return alt.layer(
        base.mark_rule(color=GREY).encode(x=x, x2="high:Q", tooltip=tooltip),
        base.mark_rule(color=BLUE, strokeWidth=5, opacity=0.7).encode(x=alt.X("lower:Q"), x2="upper:Q", tooltip=tooltip),
        base.mark_tick(color=ORANGE, thickness=2, size=9).encode(x=alt.X("middle:Q")),
    ).properties(width=330, height=height, title=heading(f"Range of each feature{more}"))
