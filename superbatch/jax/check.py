# JAX is an extra. Where it is not installed, pyright cannot resolve it:
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""Check of the declared reduction and weight of a loss, once for each structure of arguments.

The declared reduction and weight define how the losses of micro-batches combine to the loss of the batch. The
check evaluates loss and gradient of a few rows at once, and combines those of parts of these rows. If the two
differ, the error names the reduction and weight with which they agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from .comparison import wrong_terms
from .diagnosis import Tried, error_of, kept_above_zero
from .loop import Arguments, Call
from .probe import Draw, Programs, evidence_of, inputs_of
from .programs import needed
from .roles import is_array, is_key, leaves_of

MOST_ELEMENTS = 2**26  # most made-up values: 0.5 GB in float64; the check is skipped above
MOST_ROWS = 64  # most rows of a micro-batch that is evaluated in its true size
Checked = set[Any]


def check_once(call: Call, checked: Checked) -> None:
    """Check the declared reduction and weight, once for each structure of arguments.

    Args:
        call: the call to check.
        checked: the structures that were checked before; the one of this call is added.

    Raises:
        LossSpecError: the loss has another reduction or weight, or an argument must not be split; the text
            names the remedy.
        CoupledSamplesError: no weighted sum of the losses of parts of the rows is the loss of all of them.
    """
    if call.samples_of_largest >= call.roles.samples:
        return  # the batch is one micro-batch
    leaves, structure = jax.tree.flatten((call.args, call.kwargs))
    arrays = [leaf for leaf in leaves if is_array(leaf)]
    traced = [leaf for leaf in arrays if isinstance(leaf, jax.core.Tracer)]
    shapes = tuple((leaf.shape, str(leaf.dtype)) for leaf in arrays)
    key = (structure, shapes, bool(traced))  # a call with values checks more than a traced one
    if key in checked:
        return
    if sum(leaf.size for leaf in traced) > MOST_ELEMENTS:
        return
    programs: Programs = {}
    draws: list[Draw] = ["counts"] if traced else ["real", "counts"]
    # "ignored" reveals a loss that ignores labels of -100; "empty" a loss that divides by max(count, 1).
    if any(mode == "rows" and np.issubdtype(leaf.dtype, np.signedinteger) for leaf, mode in _rows_of(call)):
        draws.append("ignored")
    if any(call.options.weight_of(term) is not None for term in call.options.terms or ("",)):
        draws.append("empty")
    doubted: set[str] = set()
    for draw in draws:
        doubted |= _check_on(call, draw, programs, doubted)
    # Only after success: a call that is repeated after an error, as in a notebook, must raise it again.
    checked.add(key)


def _check_on(call: Call, draw: Draw, programs: Programs, doubted: set[str]) -> set[str]:
    """Check the call with the values of one draw.

    Returns:
        The terms whose declared weight is wrong for these values, but may be right for real ones.

    Raises:
        LossSpecError, CoupledSamplesError: as `check_once`.
    """
    tried = _evidence(call, draw, programs)
    if tried is None and draw == "counts":
        tried = _evidence(call, "fractions", programs)  # the loss may take a logarithm, infinite at 0
    if tried is None:
        return set()
    if draw == "empty":
        return _check_on_empty(call, tried, programs, doubted)
    excused: dict[str, tuple[str, Exception]] = {}
    for term in wrong_terms(call, tried.evidence):
        error, counts = error_of(call, term, tried, programs)
        if draw == "real" or counts is None or kept_above_zero(tried.evidence, term):
            raise error
        if not _may_agree(call, term, counts, tried.draw, doubted):
            raise error
        if draw == "counts":
            excused[term] = counts, error
    for one, (counts, error) in excused.items():
        # A weight may sum a mask whose sum, in real data, is the count of the loss. But if each of two terms
        # counts the array that the weight of the other one reads, the user has swapped the two weights.
        if any(
            leaves_read(call, one) == {other_counts}
            and leaves_read(call, other) == {counts} != {other_counts}
            for other, (other_counts, _) in excused.items()
        ):
            raise error
    return {*excused}


def _check_on_empty(call: Call, tried: Tried, programs: Programs, doubted: set[str]) -> set[str]:
    """Raise if the last part, which has weight 0 and is left out, has a loss that is not 0."""
    for term in wrong_terms(call, tried.evidence):
        if term not in doubted and kept_above_zero(tried.evidence, term):
            raise error_of(call, term, tried, programs)[0]
    return set()


