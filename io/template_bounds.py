"""A jinja sandbox that ends: what a chat template computes is bounded in steps, in sizes and in seconds.

jinja's own sandbox keeps a template from reaching Python; it does not keep it from counting to 10**12 or from asking
for a text of a terabyte, and a template is a foreign program that came with the weights.  So here every turn of a
loop, call and filter is a step that is counted; what is made is measured, and before it is made where it could be far
larger than what went in; and a clock is asked at each step.  What goes beyond raises `TemplateTooLong`, which belongs
to the row.

The clock is the last resort: it is asked between steps only, and no step is long, because what goes into it is bounded.
Not promised: that a template made for nothing else finds no slow way (comparing lists that hold one another many times
is one).  Rejected: a process that renders and is killed (another program beside every rank, for each job), and signals
(they are the program's, and reach its main thread alone).
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import wraps
from typing import Any

from jinja2 import Environment, nodes
from jinja2.runtime import Context, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment

#: Of one rendering: turns of loops, calls and filters; characters of all texts together; seconds.
MOST_STEPS = 1 << 20
MOST_MADE = 1 << 28
MOST_SECONDS = 10.0
#: Characters of one text, entries of one list, bits of a whole number, and numbers that are widths, counts and so on.
MOST_CHARACTERS = 1 << 26
MOST_ENTRIES = 1 << 20
MOST_BITS = 1 << 12
MOST_COUNT = 1 << 16

_TURNS, _JOINED, _MADE = "_turns", "_joined", "_made"
# Widths inside formats: `%1000000d`, `%*d`, `{:>1000000}`, `{:{}}`.
_PERCENT = re.compile(r"%[^%a-zA-Z]*?(\d{5,}|\*)")
_BRACES = re.compile(r"\{[^{}]*[:!][^{}]*?(\d{5,}|\{)")
# Filters that turn all they are given into text.
_WRITERS = frozenset({"string", "tojson", "pprint", "urlencode", "xmlattr", "escape", "e", "forceescape"})
# Filters whose numbers are values.
_VALUES = frozenset({"default", "d", "sum", "truncate", "select", "reject", "selectattr", "rejectattr"})


class TemplateTooLong(ValueError):
    """A template computes more than any template needs."""


class BoundedSandbox(ImmutableSandboxedEnvironment):
    """The sandbox with bounds.  `begin` starts a rendering, of which there is one at a time."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, **kinds: Any) -> None:
        super().__init__(**kinds, finalize=self._written)
        self._steps = self._made_so_far = 0
        self._end = float("inf")
        for name, call in list(self.filters.items()):
            self.add_filter(name, call)
        self.filters |= {_TURNS: self._turns, _JOINED: self._joined, _MADE: self._made}
        del self.globals["lipsum"]

    def add_filter(self, name: str, call: Callable[..., Any]) -> None:
        """Add a filter, within the bounds."""

        @wraps(call)
        def bounded(*args: Any, **kwargs: Any) -> Any:
            self._step()
            _check_filter(name, [one for one in args if not isinstance(one, Environment | Context | nodes.EvalContext)],
                          kwargs)
            found = call(*args, **kwargs)
            return self._turns(found) if isinstance(found, Iterator) else self._made(found)

        self.filters[name] = bounded

    def begin(self) -> None:
        """Start counting anew."""
        self._steps = self._made_so_far = 0
        self._end = time.monotonic() + MOST_SECONDS

    def whole(self, pieces: Iterable[str]) -> str:
        """Return the pieces of an output as one text."""
        found, size = [], 0
        for piece in pieces:
            size += len(piece)
            _check_size(size)
            found.append(piece)
        return "".join(found)

    # --- what jinja asks --------------------------------------------------------------------------------------------

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute `left operator right` when the outcome is within the bounds."""
        self._step()
        _check_operation(operator, left, right)
        return self._made(super().call_binop(context, operator, left, right))

    def call(self, context: Context, called: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call what a template calls."""
        self._step()
        method = getattr(called, "__wrapped__", called)
        owner = getattr(method, "__self__", None)
        if isinstance(owner, str | bytes | int | float):
            _check_method(getattr(method, "__name__", ""), owner, args, kwargs)
        return self._made(super().call(context, called, *args, **kwargs))

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        _guard(source)
        return super()._generate(source, *args, **kwargs)

    # --- inside -----------------------------------------------------------------------------------------------------

    def _step(self) -> None:
        self._steps += 1
        if self._steps > MOST_STEPS:
            raise TemplateTooLong(f"it takes more than {MOST_STEPS} steps")
        if time.monotonic() > self._end:
            raise TemplateTooLong(f"it takes more than {MOST_SECONDS:g} seconds")

    def _turns(self, values: Iterable[Any]) -> Iterator[Any]:
        """Yield the values, a step each."""
        for value in values:
            self._step()
            yield value

    def _joined(self, parts: Iterable[Any]) -> str:
        """Return what `~` makes of its parts."""
        texts = [self._written(part) for part in parts]
        _check_size(sum(map(len, texts)))
        return "".join(texts)

    def _written(self, value: Any) -> str:
        """Return a value as it is written to the output."""
        self._step()
        if not isinstance(value, Undefined):
            _weight(value)
        text = str(value)
        self._made(text)
        return text

    def _made(self, value: Any) -> Any:
        """Measure what was made and return it."""
        if isinstance(value, str | bytes):
            _check_size(len(value))
            self._made_so_far += len(value)
            if self._made_so_far > MOST_MADE:
                raise TemplateTooLong(f"its texts have more than {MOST_MADE} characters together")
        elif isinstance(value, int):
            _check_bits(value.bit_length())
        elif isinstance(value, list | tuple | dict | set) and len(value) > MOST_ENTRIES:
            raise TemplateTooLong(f"it makes a list of more than {MOST_ENTRIES} entries")
        return value


