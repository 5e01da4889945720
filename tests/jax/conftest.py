# JAX is an extra. Where it is not installed, pyright finds neither it nor anything in it:
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""Exactness is told in float64, which JAX has to be asked for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    """64-bit types for one test; nothing of it is left behind."""
    import jax

    with jax.enable_x64(new_val=True):
        yield
