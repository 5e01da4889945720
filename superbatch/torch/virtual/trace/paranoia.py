"""Paranoid mode: comparison of each operation with the same operation on full tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from superbatch.errors import SuperbatchError
from superbatch.torch.devices import in_float64

from ..ir.calls import Call, run_of, substituted
from ..ir.conjugates import lazy_conjugation
from ..ir.recorder import Recorder
from ..ir.references import REFERENCES, arguments_by_name
from ..ir.shard import BatchSlice
from ..ir.values import Value

# Uninitialized memory cannot be compared, so it is zeroed.
DEFINED: dict[Any, Any] = {
    torch.ops.aten.empty_like.default: torch.ops.aten.zeros_like.default,
    torch.ops.aten.new_empty.default: torch.ops.aten.new_zeros.default,
}


aten: Any = torch.ops.aten

# (operator, index of a result): state that the kernel saves and that the rule of its backward recomputes.
UNREAD = {
    (aten._ctc_loss, 1),
    (aten._scaled_dot_product_flash_attention, 1),
    (aten._scaled_dot_product_efficient_attention, 1),
    (aten._scaled_dot_product_cudnn_attention, 1),
}


class WrongRuleError(SuperbatchError, AssertionError):
    """An operation by micro-batches differs from the same operation on the whole batch."""


def check(recording: Recorder, call: Call, results: Any) -> None:
    """Run the call on full tensors; raise `WrongRuleError` if a result differs by more than rounding."""
    inputs = recording.materialized([recording.gathered(value) for value in call.tensors])
    copies = [tensor.clone() for tensor in inputs]  # references may write into their arguments
    # Some kernels cannot be called on gathered tensors, because the state of their forward is missing.
    reference = REFERENCES.get(call.func.overloadpacket)
    with lazy_conjugation():
        if reference is None:
            expected = run_of(call)(BatchSlice(0, 0, recording.samples), copies)
        else:
            args, kwargs = substituted(call.args, call.kwargs, call.paths, copies)
            expected = reference(arguments_by_name(call.func, args, kwargs))
    compare(recording, call.func, call.tensors, inputs, results, expected)


def compare(
    recording: Recorder,
    func: Any,
    values: Sequence[Value],
    inputs: list[Tensor],
    results: Any,
    expected: Any,
) -> None:
    """Compare the results that are values with those on full tensors, up to the length of `expected`.

    `inputs` are the full tensors of `values`, the inputs of the operator.

    Raises:
        WrongRuleError: a result differs by more than rounding.
    """
    expected = [expected] if isinstance(expected, Tensor) else list(expected)
    # Rounding is relative to the summands, which the inputs and their product bound; the sum may cancel.
    sizes = [_size(tensor) for tensor in inputs]
    scale = max([*sizes, math.prod(size for size in sizes if size)], default=0.0)
    pairs = zip([results] if isinstance(results, Value) else results, expected, strict=False)
    unread = {index for packet, index in UNREAD if packet is func.overloadpacket}
    for index, (value, whole) in enumerate(pairs):
        if not isinstance(value, Value) or not isinstance(whole, Tensor) or index in unread:
            continue
        # Materialized at once: paranoid mode runs a sweep for each operation.
        (ours,) = recording.materialized([recording.gathered(value)])
        if ours.shape != whole.shape or ours.dtype != whole.dtype or not _close(ours, whole, scale):
            shapes, shards = [tuple(v.meta.shape) for v in values], [v.shard for v in values]
            raise WrongRuleError(
                f"Output {index} of {func} on shapes {shapes} with samples in {shards} is wrong: computed by "
                f"micro-batches it differs from that of the whole batch ({_difference(ours, whole)}). "
                "Report this bug, and compute the operation outside the block until it is fixed."
            )


def _size(tensor: Tensor) -> float:
    if not tensor.numel() or tensor.dtype is torch.bool:
        return 0.0
    return float(tensor.abs().nan_to_num(posinf=0.0, neginf=0.0).max())


def _close(ours: Tensor, whole: Tensor, scale: float) -> bool:
    if not (ours.is_floating_point() or ours.is_complex()):
        return torch.equal(ours, whole)
    # Micro-batches sum in another order, so the error is relative to the largest number, not to each element.
    eps = torch.finfo(ours.dtype).eps
    scale = max(scale, _size(whole))
    return torch.allclose(
        in_float64(ours).resolve_conj(),
        in_float64(whole.resolve_neg()).resolve_conj(),
        rtol=1e3 * eps,
        atol=1e3 * eps * scale,
        equal_nan=True,
    )


def _difference(ours: Tensor, whole: Tensor) -> str:
    if ours.shape != whole.shape or ours.dtype != whole.dtype:
        return f"{ours.dtype} {tuple(ours.shape)} and {whole.dtype} {tuple(whole.shape)}"
    return f"largest difference {float((in_float64(ours) - in_float64(whole)).abs().max()):.2g}"
