"""Typer commands from functions and dataclasses of options; arguments and options that commands share."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import Field, fields
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from superbatch.errors import InputError

from ..recipes import COUPLED, RECIPES

# A recipe is a program: the help warns that its code runs.
OWN = "or your own file.py:function or package.module:function, whose code is run"
RECIPE_HELP = f"{', '.join(RECIPES)}; {OWN}"


def command_of(function: Callable[..., int | None]) -> Callable[..., int | None]:
    """Return a function for Typer, with one parameter for each field of the parameter `options`.

    Typer reads names, types and defaults from the signature and passes the values by keyword. The returned
    function makes an object of the dataclass from them and calls `function` with it.
    """
    hints = get_type_hints(function, include_extras=True)
    if "options" not in hints:
        return function
    kind, own, types = hints["options"], fields(hints["options"]), get_type_hints(hints["options"])
    parameters: list[inspect.Parameter] = []
    for each in inspect.signature(function).parameters.values():
        if each.name == "options":
            parameters += [_parameter(field, types[field.name]) for field in own]
        else:
            parameters.append(each.replace(annotation=hints[each.name]))

    def command(**given: Any) -> int | None:
        for field in own:
            if given[field.name] is not None:
                given[field.name] = field.metadata["read"](given[field.name], _flag(field))
        chosen = kind(**{field.name: given.pop(field.name) for field in own})
        try:
            return function(options=chosen, **given)
        except InputError as error:
            raise InputError(with_flags(str(error), {field.name: _flag(field) for field in own})) from error

    command.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportFunctionMemberAccess]
    command.__annotations__ = {each.name: each.annotation for each in parameters}
    return command


def _parameter(field: Field[Any], hint: Any) -> inspect.Parameter:
    """Return the parameter of a command for a field of its options."""
    text, default, typed = (field.metadata[key] for key in ("help", "default", "typed"))
    # Typer adds a second flag, --no-..., to a bool whose name is not stated.
    names = [_flag(field)] if field.metadata["name"] or hint is bool else []
    stated = default is None or "(default: " in text
    option = typer.Option(*names, help=text, show_default=not stated)
    if typed is not None:
        hint = typed if default is not None else typed | None
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(field.name, kind, default=default, annotation=Annotated[hint, option])


def with_flags(text: str, flags: Mapping[str, str]) -> str:
    """Return the text of an error with the flags of options in place of their names in Python.

    Examples:
        >>> with_flags("learning_rate=-1.0 is not positive.", {"learning_rate": "--lr"})
        '--lr=-1.0 is not positive.'
    """
    return re.sub(r"\b(\w+)=", lambda found: f"{flags.get(found[1], found[1])}=", text)


def _flag(field: Field[Any]) -> str:
    return field.metadata["name"] or f"--{field.name.replace('_', '-')}"


def option(text: str, *flags: str) -> Any:
    """Return a Typer option whose help text states its default."""
    return typer.Option(*flags, help=text, show_default=False)


def complete_recipe(incomplete: str) -> list[str]:
    """Return completions of a recipe: built-in names, and Python files of the working directory.

    Examples:
        >>> complete_recipe("digits-c")
        ['digits-conv', 'digits-conv-bn']
    """
    files = [f"{path.name}:" for path in sorted(Path().glob("*.py"))]
    return [name for name in (*RECIPES, *COUPLED, *files) if name.startswith(incomplete)]


def recipe_argument(*, default: str | None = None) -> Any:
    """Return the Typer argument for a recipe; its help names the `default` if the argument may be omitted."""
    text = RECIPE_HELP if default is None else f"{RECIPE_HELP} (default: {default})"
    return typer.Argument(help=text, show_default=default is None, autocompletion=complete_recipe)


def out_option(default: str, files: str = "report.json, plot.png and report.html") -> Any:
    """Return the Typer option for the folder of a report."""
    return option(f"folder for {files} (default: {default})")


Recipe = Annotated[str, recipe_argument()]
AsJson = Annotated[bool, option("print the report as JSON, and write files only if --out is given", "--json")]
