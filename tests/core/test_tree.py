"""Nested batches: every micro-batch has the structure of the batch, and ambiguous batches are refused.

A structure is a function of a slicing function for its leaves. The batch is the structure with unsliced
leaves. Each micro-batch must equal the structure with sliced leaves, of the same types.
"""

from __future__ import annotations

import types
from collections import OrderedDict, defaultdict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from superbatch.batch.split import near_equal, split
from superbatch.batch.tree import count_samples, plan, take
from superbatch.errors import SplitError
from tests.core.batches import (
    NAMES,
    STRUCTURES,
    AttributeDict,
    Encoding,
    Frozen,
    Frozendict,
    Mirrored,
    N,
    Names,
    Pair,
    Sample,
    same,
    samples_of,
    whole_batch,
    x,
)


@pytest.mark.parametrize("microbatch_size", [1, 2, 3, 5, N, 100])
@pytest.mark.parametrize("kind", STRUCTURES)
def test_each_micro_batch_is_the_structure_of_its_samples(kind: str, microbatch_size: int) -> None:
    batch = whole_batch(kind)
    microbatches = split(batch, microbatch_size)
    start = 0
    for microbatch, count in zip(microbatches, near_equal(N, microbatch_size), strict=True):
        same(microbatch, STRUCTURES[kind](samples_of(start, start + count)))
        start += count
    assert start == count_samples(batch) == N
    same(batch, whole_batch(kind))  # the batch itself is unchanged


@pytest.mark.parametrize("kind", [kind for kind in STRUCTURES if kind != "memoryview"])
@pytest.mark.parametrize("order", [[3, 7, 0, 1, 6, 2, 5, 4], list(range(N))], ids=["shuffled", "in order"])
def test_samples_are_taken_in_any_order(kind: str, order: list[int]) -> None:
    batch, planned = whole_batch(kind), plan(whole_batch(kind))

    def chosen(leaf: Any) -> Any:
        return type(leaf)(leaf[i] for i in picked) if isinstance(leaf, list | tuple) else leaf[picked]

    for start, stop in [(0, N), (0, 3), (3, 7), (7, N)]:
        picked = order[start:stop]
        same(planned.take(start, stop, order=order), STRUCTURES[kind](chosen))
    same(batch, whole_batch(kind))


def test_an_array_that_cannot_be_indexed_by_a_list_is_named() -> None:
    planned = plan({"raw": memoryview(b"abc")})
    with pytest.raises(
        SplitError, match=r"memoryview at path 'raw' cannot be indexed with a list of samples.*sort=True"
    ):
        planned.take(0, 2, order=[2, 1, 0])


def test_the_comparison_can_fail() -> None:
    for a, b in [
        (x(), x().float()),
        ((1, 2), [1, 2]),
        ({"a": x()}, {"a": x() + 1}),
        ([x()], [x(), x()]),
        (Frozen(x(), 1), Frozen(x(), 2)),
    ]:
        with pytest.raises(AssertionError):
            same(a, b)


def test_arrays_are_views_of_the_batch() -> None:
    batch = {"torch": x(2), "numpy": np.zeros((N, 2))}
    piece = take(batch, 2, 4)
    piece["torch"][:] = -1
    piece["numpy"][:] = -1
    assert (batch["torch"][2:4] == -1).all()
    assert batch["numpy"].sum() == -4


def test_an_unsplit_value_is_the_same_object() -> None:
    table, options = torch.arange(3.0), {"rate": 0.5}
    piece = take({"x": x(), "table": table, "options": options}, 0, 2, unsplit=("table",))
    assert piece["table"] is table
    assert piece["options"] is options


def test_gradients_flow_through_the_split() -> None:
    leaf = x().requires_grad_()
    torch.stack([(piece["x"] ** 2).sum() for piece in split({"x": leaf}, 3)]).sum().backward()
    assert leaf.grad is not None
    torch.testing.assert_close(leaf.grad, 2 * x(), rtol=0, atol=0)


# ---- types and their attributes


def test_a_dataclass_is_copied_with_its_other_attributes() -> None:
    piece = take(Sample(x(3), 0.25), 2, 4)
    assert piece.note == "not a field"
    assert piece.scale == 0.25
    assert not hasattr(piece, "never_set")
    assert torch.equal(piece.total, x(3).sum(-1)[2:4])  # a field with init=False is split too


def test_attributes_of_a_dict_are_those_of_the_micro_batch() -> None:
    for kind in (AttributeDict, Mirrored):
        batch: Any = kind(image=x())
        piece = take(batch, 2, 5)
        assert torch.equal(piece.image, x()[2:5])
        assert piece.image is piece["image"]
        assert torch.equal(batch.image, x())
    piece: Any = take(AttributeDict(image=x()), 2, 5)
    piece.weight = 3
    assert piece["weight"] == 3  # attributes and entries are one dict, as before


