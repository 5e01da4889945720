"""Segments: consecutive operations on the rows of a micro-batch, compiled by Inductor into one function.

A cache of the process is keyed by the operations, their wiring and the form of the inputs (shapes, strides,
dtypes, devices), never by numbers. So a second update or an equal layer compiles nothing. Functions are
traced with `make_fx` below autograd, without Dynamo and its guards: each call compares the form instead. A
segment that cannot be compiled runs operation by operation, after one warning.
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
from ..ir.shard import BatchSlice
from ..ir.values import Run

_DEVICES = {"cpu", "cuda"}
InputForm = tuple[
    Any, ...
]  # of the inputs: number of samples; shape, strides, dtype and device of each tensor


class Member(NamedTuple):
    """Operation of a segment, on registers that are numbered from 0: first the inputs of the segment.

    Attributes:
        run: as in `Node`.
        inputs: registers that it reads.
        outputs: (index of the result, register); index None: the only result.
        reduced: indices of the results that are reduced.
    """

    run: Run
    inputs: tuple[int, ...]
    outputs: tuple[tuple[int | None, int], ...]
    reduced: tuple[int | None, ...]


class Segment:
    """Function that runs consecutive operations on a micro-batch; a `Run`.

    Args:
        wanted: registers that are read after the segment.
        size: number of registers.
    """

    def __init__(self, members: tuple[Member, ...], wanted: tuple[int, ...], size: int) -> None:
        self.structure = members, wanted
        self._size = size
        self._frees: list[list[int]] = [[] for _ in members]
        # Without compilation, a segment must not need more memory than its operations alone.
        last: dict[int, int] = {}
        for position, member in enumerate(members):
            last.update((slot, position) for slot in (*member.inputs, *(slot for _, slot in member.outputs)))
        for slot, position in last.items():
            if slot not in wanted:
                self._frees[position].append(slot)
        self._by_form: dict[InputForm, _Compiled | None] = {}

    def __call__(self, microbatch: BatchSlice, tensors: list[Tensor]) -> list[Any]:
        """Run the segment on a micro-batch; empty `tensors`, so that each one is freed after its last use.

        Return the contents of the `wanted` registers, then a list for each operation with results to reduce.
        """
        form = (microbatch.samples, *[(t.shape, t.stride(), t.dtype, t.device) for t in tensors])
        if form not in self._by_form:
            # Micro-batches have at most two sizes, so a segment has few forms.
            self._by_form[form] = _cached(_Key(self, form)) if _are_compilable(tensors) else None
        entry = self._by_form[form]
        return (
            self.steps(microbatch, tensors)
            if entry is None
            else _with_tensors(entry.results, entry.run(tensors))
        )

    def steps(self, microbatch: Any, tensors: list[Tensor]) -> list[Any]:
        """Run the operations one by one."""
        registers: list[Any] = [*tensors, *[None] * (self._size - len(tensors))]
        # The caller's list would keep rows alive that nothing reads after the segment.
        tensors.clear()
        members, wanted = self.structure
        reduced: list[Any] = []
        for member, frees in zip(members, self._frees, strict=True):
            result = member.run(microbatch, [registers[slot] for slot in member.inputs])
            for index, slot in member.outputs:
                registers[slot] = result if index is None else result[index]
            if member.reduced:
                reduced.append([result if index is None else result[index] for index in member.reduced])
            for slot in frees:
                registers[slot] = None
            del result  # a reference would keep it alive during the next operation
        return [*(registers[slot] for slot in wanted), *reduced]


def _are_compilable(tensors: Iterable[Tensor]) -> bool:
    """Return whether all are plain tensors on a device that Inductor supports."""
    return all(type(t) in (Tensor, torch.nn.Parameter) and t.device.type in _DEVICES for t in tensors)


class _Samples(NamedTuple):
    """Stand-in for a `BatchSlice` in tracing: an operation that reads `start` fails.

    Otherwise the position of the first micro-batch would become a constant of the compiled function.
    """

    samples: int


class _Key:
    """Cache key of a segment and a form; refers to the segment until it is compiled."""

    __slots__ = ("form", "hash", "key", "segment")

    def __init__(self, segment: Segment, form: InputForm) -> None:
        # Functions in `structure` compare by identity; rules return the same object for equal arguments.
        self.key = segment.structure, form, _settings()
        self.hash = hash(self.key)
        self.form = form
        self.segment: Segment | None = segment

    def __hash__(self) -> int:
        return self.hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self.key == other.key


def _settings() -> tuple[Any, ...]:
    """Return torch's global settings that change the numbers or the generated code."""
    return (
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        _precision(),
        torch.get_num_threads(),
    )


