"""What the tests of the PyTorch part share."""

from __future__ import annotations

import gc

import pytest


@pytest.fixture(scope="module", autouse=True)
def small_heap() -> None:
    """Let a collection of garbage look at what this file makes, not at all that was loaded before it.

    After a failure superbatch collects garbage, which takes the longer the more libraries are loaded: a
    quarter of a second with all of them, beside a millisecond for a window of a test's model.
    """
    gc.collect()
    gc.freeze()
