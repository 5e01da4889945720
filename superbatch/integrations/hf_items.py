"""Losses of the Hugging Face Trainer that are divided by the number of items of the whole batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..batch.split import split
from ..errors import InputError, LossSpecError, SplitError
from ..torch.checks.divisions import Division, divisions_of
from .hf_losses import HostLoss

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
    if loss.ranks > 1:  # a rank may have no labels
        device = loss.trainer.args.device
        found = bool(
            torch.as_tensor(loss.trainer.accelerator.gather(torch.tensor([found], device=device))).all()
        )
    if found:
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


class WeightCheck:
    """Loss of a model, whose means are compared with the weight: they show in its graph.

    Each cross entropy must count the labels that the weight counts, and each other mean beside one must count
    in proportion to it. So terms with divisors of their own are found where samples come one by one, too.

    Args:
        loss: of the host.
        weigh: returns the weight of a micro-batch.

    Raises:
        LossSpecError: from a call, where they differ.
    """

    def __init__(self, loss: HostLoss, weigh: Callable[[Any], float]) -> None:
        self._loss, self._weigh = loss, weigh
        self._first: tuple[float, list[Division]] | None = None
        self._is_compared = False

    def __call__(self, microbatch: Mapping[str, Any]) -> Tensor:
        """Return the loss of a micro-batch."""
        loss, labels = self._loss.mean(microbatch), microbatch.get("labels")
        # A model that shifts its labels, or does not, shows where their first one counts.
        if self._is_compared or not isinstance(labels, Tensor) or not labels.ndim:
            return loss
        if weight := self._weigh(microbatch):
            means = [each for each in divisions_of(loss) if each.sure]
            self._compare(means, weight)
            self._is_compared = self._shows_enough(means, weight, labels)
        return loss

    def _shows_enough(self, means: list[Division], weight: float, labels: Tensor) -> bool:
        """Compare the means with those of the first micro-batch; return whether another one shows no more."""
        if not any(each.counted is not None for each in means):
            return True
        if self._first is None:
            self._first = weight, means
        first_weight, first = self._first
        if len(means) == len(first):
            for one, other in zip(first, means, strict=True):
                if not math.isclose(one.divisor * weight, other.divisor * first_weight):
                    raise self._unequal(f"{other.divisor:g} entries", weight)
        return weight != first_weight and bool((labels[..., 0] != -100).any())

    def _compare(self, means: list[Division], weight: float) -> None:
        for each in means:
            if each.counted not in (None, weight):
                raise self._unequal(f"{each.counted:g} labels", weight)

    def _unequal(self, counted: str, weight: float) -> LossSpecError:
        return LossSpecError(
            f"The loss of {type(self._loss.model).__name__} is a mean over {counted} of a "
            f"micro-batch, and superbatch counts {weight}. Write `def weight_of(self, microbatch)` in "
            "the trainer's class: return the number of labels that the loss is a mean over."
        )


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
