"""The studies of growing and critical batches: direction of the effects, and conclusions."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace
from typing import Any

import pytest

from superbatch.lab import plot
from superbatch.lab.report.study import Study, StudyArm
from superbatch.lab.report.study_text import study_table
from superbatch.lab.studies import study_critical_batch, study_grow_batch
from superbatch.lab.studies.study import Options, study
from superbatch.results.noise import ASSUMPTION
from superbatch.tuning.growing import GrowingBatch
from tests.studies import own_recipe
from tests.studies.planted import METRIC, around, planted


def ratio_of_losses(report: Study) -> float:
    return next(test.difference for test in report.tests if test.first == "grow the batch" and test.ratio)


def test_growing_the_batch_reaches_the_loss_in_fewer_updates(grown: Study) -> None:
    made = {arm.name: arm.mean("updates") or math.nan for arm in grown.arms}
    assert made["constant rate"] == made["decay the rate"] == 400
    assert made["grow the batch"] < 0.65 * made["decay the rate"]
    assert {arm.mean("samples") for arm in grown.arms} == {1200}
    assert ratio_of_losses(grown) == pytest.approx(1.0, abs=0.1)
    constant = next(test for test in grown.tests if test.first == "constant rate")
    assert constant.difference > 1.1, "the premise: noise keeps the loss of a constant rate higher"
    assert [len(run.curve) for arm in grown.arms for run in arm.runs] == [len(grown.curve_at)] * 6


def test_a_schedule_applied_twice_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the mutant the batch grows and the rate decays as well."""
    right = GrowingBatch.rate
    monkeypatch.setattr(GrowingBatch, "rate", lambda self, update: right(self, update) / self(update))
    report = study("grow-batch", own_recipe.plane(), Options(runs=2, samples=600, learning_rate=0.02))
    monkeypatch.undo()
    kept = study("grow-batch", own_recipe.plane(), Options(runs=2, samples=600, learning_rate=0.02))
    assert abs(math.log(ratio_of_losses(kept))) < 0.5 * abs(math.log(ratio_of_losses(report)))


@pytest.mark.parametrize(
    ("loss", "accuracy", "constant", "start", "end"),
    [
        (1.0, 97.5, 2.0, "Growing the batch acts like decaying the rate", "test accuracy 0."),
        (1.0, 97.5, 1.0, "Growing the batch acts like decaying the rate", "so the schedule hardly matters."),
        (1.5, 97.5, 2.0, "Not shown to be the same", ""),
        (1.0, 95.0, 2.0, "Not shown to be the same", ""),
    ],
)
def test_grow_batch_concludes_from_the_numbers(
    loss: float, accuracy: float, constant: float, start: str, end: str
) -> None:
    arms = tuple(
        planted(
            name,
            {
                "training loss": around(0.01 * factor),
                "test accuracy, %": around(each, 0.0005),
                "updates": [made] * 6,
            },
        )
        for name, factor, each, made in (
            ("constant rate", constant, 97.5, 4000.0),
            ("decay the rate", 1.0, 97.5, 4000.0),
            ("grow the batch", loss, accuracy, 2240.0),
        )
    )
    conclusion = study_grow_batch.conclude(arms, metric=METRIC, margin=0.5).conclusion
    assert conclusion.startswith(start)
    assert conclusion.endswith(end)
    assert "2,240 updates instead of 4,000" in conclusion


def test_a_larger_batch_needs_more_samples() -> None:
    report = study("critical-batch", own_recipe.plane(), Options(runs=2, samples=800, learning_rate=0.01))
    assert [arm.name for arm in report.arms] == [f"batch {k}" for k in (1, 2, 4, 8, 16)]
    losses = [arm.mean("smoothed loss") or math.nan for arm in report.arms]
    assert losses[-1] > 1.1 * losses[0], "the premise: the largest is too large"
    needed = [arm.mean("samples needed, x") or math.nan for arm in report.arms]
    assert needed[0] == 1.0
    assert needed[-1] > max(needed[:3])
    rates = [arm.mean("lr") for arm in report.arms]
    assert rates == pytest.approx([0.01 * k for k in (1, 2, 4, 8, 16)]), "linear for SGD"
    predicted = [arm.facts.get("by the noise scale, x") for arm in report.arms]
    if None not in predicted:
        assert predicted == sorted(predicted)  # pyright: ignore[reportArgumentType]  (none of them is None)


def test_the_noise_scale_is_measured_in_every_window() -> None:
    """For so small a model a meter measures one window in ten by default: too few of 64."""
    recipe = own_recipe.plane()
    noise = study_critical_batch.noise_at(recipe, recipe.model(0), 2, seed=0)
    assert noise.windows == study_critical_batch.NOISE_WINDOWS
    assert noise.batch_size is not None


