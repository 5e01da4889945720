"""The case files run only in child processes, because their imports fix Keras' backend."""

from __future__ import annotations

collect_ignore_glob = ["cases_*.py", "helpers.py", "mirrored.py", "run_cases.py"]
