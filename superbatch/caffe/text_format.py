"""Parser of protobuf's text format: a tree of fields, each with its line and column.

The grammar: a message is a sequence of fields. A field is a name, a colon and a value, or a name and a
message in ``{}`` or ``<>``, where the colon is optional. A value is a number, a word or one or more strings,
which are joined. ``[a, b]`` repeats a field. A comma or semicolon may follow a field. ``#`` starts a comment.

protobuf's own parser is not used, because its errors lose the positions of fields (decision 0049).

Source: https://protobuf.dev/reference/protobuf/textformat-spec/
"""

from __future__ import annotations

# pyright: strict
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from .tokens import Token, shortened, tokens, wrong_token

_CLOSES = {"{": "}", "<": ">"}
_DEEPEST = 100  # protobuf's limit; without one, a file could exhaust the stack
_ESCAPE = re.compile(rb"\\(?:([0-7]{1,3})|[xX]([0-9a-fA-F]{1,2})|(.))", re.DOTALL)
_LETTERS = {b"n": b"\n", b"t": b"\t", b"r": b"\r", b"a": b"\a", b"b": b"\b", b"f": b"\f", b"v": b"\v"}


@dataclass(frozen=True)
class Scalar:
    """Value of a field that is not a message.

    Attributes:
        token: its first token, without a sign.
        text: a number or a word as written; the content of strings, joined and without escapes.
        negative: True if a minus precedes it.
    """

    token: Token = field(compare=False)
    text: str
    negative: bool = False

    @property
    def string(self) -> str | None:
        """Return the content of a string; None for a number or a word."""
        return self.text if self.token.kind == "string" else None

    @property
    def shown(self) -> str:
        """Return the text that an error shows."""
        return f"{'-' if self.negative else ''}{self.token.text}"


@dataclass(frozen=True)
class Message:
    """Fields of a message, in the order of the file."""

    fields: tuple[Field, ...]


@dataclass(frozen=True)
class Field:
    """Name and value of a field; a list ``[a, b]`` becomes two fields.

    Attributes:
        name: the token of the name.
        value: a scalar or a message.
        in_list: True if the value is in a list, which only a repeated field may have.
    """

    name: Token
    value: Scalar | Message
    in_list: bool = field(default=False, compare=False)


def parse(text: str) -> Message:
    """Parse a text; the names of fields are not checked.

    Args:
        text: text of the file.

    Returns:
        The fields with their positions.

    Raises:
        PrototxtError: the text is not in the format; the error has line and column.

    Examples:
        >>> [field.name.text for field in parse("stepvalue: [1, 2] net_param { name: 'n' }").fields]
        ['stepvalue', 'stepvalue', 'net_param']
        >>> parse("gamma 0.1")
        Traceback (most recent call last):
        superbatch.errors.PrototxtError: line 1, column 7: '0.1': a colon is missing ...
    """
    reader = _Reader(text)
    fields = tuple(reader.fields(None, 0))
    return Message(fields)


class _Reader:
    """Recursive-descent parser with one token of lookahead."""

    def __init__(self, text: str) -> None:
        self._tokens = tokens(text)
        self._next = next(self._tokens)

    def fields(self, opened: Token | None, depth: int) -> Iterator[Field]:
        """Read fields up to the mark that closes `opened`, or up to the end of the file if it is None."""
        closes = None if opened is None else _CLOSES[opened.text]
        while True:
            token = self._take()
            if token.kind == "end" and opened is not None:
                raise wrong_token(
                    token,
                    f"the message opened in line {opened.line}, column {opened.column} is not closed",
                    f"Close it with {closes}",
                )
            if token.kind == "end" or (token.kind == "mark" and token.text == closes):
                return
            if token.kind != "name":
                raise wrong_token(token, "a field name is expected", "Write name: value")
            yield from self._field(token, depth)
            if self._next.kind == "mark" and self._next.text in ",;":
                self._take()

    def _field(self, name: Token, depth: int) -> Iterator[Field]:
        # A colon is optional before a message, so the next token decides what is missing.
        colon = self._mark(":")
        if self._at_message():
            yield Field(name, self._message(depth))
        elif not colon:
            raise wrong_token(
                self._next,
                f"a colon is missing after {shortened(name.text)}",
                f"Write {shortened(name.text)}: and the value",
            )
        elif self._mark("["):
            yield from self._list(name, depth)
        else:
            yield Field(name, self._scalar(name))

    def _list(self, name: Token, depth: int) -> Iterator[Field]:
        if self._mark("]"):  # an empty list gives no field
            return
        while True:
            value = self._message(depth) if self._at_message() else self._scalar(name)
            yield Field(name, value, in_list=True)
            if self._mark("]"):
                return
            if not self._mark(","):
                raise wrong_token(
                    self._next,
                    f"a comma is missing in the list of {shortened(name.text)}",
                    "Write a comma or close the list with ]",
                )

    def _message(self, depth: int) -> Message:
        opened = self._take()
        if depth == _DEEPEST:  # before the recursion
            raise wrong_token(opened, f"messages are nested more than {depth} deep", "Remove levels")
        return Message(tuple(self.fields(opened, depth + 1)))

    def _scalar(self, name: Token) -> Scalar:
        negative = self._mark("-")  # a token of its own: "- 2" is -2, as in C++
        token = self._next
        if token.kind == "string" and not negative:
            text = b""  # bytes: an escape may be a part of a UTF-8 character
            while self._next.kind == "string":  # adjacent strings are joined
                text += _unescape(self._take())
            try:
                return Scalar(token, text.decode())
            except UnicodeDecodeError as error:
                raise wrong_token(token, "the string is not valid UTF-8", "Correct its escapes") from error
        if token.kind not in ("name", "number"):
            raise wrong_token(
                token, f"{shortened(name.text)} has no value", "Write a number, a word or a string"
            )
        return Scalar(self._take(), token.text, negative)

    def _at_message(self) -> bool:
        return self._next.kind == "mark" and self._next.text in _CLOSES

    def _mark(self, text: str) -> bool:
        """Consume the mark `text` if it is next; False if it is not."""
        if self._next.kind == "mark" and self._next.text == text:
            self._take()
            return True
        return False

    def _take(self) -> Token:
        token = self._next
        if token.kind != "end":  # nothing follows the end; it may be taken again
            self._next = next(self._tokens)
        return token


def _unescape(token: Token) -> bytes:
    def replace(match: re.Match[bytes]) -> bytes:
        octal, hexadecimal, letter = match.groups()
        if octal is not None and int(octal, 8) < 256:  # three octal digits reach 511
            return bytes([int(octal, 8)])
        if hexadecimal is not None:
            return bytes([int(hexadecimal, 16)])
        if letter in _LETTERS:
            return _LETTERS[letter]
        if letter is not None and letter in b"\\'\"?":
            return letter
        # protobuf's C++ parser, which Caffe uses, refuses unknown escapes; its Python parser accepts them.
        raise wrong_token(
            token,
            f"the string contains the unknown escape {match.group().decode()}",
            r"Write \\ for a backslash",
        )

    return _ESCAPE.sub(replace, token.text[1:-1].encode())
