"""Several operations on the rows of a micro-batch, compiled by Inductor into one.

* What is compiled is a function of the operations' own functions, of how they are wired and of the form of
  what they read (shapes, strides, dtypes, devices): it is remembered for the process as such, and holds no
  numbers. A second update compiles nothing, nor does a layer that is like another. Sizes of micro-batches are
  two at most.
* Dynamo has no part in it: the functions are traced below autograd, by the operators they call. So nothing
  is guarded: the form is all that it depends on, and it is compared in each call.
* What cannot be compiled runs one operation after the other, with a warning that says why.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from superbatch.torch.memory.out_of_memory import out_of_memory

from ...warn import warn
from ..ir.layout import Part
from ..ir.values import Run

_DEVICES = {"cpu", "cuda"}
Form = tuple[Any, ...]  # of what is read: the samples, and of each tensor shape, strides, dtype, device


class Member(NamedTuple):
    """An operation of a segment, which has registers of its own: those that it reads, then those it fills.

    Attributes:
        run: as in `Node`.
        inputs: the registers it is given.
        outputs: which result (None: the only one) into which register.
        whole: which results are reduced.
    """

    run: Run
    inputs: tuple[int, ...]
    outputs: tuple[tuple[int | None, int], ...]
    whole: tuple[int | None, ...]


class Segment:
    """Operations that follow each other, as a function of the rows of a micro-batch like that of one of them.

    Args:
        members: the operations.
        wanted: registers that are needed afterwards.
        size: how many registers there are.
    """

    def __init__(self, members: tuple[Member, ...], wanted: tuple[int, ...], size: int) -> None:
        self.structure = members, wanted
        self._size = size
        self._frees: list[list[int]] = [[] for _ in members]
        last: dict[int, int] = {}
        for place, member in enumerate(members):
            last.update((slot, place) for slot in (*member.inputs, *(slot for _, slot in member.outputs)))
        for slot, place in last.items():
            if slot not in wanted:
                self._frees[place].append(slot)
        self._ways: dict[Form, _Compiled | None] = {}

    def __call__(self, part: Part, tensors: list[Tensor]) -> list[Any]:
        """Run it.

        Args:
            part: the micro-batch.
            tensors: what it reads; freed when it is used.

        Returns:
            What is in the registers that are wanted, and a list for each operation with results to reduce.
        """
        form = (part.samples, *[(t.shape, t.stride(), t.dtype, t.device) for t in tensors])
        if form not in self._ways:
            self._ways[form] = _remembered(_Key(self, form)) if _plain(tensors) else None
        way = self._ways[form]
        return self.steps(part, tensors) if way is None else _put_back(way.results, way.run(tensors))

    def steps(self, part: Any, tensors: list[Tensor]) -> list[Any]:
        """Run one operation after the other."""
        registers: list[Any] = [*tensors, *[None] * (self._size - len(tensors))]
        tensors.clear()
        members, wanted = self.structure
        found: list[Any] = []
        for member, frees in zip(members, self._frees, strict=True):
            result = member.run(part, [registers[slot] for slot in member.inputs])
            for index, slot in member.outputs:
                registers[slot] = result if index is None else result[index]
            if member.whole:
                found.append([result if index is None else result[index] for index in member.whole])
            for slot in frees:
                registers[slot] = None
            del result
        return [*(registers[slot] for slot in wanted), *found]


def _plain(tensors: Iterable[Tensor]) -> bool:
    """Return whether they are ordinary tensors on a device with a compiler."""
    return all(type(t) in (Tensor, torch.nn.Parameter) and t.device.type in _DEVICES for t in tensors)


class _Samples(NamedTuple):
    """A micro-batch that is nowhere: to ask where is an error, for what is compiled runs anywhere."""

    samples: int


class _Key:
    """Key of a segment on rows of a form, with the segment until it is compiled."""

    __slots__ = ("form", "hash", "key", "segment")

    def __init__(self, segment: Segment, form: Form) -> None:
        self.key = segment.structure, form, _settings()
        self.hash = hash(self.key)
        self.form = form
        self.segment: Segment | None = segment

    def __hash__(self) -> int:
        return self.hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self.key == other.key


def _settings() -> tuple[Any, ...]:
    """Settings that the numbers or the generated code depend on."""
    return (
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        _precision(),
        torch.get_num_threads(),
    )


def _precision() -> tuple[Any, ...]:
    """Rounding of float32 products, by whichever of torch's two interfaces was used to set it."""
    try:
        legacy = torch.get_float32_matmul_precision()
    except RuntimeError:  # both were used, or the newer one alone
        legacy = None
    backends = torch.backends
    newer = (backends, backends.cuda.matmul, backends.cudnn, backends.mkldnn)
    parts = (getattr(getattr(backends, name), part, None) for name in ("cudnn", "mkldnn") for part in _PARTS)
    return legacy, *(getattr(one, "fp32_precision", None) for one in (*newer, *parts))


