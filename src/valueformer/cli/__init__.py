"""The command line: ``valueformer evaluate | diagnose | inspect | collect | convert | samples | weights | pretrain | bench``.

Exit 0: done. Exit 1: a result whose status is diverged or singular. Exit 2: bad usage or input, in one line on stderr.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any

import typer

from valueformer.cli import bench, data, pretraining, values
from valueformer.errors import InputError, MissingExtraError

__all__ = ["app", "main"]

app = typer.Typer(
    name="valueformer",
    help="Policy evaluation by in-context learning: values of a log's policy, with no training.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
for command in (
    values.evaluate,
    values.diagnose,
    data.inspect,
    data.collect,
    data.convert,
    data.samples,
    data.weights,
    pretraining.pretrain,
):
    app.command()(command)
app.add_typer(bench.app, name="bench")

_INTERRUPTED = 130  # the shell's code for Ctrl-C
_UsageError: Any = typer.BadParameter.__mro__[1]  # click's, or the copy of it that newer versions of typer carry


def _version(wanted: bool) -> None:
    if wanted:
        from valueformer.version import __version__

        typer.echo(f"valueformer {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    """Read the global options."""


def main() -> None:
    """Run the command line; bad usage and bad input end in one line and exit code 2."""
    try:
        code = app(sys.argv[1:] or ["--help"], standalone_mode=False)
        sys.stdout.flush()
    except _UsageError as error:
        code = _fail(error.format_message())
    except (InputError, MissingExtraError) as error:
        code = _fail(str(error))
    except OSError as error:  # standard output: a full disk, or a closed pipe
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # else the interpreter tries once more to flush it, and fails
        code = _fail(f"{error.filename or 'standard output'}: {error.strerror or error}")
    except (typer.Abort, KeyboardInterrupt):
        code = _INTERRUPTED
    if code == _INTERRUPTED:
        sys.stderr.write("interrupted\n")
    sys.exit(code)


def _fail(message: str) -> int:
    sys.stderr.write("error: " + " ".join(message.split()) + "\n")
    return 2
