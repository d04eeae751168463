"""Where logs come from: one module per origin, and :func:`load`, which dispatches on content rather than on file names."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypedDict, overload

from numpy.typing import NDArray
from typing_extensions import Unpack

from valueformer import fields
from valueformer.errors import InputError, MissingExtraError
from valueformer.sources import (
    alignment,
    columns,
    d3rlpy,
    d4rl,
    hdf5,
    lerobot,
    memory,
    minari,
    npz,
    rlds,
    samples,
    simulated,
    tables,
)
from valueformer.sources.alignment import Rows
from valueformer.sources.options import CHOICE, MEANING, PLAIN, TABLE, Options
from valueformer.transitions import Transitions

__all__ = ["FORMATS", "TABLES", "Options", "Source", "load", "load_observations"]

BLOCK_SIZE = 32_768


@dataclass(frozen=True)
class Source:
    """A file format: how to recognise it by content, how to read it in blocks, and the options that it understands."""

    name: str
    recognises: Callable[[Path], bool]
    blocks: Callable[[Path, Options, int | None], Iterator[Rows]]
    accepts: frozenset[str] = PLAIN


FORMATS = (
    Source("minari-hdf5", minari.recognises, minari.blocks, CHOICE),
    Source("minari-arrow", minari.recognises_partitions, minari.partition_blocks, CHOICE),
    Source("d3rlpy-v2", d3rlpy.recognises, d3rlpy.blocks),
    Source("d3rlpy-v1", d3rlpy.recognises_v1, d3rlpy.v1_blocks, PLAIN | {"max_episode_steps"}),
    Source("d4rl", d4rl.recognises, d4rl.blocks, TABLE),
    Source("hdf5", d4rl.recognises_arrays, d4rl.flat_blocks, TABLE),
    Source("npz", npz.recognises, npz.blocks, TABLE | {"autoreset"}),
    Source("lerobot", lerobot.recognises, lerobot.blocks, CHOICE | MEANING),
    Source("rlds-records", rlds.recognises_records, rlds.record_blocks, CHOICE),
    Source("rlds-table", rlds.recognises_table, rlds.table_blocks, CHOICE),
)
# Any table is one of steps, unless its columns are those of a format above; text is recognised by elimination.
TABLES = (
    Source("parquet", columns.is_parquet, tables.blocks, TABLE),
    Source("arrow", columns.is_arrow, tables.blocks, TABLE),
    Source("csv", columns.is_text, tables.blocks, TABLE),
)
_BY_NAME = {source.name: source for source in (*FORMATS, *TABLES)}
SCHEMES: Mapping[str, Callable[[str], Transitions | Path]] = {
    "sample": samples.load,
    "minari": minari.resolve_id,
    "gymnasium": partial(simulated.resolve, "gymnasium"),
    "metaworld": partial(simulated.resolve, "metaworld"),
}


class Reading(TypedDict, total=False):
    """The options of :func:`load` that say what a log's columns mean."""

    obs_columns: str | Sequence[str] | None
    next_obs_columns: str | Sequence[str] | None
    action_columns: str | Sequence[str] | None
    reward_column: str | None
    terminated_column: str | None
    truncated_column: str | None
    done_column: str | None
    episode_column: str | None
    step_column: str | None
    max_episode_steps: int | None
    autoreset: Literal["next-step", "same-step"] | None
    drop_nonfinite: bool


