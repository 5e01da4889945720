"""Known values of functions of the studies."""

from __future__ import annotations

import time
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from superbatch.errors import InputError
from superbatch.lab.recipes import load_recipe
from superbatch.lab.report.study import StudyArm, StudyRun
from superbatch.lab.studies import quick, study_precision, trial_run
from superbatch.lab.studies.advise import Options as AdviceOptions
from superbatch.lab.studies.advise import advise
from superbatch.lab.studies.advise_options import WindowToJudge, check_options, given_noise, window_to_judge
from superbatch.lab.studies.arms import participants_of
from superbatch.lab.studies.backends import load_backend
from superbatch.lab.studies.catalogue import entry_of
from superbatch.lab.studies.compare import Options as CompareOptions
from superbatch.lab.studies.compare import compare
from superbatch.lab.studies.exchange import check_ranks, exchange_seconds, rank_and_count, with_exchange_time
from superbatch.lab.studies.fit import Options as FitOptions
from superbatch.lab.studies.fit import busy, fit
from superbatch.lab.studies.fit_measurements import FitMeasurements
from superbatch.lab.studies.noise import Options as NoiseOptions
from superbatch.lab.studies.noise import noise
from superbatch.lab.studies.on_torch import orders
from superbatch.lab.studies.setting import (
    ArmSpec,
    Setting,
    Split,
    batches,
    curve_updates,
    default_splits,
    parse_split,
    parse_splits,
    splits_of,
)
from superbatch.lab.studies.shared_options import given_options, versions
from superbatch.lab.studies.statistics import (
    Summary,
    limits_of,
    runs_needed,
    smallest_gap,
    summarise,
    tost_paired,
    tost_welch,
)
from superbatch.lab.studies.study import Options, seeds_per_process
from superbatch.lab.studies.study_common import diverged, equivalence_test, rate_of, smooth, stream
from superbatch.lab.studies.study_coupled import checked_device
from superbatch.lab.studies.study_critical_batch import predicted_waste
from superbatch.lab.studies.survey import Options as SurveyOptions
from superbatch.lab.studies.survey import survey
from superbatch.lab.studies.survey_tests import paired_difference
from superbatch.lab.studies.train import Options as TrainOptions
from superbatch.lab.studies.train import batches_from, train
from superbatch.results.memory import Limit
from superbatch.torch.options import FrozenBatchNorm
from superbatch.torch.window.sync.local import Local
from superbatch.tuning.noise_range import NoiseRange
from superbatch.tuning.survey import Sweep


def test_splits_are_parsed() -> None:
    assert parse_split("2x50").sizes == (50, 50)
    assert parse_split("3/1").sizes == (3, 1)
    assert [split.name for split in parse_splits("1x100,5x20")] == ["1x100", "5x20"]
    assert ArmSpec(parse_split("80/15/5"), "mean of means", "wrong").name == "80/15/5 mean of means"
    assert parse_split("5x20").sizes_of(40) == (20, 20), "near-equal"
    assert parse_split("80/15/5").sizes_of(40) == (32, 6, 2), "in the split's proportions"


@pytest.mark.parametrize(
    ("batch", "names"),
    [
        (100, ["1x100", "5x20", "10x10", "20x5"]),
        (32, ["1x32", "4x8", "8x4", "16x2"]),
        (7, ["1x7", "4/3", "7x1"]),
    ],
)
def test_default_splits(batch: int, names: list[str]) -> None:
    assert [split.name for split in default_splits(batch)] == names


def test_batches_are_drawn_with_tails_and_resumed() -> None:
    setting = Setting(
        arms=(), updates=4, batch_size=4, tail=2, dtype="float32", optimizer="sgd", learning_rate=0.1
    )
    assert [len(batch) for batch in orders(11, setting, seed=0)] == [4, 2, 4, 2]
    cut = [batch.tolist() for batch in batches(lambda: np.arange(11), 11, setting)]
    assert cut == [[0, 1, 2, 3], [4, 5], [0, 1, 2, 3], [4, 5]]
    assert (curve_updates(3), curve_updates(1000)[:3]) == ((1, 2, 3), (20, 40, 60))
    resumed = batches_from(5, 0, 0, 3)
    _, second = next(resumed), next(resumed)
    assert torch.equal(next(batches_from(5, 0, 3, 3)), second)
    assert sorted(stream(4, 6, seed=0)[:4].tolist()) == [0, 1, 2, 3]


def test_functions_of_studies() -> None:
    assert entry_of("precision").question == "How much does a sum of K gradients in bfloat16 lose?"
    assert seeds_per_process("digits", Options(workers=2), (0, 1, 2)) == 2
    assert (rate_of(load_recipe("digits"), 16), rate_of(load_recipe("text"), 8)) == (0.32, 0.25)
    assert str(diverged(3.0)).startswith(
        "Training with lr 3 diverges: its loss is not finite. Give a smaller learning rate"
    )
    assert smooth([4.0, 4.0, 4.0], batch=8, half_life=16)[-1] == 4.0
    assert checked_device("cpu") == "cpu"
    assert round(predicted_waste(64.0, 8, 8), 3) == 1.778
    assert list(versions(torch="2.13")) == ["superbatch", "torch", "python", "platform"]


