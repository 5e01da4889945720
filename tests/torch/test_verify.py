"""Verdicts and causes of `verify`, and the state it restores."""

from __future__ import annotations

import copy
import math
import random
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from superbatch.batch.split import TokenBudget
from superbatch.errors import InputError, NonFiniteError, SplitError
from superbatch.results.verification import GradientComparison, ParameterDifference, Verification
from superbatch.torch.memory.out_of_memory import out_of_memory
from superbatch.torch.options import FrozenBatchNorm, PerSampleRandom, Split
from superbatch.torch.verify import verify
from tests import forked
from tests.torch.verify_cases import (
    EXACT,
    NOT_EXACT,
    Case,
    Problem,
    flat_batch,
    language,
    mlp,
    supervised,
    tied,
    token_batch,
)


def check(problem: Problem, **options: Any) -> Verification:
    options = {"microbatch_size": 5, **problem.options, **options}
    return verify(problem.model, problem.loss_fn, problem.batch, **options)


@pytest.mark.parametrize("case", EXACT, ids=lambda case: case.name)
def test_exact_cases(case: Case) -> None:
    report = check(case.make())
    assert report.exact, str(report)
    assert report.causes == ()
    assert report.findings == ()
    assert [comparison.dtype for comparison in report.comparisons] == ["float32", "float64"]
    float64 = report.comparisons[1]
    assert float64.against == "batch"
    assert len(float64.split) == 3
    assert float64.reference_split == (12,)
    # Premise: there are gradients to compare.
    assert float64.parameters
    assert max(parameter.norm for parameter in float64.parameters) > 1e-3
    assert float64.largest < 1e-13


@pytest.mark.parametrize("case", NOT_EXACT, ids=lambda case: case.name)
@pytest.mark.sampled(2)
def test_inexact_cases_name_their_cause(case: Case) -> None:
    report = check(case.make())
    assert not report.exact
    assert not report.comparisons[1].exact
    first = report.causes[0]
    assert (first.kind, first.module) == (case.kind, case.module), str(report)
    assert case.remedy in first.remedy
    assert first.evidence > 1e-7
    assert (
        f"NOT exact: accumulated gradients differ from the batch's (12 samples)\n  cause: {case.kind}"
        in str(report)
    )


@pytest.mark.parametrize(
    ("make", "remedied"),
    [
        (lambda: language(), {"weight": lambda b: int((b["labels"] != -100).sum())}),
        (lambda: supervised(mlp(nn.Dropout(0.3))), {"participants": [PerSampleRandom()]}),
        (lambda: supervised(mlp(nn.BatchNorm1d(8))), {"participants": [FrozenBatchNorm()]}),
    ],
)
def test_the_remedy_helps(make: Any, remedied: dict[str, Any]) -> None:
    problem = make()
    assert not check(problem).exact
    assert check(problem, **remedied).exact


def test_several_causes_are_all_named() -> None:
    problem = supervised(mlp(nn.BatchNorm1d(8), nn.Dropout(0.3)))
    assert isinstance(problem.model, nn.Sequential)
    problem.model.append(nn.BatchNorm1d(4))
    report = check(problem)
    assert [(cause.kind, cause.module) for cause in report.causes] == [
        ("random", "2"),
        ("batchnorm", "1"),
        ("batchnorm", "5"),
    ]


def test_a_loss_that_cannot_be_repeated_is_nondeterministic() -> None:
    model, calls = mlp(), []

    def loss_fn(batch: Any) -> Tensor:
        calls.append(None)
        return F.cross_entropy(model(batch[0]), batch[1]) * (1 + 0.1 * len(calls))

    report = check(Problem(model, loss_fn, flat_batch()))
    assert [cause.kind for cause in report.causes] == ["nondeterminism"]
    assert "counter" in report.causes[0].remedy


