"""Table of operators: the dimension of the samples in each input and in each result.

A row has one character per tensor, in the order of the operator's arguments: a digit for the dimension of the
samples, ``_`` for a full input, ``+`` for a result summed over the samples. If several rows fit, the one that
gathers the fewest bytes is used. `test_virtual_operators.py` compares each operator with the same operator on
full tensors. `tests/gpu` does the same on a GPU, which also has operators of its own.
"""

from __future__ import annotations

from typing import Any

import torch

aten: Any = torch.ops.aten

# For mm: rows times a full matrix (0_), a full matrix times columns (_1), and the gradient of a weight,
# x.T @ dy, which sums over the samples (10 +).
_TABLE = """
mm                                      0_ 0     _1 1     10 +
bmm                                     00 0     1_ 1     _2 2     21 +
baddbmm                                 000 0
mv                                      0_ 0     10 +
dot                                     00 +
linear_backward                         00_ 0++
convolution                             0__ 0
_convolution                            0__ 0
convolution_backward                    00_ 0++
mkldnn_convolution                      0__ 0
cudnn_convolution                       0_ 0
cudnn_convolution_transpose             0_ 0
embedding                               _0 0     _1 1
max_pool2d_with_indices                 0 00
max_pool2d_with_indices_backward        000 0
max_pool3d_with_indices                 0 00
max_pool3d_with_indices_backward        000 0
_adaptive_avg_pool2d                    0 0
_adaptive_avg_pool2d_backward           00 0
_adaptive_avg_pool3d                    0 0
_adaptive_avg_pool3d_backward           00 0
adaptive_max_pool2d                     0 00
adaptive_max_pool2d_backward            000 0
adaptive_max_pool3d                     0 00
adaptive_max_pool3d_backward            000 0
avg_pool2d                              0 0
avg_pool2d_backward                     00 0
avg_pool3d                              0 0
avg_pool3d_backward                     00 0
fractional_max_pool2d                   00 00
fractional_max_pool2d_backward          000 0
fractional_max_pool3d                   00 00
fractional_max_pool3d_backward          000 0
max_unpool2d                            00 0
max_unpool3d                            00 0
upsample_nearest1d                      0 0
upsample_nearest2d                      0 0
upsample_nearest3d                      0 0
_upsample_nearest_exact1d               0 0
_upsample_nearest_exact2d               0 0
_upsample_nearest_exact3d               0 0
upsample_linear1d                       0 0
upsample_bilinear2d                     0 0
upsample_trilinear3d                    0 0
upsample_bicubic2d                      0 0
_upsample_bilinear2d_aa                 0 0
_upsample_bicubic2d_aa                  0 0
grid_sampler_2d                         00 0
grid_sampler_2d_backward                000 00
grid_sampler_3d                         00 0
grid_sampler_3d_backward                000 00
reflection_pad1d                        0 0
reflection_pad2d                        0 0
reflection_pad3d                        0 0
replication_pad1d                       0 0
replication_pad2d                       0 0
replication_pad3d                       0 0
reflection_pad1d_backward               00 0
reflection_pad2d_backward               00 0
reflection_pad3d_backward               00 0
replication_pad1d_backward              00 0
replication_pad2d_backward              00 0
replication_pad3d_backward              00 0
nll_loss2d_backward                     000__ 0    _00__ 0
nll_loss_backward                       000__ 0    _00__ 0
_prelu_kernel                           0_ 0
_prelu_kernel_backward                  00_ 00
_thnn_fused_lstm_cell                   000__ 000
_thnn_fused_lstm_cell_backward_impl     00000 00+
_thnn_fused_gru_cell                    000__ 00
_thnn_fused_gru_cell_backward           00 000++
"""


def _parse(text: str) -> dict[Any, list[tuple[str, str]]]:
    rows: dict[Any, list[tuple[str, str]]] = {}
    for line in text.split("\n"):
        words = line.split()
        if len(words) < 3 or not hasattr(aten, words[0]):  # a blank line, or not in this release of torch
            continue
        # After the name, pairs of inputs and results: "0_ 0", "_1 1" and "10 +" for mm.
        rows[getattr(aten, words[0])] = list(zip(words[1::2], words[2::2], strict=True))
    return rows


ROWS = _parse(_TABLE)
