"""Options of the commands, as dataclasses: for a call from Python, and as flags of the command line.

The file imports no typer, which a call from Python does not need, and no torch, so that `--help` is fast.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from superbatch.errors import InputError
from superbatch.results.survey import What

# Unit of memory, in lower case -> bytes.
_UNITS = {"": 1, "b": 1} | {
    f"{prefix}{ending}": base**power
    for power, prefix in enumerate("kmgt", start=1)
    for ending, base in (("", 1024), ("ib", 1024), ("b", 1000))
}


def option(
    help: str,
    name: str | None = None,
    *,
    default: Any = None,
    default_typed: Any = None,
    typed: Any = None,
    read: Callable[[Any, str], Any] = lambda value, _: value,
) -> Any:
    """Return a dataclass field that is also an option of the command line.

    Args:
        help: the help text; it states the default if that is None.
        name: the flag, such as `"--lr"`; None: the name of the field with hyphens.
        default: the default of the field.
        default_typed: the default on the command line, if it differs.
        typed: the type on the command line, if it differs from the field's.
        read: converts (the value from the command line, the flag) to the value of the field.
    """
    flag = {"help": help, "name": name, "default": default_typed or default, "typed": typed, "read": read}
    return field(default=default, metadata=flag)


def parse_bytes(text: str, flag: str) -> int:
    """Read a number of bytes. K and KiB are 1024, kB is 1000, likewise M, G and T; without a unit: bytes.

    Examples:
        >>> [parse_bytes(text, "--limit") for text in ("2GiB", "1.5 MB", "16k", "123")]
        [2147483648, 1500000, 16384, 123]
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-z]*)\s*", text.lower())
    count = int(float(match[1]) * _UNITS[match[2]]) if match and match[2] in _UNITS else 0
    if count < 1:  # also for text that is no number, or has an unknown unit
        raise InputError(f"{flag} {text} is not a number of bytes. Write it as 2GiB, 500MB or 123456.")
    return count


