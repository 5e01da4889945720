"""Wrong input to any public function raises a typed error with advice and changes no state."""

# ruff: noqa: PT012  (the error comes from the block of a window, including its loop)
from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from superbatch.batch.split import near_equal, near_equal_cost, split
from superbatch.errors import (
    InputError,
    LossSpecError,
    OptimizerError,
    SplitError,
    SuperbatchError,
    WindowError,
)
from superbatch.noise.meter import NoiseMeter
from superbatch.schedule import as_schedule, constant, piecewise, ramp
from superbatch.torch import (
    Accumulator,
    TokenBudget,
    WholeBatch,
    Window,
    at_least,
    class_weights,
    count_tokens,
    sample_weights,
    windows,
)
from superbatch.torch.masters import MasterWeights, fp32_masters
from superbatch.torch.options import ClipValue, FrozenBatchNorm, GhostBatchNorm, Split
from tests.torch.helpers import mlp, mse, rows, sgd
from tests.torch.states import assert_unchanged, fingerprint

BATCH = rows(9, updates=1)[0]
VERBS = (
    "Add|Begin|Call|Compute|Copy|Declare|Detach|Draw|Give|Leave|Let|Load|Loop|Make|Name|"
    "Pass|Put|Raise|Remove|Return|Skip|State|Use|Wrap|Write"
)
TEXT = rf"(?s).+\. ({VERBS}) .+\."


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# -- arguments of the Accumulator --------------------------------------------------------------------------

ARGUMENTS: list[tuple[str, Any]] = [
    ("loss_fn", 5),
    ("loss_fn", "mse"),
    *(
        ("microbatch_size", value)
        for value in (0, -1, 2.0, True, "4", "biggest", [2], math.nan, torch.tensor(2))
    ),
    *(("reduction", value) for value in ("none", "MEAN", None, 0, True, ["mean"])),
    *(
        ("weight", value)
        for value in ("samples", "Returned", 1, 0.5, True, torch.ones(3), np.ones(3), ["returned"])
    ),
    *(("max_grad_norm", value) for value in (0, -1.0, math.nan, True, "1", torch.tensor(1.0), [1.0])),
    *(("clip", value) for value in (0, 1.0, math.nan, True, "1", torch.tensor(1.0), [ClipValue(1.0)])),
    *(("scheduler", value) for value in (5, "cosine", [5], lambda update: 1.0)),
    *(("scaler", value) for value in (5, 2.0, "auto", True, object())),
    *(("nonfinite", value) for value in ("ignore", None, True, 0)),
    *(
        ("participants", value)
        for value in ("frozen", None, True, 0, FrozenBatchNorm(), [FrozenBatchNorm], ["eval"], [None], [5])
    ),
    ("participants", [FrozenBatchNorm(), GhostBatchNorm()]),
    ("participants", [GhostBatchNorm(), GhostBatchNorm()]),
    *(("observers", value) for value in (True, None, NoiseMeter(), [True], [NoiseMeter], [NoiseMeter()] * 2)),
    *(
        ("gradient_sum", value)
        for value in ("float32", "grad", "buffer", torch.int32, torch.bool, 32, True, torch.zeros(1))
    ),
    *(("device", value) for value in ("gpu please", 1.5, True, object(), [])),
    *(("split", value) for value in (5, "labels", ["labels"], None, True, {"unsplit": ["labels"]}, Split)),
    *(("check", value) for value in ("no", 1, None, 0)),
]


def kind(value: object) -> str:
    """Return a test id that is the same in every process."""
    return repr(value) if value is None or isinstance(value, (int, str)) else type(value).__name__


@pytest.mark.parametrize(("name", "value"), ARGUMENTS, ids=lambda value: str(value)[:20])
def test_a_wrong_argument_of_the_accumulator(name: str, value: Any):
    model = mlp()
    optimizer = sgd(model.parameters())
    before = fingerprint(model, optimizer)
    options = {"loss_fn": lambda mb: mse(model, mb), name: value}
    with pytest.raises(SuperbatchError, match=TEXT) as caught:
        Accumulator(model, optimizer, **options)
    assert name in str(caught.value)
    assert isinstance(caught.value, (ValueError, TypeError))
    assert_unchanged(before, fingerprint(model, optimizer))


