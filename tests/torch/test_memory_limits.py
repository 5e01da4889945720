"""Memory limits: control groups from files, RLIMIT_AS in child processes, and a fake torch.cuda."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

from superbatch.errors import InputError
from superbatch.torch.memory import limits
from superbatch.torch.memory.cgroups import cgroup_limits
from superbatch.torch.memory.limits import PeakMeter, memory_limit

MIB = 2**20
LINUX = sys.platform.startswith("linux")
needs_linux = pytest.mark.skipif(not LINUX, reason="reads /proc, which is Linux's")
CPU = torch.device("cpu")


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")


def test_cgroup_v2_with_a_limit_on_an_ancestor(tmp_path: Path) -> None:
    mount = tmp_path / "sys"
    write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/batch/job\n",
            "proc/self/mountinfo": f"31 23 0:28 / {mount} rw,relatime shared:9 - cgroup2 cgroup2 rw\n",
            "sys/batch/memory.max": f"{100 * MIB}\n",
            "sys/batch/memory.current": f"{90 * MIB}\n",
            "sys/batch/memory.stat": f"anon 5\ninactive_file {20 * MIB}\n",
            "sys/batch/job/memory.max": "max\n",
            "sys/batch/job/memory.current": f"{80 * MIB}\n",
        },
    )
    (limit,) = cgroup_limits(tmp_path / "proc")
    assert limit.bytes == 30 * MIB
    assert limit.by == "control group batch of 100 MiB"


def test_cgroup_v1_mounted_inside_a_container(tmp_path: Path) -> None:
    mount = tmp_path / "sys"
    write(
        tmp_path,
        {
            "proc/self/cgroup": "5:cpuset:/docker/abc\n4:cpu,memory:/docker/abc\n0::/\n",
            "proc/self/mountinfo": (
                f"32 31 0:29 / {tmp_path}/other rw - cgroup cgroup rw,cpuset\n"
                f"35 31 0:32 /docker/abc {mount} rw - cgroup cgroup rw,memory\n"
            ),
            "sys/memory.limit_in_bytes": f"{64 * MIB}\n",
            "sys/memory.usage_in_bytes": f"{60 * MIB}\n",
            "sys/memory.stat": f"inactive_file 1\ntotal_inactive_file {MIB}\n",
        },
    )
    (limit,) = cgroup_limits(tmp_path / "proc")
    assert limit.bytes == 5 * MIB


def test_a_cgroup_path_that_exists_only_on_the_host(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/host/only\n",
            "proc/self/mountinfo": f"31 23 0:28 / {tmp_path}/sys rw - cgroup2 cgroup2 rw\n",
            "sys/memory.max": f"{64 * MIB}\n",
            "sys/memory.current": "0\n",
        },
    )
    (limit,) = cgroup_limits(tmp_path / "proc")
    assert limit.bytes == 64 * MIB


def test_cgroup_v1_without_a_limit(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/\n",
            "proc/self/mountinfo": f"35 31 0:32 / {tmp_path}/sys rw - cgroup cgroup rw,memory\n",
            "sys/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/memory.usage_in_bytes": "1\n",
        },
    )
    assert list(cgroup_limits(tmp_path / "proc")) == []


@needs_linux
def test_the_smallest_limit_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    write(
        tmp_path,
        {
            "self/status": Path("/proc/self/status").read_text(encoding="utf-8"),
            "self/cgroup": "0::/\n",
            "self/mountinfo": f"31 23 0:28 / {tmp_path}/sys rw - cgroup2 cgroup2 rw\n",
            "meminfo": "MemTotal: 99999999 kB\nMemAvailable: 4096 kB\n",
            "sys/memory.max": f"{used + MIB}\n",
            "sys/memory.current": f"{used}\n",
        },
    )
    monkeypatch.setattr(limits, "_PROC", tmp_path)
    monkeypatch.setattr(limits, "free_in_heap", lambda: 7)
    assert memory_limit(CPU).bytes == MIB + 7
    assert "control group" in memory_limit(CPU).by
    (tmp_path / "sys/memory.max").write_text("max\n", encoding="ascii")
    assert memory_limit(CPU).bytes == 4 * MIB + 7
    assert "this machine" in memory_limit(CPU).by


def test_a_cgroup_over_its_limit_leaves_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(
        tmp_path,
        {
            "self/cgroup": "0::/\n",
            "self/mountinfo": f"31 23 0:28 / {tmp_path}/sys rw - cgroup2 cgroup2 rw\n",
            "sys/memory.max": f"{MIB}\n",
            "sys/memory.current": f"{2 * MIB}\n",
        },
    )
    monkeypatch.setattr(limits, "_PROC", tmp_path)
    monkeypatch.setattr(limits, "free_in_heap", lambda: 0)
    assert memory_limit(CPU).bytes == 0


def test_a_system_that_reports_no_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "_PROC", tmp_path)
    assert memory_limit(CPU).bytes == sys.maxsize
    assert memory_limit(CPU).by == "this system reports no limit"
    meter = PeakMeter(CPU)
    meter.start()
    assert meter.stop() is None


def child(code: str, *, mapped: bool = True) -> Any:
    """Run code in a new process and return the JSON it prints; `mapped` makes malloc unmap freed tensors."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if mapped:
        environment["MALLOC_MMAP_THRESHOLD_"] = "65536"
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@needs_linux
def test_rlimit_as_in_a_child_process() -> None:
    """The limit can be allocated, and 2 MiB more cannot."""
    found = child("""
        import json, resource, torch
        from superbatch.torch.memory.limits import free_in_heap, memory_limit
        cpu = torch.device("cpu")
        memory_limit(cpu)
        torch.empty(1 << 20, dtype=torch.uint8)
        size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + 200 * 2**20,) * 2)
        limit, free = memory_limit(cpu), free_in_heap()
        def fits(count):
            try:
                torch.empty(count, dtype=torch.uint8)
            except RuntimeError:
                return False
            return True
        both = fits(limit.bytes - 2**21), fits(limit.bytes + 2**21)
        print(json.dumps([limit.bytes, free, limit.by, *both]))
    """)
    size, free, by, fits, fits_more = found
    assert free < 4 * MIB, (
        "premise: little heap memory is free, which counts (the amount depends on the release)"
    )
    assert 190 * MIB < size < 200.5 * MIB + free
    assert by.startswith("RLIMIT_AS of")
    assert (fits, fits_more) == (True, False)


