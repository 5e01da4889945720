"""Right declarations pass the check for all models, losses and precisions."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn

from superbatch.torch.checks.checked import Checked
from tests.torch.statement_cases import (
    PRECISIONS,
    ROW_LOSSES,
    ROW_MODELS,
    TOKEN_LOSSES,
    TOKEN_MODELS,
    Complex,
    check,
    row_batch,
    token_batch,
)


def run_check(model: nn.Module, loss: Any, batch: Any, precision: str, key: str, **declared: Any) -> Checked:
    how = PRECISIONS[precision]
    model = model if isinstance(model, Complex) else model.to(how.dtype)

    def loss_fn(microbatch: dict[str, Any]) -> Any:
        with how.forward():
            return loss(model(microbatch[key]), microbatch)

    with how.around():
        return check(model, loss_fn, batch, **declared)


ROW_CASES = list(zip(itertools.product(ROW_MODELS, ROW_LOSSES), itertools.cycle(PRECISIONS), strict=False))
TOKEN_CASES = [
    ((model, loss), precision)
    for (model, loss), two in zip(
        itertools.product(TOKEN_MODELS, TOKEN_LOSSES),
        itertools.cycle([("float32", "autocast"), ("bfloat16", "tf32"), ("float64", "float16")]),
        strict=False,
    )
    for precision in two
]


def test_the_matrix_has_190_cases_and_25_in_every_precision() -> None:
    counts = dict.fromkeys(PRECISIONS, 0)
    for _, precision in (*ROW_CASES, *TOKEN_CASES):
        counts[precision] += 1
    assert sum(counts.values()) >= 190 and min(counts.values()) >= 25


THIRDS = (0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow))
FIFTHS = (0, *(pytest.param(fifth, marks=pytest.mark.slow) for fifth in range(1, 5)))


@pytest.mark.parametrize("fifth", FIFTHS)
@pytest.mark.parametrize("name", ROW_MODELS)
def test_right_declarations_of_rows_pass(name: str, fifth: int) -> None:
    for number, ((model, loss), precision) in enumerate(ROW_CASES):
        if model == name and number % 5 == fifth:
            torch.manual_seed(number)
            function, declared = ROW_LOSSES[loss]
            batch = row_batch(PRECISIONS[precision].dtype)
            done = run_check(ROW_MODELS[model](), function, batch, precision, "x", **declared)
            assert done.reason in ("", "all samples have the same weight"), (loss, precision, done)


@pytest.mark.parametrize("third", THIRDS)
@pytest.mark.parametrize("name", TOKEN_MODELS)
def test_right_declarations_of_tokens_pass(name: str, third: int) -> None:
    for number, ((model, loss), precision) in enumerate(TOKEN_CASES):
        if model == name and number % 3 == third:
            torch.manual_seed(number)
            function, declared = TOKEN_LOSSES[loss]
            done = run_check(TOKEN_MODELS[model](), function, token_batch(), precision, "ids", **declared)
            assert done.informative, (loss, precision, done)


@pytest.mark.parametrize("loss", ROW_LOSSES)
@pytest.mark.parametrize("precision", ["float64", "float32", "tf32"])
def test_right_declarations_of_complex_products_pass(loss: str, precision: str) -> None:
    function, declared = ROW_LOSSES[loss]
    batch = row_batch(PRECISIONS[precision].dtype)
    model = Complex(PRECISIONS[precision].dtype)
    assert all(p.is_complex() == (name == "turn") for name, p in model.named_parameters())
    run_check(model, function, batch, precision, "x", **declared)
