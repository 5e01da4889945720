"""AdaScale: a learning rate and a measure of progress for any batch size.

An update with a batch kappa times the base batch is worth ``r = gain(kappa, B_noise / base)`` updates with
the base batch. So its rate is ``r lr0(tau)``, and the progress ``tau`` grows by r: a schedule that was made
for the base batch takes as many *units of progress* with any batches, and training ends at the same tau.

Source: Johnson, Agrawal, Gu & Guestrin 2020, https://arxiv.org/abs/2007.05105; here with a gain from past
windows, so that the rate of a window does not depend on its own noise.
"""

from __future__ import annotations

# pyright: strict
from collections.abc import Callable, Mapping
from typing import Any

from ..errors import InputError
from ..results.noise import Noise
from .noise_range import noise_range
from .scaling import gain


class AdaScale:
    """The rate of each update, and the progress made.

    Args:
        rate: lr0, the rate at the base batch as a function of tau (of updates with the base batch).
        base_batch: samples of an update that `rate` is for.
        power: of the gain in the rate: 1 for SGD, 0.5 for Adam.

    Raises:
        InputError: a value cannot be used.

    Examples:
        >>> adascale = AdaScale(lambda tau: 0.1 * 0.5 ** (tau // 100), base_batch=32)
        >>> adascale.rate(batch=128, noise=96.0)  # gain 4 / 1.75: less than the 4 of linear scaling
        0.228...
        >>> for _ in range(44):
        ...     adascale.advance()
        >>> round(adascale.progress, 1), adascale.rate(batch=128, noise=96.0)
        (100.6, 0.114...)
    """

    def __init__(self, rate: Callable[[float], float], base_batch: float, *, power: float = 1.0) -> None:
        for name, value in (("base_batch", base_batch), ("power", power)):
            if isinstance(value, bool) or not 0 < value < float("inf"):
                raise InputError(f"{name}={value!r} is not a positive number. Pass one.")
        self._rate, self._base, self._power = rate, base_batch, power
        self._progress, self._gain = 0.0, 1.0

    @property
    def progress(self) -> float:
        """tau: how many updates with the base batch the updates so far were worth."""
        return self._progress

    @property
    def gain(self) -> float:
        """The gain of the rate that was asked for last."""
        return self._gain

    def rate(self, batch: float, noise: Noise | float | None) -> float:
        """Return the rate of the next update.

        Args:
            batch: its samples.
            noise: the noise scale, as measured or in samples. Where it is not determined the lower end of its
                interval counts: the smallest gain that the data allow, and 1 where nothing is known.

        Returns:
            ``r ** power lr0(tau)``.
        """
        known = noise_range(noise)
        scale = known.low if known.value is None else known.value
        self._gain = gain(batch / self._base, scale / self._base)
        return self._gain**self._power * self._rate(self._progress)

    def advance(self) -> None:
        """Note that the update was made."""
        self._progress += self._gain

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save: the progress, and the gain of the update that is due."""
        return {"version": 1, "progress": self._progress, "gain": self._gain}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a saved state.

        Args:
            state: from `state_dict`.

        Raises:
            InputError: it is no such state.
        """
        if state.get("version") != 1:
            raise InputError(
                "The state has no version 1, so no AdaScale saved it. Pass what its state_dict() returned."
            )
        self._progress, self._gain = float(state["progress"]), float(state["gain"])
