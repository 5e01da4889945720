"""Transfers to the device: the next micro-batch is prefetched, and the last one is freed.

The meta device has copies but no streams, so `FakeCuda` records streams and events.
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
from superbatch.torch.window import transfer as transfers
from superbatch.torch.window.transfer import Transfer, to_device

META = torch.device("meta")


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the lengths of the micro-batches copied so far."""
    lengths: list[int] = []
    to = Tensor.to

    def counting(self: Tensor, *args: Any, **options: Any) -> Tensor:
        lengths.append(len(self))
        return to(self, *args, **options)

    monkeypatch.setattr(Tensor, "to", counting)
    return lengths


def test_the_next_micro_batch_is_prefetched_once_one_is_launched(copied: list[int]) -> None:
    batches, transfer = [torch.zeros(n) for n in (1, 2, 3)], Transfer(META)
    taken_first, launched = [], []
    for index in range(3):
        taken = transfer.take(batches, index)
        assert taken.device == META and len(taken) == index + 1
        taken_first.append(list(copied))
        for _ in range(2):  # two losses of a micro-batch
            transfer.launched(batches, index)
        launched.append(list(copied))
    assert taken_first == [[1], [1, 2], [1, 2, 3]], "no prefetch delays the work on a micro-batch"
    assert launched == [[1, 2], [1, 2, 3], [1, 2, 3]], "each is copied once, one ahead"


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
    """Recorder of CUDA streams and events on the meta device."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.pinned = 0
        self.pin_error: str | None = None
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
            if outer.pin_error is not None:
                raise RuntimeError(outer.pin_error)
            outer.pinned += 1
            log.append(f"pin {len(tensor)}")
            return tensor

        sides: list[_FakeStream] = []
        computing = _FakeStream("computing", log)

        def stream(device: Any) -> _FakeStream:
            sides.append(_FakeStream(f"side {len(sides)}", log))
            return sides[-1]

        @contextmanager
        def using(stream: _FakeStream) -> Iterator[None]:
            log.append(f"on {stream}:")
            yield

        monkeypatch.setattr(transfers, "LARGE", 1)  # the micro-batches of these tests have a few bytes
        for module in ("window.transfer", "virtual.run.prefetch"):
            monkeypatch.setattr(f"superbatch.torch.{module}.has_streams", lambda device: device is not None)
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "Stream", stream)
        monkeypatch.setattr(torch.cuda, "stream", using)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: computing)
        monkeypatch.setattr(Tensor, "pin_memory", pin)


class _FakeStream:
    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def __str__(self) -> str:
        return self.name

    def wait_event(self, event: Any) -> None:
        self.log.append(f"{self.name} waits for event {event.number}")

    def wait_stream(self, other: Any) -> None:
        self.log.append(f"{self.name} waits for {other}")


def _run(transfer: Transfer, count: int, log: list[str]) -> None:
    batches = [torch.zeros(n + 1) for n in range(count)]
    for index in range(count):
        transfer.take(batches, index)
        log.append(f"launch {index + 1}")
        transfer.launched(batches, index)


def test_two_micro_batches_are_on_the_device_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Micro-batch 3 is pinned once micro-batch 2 is launched and micro-batch 1 has ended."""
    cuda = FakeCuda(monkeypatch)
    _run(Transfer(META), 4, cuda.log)
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


def test_small_micro_batches_are_copied_without_a_separate_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Micro-batches of 4 and 8 bytes are copied when they are taken, one of 12 bytes is prefetched."""
    cuda = FakeCuda(monkeypatch)
    monkeypatch.setattr(transfers, "LARGE", 12)
    _run(Transfer(META), 3, cuda.log)
    assert [entry for entry in cuda.log if entry != "on side 0:"] == [
        "pin 1",
        "launch 1",
        "pin 2",
        "launch 2",
        "record 0 on computing",
        "pin 3",
        "computing waits for side 0",
        "launch 3",
    ]


def test_micro_batches_on_the_device_have_no_events(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, transfer = FakeCuda(monkeypatch), Transfer(META)
    batches = [{"x": torch.zeros(3, device=META), "name": "a"} for _ in range(3)]
    for index in range(3):
        assert transfer.take(batches, index)["x"] is batches[index]["x"]
        transfer.launched(batches, index)
    assert cuda.log == []


def test_an_abandoned_window_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, transfer = FakeCuda(monkeypatch), Transfer(META)
    _run(transfer, 2, cuda.log)
    transfer.forget()
    cuda.log.clear()
    _run(transfer, 2, cuda.log)
    assert not any(entry.startswith("wait for") for entry in cuda.log)


def test_copies_are_not_pinned_if_pinning_runs_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch)
    cuda.pin_error = "CUDA error: out of memory"
    _run(Transfer(META), 3, cuda.log)
    assert cuda.pinned == 0
    cuda.pin_error = "CUDA error: an illegal memory access was encountered"
    with pytest.raises(RuntimeError, match="illegal memory access"):
        _run(Transfer(META), 2, cuda.log)


def test_a_prefetch_that_runs_out_of_memory_is_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    batches, transfer = [torch.zeros(n) for n in (1, 2)], Transfer(META)
    transfer.take(batches, 0)
    to = Tensor.to

    def fails(self: Tensor, *args: Any, **options: Any) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(Tensor, "to", fails)
    transfer.launched(batches, 0)
    monkeypatch.setattr(Tensor, "to", to)
    assert len(transfer.take(batches, 1)) == 2


def test_offloading_overlaps_the_computation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a reader of offloaded rows waits for their copy; other computation does not."""
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
    assert cuda.log == ["computing waits for side 1"], "and not for copies of later rows to the host"
    cuda.log.clear()
    ahead.fetch("another", kept)
    assert cuda.log == ["computing waits for side 0"]


def test_pending_copies_to_the_host_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """One tensor is kept alive for its copy; the computation waits for earlier copies."""
    cuda = FakeCuda(monkeypatch)
    monkeypatch.setattr(
        "superbatch.torch.virtual.run.store.empty_on_host", lambda like: torch.zeros(like.shape)
    )
    monkeypatch.setattr(Tensor, "copy_", lambda self, *args, **options: self)
    store, alive = Store(META, budget=0), []
    for _ in range(4):
        rows = torch.zeros(2, device="meta")
        alive.append(weakref.ref(rows))
        store.keep(rows)
        del rows
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


def test_a_micro_batch_split_after_its_prefetch_is_copied_again(copied: list[int]) -> None:
    batches, transfer = [torch.zeros(n) for n in (4, 5)], Transfer(META)
    transfer.take(batches, 0)
    transfer.launched(batches, 0)
    batches[1:] = [torch.zeros(2), torch.zeros(3)]
    assert [len(transfer.take(batches, index)) for index in (1, 2)] == [2, 3]
    assert copied == [4, 5, 2, 3]


def test_the_last_micro_batch_is_freed_once_the_next_is_taken() -> None:
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


def test_without_a_device_micro_batches_are_not_copied() -> None:
    batches = [torch.zeros(1), torch.zeros(2)]
    assert Transfer(None).take(batches, 1) is batches[1]
    assert Transfer(torch.device("cpu")).take([(batches[0],)], 0)[0] is batches[0]


def test_a_dict_is_moved_if_a_tensor_is_on_another_device():
    batch = {"x": torch.zeros(2), "y": torch.zeros(2, device="meta")}
    assert {leaf.device.type for leaf in to_device(batch, torch.device("meta")).values()} == {"meta"}
    there = {"x": torch.zeros(2)}
    assert to_device(there, torch.device("cpu")) is there
