"""Optimizers that wrap other optimizers: find the inner ones, and check that a step reached them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any

from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

# Attributes that are not searched for inner optimizers: they have an entry per parameter, or only hooks.
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
_MOST = 64  # objects that are searched in one container
_OWN = {"state", "param_groups", "_optimizer_step_post_hooks"}


def leaves_of(optimizer: Optimizer) -> list[Optimizer]:
    """Return the innermost optimizers that a wrapper steps.

    Optimizers of Accelerate, Lightning and Fabric wrap one optimizer of the same parameters.
    ZeroRedundancyOptimizer wraps one of this rank's share of the parameters.

    Returns:
        The innermost optimizers in its attributes that update some of its parameters; the optimizer itself if
        there are none.

    Examples:
        >>> import torch
        >>> sgd = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
        >>> leaves_of(sgd) == [sgd]
        True
    """
    return _leaves(optimizer, {id(optimizer)})


def _leaves(optimizer: Optimizer, seen: set[int]) -> list[Optimizer]:
    inner: list[Optimizer] = []
    for each in _optimizers_in(optimizer):
        # `seen` ends the recursion if wrappers refer to each other.
        if id(each) not in seen:
            seen.add(id(each))
            # An optimizer of other parameters belongs to another training.
            inner += _leaves(each, seen) if _parameters(optimizer) & _parameters(each) else []
    return inner or [optimizer]


def _optimizers_in(optimizer: Optimizer) -> list[Optimizer]:
    found: list[Any] = []
    for name, held in vars(optimizer).items():
        # Most attributes are options. This runs at each update, so they are skipped first.
        if name in _OF_EACH or type(held) in _OPTIONS or held is None:
            continue
        if isinstance(held, dict):
            # Only the first few, because a container of thousands is data.
            found += islice(held.values(), _MOST)
        elif isinstance(held, list | tuple):
            found += held[:_MOST]
        else:
            found.append(held)
    return [each for each in found if isinstance(each, Optimizer)] if found else []


def _parameters(optimizer: Optimizer) -> set[int]:
    # By id, because `in` on tensors compares elements.
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


class WatchedStep:
    """Step of an optimizer, with a check that it reached the innermost optimizers.

    Args:
        optimizer: the optimizer.
        step: makes the step, and does nothing in further calls.
        always: watch also an optimizer that wraps nothing, because `step` (a scaler's) may skip it.

    Examples:
        >>> import torch
        >>> sgd = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
        >>> made, left_out = WatchedStep(sgd, sgd.step), WatchedStep(sgd, lambda: None, always=True)
        >>> made.run(), left_out.run()
        (None, None)
        >>> made.did_nothing, left_out.did_nothing
        (False, True)
    """

    def __init__(self, optimizer: Optimizer, step: Callable[[], object], *, always: bool = False) -> None:
        self.optimizer = optimizer
        self._step, self._always, self._watching = step, always, False
        self._ran: list[bool] = []
        self._handles: list[RemovableHandle] = []

    @property
    def did_nothing(self) -> bool:
        """True if the step reached no optimizer; False also if that cannot be checked."""
        return self._watching and not self._ran

    def run(self) -> None:
        """Make the step, unless it was made before."""
        try:
            for leaf in _watched(self.optimizer, always=self._always):
                self._watching = True
                # A hidden leaf has no list of hooks, so registering one would raise.
                if not _is_hidden(leaf):
                    self._handles.append(leaf.register_step_post_hook(self._note))
            self._step()
        finally:
            while self._handles:
                # Also after an error, because the hook would count the next step.
                self._handles.pop().remove()

    def _note(self, *_: Any) -> None:
        self._ran.append(True)


def _watched(optimizer: Optimizer, *, always: bool) -> list[Optimizer]:
    """Return the optimizers that a step should reach; none if there is nothing to watch."""
    # A `step` in the instance's __dict__ was replaced, e.g. by a scheduler or a profiler.
    hides = "step" in vars(optimizer) or _is_hidden(optimizer)
    if not (always or hides or _optimizers_in(optimizer)):  # the usual case
        return []
    leaves = leaves_of(optimizer)
    return [] if leaves == [optimizer] and not (always or hides) else leaves


def _is_hidden(optimizer: Optimizer) -> bool:
    """Return whether an optimizer has no state and hooks of its own and forwards to another one."""
    # torch's __init__ sets these attributes.
    return not vars(optimizer).keys() >= _OWN


def describe(optimizer: Optimizer) -> str:
    """Return a clause that says what the step of an optimizer has not done.

    Examples:
        >>> import torch
        >>> describe(torch.optim.SGD([torch.zeros(1, requires_grad=True)]))
        'SGD.step() did nothing'
    """
    inner = [type(leaf).__name__ for leaf in leaves_of(optimizer) if leaf is not optimizer]
    done = f"not step {', '.join(inner)}" if inner else "nothing"
    return f"{type(optimizer).__name__}.step() did {done}"
