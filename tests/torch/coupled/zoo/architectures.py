"""Complete models of known families, with their training losses."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.torch.coupled import data, models
from tests.torch.coupled.case import Case


def cross_entropy(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def text_cross_entropy(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch["x"], batch["mask"]), batch["y"])


def pixels(n: int) -> dict[str, Tensor]:
    """Images with a class for each pixel; some pixels are unlabelled."""
    return {"x": data.normal(n, 3, 8, 8), "y": data.integers(2, n, 8, 8, low=-1)}


def pixel_cross_entropy(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"], ignore_index=-1)


class Recurrent(nn.Module):
    """A recurrent layer, then BatchNorm over its last state."""

    def __init__(self, kind: Any, *, norm: bool = True, **options: Any) -> None:
        super().__init__()
        self.rnn = kind(8, 5, batch_first=True, **options)
        width = 5 * (2 if self.rnn.bidirectional else 1)
        self.norm: nn.Module = nn.BatchNorm1d(width) if norm else nn.Identity()
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.rnn(x)[0][:, -1]))


class TimeFirst(nn.Module):
    """LSTM with the batch in dimension 1, the default of `nn.LSTM`."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(8, 5)
        self.norm = nn.BatchNorm1d(5)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        out, (hidden, _) = self.rnn(x.transpose(0, 1))
        return self.head(self.norm(out.mean(0) + hidden[-1]))


class CellLoop(nn.Module):
    """LSTM cell in a Python loop over time, from a state of zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(8, 5)
        self.norm = nn.BatchNorm1d(5)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = x.new_zeros(x.size(0), 5)
        state = torch.zeros(x.size(0), 5, dtype=x.dtype, device=x.device)
        for step in x.unbind(1):
            hidden, state = self.cell(step, (hidden, state))
        return self.head(self.norm(hidden))


class PixelMlp(nn.Module):
    """MLP-Mixer: mixes tokens by transposing the last two dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 6, 2, stride=2)
        self.norm1, self.norm2 = nn.LayerNorm(6), nn.LayerNorm(6)
        self.tokens = nn.Sequential(nn.Linear(16, 8), nn.GELU(), nn.Linear(8, 16))
        self.channels = nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 6))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.patches(x).flatten(2).transpose(1, 2)
        h = h + self.tokens(self.norm1(h).transpose(1, 2)).transpose(1, 2)
        h = h + self.channels(self.norm2(h))
        return self.head(h.mean(1))


class VisionTransformer(nn.Module):
    """A class token expanded to the batch, position embeddings, pre-norm layers."""

    def __init__(self, *, norm_first: bool = True) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 4, stride=4)
        self.token = nn.Parameter(torch.zeros(1, 1, 8))
        self.positions = nn.Parameter(torch.zeros(1, 5, 8))
        layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True, norm_first=norm_first)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.patches(x).flatten(2).transpose(1, 2)
        h = torch.cat([self.token.expand(x.shape[0], -1, -1), h], dim=1) + self.positions
        return self.head(self.layers(h)[:, 0])


class SqueezeExcite(nn.Module):
    """MobileNet-like block: depthwise convolution, BatchNorm, hard swish, channel gates."""

    def __init__(self) -> None:
        super().__init__()
        self.expand = nn.Conv2d(3, 8, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(8, momentum=0.01, eps=1e-3)
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False)
        self.norm2 = nn.BatchNorm2d(8)
        self.down, self.up = nn.Conv2d(8, 2, 1), nn.Conv2d(2, 8, 1)
        self.project = nn.Conv2d(8, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = F.hardswish(self.norm1(self.expand(x)))
        h = F.silu(self.norm2(self.depthwise(h)))
        gate = self.up(F.relu(self.down(F.adaptive_avg_pool2d(h, 1))))
        return (x + self.project(h * torch.sigmoid(gate))).mean((2, 3))


class DenseBlocks(nn.Module):
    """DenseNet: every layer reads the concatenation of all earlier features."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.BatchNorm2d(3 + 2 * i) for i in range(3))
        self.convs = nn.ModuleList(nn.Conv2d(3 + 2 * i, 2, 3, padding=1) for i in range(3))
        self.head = nn.Linear(9, 3)

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for norm, conv in zip(self.norms, self.convs, strict=True):
            features.append(conv(F.relu(norm(torch.cat(features, 1)))))
        return self.head(torch.cat(features, 1).mean(dim=[2, 3]))


class Autoencoder(nn.Module):
    """Variational autoencoder: draws noise; BatchNorm in the decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(6, 8)
        self.decode = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ELU(), nn.Linear(8, 6))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_var = self.encode(x).chunk(2, dim=1)
        return self.decode(mean + torch.exp(0.5 * log_var) * torch.randn_like(mean)), mean, log_var


