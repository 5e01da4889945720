"""Four devices: rows of strided micro-batches stay on their device, with one reduction per update."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("jax", reason="jax is not installed (extra: jax)")
pytest.importorskip("optax", reason="optax is not installed (extra: jax)")
pytestmark = pytest.mark.jax
ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: str) -> Any:
    """Run in a child process, because the number of devices must be set before JAX starts."""
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "tests.jax.sharded", *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def found() -> Any:
    answer = run()
    assert answer["devices"] == 4, "the premise"
    return answer


def test_a_strided_split_keeps_rows_on_their_device(found: Any) -> None:
    strided, contiguous = found["strided"], found["contiguous"]
    assert contiguous["all-gather"] > 0, "the premise: XLA gathers contiguous micro-batches"
    assert strided["all-gather"] == strided["all-to-all"] == strided["collective-permute"] == 0
    assert strided["flops"] < 0.5 * contiguous["flops"]
    assert max(strided["error"], contiguous["error"]) < 1e-12


@pytest.mark.parametrize("check_vma", [True, False])
def test_one_reduction_per_update(found: Any, check_vma: bool) -> None:
    one = found[f"shard_map, check_vma={check_vma}"]
    assert one["all-reduce"] == 1 and one["all-reduces in a loop"] == 0
    assert one["all-gather"] == one["all-to-all"] == one["collective-permute"] == 0
    assert one["error"] < 1e-12
    assert one["microbatches"] == 4 * 6, "five of three rows and a tail of one on each device"
    assert one["weight"] == 64


def test_a_loss_that_averages_over_devices_itself_is_wrong_unchecked(found: Any) -> None:
    """Premise of the error: the gradient of one device of four."""
    assert abs(found["the loss averages over devices, unchecked"] - 0.75) < 1e-12


def test_samples_are_clipped_before_the_sum_over_devices(found: Any) -> None:
    assert max(found["clipped"]) < 1e-12
    assert found["devices are added before the clip"] > 0.1, (
        "the mutant: parameters replicated on all devices"
    )


def test_a_batch_sharded_over_an_explicit_mesh(found: Any) -> None:
    assert max(found["explicit mesh"]) < 1e-12


def test_a_reduction_in_every_microbatch_would_be_found() -> None:
    wrong = run("mutant")["shard_map, check_vma=True"]
    assert wrong["all-reduces in a loop"] > 0 or wrong["all-reduce"] > 1
