# JAX is an extra. If it is not installed, pyright cannot resolve the module or its members:
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""Tests of exactness need float64, which JAX enables only on request."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def float64() -> Iterator[None]:
    """Enable 64-bit types for one test."""
    import jax

    with jax.enable_x64(new_val=True):
        yield
