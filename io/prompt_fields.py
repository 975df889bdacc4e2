"""From the fields of a request body to prompts as token ids: a rendered chat, texts, or ids.

A completion may bring a list of prompts; each becomes its own prompt, in order.  Texts get the BOS that the tokenizer
asks for, ids are taken as they are, a chat gets what its template writes.  Special tokens that a user types inside a
text are encoded as special tokens, as in transformers and vLLM (POLICY); the caller is told, to warn once.

A prompt that leaves no room for one token is refused here, with both numbers, before it costs anything.

A row that is read again may bring the ids that it got the first time (`known`): its fields are checked alike, but no
template is run and no text encoded.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bgmpi.io.chat_template import ChatRefused
from bgmpi.io.request_fields import CONTEXT, Fields, Refused, expected
from bgmpi.io.tokenizer import Tokenizer

Prompt = NDArray[np.int32]


class PromptReader:
    """Makes prompts for one model: its tokenizer, its vocabulary and its context.

    `warn(key, message)` is called for what the user should know once.
    """

    def __init__(self, tokenizer: Tokenizer, vocab: int, max_model_len: int, warn: Callable[[str, str], None]) -> None:
        self._tokenizer = tokenizer
        self._vocab = vocab
        self._room = max_model_len
        self._warn = warn

    def read_chat(self, fields: Fields, *, answer: bool, known: Sequence[Prompt] | None = None) -> Sequence[Prompt]:
        """Return the one prompt of a chat; `answer`: at least one token is wanted after it."""
        messages = [_plain_message(message, at) for at, message in enumerate(_take_messages(fields))]
        tools = _take_tools(fields)
        variables = fields.mapping("chat_template_kwargs") or {}
        documents = fields.objects("documents")
        generation = fields.boolean("add_generation_prompt", True)
        add_special = fields.boolean("add_special_tokens", False)
        if known is not None:
            return known
        self._notice_special([m["content"] for m in messages if isinstance(m.get("content"), str)])
        try:
            text = self._tokenizer.render_chat(messages, tools=tools, documents=documents,
                                               add_generation_prompt=generation, variables=variables)
        except ChatRefused as refusal:
            raise Refused(f"the chat template refused these messages: {refusal}", "messages") from refusal
        return [self._encode(text, add_special, "messages", answer)]

    def read_completion(
        self, fields: Fields, *, answer: bool, known: Sequence[Prompt] | None = None
    ) -> Sequence[Prompt]:
        """Return the prompts of a completion, one for each entry of a list of texts or of id lists."""
        value = fields.take("prompt")
        add_special = fields.boolean("add_special_tokens", True)
        if known is not None:
            return known
        wanted = "a text, a list of token ids, or a list of either"
        if isinstance(value, str):
            self._notice_special([value])
            return [self._encode(value, add_special, "prompt", answer)]
        if not isinstance(value, list) or not value:
            expected("prompt", wanted + " (not empty)", value)
        if all(isinstance(part, str) for part in value):
            self._notice_special(value)
            return [self._encode(part, add_special, f"prompt[{at}]", answer) for at, part in enumerate(value)]
        if all(isinstance(part, list) for part in value):
            return [self._ids(part, f"prompt[{at}]", answer) for at, part in enumerate(value)]
        if not all(type(part) is int for part in value):
            expected("prompt", wanted, value)
        return [self._ids(value, "prompt", answer)]

    def _notice_special(self, texts: list[str]) -> None:
        pattern = self._tokenizer.special_pattern
        match = next((m for text in texts if pattern is not None and (m := pattern.search(text))), None)
        if match:
            self._warn("special", f"a prompt's text holds {match[0]!r}, which is encoded as that special token")

    def _encode(self, text: str, add_special: bool, param: str, answer: bool) -> Prompt:
        bound = self._tokenizer.most_bytes_a_token
        if bound is not None and len(text) > bound * self._room:
            self._refuse_length(f"at least {-(-len(text) // bound)}", param)  # not worth its gigabytes of ids
        ids = self._tokenizer.encode(text, add_special)
        if len(ids) and int(ids.max()) >= self._vocab:
            raise Refused(f"{param}: its text has token {int(ids.max())}, the model knows only 0 to {self._vocab - 1}; "
                          f"tokenizer and model do not belong together here", param)
        return self._fitting(ids, param, answer)

    def _ids(self, value: list[Any], param: str, answer: bool) -> Prompt:
        if not all(type(id) is int and 0 <= id < self._vocab for id in value):
            bad = next(id for id in value if type(id) is not int or not 0 <= id < self._vocab)
            expected(param, f"token ids from 0 to {self._vocab - 1}", bad)
        return self._fitting(np.array(value, np.int32), param, answer)

    def _fitting(self, ids: Prompt, param: str, answer: bool) -> Prompt:
        if not len(ids):
            raise Refused(f"{param} is empty: no tokens, and this tokenizer puts no BOS before a text", param)
        if len(ids) + answer > self._room:
            self._refuse_length(str(len(ids)), param)
        return ids

    def _refuse_length(self, tokens: str, param: str) -> None:
        raise Refused(
            f"this model's maximum context length is {self._room} tokens, and {param} has {tokens} tokens, which "
            f"leaves no room for an answer; shorten it or raise --max-model-len", param, CONTEXT)


def _take_messages(fields: Fields) -> list[dict[str, Any]]:
    messages = fields.objects("messages")
    if not messages:
        expected("messages", "a list of messages (not empty)", messages)
    return messages


def _take_tools(fields: Fields) -> list[dict[str, Any]] | None:
    """Return the tools that the template shows; their calls come back as text, nothing forces or parses them."""
    tools, choice = fields.objects("tools"), fields.take("tool_choice")
    if choice not in (None, "none", "auto"):
        raise Refused("tool_choice: only none and auto are supported, a call cannot be forced", "tool_choice")
    return None if choice == "none" else tools


def _plain_message(message: Mapping[str, Any], at: int) -> dict[str, Any]:
    """Return a message as templates expect it: text parts joined, a tool call's arguments as an object."""
    param = f"messages[{at}]"
    if not isinstance(message.get("role"), str) or not message["role"]:
        expected(f"{param}.role", "a text such as system, user or assistant", message.get("role"))
    plain = dict(message)
    content = message.get("content")
    if isinstance(content, list):
        plain["content"] = "\n".join(_text_of_part(part, f"{param}.content") for part in content)
    elif not isinstance(content, str) and not (content is None and message.get("tool_calls")):
        expected(f"{param}.content", "a text or a list of text parts", content)
    if message.get("tool_calls"):
        plain["tool_calls"] = _plain_calls(message["tool_calls"], f"{param}.tool_calls")
    return plain


def _text_of_part(part: Any, param: str) -> str:
    if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
        expected(param, 'parts {"type": "text", "text": ...} only (this program reads no images or sound)', part)
    return str(part["text"])


def _plain_calls(calls: Any, param: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        expected(param, "a list of objects", calls)
    plain = []
    for call in calls:
        function = call.get("function")
        if isinstance(function, dict) and isinstance(function.get("arguments"), str):
            try:
                function = {**function, "arguments": json.loads(function["arguments"] or "{}")}
            except ValueError:
                expected(f"{param}.function.arguments", "JSON in a text", function["arguments"])
            call = {**call, "function": function}
        plain.append(call)
    return plain
