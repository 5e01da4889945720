"""Detection of installed libraries, and import of the files of this folder that use them.

A file imports its library at the top and is imported only if it is selected. So a missing library removes
only one row or column.
"""

import importlib
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType


def version_of(package: str | None) -> str | None:
    """Return the installed version of a distribution, "" for None, None if it is missing."""
    if package is None:
        return ""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def load(module: str) -> ModuleType:
    """Import a file of this folder, and with it its library."""
    return importlib.import_module(f"peers.{module}")
