# JAX is an extra. Where it is not installed, pyright cannot resolve it:
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""Check of what is declared about a loss, at the first call with arguments of a structure.

A declaration fixes how losses of parts make the loss of the whole. Both sides are computed on a few rows, and
compared gradient by gradient. Where they differ, the error names the declaration that does hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from ..errors import CoupledSamplesError, LossSpecError
from .loop import Arguments, Call
from .probe import Draw, Evaluated, Evidence, Programs, evidence, inputs_of
from .programs import needed
from .roles import is_array, is_key, leaves_of

MOST_ELEMENTS = 2**26  # made-up values: 0.5 GB in float64
MOST_ROWS = 64  # of a micro-batch that is evaluated in its true size
ADDITIVE = 1e-4  # relative difference of a weight from the sum over its parts
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
    doubted: set[str] = set()
    for draw in draws:
        doubted |= _check_on(call, draw, programs, doubted)
    # Only now: a call that is repeated after the error, as a cell of a notebook is, raises it again.
    checked.add(key)


class _Tried(NamedTuple):
    """Evidence, and what it was computed from."""

    found: Evidence
    draw: Draw
    sizes: Sequence[int]
    rows: np.ndarray


def _check_on(call: Call, draw: Draw, programs: Programs, doubted: set[str]) -> set[str]:
    """Raise what the values of one draw contradict; return the terms that may still agree on real ones."""
    tried = _evidence(call, draw, programs)
    if tried is None and draw == "counts":
        tried = _evidence(call, "fractions", programs)  # zeros may have had no logarithm
    if tried is None:
        return set()
    excused: set[str] = set()
    for term in wrong_terms(call, tried.found):
        error, counts = _error(call, term, tried, programs)
        if draw == "real" or counts is None or not _may_agree(call, term, counts, tried.draw, doubted):
            raise error
        if draw == "counts":
            excused.add(term)
    return excused


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
    rows = _rows(call.roles.samples, _few(call))
    inputs = inputs_of(call, rows, "counts", wide=False)
    labels = [
        label for argument in call.roles.others for label, _, mode in leaves_of(argument) if mode == "rows"
    ]

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
    read = {label for label, variable in zip(labels, jaxpr.invars, strict=True) if variable in wanted}
    return read if wanted.isdisjoint(jaxpr.constvars) else read | {"elsewhere"}


def _evidence(call: Call, draw: Draw, programs: Programs) -> _Tried | None:
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


def _tried(call: Call, sizes: Sequence[int], draw: Draw, programs: Programs) -> _Tried | None:
    rows = _rows(call.roles.samples, sizes)
    found = evidence(call, sizes, rows, draw, programs)
    return None if found is None else _Tried(found, draw, sizes, rows)


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


def _sum_of(
    factors: Sequence[float], parts: Sequence[Evaluated], term: str
) -> tuple[float, list[np.ndarray]]:
    """The sum of losses and of gradients with these factors; a factor of 0 leaves a NaN out."""
    kept = [(factor, part) for factor, part in zip(factors, parts, strict=True) if factor]
    loss = sum(factor * part.losses[term] for factor, part in kept)
    leaves = range(len(parts[0].gradients[term]))
    return loss, [sum((f * p.gradients[term][i] for f, p in kept), start=np.zeros(())) for i in leaves]


def agrees(found: Evidence, factors: Sequence[float], term: str, *, of_whole: float = 1.0) -> bool:
    """Tell whether parts with these factors give the whole, times a factor: the loss and every gradient.

    Args:
        found: the whole and the parts.
        factors: of the parts.
        term: its name; "" for one loss.
        of_whole: factor of the whole.
    """
    loss, gradients = _sum_of(factors, found.parts, term)
    wanted = [of_whole * leaf for leaf in found.whole.gradients[term]]
    size = [float(np.linalg.norm(leaf)) for leaf in wanted]
    limit = found.tolerance
    largest = sum(abs(f * p.losses[term]) for f, p in zip(factors, found.parts, strict=True) if f)
    if abs(loss - of_whole * found.whole.losses[term]) > limit * (
        largest + abs(of_whole * found.whole.losses[term])
    ):
        return False
    floor = 1e-2 * max(size, default=0.0)
    return all(
        float(np.linalg.norm(got - leaf)) <= limit * (norm + floor)
        for got, leaf, norm in zip(gradients, wanted, size, strict=True)
    )


