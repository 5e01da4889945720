# JAX is an extra. Where it is not installed, pyright cannot resolve it:
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""Role of every argument of a call: differentiated, split, a random key, a state, or the same for all.

A common silent mistake is an array with one row for each sample that is not split, so that the outputs of a
micro-batch are compared with the labels of the whole batch. Such an array raises an error unless it is in
`unsplit`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp

from ..errors import InputError, SplitError
from .axes import axes_of, by_argument
from .options import Options, as_tuple

Where = int | str
Mode = Literal["rows", "key", "same", "unsplit"]


@dataclass(frozen=True)
class Argument:
    """One argument that is not differentiated, and not the argument of `rng_argnum` or `carry_argnum`.

    Args:
        where: its position or keyword.
        name: the name of the function's parameter; None if it is not known.
        value: the argument.
        split: whether it is part of the batch.
        modes: for each leaf: ``"rows"``: split by rows; ``"key"``: a random key, folded with the index of the
            micro-batch; ``"same"``: the same for all; ``"unsplit"``: the same for all by `unsplit`.
        axes: for each leaf, the axis of its rows.
    """

    where: Where
    name: str | None
    value: Any
    split: bool
    modes: tuple[Mode, ...]
    axes: tuple[int, ...]

    @property
    def changes(self) -> bool:
        """Return True if micro-batches get different values of it."""
        return "rows" in self.modes or "key" in self.modes


@dataclass(frozen=True)
class Roles:
    """Arguments of a call by role; no position is negative.

    Args:
        differentiated: the positions of `argnums`, in the same form.
        rng: the position of the random key, or None.
        carry: the position of the state, or None.
        others: the other arguments.
        samples: the number of rows of the batch.
    """

    differentiated: int | tuple[int, ...]
    rng: int | None
    carry: int | None
    others: tuple[Argument, ...]
    samples: int

    @property
    def batch(self) -> tuple[Argument, ...]:
        """The arguments that are split."""
        return tuple(argument for argument in self.others if argument.split)


def is_array(leaf: Any) -> bool:
    """Return True for arrays of any library, random keys and tracers.

    Examples:
        >>> is_array(jnp.ones(2)), is_array(1.0)
        (True, False)
    """
    return hasattr(leaf, "dtype") and hasattr(leaf, "shape")


def is_key(leaf: Any) -> bool:
    """Return True for typed random keys, one or an array of them.

    Examples:
        >>> is_key(jax.random.key(0)), is_key(jnp.zeros(2, jnp.uint32))
        (True, False)
    """
    return is_array(leaf) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def is_legacy_key(leaf: Any) -> bool:
    """Return True for arrays like those of `jax.random.PRNGKey`: two or four numbers of dtype uint32.

    Examples:
        >>> is_legacy_key(jax.random.PRNGKey(0)), is_legacy_key(jnp.zeros(2))
        (True, False)
    """
    return is_array(leaf) and leaf.dtype == jnp.uint32 and leaf.shape in ((2,), (4,))


def roles_of(
    fun: Callable[..., Any], options: Options, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Roles, tuple[Any, ...], dict[str, Any]]:
    """Find the role of every argument of one call.

    Returns:
        The roles and the arguments; some may have moved from keyword to position.

    Raises:
        InputError: an argument is missing or has two roles; an array with as many rows as the batch is not
            split and not in `unsplit`; a random key is a legacy key; or an entry of `unsplit` matches
            nothing.
        SplitError: arrays of the batch differ in length, or it has none.
    """
    names, given = parameter_names(fun), len(args)
    batch = as_tuple(options.batch_argnums)
    if options.batch_argnames and given == 1 and options.batch_argnums == 1:
        batch = ()  # a call such as fun(params, x=...): there is no argument 1, the default of batch_argnums
    single = [place for place in (options.rng_argnum, options.carry_argnum) if place is not None]
    asked = (*as_tuple(options.argnums), *batch, *single)
    args, kwargs = by_position(names, asked, args, kwargs)
    places = [_place(place, given, len(args)) for place in asked]
    differentiated = places[: len(as_tuple(options.argnums))]
    apart = places[len(places) - len(single) :]
    split: list[Where] = [*places[len(differentiated) : len(places) - len(single)]]
    split += [_where(name, names[: len(args)], kwargs) for name in options.batch_argnames]
    entries = dict(zip(split, by_argument(options.in_axes, len(split)), strict=True))
    _refuse_doubled([*differentiated, *split, *apart])
    rest: list[tuple[Where, str | None, Any]] = [
        (place, names[place] if place < len(names) else None, arg)
        for place, arg in enumerate(args)
        if place not in (*differentiated, *apart)
    ]
    rest += [(name, name, value) for name, value in sorted(kwargs.items())]  # as JAX flattens a dict
    others = with_modes(rest, entries, [_from_start(entry, given) for entry in options.unsplit])
    samples = count_rows(others)
    _refuse_rows_that_are_not_split(others, samples)
    rng, carry = (None if place is None else _place(place, given, len(args)) for place in _singles(options))
    positions = differentiated[0] if isinstance(options.argnums, int) else tuple(differentiated)
    return Roles(positions, rng, carry, others, samples), args, kwargs


