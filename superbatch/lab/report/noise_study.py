"""Results of `superbatch noise`: the noise scale during a training, and the time to a loss by K."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from superbatch.results.advice import Steps, number_text
from superbatch.results.noise import ASSUMED, ASSUMPTION

from .run import RunReport
from .table import Table, interval_text, or_dash, seconds_text, table_of


@dataclass(frozen=True, kw_only=True)
class NoiseAt:
    """Estimate of the noise scale after a number of updates."""

    update: int
    samples: int  # seen up to this update
    loss: float  # mean over the updates since the last point
    batch_size: float | None  # the noise scale ``B_noise`` in samples; None if it is not determined
    low: float  # lower end of the 95 % interval
    high: float  # upper end of the interval; infinite if it is unbounded
    reason: str | None  # why the noise scale is not determined; None if it is
    # The noise scale under models of Adam's preconditioner, the powers 0 (`batch_size`), 1 and 2 (see
    # `superbatch.results.noise.NoiseOfModel`); None for one that is not determined; empty without Adam.
    by_model: tuple[float | None, ...] = ()


@dataclass(frozen=True, kw_only=True)
class NoiseStudy(RunReport):
    """Results of `superbatch noise` for a recipe."""

    optimizer: str
    learning_rate: float  # constant over the run
    batch_size: int  # samples of one update
    microbatch_size: int  # samples of a micro-batch at most
    updates: int  # of the run
    seed: int  # of the weights and of the order of samples
    threads: int  # of torch
    data_size: int  # samples that batches are drawn from without replacement
    points: tuple[NoiseAt, ...]  # estimates during the run
    noise: float | None  # of the run: progress-weighted harmonic mean over the determined points
    low: float  # the same mean of the lower ends
    high: float  # the same mean of the upper ends
    microbatch_seconds: float  # median time of the forward and backward of a micro-batch
    update_seconds: float  # median time of an update after its last micro-batch
    steps: tuple[Steps, ...]  # time by ascending K, for the run's noise scale and the ends of its interval
    models: tuple[float | None, ...] = ()  # ``B_noise`` of the run under each model, as in `NoiseAt.by_model`

    @property
    def best(self) -> Steps | None:
        """Return the K with the shortest time; None if the noise scale is not determined."""
        known = [each for each in self.steps if each.time is not None]
        return min(known, key=lambda each: each.time or 0.0) if known else None


def band_of(models: Sequence[float | None]) -> tuple[float, float] | None:
    """Return the smallest and the largest number; None if there are fewer than two.

    Examples:
        >>> band_of((3.0, None, 9.0)), band_of((3.0, None))
        ((3.0, 9.0), None)
    """
    known = [each for each in models if each is not None]
    return (min(known), max(known)) if len(known) > 1 else None


def title_of(report: NoiseStudy) -> str:
    """Return the recipe, the updates, the batch and the optimizer of a noise study in one line."""
    return (
        f"{report.recipe}: {report.updates} updates of {report.batch_size} samples in micro-batches of "
        f"{report.microbatch_size}, {report.optimizer} lr {report.learning_rate:g}"
    )


def points_table(report: NoiseStudy, rows: int = 12) -> Table:
    """Return the noise scale during the run, in at most `rows` rows."""
    every = max(1, math.ceil(len(report.points) / rows))
    assumption = "noise scale if {}: a power of Adam's preconditioner"
    return table_of(
        title_of(report),
        report.points[::-every][::-1],
        ("updates", "made so far", lambda row: str(row.update)),
        ("loss", "mean since the row above", lambda row: f"{row.loss:.4g}"),
        (
            "noise scale",
            f"samples of a batch with as much noise as signal, {ASSUMPTION}",
            lambda row: or_dash(row.batch_size, number_text),
        ),
        ("95 % interval", "Fieller's; it may be unbounded", lambda row: interval_text(row.low, row.high)),
        *(
            (f"q = {q}", assumption.format(ASSUMED[q]), partial(_of_model, q))
            for q in range(1, len(report.models))
        ),
        ("remark", "why the noise scale is not determined", lambda row: row.reason or ""),
    )


def _of_model(q: int, row: NoiseAt) -> str:
    # Before Adam's moments are measured, a point has no noise scale by model.
    return or_dash(row.by_model[q] if row.by_model else None, number_text)


def steps_table(report: NoiseStudy) -> Table:
    """Return the time to the same loss by number of micro-batches per update."""
    microbatch, update = seconds_text(report.microbatch_seconds), seconds_text(report.update_seconds)
    return table_of(
        f"Time to the same loss: a micro-batch takes {microbatch}, an update {update}",
        report.steps,
        ("micro-batches", "K, per update", lambda row: str(row.accumulation_steps)),
        ("batch", "samples of one update", lambda row: str(row.batch)),
        (
            "time to target",
            "relative to K = 1: a lower bound",
            lambda row: or_dash(row.time, "{:.2f}".format),
        ),
        ("range", "over the noise scale's interval", lambda row: f"{row.low:.2f} to {row.high:.2f}"),
    )


def findings(report: NoiseStudy) -> list[str]:
    """Return the findings of a noise study as sentences, the noise scale first."""
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
