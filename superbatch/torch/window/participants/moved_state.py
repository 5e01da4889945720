"""State that a forward changes beside parameters with a gradient, restored if a window is discarded.

This state is in buffers of all modules, frozen parameters (the teacher of a moving average), tensors and
numbers in plain attributes, containers and objects, and the closure of the loss function (see `reached`).

The cost depends on the state that has changed so far:

* Windows 1, 4, 16, 64, ... inspect everything: all bindings, small tensors, and a few values of large ones.
* The other windows copy only state that has changed before, and read the version counters of other tensors.
* The first-window check copies a large tensor when an operation is about to write to it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from .begin_look import BeginLook, Noted
from .bindings import NOTHING, UNHELD, copied, is_plain, tensors_of
from .bound_names import BoundNames
from .buffers import BufferKeeper
from .kept_tensors import SMALL_BYTES, KeptTensor, Writes, can_be_kept, version
from .known_state import Known, Moving
from .last_look import LastLook
from .not_restored import may_be_state, warn_of_lost, warn_of_unsure
from .reached import Table, is_metric, reach
from .replacing import replace_in
from .snapshot import generator_moved, generator_restorer
from .watched import Counters, Watched

MOST_BYTES = 1 << 26  # of copies of tensors that have never changed
MOST_ADDED_UP = 1 << 28  # bytes that are summed, because a write by `.data` or NumPy has no version
_NONE = Counters()


class MovedState:
    """Keeper of the state that a forward may change: ``begin()``, then ``commit()`` or ``restore()``.

    Args:
        models: the models that are trained.
        functions: the loss function, or nothing.

    Examples:
        >>> import torch
        >>> class Centered(nn.Module):
        ...     __module__, center = "training", torch.zeros(())  # not a class of this library
        ...     def forward(self, x):
        ...         self.center = 0.9 * self.center + 0.1 * x.mean()
        ...         return x - self.center
        >>> model = Centered()
        >>> keeper = MovedState([model])
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
        known: Known | None = None,
        names: dict[nn.Module, str] | None = None,
        original: MovedState | None = None,
    ) -> None:
        self._models = tuple(models)
        self._functions = tuple(function for function in functions if function is not None)
        self._known = Known() if known is None else known
        self._buffers = BufferKeeper(self._models)
        self._names: dict[nn.Module, str] = {} if names is None else names
        self._buffers.add(self._names)
        self._original = original
        self._passed: list[int] = []
        self._bound = BoundNames()
        self._forget()

    def twin(self) -> MovedState:
        """Return another keeper of the same state, for one micro-batch or for a check in an open window."""
        return MovedState(self._models, self._functions, known=self._known, names=self._names, original=self)

    def replace_tensors(self, kind: type[Tensor], make: Callable[[Tensor], Tensor]) -> None:
        """Replace tensors of a class in all bindings, e.g. those of a virtual batch by real ones."""
        replace_in(reach(self._models, self._functions), self._bound.by_place(), kind, make)

    # -- a window ------------------------------------------------------------------------------------------

    def begin(self, *, check: bool = False) -> None:
        """Record the state, and forget earlier records first.

        Args:
            check: the first-window check begins, inside of `watching`: large tensors, and trained parameters
                too, are copied when they are written.
        """
        if self._noted:
            self._forget()
        self._noted = True
        if check and self._original is not None:  # `pass_over` removes the check's writes at its end
            self._passed = self._original.counters()
        if check or self._known.windows + 1 == self._known.next_look:
            self._look(check=check)
        else:
            self._take_known()
        if self._buffers.owners:
            self._buffers.take()

    def commit(self) -> None:
        """Free the copies at the end of a window, and learn which state it has changed."""
        if self._looked:
            self._learn()
            found = reach(self._models, self._functions)
            self._known.last_look = LastLook(found.tables)
            self._known.begin_look = BeginLook(found, self._known.bindings)
            self._known.next_look = 4 * (self._known.windows + 1)
        elif self._counters is not _NONE:
            self._learn_watched()
        self._known.windows += 1
        if self._buffers.owners:
            self._buffers.release()
        self._forget()

    def restore(self, *, discarded: bool = True) -> None:
        """Restore the state at `begin`, identities included; if `discarded`, warn of state without a copy."""
        lost = self.lost()
        self._recall()
        self._learn_of(kept for kept in self._tensors.values() if kept.is_lost())
        self._learn_watched()
        loose = self._loose_state_moved()
        self._buffers.restore()
        for kept in self._tensors.values():
            kept.restore()
        self._bound.restore(loose=loose)
        for _, restore in self._generators:
            restore()
        unsure = may_be_state(self._unlike(), self._bound.names())
        self._learn_unsure()
        if discarded:  # a window that runs again changes this state once more
            warn_of_lost(lost)
            warn_of_unsure(self.not_said(unsure))

    def _recall(self) -> None:
        """Record the bindings at the beginning of the window, and learn which of them it has changed."""
        recalled, self._at_begin = self._at_begin, []
        if recalled:
            self._bound.recall((one.table, one.unwritten()) for one in recalled)
            self._learn_bound()

    def lost(self) -> list[str]:
        """Return names of state that has changed since `begin` and cannot be restored without a copy."""
        written = [self._known.watched.name_of(tensor) for tensor in self._counters.written()]
        kept = [kept.name for kept in self._tensors.values() if kept.is_lost()]
        return kept + written + [self._name_of(*one) for one in self._buffers.lost()]

    def unseen(self) -> list[str]:
        """Return names of tensors so large that a write through ``.data`` cannot be detected."""
        return [kept.name for kept in self._tensors.values() if kept.is_unseen()]

    def unsure(self) -> list[str]:
        """Return names of state that differs from the last inspection, changed here or by other code."""
        return list(dict.fromkeys(table.name_of(key) for table, key, _ in self._unlike()))

    def _unlike(self) -> list[tuple[Table, Any, Any]]:
        if self._looked:  # this window has inspected everything itself
            return []
        tables = reach(self._models, self._functions).tables
        unlike = self._known.last_look.unlike(tables, self._bound)
        return [one for one in unlike if id(one[2]) not in self._tensors]  # restored by their content

    def _learn_unsure(self) -> None:
        for table, key, value in self._unlike():
            self._known.note(table, key, state=True)
            found = [one for one in tensors_of(table.name_of(key), value) if can_be_kept(one[1])]
            self._learn_of(KeptTensor.of(name, one, loose=table.loose) for name, one in found)

    def changed(self) -> bool:
        """Return whether anything differs from `begin`."""
        self._recall()
        return (
            self._buffers.changed()
            or any(kept.moved() for kept in self._tensors.values())
            or any(generator_moved(value, restore) for value, restore in self._generators)
            or any(True for _ in self._bound.rebound(loose=self._loose_state_moved()))
            or bool(self._counters.written())
            or bool(self._unlike())
        )

    # -- the first-window check ----------------------------------------------------------------------------

    def watching(self) -> Writes:
        """Return a context in which tensors are copied when an operation is about to write to them."""
        return Writes(self._tensors.values)

    def moving(self) -> list[Moving]:
        """Return the state that differs from `begin`."""
        found = [Moving(self._name_of(module, name), sure=True) for module, name in self._buffers.moved()]
        moved = [kept for kept in self._tensors.values() if kept.moved()]
        found += [Moving(kept.name, sure=not kept.trained and kept.array is None) for kept in moved]
        loose = self._loose_state_moved()
        found += [  # may be counts or results
            Moving(table.name_of(key), sure=False) for table, key, *_ in self._bound.rebound(loose=loose)
        ]
        return list(dict.fromkeys(found))

    def contents(self) -> dict[str, Any]:
        """Return copies of the present content of changed bindings and tensors, by name."""
        found = {kept.name: kept.content() for kept in self._tensors.values() if kept.moved()}
        return found | {
            table.name_of(key): copied(value) for table, key, _, value in self._bound.rebound(loose=True)
        }

    def not_said(self, names: Iterable[str]) -> list[str]:
        """Return the names that were not passed to this method before, without those of metrics."""
        metrics = tuple(f"{name}." for module, name in self._names.items() if is_metric(module))
        return self._known.not_said(name for name in names if not name.startswith(metrics))

    def learn(self) -> None:
        """Learn the state that the check has changed; other state need not be copied in the first window."""
        self._learn()
        self._known.checked = True

    def end_check(self) -> None:
        """Restore the state before the check, and free the copies."""
        try:
            self.restore()
        finally:  # also after a failed restore, because the copies take memory
            self._forget()
            if self._original is not None:
                self._original.pass_over(self._passed)

    def counters(self) -> list[int]:
        """Return the version counters of all tensors that are compared by them."""
        kept = [version(kept.tensor) for kept in self._tensors.values()]
        return [*self._counters.read(), *kept, *self._buffers.counters()]

    def pass_over(self, before: list[int]) -> None:
        """Ignore writes since `counters` returned `before`, because a check made them and restored all."""
        watched, kept = len(self._counters.read()), len(self._tensors)
        self._counters.pass_over(before[:watched])
        self._buffers.pass_over(before[watched + kept :])
        for one, was in zip(self._tensors.values(), before[watched : watched + kept], strict=True):
            one.version += version(one.tensor) - was

    # -- a window that is saved ----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state that `restore` would restore, by name, as tensors and plain containers."""
        self._recall()
        return {
            "buffers": self._buffers.state(),
            "tensors": {
                kept.name: kept.copy if kept.copy is not None else kept.alias
                for kept in self._tensors.values()
                if kept.moved()
            },
            "bindings": {
                table.name_of(key): [] if before is NOTHING else [self._as_taken(before)]
                for table, key, before, _ in self._bound.rebound(loose=self._loose_state_moved())
                if before is NOTHING or is_plain(before)
            },
        }

    def _as_taken(self, value: Any) -> Any:
        """Return a copy of a bound value, with the content that its tensors had at `begin`."""
        if isinstance(value, tuple):
            return tuple(map(self._as_taken, value))
        kept = self._tensors.get(id(value))  # has the content at `begin`, if it was copied
        return copied(value if kept is None or kept.copy is None else kept.copy)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Make `restore` restore a state of `state_dict`; call it after `begin`."""
        self._buffers.load_state(state["buffers"])
        moved, rebound = state["tensors"], state["bindings"]
        if not moved and not rebound:  # avoids the search over all modules
            return
        by_name = {kept.name: kept for kept in self._tensors.values()}
        for table in reach(self._models, self._functions).tables:
            for key, value in table.read().items():
                for name, one in tensors_of(table.name_of(key), value):
                    if name in moved and name not in by_name and can_be_kept(one):
                        by_name[name] = self._tensors[id(one)] = KeptTensor.of(name, one, loose=table.loose)
            self._bound.assume(table, rebound)
        for name, content in moved.items():
            if name in by_name:
                by_name[name].copy = content.to(by_name[name].tensor.device, copy=True)

    # -- what there is -------------------------------------------------------------------------------------

    def _forget(self) -> None:
        self._noted = self._looked = False
        if self._bound.used:  # an unused object can be kept
            self._bound = BoundNames()
        self._at_begin: list[Noted] = []
        self._tensors: dict[int, KeptTensor] = {}
        self._generators: list[tuple[Any, Callable[[], object]]] = []
        self._counters = _NONE

    def _look(self, *, check: bool) -> None:
        """Inspect everything that can be reached, and record it."""
        known, found = self._known, reach(self._models, self._functions)
        self._looked = True
        self._names = found.names
        self._buffers.add(self._names)
        in_buffers = self._buffers.covers()
        first = not known.windows  # a large tensor that appears later may be a result, and is not watched
        for table in found.tables:
            for key, value in self._bound.note(table, first=first).items():
                for name, one in tensors_of(table.name_of(key), value):
                    wanted = check or not getattr(one, "requires_grad", False)
                    if wanted and id(one) not in self._tensors and can_be_kept(one):
                        kept = KeptTensor.of(name, one, loose=table.loose)
                        if not in_buffers(one, kept.tensor):
                            self._tensors[id(one)] = kept
                if not isinstance(value, Tensor) and (restore := generator_restorer(value)) is not None:
                    self._generators.append((value, restore))
        new = ((table, dict.fromkeys(table.read(), UNHELD)) for table in found.buffer_tables(inside=True))
        self._bound.recall(new)  # finds buffers that the window registers; BufferKeeper has the others
        known.generators = [value for value, _ in self._generators]
        self._copy(check=check)
        known.watched = Watched(
            {
                identity: (weakref.ref(kept.tensor), kept.name, kept.loose)
                for identity, kept in self._tensors.items()
                if not (kept.trained or identity in known.tensors or kept.tensor.is_inference())
                and kept.array is None  # a NumPy array has no version counter
                and (first or kept.frozen or kept.alias.nbytes <= SMALL_BYTES)
            }
        )

    def _copy(self, *, check: bool) -> None:
        """Copy small tensors and those that have changed before, and record some values of others.

        Frozen parameters are copied only in a first window without a check, up to the size of the trained
        parameters, because the teacher of a moving average is as large as its student.
        """
        known = self._known
        unknown = not (known.windows or known.checked or check)
        trained = (p for model in self._models for p in model.parameters() if p.requires_grad)
        left = {True: max(SMALL_BYTES, sum(p.nbytes for p in trained)) if unknown else 0, False: MOST_BYTES}
        read = MOST_ADDED_UP  # small tensors come first, so that more of them fit
        for kept in sorted(self._tensors.values(), key=lambda kept: kept.alias.nbytes):
            size = kept.alias.nbytes
            if id(kept.holder) in known.tensors:
                kept.copy_now()
            elif kept.trained:
                continue
            elif size <= left[kept.frozen] and (size <= SMALL_BYTES or kept.frozen):
                left[kept.frozen] -= size
                kept.copy_now()
            else:
                kept.look_at_head()
                if unknown and SMALL_BYTES < size <= read:
                    read -= size
                    kept.add_up()

    def _take_known(self) -> None:
        """Record the state that has changed in earlier windows."""
        known = self._known
        for table, state in known.bindings.values():
            self._bound.note(table, first=state)
        for identity, (reference, name, loose) in list(known.tensors.items()):
            one = reference()
            if one is None:  # the tensor was deleted
                del known.tensors[identity]
            elif can_be_kept(one):
                self._tensors[identity] = kept = KeptTensor.of(name, one, loose=loose)
                kept.copy_now()
        self._generators = [(v, r) for v in known.generators if (r := generator_restorer(v)) is not None]
        self._at_begin = known.begin_look.begin()
        if known.watched.entries:
            self._counters = Counters(known.watched)

    def _learn(self) -> None:
        """Learn the state that has changed since `begin`, to copy it from now on."""
        self._learn_bound()
        self._learn_of(kept for kept in self._tensors.values() if kept.moved())

    def _learn_bound(self) -> None:
        for table, key, before, _ in self._bound.rebound(loose=True):
            self._known.note(table, key, state=isinstance(before, Tensor | tuple))

    def _learn_of(self, moved: Iterable[KeptTensor]) -> None:
        for kept in moved:
            self._known.tensors[id(kept.holder)] = (weakref.ref(kept.holder), kept.name, kept.loose)
            self._known.watched.remove([kept.tensor])

    def _learn_watched(self) -> None:
        self._known.tensors |= self._known.watched.remove(self._counters.written())

    def _name_of(self, module: nn.Module, buffer: str) -> str:
        return f"{self._names.get(module, '')}.{buffer}".lstrip(".")

    def _loose_state_moved(self) -> bool:
        """Return whether a tensor or float outside of modules, which the loss function uses, has changed."""
        return self._bound.any_loose() or any(kept.loose and kept.moved() for kept in self._tensors.values())
