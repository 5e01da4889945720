"""Fitting a recipe: sizes, peaks, limits, time, and unusual recipes."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from superbatch.batch.split import near_equal
from superbatch.errors import InputError, LossSpecError
from superbatch.lab import plot
from superbatch.lab.recipes import RECIPES, Recipe, load_recipe
from superbatch.lab.report.fitting import Fitting
from superbatch.lab.report.fitting_text import findings, reach_table, savings_table, sizes_table
from superbatch.lab.report.json import to_json
from superbatch.lab.studies import fit as fit_module
from superbatch.lab.studies.fit import Options, fit
from superbatch.lab.studies.fit_measurements import FitMeasurements
from superbatch.lab.studies.shared_options import Interrupted, Progress
from superbatch.results.advice import number_text
from superbatch.results.memory import Limit, binary_text
from superbatch.torch import Accumulator
from superbatch.torch.memory.meter import peak_bytes
from tests.report_json import from_json
from tests.studies import own_recipe

KIB = 1024
PNG = b"\x89PNG\r\n\x1a\n"
QUICK = Options(threads=1)


def wide(**changes: Any) -> Recipe:
    """Return a recipe with more activations than parameters, so that memory depends on the micro-batch."""

    def model(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(4, 256), nn.Tanh(), nn.Linear(256, 4), nn.Tanh(), nn.Linear(4, 1))

    return own_recipe.plane(**{"name": "wide", "model": model, "batch_size": 100} | changes)


def quick(**changes: Any) -> Options:
    return replace(QUICK, **changes)


@pytest.fixture(autouse=True, scope="module")
def few_rounds() -> Iterator[None]:
    """Time few windows; tests that depend on times patch the clock."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fit_module, "ROUNDS", 2)
        patch.setattr("superbatch.lab.studies.trial_run.WINDOW_SECONDS", 0.001)
        yield


@pytest.fixture(scope="module")
def limited() -> Fitting:
    """Return a report with a limit that the whole batch exceeds."""
    return fit(wide(), quick(limit=150 * KIB))


# ------------------------------------------------------------------------------------------- memory


def test_predictions_equal_measurements(limited: Fitting) -> None:
    errors = [size.error for size in limited.sizes if size.probe is not None and size.measured]
    assert len(errors) > 4, "the premise: several sizes were predicted and measured"
    assert max(abs(error or 0.0) for error in errors) < 0.01
    assert limited.how == "fake tensors"


def test_a_measured_peak_is_that_of_the_users_training() -> None:
    recipe = wide()
    report = fit(recipe, quick(optimizer="adam"))
    model = recipe.model(0)
    accumulate = Accumulator(
        model,
        torch.optim.Adam(model.parameters(), lr=0.01),
        recipe.loss_fn(model),
        microbatch_size=25,
        check=False,
    )
    batch = recipe.batch(torch.arange(100))
    real = peak_bytes(lambda: [accumulate(batch) for _ in range(3)])
    measured = report.of(25).measured
    assert measured is not None and abs(measured / real - 1) < 0.02, (measured, real)
    parameters = sum(p.numel() for p in model.parameters()) * 4
    assert measured > 3 * parameters, "it includes gradients and Adam's two moments"


def test_sizes_above_the_limit_are_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    recipe = wide()
    real = recipe.loss_fn

    def loss_fn(model: nn.Module) -> Callable[[Any], Any]:
        loss = real(model)

        def noted(batch: Any) -> Any:
            if type(batch["x"]) is torch.Tensor:  # not a fake one
                seen.append(len(batch["x"]))
            return loss(batch)

        return noted

    report = fit(replace(recipe, loss_fn=loss_fn), quick(limit=150 * KIB))
    assert 1 < report.largest < 100, "the premise: the limit excludes sizes"
    assert max(seen) <= report.largest
    tops = [size.samples for size in report.sizes if size.fits]
    assert max(tops) == near_equal(100, report.largest)[0] == max(seen)


def test_the_largest_fits_and_one_more_does_not(limited: Fitting) -> None:
    recipe = wide()
    model = recipe.model(0)

    def peak(samples: int) -> int:
        trained = copy.deepcopy(model)
        accumulate = Accumulator(
            trained,
            torch.optim.SGD(trained.parameters(), lr=0.1),
            recipe.loss_fn(trained),
            microbatch_size=samples,
            check=False,
        )
        batch = recipe.batch(torch.arange(2 * samples))
        return peak_bytes(lambda: [accumulate(batch) for _ in range(2)])

    assert peak(limited.largest) <= limited.usable < limited.limit.bytes
    assert peak(limited.largest + 2) > limited.usable


