"""BatchNorm where a batch is processed in micro-batches: refused, frozen, or per micro-batch.

Normalising per micro-batch is another function than normalising over the batch (its gradient is that of
"ghost" batch normalisation, arXiv:1705.08741), so it is never chosen silently. What can be kept exact is
kept: the running statistics move once per update, by the batch's own mean and variance, pooled from the
micro-batches (Chan, Golub, LeVeque 1979)::

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

Seen = tuple[int, Tensor, Tensor]
"""Values per channel, mean and unbiased variance of one call."""


def find_batchnorms(models: Iterable[nn.Module]) -> dict[str, _BatchNorm]:
    """Return every BatchNorm of the models by its path, whatever its mode.

    Examples:
        >>> list(find_batchnorms([nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))]))
        ['1']
    """
    found: dict[str, _BatchNorm] = {}
    for index, model in enumerate(models):
        for path, module in model.named_modules():
            # The private base of BatchNorm1d/2d/3d, the lazy ones and SyncBatchNorm; InstanceNorm is no
            # subclass.
            if isinstance(module, _BatchNorm):
                # Without a prefix for the first model: error texts show the name that the user wrote.
                found[path if index == 0 else f"models[{index}].{path}"] = module
    return found


def refuse(batchnorms: dict[str, _BatchNorm]) -> None:
    """Raise if a BatchNorm would normalise with the statistics of its input.

    Raises:
        CoupledSamplesError: it names the modules and the three choices.
    """
    if not batchnorms:
        return
    coupled = [path for path, module in batchnorms.items() if uses_batch_statistics(module)]
    if coupled:
        named = ", ".join(repr(path) for path in coupled[:3]) + (
            f" and {len(coupled) - 3} more" if coupled[3:] else ""
        )
        raise CoupledSamplesError(
            f"The model has BatchNorm in training mode ({named}), which normalises a sample by the other "
            "samples that it sees, so micro-batches do not give the gradient of the batch. Choose "
            "superbatch.torch.WholeBatch (the batch's own statistics, exact), "
            "participants=[FrozenBatchNorm()] (running statistics, exact), or "
            "participants=[GhostBatchNorm()] (another function: normalised per micro-batch, running "
            "statistics pooled over the batch)."
        )


def of_windows(batchnorms: dict[str, _BatchNorm], choice: str, sync: Sync) -> Frozen | Pooled | None:
    """Return the participant for BatchNorms during windows, None for none.

    Args:
        batchnorms: from `find_batchnorms`.
        choice: ``"error"``, ``"per_microbatch"`` or ``"frozen"``.
        sync: the ranks that share a batch.

    Raises:
        CoupledSamplesError: a BatchNorm cannot be used so.

    Examples:
        >>> from superbatch.torch.window.sync.local import Local
        >>> of_windows({"1": nn.BatchNorm1d(2)}, "error", Local()) is None
        True
    """
    if not batchnorms or choice == "error":
        return None
    return Frozen(batchnorms) if choice == "frozen" else Pooled(batchnorms, sync)


class Frozen:
    """BatchNorms that use their running statistics during a window, whatever their mode outside it."""

    def __init__(self, batchnorms: dict[str, _BatchNorm]) -> None:
        # In evaluation mode a BatchNorm without running statistics still normalises with those of its input.
        for path, module in batchnorms.items():
            if module.running_mean is None:
                raise CoupledSamplesError(
                    f"FrozenBatchNorm cannot freeze {path!r}, a BatchNorm without running statistics: it "
                    "normalises with its input's own in evaluation mode too. Give it "
                    "track_running_stats=True, or replace it by GroupNorm or LayerNorm."
                )
        self._modules = list(batchnorms.values())
        self._training: list[bool] = []

    def begin(self) -> None:
        """Switch to evaluation mode."""
        self._training = [module.training for module in self._modules]
        for module in self._modules:
            # The attribute alone: eval() calls train(), which a subclass may override.
            module.training = False

    @no_savepoint
    def savepoint(self) -> None:
        """No-op: micro-batches change nothing here."""

    def rollback(self) -> bool:
        """No-op: micro-batches change nothing here."""
        return True

    def restart(self) -> None:
        """No-op: the modules stay in evaluation mode."""

    def prepare(self) -> None:
        """No-op: running statistics stay as they are."""

    def commit(self) -> None:
        """Restore the mode of each module."""
        self.restore()

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: running statistics stay as they are."""
        return {"norms": None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """No-op: running statistics stay as they are."""

    def restore(self) -> None:
        """Restore the mode of each module."""
        # Not strict: before `begin` the list is empty, and `restore` may be called for a window that failed
        # there.
        for module, training in zip(self._modules, self._training, strict=False):
            module.training = training
        self._training = []


class Pooled:
    """BatchNorms that normalise per micro-batch, and whose running statistics move once per window.

    During the window a module's momentum is 1, so that after each of its calls its running statistics *are*
    those of the micro-batch it saw. A module called several times per forward has one pool per call.
    """

    def __init__(self, batchnorms: dict[str, _BatchNorm], sync: Sync) -> None:
        # A forward that communicates deadlocks where one rank has 3 micro-batches and another 2.
        if sync.shared and any(isinstance(module, nn.SyncBatchNorm) for module in batchnorms.values()):
            raise CoupledSamplesError(
                "GhostBatchNorm cannot be used with SyncBatchNorm, which communicates in every forward: "
                "ranks may have different numbers of micro-batches. Use BatchNorm; GhostBatchNorm pools "
                "its running statistics over the ranks."
            )
        self._sync = sync
        self._modules = [module for module in batchnorms.values() if module.track_running_stats]
        self._before: list[dict[str, Any]] = []
        self._hooks: list[RemovableHandle] = []
        # Off during a backward: what a checkpoint recomputes there must not be counted again.
        self.watching = False
        self._call: dict[_BatchNorm, int] = {}
        self._pools: dict[_BatchNorm, list[list[Seen]]] = {}
        self._moved: dict[_BatchNorm, tuple[Tensor, Tensor, Tensor]] | None = None

    def begin(self) -> None:
        """Start to watch."""
        self._moved = None
        # Read when the window begins: a user may freeze some layers with eval() between two windows.
        self._pools = {module: [] for module in self._modules if uses_batch_statistics(module)}
        for module in self._pools:
            self._before.append(
                {
                    "module": module,
                    "momentum": module.momentum,
                    # Clones: during the window the module's own tensors hold the statistics of one micro-
                    # batch.
                    "mean": _clone(module.running_mean),
                    "var": _clone(module.running_var),
                    "batches": _clone(module.num_batches_tracked),
                }
            )
            # running = (1 - 1) * running + 1 * new: after a call the buffers hold its own statistics.
            module.momentum = 1.0
            self._hooks.append(module.register_forward_hook(self._observe, with_kwargs=True))

    def savepoint(self) -> None:
        """Count the calls of each module from the first again."""
        # A module that the forward calls twice fills pool 0, then pool 1; each micro-batch starts at pool 0.
        self._call.clear()
        self.watching = True

    def rollback(self) -> bool:
        """Leave out the statistics of the last micro-batch."""
        for module, calls in self._call.items():
            # The failed micro-batch reached the first `calls` pools of this module, e.g. 1 of 2 before the
            # failure.
            for pool in self._pools[module][:calls]:
                pool.pop()
        self._call.clear()
        return True

    def restart(self) -> None:
        """Restore, and begin again."""
        self.restore()
        self.begin()

    def state_dict(self) -> dict[str, Any]:
        """Return the statistics seen so far and those before the window, in the order of the modules."""
        statistics = [{key: before[key] for key in ("mean", "var", "batches")} for before in self._before]
        pools = [[list(pool) for pool in calls] for calls in self._pools.values()]
        norms = [{**before, "pools": each} for before, each in zip(statistics, pools, strict=True)]
        return {"norms": norms}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from what `state_dict` returned."""
        for before, saved in zip(self._before, state["norms"], strict=True):
            before.update({key: saved[key] for key in ("mean", "var", "batches")})
            self._pools[before["module"]] = [list(pool) for pool in saved["pools"]]

    def prepare(self) -> None:
        """Compute the statistics that `commit` sets: here it may fail, for the optimizer has not stepped."""
        sync = self._sync
        befores = {before["module"]: before for before in self._before}
        self._moved = {}
        with torch.no_grad():
            for module, pools in self._pools.items():
                before = befores[module]
                mean, var, batches = before["mean"], before["var"], before["batches"].clone()
                # A rank without any weight has seen nothing, but takes part in the sums.
                for call in range(sync.max(len(pools))):
                    seen = _pooled(module, pools[call] if call < len(pools) else [], sync)
                    # As torch does with momentum=None: a cumulative average, 1 / (calls so far).
                    batches += 1
                    momentum = 1.0 / float(batches) if before["momentum"] is None else before["momentum"]
                    mean, var = _towards(mean, seen[0], momentum), _towards(var, seen[1], momentum)
                self._moved[module] = mean, var, batches

    def commit(self) -> None:
        """Move the running statistics once, by those that `prepare` has computed."""
        # First, so that the momentum of 1 is off even if a copy below fails.
        self.restore()
        with torch.no_grad():
            for module, (mean, var, batches) in (self._moved or {}).items():
                _set(module.running_mean, mean)
                _set(module.running_var, var)
                _set(module.num_batches_tracked, batches)
        self._moved, self._pools = None, {}  # last: until then a second commit sets the same values

    def restore(self) -> None:
        """Leave the modules as they were given, running statistics aside."""
        while self._hooks:
            self._hooks.pop().remove()
        for before in self._before:
            before["module"].momentum = before["momentum"]
        self._before = []

    def _observe(self, module: Any, inputs: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
        # Forward hooks run once more inside a backward with activation checkpointing.
        if not self.watching:
            return
        call = self._call.get(module, 0)
        self._call[module] = call + 1
        pools = self._pools[module]
        if call == len(pools):
            pools.append([])
        # Values per channel: [N, C, L] has N * L of them. The input may be passed as a keyword.
        count = (inputs[0] if inputs else named["input"]).numel() // module.num_features
        pools[call].append((count, module.running_mean.clone(), module.running_var.clone()))


def _pooled(module: _BatchNorm, pool: list[Seen], sync: Sync) -> tuple[Tensor, Tensor]:
    """Mean and unbiased variance over all micro-batches and ranks."""
    assert module.running_mean is not None
    # An empty [0, C] term keeps torch.cat defined on a rank that saw no micro-batch.
    nothing = in_float64(module.running_mean).new_zeros((0, module.num_features))
    means = torch.cat([nothing, *(in_float64(mean).unsqueeze(0) for _, mean, _ in pool)])
    variances = torch.cat([nothing, *(in_float64(variance).unsqueeze(0) for *_, variance in pool)])
    # Made on the host, and moved without waiting.
    n_i = torch.tensor([count for count, *_ in pool], dtype=torch.float64).reshape(-1, 1)
    n_i = n_i.to(means.device, non_blocking=True)
    n = sync.sum_tensor(n_i.sum())
    mean = sync.sum_tensor((n_i * means).sum(0)) / n
    # Chan's update: the variance inside each micro-batch plus that between their means.
    m2 = sync.sum_tensor(((n_i - 1) * variances + n_i * (means - mean).square()).sum(0))
    # Unbiased, as torch stores it in running_var.
    return mean, m2 / (n - 1)


def _towards(running: Tensor, new: Tensor, momentum: float) -> Tensor:
    # The dtype first: the device may have no float64.
    return running.lerp(new.to(running.dtype).to(running.device), momentum)


def _clone(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.clone()


def _set(tensor: Tensor | None, value: Tensor | None) -> None:
    if tensor is not None and value is not None:
        tensor.copy_(value)
