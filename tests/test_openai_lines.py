"""Laws of the exported lines: strict JSON in the shapes of the OpenAI API, in input order, errors apart."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from results_for_tests import COMPLETIONS, answer, error, logprobs, publish_answers

from bgmpi.errors import InputError, MissingError, RowError, WriteError
from bgmpi.io.openai_lines import TokenText, export
from bgmpi.request import Answer, Finish, Logprobs

NAMES = {1: b"He", 2: b"llo", 3: " wörld".encode(), 4: b"\xf0\x9f", 5: b"\x98\x80"}


def _strict(line: str) -> Any:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(line, parse_constant=refuse)


def _export(
    folder: Path, answers: list[Answer], samples: list[int], token_text: TokenText | None = None, **options: Any
) -> tuple[list[Any], list[Any]]:
    publish_answers(folder / "r.h5", answers, samples, **options)
    written = export(folder / "r.h5", folder / "out.jsonl", token_text=token_text)
    good, bad = (
        [_strict(line) for line in path.read_bytes().decode("utf-8", "strict").splitlines()]
        for path in (written.output, written.error_file)
    )
    assert (len(good), len(bad)) == (written.answers, written.errors)
    return good, bad


def test_a_chat_row_is_a_chat_completion(tmp_path: Path) -> None:
    good, bad = _export(tmp_path, [answer(0, prompt_tokens=9, stop_reason="END")], [1])
    line = good[0]
    assert bad == []
    assert list(line) == ["id", "custom_id", "response", "error"]
    assert line["custom_id"] == "id-0" and line["error"] is None
    assert line["response"]["status_code"] == 200 and line["response"]["request_id"]
    body = line["response"]["body"]
    assert (body["object"], body["model"]) == ("chat.completion", "tiny")
    assert isinstance(body["created"], int)
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "text of row 0 sample 0", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": "END",
        }
    ]
    assert body["usage"] == {"prompt_tokens": 9, "completion_tokens": 3, "total_tokens": 12}


def test_a_completion_row_is_a_text_completion(tmp_path: Path) -> None:
    good, _ = _export(tmp_path, [answer(0, url=COMPLETIONS, finish=Finish.LENGTH, stop_reason=None)], [1])
    body = good[0]["response"]["body"]
    assert body["object"] == "text_completion"
    assert body["choices"] == [
        {
            "index": 0,
            "text": "text of row 0 sample 0",
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
        }
    ]


def test_many_prompts_times_n_are_choices_in_order_and_count_each_prompt_once(tmp_path: Path) -> None:
    answers = [answer(0, sample, url=COMPLETIONS, prompt_tokens=10 * (1 + sample // 2)) for sample in range(6)]
    good, _ = _export(tmp_path, answers, [6], prompts_per_row=np.array([3], np.int32))
    body = good[0]["response"]["body"]
    assert [choice["index"] for choice in body["choices"]] == list(range(6))
    assert body["usage"] == {"prompt_tokens": 10 + 20 + 30, "completion_tokens": 18, "total_tokens": 78}


def test_an_error_row_speaks_both_dialects_in_the_error_file_only(tmp_path: Path) -> None:
    good, bad = _export(tmp_path, [answer(0), error(1), answer(2)], [1, 1, 1])
    assert [line["custom_id"] for line in good] == ["id-0", "id-2"]
    line = bad[0]
    assert line["custom_id"] == "id-1"
    assert line["response"]["status_code"] == 400
    assert line["response"]["body"] == {
        "error": {
            "message": "row 1 is bad",
            "type": "invalid_request_error",
            "param": "messages",
            "code": "context_length_exceeded",
        }
    }
    assert line["error"] == {
        "code": "context_length_exceeded",
        "message": "row 1 is bad",
        "param": "messages",
        "line": 2,
    }


def test_a_fault_of_the_program_is_a_500_and_shows_no_choices(tmp_path: Path) -> None:
    fault = answer(0, finish=Finish.ERROR, error=RowError("numeric_fault", "NaN at step 3"))
    _, bad = _export(tmp_path, [fault], [1])
    assert bad[0]["response"]["status_code"] == 500
    assert "choices" not in bad[0]["response"]["body"]
    assert bad[0]["error"]["line"] is None and bad[0]["error"]["param"] is None


def test_a_row_without_a_custom_id_says_null(tmp_path: Path) -> None:
    _, bad = _export(tmp_path, [error(0, custom_id="")], [1])
    assert bad[0]["custom_id"] is None


def test_the_error_file_is_written_when_there_are_no_errors_so_no_stale_one_stays(tmp_path: Path) -> None:
    (tmp_path / "out.errors.jsonl").write_text("stale\n")
    _export(tmp_path, [answer(0)], [1])
    assert (tmp_path / "out.errors.jsonl").read_text() == ""


def test_c33_minus_infinity_is_floored_and_every_line_is_strict_json(tmp_path: Path) -> None:
    both = [answer(0, logprobs=logprobs(3, 2)), answer(1, url=COMPLETIONS, logprobs=logprobs(3, 2))]
    good, _ = _export(tmp_path, both, [1, 1])
    chat = good[0]["response"]["body"]["choices"][0]["logprobs"]["content"]
    assert chat[-1]["top_logprobs"][-1]["logprob"] == -9999.0
    completion = good[1]["response"]["body"]["choices"][0]["logprobs"]
    assert min(completion["top_logprobs"][-1].values()) == -9999.0


def test_chat_log_probabilities_have_text_and_bytes_of_each_token(tmp_path: Path) -> None:
    values = Logprobs(
        np.array([-0.5, -0.25], np.float32),
        np.array([[1, 3], [4, 5]], np.int32),
        np.array([[-0.5, -1.5], [-0.25, -2.0]], np.float32),
    )
    one = answer(0, tokens=np.array([1, 4], np.int32), logprobs=values)
    good, _ = _export(tmp_path, [one], [1], NAMES.__getitem__)
    content = good[0]["response"]["body"]["choices"][0]["logprobs"]["content"]
    assert content[0] == {
        "token": "He",
        "logprob": -0.5,
        "bytes": [72, 101],
        "top_logprobs": [
            {"token": "He", "logprob": -0.5, "bytes": [72, 101]},
            {"token": " wörld", "logprob": -1.5, "bytes": list(" wörld".encode())},
        ],
    }
    assert content[1]["bytes"] == [0xF0, 0x9F] and "�" in content[1]["token"]


def test_completion_log_probabilities_are_parallel_lists(tmp_path: Path) -> None:
    values = Logprobs(
        np.array([-0.5, -3.0, -0.25], np.float32),
        np.array([[1], [3], [4]], np.int32),
        np.array([[-0.5], [-1.0], [-0.25]], np.float32),
    )
    one = answer(0, url=COMPLETIONS, tokens=np.array([1, 2, 4], np.int32), logprobs=values)
    good, _ = _export(tmp_path, [one], [1], NAMES.__getitem__)
    assert good[0]["response"]["body"]["choices"][0]["logprobs"] == {
        "tokens": ["He", "llo", "bytes:\\xf0\\x9f"],
        "token_logprobs": [-0.5, -3.0, -0.25],
        "top_logprobs": [{"He": -0.5}, {" wörld": -1.0, "llo": -3.0}, {"bytes:\\xf0\\x9f": -0.25}],
        "text_offset": [0, 2, 5],
    }


def test_without_a_tokenizer_tokens_are_named_by_id(tmp_path: Path) -> None:
    good, _ = _export(tmp_path, [answer(0, tokens=np.array([7], np.int32), logprobs=logprobs(1, 0))], [1])
    content = good[0]["response"]["body"]["choices"][0]["logprobs"]["content"]
    assert content[0]["token"] == "token_id:7" and content[0]["bytes"] is None and content[0]["top_logprobs"] == []


def test_prompt_log_probabilities_begin_with_null(tmp_path: Path) -> None:
    values = Logprobs(
        np.array([math.nan, -0.5, -3.0], np.float32),
        np.array([[-1], [2], [3]], np.int32),
        np.array([[math.nan], [-0.5], [-1.0]], np.float32),
    )
    one = answer(0, prompt=np.array([1, 2, 5], np.int32), prompt_logprobs=values)
    good, _ = _export(tmp_path, [one], [1], NAMES.__getitem__)
    first, second, third = good[0]["response"]["body"]["choices"][0]["prompt_logprobs"]
    assert first is None
    assert second == {"2": {"logprob": -0.5, "rank": 1, "decoded_token": "llo"}}
    assert third["5"]["logprob"] == -3.0 and third["3"]["rank"] == 1


def test_an_echoed_prompt_comes_first_in_the_completions_lists(tmp_path: Path) -> None:
    before = Logprobs(
        np.array([math.nan, -0.5], np.float32),
        np.array([[-1], [2]], np.int32),
        np.array([[math.nan], [-0.5]], np.float32),
    )
    after = Logprobs(np.array([-0.25], np.float32), np.array([[3]], np.int32), np.array([[-0.25]], np.float32))
    ids = np.array([1, 2], np.int32), np.array([3], np.int32)
    one = answer(
        0, url=COMPLETIONS, prompt=ids[0], tokens=ids[1], text="Hello wörld", prompt_logprobs=before, logprobs=after
    )
    good, _ = _export(tmp_path, [one], [1], NAMES.__getitem__)
    choice = good[0]["response"]["body"]["choices"][0]
    assert choice["text"] == "Hello wörld" and "prompt_logprobs" not in choice
    assert choice["logprobs"] == {
        "tokens": ["He", "llo", " wörld"],
        "token_logprobs": [None, -0.5, -0.25],
        "top_logprobs": [None, {"llo": -0.5}, {" wörld": -0.25}],
        "text_offset": [0, 2, 5],
    }


def test_an_export_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "out.jsonl").write_text("older\n")
    with pytest.raises(MissingError):
        export(tmp_path / "none.h5", tmp_path / "out.jsonl")
    publish_answers(tmp_path / "r.h5", [answer(0)], [1])
    with pytest.raises(WriteError, match="nowhere"):
        export(tmp_path / "r.h5", tmp_path / "out.jsonl", tmp_path / "nowhere" / "errors.jsonl")
    (tmp_path / "cut.h5").write_bytes((tmp_path / "r.h5").read_bytes()[:1000])
    with pytest.raises(InputError):
        export(tmp_path / "cut.h5", tmp_path / "out.jsonl")
    assert (tmp_path / "out.jsonl").read_text() == "older\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cut.h5", "out.jsonl", "r.h5", "r.h5.parts"]


def test_a_device_can_be_written_to(tmp_path: Path) -> None:
    publish_answers(tmp_path / "r.h5", [answer(0)], [1])
    assert export(tmp_path / "r.h5", "/dev/null", tmp_path / "e.jsonl").answers == 1
    assert Path("/dev/null").is_char_device()
