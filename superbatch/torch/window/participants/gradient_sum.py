"""Protocol of a window's gradient sum, and what its three implementations share.

There are three - `parameter_gradients`, `buffer_gradients`, `momentum_gradients`. Each is a `Participant` of
the window, and beside that has::

    backward(loss, factor)        add factor * d loss / d parameters
    close()                       the sums, one per owned parameter (None: it had no gradient), not normalised
    zeros(index)                  a gradient of zeros for one owned parameter
    attach(gradients)             hand them to the optimizer as `.grad` of the targets

`factor` comes from `superbatch.normalize`. A *target* is what the optimizer updates: the parameter
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
"""``run(loss, gradient, inputs, retain_graph=...)``: `run_backward`, or what `host_backward` returns."""

# A sum of equal terms stops growing after 2**8 of them in bfloat16, 2**11 in float16.
LOW_PRECISION = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class ManagedParameter:
    """A parameter that the window's optimizers own.

    Attributes:
        name: its path in the model, or its place in the optimizer for a parameter outside the models.
        parameter: what the model computes with.
        target: what the optimizer updates.
        optimizer: whose it is.
        number: of its parameter group there.
    """

    name: str
    parameter: Tensor
    target: Tensor
    optimizer: torch.optim.Optimizer
    number: int

    @property
    def group(self) -> Mapping[str, Any]:
        """The parameter group as it is now: loading an optimizer's state makes new ones."""
        return self.optimizer.param_groups[self.number]


class GradientSum(Protocol):
    """Sum of the gradients of a window's micro-batches: a `Participant`."""

    inputs: list[Tensor] | None
    """What a backward is restricted to; None: it is not."""

    def begin(self) -> None:
        """Start a window: no gradient of it exists yet."""
        ...

    def backward(self, loss: Tensor, factor: float, *, retain_graph: bool = False) -> None:
        """Add ``factor * d loss / d parameters``."""
        ...

    def savepoint(self) -> None:
        """Remember the sums as those before a micro-batch; nothing is copied."""
        ...

    def rollback(self) -> bool:
        """Restore the sums of the savepoint; False if that is impossible, and the window must restart."""
        ...

    def sums(self) -> list[Tensor | None]:
        """Return the sums so far, one per owned parameter."""
        ...

    def close(self) -> list[Tensor | None]:
        """End the sums and return them, one per owned parameter."""
        ...

    def zeros(self, index: int) -> Tensor:
        """Return a gradient of zeros."""
        ...

    def attach(self, gradients: list[Tensor | None]) -> None:
        """Hand the normalised gradients to the optimizer."""
        ...

    def restore(self) -> None:
        """Forget the window: everything is as before it."""
        ...

    def restart(self) -> None:
        """Restore, and begin again."""
        ...

    def commit(self) -> None:
        """No-op: the update rule frees the gradients."""
        ...

    def describe(self) -> str:
        """Return the kind and dtype of the sum: a window resumes only into the same."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the sums so far."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from saved sums."""
        ...


def clear(owned: list[ManagedParameter]) -> None:
    """Drop the gradients of the parameters and their targets (to None, so that no memory is held)."""
    for entry in owned:
        # None, not zeros: AdamW moves a parameter whose gradient is zero, and skips one without a gradient.
        entry.parameter.grad = None
        if entry.target is not entry.parameter:
            entry.target.grad = None


def foreign_gradient(name: str) -> WindowError:
    """Return the error for a gradient that is not the window's own."""
    return WindowError(
        f"The gradient of {name!r} was changed inside a window but not by its backward(loss), so the sum of "
        "the window is no longer that of its micro-batches. Do not call zero_grad() or another backward "
        "inside a window; where two windows are open at the same time (a GAN), give both models to both "
        "accumulators, as [generator, critic], so that each touches its own gradients only."
    )