@pytest.mark.parametrize(
    "masters", [5, [torch.zeros(1)], {1: 2}, {torch.zeros(1): torch.zeros(1)}, "auto", None], ids=kind
)
def test_wrong_masters(masters: Any):
    model = mlp()
    optimizer = sgd(model.parameters())
    before = fingerprint(model, optimizer)
    with pytest.raises(SuperbatchError, match=TEXT) as caught:
        Accumulator(model, MasterWeights(optimizer, masters))
    assert "fp32_masters(model)" in str(caught.value) or "masters.values()" in str(caught.value)
    assert_unchanged(before, fingerprint(model, optimizer))


@pytest.mark.parametrize(
    "model", [None, 5, "model", [], (), [None], [mlp(), 5], lambda x: x, torch.zeros(1)], ids=kind
)
def test_a_wrong_model(model: Any):
    optimizer = sgd(mlp().parameters())
    with pytest.raises(InputError, match=TEXT):
        Accumulator(model, optimizer)


@pytest.mark.parametrize("optimizer", [None, 5, "sgd", [], (), [None], torch.optim.SGD, object()], ids=kind)
def test_a_wrong_optimizer(optimizer: Any):
    with pytest.raises(OptimizerError, match=TEXT):
        Accumulator(mlp(), optimizer)


@pytest.mark.parametrize("optimizer", [None, 5, torch.optim.SGD], ids=kind)
def test_a_wrong_optimizer_of_a_whole_batch(optimizer: Any):
    model = mlp()
    with pytest.raises(OptimizerError, match=TEXT):
        WholeBatch(model, optimizer, lambda batch: mse(model, batch))


@pytest.mark.parametrize("optimizer", [None, 5, "sgd", [], torch.optim.SGD], ids=kind)
def test_masters_of_a_wrong_optimizer(optimizer: Any):
    model = mlp(torch.bfloat16)
    with pytest.raises(OptimizerError, match=TEXT):
        Accumulator(model, MasterWeights(optimizer, fp32_masters(model)))


def frozen(model: nn.Module) -> nn.Module:
    return model.requires_grad_(requires_grad=False)


def test_a_model_without_parameters():
    with pytest.raises(
        OptimizerError, match=r"None of the optimizer's \d tensors is one of the model's \d trainable"
    ):
        Accumulator(nn.ReLU(), sgd(mlp().parameters()))


def test_a_model_without_gradients():
    model = frozen(mlp())
    with pytest.raises(OptimizerError, match="is one of the model's 0 trainable parameters"):
        Accumulator(model, torch.optim.SGD(model.parameters()))


def test_an_optimizer_of_another_model():
    model, optimizer = mlp(), sgd(mlp().parameters())
    before = fingerprint(model, optimizer)
    with pytest.raises(
        OptimizerError, match=r"None of the optimizer's \d tensors is one of the model's \d trainable"
    ):
        Accumulator(model, optimizer, lambda mb: mse(model, mb))
    assert_unchanged(before, fingerprint(model, optimizer))


def test_two_optimizers_of_one_parameter():
    model = mlp()
    with pytest.raises(
        OptimizerError, match=r"^The parameter '0\.weight' is in two optimizers\. Make each optimizer with"
    ):
        Accumulator(model, [sgd(model.parameters()), sgd(model.parameters())])


def test_an_optimizer_that_needs_a_closure():
    model = mlp()
    with pytest.raises(OptimizerError, match=r"LBFGS.*closure"):
        Accumulator(model, torch.optim.LBFGS(model.parameters()))


