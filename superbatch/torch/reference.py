"""Definition of the update: the gradient of the loss of the real large batch, in plain torch.

Read this file first. Everything else in the library computes the same numbers in less memory or time. For
micro-batches ``i`` of weight ``w_i`` with ``l_i = loss_fn(i)`` and ``W = sum w_i``::

    reduction="mean":    L = sum_i (w_i / W) l_i
    reduction="sum":     L = sum_i l_i / W
    reduction="total":   L = sum_i l_i
    several terms:       L = sum_t L_t, each with a reduction and a weight of its own
    coupled by the loss: L = loss_fn(concatenation of encode(i)), by two passes (`coupled_gradient`)
    coupled in a model:  L = loss_fn(concatenation of i), e.g. with BatchNorm: `superbatch.torch.virtual`
                         runs each operator of forward and backward in micro-batches

Ranks add nothing to the definition: ``i`` runs over the micro-batches of all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import normalize

Terms = Sequence[tuple[normalize.Reduction, Callable[[Any], Tensor], Sequence[normalize.Number]]]


def gradient(
    parameters: Iterable[Tensor], microbatches: Sequence[Any], terms: Terms
) -> tuple[list[Tensor], float]:
    """Return the gradient of a separable loss, and the loss.

    Args:
        parameters: tensors to differentiate with respect to.
        microbatches: the micro-batches of the batch.
        terms: for each term of the loss: its reduction, its ``loss_fn(microbatch)``, and the weight of each
            micro-batch. Most losses have one term.

    Examples:
        >>> w = torch.tensor([2.0], requires_grad=True)
        >>> batch = [torch.tensor([1.0, 2.0, 3.0]), torch.tensor([6.0])]
        >>> gradient([w], batch, [("mean", lambda x: (w * x).mean(), [3, 1])])
        ([tensor([3.])], 6.0)
    """
    parameters = list(parameters)
    total = [torch.zeros_like(parameter) for parameter in parameters]
    losses: list[float] = []
    for reduction, loss_fn, weights in terms:
        # One divisor for the batch: this is what makes unequal micro-batches exact.
        divided_by = normalize.window_weight(normalize.total_weight(weights), reduction=reduction)
        for microbatch, weight in zip(microbatches, weights, strict=True):
            if not normalize.takes_part(weight, reduction=reduction):
                continue  # weight 0: a mean over no element is NaN
            scaled = loss_fn(microbatch) * normalize.scale(weight, divided_by, reduction=reduction)
            # A parameter that a term does not use has a gradient of None.
            _add(total, torch.autograd.grad(scaled, parameters, allow_unused=True))
            losses.append(scaled.item())
    return total, sum(losses)


def coupled_gradient(
    parameters: Iterable[Tensor],
    microbatches: Sequence[Any],
    encode: Callable[[Any], Tensor],
    loss_fn: Callable[[Tensor], Tensor],
) -> tuple[list[Tensor], float]:
    """Return the gradient of a loss over the embeddings of all samples, and the loss.

    Args:
        parameters: tensors to differentiate with respect to.
        microbatches: the micro-batches of the batch.
        encode: function from a micro-batch to its embeddings, with the samples in dimension 0. A sample's
            embedding must not depend on other samples.
        loss_fn: function from the embeddings of the whole batch to its loss.

    Examples:
        >>> w = torch.tensor([2.0], requires_grad=True)
        >>> batch = [torch.tensor([1.0, 2.0, 6.0]), torch.tensor([7.0])]
        >>> coupled_gradient([w], batch, lambda x: w * x, lambda e: e.max() - e.mean())
        ([tensor([3.])], 6.0)
    """
    parameters = list(parameters)
    with torch.no_grad():  # first pass: embeddings without a graph
        embeddings = [encode(microbatch) for microbatch in microbatches]
    # Each embedding becomes a leaf, whose gradient is the cotangent of the second pass.
    leaves = [embedding.requires_grad_() for embedding in embeddings]
    loss = loss_fn(torch.cat(leaves))
    cotangents = torch.autograd.grad(loss, leaves)  # of the loss with respect to each embedding
    total = [torch.zeros_like(parameter) for parameter in parameters]
    # The graph of one micro-batch at a time: this is where memory is saved.
    for microbatch, cotangent in zip(microbatches, cotangents, strict=True):  # second pass
        _add(total, torch.autograd.grad(encode(microbatch), parameters, cotangent, allow_unused=True))
    return total, loss.item()


def _add(total: list[Tensor], gradients: Sequence[Tensor | None]) -> None:
    for one, gradient_of in zip(total, gradients, strict=True):
        if gradient_of is not None:
            one.add_(gradient_of)
