"""Diagnosis of an accumulated gradient that is not the batch's: suspects are removed one after the other.

The order matters. A pass that does not repeat cannot be judged; then come random numbers, then state that a
forward changes. The rest is a wrong declaration of the loss or coupled samples, which the check of the first
window tells apart.
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
from .probes import Watched, first_difference, watch
from .problem import evaluate, forward
from .untouched import changed_state, module_state

_COUPLINGS = ("batchnorm", "coupled", "coupled_loss", "weight")
_STATED = ("sum", "mean", "weight")
_CHECK = "parts of a micro-batch"
_NOISE = 30.0  # multiples of the difference of two equal passes
_MOST_PROBED = 97
_SEEDS = 8  # one coin for a whole batch is the same under half of them


class Diagnosis(NamedTuple):
    """Causes in the order in which to fix them, findings of the probes, and notes on open questions."""

    causes: tuple[Finding, ...]
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]


def judge(setting: Setting, size: Size) -> tuple[Finding, ...]:
    """Judge the declaration about the loss where the gradients agree, which they may by chance.

    Args:
        setting: a batch whose accumulated gradient is the batch's; it must fit in memory.
        size: the `microbatch_size`.

    Returns:
        At most one cause.
    """
    found = _statement(setting, size)
    return () if found is None else (found,)


def diagnose(setting: Setting, size: Size, *, tolerance: float) -> Diagnosis:
    """Find the causes of a gradient that is not exact.

    Args:
        setting: a batch whose accumulated gradient differs from the batch's; it must fit in memory.
        size: the `microbatch_size` with which it does.
        tolerance: the largest relative difference that counts as rounding.

    Returns:
        At least one cause, of kind `"unknown"` where no test tells.
    """
    # Twice the same pass: their difference cannot come from the split.
    first = accumulated(setting, size)
    evidence = largest(accumulated(setting, size), first)
    if evidence > tolerance:
        if not largest(first, whole(setting)) > _NOISE * evidence:
            return Diagnosis((_nondeterminism(evidence),), (), ())
        tolerance = _NOISE * evidence  # threads add up in any order: that alone explains no more than this
    causes: list[Finding] = []
    # Random numbers first, as they would hide the effect of a moved buffer.
    for remove in (_remove_randomness, _remove_state):
        setting, cause = remove(setting, size, tolerance)
        causes += cause
        if largest(accumulated(setting, size), whole(setting)) <= tolerance:
            break
    else:
        return _statement_or_coupling(setting, size, causes, tolerance)
    # dtype None: the probes choose the dtype by themselves.
    findings, notes = probe_coupling(setting.problem.in_dtype(None), setting.batch)
    return Diagnosis(tuple(causes), findings, notes)


def _nondeterminism(evidence: float) -> Finding:
    return Finding(
        "nondeterminism",
        "loss_fn",
        evidence,
        "the same pass twice",
        "the same pass with the same seed gives another gradient",
        "look for a generator, a counter or a memory that loss_fn keeps outside the model, or for "
        "kernels that "
        "torch.use_deterministic_algorithms(True) refuses",
    )


def _remove_randomness(setting: Setting, size: Size, tolerance: float) -> tuple[Setting, list[Finding]]:
    streams = setting.but(streams=True)
    remedy = (
        "pass participants=[PerSampleRandom()]: each sample then has its own random numbers in every split"
    )
    outside = (
        "draw them with torch's own functions, one draw for each sample, then pass "
        "participants=[PerSampleRandom()]"
    )
    detail = "random numbers are drawn, and other ones in micro-batches than in the batch"
    # With streams torch's numbers are the same in every split; only Python's and NumPy's can differ.
    seed = {"host_seed": 1} if setting.streams else {"seed": 1, "host_seed": 1}
    evidence = largest(accumulated(setting.but(**seed), size), accumulated(setting, size))
    if evidence <= tolerance:
        return setting, []
    try:
        if largest(accumulated(streams.but(host_seed=1), size), accumulated(streams, size)) > tolerance:
            detail, remedy = f"{detail}, from Python's or NumPy's generator", outside
    except InputError as error:
        streams, remedy = setting, outside
        detail = f"{detail}; they cannot be drawn for each sample ({error})"
    return streams, [Finding("random", _first_random(setting), evidence, "another seed", detail, remedy)]


def _first_random(setting: Setting) -> str:
    """The first module whose output depends on the seed."""
    problem = setting.problem
    # Two samples are enough to see a module draw.
    few = take(setting.batch, 0, 2, unsplit=problem.unsplit, per_sample=problem.per_sample)

    def watched(seed: int) -> list[Watched]:
        setting.but(seed=seed, host_seed=0).begin()
        return watch(problem.model, lambda: forward(problem, few), 1)

    first = watched(0)
    changes = (first_difference(first, watched(seed), tolerance=0.0) for seed in range(1, _SEEDS))
    return next((change.module for change in changes if change is not None), "loss_fn")


def _remove_state(setting: Setting, size: Size, tolerance: float) -> tuple[Setting, list[Finding]]:
    model = setting.problem.model
    setting.begin()
    before = module_state(model)
    evaluate(setting.problem, setting.batch)
    batchnorms = {path for path, module in model.named_modules() if isinstance(module, _BatchNorm)}
    changed = changed_state(before, module_state(model))
    # Running statistics move by design; participants handle them.
    changed = [path for path in changed if path.rpartition(".")[0] not in batchnorms]
    restored = setting.but(restore_state=True)
    evidence = largest(accumulated(restored, size), accumulated(setting, size)) if changed else 0.0
    if evidence <= tolerance:
        return setting, []
    detail = f"every forward changes {', '.join(changed)}, on which the gradient depends"
    remedy = "change this state once for each update, outside the forward"
    # Buffers of spectral norm's power iteration: weight_u and weight_v.
    if any(name.endswith(("_u", "_v")) for name in changed):
        remedy += (
            ": keep spectral norm in evaluation mode, and advance it once in training mode before each update"
        )
    where = changed[0].rpartition(".")[0]
    return restored, [Finding("state", where, evidence, "state restored", detail, remedy)]


def _statement_or_coupling(
    setting: Setting, size: Size, causes: list[Finding], tolerance: float
) -> Diagnosis:
    findings, notes = probe_coupling(setting.problem.in_dtype(None), setting.batch)
    places = [finding for finding in findings if finding.kind in ("batchnorm", "coupled")]
    statement = _statement(setting, size)
    # A reduction or weight that holds explains all; otherwise the probed place is nearer to the cause.
    if statement is not None and (statement.kind in _STATED or not places):
        found = [finding for finding in findings if finding.kind == statement.kind == "coupled_loss"]
        found = found or [statement]  # a probe may know more of the coupling
        return Diagnosis((*causes, *found), (*_elsewhere(findings), *found), notes)
    coupled = [finding for finding in findings if finding.kind in _COUPLINGS]
    if not coupled:  # it may need more samples to act: a capacity, a quantile
        findings, notes = probe_coupling(setting.problem.in_dtype(None), setting.batch, samples=_MOST_PROBED)
        coupled = [finding for finding in findings if finding.kind in _COUPLINGS]
    if not coupled and not causes:
        # Micro-batches of one sample are as far from the batch as a split can be.
        coupled = [_unknown(largest(accumulated(setting, 1), whole(setting)))]
    return Diagnosis((*causes, *coupled), findings, notes)


def _elsewhere(findings: tuple[Finding, ...]) -> tuple[Finding, ...]:
    """Leave out the mixed difference's findings on the whole loss: its declaration was judged since."""
    return tuple(finding for finding in findings if finding.module != "loss_fn" or finding.kind == "coupled")


