"""The check finds denominators that become unequal in later windows: lengths, class weights, padding ids."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from superbatch.errors import LossSpecError
from superbatch.torch import Accumulator, Window, class_weights, count_tokens, sample_weights, verify
from superbatch.torch.checks import check_schedule, sample_counts, unchecked_feature
from superbatch.torch.checks.sample_counts import Count, Hints
from tests.torch.helpers import sgd

LENGTH, LABELS, PAD = 6, 40, 3
PER_CLASS = torch.tensor([1.0, 1.0, 6.0], dtype=torch.float64)


class Case(NamedTuple):
    """A loss, its data with equal or unequal counts, and the right weight."""

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
    with pytest.raises(LossSpecError, match="Update 2, which shows the error, was not made"):
        accumulate(batches[2])
    assert accumulate.updates == 2


@pytest.mark.parametrize("case", CASES)
def test_the_right_weight_passes(case: str) -> None:
    accumulate, batches = train(CASES[case], weight=CASES[case].weight)
    for batch in batches:
        accumulate(batch)
    assert accumulate.updates == 4


@pytest.mark.parametrize("case", CASES)
def test_mutant_without_these_counts_misses_the_wrong_weight(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = check_schedule.counts_in

    def ignored_only(*arguments: Any, hints: Hints, **paths: Any) -> list[Count]:
        found = real(*arguments, **paths)
        return [count for count in found if not count.unpadded and (count.ignored is not None)]

    monkeypatch.setattr(check_schedule, "counts_in", ignored_only)
    accumulate, batches = train(CASES[case])
    for batch in batches:
        accumulate(batch)
    assert accumulate.updates == 4


def test_repeated_row_ends_are_padding_if_long_and_of_a_label_found_nowhere_else() -> None:
    padded, others = [[5, 6, 79, 79, 79, 79], [4, 4, 4, 4, 6, 5]], [[5, 7, 6, 6, 6, 6], [6, 7, 8, 5, 79, 79]]
    labels = torch.tensor([*padded, *others])
    counts = Count("", None, unpadded=True).of([labels])
    assert counts is not None
    assert (6 * counts).tolist() == pytest.approx([2, 2, 6, 6])


def test_a_loss_with_unseeded_randomness_warns_once() -> None:
    draw = random.SystemRandom()
    torch.manual_seed(0)
    model = nn.Linear(3, LABELS, dtype=torch.float64)

    def loss_fn(microbatch: Any) -> Tensor:
        return (1 + draw.random()) * without_padding(model, microbatch)

    accumulate = Accumulator(model, sgd(model.parameters()), loss_fn, microbatch_size=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for seed in range(4):
            accumulate(padded(uneven=True, seed=seed))
    (one,) = (str(each.message) for each in caught)
    assert "could not check the declared loss on the first window, reduction='mean'" in one
    assert "weight=None: loss_fn returns different losses for the same samples" in one
    assert (
        "check a loss_fn without random numbers with superbatch.torch.verify(model, loss_fn, batch, " in one
    )


def test_verify_checks_the_loss_as_the_warning_advises() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, LABELS, dtype=torch.float64)
    batch = padded(uneven=True, seed=0)
    for weight, passes in ((None, False), (count_tokens("1", ignore_index=PAD), True)):
        report = verify(model, lambda mb: without_padding(model, mb), batch, microbatch_size=2, weight=weight)
        assert report.exact == passes


def zeros(rows: list[int], seed: int, *, at_ends: bool) -> Any:
    """Samples with some labels 0: padding at the ends, or a class in the middle."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(len(rows), LENGTH, 3, dtype=torch.float64, generator=generator)
    y = torch.arange(1, 1 + LENGTH).repeat(len(rows), 1)
    for row, count in enumerate(rows):
        y[row, LENGTH - count :] = 0
    return x, y if at_ends else y.roll(3, 1)


def over_all(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())


@pytest.mark.parametrize("windows", [64, 200])
def test_labels_that_are_probably_not_ignored_are_counted_in_few_windows(
    windows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[Count] = []
    real = Count.of_values

    def of_values(count: Count, values: Any) -> Tensor | None:
        counted.append(count)
        return real(count, values)

    torch.manual_seed(0)
    model = nn.Linear(3, LABELS, dtype=torch.float64)
    accumulate = Accumulator(
        model, sgd(model.parameters()), lambda mb: over_all(model, mb), microbatch_size=4
    )
    accumulate(zeros([0] * 8, 0, at_ends=False))
    monkeypatch.setattr(Count, "of_values", of_values)
    for update in range(1, windows):
        accumulate(zeros([0, 1, 0, 1, 2, 1, 1, 0], update, at_ends=False))
    assert 0 < len(counted) <= 8 + windows // unchecked_feature.WINDOWS
    assert {count.ignored for count in counted} == {0}


def test_padding_by_0_in_one_micro_batch_of_a_loader_is_found_at_once() -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, LABELS, dtype=torch.float64)

    def loss_fn(microbatch: Any) -> Tensor:
        x, y = microbatch
        return nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=0)

    accumulate = Accumulator(model, sgd(model.parameters()), loss_fn)
    for update in range(3):
        accumulate(Window([zeros([0, 0], 2 * update + number, at_ends=True) for number in range(2)]))
    assert not unchecked_feature.inspects_all_counts(3), "premise: window 3 is not checked in full"
    with pytest.raises(LossSpecError, match="Update 3, which shows the error, was not made"):
        accumulate(Window([zeros(rows, 9, at_ends=True) for rows in ([0, 0], [0, 4])]))


@pytest.mark.parametrize(
    "values", [[3.0, 1.0, 0.0, 2.0, 9.0], [0.0, 2.0, 2.0], [4.0, 4.0], [0.0, 0.0], [-3.0, 5.0]]
)
def test_the_spread_of_counts_is_the_contrast_of_the_picked_samples(values: list[float]) -> None:
    counts = torch.tensor(values)
    picked = counts[sample_counts.extremes(counts, 2)]
    assert sample_counts.contrast_of_extremes(counts) == pytest.approx(sample_counts.contrast_of_cut(picked))