def planted_critical(
    factors: tuple[float, ...], *, signal: float = 1.0, signals: list[float] | None = None
) -> tuple[StudyArm, ...]:
    base = {"signal": signals or around(signal), "variance": around(64.0)}
    return tuple(
        planted(
            f"batch {8 * k}",
            {"smoothed loss": around(factor, 0.001), "samples needed, x": around(factor)}
            | (base if k == 1 else {}),
        )
        for k, factor in zip((1, 2, 4, 8, 16), factors, strict=True)
    )


def conclude_critical(factors: tuple[float, ...], **noise: Any) -> str:
    arms = planted_critical(factors, **noise)
    return study_critical_batch.conclude(arms, batch=8, tolerance=0.05).conclusion


def test_the_noise_scale_predicts_one_number_in_words_table_and_picture(momentum: Study) -> None:
    """The noise scales of the seeds differ much, so mean and median of single predictions would differ."""

    arms = planted_critical((1.0, 1.0, 1.01, 1.2, 1.5), signals=[0.5, 0.7, 1.5, 2.0, 0.9, 0.6])
    found = study_critical_batch.conclude(arms, batch=8, tolerance=0.05)
    signals, variance = arms[0].values("signal"), arms[0].values("variance")
    scale = sum(variance) / sum(signals)
    expected = (1 + 64 / scale) / (1 + 8 / scale)
    alone = [(1 + 64 * s / v) / (1 + 8 * s / v) for s, v in zip(signals, variance, strict=True)]
    assert min(abs(each(alone) - expected) for each in (statistics.fmean, statistics.median)) > 0.01
    assert f"batch 64 needs x {expected:.2f} the samples, measured x 1.20 (median)" in found.conclusion
    assert found.facts["batch 64"] == pytest.approx({study_critical_batch.PREDICTED: expected})
    merged = tuple(replace(arm, facts=dict(found.facts[arm.name])) for arm in arms)
    report = replace(momentum, name="critical-batch", arms=merged, quantities=study_critical_batch.QUANTITIES)
    row = study_table(report).rows[3]
    assert row[0] == "batch 64" and row[-1] == f"{expected:.2f}"
    lines = {line.get_label(): line for line in plot.study(report).axes[1].get_lines()}
    drawn = next(line for label, line in lines.items() if "predicted" in str(label))
    assert [y for x, y in drawn.get_xydata().tolist() if x == 64] == pytest.approx([expected])  # pyright: ignore[reportAttributeAccessIssue]  (an array)


def test_the_plot_names_arms_that_diverge(momentum: Study) -> None:

    metric = momentum.quantities[0].name

    def lost(arm: StudyArm, seeds: set[int]) -> StudyArm:
        runs = [
            replace(run, values={metric: math.nan, "training loss": math.nan}) if run.seed in seeds else run
            for run in arm.runs
        ]
        return replace(arm, runs=tuple(runs))

    assert {run.seed for run in momentum.arms[0].runs} == {0, 1}, "premise"
    first, second, *others, last = momentum.arms
    report = replace(momentum, arms=(first, lost(second, {1}), *others, lost(last, {0, 1})))
    said = [[text.get_text() for text in axes.texts] for axes in plot.study(report).axes]
    assert said[0].count("diverged") == 1 and said[0].count("1 of 2 diverged") == 1
    assert said[1].count("diverged") == 1 and said[1].count("1 of 2 diverged") == 1
    assert not any("nan" in text for texts in said for text in texts)


def test_critical_batch_concludes_from_the_numbers() -> None:
    text = conclude_critical((1.0, 1.0, 1.01, 1.2, 1.5))
    assert text.startswith("The critical batch by branching is 32, while batch 64 is at x 1.2")
    # 64 samples of noise: (1 + 64/64) / (1 + 8/64).
    assert f"64 samples {ASSUMPTION}, says that batch 64 needs x 1.78 the samples, measured x 1.2" in text
    assert conclude_critical((1.0, 1.1, 1.0, 1.0, 1.0)).startswith("The critical batch by branching is 8,")
    # The interval contains the margin: neither equality nor difference is shown.
    assert conclude_critical((1.0, 1.0, 1.01, 1.05, 1.5)).startswith(
        "The critical batch by branching is at least 32,"
    )
    assert conclude_critical((1.0,) * 5).startswith("The critical batch by branching is at least 128;")
    assert conclude_critical((1.0, 0.8, 0.7, 0.7, 0.7)).startswith(
        "The critical batch by branching is at least 128;"
    )
    assert "not determined" in conclude_critical((1.0,) * 5, signal=-1.0)
    unsure = conclude_critical((1.0,) * 5, signals=[3.0, -2.0, 1.0, -1.0, 2.0, 0.5])
    assert "not determined" in unsure, "the positive mean is not significant"
    nothing = tuple(planted(f"batch {k}") for k in (1, 2, 4, 8, 16))
    found = study_critical_batch.conclude(nothing, batch=1, tolerance=0.05)
    assert found.conclusion == "Too few runs were finished to conclude anything."
