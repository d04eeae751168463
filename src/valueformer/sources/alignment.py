"""Successor states for logs that store one observation per step: the place where rows get shifted, so done only here."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from valueformer import fields
from valueformer.errors import InputError
from valueformer.transitions import Transitions


def from_step_rows(observations: Any, rewards: Any, terminated: Any, **optional: Any) -> Transitions:
    """Build Transitions from rows without next observations: s' is the observation of the episode's next row.

    ``optional`` are further fields of Transitions. A terminated row needs no successor and is kept; any other row without
    one (the last of a truncated or unfinished episode, or before a gap in ``steps``) is dropped and counted.
    """
    states = fields.matrix("observations", observations)
    # Validates every field; the placeholder successors are replaced below.
    rows = Transitions(
        observations=states,
        next_observations=states,
        rewards=rewards,
        terminated=terminated,
        **optional,
    )
    followed = rows.follower >= 0
    # Where the last row is dropped, the record is cut one row earlier: its flag moves with the cut.
    cut = rows.truncated.copy()
    cut[followed] |= (rows.truncated & (rows.follower < 0) & ~rows.terminated)[rows.follower[followed]]
    if not (keep := followed | rows.terminated).any():
        raise InputError("observations", "episodes of at least two rows, or next observations", "no row with a successor")
    successors = rows.observations.copy()
    successors[followed] = rows.observations[rows.follower[followed]]
    dropped = dict(rows.dropped)
    if missing := int((~keep).sum()):
        dropped["no next observation at the end of a record"] = missing
    return rows[keep].replace(next_observations=successors[keep], truncated=cut[keep], dropped=dropped)


def sort_rows(columns: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Sort rows by episode (in order of appearance) and step, where both columns exist and rows are shuffled."""
    if "steps" not in columns or "episode_ids" not in columns:
        return columns
    _, first, inverse = np.unique(columns["episode_ids"], return_index=True, return_inverse=True)
    order = np.lexsort((columns["steps"], first[inverse]))
    if np.array_equal(order, np.arange(len(order))):
        return columns
    return {name: value[order] for name, value in columns.items()}
