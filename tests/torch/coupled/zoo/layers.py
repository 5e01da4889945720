"""Layers without coupling: each alone, and followed by BatchNorm, which couples all samples."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.torch.coupled import data
from tests.torch.coupled.case import Apply, Case
from tests.torch.coupled.zoo.architectures import cross_entropy

Data = Callable[[int], dict[str, Tensor]]


def _cases(name: str, build: Callable[[], nn.Module], batch: Data, *, random: bool = False) -> list[Case]:
    """Cases of the layer, flattened, with a linear head; the second adds BatchNorm and a second head."""

    def alone() -> nn.Module:
        layer = build().double()
        with torch.random.fork_rng(devices=[]):
            width = layer(batch(2)["x"]).flatten(1).shape[1]
        return nn.Sequential(layer, nn.Flatten(), nn.Linear(width, 3))

    def normed() -> nn.Module:
        layer, flatten, head = alone()  # pyright: ignore[reportGeneralTypeIssues]  # a Sequential
        norm = nn.BatchNorm1d(3, eps=0.1)  # well conditioned even if a layer makes the samples nearly equal
        return nn.Sequential(layer, flatten, head, norm, nn.Tanh(), nn.Linear(3, 3))

    shared = {"data": batch, "loss": cross_entropy, "random": random}
    return [
        Case(name=name, build=alone, coupled=False, min_n=1, **shared),
        Case(name=f"{name}, then BatchNorm", build=normed, coupled=True, buffers=True, **shared),
    ]


def volumes(n: int) -> dict[str, Tensor]:
    return {"x": data.normal(n, 2, 4, 5, 6), "y": data.integers(3, n)}


def matrices(n: int) -> dict[str, Tensor]:
    """Symmetric positive definite 4 x 4 matrices."""
    a = data.normal(n, 4, 4)
    return {"x": a @ a.mT + torch.eye(4, dtype=a.dtype), "y": data.integers(3, n)}


def ids(n: int) -> dict[str, Tensor]:
    return {"x": data.integers(11, n, 7), "y": data.integers(3, n)}


def _image(function: Callable[..., Any], **parts: Any) -> Callable[[], nn.Module]:
    """Return a builder of a convolution to 4 channels of 8 x 8, followed by the function."""

    def build() -> nn.Module:
        made = {name: part() for name, part in parts.items()}
        conv = nn.Conv2d(3, 4, 3, padding=1)
        return Apply(lambda net, x: function(net, net.conv(x)), conv=conv, **made)

    return build


def _steps(function: Callable[..., Any], **parts: Any) -> Callable[[], nn.Module]:
    """Return a builder of a linear layer on each of 7 steps (8 features), followed by the function."""

    def build() -> nn.Module:
        made = {name: part() for name, part in parts.items()}
        return Apply(lambda net, x: function(net, net.first(x)), first=nn.Linear(8, 8), **made)

    return build


def _matrix(function: Callable[[Tensor], Tensor]) -> Callable[[], nn.Module]:
    """Return a builder of a learnt congruence of a symmetric matrix, followed by the function."""

    def forward(net: Any, x: Tensor) -> Tensor:
        return function(net.turn @ x @ net.turn.T)

    return lambda: Apply(forward, turn=nn.Parameter(torch.eye(4)))


def spatial_transformer(net: Any, h: Tensor) -> Tensor:
    theta = net.locate(h.mean((2, 3))).view(-1, 2, 3) * 0.1 + torch.eye(2, 3, dtype=h.dtype)
    return F.grid_sample(h, F.affine_grid(theta, list(h.shape), align_corners=False), align_corners=False)


def self_attention(net: Any, h: Tensor) -> Tensor:
    return net.attend(h, h, h, need_weights=False)[0]


def self_attention_with_weights(net: Any, h: Tensor) -> Tensor:
    out, weights = net.attend(h, h, h)
    return out + weights.sum(-1, keepdim=True) * weights[:, :, :1]


def self_attention_time_first(net: Any, h: Tensor) -> Tensor:
    h = h.transpose(0, 1)
    return net.attend(h, h, h, need_weights=False)[0].transpose(0, 1)


def causal_attention(net: Any, h: Tensor) -> Tensor:
    """Causal attention of a GPT block as in minGPT, by `view` and `transpose`."""
    b, t, c = h.size()
    q, k, v = net.qkv(h).split(c, dim=2)
    q, k, v = (part.view(b, t, 2, c // 2).transpose(1, 2) for part in (q, k, v))
    scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
    scores = scores.masked_fill(net.mask[:, :, :t, :t] == 0, float("-inf"))
    return (F.softmax(scores, dim=-1) @ v).transpose(1, 2).contiguous().view(b, t, c)


def fused_causal_attention(net: Any, h: Tensor) -> Tensor:
    q, k, v = net.qkv(h).view(*h.shape[:2], 3, 2, 4).permute(2, 0, 3, 1, 4)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(h.shape)


def masked_attention(net: Any, h: Tensor) -> Tensor:
    """Attention with a mask for each sample, computed from its values."""
    keep = (h.mean(-1) > -0.5)[:, None, None, :] | torch.eye(7, dtype=torch.bool)
    q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in net.qkv(h).chunk(3, -1))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=keep, scale=0.3).transpose(1, 2).flatten(2)


def rotary(net: Any, h: Tensor) -> Tensor:
    """Rotary positions by complex numbers, as in LLaMA's reference."""
    angles = torch.outer(torch.arange(h.shape[1]), 10.0 ** -torch.arange(4)).to(h.dtype)
    turn = torch.polar(torch.ones_like(angles), angles)
    turned = torch.view_as_complex(h.reshape(*h.shape[:-1], -1, 2)) * turn
    return torch.view_as_real(turned).flatten(2)