def _precision() -> tuple[Any, ...]:
    """Return the precision of float32 products, from both of torch's interfaces that set it."""
    try:
        legacy = torch.get_float32_matmul_precision()
    except RuntimeError:  # raised if the newer interface was used
        legacy = None
    backends = torch.backends
    newer = (backends, backends.cuda.matmul, backends.cudnn, backends.mkldnn)
    by_operation = (
        getattr(getattr(backends, name), operation, None)
        for name in ("cudnn", "mkldnn")
        for operation in _OPERATIONS
    )
    return legacy, *(getattr(one, "fp32_precision", None) for one in (*newer, *by_operation))


_OPERATIONS = ("conv", "rnn", "matmul")


class _Compiled(NamedTuple):
    run: Callable[[list[Tensor]], Sequence[Tensor]]  # empties its argument
    results: Any  # the nested results, with an `_Output` in place of each tensor


class _Output(NamedTuple):
    number: int


def _without_tensors(results: Any, tensors: list[Tensor]) -> Any:
    """Return the results with an `_Output` in place of each tensor; append each tensor once to the list."""
    if isinstance(results, Tensor):
        # By identity, because `in` would compare tensors element by element.
        index = next((i for i, one in enumerate(tensors) if one is results), len(tensors))
        if index == len(tensors):
            tensors.append(results)
        return _Output(index)
    if isinstance(results, (list, tuple)):
        return type(results)([_without_tensors(item, tensors) for item in results])
    return results


def _with_tensors(results: Any, tensors: Sequence[Tensor]) -> Any:
    kind = type(results)
    if kind is _Output:
        return tensors[results.number]
    return kind([_with_tensors(item, tensors) for item in results]) if kind in (list, tuple) else results


@lru_cache(maxsize=1 << 10)
def _cached(key: _Key) -> _Compiled | None:
    segment, key.segment = key.segment, None  # otherwise the cache would keep the segment alive
    assert segment is not None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Inductor warns about its own deprecations
            return _compile(segment, key.form)
    except Exception as error:  # Inductor may raise any type, e.g. for a missing C++ compiler
        if out_of_memory(error):  # the caller retries with smaller micro-batches
            raise
        _warn(f"{type(error).__name__}: {(str(error).strip() or 'no reason given').splitlines()[0]}")
        return None  # also cached, so that a failing segment is tried once


@lru_cache(maxsize=1 << 10)
def _warn(reason: str) -> None:
    """Warn once for each reason."""
    warn(f"virtual_batch(compile=True) cannot compile some operations, which run uncompiled ({reason})")


def _compile(segment: Segment, form: InputForm) -> _Compiled | None:
    """Compile a segment from its form alone; None if a result shares memory with an input."""
    # Imported here, because Inductor takes seconds to load and few blocks compile.
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.utils import BoxedBool
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch._subclasses.functional_tensor import dispatch_functionalize
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.utils._python_dispatch import _disable_current_modes

    samples, *rows = form

    def function(*tensors: Tensor) -> tuple[Tensor, ...]:
        outputs: list[Tensor] = []
        _without_tensors(segment.steps(_Samples(samples), list(tensors)), outputs)
        return tuple(outputs)

    # Outside of the block's dispatch mode, which would record the traced operators. Fake tensors need no
    # memory and compute nothing.
    with _disable_current_modes(), torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True):
        inputs = [
            torch.empty_strided(shape, strides, dtype=dtype, device=device)
            for shape, strides, dtype, device in rows
        ]
        outputs: list[Tensor] = []
        results = _without_tensors(segment.steps(_Samples(samples), list(inputs)), outputs)
        memory = {tensor.untyped_storage()._cdata for tensor in inputs}
        # A result that is a view would have the storage offset of the first micro-batch.
        if any(tensor.untyped_storage()._cdata in memory for tensor in outputs):
            return None
        # `dispatch_functionalize` rewrites in-place operators, which Inductor does not take.
        graph = make_fx(dispatch_functionalize(function), decomposition_table=select_decomp_table())(*inputs)
        # No CUDA graphs: a replay would overwrite the results of earlier micro-batches, which may be stored.
        run: Any = compile_fx_inner(graph, inputs, cudagraphs=BoxedBool(False))
    return _Compiled(run, results)
