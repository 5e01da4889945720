"""Optimizers that wrap others: the ones inside, and whether a step reached them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

# What is not looked into at each update: it is as long as the list of parameters, or holds hooks alone.
_OF_EACH = {
    "state",
    "param_groups",
    "defaults",
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
}
_OPTIONS = {bool, int, float, str}
_MOST = 64  # optimizers in one container
_OWN = {"state", "param_groups", "_optimizer_step_post_hooks"}


def leaves_of(optimizer: Optimizer) -> list[Optimizer]:
    """Return the optimizers that do the work of one.

    Those of Accelerate, Lightning and Fabric wrap one optimizer of the same parameters;
    ZeroRedundancyOptimizer wraps one of this rank's share.

    Args:
        optimizer: any.

    Returns:
        The innermost optimizers that it holds in its attributes and that update some of its parameters; the
        optimizer itself where it holds none.

    Examples:
        >>> import torch
        >>> sgd = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
        >>> leaves_of(sgd) == [sgd]
        True
    """
    return _leaves(optimizer, {id(optimizer)})


def _leaves(optimizer: Optimizer, seen: set[int]) -> list[Optimizer]:
    # Inner optimizers may share parameters with none of the outer: those are other trainings.
    inner: list[Optimizer] = []
    for each in _held(optimizer):
        # Wrappers may refer to each other.
        if id(each) not in seen:
            seen.add(id(each))
            inner += _leaves(each, seen) if _parameters(optimizer) & _parameters(each) else []
    return inner or [optimizer]


def _held(optimizer: Optimizer) -> list[Optimizer]:
    found: list[Any] = []
    for name, held in vars(optimizer).items():
        # Asked at each update: mostly options.
        if name in _OF_EACH or type(held) in _OPTIONS or held is None:
            continue
        if isinstance(held, dict):
            # Only the first few: a container of thousands is data.
            found += islice(held.values(), _MOST)
        elif isinstance(held, list | tuple):
            found += held[:_MOST]
        else:
            found.append(held)
    return [each for each in found if isinstance(each, Optimizer)] if found else []


def _parameters(optimizer: Optimizer) -> set[int]:
    # By id: Accelerate's wrapper shows the same tensors.
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


class WatchedStep:
    """Step of an optimizer, and whether it reached an optimizer that does the work, as far as that is seen.

    Args:
        optimizer: whose step it is.
        step: makes it; once, however often it is called.
        always: watch also where the optimizer wraps nothing, because `step` may leave it out.

    Attributes:
        optimizer: whose step it is.

    Examples:
        >>> import torch
        >>> sgd = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
        >>> made, left_out = WatchedStep(sgd, sgd.step), WatchedStep(sgd, lambda: None, always=True)
        >>> made.take(), left_out.take()
        (None, None)
        >>> made.is_idle, left_out.is_idle
        (False, True)
    """

    def __init__(self, optimizer: Optimizer, step: Callable[[], object], *, always: bool = False) -> None:
        self.optimizer = optimizer
        self._step, self._always, self._watching = step, always, False
        self._ran: list[bool] = []
        self._handles: list[RemovableHandle] = []

    @property
    def is_idle(self) -> bool:
        """True where no optimizer has seen the step; False where nothing can be checked."""
        return self._watching and not self._ran

    def take(self) -> None:
        """Make the step, if it was not made."""
        try:
            for leaf in _watched(self.optimizer, always=self._always):
                self._watching = True
                # A hidden leaf has no hook list: register would raise.
                if not _is_hidden(leaf):
                    self._handles.append(leaf.register_step_post_hook(self._note))
            self._step()
        finally:
            while self._handles:
                # Also after an error: a hook left behind would count the next step.
                self._handles.pop().remove()

    def _note(self, *_: Any) -> None:
        self._ran.append(True)


def _watched(optimizer: Optimizer, *, always: bool) -> list[Optimizer]:
    """Return the optimizers that a step should reach; none where it need not be watched."""
    # A step in the instance's __dict__ was replaced, e.g. by a scheduler or a profiler.
    hides = "step" in vars(optimizer) or _is_hidden(optimizer)
    if not (always or hides or _held(optimizer)):  # mostly
        return []
    leaves = leaves_of(optimizer)
    return [] if leaves == [optimizer] and not (always or hides) else leaves


def _is_hidden(optimizer: Optimizer) -> bool:
    """Return whether an optimizer wraps another in an unknown way: it has no state or hooks of its own."""
    # torch's __init__ sets these; a wrapper that skipped it forwards everything.
    return not vars(optimizer).keys() >= _OWN


def describe(optimizer: Optimizer) -> str:
    """Describe the work that an optimizer that did not step has left out.

    Examples:
        >>> import torch
        >>> describe(torch.optim.SGD([torch.zeros(1, requires_grad=True)]))
        'SGD.step() left out its work'
    """
    inner = [type(leaf).__name__ for leaf in leaves_of(optimizer) if leaf is not optimizer]
    return f"{type(optimizer).__name__}.step() left out {', '.join(inner) or 'its work'}"
