"""Micro-batches of one sample, whose strides differ from those of the batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing import assert_close

from superbatch.torch import virtual_batch
from superbatch.torch.virtual.ir import calls
from superbatch.torch.virtual.ir.strides import canonical, in_batch_order, with_canonical_strides
from superbatch.torch.virtual.rules import norm_rules
from superbatch.torch.virtual.run import memo
from superbatch.torch.virtual.trace import batch_norm
from tests.torch.coupled import data
from tests.torch.coupled.operator_case import OperatorCase
from tests.torch.coupled.operators import ALL_OPERATORS, OPERATORS
from tests.torch.test_virtual_operators import assert_same, on_virtual_tensors, on_whole_tensors

aten: Any = torch.ops.aten
SIZES = (1, 2)  # micro-batches of five samples: one each; two, two and one


# -- strides ------------------------------------------------------------------------------------------------


def strided(x: Tensor, *strides: int) -> Tensor:
    """Return a copy of a tensor with the given strides."""
    return torch.empty_strided(x.shape, strides, dtype=x.dtype).copy_(x)


@pytest.mark.parametrize(
    ("shape", "given", "expected"),
    [
        ((1, 3, 4, 5), (3, 1, 15, 3), (60, 1, 15, 3)),
        ((1, 3, 4, 5), (60, 1, 15, 3), (60, 1, 15, 3)),
        ((1, 3, 4, 5), (0, 20, 5, 1), (60, 20, 5, 1)),
        ((1, 3, 4, 5), (1, 20, 1, 4), (60, 20, 1, 4)),
        ((1, 3, 2, 4, 5), (3, 1, 60, 15, 3), (120, 1, 60, 15, 3)),
        ((2, 1, 4, 5), (20, 7, 5, 1), (20, 20, 5, 1)),
        ((2, 3, 4, 5), (60, 1, 15, 3), (60, 1, 15, 3)),
        ((1, 3), (1, 1), (3, 1)),
        ((3, 1), (2, 9), (2, 1)),
        ((1, 1, 1), (4, 5, 6), (1, 1, 1)),
        ((0, 1, 3), (3, 9, 1), (3, 9, 1)),
    ],
)
def test_canonical_strides_of_the_same_memory(shape: Any, given: Any, expected: Any) -> None:
    x = torch.empty(200).as_strided(shape, given)
    found = canonical(x)
    assert found.stride() == expected
    assert found.data_ptr() == x.data_ptr()
    assert (found is x) == (given == expected)


@pytest.mark.parametrize("whole", ["contiguous", "channels last", "transposed"])
@pytest.mark.parametrize("given", [(60, 20, 5, 1), (3, 1, 15, 3), (60, 1, 15, 3), (0, 20, 1, 4)])
def test_a_micro_batch_gets_the_memory_order_of_the_batch(whole: str, given: Any) -> None:
    meta = torch.empty(5, 3, 4, 5, device="meta")
    if whole == "channels last":
        meta = meta.contiguous(memory_format=torch.channels_last)
    if whole == "transposed":
        meta = torch.empty(5, 3, 5, 4, device="meta").mT
    x = data.normal(1, 3, 4, 5)
    (found,) = in_batch_order([meta], lambda microbatch, tensors: tensors)(None, [strided(x, *given)])  # type: ignore[arg-type]
    assert torch.equal(found, x)
    if whole != "transposed":
        assert found.stride() == ((60, 20, 5, 1) if whole == "contiguous" else (60, 1, 15, 3))


def _batch_norm_gradients(kernel: Any, grad: Tensor, x: Tensor) -> list[Tensor]:
    mean, invstd = x.mean((0, 2, 3)), (x.var((0, 2, 3), unbiased=False) + 1e-5).rsqrt()
    weight = data.normal(x.shape[1], seed=3)
    training, wanted = True, [True, True, True]
    return kernel(grad, x, weight, None, None, mean, invstd, training, 1e-5, wanted)


def test_the_kernel_of_batch_norm_with_strides_that_it_misreads() -> None:
    x, grad = data.normal(1, 3, 4, 5), data.normal(1, 3, 4, 5, seed=1)
    kernel = aten.native_batch_norm_backward.default
    expected = _batch_norm_gradients(kernel, grad, x)
    odd = strided(grad, 3, 1, 15, 3)
    assert torch.equal(odd, grad), "premise: the same numbers"
    for of_grad, of_x in ((odd, x), (grad, strided(x, 3, 1, 15, 3)), (odd, strided(x, 3, 1, 15, 3))):
        found = _batch_norm_gradients(with_canonical_strides(kernel), of_grad, of_x)
        assert_close(found, expected, rtol=1e-12, atol=1e-12)


# -- every operator -----------------------------------------------------------------------------------------


def by_tokens(x: Tensor) -> Tensor:
    """Return an image viewed from tokens, with channels adjacent in memory."""
    return x.flatten(2).mT.contiguous().mT.view(x.shape) if x.dim() > 2 else x


def channels_last(x: Tensor) -> Tensor:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return x.contiguous(memory_format=formats[x.dim()]) if x.dim() in formats else x


def as_tokens(out: Tensor) -> Tensor:
    """Return an image as tokens, so that its gradient has channels adjacent in memory."""
    return out.flatten(2).mT if out.dim() > 2 else out


def same(x: Tensor) -> Tensor:
    return x


ORDERS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "tokens": (by_tokens, same),
    "gradients by tokens": (same, as_tokens),
    "tokens, and so are gradients": (by_tokens, as_tokens),
    "channels last": (channels_last, same),
    "channels last, gradients by tokens": (channels_last, as_tokens),
    "gradients transposed": (same, lambda out: out.mT if out.dim() > 2 else out),
    "gradients expanded": (same, lambda out: out.sum(-1, keepdim=True).expand_as(out)),
}


def ordered(case: OperatorCase, order: str) -> OperatorCase:
    """Return the case with another memory order of inputs and of gradients of outputs."""
    before, after = ORDERS[order]

    def function(*inputs: Tensor) -> Any:
        found = case.function(*(before(x) if i in case.virtual else x for i, x in enumerate(inputs)))
        return after(found) if isinstance(found, Tensor) else [after(out) for out in found]

    return dataclasses.replace(case, function=function)


def has_images(case: OperatorCase) -> bool:
    inputs = case.inputs(max(2, case.min_n))
    return not case.random and any(inputs[i].dim() > 2 for i in case.virtual)


IMAGES = [case for case in ALL_OPERATORS if has_images(case)]


def compare(case: OperatorCase, samples: int, microbatch: int, **options: Any) -> bool:
    """Compare a case with full tensors; return False if torch rejects such inputs."""
    try:
        whole = on_whole_tensors(case, samples)
    except (RuntimeError, ValueError, TypeError, IndexError):
        return False
    assert_same(case, on_virtual_tensors(case, samples, microbatch, **options), whole, 1e-10)
    return True


@pytest.mark.parametrize("order", ORDERS)
def test_operators_in_another_memory_order_on_single_samples(order: str) -> None:
    """Every eighth operator; the slow `test_each_operator_in_each_order` has them all."""
    chosen = IMAGES[len(order) % 8 :: 8]
    ran = [compare(ordered(case, order), 5, 1) for case in chosen]
    assert sum(ran) > len(ran) / 2, "torch rejects too many cases"


_MISREAD = ("norm", "conv", "pool", "attention", "upsample", "pixel")


@pytest.mark.parametrize("order", ORDERS)
def test_kernels_that_read_strides(order: str) -> None:
    chosen = [case for case in IMAGES if any(name in case.name for name in _MISREAD)][::2]
    ran = [compare(ordered(case, order), 5, 2) for case in chosen]
    assert len(ran) > 20 and sum(ran) > len(ran) / 2


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("case", IMAGES, ids=str)
def test_each_operator_in_each_order(case: OperatorCase, order: str) -> None:
    found = ordered(case, order)
    ran = [compare(found, max(5, case.min_n), size, paranoid=size == 2) for size in SIZES]
    if not any(ran):
        pytest.skip("torch rejects such inputs")


# -- models that convert between images and tokens ----------------------------------------------------------


class LinearNorm(nn.Module):
    """As in LeViT: a linear layer, and BatchNorm over its tokens."""

    def __init__(self, features: int, out: int) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(features, out, bias=False), nn.BatchNorm1d(out)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        return self.norm(x.flatten(0, 1)).reshape_as(x)


class TokensOfImages(nn.Module):
    """As LeViT: attention over tokens, BatchNorm after each linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8)
        self.qkv, self.out = LinearNorm(8, 24), LinearNorm(8, 8)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.hardswish(self.norm(self.stem(x))).flatten(2).transpose(1, 2)
        samples, tokens, _ = x.shape
        q, k, v = self.qkv(x).view(samples, tokens, 2, 12).split([4, 4, 4], 3)
        q, k, v = q.permute(0, 2, 1, 3), k.permute(0, 2, 3, 1), v.permute(0, 2, 1, 3)
        mixed = ((q @ k) / 2).softmax(-1) @ v
        x = x + self.out(F.hardswish(mixed.transpose(1, 2).reshape(samples, tokens, 8)))
        return self.head(x.mean(1))


