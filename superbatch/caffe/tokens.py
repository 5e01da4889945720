"""The words of protobuf's text format, each with its place in the file."""

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
_LONGEST = 60  # characters of a file that an error repeats: a line may have millions


@dataclass(frozen=True)
class Token:
    """A word of the file.

    Attributes:
        kind: what it is; ``"end"`` stands after the last one.
        text: as it is written.
        line: of its first character, counted from 1.
        column: of its first character, counted from 1.
    """

    kind: Kind
    text: str
    # Two files that say the same are equal, wherever they say it.
    line: int = field(compare=False)
    column: int = field(compare=False)

    @property
    def shown(self) -> str:
        """Return the text that names it in an error."""
        return "the end of the file" if self.kind == "end" else repr(shortened(self.text))


def shortened(text: str) -> str:
    """Cut a text of the file to what an error can repeat.

    Examples:
        >>> shortened("gamma"), len(shortened("9" * 1000))
        ('gamma', 63)
    """
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def wrong_at(line: int, column: int, given: str, wrong: str, do: str) -> PrototxtError:
    """Make the error for a place of the file.

    Examples:
        >>> print(wrong_at(3, 7, "gamma 0.1", "a colon is missing", "Write gamma: 0.1"))
        line 3, column 7: gamma 0.1: a colon is missing. Write gamma: 0.1.
    """
    # A place before the sentences, as compilers write it: editors jump there.
    text = f"line {line}, column {column}: {given}: {wrong}. {do}."
    return PrototxtError(text, line=line, column=column)


def wrong_token(token: Token, wrong: str, do: str) -> PrototxtError:
    """Make the error for a token: its place, and what is written there.

    Examples:
        >>> wrong_token(Token("name", "gama", 3, 1), "there is no such field", "Write gamma").column
        1
    """
    return wrong_at(token.line, token.column, token.shown, wrong, do)


def tokens(text: str) -> Iterator[Token]:
    """Split a text into its tokens; comments and white space are left out.

    Args:
        text: of the file.

    Yields:
        The tokens in order, at last one of kind ``"end"``.

    Raises:
        PrototxtError: a character that begins no token, a string without an end, a number run into a word.

    Examples:
        >>> [token.text for token in tokens('base_lr: 1e-3  # small')]
        ['base_lr', ':', '1e-3', '']
    """
    place, line, start = 0, 1, 0  # start: of the line
    while True:
        if space := _SPACE.match(text, place):
            newlines = space.group().count("\n")
            if newlines:
                line, start = line + newlines, text.rindex("\n", place, space.end()) + 1
            place = space.end()
        column = place - start + 1
        if place == len(text):
            yield Token("end", "", line, column)
            return
        token = _token(text, place, line, column)
        yield token
        place += len(token.text)


def _token(text: str, place: int, line: int, column: int) -> Token:
    character = text[place]
    if match := _NAME.match(text, place):
        return Token("name", match.group(), line, column)
    if match := _NUMBER.match(text, place):
        number = Token("number", match.group(), line, column)
        after = text[match.end() : match.end() + 1]
        if after and (after.isalnum() or after in "_."):
            raise wrong_at(
                line,
                column,
                f"{shortened(number.text + after)!r}...",
                "it begins like a number",
                "Correct the number",
            )
        return number
    if character in "\"'":
        if match := _STRING.match(text, place):
            return Token("string", match.group(), line, column)
        raise wrong_at(
            line,
            column,
            repr(shortened(text[place : place + _LONGEST + 1].split("\n", 1)[0])),
            "the string has no end on its line",
            f"Close it with {character}",
        )
    if character in _MARKS:
        return Token("mark", character, line, column)
    raise wrong_at(line, column, repr(character), "no field or value begins with it", "Take it out")
