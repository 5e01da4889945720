"""Replay of generators without a stream per sample: Python's, NumPy's, and those that user code holds.

The parts of a micro-batch must draw the numbers that the micro-batch drew. A generator from which code draws
once per call is reset to its start for each part. One that is used once per sample continues from part to
part.
"""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

from torch import Tensor, nn

from superbatch.torch.module_tables import children_of

_MOST_OBJECTS = 4000  # searched for generators: milliseconds
_MOST_ENTRIES = 64  # of one container


class Generators:
    """States of Python's and NumPy's global generators, and of those that some objects hold.

    Args:
        holders: a model and a loss function, which are searched for generators.

    Examples:
        >>> own = random.Random(0)
        >>> generators = Generators(lambda x: own.random())
        >>> before = generators.states()
        >>> first = own.random()
        >>> generators.set(before)
        >>> own.random() == first
        True
    """

    def __init__(self, *holders: Any) -> None:
        self._access = [_access(random.getstate, random.setstate, random.seed)]
        numpy_random = getattr(sys.modules.get("numpy"), "random", None)
        if numpy_random is not None:
            self._access.append(_access(numpy_random.get_state, numpy_random.set_state, numpy_random.seed))
        for found in reachable(holders):
            access = _access_of(found, numpy_random)
            if access is not None:
                self._access.append(access)

    def states(self) -> list[bytes]:
        """Return the current states."""
        return [access.get() for access in self._access]

    def set(self, states: list[bytes]) -> None:
        """Set the states to those that `states` returned."""
        for access, state in zip(self._access, states, strict=True):
            access.put(state)

    def seed(self, seed: int) -> None:
        """Seed all generators."""
        for access in self._access:
            access.seed(seed)

    def rewind(self, start: list[bytes], end: list[bytes]) -> None:
        """Reset each generator whose state equals that in `end` to `start`: its code draws once per call."""
        for access, first, last in zip(self._access, start, end, strict=True):
            if access.get() == last:
                access.put(first)


class _Access(NamedTuple):
    """Functions that read, set and seed one generator."""

    get: Callable[[], bytes]
    put: Callable[[bytes], object]
    seed: Callable[[int], object]


def _access(get: Callable[[], Any], put: Callable[[Any], object], seed: Callable[[int], object]) -> _Access:
    # As bytes: == on NumPy's states would compare arrays element by element.
    return _Access(lambda: pickle.dumps(get()), lambda state: put(pickle.loads(state)), seed)


def _access_of(value: Any, numpy_random: Any) -> _Access | None:
    if isinstance(value, random.Random):
        # SystemRandom has no state.
        return (
            None
            if isinstance(value, random.SystemRandom)
            else _access(value.getstate, value.setstate, value.seed)
        )
    if numpy_random is None:
        return None
    if isinstance(value, numpy_random.RandomState):
        # legacy=False: the tuple form exists for MT19937 only.
        return _access(partial(value.get_state, legacy=False), value.set_state, value.seed)
    if isinstance(value, numpy_random.Generator):
        bits = value.bit_generator
        put = partial(setattr, bits, "state")
        return _access(lambda: bits.state, put, lambda seed: put(type(bits)(seed).state))
    return None


def reachable(holders: Any) -> Iterator[Any]:
    """Yield up to 4000 objects that functions, modules, containers and plain objects hold, nearest first.

    Examples:
        >>> rng = random.Random(0)
        >>> any(found is rng for found in reachable((partial(print, {"rng": [rng]}),)))
        True
    """
    # Breadth first: the limit leaves out the objects farthest from the loss.
    seen: set[int] = set()
    waiting, alive = list(holders), []
    while waiting and len(seen) < _MOST_OBJECTS:
        following: list[Any] = []
        for value in waiting:
            if id(value) in seen or _is_plain(value):
                continue
            seen.add(id(value))
            alive.append(value)  # so that its id is not used again
            yield value
            following += list(held_by(value))[: 8 * _MOST_ENTRIES]
        waiting = following


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str | bytes | Tensor | ModuleType | type)


def held_by(value: Any) -> Iterator[Any]:
    """Yield the objects that an object refers to: a closure, arguments, content, attributes or submodules.

    Examples:
        >>> list(held_by(partial(print, 1, end="")))
        [<built-in function print>, 1, '']
    """
    try:
        if isinstance(value, partial):
            yield from (value.func, *value.args, *value.keywords.values())
        elif isinstance(value, MethodType):
            yield from (value.__self__, value.__func__)
        elif isinstance(value, BuiltinFunctionType):  # a generator's own method: draw = rng.random
            yield value.__self__
        elif isinstance(value, FunctionType):
            yield from _of_function(value)
        elif isinstance(value, dict):
            yield from list(value.values())[:_MOST_ENTRIES]
        elif isinstance(value, list | tuple | set | frozenset):
            yield from list(value)[:_MOST_ENTRIES]
        elif isinstance(value, nn.Module):
            yield from (*value.__dict__.values(), *children_of(value).values(), type(value).forward)
        else:
            yield from getattr(value, "__dict__", {}).values()
            if callable(value) and isinstance(call := type(value).__call__, FunctionType):
                yield call
    except Exception:  # noqa: BLE001 - an object may raise anything when its attributes are read
        return


def _of_function(function: FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # noqa: PERF203  (a name without a value yet)
            continue
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    names = function.__globals__
    yield from (names[name] for name in function.__code__.co_names if name in names)
