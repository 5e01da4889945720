"""BatchNorm: refused, frozen, or per micro-batch with the running statistics of the large batch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from superbatch.errors import CoupledSamplesError, InputError, SuperbatchError
from superbatch.torch import Accumulator
from superbatch.torch.options import FrozenBatchNorm, GhostBatchNorm
from tests.torch.helpers import assert_same_parameters, large_batch, mse, rows, sgd, start_of
from tests.torch.states import assert_unchanged, fingerprint

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
BATCHES = rows(10, updates=3)


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def net(norm: nn.Module | None = None) -> nn.Sequential:
    torch.manual_seed(12)
    return nn.Sequential(
        nn.BatchNorm1d(4) if norm is None else norm, nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)
    ).double()


def accumulator(model: nn.Module, **options: Any) -> Accumulator:
    return Accumulator(
        model, sgd(model.parameters()), lambda mb: mse(model, mb), **{"microbatch_size": 3, **options}
    )


# -- refused by default ------------------------------------------------------------------------------------


def test_the_error_names_the_modules_and_the_choices_before_any_update():
    model = nn.Sequential(nn.Linear(4, 3), nn.Sequential(nn.BatchNorm1d(3)), nn.BatchNorm1d(3)).double()
    optimizer = sgd(model.parameters())
    accumulate = Accumulator(model, optimizer, lambda mb: mse(model, mb), microbatch_size=3)
    before = fingerprint(model, optimizer)
    with pytest.raises(CoupledSamplesError, match=r"\('1\.0', '2'\)") as caught:
        accumulate(BATCHES[0])
    text = str(caught.value)
    assert all(choice in text for choice in ("GhostBatchNorm()", "FrozenBatchNorm()", "WholeBatch"))
    assert_unchanged(before, fingerprint(model, optimizer))


def test_batchnorm_in_a_second_model_is_refused():
    model, norm = nn.Linear(4, 4).double(), nn.BatchNorm1d(4).double()
    optimizers = [sgd(model.parameters()), sgd(norm.parameters())]
    accumulate = Accumulator(
        [model, norm], optimizers, lambda mb: norm(model(mb[0])).mean(), microbatch_size=3
    )
    with pytest.raises(CoupledSamplesError, match="BatchNorm in training mode"):
        accumulate(BATCHES[0])


@pytest.mark.parametrize(
    "norm", [nn.BatchNorm1d(4), nn.SyncBatchNorm(4), nn.LazyBatchNorm1d(), nn.BatchNorm1d(4, affine=False)]
)
def test_every_kind_of_batchnorm_is_refused(norm: nn.Module):
    model = net(norm)
    model(BATCHES[0][0])  # initializes a lazy module
    with pytest.raises(CoupledSamplesError, match=r"'0'"):
        accumulator(model)(BATCHES[0])


def test_batchnorm_without_running_statistics_is_refused_in_evaluation_mode():
    model = net(nn.BatchNorm1d(4, track_running_stats=False)).eval()
    with pytest.raises(CoupledSamplesError, match=r"'0'"):
        accumulator(model)(BATCHES[0])


@pytest.mark.parametrize("check", [True, False])
def test_batchnorm_without_running_statistics_cannot_be_frozen(check: bool):
    model = net(nn.BatchNorm1d(4, track_running_stats=False))
    before = fingerprint(model)
    with pytest.raises(
        SuperbatchError, match=r"has no running statistics.*\. Make it with track_running_stats=True"
    ):
        accumulator(model, participants=[FrozenBatchNorm()], check=check)(BATCHES[0])
    assert_unchanged(before, fingerprint(model))


def test_batchnorm_in_evaluation_mode_is_exact():
    model = net()
    model(BATCHES[1][0])  # changes the initial statistics
    model[0].eval()
    reference, start = copy.deepcopy(model), start_of(model)
    updates = list(map(accumulator(model), BATCHES))
    seen = large_batch(sgd(reference.parameters()), lambda b: mse(reference, b), BATCHES)
    assert_same_parameters(reference, model, 1e-12, start=start)
    assert [update.loss for update in updates] == pytest.approx(seen.losses, rel=1e-12)
    assert not model[0].training


# -- frozen ------------------------------------------------------------------------------------------------


def test_frozen_batchnorm_is_the_large_batch_with_running_statistics():
    model = net()
    model(BATCHES[1][0])
    reference, start = copy.deepcopy(model), start_of(model)
    model[2].eval()  # a mode that the user has set
    statistics = {name: value.clone() for name, value in model.named_buffers()}
    accumulate = accumulator(model, participants=[FrozenBatchNorm()])
    for batch in BATCHES:
        accumulate(batch)
        assert model[0].training and not model[2].training and model.training
    reference[0].eval()
    large_batch(sgd(reference.parameters()), lambda b: mse(reference, b), BATCHES)
    assert_same_parameters(reference, model, 1e-12, start=start)
    for name, value in model.named_buffers():
        assert torch.equal(value, statistics[name])


# -- per micro-batch ---------------------------------------------------------------------------------------


def assert_statistics(model: nn.Module, reference: nn.Module, tolerance: float = 1e-12) -> None:
    for name in STATISTICS:
        expected = getattr(reference, name)
        if expected is None:
            assert getattr(model, name) is None
            continue
        torch.testing.assert_close(getattr(model, name), expected, rtol=tolerance, atol=tolerance)


def images(*shape: int) -> Callable[[int], Tensor]:
    def draw(seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(10, 4, *shape, generator=generator, dtype=torch.float64)
        return x * torch.linspace(0.1, 3, 10, dtype=torch.float64).view(10, *[1] * (x.ndim - 1)) + 1

    return draw


KINDS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor]]] = {
    "1d": (lambda: nn.BatchNorm1d(4), images()),
    "1d of sequences": (lambda: nn.BatchNorm1d(4), images(5)),
    "2d": (lambda: nn.BatchNorm2d(4), images(3, 2)),
    "3d": (lambda: nn.BatchNorm3d(4), images(2, 3, 2)),
    "momentum": (lambda: nn.BatchNorm1d(4, momentum=0.37), images()),
    "momentum=None": (lambda: nn.BatchNorm1d(4, momentum=None), images()),
    "momentum=0": (lambda: nn.BatchNorm1d(4, momentum=0.0), images()),
    "affine=False": (lambda: nn.BatchNorm1d(4, affine=False), images()),
    "eps": (lambda: nn.BatchNorm1d(4, eps=0.5), images()),
    "no running statistics": (lambda: nn.BatchNorm1d(4, track_running_stats=False), images()),
    "SyncBatchNorm in one process": (lambda: nn.SyncBatchNorm(4), images()),
}


@pytest.mark.parametrize("microbatch_size", [2, 3, 4, 10])
@pytest.mark.parametrize("kind", list(KINDS))
def test_running_statistics_are_those_of_the_large_batch(kind: str, microbatch_size: int):
    make, draw = KINDS[kind]
    torch.manual_seed(12)
    model = nn.Sequential(make(), nn.Flatten(1), nn.LazyLinear(3)).double()
    model(draw(0))
    reference = copy.deepcopy(model)
    before = {key: value for key, value in fingerprint(model, generators=False).items() if "module" in key}
    accumulate = accumulator(model, participants=[GhostBatchNorm()], microbatch_size=microbatch_size)
    for update in range(3):
        x, y = draw(update + 1), torch.ones(10, 3, dtype=torch.float64)
        assert accumulate((x, y)).microbatches == -(-10 // microbatch_size)
        reference(x)
        assert_statistics(model[0], reference[0])
    after = {key: value for key, value in fingerprint(model, generators=False).items() if "module" in key}
    assert_unchanged(before, after)  # momentum, hooks, modes and attributes are restored
    if kind not in ("momentum=0", "no running statistics"):
        assert not torch.equal(reference.get_buffer("0.running_mean"), torch.zeros(4, dtype=torch.float64)), (
            "premise: the statistics change"
        )


def test_the_gradient_is_that_of_micro_batches_normalised_separately():
    model = net()
    reference, start = copy.deepcopy(model), start_of(model)
    accumulate = accumulator(model, participants=[GhostBatchNorm()], microbatch_size=5)
    for batch in BATCHES:
        accumulate(batch)
    large_batch(
        sgd(reference.parameters()),
        lambda b: sum(mse(reference, tuple(t[i : i + 5] for t in b)) for i in (0, 5)) / 2,  # type: ignore[arg-type]
        BATCHES,
    )
    assert_same_parameters(reference, model, 1e-12, start=start)


def test_deeper_layers_pool_the_inputs_of_all_micro_batches():
    """Inputs after the first BatchNorm depend on the split, so the reference pools them by hand."""
    torch.manual_seed(13)
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)).double()
    twin = copy.deepcopy(model)
    everything = torch.cat([twin[1](twin[0](part)).detach() for part in BATCHES[0][0].split([4, 3, 3])])
    accumulate = accumulator(model, participants=[GhostBatchNorm()], microbatch_size=4)
    assert accumulate(BATCHES[0]).microbatches == 3
    torch.testing.assert_close(model[2].running_mean, 0.1 * everything.mean(0), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(model[2].running_var, 0.9 + 0.1 * everything.var(0), rtol=1e-12, atol=1e-14)
    assert int(model.get_buffer("2.num_batches_tracked")) == 1


class SharedNorm(nn.Module):
    """One BatchNorm for two views of a sample, as in siamese networks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(14)
        self.norm = nn.BatchNorm1d(4, momentum=0.3)
        self.head = nn.Linear(4, 3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x) * self.norm(input=x.square()))


