"""Versions that a report was made with."""

from __future__ import annotations

import platform

from superbatch._version import __version__


def versions(**frameworks: str) -> dict[str, str]:
    """Return name -> version: superbatch, the frameworks, Python and the platform."""
    return {
        "superbatch": __version__,
        **frameworks,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
    }
