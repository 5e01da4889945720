"""Batches of every structure and their comparison, for the tests of splitting."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import enum
import pathlib
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from decimal import Decimal
from typing import Any, NamedTuple

import numpy as np
import torch

N = 8  # samples of every batch of the tables


def same(a: Any, b: Any) -> None:
    """Assert that two batches have the same type, dtype, structure and values."""
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)
    elif isinstance(a, np.ndarray):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)
    elif isinstance(a, Mapping):
        assert list(a) == list(b)
        for key in a:
            same(a[key], b[key])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            same(x, y)
    elif dataclasses.is_dataclass(a):
        for field in dataclasses.fields(a):
            assert hasattr(a, field.name) == hasattr(b, field.name)
            if hasattr(a, field.name):
                same(getattr(a, field.name), getattr(b, field.name))
    else:
        assert a == b or a is b


def x(*shape: int) -> torch.Tensor:
    return torch.arange(N * int(np.prod(shape)), dtype=torch.float64).reshape(N, *shape)


NAMES = [f"sample {i}" for i in range(N)]


class Pair(NamedTuple):
    image: Any
    label: Any


Untyped = collections.namedtuple("Untyped", "shape data")  # not an array, although it has an entry "shape"


@dataclasses.dataclass
class Sample:
    image: Any
    scale: float = 1.0
    total: Any = dataclasses.field(init=False)
    never_set: Any = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.total = self.image.sum(-1)
        self.note = "not a field"


@dataclasses.dataclass(frozen=True)
class Frozen:
    image: Any
    label: Any


@dataclasses.dataclass(frozen=True, slots=True)
class Slots:
    image: Any
    label: Any


@dataclasses.dataclass
class NeedsArgument:
    image: Any
    source: dataclasses.InitVar[str]


class Names(list[Any]):
    """A user-defined list type with an attribute."""

    language = "en"


class Encoding(UserDict[str, Any]):
    """Imitation of Hugging Face's BatchEncoding: entries as attributes, `.to`, one encoding per sample."""

    def __init__(self, data: dict[str, Any], encodings: list[Any] | None = None) -> None:
        super().__init__(data)
        self._encodings = encodings

    def __getattr__(self, name: str) -> Any:
        try:
            return self.data[name]
        except KeyError:
            raise AttributeError(name) from None

    def __getstate__(self) -> dict[str, Any]:
        return {"data": self.data, "encodings": self._encodings}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.data, self._encodings = state["data"], state["encodings"]

    def to(self, device: str) -> Encoding:
        self.data = {key: value.to(device) for key, value in self.data.items()}
        return self

    def word_ids(self, index: int) -> Any:
        assert self._encodings is not None
        return self._encodings[index]


class AttributeDict(dict[str, Any]):
    """A dict whose attributes are its entries."""

    def __init__(self, *args: Any, **entries: Any) -> None:
        super().__init__(*args, **entries)
        self.__dict__ = self


class Mirrored(OrderedDict[str, Any]):
    """A dict that also sets its entries as attributes in __init__, as Hugging Face's ModelOutput does."""

    def __init__(self, **entries: Any) -> None:
        super().__init__(**entries)
        self.__dict__.update(entries)


class Frozendict(Mapping[str, Any]):
    def __init__(self, entries: Mapping[str, Any]) -> None:
        self.entries = dict(entries)

    def __getitem__(self, key: str) -> Any:
        return self.entries[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)


class Writable(Frozendict, MutableMapping[str, Any]):
    def __setitem__(self, key: str, value: Any) -> None:
        self.entries[key] = value

    def __delitem__(self, key: str) -> None:
        del self.entries[key]


class Color(enum.Enum):
    RED = 1


Cut = Callable[[Any], Any]  # slices one leaf; a structure built with it is the expected micro-batch

