"""`virtual_batch`: write the code for the batch you want, run it in the memory you have."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _force_original_view_tracking

from superbatch.batch.tree import count_samples, map_arrays, map_leaves
from superbatch.errors import InputError, WindowError, explain
from superbatch.integers import positive_int
from superbatch.results.coupling import CouplingReport

from ..checks.introspection import run_eagerly
from ..devices import accelerators
from ..memory.heap import keep_freed_memory
from ..window.participants.buffers import BufferKeeper
from ..window.participants.snapshot import random_state, restore_random_state
from . import options
from .collector import rarely_collecting
from .ir.calls import blank_like
from .ir.layout import Layout
from .ir.values import Sliced, Value
from .ranks.reducer import Across
from .run.log import Log, OnGather, paths
from .run.store import Store
from .trace.aliases import current
from .trace.leaves import Leaves
from .trace.randomness import Randomness
from .trace.recording import Recording
from .trace.tensor import VirtualTensor, is_hollow, refuse_hollow
from .trace.unsupported import RefuseVirtualData, refuse_nested, sets_data
from .trace.watching import Watching

RandomNumbers = Literal["microbatch", "batch"]


class VirtualBatch:
    """What `virtual_batch` yields: call it with the batch.

    Args:
        models: whose parameters get gradients.
        microbatch_size: most samples of a micro-batch, or "auto".
        device: where to compute.
        rng: as in `virtual_batch`.
        device_budget: likewise.
        on_gather: likewise.
        paranoid: likewise.
        compile: likewise.
        group: likewise.

    Examples:
        >>> model = nn.Linear(3, 1)
        >>> with virtual_batch(model, 2) as batch:
        ...     x = batch(torch.ones(5, 3))
        ...     x.shape, type(x).__name__
        (torch.Size([5, 3]), 'VirtualTensor')
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        microbatch_size: int | Literal["auto"],
        device: torch.device,
        *,
        rng: RandomNumbers,
        device_budget: int | None,
        on_gather: OnGather,
        paranoid: bool,
        compile: bool,
        group: Any,
    ) -> None:
        self._size: int | Literal["auto"] = microbatch_size
        self._device = device
        self._rng: RandomNumbers = rng
        self._budget = device_budget
        self._paranoid = paranoid
        self._compile = compile
        self._recording: Recording | None = None
        self._models = models
        self._log = Log(models, on_gather)
        modules = [module for model in models for module in paths(model)]
        self._across = Across(models, modules, group, device)
        parameters = dict.fromkeys(p for one in modules for p in one._parameters.values() if p is not None)
        buffers = [b for one in modules for b in one._buffers.values() if b is not None]
        self._gradients = [(p, p.grad) for p in parameters]
        self._added_to = self._gradients
        self._written: dict[Tensor, Tensor] = {}  # gradients of before, and what was in them
        self._over = False
        self._memory = [(tensor, tensor.data) for tensor in (*parameters, *buffers)]

    def __call__(self, batch: Any) -> Any:
        """Return the batch with virtual tensors in place of its tensors.

        Args:
            batch: a tensor, or tensors nested in containers, the samples in dimension 0 of each; on any
                device. Called again (for the labels, for a second view), it takes as many samples.

        Returns:
            The same structure. Tensors without dimensions, and what is no tensor, are left as they are.

        Raises:
            InputError, SplitError: the samples cannot be counted, or are not as many as in the first call.
            WindowError: the block has ended.
        """
        if self._over:
            raise WindowError(
                explain(
                    "a batch for a block that has ended",
                    "what is computed from it would run on the whole batch at once",
                    "call it in the block (look at the indentation), and compute and go back there",
                )
            )
        samples = count_samples(map_leaves(refuse_nested, batch))
        if self._recording is None:
            self._recording = self._begin(samples)
        recording = self._recording
        if samples != recording.samples:
            raise InputError(
                explain(
                    f"a batch of {samples} samples beside one of {recording.samples}",
                    "the tensors of a block have their samples in common",
                    "use a block for each batch",
                )
            )
        return map_arrays(
            lambda leaf: _wrapped(leaf, recording) if isinstance(leaf, Tensor) and leaf.dim() else leaf, batch
        )

    def report(self) -> CouplingReport:
        """Return what happened so far: where samples met, what was kept, what was done again.

        Examples:
            >>> model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
            >>> with virtual_batch(model, 4) as batch:
            ...     model(batch(torch.randn(16, 3))).square().mean().backward()
            >>> [(point.module, point.operation, point.kept) for point in batch.report().points]
            [('1', 'batch_norm', 256)]
        """
        recording = self._recording
        if recording is None:
            return self._log.report(0, 0)
        return self._log.report(recording.samples, len(recording.parts), recording.store)

    def _begin(self, samples: int) -> Recording:
        self._log.in_pieces = self._size == "auto" or self._size < samples
        recording = Recording(
            samples,
            self._size,
            self._device,
            randomness=Randomness(self._rng),
            store=Store(self._device, self._budget),
            log=self._log,
            paranoid=self._paranoid,
            compile=self._compile,
        )
        recording.across = self._across
        # Those of now: the program may have set them to zero or to None since the block began.
        self._added_to = [(parameter, parameter.grad) for parameter, _ in self._gradients]
        for parameter, _ in self._added_to:
            recording.note_leaf(parameter)
        return recording

    def _settle(self) -> None:
        """Work out what the program may still ask for, and leave real gradients."""
        recording = self._recording
        self._across.ending = True
        if recording is not None:
            recording.end()
        self._across.catch_up()
        virtual = [isinstance(parameter.grad, VirtualTensor) for parameter, _ in self._added_to]
        mine = [_numbers(parameter.grad) for parameter, _ in self._added_to]
        means = self._across.mean([parameter for parameter, _ in self._added_to], mine)
        for (parameter, old), was_virtual, one, new in zip(self._added_to, virtual, mine, means, strict=True):
            if not was_virtual and new is one:
                continue
            _put(parameter, old, new)
        for tensor, _ in self._memory:
            refuse_hollow(tensor)
        if recording is not None:
            _leave_leaves_real(recording)
            for model in self._models:
                _leave_real(paths(model), recording)

    def _before_the_batch(self, written: Iterable[Tensor]) -> None:
        """Keep what is in gradients that are set to zero before there is a recording."""
        for tensor in written:
            if tensor not in self._written and any(tensor is grad for _, grad in self._gradients):
                self._written[tensor] = tensor.clone()

    def _end(self, *, failed: bool) -> None:
        self._over = True
        memory, self._memory = self._memory, []
        if failed:
            for tensor, before in memory:
                if is_hollow(tensor):
                    tensor.data = before
        leaves = Leaves() if self._recording is None else self._recording.leaves
        if self._recording is not None:
            self._recording.open = False
        if failed:
            for tensor, grad in (*leaves.had.values(), *self._gradients):
                tensor.grad = grad
            with torch.no_grad():
                for grad, before in self._written.items():
                    grad.copy_(before)
        leaves.clear()
        self._written.clear()


