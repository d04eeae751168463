"""Results: frozen records with numbers, written as JSON and Parquet and read back for every picture."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet
from numpy.typing import NDArray

from valueformer.errors import InputError
from valueformer.files import write_atomically, write_text
from valueformer.metrics import HeldOut

__all__ = ["Evaluation", "Status", "plain", "read_stored", "to_json"]

Status = Literal["converged", "max_layers", "diverged", "singular"]


_NOT_JSON = ("table", "queries", "query_states", "model")


@dataclass(frozen=True, eq=False, repr=False)
class Evaluation:
    """The value of a log's behaviour policy, state by state, and how far it held on episodes left out of the context."""

    source: str
    data: Mapping[str, Any]
    """n_transitions, n_episodes, obs_dim, terminated, truncated."""
    estimand: str
    gamma: float
    num_layers: int
    kernel: str
    heads: list[dict[str, Any]]
    """Per head, the constant last: scaler, kernel, mixing weight, step size, rewinds, TD error on folds left out."""
    layout: str
    status: Status
    message: str
    verdict: str
    trust: Mapping[str, str]
    """The verdict's parts: level ("trust", "caution" or "doubt"), reason, remedy."""
    context_td_error: NDArray[np.float64]
    """``(L,)`` mean squared TD error on the whole context after each layer."""
    heldout: HeldOut
    initial_value: Mapping[str, Any]
    """mean, lower, upper, level (of confidence), and per_episode in order of appearance."""
    table: Mapping[str, NDArray[Any]]
    """Per transition: episode_id, step, value, td_error, advantage, heldout_value, monte_carlo_return,
    missing_weight, far_from_others (from the episodes of the other folds), out_of_range."""
    initial_td_error: float = 0.0
    """Mean squared TD error on the context before the first layer."""
    rewinds: int = 0
    """Steps that the guard took back."""
    level: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """mean_value, mean_return and return_spread over rows whose return is at least 95 % recorded, held out if possible."""
    queries: Mapping[str, NDArray[Any]] | None = None
    """At the states asked about, ``(m,)`` each: value, std, distance, far, out_of_range."""
    query_states: NDArray[Any] | None = None
    seconds: float = 0.0
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Parameters, seed and versions: what it takes to get these numbers again."""
    model: Any = None
    """The model, fitted to the whole log."""

    def __repr__(self) -> str:
        return f"Evaluation({self.source}, gamma={self.gamma:g}, status={self.status!r}: {self.verdict})"

    def to_dict(self, files: Mapping[str, str] | None = None) -> dict[str, Any]:
        """Return the JSON document: plain values, undefined numbers as None; the table is left to Parquet."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in _NOT_JSON}
        fields["heldout"] = dataclasses.asdict(self.heldout)
        if self.queries is not None:
            fields["queries"] = self.queries
        return plain(fields | {"files": dict(files or {})})

    def save(self, folder: str | Path) -> dict[str, str]:
        """Write values.parquet, result.json and, if states were asked about, queries.parquet; return their paths.

        Raises OSError where the folder cannot be written to.
        """
        folder = Path(folder)
        files = {"values": str(folder / "values.parquet"), "result": str(folder / "result.json")}
        table = pa.table({name: pa.array(column, from_pandas=True) for name, column in self.table.items()})
        write_atomically(folder / "values.parquet", lambda path: pyarrow.parquet.write_table(table, path))
        if self.queries is not None and self.query_states is not None:
            files["queries"] = str(folder / "queries.parquet")
            states = {f"obs_{i}": column for i, column in enumerate(self.query_states.T)}
            asked = pa.table({**states, **self.queries})
            write_atomically(folder / "queries.parquet", lambda path: pyarrow.parquet.write_table(asked, path))
        write_text(folder / "result.json", to_json(self.to_dict(files)))
        return files


def plain(value: Any) -> Any:
    """Return ``value`` in JSON's types; NaN and infinities become None."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def to_json(document: Mapping[str, Any]) -> str:
    """Return strict JSON: never NaN or Infinity."""
    return json.dumps(plain(document), indent=2, allow_nan=False) + "\n"


def read_stored(folder: Path) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """Read back what :meth:`Evaluation.save` wrote: the document and the table's columns."""
    try:
        document = json.loads((folder / "result.json").read_text(encoding="utf-8"))
        table = pyarrow.parquet.read_table(folder / "values.parquet")
    except (OSError, ValueError) as error:
        raise InputError(str(folder), "result.json and values.parquet", str(error).splitlines()[0]) from None
    return document, {name: table.column(name).to_numpy() for name in table.column_names}
