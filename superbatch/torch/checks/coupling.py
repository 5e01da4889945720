"""Search for modules that couple the samples of a batch: samples influence each other there.

Accumulated gradients are exact only if the loss is a weighted mean over independent samples.
`coupled_modules` reads the types of modules, needs no data and misses hand-written coupling. `find_coupling`
runs four probes on a few samples (`probing.separability`); each probe alone misses some kind of coupling.
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

# Primes: a dimension of size 7 is most likely that of the samples; one of size 8 may be channels.
_PRIMES = (7, 5, 3, 2)
_REMEDIES = {
    "batchnorm": "use WholeBatch (statistics of the whole batch), freeze it (module.eval() or "
    "participants=[FrozenBatchNorm()]), use GroupNorm or LayerNorm, or normalise each micro-batch by itself "
    "with participants=[GhostBatchNorm()], which is a different function",
    "coupled": "use WholeBatch (the whole batch in the memory of micro-batches), or compute per sample here",
    "state": "change this state once per update, outside the forward, or put the module into evaluation mode",
}


def uses_batch_statistics(module: nn.Module) -> bool:
    """Return whether a module normalises with statistics of its input batch.

    A BatchNorm does so in training mode, and also in evaluation mode when it has no running statistics
    (`track_running_stats=False`).

    Args:
        module: any module; its children are not inspected.

    Returns:
        True for BatchNorm1d/2d/3d and SyncBatchNorm (and subclasses) that use batch statistics in their
        present mode.

    Examples:
        >>> uses_batch_statistics(nn.BatchNorm1d(3)), uses_batch_statistics(nn.BatchNorm1d(3).eval())
        (True, False)
    """
    if not isinstance(module, _BatchNorm):
        return False
    # Without running statistics torch uses those of the batch, in evaluation mode too.
    return module.training or (module.running_mean is None and module.running_var is None)


def changes_state(module: nn.Module) -> bool:
    """Return whether a module is of a type whose forward changes its buffers, even if it couples no samples.

    Args:
        module: any module; its children are not inspected.

    Returns:
        True in training mode for normalisations with running statistics, and for spectral norm: each forward
        makes one power iteration.

    Examples:
        >>> changes_state(nn.InstanceNorm1d(3)), changes_state(nn.InstanceNorm1d(3, track_running_stats=True))
        (False, True)
    """
    # InstanceNorm included: it couples no samples but updates running statistics.
    if isinstance(module, _NormBase):
        return module.training and module.running_mean is not None
    # Neither form of spectral norm has a public class.
    hooks = [type(hook).__name__ for hook in module._forward_pre_hooks.values()]
    return module.training and (type(module).__name__ == "_SpectralNorm" or "SpectralNorm" in hooks)


def coupled_modules(model: nn.Module) -> list[str]:
    """Return the paths of the modules that couple samples by their type and mode.

    It walks over the modules once and needs no data, so it misses hand-written coupling, which
    `find_coupling` finds.

    Args:
        model: the model, in the mode (training or evaluation) in which it will run.

    Returns:
        Paths in the order and form of `model.named_modules()`; the model itself is `""`.

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
    """Probe a model and a loss for coupled samples, and for state that a forward changes.

    It runs about ten forward passes of seven samples in float64 (in the model's own dtype if float64 fails).
    Afterwards the model, its gradients and the random state are restored.

    Args:
        model: the model, in the mode in which it is trained.
        loss_fn: function from a micro-batch to its loss, a closure over the model.
        batch: batch with at least 3 samples, better 8 or more.
        reduction: reduction of the loss that `loss_fn` returns.
        weight: weights of micro-batches, as in the Accumulator.
        unsplit: paths of leaves that every micro-batch gets in full.
        per_sample: paths of lists with one entry for each sample.

    Returns:
        The findings in the order of the forward pass: the first one names the first module that mixes
        samples. `"loss_fn"` stands for code outside every module. Empty if no sample influences another.

    Raises:
        SplitError: the batch cannot be split into samples, or samples cannot be exchanged.

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
    """Run `find_coupling`; also return notes on probes that could not run.

    The number of samples is the largest prime up to `samples` and the size of the batch.

    Examples:
        >>> layer = nn.Linear(2, 1)
        >>> probe_coupling(Problem(layer, lambda x: layer(x).mean()), torch.randn(2, 2))
        ((), ('only 2 samples: values were not compared between modules',))
    """
    available = count_samples(batch, **problem.paths)
    taken = next((prime for prime in _primes(samples) if prime <= available), 1)
    failure: str | None = "only 1 sample"
    if taken > 1:
        # Spread over the batch, because neighbours may be alike.
        chosen = [index * available // taken for index in range(taken)]
        # One more sample, which replaces others in the probes.
        spare = next((index for index in range(available) if index not in chosen), chosen[-1])
        small = select(batch, [*chosen, spare], **problem.paths)
        # In float64 a tolerance of 1e-10 keeps rounding from looking like coupling.
        choices = ((torch.float64, 1e-10), (None, 1e-3))
        own_alone = held_parameter(problem.model) is not None
        own_alone = own_alone or not all(map(has_float64, accelerators([problem.model])))
        # choices[True:] skips float64: DDP holds a parameter, or a device does not support float64.
        for dtype, tolerance in choices[own_alone:]:
            with untouched(problem.model, dtype=dtype) as reset:
                # probe=probe, because a closure would use the last probe of the loop.
                probe = Probe(_computed_in(dtype, problem), small, taken, tolerance, reset, [])
                failure = failure_of(lambda probe=probe: probe.forward(probe.base()))
                if failure is None:
                    return tuple(_probed(probe)), tuple(dict.fromkeys(probe.notes))
        failure = f"on {taken} samples {failure}"
    # No probe ran, but BatchNorm is recognized by its type.
    return tuple(_by_type(problem.model, {})), (f"coupling was searched for by module type only: {failure}",)


def _computed_in(dtype: torch.dtype | None, problem: Problem) -> Problem:
    """Return a problem computed in a dtype, including parts of the model that convert to float32."""
    if dtype is None:
        return problem.in_dtype(None)

    # x.float() in the model would round to 1e-7, which looks like coupling.
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
    # One finding per module. If the module changes state, keep the measured finding. If it mixes samples,
    # keep the finding by type, because the type gives the remedy.
    by_type = {finding.module: finding for finding in _by_type(model, mixing)}
    state = {
        path: stateful.get(path, finding) for path, finding in by_type.items() if finding.kind == "state"
    }
    named = {**stateful, **{finding.module: finding for finding in _measured(mixing)}, **by_type, **state}
    order = {event.call.module: position for position, event in enumerate(base) if not event.entry}
    yield from sorted(named.values(), key=lambda finding: order.get(finding.module, len(base)))
    # `loss_coupling` freezes only BatchNorm, so it would report any other mixing module a second time.
    if mixing.keys() <= set(coupled_modules(model)):
        yield from loss_coupling(probe)


def _measured(mixing: Mapping[str, Mixed]) -> Iterator[Finding]:
    for path, (evidence, tests) in mixing.items():
        where = "before the model's forward" if path == "loss_fn" else "here"
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
    """Yield the modules whose state the forward between `before` and `after` has changed."""
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
    # complex128 represents every dtype, integers included.
    size = float(before.to(torch.complex128).norm())
    return float((after.to(torch.complex128) - before).norm()) / (size or 1.0)


def _primes(largest: int) -> list[int]:
    """Return the primes up to a number, the largest first."""
    # More than 7 samples only on request: `diagnose` uses up to 97.
    more = [n for n in range(largest, 7, -1) if all(n % d for d in range(2, math.isqrt(n) + 1))]
    return [*more, *(prime for prime in _PRIMES if prime <= largest)]
