"""What the optimizers' step changes, noted before it: a step that broke is told from one that did not begin.

Noted for every window, undone in hardly any: what is noted are lists over all parameters together.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from itertools import chain, compress
from operator import attrgetter, not_
from typing import Any

import torch
from torch import Tensor

from .gradients import Owned

_version = attrgetter("_version")


class BeforeStep:
    """Parameters, states and groups of optimizers: new states can be taken away again, moved ones be told.

    Nothing is kept alive by it: an optimizer may put new tensors in the place of its old ones.

    Args:
        optimizers: that make the update.
        owned: their parameters; may change in place.

    Examples:
        >>> layer = torch.nn.Linear(2, 1)
        >>> adam = torch.optim.Adam(layer.parameters())
        >>> before = BeforeStep([adam], [])
        >>> before.note()
        >>> adam.state[layer.weight]["step"] = torch.zeros(())
        >>> before.put_back(), dict(adam.state)
        (True, {})
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], owned: list[Owned]) -> None:
        self._optimizers, self._owned = optimizers, owned
        self._states = [_States() for _ in optimizers]

    def note(self) -> None:
        """Note how everything is now."""
        for states, optimizer in zip(self._states, self._optimizers, strict=True):
            states.note(optimizer.state)
        self._groups = [[dict(group) for group in o.param_groups] for o in self._optimizers]
        self._targets = [entry.target for entry in self._owned]
        self._versions = list(map(_version, self._targets))

    def put_back(self) -> bool:
        """Take new states, numbers and options of groups back if no tensor has moved; return whether."""
        states = [(o.state, known.by_key()) for o, known in zip(self._optimizers, self._states, strict=True)]
        if list(map(_version, self._targets)) != self._versions:
            return False
        if any(_moved(now.get(key), noted) for now, known in states for key, noted in known.items()):
            return False
        new = [(now, key) for now, known in states for key in now if key not in known]
        if new and self._is_hidden():
            return False
        for now, key in new:
            del now[key]
        for now, known in states:
            for key, noted in known.items():
                _put_back(now[key], noted)
        for optimizer, groups in zip(self._optimizers, self._groups, strict=True):
            for group, known in zip(optimizer.param_groups, groups, strict=True):
                group.clear()
                group.update(known)
        return True

    def _is_hidden(self) -> bool:
        """Whether part of an update may not show.

        A fused step does not move versions: the first of several does not show if the second one fails.
        """
        steps = {(id(e.optimizer), e.number, e.target.dtype, e.target.device) for e in self._owned}
        return len(steps) > 1 and any(entry.group.get("fused") for entry in self._owned)


class _States:
    """What the states of an optimizer hold: references to tensors with their versions, and other values."""

    def __init__(self) -> None:
        self._keys: list[Any] = []
        self._are_states: list[bool] = []
        self._names: list[tuple[Any, ...]] = []
        self._are_tensors: list[bool] = []
        self._references: list[weakref.ref[Tensor]] = []
        self._versions: list[int] = []
        self._others: list[Any] = []

    def note(self, state: Mapping[Any, Any]) -> None:
        """Note how a state is now."""
        states = list(state.values())
        versions = self._versions_of_known(states)
        self._versions = self._look(state, states) if versions is None else versions

    def _versions_of_known(self, states: list[Any]) -> list[int] | None:
        """The versions of the tensors, if they seem to be those of the last step (a third of a look's time).

        Whether each really is the same is looked at when the step has broken; one that is not has then moved.
        """
        if self._others or len(states) != len(self._keys):
            return None
        try:
            tensors = list(chain.from_iterable(map(dict.values, states)))
            versions = list(map(_version, tensors))
        except (TypeError, AttributeError):  # a state that is no dict, or holds other values as well
            return None
        known = self._references
        if len(tensors) != len(known) or (
            tensors and (tensors[0] is not known[0]() or tensors[-1] is not known[-1]())
        ):
            return None
        return versions

    def _look(self, state: Mapping[Any, Any], states: list[Any]) -> list[int]:
        """Note where each value stands; return the versions of the tensors among them."""
        self._keys = list(state)
        self._are_states = [isinstance(each, dict) for each in states]
        states = list(compress(states, self._are_states))
        self._names = list(map(tuple, states))
        values = list(chain.from_iterable(map(dict.values, states)))
        self._are_tensors = [isinstance(value, Tensor) for value in values]
        tensors = list(compress(values, self._are_tensors))
        self._references = list(map(weakref.ref, tensors))
        self._others = list(compress(values, map(not_, self._are_tensors)))
        return list(map(_version, tensors))

    def by_key(self) -> dict[Any, dict[str, Any] | None]:
        """Return by key what each state held; None of one that is no dict."""
        tensors, others = zip(self._references, self._versions, strict=True), iter(self._others)
        values = (next(tensors) if is_tensor else next(others) for is_tensor in self._are_tensors)
        names = iter(self._names)
        return {
            key: {name: next(values) for name in next(names)} if is_state else None
            for key, is_state in zip(self._keys, self._are_states, strict=True)
        }


def _moved(state: Any, noted: dict[str, Any] | None) -> bool:
    """Whether a tensor of a state was written, or another one put in its place."""
    if noted is None:
        return False
    tensors = {name: value for name, value in noted.items() if _is_tensor(value)}
    return not isinstance(state, dict) or any(
        state.get(name) is None or state[name] is not reference() or state[name]._version != version
        for name, (reference, version) in tensors.items()
    )


def _put_back(state: Any, noted: dict[str, Any] | None) -> None:
    if noted is None:
        return
    for name in [name for name in state if name not in noted]:
        del state[name]
    state.update({name: value for name, value in noted.items() if not _is_tensor(value)})


def _is_tensor(noted: Any) -> bool:
    return isinstance(noted, tuple) and len(noted) == 2 and isinstance(noted[0], weakref.ref)
