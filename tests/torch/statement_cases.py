"""Models, batches and losses with known correct declarations, in every precision of training."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from superbatch.batch.tree import plan
from superbatch.torch import count_tokens, sample_weights
from superbatch.torch.checks.checked import Checked
from superbatch.torch.checks.declared_loss import check_declaration
from superbatch.torch.checks.probing.problem import Problem

Net = Callable[[], nn.Module]
LENGTHS = [5, 1, 2, 7, 3, 6, 4, 7]
WORDS, TIMES, FEATURES, CLASSES = 11, 8, 6, 5


def check(
    model: nn.Module, loss_fn: Callable[[Any], Any], batch: Any, *, size: int = 4, **declared: Any
) -> Checked:
    """Check a declaration on the micro-batches of a batch, as the first window does."""
    splitter = plan(batch)
    microbatches = [
        splitter.take(at, min(at + size, splitter.samples)) for at in range(0, splitter.samples, size)
    ]
    return check_declaration(Problem(model, loss_fn, **declared), microbatches)


# -- precisions -------------------------------------------------------------------------------------------


class TensorFloat32(TorchDispatchMode):
    """Rounds the factors of float32 products to 10 bits of mantissa, as TF32 does on a GPU."""

    PRODUCTS = ("aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm", "aten.convolution")

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func).startswith(self.PRODUCTS):
            args = tree_map(round_mantissa, args)
        return func(*args, **(kwargs or {}))


def round_mantissa(x: Any, bits: int = 10) -> Any:
    if not isinstance(x, Tensor) or x.dtype is not torch.float32:
        return x
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp((mantissa * 2.0 ** (bits + 1)).round() / 2.0 ** (bits + 1), exponent)


class RoundedProduct(torch.autograd.Function):
    """Product with factors of 10 bits of mantissa in any dtype: float64 does not remove this rounding."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _short(x) @ _short(weight).T

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        (gradient,), (x, weight) = gradients, ctx.saved_tensors
        short = _short(gradient)
        return short @ _short(weight), short.flatten(0, -2).T @ _short(x).flatten(0, -2)


def _short(x: Tensor) -> Tensor:
    mantissa, exponent = torch.frexp(x.double())
    return torch.ldexp((mantissa * 2**11).round() / 2**11, exponent).to(x.dtype)


class ShortLinear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        out = RoundedProduct.apply(input, self.weight)
        assert isinstance(out, Tensor)
        return out + self.bias


class Precision:
    """Dtype of parameters and batch, and the context of the forward."""

    def __init__(
        self, dtype: torch.dtype, *, autocast: torch.dtype | None = None, tf32: bool = False
    ) -> None:
        self.dtype, self.autocast, self.tf32 = dtype, autocast, tf32

    @contextmanager
    def forward(self) -> Iterator[None]:
        with torch.autocast("cpu", self.autocast, enabled=self.autocast is not None):
            yield

    @contextmanager
    def around(self) -> Iterator[None]:
        if self.tf32:
            with TensorFloat32():
                yield
        else:
            yield


PRECISIONS = {
    "float64": Precision(torch.float64),
    "float32": Precision(torch.float32),
    "bfloat16": Precision(torch.bfloat16),
    "float16": Precision(torch.float16),
    "autocast": Precision(torch.float32, autocast=torch.bfloat16),
    "tf32": Precision(torch.float32, tf32=True),
}


# -- models of rows ---------------------------------------------------------------------------------------


class Residual(nn.Module):
    def __init__(self, norm: Callable[[int], nn.Module], width: int = 24) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(norm(width), nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))
            for _ in range(3)
        )
        self.last = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for block in self.blocks:
            h = h + block(h)
        return self.last(h)


class Images(nn.Module):
    """Convolutions over rows, reshaped to small images."""

    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.spread = nn.Linear(FEATURES, 2 * 36)
        self.body = nn.Sequential(
            nn.Conv2d(2, 8, 3, padding=1),
            norm(8),
            nn.ReLU(),
            nn.Conv2d(8, 8, 3, stride=2),
            norm(8),
            nn.ReLU(),
        )
        self.last = nn.Linear(8 * 4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.body(self.spread(x).view(-1, 2, 6, 6)).flatten(1))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(FEATURES, 20)
        self.last = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(functional.linear(self.shared(x).tanh(), self.shared.weight.T) + x)


