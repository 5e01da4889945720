# JAX is an extra. Where it is not installed, pyright cannot resolve it:
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""Losses and gradients of a few rows, and of their parts, in float64 where the function runs in it.

Within `jax.jit` nothing has a value yet, so values are made up: a separable loss is separable for any values.
Random keys are replaced by keys that draw the same numbers in every row, so that a row gets the same dropout
alone and among others.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.extend.random import define_prng_impl

from .axes import rows_of
from .loop import Arguments, Call
from .programs import within, without_debugging
from .roles import is_array, is_key
from .splitting import Layout, groups

TOLERANCE = {64: 1e-6, 32: 2e-4}  # relative; below, by the bits that a loss is computed in: 5e-2
Programs = dict[Any, Any]
Draw = Literal["real", "counts", "ignored", "fractions", "empty"]


@dataclass(frozen=True)
class Evaluated:
    """One set of rows: loss, weight and gradient of each term; of one loss under the name "".

    Args:
        samples: rows.
        losses: of each term.
        weights: of each term.
        gradients: of each term, one array for each differentiated leaf.
        rows: the leaves that are split.
    """

    samples: int
    losses: dict[str, float]
    weights: dict[str, float]
    gradients: dict[str, list[np.ndarray]]
    rows: list[np.ndarray]

    def finite(self, term: str) -> bool:
        """Return True if every number of a term is finite."""
        arrays = [self.losses[term], self.weights[term], *self.gradients[term]]
        return all(bool(np.isfinite(array).all()) for array in arrays)


@dataclass(frozen=True)
class Evidence:
    """The whole and its parts, evaluated in a precision that bounds differences by `tolerance`."""

    whole: Evaluated
    parts: list[Evaluated]
    tolerance: float

    @property
    def finite(self) -> bool:
        """True where every number is finite; a part of weight 0 is left out, whatever it is."""
        return all(
            self.whole.finite(term) and all(one.finite(term) or one.weights[term] == 0 for one in self.parts)
            for term in self.whole.losses
        )


def mixed(words: Any) -> Any:
    """Return the next of a sequence of well mixed uint32 numbers."""
    words = (words ^ (words >> 16)) * np.uint32(0x7FEB352D)
    return (words ^ (words >> 15)) * np.uint32(0x846CA68B) + np.uint32(0x9E3779B9)


def _bits(key: Any, width: int, shape: tuple[int, ...]) -> Any:
    word = mixed(key[0] ^ mixed(key[1]))
    wide = {8: jnp.uint8, 16: jnp.uint16, 32: jnp.uint32, 64: jnp.uint64}[width]
    if width == 64:
        word = (word.astype(jnp.uint64) << 32) | mixed(word).astype(jnp.uint64)
    return jnp.broadcast_to(word.astype(wide), shape)


EQUAL_ROWS = define_prng_impl(
    key_shape=(2,),
    seed=lambda seed: jnp.stack([jnp.uint32(17), jnp.uint32(29)]),
    split=lambda key, shape: jnp.broadcast_to(mixed(key), (*shape, 2)),
    random_bits=_bits,
    fold_in=lambda key, data: mixed(key),
    name="superbatch_equal_rows",
)


def made_up(shape: tuple[int, ...], dtype: Any, draw: Draw, *, parameter: bool, seed: int) -> np.ndarray:
    """Return values for an array that has none yet.

    Counts are 0 and 1, with a 1 first along the last axis, as in masks, labels and token ids. Fractions lie
    between 0 and 1; integers are then 1 and 2. Ignored are most zeros of signed integers: labels of -100.
    For "empty" they are counts, of which the caller makes a part zeros.

    Examples:
        >>> made_up((2, 3), "int32", "counts", parameter=False, seed=0)[:, 0].tolist()
        [1, 1]
    """
    random = np.random.default_rng(seed)
    dtype = np.dtype(jnp.dtype(dtype))
    inexact = jnp.issubdtype(dtype, jnp.inexact)
    if parameter and inexact:
        return (random.normal(size=shape) / np.sqrt(max(shape[:1] or (1,)) or 1) + 0.01).astype(dtype)
    if inexact and draw == "fractions":
        return random.uniform(0.05, 0.95, size=shape).astype(dtype)
    values = random.integers(0, 2, size=shape)
    if len(shape) > 1:
        values[..., 0] = 1
    if not shape:
        values = np.asarray(1)
    if draw == "ignored" and shape and jnp.issubdtype(dtype, jnp.signedinteger) and not parameter:
        values = np.where((values == 0) & (random.random(size=shape) < 0.8), -100, values)
    return (values + (draw == "fractions" and dtype != np.bool_)).astype(dtype)


@dataclass(frozen=True)
class Inputs:
    """The leaves of a call, ready to be evaluated on some rows.

    Args:
        structure: of arguments and keyword arguments.
        values: of all leaves; those that are split have the rows of the whole.
        split: which leaves are cut.
        axes: where their rows are.
        fixed: which leaves are no arrays, and part of the program.
    """

    structure: Any
    values: list[Any]
    split: list[bool]
    axes: list[int]
    fixed: list[bool]


