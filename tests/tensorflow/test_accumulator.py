# TensorFlow is an extra. pyright prefers its incomplete stubs of TensorFlow, installed or not.
# pyright: reportMissingImports=false, reportMissingModuleSource=false, reportAttributeAccessIssue=false
"""`superbatch.tensorflow.Accumulator` against the large batch, eager and in graphs."""

from __future__ import annotations

from typing import Any

import pytest

tf = pytest.importorskip("tensorflow", reason="tensorflow is not installed (extra: tensorflow)")
from tests.tensorflow import checks  # noqa: E402

pytestmark = pytest.mark.tensorflow
WAYS = ["eager", "graph"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("options", [{}, {"clip": 0.01}, {"reduction": "sum"}], ids=str)
def test_windows_equal_large_batches(way: str, options: Any) -> None:
    checks.windows(way, **options)


def test_an_epoch_in_one_function() -> None:
    checks.epoch_in_one_function()


@pytest.mark.parametrize("way", WAYS)
def test_a_variable_without_a_gradient_is_unchanged(way: str) -> None:
    checks.missing_gradients(way)


@pytest.mark.parametrize(
    ("dtype", "way"), [("bfloat16", "eager"), ("bfloat16", "graph"), ("float16", "graph")]
)
def test_low_precision_is_summed_in_float32(dtype: str, way: str) -> None:
    checks.low_precision(dtype, way)


@pytest.mark.parametrize("way", WAYS)
def test_a_window_of_weight_zero_makes_no_update(way: str) -> None:
    checks.nothing_has_weight(way)


@pytest.mark.parametrize("way", WAYS)
def test_a_nonfinite_microbatch_can_be_left_out(way: str) -> None:
    checks.bad_microbatch_left_out(way)


@pytest.mark.parametrize("way", WAYS)
def test_the_noise_of_a_window(way: str) -> None:
    checks.noise(way)
