"""Probes of a forward pass: find modules whose output for one sample depends on other samples.

A probe runs `loss_fn` on N samples. N is a prime, so that a dimension of size N (or k N) is most likely that
of the samples. Two samples are watched: the first and the last but one.

A tensor may have several dimensions that could hold the samples. Each possibility is a reading of its shape;
a module mixes samples if every reading shows it.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from superbatch.torch.devices import in_float64, where_float64_is


@dataclass(frozen=True)
class Mixing:
    """A module that couples the samples of a batch.

    Args:
        module: path of the module; `"loss_fn"` for code outside every module.
        evidence: relative change, or relative gradient, that should be zero.

    Examples:
        >>> Mixing("encoder.norm", 0.5).module
        'encoder.norm'
    """

    module: str
    evidence: float


class _Call(NamedTuple):
    """Call of a module: its path, and the number of its earlier calls."""

    module: str
    calls: int


@dataclass(frozen=True)
class CallRecord:
    """Rows of the watched samples in the input (`entry`) or output of a call; made by `watch`."""

    call: _Call
    entry: bool
    caller: _Call | None
    tensors: list[_Readings]


class _Readings(NamedTuple):
    """Shape of a tensor, and the rows of the watched samples under each reading of the shape."""

    shape: torch.Size
    readings: list[Tensor]


@dataclass
class _Recorder:
    """Records the calls of modules in a forward pass."""

    samples: int
    counts: Counter[str] = field(default_factory=Counter)
    stack: list[_Call] = field(default_factory=list)
    events: list[CallRecord] = field(default_factory=list)

    def before(self, path: str, inputs: Any) -> None:
        call = _Call(path, self.counts[path])
        self.counts[path] += 1
        # Before the call is pushed: the top of the stack is its caller.
        self.record(call, inputs, entry=True)
        self.stack.append(call)

    def after(self, output: Any) -> None:
        self.record(self.stack.pop(), output, entry=False)

    def record(self, call: _Call, value: Any, *, entry: bool) -> None:
        caller = self.stack[-1] if self.stack else None
        # Detached, so that the events keep no graph alive.
        tensors = [
            _Readings(tensor.shape, _readings(tensor.detach(), self.samples)) for tensor in tensors_in(value)
        ]
        self.events.append(CallRecord(call, entry, caller, tensors))


def watched_samples(samples: int) -> tuple[int, int]:
    """Return the two samples that a probe watches: the first, and the last but one (of two: the last).

    Not the last, because code that mixes a batch with its reverse would pair it with the first.

    Examples:
        >>> watched_samples(7), watched_samples(2)
        ((0, 5), (0, 1))
    """
    return (0, samples - 2) if samples > 2 else (0, samples - 1)


def watch(model: nn.Module, run: Callable[[], Any], samples: int) -> list[CallRecord]:
    """Run a forward pass, and record every module's inputs and outputs for the watched samples, in order.

    `samples`, the number of samples in the pass, is a prime. The hooks are removed afterwards.

    Examples:
        >>> model = nn.Linear(2, 2)
        >>> len(watch(model, lambda: model(torch.ones(7, 2)), 7))
        2
    """
    recorder = _Recorder(samples)

    def hooks(path: str) -> tuple[Callable[..., None], Callable[..., None]]:
        def before(_: nn.Module, args: Any, kwargs: Any) -> None:
            recorder.before(path, (args, kwargs))

        def after(_module: nn.Module, _args: Any, _kwargs: Any, output: Any) -> None:
            recorder.after(output)

        return before, after

    with _hooked(model, hooks):
        run()
    return recorder.events


def first_difference(a: list[CallRecord], b: list[CallRecord], *, tolerance: float) -> Mixing | None:
    """Return the first module that mixes samples, from two passes that differ only in unwatched samples.

    The output of the calling module must differ too. A router may give an expert different rows in the two
    passes, but mixes nothing if each sample gets its own result back.

    Return the module whose output differs although its input does not; the calling module if the input
    differs already; None without a difference. Differences up to `tolerance` are rounding.

    Examples:
        >>> model, x = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), torch.randn(7, 2)
        >>> one = watch(model, lambda: model(x), 7)
        >>> other = watch(model, lambda: model(torch.cat([x[:1], 9 * x[1:5], x[5:]])), 7)
        >>> first_difference(one, other, tolerance=1e-4).module, first_difference(one, one, tolerance=0.0)
        ('1', None)
    """
    # By call, not by position: a router may call its experts in another order.
    others = {(event.call, event.entry): event for event in b}
    changes = {
        key: _change(event, others[key]) for event in a if (key := (event.call, event.entry)) in others
    }
    for event in a:
        evidence = changes.get((event.call, event.entry)) or 0.0
        if evidence <= tolerance:
            continue
        # If the output of the caller is unchanged, the difference had no effect.
        given = changes.get((event.caller, False)) if event.caller else None
        if given is None or given > tolerance:
            caller = event.caller.module if event.caller else "loss_fn"
            return Mixing(caller if event.entry else event.call.module, evidence)
    return None


def gradient_mixing(
    model: nn.Module, run: Callable[[], Any], samples: int, *, tolerance: float
) -> tuple[list[Mixing], list[str]]:
    """Find the modules whose output for one sample has a gradient with respect to another sample's input.

    ``d out[0] / d in[j] != 0`` for some ``j != 0``, by one local backward per module. Unlike a comparison of
    values, it finds a normalisation whose value does not depend on the batch but whose gradient does.

    Gradients up to `tolerance`, relative to that of the sample itself, are rounding. Return the modules in
    the order of the pass, without modules that contain one of them; and the paths of modules that could not
    be probed.

    Examples:
        >>> model, x = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), torch.randn(7, 2)
        >>> found, failed = gradient_mixing(model, lambda: model(x), 7, tolerance=1e-6)
        >>> [mixing.module for mixing in found], failed
        (['1'], [])
    """
    found: list[Mixing] = []
    failed: list[str] = []

    def hooks(path: str) -> tuple[Callable[..., Any], Callable[..., None]]:
        def before(_: nn.Module, args: Any, kwargs: Any) -> Any:
            # Data has requires_grad=False, and without a gradient the first module could not be probed.
            return _differentiable(args), _differentiable(kwargs)

        def after(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            # A module that contains a mixing module has the same gradient.
            if any(_contains(path, mixing.module) for mixing in found):
                return
            try:
                evidence = _cross_gradient(tensors_in((args, kwargs)), tensors_in(output), samples)
            except RuntimeError:  # no gradient from here: a checkpoint, in-place code
                failed.append(path)
                return
            if evidence > tolerance:
                found.append(Mixing(path, evidence))

        return before, after

    # enable_grad: `verify` may be called under no_grad.
    with _hooked(model, hooks), torch.enable_grad():
        run()
    return found, failed


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in nested containers and dataclasses, in order.

    Examples:
        >>> len(tensors_in(({"a": torch.ones(1)}, [torch.ones(1), 3])))
        2
    """
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        return [tensor for entry in value.values() for tensor in tensors_in(entry)]
    if isinstance(value, list | tuple):
        return [tensor for entry in value for tensor in tensors_in(entry)]
    if is_dataclass(value) and not isinstance(value, type):
        return [tensor for part in fields(value) for tensor in tensors_in(getattr(value, part.name, None))]
    return []


