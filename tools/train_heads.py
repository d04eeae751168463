"""Would trained heads be a better default? Train the default model's numbers on some domains, compare on domains neither saw.

    python tools/train_heads.py train OUT                  # 44 logs of 22 domains; checkpoint chosen on 43 logs of 22 others
    python tools/train_heads.py compare OUT/weights --gamma 0.9 --seeds 1 2

Logs are those of ``valueformer bench transfer`` (data seed 0), collected on first use.
"""

from __future__ import annotations

import argparse
import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np

import valueformer as vf
from valueformer.bench.domains import Domain, domains, split
from valueformer.metrics import held_out_metrics
from valueformer.sources.simulated import text
from valueformer.storage import bundled_heads


def log(domain: Domain, seed: int) -> str:
    """Return how ``vf.load`` calls a domain's log."""
    return f"{domain.requested.scheme}:{text(domain.request(seed))}"


def train(out: Path) -> None:
    """Train steps and temperatures of all heads through the gate."""
    own = [d for d in domains("all") if d.chosen_on]
    names = list(dict.fromkeys((d.name, d.policy) for d in own))
    sides = [tuple(log(d, 0) for d in own if names.index((d.name, d.policy)) % 2 == side) for side in (0, 1)]
    config = vf.PretrainConfig(
        tasks=sides[0], validation=sides[1], heads=bundled_heads("default"), step_start=(0.7, 1.3), context_length=300,
        updates=200, validate_every=20, validation_tasks=48, checkpoint_every=20,
    )  # fmt: skip
    result = vf.pretrain(
        config, out, resume=True, progress=lambda done, total, row: print(done, row.get("held_out_tdc"), end="\r")
    )
    print(json.dumps(result["trained"], indent=1))


def compare(weights: Path, gamma: float, seeds: list[int]) -> dict[str, Any]:
    """Return held-out errors over the default's on untouched domains, with intervals over domains."""
    warnings.simplefilter("ignore", vf.DivergenceWarning)
    seen = {(d.name, d.policy) for d in domains("all") if d.chosen_on}
    logs: dict[str, list[float]] = {}
    tdc: list[list[float]] = []
    for domain in domains("all"):
        if (domain.name, domain.policy) in seen:
            continue
        for seed in seeds:
            context, test = split(vf.load(log(domain, seed)))
            found = []
            for name in ("default", weights):
                model = vf.ValueFormer.from_pretrained(name, gamma=gamma).fit(context)
                values, td = model.values_and_td_errors(test)
                found.append(held_out_metrics(test, gamma, values=values, td=td, n_folds=1))
            if found[0].tdc is not None and found[1].tdc is not None:
                ratio = float(np.log(found[1].td_error / found[0].td_error))
                logs.setdefault(f"{domain.name} {domain.policy}", []).append(ratio)
                tdc.append([found[0].tdc, found[1].tdc])
    means = np.array([np.mean(ratios) for ratios in logs.values()])
    draws = np.random.default_rng(0).integers(len(means), size=(4000, len(means)))
    low, high = np.percentile(np.exp(means[draws].mean(1)), [2.5, 97.5])
    table = np.array(tdc)
    return {
        "gamma": gamma,
        "contexts": len(table),
        "domains": len(means),
        "TD error / default's, geometric mean": float(np.exp(means.mean())),
        "95 % interval": [float(low), float(high)],
        "better on": float(np.mean(np.concatenate(list(logs.values())) < 0)),
        "TDc < 1: default, trained": np.mean(table < 1, axis=0).tolist(),
        "median TDc: default, trained": np.median(table, axis=0).tolist(),
    }


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("train").add_argument("out", type=Path)
    other = commands.add_parser("compare")
    other.add_argument("weights", type=Path)
    other.add_argument("--gamma", type=float, default=0.9)
    other.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    options = parser.parse_args()
    if options.command == "train":
        train(options.out)
    else:
        print(json.dumps(compare(options.weights, options.gamma, options.seeds), indent=1))


if __name__ == "__main__":
    main()
