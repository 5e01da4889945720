"""A second face of an accumulator, for a survey: the same model and options, counters of its own."""

from __future__ import annotations

import copy
from dataclasses import replace

from superbatch.errors import WindowError, explain

from ..accumulator import Accumulator
from ..sizes.auto import AutoSize
from ..sizes.sizing import Fixed


def shadow_of(accumulator: Accumulator) -> Accumulator:
    """Return an accumulator that makes the same updates and leaves no trace in the given one.

    It has no scheduler: the user's must not move, nor set the surveyed rate; and no noise meter. It begins
    with the sizes that were found out so far, checks the statement on its first window if that has not been
    done, and counts its own updates.

    Args:
        accumulator: of the user.

    Returns:
        The other one.

    Raises:
        WindowError: the accumulator is in the middle of a window.

    Examples:
        >>> import torch
        >>> model = torch.nn.Linear(2, 1)
        >>> sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> accumulate = Accumulator(model, sgd, lambda x: model(x).square().mean())
        >>> shadow = shadow_of(accumulate)
        >>> shadow(torch.randn(4, 2)).made, shadow.updates, accumulate.updates
        (True, 1, 0)
    """
    config = accumulator._config
    if accumulator._window is not None or accumulator._resume is not None:
        raise WindowError(
            explain(
                "a survey in the middle of a window",
                "the gradients so far belong to the training",
                "finish the window first, or discard() it",
            )
        )
    shadow = copy.copy(accumulator)
    shadow._config = replace(
        config,
        rule=replace(config.rule, schedulers=()),
        reserve=copy.copy(config.reserve),  # it knows what a first update needs, if there has been one
        until_next=[],
        noise=None,  # that of rates which training will not use
    )
    shadow._places = copy.copy(accumulator._places)
    shadow._schedule = copy.copy(accumulator._schedule)  # its parts are replaced, never changed
    shadow._slips = copy.copy(accumulator._slips)
    shadow._whole = copy.copy(accumulator._whole)
    shadow._sizing = _sizing_like(accumulator)
    shadow._of_windows = _fixed_like(accumulator._of_windows)
    return shadow


def _sizing_like(accumulator: Accumulator) -> Fixed | AutoSize:
    sizing, config = accumulator._sizing, accumulator._config
    if isinstance(sizing, Fixed):
        return _fixed_like(sizing)
    assert config.loss_fn is not None
    other = AutoSize(
        config.loss_fn,
        config.models,
        config.rule.optimizers,
        device=config.device,
        mode=sizing._mode,
        accumulator_dtype=accumulator._places._dtype,
        accumulate_into=accumulator._into,
        masters=accumulator._masters,
        instruments=sizing._instruments,
        **accumulator._paths,
    )
    other.load_state_dict(copy.deepcopy(sizing.state_dict()))
    return other


def _fixed_like(sizing: Fixed) -> Fixed:
    other = Fixed(sizing.size)
    other.load_state_dict(sizing.state_dict())
    return other
