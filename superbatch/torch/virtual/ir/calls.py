"""Operator calls on values, the strategies that rules return for them, and the shapes of their results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .reductions import Sums
from .shard import BatchSlice, Shard
from .strides import with_kernel_strides
from .values import Operand, Reduction, Run, Value

Path = tuple[Any, ...]  # (position,) or ("name",); for a tensor in a list, its index follows


class Call(NamedTuple):
    """Operator with its arguments.

    Attributes:
        func: the operator, an `OpOverload`.
        args: positional arguments, with a `Value` for each tensor.
        kwargs: keyword arguments.
        tensors: all values, in the order of the arguments.
        paths: path of each value in `args` or `kwargs`.
        samples: number of samples of the whole batch.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tensors: list[Value]
    paths: list[Path]
    samples: int

    def argument(self, name: str, default: Any = None) -> Any:
        """Return an argument by its name; an omitted one has the default of the schema, or else `default`."""
        if name in self.kwargs:
            return self.kwargs[name]
        position, schema_default = _arguments(self.func).get(name, (None, None))
        if position is not None and position < len(self.args):
            return self.args[position]
        return default if schema_default is None else schema_default

    def on(self, tensors: list[Value]) -> Call:
        """Return the same call on other values."""
        return Call(self.func, self.args, self.kwargs, tensors, self.paths, self.samples)

    def replaced(self, **changes: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return args and kwargs with some arguments replaced, by name."""
        args, kwargs = list(self.args), dict(self.kwargs)
        for position, argument in enumerate(self.func._schema.arguments):
            if argument.name in changes:
                if position < len(args):
                    args[position] = changes.pop(argument.name)
                else:
                    kwargs[argument.name] = changes.pop(argument.name)
        assert not changes  # a misspelled name would be ignored silently, and the rule would be wrong
        return tuple(args), kwargs


@cache  # each access to `_schema.arguments` converts the C++ list anew: some microseconds per argument
def _arguments(func: Any) -> dict[str, tuple[int, Any]]:
    """Return position and default of each argument of an operator, by name."""
    arguments = enumerate(func._schema.arguments)
    return {argument.name: (position, argument.default_value) for position, argument in arguments}


class OpStrategy(NamedTuple):
    """Strategy to run a call micro-batch by micro-batch.

    Attributes:
        operands: the inputs, in the order of the tensors that `run` receives.
        outputs: placement of each output: a `Shard`, or `PARTIAL`.
        run: computes the outputs of one micro-batch.
        reduce: creates the reduction of the `PARTIAL` outputs.
        view: the output shares the memory of its input.
        light: running it costs about as much as reading the inputs.
        reads_position: `run` reads the position of the micro-batch (`BatchSlice.start`), not only its size.
        results: number of outputs that are computed. Later outputs are None if they are tensors, and those of
            the whole batch if they are numbers. None: all are computed.
    """

    operands: Sequence[Operand]
    outputs: Sequence[Shard | None]
    run: Run
    reduce: Callable[[], Reduction] = Sums
    view: bool = False
    light: bool = False
    reads_position: bool = False
    results: int | None = None

    def drawing(self, run: Run) -> OpStrategy:
        """Return the strategy with a `run` that draws random numbers; such a strategy is not light."""
        return self._replace(run=run, light=False)


_aten: Any = torch.ops.aten
# `view` may raise for the strides of a micro-batch where it works for those of the batch; `reshape` copies.
_REPLACEMENTS: dict[Any, Any] = {
    _aten.view.default: _aten.reshape.default,
    _aten._unsafe_view.default: _aten.reshape.default,
    _aten._reshape_copy.default: _aten.reshape.default,
}


# The derivatives of these call `is_contiguous()` on the matrix of the program. If it is True, they read the
# saved LU factors as those of the transpose. So each micro-batch must have the memory order of the batch.
_READ_STRIDES = {torch.ops.aten._linalg_det, torch.ops.aten._linalg_slogdet, torch.ops.aten._linalg_solve_ex}


def run_of(call: Call, args: tuple[Any, ...] | None = None, kwargs: dict[str, Any] | None = None) -> Run:
    """Return the function that runs the call on a micro-batch: one real tensor for each of `call.tensors`.

    `args` and `kwargs`, with tensors at the same paths, replace those of the call.
    """
    # A micro-batch may have other strides than the batch. Only the kernels listed in `strides` misread them.
    run = with_kernel_strides(call.func, [value.meta for value in call.tensors], _run_of(call, args, kwargs))
    if call.func.overloadpacket not in _READ_STRIDES:
        return run
    by_rows = call.tensors[0].meta.is_contiguous()
    return lambda microbatch, tensors: run(microbatch, [_in_order(tensors[0], by_rows), *tensors[1:]])


def _in_order(matrices: Tensor, by_rows: bool) -> Tensor:
    """Return the matrices in row-major order (`by_rows`), or in column-major order."""
    if matrices.is_contiguous() == by_rows:
        return matrices
    return matrices.contiguous() if by_rows else matrices.mT.contiguous().mT


class Direct:
    """Call ``func(*tensors, *other_args)``, which a generated sweep inlines."""

    __slots__ = ("func", "other_args")

    def __init__(self, func: Callable[..., Any], other_args: tuple[Any, ...]) -> None:
        self.func, self.other_args = func, other_args

    def __call__(self, microbatch: BatchSlice, tensors: list[Tensor]) -> Any:
        """Run the call."""
        return self.func(*tensors, *self.other_args)


def _run_of(call: Call, args: tuple[Any, ...] | None, kwargs: dict[str, Any] | None) -> Run:
    func = _REPLACEMENTS.get(call.func, call.func)
    func = getattr(func, "_op", func)  # the C++ function: `OpOverload.__call__` adds a Python frame per call
    args = call.args if args is None else args
    kwargs = call.kwargs if kwargs is None else kwargs
    paths = call.paths
    if all(len(path) == 1 and isinstance(path[0], int) for path in paths):
        positions = [path[0] for path in paths]
        if positions == list(range(len(positions))) and not kwargs:
            return Direct(func, args[len(positions) :])
        # The common case: no tensor is in a list, so a call costs one copied list.
        template = list(args)

        def run(microbatch: BatchSlice, tensors: list[Tensor]) -> Any:
            arguments = template.copy()
            for position, tensor in zip(positions, tensors, strict=True):
                arguments[position] = tensor
            return func(*arguments, **kwargs)

        return run

    # For tensors in a list, as in cat([x, y]), or passed by keyword.
    def run_nested(microbatch: BatchSlice, tensors: list[Tensor]) -> Any:
        new_args, new_kwargs = substituted(args, kwargs, paths, tensors)
        return func(*new_args, **new_kwargs)

    return run_nested


def substituted(
    args: tuple[Any, ...], kwargs: dict[str, Any], paths: Iterable[Path], tensors: Iterable[Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Return copies of the arguments with other tensors at the given paths."""
    # Lists are copied, because micro-batches and cached strategies share the lists of the call.
    new_args: list[Any] = [list(arg) if isinstance(arg, (list, tuple)) else arg for arg in args]
    new_kwargs = dict(kwargs)
    for path, tensor in zip(paths, tensors, strict=True):
        where: Any = new_kwargs if isinstance(path[0], str) else new_args
        if len(path) == 1:
            where[path[0]] = tensor
        else:
            if where is new_kwargs:  # `dict(kwargs)` copied the dict, not the lists in it
                where[path[0]] = list(where[path[0]])
            where[path[0]][path[1]] = tensor
    return new_args, new_kwargs


# -- shapes of results --------------------------------------------------------------------------------------


@lru_cache(maxsize=1 << 14)  # one object per form, so that cache keys can compare metas by identity
def meta_tensor(
    shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, offset: int = 0
) -> Tensor:
    """Return a meta tensor of the given form; the same object for the same form."""
    if not offset:
        return torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    # empty_strided takes no storage offset, so the tensor is a view of memory that ends at its last element.
    reach = offset + 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True) if size)
    return torch.empty(reach, dtype=dtype, device="meta").as_strided(shape, stride, offset)


