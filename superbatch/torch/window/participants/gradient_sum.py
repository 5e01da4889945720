"""Protocol of a window's gradient sum, and functions that its three implementations share.

The implementations are `parameter_gradients`, `buffer_gradients` and `momentum_gradients`. Each is a
`Participant` of the window, and also has::

    backward(loss, factor)        add factor * d loss / d parameters
    close()                       the sums, one per owned parameter (None: no gradient), not normalised
    zeros(index)                  a gradient of zeros for one owned parameter
    attach(gradients)             make them the `.grad` of the targets, for the optimizer

`factor` comes from `superbatch.normalize`. A *target* is the tensor that the optimizer updates: the parameter
itself, or its float32 master copy.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from superbatch.errors import OptimizerError, WindowError
from superbatch.torch import fastpaths
from superbatch.torch.devices import alike, local_part

RunBackward = Callable[..., None]
"""``run(loss, gradient, inputs, retain_graph=...)``: `run_backward`, or the result of `host_backward`."""

# A sum of equal terms stops growing after 2**8 terms in bfloat16, 2**11 in float16.
LOW_PRECISION = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class ManagedParameter:
    """A parameter that an optimizer of the window updates.

    Attributes:
        name: its path in the model, or its position in the optimizer for a parameter outside of the models.
        parameter: the tensor that the model computes with.
        target: the tensor that the optimizer updates.
        optimizer: the optimizer that updates it.
        number: index of its parameter group in that optimizer.
    """

    name: str
    parameter: Tensor
    target: Tensor
    optimizer: torch.optim.Optimizer
    number: int

    @property
    def group(self) -> Mapping[str, Any]:
        """The present parameter group, because loading an optimizer's state makes new ones."""
        return self.optimizer.param_groups[self.number]


class GradientSum(Protocol):
    """Sum of the gradients of a window's micro-batches: a `Participant`."""

    inputs: list[Tensor] | None
    """Leaves that a backward is restricted to; None: it is not restricted."""

    def begin(self) -> None:
        """Clear all gradients and sums."""
        ...

    def backward(self, loss: Tensor, factor: float, *, retain_graph: bool = False) -> None:
        """Add ``factor * d loss / d parameters``."""
        ...

    def savepoint(self) -> None:
        """Make the present sums the ones that `rollback` returns to, without a copy."""
        ...

    def rollback(self) -> bool:
        """Restore the sums of the savepoint; return False if that is impossible, and the window restarts."""
        ...

    def sums(self) -> list[Tensor | None]:
        """Return the sums so far, one per owned parameter."""
        ...

    def close(self) -> list[Tensor | None]:
        """Return the sums, one per owned parameter, and remove them from this object."""
        ...

    def zeros(self, index: int) -> Tensor:
        """Return a gradient of zeros."""
        ...

    def attach(self, gradients: list[Tensor | None]) -> None:
        """Make the normalised gradients the ``.grad`` that the optimizer reads."""
        ...

    def restore(self) -> None:
        """Clear all gradients and sums."""
        ...

    def restart(self) -> None:
        """Call `restore`, then `begin`."""
        ...

    def commit(self) -> None:
        """Free the copies, if any; the update rule frees the gradients."""
        ...

    def describe(self) -> str:
        """Return the kind and dtype of the sum; a saved window resumes only into an equal one."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the sums so far."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from saved sums."""
        ...


def clear(owned: list[ManagedParameter]) -> None:
    """Set the gradients of the parameters and their targets to None."""
    for entry in owned:
        # Not to zeros, with which AdamW would still change the parameter.
        entry.parameter.grad = None
        if entry.target is not entry.parameter:
            entry.target.grad = None


def foreign_gradient(name: str) -> WindowError:
    """Return the error for a gradient that the window's backward has not computed."""
    return WindowError(
        f"The gradient of {name!r} was changed inside a window, but not by window.backward(loss), so the "
        "window's sum is wrong. Remove zero_grad() and other backward calls from the window, or, if two "
        "windows are open at the same time (a GAN), pass both models to both accumulators, as [generator, "
        "critic], so that each window changes only the gradients of its own optimizer."
    )