class ImagesOfTokens(nn.Module):
    """As XCiT: BatchNorm on images, and on tokens reshaped to images."""

    def __init__(self, norm: Callable[[int], nn.Module] = nn.BatchNorm2d) -> None:
        super().__init__()
        self.embed, self.norm0 = nn.Conv2d(3, 8, 2, 2, bias=False), norm(8)
        self.qkv, self.norm1 = nn.Linear(8, 24), nn.LayerNorm(8)
        self.conv1, self.norm2 = nn.Conv2d(8, 8, 3, padding=1, groups=8), norm(8)
        self.conv2, self.head = nn.Conv2d(8, 8, 3, padding=1), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm0(self.embed(x))
        samples, channels, height, width = x.shape
        x = x.flatten(2).transpose(1, 2)
        q, k, v = self.qkv(self.norm1(x)).reshape(samples, -1, 3, 2, 4).permute(2, 0, 3, 4, 1).unbind(0)
        mixed = (F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT).softmax(-1) @ v
        x = x + mixed.permute(0, 3, 1, 2).reshape(samples, -1, channels)
        image = x.permute(0, 2, 1).reshape(samples, channels, height, width)
        image = self.conv2(self.norm2(F.gelu(self.conv1(image))))
        x = x + image.reshape(samples, channels, -1).permute(0, 2, 1)
        return self.head(x[:, 0] + x.mean(1))