@overload
def load(source: Any, *, format: str | None = ..., stream: Literal[False] = ..., **options: Unpack[Reading]) -> Transitions: ...
@overload
def load(
    source: Any, *, format: str | None = ..., stream: Literal[True], block_size: int = ..., **options: Unpack[Reading]
) -> Iterator[Transitions]: ...
def load(
    source: Any,
    *,
    format: str | None = None,
    stream: bool = False,
    block_size: int = BLOCK_SIZE,
    **options: Unpack[Reading],
) -> Transitions | Iterator[Transitions]:
    """Read logged transitions from a path, a ``scheme:name``, a data frame, a mapping of arrays, or Transitions.

    Files: Minari, D4RL, d3rlpy, LeRobot, RLDS, Parquet, Arrow, CSV, NPZ, told apart by content. In memory: pandas, polars,
    Arrow, arrays, tensors, rollouts (T, E, ..), TensorDict, the buffers of d3rlpy and Stable-Baselines3. User files are never
    unpickled.

    - ``format``: the name of a file format (:data:`FORMATS`, :data:`TABLES`), where content fits several.
    - ``stream``: yield Transitions of at most ``block_size`` rows instead, aligned across their borders; HDF5 and tables are
      then never in memory as a whole. Rows must be in order.
    - ``obs_columns``, ``next_obs_columns``, ``action_columns``: names or patterns (``"joint_*,gripper"``).
    - ``reward_column``, ``terminated_column``, ``truncated_column``, ``episode_column``, ``step_column``: names. For a flag,
      ``"none"`` says that this end never happens.
    - ``done_column``: an end of either kind, which ``truncated_column`` or ``max_episode_steps`` tells apart.
    - ``max_episode_steps``: the time limit, where no flag marks it.
    - ``autoreset``: ``"next-step"`` or ``"same-step"``, for rollouts of vector environments.
    - ``drop_nonfinite``: leave out rows with NaN or infinity, and count them.

    Raises InputError where nothing is found, the format is unknown or ambiguous, an option is not understood by it, or the
    content would make values wrong; MissingExtraError where a reader is not installed.
    """
    try:
        chosen = Options(**options)  # pyright: ignore[reportArgumentType]  # text is split there
    except TypeError:
        odd = next((name for name in options if name not in Options.__dataclass_fields__), "")
        raise InputError("load", f"one of {', '.join(Options.__dataclass_fields__)}", repr(odd), "see help(vf.load)") from None
    if not isinstance(block_size, int) or isinstance(block_size, bool) or block_size < 1:
        raise InputError("block_size", "a whole number >= 1", repr(block_size))
    if format is not None and str(format) not in _BY_NAME:
        raise InputError("format", f"one of {', '.join(_BY_NAME)}", repr(format))
    size = block_size if stream else None
    if isinstance(source, (str, os.PathLike)):
        scheme, colon, rest = str(source).partition(":")
        found = SCHEMES[scheme](rest) if colon and scheme in SCHEMES else Path(source)
        if isinstance(found, Path):
            return _file(found, str(source) or "''", format, size, chosen)
        source = found
    if format is not None:
        raise InputError("format", "a file", f"{format!r} for what is none", "leave it out")
    if isinstance(source, Transitions):
        if given := chosen.given():
            raise InputError(given[0], "a file or table to read", f"{source.source!r}, whose meaning is settled")
        return (source[i : i + block_size] for i in range(0, len(source), block_size)) if stream else source
    return _read(f"{type(source).__name__} in memory", "log", lambda: memory.rows(source, chosen), size, chosen, owned=False)


def _file(path: Path, shown: str, form: str | None, size: int | None, options: Options) -> Transitions | Iterator[Transitions]:
    path = _existing(path, shown)
    try:
        source = _recognised(path, shown, form)
    except OSError as error:
        raise InputError(shown, "a readable file", error.strerror or str(error)) from None
    options.check(source.accepts, source.name)
    blocks = source.blocks
    return _read(path, f"{source.name} file", lambda: (str(path), source.name, blocks(path, options, size)), size, options)


def _read(
    where: Path | str,
    what: str,
    opened: Callable[[], tuple[str, str, Iterable[Rows]]],
    size: int | None,
    options: Options,
    owned: bool = True,
) -> Transitions | Iterator[Transitions]:
    """Return a log whole (``size`` None) or as a stream; ``opened`` gives its source, its format and its rows."""

    def parts() -> Iterator[Transitions]:
        source, form, rows = opened()
        if size is None:
            yield alignment.whole(rows, source=source, form=form, options=options, owned=owned)
        else:
            rows = alignment.regroup(rows, size)
            yield from alignment.stream(rows, source=source, form=form, options=options, block_size=size, owned=owned)

    return next(_guarded(where, what, parts)) if size is None else _guarded(where, what, parts)


def _guarded(where: Path | str, what: str, read: Callable[[], Iterator[Transitions]]) -> Iterator[Transitions]:
    """Yield what ``read`` yields; whatever a parser raises on damage becomes one InputError that names the source."""
    try:
        yield from read()
    except InputError as error:  # name the file, once
        if isinstance(where, str) or str(where) in error.what:
            raise
        raise InputError(f"{where}: {error.what}", error.expected, error.got, error.mend) from error
    except MissingExtraError:
        raise
    except MemoryError as error:
        raise InputError(str(where), "a log that fits into memory", "more", "stream it (stream=True)") from error
    except Exception as error:  # parsers have many errors of their own; the cause stays attached
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        if isinstance(where, str):
            raise InputError(where, "a log", f"an object that cannot be read as one ({reason})", "see help(vf.load)") from error
        mend = "check it with its own tools, or export it again"
        raise InputError(str(where), f"a readable {what}", f"a damaged one ({reason})", mend) from error