def negative_elbo(model: nn.Module, batch: Any) -> Tensor:
    decoded, mean, log_var = model(batch["x"])
    divergence = -0.5 * torch.sum(1 + log_var - mean.pow(2) - log_var.exp())
    return (F.mse_loss(decoded, batch["x"], reduction="sum") + divergence) / batch["x"].size(0)


class GraphLayer(nn.Module):
    """Mean over the neighbours in each sample's graph; BatchNorm over all nodes of all graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 6), nn.Linear(6, 3)
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        near = (torch.cdist(x, x) < 3.5).to(x.dtype)
        h = self.first(torch.bmm(near / near.sum(-1, keepdim=True), x))
        n, nodes, width = h.shape
        h = self.norm(h.reshape(n * nodes, width)).reshape(n, nodes, width)
        return self.last(F.elu(h).amax(1))


class PointNet(nn.Module):
    """BatchNorm1d over (N, C, L), a maximum over points, a learnt transform by `bmm`."""

    def __init__(self) -> None:
        super().__init__()
        self.transform = nn.Sequential(nn.Conv1d(4, 6, 1), nn.BatchNorm1d(6), nn.ReLU())
        self.matrix = nn.Linear(6, 16)
        self.points = nn.Sequential(nn.Conv1d(4, 6, 1), nn.BatchNorm1d(6), nn.ReLU())
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        turn = self.matrix(self.transform(x).max(dim=2)[0]).view(-1, 4, 4) + torch.eye(4, dtype=x.dtype)
        x = torch.bmm(x.transpose(2, 1), turn).transpose(2, 1)
        return self.head(self.points(x).max(2)[0])


CASES = [
    Case(
        name="conv net with BatchNorm",
        build=models.conv_net,
        data=data.images,
        loss=cross_entropy,
        coupled=True,
        buffers=True,
        wrap="inputs",
    ),
    Case(
        name="ResNet-20",
        build=models.resnet20,
        data=data.images,
        loss=cross_entropy,
        coupled=True,
        buffers=True,
        wrap="inputs",
        n=13,
    ),
    Case(
        name="ResNet-50",
        build=models.ResNet50,
        data=lambda n: {"x": data.normal(n, 3, 32, 32), "y": data.integers(3, n)},
        loss=cross_entropy,
        coupled=True,
        buffers=True,
        n=22,
        tolerance=1e-11,
        note="torchvision's layout, in-place ReLU and `out += identity`",
    ),
    Case(
        name="MLP with BatchNorm and dropout",
        build=lambda: models.mlp(dropout=0.3),
        data=data.rows,
        loss=cross_entropy,
        coupled=True,
        buffers=True,
        random=True,
    ),
    Case(
        name="MLP with BatchNorm",
        build=models.mlp,
        data=data.rows,
        loss=cross_entropy,
        coupled=True,
        buffers=True,
        note="plain accumulation raises with micro-batches of 1",
    ),
    Case(
        name="MLP with LayerNorm",
        build=lambda: models.mlp(norm=nn.LayerNorm),
        data=data.rows,
        loss=cross_entropy,
        coupled=False,
        min_n=1,
        wrap="inputs",
    ),
    Case(
        name="U-Net with BatchNorm",
        build=models.UNet,
        data=pixels,
        loss=pixel_cross_entropy,
        coupled=True,
        buffers=True,
        note="users train it in micro-batches of 1; the mean over labelled pixels couples samples too",
    ),
    Case(
        name="ConvNeXt", build=models.convnext, data=data.images, loss=cross_entropy, coupled=False, min_n=1
    ),
    Case(
        name="ConvNeXt with drop-path",
        build=lambda: models.convnext(0.3),
        data=data.images,
        loss=cross_entropy,
        coupled=False,
        random=True,
        min_n=1,
    ),
    Case(
        name="BERT-like classifier",
        build=lambda: models.TextEncoder(outs=3),
        data=data.tokens,
        loss=text_cross_entropy,
        coupled=False,
        min_n=1,
    ),
    Case(
        name="BERT-like classifier with dropout",
        build=lambda: models.TextEncoder(outs=3, dropout=0.2),
        data=data.tokens,
        loss=text_cross_entropy,
        coupled=False,
        random=True,
        min_n=1,
    ),
    *(
        Case(
            name=f"{kind.__name__} with BatchNorm",
            build=lambda kind=kind: Recurrent(kind),
            data=data.sequences,
            loss=cross_entropy,
            coupled=True,
            buffers=True,
        )
        for kind in (nn.LSTM, nn.GRU, nn.RNN)
    ),
    Case(
        name="LSTM, two layers, both directions",
        build=lambda: Recurrent(nn.LSTM, norm=False, num_layers=2, bidirectional=True),
        data=data.sequences,
        loss=cross_entropy,
        coupled=False,
        min_n=1,
    ),
    Case(
        name="GRU with dropout and BatchNorm",
        build=lambda: Recurrent(nn.GRU, num_layers=2, dropout=0.3),
        data=data.sequences,
        loss=cross_entropy,
        coupled=True,
        buffers=True,
        random=True,
    ),
    Case(
        name="LSTM with time first",
        build=TimeFirst,
        data=data.sequences,
        loss=cross_entropy,
        coupled=True,
        buffers=True,
        n=7,
        microbatch=5,
        note="as many samples as time steps: the size does not identify the batch dimension",
    ),
    Case(
        name="LSTM cell in a loop",
        build=CellLoop,
        data=data.sequences,
        loss=cross_entropy,
        coupled=True,
        buffers=True,
    ),
    Case(name="MLP-Mixer", build=PixelMlp, data=data.images, loss=cross_entropy, coupled=False, min_n=1),
    Case(
        name="vision transformer, norm first",
        build=VisionTransformer,
        data=data.images,
        loss=cross_entropy,
        coupled=False,
        min_n=1,
    ),
    Case(
        name="vision transformer, norm last",
        build=lambda: VisionTransformer(norm_first=False),
        data=data.images,
        loss=cross_entropy,
        coupled=False,
        min_n=1,
    ),
    Case(
        name="MobileNet-like block",
        build=SqueezeExcite,
        data=data.images,
        loss=cross_entropy,
        coupled=True,
        buffers=True,
    ),
    Case(
        name="DenseNet-like block",
        build=DenseBlocks,
        data=data.images,
        loss=cross_entropy,
        coupled=True,
        buffers=True,
    ),
    Case(
        name="variational autoencoder",
        build=Autoencoder,
        data=data.rows,
        loss=negative_elbo,
        coupled=True,
        buffers=True,
        random=True,
    ),
    Case(
        name="graph layer",
        build=GraphLayer,
        data=data.sequences,
        loss=cross_entropy,
        coupled=True,
        buffers=True,
    ),
    Case(
        name="PointNet",
        build=PointNet,
        data=data.signals,
        loss=cross_entropy,
        coupled=True,
        buffers=True,
    ),
]