def parse_sizes(text: str, flag: str) -> tuple[int, ...]:
    """Read micro-batch sizes that are separated by commas.

    Examples:
        >>> parse_sizes("8, 16,32", "--sizes")
        (8, 16, 32)
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and int(part) for part in parts):
        raise InputError(f"{flag} {text}: sizes are integers of at least 1. Write them as 8,16,32.")
    return tuple(map(int, parts))


OPTIMIZER = "sgd, momentum, adam or adamw, if the recipe offers it (default: the recipe's)"
BATCH_SIZE = "samples of one update (default: the recipe's)"
LEARNING_RATE = "learning rate (default: the recipe's for the optimizer)"
DTYPE = "float32 or float64"
MARGIN = "largest difference of the metric that does not matter, in its unit (default: the recipe's)"
SEED = "seed of the initial weights and the order of samples"
DEVICE = "cpu or cuda"
SAMPLE_RNG = "give every sample its own random numbers"
THREADS = "torch threads (default: torch's own default)"
THREADS_EACH = "torch threads of each process"
WORKERS = "processes (default: 2, or 1 on a machine with one core)"
# On the command line. From Python the default is 1, because workers cannot load a recipe object.
CORES = min(2, os.cpu_count() or 1)
DATA = (
    "data folder: IDX files for mnist; FOLDER/CLASS/*.png for counting; pairs (.tsv, .jsonl) or Python "
    "sources for code-search; Python sources or .txt files for token-means"
)


@dataclass(frozen=True, kw_only=True)
class AdviseOptions:
    """Options of an advice. Values that are None are measured on the recipe, or taken from it."""

    microbatch_size: int | None = option(
        "samples of a micro-batch on one rank (default: the recipe's batch, if it fits)"
    )
    accumulation_steps: int | None = option("micro-batches per update to judge")
    batch_size: int | None = option(
        "samples of the update to judge, on all ranks (default: eight micro-batches)"
    )
    ranks: int = option("number of ranks", default=1)
    noise: float | None = option("noise scale in samples (default: measured on the recipe)")
    # By default both ends are `noise`; without `noise` the upper one is infinite.
    noise_low: float | None = option("lower end of the interval of the noise scale (default: --noise)")
    noise_high: float | None = option(
        "upper end of the interval of the noise scale (default: --noise, or unbounded)"
    )
    microbatch_seconds: float | None = option("micro-batch time in s (default: measured)", "--micro-seconds")
    update_seconds: float | None = option("time of the optimizer's update in s (default: measured)")
    # Once per update. On one rank there is no all-reduce, and it is 0.
    all_reduce_seconds: float | None = option(
        "time of the all-reduce of gradients in s (default: measured under torchrun)"
    )
    parameters: int | None = option(
        "number of the model's parameters, such as 1.3e9 (default: the recipe's)",
        typed=float,
        read=lambda value, _: round(value) if math.isfinite(value) else value,  # the command checks the rest
    )
    optimizer: str | None = option(OPTIMIZER)  # without a recipe: sgd, momentum, adam or adamw
    # This value and the two below it are for the batch to judge if the options determine it (`batch_stated`)
    # or there is no recipe; otherwise for the recipe's batch.
    learning_rate: float | None = option(
        "learning rate (default: the recipe's); for the batch to judge if --batch-size, or --microbatch-size "
        "with --accumulation-steps, is given, else for the recipe's batch",
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
        """True if the options alone determine the batch to judge."""
        return self.batch_size is not None or None not in (self.microbatch_size, self.accumulation_steps)


@dataclass(frozen=True, kw_only=True)
class CompareOptions:
    """Options of a comparison. None stands for the recipe's value."""

    # From Python also a sequence. The real batch is added if it is missing.
    splits: str | Sequence[str] | None = option(
        "KxM (K micro-batches of M samples) or sizes such as 80/15/5, separated by commas "
        "(default: 1x100,5x20,10x10,20x5 for a batch of 100)",
        typed=str,
    )
    updates: int | None = option("updates of each run (default: the recipe's)")
    runs: int = option(  # seeds 0, 1, ...
        "number of seeds; the real batch and each split train once from each", default=10
    )
    dtype: str = option(DTYPE, default="float32")  # in float64, differences by rounding are tiny
    optimizer: str | None = option(OPTIMIZER)
    learning_rate: float | None = option(LEARNING_RATE, "--lr")
    # None: the batch of the splits.
    batch_size: int | None = option("samples of one update; with --average-gradients, of a micro-batch")
    # Each epoch then ends with a short batch: without it the fixed divisor is right.
    include_wrong: bool = option(
        "add two wrong methods: a mean of means, a full window's divisor for a short window", default=False
    )
    margin: float | None = option(MARGIN)
    backend: str = option("torch; for the recipe digits also jax, tensorflow or keras", default="torch")
    threads: int = option(THREADS_EACH, default=1)  # workers would share the cores
    workers: int = option(WORKERS, default_typed=CORES, default=1)  # 1 trains in this process
    data: str | Path | None = option(DATA, typed=Path)


@dataclass(frozen=True, kw_only=True)
class FitOptions:
    """Options of a fit. None stands for the recipe's value."""

    batch_size: int | None = option(BATCH_SIZE)  # the largest micro-batch that is considered
    limit: int | None = option(  # bytes
        "memory limit, on top of the memory in use, such as 2GiB (default: the machine's)",
        typed=str,
        read=parse_bytes,
    )
    optimizer: str | None = option(OPTIMIZER)
    dtype: str = option("float32, float64 or bfloat16", default="float32")  # of weights and data
    sizes: Sequence[int] | None = option(
        "micro-batches to measure, such as 8,16,32 (default: the largest that fits, its half, quarter, ...)",
        typed=str,
        read=parse_sizes,
    )
    device: str = option(DEVICE, default="cpu")
    threads: int | None = option(THREADS)  # times depend on it, so it should be as in training
    seconds: float = option("approximate time limit; sizes beyond it are predicted only", default=30.0)
    data: str | Path | None = option(DATA, typed=Path)


@dataclass(frozen=True, kw_only=True)
class NoiseOptions:
    """Options of a study of the noise. None stands for the recipe's value."""

    batch_size: int | None = option(BATCH_SIZE)
    microbatch_size: int | None = option("samples of a micro-batch (default: an eighth of the batch)")
    updates: int | None = option("length of the run (default: the recipe's)")
    optimizer: str | None = option(OPTIMIZER)
    learning_rate: float | None = option(LEARNING_RATE, "--lr")
    seed: int = option(SEED, default=0)
    threads: int | None = option(THREADS)  # times depend on it, so it should be as in training
    data: str | Path | None = option(DATA, typed=Path)


