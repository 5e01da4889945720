"""Sharded parameters as one more `Sync`: two gloo ranks with a stand-in for FSDP2.

No other module handles shards: the models of `sharded_ranks` train through an ordinary Accumulator, and are
compared with the large batch over the data of both ranks.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from superbatch.errors import InputError
from superbatch.noise.meter import NoiseMeter
from superbatch.torch import Accumulator
from superbatch.torch.window.sync.local import Local
from tests.torch import sharded_ranks as ranks
from tests.torch.helpers import large_batch, mlp, mse, sgd
from tests.torch.two_ranks import found_by_both

Found = list[dict[str, Any]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """Results of each rank."""
    return found_by_both("tests.torch.sharded_ranks", tmp_path_factory.mktemp("ranks"))


def joint_batches(case: str) -> list[tuple[Tensor, ...]]:
    """Large batches of a case: the samples of both ranks."""
    if case == "weighted":
        samples = [*ranks.weighted_samples(0), *ranks.weighted_samples(1)]
        return [tuple(map(torch.cat, zip(*samples, strict=True)))]
    if case == "auto":
        return [tuple(map(torch.cat, zip(*(ranks.equal(rank) for rank in range(2)), strict=True)))] * 3
    both = zip(ranks.batches(0), ranks.batches(1), strict=True)
    return [tuple(map(torch.cat, zip(one, other, strict=True))) for one, other in both]


def trained_on_the_large_batch(case: str) -> tuple[nn.Module, Any]:
    model = mlp()
    objective = ranks.weighted if case == "weighted" else mse
    optimizer = sgd(model.parameters())
    clip = ranks.CLIP if case in ("clipped", "own norm") else None
    return model, large_batch(
        optimizer, lambda b: objective(model, b), joint_batches(case), max_grad_norm=clip
    )


def errors(parameters: dict[str, Tensor], reference: nn.Module) -> dict[str, float]:
    """Error of each parameter, relative to the change of the reference."""
    start = mlp().state_dict()
    return {
        name: float((parameters[name] - value).norm() / (value - start[name]).norm())
        for name, value in reference.state_dict().items()
    }


@pytest.mark.parametrize("case", ["clipped", "largest", "auto", "weighted", "few", "checked", "memory"])
def test_sharded_ranks_train_as_the_large_batch(case: str, found: Found) -> None:
    reference, seen = trained_on_the_large_batch(case)
    for one in (found[0][case], found[1][case]):
        assert max(errors(one["parameters"], reference).values()) <= 1e-12
        assert one["elements"] == sum(p.numel() for p in reference.parameters()) // 2 + 1, "premise: shards"
        assert [u.loss for u in one["updates"]] == pytest.approx(seen.losses, rel=1e-12)
        assert [u.grad_norm for u in one["updates"]] == pytest.approx(seen.norms, rel=1e-12)
        assert one["reductions"] == len(seen.losses), "one reduction per window"
        assert not one["left"]


def test_a_norm_of_one_rank_alone_differs_from_the_large_batch(found: Found) -> None:
    reference, _ = trained_on_the_large_batch("own norm")
    assert min(errors(found[0]["own norm"]["parameters"], reference).values()) > 1e-3


def test_all_ranks_take_equally_many_micro_batches(found: Found) -> None:
    one, other = ([u.microbatches for u in each["clipped"]["updates"]] for each in found)
    alone = [[-(-count // 2) for count in samples] for samples in ranks.SAMPLES]
    assert all(mine != theirs for mine, theirs in alone[::2]), "premise: alone, the ranks would differ"
    assert one == other == [max(counts) for counts in alone]


def test_ranks_agree_on_automatic_sizes(found: Found) -> None:
    # Each takes its batch in one micro-batch: fewer samples on one rank do not limit the other.
    for each in found:
        assert [u.microbatches for u in each["largest"]["updates"]] == [1, 1, 1]
    lengths = [[u.microbatches for u in each["auto"]["updates"]] for each in found]
    assert lengths[0] == lengths[1]


def test_a_rank_with_too_few_samples_stops_both_before_any_change(found: Found) -> None:
    for each in found:
        ((kind, text, unchanged),) = each["few"]["errors"]
        assert (kind, unchanged) == ("InputError", True)
        assert text == "The ranks have windows of [(3, 5), (1, 1)] micro-batches (now, at most)."


def test_the_check_passes_a_right_weight_on_ranks_that_evaluate_unequally_often(found: Found) -> None:
    assert found[0]["checked"]["raised"] != found[1]["checked"]["raised"], "premise"
    for each in found:
        assert not each["checked"]["warned"]
        assert len(each["checked"]["updates"]) == len(ranks.SAMPLES)


def test_the_check_finds_a_wrong_weight_that_only_one_rank_reveals(found: Found) -> None:
    one, other = (each["wrong weight"] for each in found)
    assert one["raised"] < other["raised"], "premise: only one rank looks for a remedy"
    ((kind, text, unchanged),) = one["errors"]
    assert (kind, unchanged) == ("LossSpecError", True)
    assert "The loss on another rank contradicts its declaration" in text
    ((kind, text, unchanged),) = other["errors"]
    assert (kind, unchanged) == ("LossSpecError", True)
    assert 'Instead pass weight=sample_weights("2")' in text


def test_out_of_memory_on_one_rank_restarts_the_window_on_all(found: Found) -> None:
    one, other = (each["memory"] for each in found)
    assert [u.failures for u in one["updates"]] == [1, 0, 0], "smaller sizes are remembered"
    assert [u.failures for u in other["updates"]] == [0, 0, 0]
    assert [u.microbatches for u in one["updates"]] == [u.microbatches for u in other["updates"]] == [4, 3, 4]
    assert other["warned"] == []
    assert one["warned"] == [
        "memory ran out in micro-batch 0; the window begins again on all ranks, in 4 micro-batches each. The "
        "update is the same. (out of memory)"
    ]


def test_no_memory_for_the_smallest_micro_batches_stops_both_ranks(found: Found) -> None:
    for each in found:
        ((kind, text, unchanged),) = each["no memory"]["errors"]
        assert (kind, unchanged) == ("InputError", True)
        assert text == "The ranks have windows of [(7, 7), (4, 4)] micro-batches (now, at most)."


def test_an_error_of_the_loss_on_one_rank_stops_both(found: Found) -> None:
    one, other = (each["broken"]["errors"] for each in found)
    text = (
        "Rank 1 failed in micro-batch 0 (BrokenLossError: no such label), so no rank makes this update, "
        "and everything is as before it. Correct the error there; then each rank can continue with its next "
        "batch."
    )
    assert one == [("RankError", text, True)]
    assert other == [("BrokenLossError", "no such label", True)]


def test_the_rank_of_a_loss_that_is_not_finite_names_its_micro_batch(found: Found) -> None:
    (one,), (other,) = (each["nan"]["errors"] for each in found)
    assert one[0] == other[0] == "NonFiniteError"
    assert one[2] and other[2], "nothing has changed"
    assert "on another rank, or an unknown one" in one[1]
    assert f"micro-batch {ranks.BAD} of 0..3 with loss nan, " in other[1]


def test_both_ranks_name_micro_batch_and_parameter_of_a_non_finite_gradient(found: Found) -> None:
    for each in found:
        ((kind, text, unchanged),) = each["bad gradient"]["errors"]
        assert (kind, unchanged) == ("NonFiniteError", True)
        assert f"micro-batch {ranks.BAD} of 0..3 with loss" in text
        assert "(or in that of another rank in the same turn), the gradient is not finite" in text
        assert "(the first parameter with a non-finite gradient is 'shards." in text
        assert "skip_microbatch" not in text, "sharded ranks do not support it"


class InStep(Local):
    """Sync of a rank whose forwards would wait for other ranks."""

    has_collective_forwards = True


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"observers": [NoiseMeter()]},
            "observers=[NoiseMeter()] needs the whole gradient of each micro-batch, but a rank has only its "
            "shards of a sharded model. Remove it.",
        ),
        (
            {"gradient_sum": torch.float32},
            "gradient_sum=torch.float32 has no effect on parameters sharded by fully_shard, which sums their "
            "gradients itself. Remove gradient_sum= and pass the dtype to fully_shard(..., "
            "mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32)).",
        ),
        (
            {"nonfinite": "skip_microbatch"},
            'nonfinite="skip_microbatch" needs the whole gradient of each micro-batch, but a rank has only '
            "its shards of a sharded model. Remove it.",
        ),
        (
            {"scaler": torch.amp.GradScaler("cpu")},
            "scaler= needs the whole gradient to choose its scale, but a rank has only its shards of a "
            "sharded model. Remove it, and train in bfloat16, which needs no scaler.",
        ),
    ],
)
def test_options_that_need_the_gradient_of_a_micro_batch_are_refused(
    options: dict[str, Any], text: str
) -> None:
    model = mlp()
    with (
        mock.patch("superbatch.torch.window.build.find_sync", return_value=InStep()),
        pytest.raises(InputError) as raised,
    ):
        Accumulator(model, sgd(model.parameters()), lambda batch: mse(model, batch), **options)
    assert str(raised.value) == text


def test_an_infinite_element_of_one_shard_stops_both_ranks(found: Found) -> None:
    bad = [not torch.isfinite(torch.tensor(each["infinite"]["own"])) for each in found]
    assert sum(bad) == 1, "premise: the element is in one rank's shard"
    for each in found:
        ((kind, text, unchanged),) = each["infinite"]["errors"]
        assert (kind, unchanged) == ("NonFiniteError", True)
        assert "the gradient is not finite" in text
