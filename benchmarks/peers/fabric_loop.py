"""Lightning Fabric: the loop in the docstring of `Fabric.no_backward_sync`, and a repaired one.

The documented loop updates after the first micro-batch of each K and never divides the loss. The repaired
loop counts ``(index + 1) % K`` and divides by K: the tutorial loop with Fabric's objects.
"""

import tempfile
from pathlib import Path

from lightning.fabric import Fabric

from .task import Batch, Parameters, Task, parameters_of
from .work import Window, Work, loss_of

REMARKS = {
    "equal micro-batches": "docstring: updates after micro-batches 1, 1 + K, ...; "
    "repaired: after each K-th one"
}


class _Loop:
    """Set-up objects and the body of the documented loop."""

    def __init__(self, task: Task, variant: str | None) -> None:
        self.task, self.variant = task, variant
        self.fabric = Fabric(accelerator="cpu", devices=1)
        self.plain, optimizer, self.scheduler = task.build()
        self.model, self.optimizer = self.fabric.setup(self.plain, optimizer)
        self.loader = self.fabric.setup_dataloaders(task.loader())

    def microbatch(self, index: int, batch: Batch) -> None:
        task, steps = self.task, self.task.accumulation_steps
        fixed = self.variant == "fixed"
        updates = (index + 1) % steps == 0 if fixed else index % steps == 0
        with self.fabric.no_backward_sync(self.model, enabled=not updates):
            loss = task.loss(self.model(batch["inputs"]), batch)
            self.fabric.backward(loss / steps if fixed else loss)
        if updates:
            if task.max_grad_norm is not None:
                self.fabric.clip_gradients(self.model, self.optimizer, max_norm=task.max_grad_norm)
            self.optimizer.step()
            if self.scheduler is not None:
                self.scheduler.step()
            self.optimizer.zero_grad()


def train(task: Task, variant: str | None = None) -> Parameters:
    """Train for all epochs."""
    loop = _Loop(task, variant)
    for _ in range(task.epochs):
        for index, batch in enumerate(loop.loader):
            loop.microbatch(index, batch)
    return parameters_of(loop.plain)


def resume(task: Task, variant: str | None = None) -> Parameters:
    """Use `fabric.save` of model, optimizer and position inside a window, `fabric.load` in new objects."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "state.ckpt"
        loop = _Loop(task, variant)
        for index, batch in enumerate(loop.loader):
            loop.microbatch(index, batch)
            if index + 1 == task.stop_after:
                state = {"model": loop.model, "optimizer": loop.optimizer, "position": index + 1}
                loop.fabric.save(path, state)
                break
        loop = _Loop(task, variant)
        state = {"model": loop.model, "optimizer": loop.optimizer, "position": 0}
        loop.fabric.load(path, state)
    for index, batch in enumerate(loop.loader):
        if index >= state["position"]:
            loop.microbatch(index, batch)
    return parameters_of(loop.plain)


def leave(task: Task, variant: str | None = None) -> Parameters:
    """End the first epoch early by `break`."""
    loop = _Loop(task, variant)
    for epoch in range(task.epochs):
        for index, batch in enumerate(loop.loader):
            if epoch == 0 and index == task.stop_after:
                break
            loop.microbatch(index, batch)
    return parameters_of(loop.plain)


def window(work: Work, variant: str | None = None) -> Window:
    """Repaired loop over given micro-batches.

    Variant "documented": outputs and loss in variables, as in its guide; otherwise one expression.
    """
    microbatches = work.microbatches()
    fabric = Fabric(accelerator="auto", devices=1)
    model, optimizer = fabric.setup(*work.build())
    model.train()
    last = len(microbatches) - 1

    def run() -> None:
        for index, batch in enumerate(microbatches):
            with fabric.no_backward_sync(model, enabled=index < last):
                fabric.backward(loss_of(model(batch["inputs"]), batch) / len(microbatches))
        optimizer.step()
        optimizer.zero_grad()

    def documented() -> None:
        for index, batch in enumerate(microbatches):
            with fabric.no_backward_sync(model, enabled=index < last):
                outputs = model(batch["inputs"])
                loss = loss_of(outputs, batch) / len(microbatches)
                fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()

    return Window(documented if variant == "documented" else run)
