"""Random numbers: streams per sample, recomputation, and discarded windows."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from superbatch.torch import Accumulator
from superbatch.torch.options import GhostBatchNorm, PerSampleRandom
from superbatch.torch.rng.sample_layout import samples_along
from superbatch.torch.rng.sample_rng import sample_stream
from tests.gpu import tasks
from tests.gpu.check import Figures, Run


class Noisy(nn.Module):
    """Dropout with samples in dimension 1, recomputed in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)

    def _block(self, x: Tensor) -> Tensor:
        hidden = self.first(x).transpose(0, 1)  # (positions, samples, features)
        with samples_along(1):
            hidden = nn.functional.dropout(hidden, 0.4)
        return self.second(hidden.transpose(0, 1)).mean(1)

    def forward(self, x: Tensor) -> Tensor:
        found = checkpoint(self._block, x, use_reentrant=False)
        assert isinstance(found, Tensor)
        return found


def _gradients(model: nn.Module, x: Tensor, y: Tensor, size: int) -> dict[str, Tensor]:
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: dict[str, Tensor] = {}
    optimizer.register_step_pre_hook(lambda *_: seen.update(tasks.gradients_of(model)))
    torch.manual_seed(3)
    accumulate = Accumulator(
        model,
        optimizer,
        lambda part: nn.functional.mse_loss(model(part["x"]), part["y"]),
        microbatch_size=size,
        participants=[PerSampleRandom()],
    )
    accumulate({"x": x, "y": y})
    return seen


def checkpointed_streams(run: Run) -> Figures:
    """`sample_rng` under checkpointing gives the same gradient for every split, on device and CPU."""
    torch.manual_seed(0)
    model = Noisy().double()
    x, y = torch.randn(12, 5, 6).double(), torch.randn(12, 3).double()
    on_cpu = _gradients(model, x, y, 12)
    there = copy.deepcopy(model).to(run.device)
    figures: Figures = {}
    for size in (1, 5, 12):
        found = _gradients(there, x, y, size)
        figures[f"m={size} against the CPU"] = tasks.assert_exact(found, on_cpu, 1e-12, size)
    return figures


def same_masks(run: Run) -> Figures:
    """A sample's stream draws the same mask on the device as on the CPU."""
    drawn = []
    for device in (torch.device("cpu"), run.device):
        with sample_stream(7, 0, 6):
            drawn.append(nn.functional.dropout(torch.ones(6, 50, device=device), 0.5).cpu())
    assert torch.equal(*drawn), "the masks differ"
    assert 0 < int((drawn[0] == 0).sum()) < 300, "premise: something is dropped"
    return {"dropped": int((drawn[0] == 0).sum())}


def discarded_window(run: Run) -> Figures:
    """A failed window leaves parameters, buffers and generators of all devices unchanged."""
    task = tasks.batchnorm(run.device, torch.float32)
    model = nn.Sequential(task.model, nn.Dropout(0.5))
    optimizer = torch.optim.Adam(model.parameters())
    calls = 0

    def loss_fn(part: tasks.Batch) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyError("on purpose")
        return task.loss(model, part)

    def state() -> list[Tensor]:
        generators = [torch.get_rng_state()]
        if run.device.type == "cuda":
            generators += torch.cuda.get_rng_state_all()
        return [*(value.clone() for value in model.state_dict().values()), *generators]

    accumulate = Accumulator(
        model, optimizer, loss_fn, microbatch_size=5, participants=[GhostBatchNorm()], check=False
    )
    before = state()
    failed = False
    try:
        accumulate(task.batch)
    except KeyError:
        failed = True
    assert failed, "premise: the third micro-batch fails"
    assert all(torch.equal(a, b) for a, b in zip(before, state(), strict=True))
    return {"tensors compared": len(before)}