@dataclass(frozen=True, kw_only=True)
class StudyOptions:
    """Options of a study. None stands for the study's value.

    Examples:
        >>> StudyOptions(runs=2, quick=True).samples is None
        True
    """

    # The seeds are often too few to show anything.
    quick: bool = option("shorter runs and fewer seeds: under a minute", default=False)
    runs: int | None = option("number of seeds (default: the study's own)")  # from 0; coupled: from 100
    samples: int | None = option("samples that each run sees (default: the study's own number)")
    batch_size: int | None = option(
        "samples of an update; momentum: of the large batch; grow-batch, critical-batch: of the first batch"
    )
    learning_rate: float | None = option(
        "learning rate at --batch-size; momentum: at batch 1 (default: the study's)", "--lr"
    )
    optimizer: str | None = option(OPTIMIZER)
    margin: float | None = option(MARGIN)
    tolerance: float | None = option(
        "critical-batch: largest relative difference of the loss that does not matter (default: 0.05)"
    )
    device: str | None = option("coupled: device of the training, such as cuda (default: cpu)")
    threads: int = option(THREADS_EACH, default=1)  # workers would share the cores
    workers: int = option(WORKERS, default_typed=CORES, default=1)  # 1 trains in this process
    data: str | Path | None = option(DATA, typed=Path)


@dataclass(frozen=True, kw_only=True)
class SurveyOptions:
    """Options of a survey study. None stands for the value of the recipe or the optimizer."""

    # From Python also a sequence. The real batch is added if it is missing.
    splits: str | Sequence[str] | None = option(
        "KxM (K micro-batches of M samples) or sizes such as 80/15/5, separated by commas "
        "(default: 10x10,20x5 for a batch of 100)",
        typed=str,
    )
    repeats: int = option("surveys of the real batch and of each split, each from another seed", default=20)
    updates: int = option("points of the ramp, one update each", default=100)
    what: What = option("quantity to survey: lr, momentum or weight_decay", typed=str, default="lr")
    low: float | None = option("first value (default for learning rates: 1e-6 for SGD, 1e-7 for others)")
    high: float | None = option("last value (default for learning rates: 10 for SGD, 1 for others)")
    dtype: str = option(DTYPE, default="float32")  # in float64, differences by rounding are tiny
    optimizer: str | None = option(OPTIMIZER)
    learning_rate: float | None = option("learning rate, if --what is momentum or weight_decay", "--lr")
    batch_size: int | None = option(BATCH_SIZE)  # None: the batch of the splits, or the recipe's
    include_wrong: bool = option("add wrong methods: a missing 1/K and other batch sizes", default=False)
    threads: int = option("torch threads", default=1)
    data: str | Path | None = option(DATA, typed=Path)


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Options of a training. None stands for the recipe's value, or turns the option off."""

    batch_size: int | None = option("samples of one update, on all ranks (default: the recipe's)")
    microbatch_size: int | Literal["auto", "largest"] = option(
        "samples of a micro-batch, auto or largest",
        typed=str,
        read=lambda value, _: int(value) if value.isdecimal() else value,  # the command checks words
        default="auto",
    )
    updates: int | None = option("length of the training (default: the recipe's)")
    optimizer: str | None = option(OPTIMIZER)
    learning_rate: float | None = option(LEARNING_RATE)  # at the start of the schedule
    precision: str = option("float32, float64 or bf16 (autocast)", default="float32")
    clip: float | None = option("largest norm of the gradient (default: none)")
    schedule: str = option("constant; linear or cosine: down to 0 at --updates", default="constant")
    noise: bool = option("measure the noise scale of the gradient", default=False)
    sample_rng: bool = option(SAMPLE_RNG, default=False)  # dropout then does not depend on the split
    checkpoints: Path | None = option(
        "folder; the same command resumes from its newest checkpoint (default: none)"
    )
    every: int = option("updates between checkpoints", default=100)
    keep: int = option("number of newest checkpoints to keep", default=3)
    evaluate_every: int | None = option("updates between evaluations (default: at the end only)")
    # Not --log, which torchrun reads as an abbreviation of its own options.
    log: Path | None = option("file with a row of JSON for each update (default: none)", "--log-file")
    tensorboard: Path | None = option("folder for TensorBoard (default: none)")
    seed: int = option(SEED, default=0)  # a training can only be resumed with the same seed
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
        "reference: batch, splits (another split), or auto (splits if the batch does not fit)", default="auto"
    )
    sample_rng: bool = option(SAMPLE_RNG, default=False)  # makes dropout exact
    data: str | Path | None = option(DATA, typed=Path)