# --- looking before something is made ---------------------------------------------------------------------------------


def _check_size(characters: int) -> None:
    if characters > MOST_CHARACTERS:
        raise TemplateTooLong(f"it makes a text of more than {MOST_CHARACTERS} characters")


def _check_bits(bits: int) -> None:
    if bits > MOST_BITS:
        raise TemplateTooLong(f"it makes a number of more than {MOST_BITS} bits")


def _check_counts(values: Iterable[Any]) -> None:
    if any(isinstance(value, int) and not -MOST_COUNT <= value <= MOST_COUNT for value in values):
        raise TemplateTooLong(f"it asks for a width or a count of more than {MOST_COUNT}")


def _check_operation(operator: str, left: Any, right: Any) -> None:
    if operator == "**" and isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() * max(0, right))
    elif operator == "*":
        for many, count in ((left, right), (right, left)):
            if isinstance(many, str | bytes | list | tuple) and isinstance(count, int):
                size = len(many) * max(0, count)
                _check_size(size if isinstance(many, str | bytes) else size * (MOST_CHARACTERS // MOST_ENTRIES))
    elif operator == "%" and isinstance(left, str | bytes):
        _check_format(_PERCENT, left, right)


def _check_method(name: str, owner: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Look at a method of a text or number."""
    given = (*args, *kwargs.values())
    _check_counts(given)
    if name in ("format", "format_map"):
        _check_format(_BRACES, owner, given)
    elif name == "join" and args:
        _check_join(owner, args[0])
    elif name == "replace" and len(args) > 1:
        _check_replace(owner, args[0], args[1])
    elif name == "expandtabs":
        _check_size(len(owner) * max([8, *(one for one in given if isinstance(one, int))]))
    elif name == "translate":
        raise TemplateTooLong("it calls translate, which is not for templates")


def _check_filter(name: str, args: list[Any], kwargs: Mapping[str, Any]) -> None:
    """Look at a filter: args[0] is what it is applied to."""
    first, more = (args[0] if args else ""), (*args[1:], *kwargs.values())
    if name in ("map", "select", "reject", "selectattr", "rejectattr"):
        return  # these call other filters and tests, one value at a time
    if name not in _VALUES:
        _check_counts(more)
    if name == "format":
        _check_format(_PERCENT, str(first), more)
    elif name == "join":
        _check_join(next((one for one in more if isinstance(one, str)), ""), first)
    elif name == "replace" and len(args) > 2:
        _check_replace(str(first), args[1], args[2])
    elif name == "indent":
        widths = [len(one) if isinstance(one, str) else one for one in more if isinstance(one, str | int)]
        _check_size(len(first) + (str(first).count("\n") + 1) * max([4, *widths]))
    elif name == "wordwrap":
        _check_size(len(first) * max([1, *(len(one) for one in more if isinstance(one, str))]))
    elif name == "tojson" and any(isinstance(one, str | int) and _width(one) > 64 for one in more):
        raise TemplateTooLong("it indents JSON by more than 64")
    if name in _WRITERS:
        _weight(first)


def _width(value: str | int) -> int:
    return len(value) if isinstance(value, str) else value


def _check_join(between: Any, parts: Any) -> None:
    if isinstance(parts, list | tuple | str | bytes | dict):
        _check_size(_weight(parts) + len(between) * len(parts))


def _check_replace(text: Any, old: Any, new: Any) -> None:
    if isinstance(old, str | bytes) and isinstance(new, str | bytes):
        _check_size(len(text) + text.count(old) * max(0, len(new) - len(old)))


def _check_format(widths: re.Pattern[str], format: str | bytes, values: Any) -> None:
    text = format if isinstance(format, str) else format.decode("latin-1")
    if wide := widths.search(text):
        raise TemplateTooLong(f"it formats with {wide[0][:20]!r}, where a width has more than 4 digits or none")
    _check_size(len(text) + (text.count("%") + text.count("{")) * _weight(values))


def _weight(value: Any) -> int:
    """Return about how many characters a value has as text; raise TemplateTooLong where that would be too long: lists
    may hold one another many times."""
    left, size, parts = [value], 0, 0
    while left:
        one = left.pop()
        parts += 1
        if isinstance(one, str | bytes):
            size += len(one)
        elif isinstance(one, dict):
            left += one.keys()
            left += one.values()
        elif isinstance(one, list | tuple | set | frozenset):
            left += one
        if parts + len(left) > MOST_ENTRIES:
            raise TemplateTooLong(f"it writes a value of more than {MOST_ENTRIES} parts")
        _check_size(size)
    return size


# --- the program ------------------------------------------------------------------------------------------------------


def _guard(node: nodes.Node) -> None:
    """Lead every loop, every `~` and every slice below `node` through a filter of ours."""
    for name, value in list(node.iter_fields()):
        if isinstance(value, list):
            value[:] = [_guarded(one) for one in value]
        else:
            setattr(node, name, _guarded(value))


def _guarded(value: Any) -> Any:
    if not isinstance(value, nodes.Node):
        return value
    _guard(value)
    if isinstance(value, nodes.For):
        value.iter = _filtered(value.iter, _TURNS)
    elif isinstance(value, nodes.Concat):
        parts = nodes.List(value.nodes, lineno=value.lineno, environment=value.environment)
        return _filtered(parts, _JOINED)
    elif isinstance(value, nodes.Getitem) and isinstance(value.arg, nodes.Slice) and value.ctx == "load":
        return _filtered(value, _MADE)
    return value


def _filtered(node: nodes.Node, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno, environment=node.environment)
