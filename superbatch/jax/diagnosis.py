# JAX is an extra. Where it is not installed, pyright cannot resolve it:
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""Diagnosis of a wrong reduction, weight or split: the error that names the right one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from ..errors import CoupledSamplesError, InputError, LossSpecError
from .comparison import agrees, not_additive, shares, sum_of, wrong_terms
from .loop import Call
from .probe import Draw, Evidence, Programs, evidence_of
from .roles import is_key, is_legacy_key, leaves_of

# Views of an array, and counts over a view, that may be the divisor of a loss; the text is what to type.
VIEWS: tuple[tuple[str, Any], ...] = (
    ("", ...),
    ("[:, 1:]", (slice(None), slice(1, None))),  # the labels of a causal language model
    ("[:, :-1]", (slice(None), slice(None, -1))),
)
COUNTS: tuple[tuple[str, Callable[[Any], Any]], ...] = (
    ("{}.sum()", lambda array: array.sum()),
    ("({} != -100).sum()", lambda array: (array != -100).sum()),
    ("({} != 0).sum()", lambda array: (array != 0).sum()),
    ("({} >= 0).sum()", lambda array: (array >= 0).sum()),
    ("({} > 0).sum()", lambda array: (array > 0).sum()),
)


class Tried(NamedTuple):
    """Evidence, with the values and rows that it was computed from.

    Attributes:
        evidence: the evaluation of rows as a whole and in parts.
        draw: the kind of values.
        sizes: the number of rows of each part.
        rows: the numbers of all rows in the batch.
    """

    evidence: Evidence
    draw: Draw
    sizes: Sequence[int]
    rows: np.ndarray


def _typed(term: str, option: str, value: str) -> str:
    """Return an option as the user types it, for one loss or for a term."""
    return f"{option}={{{term!r}: {value}, ...}}" if term else f"{option}={value}"


def error_of(
    call: Call, term: str, tried: Tried, programs: Programs
) -> tuple[LossSpecError | CoupledSamplesError | InputError, str | None]:
    """Return the error for a term that contradicts its declared weight or reduction.

    Returns:
        The error, and the label of the array that the loss counts: "" for rows, "?" if it is not known, None
        if another weight is no remedy.
    """
    evidence, draw = tried.evidence, tried.draw
    name = f"term {term!r}" if term else "loss"
    weights = [part.weights[term] for part in evidence.parts]
    listed = ", ".join(
        f"{part.losses[term]:.6g} (weight {part.weights[term]:g})" for part in evidence.parts[:3]
    )
    more = f" and {len(weights) - 3} more" if len(weights) > 3 else ""
    values = " (checked with made-up values)" if draw != "real" else ""
    given = (
        f"it is {evidence.whole.losses[term]:.6g} for {evidence.whole.samples} rows, and {listed}{more} for "
        f"parts of them{values}"
    )
    is_sum = call.options.reduction_of(term) == "sum"
    mean = _typed(term, "reduction", '"mean"') + ", " if is_sum else ""
    as_sum = _typed(term, "reduction", '"sum"')
    if not_additive(evidence, term):
        parts = " + ".join(f"{weight:g}" for weight in weights)
        of_term = f" of the {name}" if term else ""
        return LossSpecError(
            f"The weights{of_term} do not add up: {evidence.whole.samples} rows have the weight "
            f"{evidence.whole.weights[term]:g}, their parts {parts}. Let the weight be a count or a sum, not "
            "a mean or a constant."
        ), None
    if not is_sum and kept_above_zero(evidence, term):
        return LossSpecError(
            f"The {name} divides by max(count, 1), so the mean drops the loss of a micro-batch of "
            f"weight 0: {given}. Return the sum, and pass {as_sum} in addition to the weight."
        ), None
    if not is_sum and agrees(evidence, [1.0] * len(weights), term):
        return LossSpecError(f"The {name} is a sum, not a mean: {given}. Pass {as_sum}."), None
    if is_sum and agrees(evidence, shares(weights), term):
        wanted = _typed(term, "reduction", '"mean"')
        return LossSpecError(f"The {name} is a mean, not a sum: {given}. Pass {wanted}."), None
    if (count := counted(call, evidence, term)) is not None:
        text, label = count
        return LossSpecError(
            f"The {name} is not a mean over its weight: {given}. Pass {mean}{_typed(term, 'weight', text)}."
        ), label
    if _some_weights(evidence, term):  # before `_table`, which compiles
        wanted = _typed(term, "weight", '"returned"')
        return LossSpecError(
            f"The {name} is a mean over a count that no array of the batch gives: {given}. "
            f"Return (loss, count){f' for {term!r}' if term else ''} from the function and pass "
            f"{mean}{wanted}."
        ), "?"
    if (table := _table(call, tried, programs)) is not None:
        return LossSpecError(
            f"{table!r} is split like the rows of the batch, but the {name} needs all of it: {given}. "
            f"Pass unsplit=({table!r},)."
        ), None
    return _not_of_weights(call, term, tried, programs, given), None