def _existing(path: Path, shown: str) -> Path:
    try:
        path = path.expanduser()
        exists = path.exists()
    except (OSError, RuntimeError, ValueError) as error:
        raise InputError(shown, "a path", str(error), "check the path") from None
    if not exists or shown == "''":
        mend = "check the path; bundled logs are listed by `valueformer samples`"
        raise InputError(shown, "an existing file or folder", "nothing there", mend)
    if not os.access(path, os.R_OK):
        raise InputError(shown, "a readable file", "no permission to read it")
    return path


def _recognised(path: Path, shown: str, form: str | None) -> Source:
    """Return the one format that the content fits; raises InputError if there is none, or more than one."""
    if form is not None:
        return _BY_NAME[form]
    found = [source for source in FORMATS if source.recognises(path)]
    if not found:
        found = [source for source in TABLES if source.recognises(path)][:1]
    if len(found) > 1:
        candidates = ", ".join(source.name for source in found)
        raise InputError(shown, "one format", f"content that fits {candidates}", "say which: format='..' (--format)")
    if found:
        return found[0]
    if path.is_dir():
        known = "a folder of Minari (data/main_data.hdf5), LeRobot (meta/info.json) or RLDS (features.json)"
        raise InputError(shown, known, "another folder", "name the file inside it")
    if hdf5.is_hdf5(path):
        known = (
            "HDF5 of Minari (episode_0, ..), D4RL (observations, terminals, ..), d3rlpy, or observations, rewards, terminated"
        )
        raise InputError(shown, known, hdf5.describe(path), "name its arrays alike, or write a table")
    kind = "an empty file" if path.is_file() and path.stat().st_size == 0 else "unknown content"
    raise InputError(shown, f"one of {', '.join(_BY_NAME)}", kind, "convert it to Parquet, CSV or NPZ")


def load_observations(path: Path, names: Sequence[str] | None = None) -> NDArray[Any]:
    """Read states ``(m, d)`` to ask about: an array ``observations`` in NPZ or NPY, or ``obs_*`` columns of a table.

    Columns are matched to ``names``, the features of the log, where it has them; otherwise they must be numbered. Raises
    InputError where there is no such file, array or column, or a number is not finite.
    """
    try:
        readable = path.is_file()
    except OSError:
        readable = False
    if not readable:
        raise InputError(str(path) or "''", "a file of observations", "no such file", "check the path")
    if npz.is_npy(path):
        found = npz.read_npy(path)
    elif npz.recognises(path):
        arrays = npz.read_arrays(path)
        if "observations" not in arrays:
            raise InputError(f"{path}: arrays", "'observations'", ", ".join(map(repr, arrays)) or "none")
        found = arrays["observations"]
    else:
        found = _table_observations(path, names)
    return fields.finite(f"{path}: observations", fields.matrix(f"{path}: observations", found))


def _table_observations(path: Path, names: Sequence[str] | None) -> NDArray[Any]:
    try:
        columns = tables.read_columns(path)
    except InputError:
        raise
    except Exception as error:  # whatever a parser raises on a damaged file
        reason = " ".join(str(error).split())[:200]
        raise InputError(str(path), "a readable table", f"a damaged one ({reason})", "export it again") from error
    given = tables.suffixes(list(columns), "obs")
    wanted = list(names) if names is not None else [str(i) for i in range(len(given))]
    if names is not None and not given and set(wanted) <= set(columns):  # named as the log's own columns are
        return tables.gather({f"obs_{name}": columns[name] for name in wanted}, "obs", source=str(path), order=wanted)
    if given and given != [""] and set(given) != set(wanted):
        shown = ", ".join(f"obs_{name}" for name in wanted[:4]) + (" .." if len(wanted) > 4 else "")
        lacking = [f"no obs_{name}" for name in wanted if name not in given]
        foreign = [f"obs_{name}" for name in given if name not in wanted]
        got = ", ".join([*lacking[:3], *foreign[:3]])
        raise InputError(f"{path}: columns", f"those of the log: {shown}", got, "name them alike; the order is free")
    return tables.gather(columns, "obs", source=str(path), order=None if given == [""] else wanted if given else None)