def test_a_batchnorm_called_twice_per_forward():
    model = SharedNorm()
    reference = copy.deepcopy(model)
    accumulate = accumulator(model, participants=[GhostBatchNorm()])
    for batch in BATCHES:
        accumulate(batch)
        reference(batch[0])
    assert int(model.get_buffer("norm.num_batches_tracked")) == 2 * len(BATCHES)
    assert_statistics(model.norm, reference.norm)


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_counts_a_micro_batch_once(reentrant: bool):
    """The forward that a checkpoint recomputes during backward does not change the statistics again."""
    plain, checkpointed = net(), net()
    reference = net()
    one = accumulator(plain, participants=[GhostBatchNorm()])

    def loss_fn(microbatch: Any) -> Tensor:
        x = microbatch[0].clone().requires_grad_()
        hidden = checkpoint(checkpointed[:3], x, use_reentrant=reentrant)
        return nn.functional.mse_loss(checkpointed[3](hidden), microbatch[1])

    other = Accumulator(
        checkpointed,
        sgd(checkpointed.parameters()),
        loss_fn,
        microbatch_size=3,
        participants=[GhostBatchNorm()],
    )
    start = start_of(plain)
    for batch in BATCHES:
        one(batch)
        other(batch)
        reference(batch[0])
    assert_statistics(checkpointed[0], reference[0])
    assert_same_parameters(plain, checkpointed, 1e-12, start=start)


