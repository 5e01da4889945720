"""Why an accumulated gradient is not the batch's: each suspect is removed in turn, the rest measured again.

The order matters. What is not repeatable cannot be judged; then random numbers, then state that a forward
changes; what is left is either a wrong statement about the loss (the gradients of the parts do combine to
that of the whole, with other weights than stated) or samples that influence each other (no weights combine
them).
"""

from __future__ import annotations

from contextlib import nullcontext
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from ...errors import InputError
from ...report.verification import Finding
from ...tree import plan, take
from ..coupling import probe_coupling
from ..sample_rng import sample_stream
from ..sizes.candidates import weight_candidates
from ..sizes.measure import Setting, Size, accumulated, largest, whole
from .probes import Watched, first_difference, watch
from .problem import evaluate, forward, weigh
from .separability import failure_of
from .untouched import changed_state, module_state

_STREAM_KEY = 0
_ENTRIES = 512  # of each parameter's gradient; a combination of gradients holds for every entry alike
_COUPLINGS = ("batchnorm", "coupled", "coupled_loss", "weight")
_MOST_PROBED = 97
_SEEDS = 8  # one coin for a whole batch is the same under half of them


class Diagnosis(NamedTuple):
    """The causes, the first to be mended first; what the probes found; and what could not be told."""

    causes: tuple[Finding, ...]
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]


def diagnose(setting: Setting, size: Size, *, tolerance: float) -> Diagnosis:
    """Find what breaks exactness.

    Args:
        setting: a batch whose accumulated gradient differs from the batch's; it must fit in memory.
        size: the `microbatch_size` with which it does.
        tolerance: the largest relative difference that counts as rounding.

    Returns:
        At least one cause, of kind `"unknown"` where no test tells.
    """
    first = accumulated(setting, size)
    evidence = largest(accumulated(setting, size), first)
    if evidence > tolerance:
        return Diagnosis((_nondeterminism(evidence),), (), ())
    causes: list[Finding] = []
    for remove in (_remove_randomness, _remove_state):
        setting, cause = remove(setting, size, tolerance)
        causes += cause
        if largest(accumulated(setting, size), whole(setting)) <= tolerance:
            break
    else:
        return _statement_or_coupling(setting, causes, tolerance)
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
    remedy = "pass sample_rng=True, which gives every sample its own random numbers under every split"
    outside = "draw them with torch's own functions, one draw for each sample, then pass sample_rng=True"
    detail = "random numbers are drawn, and other ones in micro-batches than in the batch"
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
    few = take(setting.batch, 0, 2, whole=problem.whole, per_sample=problem.per_sample)

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
    changed = [path for path in changed if path.rpartition(".")[0] not in batchnorms]
    restored = setting.but(restore_state=True)
    evidence = largest(accumulated(restored, size), accumulated(setting, size)) if changed else 0.0
    if evidence <= tolerance:
        return setting, []
    detail = f"every forward changes {', '.join(changed)}, on which the gradient depends"
    remedy = "change this state once for each update, outside the forward"
    if any(name.endswith(("_u", "_v")) for name in changed):
        remedy += (
            ": keep spectral norm in evaluation mode, and advance it once in training mode before each update"
        )
    where = changed[0].rpartition(".")[0]
    return restored, [Finding("state", where, evidence, "state put back", detail, remedy)]


def _statement_or_coupling(setting: Setting, causes: list[Finding], tolerance: float) -> Diagnosis:
    findings, notes = probe_coupling(setting.problem.in_dtype(None), setting.batch)
    places = [finding for finding in findings if finding.kind in ("batchnorm", "coupled")]
    explained = _explain_by_weights(setting, tolerance, fit=not places)
    if explained is not None:
        return Diagnosis((*causes, explained), findings, notes)
    coupled = [finding for finding in findings if finding.kind in _COUPLINGS]
    if not coupled:  # it may need more samples to act: a capacity, a quantile
        findings, notes = probe_coupling(setting.problem.in_dtype(None), setting.batch, samples=_MOST_PROBED)
        coupled = [finding for finding in findings if finding.kind in _COUPLINGS]
    if not coupled and not causes:
        coupled = [_unknown(largest(accumulated(setting, 1), whole(setting)))]
    return Diagnosis((*causes, *coupled), findings, notes)


