"""Grouping of samples into micro-batches: the best of all groupings, in the batch's order and any other."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from superbatch.batch.packing import Packing, near_equal_cost, pack
from superbatch.batch.split import TokenBudget, split
from superbatch.batch.token_budget import WELL_KNOWN, find_lengths
from superbatch.errors import InputError, SplitError
from tests.core.batches import Encoding
from tests.core.test_split import padded_batch, partitions

LENGTHS = st.lists(st.integers(0, 9), min_size=1, max_size=7)


def padded_costs(costs: list[int], sizes: list[int]) -> list[int]:
    ends = itertools.accumulate(sizes)
    return [size * max(costs[stop - size : stop]) for size, stop in zip(sizes, ends, strict=True)]


def groupings(samples: int) -> Iterator[list[list[int]]]:
    """Yield all partitions of samples into groups, in any order."""
    if not samples:
        yield []
        return
    for rest in groupings(samples - 1):
        yield [*rest, [samples - 1]]
        for at, group in enumerate(rest):
            yield [*rest[:at], [*group, samples - 1], *rest[at + 1 :]]


def budget_of(tokens: int, **options: Any) -> TokenBudget:
    return TokenBudget(tokens, "lengths", **options)


def packed(lengths: list[int], budget: TokenBudget) -> tuple[Packing, list[list[int]]]:
    """Return the packing and the lengths in each micro-batch; assert that each sample is in exactly one."""
    packing = pack({"lengths": lengths}, len(lengths), budget)
    order = list(range(len(lengths))) if packing.order is None else packing.order
    assert sorted(order) == list(range(len(lengths)))
    assert sum(packing.sizes) == len(lengths)
    assert min(packing.sizes) >= 1
    ends = list(itertools.accumulate(packing.sizes))
    spans = [(stop - size, stop) for size, stop in zip(packing.sizes, ends, strict=True)]
    assert [packing.indices(*span) for span in spans] == [order[start:stop] for start, stop in spans]
    return packing, [[lengths[i] for i in order[start:stop]] for start, stop in spans]


def padded_cost(part: list[int]) -> int:
    return len(part) * max(part)


def test_all_groupings_are_enumerated() -> None:
    assert [sum(1 for _ in groupings(n)) for n in range(8)] == [
        1,
        1,
        2,
        5,
        15,
        52,
        203,
        877,
    ]  # Bell's numbers


@given(LENGTHS, st.integers(0, 25))
def test_padded_in_order_is_the_best_of_all_partitions(lengths: list[int], above: int) -> None:
    budget = max(1, *lengths) + above
    allowed = [sizes for sizes in partitions(len(lengths)) if max(padded_costs(lengths, sizes)) <= budget]
    best = min((len(sizes), max(padded_costs(lengths, sizes))) for sizes in allowed)
    sizes = near_equal_cost(lengths, budget, padded=True)
    assert sizes in allowed
    assert (len(sizes), max(padded_costs(lengths, sizes))) == best
    assert packed(lengths, budget_of(budget, padded=True))[0] == Packing(None, sizes)


@given(LENGTHS, st.integers(0, 25))
def test_padded_and_sorted_is_the_best_of_all_groupings(lengths: list[int], above: int) -> None:
    budget = max(1, *lengths) + above
    costs = [
        [padded_cost([lengths[i] for i in group]) for group in grouping]
        for grouping in groupings(len(lengths))
    ]
    best = min((len(parts), max(parts)) for parts in costs if max(parts) <= budget)
    _, parts = packed(lengths, budget_of(budget, padded=True, sort=True))
    assert (len(parts), max(map(padded_cost, parts))) == best
    flat = [length for part in parts for length in part]
    assert flat == sorted(lengths, reverse=True)


@given(LENGTHS, st.integers(0, 25))
def test_bins_are_near_the_fewest_of_all_groupings(lengths: list[int], above: int) -> None:
    budget = max(1, *lengths) + above
    fewest = min(
        len(grouping)
        for grouping in groupings(len(lengths))
        if max(sum(lengths[i] for i in group) for group in grouping) <= budget
    )
    _, parts = packed(lengths, budget_of(budget, sort=True))
    assert max(map(sum, parts)) <= budget
    assert len(parts) <= fewest + 1  # seldom one more: the optimum of many samples is too slow to find
    assert len(parts) <= len(near_equal_cost(lengths, budget))


@given(st.lists(st.integers(0, 500), min_size=1, max_size=300), st.integers(0, 2000))
def test_bins_of_many_samples(lengths: list[int], above: int) -> None:
    budget = max(1, *lengths) + above
    _, parts = packed(lengths, budget_of(budget, sort=True))
    assert max(map(sum, parts)) <= budget
    assert len(parts) <= len(near_equal_cost(lengths, budget))
    assert len(parts) <= 11 / 9 * max(1, -(-sum(lengths) // budget)) + 4 or max(lengths) > budget / 3


@given(st.lists(st.integers(0, 500), min_size=1, max_size=300), st.integers(0, 2000))
def test_sorting_never_costs_a_micro_batch(lengths: list[int], above: int) -> None:
    budget = max(1, *lengths) + above
    _, parts = packed(lengths, budget_of(budget, padded=True, sort=True))
    _, unsorted = packed(lengths, budget_of(budget, padded=True))
    assert (len(parts), max(map(padded_cost, parts))) <= (len(unsorted), max(map(padded_cost, unsorted)))


def test_bins_are_near_equal() -> None:
    """Greedy filling would give 10, 10 and 1."""
    _, parts = packed([5, 5, 5, 5, 1], budget_of(10, sort=True))
    assert sorted(map(sum, parts)) == [5, 6, 10]
    assert max(map(sum, packed([6, 4, 4, 4, 3, 3], budget_of(13, sort=True))[1])) == 13
    assert [sum(part) for part in packed([7, 2, 2, 2, 2, 1], budget_of(10, sort=True))[1]] == [8, 8]


def test_packing_is_better_than_best_fit() -> None:
    """Best fit needs three micro-batches: 6 + 3, 5 + 2 + 2, 2."""
    assert [sum(part) for part in packed([2, 2, 2, 3, 5, 6], budget_of(10, sort=True))[1]] == [10, 10]


def test_a_batch_in_the_best_order_keeps_its_order() -> None:
    """Sorted by length, 11 and 10 share a micro-batch, and the rest needs two more."""
    lengths = [6, 10, 7, 3, 9, 11]
    assert packed(lengths, budget_of(23, sort=True)) == (Packing(None, [3, 3]), [[6, 10, 7], [3, 9, 11]])


def test_equal_lengths_stay_in_order_and_are_views() -> None:
    packing, _ = packed([3, 3, 3, 3], budget_of(6, padded=True, sort=True))
    assert packing == Packing(None, [2, 2])
    batch = {"x": torch.arange(4), "lengths": [3, 3, 3, 3]}
    pieces = split(batch, budget_of(6, padded=True, sort=True))
    assert pieces[1]["x"].data_ptr() == batch["x"][2:].data_ptr()


def test_samples_of_equal_length_keep_their_order() -> None:
    packing, _ = packed([2, 5, 2, 5], budget_of(10, padded=True, sort=True))
    assert packing.order == [1, 3, 0, 2]


@pytest.mark.parametrize("options", [{"padded": True}, {"padded": True, "sort": True}, {"sort": True}])
def test_one_sample_above_the_budget_is_named(options: dict[str, Any]) -> None:
    with pytest.raises(SplitError, match=r"^Sample 2 costs 9, more than the budget of 8"):
        packed([1, 8, 9, 2], budget_of(8, **options))


# ---- sources of lengths


@pytest.mark.parametrize("name", WELL_KNOWN)
@pytest.mark.parametrize("nested", [False, True])
def test_lengths_are_found_by_name(name: str, nested: bool) -> None:
    lengths = [3, 1, 2]
    values: Any = {
        "attention_mask": (torch.arange(3) < torch.tensor(lengths)[:, None]).long(),
        **dict.fromkeys(WELL_KNOWN[:4], torch.tensor([0, 3, 4, 6])),
    }.get(name, lengths)
    batch: Any = {"x": torch.zeros(3, 2), name: values, "names": ["a", "b", "c"]}
    batch = ({"inputs": batch}, torch.zeros(3)) if nested else batch
    assert find_lengths(batch) == (f"0.inputs.{name}" if nested else name)
    assert TokenBudget(8).sample_tokens(batch) == lengths


def test_the_most_exact_of_several_lengths_is_used() -> None:
    """A tokenizer's `length` counts padding; a mask does not."""
    batch = padded_batch() | {"length": [5] * 6}
    assert find_lengths(batch) == "attention_mask"
    assert find_lengths(batch | {"attention_mask": None}) == "lengths"
    assert find_lengths(batch | {"attention_mask": torch.ones(6, 1, 5, 5)}) == "lengths"