def decoder(net: Any, h: Tensor) -> Tensor:
    mask = nn.Transformer.generate_square_subsequent_mask(7, dtype=h.dtype)
    return net.decode(h, h.flip(1), tgt_mask=mask)


def spectrum(net: Any, h: Tensor) -> Tensor:
    """Learnt filter in the frequency domain, as in FNet and Fourier operators."""
    return torch.fft.irfft(torch.fft.rfft(h, dim=-1) * torch.view_as_complex(net.filter), n=8, dim=-1)


def spectrum_2d(net: Any, h: Tensor) -> Tensor:
    return torch.fft.fft2(h, dim=(-2, -1)).real / 8


def activations(net: Any, h: Tensor) -> Tensor:
    # Without hardsigmoid and hardswish: only their vectorized kernels round 1/6 to single precision.
    functions: list[Callable[[Tensor], Tensor]] = [
        F.relu, F.relu6, F.elu, F.selu, F.celu, F.leaky_relu, F.gelu, F.silu, F.mish, F.softplus, F.softsign,
        F.tanhshrink, F.hardtanh, F.logsigmoid, F.softshrink, F.hardshrink,
        torch.sigmoid, torch.tanh, torch.sin, torch.exp, torch.atan, torch.erf, torch.square, torch.abs,
    ]  # fmt: skip
    return sum((f(h) for f in functions), h) / 10


def softmaxes(net: Any, h: Tensor) -> Tensor:
    return F.softmax(h, -1) + F.log_softmax(h, 1) + F.softmin(h, -1) + h.logsumexp(-1, keepdim=True)


def cumulative(net: Any, h: Tensor) -> Tensor:
    return h.cumsum(-1) + torch.sigmoid(h).cumprod(1) + h.cummax(1).values + h.logcumsumexp(-1)


def feature_statistics(net: Any, h: Tensor) -> Tensor:
    low, high = h.amin(-1, keepdim=True), h.amax(-1, keepdim=True)
    spread = h.std(-1, keepdim=True) + h.var((1, 2), keepdim=True) + h.norm(dim=1, keepdim=True)
    return h * spread + low * high + h.median(-1, keepdim=True).values + h.quantile(0.3, -1, keepdim=True)


def selections(net: Any, h: Tensor) -> Tensor:
    """Sort, top-k, arg-max and gather over features."""
    values, order = h.topk(4, dim=-1)
    parts = [values, h.gather(-1, order), h.sort(-1).values, h.gather(-1, h.argmax(-1, keepdim=True))]
    return torch.cat([*parts, h.take_along_dim(h.argsort(-1), -1), h.kthvalue(2, -1, keepdim=True)[0]], -1)


