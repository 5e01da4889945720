"""Two hundred windows in which memory runs out, compared with the same windows without failures.

Each failure is real: the allocator gets a request that is too large. It comes after the forward of a module,
in the loss function, or in the backward at the output of a module, after gradients of later modules were
added. Micro-batch, place and module are random. Everything is in float64.
"""

import copy
import gc
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from peers.task import Batch, Parameters, parameters_of, relative_error
from peers.work import loss_of
from torch import Tensor, nn
from workloads import CLASSES, images

from superbatch.torch import Accumulator
from superbatch.torch.options import PerSampleRandom

SAMPLES, MICROBATCH = 24, 12
PLACES = ("forward", "loss", "backward")
KEEP = 3
"""Windows with one accumulator: a new one begins with the stated size again, so that it can be halved."""


class Counting(nn.Module):
    """Count the samples in a buffer, as metrics and moving statistics do."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, inputs: Tensor) -> Tensor:
        self.seen += len(inputs)
        return inputs


class Attention(nn.Module):
    """Transformer layer over eight positions of eight features, with a head."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.head = nn.Linear(64, CLASSES)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.layer(inputs.unflatten(1, (8, 8))).flatten(1))


def _mlp() -> nn.Module:
    return nn.Sequential(
        Counting(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, CLASSES)
    )


def _convnet() -> nn.Module:
    layers = [
        nn.Unflatten(1, (1, 8, 8)),
        Counting(),
        nn.Conv2d(1, 8, 3, padding=1),
        nn.Tanh(),
        nn.MaxPool2d(2),
    ]
    return nn.Sequential(
        *layers, nn.Conv2d(8, 8, 3, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(128, CLASSES)
    )


def _transformer() -> nn.Module:
    return nn.Sequential(Counting(), Attention())


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], torch.optim.Optimizer]]] = {
    "mlp": (_mlp, partial(torch.optim.SGD, lr=0.05, momentum=0.9)),
    "convnet": (_convnet, partial(torch.optim.AdamW, lr=1e-3)),
    # Not Adam: the bias of the keys has a gradient of pure rounding, which Adam would scale up.
    "transformer": (_transformer, partial(torch.optim.SGD, lr=0.05, momentum=0.9)),
}