def inputs_of(
    call: Call,
    rows: np.ndarray,
    draw: Draw,
    *,
    wide: bool,
    empty: Sequence[int] | np.ndarray = (),
    counted: frozenset[int] | None = None,
) -> Inputs:
    """Return the values of a call on the rows of these numbers; made up where there are none.

    Args:
        call: of the user's function.
        rows: numbers of the rows.
        draw: what stands for arrays without values.
        wide: in float64.
        empty: rows, by their place in `rows`, in which the counted arrays are zeros.
        counted: which of the leaves that are split, in their order; None: all.
    """
    roles = call.roles
    positions = roles.differentiated
    differentiated = (positions,) if isinstance(positions, int) else positions
    modes: dict[Any, Any] = {
        argument.where: zip(argument.modes, argument.axes, strict=True) for argument in roles.others
    }
    values, split, axes, fixed = [], [], [], []
    seed = 0
    for where, argument in [*enumerate(call.args), *sorted(call.kwargs.items())]:  # as JAX flattens a dict
        leaves = jax.tree.leaves(argument)
        same = [("same", 0)] * len(leaves)
        for leaf, (mode, axis) in zip(leaves, modes.get(where, same), strict=True):
            seed += 1
            cut = mode == "rows"
            zeroed = len(empty) and (counted is None or sum(split) in counted)
            split.append(cut)
            axes.append(axis)
            fixed.append(not is_array(leaf))
            if fixed[-1]:
                values.append(leaf)
                continue
            shape = (*leaf.shape[:axis], len(rows), *leaf.shape[axis + 1 :]) if cut else tuple(leaf.shape)
            if is_key(leaf) or where == roles.rng:
                one = jax.random.key(0, impl=EQUAL_ROWS)
                values.append(jnp.broadcast_to(one, shape if is_key(leaf) else ()))
                continue
            parameter = where in differentiated
            if isinstance(leaf, jax.core.Tracer) or (draw != "real" and cut):
                value = made_up(shape, leaf.dtype, draw, parameter=parameter, seed=seed)
            else:
                value = rows_of(np.asarray(leaf), rows, axis) if cut else leaf
            if cut and zeroed:
                value[(*[slice(None)] * axis, empty)] = 0  # made up: no array of the user's
            if wide and jnp.issubdtype(value.dtype, jnp.inexact):
                complex_ = jnp.issubdtype(value.dtype, jnp.complexfloating)
                value = np.asarray(value).astype(np.complex128 if complex_ else np.float64)
            values.append(value)
    return Inputs(jax.tree.structure((call.args, call.kwargs)), values, split, axes, fixed)


def evaluated(
    call: Call, inputs: Inputs, rows: np.ndarray, programs: Programs, whole: frozenset[int] = frozenset()
) -> tuple[Evaluated, set[Any]]:
    """Evaluate the function on some rows of the inputs; return the result and the dtypes that it computes in.

    Args:
        call: of the user's function.
        inputs: of the whole.
        rows: numbers of the rows.
        programs: compiled so far, by the shapes of their arguments; it grows.
        whole: leaves that are not cut after all.
    """
    taken = [
        rows_of(value, rows, axis) if cut and number not in whole else value
        for number, (value, cut, axis) in enumerate(
            zip(inputs.values, inputs.split, inputs.axes, strict=True)
        )
    ]
    arrays = [value for value, fixed in zip(taken, inputs.fixed, strict=True) if not fixed]
    key = (len(rows), *((value.shape, str(value.dtype)) for value in arrays))
    if key not in programs:
        programs[key] = _compiled(program_of(call, inputs, len(rows)), arrays)
    run, shape, dtypes = programs[key]
    found = jax.tree.structure(shape).unflatten(run(*arrays))
    losses, weights, gradients = jax.tree.map(_on_host, found)
    split = [np.asarray(v) for v, cut in zip(taken, inputs.split, strict=True) if cut and not is_key(v)]
    numbers = [{name: float(one) for name, one in each.items()} for each in (losses, weights)]
    return Evaluated(len(rows), numbers[0], numbers[1], gradients, split), dtypes


def program_of(call: Call, inputs: Inputs, samples: int) -> Callable[..., Any]:
    """Return a function from arrays to the losses, the weights and the gradients of the terms."""
    positions = call.roles.differentiated
    places = (positions,) if isinstance(positions, int) else positions

    def program(*arrays: Any) -> Any:
        given = iter(arrays)
        leaves = [
            value if fixed else next(given) for value, fixed in zip(inputs.values, inputs.fixed, strict=True)
        ]
        args, kwargs = inputs.structure.unflatten(leaves)
        weight = call.weight_of(samples, args, kwargs)

        def losses(*chosen: Any) -> Any:
            positional = list(args)
            for place, value in zip(places, chosen, strict=True):
                positional[place] = value
            outcome = call.evaluate(Arguments(tuple(positional), kwargs, weight))
            if outcome.has_terms:
                return outcome.loss, outcome.weight
            return {"": outcome.loss}, {"": outcome.weight}

        chosen = [args[place] for place in places]
        terms, backward, own = jax.vjp(losses, *chosen, has_aux=True)
        if len(terms) == 1:
            gradients = {name: backward({name: jnp.ones_like(loss)}) for name, loss in terms.items()}
        else:  # another term may be NaN, and 0 x NaN is no 0
            gradients = {name: _gradient(losses, name, chosen) for name in terms}
        return terms, own, {name: jax.tree.leaves(each) for name, each in gradients.items()}

    return program


