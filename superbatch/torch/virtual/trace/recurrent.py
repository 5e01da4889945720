"""cuDNN's recurrent layers, micro-batch by micro-batch.

Their forward saves an opaque reserve, which only the backward of the same samples can read. So the backward
of a micro-batch reruns its forward. Weight gradients are summed over micro-batches. Layers with packed
sequences, or with dropout between layers, run on the full batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..ir.calls import OpStrategy, meta_like, meta_tensor
from ..ir.recorder import Recorder
from ..ir.shard import PARTIAL, REPLICATE, BatchSlice, Shard
from ..ir.values import Operand

aten: Any = torch.ops.aten
_FORWARD, _BACKWARD = aten._cudnn_rnn.default, aten._cudnn_rnn_backward.default
_STATES = ("hx", "cx", "grad_hy", "grad_cy")  # (layers, samples, features)


def forward(recording: Recorder, *args: Any, **kwargs: Any) -> Any:
    """`_cudnn_rnn`: output, last states, and an empty reserve."""
    named = _by_name(_FORWARD, args, kwargs)
    shard = _shard(recording, named)
    if shard is None:
        return NotImplemented
    operands, fill = _operands(recording, named, ["input", "hx", "cx"], shard)

    def run(microbatch: BatchSlice, tensors: list[Tensor]) -> Any:
        return _FORWARD(**fill(tensors))[:3]  # without reserve and packed weights

    strategy = OpStrategy(operands, [shard, shard.at(1), shard.at(1)], run)
    out, hy, cy = _recorded(recording, _FORWARD, strategy, _states_of(named))
    x, weight_buf = named["input"], named["weight_buf"]
    nothing = torch.empty(0, dtype=torch.uint8, device=x.device)
    return (
        out,
        hy,
        torch.empty(0, dtype=x.dtype, device=x.device) if cy is None else cy,
        nothing,
        nothing if weight_buf is None else weight_buf,
    )


def backward(recording: Recorder, *args: Any, **kwargs: Any) -> Any:
    """`_cudnn_rnn_backward`: gradients of input, first states and weights."""
    named = _by_name(_BACKWARD, args, kwargs)
    shard = _shard(recording, named) if named["train"] else None  # cuDNN has no backward in eval mode
    if shard is None:
        return NotImplemented
    names = ["input", "hx", "cx", "grad_output", "grad_hy", "grad_cy"]
    operands, fill = _operands(recording, named, names, shard)
    forward = [argument.name for argument in _FORWARD._schema.arguments]
    mask = list(named["output_mask"])
    count = len(named["weight"]) if mask[3] else 0

    def run(microbatch: BatchSlice, tensors: list[Tensor]) -> Any:
        arguments = fill(tensors)
        output, _, _, reserve, weight_buf = _FORWARD(**{name: arguments[name] for name in forward})
        arguments.update(output=output, reserve=reserve, weight_buf=weight_buf)
        # Weight gradients are a list, which is flattened because each output is reduced separately.
        *inputs, weights = _BACKWARD(**arguments)
        inputs = [gradient if wanted else None for gradient, wanted in zip(inputs, mask, strict=False)]
        return (*inputs, *list(weights)[:count])

    metas = [_in_time(named["input"], named["batch_first"]), *(_dense(named[name]) for name in ("hx", "cx"))]
    metas = [meta if wanted else None for meta, wanted in zip(metas, mask, strict=False)]
    metas += [_dense(weight) for weight in named["weight"][:count]]
    strategy = OpStrategy(operands, [shard, shard.at(1), shard.at(1), *[PARTIAL] * count], run)
    dx, dhx, dcx, *weights = _recorded(recording, _BACKWARD, strategy, metas)
    return dx, dhx, dcx, weights


def _by_name(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return all arguments by name."""
    names = [argument.name for argument in func._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _shard(recording: Recorder, named: dict[str, Any]) -> Shard | None:
    """Return the sharding of the input if its samples are independent; else None."""
    # Packed sequences mix samples in one dimension. With dropout the rerun would draw another mask.
    if len(named["batch_sizes"]) or (named["dropout"] and named["train"]) or named["input"].dim() != 3:
        return None
    dim = 0 if named["batch_first"] else 1
    shard, state = (recording.value(named[name]).shard for name in ("input", "hx"))
    if shard is None and state is not None and state.dim == 1:  # a full input with sharded states
        shard = state.at(dim)
    if shard is None or shard.dim != dim:
        return None
    weights = [*named["weight"], *([] if named["weight_buf"] is None else [named["weight_buf"]])]
    if any(recording.value(weight).shard is not None for weight in weights):
        return None
    rows = shard.rows(recording.samples)
    alike = named["input"].shape[dim] == rows == named["hx"].shape[1]
    return shard if alike else None


def _operands(
    recording: Recorder, named: dict[str, Any], names: list[str], shard: Shard
) -> tuple[list[Operand], Callable[[list[Tensor]], dict[str, Any]]]:
    """Return the operands, and a function that returns the arguments with the operands' tensors."""
    names = [name for name in names if named[name] is not None]
    operands = [
        Operand(recording.value(named[name]), shard.at(1) if name in _STATES else shard) for name in names
    ]
    buffer, count = named["weight_buf"], len(named["weight"])
    packed = buffer is not None and buffer.numel() > 0  # `forward` returns an empty placeholder
    full = [*named["weight"], *([buffer] if packed else [])]
    operands += [Operand(recording.value(tensor), REPLICATE) for tensor in full]
    plain = {name: None if isinstance(item, Tensor) else item for name, item in named.items()}
    plain["weight"] = None  # otherwise the recording would keep tensors of the program alive

    def fill(tensors: list[Tensor]) -> dict[str, Any]:
        # cuDNN requires contiguous states.
        inputs = {name: x.contiguous() for name, x in zip(names, tensors, strict=False)}
        rest = tensors[len(names) :]
        return {**plain, **inputs, "weight": rest[:count], "weight_buf": rest[count] if packed else None}

    return operands, fill


def _states_of(named: dict[str, Any]) -> list[Tensor | None]:
    """Return meta tensors of the output and the last states."""
    x, hx, cx = named["input"], named["hx"], named["cx"]
    size = (named["proj_size"] or named["hidden_size"]) * (2 if named["bidirectional"] else 1)
    out = _of_shape((*x.shape[:2], size), x.dtype)
    return [_in_time(out, named["batch_first"]), _dense(hx), _dense(cx)]


def _dense(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else _of_shape(tuple(tensor.shape), tensor.dtype)


def _in_time(tensor: Tensor, batch_first: bool) -> Tensor:
    """Return a meta tensor in time-major memory order, the order of cuDNN's outputs."""
    shape = tuple(tensor.shape)
    if not batch_first:
        return _of_shape(shape, tensor.dtype)
    return meta_like(_of_shape((shape[1], shape[0], shape[2]), tensor.dtype).transpose(0, 1))


def _of_shape(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return meta_tensor(shape, torch.empty(shape, device="meta").stride(), dtype)


def _recorded(recording: Recorder, func: Any, strategy: OpStrategy, metas: list[Tensor | None]) -> Any:
    return recording.wrapped(recording.add(func, strategy, metas))
