"""Learning-rate range test with the updates that training makes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from superbatch.errors import InputError, NonFiniteError
from superbatch.results.survey import Survey, What
from superbatch.results.update import Update
from superbatch.schedule import Schedule
from superbatch.tuning.survey import Sweep

from ..accumulator import Accumulator
from ..whole_batch import WholeBatch
from ..window.validation import check_choice
from .batches import Batches, keep_position
from .dial import Dial, range_of
from .state import put_back


def lr_survey(
    accumulator: Accumulator | WholeBatch | tuple[Any, Any, Callable[[Any], Any]],
    batches: Any,
    *,
    what: What = "lr",
    low: float | None = None,
    high: float | None = None,
    updates: int = 100,
    accumulation_steps: int | Schedule | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Survey:
    """Survey learning rates: train while the rate grows from update to update, then restore everything.

    Point t makes one update of the accumulator with a whole batch and the rate
    ``low (high / low)^(t / (updates - 1))``, and records the weighted mean loss of the batch before the
    update. The survey ends early if a loss is not finite, or if the smoothed loss exceeds 4 times its
    minimum.

    Momentum and moments start at zero, even for an optimizer in the middle of training. During the survey the
    parameters need twice, and the optimizer's state up to twice, their memory.

    Afterwards everything is restored bit for bit, also after an exception or Ctrl-C: parameters, masters,
    buffers, attributes and modes of the models, `.grad`, optimizer, GradScaler, random state (torch, Python,
    NumPy), and the accumulator's counters and sizes. Its schedulers and noise meter are not used. The
    position of the data is restored as far as possible: counters and generators of a loader, its samplers and
    datasets, the epoch of its workers, a loader with `state_dict`.

    Args:
        accumulator: accumulator of the training, or (model, optimizer, loss_fn) to make one.
        batches: batches for the accumulator: a DataLoader or another iterable that can start again, or a
            function that returns an iterator. An iterator itself raises, because its position cannot be
            restored. A generator of a loader inside such a function is not restored.
        what: option that grows: ``"lr"``; ``"momentum"`` (SGD's, Adam's first beta), from `low` to `high`
            with 1 - m falling exponentially; ``"weight_decay"``.
        low: first value; 1e-6 for SGD's rate, 1e-7 for others', 0 for momentum, 1e-6 for weight decay.
        high: last value; 10 for SGD's rate, 1 for others', 0.999 for momentum, 1 for weight decay.
        updates: number of points.
        accumulation_steps: for a loader of micro-batches: group this many into a window, as `windows` does. A
            schedule counts the survey's updates from 0, and continues when the loader starts again.
        progress: function to call with (points done, number of points) after each point.

    Returns:
        The curve, and suggested values. Parameter groups keep their ratios: values are those of the group
        with the largest value; `Survey.of_groups` gives all.

    Raises:
        InputError: the range or the batches cannot be used.
        OptimizerError: the optimizer has no such option.
        WindowError: a window of the accumulator is open.
        LossSpecError, CoupledSamplesError: the check of the loss fails, as it would in training.

    Examples:
        >>> import torch
        >>> model = torch.nn.Linear(3, 1)
        >>> x = torch.randn(64, 3)
        >>> data = [(x, x.sum(1, keepdim=True))]
        >>> def loss_fn(microbatch):
        ...     return torch.nn.functional.mse_loss(model(microbatch[0]), microbatch[1])
        >>> sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> accumulate = Accumulator(model, sgd, loss_fn, microbatch_size=16)
        >>> found = lr_survey(accumulate, data)
        >>> found.stopped is not None, 1e-4 < found.suggestion < 1, accumulate.updates
        (True, True, 0)

    References:
        L. N. Smith, 2015, https://arxiv.org/abs/1506.01186
    """
    start = time.perf_counter()
    # Checked before an accumulator is made from a tuple.
    check_choice(what, "what", What)
    accumulator = _as_accumulator(accumulator)
    stream = Batches(batches, accumulation_steps)
    # A copy, so that counters and sizes of the training's accumulator do not change.
    engine = accumulator.engine.copy_for_survey()
    config = engine.config
    optimizers = config.rule.optimizers
    # Raises if a group has no such option, before anything is recorded.
    dial = Dial(optimizers, what)
    default = range_of(optimizers, what)
    sweep = Sweep(what, default[0] if low is None else low, default[1] if high is None else high, updates)
    skipped: list[int] = []
    # The state is recorded before the first update, and restored after Ctrl-C too.
    with put_back(
        config.models,
        optimizers,
        config.rule.scaler,
        owned=config.owned,
        devices=[] if config.device is None else [config.device],
    ) as undo:
        keep_position(batches, undo)
        undo.callback(stream.close)
        for point, value in enumerate(sweep.values):
            batch = stream.take()
            # Set before the update, whose recorded loss was computed before its step.
            dial.turn(value)
            go_on = _point(engine.update, batch, sweep, skipped, point)
            progress(point + 1, updates)
            # Ranks have equal losses up to rounding; the vote makes sure that none continues alone.
            if config.sync.vote(not go_on):
                sweep.stop("another rank stopped")
                break
    return sweep.report(
        ratios=dial.ratios, skipped=skipped, epochs=stream.epochs, seconds=time.perf_counter() - start
    )


def _point(
    accumulate: Callable[[Any], Update], batch: Any, sweep: Sweep, skipped: list[int], point: int
) -> bool:
    """Make one update and record its loss; return whether to continue."""
    try:
        update = accumulate(batch)
    except NonFiniteError as error:
        sweep.stop(f"not finite: {error}")
        return False
    if update.dropped:
        sweep.stop("a micro-batch was left out: its loss or gradient is not finite")
        return False
    # A batch with weight 0 has no loss, so the curve would have a gap.
    if not update.weight and update.skipped is not None:
        raise InputError(
            "A batch of the survey has weight 0, so it has no loss. Pass batches with labels or samples that "
            "are not ignored."
        )
    # E.g. an overflow of the scaler: the point stays, and is listed as skipped.
    if not update.made:
        if update.skipped is not None and update.skipped.startswith("not finite"):
            sweep.stop(update.skipped)
            return False
        skipped.append(point)
    return sweep.add(update.loss)


def _as_accumulator(given: Any) -> Accumulator | WholeBatch:
    if isinstance(given, Accumulator | WholeBatch):
        return given
    if isinstance(given, Sequence) and len(given) == 3:
        return Accumulator(*given)
    raise InputError(
        f"lr_survey() cannot use a {type(given).__name__}. Pass an Accumulator, or "
        "(model, optimizer, loss_fn)."
    )
