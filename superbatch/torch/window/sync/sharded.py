"""Models with parameters sharded over ranks: FSDP2, HSDP, tensor parallel, or FSDP2 with tensor parallel.

Forward and backward are collective. Weights are summed only over the data-parallel ranks, because ranks of
one tensor-parallel group have the same data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from superbatch.errors import InputError
from superbatch.results.ranks import RanksReport

from ... import fastpaths
from ...devices import local_part, resolved
from ...memory.limits import memory_limit
from ..norm import finite_norm
from .fsdp2 import FSDP2
from .manual import Manual


class Sharded(Manual):
    """The ranks of sharded models (a `Sync`).

    Args:
        models: models with parameters that are sharded over the ranks.
        reduced: gradients are reduced once per ``"window"``, or after each ``"microbatch"`` (over HSDP's
            replicas once per window). ``"auto"``: once per window, unless the unsharded gradients that are
            kept until then take a tenth of a rank's memory.
        whole: each rank has all parameters in full during a window, which coupled samples need.

    Raises:
        InputError: `whole` is True and tensor parallel splits the parameters.
    """

    has_collective_forwards = True

    def __init__(
        self,
        models: Iterable[nn.Module],
        reduced: Literal["auto", "window", "microbatch"] = "auto",
        *,
        whole: bool = False,
    ) -> None:
        self._models = list(models)
        self._fsdp = FSDP2(self._models)
        # First, because a forward may have left gathered parameters in the modules.
        self._fsdp.reshard()
        self._data, every, kind = _ranks_of(self._models, self._fsdp)
        super().__init__(_group_of(every), kind)
        # Ranks of a tensor-parallel group see the same samples.
        self._copies = len(every) // len(self._data)
        if whole and (self._copies > 1 or self._is_split()):
            raise InputError(_SPLIT)
        self._whole = whole
        coupled = "samples are coupled, so each rank has all parameters in a window"
        self._reason = coupled if whole else "as passed"
        self._after_each = reduced == "microbatch" or (reduced == "auto" and self._is_short())
        self._outputs: list[Tensor] = []
        self._zero_weight = False
        self._began: dict[str, int] = {}

    @property
    def count(self) -> int:
        """Number of data-parallel ranks."""
        return len(self._data)

    @property
    def index(self) -> int:
        """Index of this rank among the data-parallel ranks."""
        return self._data.index(dist.get_rank())

    @property
    def shared(self) -> bool:
        """True, because other ranks have shards of the model, even if this rank has all data."""
        return True

    @property
    def report(self) -> RanksReport:
        """Report on the ranks that share a window, and the memory that this takes."""
        kept, shards = self._fsdp.bytes()
        kind = ("HSDP" if self._fsdp.replicates else "FSDP2") if kept else ""
        kind = " x ".join(filter(None, [kind, "tensor parallel" if self._copies > 1 else ""]))
        return RanksReport(
            kind,
            self.count,
            "microbatch" if self._after_each else "window",
            kept=kept,
            shards=0 if self._whole else shards,
            why=self._reason,
        )

    def _is_split(self) -> bool:
        """Return whether a parameter is a DTensor that FSDP2 does not manage (tensor parallel)."""
        managed = self._fsdp.managed()
        every = (parameter for model in self._models for parameter in model.parameters())
        return any(hasattr(each, "device_mesh") and id(each) not in managed for each in every)

    def _is_short(self) -> bool:
        """Return whether unsharded gradients would take a tenth of a rank's memory."""
        kept, _ = self._fsdp.bytes()
        try:
            free = memory_limit(self.device)
        except InputError:
            self._reason = "the memory of the device is unknown"
            return False
        # By a vote, because all ranks must choose the same.
        short = self.vote(10 * kept > free.bytes)
        self._reason = f"they take {'more' if short else 'less'} than a tenth of a rank's memory, here {free}"
        return short

    # -- the models ----------------------------------------------------------------------------------------

    def reshard(self) -> None:
        """Register the sharded parameters in the modules, after a forward has left gathered ones."""
        self._fsdp.reshard()

    def gathered(self) -> AbstractContextManager[None]:
        """Return a context in which each rank has all parameters in full."""
        return self._fsdp.gathered()

    def no_sync(self) -> ExitStack:
        """Return a context in which unreduced gradients are summed; its end frees those not yet reduced."""
        stack = self._fsdp.settings()
        stack.callback(self._fsdp.discard)
        stack.callback(self._outputs.clear)
        if self._after_each:
            self._fsdp.watch(stack)
        for model in self._models:
            stack.callback(model.register_forward_hook(self._keep).remove)
        self.begin_microbatch(last=False)
        return stack

    def begin_microbatch(self, *, last: bool, zero_weight: bool = False) -> None:
        """Prepare the forward and backward of a micro-batch."""
        self._fsdp.set(scatters=self._after_each, reduces=self._after_each and last)
        self._outputs.clear()
        self._zero_weight = zero_weight
        self._began = self._fsdp.exchanges()

    def zero_backward(self, *, again: bool) -> None:
        """Run a backward of zeros from the outputs of the models."""
        outputs = [each for each in self._outputs if each.requires_grad]
        if not outputs:
            raise InputError(
                "A micro-batch of weight 0 has no backward on this rank, but other ranks wait for one. Call "
                "the model inside loss_fn, and return a loss that depends on the model's output."
            )
        # The graph is kept only if necessary, because compiled modules do not allow it.
        torch.autograd.backward(outputs, [torch.zeros_like(each) for each in outputs], retain_graph=again)

    def catch_up(self, forwards: Iterable[Callable[[], Tensor]], *, backward: bool = True) -> bool:
        """Run a forward and a backward without the exchanges that this rank has already made in the turn.

        Their gradients do not count, because the window begins again or is discarded.
        """
        if self._copies > 1:  # exchanges of tensor parallel depend on the size of the failed micro-batch
            return False
        self._zero_weight = True
        for forward in forwards:
            self._outputs.clear()
            self._fsdp.discard()
            with self._fsdp.skipping(self._began):
                try:
                    loss = forward()
                    if backward:
                        loss.backward()
                except Exception:  # noqa: BLE001 - any kind: after the models a second failure does not matter
                    if not self._outputs or (backward and not self._zeros_from_outputs()):
                        continue
                return True
        return False

    def _zeros_from_outputs(self) -> bool:
        """Run a backward of zeros; return False if that fails too."""
        try:
            self.zero_backward(again=False)
        except Exception:  # noqa: BLE001 - the first error of this rank is raised
            return False
        return True

    def _keep(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if self._zero_weight:
            self._outputs += [each for each in tree_leaves(output) if isinstance(each, Tensor)]

    # -- numbers -------------------------------------------------------------------------------------------

    def sum_numbers(self, numbers: Iterable[float]) -> list[float]:
        """Return the sums over the data-parallel ranks, which are equal on all ranks."""
        # An exchange of all ranks, because those with the same data must learn of a failure too.
        return [each / self._copies for each in super().sum_numbers(numbers)]

    def microbatch_counts(self, microbatches: int, samples: Sequence[int] | None) -> list[int]:
        """Return the number of micro-batches of each rank, because each forward gathers from all ranks."""
        # Negative, because `agree_size` exchanges positive numbers; 0, of a rank without data, fits both.
        each = self._of_each(-microbatches)
        while not microbatches and max(each) > 0:  # the other ranks first agree on a size
            each = self._of_each(0)
        return [-int(one) for one in each]

    def agree_size(self, samples: int) -> int:
        """Return the smallest size that a rank with data has found."""
        return int(min(filter(None, self._of_each(samples))))

    # -- tensors -------------------------------------------------------------------------------------------

    def gather(self, message: Any) -> list[Any]:
        """Return one message per data-parallel rank: of ranks with equal data, the first that is not None."""
        self._exchange_header()
        every: list[Any] = [None] * dist.get_world_size(self.group)
        self._reach(dist.all_gather_object, every, (self.index, message), group=self.group)
        found: dict[int, Any] = {}
        for index, each in every:
            if found.get(index) is None:
                found[index] = each
        return [found[index] for index in sorted(found)]

    def count_announced(self, parameters: Sequence[Tensor]) -> int:
        """Return the number of numbers that `announce` returns."""
        managed = len(self._fsdp.unreduced())
        return managed * (2 if self._after_each else 1) + len(self._unmanaged(parameters))

    def announce(self, gradients: Sequence[Tensor | None], parameters: Sequence[Tensor]) -> list[float]:
        """Return a number for each gradient that is unreduced, was reduced, or is not managed by FSDP2."""
        others = [each.grad for each in self._unmanaged(parameters)]
        return [*self._fsdp.unreduced(), *self._fsdp.used(), *super().announce(others, [])]

    def reduce(
        self,
        gradients: list[Tensor | None],
        parameters: Sequence[Tensor],
        zeros: Callable[[int], Tensor],
        announced: Sequence[float] | None = None,
    ) -> list[Tensor | None]:
        """Return the shards of the summed gradients."""
        if announced is None:
            announced = self.sum_numbers(self.announce(gradients, parameters))
        unreduced, used = len(self._fsdp.unreduced()), len(self._fsdp.used())
        with self._lost_on_error():
            self._fsdp.flush(announced[:unreduced])
        # A parameter that no rank has used must keep the gradient None, as it would in one process.
        self._fsdp.clear_unused(announced[unreduced : unreduced + used])
        reduced = [_laid_out(each.grad, each) for each in parameters]
        managed = self._fsdp.managed()
        if self.count > 1:
            # FSDP2 does not reduce parameters in `ignored_params` or outside of its modules.
            others = [id(each) not in managed for each in parameters]
            self._reduce_unmanaged(reduced, others, parameters, zeros, announced[unreduced + used :])
        if not self._fsdp.sums:
            # FSDP2 could only form means over the ranks here.
            means = [
                g for g, p in zip(reduced, parameters, strict=True) if g is not None and id(p) in managed
            ]
            fastpaths.multiply([local_part(each) for each in means], self.count)
        return reduced

    def _unmanaged(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """Return the parameters that `fully_shard` does not manage, if several ranks have data."""
        managed = self._fsdp.managed()
        return [each for each in parameters if id(each) not in managed] if self.count > 1 else []

    def _reduce_unmanaged(
        self,
        reduced: list[Tensor | None],
        others: list[bool],
        parameters: Sequence[Tensor],
        zeros: Callable[[int], Tensor],
        announced: Sequence[float],
    ) -> None:
        """Sum the gradients of parameters that `fully_shard` does not manage (its ``ignored_params``)."""
        indices = [index for index, other in enumerate(others) if other]
        if not indices:
            return
        gradients = [reduced[index] for index in indices]
        summed = super().reduce(
            gradients,
            [parameters[index] for index in indices],
            lambda number: zeros(indices[number]),
            announced,
        )
        for index, gradient in zip(indices, summed, strict=True):
            # The sum is over all ranks, and contains each sample once per copy.
            reduced[index] = gradient if gradient is None else gradient.div_(self._copies)

    def flush(self) -> None:
        """Reduce and scatter the unreduced gradients into ``.grad``."""
        self._fsdp.flush(self.sum_numbers(self._fsdp.unreduced()))

    def scale(self, factor: float) -> None:
        """Multiply the unreduced gradients."""
        self._fsdp.scale(factor)

    def norm(self, gradients: Sequence[Tensor | None]) -> tuple[float, bool]:
        """Return the 2-norm of the whole gradient, and True if all elements are finite."""
        # Grouped by the number of ranks that hold the same elements, which are counted once.
        kinds: dict[int, list[Tensor]] = {}
        for gradient in gradients:
            if gradient is not None:
                kinds.setdefault(self._holders(gradient), []).append(local_part(gradient))
        square, finite = 0.0, True
        for holders, shards in kinds.items():
            norm, all_finite = finite_norm(shards)
            finite = finite and all_finite
            square += norm**2 / holders if all_finite else 0.0
        square, broken = super().sum_numbers([square, not finite])
        return math.sqrt(square), not broken

    def _holders(self, gradient: Any) -> int:
        """Return the number of ranks that hold the same elements as this rank."""
        every = self.count * self._copies
        # A plain tensor is whole on every rank.
        if not hasattr(gradient, "placements"):
            return every
        shards = math.prod(
            gradient.device_mesh.size(dimension)
            for dimension, placement in enumerate(gradient.placements)
            if not placement.is_replicate()
        )
        return every // shards


_SPLIT = (
    "Coupled samples need all parameters in full on each rank, but tensor parallel splits operations. Use "
    "only fully_shard (FSDP2), over a mesh of one or two dimensions."
)


def _laid_out(gradient: Any, parameter: Any) -> Tensor | None:
    """Return a gradient with the placements of its parameter; partial sums on several ranks are added."""
    placements = getattr(gradient, "placements", None)
    if gradient is None or placements is None or placements == parameter.placements:
        return gradient
    return gradient.redistribute(placements=parameter.placements)


def _ranks_of(models: Sequence[nn.Module], fsdp: FSDP2) -> tuple[list[int], list[int], torch.device]:
    """Return the data-parallel ranks of this rank, all ranks that share the models, and their device."""
    data = [sorted(mesh.mesh.flatten().tolist()) for mesh in fsdp.meshes]
    parameters: list[Any] = [parameter for model in models for parameter in model.parameters()]
    meshes = {each.device_mesh for each in parameters if hasattr(each, "device_mesh")}
    every = sorted({rank for mesh in meshes for rank in mesh.mesh.flatten().tolist()})
    # From the mesh, because the parameters themselves may be offloaded to the CPU.
    kind = resolved(torch.device(next(iter(meshes)).device_type))
    return max(data, key=len, default=[dist.get_rank()]), every, kind


def _group_of(ranks: list[int]) -> Any:
    """Return the process group of some ranks, which is made once for each default group of torch."""
    everyone = dist.group.WORLD
    if len(ranks) == dist.get_world_size():
        return everyone
    made = _GROUPS.setdefault(everyone, {})
    if tuple(ranks) not in made:
        made[tuple(ranks)] = dist.new_group(ranks, use_local_synchronization=True)
    return made[tuple(ranks)]


_GROUPS: WeakKeyDictionary[Any, dict[tuple[int, ...], Any]] = WeakKeyDictionary()