@contextmanager
def _hooked(model: nn.Module, hooks: Callable[[str], tuple[Any, Any]]) -> Iterator[None]:
    with contextlib.ExitStack() as handles:
        for path, module in model.named_modules():
            before, after = hooks(path)
            # One by one: after an error, the hooks that are set already are removed.
            for handle in (
                module.register_forward_pre_hook(before, with_kwargs=True),
                module.register_forward_hook(after, with_kwargs=True),
            ):
                handles.callback(handle.remove)
        yield


def _readings(tensor: Tensor, samples: int) -> list[Tensor]:
    """Return the rows of the watched samples, under each reading of the shape."""
    # cat copies them, because in-place code may follow.
    return [torch.cat([_rows(tensor, *own) for own in pair]) for pair in _cuts(tensor, samples)]


_Cut = tuple[int, slice]


def _cuts(tensor: Tensor, samples: int) -> list[tuple[_Cut, _Cut]]:
    """Return (dimension, slice) of both watched samples, for each dimension that may hold the samples."""
    cuts: list[tuple[_Cut, _Cut]] = []
    for dimension, size in enumerate(tensor.shape):
        # A size that is no multiple of N cannot hold the samples.
        if size == 0 or size % samples:
            continue
        block = size // samples
        second = watched_samples(samples)[1]
        later = slice(second * block, (second + 1) * block)
        cuts.append(((dimension, slice(0, block)), (dimension, later)))
        if block > 1:  # samples vary fastest: (time, samples) flattened, or several concatenated views
            first, later = slice(0, None, samples), slice(second, None, samples)
            cuts.append(((dimension, first), (dimension, later)))
    return cuts