def test_an_optimizer_that_steps_inside_the_backward():
    model = mlp()
    optimizer = sgd(model.parameters())
    inner = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def update(parameter: Any) -> None:
        inner[parameter].step()
        inner[parameter].zero_grad()

    handles = [p.register_post_accumulate_grad_hook(update) for p in model.parameters()]
    before = fingerprint(model, optimizer)
    accumulate = Accumulator(model, optimizer, lambda mb: mse(model, mb), microbatch_size=3)
    with pytest.raises(OptimizerError, match=r"steps the parameter .* inside the backward"):
        accumulate(BATCH)
    assert_unchanged(before, fingerprint(model, optimizer))
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize(
    "options",
    [
        {"max_grad_norm": 1.0},
        {"clip": ClipValue(1.0)},
        {"scaler": torch.amp.GradScaler("cpu")},
        {"weight": "returned"},
        {"nonfinite": "skip_microbatch"},
    ],
    ids=lambda options: next(iter(options)),
)
def test_momentum_accumulation_refuses_an_option(options: dict[str, Any]):
    model = mlp()
    with pytest.raises(InputError, match=TEXT):
        Accumulator(model, sgd(model.parameters()), gradient_sum="momentum", **options)


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5),
        lambda p: torch.optim.AdamW(p),
    ],
)
def test_momentum_accumulation_needs_plain_momentum(make: Callable[[Any], torch.optim.Optimizer]):
    model = mlp()
    with pytest.raises(OptimizerError, match='gradient_sum="momentum"'):
        Accumulator(model, make(model.parameters()), gradient_sum="momentum")


def test_value_clipping_of_complex_parameters():
    model = nn.Linear(2, 1, dtype=torch.complex128)
    with pytest.raises(InputError, match="complex"):
        Accumulator(model, torch.optim.SGD(model.parameters()), clip=ClipValue(1.0))


# -- batches -----------------------------------------------------------------------------------------------

X, Y = BATCH
BATCHES: list[tuple[str, Any]] = [
    ("None", None),
    ("number", 5),
    ("text", "text"),
    ("empty tuple", ()),
    ("empty list", []),
    ("empty dict", {}),
    ("no samples", (X[:0], Y[:0])),
    ("lengths", (X, Y[:5])),
    ("scalar tensor", torch.tensor(1.0)),
    ("generator", (part for part in BATCH)),
    ("set", {1, 2}),
    ("object", object()),
    ("window of nothing", Window([])),
    ("empty window member", Window([(X[:0], Y[:0])])),
    ("window of None", Window([None])),
    ("window with lengths", Window([(X[:3], Y[:3]), (X[3:6], Y[3:5])])),
]


@pytest.mark.parametrize("microbatch_size", [None, 3])
@pytest.mark.parametrize(("name", "batch"), BATCHES, ids=[name for name, _ in BATCHES])
def test_a_wrong_batch(name: str, batch: Any, microbatch_size: int | None):
    model = mlp()
    optimizer = sgd(model.parameters())
    accumulate = Accumulator(model, optimizer, lambda mb: mse(model, mb), microbatch_size=microbatch_size)
    accumulate(BATCH)
    before = fingerprint(model, optimizer, accumulate)
    with pytest.raises((SplitError, InputError), match=TEXT):
        accumulate(batch)
    assert_unchanged(before, fingerprint(model, optimizer, accumulate))
    assert accumulate(BATCH).made


def test_mismatched_lengths_name_each_path_and_length():
    model = mlp()
    accumulate = Accumulator(model, sgd(model.parameters()), lambda mb: mse(model, mb), microbatch_size=3)
    with pytest.raises(SplitError) as caught:
        accumulate({"inputs": X, "meta": {"targets": Y[:5]}})
    assert all(part in str(caught.value) for part in ("inputs", "meta.targets", "9", "5"))


def test_declared_paths_missing_from_the_batch():
    model = mlp()
    for split_of in (Split(unsplit=["nowhere"]), Split(per_sample=["nowhere"])):
        accumulate = Accumulator(
            model, sgd(model.parameters()), lambda mb: mse(model, mb), microbatch_size=3, split=split_of
        )
        with pytest.raises(InputError, match="nowhere"):
            accumulate(BATCH)


# -- loss_fn and backward ----------------------------------------------------------------------------------


def losses(model: nn.Module) -> dict[str, Callable[[Any], Any]]:
    return {
        "None": lambda mb: None,
        "int": lambda mb: 1,
        "float": lambda mb: 0.5,
        "numpy": lambda mb: np.float64(0.5),
        "list": lambda mb: [mse(model, mb)],
        "dict": lambda mb: {"loss": mse(model, mb)},
        "tuple": lambda mb: (mse(model, mb), 3),
        "vector": lambda mb: (model(mb[0]) - mb[1]).square().mean(1),
        "empty": lambda mb: model(mb[0])[:0].sum(1),
        "no graph": lambda mb: mse(model, mb).detach(),
        "no grad": lambda mb: torch.no_grad()(mse)(model, mb),
        "integers": lambda mb: torch.tensor(3),
        "complex": lambda mb: mse(model, mb) * (1 + 1j),
    }


