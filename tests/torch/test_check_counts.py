"""Numbers that a loss divides by are seen when they become unequal: lengths, class weights, padding ids."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from superbatch.errors import StatementError
from superbatch.torch import Accumulator, class_weights, count_tokens, sample_weights
from superbatch.torch.checks import check_schedule
from superbatch.torch.checks.sample_counts import Count, Hints
from tests.torch.helpers import sgd

LENGTH, LABELS, PAD = 6, 40, 3
PER_CLASS = torch.tensor([1.0, 1.0, 6.0], dtype=torch.float64)


class Case(NamedTuple):
    """A loss and its data: equal counts, or unequal ones; and the weight that is right."""

    make: Callable[[bool, int], Any]
    loss: Callable[[nn.Module, Any], Tensor]
    weight: Callable[[Any], Any]


def of_lengths(uneven: bool, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(8, LENGTH, 3, dtype=torch.float64, generator=generator)
    lengths = torch.tensor([6, 1, 4, 6, 2, 6, 6, 3] if uneven else [LENGTH] * 8)
    return x, torch.randint(0, LABELS, (8, LENGTH), generator=generator), lengths


def mean_up_to_lengths(model: nn.Module, batch: Any) -> Tensor:
    x, y, lengths = batch
    each = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="none")
    kept = (torch.arange(LENGTH) < lengths[:, None]).flatten().double()
    return (each * kept).sum() / kept.sum()


def of_classes(uneven: bool, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(8, 3, dtype=torch.float64, generator=generator)
    return x, torch.tensor([0, 1, 2, 0, 1, 2, 1, 1] if uneven else [0, 1, 0, 1, 1, 0, 1, 1])


def by_module() -> Callable[[nn.Module, Any], Tensor]:
    criterion = nn.CrossEntropyLoss(PER_CLASS)
    return lambda model, batch: criterion(model(batch[0])[:, :3], batch[1])


def padded(uneven: bool, seed: int, *, left: bool = False) -> Any:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(8, LENGTH, 3, dtype=torch.float64, generator=generator)
    y = torch.randint(PAD + 1, LABELS, (8, LENGTH), generator=generator)
    for row, length in enumerate([6, 1, 3, 6, 2, 6, 6, 3] if uneven else []):
        y[row, length:] = PAD
    return x, y.flip(1) if left else y


def without_padding(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=PAD)


CASES = {
    "lengths": Case(of_lengths, mean_up_to_lengths, sample_weights("2")),
    "class weights of a module": Case(of_classes, by_module(), class_weights(PER_CLASS, "1")),
    "a padding id": Case(padded, without_padding, count_tokens("1", ignore_index=PAD)),
    "a padding id at the start": Case(
        lambda uneven, seed: padded(uneven, seed, left=True),
        without_padding,
        count_tokens("1", ignore_index=PAD),
    ),
}


def train(case: Case, **options: Any) -> tuple[Accumulator, list[Any]]:
    torch.manual_seed(0)
    model = nn.Linear(3, LABELS, dtype=torch.float64)

    def loss_fn(microbatch: Any) -> Tensor:
        return case.loss(model, microbatch)

    accumulate = Accumulator(model, sgd(model.parameters()), loss_fn, microbatch_size=2, **options)
    return accumulate, [case.make(number == 2, number) for number in range(4)]


@pytest.mark.parametrize("case", CASES)
def test_the_first_window_with_unequal_counts_is_checked(case: str) -> None:
    accumulate, batches = train(CASES[case])
    accumulate(batches[0])
    accumulate(batches[1])
    with pytest.raises(StatementError, match="update 2, which shows the error, was not made"):
        accumulate(batches[2])
    assert accumulate.updates == 2


@pytest.mark.parametrize("case", CASES)
def test_the_right_weight_passes(case: str) -> None:
    accumulate, batches = train(CASES[case], weight=CASES[case].weight)
    for batch in batches:
        accumulate(batch)
    assert accumulate.updates == 4


@pytest.mark.parametrize("case", CASES)
def test_without_these_counts_the_wrong_weight_is_not_seen(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = check_schedule.counts_in

    def before(*arguments: Any, hints: Hints, **paths: Any) -> list[Count]:
        found = real(*arguments, **paths)
        return [count for count in found if not count.unpadded and (count.ignored is not None)]

    monkeypatch.setattr(check_schedule, "counts_in", before)
    accumulate, batches = train(CASES[case])
    for batch in batches:
        accumulate(batch)
    assert accumulate.updates == 4


def test_ends_of_rows_are_padding_only_where_they_are_long_and_labels_of_their_own() -> None:
    padded, others = [[5, 6, 79, 79, 79, 79], [4, 4, 4, 4, 6, 5]], [[5, 7, 6, 6, 6, 6], [6, 7, 8, 5, 79, 79]]
    labels = torch.tensor([*padded, *others])
    counts = Count("", None, unpadded=True).of([labels])
    assert counts is not None
    assert (6 * counts).tolist() == pytest.approx([2, 2, 6, 6])


def test_a_loss_that_does_not_repeat_is_told_once() -> None:
    draw = random.SystemRandom()
    torch.manual_seed(0)
    model = nn.Linear(3, LABELS, dtype=torch.float64)

    def loss_fn(microbatch: Any) -> Tensor:
        return (1 + draw.random()) * without_padding(model, microbatch)

    accumulate = Accumulator(model, sgd(model.parameters()), loss_fn, microbatch_size=1)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for seed in range(4):
            accumulate(padded(uneven=True, seed=seed))
    assert ["gives another loss for the same samples" in str(one.message) for one in told] == [True]
