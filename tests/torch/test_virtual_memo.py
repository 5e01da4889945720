"""Cache of recorded operations: a call that differs in anything is recorded again."""

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
from superbatch.torch.virtual.run.memo import KeyedCall


class Run(NamedTuple):
    """One update, whose `loss` takes x @ W of shape (samples, outs)."""

    loss: Callable[[Any], Any]
    samples: int = 6
    outs: int = 6
    size: int = 4
    default: torch.dtype = torch.float64


@pytest.fixture(autouse=True)
def empty_cache() -> Iterator[None]:
    default = torch.get_default_dtype()
    memo._cached.cache_clear()
    yield
    memo._cached.cache_clear()
    torch.set_default_dtype(default)


def gradient(run: Run, size: int | None) -> list[Tensor]:
    """Return the gradient of W and the loss, in micro-batches of `size` or on the real batch."""
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
    """Assert that micro-batches give the gradient and loss of the real batch."""
    for ours, real in zip(gradient(run, run.size), gradient(run, None), strict=True):
        assert ours.dtype is real.dtype
        torch.testing.assert_close(ours, real, rtol=1e-12, atol=1e-12)


def cubes(z: Any) -> Any:
    return (z**3).sum()


def transposed(z: Any) -> Any:
    """Like `upright`, in shape and strides too, but with samples in the second dimension."""
    return (z.t().clone(memory_format=torch.contiguous_format).exp() * (1 + torch.arange(6.0))).sum()


def upright(z: Any) -> Any:
    return (z.clone(memory_format=torch.contiguous_format).exp() * (1 + torch.arange(6.0))).sum()


def spread(z: Any) -> Any:
    """Expand a pending sum to 12 rows: one per sample of 12, or three per sample of 4."""
    return (z.sum().expand(12).reshape(len(z), -1) * z[:, :1]).square().sum()


def by_sign_of_zero(zero: float) -> Callable[[Any], Any]:
    """Loss with the term 1 / (zero * |z|), whose sign is that of `zero`."""
    return lambda z: cubes(z) + (1 / (z.detach().abs() * zero)).clamp(-1, 1).sum()


def by_number_type(number: Any) -> Callable[[Any], Any]:
    """Loss that depends on the dtype of integers times `number`."""
    return lambda z: cubes(z) * (1 + ((z > 0).long() * number).is_floating_point())


def by_default_dtype(z: Any) -> Any:
    """Loss that depends on the dtype of integers times 0.5: the default dtype."""
    return cubes(z) * (1 + (((z > 0).long() * 0.5).dtype is torch.float64))


def softmax_loss(dim: int) -> Callable[[Any], Any]:
    return lambda z: cubes(z.softmax(dim))


def scaled(factor: float) -> Callable[[Any], Any]:
    return lambda z: (factor * z).exp().sum()


def layer_norm_loss(eps: float) -> Callable[[Any], Any]:
    return lambda z: cubes(F.layer_norm(z, (6,), eps=eps))


def dropout_loss(rate: float, *, training: bool = True) -> Callable[[Any], Any]:
    return lambda z: cubes(F.dropout(z, rate, training))


def branching(z: Any) -> Any:
    """Branch on a statistic of the batch."""
    return cubes(z) if z.abs().max() > 4.2 else z.sin().sum()


def batch_norm_loss(*, training: bool) -> Callable[[Any], Any]:
    def loss(z: Any) -> Any:
        return cubes(F.batch_norm(z, torch.zeros(6), torch.ones(6), training=training))

    return loss


CHANGES = {
    "shape": [Run(cubes, outs=6), Run(cubes, outs=5)],
    "dimension of the samples": [Run(transposed), Run(upright)],
    "number of samples": [Run(spread, samples=12), Run(spread, samples=4, size=3)],
    "size of micro-batches": [Run(cubes, size=4), Run(cubes, size=1)],
    "dimension": [Run(softmax_loss(0)), Run(softmax_loss(1))],
    "number": [Run(scaled(2.0)), Run(scaled(0.5))],
    "epsilon": [Run(layer_norm_loss(1e-5)), Run(layer_norm_loss(1.0))],
    "rate of dropout": [Run(dropout_loss(0.1)), Run(dropout_loss(0.6))],
    "dropout in training": [Run(dropout_loss(0.5)), Run(dropout_loss(0.5, training=False))],
    "BatchNorm in training": [Run(batch_norm_loss(training=train)) for train in (True, False)],
    "type of a number": [Run(by_number_type(number)) for number in (2, 2.0)],
    "sign of a zero": [Run(by_sign_of_zero(zero)) for zero in (0.0, -0.0)],
    "default dtype": [Run(by_default_dtype), Run(by_default_dtype, default=torch.float32)],
    "one tensor twice": [Run(lambda z: (z * z).exp().sum()), Run(lambda z: (z * z.sin()).exp().sum())],
    "branch of the program": [Run(branching, samples=samples) for samples in (4, 6)],
}


