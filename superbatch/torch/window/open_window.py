"""An open window: a loop over micro-batches, a backward for each, and the update at the end of the block."""

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
from . import dropping, lockstep, misuse, retry, saving, telling
from .config import Config
from .ending import Ending
from .microbatches import MicrobatchList
from .participants.gradient_sum import LOW_PRECISION, GradientSum
from .participants.parameter_gradients import ParameterGradientSum
from .progress import Progress
from .transaction import Transaction, take_each
from .validation import BackwardWatch

T = TypeVar("T")


class OpenWindow(Generic[T]):
    """The micro-batches of one update; iterate over it inside a ``with`` block.

    `Accumulator.window` makes it. Leaving the block after the last micro-batch makes the update; leaving it
    earlier, by an exception or by ``break``, restores everything.

    Attributes:
        transaction: restores everything that the window may change.
        resume: the saved state that the window resumes; None for a new window.
        is_open: True while its block is entered; set by the engine.
        is_over: True once its block was left; the window cannot be entered again.
        is_busy: True while the window begins or ends, which calls hooks, schedulers and participants.
    """

    def __init__(
        self,
        config: Config,
        gradients: GradientSum,
        pieces: MicrobatchList,
        weights: WindowWeights,
        sizing: Sizing,
        *,
        resume: dict[str, Any] | None,
        watch: BackwardWatch | None,
        looks: CheckSchedule | None,
        entered: Callable[[OpenWindow[Any]], None],
        resumed: Callable[[], None],
        leaving: Callable[[OpenWindow[Any], bool], list[Callable[[], None]]],
    ) -> None:
        started = time.perf_counter()  # first, so that the window's seconds include what follows
        self._config, self.resume = config, resume
        self._entered, self._resumed, self._leaving = entered, resumed, leaving
        self.is_open = self.is_over = self._is_idle = self.is_busy = False
        self._iterator: Generator[Any, None, None] | None = None
        self._in_grad = gradients if isinstance(gradients, ParameterGradientSum) else None
        self._progress = Progress(pieces, weights, weights.new_losses())
        self.transaction = Transaction(config, gradients, self._progress, sizing, watch)
        self._ending = Ending(self.transaction, looks, started)
        # None once no other rank waits for this one.
        self._others = config.sync if config.sync.shared else None
        self._place: tuple[str, str] | None = None  # position at the end, for the errors of other ranks
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
                self._entered(self)
                self.is_busy = True
                self._config.until_next.clear()  # free the last window's gradients for this window
                self.transaction.begin()
                if self.resume is not None:
                    self._resumed()
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
            error: the exception that is the reason; None: another reason.
        """
        if self.is_open:
            with DeferredInterrupts():
                try:
                    self.is_busy = True
                    self.transaction.modes.recover(error)  # first: restoring needs the modes of the entry
                    if self._ending.passed:
                        self._ending.complete()
                    else:
                        self._catch_up(error)
                        self._discard(error)
                finally:  # otherwise no other window could be opened
                    self._forget()
        if self._others is not None:
            self._tell(error)

    def leave_others(self) -> None:
        """Send no message to the other ranks: they are in an exchange where it would not reach them."""
        self._others = None

    def _tell(self, error: BaseException | None) -> None:
        """Inform the other ranks that this one leaves the window, unless they know already."""
        sync, self._others = self._others, None
        failed, left = self._place or telling.place_of(self._progress)
        if sync is not None and (telling.is_transport(error) or not self._ending.is_agreed):
            telling.tell(sync, error, left if error is None else failed)

    def _catch_up(self, error: BaseException | None) -> None:
        """Take part in the collectives that other ranks wait for, if forward and backward are collective."""
        config = self._config
        if self._others is not None and config.sync.in_step and not config.whole:
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
        if self._is_idle:
            self._is_idle = bool(self._with_backward([]))
            progress.idle_done += 1
            return
        parts = progress.weights.scaled(index, loss, weight)
        skipping = config.nonfinite == "skip_microbatch"
        again, total = skipping and index in progress.losses, progress.losses.read(index, loss)
        progress.broken = index  # until the backward is complete
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
        if skipping and progress.weights.adds(index):
            dropping.keep_or_drop(self.transaction, index, again=again)
        progress.broken, progress.next = None, index + 1
        if config.transfer is not None:
            config.transfer.launched(progress.microbatches.microbatches, index)

    def _with_backward(self, parts: list[tuple[Tensor, float]]) -> list[tuple[Tensor, float]]:
        """Return the losses to run backward on, each with its factor.

        Losses of weight 0 are left out. If a backward is collective (`Sync.in_step`), a backward of zeros is
        run in their place.
        """
        if not self._config.sync.in_step:
            return [each for each in parts if each[1]]  # a mean of weight 0 may be NaN, and 0 x NaN is NaN
        run = lockstep.with_backward(parts, self._config.sync)
        if self._in_grad is not None:
            self._in_grad.took()  # the backward of zeros may have reduced other ranks' gradients into .grad
        return run

    def _add(self, index: int, loss: Tensor, factor: float, *, retain_graph: bool) -> None:
        in_grad, seen = self._in_grad, None if self._noise is None else self._noise.seen
        scale = self.transaction.scale
        scaled = loss if scale is None else scale.scaled(loss)
        if seen is not None:
            seen.before_backward()
        if in_grad is not None and loss.dtype in LOW_PRECISION and factor:
            in_grad.backward_rounded(scaled, factor, retain_graph=retain_graph)
        else:
            self.transaction.gradients.backward(scaled, factor, retain_graph=retain_graph)
        self._progress.arrived = True  # first, because what follows may run out of memory
        if seen is not None:
            seen.after_backward(index, factor if in_grad is None else in_grad.yet)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            with DeferredInterrupts():  # until everything is as before the window or as after the update
                self._close(kind, error)
        except BaseException as raised:
            self.abandon(raised)  # an interrupt may come before signals are deferred
            raise
        if self._others is not None:
            self._tell(error)

    def _close(self, kind: type[BaseException] | None, error: BaseException | None) -> None:
        if not self.is_open:
            return
        try:
            self.is_busy = True
            if kind is None and self._progress.complete:
                self._config.before_step.note()
                self.end_iteration()
                self._ending.finish()
                self._others = None
            else:
                self._catch_up(error)
                if error is not None and out_of_memory(error):
                    retry.shrink(self.transaction)
                self._discard(error)
                self._ending.leave_early()
        except BaseException as raised:
            self._settle(raised, left=kind is None)
            raise
        finally:
            self._forget()

    def _settle(self, raised: BaseException, *, left: bool) -> None:
        """Restore everything after an error, or finish the update if the optimizers have stepped.

        Args:
            raised: the error.
            left: whether the block ended without an error.

        Raises:
            OutOfMemoryError, OptimizerError: in place of the error, with an explanation.
        """
        self.transaction.modes.recover(raised)
        if self._ending.passed:
            self._ending.complete()
            return
        before = self._config.before_step
        as_before = not self._ending.has_stepped and before.put_back()
        if as_before:
            self._discard(raised)
        else:
            try:
                self._ending.abort()
            except BaseException:
                before.tear()
                raise
        if left:
            raise_if_out_of_memory(raised, torn=None if as_before else before.tear)
            if not as_before:
                before.raise_torn(raised)

    def _forget(self) -> None:
        """Free everything, so that the accumulator can open another window."""
        self.is_over, self.is_busy = True, False
        update = self._ending.update
        made = update is not None and update.skipped is None
        transfer = self._config.transfer
        if self._others is not None:
            self._place = telling.place_of(self._progress)  # before the micro-batches are freed
        take_each(
            self._config.before_step.forget,
            self._progress.microbatches.clear,
            *([] if transfer is None else [transfer.forget]),
            *self._leaving(self, made),
            self._ending.rest.clear,  # last, because `complete` may run them again until here
        )

    def _iterate(self) -> Generator[Any, None, None]:
        config, window, progress = self._config, self.transaction, self._progress
        pieces, index = progress.microbatches, progress.next - 1
        measures, in_step = window.sizing.measures, config.sync.in_step
        progress.in_turns = True
        while (index := index + 1) < len(pieces.microbatches):
            if in_step:  # other ranks wait for this forward and backward, also if its weight is 0
                progress.turns += 1
                last = index == len(pieces.microbatches) + pieces.idle - 1
                config.sync.turn(last=last, idle=progress.weights.may_be_idle(index))
            elif progress.weights.has_none(index):  # weight 0: skipped, so that it adds no NaN
                continue
            progress.current = index
            window.savepoint()
            if not measures and not config.sample_rng:  # entering contexts costs time
                yield pieces.microbatches[index] if config.transfer is None else self._taken(index)
            else:
                # No ExitStack: in Python 3.10 its frame keeps the micro-batch alive after an exception in the
                # user's loop, until the garbage collector runs.
                with window.sizing.measure(pieces.count(index)), window.stream(index):
                    yield self._taken(index)
            if progress.next <= index or progress.broken is not None:
                raise misuse.without_backward(index)
            progress.current = None
            if measures and pieces.can_be_recut:
                self._recut(index + 1)
        if pieces.idle:
            yield from self._idle_turns()
        progress.in_turns = False

    def _idle_turns(self) -> Generator[Any, None, None]:
        """Yield micro-batch 0, or its stand-in, with weight 0, until all ranks have run the same number."""
        config, progress = self._config, self._progress
        moved = config.state.twin()  # undoes the buffer writes of these extra forwards
        while (left := progress.microbatches.idle - progress.idle_done) > 0:
            progress.turns += 1
            config.sync.turn(last=left == 1, idle=True)
            progress.current, self._is_idle = 0, True
            moved.begin()
            with self._config.aside(), self.transaction.stream(0):
                yield self._taken(0)
            moved.restore()
            if self._is_idle:
                raise misuse.without_backward(0)
            progress.current = None

    def _taken(self, index: int) -> Any:
        """Return a micro-batch on the model's device."""
        transfer, microbatches = self._config.transfer, self._progress.microbatches.runs
        return microbatches[index] if transfer is None else transfer.take(microbatches, index)

    def _recut(self, index: int) -> None:
        """Split the remaining samples again if measurements suggest another micro-batch size."""
        pieces = self._progress.microbatches
        assert pieces.samples is not None, "samples that can be split can be counted"
        sizes = self.transaction.sizing.rest(sum(pieces.samples[index:]))
        if sizes is not None:
            pieces.recut(index, sizes)
            self._progress.weigh_again()

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
