"""Coupling points in the report of a virtual batch."""

import pytest
import torch
from torch import nn

from superbatch.torch import virtual_batch
from tests.torch.coupled.cases import CASES


def test_a_layer_that_is_called_twice_is_reported_twice():
    # The second call reads the running statistics of the first before the first is computed.
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh()).double()
    first, second = torch.randn(10, 3).double(), torch.randn(10, 3).double()
    with virtual_batch(model, 4) as batch:
        (model(batch(first)) * model(batch(second))).sum().backward()
    points = [(point.module, point.operation, point.kind, point.kept) for point in batch.report().points]
    assert points == [("1", "batch_norm", "statistic", 10 * 4 * 8)] * 2


@pytest.mark.parametrize(
    ("name", "operation", "kept", "backward_points"),
    [
        # Its backward has known operators and reads the input again.
        ("custom operator", "superbatch_test_cases.bent.default", 14 * 8 * 8, 0),
        # Its backward calls the operator itself.
        ("custom operator over the batch", "superbatch_test_cases.centred.default", 0, 1),
    ],
)
def test_a_custom_operator_is_reported_with_its_gathered_bytes(
    name: str, operation: str, kept: int, backward_points: int
):
    case = CASES[name]
    model, batch = case.make(), case.batch()
    with virtual_batch(model, case.microbatch) as virtual:
        case.loss(model, virtual(batch)).backward()
    report = virtual.report()
    found = [(point.operation, point.kind, point.gathered, point.kept) for point in report.points]
    assert found == [(operation, "unknown", 14 * 8 * 8, kept)], "14 samples of 8 features in float64"
    assert report.backward_points == backward_points
    assert f"{operation} (gathered: superbatch has no rule for the operator" in str(report)
    assert "896 B gathered" in str(report)