def _statement(setting: Setting, size: Size) -> Finding | None:
    """Judge the declaration as the first window's check does, on the batch and on micro-batches of it."""
    frozen: list[nn.Module] = []
    if setting.batchnorm == "frozen":
        frozen = [module for module in setting.problem.model.modules() if isinstance(module, _BatchNorm)]
    setting.begin()
    try:
        found = find_contradiction(setting.problem, _pieces(setting, size), frozen=frozen)
    except LossSpecError as error:
        return Finding("weight", "loss_fn", math.nan, _CHECK, str(error), "return a count or a sum")
    if found is None:
        return None
    return Finding(found.kind, "loss_fn", found.evidence, _CHECK, found.detail, found.remedy)


def _pieces(setting: Setting, size: Size) -> list[Any]:
    problem = setting.problem
    planned = plan(setting.batch, unsplit=problem.unsplit, per_sample=problem.per_sample)
    pieces = [setting.batch]
    if isinstance(size, int) and 1 < size < planned.samples:
        # A last micro-batch of one sample has no parts and is left out.
        starts = range(0, planned.samples - 1, size)
        pieces += [planned.take(start, min(start + size, planned.samples)) for start in starts[:3]]
    return pieces


def _unknown(evidence: float) -> Finding:
    return Finding(
        "unknown",
        "loss_fn",
        evidence,
        "comparison",
        "the accumulated gradient is another, and no test tells why",
        "compare find_coupling() on a larger batch, and micro-batches of other sizes",
    )
