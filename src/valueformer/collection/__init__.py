"""Collecting logs from simulators, reproducibly: the same arguments give the same log, whatever the number of workers."""

from __future__ import annotations

import dataclasses
import json
import math
import multiprocessing
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from valueformer.collection import simulators
from valueformer.collection.rollout import NOISE, generator, rollout
from valueformer.errors import InputError
from valueformer.files import write_atomically, write_text
from valueformer.writers import Record, box, check_new, dataset_id, write_minari

__all__ = ["Request", "collect", "play", "run"]


@dataclass(frozen=True, kw_only=True)
class Request:
    """What to collect. Episode i plays goal ``seed + i mod goals``; its random numbers depend on names alone.

    - ``scheme``, ``name``: ``gymnasium`` and an environment's id, or ``metaworld`` and a task (``pick-place-v3``).
    - ``policy``: ``random``, ``scripted`` (MetaWorld) or ``module:function``; None: scripted where there is one, else random.
    - ``noise``: ``high``, ``medium``, ``low`` (1, 0.5, 0.1) or a number >= 0, in units of half the action range.
    - ``max_steps``: truncate after so many steps; None: the simulator's own limit.

    Raises InputError for what does not fit.
    """

    scheme: str
    name: str
    episodes: int = 10
    policy: str | None = None
    noise: str | float = 0.0
    goals: int = 1
    seed: int = 0
    max_steps: int | None = None

    def __post_init__(self) -> None:
        if self.scheme not in simulators.SCHEMES or not self.name:
            got = repr(f"{self.scheme}:{self.name}" if self.name else self.scheme)
            raise InputError("simulator", "gymnasium:ENV_ID or metaworld:TASK", got)
        for field, least in (("episodes", 1), ("goals", 1), ("seed", 0), ("max_steps", 1)):
            value = getattr(self, field)
            if value is None and field == "max_steps":
                continue
            if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 2**31:
                raise InputError(f"--{field.replace('_', '-')}", f"a whole number >= {least} and < 2^31", repr(value))
        if self.goals > 1 and self.scheme != "metaworld":
            raise InputError("--goals", "1: only metaworld: tasks have goals", str(self.goals), "vary --seed instead")
        if self.goals > self.episodes:
            raise InputError("--goals", f"at most the number of episodes, {self.episodes}", str(self.goals))
        if self.policy is None:
            object.__setattr__(self, "policy", "scripted" if self.scheme == "metaworld" else "random")
        sd = self.noise_sd
        if self.noise not in NOISE:
            object.__setattr__(self, "noise", sd)  # "0" and 0.0 are one request
        if self.policy == "random" and sd:
            raise InputError("--noise", "no noise on random actions", str(self.noise), "choose a policy, or leave it out")

    @property
    def noise_sd(self) -> float:
        """Standard deviation of the action noise."""
        if isinstance(self.noise, str) and self.noise in NOISE:
            return NOISE[self.noise]
        try:
            value = float(self.noise)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and value >= 0.0):
            raise InputError("--noise", f"{', '.join(NOISE)} or a number >= 0", repr(self.noise))
        return value

    def goal(self, episode: int) -> int:
        """Return the seed of the goal that an episode plays."""
        return self.seed + episode % self.goals

    def stream(self, episode: int) -> np.random.Generator:
        """Return an episode's random numbers."""
        return generator(self.name, self.noise, self.goal(episode), episode // self.goals)

    def document(self) -> dict[str, Any]:
        """Return everything on which the collected log depends."""
        document = dataclasses.asdict(self) | {"versions": simulators.versions(self.scheme)}
        digest = simulators.policy_digest(str(self.policy))
        return document if digest is None else document | {"policy_sha256": digest}


def collect(
    simulator: str,
    out: str | Path,
    *,
    episodes: int = 10,
    policy: str | None = None,
    noise: str | float = 0.0,
    goals: int = 1,
    seed: int = 0,
    max_steps: int | None = None,
    workers: int = 1,
) -> None:
    """Collect episodes from ``gymnasium:ENV_ID`` or ``metaworld:TASK`` into a new folder, a Minari dataset in HDF5.

    The arguments are those of :class:`Request`; the log does not depend on ``workers``, the number of processes. Read it with
    ``vf.load(out)``. Raises InputError for what does not fit, MissingExtraError without the simulator's package.
    """
    scheme, _, name = simulator.partition(":")
    request = Request(
        scheme=scheme, name=name, episodes=episodes, policy=policy, noise=noise, goals=goals, seed=seed, max_steps=max_steps
    )
    run(request, Path(out), workers=workers)


def run(
    request: Request, folder: Path, *, workers: int = 1, progress: Callable[[int, int], None] = lambda done, total: None
) -> None:
    """Collect into a new Minari folder.

    Finished episodes are kept beside it until all are there, so that an interrupted run goes on where it stopped; a complete
    log of the same request is left as it is. Raises InputError for a folder in use, an unknown environment or policy, or a
    policy's action that does not fit.
    """
    if not isinstance(workers, int) or workers < 1:
        raise InputError("--workers", "a whole number >= 1", repr(workers))
    if _complete(folder, request):
        progress(request.episodes, request.episodes)
        return
    check_new(folder)
    first = _simulator(request, 0)  # an unknown name or policy fails here, before any work
    _limit(request, first)
    _policy(request, first)
    if request.noise_sd and not hasattr(first.environment.action_space, "low"):
        raise InputError("--noise", "continuous actions", str(first.environment.action_space), "leave it out")
    partial = folder.absolute().parent / f".{folder.name}.partial"
    _resume(partial, request)
    missing = [i for i in range(request.episodes) if not _part(partial, i).is_file()]
    kept = request.episodes - len(missing)
    progress(kept, request.episodes)
    try:
        for count, _ in enumerate(_work(request, partial, missing, workers), start=1):
            progress(kept + count, request.episodes)
    except BaseException:
        if not any(partial.glob("episode_*.npz")):
            shutil.rmtree(partial, ignore_errors=True)
        raise
    records = (_read(_part(partial, i), request.goal(i)) for i in range(request.episodes))
    write_minari(folder, records, _metadata(request, first, _read(_part(partial, 0), 0)))
    shutil.rmtree(partial, ignore_errors=True)


def _complete(folder: Path, request: Request) -> bool:
    """Whether a folder holds the log of the same request."""
    try:
        said = json.loads((folder / "data" / "metadata.json").read_text(encoding="utf-8"))
        return said["request"] == json.loads(json.dumps(request.document()))
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _resume(partial: Path, request: Request) -> None:
    """Begin, or go on if what lies there was collected for the same request by the same versions."""
    plan = partial / "request.json"
    document = json.dumps(request.document(), sort_keys=True, indent=2) + "\n"
    if plan.is_file() and plan.read_text(encoding="utf-8") != document:
        mend = f"choose another folder, or remove {partial}"
        raise InputError(str(partial), "episodes of the same request", "an interrupted run of another one", mend)
    write_text(plan, document)


def _work(request: Request, partial: Path, missing: list[int], workers: int) -> Iterator[int]:
    if workers == 1 or len(missing) <= 1:
        for episode in missing:
            yield _one(request, partial, episode)
        return
    # "spawn": forking a process that runs threads (torch's, MuJoCo's) can deadlock
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(workers, len(missing)), mp_context=context, initializer=_quiet) as pool:
        with _deaf():
            pending = {pool.submit(_one, request, partial, episode) for episode in missing}
        try:
            while pending:
                finished, pending = wait(pending, timeout=0.5, return_when=FIRST_EXCEPTION)
                finished |= {future for future in pending if future.done()}
                pending -= finished
                for future in finished:
                    yield future.result()
        except BrokenProcessPool:
            got = "one that died"
            raise InputError(
                "--workers", "worker processes that stay alive", got, "is there enough memory? try --workers 1"
            ) from None
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _quiet() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the parent, which ends its workers after their episode


