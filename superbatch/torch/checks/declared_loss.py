"""Check of the declared loss on the first window, before anything is updated.

A declaration (`reduction`, `weight`) fixes how the losses of parts make the loss of their union ``u``::

    mean:  l(u) = (w(a) l(a) + w(b) l(b)) / (w(a) + w(b))          sum:  l(u) = l(a) + l(b)

Both sides are computed for some micro-batches, each cut in several ways, with the same random stream of each
sample on both sides. Gradients are compared parameter by parameter. Where they differ by more than the
measured rounding, the error names the declaration that does hold.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn

from superbatch import normalize
from superbatch.batch.plan import Plan
from superbatch.batch.tree import count_samples, plan
from superbatch.errors import InputError, LossSpecError, SplitError

from ..devices import accelerators
from ..memory.out_of_memory import out_of_memory
from ..warn import warn
from ..window.participants.moved_state import MovedState
from ..window.participants.moving import warn_of_what_moves
from ..window.participants.snapshot import RandomKeeper
from . import divisions
from .agreement import Cut, Evaluated
from .checked import (
    ALIKE,
    ALL_ZERO,
    NOT_CUT,
    NOT_EVALUATED,
    NOT_FINITE,
    NOT_REPEATABLE,
    ONE_ALONE,
    ROUNDED,
    WEIGHTLESS,
    Checked,
    count_alike,
)
from .contradiction import ContradictedError, Contradiction
from .evaluation import Evaluation, orders, other_orders
from .introspection import FloatingDtypes, run_eagerly
from .probing.problem import Problem
from .remedy import find_remedy
from .verdict import Verdict, expected, settle

MOST_PIECES = 4  # enough for unequal token counts, cheap beside one window


def check_statement(problem: Problem, pieces: Sequence[Any], *, frozen: Sequence[nn.Module] = ()) -> Checked:
    """Compare the loss of micro-batches with the losses of their parts; model and random state are restored.

    Args:
        problem: the model, its loss, and its declaration.
        pieces: micro-batches of at least two samples each; others are passed over.
        frozen: modules to run in evaluation mode: BatchNorms that participants handle.

    Returns:
        Whether a wrong declaration could have shown.

    Raises:
        LossSpecError: the loss contradicts the declaration; the text names the likely cause.
        CoupledSamplesError: no declaration about weights explains the losses.
    """
    with prepared(problem, frozen) as (evaluation, keeper):
        chosen = _choose(pieces, problem)
        found, reasons = _examine(evaluation, chosen)
        # Raised in the body: `prepared` restores the model before a user sees the error.
        if found is not None:
            raise found.error()
        # One more evaluation, on the state that the last forward left: does the loss depend on it?
        if chosen:
            warn_of_what_moves(keeper, lambda: evaluation.loss_again(chosen[-1]))
            keeper.learn()
    checked = Checked.of(reasons)
    _say_what_was_not_checked(checked, reasons, evaluation, keeper)
    return checked


def find_contradiction(
    problem: Problem, pieces: Sequence[Any], *, frozen: Sequence[nn.Module] = ()
) -> Contradiction | None:
    """Return the error that `check_statement` would raise, with its remedy; None where the declaration holds.

    Args:
        problem: as there.
        pieces: as there.
        frozen: as there.

    Raises:
        LossSpecError: weights do not add up.
    """
    with prepared(problem, frozen) as (evaluation, _):
        return _examine(evaluation, _choose(pieces, problem))[0]


def divisions_of(
    problem: Problem, microbatches: Sequence[Any], *, frozen: Sequence[nn.Module]
) -> list[list[divisions.Division]] | None:
    """Return the divisors of the loss of each micro-batch; None where one cannot be evaluated.

    Args:
        problem: as in `check_statement`.
        microbatches: evaluated from the same state each.
        frozen: as there.
    """
    with prepared(problem, frozen) as (evaluation, _):
        try:
            # With their graphs, from which the divisors are read.
            losses = [evaluation.plain(microbatch) for microbatch in microbatches]
        except Exception as error:
            if out_of_memory(error):
                raise
            return None
    return [divisions.divisions_of(loss) for loss in losses]


@contextmanager
def prepared(problem: Problem, frozen: Sequence[nn.Module] = ()) -> Iterator[tuple[Evaluation, MovedState]]:
    """Yield the evaluation of a problem and the keeper of its state; everything is restored at the end.

    Args:
        problem: to be evaluated.
        frozen: modules to run in evaluation mode.
    """
    # A twin: a later window is checked while it is open, and its own savepoint must stay.
    known = problem.state or MovedState([problem.model], [problem.loss_fn])
    keeper = known.twin()
    keeper.begin(check=True)
    random = RandomKeeper(accelerators([problem.model]))
    random.begin()
    try:
        # Eagerly: a compiled model would be compiled again for each odd number of samples.
        with _evaluating(frozen), run_eagerly(), keeper.watching():
            yield Evaluation(problem, keeper), keeper
    finally:
        keeper.end_check()
        random.restore()


def _examine(evaluation: Evaluation, pieces: Sequence[Any]) -> tuple[Contradiction | None, list[str]]:
    """Compare pieces with their parts; return a contradiction, and why pieces that agree show nothing."""
    reasons: list[str] = []
    try:
        # The turn decides which single samples are cut off (`orders`).
        for turn, piece in enumerate(pieces):
            reasons.append(_check(evaluation, piece, turn))
    except ContradictedError as found:
        problem = evaluation.problem
        others = [
            plan(piece, unsplit=problem.unsplit, per_sample=problem.per_sample)
            for number, piece in enumerate(pieces)
            # len(reasons) is the piece that raised: each piece before it has left one reason.
            if number != len(reasons)
        ]
        return find_remedy(evaluation, found, partial(_holds, evaluation, pieces), others), reasons
    return None, reasons


def _holds(evaluation: Evaluation, pieces: Sequence[Any], problem: Problem) -> bool:
    """Tell whether another declaration passes the check of all pieces, and could have failed it."""
    own, evaluation.problem = evaluation.problem, problem
    try:
        reasons = {_check(evaluation, piece, turn) for turn, piece in enumerate(pieces)}
    except (ContradictedError, InputError, LossSpecError):
        return False
    finally:
        evaluation.problem = own
    # A declaration that could not have failed is no remedy, e.g. where every loss is 0.
    return bool(reasons & {"", ALIKE, ROUNDED}) and NOT_REPEATABLE not in reasons


def _say_what_was_not_checked(
    checked: Checked, reasons: Sequence[str], evaluation: Evaluation, keeper: MovedState
) -> None:
    """Warn, once for each reason, where a wrong declaration could have passed."""
    if ROUNDED in reasons:
        name, share = evaluation.hidden
        why = (
            f"rounding hides up to {100 * share:.2g} % of the gradient of {name!r}, and loss_fn does not run "
            "in float64. Check it with a loss and a model that do"
        )
    elif NOT_REPEATABLE in reasons:
        why = (
            f"loss_fn gives another loss for the same samples{_drawn(evaluation)}, or draws random numbers "
            "that cannot be drawn again for the parts of a micro-batch. Draw them where the batch is made, "
            "or with torch's, Python's or NumPy's global generators once per call or once per sample; or "
            "check a loss_fn without them"
        )
    elif checked.reason == NOT_CUT:
        why = "no micro-batch of it can be cut in two. Check a batch of your choice"
    elif checked.reason == NOT_EVALUATED:
        failure = evaluation.failure
        why = f"loss_fn cannot be evaluated on parts of a micro-batch ({failure}). Check another batch"
    else:
        return
    if not keeper.not_said([checked.reason or NOT_REPEATABLE]):  # also by an earlier window
        return
    declared = _declared(evaluation.problem)
    warn(
        "superbatch could not check the declared loss on the first window, "
        f"{declared}: {why} with "
        "superbatch.torch.verify(model, loss_fn, batch); check=False silences this."
    )


def _declared(problem: Problem) -> str:
    """Declaration of a loss as it is typed."""
    weight = problem.weight
    weighed = repr(weight) if isinstance(weight, str | None) else getattr(weight, "__name__", "a function")
    return f"reduction={problem.reduction!r}" + (
        "" if problem.reduction == "total" else f" and weight={weighed}"
    )


def _drawn(evaluation: Evaluation) -> str:
    """Random operations that could not be drawn for each sample."""
    return f" (through {', '.join(sorted(evaluation.unruled))})" if evaluation.unruled else ""


def _choose(pieces: Sequence[Any], problem: Problem) -> list[Any]:
    """Up to MOST_PIECES pieces of two samples or more, spread over the window."""
    able: list[Any] = []
    for piece in pieces:
        try:
            if count_samples(piece, unsplit=problem.unsplit, per_sample=problem.per_sample) >= 2:
                able.append(piece)
        except SplitError:  # noqa: PERF203  (some micro-batches may be cut, others not)
            continue
    # Evenly spaced, e.g. every second one of 9.
    stride = max(1, len(able) // MOST_PIECES)
    return able[::stride][:MOST_PIECES]


def _check(evaluation: Evaluation, piece: Any, turn: int) -> str:
    """Compare one piece with its parts; return why that shows nothing, or an empty text."""
    problem = evaluation.problem
    planned = plan(piece, unsplit=problem.unsplit, per_sample=problem.per_sample)
    calls: dict[int, Any] = {}
    with FloatingDtypes() as dtypes:
        try:
            union = evaluation.union(planned, calls)
        except Exception as error:
            if out_of_memory(error):
                raise
            evaluation.plain(piece)  # raises the error that training would raise
            evaluation.failure = f"{type(error).__name__}: {error}"
            return NOT_EVALUATED
        if not normalize.takes_part(union.weight, reduction=problem.reduction):
            return WEIGHTLESS
        if not union.finite:
            return NOT_FINITE
        cuts = _cuts(evaluation, planned, union, turn, calls)
    # A total is divided by nothing, so that its weights need not add up.
    for cut in cuts if problem.reduction != "total" else ():
        _check_weights(cut)
    # Suspects by the rounding of the dtypes that the loss has computed in.
    suspects = [c for c in cuts if len(c.difference(problem.reduction).beyond(expected(dtypes.seen)))]
    if not suspects:
        return _hidden(problem, cuts, piece) if cuts else NOT_EVALUATED
    # Parts that draw other random numbers than the union have another loss, whatever is declared.
    if evaluation.unruled or not _replayed(evaluation, planned, cuts):
        return NOT_REPEATABLE
    # Parts in another order may draw others too; those that were replayed are judged.
    suspects = [cut for cut in suspects if cut.replayed]
    verdict = settle(evaluation, planned, suspects, dtypes.seen) if suspects else Verdict(repeatable=False)
    if not verdict.repeatable:
        return NOT_REPEATABLE
    if verdict.hidden is not None:
        evaluation.hidden = verdict.hidden
        return ROUNDED
    return _hidden(problem, cuts, piece)


def _replayed(evaluation: Evaluation, planned: Plan, cuts: Sequence[Cut]) -> bool:
    """Tell whether the parts of a piece drew the random numbers that the piece drew."""
    ordered = [cut for cut in cuts if cut.in_order]
    if not all(cut.replayed for cut in ordered):
        return False
    by_sample = any(cut.by_sample for cut in ordered)
    return not by_sample or evaluation.draws_by_sample(planned, [cut.spans for cut in ordered])


def _cuts(
    evaluation: Evaluation, planned: Plan, union: Evaluated, turn: int, calls: dict[int, Any]
) -> list[Cut]:
    """Evaluate the parts of a piece, cut in several ways; return the cuts that can be compared."""
    cuts = [evaluation.cut(planned, union, order, calls) for order in orders(planned.samples, turn)]
    usable = [cut for cut in cuts if cut is not None and cut.usable]
    if len(usable) < len(cuts):  # single samples may have no loss: a deviation, a normalised batch
        cuts = [evaluation.cut(planned, union, order, calls) for order in other_orders(planned.samples)]
        usable += [cut for cut in cuts if cut is not None and cut.usable]
    return usable


def _hidden(problem: Problem, cuts: Sequence[Cut], piece: Any) -> str:
    """Why a piece that agrees would agree with a wrong declaration too; empty where it would not."""
    if not any(_shows(seen) for seen in (cuts[0].union, *cuts[0].parts)):
        return ALL_ZERO
    if problem.reduction != "mean" and all(sum(map(_shows, cut.parts)) < 2 for cut in cuts):
        return ONE_ALONE
    return ALIKE if count_alike(problem, piece) else ""


def _shows(seen: Evaluated) -> bool:
    return bool(seen.loss or (seen.gradient is not None and seen.gradient.any()))


def _check_weights(cut: Cut) -> None:
    union, parts = cut.union.weight, [part.weight for part in cut.parts]
    total = normalize.total_weight(parts)
    # Relative: sums of float weights differ in their last digits.
    if abs(union - total) > 1e-6 * union:
        listed = " + ".join(f"{part:g}" for part in parts)
        raise LossSpecError(
            f"weight= is not additive: a micro-batch weighs {union:g}, and its parts weigh {listed}. Return "
            "a count (samples, tokens) or a sum of sample weights, not a mean."
        )


@contextmanager
def _evaluating(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Modules in evaluation mode, each restored to its own mode."""
    modes = [(module, module.training) for module in modules]
    for module in modules:
        # Not train(False), which would set the children too and may be overridden.
        module.training = False
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
