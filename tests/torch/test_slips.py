"""Common mistakes raise an error with the code to type, before any update."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import partial, wraps
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from superbatch import normalize
from superbatch.errors import InputError, OptimizerError, SplitError, WindowError
from superbatch.torch import Accumulator, WholeBatch, Window, verify, windows
from superbatch.torch.gradcache.cached import cached_gradients
from superbatch.torch.sizes.predict import predict_peak
from superbatch.torch.tuning import lr_survey
from superbatch.torch.window.slips import check_loss_fn

BATCH = {"x": torch.randn(8, 3), "y": torch.randint(2, (8,))}


@pytest.fixture
def model() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 2)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def loss_of(model: nn.Module) -> Callable[[Any], Tensor]:
    return lambda batch: F.cross_entropy(model(batch["x"]), batch["y"])


def accumulator(model: nn.Module, **options: Any) -> Accumulator:
    return Accumulator(model, sgd(model), loss_of(model), **{"microbatch_size": 4, **options})


class Stream(IterableDataset):  # pyright: ignore[reportMissingTypeArgument]
    def __iter__(self) -> Iterator[Any]:
        return iter([])


# -- batches -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch", "text"),
    [
        (
            DataLoader(TensorDataset(BATCH["x"]), batch_size=4),
            r"A DataLoader is not a batch\. Loop over it: for batch in loader: "
            r"accumulate\(batch\); if it yields micro-batches: for window in windows\(loader, accum",
        ),
        (iter([BATCH]), "A list_iterator is not a batch. Loop over it"),
        ((each for each in [BATCH]), "A generator is not a batch. Loop over it"),
        (
            TensorDataset(BATCH["x"]),
            r"A TensorDataset is not a batch\. Loop over a DataLoader of it",
        ),
        (Stream(), "A Stream is not a batch"),
        (windows([BATCH], accumulation_steps=2), "is not a batch"),
    ],
)
def test_loaders_and_iterators_are_refused_as_batches(model: nn.Linear, batch: Any, text: str) -> None:
    accumulate = accumulator(model)
    for call in (accumulate, accumulate.window):
        with pytest.raises(InputError, match=text):
            call(batch)


def nested_in_itself() -> dict[str, Any]:
    batch: dict[str, Any] = dict(BATCH)
    batch["self"] = batch
    return batch


def list_in_itself() -> list[Any]:
    batch: list[Any] = [BATCH["x"]]
    batch.append(batch)
    return batch


def deep(levels: int) -> dict[str, Any]:
    inner: Any = (BATCH["x"],)
    for _ in range(levels):
        inner = {"a": inner}
    return {**BATCH, "deep": inner}


@pytest.mark.parametrize(
    "batch", [nested_in_itself(), list_in_itself(), deep(3000)], ids=["dict", "list", "3000 levels"]
)
def test_a_batch_that_is_nested_too_deeply_is_refused(model: nn.Linear, batch: Any) -> None:
    calls: list[Callable[[], Any]] = [
        lambda: accumulator(model)(batch),
        lambda: accumulator(model, microbatch_size="auto")(batch),
        lambda: WholeBatch(model, sgd(model), loss_of(model), microbatch_size=4)(batch),
        lambda: accumulator(model, weight=lambda b: 1, check=False)(Window([batch])),
        lambda: verify(model, loss_of(model), batch, microbatch_size=2),
        lambda: cached_gradients(
            lambda b: model(b["x"]), lambda z: z.square().mean(), batch, 4, models=model
        ),
    ]
    for call in calls:
        with pytest.raises(InputError, match=r"nested more than 100 levels deep.*it may contain itself"):
            call()


def test_a_batch_of_ninety_levels_is_split(model: nn.Linear) -> None:
    assert accumulator(model)(deep(90)).made


@pytest.mark.filterwarnings("ignore:.*beta state.*:UserWarning", "ignore:.*prototype.*:UserWarning")
@pytest.mark.parametrize("kind", ["csr", "csc", "coo", "mkldnn", "nested", "jagged"])
def test_tensors_without_slices_are_named(model: nn.Linear, kind: str) -> None:
    if kind == "mkldnn" and not torch.backends.mkldnn.is_available():
        pytest.skip("torch was built without mkldnn")
    dense, parts = BATCH["x"].relu(), [torch.randn(2, 3) for _ in range(8)]
    make: dict[str, Callable[[], Tensor]] = {
        "csr": dense.to_sparse_csr,
        "csc": dense.to_sparse_csc,
        "coo": dense.to_sparse,
        "mkldnn": dense.to_mkldnn,
        "nested": lambda: torch.nested.nested_tensor(parts),
        "jagged": lambda: torch.nested.nested_tensor(parts, layout=torch.jagged),
    }
    batch = {"x": make[kind](), "y": BATCH["y"]}
    for options in ({}, {"microbatch_size": "auto"}):
        with pytest.raises(SplitError, match="'x'"):
            accumulator(model, **options)(batch)


def test_an_empty_tensor_beside_a_full_one_is_named(model: nn.Linear) -> None:
    with pytest.raises(SplitError, match="Parts of the batch differ in length: 'x': 0, 'y': 8"):
        accumulator(model)({"x": BATCH["x"][:0], "y": BATCH["y"]})


def test_detection_targets_with_the_coupled_path(model: nn.Linear) -> None:
    targets = [{"boxes": torch.randn(i + 1, 4), "labels": torch.randint(3, (i + 1,))} for i in range(8)]
    for batch in ((list(BATCH["x"]), targets), {"x": BATCH["x"], "targets": targets}):
        with pytest.raises(
            SplitError,
            match=r"list of per-sample targets.* must be in tensors\. Pad the targets",
        ):
            WholeBatch(model, sgd(model), loss_of(model), microbatch_size=4)(batch)


# -- loss functions ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loss_fn", "text"),
    [
        (
            nn.CrossEntropyLoss(),
            r"loss_fn CrossEntropyLoss\(\) takes 2 arguments, but it is called with one micro-batch",
        ),
        (
            lambda x, y: x,
            "loss_fn <lambda> takes 2 arguments.*Pass a function of one argument, for example loss_fn=lambda",
        ),
        (F.cross_entropy, "loss_fn cross_entropy takes 2 arguments"),
        (lambda: 0, "takes 0 arguments"),
    ],
)
def test_a_loss_of_another_signature_is_refused_at_once(model: nn.Linear, loss_fn: Any, text: str) -> None:
    with pytest.raises(InputError, match=text):
        Accumulator(model, sgd(model), loss_fn, microbatch_size=4)
    with pytest.raises(InputError, match=text):
        verify(model, loss_fn, BATCH, microbatch_size=4)


class OneArgument(nn.Module):
    def forward(self, batch: Any, scale: float = 1.0) -> Tensor:
        return batch["x"].sum() * scale


def test_losses_that_can_be_called_with_one_argument_pass() -> None:
    def keyword(batch: Any, *, scale: float = 1.0) -> Tensor:
        return batch["x"].sum() * scale

    for fine in (
        OneArgument(),
        keyword,
        partial(F.mse_loss, target=torch.zeros(1)),
        lambda *a: 0,
        len,
        None,
        max,
    ):
        check_loss_fn(fine)


@dataclasses.dataclass
class Output:
    loss: Any
    logits: Any = None


class ModelOutput(OrderedDict[str, Any]):
    @property
    def loss(self) -> Any:
        return self["loss"]


@pytest.mark.parametrize(
    "wrap", [lambda loss: ModelOutput(loss=loss), Output, lambda loss: {"loss": loss, "logits": 1}]
)
@pytest.mark.parametrize("check", [True, False])
def test_an_output_with_a_loss_is_refused(
    model: nn.Linear, wrap: Callable[[Tensor], Any], check: bool
) -> None:
    loss = loss_of(model)
    accumulate = Accumulator(model, sgd(model), lambda b: wrap(loss(b)), microbatch_size=4, check=check)
    with pytest.raises(InputError, match=r"not a tensor\. Return its \.loss"):
        accumulate(BATCH)
    coupled = WholeBatch(model, sgd(model), lambda b: wrap(loss(b)), microbatch_size=4)
    with pytest.raises(InputError, match=r"not a tensor\. Return its \.loss"):
        coupled(BATCH)


def test_backward_of_the_loss_in_a_users_loop(model: nn.Linear) -> None:
    accumulate = Accumulator(model, sgd(model), microbatch_size=4)
    before = model.weight.detach().clone()

    def loop() -> None:
        with accumulate.window(BATCH) as window:
            for microbatch in window:
                loss_of(model)(microbatch).backward()

    text = r"\.backward\(loss\) was not called for micro-batch 0\. Call it .* in place of loss\.backward"
    with pytest.raises(WindowError, match=text):
        loop()
    assert torch.equal(model.weight, before)


# -- options -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "text"),
    [
        (
            "accumulation_steps",
            r"no option accumulation_steps=\. Instead, pass whole batches and microbatch_size=, or.*windows",
        ),
        ("gradient_accumulation_steps", "windows"),
        ("accumulate_grad_batches", "windows"),
        ("iter_size", "windows"),
        ("lr_scheduler", r"Instead, pass scheduler=\."),
        ("gradient_clip_val", r"Instead, pass max_grad_norm=\."),
        ("batch_size", r"Instead, pass microbatch_size=\."),
        ("unsplit", r"Instead, pass split=Split\(unsplit="),
        ("whole", r"Instead, pass split=Split\(unsplit="),
        ("per_sample", r"Instead, pass split=Split\(per_sample="),
        ("batchnorm", r"Instead, pass participants="),
        ("noise", r"Instead, pass observers="),
    ],
)
def test_options_of_other_libraries(model: nn.Linear, option: str, text: str) -> None:
    with pytest.raises(InputError, match=text):
        accumulator(model, **{option: 4})


def test_an_unknown_option_is_pythons_own_error(model: nn.Linear) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'colour'"):
        accumulator(model, colour=4)


def test_weights_that_overflow(model: nn.Linear) -> None:
    before = model.weight.detach().clone()
    with pytest.raises(InputError, match=r"add up to 1e\+308; the largest sum is 1e300"):
        accumulator(model, weight=lambda batch: 1.5e308)(BATCH)
    assert torch.equal(model.weight, before)
    with pytest.raises(InputError, match="the largest sum is 1e300"):
        normalize.total_weight([10**400, 1])


@pytest.mark.parametrize("scale", [float("nan"), float("inf"), "2", True])
def test_a_scale_that_is_not_a_finite_number(model: nn.Linear, scale: Any) -> None:
    with pytest.raises(InputError, match=r"scale=.* is not a finite number\. Pass a finite number"):
        cached_gradients(model, lambda z: z.square().mean(), BATCH["x"], 4, scale=scale)
    assert model.weight.grad is None


@pytest.mark.parametrize(
    ("low", "high"), [("a", 1), (1e-3, "b"), (True, 2), (1e-3, float("nan")), (1, 1e-3), ([], 1)]
)
def test_invalid_ends_of_a_survey(model: nn.Linear, low: Any, high: Any) -> None:
    with pytest.raises(InputError, match=r"are not increasing positive numbers\. Pass 0 < low < high"):
        lr_survey(accumulator(model), [BATCH] * 4, low=low, high=high)


@pytest.mark.parametrize("models", [None, "m", [], {"a": 1}, [1]])
def test_invalid_models_of_a_prediction(model: nn.Linear, models: Any) -> None:
    with pytest.raises(InputError, match="model is of type"):
        predict_peak(loss_of(model), BATCH, models=models)


# -- mistakes that show over several windows ---------------------------------------------------------------


def test_a_scheduler_stepped_by_hand_too_warns_once(model: nn.Linear) -> None:
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    accumulate = Accumulator(model, optimizer, loss_of(model), microbatch_size=4, scheduler=scheduler)
    accumulate(BATCH)
    scheduler.step()
    with pytest.warns(
        UserWarning, match=r"scheduler\.step\(\) was called outside of the Accumulator"
    ) as caught:
        accumulate(BATCH)
    assert [each.filename for each in caught] == [__file__]
    scheduler.step()
    accumulate(BATCH)  # no second warning


@pytest.mark.parametrize(
    "make",
    [
        lambda o: torch.optim.lr_scheduler.StepLR(o, 1, 0.5),
        lambda o: torch.optim.lr_scheduler.SequentialLR(
            o, [torch.optim.lr_scheduler.ConstantLR(o, 1.0, 1), torch.optim.lr_scheduler.StepLR(o, 1)], [2]
        ),
        lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o),
    ],
)
def test_a_scheduler_stepped_only_by_the_accumulator_does_not_warn(
    model: nn.Linear, make: Callable[[Any], Any]
) -> None:
    optimizer = sgd(model)
    scheduler = make(optimizer)
    accumulate = Accumulator(model, optimizer, loss_of(model), microbatch_size=4, scheduler=scheduler)
    for _ in range(4):
        accumulate(BATCH)
    saved = scheduler.state_dict()
    accumulate(BATCH)
    accumulate(BATCH)
    scheduler.load_state_dict(saved)
    accumulate(BATCH)


def test_loader_batches_that_are_never_split_warn_once(model: nn.Linear) -> None:
    accumulate = accumulator(model, microbatch_size=8)
    for _ in range(9):
        accumulate(BATCH)
    with pytest.warns(
        UserWarning,
        match=r"first 10 batches were one micro-batch each \(8 samples, microbatch_size=8\).*windows\(loader",
    ) as caught:
        accumulate(BATCH)
    assert [each.filename for each in caught] == [__file__]
    accumulate(BATCH)


@pytest.mark.parametrize("size", [4, "auto", None])
def test_batches_that_are_split_or_need_no_split_do_not_warn(model: nn.Linear, size: Any) -> None:
    accumulate = accumulator(model, microbatch_size=size)
    for _ in range(12):
        accumulate(BATCH)


def test_windows_of_one_micro_batch_do_not_warn(model: nn.Linear) -> None:
    accumulate = accumulator(model, microbatch_size=8)
    for _ in range(12):
        accumulate(Window([BATCH]))


# -- models that change ------------------------------------------------------------------------------------


def replace_parameter(model: nn.Sequential) -> None:
    first = model[0]
    assert isinstance(first, nn.Linear)
    first.weight = nn.Parameter(first.weight.detach().clone())


def replace_module(model: nn.Sequential) -> None:
    model[2] = nn.Linear(4, 2)


@pytest.mark.parametrize(("replace", "name"), [(replace_parameter, "0.weight"), (replace_module, "2.weight")])
def test_a_parameter_replaced_after_construction(replace: Callable[[nn.Sequential], None], name: str) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    accumulate = accumulator(model)
    assert accumulate(BATCH).made
    replace(model)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for call in (accumulate, accumulate.window):
        with pytest.raises(
            InputError, match=f"The parameter '{name}' was replaced after the Accumulator was made"
        ):
            call(BATCH)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def load_assigning(model: nn.Sequential) -> None:
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)


def test_parameters_replaced_by_loading_raise_with_cause_and_remedy() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    accumulate = accumulator(model)
    load_assigning(model)
    for _ in range(2):
        with pytest.raises(
            InputError,
            match=r"'0\.weight' was replaced after .*load_state_dict\(assign=True\) and to_empty\(\).*Make "
            r"the optimizer and the Accumulator after that",
        ):
            accumulate(BATCH)
    assert accumulator(model)(BATCH).made


def append_layer(net: nn.Sequential) -> None:
    net.append(nn.Linear(2, 2))


def unfreeze(net: nn.Sequential) -> None:
    for parameter in net[1].parameters():
        parameter.requires_grad = True


def add_parameter(net: nn.Sequential) -> None:
    net[0].register_parameter("gain", nn.Parameter(torch.ones(())))


@pytest.mark.parametrize(("change", "name"), [(append_layer, r"2\.weight"), (add_parameter, r"0\.gain")])
@pytest.mark.parametrize("updates", [0, 1, 3])
def test_a_parameter_added_later_needs_an_optimizer(
    change: Callable[[nn.Sequential], None], name: str, updates: int
) -> None:
    net = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2).requires_grad_(requires_grad=False))
    optimizer = torch.optim.SGD(net[0].parameters(), lr=0.1)
    accumulate = Accumulator(net, optimizer, loss_of(net), microbatch_size=4)
    assert all(accumulate(BATCH).made for _ in range(updates))
    change(net)
    before = {key: value.clone() for key, value in net.state_dict().items()}
    for call in (accumulate, accumulate.window, accumulate):
        with pytest.raises(OptimizerError, match=rf"'{name}'.*in none of its optimizers.*add_param_group"):
            call(BATCH)
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())
    new = [p for p in net.parameters() if p.requires_grad and p not in {*optimizer.param_groups[0]["params"]}]
    if updates == 1:
        optimizer.add_param_group({"params": new})
        assert accumulate(BATCH).made
        moved = [not torch.equal(value, before[key]) for key, value in net.state_dict().items()]
        assert sum(moved) == (2 if change is add_parameter else 4), "no loss uses the gain"
    elif updates == 3:
        for parameter in new:
            parameter.requires_grad = False
        assert accumulate(BATCH).made
    else:
        assert Accumulator(net, optimizer, loss_of(net), microbatch_size=4)(BATCH).made


def test_a_parameter_unfrozen_later_and_in_no_optimizer_warns_once() -> None:
    """Another optimizer may update it, as in a GAN whose discriminator was frozen at first."""
    net = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2).requires_grad_(requires_grad=False))
    optimizer = torch.optim.SGD(net[0].parameters(), lr=0.1)
    accumulate = Accumulator(net, optimizer, loss_of(net), microbatch_size=4)
    accumulate(BATCH)
    unfreeze(net)
    with pytest.warns(UserWarning, match=r"'1\.weight' and 1 more was unfrozen .*add_param_group") as caught:
        assert accumulate(BATCH).made
    assert [each.filename for each in caught] == [__file__]
    for parameter in net[1].parameters():
        parameter.requires_grad = False
    accumulate(BATCH)
    unfreeze(net)
    assert accumulate(BATCH).made, "toggled as in a GAN: no second warning"


def test_a_parameter_unfrozen_later_and_added_to_the_optimizer_is_trained() -> None:
    second = nn.Linear(2, 2).requires_grad_(requires_grad=False)
    net = nn.Sequential(nn.Linear(3, 2), second)
    optimizer = torch.optim.SGD(net[0].parameters(), lr=0.1)
    accumulate = Accumulator(net, optimizer, loss_of(net), microbatch_size=4)
    accumulate(BATCH)
    unfreeze(net)
    optimizer.add_param_group({"params": list(second.parameters())})
    before = second.weight.detach().clone()
    assert accumulate(BATCH).made
    assert not torch.equal(second.weight, before)


def test_a_frozen_layer_appended_later_needs_no_optimizer() -> None:
    net = nn.Sequential(nn.Linear(3, 2))
    accumulate = accumulator(net)
    accumulate(BATCH)
    net.append(nn.Linear(2, 2).requires_grad_(requires_grad=False))
    assert accumulate(BATCH).made


def test_a_parameter_in_no_optimizer_from_the_start_is_ignored() -> None:
    other = nn.Linear(2, 2)
    net = nn.Sequential(nn.Linear(3, 2), other)
    optimizer = torch.optim.SGD(net[0].parameters(), lr=0.1)
    accumulate = Accumulator(net, optimizer, loss_of(net), microbatch_size=4)
    kept = other.weight.detach().clone()
    for trained in (True, False, True):
        other.requires_grad_(requires_grad=trained)
        assert accumulate(BATCH).made
    assert torch.equal(kept, other.weight)


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("where", ["after", "twice", "inside"])
@pytest.mark.parametrize("chained", [False, True])
def test_a_scheduler_stepped_by_hand_anywhere(where: str, chained: bool) -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler: Any = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    if chained:
        scheduler = torch.optim.lr_scheduler.ChainedScheduler([scheduler])
    accumulate = Accumulator(model, optimizer, microbatch_size=2, scheduler=scheduler, check=False)

    def updates() -> None:
        for _ in range(2):
            with accumulate.window(torch.randn(4, 3)) as window:
                for microbatch in window:
                    window.backward(model(microbatch).mean())
                if where == "inside":
                    scheduler.step()
            for _ in range({"after": 1, "twice": 2, "inside": 0}[where]):
                scheduler.step()

    with pytest.warns(UserWarning, match="was called outside of the Accumulator"):
        updates()


def test_a_decorator_may_change_the_arguments() -> None:
    model = nn.Linear(3, 1)

    def two(model: nn.Module, x: Any) -> Any:
        return model(x).mean()

    @wraps(two)
    def one(x: Any) -> Any:
        return two(model, x)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert Accumulator(model, optimizer, one, microbatch_size=2)(torch.randn(4, 3)).made
