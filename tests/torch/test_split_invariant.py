"""`assert_split_invariant` and its pytest fixture: passes, failures and messages."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from superbatch import InputError, normalize
from superbatch.testing import assert_split_invariant
from superbatch.torch import count_tokens
from superbatch.torch.checks.probing import report
from superbatch.torch.checks.probing.diagnose import judge
from superbatch.torch.options import PerSampleRandom
from tests.torch.verify_cases import Problem, flat_batch, mlp, token_batch, token_mean

ROOT = Path(__file__).resolve().parents[2]
DEPENDS = "The gradient depends on the split"


def language() -> Problem:
    """Problem with a mean over ragged tokens."""
    model = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 4))
    return Problem(model, lambda batch: token_mean(model(batch["ids"]), batch["labels"]), token_batch())


def failure(loss_fn: Callable[[Any], Any], batch: Any, **options: Any) -> str:
    with pytest.raises(AssertionError) as raised:
        assert_split_invariant(loss_fn, batch, **options)
    return str(raised.value)


def test_a_loss_with_its_weight_passes_in_every_size() -> None:
    problem, seen = language(), set()

    def loss_fn(batch: dict[str, Tensor]) -> Tensor:
        seen.add(len(batch["ids"]))
        return problem.loss_fn(batch)

    before = torch.get_rng_state()
    assert_split_invariant(loss_fn, problem.batch, models=problem.model, weight=count_tokens("labels"))
    assert {1, 3, 6, 12} <= seen
    assert all(parameter.grad is None for parameter in problem.model.parameters())
    assert torch.equal(torch.get_rng_state(), before)


def test_the_failure_names_parameter_distance_cause_and_weight() -> None:
    problem = language()
    text = failure(problem.loss_fn, problem.batch, models=problem.model, sizes=[5])
    found = re.match(
        rf"{DEPENDS}\. With micro-batches of 5 samples, the gradient of '(\S+)' differs from the batch's by "
        r"(\S+) of its norm",
        text,
    )
    assert found is not None, text
    assert "cause: weight in loss_fn" in text
    assert 'Pass weight=count_tokens("labels").' in text
    # The distance is that of a mean of means from the batch, both by a plain backward in float64.
    model = problem.model.double()
    parameters = dict(model.named_parameters())
    real = torch.autograd.grad(problem.loss_fn(problem.batch), list(parameters.values()))
    microbatches = [
        {key: rows[at] for key, rows in problem.batch.items()} for at in torch.arange(12).split(4)
    ]
    each = [torch.autograd.grad(problem.loss_fn(mb), list(parameters.values())) for mb in microbatches]
    apart = {
        name: float((sum(grads) / 3 - of_batch).norm() / of_batch.norm())
        for name, of_batch, *grads in zip(parameters, real, *each, strict=True)
    }
    assert apart[found[1]] == pytest.approx(float(found[2]), rel=0.06)
    assert apart[found[1]] > 0.01, "premise"


def test_sizes_are_tried_from_the_largest_one() -> None:
    model = mlp()

    def single_samples(batch: Any) -> Tensor:  # like a squeeze() that also removes the batch
        return F.cross_entropy(model(batch[0]), batch[1]) * (2 if len(batch[0]) == 1 else 1)

    assert "micro-batches of 1 sample, the gradient" in failure(
        single_samples, flat_batch(), models=model, sizes=[1]
    )
    assert failure(single_samples, flat_batch(), models=model).startswith(DEPENDS)


def test_agreement_by_chance_is_a_failure() -> None:
    problem = language()
    problem.batch["labels"][:] = problem.batch["labels"][:6].repeat(2, 1)
    problem.batch["labels"][0, 3:] = -100
    problem.batch["labels"][6, 3:] = -100  # both halves have the same number of tokens
    counts = [int((half != -100).sum()) for half in problem.batch["labels"].split(6)]
    assert counts[0] == counts[1], "premise"
    text = failure(problem.loss_fn, problem.batch, models=problem.model, sizes=["half"])
    assert (
        "With micro-batches of 6 samples, the gradients agree, but the loss does not match its declaration"
        in text
    )
    assert "NOT exact in other splits: in this one" in text
    assert 'weight=count_tokens("labels")' in text


def test_dropout_passes_with_a_stream_for_each_sample() -> None:
    model = mlp(nn.Dropout(0.3))
    loss_fn = lambda batch: F.cross_entropy(model(batch[0]), batch[1])  # noqa: E731
    assert "cause: random in 1" in failure(loss_fn, flat_batch(), models=model, sizes=[3])
    assert_split_invariant(loss_fn, flat_batch(), models=model, sizes=[3], participants=[PerSampleRandom()])


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ([0], r"sizes contains 0\. Pass numbers of samples, 1 or more, or 'half'\."),
        (["third"], "sizes contains 'third'"),
        ([True], "sizes contains True"),
        ("half", "sizes='half' is a string, not a list of sizes"),
        ([12, 40], r"No size of sizes=\(12, 40\) is smaller than the batch of 12 samples\. Pass a larger"),
    ],
)
def test_sizes_that_cannot_be_used_are_named(sizes: Any, message: str) -> None:
    model = mlp()
    with pytest.raises(InputError, match=message):
        assert_split_invariant(lambda b: model(b[0]).mean(), flat_batch(), models=model, sizes=sizes)


def test_a_wrong_accumulation_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: a mean of means, whatever weight is declared."""
    problem = language()
    options: dict[str, Any] = {"models": problem.model, "weight": count_tokens("labels"), "sizes": [3]}
    assert_split_invariant(problem.loss_fn, problem.batch, **options)
    monkeypatch.setattr(normalize, "scale", lambda *_, **__: 1 / 4)
    assert DEPENDS in failure(problem.loss_fn, problem.batch, **options)


SUITE = """
import sys

def test_the_plugin_has_not_loaded_torch():
    assert "torch" not in sys.modules

def problem():
    import torch
    model = torch.nn.Linear(2, 1)
    return model, torch.randn(8, 2)

def test_a_mean(assert_split_invariant):
    model, batch = problem()
    assert_split_invariant(lambda x: model(x).square().mean(), batch, models=model)

def test_a_sum(assert_split_invariant):
    model, batch = problem()
    assert_split_invariant(lambda x: model(x).square().sum(), batch, models=model)
"""


def test_the_fixture_in_a_suite_with_warnings_as_errors(tmp_path: Path) -> None:
    (tmp_path / "test_suite.py").write_text(textwrap.dedent(SUITE), encoding="utf-8")
    plain = ["-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider", "-p", "superbatch.pytest_plugin"]
    done = subprocess.run(
        [sys.executable, *plain, "--rootdir", tmp_path, tmp_path],
        cwd=ROOT,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "1 failed, 2 passed" in done.stdout, done.stdout + done.stderr
    assert f"AssertionError: {DEPENDS}" in done.stdout
    assert 'pass reduction="sum"' in done.stdout
    assert "superbatch/testing.py" not in done.stdout, "the traceback shows the line of the test"


def test_causes_that_no_split_reveals_are_searched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    judged: list[int] = []

    def counting(setting: Any, size: int) -> Any:
        judged.append(size)
        return judge(setting, size)

    monkeypatch.setattr(report, "judge", counting)
    net = nn.Linear(3, 2)
    assert_split_invariant(lambda x: net(x).square().mean(), torch.randn(8, 3), models=net)

    assert judged == [4]
