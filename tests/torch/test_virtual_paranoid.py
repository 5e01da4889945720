"""Paranoid mode detects every wrong operation: forward, backward, views, writes and statistics."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from superbatch.torch import virtual_batch
from superbatch.torch.virtual.run import memo
from superbatch.torch.virtual.trace import (
    aliases,
    batch_norm,
    composites,
    dispatch,
    paranoid_composites,
    recording,
)
from superbatch.torch.virtual.trace.paranoia import WrongRuleError
from superbatch.torch.virtual.trace.recording import Recording
from tests.torch.coupled import data
from tests.torch.coupled.operator_case import OperatorCase
from tests.torch.coupled.operators import ALL_OPERATORS, OPERATORS
from tests.torch.test_virtual_operators import SAMPLES, on_virtual_tensors

aten: Any = torch.ops.aten


def clear_caches() -> None:
    """Clear the caches of rules."""
    batch_norm_caches = (batch_norm._sums, batch_norm._normalised, batch_norm._moments)
    for cached in (memo._cached, dispatch._kind_of, composites.composite_of, *batch_norm_caches):
        cached.cache_clear()


@pytest.fixture(autouse=True)
def empty_caches() -> Iterator[None]:
    clear_caches()
    yield
    clear_caches()


# -- each recorded operation, wrong by a factor and a constant -----------------------------------------------


def bad(result: Any) -> Any:
    """Return results with an error in each number."""
    if isinstance(result, (list, tuple)):
        return type(result)(bad(item) for item in result) if type(result) in (list, tuple) else bad([*result])
    if not isinstance(result, Tensor):
        return result
    if result.dtype is torch.bool:
        return ~result
    return result * 1.5 + 0.375 if result.is_floating_point() or result.is_complex() else result + 1


class MutatedRecording:
    """Patch of `Recording._node` that collects recorded operations and makes one give wrong results.

    Attributes:
        seen: names of recorded operations.
        wrong: name of the wrong operation.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.seen: dict[str, None] = {}
        self.wrong: str | None = None
        plain = Recording._node

        def node(given: Recording, func: Any, operands: Any, strategy: Any) -> Any:
            self.seen[str(func)] = None
            if str(func) == self.wrong:
                run = strategy.run
                strategy = strategy._replace(run=lambda microbatch, tensors: bad(run(microbatch, tensors)))
            return plain(given, func, operands, strategy)

        patch.setattr(Recording, "_node", node)


# Random results, except of dropout, and those of empty() have no reference.
_ARBITRARY = ("empty", "rand", "bernoulli", "normal", "uniform", "multinomial", "exponential", "geometric")
_ARBITRARY += ("rrelu", "poisson", "cauchy", "random", "dropout_mask")


def is_arbitrary(name: str) -> bool:
    packet = name.split(".")[1] if "." in name else name
    return any(word in packet for word in _ARBITRARY) and "norm" not in packet.replace("normal", "")


def undetected(cases: list[OperatorCase], mutated: MutatedRecording) -> tuple[list[str], set[str]]:
    """Return the operations whose errors paranoid mode misses, and all operations tried."""
    found: list[str] = []
    tried: set[str] = set()
    for case in cases:
        samples = max(SAMPLES, case.min_n)
        mutated.wrong, mutated.seen = None, {}
        on_virtual_tensors(case, samples, 3, paranoid=True)
        for name in [name for name in mutated.seen if name not in tried and not is_arbitrary(name)]:
            tried.add(name)
            mutated.wrong = name
            try:
                on_virtual_tensors(case, samples, 3, paranoid=True)
            except WrongRuleError:
                continue
            except (RuntimeError, IndexError, ValueError):  # for example wrong indices
                continue
            found.append(f"{name} in {case}")
    return found, tried


def test_errors_of_operations_in_some_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    found, tried = undetected(ALL_OPERATORS[::8], MutatedRecording(monkeypatch))
    assert not found
    assert len(tried) > 80


@pytest.mark.slow
def test_errors_of_operations_in_all_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    found, tried = undetected(ALL_OPERATORS, MutatedRecording(monkeypatch))
    assert not found
    assert len(tried) > 250


# -- a mutant for each family --------------------------------------------------------------------------------


