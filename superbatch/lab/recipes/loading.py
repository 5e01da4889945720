"""Load a recipe by its name, or the user's own by import path."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from superbatch.errors import InputError, SuperbatchError

from .nearest import did_you_mean
from .recipe import Recipe

# Built-in recipes: name -> import path of its function, and a short description.
RECIPES: Mapping[str, tuple[str, str]] = {
    "digits": ("superbatch.lab.recipes.digits:digits", "perceptron on scikit-learn's digits"),
    "digits-bn": ("superbatch.lab.recipes.digits:digits_bn", "the same with BatchNorm (coupled)"),
    "digits-conv": ("superbatch.lab.recipes.digits:digits_conv", "small convolutional net on the digits"),
    "digits-conv-bn": ("superbatch.lab.recipes.digits:digits_conv_bn", "the same with BatchNorm (coupled)"),
    "text": ("superbatch.lab.recipes.text:text", "byte language model, mean over tokens"),
    "pairs": ("superbatch.lab.recipes.pairs:pairs", "contrastive pairs of digits (coupled)"),
    "mnist": ("superbatch.lab.recipes.mnist:mnist", "perceptron on a folder of IDX files (--data)"),
}

# Built-in recipes of the study `coupled`, with several ways to make the update.
COUPLED: Mapping[str, tuple[str, str]] = {
    "code-search": ("superbatch.lab.recipes.coupled.code_search:code_search", "docstrings and code, InfoNCE"),
    "counting": ("superbatch.lab.recipes.coupled.counting:counting", "spots in images, BatchNorm"),
    "fairness": ("superbatch.lab.recipes.coupled.fairness:fairness", "a penalty on the gap of two groups"),
    "ring": ("superbatch.lab.recipes.coupled.ring:ring", "a generator, sliced Wasserstein distance"),
    "token-means": ("superbatch.lab.recipes.coupled.token_means:token_means", "means over tokens"),
}

# Recipes that read a folder of data; mnist has no data without one.
TAKES_DATA = ("mnist", "code-search", "counting", "token-means")


def load_recipe(name: str, *, data: str | Path | None = None) -> Recipe:
    """Return a built-in recipe, or the user's own from ``package.module:function`` or ``file.py:function``.

    The user's function is called without arguments and returns a `Recipe`. While its module is imported,
    ``sys.path`` contains the folder of the file, or the working directory for a module.

    Args:
        name: name of the recipe.
        data: folder of data, for the recipes in `TAKES_DATA`.

    Returns:
        The recipe.

    Raises:
        InputError: there is no such recipe, its code raises, or `data` is not for it or is no folder.

    Examples:
        >>> load_recipe("digits").metric
        'test accuracy'
        >>> load_recipe("superbatch.lab.recipes.digits:digits_conv").name
        'digits-conv'
    """
    if data is not None and name not in TAKES_DATA:
        raise InputError(
            f"The recipe {name!r} does not read data={str(data)!r}. Leave it out, or use one of "
            f"the recipes {', '.join(TAKES_DATA)}."
        )
    if data is not None and not Path(data).is_dir():
        raise InputError(f"data={str(data)!r} is not a folder. Pass the path of a folder.")
    built_in = {**RECIPES, **COUPLED}
    if name in built_in:
        make = _function(built_in[name][0])
        return make() if data is None else make(data)
    if ":" not in name and name.endswith(".py"):
        raise InputError(f"{name!r} names a file without a function. Write {name}:recipe for its recipe().")
    if ":" not in name:
        raise InputError(
            f"There is no recipe {name!r}{did_you_mean(name, built_in)} Use one of {', '.join(built_in)}, "
            "or your own file.py:function or package.module:function."
        )
    function = _function(name)
    with _one_line(name, "its function"):
        recipe = function()
    if not isinstance(recipe, Recipe):
        raise InputError(
            f"The function of the recipe {name!r} returned {type(recipe).__name__}. "
            "Return a superbatch.lab.recipes.Recipe."
        )
    return recipe


def _function(name: str) -> Callable[..., Any]:
    where, attribute = name.rsplit(":", 1)
    with _one_line(name, f"importing {where!r}"):
        module = _module(where)
    function = getattr(module, attribute, None)
    if not callable(function):
        functions = [each for each in vars(module) if callable(getattr(module, each))]
        raise InputError(
            f"{where!r} has no function {attribute!r}{did_you_mean(attribute, functions)} "
            "Name a function that takes no argument and returns a superbatch.lab.recipes.Recipe."
        )
    return function


def _module(where: str) -> ModuleType:
    if not where.endswith(".py"):
        with _importable(Path.cwd()):
            return importlib.import_module(where)
    path = Path(where)
    if not path.is_file():
        raise InputError(f"The recipe file {where!r} does not exist. Pass the path of a Python file.")
    name = f"superbatch_recipe_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and pickles of the file's own classes look their module up by name.
    sys.modules[name] = module
    with _importable(path.resolve().parent):
        spec.loader.exec_module(module)
    return module


@contextmanager
def _importable(folder: Path) -> Iterator[None]:
    entry = str(folder)
    sys.path.insert(0, entry)
    try:
        yield
    finally:
        if entry in sys.path:  # the user's code may have changed sys.path itself
            sys.path.remove(entry)


@contextmanager
def _one_line(name: str, source: str) -> Iterator[None]:
    """Turn any exception of the recipe's code into an InputError of one line, with the exception as cause."""
    try:
        yield
    except SuperbatchError:
        raise
    except Exception as error:  # user code may raise anything
        reason = " ".join(f"{source} raised {type(error).__name__}: {error}".split()).rstrip(".")
        raise InputError(
            f"The recipe {name!r} failed: {reason}. Correct it; --traceback shows the whole traceback."
        ) from error
