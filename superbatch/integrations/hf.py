"""Exact gradient accumulation in the Hugging Face Trainer, with the Trainer's step, logs and checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from transformers import Trainer

from ..errors import CoupledSamplesError, InputError, LossSpecError, SplitError
from ..torch.gradient import Gradient
from .hf_host import couples_samples, has_own_loss, has_single_samples, refuse_host
from .hf_items import adds_up, divides_by_items
from .hf_losses import (
    HostLoss,
    WindowGradient,
    coupled,
    of_windows,
    separated,
    split_of,
    summed,
)
from .hf_singles import check_singles
from .hf_terms import terms_of
from .hf_weights import is_sum
from .hf_weights import weigh as weigh_labels
from .scaled import skip_without_gradient
from .versions import check_version

_UNNAMED = "batch of a collator that returns no names"


class Exact(Trainer):
    """Trainer, or mixin for one, whose update equals that of the whole batch.

    ``class MyTrainer(Exact, Trainer)`` trains with the batch of ``per_device_train_batch_size`` times
    ``gradient_accumulation_steps`` samples, for sequences of any lengths and micro-batches of unequal weight.
    With ``gradient_accumulation_steps=1`` the batch is split into micro-batches that fit in memory.

    Attributes:
        microbatch_size: as in `Gradient`; used if ``gradient_accumulation_steps`` is 1.
        coupled: True if samples of a batch influence each other, so the loss needs the whole batch. None
            detects it: a batch with ``return_loss``, or a model that adds a router loss, is coupled.

    Examples:
        >>> class MyTrainer(Exact):
        ...     microbatch_size = 8
        >>> MyTrainer.coupled is None
        True
    """

    microbatch_size: int | Literal["auto", "largest"] | None = "auto"
    coupled: bool | None = None
    _checks = True  # whether the loss is checked on the first window
    _host_is_known = False  # whether the settings of the Trainer were checked
    _may_step = frozenset({"Trainer"})  # classes whose training_step superbatch may replace
    _gradient: WindowGradient | None = None
    _loss: HostLoss

    def weight_of(self, microbatch: Mapping[str, Any]) -> int | float:
        """Return the weight of a micro-batch in the mean over the batch: its tokens, or its samples.

        Override it for a loss of your own, and return the divisor of the loss of a micro-batch.

        Args:
            microbatch: inputs of the model.

        Raises:
            InputError: superbatch does not know the loss of this model.
        """
        return weigh_labels(self.model, microbatch)

    def get_batch_samples(
        self, epoch_iterator: Any, num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        """Return the micro-batches of one update, padded with empty ones at the end of the data.

        The Trainer steps after a fixed number of calls of `training_step`, also in a shorter last window.
        """
        if not self._host_is_known:
            self._check_host()
            self._host_is_known = True
        taken, items = super().get_batch_samples(epoch_iterator, num_batches, device)
        self._real, self._ready = len(taken), list[dict[str, Any]]()
        missing = num_batches - len(taken)
        if taken and missing:
            taken = [*taken, *[_empty(taken[-1])] * missing]
        self._calls = len(taken)
        return taken, items

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Store a micro-batch; at the last one of the window, add the gradient of the batch to ``.grad``.

        Returns:
            The loss of the batch at the last micro-batch, and 0 before, as the Trainer logs the sum.
        """
        prepared = self._prepare_inputs(inputs)  # moves tensors to the device
        self._ready.append(dict(prepared) if isinstance(prepared, Mapping) else {_UNNAMED: prepared})
        loss = 0.0
        if len(self._ready) == self._calls:
            ready, self._ready = self._ready[: self._real], []
            loss = self._add_gradient(model, [self._as_samples(each) for each in ready], num_items_in_batch)
        return torch.tensor(loss, device=self.args.device)

    def log(self, logs: dict[str, float], *given: Any, **others: Any) -> None:
        """Log values as the Trainer does, except those logged by `compute_loss` during a check."""
        # By `vars`: the attribute does not exist before the first window.
        loss: HostLoss | None = vars(self).get("_loss")
        if loss is None or not loss.calls.is_trial:
            super().log(logs, *given, **others)

    def _add_gradient(self, model: nn.Module, microbatches: list[dict[str, Any]], items: Any) -> float:
        """Add the gradient of a window to ``.grad``; return its loss.

        Args:
            model: the model as it is trained, such as in DistributedDataParallel.
            microbatches: the micro-batches, without the empty ones that `get_batch_samples` added.
            items: the number of items that the Trainer counted.
        """
        model.train()
        optimizer: Any = self.optimizer
        if callable(getattr(optimizer, "train", None)):  # schedule-free optimizers have a train mode
            optimizer.train()
        self.current_gradient_accumulation_steps = 1  # some losses divide by it; this library divides already
        # Another call of train() may wrap the model again.
        if self._gradient is None or self._loss.wrapped is not model:
            bare = cast(nn.Module, self.model)  # never None in training
            self._loss = HostLoss(self, bare, model, self._as_inputs, items)
            self._gradient = self._gradient_of(self._loss, microbatches[0])
        self._loss.items = items
        try:
            window_loss = 0.0 if self._gradient is None else self._gradient(microbatches)
        except CoupledSamplesError as error:
            raise CoupledSamplesError(
                f"{error} In a Trainer, write `coupled = True` in its class to compute the loss of the whole "
                "batch."
            ) from error
        except LossSpecError as error:
            raise LossSpecError(
                f"{error} In a Trainer, define `weight_of(self, microbatch)` in its class and return the "
                f"divisor of the loss of {type(self.model).__name__}."
            ) from error
        except SplitError as error:
            raise SplitError(
                f"{error} In a Trainer, set gradient_accumulation_steps=2 or more and a smaller "
                "per_device_train_batch_size: micro-batches of the collator are not split."
            ) from error
        skip_without_gradient(self.accelerator.scaler, model.parameters())
        return window_loss

    def _gradient_of(self, loss: HostLoss, samples: dict[str, Any]) -> WindowGradient | None:
        """Return a function that computes the gradient of a window; None if no batch had labels yet.

        Raises:
            InputError: the divisor of the loss is not known.
        """
        if loss.has_no_items and self._weight_is_unknown(samples):
            return None  # without labels the trial calls below would show nothing
        options: dict[str, Any] = {"scaler": self.accelerator.scaler, "backward": self.accelerator.backward}
        options["participants"] = [loss.calls]
        if self._is_coupled(samples):
            # Micro-batches of the collator are joined, and split again at their former size.
            size = self.microbatch_size if loss.cuts else self.args.per_device_train_batch_size
            return coupled(loss, size, **options)
        options |= {"microbatch_size": self.microbatch_size if loss.cuts else None, "check": self._checks}
        options["split"] = split_of(samples)
        # The divisor of the loss: the Trainer's items, one per term, the user's `weight_of`, or the model's.
        own, is_given = has_own_loss(self), self._has_own_weight()
        by_items = self._adds_up(loss, samples, own=own, is_given=is_given)
        terms = None if own or is_given or by_items else terms_of(loss.model, samples, loss.ranks)
        weigh = None if terms is not None else _known(self._weigh(samples), samples)
        count = weigh if own else _known(partial(weigh_labels, self.model), samples)
        if by_items:
            gradient_of = summed(loss, **options)
        elif terms is not None:
            gradient_of = separated(loss, terms, samples, **options)
        else:
            gradient_of = Gradient(loss.wrapped, loss.of, weight=self._weigh(samples), **options)
        singles = self._checks and has_single_samples(self)

        def check(taken: list[dict[str, Any]]) -> bool:
            return not singles or check_singles(
                gradient_of, loss, taken, weigh=weigh, count=count, is_stated=is_given and not by_items
            )

        return of_windows(loss, gradient_of, check, by_items=by_items)

    def _adds_up(self, loss: HostLoss, samples: Mapping[str, Any], *, own: bool, is_given: bool) -> bool:
        """Return True if the losses of micro-batches sum to that of the batch, so they need no weight."""
        if not own and is_sum(self.model):
            return True
        if not self._checks:
            return False
        if own or self._weight_is_unknown(samples):
            return adds_up(loss, samples, is_hidden=own and has_single_samples(self) and not is_given)
        # Divide as the Trainer does, for the same rounding.
        return not is_given and loss.items_are_global and divides_by_items(loss, samples)

    def _has_own_weight(self) -> bool:
        return type(self).weight_of is not Exact.weight_of

    def _weight_is_unknown(self, inputs: Mapping[str, Any]) -> bool:
        return _known(self._weigh(inputs), inputs) is None and terms_of(self.model, inputs) is None

    def _as_samples(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return inputs of the Trainer as a batch whose leaves have one row for each sample."""
        return dict(inputs)

    def _as_inputs(self, samples: Mapping[str, Any]) -> Any:
        """Return the inputs of the Trainer from such a batch; the Trainer may write into them."""
        return samples[_UNNAMED] if _UNNAMED in samples else dict(samples)

    def _weigh(self, samples: Mapping[str, Any]) -> Callable[[Any], int | float]:
        """Return `weight_of` as a function of a batch of `_as_samples`."""
        return (lambda each: self.weight_of(each[_UNNAMED])) if _UNNAMED in samples else self.weight_of

    def _is_coupled(self, inputs: Mapping[str, Any]) -> bool:
        return couples_samples(self.model, inputs) if self.coupled is None else self.coupled

    def _check_host(self) -> None:
        """Raise for settings of the Trainer with which gradients are not summed on each rank."""
        check_version("transformers")
        ours = [kind for kind in type(self).__mro__ if issubclass(kind, Exact)]
        refuse_host(self, ours, self._may_step)


def _known(weigh: Callable[[Any], float], inputs: Any) -> Callable[[Any], float] | None:
    try:
        weigh(inputs)
    except InputError:
        return None
    return weigh


def _empty(microbatch: Any) -> Any:
    """Return a micro-batch without samples; the Trainer counts no tokens in it."""
    if not isinstance(microbatch, Mapping):
        return tuple(value[:0] if isinstance(value, Tensor) else value for value in microbatch)
    return {key: value[:0] if isinstance(value, Tensor) else value for key, value in microbatch.items()}
