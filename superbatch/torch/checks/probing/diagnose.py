"""Find out why an accumulated gradient differs from the batch's, by removing possible causes one by one.

The order matters: first nondeterminism, without which nothing can be compared; then random numbers; then
state that a forward changes. What remains is a wrong declaration or coupled samples, which the check of the
first window distinguishes.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from superbatch.batch.tree import plan, take
from superbatch.errors import InputError, LossSpecError
from superbatch.results.verification import Finding

from ..coupling import probe_coupling
from ..declared_loss import find_contradiction
from ..measure import Setting, Size, accumulated, largest, whole
from .probes import CallRecord, first_difference, watch
from .problem import evaluate, forward
from .untouched import changed_state, module_state

_COUPLINGS = ("batchnorm", "coupled", "coupled_loss", "weight")
_DECLARED = ("sum", "mean", "weight")
_CHECK = "parts of a micro-batch"
_NOISE = 30.0  # times the difference of two equal passes
_MOST_PROBED = 97
_SEEDS = 8  # several: a single coin flip per batch comes out the same for half of all seeds


class Diagnosis(NamedTuple):
    """Causes in the order in which to fix them, findings of the probes, and notes on skipped tests."""

    causes: tuple[Finding, ...]
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]


def judge(setting: Setting, size: Size) -> Finding | None:
    """Return the wrong declaration that the check of the first window finds; None if the declaration holds.

    Gradients may agree by chance although the declaration is wrong; this check cuts the batch in other ways.
    The batch has to fit in memory.
    """
    frozen: list[nn.Module] = []
    if setting.batchnorm == "frozen":
        frozen = [module for module in setting.problem.model.modules() if isinstance(module, _BatchNorm)]
    setting.begin()
    try:
        found = find_contradiction(setting.problem, _microbatches(setting, size), frozen=frozen)
    except LossSpecError as error:
        return Finding("weight", "loss_fn", math.nan, _CHECK, str(error), "return a count or a sum")
    if found is None:
        return None
    return Finding(found.kind, "loss_fn", found.evidence, _CHECK, found.detail, found.remedy)


def diagnose(setting: Setting, size: Size, *, tolerance: float) -> Diagnosis:
    """Find the causes of a gradient that is not exact; a cause of kind `"unknown"` if no test finds one.

    The batch has to fit in memory; `tolerance` is the largest relative difference that counts as rounding.
    """
    # The same pass twice: a difference cannot come from the split.
    first = accumulated(setting, size)
    evidence = largest(accumulated(setting, size), first)
    if evidence > tolerance:
        if not largest(first, whole(setting)) > _NOISE * evidence:
            return Diagnosis((_nondeterminism(evidence),), (), ())
        # Threads that add in another order explain differences up to this tolerance.
        tolerance = _NOISE * evidence
    causes: list[Finding] = []
    # Random numbers first: they would hide the effect of a changed buffer.
    for remove in (_remove_randomness, _remove_state):
        setting, cause = remove(setting, size, tolerance)
        causes += cause
        if largest(accumulated(setting, size), whole(setting)) <= tolerance:
            break
    else:
        return _declaration_or_coupling(setting, size, causes, tolerance)
    # dtype None: the probes choose it.
    findings, notes = probe_coupling(setting.problem.in_dtype(None), setting.batch)
    return Diagnosis(tuple(causes), findings, notes)


def _nondeterminism(evidence: float) -> Finding:
    return Finding(
        "nondeterminism",
        "loss_fn",
        evidence,
        "the same pass twice",
        "two passes with the same seed give different gradients",
        "search for a generator, counter or cache that loss_fn keeps outside the model, and for kernels that "
        "torch.use_deterministic_algorithms(True) reports",
    )


def _remove_randomness(setting: Setting, size: Size, tolerance: float) -> tuple[Setting, list[Finding]]:
    streams = setting.but(streams=True)
    remedy = "pass participants=[PerSampleRandom()]: each sample then has the same numbers in every split"
    outside = (
        "draw them with torch's own functions, one draw for each sample, then pass "
        "participants=[PerSampleRandom()]"
    )
    detail = "the random numbers drawn in micro-batches differ from those of the batch"
    # With streams torch's random numbers are the same in every split, so only Python's and NumPy's differ.
    seed = {"host_seed": 1} if setting.streams else {"seed": 1, "host_seed": 1}
    evidence = largest(accumulated(setting.but(**seed), size), accumulated(setting, size))
    if evidence <= tolerance:
        return setting, []
    try:
        if largest(accumulated(streams.but(host_seed=1), size), accumulated(streams, size)) > tolerance:
            detail, remedy = f"{detail}, from Python's or NumPy's generator", outside
    except InputError as error:
        streams, remedy = setting, outside
        detail = f"{detail}; they cannot be drawn per sample ({error})"
    return streams, [Finding("random", _first_random(setting), evidence, "another seed", detail, remedy)]


def _first_random(setting: Setting) -> str:
    """Return the path of the first module whose output depends on the seed."""
    problem = setting.problem
    # Two samples are enough to find a module that draws random numbers.
    few = take(setting.batch, 0, 2, **problem.paths)

    def calls(seed: int) -> list[CallRecord]:
        setting.but(seed=seed, host_seed=0).begin()
        return watch(problem.model, lambda: forward(problem, few), 1)

    first = calls(0)
    changes = (first_difference(first, calls(seed), tolerance=0.0) for seed in range(1, _SEEDS))
    return next((change.module for change in changes if change is not None), "loss_fn")


def _remove_state(setting: Setting, size: Size, tolerance: float) -> tuple[Setting, list[Finding]]:
    model = setting.problem.model
    setting.begin()
    before = module_state(model)
    evaluate(setting.problem, setting.batch)
    batchnorms = {path for path, module in model.named_modules() if isinstance(module, _BatchNorm)}
    changed = changed_state(before, module_state(model))
    # Running statistics change by design; the accumulator's `participants` handle them.
    changed = [path for path in changed if path.rpartition(".")[0] not in batchnorms]
    restored = setting.but(restore_state=True)
    evidence = largest(accumulated(restored, size), accumulated(setting, size)) if changed else 0.0
    if evidence <= tolerance:
        return setting, []
    detail = f"each forward changes {', '.join(changed)}, on which the gradient depends"
    remedy = "change this state once per update, outside the forward"
    # Buffers of spectral norm's power iteration: weight_u and weight_v.
    if any(name.endswith(("_u", "_v")) for name in changed):
        remedy += (
            ": keep spectral norm in evaluation mode, and run it once in training mode before each update"
        )
    where = changed[0].rpartition(".")[0]
    return restored, [Finding("state", where, evidence, "state restored", detail, remedy)]


def _declaration_or_coupling(
    setting: Setting, size: Size, causes: list[Finding], tolerance: float
) -> Diagnosis:
    findings, notes = probe_coupling(setting.problem.in_dtype(None), setting.batch)
    modules = [finding for finding in findings if finding.kind in ("batchnorm", "coupled")]
    judged = judge(setting, size)
    # A wrong reduction or weight explains everything; otherwise the probes locate the cause better.
    if judged is not None and (judged.kind in _DECLARED or not modules):
        found = [finding for finding in findings if finding.kind == judged.kind == "coupled_loss"]
        found = found or [judged]  # a probe's finding has more detail
        return Diagnosis((*causes, *found), (*_without_loss(findings), *found), notes)
    coupled = [finding for finding in findings if finding.kind in _COUPLINGS]
    if not coupled:  # coupling may need more samples to show: a capacity limit, a quantile
        findings, notes = probe_coupling(setting.problem.in_dtype(None), setting.batch, samples=_MOST_PROBED)
        coupled = [finding for finding in findings if finding.kind in _COUPLINGS]
    if not coupled and not causes:
        # Micro-batches of one sample differ most from the batch.
        coupled = [_unknown(largest(accumulated(setting, 1), whole(setting)))]
    return Diagnosis((*causes, *coupled), findings, notes)


def _without_loss(findings: tuple[Finding, ...]) -> tuple[Finding, ...]:
    """Return the findings without those of the mixed difference, because `judge` has checked the loss too."""
    return tuple(finding for finding in findings if finding.module != "loss_fn" or finding.kind == "coupled")


def _microbatches(setting: Setting, size: Size) -> list[Any]:
    problem = setting.problem
    planned = plan(setting.batch, **problem.paths)
    microbatches = [setting.batch]
    if isinstance(size, int) and 1 < size < planned.samples:
        # A last micro-batch of one sample has no parts and is left out.
        starts = range(0, planned.samples - 1, size)
        microbatches += [planned.take(start, min(start + size, planned.samples)) for start in starts[:3]]
    return microbatches


def _unknown(evidence: float) -> Finding:
    return Finding(
        "unknown",
        "loss_fn",
        evidence,
        "comparison",
        "the accumulated gradient differs, and no test finds the cause",
        "run find_coupling() on a larger batch, and compare other sizes of micro-batches",
    )
