"""Which heads, and how to mix them? The comparison behind the frozen model, on the domains it was chosen on and no others.

Usage: python tools/choose_heads.py [--out docs/results/choose_heads.json]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.progress import track

import valueformer as vf
from valueformer.bench.domains import domains, split
from valueformer.bench.transfer import best_single
from valueformer.diagnostics import evidence
from valueformer.files import write_text
from valueformer.kernels import RBF, Laplace
from valueformer.metrics import held_out_metrics
from valueformer.mixing import gate
from valueformer.results import to_json
from valueformer.solvers import distinct_states
from valueformer.sources.simulated import text

GAMMA = 0.9
BOTH = ("isotropic", "standardize")
BANK = {
    **{f"{scaler} laplace {size}": vf.Head(Laplace(size**2), scaler) for scaler in BOTH for size in (0.3, 0.5, 1.0, 2.0, 3.0)},
    **{f"{scaler} rbf {size}": vf.Head(RBF(size**2), scaler) for scaler in BOTH for size in (0.4, 0.8, 1.6)},
}
SUBSETS = {
    "laplace .3 1 3, both scalers (default)": [f"{s} laplace {x}" for s in BOTH for x in (0.3, 1.0, 3.0)],
    "laplace 1, both scalers (fast)": [f"{s} laplace 1.0" for s in BOTH],
    "laplace .5 2, both scalers": [f"{s} laplace {x}" for s in BOTH for x in (0.5, 2.0)],
    "laplace .3 1 3, isotropic": [f"isotropic laplace {x}" for x in (0.3, 1.0, 3.0)],
    "laplace .3 1 3, standardize": [f"standardize laplace {x}" for x in (0.3, 1.0, 3.0)],
    "rbf .4 .8 1.6, both scalers": [f"{s} rbf {x}" for s in BOTH for x in (0.4, 0.8, 1.6)],
}
Rule = Callable[[Any, Any], Any]


def softmin(td: Any, _: Any) -> Any:
    """Weights in proportion to (left-out TD error)^-8 (theory 7.6)."""
    errors = np.square(td).mean(axis=0)
    weights = np.maximum(errors / errors.min(), 1e-12) ** -8.0
    return weights / weights.sum()


def stacking(td: Any, _: Any) -> Any:
    """Least squares on the simplex: mirror descent to its end."""
    gram = td.T @ td / len(td)
    gram = gram / np.diag(gram).min()
    weights = np.full(len(gram), 1.0 / len(gram))
    for _ in range(5000):
        slope = gram @ weights
        weights = weights * np.exp(slope.min() - slope)
        weights /= weights.sum()
    return weights


def by_evidence(td: Any, log: Any) -> Any:
    """Weights in proportion to each head's marginal likelihood; the constant gets none."""
    weights = np.append(np.exp(log - log.max()), 0.0)
    return weights / weights.sum()


def lowest(td: Any, _: Any) -> Any:
    """The head of least left-out TD error alone."""
    return np.eye(td.shape[1])[np.square(td).mean(axis=0).argmin()]


RULES: dict[str, Rule] = {
    "gate (stacking, stopped early)": lambda td, _: gate(torch.tensor(td), None, "context").numpy(),
    "stacking": stacking,
    "soft-min, power 8": softmin,
    "lowest error": lowest,
    "evidence": by_evidence,
    "equal": lambda td, _: gate(torch.tensor(td), None, "equal").numpy(),
    "first head": lambda td, _: gate(torch.tensor(td), None, "first").numpy(),
}


def main() -> None:
    """Fit every head on every context it may be chosen on, then compare subsets and rules."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("docs/results/choose_heads.json"))
    arguments = parser.parse_args()
    names = list(BANK)
    contexts = []
    chosen = [domain for domain in domains("all") if domain.chosen_on]
    for domain in track(chosen):
        request = domain.request(0)
        context, test = split(vf.load(f"{request.scheme}:{text(request)}"))
        model = vf.ValueFormer(kernel=list(BANK.values()), gamma=GAMMA).fit(context)
        states, successor = distinct_states(test, GAMMA)
        values = []
        for h in range(len(names)):
            alone = torch.zeros_like(model.solution_.dual_coef)
            alone[h] = model.solution_.dual_coef[h]
            values.append(model.level_ + model._kernel_sum(states, alone[:, None])[0] * model.reward_unit_)
        values.append(np.full(len(states), model.level_))
        part = context[: min(len(context), 600)]
        rewards = (part.rewards - (1.0 - part.discount(GAMMA)) * model.level_) / model.reward_unit_
        logs = [evidence([(1.0, h.kernel, model.scalers_[h.scaler])], part, rewards, GAMMA).sum() for h in BANK.values()]
        assert model.left_out_ is not None
        contexts.append(
            {
                "test": test, "successor": successor, "values": np.array(values),
                "td": model.left_out_, "log": np.array(logs),
                "plain": min(best_single(context, test, GAMMA, fast=False)),
                "equal": min(best_single(context, test, GAMMA, fast=True)),
            }
        )  # fmt: skip
    rows = []
    for subset, heads in SUBSETS.items():
        index = [names.index(name) for name in heads]
        for rule, weigh in RULES.items() if "default" in subset else list(RULES.items())[:1]:
            rows.append({"heads": subset, "rule": rule, **_figures(contexts, index, weigh)})
            print(rows[-1], flush=True)
    write_text(arguments.out, to_json({"contexts": len(contexts), "gamma": GAMMA, "seed": 0, "rows": rows}))


def _figures(contexts: list[dict[str, Any]], index: list[int], weigh: Rule) -> dict[str, float]:
    found = []
    for c in contexts:
        both = [*index, -1]
        weights = weigh(c["td"][:, both], c["log"][index])
        values, test = weights @ c["values"][both], c["test"]
        td = test.rewards + test.discount(GAMMA) * values[c["successor"]] - values[: len(test)]
        metrics = held_out_metrics(test, GAMMA, values=values[: len(test)], td=td, n_folds=1)
        explained = np.nan if metrics.explained_variance is None else metrics.explained_variance
        tdc = np.nan if metrics.tdc is None else metrics.tdc
        found.append((np.mean(td**2) / c["plain"], np.mean(td**2) / c["equal"], tdc, explained))
    a, b, tdc, explained = np.array(found).T
    return {
        "cost (a) median": float(np.median(a)),
        "cost (a) 90 %": float(np.percentile(a, 90)),
        "cost (b) median": float(np.median(b)),
        "cost (b) 90 %": float(np.percentile(b, 90)),
        "cost (b) geometric mean": float(np.exp(np.mean(np.log(b)))),
        "TDc < 1": float(np.mean(tdc < 1)),
        "median explained variance": float(np.nanmedian(explained)),
    }


if __name__ == "__main__":
    main()
