"""The studies at a tiny size: that they run, which way they point, and what they conclude from."""

from __future__ import annotations

import math
import re
import statistics
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from superbatch.errors import InputError
from superbatch.lab import plot
from superbatch.lab.report.json import to_json
from superbatch.lab.report.study import Quantity, Study, StudyArm, StudyRun
from superbatch.lab.report.study_text import equivalence_table, study_table
from superbatch.lab.studies import study_critical_batch, study_grow_batch, study_momentum, study_precision
from superbatch.lab.studies.catalogue import DOCUMENTATION, STUDIES
from superbatch.lab.studies.shared_options import Interrupted
from superbatch.lab.studies.study import Options, Progress, study
from superbatch.lab.studies.study_common import compared, stream
from superbatch.results.noise import ASSUMPTION
from superbatch.tuning.growing import GrowingBatch
from tests.report_json import from_json
from tests.studies import own_recipe

PLANE = f"{own_recipe.__file__}:plane"
METRIC = "test accuracy, %"


def planted(
    name: str, values: dict[str, list[float]] | None = None, facts: dict[str, float] | None = None
) -> StudyArm:
    """An arm with these values, one per seed."""
    values = values or {}
    runs = tuple(
        StudyRun(seed=seed, values={key: each[seed] for key, each in values.items()})
        for seed in range(len(next(iter(values.values()), [])))
    )
    return StudyArm(name=name, how="planted", facts=facts or {}, runs=runs)


def around(middle: float, spread: float = 0.01, count: int = 6) -> list[float]:
    """Values near a number, of relative spread; none the same, as runs are."""
    return [middle * (1 + spread * math.sin(3 * seed + middle)) for seed in range(count)]


# ------------------------------------------------------------------------------------------------ statistics


def test_tests_are_made_on_pairs_of_one_seed() -> None:
    """The seeds differ by far more than the margin, the pairs do not."""
    levels = [80.0, 90.0, 95.0, 70.0]
    second = planted("B", {"accuracy": levels})
    first = planted(
        "A", {"accuracy": [level + d for level, d in zip(levels, (0.1, -0.1, 0.05, 0.0), strict=True)]}
    )
    shuffled = StudyArm(name="A", how="", facts={}, runs=first.runs[::-1])
    for arm in (first, shuffled):
        test = compared(arm, second, "accuracy", margin=0.5)
        assert test is not None and test.result.equivalent
        assert test.difference == pytest.approx(0.0125)
    worse = planted("A", {"accuracy": [level - 1 for level in levels]})
    test = compared(worse, second, "accuracy", margin=0.5)
    assert test is not None and not test.result.equivalent


def test_a_ratio_is_tested_by_its_logarithm() -> None:
    first, second = planted("A", {"loss": [1.2, 2.42, 4.8]}), planted("B", {"loss": [1.0, 2.0, 4.0]})
    test = compared(first, second, "loss", margin=1.1, ratio=True)
    assert test is not None
    assert test.difference == pytest.approx((1.2 * 1.21 * 1.2) ** (1 / 3))
    assert test.margin == pytest.approx(1.1)
    assert not test.result.equivalent
    test = compared(first, second, "loss", margin=1.3, ratio=True)
    assert test is not None and test.result.equivalent


def test_what_cannot_be_compared_is_not_equivalent() -> None:
    one, diverged = planted("A", {"loss": [1.0]}), planted("A", {"loss": [1.0, math.nan, 1.0]})
    base = planted("B", {"loss": [1.0, 1.0, 1.0]})
    assert compared(one, base, "loss", margin=1.1, ratio=True) is None
    for ratio in (True, False):
        test = compared(diverged, base, "loss", margin=1.1, ratio=ratio)
        assert test is not None and not test.result.equivalent


def test_a_longer_stream_begins_like_a_shorter_one() -> None:
    short, long = stream(50, 70, seed=3), stream(50, 300, seed=3)
    assert short.equal(long[:70])
    assert sorted(long[50:100].tolist()) == list(range(50)), "each round is a permutation"
    assert not short.equal(stream(50, 70, seed=4))


# ------------------------------------------------------------------------------------------------ momentum


