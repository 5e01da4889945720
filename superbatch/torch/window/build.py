"""Construction of an accumulator's engine: all options are checked before anything is built or changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from superbatch.batch.split import TokenBudget
from superbatch.errors import InputError
from superbatch.noise.meter import NoiseMeter

from .. import fastpaths
from ..checks.check_schedule import CheckSchedule
from ..devices import accelerators
from ..loss.declared import declare
from ..masters import MasterWeights
from ..options import (
    NOT_DECLARED,
    FrozenBatchNorm,
    GhostBatchNorm,
    GradientSumOption,
    PerSampleRandom,
    Split,
)
from ..sizes.auto import AutoSize
from ..sizes.reserve import Reserve
from ..sizes.sizing import Fixed
from . import options, validation
from .before_step import BeforeStep
from .config import Config, NonFinite
from .coupled_work import Coupled, Rng
from .engine import Engine
from .microbatches import Paths
from .owned_parameters import ModelParameters, OwnedParameters
from .participant import Participant
from .participants import batchnorm as norms
from .participants.earlier_gradients import EarlierGradients
from .participants.forward_state_keeper import ForwardStateKeeper
from .participants.noise.windows import noise_of
from .participants.placement import Placement
from .participants.snapshot import RandomKeeper
from .participants.user_participants import UserParticipants
from .slip_watch import SlipWatch
from .sync.find import find_sync
from .sync.sync import Sync, SyncOption
from .transfer import Transfer
from .update_rule import Clip, UpdateRule
from .work import ByMicrobatch, Work


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of an accumulator or a gradient as the user gave them; see `Accumulator` and `Gradient`.

    Attributes:
        coupled: the option `rng` of coupled samples; None: samples are not coupled.
        steps: True: optimizers make an update; False: the gradient stays in ``.grad``.
    """

    microbatch_size: int | TokenBudget | Literal["auto", "largest"] | None = None
    reduction: Any = "mean"
    weight: Any = None
    max_grad_norm: float | None = None
    clip: Clip | None = None
    scheduler: Any = None
    scaler: Any = None
    nonfinite: NonFinite = "raise"
    device: Any = "auto"
    gradient_sum: GradientSumOption = "auto"
    participants: Sequence[Any] = ()
    observers: Sequence[NoiseMeter] = ()
    split: Split = NOT_DECLARED
    check: bool = True
    sync: SyncOption = "auto"
    backward: Callable[..., Any] | None = None
    coupled: Rng | None = None
    steps: bool = True


@dataclass(frozen=True)
class _Participants:
    batchnorm: Literal["error", "frozen", "per_microbatch"]
    modules: tuple[nn.Module, ...]
    sample_rng: bool
    user: tuple[Participant, ...]


def engine_of(
    model: nn.Module | Sequence[nn.Module],
    optimizer: Any,
    loss_fn: Callable[[Any], Any] | None,
    given: Options,
) -> Engine:
    """Return the engine of an accumulator, or of a gradient without an optimizer.

    Args:
        model: one or several models.
        optimizer: one or several, bare or in `MasterWeights`; None if ``given.steps`` is False.
        loss_fn: the loss of a micro-batch or, for coupled samples, of the batch; None: the user's loop
            computes it.
        given: the options.

    Raises:
        InputError: an option has the wrong type or value, or two of them exclude each other.
        OptimizerError: the optimizer cannot be used, or does not own the model's parameters.
    """
    # Validation first, so that a wrong option leaves the models unchanged.
    models = validation.as_models(model)
    bare, masters = _without_masters(optimizer)
    optimizers = validation.as_optimizers(bare) if given.steps else ()
    _check(loss_fn, given)
    if not given.steps and given.gradient_sum == "momentum":
        raise InputError('Gradient has no optimizer for gradient_sum="momentum". Remove gradient_sum=.')
    participants = _participants(given.participants)
    separate = given.coupled is None
    # Coupled samples need gathered parameters in the whole window; other losses keep parameters sharded.
    sharded = "split" if separate else "gathered"
    sync = find_sync(models, no_sync=True, sharded=sharded, sync=given.sync, in_buckets=given.steps)
    if given.steps:
        parameters = OwnedParameters(models, optimizers, masters)
    else:
        parameters = ModelParameters(models)
    batchnorms = norms.find_batchnorms(models)
    handled = _handled(batchnorms, participants)
    config = _config(
        models, optimizers, loss_fn, given, parameters.entries, participants, handled, sync, masters
    )
    whole, size = given.coupled, given.microbatch_size
    if whole is None:
        kind = participants.batchnorm if batchnorms else None
        sizing = _sizing_of(
            size,
            config,
            given.split.paths,
            batchnorm=kind,
            gradient_sum=given.gradient_sum,
            masters=masters,
        )
        # A BatchNorm without a participant raises in training mode, at each window.
        refused = {path: each for path, each in batchnorms.items() if path not in handled}
        work: Work = ByMicrobatch(config, sizing, given.split.paths, refused)
        # A searched size uses almost all memory, so each update checks that its step has enough.
        config.reserve.tight = not isinstance(sizing, Fixed)
    else:
        assert loss_fn is not None
        assert not isinstance(size, TokenBudget)
        work = Coupled(config, loss_fn, "auto" if isinstance(size, str) else size, whole)
    # After the config, because some exclusions depend on its ranks and weight.
    options.check_combinations(config, gradient_sum=given.gradient_sum)
    if isinstance(work.sizing, Fixed):
        # Only for a fixed size. A searched size uses almost all memory, so freed memory must be returned.
        fastpaths.keep_freed_memory(entry.parameter.device for entry in parameters.entries)
    return Engine(
        config,
        parameters,
        work,
        Placement(config, given.gradient_sum),
        schedule=CheckSchedule(config, batchnorms.values(), check=given.check),
        slips=SlipWatch(config.rule.schedulers, size),
    )