def _not_of_weights(
    call: Call, term: str, tried: Tried, programs: Programs, given: str
) -> LossSpecError | CoupledSamplesError | InputError:
    """Return the error for a term that no weights of the parts explain."""
    name = f"term {term!r}" if term else "loss"
    if call.options.reduction_of(term) == "sum" and _adds_the_same(call, tried, term, programs):
        return LossSpecError(
            f"The {name} is a sum plus a term that does not depend on the rows, such as weight decay, and "
            f"every micro-batch would add that term: {given}. Return both by name and pass "
            'reduction={"data": "sum", "decay": "mean"}, or leave weight decay to the optimizer.'
        )
    if (key := _legacy_key(call)) is not None:
        return InputError(
            f"{key} looks like a legacy random key (uint32 of shape (2,) or (4,)), from which the check "
            f"cannot draw the same numbers for every row, and no weight explains the {name}: {given}. Make "
            "the key with jax.random.key(seed), or pass check=False."
        )
    return CoupledSamplesError(
        f"No weight explains the {name} ({given}): samples influence each other (BatchNorm in training, "
        "pmean under jax.vmap, contrastive losses, balancing of experts), or the function draws random "
        "numbers without a key argument or adds means over different counts. Use remat_map for a loss over "
        'embeddings, pass weight="returned" and return each mean by name ({"tokens": (sum, count), '
        '"rows": (mean, rows)}), or pass check=False to train with the loss of each micro-batch.'
    )


def counted(call: Call, evidence: Evidence, term: str) -> tuple[str, str] | None:
    """Search for a count or sum over an array of the batch that explains a term as its weight.

    Returns:
        The weight as the user types it, and the label of the array ("" for rows); None if there is none.
    """
    labels = [
        label
        for argument in call.roles.others
        for label, leaf, mode in leaves_of(argument)
        if mode == "rows" and not is_key(leaf)
    ]
    names = ", ".join(argument.name or f"argument_{argument.where}" for argument in call.roles.batch)
    plain = shares([part.weights[term] for part in evidence.parts])
    samples = [part.samples for part in evidence.parts]
    if agrees(evidence, shares(samples), term) and plain != shares(samples):
        return "None", ""
    for number, label in enumerate(labels):
        for view, cut in VIEWS if evidence.whole.rows[number].ndim > 1 else VIEWS[:1]:
            for text, count in COUNTS:
                weights = [float(np.real(count(part.rows[number][cut]))) for part in evidence.parts]
                if min(weights) >= 0 and sum(weights) > 0 and agrees(evidence, shares(weights), term):
                    return f"lambda {names}: {text.format(label + view)}", label
    return None


