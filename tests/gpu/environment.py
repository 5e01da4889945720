"""Versions, and ordinary tests with the device as torch's default."""

from __future__ import annotations

import importlib.util
import os
import platform
import subprocess
import sys
from pathlib import Path

import torch

from tests.gpu.check import Figures, Run, Skip

ROOT = Path(__file__).resolve().parents[2]
FILES = [
    "test_exactness.py",
    "test_optimizers.py",
    "test_precision.py",
    "test_nonfinite.py",
    "test_batchnorm.py",
]


def versions(run: Run) -> Figures:
    """Return the versions and settings that figures depend on."""
    figures: Figures = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": platform.processor() or "cpu",
    }
    if run.device.type == "cuda":
        properties = torch.cuda.get_device_properties(run.device)
        figures |= {
            "device": properties.name,
            "memory": properties.total_memory,
            "capability": f"{properties.major}.{properties.minor}",
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
        }
    return figures


def ordinary_tests(run: Run) -> Figures:
    """Run some of tests/torch with the device as default; report failures without failing.

    Many of these tests use a CPU generator on purpose, which raises on the device.
    """
    missing = [name for name in ("pytest", "hypothesis") if importlib.util.find_spec(name) is None]
    if missing:
        raise Skip(f"{' and '.join(missing)} not installed")
    files = [f"tests/torch/{name}" for name in (FILES[:1] if run.small else FILES)]
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-x" if run.small else "--continue-on-collection-errors",
            "-p",
            "tests.gpu.default_device",
            *files,
        ],
        cwd=ROOT,
        env={**os.environ, "SUPERBATCH_DEVICE": str(run.device)},
        capture_output=True,
        text=True,
        check=False,
    )
    lines = done.stdout.strip().splitlines()
    assert lines and ("passed" in lines[-1] or "failed" in lines[-1]), done.stdout[-500:] + done.stderr[-500:]
    return {"summary": lines[-1], "failed": [line for line in lines if line.startswith("FAILED")][:40]}
