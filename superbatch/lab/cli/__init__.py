"""Command line: ``superbatch compare``, ``superbatch fit``, ``superbatch verify`` and others."""

from .entry import main as main

__all__ = ["main"]
