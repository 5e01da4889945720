"""Steps of the update rule, a function or a class each. `Ending` calls them in this order, once per window.

reduce -> normalise -> unscale -> finite check -> clip
       -> optimizer -> scaler -> masters -> scheduler -> zero_grad

The norm must be taken of the reduced, normalised, unscaled gradient (`ready`). The finite check is part of
the norm (`Sync.norm`); `Ending.finish` decides what follows from it. A scheduler steps once per update.
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
        schedulers: stepped after an update was made, once each.
        scaler: a `torch.amp.GradScaler`, or None.
        max_grad_norm: the largest 2-norm of the normalised gradient, or None.
        clip: changes the elements of the gradients in place, after that; or None.
        masters_copied: whether optimizers update float32 master copies, to which the parameters are then set.
        scaling: whether losses are scaled, so that an overflow is an ordinary event.
    """

    optimizers: tuple[torch.optim.Optimizer, ...]
    schedulers: tuple[Any, ...]
    scaler: Any | None
    max_grad_norm: float | None
    clip: Clip | None
    masters_copied: bool
    scaling: bool = False


def announced(gradient_sum: GradientSum, sync: Sync, owned: list[ManagedParameter]) -> list[float]:
    """Return the numbers that `ready` needs the sums of over the ranks."""
    return sync.announce(gradient_sum.sums(), [entry.parameter for entry in owned])


def ready(
    rule: UpdateRule,
    gradient_sum: GradientSum,
    sync: Sync,
    owned: list[ManagedParameter],
    divisor: float,
    announced: Sequence[float] | None,
) -> list[Tensor | None]:
    """Reduce, normalise, unscale: return the gradient of the batch, one tensor (or None) per parameter."""
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
    # A sparse gradient's norm is that of its summed values, and only those can be clipped in place.
    return [
        gradient.coalesce() if gradient is not None and gradient.is_sparse else gradient
        for gradient in gradients
    ]


def clip(rule: UpdateRule, gradients: list[Tensor | None], norm: float) -> None:
    """Clip the normalised gradient in place, by norm and then by the user's function."""
    # Unlike torch's function this leaves out the pass over all gradients when it would multiply by one.
    if rule.max_grad_norm is not None and norm + 1e-6 > rule.max_grad_norm:
        factor = rule.max_grad_norm / (norm + 1e-6)
        fastpaths.multiply(elements_of(gradients), factor)
    if rule.clip is not None:
        rule.clip([values(each) if each.is_sparse else each for each in gradients if each is not None])


class Once:
    """Call that is made once, however often `take` is called.

    Args:
        call: of the user's code, such as the step of an optimizer or a scheduler.

    Attributes:
        returned: what the call returned, in a list; empty until then.
        broken: the error that the call raised inside; None: none. Half of its work may be done, so it is not
            made again: `take` raises this error.

    Examples:
        >>> done = []
        >>> step = Once(lambda: done.append(1))
        >>> step.take()
        >>> step.take()
        >>> step.returned, done
        ([None], [1])
    """

    __slots__ = ("_call", "broken", "returned")

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call
        self.broken: BaseException | None = None
        self.returned: list[Any] = []

    def take(self) -> None:
        """Make the call, unless it was made."""
        if self.broken is not None:
            raise self.broken
        if self.returned:
            return
        try:
            self.returned.append(self._call())  # on one line: nothing of ours fails between the two
        except BaseException as error:
            # A Python function that has left no frame in the traceback never started: it may be called again.
            # A call in C leaves none in any case.
            started = error.__traceback__ is not None and error.__traceback__.tb_next is not None
            if started or not _is_python(self._call):
                self.broken = error
            raise


def _is_python(call: Callable[[], Any]) -> bool:
    """Return whether a call is that of a Python function or method."""
    while isinstance(call, partial):
        call = call.func
    return hasattr(call, "__code__")


