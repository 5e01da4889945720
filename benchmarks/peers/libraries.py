"""Detection of installed libraries, and import of the files of this folder that use them.

A file imports its library at the top and is imported only when it is selected, so a missing library removes
one row or column only.
"""

import importlib
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType


def version_of(package: str | None) -> str | None:
    """The installed version of a distribution, "" if none is needed (None), None if it is missing."""
    if package is None:
        return ""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def load(module: str) -> ModuleType:
    """Import a file of this folder, and with it the library that it drives."""
    return importlib.import_module(f"peers.{module}")
