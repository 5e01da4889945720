"""From a batch, or a window, to the list of its micro-batches and of their sizes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from superbatch.batch.packed import OFFSETS
from superbatch.batch.split import TokenBudget, cut_packed, near_equal, packing_of
from superbatch.batch.tree import count_samples, plan
from superbatch.errors import SplitError
from superbatch.window import Window

Paths = dict[str, tuple[str, ...]]


def microbatches_of(
    batch: Any, microbatch_size: int | TokenBudget | None, paths: Paths, *, need_samples: bool
) -> tuple[list[Any], list[int] | None, list[int] | None]:
    """Return the micro-batches, the number of samples of each, and the order in which samples come.

    The order lists each sample's position in the batch, micro-batch after micro-batch; None: as in the batch.

    Args:
        batch: a batch to split, or a Window to take as it is.
        microbatch_size: samples per micro-batch at most, a TokenBudget, or None for one piece.
        paths: `whole` and `per_sample` declarations.
        need_samples: whether the sizes must be known; None is returned for them otherwise.

    Raises:
        SplitError: the batch cannot be split, or its samples cannot be counted although they must be.
        InputError: the lengths that a TokenBudget asks for are not there, or are none.

    Examples:
        >>> import torch
        >>> pieces, counts, order = microbatches_of((torch.zeros(5, 2),), 2, {}, need_samples=True)
        >>> counts, order, pieces[2][0].shape
        ([2, 2, 1], None, torch.Size([1, 2]))
    """
    if not isinstance(batch, Window) and microbatch_size is not None:
        if isinstance(microbatch_size, int) and not any(paths.values()):
            length = _length_of_tensors(batch)
            if length:
                counts = near_equal(length, microbatch_size)
                return _split_tensors(batch, counts), counts, None
        trim = microbatch_size.trim if isinstance(microbatch_size, TokenBudget) else ()
        planned = plan(batch, **paths, trim=trim)
        packing = packing_of(batch, planned.samples, microbatch_size)
        return cut_packed(planned, packing), packing.sizes, packing.order
    microbatches = list(batch) if isinstance(batch, Window) else [batch]
    if not any(paths.values()):
        lengths = [_length_of_tensors(microbatch) for microbatch in microbatches]
        if all(lengths):
            return microbatches, lengths, None
    try:
        return microbatches, [count_samples(microbatch, **paths) for microbatch in microbatches], None
    except SplitError:
        if need_samples:
            raise
        return microbatches, None, None


def _length_of_tensors(batch: Any) -> int:
    """Samples of the commonest batches - tuple, list or dict of tensors of one length - and 0 for any other.

    Walking a general batch takes a hundredth of a window of a tiny model; this takes a tenth of that.
    """
    kind = type(batch)
    if not (kind is tuple or kind is list or (kind is dict and OFFSETS.isdisjoint(batch))):
        return 0
    length = 0
    for tensor in batch.values() if kind is dict else batch:
        # Sparse, mkldnn and nested tensors have no slices; `plan` names them.
        if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.is_nested:
            return 0
        shape = tensor.shape  # `len(tensor)` takes four times as long
        if not shape or not shape[0] or (length and shape[0] != length):
            return 0
        length = shape[0]
    return length


def _split_tensors(batch: Any, counts: list[int]) -> list[Any]:
    leaves = batch.values() if type(batch) is dict else batch
    pieces = zip(*[tensor.split_with_sizes(counts) for tensor in leaves], strict=True)
    if type(batch) is tuple:
        return list(pieces)
    return [list(piece) if type(batch) is list else dict(zip(batch, piece, strict=True)) for piece in pieces]
