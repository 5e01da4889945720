"""``python -m superbatch``: the command line without an installed script."""

import sys

from .lab.cli import main

if __name__ == "__main__":  # a spawned worker process imports this file again
    sys.exit(main())
