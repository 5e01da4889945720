"""Models whose parameters are sharded over ranks: FSDP2, HSDP, tensor parallel, and FSDP2 beside it.

Forward and backward are collective. Weights are summed over the data-parallel ranks alone: those of tensor
parallel hold the same data.
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
        models: with parameters that are sharded over the ranks.
        reduced: gradients are reduced once in a ``"window"``, or after each ``"microbatch"`` (over replicas,
            which HSDP has, once); ``"auto"``: once, unless those that are kept until then take a tenth of a
            rank's memory.
        whole: each rank has the whole parameters during a window, as coupled samples need.

    Raises:
        InputError: `whole`, and tensor parallel splits the parameters.
    """

    in_step = True

    def __init__(
        self,
        models: Iterable[nn.Module],
        reduced: Literal["auto", "window", "microbatch"] = "auto",
        *,
        whole: bool = False,
    ) -> None:
        self._models = list(models)
        self._fsdp = FSDP2(self._models)
        self._fsdp.reshard()
        self._data, every, kind = _ranks_of(self._models, self._fsdp)
        super().__init__(_group_of(every), kind)
        self._copies = len(every) // len(self._data)
        if whole and (self._copies > 1 or self._is_split()):
            raise InputError(_SPLIT)
        self._whole = whole
        self._why = "samples are coupled, so each rank has all parameters meanwhile" if whole else "stated"
        self._each = reduced == "microbatch" or (reduced == "auto" and self._is_short())
        self._outputs: list[Tensor] = []
        self._idle = False
        self._began: dict[str, int] = {}

    @property
    def count(self) -> int:
        """Number of data-parallel ranks."""
        return len(self._data)

    @property
    def index(self) -> int:
        """Number of this rank among the data-parallel ones."""
        return self._data.index(dist.get_rank())

    @property
    def shared(self) -> bool:
        """True, also where this rank has all of the data: others have parts of the model."""
        return True

    @property
    def report(self) -> RanksReport:
        """Report on the ranks that share a window, and what that costs."""
        kept, shards = self._fsdp.bytes()
        kind = ("HSDP" if self._fsdp.replicates else "FSDP2") if kept else ""
        kind = " x ".join(filter(None, [kind, "tensor parallel" if self._copies > 1 else ""]))
        return RanksReport(
            kind,
            self.count,
            "microbatch" if self._each else "window",
            kept=kept,
            shards=0 if self._whole else shards,
            why=self._why,
        )

    def _is_split(self) -> bool:
        """Return whether a parameter is distributed by something other than FSDP2."""
        managed = self._fsdp.managed()
        every = (parameter for model in self._models for parameter in model.parameters())
        return any(hasattr(each, "device_mesh") and id(each) not in managed for each in every)

    def _is_short(self) -> bool:
        """Return whether gradients that are not sharded would take a tenth of a rank's memory."""
        kept, _ = self._fsdp.bytes()
        try:
            free = memory_limit(self.device)
        except InputError:
            self._why = "the memory of the device is not known"
            return False
        short = self.vote(10 * kept > free.bytes)
        self._why = f"{'more' if short else 'less'} than a tenth of a rank's memory, here {free}"
        return short

    # -- the models ----------------------------------------------------------------------------------------

    def reshard(self) -> None:
        """Register the sharded parameters in the modules, where a forward has left whole ones."""
        self._fsdp.reshard()

    def gathered(self) -> AbstractContextManager[None]:
        """Return a context in which each rank has all parameters whole."""
        return self._fsdp.gathered()

    def no_sync(self) -> ExitStack:
        """Return a context in which gradients add up beside the shards; its end drops them."""
        stack = self._fsdp.settings()
        stack.callback(self._fsdp.discard)
        stack.callback(self._outputs.clear)
        if self._each:
            self._fsdp.watch(stack)
        for model in self._models:
            stack.callback(model.register_forward_hook(self._keep).remove)
        self.turn(last=False)
        return stack

    def turn(self, *, last: bool, idle: bool = False) -> None:
        """Prepare the forward and backward of a micro-batch."""
        self._fsdp.set(scatters=self._each, reduces=self._each and last)
        self._outputs.clear()
        self._idle = idle
        self._began = self._fsdp.exchanges()

    def idle_backward(self, *, again: bool) -> None:
        """Run a backward of zeros from the outputs of the models."""
        outputs = [each for each in self._outputs if each.requires_grad]
        if not outputs:
            raise InputError(
                "A micro-batch without weight has no backward on this rank, and other ranks wait for it. Let "
                "loss_fn call the model itself, and return a loss that depends on its output."
            )
        # Retained only where it must be: compiled modules refuse it.
        torch.autograd.backward(outputs, [torch.zeros_like(each) for each in outputs], retain_graph=again)

    def catch_up(self, forwards: Iterable[Callable[[], Tensor]], *, backward: bool = True) -> bool:
        """Run a forward and a backward without the exchanges that this rank has made in the turn already.

        Nothing is left of them: the window begins again, or is given up.
        """
        if self._copies > 1:  # those of tensor parallel have the sizes of the micro-batch that failed
            return False
        self._idle = True
        for forward in forwards:
            self._outputs.clear()
            self._fsdp.discard()
            with self._fsdp.skipping(self._began):
                try:
                    loss = forward()
                    if backward:
                        loss.backward()
                except Exception:  # noqa: BLE001 - it may fail again, and behind the models that does not matter
                    if not self._outputs or (backward and not self._zeros_from_outputs()):
                        continue
                return True
        return False

    def _zeros_from_outputs(self) -> bool:
        """Run a backward of zeros; False where that fails too, as in a part of the model that always does."""
        try:
            self.idle_backward(again=False)
        except Exception:  # noqa: BLE001 - the error that began it is the one to be told
            return False
        return True

    def _keep(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if self._idle:
            self._outputs += [each for each in tree_leaves(output) if isinstance(each, Tensor)]

    # -- numbers -------------------------------------------------------------------------------------------

    def sum_numbers(self, numbers: Iterable[float]) -> list[float]:
        """Return the sums over the data-parallel ranks, the same on all ranks."""
        # One exchange among all ranks: those with the same data must hear of a failure too.
        return [each / self._copies for each in super().sum_numbers(numbers)]

    def turns(self, microbatches: int, samples: Sequence[int] | None) -> list[int]:
        """Return the micro-batches of each rank: each forward gathers from all of them."""
        # Sizes are sent above 0 and turns below: a rank without data sends 0, whichever the others exchange.
        each = self._of_each(-microbatches)
        while not microbatches and max(each) > 0:  # they agree on a size before
            each = self._of_each(0)
        return [-int(one) for one in each]

    def agree_size(self, samples: int) -> int:
        """Return the smallest size that a rank has found; one without data has none."""
        return int(min(filter(None, self._of_each(samples))))

    # -- tensors -------------------------------------------------------------------------------------------

    def gather(self, message: Any) -> list[Any]:
        """Return a message of each data-parallel rank: of equal ones the first that is not None."""
        self._meet()
        every: list[Any] = [None] * dist.get_world_size(self.group)
        self._reach(dist.all_gather_object, every, (self.index, message), group=self.group)
        found: dict[int, Any] = {}
        for index, each in every:
            if found.get(index) is None:
                found[index] = each
        return [found[index] for index in sorted(found)]

    def count_announced(self, parameters: Sequence[Tensor]) -> int:
        """Return how many numbers `announce` returns."""
        managed = len(self._fsdp.held())
        return managed * (2 if self._each else 1) + len(self._others(parameters))

    def announce(self, gradients: Sequence[Tensor | None], parameters: Sequence[Tensor]) -> list[float]:
        """Return a number for each gradient that FSDP2 holds or has reduced, and for each other one."""
        others = [each.grad for each in self._others(parameters)]
        return [*self._fsdp.held(), *self._fsdp.used(), *super().announce(others, [])]

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
        held, used = len(self._fsdp.held()), len(self._fsdp.used())
        with self._unanswered():
            self._fsdp.flush(announced[:held])
        self._fsdp.forget_unused(announced[held : held + used])
        reduced = [_laid_out(each.grad, each) for each in parameters]
        managed = self._fsdp.managed()
        if self.count > 1:
            others = [id(each) not in managed for each in parameters]
            self._reduce_others(reduced, others, parameters, zeros, announced[held + used :])
        if not self._fsdp.sums:
            means = [
                g for g, p in zip(reduced, parameters, strict=True) if g is not None and id(p) in managed
            ]
            fastpaths.multiply([local_part(each) for each in means], self.count)
        return reduced

    def _others(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        """Return the parameters that `fully_shard` leaves alone, where several ranks have data."""
        managed = self._fsdp.managed()
        return [each for each in parameters if id(each) not in managed] if self.count > 1 else []

    def _reduce_others(
        self,
        reduced: list[Tensor | None],
        others: list[bool],
        parameters: Sequence[Tensor],
        zeros: Callable[[int], Tensor],
        announced: Sequence[float],
    ) -> None:
        """Sum the gradients of parameters that `fully_shard` leaves alone, such as its ``ignored_params``."""
        places = [index for index, other in enumerate(others) if other]
        if not places:
            return
        gradients = [reduced[index] for index in places]
        summed = super().reduce(
            gradients,
            [parameters[index] for index in places],
            lambda place: zeros(places[place]),
            announced,
        )
        for index, gradient in zip(places, summed, strict=True):
            reduced[index] = gradient if gradient is None else gradient.div_(self._copies)

    def flush(self) -> None:
        """Reduce and scatter what has added up beside the shards into ``.grad``."""
        self._fsdp.flush(self.sum_numbers(self._fsdp.held()))

    def scale(self, factor: float) -> None:
        """Multiply what has added up beside the shards."""
        self._fsdp.scale(factor)

    def norm(self, gradients: Sequence[Tensor | None]) -> tuple[float, bool]:
        """Return the 2-norm of the whole gradient, each element counted once, and whether it is finite."""
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
        """Return how many ranks hold the elements that this rank holds."""
        every = self.count * self._copies
        if not hasattr(gradient, "placements"):
            return every
        shards = math.prod(
            gradient.device_mesh.size(dimension)
            for dimension, placement in enumerate(gradient.placements)
            if not placement.is_replicate()
        )
        return every // shards


_SPLIT = (
    "Coupled samples need whole parameters on each rank, and tensor parallel splits operations too. Shard "
    "the model by fully_shard (FSDP2) alone, over a mesh of one or two dimensions."
)


def _laid_out(gradient: Any, parameter: Any) -> Tensor | None:
    """Return a gradient sharded as its parameter: where terms of a sum lie on several ranks, their sum."""
    placements = getattr(gradient, "placements", None)
    if gradient is None or placements is None or placements == parameter.placements:
        return gradient
    return gradient.redistribute(placements=parameter.placements)


def _ranks_of(models: Sequence[nn.Module], fsdp: FSDP2) -> tuple[list[int], list[int], torch.device]:
    """Return the data-parallel ranks with this one, all ranks that share the models, and their device."""
    data = [sorted(mesh.mesh.flatten().tolist()) for mesh in fsdp.meshes]
    parameters: list[Any] = [parameter for model in models for parameter in model.parameters()]
    meshes = {each.device_mesh for each in parameters if hasattr(each, "device_mesh")}
    every = sorted({rank for mesh in meshes for rank in mesh.mesh.flatten().tolist()})
    # Not that of the parameters, which may be offloaded.
    kind = resolved(torch.device(next(iter(meshes)).device_type))
    return max(data, key=len, default=[dist.get_rank()]), every, kind


def _group_of(ranks: list[int]) -> Any:
    """Return the process group of some ranks; it is made once for each of torch's default groups."""
    everyone = dist.group.WORLD
    if len(ranks) == dist.get_world_size():
        return everyone
    made = _GROUPS.setdefault(everyone, {})
    if tuple(ranks) not in made:
        made[tuple(ranks)] = dist.new_group(ranks, use_local_synchronization=True)
    return made[tuple(ranks)]


_GROUPS: WeakKeyDictionary[Any, dict[tuple[int, ...], Any]] = WeakKeyDictionary()
