"""Attention within each sample: torch's kernels of CPU and of CUDA, forward and backward.

Samples are in dimension 0 of query, key, value, output, and what the forward keeps for the backward. A kernel
of CUDA keeps more: lengths, the state of its generator, in a form that differs from release to release. None
of it is taken from the whole batch: the backward of a micro-batch runs the forward again, and has its own.
With dropout both runs draw from the same seed (`with_dropout`), so that they have the same mask.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from superbatch.torch.devices import seeded

from ..ir.calls import Call, Recipe, filled
from ..ir.layout import Layout, Part
from ..ir.values import Operand, Run, Value

aten: Any = torch.ops.aten
_INPUTS = ("query", "key", "value")


class _Kernel(NamedTuple):
    """A kernel of CUDA.

    Attributes:
        forward: its operator.
        keeps: what its backward calls the results of the forward, in their order.
        aligned: rows of the bias begin at multiples of this many elements.
    """

    forward: Any
    keeps: tuple[str, ...]
    aligned: int = 1


_LENGTHS = ("cum_seq_q", "cum_seq_k", "max_q", "max_k")
_DRAWN = ("philox_seed", "philox_offset")
_FLASH = _Kernel(aten._scaled_dot_product_flash_attention.default, ("out", "logsumexp", *_LENGTHS, *_DRAWN))
_CUDNN = _Kernel(aten._scaled_dot_product_cudnn_attention.default, ("out", "logsumexp", *_LENGTHS, *_DRAWN))
_EFFICIENT = _Kernel(
    aten._scaled_dot_product_efficient_attention.default, ("out", "logsumexp", *_DRAWN), aligned=8
)


# -- where the samples are ----------------------------------------------------------------------------------


def _layout_of(call: Call, values: Sequence[Value], *, seed: int | None = None) -> Layout | None:
    """Return the common layout of the values; None if not in dimension 0, or for unseeded dropout."""
    layouts = (value.layout for value in values if value.layout is not None)
    layout = next((layout for layout in layouts if layout.dim == 0), None)
    if layout is None or (call.argument("dropout_p") and seed is None):
        return None
    rows = layout.rows(call.samples)
    return layout if all(value.meta.shape[0] == rows for value in values) else None


def _bias(call: Call) -> Value | None:
    return call.argument("attn_mask") or call.argument("attn_bias")


def _of_bias(bias: Value, call: Call, layout: Layout) -> Layout | None:
    """A bias of each sample, or one for all."""
    each = bias.meta.dim() == 4 and bias.meta.shape[0] == layout.rows(call.samples)
    return layout if each else None


# -- the kernel of CPU --------------------------------------------------------------------------------------


def _attention(outputs: int) -> Callable[[Call], Recipe | None]:
    def rule(call: Call) -> Recipe | None:
        bias = _bias(call)
        layout = _layout_of(call, [value for value in call.tensors if value is not bias])
        if layout is None:
            return None
        operands = [
            Operand(value, _of_bias(value, call, layout) if value is bias else layout)
            for value in call.tensors
        ]
        return Recipe(operands, [layout] * outputs, filled(call))

    return rule


# -- the kernels of CUDA ------------------------------------------------------------------------------------


class Seeded(NamedTuple):
    """A function of a micro-batch that draws the same numbers each time.

    Attributes:
        seed: of the operation; that of a micro-batch is where it begins, added to it.
        run: the function.
    """

    seed: int
    run: Run

    def __call__(self, part: Part, tensors: list[Tensor]) -> Any:
        """Run it."""
        with seeded(tensors[0].device, (self.seed + part.start) % 2**63):
            return self.run(part, tensors)


def with_dropout(call: Call, seed: int) -> Recipe | None:
    """Return a recipe for attention with dropout on CUDA.

    Args:
        call: of a forward or a backward.
        seed: of the forward.

    Returns:
        The recipe; None where there is no rule for the call.
    """
    recipe = DROPPED[call.func](call, seed)
    return None if recipe is None else recipe.drawing(Seeded(seed, recipe.run))


def _forward(kernel: _Kernel) -> Callable[..., Recipe | None]:
    def rule(call: Call, seed: int | None = None) -> Recipe | None:
        main, bias = [call.argument(name) for name in _INPUTS], _bias(call)
        layout = _layout_of(call, main, seed=seed)
        if layout is None or call.argument("return_debug_mask", False):
            return None
        operands = [Operand(value, layout) for value in main]
        if bias is not None:
            operands.append(Operand(bias, _of_bias(bias, call, layout)))
        run = filled(call)

        def output(part: Part, tensors: list[Tensor]) -> Any:
            return run(part, _as_kernels_ask(tensors, 3, kernel.aligned))

        return Recipe(operands, [layout] * len(call.func._schema.returns), output, results=2)

    return rule


def _backward(kernel: _Kernel) -> Callable[..., Recipe | None]:
    """The gradient of a bias that is one for all samples is a sum over them."""

    def rule(call: Call, seed: int | None = None) -> Recipe | None:
        names = [argument.name for argument in call.func._schema.arguments]
        grad, bias = names[0], _bias(call)
        main = [call.argument(name) for name in (grad, *_INPUTS)]
        if main[0] is None:
            return None
        layout = _layout_of(call, main, seed=seed)
        if layout is None:
            return None
        operands = [Operand(value, layout) for value in main]
        of_bias: Layout | None = layout
        if bias is not None:
            of_bias = _of_bias(bias, call, layout)
            operands.append(Operand(bias, of_bias))
        # Tensors are filled in for each micro-batch.
        told = {name: call.argument(name) for name in names}
        told = {name: None if isinstance(item, Value) else item for name, item in told.items()}
        inputs = (grad, *_INPUTS, *([] if bias is None else ["attn_bias"]))
        options = _options(kernel, told)

        def gradients(part: Part, tensors: list[Tensor]) -> Any:
            given = dict(zip(inputs, _as_kernels_ask(tensors, 4, kernel.aligned), strict=True))
            forward = {name: given[name] for name in inputs[1:]}
            kept = zip(kernel.keeps, kernel.forward(**{**options, **forward}), strict=False)
            return call.func(**{**told, **given, **dict(kept)})

        return Recipe(
            operands, [layout, layout, layout, of_bias][: len(call.func._schema.returns)], gradients
        )

    return rule


def _options(kernel: _Kernel, told: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of the forward that are no tensors."""
    found = {name: told[name] for name in ("dropout_p", "is_causal", "scale")}
    names = {argument.name for argument in kernel.forward._schema.arguments}
    if "compute_log_sumexp" in names:
        found["compute_log_sumexp"] = True
    if "attn_bias" in names:
        found["attn_bias"] = None
    return found


