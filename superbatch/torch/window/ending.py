"""End of a window: combine its sums, and apply the gradient or leave it in ``.grad``."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from superbatch import normalize
from superbatch.errors import NonFiniteError
from superbatch.results.update import Update

from ..checks.check_schedule import CheckSchedule
from ..loss.losses import Sum, WindowLoss, over_ranks
from ..modes import kept_modes
from . import culprit, update_rule
from .microbatches import Shown
from .nonfinite import Culprit
from .participants.gradient_sum import clear
from .participants.momentum_gradients import MomentumGradientSum
from .participants.noise.windows import Summed
from .transaction import Transaction, take_each
from .update_rule import Once, OptimizerSteps


class Ending:
    """End of one window, and its record.

    Args:
        window: all that it changes.
        looks: schedule of the loss check; None: it is off.
        started: when the window was made, by `time.perf_counter`.

    Attributes:
        update: the record; None before the end.
        is_agreed: no exchange of numbers is left that could tell other ranks of a failure here.
        rest: steps still to run once the optimizers have stepped. They refer to this object, a cycle that
            would hold the losses: `OpenWindow` clears them.
    """

    def __init__(self, window: Transaction, looks: CheckSchedule | None, started: float) -> None:
        # None until an outcome is known; a reader of `OpenWindow.update` gets an error until then.
        self.update: Update | None = None
        self.is_agreed = False
        self._window, self._looks, self._started = window, looks, started
        self._point: Once | OptimizerSteps | None = None  # of no return
        self.rest: list[Callable[[], Any]] = []
        # An autocast around the whole training loop caches casts of the old parameters.
        self._after_step: list[Callable[[], Any]] = [torch.clear_autocast_cache]
        # The model computes with the low-precision copies, so they follow their masters.
        if window.config.rule.masters_copied:
            self._after_step.append(partial(update_rule.copy_masters, window.config.owned))

    @property
    def passed(self) -> bool:
        """True from the point of no return: the optimizers have stepped, or the gradient is in ``.grad``."""
        if isinstance(self._point, Once):
            return bool(self._point.returned)
        return self._point is not None and self._point.made

    @property
    def has_stepped(self) -> bool:
        """True once an optimizer has stepped, whether the others have or not."""
        return isinstance(self._point, OptimizerSteps) and self._point.begun

    def finish(self) -> None:
        """Combine the sums of all micro-batches and ranks, and end the window with them.

        Raises:
            NonFiniteError: a loss or gradient is not finite, with ``nonfinite="raise"``; all is as before.
        """
        window, progress = self._window, self._window.progress
        config, rule, noise = window.config, window.config.rule, window.noise
        # Before the step: the record shows the rates of this update, not of the next.
        rates = update_rule.learning_rates(rule)
        losses = progress.losses.on_host(len(progress.microbatches))
        weights, dropped = progress.weights, progress.dropped
        bad, sums = weights.not_finite(losses, dropped), weights.sums(losses, dropped)
        shown, news = None, (False, 0)
        if self._looks is not None:
            took_part = partial(weights.took_part, dropped)
            shown = Shown(progress.microbatches, weights.each(losses), weights.counted(dropped), took_part)
            news = self._looks.needs_check(shown)
        mark = 0 if noise is None else noise.mark()
        ahead = partial(update_rule.announced, window.gradients, config.sync, config.owned)
        # One exchange carries sums, flags and announcements: each further one costs a round trip.
        sums, bad_ranks, look, announced = over_ranks(
            sums, config.sync, bad=bool(bad), mark=mark, news=news, ahead=ahead
        )
        # Some rank's loss is not finite, so all ranks refuse, each in its own words.
        if bad_ranks:
            self._refuse(sums, rates, culprit.by_loss(window, losses, bad))
            return
        # The divisor is one number for all ranks: the weights of all of them are in `sums`.
        found = weights.result(sums)
        if not found.weight:
            window.restore()
            self._record(found, rates, skipped="no weight: every micro-batch was left out or has weight 0")
            return
        # The scaler belongs to the user, who may have updated it inside the window.
        if window.scale is not None:
            window.scale.require()
        divisor = found.divisor
        gradients = update_rule.ready(rule, window.gradients, config.sync, config.owned, divisor, announced)
        # Behind the reduction: a check on shards drops gradients that are not reduced yet.
        if look and shown is not None:
            self._look_again(shown)
        # The gradient exists nowhere on its own, so there is no norm to clip by.
        if isinstance(window.gradients, MomentumGradientSum):
            gradients, norm = window.gradients.sums(), None
            finite = config.sync.norm(gradients)[1]
        else:
            norm, finite = config.sync.norm(gradients)
        # With a scaler, infinity means that the scale is too high: it lowers it.
        if not finite and not rule.scaling:
            self._refuse(sums, rates, culprit.by_gradient(window, losses, gradients))
            return
        if norm is not None and finite and noise is not None:
            noise.measure(gradients, norm, self._summed(sums[0].weight, found.divisor, losses))
        if not finite and config.earlier is None:
            self._overflow(found, rates, norm)
            return
        end = self._apply if config.earlier is None else self._keep
        end(found, rates, gradients, norm)

    def leave_early(self) -> None:
        """Record that the window was left before its last micro-batch, and restored."""
        progress = self._window.progress
        # The record says how far it came, since no error tells it.
        reason = f"left after {len(progress.losses)} of {len(progress.microbatches)} micro-batches"
        rates = update_rule.learning_rates(self._window.config.rule)
        self._record(WindowLoss(math.nan, 0), rates, skipped=reason)

    def complete(self) -> None:
        """Finish a window whose optimizers have stepped; may be called again.

        Raises:
            BaseException: of a scheduler or a participant; everything else is finished.
        """
        take_each(*self.rest)

    def abort(self) -> None:
        """Clean up after an optimizer raised inside `step()`: parameters stay half updated."""
        window, config = self._window, self._window.config
        scale = [] if window.scale is None else [window.scale.restore]
        take_each(*self._after_step, partial(clear, config.owned), *scale, *window.commits())

    def _agree(self) -> None:
        """Hear whether the ranks that share the window have come as far as this one.

        Raises:
            RankError: another rank has failed; no rank makes the update.
        """
        self._window.config.sync.vote(raised=False)
        self.is_agreed = True

    def _apply(
        self,
        found: WindowLoss,
        rates: tuple[float, ...],
        gradients: list[Tensor | None],
        norm: float | None,
    ) -> None:
        """Clip the gradient and step the optimizers."""
        window, config = self._window, self._window.config
        rule = config.rule
        if norm is not None:
            update_rule.clip(rule, gradients, norm)
        # Memory of the step is reserved while everything can still be restored.
        config.reserve.require()
        self._prepare_commit()
        window.gradients.attach(gradients)
        # Built before the step: from then on nothing may fail for lack of memory.
        self.rest = [
            *self._after_step,
            partial(self._record, found, rates, norm=norm),
            *(update_rule.scheduler_steps(rule, found.loss) if rule.schedulers else ()),
            partial(update_rule.zero_grad, config.owned, config.until_next),
            *window.commits(),
        ]
        # The last exchange before the step: no rank steps alone.
        agree = self._agree if config.sync.shared else None
        self._point = steps = OptimizerSteps(rule, window.gradients, config.before_step, agree)
        reason = steps.take()
        # A step that did nothing, such as that of a wrapper which skips: the window is undone.
        if reason:
            window.restore()
            self._record(found, rates, norm=norm, skipped=reason)
        else:
            take_each(*self.rest)

    def _keep(
        self,
        found: WindowLoss,
        rates: tuple[float, ...],
        gradients: list[Tensor | None],
        norm: float | None,
    ) -> None:
        """Leave the gradient in ``.grad``: scaled, where losses are scaled."""
        window = self._window
        # The record is in units of the loss; .grad stays scaled for the host's scaler.
        norm = None if norm is None else norm / (window.scaled_by or 1.0)
        self._prepare_commit()
        if window.config.earlier is not None:
            window.config.earlier.prepare(gradients)
        if window.config.sync.shared:
            self._agree()
        self._pass(
            partial(window.gradients.attach, gradients),
            partial(self._record, found, rates, norm=norm),
            *window.commits(),
        )

    def _overflow(self, found: WindowLoss, rates: tuple[float, ...], norm: float | None) -> None:
        """Lower the scale: the gradient of the scaled loss is not finite, so no optimizer steps."""
        window, config = self._window, self._window.config
        scaler: Any = config.rule.scaler  # unscale_ has told it of each optimizer
        self._prepare_commit()
        # All ranks lower the scale, or they would differ from the next window on.
        if config.sync.shared:
            self._agree()
        self._pass(
            scaler.update,
            partial(clear, config.owned),
            partial(self._record, found, rates, norm=norm, skipped=_OVERFLOW),
            *window.commits(),
        )

    def _pass(self, point: Callable[[], object], *rest: Callable[[], object]) -> None:
        """Pass the point of no return, and finish."""
        self.rest = list(rest)
        self._point = Once(point)
        self._point.take()
        self.complete()

    def _prepare_commit(self) -> None:
        """Run the parts of commits that can fail, such as pooling, before the optimizers step."""
        # Pooling allocates tensors and sums over the ranks.
        if self._window.config.norms is not None:
            self._window.config.norms.prepare()

    def _refuse(self, sums: list[Sum], rates: tuple[float, ...], culprit: Culprit) -> None:
        progress, skipping = self._window.progress, self._window.config.nonfinite == "skip_update"
        text = culprit.text(len(progress.microbatches), skipping=skipping)
        self._window.restore()
        if not skipping:
            raise NonFiniteError(text)
        self._record(progress.weights.result(sums), rates, skipped=f"not finite: {text}")

    def _summed(self, weight: Any, divisor: float, losses: Any) -> Summed:
        """Return how the gradients of this window were summed, for the noise."""
        window, progress = self._window, self._window.progress
        weights, dropped = progress.weights, progress.dropped
        counted, took_part = weights.counted(dropped), len(weights.took_part(dropped))
        samples, reduction = progress.microbatches.samples, window.config.reduction
        sums = [
            normalize.loss_sum([loss], [one], reduction=reduction)
            for loss, one in zip(losses, counted, strict=True)
        ]
        return Summed(
            weight, divisor, counted, took_part, samples, sums, window.scaled_by, window.config.sync
        )

    def _look_again(self, shown: Shown) -> None:
        """Run the scheduled check of the loss, without noise hooks and pooling of statistics."""
        assert self._looks is not None
        window, progress = self._window, self._window.progress
        if window.pooled is not None:
            # The forwards of the check must not enter the pooled statistics.
            window.pooled.watching = False
        unchanged = progress.written(0, len(progress.microbatches) - 1) is None
        without_noise = nullcontext() if window.noise is None else window.noise.lifted()
        with kept_modes(), without_noise, window.config.aside():
            self._looks.check_now(shown, unchanged=unchanged)

    def _record(
        self,
        found: WindowLoss,
        rates: tuple[float, ...],
        *,
        norm: float | None = None,
        skipped: str | None = None,
    ) -> None:
        progress = self._window.progress
        samples = progress.microbatches.samples
        self.update = Update(
            loss=found.loss,
            grad_norm=norm,
            weight=found.weight,
            samples=None if samples is None else sum(samples),
            microbatches=len(progress.microbatches.microbatches),
            learning_rates=rates,
            skipped=skipped,
            dropped=tuple(progress.dropped),
            failures=progress.failures,
            seconds=time.perf_counter() - self._started,
            losses=found.losses,
            weights=found.weights,
        )


_OVERFLOW = "overflow: the gradient of the scaled loss is not finite"