def scattered(net: Any, h: Tensor) -> Tensor:
    index = h.argsort(-1)
    first = torch.zeros_like(h).scatter(-1, index, h)
    return (
        first
        + torch.zeros_like(h).scatter_add(-1, index % 3, h)
        + h.index_select(-1, torch.arange(8).flip(0))
    )


def shapes(net: Any, h: Tensor) -> Tensor:
    """Reshape (N, 7, 8) in the ways that models do, and restore the shape."""
    n = h.shape[0]
    a = net.last(h.reshape(n * 7, 8)).reshape(n, 7, 8)
    b = h.permute(1, 0, 2).reshape(7, -1).T.reshape(n, 8, 7).mT
    c = h.unflatten(-1, (2, 4)).movedim(2, 1).flatten(1, 2).reshape(n, 7, 8)
    d = torch.stack(h.unbind(1), dim=0).transpose(0, 1).squeeze(0).view_as(h)
    e = h.unsqueeze(2).expand(-1, -1, 3, -1).mean(2) + h.repeat(1, 1, 2)[..., 4:12] + h.tile(2)[..., :8]
    return a + b.contiguous() + c + d + e + h.swapaxes(0, 2).swapdims(2, 0)


def slices(net: Any, h: Tensor) -> Tensor:
    parts = [h[:, 0], h[:, -1], h[..., 0], h[:, 1:5:2].flatten(1), h[:, [0, 3]].flatten(1), h[:, :, None, 2]]
    parts += [
        h.narrow(1, 2, 3).flatten(1),
        h.select(2, 1),
        h.diagonal(dim1=1, dim2=2),
        h.unfold(1, 3, 2)[..., 0],
    ]
    return torch.cat([part.flatten(1) for part in parts], 1)


