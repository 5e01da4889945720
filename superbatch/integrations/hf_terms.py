"""Losses of Hugging Face models with several terms, each with its own divisor."""

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
TOLERANCE = 1e-3  # relative, of the sum of the terms; the loss of the model may be in bfloat16


@dataclass(frozen=True)
class Terms:
    """Terms of a loss by name.

    Attributes:
        of: returns the terms of a micro-batch, from the config of the model, its inputs and its outputs.
        weights: for each term, returns its weight in a micro-batch from the config and the inputs.
        reductions: reduction of each term, as in `Gradient`.
        ranks: True if the divisors of a rank do not depend on other ranks.
        fit: returns other terms if the outputs of the model require them; None if they never do.
    """

    of: Callable[[Any, Inputs, Any], dict[str, Tensor]]
    weights: dict[str, Callable[[Any, Inputs], float]]
    reductions: dict[str, Literal["mean", "sum"]]
    ranks: bool = True
    fit: Callable[[Inputs, Any], Terms | None] | None = None

    def can_weigh(self, config: Any, inputs: Inputs) -> bool:
        """Return True if the weights can be computed from the inputs."""
        try:
            for weigh in self.weights.values():
                weigh(config, inputs)
        except (KeyError, TypeError):  # labels are missing, or a tensor instead of a list of dicts
            return False
        return True

    def options(self, config: Any) -> dict[str, Any]:
        """Return the options `weight` and `reduction` of `Gradient`."""

        def bound(name: str) -> WeightOption:
            weigh = partial(self.weights[name], config)
            return at_least(1, weigh) if self.reductions[name] == "sum" else weigh  # models clamp at 1 too

        return {"weight": {name: bound(name) for name in self.weights}, "reduction": self.reductions}


def terms_of(model: Any, inputs: Inputs, ranks: int = 1) -> Terms | None:
    """Return the terms of the loss of a model; None if it has one term, or other inputs than expected.

    Args:
        model: a model of transformers.
        inputs: inputs of a micro-batch.
        ranks: number of processes.

    Raises:
        InputError: the loss has terms whose divisors are averaged over several ranks in each forward.
    """
    terms = TERMS.get(kind_of(model) or "")
    if terms is not None and not terms.can_weigh(getattr(model, "config", None), inputs):
        return None
    if terms is not None and ranks > 1 and not terms.ranks:
        raise InputError(
            f"{type(model).__name__} divides its loss by the mean number of boxes over all ranks in each "
            f"forward, so losses of micro-batches do not add up on {ranks} ranks. Train it on one rank."
        )
    return terms


def checked_terms(terms: Terms, model: Any, inputs: Inputs, loss: Tensor, outputs: Any) -> dict[str, Tensor]:
    """Return the terms of a micro-batch after checking that they add up to the loss of the model.

    Args:
        terms: terms of the loss of the model.
        model: a model of transformers.
        inputs: inputs of the model.
        loss: the loss it returned.
        outputs: the outputs it returned.

    Raises:
        InputError: an entry of the outputs is missing.
        LossSpecError: the terms do not add up to the loss.
    """
    config = getattr(model, "config", None)
    try:
        parts = terms.of(config, inputs, outputs)
    except KeyError as error:
        raise InputError(
            f"superbatch cannot find the divisor of the loss of {type(model).__name__}: its outputs have no "
            f"{error}. Define `weight_of(self, microbatch)` in the trainer's class and return the number of "
            "samples over which the loss is a mean."
        ) from error
    weights = {name: terms.weights[name](config, inputs) for name in parts}
    # Skip a mean with weight 0: it is NaN, and contributes nothing to the batch.
    total = sum(
        float(value.detach()) / (max(weights[name], 1) if terms.reductions[name] == "sum" else 1)
        for name, value in parts.items()
        if weights[name] or terms.reductions[name] == "sum"
    )
    mean = float(loss.detach())
    if math.isfinite(mean) and abs(total - mean) > TOLERANCE * max(abs(mean), 1):
        raise LossSpecError(
            f"The loss of {type(model).__name__} is {mean:g}, but its terms {', '.join(parts)} add up to "
            f"{total:g}."  # the Trainer's error adds the remedy, `weight_of`
        )
    return parts


def _answer(config: Any, inputs: Inputs, outputs: Any) -> dict[str, Tensor]:
    """Return the terms of question answering: the model adds two cross entropies and halves the sum."""
    parts: dict[str, Tensor] = {}
    for name in ("start", "end"):
        logits = outputs[f"{name}_logits"]
        # As in transformers: positions outside of the input are ignored.
        positions = _positions(inputs, name).clamp(0, logits.shape[1])
        parts[name] = nn.functional.cross_entropy(logits, positions, ignore_index=logits.shape[1]) / 2
    return parts


def _positions(inputs: Inputs, name: str) -> Tensor:
    positions = inputs[f"{name}_positions"]
    return positions.squeeze(-1) if positions.ndim > 1 else positions


def _inside(name: str, more: int) -> Callable[[Any, Inputs], float]:
    """Return a function that counts the positions inside of the input, the divisor of a cross entropy."""
    return lambda config, inputs: int((_positions(inputs, name) < inputs["input_ids"].shape[-1] + more).sum())


def _answers(more: int = 0) -> Terms:
    """Return the terms of question answering, for a model with `more` logits than input ids."""
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
    """Return the sum of the class weights of all queries; one without an object has `eos_coefficient`."""
    queries = getattr(config, "num_queries", None) or config.num_detection_tokens
    matched = sum(min(queries, len(each["class_labels"])) for each in inputs["labels"])
    return matched + config.eos_coefficient * (queries * len(inputs["labels"]) - matched)


def _matched(config: Any, inputs: Inputs, outputs: Any) -> dict[str, Tensor]:
    """Return the mean over the classes of queries, and the sum over boxes."""
    scales = {"bbox": config.bbox_loss_coefficient, "giou": config.giou_loss_coefficient}
    losses = {name.removeprefix("loss_"): value for name, value in outputs["loss_dict"].items()}
    # Auxiliary losses of earlier layers have a suffix: "ce_0", "bbox_0".
    classes = torch.stack([value for name, value in losses.items() if name.startswith("ce")]).sum()
    boxes = torch.stack(
        [scales[kind] * losses[name] for name in losses if (kind := name.split("_")[0]) in scales]
    ).sum()
    return {"classes": classes, "boxes": boxes * max(_boxes(config, inputs), 1)}


def _of_boxes(config: Any, inputs: Inputs, outputs: Any) -> dict[str, Tensor]:
    """Return the sum over boxes for models that divide all of their loss by the number of boxes."""
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
