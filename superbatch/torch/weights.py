"""Weights of micro-batches: functions of a micro-batch, evaluated on the host before any forward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ..batch.tree import get
from ..errors import InputError
from .devices import where_float64_is

Weight = Callable[[Any], int | float]
PathOrFunction = str | Callable[[Any], Any]


def count_tokens(where: PathOrFunction, *, ignore_index: int = -100, shift: bool = False) -> Weight:
    """Weigh a micro-batch by the number of tokens in its loss, for a cross entropy averaged over tokens.

    ``w = #{labels != ignore_index}``

    Args:
        where: path of the labels in a micro-batch (``"labels"``, ``"1"``), or a function micro-batch ->
            labels; integer labels of shape (samples, ...) with the sequence last.
        ignore_index: the label that `torch.nn.functional.cross_entropy` leaves out.
        shift: the model itself drops the first label of each sequence, as Hugging Face's causal models do.

    Returns:
        A function micro-batch -> int, for ``Accumulator(weight=...)``.

    Examples:
        >>> weight = count_tokens("labels")
        >>> weight({"labels": torch.tensor([[5, 6, -100], [7, -100, -100]])})
        3
        >>> count_tokens("labels", shift=True)({"labels": torch.tensor([[5, 6, -100], [7, -100, -100]])})
        1
    """
    # Checked here, because an error in the first window comes only after the data were loaded.
    read = _reader(where)
    if isinstance(ignore_index, bool) or not isinstance(ignore_index, int) or not isinstance(shift, bool):
        raise InputError(
            f"ignore_index={ignore_index!r} and shift={shift!r} are not an int and a bool. Pass them as in "
            "ignore_index=-100, shift=True."
        )

    def weight(microbatch: Any) -> int:
        labels = read(microbatch)
        # In uint8 -100 wraps to 156, so the comparison would ignore the label 156.
        labels = labels.long() if labels.dtype == torch.uint8 else labels
        if shift:
            if not labels.ndim:
                raise _no_labels(labels, "shift=True needs sequences, to drop the first label of each")
            # In the last dimension, because labels may be [samples, choices, sequence].
            labels = labels[..., 1:]
        return int((labels != ignore_index).sum())

    return weight


def sample_weights(where: PathOrFunction) -> Weight:
    """Weigh a micro-batch by the sum of its samples' weights: for a loss ``sum w_j l_j / sum w_j``.

    Args:
        where: path of the weights in a micro-batch, or a function micro-batch -> weights of shape (samples,).

    Returns:
        A function micro-batch -> float (summed in float64).

    Examples:
        >>> sample_weights("weight")({"weight": torch.tensor([0.5, 2.0])})
        2.5
    """
    read = _reader(where)
    # In float64, because the update is divided by this sum over many samples.
    return lambda microbatch: float(where_float64_is(read(microbatch)).sum(dtype=torch.float64))


def class_weights(weight: Tensor, where: PathOrFunction, *, ignore_index: int = -100) -> Weight:
    """Weigh a micro-batch by the class weights of its labels, as ``CrossEntropyLoss(weight=weight)`` does.

    ``w = sum_j weight[label_j]`` over labels other than `ignore_index`.

    Args:
        weight: weight of each class, shape (classes,).
        where: path of the labels, or a function micro-batch -> integer labels of any shape.
        ignore_index: the label that the loss leaves out.

    Returns:
        A function micro-batch -> float (summed in float64).

    Raises:
        InputError: `weight` is not a 1-d floating-point tensor of finite weights >= 0.

    Examples:
        >>> class_weights(torch.tensor([1.0, 3.0]), "1")((None, torch.tensor([0, 1, 1])))
        7.0
    """
    # Values too, because a NaN weight would spread to the whole update.
    valid = isinstance(weight, Tensor) and weight.ndim == 1 and weight.is_floating_point()
    if not valid or not bool(((weight >= 0) & weight.isfinite()).all()):
        raise InputError(
            f"The class weights are {weight!r}, but each class needs one finite floating-point weight of at "
            "least 0. Pass the 1-d tensor that you pass to CrossEntropyLoss(weight=...)."
        )
    # On the host, because weights are needed before any forward, and labels are small.
    read, per_class = _reader(where), weight.detach().cpu().double()

    def weigh(microbatch: Any) -> float:
        labels = read(microbatch).cpu()
        if labels.is_floating_point():
            raise _no_labels(labels, "a class is an integer")
        labels = labels.long()  # indexing by uint8 selects as a mask
        counted = labels[labels != ignore_index]
        # Otherwise torch raises an IndexError that does not name the labels.
        if counted.numel() and not 0 <= int(counted.min()) <= int(counted.max()) < len(per_class):
            raise _no_labels(counted, f"there are weights for the classes 0..{len(per_class) - 1}")
        return float(per_class[counted].sum())

    return weigh


def _reader(where: PathOrFunction) -> Callable[[Any], Tensor]:
    if not callable(where) and not isinstance(where, str):
        raise InputError(
            f"where={where!r} is a {type(where).__name__}, not a path. Pass a path such as "
            '"labels" or "1", or a function of the micro-batch.'
        )

    def read(microbatch: Any) -> Tensor:
        found = where(microbatch) if callable(where) else get(microbatch, where)
        try:
            # as_tensor converts lists too, and does not copy an array.
            return torch.as_tensor(found)
        except (TypeError, ValueError, RuntimeError) as error:
            raise InputError(
                f"where={where!r} gives a {type(found).__name__}, not numbers. Pass the path of a tensor, an "
                "array or a list of numbers."
            ) from error

    return read


def _no_labels(labels: Tensor, wrong: str) -> InputError:
    spread = f"from {labels.min().item()} to {labels.max().item()}" if labels.numel() else "none"
    return InputError(
        f"Labels of dtype {labels.dtype} and shape {tuple(labels.shape)}, {spread}, cannot be weighed: "
        f"{wrong}. Pass the path of the labels that the loss gets, and the loss's ignore_index."
    )


@dataclass(frozen=True)
class AtLeast:
    """A ``weight=`` option whose total over a batch is at least `minimum`."""

    minimum: float
    weight: Weight | Literal["returned"] | None


def at_least(minimum: float, weight: Weight | Literal["returned"] | None = None) -> AtLeast:
    """Set a lower bound for the weight by which a batch's loss is divided; DETR divides by at least 1 box.

    ``W = max(minimum, sum w_i)``, over the micro-batches of all ranks.

    Args:
        minimum: lower bound of the total.
        weight: weight of a micro-batch, as the ``weight=`` option: None for its number of samples, a
            function, or ``"returned"``.

    Returns:
        A value for ``weight=``, or for one term of it.

    Examples:
        >>> at_least(1, len).minimum
        1
    """
    return AtLeast(minimum, weight)
