"""Does one frozen model serve every domain? Its held-out errors against kernels chosen for each context with hindsight."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from valueformer.bench.domains import Domain, Group, domains, split
from valueformer.diagnostics import TEMPERATURES
from valueformer.errors import InputError
from valueformer.estimator import DivergenceWarning, ValueFormer
from valueformer.evaluation import evaluate, unfitted
from valueformer.features import fit_scaler
from valueformer.fitting import Columns, Problem, scaled
from valueformer.heads import Head
from valueformer.kernels import RBF
from valueformer.metrics import best_constant, held_out_metrics
from valueformer.solvers import distinct_states, evaluate_kernel_sum
from valueformer.sources import load
from valueformer.sources.simulated import text
from valueformer.transitions import Transitions
from valueformer.version import __version__

__all__ = ["best_single", "run", "summarise"]

_LAYERS = 40


def run(
    group: Group = "five",
    weights: Sequence[str] = ("default", "fast"),
    *,
    seeds: Sequence[int] = (0, 1, 2),
    gamma: float = 0.9,
    unguarded: bool = False,
    verdicts: bool = True,
    store: Path | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Evaluate frozen weights on every domain of a group, held out on episodes that no context contains.

    Logs are collected on first use and kept in the cache. ``store``: a file of one JSON object per context, from which an
    interrupted run goes on. Costs are ratios of held-out TD errors to the best of nine single RBF kernels on the isotropic
    scaler, chosen for the context with hindsight: (a) "plain", from V = 0 with the safe step; (b) "equal", with
    the model's own level, step and guard. ``unguarded``: each model also without its guard. ``verdicts``
    False leaves out what the model says of itself, which takes ten fits more per context.
    """
    models = {name: ValueFormer.from_pretrained(name, gamma=gamma) for name in weights}
    if unguarded:
        models |= {f"{name}, unguarded": unfitted(model).set_params(guard=False) for name, model in models.items()}
    jobs = [(domain, seed) for seed in seeds for domain in domains(group)]
    done = _stored(store, gamma, list(models))
    rows = []
    for count, (domain, seed) in enumerate(jobs, start=1):
        key = f"{domain.name}/{domain.policy}/{domain.noise}/{seed}"
        if key not in done:
            done[key] = {"gamma": gamma, "key": key} | _context(domain, seed, models, gamma, verdicts)
            if store is not None:
                with store.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(done[key]) + "\n")
        rows.append(done[key])
        if progress:
            progress(count, len(jobs))
    return {
        "setting": {"domains": group, "gamma": gamma, "layers": _LAYERS, "seeds": list(seeds), "temperatures": TEMPERATURES},
        "summary": {name: summarise(rows, name) for name in models},
        "contexts": rows,
        "versions": {"valueformer": __version__, "torch": torch.__version__},
    }