def unshare(parameters: Iterable[Tensor], loss_gradient: Tensor | None = None) -> bool:
    """Copy gradients that share memory with each other or with `loss_gradient`.

    If two parameters are added, autograd gives both the same gradient tensor, and the next micro-batch would
    be added to it twice. A parameter that is a term of the loss gets the loss's own gradient. With a replayed
    graph a gradient has memory that the next replay writes to (see `in_shared_memory`).

    Args:
        parameters: the parameters.
        loss_gradient: the gradient of the loss that the backward got; None: there is none.

    Returns:
        Whether a gradient was copied.

    Examples:
        >>> a, b = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
        >>> a.grad = b.grad = torch.ones(2)
        >>> unshare([a, b]), a.grad is b.grad, unshare([a, b])
        (True, False, False)
    """
    seen: set[int] = set()
    # The next backward reuses the loss's gradient; an addition to it would change the factor.
    if loss_gradient is not None:
        seen.update(_addresses([loss_gradient]))
    copied = False
    present = [parameter for parameter in parameters if parameter.grad is not None]
    gradients = list(map(_gradient, present))
    for parameter, gradient, address in zip(present, gradients, _addresses(gradients), strict=True):
        # Address 0 is that of any empty tensor or wrapper subclass.
        if (address in seen and address) or in_shared_memory(gradient):
            parameter.grad = gradient.clone()
            copied = True
        else:
            seen.add(address)
    return copied


_gradient = attrgetter("grad")


def _addresses(tensors: list[Tensor]) -> list[int]:
    """Return the address of each tensor's storage; 0 for a subclass that wraps another tensor."""
    try:
        # One list comprehension for the usual case, because this runs after every backward.
        return [tensor.untyped_storage().data_ptr() for tensor in tensors]
    except RuntimeError:  # one of them is sparse, or wraps another tensor
        return list(map(_address, tensors))


def _address(tensor: Tensor) -> int:
    try:
        # A sparse gradient has no storage of its own, but its values have one.
        return (tensor._values() if tensor.is_sparse else tensor).untyped_storage().data_ptr()
    except RuntimeError:
        return 0


def in_shared_memory(gradient: Tensor | None) -> bool:
    """Return whether another tensor, or perhaps a replayed graph, uses a gradient's memory.

    A replayed graph (`torch.cuda.make_graphed_callables`, ``mode="reduce-overhead"``) writes the gradients of
    every micro-batch to the same memory. Autograd makes the first gradient ``.grad`` without a copy, and the
    next replay would overwrite the sum.

    Examples:
        >>> one = torch.ones(2)
        >>> in_shared_memory(one), in_shared_memory(one.detach())
        (False, True)
    """
    # A wrapper subclass (DTensor) or a sparse tensor has no storage of its own to count.
    if type(gradient) is not Tensor or gradient.layout is not torch.strided:
        return False
    if gradient.is_cuda and "torch._inductor.cudagraph_trees" in sys.modules:
        return True  # tensors of CUDA graphs are not counted as users of their memory
    # Private, because torch has no public count of the users of a storage, and a copy of every first gradient
    # would double the memory of gradients. The tensor and its Python storage are two users.
    return torch._C._storage_Use_Count(gradient.untyped_storage()._cdata) > 2


def require_none(owned: list[ManagedParameter]) -> None:
    """Raise `WindowError` if a parameter has a gradient; a sum in buffers removes each gradient at once."""
    for entry in owned:
        if entry.parameter.grad is not None:
            raise foreign_gradient(entry.name)


def take_gradient(entry: ManagedParameter, *, inside: bool) -> Tensor:
    """Return a parameter's new gradient and set ``.grad`` to None.

    Args:
        entry: the parameter.
        inside: whether the gradient comes from the window's backward.

    Raises:
        WindowError: the gradient comes from another backward.
        OptimizerError: another hook has already removed the gradient.
    """
    gradient = entry.parameter.grad
    if not inside:
        # Hooks run in other backwards too, e.g. in that of a gradient penalty.
        raise foreign_gradient(entry.name)
    if gradient is None:
        raise steps_in_backward(entry.name)
    # Freed now, because all gradients beside the buffers would double the memory.
    entry.parameter.grad = None
    return gradient


def steps_in_backward(name: str) -> OptimizerError:
    """Return the error for an optimizer that changes a parameter inside the backward of a micro-batch."""
    return OptimizerError(
        f"A hook steps the parameter {name!r} inside the backward, so each micro-batch would update it by a "
        "part of the batch's gradient. Remove the hook (register_post_accumulate_grad_hook, register_hook "
        "or _apply_optimizer_in_backward), and let the Accumulator step the optimizer once per window."
    )