def _table(call: Call, tried: Tried, programs: Programs) -> str | None:
    """Return the path of a split leaf that must be unsplit for the declared weight to be right, or None."""
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
            again = evidence_of(call, tried.sizes, tried.rows, tried.draw, programs, frozenset([number]))
            if again is None or not again.finite or wrong_terms(call, again):
                continue
            parts = range(len(tried.sizes))
            # If all parts have the loss of the whole, it depends on this leaf alone, and any weights agree.
            if any(_differs(again, part, term) for part in parts for term in again.whole.losses):
                dotted = jax.tree_util.keystr(path, simple=True, separator=".")
                return dotted or by_place[where].name or str(where)
    return None


def _differs(evidence: Evidence, part: int, term: str) -> bool:
    """Return True if the loss or a gradient of one part differs from that of the whole."""
    return not agrees(evidence, [float(number == part) for number in range(len(evidence.parts))], term)


def _some_weights(evidence: Evidence, term: str) -> bool:
    """Return True if there are positive weights of the parts that explain the gradient of the whole."""
    stacked = [np.concatenate([leaf.ravel() for leaf in part.gradients[term]]) for part in evidence.parts]
    whole = np.concatenate([leaf.ravel() for leaf in evidence.whole.gradients[term]])
    # With few equations for each unknown weight almost any gradient could be explained.
    if len(whole) < 4 * len(stacked) or any(not np.isfinite(part).all() for part in stacked):
        return False
    matrix = np.stack(stacked, axis=1)
    solution = np.linalg.lstsq(matrix, whole, rcond=None)[0]
    # Weights of a mean are positive and add up to 1.
    if np.iscomplexobj(solution) or solution.min() <= 0 or abs(solution.sum() - 1) > 10 * evidence.tolerance:
        return False
    return agrees(evidence, shares(list(solution)), term)


def kept_above_zero(evidence: Evidence, term: str) -> bool:
    """Return True if the loss is ``sum / max(count, 1)``: with a count of 0 it is the sum itself."""
    weights = [part.weights[term] for part in evidence.parts]
    if min(weights) != 0 or any(not part.finite(term) for part in evidence.parts):
        return False
    return agrees(evidence, [max(weight, 1.0) / sum(weights) for weight in weights], term)


def _adds_the_same(call: Call, tried: Tried, term: str, programs: Programs) -> bool:
    """Return True if the sum of k parts exceeds the whole by k - 1 times a constant, for two values of k.

    The constant is a vector: loss and gradient of a term that does not depend on the rows, such as a decay.
    """
    sizes = list(tried.sizes)
    fewer = sizes[:-1] if len(sizes) > 2 else [sizes[0]] * 3
    if sum(fewer) > call.roles.samples:
        return False
    # With other rows: only a term that does not depend on rows stays the same.
    other = evidence_of(call, fewer, np.arange(sum(fewer)), tried.draw, programs)
    if other is None or not other.finite:
        return False
    pairs = zip(_excess(tried.evidence, term), _excess(other, term), strict=True)
    limit = 10 * tried.evidence.tolerance
    return all(np.linalg.norm(one - two) <= limit * size for (one, size), (two, _) in pairs)


def _excess(evidence: Evidence, term: str) -> list[tuple[np.ndarray, float]]:
    """Return ``(sum over k parts - whole) / (k - 1)``, with the norm of the sum.

    One entry for the loss, then one for each gradient.
    """
    loss, gradients = sum_of([1.0] * len(evidence.parts), evidence.parts, term)
    sums = [np.asarray(loss), *gradients]
    whole = [np.asarray(evidence.whole.losses[term]), *evidence.whole.gradients[term]]
    parts = len(evidence.parts) - 1
    return [
        ((total - one) / parts, float(np.linalg.norm(total))) for total, one in zip(sums, whole, strict=True)
    ]


def _legacy_key(call: Call) -> str | None:
    """Return the label of a legacy random key in the state, or None."""
    if call.roles.carry is None:
        return None
    leaves = jax.tree_util.tree_leaves_with_path(call.args[call.roles.carry])
    names = [jax.tree_util.keystr(path) for path, leaf in leaves if is_legacy_key(leaf)]
    return f"argument {call.roles.carry}{names[0]}" if names else None
