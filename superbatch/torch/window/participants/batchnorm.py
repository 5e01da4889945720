"""Participants for BatchNorm in micro-batches: an error, frozen, or normalised per micro-batch.

Normalising per micro-batch ("ghost" batch normalisation, arXiv:1705.08741) computes another function than
normalising over the batch, so the user must choose it. The running statistics remain exact: they change once
per update, by the batch's mean and variance, pooled from the micro-batches (Chan, Golub, LeVeque 1979)::

    n = sum n_i     mean = sum n_i mean_i / n     M2 = sum [ (n_i - 1) var_i + n_i (mean_i - mean)^2 ]
    running_mean = (1 - momentum) running_mean + momentum mean
    running_var  = (1 - momentum) running_var  + momentum M2 / (n - 1)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.hooks import RemovableHandle

from superbatch.errors import CoupledSamplesError
from superbatch.torch.checks.coupling import uses_batch_statistics
from superbatch.torch.devices import in_float64

from ..participant import no_savepoint
from ..sync.sync import Sync

CallStatistics = tuple[int, Tensor, Tensor]
"""Number of values per channel, mean and unbiased variance of one call."""


def find_batchnorms(models: Iterable[nn.Module]) -> dict[str, _BatchNorm]:
    """Return every BatchNorm of the models, in either mode, by its path.

    Examples:
        >>> list(find_batchnorms([nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))]))
        ['1']
    """
    found: dict[str, _BatchNorm] = {}
    for index, model in enumerate(models):
        for path, module in model.named_modules():
            # The base class of BatchNorm1d/2d/3d, the lazy ones and SyncBatchNorm, but not of InstanceNorm.
            if isinstance(module, _BatchNorm):
                # No prefix for the first model, so that errors show the path in the user's model.
                found[path if index == 0 else f"models[{index}].{path}"] = module
    return found


def refuse(batchnorms: dict[str, _BatchNorm]) -> None:
    """Raise `CoupledSamplesError` if a BatchNorm would normalise with the statistics of its input."""
    if not batchnorms:
        return
    # In evaluation mode, with running statistics, a BatchNorm normalises each sample by itself.
    coupled = [path for path, module in batchnorms.items() if uses_batch_statistics(module)]
    if coupled:
        named = ", ".join(repr(path) for path in coupled[:3]) + (
            f" and {len(coupled) - 3} more" if coupled[3:] else ""
        )
        raise CoupledSamplesError(
            f"The model has BatchNorm in training mode ({named}), which normalises each sample by the other "
            "samples of its batch, so micro-batches do not give the gradient of the batch. Use "
            "superbatch.torch.WholeBatch (exact, with the batch's statistics), pass "
            "participants=[FrozenBatchNorm()] (exact, with running statistics), or pass "
            "participants=[GhostBatchNorm()] (a different function, with each micro-batch's statistics)."
        )


def of_windows(batchnorms: dict[str, _BatchNorm], choice: str, sync: Sync) -> Frozen | Pooled | None:
    """Return the participant for BatchNorms; None if there are none, or if they raise.

    Args:
        batchnorms: from `find_batchnorms`.
        choice: ``"error"``, ``"per_microbatch"`` or ``"frozen"``.
        sync: the ranks that share a batch.

    Raises:
        CoupledSamplesError: the choice is not possible for a BatchNorm.

    Examples:
        >>> from superbatch.torch.window.sync.local import Local
        >>> of_windows({"1": nn.BatchNorm1d(2)}, "error", Local()) is None
        True
    """
    if not batchnorms or choice == "error":
        return None
    return Frozen(batchnorms) if choice == "frozen" else Pooled(batchnorms, sync)


class Frozen:
    """BatchNorms that use their running statistics during a window, whatever their mode outside of it."""

    def __init__(self, batchnorms: dict[str, _BatchNorm]) -> None:
        for path, module in batchnorms.items():
            if module.running_mean is None:
                raise CoupledSamplesError(
                    f"FrozenBatchNorm cannot freeze the BatchNorm {path!r}, which has no running statistics "
                    "and uses those of its input in evaluation mode too. Make it with "
                    "track_running_stats=True, or replace it by GroupNorm or LayerNorm."
                )
        self._modules = list(batchnorms.values())
        self._training: list[bool] = []

    def begin(self) -> None:
        """Switch to evaluation mode."""
        self._training = [module.training for module in self._modules]
        for module in self._modules:
            # Not by eval(), because a subclass may override train().
            module.training = False

    @no_savepoint
    def savepoint(self) -> None:
        """No-op: micro-batches do not change frozen statistics."""

    def rollback(self) -> bool:
        """No-op: micro-batches do not change frozen statistics."""
        return True

    def restart(self) -> None:
        """No-op: the modules stay in evaluation mode."""

    def prepare(self) -> None:
        """No-op: running statistics do not change."""

    def commit(self) -> None:
        """Restore the mode of each module."""
        self.restore()

    def state_dict(self) -> dict[str, Any]:
        """Return no state: running statistics do not change."""
        return {"norms": None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """No-op: running statistics do not change."""

    def restore(self) -> None:
        """Restore the mode of each module."""
        # Not strict, because the list is empty if `begin` has failed.
        for module, training in zip(self._modules, self._training, strict=False):
            module.training = training
        self._training = []


class Pooled:
    """BatchNorms that normalise per micro-batch, and whose running statistics change once per window.

    During the window a module's momentum is 1, so that after each call its running statistics are those of
    the call's micro-batch. A module called several times per forward has one pool per call.
    """

    def __init__(self, batchnorms: dict[str, _BatchNorm], sync: Sync) -> None:
        # Forwards that communicate deadlock if one rank has 3 micro-batches and another has 2.
        if sync.shared and any(isinstance(module, nn.SyncBatchNorm) for module in batchnorms.values()):
            raise CoupledSamplesError(
                "GhostBatchNorm does not work with SyncBatchNorm, which communicates in every forward, "
                "because ranks may have different numbers of micro-batches. Use BatchNorm instead; "
                "GhostBatchNorm pools its running statistics over the ranks."
            )
        self._sync = sync
        self._modules = [module for module in batchnorms.values() if module.track_running_stats]
        self._before: list[dict[str, Any]] = []
        self._hooks: list[RemovableHandle] = []
        # False during a backward, in which activation checkpointing repeats forwards that are pooled already.
        self.watching = False
        self._call: dict[_BatchNorm, int] = {}
        self._pools: dict[_BatchNorm, list[list[CallStatistics]]] = {}
        # Mean, variance and number of batches that `commit` sets; None before `prepare`.
        self._prepared: dict[_BatchNorm, tuple[Tensor, Tensor, Tensor]] | None = None

    def begin(self) -> None:
        """Copy the running statistics, set the momentum to 1, and register hooks."""
        self._prepared = None
        # At each window, because a user may call eval() on some layers between two windows.
        self._pools = {module: [] for module in self._modules if uses_batch_statistics(module)}
        for module in self._pools:
            self._before.append(
                {
                    "module": module,
                    "momentum": module.momentum,
                    # Cloned, because during the window the module's tensors hold a micro-batch's statistics.
                    "mean": _clone(module.running_mean),
                    "var": _clone(module.running_var),
                    "batches": _clone(module.num_batches_tracked),
                }
            )
            # running = (1 - 1) * running + 1 * new, so a call leaves its own statistics in the buffers.
            module.momentum = 1.0
            self._hooks.append(module.register_forward_hook(self._pool_call, with_kwargs=True))

    def savepoint(self) -> None:
        """Set the number of calls of each module to zero."""
        # A module that a forward calls twice fills pool 0, then pool 1; each micro-batch starts at pool 0.
        self._call.clear()
        self.watching = True

    def rollback(self) -> bool:
        """Remove the statistics of the last micro-batch."""
        for module, calls in self._call.items():
            # The failed micro-batch has reached only the first `calls` pools of this module.
            for pool in self._pools[module][:calls]:
                pool.pop()
        self._call.clear()
        return True

    def restart(self) -> None:
        """Call `restore`, then `begin`."""
        self.restore()
        self.begin()

    def state_dict(self) -> dict[str, Any]:
        """Return the pools so far and the statistics before the window, in the order of the modules."""
        statistics = [{key: before[key] for key in ("mean", "var", "batches")} for before in self._before]
        pools = [[list(pool) for pool in calls] for calls in self._pools.values()]
        norms = [{**before, "pools": each} for before, each in zip(statistics, pools, strict=True)]
        return {"norms": norms}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state of `state_dict`."""
        for before, saved in zip(self._before, state["norms"], strict=True):
            before.update({key: saved[key] for key in ("mean", "var", "batches")})
            self._pools[before["module"]] = [list(pool) for pool in saved["pools"]]

    def prepare(self) -> None:
        """Compute the statistics that `commit` sets, because a failure here can still restore the window."""
        sync = self._sync
        befores = {before["module"]: before for before in self._before}
        self._prepared = {}
        with torch.no_grad():
            for module, pools in self._pools.items():
                before = befores[module]
                mean, var, batches = before["mean"], before["var"], before["batches"].clone()
                # A rank of weight 0 has empty pools, but takes part in the sums.
                for call in range(sync.max(len(pools))):
                    pooled = _pooled(module, pools[call] if call < len(pools) else [], sync)
                    # With momentum=None torch makes a cumulative average: 1 / (calls so far).
                    batches += 1
                    momentum = 1.0 / float(batches) if before["momentum"] is None else before["momentum"]
                    mean, var = _average(mean, pooled[0], momentum), _average(var, pooled[1], momentum)
                self._prepared[module] = mean, var, batches

    def commit(self) -> None:
        """Set the running statistics to those that `prepare` has computed."""
        # First, so that the momentum is restored even if a copy below fails.
        self.restore()
        with torch.no_grad():
            for module, (mean, var, batches) in (self._prepared or {}).items():
                _set(module.running_mean, mean)
                _set(module.running_var, var)
                _set(module.num_batches_tracked, batches)
        self._prepared, self._pools = None, {}  # last, so that a second `commit` after an error can repeat it

    def restore(self) -> None:
        """Restore the modules' momentum and remove the hooks; `BufferKeeper` restores the statistics."""
        while self._hooks:
            self._hooks.pop().remove()
        for before in self._before:
            before["module"].momentum = before["momentum"]
        self._before = []

    def _pool_call(self, module: Any, inputs: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
        """Forward hook: add the statistics of this call to the pool of the call's number."""
        # With activation checkpointing, forward hooks run again inside a backward.
        if not self.watching:
            return
        call = self._call.get(module, 0)
        self._call[module] = call + 1
        pools = self._pools[module]
        if call == len(pools):
            pools.append([])
        # Values per channel: an input of shape [N, C, L] has N * L. The input may be a keyword argument.
        count = (inputs[0] if inputs else named["input"]).numel() // module.num_features
        pools[call].append((count, module.running_mean.clone(), module.running_var.clone()))


def _pooled(module: _BatchNorm, pool: list[CallStatistics], sync: Sync) -> tuple[Tensor, Tensor]:
    """Return the mean and the unbiased variance over all micro-batches and ranks."""
    assert module.running_mean is not None
    # An empty tensor of shape [0, C], because torch.cat needs a tensor on a rank without micro-batches.
    nothing = in_float64(module.running_mean).new_zeros((0, module.num_features))
    means = torch.cat([nothing, *(in_float64(mean).unsqueeze(0) for _, mean, _ in pool)])
    variances = torch.cat([nothing, *(in_float64(variance).unsqueeze(0) for *_, variance in pool)])
    n_i = torch.tensor([count for count, *_ in pool], dtype=torch.float64).reshape(-1, 1)
    n_i = n_i.to(means.device, non_blocking=True)
    n = sync.sum_tensor(n_i.sum())
    mean = sync.sum_tensor((n_i * means).sum(0)) / n
    # Chan et al.: the variance inside each micro-batch plus that between their means.
    m2 = sync.sum_tensor(((n_i - 1) * variances + n_i * (means - mean).square()).sum(0))
    # torch stores the unbiased variance in running_var.
    return mean, m2 / (n - 1)


def _average(running: Tensor, new: Tensor, momentum: float) -> Tensor:
    # The dtype first, because the device may have no float64.
    return running.lerp(new.to(running.dtype).to(running.device), momentum)


def _clone(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.clone()


def _set(tensor: Tensor | None, value: Tensor | None) -> None:
    if tensor is not None and value is not None:
        tensor.copy_(value)
