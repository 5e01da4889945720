"""Fields of a solver file, which are those of Caffe's SolverParameter, with types and defaults.

Source: BVLC/caffe 9b891540, src/caffe/proto/caffe.proto, `message SolverParameter`.
"""

from __future__ import annotations

# pyright: strict
import dataclasses
import math
import struct
from dataclasses import dataclass
from typing import Any, Literal

from ..errors import InputError
from .text_format import Message

SolverType = Literal["SGD", "Nesterov", "AdaGrad", "RMSProp", "AdaDelta", "Adam"]
Policy = Literal["fixed", "step", "exp", "inv", "multistep", "poly", "sigmoid"]

TYPES = ("SGD", "Nesterov", "AdaGrad", "RMSProp", "AdaDelta", "Adam")
"""Solvers, in the order of the numbers of the old field ``solver_type``."""

POLICIES = ("fixed", "step", "exp", "inv", "multistep", "poly", "sigmoid")
"""Learning-rate policies."""


def float32(value: float) -> float:
    """Round to float32, as Caffe's solver parameters and multipliers are stored.

    Examples:
        >>> float32(0.1)
        0.10000000149011612
    """
    # Without this rounding, weights differ from Caffe's by 1e-8 from the first update on.
    try:
        return float(struct.unpack("f", struct.pack("f", value))[0])
    except OverflowError:
        return math.copysign(math.inf, value)


@dataclass(frozen=True, kw_only=True)
class NetState:
    """State of a net, by which its layers are included or excluded: Caffe's NetState."""

    phase: Literal["TRAIN", "TEST"] = "TEST"
    level: int = 0
    stage: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class SolverConfig:
    """A solver: Caffe's SolverParameter. Floats are rounded to float32, as Caffe stores them.

    Each attribute is the field of the same name, with Caffe's default. None means that the field is not
    given. `type` also takes the value of the old field ``solver_type``, as in Caffe. The fields of nets
    inside the file (`net_param`, ...) are not checked. `ignored` names the skipped fields that Caffe does not
    have, such as those of its forks.

    Raises:
        InputError: a value that Caffe's solver refuses, or that makes every weight NaN.

    Examples:
        >>> config = SolverConfig(base_lr=0.1, lr_policy="step", gamma=0.5, stepsize=10, iter_size=4)
        >>> config.base_lr, config.momentum, config.type
        (0.10000000149011612, 0.0, 'SGD')
    """

    net: str | None = None
    net_param: Message | None = None
    train_net: str | None = None
    test_net: tuple[str, ...] = ()
    train_net_param: Message | None = None
    test_net_param: tuple[Message, ...] = ()
    train_state: NetState | None = None
    test_state: tuple[NetState, ...] = ()
    test_iter: tuple[int, ...] = ()
    test_interval: int = 0
    test_compute_loss: bool = False
    test_initialization: bool = True
    base_lr: float = 0.0
    display: int = 0
    average_loss: int = 1
    max_iter: int = 0
    iter_size: int = 1
    lr_policy: Policy
    gamma: float = 0.0
    power: float = 0.0
    momentum: float = 0.0
    weight_decay: float = 0.0
    regularization_type: Literal["L2", "L1"] = "L2"
    stepsize: int = 0
    stepvalue: tuple[int, ...] = ()
    clip_gradients: float = -1.0
    snapshot: int = 0
    snapshot_prefix: str | None = None
    snapshot_diff: bool = False
    snapshot_format: Literal["HDF5", "BINARYPROTO"] = "BINARYPROTO"
    solver_mode: Literal["CPU", "GPU"] = "GPU"
    device_id: int = 0
    random_seed: int = -1
    type: SolverType = "SGD"
    delta: float = float32(1e-8)
    momentum2: float = float32(0.999)
    rms_decay: float = float32(0.99)
    debug_info: bool = False
    snapshot_after_train: bool = True
    layer_wise_reduce: bool = True
    weights: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in FLOATS:
            value = getattr(self, name)
            # A bool is an int in Python; base_lr=True is a mistake.
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise InputError(f"{name}={value!r} is not a number. Pass a float.")
            # The dataclass is frozen; this is its own constructor.
            object.__setattr__(self, name, float32(float(value)))
        for name in INTS:
            value = getattr(self, name)
            if type(value) is not int:  # isinstance would accept True
                raise InputError(f"{name}={value!r} is not an integer. Pass an int.")
        refused = violation({field.name: getattr(self, field.name) for field in dataclasses.fields(self)})
        if refused is not None:
            given = f"{refused.field}={getattr(self, refused.field)!r}"
            raise InputError(f"{given} is not allowed: {refused.wrong}. {refused.do}.")


