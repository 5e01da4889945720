"""Copies to the device: one micro-batch ahead, and nothing of the last one left.

On the meta device, which every torch has: there is a copy, but no stream. What streams do was not run here.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from superbatch.torch import Accumulator
from superbatch.torch.memory.out_of_memory import release_caches
from superbatch.torch.virtual.run.prefetch import Prefetcher
from superbatch.torch.virtual.run.store import Store
from superbatch.torch.window.transfer import Transfer, to_device

META = torch.device("meta")


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of the micro-batches copied so far."""
    lengths: list[int] = []
    to = Tensor.to

    def counting(self: Tensor, *args: Any, **options: Any) -> Tensor:
        lengths.append(len(self))
        return to(self, *args, **options)

    monkeypatch.setattr(Tensor, "to", counting)
    return lengths


def test_the_next_micro_batch_is_under_way_once_the_work_on_one_is_launched(copied: list[int]) -> None:
    batches, transfer = [torch.zeros(n) for n in (1, 2, 3)], Transfer(META)
    taken_first, launched = [], []
    for index in range(3):
        taken = transfer.take(batches, index)
        assert taken.device == META and len(taken) == index + 1
        taken_first.append(list(copied))
        for _ in range(2):  # two losses of a micro-batch
            transfer.launched(batches, index)
        launched.append(list(copied))
    assert taken_first == [[1], [1, 2], [1, 2, 3]], "nothing stands between a micro-batch and its work"
    assert launched == [[1, 2], [1, 2, 3], [1, 2, 3]], "each once, one ahead"


def test_a_window_copies_the_next_micro_batch_in_its_backward(copied: list[int]) -> None:
    model = nn.Linear(3, 1)
    accumulator = Accumulator(
        model, torch.optim.SGD(model.parameters(), lr=0.1), microbatch_size=2, check=False, device=META
    )
    seen = []
    with accumulator.window(torch.randn(6, 3)) as window:
        for microbatch in window:
            seen.append(list(copied))
            assert microbatch.device == META
            window.backward(model(torch.ones(2, 3)).square().mean())
            seen.append(list(copied))
    assert seen == [[2], [2, 2], [2, 2], [2, 2, 2], [2, 2, 2], [2, 2, 2]]


class FakeCuda:
    """Streams and events of CUDA, recorded; the device is `meta`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.pinned = 0
        self.out_of: str | None = None
        log, outer = self.log, self

        class Event:
            made = 0

            def __init__(self) -> None:
                self.number = Event.made
                Event.made += 1

            def record(self, stream: Any) -> None:
                log.append(f"record {self.number} on {stream}")

            def synchronize(self) -> None:
                log.append(f"wait for {self.number}")

        def pin(tensor: Tensor) -> Tensor:
            if outer.out_of is not None:
                raise RuntimeError(outer.out_of)
            outer.pinned += 1
            log.append(f"pin {len(tensor)}")
            return tensor

        sides: list[_Named] = []
        computing = _Named("computing", log)

        def stream(device: Any) -> _Named:
            sides.append(_Named(f"side {len(sides)}", log))
            return sides[-1]

        @contextmanager
        def using(stream: _Named) -> Iterator[None]:
            log.append(f"on {stream}:")
            yield

        for module in ("window.transfer", "virtual.run.prefetch"):
            monkeypatch.setattr(f"superbatch.torch.{module}.has_streams", lambda device: device is not None)
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "Stream", stream)
        monkeypatch.setattr(torch.cuda, "stream", using)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: computing)
        monkeypatch.setattr(Tensor, "pin_memory", pin)


class _Named:
    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def __str__(self) -> str:
        return self.name

    def wait_event(self, event: Any) -> None:
        self.log.append(f"{self.name} waits for event {event.number}")

    def wait_stream(self, other: Any) -> None:
        self.log.append(f"{self.name} waits for {other}")


def _worked_through(transfer: Transfer, count: int, log: list[str]) -> None:
    batches = [torch.zeros(n + 1) for n in range(count)]
    for index in range(count):
        transfer.take(batches, index)
        log.append(f"launch {index + 1}")
        transfer.launched(batches, index)


def test_two_micro_batches_are_on_the_device_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy is pinned after the work before it is launched, and waits for the work before that."""
    cuda = FakeCuda(monkeypatch)
    _worked_through(Transfer(META), 4, cuda.log)
    assert [entry for entry in cuda.log if entry != "on side 0:"] == [
        "pin 1",
        "launch 1",
        "record 0 on computing",
        "pin 2",
        "computing waits for side 0",
        "launch 2",
        "record 1 on computing",
        "wait for 0",
        "pin 3",
        "computing waits for side 0",
        "launch 3",
        "record 2 on computing",
        "wait for 1",
        "pin 4",
        "computing waits for side 0",
        "launch 4",
    ]


def test_a_window_that_was_left_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, transfer = FakeCuda(monkeypatch), Transfer(META)
    _worked_through(transfer, 2, cuda.log)
    transfer.forget()
    cuda.log.clear()
    _worked_through(transfer, 2, cuda.log)
    assert not any(entry.startswith("wait for") for entry in cuda.log)