class Everything(nn.Module):
    """Model with BatchNorm in training and frozen, InstanceNorm, attention, indexing, views and writes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.frozen = nn.Conv2d(2, 4, 3, 2, 1), nn.BatchNorm2d(4), nn.BatchNorm2d(4)
        self.instance, self.embed = nn.InstanceNorm2d(4, affine=True), nn.Embedding(6, 4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor, words: Tensor) -> Tensor:
        x = self.instance(self.frozen(self.norm(self.conv(x))))
        tokens = x.flatten(2).mT + self.embed(words)[:, None]
        tokens = tokens + self.attention(tokens, tokens, tokens, need_weights=False)[0]
        first, second = tokens.split([1, tokens.shape[1] - 1], 1)
        pooled = first[:, 0] + second.mean(1)
        pooled = pooled.clone()
        pooled[:, 1] += pooled[:, 0]
        table = pooled[torch.tensor([0, 2, 1])]
        return self.head(pooled) + table.mean(0).mean()


def train(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    model = Everything().double()
    model.frozen.eval()
    x, words, target = data.normal(5, 2, 6, 6), data.integers(6, 5), data.integers(3, 5)
    with virtual_batch(model, 2, **options) as batch:
        out = model(batch(x), batch(words))
        (F.cross_entropy(out, batch(target)) + out.mean()).backward()
    return model


def doubled(results: Any) -> Any:
    """Double the first result of a composite operation."""
    if isinstance(results, Tensor):
        return results * 2
    first = next(i for i, item in enumerate(results) if isinstance(item, Tensor))
    return type(results)([*results[:first], results[first] * 2, *results[first + 1 :]])


Patch = Callable[[pytest.MonkeyPatch], None]


def composite(packet: Any) -> Patch:
    """Return a patch that doubles the first result of a composite operation."""

    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        plain = composites.COMPOSITES[packet]

        def wrong(*args: Any, **kwargs: Any) -> Any:
            results = plain(*args, **kwargs)
            return results if results is NotImplemented else doubled(results)

        monkeypatch.setitem(composites.COMPOSITES, packet, wrong)

    return patch


def recorded(name: str) -> Patch:
    """Return a patch that makes a recorded operation wrong."""

    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        MutatedRecording(monkeypatch).wrong = name

    return patch


def _input_gradient_doubled(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = batch_norm._input_gradient

    def wrong(given: Recording, *args: Any) -> Any:
        return given.value(given.wrap(plain(given, *args)) * 2)

    monkeypatch.setattr(batch_norm, "_input_gradient", wrong)


def _variance_not_unbiased(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = batch_norm._statistics

    def wrong(*args: Any) -> Any:
        mean, invstd, var, _ = plain(*args)
        return [mean, invstd, var, var]

    monkeypatch.setattr(batch_norm, "_statistics", wrong)


def _momentum_inverted(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = batch_norm._update
    monkeypatch.setattr(batch_norm, "_update", lambda r, b, v, momentum: plain(r, b, v, 1 - momentum))


def _next_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = composites.LISTS[aten.split_with_sizes.default]

    def wrong(given: Any, x: Any, sizes: Any, dim: int = 0) -> Any:
        return plain(given, x.flip(dim), sizes, dim)

    monkeypatch.setitem(composites.LISTS, aten.split_with_sizes.default, wrong)


def _write_of_a_view_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aliases, "_base_after_write", lambda given, step, base, new: base)


FAMILIES: dict[str, Patch] = {
    "BatchNorm": composite(aten.native_batch_norm),
    "BatchNorm's backward": composite(aten.native_batch_norm_backward),
    "BatchNorm's input gradient": _input_gradient_doubled,
    "BatchNorm's running variance": _variance_not_unbiased,
    "BatchNorm's momentum": _momentum_inverted,
    "BatchNorm frozen": recorded("batch_norm"),
    "BatchNorm frozen, backward": recorded("batch_norm backward"),
    "BatchNorm's sums": recorded("batch_norm sums"),
    "BatchNorm's coefficients": recorded("batch_norm coefficients"),
    "InstanceNorm": recorded("instance_norm"),
    "InstanceNorm's backward": recorded("instance_norm backward"),
    "means": composite(aten.mean),
    "classification losses": composite(aten.nll_loss_forward),
    "classification losses, backward": recorded("aten.nll_loss_backward.default"),
    "indexing": recorded("aten.index.Tensor"),
    "lists of views": _next_slice,
    "writes into views": _write_of_a_view_lost,
    "attention": recorded("aten._scaled_dot_product_flash_attention_for_cpu.default"),
    "attention's backward": recorded("aten._scaled_dot_product_flash_attention_for_cpu_backward.default"),
    "convolution": recorded("aten.convolution.default"),
    "convolution's backward": recorded("aten.convolution_backward.default"),
    "products": recorded("aten.mm.default"),
    "views": recorded("aten.transpose.int"),
    "sums": recorded("aten.sum.dim_IntList"),
    "elementwise": recorded("aten.add.Tensor"),
    "embedding": recorded("aten.embedding.default"),
    "embedding's backward": recorded("aten.embedding_dense_backward.default"),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.sampled(2)
def test_a_mutant_of_each_family_is_detected(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    FAMILIES[family](monkeypatch)
    train()  # premise: the mutant runs
    clear_caches()
    with pytest.raises(WrongRuleError):
        train(paranoid=True)


@pytest.mark.parametrize("packet", [aten.index.Tensor, aten.index_put], ids=str)
def test_errors_of_composite_indexing(packet: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of the batch are read and written by labels."""
    plain, done = composites.COMPOSITES[packet], []

    def wrong(*args: Any, **kwargs: Any) -> Any:
        results = plain(*args, **kwargs)
        done.append(results is not NotImplemented)
        return results if results is NotImplemented else doubled(results)

    monkeypatch.setitem(composites.COMPOSITES, packet, wrong)
    seen = 0
    for case in [case for case in ALL_OPERATORS if "ind" in case.name or "label" in case.name]:
        done.clear()
        try:
            on_virtual_tensors(case, max(SAMPLES, case.min_n), 3, paranoid=True)
        except WrongRuleError:
            seen += 1
        else:
            assert not any(done), f"{case} ran as a composite, and doubled"
    assert seen