def unshare(parameters: Iterable[Tensor], taken: Tensor | None = None) -> bool:
    """Give each parameter a gradient of its own, apart from `taken` as well; return whether one had not.

    Autograd hands one tensor to two parameters whose sum it went through; the next micro-batch would be added
    to it twice. To a parameter that is a term of the loss it hands the loss's own gradient, and from a
    replayed graph the memory that the next replay writes to (see `in_shared_memory`).

    Examples:
        >>> a, b = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
        >>> a.grad = b.grad = torch.ones(2)
        >>> unshare([a, b]), a.grad is b.grad, unshare([a, b])
        (True, False, False)
    """
    seen: set[int] = set()
    # The loss's own gradient is reused by the next micro-batch: adding into it would change the factor.
    if taken is not None:
        seen.update(_addresses([taken]))
    copied = False
    present = [parameter for parameter in parameters if parameter.grad is not None]
    gradients = list(map(_gradient, present))
    for parameter, gradient, place in zip(present, gradients, _addresses(gradients), strict=True):
        # Address 0: an empty tensor or a wrapper subclass, whose addresses say nothing.
        if (place in seen and place) or in_shared_memory(gradient):
            parameter.grad = gradient.clone()
            copied = True
        else:
            seen.add(place)
    return copied


_gradient = attrgetter("grad")


def _addresses(tensors: list[Tensor]) -> list[int]:
    """Return the address of each tensor's storage; 0 for a subclass that only wraps others."""
    try:
        # One list comprehension for the usual case: this runs after every backward that made a gradient.
        return [tensor.untyped_storage().data_ptr() for tensor in tensors]
    except RuntimeError:  # one of them is sparse, or wraps others
        return list(map(_address, tensors))


def _address(tensor: Tensor) -> int:
    try:
        # A sparse gradient has no storage of its own; its values have.
        return (tensor._values() if tensor.is_sparse else tensor).untyped_storage().data_ptr()
    except RuntimeError:
        return 0


def in_shared_memory(gradient: Tensor | None) -> bool:
    """Return whether another tensor uses a gradient's memory, or a replayed graph may.

    A replayed graph (`torch.cuda.make_graphed_callables`, ``mode="reduce-overhead"``) writes the gradients of
    every micro-batch to the same memory. Autograd makes the first one ``.grad``, without a copy, and the next
    replay would overwrite the sum.

    Examples:
        >>> one = torch.ones(2)
        >>> in_shared_memory(one), in_shared_memory(one.detach())
        (False, True)
    """
    # A wrapper subclass (DTensor) or a sparse tensor has no storage of its own to count.
    if type(gradient) is not Tensor or gradient.layout is not torch.strided:
        return False
    if gradient.is_cuda and "torch._inductor.cudagraph_trees" in sys.modules:
        return True  # its tensors do not count as users of their memory
    # Private, for correctness: torch has no public count of the users of a memory, and to copy each first
    # gradient would take a window's gradients twice. One for the tensor, one for the storage Python sees.
    return torch._C._storage_Use_Count(gradient.untyped_storage()._cdata) > 2


def require_none(owned: list[ManagedParameter]) -> None:
    """Check that no parameter holds a gradient, where each is taken away as soon as it is there.

    Raises:
        WindowError: somebody else has computed one.
    """
    for entry in owned:
        # A gradient here before our backward was made by somebody else's.
        if entry.parameter.grad is not None:
            raise foreign_gradient(entry.name)


def take_gradient(entry: ManagedParameter, *, inside: bool) -> Tensor:
    """Take a parameter's new gradient; `inside` says whether it comes from the window's backward.

    Raises:
        WindowError: it does not.
        OptimizerError: another hook has taken it already.
    """
    gradient = entry.parameter.grad
    if not inside:
        # Inside another backward the hook fires as well, e.g. for a gradient penalty on the same parameters.
        raise foreign_gradient(entry.name)
    if gradient is None:
        raise steps_in_backward(entry.name)
    # Free it now: with all gradients alive at once, the buffers would double the gradient memory.
    entry.parameter.grad = None
    return gradient


def steps_in_backward(name: str) -> OptimizerError:
    """Return the error for an optimizer that changes a parameter inside the backward of a micro-batch."""
    return OptimizerError(
        f"An optimizer steps the parameter {name!r} inside the backward, so it would be updated once per "
        "micro-batch, by gradients that are only parts of the batch's. Step the optimizer once per window: "
        "remove the hook (register_post_accumulate_grad_hook, register_hook, _apply_optimizer_in_backward)."
    )