def test_without_memory_to_pin_copies_come_from_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch)
    cuda.out_of = "CUDA error: out of memory"
    _worked_through(Transfer(META), 3, cuda.log)
    assert cuda.pinned == 0
    cuda.out_of = "CUDA error: an illegal memory access was encountered"
    with pytest.raises(RuntimeError, match="illegal memory access"):
        _worked_through(Transfer(META), 2, cuda.log)


def test_a_copy_ahead_for_which_there_is_no_memory_is_made_later(monkeypatch: pytest.MonkeyPatch) -> None:
    batches, transfer = [torch.zeros(n) for n in (1, 2)], Transfer(META)
    transfer.take(batches, 0)
    to = Tensor.to

    def fails(self: Tensor, *args: Any, **options: Any) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(Tensor, "to", fails)
    transfer.launched(batches, 0)
    monkeypatch.setattr(Tensor, "to", to)
    assert len(transfer.take(batches, 1)) == 2


def test_rows_for_the_host_are_copied_beside_the_computation(monkeypatch: pytest.MonkeyPatch) -> None:
    """What reads them waits for these copies; the computation of the next rows does not."""
    cuda = FakeCuda(monkeypatch)
    monkeypatch.setattr(
        "superbatch.torch.virtual.run.store.empty_on_host", lambda like: torch.zeros(like.shape)
    )
    monkeypatch.setattr(Tensor, "copy_", lambda self, *args, **options: cuda.log.append("copy") or self)
    store = Store(META, budget=0)
    ahead = Prefetcher(META, store._to_host)
    kept, on_host = store.keep(torch.zeros(2, device="meta"))
    assert on_host and kept.device.type == "cpu"
    assert cuda.log == ["side 0 waits for computing", "on side 0:", "copy", "record 0 on side 0"]
    cuda.log.clear()
    ahead.begin("next", kept)
    assert cuda.log[0] == "pin 2"
    assert cuda.log[1:5] == [
        "side 1 waits for computing",
        "on side 1:",
        "record 1 on side 0",
        "side 1 waits for event 1",
    ]
    cuda.log.clear()
    ahead.fetch("next", kept)
    assert cuda.log == ["computing waits for side 1"], "and not for the copy to the host of later rows"
    cuda.log.clear()
    ahead.fetch("another", kept)
    assert cuda.log == ["computing waits for side 0"]


def test_rows_on_their_way_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """However far the host is ahead: one tensor more is held, and the computation waits for its copy."""
    cuda = FakeCuda(monkeypatch)
    monkeypatch.setattr(
        "superbatch.torch.virtual.run.store.empty_on_host", lambda like: torch.zeros(like.shape)
    )
    monkeypatch.setattr(Tensor, "copy_", lambda self, *args, **options: self)
    store, alive = Store(META, budget=0), []
    for _ in range(4):
        piece = torch.zeros(2, device="meta")
        alive.append(weakref.ref(piece))
        store.keep(piece)
        del piece
        assert sum(reference() is not None for reference in alive) == 1
    waits = [entry for entry in cuda.log if entry.startswith("computing waits")]
    assert waits == [f"computing waits for event {number}" for number in range(3)]


def test_pinned_memory_is_released_with_the_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    emptied: list[str] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append("device"))
    monkeypatch.setattr(
        torch, "accelerator", SimpleNamespace(empty_host_cache=lambda: emptied.append("host")), raising=False
    )
    release_caches(torch.device("cpu"))
    assert emptied == []
    release_caches(torch.device("cuda", 0), torch.device("cuda", 1))
    assert emptied == ["device", "host"]


def test_what_was_cut_otherwise_meanwhile_is_copied_anew(copied: list[int]) -> None:
    batches, transfer = [torch.zeros(n) for n in (4, 5)], Transfer(META)
    transfer.take(batches, 0)
    transfer.launched(batches, 0)
    batches[1:] = [torch.zeros(2), torch.zeros(3)]
    assert [len(transfer.take(batches, index)) for index in (1, 2)] == [2, 3]
    assert copied == [4, 5, 2, 3]


def test_the_last_micro_batch_is_gone_when_the_next_is_taken() -> None:
    batches, transfer = [torch.zeros(n) for n in (1, 2, 3)], Transfer(META)
    alive: list[weakref.ref[Tensor]] = []

    def work(taken: Tensor) -> None:
        assert sum(reference() is not None for reference in alive) == 0
        alive.append(weakref.ref(taken))

    for index in range(3):
        work(transfer.take(batches, index))
        transfer.launched(batches, index)
    transfer.take(batches, 0)
    transfer.launched(batches, 0)
    transfer.forget()
    assert not transfer._prefetched


def test_without_a_device_micro_batches_stay_where_they_are() -> None:
    batches = [torch.zeros(1), torch.zeros(2)]
    assert Transfer(None).take(batches, 1) is batches[1]
    assert Transfer(torch.device("cpu")).take([(batches[0],)], 0)[0] is batches[0]


def test_a_dict_is_moved_where_its_tensors_are_elsewhere():
    batch = {"x": torch.zeros(2), "y": torch.zeros(2, device="meta")}
    assert {leaf.device.type for leaf in to_device(batch, torch.device("meta")).values()} == {"meta"}
    there = {"x": torch.zeros(2)}
    assert to_device(there, torch.device("cpu")) is there