def test_dropout_without_its_factor(monkeypatch: pytest.MonkeyPatch) -> None:
    x = data.normal(5, 6)

    def dropped() -> None:
        with virtual_batch(nn.Identity(), 2, paranoid=True) as batch:
            given: Any = batch(x)
            torch.native_dropout(given, 0.25, train=True)

    dropped()
    plain = paranoid_composites.compared

    def wrong(given: Any, func: Any, args: Any, kwargs: Any, do: Any) -> Any:
        def without_factor(*inputs: Any) -> Any:
            out, mask = do(*inputs)
            return out * 0.75, mask

        return plain(given, func, args, kwargs, without_factor if func is aten.native_dropout.default else do)

    monkeypatch.setattr(dispatch, "compared", wrong)
    with pytest.raises(WrongRuleError, match="native_dropout"):
        dropped()


def test_paranoid_mode_changes_nothing() -> None:
    """Premise of the mutants: the correct rules pass."""
    plain, careful = train(), train(paranoid=True)
    for (name, one), (_, other) in zip(plain.state_dict().items(), careful.state_dict().items(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12, msg=name)
    assert all(p.grad is not None and float(p.grad.norm()) > 0 for p in careful.parameters())


def test_without_the_check_of_composites_a_wrong_gradient_of_batch_norm_passes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Mutant of the check: only recorded operations are compared."""
    _input_gradient_doubled(monkeypatch)
    monkeypatch.setattr(
        dispatch, "compared", lambda given, func, args, kwargs, do: do(given, func, args, kwargs)
    )
    train(paranoid=True)


def test_text_of_the_error() -> None:
    case = OPERATORS["sum of all"]
    with pytest.MonkeyPatch.context() as patch:
        MutatedRecording(patch).wrong = "aten.sum.default"
        message = r"Output 0 of aten\.sum\.default on shapes .* with samples in .*largest difference .*Report"
        with pytest.raises(WrongRuleError, match=message):
            on_virtual_tensors(case, 7, 3, paranoid=True)
    assert recording.paranoia.WrongRuleError is WrongRuleError
