"""Fixtures of the PyTorch tests."""

from __future__ import annotations

import gc

import pytest


@pytest.fixture(scope="module", autouse=True)
def small_heap() -> None:
    """Exclude all objects made before a test module from garbage collection.

    superbatch collects garbage after a failure. With all libraries loaded that takes a quarter of a second; a
    window of a test model takes a millisecond.
    """
    gc.collect()
    gc.freeze()
