"""Exact gradient accumulation in the trainers of TRL, with metrics weighted like the loss."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from .. import normalize
from ..errors import InputError
from . import hf
from .hf_losses import HostLoss
from .hf_weights import weigh
from .versions import check_version

# Inputs with the chosen rows of all pairs first, then the rejected rows.
_OF_PAIRS = ("input_ids", "attention_mask", "completion_mask", "token_type_ids")
_COUPLED_LOSSES = ("aot", "aot_unpaired", "sft")  # aot sorts over the batch; sft is a mean over tokens
_WEIGHTS = "weights of superbatch"  # recorded among TRL's metrics, and removed before they are logged
# Metrics of pairs that are means over tokens: chosen (1), rejected (2) or both.
_TOKENS = {"entropy": [1, 2], "logits/chosen": [1], "logits/rejected": [2], "mean_token_accuracy": [1]}


class Exact(hf.Exact):
    """Mixin for `SFTTrainer`, `DPOTrainer` and `RewardTrainer`, like `superbatch.integrations.hf.Exact`.

    Write ``class MyTrainer(Exact, SFTTrainer)``. Each metric of an update is the mean over its micro-batches,
    weighted by their tokens or pairs. The loss is not checked on the first window, as every evaluation of it
    would add to TRL's counts of tokens and metrics.

    Examples:
        >>> Exact.microbatch_size
        'auto'
    """

    _checks = False
    _may_step = frozenset({"Trainer", "SFTTrainer", "DPOTrainer", "RewardTrainer"})
    # Attributes of the trainers of TRL.
    _metrics: dict[str, dict[str, list[Any]]]
    router_aux_loss_coef: float

    def weight_of(self, microbatch: Mapping[str, Any]) -> int | float:
        """Return the tokens of a micro-batch for `SFTTrainer`, its pairs for the others."""
        if self._has_pairs():
            return len(microbatch["input_ids"])
        # TRL computes this loss itself, whatever the loss type of the model is.
        return weigh(self.model, microbatch, "ForCausalLM")

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Store a micro-batch, as the base class does; offload activations if TRL is set to."""
        with getattr(self, "maybe_activation_offload_context", nullcontext()):
            return super().training_step(model, inputs, num_items_in_batch)

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return the loss of TRL, and record the weights of the metrics that it appends."""
        result = super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        if self.model is not None and self.model.training:  # metrics of an evaluation are kept apart
            self._metrics["train"][_WEIGHTS].append(self._weights_of(inputs))
        return result

    def _weights_of(self, inputs: Mapping[str, Any]) -> tuple[int | float, ...]:
        """Return the weight of the loss, for pairs also the numbers of chosen and of rejected tokens."""
        weight = self.weight_of(self._as_samples(inputs))
        if not self._has_pairs() or "completion_mask" not in inputs:
            return (weight,)
        return (weight, *(int(half[..., 1:].sum()) for half in inputs["completion_mask"].chunk(2)))

    def _add_gradient(self, model: nn.Module, microbatches: list[dict[str, Any]], items: Any) -> float:
        # Collect the metrics of this window apart from those of earlier windows since the last log.
        before, self._metrics["train"] = self._metrics["train"], defaultdict(list)
        try:
            loss = super()._add_gradient(model, microbatches, items)
        finally:
            during, self._metrics["train"] = self._metrics["train"], before
        given = torch.tensor(during.pop(_WEIGHTS), dtype=torch.float64, device=self.args.device)
        weights: Any = self.accelerator.reduce(given, "sum")
        for name, values in during.items():
            if name == "num_tokens":  # counted since the start of training, so not averaged
                before[name] = values
            else:
                columns = _TOKENS.get(name, [0]) if weights.shape[1] > 1 else [0]
                before[name].append(_averaged(name, values, weights[:, columns].sum(1).tolist()))
        return loss

    def _adds_up(self, loss: HostLoss, samples: Mapping[str, Any], *, own: bool, is_given: bool) -> bool:
        """Return True if TRL divides a sum over tokens by its own number of items."""
        return not self._has_pairs() and loss.items is not None and not is_given

    def _has_own_weight(self) -> bool:
        return type(self).weight_of is not Exact.weight_of

    def _has_pairs(self) -> bool:
        return not any(kind.__name__ == "SFTTrainer" for kind in type(self).__mro__)

    def _as_samples(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Put the two rows of a pair side by side, so that a split keeps them together."""
        if not self._has_pairs():
            return dict(inputs)
        return {
            name: value.unflatten(0, (2, -1)).transpose(0, 1) if name in _OF_PAIRS else value
            for name, value in inputs.items()
        }

    def _as_inputs(self, samples: Mapping[str, Any]) -> dict[str, Any]:
        if not self._has_pairs():
            return dict(samples)
        return {
            name: value.transpose(0, 1).flatten(0, 1) if name in _OF_PAIRS else value
            for name, value in samples.items()
        }

    def _is_coupled(self, inputs: Mapping[str, Any]) -> bool:
        router = getattr(self, "aux_loss_enabled", False) and self.router_aux_loss_coef
        return super()._is_coupled(inputs) or (self.coupled is None and bool(router))

    def _check_host(self) -> None:
        check_version("trl")
        host = next((kind for kind in type(self).__mro__ if kind.__module__.startswith("trl.")), type(self))
        if host.__name__ not in self._may_step:
            raise InputError(
                f"superbatch.integrations.trl does not support {host.__name__}. Use SFTTrainer, DPOTrainer "
                "or RewardTrainer, or remove Exact from the bases of the class."
            )
        owner = next(
            kind for kind in type(self).__mro__ if "compute_loss" in vars(kind) and kind is not Exact
        )
        own = f"{owner.__name__}.compute_loss" if owner is not host else "compute_loss_func"
        is_own = owner is not host or self.compute_loss_func is not None
        if is_own and not self._has_own_weight():
            raise InputError(
                f"{own} replaces TRL's loss, so its divisor is not known. Define `weight_of(self, "
                "microbatch)` in the trainer's class and return the number of tokens or pairs over which the "
                "loss with num_items_in_batch=None is a mean."
            )
        unequal = [name for name in getattr(self, "loss_types", ()) if name in _COUPLED_LOSSES]
        if unequal and not self.coupled:
            raise InputError(
                f"loss_type={unequal[0]!r} is not a mean over pairs, so losses of micro-batches do not add "
                "up to that of the batch. Write `coupled = True` in the trainer's class."
            )
        super()._check_host()


def _averaged(name: str, values: Sequence[float], weights: Sequence[float]) -> float:
    """Return the metric of an update from those of its micro-batches.

    Examples:
        >>> _averaged("entropy", [1.0, 4.0], [2, 1]), _averaged("max_reward", [1.0, 4.0], [2, 1])
        (2.0, 4.0)
    """
    if name in ("min_reward", "max_reward"):
        return min(values) if name == "min_reward" else max(values)
    if len(values) != len(weights) or not any(weights):  # a metric that TRL appends in some calls only
        return sum(values) / len(values)
    return normalize.mean_loss(values, weights, reduction="mean")
