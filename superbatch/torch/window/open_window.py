"""An open window: a loop over micro-batches, a backward for each, and the update at the end of the block.

`OpenWindow` drives a `Transaction`. Until the optimizers have stepped, every exception restores the state
before the window. After that, the update is finished first, and then the exception is raised. Each
micro-batch that the loop yields needs a `backward` before the next one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import replace
from types import TracebackType
from typing import Any, Generic, TypeVar

from torch import Tensor

from superbatch.results.update import Update

from ..checks.check_schedule import CheckSchedule
from ..interrupts import DeferredInterrupts
from ..loss.records import WindowWeights
from ..memory.out_of_memory import out_of_memory
from ..modes import Modes
from ..sizes.reserve import raise_if_out_of_memory
from ..sizes.sizing import Sizing
from . import dropping, lockstep, misuse, retry, saving
from .config import Config
from .ending import Ending
from .failure_report import FailureReport
from .microbatches import MicrobatchList
from .participants.gradient_sum import LOW_PRECISION, GradientSum
from .participants.parameter_gradients import ParameterGradientSum
from .progress import Progress
from .transaction import Transaction, run_all
from .validation import BackwardWatch

T = TypeVar("T")


class OpenWindow(Generic[T]):
    """The micro-batches of one update; iterate over it inside a ``with`` block.

    `Accumulator.window` makes it. Leaving the block after the last micro-batch makes the update; leaving it
    earlier, by an exception or by ``break``, restores everything.

    Attributes:
        transaction: restores everything that the window may change.
        report: reports a failure of this rank to the others.
        resume: the saved state that the window resumes; None for a new window.
        is_open: True inside its ``with`` block; set by the engine.
        is_over: True after its ``with`` block; the window cannot be entered again.
        is_busy: True while the window begins or ends, which calls hooks, schedulers and participants.
    """

    def __init__(
        self,
        config: Config,
        gradients: GradientSum,
        microbatches: MicrobatchList,
        weights: WindowWeights,
        sizing: Sizing,
        *,
        resume: dict[str, Any] | None,
        watch: BackwardWatch | None,
        check_schedule: CheckSchedule | None,
        # Functions of the engine. `on_enter` opens this window. `on_resume` frees the saved state that the
        # engine has loaded. `closing_steps` returns the functions that close the window; its second argument
        # is True if the window has made an update.
        on_enter: Callable[[OpenWindow[Any]], None],
        on_resume: Callable[[], None],
        closing_steps: Callable[[OpenWindow[Any], bool], list[Callable[[], None]]],
    ) -> None:
        started = time.perf_counter()  # first, so that the window's seconds include what follows
        self._config, self.resume = config, resume
        self._on_enter, self._on_resume, self._closing_steps = on_enter, on_resume, closing_steps
        self.is_open = self.is_over = self._in_extra_turn = self.is_busy = False
        self._iterator: Generator[Any, None, None] | None = None
        self._in_grad = gradients if isinstance(gradients, ParameterGradientSum) else None
        self._progress = Progress(microbatches, weights, weights.new_losses())
        self.transaction = Transaction(config, gradients, self._progress, sizing, watch)
        self._ending = Ending(self.transaction, check_schedule, started)
        # None on one rank, where nobody waits for a report.
        self.report = FailureReport(config.sync, self._progress) if config.sync.shared else None
        self._noise = self.transaction.noise
        self._pooled = self.transaction.pooled
        if resume is not None:
            saving.check_state(self.transaction, resume)

    def __enter__(self) -> OpenWindow[T]:
        if self.is_open:
            raise misuse.second_window()
        try:
            with DeferredInterrupts():
                self.transaction.modes = Modes()
                self._on_enter(self)
                self.is_busy = True
                self._config.until_next.clear()  # free the last window's gradients for this window
                self.transaction.begin()
                if self.resume is not None:
                    self._on_resume()
                    self.transaction.load_state_dict(self.resume)
                self.is_busy = False
            return self
        except BaseException as error:
            self.abandon(error)
            raise

    @property
    def update(self) -> Update:
        """Record of the update, available after the block.

        After a block that was left before the last micro-batch, the record contains the reason why no update
        was made. If the update itself raised, there is no record.

        Raises:
            WindowError: there is no record.
        """
        if self._ending.update is None:
            raise misuse.no_update()
        return self._ending.update

    def amend(self, **fields: Any) -> Update:
        """Replace fields of the record after the window, and return it."""
        self._ending.update = replace(self.update, **fields)
        return self._ending.update

    def abandon(self, error: BaseException | None = None) -> None:
        """Close the window if it is open: finish the update if the optimizers have stepped, else restore all.

        Args:
            error: the exception that ended the window; None if there is none.
        """
        if self.is_open:
            with DeferredInterrupts():
                try:
                    self.is_busy = True
                    self.transaction.modes.recover(error)  # first: restoring needs the modes of the entry
                    if self._ending.is_final:
                        self._ending.complete()
                    else:
                        self._catch_up(error)
                        self._discard(error)
                finally:  # otherwise no other window could be opened
                    self._free()
        if self.report is not None:
            self.report.send(error, agreed=self._ending.is_agreed)

    def _catch_up(self, error: BaseException | None) -> None:
        """Take part in the remaining collectives of the window, if forward and backward are collective."""
        config, waiting = self._config, self.report is not None and self.report.is_possible
        if waiting and config.sync.has_collective_forwards and not config.whole:
            lockstep.catch_up(self.transaction, error)

    def __iter__(self) -> Iterator[T]:
        if not self.is_open:
            raise misuse.not_open()
        if self._iterator is not None:  # an earlier loop was left by `break`
            self._progress.current = None
            self._iterator.close()
        self._iterator = self._iterate()
        return self._iterator

    def end_iteration(self) -> None:
        """Close the iteration, so that it holds no micro-batch."""
        if self._iterator is not None and self._progress.current is not None:
            self._progress.current = None
            self._iterator.close()

    def backward(
        self, loss: Tensor | Mapping[str, Tensor], weight: Any = None, *, retain_graph: bool = False
    ) -> None:
        """Add the gradient of the current micro-batch's loss; nothing is updated before the window ends.

        Args:
            loss: a tensor of one element, reduced as `reduction` declares; or a mapping term -> loss.
            weight: weight of the micro-batch, for ``weight="returned"`` only; or a mapping term -> weight.
            retain_graph: keep the graph for another backward of this micro-batch; the losses add up.

        Raises:
            WindowError: there is no current micro-batch, or a second backward is not possible.
            InputError: `loss` has no graph or several elements, or `weight` is missing or not expected.
        """
        progress, config = self._progress, self._config
        index = progress.current
        if index is None:
            raise misuse.outside_of_loop()
        if progress.broken is not None:
            raise misuse.after_failure(progress.broken)
        if self._in_extra_turn:
            self._in_extra_turn = bool(self._with_backward([]))
            progress.extra_turns_done += 1
            return
        parts = progress.weights.scaled(index, loss, weight)
        skipping = config.nonfinite == "skip_microbatch"
        again, total = skipping and index in progress.losses, progress.losses.read(index, loss)
        progress.broken = index  # until the backward is complete: half a gradient may be in the sum
        if self._pooled is not None:
            self._pooled.watching = False
        run = self._with_backward(parts)
        for number, (part, factor) in enumerate(run, 1):
            self._add(index, part, factor, retain_graph=retain_graph or number < len(run))
        progress.arrived = True
        if self._pooled is not None:
            self._pooled.watching = True
        if self.transaction.watch is not None:
            self.transaction.watch.check()
        progress.losses.add(index, total)
        if skipping and progress.weights.contributes(index):
            dropping.keep_or_drop(self.transaction, index, again=again)
        progress.broken, progress.next = None, index + 1
        if config.transfer is not None:
            config.transfer.launched(progress.microbatches.microbatches, index)

    def _with_backward(self, parts: list[tuple[Tensor, float]]) -> list[tuple[Tensor, float]]:
        """Return the losses to run backward on, each with its factor.

        Losses of weight 0 are left out. On ranks with `Sync.has_collective_forwards`, this method runs a
        backward of zeros in their place.
        """
        if not self._config.sync.has_collective_forwards:
            return [each for each in parts if each[1]]  # a mean of weight 0 may be NaN, and 0 x NaN is NaN
        run = lockstep.with_backward(parts, self._config.sync)
        if self._in_grad is not None:
            self._in_grad.record()  # the backward of zeros may have reduced other ranks' gradients into .grad
        return run

    def _add(self, index: int, loss: Tensor, factor: float, *, retain_graph: bool) -> None:
        in_grad, norms_seen = self._in_grad, None if self._noise is None else self._noise.norms
        scale = self.transaction.scale
        scaled = loss if scale is None else scale.scaled(loss)
        if norms_seen is not None:
            norms_seen.before_backward()
        if in_grad is not None and loss.dtype in LOW_PRECISION and factor:
            in_grad.backward_rounded(scaled, factor, retain_graph=retain_graph)
        else:
            self.transaction.gradients.backward(scaled, factor, retain_graph=retain_graph)
        self._progress.arrived = True  # first, because the measurement below may run out of memory
        if norms_seen is not None:
            norms_seen.after_backward(index, factor if in_grad is None else in_grad.pending_factor)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            with DeferredInterrupts():  # no Ctrl-C in a state between that before and that after the update
                self._close(kind, error)
        except BaseException as raised:
            self.abandon(raised)  # an interrupt may come before signals are deferred
            raise
        if self.report is not None:
            self.report.send(error, agreed=self._ending.is_agreed)

    def _close(self, kind: type[BaseException] | None, error: BaseException | None) -> None:
        if not self.is_open:
            return
        try:
            self.is_busy = True
            if kind is None and self._progress.complete:
                self._config.before_step.savepoint()
                self.end_iteration()
                self._ending.finish()
                if self.report is not None:
                    self.report.suppress()
            else:
                self._catch_up(error)
                if error is not None and out_of_memory(error):
                    retry.shrink(self.transaction)
                self._discard(error)
                self._ending.leave_early()
        except BaseException as raised:
            self._recover(raised, block_ended=kind is None)
            raise
        finally:
            self._free()

    def _recover(self, raised: BaseException, *, block_ended: bool) -> None:
        """After an error at the end of the window, restore everything, or finish the update if it was made.

        Raises:
            OutOfMemoryError, OptimizerError: in place of `raised`, if the user's block had no error.
        """
        self.transaction.modes.recover(raised)
        if self._ending.is_final:
            self._ending.complete()
            return
        before = self._config.before_step
        # If an optimizer has stepped or may have written to tensors, the update is torn.
        as_before = not self._ending.has_stepped and before.rollback()
        if as_before:
            self._discard(raised)
        else:
            try:
                self._ending.abort()
            except BaseException:
                before.mark_torn()
                raise
        if block_ended:
            raise_if_out_of_memory(raised, torn=None if as_before else before.mark_torn)
            if not as_before:
                before.raise_torn(raised)

    def _free(self) -> None:
        """Free everything, so that the accumulator can open another window."""
        self.is_over, self.is_busy = True, False
        update = self._ending.update
        made = update is not None and update.skipped is None
        transfer = self._config.transfer
        if self.report is not None:
            self.report.keep_position()
        run_all(
            self._config.before_step.free,
            self._progress.microbatches.clear,
            *([] if transfer is None else [transfer.forget]),
            *self._closing_steps(self, made),
            self._ending.remaining_steps.clear,  # last, because `complete` may run them again until here
        )

    def _iterate(self) -> Generator[Any, None, None]:
        config, window, progress = self._config, self.transaction, self._progress
        microbatches, index = progress.microbatches, progress.next - 1
        measures, collective = window.sizing.measures, config.sync.has_collective_forwards
        progress.others_may_wait = True
        while (index := index + 1) < len(microbatches.microbatches):
            if collective:  # other ranks wait for this forward and backward, also if its weight is 0
                progress.turns += 1
                last = index == len(microbatches.microbatches) + microbatches.extra_turns - 1
                zero_weight = progress.weights.may_have_zero_weight(index)
                config.sync.begin_microbatch(last=last, zero_weight=zero_weight)
            elif progress.weights.is_known_zero(index):  # weight 0: skipped, so that it adds no NaN
                continue
            progress.current = index
            window.savepoint()
            if not measures and not config.sample_rng:  # entering contexts costs time
                yield microbatches.microbatches[index] if config.transfer is None else self._on_device(index)
            else:
                # No ExitStack: in Python 3.10 its frame keeps the micro-batch alive after an exception in the
                # user's loop, until the garbage collector runs.
                with window.sizing.measure(microbatches.count(index)), window.stream(index):
                    yield self._on_device(index)
            if progress.next <= index or progress.broken is not None:
                raise misuse.without_backward(index)
            progress.current = None
            if measures and microbatches.can_be_recut:
                self._recut(index + 1)
        if microbatches.extra_turns:
            yield from self._extra_turns()
        progress.others_may_wait = False

    def _extra_turns(self) -> Generator[Any, None, None]:
        """Yield micro-batch 0, or the stand-in, with weight 0, until all ranks have run the same number."""
        config, progress = self._config, self._progress
        written = config.state.new_keeper()  # restores the buffers that these extra forwards write to
        while (left := progress.microbatches.extra_turns - progress.extra_turns_done) > 0:
            progress.turns += 1
            config.sync.begin_microbatch(last=left == 1, zero_weight=True)
            progress.current, self._in_extra_turn = 0, True
            written.begin()
            with self._config.outside_window(), self.transaction.stream(0):
                yield self._on_device(0)
            written.restore()
            if self._in_extra_turn:
                raise misuse.without_backward(0)
            progress.current = None

    def _on_device(self, index: int) -> Any:
        """Return a micro-batch, moved to the model's device if a `Transfer` is configured."""
        transfer, microbatches = self._config.transfer, self._progress.microbatches.runs
        return microbatches[index] if transfer is None else transfer.take(microbatches, index)

    def _recut(self, index: int) -> None:
        """Split the remaining samples again if measurements suggest another micro-batch size."""
        microbatches = self._progress.microbatches
        assert microbatches.samples is not None, "samples that can be split can be counted"
        sizes = self.transaction.sizing.sizes_of_rest(sum(microbatches.samples[index:]))
        if sizes is not None:
            microbatches.recut(index, sizes)
            self._progress.weigh_again()  # each new micro-batch needs a weight of its own

    def _discard(self, error: BaseException | None) -> None:
        """Restore the state before the window."""
        try:
            self.end_iteration()
        finally:
            self.transaction.modes.recover(error)
            self.transaction.restore()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the open window for `Accumulator.state_dict` (see `saving`).

        Raises:
            WindowError: a micro-batch is between its forward and its backward, or the window is ending.
        """
        if self.is_busy:
            raise misuse.while_busy("state_dict()")
        return saving.state_of(self.transaction)
