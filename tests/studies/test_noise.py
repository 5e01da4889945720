"""Study of the noise scale: measurements, texts and plots."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from superbatch.errors import InputError
from superbatch.lab import plot
from superbatch.lab.report.json import to_json
from superbatch.lab.report.noise_study import (
    NoiseAt,
    NoiseStudy,
    band_of,
    findings,
    points_table,
    steps_table,
)
from superbatch.lab.studies import noise as module
from superbatch.lab.studies.noise import Options
from superbatch.lab.studies.noise import noise as study
from superbatch.lab.studies.shared_options import Interrupted, Progress
from superbatch.noise.meter import noise_over_run, relative_time
from tests.report_json import from_json
from tests.studies.own_recipe import plane

OPTIONS = Options(updates=60, threads=1, batch_size=40)


@pytest.fixture(scope="module")
def report() -> NoiseStudy:
    return study(plane(), OPTIONS)


def test_the_report_follows_the_options_and_survives_json(report: NoiseStudy) -> None:
    assert (report.batch_size, report.microbatch_size, report.updates) == (40, 5, 60)
    assert [each.update for each in report.points] == list(range(2, 61, 2))
    assert report.points[0].reason == "2 windows measured; 8 needed"
    assert any(each.batch_size for each in report.points), "premise: it is sometimes determined"
    assert report.points[-1].loss < report.points[0].loss, "premise: it is trained"
    assert from_json(NoiseStudy, to_json(report)) == report


def test_the_run_and_the_times_follow_from_the_points(report: NoiseStudy) -> None:
    known = [each for each in report.points if each.batch_size]
    assert report.noise == noise_over_run([each.batch_size or 0 for each in known], batch_size=40)
    assert report.noise is not None
    assert report.low <= report.noise <= report.high
    assert [each.accumulation_steps for each in report.steps] == [1, 2, 4, 8, 16, 32, 64]
    for each in report.steps:
        expected = relative_time(
            each.accumulation_steps,
            noise=report.noise,
            microbatch_size=5,
            microbatch_seconds=report.microbatch_seconds,
            update_seconds=report.update_seconds,
        )
        assert each.time == expected
        assert each.time is not None and each.low <= each.time <= each.high
    assert report.best is not None and report.best.time == min(each.time or 0 for each in report.steps)


def test_the_noise_scale_equals_that_of_the_data() -> None:
    """At a rate near 0 the model does not change; per-sample gradients give T and |G|^2 of the data."""
    recipe = plane(learning_rates={"sgd": 1e-12})
    model = recipe.model(0)
    loss_fn, gradients = recipe.loss_fn(model), []
    for index in range(recipe.samples):
        model.zero_grad()
        loss_fn(recipe.batch(torch.tensor([index]))).backward()
        gradients.append(torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None]))
    each = torch.stack(gradients)
    truth = float(each.var(0).sum() / each.mean(0).square().sum())
    last = study(recipe, replace(OPTIONS, updates=400)).points[-1]
    assert last.low < truth < last.high
    assert last.batch_size == pytest.approx(truth, rel=0.25)


def test_models_of_adams_preconditioner_are_a_band(report: NoiseStudy) -> None:
    assert report.models == (), "sgd has none"
    adam = study(plane(), replace(OPTIONS, optimizer="adam", updates=80))
    assert adam.noise is not None and len(adam.models) == 3
    assert adam.models[0] == pytest.approx(adam.noise)
    low, high = band_of(adam.models) or (0.0, 0.0)
    assert low < high
    for point in adam.points:
        assert point.by_model == () or point.by_model[0] == point.batch_size
    both = [each for each in adam.points if each.by_model and each.by_model[0] and each.by_model[1]]
    ratio = [noise_over_run([each.by_model[i] or 0 for each in both], batch_size=40) for i in (0, 1)]
    assert adam.models[1] == pytest.approx(adam.noise * ratio[1] / ratio[0])
    for each in adam.steps:
        assert each.by_model[0] == pytest.approx(each.time)
    table = points_table(adam)
    assert [column.heading for column in table.columns][4:6] == ["q = 1", "q = 2"]
    assert {len(row) for row in table.rows} == {len(table.columns)}
    assert any(
        "Adam's preconditioner to the power q = 0, 1, 2 the noise scale is" in s for s in findings(adam)
    )
    figure = plot.noise(adam)
    for axes in figure.axes:
        legend = axes.get_legend()
        assert legend is not None
        assert any("Adam's models" in text.get_text() for text in legend.get_texts())
    assert from_json(NoiseStudy, to_json(adam)) == adam
    unknown = replace(adam, models=(adam.noise, None, None))
    assert any("not determined, not determined; q = 0" in s for s in findings(unknown))


def test_an_undetermined_noise_scale_is_reported_and_plotted(report: NoiseStudy) -> None:
    unknown = tuple(
        replace(each, batch_size=None, high=math.inf, reason="signal not distinguishable from noise")
        for each in report.points
    )
    steps = tuple(replace(each, time=None) for each in report.steps)
    none = replace(report, points=unknown, noise=None, high=math.inf, steps=steps)
    assert "not determined; it is above about" in findings(none)[0]
    assert all(row[2] == "–" and "or more" in row[3] for row in points_table(none).rows[2:])
    assert {row[2] for row in steps_table(none).rows} == {"–"}
    figure = plot.noise(none)
    assert any("not determined" in text.get_text() for text in figure.axes[1].texts)
    labels = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]  # pyright: ignore[reportOptionalMemberAccess]  (there is one)
    assert labels == ["not determined", "at least (no upper end)", "the batch: 40"]


def test_invalid_options_are_refused() -> None:
    for options, text in (
        (Options(batch_size=1), "between 2 and 240"),
        (Options(batch_size=8, microbatch_size=8), "differences between at least two micro-batches"),
        (Options(updates=0), "is not a positive integer"),
        (Options(optimizer="lion"), "optimizer='lion'.*does not offer it.*Use one of"),
    ):
        with pytest.raises(InputError, match=text):
            study(plane(), options)


def test_a_rate_of_the_recipe_is_checked_too() -> None:
    with pytest.raises(InputError, match=r"learning_rate=-0\.1 is not positive"):
        study(plane(learning_rates={"sgd": -0.1}), Options(updates=1))


def test_coupled_samples_are_refused() -> None:
    with pytest.raises(InputError, match="a micro-batch has no gradient of its own"):
        study(plane(coupled="exact"), OPTIONS)


def test_an_interruption_keeps_the_measurements() -> None:
    def stop(event: Progress) -> None:
        if event.done >= 30:
            raise KeyboardInterrupt

    with pytest.raises(Interrupted) as caught:
        study(plane(), OPTIONS, progress=stop)
    report = caught.value.report
    assert (report.partial, report.updates, report.steps) == (True, 30, ())
    assert plot.png(plot.noise(report)).startswith(b"\x89PNG")
    assert "partial" in plot.noise(report).get_suptitle()


@pytest.mark.parametrize("changed", [{"learning_rate": -1.0}, {"learning_rate": math.inf}, {"seed": 1 << 64}])
def test_numbers_that_torch_would_refuse_are_refused(changed: dict[str, Any]) -> None:
    (name,) = changed
    with pytest.raises(InputError, match=name):
        study("digits", Options(updates=1, **changed))


def test_the_upper_end_grows_after_the_signal_is_lost() -> None:
    def at(update: int, size: float | None, low: float, high: float) -> NoiseAt:
        reason = None if size else "signal not distinguishable from noise"
        return NoiseAt(
            update=update, samples=update, loss=1.0, batch_size=size, low=low, high=high, reason=reason
        )

    early = [at(1, None, 0.0, math.inf), at(2, 10.0, 5.0, 20.0), at(3, 10.0, 5.0, 20.0)]
    assert over_run(early) == pytest.approx((10.0, 5.0, 20.0)), (
        "too few windows at the start do not count as noise"
    )
    value, low, high = over_run([*early, at(4, None, 15.0, math.inf), at(5, None, 15.0, math.inf)])
    assert (value, low) == pytest.approx((10.0, 5.0))
    # Progress: 2/3 of the samples of two points, and all samples of two others: 20 (2/3 + 1) / (2/3)
    assert high == pytest.approx(50.0)


def over_run(points: list[NoiseAt]) -> tuple[float | None, float, float]:
    return module._over_run(points, 10)


def test_noise_shared_by_micro_batches_gives_no_value() -> None:
    """The targets of each batch have a common random shift, as if it came from one document."""
    recipe, draw = plane(), torch.Generator().manual_seed(3)

    def shifted(indices: torch.Tensor) -> Any:
        batch = recipe.batch(indices)
        return {"x": batch["x"], "y": batch["y"] + 4 * torch.rand(1, generator=draw).round()}

    found = study(replace(recipe, batch=shifted), replace(OPTIONS, updates=200))
    assert (found.noise, found.high) == (None, math.inf)
    assert {each.batch_size for each in found.points} == {None}
    assert found.notes[-1].startswith("Losses of whole windows differ ")
    assert ". Shuffle samples over windows. If they already are shuffled, the loss jumps" in found.notes[-1]
    assert found.notes[-1].endswith("superbatch.torch.tuning.independence.independence_at_rest().")
    assert {row[-1] for row in points_table(found).rows} == {"micro-batches share noise"}
    said = findings(found)
    assert "if the micro-batches of a window are independent draws" in said[0]
    assert found.notes[-1] in said


def test_the_report_states_the_assumption_beside_the_value(report: NoiseStudy) -> None:
    assert report.noise is not None
    assert (
        "), if the micro-batches of a window are independent draws: a batch of 40 has" in findings(report)[0]
    )
