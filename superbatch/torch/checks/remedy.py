"""Remedy for a loss that contradicts its declaration; an error names only a remedy that was tried."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from superbatch.batch.plan import Plan
from superbatch.normalize import Number, Reduction

from ..loss.losses import pair_of
from ..memory.out_of_memory import out_of_memory
from .agreement import SURE, Cut, Evaluated, Rounding
from .candidates import Candidate, weight_candidates
from .contradiction import ContradictedError, Contradiction
from .cuts import Order, orders, other_orders
from .evaluation import Evaluation
from .probing.problem import Problem
from .weighting import Weighting, find_weights

Holds = Callable[[Problem], bool]


def find_remedy(
    evaluation: Evaluation, found: ContradictedError, holds: Holds, others: Sequence[Plan]
) -> Contradiction:
    """Find the declaration that holds for a loss, in place of the wrong one of `evaluation`.

    `holds` returns whether another declaration passes an informative check. A weight must also explain the
    `others`, further micro-batches.
    """
    problem = evaluation.problem
    given, evidence = _given(problem, found.cuts[0], found.rounding)
    # The existing cuts first: comparing them evaluates nothing.
    if problem.reduction == "mean" and _agree(found, "sum") and holds(replace(problem, reduction="sum")):
        return _summed(given, evidence)
    mean = replace(problem, reduction="mean")
    if problem.reduction != "mean" and _agree(found, "mean") and holds(mean):
        detail = f"loss_fn returns a mean, not a sum: {given}"
        return Contradiction("mean", detail, 'pass reduction="mean"', evidence)
    # More cuts, because one cut agrees with many weights.
    cuts = _more_cuts(evaluation, found, found.planned, [cut.spans for cut in found.cuts]) or found.cuts
    if problem.reduction != "mean" and _adds_a_constant(cuts, found.rounding):
        return _constant(given, evidence)
    # Weights counted from the batch come before solved ones, because a user can type them.
    for candidate in _fitting_candidates(problem, found.planned, evaluation, cuts, found.rounding):
        if holds(_weighed(mean, candidate)):
            return _counted(problem, candidate, given, evidence)
    weights = find_weights(cuts, found.rounding)
    # One micro-batch may have solvable weights by chance, so the others are solved too.
    for other in others if weights.kind == "weights" else ():
        more = _more_cuts(evaluation, found, other, [])
        there = find_weights(more, found.rounding) if more else weights
        weights = there if there.kind in ("none", "divisor") else weights
    return _without_candidate(weights, problem, given, evidence, cuts, found.rounding)


def worst_parameter(
    problem: Problem, cut: Cut, rounding: Rounding, *, besides: Tensor | None = None
) -> tuple[str, float] | None:
    """Return the parameter whose gradient differs most, and its relative difference; None if none differs.

    `besides` are norms, shape (parameters,); a parameter whose gradient has a smaller norm is skipped.
    """
    difference = cut.difference(problem.reduction)
    beyond = difference.beyond(rounding)
    # -1 stands for the loss: then no parameter differs.
    if difference.gradient is None or difference.size is None or not len(beyond) or int(beyond[0]) < 0:
        return None
    if besides is not None:
        beyond = beyond[difference.size[beyond] > besides[beyond]]
        if not len(beyond):
            return None
    share = difference.gradient[beyond] / difference.size[beyond]
    names = [name for name, parameter in problem.model.named_parameters() if parameter.requires_grad]
    return names[int(beyond[int(share.argmax())])], float(share.max())


def _given(problem: Problem, cut: Cut, rounding: Rounding) -> tuple[str, float]:
    parts = ", ".join(f"{part.loss:.6g} (weight {part.weight:g})" for part in cut.parts[:3])
    more = f" and {len(cut.parts) - 3} more" if len(cut.parts) > 3 else ""
    text = f"the loss of a micro-batch is {cut.union.loss:.6g}, and the losses of its parts are {parts}{more}"
    worst = worst_parameter(problem, cut, rounding)
    if worst is None:
        return text, cut.difference(problem.reduction).loss
    percent = float(f"{100 * worst[1]:.2g}")  # printed as 120, not as 1.2e+02
    return f"{text}; the gradient of {worst[0]!r} is off by {percent:g} %", worst[1]


def _agree(found: ContradictedError, reduction: Reduction) -> bool:
    """Return whether the existing cuts agree with another reduction."""
    # A mean over parts that all have weight 0 is undefined.
    if reduction == "mean" and not all(sum(part.weight for part in cut.parts) for cut in found.cuts):
        return False
    return not any(len(cut.difference(reduction).beyond(found.rounding)) for cut in found.cuts)


def _summed(given: str, evidence: float) -> Contradiction:
    remedy = (
        'for a plain sum pass reduction="sum"; for a sum divided by a count of the whole batch (Hugging Face '
        'models called with num_items_in_batch) pass reduction="total" without a weight'
    )
    detail = f"loss_fn returns a sum, not a mean: {given}"
    return Contradiction("sum", detail, remedy, evidence)


def _more_cuts(
    evaluation: Evaluation, found: ContradictedError, planned: Plan, spans: list[tuple[Order, ...]]
) -> list[Cut]:
    """Evaluate more cuts of a micro-batch, with a gradient of each part regardless of its declared weight."""
    own, spans = evaluation.problem, [*spans]
    more = (*orders(planned.samples, 0), *orders(planned.samples, 1), *other_orders(planned.samples))
    spans += [order for order in more if order not in spans]
    try:
        with evaluation.in_float64() if found.in_float64 else nullcontext():
            # Weighted by samples: a part of declared weight 0 would get no gradient.
            if own.weight != "returned":
                evaluation.problem = replace(evaluation.problem, weight=None)
            calls: dict[int, Any] = {}
            union = evaluation.union(planned, calls)
            cuts = [evaluation.cut(planned, union, order, calls) for order in spans]
    except Exception as error:  # user code may raise anything on parts that were not evaluated before
        if out_of_memory(error):
            raise
        return []
    finally:
        evaluation.problem = own
    # Other random numbers in the parts would look like other weights.
    return [cut for cut in cuts if cut is not None and cut.replayed]


def _fitting_candidates(
    problem: Problem, planned: Plan, evaluation: Evaluation, cuts: Sequence[Cut], rounding: Rounding
) -> list[Candidate]:
    """Return the candidates under which, in every cut, the parts average to the micro-batch."""
    whole = planned.take(0, planned.samples)
    parts = [[evaluation.take(planned, span) for span in cut.spans] for cut in cuts]

    def fits(candidate: Candidate) -> bool:
        for cut, those in zip(cuts, parts, strict=True):
            weights: list[Number] = [candidate.weigh(part) for part in those]
            # A mean with weights that are all 0 is undefined.
            if not sum(weights) or len(cut.difference("mean", weights).beyond(rounding)):
                return False
        return True

    return [candidate for candidate in weight_candidates(problem, whole) if fits(candidate)]


def _weighed(problem: Problem, candidate: Candidate) -> Problem:
    if problem.weight != "returned":
        return replace(problem, weight=candidate.weigh)
    # With "returned" the loss function has to return the candidate's weight.
    return replace(problem, loss_fn=partial(_returning, problem.loss_fn, candidate.weigh))


def _returning(loss_fn: Any, weigh: Callable[[Any], Number], microbatch: Any) -> tuple[Any, Number]:
    return pair_of(loss_fn(microbatch))[0], weigh(microbatch)


def _counted(problem: Problem, candidate: Candidate, given: str, evidence: float) -> Contradiction:
    detail = f"loss_fn returns a mean over another count than the declared weight: {given}"
    remedy = f"pass weight={candidate.text}"
    if problem.reduction != "mean":
        detail = f"loss_fn returns a mean, not a sum: {given}"
        remedy = f'pass reduction="mean", weight={candidate.text}'
    elif problem.weight == "returned":
        body = candidate.text.removeprefix("lambda microbatch: ")
        called = body if body != candidate.text else f"{body}(microbatch)"
        remedy = f"return {called} as the weight"
    return Contradiction("weight", detail, remedy, evidence)


def _without_candidate(
    found: Weighting,
    problem: Problem,
    given: str,
    evidence: float,
    cuts: Sequence[Cut],
    rounding: Rounding,
) -> Contradiction:
    if found.kind == "weights":
        what = f"loss_fn returns a mean over a count that is not in the batch ({_ratio(cuts, rounding)})"
        remedy = 'return (loss, divisor of the loss) from loss_fn, and pass weight="returned"'
        if problem.weight == "returned":
            remedy = "return the divisor of the loss as its weight"
        if problem.reduction != "mean":
            remedy += ' and reduction="mean"'
        return Contradiction("weight", f"{what}: {given}", remedy, evidence)
    if found.kind == "divisor":
        what = (
            "no weight explains the loss: it depends on the batch size, or its divisor is not additive, such "
            f"as a count with a lower bound (parts of a micro-batch would need the factors {_listed(found)})"
        )
        remedy = (
            "return the mean over the micro-batch; or return the undivided sum, and pass "
            'reduction="sum" and the bound as at_least(...)'
        )
        return Contradiction("batch_size", f"{what}: {given}", remedy, evidence, coupled=True)
    adjective = "known " if found.kind == "open" else ""
    what = (
        f"no {adjective}weight explains the loss: samples influence each other (contrastive loss, hardest "
        "samples, normalisation over the batch), or the loss has terms that are means over different counts"
    )
    remedy = (
        "use WholeBatch (the loss of the whole batch, in the memory of micro-batches) or "
        "cached_gradients (a loss over embeddings); or return the terms by name. superbatch.torch.verify "
        "finds the module that couples samples"
    )
    return Contradiction("coupled_loss", f"{what}: {given}", remedy, evidence, coupled=True)


def _listed(found: Weighting) -> str:
    return " and ".join(f"{factor:.4g}" for factor in found.factors[:3])


def _ratio(cuts: Sequence[Cut], rounding: Rounding) -> str:
    # Users can search their data for the ratio of two weights.
    counted: list[tuple[float, Evaluated]] = []
    for cut in cuts:
        factors = find_weights([cut, *(each for each in cuts if each is not cut)], rounding).factors
        # A smaller factor is a weight of 0, up to rounding.
        least = 1e-6 * max(factors, default=0.0)
        counted = [(f, part) for f, part in zip(factors, cut.parts, strict=False) if f > least]
        if len(counted) > 1:
            break
    if len(counted) < 2:
        return "only one part has a weight"
    (first, one), (second, other) = counted[:2]
    ratio = f"{second / first:.4g} times the weight of one with {one.loss:.6g}"
    return f"a part with loss {other.loss:.6g} has {ratio}"


def _adds_a_constant(cuts: Sequence[Cut], rounding: Rounding) -> bool:
    """Return whether K parts exceed the union by K - 1 times a constant: a term that each part adds again."""
    surplus: dict[int, Tensor] = {}
    size = None
    for cut in cuts:
        if cut.union.gradient is None or any(part.gradient is None for part in cut.parts):
            continue
        gradients = [part.gradient for part in cut.parts if part.gradient is not None]
        total = sum(gradients, start=-cut.union.gradient)
        # K parts contain the constant K times, the union once. Shape [parameters, buckets].
        surplus[len(gradients)] = total / (len(gradients) - 1)
        size = cut.union.gradient.norm(dim=1)
    # Two numbers of parts K are needed to compare the constants.
    if len(surplus) < 2 or size is None:
        return False
    first, *others = surplus.values()
    # Four roundings: each surplus is a difference of sums.
    allowed = 4 * rounding.gradient * (size + first.norm(dim=1))
    if rounding.measured is not None and rounding.measured.numel():
        allowed = allowed + SURE * rounding.measured
    return all(bool(((other - first).norm(dim=1) <= allowed).all()) for other in others)


def _constant(given: str, evidence: float) -> Contradiction:
    detail = (
        f"each micro-batch adds once more a term that depends on no sample, such as weight decay: {given}"
    )
    remedy = (
        "leave that term to the optimizer (weight_decay), multiply it by the number of samples of the "
        'micro-batch, or return a mean and pass reduction="mean"'
    )
    return Contradiction("batch_size", detail, remedy, evidence)
