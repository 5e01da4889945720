"""The face: a batch in, one exact update out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .. import normalize
from ..batch.split import TokenBudget
from ..noise.meter import NoiseMeter
from ..results.coupling import CouplingReport
from ..results.memory import MemoryReport
from ..results.noise import Noise
from ..results.update import Update
from ..window import Window
from . import fastpaths
from .checks.check_schedule import CheckSchedule
from .checks.first_check import check_first_window
from .devices import accelerators
from .loss.declared import WeightOption, declare
from .masters import masters_at_first, masters_loader, masters_state, masters_written, take_over
from .sizes.reserve import Reserve
from .sizes.sizing import Fixed, sizing_state
from .whole_batch import Coupled, owned_loop, whole_batch
from .window import misuse, options, saving, validation
from .window.before_step import BeforeStep
from .window.config import Config, NonFinite
from .window.discarding import discard_saved
from .window.microbatches import pieces_of, sizing_of
from .window.open_window import OpenWindow
from .window.owned_parameters import OwnedParameters
from .window.participants import batchnorm as norms
from .window.participants.moved_state import MovedState
from .window.participants.noise.windows import noise_of
from .window.participants.placement import Placement
from .window.participants.snapshot import RandomKeeper
from .window.retry import work_through
from .window.slip_watch import SlipWatch
from .window.slips import name_unknown_options, refuse_no_batch
from .window.sync.find import find_sync
from .window.transfer import Transfer
from .window.update_rule import UpdateRule

BatchNorm = Literal["error", "per_microbatch", "frozen"]
Into = Literal["grad", "momentum"]


class Accumulator:
    """Updates a model by the gradient of a whole batch, worked through in micro-batches that fit in memory.

    The update is that of the real large batch: gradients are summed with the weight ``w_i / W`` of each
    micro-batch (``1 / W`` for a sum; see `superbatch.normalize`), then clipped and applied once.

    Args:
        model: the model, or a list of models, that `loss_fn` uses and the optimizer updates.
        optimizer: a torch optimizer, or a list of optimizers that own different parameters.
        loss_fn: ``loss_fn(microbatch) -> loss``, a closure over the model. Not needed for the owned loop.
        microbatch_size: samples per micro-batch at most, or a `TokenBudget`; ``"auto"`` finds the fastest
            size that fits in memory, ``"largest"`` the largest. None works through a batch in one piece.
        reduction: what `loss_fn` returns: the ``"mean"`` over the micro-batch (PyTorch's default), the
            ``"sum"``, to be divided by the weight of the batch, or a ``"total"`` that nothing divides.
        weight: how much a micro-batch counts: None for its samples; a function micro-batch -> number
            (`count_tokens`, `sample_weights`, `class_weights`); or ``"returned"`` where `loss_fn` returns
            ``(loss, weight)``. Several losses with weights of their own: a mapping name -> one of these,
            and `loss_fn` returns a mapping name -> loss.
        min_weight: lower bound of the weight that a batch is divided by (1: DETR's clamp).
        max_grad_norm: clip the normalised gradient to this 2-norm, once per window.
        max_grad_value: clip its elements to this magnitude.
        scheduler: a learning-rate scheduler, or a list of them, stepped once per update that was made.
        scaler: a `torch.amp.GradScaler`; an overflow skips the update and the scheduler.
        nonfinite: what to do with NaN and infinity: ``"raise"``; ``"skip_microbatch"`` leaves a micro-batch
            and its weight out (its gradient is looked at before it is added); ``"skip_update"`` gives up the
            window.
        batchnorm: BatchNorm in training mode is an ``"error"``; or ``"per_microbatch"`` (inexact, as ghost
            batch normalisation; running statistics pooled over the batch); or ``"frozen"`` (running
            statistics, exact).
        coupled: samples that see each other are an ``"error"``; or the update is ``"exact"``: `loss_fn` is
            called once, with the whole batch, which is worked through in micro-batches below autograd (see
            `virtual_batch`). Then `reduction` and `weight` are not stated, nothing is checked, and there is
            no owned loop; ``"auto"`` and ``"largest"`` both take as many samples at a time as fit in memory.
        sample_rng: give every sample its own random stream, so that dropout and noise do not depend on the
            split. By default each micro-batch draws on from the global generator, as a loop by hand does.
            With ``coupled="exact"``: draw what the large batch would draw.
        accumulator_dtype: sum gradients of bfloat16/float16 parameters in this dtype. ``"auto"``: float32
            when a window has more than 16 micro-batches. None: in the parameters' dtype.
        accumulate_into: ``"grad"``, or ``"momentum"`` to sum straight into SGD's momentum buffer (exact).
        masters: float32 copies that the optimizer updates in place of low-precision parameters
            (`fp32_masters`); parameters are set to them after each update.
        device: where micro-batches are moved: ``"auto"`` (the model's device), a device, or None.
        whole: paths of leaves that every micro-batch gets whole (the same object: do not change it in place).
        per_sample: paths of lists that hold one object per sample.
        noise: measure how noisy the gradient is, from those of the micro-batches: True, or a `NoiseMeter`.
        check: compare losses of micro-batches with losses of their parts on the first window, and on a later
            one that shows something new (the first loss that is not 0, the first unequal counts of labels),
            and raise before an update with a wrong `reduction` or `weight`. It calls `loss_fn` a few times.

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

    @name_unknown_options
    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        optimizer: Optimizer | Sequence[Optimizer],
        loss_fn: Callable[[Any], Any] | None = None,
        *,
        microbatch_size: int | TokenBudget | Literal["auto", "largest"] | None = None,
        reduction: normalize.Reduction | Mapping[str, normalize.Reduction] = "mean",
        weight: WeightOption | Mapping[str, WeightOption] = None,
        min_weight: float | Mapping[str, float] | None = None,
        max_grad_norm: float | None = None,
        max_grad_value: float | None = None,
        scheduler: Any = None,
        scaler: Any = None,
        nonfinite: NonFinite = "raise",
        batchnorm: BatchNorm = "error",
        coupled: Coupled = "error",
        sample_rng: bool = False,
        accumulator_dtype: torch.dtype | Literal["auto"] | None = "auto",
        accumulate_into: Into = "grad",
        masters: Mapping[Tensor, Tensor] | None = None,
        device: torch.device | str | int | None = "auto",
        whole: Sequence[str] = (),
        per_sample: Sequence[str] = (),
        noise: bool | NoiseMeter = False,
        check: bool = True,
    ) -> None:
        models, optimizers = validation.as_models(model), validation.as_optimizers(optimizer)
        declared, sync = (("whole", whole), ("per_sample", per_sample)), find_sync(models, no_sync=True)
        self._paths = {name: options.as_paths(paths, name) for name, paths in declared}
        self._whole = whole_batch(  # first: what others advise may have no meaning beside it
            coupled,
            loss_fn,
            microbatch_size,
            as_drawn=options.check_bool(sample_rng, "sample_rng"),
            sync=sync,
            reduction=reduction,
            weight=weight,
            min_weight=min_weight,
            nonfinite=nonfinite,
            batchnorm=batchnorm,
            accumulate_into=accumulate_into,
            **self._paths,
        )
        options.check_types(loss_fn, microbatch_size, weight, accumulator_dtype)
        self._masters = options.check_masters(masters)
        self._parameters = OwnedParameters(models, optimizers, self._masters)
        self._owned = self._parameters.entries
        self._into: Into = validation.check_choice(accumulate_into, "accumulate_into", Into)
        self._batchnorm: BatchNorm = validation.check_choice(batchnorm, "batchnorm", BatchNorm)
        self._batchnorms = norms.find_batchnorms(models)
        self._updates, self._first = 0, True
        self._window: OpenWindow | None = None
        self._resume: dict[str, Any] | None = None
        moved_to = options.as_device(device, self._owned)
        self._config = Config(
            models=models,
            owned=self._owned,
            rule=UpdateRule(
                optimizers=optimizers,
                schedulers=options.as_schedulers(scheduler),
                scaler=options.check_scaler(scaler),
                max_grad_norm=validation.check_positive(max_grad_norm, "max_grad_norm"),
                max_grad_value=validation.check_positive(max_grad_value, "max_grad_value"),
                masters_copied=bool(self._masters),
            ),
            sync=sync,
            device=moved_to,
            declared=declare(reduction, weight, min_weight, nonfinite=nonfinite),
            nonfinite=validation.check_choice(nonfinite, "nonfinite", NonFinite),
            sample_rng=sample_rng and self._whole is None,
            norms=norms.of_windows(self._batchnorms, self._batchnorm, sync),
            state=MovedState(models, [loss_fn]),
            random=RandomKeeper(accelerators(models, *(entry.parameter for entry in self._owned), moved_to)),
            loss_fn=loss_fn if self._whole is None else None,
            transfer=Transfer(moved_to if self._whole is None else None),
            reserve=Reserve(models, optimizers, self._owned),
            before_step=BeforeStep(optimizers, self._owned),
            noise=noise_of(
                noise,
                models,
                self._owned,
                optimizers,
                momentum=self._into == "momentum",
                whole=self._whole is not None,
            ),
            whole=self._whole is not None,
        )
        self._schedule = CheckSchedule(self._config, self._batchnorms.values(), check=check)
        self._of_windows = Fixed(None)
        self._slips = SlipWatch(self._config.rule.schedulers, microbatch_size)
        self._sizing = sizing_of(
            microbatch_size if self._whole is None else None,
            self._config,
            self._paths,
            batchnorm=self._batchnorm if self._batchnorms else None,
            accumulator_dtype=accumulator_dtype,
            accumulate_into=self._into,
            masters=self._masters,
        )
        self._config.reserve.tight = not isinstance(self._sizing, Fixed)
        self._places = Placement(self._config, accumulator_dtype, momentum=self._into == "momentum")
        options.check_combinations(self._config, momentum=self._into == "momentum")
        self._written = masters_at_first(self._owned)
        if isinstance(self._sizing, Fixed):  # a size that is looked for goes to the limit: all is handed back
            fastpaths.keep_freed_memory(entry.parameter.device for entry in self._owned)

    @property
    def updates(self) -> int:
        """Number of updates made."""
        return self._updates

    @property
    def memory(self) -> MemoryReport | None:
        """Sizes that ``"auto"`` or ``"largest"`` has found; else None, and so with ``coupled="exact"``."""
        return self._sizing.report()

    @property
    def coupling(self) -> CouplingReport | None:
        """Coupling points of the last window, with ``coupled="exact"``; else None."""
        return None if self._whole is None else self._whole.report

    @property
    def noise(self) -> Noise | None:
        """Noise of the gradient over the windows so far; None without the option."""
        return None if self._config.noise is None else self._config.noise.meter.estimate()

    def __call__(self, batch: Any) -> Update:
        """Make one update from a batch, or from a `Window` of micro-batches.

        Args:
            batch: any nesting of tensors, arrays, mappings, sequences and dataclasses with the samples first,
                on the host; or a Window, whose micro-batches are taken as they are. Arrays are cut, but not
                made tensors: `loss_fn` does it. With ``coupled="exact"``: tensors, for only they are cut.

        Returns:
            The record of the update.

        Raises:
            InputError, SplitError: the batch cannot be worked through; nothing has changed.
            LossSpecError, CoupledSamplesError: the loss is not what was stated; nothing has changed.
            NonFiniteError: a loss or gradient is not finite (with ``nonfinite="raise"``); all is as before.
        """
        whole = self._whole
        if self._config.loss_fn is None and whole is None:
            raise options.without_loss_fn()
        window, run = self._open(batch), work_through if whole is None else whole.work_through
        try:
            with window:
                run(window)
        except BaseException:
            window.abandon()  # interrupted between the block and its end
            raise
        assert window.update is not None
        return window.update if whole is None else whole.record(window)

    def window(self, batch: Any) -> OpenWindow:
        """Return a window to iterate over in a loop that owns its forward and backward.

        Args:
            batch: as for a call.

        Returns:
            A context manager: iterate over it, call its ``backward(loss)`` for each micro-batch, read its
            ``update`` afterwards. Left by an exception, or before the last backward, it is discarded.

        Raises:
            InputError, SplitError: the batch cannot be worked through.
            WindowError: another window of this accumulator is open.
            LossSpecError, CoupledSamplesError: as for a call.

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
        if self._whole is not None:
            raise owned_loop()
        return self._open(batch)

    def _open(self, batch: Any) -> OpenWindow:
        self._require_closed()
        self._config.before_step.require_whole()
        refuse_no_batch(batch)
        self._parameters.refresh()
        take_over(self._owned, self._written)
        need = self._config.declared.needs_samples or self._config.sample_rng
        if self._batchnorm == "error" and self._whole is None:
            norms.refuse(self._batchnorms)
        sizing = self._of_windows if isinstance(batch, Window) and self._whole is None else self._sizing
        if self._whole is None:
            pieces = pieces_of(batch, sizing, self._paths, self._config.sync, need_samples=need)
        else:
            pieces = self._whole.pieces(batch, self._sizing)
        self._slips.open(pieces.samples if sizing is self._sizing and self._whole is None else None)
        self._schedule.open(pieces, check_first_window if self._first else None, self._updates)
        return OpenWindow(
            self._config,
            self._places.choose(len(pieces), only_owned=self._parameters.only_some),
            pieces,
            sizing,
            resume=self._resume,
            watch=validation.BackwardWatch(self._owned) if self._first else None,
            looks=self._schedule,
            entered=self._entered,
            left=self._left,
        )

    def discard(self) -> None:
        """Forget a window that was loaded or that an interrupt kept from its end, and restore its changes.

        Examples:
            >>> model = nn.Linear(2, 1)
            >>> Accumulator(model, torch.optim.SGD(model.parameters(), lr=0.1)).discard()
        """
        if self._window is not None:
            self._window.abandon()
        self._resume = discard_saved(self._resume, self._config)

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save beside the model's and the optimizer's: tensors and plain containers.

        Inside a window (in the loop, after ``backward``) it holds what resumes the window bit for bit.
        """
        return {
            "version": 1,
            "updates": self._updates,
            "window": self._resume if self._window is None else self._window.state_dict(),
            "check": self._schedule.state_dict(),
            "sizing": sizing_state(self._sizing, self._of_windows),
            "noise": None if self._config.noise is None else self._config.noise.meter.state_dict(),
            "masters": masters_state(self._config.models, self._masters),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a saved state; a window that was open is resumed by the next call or `window`.

        Args:
            state: from `state_dict`. The model and the optimizer must be loaded from the same moment, in any
                order, and the next batch must be the one that was being worked through.

        Raises:
            InputError: it is no such state, its `noise` was averaged otherwise, or its masters do not fit.
            WindowError: a window is open.
        """
        state = options.check_state(state)
        self._schedule.check_state(state.get("check"))
        if self._window is not None:
            raise misuse.load_inside()
        load_masters = masters_loader(self._config.models, self._masters, state.get("masters"))
        meter = None if self._config.noise is None else self._config.noise.meter
        self._of_windows = saving.load_sizing_and_noise(state, self._sizing, meter)
        load_masters()
        self._schedule.load_state_dict(state.get("check"))
        self._config.before_step.mend()
        self._updates, self._resume = state["updates"], state["window"]

    def _require_closed(self) -> None:
        if self._window is not None:
            raise misuse.second_window()

    def _entered(self, window: OpenWindow) -> None:
        self._require_closed()
        window.require_resume(self._resume)
        self._window, self._resume = window, None

    def _left(self, update: Update | None) -> None:
        self._window = None
        self._slips.close()
        self._written = masters_written(self._owned)
        if self._config.noise is not None:
            self._config.noise.left(made=update is not None and update.made)
        self._schedule.left(made=update is not None and update.made)
        if update is not None and update.made:
            self._first = False
            self._updates += 1
