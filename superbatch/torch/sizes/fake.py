"""Run a model on fake tensors: shapes, dtypes and lifetimes as in a real run, without data and computation.

A function mode replaces each real tensor that user code passes to torch (from a closure, a list, the groups
of an optimizer). Each tensor gets one fake, with a fake `.grad`. So `FakeTensorMode` works on unmodified
models. Data, gradients, hooks and version counters of the real tensors do not change.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from superbatch.errors import SuperbatchError

from ..checks.introspection import run_eagerly
from ..checks.probing.untouched import PythonState
from ..fastpaths import engine_backward
from ..memory.ledger import Ledger
from ..module_tables import buffers_of, parameters_of
from ..window.participants.snapshot import random_state, restore_random_state


class PredictionError(SuperbatchError, RuntimeError):
    """The model cannot run on fake tensors."""


@contextmanager
def faked(models: Sequence[nn.Module], ledger: Ledger) -> Iterator[Callable[[Any], Any]]:
    """Run models, losses and optimizers on fake tensors inside the context.

    Afterwards, also after an exception, these are restored: Python attributes, containers and training flags
    of the modules; random state of torch, Python and NumPy. Parameters, buffers and `.grad` do not change.

    Args:
        models: models whose parameters and buffers are replaced on entry; other tensors at their first use.
        ledger: counts the memory that the body allocates.

    Yields:
        Function that returns a nested structure with a fake in place of each tensor.

    Raises:
        PredictionError: a parameter is distributed, so that operations on it would communicate; or a module
            is scripted.

    Examples:
        >>> layer = nn.Linear(3, 2)
        >>> ledger = Ledger(torch.device("cpu"))
        >>> with faked([layer], ledger) as fake:
        ...     layer(fake(torch.ones(5, 3))).sum().backward()
        ...     fake(layer.weight).grad.shape
        torch.Size([2, 3])
        >>> layer.weight.grad, ledger.peak
        (None, 104)
    """
    # Imported here: it loads sympy and dynamo, which takes about a second.
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    _refuse_distributed_or_scripted(models)
    python = [PythonState(model) for model in models]
    devices = {parameter.device for model in models for parameter in model.parameters()}
    randomness = random_state(devices)
    # Operations that bypass function modes may combine real tensors with fakes.
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    function_mode = _Faking(mode, FakeTensor, ledger)
    try:
        with ExitStack() as stack:
            stack.enter_context(warnings.catch_warnings())
            warnings.simplefilter("ignore")  # the real run will show these warnings
            stack.enter_context(run_eagerly())
            stack.enter_context(torch.enable_grad())
            for context in (mode, ledger):
                stack.enter_context(context)
            for model in models:
                _put_fakes(model, function_mode.fake)
            stack.enter_context(function_mode)
            yield function_mode.fakes
    finally:
        torch.clear_autocast_cache()  # it may hold casts of fake tensors
        for state in python:
            state.restore()
        restore_random_state(randomness)


class GuessValues(TorchDispatchMode):
    """Return 1 wherever the value of a fake tensor is read.

    For optimizers, whose memory does not depend on values: Adam on the CPU reads its step counter.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            dtype = args[0].dtype
            return True if dtype is torch.bool else 1.0 if dtype.is_floating_point else 1
        return func(*args, **(kwargs or {}))


class _Faking(TorchFunctionMode):
    """Function mode that replaces each real tensor argument of a torch function by its fake."""

    def __init__(self, mode: Any, fake_type: type[Tensor], ledger: Ledger) -> None:
        super().__init__()
        self._mode = mode
        self._fake_type = fake_type
        self._ledger = ledger
        # The real tensor is kept beside its fake, so that its id is not used again.
        self._fakes: dict[int, tuple[Tensor, Tensor]] = {}

    def fake(self, tensor: Tensor) -> Tensor:
        """Return the fake of a tensor, the same one each time."""
        if isinstance(tensor, self._fake_type) or _is_wrapped(tensor):
            return tensor
        if id(tensor) not in self._fakes:
            fake = self._mode.from_tensor(tensor, static_shapes=True)
            self._fakes[id(tensor)] = (tensor, fake)
            # Only leaves: reading `.grad` of another tensor warns.
            if tensor.is_leaf:
                fake.grad = None if tensor.grad is None else self.fake(tensor.grad)
            # Its memory is allocated already; only allocations of the body count.
            self._ledger.leave_out(fake)
        return self._fakes[id(tensor)][1]

    def fakes(self, tree: Any) -> Any:
        """Return a nested structure with a fake in place of each tensor."""
        # Faster than tree_map: each read of a shape or dtype calls this.
        if isinstance(tree, Tensor):
            return self.fake(tree)
        kind = type(tree)
        if kind is tuple or kind is list:
            return kind([self.fakes(item) for item in tree]) if tree else tree
        if kind is dict:
            return {key: self.fakes(value) for key, value in tree.items()} if tree else tree
        return tree if kind in _PLAIN else tree_map_only(Tensor, self.fake, tree)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        _refuse_hidden_workspace(func, args)
        args, kwargs = self.fakes((args, kwargs or {}))
        # torch disables a function mode while it handles a call, but hooks in a backward need it.
        if func is Tensor.backward:
            with self:
                return _tensor_backward(*args, **kwargs)
        if func is torch.autograd.backward:
            with self:
                return _backward(*args, **kwargs)
        return func(*args, **kwargs)


