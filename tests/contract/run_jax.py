# JAX is an extra. If it is not installed, pyright cannot resolve the module or its members:
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""The contract on JAX: one jitted update (`value_and_grad`), and a stream (`multi_steps`)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from superbatch.jax import multi_steps, value_and_grad
from tests.contract import reference

WAYS = ["value_and_grad", "multi_steps"]
NEVER = 10**6  # every window is ended by flush=


def can(case: dict[str, Any], way: str) -> bool:
    """Return True if this way can run the case: within an update only the last micro-batch may be shorter."""
    return way == "multi_steps" or all(
        len(set(window[:-1])) <= 1 and window[-1] <= window[0] for window in case["windows"]
    )


def clipped(clip: dict[str, float]) -> optax.GradientTransformation:
    """Clip as PyTorch does, with an epsilon, which `optax.clip_by_global_norm` lacks."""

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        factor = jnp.minimum(1.0, clip["norm"] / (optax.tree.norm(updates) + clip["epsilon"]))
        return jax.tree.map(lambda leaf: factor * leaf, updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def optimizer_of(case: dict[str, Any]) -> Any:
    rates = jnp.asarray([*case["rates"], 0.0])
    sgd = optax.sgd(lambda count: rates[count], momentum=case["momentum"] or None)
    return optax.chain(clipped(case["clip"]), sgd) if case["clip"] else sgd


def loss_of(case: dict[str, Any]) -> Any:
    def loss(p: Any, microbatch: Any) -> Any:
        if "v" not in p:
            return jnp.mean(microbatch["x"] @ p["w"])
        error = jnp.tanh(microbatch["x"] @ p["w"]) @ p["v"] - microbatch["y"]
        total = jnp.sum(error**2 * (microbatch["mask"] + case["background"]))
        return total if case["reduction"] == "sum" else total / jnp.sum(microbatch["mask"])

    return loss


class Training:
    """Parameters, optimizer state and moving average of one case."""

    def __init__(self, case: dict[str, Any], way: str) -> None:
        self.case, self.way = case, way
        self.dtype = jnp.dtype(case["dtype"])
        self.p = {name: jnp.asarray(value, self.dtype) for name, value in reference.parameters(case).items()}
        self.average, self.updates, self.losses = self.p, 0, []
        self.optimizer = optimizer_of(case)
        self.nonfinite: Any = case["nonfinite"] or "propagate"
        if way == "multi_steps":
            self.optimizer = multi_steps(
                self.optimizer, every=NEVER, reduction=case["reduction"], nonfinite=self.nonfinite
            )
            self.gradient = jax.jit(jax.grad(loss_of(case)))
        self.step = jax.jit(self.optimizer.update)
        self.state = self.optimizer.init(self.p)
        self.calls: dict[int, Any] = {}

    def update(self, gradient: Any, **options: Any) -> None:
        updates, self.state = self.step(gradient, self.state, self.p, **options)
        self.p = optax.apply_updates(self.p, updates)
        if self.way == "value_and_grad" or self.state.updated:
            self.updates += 1
            beta = self.case["ema"]
            self.average = jax.tree.map(lambda a, b: beta * a + (1 - beta) * b, self.average, self.p)

    def in_one(self, rows: Any, sizes: list[int]) -> None:
        """Run a window in one jitted call; a window of weight 0 makes no update."""
        size = sizes[0]
        self.calls[size] = self.calls.get(size) or jax.jit(
            value_and_grad(
                loss_of(self.case),
                microbatch_size=size,
                layout="contiguous",
                weight=(lambda microbatch: jnp.sum(microbatch["mask"])) if self.case["lengths"] else None,
                reduction=self.case["reduction"],
                nonfinite=self.nonfinite if self.nonfinite != "skip_update" else "propagate",
                stats=True,
                check=False,  # each case is compared with its reference
            )
        )
        loss, gradient, stats = self.calls[size](self.p, rows)
        self.losses.append(float(loss))
        if float(stats.weight):
            self.update(gradient)

    def as_stream(self, rows: Any, sizes: list[int]) -> None:
        """Run a window in one call for each micro-batch."""
        start = 0
        for number, size in enumerate(sizes):
            part = {name: array[start : start + size] for name, array in rows.items()}
            start += size
            weight = np.float64(part["mask"].sum()) if self.case["lengths"] else size
            self.update(self.gradient(self.p, part), weight=weight, flush=np.bool_(number == len(sizes) - 1))


def run(case: dict[str, Any], way: str) -> dict[str, Any]:
    """Train; return losses (None for a stream), updates, parameters and their average, as lists."""
    with jax.enable_x64(new_val=True):
        training = Training(case, way)
        arrays = {name: jnp.asarray(value, training.dtype) for name, value in reference.data(case).items()}
        start = 0
        for sizes in case["windows"]:
            rows = {name: array[start : start + sum(sizes)] for name, array in arrays.items()}
            start += sum(sizes)
            (training.in_one if way == "value_and_grad" else training.as_stream)(rows, sizes)

        def listed(tree: Any) -> Any:
            return {name: np.asarray(value, np.float64).tolist() for name, value in tree.items()}

        return {
            "losses": training.losses if way == "value_and_grad" else None,
            "updates": training.updates,
            "parameters": listed(training.p),
            "average": listed(training.average),
        }
