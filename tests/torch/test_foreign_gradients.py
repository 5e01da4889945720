"""A gradient that other code changes inside a window raises an error that names its parameter."""

import pytest
import torch
from torch import nn

from superbatch.errors import WindowError
from superbatch.torch import Accumulator

CHANGES = {
    "another tensor of the same values": lambda p: setattr(p, "grad", p.grad.clone()),
    "set to None": lambda p: setattr(p, "grad", None),
    "written in place": lambda p: p.grad.mul_(2),
    "added to by another backward": lambda p: p.sum().backward(),
}


@pytest.mark.parametrize("name", ["0.weight", "2.bias"])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("after", [0, 2])
def test_a_changed_gradient_is_named_and_nothing_is_updated(change, name, after):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 1))
    accumulate = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), microbatch_size=2)
    before = {key: value.clone() for key, value in model.state_dict().items()}

    def train() -> None:
        with accumulate.window(torch.randn(6, 3)) as window:
            for index, microbatch in enumerate(window):
                window.backward(model(microbatch).square().mean())
                if index == after:  # found before the next backward, or at the end of the window
                    change(model.get_parameter(name))

    with pytest.raises(WindowError, match=f"The gradient of '{name}' was changed inside a window"):
        train()
    assert accumulate.updates == 0
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("names", [["0.weight"], ["0.weight", "0.bias", "2.weight", "2.bias"]])
def test_a_gradient_removed_during_one_backward_is_named(names):
    """The restored gradient is the same tensor, but the gradient of that micro-batch is missing."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 1))
    accumulate = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), microbatch_size=2)
    taken = {}
    with accumulate.window(torch.randn(6, 3)) as first:  # a complete window before the tested one
        for microbatch in first:
            first.backward(model(microbatch).square().mean())

    def train() -> None:
        with accumulate.window(torch.randn(8, 3)) as window:
            for index, microbatch in enumerate(window):
                for name in names:
                    parameter = model.get_parameter(name)
                    if index == 1:
                        taken[name] = parameter.grad
                        parameter.grad = None
                    elif index == 2:
                        parameter.grad = taken[name]
                window.backward(model(microbatch).square().mean())

    with pytest.raises(WindowError, match=r"The gradient of '0\.weight' was changed inside a window"):
        train()
    assert accumulate.updates == 1


def test_a_gradient_assigned_to_an_unused_parameter_is_named():
    model = nn.Sequential(nn.Linear(3, 1), nn.Linear(3, 1))
    accumulate = Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1), microbatch_size=2)
    unused = model.get_parameter("1.weight")

    def train() -> None:
        with accumulate.window(torch.randn(4, 3)) as window:
            for microbatch in window:
                window.backward(model[0](microbatch).square().mean())
                assert unused.grad is None
                unused.grad = torch.zeros_like(unused)

    with pytest.raises(WindowError, match=r"The gradient of '1\.weight' was changed inside a window"):
        train()
