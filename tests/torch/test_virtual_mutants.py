"""Mutants of rules, each of which must fail a test of a case or operator, or paranoid mode."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.testing import assert_close

from superbatch.torch import virtual_batch
from superbatch.torch.virtual.ir import reductions
from superbatch.torch.virtual.ir.calls import Call, OpStrategy
from superbatch.torch.virtual.ir.reductions import First, Moments, Sums, sum_of
from superbatch.torch.virtual.rules import index_rules, shape_rules
from superbatch.torch.virtual.rules.lookup import OWN
from superbatch.torch.virtual.rules.table import ROWS
from superbatch.torch.virtual.run import memo
from superbatch.torch.virtual.trace import batch_norm, randomness
from tests.torch.coupled.cases import CASES
from tests.torch.coupled.operators import OPERATORS
from tests.torch.test_virtual_batch import check as check_case
from tests.torch.test_virtual_operators import assert_same, on_virtual_tensors, on_whole_tensors

aten: Any = torch.ops.aten
Check = Callable[[], None]
Patch = Callable[[pytest.MonkeyPatch], None]


def operator(name: str, *, paranoid: bool = False) -> Check:
    case = OPERATORS[name]

    def run() -> None:
        assert_same(case, on_virtual_tensors(case, 7, 3, paranoid=paranoid), on_whole_tensors(case, 7))

    return run


def case(name: str, *, paranoid: bool = False) -> Check:
    return lambda: check_case(CASES[name], CASES[name].microbatch, "all", paranoid=paranoid)


def masks() -> None:
    """Assert that a redrawn mask is equal, and that each micro-batch has its own."""
    scale = torch.nn.Linear(1, 1, bias=False).double()
    torch.nn.init.ones_(scale.weight)
    totals: list[Any] = []

    def loss(kept: Any) -> Any:
        totals.append(kept.detach().sum())
        return (kept * totals[0]).sum()

    with virtual_batch(scale, 16) as batch:
        loss(F.dropout(scale(batch(torch.ones(6400, 1, dtype=torch.float64))), 0.5)).backward()
    assert batch.report().repeated, "premise: the mask is drawn twice"
    assert scale.weight.grad is not None
    assert float(scale.weight.grad) == pytest.approx(float(totals[0]) ** 2, rel=1e-12)
    with virtual_batch(scale, 3200) as batch:
        mask = torch.as_tensor(F.dropout(batch(torch.ones(6400)), 0.5).numpy())
    assert not torch.equal(mask[:3200], mask[3200:])


def scatter_add() -> None:
    labels = torch.arange(14) % 4
    table, x = torch.ones(4, 3), torch.ones(14, 3)
    with virtual_batch(torch.nn.Identity(), 4) as batch:
        given: Any = batch(labels)
        found = table.scatter_add(0, given[:, None].expand(-1, 3), batch(x))
        assert_close(torch.as_tensor(found.numpy()), table.scatter_add(0, labels[:, None].expand(-1, 3), x))


def row(packet: Any, *rows: tuple[str, str]) -> Patch:
    return lambda patch: patch.setitem(ROWS, packet, list(rows))


def own(packet: Any, change: Callable[[Call, OpStrategy], OpStrategy | None]) -> Patch:
    """Return a patch that changes the strategy of an operator's own rule."""
    rule = OWN[packet]

    def wrong(call: Call) -> OpStrategy | None:
        strategy = rule(call)
        return None if strategy is None else change(call, strategy)

    return lambda patch: patch.setitem(OWN, packet, wrong)


def attribute(owner: Any, name: str, value: Any) -> Patch:
    return lambda patch: patch.setattr(owner, name, value)


def _first_only(self: Sums, microbatch: Any, outputs: list[Any]) -> None:
    if not self._sums:
        self._sums, self._dtypes = list(outputs), [output.dtype for output in outputs]


def _wrong_mean(self: Sums) -> list[Any]:
    return [total / 3 * 3 * (6 / 7) if total.dim() == 0 else total for total in self._sums]


def _without_between(self: Moments) -> list[Tensor]:
    count = sum(n for _, _, n in self._moments)
    mean = sum_of(mean * (n / count) for mean, _, n in self._moments)
    return list(self._finish(mean, sum_of(squares for _, squares, _ in self._moments), count))


def _biased(*args: Any) -> Any:
    mean, invstd, var, _ = _STATISTICS(*args)
    return [mean, invstd, var, var]