def _as_kernels_ask(tensors: list[Tensor], main: int, aligned: int) -> list[Tensor]:
    """With numbers next to each other in the last dimension; a micro-batch may have other strides."""
    found = [x if x.stride(-1) == 1 else x.contiguous() for x in tensors]
    return [*found[:main], *(_aligned(bias, aligned) for bias in found[main:])]


def _aligned(bias: Tensor, to: int) -> Tensor:
    if all(step % to == 0 for step, size in zip(bias.stride()[:-1], bias.shape, strict=False) if size > 1):
        return bias
    columns = bias.shape[-1]
    return F.pad(bias, (0, -columns % to))[..., :columns]


BACKWARD: dict[Any, Callable[..., Recipe | None]] = {
    aten._scaled_dot_product_flash_attention_backward.default: _backward(_FLASH),
    aten._scaled_dot_product_efficient_attention_backward.default: _backward(_EFFICIENT),
    aten._scaled_dot_product_cudnn_attention_backward.default: _backward(_CUDNN),
}
DROPPED: dict[Any, Callable[..., Recipe | None]] = {
    _FLASH.forward: _forward(_FLASH),
    _EFFICIENT.forward: _forward(_EFFICIENT),
    _CUDNN.forward: _forward(_CUDNN),
    **BACKWARD,
}
RULES: dict[Any, Callable[[Call], Recipe | None]] = {
    aten._scaled_dot_product_flash_attention_for_cpu: _attention(2),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention(3),
    **DROPPED,
}
