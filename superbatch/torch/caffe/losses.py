"""Caffe's softmax loss with ``ignore_label``, and weights of its micro-batches, as in Caffe or exact.

Caffe divides each micro-batch's loss by its own number of valid labels, and the window by ``iter_size``,
which is a mean of means. If micro-batches have unequal numbers of valid labels, it is not the loss of the
batch.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from superbatch.errors import InputError

from ..weights import PathOrFunction, Weight, count_tokens

Normalization = Literal["FULL", "VALID", "BATCH_SIZE", "NONE"]
Average = Literal["caffe", "exact"]

_IGNORE_NOTHING = -(2**62)  # not a class, so that all labels are counted


def softmax_loss(
    scores: Tensor,
    labels: Tensor,
    *,
    ignore_label: int | None = None,
    normalization: Normalization = "VALID",
) -> Tensor:
    """Return the output of a ``SoftmaxWithLoss`` layer for one micro-batch.

    ``-sum log softmax(scores)[label] / max(1, normaliser)`` over labels other than `ignore_label`.

    Args:
        scores: tensor of shape (samples, classes, ...).
        labels: integers of shape (samples, ...).
        ignore_label: label that is not counted; None: all labels are counted.
        normalization: the normaliser: the number of counted labels (``"VALID"``), of all labels
            (``"FULL"``), of samples (``"BATCH_SIZE"``), or 1 (``"NONE"``).

    Returns:
        A scalar; 0 if no label is counted.

    Raises:
        InputError: `normalization` is not one of these.

    Examples:
        >>> scores, labels = torch.zeros(4, 2), torch.tensor([0, 1, 9, 9])
        >>> round(softmax_loss(scores, labels, ignore_label=9).item(), 4)
        0.6931
        >>> round(softmax_loss(scores, labels, ignore_label=9, normalization="FULL").item(), 4)
        0.3466
    """
    if normalization not in get_args(Normalization):
        known = ", ".join(get_args(Normalization))
        raise InputError(f"normalization={normalization!r} is not one of Caffe's. Pass one of {known}.")
    ignored = _IGNORE_NOTHING if ignore_label is None else ignore_label
    # The sum, which each normalization divides.
    total = torch.nn.functional.cross_entropy(scores, labels, ignore_index=ignored, reduction="sum")
    if normalization == "VALID":
        # clamp on the device, because reading the count would wait for the GPU.
        return total / (labels != ignored).sum().clamp(min=1)
    sizes = {"FULL": labels.numel(), "BATCH_SIZE": labels.shape[0], "NONE": 1}
    # Caffe divides by at least 1 (softmax_loss_layer.cpp, get_normalizer).
    return total / max(1, sizes[normalization])


def loss_weight(
    where: PathOrFunction, *, ignore_label: int | None = None, average: Average = "caffe"
) -> Weight:
    """Return a weight for ``Accumulator(weight=...)`` if the loss is `softmax_loss` with ``"VALID"``.

    Args:
        where: path of the labels in a micro-batch, or a function micro-batch -> labels.
        ignore_label: label that is not counted; None: all labels are counted.
        average: ``"exact"``: the number of valid labels, which gives the update of the real batch.
            ``"caffe"``: 1 for every micro-batch, even without a valid label. That is not a mean over samples,
            so the Accumulator would raise: pass it ``check=False``.

    Returns:
        A function micro-batch -> int.

    Raises:
        InputError: `average` is not one of these.

    Examples:
        >>> microbatch = {"labels": torch.tensor([3, 9, 9])}
        >>> [loss_weight("labels", ignore_label=9, average=each)(microbatch) for each in ("caffe", "exact")]
        [1, 1]
        >>> loss_weight("labels", average="exact")(microbatch)
        3
    """
    if average not in get_args(Average):
        raise InputError(
            f'average={average!r} is not a choice of average. Pass average="caffe" (all micro-batches count '
            'the same) or average="exact" (they count by their valid labels).'
        )
    if average == "caffe":
        # A constant weight gives the mean of means of Caffe's iter_size.
        return lambda microbatch: 1
    return count_tokens(where, ignore_index=_IGNORE_NOTHING if ignore_label is None else ignore_label)
