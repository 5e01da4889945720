"""The sum of a frame has the same bits on all ranks, and shows whether it still waits for a rank."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.forked import run

PROGRAM = """
import json, os, sys, time
import torch, torch.distributed as dist
from superbatch.torch.window.sync.frame_sum import FrameSum

folder, rank, ranks = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
numbers = torch.randn(43, dtype=torch.float64, generator=torch.Generator().manual_seed(rank)).exp()
if rank:
    time.sleep(0.5)
total = FrameSum(numbers, None)
waits = not total.is_completed()
found = total.numbers()
reduced = numbers.clone()
dist.all_reduce(reduced)
with open(f"{folder}/{rank}.json", "w") as file:
    json.dump({"found": found, "reduced": reduced.tolist(), "waits": waits}, file)
dist.barrier()
os._exit(0)
"""


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_sums_are_the_same_on_each_rank(ranks: int, tmp_path: Path) -> None:
    with ThreadPoolExecutor(ranks) as pool:
        ended = list(pool.map(lambda rank: run(["-c", PROGRAM, tmp_path, rank, ranks]), range(ranks)))
    assert [each.returncode for each in ended] == [0] * ranks, [each.stderr for each in ended]
    results = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(ranks)]
    assert all(each["found"] == results[0]["found"] for each in results), "bit for bit"
    assert results[0]["found"] == pytest.approx(results[0]["reduced"], rel=1e-14)
    assert ranks == 1 or results[0]["waits"], "premise: rank 0 starts first"
