"""`virtual_batch`: run code that is written for a large batch in the memory of a micro-batch."""

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
from .run.log import LoggedPoint, OnGather
from .session import Session
from .trace.unsupported import RefuseVirtualData, sets_data
from .trace.watching import Watching


class VirtualBatch:
    """Handle of a block, which `virtual_batch` yields: call it with the batch.

    Args:
        session: session of the block.

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
            batch: a tensor, or nested containers of tensors, with the samples in dimension 0; on any device.
                Further calls (labels, a second view) take the same number of samples.

        Returns:
            The same structure. Tensors without dimensions and other leaves are unchanged.

        Raises:
            InputError, SplitError: the samples cannot be counted, or the first call had another number.
            WindowError: the block has ended.
        """
        return self._session.enter(batch)

    def report(self) -> CouplingReport:
        """Return a report: coupling points so far, bytes stored, operations repeated.

        Examples:
            >>> model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
            >>> with virtual_batch(model, 4) as batch:
            ...     model(batch(torch.randn(16, 3))).square().mean().backward()
            >>> [(point.module, point.operation, point.kept) for point in batch.report().points]
            [('1', 'batch_norm', 256)]
        """
        return self._session.report()

    def logged_points(self) -> list[LoggedPoint]:
        """Return the coupling points so far; those whose result is a single number have it."""
        return self._session.log.logged_points()

    @property
    def ranks(self) -> RankReducer:
        """Reductions over the ranks that share the batch."""
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

    In the block, tensors of the batch have the full size N. Model, loss and backward run once, unchanged.
    Their operations are recorded, and run micro-batch by micro-batch when numbers are read. Coupling points
    (BatchNorm, a contrastive loss, a mean) are reduced over all samples first. An operator without a rule
    gathers its inputs: this costs memory, not exactness. At the end of the block, the gradient of the whole
    batch has been added to every ``.grad``, in real tensors.

    Args:
        model: a module or a list of modules, whose parameters get gradients.
        microbatch_size: largest number of samples in a micro-batch, at least 1; ``"auto"``: as many as fit in
            the free memory, chosen from the recorded sizes when numbers are first read.
        rng: random numbers of operators such as dropout. ``"microbatch"``: each operator and micro-batch has
            its own seed, and nothing is stored: the distribution of the large batch. ``"batch"``: the very
            numbers that the large batch would draw, stored for all samples.
        device: device of the computation; None: that of the parameters.
        device_budget: largest number of bytes stored for all samples on the device; the rest is moved to the
            host's memory. None: no limit. Full values (`CouplingReport.whole`) count, but stay on the device.
        on_gather: reaction to an operation that gathers the batch into one tensor, because it has no rule or
            its result has no row per sample: ``"ok"``, ``"warn"`` or ``"error"``. Products of all samples
            with all (``z @ z.T``) need a full tensor in any exact method, and are not reported.
        paranoid: compare every operation with the same operation on full tensors. Slow, needs the memory of
            the whole batch, and finds wrong rules. With a BatchNorm over ranks, set it on every rank.
        compile: compile consecutive operations of a sweep with Inductor, for each micro-batch size. This
            takes seconds per group of operations, once per process; the guide describes the rounding.
            Operations that cannot be compiled run as without it.
        group: process group whose ranks share the batch, for models without DistributedDataParallel and
            ``fully_shard``: gradients are averaged over it. With a group every BatchNorm in training mode
            normalises over the samples of all its ranks; without one only `torch.nn.SyncBatchNorm` does,
            over its own group.

    Yields:
        A `VirtualBatch`: call it with the batch to get virtual tensors; its `report` describes the block.

    Raises:
        InputError: an argument is wrong.
        CoupledSamplesError: an operation gathers with ``on_gather="error"``, or a BatchNorm over ranks runs
            backward with ``create_graph=True``.
        WindowError: the program reads the memory of a virtual tensor; after the block it reads a tensor that
            was not materialized in the block; or another rank has failed.

    Ranks: each rank opens the block with its own samples; numbers of samples and micro-batches may differ.
    `torch.nn.SyncBatchNorm`, and every BatchNorm with ``group``, uses the statistics of all ranks, on any
    device: one all-gather per layer and one all-reduce in its backward, issued in program order when a rank
    reads numbers. FSDP2 parameters are gathered for the block; FSDP2 and DistributedDataParallel do not
    communicate in it. At its end ``.grad`` of all parameters is averaged over the ranks once, as DDP defines
    it (equal weight per rank; not inside ``no_sync``; without DDP's communication hooks). Collectives that
    the program calls on virtual tensors (``torch.distributed.nn.functional.all_gather``) materialize them.
    If a rank fails before its first collective, while it computes the input of a collective of the program,
    or at the end of the block, the other ranks raise. If it fails elsewhere after reading numbers, the other
    ranks wait for the time-out of the group, as with DDP.

    After an exception, gradients (of the models and of all leaves that the block used), buffers and random
    state (of torch, Python and NumPy) are restored. Writes into parameters (an averaged teacher) and plain
    attributes are not: make them after the block, or use `superbatch.torch.WholeBatch`, which restores them
    too. Compiled models run eagerly in the block.

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
    # Checked before the block opens: a wrong option leaves gradients, buffers and random state untouched.
    size = "auto" if microbatch_size == "auto" else positive_int("microbatch_size", microbatch_size)
    where = options.checked_device(device, (parameter for one in models for parameter in one.parameters()))
    chosen = options.Options(size, where, rng, device_budget, on_gather, paranoid, compile, group)
    with open_block(models, chosen) as batch:
        yield batch


@contextmanager
def open_block(models: Sequence[nn.Module], chosen: options.Options) -> Iterator[VirtualBatch]:
    """Open a block with checked options.

    Args:
        models: models whose parameters get gradients.
        chosen: options of the block.
    """
    session = Session(models, chosen)
    buffers = BufferKeeper(models)
    buffers.begin()
    if chosen.size != "auto":  # "auto" uses all memory, so freed blocks are returned to the system
        fastpaths.keep_freed_memory([chosen.device])
    # For every device that the models use: dropout of an earlier layer may run on another one.
    randomness = random_state(accelerators(models, chosen.device))
    try:
        # Outermost: shards stay gathered, and DDP stays silent, until `settle` has reduced the gradients.
        with session.across.held_together(), rarely_collecting():
            with ExitStack() as stack:
                # Dynamo would trace into this recording: compiled models run eagerly, with a warning.
                stack.enter_context(run_eagerly(say=True))
                # After an in-place write autograd replays the view's own function, instead of as_strided, for
                # which a sharding of the samples is unknown.
                stack.enter_context(_force_original_view_tracking(mode=True))
                stack.enter_context(session.log.following())
                stack.enter_context(Watching(lambda: session.recording, session.before_the_batch))
                if sets_data(models):  # a function mode disables fused kernels: only where it is needed
                    stack.enter_context(RefuseVirtualData())
                yield VirtualBatch(session)
            # Outside of the dispatch modes: what runs here is no operation of the program.
            session.settle()
    except BaseException as error:
        # Gradients and memory first: `buffers.restore` writes into the memory that `end` puts in its place.
        session.end(failed=True)
        buffers.restore()
        restore_random_state(randomness)
        if isinstance(error, Exception):  # not for KeyboardInterrupt: a vote with the other ranks may block
            session.across.fail()
        raise
    finally:
        session.across.end()
    session.end(failed=False)
