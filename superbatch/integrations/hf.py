"""The exact gradient of a batch in the Hugging Face Trainer, which keeps its step, logs and checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import Trainer

from ..errors import CoupledSamplesError, InputError, LossSpecError, SplitError
from ..torch.gradient import Gradient, WholeGradient
from ..torch.virtual.block import virtual_batch
from ..torch.window.joining import joined
from ..window import Window
from .hf_items import counted_by, divides_by_items, needs_items
from .hf_weights import is_sum, weigh
from .versions import check_version


class Exact(Trainer):
    """Trainer, or a mixin before one, whose update is that of the whole batch.

    ``class MyTrainer(Exact, Trainer)`` trains with the batch that ``per_device_train_batch_size`` and
    ``gradient_accumulation_steps`` make, however long its sequences and however unequal its micro-batches.
    With ``gradient_accumulation_steps=1`` the batch is cut into micro-batches that fit in memory.

    Attributes:
        microbatch_size: as `Gradient`'s, where ``gradient_accumulation_steps`` is 1.
        coupled: samples of a batch influence each other, so the loss is that of the whole batch; None: so it
            is where the batch has ``return_loss``, or the model adds the loss of a router.

    Examples:
        >>> class MyTrainer(Exact):
        ...     microbatch_size = 8
        >>> MyTrainer.coupled is None
        True
    """

    microbatch_size: int | Literal["auto", "largest"] | None = "auto"
    coupled: bool | None = None
    _checks = True
    _host_is_known = _is_compared = False
    _may_step = frozenset({"Trainer"})
    _gradient: Callable[[list[dict[str, Any]]], float] | None = None
    _model: nn.Module | None = None

    def weight_of(self, microbatch: Mapping[str, Any]) -> int | float:
        """Return what a micro-batch counts in the mean over the batch: its tokens, or its samples.

        Override it for a loss of your own: return what the loss of a micro-batch is divided by.

        Args:
            microbatch: inputs of the model.

        Raises:
            InputError: the loss of this model is not known.
        """
        return weigh(self.model, microbatch)

    def get_batch_samples(
        self, epoch_iterator: Any, num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        """Take the micro-batches of one update; a tail is filled up with empty ones, so the host steps."""
        if not self._host_is_known:
            self._check_host()
            self._host_is_known = True
        taken, items = super().get_batch_samples(epoch_iterator, num_batches, device)
        self._real, self._items, self._ready = len(taken), items, list[dict[str, Any]]()
        missing = num_batches - len(taken)
        if taken and missing:
            taken = [*taken, *[_empty(taken[-1])] * missing]
        self._calls = len(taken)
        return taken, items

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Keep a micro-batch; at the last one of the window, add the gradient of them all to ``.grad``.

        Returns:
            The loss of the batch at the last micro-batch, and 0 before it: the host logs their sum.
        """
        if self._gradient is None or self._model is not model:
            self._gradient, self._model = self._gradient_of(model, inputs), model
        self._ready.append(dict(self._prepare_inputs(inputs)))
        loss = 0.0
        if len(self._ready) == self._calls:
            ready, self._ready = self._ready[: self._real], []
            loss = self._add_gradient(model, [self._as_samples(each) for each in ready])
        return torch.tensor(loss, device=self.args.device)

    def _add_gradient(self, model: nn.Module, microbatches: list[dict[str, Any]]) -> float:
        model.train()
        if callable(getattr(self.optimizer, "train", None)):  # of schedule-free optimizers
            self.optimizer.train()
        self.current_gradient_accumulation_steps = 1  # for losses that divide by it
        assert self._gradient is not None
        try:
            return self._gradient(microbatches)
        except CoupledSamplesError as error:
            raise CoupledSamplesError(
                f"{error} In a Trainer: write `coupled = True` in the class, where samples are coupled."
            ) from error

    def _gradient_of(
        self, model: nn.Module, inputs: Mapping[str, Any]
    ) -> Callable[[list[dict[str, Any]]], float]:
        accelerator, one = self.accelerator, self.args.gradient_accumulation_steps == 1
        host: dict[str, Any] = {"scaler": accelerator.scaler, "backward": accelerator.backward}

        def whole_loss(batch: Any) -> Any:
            with self.compute_loss_context_manager():
                return self.compute_loss(model, self._as_inputs(batch), num_items_in_batch=self._items)

        def share(microbatch: Any) -> Any:  # the host takes the mean over ranks
            return whole_loss(microbatch) / accelerator.num_processes

        def loss_fn(microbatch: Any) -> Any:  # without the number of items it is a mean
            with self.compute_loss_context_manager():
                loss = self.compute_loss(model, self._as_inputs(microbatch))
            self._compare_weight(microbatch, loss)
            return loss

        def over_ranks(batch: Any) -> float:  # each rank's loss is of its own samples, as it is in the host
            with virtual_batch(model, size or "auto") as virtual:
                loss = whole_loss(virtual(batch))
                accelerator.backward(loss)
                return loss.item()

        def batch_of(taken: list[Any]) -> Any:
            return taken[0] if one else Window(taken)

        if not self._is_coupled(inputs):
            size = self.microbatch_size if one else None
            host |= {"check": self._checks, "microbatch_size": size}
            if self._adds_up(inputs):
                host["check"] &= not self._has_single_samples()
                summed = Gradient(model, share, reduction="total", **host)
                return lambda taken: (
                    summed(taken[0] if one else Window(taken)).loss if self._counts() else 0.0
                )
            separate = Gradient(model, loss_fn, weight=self.weight_of, **host)
            return lambda taken: separate(taken[0] if one else Window(taken)).loss
        size: Any = self.microbatch_size if one else self.args.per_device_train_batch_size
        if accelerator.num_processes > 1:
            return lambda taken: over_ranks(_joined(taken))
        whole = WholeGradient(model, whole_loss, microbatch_size=size, **host)
        return lambda taken: whole(_joined(taken)).loss

    def _adds_up(self, inputs: Mapping[str, Any]) -> bool:
        """Tell whether losses of micro-batches are shares of that of the batch, for which no weight is asked.

        Raises:
            InputError: they are not, and what divides them is not known.
        """
        if not self._has_own_loss() and is_sum(self.model):
            return True
        if not self._checks or not (self._has_own_loss() or self._weight_is_unknown(inputs)):
            return False

        def loss_of(samples: Any, items: Any) -> Any:
            with self.compute_loss_context_manager():
                return self.compute_loss(self.model, self._as_inputs(samples), num_items_in_batch=items)

        samples = self._as_samples(self._prepare_inputs(inputs))
        found = self._items is not None and divides_by_items(self.model, loss_of, samples, self._items)
        if self.accelerator.num_processes > 1:
            ranks = self.accelerator.gather(torch.tensor([found], device=self.args.device))
            found = bool(ranks.all())
        if found:
            return True
        if self._items is not None and needs_items(self.model, loss_of, samples):
            raise InputError(
                "The loss of this trainer needs num_items_in_batch, and is no sum that is divided by it. "
                "Divide the sum over labels by it and add no other term, or return the mean where it is None."
            )
        is_given = type(self).weight_of is not Exact.weight_of
        if self._has_own_loss() and self._has_single_samples() and not is_given:
            raise InputError(
                "This trainer has a loss of its own, and micro-batches of one sample do not show what it is "
                "divided by. Write `def weight_of(self, microbatch)` in its class: return the number of "
                "samples or tokens that the loss is a mean over."
            )
        return False

    def _counts(self) -> bool:
        """Tell whether a batch has labels at all; a rank of several goes on where only its own has none."""
        alone = self.accelerator.num_processes == 1 or self.args.average_tokens_across_devices
        return self._items is None or not alone or bool(self._items)

    def _has_single_samples(self) -> bool:
        return self.args.per_device_train_batch_size == 1 < self.args.gradient_accumulation_steps

    def _has_own_loss(self) -> bool:
        return type(self).compute_loss is not Trainer.compute_loss or self.compute_loss_func is not None

    def _weight_is_unknown(self, inputs: Mapping[str, Any]) -> bool:
        try:
            self.weight_of(inputs)
        except InputError:
            return True
        return False

    def _compare_weight(self, microbatch: Mapping[str, Any], loss: Any) -> None:
        """Compare the weight with the labels that the model counts, once, where their first label counts."""
        if self._is_compared or type(self).weight_of is not Exact.weight_of or self._has_own_loss():
            return
        labels = microbatch.get("labels")
        if not isinstance(labels, Tensor) or not labels.ndim or not (labels[..., 0] != -100).any():
            return
        counted, weight = counted_by(loss), self.weight_of(microbatch)
        if counted not in (None, weight):
            raise LossSpecError(
                f"The loss of {type(self.model).__name__} is a mean over {counted:g} labels of a "
                f"micro-batch, and superbatch counts {weight}. Write `def weight_of(self, microbatch)` in "
                "the trainer's class: return the number of labels that the loss is a mean over."
            )
        self._is_compared = True

    def _as_samples(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return inputs of the host as a batch whose leaves have one row for each sample."""
        return dict(inputs)

    def _as_inputs(self, samples: Mapping[str, Any]) -> dict[str, Any]:
        """Return the inputs of the host again; it may write into them."""
        return dict(samples)

    def _is_coupled(self, inputs: Mapping[str, Any]) -> bool:
        if self.coupled is not None:
            return self.coupled
        config = getattr(self.model, "config", None)
        config = config.get_text_config() if hasattr(config, "get_text_config") else config
        router = inputs.get("output_router_logits", getattr(config, "output_router_logits", False))
        names = ("router_aux_loss_coef", "aux_loss_coef")
        share = next((getattr(config, name) for name in names if hasattr(config, name)), 0)
        return bool(inputs.get("return_loss")) or bool(router and share)

    def _check_host(self) -> None:
        """Refuse what the host does otherwise than to add up gradients that are whole on each rank."""
        check_version("transformers")
        way = self.accelerator.distributed_type.name
        if way != "NO" and not way.startswith("MULTI_"):
            raise InputError(
                f"The Trainer runs with {way}, and superbatch.integrations.hf needs gradients that are "
                "whole on each rank. Run it with DistributedDataParallel (torchrun without --fsdp or "
                "--deepspeed)."
            )
        if self.args.n_gpu > 1:
            raise InputError(
                f"The Trainer would use torch.nn.DataParallel on {self.args.n_gpu} GPUs. Start it with "
                "torchrun, or set CUDA_VISIBLE_DEVICES to one of them."
            )
        if self.args.optim in ("lomo", "adalomo"):
            raise InputError(
                f"optim={self.args.optim!r} steps inside of each backward, so gradients cannot be added up. "
                "Choose an optimizer that steps once for each batch."
            )
        for kind in type(self).__mro__:
            known = issubclass(kind, Exact) or kind.__name__ in self._may_step
            if "training_step" not in vars(kind) or known:
                continue
            raise InputError(
                f"{kind.__name__}.training_step would not be called. Put its code into compute_loss, or "
                "name superbatch.integrations.trl.Exact for a trainer of TRL."
            )


def _joined(microbatches: list[dict[str, Any]]) -> Any:
    """Return the batch of a window whose samples are coupled.

    Raises:
        InputError: the shapes of the micro-batches differ.
    """
    try:
        return joined(microbatches)
    except SplitError as error:
        raise InputError(
            "The samples of this batch are coupled, and its micro-batches have unequal shapes, so they make "
            "no whole batch. Set gradient_accumulation_steps=1 and a larger per_device_train_batch_size: "
            f"the batch is cut exactly. ({error})"
        ) from error


def _empty(microbatch: Mapping[str, Any]) -> dict[str, Any]:
    """Return a micro-batch of no samples, in which the host counts no token."""
    return {key: value[:0] if isinstance(value, Tensor) else value for key, value in microbatch.items()}
