"""A chart as a picture (PNG) and as a self-contained, interactive page (HTML) that works offline."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import altair as alt

from valueformer.files import write_atomically, write_text

__all__ = ["BLUE", "GREY", "ORANGE", "banner", "heading", "number", "write"]

BLUE, ORANGE, GREY = "#2a6fb0", "#e07b39", "#8a8f98"
Rows = Sequence[Sequence[str]]


class _ScriptSafe(json.JSONEncoder):
    """JSON that cannot end the script element around it, whatever a file or an episode is called."""

    def encode(self, o: Any) -> str:
        return super().encode(o).replace("<", "\\u003c")


def write(stem: Path, chart: Any, *, title: str, lead: str, rows: Rows, findings: Rows = ()) -> dict[str, str]:
    """Write ``stem.png`` and ``stem.html``; ``findings``: a second table, its first row the header. Returns their paths."""
    picture, page = stem.with_suffix(".png"), stem.with_suffix(".html")
    write_atomically(picture, lambda path: chart.save(str(path), format="png", ppi=144))
    body = chart.to_html(inline=True, fullhtml=False, json_kwds={"cls": _ScriptSafe})
    write_text(page, _page(title, lead, rows, findings, body))
    return {"picture": str(picture), "page": str(page)}


def heading(text: str) -> alt.TitleParams:
    """Return a panel's title."""
    return alt.TitleParams(text, anchor="start", fontSize=13, fontWeight=600)


def banner(text: str, subtitle: str) -> alt.TitleParams:
    """Return the title of a whole picture."""
    return alt.TitleParams(
        text,
        subtitle=[subtitle],
        anchor="start",
        fontSize=17,
        subtitleFontSize=12,
        subtitleColor="#555",
        offset=12,
    )


def number(value: float | None) -> str:
    """Return four digits, or a dash for what is undefined."""
    return "—" if value is None else f"{value:.4g}"


def _cells(row: Sequence[str], tag: str) -> str:
    return "".join(f"<{tag}>{html.escape(text)}</{tag}>" for text in row)


def _page(title: str, lead: str, rows: Rows, findings: Rows, chart: str) -> str:
    facts = "".join(f"<tr><th>{html.escape(what)}</th><td>{html.escape(text)}</td></tr>" for what, text in rows)
    found = "".join(f"<tr>{_cells(row, 'th' if i == 0 else 'td')}</tr>" for i, row in enumerate(findings))
    title = html.escape(title)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<style>
 body {{ font: 15px/1.45 system-ui, sans-serif; color: #1c2127; max-width: 960px; margin: 2rem auto; padding: 0 1rem; }}
 h1 {{ font-size: 1.35rem; }}
 .lead {{ font-size: 1.1rem; border-left: 4px solid {BLUE}; padding: .4rem .8rem; background: #f3f6fa; }}
 table {{ border-collapse: collapse; margin: 1.2rem 0; }}
 th {{ text-align: left; font-weight: 500; color: #555; padding: .15rem 1.5rem .15rem 0; white-space: pre; }}
 td {{ padding: .15rem 1.5rem .15rem 0; vertical-align: top; }}
</style></head><body>
<h1>{title}</h1>
<p class="lead">{html.escape(lead)}</p>
<table>{facts}</table>
{f"<table>{found}</table>" if found else ""}
<div style="overflow-x: auto">{chart}</div>
</body></html>
"""