class OptimizerSteps:
    """All steps of one update, in their order: momentum buffers', each optimizer's, the scaler's.

    If an error occurs between two steps, the remaining steps are still made, then it is raised; lack of
    memory is not raised if the retry succeeds. Half of an update cannot be kept, and it cannot be undone.

    Args:
        rule: whose optimizers step.
        gradients: of the window, in ``.grad``.
        before: state of the optimizers before the step.
        agree: called once, when all that may fail without a trace has succeeded here: it raises where another
            rank has failed. The hooks before the first optimizer's step run earlier, and nothing else of
            the steps does. None: no other rank shares the window.
    """

    def __init__(
        self,
        rule: UpdateRule,
        gradients: GradientSum,
        before: BeforeStep,
        agree: Callable[[], object] | None = None,
    ) -> None:
        self._before, self._agree = before, agree
        self._hooked: torch.optim.Optimizer | None = None  # its hooks are to run before the ranks agree
        self._calls: list[Callable[[], None]] = []
        self._steps: list[Once] = []
        self._watched: list[WatchedStep] = []
        if isinstance(gradients, MomentumGradientSum):
            self._calls.append(gradients.apply)
        # After momentum accumulation no target has a gradient: a step runs the hooks and counters.
        scaler: Any = rule.scaler if rule.scaling else None
        self._optimizers = rule.optimizers if scaler is None else _with_gradient(rule.optimizers)
        for each in self._optimizers:
            step = Once(each.step if scaler is None else partial(scaler.step, each))
            self._steps.append(step)
            if scaler is None and has_plain_step(each):
                self._calls.append(step.take)
            else:
                self._watched.append(WatchedStep(each, step.take, always=scaler is not None))
                self._calls.append(self._watched[-1].take)
        self._scaler_update: Once | None = None
        if scaler is not None:
            self._scaler_update = Once(scaler.update)
            self._calls.append(self._update_scaler)
        # Sums in momentum buffers are applied before any hook runs.
        if agree is not None and self._optimizers and not isinstance(gradients, MomentumGradientSum):
            first = self._optimizers[0]
            self._hooked = first if before.has_hooks(first) else None

    def take(self) -> str | None:
        """Make the steps that were not made.

        Returns:
            Why no update was made although all optimizers were called; None if it was made.

        Raises:
            BaseException: an optimizer broke inside its step, or something between two steps.
            OptimizerError: some have stepped and some have not.
        """
        end_hooks = None
        if self._hooked is not None:
            self._before.begin(hooks=True)
            end_hooks = after_hooks(self._hooked, self._after_hooks)
        elif self._agree is not None:
            self._after_hooks()
        else:
            self._before.begin()
        grad = torch.is_grad_enabled()
        try:
            for call in self._calls:
                call()
        except BaseException as error:
            if any(step.broken is not None for step in self._all_steps()):
                raise
            torch.set_grad_enabled(grad)  # no_grad() may not have been left
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
        return self._left_out() if self._watched else None

    @property
    def begun(self) -> bool:
        """True once an optimizer has stepped and done its work."""
        return any(step.returned for step in self._steps) and self._any_moved(self._idle())

    @property
    def made(self) -> bool:
        """True once all steps were made, and each has done its work."""
        return all(step.returned for step in self._all_steps()) and not self._idle()

    def _left_out(self) -> str | None:
        """Return why no update was made although the optimizers were called."""
        if self._agree is not None:  # no step was seen, and the others wait for the vote
            self._after_hooks()
        idle = self._idle()
        return self._before.not_made(idle, half=self._any_moved(idle)) if idle else None

    def _after_hooks(self, *_: object) -> None:
        """Agree with the other ranks, right before the first optimizer's step."""
        if self._agree is not None:
            agree, self._agree = self._agree, None  # it is one vote, however often the hooks run
            agree()
        self._before.begin()

    def _update_scaler(self) -> None:
        """Update the scale, unless a step was left out."""
        if self._scaler_update is not None and not self._idle():
            self._scaler_update.take()

    def _all_steps(self) -> list[Once]:
        """Return the steps of the optimizers and of the scaler."""
        return self._steps if self._scaler_update is None else [*self._steps, self._scaler_update]

    def _any_moved(self, idle: list[torch.optim.Optimizer]) -> bool:
        """Return whether there is an optimizer with something to do that is not idle."""
        busy = (_with_gradient(self._optimizers) or self._optimizers) if idle else self._optimizers
        return any(each not in idle for each in busy)

    def _idle(self) -> list[torch.optim.Optimizer]:
        """Return the optimizers of which no step was seen, and whose parameters have not moved."""
        # A step that no hook sees, such as a compiled one, may have moved them.
        return [
            each.optimizer for each in self._watched if each.is_idle and self._before.still(each.optimizer)
        ]


def copy_masters(owned: list[ManagedParameter]) -> None:
    """Set parameters to their master copies; a second call sets the same."""
    with torch.no_grad():
        for entry in owned:
            if entry.target is not entry.parameter:
                entry.parameter.copy_(entry.target)


def scheduler_steps(rule: UpdateRule, loss: float) -> list[Callable[[], None]]:
    """Return the steps of the schedulers, which count updates that were made; each is made once."""
    return [
        Once(partial(each.step, loss) if isinstance(each, ReduceLROnPlateau) else each.step).take
        for each in rule.schedulers
    ]


def zero_grad(owned: list[ManagedParameter], until_next: list[Tensor]) -> None:
    """Set the gradients to None; on the CPU their memory is kept until the next window.

    Freed here it would go back to the operating system, and the next window would pay for each page of it
    again: 3 % of a window of a small transformer. On an accelerator torch's allocator keeps it.
    """
    if owned[0].target.device.type == "cpu":
        until_next[:] = [gradient for entry in owned if (gradient := entry.target.grad) is not None]
    clear(owned)


def _with_gradient(optimizers: Sequence[torch.optim.Optimizer]) -> list[torch.optim.Optimizer]:
    """Return the optimizers that have a gradient: a scaler refuses one that has none."""
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
