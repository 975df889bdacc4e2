"""The rows of the input file as requests: read by place, checked in full, and refused one by one.

`scan_requests` (io/request_index.py) has found where each row lies; any rank may then read any row, in any order, any
number of times, and gets the same record.  A row that cannot be run becomes a `RowRefused`, which harms no other.
The reader holds one row at a time.

One completion row may bring k prompts.  `read` then returns k `Request`s, the j-th of which has the samples
j * n ... j * n + n - 1 of the row: OpenAI numbers the k * n choices of such a row in just this order.

It knows nothing of scheduling or weights; what the model is comes in `RequestLimits`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from bgmpi.errors import InputError, MissingError, RowError, UsageError
from bgmpi.io.prompt_fields import Prompt, PromptReader
from bgmpi.io.request_fields import MODEL, Fields, Refused, expected
from bgmpi.io.request_index import (
    CHAT_URL,
    COMPLETIONS_URL,
    MAX_SAMPLES,
    MOST_DEADLINE,
    MOST_PRIORITY,
    RequestIndex,
    leading_custom_id,
    parse_line,
    sample_count,
    scan_requests,
    usable_custom_id,
)
from bgmpi.io.sampling_fields import HARMLESS, UNSUPPORTED, SamplingDefaults, read_sampling, row_seed
from bgmpi.io.tokenizer import Tokenizer
from bgmpi.request import Request

__all__ = [
    "CHAT_URL", "COMPLETIONS_URL", "RequestIndex", "RequestLimits", "RequestReader", "RowRefused", "SamplingDefaults",
    "require_chat_template", "scan_requests",
]

_HEAD_BYTES = 1 << 16
_log = logging.getLogger("bgmpi.requests")


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """What the model and the job allow a row.

    `max_model_len`: tokens of prompt and answer together.  `vocab`: ids that the model's head has.  `model_names`: the
    names a row may ask for in `model`; () lets any name pass, for a file often still holds the name of another model.
    """

    max_model_len: int
    vocab: int
    job_seed: int = 0
    defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    max_logprobs: int = 20
    model_names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RowRefused:
    """A row that cannot be run: `custom_id` and `url` where they could be read, else empty."""

    row: int
    custom_id: str
    url: str
    error: RowError


def require_chat_template(index: RequestIndex, tokenizer: Tokenizer) -> None:
    """Raise UsageError, before weights are read, when the file holds chats and there is no template for them."""
    if index.has_chat and not tokenizer.has_chat_template:
        raise UsageError(
            f"line {index.first_chat_line} of the input is a chat, but the tokenizer has no chat template; name one "
            f"with --chat-template FILE, or send {COMPLETIONS_URL} requests"
        )


class RequestReader:
    """Reads rows of one input file; a context manager that owns the open file.  Local."""

    def __init__(self, path: Path | str, index: RequestIndex, tokenizer: Tokenizer, limits: RequestLimits) -> None:
        self._path = Path(path)
        self._index = index
        self._limits = limits
        self._known = tokenizer.known(limits.vocab)
        self._said: set[str] = set()
        self._prompts = PromptReader(tokenizer, limits.vocab, limits.max_model_len, self._warn_once)
        try:
            self._file = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise MissingError(f"input file {path}: not on this node; put it on a shared file system") from error
        except OSError as error:
            raise InputError(f"input file {path}: cannot be read: {error.strerror}") from error
        size = os.fstat(self._file).st_size
        if size != index.size:
            self.close()
            raise InputError(f"input file {path}: had {index.size} bytes when it was scanned, has {size} now; "
                             f"leave it alone while the job runs")

    def close(self) -> None:
        """Close the file; further reads fail."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> RequestReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.close()

    def turn_to(self, index: RequestIndex) -> None:
        """From now on read rows of another index of the same file."""
        self._index = index

    def read(self, row: int, known: Sequence[Prompt] | None = None) -> tuple[Request, ...] | RowRefused:
        """Return the requests of row `row`, one for each of its prompts, or why it is refused.

        known: the ids of its prompts, where an earlier read has found them; all else is checked again.
        Raise InputError when the file is not the one that was scanned.
        """
        line = int(self._index.line[row])
        custom_id = url = ""
        try:
            parsed = self._parse(row)
            custom_id = parsed["custom_id"] = usable_custom_id(parsed.get("custom_id")) or ""
            url = parsed["url"] if isinstance(parsed.get("url"), str) else ""
            requests = self._requests(row, parsed, known)
        except Refused as refused:
            if isinstance(refused, _Unparsed):
                custom_id = refused.custom_id
            error = RowError(refused.code, f"line {line}: {refused.message}", refused.param, line)
            return RowRefused(row, custom_id, url, error)
        index, found = self._index, sum(request.samples for request in requests)
        if (found, len(requests)) != (index.samples[row], index.prompts[row]):
            raise InputError(f"input file {self._path}: line {line} asked for {index.samples[row]} samples of "
                             f"{index.prompts[row]} prompts when it was scanned and asks for {found} of "
                             f"{len(requests)} now; leave the file alone while the job runs")
        return requests

    def shown_prompt(self, row: int) -> str:
        """Return what a person would call the prompt of a row: a chat's last message, a completion's first text; ""
        where that is no text."""
        try:
            body = self._parse(row).get("body")
        except Refused:
            return ""
        if not isinstance(body, dict):
            return ""
        messages, shown = body.get("messages"), body.get("prompt")
        if isinstance(messages, list) and messages and isinstance(messages[-1], dict):
            shown = messages[-1].get("content")
        first = shown[0] if isinstance(shown, list) and shown else shown
        return first if isinstance(first, str) else ""

    def _parse(self, row: int) -> dict[str, Any]:
        length, limit = int(self._index.length[row]), self._index.max_line_bytes
        if length > limit:
            custom_id = leading_custom_id(self._bytes(row, min(length, _HEAD_BYTES))) or ""
            raise _Unparsed(f"the line has {length} bytes, more than --max-line-bytes {limit}", custom_id)
        content = self._bytes(row, length)
        try:
            value, replaced = parse_line(content)
        except ValueError as error:
            raise _Unparsed(f"not valid JSON: {error}", leading_custom_id(content[:_HEAD_BYTES]) or "") from error
        if replaced:
            line = int(self._index.line[row])
            self._warn_once("surrogate", f"line {line}: unpaired surrogates in texts are replaced by U+FFFD")
        if not isinstance(value, dict):
            raise Refused(f"expected a JSON object on a line, got {_kind(value)}")
        return value

    def _bytes(self, row: int, length: int) -> bytes:
        content = os.pread(self._file, length, int(self._index.offset[row]))
        while len(content) < length:
            more = os.pread(self._file, length - len(content), int(self._index.offset[row]) + len(content))
            if not more:
                raise InputError(f"input file {self._path}: became shorter while the job runs")
            content += more
        return content

    def _requests(self, row: int, parsed: dict[str, Any], known: Sequence[Prompt] | None) -> tuple[Request, ...]:
        """Check one line in the order in which a user would want to hear of faults."""
        if not parsed["custom_id"]:
            raise Refused("custom_id: expected a text that is not blank", "custom_id")
        if parsed.get("method") != "POST":
            expected("method", '"POST"', parsed.get("method"))
        url = parsed.get("url")
        if url not in (CHAT_URL, COMPLETIONS_URL):
            expected("url", f"{CHAT_URL} or {COMPLETIONS_URL}", url)
        body = parsed.get("body")
        if not isinstance(body, dict):
            raise Refused(f"body: expected a JSON object, got {_kind(body)}", "body")
        self._check_model(body.get("model"))
        fields = Fields(body)
        if fields.boolean("stream", False):
            raise Refused("stream: a batch cannot stream; leave it out", "stream")
        samples = self._take_samples(fields)
        # How urgent the row is was read by the scan, for the order of all; here it is only checked.
        fields.integer("priority", -MOST_PRIORITY, MOST_PRIORITY)
        fields.number("deadline_s", 0, MOST_DEADLINE)
        limits, chat = self._limits, url == CHAT_URL
        sampling = read_sampling(
            fields, chat=chat, seed=row_seed(limits.job_seed, self._index.number(row)), defaults=limits.defaults,
            max_logprobs=limits.max_logprobs, known=self._known)
        read_prompts = self._prompts.read_chat if chat else self._prompts.read_completion
        prompts = read_prompts(fields, answer=sampling.max_tokens != 0, known=known)
        fields.refuse_rest(HARMLESS, UNSUPPORTED)
        if sample_count(samples, len(prompts)) is None:
            raise Refused(f"n {samples} x {len(prompts)} prompts are more than {MAX_SAMPLES} answers of one row", "n")
        return tuple(Request(row, parsed["custom_id"], url, prompt, samples, sampling) for prompt in prompts)

    def _take_samples(self, fields: Fields) -> int:
        given = fields.integer("n", 1, MAX_SAMPLES)
        samples = 1 if given is None else given
        best_of = fields.integer("best_of", 1)
        if best_of is not None and best_of != samples:
            raise Refused(f"best_of {best_of} is not supported beyond n ({samples}); ask for n answers", "best_of")
        return samples

    def _check_model(self, model: Any) -> None:
        if model is not None and not isinstance(model, str):
            expected("model", "a text", model)
        names = self._limits.model_names
        if names and model is not None and model not in names:
            raise Refused(f"model {model!r:.80} is not served here; this job serves {', '.join(names)}", "model", MODEL)

    def _warn_once(self, key: str, message: str) -> None:
        if key not in self._said:
            self._said.add(key)
            _log.warning("%s (said once)", message)


class _Unparsed(Refused):
    """A line whose JSON was not read, with the custom_id that it begins with."""

    def __init__(self, message: str, custom_id: str) -> None:
        super().__init__(message)
        self.custom_id = custom_id


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")
