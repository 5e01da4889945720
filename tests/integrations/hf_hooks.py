"""A Trainer with user-defined loss, optimizer and hooks, and the cases of two ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import Trainer

from superbatch.integrations.hf import Exact
from tests.integrations.hf_cases import CASES, Case
from tests.integrations.hf_sums import RUNS

CLASSES = torch.tensor([1.0, 3.0, 9.0], dtype=torch.float64)


class Hooked(Trainer):
    """Trainer whose loss divides by class weights, with hooks on a parameter, a module and the optimizer."""

    def __init__(self, model: Any, *given: Any, **options: Any) -> None:
        super().__init__(model, *given, **options)
        self.calls: list[str] = []
        weight = model.classifier.weight
        weight.register_hook(lambda gradient: gradient * 0.5)
        weight.register_post_accumulate_grad_hook(lambda _: self.calls.append("gradient"))
        model.classifier.register_forward_hook(lambda *_: self.calls.append("forward"))

    def create_optimizer(self, *given: Any) -> Any:
        optimizer: Any = super().create_optimizer(*given)
        optimizer.register_step_pre_hook(lambda *_: self.calls.append("step"))
        return optimizer

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **given: Any) -> Any:
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = nn.functional.cross_entropy(outputs.logits, labels, CLASSES)
        return (loss, outputs) if return_outputs else loss


class ExactHooked(Exact, Hooked):
    """The same Trainer with exact accumulation."""

    def weight_of(self, microbatch: Mapping[str, Any]) -> float:
        return float(CLASSES[microbatch["labels"]].sum())


RANK_CASES: dict[str, tuple[Case, dict[str, Any]]] = {
    "classes": (CASES["classes"], {}),
    "router": (CASES["router"], {}),
    "clip": (CASES["clip"], {}),
    "items": RUNS["no loss_type"],
    "a function": RUNS["a function"],
    "a sum": RUNS["a sum"],
    "hooks": (CASES["classes"], {}),
}
