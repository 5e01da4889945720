# TensorFlow is an extra: without it pyright has only stubs of a part of it, which it prefers in any case.
# pyright: reportMissingImports=false, reportMissingModuleSource=false, reportAttributeAccessIssue=false
"""Accumulator for GradientTape loops: one call for each micro-batch, and one for each update."""

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
    """Sum gradients over the micro-batches of a window, and make one update: that of the large batch.

    For micro-batches ``i`` with weights ``w_i``, gradients ``g_i`` and ``W = sum w_i``, over all replicas::

        reduction="mean":  g = sum w_i g_i / W          reduction="sum":  g = sum g_i / W

    It works in eager code and in `tf.function`, and is a `tf.Module`: `tf.train.Checkpoint` saves a window
    that is half done. Under a strategy with several replicas ``add`` belongs into the function that
    ``strategy.run`` runs, where it communicates nothing, and ``apply`` after it, outside of the strategy.

    Args:
        variables: ``model.trainable_variables``: of TensorFlow, or of Keras with that backend. On replicas,
            create them within ``strategy.scope()``.
        reduction: what the losses are: a ``"mean"`` over the micro-batch or a ``"sum"``.
        accumulator_dtype: gradients are summed in ``"auto"``: float32 or wider; None: the dtype of their
            variable; or this dtype.
        max_grad_norm: the largest 2-norm of the gradient of the batch, clipped as `tf.clip_by_global_norm`
            does; of all replicas together, and without a loss scale.
        max_grad_value: the largest magnitude of one of its elements.
        nonfinite: ``"raise"`` gives up the window and raises NonFiniteError, in a graph
            `tf.errors.InvalidArgumentError`; ``"skip_update"`` gives up the window; ``"skip_microbatch"``
            leaves the micro-batch and its weight out.
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
            gradients: what ``tape.gradient(loss, variables)`` returns: tensors, IndexedSlices (repeated
                indices add up; the sum is dense) and None (no gradient: counts as 0 in a window where another
                micro-batch has one).
            weight: how much the micro-batch counts, always required: its samples or its tokens; 1 where all
                micro-batches count the same. A number, or a scalar tensor of int32, int64, float32 or
                float64; in a `tf.function` a tensor, or each new number is a new
                trace. 0 contributes nothing, NaN or not.
            loss: of the micro-batch, as it was differentiated (without a loss scale), for `Applied.loss`.
            samples: of the micro-batch, for the noise; by default its weight.

        Raises:
            InputError: an argument has the wrong type or value. Nothing was added. In a graph, a weight that
                is negative or not finite is a `tf.errors.InvalidArgumentError`.
            WindowError: it is called outside of ``strategy.run`` with variables on replicas.

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
        """Check on a few rows that the losses of micro-batches give that of the batch, with this weight.

        ``add`` sees gradients only: that a loss is not the mean that its weight says, or that a layer or a
        loss couples rows, gradients do not show. Call this once before training, eagerly. Three times, with
        other rows each, the loss and its gradient of at most 8 rows at once are compared with those of two
        unequal parts. It makes no update; layers that a forward changes, as BatchNormalization, are changed.

        Args:
            loss: a function ``(*batch) -> scalar``, as the loop differentiates it, without dropout
                (``training=False``).
            batch: tensors or arrays with a row for each sample, or nests of them; numbers stay whole.
            weight: a function ``(*batch) -> scalar``: the weight that ``add`` is given.

        Raises:
            CoupledSamplesError: the weight is right for a mean over rows or tokens, and the loss is no such
                mean: rows are coupled.
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
        """End the window: reduce, normalise, clip, update once, and begin the next window.

        A tail needs nothing: the window is divided by its own weight. Where nothing has weight no update is
        made, and the optimizer's counters stay.

        Args:
            optimizer: of Keras, a `LossScaleOptimizer` included, or of `tf.compat.v1.train`. It is called
                once, as with the gradient of a large batch, and not with variables that had no gradient.

        Returns:
            The weight, loss, gradient norm and counts of the window.

        Raises:
            NonFiniteError: the gradient is not finite (``nonfinite="raise"``); the window was given up.
            OptimizerError: one call of this optimizer is not one update. The window stays.
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
        """Return the gradient of the window so far, not clipped; the window stays open.

        Returns:
            One dense tensor per variable, in its dtype; None for a variable that had no gradient. In a graph
            zeros if nothing has weight, and None only for a variable that never had a gradient.

        Raises:
            WindowError: nothing has weight, or it is called inside of a strategy.

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
        """Give up the window: the next ``add`` is its first micro-batch.

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
    """Sets of variables that had gradients in the calls so far; not part of a checkpoint."""

    def __init__(self) -> None:
        self.seen: set[presence.Pattern] = set()
        self.traced = False  # whether one of them was in a graph
