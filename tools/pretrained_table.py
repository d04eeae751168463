"""Weights trained on one domain, on the 15 logs in the package: docs/results/pretraining.md's table.

    python tools/pretrained_table.py --runs fast=RUN,RUN,.. --runs plain=RUN,.. --out docs/results/pretrained.json

RUN: folders of ``valueformer pretrain``. Every run is evaluated by 10-fold cross-validation over episodes (gamma 0.9); family
"fast" with its guard and without. Run "untrained" is the model that these started from, all steps one.
"""

from __future__ import annotations

import argparse
import json
import warnings
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

GAMMA = 0.9
TASKS = ("pick-place-v3", "pick-place-wall-v3", "shelf-place-v3", "plate-slide-v3", "button-press-v3")
SAMPLES = [f"{task}/{noise}" for task in TASKS for noise in ("high", "medium", "low")]


def one(job: tuple[str, str, bool | str, str]) -> dict[str, Any]:
    """Evaluate one model on one log."""
    import torch

    import valueformer as vf
    from valueformer.evaluation import evaluate

    torch.set_num_threads(1)
    family, run, guard, sample = job
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", vf.DivergenceWarning)
        if run == "untrained":
            model = vf.ValueFormer(kernel=vf.kernels.RBF(0.64), gamma=GAMMA, guard=guard)
        else:
            model = vf.ValueFormer.from_pretrained(Path(run) / "weights", gamma=GAMMA, guard=guard)
        result = evaluate(vf.load(f"sample:{sample}"), model, intervals=False)
    held = result.heldout
    return {
        "family": family, "run": Path(run).name, "guard": guard is not False, "sample": sample, "status": result.status,
        "td_ratio": held.td_ratio, "td_ratio_constant": held.td_ratio_constant, "tdc": held.tdc,
        "explained_variance": held.explained_variance,
        "layers": len(result.model.td_error_),
    }  # fmt: skip


def main() -> None:
    """Evaluate all runs, and print each family's table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", action="append", required=True, help="NAME=FOLDER,FOLDER,..")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    jobs: list[tuple[str, str, bool | str, str]] = []
    for text in options.runs:
        family, _, folders = text.partition("=")
        guards: tuple[bool | str, ...] = ("auto", False) if family in ("fast", "untrained") else (False,)
        jobs += [(family, run, guard, s) for run in folders.split(",") for guard in guards for s in SAMPLES]
    with ProcessPoolExecutor(options.workers, mp_context=get_context("spawn")) as pool:
        rows = list(pool.map(one, jobs, chunksize=5))
    options.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    for family, guard in dict.fromkeys((r["family"], r["guard"]) for r in rows):
        own = [r for r in rows if (r["family"], r["guard"]) == (family, guard)]
        diverged = sum(r["status"] == "diverged" for r in own)
        print(f"{family}, {'guarded' if guard else 'unguarded'}: {diverged} of {len(own)} diverged")
        for sample in SAMPLES:
            found = [r for r in own if r["sample"] == sample]
            ratio, tdc = (np.array([r[name] for r in found], dtype=float) for name in ("td_ratio", "tdc"))
            print(f"  {sample:28s} ratio {np.median(ratio):.3g} [{ratio.min():.3g}, {ratio.max():.3g}]", end=" ")
            print(f"constant {found[0]['td_ratio_constant']:.3f} TDc {np.median(tdc):.3g} [{tdc.min():.3g}, {tdc.max():.3g}]")


if __name__ == "__main__":
    main()