def test_inactive_coupling_is_a_finding_not_a_cause() -> None:
    class Rare(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x - x.mean(0) if x.abs().max() > 3 else x

    report = check(supervised(mlp(Rare())))
    assert report.exact
    assert report.causes == ()
    assert [(finding.kind, finding.module) for finding in report.findings] == [("coupled", "1")]


def test_state_without_effect_is_a_finding_not_a_cause() -> None:
    model = nn.Sequential(
        nn.Unflatten(1, (2, 3)), nn.InstanceNorm1d(2, track_running_stats=True), nn.Flatten()
    )
    model.append(nn.Linear(6, 4))
    report = check(supervised(model))
    assert report.exact
    assert [(finding.kind, finding.module) for finding in report.findings] == [("state", "1")]


def test_a_penalty_in_a_sum_is_added_once_per_micro_batch() -> None:
    model = mlp()

    def loss_fn(b: Any) -> Tensor:
        penalty = torch.stack([parameter.square().sum() for parameter in model.parameters()]).sum()
        return F.cross_entropy(model(b[0]), b[1], reduction="sum") + penalty

    report = check(Problem(model, loss_fn, flat_batch()), reduction="sum")
    assert [cause.kind for cause in report.causes] == ["batch_size"]
    assert "weight_decay" in report.causes[0].remedy


@pytest.mark.parametrize("participants", [[], [PerSampleRandom()]], ids=str)
def test_random_numbers_of_python(participants: list[Any]) -> None:
    model = mlp()
    loss_fn = lambda b: F.cross_entropy(model(b[0] * random.random()), b[1])  # noqa: E731
    report = check(Problem(model, loss_fn, flat_batch()), participants=participants)
    assert [(cause.kind, cause.found_by) for cause in report.causes] == [("random", "another seed")]
    assert report.causes[0].remedy.startswith("draw them with torch's own functions")


def test_a_loss_that_depends_on_the_order_of_the_batch() -> None:
    model = mlp()

    def loss_fn(b: Any) -> Tensor:
        losses = F.cross_entropy(model(b[0]), b[1], reduction="none")
        return (losses * torch.arange(len(losses))).mean()

    report = check(Problem(model, loss_fn, flat_batch()))
    assert [(cause.kind, cause.found_by) for cause in report.causes] == [("coupled_loss", "reversed batch")]


def test_micro_batches_on_which_the_model_raises() -> None:
    with pytest.raises(
        InputError,
        match=r"not on micro-batches with microbatch_size=.* .ValueError: Expected more than 1 value",
    ):
        check(supervised(mlp(nn.BatchNorm1d(8))), microbatch_size=1)


def test_labels_are_preferred_among_equal_counts() -> None:
    problem = language()
    batch = problem.batch
    batch["ids"] = batch["ids"] * (batch["labels"] != -100)
    report = check(Problem(problem.model, problem.loss_fn, batch))
    assert report.causes[0].remedy == 'pass weight=count_tokens("labels")'


def test_compiled_models_are_not_recompiled() -> None:
    model = torch.compile(mlp(nn.LayerNorm(8)), backend="eager", fullgraph=True)
    assert isinstance(model, nn.Module)
    frames: dict[str, int] = dict(torch._dynamo.utils.counters["frames"])
    assert check(supervised(model)).exact
    assert dict(torch._dynamo.utils.counters["frames"]) == frames


# -- splits --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [EXACT[0], EXACT[3], NOT_EXACT[0]], ids=lambda case: case.name)
@pytest.mark.parametrize("size", [1, 2, 5])
def test_two_splits_give_the_same_verdict(case: Case, size: int) -> None:
    if case.kind == "batchnorm" and size < 4:
        size = 4  # training BatchNorm refuses a single sample
    report = check(case.make(), against="splits", microbatch_size=size)
    assert report.exact == (case.kind is None)
    assert {comparison.against for comparison in report.comparisons} == {"splits"}
    assert all(comparison.split != comparison.reference_split for comparison in report.comparisons)
    assert [cause.kind for cause in report.causes] == ([case.kind] if case.kind else [])


def test_two_splits_find_the_wrong_weight_of_a_token_mean() -> None:
    report = check(language(), against="splits", microbatch_size=6)
    assert [cause.kind for cause in report.causes] == ["weight"]


def test_token_budget() -> None:
    batch = token_batch()
    batch["lengths"] = (batch["labels"] != -100).sum(1)
    problem = language(weight=lambda b: int((b["labels"] != -100).sum()))
    report = verify(
        problem.model, problem.loss_fn, batch, microbatch_size=TokenBudget(12, "lengths"), **problem.options
    )
    assert report.exact
    assert len(report.comparisons[0].split) > 1


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("DefaultCPUAllocator: can't allocate"),
    ],
)
def test_out_of_memory_falls_back_to_two_splits(error: Exception) -> None:
    model = mlp()

    def loss_fn(batch: Any) -> Tensor:
        if len(batch[0]) > 6:
            raise error
        return F.cross_entropy(model(batch[0]), batch[1])

    report = check(Problem(model, loss_fn, flat_batch()))
    assert report.exact
    assert [comparison.against for comparison in report.comparisons] == ["splits", "splits"]
    assert "in float32 the whole batch does not fit in memory: two splits were compared" in report.notes
    with pytest.raises(type(error)):
        check(Problem(model, loss_fn, flat_batch()), against="batch")


