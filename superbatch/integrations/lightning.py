"""Exact accumulation inside Lightning: a mixin for its Trainer, and a `Gradient` for Fabric."""

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
    """Mixin that makes ``accumulate_grad_batches=k`` the gradient of the batch of all k.

    Put it before the module: ``class Exact(ExactAccumulation, MyModule): ...``. The k batches are collected.
    At the last one `training_step` runs for each, weighted by `weight_of`, and its gradient is in ``.grad``
    when Lightning clips and steps. Lightning sees one loss and one value of each metric: means over all k.

    Attributes:
        coupled: samples of a batch influence each other: `training_step` runs once, on the joined batches.
    """

    coupled = False
    _windows: LightningWindows | None = None

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if cls.training_step is not ExactAccumulation.training_step:
            raise InputError(
                f"{cls.__name__} has a training_step that comes before ExactAccumulation's. Leave it in a "
                "LightningModule, and add a class Exact(ExactAccumulation, YourModule)."
            )

    def weight_of(self, batch: Any) -> Any:
        """Return how much a batch counts: what its loss divides by; the number of samples by default.

        Args:
            batch: of the loader, or a part of it.
        """
        return count_samples(batch)

    def gradient_options(self) -> dict[str, Any]:
        """Return further options of `Gradient` (or `WholeGradient`), such as ``microbatch_size``."""
        return {}

    def on_fit_start(self) -> None:
        """Check what the Trainer was given, and make the `Gradient`."""
        super().on_fit_start()
        self._windows = LightningWindows(self, super().training_step, super().backward)

    def on_fit_end(self) -> None:
        """Free everything that training needed."""
        self._windows = None
        super().on_fit_end()

    def training_step(self, batch: Any, batch_idx: int = 0) -> Any:
        """Collect a batch; at the last one of an update, compute the gradient of all.

        Args:
            batch: of the loader.
            batch_idx: its number in the epoch.

        Returns:
            The mean loss over all of them, and what else `training_step` returned for the last; NaN for the
            batches before it.
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
        """Step; the batch that Lightning runs inside of it is the last of its update.

        Args:
            epoch: as Lightning's, and so are the others.
            batch_idx: likewise.
            optimizer: likewise.
            optimizer_closure: likewise.
        """
        if (windows := self._running()) is None:
            return super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        with windows.last_batch():
            return super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Put the gradient that `training_step` computed into ``.grad``.

        Args:
            loss: as Lightning's, and so are the others.
            args: likewise.
            kwargs: likewise.
        """
        if (windows := self._running()) is None:
            super().backward(loss, *args, **kwargs)
        else:
            windows.attach()

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Log the mean of a value over the batches of an update, weighted as they are, once.

        Args:
            name: as Lightning's, and so are the others.
            value: likewise.
            args: likewise.
            kwargs: likewise.
        """
        if self._windows is None or not self._windows.note(name, value, *args, **kwargs):
            super().log(name, value, *args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy of the module needs: not the Trainer's part."""
        return {**super().__getstate__(), "_windows": None}

    def _running(self) -> LightningWindows | None:
        """Return the windows of the fit; None outside of it, and after one that failed."""
        return self._windows if self._windows is not None and self._windows.running else None


def make_gradient(
    fabric: Fabric, model: nn.Module | Sequence[nn.Module], loss_fn: Callable[[Any], Any], **options: Any
) -> Gradient:
    """Return a `Gradient` for a Fabric loop, in place of its forward and ``fabric.backward``.

    Args:
        fabric: launched.
        model: as ``fabric.setup`` returned it, or a list of several; `loss_fn` calls it.
        loss_fn: as `Gradient`'s.
        options: as `Gradient`'s, but for `backward` and `scaler`, which are Fabric's.

    Raises:
        InputError: Fabric's strategy shards the model, or the model was not set up.
    """
    check_version("lightning")
    refuse_strategy(fabric.strategy, SingleDeviceStrategy, DDPStrategy)
    bare = [each for each in ([model] if isinstance(model, nn.Module) else model) if not is_wrapped(each)]
    if bare:
        raise InputError(
            f"The {type(bare[0]).__name__} was not set up, so Fabric's precision and ranks are not in it. "
            "Pass the model that fabric.setup() returned, and call that one in loss_fn."
        )
    scaler = getattr(fabric.strategy.precision, "scaler", None)
    return Gradient(model, loss_fn, backward=fabric.backward, scaler=scaler, **options)
