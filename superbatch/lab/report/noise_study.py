"""Results of `superbatch noise`: the noise scale over a training, and time to target against K."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from superbatch.results.advice import number_text
from superbatch.results.noise import ASSUMED, ASSUMPTION

from .table import Column, Table, interval_text, seconds_text, shown, table_of


@dataclass(frozen=True, kw_only=True)
class NoiseAt:
    """The noise scale as it was known after a number of updates."""

    update: int
    samples: int  # seen until then
    loss: float  # mean over the updates since the last point
    batch_size: float | None  # ``B_noise`` in samples; None: not determined
    low: float  # lower end of the 95 % interval
    high: float  # upper end; infinite when there is none
    reason: str | None  # why it is not determined; None: it is
    # The noise scale under models of Adam's preconditioner, the powers 0 (`batch_size`), 1 and 2 (see
    # `superbatch.results.noise.NoiseOfModel`), None where one is not determined; empty without Adam.
    by_model: tuple[float | None, ...] = ()


@dataclass(frozen=True, kw_only=True)
class AtSteps:
    """Effect of K micro-batches per update on the time to a target loss."""

    accumulation_steps: int  # K
    batch: int  # samples of one update
    time: float | None  # ``W(K) / W(1)`` at the noise scale of the run; None where that is not known
    low: float  # the same at the upper end of its interval, where larger batches cost least
    high: float  # the same at the lower end
    by_model: tuple[float | None, ...] = ()  # time under each of `NoiseStudy.models`


@dataclass(frozen=True, kw_only=True)
class NoiseStudy:
    """Noise of a recipe's gradient in the course of its training."""

    recipe: str
    description: str  # what is trained on what
    optimizer: str
    learning_rate: float  # constant over the run
    batch_size: int  # samples of one update
    microbatch_size: int  # samples of a micro-batch at most
    updates: int  # made
    seed: int  # of the weights and of the order of samples
    threads: int  # of torch
    data_size: int  # samples that batches are drawn from without replacement
    points: tuple[NoiseAt, ...]  # along the run
    noise: float | None  # of the run: progress-weighted harmonic mean of the points that are determined
    low: float  # the same of the lower ends
    high: float  # the same of the upper ends
    microbatch_seconds: float  # forward and backward of a micro-batch; median
    update_seconds: float  # of what follows the last of them; median
    steps: tuple[AtSteps, ...]  # ascending
    seconds: float  # wall time of all this
    partial: bool  # it was interrupted before the end
    versions: dict[str, str]  # of what it ran on: name -> version
    command: dict[str, str]  # what the user asked for: name of a flag -> value
    notes: tuple[str, ...]  # what a reader should know beside the numbers
    models: tuple[float | None, ...] = ()  # ``B_noise`` of the run, as `NoiseAt.by_model`

    @property
    def best(self) -> AtSteps | None:
        """The K with the shortest time to target; None where the noise scale is not known."""
        known = [each for each in self.steps if each.time is not None]
        return min(known, key=lambda each: each.time or 0.0) if known else None


def band_of(models: Sequence[float | None]) -> tuple[float, float] | None:
    """The smallest and the largest number that there is; None where there are fewer than two.

    Examples:
        >>> band_of((3.0, None, 9.0)), band_of((3.0, None))
        ((3.0, 9.0), None)
    """
    known = [each for each in models if each is not None]
    return (min(known), max(known)) if len(known) > 1 else None


def title_of(report: NoiseStudy) -> str:
    """A study in one line."""
    return (
        f"{report.recipe}: {report.updates} updates of {report.batch_size} samples in micro-batches of "
        f"{report.microbatch_size}, {report.optimizer} lr {report.learning_rate:g}"
    )


def points_table(report: NoiseStudy, rows: int = 12) -> Table:
    """The noise scale along the run."""
    columns = (
        Column("updates", "made so far"),
        Column("loss", "mean since the row before"),
        Column("noise scale", f"samples of a batch with as much noise as signal, {ASSUMPTION}"),
        Column("95 % interval", "Fieller's; it may have no upper end"),
        *(
            Column(f"q = {power}", f"noise scale if {assumed}: a power of Adam's preconditioner")
            for power, assumed in list(ASSUMED.items())[1 : len(report.models)]
        ),
        Column("remark", "why there is no number"),
    )
    every = max(1, math.ceil(len(report.points) / rows))
    # A point from before the first moments of Adam are known has no numbers by model.
    unknown = (None,) * len(report.models)
    lines = tuple(
        (
            str(each.update),
            f"{each.loss:.4g}",
            shown(each.batch_size, number_text),
            interval_text(each.low, each.high),
            *(shown(value, number_text) for value in (each.by_model or unknown)[1:]),
            each.reason or "",
        )
        for each in report.points[::-every][::-1]
    )
    return Table(title_of(report), columns, lines)


def steps_table(report: NoiseStudy) -> Table:
    """Time to target against K."""
    microbatch, update = seconds_text(report.microbatch_seconds), seconds_text(report.update_seconds)
    return table_of(
        f"Time to the same loss: a micro-batch takes {microbatch}, an update {update}",
        report.steps,
        ("micro-batches", "of an update: K", lambda each: str(each.accumulation_steps)),
        ("batch", "samples of one update", lambda each: str(each.batch)),
        ("time to target", "against K = 1: a lower bound", lambda each: shown(each.time, "{:.2f}".format)),
        ("range", "over the noise scale's interval", lambda each: f"{each.low:.2f} to {each.high:.2f}"),
    )


def findings(report: NoiseStudy) -> list[str]:
    """Return the findings of a study in words, the answer first."""
    if report.noise is None:
        known = max((each.low for each in report.points if each.reason), default=0.0)
        least = f"; it is above about {number_text(known)} samples" if known >= 1 else ""
        return [
            f"The noise scale is not determined{least}, {ASSUMPTION}: give more --updates, or a larger "
            "--batch-size, which shows more of the signal.",
            *report.notes,
        ]
    ratio, best = report.noise / report.batch_size, report.best
    side = "more noise than signal" if ratio > 1 else "more signal than noise"
    interval = interval_text(report.low, report.high)
    sentences = [
        f"Over this run the noise scale was {number_text(report.noise)} samples ({interval}), {ASSUMPTION}: "
        f"a batch of {report.batch_size} has {side} ({ratio:.2g} to 1)."
    ]
    if report.models:
        scales = ", ".join("not determined" if each is None else number_text(each) for each in report.models)
        sentences.append(
            f"With Adam's preconditioner to the power q = 0, 1, 2 the noise scale is {scales}; q = 0, the "
            "plain gradient, is used."
        )
    if best is not None:
        alone = best.accumulation_steps == 1
        gain = "accumulation costs time here" if alone else f"in {best.time:.2f} of the time of K = 1"
        sentences.append(f"Fastest is K = {best.accumulation_steps}, a batch of {best.batch}: {gain}.")
    return [*sentences, *report.notes]
