"""Reading the fields of one request body, each with its type and range, so that every refusal sounds alike.

JSON has one kind of number and Python's bool is an int; the readers here are stricter than both: true is not 1, 2.5
and "4" are not 4, null means "not given", as clients of the OpenAI API send it.  A `Refused` names the field, what was
expected and what was got; it never leaves `bgmpi.io`: the reader turns it into the row's error.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

INVALID = "invalid_request_error"
CONTEXT = "context_length_exceeded"
MODEL = "model_not_found"


class Refused(Exception):
    """One row cannot be run; `code`, `message` and `param` become its RowError."""

    def __init__(self, message: str, param: str | None = None, code: str = INVALID) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class Fields:
    """The fields of one body.  Every read takes its field; `refuse_rest` deals with what nobody took."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        self._left = {key: value for key, value in body.items() if value is not None}

    def take(self, name: str) -> Any:
        """Return the raw value, None when absent or null."""
        return self._left.pop(name, None)

    def integer(self, name: str, low: int, high: int | None = None) -> int | None:
        """Return a whole number of `low`..`high`, None when absent."""
        value = self.take(name)
        if value is None:
            return None
        wanted = f"a whole number of at least {low}" if high is None else f"a whole number from {low} to {high}"
        if type(value) is not int or value < low or (high is not None and value > high):
            expected(name, wanted, value)
        return value

    def number(self, name: str, low: float, high: float = math.inf, *, above: bool = False) -> float | None:
        """Return a finite number of `low`..`high` (more than `low` if `above`), None when absent."""
        value = self.take(name)
        if value is None:
            return None
        bound = f"more than {low:g}" if above else f"at least {low:g}"
        wanted = f"a number of {bound}" + ("" if math.isinf(high) else f" and at most {high:g}")
        if type(value) not in (int, float):
            expected(name, wanted, value)
        try:
            found = float(value)
        except OverflowError:
            found = math.inf
        if not math.isfinite(found) or found < low or found > high or (above and found == low):
            expected(name, wanted, value)
        return found

    def boolean(self, name: str, default: bool) -> bool:
        """Return true or false."""
        value = self.take(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            expected(name, "true or false", value)
        return value

    def mapping(self, name: str) -> Mapping[str, Any] | None:
        """Return a JSON object, None when absent."""
        value = self.take(name)
        if value is not None and not isinstance(value, dict):
            expected(name, "an object", value)
        return value

    def objects(self, name: str) -> list[dict[str, Any]] | None:
        """Return a list of JSON objects, None when absent."""
        value = self.take(name)
        if value is not None and (not isinstance(value, list) or not all(isinstance(part, dict) for part in value)):
            expected(name, "a list of objects", value)
        return value

    def refuse_rest(self, harmless: frozenset[str], unsupported: Mapping[str, Sequence[Any]]) -> None:
        """Refuse every field left but the `harmless` ones and `unsupported` ones that ask for nothing.

        `unsupported` maps a field to the values with which it changes nothing.
        """
        for name, value in self._left.items():
            neutral = unsupported.get(name, ())
            if name in harmless or any(type(value) is type(same) and value == same for same in neutral):
                continue
            if name in unsupported:
                raise Refused(f"{name} is not supported by this program; leave it out", name)
            raise Refused(f"{name} is not a known field; leave it out or check its spelling", name)


def expected(name: str, wanted: str, got: Any) -> NoReturn:
    """Refuse field `name`, saying what was expected and what was got."""
    shown = repr(got)
    raise Refused(f"{name}: expected {wanted}, got {shown if len(shown) <= 60 else shown[:57] + '...'}", name)
