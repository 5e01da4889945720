"""A memory report as text and as JSON."""

from __future__ import annotations

from dataclasses import replace

from superbatch.lab.report.json import to_json
from superbatch.results.memory import Limit, Measured, MemoryReport, Peak, Saving
from tests.report_json import from_json

MIB = 2**20
PEAK = Peak(
    samples=8,
    bytes=30 * MIB,
    phase="backward",
    first=18 * MIB,
    forward=15 * MIB,
    backward=20 * MIB,
    optimizer=25 * MIB,
    gradients=5 * MIB,
    optimizer_state=10 * MIB,
    activations=10 * MIB,
)
REPORT = MemoryReport(
    device="cpu",
    how="fake tensors",
    predicted=(PEAK, replace(PEAK, samples=16, bytes=40 * MIB)),
    error=0.012,
    measured=(Measured(8, 31 * MIB), Measured(12, 36 * MIB)),
    limit=Limit(50 * MIB, "RLIMIT_AS of 1.00 GiB"),
    largest=24,
    chosen=12,
    why="the fastest that fits",
    savings=(Saving("gradient checkpoints", 12 * MIB, "torch.utils.checkpoint"),),
)


def test_json_round_trip() -> None:
    assert from_json(MemoryReport, to_json(REPORT)) == REPORT


def test_text_marks_each_size_as_predicted_or_measured() -> None:
    rows = [line.split() for line in REPORT.lines() if line[:1].isdigit()]
    assert rows == [
        ["8", "30.0", "MiB", "backward", "31.0", "MiB"],
        ["12", "–", "–", "36.0", "MiB"],
        ["16", "40.0", "MiB", "backward", "–"],
    ]
    text = str(REPORT)
    assert "within 1.2% between these sizes" in text
    assert "50.0 MiB (RLIMIT_AS of 1.00 GiB)" in text
    assert "gradient checkpoints  12.0 MiB  torch.utils.checkpoint" in text
