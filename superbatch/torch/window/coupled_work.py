"""Work of a window with coupled samples: the loss runs once, on the batch, in the memory of micro-batches.

The window treats the batch as one micro-batch, so that scaling, clipping, checks for NaN, schedulers and
restoring work as always. Only forward and backward differ: they run on a virtual batch
(`superbatch.torch.virtual`), which computes the gradient of the real batch.
"""

from __future__ import annotations

import gc
import traceback
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import replace
from typing import Any, Literal

from torch import Tensor, nn

from superbatch import normalize
from superbatch.batch.split import near_equal
from superbatch.batch.tree import count_samples, map_arrays
from superbatch.errors import InputError, OutOfMemoryError, SplitError
from superbatch.results.coupling import CouplingReport
from superbatch.results.update import Update
from superbatch.window import Window

from ..loss.losses import check_loss
from ..memory.out_of_memory import out_of_memory, release_caches
from ..modes import view_tracking
from ..module_tables import parameters_of
from ..sizes.sizing import Fixed, Sizing, load_sizing, sizing_state
from ..virtual.block import VirtualBatch, open_block
from ..virtual.options import Options, checked_device
from ..virtual.trace.tensor import VirtualTensor
from ..warn import warn
from . import misuse
from .config import Config
from .coupled_ranks import CountAndWeight, failure_of_any, is_answered, require_every_rank, scaled
from .joining import joined
from .lockstep import Failure, on_all_ranks
from .microbatches import MicrobatchList
from .open_window import OpenWindow
from .participants.gradient_sum import ManagedParameter, host_backward, run_backward
from .participants.parameter_gradients import ParameterGradientSum
from .retry import require_restorable, retry_condition
from .slips import without_tensor
from .transaction import Transaction

Size = int | Literal["auto"]
Rng = Literal["microbatch", "batch"]


