"""Coupling between the samples of a batch: the modules in which they influence each other.

Accumulated gradients are exact only where the loss is a weighted mean over independent samples.
`coupled_modules` reads the types of modules, needs no data and misses hand-written coupling; `find_coupling`
probes a few samples in four ways (`probing.separability`), each of which alone misses something.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from superbatch.batch.tree import count_samples
from superbatch.normalize import Reduction
from superbatch.results.verification import Finding

from ..devices import accelerators, has_float64
from .precision import ComputeIn
from .probing.problem import LossFn, Problem, WeightOption
from .probing.resample import select
from .probing.separability import Mixed, Probe, failure_of, find_mixing, innermost, loss_coupling
from .probing.untouched import changed_state, held_parameter, module_state, untouched

# Primes: a dimension of 7 holds the samples, while one of 8 may well be channels.
_PRIMES = (7, 5, 3, 2)
_REMEDIES = {
    "batchnorm": "use WholeBatch (the statistics of the whole batch), freeze it (module.eval() or "
    "participants=[FrozenBatchNorm()]), use GroupNorm or LayerNorm instead, or accept the statistics of "
    "micro-batches with participants=[GhostBatchNorm()], which is another function",
    "coupled": "use WholeBatch (the whole batch, in the memory of micro-batches), or compute per sample here",
    "state": "let this state change once for each update and outside the forward, or put the module into "
    "evaluation mode",
}


def uses_batch_statistics(module: nn.Module) -> bool:
    """Return whether a module normalises with statistics of the batch it sees.

    A BatchNorm does so in training mode, and also in evaluation mode when it has no running statistics
    (`track_running_stats=False`).

    Args:
        module: any module; its children are not inspected.

    Returns:
        True for BatchNorm1d/2d/3d and SyncBatchNorm (and their subclasses) that would use batch statistics
        now.

    Examples:
        >>> uses_batch_statistics(nn.BatchNorm1d(3)), uses_batch_statistics(nn.BatchNorm1d(3).eval())
        (True, False)
    """
    if not isinstance(module, _BatchNorm):
        return False
    # Without running statistics torch falls back to those of the batch, in evaluation mode too.
    return module.training or (module.running_mean is None and module.running_var is None)


def changes_state(module: nn.Module) -> bool:
    """Return whether a module is of a type that changes its buffers with every forward, coupled or not.

    Args:
        module: any module; its children are not inspected.

    Returns:
        True in training mode for normalisations with running statistics, and for spectral norm, whose power
        iteration advances with every forward.

    Examples:
        >>> changes_state(nn.InstanceNorm1d(3)), changes_state(nn.InstanceNorm1d(3, track_running_stats=True))
        (False, True)
    """
    # InstanceNorm included: it couples no samples and still moves running statistics.
    if isinstance(module, _NormBase):
        return module.training and module.running_mean is not None
    # Neither form of spectral norm has a public class that could be asked for.
    hooks = [type(hook).__name__ for hook in module._forward_pre_hooks.values()]
    return module.training and (type(module).__name__ == "_SpectralNorm" or "SpectralNorm" in hooks)


def coupled_modules(model: nn.Module) -> list[str]:
    """Paths of the modules that, by their type and mode, let samples of a batch influence each other.

    Costs one walk over the modules and needs no data, so it misses hand-written coupling;
    `find_coupling` finds that by probing.

    Args:
        model: the model, in the mode (training or evaluation) in which it is about to be used.

    Returns:
        The paths, as in `model.named_modules()` and in its order; the model itself is `""`.

    Examples:
        >>> model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.ReLU())
        >>> coupled_modules(model), coupled_modules(model.eval())
        (['1'], [])
    """
    return [path for path, module in model.named_modules() if uses_batch_statistics(module)]


def find_coupling(
    model: nn.Module,
    loss_fn: LossFn,
    batch: Any,
    *,
    reduction: Reduction = "mean",
    weight: WeightOption = None,
    unsplit: Collection[str] = (),
    per_sample: Collection[str] = (),
) -> tuple[Finding, ...]:
    """Probe a model and a loss for samples that influence each other and state that a forward changes.

    Runs about ten forward passes of seven samples in float64 (in the model's own dtype where float64
    fails), and leaves the model, its gradients and the random state as they were.

    Args:
        model: the model, in the mode in which it is trained.
        loss_fn: from a micro-batch to its loss, a closure over the model.
        batch: where samples are taken from; at least 3, better 8 or more.
        reduction: what `loss_fn` returns.
        weight: how micro-batches are weighted, as in the Accumulator.
        unsplit: paths of the batch that are kept whole.
        per_sample: paths of lists with one entry for each sample.

    Returns:
        The findings in the order of the forward pass, so that the first names the first module that mixes;
        `"loss_fn"` stands for code outside every module. Empty where samples are separate.

    Raises:
        SplitError: the batch has no samples to take, or they cannot be exchanged.

    Examples:
        >>> model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
        >>> found = find_coupling(model, lambda x: model(x).square().mean(), torch.randn(8, 2))
        >>> [(finding.kind, finding.module, finding.found_by) for finding in found]
        [('batchnorm', '1', 'perturbed samples, NaN probe, gradient probe')]
    """
    return probe_coupling(Problem(model, loss_fn, reduction, weight, unsplit, per_sample), batch)[0]


def probe_coupling(
    problem: Problem, batch: Any, *, samples: int = 7
) -> tuple[tuple[Finding, ...], tuple[str, ...]]:
    """Run `find_coupling`, with notes on probes that were not possible.

    Args:
        problem: model, loss and declarations.
        batch: where samples are taken from.
        samples: how many to take at most; the largest prime up to it that the batch has is taken.

    Returns:
        The findings, and the notes.

    Examples:
        >>> layer = nn.Linear(2, 1)
        >>> probe_coupling(Problem(layer, lambda x: layer(x).mean()), torch.randn(2, 2))
        ((), ('only 2 samples: values were not compared between modules',))
    """
    available = count_samples(batch, unsplit=problem.unsplit, per_sample=problem.per_sample)
    taken = next((prime for prime in _primes(samples) if prime <= available), 1)
    failure: str | None = "only 1 sample"
    if taken > 1:
        # Spread over the batch, as neighbours may be alike.
        chosen = [index * available // taken for index in range(taken)]
        # One sample more, which replaces others in the probes.
        spare = next((index for index in range(available) if index not in chosen), chosen[-1])
        small = select(batch, [*chosen, spare], unsplit=problem.unsplit, per_sample=problem.per_sample)
        # In float64 a tolerance of 1e-10 keeps rounding from looking like coupling.
        choices = ((torch.float64, 1e-10), (None, 1e-3))
        own_alone = held_parameter(problem.model) is not None
        own_alone = own_alone or not all(map(has_float64, accelerators([problem.model])))
        # choices[True:] leaves float64 out: DDP holds a parameter, or a device has no float64.
        for dtype, tolerance in choices[own_alone:]:
            with untouched(problem.model, dtype=dtype) as reset:
                # probe=probe below, as a closure would see the last probe of the loop.
                probe = Probe(_computed_in(dtype, problem), small, taken, tolerance, reset, [])
                failure = failure_of(lambda probe=probe: probe.forward(probe.base()))
                if failure is None:
                    return tuple(_probed(probe)), tuple(dict.fromkeys(probe.notes))
        failure = f"on {taken} samples {failure}"
    # No probe ran: types still tell BatchNorm.
    return tuple(_by_type(problem.model, {})), (f"coupling was searched for by type alone: {failure}",)


def _computed_in(dtype: torch.dtype | None, problem: Problem) -> Problem:
    """Return a problem in a dtype, also in those parts of a model that compute in float32 by themselves."""
    if dtype is None:
        return problem.in_dtype(None)

    # A part of the model that says x.float() would round to 1e-7 and pass for coupling.
    def loss_fn(batch: Any) -> Any:
        with ComputeIn(dtype):
            return problem.loss_fn(batch)

    return replace(problem.in_dtype(dtype), loss_fn=loss_fn)


def _probed(probe: Probe) -> Iterator[Finding]:
    model = probe.problem.model
    probe.begin()
    before = module_state(model)
    base = probe.watch(probe.base())
    stateful = {finding.module: finding for finding in _stateful(model, before, module_state(model))}
    mixing = innermost(find_mixing(probe, base), coupled_modules(model))
    # Of findings about one module the last counts: for state the measurement, over the type; for mixing the
    # type, over the measurement, as it names the remedy.
    by_type = {finding.module: finding for finding in _by_type(model, mixing)}
    state = {
        path: stateful.get(path, finding) for path, finding in by_type.items() if finding.kind == "state"
    }
    named = {**stateful, **{finding.module: finding for finding in _measured(mixing)}, **by_type, **state}
    order = {event.call.module: position for position, event in enumerate(base) if not event.entry}
    yield from sorted(named.values(), key=lambda finding: order.get(finding.module, len(base)))
    # `loss_coupling` freezes BatchNorm; any other module that mixes would only be reported again.
    if mixing.keys() <= set(coupled_modules(model)):
        yield from loss_coupling(probe)


def _measured(mixing: Mapping[str, Mixed]) -> Iterator[Finding]:
    for path, (evidence, tests) in mixing.items():
        where = "before the model sees them" if path == "loss_fn" else "here"
        detail = f"samples of a batch influence each other {where}"
        yield Finding("coupled", path, evidence, ", ".join(tests), detail, _REMEDIES["coupled"])


def _by_type(model: nn.Module, mixing: Mapping[str, Mixed]) -> Iterator[Finding]:
    for path, module in model.named_modules():
        kind = type(module).__name__
        if uses_batch_statistics(module):
            evidence, tests = mixing.get(path, (math.nan, ("type",)))
            mode = "in training mode" if module.training else "without running statistics"
            yield Finding(
                "batchnorm", path, evidence, ", ".join(tests), f"{kind} {mode}", _REMEDIES["batchnorm"]
            )
        elif changes_state(module):
            detail = f"{kind} changes its buffers with every forward in training mode"
            yield Finding("state", path, math.nan, "type", detail, _REMEDIES["state"])


def _stateful(model: nn.Module, before: dict[str, Any], after: dict[str, Any]) -> Iterator[Finding]:
    """Modules whose state the forward between `before` and `after` changed."""
    # One finding for running_mean and running_var of a layer.
    by_module: dict[str, list[str]] = {}
    for path in changed_state(before, after):
        by_module.setdefault(path.rpartition(".")[0], []).append(path)
    for path, names in by_module.items():
        evidence = max(_relative_change(before.get(name), after[name]) for name in names)
        detail = f"a forward changes {', '.join(names)}"
        yield Finding("state", path, evidence, "state before and after", detail, _REMEDIES["state"])


def _relative_change(before: Any, after: Any) -> float:
    if not isinstance(before, Tensor) or not isinstance(after, Tensor) or before.shape != after.shape:
        return 1.0
    # complex128 holds every dtype, integers included.
    size = float(before.to(torch.complex128).norm())
    return float((after.to(torch.complex128) - before).norm()) / (size or 1.0)


def _primes(largest: int) -> list[int]:
    """Primes up to a number, the largest first."""
    # More than 7 samples only on request: `diagnose` takes up to 97.
    more = [n for n in range(largest, 7, -1) if all(n % d for d in range(2, math.isqrt(n) + 1))]
    return [*more, *(prime for prime in _PRIMES if prime <= largest)]
