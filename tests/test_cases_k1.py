"""Public faults of kind K1 (the input file), at the level of the reader."""

from __future__ import annotations

import json
import logging
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from tokenizers_for_tests import make_tokenizer

from bgmpi.errors import ExitCode, InputError
from bgmpi.io.requests import RequestLimits, RequestReader, RowRefused, scan_requests
from bgmpi.io.tokenizer import Tokenizer, open_tokenizer

CHAT = "/v1/chat/completions"
LIMITS = RequestLimits(max_model_len=64, vocab=512)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return open_tokenizer(make_tokenizer(tmp_path_factory.mktemp("tok")))


def good(custom_id: Any = "good", content: str = "hi", **more: Any) -> str:
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 4, "temperature": 0}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": CHAT, "body": body, **more})


def read_all(path: Path, content: str | bytes, tokenizer: Tokenizer, **kinds: Any) -> list[Any]:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    index = scan_requests(path, **kinds)
    with RequestReader(path, index, tokenizer, LIMITS) as reader:
        return [reader.read(row) for row in range(len(index))]


def test_c01_blank_lines_are_skipped_and_lines_stay_physical(tmp_path: Path, tokenizer: Tokenizer) -> None:
    found = read_all(tmp_path / "x", good("a") + "\n\n   \n" + good("b"), tokenizer)
    assert [one[0].custom_id for one in found] == ["a", "b"]
    assert [one[0].row for one in found] == [0, 1]
    found = read_all(tmp_path / "x", good("a") + "\n\n   \n" + good("b") + "\nnonsense\n", tokenizer)
    assert found[2].error.line == 5


def test_c02_json_that_is_no_object_is_an_error_row(tmp_path: Path, tokenizer: Tokenizer) -> None:
    body = '{"custom_id":"x","method":"POST","url":"/v1/completions","body":"str"}'
    found = read_all(tmp_path / "x", "\n".join(["[1,2,3]", '"hello"', "null", body, good()]), tokenizer)
    assert [one.error.line for one in found[:4]] == [1, 2, 3, 4]
    assert {one.error.code for one in found[:4]} == {"invalid_request_error"}
    assert (found[3].custom_id, found[3].error.param) == ("x", "body")
    alone = read_all(tmp_path / "y", good(), tokenizer)
    assert found[4][0].prompt.tolist() == alone[0][0].prompt.tolist()


def test_c03_a_repeated_custom_id_stops_the_job_naming_both_lines(tmp_path: Path) -> None:
    lines = [good("a", "one"), good("b"), "", good("a", "two")]
    (tmp_path / "x").write_text("\n".join(lines))
    with pytest.raises(InputError, match=r"lines 1 and 4 \('a'\)") as caught:
        scan_requests(tmp_path / "x")
    assert caught.value.exit_code == ExitCode.INPUT
    assert "duplicate_custom_id" in str(caught.value)


def test_c03_spelling_does_not_hide_a_repeated_custom_id(tmp_path: Path) -> None:
    one, two = good("caf\u00e9"), good("b").replace('"b"', '"cafe\u0301"')
    (tmp_path / "x").write_text(one + "\n" + two + "\n" + one.replace("\\u00e9", "\u00e9"), encoding="utf-8")
    with pytest.raises(InputError, match="lines 1 and 3"):
        scan_requests(tmp_path / "x")


def test_c04_a_custom_id_that_is_blank_missing_or_no_text_is_an_error_row(tmp_path: Path, tokenizer: Tokenizer) -> None:
    missing = json.dumps({key: value for key, value in json.loads(good()).items() if key != "custom_id"})
    found = read_all(tmp_path / "x", "\n".join([good("  "), missing, good(7), good("  "), good()]), tokenizer)
    for number, one in enumerate(found[:4], start=1):
        assert (one.error.line, one.error.param) == (number, "custom_id")
        assert f"line {number}" in one.error.message and "custom_id" in one.error.message
    assert found[4][0].custom_id == "good"


