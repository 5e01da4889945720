"""Four probes on a few samples that find out whether the loss is a sum over independent samples.

Each probe alone misses some coupling: a value may be independent of the batch although its gradient is not; a
comparison (``>``) does not propagate NaN; some coupling is inactive at the values tried. Together they found
every case of the tests.

* mixed difference: ``[f(a', R) - f(a, R)] - [f(a', R') - f(a, R')]`` of the summed loss f, for samples a,
  a' and other samples R, R'; zero for a sum over samples. It tests the loss as a function.
* perturbed samples: all samples but two are replaced or amplified; the rows of those two must not change in
  any module.
* NaN probe: all samples but two are NaN; it needs no tolerance.
* gradient probe: ``d out[0] / d in[j]`` of every module.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from superbatch.errors import SuperbatchError
from superbatch.normalize import Number, after_forward_scale
from superbatch.results.verification import Finding

from ..candidates import weight_candidates
from .probes import CallRecord, Mixing, first_difference, gradient_mixing, watch, watched_samples
from .problem import Problem, evaluate, forward
from .resample import change_floats, same_values, select
from .untouched import seed_all

_SEED = 0
_COUPLED_LOSS = (
    "use WholeBatch (the whole batch, in the memory of micro-batches), cached_gradients if the loss is one "
    "over embeddings, or a loss that is a weighted mean over samples"
)


class Mixed(NamedTuple):
    """Evidence that a module mixes samples: largest relative difference, and the probes that found it."""

    evidence: float
    tests: tuple[str, ...]


class Probe(NamedTuple):
    """Samples to probe, one more that replaces them, and functions that run a pass inside `untouched`.

    Args:
        problem: model, loss and declaration.
        batch: `samples + 1` samples.
        samples: number of probed samples, a prime.
        tolerance: largest relative difference that counts as rounding.
        reset: function that makes new working copies of the model.
        notes: list that receives a note for each probe that cannot run.
    """

    problem: Problem
    batch: Any
    samples: int
    tolerance: float
    reset: Callable[[], None]
    notes: list[str]

    def take(self, indices: list[int]) -> Any:
        """Return a batch of the samples at these indices."""
        return select(self.batch, indices, **self.problem.paths)

    def base(self) -> Any:
        """Return the unchanged samples, with which changed ones are compared."""
        return self.take(list(range(self.samples)))

    def begin(self) -> None:
        """Start a pass: restore the state and seed the generators."""
        # The previous pass may have changed buffers.
        self.reset()
        seed_all(_SEED, self.problem.model)

    def forward(self, batch: Any) -> tuple[Tensor, Number]:
        """Return the loss and the weight of a batch."""
        return evaluate(self.problem, batch)

    def watch(self, batch: Any) -> list[CallRecord]:
        """Evaluate the loss, and return each module's inputs and outputs for the watched samples."""
        self.begin()
        # Without the weight, which may raise for a batch with NaN.
        return watch(self.problem.model, lambda: forward(self.problem, batch), self.samples)


def find_mixing(probe: Probe, base: list[CallRecord]) -> dict[str, Mixed]:
    """Run the probes of single modules; `base` are the records of a pass on the unchanged samples.

    Return the modules that mix samples, by path; `"loss_fn"` stands for code outside every module.
    """
    found: dict[str, Mixed] = {}

    def add(mixing: Mixing, test: str) -> None:
        # Several probes may find one module; the largest evidence is kept.
        before = found.get(mixing.module, Mixed(0.0, ()))
        tests = dict.fromkeys([*before.tests, test])
        found[mixing.module] = Mixed(max(before.evidence, mixing.evidence), tuple(tests))

    # Values can be compared only if a pass repeats.
    if first_difference(base, probe.watch(probe.base()), tolerance=probe.tolerance) is None:
        _compare_values(probe, base, add)
    else:
        probe.notes.append("two equal passes differ: values were not compared between modules")
    _probe_gradients(probe, add)
    return found


