"""Declaration of a loss: its reduction, and the weight of a micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

from superbatch import normalize
from superbatch.errors import InputError

from ..weights import AtLeast
from .losses import alone, pair_of
from .weighing import Weigh

WeightOption = Callable[[Any], Any] | Literal["returned"] | AtLeast | None


@dataclass(frozen=True)
class Declared:
    """Declaration of the result of `loss_fn` for a micro-batch, and of its weight.

    Attributes:
        reduction: reduction of the loss.
        weigh: weight of a micro-batch.
        min_weight: lower bound of a window's weight.
        terms: declaration of each term, if `loss_fn` returns several losses by name; else empty.
    """

    reduction: normalize.Reduction = "mean"
    weigh: Weigh = "samples"
    min_weight: normalize.Number | None = None
    terms: Mapping[str, Declared] = field(default_factory=dict)

    @property
    def returned(self) -> bool:
        """True if `loss_fn` returns weights with the losses."""
        return self.weigh == "returned" or any(term.returned for term in self.terms.values())

    def arguments(self, returned: Any) -> tuple[Any, ...]:
        """Return the result of `loss_fn` as the arguments of ``window.backward``.

        Raises:
            InputError: it contradicts the declaration.
        """
        # Both functions raise for a result of the other form.
        if self.returned:
            return pair_of(returned)
        return (returned,) if self.terms else (alone(returned),)

    @property
    def can_drop(self) -> bool:
        """True if a micro-batch can be left out together with its weight; False for terms and a total."""
        return not self.terms and self.reduction != "total"

    @property
    def needs_samples(self) -> bool:
        """True if the samples of every micro-batch must be counted."""
        if self.terms:
            return any(term.needs_samples for term in self.terms.values())
        # A total is not divided, and a weight function counts itself.
        return self.weigh == "samples" and self.reduction != "total"


def declare(reduction: object, weight: Any, *, nonfinite: str = "raise") -> Declared:
    """Return the declaration for the options of an accumulator.

    Args:
        reduction: ``"mean"``, ``"sum"`` or ``"total"``; or a mapping from the names of terms to them.
        weight: None, a function of a micro-batch, ``"returned"``, or one of them in `at_least`; or a mapping
            from the names of terms to them.
        nonfinite: the accumulator's option.

    Raises:
        InputError: an option has an unknown value, or two options exclude each other.

    Examples:
        >>> declare("total", None).needs_samples
        False
        >>> list(declare("mean", {"words": len, "pictures": None}).terms)
        ['words', 'pictures']
    """
    if isinstance(weight, Mapping) or isinstance(reduction, Mapping):
        return _declare_terms(reduction, weight, nonfinite)
    checked, bounded = normalize.check_reduction(reduction), isinstance(weight, AtLeast)
    minimum, weight = (weight.minimum, weight.weight) if isinstance(weight, AtLeast) else (None, weight)
    if checked == "total":
        # `bounded`, because at_least(1) has the weight None.
        if weight is not None or bounded:
            raise InputError(
                'reduction="total" is not divided by a weight, so weight= has no meaning. Remove weight=, or '
                'pass reduction="sum" to divide the sum by the weight.'
            )
        # A dropped micro-batch is left out of the divisor, which a total does not have.
        if nonfinite == "skip_microbatch":
            raise InputError(
                'nonfinite="skip_microbatch" leaves out a micro-batch with its weight, but reduction="total" '
                'has no weight. Pass nonfinite="skip_update" or "raise".'
            )
    if not is_weight(weight):
        raise InputError(
            f"weight={weight!r} is not a weight of a micro-batch. Pass None (samples), a function such as "
            'count_tokens("labels"), or "returned".'
        )
    # Checked with the reduction, because only a divisor can have a lower bound.
    bound = normalize.check_min_weight(minimum, checked) if bounded else None
    return Declared(checked, "samples" if weight is None else weight, bound)


def is_weight(weight: object) -> bool:
    """Return whether a value is valid for the option `weight`.

    Examples:
        >>> is_weight("returned"), is_weight("tokens")
        (True, False)
    """
    # isinstance first, because == of a tensor or an array does not return a bool.
    return weight is None or callable(weight) or (isinstance(weight, str) and weight == "returned")


def _declare_terms(reduction: Any, weight: Any, nonfinite: str) -> Declared:
    if nonfinite == "skip_microbatch":
        raise InputError(
            'nonfinite="skip_microbatch" does not work with several terms, each of which has its own weight. '
            'Pass nonfinite="skip_update" or "raise".'
        )
    mappings = {"weight": weight, "reduction": reduction}
    names = {option: list(given) for option, given in mappings.items() if isinstance(given, Mapping)}
    # At least one of the two is a mapping.
    first = next(iter(names.values()))
    if not first or not all(isinstance(name, str) and name for name in first):
        raise InputError(f"The names of the terms are {first}. Name each term by a string that is not empty.")
    if any(set(each) != set(first) for each in names.values()):
        raise InputError(
            f"weight= has the terms {names['weight']}, but reduction= has the terms {names['reduction']}. "
            "Name the same terms in both."
        )
    if weight is not None and not isinstance(weight, Mapping):
        raise InputError(
            f"weight={weight!r} is not a mapping, but reduction={reduction!r} is. Pass a mapping with the "
            "same names."
        )
    terms: dict[str, Declared] = {}
    for name in first:
        # None: each term is weighed by samples.
        own = None if weight is None else weight[name]
        if not is_weight(own.weight if isinstance(own, AtLeast) else own):
            raise InputError(
                f"weight= of the term {name!r} is {own!r}, which is not a weight. Pass None (samples), a "
                'function of a micro-batch such as count_tokens("labels"), or "returned".'
            )
        terms[name] = declare(reduction[name] if isinstance(reduction, Mapping) else reduction, own)
    return Declared(terms=terms)


def read_terms(
    returned: Any, terms: Mapping[str, Declared]
) -> tuple[Mapping[str, Tensor], Mapping[str, normalize.Number]]:
    """Return losses and weights by name from the result of a `loss_fn` with several terms.

    Args:
        returned: losses by name; or (losses, weights), if some weights are declared as ``"returned"``.
        terms: the declaration of each term.

    Raises:
        InputError: the result has other names than the declaration.

    Examples:
        >>> read_terms({"a": 1.0}, declare("sum", {"a": None}).terms)
        ({'a': 1.0}, {})
    """
    # Weights of the other terms are known before the forward.
    expected = [name for name, term in terms.items() if term.returned]
    losses, weights = pair_of(returned) if expected else (returned, {})
    check_names("losses", losses, terms)
    check_names("weights", weights, expected)
    return losses, weights


def check_names(kind: str, found: Any, expected: Collection[str]) -> None:
    """Check that a mapping has the names that were declared.

    Raises:
        InputError: it is not a mapping, or has other names.

    Examples:
        >>> check_names("losses", {"a": 1.0}, ["a"])
    """
    if not isinstance(found, Mapping):
        raise InputError(
            f"loss_fn returned a {type(found).__name__} for the {kind} of the terms {list(expected)}. Return "
            "a mapping with these names."
        )
    if found.keys() != set(expected):
        raise InputError(
            f"loss_fn returned {kind} named {list(found)}, but the declared {kind} are {list(expected)}. "
            "Return the declared names for every micro-batch, or declare the others in weight=."
        )
