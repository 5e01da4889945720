"""Options of `value_and_grad`, checked once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from .. import normalize
from ..errors import InputError
from . import arithmetic
from .axes import Axes, check_axes
from .outcome import Form
from .sharding import AxisName
from .splitting import Layout, check_real, check_split

WeightOfTerm = Callable[..., Any] | Literal["returned"] | None
Weight = WeightOfTerm | Mapping[str, WeightOfTerm]
Reduction = normalize.Reduction | Mapping[str, normalize.Reduction]
Aux = Literal["stack", "concat"]
NonFinite = Literal["propagate", "skip_microbatch"]
Positions = int | Sequence[int]


@dataclass(frozen=True)
class Options:
    """The arguments of `value_and_grad`; its docstring describes them."""

    argnums: Positions
    batch_argnums: Positions
    batch_argnames: tuple[str, ...]
    in_axes: Axes
    unsplit: tuple[int | str, ...]
    rng_argnum: int | None
    carry_argnum: int | None
    microbatch_size: int | None
    steps: int | None
    num_real_microbatches: Any
    layout: Layout
    weight: Weight
    reduction: Reduction
    has_aux: bool
    aux: Aux
    axis_name: AxisName
    accumulator_dtype: Any
    nonfinite: NonFinite
    noise: bool
    stats: bool
    check: bool

    @property
    def terms(self) -> tuple[str, ...]:
        """Names of the losses from the mappings `weight` or `reduction`; empty without such a mapping."""
        for given in (self.weight, self.reduction):
            if isinstance(given, Mapping):
                return tuple(sorted(given))  # as JAX sorts the keys of a dict
        return ()

    @property
    def form(self) -> Form:
        """Declared form of the result of the user's function."""
        returned = self.weight == "returned"
        with_weight = tuple(name for name in self.terms if self.weight_of(name) == "returned")
        return Form(returned, self.has_aux, self.carry_argnum is not None, self.terms, with_weight)

    @property
    def may_leave_out(self) -> bool:
        """Return True if a micro-batch can have the weight 0."""
        return self.weight is not None or self.nonfinite == "skip_microbatch"

    def weight_of(self, term: str) -> WeightOfTerm:
        """Return the declared weight of a term; of one loss for the name ""."""
        return self.weight[term] if isinstance(self.weight, Mapping) else self.weight

    def reduction_of(self, term: str) -> normalize.Reduction:
        """Return the declared reduction of a term; of one loss for the name ""."""
        return self.reduction[term] if isinstance(self.reduction, Mapping) else self.reduction


def as_tuple(positions: Positions) -> tuple[int, ...]:
    """Return positions as a tuple.

    Examples:
        >>> as_tuple(1), as_tuple([1, 2])
        ((1,), (1, 2))
    """
    return (positions,) if isinstance(positions, int) else tuple(positions)


def named(name: str, entries: Any, kinds: tuple[type, ...]) -> tuple[Any, ...]:
    """Return the entries of an option as a tuple; a single entry may be given without a tuple.

    Args:
        name: the name of the option, for the error text.
        entries: the argument of the user.
        kinds: the allowed types of entries: str, or int and str.

    Raises:
        InputError: an entry has another type.

    Examples:
        >>> named("unsplit", "table", (int, str)), named("unsplit", (2, "table"), (int, str))
        (('table',), (2, 'table'))
    """
    listed = (entries,) if isinstance(entries, int | str) else entries
    if isinstance(listed, Sequence) and all(type(entry) in kinds for entry in listed):
        return tuple(listed)
    wanted = "names or positions, as in ('table', 2)" if int in kinds else "names, as in ('x', 'y')"
    raise InputError(f"{name}={entries!r} does not name arguments. Pass {wanted}.")


def checked(options: Options) -> Options:
    """Return the options if they are valid together.

    Raises:
        InputError: an option has an unknown value, or two options exclude each other.
    """
    check_split(options.microbatch_size, options.steps, options.layout)
    check_axes(options.in_axes)
    check_real(options.num_real_microbatches, options.layout)
    arithmetic.check_sum_dtype(options.accumulator_dtype)
    _check_terms(options)
    for term in options.terms or ("",):
        normalize.check_reduction(options.reduction_of(term), ("mean", "sum"))
        weight = options.weight_of(term)
        if not (weight is None or weight == "returned" or callable(weight)):
            raise InputError(
                f"weight={weight!r}{f' for the term {term!r}' if term else ''} is not a function. "
                'Pass None to count rows, a function of the micro-batch, or "returned".'
            )
    for name, value, allowed in (
        ("aux", options.aux, ("stack", "concat")),
        ("nonfinite", options.nonfinite, ("propagate", "skip_microbatch")),
    ):
        if value not in allowed:
            raise InputError(f"{name}={value!r} is unknown. Pass one of {allowed}.")
    return options


def _check_terms(options: Options) -> None:
    """Check the names of several losses, and raise for options that need a single divisor."""
    given = {"weight": options.weight, "reduction": options.reduction}
    names = {option: list(value) for option, value in given.items() if isinstance(value, Mapping)}
    if not names:
        return
    first = next(iter(names.values()))
    if not first or not all(isinstance(name, str) and name for name in first):
        raise InputError(f"The names of the losses are {first}. Name each by a string that is not empty.")
    if any(set(each) != set(first) for each in names.values()):
        raise InputError(
            f"weight= names the losses {names['weight']}, but reduction= names {names['reduction']}. Use the "
            "same names in both."
        )
    if callable(options.weight):
        raise InputError(
            f"weight= is one function, but reduction={options.reduction!r} names several losses. Pass "
            "weight= as a mapping with the same names."
        )
    refuse_with_terms(options)


def refuse_with_terms(options: Options) -> None:
    """Raise for options that need a single weight for each micro-batch; several losses have one each.

    Raises:
        InputError: such an option is set.
    """
    if options.nonfinite == "skip_microbatch":
        raise InputError(
            'nonfinite="skip_microbatch" needs a single loss: with several losses, the total weight of each '
            'is computed before it is known which micro-batches are left out. Pass nonfinite="propagate".'
        )
    if options.noise:
        raise InputError(
            "noise=True needs a single loss: with several losses, each has its own weight. Measure the noise "
            "of one loss in a separate call."
        )
