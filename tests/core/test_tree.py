"""Nested batches: every structure is cut as the user gave it, and what is unclear is refused.

A structure is a function of how its leaves are cut. The batch is the structure with whole leaves; each
micro-batch must be the structure with cut leaves, of the same types.
"""

from __future__ import annotations

import types
from collections import OrderedDict, UserDict, defaultdict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from superbatch.batch.split import near_equal, split
from superbatch.batch.tree import Leaf, count_samples, get, leaves, map_arrays, map_leaves, plan, take
from superbatch.errors import InputError, SplitError
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
    same(batch, whole_batch(kind))  # the batch itself is as it was


@pytest.mark.parametrize("kind", [kind for kind in STRUCTURES if kind != "memoryview"])
@pytest.mark.parametrize("order", [[3, 7, 0, 1, 6, 2, 5, 4], list(range(N))], ids=["shuffled", "as it is"])
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


def test_what_is_kept_whole_is_the_same_object() -> None:
    table, options = torch.arange(3.0), {"rate": 0.5}
    piece = take({"x": x(), "table": table, "options": options}, 0, 2, unsplit=("table",))
    assert piece["table"] is table
    assert piece["options"] is options


def test_gradients_flow_through_the_cut() -> None:
    leaf = x().requires_grad_()
    torch.stack([(piece["x"] ** 2).sum() for piece in split({"x": leaf}, 3)]).sum().backward()
    assert leaf.grad is not None
    torch.testing.assert_close(leaf.grad, 2 * x(), rtol=0, atol=0)


# ---- types and what belongs to them


def test_a_dataclass_keeps_its_other_attributes_and_is_not_made_again() -> None:
    piece = take(Sample(x(3), 0.25), 2, 4)
    assert piece.note == "not a field"
    assert piece.scale == 0.25
    assert not hasattr(piece, "never_set")
    assert torch.equal(piece.total, x(3).sum(-1)[2:4])  # a field with init=False is cut too


def test_an_attribute_dict_answers_with_the_micro_batch() -> None:
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


def test_a_list_of_ones_own_keeps_its_type_and_attributes() -> None:
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


def test_a_mapping_that_cannot_be_made_again_is_named() -> None:
    class Stubborn(Frozendict):
        def __init__(self, number: int, entries: dict[str, Any]) -> None:
            super().__init__(entries)

    with pytest.raises(
        SplitError, match=r"Stubborn at path 'inputs'.*cannot be constructed from its entries.*Pass a dict"
    ):
        take({"inputs": Stubborn(1, {"x": x()})}, 0, 2)


def test_a_mapping_proxy_is_cut() -> None:
    piece = take(types.MappingProxyType({"x": x()}), 1, 3)
    assert type(piece) is types.MappingProxyType
    assert torch.equal(piece["x"], x()[1:3])


# ---- declared parts


def test_whole_keeps_everything_under_a_path() -> None:
    batch = {
        "x": x(),
        "graph": {"edge_index": torch.zeros(2, 30), "names": ["a", "b"]},
        "tables": [x(1), [1.0]],
    }
    piece = take(batch, 0, 3, unsplit=("graph", "tables.1"))
    assert piece["graph"] is batch["graph"]
    assert piece["tables"][1] is batch["tables"][1]
    assert len(piece["tables"][0]) == 3
    assert leaves(batch, unsplit=("graph", "tables")) == [
        Leaf("x", N),
        Leaf("graph", None),
        Leaf("tables", None),
    ]


def detection_batch() -> dict[str, Any]:
    images = [torch.zeros(3, 10 + i, 20 - i) for i in range(N)]
    targets = [{"boxes": torch.zeros(i + 1, 4), "labels": torch.arange(i + 1)} for i in range(N)]
    return {"images": images, "targets": targets}


def test_per_sample_cuts_lists_of_any_objects() -> None:
    batch = detection_batch()
    pieces = split(batch, 3, per_sample=("images", "targets"))
    assert [len(piece["images"]) for piece in pieces] == [3, 3, 2]
    assert [target for piece in pieces for target in piece["targets"]] == batch["targets"]
    images = [image for piece in pieces for image in piece["images"]]
    assert all(a is b for a, b in zip(images, batch["images"], strict=True))


