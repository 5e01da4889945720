"""Losses of the Hugging Face Trainer that are divided by the number of items (labels) of the whole batch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ..batch.split import split
from ..errors import InputError, SplitError
from .hf_losses import HostLoss, evaluating

_MOST = 4  # most samples to try, as some may have no label


def adds_up(loss: HostLoss, samples: Mapping[str, Any], *, is_hidden: bool) -> bool:
    """Return True if losses of micro-batches sum to that of the batch, given the number of items.

    Args:
        loss: loss of the Trainer.
        samples: a micro-batch.
        is_hidden: True if no other check can find the divisor of the loss.

    Raises:
        InputError: they do not, and the divisor of the loss is not known.
    """
    if divides_by_items(loss, samples):
        return True
    tried = _single(loss, samples)
    # A loss that raises without the number of items cannot be a mean by itself.
    with evaluating(loss.model):
        needs_items = bool(tried) and _needs_items(loss, tried[0])
    if needs_items:
        raise InputError(
            "The loss of this trainer needs num_items_in_batch but is not a sum divided by it. Return the "
            "sum over labels divided by it, without other terms, or return the mean if it is None."
        )
    if is_hidden:
        raise InputError(
            "This trainer has its own loss, and micro-batches of one sample do not reveal its divisor. "
            "Define `weight_of(self, microbatch)` in its class and return the number of samples or tokens "
            "over which the loss is a mean."
        )
    return False


def divides_by_items(loss: HostLoss, samples: Mapping[str, Any]) -> bool:
    """Return True if the loss is divided by the number of items that the Trainer passes. Collective.

    Args:
        loss: loss of the Trainer.
        samples: a micro-batch.
    """
    with evaluating(loss.model):
        divides = _halves(loss, _single(loss, samples))
    return loss.on_all_ranks(divides)  # a rank may have no labels


def _single(loss: HostLoss, samples: Mapping[str, Any]) -> list[Any]:
    if loss.items is None:
        return []
    try:
        return split(samples, 1)
    except SplitError:  # inputs without a row per sample, such as flattened patches
        return [] if loss.cuts else [samples]


def _halves(loss: HostLoss, samples: list[Any]) -> bool:
    """Return True if doubling the number of items halves the loss of the first sample whose loss is not 0."""
    for sample in samples[:_MOST]:
        once = float(loss.of(sample, loss.items, loss.model))
        if once and math.isfinite(once):  # a loss of 0 halves to 0, whatever it is divided by
            twice = float(loss.of(sample, 2 * loss.items, loss.model))
            return math.isclose(once, 2 * twice, rel_tol=1e-3)
    return False


def _needs_items(loss: HostLoss, sample: Any) -> bool:
    """Return True if the loss raises TypeError for ``num_items_in_batch=None``."""
    try:
        loss.of(sample, None, loss.model)
    except TypeError:
        return True
    return False
