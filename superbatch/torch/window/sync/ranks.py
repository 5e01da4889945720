"""Ranks: models wrapped in DistributedDataParallel, summed over once per window.

Every micro-batch runs under ``no_sync``, which must enclose the forward too; at the boundary the summed
gradients of the window are reduced by one pass of bucketed all-reduces. DDP's own reduction is not used: it
happens inside the backward of a last micro-batch, which a rank without any weight does not have.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from superbatch.errors import InputError, explain

from ..wrapped_models import refuse_comm_hooks, refuse_sharded, refuse_static_graphs

BUCKET_BYTES = 25 << 20  # as DDP's default: large enough for bandwidth, small enough for memory


@dataclass(frozen=True)
class Ranks:
    """The ranks that share a batch: those of a process group, or this process alone.

    Attributes:
        wrappers: the models' DDP wrappers.
        group: their process group, or one that was named; None: this process alone.
        device: where numbers are exchanged.
    """

    wrappers: tuple[DistributedDataParallel, ...]
    group: Any = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def count(self) -> int:
        """Number of ranks."""
        return 1 if self.group is None else dist.get_world_size(self.group)

    @property
    def index(self) -> int:
        """Number of this rank."""
        return 0 if self.group is None else dist.get_rank(self.group)

    @property
    def shared(self) -> bool:
        """Whether there are several."""
        return self.group is not None and self.count > 1

    def hold_back(self) -> ExitStack:
        """Return a context in which no forward and no backward communicates."""
        refuse_comm_hooks(self.wrappers)  # a hook may have been registered since
        stack = ExitStack()
        for wrapper in self.wrappers:
            stack.enter_context(wrapper.no_sync())
            # Under no_sync a first forward would still broadcast buffers: with a rank that has no weight, and
            # so no
            # forward, the others would wait for ever.
            stack.callback(setattr, wrapper, "require_forward_param_sync", wrapper.require_forward_param_sync)
            wrapper.require_forward_param_sync = False
            # A forward with a graph outside of a window leaves the reducer waiting for a backward: it would
            # reduce in
            # the first backward of this window, which a rank without weight does not have.
            wrapper.reducer._reset_state()
        return stack

    def sum(self, numbers: Iterable[float]) -> list[float]:
        """Return the sums over the ranks, in float64 (exact for whole numbers below 2**53)."""
        if not self.shared:
            return list(numbers)
        dtype = torch.float64 if self.device.type != "mps" else torch.float32
        total = torch.tensor(list(numbers), dtype=dtype, device=self.device)
        dist.all_reduce(total, group=self.group)
        return total.tolist()

    def first(self, number: int) -> int:
        """Return rank 0's number (below 2**53) on every rank."""
        if not self.shared:
            return number
        return int(self.sum([number if self.index == 0 else 0])[0])

    def before(self, number: int) -> int:
        """Return the sum of the numbers on the ranks before this one."""
        if not self.shared:
            return 0
        mine = [number if rank == self.index else 0 for rank in range(self.count)]
        return int(sum(self.sum(mine)[: self.index]))

    def max(self, number: int) -> int:
        """Return the largest of the ranks' numbers."""
        if not self.shared:
            return number
        mine = [number if rank == self.index else 0 for rank in range(self.count)]
        return int(max(self.sum(mine)))

    def sum_tensor(self, tensor: Tensor) -> Tensor:
        """Return a tensor's sum over the ranks (in place)."""
        if self.shared:
            dist.all_reduce(tensor, group=self.group)
        return tensor

    def gather(self, message: Any) -> list[Any]:
        """Return what each rank sends, any object that can be pickled, in the order of the ranks."""
        if not self.shared:
            return [message]
        messages: list[Any] = [None] * self.count
        dist.all_gather_object(messages, message, group=self.group)
        return messages

    def sum_gradients(
        self, gradients: list[Tensor | None], zeros: Callable[[int], Tensor]
    ) -> list[Tensor | None]:
        """Return the sums over the ranks of gradients; ``zeros(i)`` makes an empty gradient ``i``.

        A gradient that only some ranks have counts as zero on the others; one that no rank has stays None, so
        that the optimizer leaves its parameter alone as it would for the large batch.
        """
        if not self.shared:
            return gradients
        held = self.sum(_kind(gradient) for gradient in gradients)
        summed = [
            _present(zeros(index) if gradient is None else gradient, ranks) if ranks else None
            for index, (gradient, ranks) in enumerate(zip(gradients, held, strict=True))
        ]
        for gradient in summed:
            if gradient is not None and gradient.is_sparse:
                dist.all_reduce(gradient, group=self.group)
        for bucket in buckets([g for g in summed if g is not None and not g.is_sparse]):
            flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
            dist.all_reduce(flat, group=self.group)
            for gradient, total in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
                gradient.copy_(total.view_as(gradient))
        return summed


