"""Rules for attention within each sample: torch's CPU and CUDA kernels, forward and backward.

The samples are in dimension 0 of query, key, value and output: [batch, heads, length, features]. CUDA kernels
also save lengths and the generator state for the backward, in a form that differs between releases of torch.
So the backward of a micro-batch reruns its forward to get that state. With dropout both use the same seed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from superbatch.torch.devices import seeded

from ..ir.calls import Call, OpStrategy, run_of
from ..ir.shard import REPLICATE, BatchSlice, Shard
from ..ir.values import Operand, Run, Value

aten: Any = torch.ops.aten
_INPUTS = ("query", "key", "value")


class _Kernel(NamedTuple):
    """CUDA kernel for attention.

    Attributes:
        forward: the operator of the forward.
        saved: names of the forward's results as arguments of the backward, in order.
        alignment: rows of the bias must begin at multiples of this number of elements.
    """

    forward: Any
    saved: tuple[str, ...]
    alignment: int = 1


_LENGTHS = ("cum_seq_q", "cum_seq_k", "max_q", "max_k")
_DRAWN = ("philox_seed", "philox_offset")
_FLASH = _Kernel(aten._scaled_dot_product_flash_attention.default, ("out", "logsumexp", *_LENGTHS, *_DRAWN))
_CUDNN = _Kernel(aten._scaled_dot_product_cudnn_attention.default, ("out", "logsumexp", *_LENGTHS, *_DRAWN))
_EFFICIENT = _Kernel(
    aten._scaled_dot_product_efficient_attention.default, ("out", "logsumexp", *_DRAWN), alignment=8
)


# -- placement ----------------------------------------------------------------------------------------------


def _shard_of(call: Call, values: Sequence[Value], *, seed: int | None = None) -> Shard | None:
    """Return the common sharding in dimension 0; None if there is none, or for dropout without a seed."""
    # Without a seed, the forward of a micro-batch and its rerun in the backward would draw different masks.
    shards = (value.shard for value in values if value.shard is not None)
    shard = next((shard for shard in shards if shard.dim == 0), None)
    if shard is None or (call.argument("dropout_p") and seed is None):
        return None
    rows = shard.rows(call.samples)
    return shard if all(value.meta.shape[0] == rows for value in values) else None


def _bias(call: Call) -> Value | None:
    # The CPU kernel calls it attn_mask, the CUDA kernels attn_bias.
    return call.argument("attn_mask") or call.argument("attn_bias")


def _bias_placement(bias: Value, call: Call, shard: Shard) -> Shard | None:
    """Return the sharding of a bias with one entry per sample; `REPLICATE` if all samples share one bias."""
    per_sample = bias.meta.dim() == 4 and bias.meta.shape[0] == shard.rows(call.samples)
    return shard if per_sample else REPLICATE


# -- CPU kernel ---------------------------------------------------------------------------------------------


def _attention(outputs: int) -> Callable[[Call], OpStrategy | None]:
    def rule(call: Call) -> OpStrategy | None:
        bias = _bias(call)
        shard = _shard_of(call, [value for value in call.tensors if value is not bias])
        if shard is None:
            return None
        operands = [
            Operand(value, _bias_placement(value, call, shard) if value is bias else shard)
            for value in call.tensors
        ]
        return OpStrategy(operands, [shard] * outputs, run_of(call))

    return rule


# -- CUDA kernels -------------------------------------------------------------------------------------------


class Seeded(NamedTuple):
    """Function of a micro-batch, run with the seed `seed` plus the index of the first sample."""

    seed: int
    run: Run

    def __call__(self, microbatch: BatchSlice, tensors: list[Tensor]) -> Any:
        """Run the function with the seed of the micro-batch."""
        # Modulo 2**63, because generators do not take larger seeds as they are.
        with seeded(tensors[0].device, (self.seed + microbatch.start) % 2**63):
            return self.run(microbatch, tensors)


def with_dropout(call: Call, seed: int) -> OpStrategy | None:
    """Return a strategy for attention with dropout on CUDA, forward or backward; None if no rule applies."""
    strategy = DROPPED[call.func](call, seed)
    return None if strategy is None else strategy.drawing(Seeded(seed, strategy.run))


def _forward(kernel: _Kernel) -> Callable[..., OpStrategy | None]:
    def rule(call: Call, seed: int | None = None) -> OpStrategy | None:
        main, bias = [call.argument(name) for name in _INPUTS], _bias(call)
        shard = _shard_of(call, main, seed=seed)
        if shard is None or call.argument("return_debug_mask", False):  # one tensor for all samples
            return None
        operands = [Operand(value, shard) for value in main]
        if bias is not None:
            operands.append(Operand(bias, _bias_placement(bias, call, shard)))
        run = run_of(call)

        def output(microbatch: BatchSlice, tensors: list[Tensor]) -> Any:
            return run(microbatch, _with_kernel_layout(tensors, 3, kernel.alignment))

        # Only output and logsumexp have rows per sample. The other results are the state of one kernel call.
        return OpStrategy(operands, [shard] * len(call.func._schema.returns), output, results=2)

    return rule


def _backward(kernel: _Kernel) -> Callable[..., OpStrategy | None]:
    """Return the rule for a backward; the gradient of a bias that all samples share is a sum over them."""

    def rule(call: Call, seed: int | None = None) -> OpStrategy | None:
        names = [argument.name for argument in call.func._schema.arguments]
        grad, bias = names[0], _bias(call)
        main = [call.argument(name) for name in (grad, *_INPUTS)]
        if main[0] is None:
            return None
        shard = _shard_of(call, main, seed=seed)
        if shard is None:
            return None
        operands = [Operand(value, shard) for value in main]
        bias_placement: Shard | None = shard
        if bias is not None:
            bias_placement = _bias_placement(bias, call, shard)
            operands.append(Operand(bias, bias_placement))
        # Without tensors, because the strategy is cached for the process.
        plain = {name: call.argument(name) for name in names}
        plain = {name: None if isinstance(item, Value) else item for name, item in plain.items()}
        inputs = (grad, *_INPUTS, *([] if bias is None else ["attn_bias"]))
        options = _options(kernel, plain)

        def gradients(microbatch: BatchSlice, tensors: list[Tensor]) -> Any:
            arguments = dict(zip(inputs, _with_kernel_layout(tensors, 4, kernel.alignment), strict=True))
            forward = {name: arguments[name] for name in inputs[1:]}
            saved = zip(kernel.saved, kernel.forward(**{**options, **forward}), strict=False)
            return call.func(**{**plain, **arguments, **dict(saved)})

        return OpStrategy(
            operands, [shard, shard, shard, bias_placement][: len(call.func._schema.returns)], gradients
        )

    return rule


def _options(kernel: _Kernel, plain: dict[str, Any]) -> dict[str, Any]:
    """Return the forward's arguments that are not tensors, taken from those of the backward."""
    options = {name: plain[name] for name in ("dropout_p", "is_causal", "scale")}
    names = {argument.name for argument in kernel.forward._schema.arguments}
    if "compute_log_sumexp" in names:
        options["compute_log_sumexp"] = True  # the backward reads it
    if "attn_bias" in names:
        options["attn_bias"] = None
    return options


