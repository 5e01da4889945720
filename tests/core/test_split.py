"""Sizes of micro-batches, and batches of the usual tasks split as a user would."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from superbatch.batch.split import TokenBudget, near_equal, near_equal_cost, split
from superbatch.errors import InputError, SplitError
from tests.core.batches import Encoding

NO_INTS = [True, False, 2.0, 1.5, "2", None, [2], np.float64(2), np.True_, torch.tensor([2, 3])]
NOT_POSITIVE = [0, -1, np.int64(0)]


# ---- near_equal


@given(st.integers(1, 5000), st.integers(1, 6000))
def test_near_equal_is_the_fewest_and_the_most_even(samples: int, microbatch_size: int) -> None:
    sizes = near_equal(samples, microbatch_size)
    assert sum(sizes) == samples
    assert len(sizes) == math.ceil(samples / microbatch_size)
    assert max(sizes) - min(sizes) <= 1
    assert max(sizes) <= microbatch_size
    assert sizes == sorted(sizes, reverse=True)  # larger first


@pytest.mark.parametrize(
    ("samples", "microbatch_size", "sizes"),
    [(10, 4, [4, 3, 3]), (9, 8, [5, 4]), (8, 8, [8]), (3, 8, [3]), (5, 1, [1] * 5), (1, 1, [1])],
)
def test_near_equal_examples(samples: int, microbatch_size: int, sizes: list[int]) -> None:
    assert near_equal(samples, microbatch_size) == sizes
    numpy_samples: Any = np.int64(samples)
    numpy_size: Any = np.int32(microbatch_size)
    assert near_equal(numpy_samples, numpy_size) == sizes
    assert all(type(size) is int for size in near_equal(numpy_samples, numpy_size))


@pytest.mark.parametrize("value", NO_INTS, ids=repr)
def test_sizes_are_ints(value: Any) -> None:
    kind = type(value).__name__
    with pytest.raises(InputError, match=rf"microbatch_size=.* is a {kind}, not an int.*positive int"):
        near_equal(8, value)
    with pytest.raises(InputError, match=rf"samples=.* is a {kind}, not an int"):
        near_equal(value, 2)
    with pytest.raises(InputError, match=rf"budget=.* is a {kind}, not an int"):
        near_equal_cost([1], value)
    with pytest.raises(InputError, match=rf"microbatch_size=.* is a {kind}, not an int"):
        split(torch.zeros(8), value)
    with pytest.raises(InputError, match=rf"tokens=.* is a {kind}, not an int"):
        TokenBudget(value, "lengths")


@pytest.mark.parametrize("value", NOT_POSITIVE, ids=repr)
def test_sizes_are_positive(value: Any) -> None:
    for call in (
        lambda: near_equal(8, value),
        lambda: near_equal(value, 8),
        lambda: near_equal_cost([1], value),
        lambda: split(torch.zeros(8), value),
        lambda: TokenBudget(value, "lengths"),
    ):
        with pytest.raises(InputError, match=r"is below 1. Pass a positive int"):
            call()


# ---- near_equal_cost


def partitions(samples: int) -> Iterator[list[int]]:
    """Yield all partitions of samples, in order, into groups of at least one."""
    for cuts in itertools.product([False, True], repeat=samples - 1):
        ends = [i + 1 for i, cut in enumerate(cuts) if cut] + [samples]
        yield [stop - start for start, stop in itertools.pairwise([0, *ends])]


def part_costs(costs: list[int], sizes: list[int]) -> list[int]:
    ends = list(itertools.accumulate(sizes))
    return [sum(costs[stop - size : stop]) for size, stop in zip(sizes, ends, strict=True)]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.integers(0, 25))
def test_near_equal_cost_is_the_best_of_all_partitions(costs: list[int], above: int) -> None:
    budget = max(1, *costs) + above
    allowed = [sizes for sizes in partitions(len(costs)) if max(part_costs(costs, sizes)) <= budget]
    best = min((len(sizes), max(part_costs(costs, sizes))) for sizes in allowed)
    sizes = near_equal_cost(costs, budget)
    assert sizes in allowed  # in order, complete, no empty micro-batch, each within the budget
    assert (len(sizes), max(part_costs(costs, sizes))) == best


@given(st.lists(st.integers(0, 2**40), min_size=1, max_size=200), st.integers(0, 2**42))
def test_near_equal_cost_of_large_costs(costs: list[int], above: int) -> None:
    budget = max(1, *costs) + above
    sizes = near_equal_cost(costs, budget)
    assert sum(sizes) == len(costs)
    assert min(sizes) >= 1
    assert max(part_costs(costs, sizes)) <= budget
    assert len(sizes) <= 2 * math.ceil(
        max(1, sum(costs)) / budget
    )  # two neighbours together exceed the budget


def test_near_equal_cost_makes_the_largest_part_smallest() -> None:
    assert near_equal_cost([5, 1, 1, 1, 4, 2], 8) == [3, 3]  # greedy filling would give 8 and 6
    assert near_equal_cost([1] * 10, 4) == [4, 4, 2]
    assert near_equal_cost([0, 0, 0], 1) == [3]
    assert near_equal_cost((3, 3), 100) == [2]
    arrays: list[Any] = [np.array([3, 3, 3]), torch.tensor([3, 3, 3])]
    for array in arrays:
        assert near_equal_cost(array, 6) == [2, 1]


def test_a_sample_above_the_budget_is_named() -> None:
    with pytest.raises(SplitError, match=r"^Sample 2 costs 9, more than the budget of 8 .*Raise the budget"):
        near_equal_cost([1, 8, 9, 2], 8)


@pytest.mark.parametrize(
    "costs", [[], (), None, 3, "12", b"12", {1: 2}, {1}, iter([1]), torch.tensor(3), np.zeros(0)]
)
def test_costs_are_a_sequence(costs: Any) -> None:
    with pytest.raises(InputError, match=r"costs=.* is empty or not a sequence of ints"):
        near_equal_cost(costs, 4)


@pytest.mark.parametrize("cost", [-1, 1.0, True, None, "1", [1], float("nan")])
def test_each_cost_is_an_int_of_at_least_0(cost: Any) -> None:
    with pytest.raises(InputError, match=r"costs\[1\]=.* is not an int of 0 or more"):
        near_equal_cost([1, cost, 2], 4)


# ---- TokenBudget


def padded_batch() -> dict[str, Any]:
    lengths = torch.tensor([5, 1, 1, 1, 4, 2])
    mask = (torch.arange(5) < lengths[:, None]).long()
    return {"input_ids": torch.arange(30).reshape(6, 5) + 1, "attention_mask": mask, "lengths": lengths}


@pytest.mark.parametrize(
    "cast", [lambda mask: mask, lambda mask: mask.bool(), lambda mask: mask.float(), np.asarray]
)
def test_a_token_budget_reads_a_mask(cast: Any) -> None:
    batch = padded_batch()
    batch["attention_mask"] = cast(batch["attention_mask"])
    pieces = split(batch, TokenBudget(8, "attention_mask"))
    assert [len(piece["input_ids"]) for piece in pieces] == [3, 3]
    assert torch.equal(torch.cat([piece["input_ids"] for piece in pieces]), batch["input_ids"])


@pytest.mark.parametrize(
    "cast", [lambda lengths: lengths, np.asarray, list, tuple, lambda lengths: lengths.tolist()]
)
def test_a_token_budget_reads_lengths(cast: Any) -> None:
    batch = padded_batch()
    batch["lengths"] = cast(batch["lengths"])
    assert [len(piece["input_ids"]) for piece in split(batch, TokenBudget(8, "lengths"))] == [3, 3]
    by_function = TokenBudget(8, lambda batch: batch["lengths"])
    assert [len(piece["input_ids"]) for piece in split(batch, by_function)] == [3, 3]


def test_a_token_budget_reads_offsets() -> None:
    batch = {
        "meta": {"cu_seqlens": torch.tensor([0, 5, 6, 7, 8, 12, 14]), "input_ids": torch.arange(14)[None]}
    }
    pieces = split(batch, TokenBudget(8, "meta.cu_seqlens"))
    assert [piece["meta"]["input_ids"].shape[1] for piece in pieces] == [7, 7]


def test_a_token_budget_splits_declared_parts() -> None:
    batch = {"images": [torch.zeros(3, n, n) for n in (4, 4, 8)], "scale": [1, 2]}
    budget = TokenBudget(64, lambda batch: [image[0].numel() for image in batch["images"]])
    pieces = split(batch, budget, per_sample=("images",), unsplit=("scale",))
    assert [len(piece["images"]) for piece in pieces] == [2, 1]


def test_a_mask_of_something_else_is_refused() -> None:
    with pytest.raises(InputError, match=r"'input_ids'.*\(6, 5\).*mask of zeros and ones.*attention_mask"):
        split(padded_batch(), TokenBudget(8, "input_ids"))


def test_lengths_are_checked() -> None:
    batch = padded_batch()
    with pytest.raises(InputError, match=r"TokenBudget.* gives 5 lengths for a batch of 6 samples"):
        split(batch, TokenBudget(8, lambda batch: [1] * 5))

    def no_list(batch: Any) -> Any:
        return 5

    with pytest.raises(InputError, match=r"costs=5 is empty or not a sequence"):
        split(batch, TokenBudget(8, no_list))
    with pytest.raises(InputError, match=r"path 'length'.*'lengths'"):
        split(batch, TokenBudget(8, "length"))
    with pytest.raises(SplitError, match=r"Sample 0 costs 5, more than the budget of 4"):
        split(batch, TokenBudget(4, "lengths"))


@pytest.mark.parametrize("lengths", [3, ["lengths"], b"lengths"])
def test_lengths_are_a_path_or_a_function(lengths: Any) -> None:
    with pytest.raises(InputError, match=r"lengths=.* is not a path or a function.*\"lengths\""):
        TokenBudget(8, lengths)


def test_a_token_budget_cannot_be_changed() -> None:
    tokens: Any = np.int64(8)
    budget: Any = TokenBudget(tokens, "lengths")
    assert type(budget.tokens) is int
    with pytest.raises(AttributeError):
        budget.tokens = 0
    assert budget == TokenBudget(8, "lengths")


# ---- batches of the usual tasks


def images(samples: int) -> torch.Tensor:
    return torch.randn(samples, 3, 8, 8)


def labels(samples: int) -> torch.Tensor:
    return torch.randint(10, (samples,))


TASKS: dict[str, Any] = {
    "tensor": lambda n: images(n),
    "image and label": lambda n: [images(n), labels(n)],
    "many inputs": lambda n: (images(n), images(n), images(n), labels(n)),
    "list of inputs and label": lambda n: [[images(n), images(n), images(n)], labels(n)],
    "dict": lambda n: {"image": images(n), "target": labels(n)},
    "dict with texts": lambda n: {"image": images(n), "target": labels(n), "meta": ["a tag"] * n},
    "BatchEncoding-like": lambda n: Encoding({"input_ids": torch.ones(n, 5), "labels": labels(n)}),
    "tuple with a dict": lambda n: (images(n), {"target": labels(n)}),
}


def first_leaf(batch: Any) -> torch.Tensor:
    while not isinstance(batch, torch.Tensor):
        batch = batch[0] if isinstance(batch, list | tuple) else next(iter(batch.values()))
    return batch


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize(
    ("samples", "microbatch_size", "sizes"), [(12, 4, [4, 4, 4]), (5, 2, [2, 2, 1]), (1, 3, [1])]
)
def test_batches_of_the_usual_tasks(task: str, samples: int, microbatch_size: int, sizes: list[int]) -> None:
    batch = TASKS[task](samples)
    pieces = split(batch, microbatch_size)
    assert [type(piece) for piece in pieces] == [type(batch)] * len(sizes)
    assert [len(first_leaf(piece)) for piece in pieces] == sizes
    if not isinstance(batch, torch.Tensor):
        assert {len(piece) for piece in pieces} == {len(batch)}  # same number of entries: (x, y) stays a pair
    assert torch.equal(torch.cat([first_leaf(piece) for piece in pieces]), first_leaf(batch))


@pytest.mark.parametrize("task", TASKS)
def test_a_micro_batch_larger_than_the_batch_is_the_batch(task: str) -> None:
    (piece,) = split(TASKS[task](5), 1000)
    assert len(first_leaf(piece)) == 5


def test_detection_samples_of_different_size() -> None:
    batch = [
        (torch.randn(3, 12 + n, 12), {"boxes": torch.randn(n, 4), "masks": torch.zeros(n, 12, 12)})
        for n in (1, 2, 3, 1, 2)
    ]
    pieces = split(batch, 2, per_sample=("",))
    assert [len(piece) for piece in pieces] == [2, 2, 1]
    assert pieces[2][0] is batch[4]


def test_a_list_of_lists_for_each_sample_needs_to_be_declared() -> None:
    batch = {"image": images(5), "index": [[1, 2, 3] for _ in range(5)]}
    with pytest.raises(SplitError, match=r"'image': 5, 'index\.0': 3.*per_sample="):
        split(batch, 2)
    assert [len(piece["index"]) for piece in split(batch, 2, per_sample=("index",))] == [2, 2, 1]


def test_unequal_lengths_are_refused() -> None:
    with pytest.raises(SplitError, match=r"'0': 12, '1': 11"):
        split((images(12), labels(11)), 4)