def _tensor_backward(tensor: Tensor, gradient: Tensor | None = None, *args: Any, **kwargs: Any) -> None:
    torch.autograd.backward(tensor, gradient, *args, **kwargs)


def _backward(
    tensors: Any,
    grad_tensors: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> None:
    """Run the engine as torch.autograd.backward of torch 2.13 does, but with function modes enabled."""
    tensors = (tensors,) if isinstance(tensors, Tensor) else tuple(tensors)
    given = (
        (grad_tensors,) if isinstance(grad_tensors, Tensor) else tuple(grad_tensors or [None] * len(tensors))
    )
    gradients = [
        torch.ones_like(tensor) if gradient is None and tensor.requires_grad else gradient
        for tensor, gradient in zip(tensors, given, strict=True)
    ]
    engine_backward(
        tensors,
        tuple(gradients),
        keep_graph=create_graph if retain_graph is None else retain_graph,
        create_graph=create_graph,
        inputs=(inputs,) if isinstance(inputs, Tensor) else tuple(inputs or ()),
        allow_unreachable=True,
        accumulate_grad=True,
    )


def _refuse_hidden_workspace(func: Any, args: tuple[Any, ...]) -> None:
    """Raise for recurrent layers whose kernel allocates a workspace that fake tensors do not show.

    oneDNN's LSTM and cuDNN's recurrent layers allocate one; other layers consist of ordinary operations.
    """
    name = getattr(func, "__name__", "")
    if name not in _RECURRENT:
        return
    first = next(leaf for leaf in args if isinstance(leaf, Tensor))
    onednn = name == "lstm" and first.dtype != torch.float64 and torch.backends.mkldnn.is_available()
    if first.device.type == "cuda" or (first.device.type == "cpu" and onednn):
        raise PredictionError(
            f"The memory of a recurrent layer ({name}) on {first.device.type} cannot be predicted: its "
            "kernel allocates a workspace of unknown size. Measure small micro-batches instead."
        )


# Private: torch has no public function that recognizes a tensor inside vmap. It is missing in torch's stub.
_is_wrapped: Callable[[Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor  # pyright: ignore[reportAttributeAccessIssue]

_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.Size)

_RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")


def _put_fakes(model: nn.Module, fake: Callable[[Tensor], Tensor]) -> None:
    """Put fakes into the modules, because some functions of torch bypass function modes."""
    for module in model.modules():
        for table in (parameters_of(module), buffers_of(module)):
            for name, tensor in table.items():
                if tensor is not None:  # torch accepts the fake of a Parameter as a Parameter
                    table[name] = fake(tensor)  # pyright: ignore[reportArgumentType]
        if isinstance(module, nn.parallel.DistributedDataParallel):
            # Bypass DDP: its forward would synchronize buffers and prepare a reduction.
            vars(module)["forward"] = module.module.forward


def _refuse_distributed_or_scripted(models: Sequence[nn.Module]) -> None:
    for model in models:
        for name, parameter in model.named_parameters():
            if getattr(parameter, "device_mesh", None) is not None:
                raise PredictionError(
                    f"The parameter {name!r} is distributed over processes, and operations on it would "
                    "communicate even with fake tensors. Measure small micro-batches instead."
                )
        if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
            raise PredictionError(
                "A scripted module cannot run on fake tensors. Measure small micro-batches instead."
            )
