"""Participant for the states of the random generators: torch's, Python's and NumPy's."""

from __future__ import annotations

import pickle
import random
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from superbatch.torch import fastpaths
from superbatch.torch.devices import generator_states

# Seconds. After a micro-batch that took less time, states are not copied: a copy would take up to 1 % of the
# micro-batch's time, and a window of such micro-batches can begin again at little cost.
SHORT = 0.05


class RandomKeeper:
    """Copies the states of the generators that user code may draw from: torch's, Python's, NumPy's.

    Examples:
        >>> keeper = RandomKeeper()
        >>> keeper.begin()
        >>> first = torch.rand(())
        >>> keeper.restore()
        >>> bool(first == torch.rand(()))
        True

    Attributes:
        devices: devices beside the CPU whose generators are copied.
        before: the states that `begin` has copied.
    """

    def __init__(self, devices: Iterable[torch.device] = ()) -> None:
        self.devices = tuple(devices)
        # The generator's memory at the last copy of its state, and that copy.
        self._numpy: tuple[bytes, Any] = (b"", None)
        self._python: tuple[Any, Any] = (None, None)
        self.before: dict[str, Any] = {}
        self._saved: dict[str, Any] | None = None
        self._saved_at = 0.0

    def begin(self) -> None:
        """Copy the states; earlier copies are freed first."""
        # Empty first, so that no old state is restored if the copy below fails.
        self.before = {}
        self.before = {**torch_random_state(self.devices), "python": self._python_state()}
        # A program that has not imported NumPy has no state of it.
        if "numpy" in sys.modules:
            self.before["numpy"] = self._numpy_state()

    def current_states(self) -> dict[str, Any]:
        """Return the present states."""
        return random_state(self.devices)

    def savepoint(self) -> None:
        """Copy torch's states before a micro-batch, if the last micro-batch took longer than `SHORT`.

        Python's state is not copied, because that may take longer than a micro-batch.
        """
        now = time.perf_counter()
        # The time between two savepoints is that of the last micro-batch.
        last, self._saved_at = self._saved_at, now
        self._saved = None  # first, because the copy below may run out of memory
        if now - last > SHORT:
            self._saved = torch_random_state(self.devices)

    def rollback(self) -> bool:
        """Restore the states of the savepoint; return False if a generator without a copy was used."""
        now = random_state(self.devices, numpy=False)
        if now["python"] != self.before["python"]:
            return False
        if "numpy" in self.before and not _equal(
            self.before["numpy"], sys.modules["numpy"].random.get_state()
        ):
            return False
        # Without a copy of the savepoint, no generator may have been used since `begin`.
        if self._saved is None:
            del now["python"]
            return all(torch.equal(state, self.before[name]) for name, state in now.items())
        restore_random_state(self._saved)
        return True

    def restore(self) -> None:
        """Restore the states that `begin` copied, and free the copies."""
        restore_random_state(self.before)
        self.before = {}

    def restart(self) -> None:
        """Restore the states, and keep the copies."""
        restore_random_state(self.before)

    def commit(self) -> None:
        """Free the copies."""
        self.before = {}

    def state_dict(self) -> dict[str, Any]:
        """Return the present states, and those before the window, as tensors and plain containers."""
        return {"random": as_plain(self.current_states()), "random_before": as_plain(self.before)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the states of `state_dict`."""
        self.before = state["random_before"]
        restore_random_state(state["random"])

    def _python_state(self) -> Any:
        """Return Python's state, a tuple of 625 numbers that is copied only if it has changed."""
        # None if the interpreter's memory layout is unknown; then the state is always copied.
        memory = fastpaths.python_memory()
        if memory is None or memory != self._python[0]:
            self._python = (memory, random.getstate())
        return self._python[1]

    def _numpy_state(self) -> Any:
        """Return NumPy's state, copied only if it has changed.

        A copy takes longer than everything else at the start of a window. The generator may store a second
        normal number outside of the memory that is compared. Then the state is always copied.
        """
        numpy_random = sys.modules["numpy"].random
        # Comparing these bytes is faster than get_state(), which copies them into a new array.
        memory = fastpaths.numpy_memory(numpy_random)
        if memory is None:
            return numpy_random.get_state()
        copied_memory, state = self._numpy
        if memory != copied_memory or state is None or state[3]:
            self._numpy = (memory, numpy_random.get_state())
        return self._numpy[1]


def random_state(devices: Collection[torch.device] = (), *, numpy: bool = True) -> dict[str, Any]:
    """Return the state of torch's generators (CPU and devices), Python's and NumPy's (if loaded).

    Examples:
        >>> sorted(random_state(numpy=False))
        ['python', 'torch']
    """
    state = {**torch_random_state(devices), "python": random.getstate()}
    if numpy and "numpy" in sys.modules:
        state["numpy"] = sys.modules["numpy"].random.get_state()
    return state


def torch_random_state(devices: Collection[torch.device] = ()) -> dict[str, Any]:
    """Return the state of torch's generators: the CPU's and those of devices.

    Examples:
        >>> list(torch_random_state())
        ['torch']
    """
    state: dict[str, Any] = {"torch": torch.get_rng_state()}
    return state | generator_states(devices) if devices else state


def restore_random_state(state: dict[str, Any]) -> None:
    """Set generators to a state that `random_state` returned; tuples may have become lists, as in a file.

    Examples:
        >>> restore_random_state(random_state())
    """
    for name, value in state.items():
        if name == "torch":
            torch.set_rng_state(value)
        elif name == "python":
            # A file may have turned tuples into lists, for which setstate raises.
            version, internal, gauss = value
            random.setstate((version, tuple(internal), gauss))
        elif name == "numpy":
            if "numpy" in sys.modules:
                kind, key, *rest = value
                sys.modules["numpy"].random.set_state(
                    (kind, sys.modules["numpy"].array(key, dtype="uint32"), *rest)
                )
        else:
            device = torch.device(name)
            torch.get_device_module(device).set_rng_state(value, device)


def generator_restorer(value: Any) -> Callable[[], object] | None:
    """Return a function that restores the present state of a random generator; None for other objects.

    Examples:
        >>> own = random.Random(0)
        >>> restore = generator_restorer(own)
        >>> first = own.random()
        >>> restore()
        >>> own.random() == first
        True
    """
    if isinstance(value, torch.Generator):
        return partial(value.set_state, value.get_state())
    if isinstance(value, random.Random):
        # SystemRandom has no state, because the operating system's numbers cannot be repeated.
        return None if isinstance(value, random.SystemRandom) else partial(value.setstate, value.getstate())
    numpy_random = getattr(sys.modules.get("numpy"), "random", None)
    if numpy_random is not None and isinstance(value, numpy_random.RandomState):
        return partial(value.set_state, value.get_state(legacy=False))
    if numpy_random is not None and isinstance(value, numpy_random.Generator):
        return partial(setattr, value.bit_generator, "state", value.bit_generator.state)
    return None


def generator_moved(value: Any, restore: Any) -> bool:
    """Return whether a generator was used since `generator_restorer` returned `restore`.

    Examples:
        >>> own = torch.Generator()
        >>> restore = generator_restorer(own)
        >>> before = generator_moved(own, restore)
        >>> _ = torch.rand(1, generator=own)
        >>> before, generator_moved(own, restore)
        (False, True)
    """
    now: Any = generator_restorer(value)
    before, after = restore.args[-1], now.args[-1]
    if isinstance(before, Tensor):
        return not torch.equal(before, after)
    # By their pickles, because NumPy's states contain arrays, which compare elementwise.
    return pickle.dumps(before) != pickle.dumps(after)


def _equal(a: Any, b: Any) -> bool:
    """Return whether two states of NumPy's generator are equal; arrays may have become lists in a file."""
    return a[0] == b[0] and list(a[1]) == list(b[1]) and tuple(a[2:]) == tuple(b[2:])


def as_plain(state: dict[str, Any]) -> dict[str, Any]:
    """Return a random state without arrays, so that ``torch.load(weights_only=True)`` reads it.

    Examples:
        >>> as_plain({"numpy": ("MT19937", memoryview(b"ab"), 624, 0, 0.0)})["numpy"][1]
        [97, 98]
    """
    if "numpy" not in state:
        return dict(state)
    kind, key, *rest = state["numpy"]
    return {**state, "numpy": [str(kind), list(map(int, key)), *rest]}