class PooledThenTokens(nn.Module):
    """As EfficientFormer: blocks of pooling and BatchNorm on images, then attention on tokens."""

    def __init__(self, norm: Callable[[int], nn.Module] = nn.BatchNorm2d) -> None:
        super().__init__()
        self.stem, self.norm0 = nn.Conv2d(3, 8, 3, 2, 1), norm(8)
        self.fc1, self.norm1 = nn.Conv2d(8, 16, 1), norm(16)
        self.fc2, self.norm2 = nn.Conv2d(16, 8, 1), norm(8)
        self.scale = nn.Parameter(torch.full((8,), 0.5))
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm0(self.stem(x)))
        x = x + self.scale.view(-1, 1, 1) * (F.avg_pool2d(x, 3, 1, 1) - x)
        x = x + self.norm2(self.fc2(F.gelu(self.norm1(self.fc1(x)))))
        tokens = x.flatten(2).transpose(1, 2)
        tokens = tokens + self.attention(tokens, tokens, tokens, need_weights=False)[0]
        return self.head(tokens.mean(1))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "LeViT": TokensOfImages,
    "XCiT": ImagesOfTokens,
    "EfficientFormer": PooledThenTokens,
    "XCiT with GroupNorm": lambda: ImagesOfTokens(lambda channels: nn.GroupNorm(2, channels)),
    "EfficientFormer with GroupNorm": lambda: PooledThenTokens(lambda channels: nn.GroupNorm(4, channels)),
    "XCiT, BatchNorm frozen": lambda: _frozen(ImagesOfTokens()),
}


