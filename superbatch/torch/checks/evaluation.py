"""Evaluate a micro-batch and its parts, each from the same state and with the same random numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from superbatch.batch.plan import Plan
from superbatch.batch.tree import count_samples, map_arrays
from superbatch.normalize import takes_part

from ..devices import has_float64
from ..loss.losses import check_loss
from ..memory.limits import memory_limit
from ..memory.out_of_memory import out_of_memory
from ..rng.sample_rng import sample_stream
from ..window.participants.forward_state_keeper import ForwardStateKeeper
from .agreement import Cut, Evaluated
from .cuts import Order
from .generators import Generators
from .precision import ComputeIn
from .probing.problem import Problem, evaluate, weigh
from .probing.untouched import held_parameter, untouched
from .sketch import sketch
from .wide_parameters import WideParameters

# Factors of the loss that change the rounding of the backward: none is near a power of two.
_SCALES = (0.7310585, 1.3247180, 0.5671433)
_KEY = 0
# Seeds with which `draws_by_sample` repeats a micro-batch; equal numbers of draws by chance are unlikely.
_SEEDS = range(1, 9)
_SMALL = 64 << 20  # bytes: a smaller model is copied without reading the free memory


class Evaluation:
    """Evaluation of micro-batches, each from the same state.

    Args:
        problem: the model, its loss, and its declaration.
        keeper: keeper of the state that a forward changes; restores it before each forward.

    Attributes:
        trained: the micro-batches that training evaluates; None: all that are checked.
        unruled: random operations without a rule to draw them per sample.
        failure: error of the last part that could not be evaluated.
        hidden: name of the parameter with the largest share of gradient that rounding may hide, and the
            share.
    """

    def __init__(self, problem: Problem, keeper: ForwardStateKeeper) -> None:
        self.problem = problem
        self.trained: Sequence[Any] | None = None
        self.unruled: set[str] = set()
        self.failure = ""
        self.hidden: tuple[str, float] = ("", 0.0)
        self._keeper = keeper
        self._by_backward = False
        self._wide: WideParameters | None = None
        self._copied = False
        self._bypassed = False
        self._generators = Generators(problem.loss_fn, problem.model, problem.weight)
        self._start = self._generators.states()

    def begin(self) -> None:
        """Restore the state and the generators to the beginning of the check."""
        self._keeper.restore()
        self._generators.set(self._start)

    def plain(self, microbatch: Any) -> Tensor:
        """Return the loss of a micro-batch, evaluated as in training; errors of user code are raised."""
        self.begin()
        loss = evaluate(self.problem, map_arrays(_copy, microbatch))[0]
        check_loss(loss)
        return loss

    def run(
        self, microbatch: Any, positions: Sequence[int], calls: dict[int, Any], *, scale: float = 1.0
    ) -> Evaluated:
        """Evaluate a micro-batch once; Python's and NumPy's generators continue from their present state.

        Args:
            microbatch: micro-batch, on any device.
            positions: position of each sample in the micro-batch, which selects its random stream.
            calls: counters of random calls, shared by all parts of one micro-batch.
            scale: factor of the loss in the backward; the gradient is divided by it again.
        """
        states = self._generators.states()
        self._keeper.restore()  # the last forward may have changed the state
        self._generators.set(states)  # after `restore`, which also resets some generators
        with sample_stream(_KEY, indices=positions, calls=calls, unruled=self.unruled):
            # On a copy: a loss may write into its micro-batch, which is a view of the user's batch.
            loss, weight = evaluate(self.problem, map_arrays(_copy, microbatch))
            check_loss(loss)
            value = float(loss.detach())
            # The gradient is not compared if the weight is 0 or the loss is NaN.
            counts = takes_part(weight, reduction=self.problem.reduction) and math.isfinite(value)
            by_backward = self._by_backward
            gradient = self._gradient(loss, scale) if counts else None
        if self._by_backward != by_backward:  # evaluate again, because the failed attempt has freed the graph
            self._generators.set(states)
            return self.run(microbatch, positions, calls, scale=scale)
        return Evaluated(value, weight, gradient)

    def cut(
        self, planned: Plan, union: Evaluated, spans: Sequence[Order], calls: dict[int, Any]
    ) -> Cut | None:
        """Evaluate the parts of a micro-batch; call it right after `union` has evaluated the micro-batch.

        `spans` are the positions of each part's samples; `calls` are as in `run`. Return None if a part
        cannot be evaluated by itself.
        """
        parts: list[Evaluated] = []
        ended: list[bool] = []
        self._generators.set(self._start)
        for span in spans:
            part = self._part(self.take(planned, span), span, calls)
            if part is None:
                return None
            parts.append(part)
            ended.append(self._generators.states() == self._end)
            # A generator that ends where the union's ended serves code that draws once per call: reset it.
            self._generators.rewind(self._start, self._end)
        # Numbers drawn sample after sample equal those of the union only in the order of the union.
        cut = Cut(union, tuple(parts), tuple(spans))
        replayed = ended[-1] if cut.in_order else all(ended)
        return replace(cut, replayed=replayed, by_sample=not all(ended))

    def _part(self, microbatch: Any, span: Order, calls: dict[int, Any]) -> Evaluated | None:
        try:
            return self.run(microbatch, span, calls)
        except Exception as error:  # user code may raise anything on a part, which training never evaluates
            if out_of_memory(error):
                raise
            self.failure = f"{type(error).__name__}: {error}"
        # A part of weight 0 may raise, e.g. in a mean over no labels: it does not contribute.
        declared = self.problem.weight != "returned"
        if declared and not takes_part(weigh(self.problem, microbatch), reduction=self.problem.reduction):
            return Evaluated(math.nan, 0)
        return None

    def union(self, planned: Plan, calls: dict[int, Any], *, scale: float = 1.0) -> Evaluated:
        """Evaluate an uncut micro-batch, with all generators at their start."""
        self.begin()
        positions = range(planned.samples)
        seen = self.run(planned.take(0, planned.samples), positions, calls, scale=scale)
        self._end = self._generators.states()
        return seen

    def draws_by_sample(self, planned: Plan, orders: Sequence[Sequence[Order]]) -> bool:
        """Return whether parts draw as many random numbers as the union, for every seed tried.

        One seed is not enough: a permutation draws until a number is in range, so counts may agree by chance.
        """
        start = self._start
        try:
            for seed in _SEEDS:
                self._generators.seed(seed)
                self._start = self._generators.states()
                calls: dict[int, Any] = {}
                union = self.union(planned, calls)
                cuts = [self.cut(planned, union, order, calls) for order in orders]
                if not all(cut is not None and cut.replayed for cut in cuts):
                    return False
            return True
        finally:
            self._start = start
            self._generators.set(start)

    def loss_again(self, microbatch: Any) -> float | None:
        """Return the loss from the state that the last forward left; None if loss_fn raises."""
        samples = count_samples(microbatch, **self.problem.paths)
        self._generators.set(self._start)
        try:
            with sample_stream(_KEY, 0, samples, calls={}, unruled=self.unruled):
                return float(evaluate(self.problem, map_arrays(_copy, microbatch))[0].detach())
        except Exception as error:  # with changed state user code may raise anything
            if out_of_memory(error):
                raise
            return None

    def rounding(self, planned: Plan, union: Evaluated, *, times: int, exact: bool) -> Tensor | None:
        """Measure the rounding of each parameter's gradient: evaluate again with scaled losses.

        Return the largest change of each gradient in `times` evaluations, shape (parameters,); None if the
        loss does not repeat to 1e-6 if `exact`, else (in low precision) to 1e-2.
        """
        largest = None if union.gradient is None else torch.zeros(len(union.gradient), dtype=torch.float64)
        for scale in _SCALES[:times]:
            again = self.union(planned, {}, scale=scale)
            # 1e-2: kernels in low precision may add in another order each time.
            if not math.isclose(again.loss, union.loss, rel_tol=1e-6 if exact else 1e-2):
                return None
            if largest is not None and union.gradient is not None and again.gradient is not None:
                largest = torch.maximum(largest, (again.gradient - union.gradient).norm(dim=1))
        return torch.zeros(0) if largest is None else largest

    def take(self, planned: Plan, span: Order) -> Any:
        """Return a micro-batch of the samples at given positions."""
        # Adjacent samples are a view of the micro-batch; others are copied.
        if span == tuple(range(span[0], span[-1] + 1)):
            return planned.take(span[0], span[-1] + 1)
        return planned.take(0, len(span), order=span)

    @contextmanager
    def in_float64(self) -> Iterator[None]:
        """Compute in float64 inside the context: convert parameters at each use, or copy the model."""
        own = self.problem
        with ExitStack() as stack:
            # The keeper restores the model's own tensors, so the working copy needs another keeper.
            if self._copied:
                self._keeper.restore()
                stack.enter_context(untouched(own.model, dtype=torch.float64))
                stack.callback(setattr, self, "_keeper", self._keeper)
                self._keeper = ForwardStateKeeper([own.model], [own.loss_fn])
                self._keeper.begin(check=True)
                stack.callback(self._keeper.end_check)
                stack.enter_context(self._keeper.watching())
            stack.enter_context(ComputeIn(torch.float64))
            if not self._copied and all(map(_is_plain, own.model.parameters())):
                stack.callback(setattr, self, "_wide", None)
                self._wide = WideParameters(_differentiated(own.model))
                stack.enter_context(self._wide.entered())
            self.problem = own.in_dtype(torch.float64)
            stack.callback(setattr, self, "problem", own)
            yield

    def copy_for_float64(self) -> bool:
        """Make `in_float64` copy the model from now on; return False if it does already or cannot."""
        model = self.problem.model
        if self._copied or held_parameter(model) is not None or not _fits_in_float64(model):
            return False
        self._copied, self._bypassed = True, False
        return True

    @property
    def rounded(self) -> bool:
        """True if float64 gradients were rounded to the dtype of their parameters."""
        return self._bypassed

    def _gradient(self, loss: Tensor, scale: float) -> Tensor | None:
        parameters = _differentiated(self.problem.model)
        if self.problem.announce is not None or any(p._backward_hooks for p in parameters):
            return None  # sharded parameters have no full gradient; a gradient hook may be an optimizer step
        seed = torch.full_like(loss, scale)
        if self._by_backward:
            sums = _by_backward(loss, parameters, seed, self._wide)
        else:
            try:
                if self._wide is not None and loss.requires_grad:
                    sums = self._wide.gradient(loss, seed)
                else:
                    sums = sketch(torch.autograd.grad(loss, parameters, seed, allow_unused=True))
            except RuntimeError as error:  # reentrant checkpoints support backward() but not grad()
                if out_of_memory(error):
                    raise
                self._by_backward = True
                return None
        self._bypassed |= self._wide is not None and self._wide.bypassed
        # Dividing cancels the scale; only the rounding differs.
        return None if sums is None else sums / scale


def _differentiated(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _is_plain(parameter: Tensor) -> bool:
    """Return whether a parameter is an ordinary tensor, not a subclass such as DTensor."""
    return type(parameter) in (nn.Parameter, Tensor) and has_float64(parameter.device)


def _fits_in_float64(model: nn.Module) -> bool:
    """Return whether a float64 copy of a model and its gradients fit in memory."""
    parameters = list(model.parameters())
    if not all(has_float64(parameter.device) for parameter in parameters):
        return False
    # Only the host's memory is read: an accelerator raises if memory runs out.
    size = sum(2 * 8 * parameter.numel() for parameter in parameters)
    if size <= _SMALL or any(parameter.device.type != "cpu" for parameter in parameters):
        return True
    # At most a quarter of the memory, to leave room for activations.
    return 4 * size <= memory_limit(torch.device("cpu")).bytes


def _by_backward(
    loss: Tensor, parameters: Sequence[Tensor], seed: Tensor, wide: WideParameters | None
) -> Tensor | None:
    """Return sums of the gradients that backward() adds to ``.grad``, and restore it; None with a hook."""
    if any(getattr(parameter, "_post_accumulate_grad_hooks", None) for parameter in parameters):
        return None
    before = [parameter.grad for parameter in parameters]
    try:
        for parameter in parameters:
            parameter.grad = None
        if wide is not None and loss.requires_grad:
            return wide.gradient(loss, seed, backward=True)
        loss.backward(seed)
        return sketch([parameter.grad for parameter in parameters])
    except RuntimeError as error:
        if out_of_memory(error):
            raise
        return None
    finally:
        for parameter, gradient in zip(parameters, before, strict=True):
            parameter.grad = gradient


def _copy(array: Any) -> Any:
    return array.clone() if isinstance(array, Tensor) else copy(array)
