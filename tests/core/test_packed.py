"""Packed sequences are split between sequences, and offsets of each micro-batch start at 0."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from superbatch.batch.split import near_equal, split
from superbatch.batch.tree import count_samples, plan, take
from superbatch.errors import SplitError
from tests.core.batches import NAMES, x

LENGTHS = [3, 1, 4, 1, 5]
OFFSETS = [0, 3, 4, 8, 9, 14]
TOTAL = OFFSETS[-1]


def packed_batch(flat: bool = True) -> dict[str, Any]:
    tokens = torch.arange(TOTAL) if flat else torch.arange(TOTAL)[None]
    return {
        "input_ids": tokens,
        "embedded": torch.randn(TOTAL, 2) if flat else torch.randn(1, TOTAL, 2),
        "labels": np.arange(len(LENGTHS)),
        "names": NAMES[: len(LENGTHS)],
        "cu_seqlens": torch.tensor(OFFSETS, dtype=torch.int32),
        "max_seqlen": max(LENGTHS),
        "rate": 0.5,
    }


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("microbatch_size", [1, 2, 3, 5])
def test_packed_sequences_are_split_between_sequences(flat: bool, microbatch_size: int) -> None:
    batch = packed_batch(flat)
    pieces = split(batch, microbatch_size)
    first = 0
    for piece, count in zip(pieces, near_equal(5, microbatch_size), strict=True):
        last = first + count
        tokens = slice(OFFSETS[first], OFFSETS[last])
        assert torch.equal(piece["input_ids"].flatten(), torch.arange(TOTAL)[tokens])
        assert piece["input_ids"].ndim == (1 if flat else 2)
        whole = batch["embedded"][tokens] if flat else batch["embedded"][:, tokens]
        assert torch.equal(piece["embedded"], whole)
        assert piece["labels"].tolist() == list(range(first, last))
        assert piece["names"] == NAMES[first:last]
        assert piece["cu_seqlens"].dtype == torch.int32
        assert piece["cu_seqlens"].tolist() == [o - OFFSETS[first] for o in OFFSETS[first : last + 1]]
        assert piece["max_seqlen"] == max(LENGTHS[first:last])
        assert type(piece["max_seqlen"]) is int
        assert piece["rate"] == 0.5
        first = last
    assert torch.equal(batch["cu_seqlens"], torch.tensor(OFFSETS, dtype=torch.int32))


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("kind", [list, tuple, np.asarray, torch.tensor])
def test_packed_sequences_are_taken_in_any_order(flat: bool, kind: Any) -> None:
    batch = packed_batch(flat) | {"cu_seqlens": kind(OFFSETS)}
    planned, order = plan(batch), [4, 0, 2, 1, 3]
    for start, stop in [(0, 5), (0, 2), (1, 4), (4, 5)]:
        piece, picked = planned.take(start, stop, order=order), order[start:stop]
        tokens = torch.cat([torch.arange(OFFSETS[i], OFFSETS[i + 1]) for i in picked])
        assert torch.equal(piece["input_ids"], tokens if flat else tokens[None])
        assert torch.equal(
            piece["embedded"], batch["embedded"][tokens] if flat else batch["embedded"][:, tokens]
        )
        assert piece["labels"].tolist() == picked
        assert piece["names"] == [NAMES[i] for i in picked]
        assert type(piece["cu_seqlens"]) is type(batch["cu_seqlens"])
        assert list(piece["cu_seqlens"]) == np.cumsum([0, *(LENGTHS[i] for i in picked)]).tolist()
        assert getattr(piece["cu_seqlens"], "dtype", None) == getattr(batch["cu_seqlens"], "dtype", None)
        assert piece["max_seqlen"] == max(LENGTHS[i] for i in picked)
    assert list(batch["cu_seqlens"]) == OFFSETS


@pytest.mark.parametrize(
    "offsets",
    [
        list(OFFSETS),
        tuple(OFFSETS),
        np.array(OFFSETS, dtype=np.int32),
        np.array(OFFSETS, dtype=np.uint8),
        torch.tensor(OFFSETS),
    ],
    ids=lambda offsets: f"{type(offsets).__name__} {getattr(offsets, 'dtype', '')}",
)
def test_offsets_keep_their_type(offsets: Any) -> None:
    piece = take({"tokens": torch.arange(TOTAL), "cu_seq_lens": offsets}, 1, 4)
    assert type(piece["cu_seq_lens"]) is type(offsets)
    assert getattr(piece["cu_seq_lens"], "dtype", None) == getattr(offsets, "dtype", None)
    assert list(piece["cu_seq_lens"]) == [0, 1, 5, 6]


@pytest.mark.parametrize(
    "longest", [5, np.int32(5), torch.tensor(5), torch.tensor([5], dtype=torch.int32), np.array(5)]
)
def test_the_longest_length_keeps_its_type(longest: Any) -> None:
    piece = take({"tokens": torch.arange(TOTAL), "cu_seqlens": OFFSETS, "max_length": longest}, 1, 4)
    assert type(piece["max_length"]) is type(longest) or isinstance(longest, np.ndarray)
    assert getattr(piece["max_length"], "dtype", None) == getattr(longest, "dtype", None)
    assert piece["max_length"] == 4


def test_queries_and_keys_follow_their_own_offsets() -> None:
    batch = {
        "q": torch.arange(9),
        "k": torch.arange(20),
        "k_list": list(range(20)),
        "cu_seq_lens_q": torch.tensor([0, 2, 5, 9]),
        "cu_seq_lens_k": torch.tensor([0, 10, 11, 20]),
        "max_length_q": 4,
        "max_length_k": 10,
        "max_seqlen": 10,
        "y": torch.arange(3),
    }
    piece = take(batch, 1, 2)
    assert piece["q"].tolist() == [2, 3, 4]
    assert piece["k"].tolist() == [10]
    assert piece["k_list"] == [10]
    assert piece["cu_seq_lens_q"].tolist() == [0, 3]
    assert piece["cu_seq_lens_k"].tolist() == [0, 1]
    assert (piece["max_length_q"], piece["max_length_k"], piece["max_seqlen"]) == (3, 1, 3)
    assert count_samples(batch) == 3


def test_equal_queries_and_keys_need_no_distinction() -> None:
    both = {
        "x": torch.arange(TOTAL),
        "cu_seqlens_q": torch.tensor(OFFSETS),
        "cu_seqlens_k": torch.tensor(OFFSETS),
    }
    assert take(both, 1, 3)["x"].tolist() == [3, 4, 5, 6, 7]


class PackedTuple(NamedTuple):
    tokens: Any
    cu_seqlens: Any


def test_packed_groups_in_dataclasses_namedtuples_and_nested_mappings() -> None:
    @dataclasses.dataclass(frozen=True)
    class PackedClass:
        tokens: Any
        cu_seqlens: Any

    for make in (PackedTuple, PackedClass):
        piece = take({"inner": make(torch.arange(TOTAL), OFFSETS), "y": torch.arange(5)}, 3, 5)
        assert type(piece["inner"]) is make
        assert piece["inner"].tokens.tolist() == list(range(8, 14))
        assert piece["inner"].cu_seqlens == [0, 1, 6]
    nested = {
        "cu_seqlens": OFFSETS,
        "parts": {"ids": torch.arange(TOTAL), "more": [torch.arange(5), torch.arange(TOTAL)]},
    }
    assert take(nested, 0, 1)["parts"]["more"][1].tolist() == [0, 1, 2]


def test_two_packed_groups_each_follow_their_own_offsets() -> None:
    batch = {
        "query": {"ids": torch.arange(4), "cu_seqlens": [0, 1, 4]},
        "document": {"ids": torch.arange(30), "cu_seqlens": [0, 20, 30]},
    }
    piece = take(batch, 1, 2)
    assert piece["query"]["ids"].tolist() == [1, 2, 3]
    assert piece["document"]["ids"].tolist() == list(range(20, 30))


def test_offsets_that_are_none_or_declared_are_not_followed() -> None:
    assert take({"x": x(), "cu_seqlens": None}, 0, 2)["cu_seqlens"] is None
    whole = {"x": x(), "cu_seqlens": torch.tensor([1, 2])}
    assert take(whole, 0, 2, unsplit=("cu_seqlens",))["cu_seqlens"] is whole["cu_seqlens"]
    assert take({"x": x(), "cu_seqlens": x(3)}, 0, 2, per_sample=("cu_seqlens",))["cu_seqlens"].shape == (
        2,
        3,
    )


def test_empty_sequences_are_samples_too() -> None:
    batch = {"x": torch.arange(5), "cu_seqlens": [0, 2, 2, 5], "max_seqlen": 3}
    piece = take(batch, 1, 2)
    assert piece["x"].shape == (0,)
    assert piece["cu_seqlens"] == [0, 0]
    assert piece["max_seqlen"] == 0


def test_one_token_for_each_sequence_is_not_ambiguous() -> None:
    piece = take({"x": torch.arange(3), "y": torch.arange(3), "cu_seqlens": [0, 1, 2, 3]}, 1, 2)
    assert piece["x"].tolist() == piece["y"].tolist() == [1]


@pytest.mark.parametrize(
    ("offsets", "wrong"),
    [
        ([1, 5], "must start with 0, not 1"),
        ([0, 4, 3, 5], "must never decrease"),
        ([0], "at least two values"),
        ([], "at least two values"),
        ([0.0, 5.0], "must be integers"),
        ([False, 5], "must be integers"),
        (torch.tensor([0.0, 5.0]), "must be integers"),
        (torch.tensor([[0, 5]]), "must be 1-d"),
        (torch.tensor(5), "must be 1-d"),
        (5, "must be 1-d"),
        ("05", "must be 1-d"),
    ],
)
def test_offsets_are_checked(offsets: Any, wrong: str) -> None:
    text = rf"at path 'in\.cu_seqlens'.*{wrong}.*unsplit=\('in\.cu_seqlens',\)"
    with pytest.raises(SplitError, match=text):
        plan({"in": {"tokens": torch.arange(5), "cu_seqlens": offsets}})


def test_an_array_that_fits_neither_tokens_nor_sequences_is_named() -> None:
    batch = {**packed_batch(), "positions": torch.zeros(3, TOTAL)}
    with pytest.raises(
        SplitError, match=r"\(3, 14\) at path 'positions' does not fit .* 14 tokens in 5 sequences.*unsplit="
    ):
        plan(batch)
    assert take(batch, 0, 1, unsplit=("positions",))["positions"] is batch["positions"]


def test_padding_behind_the_last_offset_is_refused() -> None:
    with pytest.raises(SplitError, match=r"\(1, 16\) at path 'input_ids' does not fit .* 14 tokens"):
        plan({"input_ids": torch.zeros(1, 16), "cu_seqlens": OFFSETS})


def test_an_array_that_fits_both_tokens_and_sequences_is_refused() -> None:
    with pytest.raises(SplitError, match=r"shape \(2,\) at path 'y'.*fits both.*empty sequences"):
        plan({"y": torch.zeros(2), "cu_seqlens": [0, 0, 2]})
    with pytest.raises(SplitError, match=r"shape \(5, 14\) at path 'mask'.*fits both"):
        plan({**packed_batch(), "mask": torch.zeros(5, TOTAL)})
    assert take({**packed_batch(), "mask": torch.zeros(5, TOTAL)}, 0, 2, per_sample=("mask",))[
        "mask"
    ].shape == (2, TOTAL)


def test_different_numbers_of_queries_and_keys_are_refused() -> None:
    with pytest.raises(SplitError, match=r"number of sequences: 'cu_seqlens_q': 2, 'cu_seqlens_k': 1.*Give"):
        plan({"x": torch.zeros(5), "cu_seqlens_q": [0, 2, 5], "cu_seqlens_k": [0, 9]})


def test_equal_totals_with_different_offsets_are_refused() -> None:
    with pytest.raises(SplitError, match=r"both have 5 tokens but different offsets.*two mappings"):
        plan({"x": torch.zeros(5), "cu_seqlens_q": [0, 2, 5], "cu_seqlens_k": [0, 3, 5]})


def test_offsets_beside_no_tokens_are_refused() -> None:
    with pytest.raises(
        SplitError, match=r"path 'kwargs' have 14 tokens, and no array beside their offsets.*same mapping"
    ):
        plan({"input_ids": torch.zeros(TOTAL), "kwargs": {"cu_seqlens": OFFSETS}})


def test_a_packed_group_beside_a_batch_of_another_length_is_refused() -> None:
    with pytest.raises(SplitError, match=r"'packed\.input_ids': 5.*'y': 8"):
        plan({"packed": packed_batch(), "y": x()})
