"""Assertion for your tests: the gradient of a loss does not depend on the split of the batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from torch import nn

from .batch.tree import count_samples
from .errors import InputError
from .normalize import Reduction
from .results.verification import Verification
from .torch.checks.probing.problem import WeightOption
from .torch.options import NOT_DECLARED, Split
from .torch.verify import verify_sizes


def assert_split_invariant(
    loss_fn: Callable[[Any], Any],
    batch: Any,
    *,
    models: nn.Module | Sequence[nn.Module],
    sizes: Sequence[int | Literal["half"]] = (1, 3, "half"),
    weight: WeightOption | Mapping[str, WeightOption] = None,
    reduction: Reduction | Mapping[str, Reduction] = "mean",
    participants: Sequence[Any] = (),
    split: Split = NOT_DECLARED,
) -> None:
    """Assert that micro-batches of several sizes give the gradient of the whole batch, using `verify`.

    Afterwards the model, its gradients, the random state and the state reachable from `loss_fn` are restored.
    The pytest fixture of the same name is this function.

    Args:
        loss_fn: a function of a micro-batch that calls the models and returns the loss.
        batch: a batch as in training, of two samples or more. Unequal lengths and padding reveal wrong
            weights.
        models: the model or models, in the mode used for training.
        sizes: samples of a micro-batch; ``"half"`` is half of the batch. Sizes that are not smaller than the
            batch are ignored.
        weight: the weight of a micro-batch, as passed to the Accumulator.
        reduction: the reduction of the loss, as passed to the Accumulator.
        participants: as in `verify`: `PerSampleRandom` for dropout, `FrozenBatchNorm` for BatchNorm.
        split: how to split parts that are not tensors with the samples in dimension 0, as in the Accumulator.

    Raises:
        AssertionError: a split gives another gradient. The text names the size, the parameter, the relative
            difference, the cause and the remedy, such as the correct weight.
        InputError: an argument has the wrong type or value, or no size is smaller than the batch.
        SplitError: the batch cannot be split.
        NonFiniteError: the loss or a gradient is not finite.

    Examples:
        >>> import torch
        >>> from superbatch.torch import count_tokens
        >>> model = nn.Embedding(9, 9)
        >>> tokens = torch.tensor([[1, 2, 3], [4, -100, -100], [5, 6, -100], [7, -100, -100]])
        >>> batch = {"ids": tokens.clamp(min=0), "labels": tokens}
        >>> def loss_fn(batch):
        ...     return nn.functional.cross_entropy(model(batch["ids"]).mT, batch["labels"])
        >>> assert_split_invariant(loss_fn, batch, models=model, weight=count_tokens("labels"))
        >>> assert_split_invariant(loss_fn, batch, models=model)
        Traceback (most recent call last):
        ...
        AssertionError: The gradient depends on the split. With micro-batches of 3 samples, the gradient of
        'weight' differs from the batch's by ... of its norm. ... Pass weight=count_tokens("labels"). ...
    """
    __tracebackhide__ = True  # pytest shows the line of the test instead
    usable = _usable(sizes, count_samples(batch, **split.paths))
    options: dict[str, Any] = {"weight": weight, "reduction": reduction, "split": split}
    reports = verify_sizes(models, loss_fn, batch, usable, participants=participants, **options)
    for size, report in zip(usable, reports, strict=True):
        if not report.exact:
            raise AssertionError(_failure(report, size))


def _usable(sizes: Sequence[int | Literal["half"]], samples: int) -> list[int]:
    """Return the sizes that split the batch as ints, largest first.

    Raises:
        InputError: an entry is not valid, or no size is smaller than the batch.
    """
    if isinstance(sizes, str):
        raise InputError(
            f"sizes={sizes!r} is a string, not a list of sizes. Pass a list, such as sizes=(1, 3, 'half')."
        )
    numbers: set[int] = set()
    for size in sizes:
        number = samples // 2 if size == "half" else size
        if isinstance(number, bool | str) or (size != "half" and number < 1):
            raise InputError(f"sizes contains {size!r}. Pass numbers of samples, 1 or more, or 'half'.")
        numbers.add(number)
    # Largest first: BatchNorm raises for single samples, which would hide the difference of other sizes.
    usable = sorted((number for number in numbers if 0 < number < samples), reverse=True)
    if not usable:
        raise InputError(
            f"No size of sizes={tuple(sizes)!r} is smaller than the batch of {samples} samples. Pass a "
            "larger batch, or a smaller size."
        )
    return usable


def _failure(report: Verification, size: int) -> str:
    """Return the error text: the parameter with the largest difference, then the report."""
    # Of the comparisons that fail, float64 shows the difference without rounding.
    shown = max(report.comparisons, key=lambda one: (not one.exact, one.dtype == "float64", one.largest))
    split = f"With micro-batches of {size} sample{'s' * (size > 1)}"
    if shown.exact:
        first = f"{split}, the gradients agree, but the loss does not match its declaration in other splits."
    else:
        worst = max(shown.parameters, key=lambda one: one.relative)
        first = (
            f"{split}, the gradient of {worst.name!r} differs from the batch's by {worst.relative:.1e} of "
            "its norm."
        )
    return f"The gradient depends on the split. {first}\n{report}"