@pytest.mark.parametrize("check", [True, False], ids=["checked", "unchecked"])
@pytest.mark.parametrize("name", list(losses(mlp())))
def test_a_wrong_result_of_loss_fn(name: str, check: bool):
    model = mlp()
    optimizer = sgd(model.parameters())
    accumulate = Accumulator(model, optimizer, losses(model)[name], microbatch_size=3, check=check)
    before = fingerprint(model, optimizer, accumulate)
    with pytest.raises(InputError, match=TEXT):
        accumulate(BATCH)
    assert_unchanged(before, fingerprint(model, optimizer, accumulate))


@pytest.mark.parametrize("name", list(losses(mlp())))
def test_a_wrong_argument_of_backward(name: str):
    model = mlp()
    optimizer = sgd(model.parameters())
    accumulate = Accumulator(model, optimizer, microbatch_size=3)
    before = fingerprint(model, optimizer, accumulate)
    loss = losses(model)[name]
    with pytest.raises(InputError, match=TEXT), accumulate.window(BATCH) as window:
        for microbatch in window:
            window.backward(loss(microbatch))
    assert_unchanged(before, fingerprint(model, optimizer, accumulate))


RETURNED: dict[str, Any] = {
    "alone": lambda loss: loss,
    "three": lambda loss: (loss, 1, 2),
    "list": lambda loss: [loss, 1],
    "no weight": lambda loss: (loss, None),
    "swapped": lambda loss: (1.0, loss),
    "negative": lambda loss: (loss, -1),
    "nan": lambda loss: (loss, math.nan),
    "inf": lambda loss: (loss, torch.tensor(math.inf)),
    "bool": lambda loss: (loss, True),
    "text": lambda loss: (loss, "3"),
    "vector": lambda loss: (loss, torch.ones(3)),
}


@pytest.mark.parametrize("check", [True, False], ids=["checked", "unchecked"])
@pytest.mark.parametrize("name", list(RETURNED))
def test_a_wrong_returned_weight(name: str, check: bool):
    model = mlp()
    optimizer = sgd(model.parameters())
    accumulate = Accumulator(
        model,
        optimizer,
        lambda mb: RETURNED[name](mse(model, mb)),
        microbatch_size=3,
        weight="returned",
        check=check,
    )
    before = fingerprint(model, optimizer, accumulate)
    with pytest.raises(InputError, match=TEXT):
        accumulate(BATCH)
    assert_unchanged(before, fingerprint(model, optimizer, accumulate))


@pytest.mark.parametrize(
    "weight",
    [None, -1, math.nan, math.inf, True, "3", torch.ones(2), np.ones(2), [1], 1j, torch.tensor(-1.0)],
    ids=str,
)
def test_a_wrong_result_of_a_weight_function(weight: Any):
    model = mlp()
    optimizer = sgd(model.parameters())
    accumulate = Accumulator(
        model, optimizer, lambda mb: mse(model, mb), microbatch_size=3, weight=lambda mb: weight, check=False
    )
    before = fingerprint(model, optimizer, accumulate)
    with pytest.raises(InputError, match=r"weight .* of micro-batch 0"):
        accumulate(BATCH)
    assert_unchanged(before, fingerprint(model, optimizer, accumulate))


def test_a_weight_that_is_a_mean():
    model = mlp()
    accumulate = Accumulator(
        model,
        sgd(model.parameters()),
        lambda mb: mse(model, mb),
        microbatch_size=3,
        weight=lambda mb: float(mb[1].abs().mean()),
    )
    with pytest.raises(LossSpecError, match="weight= is not additive"):
        accumulate(BATCH)


def test_a_call_without_loss_fn():
    model = mlp()
    with pytest.raises(
        InputError, match=r"^An Accumulator without loss_fn cannot make an update from a batch"
    ):
        Accumulator(model, sgd(model.parameters()))(BATCH)


