"""Every error that superbatch raises on purpose, and the one form its text has: given, wrong, do."""

from __future__ import annotations


class SuperbatchError(Exception):
    """The base of all errors of this library."""


class InputError(SuperbatchError, ValueError):
    """An argument has the wrong type or value."""


class PrototxtError(InputError):
    """A file in protobuf's text format cannot be read.

    Attributes:
        line: where, counted from 1.
        column: the character of that line, counted from 1 (a tab is one character).
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
    """The optimizer cannot be used with gradient accumulation, or not with this model."""


class OutOfMemoryError(SuperbatchError, MemoryError):
    """There is no memory for what must be done in one piece: a sample, or an update."""


class CheckpointError(SuperbatchError, ValueError):
    """A checkpoint cannot be written, or is not one that can be loaded here."""


class WindowError(SuperbatchError, RuntimeError):
    """A window was used out of order."""


class RankError(SuperbatchError, RuntimeError):
    """Another rank failed or ended, or the ranks are not at the same window."""


def instruction(text: str) -> str:
    """Return a remedy as the sentence that begins with it: its first word, unless it is code, with a capital.

    Examples:
        >>> instruction("pass a positive int"), instruction("model.eval()")
        ('Pass a positive int', 'model.eval()')
    """
    first = text.split(" ", 1)[0].rstrip(",:;")
    return text[:1].upper() + text[1:] if first.isalpha() else text
