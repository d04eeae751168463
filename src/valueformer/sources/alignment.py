"""From rows as a file holds them to Transitions: the place where rows get shifted, so done only here.

A source yields :class:`Rows`, blocks of consecutive rows. :func:`whole` joins them into one Transitions, :func:`stream` aligns
them block by block, with the same result row by row.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from valueformer import fields
from valueformer.errors import InputError
from valueformer.sources.limits import check_size
from valueformer.sources.options import Options
from valueformer.transitions import Transitions, followers

__all__ = ["LOST", "PADDING", "Rows", "episode", "regroup", "stream", "whole"]

Array = NDArray[Any]

LOST = "no next observation at the end of a record"
PADDING = "padding after the end of an episode"
NONFINITE = "a number that is not finite"
LIMIT = "an end that no flag marks, set by max_episode_steps"
PIECES = "a piece of an episode joined to the one before it, in order of appearance, as no steps are given"
CLOCK = "a time instead of a step number: rows are in its order, and gaps do not show"
RESTART = "an episode start that only the step numbers show"
UNBOUNDED = "no truncated flag and no episode ids: episodes end only where terminated"
_FEW = 20  # rows: among fewer, short episodes may well lose most of theirs
_EMPTY = ("data", "at least one transition", "none", "check the file and its filters")
_NOTHING = (
    "observations",
    "episodes of at least two rows, or next observations",
    "no row with a successor",
    "steps of an episode must count by one, and its rows share an id",
)


@dataclass(frozen=True)
class Rows:
    """Consecutive rows of a log under the field names of Transitions, as one source reads them.

    Two more flags are understood: ``done``, an end of either kind, and ``starts``, the first row of an episode.

    Without ``next_observations``, the following row of the same episode holds the successor.
    """

    arrays: dict[str, Array]
    obs_names: tuple[str, ...] | None = None
    unused: tuple[str, ...] = ()
    dropped: Mapping[str, int] = field(default_factory=dict)
    assumed: Mapping[str, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.arrays["rewards"]) if self.arrays else 0


def episode(
    where: str, number: int, observations: Array, rewards: Any, terminated: Any, truncated: Any, actions: Array | None = None
) -> Rows:
    """Return one episode's rows with their successors, from T + 1 observations (or T), T rewards and T flags.

    With T observations a terminated last row is kept (its successor is never read); any other is dropped and counted, and its
    truncation moves one row up with the cut.
    """
    rewards = fields.vector(f"{where}: rewards", rewards)
    steps = len(rewards)
    terminated = fields.flags(f"{where}: terminated", terminated)
    truncated = fields.flags(f"{where}: truncated", truncated)
    if len(observations) not in (steps, steps + 1) or len(terminated) != steps or len(truncated) != steps:
        got = f"{len(observations)} observations, {len(terminated)} terminated, {len(truncated)} truncated"
        raise InputError(where, f"T + 1 (or T) observations and T flags for T = {steps} rewards", got)
    kept, successors = steps, observations[1:]
    if steps and len(observations) == steps:
        if terminated[-1]:
            successors = np.concatenate([successors, observations[-1:]])
        else:
            kept -= 1
            if truncated[-1] and kept:
                truncated[kept - 1] = True
    arrays = {
        "observations": observations[:kept],
        "next_observations": successors[:kept],
        "rewards": rewards[:kept],
        "terminated": terminated[:kept],
        "truncated": truncated[:kept],
        "episode_ids": np.full(kept, number),
        "steps": np.arange(kept),
    }
    if actions is not None:
        arrays["actions"] = fields.length(f"{where}: actions", actions, steps)[:kept]
    return Rows(arrays, dropped={LOST: steps - kept} if kept < steps else {})


def regroup(parts: Iterable[Rows], block_size: int) -> Iterator[Rows]:
    """Join short parts and split long ones into blocks of at most ``block_size`` rows."""
    pending: list[Rows] = []
    waiting = 0
    for part in parts:
        pending.append(part)
        waiting += len(part)
        if waiting < block_size:
            continue
        rows, full = _join(pending), waiting - waiting % block_size
        for start in range(0, full, block_size):
            yield _cut(rows, slice(start, start + block_size))
            rows = replace(rows, dropped={}, assumed={})  # counted once
        pending, waiting = ([_cut(rows, slice(full, None))], waiting - full) if waiting > full else ([], 0)
    if any(len(part) or part.dropped or part.assumed for part in pending):
        yield _join(pending)


def whole(blocks: Iterable[Rows], *, source: str, form: str, options: Options, owned: bool = False) -> Transitions:
    """Return all blocks as one Transitions, sorted by episode (in order of appearance) and step where the log names them.

    ``owned``: nobody else holds the arrays, so that they need not be copied.
    """
    parts, total = [], 0
    for block in blocks:
        parts.append(block)
        total += sum(value.nbytes for value in block.arrays.values())
        check_size(source, total)
    rows = _join(parts)
    if not len(rows):
        raise InputError(*(_NOTHING if rows.dropped else _EMPTY))
    rows = _Numbering(options).number(_sorted(_checked(rows)))
    before = len(rows)
    rows = _with_successors(_finite_only(rows, options), hold=False)
    if not len(rows):
        raise InputError(*_NOTHING)
    if (lost := rows.dropped.get(LOST, 0)) > before / 2 and before >= _FEW:
        mend = "are ids or steps missing, or rows shuffled? name episode_column and step_column"
        raise InputError("observations", "a next observation for most rows", f"none for {lost} of {before}", mend)
    return _transitions(rows, source, form, owned)


def stream(
    blocks: Iterable[Rows], *, source: str, form: str, options: Options, block_size: int, owned: bool = False
) -> Iterator[Transitions]:
    """Yield Transitions of at most ``block_size`` rows, whose rows, ids, steps and counts together are those of :func:`whole`.

    One row is held back between blocks, since the next one may hold its successor. Episodes must be contiguous, their rows in
    order; raises InputError where they are not.
    """
    numbering, held, ready, seen = _Numbering(options), None, Rows({}), False
    for block, final in _with_last(blocks):
        seen = seen or len(block) > 0 or bool(block.dropped)
        rows = numbering.number(_checked(block))
        rows = _finite_only(rows if held is None else _join([held, rows]), options)
        hold = "next_observations" not in rows.arrays and not final and len(rows) > 0
        held = Rows({name: value[-1:] for name, value in rows.arrays.items()}, rows.obs_names, rows.unused) if hold else None
        rows = _with_successors(rows, hold)
        if len(ready) and len(rows):  # what a block without rows has to report goes with the block before it
            yield _transitions(ready, source, form, owned)
            ready = rows
        else:
            ready = _join([ready, rows]) if ready.arrays or ready.dropped else rows
    if not len(ready):
        raise InputError(*(_NOTHING if seen else _EMPTY))
    if len(ready) > block_size:  # with the row held back
        yield _transitions(_cut(ready, slice(block_size)), source, form, owned)
        ready = replace(_cut(ready, slice(block_size, None)), dropped={}, assumed={})
    yield _transitions(ready, source, form, owned)


class _Numbering:
    """Gives consecutive rows explicit episode ids and steps, block after block, and the ends that max_episode_steps implies."""

    def __init__(self, options: Options) -> None:
        self.limit = options.max_episode_steps
        self.fresh = True
        self.id: Any = -1  # of the last row seen
        self.step = 0  # its own, where the log has steps
        self.position = -1  # of the last row in its episode, counted
        self.ended = True
        self.seen: set[Any] = set()

    def number(self, rows: Rows) -> Rows:
        n = len(rows)
        if n == 0:
            return rows
        arrays, assumed = dict(rows.arrays), dict(rows.assumed)
        unbounded = "truncated" not in arrays and "next_observations" not in arrays and self.limit is None
        if self.fresh and unbounded and "episode_ids" not in arrays:
            assumed[UNBOUNDED] = 1
        truncated = arrays["truncated"].copy() if "truncated" in arrays else np.zeros(n, bool)
        ends = arrays.get("done", arrays.get("terminated", truncated)) | truncated
        starts, shown = np.empty(n, bool), np.zeros(n, bool)
        if named := "episode_ids" in arrays:
            ids = arrays["episode_ids"]
            starts[0] = self.fresh or ids[0] != self.id
            starts[1:] = ids[1:] != ids[:-1]
            self._check_order(arrays, starts)
            after = np.flatnonzero(~starts & np.append(self.ended, ends[:-1]) & self._later(arrays))
            if len(after):
                what, number = ids[after[0]].item(), int(after[0])
                mend = "shuffled rows need a step_column; else give each episode its own id"
                got = f"an end and later steps after it, at row {number}"
                raise InputError("episode_ids", f"only the last step of episode {what!r} to end it", got, mend)
        else:
            starts[0], starts[1:] = self.ended, ends[:-1]
            starts |= arrays.get("starts", False)
            if "steps" in arrays:  # a step that does not increase begins an episode
                steps = arrays["steps"]
                back = np.diff(steps, prepend=steps[0] if self.fresh else self.step) <= 0
                back[0] &= not self.fresh
                shown = back & ~starts
                starts |= back
        position = np.arange(n) - np.maximum.accumulate(np.where(starts, np.arange(n), -1 - self.position))
        if self.limit is not None:
            at_limit = (position + 1) % self.limit == 0
            forced = at_limit & (~ends | (arrays["done"] & ~truncated if "done" in arrays else False))
            truncated |= forced
            if forced.any():
                assumed[LIMIT] = int(forced.sum())
            if not named:
                position %= self.limit
                starts[1:] |= forced[:-1]
                shown[1:] &= ~forced[:-1]
            ends = ends | forced
        if "done" in arrays:
            arrays["terminated"] = arrays.pop("done") & ~truncated
        arrays["truncated"] = truncated
        for name in ("starts", "times"):
            arrays.pop(name, None)
        if not named:
            arrays["episode_ids"] = self.id + np.cumsum(starts)
            if shown.any():
                assumed[RESTART] = int(shown.sum())
        arrays.setdefault("steps", position)
        self.id, self.step, self.position = arrays["episode_ids"][-1], arrays["steps"][-1], int(position[-1])
        self.ended, self.fresh = bool(ends[-1]), False
        return replace(rows, arrays=arrays, assumed=assumed)

    def _later(self, arrays: dict[str, Array]) -> Array:
        """Return where a row's step is later than that of the row before; without steps it always is."""
        steps = arrays.get("steps")
        return np.ones(len(arrays["rewards"]), bool) if steps is None else steps > np.append(self.step, steps[:-1])

    def _check_order(self, arrays: dict[str, Array], starts: Array) -> None:
        ids = arrays["episode_ids"]
        new = ids[starts].tolist()
        again = next((i for i in new if i in self.seen), None) if self.seen else None
        self.seen.update(new)
        if again is None and len(set(new)) < len(new):
            again = Counter(new).most_common(1)[0][0]
        steps, back = arrays.get("steps", arrays.get("times")), False
        if steps is not None:
            change = np.diff(steps, prepend=steps[0] if starts[0] or "times" in arrays else self.step)
            back = bool((change[~starts] < 0).any())
        if again is not None or back:
            got = "steps that go back" if again is None else f"episode {again!r} in two places"
            raise InputError("episode_ids", "rows sorted by episode and step, to stream them", got, "sort, or load at once")