def run_backward(
    loss: Tensor, gradient: Tensor | None, inputs: list[Tensor] | None, *, retain_graph: bool
) -> None:
    """Run autograd, restricted to the leaves `inputs` unless they are None.

    Raises:
        OptimizerError: the model has a reentrant checkpoint, with which a backward cannot be restricted.
    """
    try:
        fastpaths.backward(loss, gradient, inputs, retain_graph=retain_graph)
    except RuntimeError as error:
        # By its text, because torch has no error type for this.
        if inputs is not None and "use_reentrant" in str(error):
            raise OptimizerError(
                "The model has parameters of other optimizers, which the backward must leave out, but "
                "reentrant activation checkpointing does not allow that. Pass use_reentrant=False to "
                "torch.utils.checkpoint, or freeze the other parameters."
            ) from error
        raise


def host_backward(backward: Callable[..., Any]) -> RunBackward:
    """Return a `RunBackward` that calls another library's backward, such as ``accelerator.backward``.

    Args:
        backward: ``backward(loss)``; it may scale the loss, and gets ``retain_graph=True`` if a micro-batch
            has several losses.

    Examples:
        >>> weight = torch.ones(2, requires_grad=True)
        >>> run = host_backward(lambda loss: loss.backward())
        >>> run(weight.sum(), torch.tensor(0.5), None, retain_graph=False)
        >>> weight.grad
        tensor([0.5000, 0.5000])
    """

    def run(
        loss: Tensor, gradient: Tensor | None, inputs: list[Tensor] | None, *, retain_graph: bool
    ) -> None:
        if inputs is not None:
            raise OptimizerError(
                "The function of backward= would also compute gradients of parameters of other optimizers. "
                "Freeze those parameters with requires_grad_(False)."
            )
        # The function takes only a loss, so the factor goes into the loss.
        scaled = loss if gradient is None else loss * gradient
        # Only if needed, because a function without this keyword works with a single loss.
        if retain_graph:
            backward(scaled, retain_graph=True)
        else:
            backward(scaled)

    return run


def attach(owned: list[ManagedParameter], gradients: list[Tensor | None]) -> None:
    """Make the gradients the targets' ``.grad``, rounded once if a target has a narrower dtype."""
    for entry, gradient in zip(owned, gradients, strict=True):
        if gradient is not entry.target.grad:
            entry.target.grad = None if gradient is None else gradient.to(entry.target.dtype)


def add_after_gradient(
    owned: list[ManagedParameter], add: Callable[[ManagedParameter], None], hooks: list[RemovableHandle]
) -> None:
    """Call ``add(entry)`` each time autograd has written a gradient to ``entry.parameter.grad``.

    Args:
        owned: the parameters.
        add: the function to call.
        hooks: list that the handles are appended to, for `remove`.
    """

    def hook_of(entry: ManagedParameter) -> Callable[[Tensor], None]:
        def hook(_: Tensor) -> None:
            # In a backward with create_graph=True, hooks run with gradients enabled.
            with torch.no_grad():
                add(entry)

        return hook

    # A generator, so that each handle is in the list even if registering a later hook fails.
    hooks.extend(entry.parameter.register_post_accumulate_grad_hook(hook_of(entry)) for entry in owned)


def remove(hooks: list[RemovableHandle]) -> None:
    """Remove hooks."""
    while hooks:
        hooks.pop().remove()


def all_finite(tensors: list[Tensor]) -> bool:
    """Return whether no element of any tensor is NaN or infinite; of a sparse tensor, no value.

    Examples:
        >>> all_finite([torch.zeros(2), torch.tensor([1.0, float("inf")])])
        False
    """
    dense = [values(tensor) for tensor in tensors if tensor.numel()]
    if not dense:
        return True
    # The largest magnitude is not finite if an element is not; unlike the 2-norm it cannot overflow.
    infinity = float("inf")
    largest = [torch.stack(fastpaths.norms(group, infinity)) for group in alike(dense)]
    parts = [norms.isfinite().all() for norms in largest]
    # The host waits only once, also for several devices.
    return bool(
        parts[0] if len(parts) == 1 else torch.stack([part.to(parts[0].device) for part in parts]).all()
    )


def values(tensor: Tensor) -> Tensor:
    """Return a gradient's elements on this rank: the tensor itself, its shard, or its sparse values."""
    if type(tensor) is Tensor and not tensor.is_sparse:  # the usual case, first
        return tensor
    return tensor.coalesce().values() if tensor.is_sparse else local_part(tensor)
