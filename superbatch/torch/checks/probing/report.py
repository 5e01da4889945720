"""Make the report of `verify`: both gradients in each dtype, their comparison, and causes of a difference."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from superbatch.batch.split import TokenBudget
from superbatch.batch.tree import take
from superbatch.errors import InputError, SuperbatchError
from superbatch.results.coupling import CouplingPoint
from superbatch.results.verification import Finding, GradientComparison, Verification, united

from ...memory.out_of_memory import out_of_memory
from ...window.participants.forward_state_keeper import ForwardStateKeeper
from ..coupling import probe_coupling
from ..introspection import FloatingDtypes
from ..measure import BatchNormChoice, Measured, Setting, accumulated, differences, largest, whole
from .coupling_points import find_coupling_points
from .diagnose import Diagnosis, diagnose, judge
from .problem import Problem, by_term, evaluate
from .rounding import ROUNDING, measured_floor, rounding_of
from .separability import failure_of
from .untouched import held_parameter, untouched

Against = Literal["auto", "batch", "splits"]
Dtype = Literal["both", "own", "float64"]

MIXING = ("batchnorm", "coupled", "coupled_loss", "unknown")


class _Outcome(NamedTuple):
    """Both gradients in one dtype; `against` is the kind of the reference gradient."""

    dtype: torch.dtype
    against: Literal["batch", "splits"]
    measured: Measured
    reference: Measured


@dataclass(frozen=True)
class Request:
    """Checked options of `verify`.

    Attributes:
        probes: if the gradients agree, search for causes that this split does not reveal.
    """

    problem: Problem
    batch: Any
    samples: int
    microbatch_size: int | TokenBudget
    sample_rng: bool
    batchnorm: BatchNormChoice
    against: Against
    dtype: Dtype
    tolerance: float
    probes: bool = True

    def setting(self, dtype: torch.dtype | None, reset: Any) -> Setting:
        """Return the settings of a measurement; `dtype` is that of the parameters (None: unchanged)."""
        problem = self.problem.in_dtype(dtype)
        return Setting(problem, self.batch, reset, self.batchnorm, self.sample_rng)


@contextmanager
def _state_as_before(problem: Problem) -> Iterator[None]:
    """Run the body, then restore the state that it has changed, except large tensors outside the model."""
    # `untouched` restores the model; the loss function may change state of its own.
    keeper = ForwardStateKeeper([problem.model], [problem.loss_fn])
    keeper.begin()
    try:
        yield
    finally:
        keeper.restore()


def verified(request: Request) -> Verification:
    """Return the report of a request, and restore everything."""
    # Each term has a declaration of its own, and therefore a report of its own.
    terms = by_term(request.problem)
    with _state_as_before(request.problem):
        reports = {name: _report(replace(request, problem=one)) for name, one in terms.items()}
    return united(reports)


def _report(request: Request) -> Verification:
    notes: list[str] = []
    outcomes = _measure(request, notes)
    float64 = next((outcome for outcome in outcomes if outcome.dtype == torch.float64), None)
    comparisons = [_compare(request, outcome, float64, notes) for outcome in outcomes]
    # float64 decides if it was measured, because its rounding is too small to look like a wrong loss.
    decisive = _most_precise(outcomes)
    diagnosis = Diagnosis((), (), ())
    if not comparisons[decisive].exact:
        diagnosis = _diagnose(request, outcomes[decisive], comparisons[decisive].tolerance)
    elif request.probes:
        diagnosis = Diagnosis(_wrong_declaration(request, outcomes[decisive]), *_coupling(request))
    causes, exact = diagnosis.causes, all(comparison.exact for comparison in comparisons)
    # Exact in float64 but not in the model's dtype: the sum over micro-batches rounds too much.
    if not causes and not exact:
        causes = (_precision(comparisons[0]),)
    return Verification(
        exact and not causes,
        request.samples,
        tuple(comparisons),
        causes,
        diagnosis.findings,
        (*notes, *diagnosis.notes),
        _coupling_points(request, causes),
    )


def _coupling_points(request: Request, causes: tuple[Finding, ...]) -> tuple[CouplingPoint, ...]:
    """Return the points that couple samples; errors of this additional search are ignored."""
    problem = request.problem
    # `find_coupling_points` needs samples in every leaf.
    if not any(cause.kind in MIXING for cause in causes) or problem.unsplit or problem.per_sample:
        return ()
    found: list[CouplingPoint] = []
    failure_of(lambda: found.extend(find_coupling_points(problem, request.batch)))
    return tuple(found)


def _measure(request: Request, notes: list[str]) -> list[_Outcome]:
    """Measure both gradients in each dtype, the model's own first: its errors are raised unchanged."""
    own = _own_dtype(request.problem.model)
    outcomes: list[_Outcome] = []
    if request.dtype != "float64" or own == torch.float64:
        outcomes.append(_pair(request, None, own, notes))
    if request.dtype != "own" and own != torch.float64:
        try:
            outcomes.append(_pair(request, torch.float64, torch.float64, notes))
        # An error of this library is not caused by float64.
        except SuperbatchError:
            raise
        except Exception as error:  # a model without support for float64 may raise anything
            if request.dtype == "float64":
                raise _no_float64(error) from error
            notes.append(f"float64 was not measured: {type(error).__name__}: {error}")
    return outcomes


