# JAX is an extra. Where it is not installed, pyright cannot resolve it:
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""Losses and gradients of a few rows at once and in parts, in float64 if the function allows it.

Inside `jax.jit` arrays have no values, so values are made up: a loss that separates into rows does so for any
values. Random keys are replaced by keys that draw the same numbers for every row, so that the dropout of a
row does not depend on the split.
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

TOLERANCE = {64: 1e-6, 32: 2e-4}  # relative, by the bits of the shortest dtype in the loss; 5e-2 below 32
Programs = dict[Any, Any]
Draw = Literal["real", "counts", "ignored", "fractions", "empty"]


@dataclass(frozen=True)
class Evaluated:
    """Loss, weight and gradient for a set of rows, by name of the term ("" for one loss).

    Args:
        samples: the number of rows.
        losses: the loss of each term.
        weights: the weight of each term.
        gradients: for each term, one array for each differentiated leaf.
        rows: the rows of each leaf that is split.
    """

    samples: int
    losses: dict[str, float]
    weights: dict[str, float]
    gradients: dict[str, list[np.ndarray]]
    rows: list[np.ndarray]

    def finite(self, term: str) -> bool:
        """Return True if loss, weight and gradient of a term are finite."""
        arrays = [self.losses[term], self.weights[term], *self.gradients[term]]
        return all(bool(np.isfinite(array).all()) for array in arrays)


@dataclass(frozen=True)
class Evidence:
    """The same rows evaluated as a whole and in parts.

    Args:
        whole: the evaluation of all rows at once.
        parts: the evaluation of each part.
        tolerance: the largest relative difference that is rounding, in the precision of the evaluation.
    """

    whole: Evaluated
    parts: list[Evaluated]
    tolerance: float

    @property
    def finite(self) -> bool:
        """Return True if every number is finite, apart from those of parts with weight 0."""
        return all(
            self.whole.finite(term) and all(one.finite(term) or one.weights[term] == 0 for one in self.parts)
            for term in self.whole.losses
        )


def mixed(words: Any) -> Any:
    """Return the next number of a pseudo-random uint32 sequence."""
    words = (words ^ (words >> 16)) * np.uint32(0x7FEB352D)
    return (words ^ (words >> 15)) * np.uint32(0x846CA68B) + np.uint32(0x9E3779B9)


def _bits(key: Any, width: int, shape: tuple[int, ...]) -> Any:
    """Return one random number of a key, repeated in the whole shape: equal in every row."""
    word = mixed(key[0] ^ mixed(key[1]))
    wide = {8: jnp.uint8, 16: jnp.uint16, 32: jnp.uint32, 64: jnp.uint64}[width]
    if width == 64:
        word = (word.astype(jnp.uint64) << 32) | mixed(word).astype(jnp.uint64)
    return jnp.broadcast_to(word.astype(wide), shape)


# A random number generator whose draws are constant over an array. Splits and folds give new numbers, but
# equal keys for all rows.
EQUAL_ROWS = define_prng_impl(
    key_shape=(2,),
    seed=lambda seed: jnp.stack([jnp.uint32(17), jnp.uint32(29)]),
    split=lambda key, shape: jnp.broadcast_to(mixed(key), (*shape, 2)),
    random_bits=_bits,
    fold_in=lambda key, data: mixed(key),
    name="superbatch_equal_rows",
)


