"""Five models, and every way to sum their gradients, for the sweep of failing allocations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from superbatch.noise.meter import NoiseMeter
from superbatch.torch import Accumulator, Update, WholeBatch
from superbatch.torch.masters import MasterWeights, fp32_masters
from superbatch.torch.options import PerSampleRandom
from tests.torch.failing_allocations import Cell, Loop

SAMPLES, MICROBATCH = 6, 2


class Mlp(nn.Module):
    """Two layers, and two parameters that receive the same gradient tensor from autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 5), nn.Linear(5, 1)
        self.left, self.right = nn.Parameter(torch.randn(5)), nn.Parameter(torch.randn(5))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).tanh() * (self.left.view(1, 5) + self.right.view(1, 5)))

    def loss(self, batch: Sequence[Tensor]) -> Tensor:
        return (self(batch[0]) - batch[1]).square().mean()


class Convolutions(nn.Module):
    """A convolution, GroupNorm, and a buffer that counts samples."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4)
        self.last = nn.Linear(4, 1)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += len(x)
        image = x.new_zeros(len(x), 1, 4, 4) + x.reshape(len(x), 1, 4, 1)
        image = image * torch.linspace(1, 2, 4, dtype=x.dtype)
        return self.last(self.norm(self.first(image)).relu().mean((2, 3)))

    def loss(self, batch: Sequence[Tensor]) -> Tensor:
        return (self(batch[0]) - batch[1]).square().mean()


class Transformer(nn.Module):
    """Attention block; its dropout is for per-sample random numbers."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Linear(1, 4)
        self.key, self.query, self.value = (nn.Linear(4, 4, bias=False) for _ in range(3))
        self.norm, self.last = nn.LayerNorm(4), nn.Linear(4, 1)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x.unsqueeze(-1))
        scores = self.query(hidden) @ self.key(hidden).transpose(1, 2) / 2
        hidden = hidden + self.dropout(scores.softmax(-1) @ self.value(hidden))
        return self.last(self.norm(hidden).mean(1))

    def loss(self, batch: Sequence[Tensor]) -> Tensor:
        return (self(batch[0]) - batch[1]).square().mean()


class Tied(nn.Module):
    """Token embedding tied to the last layer; another embedding has sparse gradients."""

    def __init__(self, *, sparse: bool = True) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(5, 3), nn.Embedding(4, 3, sparse=sparse)

    def forward(self, x: Tensor) -> Tensor:
        tokens = (x.abs() * 7).long() % 5
        hidden = self.tokens(tokens) + self.places(torch.arange(x.shape[1]).expand(tokens.shape))
        return functional.linear(hidden.tanh(), self.tokens.weight).mean(1)

    def loss(self, batch: Sequence[Tensor]) -> Tensor:
        return functional.cross_entropy(self(batch[0]), (batch[1][:, 0].abs() * 7).long() % 5)


