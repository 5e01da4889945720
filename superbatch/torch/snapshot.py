"""What a window can change besides gradients - random state and buffers - and how it is put back.

Two keepers with the same methods: ``take()`` before a window, then ``release()`` or ``restore()`` after it.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

OTHERS = ("python", "numpy")


class RandomKeeper:
    """Copies the state of the generators that user code in a window may draw from.

    torch's, on the CPU and on the models' devices, always. Python's and NumPy's (if loaded) as long as
    windows
    draw from them: copying these takes longer than everything else at the start of a window, so one that the
    first window leaves alone is not copied again.

    Examples:
        >>> keeper = RandomKeeper()
        >>> keeper.take()
        >>> first = torch.rand(())
        >>> keeper.restore()
        >>> bool(first == torch.rand(()))
        True
    """

    def __init__(self, devices: Iterable[torch.device] = ()) -> None:
        self._devices = list(devices)
        self._others = set(OTHERS)
        self.taken: dict[str, Any] = {}

    def now(self) -> dict[str, Any]:
        """Return the state of the generators at this moment."""
        return random_state(self._devices, others=self._others)

    def take(self) -> None:
        """Copy the states; forgets those taken before."""
        self.taken = self.now()

    def release(self) -> None:
        """Note which generators the window left alone."""
        if not self._others:
            return
        now = self.now()
        self._others = {
            name for name in self._others if name in now and not _same(now[name], self.taken.get(name))
        }

    def restore(self) -> None:
        """Put the states back as they were at :meth:`take`."""
        restore_random_state(self.taken)


def random_state(devices: Iterable[torch.device] = (), *, others: Collection[str] = OTHERS) -> dict[str, Any]:
    """Return the state of torch's generators (CPU and devices), Python's and NumPy's (if loaded).

    Examples:
        >>> sorted(random_state(others=["python"]))
        ['python', 'torch']
    """
    state: dict[str, Any] = {"torch": torch.get_rng_state()}
    for device in devices:
        if device.type != "cpu":
            state[str(device)] = torch.get_device_module(device).get_rng_state(device)
    if "python" in others:
        state["python"] = random.getstate()
    if "numpy" in others and "numpy" in sys.modules:
        state["numpy"] = sys.modules["numpy"].random.get_state()
    return state


def restore_random_state(state: dict[str, Any]) -> None:
    """Set generators to a state from :func:`random_state` (lists for tuples, as after a file, are fine).

    Examples:
        >>> restore_random_state(random_state())
    """
    for name, value in state.items():
        if name == "torch":
            torch.set_rng_state(value)
        elif name == "python":
            version, internal, gauss = value
            random.setstate((version, tuple(internal), gauss))
        elif name == "numpy":
            if "numpy" in sys.modules:
                sys.modules["numpy"].random.set_state(value)
        else:
            device = torch.device(name)
            torch.get_device_module(device).set_rng_state(value, device)


def _same(one: tuple[Any, ...], other: tuple[Any, ...] | None) -> bool:
    """Whether two states of Python's or NumPy's generator are equal (NumPy's holds an array)."""
    return other is not None and repr(one[2:]) == repr(other[2:]) and list(one[1]) == list(other[1])


class BufferKeeper:
    """Copies the buffers of models at the start of a window, so that a failed window can put them back.

    A large buffer that a whole window left alone (a causal mask, a rotary table) is not copied again until
    its
    version counter moves: copying it for every window would cost memory that the hand-written loop does not
    need.

    Examples:
        >>> norm = nn.BatchNorm1d(2)
        >>> keeper = BufferKeeper([norm])
        >>> keeper.take()
        >>> _ = norm(torch.randn(4, 2))
        >>> keeper.restore()
        >>> norm.running_mean
        tensor([0., 0.])
    """

    # Up to this size a copy costs nothing worth a thought. Running statistics must stay below it: torch's
    # batch_norm changes them without moving their version counter.
    ALWAYS_COPIED_BYTES = 1 << 20

    def __init__(self, models: Iterable[nn.Module]) -> None:
        self._owners = [module for model in models for module in model.modules() if module._buffers]
        self._constant: dict[int, int] = {}
        self._taken: list[_Taken] = []

    def take(self) -> None:
        """Copy every buffer that may change; forgets the copies taken before."""
        self._taken = [
            _Taken(module, name, buffer, None if self._is_constant(buffer) else buffer.clone())
            for module in self._owners
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]

    def release(self) -> None:
        """Drop the copies at the end of a window and note which large buffers it left alone."""
        for module, name, buffer, copy in self._taken:
            if copy is None or buffer.nbytes <= self.ALWAYS_COPIED_BYTES:
                continue
            if module._buffers.get(name) is buffer and torch.equal(buffer, copy):
                self._constant[id(buffer)] = buffer._version
        self._taken = []

    def restore(self) -> None:
        """Put back every buffer, its identity included, as it was at :meth:`take`."""
        with torch.no_grad():
            for module, name, buffer, copy in self._taken:
                module._buffers[name] = buffer
                if copy is not None:
                    buffer.copy_(copy)

    def state(self) -> list[Tensor | None]:
        """Return the copies taken, in the order of the modules (None for a buffer that was not copied)."""
        return [taken.copy for taken in self._taken]

    def load_state(self, copies: list[Tensor | None]) -> None:
        """Use copies from :meth:`state` in place of those taken."""
        self._taken = [taken._replace(copy=copy) for taken, copy in zip(self._taken, copies, strict=True)]

    def _is_constant(self, buffer: Tensor) -> bool:
        return self._constant.get(id(buffer)) == buffer._version


class _Taken(NamedTuple):
    module: nn.Module
    name: str
    buffer: Tensor
    copy: Tensor | None
