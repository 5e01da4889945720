"""Embeddings from an encoder for each micro-batch, joined for the loss and split again.

Joined, the embeddings are one structure like the encoder's output, of all samples in the order of the batch
(and of all ranks, one after the other). Each micro-batch's part is a leaf of the loss's graph, so its
gradient arrives by itself; the joined tensors are not leaves, so a loss may change them in place as it could
in the large batch.
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

Found = list[tuple[str, Tensor]]
# Dtypes that some backends cannot sum, and dtypes that hold their numbers exactly.
_CARRIERS = {torch.bool: torch.uint8, torch.bfloat16: torch.float32, torch.float16: torch.float32}


def tensors_of(output: Any, where: str) -> tuple[Found, dict[str, Any]]:
    """List an encoder's output: its tensors by path, and its plain scalars.

    Args:
        output: tensors in any nesting of mappings, lists, tuples, namedtuples and dataclasses.
        where: the encoder, for the error.

    Returns:
        The tensors in order, the same one as often as it is in the output; and the scalars (None too).

    Raises:
        InputError: something else is in it.

    Examples:
        >>> tensors_of({"text": torch.ones(2), "extra": (None,)}, "encode")
        ([('text', tensor([1., 1.]))], {'extra.0': None})
    """
    tensors: Found = []
    scalars: dict[str, Any] = {}
    for path, leaf in _walk(output, ""):
        if isinstance(leaf, Tensor):
            tensors.append((path, leaf))
        elif is_scalar(leaf):
            scalars[path] = leaf
        else:
            raise InputError(
                f"An output of {where}{_at(path)} is of type {type(leaf).__name__}, and embeddings are "
                "joined as tensors. Return tensors, or dicts, lists, tuples or dataclasses of them."
            )
    return tensors, scalars


def _walk(node: Any, path: str) -> Iterator[tuple[str, Any]]:
    # Before `children`, which would walk a packed sequence as a named tuple.
    if is_scalar(node) or array_shape(node) is not None or is_torch_packed_sequence(node):
        yield path, node
        return
    entries = children(node)
    if entries is None:
        yield path, node
        return
    for name, value in entries:
        yield from _walk(value, join(path, name))


class Embeddings:
    """The outputs of one encoder, micro-batch by micro-batch.

    Args:
        where: the encoder, for errors.
        counts: samples of each micro-batch.
        order: position in the batch of each sample, micro-batch after micro-batch; None: in order.

    Attributes:
        needs: which outputs need a gradient, as the first micro-batch shows.

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
        self._pieces: list[Found] = []

    def add(self, output: Any) -> None:
        """Copy the output for the next micro-batch; the first one shows which outputs need a gradient.

        Raises:
            InputError: it is no structure of tensors with one row for each sample, like those before.
        """
        tensors, scalars = tensors_of(output, self._where)
        self._check_rows(tensors)
        # A copy of its own: an output may be a view that keeps far more alive (the first token of each
        # sample), the input itself, or memory that the next forward writes to.
        copies = [(path, tensor.detach().clone()) for path, tensor in tensors]
        if self._pieces:
            self._check_like_first(copies, scalars)
        else:
            self.needs = [tensor.requires_grad for _, tensor in tensors]
            self._scalars = scalars
            # Without its tensors: they would live on through the call.
            self._template = map_leaves(
                lambda leaf: torch.empty(0) if isinstance(leaf, Tensor) else leaf, output
            )
        self._pieces.append(copies)

    def message(self) -> Any:
        """Return the facts about these embeddings for other ranks: number of samples, and form of one."""
        form = [(path, str(tensor.dtype), tuple(tensor.shape[1:])) for path, tensor in self._pieces[0]]
        return sum(self._counts), form, sorted(self._scalars)

    def join(self, sync: Sync, messages: Sequence[Any] = ()) -> Any:
        """Return all samples' embeddings, of all ranks, in the structure of the encoder's output.

        Args:
            sync: the ranks that share the batch.
            messages: of each rank, in order.

        Raises:
            InputError: the ranks' embeddings do not go together.
        """
        # argsort inverts the order: for each sample of the batch, its row in the joined micro-batches.
        inverse = None if self._order is None else torch.tensor(self._order).argsort()
        joined: list[Tensor] = []
        for place, needs in enumerate(self.needs):
            # The copies are leaves: the loss's backward leaves a gradient at each.
            parts = [piece[place][1].requires_grad_(needs) for piece in self._pieces]
            # No leaf, so that the loss may change it in place.
            mine = torch.cat(parts)
            if inverse is not None:
                mine = mine[inverse.to(mine.device)]
            joined.append(mine if not sync.shared else self._of_all(mine, sync, messages))
        # The template has an empty tensor in the place of each output.
        following = iter(joined)
        return map_leaves(lambda leaf: next(following) if isinstance(leaf, Tensor) else leaf, self._template)

    def gradients(self, index: int) -> dict[int, Tensor]:
        """Return the gradients that the loss's backward left for a micro-batch, by number of the output."""
        return {
            place: tensor.grad
            for place, (_, tensor) in enumerate(self._pieces[index])
            if tensor.grad is not None
        }

    def leaves(self) -> list[Tensor]:
        """Return the parts that the joined embeddings are made of."""
        return [tensor for piece in self._pieces for _, tensor in piece]

    def seen(self, index: int) -> list[Tensor]:
        """Return the embeddings of a micro-batch."""
        return [tensor.detach() for _, tensor in self._pieces[index]]

    def clear(self) -> None:
        """Free the embeddings."""
        self._pieces = []

    def _of_all(self, mine: Tensor, sync: Sync, messages: Sequence[Any]) -> Tensor:
        # All but the number of samples.
        if any(message[1:] != messages[0][1:] for message in messages):
            raise InputError(
                f"The embeddings of {self._where} have other forms on other ranks: "
                f"{[m[1] for m in messages]}. Return the same structure, dtypes and sizes (but for the "
                "samples) on every rank."
            )
        counts = [message[0] for message in messages]
        start = sum(counts[: sync.index])
        stop = start + len(mine)
        # Sums of one number and zeros are exact, and every rank gets the same bits.
        carrier = _CARRIERS.get(mine.dtype, mine.dtype)
        everyone = torch.zeros((sum(counts), *mine.shape[1:]), dtype=carrier, device=mine.device)
        # Without a graph: the samples of other ranks are constants here, this rank's are put in below.
        everyone[start:stop] = mine.detach()
        everyone = sync.sum_tensor(everyone).to(mine.dtype)
        return torch.cat([everyone[:start], mine, everyone[stop:]])

    def _check_rows(self, tensors: Found) -> None:
        rows = self._counts[len(self._pieces)]
        if not tensors:
            raise InputError(f"{self._where} returned no tensor. Return embeddings.")
        for path, tensor in tensors:
            if tensor.layout is not torch.strided or not tensor.ndim or len(tensor) != rows:
                raise InputError(
                    f"An output of {self._where}{_at(path)} of shape {tuple(tensor.shape)}, layout "
                    f"{tensor.layout}, for a micro-batch of {rows} samples does not have the samples as its "
                    "first dimension. Return one row for each sample (several of a sample as (samples, "
                    "several, size)); compute what belongs to the whole batch in loss_fn."
                )

    def _check_like_first(self, tensors: Found, scalars: dict[str, Any]) -> None:
        # Without the first dimension, as micro-batches differ in their samples.
        first = [(path, tensor.dtype, tensor.shape[1:]) for path, tensor in self._pieces[0]]
        here = [(path, tensor.dtype, tensor.shape[1:]) for path, tensor in tensors]
        if here != first or scalars != self._scalars:
            index = len(self._pieces)
            raise InputError(
                f"Outputs of {self._where} do not fit together: {_form(here, scalars)} for micro-batch "
                f"{index}; {_form(first, self._scalars)} for the first. Return the same structure, dtypes "
                "and sizes (but for the samples) for every one: pad to one length inside encode; what "
                "differs by micro-batch is no plain scalar but a tensor with one row for each sample."
            )


def _form(tensors: list[tuple[str, torch.dtype, torch.Size]], scalars: dict[str, Any]) -> str:
    shown = [
        f"{path or 'the output'} {dtype} (samples, {', '.join(map(str, shape))})"
        for path, dtype, shape in tensors
    ]
    return "; ".join([*shown, *(f"{path}={value!r}" for path, value in scalars.items())])


def _at(path: str) -> str:
    return f" at path {path!r}" if path else ""