def meta_like(tensor: Tensor) -> Tensor:
    """Return the meta tensor with the form of the given tensor."""
    return meta_tensor(tuple(tensor.shape), tensor.stride(), tensor.dtype, int(tensor.storage_offset()))


def empty_like(meta: Tensor, device: torch.device) -> Tensor:
    """Return an uninitialized tensor with the shape, strides and dtype of a meta tensor."""
    return torch.empty_strided(meta.shape, meta.stride(), dtype=meta.dtype, device=device)


def shapes(call: Call) -> Any:
    """Return the operator's results on the meta device.

    Raises:
        NotImplementedError: the shape depends on the numbers, or the operator has no meta kernel.
    """
    metas = [value.meta for value in call.tensors]
    if call.func.overloadpacket in _SHAPES:
        return _SHAPES[call.func.overloadpacket](metas)
    args, kwargs = substituted(call.args, call.kwargs, call.paths, metas)
    if kwargs.get("device") is not None:
        kwargs["device"] = torch.device("meta")
    kwargs.pop("generator", None)  # shapes do not depend on it, and the cache would keep it alive
    key = _key(call.func, args, kwargs)
    return _shapes(_Arguments(key, args, kwargs, call.func))


def results(call: Call, strategy: OpStrategy | None) -> Any:
    """Return the meta results of a call, with None for tensors that the strategy does not compute.

    If a result is not a tensor and the strategy has no `results`, return None.
    """
    metas = shapes(call)
    if isinstance(metas, Tensor):
        return metas
    if strategy is not None and strategy.results is not None:
        count = strategy.results
        return [*metas[:count], *(None if isinstance(item, Tensor) else item for item in metas[count:])]
    return metas if all(item is None or isinstance(item, Tensor) for item in metas) else None


