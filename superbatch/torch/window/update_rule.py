"""The update rule: functions that turn the sums of a window into an update.

`Ending` calls them in this order, once per window:

reduce -> normalise -> unscale -> finite check -> clip
       -> optimizer -> scaler -> masters -> scheduler -> zero_grad

The norm is that of the reduced, normalised, unscaled gradient (`batch_gradient`). The finite check is
part of the norm (`Sync.norm`), and `Ending.finish` acts on it. A scheduler steps once per update.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import NoneType
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau

from superbatch.errors import OptimizerError

from .. import fastpaths
from ..devices import local_part
from ..memory.out_of_memory import out_of_memory, release_caches
from .before_step import BeforeStep, has_plain_step
from .hooks import after_hooks
from .norm import elements_of
from .participants.gradient_sum import GradientSum, ManagedParameter, clear, values
from .participants.momentum_gradients import MomentumGradientSum
from .sync.sync import Sync
from .wrapped import WatchedStep

Clip = Callable[[Sequence[Tensor]], None]


@dataclass(frozen=True)
class UpdateRule:
    """Optimizers, schedulers, scaler and limits of an update.

    Attributes:
        optimizers: stepped in this order.
        schedulers: stepped once each, after an update was made.
        scaler: a `torch.amp.GradScaler`, or None.
        max_grad_norm: the largest 2-norm of the normalised gradient, or None.
        clip: function that changes the gradients in place after `max_grad_norm` was applied, or None.
        masters_copied: whether optimizers update float32 master copies, which are then copied to parameters.
        scaling: whether losses are scaled, so that infinity in a gradient is no error.
    """

    optimizers: tuple[torch.optim.Optimizer, ...]
    schedulers: tuple[Any, ...]
    scaler: Any | None
    max_grad_norm: float | None
    clip: Clip | None
    masters_copied: bool
    scaling: bool = False


def announced(gradient_sum: GradientSum, sync: Sync, owned: list[ManagedParameter]) -> list[float]:
    """Return this rank's announcement (`Sync.announce`); `batch_gradient` gets its sums over the ranks."""
    return sync.announce(gradient_sum.sums(), [entry.parameter for entry in owned])


def batch_gradient(
    rule: UpdateRule,
    gradient_sum: GradientSum,
    sync: Sync,
    owned: list[ManagedParameter],
    divisor: float,
    announced: Sequence[float] | None,
) -> list[Tensor | None]:
    """Reduce, normalise and unscale; return the gradient of the batch, one tensor (or None) per parameter.

    Args:
        rule: has the scaler.
        gradient_sum: the sum over the micro-batches of this rank.
        sync: the ranks.
        owned: the parameters.
        divisor: `normalize.divisor` of the window.
        announced: `announced` of each rank, summed over the ranks.

    Raises:
        OptimizerError: no parameter received a gradient.
    """
    parameters = [entry.parameter for entry in owned]
    gradients = sync.reduce(gradient_sum.close(), parameters, gradient_sum.zeros, announced)
    if divisor != 1.0:
        present = [gradient for gradient in gradients if gradient is not None]
        if present:
            fastpaths.divide(list(map(local_part, present)), divisor)
    _require_any(gradient_sum, gradients)
    if rule.scaling:
        # unscale_ works on `.grad` and remembers an overflow for the scaler's own step().
        assert rule.scaler is not None
        gradient_sum.attach(gradients)
        for optimizer in _with_gradient(rule.optimizers):
            rule.scaler.unscale_(optimizer)
        gradients = [entry.target.grad for entry in owned]
    # Coalesced: a sparse gradient's norm and clipping need the sum of its duplicate entries.
    return [
        gradient.coalesce() if gradient is not None and gradient.is_sparse else gradient
        for gradient in gradients
    ]


def clip(rule: UpdateRule, gradients: list[Tensor | None], norm: float) -> None:
    """Clip the normalised gradient in place, by norm and then by the user's function."""
    # torch.nn.utils.clip_grad_norm_ multiplies by 1 for smaller norms, which costs a pass over all gradients.
    if rule.max_grad_norm is not None and norm + 1e-6 > rule.max_grad_norm:
        factor = rule.max_grad_norm / (norm + 1e-6)
        fastpaths.multiply(elements_of(gradients), factor)
    if rule.clip is not None:
        rule.clip([values(each) if each.is_sparse else each for each in gradients if each is not None])


