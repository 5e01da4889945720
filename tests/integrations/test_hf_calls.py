"""Side effects of a user's loss in its Trainer: one entry per micro-batch, none from a check."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed: pip install superbatch[hf]")
pytest.importorskip("accelerate", reason="accelerate is not installed: pip install superbatch[hf]")

from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Trainer, TrainingArguments

from superbatch.integrations import hf_calls
from superbatch.integrations.hf import Exact
from tests.integrations.hf_cases import CASES, rows, train

pytestmark = pytest.mark.integrations


class _Meter:
    def __init__(self) -> None:
        self.total, self.count = 0.0, 0

    def add(self, value: float) -> None:
        self.total, self.count = self.total + value, self.count + 1


class _Noting(Trainer):
    """Trainer that records its losses in several usual ways."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        self.losses, self.latest, self.meter = list[float](), deque[float](maxlen=3), _Meter()
        self.metrics: defaultdict[str, list[float]] = defaultdict(list)
        self.seen, self.calls, self.average = Counter[str](), 0, torch.zeros((), dtype=torch.float64)
        self.moments = nn.BatchNorm1d(3, affine=False).double()

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **given: Any) -> Any:
        outputs = model(**inputs)
        loss = float(outputs.loss.detach())
        self.losses.append(loss)
        self.latest.append(loss)
        self.metrics["loss"].append(loss)
        self.seen["samples"] += len(inputs["labels"])
        self.meter.add(loss)
        self.calls += 1
        self.average.mul_(0.5).add_(loss)
        self.moments(outputs.logits.detach().repeat(2, 1))
        self.log({"own": loss})
        return (outputs.loss, outputs) if return_outputs else outputs.loss


class _ExactNoting(Exact, _Noting):
    microbatch_size = 3


def _noted(kind: type[Trainer], size: int, steps: int, folder: Path) -> Any:
    case = CASES["classes"]
    return train(kind, case, size, steps, folder, data=rows(case, 16), optim="sgd").trainer


@pytest.mark.parametrize(("size", "steps", "microbatches"), [(2, 4, 8), (8, 1, 6)])
def test_a_check_leaves_nothing_in_the_trainer(
    size: int, steps: int, microbatches: int, tmp_path: Path
) -> None:
    found = _noted(_ExactNoting, size, steps, tmp_path)

    logged = [entry["own"] for entry in found.state.log_history if "own" in entry]
    assert len(found.losses) == len(logged) == found.calls == found.meter.count == microbatches
    assert found.losses == logged == found.metrics["loss"]
    assert list(found.latest) == found.losses[-3:]
    assert found.seen == {"samples": 16}
    assert found.meter.total == pytest.approx(sum(found.losses))
    assert float(found.average) == pytest.approx(
        sum(loss * 0.5**late for late, loss in enumerate(reversed(found.losses)))
    )
    assert int(found.moments.num_batches_tracked) == microbatches


class _Copies(TorchDispatchMode):
    """Count the bytes of copied tensors."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.clone.default, torch.ops.aten.copy_.default):
            self.count += args[-1].nbytes
        return func(*args, **(kwargs or {}))


class _Queue:
    """Model with a queue of embeddings of earlier samples, as in MoCo."""

    def __init__(self) -> None:
        self.rows, self.place = torch.arange(2.0**20).reshape(-1, 256), 0


@pytest.mark.parametrize(("kind", "copied"), [("read", 0), ("written", 2), ("rebound", 0)])
def test_a_large_queue_is_copied_only_if_it_is_written(kind: str, copied: int, tmp_path: Path) -> None:
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
    trainer: Any = Trainer(nn.Linear(2, 2), arguments)
    trainer.queue = queue = _Queue()
    rows, before = queue.rows, queue.rows.clone()
    calls, copies = hf_calls.LossCalls(), _Copies()

    with copies, calls.one_of(trainer):
        assert calls.is_trial
        queue.place += 1
        if kind == "written":
            queue.rows[queue.place].data.zero_()
            torch._foreach_add_([queue.rows], 1.0)
        elif kind == "rebound":
            queue.rows = queue.rows.roll(1, 0)
        else:
            assert float(queue.rows.sum()) > 0

    assert queue.rows is rows
    assert torch.equal(rows, before)
    assert queue.place == 0
    assert copied * rows.nbytes <= copies.count < copied * rows.nbytes + 10_000  # saved and restored


def test_premise_a_check_calls_the_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf_calls, "_untouched", lambda trainer: nullcontext())

    assert _noted(_Noting, 2, 4, tmp_path).calls == 8
    assert _noted(_ExactNoting, 2, 4, tmp_path).calls > 16
