# JAX is an extra. Where it is not installed, pyright cannot resolve it:
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""Check of what is declared about a loss, at the first call with arguments of a structure.

A declaration fixes how losses of parts make the loss of the whole. Both sides are computed on a few rows, and
compared gradient by gradient. Where they differ, the error names the declaration that does hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from .comparison import wrong_terms
from .diagnosis import Tried, error_of, kept_above_zero
from .loop import Arguments, Call
from .probe import Draw, Programs, evidence, inputs_of
from .programs import needed
from .roles import is_array, is_key, leaves_of

MOST_ELEMENTS = 2**26  # made-up values: 0.5 GB in float64
MOST_ROWS = 64  # of a micro-batch that is evaluated in its true size
Checked = set[Any]


def check_once(call: Call, checked: Checked) -> None:
    """Check the declaration, once for each structure of arguments.

    Args:
        call: to be checked.
        checked: structures that were; it grows.

    Raises:
        LossSpecError: another reduction, weight or splitting holds; the text names it.
        CoupledSamplesError: no weights explain the loss.
    """
    if call.samples_of_largest >= call.roles.samples:
        return  # one micro-batch is the batch
    leaves, structure = jax.tree.flatten((call.args, call.kwargs))
    arrays = [leaf for leaf in leaves if is_array(leaf)]
    traced = [leaf for leaf in arrays if isinstance(leaf, jax.core.Tracer)]
    shapes = tuple((leaf.shape, str(leaf.dtype)) for leaf in arrays)
    key = (structure, shapes, bool(traced))
    if key in checked:
        return
    if sum(leaf.size for leaf in traced) > MOST_ELEMENTS:
        return
    programs: Programs = {}
    draws: list[Draw] = ["counts"] if traced else ["real", "counts"]
    if any(mode == "rows" and np.issubdtype(leaf.dtype, np.signedinteger) for leaf, mode in _rows_of(call)):
        draws.append("ignored")
    if any(call.options.weight_of(term) is not None for term in call.options.terms or ("",)):
        draws.append("empty")
    doubted: set[str] = set()
    for draw in draws:
        doubted |= _check_on(call, draw, programs, doubted)
    # Only now: a call that is repeated after the error, as a cell of a notebook is, raises it again.
    checked.add(key)


def _check_on(call: Call, draw: Draw, programs: Programs, doubted: set[str]) -> set[str]:
    """Raise what the values of one draw contradict; return the terms that may still agree on real ones."""
    tried = _evidence(call, draw, programs)
    if tried is None and draw == "counts":
        tried = _evidence(call, "fractions", programs)  # zeros may have had no logarithm
    if tried is None:
        return set()
    if draw == "empty":
        return _check_on_empty(call, tried, programs, doubted)
    excused: dict[str, tuple[str, Exception]] = {}
    for term in wrong_terms(call, tried.found):
        error, counts = error_of(call, term, tried, programs)
        if draw == "real" or counts is None or kept_above_zero(tried.found, term):
            raise error
        if not _may_agree(call, term, counts, tried.draw, doubted):
            raise error
        if draw == "counts":
            excused[term] = counts, error
    for one, (counts, error) in excused.items():
        # Each alone may be a mask that agrees with a number of tokens; both together are interchanged.
        if any(
            leaves_read(call, one) == {other_counts}
            and leaves_read(call, other) == {counts} != {other_counts}
            for other, (other_counts, _) in excused.items()
        ):
            raise error
    return {*excused}


def _check_on_empty(call: Call, tried: Tried, programs: Programs, doubted: set[str]) -> set[str]:
    """Raise an error where a part counts nothing and is left out, though it has a loss."""
    for term in wrong_terms(call, tried.found):
        if term not in doubted and kept_above_zero(tried.found, term):
            raise error_of(call, term, tried, programs)[0]
    return set()


def _may_agree(call: Call, term: str, counts: str, draw: Draw, doubted: set[str]) -> bool:
    """Tell whether real values may agree with a weight that made-up ones contradict.

    In a training a mask agrees with a number of tokens; where they are made up it does not. But a weight that
    reads no values is a number of rows. And one that reads the array that the loss counts, and no other,
    counts it otherwise.

    Args:
        call: with the weight.
        term: of the loss.
        counts: label of the array that the loss counts; "" for rows, "?" where it is not known.
        draw: the values that contradict it.
        doubted: terms that zeros and ones contradict: to have less than 0 in an array is not for every array.
    """
    if call.options.weight_of(term) is None:
        return False
    read = leaves_read(call, term)
    if not read:
        return False
    return read != {counts} or not (draw == "counts" or term in doubted)


