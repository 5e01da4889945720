"""What the tests of the PyTorch part share."""

from __future__ import annotations

import gc

import pytest


@pytest.fixture(scope="module")
def small_heap() -> None:
    """For files that collect garbage hundreds of times: what was there before them is looked at once.

    After a failure superbatch collects garbage, which takes the longer the more libraries are loaded: a
    quarter of a second with all of them, beside a millisecond for a window of a test's model.
    """
    gc.collect()
    gc.freeze()