def shares(weights: Sequence[float]) -> list[float]:
    """Return weights over their sum; zeros where that is 0."""
    total = sum(weights)
    return [weight / total if total else 0.0 for weight in weights]


def wrong_terms(call: Call, found: Evidence) -> list[str]:
    """Return the terms for which the declaration does not hold; one loss has the name ""."""
    wrong = []
    for term in found.whole.losses:
        weights = [part.weights[term] for part in found.parts]
        if sum(weights) <= 0 or min(weights) < 0:
            continue
        mean = call.options.reduction_of(term) == "mean"
        if not agrees(found, shares(weights) if mean else [1.0] * len(weights), term) or _not_additive(
            found, term
        ):
            wrong.append(term)
    return wrong


def _not_additive(found: Evidence, term: str) -> bool:
    total = sum(part.weights[term] for part in found.parts)
    return abs(total - found.whole.weights[term]) > ADDITIVE * total


def _typed(term: str, option: str, value: str) -> str:
    """An option as it is typed, for one loss or for a term."""
    return f"{option}={{{term!r}: {value}, ...}}" if term else f"{option}={value}"


def _error(
    call: Call, term: str, tried: _Tried, programs: Programs
) -> tuple[LossSpecError | CoupledSamplesError, str | None]:
    """The error for evidence against a term's declaration, and what the loss counts.

    That is None where it is no matter of weights alone, "" for rows, "?" where it is not known.
    """
    found, draw = tried.found, tried.draw
    name = f"term {term!r}" if term else "loss"
    weights = [part.weights[term] for part in found.parts]
    listed = ", ".join(f"{part.losses[term]:.6g} (weight {part.weights[term]:g})" for part in found.parts[:3])
    more = f" and {len(weights) - 3} more" if len(weights) > 3 else ""
    made = "; the values are made up, as inside jax.jit there are no others" if draw != "real" else ""
    given = (
        f"of {found.whole.samples} rows it is {found.whole.losses[term]:.6g}, of parts {listed}{more}{made}"
    )
    is_sum = call.options.reduction_of(term) == "sum"
    mean = _typed(term, "reduction", '"mean"') + ", " if is_sum else ""
    if _not_additive(found, term):
        parts = " + ".join(f"{weight:g}" for weight in weights)
        of_term = f" of the {name}" if term else ""
        return LossSpecError(
            f"Weights{of_term} do not add up: {found.whole.samples} rows weigh "
            f"{found.whole.weights[term]:g}, their parts {parts}. Let the weight be a count or a sum, not a "
            "mean or a constant."
        ), None
    if not is_sum and agrees(found, [1.0] * len(weights), term):
        wanted = _typed(term, "reduction", '"sum"')
        return LossSpecError(f"The {name} is a sum, not a mean: {given}. Pass {wanted}."), None
    if is_sum and agrees(found, shares(weights), term):
        wanted = _typed(term, "reduction", '"mean"')
        return LossSpecError(f"The {name} is a mean, not a sum: {given}. Pass {wanted}."), None
    if (count := counted(call, found, term)) is not None:
        text, label = count
        return LossSpecError(
            f"The {name} is a mean over something else than its weight counts: {given}. "
            f"Pass {mean}{_typed(term, 'weight', text)}."
        ), label
    if _some_weights(found, term):  # before `_table`, which compiles
        wanted = _typed(term, "weight", '"returned"')
        return LossSpecError(
            f"The {name} is a mean over a count that the batch does not show: {given}. "
            f"Return (loss, count){f' for {term!r}' if term else ''} from the function and pass "
            f"{mean}{wanted}."
        ), "?"
    if (table := _table(call, tried, programs)) is not None:
        return LossSpecError(
            f"{table!r} is cut like the rows of the batch, and the {name} needs the whole of it: {given}. "
            f"Pass unsplit=({table!r},)."
        ), None
    return CoupledSamplesError(
        f"No weight explains the {name}: {given}. Samples influence each other (BatchNorm in training, "
        "pmean under jax.vmap, contrastive losses, balancing of experts), or it draws random numbers that "
        "come from no key argument, or its terms are means over different counts. Use remat_map for a loss "
        'over embeddings, return such terms by name, as in {"tokens": (sum, count), "rows": (mean, rows)} '
        'with weight="returned", or accept the loss per micro-batch with check=False.'
    ), None


