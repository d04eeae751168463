"""Collect the MetaWorld episodes bundled as ``valueformer.samples``.

Five manipulation tasks, each at three levels of action noise. Within a task every episode starts from
the same state with the same goal, so that the episodes, and the three levels, differ by the noise alone
and one value function per (task, noise) is the right thing to estimate.

Usage::

    pip install '.[metaworld]' metaworld==3.1.1 mujoco==3.3.0 gymnasium==1.4.0 numpy==2.4.6
    python tools/make_samples.py

The same package versions on the same platform reproduce the files byte for byte: every draw is seeded
from its own name, a reset erases the previous episode, and numpy writes archives with a fixed date.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import itertools
import json
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from metaworld.env_dict import ALL_V3_ENVIRONMENTS_GOAL_OBSERVABLE
from rich.progress import track

from valueformer.collection import Request, play
from valueformer.collection.rollout import NOISE
from valueformer.files import write_atomically, write_text

TASKS = ("pick-place-v3", "pick-place-wall-v3", "shelf-place-v3", "plate-slide-v3", "button-press-v3")
EPISODES = 10
HORIZON = 200
MIN_SAW_REWARD = 3
MAX_GOAL_SEED = 1000
GAMMA = 0.9  # of the printed summary only: the files hold undiscounted rewards
DEFAULT_OUT = Path(__file__).resolve().parents[1] / "src" / "valueformer" / "samples"

BEHAVIOUR = (
    "action = clip(clip(scripted(observation), -1, 1) + sd * N(0, I), -1, 1), where scripted is MetaWorld's own "
    f"policy for the task. Every episode is truncated after {HORIZON} steps; MetaWorld has no terminal states."
)
# No threshold on the reward would serve all tasks: a plate at rest earns 0.8, a button pressed less than 2 of 10.
SAW_REWARD = "An episode saw reward if the simulator's info['success'] was 1 after at least one of its steps."
GOAL_RULE = (
    f"The lowest goal_seed >= 0 for which at least {MIN_SAW_REWARD} of the {EPISODES} high-noise episodes saw reward; "
    "that goal then serves all three noise levels, so the high-noise files are selected and their success rate is no "
    "estimate of the behaviour's. goal_seed is the seed argument of the environment's "
    "goal-observable class, which draws the random vector (object and goal placement) and freezes it."
)
NOISE_RULE = (
    "numpy.random.default_rng(int.from_bytes(sha256('{task}/{noise}/{goal_seed}/{episode}').digest()[:8], 'little')), "
    f"drawn as standard_normal(({HORIZON}, 4))."
)

Array = npt.NDArray[Any]


class Episode(NamedTuple):
    """One trajectory; ``observations`` has one row more than the rest, the state in which it was cut off."""

    observations: Array
    actions: Array
    rewards: Array
    success: Array  # of the state that the step led to


class Sample(NamedTuple):
    """One file to be: the episodes of one task at one noise level, all from one goal."""

    task: str
    noise: str
    goal_seed: int
    rand_vec: list[float]
    episodes: list[Episode]

    @property
    def saw_reward(self) -> int:
        """How many episodes saw reward, as :data:`SAW_REWARD` defines it."""
        return sum(bool(e.success.any()) for e in self.episodes)

    def arrays(self) -> dict[str, Array]:
        """The episodes end to end, as the file stores them."""
        flat = {name: np.concatenate([getattr(e, name) for e in self.episodes]) for name in Episode._fields}
        return flat | {"lengths": np.array([len(e.rewards) for e in self.episodes], dtype=np.int32)}


def collect(task: str, noise: str, goal_seed: int) -> Sample:
    """Play the ten episodes of one file from the goal that ``goal_seed`` draws, as ``valueformer collect`` does."""
    request = Request(scheme="metaworld", name=task, episodes=EPISODES, noise=noise, seed=goal_seed, max_steps=HORIZON)
    make_env: Any = ALL_V3_ENVIRONMENTS_GOAL_OBSERVABLE[f"{task}-goal-observable"]  # annotated without its seed
    env = make_env(seed=goal_seed)
    rand_vec = [float(x) for x in env._last_rand_vec]  # MetaWorld has no public accessor
    env.close()
    f32 = np.float32
    episodes = [
        Episode(e.observations[""], e.actions[""], e.rewards.astype(f32), e.infos["success"][1:].astype(bool))
        for e in (play(request, number) for number in range(EPISODES))
    ]
    return Sample(task, noise, goal_seed, rand_vec, episodes)


def collect_task(task: str) -> Iterator[Sample]:
    """Find the task's goal by :data:`GOAL_RULE`, then collect the other noise levels from it."""
    for goal_seed in range(MAX_GOAL_SEED):
        high = collect(task, "high", goal_seed)
        if high.saw_reward >= MIN_SAW_REWARD:
            break
    else:
        raise RuntimeError(f"{task}: no goal seed below {MAX_GOAL_SEED} qualifies")
    yield high
    for noise in NOISE:
        if noise != "high":
            yield collect(task, noise, goal_seed)


