"""Options of `value_and_grad`, checked once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from .. import normalize
from ..errors import InputError, explain
from . import arithmetic
from .outcome import Form
from .sharding import AxisName
from .splitting import Layout, check_split

Weight = Callable[..., Any] | Literal["returned"] | None
Aux = Literal["stack", "concat"]
NonFinite = Literal["propagate", "skip_microbatch"]
Positions = int | Sequence[int]


@dataclass(frozen=True)
class Options:
    """The arguments of `value_and_grad`, which has their meaning."""

    argnums: Positions
    batch_argnums: Positions
    batch_argnames: tuple[str, ...]
    unsplit: tuple[int | str, ...]
    rng_argnum: int | None
    carry_argnum: int | None
    microbatch_size: int | None
    steps: int | None
    layout: Layout
    weight: Weight
    reduction: normalize.Reduction
    has_aux: bool
    aux: Aux
    axis_name: AxisName
    accumulator_dtype: Any
    nonfinite: NonFinite
    noise: bool
    stats: bool
    check: bool

    @property
    def form(self) -> Form:
        """Form of the function's result."""
        return Form(self.weight == "returned", self.has_aux, self.carry_argnum is not None)

    @property
    def may_leave_out(self) -> bool:
        """Return True if a micro-batch can have the weight 0."""
        return self.weight is not None or self.nonfinite == "skip_microbatch"


def as_tuple(positions: Positions) -> tuple[int, ...]:
    """Return positions as a tuple.

    Examples:
        >>> as_tuple(1), as_tuple([1, 2])
        ((1,), (1, 2))
    """
    return (positions,) if isinstance(positions, int) else tuple(positions)


def named(name: str, entries: Any, kinds: tuple[type, ...]) -> tuple[Any, ...]:
    """Return the entries of an option as a tuple; one alone may stand for itself.

    Raises:
        InputError: an entry is of another type.

    Examples:
        >>> named("unsplit", "table", (int, str)), named("unsplit", (2, "table"), (int, str))
        (('table',), (2, 'table'))
    """
    listed = (entries,) if isinstance(entries, int | str) else entries
    if isinstance(listed, Sequence) and all(type(entry) in kinds for entry in listed):
        return tuple(listed)
    wanted = "names or positions, as in ('table', 2)" if int in kinds else "names, as in ('x', 'y')"
    raise InputError(f"{name}={entries!r} names no arguments. Pass {wanted}.")


def checked(options: Options) -> Options:
    """Return the options if they go together.

    Raises:
        InputError: they do not, or one is no such option.
    """
    check_split(options.microbatch_size, options.steps, options.layout)
    normalize.check_reduction(options.reduction, ("mean", "sum"))
    arithmetic.check_sum_dtype(options.accumulator_dtype)
    if not (options.weight is None or options.weight == "returned" or callable(options.weight)):
        raise InputError(
            explain(
                f"weight={options.weight!r}",
                "the weight of a micro-batch is computed from it, or by the function",
                'pass None (its samples), a function of the micro-batch, or "returned"',
            )
        )
    for name, value, allowed in (
        ("aux", options.aux, ("stack", "concat")),
        ("nonfinite", options.nonfinite, ("propagate", "skip_microbatch")),
    ):
        if value not in allowed:
            raise InputError(
                explain(f"{name}={value!r}", "there is no such choice", f"pass one of {allowed}")
            )
    return options
