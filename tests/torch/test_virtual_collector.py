"""A block raises the threshold of Python's garbage collector and restores it at its end."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from superbatch.torch import virtual_batch
from superbatch.torch.virtual import collector
from superbatch.torch.virtual.collector import OBJECTS

INITIAL = (601, 11, 12)  # used nowhere else
X = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def threshold() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(*INITIAL)
    yield
    gc.set_threshold(*before)


def update(model: nn.Module) -> None:
    with virtual_batch(model, 2) as batch:
        model(batch(X)).square().sum().backward()


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))


def test_the_threshold_is_raised_in_the_block_and_restored() -> None:
    net = model()
    with virtual_batch(net, 2) as batch:
        inside = gc.get_threshold()
        net(batch(X)).sum().backward()
    assert inside == (OBJECTS, *INITIAL[1:])
    assert gc.get_threshold() == INITIAL


def collections(net: nn.Module) -> int:
    """Count collections from the first operation of a block to its gradients."""
    found: list[str] = []

    def note(phase: str, info: dict[str, Any]) -> None:
        found.append(phase)

    gc.collect()
    with virtual_batch(net, 2) as batch:
        gc.callbacks.append(note)
        try:
            loss = net(batch(X)).square().sum()
            loss.backward()
            loss.item()  # computes all pending operations
        finally:
            gc.callbacks.remove(note)
    return found.count("start")


def test_no_collection_runs_in_a_large_block(monkeypatch: pytest.MonkeyPatch) -> None:
    deep = nn.Sequential(*(layer for _ in range(30) for layer in (nn.Linear(4, 4), nn.BatchNorm1d(4))))
    update(deep)  # fills the caches
    assert collections(deep) == 0
    monkeypatch.setattr(collector, "OBJECTS", 1)
    assert collections(deep) > 3, "premise: the block creates enough objects to collect"


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, GeneratorExit])
def test_the_threshold_is_restored_after_an_exception(error: type[BaseException]) -> None:
    seen: list[tuple[int, ...]] = []

    def fails() -> None:
        with virtual_batch(model(), 2) as batch:
            batch(X)
            seen.append(gc.get_threshold())
            raise error

    with pytest.raises(error):
        fails()
    assert seen == [(OBJECTS, *INITIAL[1:])]
    assert gc.get_threshold() == INITIAL


def test_the_threshold_is_restored_if_the_end_of_the_block_raises() -> None:
    net, limit = model(), nn.Parameter(torch.ones(()))
    seen: list[tuple[int, ...]] = []

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            seen.append(gc.get_threshold())
            raise RuntimeError("on the way back")

    with pytest.raises(RuntimeError, match="on the way back"), virtual_batch(net, 2) as batch:
        (Fails.apply(net(batch(X))) * limit).sum().backward()
    assert seen == [(OBJECTS, *INITIAL[1:])]
    assert gc.get_threshold() == INITIAL


def test_nested_blocks() -> None:
    outer, inner = model(), model()
    with virtual_batch(outer, 2) as batch:
        loss = outer(batch(X)).square().sum()
        update(inner)
        assert gc.get_threshold() == (OBJECTS, *INITIAL[1:])  # the outer block is open
        loss.backward()
    assert gc.get_threshold() == INITIAL


def test_blocks_of_two_threads_that_end_in_the_order_they_began() -> None:
    first_is_open, second_is_open, first_is_over = (threading.Event() for _ in range(3))

    def first() -> None:
        with collector.rarely_collecting():
            first_is_open.set()
            second_is_open.wait(10)
        first_is_over.set()

    thread = threading.Thread(target=first)
    thread.start()
    assert first_is_open.wait(10)
    with collector.rarely_collecting():
        second_is_open.set()
        assert first_is_over.wait(10)
        assert gc.get_threshold() == (OBJECTS, *INITIAL[1:])
    thread.join()
    assert gc.get_threshold() == INITIAL


@pytest.mark.parametrize("thresholds", [(0, 10, 10), (OBJECTS + 1, 10, 10)])
def test_a_higher_threshold_or_none_is_kept(thresholds: tuple[int, int, int]) -> None:
    gc.set_threshold(*thresholds)
    net = model()
    with virtual_batch(net, 2) as batch:
        assert gc.get_threshold() == thresholds
        net(batch(X)).sum().backward()
    assert gc.get_threshold() == thresholds


def test_a_threshold_that_the_program_sets_in_the_block_stays() -> None:
    with virtual_batch(model(), 2):
        gc.set_threshold(900, 7, 7)
    assert gc.get_threshold() == (900, 7, 7)


@pytest.mark.parametrize("inside", [True, False])
def test_a_collector_that_is_off_stays_off(inside: bool) -> None:
    net = model()
    if not inside:
        gc.disable()
    try:
        with virtual_batch(net, 2) as batch:
            if inside:
                gc.disable()
            net(batch(X)).sum().backward()
        assert not gc.isenabled()
    finally:
        gc.enable()
