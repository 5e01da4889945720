"""Is the loss what was stated? The first window answers, before anything is updated.

A statement (`reduction`, `weight`) fixes how the losses of two parts make the loss of their union ``u``::

    mean:  l(u) = (w(a) l(a) + w(b) l(b)) / (w(a) + w(b))          sum:  l(u) = l(a) + l(b)

Both sides are computed for some micro-batches, each cut at a third, with the random stream of each sample the
same on both sides. Where they differ, so would the gradients: the error names the statement that does hold.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .. import normalize
from ..errors import CoupledSamplesError, InputError, SplitError, StatementError, explain
from ..tree import count_samples, map_arrays, plan
from .checks import check_loss
from .gradients import LOW_PRECISION
from .looking import FloatingDtypes, run_eagerly
from .out_of_memory import out_of_memory
from .probing.problem import Problem, evaluate
from .sample_rng import sample_stream
from .sizes.candidates import weight_candidates
from .snapshot import BufferKeeper, RandomKeeper, as_plain, random_state

MOST_PIECES = 4  # enough to meet unequal token counts, cheap beside one window


@dataclass(frozen=True)
class Seen:
    """What a micro-batch showed: its loss, its weight, and sums over its gradient (None: not to be had)."""

    loss: float
    weight: normalize.Number
    gradient: Tensor | None = None


@dataclass(frozen=True)
class Observed:
    """A piece (`union`) and its two parts, in a precision."""

    union: Seen
    parts: tuple[Seen, Seen]
    rounding: Rounding

    def agrees(
        self, reduction: normalize.Reduction, weights: Sequence[normalize.Number] | None = None
    ) -> bool:
        """Whether a statement predicts the union from the parts; the gradients decide where they are known.

        A wrong weight hardly shows in the losses of an untrained model, which are all alike; and a loss that
        is
        a small difference of large numbers differs by rounding alone. So losses count for less.
        """
        weights = [part.weight for part in self.parts] if weights is None else weights
        loss = self._loss_error(reduction, weights)
        gradient = self._gradient_error(reduction, weights)
        if gradient is None:
            return loss <= self.rounding.loss
        return gradient <= (self.rounding.gradient if loss <= self.rounding.loss else self.rounding.loss)

    def _loss_error(self, reduction: normalize.Reduction, weights: Sequence[normalize.Number]) -> float:
        losses = [part.loss for part in self.parts]
        combine = normalize.loss_sum if reduction == "sum" else normalize.mean_loss
        size = max(abs(self.union.loss), *(abs(loss) for loss, w in zip(losses, weights, strict=True) if w))
        error = abs(self.union.loss - combine(losses, weights, reduction=reduction))
        return error / size if size else error

    def _gradient_error(
        self, reduction: normalize.Reduction, weights: Sequence[normalize.Number]
    ) -> float | None:
        gradients = [self.union.gradient, *(part.gradient for part in self.parts)]
        if any(gradient is None for gradient in gradients):
            return None
        union, *parts = [gradient for gradient in gradients if gradient is not None]
        total = normalize.total_weight(weights)
        # Where losses of parts are added, their gradients are; where losses are averaged, so are they.
        factors = [
            1.0 if reduction == "sum" and weight else normalize.scale(weight, total, reduction="mean")
            for weight in weights
        ]
        predicted = sum(
            (factor * part for factor, part in zip(factors, parts, strict=True) if factor),
            torch.zeros_like(union),
        )
        size = max(float(gradient.norm()) for gradient in (union, predicted))
        # What is not finite says nothing here; the policy for it comes later.
        return float((union - predicted).norm()) / size if size and math.isfinite(size) else None


@dataclass(frozen=True)
class Rounding:
    """Relative errors to be expected of a loss and of a gradient, with room for other kernels."""

    loss: float
    gradient: float


def check_statement(problem: Problem, pieces: Sequence[Any], *, frozen: Sequence[nn.Module] = ()) -> None:
    """Compare losses of pieces with losses of their parts; everything is left as it was.

    Args:
        problem: the model, its loss, and what was stated about it.
        pieces: micro-batches of at least two samples each; others are passed over.
        frozen: modules to run in evaluation mode: BatchNorms that are dealt with in another way.

    Raises:
        StatementError: the loss contradicts the statement; the text names the likely cause.
        CoupledSamplesError: no statement about weights explains the losses.
    """
    keeper = BufferKeeper([problem.model])
    keeper.take()
    random = RandomKeeper([] if problem.device is None else [problem.device])
    random.take()
    try:
        with _evaluating(frozen), run_eagerly():
            chosen = _choose(pieces, problem)
            for piece in chosen:
                _check(problem, piece, keeper)
            _say_what_moves(problem.model, keeper)
    finally:
        keeper.restore()
        random.restore()
    if not chosen:
        warnings.warn(
            "superbatch could not check the statement about the loss on the first window: no micro-batch "
            "of it can be cut in two. superbatch.torch.verify checks it on a batch of your choice; "
            "check=False silences this.",
            UserWarning,
            stacklevel=6,
        )


def _say_what_moves(model: nn.Module, keeper: BufferKeeper) -> None:
    """Warn of a state that a forward changes: it would move once per micro-batch, not once per update."""
    paths = {module: path for path, module in model.named_modules()}
    moved = [f"{paths[module]}.{name}".lstrip(".") for module, name in keeper.moved() if module in paths]
    if moved:
        others = f" and {len(moved) - 1} more" if moved[1:] else ""
        warnings.warn(
            f"the forward changes the state {moved[0]!r}{others}: with micro-batches it moves once for "
            f"each of "
            "them, where the real batch moves it once, so the update is not exactly that of the real batch. "
            "Freeze it (eval()), or accept it and pass check=False.",
            UserWarning,
            stacklevel=7,
        )


def _choose(pieces: Sequence[Any], problem: Problem) -> list[Any]:
    """Up to MOST_PIECES pieces of two samples or more, spread over the window."""
    able: list[Any] = []
    for piece in pieces:
        try:
            if count_samples(piece, whole=problem.whole, per_sample=problem.per_sample) >= 2:
                able.append(piece)
        except SplitError:  # noqa: PERF203  (some micro-batches may be cut, others not)
            continue
    stride = max(1, len(able) // MOST_PIECES)
    return able[::stride][:MOST_PIECES]


def _check(problem: Problem, piece: Any, keeper: BufferKeeper) -> None:
    """Compare one piece with its parts, unless that shows nothing: without weight, or not repeatable."""
    planned = plan(piece, whole=problem.whole, per_sample=problem.per_sample)
    cut = -(-planned.samples // 3)
    spans = [(0, planned.samples), (0, cut), (cut, planned.samples)]
    microbatches = [planned.take(*span) for span in spans]
    others = random_state()
    dtypes, calls = FloatingDtypes(), {}
    try:
        with dtypes:
            seen = [
                _look(problem, mb, span, calls, keeper) for mb, span in zip(microbatches, spans, strict=True)
            ]
    except InputError:  # a random operation that has no stream per sample: compare without randomness
        with dtypes, _evaluating(list(problem.model.modules())):
            seen = [_look(problem, mb, None, calls, keeper) for mb in microbatches]
    observed = Observed(seen[0], (seen[1], seen[2]), _rounding(dtypes.seen))
    if not observed.union.weight:
        return
    _check_weights(observed)
    if observed.agrees(problem.reduction) or _drew(others):
        return
    if _repeats(problem, microbatches[0], spans[0], observed.union.loss, keeper):
        raise _mismatch(problem, observed, microbatches)


def _look(
    problem: Problem,
    microbatch: Any,
    span: tuple[int, int] | None,
    calls: dict[int, Any],
    keeper: BufferKeeper,
) -> Seen:
    keeper.restore()  # a state that the last forward has moved is not what is compared here
    with ExitStack() as stack:
        if span is not None:
            stack.enter_context(sample_stream(0, span[0], span[1] - span[0], calls=calls))
        # On a copy, since a loss may change its micro-batch in place, which is a view of the user's batch.
        loss, weight = evaluate(problem, map_arrays(_copy, microbatch))
        check_loss(loss)
        return Seen(float(loss.detach()), weight, _gradient_sums(problem, loss) if weight else None)


def _gradient_sums(problem: Problem, loss: Tensor) -> Tensor | None:
    """Some sums over the gradient of each parameter: linear, like the gradient, and small."""
    parameters = [p for p in problem.model.parameters() if p.requires_grad]
    if any(parameter._backward_hooks for parameter in parameters):
        return None  # a hook may be an optimizer that steps
    try:
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    except RuntimeError as error:  # a reentrant checkpoint allows backward() only
        if out_of_memory(error):
            raise
        return None
    return torch.cat([_sums(gradient) for gradient in gradients]) if gradients else None


# A prime: a sum over every seventh element does not cancel where a sum over rows or classes is zero.
_STRIDE = 7


def _sums(gradient: Tensor | None) -> Tensor:
    sums = torch.zeros(_STRIDE, dtype=torch.float64)
    if gradient is None or gradient.is_sparse:
        return sums
    flat = torch.view_as_real(gradient).flatten() if gradient.is_complex() else gradient.flatten()
    whole = flat.numel() // _STRIDE * _STRIDE
    sums += (
        flat[:whole]
        .view(-1, _STRIDE)
        .sum(0, dtype=torch.float32 if flat.device.type == "mps" else torch.float64)
        .cpu()
    )
    sums[: flat.numel() - whole] += flat[whole:].double().cpu()
    return sums


def _check_weights(observed: Observed) -> None:
    union, parts = observed.union.weight, [part.weight for part in observed.parts]
    total = normalize.total_weight(parts)
    if abs(union - total) > 1e-6 * union:
        raise StatementError(
            explain(
                f"a micro-batch of weight {union:g} whose two parts weigh {parts[0]:g} and {parts[1]:g}",
                "weights must add up: the weight of a batch is the sum over its micro-batches",
                "let the weight be a count (samples, tokens) or a sum of sample weights, not a mean",
            )
        )


def _copy(array: Any) -> Any:
    return array.clone() if isinstance(array, Tensor) else copy(array)


def _drew(before: dict[str, Any]) -> bool:
    """Whether the loss drew from Python's or NumPy's generator, which have no streams per sample."""
    now = as_plain(random_state())
    before = as_plain(before)
    return any(now.get(name) != before.get(name) for name in ("python", "numpy"))


def _repeats(
    problem: Problem, microbatch: Any, span: tuple[int, int], first: float, keeper: BufferKeeper
) -> bool:
    """Whether the same micro-batch gives the same loss again: a loss that does not cannot be judged."""
    try:
        again = _look(problem, microbatch, span, {}, keeper).loss
    except InputError:
        with _evaluating(list(problem.model.modules())):
            again = _look(problem, microbatch, None, {}, keeper).loss
    return abs(again - first) <= 1e-6 * max(abs(again), abs(first))


def _mismatch(
    problem: Problem, observed: Observed, microbatches: Sequence[Any]
) -> StatementError | CoupledSamplesError:
    union, (first, second) = observed.union, observed.parts
    given = (
        f'reduction="{problem.reduction}" and a micro-batch with loss {union.loss:.6g} whose parts have '
        f"{first.loss:.6g} (weight {first.weight:g}) and {second.loss:.6g} (weight {second.weight:g})"
    )
    if problem.reduction == "mean" and observed.agrees("sum"):
        return StatementError(
            explain(
                given,
                "the losses add up, so loss_fn returns a sum, or it divides by a number that does not "
                "depend on the micro-batch (Hugging Face models do when they are given "
                "num_items_in_batch)",
                'state reduction="sum" if it is a plain sum; else do not pass num_items_in_batch, so '
                "that the loss is "
                'the mean over the micro-batch\'s tokens, and state weight=count_tokens("labels", '
                "shift=True)",
            )
        )
    if problem.reduction == "sum" and observed.agrees("mean"):
        return StatementError(
            explain(
                given,
                "the loss of the whole is the weighted mean of its parts, so loss_fn returns a mean",
                'state reduction="mean"',
            )
        )
    found = _explaining_weight(problem, observed, microbatches)
    if found:
        return StatementError(
            explain(
                given,
                "loss_fn returns a mean over something else than the stated weight counts; a mean of "
                "such means over micro-batches is not the mean over the batch",
                f"state {found}",
            )
        )
    return CoupledSamplesError(
        explain(
            given,
            "no weighted mean or sum of the parts gives loss and gradient of the whole: samples "
            "influence each "
            "other (a contrastive loss, normalisation over the batch), the loss depends on the batch "
            "size, or it is a mean over a count that the stated weight does not have",
            "run superbatch.torch.verify, which names the module; then state the right weight, or use "
            'coupled="exact" (the loss of the whole batch, in the memory of micro-batches), or '
            "cached_gradients for a loss over embeddings",
        )
    )


def _explaining_weight(problem: Problem, observed: Observed, microbatches: Sequence[Any]) -> str | None:
    """The weight, counted from a leaf of the batch, under which the parts do give the loss of the whole."""
    union, *parts = microbatches
    for candidate in weight_candidates(problem, union):
        weights = [candidate.weigh(part) for part in parts]
        if sum(weights) and observed.agrees("mean", weights):
            return f"weight={candidate.text}"
    return None


def _rounding(dtypes: Collection[torch.dtype]) -> Rounding:
    if any(dtype in LOW_PRECISION for dtype in dtypes):
        return Rounding(loss=2e-2, gradient=1e-1)
    # In float32 a ReLU near zero may flip between two sizes of a kernel.
    return (
        Rounding(loss=1e-3, gradient=2e-2) if torch.float32 in dtypes else Rounding(loss=1e-7, gradient=1e-6)
    )


@contextmanager
def _evaluating(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Modules in evaluation mode, each put back to its own mode."""
    modes = [(module, module.training) for module in modules]
    for module in modules:
        module.training = False
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
