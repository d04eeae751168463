"""Named configurations: the experiments of the papers, and what made the trained weights in the package."""

from __future__ import annotations

import dataclasses

from valueformer.errors import InputError
from valueformer.heads import Head
from valueformer.kernels import RBF, Linear
from valueformer.pretraining.config import PretrainConfig

__all__ = ["RECIPES", "recipe"]

# One domain, high noise, many goals: the paper's training tasks (P10, P11).
PICK_PLACE = "metaworld:pick-place-v3?noise=high&goals=12&episodes=144&seed=100&max_steps=100"
# Nothing of MetaWorld: what the checkpoint is chosen on must come from other domains (theory 7.7).
ELSEWHERE = ("mrp:gp?dim=4&temperature=1", "mrp:gp?dim=2&temperature=0.3", "mrp:lq?dim=4", "mrp:boyan?dim=4")

_PICK_PLACE = PretrainConfig(tasks=(PICK_PLACE,), validation=ELSEWHERE, heads=(Head(RBF(0.64)),))
_PLAIN = PretrainConfig(tasks=(PICK_PLACE,), step_unit="plain")

# Wang et al. (2025): linear attention, Boyan chains, 64 windows x 5 updates x 4,000 chains, layers of one kind ("auto").
_BOYAN = PretrainConfig(
    tasks=("mrp:boyan?states=10&dim=4",),
    model="matrices",
    num_layers=3,
    context_length=30,
    models=30,
    updates_per_task=5,
    updates=20_000,
    windows=64,
    normalise=False,
    learning_rate=1e-3,
    weight_decay=1e-6,
    clip_norm=0.0,
    validate_every=250,
    checkpoint_every=500,
)

RECIPES: dict[str, PretrainConfig] = {
    "boyan": _BOYAN,
    "boyan-sequential": dataclasses.replace(_BOYAN, tied=False),
    "metaworld-pick-place": _PICK_PLACE,
    "pick-place-plain": _PLAIN,
    "pick-place-linear": dataclasses.replace(_PLAIN, heads=(Head(Linear()),), train=("steps",)),
}


def recipe(name: str) -> PretrainConfig:
    """Return a configuration by name; raises InputError for another name."""
    if name not in RECIPES:
        raise InputError("--recipe", ", ".join(RECIPES), repr(name))
    return RECIPES[name]
