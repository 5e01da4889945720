"""Trial calls of a Trainer's loss: calls outside micro-batches, after which the trainer is restored."""

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
from ..torch.window.participants.kept_tensors import SMALL_BYTES, CopyBeforeWrite, KeptTensor, can_be_kept

# Objects of these packages are not restored after a trial: a call of the loss does not change their state.
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
_DATA = frozenset({"train_dataset", "eval_dataset"})  # a loss only reads them, and they may be large
_DEEPEST, _LONGEST = 4, 4096  # limits of the snapshot: levels of containers, entries of one container


class LossCalls:
    """Participant of a window that restores the trainer after trial calls of its loss.

    The check of the first window also calls the loss. Values that a user's `compute_loss` appends, counts,
    averages or logs in such a trial must not remain in the trainer. A call is a trial unless the window has
    announced it, by `savepoint` before each micro-batch.

    Attributes:
        is_trial: True during a call outside the micro-batches of a window.
        ignores_checks: True, as forwards outside micro-batches are trials.

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
            trainer: the trainer to restore after a trial; None: restore nothing.
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
        """Expect one call, as a whole batch of coupled samples has no savepoint."""
        self._expects = True

    def savepoint(self) -> None:
        """Expect one call."""
        self._expects = True

    def rollback(self) -> bool:
        """Expect the call again; the effects of the failed one on the trainer stay."""
        return True

    def restart(self) -> None:
        """Expect a call."""
        self._expects = True

    def restore(self) -> None:
        """Expect no further call."""
        self._expects = False

    def commit(self) -> None:
        """Expect no further call."""
        self._expects = False

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: the Trainer saves no open window."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """No-op."""


@contextmanager
def _untouched(trainer: Trainer) -> Iterator[None]:
    """Restore the attributes of a trainer after this context, with the contents of the user's objects."""
    attributes, snapshot = vars(trainer), _Snapshot()
    before = dict(attributes)
    # Not the model, whose state the window and its checks restore.
    snapshot.seen |= {id(trainer), id(trainer.model), id(trainer.model_wrapped)}
    for name, value in before.items():
        if name not in _DATA:
            snapshot.take(value, 0)
    try:
        with CopyBeforeWrite(lambda: snapshot.large) if snapshot.large else nullcontext():
            yield
    finally:
        for restore in reversed(snapshot.restores):  # inner contents first
            restore()
        for name in attributes.keys() - before.keys():
            del attributes[name]
        attributes.update(before)


class _Snapshot:
    """Snapshot of the contents of values.

    Attributes:
        restores: functions that restore the contents.
        large: tensors that are copied only when written, such as a queue of embeddings.
        seen: ids of values that are already in the snapshot, or excluded from it.
    """

    def __init__(self) -> None:
        self.restores: list[Callable[[], Any]] = []
        self.large: list[KeptTensor] = []
        self.seen = set[int]()

    def take(self, value: Any, depth: int) -> None:
        """Add a value and its contents to the snapshot."""
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
        """Copy a small tensor now; a large one only when an operator writes into it."""
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
        entries: Any = dict(value) if is_table else list(value)
        self.restores.append(partial(_refill, value, entries))
        for each in entries.values() if is_table else entries:
            self.take(each, depth + 1)


@torch.no_grad()
def _write(tensor: Tensor, before: Tensor) -> None:
    if not torch.equal(tensor, before):  # a write changes the version that autograd checks
        tensor.copy_(before)


def _refill(value: Any, before: Any) -> None:
    """Restore the entries of a container in place, so that other references to it see them."""
    if len(value) == len(before) and all(a is b for a, b in zip(_flat(value), _flat(before), strict=True)):
        return
    value.clear()
    if isinstance(value, list | deque):
        value.extend(before)
    else:
        value.update(before)


def _flat(value: Any) -> list[Any]:
    return [*value.keys(), *value.values()] if isinstance(value, dict) else list(value)


def _is_of_host(value: Any) -> bool:
    if isinstance(value, type | FunctionType | ModuleType):
        return True
    return type(value).__module__.partition(".")[0] in _HOSTS