def _pair(request: Request, dtype: torch.dtype | None, name: torch.dtype, notes: list[str]) -> _Outcome:
    if dtype is not None:
        # Changing the dtype of a parameter would remove DDP's hooks.
        held = held_parameter(request.problem.model)
        if held is not None:
            raise RuntimeError(f"DistributedDataParallel, or an earlier loss, still uses parameter {held!r}")
    with untouched(request.problem.model, dtype=dtype) as reset:
        setting = request.setting(dtype, reset)
        if request.against != "splits":
            try:
                reference = whole(setting)
                return _Outcome(name, "batch", _accumulated(setting, request.microbatch_size), reference)
            except (RuntimeError, MemoryError) as error:
                if request.against == "batch" or not out_of_memory(error):
                    raise
        # Outside the except block: its traceback keeps the tensors of the failed pass alive.
        if request.against == "auto":
            notes.append(f"in {_text(name)} the whole batch does not fit in memory: two splits were compared")
        measured = accumulated(setting, request.microbatch_size)
        return _Outcome(name, "splits", measured, accumulated(setting, _other_size(request.microbatch_size)))


def _accumulated(setting: Setting, size: int | TokenBudget) -> Measured:
    try:
        return accumulated(setting, size)
    except SuperbatchError:
        raise
    except Exception as error:  # user code may raise anything on small batches
        if out_of_memory(error):
            raise
        raise InputError(
            f"The model runs on the whole batch, but not on micro-batches with microbatch_size={size!r} "
            f"({type(error).__name__}: {error}). Pass a larger microbatch_size, or replace the layer that "
            "raises for small batches, such as BatchNorm."
        ) from error


def _compare(
    request: Request, outcome: _Outcome, float64: _Outcome | None, notes: list[str]
) -> GradientComparison:
    tolerance = request.tolerance
    if outcome.dtype != torch.float64:
        tolerance, most = rounding_of(outcome.dtype, request.problem.model)
        if float64 is not None:
            # Eight times the rounding of one pass, for the sum over many micro-batches.
            tolerance = min(max(tolerance, 8 * largest(outcome.reference, float64.reference)), most)
        elif outcome.against == "batch" and largest(outcome.measured, outcome.reference) > tolerance:
            with untouched(request.problem.model) as reset:
                floor = measured_floor(request.setting(None, reset), outcome.reference)
            tolerance = min(max(tolerance, floor), most)
    # Between the tolerance and 1 %: a part of the model may compute in a lower precision.
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


