"""`virtual_batch`: run code for a large batch in the memory of a micro-batch."""

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
    """Handle of a `virtual_batch` block. Call it with the batch to get virtual tensors.

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
        """Return the report of the block so far: coupling points, bytes stored, operations repeated.

        Examples:
            >>> model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
            >>> with virtual_batch(model, 4) as batch:
            ...     model(batch(torch.randn(16, 3))).square().mean().backward()
            >>> [(point.module, point.operation, point.kept) for point in batch.report().points]
            [('1', 'batch_norm', 256)]
        """
        return self._session.report()

    def logged_points(self) -> list[LoggedPoint]:
        """Return the forward's coupling points so far, each with its result if that is a single number."""
        return self._session.log.logged_points()

    @property
    def ranks(self) -> RankReducer:
        """Reductions over the ranks that share the batch."""
        return self._session.ranks


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
    gathers its inputs, which needs more memory but is exact too. At the end of the block, every ``.grad`` is
    a real tensor, to which the gradient of the whole batch has been added.

    Args:
        model: a module or a list of modules, whose parameters get gradients.
        microbatch_size: largest number of samples in a micro-batch, at least 1; ``"auto"``: as many as fit in
            the free memory, computed from the recorded sizes when numbers are first read.
        rng: random numbers of operators such as dropout. ``"microbatch"``: each operator and micro-batch has
            its own seed. No numbers are stored, and their distribution is that of the large batch.
            ``"batch"``: exactly the numbers that the large batch would draw, stored for all samples.
        device: device of the computation; None: that of the parameters.
        device_budget: largest number of bytes stored for all samples on the device; the rest is moved to the
            host's memory. None: no limit. Full values (`CouplingReport.whole`) count, but are not moved.
        on_gather: reaction to an operation that gathers the batch into one tensor, because it has no rule or
            its result has no row per sample: ``"ok"``, ``"warn"`` or ``"error"``. Products of all pairs of
            samples (``z @ z.T``) are not reported, because every exact method needs a full tensor for them.
        paranoid: compare every operation with the same operation on full tensors, to find wrong rules. Slow,
            and needs the memory of the whole batch. With a BatchNorm over ranks, set it on every rank.
        compile: compile consecutive operations with Inductor, for each micro-batch size. This takes seconds
            per group of operations, once per process, and changes the rounding (see docs/coupled.md).
            Operations that cannot be compiled run uncompiled.
        group: process group whose ranks share the batch, for models without DistributedDataParallel and
            ``fully_shard``: gradients are averaged over it. With a group every BatchNorm in training mode
            normalises over the samples of all ranks in the group; without a group, only
            `torch.nn.SyncBatchNorm` does, over its own group.

    Yields:
        A `VirtualBatch`: call it with the batch to get virtual tensors; its `report` describes the block.

    Raises:
        InputError: an argument is wrong.
        CoupledSamplesError: an operation gathers with ``on_gather="error"``, or a BatchNorm over ranks runs
            backward with ``create_graph=True``.
        WindowError: the program asks for the address of a virtual tensor (``data_ptr()``), or reads a tensor
            after the block that was not materialized in the block; or another rank has failed.

    Ranks: each rank opens the block with its own samples; numbers of samples and micro-batches may differ.
    `torch.nn.SyncBatchNorm`, and every BatchNorm with ``group``, uses the statistics of all ranks, on any
    device. Each layer makes one all-gather, and one all-reduce in its backward. These collectives are issued
    in program order when a rank reads numbers. FSDP2 parameters are gathered for the block. Inside it FSDP2
    and DistributedDataParallel do not communicate. At the end of the block, ``.grad`` of all parameters is
    averaged over the ranks once, as in DDP (equal weight per rank; not inside ``no_sync``; without DDP's
    communication hooks). Collectives that the program calls on virtual tensors
    (``torch.distributed.nn.functional.all_gather``) materialize them.

    If a rank fails before its first collective, in the computation of an input of the program's collectives,
    or at the end of the block, the other ranks raise. If it fails anywhere else after it has read numbers,
    they wait for the timeout of the group, as with DDP.

    After an exception, gradients (of the models and of all leaves that the block used), buffers and random
    state (of torch, Python and NumPy) are restored. Writes into parameters (of an averaged teacher) and into
    plain attributes are not restored. Make them after the block, or use `superbatch.torch.WholeBatch`, which
    restores them too. Compiled models run eagerly in the block.

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
    # Checked before the block opens, so that a wrong option changes no gradient, buffer or random state.
    size = "auto" if microbatch_size == "auto" else positive_int("microbatch_size", microbatch_size)
    where = options.checked_device(device, (parameter for one in models for parameter in one.parameters()))
    checked = options.Options(size, where, rng, device_budget, on_gather, paranoid, compile, group)
    with open_block(models, checked) as batch:
        yield batch


@contextmanager
def open_block(models: Sequence[nn.Module], chosen: options.Options) -> Iterator[VirtualBatch]:
    """Open a block on the models, with checked options."""
    session = Session(models, chosen)
    buffers = BufferKeeper(models)
    buffers.begin()
    if chosen.size != "auto":  # "auto" needs all memory, so freed memory is returned to the system
        fastpaths.keep_freed_memory([chosen.device])
    # For every device of the models: dropout of an earlier layer may run on another device.
    randomness = random_state(accelerators(models, chosen.device))
    try:
        # The outermost context: until `finish` has reduced the gradients, shards stay gathered and DDP does
        # not communicate.
        with session.ranks.models_prepared(), rarely_collecting():
            with ExitStack() as stack:
                # Dynamo would trace into the recording, so compiled models run eagerly, with a warning.
                stack.enter_context(run_eagerly(warns=True))
                # After an in-place write, autograd replays the view's own function. It would call as_strided,
                # for which the sharding of the samples is unknown.
                stack.enter_context(_force_original_view_tracking(mode=True))
                stack.enter_context(session.log.tracked_modules())
                stack.enter_context(Watching(lambda: session.recording, session.save_gradients))
                if sets_data(models):  # only if needed, because a function mode disables fused kernels
                    stack.enter_context(RefuseVirtualData())
                yield VirtualBatch(session)
            # Outside of the dispatch modes, because these operations are not those of the program.
            session.finish()
    except BaseException as error:
        # First, because `buffers.restore` writes into the memory that `end` restores.
        session.end(failed=True)
        buffers.restore()
        restore_random_state(randomness)
        if isinstance(error, Exception):  # not for KeyboardInterrupt, because a vote may block
            session.ranks.fail()
        raise
    finally:
        session.ranks.end()
    session.end(failed=False)
