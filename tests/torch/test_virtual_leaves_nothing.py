"""A virtual batch restores torch, the modules and the process, however it ends."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._C import _autograd  # pyright: ignore[reportAttributeAccessIssue]  (torch's stubs lack it)
from torch._dynamo import eval_frame
from torch.autograd.grad_mode import _force_original_view_tracking
from torch.nn import functional as F
from torch.nn.modules import module as all_modules
from torch.nn.utils import parametrizations
from torch.utils._python_dispatch import TorchDispatchMode

from superbatch.torch import virtual_batch
from superbatch.torch.checks import introspection
from tests.torch.states import assert_unchanged, fingerprint

pytestmark = pytest.mark.skipif(
    not hasattr(_autograd, "_top_saved_tensors_default_hooks"),
    reason="this release of torch cannot list hooks of saved tensors",
)

N = 10
X = torch.randn(N, 6, generator=torch.Generator().manual_seed(1))
Y = torch.randint(0, 3, (N,), generator=torch.Generator().manual_seed(2))


VIEWS = torch._C._is_view_replay_enabled()


class Broken(Exception):
    """Error of the program."""


class Breaks(torch.autograd.Function):
    """Operation of the program whose backward raises."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, error: BaseException) -> Tensor:
        ctx.error = error
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise ctx.error


class Net(nn.Module):
    """Model with stateful layers and hooks, whose forward may raise."""

    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.first = parametrizations.spectral_norm(nn.Linear(6, 8))
        self.norm, self.drop = norm(8), nn.Dropout(0.3)
        self.frozen = nn.Linear(8, 8).requires_grad_(requires_grad=False)
        self.last = nn.Linear(8, 3)
        self.raises: BaseException | None = None
        self.norm.register_forward_hook(lambda module, inputs, output: None)
        self.last.weight.register_hook(lambda grad: None)
        self.last.bias.register_post_accumulate_grad_hook(lambda parameter: None)

    def forward(self, x: Tensor) -> Tensor:
        h = self.frozen(self.drop(self.norm(self.first(x))))
        if self.raises is not None:
            float(h.detach().sum())  # materializes and stores something
            raise self.raises
        return self.last(F.silu(h))


def compiled(width: int) -> Any:
    return torch.compile(nn.BatchNorm1d(width), backend="eager")


def compiled_in_place(width: int) -> nn.Module:
    norm = nn.BatchNorm1d(width)
    norm.compile(backend="eager")
    return norm


NORMS = {
    "BatchNorm": nn.BatchNorm1d,
    "SyncBatchNorm": nn.SyncBatchNorm,
    "a compiled layer": compiled,
    "a layer compiled in place": compiled_in_place,
}

ENDS: dict[str, tuple[str, BaseException | None]] = {
    "normally": ("", None),
    "without a backward": ("no backward", None),
    "an exception in the forward": ("forward", Broken()),
    "an exception in the backward": ("backward", Broken()),
    "an exception after the backward": ("afterwards", Broken()),
    "an interrupt in the forward": ("forward", KeyboardInterrupt()),
    "an interrupt in the backward": ("backward", KeyboardInterrupt()),
}