def run_backward(
    loss: Tensor, gradient: Tensor | None, inputs: list[Tensor] | None, *, retain_graph: bool
) -> None:
    """Run autograd, restricted to some leaves if there are others.

    Raises:
        OptimizerError: a reentrant checkpoint lies on the way, which cannot be restricted.
    """
    try:
        fastpaths.backward(loss, gradient, inputs, retain_graph=retain_graph)
    except RuntimeError as error:
        # torch's text for inputs= with a reentrant checkpoint; there is no error type to catch.
        if inputs is not None and "use_reentrant" in str(error):
            raise OptimizerError(
                "The model has a reentrant checkpoint and parameters of other optimizers, which the "
                "backward must leave alone; a reentrant checkpoint does not allow that. Pass "
                "use_reentrant=False to torch.utils.checkpoint, or freeze the other parameters."
            ) from error
        raise


def host_backward(backward: Callable[..., Any]) -> RunBackward:
    """Return a backward that leaves autograd to a host such as ``accelerator.backward``.

    Args:
        backward: ``backward(loss)``; it may scale the loss, and gets ``retain_graph=True`` where a
            micro-batch has several losses.

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
                "backward= cannot leave out parameters of other optimizers. Freeze them with "
                "requires_grad_(False)."
            )
        # The host scales the loss itself, so our factor goes into the loss and not into grad_outputs.
        scaled = loss if gradient is None else loss * gradient
        # Only where needed: a host whose backward(loss) takes no keyword works with one loss.
        if retain_graph:
            backward(scaled, retain_graph=True)
        else:
            backward(scaled)

    return run


def attach(owned: list[ManagedParameter], gradients: list[Tensor | None]) -> None:
    """Make the gradients the targets' ``.grad``, rounded here, once, where a target has a narrower dtype."""
    for entry, gradient in zip(owned, gradients, strict=True):
        if gradient is not entry.target.grad:
            # to() copies nothing where the dtype is the same.
            entry.target.grad = None if gradient is None else gradient.to(entry.target.dtype)


def add_after_gradient(
    owned: list[ManagedParameter], add: Callable[[ManagedParameter], None], hooks: list[RemovableHandle]
) -> None:
    """Call ``add(entry)`` each time autograd has put a gradient into ``entry.parameter.grad``.

    Args:
        owned: whose gradients they are.
        add: takes one.
        hooks: each is added to it once it is on, to be taken off by `remove`.
    """

    def hook_of(entry: ManagedParameter) -> Callable[[Tensor], None]:
        def hook(_: Tensor) -> None:
            # A hook runs with gradients enabled where the backward has create_graph=True.
            with torch.no_grad():
                add(entry)

        return hook

    # Each is in the list as soon as it is on.
    hooks.extend(entry.parameter.register_post_accumulate_grad_hook(hook_of(entry)) for entry in owned)


def remove(hooks: list[RemovableHandle]) -> None:
    """Take hooks off again, so that a model is left as it was given."""
    while hooks:
        hooks.pop().remove()


def all_finite(tensors: list[Tensor]) -> bool:
    """Return whether no element of any tensor is NaN or infinite (sparse tensors: of their values).

    Examples:
        >>> all_finite([torch.zeros(2), torch.tensor([1.0, float("inf")])])
        False
    """
    dense = [values(tensor) for tensor in tensors if tensor.numel()]
    if not dense:
        return True
    # The largest magnitude is not finite iff some element is not; unlike the 2-norm it cannot overflow.
    infinity = float("inf")
    largest = [torch.stack(fastpaths.norms(group, infinity)) for group in alike(dense)]
    parts = [norms.isfinite().all() for norms in largest]
    # One answer for all of a device, and of several devices one as well.
    return bool(
        parts[0] if len(parts) == 1 else torch.stack([part.to(parts[0].device) for part in parts]).all()
    )


def values(tensor: Tensor) -> Tensor:
    """Return a gradient's elements on this rank: the tensor itself, its shard, or its summed values."""
    if type(tensor) is Tensor and not tensor.is_sparse:  # mostly
        # DTensor and coalesced sparse values take a slower path.
        return tensor
    return tensor.coalesce().values() if tensor.is_sparse else local_part(tensor)
