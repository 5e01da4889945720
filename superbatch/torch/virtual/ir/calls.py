"""One operator's call, with values in the place of tensors, and what a rule answers to it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .layout import Layout, Part
from .reductions import Sums
from .strides import careful
from .values import Operand, Reduction, Run, Value

Path = tuple[Any, ...]  # (position,) or ("name",), and a position in a list behind it


class Call(NamedTuple):
    """An operator with its arguments.

    Attributes:
        func: the operator.
        args: positional, with a `Value` for each tensor.
        kwargs: by name.
        tensors: all values, in order.
        paths: where each is.
        samples: of the whole batch.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tensors: list[Value]
    paths: list[Path]
    samples: int

    def argument(self, name: str, default: Any = None) -> Any:
        """Return an argument by its name in the operator's schema."""
        if name in self.kwargs:
            return self.kwargs[name]
        position, known = _arguments(self.func).get(name, (None, None))
        if position is not None and position < len(self.args):
            return self.args[position]
        return default if known is None else known

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
        assert not changes
        return tuple(args), kwargs


@cache
def _arguments(func: Any) -> dict[str, tuple[int, Any]]:
    """Position and default of each argument of an operator: the schema itself is slow to ask."""
    told = enumerate(func._schema.arguments)
    return {argument.name: (position, argument.default_value) for position, argument in told}


class Recipe(NamedTuple):
    """Recipe for a call, micro-batch by micro-batch.

    Attributes:
        operands: what it reads, in the order in which `run` takes it.
        outputs: layout of each output; None: whole.
        run: does it for one micro-batch.
        reduce: combines whole outputs.
        view: the output takes no memory of its own.
        light: about as fast as reading its inputs.
        placed: `run` asks where in the batch the micro-batch is, and not only how many samples it has.
        results: how many of the outputs there are; tensors behind them are left out, and numbers are as for
            the whole batch. None: all.
    """

    operands: Sequence[Operand]
    outputs: Sequence[Layout | None]
    run: Run
    reduce: Callable[[], Reduction] = Sums
    view: bool = False
    light: bool = False
    placed: bool = False
    results: int | None = None

    def drawing(self, run: Run) -> Recipe:
        """Return the same recipe with a function that draws random numbers, which is never light."""
        return self._replace(run=run, light=False)


_aten: Any = torch.ops.aten
# What a micro-batch in other memory does not refuse.
_INSTEAD: dict[Any, Any] = {
    _aten.view.default: _aten.reshape.default,
    _aten._unsafe_view.default: _aten.reshape.default,
    _aten._reshape_copy.default: _aten.reshape.default,
}


# Autograd's formulas for these ask whether the matrix, as the program sees it, lies row by row in memory: the
# factors they are given are then those of its transpose.
_BY_ORDER = {torch.ops.aten._linalg_det, torch.ops.aten._linalg_slogdet, torch.ops.aten._linalg_solve_ex}


def filled(call: Call, args: tuple[Any, ...] | None = None, kwargs: dict[str, Any] | None = None) -> Run:
    """Return a function that makes the call on real tensors, those of the micro-batch.

    Args:
        call: whose tensors, in order, are what the function is given.
        args: instead of the call's own; tensors are at the same places.
        kwargs: likewise.
    """
    # Strides of a micro-batch may be others than those of the batch, and hardly a result depends on them.
    run = careful(call.func, [value.meta for value in call.tensors], _filled(call, args, kwargs))
    if call.func.overloadpacket not in _BY_ORDER:
        return run
    by_rows = call.tensors[0].meta.is_contiguous()
    return lambda part, tensors: run(part, [_in_order(tensors[0], by_rows), *tensors[1:]])


def _in_order(matrices: Tensor, by_rows: bool) -> Tensor:
    """The matrices row by row in memory, or in another order."""
    if matrices.is_contiguous() == by_rows:
        return matrices
    return matrices.contiguous() if by_rows else matrices.mT.contiguous().mT


