"""Advice on accumulation from measured and given numbers."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from torch import nn

from superbatch.errors import InputError
from superbatch.lab import plot
from superbatch.lab.report.advice_text import alternative_table, caveats, models_table
from superbatch.lab.report.json import to_json
from superbatch.lab.studies import advise as study
from superbatch.lab.studies.advise import Options, advise
from superbatch.lab.studies.advise_options import WindowToJudge, given_noise, window_to_judge
from superbatch.lab.studies.shared_options import Interrupted, Progress
from superbatch.noise.meter import NoiseMeter, estimate
from superbatch.results.advice import Advice
from superbatch.tuning.noise_range import NoiseRange
from superbatch.tuning.scaling import gain
from tests.report_json import from_json
from tests.studies import own_recipe

GIVEN: dict[str, Any] = {"microbatch_size": 4, "accumulation_steps": 16, "ranks": 8, "noise": 4000.0}
TIMES: dict[str, Any] = {"microbatch_seconds": 0.1, "update_seconds": 0.05, "all_reduce_seconds": 1.0}


def test_advice_from_numbers_without_a_recipe() -> None:
    report = advise(None, Options(**GIVEN, **TIMES, learning_rate=1e-3, beta2=0.95, parameters=10**9))
    assert (report.verdict, report.recipe, report.noise_from, report.times_from) == (
        "helps",
        None,
        "given",
        "given",
    )
    assert report.alternative is not None
    assert report.alternative.optimizer == "adamw"
    assert report.alternative.after["beta2"] == pytest.approx(0.95 ** (1 / 16))
    assert report.alternative.rate == pytest.approx(math.sqrt(gain(1 / 16, 4000 / 512)))
    assert report.accumulator_bytes == 4 * 10**9
    said = "For Adam the noise scale depends on an assumption about its preconditioner (q = 0, 1, 2)"
    assert any(each.startswith(said) for each in caveats(report))
    sgd = advise(None, Options(**GIVEN, **TIMES, learning_rate=1e-3, optimizer="sgd"))
    assert not any("Adam" in each for each in caveats(sgd))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"noise": None}, "Without a recipe --noise"),
        ({"microbatch_seconds": None}, "Without a recipe --micro-seconds"),
        ({"update_seconds": None}, "Without a recipe --update-seconds"),
        ({"microbatch_size": None}, "Give --microbatch-size"),
        ({"batch_size": 512}, "two of them determine the third"),
        ({"accumulation_steps": 1}, "there is no accumulation to judge"),
        ({"ranks": 0}, "ranks=0"),
        ({"noise_low": 5000.0}, "--noise-low <= --noise"),
        ({"noise": -1.0}, r"^noise=-1.0 is not positive. Give a number above 0.$"),
        ({"noise": math.inf}, "noise=inf is not positive"),
        ({"noise_low": -1.0}, "outside of its interval, -1 to .*0 <= --noise-low"),
        ({"learning_rate": 0.1, "optimizer": "lion"}, "lion"),
    ],
)
def test_missing_or_wrong_numbers_raise(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        advise(None, Options(**{**GIVEN, **TIMES, **change}))


def test_the_accumulation_in_question_follows_from_the_options() -> None:
    plane = own_recipe.plane()  # a batch of 20

    def half(samples: int) -> int:
        return samples // 2

    asked = {
        WindowToJudge(20, 8): window_to_judge(plane, Options()),
        WindowToJudge(10, 2): window_to_judge(plane, Options(), largest=half),
        WindowToJudge(5, 4): window_to_judge(plane, Options(microbatch_size=5)),
        WindowToJudge(20, 3): window_to_judge(plane, Options(accumulation_steps=3)),
        WindowToJudge(8, 5): window_to_judge(plane, Options(batch_size=80, accumulation_steps=5, ranks=2)),
        WindowToJudge(20, 2): window_to_judge(plane, Options(batch_size=80, ranks=2), largest=half),
        WindowToJudge(7, 12): window_to_judge(None, Options(microbatch_size=7, batch_size=80)),
    }
    assert all(wanted == found for wanted, found in asked.items()), asked
    with pytest.raises(InputError, match="there is no accumulation to judge"):
        window_to_judge(plane, Options(batch_size=40))


def test_a_range_may_lack_a_value_or_an_end() -> None:
    assert given_noise(Options()) is None
    assert given_noise(Options(noise_high=50.0)) == NoiseRange(None, 0.0, 50.0)
    assert given_noise(Options(noise=10.0, noise_low=5.0)) == NoiseRange(10.0, 5.0, 10.0)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(study, "ROUNDS", 3)


def plane_noise(recipe: Any, model: nn.Module) -> float:
    """Return the true noise scale T / |G|^2 of all data, by per-sample gradients."""
    batch = recipe.batch(torch.arange(recipe.samples))
    rows = []
    for index in range(recipe.samples):
        one = {name: leaf[index : index + 1] for name, leaf in batch.items()}
        loss = recipe.loss_fn(model)(one)
        rows.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))]))
    gradients = torch.stack(rows).double()
    mean = gradients.mean(0)
    return float((gradients - mean).square().sum() / (len(rows) - 1) / mean.square().sum())


@pytest.mark.usefixtures("quick")
def test_the_noise_scale_of_a_recipe_is_measured() -> None:
    # At a rate near 0 the model does not change, so its noise scale is constant.
    recipe = own_recipe.plane(learning_rates={"sgd": 1e-9}, updates=250)
    report = advise(recipe, Options(threads=1))
    assert report.noise_from == "measured over 250 updates of 20 samples"
    true = plane_noise(recipe, recipe.model(0))
    assert report.noise is not None
    assert report.noise_low / 1.5 < true < report.noise_high * 1.5, "a 95 % interval, and some room"
    assert report.noise_high < 3 * report.noise_low, "premise: the interval is bounded"
    assert (report.microbatch_size, report.asked, report.parameters) == (20, 8, 49)
    assert report.microbatch_seconds > 0 < report.update_seconds
    assert report.peak is not None and report.whole is None and report.limit is not None
    assert report.alternative is not None and report.alternative.after["lr"] == pytest.approx(1e-9)
    assert report.versions.keys() >= {"superbatch", "torch", "python"}


@pytest.mark.usefixtures("quick")
def test_models_of_adam_are_measured_reported_and_plotted() -> None:
    recipe = own_recipe.plane(learning_rates={"adam": 1e-9, "sgd": 1e-9}, updates=150)
    report = advise(recipe, Options(threads=1))
    assert [each.power for each in report.models] == [0, 1, 2]
    plain, *others = report.models
    assert (plain.noise, plain.low, plain.high) == (report.noise, report.noise_low, report.noise_high)
    assert len({each.noise for each in report.models}) == 3
    assert [row[0] for row in models_table(report).rows] == ["0", "1", "2"]
    assert not any("an assumption about its" in each for each in caveats(report)), "it was measured"
    for time in report.of_asked.by_model:
        assert time is None or report.of_asked.low <= time <= report.of_asked.high
    assert any(each.noise is not None for each in others), "premise: it is determined here"
    labels = [text.get_text() for text in plot.advice(report).legends[0].get_texts()]
    assert [label for label in labels if label == "band of Adam's models"]
    assert from_json(Advice, to_json(report)) == report
    sgd = advise(recipe, Options(threads=1, optimizer="sgd", updates=20))
    assert sgd.models == () and not models_table(sgd).rows


@pytest.mark.usefixtures("quick")
def test_given_numbers_are_not_measured() -> None:
    told: list[str] = []
    report = advise(
        own_recipe.plane(),
        Options(microbatch_size=5, noise=50.0, microbatch_seconds=1.0, update_seconds=2.0, optimizer="adam"),
        progress=lambda event: told.append(event.finished),
    )
    assert (report.microbatch_seconds, report.update_seconds, report.noise) == (1.0, 2.0, 50.0)
    assert not any("update" in each for each in told)
    assert report.asked == 4 and report.whole is not None and report.peak is not None
    assert report.whole > report.peak
    assert report.alternative is not None and report.alternative.optimizer == "adam"
    assert report.alternative.before["lr"] == pytest.approx(0.01), "the recipe's rate is for its batch, 4 x 5"


@pytest.mark.usefixtures("quick")
def test_coupled_samples_leave_the_noise_scale_undetermined() -> None:
    coupled = own_recipe.plane(
        loss_fn=lambda model: lambda batch: (model(batch["x"])[:, 0] - batch["y"]).mean().square()
    )
    report = advise(coupled, Options(microbatch_size=5))
    assert report.verdict == "undetermined"
    assert report.noise is None
    assert any("samples influence each other" in note for note in report.notes)


@pytest.mark.usefixtures("quick")
def test_too_few_updates_are_not_enough() -> None:
    report = advise(own_recipe.plane(), Options(microbatch_size=5, updates=4))
    assert report.noise is None
    assert any(re.search("4 windows measured; 8 needed", note) for note in report.notes)


@pytest.mark.usefixtures("quick")
def test_an_interruption_keeps_the_measurements() -> None:
    def stop(event: Progress) -> None:
        if event.finished == "update 12":
            raise KeyboardInterrupt

    with pytest.raises(Interrupted) as stopped:
        advise(own_recipe.plane(), Options(microbatch_size=5), progress=stop)
    report: Advice = stopped.value.report
    assert report.partial
    assert report.noise_from.startswith("measured over 12 updates")

    def at_once(event: Progress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as plain:
        advise(own_recipe.plane(), Options(microbatch_size=5), progress=at_once)
    assert not isinstance(plain.value, Interrupted)


@pytest.mark.usefixtures("quick")
def test_random_state_and_threads_are_restored() -> None:
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    advise(own_recipe.plane(), Options(microbatch_size=5, updates=10))
    assert torch.equal(torch.rand(3), expected)
    assert torch.get_num_threads() == 1


def test_the_noise_scale_counts_samples() -> None:
    """In units of micro-batches of 8 it would be 8 times too small."""
    meter = NoiseMeter()
    for sign in (1, -1) * 10:
        meter.add({"all": estimate(a2=(1.0 + (3.0 + sign * 0.1) ** 2) / 4, b2=4.0, q=0.5)}, samples=16)
    found = meter.estimate()
    assert found.batch_size == pytest.approx(16 * found.variance / 16 / found.signal, rel=1e-9)


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        ({"learning_rate": 0.0}, "learning_rate=0.0 is not positive. Give a number above 0"),
        ({"learning_rate": -1.0}, "learning_rate=-1.0"),
        ({"beta2": 1.5}, "beta2=1.5.*between 0 and 1"),
        ({"weight_decay": -1.0}, "weight_decay=-1.0"),
        ({"microbatch_seconds": 0.0}, "microbatch_seconds=0.0"),
        ({"update_seconds": math.nan}, "update_seconds=nan"),
        ({"all_reduce_seconds": -1.0}, "all_reduce_seconds=-1.0"),
        ({"seconds": math.nan}, "seconds=nan"),
        ({"parameters": math.inf}, "parameters=inf is not a positive integer"),
        ({"device": "tpu"}, "device='tpu'.*Use cpu or cuda"),
    ],
)
def test_invalid_numbers_are_refused_before_any_measurement(
    changed: dict[str, Any], match: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(*_: Any) -> None:
        raise AssertionError("it was measured")

    monkeypatch.setattr(study, "_measure", measure)
    with pytest.raises(AssertionError, match="it was measured"):
        advise(own_recipe.plane(), Options())
    with pytest.raises(InputError, match=match):
        advise(own_recipe.plane(), Options(**changed))


@pytest.mark.usefixtures("quick")
def test_a_rate_belongs_to_the_batch_it_was_given_for() -> None:
    """The recipe's rate for Adam is 0.01 at its batch of 20 and scales with the root of the batch."""
    numbers: dict[str, Any] = {"noise_high": 1e9, "optimizer": "adam", "microbatch_size": 20}

    def accumulated(**options: Any) -> dict[str, float]:
        report = advise(own_recipe.plane(), Options(**numbers, **options))
        assert report.alternative is not None and report.alternative.rule == "sqrt"
        return report.alternative.before

    for stated in ({"accumulation_steps": 4}, {"batch_size": 80}):
        assert accumulated(**stated)["lr"] == pytest.approx(0.01 * 2), (
            "the recipe's rate is for its own batch"
        )
        given = accumulated(**stated, learning_rate=0.05, beta2=0.9)
        assert (given["lr"], given["beta2"]) == pytest.approx((0.05, 0.9)), (
            "and this one for that in question"
        )
    given = accumulated(learning_rate=0.05, beta2=0.9)  # the default is eight micro-batches
    assert (given["lr"], given["beta2"]) == pytest.approx((0.05 * 8**0.5, 0.9**8))


def test_the_legend_of_a_plot_is_beside_the_curves() -> None:
    for accumulation_steps, noise in ((2, 1e9), (8, 1e-3), (128, 50.0)):
        options = Options(**(GIVEN | {"accumulation_steps": accumulation_steps, "noise": noise}), **TIMES)
        figure = plot.advice(advise(None, options))
        figure.canvas.draw()
        (legend,) = figure.legends
        labels = [text.get_text() for text in legend.get_texts()]
        assert f"in question: K = {accumulation_steps}" in labels and "time" in labels
        box = legend.get_window_extent()
        assert not box.overlaps(figure.axes[0].get_window_extent())
        assert figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1 and box.y0 >= figure.bbox.y0


def test_a_beta_near_one_is_not_rounded_to_one() -> None:
    options = Options(
        **(GIVEN | {"accumulation_steps": 4096, "noise": 1e9}), **TIMES, learning_rate=1e-3, beta2=0.999
    )
    rows = {name: (old, new) for name, old, new in alternative_table(advise(None, options)).rows}
    assert rows["beta2"] == ("0.999", "0.999999756")
    assert float(rows["beta2"][1]) == pytest.approx(0.999 ** (1 / 4096), rel=1e-8)
