"""Decide whether a difference between a micro-batch and its parts is a wrong declaration or rounding.

A difference in low precision is only a suspicion. It is evaluated again in float64, and compared with the
rounding that repeated evaluations of the same micro-batch show.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

import torch

from superbatch.batch.plan import Plan

from ..window.participants.gradient_sum import LOW_PRECISION
from .agreement import SURE, Cut, Rounding
from .contradiction import ContradictedError
from .evaluation import Evaluation
from .remedy import worst_parameter


@dataclass(frozen=True)
class Verdict:
    """Outcome of a comparison that found no wrong declaration.

    Args:
        repeatable: False if two evaluations give different losses, so that nothing was compared.
        hidden: the parameter with the largest share of gradient that rounding may hide, and that share; or
            None.
    """

    repeatable: bool = True
    hidden: tuple[str, float] | None = None


def expected(dtypes: Collection[torch.dtype]) -> Rounding:
    """Return the largest differences that count as rounding, by the dtypes that a loss computes in.

    The bound of 1e-4 leaves room for an epsilon in a divisor, e.g. count + 1e-6.
    """
    if _native(dtypes):
        return Rounding(loss=1e-7, gradient=1e-6)
    return Rounding(loss=1e-4, gradient=1e-4)


def settle(
    evaluation: Evaluation, planned: Plan, suspects: list[Cut], dtypes: Collection[torch.dtype]
) -> Verdict:
    """Decide whether suspected cuts show a wrong declaration or rounding.

    Their differences exceed those `expected` for the dtypes that the loss computes in.

    Raises:
        ContradictedError: the declaration is wrong.
    """
    # In low precision two evaluations may add in different orders.
    exact = not any(dtype in LOW_PRECISION for dtype in dtypes)
    native = _native(dtypes)
    # One more evaluation if float64 decides later, three if this measurement decides.
    measured = evaluation.rounding(planned, suspects[0].union, times=3 if native else 1, exact=exact)
    if measured is None:
        return Verdict(repeatable=False)
    rounding = replace(expected(dtypes), measured=measured)
    if not native:
        suspects = [cut for cut in suspects if _worth_a_second_look(evaluation, cut, rounding)]
        higher = _higher(evaluation, planned, suspects) if suspects else (suspects, rounding)
        if higher is None:
            return _settle_as_it_is(evaluation, planned, suspects, exact=exact)
        suspects, rounding = higher
    _raise_if_wrong(evaluation, planned, suspects, rounding, in_float64=not native)
    if native or not suspects or not evaluation.rounded:
        return Verdict()
    hidden = _most_hidden(evaluation, suspects, rounding)
    return Verdict(hidden=hidden if hidden[1] > 3 * rounding.gradient else None)


def _native(dtypes: Collection[torch.dtype]) -> bool:
    """Return whether a loss is computed in float64 only."""
    return torch.float32 not in dtypes and not any(dtype in LOW_PRECISION for dtype in dtypes)


def _worth_a_second_look(evaluation: Evaluation, cut: Cut, rounding: Rounding) -> bool:
    """Return whether a difference may be more than rounding, or rounding may hide a difference."""
    difference = cut.difference(evaluation.problem.reduction)
    if difference.gradient is None or difference.size is None or not bool(difference.size.any()):
        return True
    assert rounding.measured is not None
    # Where the measured rounding is small, a difference within the bound is rounding.
    small = rounding.measured <= rounding.gradient * difference.size
    explained = small & (difference.gradient <= SURE * rounding.measured)
    only_rounding = difference.size <= 3 * rounding.measured  # e.g. a bias before a normalisation
    left = (difference.gradient > rounding.gradient * difference.size) & ~explained & ~only_rounding
    return bool(left.any())


def _most_hidden(evaluation: Evaluation, suspects: list[Cut], rounding: Rounding) -> tuple[str, float]:
    """Return the parameter with the largest share of gradient that rounding may hide, and that share."""
    shares = []
    for cut in suspects:
        size = cut.difference(evaluation.problem.reduction).size
        assert size is not None
        assert rounding.measured is not None
        # Smaller gradients are rounding only, e.g. of a bias before a normalisation.
        more = size > 3 * rounding.measured
        shares.append(torch.where(more, rounding.gradient + SURE * rounding.measured / size, 0.0))
    most = torch.stack(shares).amax(0)
    names = [name for name, p in evaluation.problem.model.named_parameters() if p.requires_grad]
    return names[int(most.argmax())], min(float(most.max()), 1.0)


def _higher(evaluation: Evaluation, planned: Plan, suspects: list[Cut]) -> tuple[list[Cut], Rounding] | None:
    """Evaluate the suspects again in float64; copy the model only if converting parameters is not enough."""
    if evaluation.problem.announce is not None:  # other ranks exchange parameters in their own precision
        return None
    found = _in_float64(evaluation, planned, suspects)
    if (found is None or evaluation.rounded) and evaluation.copy_for_float64():
        return _in_float64(evaluation, planned, suspects)
    return found


def _in_float64(
    evaluation: Evaluation, planned: Plan, suspects: list[Cut]
) -> tuple[list[Cut], Rounding] | None:
    """Evaluate the suspects again in float64; None if that fails."""
    try:
        with evaluation.in_float64():
            calls: dict[int, object] = {}
            union = evaluation.union(planned, calls)
            again = [evaluation.cut(planned, union, cut.spans, calls) for cut in suspects]
            cuts = [cut for cut in again if cut is not None and cut.usable]
            # If float64 has no gradient and the suspects have one, float64 would compare less.
            lost = suspects[0].union.gradient is not None and union.gradient is None
            if lost or len(cuts) < len(suspects) or not union.finite:
                return None
            rounding = Rounding(loss=1e-4, gradient=1e-4)
            reduction = evaluation.problem.reduction
            if not any(len(cut.difference(reduction).beyond(rounding)) for cut in cuts):
                return [], rounding
            measured = evaluation.rounding(planned, union, times=3, exact=True)
            return None if measured is None else (cuts, replace(rounding, measured=measured))
    except Exception:  # noqa: BLE001 - user code or a kernel may support one precision only
        return None


def _settle_as_it_is(evaluation: Evaluation, planned: Plan, suspects: list[Cut], *, exact: bool) -> Verdict:
    """Decide in the precision of the loss, in which only large differences are certainly not rounding."""
    measured = evaluation.rounding(planned, suspects[0].union, times=3, exact=exact)
    if measured is None:
        return Verdict(repeatable=False)
    # In float32, kernels for two batch sizes may disagree on the sign of a ReLU's input near zero.
    limits = Rounding(1e-3, 2e-2, measured) if exact else Rounding(2e-2, 1e-1, measured)
    _raise_if_wrong(evaluation, planned, suspects, limits, in_float64=False)
    # In low precision any difference may hide a wrong term; a small one in float32 hides none.
    noticeable = Rounding(limits.loss, limits.gradient / 10 if exact else expected([torch.float32]).gradient)
    for cut in suspects:
        # Skip gradients that are rounding only, e.g. of a bias before a normalisation.
        if worst_parameter(evaluation.problem, cut, noticeable, besides=3 * measured) is not None:
            return Verdict(hidden=_most_hidden(evaluation, [cut], limits))
    return Verdict()


def _raise_if_wrong(
    evaluation: Evaluation, planned: Plan, suspects: list[Cut], rounding: Rounding, *, in_float64: bool
) -> None:
    reduction = evaluation.problem.reduction
    wrong = [cut for cut in suspects if len(cut.difference(reduction).beyond(rounding))]
    if wrong:
        rest = [cut for cut in suspects if cut is not wrong[0]]
        raise ContradictedError(planned, [wrong[0], *rest], rounding, in_float64=in_float64)
