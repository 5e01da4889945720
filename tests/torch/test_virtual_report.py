"""What `report()` of a virtual batch says of the points where samples met."""

import torch
from torch import nn

from superbatch.torch import virtual_batch


def test_a_layer_that_is_called_twice_is_reported_twice():
    # The second call reads the running statistics of the first, before its samples are asked for.
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh()).double()
    first, second = torch.randn(10, 3).double(), torch.randn(10, 3).double()
    with virtual_batch(model, 4) as batch:
        (model(batch(first)) * model(batch(second))).sum().backward()
    points = [(point.module, point.operation, point.kind, point.kept) for point in batch.report().points]
    assert points == [("1", "batch_norm", "statistic", 10 * 4 * 8)] * 2