def process_state(model: nn.Module) -> dict[str, Any]:
    """Return all state besides numbers that a block could change, by name."""
    found: dict[str, Any] = {
        f"torch.nn.modules.module.{name}": list(value.items())
        for name, value in vars(all_modules).items()
        if name.startswith("_global") and isinstance(value, dict)
    }
    assert len(found) >= 5, "premise: torch keeps its global hooks there"
    found |= {
        "any global hook": all_modules._has_any_global_hook(),
        "function modes": torch._C._len_torch_function_stack(),
        "dispatch modes": torch._C._len_torch_dispatch_stack(),
        "stance": dict(vars(eval_frame._stance)),
        "views": torch._C._is_view_replay_enabled(),
        "saved tensors": _autograd._top_saved_tensors_default_hooks(True),  # noqa: FBT003
        "gradients": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "anomalies": torch.is_anomaly_enabled(),
        "autocast": [torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")],
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "filters": list(warnings.filters),
        "hook of exceptions": sys.excepthook,
    }
    for name, module in model.named_modules():
        found[f"{name} type"] = type(module)
        found[f"{name} attributes"] = sorted(vars(module))
        found[f"{name} own forward"] = vars(module).get("forward")
        found[f"{name} hooks"] = {
            key: list(value.values()) for key, value in vars(module).items() if key.endswith("_hooks")
        }
        found[f"{name} training"] = module.training
    found["state_dict"] = list(model.state_dict())
    for name, parameter in model.named_parameters():
        found[f"{name} parameter"] = (
            id(parameter),
            type(parameter),
            parameter.requires_grad,
            parameter.is_leaf,
        )
        found[f"{name} hooks"] = [
            list((getattr(parameter, key) or {}).values())
            for key in ("_backward_hooks", "_post_accumulate_grad_hooks")
        ]
    return found


def numbers(model: nn.Module) -> dict[str, Any]:
    """Return parameters, gradients, buffers and states of generators."""
    return fingerprint(model)


def train(model: Net, end: str, error: BaseException | None) -> None:
    model.raises = error if end == "forward" else None
    with virtual_batch(model, 3) as batch:
        outputs = model(batch(X))
        if end == "backward" and error is not None:
            outputs = Breaks.apply(outputs, error)
        loss = F.cross_entropy(outputs, Y)
        if end != "no backward":
            loss.backward()
        if end == "afterwards" and error is not None:
            float(loss.detach())
            raise error


@pytest.fixture(autouse=True)
def warning_issued() -> Iterator[None]:
    """Issue the once-per-process warning about compiled models before the test."""
    introspection._warn_of_eager_run.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        introspection._warn_of_eager_run()
    yield
    introspection._warn_of_eager_run.cache_clear()


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("norm", NORMS)
def test_a_block_restores_all_state(norm: str, end: str) -> None:
    torch.manual_seed(0)
    model = Net(NORMS[norm])
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.ones_like(parameter)
    where, error = ENDS[end]
    process, before = process_state(model), numbers(model)
    if error is None:
        train(model, where, None)
    else:
        with pytest.raises(type(error)):
            train(model, where, error)
    model.raises = None
    assert_unchanged(process, process_state(model))
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        assert type(value) in (Tensor, nn.Parameter), name
        assert value.grad is None or type(value.grad) is Tensor, name
    if error is not None:
        assert_unchanged(before, numbers(model))
    else:
        after = numbers(model)
        with pytest.raises(AssertionError):  # premise: the comparison detects an update
            assert_unchanged(before, after)
    with warnings.catch_warnings():  # the compiler reads attributes that warn
        warnings.simplefilter("ignore")
        model(X).sum().backward()  # the model can still train


def leave_hook(model: Net) -> Iterator[None]:
    handle = all_modules.register_module_forward_pre_hook(lambda *_: None)
    yield
    handle.remove()


def leave_context(context: Callable[[], Any]) -> Callable[[Net], Iterator[None]]:
    def left(model: Net) -> Iterator[None]:
        with context():
            yield

    return left


def leave_change(change: Callable[[Net], Any]) -> Callable[[Net], Iterator[None]]:
    def left(model: Net) -> Iterator[None]:
        change(model)
        yield

    return left


class Unused(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class UnusedDispatch(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


LEFT: dict[str, Callable[[Net], Iterator[None]]] = {
    "a hook of all modules": leave_hook,
    "a forward": leave_change(lambda net: setattr(net.norm, "forward", net.norm.forward)),
    "an attribute": leave_change(lambda net: setattr(net.norm, "left", 1)),
    "a type": leave_change(lambda net: setattr(net.norm, "__class__", nn.SyncBatchNorm)),
    "a hook": leave_change(lambda net: net.last.register_forward_hook(lambda *_: None)),
    "a hook of a parameter": leave_change(lambda net: net.last.weight.register_hook(lambda grad: None)),
    "a buffer": leave_change(lambda net: net.norm.register_buffer("left", torch.ones(1))),
    "a flag": leave_change(lambda net: net.frozen.requires_grad_()),
    "a mode of the model": leave_change(lambda net: net.eval()),
    "a filter": leave_context(lambda: introspection._IgnoreHookWarning()),
    "a dispatch mode": leave_context(UnusedDispatch),
    "a function mode": leave_context(Unused),
    "a stance": leave_context(lambda: torch.compiler.set_stance("force_eager")),
    "view tracking": leave_context(lambda: _force_original_view_tracking(mode=not VIEWS)),
    "hooks of saved tensors": leave_context(
        lambda: torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)
    ),
    "grad mode": leave_context(torch.no_grad),
    "autocast": leave_context(lambda: torch.autocast("cpu")),
}


@pytest.mark.parametrize("left", LEFT)
def test_the_comparison_detects(left: str) -> None:
    torch.manual_seed(0)
    model = Net(nn.BatchNorm1d)
    before = process_state(model)
    assert_unchanged(before, process_state(model))
    leaving = LEFT[left](model)
    next(leaving)
    during = process_state(model)
    list(leaving)
    with pytest.raises(AssertionError):
        assert_unchanged(before, during)
