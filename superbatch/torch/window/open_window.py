"""A window in flight: from the first micro-batch to the update, or back to where it began."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from superbatch.errors import NonFiniteError
from superbatch.results.update import Update

from ..checks.check_schedule import CheckSchedule
from ..loss.losses import Sum, WindowLoss, over_ranks
from ..loss.terms import losses_in, weights_in
from ..memory.out_of_memory import out_of_memory
from ..rng.sample_rng import sample_stream
from ..sizes.reserve import raise_if_out_of_memory
from ..sizes.sizing import Sizing
from . import culprit, dropping, misuse, retry, saving, update_rule
from .config import Plan
from .microbatches import Pieces, Shown
from .nonfinite import Culprit
from .participants.batchnorm import Pooled
from .participants.gradient_sum import LOW_PRECISION, Gradients, clear
from .participants.momentum_gradients import InMomentum
from .participants.noise.hooks import SeenGradients
from .participants.noise.windows import mark_of
from .participants.parameter_gradients import InGrad
from .validation import BackwardWatch


class WindowInFlight:
    """The micro-batches of one update, to be iterated over inside a ``with`` block.

    It is made by `Accumulator.window`; see there for its use. Leaving the block after the last
    micro-batch makes the update; leaving it earlier, by an exception or by ``break``, puts everything back.

    Attributes:
        update: the record of the update, once the block is left.
    """

    def __init__(
        self,
        plan: Plan,
        place: Gradients,
        pieces: Pieces,
        sizing: Sizing,
        *,
        resume: dict[str, Any] | None,
        watch: BackwardWatch | None,
        looks: CheckSchedule | None,
        entered: Callable[[WindowInFlight], None],
        left: Callable[[Update | None], None],
    ) -> None:
        self._started = time.perf_counter()
        self._plan = plan
        self._place = place
        self._pieces = pieces
        self._sizing = sizing
        self._failures = 0
        self._resume = resume
        self._watch = watch
        self._looks = looks
        self._scaler = plan.step.scaler
        self._in_grad = place if isinstance(place, InGrad) else None
        self._noise: SeenGradients | None = None
        self._pooled = plan.norms if isinstance(plan.norms, Pooled) else None
        self._entered, self._left = entered, left
        if resume is not None:
            saving.cut_as_saved(pieces, resume)
        self._weights = weights_in(plan, pieces.microbatches, pieces.samples)
        self._losses = losses_in(plan)
        self._dropped: list[int] = []
        self._next = 0  # where the iteration starts: behind 0 after a restart
        self._current: int | None = None
        self._summed = False  # whether a backward of the current micro-batch has come to its end
        self._stepped = False
        self._is_open = False
        self._broken: int | None = None  # the micro-batch whose backward raised
        self._iterator: Generator[Any, None, None] | None = None
        self._inputs: dict[int, list[int]] = {}  # for both see `recovery.mark`
        self._state_before: Any = None
        self._calls: dict[int, Any] = {}  # what random draws of all micro-batches are checked against
        self._context = ExitStack()
        self.update: Update | None = None
        if resume is not None:
            saving.check_state(self, resume)

    def __enter__(self) -> WindowInFlight:
        plan = self._plan
        if self.update is not None:
            raise misuse.over()
        self._entered(self)
        self._is_open = True
        try:
            plan.random.take()
            plan.state.take()
            self._open()
        except BaseException:
            try:
                self._discard()
            finally:  # or no other window could ever be opened
                self._left(None)
            raise
        return self

    def require_resume(self, state: dict[str, Any] | None) -> None:
        """Check that the state this window was made to go on from is still waiting to be gone on from."""
        if self._resume is not state:
            raise misuse.gone_on_from()

    def _open(self) -> None:
        plan = self._plan
        self._key = 0
        if plan.sample_rng:
            # Shared by all ranks, so that a sample's stream depends on its place in the batch alone.
            self._key = plan.ranks.first(int(torch.randint(1 << 52, ())))
            self._first_sample = plan.ranks.before(sum(self._pieces.samples or ()))
            self._after_key = torch.get_rng_state()
        if plan.norms is not None:
            plan.norms.open()
        self._scale = update_rule.start_scaling(plan.step, plan.owned[0].parameter.device)
        self._context = plan.ranks.no_sync()
        plan.until_next.clear()
        self._place.open()
        if plan.noise is not None:
            plan.noise.open(self)
        if self._resume is not None:
            saving.load_state(self, self._resume)

    def __iter__(self) -> Iterator[Any]:
        if not self._is_open:
            raise misuse.not_open()
        self._iterator = self._iterate()
        return self._iterator

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
        index, plan = self._current, self._plan
        if index is None:
            raise misuse.outside_of_loop()
        if self._broken is not None:
            raise misuse.after_failure(self._broken)
        parts = self._weights.scaled(index, loss, weight)
        skipping = plan.nonfinite == "skip_microbatch"
        again, total = skipping and index in self._losses, self._losses.read(index, loss)
        self._broken = index
        if self._pooled is not None:
            self._pooled.watching = False
        for number, (part, factor) in enumerate(parts, 1):
            if factor:  # a mean without weight may be NaN, and 0 x NaN is NaN
                self._add(index, part, factor, retain_graph=retain_graph or number < len(parts))
        self._summed = True
        if self._pooled is not None:
            self._pooled.watching = True
        if self._watch is not None:
            self._watch.check()
        self._losses.add(index, total)
        if skipping and self._weights.adds(index):
            dropping.keep_or_drop(self, index, again=again)
        self._broken, self._next = None, index + 1
        if plan.device is not None:
            plan.transfer.launched(self._pieces.microbatches, index)

    def _add(self, index: int, loss: Tensor, factor: float, *, retain_graph: bool) -> None:
        in_grad = self._in_grad
        scaled = loss if self._scaler is None else self._scaler.scale(loss)
        if self._noise is not None:
            self._noise.before_backward()
        if in_grad is not None and loss.dtype in LOW_PRECISION:
            in_grad.backward_rounded(scaled, factor, retain_graph=retain_graph)
        else:
            self._place.backward(scaled, factor, retain_graph=retain_graph)
        self._summed = True  # before anything else: what follows may fail for lack of memory
        if self._noise is not None:
            self._noise.after_backward(index, factor if in_grad is None else in_grad.yet)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        before = self._plan.before_step
        try:
            before.note()
            if kind is None and self._complete():
                self._end_iteration()
                self._finish()
            else:
                if error is not None and out_of_memory(error):
                    retry.shrink(self)
                self._leave_early()
        except BaseException as raised:
            as_before = not self._stepped and before.put_back()
            if as_before:
                self._discard()
            else:  # parameters have moved: what raised came after the update, which stands
                clear(self._plan.owned)
                update_rule.forget_scaling(self._plan.step)
                self._close()
            if kind is None and not self._stepped:
                raise_if_out_of_memory(raised, torn=None if as_before else before.tear)
            raise
        finally:
            before.forget()
            self._pieces.clear()
            self._plan.transfer.forget()
            self._is_open = False
            self._sizing.closed(made=self.update is not None and self.update.made)
            self._left(self.update)

    def _iterate(self) -> Generator[Any, None, None]:
        plan, index = self._plan, self._next - 1
        while (index := index + 1) < len(self._pieces):
            if self._weights.has_none(index) and not plan.ranks.in_step:  # it adds nothing, no NaN either
                continue
            self._current, self._summed = index, False
            retry.mark(self, index)
            if self._pooled is not None:
                self._pooled.start_microbatch()
            measured = self._sizing.measure(self._pieces.count(index))
            if measured is None and not plan.sample_rng:  # no context: it costs time
                yield plan.transfer.take(self._pieces.microbatches, index)
            else:
                # Two contexts and no ExitStack: in Python 3.10 its frame would keep the micro-batch alive
                # after an exception in the user's loop, until the garbage collector comes.
                with measured or nullcontext(), self._stream(index):
                    yield plan.transfer.take(self._pieces.microbatches, index)
            if index not in self._losses or self._broken is not None:
                raise misuse.without_backward(index)
            self._current = None
            if self._pieces.can_be_recut:
                self._recut(index + 1)

    def _recut(self, index: int) -> None:
        """Cut what is left otherwise, if the micro-batches so far have shown that this is better."""
        samples = self._pieces.samples
        assert samples is not None, "what can be cut can be counted"
        sizes = self._sizing.rest(sum(samples[index:]))
        if sizes is not None:
            self._pieces.recut(index, sizes)
            self._weights.weigh_again(self._pieces.microbatches, self._pieces.samples)

    def _complete(self) -> bool:
        """Whether every micro-batch that counts has had its backward."""
        if self._broken is not None:
            return False
        count = len(self._pieces)
        done = (index in self._losses or self._weights.has_none(index) for index in range(count))
        return len(self._losses) == count or all(done)

    def _end_iteration(self) -> None:
        if self._iterator is not None and self._current is not None:
            self._current = None
            self._iterator.close()

    def _stream(self, index: int) -> AbstractContextManager[None]:
        """The random streams of a micro-batch's samples."""
        if not self._plan.sample_rng:
            return nullcontext()
        places = self._pieces.places(index, self._first_sample)
        return sample_stream(self._key, indices=places, calls=self._calls)

    # -- the boundary --------------------------------------------------------------------------------------

    def _finish(self) -> None:
        plan, place, step = self._plan, self._place, self._plan.step
        rates = update_rule.learning_rates(step)
        losses = self._losses.on_host(len(self._pieces))
        weights, dropped = self._weights, self._dropped
        bad, sums = weights.not_finite(losses, dropped), weights.sums(losses, dropped)
        took_part = partial(weights.took_part, dropped)
        shown = Shown(self._pieces, weights.each(losses), weights.counted(dropped), took_part)
        news = (False, 0) if self._looks is None else self._looks.news(shown)
        sums, bad_ranks, look = over_ranks(sums, plan.ranks, bad=bool(bad), mark=mark_of(self), news=news)
        if bad_ranks:
            self._refuse(sums, rates, culprit.by_loss(self, losses, bad))
            return
        found = weights.result(sums)
        if not found.weight:
            self._discard()
            self._record(found, rates, skipped="no weight: every micro-batch was left out or has weight 0")
            return
        if look:
            self._look_again(shown)
        update_rule.require_scale(step, self._scale)
        gradients = update_rule.ready(step, place, plan.ranks, plan.owned, found.divisor)
        if isinstance(place, InMomentum):
            gradients, norm = place.sums(), None
            finite = plan.ranks.norm(gradients)[1]
        else:
            norm, finite = plan.ranks.norm(gradients)
        if not finite and not step.scaling:
            self._refuse(sums, rates, culprit.by_gradient(self, losses, gradients))
            return
        if finite:
            if norm is not None:
                if plan.noise is not None:
                    plan.noise.measure(self, gradients, norm, sums[0].weight, found.divisor)
                update_rule.clip(step, gradients, norm)
            plan.prepare_update()
            if reason := update_rule.update(step, place, plan.owned, gradients, plan.before_step):
                self._discard()
                self._record(found, rates, norm=norm, skipped=reason)
                return
            self._stepped = True
            self._record(found, rates, norm=norm)
            update_rule.advance(step, found.loss)
            update_rule.zero_grad(plan.owned, plan.until_next)
        else:
            reason = update_rule.overflow(step, plan.owned)
            self._record(found, rates, norm=norm, skipped=reason)
        self._close()

    def _look_again(self, shown: Shown) -> None:
        """Check the loss on this window, with what watches its micro-batches off."""
        assert self._looks is not None
        if self._pooled is not None:
            self._pooled.watching = False
        with nullcontext() if self._noise is None else self._noise.lifted():
            self._looks.look(shown, unchanged=retry.unchanged(self))

    def _refuse(self, sums: list[Sum], rates: tuple[float, ...], culprit: Culprit) -> None:
        skipping = self._plan.nonfinite == "skip_update"
        text = culprit.text(len(self._pieces), skipping=skipping)
        self._discard()
        if not skipping:
            raise NonFiniteError(text)
        self._record(self._weights.result(sums), rates, skipped=f"not finite: {text}")

    def _leave_early(self) -> None:
        reason = f"left after {len(self._losses)} of {len(self._pieces)} micro-batches"
        self._discard()
        self._record(WindowLoss(math.nan, 0), update_rule.learning_rates(self._plan.step), skipped=reason)

    def _record(
        self,
        found: WindowLoss,
        rates: tuple[float, ...],
        *,
        norm: float | None = None,
        skipped: str | None = None,
    ) -> None:
        self.update = Update(
            loss=found.loss,
            grad_norm=norm,
            weight=found.weight,
            samples=None if self._pieces.samples is None else sum(self._pieces.samples),
            microbatches=len(self._pieces),
            learning_rates=rates,
            skipped=skipped,
            dropped=tuple(self._dropped),
            failures=self._failures,
            seconds=time.perf_counter() - self._started,
            losses=found.losses,
            weights=found.weights,
        )

    def _close(self) -> None:
        """Take off what the window put on; keep what it did."""
        self._context.close()
        if self._plan.norms is not None:
            self._plan.norms.close(self._plan.ranks)
        self._plan.state.release()

    def _discard(self) -> None:
        """Restore everything as it was before the window."""
        plan = self._plan
        retry.restore_each(
            self._end_iteration,
            self._context.close,
            None if self._watch is None else self._watch.put_back,
            self._place.discard,
            lambda: update_rule.forget_scaling(plan.step),
            None if plan.norms is None else plan.norms.put_back,
            plan.state.restore,
            plan.random.restore,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return what `Accumulator.state_dict` stores of a window in flight (see `saving`)."""
        return saving.state_of(self)
