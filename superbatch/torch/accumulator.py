"""The face: a batch in, one exact update out."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .. import normalize
from ..errors import InputError, WindowError, explain
from ..report.update import Update
from ..split import TokenBudget, cut, near_equal, sizes
from ..tree import count_samples, plan, take
from ..window import Window
from . import batchnorm as norms
from . import checks
from .boundary import Step
from .gradients import LOW_PRECISION, Gradients, InBuffers, InGrad, InMomentum, Owned
from .in_flight import WindowInFlight
from .plan import NonFinite, Plan
from .problem import Problem
from .snapshot import BufferKeeper, RandomKeeper
from .statement import check_statement
from .sync import find_ranks

BatchNorm = Literal["error", "per_microbatch", "frozen"]
Into = Literal["grad", "momentum"]

# Up to here the rounding of a bfloat16 sum stays below that of its terms (K <= 2**8 / 16).
MOST_LOW_PRECISION_MICROBATCHES = 16


class Accumulator:
    """Updates a model by the gradient of a whole batch, worked through in micro-batches that fit in memory.

    The update is that of the real large batch: gradients are summed with the weight ``w_i / W`` of each
    micro-batch
    (``1 / W`` for a sum; see :mod:`superbatch.normalize`), then clipped and applied once.

    Args:
        model: the model, or a list of models, that `loss_fn` uses and the optimizer updates.
        optimizer: a torch optimizer, or a list of optimizers that own different parameters; each is stepped
        once.
        loss_fn: ``loss_fn(microbatch) -> loss``, a closure over the model. Not needed for the owned loop.
        microbatch_size: samples per micro-batch at most (the split is near-equal, so at most two sizes
        occur), or a
            :class:`TokenBudget`. None works through a batch in one piece.
        reduction: what `loss_fn` returns: ``"mean"`` (PyTorch's default) or ``"sum"`` over the micro-batch.
        weight: how much a micro-batch counts: None for its samples; a function micro-batch -> number
            (:func:`count_tokens`, :func:`sample_weights`, :func:`class_weights`); or ``"returned"`` where
            `loss_fn`
            returns ``(loss, weight)``.
        max_grad_norm: clip the normalised gradient to this 2-norm, once per window.
        max_grad_value: clip its elements to this magnitude.
        scheduler: a learning-rate scheduler, or a list of them, stepped once per update that was made.
        scaler: a `torch.amp.GradScaler`; an overflow skips the update and the scheduler.
        nonfinite: what to do with NaN and infinity: ``"raise"``; ``"skip_microbatch"`` leaves a micro-batch
        and its
            weight out (its gradient is looked at before it is added); ``"skip_update"`` gives up the window.
        batchnorm: BatchNorm in training mode is an ``"error"``; or ``"per_microbatch"`` (inexact, as ghost
        batch
            normalisation; running statistics pooled over the batch); or ``"frozen"`` (running statistics,
            exact).
        sample_rng: give every sample its own random stream, so that dropout and noise do not depend on the
        split.
            By default each micro-batch draws on from the global generator, as a loop by hand does.
        accumulator_dtype: sum gradients of bfloat16/float16 parameters in this dtype. ``"auto"``: float32
        when a
            window has more than 16 micro-batches. None: in the parameters' dtype.
        accumulate_into: ``"grad"``, or ``"momentum"`` to sum straight into SGD's momentum buffer (exact).
        masters: float32 copies that the optimizer updates in place of low-precision parameters
            (:func:`fp32_masters`); parameters are set to them after each update.
        device: where micro-batches are moved: ``"auto"`` (the model's device), a device, or None (left as
        they are).
        whole: paths of leaves that every micro-batch gets whole.
        per_sample: paths of lists that hold one object per sample.
        check: compare, on the first window, losses of micro-batches with losses of their parts, and refuse a
        wrong
            statement of `reduction` or `weight` before anything is updated.

    Raises:
        InputError: an argument has the wrong type or value, or two of them exclude each other.
        OptimizerError: the optimizer cannot be used, or does not own the model's parameters.

    Examples:
        >>> model = nn.Linear(3, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> def loss_fn(microbatch):
        ...     x, y = microbatch
        ...     return nn.functional.mse_loss(model(x), y)
        >>> accumulate = Accumulator(model, optimizer, loss_fn, microbatch_size=4)
        >>> update = accumulate((torch.randn(10, 3), torch.randn(10, 1)))
        >>> update.samples, update.microbatches, update.made
        (10, 3, True)
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        optimizer: Optimizer | Sequence[Optimizer],
        loss_fn: Callable[[Any], Any] | None = None,
        *,
        microbatch_size: int | TokenBudget | None = None,
        reduction: normalize.Reduction = "mean",
        weight: Callable[[Any], Any] | Literal["returned"] | None = None,
        max_grad_norm: float | None = None,
        max_grad_value: float | None = None,
        scheduler: Any = None,
        scaler: Any = None,
        nonfinite: NonFinite = "raise",
        batchnorm: BatchNorm = "error",
        sample_rng: bool = False,
        accumulator_dtype: torch.dtype | Literal["auto"] | None = "auto",
        accumulate_into: Into = "grad",
        masters: Mapping[Tensor, Tensor] | None = None,
        device: torch.device | str | int | None = "auto",
        whole: Sequence[str] = (),
        per_sample: Sequence[str] = (),
        check: bool = True,
    ) -> None:
        models, optimizers = checks.as_models(model), checks.as_optimizers(optimizer)
        _check_types(loss_fn, microbatch_size, weight, accumulator_dtype)
        self._owned = checks.own_parameters(models, optimizers, masters)
        self._microbatch_size = microbatch_size
        self._paths = {"whole": tuple(whole), "per_sample": tuple(per_sample)}
        self._dtype = accumulator_dtype
        self._masters = bool(masters)
        self._into: Into = checks.check_choice(accumulate_into, "accumulate_into", Into)
        self._batchnorm: BatchNorm = checks.check_choice(batchnorm, "batchnorm", BatchNorm)
        self._batchnorms = norms.find_batchnorms(models)
        self._only_owned = _has_others(models, self._owned)
        self._check = check
        self._updates = 0
        self._window: WindowInFlight | None = None
        self._resume: dict[str, Any] | None = None
        self._first = True
        self._said_dtype = False
        moved_to = _device(device, self._owned)
        self._plan = Plan(
            models=models,
            owned=self._owned,
            step=Step(
                optimizers=optimizers,
                schedulers=_as_tuple(scheduler),
                scaler=scaler,
                max_grad_norm=checks.check_positive(max_grad_norm, "max_grad_norm"),
                max_grad_value=checks.check_positive(max_grad_value, "max_grad_value"),
                masters_copied=self._masters,
            ),
            ranks=find_ranks(models),
            device=moved_to,
            reduction=normalize.check_reduction(reduction),
            weigh="samples" if weight is None else weight,
            nonfinite=checks.check_choice(nonfinite, "nonfinite", NonFinite),
            sample_rng=sample_rng,
            norms=self._norms(),
            buffers=BufferKeeper(models),
            random=RandomKeeper([] if moved_to is None else [moved_to]),
            loss_fn=loss_fn,
        )
        self._check_combinations()

    @property
    def updates(self) -> int:
        """Number of updates made."""
        return self._updates

    def __call__(self, batch: Any) -> Update:
        """Make one update from a batch, or from a :class:`Window` of micro-batches.

        Args:
            batch: any nesting of tensors, arrays, mappings, sequences and dataclasses with the samples first,
            on
                the host; or a Window, whose micro-batches are taken as they are.

        Returns:
            The record of the update.

        Raises:
            InputError, SplitError: the batch cannot be worked through; nothing has changed.
            StatementError, CoupledSamplesError: the loss is not what was stated; nothing has changed.
            NonFiniteError: a loss or gradient is not finite (with ``nonfinite="raise"``); all is as before.
        """
        loss_fn = self._plan.loss_fn
        if loss_fn is None:
            raise InputError(
                explain(
                    "a batch for an Accumulator without loss_fn",
                    "it does not know the loss",
                    "pass loss_fn, or own the loop: `with accumulator.window(batch) as window: ...`",
                )
            )
        returned = self._plan.weigh == "returned"
        with self.window(batch) as window:
            for microbatch in window:
                if returned:
                    window.backward(*_pair(loss_fn(microbatch)))
                else:
                    window.backward(_alone(loss_fn(microbatch)))
        assert window.update is not None
        return window.update

    def window(self, batch: Any) -> WindowInFlight:
        """Return a window to iterate over in a loop that owns its forward and backward.

        Args:
            batch: as for a call.

        Returns:
            A context manager: iterate over it, call its ``backward(loss)`` for each micro-batch, read its
            ``update``
            afterwards. Leaving the block by an exception or ``break`` discards the window.

        Raises:
            InputError, SplitError: the batch cannot be worked through.
            WindowError: another window of this accumulator is open.
            StatementError, CoupledSamplesError: as for a call.

        Examples:
            >>> model = nn.Linear(2, 1)
            >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            >>> accumulator = Accumulator(model, optimizer, microbatch_size=2)
            >>> with accumulator.window(torch.randn(5, 2)) as window:
            ...     for microbatch in window:
            ...         window.backward(model(microbatch).square().mean())
            >>> window.update.microbatches
            3
        """
        if self._window is not None:
            raise WindowError(
                explain(
                    "a second window of one accumulator",
                    "the first one is still open, and both would sum into the same gradients",
                    "leave the first block, or use one Accumulator per optimizer",
                )
            )
        microbatches, samples = self._microbatches(batch)
        if self._batchnorm == "error":
            norms.refuse(self._batchnorms)
        if self._first and self._check and self._plan.loss_fn is not None:
            self._check_statement(batch, microbatches, samples)
        window = WindowInFlight(
            self._plan,
            self._place(len(microbatches)),
            microbatches,
            samples,
            resume=self._resume,
            watch=checks.BackwardWatch(self._owned) if self._first else None,
            finished=self._finished,
        )
        self._window, self._resume = window, None
        return window

    def discard(self) -> None:
        """Forget a window in flight that was loaded by :meth:`load_state_dict`.

        Examples:
            >>> model = nn.Linear(2, 1)
            >>> Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1)).discard()
        """
        self._resume = None

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save beside the model's and the optimizer's: tensors and plain containers.

        Between windows that is the number of updates. Inside one (in the loop, after ``backward``) it holds
        the
        gradients so far, the weights, the position and the random state, so that the window goes on bit for
        bit.
        """
        in_flight = self._window.state_dict() if self._window is not None else self._resume
        return {"version": 1, "updates": self._updates, "window": in_flight}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state; a window that was in flight goes on with the next call or :meth:`window`.

        Args:
            state: from :meth:`state_dict`. The model and the optimizer must be loaded from the same moment,
            and the
                next batch must be the one that was being worked through.

        Raises:
            InputError: it is no such state.
            WindowError: a window is open.
        """
        if not isinstance(state, Mapping) or state.get("version") != 1:
            raise InputError(
                explain(
                    "a state without version 1",
                    "it was not made by Accumulator.state_dict() of this version",
                    "pass what state_dict() returned",
                )
            )
        if self._window is not None:
            raise WindowError(
                explain("load_state_dict() inside a window", "it is in use", "leave the window first")
            )
        self._updates = int(state["updates"])
        self._resume = state["window"]

    # -- parts
    # ------------------------------------------------------------------------------------------------

    def _microbatches(self, batch: Any) -> tuple[list[Any], list[int] | None]:
        """The micro-batches, and the number of samples of each where it can be known."""
        if not isinstance(batch, Window) and self._microbatch_size is not None:
            if isinstance(self._microbatch_size, int) and not any(self._paths.values()):
                length = _length_of_tensors(batch)
                if length:
                    counts = near_equal(length, self._microbatch_size)
                    return _split_tensors(batch, counts), counts
            planned = plan(batch, **self._paths)
            counts = sizes(batch, planned.samples, self._microbatch_size)
            return cut(planned, counts), counts
        microbatches = list(batch) if isinstance(batch, Window) else [batch]
        try:
            return microbatches, [count_samples(microbatch, **self._paths) for microbatch in microbatches]
        except ValueError:
            if self._plan.weigh == "samples" or self._plan.sample_rng:
                raise
            return microbatches, None

    def _place(self, count: int) -> Gradients:
        plan = self._plan
        if self._into == "momentum":
            return InMomentum(self._owned, plan.step.optimizers[0])
        dtype = self._sum_dtype(count)
        isolated = plan.nonfinite == "skip_microbatch"
        if dtype is None and not isolated:
            return InGrad(self._owned, only_owned=self._only_owned)
        return InBuffers(self._owned, dtype, isolated=isolated, only_owned=self._only_owned)

    def _sum_dtype(self, count: int) -> torch.dtype | None:
        """The dtype of the buffers that low-precision gradients are summed in, or None for no buffers."""
        low = any(entry.parameter.dtype in LOW_PRECISION for entry in self._owned)
        if not isinstance(self._dtype, str):
            return self._dtype if low else None
        if self._masters:
            return torch.float32
        if not low or count <= MOST_LOW_PRECISION_MICROBATCHES:
            return None
        if not self._said_dtype:
            self._said_dtype = True
            warnings.warn(
                f"a window of {count} micro-batches with bfloat16/float16 parameters: their gradients are "
                "summed in float32 (4 bytes per parameter), since a sum in their own dtype would stop "
                "growing. accumulator_dtype=torch.float32 says the same without this message, "
                "accumulator_dtype=None undoes it.",
                UserWarning,
                stacklevel=5,
            )
        return torch.float32

    def _norms(self) -> norms.Frozen | norms.Pooled | None:
        if not self._batchnorms or self._batchnorm == "error":
            return None
        return (
            norms.Frozen(self._batchnorms) if self._batchnorm == "frozen" else norms.Pooled(self._batchnorms)
        )

    def _check_statement(self, batch: Any, microbatches: list[Any], samples: list[int] | None) -> None:
        plan_, models = self._plan, self._plan.models
        assert plan_.loss_fn is not None
        problem = Problem(
            models[0] if len(models) == 1 else nn.ModuleList(models),
            plan_.loss_fn,
            plan_.reduction,
            None if plan_.weigh == "samples" else plan_.weigh,
            whole=self._paths["whole"],
            per_sample=self._paths["per_sample"],
        )
        pieces = microbatches
        if samples is not None and max(samples) == 1 and not isinstance(batch, Window):
            pieces = [take(batch, start, start + 2, **self._paths) for start in range(0, len(samples) - 1, 2)]
        with plan_.ranks.hold_back():
            check_statement(problem, pieces, frozen=list(self._batchnorms.values()))

    def _finished(self, update: Update | None) -> None:
        self._window = None
        if update is not None and update.made:
            self._first = False
            self._updates += 1

    def _check_combinations(self) -> None:
        plan = self._plan
        if self._into == "momentum":
            checks.check_momentum(
                plan.step.optimizers,
                max_grad_norm=plan.step.max_grad_norm,
                max_grad_value=plan.step.max_grad_value,
                scaler=plan.step.scaler,
                masters=self._masters,
                weight_returned=plan.weigh == "returned",
                nonfinite_skip_microbatch=plan.nonfinite == "skip_microbatch",
                ranks=plan.ranks.shared,
            )
        if plan.step.max_grad_value is not None and any(
            entry.parameter.is_complex() for entry in self._owned
        ):
            raise InputError(
                explain(
                    "max_grad_value with complex parameters",
                    "complex numbers have no order",
                    "use max_grad_norm",
                )
            )


def fp32_masters(model: nn.Module) -> dict[Tensor, Tensor]:
    """Make float32 copies of a model's low-precision parameters, for an optimizer to update in their place.

    Args:
        model: a model with bfloat16 or float16 parameters.

    Returns:
        Trainable parameter -> its float32 copy (parameters that are wider map to themselves): make the
        optimizer
        over the values and pass the mapping as ``Accumulator(masters=...)``.

    Examples:
        >>> model = nn.Linear(2, 1).bfloat16()
        >>> masters = fp32_masters(model)
        >>> optimizer = torch.optim.SGD(masters.values(), lr=0.1)
        >>> accumulate = Accumulator(model, optimizer, lambda x: model(x).mean(), masters=masters)
        >>> accumulate(torch.randn(4, 2, dtype=torch.bfloat16)).made
        True
    """
    return {
        parameter: nn.Parameter(parameter.detach().float()) if parameter.dtype in LOW_PRECISION else parameter
        for parameter in model.parameters()
        if parameter.requires_grad
    }


def _pair(returned: Any) -> tuple[Any, Any]:
    if isinstance(returned, tuple) and len(returned) == 2:
        return returned
    raise InputError(
        explain(
            f"a loss_fn that returned {type(returned).__name__}",
            'weight="returned" states that it returns a pair',
            "return (loss, weight)",
        )
    )


def _alone(returned: Any) -> Any:
    if not isinstance(returned, tuple):
        return returned
    raise InputError(
        explain(
            "a loss_fn that returned a tuple",
            "it is not stated that the loss comes with its weight",
            'return the loss alone, or state weight="returned" and return (loss, weight)',
        )
    )


def _length_of_tensors(batch: Any) -> int:
    """Samples of the commonest batch - a tuple of tensors of one length - and 0 for any other.

    Walking a general batch takes a hundredth of a window of a tiny model; this takes a tenth of that.
    """
    if type(batch) is not tuple or not batch:
        return 0
    length = len(batch[0]) if type(batch[0]) is Tensor and batch[0].ndim else 0
    return length if all(type(t) is Tensor and t.ndim and len(t) == length for t in batch) else 0


def _split_tensors(batch: tuple[Tensor, ...], counts: list[int]) -> list[Any]:
    return list(zip(*(tensor.split(counts) for tensor in batch), strict=True))


def _has_others(models: Sequence[nn.Module], owned: list[Owned]) -> bool:
    """Whether the models have trainable parameters that belong to other optimizers."""
    mine = {entry.parameter for entry in owned}
    return any(p.requires_grad and p not in mine for model in models for p in model.parameters())


def _device(device: torch.device | str | int | None, owned: list[Owned]) -> torch.device | None:
    if device is None:
        return None
    if device == "auto":
        found = owned[0].parameter.device
        return None if found.type == "cpu" else found
    return torch.device(device)


def _as_tuple(scheduler: Any) -> tuple[Any, ...]:
    schedulers = (
        tuple(scheduler) if isinstance(scheduler, list | tuple) else () if scheduler is None else (scheduler,)
    )
    for one in schedulers:
        if not callable(getattr(one, "step", None)):
            raise InputError(
                explain(
                    f"scheduler of type {type(one).__name__}",
                    "a scheduler is stepped once per update",
                    "pass a torch.optim.lr_scheduler, a list of them, or None",
                )
            )
    return schedulers


def _check_types(loss_fn: object, microbatch_size: object, weight: object, dtype: object) -> None:
    if loss_fn is not None and not callable(loss_fn):
        raise InputError(
            explain(
                f"loss_fn of type {type(loss_fn).__name__}",
                "it is called with each micro-batch",
                "pass a function microbatch -> loss",
            )
        )
    valid = isinstance(microbatch_size, int) and not isinstance(microbatch_size, bool) and microbatch_size > 0
    if microbatch_size is not None and not valid and not isinstance(microbatch_size, TokenBudget):
        raise InputError(
            explain(
                f"microbatch_size={microbatch_size!r}",
                "a micro-batch has a whole number of samples, at least one",
                "pass a positive int, a TokenBudget, or None for one piece",
            )
        )
    if weight is not None and weight != "returned" and not callable(weight):
        raise InputError(
            explain(
                f"weight={weight!r}",
                "it is no way to weigh a micro-batch",
                'pass None (samples), a function such as count_tokens("labels"), or "returned"',
            )
        )
    floating = isinstance(dtype, torch.dtype) and dtype.is_floating_point
    if dtype is not None and dtype != "auto" and not floating:
        raise InputError(
            explain(
                f"accumulator_dtype={dtype!r}",
                "gradients are summed in a floating-point dtype",
                'pass torch.float32, "auto" or None',
            )
        )
