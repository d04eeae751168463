"""What a person can say about a log that its file does not: which column means what, and where episodes end."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from valueformer.errors import InputError

__all__ = ["CHOICE", "COLUMNS", "FLAGS", "MEANING", "NONE", "PLAIN", "TABLE", "Options", "in_order", "natural", "resolve"]

PLAIN = frozenset({"drop_nonfinite"})
CHOICE = PLAIN | {"obs_columns", "action_columns"}
MEANING = frozenset({"reward_column", "terminated_column", "truncated_column", "done_column"})
TABLE = CHOICE | MEANING | {"next_obs_columns", "episode_column", "step_column", "max_episode_steps"}
"""Options that formats understand: the one that all do; parts of a space; meanings of columns; all of those of a table."""
NONE = "none"
"""As a column name: there is no such event in this task."""

COLUMNS = {
    "observations": "obs_columns",
    "next_observations": "next_obs_columns",
    "actions": "action_columns",
    "rewards": "reward_column",
    "terminated": "terminated_column",
    "truncated": "truncated_column",
    "done": "done_column",
    "episode_ids": "episode_column",
    "steps": "step_column",
}
FLAGS = frozenset({"terminated_column", "truncated_column"})  # which may be "none"
_VECTORS = ("observations", "next_observations", "actions")

# Names that say the same: Gymnasium's for a step and for a batch of steps.
ALIASES: Mapping[str, tuple[str, ...]] = {
    "rewards": ("rewards", "reward"),
    "terminated": ("terminated", "terminations", "terminateds", "termination"),
    "truncated": ("truncated", "truncations", "truncateds", "truncation"),
    "episode_ids": ("episode_ids", "episode_id", "episode", "episode_index", "trajectory_id", "traj_id"),
    "starts": ("episode_starts", "is_first"),
    "steps": ("steps", "step", "timestep", "time_step", "step_index", "frame_index"),
    "discounts": ("discounts", "discount"),
    "sample_weight": ("sample_weight",),
}
# Names under which other libraries store the end of an episode. Ignoring one would join two episodes.
END_FLAGS = (
    "done", "dones", "terminal", "terminals", "is_terminal", "timeout", "timeouts", "timelimit.truncated", "is_last",
    "episode_terminals", "episode_ends", "end",
)  # fmt: skip

_PAIR = (("is_terminal", "terminals", "terminal"), ("timeouts", "timeout", "timelimit.truncated"))


@dataclass(frozen=True, kw_only=True)
class Options:
    """What :func:`valueformer.load` was told about a log; see there."""

    obs_columns: Sequence[str] | None = None
    next_obs_columns: Sequence[str] | None = None
    action_columns: Sequence[str] | None = None
    reward_column: str | None = None
    terminated_column: str | None = None
    truncated_column: str | None = None
    done_column: str | None = None
    episode_column: str | None = None
    step_column: str | None = None
    max_episode_steps: int | None = None
    autoreset: str | None = None
    drop_nonfinite: bool = False

    def __post_init__(self) -> None:
        for name in ("obs_columns", "next_obs_columns", "action_columns"):
            value: Any = getattr(self, name)
            if isinstance(value, str):
                value = value.split(",")
            if value is not None:
                patterns = tuple(str(pattern).strip() for pattern in value)
                if not patterns or not all(patterns):
                    raise InputError(name, "column names or patterns such as 'obs_*'", repr(value))
                object.__setattr__(self, name, patterns)
        limit = self.max_episode_steps
        if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 1):
            raise InputError("max_episode_steps", "a whole number >= 1", repr(limit))
        if self.autoreset not in (None, "next-step", "same-step"):
            raise InputError("autoreset", "'next-step' or 'same-step'", repr(self.autoreset))

    def given(self) -> list[str]:
        """Return the names of the options that were set."""
        return [f.name for f in dataclasses.fields(self) if getattr(self, f.name) != f.default]

    def check(self, accepted: frozenset[str], form: str) -> None:
        """Raise InputError for an option that a format does not understand: ignored, it would mislead."""
        if foreign := [name for name in self.given() if name not in accepted]:
            usable = ", ".join(sorted(accepted)) or "none"
            raise InputError(foreign[0], f"an option that the format {form} understands: {usable}", "another", "leave it out")

    def select(self, option: str, names: Sequence[str], source: str, taken: Iterable[str] = ()) -> list[str] | None:
        """Return the names that the patterns of ``option`` choose, numbered ones in numeric order; None if it is not set.

        A name with a wildcard skips those ``taken`` by other fields. Raises InputError where a pattern finds nothing.
        """
        patterns = getattr(self, option)
        if patterns is None:
            return None
        chosen: list[str] = []
        for pattern in patterns:
            if pattern in names:
                found = [pattern]
            else:
                found = natural([n for n in names if fnmatchcase(n, pattern) and n not in set(taken)])
            if not found:
                raise InputError(f"{source}: {option}", f"a column that fits {pattern!r}", _listed(names), "check the spelling")
            chosen += [name for name in found if name not in chosen]
        return chosen


def in_order(name: str) -> list[tuple[int, int, str]]:
    """Return a sort key under which numbers inside names count as numbers: part-2 before part-10."""
    return [(1, int(piece), "") if piece.isdigit() else (0, 0, piece) for piece in re.split(r"([0-9]+)", name)]


def natural(names: Sequence[str]) -> list[str]:
    """Return names that differ only in a trailing number in its order, and others as they are."""
    stems = {name.rstrip("0123456789") for name in names}
    if len(stems) == 1 and all(name[len(next(iter(stems))) :] for name in names):
        return sorted(names, key=lambda name: int(name[len(next(iter(stems))) :]))
    return list(names)


def resolve(names: Sequence[str], options: Options, source: str) -> dict[str, str]:
    """Decide which name holds which scalar field: ``{field: name}``, where ``done`` may be a field of its own.

    Raises InputError for a column that is not there, two columns for one field, an end flag whose meaning is not said, and
    missing rewards or terminal flags.
    """
    lower = {name.lower(): name for name in reversed(names)}
    found: dict[str, str] = {}
    for field, option in COLUMNS.items():
        if field in _VECTORS:
            continue
        if (asked := getattr(options, option)) is not None:
            if asked not in names and not (asked == NONE and option in FLAGS):
                raise InputError(f"{source}: {option}", "the name of a column", f"{asked!r}, not among {_listed(names)}")
            found[field] = asked
    for field, aliases in ALIASES.items():
        present = [lower[alias] for alias in aliases if alias in lower]
        if field in found or not present or (field == "terminated" and "done" in found):
            continue
        if len(present) > 1:
            mend = f"say which with {COLUMNS[field]}" if field in COLUMNS else "drop one"
            raise InputError(f"{source}: {field}", "one column", " and ".join(map(repr, present)), mend)
        if present[0] not in found.values():
            found[field] = present[0]
    pair = [next((lower[name] for name in group if name in lower), None) for group in _PAIR]
    if None not in pair and not {"terminated", "truncated", "done"} & set(found):
        found |= {"terminated": str(pair[0]), "truncated": str(pair[1])}  # each says what the other is not
    used = set(found.values())
    flag = next((name for name in names if name.strip().lower() in END_FLAGS and name not in used), None)
    if flag is not None and not ({"terminated", "truncated"} <= set(found) or "done" in found):
        raise InputError(
            f"{source}: {flag}",
            "the flags 'terminated' (a terminal state) and 'truncated' (a time limit)",
            f"{flag!r}, which alone does not say which ends are terminal",
            f"terminated_column={flag!r} if it marks terminal states, truncated_column={flag!r} if time limits, and 'none' for "
            f"what never happens; on the command line --terminated-column, --truncated-column",
        )
    if "done" in found and "truncated" not in found and options.max_episode_steps is None:
        mend = "add truncated_column or max_episode_steps (--truncated-column, --max-episode-steps), or use terminated_column"
        raise InputError(f"{source}: done_column", "a way to tell time limits from terminal states", "neither", mend)
    missing = [n for n in ("rewards", "terminated") if n not in found and not (n == "terminated" and "done" in found)]
    if missing:
        raise InputError(
            f"{source}: fields",
            "rewards and terminated" + ("" if "truncated" in found else " (and truncated, where there is a time limit)"),
            f"no {', '.join(missing)} among {_listed(names)}",
            "name them with reward_column, terminated_column (--reward-column, --terminated-column); 'none' for a task that "
            "never ends",
        )
    return found


def _listed(names: Sequence[str], most: int = 12) -> str:
    return (", ".join(map(repr, names[:most])) + (", .." if len(names) > most else "")) or "nothing"
