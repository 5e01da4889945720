"""Session of one `virtual_batch` block, from the first batch to the real gradients at the end.

Invariants: after the block, no parameter, buffer or leaf has a virtual gradient or virtual memory. After an
exception, gradients and memory are as before the block.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from superbatch.batch.tree import count_samples, map_arrays, map_leaves
from superbatch.errors import InputError, WindowError
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
    """Recording of a block, and the state of the models before and after it.

    Args:
        models: models whose parameters get gradients.
        options: options of `virtual_batch`.

    Attributes:
        recording: the recording; None before the first batch.
    """

    def __init__(self, models: Sequence[nn.Module], options: Options) -> None:
        self._options = options
        self._models = models
        self.recording: Recording | None = None
        self.log = Log(models, options.on_gather)
        modules = [module for model in models for module in paths(model)]
        self.ranks = RankReducer(models, modules, options.group, options.device, reduces=options.reduces)
        parameters = dict.fromkeys(p for one in modules for p in parameters_of(one).values() if p is not None)
        buffers = [b for one in modules for b in buffers_of(one).values() if b is not None]
        self._gradients = [(p, p.grad) for p in parameters]
        self._old_gradients = self._gradients
        # Gradients that the program writes before the first batch, with copies of their old numbers.
        self._saved_gradients: dict[Tensor, Tensor] = {}
        self._ended = False
        # After a failure, these undo `parameter.data = virtual` in the block.
        self._old_memory = [(tensor, tensor.data) for tensor in (*parameters, *buffers)]

    def enter(self, batch: Any) -> Any:
        """Return the batch with virtual tensors in place of its tensors."""
        if self._ended:
            raise WindowError(
                "batch() was called after its `with virtual_batch(...)` block. "
                "Call it, the forward and backward() inside the block."
            )
        # Counted before anything is recorded, so that a wrong batch leaves the block unchanged.
        samples = count_samples(map_leaves(refuse_nested, batch))
        if self.recording is None:
            self.recording = self._begin(samples)
        recording = self.recording
        if samples != recording.samples:
            raise InputError(
                f"batch() was called with {samples} samples after {recording.samples} samples in the same "
                "block. Use one block for each batch."
            )
        return map_arrays(
            lambda leaf: entered(leaf, recording) if isinstance(leaf, Tensor) and leaf.dim() else leaf, batch
        )

    def report(self) -> CouplingReport:
        """Return the report of the block so far."""
        recording = self.recording
        if recording is None:
            return self.log.report(0, 0)
        return self.log.report(recording.samples, len(recording.microbatches), recording.store)

    def _begin(self, samples: int) -> Recording:
        options = self._options
        self.log.is_split = options.size == "auto" or options.size < samples
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
        recording.ranks = self.ranks
        # Read again, because the program may have called zero_grad() in the block.
        self._old_gradients = [(parameter, parameter.grad) for parameter, _ in self._gradients]
        for parameter, _ in self._old_gradients:
            recording.register_leaves(parameter)  # before the forward, while the gradients are still real
        return recording

    def finish(self) -> None:
        """Compute the values that the program may read after the block, and set real gradients."""
        recording = self.recording
        # From here all collectives are recorded, so a failed rank can issue the remaining ones.
        self.ranks.ending = True
        if recording is not None:
            recording.end()
        self.ranks.issue_recorded()  # before the collectives of the gradients, as on every rank
        virtual = [isinstance(parameter.grad, VirtualTensor) for parameter, _ in self._old_gradients]
        local = [_numbers(parameter.grad) for parameter, _ in self._old_gradients]
        # Before any gradient is set, so that a failed rank leaves all of them as before the block.
        means = self.ranks.mean([parameter for parameter, _ in self._old_gradients], local)
        for (parameter, old), was_virtual, one, new in zip(
            self._old_gradients, virtual, local, means, strict=True
        ):
            if not was_virtual and new is one:  # the block did not touch this gradient
                continue
            _set_gradient(parameter, old, new)
        # Checked here, because `.data = virtual` dispatches no operator.
        for tensor, _ in self._old_memory:
            refuse_hollow(tensor)
        if recording is not None:
            _set_leaf_gradients(recording)
            self.ranks.scatter()  # FSDP2 reduces real gradients into shards
            for model in self._models:
                _replace_virtual_attributes(paths(model), recording)

    def save_gradients(self, written: Iterable[Tensor]) -> None:
        """Copy gradients before they are written, as by zero_grad(), to restore them after a failure."""
        for tensor in written:
            if tensor not in self._saved_gradients and any(tensor is grad for _, grad in self._gradients):
                self._saved_gradients[tensor] = tensor.clone()

    def end(self, *, failed: bool) -> None:
        """End the recording; after a failure, restore memory and gradients."""
        self._ended = True
        memory, self._old_memory = self._old_memory, []
        if failed:
            for tensor, before in memory:
                # Only virtual memory: writes into parameters are not restored (see `virtual_batch`).
                if is_hollow(tensor):
                    tensor.data = before
        leaves = Leaves() if self.recording is None else self.recording.leaves
        if self.recording is not None:
            self.recording.open = False  # from here virtual tensors return computed numbers, or raise
        if failed:
            for tensor, grad in (*leaves.gradients.values(), *self._gradients):
                tensor.grad = grad
            with torch.no_grad():
                for grad, before in self._saved_gradients.items():
                    grad.copy_(before)
        leaves.clear()
        self._saved_gradients.clear()


def _numbers(grad: Tensor | None) -> Tensor | None:
    return grad.virtual.recording.numbers(grad).detach() if isinstance(grad, VirtualTensor) else grad


def _set_gradient(leaf: Tensor, old: Tensor | None, new: Tensor | None) -> None:
    """Set the gradient of a leaf, by writing into its old gradient tensor if there is one."""
    # In place, like autograd, because an optimizer or a bucket of DDP may refer to the old tensor.
    if old is not None and new is not None and old.layout is new.layout is torch.strided:
        new = old if new.data_ptr() == old.data_ptr() else old.copy_(new)
    leaf.grad = None
    leaf.grad = new


def _set_leaf_gradients(recording: Recording) -> None:
    """Set real gradients of leaves that are not parameters of the models, such as those of a loss."""
    for leaf, old in recording.leaves.gradients.values():
        if isinstance(leaf.grad, VirtualTensor):
            _set_gradient(leaf, old, _numbers(leaf.grad))


def _replace_virtual_attributes(modules: Iterable[nn.Module], recording: Recording) -> None:
    """Replace full virtual tensors that a forward has stored in a module by real ones."""
    for module in modules:
        buffers = buffers_of(module)
        for owned in (buffers, module.__dict__):
            virtual = [(name, item) for name, item in list(owned.items()) if isinstance(item, VirtualTensor)]
            for name, item in virtual:
                if item.virtual.recording is not recording:
                    continue
                # A sharded attribute stays virtual, because gathering it needs the memory of the whole batch.
                if owned is buffers or current(recording, item).shard is None:
                    owned[name] = recording.numbers(item).detach()