def test_an_unexpected_a_missing_and_a_second_weight():
    model = mlp()
    optimizer = sgd(model.parameters())
    before = fingerprint(model, optimizer)
    ahead = Accumulator(model, optimizer, microbatch_size=3)
    with (
        pytest.raises(InputError, match=r"^backward\(\) got the weight 3, but"),
        ahead.window(BATCH) as window,
    ):
        for microbatch in window:
            window.backward(mse(model, microbatch), 3)
    returned = Accumulator(model, optimizer, microbatch_size=3, weight="returned")
    with (
        pytest.raises(InputError, match=r"^A loss has no weight, but"),
        returned.window(BATCH) as window,
    ):
        for microbatch in window:
            window.backward(mse(model, microbatch))
    with pytest.raises(InputError, match="a second weight"), returned.window(BATCH) as window:
        for microbatch in window:
            window.backward(mse(model, microbatch), 3)
            window.backward(mse(model, microbatch), 3)
    assert_unchanged(before, fingerprint(model, optimizer))


# -- order of calls ----------------------------------------------------------------------------------------


@pytest.fixture
def training() -> tuple[nn.Module, torch.optim.Optimizer, Accumulator]:
    model = mlp()
    optimizer = sgd(model.parameters())
    return model, optimizer, Accumulator(model, optimizer, microbatch_size=3)


Training = tuple[nn.Module, torch.optim.Optimizer, Accumulator]


def make_update(training: Training) -> None:
    model, _, accumulate = training
    with accumulate.window(BATCH) as window:
        for microbatch in window:
            window.backward(mse(model, microbatch))
    assert window.update is not None and window.update.made


def test_backward_before_the_loop(training: Training):
    model, optimizer, accumulate = training
    before = fingerprint(model, optimizer, accumulate)
    with pytest.raises(WindowError, match="outside of the loop"), accumulate.window(BATCH) as window:
        window.backward(mse(model, BATCH))
    assert_unchanged(before, fingerprint(model, optimizer, accumulate))
    make_update(training)


def test_backward_after_the_loop(training: Training):
    model, optimizer, accumulate = training
    before = fingerprint(model, optimizer, accumulate)
    with pytest.raises(WindowError, match="outside of the loop"), accumulate.window(BATCH) as window:
        for microbatch in window:
            window.backward(mse(model, microbatch))
        window.backward(mse(model, BATCH))
    assert_unchanged(before, fingerprint(model, optimizer, accumulate))
    make_update(training)


def test_backward_after_the_window(training: Training):
    model, optimizer, accumulate = training
    with accumulate.window(BATCH) as window:
        for microbatch in window:
            window.backward(mse(model, microbatch))
    before = fingerprint(model, optimizer, accumulate)
    with pytest.raises(WindowError, match="outside of the loop"):
        window.backward(mse(model, BATCH))
    assert_unchanged(before, fingerprint(model, optimizer, accumulate))


@pytest.mark.parametrize("at", [0, 1, 2], ids=["first", "middle", "last"])
def test_a_microbatch_without_backward(training: Training, at: int):
    model, optimizer, accumulate = training
    before = fingerprint(model, optimizer, accumulate)
    with (
        pytest.raises(WindowError, match=rf"window\.backward\(loss\) was not called for micro-batch {at}\."),
        accumulate.window(BATCH) as window,
    ):
        for number, microbatch in enumerate(window):
            if number == at:
                continue
            window.backward(mse(model, microbatch))
    assert_unchanged(before, fingerprint(model, optimizer, accumulate))
    make_update(training)


def test_a_second_window_inside_the_first(training: Training):
    model, optimizer, accumulate = training
    before = fingerprint(model, optimizer, accumulate)
    with pytest.raises(WindowError, match="Another window of this"), accumulate.window(BATCH) as window:
        for microbatch in window:
            window.backward(mse(model, microbatch))
            with accumulate.window(BATCH):
                pass
    assert_unchanged(before, fingerprint(model, optimizer, accumulate))
    make_update(training)