def test_missing_lengths_list_the_parts_of_the_batch() -> None:
    with pytest.raises(InputError, match=r"without lengths=.*no part.*attention_mask.*'x', 'meta', 'meta.y'"):
        split({"x": torch.zeros(2, 2), "meta": {"y": [1, 2]}}, TokenBudget(8))
    with pytest.raises(InputError, match=r"without lengths=.*'q.lengths' and 'd.lengths'"):
        split({"q": {"lengths": [1, 2]}, "d": {"lengths": [3, 4]}}, TokenBudget(8))
    with pytest.raises(InputError, match=r"without lengths=.*no part"):
        split({"x": torch.zeros(2, 2), "length": 0.5}, TokenBudget(8))


@pytest.mark.parametrize(
    "cast", [lambda mask: mask, lambda mask: mask.bool(), lambda mask: mask.byte(), np.asarray]
)
def test_a_mask_gives_the_position_of_its_last_token(cast: Any) -> None:
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 0, 0], [0, 1, 0, 0], [1, 0, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1]])
    batch = {"attention_mask": cast(mask)}
    budget = TokenBudget(8, padded=True)
    assert budget.sample_lengths(batch) == ([2, 2, 1, 2, 0, 4], [4, 2, 2, 3, 0, 4])
    assert TokenBudget(8).sample_lengths(batch) == ([2, 2, 1, 2, 0, 4], [2, 2, 1, 2, 0, 4])


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"padded": 1}, r"padded=1 is not a bool"),
        ({"sort": None}, r"sort=None is not a bool"),
        ({"trim": "labels"}, r"trim='labels'.*not a tuple of paths"),
        ({"trim": (1,)}, r"trim=\(1,\).*not a tuple of paths"),
        ({"trim": None}, r"trim=None.*not a tuple of paths"),
    ],
)
def test_options_are_checked(options: Any, text: str) -> None:
    with pytest.raises(InputError, match=text):
        TokenBudget(8, "lengths", **options)


