"""Exception types of superbatch. Each text says what is wrong, with the value, and what to type instead."""

from __future__ import annotations


class SuperbatchError(Exception):
    """Base class of all errors of this library."""


class InputError(SuperbatchError, ValueError):
    """An argument has the wrong type or value."""


class PrototxtError(InputError):
    """A file in protobuf's text format cannot be read.

    Attributes:
        line: the line, counted from 1.
        column: the character in the line, counted from 1 (a tab is one character).
    """

    def __init__(self, text: str, *, line: int, column: int) -> None:
        super().__init__(text)
        self.line, self.column = line, column


class SplitError(SuperbatchError, ValueError):
    """A batch cannot be split into micro-batches as asked."""


class LossSpecError(SuperbatchError, ValueError):
    """The loss does not have the declared reduction or weight."""


class CoupledSamplesError(SuperbatchError, RuntimeError):
    """Samples of a batch influence each other, so micro-batches cannot give the batch's gradient."""


class NonFiniteError(SuperbatchError, ArithmeticError):
    """A loss or a gradient is NaN or infinite."""


class OptimizerError(SuperbatchError, TypeError):
    """The optimizer cannot be used with gradient accumulation, or cannot be used with this model."""


class OutOfMemoryError(SuperbatchError, MemoryError):
    """Memory does not suffice even for a single sample, or for an update of the optimizer."""


class CheckpointError(SuperbatchError, ValueError):
    """A checkpoint cannot be written, or cannot be loaded into this object."""


class WindowError(SuperbatchError, RuntimeError):
    """A window was used out of order."""


class RankError(SuperbatchError, RuntimeError):
    """Another rank failed or ended, or the ranks are in different windows."""


def instruction(text: str) -> str:
    """Capitalise the first word of a remedy, unless that word is code.

    Examples:
        >>> instruction("pass a positive int"), instruction("model.eval()")
        ('Pass a positive int', 'model.eval()')
    """
    first = text.split(" ", 1)[0].rstrip(",:;")
    return text[:1].upper() + text[1:] if first.isalpha() else text
