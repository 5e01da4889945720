"""Work of a window with coupled samples: the loss runs once, on the batch, in the memory of micro-batches.

To the window around it the batch is one micro-batch, so that all that surrounds the sum - scaling, clipping,
what is not finite, schedulers, restoring everything - is what it always is. Only forward and backward are
others: they run on a virtual batch (`superbatch.torch.virtual`), which leaves the gradient of the real one.
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
from .coupled_ranks import Parts, failure_of_any, is_answered, require_every_rank, scaled
from .joining import joined
from .lockstep import Failure, on_all_ranks
from .microbatches import MicrobatchList
from .open_window import OpenWindow
from .participants.gradient_sum import ManagedParameter, host_backward, run_backward
from .participants.parameter_gradients import ParameterGradientSum
from .retry import but_unseen, require_restorable
from .slips import without_tensor
from .transaction import Transaction

Size = int | Literal["auto"]
Rng = Literal["microbatch", "batch"]


class Coupled:
    """Gradient of a window from the whole batch, a micro-batch at a time; one `Work` of a window.

    Args:
        config: of the accumulator.
        loss_fn: of the whole batch, the user's.
        size: most samples that are worked on at a time; ``"auto"``: as many as there is memory for; None:
            all.
        rng: random operators draw per ``"microbatch"``, or the numbers of the large ``"batch"``.

    Attributes:
        sizing: smaller micro-batches after memory ran out.
        report: of the last window; None before the first.
    """

    def __init__(self, config: Config, loss_fn: Callable[[Any], Any], size: Size | None, rng: Rng) -> None:
        # No size yet: only a failure sets one.
        self.sizing = Fixed(None)
        self.report: CouplingReport | None = None
        self._config, self._loss_fn = config, loss_fn
        self._rng: Rng = rng
        self._run = run_backward if config.backward is None else host_backward(config.backward)
        self._size: Size | None = size
        self._now: Size = "auto"
        self._parts = Parts(0.0, 0.0)
        self._apart = False  # whether nothing was computed from the virtual batch

    @property
    def watched(self) -> None:
        """None: a batch of one micro-batch is no slip here."""

    @property
    def can_run(self) -> bool:
        """True: there is always a loss."""
        return True

    def require_allowed(self) -> None:
        """No-op: every BatchNorm is over the whole batch."""

    def cut(self, batch: Any) -> tuple[MicrobatchList, Sizing]:
        """Return the batch as one micro-batch, and settle how much of it is worked on at a time.

        Args:
            batch: of the user, or a `Window`, whose micro-batches are joined.

        Raises:
            SplitError: samples cannot be counted or are in no tensors, or micro-batches not joined.
            InputError: there is no batch, or a `Window` has no micro-batches.
        """
        size: Size | None = self._size
        if batch is None:  # without samples a rank cannot take part in what couples those of the others
            raise InputError(
                "A batch of coupled samples is None, and every rank needs some. Divide the samples among all "
                "ranks, or leave the update out on all of them."
            )
        if isinstance(batch, Window):
            microbatches = list(batch)
            if not microbatches:
                raise misuse.empty_window()
            size = max(_samples_of(microbatch) for microbatch in microbatches)
            batch = joined(microbatches)
        samples = _samples_of(batch)
        given = None if size == "auto" else size
        self._now = "auto"
        if size != "auto" or self.sizing.most is not None:
            # filter drops None and, for an empty batch, 0.
            self._now = min(filter(None, (given, self.sizing.most, samples)))
        return MicrobatchList([batch], [samples], None, {}), self.sizing

    def twin(self) -> Coupled:
        """Return work that begins with the same sizes and leaves no trace in this one."""
        twin = Coupled(self._config, self._loss_fn, self._size, self._rng)
        # A copy by value: the check's failures must not shrink the real window.
        twin.load_state_dict({"sizing": self.state_dict()})
        return twin

    def state_dict(self) -> dict[str, Any]:
        """Return the sizes that were found."""
        return sizing_state(self.sizing, Fixed(None))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume with sizes that were found."""
        load_sizing(state, self.sizing)

    def run(self, window: OpenWindow[Any]) -> None:
        """Compute the gradient; where memory runs out, again in smaller micro-batches.

        Args:
            window: open, over one piece.

        Raises:
            OutOfMemoryError: a single sample at a time does not fit.
        """
        for batch in window:
            # Each failure lowers the size, so the loop ends at one sample at the latest.
            while (failure := self._until_failure(window, batch)) is not None:
                self._go_on_smaller(window, failure)

    def record(self, window: OpenWindow[Any]) -> Update:
        """Return the record of a window that is over, with the micro-batches that there were."""
        assert self.report is not None
        return window.amend(microbatches=self.report.microbatches)

    def _until_failure(self, window: OpenWindow[Any], batch: Any) -> Failure | None:
        """Return how memory ran out, on this rank or another.

        The virtual batch restores everything if it failed itself, not if something after it did.
        """
        sync, begun = self._config.sync, list[VirtualBatch]()
        failed: Exception | None = None
        self._parts = Parts(0.0, 0.0)
        try:
            self._compute(window, batch, begun)
        except Exception as error:
            # Before anything else: a failed forward may have left autocast or grad mode changed.
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
        # The others wait in an exchange of the block and would never read this rank's vote.
        if failed is not None and not is_answered(failed, virtual):
            window.leave_others()
            raise failed
        return failure_of_any(failed, virtual, self._parts, sync)

    def _compute(self, window: OpenWindow[Any], batch: Any, begun: list[VirtualBatch]) -> None:
        transaction = window.transaction
        config, place, progress = transaction.config, transaction.gradients, transaction.progress
        assert isinstance(place, ParameterGradientSum)
        # Their gradients come from the block too, so their tensors are recorded with the models'.
        models = [*config.models, *_others(config.models, config.owned)]
        self.report = None
        restore_views = view_tracking()
        try:
            with config.sync.gathered(), open_block(models, self._options(models)) as virtual:
                begun.append(virtual)
                value = self._backward(window, virtual, batch, place.inputs)
        finally:  # in how many micro-batches memory ran out, too
            restore_views()  # an interrupt between two lines of torch's own context leaves it changed
            self.report = begun[0].report() if begun else None
        if self._apart:  # the update is right all the same, but it took the memory of the whole batch
            self.report = replace(begun[0].report(), microbatches=1)
            warn(_APART)
        if config.sync.shared:
            weight = float(normalize.total_weight(progress.weights.counted([])))
            stated = config.declared.weigh != "samples"
            self._parts = require_every_rank(begun[0], weight, stated=stated)
        # The forward ran on virtual tensors: a memory bank would hold one after the block.
        config.state.replace_tensors(VirtualTensor, deepcopy)  # a copy of a virtual tensor is real
        place.took()
        progress.losses.load_state({0: value.item()})
        # One micro-batch for the window: arrived, and complete.
        progress.arrived, progress.next = True, 1
        if transaction.watch is not None:
            transaction.watch.check()

    def _backward(
        self, window: OpenWindow[Any], virtual: VirtualBatch, batch: Any, inputs: list[Tensor] | None
    ) -> Tensor:
        """Record forward and backward; return the loss without its graph."""
        loss = _checked(self._loss_fn(virtual(batch)))
        # Reading a sum (`sweeps`) makes a real loss from a virtual batch, which is right.
        self._apart = not isinstance(loss, VirtualTensor) and not virtual.report().sweeps
        ((_, factor),) = window.transaction.progress.weights.scaled(0, loss, None)
        part, scale = scaled(loss, factor), window.transaction.scale
        self._run(part if scale is None else scale.scaled(part), None, inputs, retain_graph=False)
        return loss.detach()

    def _options(self, models: list[nn.Module]) -> Options:
        """Return the options of the block of a window, which reduces the gradients itself."""
        sync, device = self._config.sync, self._config.device
        where = checked_device(device, (parameter for each in models for parameter in each.parameters()))
        return Options(
            size=self._now,
            device=where,
            rng=self._rng,
            device_budget=None,
            # The window itself decides whether a gather is an error.
            on_gather="ok",
            paranoid=False,
            compile=False,
            group=sync.group if sync.shared else None,
            # The window reduces once, with its own sums over ranks.
            reduces=False,
        )

    def _go_on_smaller(self, window: OpenWindow[Any], failure: Failure) -> None:
        transaction = window.transaction
        config = transaction.config

        def shrink() -> None:
            # Before anything is restored: the error must leave the state as it is described.
            require_restorable(transaction, f"a batch for which there was no memory ({failure.text})")
            config.state.restore()  # the block restores the buffers of models alone
            gc.collect()  # an exception and its frames may be a cycle
            release_caches(*config.random.devices)
            if failure.here:
                sizes.append(self._smaller(transaction, failure.text))

        sizes: list[tuple[int, int]] = []
        on_all_ranks(config.sync, shrink)
        transaction.restart()
        # Empty on a rank that did not fail: its own sizes are not the reason.
        for failed, self._now in sizes:
            transaction.progress.failures += 1
            config.reserve.tight = True
            warn(
                f"memory ran out with {failed} samples at a time; the batch is worked through again with at "
                f"most {self._now}. The update is the same{but_unseen(transaction)}. "
                f"({failure.text.splitlines()[0]})"
            )

    def _smaller(self, transaction: Transaction, failure: str) -> tuple[int, int]:
        """Return how many samples at a time did not fit, and how many to try.

        Raises:
            OutOfMemoryError: a single sample did not fit.
        """
        samples = sum(transaction.progress.microbatches.samples or ())
        # Unknown yet: memory ran out before the block had chosen, so the whole batch is assumed.
        if self._now == "auto":  # chosen by the block, or not yet
            parts = self.report.microbatches if self.report is not None else 0
            failed = -(-samples // (parts or 1))
        else:
            failed = near_equal(samples, self._now)[0]
        most = transaction.sizing.failed(failed)
        if not most:
            raise OutOfMemoryError(
                f"There was no memory for a batch of {samples} samples, one at a time ({failure}), and a "
                "single sample is the least to work on; nothing was updated, everything is as before the "
                "window. Make the batch or the samples smaller, use gradient checkpointing or a lower "
                "precision."
            )
        return failed, most


def _samples_of(batch: Any) -> int:
    """Count the samples of a batch whose tensors have one row for each.

    Raises:
        SplitError: they have not, or there are none.
    """
    try:
        samples = count_samples(batch)
    except SplitError as error:  # its advice is for batches that are cut
        if _has_targets(batch):
            raise SplitError(
                "Coupled samples cannot be in lists of per-sample targets, such as boxes and labels. Pad "
                "them to one "
                "tensor with a row per sample, or keep them out of the batch and let loss_fn look them up."
            ) from None
        # The rest names unsplit=, which batches of coupled samples do not have.
        found = str(error).partition(". ")[0].partition(": it holds")[0]
        raise SplitError(f"{found}. {_ROWS}.") from None
    tensors: list[Tensor] = []

    def note(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.dim():
            tensors.append(leaf)
        return leaf

    map_arrays(note, batch)
    if not tensors:
        raise SplitError(
            f"A batch of {samples} coupled samples has no tensor, and arrays and lists are given to loss_fn "
            "as they are, never in micro-batches. Make tensors of them before the call (torch.from_numpy)."
        )
    # 0-dimensional tensors are not in the list: they belong to no sample.
    for tensor in tensors:
        if len(tensor) != samples:
            raise SplitError(
                f"A batch of {samples} coupled samples has a tensor of length {len(tensor)}, and "
                "micro-batches need one row for each sample. Give a padded batch."
            )
    return samples


def _has_targets(batch: Any) -> bool:
    """Return whether a part of the batch is a list of dicts of tensors, as detection models take targets."""
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, list | tuple) else ()
    # Detection models take [{"boxes": ..., "labels": ...}, ...], one dict for each image.
    return any(
        isinstance(part, list | tuple) and part and all(isinstance(each, Mapping) for each in part)
        for part in (batch, *parts)
    )


def _checked(returned: Any) -> Tensor:
    """Return what a loss function returned if it is the loss of a batch.

    Raises:
        InputError: it is not.
    """
    if not isinstance(returned, Tensor):
        raise without_tensor(returned, weighted=False)
    # numel, not dim: a loss of shape [1] is one loss.
    if returned.numel() != 1:
        raise InputError(
            f"loss_fn returned a loss of shape {tuple(returned.shape)}, and a batch has one loss. Return its "
            "mean over the batch."
        )
    check_loss(returned)
    return returned


_ROWS = (
    "Pass tensors with one row for each sample, padded where lengths differ, and let loss_fn close over what "
    "belongs to no sample"
)
_APART = (
    "loss_fn computes nothing from the tensors of the whole batch but from tensors that it closes over, "
    "makes or copies, so the whole batch was evaluated at once. Compute the loss from the tensors of the "
    "batch that loss_fn is given."
)


def _others(models: tuple[nn.Module, ...], owned: list[ManagedParameter]) -> list[nn.Module]:
    """A holder for parameters outside of the models (a learnt temperature): they get gradients as well."""
    # Compared by id: `in` on tensors compares elements.
    inside = {id(parameter) for model in models for parameter in model.parameters()}
    outside = [entry for entry in owned if id(entry.parameter) not in inside]
    if not outside:
        return []
    # A module, because the block takes modules whose parameters get gradients.
    holder = nn.Module()
    for place, entry in enumerate(outside):
        # Not by register_parameter: what the optimizer has may be a plain tensor.
        parameters_of(holder)[str(place)] = entry.parameter  # pyright: ignore[reportArgumentType]  (as said)
    return [holder]
