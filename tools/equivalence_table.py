"""Measure how closely transformer, solver and oracle agree, over the whole grid: the table of docs/results/foundation.md.

Usage: python tools/equivalence_table.py [--out docs/results/equivalence.json]   (from the repository's root)
"""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import track

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests import test_equivalence as grid

import valueformer as vf
from valueformer.files import write_text
from valueformer.results import to_json

DEPTH = 40


def largest_errors(name: str, ends: str, variant: str, dtype: type) -> dict[str, float]:
    """Return max over layers of max |error| / max |value| against the oracle, for the solver and each layout."""
    kernel, heads, softmax = grid.KERNELS[name]
    ridge = 0.3 if variant in ("ridge", "everything") else 0.0
    discounts, weights = variant in ("discounts", "everything"), variant in ("weights", "everything")
    data, queries = grid.case(7, ends, discounts, weights, dtype)
    steps = [grid.step_for(softmax) * (1.0 + 0.5 * np.sin(layer)) for layer in range(DEPTH)]
    values, _ = grid.expected(data, queries, heads, softmax, steps, ridge)
    settings = {"gamma": grid.GAMMA, "step_size": steps, "num_layers": DEPTH, "ridge": ridge}
    solution = vf.solve(kernel, data, queries, record=True, **settings)
    assert solution.trace is not None
    errors = {"solver": grid.error(solution.trace, values)}
    for layout in grid.LAYOUTS:
        prompt = vf.Prompt.from_transitions(data, queries, layout=layout)
        errors[layout] = grid.error(vf.construct(kernel, layout=layout, **settings)(prompt).trace, values)
    return errors


def main() -> None:
    """Run the grid, store the largest error per kernel, path and dtype, and print it as Markdown."""
    parser = argparse.ArgumentParser(description="Largest relative error against the oracle over the equivalence grid.")
    parser.add_argument("--out", type=Path, default=Path("docs/results/equivalence.json"), help="default: %(default)s")
    out: Path = parser.parse_args().out
    worst: dict[str, dict[str, dict[str, float]]] = {}
    cells = list(itertools.product((np.float64, np.float32), grid.KERNELS, grid.GRID))
    for dtype, name, (ends, variant) in track(cells, description="Comparing", console=Console(stderr=True)):
        row = worst.setdefault(dtype.__name__, {}).setdefault(name, {})
        for path, error in largest_errors(name, ends, variant, dtype).items():
            row[path] = max(row.get(path, 0.0), error)
    write_text(out, to_json({"command": "python tools/equivalence_table.py", "depth": DEPTH, "largest": worst}))
    for dtype, rows in worst.items():
        print(f"\n{dtype}\n\n| kernel | solver | {' | '.join(grid.LAYOUTS)} |\n|---|---|---|---|---|---|")
        for name, row in rows.items():
            print(f"| {name} | {' | '.join(f'{error:.1e}' for error in row.values())} |")


if __name__ == "__main__":
    main()
