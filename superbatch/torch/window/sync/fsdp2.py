"""Access to the state of modules sharded by `torch.distributed.fsdp.fully_shard` (FSDP2).

FSDP2 has no public functions to reduce gradients outside of a backward, to free gradients that were not
reduced, or to read its settings. All private ones that are needed are in this file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

from ...devices import local_part


class FSDP2:
    """All modules of some models that are sharded by `fully_shard`."""

    def __init__(self, models: Iterable[nn.Module]) -> None:
        # By name, because importing the module takes longer than importing this library.
        self._modules: list[Any] = [
            module for model in models for module in model.modules() if is_fully_sharded(module)
        ]
        self._used: set[int] | None = None  # indices of parameters; None before `watch`

    @property
    def meshes(self) -> list[Any]:
        """The data-parallel meshes, of one dimension, or of two with replicas first (HSDP)."""
        return [group.mesh_info.mesh for group in self._groups()]

    @property
    def replicates(self) -> bool:
        """True if some parameters are replicated over ranks beside being sharded (HSDP)."""
        return any(mesh.ndim > 1 for mesh in self.meshes)

    def managed(self) -> set[int]:
        """Return the ids of the sharded parameters."""
        return {id(each.sharded_param) for each in self._parameters()}

    def bytes(self) -> tuple[int, int]:
        """Return the bytes of a rank's unsharded gradients, and the bytes of its shards."""
        kept, shards = 0, 0
        for group in self._groups():
            policy = group.mp_policy
            for each in group.fsdp_params:
                if each.sharded_param.requires_grad:
                    local = local_part(each.sharded_param)
                    # In this dtype FSDP2 keeps unreduced gradients.
                    dtype = policy.reduce_dtype or policy.param_dtype or local.dtype
                    kept += each._orig_size.numel() * dtype.itemsize
                    shards += local.nbytes
        return kept, shards

    def reshard(self) -> None:
        """Register the sharded parameters in the modules, after a forward has left gathered ones."""
        for group in self._groups():
            if not group.is_sharded:
                group._to_sharded()

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Gather all parameters at the start of the block; `flush`, or an error in the block, frees them."""
        with ExitStack() as stack:
            for group in self._groups():
                # Without both settings FSDP2 would free the gathered parameters after the forward or the
                # backward.
                for name, value in (("reshard_after_backward", False), ("post_forward_mesh_info", None)):
                    stack.callback(setattr, group, name, getattr(group, name))
                    setattr(group, name, value)
            for group in self._groups():
                # FSDP2 does this in the first forward, which comes later.
                group.lazy_init()
                group.unshard()
                group.wait_for_unshard()
            try:
                yield
            except BaseException:
                self.discard()
                raise

    def settings(self) -> ExitStack:
        """Return a context that restores all settings at its end; inside, gradients are sums if possible."""
        stack = ExitStack()
        for group in self._groups():
            for name in _SETTINGS:
                if hasattr(group, name):
                    stack.callback(setattr, group, name, getattr(group, name))
        # Several states share one context, which is restored once.
        for context in {id(state._state_ctx): state._state_ctx for state in self._states()}.values():
            stack.callback(setattr, context, "is_last_backward", context.is_last_backward)
        for group in self._groups():
            if self.sums:
                group.gradient_divide_factor, group.force_sum_reduction_for_comms = 1.0, True
            else:
                group.reduce_scatter_reduce_op = None
        return stack

    @property
    def sums(self) -> bool:
        """True if gradients can be summed over the ranks; False in torch 2.6, which computes their mean."""
        return all(hasattr(group, "force_sum_reduction_for_comms") for group in self._groups())

    def set(self, *, scatters: bool, reduces: bool) -> None:
        """Set how a backward reduces its gradients.

        Args:
            scatters: reduce and scatter them.
            reduces: also reduce them over replicas, if there are any.
        """
        for group in self._groups():
            group.reduce_grads, group.all_reduce_grads = scatters, reduces

    def watch(self, stack: ExitStack) -> None:
        """Until the stack is closed, record the parameters that get a gradient; the others reduce zeros.

        Otherwise ranks that use different parameters would reduce different gradients in one exchange.
        """
        self._used = set()
        for module in self._modules:
            if hasattr(module, "set_reduce_scatter_unused_params"):  # a recent torch
                module.set_reduce_scatter_unused_params(True)
        for group in self._groups():
            if not all(hasattr(each, "_unsharded_param") for each in group.fsdp_params):
                group.lazy_init()
                group.unshard()  # makes the gathered parameters, on which hooks are registered
                group.wait_for_unshard()
                group._to_sharded()
        for index, each in enumerate(self._parameters()):
            if each.sharded_param.requires_grad:
                record_used = partial(_record_used, self._used, index)
                stack.callback(each._unsharded_param.register_post_accumulate_grad_hook(record_used).remove)

    def used(self) -> list[float]:
        """Return 1 for each parameter that got a gradient since `watch`, else 0; empty before `watch`."""
        if self._used is None:
            return []
        return [float(index in self._used) for index, _ in enumerate(self._parameters())]

    def clear_unused(self, used: Sequence[float]) -> None:
        """Remove the zero gradients of parameters that got a gradient on no rank since `watch`.

        Args:
            used: the numbers of `used`, summed over the ranks.
        """
        if self._used is None:
            return
        for each, ranks in zip(self._parameters(), used, strict=True):
            if not ranks:
                each.sharded_param.grad = None
        self._used = None

    def unreduced(self) -> list[float]:
        """Return 1 for each parameter that has an unreduced gradient on this rank, else 0."""
        return [float(_gradient_of(each) is not None) for each in self._parameters()]

    def flush(self, unreduced: Sequence[float]) -> None:
        """Reduce and scatter the unreduced gradients.

        Args:
            unreduced: the numbers that `unreduced` returns, summed over the ranks.
        """
        for each, ranks in zip(self._parameters(), unreduced, strict=True):
            if ranks and _gradient_of(each) is None and hasattr(each, "_unsharded_param"):
                each._unsharded_param.grad = torch.zeros_like(each._unsharded_param)
        before = [
            (group, {name: getattr(group, name) for name in _SWITCHES if hasattr(group, name)})
            for group in self._groups()
        ]
        self.set(scatters=True, reduces=True)
        for group in self._groups():
            # A group without unreduced gradients need not send zeros, unless HSDP's replicas wait for its
            # sum.
            if hasattr(group, "reduce_scatter_unused_params") and group._partial_reduce_output is None:
                group.reduce_scatter_unused_params = False
        for group in self._groups():
            if all(hasattr(each, "_unsharded_param") for each in group.fsdp_params):
                group.post_backward()
        for state in self._roots():
            state._state_ctx.is_last_backward = True
            state._root_post_backward_final_callback()  # FSDP2's own end of the last backward
        for group, switches in before:
            for name, value in switches.items():
                setattr(group, name, value)

    def scale(self, factor: float) -> None:
        """Multiply the unreduced gradients."""
        for each in self._parameters():
            gradient = _gradient_of(each)
            if gradient is not None:
                gradient.mul_(factor)
        for group in self._groups():
            if group._partial_reduce_output is not None:
                group._partial_reduce_output.mul_(factor)

    def discard(self) -> None:
        """Free unreduced gradients, and reset the state that a failed forward or backward has left."""
        for state in self._roots():
            _reset(state)
        self.reshard()  # after `gathered`, parameters that no forward has used are still gathered
        for each in self._parameters():
            each.unsharded_accumulated_grad = None
            if hasattr(each, "_unsharded_param"):
                each._unsharded_param.grad = None

    def exchanges(self) -> dict[str, int]:
        """Return the number of exchanges so far in each process group."""
        groups = {pg.group_name: pg for group in self._groups() for pg in _process_groups(group)}
        return {name: pg._get_sequence_number_for_group() for name, pg in groups.items()}

    @contextmanager
    def skipping(self, began: Mapping[str, int]) -> Iterator[None]:
        """Skip as many exchanges in the block as were made since a turn began.

        Args:
            began: result of `exchanges` at the beginning of the turn.
        """
        left = {name: number - began.get(name, 0) for name, number in self.exchanges().items()}
        with ExitStack() as stack:
            for name in _EXCHANGES:
                if hasattr(dist, name):
                    stack.callback(setattr, dist, name, getattr(dist, name))
                    setattr(dist, name, _skipping(getattr(dist, name), left))
            yield

    def _states(self) -> list[Any]:
        return [module._get_fsdp_state() for module in self._modules]

    def _roots(self) -> list[Any]:
        """Return the states that have run a forward as roots, each once."""
        return list({id(state): state for state in self._states() if state._is_root}.values())

    def _groups(self) -> Iterator[Any]:
        seen: set[int] = set()
        for state in self._states():
            for group in _groups_of(state):
                if id(group) not in seen:
                    seen.add(id(group))
                    yield group

    def _parameters(self) -> Iterator[Any]:
        for group in self._groups():
            yield from group.fsdp_params


_SETTINGS = (
    "reduce_grads",
    "all_reduce_grads",
    "gradient_divide_factor",
    "force_sum_reduction_for_comms",
    "reduce_scatter_reduce_op",
    "reduce_scatter_unused_params",
)


_SWITCHES = ("reduce_grads", "all_reduce_grads", "reduce_scatter_unused_params")


def is_fully_sharded(module: nn.Module) -> bool:
    """Return whether a module was sharded by `fully_shard`.

    Examples:
        >>> is_fully_sharded(nn.Linear(1, 1))
        False
    """
    return any(kind.__name__ == "FSDPModule" for kind in type(module).__mro__)


# Functions of torch.distributed that FSDP2 calls, in any of its versions.
_EXCHANGES = (
    "all_gather_into_tensor",
    "all_gather_single",
    "reduce_scatter_tensor",
    "reduce_scatter_single",
    "all_reduce",
)


def _skipping(exchange: Callable[..., Any], left: dict[str, int]) -> Callable[..., Any]:
    def skip_or_call(*args: Any, **kwargs: Any) -> Any:
        name = getattr(kwargs.get("group"), "group_name", "")
        if not left.get(name):
            return exchange(*args, **kwargs)
        left[name] -= 1
        return None

    return skip_or_call


def _process_groups(group: Any) -> list[Any]:
    found = [group._all_gather_process_group, group._reduce_scatter_process_group]
    return [*found, group._all_reduce_process_group] if group.mesh_info.mesh.ndim > 1 else found


def _groups_of(state: Any) -> Sequence[Any]:
    several = getattr(state, "_fsdp_param_groups", None)
    if several is not None:
        return several
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def _record_used(used: set[int], index: int, parameter: Tensor) -> None:
    used.add(index)


def _gradient_of(parameter: Any) -> Tensor | None:
    if parameter.unsharded_accumulated_grad is not None:
        return parameter.unsharded_accumulated_grad
    unsharded = getattr(parameter, "_unsharded_param", None)
    return None if unsharded is None else unsharded.grad


def _reset(root: Any) -> None:
    """Reset a root and all modules below it to the state between two updates."""
    if hasattr(root, "_reset_iter_state"):  # a recent torch
        root._reset_iter_state()
        return
    context, exchange = root._state_ctx, root._comm_ctx
    context.iter_forward_root, context.post_backward_final_callback_queued = None, False
    exchange.all_gather_state = None
    exchange.post_forward_order.clear()
    for name, nothing in (("reduce_scatter_state", None), ("reduce_scatter_states", [])):
        if hasattr(exchange, name):
            setattr(exchange, name, nothing)
    for state in context.all_states:
        state._modules_to_run_forward.clear()
        state._training_state = TrainingState.IDLE
        for group in _groups_of(state):
            group.finalize_backward()  # waits for reductions that are running
            group._training_state = TrainingState.IDLE
            group._partial_reduce_output = None
            group._to_sharded()
