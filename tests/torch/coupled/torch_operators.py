"""Compare virtual batches with plain tensors on the operators and inputs of torch's own tests.

This is a separate program because importing torch's list changes settings of the process. `python -m
tests.torch.coupled.torch_operators WHERE PART PARTS [NAME ...]` prints differences, and exits with 1 if there
are any. WHERE is the place of the virtual tensors: "inputs", "gradients" (outputs are multiplied by a virtual
tensor) or "second" (inputs, with a second-order gradient).
"""

from __future__ import annotations

import itertools
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from superbatch.torch import virtual_batch
from superbatch.torch.virtual.trace.tensor import VirtualTensor

# Operators that are not compared, with reasons.
UNINITIALIZED = {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"}
REFUSED = {"resize_": "a virtual tensor has no memory of its own", "resize_as_": "likewise"}
READS_MEMORY = {
    "tensor_split": "reads the split points from a tensor's memory, below the interception of operators"
}
# Torch raises at the end of the block: the gradient of a sparse leaf times the batch is strided.
SPARSE = {"sparse.sampled_addmm"}
LEFT_OUT = {*UNINITIALIZED, *REFUSED, *READS_MEMORY, *SPARSE}

SECONDS = 12.0  # time limit of one operator; those with hundreds of inputs are compared in part
INPUTS = 10  # inputs of each operator, spread over torch's list
LARGEST = 12  # maximum number of samples
Places = dict[Any, int]  # index of an input, or ("output", index): its batch dimension


def weights_of(output: Tensor) -> Tensor:
    return torch.arange(output.numel(), dtype=torch.float64).cos().reshape(output.shape)


def scalar_of(outputs: list[Tensor], places: Places, batch: Callable[[Tensor], Tensor]) -> Tensor | None:
    """Return a loss that weights every element differently."""
    terms: list[Tensor] = []
    for index, output in enumerate(outputs):
        if not output.requires_grad:
            continue
        weights = weights_of(output)
        dim = places.get(("output", index))
        if dim is not None:
            weights = batch(weights.movedim(dim, 0)).movedim(0, dim)
        term = (output * weights).sum()
        terms.append(term.abs() if term.is_complex() else term)
    return sum(terms[1:], terms[0]) if terms else None


def run(
    sample: Any, places: Places, batch: Callable[[Tensor], Tensor], *, second: bool
) -> list[Tensor | None]:
    """Return outputs and leaves (with gradients); inputs in `places` are virtual along that dimension."""
    op, flat, spec = sample
    torch.manual_seed(3)
    given, leaves = list(flat), []
    for index, item in enumerate(flat):
        if not isinstance(item, Tensor):
            continue
        dim = places.get(index)
        leaf = (item if dim is None else item.movedim(dim, 0)).detach().clone()
        leaves.append(leaf.requires_grad_(item.requires_grad))
        used = leaf if dim is None else batch(leaf).movedim(0, dim)
        given[index] = used * 1 if leaf.requires_grad else used
    first, args, kwargs = tree_unflatten(given, spec)
    outputs = [item for item in tree_flatten(op(first, *args, **kwargs))[0] if isinstance(item, Tensor)]
    loss = scalar_of(outputs, places, batch)
    if loss is not None and not second:
        loss.backward()
    elif loss is not None:
        of = [leaf for leaf in leaves if leaf.requires_grad]
        slopes = [
            slope
            for slope in torch.autograd.grad(loss, of, create_graph=True, allow_unused=True)
            if slope is not None and slope.requires_grad
        ]
        if slopes:
            total = [(slope.abs() if slope.is_complex() else slope).square().sum() for slope in slopes]
            sum(total[1:], total[0]).backward()
    outputs = [output.detach() for output in outputs]
    numbers = [o.virtual.recording.numbers(o) if isinstance(o, VirtualTensor) else o for o in outputs]
    return [*numbers, *leaves]


def outputs_and_gradients(
    sample: Any, places: Places, microbatch_size: int | None, *, second: bool
) -> list[Tensor | None]:
    """Return outputs and gradients, computed in micro-batches or, with None, on plain tensors."""
    if microbatch_size is None:
        results = run(sample, places, lambda x: x, second=second)
    else:
        with virtual_batch(nn.Linear(1, 1), microbatch_size, rng="batch") as batch:
            results = run(sample, places, batch, second=second)
    tensors = sum(isinstance(item, Tensor) for item in sample[1])
    outputs, leaves = results[: len(results) - tensors], results[len(results) - tensors :]
    return [*outputs, *(None if leaf is None else leaf.grad for leaf in leaves)]


def same(ours: Tensor | None, plain: Tensor | None) -> bool:
    """Compare with a tolerance for rounding; a missing gradient equals zeros."""
    if ours is None and plain is None:
        return True
    ours = torch.zeros_like(plain) if ours is None and plain is not None else ours
    plain = torch.zeros_like(ours) if plain is None and ours is not None else plain
    assert ours is not None
    assert plain is not None
    if ours.layout is not torch.strided and ours.layout is plain.layout:
        ours, plain = ours.to_dense(), plain.to_dense()
    if type(ours) is not Tensor or ours.shape != plain.shape or ours.dtype != plain.dtype:
        return False
    tolerance = 1e-9 if ours.dtype in (torch.float64, torch.complex128) else 1e-4
    return torch.allclose(ours, plain, rtol=tolerance, atol=tolerance, equal_nan=True)


def all_same(ours: list[Tensor | None], plain: list[Tensor | None]) -> bool:
    return len(ours) == len(plain) and all(map(same, ours, plain))


def in_inputs(flat: list[Any]) -> Iterator[Places]:
    """Yield each dimension of each input as the batch, alone and with all inputs of that size there."""
    tensors = {i: t for i, t in enumerate(flat) if isinstance(t, Tensor) and t.layout is torch.strided}
    for index, tensor in tensors.items():
        for dim, rows in enumerate(tensor.shape):
            if 2 <= rows <= LARGEST:
                yield {index: dim}
                others = {i: dim for i, t in tensors.items() if t.dim() > dim and t.shape[dim] == rows}
                if len(others) > 1:
                    yield others


def in_gradients(outputs: list[Tensor | None]) -> Iterator[Places]:
    for index, output in enumerate(outputs):
        if output is not None and (output.is_floating_point() or output.is_complex()):
            for dim, rows in enumerate(output.shape):
                if 2 <= rows <= LARGEST:
                    yield {("output", index): dim}


def samples_of(op: Any, *, second: bool) -> Iterator[Any]:
    """Yield inputs of an operator in float64 and complex128; in int64 and bool if it takes neither."""
    kinds = [kind for kind in (torch.float64, torch.complex128) if op.supports_dtype(kind, "cpu")]
    for kind in kinds or [kind for kind in (torch.int64, torch.bool) if op.supports_dtype(kind, "cpu")]:
        gradient = op.supports_autograd and kind.is_floating_point | kind.is_complex
        if second and not (gradient and op.supports_gradgrad and kind is torch.float64):
            continue
        inputs = list(itertools.islice(op.sample_inputs("cpu", kind, requires_grad=gradient), 200))
        for item in inputs[:: max(1, len(inputs) // INPUTS)]:
            flat, spec = tree_flatten((item.input, item.args, item.kwargs))
            yield op.op, flat, spec


def plain_result(sample: Any, places: Places, *, second: bool) -> list[Tensor | None] | None:
    """Return torch's result; None if torch raises or two runs differ."""
    try:
        once, again = (outputs_and_gradients(sample, places, None, second=second) for _ in range(2))
    except Exception:  # noqa: BLE001  (torch may refuse an input)
        return None
    return once if all_same(once, again) else None


def compare(op: Any, where: str, count: Counter[str]) -> None:
    """Compare one operator, and print differences."""
    name, second = ".".join(filter(None, (op.name, op.variant_test_name))), where == "second"
    end = time.monotonic() + SECONDS
    for number, sample in enumerate(samples_of(op, second=second)):
        whole = plain_result(sample, {}, second=second)
        tensors = sum(isinstance(item, Tensor) for item in sample[1])
        outputs = [] if whole is None else whole[: len(whole) - tensors]
        for places in in_gradients(outputs) if where == "gradients" else in_inputs(sample[1]):
            plain = None if time.monotonic() > end else plain_result(sample, places, second=second)
            if whole is None or plain is None:
                count["left out"] += 1
                continue
            try:
                right = all_same(outputs_and_gradients(sample, places, 1 + number % 2, second=second), plain)
            except Exception as error:  # noqa: BLE001  (each is a finding)
                count["failed"] += 1
                print(f"{name}: samples in {places}, input {number}: {type(error).__name__}: {error}")
                continue
            count["compared" if right else "different"] += 1
            if not right:
                print(f"{name}: samples in {places}, input {number}: another result")


def main(where: str, part: str, parts: str, *names: str) -> int:
    # Imported here because it takes seconds and switches off settings of the process.
    from torch.testing._internal.common_methods_invocations import op_db

    warnings.simplefilter("ignore")
    count: Counter[str] = Counter()
    for op in [op for op in op_db if op.name not in LEFT_OUT][int(part) :: int(parts)]:
        if not names or op.name in names:
            compare(op, where, count)
    print(f"{count['compared']} compared, {dict(count)}")
    return 1 if count["different"] or count["failed"] else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