@pytest.mark.parametrize("alive", [False, True])
@pytest.mark.parametrize("called", [False, True])
def test_a_window_that_was_never_entered_does_not_block_another(
    training: Training, called: bool, alive: bool
):
    model, optimizer, accumulate = training
    if called:
        accumulate = Accumulator(model, optimizer, lambda mb: mse(model, mb), microbatch_size=3)
    never_entered = accumulate.window(BATCH)
    if not alive:
        del never_entered
    if called:
        assert accumulate(BATCH).made
    else:
        make_update((model, optimizer, accumulate))
    assert accumulate.updates == 1


def test_a_finished_window_cannot_be_entered_again(training: Training):
    model, optimizer, accumulate = training
    with accumulate.window(BATCH) as window:
        for microbatch in window:
            window.backward(mse(model, microbatch))
    before = fingerprint(model, optimizer, accumulate)
    with pytest.raises(WindowError, match=TEXT), window:
        pass
    assert_unchanged(before, fingerprint(model, optimizer, accumulate))
    make_update(training)


@pytest.mark.parametrize("again", [False, True], ids=["skipped", "retried"])
def test_a_window_with_a_caught_error_of_backward_makes_no_update(training: Training, again: bool):
    """The failed backward may have added a part of its gradient to the sum."""
    model, optimizer, accumulate = training
    calls = []

    def hook(gradient: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) == 2:
            raise MemoryError
        return gradient

    before = fingerprint(model, optimizer, accumulate)
    handle = model[0].weight.register_hook(hook)  # type: ignore[index]
    with pytest.raises(WindowError, match=TEXT), accumulate.window(BATCH) as window:
        for microbatch in window:
            try:
                window.backward(mse(model, microbatch))
            except MemoryError:  # noqa: PERF203
                if again:
                    window.backward(mse(model, microbatch))
    handle.remove()
    model[0].weight._backward_hooks = None  # type: ignore[index]
    assert len(calls) >= 2
    assert_unchanged(before, fingerprint(model, optimizer, accumulate))
    make_update(training)


# -- functions ---------------------------------------------------------------------------------------------

NUMBERS = (0, -1, 1.5, True, "3", None, math.nan, [1])


@pytest.mark.parametrize("value", NUMBERS, ids=str)
@pytest.mark.parametrize(
    "call",
    [
        lambda value: next(windows([1, 2], value)),
        lambda value: next(windows([1, 2], lambda update: value)),
        lambda value: constant(value),
        lambda value: as_schedule(value)(0),
        lambda value: ramp(value, 3, 3),
        lambda value: ramp(3, value, 3),
        lambda value: ramp(3, 3, value),
        lambda value: piecewise({0: value}),
        lambda value: near_equal(5, value),
        lambda value: near_equal(value, 5),
        lambda value: near_equal_cost([1, 2], value),
        lambda value: split(X, value),
        lambda value: TokenBudget(value, "lengths"),
    ],
    ids=[
        "windows",
        "schedule",
        "constant",
        "as_schedule",
        "ramp start",
        "ramp stop",
        "ramp updates",
        "piecewise",
        "near_equal",
        "near_equal samples",
        "near_equal_cost",
        "split",
        "TokenBudget",
    ],
)
def test_a_number_that_is_not_a_positive_int(call: Callable[[Any], Any], value: Any):
    with pytest.raises(InputError, match=TEXT):
        call(value)


def bounded(minimum: Any, weight: Any = None) -> Accumulator:
    model = mlp()
    return Accumulator(model, sgd(model.parameters()), weight=at_least(minimum, weight), reduction="sum")


