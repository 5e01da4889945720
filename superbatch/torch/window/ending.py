"""End of a window: combine the sums of micro-batches and ranks, then make the update.

The *point of no return* is the moment when the optimizers have stepped (without a step: when the gradient is
in ``.grad``, or the scale was lowered). Before it, every failure restores the state before the window. After
it, all functions in `Ending.remaining_steps` run, even if one of them raises. Ranks vote once before it, so
that no rank steps alone.
"""

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
from .microbatches import CheckedWindow
from .nonfinite import Culprit
from .participants.gradient_sum import clear
from .participants.momentum_gradients import MomentumGradientSum
from .participants.noise.windows import WindowSum
from .transaction import Transaction, run_all
from .update_rule import Once, OptimizerSteps


class Ending:
    """End of one window, and its record.

    Args:
        window: the transaction of the window.
        check_schedule: decides which windows are checked; None: none are.
        started: value of `time.perf_counter` when the window was made.

    Attributes:
        update: the record; None before the end.
        is_agreed: True after the last exchange between ranks, when a failure can no longer be reported.
        remaining_steps: functions that must run after the point of no return. They refer to this object;
            the cycle would keep the losses alive, so `OpenWindow` clears the list.
    """

    def __init__(self, window: Transaction, check_schedule: CheckSchedule | None, started: float) -> None:
        self.update: Update | None = None
        self.is_agreed = False
        self._window, self._check_schedule, self._started = window, check_schedule, started
        # The call that makes the update final; None until shortly before it.
        self._point_of_no_return: Once | OptimizerSteps | None = None
        self.remaining_steps: list[Callable[[], Any]] = []
        # An autocast around the whole training loop has cached casts of the old parameters.
        self._after_step: list[Callable[[], Any]] = [torch.clear_autocast_cache]
        # The model computes with the low-precision parameters, so they are set to their masters.
        if window.config.rule.masters_copied:
            self._after_step.append(partial(update_rule.copy_masters, window.config.owned))

    @property
    def is_final(self) -> bool:
        """True after the point of no return: the optimizers have stepped, or the gradient is in ``.grad``."""
        if isinstance(self._point_of_no_return, Once):
            return bool(self._point_of_no_return.returned)
        return self._point_of_no_return is not None and self._point_of_no_return.all_made

    @property
    def has_stepped(self) -> bool:
        """True once an optimizer has stepped, even if the others have not."""
        return isinstance(self._point_of_no_return, OptimizerSteps) and self._point_of_no_return.has_stepped

    def finish(self) -> None:
        """Combine the sums of all micro-batches and ranks, and end the window with them.

        Raises:
            NonFiniteError: a loss or gradient is not finite, with ``nonfinite="raise"``; nothing has changed.
        """
        window, progress = self._window, self._window.progress
        config, rule, noise = window.config, window.config.rule, window.noise
        # Before the step, because a scheduler changes the rates after it.
        rates = update_rule.learning_rates(rule)
        losses = progress.losses.on_host(len(progress.microbatches))
        weights, dropped = progress.weights, progress.dropped
        bad, sums = weights.not_finite(losses, dropped), weights.sums(losses, dropped)
        checkable, unchecked = None, (False, 0)
        if self._check_schedule is not None:
            took_part = partial(weights.took_part, dropped)
            checkable = CheckedWindow(
                progress.microbatches, weights.one_per_microbatch(losses), weights.counted(dropped), took_part
            )
            unchecked = self._check_schedule.needs_check(checkable)
        # One exchange for sums, flags and announcements, because each costs a round trip.
        sums, bad_ranks, check_due, announced = over_ranks(
            sums,
            config.sync,
            nonfinite=bool(bad),
            configuration=0 if noise is None else noise.configuration_number(),
            unchecked=unchecked,
            announce=partial(update_rule.announced, window.gradients, config.sync, config.owned),
        )
        # The loss of some rank is not finite, so no rank makes the update.
        if bad_ranks:
            self._reject(sums, rates, culprit.by_loss(window, losses, bad))
            return
        # The divisor is the same on all ranks, because `sums` has the weights of all.
        found = weights.result(sums)
        if not found.weight:
            window.restore()
            self._record(found, rates, skipped="no weight: every micro-batch was left out or has weight 0")
            return
        # The user may have updated the scaler inside the window.
        if window.scale is not None:
            window.scale.require()
        gradients = update_rule.batch_gradient(
            rule, window.gradients, config.sync, config.owned, found.divisor, announced
        )
        # After the reduction, because a check of a sharded model frees gradients that are not yet reduced.
        if check_due and checkable is not None:
            self._check_again(checkable)
        # A sum in the momentum buffer contains no separate gradient, so there is no norm to clip by.
        if isinstance(window.gradients, MomentumGradientSum):
            gradients, norm = window.gradients.sums(), None
            finite = config.sync.norm(gradients)[1]
        else:
            norm, finite = config.sync.norm(gradients)
        # With a scaler, infinity means that the scale is too high, and the scaler lowers it.
        if not finite and not rule.scaling:
            self._reject(sums, rates, culprit.by_gradient(window, losses, gradients))
            return
        if norm is not None and finite and noise is not None:
            noise.measure(gradients, norm, self._window_sum(sums[0].weight, found.divisor, losses))
        if not finite and config.earlier is None:
            self._skip_overflow(found, rates, norm)
            return
        end = self._apply_update if config.earlier is None else self._keep_gradient
        end(found, rates, gradients, norm)

    def leave_early(self) -> None:
        """Record that the window was left before its last micro-batch."""
        progress = self._window.progress
        # `break` raises no error, so the record contains the reason.
        reason = f"left after {len(progress.losses)} of {len(progress.microbatches)} micro-batches"
        rates = update_rule.learning_rates(self._window.config.rule)
        self._record(WindowLoss(math.nan, 0), rates, skipped=reason)

    def complete(self) -> None:
        """Finish a window after the point of no return; may be called again.

        Raises:
            BaseException: a scheduler or a participant raised it; everything else is finished.
        """
        run_all(*self.remaining_steps)

    def abort(self) -> None:
        """Commit the window after an optimizer raised inside `step()`; parameters stay half updated."""
        window, config = self._window, self._window.config
        scale = [] if window.scale is None else [window.scale.restore]
        run_all(*self._after_step, partial(clear, config.owned), *scale, *window.commits())

    def _agree(self) -> None:
        """Wait until all ranks are ready for the update; raise `RankError` if another one has failed."""
        self._window.config.sync.vote(raised=False)
        self.is_agreed = True

    def _apply_update(
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
        # Now, while everything can still be restored: raises if the step does not fit in memory.
        config.reserve.require()
        self._prepare_commit()
        window.gradients.attach(gradients)
        # Built before the step, because after it nothing may run out of memory.
        self.remaining_steps = [
            *self._after_step,
            partial(self._record, found, rates, norm=norm),
            *(update_rule.scheduler_steps(rule, found.loss) if rule.schedulers else ()),
            partial(update_rule.zero_grad, config.owned, config.until_next),
            *window.commits(),
        ]
        # The last exchange before the step, so that no rank steps alone.
        agree = self._agree if config.sync.shared else None
        self._point_of_no_return = steps = OptimizerSteps(rule, window.gradients, config.before_step, agree)
        reason = steps.run()
        # A wrapper may have skipped the step of its optimizer: then the window is restored.
        if reason:
            window.restore()
            self._record(found, rates, norm=norm, skipped=reason)
        else:
            run_all(*self.remaining_steps)

    def _keep_gradient(
        self,
        found: WindowLoss,
        rates: tuple[float, ...],
        gradients: list[Tensor | None],
        norm: float | None,
    ) -> None:
        """End a window of `Gradient`: leave the gradient in ``.grad``, scaled if the losses are scaled."""
        window = self._window
        # The record's norm is unscaled; .grad stays scaled for the user's scaler.
        norm = None if norm is None else norm / (window.scaled_by or 1.0)
        self._prepare_commit()
        if window.config.earlier is not None:
            window.config.earlier.prepare(gradients)
        if window.config.sync.shared:
            self._agree()
        self._commit(
            partial(window.gradients.attach, gradients),
            partial(self._record, found, rates, norm=norm),
            *window.commits(),
        )

    def _skip_overflow(self, found: WindowLoss, rates: tuple[float, ...], norm: float | None) -> None:
        """Lower the scale and skip the update, because the gradient of the scaled loss is not finite."""
        window, config = self._window, self._window.config
        scaler: Any = config.rule.scaler  # unscale_ has recorded the overflow in it
        self._prepare_commit()
        # All ranks must lower the scale, or their scales would differ in the next window.
        if config.sync.shared:
            self._agree()
        self._commit(
            scaler.update,
            partial(clear, config.owned),
            partial(self._record, found, rates, norm=norm, skipped=_OVERFLOW),
            *window.commits(),
        )

    def _commit(self, point: Callable[[], object], *rest: Callable[[], object]) -> None:
        """Call `point`, which makes the window final, then run `rest`."""
        self.remaining_steps = list(rest)
        self._point_of_no_return = Once(point)
        self._point_of_no_return.run()
        self.complete()

    def _prepare_commit(self) -> None:
        """Pool BatchNorm statistics. Before the step, because this allocates tensors and sums over ranks."""
        if self._window.config.norms is not None:
            self._window.config.norms.prepare()

    def _reject(self, sums: list[Sum], rates: tuple[float, ...], culprit: Culprit) -> None:
        """Restore the state before the window; raise `NonFiniteError`, or record why no update was made."""
        progress, skipping = self._window.progress, self._window.config.nonfinite == "skip_update"
        text = culprit.text(len(progress.microbatches), skipping=skipping)
        self._window.restore()
        if not skipping:
            raise NonFiniteError(text)
        self._record(progress.weights.result(sums), rates, skipped=f"not finite: {text}")

    def _window_sum(self, weight: Any, divisor: float, losses: Any) -> WindowSum:
        """Return the facts of this window's gradient sum that the measurement of noise needs."""
        window, progress = self._window, self._window.progress
        weights, dropped = progress.weights, progress.dropped
        counted, took_part = weights.counted(dropped), len(weights.took_part(dropped))
        samples, reduction = progress.microbatches.samples, window.config.reduction
        sums = [
            normalize.loss_sum([loss], [one], reduction=reduction)
            for loss, one in zip(losses, counted, strict=True)
        ]
        return WindowSum(
            weight, divisor, counted, took_part, samples, sums, window.scaled_by, window.config.sync
        )

    def _check_again(self, checkable: CheckedWindow) -> None:
        """Run the scheduled check of the loss, without noise hooks and pooling of statistics."""
        assert self._check_schedule is not None
        window, progress = self._window, self._window.progress
        if window.pooled is not None:
            # The forwards of the check must not enter the pooled statistics.
            window.pooled.watching = False
        unchanged = progress.written(0, len(progress.microbatches) - 1) is None
        without_noise = nullcontext() if window.noise is None else window.noise.without_hooks()
        with kept_modes(), without_noise, window.config.outside_window():
            self._check_schedule.check_now(checkable, unchanged=unchanged)

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
