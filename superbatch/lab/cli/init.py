"""`superbatch init FILE`: write a recipe to fill in."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer

from superbatch.errors import InputError

from .printing import write_file

File = Annotated[Path, typer.Argument(help="file to write")]


def init(file: File = Path("recipe.py")) -> None:
    """Write a commented recipe that runs unchanged: replace its model, data and loss with your own.

    An existing file is never overwritten. Exit code: 0 done, 2 wrong input.
    """
    if file.suffix != ".py":
        raise InputError(f"{str(file)!r} is not the name of a Python file. Give a name such as recipe.py.")
    if file.exists():
        raise InputError(f"{str(file)!r} already exists. Name another file, or move this one away.")
    text = files("superbatch.lab.recipes").joinpath("template.py").read_text(encoding="utf-8")
    try:
        write_file(file, text.replace("recipe.py:recipe", f"{file}:recipe"))
    except OSError as error:
        raise InputError(f"{str(file)!r} cannot be written: {error.strerror}. Name another file.") from error
    print(f"wrote {file}; it runs unchanged:\n\n  superbatch verify {file}:recipe")
