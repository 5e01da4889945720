# JAX is an extra. Where it is not installed, pyright cannot resolve it:
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""`multi_steps` under the names of `optax.MultiSteps`, for a training that has these already."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optax

from .streaming import MultiStepsState, ShouldSkip, has_updated, multi_steps


class MultiSteps:
    """Drop-in for `optax.MultiSteps`, with exact weights, flushed tails and a NaN that ends with its window.

    Its methods, and the fields of its state as properties, are those of Optax. The stored fields differ, so a
    checkpoint of `optax.MultiSteps` cannot be loaded.

    Args:
        opt: any Optax transformation.
        every_k_schedule: micro-batches per window, or a function of the number of updates made.
        use_grad_mean: the gradient of a window is the mean, weighted where `update` gets a `weight`; if
            False the sum.
        should_skip_update_fn: see `multi_steps`.
        accumulator_dtype: see `multi_steps`; float32 or wider, where Optax's default is float32.

    Raises:
        InputError: an argument has an unknown value.

    Examples:
        >>> import jax.numpy as jnp
        >>> optimizer = MultiSteps(optax.sgd(1.0), every_k_schedule=2)
        >>> params = jnp.zeros(1)
        >>> state = optimizer.init(params)
        >>> for gradient in (1.0, 2.0):
        ...     updates, state = optimizer.update(jnp.full(1, gradient), state, params)
        >>> updates.tolist(), bool(optimizer.has_updated(state)), int(state.gradient_step)
        ([-1.5], True, 1)
    """

    def __init__(
        self,
        opt: Any,
        every_k_schedule: int | Any | Callable[[Any], Any],
        use_grad_mean: bool = True,
        should_skip_update_fn: ShouldSkip | None = None,
        accumulator_dtype: Any = "auto",
    ) -> None:
        self._transformation = multi_steps(
            opt,
            every_k_schedule,
            # Optax's sum is divided by nothing; ours would be divided by the weights.
            reduction="mean" if use_grad_mean else "total",
            accumulator_dtype=accumulator_dtype,
            should_skip_update_fn=should_skip_update_fn,
        )
        self._inner = optax.with_extra_args_support(opt)

    @property
    def inner_opt(self) -> optax.GradientTransformationExtraArgs:
        """The optimizer that is called once per window."""
        return self._inner

    def init(self, params: Any) -> MultiStepsState:
        """Return the state before the first micro-batch."""
        state: Any = self._transformation.init(params)
        return state

    def update(
        self, updates: Any, state: MultiStepsState, params: Any = None, **extra_args: Any
    ) -> tuple[Any, MultiStepsState]:
        """Add the gradient of a micro-batch; at the end of a window call the optimizer.

        Args:
            updates: gradients of the micro-batch.
            state: from `init` or the last call.
            params: the parameters.
            extra_args: `weight` and `flush`, see `multi_steps`; others are given to the optimizer.

        Returns:
            What to add to the parameters, zeros within a window, and the new state.
        """
        found: Any = self._transformation.update(updates, state, params, **extra_args)
        return found

    def has_updated(self, state: MultiStepsState) -> Any:
        """Return whether the last call made an update; False after a micro-batch that was rejected."""
        return has_updated(state)

    def gradient_transformation(self) -> optax.GradientTransformationExtraArgs:
        """Return the pair of functions that Optax's `chain` and flax's `TrainState` take."""
        return self._transformation