STRUCTURES: dict[str, Callable[[Cut], Any]] = {
    "tensor": lambda cut: cut(x(3)),
    "1-d tensor": lambda cut: cut(x()),
    "numpy array": lambda cut: cut(np.arange(N * 2, dtype=np.float32).reshape(N, 2)),
    "numpy array of texts": lambda cut: cut(np.array(NAMES)),
    "memoryview": lambda cut: {"image": cut(x()), "bytes": cut(memoryview(bytes(range(N))))},
    "list of texts": lambda cut: cut(NAMES),
    "tuple of texts": lambda cut: cut(tuple(NAMES)),
    "list of bytes and None": lambda cut: cut([b"a", None] * (N // 2)),
    "list of 0-d tensors": lambda cut: cut(list(x().unbind())),
    "list of NumPy scalars": lambda cut: cut(list(np.arange(N))),
    "tuple (x, y)": lambda cut: (cut(x(3, 4)), cut(torch.arange(N))),
    "list [x, y], as default_collate gives": lambda cut: [cut(x(3, 4)), cut(torch.arange(N))],
    "long tuple": lambda cut: tuple(cut(x(i)) for i in range(1, 40)),
    "list of lists of arrays": lambda cut: [[cut(x(1)), cut(x(2)), cut(x(3))], cut(x())],
    "tuple with a dict": lambda cut: (cut(x(2)), {"y": cut(torch.arange(N)), "meta": {"ids": cut(NAMES)}}),
    "dict": lambda cut: {"image": cut(x(3)), "label": cut(torch.arange(N))},
    "dict with texts": lambda cut: {"image": cut(x(3)), "meta": cut(NAMES)},
    "dict with keys that are no texts": lambda cut: {0: cut(x()), (1, 2): cut(x(1)), None: cut(x(2))},
    "OrderedDict": lambda cut: OrderedDict(b=cut(x()), a=cut(x(2))),
    "defaultdict": lambda cut: defaultdict(list, image=cut(x(2)), names=cut(NAMES)),
    "UserDict": lambda cut: UserDict({"image": cut(x())}),
    "BatchEncoding-like": lambda cut: Encoding({"input_ids": cut(x(5)), "shape": cut(torch.arange(N))}),
    "AttributeDict": lambda cut: AttributeDict(image=cut(x()), label=cut(x(1))),
    "Mirrored": lambda cut: Mirrored(image=cut(x()), label=cut(x(1))),
    "Mapping that cannot be written": lambda cut: Frozendict({"image": cut(x())}),
    "MutableMapping of one's own": lambda cut: Writable({"image": cut(x()), "scale": 2.0}),
    "namedtuple": lambda cut: Pair(cut(x(3)), cut(torch.arange(N))),
    "namedtuple with a scalar": lambda cut: Pair(cut(x(3)), 0.5),
    "namedtuple with a field named shape": lambda cut: Untyped((cut(x(1)), cut(x())), cut(x())),
    "structseq": lambda cut: torch.return_types.max((cut(x()), cut(torch.arange(N)))),
    "dataclass": lambda cut: Sample(cut(x(3))),
    "frozen dataclass": lambda cut: Frozen(cut(x(3)), cut(NAMES)),
    "frozen dataclass with slots": lambda cut: Slots(cut(x(3)), Pair(cut(x()), None)),
    "dataclass with an InitVar": lambda cut: NeedsArgument(cut(x(3)), "disk"),
    "list of one's own": lambda cut: {"image": cut(x()), "names": Names(cut(NAMES))},
    "empty containers": lambda cut: {"image": cut(x()), "options": {}},
    "scalars stand alone": lambda cut: {
        "image": cut(x()),
        "epoch": 3,
        "rate": 0.5,
        "on": True,
        "none": None,
        "text": "train",
        "raw": b"raw",
        "complex": 1j,
        "enum": Color.RED,
        "file": pathlib.PurePath("a"),
        "day": datetime.date(2024, 1, 1),
        "decimal": Decimal("0.1"),
        "numpy scalar": np.float32(2),
        "0-d tensor": torch.tensor(2.0),
        "0-d array": np.array(2.0),
    },
}


def samples_of(start: int, stop: int) -> Cut:
    return lambda leaf: leaf[start:stop]


def whole_batch(kind: str) -> Any:
    return STRUCTURES[kind](lambda leaf: leaf)


def detection_batch() -> dict[str, Any]:
    """A batch of images of different sizes, each with its own number of boxes."""
    images = [torch.zeros(3, 10 + i, 20 - i) for i in range(N)]
    targets = [{"boxes": torch.zeros(i + 1, 4), "labels": torch.arange(i + 1)} for i in range(N)]
    return {"images": images, "targets": targets}
