"""Calls of a Trainer's loss that are no micro-batches, which leave no trace in the trainer."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer

from ..torch.module_tables import buffers_of
from ..torch.window.participants.kept_tensors import SMALL_BYTES, KeptTensor, Writes, can_be_kept

# What these keep in a trainer is theirs, and data is no state.
_HOSTS = {
    "accelerate",
    "datasets",
    "numpy",
    "peft",
    "superbatch",
    "tokenizers",
    "torch",
    "transformers",
    "trl",
}
_HOSTS |= sys.stdlib_module_names
_DATA = frozenset({"train_dataset", "eval_dataset"})
_DEEPEST, _LONGEST = 4, 4096  # of containers inside each other; entries of one


class LossCalls:
    """Calls of a loss, as a `Participant`: one for each micro-batch counts, and the others are trials.

    The check of the first window evaluates the loss too. What a `compute_loss` of the user's own appends,
    counts, averages or logs in a trial would be in the trainer's metrics.

    Attributes:
        is_trial: the loss is evaluated, and no micro-batch of a window.
        ignores_checks: forwards outside micro-batches are trials.

    Examples:
        >>> calls = LossCalls()
        >>> calls.savepoint()
        >>> for _ in range(2):
        ...     with calls.one_of(None):
        ...         calls.is_trial
        False
        True
    """

    ignores_checks = True

    def __init__(self) -> None:
        self.is_trial = self._expects = False

    @contextmanager
    def one_of(self, trainer: Trainer | None) -> Iterator[None]:
        """Make one call of the loss in this context.

        Args:
            trainer: whose state a trial leaves as it was.
        """
        self.is_trial, self._expects = not self._expects, False
        try:
            if self.is_trial and trainer is not None:
                with _untouched(trainer):
                    yield
            else:
                yield
        finally:
            self.is_trial = False

    def begin(self) -> None:
        """Expect a whole batch whose samples are coupled, which has no savepoint."""
        self._expects = True

    def savepoint(self) -> None:
        """Expect one call."""
        self._expects = True

    def rollback(self) -> bool:
        """Expect the call again; what the first one has left is the user's."""
        return True

    def restart(self) -> None:
        """Expect a call."""
        self._expects = True

    def restore(self) -> None:
        """Expect no more."""
        self._expects = False

    def commit(self) -> None:
        """Expect no more."""
        self._expects = False

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: the Trainer saves no open window."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """No-op."""


@contextmanager
def _untouched(trainer: Trainer) -> Iterator[None]:
    """Restore the attributes of a trainer, and the state in those that are its user's."""
    attributes, notes = vars(trainer), _Notes()
    before = dict(attributes)
    notes.seen |= {id(trainer), id(trainer.model), id(trainer.model_wrapped)}
    for name, value in before.items():
        if name not in _DATA:
            notes.take(value, 0)
    try:
        with Writes(lambda: notes.large) if notes.large else nullcontext():
            yield
    finally:
        for restore in reversed(notes.restores):
            restore()
        for name in attributes.keys() - before.keys():
            del attributes[name]
        attributes.update(before)


class _Notes:
    """Contents of values as they are now.

    Attributes:
        restores: functions that bring the contents back.
        large: tensors that are copied only when written, such as a queue of embeddings.
        seen: ids of values that are not looked into.
    """

    def __init__(self) -> None:
        self.restores: list[Callable[[], Any]] = []
        self.large: list[KeptTensor] = []
        self.seen = set[int]()

    def take(self, value: Any, depth: int) -> None:
        """Note a value, and what it holds."""
        if id(value) in self.seen or depth > _DEEPEST or isinstance(value, nn.Parameter):
            return
        if isinstance(value, Tensor):
            self._tensor(value)
        elif isinstance(value, torch.Generator):
            self.restores.append(partial(value.set_state, value.get_state()))
        elif isinstance(value, nn.Module):
            for module in value.modules():
                self._table(module, depth)
                self._entries(buffers_of(module), depth)
        elif isinstance(value, dict | list | deque | set) and len(value) <= _LONGEST:
            self._entries(value, depth)
        elif hasattr(value, "__dict__") and not _is_of_host(value):
            self._table(value, depth)

    def _tensor(self, value: Tensor) -> None:
        self.seen.add(id(value))
        if value.nbytes <= SMALL_BYTES or not can_be_kept(value):
            self.restores.append(partial(_write, value, value.detach().clone()))
            return
        self.large.append(KeptTensor.of("", value))
        self.restores.append(self.large[-1].restore)

    def _table(self, value: Any, depth: int) -> None:
        if id(value) not in self.seen:
            self.seen.add(id(value))
            self._entries(vars(value), depth)

    def _entries(self, value: Any, depth: int) -> None:
        self.seen.add(id(value))
        is_table = isinstance(value, dict)
        kept: Any = dict(value) if is_table else list(value)
        self.restores.append(partial(_refill, value, kept))
        for each in kept.values() if is_table else kept:
            self.take(each, depth + 1)


@torch.no_grad()
def _write(tensor: Tensor, kept: Tensor) -> None:
    if not torch.equal(tensor, kept):
        tensor.copy_(kept)


def _refill(value: Any, kept: Any) -> None:
    if len(value) == len(kept) and all(a is b for a, b in zip(_flat(value), _flat(kept), strict=True)):
        return
    value.clear()
    if isinstance(value, list | deque):
        value.extend(kept)
    else:
        value.update(kept)


def _flat(value: Any) -> list[Any]:
    return [*value.keys(), *value.values()] if isinstance(value, dict) else list(value)


def _is_of_host(value: Any) -> bool:
    if isinstance(value, type | FunctionType | ModuleType):
        return True
    return type(value).__module__.partition(".")[0] in _HOSTS
