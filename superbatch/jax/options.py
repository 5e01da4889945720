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

    @property
    def form(self) -> Form:
        """Form of the function's result."""
        return Form(self.weight == "returned", self.has_aux, self.carry_argnum is not None)

    @property
    def may_leave_out(self) -> bool:
        """Return True if a micro-batch can have the weight 0."""
        return self.weight is not None or self.nonfinite == "skip_microbatch"


@dataclass(frozen=True)
class Places:
    """Positions among the arguments of a call, none of them negative."""

    differentiated: int | tuple[int, ...]
    batch: tuple[int, ...]
    rng: int | None
    carry: int | None


def as_tuple(positions: Positions) -> tuple[int, ...]:
    """Return positions as a tuple.

    Examples:
        >>> as_tuple(1), as_tuple([1, 2])
        ((1,), (1, 2))
    """
    return (positions,) if isinstance(positions, int) else tuple(positions)


def check(options: Options) -> Options:
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


def places(options: Options, count: int) -> Places:
    """Find the arguments of a call with `count` positional ones.

    Raises:
        InputError: one is missing, or has two roles.
    """
    single = [place for place in (options.rng_argnum, options.carry_argnum) if place is not None]
    asked = [*as_tuple(options.argnums), *as_tuple(options.batch_argnums), *single]
    beyond = [place for place in asked if not -count <= place < count]
    if beyond:
        raise InputError(
            explain(
                f"a call with {count} positional arguments",
                f"argnums, batch_argnums, rng_argnum or carry_argnum names argument {beyond[0]}",
                "pass it by position",
            )
        )
    found = [place % count for place in asked]
    doubled = {place for place in found if found.count(place) > 1}
    if doubled:
        raise InputError(
            explain(
                f"argument {min(doubled)} in two roles",
                "an argument is differentiated, split, a random key or a state, and only one of these",
                "change argnums, batch_argnums, rng_argnum or carry_argnum",
            )
        )
    differentiated = tuple(place % count for place in as_tuple(options.argnums))
    return Places(
        differentiated[0] if isinstance(options.argnums, int) else differentiated,
        tuple(place % count for place in as_tuple(options.batch_argnums)),
        None if options.rng_argnum is None else options.rng_argnum % count,
        None if options.carry_argnum is None else options.carry_argnum % count,
    )
