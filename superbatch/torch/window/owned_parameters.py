"""The parameters whose gradients an accumulator sums, and detection of changes in models."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from superbatch.errors import InputError, OptimizerError

from ..module_tables import children_of, parameters_of
from ..warn import warn
from .participants.gradient_sum import ManagedParameter
from .validation import all_parameters, has_others, names_of, no_optimizer, own_parameters
from .wrapped_models import sharded_part


class ModelStructure:
    """Detects modules and parameters that were added, removed or replaced since the last window.

    A comparison by identity costs about 0.1 us per module, so it is made in every window.

    Examples:
        >>> layer = nn.Linear(1, 1)
        >>> structure = ModelStructure([layer])
        >>> structure.changed()
        False
        >>> layer.weight = nn.Parameter(layer.weight.detach().clone())
        >>> structure.changed()
        True
    """

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._models = models
        self._sharded = sharded_part(models) is not None
        self._record()

    def changed(self) -> bool:
        """Return whether a module or parameter was added, removed or replaced."""
        # Lists of ints are compared in C.
        return self._identities() != self._recorded

    def update(self, owned: Iterable[ManagedParameter]) -> None:
        """Check the changes since the last window, and record the present modules and parameters.

        Args:
            owned: the parameters that the optimizers still update.

        Raises:
            InputError: one of them was replaced in the models, so that no optimizer updates the new tensor;
                or the models were sharded since the Accumulator was made.
        """
        # First, because sharding replaces parameters and the general error below would mislead.
        part = sharded_part(self._models)
        if part is not None and not self._sharded:
            raise InputError(
                f"{part}, but was not when the Accumulator was made. Shard the model first, then make the "
                "optimizer, then the Accumulator."
            )
        present = set(_parameters(self._models))
        for entry in owned:
            # A parameter that was never in the models, such as a temperature, is left out.
            if entry.parameter in self._parameters and entry.parameter not in present:
                raise InputError(
                    f"The parameter {entry.name!r} was replaced after the Accumulator was made, so the "
                    "optimizer updates a tensor that the model no longer uses. (A new module, "
                    "load_state_dict(assign=True) and to_empty() replace parameters.) Make the optimizer and "
                    "the Accumulator after that, or copy into the old parameter under torch.no_grad()."
                )
        self._record()

    def _record(self) -> None:
        self._parameters = set(_parameters(self._models))
        # The dictionaries themselves, because named_parameters() would walk the modules in every window.
        self._tables: list[dict[str, Any]] = [
            table_of(module)
            for model in self._models
            for module in model.modules()
            for table_of in (children_of, parameters_of)
        ]
        # The objects are held, because the id of a freed object may be reused.
        self._objects = [tuple(table.values()) for table in self._tables]
        self._recorded = self._identities()

    def _identities(self) -> list[int]:
        return list(map(id, chain.from_iterable(map(dict.values, self._tables))))


class OwnedParameters:
    """The parameters that the optimizers update, kept up to date if a training freezes or adds some.

    Args:
        models: the accumulator's.
        optimizers: the accumulator's.
        masters: parameter -> float32 copy that the optimizer updates instead.

    Attributes:
        entries: one entry for each trainable parameter; always the same list object.
        only_some: True if the models have trainable parameters that belong to other optimizers.

    Examples:
        >>> import torch
        >>> layer = nn.Linear(1, 1)
        >>> owned = OwnedParameters([layer], [torch.optim.SGD(layer.parameters())], {})
        >>> layer.bias.requires_grad_(False) is layer.bias
        True
        >>> owned.refresh()
        >>> [entry.name for entry in owned.entries]
        ['weight']
    """

    def __init__(
        self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer], masters: Mapping[Tensor, Tensor]
    ) -> None:
        self._models, self._optimizers, self._masters = models, optimizers, masters
        self._structure = ModelStructure(models)
        self.entries: list[ManagedParameter] = []
        # Parameters that may be in no optimizer: the user chose that when the Accumulator was made.
        self._may_lack_optimizer = set(_parameters(models))
        self._may_be_trainable = set(names_of(models))  # no warning for these, if they are in no optimizer
        self._read()

    def refresh(self) -> None:
        """Read the models and optimizers again if a parameter was frozen, unfrozen, added or replaced.

        Raises:
            InputError: a parameter was replaced by one that no optimizer updates.
            OptimizerError: a parameter was added and no optimizer updates it, or `own_parameters` raises.
        """
        changed = self._structure.changed()
        if changed:
            updated = set(self._targets())
            self._structure.update(entry for entry in self.entries if entry.target in updated)
            self._trainable = []  # forces `_read` in the next call if this one raises
        # Unfreezing does not change identities.
        unfrozen = any(map(attrgetter("requires_grad"), self._frozen))
        # Optimizers too, because add_param_group() does not change a model.
        if changed or unfrozen or _trainable(self._optimizers, self._masters) != self._trainable:
            self._read()

    def _read(self) -> None:
        owned = own_parameters(self._models, self._optimizers, self._masters)
        names = names_of(self._models)
        # Otherwise a new parameter would silently never be trained.
        added = names.keys() - self._may_lack_optimizer - {entry.parameter for entry in owned}
        if added:
            raise _in_no_optimizer([name for parameter, name in names.items() if parameter in added])
        # Only a warning, because another optimizer may update the parameter.
        unfrozen = names.keys() - self._may_be_trainable - {entry.parameter for entry in owned}
        if unfrozen:
            _warn_of_unfrozen([name for parameter, name in names.items() if parameter in unfrozen])
        # In place, because gradient sums refer to this list.
        self.entries[:] = owned
        self.only_some = has_others(self._models, self.entries)
        present = set(_parameters(self._models))
        self._may_lack_optimizer = (self._may_lack_optimizer & present) | names.keys()
        self._may_be_trainable = (self._may_be_trainable & present) | names.keys()
        self._frozen = [p for p in present.difference(self._targets()) if not p.requires_grad]
        self._trainable = _trainable(self._optimizers, self._masters)

    def _targets(self) -> list[Tensor]:
        return [p for one in self._optimizers for group in one.param_groups for p in group["params"]]


def _in_no_optimizer(names: list[str]) -> OptimizerError:
    others = f" and {len(names) - 1} more" if names[1:] else ""
    return OptimizerError(
        f"The parameter {names[0]!r}{others} was added after the Accumulator was made and is in none of its "
        'optimizers, so it would never be updated. Add it with optimizer.add_param_group({"params": ...}), '
        "freeze it with requires_grad_(False), or, if another optimizer updates it, make the Accumulator "
        "again."
    )


def _warn_of_unfrozen(names: list[str]) -> None:
    others = f" and {len(names) - 1} more" if names[1:] else ""
    warn(
        f"The parameter {names[0]!r}{others} was unfrozen after the Accumulator was made and is in none of "
        "its optimizers, so it is never updated here. Add it with "
        'optimizer.add_param_group({"params": ...}), unless another optimizer updates it.'
    )


def _trainable(optimizers: Sequence[Optimizer], masters: Mapping[Tensor, Tensor]) -> list[int]:
    """Return the ids of all parameters, 0 for frozen ones: freezing or replacing one changes the list."""
    found = [id(p) * p.requires_grad for o in optimizers for group in o.param_groups for p in group["params"]]
    return found + [id(p) * p.requires_grad for p in masters] if masters else found


def _parameters(models: Iterable[nn.Module]) -> list[Tensor]:
    return [parameter for model in models for parameter in model.parameters()]


class ModelParameters:
    """All trainable parameters of models, kept up to date if a training freezes, adds or replaces some.

    Args:
        models: the models of a `Gradient`, which has no optimizer.

    Attributes:
        entries: one entry for each trainable parameter; always the same list object.
        only_some: False, because all trainable parameters are in `entries`.

    Raises:
        InputError: no parameter is trainable.

    Examples:
        >>> layer = nn.Linear(1, 1)
        >>> parameters = ModelParameters([layer])
        >>> layer.bias.requires_grad_(False) is layer.bias
        True
        >>> parameters.refresh()
        >>> [entry.name for entry in parameters.entries]
        ['weight']
    """

    only_some = False

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._models, self._placeholder = models, no_optimizer()
        self._structure = ModelStructure(models)
        self.entries: list[ManagedParameter] = []
        self._read()

    def refresh(self) -> None:
        """Read the models again if a parameter has changed; raise `InputError` if none is trainable."""
        changed = self._structure.changed()
        if changed:
            # Without an optimizer there are no parameters that it could still update.
            self._structure.update(())
        if changed or self._needs() != self._needed:
            self._read()

    def _read(self) -> None:
        self._needed = self._needs()
        self.entries[:] = all_parameters(self._models, self._placeholder)
        if not self.entries:
            raise InputError(
                "No parameter of the models needs a gradient. Call requires_grad_(True) on those to train."
            )

    def _needs(self) -> list[bool]:
        return [parameter.requires_grad for model in self._models for parameter in model.parameters()]