def windows(net: Any, h: Tensor) -> Tensor:
    """Swin: split an image into windows, merge them into the batch, and restore the image."""
    n, c, height, width = h.shape
    h = torch.roll(h, shifts=(-1, -1), dims=(2, 3))
    cut = h.view(n, c, height // 4, 4, width // 4, 4).permute(0, 2, 4, 3, 5, 1).reshape(-1, 16, c)
    cut = F.softmax(cut @ cut.mT, -1) @ net.values(cut)
    cut = cut.view(n, height // 4, width // 4, 4, 4, c).permute(0, 5, 1, 3, 2, 4).reshape(n, c, height, width)
    return torch.roll(cut, shifts=(1, 1), dims=(2, 3))


def einsums(net: Any, h: Tensor) -> Tensor:
    first = torch.einsum("ntc,dc->ntd", h, net.weight)
    second = torch.einsum("bij,bkj->bik", first, h)
    return torch.einsum("...ij,...j->...i", second, torch.einsum("nij->ni", h))


def products(net: Any, h: Tensor) -> Tensor:
    a = torch.bmm(h, h.mT) + torch.baddbmm(h[:, :, :7], h, h.transpose(1, 2), alpha=0.3)
    b = torch.tensordot(h, net.weight, dims=1) + torch.matmul(net.weight, h.mT).mT
    c = (h[:, :, :, None] * h[:, :, None, :]).sum((1, 2)) + torch.linalg.vecdot(h, h.flip(1)).sum(
        1, keepdim=True
    )
    return torch.cat([a.flatten(1), b.flatten(1), c], 1) / 8


def distances(net: Any, h: Tensor) -> Tensor:
    return (
        torch.cdist(h, net.weight)
        + torch.cdist(h, h.flip(1))[..., :1]
        + F.pairwise_distance(h, h + 1)[..., None]
    )


def masked(net: Any, h: Tensor) -> Tensor:
    a = torch.where(h > 0, h, 0.1 * h.pow(2)) + h.masked_fill(h.abs() < 0.2, 1.0)
    b = h * (h > h.mean(-1, keepdim=True)) + h.clamp(min=-1, max=1) + torch.maximum(h, h.flip(-1))
    return a + b + torch.triu(h) + h.tril(1)


_CONV: dict[str, Callable[[], nn.Module]] = {
    "convolution, depthwise": lambda: nn.Conv2d(3, 6, 3, groups=3),
    "convolution, dilated and strided": lambda: nn.Conv2d(3, 4, 3, stride=2, dilation=2, padding=2),
    "convolution, separable": lambda: nn.Sequential(
        nn.Conv2d(3, 3, 3, groups=3, padding="same"), nn.Conv2d(3, 5, 1)
    ),
    "convolution, circular": lambda: nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular"),
    "convolution, reflected": lambda: nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect"),
    "convolution, replicated": lambda: nn.Conv2d(3, 4, 3, padding=1, padding_mode="replicate"),
    "transposed convolution": lambda: nn.ConvTranspose2d(3, 4, 3, stride=2, output_padding=1),
    "transposed convolution, groups": lambda: nn.ConvTranspose2d(3, 6, 2, groups=3, bias=False),
    "channels last": lambda: nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last),  # pyright: ignore[reportCallIssue]
    "patches by unfold and fold": lambda: nn.Sequential(
        nn.Unfold(2, stride=2), nn.Conv1d(12, 8, 1), nn.Fold((8, 8), 2, stride=2), nn.Conv2d(2, 3, 1)
    ),
}

_IMAGE: dict[str, Callable[[], nn.Module]] = {
    "max pooling": _image(lambda _, h: F.max_pool2d(h, 3, 2, 1) + F.max_pool2d(h, 2)),
    "max pooling, with indices and back": _image(
        lambda _, h: F.max_unpool2d(*F.max_pool2d(h, 2, return_indices=True), [2, 2])
    ),
    "average pooling": _image(lambda _, h: F.avg_pool2d(h, 3, 2, 1, count_include_pad=False)),
    "power-average pooling": _image(lambda _, h: F.lp_pool2d(h.square(), 2, 2)),
    "adaptive pooling": _image(lambda _, h: F.adaptive_avg_pool2d(h, 3) + F.adaptive_max_pool2d(h, 3)),
    "global pooling": _image(lambda _, h: h.mean((2, 3)) + h.amax((2, 3)) + h.flatten(2).max(2).values),
    "upsampling": _image(
        lambda _, h: (
            F.interpolate(h, scale_factor=2, mode="bilinear", align_corners=False)
            + F.interpolate(h, scale_factor=2)
            + F.interpolate(h, size=(16, 16), mode="bicubic", align_corners=True)
        )
    ),
    "downsampling": _image(
        lambda _, h: F.interpolate(h, size=(5, 3), mode="area") + F.interpolate(h, size=(5, 3))
    ),
    "pixel shuffle": _image(lambda _, h: F.pixel_unshuffle(F.pixel_shuffle(h, 2) ** 2, 4)),
    "channel shuffle": _image(lambda _, h: F.channel_shuffle(h, 2) * h),
    "padding": _image(
        lambda _, h: (
            F.pad(h, (1, 2, 0, 1))
            + F.pad(h, (2, 1, 1, 0), mode="reflect")
            + F.pad(h, (1, 2, 1, 0), value=1.5)
        )
    ),
    "GroupNorm": _image(lambda net, h: net.norm(h), norm=lambda: nn.GroupNorm(2, 4)),
    "LayerNorm of images": _image(lambda net, h: net.norm(h), norm=lambda: nn.LayerNorm([4, 8, 8])),
    "local response norm": _image(lambda _, h: F.local_response_norm(h, 3, alpha=0.5)),
    "PReLU": _image(lambda net, h: net.act(h), act=lambda: nn.PReLU(4)),
    "spatial transformer": _image(spatial_transformer, locate=lambda: nn.Linear(4, 6)),
    "FFT of images": _image(spectrum_2d),
    "shifted windows": _image(windows, values=lambda: nn.Linear(4, 4)),
    "gated linear unit": _image(lambda _, h: F.glu(h, 1)),
}


def _attention(**options: Any) -> Callable[[], nn.Module]:
    return lambda: nn.MultiheadAttention(8, 2, **options)


def _qkv() -> nn.Module:
    return nn.Linear(8, 24)


def _weight() -> nn.Parameter:
    return nn.Parameter(torch.randn(8, 8))


_STEPS: dict[str, Callable[[], nn.Module]] = {
    "RMSNorm": _steps(lambda net, h: net.norm(h), norm=lambda: nn.RMSNorm(8)),
    "LayerNorm without bias": _steps(lambda net, h: net.norm(h), norm=lambda: nn.LayerNorm(8, bias=False)),
    "multi-head attention": _steps(self_attention, attend=_attention(batch_first=True)),
    "multi-head attention, with weights": _steps(
        self_attention_with_weights, attend=_attention(batch_first=True)
    ),
    "multi-head attention, time first": _steps(
        self_attention_time_first, attend=_attention(add_bias_kv=True)
    ),
    "causal attention by hand": _steps(
        causal_attention, qkv=_qkv, mask=lambda: torch.tril(torch.ones(7, 7)).view(1, 1, 7, 7)
    ),
    "causal attention, fused": _steps(fused_causal_attention, qkv=_qkv),
    "attention with a mask of its own": _steps(masked_attention, qkv=_qkv),
    "rotary positions": _steps(rotary),
    "encoder layer, norm last": _steps(
        lambda net, h: net.layer(h), layer=lambda: nn.TransformerEncoderLayer(8, 2, 12, 0.0, batch_first=True)
    ),
    "encoder layer, norm first": _steps(
        lambda net, h: net.layer(h),
        layer=lambda: nn.TransformerEncoderLayer(8, 2, 12, 0.0, F.gelu, batch_first=True, norm_first=True),
    ),
    "decoder layer": _steps(
        decoder, decode=lambda: nn.TransformerDecoderLayer(8, 2, 12, 0.0, batch_first=True)
    ),
    "FFT filter": _steps(spectrum, filter=lambda: nn.Parameter(torch.randn(5, 2))),
    "activations": _steps(activations),
    "softmax of features": _steps(softmaxes),
    "cumulative operators over features": _steps(cumulative),
    "statistics of features": _steps(feature_statistics),
    "selection among features": _steps(selections),
    "scatter among features": _steps(scattered),
    "shapes there and back": _steps(shapes, last=lambda: nn.Linear(8, 8)),
    "slices": _steps(slices),
    "einsum": _steps(einsums, weight=_weight),
    "products": _steps(products, weight=_weight),
    "distances within a sample": _steps(distances, weight=_weight),
    "masks and where": _steps(masked),
    "bilinear": _steps(lambda net, h: net.both(h, h.flip(1)), both=lambda: nn.Bilinear(8, 8, 3)),
}

_SIGNAL: dict[str, Callable[[], nn.Module]] = {
    "convolution of signals": lambda: nn.Conv1d(4, 6, 3, padding=2, dilation=2, groups=2),
    "transposed convolution of signals": lambda: nn.ConvTranspose1d(4, 3, 4, stride=2),
    "pooling of signals": lambda: nn.Sequential(
        nn.Conv1d(4, 4, 1), nn.MaxPool1d(2), nn.AvgPool1d(2), nn.Upsample(9)
    ),
    "linear upsampling": lambda: nn.Sequential(
        nn.Conv1d(4, 4, 1), nn.Upsample(scale_factor=1.5, mode="linear")
    ),
}

_VOLUME: dict[str, Callable[[], nn.Module]] = {
    "convolution of volumes": lambda: nn.Conv3d(2, 3, (2, 3, 3), padding=(0, 1, 0)),
    "transposed convolution of volumes": lambda: nn.ConvTranspose3d(2, 2, 2),
    "pooling of volumes": lambda: nn.Sequential(
        nn.Conv3d(2, 2, 1), nn.MaxPool3d(2), nn.AdaptiveAvgPool3d((1, 2, 2))
    ),
    "trilinear upsampling": lambda: nn.Sequential(
        nn.Conv3d(2, 2, 2), nn.Upsample(size=(4, 4, 4), mode="trilinear", align_corners=True)
    ),
}

_MATRIX: dict[str, Callable[[], nn.Module]] = {
    "matrix norms": _matrix(lambda a: torch.linalg.matrix_norm(a)[:, None] + torch.linalg.norm(a, dim=-1)),
    "inverse": _matrix(torch.linalg.inv),
    "solve": _matrix(lambda a: torch.linalg.solve(a, torch.tanh(a[:, :1]).mT).squeeze(-1)),
    "determinant": _matrix(
        lambda a: torch.linalg.slogdet(a)[1][:, None] + torch.linalg.det(a)[:, None] / 1e3
    ),
    "Cholesky": _matrix(lambda a: torch.linalg.cholesky(a)),
    "eigenvalues": _matrix(lambda a: torch.linalg.eigvalsh((a + a.mT) / 2)),
    "singular values": _matrix(lambda a: torch.linalg.svdvals(a)),
    "matrix exponential": _matrix(lambda a: torch.matrix_exp(-a / 20)),
    "trace and diagonal": _matrix(
        lambda a: (
            torch.diagonal(a, dim1=-2, dim2=-1) * torch.einsum("nii->n", a)[:, None] / 10
            + torch.diag_embed(a[:, 0])[:, 0]
        )
    ),
}

_IDS: dict[str, Callable[[], nn.Module]] = {
    "embedding": lambda: nn.Embedding(11, 5, padding_idx=0),
    "embedding with sparse gradients": lambda: nn.Embedding(11, 5, sparse=True),
    "embedding of largest norm": lambda: nn.Embedding(11, 5, max_norm=1.0),
    "bag of embeddings": lambda: nn.EmbeddingBag(11, 5, mode="mean"),
    "bag of embeddings, maxima": lambda: nn.EmbeddingBag(11, 5, mode="max"),
    "bag of embeddings, sparse gradients": lambda: nn.EmbeddingBag(11, 5, mode="sum", sparse=True),
    "one hot": lambda: Apply(
        lambda net, x: F.one_hot(x, 11).double() @ net.table, table=nn.Parameter(torch.randn(11, 5))
    ),
    "lookup by index": lambda: Apply(lambda net, x: net.table[x], table=nn.Parameter(torch.randn(11, 5))),
    "lookup by index_select": lambda: Apply(
        lambda net, x: net.table.index_select(0, x.reshape(-1)).view(*x.shape, 5),
        table=nn.Parameter(torch.randn(11, 5)),
    ),
}

_RANDOM: dict[str, Callable[[], nn.Module]] = {
    "dropout": _image(lambda _, h: F.dropout(h, 0.4)),
    "dropout of channels": _image(lambda _, h: F.dropout2d(h, 0.4)),
    "alpha dropout": _image(lambda _, h: F.alpha_dropout(h, 0.3, training=True)),
    "randomised leaky ReLU": _image(lambda _, h: F.rrelu(h, training=True)),
    "noise": _image(lambda _, h: h + 0.1 * torch.randn_like(h) + 0.1 * torch.rand(h.shape, dtype=h.dtype)),
    "noise of a permuted tensor": _image(
        lambda _, h: h * torch.bernoulli(torch.full_like(h.permute(0, 2, 3, 1), 0.7)).permute(0, 3, 1, 2)
    ),
    "Gumbel softmax": _image(lambda _, h: F.gumbel_softmax(h, hard=True, dim=1) * h),
    "fractional pooling": _image(lambda _, h: F.fractional_max_pool2d(h, 2, output_size=4)),
}
_RANDOM_STEPS: dict[str, Callable[[], nn.Module]] = {
    "attention with dropout": _steps(self_attention, attend=_attention(batch_first=True, dropout=0.3)),
    "multinomial": _steps(lambda _, h: h.flatten(1).gather(1, torch.multinomial(h.flatten(1).abs(), 9))),
}

_TABLES: list[tuple[dict[str, Callable[[], nn.Module]], Data, bool]] = [
    (_CONV, data.images, False),
    (_IMAGE, data.images, False),
    (_STEPS, data.sequences, False),
    (_SIGNAL, data.signals, False),
    (_VOLUME, volumes, False),
    (_MATRIX, matrices, False),
    (_IDS, ids, False),
    (_RANDOM, data.images, True),
    (_RANDOM_STEPS, data.sequences, True),
]

CASES = [
    case
    for table, batch, random in _TABLES
    for name, build in table.items()
    for case in _cases(name, build, batch, random=random)
]