@needs_linux
def test_free_heap_memory_counts_in_the_limit_and_in_the_peak() -> None:
    """A heap full of holes holds a micro-batch without growing, yet the peak is reported."""
    if limits.free_in_heap() == 0:
        pytest.skip("this C library does not report free heap memory (glibc does since 2.33)")
    free, limit, peak = child(
        """
        import json, torch
        from superbatch.torch.memory.limits import PeakMeter, free_in_heap, memory_limit
        cpu = torch.device("cpu")
        def blocks(count):
            return [torch.ones(2**16, dtype=torch.uint8) for _ in range(count)]
        meter = PeakMeter(cpu)
        many, last = blocks(1024), blocks(1)  # the last one keeps the heap from shrinking
        del many
        free, limit = free_in_heap(), memory_limit(cpu)
        meter.start()
        found = blocks(512)
        print(json.dumps([free, limit.bytes, meter.stop()]))
        """,
        mapped=False,
    )
    assert free > 60 * MIB, "premise: there are holes"
    assert limit > free
    assert peak >= 32 * MIB


METERED = """
    import json, sys, torch
    from torch import nn
    from torch.nn import functional
    from superbatch.torch.memory.limits import PeakMeter
    from superbatch.torch.sizes.predict import predict_peak
    from tests.torch.sized_models import Transformer, convnet
    torch.set_num_threads(1)
    found = {}
    for name, model, inputs, labels in (
        ("convnet", convnet(), torch.randn(512, 3, 32, 32), torch.randint(10, (512,))),
        ("transformer", Transformer(), *torch.randint(1024, (2, 64, 64))),
    ):
        def loss_fn(batch):
            return functional.cross_entropy(model(batch[0]).flatten(0, -2), batch[1].flatten())
        def run(count):
            meter.start()
            loss_fn((inputs[:count], labels[:count])).backward()
            peak = meter.stop()
            model.zero_grad()
            return peak
        meter, found[name] = PeakMeter(torch.device("cpu")), []
        run(len(inputs) // 8)  # loads libraries at the first use
        for count in (len(inputs) // 4, len(inputs), len(inputs) // 2):
            batch = (inputs[:count], labels[:count])
            found[name].append((predict_peak(loss_fn, batch, models=model).first, run(count)))
    print(json.dumps(found))
"""


