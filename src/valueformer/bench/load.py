"""Streaming a large Parquet table into aligned Transitions, beside pyarrow's own read of the same file."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet

from valueformer.errors import InputError

__all__ = ["run", "write_table"]

_EPISODE = 500

# Each measurement is a process of its own, since peak memory is a process's.
_MEASURE = """
import json, sys, time
kind, path, size = sys.argv[1], sys.argv[2], int(sys.argv[3])
import pyarrow.parquet
from valueformer.sources import load
rows = 0
start = time.perf_counter()
if kind == "pyarrow":
    rows = pyarrow.parquet.read_table(path).num_rows
else:
    for block in load(path, stream=True, block_size=size):
        rows += len(block)
seconds = time.perf_counter() - start
try:
    import resource
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
except ImportError:  # Windows
    peak = float("nan")
print(json.dumps({"rows": rows, "seconds": seconds, "peak": peak}))
"""


def write_table(path: Path, rows: int, columns: int, seed: int = 0) -> None:
    """Write a table of steps: float32 observations, reward, both flags, episode id and step; episodes of 500 steps."""
    generator = np.random.default_rng(seed)
    names = [f"obs_{i}" for i in range(columns - 5)]
    schema = pa.schema(
        [(name, pa.float32()) for name in names]
        + [("reward", pa.float32()), ("terminated", pa.bool_()), ("truncated", pa.bool_()), ("episode_id", pa.int64())]
        + [("step", pa.int64())]
    )
    row = np.arange(rows)
    last = row % _EPISODE == _EPISODE - 1
    table = {name: generator.standard_normal(rows, np.float32) for name in (*names, "reward")}
    table |= {"terminated": last & (row % 1000 == 999), "truncated": last & (row % 1000 != 999)}
    table |= {"episode_id": row // _EPISODE, "step": row % _EPISODE}
    pyarrow.parquet.write_table(pa.table(table, schema=schema), path)  # in row groups of pyarrow's own size


def run(
    rows: int,
    columns: int,
    block_size: int,
    *,
    repeats: int = 3,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """Return times, their ratio and peak memory: ``{"table", "pyarrow", "stream", "ratio"}``; times are medians in seconds."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "table.parquet"
        write_table(path, rows, columns)
        progress(1, 2 * repeats + 1)
        found: dict[str, list[dict[str, float]]] = {"pyarrow": [], "stream": []}
        for repeat in range(repeats):
            for i, kind in enumerate(found):
                found[kind].append(_measure(kind, path, block_size))
                progress(2 * repeat + i + 2, 2 * repeats + 1)
        size = path.stat().st_size
    seconds = {kind: median(part["seconds"] for part in parts) for kind, parts in found.items()}
    peaks = {kind: max(part["peak"] for part in parts) / 2**20 for kind, parts in found.items()}
    return {
        "table": {"rows": rows, "columns": columns, "file_MiB": size / 2**20, "block_size": block_size, "repeats": repeats},
        "pyarrow": {"seconds": seconds["pyarrow"], "peak_MiB": peaks["pyarrow"]},
        "stream": {
            "seconds": seconds["stream"],
            "peak_MiB": peaks["stream"],
            "rows": int(found["stream"][0]["rows"]),
        },
        "ratio": {"stream / pyarrow": seconds["stream"] / seconds["pyarrow"]},
    }


def _measure(kind: str, path: Path, block_size: int) -> dict[str, float]:
    command = [sys.executable, "-c", _MEASURE, kind, str(path), str(block_size)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise InputError("bench load", "a process that reads the table", (done.stderr.splitlines() or ["no message"])[-1][:200])
    return json.loads(done.stdout)
