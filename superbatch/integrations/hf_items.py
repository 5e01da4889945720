"""Losses of the Hugging Face Trainer that are divided by the number of items of the whole batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from ..batch.split import split
from ..errors import InputError, SplitError
from .hf_losses import HostLoss, evaluating

_MOST = 4  # samples that are tried: one may have no label


def adds_up(loss: HostLoss, samples: Mapping[str, Any], *, is_hidden: bool) -> bool:
    """Tell whether the loss of the batch is the sum of the losses of its parts, given the number of items.

    Args:
        loss: of the host.
        samples: a micro-batch.
        is_hidden: otherwise nothing shows what it is divided by.

    Raises:
        InputError: it is not, and what divides it is not known.
    """

    def loss_of(samples: Any, items: Any) -> Tensor:
        return loss.of(samples, items, loss.model)

    found = loss.items is not None and divides_by_items(loss.model, loss_of, samples, loss.items)
    if loss.on_all_ranks(found):  # a rank may have no labels
        return True
    if loss.items is not None and needs_items(loss.model, loss_of, samples):
        raise InputError(
            "The loss of this trainer needs num_items_in_batch, and is no sum that is divided by it. "
            "Divide the sum over labels by it and add no other term, or return the mean where it is None."
        )
    if is_hidden:
        raise InputError(
            "This trainer has a loss of its own, and micro-batches of one sample do not show what it is "
            "divided by. Write `def weight_of(self, microbatch)` in its class: return the number of "
            "samples or tokens that the loss is a mean over."
        )
    return False


def divides_by_items(model: nn.Module, loss_of: Callable[[Any, Any], Any], batch: Any, items: Any) -> bool:
    """Tell whether a loss is a sum that is divided by the number of items given to it, and by nothing else.

    The losses of parts then add up to that of the whole batch, whatever the number counts. Single samples
    are evaluated, in evaluation mode.

    Args:
        model: what `loss_of` calls.
        loss_of: returns the loss of some samples for a number of items.
        batch: samples to try.
        items: number of items of the whole batch.

    Examples:
        >>> model, batch = nn.Linear(1, 1), torch.ones(3, 1)
        >>> divides_by_items(model, lambda batch, items: model(batch).sum() / items, batch, 7)
        True
        >>> divides_by_items(model, lambda batch, items: model(batch).mean(), batch, 7)
        False
    """
    try:
        samples = split(batch, 1)
    except SplitError:
        return False
    with evaluating(model):
        for sample in samples[:_MOST]:
            once = float(loss_of(sample, items))
            if once and math.isfinite(once):
                return math.isclose(once, 2 * float(loss_of(sample, 2 * items)), rel_tol=1e-3)
    return False


def needs_items(model: nn.Module, loss_of: Callable[[Any, Any], Any], batch: Any) -> bool:
    """Tell whether a loss fails without a number of items.

    Args:
        model: as for `divides_by_items`.
        loss_of: likewise; it works with a number.
        batch: likewise.

    Examples:
        >>> model, batch = nn.Linear(1, 1), torch.ones(3, 1)
        >>> needs_items(model, lambda batch, items: model(batch).sum() / items + 1, batch)
        True
    """
    with evaluating(model):
        try:
            loss_of(split(batch, 1)[0], None)
        except TypeError:
            return True
        except SplitError:
            return False
    return False
