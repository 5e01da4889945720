"""A stand-in for FSDP2: rows of parameters on each rank, gathered in the forward, and the `Sync` for it."""

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
    """A model of which each rank holds an equal part of every parameter, flattened and padded.

    As under FSDP2's ``set_requires_gradient_sync(False)``, a backward leaves no gradient of the shards: those
    of the gathered parameters add up beside, until they are reduced and scattered.
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
        """This rank's part of a tensor."""
        count = dist.get_world_size(self.group)
        padded = torch.cat([whole.flatten(), whole.new_zeros(-whole.numel() % count)])
        return padded.chunk(count)[dist.get_rank(self.group)].clone()

    def name_of(self, shard: Tensor) -> str:
        """Name of the parameter that a shard is of."""
        return next(name for name, one in self.shards.items() if one is shard).replace("/", ".")

    def gather(self, name: str) -> Tensor:
        """The parameter of all ranks' parts."""
        self.gathers += 1
        shard = self.shards[name.replace(".", "/")].detach()
        parts = [torch.empty_like(shard) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(parts, shard, group=self.group)
        return torch.cat(parts)[: self.shapes[name].numel()].view(self.shapes[name])

    def forward(self, *args: Any) -> Any:
        """Gather the parameters, and run the model."""
        whole = {name: _Gather.apply(self.shards[name.replace(".", "/")], self, name) for name in self.shapes}
        return torch.func.functional_call(self.bare[0], whole, args)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shard: Tensor, module: Sharded, name: str) -> Tensor:
        ctx.module, ctx.name = module, name
        if isinstance(shard, FakeTensor):  # a prediction of memory, which other ranks need not make
            return shard.new_empty(module.shapes[name])
        return module.gather(name)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        sums = ctx.module.unsharded
        sums[ctx.name] = sums[ctx.name] + gradients[0] if ctx.name in sums else gradients[0].clone()
        return None, None, None


class ShardedSync(Manual):
    """Ranks with a part of every parameter each."""

    in_step = True

    def __init__(self, module: Sharded) -> None:
        super().__init__(module.group, torch.device("cpu"))
        self.module, self.reductions = module, 0
        self.own: list[float] = []  # norms of this rank's shards
        self.began = 0
        self.raised = 0  # how often this rank has raised its hand

    def vote(self, raised: bool) -> bool:
        """Count the raised hands."""
        self.raised += raised
        return super().vote(raised)

    def no_sync(self) -> ExitStack:
        """Let the gradients add up beside the shards; what was not reduced is dropped at the end."""
        stack = ExitStack()
        stack.callback(self.module.unsharded.clear)
        return stack

    def turn(self, *, last: bool, zero_weight: bool = False) -> None:
        """Note how many gathers there were before."""
        self.began = self.module.gathers

    def catch_up(self, forwards: Iterable[Callable[[], Tensor]], *, backward: bool = True) -> bool:
        """Run a forward in a turn that has had none here; a backward gathers nothing."""
        if self.module.gathers == self.began:
            with suppress(Exception):
                next(iter(forwards))()
        return True

    def turns(self, microbatches: int, samples: Sequence[int] | None) -> list[int]:
        """Return the micro-batches of each rank: each forward gathers from all of them."""
        windows = self.gather((microbatches, microbatches if samples is None else sum(samples)))
        if max(count for count, _ in windows) > min(reach for _, reach in windows):
            raise InputError(f"The ranks have windows of {windows} micro-batches (now, at most).")
        return [count for count, _ in windows]

    def agree_size(self, samples: int) -> int:
        """Return the smallest size that was found."""
        return min(self.gather(samples))

    def announce(self, gradients: Sequence[Tensor | None], parameters: Sequence[Tensor]) -> list[float]:
        """Return whether there is a gradient, for each."""
        return [self.module.name_of(parameter) in self.module.unsharded for parameter in parameters]

    def reduce(
        self,
        gradients: list[Tensor | None],
        parameters: Sequence[Tensor],
        zeros: Callable[[int], Tensor],
        announced: Sequence[float] | None = None,
    ) -> list[Tensor | None]:
        """Reduce and scatter what has added up."""
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
        """Return the root of the shards' squares, summed over the ranks."""
        norm, finite = finite_norm(gradients)
        self.own.append(norm)
        square, broken = self.sum_numbers([norm**2 if finite else 0.0, not finite])
        return math.sqrt(square), not broken


class OwnNorm(ShardedSync):
    """A mutant: the norm of this rank's shards alone."""

    def norm(self, gradients: Sequence[Tensor | None]) -> tuple[float, bool]:
        """Return this rank's part of the norm."""
        return finite_norm(gradients)
