"""Unsupported uses of a virtual batch raise at the line of the program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from superbatch import InputError, WindowError
from superbatch.torch import virtual_batch
from superbatch.torch.virtual.trace import unsupported


def ragged(layout: torch.layout = torch.jagged) -> Tensor:
    torch.manual_seed(0)
    return torch.nested.nested_tensor([torch.randn(rows, 3) for rows in (2, 4, 3)], layout=layout)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype:UserWarning")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
@pytest.mark.parametrize("inside", [lambda x: x, lambda x: {"x": x, "y": torch.ones(3)}, lambda x: [x]])
def test_a_nested_tensor_as_batch_raises(layout: torch.layout, inside: Callable[[Tensor], Any]) -> None:
    with (
        virtual_batch(nn.Linear(3, 3), 2) as batch,
        pytest.raises(InputError, match=r"^virtual_batch cannot take a nested tensor .*to_padded_tensor"),
    ):
        batch(inside(ragged(layout)))


@pytest.mark.parametrize(
    "make",
    [
        lambda h: torch.nested.nested_tensor_from_jagged(h, torch.tensor([0, 2, 6, 9])),
        lambda h: torch.nested.as_nested_tensor(h, layout=torch.jagged),
        lambda h: torch.nested.as_nested_tensor([h[:2], h[2:]], layout=torch.jagged),
        lambda h: torch.nested.nested_tensor([h[:2], h[2:]], layout=torch.jagged),
    ],
)
def test_a_jagged_tensor_made_of_the_batch_raises(make: Callable[[Any], Any]) -> None:
    model = nn.Linear(3, 3)
    with virtual_batch(model, 2) as batch:
        h = model(batch(torch.randn(9, 3)))
        with pytest.raises(WindowError, match=r"^A nested tensor .* Use a padded tensor and a mask"):
            make(h)
        h.sum().backward()  # the block continues
    assert model.weight.grad is not None


def test_a_jagged_tensor_outside_the_batch_works() -> None:
    model, nested = nn.Linear(3, 3), ragged()
    with virtual_batch(model, 2) as batch:
        with torch.no_grad():  # for example a metric
            other = model(nested).values().sum()
        loss = other + model(batch(torch.ones(3, 3))).sum()
        loss.backward()
    expected = model(nested).values().sum() + model(torch.ones(3, 3)).sum()
    torch.testing.assert_close(loss.detach().clone(), expected.detach())


class Center(nn.Module):
    """Center of DINO's teacher: a moving mean, assigned to `.data` as in some libraries."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("value", torch.zeros(1, 3, dtype=torch.float64))
        self.value: Tensor

    def forward(self, out: Tensor) -> Tensor:
        loss = (out - self.value).square().mean()
        self.move(0.9 * self.value + 0.1 * out.detach().mean(0, keepdim=True))
        return loss

    def move(self, value: Tensor) -> None:
        self.value.data = value


class CopiedCenter(Center):
    """Center that is written as the error advises."""

    def move(self, value: Tensor) -> None:
        with torch.no_grad():
            self.value.copy_(value)


TEXT = (
    r"^The \.data of a real tensor of shape \(1, 3\) was set to a virtual tensor, which has no memory\. "
    r"Write the numbers into it: .*"
    r"real\.copy_\(numbers\)\.$"
)


def start(center: type[Center]) -> tuple[nn.Sequential, Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3).double(), center()), torch.randn(6, 3, dtype=torch.float64)


def assert_raises_at_the_line() -> None:
    model, x = start(Center)
    reached: list[str] = []
    with virtual_batch(model, 2) as batch:
        try:
            model(batch(x))
        except WindowError:
            reached.append("refused")
        assert reached == ["refused"], "no error was raised"
        center = model[1]
        assert isinstance(center, Center)
        assert torch.equal(center.value, torch.zeros(1, 3, dtype=torch.float64)), "the buffer is unchanged"


def test_assigning_a_virtual_tensor_to_data_of_a_buffer_raises_at_that_line() -> None:
    model, x = start(Center)
    with virtual_batch(model, 2) as batch, pytest.raises(WindowError, match=TEXT) as raised:
        model(batch(x))
    assert "move" in [entry.name for entry in raised.traceback]
    assert_raises_at_the_line()


def test_a_real_tensor_may_be_assigned_to_data() -> None:
    model, x = start(Center)
    center = model[1]
    assert isinstance(center, Center)
    with virtual_batch(model, 2) as batch:
        batch(x)
        center.value.data = torch.ones(1, 3, dtype=torch.float64)
    assert torch.equal(center.value, torch.ones(1, 3, dtype=torch.float64))


def test_the_advice_of_the_error_gives_the_real_batch() -> None:
    ours, x = start(CopiedCenter)
    real, _ = start(CopiedCenter)
    for _ in range(3):
        with virtual_batch(ours, 2) as batch:
            ours(batch(x)).backward()
        real(x).backward()
    assert torch.as_tensor(real.state_dict()["1.value"]).norm() > 0, "premise"
    for (name, one), other in zip(ours.state_dict().items(), real.state_dict().values(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14, msg=name)
    for one, other in zip(ours.parameters(), real.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-12, atol=1e-14)


def test_mutant_without_the_check_of_data(monkeypatch: pytest.MonkeyPatch) -> None:
    def pass_on(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))

    monkeypatch.setattr(unsupported.RefuseVirtualData, "__torch_function__", pass_on)
    with pytest.raises((AssertionError, WindowError)):
        assert_raises_at_the_line()
