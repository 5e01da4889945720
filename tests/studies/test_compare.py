"""The comparison: exact arms equal the real batch, wrong arms do not, and the report shows it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from superbatch.errors import CoupledSamplesError, InputError, LossSpecError, SuperbatchError
from superbatch.lab import plot
from superbatch.lab.recipes import Recipe, load_recipe
from superbatch.lab.report.comparison import Arm, Comparison
from superbatch.lab.report.table import comparison_table
from superbatch.lab.report.verdict import failures, verdict
from superbatch.lab.studies import arms as arms_module
from superbatch.lab.studies import on_torch
from superbatch.lab.studies.arms import cut, update_function
from superbatch.lab.studies.backends import difference, train_seed
from superbatch.lab.studies.compare import Options, compare, setting_from
from superbatch.lab.studies.on_torch import orders, weights_of
from superbatch.lab.studies.setting import (
    Setting,
    Split,
    curve_updates,
    default_splits,
    parse_split,
    parse_splits,
)
from superbatch.lab.studies.shared_options import Interrupted, Progress
from tests.studies import own_recipe

OWN = Path(own_recipe.__file__)
ROUNDING = 1e-12


def arm(report: Comparison, name: str) -> Arm:
    (found,) = [each for each in report.arms if each.name == name]
    return found


def recipes() -> list[Any]:
    return [
        pytest.param(lambda: load_recipe("digits"), Options(updates=40), id="digits"),
        pytest.param(
            lambda: load_recipe("digits-conv"),
            Options(updates=20, optimizer="adam", learning_rate=0.02),
            id="digits-conv",
        ),
        pytest.param(lambda: load_recipe("text"), Options(updates=6), id="text"),
        pytest.param(own_recipe.plane, Options(optimizer="adam"), id="mean"),
        pytest.param(own_recipe.plane_sum, Options(learning_rate=0.05), id="sum"),
        pytest.param(own_recipe.plane_returned, Options(), id="returned"),
    ]


@pytest.mark.parametrize(("make", "options"), recipes())
@pytest.mark.sampled(2)
def test_exact_arms_equal_the_real_batch_and_wrong_ones_do_not(
    make: Callable[[], Recipe], options: Options
) -> None:
    recipe = make()
    options = replace(options, runs=2, dtype="float64", include_wrong=True)
    report = compare(recipe, options)
    exact = [each for each in report.arms if each.claim == "exact"]
    wrong = [each for each in report.arms if each.claim == "wrong"]
    assert len(exact) >= 3
    assert [each.name.split(" ", 1)[1] for each in wrong] == ["mean of means", "fixed tail divisor"]
    assert report.tail is not None, "the premise: there is a tail"
    losses = report.arms[0].runs[0].losses
    assert losses[-1] < 0.95 * losses[0], "the premise: the recipe trains"
    for each in exact:
        assert each.weight_difference is not None
        assert each.weight_difference <= ROUNDING, each.name
        assert [run.metric for run in each.runs] == pytest.approx([r.metric for r in report.arms[0].runs])
    for each in wrong:
        assert each.weight_difference is not None
        assert each.weight_difference > 1e-4, each.name
    assert failures(report) == []


def test_arms_of_a_seed_share_initial_weights_and_differ_in_micro_batches() -> None:
    """Premises of the comparison."""
    recipe = own_recipe.plane()
    setting = setting_from(recipe, Options(splits="4x5,13/5/2", updates=5, dtype="float64"))
    initial = weights_of(recipe.model(0).double())
    (batch,) = (recipe.batch(indices) for indices in list(orders(240, setting, 0))[:1])
    loss_fn = recipe.loss_fn(recipe.model(0))
    for sizes in ((5, 5, 5, 5), (13, 5, 2)):
        parts = cut(batch, sizes)
        assert [len(part["y"]) for part in parts] == list(sizes)
        losses = [loss_fn(part).item() for part in parts]
        assert max(losses) > 1.2 * min(losses), "micro-batches differ"
    for plan in setting.arms:
        model = recipe.model(0).double()
        assert difference(weights_of(model), initial)["weight_difference"] == 0
        update = update_function(plan, recipe, model, torch.optim.SGD(model.parameters(), lr=0.05))
        update({name: values.double() for name, values in batch.items()})
        assert difference(weights_of(model), initial)["weight_difference"] > 0.01, "the weights moved"


def test_float32_differs_by_rounding() -> None:
    report = compare("digits", Options(splits="5x20", updates=30, runs=2))
    apart = arm(report, "5x20").weight_difference
    assert apart is not None
    assert 0 < apart < 1e-6


@pytest.mark.parametrize(
    ("name", "updates"), [("digits-bn", 40), ("digits-conv-bn", 10), ("pairs", 20), ("crowd", 20)]
)
def test_coupled_samples_train_like_the_real_batch_unlike_plain_accumulation(name: str, updates: int) -> None:
    """The last recipe has dropout too; its random numbers are those of the real batch."""
    recipe = (
        own_recipe.crowd(coupled="exact", batchnorm="per_microbatch")
        if name == "crowd"
        else load_recipe(name)
    )
    options = Options(splits="5x20,80/15/5", updates=updates, runs=2, dtype="float64")
    real, *others = compare(recipe, options).arms
    assert [each.name for each in others] == [
        "5x20",
        "80/15/5",
        "5x20 plain accumulation",
        "80/15/5 plain accumulation",
    ]
    assert real.runs[0].losses[-1] < 0.97 * real.runs[0].losses[0], "the premise: the recipe trains"
    for exact in others[:2]:
        assert (exact.claim, exact.how) == ("exact", "superbatch.torch.WholeBatch")
        assert exact.weight_difference is not None
        assert exact.weight_difference <= ROUNDING, exact.name
        assert [run.metric for run in exact.runs] == pytest.approx([run.metric for run in real.runs])
        for ours, theirs in zip(exact.runs, real.runs, strict=True):
            assert ours.losses == pytest.approx(theirs.losses)
    for plain in others[2:]:
        assert (plain.claim, plain.how[:24]) == ("inexact", "micro-batches one by one")
        assert plain.weight_difference is not None
        assert plain.weight_difference > 5e-3, plain.name


def test_the_report_names_the_exact_arms() -> None:
    report = compare("digits-bn", Options(splits="5x20", updates=40, runs=2, dtype="float64"))
    assert failures(report) == []
    assert any("(WholeBatch)" in note for note in report.notes)
    first, second = verdict(report)
    assert first.startswith("Every split trains like the real batch: weights within")
    assert second.startswith("Plain accumulation does not give the real batch's weights: they are ")
    rows = [row[0] for row in comparison_table(report).rows]
    assert rows == ["1x100 (real batch)", "5x20", "5x20 plain accumulation (not exact)"]
    figure = plot.comparison(report)
    drawn = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]  # pyright: ignore[reportOptionalMemberAccess]  (it is there, or the test fails)
    assert drawn == ["1x100 (real batch)", "5x20", "5x20 plain accumulation"]


def test_batchnorm_per_micro_batch_is_not_called_exact() -> None:
    recipe = replace(load_recipe("digits-bn"), coupled="error")
    report = compare(recipe, Options(splits="5x20", updates=40, runs=2, dtype="float64"))
    split = arm(report, "5x20")
    assert split.claim == "inexact"
    assert split.how.endswith("participants=[GhostBatchNorm()]")
    assert split.weight_difference is not None
    assert split.weight_difference > 1e-3
    assert any("BatchNorm" in note for note in report.notes)
    assert failures(report) == ["no arm of digits-bn claims to be exact: there is nothing to check"]
    assert verdict(report)[0].startswith("The splits do not give the real batch's weights: they are ")


def test_coupled_samples_are_refused_before_any_training(monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[object] = []
    monkeypatch.setattr(on_torch, "timed", lambda *args: trained.append(args))
    with pytest.raises((CoupledSamplesError, LossSpecError), match=r"samples influence each other.*Instead "):
        compare(replace(load_recipe("pairs"), coupled="error"), Options(runs=1))
    assert trained == []


# ----------------------------------------------------------------------------------------- the check can fail


def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the Accumulator by a mean of means."""

    right = arms_module.accumulator_of

    def wrong(split: Split, recipe: Recipe, *rest: Any, check: bool) -> Any:
        return right(split, replace(recipe, weight=lambda batch: 1.0), *rest, check=False)

    monkeypatch.setattr(arms_module, "accumulator_of", wrong)