def test_per_sample_of_the_batch_itself() -> None:
    batch = list(zip(*detection_batch().values(), strict=True))
    pieces = split(batch, 5, per_sample=("",))
    assert [len(piece) for piece in pieces] == [4, 4]
    assert pieces[1][0] is batch[4]


def test_per_sample_of_tuples_arrays_and_other_sequences() -> None:
    batch = {"x": x(), "tuples": tuple(object() for _ in range(N)), "range": range(N), "array": x(2)}
    piece = take(batch, 2, 4, per_sample=("tuples", "range", "array"))
    assert piece["tuples"] == batch["tuples"][2:4]
    assert piece["range"] == range(2, 4)
    assert torch.equal(piece["array"], x(2)[2:4])


def test_lists_of_images_without_a_declaration_are_refused() -> None:
    with pytest.raises(SplitError, match=r"'images\.0': 3.*'targets\.1\.boxes': 2.*per_sample="):
        split(detection_batch(), 2)


@pytest.mark.parametrize("argument", ["unsplit", "per_sample"])
def test_a_declared_path_that_is_not_there_lists_those_that_are(argument: str) -> None:
    batch = {"x": x(), "meta": {"ids": NAMES}, "pair": (x(), x())}
    with pytest.raises(
        InputError,
        match=r"declared path 'edges'.*: 'x', 'meta', 'meta\.ids', 'pair', 'pair\.0', 'pair\.1'",
    ):
        plan(batch, **{argument: ("edges",)})


def test_of_very_many_paths_only_the_first_are_listed() -> None:
    with pytest.raises(InputError, match=r"'k0', .*'k29' and 70 more"):
        get({f"k{i}": i for i in range(100)}, "other")


def test_a_declared_path_inside_another_is_refused() -> None:
    with pytest.raises(InputError, match=r"'meta\.ids'.*lies inside a part that is declared"):
        plan({"x": x(), "meta": {"ids": NAMES}}, unsplit=("meta", "meta.ids"))


def test_a_part_cannot_be_whole_and_per_sample() -> None:
    with pytest.raises(InputError, match=r"'y' is in both unsplit= and per_sample=.*Declare it in one"):
        plan({"x": x(), "y": NAMES}, unsplit=("y",), per_sample=("y",))


@pytest.mark.parametrize("declared", ["edges", None, (1,), [["x"]], {"x": 1}, b"x"])
@pytest.mark.parametrize("argument", ["unsplit", "per_sample"])
def test_declarations_are_a_tuple_of_texts(argument: str, declared: Any) -> None:
    with pytest.raises(
        InputError, match=rf"{argument}=.*not a list or tuple of paths.*{argument}=\(\"labels\",\)"
    ):
        plan({"x": x()}, **{argument: declared})


@pytest.mark.parametrize(
    "part",
    [{"a": [1]}, Pair([1], [2]), Frozen([1], [2]), "text", 3, torch.tensor(3.0), UserDict(a=[1]), {1, 2}],
)
def test_per_sample_names_lists_only(part: Any) -> None:
    with pytest.raises(InputError, match=rf"per_sample=\('part',\) names a {type(part).__name__}"):
        plan({"x": x(), "part": part}, per_sample=("part",))


# ---- refusals


def test_different_lengths_name_every_leaf() -> None:
    batch = (x(), {"y": torch.zeros(7, 2), "names": NAMES, "scale": 2.0}, [torch.zeros(5)])
    with pytest.raises(SplitError) as error:
        count_samples(batch)
    text = str(error.value)
    assert "'0': 8, '1.y': 7, '1.names': 8, '2.0': 5" in text
    assert "unsplit=" in text
    assert "per_sample=" in text
    assert "scale" not in text


def test_equal_names_do_not_hide_different_lengths() -> None:
    with pytest.raises(SplitError, match=r"'1': 8, '1': 3"):
        plan({1: x(), "1": torch.zeros(3)})


def test_an_empty_list_beside_samples_is_refused() -> None:
    with pytest.raises(SplitError, match=r"'x': 8, 'extras': 0"):
        plan({"x": x(), "extras": []})


@pytest.mark.parametrize("batch", [torch.zeros(0, 3), [], (), {"x": np.zeros((0, 2)), "names": []}])
def test_an_empty_batch_is_refused(batch: Any) -> None:
    with pytest.raises(SplitError, match=r"The batch is empty: .*: 0.*accumulate\(None\)"):
        plan(batch)


