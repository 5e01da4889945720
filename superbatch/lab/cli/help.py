"""Help and usage errors: unwrapped paragraphs, flags without a type, suggestions for typos."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from typer.core import TyperCommand, TyperGroup

from superbatch._version import __version__

OVERVIEW = f"""\
superbatch {__version__}: exact gradient accumulation

See it:
  superbatch compare                     the real batch and splits of it, trained side by side
Use it on your model:
  superbatch init recipe.py              write a recipe to fill in: model, data, loss
  superbatch verify recipe.py:recipe     is the accumulated gradient that of the batch?
  superbatch fit recipe.py:recipe        which micro-batch fits, and which is fastest?
  superbatch train recipe.py:recipe      train it, with checkpoints and logs
Choose a batch:
  superbatch advise recipe.py:recipe     does accumulation pay?
  superbatch noise recipe.py:recipe      is a larger batch worth it?
  superbatch survey recipe.py:recipe     which learning rate?
More:
  superbatch study                       open questions, answered on this machine
  superbatch caffe solver.prototxt       explain a Caffe solver file

superbatch COMMAND --help lists the options; superbatch --install-completion sets up tab completion."""


def paragraphs(function: Callable[..., Any]) -> str:
    r"""Return the docstring of a command with one line per paragraph; a terminal wraps them at its width.

    Examples:
        >>> def command():
        ...     '''Do one thing.
        ...
        ...     It takes
        ...     two lines.
        ...     '''
        >>> paragraphs(command)
        'Do one thing.\n\nIt takes two lines.'
    """
    text = inspect.getdoc(function) or ""
    return "\n\n".join(" ".join(each.split()) for each in text.split("\n\n"))


class _PlainFlags:
    """Mixin for a command whose help shows no type beside a flag."""

    def get_params(self, ctx: Any) -> Any:
        parameters = super().get_params(ctx)  # pyright: ignore[reportAttributeAccessIssue]
        for parameter in parameters:
            if getattr(parameter, "is_flag", False) and parameter.metavar is None:
                parameter.metavar = ""  # Typer would show <bool>
        return parameters


class Command(_PlainFlags, TyperCommand):
    """Command without types beside its flags."""


class Group(_PlainFlags, TyperGroup):
    """Group of commands without types beside its flags."""


def usage_text(error: Any) -> str:
    """Return the text of a usage error: the mistake, the closest names, and the command that prints help."""
    meant = [*(getattr(error, "possibilities", None) or ())][:2]  # Typer sorts them, the closest first
    wrong = " ".join((error.message if meant else error.format_message()).split()).rstrip(".")
    if meant:
        wrong += f". Did you mean {' or '.join(meant)}?"
    command = getattr(getattr(error, "ctx", None), "command_path", "superbatch")
    return f"{wrong}{'' if wrong.endswith('?') else '.'} See {command} --help."
