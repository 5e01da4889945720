"""The files with cases are for processes of their own: what they import fixes Keras' backend."""

from __future__ import annotations

collect_ignore_glob = ["cases_*.py", "helpers.py", "mirrored.py", "run_cases.py"]
