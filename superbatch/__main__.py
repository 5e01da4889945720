"""Command line as ``python -m superbatch``, for environments without the installed script."""

import sys

from .lab.cli import main

if __name__ == "__main__":  # a spawned worker process imports this file again
    sys.exit(main())
