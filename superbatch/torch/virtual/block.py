"""`virtual_batch`: write the code for the batch you want, run it in the memory you have."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import torch
from torch import nn
from torch.autograd.grad_mode import _force_original_view_tracking

from superbatch.integers import positive_int
from superbatch.results.coupling import CouplingReport

from .. import fastpaths
from ..checks.introspection import run_eagerly
from ..devices import accelerators
from ..window.participants.buffers import BufferKeeper
from ..window.participants.snapshot import random_state, restore_random_state
from . import options
from .collector import rarely_collecting
from .ranks.reducer import RankReducer
from .run.log import Meeting, OnGather
from .session import Session
from .trace.unsupported import RefuseVirtualData, sets_data
from .trace.watching import Watching


class VirtualBatch:
    """Batch of a block: `virtual_batch` yields it, and it is called with the batch.

    Args:
        session: of the block.

    Examples:
        >>> model = nn.Linear(3, 1)
        >>> with virtual_batch(model, 2) as batch:
        ...     x = batch(torch.ones(5, 3))
        ...     x.shape, type(x).__name__
        (torch.Size([5, 3]), 'VirtualTensor')
    """

    def __init__(self, session: Session) -> None:
        self._session = session

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
        return self._session.enter(batch)

    def report(self) -> CouplingReport:
        """Return the coupling points so far, the bytes kept and the operations repeated.

        Examples:
            >>> model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
            >>> with virtual_batch(model, 4) as batch:
            ...     model(batch(torch.randn(16, 3))).square().mean().backward()
            >>> [(point.module, point.operation, point.kept) for point in batch.report().points]
            [('1', 'batch_norm', 256)]
        """
        return self._session.report()

    def meetings(self) -> list[Meeting]:
        """Return the coupling points so far, with those of their results that are numbers."""
        return self._session.log.meetings()

    @property
    def ranks(self) -> RankReducer:
        """Ranks that share the batch, and what this one has told them."""
        return self._session.across


@contextmanager
def virtual_batch(
    model: nn.Module | Sequence[nn.Module],
    microbatch_size: int | Literal["auto"],
    *,
    rng: options.RandomNumbers = "microbatch",
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
            DistributedDataParallel and not sharded by ``fully_shard``: gradients are averaged over it. With
            a group every BatchNorm in training mode is over the samples of all its ranks; without one only
            `torch.nn.SyncBatchNorm` is, over its own group.

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
    rank asks for numbers. Models sharded by FSDP2 have their parameters gathered for the block. They and
    those in DistributedDataParallel do not communicate in it; where it ends,
    ``.grad`` of all parameters given is averaged over the ranks once, as DDP defines it (each rank's loss
    counts the same; not inside ``no_sync``; hooks for DDP's communication are not called). Collectives that
    the program calls on virtual tensors (``torch.distributed.nn.functional.all_gather``) work on their
    numbers, so that these are whole. A rank that fails before it has sent anything, while it computes what
    such a collective sends, or when the block has ended (out of memory), makes the others raise; one that
    fails between these, in a block in which it has asked for numbers, leaves them to wait for the group's
    time-out, as DDP does.

    After an exception gradients (of the models, and of whatever the block has used), buffers and random state
    (of torch, Python and NumPy) are as before the block. What the block has written into parameters (the
    teacher of a moving average) or bound to plain attributes stays: move it after the block, or use
    ``Accumulator(coupled="exact")``, which restores it. Compiled models run eagerly in the block.

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
    size = "auto" if microbatch_size == "auto" else positive_int("microbatch_size", microbatch_size)
    where = options.checked_device(device, (parameter for one in models for parameter in one.parameters()))
    chosen = options.Options(size, where, rng, device_budget, on_gather, paranoid, compile, group)
    with open_block(models, chosen) as batch:
        yield batch


@contextmanager
def open_block(models: Sequence[nn.Module], chosen: options.Options) -> Iterator[VirtualBatch]:
    """Open the block of a `virtual_batch` whose options were checked.

    Args:
        models: whose parameters get gradients.
        chosen: options of the block.
    """
    session = Session(models, chosen)
    buffers = BufferKeeper(models)
    buffers.take()
    if chosen.size != "auto":  # which goes to the limit: all is handed back
        fastpaths.keep_freed_memory([chosen.device])
    randomness = random_state(accelerators(models, chosen.device))
    try:
        with session.across.held_together(), rarely_collecting():
            with ExitStack() as stack:
                stack.enter_context(run_eagerly(say=True))
                # A view that is written is then differentiated as the view it is, and not by its strides.
                stack.enter_context(_force_original_view_tracking(mode=True))
                stack.enter_context(session.log.following())
                stack.enter_context(Watching(lambda: session.recording, session.before_the_batch))
                if sets_data(models):
                    stack.enter_context(RefuseVirtualData())
                yield VirtualBatch(session)
            session.settle()
    except BaseException as error:
        session.end(failed=True)
        buffers.restore()
        restore_random_state(randomness)
        if isinstance(error, Exception):  # and not an interrupt: to tell the others is to wait for them
            session.across.fail()
        raise
    finally:
        session.across.end()
    session.end(failed=False)