def _ctc_shapes(metas: list[Tensor]) -> list[Tensor]:
    steps, samples, _ = metas[0].shape  # log-probabilities [T, N, C], targets [N, S]
    table = (samples, steps, 2 * metas[1].shape[-1] + 1)  # labels, with a blank before, between and after
    return [torch.empty(shape, dtype=metas[0].dtype, device="meta") for shape in ((samples,), table)]


def _lstm_cell_shapes(metas: list[Tensor]) -> list[Tensor]:
    gates, cell = metas[0], metas[2]
    return [torch.empty(like.shape, dtype=like.dtype, device="meta") for like in (cell, cell, gates)]


def _gru_cell_shapes(metas: list[Tensor]) -> list[Tensor]:
    gates, hidden = metas[0], metas[2]
    return [torch.empty_like(hidden), gates.new_empty(len(hidden), 5 * hidden.shape[1])]


def _gru_cell_backward_shapes(metas: list[Tensor]) -> list[Tensor]:
    hidden, workspace = metas
    gates = workspace.new_empty(len(hidden), 3 * hidden.shape[1])
    # Always five results: without biases the kernel returns undefined tensors as their gradients.
    return [gates, gates, torch.empty_like(hidden), gates[0], gates[0]]


# Operators whose meta kernel is missing or incomplete.
_SHAPES: dict[Any, Callable[[list[Tensor]], Any]] = {
    torch.ops.aten._ctc_loss: _ctc_shapes,
    torch.ops.aten._ctc_loss_backward: lambda metas: torch.empty_like(metas[1]),
    torch.ops.aten._thnn_fused_lstm_cell: _lstm_cell_shapes,  # torch's meta kernel requires biases
    torch.ops.aten._thnn_fused_gru_cell: _gru_cell_shapes,
    torch.ops.aten._thnn_fused_gru_cell_backward: _gru_cell_backward_shapes,
    torch.ops.aten.multi_margin_loss_backward: lambda metas: torch.empty_like(metas[1]),
    torch.ops.aten.multilabel_margin_loss_backward: lambda metas: torch.empty_like(metas[1]),
}


def _key(func: Any, args: list[Any], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    # The default dtype is part of the key: an integer tensor times a float has that dtype.
    named = _key_of(list(kwargs.values())) if kwargs else None
    return (func, torch.get_default_dtype(), _key_of(args), named, *kwargs)


def _key_of(items: Sequence[Any]) -> tuple[Any, ...]:
    kinds = tuple(map(type, items))  # 1 == 1.0 == True, but the dtypes of the results differ
    key = [
        id(item) if kind is Tensor else _key_of(item) if kind is list or kind is tuple else item
        for kind, item in zip(kinds, items, strict=True)
    ]
    return (kinds, *key)


class _Arguments:
    """Arguments as a cache key; meta tensors compare by identity (see `meta_tensor`)."""

    __slots__ = ("args", "func", "hash", "key", "kwargs")

    def __init__(self, key: tuple[Any, ...], args: list[Any], kwargs: dict[str, Any], func: Any) -> None:
        self.key, self.args, self.kwargs, self.func = key, args, kwargs, func
        self.hash = hash(key)  # computed once: lookup and insertion would each hash the nested tuples

    def __hash__(self) -> int:
        return self.hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Arguments) and self.key == other.key


@lru_cache(maxsize=1 << 13)
def _shapes(call: _Arguments) -> Any:
    result = call.func(*call.args, **call.kwargs)
    for item in [result] if isinstance(result, Tensor) else result:
        if isinstance(item, Tensor) and item.layout is not torch.strided:
            raise NotImplementedError(f"a result of {call.func} has the layout {item.layout}")
    if isinstance(result, Tensor):
        return meta_like(result)
    return [meta_like(item) if isinstance(item, Tensor) else item for item in result]


def written_by(func: Any, args: Iterable[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors that an operator writes in place according to its schema."""
    args = list(args)
    written = [
        kwargs.get(argument.name, args[position] if position < len(args) else None)
        for position, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    flat = [item for one in written for item in (one if isinstance(one, (list, tuple)) else [one])]
    return [item for item in flat if isinstance(item, Tensor)]


@cache
def is_collective(func: Any) -> bool:
    """Return whether an operator communicates: ``is_collective(torch.ops.aten.add.Tensor)`` is False."""
    return func.namespace in ("c10d", "_c10d_functional")


def mapped(results: Any, function: Callable[[Any], Any], kind: Any = Tensor) -> Any:
    """Apply a function to each item of type `kind` in the result of an operator."""
    if isinstance(results, kind):
        return function(results)
    if isinstance(results, (list, tuple)):
        # A plain tuple, even where the operator returns a named one: autograd accepts any sequence.
        made = [function(item) if isinstance(item, kind) else item for item in results]
        return made if isinstance(results, list) else tuple(made)
    return results


def operator(name: str) -> Any:
    """Return an ATen operator by its name; the name itself if this release of torch lacks the operator."""
    # As a key of a table of rules, a name matches no operator and has no effect.
    return getattr(torch.ops.aten, name, name)