@pytest.mark.parametrize(
    ("lr", "momentum", "h"), [(0.01, 0.0, 1.0), (0.05, 0.9, 2.0), (0.001, 0.99, 1.0), (1.8, 0.9, 1.0)]
)
def test_the_variance_of_heavy_ball_is_that_of_its_covariance_equation(
    lr: float, momentum: float, h: float
) -> None:
    """(v, x) -> (m v + h x + n, x - lr v'): the covariance that one update leaves as it is."""
    step = torch.tensor([[momentum, h], [-lr * momentum, 1 - lr * h]], dtype=torch.float64)
    noise = torch.tensor([[1.0, -lr]], dtype=torch.float64)
    kicked = noise.T @ noise
    stay = torch.linalg.solve(
        torch.eye(4, dtype=torch.float64) - torch.kron(step, step), kicked.flatten()
    ).reshape(2, 2)
    assert torch.allclose(step @ stay @ step.T + kicked, stay), "the premise: it is stationary"
    assert study_momentum.heavy_ball_variance(lr, momentum, h, 1.0) == pytest.approx(
        float(stay[1, 1]), rel=1e-8
    )


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_variance_of_heavy_ball_is_that_of_torch(momentum: float) -> None:
    """200 000 chains of torch.optim.SGD, 4 nearly independent looks: a standard error of 0.16 %."""
    torch.manual_seed(0)
    h, lr, noise = 2.0, 0.2 * (1 - momentum), 0.5
    x = torch.zeros(200_000, requires_grad=True)
    optimizer = torch.optim.SGD([x], lr=lr, momentum=momentum)
    looks = []
    for update in range(1, 201):
        x.grad = (h * x + noise**0.5 * torch.randn_like(x)).detach()
        optimizer.step()
        if update >= 80 and update % 40 == 0:
            looks.append(x.detach().square().mean().item())
    expected = study_momentum.heavy_ball_variance(lr, momentum, h, noise)
    assert sum(looks) / len(looks) == pytest.approx(expected, rel=0.01)


def test_momentum_does_not_lower_the_noise_at_a_fixed_effective_rate() -> None:
    variance = partial(study_momentum.heavy_ball_variance, curvature=1.0, noise=1.0)
    for m in (0.9, 0.99):
        assert variance(0.01 * (1 - m), m) == pytest.approx(variance(0.01, 0.0), rel=0.005)
    # Where the rate is near what is stable it does: the numbers of section 5.
    assert [round(variance(1 - m, m), 3) for m in (0.0, 0.9, 0.99)] == [1.0, 0.514, 0.501]
    assert [round(variance(1.8 * (1 - m), m), 2) for m in (0.0, 0.9, 0.99)] == [9.0, 0.94, 0.9]
    assert variance(2.1, 0.0) == math.inf


@pytest.fixture(scope="module")
def momentum() -> Study:
    return study("momentum", own_recipe.plane(), Options(runs=2, samples=800, learning_rate=0.004))


def test_momentum_points_the_right_way(momentum: Study) -> None:
    facts = {arm.name: arm.facts for arm in momentum.arms}
    assert facts["A"]["updates"] == 16 * facts["D"]["updates"] == facts["F"]["updates"] == 800
    assert facts["F"]["samples"] == 16 * facts["A"]["samples"]
    error = {arm.name: arm.mean("squared error") for arm in momentum.arms}
    assert all(value is not None and value < 0.5 for name, value in error.items() if name in "ABCDF"), error
    lost = error["G"]
    assert lost is not None and not lost < 3 * max(error[name] or 0 for name in "ABCDF"), "G is too hot"
    noise = {arm.name: arm.mean("noise excess") or math.nan for arm in momentum.arms}
    # As large a batch at the same rate has a sixteenth of the noise; momentum has all of it.
    assert noise["F"] < noise["A"] / 4
    assert noise["A"] / 2.5 < noise["C"] < 2.5 * noise["A"]