@pytest.mark.parametrize("turn", [1, -1])
@pytest.mark.parametrize("change", CHANGES)
def test_a_call_that_differs_is_recorded_again(change: str, turn: int) -> None:
    for run in CHANGES[change][::turn]:
        check(run)
    before = memo._cached.cache_info()
    for run in CHANGES[change]:
        check(run)
    after = memo._cached.cache_info()
    assert after.misses == before.misses
    assert after.hits > before.hits, "premise: operations are cached"


def test_premises() -> None:
    # The runs take both branches; for the other changes, the results differ.
    torch.set_default_dtype(torch.float64)
    largest = []
    for run in CHANGES["branch of the program"]:
        gradient(run._replace(loss=lambda z: largest.append(z.detach().abs().max().item()) or cubes(z)), None)
    assert (largest[0] > 4.2) != (largest[1] > 4.2)
    for change in ("sign of a zero", "type of a number", "default dtype"):
        first, second = (gradient(run, None)[1] for run in CHANGES[change])
        assert not torch.equal(first, second)


# -- mutants: cache keys without a component -----------------------------------------------------------------

_DESCRIBE, _INIT = KeyedCall._describe, KeyedCall.__init__


def _patch_describe(change: Callable[[Any, list[Any]], None]) -> dict[str, Any]:
    def wrong(self: KeyedCall, arg: Any, path: Any, fields: list[Any]) -> bool:
        known = _DESCRIBE(self, arg, path, fields)
        change(arg, fields)
        return known

    return {"_describe": wrong}


def _without_tensor_field(place: int) -> dict[str, Any]:
    def change(arg: Any, fields: list[Any]) -> None:
        if isinstance(arg, Value):
            fields[place] = None

    return _patch_describe(change)


def _without_number_field(place: int) -> dict[str, Any]:
    def change(arg: Any, fields: list[Any]) -> None:
        if isinstance(arg, (int, float)):
            fields[place] = None

    return _patch_describe(change)


def _equal_zeros(arg: Any, fields: list[Any]) -> None:
    if isinstance(arg, float):
        fields[-1] = arg


def _patch_key(change: Callable[[tuple[Any, ...]], tuple[Any, ...]]) -> dict[str, Any]:
    def wrong(self: KeyedCall, *args: Any) -> None:
        _INIT(self, *args)
        if self.key is not None:
            self.key = change(self.key)

    return {"__init__": wrong}


def _without_repeated_tensors(key: tuple[Any, ...]) -> tuple[Any, ...]:
    return key[:-1] if type(key[-1]) is tuple and type(key[-2]) is not type else key


MUTANTS = {
    "shape": _without_tensor_field(-3),
    "dimension of the samples": _without_tensor_field(-2),
    "number": _without_number_field(-1),
    "epsilon": _without_number_field(-1),
    "dimension": _without_number_field(-1),
    "type of a number": _without_number_field(-2),
    "sign of a zero": _patch_describe(_equal_zeros),
    "number of samples": _patch_key(lambda key: (key[0], None, *key[2:])),
    "default dtype": _patch_key(lambda key: (*key[:2], None, *key[3:])),
    "one tensor twice": _patch_key(_without_repeated_tensors),
}


@pytest.mark.parametrize("change", MUTANTS)
def test_a_key_without_a_component_fails(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for run in CHANGES[change]:
        check(run)  # premise: as it is, it passes
    for name, wrong in MUTANTS[change].items():
        monkeypatch.setattr(KeyedCall, name, wrong)
    seen = 0
    for turn in (1, -1):
        memo._cached.cache_clear()
        try:
            for run in CHANGES[change][::turn]:
                check(run)
        except (AssertionError, RuntimeError, IndexError):
            seen += 1
    assert seen, "the mutant passes in both orders"


# -- objects held by the cache -------------------------------------------------------------------------------


def test_the_cache_holds_no_numbers_and_no_values_of_a_block() -> None:
    gc.collect()
    before = {id(item) for item in gc.get_objects()}
    for runs in CHANGES.values():
        check(runs[0])
    gc.collect()
    new = [item for item in gc.get_objects() if id(item) not in before]
    left = [item for item in new if issubclass(type(item), Tensor) and item.device.type != "meta"]
    assert not left
    values = [item for item in new if type(item) is Value]
    assert values, "premise: the cache holds placeholders"
    for value in values:
        assert value.node is None
        assert value.full is None
        assert value.rows is None


def test_a_call_with_an_argument_of_unknown_equality_is_not_cached() -> None:
    generator = torch.Generator()
    form = KeyedCall(torch.ops.aten.mul.Tensor, (generator,), {}, 4)
    assert form.key is None
    assert memo.template(form) is None
