"""Pytest fixture of `superbatch.testing`, registered by the entry point `pytest11`."""

from __future__ import annotations

from collections.abc import Callable

import pytest


@pytest.fixture(scope="session")
def assert_split_invariant() -> Callable[..., None]:
    """Return `superbatch.testing.assert_split_invariant`; only tests that use the fixture import torch.

    Examples:
        >>> def test_my_loss(assert_split_invariant):
        ...     assert_split_invariant(loss_fn, batch, models=model)
    """
    from .testing import assert_split_invariant as function

    return function
