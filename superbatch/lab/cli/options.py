"""Options that several commands share: how their help reads, and what a shell completes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ..recipes import RECIPES

OWN = "or your own file.py:function or package.module:function, whose code is run"
RECIPE_HELP = f"{', '.join(RECIPES)}; {OWN}"


def option(text: str, *flags: str) -> Any:
    """An option whose default is said in its help, if at all.

    Args:
        text: of the help.
        flags: its names, where they are not that of the parameter.

    Returns:
        What typer takes beside the type.
    """
    return typer.Option(*flags, help=text, show_default=False)


def complete_recipe(incomplete: str) -> list[str]:
    """Recipes that begin with what was typed: built in, and Python files of the working directory.

    Args:
        incomplete: what was typed.

    Returns:
        Names; a file ends with a colon, after which its function is typed.

    Examples:
        >>> complete_recipe("digits-c")
        ['digits-conv', 'digits-conv-bn']
    """
    files = [f"{path.name}:" for path in sorted(Path().glob("*.py"))]
    return [name for name in (*RECIPES, *files) if name.startswith(incomplete)]


def recipe_argument(*, default: str | None = None, show_default: bool = True) -> Any:
    """The argument that names a recipe.

    Args:
        default: said in its help.
        show_default: typer says the default of the parameter.

    Returns:
        What typer takes beside the type.
    """
    text = RECIPE_HELP if default is None else f"{RECIPE_HELP} (default: {default})"
    return typer.Argument(help=text, show_default=show_default, autocompletion=complete_recipe)


OptimizerName = Annotated[str | None, option("one that the recipe offers: sgd, momentum, adam, adamw")]
Data = Annotated[Path | None, option("folder of data, for the recipe mnist (IDX files)")]
Threads = Annotated[int | None, option("torch threads (default: as many as torch takes)")]
AsJson = Annotated[bool, option("print the report as JSON, and write files only if --out is given", "--json")]