def test_only_layers_in_training_mode_change_their_statistics():
    model = nn.Sequential(nn.BatchNorm1d(4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double()
    model[1].eval()
    reference = copy.deepcopy(model)
    accumulate = accumulator(model, participants=[GhostBatchNorm()])
    accumulate(BATCHES[0])
    reference(BATCHES[0][0])
    assert_statistics(model[0], reference[0])
    assert_statistics(model[1], reference[1], 0.0)
    assert int(model.get_buffer("1.num_batches_tracked")) == 0


def test_float32_statistics_are_within_rounding():
    torch.manual_seed(15)
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3))
    reference = copy.deepcopy(model)
    accumulate = accumulator(model, participants=[GhostBatchNorm()])
    for x, y in rows(10, dtype=torch.float32):
        x = x + 1000  # a variance much smaller than the mean
        accumulate((x, y))
        reference(x)
    assert_statistics(model[0], reference[0], 1e-5)


@pytest.mark.parametrize("batchnorm", [GhostBatchNorm(), FrozenBatchNorm()], ids=repr)
@pytest.mark.parametrize("how", ["forward", "nan", "break", "never iterated", "interrupt"])
def test_a_failed_window_restores_everything(batchnorm: Any, how: str):
    model = net()
    model[0].momentum = None  # type: ignore[assignment]
    optimizer = sgd(model.parameters())
    accumulate = Accumulator(model, optimizer, microbatch_size=3, participants=[batchnorm])
    batch = BATCHES[0]
    with accumulate.window(batch) as window:
        for microbatch in window:
            window.backward(mse(model, microbatch))
    before = fingerprint(model, optimizer)
    errors = {"forward": ZeroDivisionError, "nan": ArithmeticError, "interrupt": KeyboardInterrupt}

    def attempt() -> None:
        with accumulate.window(BATCHES[1]) as window:
            if how == "never iterated":
                return
            for number, microbatch in enumerate(window):
                loss = mse(model, microbatch)
                if number == 1 and how == "forward":
                    raise ZeroDivisionError
                if number == 1 and how == "interrupt":
                    raise KeyboardInterrupt
                window.backward(loss * (float("nan") if how == "nan" else 1.0))
                if how == "break":
                    break

    if how in errors:
        with pytest.raises(errors[how]):
            attempt()
    else:
        attempt()
    assert_unchanged(before, fingerprint(model, optimizer))


def test_the_check_of_the_first_window_keeps_the_statistics():
    model = net()
    optimizer = sgd(model.parameters())
    accumulate = Accumulator(
        model,
        optimizer,
        lambda mb: mse(model, mb).sum() * len(mb[0]),
        microbatch_size=3,
        participants=[GhostBatchNorm()],
    )
    before = fingerprint(model, optimizer)
    with pytest.raises(SuperbatchError, match="reduction"):
        accumulate(BATCHES[0])
    assert_unchanged(before, fingerprint(model, optimizer))


@pytest.mark.parametrize("kind", [FrozenBatchNorm, GhostBatchNorm])
def test_a_module_without_a_batchnorm_of_the_model_is_refused(kind: Any) -> None:
    model = net()
    with pytest.raises(InputError, match="a Linear that contains no BatchNorm of the model"):
        accumulator(model, participants=[kind(nn.Linear(2, 2))])
    with pytest.raises(InputError, match="a BatchNorm1d that contains no BatchNorm of the model"):
        accumulator(model, participants=[kind(nn.BatchNorm1d(2))])