def innermost(found: dict[str, Mixed], others: Collection[str]) -> dict[str, Mixed]:
    """Return the modules that contain no other mixing module; `others` are paths of further mixing modules.

    Examples:
        >>> list(innermost({"": Mixed(1.0, ()), "a": Mixed(1.0, ()), "ab": Mixed(1.0, ())}, ["a.b"]))
        ['ab']
    """
    mixing = [*found, *others]
    return {path: mixed for path, mixed in found.items() if not any(_within(path, other) for other in mixing)}


def loss_coupling(probe: Probe) -> Iterator[Finding]:
    """Compute the mixed difference of the loss, with BatchNorm frozen so that it hides no other coupling.

    Yield one finding if the weighted loss is not a sum over samples: of kind `"weight"` if another weight
    makes it one, else `"coupled_loss"`.
    """
    # Several pairs (a, a'), because one pair may be alike by chance.
    quadruples = [_quadruple(probe, shift) for shift in range(0, probe.samples, 2)]
    # With equal samples the difference is 0 for every loss.
    if all(same_values(q[0], q[1]) or same_values(q[0], q[2]) for q in quadruples):
        probe.notes.append("samples are equal: the mixed difference shows nothing")
        return
    results: list[list[_Sum]] = []
    failure = failure_of(lambda: results.extend(_frozen_losses(probe, four) for four in quadruples))
    if failure is not None:
        probe.notes.append(f"mixed difference: {failure}")
        return
    reduction = probe.problem.reduction
    # Under a correct declaration, the loss times this factor is a sum over samples.
    declared = [
        [after_forward_scale(weight, reduction=reduction) for _, weight, _ in four] for four in results
    ]
    evidence = _mixed(results, declared)
    if evidence > probe.tolerance:
        yield _explained(probe, results, evidence)
        return
    evidence = _order_dependence(probe)
    if evidence > probe.tolerance:
        detail = "the loss depends on the order of the samples in the batch"
        yield Finding("coupled_loss", "loss_fn", evidence, "reversed batch", detail, _COUPLED_LOSS)


def failure_of(run: Callable[[], Any]) -> str | None:
    """Run user code that may raise on modified samples; return its error as text, or None if it ran.

    Errors of this library are raised.

    Examples:
        >>> failure_of(lambda: 1 / 0), failure_of(lambda: 1)
        ('ZeroDivisionError: division by zero', None)
    """
    try:
        run()
    except SuperbatchError:
        raise
    except Exception as error:  # noqa: BLE001 - user code may raise anything on modified samples
        return f"{type(error).__name__}: {error}"
    return None


def _compare_values(probe: Probe, base: list[CallRecord], add: Callable[[Mixing, str], None]) -> None:
    for test, batch in _perturbed(probe):
        passes: list[list[CallRecord]] = []
        # Default arguments, because a closure would use the last values of the loop.
        failure = failure_of(lambda batch=batch, passes=passes: passes.append(probe.watch(batch)))
        if failure is not None:
            probe.notes.append(f"{test}: {failure}")
            continue
        mixing = first_difference(base, passes[0], tolerance=probe.tolerance)
        if mixing is not None:
            add(mixing, test)


def _probe_gradients(probe: Probe, add: Callable[[Mixing, str], None]) -> None:
    found: list[Mixing] = []
    failed: list[str] = []

    def run() -> None:
        probe.begin()
        mixing, not_probed = gradient_mixing(
            probe.problem.model,
            lambda: forward(probe.problem, probe.base()),
            probe.samples,
            tolerance=probe.tolerance,
        )
        found.extend(mixing)
        failed.extend(repr(path) for path in dict.fromkeys(not_probed))

    failure = failure_of(run)
    if failure or failed:
        probe.notes.append(f"gradient probe: {failure or 'not possible in ' + ', '.join(failed)}")
    for mixing in found:
        add(mixing, "gradient probe")