def test_a_budget_with_a_list_of_paths_is_the_same_and_can_be_hashed() -> None:
    as_list: Any = ["labels"]
    assert TokenBudget(8, trim=as_list) == TokenBudget(8, trim=("labels",))
    assert hash(TokenBudget(8, trim=as_list)) == hash(TokenBudget(8, trim=("labels",)))


# ---- trim

TRIMMED = ("input_ids", "labels", "attention_mask", "position_ids")


def trimmable(cast: Any = lambda part: part) -> dict[str, Any]:
    batch = padded_batch()
    batch["input_ids"] = batch["input_ids"] * batch["attention_mask"]
    batch["labels"] = torch.where(batch["attention_mask"] == 1, batch["input_ids"] + 1, -100)
    batch["position_ids"] = torch.arange(5).repeat(6, 1)
    return {name: cast(part) for name, part in batch.items()}


@pytest.mark.parametrize("cast", [lambda part: part, np.asarray])
@pytest.mark.parametrize("sort", [False, True])
@pytest.mark.parametrize("padded", [False, True])
def test_micro_batches_are_trimmed_to_their_longest_sample(cast: Any, sort: bool, padded: bool) -> None:
    batch = trimmable(cast)
    budget = TokenBudget(8, sort=sort, padded=padded, trim=TRIMMED)
    pieces = split(batch, budget)
    seen: list[int] = []
    for piece in pieces:
        longest = int(max(piece["lengths"]))
        assert all(piece[name].shape == (len(piece["lengths"]), longest) for name in TRIMMED)
        for row, first in enumerate(piece["input_ids"][:, 0]):
            at = [int(value) for value in batch["input_ids"][:, 0]].index(int(first))
            seen.append(at)
            for name in TRIMMED:
                assert (piece[name][row] == batch[name][at][:longest]).all()
    assert sorted(seen) == list(range(6))
    assert any(piece["labels"].shape[1] < 5 for piece in pieces)
    if sort:  # samples of similar length are together, also if the cost ignores padding
        lengths = [int(length) for piece in pieces for length in piece["lengths"]]
        assert lengths == sorted(lengths, reverse=True)


def test_a_trimmed_array_can_be_flattened() -> None:
    for sort in (False, True):
        for piece in split(trimmable(), TokenBudget(8, padded=True, sort=sort, trim=("labels",))):
            assert piece["labels"].view(-1).numel() == piece["labels"].numel()
            assert piece["input_ids"].shape[1] == 5


def test_padding_before_the_tokens_is_kept() -> None:
    mask = torch.tensor([[0, 0, 1, 1], [0, 1, 1, 1]])
    ids = torch.tensor([[0, 0, 5, 6], [0, 7, 8, 9]])
    batch = {"attention_mask": mask, "ids": ids}
    pieces = split(batch, TokenBudget(4, sort=True, padded=True, trim=("ids", "attention_mask")))
    assert torch.equal(torch.cat([piece["ids"] for piece in pieces]), ids)