def leaves_read(call: Call, term: str) -> set[str]:
    """Return the labels of the batch's arrays whose values a weight depends on.

    Parameters, other arguments and arrays that it closes over are "elsewhere".
    """
    labels = [
        label for argument in call.roles.others for label, _, mode in leaves_of(argument) if mode == "rows"
    ]
    numbers, elsewhere = _read(call, term)
    read = {labels[number] for number in numbers}
    return read | {"elsewhere"} if elsewhere else read


def _read(call: Call, term: str) -> tuple[frozenset[int], bool]:
    """Return which of the split leaves a weight reads, in their order, and whether it reads others."""
    rows = _rows(call.roles.samples, _few(call))
    inputs = inputs_of(call, rows, "counts", wide=False)

    def program(*split: Any) -> Any:
        given = iter(split)
        values = [
            next(given) if cut else value for value, cut in zip(inputs.values, inputs.split, strict=True)
        ]
        args, kwargs = inputs.structure.unflatten(values)
        weight = call.weight_of(len(rows), args, kwargs)
        if call.options.weight_of(term) == "returned":
            weight = call.evaluate(Arguments(args, kwargs, weight)).weight
        return weight[term] if term else weight

    arrays = [value for value, cut in zip(inputs.values, inputs.split, strict=True) if cut]
    # Traced, not run: what a weight reads does not depend on the values.
    jaxpr = jax.make_jaxpr(program)(*arrays).jaxpr
    wanted = needed(jaxpr)[1]
    read = frozenset(number for number, variable in enumerate(jaxpr.invars) if variable in wanted)
    return read, not wanted.isdisjoint(jaxpr.constvars)


def _evidence(call: Call, draw: Draw, programs: Programs) -> Tried | None:
    """Evidence of a few rows; of micro-batches in their true size where a few contradict the declaration."""
    few = _few(call)
    first = _tried(call, few, draw, programs)
    usable = first if first is not None and first.found.finite else None
    if usable is not None and not wrong_terms(call, usable.found):
        return usable
    if first is not None and usable is None and draw != "real":
        return None  # more rows of made-up values are no better
    size, samples = call.samples_of_largest, call.roles.samples
    true = size if size <= MOST_ROWS else 8
    sizes = [true] * max(2, min(samples // true, 8 // true))  # single rows may be alike
    if size == true and samples % size:
        sizes.append(samples % size)
    if sum(sizes) > samples:
        sizes = [true, samples - true]
    second = first if sizes == few else _tried(call, sizes, draw, programs)
    if second is not None and second.found.finite:
        return second
    return usable


def _tried(call: Call, sizes: Sequence[int], draw: Draw, programs: Programs) -> Tried | None:
    rows = _rows(call.roles.samples, sizes)
    counted = None
    if draw == "empty":  # nothing is counted in the last part, and its other values stay
        terms = [term for term in call.options.terms or ("",) if call.options.weight_of(term) is not None]
        counted = frozenset[int]().union(*(_read(call, term)[0] for term in terms))
    found = evidence(call, sizes, rows, draw, programs, counted=counted)
    return None if found is None else Tried(found, draw, sizes, rows)


def _rows_of(call: Call) -> list[tuple[Any, str]]:
    found = [(leaf, mode) for argument in call.roles.batch for _, leaf, mode in leaves_of(argument)]
    return [(leaf, mode) for leaf, mode in found if is_array(leaf) and not is_key(leaf)]


def _few(call: Call) -> list[int]:
    """Sizes of a few micro-batches. All are the same, so that one program computes them."""
    size, samples = min(call.samples_of_largest, 3), call.roles.samples
    count = min(samples // size, 3 if size > 1 else 6)
    return [size] * count if count > 1 else [size, samples - size]


def _rows(samples: int, sizes: Sequence[int]) -> np.ndarray:
    """Numbers of rows: blocks spread over the batch, as pairs of rows may belong together."""
    starts = np.linspace(0, samples - sum(sizes), len(sizes)).astype(int) // 2 * 2
    offsets = np.cumsum([0, *sizes[:-1]])
    blocks = [
        start + offset + np.arange(size) for start, offset, size in zip(starts, offsets, sizes, strict=True)
    ]
    return np.concatenate(blocks)
