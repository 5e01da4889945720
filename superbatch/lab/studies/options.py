"""Options of the studies: each stands here once, and the command line makes its flags of them.

The file imports no typer, which a call of a study from Python does not need, and no torch, so that `--help`
answers at once.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from superbatch.results.survey import What

from .quantities import parse_bytes, parse_sizes


def option(
    help: str,
    name: str | None = None,
    *,
    default: Any = None,
    default_typed: Any = None,
    typed: Any = None,
    read: Callable[[Any, str], Any] = lambda value, _: value,
) -> Any:
    """Make a field of options that is an option of the command too.

    Args:
        help: of the command line; it names the default where the field's own says nothing.
        name: where it is not made of the field's, such as `"--lr"`.
        default: of the field.
        default_typed: of the command line, where that is another.
        typed: type on the command line, where the field takes more, or `read` makes its value.
        read: takes what was typed and the name of the option, and returns the value of the field.
    """
    flag = {"help": help, "name": name, "default": default_typed or default, "typed": typed, "read": read}
    return field(default=default, metadata=flag)


def _size(value: str, _: str) -> int | str:
    """Read a size, or the word for one; other words are refused with the other options."""
    return int(value) if value.isdecimal() else value


def _count(value: float, _: str) -> float:
    """Round a count, which may be written as 1.3e9; what is not finite is refused with the other options."""
    return round(value) if math.isfinite(value) else value


OPTIMIZER = "sgd, momentum, adam or adamw, as the recipe offers"
BATCH_SIZE = "samples of one update (default: the recipe's)"
LEARNING_RATE = "learning rate (default: the recipe's for the optimizer)"
DTYPE = "float32 or float64"
MARGIN = "a difference of the metric that does not matter, in its unit"
SEED = "seed of the initial weights and the order of samples"
DEVICE = "cpu or cuda"
SAMPLE_RNG = "give every sample its own random numbers"
THREADS = "torch threads (default: torch's own default)"
THREADS_EACH = "torch threads of each process"
WORKERS = "processes (default: 2, where the machine has two cores)"
CORES = min(
    2, os.cpu_count() or 1
)  # from Python 1: a worker loads the recipe by a name, which it may not have
DATA = (
    "data folder: IDX files for mnist; FOLDER/CLASS/*.png for counting; pairs (.tsv, .jsonl) or Python "
    "sources for code-search; Python sources or .txt files for token-means"
)


@dataclass(frozen=True, kw_only=True)
class AdviseOptions:
    """Options of an advice; those that are None are measured on the recipe, or taken from it."""

    microbatch_size: int | None = option(
        "samples of a micro-batch on one rank (default: the recipe's batch, if it fits)"
    )
    accumulation_steps: int | None = option("micro-batches per update to judge")
    batch_size: int | None = option(
        "samples of the update to judge, on all ranks (default: eight micro-batches)"
    )
    ranks: int = option("number of ranks", default=1)  # that work at the same time
    noise: float | None = option("noise scale in samples (default: measured on the recipe)")
    # The ends are `noise` where that is given; else the upper one is infinite.
    noise_low: float | None = option("lower end of the interval of the noise scale")
    noise_high: float | None = option("upper end of the interval of the noise scale")
    microbatch_seconds: float | None = option("time of a micro-batch (default: measured)", "--micro-seconds")
    update_seconds: float | None = option("time of the optimizer's update (default: measured)")
    # Once per update; where the command runs on one rank there is nothing to measure, and it is 0.
    all_reduce_seconds: float | None = option(
        "time of the all-reduce of gradients (default: measured under torchrun)"
    )
    parameters: int | None = option(
        "parameters of the model, such as 1.3e9 (default: the recipe's)", typed=float, read=_count
    )
    optimizer: str | None = option(OPTIMIZER)  # without a recipe sgd, momentum, adam or adamw
    # For the batch in question, where that is stated (`batch_stated`) or there is no recipe; else for the
    # recipe's. So are the two below it.
    learning_rate: float | None = option(
        "learning rate for the batch to judge if given, else for the recipe's batch (default: the recipe's)",
        "--lr",
    )
    beta2: float | None = option("beta2 of Adam, for the same batch as --lr")
    weight_decay: float | None = option("weight decay, for the same batch as --lr")
    device: str = option(DEVICE, default="cpu")
    threads: int | None = option(THREADS)
    updates: int | None = option("updates over which the noise is measured (default: the recipe's)")
    seconds: float = option("approximate time limit for measuring the noise", default=60.0)
    data: str | Path | None = option(DATA, typed=Path)

    @property
    def batch_stated(self) -> bool:
        """True if these options alone determine the batch in question."""
        return self.batch_size is not None or None not in (self.microbatch_size, self.accumulation_steps)


@dataclass(frozen=True, kw_only=True)
class CompareOptions:
    """Options of a comparison; None stands for the recipe's own value."""

    # From Python a sequence too. The real batch is added where it is missing.
    splits: str | Sequence[str] | None = option(
        "KxM (K micro-batches of M samples) or sizes such as 80/15/5, separated by commas "
        "(default: 1x100,5x20,10x10,20x5 for a batch of 100)",
        typed=str,
    )
    updates: int | None = option("updates of each run (default: the recipe's)")
    runs: int = option("seeds: each gives one run of every arm", default=10)  # 0, 1, ...
    dtype: str = option(DTYPE, default="float32")  # float64 tells rounding from a mistake
    optimizer: str | None = option(OPTIMIZER)
    learning_rate: float | None = option(LEARNING_RATE, "--lr")
    # None: what the splits make.
    batch_size: int | None = option("samples of one update; with --average-gradients: of a micro-batch")
    # Each epoch has a tail then, without which the fixed divisor is right.
    include_wrong: bool = option("add two wrong ways: mean of means, fixed tail divisor", default=False)
    margin: float | None = option(MARGIN)
    backend: str = option("torch; for the recipe digits also jax, tensorflow or keras", default="torch")
    threads: int = option(THREADS_EACH, default=1)  # workers would share the cores
    workers: int = option(WORKERS, default_typed=CORES, default=1)  # 1 trains in this process
    data: str | Path | None = option(DATA, typed=Path)