def test_other_errors_are_not_taken_for_out_of_memory() -> None:
    model = mlp()

    def loss_fn(batch: Any) -> Tensor:
        if len(batch[0]) > 6:
            raise RuntimeError("out of memory of a kind")
        return F.cross_entropy(model(batch[0]), batch[1])

    with pytest.raises(RuntimeError, match="out of memory of a kind"):
        check(Problem(model, loss_fn, flat_batch()))


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_AS limits memory on Linux only")
def test_a_real_limit_of_memory() -> None:
    child = textwrap.dedent(
        """
        import resource, torch
        from superbatch.torch.verify import verify
        torch.set_num_threads(1)
        model = torch.nn.Linear(64, 1)
        def loss_fn(x):  # megabytes of graph for each sample
            return (model(x) * torch.ones(200_000, dtype=x.dtype)).tanh().mean()
        def size():
            return int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        verify(model, loss_fn, torch.randn(4, 64), microbatch_size=2)  # fill lazy caches
        resource.setrlimit(resource.RLIMIT_AS, (size() + 400_000_000,) * 2)  # ten micro-batches
        report = verify(model, loss_fn, torch.randn(400, 64), microbatch_size=4)
        print(report.exact, [c.against for c in report.comparisons])
        print(*report.notes, sep="; ")
        """
    )
    done = forked.run(["-c", child])
    assert done.stdout.startswith("True ['splits', 'splits']\nin float32 the whole batch does not"), (
        done.stderr
    )


def test_out_of_memory_is_recognised_narrowly() -> None:
    assert out_of_memory(MemoryError())
    assert not out_of_memory(RuntimeError("CUDA error: out of order"))
    assert not out_of_memory(ValueError("DefaultCPUAllocator"))


# -- dtypes --------------------------------------------------------------------------------------------------


def test_dtypes() -> None:
    problem = EXACT[0].make()
    assert [c.dtype for c in check(problem, dtype="own").comparisons] == ["float32"]
    assert [c.dtype for c in check(problem, dtype="float64").comparisons] == ["float64"]
    double = supervised(mlp().double(), (torch.randn(12, 6).double(), torch.arange(12) % 4))
    assert [c.dtype for c in check(double).comparisons] == ["float64"]


def test_a_model_that_computes_in_float32_inside() -> None:
    model = mlp()
    loss_fn = lambda b: F.cross_entropy(model(b[0]).float(), b[1])  # noqa: E731
    report = check(Problem(model, loss_fn, (torch.randn(49, 6), torch.arange(49) % 4)))
    assert report.exact
    assert 1e-12 < report.comparisons[1].largest < 1e-6
    assert report.notes == ("parts of the model compute in float32, whatever the dtype of their inputs",)
    # The same model with wrong weights is not excused by its rounding.
    wrong = lambda b: F.cross_entropy(model(b[0]).float(), b[1], reduction="sum")  # noqa: E731
    assert not check(Problem(model, wrong, flat_batch())).exact


def test_a_model_that_cannot_run_in_float64() -> None:
    model = mlp()
    table = torch.randn(6, 6)
    problem = Problem(model, lambda b: F.cross_entropy(model(b[0] @ table), b[1]), flat_batch())
    report = check(problem)
    assert report.exact
    assert [comparison.dtype for comparison in report.comparisons] == ["float32"]
    assert report.notes[0].startswith(
        "float64 was not measured: RuntimeError: expected m1 and m2 to have the same"
    )
    with pytest.raises(InputError, match=r'The model or the loss does not run with dtype="float64"'):
        check(problem, dtype="float64")


def test_bfloat16() -> None:
    model = mlp().bfloat16()
    x, y = flat_batch()
    problem = supervised(model, (x.bfloat16(), y))
    report = check(problem)
    assert report.exact, str(report)
    assert [comparison.dtype for comparison in report.comparisons] == ["bfloat16", "float64"]
    assert report.comparisons[0].largest > 1e-5


