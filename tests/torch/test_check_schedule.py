"""A later window is checked before its update if its data can show an error that earlier data could not."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from superbatch.errors import CoupledSamplesError, InputError, LossSpecError
from superbatch.noise.meter import NoiseMeter
from superbatch.torch import Accumulator, Window, count_tokens
from superbatch.torch.checks import unchecked_feature
from superbatch.torch.checks.check_schedule import CALLS
from superbatch.torch.options import Split
from tests.torch.helpers import (
    assert_same_parameters,
    large_batch,
    mlp,
    mse,
    rows,
    sgd,
    start_of,
    tiny_lm,
    token_mean,
    tokens,
)

FULL, UNEVEN = [7] * 8, [7, 1, 7, 2, 3, 7, 7, 7]
Data = Callable[[int, int], Any]  # (uneven, seed) -> a batch of 8 samples


def labels(uneven: int, seed: int) -> Any:
    return tokens(UNEVEN if uneven else FULL, seed=seed)


def in_pairs(uneven: int, seed: int) -> Any:
    """Micro-batches of a loader; within each of them, samples have equal counts."""
    return Window([tokens([n] * 2, seed=seed + n) for n in ([7, 1, 4] if uneven else [7, 7, 7])])


def with_weights(uneven: int, seed: int) -> Any:
    x, y = rows(8, 1, seed=seed)[0]
    weight = torch.ones(8, dtype=torch.float64)
    if uneven:
        weight[::3] = 0.2
    return x, y, weight


def in_numpy(uneven: int, seed: int) -> Any:
    x, y, weight = with_weights(uneven, seed)
    return x, y, weight.numpy()


def weighted(model: nn.Module, batch: Any) -> Tensor:
    weight = torch.as_tensor(batch[2])
    return (weight * (model(batch[0]) - batch[1]).square().mean(1)).sum() / weight.sum()


def masked(uneven: int, seed: int) -> Any:
    batch = tokens(FULL, seed=seed)
    keep = torch.ones(batch["ids"].shape, dtype=torch.bool)
    if uneven:
        keep[1, 2:] = keep[4, 3:] = False
    return {"ids": batch["ids"], "keep": keep}


def mask_mean(model: nn.Module, batch: Any) -> Tensor:
    each = nn.functional.cross_entropy(model(batch["ids"]).transpose(1, 2), batch["ids"], reduction="none")
    return (each * batch["keep"]).sum() / batch["keep"].sum()


def with_boxes(uneven: int, seed: int) -> Any:
    x, _ = rows(8, 1, seed=seed)[0]
    sizes = [1, 3, 2, 2, 4, 1, 1, 5] if uneven else [2] * 8
    return {"x": x, "boxes": [torch.rand(size, 3, dtype=torch.float64) for size in sizes]}


def box_mean(model: nn.Module, batch: Any) -> Tensor:
    """The mean over all boxes of a micro-batch, as in detectors."""
    out = model(batch["x"])
    each = [(out[i] - boxes).square().sum() for i, boxes in enumerate(batch["boxes"])]
    return torch.stack(each).sum() / sum(len(boxes) for boxes in batch["boxes"])


def with_threshold(uneven: int, seed: int) -> Any:
    x, y = rows(8, 1, seed=seed)[0]
    return x, y, torch.full((8,), 6.0 if uneven else 1e6, dtype=torch.float64)


def hard_mean(model: nn.Module, batch: Any) -> Tensor:
    """The mean over hard samples, or 0 if no sample is hard."""
    each = ((model(batch[0]) - batch[1]).square().sum(1) - batch[2]).clamp(min=0)
    return each.sum() / (each > 0).sum().clamp(min=1)


def far_away(uneven: int, seed: int) -> Any:
    """Half of the uneven samples are large, which a weight function reads."""
    far = 100 * uneven * (torch.arange(8, dtype=torch.float64)[:, None] >= 4)
    return tuple(tensor + far for tensor in rows(8, 1, seed=seed)[0])


def sample_mean(model: nn.Module, batch: Any) -> Tensor:
    each = nn.functional.cross_entropy(
        model(batch["ids"]).transpose(1, 2), batch["labels"], ignore_index=-100, reduction="none"
    )
    return (each.sum(1) / (batch["labels"] != -100).sum(1)).mean()


# The model, its loss, its data, and options that declare this loss wrongly.
WRONG: dict[str, tuple[Callable[[], nn.Module], Any, Data, dict[str, Any]]] = {
    "equal label counts at first": (tiny_lm, token_mean, labels, {}),
    "equal label counts within micro-batches of a loader": (tiny_lm, token_mean, in_pairs, {}),
    "sample weights of 1 at first": (mlp, weighted, with_weights, {}),
    "sample weights in NumPy": (mlp, weighted, in_numpy, {}),
    "a mask of ones at first": (tiny_lm, mask_mean, masked, {}),
    "equal box counts at first": (
        mlp, box_mean, with_boxes, {"split": Split(per_sample=("boxes",))},
    ),
    "equal declared weights at first": (
        tiny_lm, sample_mean, labels, {"weight": count_tokens("labels")},
    ),
    "equal weights of a function at first": (
        mlp, mse, far_away,
        {"weight": lambda mb: float((mb[0].abs() < 50).all(1).sum() + 0.1 * len(mb[0]))},
    ),
    "no hard sample at first": (mlp, hard_mean, with_threshold, {}),
}  # fmt: skip


def accumulator(case: str, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer, Accumulator]:
    make, loss, _, declared = WRONG[case]
    model = make()
    optimizer = sgd(model.parameters())
    options = {"microbatch_size": 2, **declared, **options}
    return model, optimizer, Accumulator(model, optimizer, lambda mb: loss(model, mb), **options)


@pytest.mark.parametrize("microbatch_size", [1, 2, 4])
@pytest.mark.parametrize("case", WRONG)
@pytest.mark.sampled(2)
def test_a_wrong_declaration_is_found_in_the_first_window_that_shows_it(
    case: str, microbatch_size: int
) -> None:
    data = WRONG[case][2]
    model, optimizer, accumulate = accumulator(case, microbatch_size=microbatch_size)
    for update in range(4):
        assert accumulate(data(0, update)).made
    before, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    batch, generator = data(1, 9), torch.get_rng_state()
    with pytest.raises(
        (LossSpecError, CoupledSamplesError), match=r"Update 4, which .* from \d on \(counted"
    ):
        accumulate(batch)
    assert accumulate.updates == 4
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert str(state) == str(optimizer.state_dict())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(generator, torch.get_rng_state())


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_declaration_is_found_between_full_inspections(case: str) -> None:
    data = WRONG[case][2]
    assert not unchecked_feature.inspects_all_counts(3), "premise: window 3 is not checked in full"
    _, _, accumulate = accumulator(case)
    for update in range(3):
        assert accumulate(data(0, update)).made
    with pytest.raises(
        (LossSpecError, CoupledSamplesError), match=r"Update 3, which .* from \d on \(counted"
    ):
        accumulate(data(1, 9))


@pytest.mark.parametrize("case", WRONG)
def test_mutant_without_the_check_is_wrong(case: str) -> None:
    """The premise of the tests above: without a check, the update is not that of the large batch."""
    _, loss, data, _ = WRONG[case]
    model, _, accumulate = accumulator(case, check=False)
    reference = copy.deepcopy(model)
    start, batch = start_of(reference), data(1, 9)
    accumulate(batch)
    if isinstance(batch, Window):
        batch = {key: torch.cat([mb[key] for mb in batch]) for key in batch[0]}
    large_batch(sgd(reference.parameters()), lambda whole: loss(reference, whole), [batch])
    with pytest.raises(AssertionError, match="not the update of the large batch"):
        assert_same_parameters(reference, model, 1e-3, start=start)


RIGHT: dict[str, tuple[Callable[[], nn.Module], Any, Data, dict[str, Any]]] = {
    "tokens": (tiny_lm, token_mean, labels, {"weight": count_tokens("labels")}),
    "tokens from a loader": (tiny_lm, token_mean, in_pairs, {"weight": count_tokens("labels")}),
    "means over samples": (tiny_lm, sample_mean, labels, {}),
    "an unused weight": (mlp, lambda m, b: mse(m, b[:2]), with_weights, {}),
    "a sum over hard samples": (
        mlp,
        lambda m, b: ((m(b[0]) - b[1]).square().sum(1) - b[2]).clamp(min=0).sum(),
        with_threshold,
        {"reduction": "sum"},
    ),
}


@pytest.mark.parametrize("observed", [False, True])
@pytest.mark.parametrize("case", RIGHT)
@pytest.mark.sampled(3)
def test_a_right_declaration_is_checked_once_more_at_little_cost(case: str, observed: bool) -> None:
    make, loss, data, declared = RIGHT[case]

    def train(*, check: bool) -> tuple[nn.Module, list[int], Tensor]:
        torch.manual_seed(3)
        model, calls = make(), []

        def loss_fn(microbatch: Any) -> Tensor:
            calls.append(1)
            return loss(model, microbatch)

        accumulate = Accumulator(
            model,
            sgd(model.parameters()),
            loss_fn,
            microbatch_size=1,
            check=check,
            observers=[NoiseMeter()] if observed else [],
            **declared,
        )
        calls_after = []
        for update in range(100):
            assert accumulate(data(update >= 30, update)).made
            calls_after.append(len(calls))
        return model, [b - a for a, b in pairwise(calls_after)], torch.get_rng_state()

    checked, unchecked = train(check=True), train(check=False)
    extra = [a - b for a, b in zip(checked[1], unchecked[1], strict=True)]
    assert sum(extra) > 0, "premise: one later window was checked"
    assert sum(extra) <= CALLS and sum(map(bool, extra)) == 1
    assert sum(extra) <= 0.0102 * sum(unchecked[1]), "3 calls in 297 with 3 micro-batches per window"
    assert all(
        torch.equal(a, b) for a, b in zip(checked[0].parameters(), unchecked[0].parameters(), strict=True)
    )
    assert torch.equal(checked[2], unchecked[2])


def test_no_further_check_runs_after_an_informative_first_window() -> None:
    model, calls = tiny_lm(), []

    def loss_fn(microbatch: Any) -> Tensor:
        calls.append(1)
        return token_mean(model, microbatch)

    accumulate = Accumulator(
        model, sgd(model.parameters()), loss_fn, microbatch_size=2, weight=count_tokens("labels")
    )
    accumulate(tokens(UNEVEN))
    first = len(calls)
    for seed in range(20):
        accumulate(tokens([1, 2, 3, 4, 5, 6, 7, 5], seed=seed))
    assert len(calls) - first == 20 * 4 and first > 4


def test_a_resumed_run_continues_to_check() -> None:
    case = "equal label counts at first"
    _, _, accumulate = accumulator(case)
    for update in range(3):
        accumulate(labels(0, update))
    state = accumulate.state_dict()
    _, _, resumed = accumulator(case)
    resumed.load_state_dict(state)
    resumed.load_state_dict({name: value for name, value in state.items() if name != "check"})  # older
    resumed.load_state_dict(state)
    assert resumed.state_dict()["check"] == state["check"] and not state["check"]["seen"].get("labels")
    resumed(labels(0, 5))
    with pytest.raises(LossSpecError, match=r"Update 4, which .* from 0 on \(counted"):
        resumed(labels(1, 5))
    with pytest.raises(InputError, match="state of the loss check"):
        resumed.load_state_dict({**state, "check": {"seen": {}}})


def test_a_skipped_update_does_not_count_as_checked() -> None:
    """A window that is skipped after its check restores the state of the check."""
    model, broken = tiny_lm(), [False]

    def loss_fn(batch: Any) -> Tensor:
        loss = sample_mean(model, batch)
        return (
            loss * float("nan")
            if broken[0] and len(batch["ids"]) == 2 and batch["labels"].min() < 0
            else loss
        )

    accumulate = Accumulator(
        model, sgd(model.parameters()), loss_fn, microbatch_size=2, nonfinite="skip_update"
    )
    accumulate(labels(0, 1))
    state = accumulate.state_dict()["check"]
    broken[0] = True
    assert not accumulate(labels(1, 2)).made
    assert accumulate.state_dict()["check"] == state
    broken[0] = False
    assert accumulate(labels(1, 2)).made and accumulate.state_dict()["check"] != state


def test_check_false_runs_no_check() -> None:
    _, _, accumulate = accumulator("equal label counts at first", check=False)
    assert accumulate(labels(0, 0)).made and accumulate(labels(1, 1)).made


def test_a_micro_batch_that_loss_fn_has_changed_is_not_checked() -> None:
    """The check would run on other data than the update."""
    model = tiny_lm()

    def loss_fn(batch: Any) -> Tensor:
        batch["ids"].add_(1).remainder_(7)
        return sample_mean(model, batch)

    accumulate = Accumulator(model, sgd(model.parameters()), loss_fn, microbatch_size=2)
    for uneven in (0, 1, 1):
        assert accumulate(labels(uneven, 3)).made
    assert accumulate.state_dict()["check"]["unverified"] is not None


# -- loops with their own forward and backward --------------------------------------------------------------


def run_loop(accumulator: Accumulator, model: nn.Module, batch: Any, loss: Any = token_mean) -> None:
    with accumulator.window(batch) as window:
        for microbatch in window:
            window.backward(loss(model, microbatch))
    assert window.update is not None and window.update.made


def test_a_loop_without_loss_fn_warns_once_that_its_loss_is_not_checked() -> None:
    model = tiny_lm()
    accumulate = Accumulator(model, sgd(model.parameters()), microbatch_size=2)
    with pytest.warns(UserWarning, match=r"did not check the loss of this loop.*verify.*check=False") as seen:
        run_loop(accumulate, model, tokens(UNEVEN))
    assert [Path(one.filename).name for one in seen] == [Path(__file__).name], "it points to the user's line"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run_loop(accumulate, model, tokens(UNEVEN))


@pytest.mark.parametrize("given", ["check=False", "loss_fn", "one micro-batch"])
def test_a_loop_does_not_warn_without_need(given: str) -> None:
    model = tiny_lm()
    options: dict[str, Any] = {"microbatch_size": None if given == "one micro-batch" else 2}
    if given == "check=False":
        options["check"] = False
    loss_fn = (lambda mb: sample_mean(model, mb)) if given == "loss_fn" else None
    accumulate = Accumulator(model, sgd(model.parameters()), loss_fn, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run_loop(accumulate, model, tokens(UNEVEN), sample_mean)


def test_loss_fn_of_a_loop_is_checked_before_the_first_update() -> None:
    model = tiny_lm()
    start = copy.deepcopy(model.state_dict())
    optimizer = sgd(model.parameters())
    accumulate = Accumulator(model, optimizer, lambda mb: token_mean(model, mb), microbatch_size=2)
    with pytest.raises(LossSpecError, match="count_tokens"):
        run_loop(accumulate, model, tokens(UNEVEN))
    assert all(torch.equal(start[name], value) for name, value in model.state_dict().items())
    for seed in range(2):
        run_loop(accumulate, model, tokens(FULL, seed=seed))
    start = copy.deepcopy(model.state_dict())
    with pytest.raises(LossSpecError, match=r"Update 2, which .* from 0 on \(counted"):
        run_loop(accumulate, model, tokens(UNEVEN))
    assert all(torch.equal(start[name], value) for name, value in model.state_dict().items())