def test_c05_memory_does_not_grow_with_the_file(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path, rows = tmp_path / "x", 5000
    with open(path, "w") as file:
        for row in range(rows):
            file.write(good(f"r{row}", "x" * 2000) + "\n")
    tracemalloc.start()
    try:
        index = scan_requests(path)
        with RequestReader(path, index, tokenizer, RequestLimits(4096, 512)) as reader:
            for row in range(0, rows, 10):
                assert not isinstance(reader.read(row), RowRefused)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert path.stat().st_size > 10 << 20
    assert peak < 4 << 20


def test_c06_a_huge_line_is_an_error_row_and_is_never_held(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path, limit = tmp_path / "x", 1 << 20
    content = "\n".join([good("a"), good("huge", "x" * (20 << 20)), good("b")])
    path.write_text(content)
    del content
    tracemalloc.start()
    try:
        index = scan_requests(path, max_line_bytes=limit)
        with RequestReader(path, index, tokenizer, LIMITS) as reader:
            found = [reader.read(row) for row in range(3)]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 6 * limit
    assert index.line.tolist() == [1, 2, 3]
    refused = found[1]
    assert isinstance(refused, RowRefused)
    assert (refused.custom_id, refused.error.line) == ("huge", 2)
    assert "--max-line-bytes" in refused.error.message
    assert not isinstance(found[0], RowRefused) and not isinstance(found[2], RowRefused)


@pytest.mark.parametrize("over", [0, 1, 2, 3])
@pytest.mark.parametrize("end", ["", "\n", "\r\n"])
def test_c06_the_limit_is_exact(tmp_path: Path, tokenizer: Tokenizer, over: int, end: str) -> None:
    text = good("a")
    content = text + end + (good("b") if end else "")
    found = read_all(tmp_path / "x", content, tokenizer, max_line_bytes=len(text) - over)
    assert isinstance(found[0], RowRefused) == (over > 0)
    assert len(found) == (2 if end else 1)


def test_c07_what_a_batch_cannot_do_is_an_error_row(tmp_path: Path, tokenizer: Tokenizer) -> None:
    streamed = json.loads(good("b"))
    streamed["body"]["stream"] = True
    lines = [good("a", url="/v1/images"), json.dumps(streamed), good("c", method="GET"), good()]
    found = read_all(tmp_path / "x", "\n".join(lines), tokenizer)
    assert [one.error.param for one in found[:3]] == ["url", "stream", "method"]
    assert [one.custom_id for one in found[:3]] == ["a", "b", "c"]
    assert found[3][0].custom_id == "good"


def test_c08_a_refused_row_has_code_message_and_line(tmp_path: Path, tokenizer: Tokenizer) -> None:
    (one,) = read_all(tmp_path / "x", good("long", "a " * 200), tokenizer)
    assert (one.custom_id, one.error.code, one.error.line) == ("long", "context_length_exceeded", 1)
    assert one.error.message


def test_c09_an_unpaired_surrogate_is_replaced_and_said_once(
    tmp_path: Path, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    line = '{"custom_id":"%s","method":"POST","url":"/v1/completions","body":{"prompt":"a\\ud835b","n":2}}'
    fine = '{"custom_id":"z","method":"POST","url":"/v1/completions","body":{"prompt":"\\ud83d\\ude00"}}'
    with caplog.at_level(logging.WARNING):
        found = read_all(tmp_path / "x", "\n".join([line % "x", line % "y\\udc00", fine]), tokenizer)
    assert tokenizer.decode(found[0][0].prompt) == "a\ufffdb"
    assert found[1][0].custom_id == "y\ufffd"
    assert tokenizer.decode(found[2][0].prompt) == "\U0001f600"
    assert sum("surrogate" in record.message for record in caplog.records) == 1
    for one in found:
        one[0].custom_id.encode("utf-8")


def test_c09_bytes_that_are_no_utf8_are_an_error_row(tmp_path: Path, tokenizer: Tokenizer) -> None:
    broken = good("a").encode().replace(b"hi", b"h\xff")
    found = read_all(tmp_path / "x", broken + b"\n" + good("b").encode(), tokenizer)
    assert "not UTF-8" in found[0].error.message
    assert found[0].custom_id == "a"
    assert found[1][0].custom_id == "b"
