"""Evaluate the fifteen bundled logs: the tables of docs/results/foundation.md, and how the default temperature was chosen.

Usage: python tools/sample_table.py [--out docs/results/foundation.json]
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

import valueformer as vf
from valueformer.files import write_text
from valueformer.results import to_json
from valueformer.sources.samples import names

GAMMAS = (0.9, 0.99)
TEMPERATURES = (0.04, 0.09, 0.16, 0.25, 0.36, 0.49, 0.64, 0.81, 1.0, 2.0, 4.0)
DEFAULT = vf.kernels.DEFAULT_TEMPERATURE


def evaluate(name: str, gamma: float, temperature: float) -> dict[str, Any]:
    """Return one row: the held-out numbers of a log at a discount and a temperature."""
    model = vf.ValueFormer(kernel=vf.kernels.RBF(temperature), gamma=gamma)
    result = vf.evaluate(vf.load(f"sample:{name}"), model)
    held = result.heldout
    return {
        "sample": name,
        "gamma": gamma,
        "temperature": temperature,
        "td_ratio": held.td_ratio,
        "td_ratio_constant": held.td_ratio_constant,
        "tdc": held.tdc,
        "explained_variance": held.explained_variance,
        "status": result.status,
        "verdict": result.verdict,
    }


def text(value: float | None) -> str:
    """Return three digits, or a dash for what is undefined."""
    return "-" if value is None else f"{value:.3f}"


def main() -> None:
    """Evaluate every log at every setting, store the rows and print them as Markdown."""
    parser = argparse.ArgumentParser(description="Evaluate the bundled logs and sweep the kernel temperature.")
    parser.add_argument("--out", type=Path, default=Path("docs/results/foundation.json"), help="default: %(default)s")
    out: Path = parser.parse_args().out
    settings = list(itertools.product(names(), GAMMAS, TEMPERATURES))
    rows = [evaluate(*setting) for setting in track(settings, description="Evaluating", console=Console(stderr=True))]
    write_text(out, to_json({"command": "python tools/sample_table.py", "valueformer": vf.__version__, "rows": rows}))

    for gamma in GAMMAS:
        print(f"\ngamma {gamma}, temperature {DEFAULT}\n")
        print("| sample | TD ratio | of the best constant | TDc | explained variance | status | verdict |")
        print("|---|---|---|---|---|---|---|")
        for row in rows:
            if row["gamma"] == gamma and row["temperature"] == DEFAULT:
                numbers = [text(row[k]) for k in ("td_ratio", "td_ratio_constant", "tdc", "explained_variance")]
                print(f"| {row['sample']} | {' | '.join(numbers)} | {row['status']} | {row['verdict'].split(':')[0]} |")
    print("\n| temperature | TD ratio, gamma 0.9 | median explained variance | TD ratio, gamma 0.99 |")
    print("|---|---|---|---|")
    for temperature in TEMPERATURES:
        near, far = ([r for r in rows if r["gamma"] == g and r["temperature"] == temperature] for g in GAMMAS)
        mean = [math.exp(statistics.fmean(math.log(r["td_ratio"]) for r in part)) for part in (near, far)]
        explained = statistics.median(r["explained_variance"] for r in near)
        print(f"| {temperature:g} | {mean[0]:.4f} | {explained:.3f} | {mean[1]:.4f} |")


if __name__ == "__main__":
    main()
