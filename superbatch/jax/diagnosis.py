# JAX is an extra. Where it is not installed, pyright cannot resolve it:
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""Diagnosis of a declaration that does not hold: the error that names the one that does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from ..errors import CoupledSamplesError, InputError, LossSpecError
from .comparison import agrees, not_additive, shares, sum_of, wrong_terms
from .loop import Call
from .probe import Draw, Evidence, Programs, evidence
from .roles import is_key, is_legacy_key, leaves_of

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
    """Evidence, and what it was computed from."""

    found: Evidence
    draw: Draw
    sizes: Sequence[int]
    rows: np.ndarray


def _typed(term: str, option: str, value: str) -> str:
    """An option as it is typed, for one loss or for a term."""
    return f"{option}={{{term!r}: {value}, ...}}" if term else f"{option}={value}"


def error_of(
    call: Call, term: str, tried: Tried, programs: Programs
) -> tuple[LossSpecError | CoupledSamplesError | InputError, str | None]:
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
    as_sum = _typed(term, "reduction", '"sum"')
    if not_additive(found, term):
        parts = " + ".join(f"{weight:g}" for weight in weights)
        of_term = f" of the {name}" if term else ""
        return LossSpecError(
            f"Weights{of_term} do not add up: {found.whole.samples} rows weigh "
            f"{found.whole.weights[term]:g}, their parts {parts}. Let the weight be a count or a sum, not a "
            "mean or a constant."
        ), None
    if not is_sum and kept_above_zero(found, term):
        return LossSpecError(
            f"The {name} divides by a count that is kept above 0, and a micro-batch of weight 0 is left out "
            f"though its {name} is not 0: {given}. Return the sum, and pass "
            f"{as_sum} beside the weight."
        ), None
    if not is_sum and agrees(found, [1.0] * len(weights), term):
        return LossSpecError(f"The {name} is a sum, not a mean: {given}. Pass {as_sum}."), None
    if is_sum and agrees(found, shares(weights), term):
        wanted = _typed(term, "reduction", '"mean"')
        return LossSpecError(f"The {name} is a mean, not a sum: {given}. Pass {wanted}."), None
    if (count := counted(call, found, term)) is not None:
        text, label = count
        return LossSpecError(
            f"The {name} is a mean over another count than its weight: {given}. "
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
    return _not_of_weights(call, term, tried, programs, given), None


def _not_of_weights(
    call: Call, term: str, tried: Tried, programs: Programs, given: str
) -> LossSpecError | CoupledSamplesError | InputError:
    """The error where no weights explain a term."""
    name = f"term {term!r}" if term else "loss"
    if call.options.reduction_of(term) == "sum" and _adds_the_same(call, tried, term, programs):
        return LossSpecError(
            f"The {name} is a sum plus a term that does not depend on the rows, such as weight decay, and "
            f"every micro-batch would add that term: {given}. Return both by name and pass "
            'reduction={"data": "sum", "decay": "mean"}, or leave weight decay to the optimizer.'
        )
    if (key := _legacy_key(call)) is not None:
        return InputError(
            f"{key} looks like a legacy random key (uint32 of shape (2,) or (4,)), which the check cannot "
            f"replace, and no weight explains the {name}: {given}. Make it with jax.random.key(seed), or "
            "pass check=False."
        )
    return CoupledSamplesError(
        f"No weight explains the {name}: {given}. Samples influence each other (BatchNorm in training, "
        "pmean under jax.vmap, contrastive losses, balancing of experts), or it draws random numbers that "
        "come from no key argument, or its terms are means over different counts. Use remat_map for a loss "
        'over embeddings, return such terms by name, as in {"tokens": (sum, count), "rows": (mean, rows)} '
        'with weight="returned", or accept the loss per micro-batch with check=False.'
    )


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
    plain = shares([part.weights[term] for part in found.parts])
    samples = [part.samples for part in found.parts]
    if agrees(found, shares(samples), term) and plain != shares(samples):
        return "None", ""
    for number, label in enumerate(labels):
        for view, cut in VIEWS if found.whole.rows[number].ndim > 1 else VIEWS[:1]:
            for text, count in COUNTS:
                weights = [float(np.real(count(part.rows[number][cut]))) for part in found.parts]
                if min(weights) >= 0 and sum(weights) > 0 and agrees(found, shares(weights), term):
                    return f"lambda {names}: {text.format(label + view)}", label
    return None


def _table(call: Call, tried: Tried, programs: Programs) -> str | None:
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
    # With fewer equations almost any gradient would be explained.
    if len(whole) < 4 * len(stacked) or any(not np.isfinite(part).all() for part in stacked):
        return False
    matrix = np.stack(stacked, axis=1)
    solution = np.linalg.lstsq(matrix, whole, rcond=None)[0]
    if np.iscomplexobj(solution) or solution.min() <= 0 or abs(solution.sum() - 1) > 10 * found.tolerance:
        return False
    return agrees(found, shares(list(solution)), term)


def kept_above_zero(found: Evidence, term: str) -> bool:
    """Tell whether the loss is ``sum / max(count, 1)``: where nothing is counted the sum itself is left."""
    weights = [part.weights[term] for part in found.parts]
    if min(weights) != 0 or any(not part.finite(term) for part in found.parts):
        return False
    return agrees(found, [max(weight, 1.0) / sum(weights) for weight in weights], term)


def _adds_the_same(call: Call, tried: Tried, term: str, programs: Programs) -> bool:
    """Tell whether k parts add up to k - 1 times one and the same vector too much, for two values of k."""
    sizes = list(tried.sizes)
    fewer = sizes[:-1] if len(sizes) > 2 else [sizes[0]] * 3
    if sum(fewer) > call.roles.samples:
        return False
    # Other rows, whose losses differ: only what does not depend on rows is the same.
    other = evidence(call, fewer, np.arange(sum(fewer)), tried.draw, programs)
    if other is None or not other.finite:
        return False
    pairs = zip(_excess(tried.found, term), _excess(other, term), strict=True)
    limit = 10 * tried.found.tolerance
    return all(np.linalg.norm(one - two) <= limit * size for (one, size), (two, _) in pairs)


def _excess(found: Evidence, term: str) -> list[tuple[np.ndarray, float]]:
    """By how much each of the parts but one adds too much, and how large the sum of the parts is."""
    loss, gradients = sum_of([1.0] * len(found.parts), found.parts, term)
    sums = [np.asarray(loss), *gradients]
    whole = [np.asarray(found.whole.losses[term]), *found.whole.gradients[term]]
    parts = len(found.parts) - 1
    return [
        ((total - one) / parts, float(np.linalg.norm(total))) for total, one in zip(sums, whole, strict=True)
    ]


def _legacy_key(call: Call) -> str | None:
    """The label of a legacy key in the state, which every micro-batch draws from as it is."""
    if call.roles.carry is None:
        return None
    leaves = jax.tree_util.tree_leaves_with_path(call.args[call.roles.carry])
    names = [jax.tree_util.keystr(path) for path, leaf in leaves if is_legacy_key(leaf)]
    return f"argument {call.roles.carry}{names[0]}" if names else None
