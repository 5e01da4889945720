"""Tokens of protobuf's text format, each with its line and column."""

from __future__ import annotations

# pyright: strict
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from ..errors import PrototxtError

Kind = Literal["name", "number", "string", "mark", "end"]

_NUMBER = re.compile(r"0[xX][0-9a-fA-F]+|(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?[fF]?")
_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_STRING = re.compile(r'"(?:[^"\\\n]|\\.)*"|\'(?:[^\'\\\n]|\\.)*\'')
_SPACE = re.compile(r"(?:[ \t\r\n\v\f]+|#[^\n]*)+")
_MARKS = ":{}<>[],;-"
_LONGEST = 60  # characters that an error quotes: a line of a file may have millions


@dataclass(frozen=True)
class Token:
    """A token of the file.

    Attributes:
        kind: its type; ``"end"`` marks the end of the file.
        text: as it is written.
        line: line of its first character, counted from 1.
        column: column of its first character, counted from 1.
    """

    kind: Kind
    text: str
    # Not compared: files with the same content are equal, whatever their layout.
    line: int = field(compare=False)
    column: int = field(compare=False)

    @property
    def shown(self) -> str:
        """Return the text that an error shows."""
        return "the end of the file" if self.kind == "end" else repr(shortened(self.text))


def shortened(text: str) -> str:
    """Shorten a text of the file so that an error can quote it.

    Examples:
        >>> shortened("gamma"), len(shortened("9" * 1000))
        ('gamma', 63)
    """
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def wrong_at(line: int, column: int, given: str, wrong: str, do: str) -> PrototxtError:
    """Build the error for a position in the file.

    Examples:
        >>> print(wrong_at(3, 7, "gamma 0.1", "a colon is missing", "Write gamma: 0.1"))
        line 3, column 7: gamma 0.1: a colon is missing. Write gamma: 0.1.
    """
    # The position first, as in compiler messages, which editors can follow.
    text = f"line {line}, column {column}: {given}: {wrong}. {do}."
    return PrototxtError(text, line=line, column=column)


def wrong_token(token: Token, wrong: str, do: str) -> PrototxtError:
    """Build the error for a token, with its position and its text.

    Examples:
        >>> wrong_token(Token("name", "gama", 3, 1), "there is no such field", "Write gamma").column
        1
    """
    return wrong_at(token.line, token.column, token.shown, wrong, do)


def tokens(text: str) -> Iterator[Token]:
    """Split a text into tokens, without comments and white space.

    Args:
        text: text of the file.

    Yields:
        The tokens in order; the last one has the kind ``"end"``.

    Raises:
        PrototxtError: an unexpected character, a string that is not closed, or a number followed by letters.

    Examples:
        >>> [token.text for token in tokens('base_lr: 1e-3  # small')]
        ['base_lr', ':', '1e-3', '']
    """
    offset, line, start = 0, 1, 0  # start: of the line, from which columns are counted
    while True:
        if space := _SPACE.match(text, offset):
            newlines = space.group().count("\n")
            if newlines:
                line, start = line + newlines, text.rindex("\n", offset, space.end()) + 1
            offset = space.end()
        column = offset - start + 1
        if offset == len(text):  # after the space, so that an error at the end has a position in the file
            yield Token("end", "", line, column)
            return
        token = _token(text, offset, line, column)
        yield token
        offset += len(token.text)


def _token(text: str, offset: int, line: int, column: int) -> Token:
    character = text[offset]
    # Names first: they are the most frequent token, and no number starts with a letter.
    if match := _NAME.match(text, offset):
        return Token("name", match.group(), line, column)
    if match := _NUMBER.match(text, offset):
        number = Token("number", match.group(), line, column)
        # Without this check, 10k would become the number 10 and a field named k.
        after = text[match.end() : match.end() + 1]
        if after and (after.isalnum() or after in "_."):
            raise wrong_at(
                line,
                column,
                f"{shortened(number.text + after)!r}...",
                "this is not a number",
                "Write a number such as 10 or 1e-3",
            )
        return number
    if character in "\"'":
        if match := _STRING.match(text, offset):
            return Token("string", match.group(), line, column)
        raise wrong_at(
            line,
            column,
            # Cut before the split: a line may have millions of characters.
            repr(shortened(text[offset : offset + _LONGEST + 1].split("\n", 1)[0])),
            "the string is not closed on its line",
            f"Close it with {character}",
        )
    if character in _MARKS:
        return Token("mark", character, line, column)
    raise wrong_at(line, column, repr(character), "no field or value starts with this character", "Remove it")
