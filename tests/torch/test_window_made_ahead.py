"""Windows that are opened ahead, and entered after the program changed something."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from superbatch import NoiseMeter
from superbatch.errors import CoupledSamplesError, NonFiniteError, OptimizerError, WindowError
from superbatch.torch import Accumulator
from superbatch.torch.masters import MasterWeights, fp32_masters
from superbatch.torch.options import PerSampleRandom
from tests.torch.helpers import mlp, mse, rows, sgd

BATCH = rows(6)[0]


def run(window: Any, model: nn.Module, times: float = 1.0) -> Any:
    with window:
        for microbatch in window:
            window.backward(mse(model, microbatch) * times)
    return window.update


def parameters(model: nn.Module) -> list[Tensor]:
    return [each.detach().clone() for each in model.parameters()]


def test_weights_loaded_before_entering_reach_the_masters() -> None:
    def trained(*, ahead: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Linear(3, 1).bfloat16()
        masters = fp32_masters(model)
        optimizer = torch.optim.SGD(masters.values(), lr=0.1)
        accumulate = Accumulator(model, MasterWeights(optimizer, masters), microbatch_size=2, check=False)
        x = torch.randn(6, 3).bfloat16()
        window = accumulate.window(x) if ahead else None
        with torch.no_grad():
            for each in model.parameters():
                each.fill_(0.5)
        window = window or accumulate.window(x)
        with window:
            for microbatch in window:
                window.backward(model(microbatch).square().mean())
        return parameters(model)

    assert all(map(torch.equal, trained(ahead=False), trained(ahead=True)))


def test_parameters_frozen_before_entering_raise_and_change_nothing() -> None:
    model = mlp()
    accumulate = Accumulator(model, sgd(model.parameters()), microbatch_size=2, check=False)
    window = accumulate.window(BATCH)
    next(model.parameters()).requires_grad = False
    before = parameters(model)
    with pytest.raises(WindowError, match=r"added or converted after .* Call window\(batch\) again"):
        run(window, model)
    assert all(map(torch.equal, before, parameters(model)))
    assert run(accumulate.window(BATCH), model).made


def test_a_torn_update_before_entering_raises() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    accumulate = Accumulator(model, optimizer, microbatch_size=2, check=False)
    ahead, torn = accumulate.window(BATCH), accumulate.window(BATCH)

    def fail(*_: object) -> None:
        raise ValueError("a hook")

    handle = optimizer.register_step_post_hook(fail)
    with pytest.raises(OptimizerError, match="torn"):
        run(torn, model)
    handle.remove()
    with pytest.raises(OptimizerError, match="torn"):
        run(ahead, model)


def test_the_noise_is_that_of_the_entered_window() -> None:
    """The second window is one micro-batch, whose noise cannot be measured."""
    model, meter = mlp(), NoiseMeter(every=1, proxy=False)
    accumulate = Accumulator(
        model, sgd(model.parameters()), microbatch_size=2, observers=[meter], check=False
    )
    first, _ = accumulate.window(BATCH), accumulate.window(tuple(each[:2] for each in BATCH))
    run(first, model)
    assert meter.estimate().windows == 1


def test_a_window_cannot_be_entered_again_after_an_error() -> None:
    model = mlp()
    accumulate = Accumulator(model, sgd(model.parameters()), microbatch_size=2, check=False)
    window = accumulate.window(BATCH)
    with pytest.raises(NonFiniteError):
        run(window, model, float("nan"))
    with pytest.raises(WindowError, match="This window is over"):
        run(window, model)
    assert run(accumulate.window(BATCH), model).made


def test_a_second_loop_continues_after_the_first() -> None:
    """Each sample keeps its random numbers, whichever loop yields its micro-batch."""

    def trained(*, loops: int) -> tuple[list[Tensor], float]:
        torch.manual_seed(5)
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 1)).double()
        accumulate = Accumulator(
            model,
            sgd(model.parameters()),
            microbatch_size=2,
            participants=[PerSampleRandom()],
            check=False,
        )
        x = torch.randn(6, 4, dtype=torch.float64)
        with accumulate.window(x) as window:
            for _ in range(loops):
                for microbatch in window:
                    window.backward(model(microbatch).square().mean())
                    if loops > 1:
                        break
        assert window.update.made
        return parameters(model), float(torch.rand(()))

    (one, drawn), (three, again) = trained(loops=1), trained(loops=4)
    assert all(map(torch.equal, one, three))
    assert drawn == again


def _save(accumulate: Accumulator) -> None:
    accumulate.state_dict()


def _discard(accumulate: Accumulator) -> None:
    accumulate.discard()


@pytest.mark.parametrize(("call", "name"), [(_save, "state_dict"), (_discard, "discard")])
def test_saving_and_discarding_while_a_window_ends_raise(
    call: Callable[[Accumulator], None], name: str
) -> None:
    """A state saved there would hold a window that is already in the parameters."""
    model, large = mlp(), mlp()
    optimizer = sgd(model.parameters())
    accumulators: list[Accumulator] = []

    def then(step: int) -> float:
        if step:
            call(accumulators[0])
        return 1.0

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, then)
    accumulate = Accumulator(model, optimizer, microbatch_size=2, check=False, scheduler=scheduler)
    accumulators.append(accumulate)
    with pytest.raises(WindowError, match=rf"{name}\(\) was called by a hook, .* beginning or ending"):
        run(accumulate.window(BATCH), model)
    whole = sgd(large.parameters())
    mse(large, BATCH).backward()
    whole.step()
    for one, other in zip(model.parameters(), large.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)  # exactly one update was made
    assert accumulate.updates == 1
    call(accumulate)  # between windows both are allowed


def test_a_batchnorm_set_to_training_before_entering_raises() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)).double()
    accumulate = Accumulator(model, sgd(model.parameters()), microbatch_size=2, check=False)
    model.eval()
    window = accumulate.window(BATCH)
    model.train()
    with pytest.raises(CoupledSamplesError):
        run(window, model)


def test_momentum_options_changed_before_entering_raise() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    accumulate = Accumulator(model, optimizer, microbatch_size=2, check=False, gradient_sum="momentum")
    window = accumulate.window(BATCH)
    optimizer.param_groups[0]["nesterov"] = True
    with pytest.raises(OptimizerError, match="Nesterov"):
        run(window, model)


def test_a_model_converted_before_entering_raises() -> None:
    model = mlp(torch.float32)
    accumulate = Accumulator(
        model, sgd(model.parameters()), microbatch_size=2, check=False, gradient_sum=torch.float32
    )
    window = accumulate.window(BATCH)
    model.bfloat16()
    with pytest.raises(WindowError, match="added or converted after"):
        run(window, model)


def test_two_alternating_loops_make_no_update() -> None:
    model = mlp()
    accumulate = Accumulator(model, sgd(model.parameters()), microbatch_size=2, check=False)
    before = parameters(model)
    with accumulate.window(BATCH) as window:
        one, other = iter(window), iter(window)
        assert next(one, None) is None, "the first loop ended when the second began"
        window.backward(mse(model, next(other)))
    assert not window.update.made
    assert all(map(torch.equal, before, parameters(model)))


def test_the_periodic_check_counts_updates_between_opening_and_entering() -> None:
    model, calls = mlp(), [0]

    def loss_fn(microbatch: Any) -> Tensor:
        calls[0] += 1
        return mse(model, microbatch)

    accumulate = Accumulator(model, sgd(model.parameters()), loss_fn, microbatch_size=2)
    batch = rows(32)[0]
    accumulate(batch)
    ahead = [accumulate.window(batch) for _ in range(119)]  # all opened after one update
    before = calls[0]
    for window in ahead:
        run(window, model)
    assert calls[0] > before, "only a check calls loss_fn"