class Losses(nn.Module):
    """Two heads on one body, and a parameter that is itself a term of the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.heads = nn.Linear(4, 5), nn.ModuleList(nn.Linear(5, 1) for _ in range(2))
        self.offset = nn.Parameter(torch.randn(1))

    def parts(self, batch: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        hidden = self.body(batch[0]).tanh()
        errors = [(head(hidden) - batch[1]).square().mean() for head in self.heads]
        return errors[0] + self.offset.view(()), 0.3 * errors[1]

    def loss(self, batch: Sequence[Tensor]) -> Tensor:
        first, second = self.parts(batch)
        return first + second


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": Mlp,
    "convolutions": Convolutions,
    "transformer": Transformer,
    "tied": Tied,
    "losses": Losses,
}


def _call(accumulate: Accumulator | WholeBatch, batch: Any) -> Update:
    return accumulate(batch)


def _run_owned(accumulate: Accumulator | WholeBatch, batch: Any, *, model: Any) -> Update:
    assert isinstance(accumulate, Accumulator)
    with accumulate.window(batch) as window:
        for microbatch in window:
            if isinstance(model, Losses):
                first, second = model.parts(microbatch)
                window.backward(first, retain_graph=True)
                window.backward(second)
            else:
                window.backward(model.loss(microbatch))
    return window.update


_SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
_LARGE_STEPS = partial(torch.optim.SGD, lr=0.5)  # moves parameters by more than the rounding of bfloat16
_ADAM = partial(torch.optim.Adam, lr=0.01, foreach=False)


@dataclass(frozen=True)
class Mode:
    """Options of an update.

    Attributes:
        options: options of the Accumulator; observers and scaler are factories.
        optimizer: builds the optimizer from parameters.
        dtype: dtype of the model.
        tolerance: error of an update in other micro-batches.
        not_for: models that do not support the mode.
        masters: use float32 master weights.
        returned: loss_fn returns the weight too.
        owned: update in a user-defined loop.
        whole: use WholeBatch, for coupled samples.
    """

    options: dict[str, Any]
    optimizer: Callable[[Iterable[Tensor]], torch.optim.Optimizer] = _SGD
    dtype: torch.dtype = torch.float64
    tolerance: float = 1e-12
    not_for: tuple[str, ...] = ()
    masters: bool = False
    returned: bool = False
    owned: bool = False
    whole: bool = False


_WITHOUT_NORM = ("mlp", "convolutions", "tied", "losses")
MODES: dict[str, Mode] = {
    ".grad": Mode({"max_grad_norm": 0.5}),
    "adam": Mode({}, optimizer=_ADAM, not_for=("tied",)),
    "buffers": Mode(
        {"gradient_sum": torch.float32},
        optimizer=_LARGE_STEPS,
        dtype=torch.bfloat16,
        tolerance=0.3,
        not_for=("tied",),
    ),
    "momentum": Mode({"gradient_sum": "momentum"}, not_for=("tied",)),
    "noise": Mode({"observers": lambda: [NoiseMeter(every=1)]}),
    "noise by sample": Mode({"observers": lambda: [NoiseMeter(every=1, proxy=True)]}, not_for=_WITHOUT_NORM),
    "noise by adam": Mode(
        {"observers": lambda: [NoiseMeter(every=1, preconditioned=True)]}, optimizer=_ADAM, not_for=("tied",)
    ),
    "skip_microbatch": Mode({"nonfinite": "skip_microbatch"}),
    "sample_rng": Mode({"participants": [PerSampleRandom()]}),
    "returned": Mode({"weight": "returned"}, returned=True),
    "owned": Mode({}, owned=True),
    "auto": Mode({"microbatch_size": "auto"}),
    "masters": Mode({}, dtype=torch.bfloat16, tolerance=0.3, masters=True, not_for=("tied",)),
    "scaler": Mode(
        {"scaler": lambda: torch.amp.GradScaler("cpu", init_scale=64.0)},
        dtype=torch.float32,
        tolerance=1e-4,
        not_for=("tied",),
    ),
    "whole batch": Mode({}, not_for=("tied",), whole=True),
    "checked": Mode({"check": True}),
}


def cells() -> Iterable[tuple[str, str]]:
    """Return all pairs of model and mode."""
    return [(model, mode) for mode, how in MODES.items() for model in MODELS if model not in how.not_for]


def cell(model_name: str, mode_name: str) -> Cell:
    """Return the cell of a model and a mode."""
    mode = MODES[mode_name]
    make = (
        partial(Transformer, 0.3)
        if (model_name, mode_name) == ("transformer", "sample_rng")
        else MODELS[model_name]
    )

    def model() -> nn.Module:
        torch.manual_seed(0)
        return make().to(mode.dtype)

    def accumulator(
        model: nn.Module,
    ) -> tuple[Accumulator | WholeBatch, Sequence[torch.optim.Optimizer], Sequence[Tensor]]:
        module: Any = model
        masters = fp32_masters(model) if mode.masters else None
        optimizer = mode.optimizer(model.parameters() if masters is None else masters.values())
        stepped = optimizer if masters is None else MasterWeights(optimizer, masters)
        options = {"microbatch_size": MICROBATCH, **mode.options}
        for name in ("scaler", "observers"):
            if name in options:
                options[name] = options[name]()

        def returned(batch: Any) -> tuple[Tensor, int]:
            return module.loss(batch), len(batch[0])

        loss_fn = None if mode.owned else returned if mode.returned else module.loss
        if mode.whole:
            assert loss_fn is not None
            accumulate = WholeBatch(model, stepped, loss_fn, **options)
        else:
            accumulate = Accumulator(model, stepped, loss_fn, **{"check": False, **options})
        return accumulate, [optimizer], [] if masters is None else list(masters.values())

    def loop(accumulate: Accumulator | WholeBatch, batch: Any) -> Update:
        return _call(accumulate, batch)

    generator = torch.Generator().manual_seed(3)
    batches = [
        (
            torch.randn(SAMPLES, 4, generator=generator).to(mode.dtype),
            torch.randn(SAMPLES, 1, generator=generator).to(mode.dtype),
        )
        for _ in range(3)
    ]
    found: Loop = loop
    if mode.owned:
        found = _OwnedLoop()
        return Cell(found.recording(model), batches, accumulator, found, mode.tolerance)
    return Cell(model, batches, accumulator, found, mode.tolerance)


class _OwnedLoop:
    """User-defined loop over the model that was built last."""

    model: nn.Module

    def recording(self, make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        """Return a builder that also stores the model."""

        def made() -> nn.Module:
            self.model = make()
            return self.model

        return made

    def __call__(self, accumulate: Accumulator | WholeBatch, batch: Any) -> Update:
        return _run_owned(accumulate, batch, model=self.model)