def test_low_precision_that_loses_the_sum_is_named() -> None:
    """float16 rounds away every gradient but that of the first micro-batch."""
    model = nn.Linear(1, 1, bias=False).half()
    batch = torch.cat([torch.full((1, 1), 256.0), torch.full((15, 1), 0.1)]).half()
    loss_fn = lambda x: model(x).sum() * 10  # noqa: E731
    total = torch.zeros(1).half()
    for gradient in 10 * batch:
        total = total + gradient
    assert torch.equal(total, 10 * batch[0]) and total < 0.995 * 10 * batch.double().sum(), "premise"
    options: dict[str, Any] = {"microbatch_size": 1, "reduction": "sum", "tolerance": 1e-9}
    report = verify(model, loss_fn, batch, **options)
    assert [(each.dtype, each.exact) for each in report.comparisons] == [
        ("float16", False),
        ("float64", True),
    ]
    assert not report.exact
    (cause,) = report.causes
    assert cause.kind == "precision" and "gradient_sum=torch.float32" in cause.remedy
    assert verify(model, loss_fn, batch[1:], **options).exact, "premise: small gradients alone are not lost"


def test_rounding_of_a_deep_relu_net_is_not_taken_for_an_error() -> None:
    layers = [layer for _ in range(12) for layer in (nn.Linear(32, 32), nn.LayerNorm(32), nn.ReLU())]
    model = nn.Sequential(nn.Linear(6, 32), *layers, nn.Linear(32, 4))
    report = check(supervised(model, (torch.randn(64, 6), torch.arange(64) % 4)))
    assert report.exact, str(report)


def test_a_graph_that_is_still_alive() -> None:
    """An open graph keeps autograd nodes of the parameters in float32."""
    problem = EXACT[0].make()
    loss = problem.loss_fn(problem.batch)
    reference = torch.autograd.grad(problem.loss_fn(problem.batch), list(problem.model.parameters()))
    assert check(problem).comparisons[1].largest < 1e-13
    loss.backward()
    for parameter, gradient in zip(problem.model.parameters(), reference, strict=True):
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, gradient)


def test_ddp_hooks_are_kept(tmp_path: Path) -> None:
    child = textwrap.dedent(
        """
        import sys, torch
        import torch.distributed as dist
        from superbatch.errors import InputError
        from superbatch.torch.verify import verify
        dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)
        model = torch.nn.Linear(2, 1)
        reduced = []
        ddp = torch.nn.parallel.DistributedDataParallel(model)
        def hook(state, bucket):
            reduced.append(bucket.buffer().numel())
            future = torch.futures.Future()
            future.set_result(bucket.buffer())
            return future
        dist._register_comm_hook(ddp.reducer, None, hook)  # on the reducer, not on the module
        batch = torch.randn(6, 2)
        report = verify(model, lambda x: model(x).square().mean(), batch, microbatch_size=2)
        print(report.exact, report.notes)
        ddp(batch).mean().backward()
        print(reduced)
        try:
            verify(ddp, lambda x: ddp(x).mean(), batch, microbatch_size=2)
        except InputError as error:
            print(error)
        dist.destroy_process_group()
        """
    )
    done = forked.run(["-c", child, tmp_path / "rendezvous"])
    lines = done.stdout.splitlines()
    assert len(lines) == 3, done.stderr
    assert lines[0].startswith("True (")
    assert "float64 was not measured: RuntimeError: DistributedDataParallel" in lines[0]
    assert lines[1] == "[3]"
    assert lines[2].startswith("DistributedDataParallel (the model itself) averages gradients over ranks")


# -- restored state ------------------------------------------------------------------------------------------


def snapshot(model: nn.Module) -> dict[str, Any]:
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {
        "bits": {name: tensor.detach().clone() for name, tensor in tensors},
        "objects": [
            (name, id(tensor), tensor.data_ptr(), tensor.dtype, tensor.requires_grad)
            for name, tensor in tensors
        ],
        "grads": [(name, id(tensor.grad)) for name, tensor in tensors],
        "modes": [(name, module.training) for name, module in model.named_modules()],
        "hooks": [(len(module._forward_hooks), len(module._forward_pre_hooks)) for module in model.modules()],
        "attributes": {
            name: {
                key: value for key, value in module.__dict__.items() if isinstance(value, int | float | str)
            }
            for name, module in model.named_modules()
        },
        "random": (torch.get_rng_state().tolist(), random.getstate()),
    }


def assert_same(before: dict[str, Any], after: dict[str, Any]) -> None:
    bits, bits_after = before.pop("bits"), after.pop("bits")
    assert before == after
    for name, tensor in bits.items():
        assert torch.equal(tensor, bits_after[name]), name


