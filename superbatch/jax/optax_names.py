# JAX is an extra. Where it is not installed, pyright cannot resolve it:
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""`multi_steps` with the class and method names of `optax.MultiSteps`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optax

from .streaming import MultiStepsState, ShouldSkip, has_updated, multi_steps


class MultiSteps:
    """Drop-in replacement for `optax.MultiSteps`, with exact weights and flushed tails.

    A NaN gradient affects its own window only. Methods and state properties have Optax's names. The stored
    fields differ, so a checkpoint of `optax.MultiSteps` cannot be loaded.

    Args:
        opt: any Optax transformation.
        every_k_schedule: micro-batches per window, or a function of the number of updates made.
        use_grad_mean: whether the gradient of a window is the mean of its gradients, weighted by the `weight`
            of `update`; if False it is their sum.
        should_skip_update_fn: see `multi_steps`.
        accumulator_dtype: see `multi_steps`. The default is float32 or wider; Optax's is float32.

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
            # Optax does not divide its sum; reduction="sum" would divide by the weights.
            reduction="mean" if use_grad_mean else "total",
            accumulator_dtype=accumulator_dtype,
            should_skip_update_fn=should_skip_update_fn,
        )
        self._inner = optax.with_extra_args_support(opt)

    @property
    def inner_opt(self) -> optax.GradientTransformationExtraArgs:
        """The wrapped optimizer, which is called once per window."""
        return self._inner

    def init(self, params: Any) -> MultiStepsState:
        """Return the state before the first micro-batch."""
        state: Any = self._transformation.init(params)
        return state

    def update(
        self, updates: Any, state: MultiStepsState, params: Any = None, **extra_args: Any
    ) -> tuple[Any, MultiStepsState]:
        """Add the gradient of a micro-batch; call the optimizer if it ends a window.

        Args:
            updates: the gradients of the micro-batch.
            state: the state from `init` or the last call.
            params: the parameters.
            extra_args: `weight` and `flush`, see `multi_steps`; others are passed to the optimizer.

        Returns:
            The updates to add to the parameters (zeros within a window), and the new state.
        """
        result: Any = self._transformation.update(updates, state, params, **extra_args)
        return result

    def has_updated(self, state: MultiStepsState) -> Any:
        """Return whether the last call made an update; False after a micro-batch that was rejected."""
        return has_updated(state)

    def gradient_transformation(self) -> optax.GradientTransformationExtraArgs:
        """Return the Optax transformation, for `optax.chain` or flax's `TrainState`."""
        return self._transformation
