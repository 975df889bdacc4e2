"""Reads the values that people type: sizes, durations, numbers, switches, choices.

One reader serves a command line flag, an environment variable and a TOML key, so a value means the same wherever it
stands; TOML's own numbers and booleans pass through the same checks as text.  A reader either answers with the value
or raises ValueError saying what was expected and what came; it does not know the name of the option, because only its
caller knows where the text came from.

Sizes follow vLLM: k, m, g, t are powers of 1000 and K, M, G, T powers of 1024.  Rejected alternative: "GB", which half
of all readers take for one and half for the other.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

Reader = Callable[[object], Any]

_SIZE = re.compile(r"(\d+(?:\.\d+)?)([kmgtKMGT]?)")
_PIECE = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_DRILLS = ("yield", "migrate", "partition")
_ON = ("on", "true", "yes", "1")
_OFF = ("off", "false", "no", "0")


def text(value: object) -> str:
    """Read a non-empty string."""
    if not isinstance(value, str) or not value:
        raise ValueError(f"expected text, got {value!r}")
    return value


def switch(value: object) -> bool:
    """Read on or off."""
    if isinstance(value, bool):
        return value
    word = str(value).lower()
    if word in _ON or word in _OFF:
        return word in _ON
    raise ValueError(f"expected on or off, got {value!r}")


def choice(*names: str) -> Reader:
    """Return a reader of one of `names`, whatever its case."""

    def read(value: object) -> str:
        if isinstance(value, str) and value.lower() in names:
            return value.lower()
        raise ValueError(f"expected one of {', '.join(names)}, got {value!r}")

    return read


def size(least: int = 1) -> Reader:
    """Return a reader of whole numbers >= `least`, with the suffixes of vLLM (1k = 1000, 1K = 1024, 25.6k)."""

    def read(value: object) -> int:
        wrong = ValueError(
            f"expected a whole number >= {least} such as 512, 25.6k (thousands) or 8G (1024^3), got {value!r}"
        )
        if isinstance(value, bool) or not isinstance(value, int | str):
            raise wrong
        match = _SIZE.fullmatch(str(value).strip())
        if match is None:
            raise wrong
        number, suffix = match.groups()
        base = 1024 if suffix.isupper() else 1000
        exact = Fraction(number) * base ** " kmgt".index(suffix.lower() or " ")
        if exact.denominator != 1 or exact < least:
            raise wrong
        return int(exact)

    return read


def integer(least: int | None = None) -> Reader:
    """Return a reader of plain integers, not below `least`."""

    def read(value: object) -> int:
        bound = "" if least is None else f" >= {least}"
        wrong = ValueError(f"expected an integer{bound}, got {value!r}")
        if isinstance(value, bool) or not isinstance(value, int | str):
            raise wrong
        if not re.fullmatch(r"[+-]?\d+", str(value).strip()):
            raise wrong
        number = int(value)
        if least is not None and number < least:
            raise wrong
        return number

    return read


def top_k(value: object) -> int:
    """Read the number of tokens to draw from; 0, like -1, means no limit and is returned as 0."""
    limit: int = integer(-1)(value)
    return max(0, limit)


def number(least: float, most: float, *, above: bool = False) -> Reader:
    """Return a reader of finite numbers from `least` to `most`; `above` leaves out `least` itself."""

    def read(value: object) -> float:
        low = f"{'>' if above else '>='} {least:g}"
        bound = low if math.isinf(most) else f"{low} and <= {most:g}"
        wrong = ValueError(f"expected a number {bound}, got {value!r}")
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise wrong
        try:
            result = float(value)
        except (ValueError, OverflowError):
            raise wrong from None
        if not math.isfinite(result) or not least <= result <= most or (above and result == least):
            raise wrong
        return result

    return read


def duration(value: object) -> float:
    """Read seconds: 90, 1.5s, 250ms, 5m, 1h30m."""
    wrong = ValueError(f"expected a duration such as 90, 250ms, 5m or 1h30m, got {value!r}")
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = str(value)
    if not isinstance(value, str):
        raise wrong
    word = value.strip()
    if re.fullmatch(r"\d+(\.\d+)?", word):
        return float(word)
    if not re.fullmatch(rf"(?:{_PIECE.pattern})+", word):
        raise wrong
    return sum(float(amount) * _SECONDS[unit] for amount, unit in _PIECE.findall(word))


def max_errors(value: object) -> str:
    """Read how many rows may fail: a number of rows such as 20, or a share of all rows such as 1%."""
    error_allowance(value)
    return str(value).strip()


def error_allowance(value: object) -> tuple[float, bool]:
    """Return how many rows may fail and whether that is a percentage.  Raise ValueError when `value` is neither."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)%|(\d+)", str(value).strip())
    if isinstance(value, bool) or found is None or (found[1] and float(found[1]) > 100):
        raise ValueError(f"expected a number of rows such as 20 or a share such as 1%, got {value!r}")
    return float(found[1] or found[2]), found[1] is not None


def limit(value: object) -> float:
    """Read a duration, or off, which like 0 is returned as 0."""
    if isinstance(value, str) and value.strip().lower() == "off":
        return 0.0
    return duration(value)


def drill(value: object) -> str:
    """Read which primitives to force in every K-th round, such as yield=3,migrate=5; each at most once, K >= 1."""
    drill_rounds(value)
    return str(value).strip().lower()


def drill_rounds(value: object) -> dict[str, int]:
    """Return the K of every primitive that a drill names.  Raise ValueError when `value` is not a drill."""
    wrong = ValueError(
        f"expected {','.join(f'{name}=K' for name in _DRILLS)} or some of them, K a whole number >= 1, got {value!r}"
    )
    if not isinstance(value, str):
        raise wrong
    rounds: dict[str, int] = {}
    for word in value.strip().lower().split(","):
        name, _, count = (piece.strip() for piece in word.partition("="))
        if name not in _DRILLS or name in rounds or not re.fullmatch(r"[1-9]\d{0,8}", count):
            raise wrong
        rounds[name] = int(count)
    return rounds
