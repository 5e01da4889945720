# Keras is an extra. Where it is not installed, pyright cannot resolve it; where it is, what
# pyright infers of its untyped functions is wrong:
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportOptionalOperand=false
# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false, reportOptionalIterable=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportFunctionMemberAccess=false
# pyright: reportIncompatibleMethodOverride=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportReturnType=false, reportOptionalCall=false, reportGeneralTypeIssues=false
# pyright: reportMissingModuleSource=false
"""The train step on Keras' torch backend: a loop of backwards."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
import torch
from keras import ops

from . import arithmetic, batchnorm, forward, splitting, survey, tracking, window
from .first_check import First
from .options import Options
from .window import Plan

TAKES_STATE = False


@contextmanager
def untouched(model: Any) -> Iterator[None]:
    """Evaluate without gradients, and restore the state that Keras does not manage.

    Keras does not manage the generators of torch and the buffers of a module in a `TorchModuleWrapper`, such
    as the statistics of `torch.nn.BatchNorm1d`: a forward changes them in any scope of Keras.
    """
    buffers = [
        (buffer, buffer.detach().clone())
        for layer in model._flatten_layers()
        if isinstance(layer, torch.nn.Module)
        for buffer in layer.buffers()
    ]
    # Only the present device: to fork all of several is slow, and torch warns.
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    try:
        with torch.random.fork_rng(devices), torch.no_grad():
            yield
    finally:
        for buffer, value in buffers:
            with torch.no_grad():
                buffer.copy_(value)


def train_step(model: Any, options: Options, data: Any) -> Any:
    """One batch, one update."""
    batch = keras.utils.unpack_x_y_sample_weight(data)
    rows = splitting.leaves(batch)[0].shape[0]
    microbatches = [
        splitting.part(batch, part.start, part.stop) for part in cut(rows, options.microbatch_size)
    ]
    with torch.no_grad():
        plan = survey.plan(model, microbatches[0], options, symbolic=False)
    counted = _count(model, microbatches, plan, options) if plan.counting else None
    weights = model.trainable_weights
    device = splitting.leaves(batch)[0].device
    totals = window.totals_of(plan, torch.tensor(rows, device=device), counted)
    sums, sink = _loop(model, microbatches, totals, plan, options)
    regularization = _regularize(model, window.division(sums, rows, plan), sink, weights)
    if not plan.may_be_empty or bool(window.counts(sums, plan)):
        with torch.no_grad():
            model.optimizer.apply(sink.gradients(weights), weights)
    for weight in weights:
        weight.value.grad = None
    tracking.track_loss(model, sums, plan, torch.tensor(rows, device=device), regularization)
    return model.get_metrics_result()


def peek(model: Any, arguments: tuple[Any, ...]) -> First:
    """Return the batch that Keras' function is called with."""
    mapping = [(weight, weight.value) for weight in model.trainable_variables]
    return First(arguments[0][0], mapping, arguments)


def cut(rows: int, size: int) -> list[range]:
    """Return the rows of each micro-batch."""
    return [
        range(group.start + i * group.size, group.start + (i + 1) * group.size)
        for group in splitting.groups(rows, size)
        for i in range(group.count)
    ]


