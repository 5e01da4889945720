"""Traps of a solver file: settings whose effect its author may not expect."""

from __future__ import annotations

# pyright: strict
from collections.abc import Iterator

from ..results.caffe import Trap
from .config import SolverConfig
from .rates import listed, multistep_drops
from .tokens import shortened
from .writing import shortest

_MOST = 20  # ignored fields that are listed: a file may have thousands


def traps(config: SolverConfig) -> tuple[Trap, ...]:
    """List settings of a solver whose effect may surprise.

    Args:
        config: the solver.

    Returns:
        One entry per trap; those that change training most come first.

    Examples:
        >>> config = SolverConfig(
        ...     net="n", base_lr=0.1, lr_policy="fixed", max_iter=9, clip_gradients=8.0, iter_size=4
        ... )
        >>> [trap.field for trap in traps(config)]
        ['clip_gradients', 'iter_size', 'iter_size']
    """
    return (
        *_ignored(config),
        *_nothing_learnt(config),
        *_clipping(config),
        *_accumulation(config),
        *_rate(config),
        *_other(config),
    )


def _ignored(config: SolverConfig) -> Iterator[Trap]:
    for name in config.ignored[:_MOST]:
        yield Trap(
            field=shortened(name),
            text="Caffe has no such field, so it was ignored; a fork that has it may train differently",
            do="Compare with the fork's documentation",
        )
    if len(config.ignored) > _MOST:
        yield Trap(
            field="...",
            text=f"{len(config.ignored) - _MOST} more were ignored",
            do="Compare them with the fork's documentation",
        )


def _nothing_learnt(config: SolverConfig) -> Iterator[Trap]:
    if config.base_lr == 0:
        yield Trap(
            field="base_lr",
            text="a rate of 0 leaves the weights unchanged",
            do="Write base_lr: 0.01, for example",
        )
    if config.max_iter == 0:
        yield Trap(
            field="max_iter",
            text="Caffe makes no update with 0",
            do="Write max_iter: and a number of updates",
        )
    if config.clip_gradients == 0:
        yield Trap(
            field="clip_gradients",
            text="0 makes every gradient zero; only a negative number turns clipping off",
            do="Remove it",
        )


def _clipping(config: SolverConfig) -> Iterator[Trap]:
    bound, steps = config.clip_gradients, config.iter_size
    if bound > 0 and steps > 1:
        yield Trap(
            field="clip_gradients",
            text=f"Caffe clips the sum over {steps} micro-batches before it divides by {steps}: the gradient "
            f"of the batch is clipped at {bound / steps:g}, {steps} times tighter than {shortest(bound)} "
            "(caffe#6199)",
            do=f'Pass clip="mean" to clip the gradient of the batch at {shortest(bound)}',
        )


def _accumulation(config: SolverConfig) -> Iterator[Trap]:
    if config.iter_size == 1:  # both traps come from accumulation
        return
    yield Trap(
        field="iter_size",
        text="with ignore_label, the loss of each micro-batch is divided by its own number of valid labels, "
        "so that the update uses a mean of means and not the mean over the batch",
        do='Use loss_weight(..., average="exact") for the mean over the batch',
    )
    yield Trap(
        field="iter_size",
        text="BatchNorm layers normalize each micro-batch by itself, so that the update is not that of one "
        "large batch",
        do="Use WholeBatch for the large batch, or participants=[GhostBatchNorm()] to train as Caffe does",
    )


def _rate(config: SolverConfig) -> Iterator[Trap]:
    if config.lr_policy == "multistep":
        drops = multistep_drops(config.stepvalue)
        late = [(value, drop) for value, drop in zip(config.stepvalue, drops, strict=True) if value != drop]
        if late:
            moved = listed([f"{value} happens at {drop}" for value, drop in late])
            yield Trap(
                field="stepvalue",
                text=f"Caffe makes at most one drop per update, in the order of the file: {moved}",
                do="Write increasing values",
            )
        # With Caffe's delays, because a drop may be delayed past the end.
        missed = [
            value for value, drop in zip(config.stepvalue, drops, strict=True) if drop >= config.max_iter
        ]
        if missed and config.max_iter:
            yield Trap(
                field="stepvalue",
                text=f"{listed(missed)} will not be reached: training ends at {config.max_iter}",
                do="Write smaller values, or a larger max_iter",
            )
    if config.lr_policy == "step" and 0 < config.max_iter <= config.stepsize:
        yield Trap(
            field="stepsize",
            text=f"the first drop, at {config.stepsize}, will not be reached: training ends at "
            f"{config.max_iter}",
            do="Write a smaller stepsize",
        )
    if config.lr_policy in ("step", "exp", "multistep") and config.gamma == 0:
        yield Trap(
            field="gamma",
            text="with 0, the rate becomes 0 at the first drop",
            do="Write gamma: 0.1, for example",
        )


def _other(config: SolverConfig) -> Iterator[Trap]:
    if config.type == "Adam" and config.momentum == 0:
        yield Trap(
            field="momentum",
            text="Adam's beta1 is the momentum, which is 0 unless the file sets it",
            do="Write momentum: 0.9 for the usual Adam",
        )
    if config.type == "AdaDelta" and config.momentum == 0:
        yield Trap(
            field="momentum",
            text="AdaDelta's decay (rho) is the momentum, which is 0 unless the file sets it",
            do="Write momentum: 0.95, for example",
        )
    # Caffe itself raises for the next two; superbatch ignores tests and nets.
    if config.test_iter and config.test_interval < 1:
        yield Trap(
            field="test_interval",
            text="Caffe refuses to start: test_iter is given without test_interval",
            do="Write test_interval: and a number of updates",
        )
    nets = [config.net, config.net_param, config.train_net, config.train_net_param]
    if sum(net is not None for net in nets) != 1:
        yield Trap(
            field="net",
            text="Caffe refuses to start: it needs exactly one of net, net_param, train_net, train_net_param",
            do="Write net: and a path for Caffe; superbatch does not need it",
        )
