"""Any bytes as an input file: every line that is not blank is one row, and every row is requests or one error row."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from odd_json import Raw, deep, lines, to_text
from tokenizers_for_tests import make_tokenizer

from bgmpi.errors import InputError
from bgmpi.io.requests import RequestLimits, RequestReader, RowRefused, scan_requests
from bgmpi.io.tokenizer import Tokenizer, open_tokenizer
from bgmpi.request import Request

LIMITS = RequestLimits(max_model_len=64, vocab=512)
FILES = st.builds(
    lambda rows, ends, bom: b"\xef\xbb\xbf" * bom + b"".join(row + end for row, end in zip(rows, ends, strict=False)),
    st.lists(st.one_of(lines(), lines(), lines(), st.sampled_from([b"", b"  ", b"\r", b"\x0b\t"])), max_size=5),
    st.lists(st.sampled_from([b"\n", b"\n", b"\n", b"\r\n", b"\n\n", b""]), min_size=5, max_size=5),
    st.sampled_from([False, False, False, True]),
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return open_tokenizer(make_tokenizer(tmp_path_factory.mktemp("tok")))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("files")


def rows_of(path: Path, data: bytes, tokenizer: Tokenizer, most: int = 4000) -> list[tuple[Request, ...] | RowRefused]:
    """Read a file whole and prove what holds for every file; [] where two rows share a custom_id."""
    path.write_bytes(data)
    wanted = [number for number, line in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1) if line.rstrip()]
    try:
        index = scan_requests(path, max_line_bytes=most)
    except InputError as error:
        assert "duplicate_custom_id" in str(error) or data.startswith(b"\x1f\x8b")
        return []
    assert index.line.tolist() == wanted
    assert (index.samples >= 1).all() and (index.prompts >= 1).all()
    assert len(np.unique(index.content)) == len(index)
    found = []
    with RequestReader(path, index, tokenizer, LIMITS) as reader:
        for row in range(len(index)):
            one = reader.read(row)
            reader.shown_prompt(row).encode()
            check_row(one, row, int(index.line[row]), int(index.samples[row]), int(index.prompts[row]))
            found.append(one)
    return found


def check_row(one: tuple[Request, ...] | RowRefused, row: int, line: int, samples: int, prompts: int) -> None:
    if isinstance(one, RowRefused):
        assert one.row == row and one.error.line == line and one.error.message.startswith(f"line {line}: ")
        for text in (one.custom_id, one.url, one.error.message, one.error.param or "", one.error.code):
            text.encode()  # goes into an HDF5 file as strict UTF-8
        return
    assert len(one) == prompts and sum(part.samples for part in one) == samples
    for part in one:
        assert part.row == row and part.custom_id.strip() and part.prompt.dtype == np.int32
        part.custom_id.encode()
        assert 0 < len(part.prompt) <= 64 and 0 <= part.prompt.min() <= part.prompt.max() < 512
        sampling = part.sampling
        assert 0 <= sampling.seed < 2**64 and 0 <= sampling.top_k < 512
        assert sampling.max_tokens is None or 0 <= sampling.max_tokens < 2**31
        assert all(math.isfinite(one) for one in (sampling.temperature, sampling.top_p, sampling.min_p,
                                                  sampling.repetition_penalty, sampling.presence_penalty))
        "".join(sampling.stop).encode()


@given(data=FILES)
@settings(max_examples=400)
@example(data=b"\x00")
@example(data=b"\x1f\x8b\x08")
@example(data=b"\xef\xbb\xbf\n{}")
@example(data=b'\xef\xbb\xbf{"custom_id":"a"}\n\xef\xbb\xbf{}')
@example(data=b"[" * 100_000)
@example(data=b'{"a":' * 50_000)
def test_any_bytes_are_rows_and_error_rows_and_never_an_exception(
    folder: Path, tokenizer: Tokenizer, data: bytes
) -> None:
    rows_of(folder / "any.jsonl", data, tokenizer)


def good(custom_id: str = "a", **body: object) -> tuple[tuple[str, object], ...]:
    whole = {"prompt": "hi", **body}
    return (("custom_id", custom_id), ("method", "POST"), ("url", "/v1/completions"), ("body", whole))


@given(data=FILES)
@settings(max_examples=60)
def test_good_lines_among_any_others_are_read_as_when_alone(folder: Path, tokenizer: Tokenizer, data: bytes) -> None:
    names = ("\u00abfirst\u00bb", "\u00ablast\u00bb")
    first, last = (to_text(good(name, max_tokens=3, seed=5)).encode() for name in names)
    alone = rows_of(folder / "alone.jsonl", first, tokenizer)
    others = data.replace(b"\xef\xbb\xbf", b"")
    among = rows_of(folder / "among.jsonl", b"\n".join((first, others, last)), tokenizer)
    if not among:
        return
    assert not isinstance(alone[0], RowRefused) and not isinstance(among[0], RowRefused)
    assert among[0][0].sampling == alone[0][0].sampling and among[0][0].prompt.tolist() == alone[0][0].prompt.tolist()
    assert not isinstance(among[-1], RowRefused) and among[-1][0].custom_id == names[1]


ODD = {
    "not a number": ("temperature", Raw("NaN")), "infinite": ("top_p", Raw("-Infinity")),
    "beyond a float": ("temperature", Raw("1e999")), "beyond a float, whole": ("temperature", Raw("1" + "0" * 400)),
    "5,000 digits": ("seed", Raw("1" + "0" * 5000)), "beyond 64 bits": ("n", Raw("9" * 30)),
    "deep": ("logit_bias", deep("[", "]", 3000)), "deeper than Python goes": ("metadata", deep("[", "]", 200_000)),
    "deep objects": ("chat_template_kwargs", deep('{"a":', "", 50_000)),
    "NUL in a text": ("prompt", Raw('"a\\u0000b"')), "NUL as it is": ("prompt", Raw('"a\x00b"')),
    "half a pair": ("stop", Raw('"\\ud83d"')), "both halves swapped": ("stop", Raw('"\\ude00\\ud83d"')),
    "repeated key": ("prompt", Raw('"x", "prompt": ["y", "z"]')), "no value": ("prompt", Raw("")),
}  # fmt: skip


@pytest.mark.parametrize("name", ODD)
def test_an_odd_value_costs_its_own_row_alone(folder: Path, tokenizer: Tokenizer, name: str) -> None:
    key, value = ODD[name]
    data = "\n".join(to_text(row) for row in (good("a"), good("b", **{key: value}), good("c")))
    found = rows_of(folder / "odd.jsonl", data.encode("utf-8", "surrogatepass"), tokenizer, most=1 << 20)
    assert [isinstance(one, RowRefused) for one in found][::2] == [False, False] and len(found) == 3
    runs = name in ("NUL in a text", "half a pair", "both halves swapped", "repeated key")
    assert isinstance(found[1], RowRefused) != runs


def test_a_repeated_key_means_the_last_one_to_scanner_and_reader_alike(folder: Path, tokenizer: Tokenizer) -> None:
    text = ('{"custom_id": "a", "custom_id": "b", "method": "POST", "url": "/v1/completions", '
            '"body": {"prompt": "x"}, "body": {"n": 2, "prompt": ["x", "y"], "n": 3}}')
    (one,) = rows_of(folder / "twice.jsonl", text.encode(), tokenizer)
    assert not isinstance(one, RowRefused) and [part.samples for part in one] == [3, 3] and one[0].custom_id == "b"


def test_a_line_of_ten_megabytes_over_the_limit_costs_a_piece_of_memory(folder: Path, tokenizer: Tokenizer) -> None:
    """The 100 MB line of case C06 is in test_end_to_end_memory.py; here the file is sparse: its line is NUL bytes."""
    path = folder / "sparse.jsonl"
    start = json.dumps({"custom_id": "long"})[:-1].encode()
    path.write_bytes(start)
    with open(path, "r+b") as file:
        file.truncate(10 << 20)
        file.seek(10 << 20)
        file.write(b"\n" + to_text(good("z")).encode())
    index = scan_requests(path, max_line_bytes=4096)
    with RequestReader(path, index, tokenizer, LIMITS) as reader:
        long, after = reader.read(0), reader.read(1)
    assert isinstance(long, RowRefused) and long.custom_id == "long" and "--max-line-bytes 4096" in long.error.message
    assert not isinstance(after, RowRefused) and after[0].custom_id == "z"


@pytest.mark.slow
@pytest.mark.faults
@given(data=FILES)
@settings(max_examples=20_000, derandomize=False)
def test_any_bytes_for_long(folder: Path, tokenizer: Tokenizer, data: bytes) -> None:
    rows_of(folder / "long.jsonl", data, tokenizer)