def _unknown(evidence: float) -> Finding:
    return Finding(
        "unknown",
        "loss_fn",
        evidence,
        "comparison",
        "the accumulated gradient is another, and no test tells why",
        "compare find_coupling() on a larger batch, and micro-batches of other sizes",
    )


class _Part(NamedTuple):
    samples: int
    microbatch: Any
    gradient: Tensor


class _Combination(NamedTuple):
    """The batch's gradient, and those of its parts to be combined to it."""

    batch: _Part
    parts: list[_Part]
    threshold: float

    def gradients(self) -> Tensor:
        return torch.stack([part.gradient for part in self.parts], 1)

    def misses(self, weights: list[float]) -> float:
        """How far the combination with these weights is off, relatively."""
        combined = self.gradients() @ torch.tensor(weights, dtype=torch.float64)
        return float((combined - self.batch.gradient).norm() / self.batch.gradient.norm())

    def holds(self, weights: list[float]) -> bool:
        return any(weights) and self.misses(weights) <= self.threshold


def _explain_by_weights(setting: Setting, tolerance: float, *, fit: bool) -> Finding | None:
    """Find weights with which the gradients of three parts of the batch combine to that of the whole.

    With `fit`, any weights at all, if no known ones do.
    """
    pieces: list[_Part] = []
    if failure_of(lambda: pieces.extend(_parts(setting, [1]) + _parts(setting, [1, 2, 3]))) is not None:
        return None  # such as BatchNorm, which cannot see a single sample
    batch, *parts = pieces
    if len(parts) < 2 or not bool(batch.gradient.norm() > 0):
        return None
    combination = _Combination(batch, parts, max(1e-9, 100 * tolerance))
    stated = _shares([weigh(setting.problem, part.microbatch) for part in parts])
    mean = setting.problem.reduction == "mean"
    wrong = combination.misses(stated if mean else [1.0] * len(parts))
    if wrong <= combination.threshold:
        return None  # the statement holds for these parts
    if combination.holds([1.0] * len(parts) if mean else stated):
        return _sum(wrong) if mean else _mean(wrong)
    if not mean and _adds_a_constant(setting, combination):
        return _constant(wrong)
    for text, candidate in weight_candidates(setting.problem, batch.microbatch):
        if combination.holds(_shares([candidate(part.microbatch) for part in parts])):
            return _weight(wrong, text, mean)
    return _by_fit(combination, wrong) if fit else None


