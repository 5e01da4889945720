"""Windows of a Lightning module: batches collected, their gradient, and the values logged on the way."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities.memory import recursive_detach
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor

from .. import normalize
from ..errors import InputError
from ..torch import Gradient, WholeGradient, Window
from .versions import check_version


class LightningWindows:
    """Windows of one fit.

    Args:
        module: an `ExactAccumulation`, set up by its Trainer.
        step: the `training_step` of the user.
        backward: the `backward` of the user, or Lightning's.

    Raises:
        InputError: the Trainer or the module asks for what cannot be accumulated here.
    """

    def __init__(self, module: Any, step: Callable[..., Any], backward: Callable[..., Any]) -> None:
        check_version("lightning")
        options = module.gradient_options()
        _refuse(module, step, options)
        self._module, self._trainer, self._step = module, module.trainer, step
        self._takes_index = is_param_in_hook_signature(step, "batch_idx", min_args=2)
        self._batches: dict[int, Any] = {}  # by their number in the epoch
        self._is_last = False
        self._gradients: list[tuple[Tensor, Tensor | None]] = []
        self._returned: dict[str, Any] = {}
        self._loss_like = torch.zeros(())
        self._logged = LoggedValues()
        scaler = getattr(self._trainer.precision_plugin, "scaler", None)
        if getattr(backward, "__func__", None) is not LightningModule.backward:  # it is the user's
            options["backward"] = lambda loss, **kwargs: backward(
                loss if scaler is None else scaler.scale(loss), **kwargs
            )
        options["participants"] = [*options.get("participants", ()), self._logged]
        if not module.coupled:
            options = {"microbatch_size": None, "weight": module.weight_of, **options}
        kind: Any = WholeGradient if module.coupled else Gradient
        self._gradient_of = kind(self._trainer.model, self._loss, scaler=scaler, device=None, **options)

    @contextmanager
    def last_batch(self) -> Iterator[None]:
        """Take the batch that Lightning runs in this context as the last one of its update."""
        self._is_last = True
        try:
            yield
        finally:
            self._is_last = False
            self._batches.clear()

    def step(self, batch: Any, index: int) -> tuple[Any, list[tuple[str, Any, dict[str, Any]]]]:
        """Collect a batch, or compute the gradient of those collected.

        Args:
            batch: of the loader.
            index: its number in the epoch.

        Returns:
            What a `training_step` returns, and the values to log.
        """
        if index % self._trainer.accumulate_grad_batches == 0:
            self._batches.clear()  # a window that was never finished: its epoch was skipped
        self._batches[index] = batch
        if not self._is_last:
            return torch.full((), torch.nan, device=self._module.device), []
        update = self._compute()
        # Lightning divides by this number, as it does the losses that it adds up itself.
        loss = self._loss_like.new_tensor(update.loss * self._trainer.accumulate_grad_batches)
        returned, self._returned = self._returned, {}
        return {"loss": loss, **returned} if returned else loss, self._logged.means(update.samples, self._sum)

    def _compute(self) -> Any:
        batches = list(self._batches.values())
        parameters = [each for each in self._module.parameters() if each.requires_grad]
        for parameter in parameters:  # those of the last update, which Lightning is about to zero
            parameter.grad = None
        # Lightning runs training_step in autocast, and the backward does not belong in it.
        with torch.autocast(self._module.device.type, enabled=False), self._logged.collected():
            update = self._gradient_of(batches[0] if len(batches) == 1 else Window(batches))
        self._gradients = [(parameter, parameter.grad) for parameter in parameters]
        for parameter in parameters:  # until Lightning has zeroed, and runs the backward
            parameter.grad = None
        return update

    def attach(self) -> None:
        """Put the gradient into ``.grad``."""
        while self._gradients:
            parameter, gradient = self._gradients.pop()
            parameter.grad = gradient

    def note(self, name: str, value: Any, *args: Any, **kwargs: Any) -> bool:
        """Keep a value that is logged inside of a window; return False where it is logged elsewhere.

        Args:
            name: as `LightningModule.log`'s, and so are the others.
            value: likewise.
            args: likewise.
            kwargs: likewise.
        """
        given = _LOG.bind(self._module, name, value, *args, **kwargs).arguments
        options = {key: each for key, each in given.items() if key not in ("self", "name", "value")}
        return self._logged.note(name, value, options)

    def _loss(self, microbatch: Any) -> Any:
        weight = 1 if self._module.coupled else self._module.weight_of(microbatch)
        counts = self._logged.start(weight)
        indices = [index for index, batch in self._batches.items() if batch is microbatch]
        index = indices[0] if indices else max(self._batches)
        with self._trainer.precision_plugin.train_step_context():
            returned = self._step(microbatch, index) if self._takes_index else self._step(microbatch)
        loss = returned.get("loss") if isinstance(returned, Mapping) else returned
        if not isinstance(loss, Tensor):
            raise InputError(
                f"training_step returned {type(loss).__name__}. Return the loss of its batch; for a batch "
                "that does not count, let weight_of return 0."
            )
        if counts:
            self._loss_like = loss.detach()
            extra = returned if isinstance(returned, Mapping) else {}
            self._returned = recursive_detach({key: extra[key] for key in extra if key != "loss"})
        return loss

    def _sum(self, number: Tensor) -> Tensor:
        return self._trainer.strategy.reduce(number, reduce_op="sum")


class LoggedValues:
    """Values logged in a window, as a `Participant`: those of a micro-batch that is run again go.

    `training_step` also runs outside of micro-batches, when its loss is checked: nothing is kept then.
    """

    def __init__(self) -> None:
        self._entries: list[tuple[str, Any, dict[str, Any], Any]] = []
        self._mark = 0
        self._is_inside = self._expects = self._keeps = False
        self._weight: Any = 1

    @contextmanager
    def collected(self) -> Iterator[None]:
        """Keep what is logged in this context from Lightning."""
        self._is_inside, self._expects = True, False
        self._entries.clear()
        try:
            yield
        finally:
            self._is_inside = False

    def start(self, weight: Any) -> bool:
        """Begin a call of `training_step`; return whether it is a micro-batch of the window.

        Args:
            weight: of what it is called with.
        """
        self._keeps, self._expects, self._weight = self._expects, False, weight
        return self._keeps

    def note(self, name: str, value: Any, options: dict[str, Any]) -> bool:
        """Keep a value of a micro-batch; return False outside of a window.

        Args:
            name: of the value.
            value: logged.
            options: of `LightningModule.log`.
        """
        if self._is_inside and self._keeps:
            kept = value.detach() if isinstance(value, Tensor) else value
            self._entries.append((name, kept, options, self._weight))
        return self._is_inside

    def means(
        self, samples: int | None, over_ranks: Callable[[Tensor], Tensor]
    ) -> list[tuple[str, Any, dict[str, Any]]]:
        """Return each value that is averaged once, as its mean over the window, and the others as they came.

        Args:
            samples: of the window; None: not known.
            over_ranks: sums a number over all ranks.
        """
        found: dict[str, list[Any]] = {}
        for name, value, options, weight in self._entries:
            found.setdefault(name, []).append((value, options, weight))
        self._entries.clear()
        logged: list[tuple[str, Any, dict[str, Any]]] = []
        for name, entries in found.items():
            value, options, _ = entries[-1]
            if options.get("reduce_fx", "mean") not in ("mean", torch.mean):
                logged += [(name, each, given) for each, given, _ in entries]
                continue
            if isinstance(value, Tensor | float | int):
                value = _mean(entries, over_ranks if options.get("sync_dist") else None)
            sizes = [given.get("batch_size") for _, given, _ in entries]
            size = samples if None in sizes else sum(sizes)
            logged.append((name, value, options if size is None else {**options, "batch_size": size}))
        return logged

    def begin(self) -> None:
        """Expect a whole batch whose samples are coupled, which has no savepoint."""
        self.savepoint()

    def savepoint(self) -> None:
        """Expect one call of `training_step`."""
        self._mark, self._expects = len(self._entries), True

    def rollback(self) -> bool:
        """Forget the values of the micro-batch."""
        del self._entries[self._mark :]
        return True

    def restart(self) -> None:
        """Forget all values."""
        self._entries.clear()
        self._expects = True

    def restore(self) -> None:
        """Forget all values."""
        self._entries.clear()

    def commit(self) -> None:
        """Expect no more."""
        self._expects = False

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: a Lightning checkpoint is not saved inside of a window."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """No-op."""


def _mean(entries: list[Any], over_ranks: Callable[[Tensor], Tensor] | None) -> Tensor:
    values = [torch.as_tensor(value) for value, _, _ in entries]
    weights = [weight for _, _, weight in entries]
    total = normalize.total_weight(weights)
    if over_ranks is not None:
        total = over_ranks(torch.tensor(float(total), dtype=torch.float64, device=values[0].device)).item()
    factors = [normalize.scale(weight, total, reduction="mean") for weight in weights]
    mean = torch.stack([value * factor for value, factor in zip(values, factors, strict=True)]).sum()
    return mean if over_ranks is None else over_ranks(mean)


def _refuse(module: Any, step: Callable[..., Any], options: Mapping[str, Any]) -> None:
    trainer = module.trainer
    if not module.automatic_optimization:
        raise InputError(
            "ExactAccumulation is for automatic optimization, and automatic_optimization is False. In a loop "
            "of your own, call superbatch.torch.Gradient in place of forward and manual_backward()."
        )
    refuse_strategy(trainer.strategy, SingleDeviceStrategy, DDPStrategy)
    if is_param_in_hook_signature(step, "dataloader_iter", explicit=True):
        raise InputError("training_step takes dataloader_iter. Let it take (batch, batch_idx) instead.")
    size, batches = options.get("microbatch_size"), trainer.accumulate_grad_batches
    if size is not None and batches > 1:
        raise InputError(
            f"microbatch_size={size!r} cuts a batch, but accumulate_grad_batches={batches} joins batches. "
            "Pass accumulate_grad_batches=1, and let the loader yield the batch that you want."
        )


def refuse_strategy(strategy: Any, *supported: type) -> None:
    """Check that each rank has the whole model, and one process accumulates for itself.

    Args:
        strategy: of a Trainer or of Fabric.
        supported: classes of strategies.

    Raises:
        InputError: it shards the model, or accumulates itself.
    """
    if not isinstance(strategy, supported) or getattr(strategy, "handles_gradient_accumulation", False):
        raise InputError(
            f"{type(strategy).__name__} is a strategy with which gradients cannot be accumulated here. Pass "
            'strategy="ddp", or devices=1.'
        )


_LOG = inspect.signature(LightningModule.log)