# One number per gradient tells every rank both whether any rank has it and whether one has it sparse.
_DENSE, _SPARSE = 1.0, float(1 << 20)


def _kind(gradient: Tensor | None) -> float:
    if gradient is None:
        return 0.0
    return _SPARSE if gradient.is_sparse else _DENSE


def _present(gradient: Tensor, ranks: float) -> Tensor:
    """This rank's part of a gradient that some rank has."""
    if ranks >= _SPARSE and not gradient.is_sparse:
        gradient = gradient.to_sparse(1)
    return gradient.coalesce() if gradient.is_sparse else gradient


def find_ranks(models: Iterable[nn.Module], group: Any = None, *, no_sync: bool = False) -> Ranks:
    """Return the ranks over which the models are replicated.

    Args:
        models: those that share a batch.
        group: the process group, where the models are not wrapped in DDP; None: that of their wrappers.
        no_sync: several backward passes will run under ``no_sync()``, which a static graph does not allow.

    Raises:
        InputError: the models' DDP wrappers use different process groups, a communication hook, or
            parameters are sharded.
    """
    models = list(models)
    wrappers = tuple(
        module
        for model in models
        for module in model.modules()
        if isinstance(module, DistributedDataParallel)
    )
    groups = [wrapper.process_group for wrapper in wrappers] + [group] * (group is not None)
    if len(set(map(id, groups))) > 1:
        raise InputError(
            explain(
                "models wrapped in DDP over different process groups",
                "one window has one set of ranks to sum over",
                "use one process group, or one Accumulator per model",
            )
        )
    refuse_sharded(models)
    refuse_comm_hooks(wrappers)
    if no_sync:
        refuse_static_graphs(wrappers)
    if not groups and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        warnings.warn(
            f"{dist.get_world_size()} ranks are initialised, but no model given is wrapped in "
            "DistributedDataParallel: each rank makes updates of its own. Pass the wrapped model (not "
            "its .module) to "
            "share a batch over the ranks.",
            UserWarning,
            stacklevel=3,
        )
    first = next((parameter for model in wrappers or models for parameter in model.parameters()), None)
    return Ranks(wrappers, *groups[:1], device=torch.device("cpu") if first is None else first.device)


def buckets(tensors: list[Tensor], limit: int = BUCKET_BYTES) -> list[list[Tensor]]:
    """Group tensors of one dtype and device, in order, into at most `limit` bytes (or one tensor).

    Examples:
        >>> [len(bucket) for bucket in buckets([torch.zeros(4)] * 5, limit=32)]
        [2, 2, 1]
    """
    grouped: list[list[Tensor]] = []
    open_bucket: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        key = (tensor.dtype, tensor.device)
        bucket = open_bucket.get(key)
        if bucket is None or sum(t.nbytes for t in bucket) + tensor.nbytes > limit:
            bucket = open_bucket[key] = []
            grouped.append(bucket)
        bucket.append(tensor)
    return grouped