@dataclass(frozen=True, kw_only=True)
class FitOptions:
    """Options of a fit; None stands for the recipe's own value."""

    batch_size: int | None = option(BATCH_SIZE)  # no micro-batch is larger
    limit: int | None = option(  # bytes
        "memory limit, beyond memory in use, such as 2GiB or 500MB (default: the machine's)",
        typed=str,
        read=parse_bytes,
    )
    optimizer: str | None = option(OPTIMIZER)
    dtype: str = option("float32, float64 or bfloat16", default="float32")  # of weights and data
    sizes: Sequence[int] | None = option(
        "micro-batches to measure, such as 8,16,32 (default: the largest that fits and its halves)",
        typed=str,
        read=parse_sizes,
    )
    device: str = option(DEVICE, default="cpu")
    threads: int | None = option(THREADS)  # as in training: times are of as many threads
    seconds: float = option("approximate time limit; sizes beyond it are predicted only", default=30.0)
    data: str | Path | None = option(DATA, typed=Path)


@dataclass(frozen=True, kw_only=True)
class NoiseOptions:
    """Options of a study of the noise; None stands for the recipe's own value."""

    batch_size: int | None = option(BATCH_SIZE)
    microbatch_size: int | None = option("samples of a micro-batch (default: an eighth of the batch)")
    updates: int | None = option("length of the run (default: the recipe's)")
    optimizer: str | None = option(OPTIMIZER)
    learning_rate: float | None = option(LEARNING_RATE, "--lr")
    seed: int = option(SEED, default=0)
    threads: int | None = option(THREADS)  # as in training: times are of as many threads
    data: str | Path | None = option(DATA, typed=Path)


@dataclass(frozen=True, kw_only=True)
class StudyOptions:
    """Options of a study; None stands for the study's own value.

    Examples:
        >>> StudyOptions(runs=2, quick=True).samples is None
        True
    """

    # Often too few seeds to show anything.
    quick: bool = option("shorter runs and fewer seeds: under a minute", default=False)
    runs: int | None = option("seeds (default: the study's own number)")  # from 0; of coupled from 100
    samples: int | None = option("samples that each run sees (default: the study's own number)")
    batch_size: int | None = option(
        "momentum: the large batch; grow-batch, critical-batch: the first batch; splits, survey: the batch"
    )
    learning_rate: float | None = option(
        "learning rate at --batch-size; momentum: at batch 1 (default: the study's)", "--lr"
    )
    optimizer: str | None = option(OPTIMIZER)
    margin: float | None = option(MARGIN)
    tolerance: float | None = option("a relative difference of the loss that does not matter, such as 0.02")
    device: str | None = option("coupled: to train on, such as cuda (default: cpu)")
    threads: int = option(THREADS_EACH, default=1)  # workers would share the cores
    workers: int = option(WORKERS, default_typed=CORES, default=1)  # 1 trains in this process
    data: str | Path | None = option(DATA, typed=Path)