def made_up(shape: tuple[int, ...], dtype: Any, draw: Draw, *, parameter: bool, seed: int) -> np.ndarray:
    """Return made-up values for an array without values.

    Args:
        shape: the shape.
        dtype: the dtype.
        draw: ``"counts"``: zeros and ones as in masks, labels and token ids, with a one at the start of the
            last axis. ``"fractions"``: between 0 and 1, integers 1 and 2. ``"ignored"``: as "counts", with
            -100 in place of most zeros of signed integers. ``"empty"``: as "counts"; the caller sets the last
            part to zeros.
        parameter: True for the initial values of a parameter: normal numbers for a floating dtype.
        seed: the seed of the values.

    Examples:
        >>> made_up((2, 3), "int32", "counts", parameter=False, seed=0)[:, 0].tolist()
        [1, 1]
    """
    random = np.random.default_rng(seed)
    dtype = np.dtype(jnp.dtype(dtype))
    inexact = jnp.issubdtype(dtype, jnp.inexact)
    if parameter and inexact:  # scaled like initial weights, so that activations do not overflow
        return (random.normal(size=shape) / np.sqrt(max(shape[:1] or (1,)) or 1) + 0.01).astype(dtype)
    if inexact and draw == "fractions":
        return random.uniform(0.05, 0.95, size=shape).astype(dtype)
    values = random.integers(0, 2, size=shape)
    if len(shape) > 1:
        values[..., 0] = 1  # every row counts something
    if not shape:
        values = np.asarray(1)
    if draw == "ignored" and shape and jnp.issubdtype(dtype, jnp.signedinteger) and not parameter:
        values = np.where((values == 0) & (random.random(size=shape) < 0.8), -100, values)
    return (values + (draw == "fractions" and dtype != np.bool_)).astype(dtype)


@dataclass(frozen=True)
class Inputs:
    """The leaves of a call on a few rows of the batch.

    Args:
        structure: the tree structure of arguments and keyword arguments.
        values: the value of each leaf; leaves that are split have just these rows.
        split: for each leaf, whether it is split.
        axes: for each leaf, the axis of its rows.
        fixed: for each leaf, whether it is no array, but a constant of the program.
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
    """Return the leaves of a call on some rows, with made-up values where `draw` or `jax.jit` requires them.

    Args:
        call: the call.
        rows: the numbers of the rows in the batch.
        draw: the kind of values, see `made_up`; ``"real"`` takes those of the call where it has any.
        wide: whether to cast floats to float64.
        empty: positions in `rows` where the arrays that a weight counts are set to zeros.
        counted: the indices of these arrays among the leaves that are split; None: all of them.
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
            seed += 1  # different values for each leaf
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
                value[(*[slice(None)] * axis, empty)] = 0  # a made-up array, not one of the user
            if wide and jnp.issubdtype(value.dtype, jnp.inexact):
                complex_ = jnp.issubdtype(value.dtype, jnp.complexfloating)
                value = np.asarray(value).astype(np.complex128 if complex_ else np.float64)
            values.append(value)
    return Inputs(jax.tree.structure((call.args, call.kwargs)), values, split, axes, fixed)