def _config(
    models: tuple[nn.Module, ...],
    optimizers: tuple[Optimizer, ...],
    loss_fn: Callable[[Any], Any] | None,
    given: Options,
    owned: list[Any],
    participants: _Participants,
    batchnorms: dict[str, _BatchNorm],
    sync: Sync,
    masters: dict[Tensor, Tensor],
) -> Config:
    """Return the configuration of an engine; the arguments are those of `engine_of`, checked and sorted."""
    device, whole = options.as_device(given.device, owned), given.coupled is not None
    parameters = [entry.parameter for entry in owned]
    scaler = options.check_scaler(given.scaler)
    return Config(
        models=models,
        owned=owned,
        rule=UpdateRule(
            optimizers=optimizers,
            schedulers=options.as_schedulers(given.scheduler),
            scaler=scaler,
            # With None the norm is still computed, for the record.
            max_grad_norm=validation.check_positive(given.max_grad_norm, "max_grad_norm"),
            clip=options.check_callable(
                given.clip, "clip", "a function of the gradients, or ClipValue(limit)"
            ),
            masters_copied=bool(masters),
            scaling=scaler is not None and scaler.is_enabled(),
        ),
        sync=sync,
        device=device,
        declared=declare(given.reduction, given.weight, nonfinite=given.nonfinite),
        nonfinite=validation.check_choice(given.nonfinite, "nonfinite", NonFinite),
        sample_rng=participants.sample_rng,
        norms=norms.of_windows(batchnorms, participants.batchnorm, sync),
        # loss_fn too: its closure may hold a teacher or a memory bank that is not in `models`.
        state=ForwardStateKeeper(models, [loss_fn]),
        # The generators of the CPU, and of the accelerators that hold the models.
        random=RandomKeeper(accelerators(models, *parameters, device)),
        # A coupled loss cannot be called with a micro-batch, so checks must not call it.
        loss_fn=None if whole else loss_fn,
        # A virtual batch moves its slices to the device itself.
        transfer=None if whole or device is None else Transfer(device),
        reserve=Reserve(models, optimizers, owned),
        before_step=BeforeStep(optimizers, owned),
        noise=noise_of(
            given.observers,
            models,
            owned,
            optimizers or (owned[0].optimizer,),
            momentum=given.gradient_sum == "momentum",
        ),
        whole=whole,
        masters=masters,
        backward=options.check_callable(given.backward, "backward", "a function of a loss"),
        # Without an optimizer .grad belongs to the user, and its gradients are kept and added to.
        earlier=None if optimizers else EarlierGradients(owned),
        user_participants=UserParticipants(participants.user) if participants.user else None,
    )


def _check(loss_fn: object, given: Options) -> None:
    options.check_types(loss_fn, given.microbatch_size, given.gradient_sum)
    options.check_split(given.split)
    options.check_lists(participants=given.participants, observers=given.observers)


