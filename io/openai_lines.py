"""Write published results as the lines that clients of the OpenAI batch API read.

Done rows go to one file, error rows to another, both in the order of the input; clients join on `custom_id`.  An error
row speaks both dialects of the field (conventions): a status code with an error object in the response's body, and a
top-level `error` with the input's line number.  Every line is strict JSON: a log-probability of minus infinity is
floored at -9999.0 and a missing one is null, while the HDF5 file keeps both as they are.

This file does not know a tokenizer: the texts of single tokens come from the caller, or are written as `token_id:<id>`.
"""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np
from numpy.typing import NDArray

from bgmpi.errors import RowError
from bgmpi.io.durable import replacing, write_failed
from bgmpi.io.results_file import Results, RowResult, open_results
from bgmpi.request import Answer, Logprobs

TokenText = Callable[[int], bytes]
Json = dict[str, Any]

CHAT = "/v1/chat/completions"
FLOOR = -9999.0
_SERVER_CODES = frozenset({"server_error", "internal_error", "numeric_fault"})


@dataclass(frozen=True, slots=True)
class Exported:
    """What `export` wrote."""

    output: Path
    error_file: Path
    answers: int
    errors: int


def export(
    results_path: str | os.PathLike[str],
    out_path: str | os.PathLike[str],
    error_path: str | os.PathLike[str] | None = None,
    *,
    token_text: TokenText | None = None,
) -> Exported:
    """Write the done rows of `results_path` to `out_path` and its error rows to `error_path`.

    `error_path` None means `<out_path without .jsonl>.errors.jsonl`; it is written also when there are no errors, so
    that no stale one stays.  `token_text(id)` gives a token's bytes for log-probabilities.  Both files appear
    only when both are whole.  Raise MissingError or InputError for the results, WriteError for the output.
    """
    output = Path(out_path)
    errors = Path(error_path) if error_path is not None else output.with_name(f"{output.stem}.errors.jsonl")
    answered = failed = 0
    encode = msgspec.json.Encoder().encode
    with open_results(results_path) as results, ExitStack() as stack:
        size = results.path.stat().st_size
        error_sink = stack.enter_context(_text_file(errors, size))
        sink = stack.enter_context(_text_file(output, size))
        body = _Bodies(results.attributes, token_text)
        for row in _numbered(results):
            if row.error is None:
                sink.write(encode(body.answer_line(row)) + b"\n")
                answered += 1
            else:
                error_sink.write(encode(error_line(row, row.error)) + b"\n")
                failed += 1
    return Exported(output, errors, answered, failed)


def export_errors(results_path: str | os.PathLike[str], error_path: str | os.PathLike[str]) -> int:
    """Write only the error rows of `results_path`, as `export` writes them; return how many."""
    failed = 0
    encode = msgspec.json.Encoder().encode
    with open_results(results_path) as results, _text_file(Path(error_path), results.path.stat().st_size) as sink:
        for row in _numbered(results):
            if row.error is not None:
                sink.write(encode(error_line(row, row.error)) + b"\n")
                failed += 1
    return failed


def _numbered(results: Results) -> Iterator[RowResult]:
    """Yield every row with its number in the whole input, so that lines of different shards have different ids."""
    first, step = results.attributes.get("shard", 0), results.attributes.get("shards", 1)
    for row in results.rows():
        yield row if step == 1 else replace(row, row=first + step * row.row)


@contextmanager
def _text_file(path: Path, needed: int) -> Iterator[BinaryIO]:
    """Yield a file that takes the place of `path` when the block ends well; a pipe or a device is written directly."""
    real = Path(os.path.realpath(path))
    if path.exists() and not real.is_file():
        try:
            with open(path, "wb") as sink:
                yield sink
        except OSError as error:
            raise write_failed(path, error, needed) from error
        return
    temporary = real.with_name(f".{real.name}.{secrets.token_hex(6)}.tmp")
    with replacing(real, temporary, needed), open(temporary, "xb") as sink:
        yield sink


def error_line(row: RowResult, error: RowError) -> Json:
    """Return the line of an error row, in both dialects."""
    server = error.code in _SERVER_CODES
    kind = "server_error" if server else "invalid_request_error"
    inner = {"message": error.message, "type": kind, "param": error.param, "code": error.code}
    outer = {"code": error.code, "message": error.message, "param": error.param, "line": error.line or None}
    return _line(row, 500 if server else 400, {"error": inner}, outer)


def _line(row: RowResult, status: int, body: Json, error: Json | None) -> Json:
    response = {"status_code": status, "request_id": f"req-{row.row}", "body": body}
    return {"id": f"batch_req_{row.row}", "custom_id": row.custom_id or None, "response": response, "error": error}