def _numbers(grad: Tensor | None) -> Tensor | None:
    return grad._recording.numbers(grad).detach() if isinstance(grad, VirtualTensor) else grad


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
        for owned in (module._buffers, module.__dict__):
            found = [(name, item) for name, item in list(owned.items()) if isinstance(item, VirtualTensor)]
            for name, item in found:
                if item._recording is not recording:
                    continue
                if owned is module._buffers or current(recording, item).layout is None:
                    owned[name] = recording.numbers(item).detach()


def _wrapped(tensor: Tensor, recording: Recording) -> Any:
    if tensor.requires_grad:
        recording.note_leaf(tensor)
        return _Enter.apply(tensor, recording)
    return recording.show(_source(tensor, recording))


class _Enter(torch.autograd.Function):
    """The way from a real tensor with a gradient to a virtual one, and back."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, recording: Recording) -> Tensor:
        ctx.recording = recording
        return recording.show(_source(tensor, recording))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if torch.is_grad_enabled():  # create_graph: numbers would be a constant, and a penalty on them vanish
            return grads[0], None
        return ctx.recording.numbers(grads[0]), None


def _source(tensor: Tensor, recording: Recording) -> Value:
    value = Value(blank_like(tensor), recording.device, Layout(0))
    if tensor.device == recording.device:
        recording.readings.read(value, tensor.detach())
    else:
        value.pieces = Sliced(tensor.detach(), Layout(0))
    return value


@contextmanager
def virtual_batch(
    model: nn.Module | Sequence[nn.Module],
    microbatch_size: int | Literal["auto"],
    *,
    rng: RandomNumbers = "microbatch",
    device: torch.device | str | None = None,
    device_budget: int | None = None,
    on_gather: OnGather = "ok",
    paranoid: bool = False,
    compile: bool = False,
    group: Any = None,
) -> Iterator[VirtualBatch]:
    r"""Compute with a whole batch in the memory of a micro-batch: the exact gradient of any loss.

    In the block the batch is of its full size N for model, loss and backward, which run once, unchanged.
    Operations on it are recorded, and run micro-batch by micro-batch once numbers are needed; where samples
    meet (BatchNorm, a contrastive loss, a mean), what meets is summed over all of them first. What an
    operator without a rule needs is gathered: that costs memory, never exactness. When the block ends, every
    ``.grad`` is the real gradient of the real batch, added to what was there before.

    Args:
        model: or several: whose parameters get gradients.
        microbatch_size: most samples that are worked on at a time, at least 1; ``"auto"``: as many as there
            is memory for, by the sizes of what is recorded when the first numbers are needed.
        rng: what random operators (dropout) draw. ``"microbatch"``: each operator and micro-batch from a seed
            of its own, so that nothing is kept: equal to the large batch in law. ``"batch"``: the numbers
            that the large batch would draw, kept for all samples: equal to it number for number.
        device: where to compute; None: where the parameters are.
        device_budget: most bytes of what has to be kept for all samples that stay on the device; the rest
            goes to the host's memory. None: all stays. Whole values (`CouplingReport.whole`) count, but
            stay there.
        on_gather: what to do at an operation that puts the whole batch into one tensor, for want of a rule
            or because its result has no row for each sample: ``"ok"``, ``"warn"`` or ``"error"``. What all
            samples are compared with (``z @ z.T``) is whole in every exact way, and runs.
        paranoid: compare every operation with the same on whole tensors: slow, takes all memory, and finds a
            wrong rule. A BatchNorm over ranks is compared over all of them: pass it on every rank.
        compile: operations that follow each other in a sweep are compiled by Inductor into one that reads and
            writes once, for each size of micro-batch, when they are met first. That takes seconds for each,
            once for the process; how it rounds is in the guide. What cannot be compiled runs as without it.
        group: the process group whose ranks share the batch, where models are not wrapped in
            DistributedDataParallel: gradients are averaged over it. With it every BatchNorm in training mode
            is over the samples of all its ranks; without, only `torch.nn.SyncBatchNorm` is, over its own.

    Yields:
        A function that takes the batch and returns its virtual tensors; its `report` says what happened.

    Raises:
        InputError: a wrong argument.
        CoupledSamplesError: with ``on_gather="error"``; a BatchNorm over ranks is differentiated twice.
        WindowError: the memory of a virtual tensor was asked for; one was used after the block whose numbers
            are not there; another rank has failed.

    Ranks: each calls the block with its own samples; numbers of samples and of micro-batches may differ. What
    `torch.nn.SyncBatchNorm` and ``group`` normalise with is that of all samples of all ranks, on any device:
    one all-gather for each layer and one all-reduce in its backward, in the order of the program whenever a
    rank asks for numbers. Models in DistributedDataParallel do not communicate in the block; where it ends,
    ``.grad`` of all parameters given is averaged over the ranks once, as DDP defines it (each rank's loss
    counts the same; not inside ``no_sync``; hooks for DDP's communication are not called). Collectives that
    the program calls on virtual tensors (``torch.distributed.nn.functional.all_gather``) work on their
    numbers, so that these are whole. A rank that fails before it has sent anything, or when the
    block has ended (out of memory), makes the others raise; one that fails between the two, in a block in
    which it has asked for numbers, leaves them to wait for the group's time-out, as DDP does.

    After an exception gradients (of the models, and of whatever the block has used), buffers and random state
    are as before the block. Compiled models run eagerly in it.

    Examples:
        >>> _ = torch.manual_seed(0)
        >>> model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 1)).double()
        >>> x, y = torch.randn(20, 3).double(), torch.randn(20, 1).double()
        >>> nn.functional.mse_loss(model(x), y).backward()
        >>> real, model[0].weight.grad = model[0].weight.grad, None
        >>> with virtual_batch(model, microbatch_size=8) as batch:
        ...     nn.functional.mse_loss(model(batch(x)), y).backward()
        >>> bool((model[0].weight.grad - real).norm() < 1e-14 * real.norm())
        True
    """
    models = options.checked_models(model)
    options.check(rng, on_gather, device_budget, paranoid=paranoid, compile=compile, group=group)
    automatic = microbatch_size == "auto"
    size = "auto" if automatic else positive_int("microbatch_size", microbatch_size)
    where = options.checked_device(device, (parameter for one in models for parameter in one.parameters()))
    batch = VirtualBatch(
        models,
        size,
        where,
        rng=rng,
        device_budget=device_budget,
        on_gather=on_gather,
        paranoid=paranoid,
        compile=compile,
        group=group,
    )
    buffers = BufferKeeper(models)
    buffers.take()
    if not automatic:  # which goes to the limit: all is handed back
        keep_freed_memory([where])
    randomness = random_state(accelerators(models, where))
    try:
        with batch._across.held_together(), rarely_collecting():
            with ExitStack() as stack:
                stack.enter_context(run_eagerly(say=True))
                # A view that is written is then differentiated as the view it is, and not by its strides.
                stack.enter_context(_force_original_view_tracking(mode=True))
                stack.enter_context(batch._log.following())
                stack.enter_context(Watching(lambda: batch._recording, batch._before_the_batch))
                if sets_data(batch._models):
                    stack.enter_context(RefuseVirtualData())
                yield batch
            batch._settle()
    except BaseException as error:
        batch._end(failed=True)
        buffers.restore()
        restore_random_state(randomness)
        if isinstance(error, Exception):  # and not an interrupt: to tell the others is to wait for them
            batch._across.fail()
        raise
    finally:
        batch._across.end()
    batch._end(failed=False)
