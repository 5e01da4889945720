# Keras is an extra. Where it is not installed, pyright cannot resolve it; where it is, what
# pyright infers of its untyped functions is wrong:
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportOptionalOperand=false
# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false, reportOptionalIterable=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportFunctionMemberAccess=false
# pyright: reportIncompatibleMethodOverride=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportReturnType=false, reportOptionalCall=false, reportGeneralTypeIssues=false
# pyright: reportMissingModuleSource=false
"""Update of an incomplete window, for users of Keras' own `gradient_accumulation_steps`."""

from __future__ import annotations

import contextlib
from typing import Any

import keras
from keras import ops

from ..errors import OptimizerError


class FlushTail(keras.callbacks.Callback):
    """Callback that makes the update of an incomplete window at the end of an epoch.

    Keras updates after every k micro-batches, with the sum of their gradients divided by k. If an epoch has
    ``q k + r`` micro-batches, Keras adds the last r to the first window of the next epoch, or drops them at
    the end of training. This callback applies them before validation::

        gradient of the tail = (sum of r gradients) / r

    It then sets Keras' counter of micro-batches to the next multiple of k, so that the next epoch begins with
    a new window.

    This is exact if all micro-batches have the same size. Keras sums means: a last micro-batch with fewer
    rows counts as much as the others. Learning-rate schedules and the moving average of weights still count
    micro-batches. `accumulate` has none of these limits.

    Raises:
        OptimizerError: when training begins: `gradient_accumulation_steps` of the optimizer is not set.

    Examples:
        >>> model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        >>> model.compile(keras.optimizers.SGD(0.1, gradient_accumulation_steps=4), loss="mse")
        >>> x = ops.ones((10, 1))
        >>> history = model.fit(x, x, batch_size=1, epochs=1, callbacks=[FlushTail()], verbose=0)
        >>> int(model.optimizer.iterations)  # windows of 4, 4 and 2 micro-batches
        3

    See Also:
        https://keras.io/api/optimizers/ on `gradient_accumulation_steps`.
    """

    training = False

    def on_train_begin(self, logs: Any = None) -> None:
        """Raise OptimizerError if the optimizer does not accumulate."""
        if not _inner(self.model.optimizer).gradient_accumulation_steps:
            raise OptimizerError(
                "FlushTail has no tail to flush: the optimizer does not accumulate. Give the optimizer "
                "gradient_accumulation_steps=, or leave FlushTail out."
            )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Remember that an epoch of training has begun, so that its tail is flushed once."""
        self.training = True

    def on_test_begin(self, logs: Any = None) -> None:
        """Flush before the validation of an epoch; `evaluate` outside of training flushes nothing."""
        if self.training:
            self.on_epoch_end(0)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Make the update of the micro-batches since the last update, if there are any."""
        self.training = False
        optimizer = _inner(self.model.optimizer)
        steps = optimizer.gradient_accumulation_steps
        left = int(optimizer._iterations) % steps  # `iterations` counts windows
        if not left:
            return
        for total in optimizer._accumulated_gradients:
            if total is not None:
                total.assign(ops.convert_to_tensor(total) * (steps / left))  # Keras divides by `steps`
        # With this counter the next call ends a window: zero gradients make Keras apply the sums.
        optimizer._iterations.assign(ops.convert_to_tensor(optimizer._iterations) + (steps - 1 - left))
        weights = self.model.trainable_variables
        with _no_gradients():
            optimizer.apply([ops.zeros_like(ops.convert_to_tensor(weight)) for weight in weights], weights)


def _inner(optimizer: Any) -> Any:
    """Return the optimizer that makes the update, also from within a `LossScaleOptimizer`."""
    return getattr(optimizer, "inner_optimizer", optimizer)


def _no_gradients() -> Any:
    if keras.backend.backend() != "torch":
        return contextlib.nullcontext()
    import torch

    return torch.no_grad()