def _may_agree(call: Call, term: str, counts: str, draw: Draw, doubted: set[str]) -> bool:
    """Return True if the declared weight may be right for real values although it is wrong for made-up ones.

    Example: the weight sums a mask and the loss counts labels. Both give the same number in real data, but
    not in made-up data. Two weights are wrong for any values: one that reads no array, as it depends on the
    number of rows alone, and one that reads just the array that the loss counts, as it counts it differently.

    Args:
        call: the call with the weight.
        term: the name of the term; "" for one loss.
        counts: label of the array that the loss counts; "" for rows, "?" if it is not known.
        draw: the values that contradict the weight.
        doubted: terms whose weight is wrong for the draw "counts" (zeros and ones). A weight that is wrong
            only for the -100 of the draw "ignored" may be right: real arrays may have no -100.
    """
    if call.options.weight_of(term) is None:
        return False
    read = leaves_read(call, term)
    if not read:
        return False
    return read != {counts} or not (draw == "counts" or term in doubted)


def leaves_read(call: Call, term: str) -> set[str]:
    """Return the labels of the arrays of the batch on whose values a weight depends.

    The label "elsewhere" stands for parameters, other arguments and arrays that the weight closes over.
    """
    labels = [
        label for argument in call.roles.others for label, _, mode in leaves_of(argument) if mode == "rows"
    ]
    numbers, elsewhere = _read(call, term)
    read = {labels[number] for number in numbers}
    return read | {"elsewhere"} if elsewhere else read


def _read(call: Call, term: str) -> tuple[frozenset[int], bool]:
    """Return the indices of the split leaves that a weight reads, and whether it reads other arrays."""
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
    # A trace is enough: the arrays that a weight reads do not depend on the values.
    jaxpr = jax.make_jaxpr(program)(*arrays).jaxpr
    wanted = needed(jaxpr)[1]
    read = frozenset(number for number, variable in enumerate(jaxpr.invars) if variable in wanted)
    return read, not wanted.isdisjoint(jaxpr.constvars)


def _evidence(call: Call, draw: Draw, programs: Programs) -> Tried | None:
    """Evaluate a few rows; if they contradict the weights, evaluate micro-batches of the true size instead.

    Returns:
        The evidence; None if the loss cannot be evaluated, or is not finite.
    """
    few = _few(call)
    first = _tried(call, few, draw, programs)
    usable = first if first is not None and first.evidence.finite else None
    if usable is not None and not wrong_terms(call, usable.evidence):
        return usable
    if first is not None and usable is None and draw != "real":
        return None  # with more rows the loss of made-up values would not be finite either
    # Small parts may separate two rows that belong together, where micro-batches of the true size do not.
    size, samples = call.samples_of_largest, call.roles.samples
    true = size if size <= MOST_ROWS else 8
    sizes = [true] * max(2, min(samples // true, 8 // true))  # micro-batches of one row may be alike: take 8
    if size == true and samples % size:
        sizes.append(samples % size)
    if sum(sizes) > samples:
        sizes = [true, samples - true]
    second = first if sizes == few else _tried(call, sizes, draw, programs)
    if second is not None and second.evidence.finite:
        return second
    return usable


def _tried(call: Call, sizes: Sequence[int], draw: Draw, programs: Programs) -> Tried | None:
    rows = _rows(call.roles.samples, sizes)
    counted = None
    if draw == "empty":  # the arrays that a weight counts are zeros in the last part; others keep values
        terms = [term for term in call.options.terms or ("",) if call.options.weight_of(term) is not None]
        counted = frozenset[int]().union(*(_read(call, term)[0] for term in terms))
    evidence = evidence_of(call, sizes, rows, draw, programs, counted=counted)
    return None if evidence is None else Tried(evidence, draw, sizes, rows)


def _rows_of(call: Call) -> list[tuple[Any, str]]:
    pairs = [(leaf, mode) for argument in call.roles.batch for _, leaf, mode in leaves_of(argument)]
    return [(leaf, mode) for leaf, mode in pairs if is_array(leaf) and not is_key(leaf)]


def _few(call: Call) -> list[int]:
    """Return the sizes of a few small micro-batches, equal if possible, so that one program suffices."""
    size, samples = min(call.samples_of_largest, 3), call.roles.samples
    count = min(samples // size, 3 if size > 1 else 6)
    return [size] * count if count > 1 else [size, samples - size]


def _rows(samples: int, sizes: Sequence[int]) -> np.ndarray:
    """Return row numbers for parts of these sizes: a block for each part, spread over the batch."""
    # Blocks at even rows, as pairs of rows may belong together.
    starts = np.linspace(0, samples - sum(sizes), len(sizes)).astype(int) // 2 * 2
    offsets = np.cumsum([0, *sizes[:-1]])
    blocks = [
        start + offset + np.arange(size) for start, offset, size in zip(starts, offsets, sizes, strict=True)
    ]
    return np.concatenate(blocks)
