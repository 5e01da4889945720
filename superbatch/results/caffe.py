"""Meaning of a Caffe solver file in today's terms: the results of `superbatch caffe`."""

from __future__ import annotations

# pyright: strict
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A field of the file.

    Attributes:
        field: Caffe's name of it.
        value: what the file says, or Caffe's default.
        meaning: the same in PyTorch's terms.
    """

    field: str
    value: str
    meaning: str


@dataclass(frozen=True, kw_only=True)
class Trap:
    """Something that the file means and its author may not have meant.

    Attributes:
        field: where it lies.
        text: what happens.
        do: what to do where that is not wanted.
    """

    field: str
    text: str
    do: str


@dataclass(frozen=True, kw_only=True)
class Stock:
    """The nearest optimizer and scheduler of torch itself.

    Attributes:
        optimizer: an expression; ``parameters`` are the model's.
        scheduler: an expression; None where the rate is constant.
        differs: what sets it apart from Caffe, one sentence each; none: it is the same to rounding.
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
    """Meaning of a solver file.

    Attributes:
        source: its name.
        type: of the solver.
        policy: of the learning rate.
        accumulation_steps: micro-batches per update: ``iter_size``.
        microbatch_size: samples that the data layer yields; None: not said.
        effective_batch: samples of an update; None: not said.
        updates: of the run: ``max_iter``.
        samples: of the run, repeated ones included; None: not said.
        settings: what the fields mean.
        at: updates at which the rate is given.
        rates: learning rates at them, of a parameter with ``lr_mult: 1``.
        traps: what may surprise.
        stock: the nearest that torch has itself.
        code: a program in plain PyTorch that trains as the file says.
        seconds: wall time.
        partial: never; for the commands that share the form.
        versions: of what made this: name -> version.
        command: what the user asked for: name of a flag -> value.
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
