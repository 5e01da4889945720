"""The benchmark of coupled samples as a program, on tiny batches."""

import importlib.util
import json

import pytest

from tests import forked
from tests.benchmarks.test_benchmarks import BENCHMARKS, run

pytestmark = pytest.mark.benchmarks


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    folder = tmp_path_factory.mktemp("coupled")
    path, plot = folder / "rows.json", folder / "plot.png"
    drawn = ["--plot", str(plot)] if importlib.util.find_spec("matplotlib") else []
    result = run("coupled.py", "--quick", "--work", "convnet,views,towers", "--json", str(path), *drawn)
    assert result.returncode == 0, result.stdout + result.stderr
    rows = json.loads(path.read_text())["tables"]
    picture = plot.read_bytes() if drawn else b""
    return {(row["work"], row["way"]): row for row in rows}, result.stdout, picture


@pytest.mark.parametrize("work", ["convnet", "views", "towers"])
def test_superbatch_gives_the_gradient_of_the_batch_unlike_plain_accumulation(measured, work):
    rows, _, _ = measured
    assert rows[work, "accumulation"]["float64"] > 1e-2, "the premise: samples are coupled"
    assert rows[work, "virtual"]["float64"] <= 1e-12
    assert rows[work, "virtual-host"]["float64"] <= 1e-12
    assert rows[work, "virtual-auto"]["float64"] <= 1e-12
    assert rows[work, "virtual-auto"]["report"]["microbatches"] == 1, "it fits"
    assert rows[work, "checkpoint"]["float64"] <= 1e-12
    assert rows[work, "full"]["float64"] == 0


def test_cached_gradients_are_used_where_they_are_exact(measured):
    rows, _, _ = measured
    assert rows["towers", "gradcache"]["float64"] <= 1e-12
    assert rows["towers", "cached"]["float64"] <= 1e-12
    assert rows["views", "gradcache"]["float64"] > 1e-2, "BatchNorm sees micro-batches"
    assert ("views", "cached") not in rows, "cached gradients are refused"
    assert ("convnet", "gradcache") not in rows


def test_memory_is_counted_by_place(measured):
    rows, _, _ = measured
    for work in ("convnet", "views"):
        full, offload = rows[work, "full"], rows[work, "offload"]
        device, host = rows[work, "virtual"], rows[work, "virtual-host"]
        assert full["host"] == device["host"] == 0
        assert offload["device"] < full["device"]
        assert offload["host"] > 0
        assert host["host"] == pytest.approx(host["report"]["kept_on_host"], rel=0.02)
        assert host["device"] < rows[work, "accumulation"]["device"]
        assert device["device"] > host["device"]


PEAKS = """
import sys
sys.path.insert(0, sys.argv[1])
import torch
from coupled_memory import measure
from coupled_ways import WAYS
from coupled_work import works
torch.set_num_threads(1)
work, size = works()[sys.argv[2]], int(sys.argv[3])
model = work.build()
for samples in map(int, sys.argv[4:]):
    batch = work.batch(samples)
    for way in (way for way in WAYS if way.name in ("accumulation", "virtual-host")):
        model.zero_grad()
        print(samples, way.name, *measure(lambda: way.run(work, model, batch, size)))
"""


# The towers' loss has an N x N matrix on the host, with which 0.9 MB on the device become 1.0 MB. For the
# other works no byte may be added, so fewer samples suffice.
@pytest.mark.parametrize("many", [512, pytest.param(1024, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("work", "size", "grows"), [("convnet", 1, 1.0), ("towers", 1, 1.15), ("views", 4, 1.0)]
)
def test_micro_batches_of_one_need_no_more_device_memory_than_plain_accumulation(work, size, grows, many):
    """Memory per micro-batch, or for all samples, weighs most with the smallest micro-batches."""
    few = many // 4
    done = forked.run(["-c", PEAKS, BENCHMARKS, work, size, few, many])
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines()]
    device, host = ({(int(row[0]), row[1]): int(row[place]) for row in rows} for place in (2, 3))
    assert len(rows) == 4 and host[many, "accumulation"] == 0
    assert host[many, "virtual-host"] > 3.9 * host[few, "virtual-host"] > 0, (
        "premise: superbatch stores values on the host"
    )
    for samples in (few, many):
        assert device[samples, "virtual-host"] <= 1.1 * device[samples, "accumulation"]
    assert device[few, "accumulation"] == device[many, "accumulation"], "premise: its peak is constant"
    assert device[many, "virtual-host"] <= grows * device[few, "virtual-host"], (
        "superbatch's peak is constant too"
    )


def test_overhead_is_relative_and_the_table_is_complete(measured):
    rows, out, _ = measured
    for (_, way), row in rows.items():
        assert (row["overhead"] is not None) == way.startswith("virtual")
        if row["overhead"]:
            assert 0 < row["overhead"]["rest"] < 1
            assert sum(row["overhead"].values()) == pytest.approx(1)
    assert "plain accumulation (inexact)" in out
    assert "virtual_batch, kept on the host" in out


def test_memory_and_time_are_drawn_against_the_size_of_the_batch(measured):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed (extra: plot)")
    assert measured[2][1:4] == b"PNG"


def test_an_unknown_work_is_refused_with_the_known_ones():
    result = run("coupled.py", "--work", "resnet")
    assert result.returncode == 2
    words = "--work 'resnet' has an unknown name. Pass some of resnet20, convnet, views, towers"
    assert words in result.stderr


@pytest.mark.slow
def test_compilation_is_measured():
    result = run("coupled_compile.py", "--quick", "--errors")
    assert result.returncode == 0, result.stdout + result.stderr
    row = result.stdout.split("\n")[0].split(" | ")
    assert row[0] == "convnet"
    assert int(row[5]) > 0, "the premise: something is compiled"
    assert int(row[6]) == 0, "no later update compiles"
    assert float(row[8].split()[3]) <= 1e-12


def test_rounding_is_compared_draw_by_draw(tmp_path):
    path = tmp_path / "errors.json"
    options = (
        "--work",
        "convnet,views",
        "--samples",
        "16",
        "--sizes",
        "1,5",
        "--draws",
        "3",
        "--json",
        str(path),
    )
    result = run("coupled_rounding.py", *options)
    assert result.returncode == 0, result.stdout + result.stderr
    rows = json.loads(path.read_text())
    assert [(row["work"], row["size"]) for row in rows] == [
        (work, size) for work in ("convnet", "views") for size in (None, 1, 5)
    ]
    for row in rows:
        assert len(set(row["float32"])) == 3, "each draw is another batch"
        assert all(0 < each < 1e-2 for each in row["float32"])
    assert result.stdout.count("virtual_batch, m = 5") == 2


def test_rounding_refuses_unknown_names():
    result = run("coupled_rounding.py", "--work", "elephants")
    assert result.returncode == 2 and "--work elephants is unknown. Pass some of" in result.stderr
