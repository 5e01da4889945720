"""Is the loss what was stated? The first window answers, before anything is updated.

A statement (`reduction`, `weight`) fixes how the losses of two parts make the loss of their union ``u``::

    mean:  l(u) = (w(a) l(a) + w(b) l(b)) / (w(a) + w(b))          sum:  l(u) = l(a) + l(b)

Both sides are computed for some micro-batches, each cut at a third, with the random stream of each sample the
same on both sides. Where they differ, so would the gradients: the error names the statement that does hold.
"""

from __future__ import annotations

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
from .candidates import weight_candidates
from .checks import check_loss
from .gradients import LOW_PRECISION
from .looking import FloatingDtypes, run_eagerly
from .problem import Problem, evaluate
from .resample import select
from .sample_rng import sample_stream
from .snapshot import BufferKeeper, RandomKeeper, as_plain, random_state
from .sync import Ranks

MOST_PIECES = 4  # enough to meet unequal token counts, cheap beside one window


@dataclass(frozen=True)
class Observed:
    """Losses and weights of a piece (``union``) and of its two parts."""

    union: tuple[float, normalize.Number]
    parts: tuple[tuple[float, normalize.Number], ...]

    def predicted(
        self, reduction: normalize.Reduction, weights: Sequence[normalize.Number] | None = None
    ) -> float:
        """The loss of the union that a statement predicts from the parts."""
        losses = [loss for loss, _ in self.parts]
        weights = [weight for _, weight in self.parts] if weights is None else weights
        if reduction == "sum":
            return normalize.loss_sum(losses, weights, reduction="sum")
        return normalize.mean_loss(losses, weights, reduction="mean")

    def agrees(self, predicted: float, tolerance: float) -> bool:
        """Whether a prediction is the union's loss, relative to the largest loss involved."""
        size = max(abs(self.union[0]), *(abs(loss) for loss, weight in self.parts if weight))
        return abs(self.union[0] - predicted) <= tolerance * size


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
                _check(problem, piece)
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


