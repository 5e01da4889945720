"""The command line: ``superbatch compare``, ``superbatch fit``, ``superbatch verify``."""

from superbatch.cli.entry import main as main

__all__ = ["main"]
