"""A window: iterate over its micro-batches, call backward for each, and leave the block for the update."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from types import TracebackType
from typing import Any

from torch import Tensor

from superbatch.errors import NonFiniteError
from superbatch.results.update import Update

from ..checks.check_schedule import CheckSchedule
from ..loss.losses import Sum, WindowLoss, over_ranks
from ..loss.terms import losses_in, weights_in
from ..memory.out_of_memory import out_of_memory
from ..sizes.reserve import raise_if_out_of_memory
from ..sizes.sizing import Sizing
from . import culprit, dropping, misuse, retry, saving, update_rule
from .config import Config
from .interrupts import DeferredInterrupts
from .microbatches import MicrobatchList, Shown
from .nonfinite import Culprit
from .participants.gradient_sum import LOW_PRECISION, GradientSum, clear
from .participants.momentum_gradients import MomentumGradientSum
from .participants.noise.windows import Summed
from .participants.parameter_gradients import ParameterGradientSum
from .progress import Progress
from .transaction import Transaction, restore_each
from .validation import BackwardWatch


class OpenWindow:
    """The micro-batches of one update, to be iterated over inside a ``with`` block.

    `Accumulator.window` makes it. Leaving the block after the last micro-batch makes the update; leaving it
    earlier, by an exception or by ``break``, restores everything.

    Attributes:
        update: the record of the update, once the block is left.
        transaction: everything that the window may change.
    """

    def __init__(
        self,
        config: Config,
        gradients: GradientSum,
        pieces: MicrobatchList,
        sizing: Sizing,
        *,
        resume: dict[str, Any] | None,
        watch: BackwardWatch | None,
        looks: CheckSchedule | None,
        entered: Callable[[OpenWindow], None],
        left: Callable[[Update | None], None],
    ) -> None:
        self._started = time.perf_counter()
        self._config, self._resume, self._looks = config, resume, looks
        self._entered, self._left = entered, left
        self._stepped = self._is_open = False
        self._iterator: Generator[Any, None, None] | None = None
        self._in_grad = gradients if isinstance(gradients, ParameterGradientSum) else None
        self.update: Update | None = None
        if resume is not None and resume["samples"] is not None:
            pieces.follow(resume["samples"])
        self._progress = Progress(
            pieces, weights_in(config, pieces.microbatches, pieces.samples), losses_in(config)
        )
        self.transaction = Transaction(config, gradients, self._progress, sizing, watch)
        self._noise = self.transaction.noise
        self._pooled = self.transaction.pooled
        if resume is not None:
            saving.check_state(self.transaction, resume)

    def __enter__(self) -> OpenWindow:
        if self.update is not None:
            raise misuse.over()
        try:
            with DeferredInterrupts():
                self._entered(self)
                self._is_open = True
                self._config.until_next.clear()
                self.transaction.begin()
                if self._resume is not None:
                    self.transaction.load_state_dict(self._resume)
            return self
        except BaseException:
            self.abandon()
            raise

    def abandon(self) -> None:
        """Restore everything if the window is open: its block was not entered, or its end not reached."""
        if self._is_open:
            with DeferredInterrupts():
                try:
                    self._discard()
                finally:  # or no other window could ever be opened
                    self._forget()

    def require_resume(self, state: dict[str, Any] | None) -> None:
        """Check that the saved state that this window resumes is still waiting."""
        if self._resume is not state:
            raise misuse.gone_on_from()

    def __iter__(self) -> Iterator[Any]:
        if not self._is_open:
            raise misuse.not_open()
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
            loss: what the accumulator's `reduction` states, one element; or a mapping from names of terms.
            weight: of the micro-batch, for ``weight="returned"`` only; or a mapping from names of such terms.
            retain_graph: keep the graph for another backward of this micro-batch; their losses add up.

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
        parts = progress.weights.scaled(index, loss, weight)
        skipping = config.nonfinite == "skip_microbatch"
        again, total = skipping and index in progress.losses, progress.losses.read(index, loss)
        progress.broken = index
        if self._pooled is not None:
            self._pooled.watching = False
        for number, (part, factor) in enumerate(parts, 1):
            if factor:  # a mean without weight may be NaN, and 0 x NaN is NaN
                self._add(index, part, factor, retain_graph=retain_graph or number < len(parts))
        progress.arrived = True
        if self._pooled is not None:
            self._pooled.watching = True
        if self.transaction.watch is not None:
            self.transaction.watch.check()
        progress.losses.add(index, total)
        if skipping and progress.weights.adds(index):
            dropping.keep_or_drop(self.transaction, index, again=again)
        progress.broken, progress.next = None, index + 1
        if config.device is not None:
            config.transfer.launched(progress.microbatches.microbatches, index)

    def _add(self, index: int, loss: Tensor, factor: float, *, retain_graph: bool) -> None:
        in_grad, seen = self._in_grad, None if self._noise is None else self._noise.seen
        scale = self.transaction.scale
        scaled = loss if scale.value is None else scale.scaled(loss)
        if seen is not None:
            seen.before_backward()
        if in_grad is not None and loss.dtype in LOW_PRECISION:
            in_grad.backward_rounded(scaled, factor, retain_graph=retain_graph)
        else:
            self.transaction.gradients.backward(scaled, factor, retain_graph=retain_graph)
        self._progress.arrived = True  # before anything else: what follows may fail for lack of memory
        if seen is not None:
            seen.after_backward(index, factor if in_grad is None else in_grad.yet)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            with DeferredInterrupts():  # until all is as before, or as after the update
                self._close(kind, error)
        except BaseException:
            self.abandon()  # interrupted before anything was deferred
            raise

    def _close(self, kind: type[BaseException] | None, error: BaseException | None) -> None:
        if not self._is_open:
            return
        try:
            self._config.before_step.note()
            if kind is None and self._progress.complete:
                self.end_iteration()
                self._finish()
            else:
                if error is not None and out_of_memory(error):
                    retry.shrink(self.transaction)
                self._leave_early()
        except BaseException as raised:
            self._settle(raised, left=kind is None)
            raise
        finally:
            self._forget()

    def _settle(self, raised: BaseException, *, left: bool) -> None:
        """Restore everything after an error, or finish the update where parameters have moved.

        Args:
            raised: the error.
            left: whether the block had ended without an error.

        Raises:
            OutOfMemoryError, OptimizerError: the error, explained.
        """
        before = self._config.before_step
        as_before = not self._stepped and before.put_back()
        if as_before:
            self._discard()
        else:  # what raised came inside the step, or after the update, which stands
            transaction = self.transaction
            restore_each(partial(clear, self._config.owned), transaction.scale.restore, transaction.commit)
        if left and not self._stepped:
            raise_if_out_of_memory(raised, torn=None if as_before else before.tear)
            if not as_before:
                before.raise_torn(raised)

    def _forget(self) -> None:
        """Let go of everything, and let the accumulator open another window."""
        made = self.update is not None and self.update.made
        self._is_open = False
        try:
            self._config.before_step.forget()
            self._progress.microbatches.clear()
            self._config.transfer.forget()
            self.transaction.sizing.closed(made=made)
        finally:
            self._left(self.update)

    def _iterate(self) -> Generator[Any, None, None]:
        config, window, progress = self._config, self.transaction, self._progress
        pieces, index = progress.microbatches, progress.next - 1
        measures = window.sizing.measures
        while (index := index + 1) < len(pieces.microbatches):
            if progress.weights.has_none(index) and not config.sync.in_step:  # it adds nothing, no NaN either
                continue
            progress.current = index
            window.savepoint()
            if not measures and not config.sample_rng:  # no context: it costs time
                yield config.transfer.take(pieces.microbatches, index)
            else:
                # Two contexts and no ExitStack: in Python 3.10 its frame would keep the micro-batch alive
                # after an exception in the user's loop, until the garbage collector comes.
                with window.sizing.measure(pieces.count(index)), window.stream(index):
                    yield config.transfer.take(pieces.microbatches, index)
            if index not in progress.losses or progress.broken is not None:
                raise misuse.without_backward(index)
            progress.current = None
            if measures and pieces.can_be_recut:
                self._recut(index + 1)

    def _recut(self, index: int) -> None:
        """Cut what is left otherwise, if the micro-batches so far have shown that this is better."""
        pieces = self._progress.microbatches
        assert pieces.samples is not None, "what can be cut can be counted"
        sizes = self.transaction.sizing.rest(sum(pieces.samples[index:]))
        if sizes is not None:
            pieces.recut(index, sizes)
            self._progress.weigh_again()

    # -- the boundary --------------------------------------------------------------------------------------

    def _finish(self) -> None:
        config, window, progress = self._config, self.transaction, self._progress
        place, step = window.gradients, config.rule
        rates = update_rule.learning_rates(step)
        losses = progress.losses.on_host(len(progress.microbatches))
        weights, dropped = progress.weights, progress.dropped
        bad, sums = weights.not_finite(losses, dropped), weights.sums(losses, dropped)
        took_part = partial(weights.took_part, dropped)
        shown = Shown(progress.microbatches, weights.each(losses), weights.counted(dropped), took_part)
        news = (False, 0) if self._looks is None else self._looks.news(shown)
        mark = 0 if self._noise is None else self._noise.mark()
        sums, bad_ranks, look = over_ranks(sums, config.sync, bad=bool(bad), mark=mark, news=news)
        if bad_ranks:
            self._refuse(sums, rates, culprit.by_loss(window, losses, bad))
            return
        found = weights.result(sums)
        if not found.weight:
            self._discard()
            self._record(found, rates, skipped="no weight: every micro-batch was left out or has weight 0")
            return
        if look:
            self._look_again(shown)
        window.scale.require()
        gradients = update_rule.ready(step, place, config.sync, config.owned, found.divisor)
        if isinstance(place, MomentumGradientSum):
            gradients, norm = place.sums(), None
            finite = config.sync.norm(gradients)[1]
        else:
            norm, finite = config.sync.norm(gradients)
        if not finite and not step.scaling:
            self._refuse(sums, rates, culprit.by_gradient(window, losses, gradients))
            return
        if finite:
            if norm is not None:
                if self._noise is not None:
                    self._noise.measure(gradients, norm, self._summed(sums[0].weight, found.divisor))
                update_rule.clip(step, gradients, norm)
            config.prepare_update()
            if reason := update_rule.update(step, place, config.owned, gradients, config.before_step):
                self._discard()
                self._record(found, rates, norm=norm, skipped=reason)
                return
            self._stepped = True
            self._record(found, rates, norm=norm)
            update_rule.advance(step, found.loss)
            update_rule.zero_grad(config.owned, config.until_next)
        else:
            config.prepare_commit()
            reason = update_rule.overflow(step, config.owned)
            self._record(found, rates, norm=norm, skipped=reason)
        window.commit()

    def _summed(self, weight: Any, divisor: float) -> Summed:
        """Return how the gradients of this window were summed, for the noise."""
        progress, config = self._progress, self._config
        weights, dropped = progress.weights, progress.dropped
        counted, took_part = weights.counted(dropped), len(weights.took_part(dropped))
        samples, scale = progress.microbatches.samples, self.transaction.scale.value
        return Summed(weight, divisor, counted, took_part, samples, scale, config.sync)

    def _look_again(self, shown: Shown) -> None:
        """Check the loss on this window, with what watches its micro-batches off."""
        assert self._looks is not None
        if self._pooled is not None:
            self._pooled.watching = False
        unchanged = self._progress.written(0, len(self._progress.microbatches) - 1) is None
        with nullcontext() if self._noise is None else self._noise.lifted():
            self._looks.look(shown, unchanged=unchanged)

    def _refuse(self, sums: list[Sum], rates: tuple[float, ...], culprit: Culprit) -> None:
        skipping = self._config.nonfinite == "skip_update"
        text = culprit.text(len(self._progress.microbatches), skipping=skipping)
        self._discard()
        if not skipping:
            raise NonFiniteError(text)
        self._record(self._progress.weights.result(sums), rates, skipped=f"not finite: {text}")

    def _leave_early(self) -> None:
        reason = (
            f"left after {len(self._progress.losses)} of {len(self._progress.microbatches)} micro-batches"
        )
        self._discard()
        self._record(WindowLoss(math.nan, 0), update_rule.learning_rates(self._config.rule), skipped=reason)

    def _record(
        self,
        found: WindowLoss,
        rates: tuple[float, ...],
        *,
        norm: float | None = None,
        skipped: str | None = None,
    ) -> None:
        pieces = self._progress.microbatches
        self.update = Update(
            loss=found.loss,
            grad_norm=norm,
            weight=found.weight,
            samples=None if pieces.samples is None else sum(pieces.samples),
            microbatches=len(pieces.microbatches),
            learning_rates=rates,
            skipped=skipped,
            dropped=tuple(self._progress.dropped),
            failures=self._progress.failures,
            seconds=time.perf_counter() - self._started,
            losses=found.losses,
            weights=found.weights,
        )

    def _discard(self) -> None:
        """Restore everything as it was before the window."""
        try:
            self.end_iteration()
        finally:
            self.transaction.restore()

    def state_dict(self) -> dict[str, Any]:
        """Return what `Accumulator.state_dict` stores of an open window (see `saving`)."""
        return saving.state_of(self.transaction)
