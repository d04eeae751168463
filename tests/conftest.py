from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

import valueformer as vf
from valueformer import cli

torch.set_num_threads(1)  # the matrices are small, and workers share the cores

settings.register_profile("default", max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("full", max_examples=1000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))

FULL = os.environ.get("HYPOTHESIS_PROFILE") == "full"


def walk(
    seed: int,
    lengths: tuple[int, ...] = (9, 8, 7),
    ends: tuple[str, ...] = ("terminated", "truncated", "terminated"),
    dim: int = 3,
    step: float = 0.5,
    dtype: type = np.float64,
    **fields: Any,
) -> vf.Transitions:
    """Random-walk episodes with random rewards; each ends as told ("terminated", "truncated" or "open")."""
    rng = np.random.default_rng(seed)
    states, successors, flags = [], [], []
    for length, end in zip(lengths, ends, strict=True):
        path = np.cumsum(rng.normal(size=(length + 1, dim)) * step, axis=0)
        states.append(path[:-1])
        successors.append(path[1:])
        flags += [""] * (length - 1) + [end]
    n = sum(lengths)
    return vf.Transitions(
        observations=np.concatenate(states).astype(dtype),
        next_observations=np.concatenate(successors).astype(dtype),
        rewards=rng.normal(size=n).astype(dtype),
        terminated=np.array([flag == "terminated" for flag in flags]),
        truncated=np.array([flag == "truncated" for flag in flags]),
        episode_ids=np.repeat(np.arange(len(lengths)), lengths),
        **fields,
    )


@pytest.fixture
def context() -> vf.Transitions:
    return walk(0)


class Outcome:
    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    def call(*arguments: str | Path) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["valueformer", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        captured = capsys.readouterr()
        return Outcome(int(exit_.value.code or 0), captured.out, captured.err)

    return call