class Direct:
    """A call whose tensors are its first arguments: who knows that can make it without a frame around it.

    Attributes:
        func: takes the tensors, and `rest` behind them.
    """

    __slots__ = ("func", "rest")

    def __init__(self, func: Callable[..., Any], rest: tuple[Any, ...]) -> None:
        self.func, self.rest = func, rest

    def __call__(self, part: Part, tensors: list[Tensor]) -> Any:
        """Make the call."""
        return self.func(*tensors, *self.rest)


def _filled(call: Call, args: tuple[Any, ...] | None, kwargs: dict[str, Any] | None) -> Run:
    func = _INSTEAD.get(call.func, call.func)
    func = getattr(func, "_op", func)  # without the frame of Python around it
    args = call.args if args is None else args
    kwargs = call.kwargs if kwargs is None else kwargs
    paths = call.paths
    if all(len(path) == 1 and isinstance(path[0], int) for path in paths):
        positions = [path[0] for path in paths]
        if positions == list(range(len(positions))) and not kwargs:
            return Direct(func, args[len(positions) :])
        template = list(args)

        def run(part: Part, tensors: list[Tensor]) -> Any:
            filled = template.copy()
            for position, tensor in zip(positions, tensors, strict=True):
                filled[position] = tensor
            return func(*filled, **kwargs)

        return run

    def run_nested(part: Part, tensors: list[Tensor]) -> Any:
        new_args, new_kwargs = substituted(args, kwargs, paths, tensors)
        return func(*new_args, **new_kwargs)

    return run_nested


