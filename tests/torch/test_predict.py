"""Predicted memory peaks against measured peaks of the same training; a prediction changes no state."""

from __future__ import annotations

import gc
import random
import textwrap
import warnings
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from superbatch.errors import InputError
from superbatch.torch import Accumulator
from superbatch.torch.masters import MasterWeights, fp32_masters
from superbatch.torch.memory.meter import peak_bytes
from superbatch.torch.options import GhostBatchNorm
from superbatch.torch.sizes.fake import PredictionError
from superbatch.torch.sizes.predict import _on_device, predict_peak
from tests import forked
from tests.torch.sized_models import Checkpointed, Lstm, Own, Tied, Transformer, convnet, mlp, norms

WITHIN = 0.01
SAMPLES = 8


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)


def images(*shape: int) -> Callable[[int], Any]:
    return lambda count: {"inputs": torch.randn(count, *shape), "labels": torch.randint(10, (count,))}


def text(vocabulary: int) -> Callable[[int], Any]:
    def make(count: int) -> Any:
        ids = torch.randint(vocabulary, (count, 33))
        return {"inputs": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}

    return make


def cross_entropy(model: nn.Module) -> Callable[[Any], Tensor]:
    def loss_fn(microbatch: Any) -> Tensor:
        out = model(microbatch["inputs"])
        return functional.cross_entropy(out.flatten(0, -2).float(), microbatch["labels"].flatten())

    return loss_fn


def autocast(model: nn.Module) -> Callable[[Any], Tensor]:
    def loss_fn(microbatch: Any) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return cross_entropy(model)(microbatch)

    return loss_fn


def in_double(model: nn.Module) -> Callable[[Any], Tensor]:
    def loss_fn(microbatch: Any) -> Tensor:
        return functional.cross_entropy(model(microbatch["inputs"].double()), microbatch["labels"])

    return loss_fn


def with_weight_decay(model: nn.Module) -> Callable[[Any], Tensor]:
    """Loss whose closure holds parameters, not only the module."""
    weights = [p for p in model.parameters() if p.ndim > 1]
    return lambda microbatch: cross_entropy(model)(microbatch) + 1e-3 * sum(w.square().sum() for w in weights)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def adamw(**options: Any) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3, **options)


CASES: dict[str, tuple[Any, ...]] = {
    "mlp, sgd": (mlp, images(64), cross_entropy, sgd),
    "mlp, adamw foreach": (mlp, images(64), cross_entropy, adamw(foreach=True)),
    "mlp, adamw for loop": (mlp, images(64), cross_entropy, adamw(foreach=False)),
    "mlp, adamw fused": (mlp, images(64), cross_entropy, adamw(fused=True)),
    "mlp, adamw amsgrad": (mlp, images(64), cross_entropy, adamw(amsgrad=True)),
    "mlp, adafactor": (mlp, images(64), cross_entropy, lambda m: torch.optim.Adafactor(m.parameters())),
    "convnet, momentum": (convnet, images(3, 32, 32), cross_entropy, momentum),
    "norms, adamw": (norms, images(3, 8, 8), cross_entropy, adamw()),
    "transformer, adamw fused": (Transformer, text(1024), cross_entropy, adamw(fused=True)),
    "transformer, autocast": (lambda: Transformer(2), text(1024), autocast, adamw()),
    "tied gru, momentum": (Tied, text(200), cross_entropy, momentum),
    "lstm in float64": (lambda: Lstm().double(), images(12, 64), in_double, momentum),
    "checkpoint": (lambda: Checkpointed(use_reentrant=False), images(64), cross_entropy, momentum),
    "reentrant checkpoint": (lambda: Checkpointed(use_reentrant=True), images(64), cross_entropy, momentum),
    "own function": (Own, images(512), cross_entropy, momentum),
    "closure over weights": (mlp, images(64), with_weight_decay, momentum),
    "bfloat16": (lambda: Transformer(2).bfloat16(), text(1024), cross_entropy, adamw()),
}


def most_alive(accumulate: Any, batch: Any) -> int:
    """Peak of bytes alive in three windows, beyond those alive before the first."""

    def windows() -> None:
        for _ in range(3):
            accumulate(batch)
            accumulate.engine.config.until_next.clear()  # the next window's first micro-batch

    return peak_bytes(windows)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("samples", [SAMPLES, 2 * SAMPLES])
