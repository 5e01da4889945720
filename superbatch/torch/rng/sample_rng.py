"""Random streams per sample, so that training with dropout does not depend on the split.

* `superbatch.torch.rng.counter` computes every random value of a micro-batch's forward and backward from four
  numbers: window key, call key, the sample's index in the effective batch, and the index within the sample.
  So no value depends on the other samples of its micro-batch, on their number or order, or on the device.
* The call key is the next number of torch's global CPU generator, which gets the same seed at the start of
  every micro-batch of a window. Activation checkpointing restores that generator before it repeats a forward,
  so it repeats the masks too.
* A random operation that cannot be drawn like this raises.
* On exit, modes, generator and the `torch.compile` stance are restored.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from superbatch.errors import InputError

from ..interrupts import EnteredOrLeft
from ..modes import Modes
from .counter import finalise, mix, positions, signed
from .sample_layout import Call, Reading, samples_along
from .sample_rules import RULES, Arguments, refusal


def sample_stream(
    key: int,
    first_sample: int | None = None,
    samples: int | None = None,
    *,
    indices: Sequence[int] | None = None,
    calls: dict[int, Call] | None = None,
    unruled: set[str] | None = None,
) -> EnteredOrLeft[None]:
    """Return a context that draws random numbers per sample, for a micro-batch's forward and backward.

    Entry saves the state of torch's global CPU generator and seeds it from ``key``; exit, also by an
    exception, restores the saved state. So only the caller decides how that generator advances per window.
    The CUDA generators are not used.

    Inside, compiled models run eagerly and attention with dropout uses the math backend, because random
    numbers within a fused kernel cannot be replaced. The context applies to the thread that entered it and to
    its backward passes.

    `superbatch.torch.rng.sample_layout` finds the dimension of a random tensor that runs over the samples. It
    may choose the wrong one with ``samples=1``, where a draw for a whole batch looks like one per sample.
    Noise whose first dimension happens to be a multiple of ``samples`` may mislead it too. ``calls`` detects
    this if the window, or the check of the first window, has micro-batches of two sizes. `samples_along`
    declares the dimension.

    Args:
        key: key of the window, equal for all its micro-batches. Draw it once per window.
        first_sample: position of the micro-batch's first sample in the effective batch (of all ranks).
        samples: number of samples of the micro-batch, at least 1.
        indices: position of each sample in the effective batch (of all ranks), in the micro-batch's order.
            Pass it in place of `first_sample` and `samples` if the samples are not consecutive (a window
            sorted by length).
        calls: a dict, empty at first, that all micro-batches of a window share, to compare their calls.
        unruled: a set, for a check that must not raise. An operation that cannot be drawn per sample is then
            drawn from the window's key, and its name is added to the set. A permutation becomes the identity,
            and an operation's own generator is not used.

    Raises:
        InputError: the positions are missing, passed twice, or out of range. Inside: a random operation
            cannot be drawn per sample, has its own generator, or has an ambiguous shape.

    Examples:
        >>> import torch
        >>> x, parts = torch.ones(6, 100), []
        >>> with sample_stream(7, 0, 6):
        ...     whole = torch.nn.functional.dropout(x)
        >>> for first, size in [(0, 4), (4, 2)]:
        ...     with sample_stream(7, first, size):
        ...         parts.append(torch.nn.functional.dropout(x[first : first + size]))
        >>> torch.equal(torch.cat(parts), whole)
        True
        >>> with sample_stream(7, indices=[5, 0]):
        ...     some = torch.nn.functional.dropout(x[[5, 0]])
        >>> torch.equal(some, whole[[5, 0]])
        True
    """
    sample_positions = _sample_positions(first_sample, samples, indices)
    return EnteredOrLeft(_entered(key, sample_positions, {} if calls is None else calls, unruled))


@contextmanager
def _entered(
    key: int, sample_positions: Sequence[int], calls: dict[int, Call], unruled: set[str] | None
) -> Iterator[None]:
    with ExitStack() as stack:
        # Registered first, so that it runs last, after all modes were left.
        stack.callback(torch.default_generator.set_state, torch.default_generator.get_state())
        torch.default_generator.manual_seed(signed(key))
        if "torch._dynamo" in sys.modules:  # otherwise nothing is compiled, and the import takes seconds
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        # A function mode, because a fused kernel is a single operation in the dispatcher.
        stack.enter_context(_Kernels(refuse=unruled is None))
        reading = stack.enter_context(Reading().in_use())
        stream = _Stream(key, sample_positions, calls, reading)
        stack.enter_context(stream if unruled is None else _Lenient(stream, unruled))
        stack.callback(Modes().restore)  # an interrupt inside may have left too many or too few modes
        yield


def _sample_positions(first: int | None, samples: int | None, indices: Sequence[int] | None) -> Sequence[int]:
    """Return the positions of a micro-batch's samples in the effective batch."""
    found: Sequence[int] = ()
    if indices is not None:
        if first is None and samples is None and min(indices, default=0) >= 0:
            found = indices
    elif first is not None and samples is not None and first >= 0:
        found = range(first, first + samples)
    # An empty range or list raises too, because a micro-batch has at least one sample.
    if not found:
        given = "" if indices is None else f", indices={indices!r}"
        raise InputError(
            f"first_sample={first}, samples={samples}{given} is not a position of a micro-batch in the "
            "batch. Pass first_sample= (at least 0) and samples= (at least 1), or only indices=, a list of "
            "positions."
        )
    return found