def _checked(rows: Rows) -> Rows:
    """Return rows whose flags, ids and steps are arrays of the right kind and one length."""
    if not rows.arrays:
        raise InputError(*_EMPTY)
    arrays = dict(rows.arrays)
    n = len(fields.vector("rewards", arrays["rewards"]))
    for name in ("terminated", "truncated", "done", "starts"):
        if name in arrays:
            arrays[name] = fields.flags(name, arrays[name])
    if "episode_ids" in arrays:
        arrays["episode_ids"] = fields.identifiers("episode_ids", arrays["episode_ids"])
    if "steps" in arrays:
        steps = fields.finite("steps", fields.vector("steps", arrays["steps"]))
        if (steps == np.round(steps)).all():
            arrays["steps"] = fields.whole("steps", arrays["steps"])
        else:  # a clock: it orders the rows, and leaves their steps to be counted
            del arrays["steps"]
            arrays["times"] = steps
            rows = replace(rows, assumed={**rows.assumed, CLOCK: n})
    arrays = {name: fields.length(name, np.atleast_1d(value), n) for name, value in arrays.items()}
    return replace(rows, arrays=arrays)


def _sorted(rows: Rows) -> Rows:
    """Sort rows by episode (in order of appearance) and step; where the log has no ids, rows are in order."""
    if "episode_ids" not in rows.arrays or len(rows) == 0:
        return rows
    ids = rows.arrays["episode_ids"]
    steps = rows.arrays.get("steps", rows.arrays.get("times", np.zeros(len(ids), int)))
    same = ids[1:] == ids[:-1]
    if int((~same).sum()) + 1 == len(np.unique(ids)) and (np.diff(steps)[same] >= 0).all():
        return rows
    _, first, inverse = np.unique(ids, return_index=True, return_inverse=True)
    order = np.lexsort((steps, first[inverse]))
    pieces = int((~same).sum()) + 1 - len(first)
    assumed = {**rows.assumed, PIECES: pieces} if pieces and not {"steps", "times"} & set(rows.arrays) else rows.assumed
    return replace(rows, arrays={name: value[order] for name, value in rows.arrays.items()}, assumed=assumed)