@pytest.mark.sampled(3)
def test_the_prediction_matches_the_measured_peak(name: str, samples: int) -> None:
    make_model, make_data, make_loss, make_optimizer = CASES[name]
    model, batch = make_model(), make_data(2 * samples)
    optimizer, loss_fn = make_optimizer(model), make_loss(model)
    microbatch = {name: leaf[:samples] for name, leaf in batch.items()}
    peak = predict_peak(loss_fn, microbatch, models=model, optimizers=optimizer)

    accumulate = Accumulator(
        model, optimizer, loss_fn, microbatch_size=samples, check=False, participants=[GhostBatchNorm()]
    )
    real = most_alive(accumulate, batch)
    assert real > 1e5, "premise: the case is large enough"
    assert abs(peak.bytes - real) <= WITHIN * real, (peak, real)


def test_first_is_the_peak_of_one_micro_batch_alone() -> None:
    model, batch = convnet(), images(3, 32, 32)(SAMPLES)
    loss_fn = cross_entropy(model)
    peak = predict_peak(loss_fn, batch, models=model, optimizers=momentum(model))
    real = peak_bytes(lambda: loss_fn(batch).backward())
    assert abs(peak.first - real) <= WITHIN * real
    assert peak.first < peak.backward


def test_later_windows_have_the_state_that_the_first_update_made() -> None:
    model, batch = mlp(), images(64)(SAMPLES)
    optimizer = adamw()(model)
    size = sum(p.nbytes for p in model.parameters())
    loss_fn = cross_entropy(model)
    new = predict_peak(loss_fn, batch, models=model, optimizers=optimizer)
    assert 2 * size <= new.optimizer_state <= 2.1 * size

    loss_fn(batch).backward()
    optimizer.step()
    optimizer.zero_grad()
    old = predict_peak(loss_fn, batch, models=model, optimizers=optimizer)
    assert old.optimizer_state == 0
    assert old.backward == new.backward
    assert old.bytes == new.bytes - new.optimizer_state


def state_of(*models: nn.Module) -> dict[str, Any]:
    """All state that a run could change."""
    tensors = {
        f"{number}.{name}": (id(tensor), tensor.data_ptr(), tensor._version, tensor.detach().clone())
        for number, model in enumerate(models)
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
    }
    gradients = {
        n: (id(p.grad), None if p.grad is None else p.grad.clone())
        for m in models
        for n, p in m.named_parameters()
    }
    plain = [
        {k: v for k, v in vars(module).items() if not k.startswith("_")}
        for m in models
        for module in m.modules()
    ]
    rng = (torch.get_rng_state(), random.getstate(), np.random.get_state(legacy=False)["state"]["key"].copy())
    return {"tensors": tensors, "gradients": gradients, "plain": deepcopy(plain), "rng": rng}


def assert_same(before: dict[str, Any], after: dict[str, Any]) -> None:
    for kind in ("tensors", "gradients"):
        assert before[kind].keys() == after[kind].keys()
        for name, (*identity, content) in before[kind].items():
            *identity_after, content_after = after[kind][name]
            assert identity == identity_after, name
            assert content is content_after is None or torch.equal(content, content_after), name
    assert before["plain"] == after["plain"]
    assert torch.equal(before["rng"][0], after["rng"][0])
    assert before["rng"][1] == after["rng"][1]
    assert (before["rng"][2] == after["rng"][2]).all()


