"""Copies to the device: one micro-batch ahead, and nothing of the last one left.

On the meta device, which every torch has: there is a copy, but no stream. What streams do was not run here.
"""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from superbatch.torch.transfer import Transfer, to_device

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


def test_the_next_micro_batch_is_under_way_while_one_is_worked_on(copied: list[int]) -> None:
    batches, transfer = [torch.zeros(n) for n in (1, 2, 3)], Transfer(META)
    seen = []
    for index in range(3):
        taken = transfer.take(batches, index)
        assert taken.device == META and len(taken) == index + 1
        seen.append(list(copied))
    assert seen == [[1, 2], [1, 2, 3], [1, 2, 3]], "each once, one ahead"


def test_what_was_cut_otherwise_meanwhile_is_copied_anew(copied: list[int]) -> None:
    batches, transfer = [torch.zeros(n) for n in (4, 5)], Transfer(META)
    transfer.take(batches, 0)
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
    transfer.take(batches, 0)
    transfer.forget()
    assert not transfer._ahead


def test_without_a_device_micro_batches_stay_where_they_are() -> None:
    batches = [torch.zeros(1), torch.zeros(2)]
    assert Transfer(None).take(batches, 1) is batches[1]
    assert Transfer(torch.device("cpu")).take([(batches[0],)], 0)[0] is batches[0]


def test_a_dict_is_moved_where_its_tensors_are_elsewhere():
    batch = {"x": torch.zeros(2), "y": torch.zeros(2, device="meta")}
    assert {leaf.device.type for leaf in to_device(batch, torch.device("meta")).values()} == {"meta"}
    there = {"x": torch.zeros(2)}
    assert to_device(there, torch.device("cpu")) is there
