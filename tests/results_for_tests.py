"""Answers of every shape, and a job's results in a few lines, for the tests of segments, results and export."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from bgmpi.errors import RowError
from bgmpi.io.columns import TIME_STEP
from bgmpi.io.publish import Provenance, Published, publish
from bgmpi.io.segments import SegmentWriter, parts_folder
from bgmpi.request import Answer, Finish, Logprobs

PROVENANCE = Provenance(
    model="tiny",
    code_version="0.1.0",
    input_path="requests.jsonl",
    input_bytes=123,
    input_sha256="ab" * 32,
    layout={"ranks": 2, "nodes": 1},
    attributes={"job_seed": 7},
    documents={"config": '{"max_tokens": 4}', "chat_template": "{{ messages }}\n"},
)
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


def answer(row: int, sample: int = 0, length: int = 3, **changes: Any) -> Answer:
    """Return a done answer of `length` tokens whose content tells its row and sample."""
    plain = Answer(
        row=row,
        sample=sample,
        custom_id=f"id-{row}",
        finish=Finish.STOP,
        prompt_tokens=5 + row % 3,
        tokens=np.arange(length, dtype=np.int32) + 10 * row + sample,
        text=f"text of row {row} sample {sample}",
        url=CHAT,
        queued_s=0.0,
        first_token_s=0.5,
        done_s=1.0 + row / 8,
    )
    return replace(plain, **changes)


def error(row: int, sample: int = 0, code: str = "context_length_exceeded", **changes: Any) -> Answer:
    """Return an answer that is an error."""
    fault = RowError(code, f"row {row} is bad", "messages", row + 1)
    return answer(row, sample, 0, finish=Finish.ERROR, text="", error=fault, done_s=math.nan, **changes)


def logprobs(tokens: int, top: int, seed: int = 0) -> Logprobs:
    """Return log-probabilities with a minus infinity in the last top place."""
    rng = np.random.default_rng(seed)
    values = -np.sort(rng.random((tokens, top), dtype=np.float32), axis=1)
    if tokens and top:
        values[-1, -1] = -np.inf
    chosen = -rng.random(tokens, dtype=np.float32)
    return Logprobs(chosen, rng.integers(0, 500, (tokens, top), dtype=np.int32), values)


def write_segments(output: Path, answers: Sequence[Answer], ranks: int = 2, segment_bytes: int = 1 << 20) -> Path:
    """Write answer i by rank i % ranks; return the folder of the segments."""
    folder = parts_folder(output)
    writers = [SegmentWriter(folder, rank, segment_bytes=segment_bytes) for rank in range(ranks)]
    for number, one in enumerate(answers):
        writers[number % ranks].add(one)
        writers[number % ranks].flush_if_due()
    for writer in writers:
        writer.close()
    return folder


def publish_answers(
    output: Path, answers: Sequence[Answer], samples: Sequence[int], *, ranks: int = 2, **options: Any
) -> Published:
    """Write segments and publish them; `samples` are the sequences of each row."""
    folder = write_segments(output, answers, ranks)
    return publish(folder, output, PROVENANCE, len(samples), np.array(samples, np.int32), **options)


def assert_same(got: Answer, expected: Answer) -> None:
    """Compare two answers field by field, arrays by type and bytes, times within their step."""
    for one in fields(Answer):
        a, b = getattr(got, one.name), getattr(expected, one.name)
        if isinstance(b, float):
            assert (math.isnan(a) and math.isnan(b)) or abs(a - b) <= TIME_STEP, one.name
        elif isinstance(b, np.ndarray):
            assert_same_array(a, b, one.name)
        elif isinstance(b, Logprobs):
            for part in ("chosen", "top_ids", "top"):
                assert_same_array(getattr(a, part), getattr(b, part), f"{one.name}.{part}")
        else:
            assert a == b and type(a) is type(b), one.name


def assert_same_array(got: np.ndarray[Any, Any], expected: np.ndarray[Any, Any], name: str) -> None:
    """Compare shape, type and bytes."""
    assert got.shape == expected.shape, name
    assert got.dtype == expected.dtype, name
    assert got.tobytes() == expected.tobytes(), name