def check(sample: Sample) -> None:
    """Refuse to publish a file that breaks what the manifest promises."""
    start = sample.episodes[0].observations[0]
    for e in sample.episodes:
        promises = {
            "finite values": all(np.isfinite(x).all() for x in e),
            "actions in [-1, 1]": np.abs(e.actions).max() <= 1.0,
            "rewards in [0, 10]": e.rewards.min() >= 0.0 and e.rewards.max() <= 10.0,
            "39 observed numbers, one row more than rewards": e.observations.shape == (len(e.rewards) + 1, 39),
            "one common start": np.array_equal(e.observations[0], start),
        }
        if broken := [promise for promise, kept in promises.items() if not kept]:
            raise ValueError(f"{sample.task}, {sample.noise} noise: not kept: {'; '.join(broken)}")


def save(sample: Sample, out: Path) -> dict[str, Any]:
    """Write one file and return its manifest entry."""
    arrays, buffer = sample.arrays(), io.BytesIO()
    np.savez_compressed(buffer, allow_pickle=False, **arrays)
    path, payload = out / f"{sample.task}_{sample.noise}.npz", buffer.getvalue()
    write_atomically(path, lambda temporary: temporary.write_bytes(payload))
    return {
        "file": path.name,
        "task": sample.task,
        "noise": sample.noise,
        "noise_sd": NOISE[sample.noise],
        "goal_seed": sample.goal_seed,
        "rand_vec": sample.rand_vec,
        "goal": sample.episodes[0].observations[0, -3:].tolist(),
        "episodes": len(sample.episodes),
        "episodes_saw_reward": sample.saw_reward,
        "episodes_ended_in_success": sum(bool(e.success[-1]) for e in sample.episodes),
        "rows": {name: len(array) for name, array in arrays.items()},
        "bytes": len(payload),
        "sha256": hashlib.sha256(payload).hexdigest(),
    }


def summary(sample: Sample, entry: dict[str, Any]) -> str:
    """One line of the table: the mean return from the first state and over all states, cut at the horizon."""
    rewards = np.stack([e.rewards for e in sample.episodes]).astype(np.float64)
    start_return = (rewards @ GAMMA ** np.arange(HORIZON)).mean()
    to_go = list(itertools.accumulate(rewards.T[::-1], lambda tail, r: r + GAMMA * tail))
    return (
        f"{sample.task:<19}{sample.noise:<8}{sample.goal_seed:>4}{entry['episodes_saw_reward']:>5}"
        f"{entry['episodes_ended_in_success']:>5}{rewards.min():>8.3f}{rewards.mean():>8.3f}{rewards.max():>8.3f}"
        f"{start_return:>9.3f}{np.mean(to_go):>9.3f}{entry['bytes'] / 1e3:>8.0f}"
    )


def main() -> None:
    """Collect, check and save all fifteen files, then the manifest."""
    parser = argparse.ArgumentParser(description="Collect the MetaWorld episodes bundled with the package.")
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help="folder to write to (default: %(default)s)")
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    print("task               noise   goal  saw  end   r min  r mean   r max  G start   G mean      kB", flush=True)
    files = []
    for sample in track(itertools.chain.from_iterable(map(collect_task, TASKS)), total=len(TASKS) * len(NOISE)):
        check(sample)
        files.append(save(sample, out))
        print(summary(sample, files[-1]), flush=True)
    manifest = {
        "versions": {name: version(name) for name in ("metaworld", "mujoco", "gymnasium", "numpy")},
        "behaviour": BEHAVIOUR,
        "saw_reward": SAW_REWARD,
        "goal_rule": GOAL_RULE,
        "noise_rule": NOISE_RULE,
        "files": files,
    }
    write_text(out / "manifest.json", json.dumps(manifest, indent=2) + "\n")
    print(f"{len(files)} files, {sum(f['bytes'] for f in files) / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
