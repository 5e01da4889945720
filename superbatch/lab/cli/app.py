"""The Typer application: its commands, and the conversion of errors to messages and exit codes.

Commands import torch and matplotlib when they run, so that ``superbatch --help`` answers at once.
"""

from __future__ import annotations

import os
import sys
import traceback as tracebacks
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from superbatch._version import __version__
from superbatch.errors import SuperbatchError

from .advise import advise
from .caffe import caffe
from .compare import compare
from .exits import WRONG_INPUT
from .help import OVERVIEW, Command, Group, paragraphs, usage_text
from .init import init
from .measure import fit, noise, survey
from .options import command_of
from .study import study
from .train import train
from .verify import verify

app = typer.Typer(
    name="superbatch",
    cls=Group,
    help="Exact gradient accumulation: the update of the real large batch, on the memory you have.",
    invoke_without_command=True,
    pretty_exceptions_enable=False,
)

for _function in (advise, caffe, compare, fit, init, noise, study, survey, train, verify):
    app.command(_function.__name__, cls=Command, help=paragraphs(_function))(command_of(_function))


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"superbatch {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="print the version")
    ] = False,
    traceback: Annotated[
        bool,
        typer.Option(
            "--traceback", help="show the traceback of an error; allowed anywhere, with any command"
        ),
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        print(OVERVIEW)


TRACEBACK = "--traceback"
COMPLETION = "_SUPERBATCH_COMPLETE"

# Raised by Typer for an unknown option or a wrong type; some releases have no public name for it.
_UsageError: Any = typer.BadParameter.__mro__[1]


def main(arguments: Sequence[str]) -> int:
    """Run a command and return its exit code; print an error of superbatch or of a recipe as one line.

    Other errors are raised, with their traceback.

    Examples:
        >>> main(["--version"])
        superbatch ...
        0
    """
    with_traceback = TRACEBACK in arguments
    given = [argument for argument in arguments if argument != TRACEBACK]
    if COMPLETION in os.environ:  # the shell asks for completions
        app(args=given, prog_name="superbatch")
    command = typer.main.get_command(app)
    try:
        # Not app(), which handles Ctrl-C and a closed pipe itself: it exits without a message.
        with command.make_context("superbatch", given) as context:
            return command.invoke(context) or 0
    except typer.Exit as done:
        return done.exit_code
    except _UsageError as error:
        return _fail(usage_text(error))
    except Exception as error:  # a recipe is code of the user, which may raise anything
        from ..recipes.failing import recipe_failure

        failure = error if isinstance(error, SuperbatchError) else recipe_failure(error)
        if failure is None:  # a bug of superbatch or of a library: its traceback is needed
            raise
        if with_traceback:
            tracebacks.print_exc()
        return _fail(str(failure))


def _fail(text: str) -> int:
    print(f"superbatch: {text}", file=sys.stderr)
    return WRONG_INPUT