def model_with_all_state() -> nn.Sequential:
    """Return a model with tied weights, shared storage, buffers, a frozen bias, a counter and gradients."""
    model = nn.Sequential(*tied(), nn.BatchNorm1d(6), nn.Dropout(0.2), nn.Linear(6, 4))
    flat = torch.randn(28)
    model[5].weight.data, model[5].bias.data = flat[:24].view(4, 6), flat[24:]
    model[2].get_parameter("bias").requires_grad = False
    model[4].eval()
    model.__dict__["calls"] = 3
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.randn_like(parameter)
    return model


def test_verify_restores_all_state() -> None:
    model = model_with_all_state()
    optimizer = torch.optim.Adam(model.parameters())
    optimizer.step()
    optimizer_state = copy.deepcopy(optimizer.state_dict())
    problem = supervised(model)
    gradients = {
        name: parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    before = snapshot(model)
    report = check(problem)
    assert not report.exact
    assert len(report.causes) >= 1
    assert_same(before, snapshot(model))
    assert gradients
    for name, parameter in model.named_parameters():
        assert parameter.grad is None or torch.equal(parameter.grad, gradients[name])
    assert model[0].weight is model[2].weight
    assert len({tensor.untyped_storage().data_ptr() for tensor in model[5].parameters()}) == 1
    for one, other in zip(
        optimizer.state_dict()["state"].values(), optimizer_state["state"].values(), strict=True
    ):
        assert all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize("call", [1, 2, 4, 9, 20, 30])
def test_verify_restores_all_state_after_an_exception(call: int) -> None:
    model, calls = model_with_all_state(), []

    class Stop(BaseException):
        pass

    def loss_fn(batch: Any) -> Tensor:
        calls.append(None)
        model.__dict__["calls"] += 1
        loss = F.cross_entropy(model(batch[0]), batch[1])
        if len(calls) == call:
            raise Stop
        return loss

    batch = flat_batch()
    before = snapshot(model)
    with pytest.raises(Stop):
        check(Problem(model, loss_fn, batch))
    assert len(calls) == call
    assert_same(before, snapshot(model))


def test_training_with_verify_is_bitwise_equal_to_training_without() -> None:
    def train(*, verified: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = mlp(nn.BatchNorm1d(8), nn.Dropout(0.2))
        optimizer = torch.optim.Adam(model.parameters(), 0.1)
        problem = supervised(model)
        for _ in range(3):
            optimizer.zero_grad()
            problem.loss_fn(problem.batch).backward()
            optimizer.step()
            if verified:
                check(problem)
        return [*model.parameters(), *model.buffers()]

    plain, verified = train(verified=False), train(verified=True)
    assert all(torch.equal(a, b) for a, b in zip(plain, verified, strict=True))


# -- models, losses, batches ---------------------------------------------------------------------------------


def test_several_models() -> None:
    first, second = nn.Linear(6, 3), nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 4))
    loss_fn = lambda b: F.cross_entropy(second(first(b[0])), b[1])  # noqa: E731
    report = verify([first, second], loss_fn, flat_batch(), microbatch_size=4)
    assert [(cause.kind, cause.module) for cause in report.causes] == [("batchnorm", "1.0")]
    assert [parameter.name for parameter in report.comparisons[0].parameters][:2] == ["0.weight", "0.bias"]


def test_weight_returned_by_the_loss() -> None:
    model = language().model

    def loss_fn(b: Any) -> tuple[Tensor, int]:
        loss = F.cross_entropy(model(b["ids"]).flatten(0, 1), b["labels"].flatten())
        return loss, int((b["labels"] != -100).sum())

    batch = token_batch()
    assert verify(model, loss_fn, batch, microbatch_size=5, weight="returned").exact
    report = verify(model, lambda b: (loss_fn(b)[0], 1), batch, microbatch_size=5, weight="returned")
    assert [cause.kind for cause in report.causes] == ["weight"]


def test_sparse_gradients_and_unused_parameters() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(11, 4, sparse=True), "unused": nn.Linear(1, 1)})
    batch = {"ids": torch.randint(0, 11, (12, 3))}
    report = verify(model, lambda b: model["embed"](b["ids"]).square().mean(), batch, microbatch_size=5)
    assert report.exact
    assert [parameter.name for parameter in report.comparisons[0].parameters] == ["embed.weight"]


