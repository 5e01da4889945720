"""Loop of the tutorials: ``loss / K``, backward, an update at every K-th micro-batch."""

import io

import torch

from .task import Batch, Parameters, Task, parameters_of


class _Loop:
    """State of the tutorial loop, so that it can be stopped and resumed."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.model, self.optimizer, self.scheduler = task.build()

    def microbatch(self, index: int, batch: Batch) -> None:
        task, steps = self.task, self.task.accumulation_steps
        loss = task.loss(self.model(batch["inputs"]), batch) / steps
        loss.backward()
        if (index + 1) % steps == 0:
            if task.max_grad_norm is not None:
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), task.max_grad_norm)
            self.optimizer.step()
            if self.scheduler is not None:
                self.scheduler.step()
            self.optimizer.zero_grad()


def train(task: Task, variant: str | None = None) -> Parameters:
    """Train for all epochs."""
    loop = _Loop(task)
    for _ in range(task.epochs):
        for index, batch in enumerate(task.loader()):
            loop.microbatch(index, batch)
    return parameters_of(loop.model)


def resume(task: Task, variant: str | None = None) -> Parameters:
    """Resume from the usual checkpoint: model, optimizer and position, saved inside a window."""
    loop = _Loop(task)
    file = io.BytesIO()
    for index, batch in enumerate(task.loader()):
        loop.microbatch(index, batch)
        if index + 1 == task.stop_after:
            torch.save({"model": loop.model.state_dict(), "optimizer": loop.optimizer.state_dict()}, file)
            break
    file.seek(0)
    state = torch.load(file)
    loop = _Loop(task)
    loop.model.load_state_dict(state["model"])
    loop.optimizer.load_state_dict(state["optimizer"])
    for index, batch in enumerate(task.loader()):
        if index >= task.stop_after:
            loop.microbatch(index, batch)
    return parameters_of(loop.model)


def leave(task: Task, variant: str | None = None) -> Parameters:
    """End the first epoch early by `break`."""
    loop = _Loop(task)
    for epoch in range(task.epochs):
        for index, batch in enumerate(task.loader()):
            if epoch == 0 and index == task.stop_after:
                break
            loop.microbatch(index, batch)
    return parameters_of(loop.model)