def test_a_defaultdict_keeps_its_factory() -> None:
    assert take(defaultdict(list, x=x()), 0, 2)["missing"] == []


def test_a_list_subclass_keeps_its_type_and_attributes() -> None:
    names = Names(NAMES)
    names.language = "fr"
    piece = take(names, 1, 3)
    assert type(piece) is Names
    assert piece == NAMES[1:3]
    assert piece.language == "fr"


def test_a_batch_encoding_keeps_working() -> None:
    batch = Encoding({"input_ids": x(5)}, encodings=[f"words of {i}" for i in range(N)])
    piece = take(batch, 2, 4)
    assert isinstance(piece, Encoding)
    assert torch.equal(piece.input_ids, x(5)[2:4])  # attribute access
    assert piece.word_ids(0) == "words of 2"  # the sample's own encoding, not the batch's first
    assert torch.equal(piece.to("cpu")["input_ids"], x(5)[2:4])
    assert batch.word_ids(0) == "words of 0"
    assert count_samples(batch) == N


def test_the_real_batch_encoding_keeps_working() -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    batch = transformers.BatchEncoding({"input_ids": x(5), "names": list(NAMES)})
    pieces = split(batch, 3)
    assert [type(piece) for piece in pieces] == [transformers.BatchEncoding] * 3
    assert torch.equal(torch.cat([piece.input_ids for piece in pieces]), x(5))
    assert torch.equal(pieces[0].to("cpu")["input_ids"], x(5)[:3])
    output = transformers.utils.ModelOutput(logits=x(2))
    assert torch.equal(take(output, 1, 3).logits, x(2)[1:3])


def test_a_mapping_that_cannot_be_rebuilt_is_named() -> None:
    class Stubborn(Frozendict):
        def __init__(self, number: int, entries: dict[str, Any]) -> None:
            super().__init__(entries)

    with pytest.raises(
        SplitError, match=r"Stubborn at path 'inputs'.*cannot be constructed from its entries.*Pass a dict"
    ):
        take({"inputs": Stubborn(1, {"x": x()})}, 0, 2)


def test_a_mapping_proxy_is_split() -> None:
    piece = take(types.MappingProxyType({"x": x()}), 1, 3)
    assert type(piece) is types.MappingProxyType
    assert torch.equal(piece["x"], x()[1:3])


# ---- any nesting

LEAF_KINDS = ("tensor", "numpy", "texts", "scalar", "0-d")


def make_leaf(kind: str, samples: slice) -> Any:
    return {
        "tensor": torch.arange(50).reshape(25, 2)[samples],
        "numpy": np.arange(75, dtype=np.float32).reshape(3, 25).T[samples],
        "texts": [f"s{i}" for i in range(25)][samples],
        "scalar": 0.5,
        "0-d": torch.tensor(3.0),
    }[kind]


def make(shape: Any, samples: slice) -> Any:
    if isinstance(shape, str):
        return make_leaf(shape, samples)
    kind, inner = shape
    values = [make(entry, samples) for entry in inner]
    named = {f"k{i}": value for i, value in enumerate(values)}
    first = make_leaf("tensor", samples)  # a list of scalars only would be a list of samples
    return {
        "dict": named,
        "ordered": OrderedDict(named),
        "tuple": (first, *values),
        "list": [first, *values],
        "pair": Pair(values[0], values[-1]),
        "class": Frozen(values[0], values[-1]),
    }[kind]


SHAPES = st.recursive(
    st.sampled_from(LEAF_KINDS),
    lambda inner: st.tuples(
        st.sampled_from(["dict", "ordered", "tuple", "list", "pair", "class"]),
        st.lists(inner, min_size=1, max_size=4),
    ),
    max_leaves=15,
)


@given(SHAPES, st.integers(1, 25), st.integers(1, 30))
def test_any_nesting_is_split(shape: Any, samples: int, microbatch_size: int) -> None:
    batch = {"first": torch.arange(samples), "rest": make(shape, slice(samples))}
    start = 0
    for piece, count in zip(split(batch, microbatch_size), near_equal(samples, microbatch_size), strict=True):
        same(piece["first"], torch.arange(start, start + count))
        same(piece["rest"], make(shape, slice(start, start + count)))
        start += count
    assert start == samples
    planned = plan(batch)
    backwards = [planned.take(at, at + 1, order=range(samples)[::-1]) for at in range(samples)]
    for at, piece in enumerate(reversed(backwards)):
        same(piece["rest"], make(shape, slice(at, at + 1)))
