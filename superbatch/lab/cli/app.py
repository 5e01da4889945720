"""The application: which commands there are, and what becomes of errors.

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
from .fit import fit
from .help import OVERVIEW, Command, Group, paragraphs, usage_text
from .init import init
from .noise import noise
from .options import command_of
from .study import study
from .survey import survey
from .train import train
from .verify import verify

app = typer.Typer(
    name="superbatch",
    cls=Group,
    help="Exact gradient accumulation: the update of the real large batch, on the memory you have.",
    invoke_without_command=True,
    pretty_exceptions_enable=False,
)


# One per command; each lies in a file of its own.
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
        typer.Option("--traceback", help="show the traceback of an error; for all commands, at any place"),
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        print(OVERVIEW)


TRACEBACK = "--traceback"
COMPLETION = "_SUPERBATCH_COMPLETE"

# What typer raises for an unknown option or a value of the wrong type; it has no public name in all releases.
_UsageError: Any = typer.BadParameter.__mro__[1]


def main(arguments: Sequence[str]) -> int:
    """Run a command, and turn errors of ours and of the user's own code into one line and an exit code.

    Examples:
        >>> main(["--version"])
        superbatch ...
        0
    """
    shown = TRACEBACK in arguments
    given = [argument for argument in arguments if argument != TRACEBACK]
    if COMPLETION in os.environ:  # the shell asks for names
        app(args=given, prog_name="superbatch")
    command = typer.main.get_command(app)
    try:
        # Not app(): it would answer Ctrl-C and a closed pipe itself, with a silent exit code.
        with command.make_context("superbatch", given) as context:
            return command.invoke(context) or 0
    except typer.Exit as done:
        return done.exit_code
    except _UsageError as error:
        return _fail(usage_text(error))
    except Exception as error:  # a recipe is the user's code, which may raise anything
        from ..recipes.failing import recipe_failure

        failure = error if isinstance(error, SuperbatchError) else recipe_failure(error)
        if failure is None:  # an error of superbatch or of a library, whose traceback is wanted
            raise
        if shown:
            tracebacks.print_exc()
        return _fail(str(failure))


def _fail(text: str) -> int:
    print(f"superbatch: {text}", file=sys.stderr)
    return WRONG_INPUT