def evaluated(
    call: Call, inputs: Inputs, rows: np.ndarray, programs: Programs, whole: frozenset[int] = frozenset()
) -> tuple[Evaluated, set[Any]]:
    """Evaluate the function on some rows of the inputs; return the result and the dtypes of the computation.

    Args:
        call: the call.
        inputs: the leaves for all rows.
        rows: positions of the rows in the inputs.
        programs: cache of compiled programs by the shapes of their arguments.
        whole: the indices of split leaves to pass whole nevertheless.
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
    result = jax.tree.structure(shape).unflatten(run(*arrays))
    losses, weights, gradients = jax.tree.map(_on_host, result)
    split = [np.asarray(v) for v, cut in zip(taken, inputs.split, strict=True) if cut and not is_key(v)]
    numbers = [{name: float(one) for name, one in each.items()} for each in (losses, weights)]
    return Evaluated(len(rows), numbers[0], numbers[1], gradients, split), dtypes


def program_of(call: Call, inputs: Inputs, samples: int) -> Callable[..., Any]:
    """Return a function from the arrays of the inputs to losses, weights and gradients, each by term."""
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
        else:  # not by one vjp with a cotangent of 0 for other terms: one may be NaN, and 0 x NaN is NaN
            gradients = {name: _gradient(losses, name, chosen) for name in terms}
        return terms, own, {name: jax.tree.leaves(each) for name, each in gradients.items()}

    return program


def _gradient(losses: Callable[..., Any], name: str, chosen: Sequence[Any]) -> Any:
    """Return the gradient of a single term."""
    loss, backward = jax.vjp(lambda *given: losses(*given)[0][name], *chosen)
    return backward(jnp.ones_like(loss))


def _compiled(program: Callable[..., Any], arrays: list[Any]) -> tuple[Callable[..., Any], Any, set[Any]]:
    """Compile a program, so that it runs although the caller may be inside `jax.jit`.

    Returns:
        The compiled program, the structure of its result, and its floating dtypes.
    """
    closed, shape = jax.make_jaxpr(program, return_shape=True)(*arrays)
    consts = [_const(const, number) for number, const in enumerate(closed.consts)]
    quiet = ClosedJaxpr(without_debugging(closed.jaxpr), consts)
    # Compiled ahead of time: a plain call inside the user's `jit` would be traced into the user's program.
    lowered = jax.jit(jaxpr_as_fun(quiet)).lower(*arrays)
    # Without optimization it compiles in half the time, and it runs only once, on a few rows.
    options = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None
    return lowered.compile(compiler_options=options), shape, set(_dtypes(closed.jaxpr))


def _on_host(leaf: Any) -> np.ndarray:
    array = np.asarray(leaf)
    return array.astype(np.complex128 if np.iscomplexobj(array) else np.float64)


def _const(const: Any, number: int) -> Any:
    """Return a value that the function closes over; a made-up one if it is traced."""
    if not isinstance(const, jax.core.Tracer):
        return const
    if is_key(const):
        return jnp.broadcast_to(jax.random.key(number), const.shape)
    return made_up(tuple(const.shape), const.dtype, "counts", parameter=True, seed=number)


def _dtypes(jaxpr: Any) -> Iterator[Any]:
    """Yield the floating dtypes in a program and in its inner programs."""
    for equation in jaxpr.eqns:
        for variable in equation.outvars:
            dtype = getattr(variable.aval, "dtype", None)
            if dtype is not None and jnp.issubdtype(dtype, jnp.floating):
                yield jnp.dtype(dtype)
        for program in within(equation):
            yield from _dtypes(program)


def parts_of(sizes: Sequence[int], layout: Layout) -> list[np.ndarray]:
    """Return the row numbers of each part, assigned as the layout assigns rows to micro-batches.

    Args:
        sizes: the number of rows of each part: equal, but for a smaller last one.
        layout: the layout.

    Examples:
        >>> [part.tolist() for part in parts_of((2, 2, 1), "strided")]
        [[0, 2], [1, 3], [4]]
    """
    parts = []
    for group in groups(sum(sizes), microbatch_size=sizes[0]):
        rows = group.start + np.arange(group.count * group.size)
        parts += [
            *(rows.reshape(-1, group.count).T if layout == "strided" else rows.reshape(group.count, -1))
        ]
    return parts


def evidence_of(
    call: Call,
    sizes: Sequence[int],
    rows: np.ndarray,
    draw: Draw,
    programs: Programs,
    whole: frozenset[int] = frozenset(),
    counted: frozenset[int] | None = None,
) -> Evidence | None:
    """Evaluate some rows as a whole and in parts; return None if the function cannot be evaluated on them.

    Args:
        call: the call.
        sizes: the number of rows of each part.
        rows: the numbers of all rows in the batch.
        draw: the kind of values, see `made_up`; ``"real"`` takes the call's where it has any.
        programs: cache of compiled programs.
        whole: the indices of split leaves to pass whole nevertheless.
        counted: for the draw ``"empty"``, the split leaves that are zeros in the last part; None: all.
    """
    # float64 first, which shows small differences; not every function can be traced in it.
    for wide in (True, False):
        precision = jax.enable_x64(wide or jax.config.jax_enable_x64)
        try:
            with warnings.catch_warnings(), precision:
                warnings.simplefilter("ignore")  # about float64, which training does not use
                split = parts_of(sizes, call.options.layout)
                empty = split[-1] if draw == "empty" else ()
                inputs = inputs_of(call, rows, draw, wide=wide, empty=empty, counted=counted)
                # Parts first: with a leaf in `whole` most functions raise on a part, at little cost.
                pairs = [evaluated(call, inputs, part, programs, whole) for part in split]
                together, seen = evaluated(call, inputs, np.arange(len(rows)), programs)
        except Exception:  # noqa: BLE001  (the user's function may raise anything in float64 or on few rows)
            continue
        for _, more in pairs:
            seen = seen | more
        bits = min((jnp.finfo(dtype).bits for dtype in seen), default=32)
        return Evidence(together, [part for part, _ in pairs], TOLERANCE.get(bits, 5e-2))
    return None