@pytest.mark.parametrize("pad", [0.0, -1.0, float("nan")])
def test_features_are_trimmed(pad: float) -> None:
    lengths = [2, 4, 1]
    frames = torch.full((3, 6, 2), pad)
    for row, length in enumerate(lengths):
        frames[row, :length] = torch.randn(length, 2)
    pieces = split({"frames": frames, "lengths": lengths}, TokenBudget(4, sort=True, trim=("frames",)))
    assert [tuple(piece["frames"].shape) for piece in pieces] == [(1, 4, 2), (2, 2, 2)]


@pytest.mark.parametrize("sort", [False, True])
def test_tokens_are_never_cut_off(sort: bool) -> None:
    """Trimming longer labels to the lengths of the inputs would lose tokens and raises an error."""
    batch = trimmable() | {"targets": torch.arange(30).reshape(6, 5).flip(1)}
    with pytest.raises(SplitError, match=r"'targets'.*longest sample.* has \d of 5.*more than padding"):
        split(batch, TokenBudget(8, "lengths", sort=sort, trim=("input_ids", "targets")))


def test_samples_without_tokens_keep_one_position() -> None:
    batch = {"ids": torch.zeros(2, 3, dtype=torch.long), "lengths": [0, 0]}
    (piece,) = split(batch, TokenBudget(8, trim=("ids",)))
    assert piece["ids"].shape == (2, 1)


def test_lengths_beyond_the_array_trim_nothing() -> None:
    batch = {"ids": torch.arange(6).reshape(2, 3), "lengths": [4, 9]}
    (piece,) = split(batch, TokenBudget(16, trim=("ids",)))
    assert torch.equal(piece["ids"], batch["ids"])


def test_an_array_that_cannot_be_trimmed_is_named() -> None:
    batch = trimmable() | {"names": list("abcdef"), "wide": torch.zeros(6, 9)}
    for trim, text in [
        (("names",), r"trim=\('names',\) names a list.*\(samples, length, ...\)"),
        (("lengths",), r"trim=\('lengths',\) names an array of shape \(6,\)"),
        (("labels", "wide"), r"padded to different lengths: 'labels': 5, 'wide': 9"),
        (("absent",), r"no part at the declared path 'absent'"),
    ]:
        with pytest.raises(InputError, match=text):
            split(batch, TokenBudget(8, "lengths", trim=trim))
    with pytest.raises(InputError, match=r"'wide' is in both unsplit= and trim="):
        split(batch, TokenBudget(8, "lengths", trim=("wide",)), unsplit=("wide",))
    packed_sequences = {"ids": torch.zeros(1, 6), "cu_seqlens": [0, 2, 6]}
    with pytest.raises(InputError, match=r"trim=\('ids',\).*packed sequences have no padding"):
        split(packed_sequences, TokenBudget(8, trim=("ids",)))


def test_sorting_reorders_declared_parts_too() -> None:
    """Lists of objects and a tokenizer's encodings are reordered; unsplit values stay unsplit."""
    sizes = [2, 5, 1, 4]
    batch = Encoding(
        {
            "images": [torch.zeros(3, n, n) for n in sizes],
            "sizes": sizes,
            "names": list("abcd"),
            "scale": [1, 2],
        },
        encodings=[f"encoding {name}" for name in "abcd"],
    )
    pieces = split(
        batch, TokenBudget(10, "sizes", padded=True, sort=True), per_sample=("images",), unsplit=("scale",)
    )
    assert [piece["names"] for piece in pieces] == [["b", "d"], ["a", "c"]]
    for piece in pieces:
        assert [image.shape[1] for image in piece["images"]] == piece["sizes"]
        assert [piece.word_ids(i) for i in range(2)] == [f"encoding {name}" for name in piece["names"]]
        assert piece["scale"] is batch["scale"]


def test_packed_sequences_are_sorted_into_even_bins() -> None:
    offsets = [0, 7, 9, 11, 13, 15, 16]
    batch = {"ids": torch.arange(16)[None], "cu_seqlens": torch.tensor(offsets, dtype=torch.int32)}
    pieces = split(batch, TokenBudget(10, sort=True))
    assert [piece["ids"].shape[1] for piece in pieces] == [8, 8]
    together = torch.cat([piece["ids"] for piece in pieces], 1)
    assert torch.equal(together.sort(1).values, batch["ids"])
    for piece in pieces:
        assert piece["cu_seqlens"].dtype == torch.int32
        for start, stop in itertools.pairwise(piece["cu_seqlens"].tolist()):
            first = int(piece["ids"][0, start])
            assert first in offsets
            assert piece["ids"][0, start:stop].tolist() == list(
                range(first, offsets[offsets.index(first) + 1])
            )
