"""``gymnasium:ENV?episodes=10&policy=..`` and ``metaworld:TASK?noise=high``: logs collected on first use, kept in a cache."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from pathlib import Path
from urllib.parse import parse_qsl, urlencode

from rich.console import Console

from valueformer.collection import Request, run
from valueformer.errors import InputError

__all__ = ["cache_folder", "parse", "resolve", "text"]

_WHOLE = {"episodes", "goals", "seed", "max_steps"}


def parse(scheme: str, text: str) -> Request:
    """Return the request that ``NAME?key=value&..`` makes; keys are the fields of Request."""
    name, _, query = text.partition("?")
    known = [f.name for f in dataclasses.fields(Request) if f.name not in ("scheme", "name")]
    values: dict[str, object] = {}
    for key, value in parse_qsl(query, keep_blank_values=True):
        key = key.replace("-", "_")
        if key not in known or key in values:
            raise InputError(
                f"{scheme}:{text}", f"keys {', '.join(known)}, each once", repr(key), "for example ?episodes=20&seed=1"
            )
        if key in _WHOLE and not (value.isascii() and value.isdecimal()):
            raise InputError(f"{scheme}:{text}", f"{key}= a whole number", repr(value))
        values[key] = int(value) if key in _WHOLE else value
    return Request(scheme=scheme, name=name, **values)  # pyright: ignore[reportArgumentType]  # checked there


def text(request: Request) -> str:
    """Return the text that :func:`parse` turns into this request."""
    fields = {k: v for k, v in dataclasses.asdict(request).items() if k not in ("scheme", "name") and v is not None}
    return f"{request.name}?{urlencode(fields)}"


def cache_folder() -> Path:
    """Return where collected logs are kept: VALUEFORMER_CACHE, or ``valueformer`` in the user's cache folder."""
    own = os.environ.get("VALUEFORMER_CACHE")
    return Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "valueformer"


def resolve(scheme: str, text: str) -> Path:
    """Return the folder of the log that a name asks for, collecting it where it is not there yet, and saying so on stderr."""
    request = parse(scheme, text)
    document = json.dumps(request.document(), sort_keys=True)
    name = "".join(c if c.isalnum() or c in "-_." else "-" for c in request.name[:60])
    folder = cache_folder() / f"{scheme}-{name}-{hashlib.sha256(document.encode()).hexdigest()[:12]}"
    if not (folder / "data" / "main_data.hdf5").is_file():
        console = Console(stderr=True, highlight=False)
        console.print(
            f"collecting {request.episodes} episodes of {scheme}:{request.name} into {folder}", markup=False, soft_wrap=True
        )
        try:
            run(request, folder)
        except InputError:
            if not (folder / "data" / "main_data.hdf5").is_file():  # else another process was faster
                raise
        except OSError as error:
            mend = "set VALUEFORMER_CACHE to a folder that can be written to"
            raise InputError(str(folder), "a cache folder", error.strerror or str(error), mend) from None
    return folder
