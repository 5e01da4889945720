"""Losses of Hugging Face models that are several sums, each with a divisor of its own."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..errors import InputError, LossSpecError
from ..torch.loss.declared import WeightOption
from ..torch.weights import at_least
from .hf_weights import kind_of

Inputs = Mapping[str, Any]
TOLERANCE = 1e-3  # of the sum of the terms against the loss of the model, which may be in bfloat16


@dataclass(frozen=True)
class Terms:
    """Terms of a loss by name.

    Attributes:
        of: returns the terms of a micro-batch, from the config of the model, its inputs and its outputs.
        weights: returns what each term of a micro-batch counts, from the config and the inputs.
        reductions: of each term, as `Gradient`'s.
        ranks: whether the divisors of a rank are its own.
        fit: returns other terms if the model's outputs require them; None if they never do.
    """

    of: Callable[[Any, Inputs, Any], dict[str, Tensor]]
    weights: dict[str, Callable[[Any, Inputs], float]]
    reductions: dict[str, Literal["mean", "sum"]]
    ranks: bool = True
    fit: Callable[[Inputs, Any], Terms | None] | None = None

    def can_weigh(self, config: Any, inputs: Inputs) -> bool:
        """Tell whether the inputs have what the weights are counted from."""
        try:
            for weigh in self.weights.values():
                weigh(config, inputs)
        except (KeyError, TypeError):  # a tensor has no names of labels
            return False
        return True

    def options(self, config: Any) -> dict[str, Any]:
        """Return `weight` and `reduction` as `Gradient` takes them."""

        def bound(name: str) -> WeightOption:
            weigh = partial(self.weights[name], config)
            return at_least(1, weigh) if self.reductions[name] == "sum" else weigh  # as the models do

        return {"weight": {name: bound(name) for name in self.weights}, "reduction": self.reductions}


def terms_of(model: Any, inputs: Inputs, ranks: int = 1) -> Terms | None:
    """Return the terms of the loss of a model; None: one mean, or its inputs are others.

    Args:
        model: of transformers.
        inputs: of a micro-batch.
        ranks: number of processes.

    Raises:
        InputError: the loss has them, and counts over the ranks in each forward.
    """
    terms = TERMS.get(kind_of(model) or "")
    if terms is not None and not terms.can_weigh(getattr(model, "config", None), inputs):
        return None
    if terms is not None and ranks > 1 and not terms.ranks:
        raise InputError(
            f"{type(model).__name__} divides its loss by the mean number of boxes of all ranks in each "
            "forward, so micro-batches do not add up to the batch on several ranks. Train it on one."
        )
    return terms


def checked_terms(terms: Terms, model: Any, inputs: Inputs, loss: Tensor, outputs: Any) -> dict[str, Tensor]:
    """Return the terms of a micro-batch, which must add up to the loss of the model.

    Args:
        terms: of the loss of the model.
        model: of transformers.
        inputs: of the model.
        loss: that it returned.
        outputs: that it returned.

    Raises:
        InputError: the outputs lack some.
        LossSpecError: they do not, so the loss of this model is another one.
    """
    config = getattr(model, "config", None)
    try:
        found = terms.of(config, inputs, outputs)
    except KeyError as error:
        raise InputError(
            f"superbatch cannot tell what the loss of {type(model).__name__} is divided by: its outputs have "
            f"no {error}. Write `def weight_of(self, microbatch)` in the trainer's class: return the number "
            "of samples that the loss is a mean over."
        ) from error
    weights = {name: terms.weights[name](config, inputs) for name in found}
    # A mean over nothing is no number, and has no share of the batch.
    total = sum(
        float(value.detach()) / (max(weights[name], 1) if terms.reductions[name] == "sum" else 1)
        for name, value in found.items()
        if weights[name] or terms.reductions[name] == "sum"
    )
    mean = float(loss.detach())
    if math.isfinite(mean) and abs(total - mean) > TOLERANCE * max(abs(mean), 1):
        raise LossSpecError(
            f"The loss of {type(model).__name__} is {mean:g}, and the terms {', '.join(found)} that "
            f"superbatch takes it for add up to {total:g}. Write `def weight_of(self, microbatch)` in the "
            "trainer's class: return the number of samples that the loss is a mean over."
        )
    return found


def _answer(config: Any, inputs: Inputs, outputs: Any) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name in ("start", "end"):
        logits = outputs[f"{name}_logits"]
        positions = _positions(inputs, name).clamp(0, logits.shape[1])
        found[name] = nn.functional.cross_entropy(logits, positions, ignore_index=logits.shape[1]) / 2
    return found


def _positions(inputs: Inputs, name: str) -> Tensor:
    positions = inputs[f"{name}_positions"]
    return positions.squeeze(-1) if positions.ndim > 1 else positions


def _inside(name: str, more: int) -> Callable[[Any, Inputs], float]:
    return lambda config, inputs: int((_positions(inputs, name) < inputs["input_ids"].shape[-1] + more).sum())


def _answers(more: int = 0) -> Terms:
    """Return the terms of answers that lie within the logits, of which there are `more` than input ids."""
    names = ("start", "end")
    weights = {name: _inside(name, more) for name in names}
    return Terms(_answer, weights, dict.fromkeys(names, "mean"), fit=_fitted)


def _fitted(inputs: Inputs, outputs: Any) -> Terms | None:
    """Return the terms for a model that also has logits for image patches."""
    logits = outputs.get("start_logits") if isinstance(outputs, Mapping) else None
    more = 0 if logits is None else logits.shape[1] - inputs["input_ids"].shape[-1]
    return _answers(more) if more else None


def _boxes(config: Any, inputs: Inputs) -> int:
    return sum(len(each["class_labels"]) for each in inputs["labels"])


def _queries(config: Any, inputs: Inputs) -> float:
    """Return the weights of the classes of all queries: one with no object counts `eos_coefficient`."""
    queries = getattr(config, "num_queries", None) or config.num_detection_tokens
    matched = sum(min(queries, len(each["class_labels"])) for each in inputs["labels"])
    return matched + config.eos_coefficient * (queries * len(inputs["labels"]) - matched)


def _matched(config: Any, inputs: Inputs, outputs: Any) -> dict[str, Tensor]:
    """Return the mean over the classes of queries, and the sum over boxes."""
    scales = {"bbox": config.bbox_loss_coefficient, "giou": config.giou_loss_coefficient}
    losses = {name.removeprefix("loss_"): value for name, value in outputs["loss_dict"].items()}
    classes = torch.stack([value for name, value in losses.items() if name.startswith("ce")]).sum()
    boxes = torch.stack(
        [scales[kind] * losses[name] for name in losses if (kind := name.split("_")[0]) in scales]
    ).sum()
    return {"classes": classes, "boxes": boxes * max(_boxes(config, inputs), 1)}


def _of_boxes(config: Any, inputs: Inputs, outputs: Any) -> dict[str, Tensor]:
    return {"boxes": outputs["loss"] * max(_boxes(config, inputs), 1)}


_MATCHED = Terms(
    _matched, {"classes": _queries, "boxes": _boxes}, {"classes": "mean", "boxes": "sum"}, ranks=False
)
_OF_BOXES = Terms(_of_boxes, {"boxes": _boxes}, {"boxes": "sum"}, ranks=False)
TERMS = {
    "ForQuestionAnswering": _answers(),
    "ForObjectDetection": _MATCHED,
    "ConditionalDetrForObjectDetection": _OF_BOXES,
    "DabDetrForObjectDetection": _OF_BOXES,
    "DeformableDetrForObjectDetection": _OF_BOXES,
}
