"""Comparison of accumulated gradients with those of the whole batch, for a model and a loss."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from ..batch.split import TokenBudget, sizes
from ..batch.tree import count_samples, take
from ..errors import InputError, SuperbatchError, explain
from ..normalize import Reduction
from ..results.coupling import CouplingPoint
from ..results.verification import Finding, GradientComparison, Verification, united
from .checks.coupling import probe_coupling
from .checks.introspection import FloatingDtypes
from .checks.measure import BatchNormChoice, Measured, Setting, accumulated, differences, largest, whole
from .checks.probing.diagnose import Diagnosis, diagnose, judge
from .checks.probing.meetings import find_meetings
from .checks.probing.options import check_model, check_options
from .checks.probing.problem import LossFn, Problem, WeightOption, by_term, evaluate
from .checks.probing.rounding import ROUNDING, measured_floor, rounding_of
from .checks.probing.separability import failure_of
from .checks.probing.untouched import held_parameter, untouched
from .loss.declared import declare
from .memory.out_of_memory import out_of_memory
from .options import NOT_DECLARED, FrozenBatchNorm, PerSampleRandom, Split
from .window.options import check_lists, check_split
from .window.participants.moved_state import MovedState
from .window.validation import as_models, check_choice

Against = Literal["auto", "batch", "splits"]
Dtype = Literal["both", "own", "float64"]

MIXING = ("batchnorm", "coupled", "coupled_loss", "unknown")


class _Outcome(NamedTuple):
    """The two gradients in one dtype; `against` says what the reference is."""

    dtype: torch.dtype
    against: Literal["batch", "splits"]
    measured: Measured
    reference: Measured


@dataclass(frozen=True)
class _Request:
    """Options of `verify`, checked."""

    problem: Problem
    batch: Any
    samples: int
    microbatch_size: int | TokenBudget
    sample_rng: bool
    batchnorm: BatchNormChoice
    against: Against
    dtype: Dtype
    tolerance: float

    def setting(self, dtype: torch.dtype | None, reset: Any) -> Setting:
        problem = self.problem.in_dtype(dtype)
        return Setting(problem, self.batch, reset, self.batchnorm, self.sample_rng)


@contextmanager
def _state_as_before(problem: Problem) -> Iterator[None]:
    """Run the body, then restore the state that it has moved, large tensors that are no parameters aside."""
    keeper = MovedState([problem.model], [problem.loss_fn])
    keeper.begin()
    try:
        yield
    finally:
        keeper.restore()


def verify(
    model: nn.Module | Sequence[nn.Module],
    loss_fn: LossFn,
    batch: Any,
    *,
    microbatch_size: int | TokenBudget,
    reduction: Reduction | Mapping[str, Reduction] = "mean",
    weight: WeightOption | Mapping[str, WeightOption] = None,
    participants: Sequence[Any] = (),
    split: Split = NOT_DECLARED,
    against: Against = "auto",
    dtype: Dtype = "both",
    tolerance: float = 1e-12,
) -> Verification:
    """Compare the accumulated gradient with that of the whole batch, and name what breaks exactness.

    Every parameter's gradient is compared by ``|accumulated - reference| / max(|reference|, 1e-3 |all|)``.
    In float64 it is exact up to `tolerance`; in the model's own dtype up to rounding, which is judged by
    how far the large batch itself is from the float64 gradient. Where the gradients differ, each suspect
    is removed in turn: what is not repeatable, random numbers, state that a forward changes, wrong
    weights, samples that influence each other. What is stated about the loss is judged by the check that the
    Accumulator makes on its first window, also where the gradients agree: under one split they may by chance.

    Model, gradients, random state and the state that `loss_fn` reaches are left as they were, bit for bit.

    Args:
        model: the model, or several, in the mode in which they are trained.
        loss_fn: from a micro-batch to its loss, a closure over the model.
        batch: a batch as it is trained with, on the host; two samples or more.
        microbatch_size: samples (or a TokenBudget) of a micro-batch, smaller than the batch.
        reduction: what `loss_fn` returns, as stated to the Accumulator.
        weight: how micro-batches are weighted, as stated to the Accumulator. Of a loss with several terms a
            mapping, there as well; each term is verified by itself, so that a large one hides no other.
        participants: as the Accumulator's. `PerSampleRandom` gives each sample a random stream in both
            passes; `FrozenBatchNorm` freezes BatchNorm in both. Others have no effect.
        split: leaves that are not tensors with the samples first, as the Accumulator's.
        against: `"batch"`, or `"splits"`: another split of it, where the whole does not fit in memory;
            `"auto"` takes the batch unless that runs out of memory.
        dtype: `"own"` (the model's), `"float64"`, or `"both"`.
        tolerance: largest relative difference in float64 that counts as exact.

    Returns:
        The report. `print` shows the verdict, the causes with their remedies, and a row for each parameter.

    Raises:
        InputError: an argument has the wrong type or value, or the batch is not larger than a micro-batch.
        SplitError: the batch cannot be split.
        NonFiniteError: the loss or a gradient is not finite.
        OptimizerError: the model has no parameters that need a gradient.

    Examples:
        >>> model = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        >>> loss_fn = lambda batch: nn.functional.mse_loss(model(batch["x"])[:, 0], batch["y"])
        >>> batch = {"x": torch.randn(8, 2), "y": torch.randn(8)}
        >>> report = verify(model, loss_fn, batch, microbatch_size=3)
        >>> report.exact, report.causes[0].kind, report.causes[0].module
        (False, 'batchnorm', '1')
        >>> verify(model.eval(), loss_fn, batch, microbatch_size=3).exact
        True
    """
    declared = declare(reduction, weight)
    check_split(split)
    check_lists(participants=participants)
    models = as_models(model)
    problem = Problem(
        models[0] if len(models) == 1 else nn.ModuleList(models),
        loss_fn,
        declared.reduction,
        None if declared.weigh == "samples" else declared.weigh,
        tuple(split.unsplit),
        tuple(split.per_sample),
        terms=declared.terms,
    )
    sample_rng = any(isinstance(each, PerSampleRandom) for each in participants)
    frozen = any(isinstance(each, FrozenBatchNorm) for each in participants)
    check_model(problem.model)
    terms = by_term(problem)
    for one in (problem, *terms.values()):
        check_options(one, tolerance)
    check_choice(against, "against", Against)
    check_choice(dtype, "dtype", Dtype)
    samples = count_samples(batch, **split.paths)
    request = _Request(
        problem,
        batch,
        samples,
        microbatch_size,
        sample_rng,
        "frozen" if frozen else "per_microbatch",
        against,
        dtype,
        tolerance,
    )
    _check_split(request)
    with _state_as_before(problem):
        reports = {name: _report(replace(request, problem=one)) for name, one in terms.items()}
    return united(reports)


def _report(request: _Request) -> Verification:
    notes: list[str] = []
    outcomes = _measure(request, notes)
    float64 = next((outcome for outcome in outcomes if outcome.dtype == torch.float64), None)
    comparisons = [_compare(request, outcome, float64, notes) for outcome in outcomes]
    structural = _index_of_judge(outcomes)
    diagnosis = Diagnosis((), (), ())
    if comparisons[structural].exact:
        diagnosis = Diagnosis(_by_chance(request, outcomes[structural]), *_coupling(request))
    else:
        diagnosis = _diagnose(request, outcomes[structural], comparisons[structural].tolerance)
    causes, exact = diagnosis.causes, all(comparison.exact for comparison in comparisons)
    if not causes and not exact:
        causes = (_precision(comparisons[0]),)
    return Verification(
        exact and not causes,
        request.samples,
        tuple(comparisons),
        causes,
        diagnosis.findings,
        (*notes, *diagnosis.notes),
        _meetings(request, causes),
    )


def _meetings(request: _Request, causes: tuple[Finding, ...]) -> tuple[CouplingPoint, ...]:
    """Of coupled samples, where they meet: a second opinion, which fails silently."""
    problem = request.problem
    if not any(cause.kind in MIXING for cause in causes) or problem.unsplit or problem.per_sample:
        return ()
    found: list[CouplingPoint] = []
    failure_of(lambda: found.extend(find_meetings(problem, request.batch)))
    return tuple(found)


def _measure(request: _Request, notes: list[str]) -> list[_Outcome]:
    """Both gradients, in the model's own dtype first: an error of the user's code is to come as it is."""
    own = _own_dtype(request.problem.model)
    outcomes: list[_Outcome] = []
    if request.dtype != "float64" or own == torch.float64:
        outcomes.append(_pair(request, None, own, notes))
    if request.dtype != "own" and own != torch.float64:
        try:
            outcomes.append(_pair(request, torch.float64, torch.float64, notes))
        except SuperbatchError:
            raise
        except Exception as error:  # a model that is not made for float64 may raise anything
            if request.dtype == "float64":
                raise _no_float64(error) from error
            notes.append(f"float64 was not measured: {type(error).__name__}: {error}")
    return outcomes


def _pair(request: _Request, dtype: torch.dtype | None, name: torch.dtype, notes: list[str]) -> _Outcome:
    if dtype is not None:
        held = held_parameter(request.problem.model)
        if held is not None:
            raise RuntimeError(f"DistributedDataParallel, or an earlier loss, holds on to {held!r}")
    with untouched(request.problem.model, dtype=dtype) as reset:
        setting = request.setting(dtype, reset)
        if request.against != "splits":
            try:
                reference = whole(setting)
                return _Outcome(name, "batch", _accumulated(setting, request.microbatch_size), reference)
            except (RuntimeError, MemoryError) as error:
                if request.against == "batch" or not out_of_memory(error):
                    raise
        # Outside of the except block, whose traceback keeps the tensors of the failed pass alive.
        if request.against == "auto":
            notes.append(f"in {_text(name)} the whole batch does not fit in memory: two splits were compared")
        measured = accumulated(setting, request.microbatch_size)
        return _Outcome(name, "splits", measured, accumulated(setting, _other_size(request.microbatch_size)))


def _accumulated(setting: Setting, size: int | TokenBudget) -> Measured:
    try:
        return accumulated(setting, size)
    except SuperbatchError:
        raise
    except Exception as error:
        if out_of_memory(error):
            raise
        raise InputError(
            explain(
                f"microbatch_size={size!r}",
                "the model runs on the whole batch but not on its micro-batches "
                f"({type(error).__name__}: {error})",
                "pass a larger microbatch_size, or change what refuses small batches, as BatchNorm does",
            )
        ) from error


def _compare(
    request: _Request, outcome: _Outcome, float64: _Outcome | None, notes: list[str]
) -> GradientComparison:
    tolerance = request.tolerance
    if outcome.dtype != torch.float64:
        tolerance, most = rounding_of(outcome.dtype, request.problem.model)
        if float64 is not None:
            tolerance = min(max(tolerance, 8 * largest(outcome.reference, float64.reference)), most)
        elif outcome.against == "batch" and largest(outcome.measured, outcome.reference) > tolerance:
            with untouched(request.problem.model) as reset:
                floor = measured_floor(request.setting(None, reset), outcome.reference)
            tolerance = min(max(tolerance, floor), most)
    elif tolerance < largest(outcome.measured, outcome.reference) < 1e-2:
        tolerance = max(tolerance, _inner_rounding(request, notes))
    return GradientComparison(
        dtype=_text(outcome.dtype),
        against=outcome.against,
        split=outcome.measured.split,
        reference_split=outcome.reference.split,
        loss=outcome.measured.loss,
        reference_loss=outcome.reference.loss,
        parameters=differences(outcome.measured, outcome.reference),
        tolerance=tolerance,
    )


def _index_of_judge(outcomes: list[_Outcome]) -> int:
    """The comparison that tells the structure of the problem from rounding: that in the widest dtype."""
    return max(range(len(outcomes)), key=lambda index: outcomes[index].dtype == torch.float64)


def _coupling(request: _Request) -> tuple[tuple[Finding, ...], tuple[str, ...]]:
    with untouched(request.problem.model) as reset:
        request.setting(None, reset).begin()
        return probe_coupling(request.problem, request.batch)


def _by_chance(request: _Request, outcome: _Outcome) -> tuple[Finding, ...]:
    """A wrong statement that this batch does not show, cut as it is: the check cuts it otherwise too."""
    batch, size = _in_memory(request, outcome)
    with untouched(request.problem.model) as reset:
        return judge(request.setting(None, reset).but(batch=batch), size)


def _diagnose(request: _Request, outcome: _Outcome, tolerance: float) -> Diagnosis:
    """In the dtype that showed the difference; on as much of the batch as fits in memory."""
    dtype = None if outcome.dtype == _own_dtype(request.problem.model) else outcome.dtype
    batch, size = _in_memory(request, outcome)
    with untouched(request.problem.model, dtype=dtype) as reset:
        return diagnose(request.setting(dtype, reset).but(batch=batch), size, tolerance=tolerance)


def _in_memory(request: _Request, outcome: _Outcome) -> tuple[Any, int | TokenBudget]:
    """As much of the batch as fits in memory, and the size of its micro-batches."""
    size, problem = request.microbatch_size, request.problem
    if outcome.against == "batch" or not isinstance(size, int):
        return request.batch, size
    batch = take(request.batch, 0, max(size, 2), unsplit=problem.unsplit, per_sample=problem.per_sample)
    return batch, max(1, size // 2)


def _precision(comparison: GradientComparison) -> Finding:
    return Finding(
        "precision",
        "loss_fn",
        comparison.largest,
        "comparison with float64",
        f"exact in float64, but {comparison.dtype} loses more by adding up micro-batches than in one pass",
        "pass gradient_sum=torch.float32, or keep the parameters in float32 and compute under autocast",
    )


def _inner_rounding(request: _Request, notes: list[str]) -> float:
    """The rounding of operations that the model does in a lower precision than it was given."""
    problem = request.problem
    pair = take(request.batch, 0, 2, unsplit=problem.unsplit, per_sample=problem.per_sample)
    with untouched(problem.model, dtype=torch.float64) as reset:
        setting = request.setting(torch.float64, reset)
        setting.begin()
        with FloatingDtypes() as dtypes:
            evaluate(setting.problem, pair)
    lower = {dtype: ROUNDING[dtype][0] for dtype in dtypes.seen if dtype in ROUNDING}
    if not lower:
        return 0.0
    coarsest = max(lower, key=lower.__getitem__)
    notes.append(f"parts of the model compute in {_text(coarsest)} whatever they are given")
    return lower[coarsest]


def _own_dtype(model: nn.Module) -> torch.dtype:
    """The lowest floating-point precision of the trainable parameters."""
    dtypes = [p.dtype for p in model.parameters() if p.requires_grad and p.dtype.is_floating_point]
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float64)


def _text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _other_size(size: int | TokenBudget) -> int:
    """A split that is not the one under test."""
    if isinstance(size, TokenBudget):
        return 1
    return size // 2 if size > 1 else 2


def _check_split(request: _Request) -> None:
    parts = sizes(request.batch, request.samples, request.microbatch_size)
    if len(parts) < 2:
        raise InputError(
            explain(
                f"microbatch_size={request.microbatch_size!r} for a batch of {request.samples} samples",
                "the batch is one micro-batch, so there is nothing to compare",
                "pass a larger batch, or a smaller microbatch_size",
            )
        )


def _no_float64(error: Exception) -> InputError:
    return InputError(
        explain(
            'dtype="float64"',
            f"the model or the loss does not run in float64 ({type(error).__name__}: {error})",
            'pass dtype="own"',
        )
    )