@needs_linux
def test_the_measured_peak_matches_the_prediction() -> None:
    """The margin covers workspaces of kernels and other allocations of the process."""
    found = child(METERED)
    for name, pairs in found.items():
        for predicted, measured in pairs:
            assert predicted > 10 * MIB, name
            assert 0.99 * predicted < measured < 1.02 * predicted + 6 * MIB, (name, pairs)


@needs_linux
def test_the_peak_of_a_process_that_was_larger_before() -> None:
    """The meter then uses the peak of resident memory, not that of the address space."""
    meter = PeakMeter(CPU)
    before = torch.ones(64 * MIB, dtype=torch.uint8)
    del before
    free = limits.free_in_heap()  # before the block, which may be taken from it
    meter.start()
    block = torch.ones(40 * MIB, dtype=torch.uint8)
    peak = meter.stop()
    assert peak is not None
    assert 39 * MIB < peak < 60 * MIB + free
    del block


@pytest.mark.parametrize("make", [memory_limit, PeakMeter])
def test_other_devices_are_refused(make: Any) -> None:
    with pytest.raises(InputError, match=r"device='meta'.*CPU and CUDA.*Pass microbatch_size= as an int"):
        make(torch.device("meta"))


class FakeCuda:
    """Fake torch.cuda: a device of 1000 bytes, 300 of them used by other processes.

    This process reserves 250 bytes and uses 200. `holes` of the other 50 are in partly used blocks.
    """

    def __init__(self, fraction: float, holes: int = 0) -> None:
        self.fraction, self.allocated, self.reserved, self.holes = fraction, 200, 250, holes

    def mem_get_info(self, _: torch.device) -> tuple[int, int]:
        return 700 - self.memory_reserved(_), 1000

    def memory_allocated(self, _: torch.device) -> int:
        return self.allocated

    def memory_reserved(self, _: torch.device) -> int:
        return self.reserved

    def memory_stats(self, _: torch.device) -> dict[str, int]:
        return {
            "allocated_bytes.all.current": self.allocated,
            "reserved_bytes.all.current": self.reserved,
            "inactive_split_bytes.all.current": self.holes,
        }

    def get_per_process_memory_fraction(self, _: torch.device) -> float:
        return self.fraction


@pytest.mark.parametrize(
    ("fraction", "holes", "size", "by"),
    [
        (1.0, 0, 500, "free memory"),  # 450 free, and 50 reserved but unused
        (1.0, 30, 470, "free memory"),
        (0.6, 0, 400, "fraction"),
        (0.6, 30, 370, "fraction"),
    ],
)
def test_the_limit_of_a_fake_cuda(
    fraction: float, holes: int, size: int, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "cuda", FakeCuda(fraction, holes))
    device = torch.device("cuda:0")
    assert memory_limit(device).bytes == size
    assert by in memory_limit(device).by


def test_the_cuda_meter_reads_reserved_memory_and_resets_no_statistic(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """FakeCuda has no function that resets a statistic, so that a call of one raises."""
    cuda = FakeCuda(1.0)
    monkeypatch.setattr(torch, "cuda", cuda)
    meter = PeakMeter(torch.device("cuda:0"))
    meter.start()
    cuda.reserved = 420  # some of them holes
    assert meter.stop() == 220
    meter.start()
    assert meter.stop() is None, "the peak is unknown within reserved memory"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda() -> None:
    device = torch.device("cuda:0")
    torch.cuda.empty_cache()
    meter, limit = PeakMeter(device), memory_limit(device)
    meter.start()
    block = torch.empty(64 * MIB, dtype=torch.uint8, device=device)
    peak = meter.stop()
    assert peak is not None and 64 * MIB <= peak < 96 * MIB
    assert limit.bytes - memory_limit(device).bytes >= 63 * MIB
    del block
