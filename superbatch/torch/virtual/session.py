"""One block of `virtual_batch`, from its first batch to the real gradients that it leaves."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from superbatch.batch.tree import count_samples, map_arrays, map_leaves
from superbatch.errors import InputError, WindowError, explain
from superbatch.results.coupling import CouplingReport

from ..module_tables import buffers_of, parameters_of
from .options import Options
from .ranks.reducer import RankReducer
from .run.log import Log, paths
from .run.store import Store
from .trace.aliases import current
from .trace.entering import entered
from .trace.leaves import Leaves
from .trace.randomness import Randomness
from .trace.recording import Recording
from .trace.tensor import VirtualTensor, is_hollow, refuse_hollow
from .trace.unsupported import refuse_nested


class Session:
    """Recording of a block, and what it does with the models before and after.

    Args:
        models: whose parameters get gradients.
        options: of `virtual_batch`.

    Attributes:
        recording: None before there is a batch.
        log: of what happens.
        across: what is done together with the other ranks.
    """

    def __init__(self, models: Sequence[nn.Module], options: Options) -> None:
        self._options = options
        self._models = models
        self.recording: Recording | None = None
        self.log = Log(models, options.on_gather)
        modules = [module for model in models for module in paths(model)]
        self.across = RankReducer(models, modules, options.group, options.device, reduces=options.reduces)
        parameters = dict.fromkeys(p for one in modules for p in parameters_of(one).values() if p is not None)
        buffers = [b for one in modules for b in buffers_of(one).values() if b is not None]
        self._gradients = [(p, p.grad) for p in parameters]
        self._added_to = self._gradients
        self._written: dict[Tensor, Tensor] = {}  # gradients of before, and what was in them
        self._over = False
        self._memory = [(tensor, tensor.data) for tensor in (*parameters, *buffers)]

    def enter(self, batch: Any) -> Any:
        """Return the batch with virtual tensors in place of its tensors."""
        if self._over:
            raise WindowError(
                explain(
                    "a batch for a block that has ended",
                    "what is computed from it would run on the whole batch at once",
                    "call it in the block (look at the indentation), and compute and go back there",
                )
            )
        samples = count_samples(map_leaves(refuse_nested, batch))
        if self.recording is None:
            self.recording = self._begin(samples)
        recording = self.recording
        if samples != recording.samples:
            raise InputError(
                explain(
                    f"a batch of {samples} samples beside one of {recording.samples}",
                    "the tensors of a block have their samples in common",
                    "use a block for each batch",
                )
            )
        return map_arrays(
            lambda leaf: entered(leaf, recording) if isinstance(leaf, Tensor) and leaf.dim() else leaf, batch
        )

    def report(self) -> CouplingReport:
        """Return a report on the block so far."""
        recording = self.recording
        if recording is None:
            return self.log.report(0, 0)
        return self.log.report(recording.samples, len(recording.parts), recording.store)

    def _begin(self, samples: int) -> Recording:
        options = self._options
        self.log.in_pieces = options.size == "auto" or options.size < samples
        recording = Recording(
            samples,
            options.size,
            options.device,
            randomness=Randomness(options.rng),
            store=Store(options.device, options.device_budget),
            log=self.log,
            paranoid=options.paranoid,
            compile=options.compile,
        )
        recording.across = self.across
        # Those of now: the program may have set them to zero or to None since the block began.
        self._added_to = [(parameter, parameter.grad) for parameter, _ in self._gradients]
        for parameter, _ in self._added_to:
            recording.note_leaf(parameter)
        return recording

    def settle(self) -> None:
        """Compute what the program may still ask for, and leave real gradients."""
        recording = self.recording
        self.across.ending = True
        if recording is not None:
            recording.end()
        self.across.catch_up()
        virtual = [isinstance(parameter.grad, VirtualTensor) for parameter, _ in self._added_to]
        mine = [_numbers(parameter.grad) for parameter, _ in self._added_to]
        means = self.across.mean([parameter for parameter, _ in self._added_to], mine)
        for (parameter, old), was_virtual, one, new in zip(self._added_to, virtual, mine, means, strict=True):
            if not was_virtual and new is one:
                continue
            _put(parameter, old, new)
        for tensor, _ in self._memory:
            refuse_hollow(tensor)
        if recording is not None:
            _leave_leaves_real(recording)
            self.across.scatter()
            for model in self._models:
                _leave_real(paths(model), recording)

    def before_the_batch(self, written: Iterable[Tensor]) -> None:
        """Keep what is in gradients that are set to zero before there is a recording."""
        for tensor in written:
            if tensor not in self._written and any(tensor is grad for _, grad in self._gradients):
                self._written[tensor] = tensor.clone()

    def end(self, *, failed: bool) -> None:
        """Forget what was recorded; after a failure restore memory and gradients."""
        self._over = True
        memory, self._memory = self._memory, []
        if failed:
            for tensor, before in memory:
                if is_hollow(tensor):
                    tensor.data = before
        leaves = Leaves() if self.recording is None else self.recording.leaves
        if self.recording is not None:
            self.recording.open = False
        if failed:
            for tensor, grad in (*leaves.had.values(), *self._gradients):
                tensor.grad = grad
            with torch.no_grad():
                for grad, before in self._written.items():
                    grad.copy_(before)
        leaves.clear()
        self._written.clear()


def _numbers(grad: Tensor | None) -> Tensor | None:
    return grad.virtual.recording.numbers(grad).detach() if isinstance(grad, VirtualTensor) else grad


def _put(leaf: Tensor, old: Tensor | None, new: Tensor | None) -> None:
    """Set a gradient. The tensor that was there stays the same object, as in plain PyTorch."""
    if old is not None and new is not None and old.layout is new.layout is torch.strided:
        new = old if new.data_ptr() == old.data_ptr() else old.copy_(new)
    leaf.grad = None
    leaf.grad = new


def _leave_leaves_real(recording: Recording) -> None:
    """Give real gradients to tensors that are no parameters of the models: those of a loss, say."""
    for leaf, old in recording.leaves.had.values():
        if isinstance(leaf.grad, VirtualTensor):
            _put(leaf, old, _numbers(leaf.grad))


def _leave_real(modules: Iterable[nn.Module], recording: Recording) -> None:
    """Put real tensors in the place of virtual ones that a model's forward left in it.

    An attribute of all samples is left virtual: to gather it would cost the memory of the whole batch.
    """
    for module in modules:
        buffers = buffers_of(module)
        for owned in (buffers, module.__dict__):
            found = [(name, item) for name, item in list(owned.items()) if isinstance(item, VirtualTensor)]
            for name, item in found:
                if item.virtual.recording is not recording:
                    continue
                if owned is buffers or current(recording, item).layout is None:
                    owned[name] = recording.numbers(item).detach()