def _parts(setting: Setting, proportions: list[int]) -> list[_Part]:
    """Unequal parts of the batch, each with a sketch of the gradient of its loss as it is returned."""
    problem = setting.problem
    planned = plan(setting.batch, whole=problem.whole, per_sample=problem.per_sample)
    ends = [planned.samples * end // sum(proportions) for end in accumulate(proportions)]
    parts: list[_Part] = []
    for start, stop in zip([0, *ends], ends, strict=False):
        if start < stop:
            microbatch = planned.take(start, stop)
            setting.begin()
            with sample_stream(_STREAM_KEY, start, stop - start) if setting.streams else nullcontext():
                evaluate(problem, microbatch)[0].backward()
            parts.append(_Part(stop - start, microbatch, _sketch(setting)))
    return parts


def _sketch(setting: Setting) -> Tensor:
    """Some entries of each parameter's gradient."""
    entries: list[Tensor] = []
    for parameter in setting.problem.model.parameters():
        if not parameter.requires_grad:
            continue
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.detach()
        gradient = torch.view_as_real(gradient) if gradient.is_complex() else gradient.to_dense()
        flat = gradient.reshape(-1)
        entries.append(flat[:: -(-flat.numel() // _ENTRIES) or 1].double().cpu())
    return torch.cat(entries)


def _shares(weights: list[Any]) -> list[float]:
    total = sum(weights)
    return [weight / total if total else 0.0 for weight in weights]


def _sum(evidence: float) -> Finding:
    return Finding(
        "sum",
        "loss_fn",
        evidence,
        "sum of the parts",
        "the losses of parts add up to that of the whole: loss_fn returns a sum, or divides by a "
        "constant (Hugging "
        "Face models do when they are given num_items_in_batch), but a mean is stated",
        'pass reduction="sum" if it is a plain sum; else leave out the constant '
        "(num_items_in_batch), so that the "
        "loss is the mean over a micro-batch, and pass the weight that it divides by, as "
        'count_tokens("labels")',
    )


def _mean(evidence: float) -> Finding:
    return Finding(
        "mean",
        "loss_fn",
        evidence,
        "weighted mean of the parts",
        "the loss of the whole is the weighted mean of its parts: loss_fn returns a mean, but a sum "
        "is stated",
        'pass reduction="mean"',
    )


def _adds_a_constant(setting: Setting, combination: _Combination) -> bool:
    """Whether K parts are too much by K - 1 times the same: a term that every part adds again."""
    batch, parts, threshold = combination
    fewer = _parts(setting, [1, 2])
    if not 2 <= len(fewer) < len(parts):
        return False
    surplus = torch.stack([part.gradient for part in parts]).sum(0) - batch.gradient
    less = torch.stack([part.gradient for part in fewer]).sum(0) - batch.gradient
    expected = less * (len(parts) - 1) / (len(fewer) - 1)
    return bool((surplus - expected).norm() <= threshold * batch.gradient.norm())


def _constant(evidence: float) -> Finding:
    return Finding(
        "batch_size",
        "loss_fn",
        evidence,
        "surplus of the parts",
        "a term of the loss does not depend on the samples, such as a penalty on weights: in a sum, every "
        "micro-batch adds it again",
        "leave the penalty to the optimizer (weight_decay), multiply it by the micro-batch's samples, or "
        'return a mean with reduction="mean"',
    )


def _weight(evidence: float, text: str, mean: bool) -> Finding:
    return Finding(
        "weight",
        "loss_fn",
        evidence,
        "weighted mean of the parts",
        f"a mean of means: the loss is a mean over what {text} counts, but it is weighted otherwise",
        f"pass weight={text}" if mean else f'pass reduction="mean", weight={text}',
    )


def _by_fit(combination: _Combination, evidence: float) -> Finding | None:
    """Any weights at all: found by least squares, and judged only where they are overdetermined."""
    gradients, samples = combination.gradients(), [part.samples for part in combination.parts]
    if gradients.shape[0] < 2 * gradients.shape[1]:
        return None
    solved = torch.linalg.lstsq(gradients, combination.batch.gradient.unsqueeze(1), driver="gelsd")
    fitted = solved.solution[:, 0].tolist()
    if not combination.holds(fitted) or min(fitted) <= 0:
        return None
    shares = zip(fitted, samples, strict=True)
    named = ", ".join(f"{weight:.4g} for {count} samples" for weight, count in shares)
    if _depends_on_size_alone(fitted, samples):
        detail = f"the loss depends on the number of samples: its parts enter the whole with weights {named}"
        remedy = 'return the plain mean over the micro-batch, or the plain sum with reduction="sum"'
        return Finding("batch_size", "loss_fn", evidence, "weights of the parts", detail, remedy)
    detail = f"a mean of means: the parts enter the whole with weights {named}, not as stated"
    remedy = "pass weight=a function of the micro-batch that gives what its loss is divided by"
    return Finding("weight", "loss_fn", evidence, "weights of the parts", detail, remedy)


def _depends_on_size_alone(weights: list[float], samples: list[int]) -> bool:
    """Whether weights are a power of the number of samples, up to one factor."""
    if len(set(samples)) < 2 or min(weights) <= 0:
        return False
    x = torch.tensor(samples, dtype=torch.float64).log()
    y = torch.tensor(weights, dtype=torch.float64).log()
    x, y = x - x.mean(), y - y.mean()
    return bool((y - x * (x @ y) / (x @ x)).abs().amax() < 1e-6)
