"""Contradiction between a loss and its declaration: the evidence, and the declaration that holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from superbatch.batch.plan import Plan
from superbatch.errors import CoupledSamplesError, LossSpecError

from .agreement import Cut, Rounding

Kind = Literal["sum", "mean", "weight", "batch_size", "coupled_loss"]


class ContradictedError(Exception):
    """Evidence against a declaration; the caller that catches it searches for a remedy.

    Args:
        planned: the micro-batch.
        cuts: cuts of the micro-batch; the declaration is wrong for the first.
        rounding: largest differences that rounding explains.
        in_float64: the cuts were evaluated in float64 instead of the precision of the loss.
    """

    def __init__(self, planned: Plan, cuts: list[Cut], rounding: Rounding, *, in_float64: bool) -> None:
        # Users never see this text: `_examine` catches the error.
        super().__init__("the loss contradicts its declaration")
        self.planned, self.cuts, self.rounding, self.in_float64 = planned, cuts, rounding, in_float64


@dataclass(frozen=True)
class Contradiction:
    """Wrong declaration of a loss, and its remedy.

    Args:
        kind: kind of the `superbatch.results.verification.Finding`.
        detail: description of the error, without a full stop.
        remedy: instruction, without a full stop.
        evidence: largest relative error of a parameter's gradient, or of the loss.
        coupled: no weights explain the loss: samples influence each other.

    Examples:
        >>> found = Contradiction("mean", "loss_fn returns a mean", 'pass reduction="mean"', 0.5)
        >>> found.error()
        LossSpecError('loss_fn returns a mean. Instead pass reduction="mean".')
    """

    kind: Kind
    detail: str
    remedy: str
    evidence: float
    coupled: bool = False

    def error(self) -> LossSpecError | CoupledSamplesError:
        """Return the error to raise."""
        # The name `loss_fn` is not capitalized.
        what = self.detail if self.detail.startswith("loss_fn") else self.detail[0].upper() + self.detail[1:]
        text = f"{what}. Instead {self.remedy}."
        # Two types: coupled samples need WholeBatch, a wrong declaration needs another argument.
        return CoupledSamplesError(text) if self.coupled else LossSpecError(text)
