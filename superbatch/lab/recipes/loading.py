"""Find a recipe by its name, or load the user's own by import path."""

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

# Built-in recipes: name -> where it is made, and what it is in a few words.
RECIPES: Mapping[str, tuple[str, str]] = {
    "digits": ("superbatch.lab.recipes.digits:digits", "perceptron on scikit-learn's digits"),
    "digits-bn": ("superbatch.lab.recipes.digits:digits_bn", "the same with BatchNorm (coupled)"),
    "digits-conv": ("superbatch.lab.recipes.digits:digits_conv", "small convolutional net on the digits"),
    "digits-conv-bn": ("superbatch.lab.recipes.digits:digits_conv_bn", "the same with BatchNorm (coupled)"),
    "text": ("superbatch.lab.recipes.text:text", "byte language model, mean over tokens"),
    "pairs": ("superbatch.lab.recipes.pairs:pairs", "contrastive pairs of digits (coupled)"),
    "mnist": ("superbatch.lab.recipes.mnist:mnist", "perceptron on a folder of IDX files (--data)"),
}

# Built-in recipes of the study `coupled`, which have several ways to make the update.
COUPLED: Mapping[str, tuple[str, str]] = {
    "code-search": ("superbatch.lab.recipes.coupled.code_search:code_search", "docstrings and code, InfoNCE"),
    "counting": ("superbatch.lab.recipes.coupled.counting:counting", "spots in images, BatchNorm"),
    "fairness": ("superbatch.lab.recipes.coupled.fairness:fairness", "a penalty on the gap of two groups"),
    "ring": ("superbatch.lab.recipes.coupled.ring:ring", "a generator, sliced Wasserstein distance"),
    "token-means": ("superbatch.lab.recipes.coupled.token_means:token_means", "means over tokens"),
}

NEEDS_DATA = ("mnist",)
# The others have data of their own by default.
TAKES_DATA = (*NEEDS_DATA, "code-search", "counting", "token-means")


def load_recipe(name: str, *, data: str | Path | None = None) -> Recipe:
    """Make a recipe: built in, or ``package.module:function`` or ``file.py:function`` of the user's own.

    The function is called without arguments and returns a `Recipe`. While the user's module is imported, the
    folder of the file, or the working directory for a module, can be imported from; nothing stays on
    ``sys.path``.

    Args:
        name: of the recipe.
        data: a folder of data, for the recipes that read one (`TAKES_DATA`).

    Returns:
        The recipe.

    Raises:
        InputError: there is no such recipe, it cannot be made, or `data` means nothing to it.

    Examples:
        >>> load_recipe("digits").metric
        'test accuracy'
        >>> load_recipe("superbatch.lab.recipes.digits:digits_conv").name
        'digits-conv'
    """
    if data is not None and name not in TAKES_DATA:
        raise InputError(
            f"The recipe {name!r} reads no folder, and data={str(data)!r} was given. Leave it out, or use "
            f"one of {', '.join(TAKES_DATA)}."
        )
    if data is not None and not Path(data).is_dir():
        raise InputError(f"The data folder {str(data)!r} is no folder. Give the path of one.")
    built_in = {**RECIPES, **COUPLED}
    if name in built_in:
        make = _function(built_in[name][0])
        return make(data) if name in NEEDS_DATA or data is not None else make()
    if ":" not in name and name.endswith(".py"):
        raise InputError(f"{name!r} names a file without a function. Write {name}:recipe for its recipe().")
    if ":" not in name:
        raise InputError(
            f"There is no recipe {name!r}{did_you_mean(name, built_in)} Use one of {', '.join(built_in)}, "
            "or your own file.py:function or package.module:function."
        )
    return _own(name)


def _own(name: str) -> Recipe:
    try:
        recipe = _function(name)()
    except SuperbatchError:
        raise
    except Exception as error:  # whatever the user's own code raises; the cause stays attached
        raise _failed(name, f"its function raised {type(error).__name__}: {error}") from error
    if not isinstance(recipe, Recipe):
        raise InputError(
            f"The function of the recipe {name!r} returned {type(recipe).__name__}. "
            "Return a superbatch.lab.recipes.Recipe."
        )
    return recipe


def _function(name: str) -> Callable[..., Any]:
    where, attribute = name.rsplit(":", 1)
    try:
        module = _file(Path(where)) if where.endswith(".py") else _module(where)
    except SuperbatchError:
        raise
    except Exception as error:  # importing runs the user's code, which may raise anything
        raise _failed(name, f"importing {where!r} raised {type(error).__name__}: {error}") from error
    function = getattr(module, attribute, None)
    if not callable(function):
        own = [each for each in vars(module) if callable(getattr(module, each))]
        raise InputError(
            f"{where!r} has no function {attribute!r}{did_you_mean(attribute, own)} "
            "Name a function that takes no argument and returns a superbatch.lab.recipes.Recipe."
        )
    return function


def _module(name: str) -> ModuleType:
    with _importable(Path.cwd()):
        return importlib.import_module(name)


def _file(path: Path) -> ModuleType:
    if not path.is_file():
        raise InputError(f"The recipe file {str(path)!r} does not exist. Give the path of a Python file.")
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


def _failed(name: str, wrong: str) -> InputError:
    return InputError(
        # One line, whatever the user's error text looks like.
        f"The recipe {name!r} failed: {' '.join(wrong.split()).rstrip('.')}. Correct it; "
        "with --traceback the whole way to it is shown."
    )
