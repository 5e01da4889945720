"""Hugging Face Accelerate: `accumulate()`, and its guide's loop for samples of variable size.

https://huggingface.co/docs/accelerate/usage_guides/gradient_accumulation
"""

import tempfile
from collections.abc import Iterable
from typing import Any

from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState

from .task import Batch, NotApplicable, Parameters, Task, parameters_of
from .work import Window, Work, loss_of


class _Loop:
    """Prepared objects and the body of the documented loop."""

    def __init__(self, task: Task) -> None:
        # Reset the singletons of the process; otherwise the accumulation steps of the first task stay.
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        self.task = task
        self.accelerator = Accelerator(gradient_accumulation_steps=task.accumulation_steps, cpu=True)
        model, optimizer, scheduler = task.build()
        objects: list[Any] = [model, optimizer, task.loader()]
        prepared = self.accelerator.prepare(*objects, *([scheduler] if scheduler else []))
        self.model, self.optimizer, self.loader = prepared[:3]
        self.scheduler = prepared[3] if scheduler else None

    def update(self) -> None:
        if self.task.max_grad_norm is not None and self.accelerator.sync_gradients:
            self.accelerator.clip_grad_norm_(self.model.parameters(), self.task.max_grad_norm)
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        self.optimizer.zero_grad()

    def microbatch(self, batch: Batch) -> None:
        with self.accelerator.accumulate(self.model):
            self.accelerator.backward(self.task.loss(self.model(batch["inputs"]), batch))
            self.update()

    def window(self, microbatches: list[Batch]) -> None:
        """Loop of the guide: a sum loss over the window's items, times K to undo Accelerate's division."""
        task = self.task
        items = sum(task.weigh(batch) for batch in microbatches)
        for batch in microbatches:
            loss = task.loss_sum(self.model(batch["inputs"]), batch)
            self.accelerator.backward(loss * task.accumulation_steps * self.accelerator.num_processes / items)
        self.update()

    def parameters(self) -> Parameters:
        return parameters_of(self.accelerator.unwrap_model(self.model))


def _in_windows(loader: Iterable[Batch], size: int) -> Iterable[list[Batch]]:
    """Yield prefetched windows as in the guide; the last may be shorter."""
    window: list[Batch] = []
    for batch in loader:
        window.append(batch)
        if len(window) == size:
            yield window
            window = []
    if window:
        yield window


def train(task: Task, variant: str | None = None) -> Parameters:
    """Train for all epochs."""
    loop = _Loop(task)
    for _ in range(task.epochs):
        if variant == "items":
            for window in _in_windows(loop.loader, task.accumulation_steps):
                loop.window(window)
        else:
            for batch in loop.loader:
                loop.microbatch(batch)
    return loop.parameters()


def resume(task: Task, variant: str | None = None) -> Parameters:
    """Use `save_state` inside a window, `load_state` and `skip_first_batches` in a new Accelerator."""
    if variant == "items":
        raise NotApplicable("the recipe iterates over whole windows and cannot save inside one")
    with tempfile.TemporaryDirectory() as folder:
        loop = _Loop(task)
        for index, batch in enumerate(loop.loader):
            loop.microbatch(batch)
            if index + 1 == task.stop_after:
                loop.accelerator.save_state(folder)
                break
        loop = _Loop(task)
        loop.accelerator.load_state(folder)
        for batch in loop.accelerator.skip_first_batches(loop.loader, task.stop_after):
            loop.microbatch(batch)
    return loop.parameters()


def leave(task: Task, variant: str | None = None) -> Parameters:
    """End the first epoch early by `break`."""
    if variant == "items":
        raise NotApplicable("the recipe iterates over whole windows, so a break falls between two of them")
    loop = _Loop(task)
    for epoch in range(task.epochs):
        for index, batch in enumerate(loop.loader):
            if epoch == 0 and index == task.stop_after:
                break
            loop.microbatch(batch)
    return loop.parameters()


def window(work: Work, variant: str | None = None) -> Window:
    """Loop over given micro-batches, without the cost of Accelerate's own loader.

    Variant "documented": outputs and loss in variables, as in its guide; otherwise one expression.
    """
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    microbatches = work.microbatches()
    on_cpu = work.batch["labels"].device.type == "cpu"
    accelerator = Accelerator(gradient_accumulation_steps=len(microbatches), cpu=on_cpu)
    model, optimizer = accelerator.prepare(*work.build())
    model.train()

    def run() -> None:
        for batch in microbatches:
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model(batch["inputs"]), batch))
                optimizer.step()
                optimizer.zero_grad()

    def documented() -> None:
        for batch in microbatches:
            with accelerator.accumulate(model):
                outputs = model(batch["inputs"])
                loss = loss_of(outputs, batch)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()

    return Window(documented if variant == "documented" else run)
