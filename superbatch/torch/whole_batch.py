"""``Accumulator(coupled="exact")``: the loss runs once, on the whole batch, in the memory of micro-batches.

To the window around it the batch is one micro-batch, so that all that surrounds the sum - scaling, clipping,
what is not finite, schedulers, putting everything back - is what it always is. Only forward and backward are
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

from ..batch.split import near_equal
from ..batch.tree import count_samples, map_arrays
from ..errors import InputError, OutOfMemoryError, SplitError, WindowError, explain
from ..results.coupling import CouplingReport
from ..results.update import Update
from ..window import Window
from .memory.out_of_memory import out_of_memory, release_caches
from .module_tables import parameters_of
from .sizes.sizing import Fixed, Sizing
from .virtual import virtual_batch
from .virtual.block import VirtualBatch
from .virtual.trace.tensor import VirtualTensor
from .warn import warn
from .window.joining import joined
from .window.microbatches import MicrobatchList
from .window.open_window import OpenWindow
from .window.options import is_size
from .window.participants.gradient_sum import ManagedParameter, run_backward
from .window.participants.parameter_gradients import ParameterGradientSum
from .window.retry import but_unseen, require_restorable
from .window.slips import without_tensor
from .window.sync.sync import Sync
from .window.validation import check_choice, check_loss

Coupled = Literal["error", "exact"]
Size = int | Literal["auto"]


class WholeBatch:
    """Makes the gradient of a window from the whole batch, a micro-batch at a time.

    Args:
        loss_fn: of the whole batch, the user's.
        size: most samples that are worked on at a time; ``"auto"``: as many as there is memory for; None:
            all.
        as_drawn: random operators draw the numbers of the large batch, number for number.

    Attributes:
        report: what the last update did; None before the first.
    """

    def __init__(self, loss_fn: Callable[[Any], Any], size: Size | None, *, as_drawn: bool) -> None:
        self._loss_fn = loss_fn
        self._rng: Literal["microbatch", "batch"] = "batch" if as_drawn else "microbatch"
        self._size: Size | None = size
        self._now: Size = "auto"
        self._apart = False  # whether nothing was computed from the virtual batch
        self.report: CouplingReport | None = None

    def pieces(self, batch: Any, sizing: Sizing) -> MicrobatchList:
        """Return the batch as one piece, and settle how much of it is worked on at a time.

        Args:
            batch: of the user, or a `Window`, whose micro-batches are put together.
            sizing: knows whether memory ran out lately.

        Raises:
            SplitError: samples cannot be counted or are in no tensors, or micro-batches not put together.
        """
        assert isinstance(sizing, Fixed)
        size: Size | None = self._size
        if isinstance(batch, Window):
            microbatches = list(batch)
            size = max(_samples_of(microbatch) for microbatch in microbatches)
            batch = joined(microbatches)
        samples = _samples_of(batch)
        stated = None if size == "auto" else size
        self._now = "auto"
        if size != "auto" or sizing.most is not None:
            self._now = min(filter(None, (stated, sizing.most, samples)))
        return MicrobatchList([batch], [samples], None, {})

    def work_through(self, window: OpenWindow) -> None:
        """Compute the gradient; where memory runs out, again in smaller micro-batches.

        Args:
            window: open, over one piece.

        Raises:
            OutOfMemoryError: a single sample at a time does not fit.
        """
        for batch in window:
            while (failure := self._until_failure(window, batch)) is not None:
                self._go_on_smaller(window, failure)

    def record(self, window: OpenWindow) -> Update:
        """Return the record of a window that is over, with the micro-batches that there were."""
        assert window.update is not None
        assert self.report is not None
        window.update = replace(window.update, microbatches=self.report.microbatches)
        return window.update

    def _until_failure(self, window: OpenWindow, batch: Any) -> str | None:
        """Return the text of the error if memory ran out.

        The virtual batch restores everything if it failed itself, not if something after it did.
        """
        try:
            self._compute(window, batch)
        except BaseException as error:
            if not out_of_memory(error):
                raise
            traceback.clear_frames(error.__traceback__)
            return str(error) or type(error).__name__
        return None

    def _compute(self, window: OpenWindow, batch: Any) -> None:
        transaction = window.transaction
        config, place, progress = transaction.config, transaction.gradients, transaction.progress
        assert isinstance(place, ParameterGradientSum)
        models = [*config.models, *_others(config.models, config.owned)]
        begun: list[VirtualBatch] = []
        self.report = None
        try:
            with virtual_batch(models, self._now, rng=self._rng, device=config.device) as virtual:
                begun.append(virtual)
                value = self._backward(window, virtual, batch, place.inputs)
        finally:  # in how many micro-batches memory ran out, too
            self.report = begun[0].report() if begun else None
        if self._apart:  # the update is right all the same, but it took the memory of the whole batch
            self.report = replace(begun[0].report(), microbatches=1)
            warn(_APART)
        config.state.replace_tensors(VirtualTensor, deepcopy)  # a copy of a virtual tensor is real
        place.took()
        progress.losses.load_state({0: value.item()})
        progress.arrived, progress.next = True, 1
        if transaction.watch is not None:
            transaction.watch.check()

    def _backward(
        self, window: OpenWindow, virtual: VirtualBatch, batch: Any, inputs: list[Tensor] | None
    ) -> Tensor:
        """Record forward and backward; return the loss without its graph."""
        loss = _checked(self._loss_fn(virtual(batch)))
        self._apart = not isinstance(loss, VirtualTensor) and not virtual.report().sweeps
        run_backward(window.transaction.scale.scaled(loss), None, inputs, retain_graph=False)
        return loss.detach()

    def _go_on_smaller(self, window: OpenWindow, failure: str) -> None:
        transaction = window.transaction
        config, progress = transaction.config, transaction.progress
        require_restorable(transaction, f"a batch for which there was no memory ({failure})")
        config.state.restore()  # the block restores the buffers of models alone
        gc.collect()  # an exception and its frames may be a cycle
        release_caches(*config.random.devices)
        samples = sum(progress.microbatches.samples or ())
        if self._now == "auto":  # chosen by the block, or not yet
            parts = self.report.microbatches if self.report is not None else 0
            failed = -(-samples // (parts or 1))
        else:
            failed = near_equal(samples, self._now)[0]
        most = transaction.sizing.failed(failed)
        if not most:
            raise OutOfMemoryError(
                explain(
                    f"a batch of {samples} samples, one at a time, for which there was no memory ({failure})",
                    'coupled="exact" keeps what samples share, and a single one is the least to work on; '
                    "nothing was updated, everything is as before the window",
                    "make the batch or the samples smaller, use gradient checkpointing or a lower precision",
                )
            )
        transaction.restart()
        self._now = most
        progress.failures += 1
        config.reserve.tight = True
        warn(
            f"memory ran out with {failed} samples at a time; the batch is worked through again with at most "
            f"{most}. The update is the same{but_unseen(transaction)}. ({failure.splitlines()[0]})"
        )


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
                'coupled="exact" cannot cut lists of per-sample targets, such as boxes and labels. Pad '
                "them to one "
                "tensor with a row per sample, or keep them out of the batch and let loss_fn look them up."
            ) from None
        found = str(error).partition(" Do: ")[0]
        raise SplitError(f'{found} Do: with coupled="exact" {_ROWS}.') from None
    tensors: list[Tensor] = []

    def note(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.dim():
            tensors.append(leaf)
        return leaf

    map_arrays(note, batch)
    if not tensors:
        raise SplitError(
            explain(
                f'a batch of {samples} samples without a tensor, with coupled="exact"',
                "arrays and lists are given to loss_fn as they are, so nothing would be worked through in "
                "micro-batches",
                "make tensors of them before the call (torch.from_numpy)",
            )
        )
    for tensor in tensors:
        if len(tensor) != samples:
            raise SplitError(
                explain(
                    f"a batch of {samples} samples with a tensor of length {len(tensor)}, with "
                    'coupled="exact"',
                    "what is worked through in micro-batches has one row for each sample",
                    "give a padded batch",
                )
            )
    return samples


def _has_targets(batch: Any) -> bool:
    """Tell if a part of the batch is a list of dicts of tensors, as detection models take their targets."""
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, list | tuple) else ()
    return any(
        isinstance(part, list | tuple) and part and all(isinstance(each, Mapping) for each in part)
        for part in (batch, *parts)
    )


def _checked(returned: Any) -> Tensor:
    """Return the result of a loss function if it is the loss of a batch.

    Raises:
        InputError: it is not.
    """
    if not isinstance(returned, Tensor):
        raise without_tensor(returned, weighted=False)
    if returned.numel() != 1:
        raise _refusal(
            f"a loss of shape {tuple(returned.shape)}",
            "a batch has one loss",
            "return its mean over the batch",
        )
    check_loss(returned)
    return returned


def whole_batch(
    coupled: object,
    loss_fn: Callable[[Any], Any] | None,
    microbatch_size: Any,
    *,
    as_drawn: bool,
    sync: Sync,
    **options: Any,
) -> WholeBatch | None:
    """Return the engine for windows of the whole batch, None where samples are taken as separate.

    Args:
        coupled: the option of the accumulator.
        loss_fn: of the accumulator.
        microbatch_size: of the accumulator.
        as_drawn: whether randomness must not depend on the split.
        sync: the ranks that share a batch.
        options: others of the accumulator, which may be given only as they are by default.

    Raises:
        InputError: an option has no meaning beside ``coupled="exact"``.
    """
    if check_choice(coupled, "coupled", Coupled) == "error":
        return None
    if not is_size(microbatch_size):
        raise _refusal(f"microbatch_size={microbatch_size!r}", _SIZE_WRONG, _SIZE_DO)
    for name, (allowed, wrong, do) in _REFUSED.items():
        value = options[name]
        if not isinstance(value, str | tuple | None) or value not in allowed:  # arrays are not compared
            raise _refusal(f"{name}={value!r}", wrong, do)
    if loss_fn is None:
        raise _refusal("no loss_fn", _OWNED_WRONG, _OWNED_DO)
    if sync.group is not None:
        raise _refusal(
            "a model in DistributedDataParallel",
            "the samples of other ranks would not be seen by those of this one",
            "write the step with superbatch.torch.virtual_batch, which works over ranks: around the wrapped "
            "model (with SyncBatchNorm), or with group=... around the bare one",
        )
    size = "auto" if isinstance(microbatch_size, str) else microbatch_size
    return WholeBatch(loss_fn, size, as_drawn=as_drawn)


def owned_loop() -> WindowError:
    """Return the error for a loop over micro-batches where there are none."""
    return WindowError(explain('window(...) with coupled="exact"', _OWNED_WRONG, _OWNED_DO))


_ROWS = (
    "pass tensors with one row for each sample, padded where lengths differ, and let loss_fn close over what "
    "belongs to no sample"
)
_SIZE_WRONG = "a virtual batch is cut by samples, and at least one is worked on at a time"
_SIZE_DO = (
    'state a positive number of samples, "auto", or None for all at once; the update does not depend on it'
)
_APART = explain(
    'a loss_fn that computes nothing from the tensors that it is given, with coupled="exact"',
    "the loss is of tensors that it closes over, makes or copies, so the whole batch was worked on at once",
    "compute the loss from the tensors of the batch that loss_fn is given",
)
_OWNED_WRONG = (
    "the loss is computed once, on the whole batch, so there is no loop over micro-batches to be owned"
)
_OWNED_DO = (
    "pass loss_fn and call the accumulator, or write the step yourself with superbatch.torch.virtual_batch"
)

# Option: the values that may be given, why others cannot, and what to do.
_REFUSED: dict[str, tuple[tuple[Any, ...], str, str]] = {
    "reduction": (
        ("mean",),
        "the gradient is that of what loss_fn returns for the whole batch, so nothing is divided",
        "leave reduction out: a sum is divided by its count in loss_fn",
    ),
    "weight": (
        (None,),
        "the loss function is applied to the whole batch, so nothing is weighted",
        "leave weight out: a mean over the batch's tokens is what loss_fn returns",
    ),
    "min_weight": (
        (None,),
        "the loss function is applied to the whole batch, so nothing is weighted",
        "clamp the divisor in loss_fn",
    ),
    "nonfinite": (
        ("raise", "skip_update"),
        "samples see each other, so a micro-batch cannot be left out of the others",
        'use nonfinite="raise" or "skip_update"',
    ),
    "batchnorm": (
        ("error", "frozen"),
        "the batch's own statistics are used, which is the opposite",
        'leave batchnorm out (exact), or leave coupled="exact" out',
    ),
    "accumulate_into": (
        ("grad",),
        "the gradient of the batch comes in one piece",
        'use accumulate_into="grad"',
    ),
    "whole": (
        ((),),
        "all tensors of the batch are taken to have the samples first",
        "let loss_fn close over what belongs to no sample",
    ),
    "per_sample": (
        ((),),
        "all samples of a virtual batch are in tensors",
        "stack them into tensors with the samples first",
    ),
}


def _refusal(given: str, wrong: str, do: str) -> InputError:
    return InputError(explain(f'{given} with coupled="exact"', wrong, do))


def _others(models: tuple[nn.Module, ...], owned: list[ManagedParameter]) -> list[nn.Module]:
    """A holder for parameters outside of the models (a learnt temperature): they get gradients as well."""
    inside = {id(parameter) for model in models for parameter in model.parameters()}
    outside = [entry for entry in owned if id(entry.parameter) not in inside]
    if not outside:
        return []
    holder = nn.Module()
    for place, entry in enumerate(outside):
        # Not by register_parameter: what the optimizer has may be a plain tensor.
        parameters_of(holder)[str(place)] = entry.parameter  # pyright: ignore[reportArgumentType]  (as said)
    return [holder]
