"""How often does the 95 % interval of the initial value hold the truth? On three systems whose value is known, at n and at 8 n.

Usage: python tools/coverage.py [--model default] [--logs 300 100] [--out docs/results/coverage.json]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from rich.progress import track

import valueformer as vf
from valueformer.files import write_text
from valueformer.intervals import initial_value
from valueformer.mrp import LinearQuadratic, boyan_chain, loop, sample
from valueformer.results import to_json

GAMMA, LEVEL, STEPS = 0.9, 0.95, 10  # 35 % of the value of the last state is not recorded: the model has to stand in
SYSTEMS = {
    "Boyan chain": boyan_chain(0),
    "walk on a circle": loop(),
    "linear-quadratic": LinearQuadratic(np.array([[0.9, 0.2], [-0.2, 0.8]]), np.eye(2), 0.3, 1.0),
}


def main() -> None:
    """Run all systems and store the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="default")
    parser.add_argument("--logs", type=int, nargs=2, default=[300, 100], help="at n and at 8 n")
    parser.add_argument("--replicates", type=int, default=50)
    parser.add_argument("--out", type=Path, default=Path("docs/results/coverage.json"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name, process in SYSTEMS.items():
        truth = process.initial_value(GAMMA)
        for episodes, logs in zip((20, 160), arguments.logs, strict=True):
            hits, widths, errors = 0, [], []
            for seed in track(range(logs), description=f"{name}, {episodes} episodes"):
                data = sample(process, episodes, STEPS, seed)
                model = vf.ValueFormer(kernel=arguments.model, gamma=GAMMA, n_replicates=arguments.replicates).fit(data)
                found = initial_value(model, data, LEVEL)
                hits += found["lower"] <= truth <= found["upper"]
                widths.append(found["upper"] - found["lower"])
                errors.append(found["mean"] - truth)
            rows.append(
                {
                    "system": name,
                    "episodes": episodes,
                    "transitions": int(np.round(len(data))),
                    "logs": logs,
                    "truth": truth,
                    "coverage": hits / logs,
                    "mean width": float(np.mean(widths)),
                    "bias": float(np.mean(errors)),
                    "standard deviation": float(np.std(errors)),
                }
            )
            print(rows[-1], flush=True)
            setting = {
                "gamma": GAMMA,
                "level": LEVEL,
                "steps": STEPS,
                "model": arguments.model,
                "replicates": arguments.replicates,
            }
            write_text(arguments.out, to_json({"setting": setting, "rows": rows}))


if __name__ == "__main__":
    main()