class _Bodies:
    """Makes response bodies; holds what all of them share."""

    def __init__(self, attributes: Json, token_text: TokenText | None) -> None:
        self._model = attributes["model"]
        self._created = int(datetime.fromisoformat(attributes["created_utc"]).timestamp())
        self._token_text = token_text
        self._known: dict[int, tuple[str, list[int] | None, str]] = {}

    def answer_line(self, row: RowResult) -> Json:
        """Return the line of a row that is done."""
        chat = row.url == CHAT
        choice = self._chat_choice if chat else self._completion_choice
        body = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{row.row}",
            "object": "chat.completion" if chat else "text_completion",
            "created": self._created,
            "model": self._model,
            "choices": [choice(answer) for answer in row.samples],
            "usage": usage(row),
        }
        return _line(row, 200, body, None)

    def _chat_choice(self, answer: Answer) -> Json:
        logprobs = None if answer.logprobs is None else {"content": self._chat_logprobs(answer), "refusal": None}
        message = {"role": "assistant", "content": answer.text, "refusal": None}
        return {"index": answer.sample, "message": message, "logprobs": logprobs, **self._ending(answer)}

    def _completion_choice(self, answer: Answer) -> Json:
        logprobs, echoed = None, False
        if answer.logprobs is not None:
            parts = [(answer.tokens, answer.logprobs)]
            echoed = answer.prompt_logprobs is not None and len(answer.prompt) > 0
            if echoed and answer.prompt_logprobs is not None:
                parts.insert(0, (answer.prompt, answer.prompt_logprobs))
            logprobs = self._completion_logprobs(parts)
        ending = self._ending(answer, prompt=not echoed)
        return {"index": answer.sample, "text": answer.text, "logprobs": logprobs, **ending}

    def _ending(self, answer: Answer, *, prompt: bool = True) -> Json:
        ending: Json = {"finish_reason": answer.finish.name.lower(), "stop_reason": answer.stop_reason}
        if prompt and answer.prompt_logprobs is not None:
            ending["prompt_logprobs"] = self._prompt_logprobs(answer.prompt, answer.prompt_logprobs)
        return ending

    def _chat_logprobs(self, answer: Answer) -> list[Json]:
        logprobs = answer.logprobs
        assert logprobs is not None  # the caller asked
        top = zip(logprobs.top_ids.tolist(), logprobs.top.tolist(), strict=True)
        tokens = zip(answer.tokens.tolist(), logprobs.chosen.tolist(), top, strict=True)
        return [
            {
                **self._chat_token(token, value),
                "top_logprobs": [self._chat_token(one, at) for one, at in zip(ids, values, strict=True) if one >= 0],
            }
            for token, value, (ids, values) in tokens
        ]

    def _chat_token(self, token: int, value: float) -> Json:
        text, raw, _ = self._texts(token)
        return {"token": text, "logprob": finite(value), "bytes": raw}

    def _completion_logprobs(self, parts: list[tuple[NDArray[np.int32], Logprobs]]) -> Json:
        """Return the four parallel lists of the completions dialect; the chosen token is among the top ones.

        `parts` are the answer's tokens, before them the prompt's when it is echoed.
        """
        tokens: list[str] = []
        chosen: list[float | None] = []
        top: list[Json | None] = []
        offsets: list[int] = []
        place = 0
        for ids, logprobs in parts:
            best = zip(logprobs.top_ids.tolist(), logprobs.top.tolist(), strict=True)
            for token, value, (ones, values) in zip(ids.tolist(), logprobs.chosen.tolist(), best, strict=True):
                text, _, name = self._texts(token)
                tokens.append(name)
                chosen.append(finite(value))
                top.append(None if math.isnan(value) else self._best(name, value, ones, values))
                offsets.append(place)
                place += len(text)
        return {"tokens": tokens, "token_logprobs": chosen, "top_logprobs": top, "text_offset": offsets}

    def _best(self, name: str, value: float, ids: list[int], values: list[float]) -> Json:
        best: Json = {}
        for one, at in zip(ids, values, strict=True):
            if one >= 0:
                best.setdefault(self._texts(one)[2], finite(at))
        best.setdefault(name, finite(value))
        return best

    def _prompt_logprobs(self, prompt: NDArray[np.int32], logprobs: Logprobs) -> list[Json | None]:
        """Return one object per prompt token, by token id, null for the first (the dialect of vLLM)."""
        chosen = logprobs.chosen.tolist()
        ids = prompt.tolist() if len(prompt) == len(chosen) else [None] * len(chosen)
        entries: list[Json | None] = []
        for token, value, top_ids, top in zip(
            ids, chosen, logprobs.top_ids.tolist(), logprobs.top.tolist(), strict=True
        ):
            if math.isnan(value):
                entries.append(None)
                continue
            entry: Json = {}
            for rank, (one, at) in enumerate(zip(top_ids, top, strict=True), start=1):
                entry[str(one)] = {"logprob": finite(at), "rank": rank, "decoded_token": self._texts(one)[0]}
            if token is not None and str(token) not in entry:
                entry[str(token)] = {"logprob": finite(value), "rank": None, "decoded_token": self._texts(token)[0]}
            entries.append(entry)
        return entries

    def _texts(self, token: int) -> tuple[str, list[int] | None, str]:
        """Return a token's text, its bytes, and a name that is unique also for a part of a character."""
        known = self._known.get(token)
        if known is None:
            known = self._known[token] = _token_texts(token, self._token_text)
        return known


def _token_texts(token: int, token_text: TokenText | None) -> tuple[str, list[int] | None, str]:
    if token_text is None:
        name = f"token_id:{token}"
        return name, None, name
    raw = token_text(token)
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        return raw.decode(errors="replace"), list(raw), "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
    return text, list(raw), text


def usage(row: RowResult) -> dict[str, int]:
    """Return the row's token counts, each prompt counted once however many samples it has."""
    each = max(1, len(row.samples) // row.prompts)
    prompt = sum(answer.prompt_tokens for answer in row.samples[::each])
    generated = sum(len(answer.tokens) for answer in row.samples)
    return {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}


def finite(value: float) -> float | None:
    """Return a log-probability as JSON can say it: null for NaN, at least -9999.0."""
    return None if math.isnan(value) else max(value, FLOOR)