@pytest.mark.parametrize(
    "batch", [{}, 3, "text", None, {"rate": 0.5}, torch.tensor(1.0), ({}, {}), Pair(1, 2)]
)
def test_nothing_to_split_is_refused(batch: Any) -> None:
    with pytest.raises(SplitError, match=r"nothing to split.*at least one array or list"):
        plan(batch)


def test_everything_declared_whole_is_nothing_to_split() -> None:
    with pytest.raises(SplitError, match=r"nothing to split.* in unsplit=: 'x'"):
        plan({"x": x()}, unsplit=("x",))


def test_an_unknown_object_is_named_with_its_remedy() -> None:
    class Graph:
        pass

    with pytest.raises(
        SplitError, match=r"Graph at path 'graph'.*unsplit=\('graph',\).*per_sample=\('graph',\)"
    ):
        plan({"x": x(), "graph": Graph()})
    with pytest.raises(SplitError, match=r"Graph at path 'g\.0'.*unsplit=\('g\.0',\).*per_sample=\('g',\)"):
        plan({"x": x(), "g": [Graph()] * N})
    graphs = [Graph() for _ in range(N)]
    assert take({"x": x(), "g": graphs}, 0, 2, per_sample=("g",))["g"] == graphs[:2]
    assert take({"x": x(), "g": graphs[0]}, 0, 2, unsplit=("g",))["g"] is graphs[0]


def test_a_list_of_one_dict_of_scalars_for_each_sample_is_not_kept_whole_in_silence() -> None:
    batch = {"x": x(), "meta": [{"id": i} for i in range(N)]}
    with pytest.raises(
        SplitError, match=r"list of 8 containers at path 'meta'.*per_sample=\('meta',\) or unsplit="
    ):
        plan(batch)
    assert take(batch, 2, 4, per_sample=("meta",))["meta"] == [{"id": 2}, {"id": 3}]
    assert take(batch, 2, 4, unsplit=("meta",))["meta"] is batch["meta"]
    other = {"x": x(), "stages": [{"rate": 0.1}, {"rate": 0.2}]}
    assert take(other, 2, 4)["stages"] is other["stages"]


def test_torch_packed_sequence_is_refused_by_name() -> None:
    packed = torch.nn.utils.rnn.pack_padded_sequence(torch.zeros(4, 2, 3), torch.tensor([4, 2]))
    with pytest.raises(SplitError, match=r"PackedSequence at path 'words'.*interleaved by time.*cu_seqlens"):
        plan({"words": packed, "y": torch.zeros(2)})


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
@pytest.mark.parametrize("kind", ["strided nested", "jagged nested", "sparse", "sparse rows"])
def test_tensors_without_slices_are_refused_by_path(kind: str) -> None:
    rows = [torch.zeros(2, 3), torch.zeros(4, 3)]
    make = {
        "strided nested": lambda: torch.nested.nested_tensor(rows),
        "jagged nested": lambda: torch.nested.nested_tensor(rows, layout=torch.jagged),
        "sparse": lambda: torch.eye(2).to_sparse(),
        "sparse rows": lambda: torch.eye(2).to_sparse_csr(),
    }
    with pytest.raises(SplitError, match=r"Tensor at path 'x'.*unsplit=\('x',\)"):
        split({"x": make[kind](), "y": torch.zeros(2)}, 1)


def test_out_of_memory_in_a_slice_stays_out_of_memory() -> None:
    class Full:
        shape = (N,)

        def __getitem__(self, index: slice) -> Any:
            raise torch.OutOfMemoryError("CUDA out of memory")

    with pytest.raises(torch.OutOfMemoryError):
        take(Full(), 0, 2)


@pytest.mark.parametrize(
    ("start", "stop"), [(0, 0), (3, 2), (-1, 2), (0, 9), (8, 9), (0.0, 2), (False, 2), (0, None)]
)
def test_take_checks_its_range(start: Any, stop: Any) -> None:
    with pytest.raises(InputError, match=r"start=.*stop=.*batch of 8 samples.*0 <= start < stop <= samples"):
        take(x(), start, stop)


# ---- paths