def train_function(step: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return Keras' function of one batch, such that nobody holds this batch while `fit` loads the next.

    Keras' loop keeps the list it hands over until it has the next one: two whole batches.
    """

    def without_holding_it(data: list[Any]) -> Any:
        logs = step([data.pop()])
        let_go(1)
        return logs

    return without_holding_it


def let_go(generation: int) -> None:
    """Collect young cycles: Keras' `tree` functions leave some that hold predictions and views of the batch.

    Python would collect them late: it counts objects, not the memory that they hold.
    """
    gc.collect(generation)


class Sink:
    """Sum of the gradients: in `grad`, or beside it if its dtype is too short or it may be dropped."""

    def __init__(self, weights: list[Any], *, apart: bool) -> None:
        self.apart = [apart or weight.value.dtype in (torch.bfloat16, torch.float16) for weight in weights]
        self.sums: list[Any] = [None] * len(weights)

    def take(self, weights: list[Any], *, keep: bool = True) -> None:
        """Add what the last backward left in `grad`, where it does not stay there."""
        for number, weight in enumerate(weights):
            if not self.apart[number]:
                continue
            gradient, weight.value.grad = weight.value.grad, None
            if gradient is None or not keep:
                continue
            total = self.sums[number]
            wide = gradient.to(getattr(torch, arithmetic.wide(gradient.dtype)))
            self.sums[number] = wide if total is None else total.add_(wide)

    def divide(self, weights: list[Any], divisor: Any) -> None:
        """Divide everything once."""
        for number, weight in enumerate(weights):
            total = self.sums[number] if self.apart[number] else weight.value.grad
            if total is not None:
                total.copy_(window.divided(total, divisor, total.dtype))

    def gradients(self, weights: list[Any]) -> list[Any]:
        """One gradient for each weight, in its dtype; None where there is none."""
        found = [
            self.sums[number] if self.apart[number] else weight.value.grad
            for number, weight in enumerate(weights)
        ]
        return [
            None if gradient is None else gradient.to(weight.value.dtype)
            for gradient, weight in zip(found, weights, strict=True)
        ]


def _loop(
    model: Any, microbatches: list[Any], totals: list[Any], plan: Plan, options: Options
) -> tuple[Any, Sink]:
    """Forward and backward of every micro-batch; the sums, and where the gradients are."""
    weights = model.trainable_weights
    for weight in weights:
        weight.value.grad = None
    sink = Sink(weights, apart=plan.skips)
    norms = batchnorm.Statistics(model)
    noted = norms.zeros()
    sums = None
    for microbatch in microbatches:
        y_pred = forward.predictions(model, microbatch[0])
        terms = forward.terms_of(model, microbatch, y_pred, options, plan)
        value = window.objective(terms, totals, plan)
        part = window.contribution(terms, splitting.leaves(microbatch)[0].shape[0], plan).detach()
        keep = not plan.may_be_empty or bool(window.counts(part, plan))
        if keep and value.requires_grad:
            model.optimizer.scale_loss(value).backward()
        if plan.skips and keep:
            gradients = [weight.value.grad for weight in weights if weight.value.grad is not None]
            keep = all(bool(torch.isfinite(tensor).all()) for tensor in [part, *gradients])
        sink.take(weights, keep=keep)
        part = part if keep else torch.zeros_like(part)
        sums = part if sums is None else sums + part
        with torch.no_grad():
            noted = norms.noted(noted, part[-1])
            if keep or not plan.skips:
                tracking.update_metrics(model, microbatch, y_pred)
        del y_pred, terms, value  # before the next forward: they hold this one's outputs
        let_go(0)
    with torch.no_grad():
        norms.assign(noted)
    return sums, sink


def _count(model: Any, microbatches: list[Any], plan: Plan, options: Options) -> Any:
    """A pass that only counts: it leaves no trace in the model."""
    sums = None
    for microbatch in microbatches:
        with torch.no_grad(), survey.scope(model):
            y_pred = forward.predictions(model, microbatch[0])
            terms = forward.terms_of(model, microbatch, y_pred, options, plan)
            part = window.contribution(terms, splitting.leaves(microbatch)[0].shape[0], plan)
        sums = part if sums is None else sums + part
    return sums


def _regularize(model: Any, divisor: Any, sink: Sink, weights: list[Any]) -> Any:
    """Divide, then add the gradient of the regularizers of weights, once."""
    if divisor is not None:
        sink.divide(weights, divisor)
    value = forward.weight_regularization(model)
    if value is None:
        return None
    model.optimizer.scale_loss(value).backward()
    sink.take(weights)
    return ops.stop_gradient(value)