def test_a_ratio_within_the_margin_is_equivalent() -> None:
    one, other = (
        StudyArm(
            name=name,
            how="",
            facts={},
            runs=tuple(StudyRun(seed=seed, values={"loss": factor * (1 + seed)}) for seed in range(3)),
        )
        for name, factor in (("A", 1.0), ("B", 1.05))
    )
    test = equivalence_test(other, one, "loss", margin=1.1, ratio=True)
    assert test is not None
    assert (round(test.difference, 3), test.result.equivalent) == (1.05, True)


@pytest.mark.parametrize(
    ("add", "kept"),
    [
        (study_precision.naive, 256),
        (partial(study_precision.naive, dtype=torch.float32), 512),
        (study_precision.kahan, 512),
        (study_precision.pairwise, 512),
    ],
)
def test_sums_of_ones_in_bfloat16(add, kept: int) -> None:
    """A naive sum of equal signs stops growing after 2^8; the others do not."""
    assert add(torch.full((512, 1), 1.0, dtype=torch.bfloat16)).item() == kept


def test_stochastic_rounding_has_no_bias() -> None:
    torch.manual_seed(0)
    assert (
        400
        < study_precision.stochastic(torch.full((512, 100), 1.0, dtype=torch.bfloat16)).float().mean()
        < 600
    )


def test_functions_of_backends_and_recipes() -> None:
    assert load_backend("torch").title == "torch"
    assert participants_of("error") == []
    (frozen,) = participants_of("frozen")
    assert isinstance(frozen, FrozenBatchNorm)
    assert TrainOptions(updates=100).precision == "float32"


def test_commands_from_python() -> None:
    compared_digits = compare("digits", CompareOptions(splits="5x20", updates=3, runs=2, dtype="float64"))
    assert [arm.name for arm in compared_digits.arms] == ["1x100", "5x20"]
    apart = compared_digits.arms[1].weight_difference
    assert apart is not None and apart < 1e-12
    fitted = fit("digits", FitOptions(seconds=30))
    assert [size.samples for size in fitted.sizes] == [1, 2, 4, 7, 13, 25, 50, 100]
    assert fitted.largest == 100
    assert fitted.of(50).predicted == fitted.of(50).measured
    assert train(load_recipe("digits"), TrainOptions(updates=2, microbatch_size=50)).updates == 2
    measured = noise("digits", NoiseOptions(updates=60, seed=1))
    assert len(measured.points) == 30
    assert measured.steps[0].time in (1.0, None)
    surveyed = survey("digits", SurveyOptions(splits="10x10", repeats=2, updates=20, dtype="float64"))
    assert [arm.name for arm in surveyed.arms] == ["1x100", "1x100 again", "10x10"]
    assert max(surveyed.arms[2].pairs) <= surveyed.tolerance


def test_options_in_a_report() -> None:
    assert given_options(CompareOptions(splits=["5x20", "80/15/5"]))["splits"] == "5x20,80/15/5"
    assert given_options(SurveyOptions(splits="10x10"))["splits"] == "10x10"
    kept = {"limit": "1024", "dtype": "float32", "device": "cpu", "seconds": "1"}
    assert given_options(FitOptions(limit=1024, seconds=1)) == kept
    assert given_options(AdviceOptions(noise=1500, updates=20))["noise"] == "1500"


def test_splits_of_a_recipe() -> None:
    recipe = load_recipe("digits")
    assert splits_of(recipe, "5x20", None) == [parse_split("5x20")]
    assert splits_of(recipe, None, None) == default_splits(recipe.batch_size)
    assert splits_of(recipe, None, 32) == default_splits(32)
    surveyed = splits_of(recipe, None, 32, counts=(10, 20))
    assert [split.name for split in surveyed] == ["1x32", "8x4", "16x2"]
    with pytest.raises(InputError, match="batch_size=7 with the split 5x20, which is of a batch of 100"):
        splits_of(recipe, "5x20", 7)
    with pytest.raises(InputError, match=r"A batch of 2000 samples.*1297 training samples"):
        splits_of(recipe, "20x100", None)


