"""The parameters that an accumulator owns, and whether models still have them."""

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


class Structure:
    """Compares models with themselves at the last window, by identity.

    One comparison costs about 0.1 us per module, so that every window can afford it.

    Args:
        models: of the accumulator.

    Examples:
        >>> layer = nn.Linear(1, 1)
        >>> structure = Structure([layer])
        >>> structure.changed()
        False
        >>> layer.weight = nn.Parameter(layer.weight.detach().clone())
        >>> structure.changed()
        True
    """

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._models = models
        self._sharded = sharded_part(models) is not None
        self._note()

    def changed(self) -> bool:
        """Return whether a module or parameter was added, removed or replaced."""
        # Lists of ints compare in C.
        return self._identities() != self._seen

    def update(self, owned: Iterable[ManagedParameter]) -> None:
        """Compare the models with those of the last window, and note them.

        Args:
            owned: the parameters that the optimizers still update.

        Raises:
            InputError: one of them is no longer in the models, so that no optimizer updates what replaced it;
                or the models were sharded in the meantime.
        """
        # Sharding replaces parameters: the general message would send the user the wrong way.
        part = sharded_part(self._models)
        if part is not None and not self._sharded:
            raise InputError(
                f"{part}, after the Accumulator was made. Shard the model first, then make the optimizer of "
                "its parameters, and then the Accumulator."
            )
        present = set(_parameters(self._models))
        for entry in owned:
            # Only those that were there: a parameter outside the models, such as a temperature, is not
            # missed.
            if entry.parameter in self._parameters and entry.parameter not in present:
                raise InputError(
                    f"The parameter {entry.name!r} was replaced after the Accumulator was made - "
                    "load_state_dict(assign=True), to_empty() of a model on the meta device and a new module "
                    "do that - so the optimizer updates a tensor that the model no longer uses. Make the "
                    "optimizer and the Accumulator after loading, or copy into the old parameter under "
                    "torch.no_grad()."
                )
        self._note()

    def _note(self) -> None:
        self._parameters = set(_parameters(self._models))
        # The dictionaries themselves: named_parameters() would walk the tree in every window.
        self._tables: list[dict[str, Any]] = [
            table_of(module)
            for model in self._models
            for module in model.modules()
            for table_of in (children_of, parameters_of)
        ]
        # What is seen is held, so that no other object takes over its identity.
        self._held = [tuple(table.values()) for table in self._tables]
        self._seen = self._identities()

    def _identities(self) -> list[int]:
        """Return what stands in the tables, by identity: tensors are compared by value."""
        return list(map(id, chain.from_iterable(map(dict.values, self._tables))))


