"""The errors that bad input raises."""

from __future__ import annotations


class InputError(ValueError):
    """Input that cannot be used: says what, what was expected, what was got and how to mend it, in one line."""

    def __init__(self, what: str, expected: str, got: str, mend: str = "") -> None:
        self.what, self.expected, self.got, self.mend = what, expected, got, mend
        super().__init__(f"{what}: expected {expected}, got {got}" + (f"; {mend}" if mend else ""))

    def __reduce__(self) -> tuple[type, tuple[str, str, str, str]]:
        return type(self), (self.what, self.expected, self.got, self.mend)


class MissingExtraError(ImportError):
    """An optional dependency is absent: names the extra that brings it."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"{package} is not installed; install it with: pip install 'valueformer[{extra}]'")
