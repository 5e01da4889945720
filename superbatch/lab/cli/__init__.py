"""The command line: ``superbatch compare``, ``superbatch fit``, ``superbatch verify``."""

from .entry import main as main

__all__ = ["main"]
