"""Training programs whose loss changes state that is not a buffer of the model, each in another place.

Every program is float64, draws no random numbers, and creates its state from a seed.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

F64 = torch.float64
SAMPLES, FEATURES, WIDTH, KEPT = 12, 6, 4, 36


@dataclass
class Program:
    """Training program.

    Attributes:
        model: the trained model.
        loss_fn: loss of a micro-batch; changes the state.
        state: returns all objects that `loss_fn` changes.
        names: names of the state in the warning.
    """

    model: nn.Module
    loss_fn: Callable[[Tensor], Tensor]
    state: Callable[[], list[Any]]
    names: tuple[str, ...]

    def contents(self) -> list[Any]:
        """Return copies of the state."""
        return [item.detach().clone() if isinstance(item, Tensor) else item for item in self.state()]


def batches(count: int = 3) -> list[Tensor]:
    """Return random batches."""
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(SAMPLES, FEATURES, generator=generator, dtype=F64) for _ in range(count)]


def linear(seed: int) -> nn.Linear:
    """Return a layer, initialized from a seed."""
    torch.manual_seed(seed)
    return nn.Linear(FEATURES, WIDTH, dtype=F64)


def frozen(seed: int) -> nn.Linear:
    """Return a frozen teacher, initialized from a seed."""
    return linear(seed).requires_grad_(requires_grad=False)


def unit(x: Tensor) -> Tensor:
    """Normalize rows."""
    return nn.functional.normalize(x, dim=1)


def start() -> Tensor:
    """Return a queue, initialized from a seed."""
    return unit(torch.randn(KEPT, WIDTH, generator=torch.Generator().manual_seed(3), dtype=F64))


def contrast(q: Tensor, k: Tensor, queue: Tensor) -> Tensor:
    """InfoNCE of each sample against its key and a queue: separable while the queue is constant."""
    logits = torch.cat([(q * k).sum(1, keepdim=True), q @ queue.T], 1) / 0.2
    return nn.functional.cross_entropy(logits, torch.zeros(len(q), dtype=torch.long))


def _data(p: Tensor, q: Tensor) -> None:
    p.data.mul_(0.9).add_(q.data, alpha=0.1)


def _assigned(p: Tensor, q: Tensor) -> None:
    p.data = 0.9 * p.data + 0.1 * q.data


def _lerp(p: Tensor, q: Tensor) -> None:
    with torch.no_grad():
        p.lerp_(q, 0.1)


def average(how: str) -> Program:
    """BYOL: the forward updates a teacher, which is a frozen submodule."""

    class Byol(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student, self.teacher = linear(0), frozen(0 if how == "lerp" else 1)

        def forward(self, x: Tensor) -> Tensor:
            pairs = list(zip(self.teacher.parameters(), self.student.parameters(), strict=True))
            if how == "foreach":
                teachers = [p.data for p, _ in pairs]
                torch._foreach_mul_(teachers, 0.9)  # pyright: ignore[reportPrivateImportUsage]
                torch._foreach_add_(teachers, [q.data for _, q in pairs], alpha=0.1)  # pyright: ignore[reportPrivateImportUsage]
            else:
                move = {"data": _data, "assigned": _assigned, "lerp": _lerp}[how]
                for p, q in pairs:
                    move(p, q)
            with torch.no_grad():
                target = self.teacher(x + 0.1)
            return (self.student(x) - target).square().mean()

    model = Byol()
    return Program(model, model, lambda: list(model.teacher.parameters()), ("teacher.weight", "teacher.bias"))


def moco() -> Program:
    """MoCo: a teacher and a loss module with a queue; neither is passed as a model."""

    class Queue(nn.Module):
        queue: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("queue", start())
            self.pointer = 0

        def forward(self, q: Tensor, k: Tensor) -> Tensor:
            loss = contrast(q, k, self.queue.clone())
            self.queue[self.pointer : self.pointer + len(k)] = k
            self.pointer = (self.pointer + len(k)) % KEPT
            return loss

    student, teacher, criterion = linear(0), frozen(1), Queue()

    def loss_fn(x: Tensor) -> Tensor:
        with torch.no_grad():
            for p, q in zip(teacher.parameters(), student.parameters(), strict=True):
                p.mul_(0.9).add_(q, alpha=0.1)
            k = unit(teacher(x + 0.1))
        return criterion(unit(student(x)), k)

    return Program(
        student,
        loss_fn,
        lambda: [*teacher.parameters(), criterion.queue, criterion.pointer],
        ("teacher.weight", "teacher.bias", "criterion.queue", "criterion.pointer"),
    )


def center(where: str) -> Program:
    """DINO: a center of the targets, in a buffer or an attribute of a loss module."""

    class Dino(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            if where == "buffer":
                self.register_buffer("center", torch.zeros(WIDTH, dtype=F64))
            else:
                self.center = torch.zeros(WIDTH, dtype=F64)

        def forward(self, s: Tensor, t: Tensor) -> Tensor:
            target = (t - self.center).softmax(1)
            mean = t.detach().mean(0)
            self.center = 0.9 * self.center + 0.1 * mean
            return -(target * s.log_softmax(1)).sum(1).mean()

    model, teacher = linear(0), frozen(1)
    dino = Dino()
    loss_fn = lambda x: dino(model(x), teacher(x))  # noqa: E731  (the test needs the closure of a lambda)
    return Program(model, loss_fn, lambda: [dino.center], ("dino.center",))


def attributes() -> Program:
    """State in a list, a dictionary, a dataclass and a counter, as attributes of the model."""

    @dataclass
    class Statistics:
        mean: Tensor = field(default_factory=lambda: torch.zeros(WIDTH, dtype=F64))
        seen: int = 0

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = linear(0)
            self.means = [torch.zeros(WIDTH, dtype=F64), torch.zeros(WIDTH, dtype=F64)]
            self.banks = {"a": {"b": torch.zeros(WIDTH, dtype=F64)}}
            self.statistics = Statistics()
            self.steps = 0

        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x)
            loss = (y - self.means[0] - self.means[1] - self.banks["a"]["b"] - self.statistics.mean).square()
            now = y.detach().mean(0)
            self.means[0].mul_(0.9).add_(now, alpha=0.1)
            self.means[1] = 0.9 * self.means[1] + 0.1 * now
            self.banks["a"]["b"] += 0.1 * now
            self.statistics.mean = self.statistics.mean + 0.01 * now
            self.statistics.seen += 1
            self.steps += 1
            return loss.mean() / (1 + 0.5 * self.steps)

    model = Model()
    return Program(
        model,
        model,
        lambda: [
            *model.means,
            model.banks["a"]["b"],
            model.statistics.mean,
            model.statistics.seen,
            model.steps,
        ],
        ("means[0]", "means", "banks['a']['b']", "statistics.mean", "statistics.seen", "steps"),
    )


def hidden_teacher() -> Program:
    """A teacher in a list, which makes it no submodule."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student = linear(0)
            self.teacher = [frozen(1)]

        def forward(self, x: Tensor) -> Tensor:
            for p, q in zip(self.teacher[0].parameters(), self.student.parameters(), strict=True):
                _data(p, q)
            return (self.student(x) - self.teacher[0](x + 0.1)).square().mean()

    model = Model()
    return Program(model, model, lambda: list(model.teacher[0].parameters()), ("teacher[0].weight",))


