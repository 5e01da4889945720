"""Check of the divisor of a loss for micro-batches of one sample, by joining samples into a batch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import CoupledSamplesError, LossSpecError, SplitError
from ..torch.gradient import Gradient
from ..torch.warn import warn
from .hf_losses import HostLoss, split_of

Weigh = Callable[[Any], float]
_MOST = 4  # most samples to join; with two, a wrong weight may be right by chance


def check_singles(
    gradient_of: Gradient,
    loss: HostLoss,
    samples: Sequence[Mapping[str, Any]],
    *,
    weigh: Weigh | None,
    count: Weigh | None,
    is_stated: bool = False,
) -> bool:
    """Check the loss of a window whose micro-batches are single samples.

    Collective: every rank must call it. Warns if the loss cannot be checked.

    Args:
        gradient_of: gradient of the windows; its own first-window check is disabled.
        loss: loss of the Trainer.
        samples: the micro-batches.
        weigh: returns the weight of a micro-batch; None if unknown.
        count: returns the number of labels that the loss counts; None if unknown.
        is_stated: the user defined `weight_of`.

    Returns:
        False if no sample of a rank has weight; the next window must be checked instead.

    Raises:
        LossSpecError, CoupledSamplesError: losses of samples do not add up to the loss of a batch.
    """
    engine = gradient_of.engine
    engine.checked = True  # its own check of single samples would show nothing
    if not loss.on_all_ranks(weigh is None or any(map(weigh, samples))):
        return False
    batch, reason = None, "the samples of another rank cannot be joined"
    try:
        batch = together(samples, split_of(samples[0]).per_sample, weigh, count)
    except Exception as error:  # noqa: BLE001  (weight_of() may be made for one sample, and raise anything)
        reason = str(error)
    if loss.on_all_ranks(batch is not None):
        engine.checked = False
        try:
            gradient_of.window(batch)  # making the window checks the loss; it is never entered
            reason = ""
        except (LossSpecError, CoupledSamplesError):
            raise
        except Exception as error:  # noqa: BLE001  (a model may take one sample at a time, and raise anything)
            reason = str(error)
        engine.checked = True
        if not reason and is_stated and _count_alike(batch):
            warn(
                "superbatch could check the loss only on samples with equal numbers of labels, so the "
                "divisor of the loss may differ from weight_of(). Compare the first loss with that of "
                "per_device_train_batch_size=2."
            )
    if reason:
        warn(
            "superbatch could not check the divisor of the loss: micro-batches have one sample, and several "
            f"samples could not be run together ({reason}). Compare the first loss with that of "
            "per_device_train_batch_size=2."
        )
    return True


def together(
    samples: Sequence[Mapping[str, Any]],
    lists: Collection[str],
    weigh: Weigh | None = None,
    count: Weigh | None = None,
) -> dict[str, Any]:
    """Join the smallest samples into a batch with unequal weights.

    Shorter samples repeat their last entry, so that all have one shape. Every other sample keeps half of its
    labels and half of its attention mask, since samples of equal weight would not reveal the divisor.

    Args:
        samples: micro-batches of one sample each.
        lists: names of inputs that are lists with an object for each sample.
        weigh: as for `check_singles`.
        count: likewise.

    Raises:
        SplitError: the samples cannot be joined, or their weights do not add up.

    Examples:
        >>> ids = [{"labels": torch.tensor([row])} for row in ([1, 2, 3, 4], [5, 6])]
        >>> together(ids, (), count=lambda batch: int((batch["labels"] != -100).sum()))["labels"].tolist()
        [[5, 6, 6, 6], [1, 2, -100, -100]]
    """
    chosen = [each for each in samples if weigh is None or weigh(each)] or list(samples)
    chosen = sorted(chosen, key=_entries)[:_MOST]  # the smallest, as they must fit in memory together
    chosen = chosen if len(chosen) > 1 else chosen * 2
    batch = {name: _joined(name, [each[name] for each in chosen], name in lists) for name in chosen[0]}
    if "attention_mask" in batch:
        batch["attention_mask"] = _halved(batch["attention_mask"], 0)
    if isinstance(batch.get("labels"), Tensor) and count is not None:
        halved = {**batch, "labels": _halved(batch["labels"], -100)}
        if count(batch) - count(halved) == int((halved["labels"] != batch["labels"]).sum()):
            batch = halved  # the loss ignores the removed labels, as `count` shows
    if weigh is not None:
        total = weigh(batch)
        if abs(total - sum(weigh(_row_of(batch, row)) for row in range(len(chosen)))) > 1e-6 * abs(total):
            raise SplitError("weight_of() of joined samples differs from the sum of their weights")
    return batch


def _count_alike(batch: Any) -> bool:
    """Return True if all rows have equally many labels other than -100; they do not reveal the divisor."""
    labels = batch.get("labels")
    if not isinstance(labels, Tensor) or labels.ndim < 2 or labels.is_floating_point():
        return False
    counts = (labels != -100).flatten(1).sum(1)
    return bool((counts == counts[0]).all())


def _entries(sample: Mapping[str, Any]) -> int:
    return sum(value.numel() for value in sample.values() if isinstance(value, Tensor))


def _joined(name: str, values: Sequence[Any], is_list: bool) -> Any:
    if is_list:
        return [each for value in values for each in value]
    if all(isinstance(value, Tensor) and value.ndim and len(value) == 1 for value in values):
        shape = [max(sizes) for sizes in zip(*(value.shape for value in values), strict=True)]
        return torch.cat([_filled(value, shape) for value in values])
    if isinstance(values[0], bool | int | float | str | None) and len(set(values)) == 1:
        return values[0]  # an option, the same for all samples
    raise SplitError(f"{name!r} has no row for each sample")


def _row_of(batch: Mapping[str, Any], row: int) -> dict[str, Any]:
    return {
        name: value[row : row + 1] if isinstance(value, Tensor | list) else value
        for name, value in batch.items()
    }


def _filled(value: Tensor, shape: Sequence[int]) -> Tensor:
    """Return a tensor of this shape that repeats the last entries of `value`, so that all ids are valid."""
    for dim, size in enumerate(shape):
        if not value.shape[dim]:
            raise SplitError("a sample has no entries")
        indices = torch.arange(size, device=value.device).clamp(max=value.shape[dim] - 1)
        value = value.index_select(dim, indices)
    return value


def _halved(value: Tensor, left_out: int) -> Tensor:
    """Replace the later half of the entries that count, in every other row, by `left_out`."""
    if value.ndim < 2 or value.is_floating_point():
        return value
    value = value.clone()
    for row in value[1::2]:
        counting = (row != left_out).nonzero()
        row[tuple(counting[(len(counting) + 1) // 2 :].T)] = left_out
    return value