def test_get_finds_what_leaves_name() -> None:
    batch = (x(), {"a.b": x(1), "a": {"b": x(2), "c": x(3)}, 5: Pair(x(4), Frozen(x(5), NAMES))})
    paths = [leaf.path for leaf in leaves(batch)]
    assert paths == ["0", "1.a.b", "1.a.b", "1.a.c", "1.5.image", "1.5.label.image", "1.5.label.label"]
    assert get(batch, "0") is batch[0]
    assert get(batch, "1.5.label.image") is batch[1][5].label.image
    assert get(batch, "1.a.c") is batch[1]["a"]["c"]
    assert get(batch, "1.a.b") is batch[1]["a.b"]  # of two readings the longest key
    assert get(batch, "1.5.label.label.2") == "sample 2"
    assert get(batch, "") is batch


@pytest.mark.parametrize("path", ["y", "x.0", "meta.y", "meta.ids.99", "meta.", ".meta", "meta..ids"])
def test_get_lists_the_paths_there_are(path: str) -> None:
    with pytest.raises(InputError, match=r"no part at path .*'x', 'meta', 'meta\.ids'"):
        get({"x": x(), "meta": {"ids": NAMES}}, path)


def test_get_of_a_tensor_says_that_it_has_no_parts() -> None:
    with pytest.raises(InputError, match=r"path 'labels'.*'' itself, without parts"):
        get(x(), "labels")


@pytest.mark.parametrize("path", [None, 0, ("x",), ["x"]])
def test_a_path_is_text(path: Any) -> None:
    with pytest.raises(InputError, match=r"is not a str"):
        get([x()], path)
    with pytest.raises(InputError):
        get({"x": x()}, path)


def test_of_equal_names_the_text_is_meant() -> None:
    assert get({"in": {1: "number", "1": "text"}}, "in.1") == "text"
    assert get({"in": {"1": "text", 1: "number"}}, "in.1") == "text"


def test_get_finds_an_entry_that_is_none() -> None:
    assert get({"a": {"b": None}}, "a.b") is None


# ---- map_arrays


@pytest.mark.parametrize("kind", STRUCTURES)
def test_map_arrays_keeps_structure_and_types(kind: str) -> None:
    batch = whole_batch(kind)
    seen: list[Any] = []

    def twice(array: Any) -> Any:
        seen.append(array)
        return (
            memoryview(bytes(array))
            if isinstance(array, memoryview)
            else array.copy()
            if isinstance(array, np.ndarray)
            else array.clone()
        )

    same(map_arrays(twice, batch), batch)
    arrays = [leaf for leaf in leaves(batch) if np.ndim(get(batch, leaf.path)) > 0]
    assert seen or all(isinstance(get(batch, leaf.path), list | tuple) for leaf in arrays)


def test_map_arrays_reaches_lists_of_samples_and_0d_arrays() -> None:
    batch = {
        **detection_batch(),
        "scale": torch.tensor(1.0),
        "losses": [torch.tensor(1.0), torch.tensor(2.0)],
    }
    new = map_arrays(lambda array: array + 1, batch)
    assert new["scale"] == 2
    assert new["losses"] == [2, 3]
    assert (new["targets"][3]["boxes"] == 1).all()
    assert (batch["targets"][3]["boxes"] == 0).all()


def test_map_arrays_leaves_what_is_no_array() -> None:
    class Moves:
        def to(self, device: str) -> Moves:
            raise AssertionError("map_arrays does not move objects")

    batch = {"names": NAMES, "object": Moves(), "n": np.float32(1), "none": None}
    assert map_arrays(lambda array: array + 1, batch) is batch


def test_map_leaves_gives_objects_to_the_function() -> None:
    packed = torch.nn.utils.rnn.pack_padded_sequence(torch.zeros(4, 2, 3), torch.tensor([4, 2]))
    seen: list[Any] = []
    map_leaves(
        lambda leaf: seen.append(leaf) or leaf, {"packed": packed, "names": NAMES, "x": x(), "object": object}
    )
    assert seen[0] is packed
    assert len(seen) == 3


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
    first = make_leaf("tensor", samples)  # a list of nothing but scalars would be a list of samples
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
def test_any_nesting_is_cut(shape: Any, samples: int, microbatch_size: int) -> None:
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