def test_sizes_are_those_of_near_equal_splits(limited: Fitting) -> None:
    for size in limited.sizes:
        parts = near_equal(limited.batch_size, size.samples)
        assert (len(parts), parts[0]) == (size.microbatches, size.samples)


def test_nothing_fits() -> None:
    report = fit(wide(), quick(limit=100))
    assert report.largest == 0
    assert not any(size.fits or size.measured for size in report.sizes)
    assert report.fastest is None
    assert report.reach == ()
    assert findings(report)[0] == "Not even one sample fits in 100 B (--limit)."


def test_requested_sizes() -> None:
    report = fit(wide(), quick(sizes=(3, 60)))
    assert [size.samples for size in report.sizes] == [3, 60]
    assert all(size.measured and size.seconds for size in report.sizes)


def test_a_batch_larger_than_the_data() -> None:
    recipe = wide()
    report = fit(recipe, quick(batch_size=1000, sizes=(10, 1000)))
    assert recipe.samples < 1000, "the premise"
    small, large = (report.of(samples).measured or 0 for samples in (10, 1000))
    assert large > 20 * small


def test_bfloat16_is_summed_in_float32() -> None:
    own, low = (fit(wide(), quick(dtype=dtype, sizes=(1, 50))) for dtype in ("float32", "bfloat16"))
    assert low.of(50).predicted == low.of(50).measured
    assert (low.of(50).measured or 0) < (own.of(50).measured or 0)


def test_savings_of_memory() -> None:
    def model(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        blocks = [nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh()) for _ in range(6)]
        return nn.Sequential(nn.Linear(4, 64), *blocks, nn.Linear(64, 1))

    report = fit(wide(model=model), quick(optimizer="adam", batch_size=1000, sizes=(1000,)))
    saved = {each.name: each.bytes for each in report.savings}
    assert saved.keys() >= {"gradient checkpoints", "optimizer state"}
    # Each block keeps the outputs of its two Tanh. A checkpoint keeps the second, the input of the next
    # block, and recomputes the first, one block at a time.
    output = 1000 * 64 * 4
    assert saved["gradient checkpoints"] == pytest.approx(5 * output, rel=0.1)
    table = savings_table(report)
    assert table.title == "Ways to lower the peak of micro-batches of 1000"
    assert table.rows[0][0] == binary_text(max(saved.values()))


# ------------------------------------------------------------------------------------------- time


