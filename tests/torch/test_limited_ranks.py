"""``"auto"`` on two gloo ranks, one of which has a real memory limit."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from tests.torch import limited_ranks as ranks
from tests.torch.two_ranks import found_by_both


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_AS limits memory on Linux only")
def test_the_rank_with_less_memory_decides(tmp_path: Path) -> None:
    found = found_by_both("tests.torch.limited_ranks", tmp_path)
    model = ranks.net()
    start = {name: each.detach().clone() for name, each in model.named_parameters()}
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=1.0), []
    for update in range(2):
        optimizer.zero_grad()
        loss = torch.zeros(())
        for microbatch in torch.cat([ranks.rows(0, update), ranks.rows(1, update)]).split(16):
            share = ranks.error_of(model, microbatch) * 16 / (2 * ranks.SAMPLES)
            share.backward()
            loss = loss + share.detach()
        optimizer.step()
        losses.append(float(loss))
    for how in ("DDP", "FSDP2"):
        for each in found:
            assert each[how]["losses"] == pytest.approx(losses, rel=1e-12)
            for name, value in model.named_parameters():
                change = (value - start[name]).norm()
                assert change, "premise"
                assert (each[how]["parameters"][name] - value).norm() <= 1e-12 * change
        much, little = (each[how]["microbatches"] for each in found)
        assert min(little) > 4, "premise: rank 1 has too little memory for the whole batch"
        if how == "FSDP2":
            assert much == little