def _most_precise(outcomes: list[_Outcome]) -> int:
    """Return the index of the outcome in float64, which separates errors from rounding best; else 0."""
    return max(range(len(outcomes)), key=lambda index: outcomes[index].dtype == torch.float64)


def _coupling(request: Request) -> tuple[tuple[Finding, ...], tuple[str, ...]]:
    with untouched(request.problem.model) as reset:
        request.setting(None, reset).begin()
        return probe_coupling(request.problem, request.batch)


def _wrong_declaration(request: Request, outcome: _Outcome) -> tuple[Finding, ...]:
    """Return a wrong declaration that this split does not reveal, found by the check with other cuts."""
    # On as many samples as are known to fit.
    batch, size = _in_memory(request, outcome)
    with untouched(request.problem.model) as reset:
        found = judge(request.setting(None, reset).but(batch=batch), size)
    return () if found is None else (found,)


def _diagnose(request: Request, outcome: _Outcome, tolerance: float) -> Diagnosis:
    """Diagnose in the dtype that showed the difference, on as much of the batch as fits in memory."""
    dtype = None if outcome.dtype == _own_dtype(request.problem.model) else outcome.dtype
    batch, size = _in_memory(request, outcome)
    with untouched(request.problem.model, dtype=dtype) as reset:
        return diagnose(request.setting(dtype, reset).but(batch=batch), size, tolerance=tolerance)


def _in_memory(request: Request, outcome: _Outcome) -> tuple[Any, int | TokenBudget]:
    """Return as much of the batch as fits in memory, and the size of its micro-batches."""
    size, problem = request.microbatch_size, request.problem
    if outcome.against == "batch" or not isinstance(size, int):
        return request.batch, size
    # One micro-batch is known to fit: use it as the batch, and its halves as micro-batches.
    batch = take(request.batch, 0, max(size, 2), **problem.paths)
    return batch, max(1, size // 2)


def _precision(comparison: GradientComparison) -> Finding:
    return Finding(
        "precision",
        "loss_fn",
        comparison.largest,
        "comparison with float64",
        f"exact in float64, but in {comparison.dtype} the sum over micro-batches rounds more than one pass",
        "pass gradient_sum=torch.float32, or keep the parameters in float32 and compute under autocast",
    )


def _inner_rounding(request: Request, notes: list[str]) -> float:
    """Return the rounding of operations that the model runs in a lower precision than its input."""
    problem = request.problem
    # Two samples are enough to find the dtypes of operations.
    pair = take(request.batch, 0, 2, **problem.paths)
    with untouched(problem.model, dtype=torch.float64) as reset:
        setting = request.setting(torch.float64, reset)
        setting.begin()
        with FloatingDtypes() as dtypes:
            evaluate(setting.problem, pair)
    lower = {dtype: ROUNDING[dtype][0] for dtype in dtypes.seen if dtype in ROUNDING}
    if not lower:
        return 0.0
    coarsest = max(lower, key=lower.__getitem__)
    notes.append(f"parts of the model compute in {_text(coarsest)}, whatever the dtype of their inputs")
    # The result rounds at least this much for every dtype of the parameters.
    return lower[coarsest]


def _own_dtype(model: nn.Module) -> torch.dtype:
    """Return the floating-point dtype of lowest precision among the trainable parameters."""
    dtypes = [p.dtype for p in model.parameters() if p.requires_grad and p.dtype.is_floating_point]
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float64)


def _text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _other_size(size: int | TokenBudget) -> int:
    """Return a size that gives another split than the given one."""
    if isinstance(size, TokenBudget):
        # A token budget cannot be halved; single samples are always another split.
        return 1
    return size // 2 if size > 1 else 2


def _no_float64(error: Exception) -> InputError:
    return InputError(
        f'The model or the loss does not run with dtype="float64" ({type(error).__name__}: {error}). Pass '
        'dtype="own".'
    )
