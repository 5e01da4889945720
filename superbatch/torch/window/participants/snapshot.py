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

# Seconds of a micro-batch for which states are not copied: that costs up to 1 % of it (it also disturbs
# the allocator), and a window of such micro-batches is soon begun again.
SHORT = 0.05


class RandomKeeper:
    """Copies the state of the generators that user code may draw from: torch's, Python's, NumPy's.

    Examples:
        >>> keeper = RandomKeeper()
        >>> keeper.begin()
        >>> first = torch.rand(())
        >>> keeper.restore()
        >>> bool(first == torch.rand(()))
        True

    Attributes:
        devices: whose generators are kept, beside the CPU's.
    """

    def __init__(self, devices: Iterable[torch.device] = ()) -> None:
        self.devices = tuple(devices)
        self._numpy: tuple[bytes, Any] = (b"", None)
        self._python: tuple[Any, Any] = (None, None)
        self.taken: dict[str, Any] = {}
        self._mark: dict[str, Any] | None = None
        self._marked = 0.0

    def begin(self) -> None:
        """Copy the states; forgets those taken before, also where there is no memory for the copies."""
        # Empty first: if the copy below fails, an old state must not be restored.
        self.taken = {}
        self.taken = {**torch_random_state(self.devices), "python": self._python_state()}
        # A program without NumPy does not pay its import.
        if "numpy" in sys.modules:
            self.taken["numpy"] = self._numpy_state()

    def now(self) -> dict[str, Any]:
        """Return the states at this moment."""
        return random_state(self.devices)

    def savepoint(self) -> None:
        """Note torch's states at the start of a micro-batch, where that takes nothing beside the last one.

        Python's state would take longer than many a micro-batch.
        """
        now = time.perf_counter()
        # The time between two savepoints is that of the last micro-batch.
        last, self._marked = self._marked, now
        self._mark = None  # also if there is no memory for the copy
        if now - last > SHORT:
            self._mark = torch_random_state(self.devices)

    def rollback(self) -> bool:
        """Restore the states of the savepoint; False if one that was not noted has moved since `begin`."""
        now = random_state(self.devices, numpy=False)
        if now["python"] != self.taken["python"]:
            return False
        if "numpy" in self.taken and not _equal(self.taken["numpy"], sys.modules["numpy"].random.get_state()):
            return False
        # Without a copy of the savepoint, rollback is right only if no generator has moved since `begin`.
        if self._mark is None:
            del now["python"]
            return all(torch.equal(state, self.taken[name]) for name, state in now.items())
        restore_random_state(self._mark)
        return True

    def restore(self) -> None:
        """Restore the states that `begin` copied, once: a later window may fail before it begins."""
        restore_random_state(self.taken)
        self.taken = {}

    def restart(self) -> None:
        """Restore the states; the copies stay valid."""
        restore_random_state(self.taken)

    def commit(self) -> None:
        """Forget the copies."""
        self.taken = {}

    def state_dict(self) -> dict[str, Any]:
        """Return the states now, and those before the window, as tensors and plain containers."""
        return {"random": as_plain(self.now()), "random_before": as_plain(self.taken)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from what `state_dict` returned."""
        self.taken = state["random_before"]
        restore_random_state(state["random"])

    def _python_state(self) -> Any:
        """Python's state, copied only if it has moved: it is a tuple of 625 numbers."""
        # None where the interpreter's layout is unknown: then always copied.
        memory = fastpaths.python_memory()
        if memory is None or memory != self._python[0]:
            self._python = (memory, random.getstate())
        return self._python[1]

    def _numpy_state(self) -> Any:
        """NumPy's state, copied only if it has moved.

        To copy it takes longer than all else at the start of a window.
        A second normal number that the generator still holds back does not show: then copy it always.
        """
        numpy_random = sys.modules["numpy"].random
        memory = fastpaths.numpy_memory(numpy_random)
        # Comparing the bytes is cheaper than get_state(), which copies them into a new array.
        if memory is None:
            return numpy_random.get_state()
        seen, state = self._numpy
        if memory != seen or state is None or state[3]:
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
    """Set generators to a state from `random_state` (lists for tuples, as after a file, are fine).

    Examples:
        >>> restore_random_state(random_state())
    """
    for name, value in state.items():
        if name == "torch":
            torch.set_rng_state(value)
        elif name == "python":
            # JSON-like files turn tuples into lists, which setstate refuses.
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
    """Remember the state of a generator that a user's object holds.

    Args:
        value: anything.

    Returns:
        A function that restores its state; None if it is no generator of torch, Python or NumPy.

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
    if isinstance(value, random.Random):  # the system's has no state
        # SystemRandom.getstate raises: the operating system's numbers cannot be repeated.
        return None if isinstance(value, random.SystemRandom) else partial(value.setstate, value.getstate())
    numpy_random = getattr(sys.modules.get("numpy"), "random", None)
    if numpy_random is not None and isinstance(value, numpy_random.RandomState):
        return partial(value.set_state, value.get_state(legacy=False))
    if numpy_random is not None and isinstance(value, numpy_random.Generator):
        return partial(setattr, value.bit_generator, "state", value.bit_generator.state)
    return None


def generator_moved(value: Any, restore: Any) -> bool:
    """Return whether a generator has drawn since `generator_restorer` made `restore`.

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
    # Arrays compare elementwise and dictionaries of them raise; their pickles compare as bytes.
    return pickle.dumps(before) != pickle.dumps(after)  # of NumPy's, arrays are inside


def _equal(a: Any, b: Any) -> bool:
    """Return whether two states of NumPy's generator are equal (lists for arrays are fine)."""
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
