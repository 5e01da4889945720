# TensorFlow is an extra: without it pyright has only stubs of a part of it, which it prefers in any case.
# pyright: reportMissingImports=false, reportMissingModuleSource=false, reportAttributeAccessIssue=false
"""Accumulator for GradientTape loops: a call of `add` per micro-batch, a call of `apply` per update."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from .. import normalize
from . import adding, boundary, checking, optimizers, presence
from .arithmetic import DTypeChoice
from .options import NonFinite, Options, as_variables, check
from .outcome import Applied
from .state import State, check_adding, check_outside, clear, strategy_of
from .tracing import as_written


class Accumulator(tf.Module):
    """Sum gradients over the micro-batches of a window, and make the update of the large batch.

    For micro-batches ``i`` with weights ``w_i``, gradients ``g_i`` and ``W = sum w_i``, over all replicas::

        reduction="mean":  g = sum w_i g_i / W          reduction="sum":  g = sum g_i / W

    It works in eager code and in `tf.function`. It is a `tf.Module`, so `tf.train.Checkpoint` also saves an
    open window. Under a strategy with several replicas, call ``add`` in the function that ``strategy.run``
    runs; it does not communicate. Call ``apply`` after ``strategy.run``, outside of the strategy.

    Args:
        variables: ``model.trainable_variables``, of TensorFlow or of Keras with the TensorFlow backend. For
            several replicas, create them within ``strategy.scope()``.
        reduction: whether the loss of a micro-batch is a ``"mean"`` or a ``"sum"``.
        accumulator_dtype: the dtype in which gradients are summed: ``"auto"`` for float32 or wider, None for
            the dtype of the variable, or a dtype.
        max_grad_norm: the largest 2-norm of the gradient of the batch over all replicas, without a loss
            scale; a longer gradient is scaled down as by `tf.clip_by_global_norm`.
        max_grad_value: the largest magnitude of an element of the gradient.
        nonfinite: for a gradient that is not finite: ``"raise"`` drops the window and raises NonFiniteError
            (in a graph `tf.errors.InvalidArgumentError`); ``"skip_update"`` drops the window without an
            error; ``"skip_microbatch"`` leaves the micro-batch and its weight out.
        noise: whether to measure the noise of the gradient: a2, b2, q and effective_samples of `Applied`.

    Raises:
        InputError: an argument has the wrong type or value.

    Examples:
        >>> w = tf.Variable([1.0])
        >>> accumulator = Accumulator([w])
        >>> for x in ([1.0, 2.0, 6.0], [7.0]):  # unequal micro-batches
        ...     with tf.GradientTape() as tape:
        ...         loss = tf.reduce_mean(w * tf.constant(x))
        ...     accumulator.add(tape.gradient(loss, [w]), weight=len(x), loss=loss)
        >>> applied = accumulator.apply(tf.keras.optimizers.SGD(0.5))
        >>> float(applied.loss), float(applied.weight), w.numpy().tolist()
        (4.0, 4.0, [-1.0])
    """

    def __init__(
        self,
        variables: Any,
        *,
        reduction: normalize.Reduction = "mean",
        accumulator_dtype: DTypeChoice = "auto",
        max_grad_norm: float | None = None,
        max_grad_value: float | None = None,
        nonfinite: NonFinite = "raise",
        noise: bool = False,
    ) -> None:
        super().__init__(name="accumulator")
        given, behind = as_variables(variables)
        self._options = check(
            Options(
                given, behind, reduction, accumulator_dtype, max_grad_norm, max_grad_value, nonfinite, noise
            )
        )
        self._strategy = strategy_of(behind[0])
        self._patterns = _Patterns()
        self.state = State(behind, accumulator_dtype)

    @as_written
    def add(self, gradients: Any, weight: Any = None, *, loss: Any = None, samples: Any = None) -> None:
        """Add the gradients of one micro-batch: ``w_i g_i`` for a mean, ``g_i`` for a sum.

        Args:
            gradients: the result of ``tape.gradient(loss, variables)``: tensors, IndexedSlices (summed to a
                dense tensor, repeated indices added) and None (counted as 0 if another micro-batch of the
                window has a gradient).
            weight: the weight of the micro-batch, required: its number of samples or tokens, or 1 if all
                micro-batches count the same. A number, or a scalar tensor of int32, int64, float32 or
                float64. In a `tf.function` pass a tensor: each new number causes a retrace. With a mean, a
                micro-batch of weight 0 contributes nothing, even if it is NaN.
            loss: the unscaled loss of the micro-batch, for `Applied.loss`.
            samples: the number of samples of the micro-batch, for the noise (default: its weight).

        Raises:
            InputError: an argument has the wrong type or value; nothing is added. In a graph, a weight that
                is negative or not finite raises `tf.errors.InvalidArgumentError`.
            WindowError: the variables are on replicas, and it is called outside of ``strategy.run``.

        Examples:
            >>> accumulator = Accumulator([tf.Variable([0.0, 0.0])])
            >>> rows = tf.IndexedSlices(values=tf.constant([1.0, 2.0]), indices=tf.constant([1, 1]))
            >>> accumulator.add([rows], weight=4)
            >>> accumulator.mean()[0].numpy().tolist()
            [0.0, 3.0]
        """
        check_adding(self._strategy)
        microbatch = adding.check(gradients, weight, loss, samples, self._options)
        self._patterns.seen.add(presence.of(microbatch.gradients))
        self._patterns.traced |= not tf.executing_eagerly()
        adding.add(self.state, microbatch, self._options)

    @as_written
    def check_loss(self, loss: Any, *batch: Any, weight: Any) -> None:
        """Check on a few rows that this weight combines the losses of micro-batches to that of the batch.

        ``add`` gets only gradients, which do not show a wrong weight, or a layer or loss that couples rows.
        Call this check once before training, eagerly. It evaluates at most 8 rows, once as a whole and once
        in two unequal parts, and compares loss and gradient. It repeats this twice with other rows. It makes
        no update, but the forwards change layers such as BatchNormalization.

        Args:
            loss: a function ``(*batch) -> scalar``: the loss that the loop differentiates, without dropout
                (``training=False``).
            batch: tensors or arrays with a row for each sample, or nests of them; scalars are not split.
            weight: a function ``(*batch) -> scalar``: the weight to pass to ``add``.

        Raises:
            CoupledSamplesError: no weight is known to combine the losses; probably rows are coupled.
            InputError: it is called in a `tf.function`, there are fewer than two rows, or the loss draws
                random numbers.
            LossSpecError: the loss is a sum, one number for each row, or a mean over another count than
                the weight.
            SplitError: the batch has a SparseTensor.

        Examples:
            >>> w = tf.Variable([1.0])
            >>> accumulator = Accumulator([w])
            >>> rows = tf.constant([[1.0], [2.0], [6.0]])
            >>> accumulator.check_loss(lambda x: tf.reduce_mean(w * x), rows, weight=len)
            >>> accumulator.check_loss(lambda x: tf.reduce_sum(w * x), rows, weight=len)
            Traceback (most recent call last):
            superbatch.errors.LossSpecError: The loss is a sum, ...
        """
        checking.check_loss(loss, batch, weight, self._options)

    @as_written
    def apply(self, optimizer: Any) -> Applied:
        """End the window: reduce, divide, clip, update once, and begin the next window.

        A shorter last window needs no special call: it is divided by its own weight. If the weight of the
        window is 0, no update is made, and the optimizer's counters do not change.

        Args:
            optimizer: an optimizer of Keras (also a `LossScaleOptimizer`) or of `tf.compat.v1.train`. It is
                called once, without the variables that had no gradient in the window.

        Returns:
            The weight, loss, gradient norm and counts of the window.

        Raises:
            LossSpecError: sums of losses have a gradient, but the window has weight 0; it is dropped.
            NonFiniteError: the gradient is not finite (``nonfinite="raise"``); the window is dropped.
            OptimizerError: one call of this optimizer is not one update, or no variable has a gradient; the
                window is kept.
            WindowError: it is called inside of a strategy.

        Examples:
            >>> accumulator = Accumulator([tf.Variable(1.0)])
            >>> bool(accumulator.apply(tf.keras.optimizers.SGD(0.5)).made)  # nothing was added
            False
        """
        check_outside("apply()")
        optimizers.check(optimizer, self._options)
        optimizers.check_scale(optimizer, traced=self._patterns.traced)
        return boundary.apply(self.state, optimizer, self._options, self._patterns.seen)

    @as_written
    def mean(self) -> list[Any]:
        """Return the gradient of the open window so far, without clipping.

        Returns:
            One dense tensor per variable, in its dtype; None for a variable without a gradient. In a graph,
            zeros if the weight is 0, and None only for a variable that had no gradient in any window.

        Raises:
            WindowError: the weight of the window is 0 (in eager code), or it is called inside of a strategy.

        Examples:
            >>> accumulator = Accumulator([tf.Variable(1.0), tf.Variable(1.0)])
            >>> accumulator.add([tf.constant(2.0), None], weight=1)
            >>> accumulator.add([tf.constant(6.0), None], weight=3)
            >>> print(float(accumulator.mean()[0]), accumulator.mean()[1])
            5.0 None
        """
        check_outside("mean()")
        return boundary.means(self.state, self._options, self._patterns.seen)

    @as_written
    def reset(self) -> None:
        """Drop the open window; the next ``add`` begins a new one.

        Raises:
            WindowError: it is called inside of a strategy.

        Examples:
            >>> accumulator = Accumulator([tf.Variable(1.0)])
            >>> accumulator.add([tf.constant(float("nan"))], weight=4)
            >>> accumulator.reset()
            >>> accumulator.add([tf.constant(2.0)], weight=4)
            >>> float(accumulator.mean()[0])
            2.0
        """
        check_outside("reset()")
        clear(self.state, self._strategy)


class _Patterns:
    """Sets of variables that had gradients in calls of ``add``; not part of a checkpoint."""

    def __init__(self) -> None:
        self.seen: set[presence.Pattern] = set()
        self.traced = False  # whether a call of `add` was traced