def counted(call: Call, found: Evidence, term: str) -> tuple[str, str] | None:
    """Return a weight that explains a term, as it is typed: a count or sum over an array of the batch.

    Returns:
        The text, and the label of the array ("" where rows explain it).
    """
    labels = [
        label
        for argument in call.roles.others
        for label, leaf, mode in leaves_of(argument)
        if mode == "rows" and not is_key(leaf)
    ]
    names = ", ".join(argument.name or f"argument_{argument.where}" for argument in call.roles.batch)
    ways = (
        ("{}.sum()", lambda array: array.sum()),
        ("({} != -100).sum()", lambda array: (array != -100).sum()),
        ("({} != 0).sum()", lambda array: (array != 0).sum()),
        ("({} >= 0).sum()", lambda array: (array >= 0).sum()),
        ("({} > 0).sum()", lambda array: (array > 0).sum()),
    )
    plain = shares([part.weights[term] for part in found.parts])
    samples = [part.samples for part in found.parts]
    if agrees(found, shares(samples), term) and plain != shares(samples):
        return "None", ""
    for number, label in enumerate(labels):
        for text, count in ways:
            weights = [float(np.real(count(part.rows[number]))) for part in found.parts]
            if min(weights) >= 0 and sum(weights) > 0 and agrees(found, shares(weights), term):
                return f"lambda {names}: {text.format(label)}", label
    return None


def _table(call: Call, tried: _Tried, programs: Programs) -> str | None:
    """The label of a split leaf which has to be whole for the declaration to hold."""
    number = -1
    by_place = {argument.where: argument for argument in call.roles.others}
    for where, argument in [*enumerate(call.args), *sorted(call.kwargs.items())]:  # as `probe.inputs_of` does
        if where not in by_place:
            number += len(jax.tree.leaves(argument))
            continue
        paths = jax.tree_util.tree_leaves_with_path(argument)
        for (path, leaf), mode in zip(paths, by_place[where].modes, strict=True):
            number += 1
            if mode != "rows" or is_key(leaf):
                continue
            again = evidence(call, tried.sizes, tried.rows, tried.draw, programs, frozenset([number]))
            if again is None or not again.finite or wrong_terms(call, again):
                continue
            parts = range(len(tried.sizes))
            if any(_differs(again, part, term) for part in parts for term in again.whole.losses):
                dotted = jax.tree_util.keystr(path, simple=True, separator=".")
                return dotted or by_place[where].name or str(where)
    return None


def _differs(found: Evidence, part: int, term: str) -> bool:
    """Tell whether a part alone is another loss than the whole."""
    return not agrees(found, [float(number == part) for number in range(len(found.parts))], term)


def _some_weights(found: Evidence, term: str) -> bool:
    """Tell whether any positive weights of the parts explain the gradient of the whole."""
    stacked = [np.concatenate([leaf.ravel() for leaf in part.gradients[term]]) for part in found.parts]
    whole = np.concatenate([leaf.ravel() for leaf in found.whole.gradients[term]])
    if len(whole) < 4 * len(stacked) or any(not np.isfinite(part).all() for part in stacked):
        return False
    matrix = np.stack(stacked, axis=1)
    solution = np.linalg.lstsq(matrix, whole, rcond=None)[0]
    if np.iscomplexobj(solution) or solution.min() <= 0 or abs(solution.sum() - 1) > 10 * found.tolerance:
        return False
    return agrees(found, shares(list(solution)), term)
