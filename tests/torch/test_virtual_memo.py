"""What is remembered of an operation is that of its form alone: whatever differs is looked at anew."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from superbatch.torch import virtual_batch
from superbatch.torch.virtual.ir.values import Value
from superbatch.torch.virtual.run import memo
from superbatch.torch.virtual.run.memo import Form


class Run(NamedTuple):
    """A training of one update: `loss` is one of x @ W, (samples, outs)."""

    loss: Callable[[Any], Any]
    samples: int = 6
    outs: int = 6
    size: int = 4
    default: torch.dtype = torch.float64


@pytest.fixture(autouse=True)
def nothing_remembered() -> Iterator[None]:
    default = torch.get_default_dtype()
    memo._cached.cache_clear()
    yield
    memo._cached.cache_clear()
    torch.set_default_dtype(default)


def gradient(run: Run, size: int | None) -> list[Tensor]:
    """Of W, and the loss, by micro-batches of a size or in one piece."""
    torch.set_default_dtype(run.default)
    torch.manual_seed(run.samples)
    weight = torch.randn(4, run.outs, dtype=torch.float64, requires_grad=True)
    x = torch.randn(run.samples, 4, dtype=torch.float64)
    torch.manual_seed(0)
    if size is None:
        loss = run.loss(x @ weight)
        loss.backward()
    else:
        with virtual_batch(nn.Identity(), size, rng="batch", device="cpu") as batch:
            loss = run.loss(batch(x) @ weight)
            loss.backward()
    assert weight.grad is not None
    assert weight.grad.abs().sum() > 0, "premise: there is a gradient"
    return [weight.grad, torch.as_tensor(loss.detach().numpy())]


def check(run: Run) -> None:
    """By micro-batches it is as in one piece."""
    for ours, real in zip(gradient(run, run.size), gradient(run, None), strict=True):
        assert ours.dtype is real.dtype
        torch.testing.assert_close(ours, real, rtol=1e-12, atol=1e-12)


def cubes(z: Any) -> Any:
    return (z**3).sum()


def turned(z: Any) -> Any:
    """Of the same shape and strides, with the samples in the other dimension."""
    return (z.t().clone(memory_format=torch.contiguous_format).exp() * (1 + torch.arange(6.0))).sum()


def upright(z: Any) -> Any:
    return (z.clone(memory_format=torch.contiguous_format).exp() * (1 + torch.arange(6.0))).sum()


def spread(z: Any) -> Any:
    """A sum that is not worked out yet, as 12 rows: those of 12 samples, or three of each of 4."""
    return (z.sum().expand(12).reshape(len(z), -1) * z[:, :1]).square().sum()


def signed(zero: float) -> Callable[[Any], Any]:
    """1 / (zero * |z|) is of either sign."""
    return lambda z: cubes(z) + (1 / (z.detach().abs() * zero)).clamp(-1, 1).sum()


def whole(number: Any) -> Callable[[Any], Any]:
    """Whole numbers times 2 are whole, times 2.0 they are not."""
    return lambda z: cubes(z) * (1 + ((z > 0).long() * number).is_floating_point())


def precise(z: Any) -> Any:
    """Whole numbers times 0.5 are of the default dtype."""
    return cubes(z) * (1 + (((z > 0).long() * 0.5).dtype is torch.float64))


def softened(dim: int) -> Callable[[Any], Any]:
    return lambda z: cubes(z.softmax(dim))


def scaled(factor: float) -> Callable[[Any], Any]:
    return lambda z: (factor * z).exp().sum()


def layered(eps: float) -> Callable[[Any], Any]:
    return lambda z: cubes(F.layer_norm(z, (6,), eps=eps))


def dropped(rate: float, *, training: bool = True) -> Callable[[Any], Any]:
    return lambda z: cubes(F.dropout(z, rate, training))


def decided(z: Any) -> Any:
    """The program looks at a statistic of the batch."""
    return cubes(z) if z.abs().max() > 4.2 else z.sin().sum()


def normalised(*, training: bool) -> Callable[[Any], Any]:
    def loss(z: Any) -> Any:
        return cubes(F.batch_norm(z, torch.zeros(6), torch.ones(6), training=training))

    return loss


CHANGES = {
    "shape": [Run(cubes, outs=6), Run(cubes, outs=5)],
    "where the samples are": [Run(turned), Run(upright)],
    "number of samples": [Run(spread, samples=12), Run(spread, samples=4, size=3)],
    "size of micro-batches": [Run(cubes, size=4), Run(cubes, size=1)],
    "dimension": [Run(softened(0)), Run(softened(1))],
    "number": [Run(scaled(2.0)), Run(scaled(0.5))],
    "epsilon": [Run(layered(1e-5)), Run(layered(1.0))],
    "rate of dropout": [Run(dropped(0.1)), Run(dropped(0.6))],
    "dropout in training": [Run(dropped(0.5)), Run(dropped(0.5, training=False))],
    "BatchNorm in training": [Run(normalised(training=train)) for train in (True, False)],
    "kind of a number": [Run(whole(number)) for number in (2, 2.0)],
    "sign of a zero": [Run(signed(zero)) for zero in (0.0, -0.0)],
    "default dtype": [Run(precise), Run(precise, default=torch.float32)],
    "one tensor twice": [Run(lambda z: (z * z).exp().sum()), Run(lambda z: (z * z.sin()).exp().sum())],
    "what the program decides": [Run(decided, samples=samples) for samples in (4, 6)],
}


@pytest.mark.parametrize("turn", [1, -1])
@pytest.mark.parametrize("change", CHANGES)
def test_what_differs_is_looked_at_anew(change: str, turn: int) -> None:
    for run in CHANGES[change][::turn]:
        check(run)
    before = memo._cached.cache_info()
    for run in CHANGES[change]:
        check(run)
    after = memo._cached.cache_info()
    assert after.misses == before.misses
    assert after.hits > before.hits, "premise: there is something to remember"


def test_premises() -> None:
    # The decisions are two, and a rule for each of these would be another.
    torch.set_default_dtype(torch.float64)
    largest = []
    for run in CHANGES["what the program decides"]:
        gradient(run._replace(loss=lambda z: largest.append(z.detach().abs().max().item()) or cubes(z)), None)
    assert (largest[0] > 4.2) != (largest[1] > 4.2)
    for change in ("sign of a zero", "kind of a number", "default dtype"):
        first, second = (gradient(run, None)[1] for run in CHANGES[change])
        assert not torch.equal(first, second)


# -- planted mistakes: a memory that overlooks something -----------------------------------------------------

_DESCRIBE, _INIT = Form._describe, Form.__init__


def _described(change: Callable[[Any, list[Any]], None]) -> dict[str, Any]:
    def wrong(self: Form, arg: Any, path: Any, parts: list[Any]) -> bool:
        known = _DESCRIBE(self, arg, path, parts)
        change(arg, parts)
        return known

    return {"_describe": wrong}


def _of_a_tensor(place: int) -> dict[str, Any]:
    def change(arg: Any, parts: list[Any]) -> None:
        if isinstance(arg, Value):
            parts[place] = None

    return _described(change)


def _of_a_number(place: int) -> dict[str, Any]:
    def change(arg: Any, parts: list[Any]) -> None:
        if isinstance(arg, (int, float)):
            parts[place] = None

    return _described(change)


def _zeros_alike(arg: Any, parts: list[Any]) -> None:
    if isinstance(arg, float):
        parts[-1] = arg


def _without(change: Callable[[tuple[Any, ...]], tuple[Any, ...]]) -> dict[str, Any]:
    def wrong(self: Form, *args: Any) -> None:
        _INIT(self, *args)
        if self.key is not None:
            self.key = change(self.key)

    return {"__init__": wrong}


def _one_by_one(key: tuple[Any, ...]) -> tuple[Any, ...]:
    return key[:-1] if type(key[-1]) is tuple and type(key[-2]) is not type else key


MUTANTS = {
    "shape": _of_a_tensor(-3),
    "where the samples are": _of_a_tensor(-2),
    "number": _of_a_number(-1),
    "epsilon": _of_a_number(-1),
    "dimension": _of_a_number(-1),
    "kind of a number": _of_a_number(-2),
    "sign of a zero": _described(_zeros_alike),
    "number of samples": _without(lambda key: (key[0], None, *key[2:])),
    "default dtype": _without(lambda key: (*key[:2], None, *key[3:])),
    "one tensor twice": _without(_one_by_one),
}


@pytest.mark.parametrize("change", MUTANTS)
def test_a_memory_that_overlooks_it_is_seen(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for run in CHANGES[change]:
        check(run)  # premise: as it is, it passes
    for name, wrong in MUTANTS[change].items():
        monkeypatch.setattr(Form, name, wrong)
    seen = 0
    for turn in (1, -1):
        memo._cached.cache_clear()
        try:
            for run in CHANGES[change][::turn]:
                check(run)
        except (AssertionError, RuntimeError, IndexError):
            seen += 1
    assert seen, "with either of them first it goes unnoticed"


# -- what is held --------------------------------------------------------------------------------------------


def test_what_is_remembered_holds_no_numbers_and_no_values_of_a_block() -> None:
    gc.collect()
    before = {id(item) for item in gc.get_objects()}
    for runs in CHANGES.values():
        check(runs[0])
    gc.collect()
    new = [item for item in gc.get_objects() if id(item) not in before]
    left = [item for item in new if issubclass(type(item), Tensor) and item.device.type != "meta"]
    assert not left
    values = [item for item in new if type(item) is Value]
    assert values, "premise: stand-ins are remembered"
    for value in values:
        assert value.node is None
        assert value.full is None
        assert value.rows is None


def test_an_argument_whose_equality_is_not_known_is_not_remembered() -> None:
    generator = torch.Generator()
    form = Form(torch.ops.aten.mul.Tensor, (generator,), {}, 4)
    assert form.key is None
    assert memo.template(form) is None