def _participants(given: Sequence[Any]) -> _Participants:
    """Return the option `participants`, sorted by kind; raise `InputError` if it is not valid."""
    by_kind: dict[type, list[Any]] = {
        kind: [each for each in given if isinstance(each, kind)] for kind in _KINDS
    }
    others = tuple(each for each in given if not isinstance(each, _KINDS))
    # Any object with these methods is a participant; there is no base class.
    for each in others:
        missing = [name for name in _METHODS if not callable(getattr(each, name, None))]
        # A class has the methods too, as in participants=[FrozenBatchNorm].
        if isinstance(each, type) or missing:
            raise InputError(
                f"participants= contains {each!r}, which is not a participant. Pass FrozenBatchNorm(), "
                "GhostBatchNorm(), PerSampleRandom(), or an object with the methods of "
                "superbatch.torch.window.participant.Participant."
            )
    frozen: list[Any] = by_kind[FrozenBatchNorm]
    ghost: list[Any] = by_kind[GhostBatchNorm]
    # Two for one model would need an order of precedence.
    if len(frozen) + len(ghost) > 1:
        raise InputError(
            f"participants= contains {len(frozen) + len(ghost)} objects for BatchNorm. Pass one, with all of "
            "its modules: FrozenBatchNorm(a, b)."
        )
    kind = "frozen" if frozen else "per_microbatch" if ghost else "error"
    modules = tuple(module for each in (*frozen, *ghost) for module in each.modules)
    return _Participants(kind, modules, bool(by_kind[PerSampleRandom]), others)


_KINDS = (FrozenBatchNorm, GhostBatchNorm, PerSampleRandom)
_METHODS = (
    # Listed here, because a runtime-checkable protocol cannot be asked for one method.
    *("begin", "savepoint", "rollback", "restart", "restore", "commit", "state_dict", "load_state_dict"),
)


def _sizing_of(
    microbatch_size: int | TokenBudget | str | None,
    config: Config,
    paths: Paths,
    *,
    batchnorm: str | None,
    **sizes: Any,
) -> Fixed | AutoSize:
    """Return the object that chooses the sizes of micro-batches.

    Args:
        microbatch_size: the checked option.
        config: the accumulator's.
        paths: `unsplit` and `per_sample` declarations.
        batchnorm: how BatchNorm in training mode is handled; None if the models have none.
        sizes: further arguments of `AutoSize`.

    Raises:
        InputError: sizes cannot be searched.
    """
    # With None or a TokenBudget, too, the user chooses the size.
    if not isinstance(microbatch_size, str):
        return Fixed(microbatch_size)
    loss_fn = options.check_auto(microbatch_size, config.loss_fn, batchnorm)
    return AutoSize(
        loss_fn,
        config.models,
        config.rule.optimizers,
        device=config.device,
        mode="fastest" if microbatch_size == "auto" else "largest",
        unsplit=paths.get("unsplit", ()),
        per_sample=paths.get("per_sample", ()),
        **sizes,
    )


def _handled(batchnorms: dict[str, _BatchNorm], participants: _Participants) -> dict[str, _BatchNorm]:
    """Return the BatchNorms that a participant handles; raise `InputError` for a module without BatchNorm."""
    if participants.batchnorm == "error":
        return {}
    # FrozenBatchNorm() without modules means all of them.
    if not participants.modules:
        return batchnorms
    known, covered = set(batchnorms.values()), set[nn.Module]()
    for module in participants.modules:
        # A container is allowed: FrozenBatchNorm(model.backbone).
        inside = known.intersection(module.modules())
        if not inside:
            raise InputError(
                f"A participant for BatchNorm has a {type(module).__name__} that contains no BatchNorm of "
                "the model. Pass BatchNorms of the model, or call FrozenBatchNorm() without arguments for "
                "all of them."
            )
        covered |= inside
    return {path: each for path, each in batchnorms.items() if each in covered}


def _without_masters(optimizer: Any) -> tuple[Any, dict[Tensor, Tensor]]:
    """Return the optimizers inside of `MasterWeights`, and a mapping parameter -> master of all of them."""
    # A single optimizer stays single, because error texts show the type that the user passed.
    given = list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]
    masters: dict[Tensor, Tensor] = {}
    for each in given:
        if isinstance(each, MasterWeights):
            masters.update(each.masters)
    bare = [each.optimizer if isinstance(each, MasterWeights) else each for each in given]
    return (bare if isinstance(optimizer, list | tuple) else bare[0]), masters
