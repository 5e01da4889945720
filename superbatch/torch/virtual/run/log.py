"""Log of the coupling points and operations of a block, for its report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import get_ident
from typing import Literal, NamedTuple

import torch
from torch import nn
from torch.nn.modules import module as all_modules

from superbatch.errors import CoupledSamplesError
from superbatch.results.coupling import CouplingPoint, CouplingReport, WholeValue
from superbatch.torch.module_tables import children_of

from ...warn import warn
from ..ir.values import Node, Value, in_backward
from .plan import Plan
from .store import Store

OnGather = Literal["ok", "warn", "error"]


def paths(
    module: nn.Module, path: str = "", names: dict[nn.Module, str] | None = None
) -> dict[nn.Module, str]:
    """Return the path of each module, as in `named_modules`."""
    # `named_modules` recurses through generators, which takes several times as long in each update.
    names = {} if names is None else names
    if module not in names:
        names[module] = path
        for name, child in children_of(module).items():
            if child is not None:
                paths(child, f"{path}.{name}" if path else name, names)
    return names


# Coupling points that copy rows of the batch; the report lists them as gathered, with the bytes of the rows.
_PICKS = {torch.ops.aten.select.int, torch.ops.aten.slice.Tensor}


class LoggedPoint(NamedTuple):
    """Coupling point of the forward, with its result if the result is a single number.

    Attributes:
        point: the point, as in the report.
        number: the result; None if it has dimensions or was freed.
        counts: the number has an integer dtype, as a count of labels has.
    """

    point: CouplingPoint
    number: float | None
    counts: bool


class Log:
    """Log of the operations and coupling points of a block.

    Args:
        models: the models; their modules are named by their paths.
        on_gather: reaction to an operation that gathers the batch.

    Attributes:
        sweeps, recorded, run, repeated: as in `CouplingReport`.
        is_split: the batch has several micro-batches; with one, full values are no larger.
    """

    def __init__(self, models: Sequence[nn.Module], on_gather: OnGather) -> None:
        self._names = {
            module: name if len(models) == 1 else f"{index}.{name}"
            for index, model in enumerate(models)
            for module, name in paths(model).items()
        }
        self._on_gather: OnGather = on_gather
        self._path: list[str] = []
        # By serial: later sweeps log a node again, and reports are in the order of recording.
        self._points: dict[int, CouplingPoint] = {}
        self._numbers: dict[int, Value] = {}  # results of coupling points that are one number
        self._without_rule: dict[int, CouplingPoint] = {}
        self._backward: set[int] = set()
        self._full: dict[tuple[str, str, bool], list[int]] = {}  # count, bytes, picked rows, grows
        self.is_split = True
        self.sweeps = self.recorded = self.run = self.repeated = 0

    @property
    def where(self) -> str:
        """Path of the module whose forward runs; "" outside of any."""
        return self._path[-1] if self._path else ""

    @contextmanager
    def tracked_modules(self) -> Iterator[None]:
        """Track which module's forward runs, inside the context."""
        # Global hooks also run in other threads, such as that of a data loader with a model. And `leave` also
        # runs for a forward that began before the block.
        thread = get_ident()

        def enter(module: nn.Module, inputs: object) -> None:
            if get_ident() == thread:
                self._path.append(self._names.get(module, self.where))

        def leave(module: nn.Module, inputs: object, output: object) -> None:
            if get_ident() == thread and self._path:
                self._path.pop()

        handles = [
            all_modules.register_module_forward_pre_hook(enter),
            # always_call: after an exception too. Otherwise the path would keep the module that raised.
            all_modules.register_module_forward_hook(leave, always_call=True),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def operator_without_rule(self, operator: str, nbytes: int) -> None:
        """Warn or raise, as `on_gather` says, because an operator without a rule needs full tensors.

        Raises:
            CoupledSamplesError: with ``on_gather="error"``.
        """
        if self._on_gather == "ok":
            return
        self._warn_or_raise(
            f"{operator} {self._place()} has no rule, so it gathers {nbytes} bytes of the whole batch into "
            'one tensor. Use another operator, or pass on_gather="ok" to allow it.'
        )

    def operator_gathers(self, operator: str, nbytes: int) -> None:
        """Warn or raise, as `on_gather` says, because an operator gathers rows of all samples.

        Raises:
            CoupledSamplesError: with ``on_gather="error"``.
        """
        if self._on_gather == "ok" or not self.is_split:
            return
        self._warn_or_raise(
            f"{operator} {self._place()} gathers {nbytes} bytes of the whole batch into one tensor. Use "
            "operations that keep one row per sample (torch.where or a product with a mask instead of an "
            'index), or pass on_gather="ok" to allow it.'
        )

    def _place(self) -> str:
        if in_backward():
            return "in the backward pass"
        return f"in {self.where}" if self.where else "outside of modules"

    def _warn_or_raise(self, text: str) -> None:
        if self._on_gather == "error":
            raise CoupledSamplesError(text)
        warn(text)

    def log_point(self, node: Node, kept: int) -> None:
        """Log a coupling point; `kept` is the number of bytes of its inputs that are stored."""
        # The report lists the points of the forward, and only the number of those of the backward.
        if node.backward:
            self._backward.add(node.serial)
            return
        self._points[node.serial] = _point(node, kept)
        outputs = [value for output in node.outputs if (value := output()) is not None]
        if len(outputs) == 1 and not outputs[0].meta.dim():
            self._numbers[node.serial] = outputs[0]

    def logged_points(self) -> list[LoggedPoint]:
        """Return the coupling points of the forward in the order of recording."""
        return [self._logged(serial) for serial in sorted(self._points)]

    def _logged(self, serial: int) -> LoggedPoint:
        value = self._numbers.get(serial)
        # Not materialized for the log, which must not start a sweep.
        number = None if value is None or value.full is None else float(value.full.item())
        return LoggedPoint(self._points[serial], number, value is not None and not value.has_gradient)

    def log_plan(self, todo: Plan) -> None:
        """Log the coupling points of a plan, and clear its list of them."""
        for node in todo.points:
            self.log_point(node, sum(v.nbytes for v, shard in node.operands if shard and v in todo.stored))
        todo.points.clear()  # nodes refer to their inputs, which a sweep frees after their last use
        for node in todo.stage:
            if node.gathers == "unknown":
                self.log_gathered(node)

    def log_gathered(self, node: Node) -> None:
        """Log a node that gathers rows for an operator without a rule, unless it is a coupling point."""
        if node.serial not in self._points and not node.backward:
            self._without_rule[node.serial] = _point(node, 0)

    def log_full_value(self, origin: tuple[str, str, bool], nbytes: int, rows: int) -> None:
        """Log a full value in memory; `origin` is as in `FullValues.count`.

        `rows` is the number of rows of the batch in it; 0 if that number grows with the batch.
        """
        sums = self._full.setdefault(origin, [0, 0, 0, 0])
        sums[:] = sums[0] + 1, sums[1] + nbytes, sums[2] + rows, sums[3] or not rows

    def report(self, samples: int, microbatches: int, store: Store | None = None) -> CouplingReport:
        """Return the report of the block so far."""
        on_device, on_host, whole = (0, 0, 0) if store is None else store.peak_bytes
        rows = -(-samples // max(microbatches, 1))
        return CouplingReport(
            samples=samples,
            microbatches=microbatches,
            points=tuple(self._points[serial] for serial in sorted(self._points)),
            backward_points=len(self._backward),
            sweeps=self.sweeps,
            recorded=self.recorded,
            run=self.run,
            repeated=self.repeated,
            kept_on_device=on_device,
            kept_on_host=on_host,
            unknown=tuple(self._without_rule[serial] for serial in sorted(self._without_rule)),
            whole=tuple(
                WholeValue(*place, times, nbytes)
                for place, (times, nbytes, count, grows) in self._full.items()
                if grows or count > rows  # a few picked rows (x[0]) take less than a micro-batch
            ),
            whole_on_device=whole,
        )


def _point(node: Node, kept: int) -> CouplingPoint:
    if node.gathers:
        gathered = sum(v.nbytes for v, shard in node.operands if shard)
        return CouplingPoint(node.where, node.name, node.gathers, kept, gathered)
    if node.operator in _PICKS:
        copied = sum(value.nbytes for output in node.outputs if (value := output()) is not None)
        return CouplingPoint(node.where, node.name, "gathered", kept, copied)
    return CouplingPoint(node.where, node.name, "statistic", kept, 0)
