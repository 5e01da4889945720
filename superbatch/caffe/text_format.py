"""Protobuf's text format: a text becomes a tree of fields, each with its place.

The grammar in one paragraph: a message is a row of fields; a field is a name, a colon and a value, or a name
and a message in ``{}`` or ``<>`` (there the colon may be left out); a value is a number, a word or one or
several strings in a row; ``[a, b]`` repeats a field; a comma or semicolon may follow a field; ``#`` begins a
comment.

Source: https://protobuf.dev/reference/protobuf/textformat-spec/
"""

from __future__ import annotations

# pyright: strict
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from .tokens import Token, shortened, tokens, wrong_token

_CLOSES = {"{": "}", "<": ">"}
_DEEPEST = 100  # as protobuf: a file cannot exhaust the stack
_ESCAPE = re.compile(rb"\\(?:([0-7]{1,3})|[xX]([0-9a-fA-F]{1,2})|(.))", re.DOTALL)
_LETTERS = {b"n": b"\n", b"t": b"\t", b"r": b"\r", b"a": b"\a", b"b": b"\b", b"f": b"\f", b"v": b"\v"}


@dataclass(frozen=True)
class Scalar:
    """A value that is no message.

    Attributes:
        token: its first token, without a sign.
        text: of a number or a word, as it is written; of strings, what they say.
        negative: whether a minus stands before it.
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
        """Return the text that names it in an error."""
        return f"{'-' if self.negative else ''}{self.token.text}"


@dataclass(frozen=True)
class Message:
    """A row of fields, in the order of the file."""

    fields: tuple[Field, ...]


@dataclass(frozen=True)
class Field:
    """One value of one field; a list ``[a, b]`` becomes two of them.

    Attributes:
        name: the token of the name.
        value: a scalar or a message.
        in_list: whether it stands in a list, which only a repeated field may have.
    """

    name: Token
    value: Scalar | Message
    in_list: bool = field(default=False, compare=False)


def parse(text: str) -> Message:
    """Parse a text whose fields may be any.

    Args:
        text: of the file.

    Returns:
        The fields with their places.

    Raises:
        PrototxtError: it is not in the format, with line and column.

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
    """A text, read token by token with one token of foresight."""

    def __init__(self, text: str) -> None:
        self._tokens = tokens(text)
        self._next = next(self._tokens)

    def fields(self, opened: Token | None, depth: int) -> Iterator[Field]:
        """Read fields up to the mark that closes what was opened (None: the end of the file)."""
        closes = None if opened is None else _CLOSES[opened.text]
        while True:
            token = self._take()
            if token.kind == "end" and opened is not None:
                raise wrong_token(
                    token,
                    f"the message that begins in line {opened.line}, column {opened.column} has no end",
                    f"Close it with {closes}",
                )
            if token.kind == "end" or (token.kind == "mark" and token.text == closes):
                return
            if token.kind != "name":
                raise wrong_token(token, "the name of a field is expected", "Write name: value")
            yield from self._field(token, depth)
            if self._next.kind == "mark" and self._next.text in ",;":
                self._take()

    def _field(self, name: Token, depth: int) -> Iterator[Field]:
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
        if self._mark("]"):
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
                    "Write a comma or ]",
                )

    def _message(self, depth: int) -> Message:
        opened = self._take()
        if depth == _DEEPEST:
            raise wrong_token(opened, f"messages lie {depth} deep in each other", "Make it flatter")
        return Message(tuple(self.fields(opened, depth + 1)))

    def _scalar(self, name: Token) -> Scalar:
        negative = self._mark("-")
        token = self._next
        if token.kind == "string" and not negative:
            text = b""
            while self._next.kind == "string":  # strings in a row are one
                text += _unescape(self._take())
            try:
                return Scalar(token, text.decode())
            except UnicodeDecodeError as error:
                raise wrong_token(token, "the string is no UTF-8", "Correct its escapes") from error
        if token.kind not in ("name", "number"):
            raise wrong_token(
                token, f"{shortened(name.text)} has no value here", "Write a number, a word or a string"
            )
        return Scalar(self._take(), token.text, negative)

    def _at_message(self) -> bool:
        return self._next.kind == "mark" and self._next.text in _CLOSES

    def _mark(self, text: str) -> bool:
        """Take a mark if it comes next."""
        if self._next.kind == "mark" and self._next.text == text:
            self._take()
            return True
        return False

    def _take(self) -> Token:
        token = self._next
        if token.kind != "end":
            self._next = next(self._tokens)
        return token


def _unescape(token: Token) -> bytes:
    def replace(match: re.Match[bytes]) -> bytes:
        octal, hexadecimal, letter = match.groups()
        if octal is not None and int(octal, 8) < 256:
            return bytes([int(octal, 8)])
        if hexadecimal is not None:
            return bytes([int(hexadecimal, 16)])
        if letter in _LETTERS:
            return _LETTERS[letter]
        if letter is not None and letter in b"\\'\"?":
            return letter
        # As protobuf does in C++, which Caffe uses; in Python it takes them.
        raise wrong_token(
            token, f"the string has the unknown escape {match.group().decode()}", r"Write \\ for a backslash"
        )

    return _ESCAPE.sub(replace, token.text[1:-1].encode())