def _finite_only(rows: Rows, options: Options) -> Rows:
    """Leave out rows with a number that is not finite, if asked to; the step numbers keep their neighbours apart."""
    if not options.drop_nonfinite or len(rows) == 0:
        return rows
    good = np.ones(len(rows), bool)
    for name in ("observations", "rewards", "actions", "discounts", "sample_weight", "next_observations", "next_actions"):
        if name in rows.arrays:
            finite = np.isfinite(fields.matrix(name, rows.arrays[name])).all(axis=1)
            good &= finite | rows.arrays["terminated"] if name.startswith("next_") else finite
    return rows if good.all() else _count(_cut(rows, good), {NONFINITE: int((~good).sum())})


def _with_successors(rows: Rows, hold: bool) -> Rows:
    """Return the rows that have a next observation or need none, with it; the others are counted.

    ``hold``: the last row is left out without being counted, since the rows that follow it are yet to come.
    """
    if "next_observations" in rows.arrays or len(rows) == 0:
        return rows
    arrays = dict(rows.arrays)
    states = arrays["observations"] = fields.matrix("observations", arrays["observations"])
    ids = arrays["episode_ids"]
    twice = np.flatnonzero((ids[1:] == ids[:-1]) & (np.diff(arrays["steps"]) == 0))
    if len(twice):
        content = (states, arrays["rewards"].reshape(len(rows), -1), arrays["terminated"][:, None])
        unequal = np.any([(field[twice] != field[twice + 1]).any(axis=1) for field in content], axis=0)
        if unequal.any():
            row, mend = int(twice[unequal][0]), "give each episode its own id, or store next observations"
            got = f"step {int(arrays['steps'][row])} of episode {ids[row].item()!r} twice, unequal"
            raise InputError("steps", "each step of an episode once", got, mend)
    follower = followers(np.cumsum(np.append(False, ids[1:] != ids[:-1])), arrays["steps"])
    followed, ends = follower >= 0, arrays["truncated"] & ~arrays["terminated"]
    # Where the last row is dropped, the record is cut one row earlier: its flag moves with the cut.
    arrays["truncated"] = arrays["truncated"] | (followed & (ends & ~followed)[follower])
    keep = followed | arrays["terminated"]
    lost = int((~keep[:-1] if hold else ~keep).sum())
    if hold:
        keep[-1] = False
    kept = np.flatnonzero(keep)
    successor = np.where(followed, follower, np.arange(len(rows)))[kept]
    if len(kept) < len(rows):
        arrays = {name: value[kept] for name, value in arrays.items()}
    arrays["next_observations"] = states[successor]
    return _count(replace(rows, arrays=arrays), {LOST: lost} if lost else {})


