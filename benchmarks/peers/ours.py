"""superbatch in three forms: windows of micro-batches, whole batches, and a loop of the user.

Every form runs, and the scorecard shows the worst.
"""

import io
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from superbatch.errors import NonFiniteError
from superbatch.torch import Accumulator, Window, class_weights, count_tokens, sample_weights, windows
from superbatch.torch.options import PerSampleRandom

from . import work as timed
from .task import Batch, Parameters, Task, parameters_of

FORMS = ("windows", "whole batches", "owned loop")
REMARKS = {
    "one NaN micro-batch": 'nonfinite="skip_microbatch"; the default raises and changes nothing (checked)',
    "dropout, another split": "participants=[PerSampleRandom()]",
}


class Interrupted(Exception):
    """Exception of the user's code inside a window."""


class _Run:
    """Model and accumulator of one form."""

    def __init__(self, task: Task, form: str) -> None:
        self.task, self.form = task, form
        self.model, self.optimizer, scheduler = task.build()
        self.calls, self.fail_at = 0, -1
        self.accumulate = Accumulator(
            self.model,
            self.optimizer,
            self.loss_fn,
            microbatch_size=task.microbatch_size if form == "whole batches" else None,
            reduction=task.reduction,
            weight=_weight(task, self.model),
            max_grad_norm=task.max_grad_norm,
            scheduler=scheduler,
            nonfinite="skip_microbatch" if task.skip_nonfinite else "raise",
            participants=[PerSampleRandom()] if task.sample_rng else [],
            # The loss check calls loss_fn more often, so it is off if calls are counted.
            check=not task.stop_after,
        )

    def loss_fn(self, microbatch: Batch) -> Tensor:
        self.calls += 1
        if self.calls == self.fail_at:
            raise Interrupted
        return self.task.loss(self.model(microbatch["inputs"]), microbatch)

    def batches(self) -> Iterator[Any]:
        """Return the inputs of the accumulator in one epoch."""
        if self.form == "whole batches":
            return iter(self.task.whole().loader())
        return iter(windows(self.task.loader(), self.task.accumulation_steps))

    def update(self, batch: Any) -> None:
        if self.form != "owned loop":
            self.accumulate(batch)
            return
        with self.accumulate.window(batch) as window:
            for microbatch in window:
                window.backward(self.loss_fn(microbatch))


def _weight(task: Task, model: nn.Module) -> Any:
    """Return `weight=` of the Accumulator, by superbatch's helpers."""
    if task.weight == "tokens":
        return count_tokens("labels")
    if task.weight == "sample_weights":
        return sample_weights("weights")
    if task.weight == "class_weights":
        from case_models import CLASS_WEIGHTS  # the case defines the numbers

        dtype = next(model.parameters()).dtype
        return class_weights(torch.tensor(CLASS_WEIGHTS, dtype=dtype), "labels")
    if task.weight == "share":
        return task.weigh
    return None


def _check_that_the_default_raises(task: Task, form: str) -> None:
    """Check that a non-finite micro-batch raises by default and leaves the parameters unchanged."""
    run = _Run(replace(task, skip_nonfinite=False), form)
    try:
        run.update(next(run.batches()))
    except NonFiniteError:
        before = parameters_of(task.model())
        assert all(torch.equal(value, before[name]) for name, value in parameters_of(run.model).items())
    else:
        raise AssertionError("a NaN went into an update without an error")


def train(task: Task, variant: str | None = None) -> Parameters:
    """Train with one call, or one user loop, for each update."""
    if task.skip_nonfinite:
        _check_that_the_default_raises(task, variant or FORMS[0])
    run = _Run(task, variant or FORMS[0])
    for _ in range(task.epochs):
        for batch in run.batches():
            run.update(batch)
    return parameters_of(run.model)


def resume(task: Task, variant: str | None = None) -> Parameters:
    """Save inside a user loop; resume in new objects, in each form."""
    run = _Run(task, variant or FORMS[0])
    file = io.BytesIO()
    for position, batch in enumerate(run.batches()):
        with run.accumulate.window(batch) as window:
            for index, microbatch in enumerate(window, start=position * task.accumulation_steps + 1):
                window.backward(run.loss_fn(microbatch))
                if index == task.stop_after:
                    parts = {"model": run.model, "optimizer": run.optimizer, "accumulate": run.accumulate}
                    torch.save({name: part.state_dict() for name, part in parts.items()}, file)
                    break
        if run.accumulate.updates == position:
            break
    file.seek(0)
    state = torch.load(file)
    run = _Run(task, variant or FORMS[0])
    run.model.load_state_dict(state["model"])
    run.optimizer.load_state_dict(state["optimizer"])
    run.accumulate.load_state_dict(state["accumulate"])
    for position, batch in enumerate(run.batches()):
        if position >= run.accumulate.updates:
            run.update(batch)
    return parameters_of(run.model)


def leave(task: Task, variant: str | None = None) -> Parameters:
    """Leave a user loop by `break`, and a call by an exception of the user's loss function."""
    run = _Run(task, variant or FORMS[0])
    for epoch in range(task.epochs):
        for batch in run.batches():
            if epoch > 0:
                run.update(batch)
            elif run.form == "owned loop":
                with run.accumulate.window(batch) as window:
                    for index, microbatch in enumerate(window):
                        if index == task.stop_after:
                            break
                        window.backward(run.loss_fn(microbatch))
            else:
                run.fail_at = task.stop_after + 1
                try:
                    run.update(batch)
                except Interrupted:
                    break
                raise AssertionError("the window was meant to be interrupted")
    return parameters_of(run.model)


def window(work: timed.Work, variant: str | None = None) -> timed.Window:
    """Return a call for each window; the variant "slices" passes whole batches."""
    model, optimizer = work.build()
    model.train()

    def loss_fn(microbatch: Batch) -> Tensor:
        return timed.loss_of(model(microbatch["inputs"]), microbatch)

    if variant == "slices":
        batch, accumulate = (
            work.batch,
            Accumulator(model, optimizer, loss_fn, microbatch_size=work.microbatch_size),
        )
    else:
        batch, accumulate = Window(work.microbatches()), Accumulator(model, optimizer, loss_fn)
    return timed.Window(lambda: accumulate(batch) and None)