class Coupled:
    """The `Work` of a window that calls the loss once, on a virtual batch computed in micro-batches.

    Args:
        config: the accumulator's.
        loss_fn: the user's loss of the whole batch.
        size: number of samples computed at a time; ``"auto"``: as many as fit in memory; None: all.
        rng: ``"microbatch"``: random operators draw anew for each micro-batch; ``"batch"``: they draw the
            numbers that the large batch would get.

    Attributes:
        sizing: limits the size after memory ran out.
        report: report on the last window; None before the first.
    """

    def __init__(self, config: Config, loss_fn: Callable[[Any], Any], size: Size | None, rng: Rng) -> None:
        # Without a limit, until a window runs out of memory.
        self.sizing = Fixed(None)
        self.report: CouplingReport | None = None
        self._config, self._loss_fn = config, loss_fn
        self._rng: Rng = rng
        self._run = run_backward if config.backward is None else host_backward(config.backward)
        self._size: Size | None = size
        self._current_size: Size = "auto"  # size for the current window
        self._parts = CountAndWeight(0.0, 0.0)
        self._is_unsplit = False  # True if loss_fn does not use the virtual batch

    @property
    def watched(self) -> None:
        """None: no warning about batches that are never split, because the loss needs the whole batch."""

    @property
    def can_run(self) -> bool:
        """True: there is always a loss."""
        return True

    def require_allowed(self) -> None:
        """No-op: every BatchNorm normalises the whole batch."""

    def cut(self, batch: Any) -> tuple[MicrobatchList, Sizing]:
        """Return the batch as one micro-batch, and choose the number of samples computed at a time.

        Args:
            batch: the user's, or a `Window`, whose micro-batches are joined.

        Raises:
            SplitError: samples cannot be counted or are not in tensors, or micro-batches cannot be joined.
            InputError: there is no batch, or a `Window` has no micro-batches.
        """
        size: Size | None = self._size
        if batch is None:  # a rank without samples cannot run the collectives of the forward
            raise InputError(
                "The batch of this rank is None, but coupled samples need a batch on every rank. Give each "
                "rank some of the samples, or skip the update on all ranks."
            )
        if isinstance(batch, Window):
            microbatches = list(batch)
            if not microbatches:
                raise misuse.empty_window()
            size = max(_samples_of(microbatch) for microbatch in microbatches)
            batch = joined(microbatches)
        samples = _samples_of(batch)
        given = None if size == "auto" else size
        self._current_size = "auto"
        if size != "auto" or self.sizing.most_samples is not None:
            # filter removes None and, for an empty batch, 0.
            self._current_size = min(filter(None, (given, self.sizing.most_samples, samples)))
        return MicrobatchList([batch], [samples], None, {}), self.sizing

    def copy(self) -> Coupled:
        """Return a copy that begins with the same sizes and does not change this one."""
        copied = Coupled(self._config, self._loss_fn, self._size, self._rng)
        # Copied, so that a survey that runs out of memory does not shrink the training's micro-batches.
        copied.load_state_dict({"sizing": self.state_dict()})
        return copied

    def state_dict(self) -> dict[str, Any]:
        """Return the sizes that were found."""
        return sizing_state(self.sizing, Fixed(None))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the sizes that were found."""
        load_sizing(state, self.sizing)

    def run(self, window: OpenWindow[Any]) -> None:
        """Compute the gradient; if memory runs out, again in smaller micro-batches.

        Raises:
            OutOfMemoryError: a single sample at a time does not fit.
        """
        for batch in window:
            # Each failure reduces the size, so the loop ends at one sample at the latest.
            while (failure := self._until_failure(window, batch)) is not None:
                self._continue_smaller(window, failure)

    def record(self, window: OpenWindow[Any]) -> Update:
        """Return the record of a window that is over, with the number of micro-batches in the report."""
        assert self.report is not None
        return window.amend(microbatches=self.report.microbatches)

    def _until_failure(self, window: OpenWindow[Any], batch: Any) -> Failure | None:
        """Return the failure if memory ran out on this rank or another; None if the window is complete.

        After a failure inside the virtual batch, the virtual batch has restored everything itself.
        """
        sync, begun = self._config.sync, list[VirtualBatch]()
        failed: Exception | None = None
        self._parts = CountAndWeight(0.0, 0.0)
        try:
            self._compute(window, batch, begun)
        except Exception as error:  # any kind, because the other ranks wait for this rank's vote
            # First, because a failed forward may have left autocast or grad mode changed.
            window.transaction.modes.restore()
            if not sync.shared:
                if not out_of_memory(error):
                    raise
                traceback.clear_frames(error.__traceback__)
                return Failure(str(error) or type(error).__name__, here=True)
            failed = error
        if not sync.shared:
            return None
        virtual = begun[0] if begun else None
        # The other ranks wait in an exchange of the block, and this rank's vote would not reach them.
        if failed is not None and not is_answered(failed, virtual):
            if window.report is not None:
                window.report.suppress()
            raise failed
        return failure_of_any(failed, virtual, self._parts, sync)

    def _compute(self, window: OpenWindow[Any], batch: Any, begun: list[VirtualBatch]) -> None:
        transaction = window.transaction
        config, gradients, progress = transaction.config, transaction.gradients, transaction.progress
        assert isinstance(gradients, ParameterGradientSum)
        # Parameters outside of the models get gradients too, so the block must record them.
        models = [*config.models, *_holder_of_others(config.models, config.owned)]
        self.report = None
        restore_views = view_tracking()
        try:
            with config.sync.gathered(), open_block(models, self._options(models)) as virtual:
                begun.append(virtual)
                value = self._backward(window, virtual, batch, gradients.inputs)
        finally:  # after a failure too: `_smaller` needs the report
            restore_views()  # an interrupt inside torch's own context would leave the setting changed
            self.report = begun[0].report() if begun else None
        if self._is_unsplit:  # the update is exact, but took the memory of the whole batch
            self.report = replace(begun[0].report(), microbatches=1)
            warn(_UNSPLIT)
        if config.sync.shared:
            weight = float(normalize.total_weight(progress.weights.counted([])))
            declared = config.declared.weigh != "samples"
            self._parts = require_every_rank(begun[0], weight, declared=declared)
        # A memory bank may now hold virtual tensors of the forward; deepcopy makes them real.
        config.state.replace_tensors(VirtualTensor, deepcopy)
        gradients.record()
        progress.losses.load_state({0: value.item()})
        # The window's only micro-batch is complete.
        progress.arrived, progress.next = True, 1
        if transaction.watch is not None:
            transaction.watch.check()

    def _backward(
        self, window: OpenWindow[Any], virtual: VirtualBatch, batch: Any, inputs: list[Tensor] | None
    ) -> Tensor:
        """Record forward and backward; return the loss without its graph."""
        loss = _checked(self._loss_fn(virtual(batch)))
        # A real tensor may still depend on the virtual batch, if loss_fn has read virtual values (`sweeps`).
        self._is_unsplit = not isinstance(loss, VirtualTensor) and not virtual.report().sweeps
        ((_, factor),) = window.transaction.progress.weights.scaled(0, loss, None)
        part, scale = scaled(loss, factor), window.transaction.scale
        self._run(part if scale is None else scale.scaled(part), None, inputs, retain_graph=False)
        return loss.detach()

    def _options(self, models: list[nn.Module]) -> Options:
        sync, device = self._config.sync, self._config.device
        where = checked_device(device, (parameter for each in models for parameter in each.parameters()))
        return Options(
            size=self._current_size,
            device=where,
            rng=self._rng,
            device_budget=None,
            on_gather="ok",
            paranoid=False,
            compile=False,
            group=sync.group if sync.shared else None,
            # The window reduces the gradients itself, once.
            reduces=False,
        )

    def _continue_smaller(self, window: OpenWindow[Any], failure: Failure) -> None:
        transaction = window.transaction
        config = transaction.config

        def shrink() -> None:
            # First, so that it raises before anything is restored.
            require_restorable(transaction, f"running out of memory ({failure.text})")
            config.state.restore()  # virtual_batch restores only buffers of models
            gc.collect()  # an exception and its frames may be a cycle
            release_caches(*config.random.devices)
            if failure.here:
                sizes.append(self._smaller(transaction, failure.text))

        sizes: list[tuple[int, int]] = []
        on_all_ranks(config.sync, shrink)
        transaction.restart()
        # `sizes` is empty on a rank that had enough memory.
        for failed, self._current_size in sizes:
            transaction.progress.failures += 1
            config.reserve.tight = True
            warn(
                f"memory ran out with {failed} samples at a time; the batch is computed again with at most "
                f"{self._current_size}. The update is the same{retry_condition(transaction)}. "
                f"({failure.text.splitlines()[0]})"
            )

    def _smaller(self, transaction: Transaction, failure: str) -> tuple[int, int]:
        """Return the size that did not fit and the next to try; raise `OutOfMemoryError` after one sample."""
        samples = sum(transaction.progress.microbatches.samples or ())
        # virtual_batch chooses the size; if memory ran out before it had, the size was the whole batch.
        if self._current_size == "auto":
            parts = self.report.microbatches if self.report is not None else 0
            failed = -(-samples // (parts or 1))
        else:
            failed = near_equal(samples, self._current_size)[0]
        most = transaction.sizing.failed(failed)
        if not most:
            raise OutOfMemoryError(
                f"Memory ran out in a batch of {samples} samples, even with a single sample at a time "
                f"({failure}); no update was made, and everything is as before the window. Make the batch or "
                "the samples smaller, use gradient checkpointing or a lower precision."
            )
        return failed, most


def _samples_of(batch: Any) -> int:
    """Count the samples of a batch; raise `SplitError` unless it has tensors, with one row per sample."""
    try:
        samples = count_samples(batch)
    except SplitError as error:
        if _has_targets(batch):
            raise SplitError(
                "The batch contains a list of per-sample targets, such as boxes and labels, but coupled "
                "samples must be in tensors. Pad the targets to one tensor with a row per sample, or keep "
                "them out of the batch and read them in loss_fn."
            ) from None
        # Without the error's advice, which names unsplit=: coupled samples do not have that option.
        found = str(error).partition(". ")[0]
        raise SplitError(f"{found}. {_ROWS}.") from None
    tensors: list[Tensor] = []

    def collect(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.dim():
            tensors.append(leaf)
        return leaf

    map_arrays(collect, batch)
    if not tensors:
        raise SplitError(
            f"The batch of {samples} coupled samples contains no tensor, and arrays and lists cannot be "
            "computed in micro-batches. Make tensors of them before the call (torch.from_numpy)."
        )
    # 0-dimensional tensors belong to no sample and are not in the list.
    for tensor in tensors:
        if len(tensor) != samples:
            raise SplitError(
                f"A batch of {samples} coupled samples contains a tensor of length {len(tensor)}, but each "
                "tensor needs one row per sample. Pass a padded batch."
            )
    return samples


def _has_targets(batch: Any) -> bool:
    """Return whether an element of the batch is a list of dicts, such as the targets of detection models."""
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, list | tuple) else ()
    # Detection models take [{"boxes": ..., "labels": ...}, ...], one dict per image.
    return any(
        isinstance(part, list | tuple) and part and all(isinstance(each, Mapping) for each in part)
        for part in (batch, *parts)
    )


def _checked(returned: Any) -> Tensor:
    """Return a loss if it is a tensor of one element with a graph, else raise `InputError`."""
    if not isinstance(returned, Tensor):
        raise without_tensor(returned, weighted=False)
    # numel, not dim: a loss of shape [1] is one loss.
    if returned.numel() != 1:
        raise InputError(
            f"loss_fn returned a loss of shape {tuple(returned.shape)}, but a batch has one loss. Return its "
            "mean over the batch."
        )
    check_loss(returned)
    return returned


_ROWS = (
    "Pass tensors with one row per sample, padded if lengths differ, and let loss_fn read everything else "
    "from its closure"
)
_UNSPLIT = (
    "loss_fn uses copies of the batch's tensors, or tensors from its closure, so the whole batch was "
    "computed at once, without micro-batches. Compute the loss from the tensors of the argument of loss_fn."
)


def _holder_of_others(models: tuple[nn.Module, ...], owned: list[ManagedParameter]) -> list[nn.Module]:
    """Return a module that holds the parameters outside of the models, in a list; [] if there are none."""
    # By id, because `in` on tensors compares elements.
    inside = {id(parameter) for model in models for parameter in model.parameters()}
    outside = [entry for entry in owned if id(entry.parameter) not in inside]
    if not outside:
        return []
    # virtual_batch takes only modules.
    holder = nn.Module()
    for number, entry in enumerate(outside):
        # Not by register_parameter, which refuses a plain tensor that an optimizer may have.
        parameters_of(holder)[str(number)] = entry.parameter  # pyright: ignore[reportArgumentType]  (plain tensor)
    return [holder]
