"""Check of the declared loss on the first window, before anything is updated.

A declaration (`reduction`, `weight`) fixes how the losses of parts a and b give the loss of their union u::

    mean:  l(u) = (w(a) l(a) + w(b) l(b)) / (w(a) + w(b))          sum:  l(u) = l(a) + l(b)

Both sides are computed for some micro-batches, each cut in several ways, with the same random numbers for
each sample on both sides. Gradients are compared parameter by parameter. If they differ by more than the
measured rounding, the error names the declaration that holds, if one is found.
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
from ..window.participants.changed_state_warning import warn_of_changed_state
from ..window.participants.forward_state_keeper import ForwardStateKeeper
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
from .cuts import orders, other_orders
from .evaluation import Evaluation
from .introspection import FloatingDtypes, run_eagerly
from .probing.problem import Problem
from .remedy import find_remedy
from .verdict import Verdict, expected, settle

MOST_CHECKED = 4  # micro-batches: enough to have unequal token counts, cheap beside one window


def check_declaration(
    problem: Problem,
    microbatches: Sequence[Any],
    *,
    trained: Sequence[Any] | None = None,
    frozen: Sequence[nn.Module] = (),
) -> Checked:
    """Compare the loss of micro-batches with the losses of their parts; model and random state are restored.

    Args:
        problem: the model, its loss, and its declaration.
        microbatches: micro-batches; those with fewer than two samples are skipped.
        trained: the micro-batches that training evaluates; None: all of `microbatches`. Others may have
            other numbers of samples, which a model with fixed shapes refuses.
        frozen: modules to run in evaluation mode: BatchNorms that participants handle.

    Returns:
        The outcome: whether the check could have found a wrong declaration.

    Raises:
        LossSpecError: the loss contradicts the declaration; the text names the likely cause.
        CoupledSamplesError: no weights explain the losses.
    """
    with prepared(problem, frozen) as (evaluation, keeper):
        evaluation.trained = trained
        chosen = _choose(microbatches, problem)
        found, reasons = _examine(evaluation, chosen)
        # Raised inside `prepared`, which restores the model.
        if found is not None:
            raise found.error()
        # One more evaluation, from the state that the last forward left: the loss may depend on that state.
        if chosen:
            warn_of_changed_state(keeper, lambda: evaluation.loss_again(chosen[-1]))
            keeper.learn()
    checked = Checked.of(reasons)
    _warn_unchecked(checked, reasons, evaluation, keeper)
    return checked


def find_contradiction(
    problem: Problem, microbatches: Sequence[Any], *, frozen: Sequence[nn.Module] = ()
) -> Contradiction | None:
    """Return the contradiction that `check_declaration` would raise; None if the declaration holds.

    Raises:
        LossSpecError: the weights of parts do not add up to that of the micro-batch.
    """
    with prepared(problem, frozen) as (evaluation, _):
        return _examine(evaluation, _choose(microbatches, problem))[0]


def divisions_of(
    problem: Problem, microbatches: Sequence[Any], *, frozen: Sequence[nn.Module]
) -> list[list[divisions.Division]] | None:
    """Return the divisors of the loss of each micro-batch; None if one cannot be evaluated.

    Each micro-batch is evaluated from the same state, with `frozen` modules in evaluation mode.
    """
    with prepared(problem, frozen) as (evaluation, _):
        try:
            # The graphs are kept: the divisors are read from them.
            losses = [evaluation.plain(microbatch) for microbatch in microbatches]
        except Exception as error:  # user code may raise anything on other numbers of samples
            if out_of_memory(error):
                raise
            return None
    return [divisions.divisions_of(loss) for loss in losses]


@contextmanager
def prepared(
    problem: Problem, frozen: Sequence[nn.Module] = ()
) -> Iterator[tuple[Evaluation, ForwardStateKeeper]]:
    """Yield the evaluation of a problem and the keeper of its state; restore everything at the end.

    The `frozen` modules run in evaluation mode.
    """
    # A second keeper: a later window is checked while it is open, and its savepoint must survive.
    original = problem.state or ForwardStateKeeper([problem.model], [problem.loss_fn])
    keeper = original.new_keeper()
    keeper.begin(check=True)
    random = RandomKeeper(accelerators([problem.model]))
    random.begin()
    try:
        # Eagerly: a compiled model would be compiled anew for each number of samples.
        with _evaluating(frozen), run_eagerly(), keeper.watching():
            yield Evaluation(problem, keeper), keeper
    finally:
        keeper.end_check()
        random.restore()


def _examine(evaluation: Evaluation, microbatches: Sequence[Any]) -> tuple[Contradiction | None, list[str]]:
    """Compare micro-batches with their parts; return a contradiction, and a reason for each that agrees."""
    reasons: list[str] = []  # "" for a micro-batch that would have revealed a wrong declaration
    try:
        # `turn` alternates which end single samples are cut from (`orders`).
        for turn, microbatch in enumerate(microbatches):
            reasons.append(_check(evaluation, microbatch, turn))
    except ContradictedError as found:
        problem = evaluation.problem
        others = [
            plan(microbatch, **problem.paths)
            for number, microbatch in enumerate(microbatches)
            # len(reasons) is the index of the micro-batch that raised: each one before it added a reason.
            if number != len(reasons)
        ]
        return find_remedy(evaluation, found, partial(_holds, evaluation, microbatches), others), reasons
    return None, reasons


def _holds(evaluation: Evaluation, microbatches: Sequence[Any], problem: Problem) -> bool:
    """Return whether another declaration passes an informative check of all micro-batches."""
    own, evaluation.problem = evaluation.problem, problem
    try:
        reasons = {_check(evaluation, microbatch, turn) for turn, microbatch in enumerate(microbatches)}
    except (ContradictedError, InputError, LossSpecError):
        return False
    finally:
        evaluation.problem = own
    # If every loss is 0, each declaration passes, so passing alone does not make a remedy.
    return bool(reasons & {"", ALIKE, ROUNDED}) and NOT_REPEATABLE not in reasons


def _warn_unchecked(
    checked: Checked, reasons: Sequence[str], evaluation: Evaluation, keeper: ForwardStateKeeper
) -> None:
    """Warn once for each reason why a wrong declaration could have passed."""
    if ROUNDED in reasons:
        name, share = evaluation.hidden
        why = (
            f"rounding may hide {100 * share:.2g} % of the gradient of {name!r}, and loss_fn does not run "
            "in float64. Check a float64 version of the model and the loss"
        )
    elif NOT_REPEATABLE in reasons:
        why = (
            f"loss_fn returns different losses for the same samples{_drawn(evaluation)}, or its random "
            "numbers cannot be drawn again for the parts of a micro-batch. Draw them when the batch is made, "
            "or from the global generators of torch, Python or NumPy, once per call or once per sample; or "
            "check a loss_fn without random numbers"
        )
    elif checked.reason == NOT_CUT:
        why = "none of its micro-batches can be cut in two. Check another batch"
    elif checked.reason == NOT_EVALUATED:
        failure = evaluation.failure
        why = f"loss_fn cannot be evaluated on parts of a micro-batch ({failure}). Check another batch"
    else:
        return
    if not keeper.not_warned_of([checked.reason or NOT_REPEATABLE]):  # an earlier window has warned already
        return
    declared = _declared(evaluation.problem)
    warn(
        "superbatch could not check the declared loss on the first window, "
        f"{declared}: {why} with "
        "superbatch.torch.verify(model, loss_fn, batch, microbatch_size=...); check=False silences this."
    )


def _declared(problem: Problem) -> str:
    """Return the declaration of a loss as the user types it."""
    weight = problem.weight
    weighed = repr(weight) if isinstance(weight, str | None) else getattr(weight, "__name__", "a function")
    return f"reduction={problem.reduction!r}" + (
        "" if problem.reduction == "total" else f" and weight={weighed}"
    )


def _drawn(evaluation: Evaluation) -> str:
    """Return a text with the random operations that could not be drawn for each sample."""
    return f" (through {', '.join(sorted(evaluation.unruled))})" if evaluation.unruled else ""


def _choose(microbatches: Sequence[Any], problem: Problem) -> list[Any]:
    """Return up to MOST_CHECKED micro-batches of two samples or more, spread over the window."""
    divisible: list[Any] = []
    for microbatch in microbatches:
        try:
            if count_samples(microbatch, **problem.paths) >= 2:
                divisible.append(microbatch)
        except SplitError:  # noqa: PERF203  (others may be divisible)
            continue
    # Evenly spaced: of 9 every second one.
    stride = max(1, len(divisible) // MOST_CHECKED)
    return divisible[::stride][:MOST_CHECKED]


def _check(evaluation: Evaluation, microbatch: Any, turn: int) -> str:
    """Compare a micro-batch with its parts; return why that could not reveal an error, else an empty text."""
    problem = evaluation.problem
    planned = plan(microbatch, **problem.paths)
    calls: dict[int, Any] = {}
    with FloatingDtypes() as dtypes:
        union = _union(evaluation, planned, microbatch, calls)
        if union is None:
            return NOT_EVALUATED
        if not normalize.takes_part(union.weight, reduction=problem.reduction):
            return WEIGHTLESS
        if not union.finite:
            return NOT_FINITE
        cuts = _cuts(evaluation, planned, union, turn, calls)
    # A total is not divided, so its weights need not add up.
    for cut in cuts if problem.reduction != "total" else ():
        _check_weights(cut)
    # Suspects differ by more than the rounding of the dtypes that the loss computes in.
    suspects = [c for c in cuts if len(c.difference(problem.reduction).beyond(expected(dtypes.seen)))]
    if not suspects:
        return _hidden(problem, cuts, microbatch) if cuts else NOT_EVALUATED
    # Parts that draw other random numbers than the union differ from it under every declaration.
    if evaluation.unruled or not _replayed(evaluation, planned, cuts):
        return NOT_REPEATABLE
    # Parts in another order may draw other random numbers; only replayed cuts are judged.
    suspects = [cut for cut in suspects if cut.replayed]
    verdict = settle(evaluation, planned, suspects, dtypes.seen) if suspects else Verdict(repeatable=False)
    if not verdict.repeatable:
        return NOT_REPEATABLE
    if verdict.hidden is not None:
        evaluation.hidden = verdict.hidden
        return ROUNDED
    return _hidden(problem, cuts, microbatch)


def _union(evaluation: Evaluation, planned: Plan, microbatch: Any, calls: dict[int, Any]) -> Evaluated | None:
    """Evaluate an uncut micro-batch; return None if only the check would raise, not training."""
    try:
        return evaluation.union(planned, calls)
    except Exception as error:  # user code may raise anything under the modes of the check
        if out_of_memory(error):
            raise
        for trained in _trained(evaluation, microbatch):
            evaluation.plain(trained)  # raises the error that training would raise
        evaluation.failure = f"{type(error).__name__}: {error}"
        return None


def _trained(evaluation: Evaluation, microbatch: Any) -> Sequence[Any]:
    """Return the micro-batch if training evaluates it, else one that training evaluates, in a list."""
    trained = evaluation.trained
    if trained is None or any(each is microbatch for each in trained):
        return [microbatch]
    return trained[:1]


def _replayed(evaluation: Evaluation, planned: Plan, cuts: Sequence[Cut]) -> bool:
    """Return whether the parts of a micro-batch drew the same random numbers as the micro-batch."""
    ordered = [cut for cut in cuts if cut.in_order]
    if not all(cut.replayed for cut in ordered):
        return False
    by_sample = any(cut.by_sample for cut in ordered)
    return not by_sample or evaluation.draws_by_sample(planned, [cut.spans for cut in ordered])


def _cuts(
    evaluation: Evaluation, planned: Plan, union: Evaluated, turn: int, calls: dict[int, Any]
) -> list[Cut]:
    """Cut a micro-batch in several ways and evaluate the parts; return the cuts that can be compared."""
    cuts = [evaluation.cut(planned, union, order, calls) for order in orders(planned.samples, turn)]
    usable = [cut for cut in cuts if cut is not None and cut.usable]
    if len(usable) < len(cuts):  # a single sample may have no loss: a standard deviation, a BatchNorm
        cuts = [evaluation.cut(planned, union, order, calls) for order in other_orders(planned.samples)]
        usable += [cut for cut in cuts if cut is not None and cut.usable]
    return usable


def _hidden(problem: Problem, cuts: Sequence[Cut], microbatch: Any) -> str:
    """Return why a micro-batch would agree with a wrong declaration too; empty if it would not."""
    if not any(_shows(seen) for seen in (cuts[0].union, *cuts[0].parts)):
        return ALL_ZERO
    if problem.reduction != "mean" and all(sum(map(_shows, cut.parts)) < 2 for cut in cuts):
        return ONE_ALONE
    return ALIKE if count_alike(problem, microbatch) else ""


def _shows(seen: Evaluated) -> bool:
    """Return whether a loss or its gradient is not 0, so that it differs between declarations."""
    return bool(seen.loss or (seen.gradient is not None and seen.gradient.any()))


def _check_weights(cut: Cut) -> None:
    union, parts = cut.union.weight, [part.weight for part in cut.parts]
    total = normalize.total_weight(parts)
    # Relative: sums of float weights differ in their last digits.
    if abs(union - total) > 1e-6 * union:
        listed = " + ".join(f"{part:g}" for part in parts)
        raise LossSpecError(
            f"weight= is not additive: it returns {union:g} for a micro-batch and {listed} for its parts. "
            "Return a count (samples, tokens) or a sum of sample weights, not a mean."
        )


@contextmanager
def _evaluating(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Set modules to evaluation mode inside the context, then restore the mode of each."""
    modes = [(module, module.training) for module in modules]
    for module in modules:
        # Not train(False), which also sets the children, and which a user may have overridden.
        module.training = False
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
