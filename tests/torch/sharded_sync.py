"""Stand-in for FSDP2: shards of parameters, all-gathered in the forward, and their `Sync`."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses import FakeTensor

from superbatch.errors import InputError
from superbatch.torch.window.norm import finite_norm
from superbatch.torch.window.sync.manual import Manual


class Sharded(nn.Module):
    """Model with an equal shard of every parameter on each rank, flattened and padded.

    As under FSDP2's ``set_requires_gradient_sync(False)``, a backward sets no gradient of the shards.
    Gradients of the gathered parameters accumulate in `unsharded` until they are reduced and scattered.
    """

    def __init__(self, model: nn.Module, group: Any) -> None:
        super().__init__()
        self.group = group
        self.unsharded: dict[str, Tensor] = {}
        self.gathers = 0
        self.shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        shards = {name.replace(".", "/"): self.shard(p.detach()) for name, p in model.named_parameters()}
        self.shards = nn.ParameterDict({name: nn.Parameter(shard) for name, shard in shards.items()})
        self.bare = (copy.deepcopy(model).to("meta"),)  # in a tuple: its parameters are not the model's

    def shard(self, whole: Tensor) -> Tensor:
        """Return this rank's shard of a tensor."""
        count = dist.get_world_size(self.group)
        padded = torch.cat([whole.flatten(), whole.new_zeros(-whole.numel() % count)])
        return padded.chunk(count)[dist.get_rank(self.group)].clone()

    def name_of(self, shard: Tensor) -> str:
        """Return the name of a shard's parameter."""
        return next(name for name, one in self.shards.items() if one is shard).replace("/", ".")

    def gather(self, name: str) -> Tensor:
        """All-gather a parameter."""
        self.gathers += 1
        shard = self.shards[name.replace(".", "/")].detach()
        shards_of_ranks = [torch.empty_like(shard) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(shards_of_ranks, shard, group=self.group)
        return torch.cat(shards_of_ranks)[: self.shapes[name].numel()].view(self.shapes[name])

    def forward(self, *args: Any) -> Any:
        """All-gather the parameters, and run the model."""
        whole = {name: _Gather.apply(self.shards[name.replace(".", "/")], self, name) for name in self.shapes}
        return torch.func.functional_call(self.bare[0], whole, args)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shard: Tensor, module: Sharded, name: str) -> Tensor:
        ctx.module, ctx.name = module, name
        if isinstance(shard, FakeTensor):  # a prediction of memory, which other ranks may not run
            return shard.new_empty(module.shapes[name])
        return module.gather(name)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        sums = ctx.module.unsharded
        sums[ctx.name] = sums[ctx.name] + gradients[0] if ctx.name in sums else gradients[0].clone()
        return None, None, None


class ShardedSync(Manual):
    """`Sync` for ranks with a shard of every parameter."""

    has_collective_forwards = True

    def __init__(self, module: Sharded) -> None:
        super().__init__(module.group, torch.device("cpu"))
        self.module, self.reductions = module, 0
        self.own: list[float] = []  # norms of this rank's shards
        self.began = 0
        self.raised = 0  # number of times that this rank has voted True

    def vote(self, raised: bool) -> bool:
        """Count the votes of this rank."""
        self.raised += raised
        return super().vote(raised)

    def no_sync(self) -> ExitStack:
        """Let the gradients accumulate in `unsharded`; drop those that were not reduced."""
        stack = ExitStack()
        stack.callback(self.module.unsharded.clear)
        return stack

    def begin_microbatch(self, *, last: bool, zero_weight: bool = False) -> None:
        """Record the number of gathers so far."""
        self.began = self.module.gathers

    def catch_up(self, forwards: Iterable[Callable[[], Tensor]], *, backward: bool = True) -> bool:
        """Run a forward if this rank had none in this turn; a backward gathers nothing."""
        if self.module.gathers == self.began:
            with suppress(Exception):
                next(iter(forwards))()
        return True

    def microbatch_counts(self, microbatches: int, samples: Sequence[int] | None) -> list[int]:
        """Return the micro-batches of each rank: each forward gathers from all ranks."""
        windows = self.gather((microbatches, microbatches if samples is None else sum(samples)))
        if max(count for count, _ in windows) > min(reach for _, reach in windows):
            raise InputError(f"The ranks have windows of {windows} micro-batches (now, at most).")
        return [count for count, _ in windows]

    def agree_size(self, samples: int) -> int:
        """Return the smallest size of all ranks."""
        return min(self.gather(samples))

    def announce(self, gradients: Sequence[Tensor | None], parameters: Sequence[Tensor]) -> list[float]:
        """Return for each parameter whether this rank has a gradient of it."""
        return [self.module.name_of(parameter) in self.module.unsharded for parameter in parameters]

    def reduce(
        self,
        gradients: list[Tensor | None],
        parameters: Sequence[Tensor],
        zeros: Callable[[int], Tensor],
        announced: Sequence[float] | None = None,
    ) -> list[Tensor | None]:
        """Reduce and scatter the accumulated gradients."""
        assert gradients == [None] * len(parameters), "premise: the backward left nothing in `.grad`"
        self.reductions += 1
        sums = self.module.unsharded
        names = [self.module.name_of(parameter) for parameter in parameters]
        held = announced
        if held is None:  # models have run since the losses were exchanged
            held = self.sum_numbers(self.announce(gradients, parameters))
        for name in names:
            if name not in sums:
                sums[name] = torch.zeros(self.module.shapes[name], dtype=torch.float64)
        return [
            self.module.shard(self.sum_tensor(sums[name])) if ranks else None
            for name, ranks in zip(names, held, strict=True)
        ]

    def norm(self, gradients: Sequence[Tensor | None]) -> tuple[float, bool]:
        """Return the norm of the shards of all ranks."""
        norm, finite = finite_norm(gradients)
        self.own.append(norm)
        square, broken = self.sum_numbers([norm**2 if finite else 0.0, not finite])
        return math.sqrt(square), not broken


class OwnNorm(ShardedSync):
    """Mutant: the norm of this rank's shards."""

    def norm(self, gradients: Sequence[Tensor | None]) -> tuple[float, bool]:
        """Return the norm of this rank's shards."""
        return finite_norm(gradients)
