"""How much a file may unpack to: a few kilobytes can claim terabytes."""

from __future__ import annotations

import os

from valueformer.errors import InputError

__all__ = ["check_size", "max_bytes"]

_VARIABLE = "VALUEFORMER_MAX_BYTES"
_DEFAULT = 8 * 2**30


def max_bytes() -> int:
    """Return the largest size in bytes that one read may take in memory: VALUEFORMER_MAX_BYTES, or 8 GiB."""
    text = os.environ.get(_VARIABLE, "")
    if not text:
        return _DEFAULT
    if not (text.isascii() and text.isdecimal() and int(text) > 0):
        raise InputError(_VARIABLE, "a whole number of bytes > 0", repr(text))
    return int(text)


def check_size(where: str, size: int, *, streams: bool = True) -> None:
    """Raise InputError if ``size`` bytes are more than :func:`max_bytes`; ``streams``: whether reading in blocks would help."""
    if size > (limit := max_bytes()):
        mend = ("stream it (stream=True), or " if streams else "") + f"set the environment variable {_VARIABLE}"
        raise InputError(where, f"at most {limit / 2**30:.3g} GiB when unpacked", f"{size / 2**30:.3g} GiB", mend)