def _gradient(losses: Callable[..., Any], name: str, chosen: Sequence[Any]) -> Any:
    loss, backward = jax.vjp(lambda *given: losses(*given)[0][name], *chosen)
    return backward(jnp.ones_like(loss))


def _compiled(program: Callable[..., Any], arrays: list[Any]) -> tuple[Callable[..., Any], Any, set[Any]]:
    """A program on its own, whatever it closes over: outside of the transformations that it is traced in."""
    closed, shape = jax.make_jaxpr(program, return_shape=True)(*arrays)
    consts = [_const(const, number) for number, const in enumerate(closed.consts)]
    quiet = ClosedJaxpr(without_debugging(closed.jaxpr), consts)
    # Lowered before it is called: a call inside the user's `jit` would be traced into that program.
    lowered = jax.jit(jaxpr_as_fun(quiet)).lower(*arrays)
    # A program that runs once, on a few rows, is compiled in half the time.
    options = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None
    return lowered.compile(compiler_options=options), shape, set(_dtypes(closed.jaxpr))


def _on_host(leaf: Any) -> np.ndarray:
    array = np.asarray(leaf)
    return array.astype(np.complex128 if np.iscomplexobj(array) else np.float64)


def _const(const: Any, number: int) -> Any:
    """A value that the function closes over; made up where it is traced itself."""
    if not isinstance(const, jax.core.Tracer):
        return const
    if is_key(const):
        return jnp.broadcast_to(jax.random.key(number), const.shape)
    return made_up(tuple(const.shape), const.dtype, "counts", parameter=True, seed=number)


def _dtypes(jaxpr: Any) -> Iterator[Any]:
    """The floating dtypes in a program, those of its inner programs too."""
    for equation in jaxpr.eqns:
        for variable in equation.outvars:
            dtype = getattr(variable.aval, "dtype", None)
            if dtype is not None and jnp.issubdtype(dtype, jnp.floating):
                yield jnp.dtype(dtype)
        for program in within(equation):
            yield from _dtypes(program)


def parts_of(sizes: Sequence[int], layout: Layout) -> list[np.ndarray]:
    """Return the numbers of the rows of each micro-batch: full ones, and perhaps a tail.

    Examples:
        >>> [part.tolist() for part in parts_of((2, 2, 1), "strided")]
        [[0, 2], [1, 3], [4]]
    """
    found = []
    for group in groups(sum(sizes), microbatch_size=sizes[0]):
        rows = group.start + np.arange(group.count * group.size)
        found += [
            *(rows.reshape(-1, group.count).T if layout == "strided" else rows.reshape(group.count, -1))
        ]
    return found


def evidence(
    call: Call,
    sizes: Sequence[int],
    rows: np.ndarray,
    draw: Draw,
    programs: Programs,
    whole: frozenset[int] = frozenset(),
    counted: frozenset[int] | None = None,
) -> Evidence | None:
    """Evaluate the rows as a whole and in parts; None where the function cannot be evaluated on them.

    Args:
        call: of the user's function.
        sizes: of the parts.
        rows: numbers of the rows of the whole.
        draw: what stands for arrays without values; other than "real", also for the batch.
        programs: compiled so far; it grows.
        whole: leaves that are not cut after all.
        counted: which of the split leaves are zeros in the last part of the draw "empty"; None: all.
    """
    for wide in (True, False):
        precision = jax.enable_x64(wide or jax.config.jax_enable_x64)
        try:
            with warnings.catch_warnings(), precision:
                warnings.simplefilter("ignore")  # of dtypes that are not those of the training
                split = parts_of(sizes, call.options.layout)
                empty = split[-1] if draw == "empty" else ()
                inputs = inputs_of(call, rows, draw, wide=wide, empty=empty, counted=counted)
                # The parts first: with a leaf that is not cut most functions cannot even be traced on them.
                pairs = [evaluated(call, inputs, part, programs, whole) for part in split]
                together, seen = evaluated(call, inputs, np.arange(len(rows)), programs)
        except Exception:  # noqa: BLE001  (the user's code, in a precision or a size it is not made for)
            continue
        for _, more in pairs:
            seen = seen | more
        bits = min((jnp.finfo(dtype).bits for dtype in seen), default=32)
        return Evidence(together, [part for part, _ in pairs], TOLERANCE.get(bits, 5e-2))
    return None