class Bank:
    """Memory bank that is not a module."""

    def __init__(self) -> None:
        self.queue, self.pointer = start(), 0
        self.last: deque[Tensor] = deque([start()[:1]], maxlen=2)

    def add(self, k: Tensor) -> None:
        """Enqueue keys."""
        self.queue[self.pointer : self.pointer + len(k)] = k
        self.pointer = (self.pointer + len(k)) % KEPT
        self.last.append(k[:1])


class Trainer:
    """Object whose method is the loss function."""

    def __init__(self) -> None:
        self.model, self.bank = linear(0), Bank()

    def loss(self, x: Tensor) -> Tensor:
        """Return the loss against the bank, and enqueue the keys."""
        q = unit(self.model(x))
        loss = contrast(q, q.detach(), torch.cat([self.bank.queue, *self.bank.last]))
        self.bank.add(q.detach())
        return loss


def method() -> Program:
    """A bound method; its object has a bank with a pointer and a deque."""
    trainer = Trainer()
    bank = trainer.bank
    names = ("Trainer.bank.queue", "Trainer.bank.pointer", "Trainer.bank.last")
    return Program(trainer.model, trainer.loss, lambda: [bank.queue, bank.pointer, *bank.last], names)


def variables() -> Program:
    """Two variables of the enclosing function, which the loss rebinds."""
    model, queue, pointer = linear(0), start(), 0

    def loss_fn(x: Tensor) -> Tensor:
        nonlocal queue, pointer
        q = unit(model(x))
        loss = contrast(q, q.detach(), queue) * (1 + 0.1 * pointer)
        queue = torch.cat([q.detach(), queue])[:KEPT]
        pointer = (pointer + len(x)) % KEPT
        return loss

    return Program(model, loss_fn, lambda: [queue, pointer], ("queue", "pointer"))


def _with_queue(model: nn.Module, queue: Tensor, x: Tensor) -> Tensor:
    q = unit(model(x))
    loss = contrast(q, q.detach(), queue.clone())
    queue.copy_(torch.cat([q.detach(), queue])[:KEPT])
    return loss


def arguments() -> Program:
    """An argument of a `functools.partial`."""
    model, queue = linear(0), start()
    return Program(model, functools.partial(_with_queue, model, queue), lambda: [queue], ("queue",))


QUEUE = start()
MODEL = linear(0)


def _global_loss(x: Tensor) -> Tensor:
    global QUEUE  # noqa: PLW0603  (the test needs a global)
    q = unit(MODEL(x))
    loss = contrast(q, q.detach(), QUEUE)
    QUEUE = torch.cat([q.detach(), QUEUE])[:KEPT]
    return loss


def global_variable() -> Program:
    """A global variable that the loss uses."""
    global QUEUE  # noqa: PLW0603  (the test needs a global)
    QUEUE = start()
    MODEL.load_state_dict(linear(0).state_dict())
    return Program(MODEL, _global_loss, lambda: [QUEUE], ("QUEUE",))


PROGRAMS: dict[str, Callable[[], Program]] = {
    "average by data": functools.partial(average, "data"),
    "average by foreach": functools.partial(average, "foreach"),
    "average by assigned": functools.partial(average, "assigned"),
    "average by lerp": functools.partial(average, "lerp"),
    "moco": moco,
    "center in a buffer": functools.partial(center, "buffer"),
    "center in an attribute": functools.partial(center, "attribute"),
    "attributes": attributes,
    "hidden teacher": hidden_teacher,
    "method": method,
    "variables": variables,
    "arguments": arguments,
    "global": global_variable,
}
