"""Damage the golden files and load what is left: every case must end in valid Transitions or a typed error.

``python -m tests.fuzz --cases 2200 --out docs/results/fuzz.json`` runs it; tests/test_fuzz.py runs a slice. Cases run in a child
process with limited memory, which is replaced when it crashes or hangs, so a native crash is a finding and not the end.
"""

from __future__ import annotations

import argparse
import json
import platform
import queue
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import valueformer as vf
from tests.golden.episodes import LENGTHS, SCALE
from tests.test_golden import CASES, GOLDEN

SECONDS = 30  # a case that takes longer hangs; the usual one takes a few hundredths
MEMORY = 6 * 2**30
KINDS = ("flip", "flips", "truncate", "zero", "noise", "insert", "delete")


def damage(content: bytes, kind: str, random: np.random.Generator, text: bool = False) -> bytes:
    """Return damaged content: bits flipped, the end cut off, a range zeroed, overwritten, inserted or deleted.

    In text a range stays within its line: two lines joined in their middle can be a third one that nothing shows to be wrong.
    """
    data = bytearray(content)
    n = len(data)
    at, length = int(random.integers(n)), int(random.integers(1, min(65, n + 1)))
    if text and (end := content.find(b"\n", at)) >= 0:
        length = max(1, min(length, end - at))
    if kind in ("flip", "flips"):
        for _ in range(1 if kind == "flip" else int(random.integers(2, 9))):
            data[int(random.integers(n))] ^= 1 << int(random.integers(8))
    elif kind == "truncate":
        del data[at:]
    elif kind == "zero":
        data[at : at + length] = bytes(len(data[at : at + length]))
    elif kind == "noise":
        data[at : at + length] = random.bytes(len(data[at : at + length]))
    elif kind == "insert":
        data[at:at] = random.bytes(length)
    else:
        del data[at : at + length]
    return bytes(data)