def _transitions(rows: Rows, source: str, form: str, owned: bool) -> Transitions:
    for value in rows.arrays.values() if owned else ():
        while isinstance(value, np.ndarray):
            value.flags.writeable = False  # else Transitions would copy what nobody else can write to
            value = value.base
    return Transitions(
        **rows.arrays,
        obs_names=rows.obs_names,
        source=source,
        format=form,
        dropped=rows.dropped,
        assumed=rows.assumed,
        unused=rows.unused,
    )


def _join(parts: list[Rows]) -> Rows:
    """Concatenate blocks; raises InputError where they do not fit together."""
    filled = [part for part in parts if len(part)] or parts[:1]
    if not filled:
        return Rows({})
    first = filled[0]
    counts = {name: _total(getattr(part, name) for part in parts) for name in ("dropped", "assumed")}
    if len(filled) == 1:
        return replace(first, **counts)
    wanted = {name: value.shape[1:] for name, value in first.arrays.items()}
    for part in filled[1:]:
        shapes = {name: value.shape[1:] for name, value in part.arrays.items()}
        if shapes != wanted or part.obs_names != first.obs_names:
            odd = next((n for n in sorted({*shapes, *wanted}) if shapes.get(n) != wanted.get(n)), "observations")
            number = part.arrays["episode_ids"][0] if "episode_ids" in part.arrays else "a later part"
            expected = f"{odd} of shape {wanted.get(odd)} per step, as in the first episode"
            got = f"{shapes.get(odd)}" if odd in shapes else f"no {odd}"
            raise InputError(f"episode {number}", expected, got, "all episodes need the same spaces")
    arrays = {name: np.concatenate([part.arrays[name] for part in filled]) for name in wanted}
    return replace(first, arrays=arrays, **counts)


def _cut(rows: Rows, index: Any) -> Rows:
    return replace(rows, arrays={name: value[index] for name, value in rows.arrays.items()})


def _count(rows: Rows, dropped: Mapping[str, int]) -> Rows:
    return replace(rows, dropped=_total([rows.dropped, dropped]))


def _total(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for count in counts:
        total.update(count)
    return dict(total)


def _with_last(items: Iterable[Rows]) -> Iterator[tuple[Rows, bool]]:
    """Yield each item and whether it is the last."""
    waiting: Rows | None = None
    for item in items:
        if waiting is not None:
            yield waiting, False
        waiting = item
    if waiting is not None:
        yield waiting, True
