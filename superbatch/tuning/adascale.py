"""AdaScale: learning rate and training progress for batches of any size.

An update with kappa times the base batch makes as much progress as ``r = gain(kappa, B_noise / base)``
updates with the base batch. So its rate is ``r lr0(tau)``, and the progress ``tau`` grows by r. A schedule
for the base batch therefore ends at the same tau with any batches.

Source: Johnson, Agrawal, Gu & Guestrin 2020, https://arxiv.org/abs/2007.05105. Here the gain comes from past
windows, so the rate of a window does not depend on its own noise.
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
    """Learning rate of each update, and the progress so far.

    Call `rate` before each update and `advance` after it.

    Args:
        rate: lr0, the rate at the base batch as a function of tau, the progress in updates with that batch.
        base_batch: samples of one update for which `rate` was chosen.
        power: exponent of the gain in the rate: 1 for SGD, 0.5 for Adam.

    Raises:
        InputError: `base_batch` or `power` is not a positive number.

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
        """Return tau, the progress so far in updates with the base batch."""
        return self._progress

    @property
    def gain(self) -> float:
        """Return the gain from the last call of `rate`; 1 before the first."""
        return self._gain

    def rate(self, batch: float, noise: Noise | float | None) -> float:
        """Return the learning rate of the next update, and store its gain for `advance`.

        Args:
            batch: samples of the next update.
            noise: the noise scale, as a measurement or in samples; None if not known. If the measurement is
                not determined, the lower end of its interval is used, which gives the smallest gain.

        Returns:
            ``r ** power lr0(tau)``; the gain r is 1 if the noise scale is not known.
        """
        interval = noise_range(noise)
        # Without an estimate the lower end counts: a gain that is too small gives a rate that is too small,
        # which is safer than one that is too large.
        scale = interval.low if interval.value is None else interval.value
        self._gain = gain(batch / self._base, scale / self._base)
        return self._gain**self._power * self._rate(self._progress)

    def advance(self) -> None:
        """Add the gain of the last `rate` to the progress; call it after the update."""
        self._progress += self._gain

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save: the progress, and the gain of the last call of `rate`."""
        return {"version": 1, "progress": self._progress, "gain": self._gain}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from a saved state.

        Args:
            state: result of `state_dict`.

        Raises:
            InputError: the state has another version.
        """
        if state.get("version") != 1:
            raise InputError(
                f"The state has version {state.get('version')!r}, and AdaScale reads version 1. Pass the "
                "result of AdaScale.state_dict()."
            )
        self._progress, self._gain = float(state["progress"]), float(state["gain"])
