"""Weight of a micro-batch for the losses of Hugging Face models: the divisor of each loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from ..errors import InputError

Inputs = Mapping[str, Any]


def weigh(model: Any, microbatch: Inputs, kind: str | None = None) -> int:
    """Return the number of labels over which the loss of a model is a mean.

    Args:
        model: a model of transformers, or a PEFT model around one, with a `loss_type`.
        microbatch: inputs of the model.
        kind: type of the loss; None: that of the model.

    Raises:
        InputError: superbatch does not know the loss.

    Examples:
        >>> import torch
        >>> class Model:
        ...     loss_type = "ForCausalLM"
        >>> weigh(Model(), {"labels": torch.tensor([[1, 2, 3], [4, 5, -100]])})
        3
    """
    kind = kind_of(model) if kind is None else kind
    count = _COUNTS.get(kind) if kind is not None else None
    if count is None:
        named = f"loss_type={kind!r}" if kind else "no loss_type of transformers"
        raise _unknown(f"{type(model).__name__} has {named}")
    # Prompt learning changes the number of labels in the forward.
    prompts = getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False)
    if prompts and count in (_causal, _tokens):
        raise _unknown("PEFT adds virtual tokens before the prompt")
    try:
        return count(getattr(model, "config", None), microbatch)
    except KeyError as error:
        raise _unknown(f"the batch has no {error}, only {list(microbatch)}") from error


def kind_of(model: Any) -> str | None:
    """Return the `loss_type` of a model, or a known part of its class name; None if there is neither.

    Args:
        model: as for `weigh`.
    """
    kind = getattr(model, "loss_type", None)
    kind = kind or next((name for name in _NAMED if name in type(model).__name__), None)
    return kind if isinstance(kind, str) else None


def is_sum(model: Any) -> bool:
    """Return True if the loss of a model is a sum over samples.

    Args:
        model: as for `weigh`.
    """
    reduction = getattr(getattr(model, "config", None), "ctc_loss_reduction", None)
    return getattr(model, "loss_type", None) == "ForCTC" and reduction == "sum"


def _unknown(why: str) -> InputError:
    return InputError(
        f"superbatch cannot find the divisor of this loss: {why}. Define `weight_of(self, microbatch)` in "
        "the trainer's class and return the number of samples or tokens over which the loss is a mean."
    )


def _labelled(labels: Tensor, ignored: int = -100) -> int:
    return int((labels != ignored).sum())


def _causal(config: Any, inputs: Inputs) -> int:
    """Count the labels of a language model; a decoder-only model does not predict the first one."""
    if "shift_labels" in inputs:
        return _labelled(inputs["shift_labels"])
    shifted = not getattr(config, "is_encoder_decoder", False)
    return _labelled(inputs["labels"][..., 1:] if shifted else inputs["labels"])


def _tokens(config: Any, inputs: Inputs) -> int:
    return _labelled(inputs["labels"])


def _classes(config: Any, inputs: Inputs) -> int:
    labels, problem = inputs["labels"], getattr(config, "problem_type", None)
    if problem is None and (labels.is_floating_point() or getattr(config, "num_labels", 2) == 1):
        problem = "regression"  # or multi-label: both are means over all entries
    return _labelled(labels) if problem in (None, "single_label_classification") else len(labels)


def _pixels(config: Any, inputs: Inputs) -> int:
    """Count the pixels of segmentation maps over which the loss is a mean."""
    labels = inputs["labels"]
    if getattr(config, "num_labels", 2) == 1:  # this loss is a mean over all pixels, masked ones included
        return labels.numel()
    ignored = getattr(config, "loss_ignore_index", 255)  # the name depends on the model
    return _labelled(labels, getattr(config, "semantic_loss_ignore_index", ignored))


def _sequences(config: Any, inputs: Inputs) -> int:
    if getattr(config, "ctc_loss_reduction", "mean") != "mean":
        raise _unknown('ctc_loss_reduction is not "mean"')
    return len(inputs["labels"])


_NAMED = ("ForMultipleChoice", "ForNextSentencePrediction", "EncoderDecoderModel")  # without a loss_type
_COUNTS: dict[str, Callable[[Any, Inputs], int]] = {
    "ForCausalLM": _causal,
    "ForConditionalGeneration": _causal,
    "CsmForConditionalGeneration": _causal,
    "ForMaskedLM": _tokens,
    "ForTokenClassification": _tokens,
    "ForSequenceClassification": _classes,
    "ForImageClassification": _classes,
    "ForVideoClassification": _classes,
    "ForAudioClassification": _classes,
    "ForSemanticSegmentation": _pixels,
    "ForCTC": _sequences,
    "ForMultipleChoice": _tokens,
    "ForNextSentencePrediction": _tokens,
    "EncoderDecoderModel": _tokens,
}
