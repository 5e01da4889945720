"""Out-of-memory errors at the n-th allocation of a window, for every n: once, or from then on."""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from superbatch.errors import OutOfMemoryError
from superbatch.torch import Accumulator, Update, WholeBatch
from superbatch.torch.memory.out_of_memory import out_of_memory

TEXT = "[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you tried to allocate"


class FailingAllocations(TorchDispatchMode):
    """Raises the error of torch's allocator at the n-th operation that creates a tensor.

    Args:
        at: n; with None, only count the operations.
        on: fail at all later operations too.
    """

    def __init__(self, at: int | None, *, on: bool = False) -> None:
        super().__init__()
        self.count, self.failed = 0, 0
        self.first = ""
        self._at, self._on = at, on

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not _allocates(func):
            return func(*args, **(kwargs or {}))
        here, self.count = self.count, self.count + 1
        if self._at is not None and (here == self._at or (self._on and here > self._at)):
            self.failed += 1
            self.first = self.first or str(func)
            raise RuntimeError(TEXT)
        return func(*args, **(kwargs or {}))


def _allocates(func: Any) -> bool:
    """Return True if an operation returns a new tensor: neither a view nor an argument."""
    returns = func._schema.returns
    return any(
        isinstance(r.type, torch._C.TensorType | torch._C.ListType) and not r.alias_info for r in returns
    )


Loop = Callable[[Accumulator | WholeBatch, Any], Update]


@dataclass(frozen=True)
class Cell:
    """One model in one mode.

    Attributes:
        model: builds the model.
        batches: three batches; memory runs out in the second.
        accumulator: builds the accumulator from the model; returns optimizers and master weights too.
        loop: runs an update.
        tolerance: error of an update in smaller micro-batches, relative to the change of a parameter.
    """

    model: Callable[[], nn.Module]
    batches: Sequence[Any]
    accumulator: Callable[
        [nn.Module], tuple[Accumulator | WholeBatch, Sequence[torch.optim.Optimizer], Sequence[Tensor]]
    ]
    loop: Loop
    tolerance: float = 1e-12


@dataclass
class Found:
    """Results of a sweep: the number of allocations, and the outcomes of failing each.

    Attributes:
        same: updates that gave the same result.
        as_before: errors that left all state unchanged.
        torn: errors that reported a partial step of the optimizer.
        unreached: allocations that did not occur in that run.
        wrong: descriptions of wrong updates, and of wrong states after an error.
    """

    allocations: int = 0
    same: int = 0
    as_before: int = 0
    torn: int = 0
    unreached: int = 0
    wrong: list[str] = field(default_factory=list[str])


def sweep(
    cell: Cell, *, on: bool, stride: int = 1, most: int | None = None, until: str | None = None
) -> Found:
    """Fail the n-th allocation of the second window, for each n or until a result contains `until`."""
    with _quiet():
        reference = _Run(cell)
        count = reference.second(None, on=False)[1].count
        assert reference.error is None and reference.update is not None and reference.update.made, (
            "premise: it trains"
        )
        reference.finish()
        assert all(not torch.equal(a, b) for a, b in zip(reference.start, reference.end, strict=True)), (
            "premise"
        )
        found = Found(count)
        for at in range(0, count, stride)[:most]:
            _fail_one(cell, reference, at, on, found)
            if until is not None and any(until in each for each in found.wrong):
                break
    return found


def _fail_one(cell: Cell, reference: _Run, at: int, on: bool, found: Found) -> None:
    run = _Run(cell)
    before, failing = run.second(at, on=on)
    where = f"allocation {at} ({failing.first}){' and from then on' if on else ''}"
    if not failing.failed:  # sizes chosen by measured time differ from run to run
        found.unreached += 1
        return
    if run.error is None:
        assert run.update is not None
        if not run.update.made:
            found.wrong.append(f"{where}: no error, no update: {run.update.skipped}")
            return
        run.finish()
        error = _distance(reference, run)
        if error > cell.tolerance:
            found.wrong.append(f"{where}: an update {error:.1e} off, called right")
        found.same += 1
        return
    text = str(run.error)
    if not out_of_memory(run.error) and not isinstance(run.error, OutOfMemoryError):
        found.wrong.append(f"{where}: {type(run.error).__name__}: {text[:300]}")
    elif "Load a checkpoint" in text:
        found.torn += 1
    elif (moved := run.changed_since(before)) is not None:
        found.wrong.append(f"{where}: {moved} has moved, and the error does not say so: {text[:300]}")
    else:
        found.as_before += 1
        run.retry()
        error = _distance(reference, run)
        if error > cell.tolerance:
            found.wrong.append(f"{where}: the window after the error is {error:.1e} off")


class _Run:
    def __init__(self, cell: Cell) -> None:
        torch.manual_seed(5)
        self._cell = cell
        self.model = cell.model()
        self._accumulate, self._optimizers, self._others = cell.accumulator(self.model)
        self.start = self._values()
        self.update: Update | None = None
        self.error: BaseException | None = None
        self.end: list[Tensor] = []
        self._make(0)

    def _make(self, number: int) -> Update:
        return self._cell.loop(self._accumulate, self._cell.batches[number])

    def second(self, at: int | None, *, on: bool) -> tuple[dict[str, Any], FailingAllocations]:
        before = self._state()
        with FailingAllocations(at, on=on) as failing:
            try:
                self.update = self._make(1)
            except Exception as error:  # noqa: BLE001  (evaluated later)
                self.error = error
        return before, failing

    def finish(self) -> None:
        assert self._make(2).made
        self.end = self._values()

    def retry(self) -> None:
        """Repeat the failed window, then finish."""
        assert self._make(1).made
        self.finish()

    def changed_since(self, before: dict[str, Any]) -> str | None:
        now = self._state()
        return next((name for name in before | now if not _equal(before.get(name), now.get(name))), None)

    def _values(self) -> list[Tensor]:
        return [value.detach().clone() for value in [*self.model.parameters(), *self._others]]

    def _state(self) -> dict[str, Any]:
        state: dict[str, Any] = {name: value.clone() for name, value in self.model.state_dict().items()}
        state |= {f"other {place}": value.detach().clone() for place, value in enumerate(self._others)}
        state |= {f"gradient of {name}": p.grad for name, p in self.model.named_parameters()}
        for place, optimizer in enumerate(self._optimizers):
            state[f"optimizer {place}"] = copy.deepcopy(optimizer.state_dict())
        state["random numbers"] = torch.get_rng_state()
        state["mode"] = [module.training for module in self.model.modules()]
        state["hooks"] = [
            bool(p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None))
            for p in self.model.parameters()
        ]
        return state


def _distance(reference: _Run, run: _Run) -> float:
    distances = [
        float((got - expected).double().norm() / (expected - start).double().norm())
        for start, expected, got in zip(reference.start, reference.end, run.end, strict=True)
    ]
    return max(distances)


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        a, b = (each.to_dense() if each.is_sparse else each for each in (a, b))
        return a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(_equal, a, b))
    return type(a) is type(b) and bool(a == b)


@contextmanager
def _quiet() -> Iterator[None]:
    gc.collect()
    gc.freeze()  # each out-of-memory error collects garbage: hundreds of times here
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "memory ran out")
            yield
    finally:
        gc.unfreeze()