class OwnedParameters:
    """The parameters that the optimizers update, kept up to date while a training freezes or adds some.

    Args:
        models: of the accumulator.
        optimizers: likewise.
        masters: float32 copies that are updated in place of parameters.

    Attributes:
        entries: one for each parameter; the list stays the same object.
        only_some: whether the models have trainable parameters that belong to other optimizers.

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
        self._structure = Structure(models)
        self.entries: list[ManagedParameter] = []
        self._known = set(_parameters(models))  # there from the start: in no optimizer on purpose
        self._thawed = set(names_of(models))  # those that may be trainable without a warning
        self._read()

    def refresh(self) -> None:
        """Read the models and optimizers again if a parameter was frozen, unfrozen, added or replaced.

        Raises:
            InputError: a parameter was replaced by one that no optimizer updates.
            OptimizerError: a parameter was added, and no optimizer updates it; or as `own_parameters`.
        """
        # Identities of about 1,000 modules take 0.1 ms.
        changed = self._structure.changed()
        if changed:
            updated = set(self._targets())
            self._structure.update(entry for entry in self.entries if entry.target in updated)
            self._trainable = []  # reads again also after an error
        # Unfreezing changes no identity.
        thawed = any(map(attrgetter("requires_grad"), self._frozen))
        # Optimizer groups too: add_param_group() changes no model.
        if changed or thawed or _trainable(self._optimizers, self._masters) != self._trainable:
            self._read()

    def _read(self) -> None:
        owned = own_parameters(self._models, self._optimizers, self._masters)
        names = names_of(self._models)
        # A new parameter without an optimizer would silently never be trained.
        left = names.keys() - self._known - {entry.parameter for entry in owned}
        if left:
            raise _in_no_optimizer([name for parameter, name in names.items() if parameter in left])
        # A warning only: another optimizer may own it.
        thawed = names.keys() - self._thawed - {entry.parameter for entry in owned}
        if thawed:
            _warn_of_thawed([name for parameter, name in names.items() if parameter in thawed])
        # In place: the gradient sums hold this list.
        self.entries[:] = owned
        self.only_some = has_others(self._models, self.entries)
        present = set(_parameters(self._models))
        self._known = (self._known & present) | names.keys()
        self._thawed = (self._thawed & present) | names.keys()
        self._frozen = [p for p in present.difference(self._targets()) if not p.requires_grad]
        self._trainable = _trainable(self._optimizers, self._masters)

    def _targets(self) -> list[Tensor]:
        return [p for one in self._optimizers for group in one.param_groups for p in group["params"]]


def _in_no_optimizer(names: list[str]) -> OptimizerError:
    others = f" and {len(names) - 1} more" if names[1:] else ""
    return OptimizerError(
        f"The parameter {names[0]!r}{others} was added after the Accumulator was made and is in no optimizer "
        "of it, so its gradient would never be applied. Add it with "
        'optimizer.add_param_group({"params": ...}), freeze it with requires_grad_(False), or, if another '
        "optimizer updates it, make the Accumulator again."
    )


def _warn_of_thawed(names: list[str]) -> None:
    others = f" and {len(names) - 1} more" if names[1:] else ""
    warn(
        f"The parameter {names[0]!r}{others} was unfrozen after the Accumulator was made and is in no "
        "optimizer of it, so its gradient is never applied here. Add it with "
        'optimizer.add_param_group({"params": ...}), unless another optimizer updates it.'
    )


def _trainable(optimizers: Sequence[Optimizer], masters: Mapping[Tensor, Tensor]) -> list[int]:
    """Return the ids of the parameters that need a gradient; freezing or replacing one changes the list."""
    # 0 for a frozen one, so that freezing changes the list.
    found = [id(p) * p.requires_grad for o in optimizers for group in o.param_groups for p in group["params"]]
    return found + [id(p) * p.requires_grad for p in masters] if masters else found


def _parameters(models: Iterable[nn.Module]) -> list[Tensor]:
    return [parameter for model in models for parameter in model.parameters()]


class ModelParameters:
    """All trainable parameters of models, kept up to date while a training freezes, adds or replaces some.

    Args:
        models: of a gradient without an optimizer.

    Attributes:
        entries: one for each parameter; the list stays the same object.
        only_some: False: the models have no others.

    Raises:
        InputError: there is none.

    Examples:
        >>> layer = nn.Linear(1, 1)
        >>> parameters = ModelParameters([layer])
        >>> layer.bias.requires_grad_(False) is layer.bias
        True
        >>> parameters.refresh()
        >>> [entry.name for entry in parameters.entries]
        ['weight']
    """

    # A class attribute: no other optimizer can own them.
    only_some = False

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._models, self._nothing = models, no_optimizer()
        self._structure = Structure(models)
        self.entries: list[ManagedParameter] = []
        self._read()

    def refresh(self) -> None:
        """Read the models again if a parameter was frozen, unfrozen, added or replaced.

        Raises:
            InputError: no parameter needs a gradient.
        """
        changed = self._structure.changed()
        if changed:
            # No owned parameters: without an optimizer none can be out of date.
            self._structure.update(())
        if changed or self._needs() != self._needed:
            self._read()

    def _read(self) -> None:
        self._needed = self._needs()
        self.entries[:] = all_parameters(self._models, self._nothing)
        if not self.entries:
            raise InputError(
                "No parameter of the models needs a gradient. Unfreeze some: requires_grad_(True)."
            )

    def _needs(self) -> list[bool]:
        return [parameter.requires_grad for model in self._models for parameter in model.parameters()]
