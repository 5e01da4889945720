"""The command line: ``superbatch compare``, ``superbatch verify``."""

from superbatch.cli.app import app as app
from superbatch.cli.app import main as main

__all__ = ["app", "main"]