def misaligned(data: vf.Transitions) -> int:
    """Return how many rows are shifted alike: state intact, and the successor or the reward that of another step, as far off.

    One such row is a changed number, which damage may leave; two or more by the same distance are a shift. Zeros are nobody's
    tag: they are what a zeroed range leaves. A lost end flag lets the next episode's first state follow; that is damage to the
    flag, and not counted.
    """
    with np.errstate(all="ignore"):
        mine, after = _tags(data.observations), _tags(data.next_observations)
        reward = data.rewards.astype(np.float64)
        known = np.isin(reward, [SCALE * e + t for e, length in enumerate(LENGTHS) for t in range(length)]) & (reward != 0)
        of_reward = np.where((mine > 0) & known, reward - mine, 0)
    lengths = np.array(LENGTHS)[np.maximum(mine, 0) // SCALE]
    last = np.maximum(mine, 0) % SCALE == lengths - 1
    counted = (mine > 0) & (after > 0) & ~data.terminated & ~(last & (after % SCALE == 0))
    of_successor = np.where(counted, after - mine - 1, 0)
    shifts = [Counter(offset[offset != 0].tolist()) for offset in (of_reward, of_successor)]
    most = max((count for shift in shifts for count in shift.values()), default=0)
    return most if most > 1 else 0


def _tags(states: NDArray[Any]) -> NDArray[np.int64]:
    """Return the number that each state names itself by, or -1 where it is damaged."""
    states = states.astype(np.float64)
    if states.shape[1] != 3:
        return np.full(len(states), -1)
    tag, episode, step = np.nan_to_num(states.T, nan=-1, posinf=-1, neginf=-1)
    index = np.clip(episode, 0, len(LENGTHS) - 1).astype(int)
    sound = (tag == SCALE * episode + step) & np.isin(episode, range(len(LENGTHS))) & (step >= 0)
    sound &= (step <= np.array(LENGTHS)[index]) & (step == np.round(step))
    return np.where(sound, tag, -1).astype(np.int64)


def run_case(number: int, seed: int) -> dict[str, Any]:
    """Run one case: choose a golden set, damage one of its files, load it whole and streamed."""
    random = np.random.default_rng([seed, number])
    case = CASES[number % len(CASES)]
    kind = KINDS[int(random.integers(len(KINDS)))]
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / Path(case.path).name
        source = GOLDEN / case.path
        shutil.copytree(source, target) if source.is_dir() else shutil.copy(source, target)
        files = sorted(p for p in target.rglob("*") if p.is_file()) if target.is_dir() else [target]
        file = files[int(random.integers(len(files)))]
        file.write_bytes(damage(file.read_bytes(), kind, random, text=file.suffix in (".csv", ".json", ".jsonl")))
        whole, rows = _attempt(lambda: [vf.load(target, **case.options)])
        streamed, blocks = _attempt(lambda: list(vf.load(target, stream=True, block_size=7, **case.options)))
    if rows is not None and blocks is not None and not np.array_equal(rows, blocks):
        streamed = "misaligned: the stream differs from the whole"
    return {"case": number, "set": case.path, "kind": kind, "file": file.name, "whole": whole, "stream": streamed}


def _attempt(load: Any) -> tuple[str, NDArray[Any] | None]:
    """Return the outcome, and all states and successors where there are some."""
    try:
        parts = load()
    except (vf.InputError, vf.MissingExtraError) as error:
        return "refused" if "\n" not in str(error) else f"more than one line: {error}", None
    except Exception as error:
        return f"escaped: {type(error).__name__}: {error}", None
    for data in parts:
        finite = np.isfinite(data.observations).all() and np.isfinite(data.rewards).all()
        if not finite or not np.isfinite(data.next_observations).all():
            return "not finite", None
        data.validate()
    wrong = sum(map(misaligned, parts))
    rows = np.concatenate([np.concatenate([data.observations, data.next_observations], axis=1) for data in parts])
    return "loaded" if wrong == 0 else f"misaligned: {wrong}", rows


def child() -> None:
    """Run the cases whose numbers come on standard input, one result a line."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    for line in sys.stdin:
        number, seed = map(int, line.split())
        sys.stdout.write(json.dumps(run_case(number, seed)) + "\n")
        sys.stdout.flush()


def run(cases: int, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Yield the result of every case; a crash or a hang is a result too."""
    worker = None
    for number in range(cases):
        worker = worker if worker is not None and worker.alive else _Worker()
        yield worker.ask(number, seed)
    if worker is not None:
        worker.stop()


class _Worker:
    def __init__(self) -> None:
        self.alive = True
        command = [sys.executable, "-c", "from tests.fuzz import child; child()"]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=GOLDEN.parents[1]
        )
        self.lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put("")

    def ask(self, number: int, seed: int) -> dict[str, Any]:
        assert self.process.stdin is not None
        lost = {"case": number, "set": CASES[number % len(CASES)].path, "kind": "?", "file": "?"}
        try:
            self.process.stdin.write(f"{number} {seed}\n")
            self.process.stdin.flush()
            line = self.lines.get(timeout=SECONDS)
        except (queue.Empty, BrokenPipeError) as error:
            self.stop()
            what = "hung" if isinstance(error, queue.Empty) else "crashed"
            return lost | {"whole": what, "stream": what}
        if not line:
            self.stop()
            return lost | {"whole": f"crashed: {self.process.returncode}", "stream": f"crashed: {self.process.returncode}"}
        return json.loads(line)

    def stop(self) -> None:
        self.alive = False
        self.process.kill()
        self.process.communicate()


def summary(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Return counts of outcomes, in all and by golden set, and every finding."""
    table: dict[str, Counter[str]] = {}
    for result in results:
        for way in ("whole", "stream"):
            table.setdefault(result["set"], Counter())[result[way].partition(":")[0]] += 1
    findings = [r for r in results if not {r["whole"], r["stream"]} <= {"loaded", "refused"}]
    total = sum(table.values(), Counter())
    return {"cases": len(results), "loads": dict(total), "by_set": {k: dict(v) for k, v in table.items()}, "findings": findings}


def main() -> None:
    """Run and store the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=2200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    found = summary(list(run(arguments.cases, arguments.seed)))
    versions = {name: version(name) for name in ("valueformer", "numpy", "pyarrow", "h5py")} | {
        "python": platform.python_version()
    }
    found = {"command": f"python -m tests.fuzz --cases {arguments.cases} --seed {arguments.seed}", "versions": versions} | found
    if arguments.out:
        arguments.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({name: found[name] for name in ("cases", "loads", "findings")}, indent=1))


if __name__ == "__main__":
    main()