def _rows(tensor: Tensor, dimension: int, own: slice) -> Tensor:
    return tensor.movedim(dimension, 0)[own].reshape(-1)


def _change(one: CallRecord, other: CallRecord) -> float | None:
    """Return the largest relative difference of comparable tensors; None without any."""
    # One pass may return fewer tensors than the other; only pairs are compared.
    pairs = zip(one.tensors, other.tensors, strict=False)
    comparable = [(a.readings, b.readings) for a, b in pairs if a.shape == b.shape and a.readings]
    # The smallest change over all readings, because a wrong reading shows mixing where there is none.
    return max((min(map(_relative, *readings)) for readings in comparable), default=None)


def _relative(a: Tensor, b: Tensor) -> float:
    if not a.is_floating_point():
        return float(in_float64(a != b).mean()) if a.numel() else 0.0
    difference, size = (a - b).abs(), a.abs().amax() if a.numel() else a.new_zeros(())
    if not a.numel() or bool(torch.equal(a, b)):
        return 0.0
    if bool(a.isnan().logical_xor(b.isnan()).any()):
        return 1.0  # a NaN in one of them only: a complete change
    # inf - inf is NaN; differences of NaN or inf are set to 0.
    difference = difference.nan_to_num(0.0, 0.0, 0.0).amax()
    return float(difference / size) if size.isfinite() and size > 0 else float(difference)


def _differentiable(value: Any) -> Any:
    """Return inputs whose floating-point tensors require gradients."""
    if isinstance(value, Tensor):
        if value.is_floating_point() and not value.requires_grad and torch.is_grad_enabled():
            # Times 1: autograd does not allow in-place layers on a leaf.
            return value.detach().requires_grad_() * 1
        return value
    if type(value) in (list, tuple):
        return type(value)(_differentiable(entry) for entry in value)
    if type(value) is dict:
        return {name: _differentiable(entry) for name, entry in value.items()}
    return value


def _cross_gradient(inputs: list[Tensor], outputs: list[Tensor], samples: int) -> float:
    """Return the largest cross gradient of outputs with respect to inputs, each minimal over all readings."""
    wanted = [tensor for tensor in inputs if tensor.requires_grad and _cuts(tensor, samples)]
    worst: list[float] = [0.0]
    for output in outputs:
        if not wanted or output.grad_fn is None or not output.is_floating_point():
            continue
        smallest: list[float] | None = None
        for first, _ in _cuts(output, samples):
            own = _rows(output, *first)
            noise = _fixed_noise(own)
            # The graph is retained for other readings, and for the modules that contain this one.
            gradients = torch.autograd.grad(own, wanted, noise, retain_graph=True, allow_unused=True)
            found = [_towards_others(gradient, samples) for gradient in gradients]
            pairs = zip(smallest or found, found, strict=True)
            # The smallest, because a wrong reading shows gradients where there are none.
            smallest = [min(before, now) for before, now in pairs]
        worst += smallest or []
    return max(worst)


def _towards_others(gradient: Tensor | None, samples: int) -> float:
    if gradient is None:
        return 0.0
    largest = gradient.abs().amax()
    if not largest > 0:
        return 0.0
    readings = []
    for (dimension, own), _ in _cuts(gradient, samples):
        others = gradient.detach().clone()
        # Without the sample's own rows, only gradients of other samples remain.
        others.movedim(dimension, 0)[own] = 0
        readings.append(float(others.abs().amax() / largest))
    return min(readings, default=0.0)


def _fixed_noise(like: Tensor) -> Tensor:
    """Return fixed random weights: with equal ones the gradient of a normalised output would cancel."""
    position = torch.arange(like.numel(), dtype=torch.float64, device=where_float64_is(like[:0]).device)
    return (1.0 + 0.5 * torch.sin(position * 1.7 + 0.3)).to(like.dtype).to(like.device)


def _contains(path: str, inner: str) -> bool:
    return path in ("", inner) or inner.startswith(f"{path}.")