_PARTS = ("conv", "rnn", "matmul")


class _Compiled(NamedTuple):
    run: Callable[[list[Tensor]], Sequence[Tensor]]  # empties the list that it is given
    results: Any  # with an `_Output` in the place of each tensor


class _Output(NamedTuple):
    number: int


def _taken_out(results: Any, tensors: list[Tensor]) -> Any:
    """Return the results without their tensors, which are put into a list, each once."""
    if isinstance(results, Tensor):
        index = next((i for i, one in enumerate(tensors) if one is results), len(tensors))
        if index == len(tensors):
            tensors.append(results)
        return _Output(index)
    if isinstance(results, (list, tuple)):
        return type(results)([_taken_out(item, tensors) for item in results])
    return results


def _put_back(results: Any, tensors: Sequence[Tensor]) -> Any:
    kind = type(results)
    if kind is _Output:
        return tensors[results.number]
    return kind([_put_back(item, tensors) for item in results]) if kind in (list, tuple) else results


@lru_cache(maxsize=1 << 10)
def _remembered(key: _Key) -> _Compiled | None:
    segment, key.segment = key.segment, None
    assert segment is not None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own, about itself
            return _made(segment, key.form)
    except Exception as error:  # compilers raise anything, and an update is not lost for want of one
        if out_of_memory(error):
            raise
        _warn(f"{type(error).__name__}: {(str(error).strip() or 'no reason given').splitlines()[0]}")
        return None


@lru_cache(maxsize=1 << 10)
def _warn(reason: str) -> None:
    """Say it once."""
    warn(f"virtual_batch(compile=True): some operations are not compiled and run as without it ({reason})")


def _made(segment: Segment, form: Form) -> _Compiled | None:
    """Compile a segment, by its form alone; None if what it gives is a part of what it reads."""
    # Loaded here: it takes seconds.
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.utils import BoxedBool
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch._subclasses.functional_tensor import dispatch_functionalize
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.utils._python_dispatch import _disable_current_modes

    samples, *rows = form

    def function(*tensors: Tensor) -> tuple[Tensor, ...]:
        found: list[Tensor] = []
        _taken_out(segment.steps(_Samples(samples), list(tensors)), found)
        return tuple(found)

    with _disable_current_modes(), torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True):
        inputs = [
            torch.empty_strided(shape, strides, dtype=dtype, device=device)
            for shape, strides, dtype, device in rows
        ]
        found: list[Tensor] = []
        results = _taken_out(segment.steps(_Samples(samples), list(inputs)), found)
        memory = {tensor.untyped_storage()._cdata for tensor in inputs}
        if any(tensor.untyped_storage()._cdata in memory for tensor in found):
            return None
        # Nothing is written in place in what Inductor takes.
        graph = make_fx(dispatch_functionalize(function), decomposition_table=select_decomp_table())(*inputs)
        # A replayed graph writes its results to the same memory each time, and they are kept here.
        run: Any = compile_fx_inner(graph, inputs, cudagraphs=BoxedBool(False))
    return _Compiled(run, results)