def _frozen(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
    return model


def _gradients(model: nn.Module, microbatch: int | None, last: bool) -> dict[str, Tensor]:
    x = data.normal(5, 3, 8, 8)
    if last:
        x = x.contiguous(memory_format=torch.channels_last)
    target = data.integers(4, 5)
    model.zero_grad()
    if microbatch is None:
        F.cross_entropy(model(x), target).backward()
    else:
        with virtual_batch(model, microbatch) as batch:
            F.cross_entropy(model(batch(x)), batch(target)).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def largest_error(name: str, microbatch: int, *, last: bool = False) -> float:
    torch.manual_seed(0)
    model = MODELS[name]().double()
    whole = _gradients(model, None, last)
    found = _gradients(model, microbatch, last)
    assert found.keys() == whole.keys() == dict(model.named_parameters()).keys()
    scale = max(float(g.norm()) for g in whole.values())
    assert scale > 1e-3, "premise: gradients are not zero"
    # The gradient of a bias before BatchNorm is only rounding: compare it with the largest norm.
    return max(float((found[n] - g).norm()) / max(float(g.norm()), 1e-3 * scale) for n, g in whole.items())


@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels last"])
@pytest.mark.parametrize("microbatch", SIZES)
@pytest.mark.parametrize("name", MODELS)
def test_models_between_images_and_tokens(name: str, microbatch: int, last: bool) -> None:
    assert largest_error(name, microbatch, last=last) < 1e-11


# -- mutants: unchanged strides -----------------------------------------------------------------------------


@pytest.fixture
def unchanged_strides(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(batch_norm, "_kernel", aten.native_batch_norm.default)
    monkeypatch.setattr(batch_norm, "_backward_kernel", aten.native_batch_norm_backward.default)
    for module in (calls, norm_rules):
        monkeypatch.setattr(module, "with_kernel_strides", lambda func, metas, run: run)
    caches = (memo._cached, batch_norm._sums, batch_norm._normalised)
    for cached in caches:
        cached.cache_clear()
    yield
    for cached in caches:
        cached.cache_clear()


def _torch_misreads() -> bool:
    """Return True if the kernel of this torch misreads such strides."""
    x, grad = data.normal(1, 3, 4, 5), data.normal(1, 3, 4, 5, seed=1)
    kernel = aten.native_batch_norm_backward.default
    found = _batch_norm_gradients(kernel, strided(grad, 3, 1, 15, 3), x)
    return not torch.allclose(found[0], _batch_norm_gradients(kernel, grad, x)[0])


@pytest.mark.usefixtures("unchanged_strides")
@pytest.mark.parametrize("name", ["LeViT", "XCiT", "EfficientFormer"])
def test_unchanged_strides_give_wrong_gradients(name: str) -> None:
    if not _torch_misreads():
        pytest.skip("the kernel of this torch reads such strides correctly")
    assert largest_error(name, 1) > 1e-3


@pytest.mark.usefixtures("unchanged_strides")
def test_operators_detect_unchanged_strides() -> None:
    if not _torch_misreads():
        pytest.skip("the kernel of this torch reads such strides correctly")
    seen = []
    for case in IMAGES:
        if "norm" not in case.name:
            continue
        try:
            compare(ordered(case, "gradients by tokens"), 5, 1)
        except (AssertionError, RuntimeError):
            seen.append(case.name)
    assert len(seen) > 1, seen
    assert set(seen) <= OPERATORS.keys()