def _with_kernel_layout(tensors: list[Tensor], main: int, alignment: int) -> list[Tensor]:
    """Return the tensors with stride 1 in the last dimension; those after the first `main` are aligned."""
    # torch has checked the strides of the batch, but those of a micro-batch may differ.
    rows = [x if x.stride(-1) == 1 else x.contiguous() for x in tensors]
    return [*rows[:main], *(_aligned(bias, alignment) for bias in rows[main:])]


def _aligned(bias: Tensor, to: int) -> Tensor:
    if all(step % to == 0 for step, size in zip(bias.stride()[:-1], bias.shape, strict=False) if size > 1):
        return bias
    # Pad the rows, then slice them: only the stride grows. torch does the same before it calls the kernel.
    columns = bias.shape[-1]
    return F.pad(bias, (0, -columns % to))[..., :columns]


BACKWARD: dict[Any, Callable[..., OpStrategy | None]] = {
    aten._scaled_dot_product_flash_attention_backward.default: _backward(_FLASH),
    aten._scaled_dot_product_efficient_attention_backward.default: _backward(_EFFICIENT),
    aten._scaled_dot_product_cudnn_attention_backward.default: _backward(_CUDNN),
}
DROPPED: dict[Any, Callable[..., OpStrategy | None]] = {
    _FLASH.forward: _forward(_FLASH),
    _EFFICIENT.forward: _forward(_EFFICIENT),
    _CUDNN.forward: _forward(_CUDNN),
    **BACKWARD,
}
RULES: dict[Any, Callable[[Call], OpStrategy | None]] = {
    aten._scaled_dot_product_flash_attention_for_cpu: _attention(2),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention(3),
    **DROPPED,
}