def conclude_momentum(
    c_noise: float, c_accuracy: float = 97.0, spread: float = 0.05, large: float = 6e-4
) -> str:
    noise = {"A": 1e-2, "B": 1e-2, "C": c_noise, "D": 1e-2, "E": 1e-1, "F": large, "G": 9.0}
    arms = tuple(
        planted(
            name,
            {
                "test accuracy, %": around(c_accuracy if name == "C" else 97.0, 0.0005),
                "noise excess": around(value, spread if name == "C" else 0.05),
            },
            {"updates": 100.0 if name in "DE" else 1600.0},
        )
        for name, value in noise.items()
    )
    return study_momentum.find(arms, metric=METRIC, margin=0.5, recipe=own_recipe.plane()).conclusion


def test_momentum_concludes_from_the_numbers() -> None:
    assert conclude_momentum(1e-2).startswith(
        "Momentum 0.99 with lr/(1-m) kept is the small batch, not a large"
    )
    assert conclude_momentum(1e-2 / 199).startswith(
        "Momentum 0.99 with lr/(1-m) kept acts like a large batch"
    )
    assert conclude_momentum(2.5e-3, spread=0.9).startswith("Undecided"), "half way, and very noisy"
    assert conclude_momentum(1e-2, c_accuracy=95.0).startswith("Undecided")
    alike = conclude_momentum(1e-2, large=0.9e-2)
    assert alike.startswith("Undecided"), "if the large batch is as noisy, noise cannot tell"
    assert "no clearly lower noise" in alike
    nothing = tuple(planted(name) for name in "ABCDEFG")
    found = study_momentum.find(nothing, metric=METRIC, margin=0.5, recipe=own_recipe.plane())
    assert found.conclusion == "Too few runs were finished to conclude anything."


# ------------------------------------------------------------------------------------------------ grow-batch


@pytest.fixture(scope="module")
def grown() -> Study:
    return study("grow-batch", own_recipe.plane(), Options(runs=2, samples=1200, learning_rate=0.1))


def ratio_of_losses(report: Study) -> float:
    return next(test.difference for test in report.tests if test.first == "grow the batch" and test.ratio)


def test_growing_the_batch_makes_fewer_updates_to_the_same_loss(grown: Study) -> None:
    made = {arm.name: arm.mean("updates") or math.nan for arm in grown.arms}
    assert made["constant rate"] == made["decay the rate"] == 400
    assert made["grow the batch"] < 0.65 * made["decay the rate"]
    assert {arm.mean("samples") for arm in grown.arms} == {1200}
    assert ratio_of_losses(grown) == pytest.approx(1.0, abs=0.1)
    constant = next(test for test in grown.tests if test.first == "constant rate")
    assert constant.difference > 1.1, "the premise: noise keeps a rate that stays above"
    assert [len(run.curve) for arm in grown.arms for run in arm.runs] == [len(grown.curve_at)] * 6