FLOATS = (
    "base_lr",
    "gamma",
    "power",
    "momentum",
    "weight_decay",
    "clip_gradients",
    "delta",
    "momentum2",
    "rms_decay",
)
"""The fields that are floats."""

INTS = (
    "test_interval",
    "display",
    "average_loss",
    "max_iter",
    "iter_size",
    "stepsize",
    "snapshot",
    "device_id",
    "random_seed",
)
"""The fields that are one int each."""


@dataclass(frozen=True)
class Violation:
    """Reason why a solver is refused.

    Attributes:
        field: the field that is wrong, or missing.
        wrong: the reason.
        do: the remedy, as a sentence without its full stop.
        because: the field whose value requires `field`, if another one does.
    """

    field: str
    wrong: str
    do: str
    because: str | None = None


def violation(values: dict[str, Any]) -> Violation | None:
    """Find the first value that Caffe refuses when it starts, or that fails while it trains.

    Args:
        values: every field of `SolverConfig` by name, of the right types.

    Returns:
        The first violation; None if there is none.

    Examples:
        >>> values = {field.name: field.default for field in dataclasses.fields(SolverConfig)}
        >>> violation({**values, "lr_policy": "step", "gamma": 0.1}).field
        'stepsize'
    """
    return _choices(values) or _numbers(values) or _policy(values) or _solver(values)


def _choices(values: dict[str, Any]) -> Violation | None:
    choices = {
        "lr_policy": POLICIES,
        "type": TYPES,
        "regularization_type": ("L2", "L1"),
        "snapshot_format": ("HDF5", "BINARYPROTO"),
        "solver_mode": ("CPU", "GPU"),
    }
    for name, known in choices.items():
        if values[name] not in known:
            wrong = f"Caffe supports {', '.join(known)}"
            return Violation(name, wrong, f'Write one of these, such as "{known[0]}"')
    return None


def _numbers(values: dict[str, Any]) -> Violation | None:
    for name in FLOATS:
        value = values[name]
        # An infinite threshold is valid: it never clips.
        if math.isnan(value) or (math.isinf(value) and name != "clip_gradients"):
            return Violation(name, "every weight would become NaN", "Write a finite number")
    for name in ("iter_size", "average_loss"):
        if values[name] < 1:
            return Violation(name, "at least 1 is needed", "Write 1 or more")
    if values["max_iter"] < 0:
        return Violation("max_iter", "the number of updates cannot be negative", "Write 0 or more")
    return None


def _policy(values: dict[str, Any]) -> Violation | None:
    policy = values["lr_policy"]
    if policy in ("step", "sigmoid") and values["stepsize"] < 1:
        return Violation(
            "stepsize",
            f'lr_policy "{policy}" needs a stepsize above 0',
            "Write stepsize: and a number of updates",
            "lr_policy",
        )
    if policy not in ("fixed", "poly") and values["gamma"] < 0:
        return Violation(
            "gamma", f'lr_policy "{policy}" needs a gamma of 0 or more', "Write gamma: 0.1, for example"
        )
    if policy == "poly" and values["max_iter"] < 1:
        return Violation(
            "max_iter",
            'lr_policy "poly" lowers the rate to 0 at max_iter',
            "Write max_iter: and the number of updates",
            "lr_policy",
        )
    return None


def _solver(values: dict[str, Any]) -> Violation | None:
    kind = values["type"]
    if kind in ("AdaGrad", "RMSProp") and values["momentum"] != 0:
        return Violation("momentum", f"Caffe's {kind} has no momentum", "Remove it")
    if kind == "RMSProp" and not 0 <= values["rms_decay"] < 1:
        return Violation("rms_decay", "it must be at least 0 and below 1", "Write 0.99, for example")
    if kind == "Adam" and not (0 <= values["momentum"] < 1 and 0 <= values["momentum2"] < 1):
        # Adam divides by 1 - momentum^t and takes the root of 1 - momentum2^t.
        name = "momentum2" if 0 <= values["momentum"] < 1 else "momentum"
        return Violation(name, "Adam needs a value of at least 0 and below 1", "Write 0.9, for example")
    return None
