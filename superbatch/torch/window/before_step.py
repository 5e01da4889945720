"""Snapshot of optimizer state before a step, to tell a half-made step from one that never began.

Taken in every window, so it stores flat lists.
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
    "The last update broke inside the optimizer's step, so parameters and optimizer state are torn. Load the "
    "model, the optimizer and this Accumulator from a checkpoint."
)


class BeforeStep:
    """Snapshot of optimizer state and parameter versions: undoes new state, detects written tensors.

    It keeps no tensor of optimizer state alive: an optimizer may put new ones in their place.

    Args:
        optimizers: that make the update.
        owned: their parameters; may change in place.

    Examples:
        >>> layer = torch.nn.Linear(2, 1)
        >>> adam = torch.optim.Adam(layer.parameters())
        >>> before = BeforeStep([adam], [])
        >>> before.note()
        >>> before.begin()
        >>> adam.state[layer.weight]["step"] = torch.zeros(())
        >>> before.put_back(), dict(adam.state)
        (True, {})
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], owned: list[ManagedParameter]) -> None:
        # Both: the hooks run on the wrapper that the user steps, the tensors belong to the wrapped
        # optimizers.
        self._stepped = list(optimizers)
        self._optimizers = [leaf for optimizer in optimizers for leaf in leaves_of(optimizer)]
        self._owned = owned
        self._all = list(dict.fromkeys((*self._stepped, *self._optimizers)))
        self._contents: dict[int, Contents] = {}  # by identity: not torch's, or with hooks
        self._states = [_States() for _ in self._optimizers]
        self._groups: list[list[dict[str, Any]]] = []
        self._targets: list[Tensor] = []
        self._versions: list[int] = []
        self._is_noted = False
        self._has_begun = self._in_hooks = self._is_torn = False

    def tear(self) -> None:
        """Note that half of an update was made."""
        self._is_torn = True

    def resume(self) -> None:
        """Note that a state was loaded, so that updates may continue."""
        self._is_torn = False

    def require_whole(self) -> None:
        """Check that no half of an update was made since a state was loaded.

        Raises:
            OptimizerError: one was.
        """
        if self._is_torn:
            raise OptimizerError(_TORN)

    def raise_torn(self, error: BaseException) -> None:
        """Note that half of an update was made, and raise an error that says so.

        Args:
            error: of the optimizer's step, or of a hook after it.

        Raises:
            OptimizerError: on the first call, if `error` is an `Exception`; KeyboardInterrupt and SystemExit
                keep their type.
        """
        known, self._is_torn = self._is_torn, True
        # Only once: a later failure in the same window is not another torn update.
        if isinstance(error, Exception) and not known:
            raise OptimizerError(_TORN) from error

    def note(self) -> None:
        """Record the present state."""
        # Empty first: if a copy below fails for lack of memory, an older snapshot must not be used.
        self._is_noted, self._groups = False, []
        for states, optimizer in zip(self._states, self._optimizers, strict=True):
            states.note(optimizer.state)
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
        self._is_noted, self._has_begun = True, False

    def begin(self, *, hooks: bool = False) -> None:
        """Note that an optimizer is about to step: what fails earlier has moved nothing.

        Args:
            hooks: the hooks before its step are about to run, and not yet the step.
        """
        self._has_begun, self._in_hooks = True, hooks

    def has_hooks(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether one of torch's optimizers had hooks before its step when `note` was called."""
        return id(optimizer) in self._contents and has_plain_step(optimizer)

    def still(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether none of an optimizer's parameters has been written to since `note`."""
        pairs = zip(self._owned, self._versions, strict=True)
        # An in-place write moves the version counter, also in a foreach kernel.
        if any(e.target._version != version for e, version in pairs if e.optimizer is optimizer):
            return False
        contents = self._contents.get(id(optimizer))
        return contents is None or not contents.parameters_moved()

    def not_made(self, idle: Sequence[torch.optim.Optimizer], *, half: bool) -> str:
        """Return why no update was made although all optimizers were called.

        Args:
            idle: optimizers whose `step()` did nothing. If all did nothing, their state is rolled back.
            half: others have stepped.

        Raises:
            OptimizerError: others have stepped.
        """
        names = ", ".join(map(describe, idle))
        if half:
            # Before the error, so that the Accumulator refuses to continue even if the error is caught.
            self.tear()
            raise OptimizerError(
                f"{names}, but another optimizer stepped: half of the update was made. "
                "Load a checkpoint, and pass optimizers that step at every call."
            )
        self._put_back_states()  # a wrapper's own count of calls stays
        return f"the optimizer did not step: {names}"

    def forget(self) -> None:
        """Free the snapshot, except weak references to state tensors."""
        self._groups, self._targets, self._versions, self._contents = [], [], [], {}
        self._is_noted = False
        for states in self._states:
            states.forget()

    def put_back(self) -> bool:
        """Undo new state, group options and all values but tensors.

        Returns:
            False if a tensor was written, or if that cannot be told.
        """
        # Not begun: the failure came before any optimizer ran.
        if not (self._is_noted and self._has_begun):
            return True
        try:
            if not self._put_back_states():
                return False
            # All are compared before one is changed: a partial rollback would be a third state.
            if not all(contents.same() for contents in self._contents.values()):
                return False
            for contents in self._contents.values():
                contents.put_back()
            return True
        except Exception:  # noqa: BLE001 - an object cannot be read: the error of the step is the one to raise
            return False

    def _put_back_states(self) -> bool:
        if not self._can_be_told():
            return False
        states = [(o.state, known.by_key()) for o, known in zip(self._optimizers, self._states, strict=True)]
        if any(_moved(state.get(key), noted) for state, known in states for key, noted in known.items()):
            return False
        for state, known in states:
            # State that the step has made: Adam's buffers of its first step.
            for key in [key for key in state if key not in known]:
                del state[key]
            for key, noted in known.items():
                _put_back(state[key], noted)
        for optimizer, groups in zip(self._optimizers, self._groups, strict=True):
            for group, known in zip(optimizer.param_groups, groups, strict=True):
                # In place: the optimizer and schedulers hold these very dictionaries.
                group.clear()
                group.update(known)
        return True

    def _can_be_told(self) -> bool:
        """Return True if unchanged version counters prove that no parameter and no group has changed."""
        # Before the step itself only hooks have run, and what they write to is compared bit by bit.
        if (self._is_hidden() and not self._in_hooks) or any(known.is_opaque for known in self._states):
            return False
        groups = [len(optimizer.param_groups) for optimizer in self._optimizers]
        # add_param_group() was called inside the step, e.g. by a hook.
        if groups != list(map(len, self._groups)):
            return False
        return [target._version for target in self._targets] == self._versions

    def _is_hidden(self) -> bool:
        """Return whether part of an update may be invisible in versions.

        A fused step does not move versions: it does not show if a second one fails, or a hook after it. Nor
        does a step of lists of DTensors.
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

    Torch's schedulers wrap that step to count it.

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
    """Contents of the states of an optimizer: references to tensors with their versions, and other values.

    Attributes:
        is_opaque: there is something whose change would not be seen: an object, a list, a dict in a state.
    """

    def __init__(self) -> None:
        self.is_opaque = False
        self._keys: list[Any] = []
        self._names: list[tuple[Any, ...]] = []
        self._are_tensors: list[bool] = []
        self._references: list[weakref.ref[Tensor]] = []
        self._versions: list[int] = []
        self._others: list[Any] = []

    def note(self, state: Mapping[Any, Any]) -> None:
        """Record the present values of a state."""
        states = list(state.values())
        self._keys = list(state)
        self._versions = []
        # Flat empty lists cost nothing, and SGD without momentum takes this path in every window.
        if not states:  # before the first step, and of SGD without momentum
            self._names, self._are_tensors, self._references, self._others = [], [], [], []
            self.is_opaque = False
            return
        # Not a dict per parameter: nothing is known about such a state.
        if [each for each in states if not isinstance(each, dict)]:
            self.is_opaque = True
            return
        self._names = [tuple(each) for each in states]
        values = [value for each in states for value in each.values()]
        self._are_tensors = [isinstance(value, Tensor) for value in values]
        tensors = [value for value in values if isinstance(value, Tensor)]
        # Weak: a strong reference would keep the old tensor alive where an optimizer replaces it.
        self._references = [weakref.ref(tensor) for tensor in tensors]
        self._others = [value for value in values if not isinstance(value, Tensor)]
        self.is_opaque = not all(isinstance(other, PLAIN) for other in self._others)
        try:
            self._versions = [tensor._version for tensor in tensors]
        except RuntimeError:  # made in inference mode
            self.is_opaque = True

    # Not the references: weak ones keep nothing alive.
    def forget(self) -> None:
        """Free other values than tensors, which nothing else keeps alive here."""
        self._others = []

    def by_key(self) -> dict[Any, dict[str, Any]]:
        """Return by key what each state held."""
        tensors, others = zip(self._references, self._versions, strict=True), iter(self._others)
        values = (next(tensors) if is_tensor else next(others) for is_tensor in self._are_tensors)
        return {
            key: {name: next(values) for name in names}
            for key, names in zip(self._keys, self._names, strict=True)
        }


def _moved(state: Any, noted: dict[str, Any]) -> bool:
    """Return whether a tensor of a state was written, or another one put in its place."""
    tensors = {name: value for name, value in noted.items() if _is_tensor(value)}
    # Identity and version: a replaced tensor has a version of its own.
    return not isinstance(state, dict) or any(
        state.get(name) is None or state[name] is not reference() or state[name]._version != version
        for name, (reference, version) in tensors.items()
    )


def _put_back(state: Any, noted: dict[str, Any]) -> None:
    for name in [name for name in state if name not in noted]:
        del state[name]
    state.update({name: value for name, value in noted.items() if not _is_tensor(value)})


def _is_tensor(noted: Any) -> bool:
    return isinstance(noted, tuple) and len(noted) == 2 and isinstance(noted[0], weakref.ref)
