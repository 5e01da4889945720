"""Gradient caching: the exact gradient of a loss over the embeddings of a whole batch, in micro-batches.

A contrastive loss depends on all samples at once, so it is not a mean over micro-batches. But it depends on
them only through their embeddings z, which are small::

    dL/dtheta = sum_i  dL/dz_i  dz_i/dtheta  +  dL/dtheta at constant z

1. Compute the embeddings z_i of every micro-batch without a graph, and record the random state before each.
2. Compute the loss over all z, and its gradient with respect to each z_i. Parameters of the loss itself (a
   learnt temperature) get their gradient here, once.
3. Run every micro-batch again, with the same random numbers and buffers, and run backward from the cached
   dL/dz_i.

Luyu Gao, Yunyi Zhang, Jiawei Han, Jamie Callan: "Scaling Deep Contrastive Learning Batch Size under Memory
Limited Setup", arXiv:2101.06983.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from superbatch.batch.split import TokenBudget
from superbatch.errors import InputError, WindowError

from ..window.participants.buffers import BufferKeeper
from ..window.sync.find import find_sync
from ..window.sync.sync import Sync
from .encoders import Encode, Encoder, all_models, as_encoders
from .new_gradients import NewGradients, leaves_of, outside_autocast
from .one_pass import OnePass, refuse_batch_statistics
from .replay import Replay


def cached_gradients(
    encode: Encode | Mapping[str, Encode],
    loss_fn: Callable[[Any], Tensor],
    batch: Any,
    microbatch_size: int | TokenBudget | Mapping[str, int | TokenBudget] | None = None,
    *,
    models: nn.Module | list[nn.Module] | tuple[nn.Module, ...] | None = None,
    unsplit: Collection[str] = (),
    per_sample: Collection[str] = (),
    scale: float | Callable[[Tensor], Tensor] = 1.0,
    group: Any = None,
) -> Tensor:
    """Add the exact gradient of a loss over the embeddings of a whole batch to ``.grad``, in micro-batches.

    The result is that of ``loss_fn(encode(batch)).backward()``, in the memory of one micro-batch and all
    embeddings. It takes two forwards and one backward; one forward if the batch is one micro-batch. Gradients
    are added to those in ``.grad``. An error leaves gradients, buffers and random state as before the call.
    Under ``torch.no_grad()`` only the loss is computed.

    Each sample must be encoded by itself. BatchNorm in training mode raises; coupling written by hand is not
    detected (`verify` finds it). Every micro-batch starts with the buffers before the call, as all samples of
    the large batch do. Afterwards buffers and random state are as after one forward.

    Args:
        encode: function of a micro-batch that returns its embeddings: tensors with one row per sample, in any
            nesting. It also returns labels that the loss needs. For several encoders with different numbers
            of samples (queries, documents), pass a mapping of names to encoders.
        loss_fn: function of the embeddings of all samples, in the same structure (a dict of them for several
            encoders). It returns one loss of any kind, which is not averaged. A dict of losses raises:
            return their sum.
        batch: the batch, any nested structure; for several encoders a mapping of the same names.
            Micro-batches are moved to the device of their encoder. The micro-batches of a Window (`windows`)
            are taken as they are.
        microbatch_size: largest number of samples in a micro-batch, or a TokenBudget; for several encoders
            also a mapping. None only for a Window.
        models: every module that encoders and loss use; not needed if these are modules or their methods.
            For parameters outside of modules pass ``nn.ParameterList([p])``.
        unsplit: paths in the batch that every micro-batch gets unsplit; for several encoders each path begins
            with the encoder's name.
        per_sample: paths of lists with one entry per sample.
        scale: factor of the loss before the backward, or a function such as ``scaler.scale`` of a GradScaler.
        group: the process group whose ranks share the batch, if models are not wrapped in
            DistributedDataParallel. With it or with wrapped models, `loss_fn` gets the embeddings of all
            ranks, in their order, and must compute the same loss on each; gradients of parameters are summed
            over the ranks once.

    Returns:
        The loss of the whole batch, not scaled and without a graph.

    Raises:
        CoupledSamplesError: a module normalises with statistics of the batch, or a buffer depends on samples.
        InputError: an argument, an output of `encode` or the loss cannot be used, or the second
            forward does not repeat the first.
        SplitError: the batch cannot be split.
        OptimizerError: an optimizer steps parameters inside the backward.
        WindowError: another rank has failed.

    Examples:
        >>> def info_nce(z):
        ...     logits = nn.functional.normalize(z["query"]) @ nn.functional.normalize(z["document"]).T
        ...     return nn.functional.cross_entropy(logits / 0.05, torch.arange(len(logits)))
        >>> towers = {"query": nn.Linear(8, 4), "document": nn.Linear(6, 4)}
        >>> batch = {"query": torch.randn(64, 8), "document": torch.randn(64, 6)}
        >>> loss = cached_gradients(towers, info_nce, batch, microbatch_size=16)
        >>> towers["query"].weight.grad.shape, loss.requires_grad
        (torch.Size([4, 8]), False)

    Source: GradCache, arXiv:2101.06983.
    """
    # A ModuleDict is not a Mapping.
    encoders_of = encode.values() if isinstance(encode, Mapping | nn.ModuleDict) else [encode]
    _check_callables(*encoders_of, loss_fn)
    involved = all_models(encoders_of, loss_fn, models)
    paths = {"unsplit": unsplit, "per_sample": per_sample}
    names = list(encode) if isinstance(encode, Mapping | nn.ModuleDict) else None
    sync, scale = find_sync(involved, group, no_sync=True), _as_scale(scale)

    def begin() -> list[Encoder]:
        refuse_batch_statistics(involved)
        return as_encoders(encode, batch, microbatch_size, paths, involved)

    return _Call(_together(sync, begin), names, loss_fn, scale, involved, sync).run()


class _Call:
    """One call: its encoders, loss and models, and its passes in order."""

    def __init__(
        self,
        encoders: list[Encoder],
        names: list[str] | None,
        loss_fn: Callable[[Any], Tensor],
        scale: Callable[[Tensor], Tensor],
        models: list[nn.Module],
        sync: Sync,
    ) -> None:
        self._encoders, self._names = encoders, names
        self._loss_fn, self._scale = loss_fn, scale
        self._models, self._sync = models, sync
        self._devices = {parameter.device for model in models for parameter in model.parameters()}

    def run(self) -> Tensor:
        """Run all passes; after an error everything is as before."""
        # Recorded before anything changes, to restore it after an error.
        before, buffers = Replay(self._devices), OnePass(self._models)
        before.record()
        self._gradients = NewGradients(self._models)
        try:
            # The gradients are summed over ranks once, in `reduce`.
            with self._sync.no_sync():
                loss = self._passes(buffers)
        # BaseException, to restore everything after an interrupt too.
        except BaseException:
            self._gradients.discard()
            buffers.restore()
            before.back_to(0)
            raise
        self._gradients.add()
        return loss

    def _passes(self, buffers: OnePass) -> Tensor:
        _together(self._sync, partial(self._first_pass, buffers))
        value = _together(self._sync, self._loss_pass)
        loss = value.detach()
        _check_agreement(self._sync.gather(float(loss)) if self._sync.shared else [])
        if not torch.is_grad_enabled():
            return loss
        _together(self._sync, partial(self._back_from, value))
        del value  # and its graph
        # The second pass changes buffers and generators once more, so they are restored after it.
        random_after, buffers_after = (
            Replay(self._devices),
            BufferKeeper(self._models if buffers.touched() else []),
        )
        random_after.record()
        buffers_after.begin()
        _together(self._sync, self._second_pass)
        buffers_after.restore()
        random_after.back_to(0)
        if self._sync.shared:
            self._gradients.reduce(self._sync)
        return loss

    # -- the three steps ------------------------------------------------------------------------------------

    def _first_pass(self, buffers: OnePass) -> None:
        """Step 1: the embeddings."""
        # A single micro-batch keeps its graph, and is not repeated.
        only = sum(map(len, self._encoders)) == 1
        for encoder in self._encoders:
            encoder.first_pass(buffers, self._devices, on_outputs=self._hold_leaves, keep=only)
            if buffers.moved:  # the next encoder begins with the buffers that this one has left
                buffers = OnePass(self._models)
        # The second pass must not use weights that autocast has cast without a graph.
        torch.clear_autocast_cache()

    def _loss_pass(self) -> Tensor:
        """Step 2: the loss."""
        parts = [encoder.embeddings for encoder in self._encoders]
        # Shapes are compared first, because a collective with different shapes could hang.
        messages = self._sync.gather([part.message() for part in parts])
        joined = [part.join(self._sync, [m[i] for m in messages]) for i, part in enumerate(parts)]
        loss = self._loss_fn(
            joined[0] if self._names is None else dict(zip(self._names, joined, strict=True))
        )
        _check_loss(loss)
        return loss

    def _back_from(self, loss: Tensor) -> None:
        """Step 2: the gradient of the loss."""
        embeddings = [leaf for encoder in self._encoders for leaf in encoder.embeddings.leaves()]
        # Leaves outside of the models, e.g. a temperature that loss_fn closes over.
        for leaf in set(leaves_of([loss])).difference(embeddings):
            self._gradients.hold(leaf)
        with outside_autocast(self._devices):
            torch.autograd.backward(self._scale(loss))
        # Autograd may give one tensor to several leaves, but each needs its own.
        self._gradients.unshare(embeddings)
        for encoder in self._encoders:
            encoder.take_gradients()
        if self._sync.index:  # all ranks have computed the same gradient, so only that of rank 0 counts
            self._gradients.drop_parameters()

    def _second_pass(self) -> None:
        """Step 3: the gradients of the models."""
        for encoder in self._encoders:
            encoder.second_pass(self._backward)

    # -- helpers of the steps --------------------------------------------------------------------------------

    def _backward(self, outputs: list[Tensor], gradients: list[Tensor], *, first: bool) -> None:
        if outputs:
            with outside_autocast(self._devices):
                torch.autograd.backward(outputs, gradients)
        if first:
            self._gradients.unshare()

    def _hold_leaves(self, outputs: list[Tensor]) -> None:
        """Move the earlier gradients of the leaves that the backward will reach out of ``.grad``."""
        for leaf in leaves_of(outputs):
            # A parameter outside of the models would not be summed over ranks, or restored after an error.
            if not self._gradients.knows(leaf) and (isinstance(leaf, nn.Parameter) or self._sync.shared):
                raise InputError(
                    f"encode uses a parameter of shape {tuple(leaf.shape)} that is not in the models "
                    f"({', '.join(type(model).__name__ for model in self._models)}). Pass models=[...] with "
                    "every module that encode uses."
                )
            self._gradients.hold(leaf)


def _together(sync: Sync, work: Callable[[], Any]) -> Any:
    """Run a function on all ranks; if it fails on one, all raise, so that none waits for it."""
    if not sync.shared:
        return work()
    result, error = None, None
    try:
        result = work()
    except BaseException as raised:  # noqa: BLE001  (raised below, after the vote)
        error = raised
    failed = sync.vote(error is not None)
    if error is not None:
        raise error
    if failed:
        raise WindowError("Another rank that shares the batch has failed. Correct the error on that rank.")
    return result


def _check_callables(*functions: Any) -> None:
    for function in functions:
        if not callable(function):
            raise InputError(
                f"A {type(function).__name__} was passed in place of a function. Pass a function or a module "
                "as loss_fn=, and as encode= one of these or a mapping of names to them."
            )


def _as_scale(scale: Any) -> Callable[[Any], Any]:
    if callable(scale):
        return scale
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not math.isfinite(scale):
        raise InputError(
            f"scale={scale!r} is not a finite number. Pass a finite number, or a function of the loss such "
            "as scaler.scale."
        )
    return lambda loss: loss * scale


def _check_loss(loss: Any) -> None:
    given = wrong = ""
    do = "Return one number computed from the embeddings: a mean or a sum of the losses"
    if isinstance(loss, Mapping):
        given = f"a loss of type {type(loss).__name__}"
        wrong = "but a loss is one tensor"
        do = "Return one tensor, such as sum(losses.values()) without totals and metrics"
    elif not isinstance(loss, Tensor):
        given, wrong = f"a loss of type {type(loss).__name__}", "but a loss is one tensor"
    elif loss.numel() != 1 or not loss.is_floating_point():
        given, wrong = f"a loss of shape {tuple(loss.shape)}, {loss.dtype}", "but a loss is one real number"
    # Under no_grad only the value of the loss is computed.
    elif torch.is_grad_enabled() and not loss.requires_grad:
        given, wrong = "a loss without a graph", "which depends on no tensor that needs a gradient"
    if wrong:
        raise InputError(f"loss_fn returned {given}, {wrong}. {do}.")


def _check_agreement(losses: list[float]) -> None:
    """Raise if the losses of ranks differ, because each rank back-propagates its part of a single loss."""
    # NaN is not an error here: it is returned as the loss.
    if any(not math.isclose(loss, losses[0], rel_tol=1e-3) for loss in losses if loss == loss):
        raise InputError(
            f"The ranks have computed the different losses {losses} from the same embeddings, so their "
            "gradients are not those of one loss. Compute the same loss on every rank, without random "
            "numbers and with equal parameters."
        )