def _stored(store: Path | None, gamma: float, weights: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return the contexts that an earlier run of the same question finished."""
    if store is None or not store.is_file():
        return {}
    done = {}
    for line in store.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except ValueError:  # the line at which it was interrupted
            continue
        if row["gamma"] != gamma or set(row["models"]) != set(weights):
            raise InputError(
                str(store), f"contexts at gamma {gamma:g} with weights {', '.join(weights)}", "others", "remove it"
            )
        done[row["key"]] = row
    return done


def _context(domain: Domain, seed: int, models: Mapping[str, ValueFormer], gamma: float, verdicts: bool) -> dict[str, Any]:
    request = domain.request(seed)
    context, test = split(load(f"{request.scheme}:{text(request)}"))
    r, discount = test.rewards.astype(np.float64), test.discount(gamma)
    plain, equal = (best_single(context, test, gamma, fast=fast) for fast in (False, True))
    constant = best_constant(r, discount)
    row: dict[str, Any] = {
        "domain": domain.name,
        "policy": domain.policy,
        "noise": domain.noise,
        "seed": seed,
        "chosen_on": domain.chosen_on and seed == 0,
        "n": len(context),
        "episodes": context.n_episodes,
        "held_out": len(test),
        "reward_square": float(np.mean(np.square(r))),
        "constant": float(np.mean(np.square(r - (1.0 - discount) * constant))),
        "plain": plain,
        "equal": equal,
        "models": {},
    }
    for name, model in models.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DivergenceWarning)  # the status is counted
            result = evaluate(context, model, intervals=False) if verdicts else None
            fitted = unfitted(model).fit(context) if result is None else result.model
        values, td = fitted.values_and_td_errors(test)
        metrics = held_out_metrics(test, gamma, values=values, td=td, n_folds=1)
        row["models"][name] = {
            "td_error": metrics.td_error,
            "td_ratio": metrics.td_ratio,
            "tdc": metrics.tdc,
            "explained_variance": metrics.explained_variance,
            "status": fitted.solution_.status,
            "rewinds": fitted.solution_.stats["rewinds"],
            "finite": bool(np.isfinite(values).all()),
            "trust": None if result is None else result.trust["level"],
            "context_tdc": None if result is None else result.heldout.tdc,
            "context_explained_variance": None if result is None else result.heldout.explained_variance,
            "mixing_weights": fitted.mixing_weights_.tolist(),
        }
    return row


def best_single(context: Transitions, test: Transitions, gamma: float, *, fast: bool) -> list[float]:
    """Return the held-out mean squared TD error of each of the nine temperatures.

    ``fast``: from the context's level with the fast step, and guarded; else from V = 0 with the safe step.
    """
    unit = float(np.abs(context.rewards).max()) or 1.0
    scaler = fit_scaler("isotropic", context.observations)
    heads = [Head(RBF(temperature)) for temperature in TEMPERATURES]
    problem = Problem(
        data=context,
        views={"isotropic": scaled(context, scaler, True, np.dtype("float64"))},
        rewards=context.rewards.astype(np.float64) / unit,
        gamma=gamma,
        algorithm="td",
        step_size="fast" if fast else "safe",
        num_layers=_LAYERS,
        ridge=0.0,
        guard=True,
        dtype=torch.float64,
        device=torch.device("cpu"),
    )
    columns = Columns.of(np.ones((1, len(context))), problem.rewards, context.discount(gamma), "context" if fast else 0.0)
    done = problem.run(heads, columns)
    states, successor = distinct_states(test, gamma)
    centres = torch.tensor(problem.views["isotropic"].observations)
    points = torch.tensor(scaler.transform(states))
    kernels = [head.kernel for head in heads]
    values = evaluate_kernel_sum(kernels, points, centres, done.path.dual_coef)[:, 0].numpy() + columns.levels[0]  # (9, u)
    td = test.rewards / unit + test.discount(gamma) * values[:, successor] - values[:, : len(test)]
    return (np.mean(np.square(td), axis=1) * unit**2).tolist()


def summarise(rows: Sequence[Mapping[str, Any]], name: str) -> dict[str, dict[str, Any]]:
    """Return what all contexts, those used to choose the model and those never looked at say about one model.

    Contexts whose held-out rewards a constant explains exactly have no ratio; they are counted as ``undefined``.
    """
    looked_at = {(r["domain"], r["policy"]) for r in rows if r["chosen_on"]}
    parts = {
        "all": rows,
        "chosen on": [r for r in rows if r["chosen_on"]],
        "other seeds of those domains": [r for r in rows if (r["domain"], r["policy"]) in looked_at and not r["chosen_on"]],
        "untouched domains": [r for r in rows if (r["domain"], r["policy"]) not in looked_at],
        "metaworld": [r for r in rows if r["domain"].endswith("-v3")],
        "gymnasium": [r for r in rows if not r["domain"].endswith("-v3")],
    }
    return {part: _summary(own, name) for part, own in parts.items() if own}


def _summary(rows: Sequence[Mapping[str, Any]], name: str) -> dict[str, Any]:
    own = [row["models"][name] for row in rows]
    defined = [(row, m) for row, m in zip(rows, own, strict=True) if m["tdc"] is not None]
    plain = np.array([m["td_error"] / min(row["plain"]) for row, m in defined])
    equal = np.array([m["td_error"] / min(row["equal"]) for row, m in defined])
    tdc = np.array([m["tdc"] for _, m in defined])
    explained = [m["explained_variance"] for m in own if m["explained_variance"] is not None]
    trust: dict[str, Any] = {}
    for level in ("trust", "caution", "doubt"):
        group = [m for m in own if m["trust"] == level]
        seen = [m["explained_variance"] for m in group if m["explained_variance"] is not None]
        compared = [m["tdc"] for m in group if m["tdc"] is not None]
        trust[level] = {
            "contexts": len(group),
            "median explained variance": float(np.median(seen)) if seen else None,
            "lose to the constant": float(np.mean(np.array(compared) >= 1.0)) if compared else None,
        }
    return {
        "contexts": len(rows),
        "undefined": len(rows) - len(defined),
        "diverged": sum(m["status"] == "diverged" for m in own),
        "non-finite": sum(not m["finite"] for m in own),
        "cost (a) median": _quantile(plain, 50),
        "cost (a) 90 %": _quantile(plain, 90),
        "cost (a) worst": _quantile(plain, 100),
        "cost (b) median": _quantile(equal, 50),
        "cost (b) 90 %": _quantile(equal, 90),
        "cost (b) worst": _quantile(equal, 100),
        "TDc < 1": float(np.mean(tdc < 1.0)) if len(tdc) else None,
        "median TDc": _quantile(tdc, 50),
        "median explained variance": float(np.median(explained)) if explained else None,
        "trust": trust,
    }


def _quantile(x: Any, percent: float) -> float | None:
    return float(np.percentile(x, percent)) if len(x) else None
