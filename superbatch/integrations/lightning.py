"""Exact accumulation in Lightning: a mixin for modules of its Trainer, and a `Gradient` for Fabric."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lightning.fabric import Fabric, is_wrapped
from lightning.fabric.strategies.ddp import DDPStrategy
from lightning.fabric.strategies.single_device import SingleDeviceStrategy
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from ..batch.tree import count_samples
from ..errors import InputError
from ..torch import Gradient
from .lightning_windows import LightningWindows, refuse_strategy
from .versions import check_version


class ExactAccumulation(LightningModule):
    """Mixin with which ``accumulate_grad_batches=k`` gives the gradient of the k batches joined into one.

    Put it before the module: ``class Exact(ExactAccumulation, MyModule): ...``. The k batches are collected.
    At the last one `training_step` runs for each, weighted by `weight_of`, and the gradient is in ``.grad``
    when Lightning clips and steps. Lightning gets one loss and one value of each metric: means over all k.

    Attributes:
        coupled: True if samples of a batch influence each other; `training_step` then runs once, on the
            joined batches.
    """

    coupled = False
    _windows: LightningWindows | None = None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if cls.training_step is not ExactAccumulation.training_step:
            raise InputError(
                f"{cls.__name__} overrides ExactAccumulation.training_step. Define training_step in a "
                "LightningModule of its own, and derive: class Exact(ExactAccumulation, YourModule)."
            )

    def weight_of(self, batch: Any) -> Any:
        """Return the weight of a batch: the divisor of its loss, by default the number of samples.

        Args:
            batch: a batch of the loader, or a part of it.
        """
        return count_samples(batch)

    def gradient_options(self) -> dict[str, Any]:
        """Return options of `Gradient` (or `WholeGradient`), such as ``microbatch_size``."""
        return {}

    def on_fit_start(self) -> None:
        """Check the options of the Trainer, and make the `Gradient`."""
        super().on_fit_start()
        self._windows = LightningWindows(self, super().training_step, super().backward)

    def on_fit_end(self) -> None:
        """Free the memory used for training."""
        self._windows = None
        super().on_fit_end()

    def training_step(self, batch: Any, batch_idx: int = 0) -> Any:
        """Collect a batch; at the last one of an update, compute the gradient of all.

        Args:
            batch: a batch of the loader.
            batch_idx: its index in the epoch.

        Returns:
            For the last batch of an update, k times the mean loss over its batches (Lightning divides by k),
            with the other entries that your `training_step` returned for it. For earlier batches, NaN.
        """
        if (windows := self._running()) is None:
            return super().training_step(batch, batch_idx)
        result, logged = windows.step(batch, batch_idx)
        for name, value, options in logged:
            super().log(name, value, **options)
        return result

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Callable[[], Any] | None = None
    ) -> None:
        """Step the optimizer; the batch that Lightning runs in this call is the last of its update.

        Args:
            epoch: see `LightningModule.optimizer_step`.
            batch_idx: see `LightningModule.optimizer_step`.
            optimizer: see `LightningModule.optimizer_step`.
            optimizer_closure: see `LightningModule.optimizer_step`.
        """
        if (windows := self._running()) is None:
            return super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        with windows.last_batch():
            return super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Put the gradient that `training_step` computed into ``.grad``.

        Args:
            loss: see `LightningModule.backward`.
            args: see `LightningModule.backward`.
            kwargs: see `LightningModule.backward`.
        """
        if (windows := self._running()) is None:
            super().backward(loss, *args, **kwargs)
        else:
            windows.attach()

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Log the weighted mean of a value over the batches of an update, once per update.

        With a ``reduce_fx`` other than the mean, Lightning gets the values of all batches and reduces them.

        Args:
            name: see `LightningModule.log`.
            value: see `LightningModule.log`.
            args: see `LightningModule.log`.
            kwargs: see `LightningModule.log`.
        """
        if self._windows is None or not self._windows.note(name, value, *args, **kwargs):
            super().log(name, value, *args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a copy of the module, without the windows of the fit."""
        return {**super().__getstate__(), "_windows": None}

    def _running(self) -> LightningWindows | None:
        """Return the windows of the running fit; None outside a fit, and after a failed one."""
        return self._windows if self._windows is not None and self._windows.running else None


def make_gradient(
    fabric: Fabric, model: nn.Module | Sequence[nn.Module], loss_fn: Callable[[Any], Any], **options: Any
) -> Gradient:
    """Return a `Gradient` that replaces the forward and ``fabric.backward`` of a Fabric loop.

    Args:
        fabric: a launched Fabric.
        model: model or list of models returned by ``fabric.setup``; `loss_fn` calls it.
        loss_fn: as in `Gradient`.
        options: options of `Gradient` except `backward` and `scaler`, which come from Fabric.

    Raises:
        InputError: Fabric's strategy shards the model, or the model was not set up.
    """
    check_version("lightning")
    refuse_strategy(fabric.strategy, SingleDeviceStrategy, DDPStrategy)
    bare = [each for each in ([model] if isinstance(model, nn.Module) else model) if not is_wrapped(each)]
    if bare:
        raise InputError(
            f"The {type(bare[0]).__name__} was not set up by Fabric. Pass the model that fabric.setup() "
            "returned, and call that one in loss_fn."
        )
    scaler = getattr(fabric.strategy.precision, "scaler", None)
    return Gradient(model, loss_fn, backward=fabric.backward, scaler=scaler, **options)