def test_a_broken_accumulator_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    options = Options(splits="80/15/5", updates=20, runs=2)
    assert failures(compare("digits", options)) == [], "the premise: the real accumulator passes"
    broken(monkeypatch)
    found = failures(compare("digits", options))
    assert len(found) >= 1
    assert "80/15/5: weights differ by 0.0" in found[0]
    assert verdict(compare("digits", options))[0].startswith("NOT EXACT")


def test_a_report_that_shows_nothing_fails_the_check() -> None:
    report = compare("digits", Options(splits="5x20", updates=2, runs=2))
    nothing = replace(report, arms=(report.arms[0], replace(report.arms[1], runs=(), weight_difference=None)))
    assert failures(report) == []
    assert "5x20: weights differ by None" in failures(nothing)[0]
    not_a_number = replace(report.arms[1], weight_difference=math.nan)
    assert len(failures(replace(report, arms=(report.arms[0], not_a_number)))) == 1
    assert "the comparison was interrupted" in failures(replace(report, partial=True))


# ------------------------------------------------------------------------------------------ order and weights


def setting_of(**changes: Any) -> Setting:
    values: dict[str, Any] = {
        "arms": (),
        "updates": 30,
        "batch_size": 10,
        "tail": None,
        "dtype": "float32",
        "optimizer": "sgd",
        "learning_rate": 0.1,
    }
    return Setting(**(values | changes))


