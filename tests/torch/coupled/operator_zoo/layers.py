"""Convolutions, norms, pooling and upsampling."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.torch.coupled.operator_case import (
    N,
    operator,
    positive,
    real,
    unit,
)

_CONVOLUTIONS = [
    operator("conv1d", lambda x, w, b: F.conv1d(x, w, b, padding=1), real(N, 3, 8), real(4, 3, 3), real(4)),
    operator(
        "conv1d, groups and dilation",
        lambda x, w: F.conv1d(x, w, None, 1, 2, 2, 2),
        real(N, 4, 8),
        real(6, 2, 3),
    ),
    operator("conv2d", F.conv2d, real(N, 3, 6, 6), real(4, 3, 3, 3), real(4)),
    operator(
        "conv2d without bias",
        lambda x, w: F.conv2d(x, w, stride=2, padding=1),
        real(N, 3, 6, 6),
        real(4, 3, 3, 3),
    ),
    operator("conv2d of 1x1", F.conv2d, real(N, 3, 4, 4), real(5, 3, 1, 1)),
    operator(
        "conv2d, depthwise",
        lambda x, w: F.conv2d(x, w, padding="same", groups=3),
        real(N, 3, 6, 6),
        real(3, 1, 3, 3),
    ),
    operator("conv2d, dilated", lambda x, w: F.conv2d(x, w, dilation=2), real(N, 2, 7, 7), real(3, 2, 3, 3)),
    operator(
        "conv2d with samples as weights", lambda x, w: F.conv2d(x, w), real(2, 3, 6, 6), real(N, 3, 3, 3)
    ),
    operator(
        "conv2d, one group for each sample",
        lambda x, w: F.conv2d(x.reshape(1, -1, 6, 6), w.flatten(0, 1), groups=x.shape[0]).view(
            x.shape[0], 2, 4, 4
        ),
        real(N, 3, 6, 6),
        real(N, 2, 3, 3, 3),
    ),
    operator("conv3d", lambda x, w, b: F.conv3d(x, w, b), real(N, 2, 4, 4, 4), real(3, 2, 2, 2, 2), real(3)),
    operator(
        "conv2d, samples as channels",
        lambda x, w: F.conv2d(x.transpose(0, 1), w.transpose(0, 1), stride=2, padding=1),
        real(N, 2, 6, 6),
        real(N, 3, 4, 4),
    ),
    operator(
        "_convolution, samples as channels",
        lambda x, w: torch.ops.aten._convolution(
            *(x.detach().transpose(0, 1), w.detach(), None, [1, 1], [0, 0], [1, 1]),
            *(True, [0, 0], 1, False, False, False, False),
        ),
        real(N, 2, 4, 4),
        real(N, 3, 2, 2),
    ),
    operator(
        "conv_transpose1d",
        lambda x, w, b: F.conv_transpose1d(x, w, b, 2),
        real(N, 3, 5),
        real(3, 2, 3),
        real(2),
    ),
    operator(
        "conv_transpose2d",
        lambda x, w: F.conv_transpose2d(x, w, None, 2, 1, 1),
        real(N, 3, 4, 4),
        real(3, 2, 3, 3),
    ),
    operator("conv_transpose3d", F.conv_transpose3d, real(N, 2, 3, 3, 3), real(2, 2, 2, 2, 2)),
    operator(
        "_convolution",
        lambda x, w: torch.ops.aten._convolution(
            *(x.detach(), w.detach(), None, [1], [1], [1]),
            *(False, [0], 1, False, False, False, False),
        ),
        real(N, 3, 5),
        real(2, 3, 3),
    ),
    operator(
        "mkldnn_convolution",  # integers, which are not rounded
        lambda x, w: torch.ops.aten.mkldnn_convolution(
            x.detach().round().float(), w.detach().round().float(), None, [1, 1], [1, 1], [1, 1], 1
        ),
        real(N, 3, 4, 4),
        real(2, 3, 3, 3),
    ),
    operator(
        "unfold and fold",
        lambda x: F.fold(F.unfold(x, 2, stride=2) ** 2, (4, 4), 2, stride=2),
        real(N, 2, 4, 4),
    ),
]


def _batch_norm(x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, var: Tensor) -> tuple[Tensor, ...]:
    """Batch norm in train mode; returns the running statistics too."""
    mean, var = mean.detach().clone(), var.detach().clone()
    return F.batch_norm(x, mean, var, weight, bias, training=True, momentum=0.2), mean, var


def _native(x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    return torch.native_batch_norm(x, weight, bias, None, None, True, 0.1, 1e-5)  # noqa: FBT003  # positional only


_NORMS = [
    operator("batch_norm of rows", _batch_norm, real(N, 3), real(3), real(3), real(3), positive(3), min_n=2),
    operator("batch_norm of images", _batch_norm, real(N, 3, 4, 4), real(3), real(3), real(3), positive(3)),
    operator("batch_norm of signals", _batch_norm, real(N, 3, 5), real(3), real(3), real(3), positive(3)),
    operator(
        "batch_norm of volumes", _batch_norm, real(N, 2, 2, 3, 2), real(2), real(2), real(2), positive(2)
    ),
    operator(
        "batch_norm without weights",
        lambda x: F.batch_norm(x, None, None, training=True),
        real(N, 3),
        min_n=2,
    ),
    operator(
        "batch_norm in eval mode",
        lambda x, m, v, w, b: F.batch_norm(x, m.detach(), v.detach(), w, b),
        real(N, 3),
        real(3),
        positive(3),
        real(3),
        real(3),
    ),
    operator("native_batch_norm", _native, real(N, 3, 4), real(3), real(3)),
    operator(
        "batch_norm of a transposed batch",
        lambda x: F.batch_norm(x.transpose(0, 1).reshape(-1, 4), None, None, training=True),
        real(N, 3, 4),
    ),
    operator("layer_norm", lambda x, w, b: F.layer_norm(x, (4,), w, b), real(N, 3, 4), real(4), real(4)),
    operator("layer_norm of all features", lambda x: F.layer_norm(x, (3, 4)), real(N, 3, 4)),
    operator("layer_norm over the batch", lambda x: F.layer_norm(x.T, (x.shape[0],)), real(N, 3), min_n=2),
    # x is plain; the batch enters with y, as a decoder's memory does.
    operator(
        "layer_norm before there is a batch",
        lambda x, y: F.layer_norm(x, (4,)) * y[:, None],
        real(2, N, 4),
        real(N),
    ),
    operator("layer_norm of time first", lambda x: F.layer_norm(x.transpose(0, 1), (4,)), real(N, 3, 4)),
    operator("group_norm", lambda x, w, b: F.group_norm(x, 2, w, b), real(N, 4, 3, 3), real(4), real(4)),
    operator("group_norm of rows", lambda x: F.group_norm(x, 2), real(N, 4)),
    operator("instance_norm", lambda x: F.instance_norm(x), real(N, 3, 4, 4)),
    operator(
        "instance_norm with weights",
        lambda x, w, b: F.instance_norm(x, weight=w, bias=b),
        real(N, 3, 5),
        real(3),
        real(3),
    ),
    operator("rms_norm", lambda x, w: F.rms_norm(x, (4,), w), real(N, 3, 4), real(4)),
    operator("local_response_norm", lambda x: F.local_response_norm(x, 2), real(N, 4, 3)),
]

_POOLING = [
    operator("max_pool1d", lambda x: F.max_pool1d(x, 2), real(N, 3, 8)),
    operator("max_pool2d", lambda x: F.max_pool2d(x, 3, 2, 1), real(N, 3, 6, 6)),
    operator("max_pool2d with indices", lambda x: F.max_pool2d(x, 2, return_indices=True), real(N, 3, 6, 6)),
    operator("max_pool3d", lambda x: F.max_pool3d(x, 2), real(N, 2, 4, 4, 4)),
    operator("avg_pool1d", lambda x: F.avg_pool1d(x, 2), real(N, 3, 8)),
    operator("avg_pool2d", lambda x: F.avg_pool2d(x, 3, 2, 1), real(N, 3, 6, 6)),
    operator("avg_pool3d", lambda x: F.avg_pool3d(x, 2), real(N, 2, 4, 4, 4)),
    operator("lp_pool2d", lambda x: F.lp_pool2d(x, 2, 2), positive(N, 2, 4, 4)),
    operator(
        "adaptive_avg_pool2d",
        lambda x: (F.adaptive_avg_pool2d(x, 1), F.adaptive_avg_pool2d(x, (3, 2))),
        real(N, 2, 6, 6),
    ),
    operator("adaptive_avg_pool1d", lambda x: F.adaptive_avg_pool1d(x, 3), real(N, 2, 7)),
    operator("adaptive_max_pool2d", lambda x: F.adaptive_max_pool2d(x, 3), real(N, 2, 7, 7)),
    operator(
        "adaptive_avg_pool3d",
        lambda x: (F.adaptive_avg_pool3d(x, 1), F.adaptive_avg_pool3d(x, (3, 2, 2))),
        real(N, 2, 4, 3, 4),
    ),
    operator(
        "adaptive_max_pool3d",
        lambda x: F.adaptive_max_pool3d(x, (3, 2, 2), return_indices=True),
        real(N, 2, 4, 3, 4),
    ),
    operator(
        "fractional_max_pool2d",
        lambda x, u: F.fractional_max_pool2d(
            x, 2, output_size=3, return_indices=True, _random_samples=u.detach().abs()
        ),
        real(N, 2, 6, 6),
        unit(N, 2, 2),
    ),
    operator(
        "fractional_max_pool3d",
        lambda x, u: F.fractional_max_pool3d(
            x, 2, output_size=2, return_indices=True, _random_samples=u.detach().abs()
        ),
        real(N, 2, 4, 4, 4),
        unit(N, 2, 3),
    ),
    operator(
        "max_unpool3d",
        lambda x: F.max_unpool3d(*F.max_pool3d(x, 2, return_indices=True), [2, 2, 2]),
        real(N, 2, 4, 4, 2),
    ),
    operator(
        "max_unpool2d",
        lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), [2, 2]),
        real(N, 2, 4, 4),
    ),
    operator("interpolate, nearest", lambda x: F.interpolate(x, scale_factor=2), real(N, 2, 3, 3)),
    operator("interpolate, nearest of signals", lambda x: F.interpolate(x, size=5), real(N, 2, 3)),
    operator(
        "interpolate, nearest of volumes", lambda x: F.interpolate(x, size=(3, 2, 5)), real(N, 2, 2, 2, 3)
    ),
    *(
        operator(
            f"interpolate, exactly nearest in {len(size)}",
            lambda x, size=size: F.interpolate(x, size=size, mode="nearest-exact"),
            real(N, 2, *(3 for _ in size)),
        )
        for size in ((5,), (5, 2), (5, 2, 4))
    ),
    operator(
        "interpolate, bilinear", lambda x: F.interpolate(x, size=(5, 7), mode="bilinear"), real(N, 2, 3, 3)
    ),
    operator(
        "interpolate, bicubic",
        lambda x: F.interpolate(x, size=(5, 7), mode="bicubic", align_corners=True),
        real(N, 2, 4, 4),
    ),
    operator("interpolate, linear", lambda x: F.interpolate(x, size=5, mode="linear"), real(N, 2, 3)),
    operator(
        "interpolate, trilinear",
        lambda x: F.interpolate(x, scale_factor=2, mode="trilinear"),
        real(N, 1, 2, 2, 2),
    ),
    operator(
        "interpolate, antialiased",
        lambda x: F.interpolate(x, size=3, mode="bilinear", antialias=True),
        real(N, 2, 6, 6),
    ),
    operator(
        "interpolate, bicubic and antialiased",
        lambda x: F.interpolate(x, size=3, mode="bicubic", antialias=True),
        real(N, 2, 6, 6),
    ),
    operator("pixel_shuffle", lambda x: F.pixel_shuffle(x, 2), real(N, 4, 3, 3)),
    operator("pixel_unshuffle", lambda x: F.pixel_unshuffle(x, 2), real(N, 2, 4, 4)),
    operator("channel_shuffle", lambda x: F.channel_shuffle(x, 2), real(N, 4, 3)),
    operator(
        "grid_sample",
        lambda x, g: F.grid_sample(x, g, align_corners=False),
        real(N, 2, 4, 4),
        unit(N, 3, 3, 2),
    ),
    operator("channel_shuffle of images", lambda x: F.channel_shuffle(x, 2), real(N, 4, 3, 3)),
    operator(
        "grid_sample of volumes",
        lambda x, g: F.grid_sample(x, g, padding_mode="border", align_corners=True),
        real(N, 2, 3, 3, 3),
        unit(N, 2, 3, 2, 3),
    ),
    operator(
        "affine_grid", lambda t: F.affine_grid(t, [t.shape[0], 2, 3, 3], align_corners=True), real(N, 2, 3)
    ),
]

OPERATORS = [*_CONVOLUTIONS, *_NORMS, *_POOLING]
