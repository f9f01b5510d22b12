"""The parameters of a request, read within bounds, and its refusal in plain words."""

from __future__ import annotations

import math
from collections.abc import Mapping
from urllib.parse import parse_qsl

MAX_QUERY_LENGTH = 8192
MAX_PARAMETERS = 32
MAX_POSITION = (1 << 62) - 1

BAD, NOT_IN_RING, NOT_FOUND, UNREADABLE, TOO_LARGE = 400, 410, 404, 409, 413


class Refusal(Exception):
    """A request that is not answered.

    Attributes:
        status: The HTTP status.
        text: What is wrong, for the person who reads the page.
    """

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status
        self.text = text


class Query:
    """The parameters of one request."""

    def __init__(self, values: Mapping[str, str]) -> None:
        """Take decoded parameters; see `parse` for text."""
        self.values = dict(values)

    @classmethod
    def parse(cls, text: str) -> Query:
        """Read a query string.

        Raises:
            Refusal: It is too long, has too many parameters, or is not UTF-8.
        """
        if len(text) > MAX_QUERY_LENGTH:
            raise Refusal(BAD, f"The query is longer than {MAX_QUERY_LENGTH} bytes.")
        try:
            pairs = parse_qsl(
                text, keep_blank_values=True, max_num_fields=MAX_PARAMETERS, errors="strict"
            )
        except ValueError as error:
            raise Refusal(BAD, "The query cannot be read.") from error
        return cls(dict(pairs))

    def __contains__(self, name: str) -> bool:
        return name in self.values

    def text(self, name: str, default: str | None = None, longest: int = 1024) -> str:
        """Return a text parameter.

        Raises:
            Refusal: It is missing and has no default, or is too long.
        """
        value = self.values.get(name, default)
        if value is None:
            raise Refusal(BAD, f"The parameter {name} is missing.")
        if len(value) > longest:
            raise Refusal(BAD, f"{name} is longer than {longest} characters.")
        return value

    def integer(self, name: str, low: int, high: int, default: int | None = None) -> int:
        """Return a whole number in ``[low, high]``.

        Raises:
            Refusal: It is none, out of bounds, or missing without a default.
        """
        if name not in self.values and default is not None:
            return default
        text = self.text(name, longest=24)
        digits = text.removeprefix("-")
        if not (digits.isascii() and digits.isdigit()):
            raise Refusal(BAD, f"{name} must be a whole number, got {text!r}.")
        value = int(text)
        if not low <= value <= high:
            raise Refusal(BAD, f"{name} must be between {low} and {high}, got {value}.")
        return value

    def number(self, name: str, low: float, high: float, default: float) -> float:
        """Return a number in ``[low, high]``.

        Raises:
            Refusal: It is none, or out of bounds.
        """
        if name not in self.values:
            return default
        value = _number(name, self.text(name, longest=40))
        if not low <= value <= high:
            raise Refusal(BAD, f"{name} must be between {low:g} and {high:g}, got {value:g}.")
        return value

    def limits(self, name: str) -> tuple[float, float] | None:
        """Return two numbers ``low,high``, or None where the parameter is missing.

        Raises:
            Refusal: It is something else.
        """
        if name not in self.values:
            return None
        low, comma, high = self.text(name, longest=80).partition(",")
        if not comma:
            raise Refusal(BAD, f"{name} must be two numbers, such as {name}=0,100.")
        return _number(name, low), _number(name, high)

    def choice(self, name: str, choices: tuple[str, ...], default: str) -> str:
        """Return one of some words.

        Raises:
            Refusal: It is another.
        """
        value = self.values.get(name, default)
        if value not in choices:
            words = ", ".join(choice or "(empty)" for choice in choices)
            raise Refusal(BAD, f"{name} must be one of {words}, got {value[:40]!r}.")
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        """Return whether a parameter is 1; it must be 0 or 1."""
        return self.choice(name, ("0", "1"), "1" if default else "0") == "1"

    def rows(self, name: str, maximum: int) -> list[tuple[int, int]]:
        """Return pairs ``environment:position,...``.

        Raises:
            Refusal: They are something else, or too many.
        """
        text = self.text(name, longest=MAX_QUERY_LENGTH)
        pairs = []
        for item in text.split(","):
            env_id, colon, position = item.partition(":")
            legal = colon and all(
                part.isascii() and part.isdigit() and len(part) <= 19 for part in (env_id, position)
            )
            if not legal or max(int(env_id), int(position)) > MAX_POSITION:
                raise Refusal(BAD, f"{name} must be environment:position,environment:position.")
            pairs.append((int(env_id), int(position)))
        if len(pairs) > maximum:
            raise Refusal(BAD, f"{name} must name at most {maximum} rows, got {len(pairs)}.")
        return pairs


def _number(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if math.isnan(value):
        raise Refusal(BAD, f"{name} must be a number, got {text[:40]!r}.")
    return value
