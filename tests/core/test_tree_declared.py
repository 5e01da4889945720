"""Nested batches: `unsplit=` and `per_sample=`, and the errors for batches that cannot be split."""

from __future__ import annotations

from collections import UserDict
from typing import Any

import numpy as np
import pytest
import torch

from superbatch.batch.split import split
from superbatch.batch.tree import Leaf, count_samples, get, leaves, plan, take
from superbatch.errors import InputError, SplitError
from tests.core.batches import NAMES, Frozen, N, Pair, detection_batch, x


def test_unsplit_keeps_everything_under_a_path() -> None:
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


def test_per_sample_splits_lists_of_any_objects() -> None:
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
def test_a_missing_declared_path_lists_the_existing_ones(argument: str) -> None:
    batch = {"x": x(), "meta": {"ids": NAMES}, "pair": (x(), x())}
    with pytest.raises(
        InputError,
        match=r"declared path 'edges'.*: 'x', 'meta', 'meta\.ids', 'pair', 'pair\.0', 'pair\.1'",
    ):
        plan(batch, **{argument: ("edges",)})


def test_a_long_list_of_paths_is_shortened() -> None:
    with pytest.raises(InputError, match=r"'k0', .*'k29' and 70 more"):
        get({f"k{i}": i for i in range(100)}, "other")


def test_a_declared_path_inside_another_is_refused() -> None:
    with pytest.raises(InputError, match=r"'meta\.ids'.*lies inside a part that is declared"):
        plan({"x": x(), "meta": {"ids": NAMES}}, unsplit=("meta", "meta.ids"))


def test_a_path_cannot_be_unsplit_and_per_sample() -> None:
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
    with pytest.raises(SplitError, match=r"The batch has 0 samples.*accumulate\(None\)"):
        plan(batch)


@pytest.mark.parametrize(
    "batch", [{}, 3, "text", None, {"rate": 0.5}, torch.tensor(1.0), ({}, {}), Pair(1, 2)]
)
def test_a_batch_without_samples_to_split_is_refused(batch: Any) -> None:
    with pytest.raises(SplitError, match=r"nothing to split.*at least one array or list"):
        plan(batch)


def test_a_batch_with_every_path_unsplit_is_refused() -> None:
    with pytest.raises(SplitError, match=r"nothing to split.*entries \('x'\)"):
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


def test_a_list_of_scalar_dicts_per_sample_is_not_kept_silently() -> None:
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


def test_an_out_of_memory_error_in_a_slice_keeps_its_type() -> None:
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