def test_a_schedule_that_is_applied_twice_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mutant: the batch grows, and the rate decays as well."""
    right = GrowingBatch.rate
    monkeypatch.setattr(GrowingBatch, "rate", lambda self, update: right(self, update) / self(update))
    report = study("grow-batch", own_recipe.plane(), Options(runs=2, samples=600, learning_rate=0.02))
    monkeypatch.undo()
    kept = study("grow-batch", own_recipe.plane(), Options(runs=2, samples=600, learning_rate=0.02))
    assert abs(math.log(ratio_of_losses(kept))) < 0.5 * abs(math.log(ratio_of_losses(report)))


@pytest.mark.parametrize(
    ("loss", "accuracy", "constant", "start", "end"),
    [
        (1.0, 97.5, 2.0, "Growing the batch is decaying the rate", "test accuracy 0."),
        (1.0, 97.5, 1.0, "Growing the batch is decaying the rate", "so the schedule hardly matters."),
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
    conclusion = study_grow_batch.find(arms, metric=METRIC, margin=0.5).conclusion
    assert conclusion.startswith(start)
    assert conclusion.endswith(end)
    assert "2,240 updates instead of 4,000" in conclusion


# ------------------------------------------------------------------------------------------------ critical


def test_the_larger_batch_costs_samples() -> None:
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
    """A meter of its own accord looks at one window in ten of so small a model: too few of 64."""
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
    return study_critical_batch.find(arms, batch=8, tolerance=0.05).conclusion


def test_the_noise_scale_predicts_one_number_in_words_table_and_picture(momentum: Study) -> None:
    """Seeds whose own noise scales differ by far: the mean and the median of their predictions are others."""
    from superbatch.lab import plot

    arms = planted_critical((1.0, 1.0, 1.01, 1.2, 1.5), signals=[0.5, 0.7, 1.5, 2.0, 0.9, 0.6])
    found = study_critical_batch.find(arms, batch=8, tolerance=0.05)
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


def test_arms_that_diverge_are_said_to_in_the_picture(momentum: Study) -> None:
    from superbatch.lab import plot

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
    # Not shown to match, and not shown not to: its interval holds the margin.
    assert conclude_critical((1.0, 1.0, 1.01, 1.05, 1.5)).startswith(
        "The critical batch by branching is at least 32,"
    )
    assert conclude_critical((1.0,) * 5).startswith("The critical batch by branching is at least 128;")
    assert conclude_critical((1.0, 0.8, 0.7, 0.7, 0.7)).startswith(
        "The critical batch by branching is at least 128;"
    )
    assert "not determined" in conclude_critical((1.0,) * 5, signal=-1.0)
    unsure = conclude_critical((1.0,) * 5, signals=[3.0, -2.0, 1.0, -1.0, 2.0, 0.5])
    assert "not determined" in unsure, "positive in the mean, and not told from none"
    nothing = tuple(planted(f"batch {k}") for k in (1, 2, 4, 8, 16))
    found = study_critical_batch.find(nothing, batch=1, tolerance=0.05)
    assert found.conclusion == "Too few runs were finished to conclude anything."


# ------------------------------------------------------------------------------------------------ precision


@pytest.fixture(scope="module")
def precision() -> Study:
    return study("precision", own_recipe.plane(), Options(runs=1, quick=True))


def test_a_sum_in_bfloat16_loses_and_one_in_float32_does_not(precision: Study) -> None:
    error = {arm.name: arm.mean("K = 256") or math.nan for arm in precision.arms}
    for name in ("naive sum, bfloat16", "naive sum, bfloat16, one sign", "model: sum in .grad, bfloat16"):
        assert error[name] > 1e-2, name
    for name in ("float32 sum of bfloat16", "model: sum in float32", "naive sum, float32"):
        assert error[name] < 1e-6, name
    assert error["model: sum in float32"] > 0, "the premise: it is not the reference itself"
    # The table of section 8, to a fifth.
    for name, expected in (
        ("naive sum, bfloat16", 1.9e-2),
        ("stochastic rounding, bfloat16", 2.2e-2),
        ("pairwise, bfloat16", 2.6e-3),
        ("Kahan, bfloat16", 1.7e-3),
    ):
        assert error[name] == pytest.approx(expected, rel=0.2), name
    assert precision.conclusion.startswith("Sum in float32:")


def test_precision_concludes_from_the_numbers() -> None:
    names = [way.name for way in (*study_precision.DRAWN, *study_precision.OWN)]

    def conclusion(wide: float) -> str:
        arms = tuple(planted(name, {"K = 256": [wide if "float32" in name else 0.02]}) for name in names)
        return study_precision.find(arms, count=256).conclusion

    assert conclusion(1e-8).startswith("Sum in float32:")
    assert conclusion(1e-2).startswith("A float32 sum gains little here:")
    nothing = tuple(planted(name) for name in names)
    assert study_precision.find(nothing, count=256).conclusion.startswith("Too few")


# ------------------------------------------------------------------------------------------------ splits, all


def test_splits_are_those_of_compare() -> None:
    report = study("splits", own_recipe.plane(), Options(runs=2, samples=200))
    assert [arm.name for arm in report.arms][:2] == ["1x20", "5x4"]
    assert report.arms[0].facts == {"updates": 10}
    apart = [arm.mean("weights differ by") for arm in report.arms]
    assert apart[0] is None
    assert all(each is not None and each < 1e-3 for each in apart[1:])
    assert report.conclusion.startswith("Every split trains like the real batch: weights within")
    assert [test.result.test for test in report.tests] == ["paired"] * (len(report.arms) - 1)


def test_surveys_are_those_of_the_survey_study() -> None:
    report = study("survey", "digits", Options(runs=3, batch_size=200))
    assert [arm.name for arm in report.arms] == ["1x200", "1x200 again", "10x20", "20x10"]
    for arm in report.arms[2:]:
        apart = arm.facts["pairs differ by"]
        assert 0 < apart < 1e-5
    assert {test.second for test in report.tests} == {"1x200"}
    # Margin and difference are factors: 0.15 decades.
    assert {round(test.margin, 6) for test in report.tests} == {round(10**0.15, 6)}
    first, second = (report.arms[i].values("suggested lr") for i in (0, 1))
    expected = math.prod(b / a for a, b in zip(first, second, strict=True)) ** (1 / 3)
    assert report.tests[0].difference == pytest.approx(expected)
    assert {len(run.curve) for arm in report.arms for run in arm.runs} == {100}
    assert report.conclusion.startswith("10x20 and 20x10 survey like the real batch")


def test_reports_are_written_and_read_again(momentum: Study, grown: Study, precision: Study) -> None:
    from superbatch.lab import plot

    for report in (momentum, grown, precision):
        assert to_json(from_json(Study, to_json(report))) == to_json(report)
        table = study_table(report)
        assert len(table.rows) == len(report.arms)
        assert {len(row) for row in table.rows} == {1 + len(report.quantities)}
        assert len(equivalence_table(report.tests).rows) == len(report.tests)
        assert report.conclusion.endswith(".") and ". " not in report.conclusion, "one sentence"
        figure = plot.study(report, dark=report is momentum)
        assert plot.png(figure, dots_per_inch=30).startswith(b"\x89PNG")


@pytest.mark.parametrize("name", STUDIES)
def test_an_interruption_before_the_first_run_has_a_picture(name: str, momentum: Study) -> None:
    from superbatch.lab import plot
    from superbatch.lab.report.page import render
    from superbatch.lab.report.pages import page_of

    nothing = tuple(StudyArm(name=f"batch {k}", how="", facts={}, runs=()) for k in (1, 2))
    report = replace(momentum, name=name, arms=nothing, tests=(), curve_at=(1.0, 2.0), partial=True)
    picture = plot.png(plot.study(report), dots_per_inch=30)
    assert "interrupted before the last run" in render(page_of(report), light=picture, dark=picture)


def test_seeds_spread_over_processes_give_the_same_report() -> None:
    options = {"runs": 2, "samples": 300, "learning_rate": 0.05}
    here = study("grow-batch", PLANE, Options(**options))  # pyright: ignore[reportArgumentType]  (by name)
    spread = study("grow-batch", PLANE, Options(**options, workers=2))  # pyright: ignore[reportArgumentType]
    assert spread.arms == here.arms
    assert spread.conclusion == here.conclusion


@pytest.mark.parametrize("name", ["momentum", "splits"])
def test_an_interruption_leaves_what_was_finished(name: str) -> None:
    def stop(event: Progress) -> None:
        if event.finished is not None and event.finished[0] == 1:
            raise KeyboardInterrupt

    with pytest.raises(Interrupted) as caught:
        study(name, own_recipe.plane(), Options(runs=3, samples=256), progress=stop)
    report = caught.value.report
    assert report.partial
    assert {run.seed for run in report.arms[0].runs} == {0, 1}
    assert {run.seed for run in report.arms[-1].runs} == {0}
    assert from_json(Study, to_json(report)) == report


def test_progress_ends_at_the_whole() -> None:
    for name in ("momentum", "grow-batch", "critical-batch"):
        events: list[Progress] = []
        study(name, own_recipe.plane(), Options(runs=2, samples=32, batch_size=2), progress=events.append)
        assert events[-1].done == events[-1].total
        assert [event.done for event in events] == sorted(event.done for event in events)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("nonsense", {}, "There is no study 'nonsense'.*Use one of momentum, grow-batch"),
        (
            "precision",
            {"margin": 0.5},
            "'precision' has no use for margin=0.5. Leave it out; this study takes runs",
        ),
        ("momentum", {"tolerance": 0.1}, "this study takes samples, batch_size, learning_rate, margin"),
        ("momentum", {"runs": 0}, "runs=0 is no count"),
        ("momentum", {"learning_rate": -1.0}, "learning_rate=-1.0 is not positive. Give a number above 0"),
        ("critical-batch", {"optimizer": "lion"}, "optimizer='lion'.*does not offer it.*sgd, adam"),
        ("grow-batch", {"batch_size": 200}, "batch_size=200 with 240 training samples"),
        ("momentum", {"workers": 2}, "workers=2 with a Recipe object"),
        ("momentum", {"samples": 200}, "samples=200 with batch_size=16.*at least 16 batches"),
        ("momentum", {"batch_size": 1}, "batch_size=1.*more than one sample"),
        ("critical-batch", {"samples": 100, "batch_size": 8}, "makes not one update.*at least 128 samples"),
    ],
)
def test_wrong_options(name: str, options: dict[str, float], message: str) -> None:
    with pytest.raises(InputError, match=message):
        study(name, own_recipe.plane(), Options(**options))  # pyright: ignore[reportArgumentType]  (by name)


@pytest.mark.parametrize("name", ["grow-batch", "critical-batch"])
def test_a_training_that_diverges_is_said_to(name: str) -> None:
    with pytest.raises(InputError, match=r"lr 50 diverges.*--lr"):
        study(name, own_recipe.plane(), Options(runs=1, samples=900, learning_rate=50.0))


@pytest.mark.parametrize("name", ["momentum", "grow-batch", "critical-batch"])
def test_samples_that_see_each_other_are_refused(name: str) -> None:
    with pytest.raises(
        InputError, match=f"The study '{name}' with the recipe 'digits-bn'.*another objective"
    ):
        study(name, "digits-bn", Options(quick=True))


def test_every_study_has_a_question_a_picture_and_a_section_of_the_documentation() -> None:
    from superbatch.lab.plot.studies import _DRAWINGS

    assert set(STUDIES) == set(_DRAWINGS)
    assert all(entry.question.endswith("?") for entry in STUDIES.values())
    root = Path(__file__).resolve().parents[2]
    (address,) = re.findall('^Documentation = "(.*)"', (root / "pyproject.toml").read_text("utf8"), re.M)
    assert f"{address}studies/" == DOCUMENTATION
    headings = re.findall("^## (.*)", (root / "docs/studies.md").read_text("utf8"), re.M)
    slugs = [re.sub(r"[^\w\- ]", "", each).strip().lower().replace(" ", "-") for each in headings]
    assert [entry.section for entry in STUDIES.values()] == slugs[: len(STUDIES)], "in the order of the page"


def test_a_report_leads_to_its_explanation(momentum: Study, grown: Study, precision: Study) -> None:
    for report in (
        momentum,
        grown,
        precision,
        study("splits", own_recipe.plane(), Options(runs=2, samples=40)),
    ):
        assert report.notes[-1].endswith(f"{DOCUMENTATION}#{STUDIES[report.name].section}")
    for report in (momentum, grown, precision):
        assert report.notes[0].startswith("It does not show "), "the limit stands in the report itself"


def test_a_margin_far_below_the_scatter_cuts_no_run_of_the_reference_off() -> None:
    arms = tuple(
        StudyArm(
            name=name,
            how="",
            facts={},
            runs=tuple(StudyRun(seed=seed, values={METRIC: value}) for seed, value in enumerate(values)),
        )
        for name, values in (("1x20", (82.0, 84.0)), ("4x5", (82.0, 84.0)))
    )
    report = replace(
        study("splits", own_recipe.plane(), Options(runs=2, samples=100)),
        arms=arms,
        quantities=(Quantity(name=METRIC, meaning="", form=".2f"),),
        tests=tuple(test for test in (compared(arms[1], arms[0], METRIC, margin=0.05),) if test is not None),
    )
    low, high = plot.study(report).axes[0].get_xlim()
    assert low < 82.0 < 84.0 < high