def test_functions_of_the_advice() -> None:
    options = AdviceOptions(
        microbatch_size=4,
        accumulation_steps=16,
        ranks=8,
        noise=4000,
        microbatch_seconds=0.1,
        update_seconds=0.05,
        all_reduce_seconds=1.0,
    )
    advice = advise(None, options)
    assert (advice.verdict, advice.command["noise"]) == ("helps", "4000")
    check_options(AdviceOptions(beta2=0.95, learning_rate=1e-3))
    assert window_to_judge(None, AdviceOptions(microbatch_size=4, batch_size=512, ranks=8)) == WindowToJudge(
        4, 16
    )
    assert given_noise(AdviceOptions(noise=1500, noise_high=3000)) == NoiseRange(1500, 1500, 3000)
    assert given_noise(AdviceOptions(noise_low=200)) == NoiseRange(None, 200, np.inf)


def test_functions_of_a_survey() -> None:
    assert ArmSpec(Split("2x5", (5, 5)), "missing 1/K", "wrong").name == "2x5 missing 1/K"
    sweeps = [Sweep("lr", 1e-3, 1.0, 20) for _ in range(2)]
    for sweep, loss in zip(sweeps * 2, (2.0, 2.1, 1.0, 1.0), strict=True):
        sweep.add(loss)
    assert paired_difference(sweeps[1].report(), sweeps[0].report()) == pytest.approx(0.05)


def test_statistics_of_known_values() -> None:
    assert summarise([1.0, 2.0, 3.0]) == Summary(mean=2.0, sd=1.0, runs=3)
    assert tost_paired([0.1, -0.1, 0.2, 0.0], margin=0.5).equivalent
    assert round(tost_paired([0.4, 0.4, 0.4], margin=0.5, step=0.2).p_value, 2) == 0.17
    real, split = Summary(95.0, 0.172, 10), Summary(95.2, 0.303, 10)
    assert round(tost_welch(split, real, margin=0.5).p_value, 4) == 0.0081
    assert smallest_gap([95.0, 95.5, 95.0, 97.0]) == 0.5
    assert smallest_gap([95.0, 95.0]) == 0.0
    assert runs_needed(0.35, margin=0.5) == 9
    assert limits_of([]) == ()
    assert "63 % of all seeds" in limits_of([tost_paired([0.0, 0.1, 0.0], margin=1.0)])[0]


@pytest.mark.parametrize(
    ("cost", "most", "length"),
    [
        (lambda samples: samples / 100, 5000, (1000, True)),
        (lambda samples: 1 + samples / 1000, 50000, (9000, True)),
        (lambda samples: samples / 10000, 5000, (5000, True)),
        (lambda samples: samples / 2, 5000, (100, False)),
    ],
)
def test_length_of_a_quick_run(cost, most: int, length: tuple[int, bool]) -> None:
    assert quick.affordable(cost, least=100, most=most, runs=4) == length


def test_a_quick_run_is_timed_and_noted() -> None:
    assert 0.01 <= quick.seconds_of(lambda: time.sleep(0.01)) < 1
    assert quick.note("1,200 samples", fits=True) == (
        "--quick: 1,200 samples in each run, so that all runs end within a minute on this machine."
    )


def test_one_rank_has_no_all_reduce() -> None:
    assert rank_and_count() == (0, 1)
    assert (check_ranks(8, 1), check_ranks(1, 2), check_ranks(2, 2)) == (8, 2, 2)
    _, notes = with_exchange_time(load_recipe("digits"), AdviceOptions(ranks=8))
    assert notes[0].startswith("The exchange of gradients over 8 ranks was not measured and counts as 0 s: ")
    assert 0 <= exchange_seconds(nn.Linear(3, 1), Local()) < 1


def test_functions_of_fit() -> None:
    found = FitMeasurements(limit=Limit(1000, "a test"), batch_size=100)
    found.measured = {1: 110, 10: 200}
    found.plan_sizes()
    assert (found.largest, found.largest_in_split, found.planned) == (90, 50, (1, 2, 4, 7, 13, 25, 50, 100))
    found = FitMeasurements(limit=Limit(1, ""), batch_size=8)
    found.timings = {2: [9.0, 4.0], 4: [9.0, 2.0]}
    assert [found.seconds_per_sample(samples) for samples in (1, 3, 8)] == [4.0, 3.0, 2.0]
    assert all("load average" in sentence for sentence in busy())
    times = [trial_run.microbatches_to_time(seconds) for seconds in (1.0, 0.1, 0.001, 0.0)]
    assert times == [1, 2, 10, 64]
    digits = trial_run.prepare_trial(
        load_recipe("digits"), optimizer="sgd", dtype="float32", device="cpu", samples=8
    )
    assert len(digits.window_of(4, count=3)) == 3
    assert digits.peak(4) > 4 * 2410, "gradients, and more"
    pairs = trial_run.prepare_trial(
        load_recipe("pairs"), optimizer="adam", dtype="float32", device="cpu", samples=8
    )
    refused = trial_run.coupling_error(pairs)
    assert refused is not None
    assert refused.startswith("No weight explains the loss: samples influence each other")
    assert "Instead use WholeBatch " in refused