def test_time_grows_with_the_batch_and_a_slow_size_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A patched clock makes micro-batches of 25 the fastest; the whole batch takes 1.5 times as long."""
    from superbatch.lab.studies.trial_run import Trainer

    per_sample = {100: 1.5e-3, 50: 1.2e-3, 25: 1.0e-3, 13: 1.1e-3}

    def clock(self: Trainer, window: Any) -> tuple[float, float]:
        samples = len(window[0]["x"])
        return samples * per_sample.get(samples, 3e-3), 0.01

    monkeypatch.setattr(Trainer, "time", clock)
    monkeypatch.setattr("superbatch.lab.studies.trial_run.TrialRun.peak", lambda self, samples: 1000)
    report = fit(wide(), QUICK)
    assert report.fastest == 25
    assert "Use micro-batches of 25: the fastest of those timed, 1.50x as fast as 100" in findings(report)[0]
    assert report.of(25).update_seconds == pytest.approx(0.11)
    assert [(each.batch, each.microbatches, each.samples) for each in report.reach[:2]] == [
        (100, 4, 25),
        (400, 16, 25),
    ]
    assert report.reach[1].seconds == pytest.approx(0.41)


def test_fit_ends_in_time() -> None:
    recipe = wide()
    real, slept = recipe.loss_fn, []

    def slow(model: nn.Module) -> Callable[[Any], Any]:
        loss = real(model)

        def wait(batch: Any) -> Any:
            if type(batch["x"]) is torch.Tensor:
                slept.append(0.002 * len(batch["x"]))
                time.sleep(slept[-1])
            return loss(batch)

        return wait

    start = time.monotonic()
    report = fit(replace(recipe, loss_fn=slow), quick(seconds=1.0))
    # The sleeps do not depend on the machine; the total time allows for load.
    assert sum(slept) < 3 and time.monotonic() - start < 15
    assert report.of(1).measured and not report.of(100).measured
    assert report.of(100).predicted, "sizes that are not measured are predicted"
    assert any("There was no time for micro-batches of" in note for note in report.notes)
    said = " ".join(findings(report))
    assert "the fastest of those timed, but larger ones fit that were not timed: give more --seconds" in said
    assert "Use micro-batches of" not in said, "nothing is recommended"


@pytest.mark.parametrize(("load", "said"), [(0.1, False), (64.0, True)])
def test_a_busy_machine_is_reported(load: float, said: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.getloadavg", lambda: (load, load, load), raising=False)
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    report = fit(wide(), QUICK)
    assert any("The machine was busy at the start" in each for each in findings(report)) == said


# ------------------------------------------------------------------------------------------- recipes


@pytest.mark.parametrize("name", [name for name in RECIPES if name != "mnist"])
@pytest.mark.sampled(2)
def test_every_recipe_can_be_fitted(name: str) -> None:
    before = torch.get_rng_state()
    report = fit(name, QUICK)
    assert bool((torch.get_rng_state() == before).all())
    assert report.largest == load_recipe(name).batch_size
    assert report.fastest in {size.samples for size in report.sizes}
    measured = [size for size in report.sizes if size.measured]
    assert len(measured) >= 4
    probed = [size for size in measured if size.probe]
    assert len(probed) >= 4
    assert max(abs(size.error or 0.0) for size in probed) < 0.06  # pooled BatchNorm keeps additional copies


def test_coupled_samples_are_not_split() -> None:
    report = fit("pairs", QUICK)
    assert report.refused is not None and "samples influence each other" in report.refused
    assert findings(report)[0].startswith("Do not split the batch: its samples are coupled")
    assert report.reach == ()
    assert report.beyond is None


def test_a_model_refused_because_of_batchnorm_is_still_measured() -> None:
    def model(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))

    report = fit(wide(model=model), QUICK)
    assert report.refused is not None and "BatchNorm" in report.refused
    assert 1 not in {size.samples for size in report.sizes}, "BatchNorm cannot train on one sample"
    assert any(note.startswith("Micro-batches of 1 are left out: ValueError") for note in report.notes)
    assert report.of(50).measured


def test_a_wrong_reduction_is_an_error() -> None:
    with pytest.raises(LossSpecError):
        fit(replace(own_recipe.plane_sum(), reduction="mean"), QUICK)


@pytest.mark.parametrize("name", ["plane_sum", "plane_returned"])
def test_other_reductions_and_weights(name: str) -> None:
    report = fit(getattr(own_recipe, name)(), QUICK)
    assert report.largest == 20
    assert report.fastest is not None


def test_a_model_that_fake_tensors_cannot_run() -> None:
    recipe = wide()
    real = recipe.loss_fn

    def loss_fn(model: nn.Module) -> Callable[[Any], Any]:
        loss = real(model)

        def with_numpy(batch: Any) -> Any:
            batch["x"].numpy()
            return loss(batch)

        return with_numpy

    report = fit(replace(recipe, loss_fn=loss_fn), quick(limit=150 * KIB))
    assert report.how == "small real runs"
    assert any(note.startswith("Peaks were not predicted: ") for note in report.notes)
    assert all(size.predicted is None for size in report.sizes)
    assert report.largest == pytest.approx(fit(recipe, quick(limit=150 * KIB)).largest, rel=0.1)


def test_the_model_is_unchanged() -> None:
    kept = wide().model(0)
    before = copy.deepcopy(kept.state_dict())
    fit(wide(model=lambda seed: kept), quick(optimizer="adam"))
    after = kept.state_dict()
    assert all(torch.allclose(before[name], after[name], atol=1e-6) for name in before)


# ------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 0}, "batch_size=0"),
        ({"limit": -1}, "limit=-1"),
        ({"limit": 2.5}, r"limit=2\.5"),
        ({"threads": 0}, "threads=0"),
        ({"seconds": 0}, "seconds=0 is not positive"),
        ({"dtype": "int8"}, "Use one of float32, float64, bfloat16"),
        ({"optimizer": "lion"}, "Use one of sgd, adam"),
        ({"device": "tpu"}, "memory is measured on CPU and CUDA only"),
        ({"sizes": (8, 200)}, "A micro-batch of 200 samples is not a part of a batch of 100"),
        ({"sizes": (0,)}, "A micro-batch of 0 samples"),
    ],
)
def test_invalid_options(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        fit(wide(), Options(**changes))


def test_a_loss_that_always_fails_raises_the_users_error() -> None:
    def broken(model: nn.Module) -> Callable[[Any], Any]:
        def loss(batch: Any) -> Any:
            raise KeyError("no such leaf")

        return loss

    with pytest.raises(KeyError, match="no such leaf"):
        fit(wide(loss_fn=broken), QUICK)


@pytest.mark.parametrize("when", ["predicted", "measured", "timed"])
def test_an_interruption_keeps_the_measurements(when: str) -> None:
    def stop(event: Progress) -> None:
        assert 0 < event.done <= event.total
        if event.finished.startswith(when):
            raise KeyboardInterrupt

    with pytest.raises(Interrupted) as caught:
        fit(wide(), QUICK, progress=stop)
    report = caught.value.report
    assert report.partial
    assert any(size.predicted for size in report.sizes)
    assert any(size.measured for size in report.sizes) == (when != "predicted")
    assert from_json(Fitting, to_json(report)) == report
    assert sizes_table(report).rows
    assert findings(report)


# ------------------------------------------------------------------------------------------- the report


def test_json_round_trip(limited: Fitting) -> None:
    assert from_json(Fitting, to_json(limited)) == limited


def test_texts_of_the_tables(limited: Fitting) -> None:
    table = sizes_table(limited)
    assert table.title == "wide: a batch of 100 samples, sgd, float32, cpu, 1 thread"
    names = [row[0] for row in table.rows]
    assert names[-1] == "100 too large"
    assert f"{limited.fastest} fastest" in names
    reach = reach_table(limited)
    assert [row[0] for row in reach.rows] == ["100", "400", "1600", "6400", "25600"]
    assert reach.rows[-1][3].endswith(" > limit")
    assert f"At most {limited.largest} samples fit in 150 KiB (--limit)." in findings(limited)


def texts_of(report: Fitting) -> str:
    figure = plot.fitting(report)
    assert plot.png(figure, dots_per_inch=40).startswith(PNG), "it can be drawn"
    found = [text.get_text() for axes in figure.axes for text in axes.texts]
    found += figure.axes[0].get_legend_handles_labels()[1]
    return " | ".join([figure.get_suptitle(), *found])


def values_of(data: Any) -> list[Any]:
    """Return the points of a line, whose type matplotlib leaves open."""
    return list(data)


def test_the_plot_shows_the_limit_and_the_choice(limited: Fitting) -> None:
    figure = plot.fitting(limited)
    memory, speed = figure.axes
    lines = {str(line.get_label()): line for line in memory.lines}
    predicted = [(size.samples, size.predicted) for size in limited.sizes]
    assert list(zip(*map(values_of, lines["predicted"].get_data()), strict=True)) == predicted
    assert values_of(lines["measured"].get_xdata()) == [
        size.samples for size in limited.sizes if size.measured
    ]
    bottom, top = memory.get_ylim()
    assert bottom < limited.usable < top
    assert values_of(speed.lines[-1].get_xdata()) == [size.samples for size in limited.sizes if size.seconds]
    said = texts_of(limited)
    assert "limit: 150 KiB (--limit)" in said
    assert f"fastest: {limited.fastest}" in said
    assert f"largest that fits: {max(size.samples for size in limited.sizes if size.fits)}" in said


def test_a_far_limit_does_not_flatten_the_curve_in_the_plot() -> None:
    report = fit(wide(), quick(limit=2**40))
    assert plot.fitting(report).axes[0].get_ylim()[1] < 2**30
    assert "limit: 1.00 TiB (--limit)" in texts_of(report)


def test_a_plot_of_few_or_no_measurements(limited: Fitting) -> None:
    assert "nothing was timed" in texts_of(
        replace(
            limited, fastest=None, sizes=tuple(replace(s, seconds=None, high=None) for s in limited.sizes)
        )
    )
    assert "Not even one sample fits" in texts_of(fit(wide(), quick(limit=100)))
    assert "(interrupted: partial)" in texts_of(replace(limited, partial=True))
    assert texts_of(replace(limited, sizes=limited.sizes[:1], fastest=None))


def test_sizes_above_the_memory_of_the_machine_are_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit_module, "memory_limit", lambda device: Limit(150 * KIB, "a small machine"))
    report = fit(wide(), quick(limit=2**40))
    assert report.largest == 100, "by the given limit"
    small = max(size.samples for size in report.sizes if size.measured)
    assert (report.of(small).measured or 0) <= 150 * KIB
    assert not report.of(100).measured
    assert any("do not fit on this machine" in note for note in report.notes)


@pytest.mark.parametrize(
    ("limit", "said"),
    [(1000, " samples."), (2**40, " samples or more.")],
)
def test_the_largest_batch_is_extrapolated_to_100_times_the_batch_at_most(limit: int, said: str) -> None:
    report = fit(wide(), quick(limit=limit * KIB))
    assert report.beyond is not None and 100 < report.beyond <= 100 * 100
    assert findings(report)[1].startswith("The whole batch fits in ")
    assert findings(report)[1].endswith(f"so would about {number_text(report.beyond)}{said}")


def test_the_largest_size_of_few_measurements_comes_from_the_curve() -> None:
    found = FitMeasurements(limit=Limit(10**6, "a test"), batch_size=64)
    found.measured = {1: 1000, 2: 2000}
    assert (found.largest, found.beyond) == (64, 1000)
    assert found.fastest is None
    found.limit = Limit(10**12, "a test")
    assert found.beyond == 6400, "at most a hundred times the batch"
    assert fit_module.PROBES >= 3
