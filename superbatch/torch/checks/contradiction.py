"""A loss that contradicts its declaration: the evidence, and the declaration that holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from superbatch.batch.plan import Plan
from superbatch.errors import CoupledSamplesError, LossSpecError

from .agreement import Cut, Rounding

Kind = Literal["sum", "mean", "weight", "batch_size", "coupled_loss"]


class ContradictedError(Exception):
    """Evidence against a declaration, raised to where a remedy is searched for.

    Args:
        planned: the micro-batch.
        cuts: of it; the declaration does not hold for the first.
        rounding: differences to be expected of a declaration that holds.
        in_float64: whether the cuts were evaluated in float64 instead of the loss's own precision.
    """

    def __init__(self, planned: Plan, cuts: list[Cut], rounding: Rounding, *, in_float64: bool) -> None:
        # Never shown: `_examine` catches it and looks for a remedy.
        super().__init__("the loss contradicts its declaration")
        self.planned, self.cuts, self.rounding, self.in_float64 = planned, cuts, rounding, in_float64


@dataclass(frozen=True)
class Contradiction:
    """A wrong declaration about a loss, and the remedy.

    Args:
        kind: as of `superbatch.results.verification.Finding`.
        detail: the error, without a full stop.
        remedy: an instruction, without a full stop.
        evidence: how far the gradient of a parameter (or the loss) is off, relatively.
        coupled: no declaration about weights explains the loss.

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
        # `loss_fn` stays as it is typed.
        what = self.detail if self.detail.startswith("loss_fn") else self.detail[0].upper() + self.detail[1:]
        text = f"{what}. Instead {self.remedy}."
        # Coupled samples need another tool, such as WholeBatch; a wrong declaration another argument.
        return CoupledSamplesError(text) if self.coupled else LossSpecError(text)
