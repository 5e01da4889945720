"""Run a case with a backend, and compare gradients, buffers and loss with those of the real batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from superbatch.batch import tree
from tests.torch.coupled.case import Case, Loss

Backend = Callable[[nn.Module, Any, Loss], Tensor]
"""(model, batch, loss_fn) -> loss; sets `.grad`. A backend may split or wrap `batch`."""

SEED = 20  # of the random numbers in the forward
ZERO = 1e-10  # a gradient this small relative to the model's largest is a zero with rounding errors


@dataclass(frozen=True)
class Result:
    """Results of one forward and backward.

    Attributes:
        loss: the loss.
        gradients: `.grad` by name of the parameter; None if it has none.
        buffers: by name, including non-persistent ones.
    """

    loss: Tensor
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]


def full_batch(model: nn.Module, batch: Any, loss_fn: Loss) -> Tensor:
    """Run forward and backward on the whole batch: the reference."""
    loss = loss_fn(model, batch)
    loss.backward()
    return loss


def plain_accumulation(microbatch: int) -> Backend:
    """Return a backend that averages micro-batches, weighted by samples: wrong if samples are coupled."""

    def run(model: nn.Module, batch: Any, loss_fn: Loss) -> Tensor:
        n = tree.count_samples(batch)
        losses = []
        for start in range(0, n, microbatch):
            stop = min(start + microbatch, n)
            loss = loss_fn(model, tree.take(batch, start, stop)) * ((stop - start) / n)
            loss.backward()
            losses.append(loss.detach())
        return torch.stack(losses).sum()

    return run


def run_with(
    case: Case, n: int | None, backend: Backend, *, wrap: Literal["all", "inputs"] | None = None
) -> Result:
    """Run a fresh model of the case.

    Args:
        case: the case.
        n: number of samples (default: the case's own).
        backend: called with the model, the batch and the loss. With `wrap="inputs"` the batch has no
            labels: the loss adds the plain ones, as for a user who wraps only the inputs.
        wrap: overrides `case.wrap`.
    """
    model, batch = case.make(), case.batch(n)
    loss_fn = case.loss
    if (wrap or case.wrap) == "inputs":
        labels = {"y": batch["y"]}
        batch = {key: value for key, value in batch.items() if key != "y"}

        def with_labels(model: nn.Module, inputs: Any) -> Tensor:
            return case.loss(model, {**inputs, **labels})

        loss_fn = with_labels

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        loss = backend(model, batch, loss_fn)
    return Result(
        loss.detach(),
        {name: value.grad for name, value in model.named_parameters()},
        {name: value.detach() for name, value in model.named_buffers()},
    )


def reference(case: Case, n: int | None = None) -> Result:
    """Run the real batch in plain PyTorch."""
    return run_with(case, n, full_batch)


def assert_equal(reference: Result, other: Result, tolerance: float = 1e-12) -> None:
    """Compare loss, gradients and buffers; fail with a list of all differences.

    The error of a gradient is the 2-norm of the difference, divided by the norm of the reference. If the
    reference is zero up to rounding (a bias before BatchNorm), the divisor is the largest gradient norm of
    the model. A buffer that is zero up to rounding (the running mean of centred values) is compared
    absolutely.
    """
    failures = differences(reference, other, tolerance)
    assert not failures, "not the gradient of the real batch:\n" + "\n".join(failures)


def differences(reference: Result, other: Result, tolerance: float) -> list[str]:
    """Return one line for each value that differs by more than the tolerance."""
    found = []
    loss, expected = float(other.loss), float(reference.loss)
    if not abs(loss - expected) <= tolerance * max(abs(expected), 1.0):
        found.append(f"loss: {loss!r}, and {expected!r} for the real batch")
    found += [
        f"{name}: {text}"
        for name, text in _gradient_differences(reference, other, tolerance)
        if text is not None
    ]
    assert reference.buffers.keys() == other.buffers.keys()
    for name, expected in reference.buffers.items():
        size = float(_norm(expected))
        text = _difference(other.buffers[name], expected, tolerance, size if size > ZERO else 1.0)
        if text is not None:
            found.append(f"buffer {name}: {text}")
    return found


def gradient_error(reference: Result, other: Result) -> float:
    """Return the norm of the difference of the two gradients, relative to the reference's norm."""
    wrong, size = torch.zeros(()), torch.zeros(())
    for name, expected in reference.gradients.items():
        actual = other.gradients[name]
        if expected is None:
            assert actual is None, f"{name} has a gradient"
            continue
        assert actual is not None, f"{name} has no gradient"
        wrong = wrong + _norm(_dense(actual) - _dense(expected)) ** 2
        size = size + _norm(expected) ** 2
    assert float(size) > 0, "premise: the gradient of the real batch is not zero"
    return float((wrong / size).sqrt())


def _gradient_differences(reference: Result, other: Result, tolerance: float) -> list[tuple[str, str | None]]:
    assert reference.gradients.keys() == other.gradients.keys()
    largest = max(float(_norm(value)) for value in reference.gradients.values() if value is not None)
    assert largest > 0, "premise: the gradient of the real batch is not zero"
    found: list[tuple[str, str | None]] = []
    for name, expected in reference.gradients.items():
        actual = other.gradients[name]
        if expected is None or actual is None:
            if actual is not expected:
                found.append((name, f"has {'no' if actual is None else 'a'} gradient"))
            continue
        size = float(_norm(expected))
        scale = size if size > ZERO * largest else largest
        found.append((name, _difference(actual, expected, tolerance, scale)))
    return found


def _difference(actual: Tensor, expected: Tensor, tolerance: float, scale: float) -> str | None:
    for attribute in ("shape", "dtype", "layout"):
        if getattr(actual, attribute) != getattr(expected, attribute):
            return f"{attribute} {getattr(actual, attribute)}, and not {getattr(expected, attribute)}"
    error = float(_norm(_dense(actual).double() - _dense(expected).double())) / scale
    return None if error <= tolerance else f"relative error {error:.2e} > {tolerance:.0e}"


def _dense(value: Tensor) -> Tensor:
    return value.to_dense() if value.is_sparse else value


def _norm(value: Tensor) -> Tensor:
    return torch.linalg.vector_norm(_dense(value).double())
