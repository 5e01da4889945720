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
from .option_setter import OptionSetter, range_of
from .state import restoring


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

    Momentum and moments start at zero, even for an optimizer in the middle of training. The survey keeps a
    copy of the parameters on the host, and the optimizer's old state on its device beside the new one.

    Afterwards everything is restored bit for bit, also after an exception or Ctrl-C: parameters, masters,
    buffers, attributes and modes of the models, `.grad`, optimizer, GradScaler, random state (torch, Python,
    NumPy), and the accumulator's counters and sizes. Its schedulers and noise meter are not used. The
    position of the data is restored as far as possible: counters and generators of a loader, of its samplers
    and datasets, the epoch of persistent workers, and the state of a loader with `state_dict`.

    Args:
        accumulator: the accumulator of the training, or (model, optimizer, loss_fn) to create one.
        batches: batches for the accumulator: a DataLoader or another iterable that can start again, or a
            function that returns an iterator. An iterator itself raises, because its position cannot be
            restored. If the function makes a DataLoader, the loader's generator is not restored.
        what: option that grows: ``"lr"``, ``"weight_decay"``, or ``"momentum"`` (SGD's momentum m or Adam's
            first beta, with 1 - m falling exponentially).
        low: first value; None for 1e-6 (SGD's rate, weight decay), 1e-7 (other rates) or 0 (momentum).
        high: last value; None for 10 (SGD's rate), 1 (other rates, weight decay) or 0.999 (momentum).
        updates: number of points.
        accumulation_steps: for a loader of micro-batches: group this many into a window, as `windows` does; a
            number, or a schedule whose update 0 is the survey's first (not reset when the loader restarts).
        progress: function to call with (points done, number of points) after each point.

    Returns:
        The curve, and suggested values. Parameter groups keep their ratios. The values are those of the
        group with the largest value; `Survey.of_groups` returns the values of all groups.

    Raises:
        InputError: the range is not increasing, there are fewer than 12 updates, or the batches are an
            iterator, empty, or of weight 0.
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
    # A second engine, so that counters and sizes of the training's accumulator do not change.
    engine = accumulator.engine.copy_for_survey()
    config = engine.config
    optimizers = config.rule.optimizers
    # Raises if a group has no such option, before anything is recorded.
    setter = OptionSetter(optimizers, what)
    default = range_of(optimizers, what)
    sweep = Sweep(what, default[0] if low is None else low, default[1] if high is None else high, updates)
    skipped: list[int] = []
    # The state is recorded before the first update, and restored after Ctrl-C too.
    with restoring(
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
            # The loss is that before the step, so a point shows the effect of the values of earlier points.
            setter.set(value)
            proceed = _point(engine.update, batch, sweep, skipped, point)
            progress(point + 1, updates)
            # Losses of ranks may differ by rounding; with the vote, no rank continues alone.
            if config.sync.vote(not proceed):
                sweep.stop("another rank stopped")
                break
    return sweep.report(
        ratios=setter.ratios, skipped=skipped, epochs=stream.epochs, seconds=time.perf_counter() - start
    )


def _point(
    accumulate: Callable[[Any], Update], batch: Any, sweep: Sweep, skipped: list[int], point: int
) -> bool:
    """Make one update and record its loss; return False if the survey must end."""
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
    # For instance an overflow of the scaler: the loss is still valid, and the point is listed as skipped.
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
