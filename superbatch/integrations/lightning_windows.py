"""Windows of a Lightning module: collected batches, and their gradient."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.trainer.states import TrainerStatus
from lightning.pytorch.utilities.memory import recursive_detach
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor

from ..errors import CoupledSamplesError, InputError
from ..torch import Gradient, WholeGradient, Window
from .logged_values import LoggedValues
from .scaled import skip_without_gradient
from .versions import check_version


class LightningWindows:
    """Windows of one fit.

    Args:
        module: an `ExactAccumulation`, set up by its Trainer.
        step: the `training_step` of the user.
        backward: the `backward` of the user, or Lightning's.

    Raises:
        InputError: an option of the Trainer or of the module is not supported.
    """

    def __init__(self, module: Any, step: Callable[..., Any], backward: Callable[..., Any]) -> None:
        check_version("lightning")
        options = module.gradient_options()
        _refuse(module, step, options)
        self._module, self._trainer, self._step = module, module.trainer, step
        self._takes_index = is_param_in_hook_signature(step, "batch_idx", min_args=2)
        self._batches: dict[int, Any] = {}  # by their index in the epoch
        self._is_last = self._has_run = False
        # Whether a hook reads gradients after the backward of a batch that was only collected.
        self._is_read = is_overridden("on_after_backward", module) or any(
            is_overridden("on_after_backward", each, Callback) for each in module.trainer.callbacks
        )
        self._gradients: list[tuple[Tensor, Tensor | None]] = []
        self._returned: dict[str, Any] = {}
        self._loss_like = torch.zeros(())
        self._logged = LoggedValues()
        scaler = getattr(self._trainer.precision_plugin, "scaler", None)
        if getattr(backward, "__func__", None) is not LightningModule.backward:  # the user overrides it
            # Lightning scales the loss before it calls `backward`, so the override expects a scaled loss.
            options["backward"] = lambda loss, **kwargs: backward(
                loss if scaler is None else scaler.scale(loss), **kwargs
            )
        options["participants"] = [*options.get("participants", ()), self._logged]
        if not module.coupled:
            options = {"microbatch_size": None, "weight": module.weight_of, **options}
        kind: Any = WholeGradient if module.coupled else Gradient
        self._gradient_of = kind(self._trainer.model, self._loss, scaler=scaler, device=None, **options)

    @property
    def running(self) -> bool:
        """True while the Trainer runs."""
        return self._trainer.state.status == TrainerStatus.RUNNING

    @contextmanager
    def last_batch(self) -> Iterator[None]:
        """Make the batch that Lightning runs in this context the last one of its update."""
        self._is_last = True
        try:
            yield
        finally:
            self._is_last = False
            self._batches.clear()

    def step(self, batch: Any, index: int) -> tuple[Any, list[tuple[str, Any, dict[str, Any]]]]:
        """Collect a batch, or compute the gradient of those collected.

        Args:
            batch: a batch of the loader.
            index: its index in the epoch.

        Returns:
            The result of `training_step`, and the values to log.
        """
        if index % self._trainer.accumulate_grad_batches == 0:
            self._batches.clear()  # left from a window that was not finished, as its epoch was skipped
        self._batches[index] = batch
        if not self._is_last:
            # The loss of the update is not known before its last batch.
            return torch.full((), torch.nan, device=self._module.device), []
        update = self._compute()
        # Lightning divides each loss by this number, as it sums them.
        loss = self._loss_like.new_tensor(update.loss * self._trainer.accumulate_grad_batches)
        returned, self._returned = self._returned, {}
        return {"loss": loss, **returned} if returned else loss, self._logged.means(update.samples, self._sum)

    def _compute(self) -> Any:
        batches = list(self._batches.values())
        parameters = [each for each in self._module.parameters() if each.requires_grad]
        for parameter in parameters:  # gradients of the last update, which Lightning zeroes only later
            parameter.grad = None
        # Lightning runs training_step under autocast, but a backward must run outside autocast.
        with torch.autocast(self._module.device.type, enabled=False), self._logged.collected():
            self._has_run = False
            try:
                update = self._gradient_of(batches[0] if len(batches) == 1 else Window(batches))
            except CoupledSamplesError as error:
                raise CoupledSamplesError(
                    f"{error} In Lightning, write `coupled = True` in the class to compute the loss of all "
                    "batches of an update at once."
                ) from error
            if update.weight and not self._has_run:
                # This rank has no weight, but other ranks wait for its logged values to average them.
                self._logged.savepoint()
                with torch.no_grad():
                    self._loss(batches[-1])
        skip_without_gradient(getattr(self._trainer.precision_plugin, "scaler", None), parameters)
        self._gradients = [(parameter, parameter.grad) for parameter in parameters]
        for parameter in parameters:  # `attach` sets them after Lightning's zero_grad, in its backward
            parameter.grad = None
        return update

    def attach(self) -> None:
        """Put the gradient into ``.grad``; after a collected batch, zeros if a hook reads gradients."""
        if not self._gradients and self._is_read:
            self._gradients = [
                (each, torch.zeros_like(each) if each.grad is None else each.grad)
                for each in self._module.parameters()
                if each.requires_grad
            ]
        while self._gradients:
            parameter, gradient = self._gradients.pop()
            parameter.grad = gradient

    def note(self, name: str, value: Any, *args: Any, **kwargs: Any) -> bool:
        """Record a value that is logged in a window; return False for one logged outside a window.

        Args:
            name: see `LightningModule.log`.
            value: see `LightningModule.log`.
            args: see `LightningModule.log`.
            kwargs: see `LightningModule.log`.
        """
        if not self._logged.is_inside:
            return False
        given = _LOG.bind(self._module, name, value, *args, **kwargs).arguments
        options = {key: each for key, each in given.items() if key not in ("self", "name", "value")}
        self._logged.note(name, value, options)
        return True

    def _loss(self, microbatch: Any) -> Any:
        weigh = self._module.weight_of
        counts = self._logged.start((lambda: 1) if self._module.coupled else partial(weigh, microbatch))
        # With microbatch_size a micro-batch is a part of the only batch, and gets that batch's index.
        indices = [index for index, batch in self._batches.items() if batch is microbatch]
        index = indices[0] if indices else max(self._batches)
        with self._trainer.precision_plugin.train_step_context():
            returned = self._step(microbatch, index) if self._takes_index else self._step(microbatch)
        loss = returned.get("loss") if isinstance(returned, Mapping) else returned
        if not isinstance(loss, Tensor):
            raise InputError(
                f"training_step returned {type(loss).__name__}, not a tensor. Return the loss of the batch; "
                "to skip a batch, return 0 from weight_of()."
            )
        if counts:  # not in a check of the loss
            self._has_run = True
            self._loss_like = loss.detach()
            extra = returned if isinstance(returned, Mapping) else {}
            self._returned = recursive_detach({key: extra[key] for key in extra if key != "loss"})
        return loss

    def _sum(self, number: Tensor) -> Tensor:
        return self._trainer.strategy.reduce(number, reduce_op="sum")


def _refuse(module: Any, step: Callable[..., Any], options: Mapping[str, Any]) -> None:
    trainer = module.trainer
    if not module.automatic_optimization:
        raise InputError(
            "ExactAccumulation needs automatic optimization, but automatic_optimization is False. In manual "
            "optimization, call superbatch.torch.Gradient in place of forward and manual_backward()."
        )
    refuse_strategy(trainer.strategy, SingleDeviceStrategy, DDPStrategy)
    if "training_step" in vars(module):  # Lightning puts compiled methods on the object
        raise InputError(
            "The module was passed to torch.compile, which would compile the accumulation too. Compile the "
            "networks inside the module instead."
        )
    if is_param_in_hook_signature(step, "dataloader_iter", explicit=True):
        raise InputError(
            "training_step takes dataloader_iter, which ExactAccumulation does not support. Change its "
            "arguments to (batch, batch_idx)."
        )
    size, batches = options.get("microbatch_size"), trainer.accumulate_grad_batches
    if size is not None and batches > 1:
        raise InputError(
            f"microbatch_size={size!r} splits a batch, but accumulate_grad_batches={batches} joins batches. "
            "Pass accumulate_grad_batches=1 and a loader that yields the whole batch."
        )


def refuse_strategy(strategy: Any, *supported: type) -> None:
    """Raise for a strategy that shards the model or accumulates gradients itself.

    Args:
        strategy: strategy of a Trainer or of Fabric.
        supported: supported classes of strategies.

    Raises:
        InputError: it shards the model, or accumulates itself.
    """
    if not isinstance(strategy, supported) or getattr(strategy, "handles_gradient_accumulation", False):
        raise InputError(
            f"{type(strategy).__name__} is not supported by superbatch.integrations.lightning. Pass "
            'strategy="ddp" or devices=1.'
        )


_LOG = inspect.signature(LightningModule.log)