def test_without_a_tail_permutations_are_concatenated() -> None:
    batches = list(orders(25, setting_of(), seed=3))
    assert [len(batch) for batch in batches] == [10] * 30
    order = torch.cat(batches)
    for start in range(0, 300, 25):
        assert sorted(order[start : start + 25].tolist()) == list(range(25))
    assert order[:25].tolist() != order[25:50].tolist()


def test_the_order_depends_on_the_seed() -> None:
    first, again, other = (torch.cat(list(orders(25, setting_of(), seed))).tolist() for seed in (3, 3, 4))
    assert first == again != other


def test_with_a_tail_epochs_end_short() -> None:
    batches = list(orders(37, setting_of(tail=4), seed=0))
    sizes = [len(batch) for batch in batches]
    assert len(sizes) == 30
    assert sizes[:3] == [10, 10, 4], "updates // 10 - 1 full batches, then a tail"
    assert sizes.count(4) == 10
    assert len(set(torch.cat(batches[:3]).tolist())) == 24, "no sample twice in an epoch"


def test_few_samples_make_short_epochs() -> None:
    sizes = [len(batch) for batch in orders(16, setting_of(tail=4), seed=0)]
    assert sizes[:4] == [10, 4, 10, 4]


@pytest.mark.parametrize("updates", [1, 49, 50, 51, 1000])
def test_the_stretches_of_a_curve_cover_the_run(updates: int) -> None:
    ends = curve_updates(updates)
    assert ends[-1] == updates
    assert list(ends) == sorted(set(ends))
    assert len(ends) == min(50, updates)


def test_random_state_and_threads_are_restored() -> None:
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    compare("digits", Options(splits="5x20", updates=2, runs=1, threads=threads + 1))
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), before)


