"""Losses of the Hugging Face Trainer that are divided by the number of items of the whole batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ..batch.split import split
from ..errors import SplitError
from ..torch.checks.divisions import divisions_of

_MOST = 4  # samples that are tried: one may have no label


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
    with _evaluating(model), torch.no_grad(), torch.random.fork_rng():
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
    with _evaluating(model), torch.no_grad(), torch.random.fork_rng():
        try:
            loss_of(split(batch, 1)[0], None)
        except TypeError:
            return True
        except SplitError:
            return False
    return False


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    trained = [module for module in model.modules() if module.training]
    for module in trained:
        module.training = False
    try:
        yield
    finally:
        for module in trained:
            module.training = True


def counted_by(loss: Any) -> float | None:
    """Return the labels that a mean cross entropy counts, read from the graph of a loss; None: not shown.

    Args:
        loss: of a micro-batch.

    Examples:
        >>> logits = torch.zeros(3, 2, requires_grad=True)
        >>> counted_by(nn.functional.cross_entropy(logits, torch.tensor([1, -100, 0])))
        2.0
        >>> counted_by(logits.mean()) is None
        True
    """
    found = [each.counted for each in divisions_of(loss) if each.counted is not None]
    return found[0] if len(found) == 1 else None