OTHERS: dict[str, Callable[[], Any]] = {
    "windows of no loader": lambda: windows(5, 2),  # type: ignore[arg-type]
    "windows of None": lambda: windows(None, 2),  # type: ignore[arg-type]
    "windows tail": lambda: windows([1], 2, tail="keep"),  # type: ignore[arg-type]
    "windows first_update": lambda: windows([1], 2, first_update=-1),
    "windows first_update bool": lambda: windows([1], 2, first_update=True),
    "Window of None": lambda: Window(None),  # type: ignore[arg-type]
    "Window of a number": lambda: Window(5),  # type: ignore[arg-type]
    "piecewise of nothing": lambda: piecewise({}),
    "piecewise without 0": lambda: piecewise({1: 2}),
    "piecewise negative": lambda: piecewise({0: 1, -3: 2}),
    "piecewise of a list": lambda: piecewise([1, 2]),  # type: ignore[arg-type]
    "piecewise of None": lambda: piecewise(None),  # type: ignore[arg-type]
    "near_equal_cost empty": lambda: near_equal_cost([], 0),
    "near_equal_cost negative": lambda: near_equal_cost([1, -2], 4),
    "near_equal_cost None": lambda: near_equal_cost(None, 4),  # type: ignore[arg-type]
    "near_equal_cost too large": lambda: near_equal_cost([1, 9], 4),
    "split of nothing": lambda: split([], 2),
    "split of None": lambda: split(None, 2),
    "split without samples": lambda: split(X[:0], 2),
    "split of lengths": lambda: split((X, Y[:3]), 2),
    "TokenBudget lengths": lambda: TokenBudget(4, 5),  # type: ignore[arg-type]
    "count_tokens of a number": lambda: count_tokens(5),  # type: ignore[arg-type]
    "count_tokens of None": lambda: count_tokens(None),  # type: ignore[arg-type]
    "count_tokens ignore_index": lambda: count_tokens("labels", ignore_index="x"),  # type: ignore[arg-type]
    "count_tokens shift": lambda: count_tokens("labels", shift="yes"),  # type: ignore[arg-type]
    "count_tokens without labels": lambda: count_tokens("labels")({"x": X}),
    "count_tokens of text": lambda: count_tokens("labels")({"labels": "text"}),
    "count_tokens shift of a scalar": lambda: count_tokens("labels", shift=True)({"labels": torch.tensor(1)}),
    "sample_weights of a number": lambda: sample_weights(5),  # type: ignore[arg-type]
    "sample_weights without them": lambda: sample_weights("w")({"x": X}),
    "sample_weights of text": lambda: sample_weights("w")({"w": ["a", "b"]}),
    **{
        f"ClipValue {kind(value)}": partial(ClipValue, value)  # pyright: ignore[reportArgumentType]
        for value in (0, -1.0, math.nan, True, "1", torch.tensor(1.0), [1.0], None)
    },
    **{
        f"Split {option} {kind(value)}": partial(Split, **{option: value})
        for option in ("unsplit", "per_sample")
        for value in (5, "labels", [5], None, True)
    },
    **{
        f"{option.__name__} {kind(value)}": partial(option, value)
        for option in (FrozenBatchNorm, GhostBatchNorm)
        for value in (5, "bn", [mlp()], nn.BatchNorm1d)
    },
    **{
        f"at_least {kind(value)}": partial(bounded, value)
        for value in (0, -1, math.nan, math.inf, True, "1", None, torch.tensor(1.0))
    },
    "at_least of a weight": lambda: bounded(1, "tokens"),
    "at_least in at_least": lambda: bounded(1, at_least(1)),
    "class_weights of a list": lambda: class_weights([1.0, 2.0], "1"),  # type: ignore[arg-type]
    "class_weights of ints": lambda: class_weights(torch.tensor([1, 2]), "1"),
    "class_weights of a matrix": lambda: class_weights(torch.ones(2, 2), "1"),
    "class_weights negative": lambda: class_weights(torch.tensor([1.0, -2.0]), "1"),
    "class_weights nan": lambda: class_weights(torch.tensor([1.0, math.nan]), "1"),
    "class_weights place": lambda: class_weights(torch.ones(2), 5),  # type: ignore[arg-type]
    "class_weights label": lambda: class_weights(torch.ones(2), "1")((None, torch.tensor([0, 2]))),
    "class_weights negative label": lambda: class_weights(torch.ones(2), "1")((None, torch.tensor([0, -1]))),
    "class_weights of float labels": lambda: class_weights(torch.ones(2), "1")((None, torch.ones(2))),
    "fp32_masters of None": lambda: fp32_masters(None),  # type: ignore[arg-type]
    "fp32_masters of a list": lambda: fp32_masters([5]),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", list(OTHERS))
def test_a_wrong_argument_of_another_function(name: str):
    with pytest.raises(SuperbatchError, match=TEXT):
        OTHERS[name]()