def test_difference_finds_the_parameter_and_accepts_zeros() -> None:
    reference = {"w": torch.tensor([3.0, 4.0]), "zero": torch.zeros(2)}
    same = difference({name: value.clone() for name, value in reference.items()}, reference)
    assert (same["weight_difference"], same["worst_difference"]) == (0.0, 0.0)
    moved = difference({"w": reference["w"], "zero": torch.tensor([0.005, 0.0])}, reference)
    assert moved["weight_difference"] == pytest.approx(0.001)
    assert (moved["worst_parameter"], moved["worst_difference"]) == ("zero", pytest.approx(1.0))
    lost = difference({"w": torch.tensor([math.nan, 0.0]), "zero": torch.zeros(2)}, reference)
    assert lost["weight_difference"] == math.inf


# ------------------------------------------------------------------------------------------------- splits


def test_splits_of_the_source() -> None:
    assert [split.name for split in default_splits(100)] == ["1x100", "5x20", "10x10", "20x5"]


@pytest.mark.parametrize("batch_size", [2, 3, 4, 5, 7, 12, 13, 32, 97, 100, 128, 1000])
def test_default_splits_cover_the_batch(batch_size: int) -> None:
    splits = default_splits(batch_size)
    assert len(splits) >= 2
    assert splits[0].sizes == (batch_size,)
    for split in splits:
        assert sum(split.sizes) == batch_size
        assert sum(split.sizes_of(max(1, batch_size // 3))) == max(1, batch_size // 3)
        assert min(split.sizes_of(max(1, batch_size // 3))) >= 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("5*20", r"The split '5\*20' cannot be read. Write KxM"),
        ("", "The split '' cannot be read"),
        ("0x5", "has an empty micro-batch"),
        ("5x0", "has an empty micro-batch"),
        ("80/0/20", "has an empty micro-batch"),
        ("5x20,3x30", "are of batches of 100 and 90 samples"),
    ],
)
def test_errors_of_splits(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_splits(text)


def test_the_real_batch_is_the_first_arm_and_occurs_once() -> None:
    recipe = load_recipe("digits")
    for splits in ("5x20,1x100", "1x100,5x20", "5x20", ("5x20", "5x20")):
        setting = setting_from(recipe, Options(splits=splits))
        assert [each.name for each in setting.arms] == ["1x100", "5x20"]
        assert [each.claim for each in setting.arms] == ["real", "exact"]


def test_a_split_may_be_unequal() -> None:
    assert parse_split("80/15/5").sizes_of(100) == (80, 15, 5)
    assert parse_split("98/1/1").sizes_of(10) == (9, 1)


# ------------------------------------------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (Options(updates=0), "updates=0 is not a positive integer. Give 1 or more"),
        (Options(runs=-1), "runs=-1"),
        (Options(runs=2.5), "runs=2.5"),  # pyright: ignore[reportArgumentType]  (that is the point)
        (Options(threads=0), "threads=0"),
        (Options(workers=0), "workers=0"),
        (Options(batch_size=0), "batch_size=0"),
        (Options(margin=0.0), "margin=0.0 is not positive"),
        (Options(learning_rate=math.nan), "learning_rate=nan"),
        (Options(dtype="bfloat16"), "dtype='bfloat16'.*Use one of float64, float32"),
        (
            Options(optimizer="lion"),
            "optimizer='lion'.*does not offer it.*Use one of sgd, momentum, adam, adamw",
        ),
        (
            Options(splits="1x100"),
            "The only split is the batch of 100 samples itself, so there is nothing to compare",
        ),
        (Options(batch_size=1), "The only split is the batch of 1 samples itself"),
        (Options(splits="5x20", batch_size=64), "batch_size=64 with the split 5x20"),
        (Options(splits="2x1000"), "A batch of 2000 samples: the recipe 'digits' has 1297"),
        (Options(splits="2x600", include_wrong=True), "an epoch with a short last batch needs 1680 samples"),
    ],
)
def test_errors_of_options(options: Options, message: str) -> None:
    with pytest.raises(InputError, match=message):
        compare("digits", options)


def test_a_recipe_object_cannot_be_sent_to_workers() -> None:
    with pytest.raises(InputError, match="each worker loads the recipe by its name"):
        compare(own_recipe.plane(), Options(workers=2))


def test_a_nonfinite_loss_is_a_superbatch_error() -> None:
    with pytest.raises(
        SuperbatchError, match=r"with loss inf, the loss is not finite.*\. Check that micro-batch"
    ):
        compare(own_recipe.plane(), Options(learning_rate=1e30, updates=30, runs=1))


# ------------------------------------------------------------------------------------------------- processes


def test_worker_processes_give_the_same_numbers() -> None:
    name = f"{OWN}:plane"
    options = Options(splits="4x5,13/5/2", updates=10, runs=3, dtype="float64")
    events: list[Progress] = []
    here = compare(name, options)
    spread = compare(name, replace(options, workers=2), progress=events.append)
    for one, other in zip(here.arms, spread.arms, strict=True):
        assert [run.seed for run in other.runs] == [0, 1, 2]
        assert [run.metric for run in one.runs] == [run.metric for run in other.runs]
        assert [run.losses for run in one.runs] == [run.losses for run in other.runs]
        assert one.weight_difference == other.weight_difference
    assert len([event for event in events if event.finished]) == 9
    assert events[-1].done == events[-1].total == 3 * 10 * (1 + 4 + 3)


def test_an_error_in_a_worker_reaches_the_caller() -> None:
    with pytest.raises(
        SuperbatchError, match=r"with loss inf, the loss is not finite.*\. Check that micro-batch"
    ):
        compare(f"{OWN}:plane", Options(learning_rate=1e30, updates=30, runs=2, workers=2))


def test_an_interrupt_carries_the_partial_report() -> None:
    def stop(event: Progress) -> None:
        if event.finished is not None and event.finished[:2] == (1, "4x5"):
            raise KeyboardInterrupt

    with pytest.raises(Interrupted) as caught:
        compare(own_recipe.plane(), Options(splits="4x5,2x10", updates=4, runs=5), progress=stop)
    report = caught.value.report
    assert report.partial
    assert [len(each.runs) for each in report.arms] == [2, 2, 1]
    assert report.arms[2].paired is None
    assert report.arms[1].paired is not None
    assert isinstance(caught.value, KeyboardInterrupt)


def test_an_interrupt_before_the_first_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(on_torch, "peak_bytes", stop)
    with pytest.raises(Interrupted) as caught:
        compare(own_recipe.plane(), Options(updates=4, runs=5))
    assert [each.mean for each in caught.value.report.arms] == [None] * len(caught.value.report.arms)
    assert verdict(caught.value.report)[0].startswith("Interrupted before")


# ------------------------------------------------------------------------------------------------- memory


def test_peak_memory_falls_with_the_micro_batch() -> None:
    report = compare("digits-conv", Options(splits="1x100,5x20,20x5", updates=1, runs=1))
    peaks = [each.peak_bytes for each in report.arms]
    assert all(peaks)
    assert peaks == sorted(peaks, key=lambda peak: -(peak or 0))
    assert (peaks[0] or 0) > 3 * (peaks[2] or 0)


def test_every_arm_of_a_seed_starts_from_the_same_weights() -> None:
    """The recipe ignores the seed and draws from the global generator."""
    recipe = own_recipe.plane(model=lambda seed: torch.nn.Sequential(torch.nn.Linear(4, 1)))
    setting = setting_from(recipe, Options(splits="4x5", updates=3, dtype="float64"))
    (_, real), (_, split) = train_seed(recipe, setting, 0)
    assert real.weight_difference is None
    assert split.weight_difference is not None
    assert split.weight_difference <= ROUNDING


@pytest.mark.slow
def test_the_experiment_of_the_first_source() -> None:
    """Expected: accuracy 95.4 +- 0.36, weights equal up to rounding, equivalence within half a point."""
    report = compare("digits", Options(workers=2))
    for each in report.arms:
        assert each.mean == pytest.approx(95.4, abs=0.4)
        assert each.sd == pytest.approx(0.36, abs=0.15)
        if each.claim == "exact":
            assert each.median_difference is not None
            assert each.median_difference < 1e-6
            assert each.welch is not None
            assert each.welch.p_value < 0.05
    assert failures(report) == []