class Once:
    """A call that is made once, even if `run` is called several times.

    Args:
        call: a function of the user's, such as the step of an optimizer or a scheduler.

    Attributes:
        returned: a list with the value that the call returned; empty until then.
        broken: the error that the call raised after it began, or None. Half of its work may be done, so the
            call is not repeated: `run` raises this error again.

    Examples:
        >>> done = []
        >>> step = Once(lambda: done.append(1))
        >>> step.run()
        >>> step.run()
        >>> step.returned, done
        ([None], [1])
    """

    __slots__ = ("_call", "broken", "returned")

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call
        self.broken: BaseException | None = None
        self.returned: list[Any] = []

    def run(self) -> None:
        """Make the call, unless it was made before."""
        if self.broken is not None:
            raise self.broken
        if self.returned:
            return
        try:
            self.returned.append(self._call())  # one statement, so that no interrupt comes between
        except BaseException as error:
            # A Python function without a frame in the traceback never started and may be called again. A C
            # function never has a frame.
            started = error.__traceback__ is not None and error.__traceback__.tb_next is not None
            if started or not _is_python(self._call):
                self.broken = error
            raise


def _is_python(call: Callable[[], Any]) -> bool:
    """Return whether `call` is a Python function or method."""
    while isinstance(call, partial):
        call = call.func
    return hasattr(call, "__code__")


class OptimizerSteps:
    """All steps of one update, in order: momentum buffers, each optimizer, the scaler.

    An update must not stop halfway. After an error between two steps, the remaining steps are made before the
    error is raised. An out-of-memory error is not raised if the retry succeeds.

    Args:
        rule: has the optimizers.
        gradients: gradient sum of the window, in ``.grad``.
        before: snapshot of the optimizers before the step.
        agree: function that raises if another rank has failed. It is called once, after the pre-hooks of the
            first optimizer and before its step. None: no other rank shares the window.
    """

    def __init__(
        self,
        rule: UpdateRule,
        gradients: GradientSum,
        before: BeforeStep,
        agree: Callable[[], object] | None = None,
    ) -> None:
        self._before, self._agree = before, agree
        self._hooked: torch.optim.Optimizer | None = None  # its pre-hooks run before the ranks agree
        self._calls: list[Callable[[], None]] = []
        self._steps: list[Once] = []
        self._watched: list[WatchedStep] = []
        if isinstance(gradients, MomentumGradientSum):
            self._calls.append(gradients.apply)
        # With a sum in momentum buffers no gradient is left, so the step only runs hooks and counters.
        scaler: Any = rule.scaler if rule.scaling else None
        self._optimizers = rule.optimizers if scaler is None else _with_gradient(rule.optimizers)
        for each in self._optimizers:
            step = Once(each.step if scaler is None else partial(scaler.step, each))
            self._steps.append(step)
            if scaler is None and has_plain_step(each):
                self._calls.append(step.run)
            else:
                self._watched.append(WatchedStep(each, step.run, always=scaler is not None))
                self._calls.append(self._watched[-1].run)
        self._scaler_update: Once | None = None
        if scaler is not None:
            self._scaler_update = Once(scaler.update)
            self._calls.append(self._update_scaler)
        # Sums in momentum buffers are applied before any hook runs, so there the ranks agree earlier.
        if agree is not None and self._optimizers and not isinstance(gradients, MomentumGradientSum):
            first = self._optimizers[0]
            self._hooked = first if before.has_hooks(first) else None

    def run(self) -> str | None:
        """Make the steps that were not yet made.

        Returns:
            The reason why no update was made although all optimizers were called; None if one was made.

        Raises:
            BaseException: an error inside a step, or between two steps.
            OptimizerError: some optimizers have stepped and some have not.
        """
        end_hooks = None
        if self._hooked is not None:
            self._before.step_begins(hooks=True)
            end_hooks = after_hooks(self._hooked, self._after_hooks)
        elif self._agree is not None:
            self._after_hooks()
        else:
            self._before.step_begins()
        grad = torch.is_grad_enabled()
        try:
            for call in self._calls:
                call()
        except BaseException as error:
            if any(step.broken is not None for step in self._all_steps()):
                raise
            torch.set_grad_enabled(grad)  # an interrupt inside no_grad() leaves grad mode off
            no_memory = out_of_memory(error)
            if no_memory:
                release_caches()
            for call in self._calls:
                call()
            if not no_memory:
                raise
        finally:
            if end_hooks is not None:
                end_hooks()
        return self._reason_for_no_update() if self._watched else None

    @property
    def has_stepped(self) -> bool:
        """True once an optimizer has stepped and changed its parameters."""
        return any(step.returned for step in self._steps) and self._any_stepped(self._without_step())

    @property
    def all_made(self) -> bool:
        """True once all steps were made, and no optimizer skipped its own."""
        return all(step.returned for step in self._all_steps()) and not self._without_step()

    def _reason_for_no_update(self) -> str | None:
        """Return the reason why no update was made although the optimizers were called, or None."""
        if self._agree is not None:  # no step ran, so the vote that other ranks wait for is made here
            self._after_hooks()
        skipped = self._without_step()
        if not skipped:
            return None
        return self._before.reason_for_no_update(skipped, half=self._any_stepped(skipped))

    def _after_hooks(self, *_: object) -> None:
        """Vote with the other ranks, immediately before the first optimizer's step."""
        if self._agree is not None:
            agree, self._agree = self._agree, None  # one vote, even if the hooks run twice
            agree()
        self._before.step_begins()

    def _update_scaler(self) -> None:
        """Update the scale, unless an optimizer skipped its step."""
        if self._scaler_update is not None and not self._without_step():
            self._scaler_update.run()

    def _all_steps(self) -> list[Once]:
        return self._steps if self._scaler_update is None else [*self._steps, self._scaler_update]

    def _any_stepped(self, skipped: list[torch.optim.Optimizer]) -> bool:
        """Return whether any optimizer with gradients is not among those that skipped their step."""
        # An optimizer without gradients changes no parameter, so its step does not make half an update.
        able = (_with_gradient(self._optimizers) or self._optimizers) if skipped else self._optimizers
        return any(each not in skipped for each in able)

    def _without_step(self) -> list[torch.optim.Optimizer]:
        """Return the optimizers that ran no step and whose parameters have not changed."""
        # Both conditions, because a compiled step runs no hooks but changes the parameters.
        return [
            each.optimizer
            for each in self._watched
            if each.did_nothing and self._before.is_unchanged(each.optimizer)
        ]


