"""Results of `superbatch caffe`: a Caffe solver file in PyTorch's terms."""

from __future__ import annotations

# pyright: strict
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A field of the solver file.

    Attributes:
        field: name of the field in Caffe.
        value: value in the file, or Caffe's default.
        meaning: the equivalent in PyTorch's terms.
    """

    field: str
    value: str
    meaning: str


@dataclass(frozen=True, kw_only=True)
class Trap:
    """A setting whose effect may surprise the author of the file.

    Attributes:
        field: name of the field.
        text: the effect.
        do: the change to make if the effect is not wanted.
    """

    field: str
    text: str
    do: str


@dataclass(frozen=True, kw_only=True)
class Stock:
    """The nearest optimizer and scheduler of torch.

    Attributes:
        optimizer: Python expression; its name ``parameters`` stands for the model's parameters.
        scheduler: Python expression; None if the learning rate is constant.
        differs: differences from Caffe, one sentence each; empty if they agree to rounding.
    """

    optimizer: str
    scheduler: str | None
    differs: tuple[str, ...]

    @property
    def same(self) -> bool:
        """True if it trains as Caffe does."""
        return not self.differs


@dataclass(frozen=True, kw_only=True)
class CaffeExplained:
    """Explanation of a solver file.

    Attributes:
        source: name of the file.
        type: type of the solver.
        policy: policy of the learning rate.
        accumulation_steps: micro-batches per update: ``iter_size``.
        microbatch_size: batch size of the data layer; None if the file does not state it.
        effective_batch: samples of an update; None if the file does not state them.
        updates: updates of the run: ``max_iter``.
        samples: samples of the run, repeated ones included; None if the file does not state them.
        settings: meaning of each field.
        at: updates for which `rates` has an entry.
        rates: learning rates at these updates, for a parameter with ``lr_mult: 1``.
        traps: settings whose effect may surprise.
        stock: the nearest optimizer and scheduler of torch.
        code: a program in plain PyTorch that trains as the file says.
        seconds: wall time.
        partial: always False; present because results of all commands have it.
        versions: versions of the software by name.
        command: arguments of the command by name.
    """

    source: str
    type: str
    policy: str
    accumulation_steps: int
    microbatch_size: int | None
    effective_batch: int | None
    updates: int
    samples: int | None
    settings: tuple[Setting, ...]
    at: tuple[int, ...]
    rates: tuple[float, ...]
    traps: tuple[Trap, ...]
    stock: Stock
    code: str
    seconds: float
    partial: bool
    versions: dict[str, str]
    command: dict[str, str]
