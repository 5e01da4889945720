# Keras is an extra. Where it is not installed, pyright cannot resolve it; where it is, what
# pyright infers of its untyped functions is wrong:
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportOptionalOperand=false
# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false, reportOptionalIterable=false
# pyright: reportArgumentType=false, reportCallIssue=false, reportFunctionMemberAccess=false
# pyright: reportIncompatibleMethodOverride=false, reportIndexIssue=false, reportOperatorIssue=false
# pyright: reportReturnType=false, reportOptionalCall=false, reportGeneralTypeIssues=false
# pyright: reportMissingModuleSource=false
"""Train step on Keras' torch backend: a Python loop of forwards and backwards."""

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

TAKES_STATE = False  # the variables keep their values during training
cut = splitting.blocks


@contextmanager
def untouched(model: Any) -> Iterator[None]:
    """Evaluate without gradients within the context, and restore the state that Keras does not manage.

    A StatelessScope does not restore torch's random generators, or the buffers of a module in a
    `TorchModuleWrapper`, such as the statistics of `torch.nn.BatchNorm1d`.
    """
    buffers = [
        (buffer, buffer.detach().clone())
        for layer in model._flatten_layers()
        if isinstance(layer, torch.nn.Module)
        for buffer in layer.buffers()
    ]
    # Only the current device: forking the generators of many devices is slow, and torch warns about it.
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    try:
        with torch.random.fork_rng(devices), torch.no_grad():
            yield
    finally:
        for buffer, value in buffers:
            with torch.no_grad():
                buffer.copy_(value)


def train_step(model: Any, options: Options, data: Any) -> Any:
    """Make the update of one batch, and return Keras' logs.

    Args:
        model: the accumulating model.
        options: the arguments of `accumulate`.
        data: the batch, as Keras passes it.
    """
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
    """Return the batch in the arguments of Keras' train function."""
    mapping = [(weight, weight.value) for weight in model.trainable_variables]
    return First(arguments[0][0], mapping, arguments)


def train_function(step: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return Keras' train function, changed to free the batch before `fit` loads the next one.

    Keras' loop passes the batch in a list, and keeps this list until it has loaded the next batch. So two
    whole batches would be in memory. The returned function therefore removes the batch from the list.
    """

    def step_and_free(data: list[Any]) -> Any:
        logs = step([data.pop()])
        free_cycles(1)
        return logs

    return step_and_free


def free_cycles(generation: int) -> None:
    """Collect reference cycles that hold predictions and views of the batch; Keras' `tree` leaves them.

    Python would collect them late: it counts objects, not the memory that they hold.
    """
    gc.collect(generation)


class Sink:
    """Sum of the gradients, in `grad` of each weight or in a separate tensor.

    The tensor is separate if the weight is bfloat16 or float16, or if a micro-batch may be left out after its
    backward (`apart`).
    """

    def __init__(self, weights: list[Any], *, apart: bool) -> None:
        self.apart = [apart or weight.value.dtype in (torch.bfloat16, torch.float16) for weight in weights]
        self.sums: list[Any] = [None] * len(weights)

    def take(self, weights: list[Any], *, keep: bool = True) -> None:
        """Move the gradients of the last backward from `grad` to the separate sums, or drop them."""
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
        """Divide the summed gradients in place."""
        for number, weight in enumerate(weights):
            total = self.sums[number] if self.apart[number] else weight.value.grad
            if total is not None:
                total.copy_(window.divided(total, divisor, total.dtype))

    def gradients(self, weights: list[Any]) -> list[Any]:
        """Return the gradient of each weight in its dtype; None for a weight without one."""
        sums = [
            self.sums[number] if self.apart[number] else weight.value.grad
            for number, weight in enumerate(weights)
        ]
        return [
            None if gradient is None else gradient.to(weight.value.dtype)
            for gradient, weight in zip(sums, weights, strict=True)
        ]


def _loop(
    model: Any, microbatches: list[Any], totals: list[Any], plan: Plan, options: Options
) -> tuple[Any, Sink]:
    """Run forward and backward of every micro-batch; return the vector of sums and the gradients."""
    weights = model.trainable_weights
    for weight in weights:
        weight.value.grad = None
    sink = Sink(weights, apart=plan.skips)
    norms = batchnorm.Statistics(model)
    statistics = norms.zeros()
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
            statistics = norms.added(statistics, part[-1])
            if keep or not plan.skips:
                tracking.update_metrics(model, microbatch, y_pred)
        del y_pred, terms, value  # before the next forward: they hold this one's outputs
        free_cycles(0)
    with torch.no_grad():
        norms.assign(statistics)
    return sums, sink


def _count(model: Any, microbatches: list[Any], plan: Plan, options: Options) -> Any:
    """Return the sums of a pass that only counts weights; it changes no state of the model."""
    sums = None
    for microbatch in microbatches:
        with torch.no_grad(), survey.scope(model):
            y_pred = forward.predictions(model, microbatch[0])
            terms = forward.terms_of(model, microbatch, y_pred, options, plan)
            part = window.contribution(terms, splitting.leaves(microbatch)[0].shape[0], plan)
        sums = part if sums is None else sums + part
    return sums


def _regularize(model: Any, divisor: Any, sink: Sink, weights: list[Any]) -> Any:
    """Divide the gradients, then add the gradient of the regularizers of weights once.

    Returns:
        The value of the regularizers; None without.
    """
    if divisor is not None:
        sink.divide(weights, divisor)
    value = forward.weight_regularization(model)
    if value is None:
        return None
    model.optimizer.scale_loss(value).backward()
    sink.take(weights)
    return ops.stop_gradient(value)
