"""State that a forward changes, other than trained parameters; restored if a window is discarded.

This state is in buffers of all modules and in frozen parameters (the teacher of a moving average). It is also
in plain attributes, containers and objects, and in the closure of the loss function (see `reached`).

Copying all of it in every window would be slow, so the cost depends on the state that has changed so far:

* Windows 1, 4, 16, 64, ... inspect everything: all bindings, small tensors, and a few values of large ones.
* The other windows copy only state that has changed before, and read the version counters of other tensors.
* The first-window check copies a large tensor when an operation is about to write to it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from .bindings import NOTHING, UNHELD, copied, is_plain, tensors_of
from .bindings_at_begin import BindingsAtBegin, RecordedTable
from .buffers import BufferKeeper
from .kept_tensors import SMALL_BYTES, CopyBeforeWrite, KeptTensor, can_be_kept, copy_or_trace, version
from .last_inspection import LastInspection
from .not_restored import may_be_state, warn_of_not_restored, warn_of_possibly_changed
from .reached import Table, is_metric, reach
from .recorded_bindings import RecordedBindings
from .replacing import replace_in
from .snapshot import generator_moved, generator_restorer
from .state_history import ChangedState, StateHistory
from .watched import VersionCounters, WatchedTensors

MOST_BYTES = 1 << 26  # of copies of tensors that have never changed
MOST_SUMMED = 1 << 28  # bytes of tensors that are summed, because a write by `.data` or NumPy has no version
_NONE = VersionCounters()


class ForwardStateKeeper:
    """Keeper of the state that a forward may change: ``begin()``, then ``commit()`` or ``restore()``.

    Args:
        models: the models that are trained.
        functions: the loss function, or nothing.
        original: a keeper to share the history with; see `new_keeper`.

    Attributes:
        history: the state that has changed so far, which copies of this keeper share.
        names: names of all modules, from the last search.

    Examples:
        >>> import torch
        >>> class Centered(nn.Module):
        ...     __module__, center = "training", torch.zeros(())  # not a class of this library
        ...     def forward(self, x):
        ...         self.center = 0.9 * self.center + 0.1 * x.mean()
        ...         return x - self.center
        >>> model = Centered()
        >>> keeper = ForwardStateKeeper([model])
        >>> keeper.begin()
        >>> _ = model(torch.ones(3))
        >>> keeper.changed()
        True
        >>> keeper.restore()
        >>> float(model.center), keeper.changed()
        (0.0, False)
    """

    def __init__(
        self,
        models: Iterable[nn.Module],
        functions: Iterable[Callable[..., Any] | None] = (),
        *,
        original: ForwardStateKeeper | None = None,
    ) -> None:
        self._models = tuple(models)
        self._functions = tuple(function for function in functions if function is not None)
        self.history = StateHistory() if original is None else original.history
        self._buffers = BufferKeeper(self._models)
        self.names: dict[nn.Module, str] = {} if original is None else original.names
        self._buffers.add(self.names)
        self._original = original
        self._versions_before_check: list[int] = []
        self._bindings = RecordedBindings()
        self._clear()

    def new_keeper(self) -> ForwardStateKeeper:
        """Return another keeper of the same state, for one micro-batch or for a check in an open window."""
        return ForwardStateKeeper(self._models, self._functions, original=self)

    def replace_tensors(self, kind: type[Tensor], make: Callable[[Tensor], Tensor]) -> None:
        """Replace tensors of a class in all bindings, e.g. those of a virtual batch by real ones."""
        replace_in(reach(self._models, self._functions), self._bindings.by_table_and_key(), kind, make)

    # -- a window ------------------------------------------------------------------------------------------

    def begin(self, *, check: bool = False) -> None:
        """Record the state; earlier records are removed first.

        Args:
            check: True for the first-window check, which runs in `watching`: large tensors and trained
                parameters are copied when they are written.
        """
        if self._has_begun:
            self._clear()
        self._has_begun = True
        if check and self._original is not None:
            self._versions_before_check = self._original.counters()  # `end_check` ignores later writes
        if check or self.history.windows + 1 == self.history.next_inspection:
            self._inspect(check=check)
        else:
            self._record_known()
        if self._buffers.owners:
            self._buffers.begin()

    def commit(self) -> None:
        """Free the copies at the end of a window, and learn which state it has changed."""
        if self._has_inspected:
            self._learn()
            reached = reach(self._models, self._functions)
            self.history.last_inspection = LastInspection(reached.tables)
            self.history.bindings_at_begin = BindingsAtBegin(reached, self.history.bindings)
            self.history.next_inspection = 4 * (self.history.windows + 1)
        elif self._counters is not _NONE:
            self._learn_watched()
        self.history.windows += 1
        if self._buffers.owners:
            self._buffers.commit()
        self._clear()

    def restore(self, *, discarded: bool = True) -> None:
        """Restore the state at `begin`, with the identity of each object; `discarded`: warn of lost state."""
        unrestorable = self.unrestorable()
        self._record_bindings_at_begin()
        self._learn_of(kept for kept in self._tensors.values() if kept.changed_without_copy())
        self._learn_watched()
        counts = self._loss_state_changed()
        self._buffers.restore()
        for kept in self._tensors.values():
            kept.restore()
        self._bindings.restore(counts=counts)
        for _, restore in self._generators:
            restore()
        possibly_changed = may_be_state(self._changed_since_inspection(), self._bindings.names())
        self._learn_possibly_changed()
        if discarded:  # a window that runs again changes this state once more
            warn_of_not_restored(unrestorable)
            warn_of_possibly_changed(self.not_warned_of(possibly_changed))

    def _record_bindings_at_begin(self) -> None:
        """Record the bindings at the beginning of the window, and learn which of them it has changed."""
        at_begin, self._at_begin = self._at_begin, []
        if at_begin:
            self._bindings.record_earlier((one.table, one.unwritten_values()) for one in at_begin)
            self._learn_bindings()

    def unrestorable(self) -> list[str]:
        """Return names of state that has changed since `begin` and cannot be restored without a copy."""
        written = [self.history.watched.name_of(tensor) for tensor in self._counters.written()]
        kept = [kept.name for kept in self._tensors.values() if kept.changed_without_copy()]
        return kept + written + [self._name_of(*one) for one in self._buffers.unrestorable()]

    def undetectable(self) -> list[str]:
        """Return names of tensors so large that a write through ``.data`` cannot be detected."""
        return [kept.name for kept in self._tensors.values() if kept.is_undetectable()]

    def possibly_changed(self) -> list[str]:
        """Return names of state that differs from the last inspection, changed here or by other code."""
        return list(dict.fromkeys(table.name_of(key) for table, key, _ in self._changed_since_inspection()))

    def _changed_since_inspection(self) -> list[tuple[Table, Any, Any]]:
        """Return bindings that this object has not recorded, as (table, key, present value)."""
        if self._has_inspected:  # then all bindings are recorded
            return []
        tables = reach(self._models, self._functions).tables
        changed = self.history.last_inspection.changed(tables, self._bindings)
        return [one for one in changed if id(one[2]) not in self._tensors]  # those have a copy

    def _learn_possibly_changed(self) -> None:
        for table, key, value in self._changed_since_inspection():
            self.history.record(table, key, state=True)
            found = [one for one in tensors_of(table.name_of(key), value) if can_be_kept(one[1])]
            self._learn_of(KeptTensor.of(name, one, of_loss_fn=table.of_loss_fn) for name, one in found)

    def changed(self) -> bool:
        """Return whether anything differs from `begin`."""
        self._record_bindings_at_begin()
        return (
            self._buffers.changed()
            or any(kept.has_changed() for kept in self._tensors.values())
            or any(generator_moved(value, restore) for value, restore in self._generators)
            or any(True for _ in self._changed_bindings())
            or bool(self._counters.written())
            or bool(self._changed_since_inspection())
        )

    # -- the first-window check ----------------------------------------------------------------------------

    def watching(self) -> CopyBeforeWrite:
        """Return a context in which tensors are copied when an operation is about to write to them."""
        return CopyBeforeWrite(self._tensors.values)

    def changes(self) -> list[ChangedState]:
        """Return the state that differs from `begin`."""
        found = [ChangedState(self._name_of(*one), sure=True) for one in self._buffers.changed_floating()]
        changed = [kept for kept in self._tensors.values() if kept.has_changed()]
        found += [ChangedState(kept.name, sure=not kept.trained and kept.array is None) for kept in changed]
        # Not sure, because a binding may be a count or a result.
        found += [ChangedState(table.name_of(key), sure=False) for table, key, *_ in self._changed_bindings()]
        return list(dict.fromkeys(found))

    def contents(self) -> dict[str, Any]:
        """Return copies of the present content of changed bindings and tensors, by name."""
        found = {kept.name: kept.content() for kept in self._tensors.values() if kept.has_changed()}
        changed = self._bindings.changed(counts=True)
        return found | {table.name_of(key): copied(value) for table, key, _, value in changed}

    def not_warned_of(self, names: Iterable[str]) -> list[str]:
        """Return the names that were not passed to this method before, without those of metrics."""
        metrics = tuple(f"{name}." for module, name in self.names.items() if is_metric(module))
        return self.history.not_warned_of(name for name in names if not name.startswith(metrics))

    def learn(self) -> None:
        """Learn the state that the check has changed; other state need not be copied in the first window."""
        self._learn()
        self.history.checked = True

    def end_check(self) -> None:
        """Restore the state before the check, and free the copies."""
        try:
            self.restore()
        finally:  # also after a failed restore, because the copies take memory
            self._clear()
            if self._original is not None:
                self._original.ignore_writes_since(self._versions_before_check)

    def counters(self) -> list[int]:
        """Return the version counters of all recorded tensors."""
        kept = [version(kept.tensor) for kept in self._tensors.values()]
        return [*self._counters.read(), *kept, *self._buffers.counters()]

    def ignore_writes_since(self, before: list[int]) -> None:
        """Ignore writes since `counters` returned `before`: a check made them and restored the content."""
        watched, kept = len(self._counters.read()), len(self._tensors)
        self._counters.ignore_writes_since(before[:watched])
        self._buffers.ignore_writes_since(before[watched + kept :])
        for one, was in zip(self._tensors.values(), before[watched : watched + kept], strict=True):
            one.version += version(one.tensor) - was

    # -- a window that is saved ----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state that `restore` would restore, by name, as tensors and plain containers."""
        self._record_bindings_at_begin()
        return {
            "buffers": self._buffers.state(),
            "tensors": {
                kept.name: kept.copy if kept.copy is not None else kept.alias
                for kept in self._tensors.values()
                if kept.has_changed()
            },
            "bindings": {
                table.name_of(key): [] if before is NOTHING else [self._at_begin_copy(before)]
                for table, key, before, _ in self._changed_bindings()
                if before is NOTHING or is_plain(before)
            },
        }

    def _at_begin_copy(self, value: Any) -> Any:
        """Return a copy of a bound value, with the content that its tensors had at `begin`."""
        if isinstance(value, tuple):
            return tuple(map(self._at_begin_copy, value))
        kept = self._tensors.get(id(value))  # has the content at `begin`, if it was copied
        return copied(value if kept is None or kept.copy is None else kept.copy)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make `restore` restore a state of `state_dict`; call it after `begin`."""
        self._buffers.load_state(state["buffers"])
        tensors, bindings = state["tensors"], state["bindings"]
        if not tensors and not bindings:  # avoids the search over all modules
            return
        by_name = {kept.name: kept for kept in self._tensors.values()}
        for table in reach(self._models, self._functions).tables:
            for key, value in table.read().items():
                for name, one in tensors_of(table.name_of(key), value):
                    if name in tensors and name not in by_name and can_be_kept(one):
                        kept = KeptTensor.of(name, one, of_loss_fn=table.of_loss_fn)
                        by_name[name] = self._tensors[id(one)] = kept
            self._bindings.record_saved(table, bindings)
        for name, content in tensors.items():
            if name in by_name:
                by_name[name].copy = content.to(by_name[name].tensor.device, copy=True)

    # -- recording and learning ----------------------------------------------------------------------------

    def _clear(self) -> None:
        self._has_begun = self._has_inspected = False
        if self._bindings.used:  # otherwise the empty object is used again
            self._bindings = RecordedBindings()
        self._at_begin: list[RecordedTable] = []
        self._tensors: dict[int, KeptTensor] = {}
        self._generators: list[tuple[Any, Callable[[], object]]] = []
        self._counters = _NONE

    def _inspect(self, *, check: bool) -> None:
        """Record everything that the models and the loss function can reach."""
        history, found = self.history, reach(self._models, self._functions)
        self._has_inspected = True
        self.names = found.names
        self._buffers.add(self.names)
        in_buffers = self._buffers.covers()
        first = not history.windows  # a large tensor that appears later may be a result, and is not watched
        for table in found.tables:
            for key, value in self._bindings.record(table, first=first).items():
                for name, one in tensors_of(table.name_of(key), value):
                    wanted = check or not getattr(one, "requires_grad", False)
                    if wanted and id(one) not in self._tensors and can_be_kept(one):
                        kept = KeptTensor.of(name, one, of_loss_fn=table.of_loss_fn)
                        if not in_buffers(one, kept.tensor):
                            self._tensors[id(one)] = kept
                if not isinstance(value, Tensor) and (restore := generator_restorer(value)) is not None:
                    self._generators.append((value, restore))
        new = ((table, dict.fromkeys(table.read(), UNHELD)) for table in found.buffer_tables(inside=True))
        self._bindings.record_earlier(new)  # finds buffers that the window registers
        history.generators = [value for value, _ in self._generators]
        self._copy(check=check)
        history.watched = WatchedTensors(
            {
                identity: (weakref.ref(kept.tensor), kept.name, kept.of_loss_fn)
                for identity, kept in self._tensors.items()
                if not (kept.trained or identity in history.tensors or kept.tensor.is_inference())
                and kept.array is None  # a NumPy array has no version counter
                and (first or kept.frozen or kept.alias.nbytes <= SMALL_BYTES)
            }
        )

    def _copy(self, *, check: bool) -> None:
        """Copy or trace the recorded tensors.

        Frozen parameters are copied only in a first window without a check. The limit is the size of the
        trained parameters, because the teacher of a moving average is as large as its student.
        """
        unknown = not (self.history.windows or self.history.checked or check)
        trained = (p for model in self._models for p in model.parameters() if p.requires_grad)
        copy_or_trace(
            self._tensors.values(),
            self.history.tensors,
            frozen_bytes=max(SMALL_BYTES, sum(p.nbytes for p in trained)) if unknown else 0,
            other_bytes=MOST_BYTES,
            sum_bytes=MOST_SUMMED if unknown else 0,
        )

    def _record_known(self) -> None:
        """Record the state that has changed in earlier windows."""
        history = self.history
        for table, state in history.bindings.values():
            self._bindings.record(table, first=state)
        for identity, (reference, name, of_loss_fn) in list(history.tensors.items()):
            one = reference()
            if one is None:  # the tensor was deleted
                del history.tensors[identity]
            elif can_be_kept(one):
                self._tensors[identity] = kept = KeptTensor.of(name, one, of_loss_fn=of_loss_fn)
                kept.copy_now()
        self._generators = [(v, r) for v in history.generators if (r := generator_restorer(v)) is not None]
        self._at_begin = history.bindings_at_begin.begin()
        if history.watched.entries:
            self._counters = VersionCounters(history.watched)

    def _learn(self) -> None:
        """Learn the state that has changed since `begin`, to copy it from now on."""
        self._learn_bindings()
        self._learn_of(kept for kept in self._tensors.values() if kept.has_changed())

    def _learn_bindings(self) -> None:
        for table, key, before, _ in self._bindings.changed(counts=True):
            self.history.record(table, key, state=isinstance(before, Tensor | tuple))

    def _learn_of(self, changed: Iterable[KeptTensor]) -> None:
        for kept in changed:
            self.history.tensors[id(kept.holder)] = (weakref.ref(kept.holder), kept.name, kept.of_loss_fn)
            self.history.watched.remove([kept.tensor])

    def _learn_watched(self) -> None:
        self.history.tensors |= self.history.watched.remove(self._counters.written())

    def _name_of(self, module: nn.Module, buffer: str) -> str:
        return f"{self.names.get(module, '')}.{buffer}".lstrip(".")

    def _changed_bindings(self) -> Iterable[tuple[Table, Any, Any, Any]]:
        return self._bindings.changed(counts=self._loss_state_changed())

    def _loss_state_changed(self) -> bool:
        """Return whether a tensor or float outside of modules, which the loss function uses, has changed."""
        tensor = any(kept.of_loss_fn and kept.has_changed() for kept in self._tensors.values())
        return tensor or self._bindings.any_of_loss_fn()
