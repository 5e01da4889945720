"""Hold each operation against the same on whole tensors: the one way to see a wrong rule."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...errors import SuperbatchError, explain
from .calls import Call, Recipe, filled
from .conjugates import conjugates_seen
from .layout import Part
from .rules import find
from .values import Operand, Value

if TYPE_CHECKING:
    from .recording import Recording


# What is in new memory is arbitrary: for the comparison it is zero.
DEFINED: dict[Any, Any] = {
    torch.ops.aten.empty_like.default: torch.ops.aten.zeros_like.default,
    torch.ops.aten.new_empty.default: torch.ops.aten.new_zeros.default,
}


aten: Any = torch.ops.aten
_CUDA = [
    (aten._scaled_dot_product_flash_attention, aten._scaled_dot_product_flash_attention_backward),
    (aten._scaled_dot_product_efficient_attention, aten._scaled_dot_product_efficient_attention_backward),
    (aten._scaled_dot_product_cudnn_attention, aten._scaled_dot_product_cudnn_attention_backward),
]

# What a kernel keeps for its backward, and the rule of the backward works out again.
UNREAD = {(aten._ctc_loss, 1), *((forward, 1) for forward, _ in _CUDA)}

# Not all that these kernels keep is there, or as they ask for it: on whole tensors too the rule does it.
_BY_RULE = {operator for pair in _CUDA for operator in pair}


class WrongRuleError(SuperbatchError, AssertionError):
    """An operation on micro-batches gave something else than on the whole batch."""


def check(recording: Recording, call: Call, results: Any) -> None:
    """Do the call on whole tensors, and compare.

    Raises:
        WrongRuleError: a result differs by more than rounding.
    """
    recipe = find(call) if call.func.overloadpacket in _BY_RULE else None
    if recipe is None:
        recipe = Recipe([Operand(value, None) for value in call.tensors], (), filled(call))
    check_recipe(recording, call.func, recipe, results)


def check_recipe(recording: Recording, func: Any, recipe: Recipe, results: Any) -> None:
    """Do on whole tensors what a recipe does, and compare.

    Raises:
        WrongRuleError: a result differs by more than rounding.
    """
    values = [operand.value for operand in recipe.operands]
    inputs = recording.there([recording.gathered(value) for value in values])
    with conjugates_seen():
        expected = recipe.run(Part(0, 0, recording.samples), [tensor.clone() for tensor in inputs])
    if not isinstance(expected, Tensor):
        expected = list(expected)
    # A sum may cancel: its rounding is that of what was added up.
    sizes = [_size(tensor) for tensor in inputs]
    scale = max([*sizes, math.prod(size for size in sizes if size)], default=0.0)
    pairs = [(results, expected)] if isinstance(results, Value) else list(zip(results, expected, strict=True))
    unread = {index for packet, index in UNREAD if packet is func.overloadpacket}
    for index, (value, whole) in enumerate(pairs):
        if not isinstance(value, Value) or not isinstance(whole, Tensor) or index in unread:
            continue
        (ours,) = recording.there([recording.gathered(value)])
        where = [tuple(v.meta.shape) for v in values], [v.layout for v in values]
        if ours.shape != whole.shape or ours.dtype != whole.dtype or not _close(ours, whole, scale):
            raise WrongRuleError(
                explain(
                    f"output {index} of {func} on shapes {where[0]} with samples in {where[1]}",
                    f"by micro-batches it is another than on whole tensors ({_difference(ours, whole)})",
                    "report it; until then compute with plain tensors here",
                )
            )


def _size(tensor: Tensor) -> float:
    if not tensor.numel() or tensor.dtype is torch.bool:
        return 0.0
    return float(tensor.abs().nan_to_num(posinf=0.0, neginf=0.0).max())


def _close(ours: Tensor, whole: Tensor, scale: float) -> bool:
    if not (ours.is_floating_point() or ours.is_complex()):
        return torch.equal(ours, whole)
    # Sums over samples are taken in another order: rounding relative to the largest number.
    eps = torch.finfo(ours.dtype).eps
    scale = max(scale, _size(whole))
    wide = torch.complex128 if ours.is_complex() else torch.float64
    return torch.allclose(
        ours.to(wide).resolve_conj(),
        whole.resolve_neg().to(wide).resolve_conj(),
        rtol=1e3 * eps,
        atol=1e3 * eps * scale,
        equal_nan=True,
    )


def _difference(ours: Tensor, whole: Tensor) -> str:
    if ours.shape != whole.shape or ours.dtype != whole.dtype:
        return f"{ours.dtype} {tuple(ours.shape)} and {whole.dtype} {tuple(whole.shape)}"
    wide = torch.complex128 if ours.is_complex() else torch.float64
    return f"largest difference {float((ours.to(wide) - whole.to(wide)).abs().max()):.2g}"
