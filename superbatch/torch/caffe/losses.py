"""Caffe's softmax loss with ``ignore_label``, and how its micro-batches count: as Caffe does, or exactly.

Caffe divides each micro-batch's loss by its own number of valid labels, and the window by ``iter_size``: a
mean of means. Where micro-batches have unequal numbers of valid labels that is not the loss of the batch.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from superbatch.errors import InputError

from ..weights import Weight, Where, count_tokens

Normalization = Literal["FULL", "VALID", "BATCH_SIZE", "NONE"]
Average = Literal["caffe", "exact"]

_IGNORE_NOTHING = -(2**62)  # no label: labels of any class are counted


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
        scores: of shape (samples, classes, ...).
        labels: of shape (samples, ...), integers.
        ignore_label: the label that counts nothing; None: all count.
        normalization: what is divided by: ``"VALID"`` the labels that count, ``"FULL"`` all labels,
            ``"BATCH_SIZE"`` the samples, ``"NONE"`` nothing.

    Returns:
        A scalar; 0 where no label counts.

    Raises:
        InputError: there is no such normalization.

    Examples:
        >>> scores, labels = torch.zeros(4, 2), torch.tensor([0, 1, 9, 9])
        >>> round(softmax_loss(scores, labels, ignore_label=9).item(), 4)
        0.6931
        >>> round(softmax_loss(scores, labels, ignore_label=9, normalization="FULL").item(), 4)
        0.3466
    """
    # Checked by the list of the type: one source for checker and message.
    if normalization not in get_args(Normalization):
        known = ", ".join(get_args(Normalization))
        raise InputError(f"normalization={normalization!r} is unknown. Pass one of {known}.")
    ignored = _IGNORE_NOTHING if ignore_label is None else ignore_label
    # "sum" first: each normalization is one division of it.
    total = torch.nn.functional.cross_entropy(scores, labels, ignore_index=ignored, reduction="sum")
    if normalization == "VALID":
        # clamp on the device: reading the count would wait for the GPU.
        return total / (labels != ignored).sum().clamp(min=1)
    sizes = {"FULL": labels.numel(), "BATCH_SIZE": labels.shape[0], "NONE": 1}
    # Caffe divides by at least 1 (softmax_loss_layer.cpp, get_normalizer).
    return total / max(1, sizes[normalization])


def loss_weight(where: Where, *, ignore_label: int | None = None, average: Average = "caffe") -> Weight:
    """Weigh micro-batches whose loss is `softmax_loss` with ``"VALID"``, for ``Accumulator(weight=...)``.

    Args:
        where: path of the labels in a micro-batch, or a function micro-batch -> labels.
        ignore_label: the label that counts nothing; None: all count.
        average: ``"caffe"``: every micro-batch counts the same, whatever it holds, one without a valid label
            too. That is no mean over samples, which an Accumulator would refuse: pass it ``check=False``.
            ``"exact"``: by its valid labels, which gives the update of the real batch.

    Returns:
        A function micro-batch -> int.

    Raises:
        InputError: there is no such average.

    Examples:
        >>> microbatch = {"labels": torch.tensor([3, 9, 9])}
        >>> [loss_weight("labels", ignore_label=9, average=each)(microbatch) for each in ("caffe", "exact")]
        [1, 1]
        >>> loss_weight("labels", average="exact")(microbatch)
        3
    """
    if average not in get_args(Average):
        raise InputError(
            f'average={average!r} is unknown. Pass average="caffe" (micro-batches count the same) or '
            'average="exact" (they count by their valid labels).'
        )
    if average == "caffe":
        # A constant: the mean of means of micro-batches, as Caffe's iter_size makes it.
        return lambda microbatch: 1
    return count_tokens(where, ignore_index=_IGNORE_NOTHING if ignore_label is None else ignore_label)
