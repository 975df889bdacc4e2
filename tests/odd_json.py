"""Draws what no client should send: JSON of every shape, request lines with odd fields, and bytes that were damaged.

Hypothesis strategies only; they know the grammar of a request line and nothing of what reads it.
"""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

#: Fields of a body that some reader takes, so that draws reach all of them.
FIELDS = (
    "prompt", "messages", "n", "best_of", "max_tokens", "max_completion_tokens", "min_tokens", "temperature", "top_p",
    "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "stop",
    "stop_token_ids", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "logprobs", "top_logprobs",
    "prompt_logprobs", "echo", "seed", "stream", "model", "tools", "tool_choice", "documents", "chat_template_kwargs",
    "add_generation_prompt", "add_special_tokens", "response_format", "user", "metadata", "api_key",
)  # fmt: skip
URLS = ("/v1/chat/completions", "/v1/completions", "/v1/embeddings", "", None, 7)


class Raw(str):
    """Text that stands in JSON as it is, be it JSON or not."""


def to_text(value: Any) -> str:
    """Return JSON of a value, with `Raw` pieces as they are, and (key, value) lists as objects with repeated keys."""
    if isinstance(value, Raw):
        return str(value)
    if isinstance(value, list):
        return "[" + ",".join(map(to_text, value)) + "]"
    if isinstance(value, dict):
        value = tuple(value.items())
    if isinstance(value, tuple):
        return "{" + ", ".join(f"{json.dumps(key)}: {to_text(part)}" for key, part in value) + "}"
    return json.dumps(value)


def deep(opening: str, closing: str, depth: int) -> Raw:
    """Return brackets in brackets."""
    return Raw(opening * depth + closing * depth)


_raw = st.sampled_from([
    Raw("NaN"), Raw("-Infinity"), Raw("Infinity"), Raw("1e999"), Raw("-1e999"), Raw("1e-999"), Raw("-0"), Raw("-0.0"),
    Raw("9" * 30), Raw("-" + "9" * 400), Raw("1" + "0" * 5000), Raw("0x10"), Raw("01"), Raw("1."), Raw("tru"),
    Raw('"\\ud800"'), Raw('"\\udc00x"'), Raw('"\\ud83d\\ude00"'), Raw('"\\u0000"'), Raw('"\x00"'), Raw('"\x1f"'),
    Raw('"a\\x"'), Raw("'a'"), Raw(""), deep("[", "]", 60), deep("[", "]", 3000), deep('{"a":', "}", 900),
    deep("[", "", 100_000), Raw('{"a":1,"a":2}'), Raw('{"":{}}'), Raw("/**/1"), Raw("1 2"), Raw('"' + "x" * 3000 + '"'),
])  # fmt: skip
_texts = st.one_of(
    st.sampled_from(["", " ", "hi", "AB CD", "<|bos|>", "\x00", "\ufeff", "\u2028", "😀", "POST", "user", "text"]),
    st.text(max_size=12),
)
_numbers = st.one_of(
    st.integers(-3, 6), st.sampled_from([2**31 - 1, 2**31, 2**63, 2**64, -(2**63) - 1, 10**40, 511, 512, 16384, 16385]),
    st.floats(allow_nan=False, allow_infinity=False), st.booleans(), st.none(),
)  # fmt: skip
values = st.recursive(
    st.one_of(_texts, _numbers, _raw),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.one_of(st.sampled_from(["role", "content", "type", "text",
        "tool_calls", "function", "arguments", "1", "-1", "511"]), _texts), inner, max_size=4),
        st.lists(st.tuples(_texts, inner), max_size=3).map(tuple),
    ),
    max_leaves=8,
)  # fmt: skip
_message = st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "system", ""]), "content": values})
_prompts = st.one_of(
    st.lists(st.integers(-1, 513), max_size=6), st.lists(_texts, max_size=4),
    st.lists(st.lists(st.integers(0, 511), max_size=4), max_size=4), _texts, values,
)  # fmt: skip


@st.composite
def bodies(draw: st.DrawFn) -> Any:
    """Draw a body: mostly one that is nearly right."""
    fields: list[tuple[str, Any]] = []
    fields.append(("prompt", draw(_prompts)) if draw(st.booleans()) else
                  ("messages", draw(st.one_of(st.lists(_message, min_size=1, max_size=3), values))))
    fields += [(name, draw(values)) for name in draw(st.lists(st.sampled_from(FIELDS), max_size=4))]
    return tuple(fields)


@st.composite
def lines(draw: st.DrawFn) -> bytes:
    """Draw one line of an input file, without its end."""
    kind = draw(st.integers(0, 9))
    if kind == 0:
        return draw(st.binary(max_size=40)).replace(b"\n", b"")
    if kind == 1:
        return _bytes(to_text(draw(values)))
    row = [
        ("custom_id", draw(st.one_of(st.text(max_size=4), st.integers(0, 10**6).map(str), values))),
        ("method", draw(st.sampled_from(["POST", "POST", "POST", "GET", None]))),
        ("url", draw(st.sampled_from([*URLS[:2], *URLS]))),
        ("body", draw(st.one_of(bodies(), bodies(), values))),
    ]
    row = draw(st.permutations(row)) if kind == 2 else row
    if kind == 3:
        row += [draw(st.sampled_from(row))]
    text = _bytes(to_text(tuple(row)))
    return draw(damaged(text)) if kind > 6 else text


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass").replace(b"\n", b" ")


@st.composite
def damaged(draw: st.DrawFn, data: bytes) -> bytes:
    """Draw `data` with bits flipped, pieces cut out, doubled or put elsewhere."""
    found = bytearray(data)
    for _ in range(draw(st.integers(1, 3))):
        if not found:
            break
        at, other = draw(st.integers(0, len(found) - 1)), draw(st.integers(0, len(found)))
        match draw(st.integers(0, 4)):
            case 0:
                found[at] ^= 1 << draw(st.integers(0, 7))
            case 1:
                del found[min(at, other) : max(at, other)]
            case 2:
                found[other:other] = found[at : at + draw(st.integers(1, 40))]
            case 3:
                del found[at:]
            case _:
                found[at] = draw(st.sampled_from(b'\x00\xff"{}[],:\\ \r\t9'))
    return bytes(found)