def copy_masters(owned: list[ManagedParameter]) -> None:
    """Set parameters to their master copies; a second call sets the same."""
    with torch.no_grad():
        for entry in owned:
            if entry.target is not entry.parameter:
                entry.parameter.copy_(entry.target)


def scheduler_steps(rule: UpdateRule, loss: float) -> list[Callable[[], None]]:
    """Return the steps of the schedulers, each of which is made once."""
    return [
        Once(partial(each.step, loss) if isinstance(each, ReduceLROnPlateau) else each.step).run
        for each in rule.schedulers
    ]


def zero_grad(owned: list[ManagedParameter], until_next: list[Tensor]) -> None:
    """Set the gradients to None; on the CPU their memory is kept until the next window.

    Freed memory would return to the operating system, and the next window would map each page again: 3 % of
    the time of a window of a small transformer. On an accelerator torch's allocator keeps the memory.

    Args:
        owned: the parameters.
        until_next: list that keeps the gradients; `OpenWindow` clears it as the next window begins.
    """
    if owned[0].target.device.type == "cpu":
        until_next[:] = [gradient for entry in owned if (gradient := entry.target.grad) is not None]
    clear(owned)


def _with_gradient(optimizers: Sequence[torch.optim.Optimizer]) -> list[torch.optim.Optimizer]:
    """Return the optimizers that have a gradient; a GradScaler raises for an optimizer without one."""
    return [
        optimizer
        for optimizer in optimizers
        if any(p.grad is not None for group in optimizer.param_groups for p in group["params"])
    ]


def _require_any(gradient_sum: GradientSum, gradients: Sequence[Tensor | None]) -> None:
    if not isinstance(gradient_sum, MomentumGradientSum) and set(map(type, gradients)) <= {NoneType}:
        raise OptimizerError(
            "No parameter of the optimizer received a gradient. Check that the loss depends on the "
            "parameters passed to the optimizer."
        )


def learning_rates(rule: UpdateRule) -> tuple[float, ...]:
    """Return the learning rate of each parameter group of each optimizer."""
    return tuple([float(group["lr"]) for o in rule.optimizers for group in o.param_groups if "lr" in group])
