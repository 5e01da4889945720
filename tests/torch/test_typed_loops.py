"""Documented loops run as written, and a type checker infers their types."""

from __future__ import annotations

import runpy
import warnings
from pathlib import Path

from torch import nn

SCRIPT = Path(__file__).with_name("typed_loops.py")


def test_documented_loops_run() -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="superbatch did not check")  # of loops without loss_fn
        found = runpy.run_path(str(SCRIPT))
    assert isinstance(found["model"], nn.Linear)
    assert found["made"] is True
    assert found["norm"] > 0
    assert found["accumulate"].updates == 4, "each of the four loops makes one update"
