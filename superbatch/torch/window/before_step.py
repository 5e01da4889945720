"""Snapshot of optimizer state before a step, to distinguish a half-made step from one that changed nothing.

A snapshot is taken in every window, so for torch's optimizers without hooks it copies no tensors.
`rollback` never guesses: it returns False unless version counters and recorded contents prove that no tensor
was written. A half-made update is *torn*: the accumulator then refuses windows until a state is loaded.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import (
    _global_optimizer_post_hooks,  # pyright: ignore[reportPrivateUsage]  (torch has no other way to ask)
    _global_optimizer_pre_hooks,  # pyright: ignore[reportPrivateUsage]
)

from superbatch.errors import OptimizerError

from .contents import PLAIN, Contents
from .participants.gradient_sum import ManagedParameter
from .wrapped import describe, leaves_of

_TORN = (
    "The last update failed inside the optimizer's step and is torn: some parameters or states have changed, "
    "and others have not. Load the model, the optimizer and this Accumulator from a checkpoint."
)


class BeforeStep:
    """Snapshot of optimizer state and parameter versions: `rollback` removes new state, or reports a write.

    It keeps no tensor of optimizer state alive, because an optimizer may replace its tensors.

    Args:
        optimizers: the optimizers that make the update.
        owned: their parameters; the list may change in place.

    Examples:
        >>> layer = torch.nn.Linear(2, 1)
        >>> adam = torch.optim.Adam(layer.parameters())
        >>> before = BeforeStep([adam], [])
        >>> before.savepoint()
        >>> before.step_begins()
        >>> adam.state[layer.weight]["step"] = torch.zeros(())
        >>> before.rollback(), dict(adam.state)
        (True, {})
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], owned: list[ManagedParameter]) -> None:
        # Two lists, because hooks run on the wrapper that the user steps, and the wrapped optimizers hold
        # the tensors.
        self._stepped = list(optimizers)
        self._optimizers = [leaf for optimizer in optimizers for leaf in leaves_of(optimizer)]
        self._owned = owned
        self._all = list(dict.fromkeys((*self._stepped, *self._optimizers)))
        self._contents: dict[int, Contents] = {}  # by id, of optimizers that are not torch's or have hooks
        self._states = [_States() for _ in self._optimizers]
        self._groups: list[list[dict[str, Any]]] = []
        self._targets: list[Tensor] = []
        self._versions: list[int] = []
        self._has_savepoint = False
        self._has_begun = self._in_hooks = self._is_torn = False

    def mark_torn(self) -> None:
        """Record that half of an update was made, so that `require_not_torn` raises."""
        self._is_torn = True

    def clear_torn(self) -> None:
        """Allow updates again, because a state was loaded."""
        self._is_torn = False

    def require_not_torn(self) -> None:
        """Raise `OptimizerError` if half of an update was made and no state was loaded since."""
        if self._is_torn:
            raise OptimizerError(_TORN)

    def raise_torn(self, error: BaseException) -> None:
        """Record that half of an update was made, and raise an error that says so.

        Args:
            error: the error of the optimizer's step, or of a hook after it.

        Raises:
            OptimizerError: on the first call, if `error` is an `Exception`; KeyboardInterrupt and SystemExit
                keep their type.
        """
        was_torn, self._is_torn = self._is_torn, True
        # Only once: a later failure in the same window is not another torn update.
        if isinstance(error, Exception) and not was_torn:
            raise OptimizerError(_TORN) from error

    def savepoint(self) -> None:
        """Take the snapshot."""
        # Empty first: if a copy below fails for lack of memory, an older snapshot must not be used.
        self._has_savepoint, self._groups = False, []
        for states, optimizer in zip(self._states, self._optimizers, strict=True):
            states.record(optimizer.state)
            self._groups.append(list(map(dict, optimizer.param_groups)))
        self._contents = {}
        for optimizer in self._all:
            hooks = _global_optimizer_pre_hooks or getattr(optimizer, "_optimizer_step_pre_hooks", None)
            # A hook or a foreign step may write through .data, which no version counter shows.
            if hooks or not has_plain_step(optimizer):
                parameters = [entry.target for entry in self._owned if entry.optimizer is optimizer]
                self._contents[id(optimizer)] = Contents(optimizer, parameters)
        self._targets = list(map(attrgetter("target"), self._owned))
        # map with attrgetter runs in C; this is taken in every window.
        self._versions = list(map(attrgetter("_version"), self._targets))
        self._has_savepoint, self._has_begun = True, False

    def step_begins(self, *, hooks: bool = False) -> None:
        """Record that an optimizer is about to step; a failure before this call has changed nothing.

        Args:
            hooks: True if only the pre-hooks of the step are about to run.
        """
        self._has_begun, self._in_hooks = True, hooks

    def has_hooks(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether an optimizer of torch's had step pre-hooks at the savepoint."""
        return id(optimizer) in self._contents and has_plain_step(optimizer)

    def is_unchanged(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether none of an optimizer's parameters was written to since the savepoint."""
        pairs = zip(self._owned, self._versions, strict=True)
        # A write increases the version counter, except in fused kernels and foreach kernels of DTensors.
        if any(e.target._version != version for e, version in pairs if e.optimizer is optimizer):
            return False
        contents = self._contents.get(id(optimizer))
        return contents is None or not contents.parameters_changed()

    def reason_for_no_update(self, without_step: Sequence[torch.optim.Optimizer], *, half: bool) -> str:
        """Return the reason why no update was made although all optimizers were called.

        If no optimizer has stepped, optimizer state is rolled back.

        Args:
            without_step: optimizers whose `step()` did nothing.
            half: whether other optimizers have stepped.

        Raises:
            OptimizerError: `half` is True, so the update is torn.
        """
        names = ", ".join(map(describe, without_step))
        if half:
            # Before the error, so that the Accumulator refuses to continue even if the error is caught.
            self.mark_torn()
            raise OptimizerError(
                f"{names}, but another optimizer stepped: half of the update was made. "
                "Load a checkpoint, and pass optimizers that step at every call."
            )
        self._rollback_states()  # not `rollback`, which would also reset a wrapper's own count of calls
        return f"the optimizer did not step: {names}"

    def free(self) -> None:
        """Free the snapshot, except weak references to state tensors."""
        self._groups, self._targets, self._versions, self._contents = [], [], [], {}
        self._has_savepoint = False
        for states in self._states:
            states.free()

    def rollback(self) -> bool:
        """Remove new state, and restore group options and all values that are not tensors.

        Returns:
            False if a tensor was written, or if it cannot be proved that none was.
        """
        # Not begun: the failure came before any optimizer ran.
        if not (self._has_savepoint and self._has_begun):
            return True
        try:
            if not self._rollback_states():
                return False
            # All are compared before one is restored, so that a changed one leaves all as they are.
            if not all(contents.is_unchanged() for contents in self._contents.values()):
                return False
            for contents in self._contents.values():
                contents.restore_numbers()
            return True
        except Exception:  # noqa: BLE001 - an unreadable object counts as changed; the step's error is raised
            return False

    def _rollback_states(self) -> bool:
        if not self._versions_prove_unchanged():
            return False
        states = [(o.state, each.by_key()) for o, each in zip(self._optimizers, self._states, strict=True)]
        if any(_changed(state.get(key), old) for state, by_key in states for key, old in by_key.items()):
            return False
        for state, by_key in states:
            # State that the step has made: Adam's buffers of its first step.
            for key in [key for key in state if key not in by_key]:
                del state[key]
            for key, old in by_key.items():
                _rollback_state(state[key], old)
        for optimizer, groups in zip(self._optimizers, self._groups, strict=True):
            for group, old_group in zip(optimizer.param_groups, groups, strict=True):
                # In place, because the optimizer and its schedulers refer to these dictionaries.
                group.clear()
                group.update(old_group)
        return True

    def _versions_prove_unchanged(self) -> bool:
        """Return True if version counters prove that no parameter was written, and no group was added."""
        if any(states.is_opaque for states in self._states):
            return False
        # If only hooks have run, `_contents` compares bits, so versions need not show every write.
        if self._versions_may_miss_writes() and not self._in_hooks:
            return False
        groups = [len(optimizer.param_groups) for optimizer in self._optimizers]
        # add_param_group() was called inside the step, e.g. by a hook.
        if groups != list(map(len, self._groups)):
            return False
        return [target._version for target in self._targets] == self._versions

    def _versions_may_miss_writes(self) -> bool:
        """Return whether a half-made step may have left all version counters unchanged.

        A fused kernel and a foreach step of DTensors do not increment versions. So if a second kernel or a
        post-hook fails, versions do not show that the first kernel has written.
        """
        if any(entry.group.get("foreach") and hasattr(entry.target, "device_mesh") for entry in self._owned):
            return True
        # One entry per kernel call: with more than one, the second may fail after the first has written.
        steps = {(id(e.optimizer), e.number, e.target.dtype, e.target.device) for e in self._owned}
        hooks = any(getattr(each, "_optimizer_step_post_hooks", None) for each in self._optimizers)
        after = hooks or _global_optimizer_post_hooks or not all(map(has_plain_step, self._stepped))
        return (len(steps) > 1 or bool(after)) and any(entry.group.get("fused") for entry in self._owned)


def has_plain_step(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer is one of torch's own, with the step of its class.

    A step that one of torch's schedulers has wrapped, to count its calls, is still plain.

    Examples:
        >>> sgd = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
        >>> has_plain_step(sgd)
        True
    """
    kind, step = type(optimizer), vars(optimizer).get("step")
    # By the module's name: a subclass of the user's may step differently.
    if not kind.__module__.startswith("torch.optim."):
        return False
    return step is None or (hasattr(step, "_wrapped_by_lr_sched") and step.__wrapped__ is kind.step)


class _States:
    """Snapshot of an optimizer's state: references to tensors with their versions, and all other values.

    Attributes:
        is_opaque: True if the state contains a value whose change would be missed: an object, a list, a dict.
    """

    def __init__(self) -> None:
        self.is_opaque = False
        self._keys: list[Any] = []
        self._names: list[tuple[Any, ...]] = []
        self._are_tensors: list[bool] = []
        self._references: list[weakref.ref[Tensor]] = []
        self._versions: list[int] = []
        self._plain_values: list[Any] = []

    def record(self, state: Mapping[Any, Any]) -> None:
        """Take the snapshot of the ``state`` of an optimizer, by parameter."""
        states = list(state.values())
        self._keys = list(state)
        self._versions = []
        if not states:  # before the first step, and in every window of SGD without momentum
            self._names, self._are_tensors, self._references, self._plain_values = [], [], [], []
            self.is_opaque = False
            return
        # An optimizer whose state is not a dict per parameter cannot be compared.
        if [each for each in states if not isinstance(each, dict)]:
            self.is_opaque = True
            return
        self._names = [tuple(each) for each in states]
        values = [value for each in states for value in each.values()]
        self._are_tensors = [isinstance(value, Tensor) for value in values]
        tensors = [value for value in values if isinstance(value, Tensor)]
        # Weak: a strong reference would keep the old tensor alive where an optimizer replaces it.
        self._references = [weakref.ref(tensor) for tensor in tensors]
        self._plain_values = [value for value in values if not isinstance(value, Tensor)]
        self.is_opaque = not all(isinstance(other, PLAIN) for other in self._plain_values)
        try:
            self._versions = [tensor._version for tensor in tensors]
        except RuntimeError:  # made in inference mode
            self.is_opaque = True

    def free(self) -> None:
        """Free the values that are not tensors; the weak references keep no tensor alive."""
        self._plain_values = []

    def by_key(self) -> dict[Any, dict[str, Any]]:
        """Return each parameter's state: name -> value, or (weak reference, version) for a tensor."""
        tensors, others = zip(self._references, self._versions, strict=True), iter(self._plain_values)
        values = (next(tensors) if is_tensor else next(others) for is_tensor in self._are_tensors)
        return {
            key: {name: next(values) for name in names}
            for key, names in zip(self._keys, self._names, strict=True)
        }


def _changed(state: Any, recorded: dict[str, Any]) -> bool:
    """Return whether a tensor of a parameter's state was written to, replaced or removed."""
    tensors = {name: value for name, value in recorded.items() if _is_tensor(value)}
    # Identity and version: a replaced tensor has a version of its own.
    return not isinstance(state, dict) or any(
        state.get(name) is None or state[name] is not reference() or state[name]._version != version
        for name, (reference, version) in tensors.items()
    )


def _rollback_state(state: Any, recorded: dict[str, Any]) -> None:
    """Remove new entries of a parameter's state, and restore the values that are not tensors."""
    for name in [name for name in state if name not in recorded]:
        del state[name]
    state.update({name: value for name, value in recorded.items() if not _is_tensor(value)})


def _is_tensor(recorded: Any) -> bool:
    return isinstance(recorded, tuple) and len(recorded) == 2 and isinstance(recorded[0], weakref.ref)
