"""Embeddings of all micro-batches from one encoder, joined for the loss.

The joined embeddings have the structure of the encoder's output. They contain all samples of all ranks, rank
after rank, in the order of each rank's batch. Each micro-batch's part is a leaf of the loss's graph, so the
loss's backward computes its gradient. The joined tensors are not leaves, so a loss may change them in place,
as it may in the large batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from superbatch.batch.containers import array_shape, children, is_scalar, is_torch_packed_sequence
from superbatch.batch.paths import join
from superbatch.batch.tree import map_leaves
from superbatch.errors import InputError

from ..window.sync.sync import Sync

PathTensors = list[tuple[str, Tensor]]  # tensors with their paths in an output
# Dtypes that some backends cannot sum -> dtypes that represent their values exactly.
_CARRIERS = {torch.bool: torch.uint8, torch.bfloat16: torch.float32, torch.float16: torch.float32}


def tensors_of(output: Any, where: str) -> tuple[PathTensors, dict[str, Any]]:
    """Return the tensors of an encoder's output by path, and its plain scalars.

    Args:
        output: tensors in any nesting of mappings, lists, tuples, namedtuples and dataclasses.
        where: name of the encoder, for the error.

    Returns:
        The tensors in order, with repetitions; and the scalars, including None.

    Raises:
        InputError: the output contains another object.

    Examples:
        >>> tensors_of({"text": torch.ones(2), "extra": (None,)}, "encode")
        ([('text', tensor([1., 1.]))], {'extra.0': None})
    """
    tensors: PathTensors = []
    scalars: dict[str, Any] = {}
    for path, leaf in _walk(output, ""):
        if isinstance(leaf, Tensor):
            tensors.append((path, leaf))
        elif is_scalar(leaf):
            scalars[path] = leaf
        else:
            raise InputError(
                f"An output of {where}{_at_path(path)} is of type {type(leaf).__name__}, but only tensors "
                "can be joined. Return tensors, or dicts, lists, tuples or dataclasses of them."
            )
    return tensors, scalars


def _walk(node: Any, path: str) -> Iterator[tuple[str, Any]]:
    # Before `children`, which would walk a packed sequence as a named tuple.
    if is_scalar(node) or array_shape(node) is not None or is_torch_packed_sequence(node):
        yield path, node
        return
    # An object without parts is a leaf, for which `tensors_of` raises with its path.
    entries = children(node)
    if entries is None:
        yield path, node
        return
    for name, value in entries:
        yield from _walk(value, join(path, name))


class Embeddings:
    """The outputs of one encoder, micro-batch by micro-batch.

    Args:
        where: name of the encoder, for errors.
        counts: number of samples of each micro-batch.
        order: position in the batch of each sample, micro-batch after micro-batch; None: in order.

    Attributes:
        needs: for each output of the first micro-batch, whether it needs a gradient.

    Examples:
        >>> collected = Embeddings("encode", [2, 1], None)
        >>> collected.add(torch.ones(2, 3, requires_grad=True))
        >>> collected.add(torch.zeros(1, 3))
        >>> from superbatch.torch.window.sync.local import Local
        >>> joined = collected.join(Local())
        >>> joined.sum().backward()
        >>> [gradient.shape for gradient in collected.gradients(1).values()]
        [torch.Size([1, 3])]
    """

    def __init__(self, where: str, counts: list[int], order: list[int] | None) -> None:
        self._where, self._counts = where, counts
        self._order = order
        self._template: Any = None
        self._scalars: dict[str, Any] = {}
        self.needs: list[bool] = []
        self._outputs: list[PathTensors] = []

    def add(self, output: Any) -> None:
        """Copy the output for the next micro-batch; the first output also sets `needs`.

        Raises:
            InputError: a tensor does not have one row per sample, or the structure differs from earlier ones.
        """
        tensors, scalars = tensors_of(output, self._where)
        self._check_rows(tensors)
        # Copied, because an output may be the input itself, or a view of a larger tensor (the first token of
        # each sample). The next forward may also write to its memory.
        copies = [(path, tensor.detach().clone()) for path, tensor in tensors]
        if self._outputs:
            self._check_like_first(copies, scalars)
        else:
            self.needs = [tensor.requires_grad for _, tensor in tensors]
            self._scalars = scalars
            # With empty tensors, because the template lives as long as the call.
            self._template = map_leaves(
                lambda leaf: torch.empty(0) if isinstance(leaf, Tensor) else leaf, output
            )
        self._outputs.append(copies)

    def message(self) -> Any:
        """Return a message for the other ranks: number of samples; path, dtype and shape of each tensor."""
        form = [(path, str(tensor.dtype), tuple(tensor.shape[1:])) for path, tensor in self._outputs[0]]
        return sum(self._counts), form, sorted(self._scalars)

    def join(self, sync: Sync, messages: Sequence[Any] = ()) -> Any:
        """Return all samples' embeddings, of all ranks, in the structure of the encoder's output.

        Args:
            sync: the ranks that share the batch.
            messages: messages of all ranks, in order.

        Raises:
            InputError: the ranks' embeddings have different structures.
        """
        # argsort of the order: for each sample of the batch, its row in the joined micro-batches.
        inverse = None if self._order is None else torch.tensor(self._order).argsort()
        joined: list[Tensor] = []
        for number, needs in enumerate(self.needs):
            # The copies are leaves, which get gradients in the loss's backward.
            parts = [output[number][1].requires_grad_(needs) for output in self._outputs]
            # Not a leaf, so that the loss may change it in place.
            mine = torch.cat(parts)
            if inverse is not None:
                mine = mine[inverse.to(mine.device)]
            joined.append(mine if not sync.shared else self._of_all(mine, sync, messages))
        # The template has an empty tensor for each output.
        remaining = iter(joined)
        return map_leaves(lambda leaf: next(remaining) if isinstance(leaf, Tensor) else leaf, self._template)

    def gradients(self, index: int) -> dict[int, Tensor]:
        """Return a micro-batch's gradients after the loss's backward, by number of the output tensor."""
        return {
            number: tensor.grad
            for number, (_, tensor) in enumerate(self._outputs[index])
            if tensor.grad is not None
        }

    def leaves(self) -> list[Tensor]:
        """Return the leaves from which the joined embeddings are computed."""
        return [tensor for output in self._outputs for _, tensor in output]

    def of_microbatch(self, index: int) -> list[Tensor]:
        """Return the embeddings of a micro-batch, without a graph."""
        return [tensor.detach() for _, tensor in self._outputs[index]]

    def clear(self) -> None:
        """Free the embeddings."""
        self._outputs = []

    def _of_all(self, mine: Tensor, sync: Sync, messages: Sequence[Any]) -> Tensor:
        # Everything except the number of samples must be equal.
        if any(message[1:] != messages[0][1:] for message in messages):
            raise InputError(
                f"The embeddings of {self._where} have different structures on the ranks: "
                f"{[m[1] for m in messages]}. Return the same structure, dtypes and sizes (except the "
                "number of samples) on every rank."
            )
        counts = [message[0] for message in messages]
        start = sum(counts[: sync.index])
        stop = start + len(mine)
        # A sum of one number and zeros is exact, so every rank gets the same bits.
        carrier = _CARRIERS.get(mine.dtype, mine.dtype)
        everyone = torch.zeros((sum(counts), *mine.shape[1:]), dtype=carrier, device=mine.device)
        # Samples of other ranks are constants here; this rank's, with their graph, are inserted below.
        everyone[start:stop] = mine.detach()
        everyone = sync.sum_tensor(everyone).to(mine.dtype)
        return torch.cat([everyone[:start], mine, everyone[stop:]])

    def _check_rows(self, tensors: PathTensors) -> None:
        rows = self._counts[len(self._outputs)]
        if not tensors:
            raise InputError(f"{self._where} returned no tensor. Return embeddings.")
        # A sparse tensor has no rows that could be joined and split.
        for path, tensor in tensors:
            if tensor.layout is not torch.strided or not tensor.ndim or len(tensor) != rows:
                raise InputError(
                    f"An output of {self._where}{_at_path(path)} has the shape {tuple(tensor.shape)} (layout "
                    f"{tensor.layout}) for a micro-batch of {rows} samples, so the samples are not its first "
                    "dimension. Return one row per sample (several vectors of a sample as (samples, several, "
                    "size)), and compute values of the whole batch in loss_fn."
                )

    def _check_like_first(self, tensors: PathTensors, scalars: dict[str, Any]) -> None:
        # Without the first dimension, the number of samples.
        first = [(path, tensor.dtype, tensor.shape[1:]) for path, tensor in self._outputs[0]]
        here = [(path, tensor.dtype, tensor.shape[1:]) for path, tensor in tensors]
        # Joined with torch.cat, which would convert dtypes without an error.
        if here != first or scalars != self._scalars:
            index = len(self._outputs)
            raise InputError(
                f"The output of {self._where} is {_form(here, scalars)} for micro-batch {index}, but "
                f"{_form(first, self._scalars)} for the first. Return the same structure, dtypes, sizes and "
                "scalars for every micro-batch: pad to one length inside encode, and return a value that "
                "differs by sample as a tensor with one row per sample."
            )


def _form(tensors: list[tuple[str, torch.dtype, torch.Size]], scalars: dict[str, Any]) -> str:
    shown = [
        f"{path or 'the output'} {dtype} (samples, {', '.join(map(str, shape))})"
        for path, dtype, shape in tensors
    ]
    return "; ".join([*shown, *(f"{path}={value!r}" for path, value in scalars.items())])


def _at_path(path: str) -> str:
    return f" at path {path!r}" if path else ""