def _without_mean_term(recording: Any, inputs: Any, weight: Any, whole: Any, shard: Any) -> Any:
    mean, invstd, d_weight, d_bias = whole
    zero = recording.value(recording.wrap(d_bias) * 0)
    return _INPUT(recording, inputs, weight, [mean, invstd, d_weight, zero], shard)


def _per_row(call: Call) -> OpStrategy | None:
    """Treat a softmax over the batch as elementwise."""
    from superbatch.torch.virtual.rules.lookup import elementwise

    return elementwise(call)


def _neighboring_row(value: Any, shard: Any, start: int, stop: int, step: int, *, squeeze: bool) -> Any:
    return _ROWS(
        value,
        shard,
        start - 1 if start else start + 1,
        stop - 1 if start else stop + 1,
        step,
        squeeze=squeeze,
    )


def _added_by_each_micro_batch(call: Call, operands: Any) -> OpStrategy:
    strategy = _ADDED(call, operands)

    def run(microbatch: Any, tensors: list[Tensor]) -> Tensor:
        return strategy.run(microbatch._replace(number=0), tensors)

    return strategy._replace(run=run)


@contextmanager
def _unseeded(device: torch.device, seed: int) -> Iterator[None]:
    yield


@contextmanager
def _one_seed(device: torch.device, seed: int) -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


_STATISTICS, _INPUT = batch_norm._statistics, batch_norm._input_gradient
_ROWS, _ADDED = shape_rules._rows, index_rules._added

MUTANTS: dict[str, tuple[Patch, Check]] = {
    "samples in another dimension of the result": (row(aten.bmm, ("00", "1")), operator("bmm")),
    "a product over the batch is not summed": (row(aten.mm, ("10", "0"), ("0_", "0")), operator("mm")),
    "a sum forgets all but one micro-batch": (attribute(Sums, "add", _first_only), operator("sum of all")),
    "a sum is off by the uneven micro-batch": (
        attribute(Sums, "result", _wrong_mean),
        operator("sum of all"),
    ),
    "a variance without the term between micro-batches": (
        attribute(Moments, "result", _without_between),
        operator("var of all"),
    ),
    "BatchNorm without the term between micro-batches": (
        attribute(Moments, "result", _without_between),
        case("ResNet-20"),
    ),
    "a running variance that is not unbiased": (
        attribute(batch_norm, "_statistics", _biased),
        case("ResNet-20"),
    ),
    "BatchNorm's gradient without the mean": (
        attribute(batch_norm, "_input_gradient", _without_mean_term),
        case("ResNet-20"),
    ),
    "rows of two views concatenated": (
        attribute(reductions, "join", lambda tensors, shard: torch.cat(list(tensors), shard.dim)),
        case("SimCLR"),
    ),
    "the first view in place of the second": (
        attribute(
            shape_rules, "_blocks", lambda value, shard, first, last: _BLOCKS(value, shard, 0, last - first)
        ),
        case("SimCLR"),
    ),
    "LayerNorm's gradients from one micro-batch": (
        own(aten.native_layer_norm_backward, lambda call, strategy: strategy._replace(reduce=First)),
        operator("layer_norm"),
    ),
    "a softmax within each sample": (
        lambda patch: patch.setitem(OWN, aten._softmax, _per_row),
        operator("softmax along the batch"),
    ),
    "a neighboring row": (attribute(shape_rules, "_rows", _neighboring_row), operator("select of the batch")),
    "the target is added by each micro-batch": (
        attribute(index_rules, "_added", _added_by_each_micro_batch),
        scatter_add,
    ),
    "a sum without a reduction, in paranoid mode": (
        own(aten.sum, lambda call, strategy: strategy._replace(reduce=First)),
        operator("sum of all", paranoid=True),
    ),
    "other random numbers when redrawn": (
        attribute(randomness, "seeded", _unseeded),
        masks,
    ),
    "one seed for all micro-batches": (attribute(randomness, "seeded", _one_seed), masks),
}
_BLOCKS = shape_rules._blocks


@pytest.fixture(autouse=True)
def empty_cache() -> Iterator[None]:
    """Clear the process-wide cache of strategies, which has those of wrong rules."""
    yield
    memo._cached.cache_clear()


@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_rule_fails(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    patch, check = MUTANTS[name]
    check()  # premise: the rule as it is passes
    patch(monkeypatch)
    memo._cached.cache_clear()
    with pytest.raises((AssertionError, RuntimeError)):
        check()