@contextmanager
def _deaf() -> Iterator[None]:
    """Ignore Ctrl-C while workers are started, which inherit that; a signal in between would hit them half-imported."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _one(request: Request, partial: Path, episode: int) -> int:
    _write(_part(partial, episode), play(request, episode))
    return episode


def play(request: Request, episode: int) -> Record:
    """Return one episode of a request; no other episode has any part in it."""
    simulator = _simulator(request, episode)
    reset = int.from_bytes(generator("reset", request.name, request.seed, episode).bytes(4), "little") >> 1
    policy, limit = _policy(request, simulator), _limit(request, simulator)
    try:
        with redirect_stdout(sys.stderr):  # what somebody's policy prints is no part of the answer
            random = request.stream(episode)
            return rollout(simulator, policy, noise=request.noise_sd, max_steps=limit, seed=reset, random=random)
    except InputError:
        raise
    except (Exception, SystemExit) as error:  # a policy or an environment of somebody else's
        what = f"{request.scheme}:{request.name}, policy {request.policy}"
        got = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise InputError(what, "an episode", got, "check the policy") from error
    finally:
        if request.scheme != "metaworld":
            simulator.environment.close()


def _simulator(request: Request, episode: int) -> simulators.Simulator:
    """Return a simulator that no other episode has left a trace in.

    A Gymnasium environment may remember earlier episodes, so it is made anew; MetaWorld's reset erases them, and making one of
    its environments takes as long as an episode.
    """
    goal = request.goal(episode)
    return (
        _metaworld(request.name, goal) if request.scheme == "metaworld" else simulators.make(request.scheme, request.name, goal)
    )


@lru_cache(maxsize=4)
def _metaworld(name: str, goal: int) -> simulators.Simulator:
    return simulators.make("metaworld", name, goal)


def _policy(request: Request, simulator: simulators.Simulator) -> simulators.Policy:
    return simulators.make_policy(str(request.policy), request.scheme, request.name, simulator.environment.action_space)


def _limit(request: Request, simulator: simulators.Simulator) -> int:
    limits = [n for n in (request.max_steps, simulator.max_steps) if n is not None]
    if not limits:
        where = f"{request.scheme}:{request.name}"
        raise InputError(where, "a limit on an episode's length", "an environment without one", "say --max-steps")
    return min(limits)


def _part(partial: Path, episode: int) -> Path:
    return partial / f"episode_{episode:06d}.npz"


def _write(path: Path, episode: Record) -> None:
    arrays = {"rewards": episode.rewards, "terminated": episode.terminated, "truncated": episode.truncated}
    for kind in ("observations", "actions", "infos"):
        arrays |= {f"{kind}/{name}": array for name, array in getattr(episode, kind).items()}
    members: dict[str, Any] = arrays
    write_atomically(path, lambda file: np.savez(file, **members))


def _read(path: Path, seed: int) -> Record:
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
    except Exception as error:
        raise InputError(str(path), "an episode of an interrupted run", "a damaged file", "remove it and run again") from error
    kinds = {
        kind: {name.partition("/")[2]: array for name, array in arrays.items() if name.startswith(f"{kind}/")}
        for kind in ("observations", "actions", "infos")
    }
    return Record(rewards=arrays["rewards"], terminated=arrays["terminated"], truncated=arrays["truncated"], seed=seed, **kinds)


def _metadata(request: Request, simulator: simulators.Simulator, record: Record) -> dict[str, Any]:
    environment = simulator.environment
    return {
        "dataset_id": dataset_id(f"{request.name}-{request.policy}"),
        "observation_space": _space(environment.observation_space, record.observations),
        "action_space": _space(environment.action_space, record.actions),
        "algorithm_name": f"{request.policy} policy, action noise {request.noise}",
        "description": f"Collected by valueformer from {request.scheme}:{request.name}.",
        "request": request.document(),
    }


def _space(space: Any, parts: dict[str, Any] | Any, path: str = "") -> dict[str, Any]:
    """Return Minari's description of a space, with the dtypes that were stored."""
    spaces = getattr(space, "spaces", None)
    if isinstance(spaces, dict):
        return {"type": "Dict", "subspaces": {k: _space(s, parts, f"{path}/{k}".lstrip("/")) for k, s in spaces.items()}}
    if isinstance(spaces, tuple):
        inner = [_space(s, parts, f"{path}/_index_{i}".lstrip("/")) for i, s in enumerate(spaces)]
        return {"type": "Tuple", "subspaces": inner}
    if hasattr(space, "n") and hasattr(space, "start"):
        return {"type": "Discrete", "dtype": "int64", "start": int(space.start), "n": int(space.n)}
    described = box(parts[path])
    if hasattr(space, "low"):
        described |= {"low": np.asarray(space.low, float).tolist(), "high": np.asarray(space.high, float).tolist()}
    return described