def _singles(options: Options) -> tuple[int | None, int | None]:
    return options.rng_argnum, options.carry_argnum


def parameter_names(fun: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of a function's positional parameters; none if `inspect` cannot find them.

    Examples:
        >>> parameter_names(lambda params, x, *, scale: 0)
        ('params', 'x')
    """
    try:
        parameters = inspect.signature(fun).parameters.values()
    except (TypeError, ValueError):
        return ()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(parameter.name for parameter in parameters if parameter.kind in kinds)


def by_position(
    names: Sequence[str], positions: Sequence[int], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Turn keyword arguments into positional ones, up to the largest of the positions.

    Examples:
        >>> by_position(("params", "x", "y"), (1, 2), (0,), {"x": 1, "y": 2, "scale": 3})
        ((0, 1, 2), {'scale': 3})
    """
    args, kwargs = (*args,), dict(kwargs)
    # In order: a gap cannot be passed by position.
    while any(place >= len(args) for place in positions) and names[len(args) : len(args) + 1]:
        name = names[len(args)]
        if name not in kwargs:
            break
        args = (*args, kwargs.pop(name))
    return args, kwargs


def _from_start(entry: Where, given: int) -> Where:
    """Return an entry of `unsplit` with a negative position counted from the start."""
    return entry + given if isinstance(entry, int) and entry < 0 else entry


def _place(place: int, given: int, count: int) -> int:
    """Return a position counted from the start.

    Args:
        place: the position, which may be negative.
        given: the number of arguments that the user passed by position.
        count: the number of positional arguments after `by_position`.
    """
    if -given <= place < count:
        return place + given if place < 0 else place
    raise InputError(
        f"The call has {count} positional arguments, but argnums, batch_argnums, rng_argnum or carry_argnum "
        f'names argument {place}. Pass it by position, or split keyword arguments with batch_argnames=("x",).'
    )


def _where(name: str, names: Sequence[str], kwargs: dict[str, Any]) -> Where:
    """Return the keyword or the position of an argument of `batch_argnames`."""
    if name in kwargs:
        return name
    if name in names:
        return names.index(name)
    raise InputError(
        f"batch_argnames names {name!r}, which the call does not have. It has "
        f"{', '.join(map(repr, (*names, *kwargs)))}."
    )


def _refuse_doubled(taken: Sequence[Where]) -> None:
    doubled = [where for where in taken if taken.count(where) > 1]
    if doubled:
        raise InputError(
            f"Argument {doubled[0]!r} has two roles, but it can only be one of differentiated, split, a "
            "random key or a state. Change argnums, batch_argnums, rng_argnum or carry_argnum."
        )


def with_modes(
    rest: Sequence[tuple[Where, str | None, Any]], split: Mapping[Where, Any], unsplit: Sequence[Where]
) -> tuple[Argument, ...]:
    """Return the arguments with the modes of their leaves.

    Args:
        rest: position or keyword, name and value of each argument.
        split: the entry of `in_axes` for each argument that is split, by position or keyword.
        unsplit: positions, names, or paths within arguments.

    Raises:
        InputError: an entry of `unsplit` matches nothing, or a leaf is a legacy random key.
    """
    arguments: list[Argument] = []
    used: set[Where] = set()
    for where, name, value in rest:
        modes: list[Mode] = []
        leaves = jax.tree_util.tree_leaves_with_path(value)
        axes = axes_of(split[where], value, _label(where, name, ())) if where in split else [0] * len(leaves)
        for (path, leaf), axis in zip(leaves, axes, strict=True):
            matching = [entry for entry in unsplit if _means(entry, where, name, path)]
            used.update(matching)
            whole = bool(matching) or axis is None
            modes.append("unsplit" if whole else _mode(leaf, _label(where, name, path), where in split))
        if not modes and {where, name} & {*unsplit}:
            used.update({where, name} & {*unsplit})  # an argument without leaves, such as None
        arguments.append(
            Argument(where, name, value, where in split, tuple(modes), tuple(a or 0 for a in axes))
        )
    unknown = [entry for entry in unsplit if entry not in used]
    if unknown:
        listed = [label for argument in arguments for label, *_ in leaves_of(argument)]
        raise InputError(
            f"unsplit names {unknown[0]!r}, which the call does not have. It has {', '.join(listed[:20])}."
        )
    return tuple(arguments)


def _mode(leaf: Any, label: str, split: bool) -> Mode:
    if is_legacy_key(leaf):
        raise InputError(
            f"{label} looks like a legacy random key (uint32 of shape {tuple(leaf.shape)}), from which every "
            "micro-batch would draw the same numbers. Make it with jax.random.key(seed) or pass its position "
            "as rng_argnum, or, if it is not a key, add it to unsplit= or give it another dtype."
        )
    if is_array(leaf) and leaf.shape and split:
        return "rows"
    return "key" if is_key(leaf) else "same"


def _means(entry: Where, where: Where, name: str | None, path: Any) -> bool:
    """Return True if an entry of `unsplit` names a leaf, or a tree that contains it."""
    if isinstance(entry, int) or entry in (where, name):
        return entry in (where, name)
    dotted = jax.tree_util.keystr(path, simple=True, separator=".")
    return any(f"{text}.".startswith(f"{entry}.") for text in (dotted, f"{name}.{dotted}"))


def _label(where: Where, name: str | None, path: Any) -> str:
    """Return the text for a leaf in errors, such as "batch['x']"."""
    text = name if name else f"argument {where}"
    return text + jax.tree_util.keystr(path)


def leaves_of(argument: Argument) -> Iterator[tuple[str, Any, Mode]]:
    """Yield label, value and mode of each leaf.

    Examples:
        >>> argument = Argument(1, "batch", {"x": 1, "y": 2}, True, ("rows",) * 2, (0, 0))
        >>> [label for label, *_ in leaves_of(argument)]
        ["batch['x']", "batch['y']"]
    """
    leaves = jax.tree_util.tree_leaves_with_path(argument.value)
    for (path, leaf), mode in zip(leaves, argument.modes, strict=True):
        yield _label(argument.where, argument.name, path), leaf, mode


def count_rows(arguments: Sequence[Argument]) -> int:
    """Return the rows of the batch: the length of the leaves that are split.

    Raises:
        SplitError: leaves differ in length, or no leaf is split.

    Examples:
        >>> count_rows([Argument(1, "x", jnp.zeros((5, 2)), True, ("rows",), (0,))])
        5
    """
    lengths = {
        label: leaf.shape[axis]
        for argument in arguments
        for (label, leaf, mode), axis in zip(leaves_of(argument), argument.axes, strict=True)
        if mode == "rows"
    }
    if not lengths:
        raise SplitError(
            "The batch has no array with rows. Name the arguments that are split with batch_argnums= or "
            "batch_argnames=."
        )
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{label} {length}" for label, length in lengths.items())
        raise SplitError(
            f"Arrays of the batch have different lengths ({listed}), but each needs one row for each sample. "
            'Add those that every micro-batch gets whole to unsplit=, as in unsplit=("table",).'
        )
    return next(iter(lengths.values()))


def _refuse_rows_that_are_not_split(arguments: Sequence[Argument], samples: int) -> None:
    """Raise for arrays with as many rows as the batch that are not split and not in `unsplit`."""
    if samples < 2:
        return  # a batch of one sample is its only micro-batch
    for argument in arguments:
        for label, leaf, mode in leaves_of(argument):
            if mode in ("same", "key") and is_array(leaf) and leaf.shape[:1] == (samples,):
                raise InputError(
                    f"{label} has {samples} rows, as many as the batch, but is not split: each micro-batch "
                    f"would get all of them. {_remedy(argument, label, arguments)}"
                )
        for label in _lists_of_numbers(argument, samples):
            raise InputError(
                f"{label} is a list of {samples} numbers, as many as the batch has rows, but lists are not "
                "split. Pass an array: jnp.asarray(values)."
            )


def _remedy(argument: Argument, label: str, arguments: Sequence[Argument]) -> str:
    if isinstance(argument.where, int):
        places = sorted(one.where for one in arguments if one.split and isinstance(one.where, int))
        wanted = f"batch_argnums={tuple(sorted([*places, argument.where]))}"
        alone = argument.name or argument.where
    else:
        wanted, alone = f"batch_argnames=({argument.where!r},)", argument.where
    return f"Pass {wanted} to split {label}, or unsplit=({alone!r},) to pass all of it to each."


def _lists_of_numbers(argument: Argument, samples: int) -> Iterator[str]:
    """Yield the labels of lists with as many numbers as the batch has rows."""

    def is_list(node: Any) -> bool:
        if not isinstance(node, list) or len(node) != samples:
            return False
        return all(isinstance(one, int | float) or (is_array(one) and one.shape == ()) for one in node)

    if "unsplit" in argument.modes:
        return
    for path, node in jax.tree_util.tree_leaves_with_path(argument.value, is_leaf=is_list):
        if is_list(node):
            yield _label(argument.where, argument.name, path)