class _Stream(TorchDispatchMode):
    """Replaces every random operation by its rule in `RULES`."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Newer releases of torch call this. If it returned True, torch would import the compiler and wrap the
        # mode, which costs as much as the mode itself; nothing is compiled inside.
        return False

    def __init__(
        self, key: int, sample_positions: Sequence[int], calls: dict[int, Call], reading: Reading
    ) -> None:
        super().__init__()
        self.window = mix(key)
        self.sample_positions, self.samples = sample_positions, len(sample_positions)
        self.calls, self.reading = calls, reading
        self._starts: dict[torch.device, Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not _is_random(func):
            return func(*args, **kwargs)
        named = _bind(func, args, kwargs)
        return func(*args, **kwargs) if _draws_nothing(named) else self.draw(func, named, args, kwargs)

    def draw(self, func: Any, named: Arguments, args: Any, kwargs: Any) -> Any:
        """Return the result of a random operation, drawn sample by sample."""
        op = str(func)
        if named.get("generator") is not None:
            raise _own_generator(op)
        # Rules write to plain tensors, so a wrapper subclass is decomposed first.
        if op in RULES and not any(map(is_traceable_wrapper_subclass, tree_leaves((args, kwargs)))):
            return RULES[op](self, op, named)
        with self:  # e.g. dropout in inference mode, whose parts have rules
            parts = func.decompose(*args, **kwargs)
        if parts is NotImplemented:
            raise refusal(op)
        return parts

    def bits(self, op: str, shape: tuple[int, ...], device: torch.device, *, rows: bool = False) -> Tensor:
        """Return 64 random bits per element; with ``rows`` the samples can only be the first dimension."""
        shape = tuple(shape)
        # The call key; see the module's docstring.
        call = int(
            torch.empty((), dtype=torch.int64, device="cpu").random_(generator=torch.default_generator)
        )
        before = self.calls.get(call)
        if before is not None and before.op != op:
            raise _other_call(op, before)
        read = shape[:1] if rows else shape
        axis = self.reading.axis(call, op, read, self.samples, before)
        # A micro-batch of one sample does not show the dimension, so a larger one replaces its entry.
        if before is None or before.samples == 1:
            self.calls[call] = Call(op, self.samples, read, axis)
        if 0 in shape:
            return torch.empty(shape, dtype=torch.int64, device=device)
        # One draw for the batch, from the window's key and the call, so equal in every micro-batch.
        if axis is None:
            start = torch.full((1,), signed(self.window + call), dtype=torch.int64, device=device)
            return finalise(positions(start, (1, *shape), 0)).view(shape)
        # The dimension of the samples is split into (samples, rest).
        split = (*shape[:axis], self.samples, shape[axis] // self.samples, *shape[axis + 1 :])
        return finalise(positions(self._start(device) + call, split, axis)).view(shape)

    def _start(self, device: torch.device) -> Tensor:
        """Return the first position of each sample, shape (samples,)."""
        if device not in self._starts:
            index = self._index(device)
            # Hashed twice, so that neighbouring windows and samples have distant positions.
            self._starts[device] = finalise(
                finalise(index.mul_(signed(0x9E3779B97F4A7C15))).add_(self.window)
            )
        return self._starts[device]

    def _index(self, device: torch.device) -> Tensor:
        """Return the number of each sample, counted from 1, in a new tensor of shape (samples,)."""
        if isinstance(self.sample_positions, range):
            first, end, by = (
                self.sample_positions.start + 1,
                self.sample_positions.stop + 1,
                self.sample_positions.step,
            )
            return torch.arange(first, end, by, device=device)
        # From 1, because `finalise` maps 0 to 0.
        return torch.tensor(self.sample_positions, dtype=torch.int64, device=device).add_(1)


class _Lenient(_Stream):
    """Stream that does not raise: operations without a rule draw the same numbers in every micro-batch."""

    def __init__(self, stream: _Stream, unruled: set[str]) -> None:
        super().__init__(0, stream.sample_positions, stream.calls, stream.reading)
        self.window, self.unruled = stream.window, unruled

    def draw(self, func: Any, named: Arguments, args: Any, kwargs: Any) -> Any:
        # The identity does not depend on the split.
        if "randperm" in str(func) and named.get("out") is None:
            dtype = named["dtype"] if isinstance(named["dtype"], torch.dtype) else torch.int64
            return torch.arange(named["n"], dtype=dtype, device=named["device"])
        try:
            return super().draw(func, {**named, "generator": None}, args, kwargs)
        except InputError:
            self.unruled.add(str(func))
            kwargs = {name: value for name, value in kwargs.items() if name != "generator"}
            return func(*args, **kwargs)


class _Kernels(TorchFunctionMode):
    """Chooses kernels whose random operations reach the dispatcher, and declares known dimensions."""

    def __init__(self, *, refuse: bool) -> None:
        super().__init__()
        self.refuse = refuse

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.scaled_dot_product_attention:
            if kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0) > 0:
                with sdpa_kernel(SDPBackend.MATH):
                    return func(*args, **kwargs)
        elif func in _RECURRENT:
            return _recurrent(func, args, kwargs, refuse=self.refuse)
        return func(*args, **kwargs)


_RECURRENT = (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)


def _recurrent(func: Any, args: Any, kwargs: Any, *, refuse: bool) -> Any:
    """Run a recurrent network, whose dropout between layers has the shape (time, batch, channels)."""
    # The arguments are (data, batch_sizes, hx, params, ...) if packed, else (input, hx, params, ...).
    packed = isinstance(args[3], (list, tuple))
    _, _, layers, dropout, train = args[3:8] if packed else args[2:7]
    if not (dropout and train and layers > 1):
        return func(*args, **kwargs)
    # A lenient stream must not raise, so it runs without dropout.
    if packed and not refuse:
        return func(*args[:6], 0.0, *args[7:], **kwargs)
    if packed:
        raise refusal("dropout between the layers of a recurrent network on a PackedSequence")
    # Without cuDNN, which draws within its kernel.
    with torch.backends.cudnn.flags(enabled=False), samples_along(1):
        return func(*args, **kwargs)


@functools.cache
def _is_random(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags


def _bind(func: Any, args: Any, kwargs: Any) -> Arguments:
    """Return all arguments by name, with the schema's defaults."""
    names = func._schema.arguments
    named = {a.name: a.default_value for a in names}
    return {**named, **{a.name: value for a, value in zip(names, args, strict=False)}, **kwargs}


def _draws_nothing(named: Arguments) -> bool:
    """Return whether an operation draws nothing: dropout of probability 0, or evaluation mode."""
    off = [named.get(name) is False for name in ("train", "training")]
    return any(off) or named.get("dropout_p") == 0 or named.get("dropout") == 0


def _own_generator(op: str) -> InputError:
    return InputError(
        f"{op} was called with generator= under PerSampleRandom, but a generator advances with every "
        "micro-batch, so its numbers depend on the split. Remove generator=, or remove PerSampleRandom."
    )


def _other_call(op: str, before: Call) -> InputError:
    return InputError(
        f"{op} was called where another micro-batch of the window called {before.op}, but all micro-batches "
        "must make the same random calls in the same order. Make the same calls for every micro-batch "
        "and select by sample with torch.where, or remove PerSampleRandom."
    )