@dataclass(frozen=True, kw_only=True)
class SurveyOptions:
    """Options of a survey study; None stands for the recipe's own value, or the optimizer's."""

    # From Python a sequence too. The real batch is added where it is missing.
    splits: str | Sequence[str] | None = option(
        "KxM or sizes such as 80/15/5, separated by commas (default: 10x10,20x5 for a batch of 100)",
        typed=str,
    )
    repeats: int = option("surveys of each arm, with different seeds", default=20)
    updates: int = option("points of the ramp, one update each", default=100)
    what: What = option("quantity to survey: lr, momentum or weight_decay", typed=str, default="lr")
    low: float | None = option("first value (default: 1e-6 for SGD's rate, 1e-7 for others')")
    high: float | None = option("last value (default: 10 for SGD's rate, 1 for others')")
    dtype: str = option(DTYPE, default="float32")  # float64 tells rounding from a mistake
    optimizer: str | None = option(OPTIMIZER)
    learning_rate: float | None = option("learning rate, if --what is momentum or weight_decay", "--lr")
    batch_size: int | None = option(BATCH_SIZE)  # None: what the splits make, too
    include_wrong: bool = option("add wrong arms: a missing 1/K and other batch sizes", default=False)
    threads: int = option("torch threads", default=1)
    data: str | Path | None = option(DATA, typed=Path)


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Options of a training; None stands for the recipe's own value, or for leaving it out."""

    batch_size: int | None = option("samples of one update, on all ranks (default: the recipe's)")
    microbatch_size: int | Literal["auto", "largest"] = option(
        "samples of a micro-batch, auto or largest", typed=str, read=_size, default="auto"
    )
    updates: int | None = option("length of the training (default: the recipe's)")
    optimizer: str | None = option(OPTIMIZER)
    learning_rate: float | None = option(LEARNING_RATE)  # at the start of the schedule
    precision: str = option("float32, float64 or bf16 (autocast)", default="float32")
    clip: float | None = option("largest norm of the gradient (default: none)")
    schedule: str = option("constant; linear or cosine: down to 0 at --updates", default="constant")
    noise: bool = option("measure the noise scale of the gradient", default=False)
    sample_rng: bool = option(SAMPLE_RNG, default=False)  # then no split changes the dropout
    checkpoints: Path | None = option(
        "folder; the same command resumes from its newest checkpoint (default: none)"
    )
    every: int = option("updates between checkpoints", default=100)
    keep: int = option("checkpoints that stay", default=3)  # the newest
    evaluate_every: int | None = option("updates between evaluations (default: at the end alone)")
    # Not --log, which torchrun takes for one of its own options, cut short.
    log: Path | None = option("file with a row of JSON for each update (default: none)", "--log-file")
    tensorboard: Path | None = option("folder for TensorBoard (default: none)")
    seed: int = option(SEED, default=0)  # a training is resumed with its own seed only
    device: str = option(DEVICE, default="cpu")
    data: str | Path | None = option(DATA, typed=Path)


@dataclass(frozen=True, kw_only=True)
class VerifyOptions:
    """Options of the verification of a recipe."""

    microbatch_size: int | None = option(
        "samples of a micro-batch (default: a third of the batch, rounded up)"
    )
    batch_size: int | None = option(BATCH_SIZE)
    seed: int = option(SEED, default=0)
    dtype: str = option("own (the model's), float64, or both", default="both")
    against: str = option(
        "batch, splits (two splits), or auto (splits if the batch does not fit)", default="auto"
    )
    sample_rng: bool = option(SAMPLE_RNG, default=False)  # makes dropout exact
    data: str | Path | None = option(DATA, typed=Path)
