"""Nested batches: paths of their leaves, and functions over all leaves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from superbatch.batch.tree import get, leaves, map_arrays, map_leaves
from superbatch.errors import InputError
from tests.core.batches import NAMES, STRUCTURES, Frozen, Pair, detection_batch, same, whole_batch, x


def test_get_finds_each_leaf_by_its_path() -> None:
    batch = (x(), {"a.b": x(1), "a": {"b": x(2), "c": x(3)}, 5: Pair(x(4), Frozen(x(5), NAMES))})
    paths = [leaf.path for leaf in leaves(batch)]
    assert paths == ["0", "1.a.b", "1.a.b", "1.a.c", "1.5.image", "1.5.label.image", "1.5.label.label"]
    assert get(batch, "0") is batch[0]
    assert get(batch, "1.5.label.image") is batch[1][5].label.image
    assert get(batch, "1.a.c") is batch[1]["a"]["c"]
    assert get(batch, "1.a.b") is batch[1]["a.b"]  # of two possible keys the longest
    assert get(batch, "1.5.label.label.2") == "sample 2"
    assert get(batch, "") is batch


@pytest.mark.parametrize("path", ["y", "x.0", "meta.y", "meta.ids.99", "meta.", ".meta", "meta..ids"])
def test_get_lists_the_existing_paths(path: str) -> None:
    with pytest.raises(InputError, match=r"no part at path .*'x', 'meta', 'meta\.ids'"):
        get({"x": x(), "meta": {"ids": NAMES}}, path)


def test_get_from_a_tensor_is_an_error() -> None:
    with pytest.raises(InputError, match=r"path 'labels'.*'' only, which has no parts"):
        get(x(), "labels")


@pytest.mark.parametrize("path", [None, 0, ("x",), ["x"]])
def test_a_path_is_text(path: Any) -> None:
    with pytest.raises(InputError, match=r"is not a str"):
        get([x()], path)
    with pytest.raises(InputError):
        get({"x": x()}, path)


def test_of_equal_names_the_text_key_is_used() -> None:
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


def test_map_arrays_keeps_other_objects() -> None:
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
