"""Number of collectives of one update, and their predicted cost on more ranks.

A ring of R ranks takes R - 1 steps for an all-gather or a reduce-scatter and 2 (R - 1) for an all-reduce.
Each rank sends (R - 1) / R of the bytes in the first two, and twice that in the last.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch.profiler import ProfilerActivity, profile

Kind = Literal["all_reduce", "all_gather", "reduce_scatter"]
KINDS: tuple[Kind, ...] = ("all_reduce", "all_gather", "reduce_scatter")
_NUMBERS = 512  # fewer elements: a collective of a few float64 numbers; others are float32
_OPS: dict[str, tuple[Kind, int]] = {  # and the index of the argument with all bytes
    "c10d::allreduce_": ("all_reduce", 0),
    "c10d::_allgather_base_": ("all_gather", 0),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", 1),
    "c10d::alltoall_base_": ("all_reduce", 0),  # a sum of numbers with gloo; nccl uses an all-reduce
}
_ROWS = "c10d::alltoall_base_"  # sends a row to each rank


@dataclass(frozen=True)
class Exchange:
    """One collective.

    Attributes:
        kind: kind of collective.
        bytes: bytes of the full tensor, before a reduction or after an all-gather.
    """

    kind: Kind
    bytes: int

    @property
    def is_of_numbers(self) -> bool:
        """Return True if the collective has neither parameters nor gradients."""
        return self.bytes < 8 * _NUMBERS

    def turns(self, ranks: int) -> int:
        """Return the number of messages that a rank sends in sequence."""
        return (2 if self.kind == "all_reduce" else 1) * (ranks - 1)

    def sent(self, ranks: int) -> float:
        """Return the bytes that a rank sends."""
        return self.turns(ranks) / ranks * self.bytes


@dataclass(frozen=True)
class Network:
    """Network between ranks.

    Attributes:
        latency: seconds of each step of a ring.
        bandwidth: bytes per second of one rank.
    """

    latency: float
    bandwidth: float

    def seconds(self, exchanges: Iterable[Exchange], ranks: int) -> float:
        """Return the time of collectives in sequence."""
        return sum(each.turns(ranks) * self.latency + each.sent(ranks) / self.bandwidth for each in exchanges)


def counted(update: Callable[[], object]) -> list[Exchange]:
    """Return the collectives of an update on this rank, including those of DDP in C++."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as recorded:
        update()
    events = sorted(recorded.events() or [], key=lambda event: event.time_range.start)
    found = [(e.name, e.input_shapes) for e in events if e.name in _OPS]
    unknown = {e.name for e in events if e.name.startswith("c10d::")} - _OPS.keys()
    assert not unknown, f"collectives that are not counted: {unknown}"
    # An all-reduce takes a list, whose shapes are not recorded; gloo's own events have them. gloo implements
    # a reduce-scatter as an all-reduce.
    reduced = [_elements(e.input_shapes[0]) for e in events if e.name == "gloo:all_reduce"]
    for name, shapes in found:
        kind, place = _OPS[name]
        if kind == "reduce_scatter":
            reduced.remove(_elements(shapes[place]))
    exchanges = []
    for name, shapes in found:
        kind, place = _OPS[name]
        if name == _ROWS:
            elements = _elements(shapes[place][1:])
        else:
            elements = reduced.pop(0) if kind == "all_reduce" else _elements(shapes[place])
        exchanges.append(Exchange(kind, _bytes(elements)))
    assert not reduced, "an all-reduce was not made by an operator"
    return exchanges


def _elements(shape: Sequence[int]) -> int:
    return int(torch.Size(shape).numel())


def _bytes(elements: int) -> int:
    return elements * (8 if elements < _NUMBERS else 4)


def seconds(exchanges: Iterable[Exchange], ranks: int, networks: Mapping[Kind, Network]) -> float:
    """Return the time of collectives in sequence, with one network model per kind."""
    return sum(networks[each.kind].seconds([each], ranks) for each in exchanges)


NETWORKS = {
    "8 GPUs of one machine (10 us, 200 GB/s)": (8, Network(10e-6, 200e9)),
    "64 GPUs of 8 machines (20 us, 25 GB/s)": (64, Network(20e-6, 25e9)),
}
"""Assumed, not measured: what a rank sends a second, and how long each turn of a ring takes at least."""


def scaled_up(exchanges: Iterable[Exchange], factor: float) -> list[Exchange]:
    """Return the collectives of a model with as many parameter groups, each `factor` times as large."""
    return [e if e.is_of_numbers else Exchange(e.kind, round(e.bytes * factor)) for e in exchanges]