def substituted(
    args: tuple[Any, ...], kwargs: dict[str, Any], paths: Iterable[Path], tensors: Iterable[Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments with other tensors at the given places."""
    new_args: list[Any] = [list(arg) if isinstance(arg, (list, tuple)) else arg for arg in args]
    new_kwargs = dict(kwargs)
    for path, tensor in zip(paths, tensors, strict=True):
        where: Any = new_kwargs if isinstance(path[0], str) else new_args
        if len(path) == 1:
            where[path[0]] = tensor
        else:
            if where is new_kwargs:
                where[path[0]] = list(where[path[0]])
            where[path[0]][path[1]] = tensor
    return new_args, new_kwargs


# -- shapes of results --------------------------------------------------------------------------------------


@lru_cache(maxsize=1 << 14)
def blank(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, offset: int = 0) -> Tensor:
    """Return a tensor of that shape without memory; the same one each time."""
    if not offset:
        return torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    reach = offset + 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True) if size)
    return torch.empty(reach, dtype=dtype, device="meta").as_strided(shape, stride, offset)


def blank_like(tensor: Tensor) -> Tensor:
    """Return a tensor like the given one, without memory."""
    return blank(tuple(tensor.shape), tensor.stride(), tensor.dtype, int(tensor.storage_offset()))


def empty_like(meta: Tensor, device: torch.device) -> Tensor:
    """Return a tensor with memory of the shape, strides and dtype of one without."""
    return torch.empty_strided(meta.shape, meta.stride(), dtype=meta.dtype, device=device)


def shapes(call: Call) -> Any:
    """Return the operator's result for tensors without memory.

    Raises:
        NotImplementedError: the shape depends on values, or the operator does not say.
    """
    metas = [value.meta for value in call.tensors]
    if call.func.overloadpacket in _SHAPES:
        return _SHAPES[call.func.overloadpacket](metas)
    args, kwargs = substituted(call.args, call.kwargs, call.paths, metas)
    if kwargs.get("device") is not None:
        kwargs["device"] = torch.device("meta")
    kwargs.pop("generator", None)
    key = _key(call.func, args, kwargs)
    return _shapes(_Arguments(key, args, kwargs, call.func))


def results(call: Call, recipe: Recipe | None) -> Any:
    """Return `shapes`, without what the recipe leaves out; None if something other than tensors remains."""
    metas = shapes(call)
    if isinstance(metas, Tensor):
        return metas
    if recipe is not None and recipe.results is not None:
        count = recipe.results
        return [*metas[:count], *(None if isinstance(item, Tensor) else item for item in metas[count:])]
    return metas if all(item is None or isinstance(item, Tensor) for item in metas) else None


def _ctc_shapes(metas: list[Tensor]) -> list[Tensor]:
    steps, samples, _ = metas[0].shape
    table = (samples, steps, 2 * metas[1].shape[-1] + 1)
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
    # Those of the biases too, though without biases there is nothing in them.
    return [gates, gates, torch.empty_like(hidden), gates[0], gates[0]]


# Operators that do not work without memory, whose shapes are plain all the same.
_SHAPES: dict[Any, Callable[[list[Tensor]], Any]] = {
    torch.ops.aten._ctc_loss: _ctc_shapes,
    torch.ops.aten._ctc_loss_backward: lambda metas: torch.empty_like(metas[1]),
    torch.ops.aten._thnn_fused_lstm_cell: _lstm_cell_shapes,  # torch's own asks for biases
    torch.ops.aten._thnn_fused_gru_cell: _gru_cell_shapes,
    torch.ops.aten._thnn_fused_gru_cell_backward: _gru_cell_backward_shapes,
    torch.ops.aten.multi_margin_loss_backward: lambda metas: torch.empty_like(metas[1]),
    torch.ops.aten.multilabel_margin_loss_backward: lambda metas: torch.empty_like(metas[1]),
}


def _key(func: Any, args: list[Any], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    # A number and a tensor of integers may give one of the default dtype.
    told = _part_of_key(list(kwargs.values())) if kwargs else None
    return (func, torch.get_default_dtype(), _part_of_key(args), told, *kwargs)


def _part_of_key(items: Sequence[Any]) -> tuple[Any, ...]:
    kinds = tuple(map(type, items))  # 1, 1.0 and True are equal, and give other dtypes
    parts = [
        id(item) if kind is Tensor else _part_of_key(item) if kind is list or kind is tuple else item
        for kind, item in zip(kinds, items, strict=True)
    ]
    return (kinds, *parts)


class _Arguments:
    """Arguments that compare by a key in which a tensor without memory counts by identity."""

    __slots__ = ("args", "func", "hash", "key", "kwargs")

    def __init__(self, key: tuple[Any, ...], args: list[Any], kwargs: dict[str, Any], func: Any) -> None:
        self.key, self.args, self.kwargs, self.func = key, args, kwargs, func
        self.hash = hash(key)

    def __hash__(self) -> int:
        return self.hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Arguments) and self.key == other.key


@lru_cache(maxsize=1 << 13)
def _shapes(call: _Arguments) -> Any:
    result = call.func(*call.args, **call.kwargs)
    for item in [result] if isinstance(result, Tensor) else result:
        if isinstance(item, Tensor) and item.layout is not torch.strided:
            raise NotImplementedError(f"a result of {call.func} is {item.layout}")
    if isinstance(result, Tensor):
        return blank_like(result)
    return [blank_like(item) if isinstance(item, Tensor) else item for item in result]


def written_by(func: Any, args: Iterable[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors that an operator writes in place."""
    args = list(args)
    places = [
        kwargs.get(argument.name, args[place] if place < len(args) else None)
        for place, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    flat = [item for place in places for item in (place if isinstance(place, (list, tuple)) else [place])]
    return [item for item in flat if isinstance(item, Tensor)]


@cache
def is_collective(func: Any) -> bool:
    """Tell whether an operator communicates: ``is_collective(torch.ops.aten.add.Tensor)`` is False."""
    return func.namespace in ("c10d", "_c10d_functional")


def mapped(results: Any, function: Callable[[Any], Any], kind: Any = Tensor) -> Any:
    """Apply a function to each item of a kind in what an operator returned."""
    if isinstance(results, kind):
        return function(results)
    if isinstance(results, (list, tuple)):
        # Not a named tuple, which some operators return: autograd takes any sequence.
        made = [function(item) if isinstance(item, kind) else item for item in results]
        return made if isinstance(results, list) else tuple(made)
    return results


def operator(name: str) -> Any:
    """Return an operator of ATen by its name; the name itself where this release of torch lacks it."""
    return getattr(torch.ops.aten, name, name)