def test_lists_of_texts_in_the_batch() -> None:
    model = nn.Embedding(26, 4)

    def loss_fn(b: Any) -> Tensor:
        return torch.stack(
            [model(torch.tensor([ord(c) - 97 for c in text])).square().mean() for text in b["text"]]
        ).mean()

    batch = {"text": ["ab", "cde", "f", "gh", "ijk", "l", "mn", "o", "pq"]}
    assert verify(model, loss_fn, batch, microbatch_size=4).exact


def test_gradient_checkpointing_and_gradient_penalty() -> None:
    from torch.utils.checkpoint import checkpoint

    model = mlp()

    def loss_fn(b: Any) -> Tensor:
        x = b[0].clone().requires_grad_()
        (gradient,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        logits = checkpoint(model, b[0], use_reentrant=False)
        return F.cross_entropy(logits, b[1]) + gradient.square().sum(1).mean()

    report = check(Problem(model, loss_fn, flat_batch()))
    assert report.exact, str(report)


def test_two_samples() -> None:
    x, y = flat_batch()
    report = check(supervised(mlp(), (x[:2], y[:2])), microbatch_size=1)
    assert report.exact
    assert report.notes == ("only 2 samples: values were not compared between modules",)


def test_a_gradient_that_is_nan_is_never_exact() -> None:
    parameters = (ParameterDifference("a", 1.0, 0.0, 0.0), ParameterDifference("b", 1.0, math.nan, math.nan))
    for order in (parameters, parameters[::-1]):
        comparison = GradientComparison("float64", "batch", (1, 1), (2,), 0.0, 0.0, order, 1e-12)
        assert math.isnan(comparison.largest)
        assert not comparison.exact


# -- wrong input ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"microbatch_size": 12}, InputError, "the batch is one micro-batch, so there is nothing to compare"),
        ({"microbatch_size": 0}, InputError, "microbatch_size"),
        ({"microbatch_size": "4"}, InputError, "microbatch_size"),
        ({"reduction": "average"}, InputError, "reduction='average' is not a reduction"),
        ({"weight": 3}, InputError, "weight=3 is not a weight of a micro-batch"),
        ({"weight": lambda b: -1}, InputError, "is negative or not finite"),
        ({"weight": "returned"}, InputError, "Return .loss, weight."),
        ({"against": "full"}, InputError, "against='full'"),
        ({"dtype": "float16"}, InputError, "dtype='float16'"),
        ({"tolerance": -1}, InputError, "tolerance=-1"),
        ({"tolerance": None}, InputError, "tolerance=None"),
        (
            {"participants": PerSampleRandom()},
            InputError,
            r"is not a list\. Pass participants=\[PerSampleRandom",
        ),
        ({"split": "2"}, InputError, "split='2' is not a Split"),
        ({"split": Split(unsplit=("2",))}, InputError, "path '2'"),
    ],
)
def test_wrong_options(options: dict[str, Any], error: type[Exception], match: str) -> None:
    problem = EXACT[0].make()
    before = snapshot(problem.model)
    with pytest.raises(error, match=match):
        check(problem, **options)
    assert_same(before, snapshot(problem.model))


def test_wrong_model_loss_and_batch() -> None:
    problem = EXACT[0].make()
    with pytest.raises(InputError, match="model is of type function, not a torch module"):
        verify(problem.loss_fn, problem.loss_fn, problem.batch, microbatch_size=4)  # pyright: ignore[reportArgumentType] - the point
    with pytest.raises(InputError, match="loss_fn=3"):
        verify(problem.model, 3, problem.batch, microbatch_size=4)  # pyright: ignore[reportArgumentType] - the point
    with pytest.raises(InputError, match=r"loss_fn returned a tensor of shape \(12, 4\)"):
        verify(problem.model, lambda b: problem.model(b[0]), problem.batch, microbatch_size=4)
    with pytest.raises(InputError, match="The loss is a float, not a tensor"):
        verify(problem.model, lambda b: 1.0, problem.batch, microbatch_size=4)
    with pytest.raises(SplitError):
        verify(problem.model, problem.loss_fn, (torch.ones(3, 6), torch.ones(4)), microbatch_size=2)
    with pytest.raises(InputError, match="The Sequential has no parameter with requires_grad=True"):
        verify(
            problem.model.requires_grad_(requires_grad=False),
            problem.loss_fn,
            problem.batch,
            microbatch_size=4,
        )


def test_a_non_finite_loss_raises() -> None:
    model = mlp()
    with pytest.raises(NonFiniteError):
        check(Problem(model, lambda b: model(b[0]).sum() * math.inf, flat_batch()))