def check_on_all_ranks(
    problem: Problem, pieces: Sequence[Any], ranks: Ranks, *, frozen: Sequence[nn.Module] = ()
) -> None:
    """Run `check_statement` on every rank; one that fails stops all.

    Raises:
        StatementError, CoupledSamplesError: as there, or because another rank's check failed.
    """
    wrong = True
    try:
        with ranks.hold_back():
            check_statement(problem, pieces, frozen=frozen)
        wrong = False
    finally:  # on the way out with an error too: the other ranks wait to hear whether to go on
        wrong_ranks = ranks.sum([wrong])[0]
    if wrong_ranks:
        raise StatementError(
            explain(
                "a loss that contradicts its statement on another rank",
                "no rank can go on without it",
                "look at that rank's error",
            )
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


def _check(problem: Problem, piece: Any) -> None:
    """Compare one piece with its parts, unless that shows nothing: without weight, or not repeatable."""
    planned = plan(piece, whole=problem.whole, per_sample=problem.per_sample)
    cut = -(-planned.samples // 3)
    spans = [(0, planned.samples), (0, cut), (cut, planned.samples)]
    microbatches = [planned.take(*span) for span in spans]
    others = random_state()
    dtypes, calls = FloatingDtypes(), {}
    try:
        with dtypes:
            losses = [_loss(problem, mb, span, calls) for mb, span in zip(microbatches, spans, strict=True)]
    except InputError:  # a random operation that has no stream per sample: compare without randomness
        with dtypes, _evaluating(list(problem.model.modules())):
            losses = [_loss(problem, mb, None, calls) for mb in microbatches]
    observed = Observed(losses[0], (losses[1], losses[2]))
    if not observed.union[1]:
        return
    _check_weights(observed)
    tolerance = _tolerance(dtypes.seen)
    if observed.agrees(observed.predicted(problem.reduction), tolerance) or _drew(others):
        return
    noise = _order_noise(problem, piece, observed.union[0]) if not calls else 0.0
    if abs(observed.union[0] - observed.predicted(problem.reduction)) <= 30 * noise:
        return  # the loss is a small difference of large numbers: rounding hides what the parts would show
    if _repeats(problem, microbatches[0], spans[0], observed.union[0]):
        raise _mismatch(problem, observed, microbatches, tolerance)


def _loss(
    problem: Problem, microbatch: Any, span: tuple[int, int] | None, calls: dict[int, Any]
) -> tuple[float, normalize.Number]:
    with ExitStack() as stack:
        if span is not None:
            stack.enter_context(sample_stream(0, span[0], span[1] - span[0], calls=calls))
        # With a graph, since a loss may itself need gradients (a gradient penalty); on a copy, since a loss
        # may
        # change its micro-batch in place, which is a view of the user's batch.
        loss, weight = evaluate(problem, map_arrays(_copy, microbatch))
    check_loss(loss)
    return float(loss.detach()), weight


def _check_weights(observed: Observed) -> None:
    union, parts = observed.union[1], [weight for _, weight in observed.parts]
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


def _order_noise(problem: Problem, piece: Any, loss: float) -> float:
    """How much the order of the samples changes a loss: the rounding that is in it."""
    planned = plan(piece, whole=problem.whole, per_sample=problem.per_sample)
    order = list(range(planned.samples))[::-1]
    try:
        reversed_piece = select(piece, order, whole=problem.whole, per_sample=problem.per_sample)
        return abs(_loss(problem, reversed_piece, (0, planned.samples), {})[0] - loss)
    except (InputError, SplitError):  # samples that cannot be put into another order
        return 0.0


def _repeats(problem: Problem, microbatch: Any, span: tuple[int, int], first: float) -> bool:
    """Whether the same micro-batch gives the same loss again: a loss that does not cannot be judged."""
    try:
        again, _ = _loss(problem, microbatch, span, {})
    except InputError:
        with _evaluating(list(problem.model.modules())):
            again, _ = _loss(problem, microbatch, None, {})
    return abs(again - first) <= 1e-6 * max(abs(again), abs(first))


def _mismatch(
    problem: Problem, observed: Observed, microbatches: Sequence[Any], tolerance: float
) -> StatementError | CoupledSamplesError:
    union, (first, second) = observed.union, observed.parts
    given = (
        f'reduction="{problem.reduction}" and a micro-batch with loss {union[0]:.6g} whose parts have '
        f"{first[0]:.6g} (weight {first[1]:g}) and {second[0]:.6g} (weight {second[1]:g})"
    )
    if problem.reduction == "mean" and observed.agrees(first[0] + second[0], tolerance):
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
    if problem.reduction == "sum" and observed.agrees(observed.predicted("mean"), tolerance):
        return StatementError(
            explain(
                given,
                "the loss of the whole is the weighted mean of its parts, so loss_fn returns a mean",
                'state reduction="mean"',
            )
        )
    found = _explaining_weight(problem, observed, microbatches, tolerance)
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
            "no weighted mean or sum of the parts gives the loss of the whole: samples influence each "
            "other (a contrastive loss, normalisation over the batch), the loss depends on the batch "
            "size, or it is a mean over a count that the stated weight does not have",
            "run superbatch.torch.verify, which names the module; then state the right weight, or keep "
            "the batch whole",
        )
    )


def _explaining_weight(
    problem: Problem, observed: Observed, microbatches: Sequence[Any], tolerance: float
) -> str | None:
    """The weight, counted from a leaf of the batch, under which the parts do give the loss of the whole."""
    union, *parts = microbatches
    for candidate in weight_candidates(problem, union):
        weights = [candidate.weigh(part) for part in parts]
        if sum(weights) and observed.agrees(observed.predicted("mean", weights), tolerance):
            return f"weight={candidate.text}"
    return None


def _tolerance(dtypes: Collection[torch.dtype]) -> float:
    """Rounding to be expected between a loss and its parts, with room for kernels that differ by size."""
    if any(dtype in LOW_PRECISION for dtype in dtypes):
        return 2e-2
    return 1e-3 if torch.float32 in dtypes else 1e-7


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
