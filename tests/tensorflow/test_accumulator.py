# TensorFlow is an extra: without it pyright has only stubs of a part of it, which it prefers in any case.
# pyright: reportMissingImports=false, reportMissingModuleSource=false, reportAttributeAccessIssue=false
"""`superbatch.tensorflow.Accumulator` against the large batch, eager and in graphs."""

from __future__ import annotations

from typing import Any

import pytest

tf = pytest.importorskip("tensorflow", reason="tensorflow is not installed (extra: tensorflow)")
from tests.tensorflow import checks  # noqa: E402

pytestmark = pytest.mark.tensorflow


@pytest.mark.parametrize("way", ["eager", "graph"])
@pytest.mark.parametrize("options", [{}, {"clip": 0.01}, {"reduction": "sum"}], ids=str)
def test_windows_equal_large_batches(way: str, options: Any) -> None:
    checks.windows(way, **options)
