"""Entry point of the installed command. It imports no dependency, so that it can name a missing one."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from .exits import INTERRUPTED, NOTHING_KEPT, WRONG_INPUT

OPTIONAL = ("torch", "typer", "rich", "scipy", "matplotlib", "numpy", "sklearn")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: without the program's name; by default the process's.

    Returns:
        The exit code: 0 done; 1 a check failed; 2 wrong input, told in one line; 130 interrupted by Ctrl-C.

    Examples:
        >>> main(["--version"])
        superbatch ...
        0
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        from .app import main as run

        return run(arguments)
    except KeyboardInterrupt:  # also while packages are imported, which takes seconds
        print(NOTHING_KEPT, file=sys.stderr)
        return INTERRUPTED
    except ModuleNotFoundError as error:
        package = (error.name or "").split(".")[0]
        if package not in OPTIONAL:
            raise
        print(
            f"superbatch: The package {package} is not installed. Install superbatch[torch,cli].",
            file=sys.stderr,
        )
        return WRONG_INPUT