class Complex(nn.Module):
    """Complex products with complex gradients; 16-bit dtypes have none."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.randn(FEATURES, 9, dtype=dtype.to_complex()))
        self.last = nn.Linear(9, CLASSES, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.last((x.to(self.turn.dtype) @ self.turn).abs())


def deep() -> nn.Module:
    widths = [FEATURES, *[16] * 6, CLASSES]
    layers = [(nn.Linear(a, b), nn.ReLU()) for a, b in itertools.pairwise(widths)]
    return nn.Sequential(*[part for pair in layers for part in pair][:-1])


def short_products() -> nn.Module:
    return nn.Sequential(ShortLinear(FEATURES, 32), nn.Tanh(), ShortLinear(32, CLASSES))


def spectral_norm() -> nn.Module:
    """Return a model in evaluation mode: in training mode each forward runs a step of power iteration."""
    norm = nn.utils.parametrizations.spectral_norm
    return nn.Sequential(norm(nn.Linear(FEATURES, 32)), nn.SiLU(), nn.Linear(32, CLASSES)).eval()


ROW_MODELS: dict[str, Net] = {
    "MLP": lambda: nn.Sequential(nn.Linear(FEATURES, 64), nn.ReLU(), nn.Linear(64, CLASSES)),
    "deep ReLU": deep,
    "dropout": lambda: nn.Sequential(
        nn.Linear(FEATURES, 64), nn.ReLU(), nn.Dropout(0.4), nn.Linear(64, CLASSES)
    ),
    "LayerNorm": lambda: Residual(nn.LayerNorm),
    "RMSNorm": lambda: Residual(nn.RMSNorm),
    "GroupNorm images": lambda: Images(lambda c: nn.GroupNorm(2, c)),
    "InstanceNorm images": lambda: Images(lambda c: nn.InstanceNorm2d(c, affine=True)),
    "tied weights": Tied,
    "short products": short_products,
    "weight norm": lambda: nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Linear(FEATURES, 32)), nn.SiLU(), nn.Linear(32, CLASSES)
    ),
    "spectral norm": spectral_norm,
}  # fmt: skip


def row_batch(dtype: torch.dtype, samples: int = 8) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(samples, FEATURES, generator=draw)
    soft = torch.randn(samples, CLASSES, generator=draw)
    return {
        "x": x.to(dtype),
        "label": torch.randint(0, CLASSES, (samples,), generator=draw),
        "soft": soft.to(dtype),
        "importance": (0.1 + 3 * torch.rand(samples, generator=draw)).to(dtype),
    }


def focal(out: Tensor, batch: dict[str, Tensor]) -> Tensor:
    each = functional.cross_entropy(
        out.float() if out.dtype.itemsize == 2 else out, batch["label"], reduction="none"
    )
    return ((1 - (-each).exp()) ** 2 * each).mean()


def by_importance(out: Tensor, batch: dict[str, Tensor]) -> Tensor:
    weight = batch["importance"]
    return (weight * (out - batch["soft"]).square().mean(1)).sum() / weight.sum()


def mean_of(loss: Callable[..., Tensor], target: str, **options: Any) -> Callable[..., Tensor]:
    return lambda out, batch: loss(out, batch[target], **options)


ROW_LOSSES: dict[str, tuple[Callable[[Tensor, Any], Tensor], dict[str, Any]]] = {
    "cross entropy": (mean_of(functional.cross_entropy, "label"), {}),
    "smoothed labels": (mean_of(functional.cross_entropy, "label", label_smoothing=0.1), {}),
    "mean square": (mean_of(functional.mse_loss, "soft"), {}),
    "sum of squares": (mean_of(functional.mse_loss, "soft", reduction="sum"), {"reduction": "sum"}),
    "Huber": (mean_of(functional.huber_loss, "soft"), {}),
    "binary": (
        lambda out, b: functional.binary_cross_entropy_with_logits(out, b["soft"].sigmoid()), {},
    ),
    "focal": (focal, {}),
    "KL": (
        lambda out, b: functional.kl_div(
            out.log_softmax(1), b["soft"].log_softmax(1), log_target=True, reduction="batchmean"
        ),
        {},
    ),
    "cosine": (lambda out, b: (1 - functional.cosine_similarity(out, b["soft"])).mean(), {}),
    "weighted samples": (by_importance, {"weight": sample_weights("importance")}),
    "two tasks": (
        lambda out, b: functional.cross_entropy(out, b["label"]) + 0.3 * (out - b["soft"]).abs().mean(), {},
    ),
}  # fmt: skip


# -- models of tokens -------------------------------------------------------------------------------------


class Tokens(nn.Module):
    """Embedding, a body over (samples, times, width), and logits over words."""

    def __init__(self, body: Callable[[int], nn.Module], *, tied: bool = False, sparse: bool = False) -> None:
        super().__init__()
        width = 16
        self.embed = nn.Embedding(WORDS, width, sparse=sparse)
        self.body = body(width)
        self.out = nn.Linear(width, WORDS)
        if tied:
            self.out.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        h = self.body(self.embed(ids))
        return self.out(h[0] if isinstance(h, tuple) else h)


class Attention(nn.Module):
    """Causal attention with a bias of keys, whose gradient is only rounding error."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.norm = nn.LayerNorm(width)

    def forward(self, h: Tensor) -> Tensor:
        x = self.norm(h)
        q, k, v = (
            layer(x).unflatten(2, (2, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return h + mixed.transpose(1, 2).flatten(2)


class Experts(nn.Module):
    """Top-2 of four experts for each token."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, 4, bias=False)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.routing = torch.zeros(0)

    def forward(self, h: Tensor) -> Tensor:
        routing = self.gate(h).softmax(-1)
        best, chosen = routing.topk(2, -1)
        shares = best / best.sum(-1, keepdim=True)
        out = h
        for number, expert in enumerate(self.experts):
            out = out + (shares * (chosen == number)).sum(-1, keepdim=True) * expert(h)
        return out


def encoder(width: int) -> nn.Module:
    layer = nn.TransformerEncoderLayer(width, 2, 24, dropout=0.1, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


TOKEN_MODELS: dict[str, Net] = {
    "LSTM": lambda: Tokens(lambda d: nn.LSTM(d, d, batch_first=True)),
    "GRU, two layers with dropout": lambda: Tokens(
        lambda d: nn.GRU(d, d, num_layers=2, dropout=0.2, batch_first=True)
    ),
    "RNN": lambda: Tokens(lambda d: nn.RNN(d, d, batch_first=True)),
    "encoder": lambda: Tokens(encoder),
    "causal attention": lambda: Tokens(lambda d: nn.Sequential(Attention(d), Attention(d))),
    "experts": lambda: Tokens(Experts),
    "tied embedding": lambda: Tokens(lambda d: nn.Sequential(nn.Linear(d, d), nn.Tanh()), tied=True),
    "sparse embedding": lambda: Tokens(lambda d: nn.Linear(d, d), sparse=True),
}


def token_batch(lengths: Sequence[int] = LENGTHS, seed: int = 0) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, WORDS, (len(lengths), TIMES), generator=draw)
    labels = ids.clone()
    for row, length in enumerate(lengths):
        labels[row, length:] = -100
    return {"ids": ids, "labels": labels, "lengths": torch.tensor(lengths)}


def each_token(out: Tensor, batch: dict[str, Tensor]) -> Tensor:
    wide = out.float() if out.dtype.itemsize == 2 else out
    return functional.cross_entropy(wide.transpose(1, 2), batch["labels"], reduction="none")


def token_mean(out: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return functional.cross_entropy(out.flatten(0, 1), batch["labels"].flatten())


def mean_per_sample(out: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return (each_token(out, batch).sum(1) / batch["lengths"]).mean()


def guarded_mean(out: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Token mean with the common guard against division by zero."""
    kept = batch["labels"] != -100
    return each_token(out, batch).sum() / (kept.sum() + 1e-6)


def ctc(out: Tensor, batch: dict[str, Tensor]) -> Tensor:
    scores = (out.float() if out.dtype.itemsize == 2 else out).log_softmax(2).transpose(0, 1)
    given = torch.full((len(batch["ids"]),), TIMES)
    wanted = (batch["lengths"] + 2) // 3
    return functional.ctc_loss(scores, batch["ids"].clamp(min=1), given, wanted, reduction="none").mean()


TOKEN_LOSSES: dict[str, tuple[Callable[[Tensor, Any], Tensor], dict[str, Any]]] = {
    "token mean": (token_mean, {"weight": count_tokens("labels")}),
    "sum over tokens": (
        lambda out, b: each_token(out, b).sum(), {"reduction": "sum", "weight": count_tokens("labels")},
    ),
    "mean per sample": (mean_per_sample, {}),
    "guarded token mean": (guarded_mean, {"weight": count_tokens("labels")}),
    "CTC": (ctc, {}),
}  # fmt: skip