class StatefulModel(nn.Module):
    """Model whose forward changes buffers, attributes and random generators."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(64)
        self.head = nn.Linear(64, 10)
        self.calls = 0
        self.seen: list[int] = []
        self.register_buffer("mean", torch.zeros(64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(len(x))
        self.last = x
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        x = self.norm(x) + random.random() + np.random.rand() + torch.randn(64)
        return self.head(functional.dropout(x, 0.5))


@pytest.mark.parametrize("fails", [False, True])
def test_a_prediction_changes_no_state(fails: bool) -> None:
    model, batch = StatefulModel(), images(64)(SAMPLES)
    optimizer = adamw()(model)
    called: list[str] = []
    model.head.weight.register_hook(lambda _: called.append("hook"))  # pyright: ignore[reportArgumentType]  (returns None)
    optimizer.register_step_post_hook(lambda *_: called.append("step"))
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)  # wraps the optimizer's step
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    groups, before = deepcopy(optimizer.param_groups), state_of(model)

    def loss_fn(microbatch: Any) -> Tensor:
        loss = cross_entropy(model)(microbatch)
        return loss * loss.item() if fails else loss

    if fails:
        with pytest.raises(
            PredictionError, match=r"DataDependentOutputException.*Measure small micro-batches"
        ):
            predict_peak(loss_fn, batch, models=model, optimizers=optimizer)
    else:
        assert predict_peak(loss_fn, batch, models=model, optimizers=optimizer).gradients > 0
    assert_same(before, state_of(model))
    assert not hasattr(model, "last")
    assert called == []
    assert not optimizer.state
    assert [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups] == [
        {k: v for k, v in g.items() if k != "params"} for g in groups
    ]
    assert loss_fn(batch).requires_grad  # and it works as before


def test_a_prediction_does_not_change_optimizer_state() -> None:
    model, batch = mlp(), images(64)(SAMPLES)
    optimizer, loss_fn = adamw()(model), cross_entropy(model)
    loss_fn(batch).backward()
    optimizer.step()
    before = {
        p: {k: (id(v), v._version, v.clone()) for k, v in s.items()} for p, s in optimizer.state.items()
    }
    predict_peak(loss_fn, batch, models=model, optimizers=optimizer)
    assert before.keys() == optimizer.state.keys()
    for parameter, state in before.items():
        for name, (identity, version, content) in state.items():
            now = optimizer.state[parameter][name]
            assert (id(now), now._version) == (identity, version)
            assert torch.equal(now, content)


def test_a_prediction_computes_nothing() -> None:
    """A micro-batch of a terabyte needs no memory."""
    model = mlp()
    inputs = torch.empty(1).expand(1 << 30, 64)
    labels = torch.zeros(1, dtype=torch.long).expand(1 << 30)
    batch = {"inputs": inputs, "labels": labels}
    peak = predict_peak(cross_entropy(model), batch, models=model, optimizers=sgd(model))
    assert peak.samples == 1 << 30
    assert peak.bytes > 1 << 40


@pytest.mark.parametrize(
    ("name", "loss_of"),
    [
        ("DataDependentOutputException", lambda out: out.mean() if out.sum() > 0 else out.sum()),
        ("DynamicOutputShapeException", lambda out: out[out > 0].mean()),
        ("RuntimeError", lambda out: out.mean() * float(out.detach().numpy().sum())),
    ],
)
def test_losses_that_fake_tensors_cannot_run_raise(name: str, loss_of: Callable[[Tensor], Tensor]) -> None:
    model = mlp()
    with pytest.raises(
        PredictionError, match=rf"cannot run on fake tensors \({name}.*Measure small micro-batches"
    ):
        predict_peak(lambda x: loss_of(model(x)), torch.randn(4, 64), models=model)


def test_layers_with_a_workspace_of_unknown_size_are_refused() -> None:
    model = Lstm()
    with pytest.raises(PredictionError, match=r"recurrent layer \(lstm\) on cpu.*workspace of unknown size"):
        predict_peak(cross_entropy(model), images(12, 64)(4), models=model)


def test_the_next_micro_batch_is_copied_to_the_device() -> None:
    batch = images(64)(4)
    assert _on_device(batch, None) == (batch, None)
    assert _on_device(batch, torch.device("cpu"))[1] is None
    current, following = _on_device(batch, torch.device("meta"))  # any device that is not the host
    assert current["inputs"].device.type == following["inputs"].device.type == "meta"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda() -> None:
    model, batch = Transformer().cuda(), text(1024)(4 * SAMPLES)
    optimizer, loss_fn, cuda = adamw()(model), cross_entropy(model), torch.device("cuda")
    on_device = {name: leaf[:SAMPLES].cuda() for name, leaf in batch.items()}
    loss_fn(on_device).backward()  # allocates the libraries' workspaces, which stay
    model.zero_grad()
    microbatch = {name: leaf[:SAMPLES] for name, leaf in batch.items()}
    peak = predict_peak(loss_fn, microbatch, models=model, optimizers=optimizer, device=cuda)
    accumulate = Accumulator(model, optimizer, loss_fn, microbatch_size=SAMPLES, check=False)
    real = peak_bytes(lambda: [accumulate(batch) for _ in range(3)], device=cuda)
    assert peak.bytes == pytest.approx(real, rel=0.05)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_an_unavailable_device_is_refused() -> None:
    model = mlp()
    with pytest.raises(InputError, match=r"device='cuda' is not available"):
        predict_peak(cross_entropy(model), images(64)(4), models=model, device=torch.device("cuda"))


def test_accumulation_in_float32_costs_its_buffers() -> None:
    model, batch = Transformer(2).bfloat16(), text(1024)(SAMPLES)
    parameters = sum(p.numel() for p in model.parameters())
    optimizer, loss_fn = adamw()(model), cross_entropy(model)
    own = predict_peak(loss_fn, batch, models=model, optimizers=optimizer)
    wide = predict_peak(loss_fn, batch, models=model, optimizers=optimizer, gradient_sum=torch.float32)
    assert wide.gradients - own.gradients == pytest.approx(2 * parameters, rel=0.01)
    accumulate = Accumulator(
        model, optimizer, loss_fn, microbatch_size=SAMPLES // 2, check=False, gradient_sum=torch.float32
    )
    half = {name: leaf[: SAMPLES // 2] for name, leaf in batch.items()}
    peak = predict_peak(loss_fn, half, models=model, optimizers=optimizer, gradient_sum=torch.float32)
    assert peak.bytes == pytest.approx(most_alive(accumulate, batch), rel=WITHIN)


def test_masters() -> None:
    model, batch = Transformer(2).bfloat16(), text(1024)(SAMPLES)
    masters = fp32_masters(model)
    optimizer, loss_fn = torch.optim.AdamW(masters.values(), lr=1e-3), cross_entropy(model)
    half = {name: leaf[: SAMPLES // 2] for name, leaf in batch.items()}
    peak = predict_peak(
        loss_fn, half, models=model, optimizers=optimizer, gradient_sum="auto", masters=masters
    )
    accumulate = Accumulator(
        model, MasterWeights(optimizer, masters), loss_fn, microbatch_size=SAMPLES // 2, check=False
    )
    assert peak.bytes == pytest.approx(most_alive(accumulate, batch), rel=WITHIN)


def test_accumulation_into_momentum() -> None:
    model, batch = convnet(), images(3, 32, 32)(2 * SAMPLES)
    optimizer, loss_fn = momentum(model), cross_entropy(model)
    half = {name: leaf[:SAMPLES] for name, leaf in batch.items()}
    peak = predict_peak(loss_fn, half, models=model, optimizers=optimizer, gradient_sum="momentum")
    accumulate = Accumulator(
        model, optimizer, loss_fn, microbatch_size=SAMPLES, check=False, gradient_sum="momentum"
    )
    assert peak.bytes == pytest.approx(most_alive(accumulate, batch), rel=WITHIN)


def test_weights_that_the_loss_returns() -> None:
    model, batch = mlp(), images(64)(SAMPLES)
    loss_fn = cross_entropy(model)
    plain = predict_peak(loss_fn, batch, models=model)
    pair = predict_peak(lambda microbatch: (loss_fn(microbatch), SAMPLES), batch, models=model)
    assert pair == plain


def test_two_models_with_one_in_the_optimizer() -> None:
    """The backward is restricted to parameters of the optimizer, and allocates no other gradients."""
    model, other = mlp(), nn.Linear(10, 1000)
    batch = images(64)(SAMPLES)

    def loss_fn(microbatch: Any) -> Tensor:
        return other(model(microbatch["inputs"])).square().mean()

    half = {name: leaf[: SAMPLES // 2] for name, leaf in batch.items()}
    peak = predict_peak(loss_fn, half, models=[model, other], optimizers=sgd(model))
    both = predict_peak(loss_fn, half, models=[model, other], optimizers=[sgd(model), sgd(other)])
    others = sum(p.nbytes for p in other.parameters())
    assert both.gradients - peak.gradients == pytest.approx(others, rel=WITHIN)
    assert both.bytes - peak.bytes == pytest.approx(others, rel=WITHIN)
    assert others > 10 * WITHIN * peak.bytes, "premise: gradients of both models would be another peak"
    accumulate = Accumulator([model, other], sgd(model), loss_fn, microbatch_size=SAMPLES // 2, check=False)
    assert peak.bytes == pytest.approx(most_alive(accumulate, batch), rel=WITHIN)
    assert all(p.grad is None for p in other.parameters())


def test_a_prediction_does_not_compile_a_compiled_model() -> None:
    model, batch = mlp(), images(64)(SAMPLES)
    compiled_graphs: list[int] = []

    def backend(graph: Any, _: Any) -> Any:
        compiled_graphs.append(1)
        return graph.forward

    compiled: Any = torch.compile(model, backend=backend)
    plain = predict_peak(cross_entropy(model), batch, models=model)
    assert predict_peak(cross_entropy(compiled), batch, models=model) == plain
    assert compiled_graphs == []
    cross_entropy(compiled)(batch)
    assert compiled_graphs, "premise: a real run compiles the model"


def test_within_no_grad_and_an_enclosing_autocast() -> None:
    model, batch = mlp(), images(64)(SAMPLES)
    loss_fn = cross_entropy(model)
    plain = predict_peak(loss_fn, batch, models=model)
    with torch.no_grad():
        assert predict_peak(loss_fn, batch, models=model) == plain
        assert not torch.is_grad_enabled()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        real = loss_fn(batch)
        assert predict_peak(loss_fn, batch, models=model).activations != plain.activations
        assert torch.equal(loss_fn(batch), real)  # autocast's cache holds no cast of a fake tensor


def test_a_micro_batch_of_views_adds_no_memory() -> None:
    model, batch = mlp(), images(64)(64)
    views = {name: leaf[8:16] for name, leaf in batch.items()}
    alone = {name: leaf.clone() for name, leaf in views.items()}
    assert predict_peak(cross_entropy(model), views, models=model) == predict_peak(
        cross_entropy(model), alone, models=model
    )


def test_distributed_data_parallel_does_not_communicate(tmp_path: Path) -> None:
    """The test runs in another process, because a process group is global."""
    code = """
        import sys, torch
        from torch import nn
        import torch.distributed as dist
        from superbatch.torch.sizes.predict import _on_device, predict_peak
        from tests.torch.sized_models import convnet
        dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)
        model = nn.Sequential(convnet(), nn.BatchNorm1d(10))
        parallel = nn.parallel.DistributedDataParallel(model)
        batch = torch.randn(8, 3, 32, 32)
        calls = []
        dist._register_comm_hook(parallel.reducer, None, lambda state, bucket: calls.append(1))
        for name in ("broadcast", "all_reduce", "all_to_all_single"):
            setattr(dist, name, lambda *args, **kwargs: calls.append(1))
        alone = predict_peak(lambda x: model(x).square().mean(), batch, models=model)
        peak = predict_peak(lambda x: parallel(x).square().mean(), batch, models=parallel)
        assert peak == alone, (peak, alone)
        assert "forward" not in vars(parallel) and not calls
        assert all(p.grad is None for p in model.parameters())
        dist.destroy_process_group()
    """
    done = forked.run(["-c", textwrap.dedent(code), tmp_path / "store"])
    assert done.returncode == 0, done.stderr


def fakes_alive() -> set[int]:
    gc.collect()
    # `type`, not `isinstance`, which has side effects on some objects.
    return {id(thing) for thing in gc.get_objects() if type(thing).__name__ in ("FakeTensor", "_Faking")}


def test_no_fake_tensor_stays_alive() -> None:
    model, batch = mlp(), images(64)(SAMPLES)
    optimizer = adamw()(model)
    before = fakes_alive()  # a compiler has its own
    predict_peak(cross_entropy(model), batch, models=model, optimizers=optimizer)
    assert fakes_alive() <= before


def test_a_scripted_module_is_refused_before_any_parameter_is_replaced() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        model = nn.Sequential(nn.Linear(64, 10), torch.jit.script(nn.Linear(10, 10)), nn.Linear(10, 10))
    before = list(model.parameters())
    with pytest.raises(PredictionError, match=r"scripted module.*Measure small micro-batches"):
        predict_peak(cross_entropy(model), images(64)(4), models=model)
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize(
    "loss_of",
    [
        lambda model, x: torch.func.vmap(model)(x).square().mean(),
        lambda model, x: torch.func.functional_call(model, dict(model.named_parameters()), (x,)).sum(),
        lambda model, x: (
            sum(
                gradient.square().sum()
                for gradient in torch.autograd.grad(
                    model(x).sum(), list(model.parameters()), create_graph=True
                )
            )
            + model(x).sum()
        ),
    ],
    ids=["vmap", "functional_call", "gradient penalty"],
)
def test_function_transforms(loss_of: Callable[[nn.Module, Tensor], Any]) -> None:
    model, batch = mlp(), torch.randn(64, 64)
    peak = predict_peak(lambda x: loss_of(model, x), batch, models=model)
    real = peak_bytes(lambda: loss_of(model, batch).backward())
    assert peak.first == pytest.approx(real, rel=WITHIN)