def _perturbed(probe: Probe) -> Iterator[tuple[str, Any]]:
    """Yield (name of the probe, batch) with all samples changed except the watched ones."""
    spare, base = probe.samples, probe.base()
    everyone = range(probe.samples)
    others = [index for index in everyone if index not in watched_samples(probe.samples)]
    if not others:
        probe.notes.append(f"only {probe.samples} samples: values were not compared between modules")
        return

    def changed(fn: Callable[[Tensor], Tensor]) -> Any:
        problem = probe.problem
        return change_floats(fn, base, others, **problem.paths)

    reordered = dict(zip(others, reversed(others), strict=True))
    batches = [
        ("perturbed samples", probe.take([spare if index in others else index for index in everyone])),
        ("perturbed samples", probe.take([reordered.get(index, index) for index in everyone])),
        # Times 8 affects a maximum, zeros affect a division, NaN affects every sum.
        ("perturbed samples", changed(lambda x: 8 * x)),
        ("perturbed samples", changed(torch.zeros_like)),
        ("NaN probe", changed(lambda x: torch.full_like(x, math.nan))),
    ]
    # `changed` does not change a batch without floating-point tensors.
    different = [(test, batch) for test, batch in batches if not same_values(base, batch)]
    if not different:
        probe.notes.append("samples are equal and have no floats: replacing samples shows nothing")
    yield from different


def _order_dependence(probe: Probe) -> float:
    """Return the relative change of the loss if the batch is reversed; 0 if it draws random numbers."""

    def loss_of(indices: list[int], seed: int) -> float:
        probe.begin()
        seed_all(seed, probe.problem.model)
        return float(probe.forward(probe.take(indices))[0].detach())

    order = list(range(probe.samples))
    first = loss_of(order, 0)
    # A loss that draws random numbers changes with the seed.
    if any(loss_of(order, seed) != first for seed in (1, 2, 3)):
        return 0.0
    change = abs(loss_of(order[::-1], 0) - first)
    return change / abs(first) if first else change


class _Sum(NamedTuple):
    """Loss and weight of a batch."""

    loss: float
    weight: Number
    batch: Any


def _quadruple(probe: Probe, shift: int) -> list[Any]:
    """Return the batches (a, R), (a', R), (a, R'), (a', R')."""

    def take(one: int, others: list[int]) -> Any:
        return probe.take([(shift + index) % probe.samples for index in (one, *others)])

    others = list(range(2, probe.samples)) or [1]
    # R' has other samples than R: the same ones in another order would have the same statistics.
    replaced = [index + 1 for index in others]
    return [take(one, rest) for rest in (others, replaced) for one in (0, 1)]


def _frozen_losses(probe: Probe, batches: list[Any]) -> list[_Sum]:
    sums: list[_Sum] = []
    for batch in batches:
        probe.begin()
        # BatchNorm is found by its type; here it would hide other coupling.
        for module in probe.problem.model.modules():
            if isinstance(module, _BatchNorm):
                module.training = False
        loss, weight = probe.forward(batch)
        sums.append(_Sum(float(loss.detach()), weight, batch))
    return sums


def _explained(probe: Probe, results: list[list[_Sum]], evidence: float) -> Finding:
    for text, weigh in weight_candidates(probe.problem, probe.batch):
        # The candidates are in order: the likeliest first.
        if _mixed(results, [[weigh(batch) for _, _, batch in four] for four in results]) <= probe.tolerance:
            detail = f"the loss is a mean over another count than its weight: {text} fits"
            return Finding("weight", "loss_fn", evidence, "mixed difference", detail, f"pass weight={text}")
    detail = "the loss is not a weighted mean over samples"
    return Finding("coupled_loss", "loss_fn", evidence, "mixed difference", detail, _COUPLED_LOSS)


def _mixed(results: list[list[_Sum]], weights: list[list[Number]]) -> float:
    """Return the largest mixed difference of four weighted losses, relative to the largest of them."""
    found: list[float] = []
    for four, scales in zip(results, weights, strict=True):
        # In the order of `_quadruple`: the loss of (a, R), (a', R), (a, R'), (a', R').
        sums = [result.loss * scale for result, scale in zip(four, scales, strict=True)]
        size = max(map(abs, sums))
        found.append(abs((sums[1] - sums[0]) - (sums[3] - sums[2])) / size if size else 0.0)
    return max(found)


def _within(path: str, other: str) -> bool:
    """Return whether one module contains another."""
    return other not in (path, "loss_fn") and (path == "" or other.startswith(f"{path}."))
