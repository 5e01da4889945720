"""Share of an update with `virtual_batch` that is not arithmetic: recording, planning, dispatching."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

from superbatch.torch.virtual.ir.values import Action, Node


@dataclass(frozen=True)
class Shares:
    """Shares of the wall time of an update; they add up to 1.

    Attributes:
        operators: share of the operations on micro-batches.
        sums: share of the reductions of their results, such as sums of gradients.
        rest: share of recording, planning, and everything between operations.
    """

    operators: float
    sums: float
    rest: float


class _Clock:
    def __init__(self) -> None:
        self.seconds = 0.0

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any) -> Any:
            start = time.perf_counter()
            result = function(*args)
            self.seconds += time.perf_counter() - start
            return result

        return timed


class _Timed:
    """Reduction whose time is measured."""

    def __init__(self, reduction: Any, clock: _Clock) -> None:
        self.add, self.result = clock.around(reduction.add), clock.around(reduction.result)


def _of(reduce: Callable[[], Any], clock: _Clock) -> Any:
    return _Timed(reduce(), clock)


def shares(run: Callable[[], object]) -> Shares:
    """Run once with a clock around each operation; the clocks' own time counts as the rest."""
    operators, sums, init = _Clock(), _Clock(), Node.__init__

    def timed(node: Node, name: Any, operands: Any, told: Action, outputs: Any, **more: Any) -> None:
        reduce = None if told.reduce is None else partial(_of, told.reduce, sums)
        told = told._replace(run=operators.around(told.run), reduce=reduce)
        init(node, name, operands, told, outputs, **more)

    with mock.patch.object(Node, "__init__", timed):
        start = time.perf_counter()
        run()
        total = time.perf_counter() - start
    parts = operators.seconds / total, sums.seconds / total
    return Shares(*parts, 1 - sum(parts))