@dataclass
class Faults:
    """Failures of the allocator, armed before a window for a random micro-batch and place.

    Attributes:
        counts: number of failures by place.
        half_way: number of failures after a backward had added to some gradient.
    """

    draw: random.Random
    counts: Counter[str] = field(default_factory=Counter)
    half_way: int = 0
    _armed: str | None = None
    _wait: int = 0
    _module: nn.Module | None = None

    def watch(self, model: nn.Module) -> None:
        """Register the hooks; nothing fails before `arm`."""
        self._modules = _with_gradients(model)
        self._added = 0
        model.register_forward_pre_hook(self._begin)
        for module in self._modules:
            module.register_forward_hook(self._after)
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(self._count)

    def arm(self) -> None:
        """Draw the place of the next failure."""
        self._armed = self.draw.choice(PLACES)
        self._wait = self.draw.randrange(SAMPLES // MICROBATCH)  # micro-batches before the failure
        self._module = self.draw.choice(self._modules)

    def loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Return the loss, or run out of memory in it."""
        loss = loss_of(outputs, batch)
        if self._ready("loss"):
            self._fail()
        return loss

    def _begin(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self._added, self._samples = 0, len(inputs[0])
        self._wait -= 1

    def _after(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if module is not self._module:
            return
        if self._ready("forward"):
            self._fail()
        output.register_hook(self._in_backward)

    def _in_backward(self, gradient: Tensor) -> None:
        if self._ready("backward"):
            self.half_way += self._added > 0
            self._fail()

    def _count(self, parameter: Tensor) -> None:
        self._added += 1

    def _ready(self, place: str) -> bool:
        # A single sample cannot be split, so a failure there would end the training.
        return self._armed == place and self._wait < 0 and self._samples > 1

    def _fail(self) -> None:
        self.counts[self._armed or ""] += 1
        self._armed = None
        torch.empty(1 << 60, dtype=torch.uint8)  # the allocator raises


@dataclass(frozen=True)
class Outcome:
    """Result of a training.

    Attributes:
        error: largest relative difference of a parameter's change, against no failures; None: training ended.
        counts: failures by place.
        half_way: number of failures in a backward that had already added to a gradient.
        buffers: True if the counted samples are the same.
    """

    model: str
    how: str
    windows: int
    error: float | None
    counts: dict[str, int]
    half_way: int
    buffers: bool
    note: str = ""


def _with_gradients(model: nn.Module) -> list[nn.Module]:
    """Return the smallest called modules with a gradient, found with a copy of the model."""
    twin, called = copy.deepcopy(model), set[str]()

    def note(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.requires_grad:
            called.add(name)

    for name, module in twin.named_modules():
        if not any(True for _ in module.children()):
            module.register_forward_hook(partial(note, name))
    with torch.random.fork_rng():
        twin(torch.zeros(2, 64, dtype=torch.float64))
    return [module for name, module in model.named_modules() if name in called]


def _batches(windows: int) -> list[Batch]:
    data = images(SAMPLES * 4, 64)
    data["inputs"] = data["inputs"].double()
    starts = [index % 4 * SAMPLES for index in range(windows)]
    return [{name: leaf[first : first + SAMPLES] for name, leaf in data.items()} for first in starts]


def _build(name: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    make, optimizer = MODELS[name]
    model = make().double().train()
    return model, optimizer(model.parameters())


def ours(name: str, windows: int, faults: Faults | None) -> tuple[Parameters, int]:
    """Train with superbatch; with `faults`, memory runs out in every window."""
    model, optimizer = _build(name)
    idle = Faults(random.Random(0))
    (faults or idle).watch(model)

    def loss_fn(microbatch: Batch) -> Tensor:
        return (faults or idle).loss(model(microbatch["inputs"]), microbatch)

    def new() -> Accumulator:
        return Accumulator(
            model,
            optimizer,
            loss_fn,
            microbatch_size=MICROBATCH,
            participants=[PerSampleRandom()],
            max_grad_norm=1.0,
            check=False,
        )

    accumulate = new()
    for index, batch in enumerate(_batches(windows)):
        if index % KEEP == 0:
            accumulate = new()
        if faults is not None:
            faults.arm()
        update = accumulate(batch)
        assert update.made and update.samples == SAMPLES
    return _result(model)


def naive(name: str, windows: int, faults: Faults) -> tuple[Parameters, int]:
    """Train by the usual hand-written loop, which retries a failed micro-batch in halves without a rollback.

    For models without random numbers: it has no random streams per sample.
    """
    model, optimizer = _build(name)
    faults.watch(model)
    for batch in _batches(windows):
        faults.arm()
        todo = [(first, first + MICROBATCH) for first in range(0, SAMPLES, MICROBATCH)]
        while todo:
            first, last = todo.pop(0)
            part = {key: leaf[first:last] for key, leaf in batch.items()}
            try:
                (faults.loss(model(part["inputs"]), part) * ((last - first) / SAMPLES)).backward()
            except RuntimeError as error:
                if "can't allocate memory" not in str(error):
                    raise
                middle = (first + last) // 2
                todo[:0] = [(first, middle), (middle, last)]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return _result(model)


def _result(model: nn.Module) -> tuple[Parameters, int]:
    seen = next(int(buffer) for name, buffer in model.named_buffers() if name.endswith("seen"))
    return parameters_of(model), seen


def measure(windows: int) -> list[Outcome]:
    """Train each model with superbatch, and by the hand-written loop that only retries."""
    outcomes = []
    gc.freeze()  # each failure collects garbage, which skips frozen objects
    for name in MODELS:
        start = parameters_of(_build(name)[0])
        truth, seen = ours(name, windows, None)
        moved = {key: value - start[key] for key, value in truth.items()}
        draws = any(isinstance(module, nn.Dropout) for module in _build(name)[0].modules())
        ways = {"superbatch": ours} if draws else {"superbatch": ours, "by hand: retried in halves": naive}
        for how, train in ways.items():
            faults = Faults(random.Random(1))
            note, error, buffers = "", None, False
            try:
                weights, counted = train(name, windows, faults)
            except RuntimeError as failure:
                note = f"{type(failure).__name__}: {failure}".splitlines()[0][:200]
            else:
                error = relative_error({key: value - start[key] for key, value in weights.items()}, moved)
                buffers = counted == seen
            counts = {place: faults.counts[place] for place in PLACES}
            outcomes.append(Outcome(name, how, windows, error, counts, faults.half_way, buffers, note))
    return outcomes
