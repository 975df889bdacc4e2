"""Laws of io/requests.py and the files below it: scanning, reading by place, checking every field."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers_for_tests import make_tokenizer

from bgmpi.errors import InputError, InternalError, MissingError
from bgmpi.io.requests import RequestLimits, RequestReader, RowRefused, SamplingDefaults, scan_requests
from bgmpi.io.tokenizer import Tokenizer, open_tokenizer
from bgmpi.request import Request, Sampling

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
LIMITS = RequestLimits(max_model_len=64, vocab=512)
NO_IDS = np.empty(0, np.int32)
Read = Callable[..., Any]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return open_tokenizer(make_tokenizer(tmp_path_factory.mktemp("tok")))


@pytest.fixture
def read(tmp_path: Path, tokenizer: Tokenizer) -> Read:
    """Read one completion with the given body fields: its Sampling, or the RowError."""

    def read_one(url: str = COMPLETIONS, limits: RequestLimits = LIMITS, **body: Any) -> Any:
        body = {"prompt": "hi", **body} if url == COMPLETIONS else {"messages": [{"role": "user", "content": "hi"}],
                                                                    **body}
        found = read_lines(tmp_path, tokenizer, [line("a", url, **body)], limits)[0]
        return found.error if isinstance(found, RowRefused) else found if len(found) > 1 else found[0]

    return read_one


def line(custom_id: Any, url: str = COMPLETIONS, **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def read_lines(folder: Path, tokenizer: Tokenizer, lines: list[Any], limits: RequestLimits = LIMITS) -> list[Any]:
    path = folder / "input.jsonl"
    path.write_text("\n".join(entry if isinstance(entry, str) else json.dumps(entry) for entry in lines))
    index = scan_requests(path)
    with RequestReader(path, index, tokenizer, limits) as reader:
        return [reader.read(row) for row in range(len(index))]


def test_the_index_tells_place_line_and_samples_of_every_row(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    entries = [line("a", n=3, prompt="x"), line("b", prompt=["x", "y"], n=2), line("c", prompt=[1, 2]),
               line("d", prompt=[[1], [2], [3]]), line("e", CHAT, n=2), line("f", n=True), line("g", n=10**9)]
    content = "\ufeff" + "\r\n\n".join(json.dumps(entry) for entry in entries)
    path.write_bytes(content.encode())
    index = scan_requests(path)
    assert index.line.tolist() == [1, 3, 5, 7, 9, 11, 13]
    assert index.samples.tolist() == [3, 4, 1, 3, 2, 1, 1]
    assert index.first_sequence().tolist() == [0, 3, 7, 8, 11, 13, 14, 15]
    assert (index.offset.dtype, index.samples.dtype) == (np.int64, np.int32)
    assert (index.first_chat_line, index.has_chat) == (9, True)
    assert (index.size, index.sha256) == (len(content.encode()), hashlib.sha256(content.encode()).hexdigest())
    data = path.read_bytes()
    for row, entry in enumerate(entries):
        assert json.loads(data[index.offset[row] :][: index.length[row]]) == entry
    assert pickle.loads(pickle.dumps(index)).line.tolist() == index.line.tolist()


def test_priority_and_deadline_are_told_of_every_row_once_a_row_has_one(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    asked: list[dict[str, Any]] = [
        {}, {"priority": -3}, {"priority": None, "deadline_s": 2.5}, {"priority": True}, {"priority": 2.0},
        {"priority": 2**31}, {"priority": 10**30}, {"deadline_s": "1"}, {"deadline_s": -1}, {"deadline_s": 10**400},
        {"priority": 2**31 - 1, "deadline_s": 0}, {"priority": 7, "n": 10**9}, {"priority": 8, "prompt": "\ud800"}, {},
    ]
    lines = [json.dumps(line(f"r{i}", **body)) for i, body in enumerate(asked)]
    path.write_text("\n".join([*lines, "{", "[]"]))
    index = scan_requests(path)
    assert index.priority is not None and index.deadline is not None
    assert (index.priority.dtype, index.deadline.dtype) == (np.int32, np.float32)
    assert index.priority.tolist() == [0, -3, *[0] * 8, 2**31 - 1, 7, 8, 0, 0, 0]
    assert np.flatnonzero(np.isfinite(index.deadline)).tolist() == [2, 10]
    assert index.deadline[[2, 10]].tolist() == [2.5, 0]
    with pytest.raises(InternalError, match="an index of 16 rows has columns of"):
        replace(index, priority=index.priority[:3])
    path.write_text("\n".join(lines[:2]))
    assert scan_requests(path).deadline is None
    path.write_text(lines[0])
    assert scan_requests(path).priority is None


def test_a_priority_or_deadline_that_cannot_be_read_refuses_its_row(read: Read) -> None:
    assert isinstance(read(priority=-(2**31) + 1, deadline_s=0.5), Request)
    assert isinstance(read(CHAT, priority=None, deadline_s=None), Request)
    for bad in (True, 2.0, "1", 2**31, [1]):
        refused = read(priority=bad)
        assert refused.param == "priority" and "expected a whole number from -2147483647" in refused.message
    for bad in (True, "1", -0.1, 1e10, {}):
        refused = read(deadline_s=bad)
        assert refused.param == "deadline_s" and "expected a number of at least 0" in refused.message


def test_an_empty_file_is_a_job_of_no_rows(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"")
    index = scan_requests(tmp_path / "x")
    assert (len(index), index.has_chat, index.first_sequence().tolist()) == (0, False, [0])


def test_what_is_no_readable_file_stops_the_job(tmp_path: Path) -> None:
    with pytest.raises(MissingError, match="no such file"):
        scan_requests(tmp_path / "x")
    with pytest.raises(InputError, match="folder"):
        scan_requests(tmp_path)
    (tmp_path / "z").write_bytes(b"\x1f\x8b\x08rest")
    with pytest.raises(InputError, match="gzip"):
        scan_requests(tmp_path / "z")
    with pytest.raises(InputError, match="no regular file"):
        scan_requests("/dev/null")
    if os.geteuid():
        (tmp_path / "z").chmod(0)
        with pytest.raises(InputError, match="cannot be read"):
            scan_requests(tmp_path / "z")


def test_a_row_reads_the_same_in_any_order_and_any_number_of_times(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text("\n".join(json.dumps(line(f"r{i}", prompt="ab" * i or "a")) for i in range(20)))
    index = scan_requests(path)
    with RequestReader(path, index, tokenizer, LIMITS) as reader:
        forward = [reader.read(row)[0] for row in range(20)]  # type: ignore[index]
        back = [reader.read(row)[0] for row in reversed(range(20))]  # type: ignore[index]
    for one, other in zip(forward, reversed(back), strict=True):
        assert (one.row, one.custom_id, one.sampling) == (other.row, other.custom_id, other.sampling)
        assert np.array_equal(one.prompt, other.prompt)
    assert len({one.sampling.seed for one in forward}) == 20


def test_a_file_that_changes_while_the_job_runs_is_noticed(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps(line("a", prompt="x", n=2)))
    index = scan_requests(path)
    with RequestReader(path, index, tokenizer, LIMITS) as reader:
        path.write_text(json.dumps(line("a", prompt="x", n=3)))
        with pytest.raises(InputError, match="leave the file alone"):
            reader.read(0)
        path.write_text("{")
        with pytest.raises(InputError, match="became shorter"):
            reader.read(0)
    with pytest.raises(InputError, match="bytes when it was scanned"):
        RequestReader(path, index, tokenizer, LIMITS)
    path.unlink()
    with pytest.raises(MissingError):
        RequestReader(path, index, tokenizer, LIMITS)


def test_a_row_without_words_gets_the_defaults(read: Read) -> None:
    sampling = read().sampling
    assert sampling == Sampling(seed=sampling.seed)
    assert sampling.max_tokens is None
    defaults = SamplingDefaults(temperature=0.5, top_p=0.9, top_k=40, min_p=0.1, repetition_penalty=1.2, max_tokens=7)
    limits = RequestLimits(64, 512, defaults=defaults)
    found = read(limits=limits).sampling
    assert (found.temperature, found.top_p, found.top_k, found.min_p) == (0.5, 0.9, 40, 0.1)
    assert (found.repetition_penalty, found.max_tokens) == (1.2, 7)
    assert read(limits=limits, temperature=0, top_k=-1, max_tokens=9).sampling.temperature == 0
    assert read(limits=limits, temperature=None, top_k=-1).sampling.top_k == 0


def test_every_field_of_sampling_arrives(read: Read) -> None:
    body = {
        "max_tokens": 9, "min_tokens": 2, "temperature": 0.7, "top_p": 0.8, "top_k": 5, "min_p": 0.05, "seed": -1,
        "n": 2, "stop": ["x", "y", "x"], "stop_token_ids": [9, 8], "ignore_eos": True, "logprobs": 3,
        "repetition_penalty": 1.1, "presence_penalty": -1, "frequency_penalty": 2, "logit_bias": {"7": 1, "3": -100},
        "prompt_logprobs": 0, "echo": True, "include_stop_str_in_output": True, "skip_special_tokens": False,
    }
    request = read(**body)
    assert request.samples == 2
    assert request.sampling == Sampling(
        seed=2**64 - 1, max_tokens=9, min_tokens=2, temperature=0.7, top_p=0.8, top_k=5, min_p=0.05,
        repetition_penalty=1.1, presence_penalty=-1.0, frequency_penalty=2.0, logit_bias=((3, -100.0), (7, 1.0)),
        stop=("x", "y"), stop_token_ids=(9, 8), ignore_eos=True, include_stop=True, skip_special_tokens=False,
        logprobs=3, prompt_logprobs=0, echo=True)
    chat = read(CHAT, logprobs=True, top_logprobs=4, max_completion_tokens=3, stop="z").sampling
    assert (chat.logprobs, chat.max_tokens, chat.stop) == (4, 3, ("z",))
    assert read(CHAT, logprobs=True).sampling.logprobs == 0
    assert read(CHAT, logprobs=False, top_logprobs=0).sampling.logprobs is None
    assert read(echo=True, logprobs=2).sampling.prompt_logprobs == 2


@pytest.mark.parametrize(("param", "values"), [
    ("max_tokens", [-1, 2.5, "4", True, [], 4.0]), ("max_completion_tokens", [-1, "4"]), ("min_tokens", [-1, 0.5]),
    ("temperature", [-0.1, "1", True, [1]]), ("top_p", [0, 1.01, -1, "x"]), ("top_k", [-2, 1.5, True]),
    ("min_p", [-0.1, 1.1]), ("seed", [1.5, "7", 2**64, -(2**63) - 1, False]), ("n", [0, -1, 1.0, True, 10**6]),
    ("repetition_penalty", [0, -1]), ("presence_penalty", [2.1, -2.1]), ("frequency_penalty", [3, "x"]),
    ("stop", ["", [""], [1], 5, {}]), ("stop_token_ids", [[512], [-1], [True], "5", [1.0]]),
    ("logit_bias", [[], {"512": 5}, {"-1": 5}, {"abc": 5}, {"1": "x"}, {"1": 101}, {"1": True}, {"1.0": 1}]),
    ("ignore_eos", [1, "true"]), ("echo", [1]), ("logprobs", [True, -1, 21, 1.0]), ("prompt_logprobs", [-1, 21]),
    ("best_of", [2, 0]), ("stream", [True, "no"]), ("model", [7]), ("suffix", ["x"]), ("use_beam_search", [True, 0]),
    ("response_format", [{"type": "json_object"}]), ("guided_regex", ["a"]), ("structured_outputs", [{"regex": "a"}]),
    ("bad_words", [["x"]]), ("temprature", [1]), ("messages", [[]]),
    ("prompt", ["", [], [[]], [1, "a"], [1.0], [512], [-1], [True], 5, None, {}, ["a", [1]], [[1], [512]]]),
])
def test_a_wrong_value_is_refused_by_name(read: Read, param: str, values: list[Any]) -> None:
    for value in values:
        error = read(**{param: value})
        assert error.code == "invalid_request_error", (value, error)
        assert str(error.param).split("[")[0] == param, (value, error)
        assert error.message.startswith("line 1: ") and error.line == 1


def test_fields_that_ask_for_nothing_are_accepted(read: Read) -> None:
    assert isinstance(read(user="u", metadata={"a": "b"}, store=True, service_tier="auto", stream=False,
                           stream_options=None, best_of=1, suffix=None, use_beam_search=False, guided_json=None,
                           response_format={"type": "text"}, stop=None, n=None, logit_bias={}), Request)


def test_numbers_at_the_border_are_accepted(read: Read) -> None:
    assert read(temperature=1e-10).sampling.temperature == 1e-10
    assert read(temperature=5).sampling.temperature == 5.0
    assert read(top_k=511).sampling.top_k == 511
    assert [read(top_k=k).sampling.top_k for k in (512, 9999999, 0, -1)] == [0, 0, 0, 0]
    assert read(max_tokens=10**30).sampling.max_tokens == 2**31 - 1
    assert read(seed=2**64 - 1).sampling.seed == 2**64 - 1
    assert read(max_tokens=4, max_completion_tokens=4).sampling.max_tokens == 4
    assert read(max_tokens=4, max_completion_tokens=5).param == "max_completion_tokens"
    assert read(max_tokens=4, min_tokens=5).param == "min_tokens"
    assert read(CHAT, top_logprobs=3).param == "top_logprobs"
    assert read(CHAT, echo=True).param == "echo"


def test_a_number_too_large_for_a_float_is_refused_by_name(tmp_path: Path, tokenizer: Tokenizer) -> None:
    numbers = {"a": "1e400", "b": "9" * 400}
    lines = [json.dumps(line(id, prompt="x", temperature=7)).replace("7}", n + "}") for id, n in numbers.items()]
    for found in read_lines(tmp_path, tokenizer, lines):
        assert found.error.param == "temperature"


def test_a_list_of_prompts_is_one_request_for_each(read: Read, tokenizer: Tokenizer) -> None:
    requests = read(prompt=["hi", "ABCD"], n=3)
    assert [(one.row, one.samples, one.prompt.tolist()) for one in requests] == [
        (0, 3, tokenizer.encode("hi").tolist()), (0, 3, tokenizer.encode("ABCD").tolist())]
    assert [one.prompt.tolist() for one in read(prompt=[[5, 6], [7]])] == [[5, 6], [7]]
    assert read(prompt=[5, 511]).prompt.tolist() == [5, 511]
    assert read(prompt=["x"]).prompt.dtype == np.int32
    assert read(prompt=["hi", [1] * 99]).param == "prompt"
    error = read(prompt=[[1], [1] * 99])
    assert (error.code, error.param) == ("context_length_exceeded", "prompt[1]")
    assert read(prompt=["x"] * 200, n=100).param == "n"


def test_chats_are_checked_and_made_plain(read: Read, tokenizer: Tokenizer) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    joined = read(CHAT, messages=[{"role": "user", "content": parts}]).prompt
    assert joined.tolist() == tokenizer.apply_chat_template([{"role": "user", "content": "a\nb"}]).tolist()
    image = [{"type": "image_url", "image_url": {"url": "x"}}]
    for bad in ([], "hi", None, [5], [{"content": "x"}], [{"role": "", "content": "x"}], [{"role": "user"}],
                [{"role": "user", "content": 5}], [{"role": "user", "content": image}]):
        error = read(CHAT, messages=bad)
        assert error.code == "invalid_request_error" and error.param.startswith("messages"), (bad, error)
    assert read(CHAT, tool_choice="required", tools=[{}]).param == "tool_choice"
    assert read(CHAT, tools="x").param == "tools"
    assert read(CHAT, chat_template="x").param == "chat_template"
    assert len(read(CHAT, add_generation_prompt=False).prompt) < len(read(CHAT).prompt)


def test_tools_and_variables_reach_the_template(tmp_path: Path) -> None:
    template = ("{% if tools %}{{ tools[0].name }}{% endif %}{{ mood }}"
                "{{ messages[0].tool_calls[0].function.arguments.x }}")
    tok = open_tokenizer(make_tokenizer(tmp_path / "t", chat_template=template))
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 5}'}}
    body = {"messages": [{"role": "assistant", "content": None, "tool_calls": [call]}], "tools": [{"name": "AB"}],
            "chat_template_kwargs": {"mood": "CD"}}
    lines = [line("a", CHAT, **body), line("b", CHAT, tool_choice="none", **body)]
    (found,), (without,) = read_lines(tmp_path, tok, lines)
    assert tok.decode(found.prompt) == "ABCD5"
    assert tok.decode(without.prompt) == "CD5"


def test_any_model_name_passes_unless_names_are_given(read: Read) -> None:
    assert isinstance(read(model="gpt-4o"), Request)
    named = RequestLimits(64, 512, model_names=("demo", "other"))
    assert isinstance(read(limits=named, model="other"), Request)
    assert isinstance(read(limits=named), Request)
    assert read(limits=named, model="gpt-4o").code == "model_not_found"


def test_a_prompt_far_too_long_is_refused_without_making_its_ids(read: Read) -> None:
    error = read(prompt="a" * 5000)
    assert (error.code, error.param) == ("context_length_exceeded", "prompt")
    assert "at least" in error.message and " 64 " in error.message


def test_a_tokenizer_larger_than_the_model_refuses_the_row(read: Read) -> None:
    assert "token" in read(limits=RequestLimits(64, 300), prompt="the they").message


def test_the_last_of_repeated_json_keys_counts_in_scan_and_read(tmp_path: Path, tokenizer: Tokenizer) -> None:
    text = '{"custom_id":"a","custom_id":"b","method":"POST","url":"/v1/completions","body":{"n":2,"prompt":"x","n":3}}'
    (found,) = read_lines(tmp_path, tokenizer, [text])[0]
    assert (found.custom_id, found.samples) == ("b", 3)


@pytest.mark.parametrize("text", ["{", '{"a":NaN}', '{"a":1e5x}', "\x00", '{"custom_id":"a"}}', "[" * 5000,
                                  '{"a":"\\ud800"', "[" * 400 + '"\\ud800"' + "]" * 400, "12", '{"a":Infinity}'])
def test_a_line_that_is_no_object_is_one_error_row(tmp_path: Path, tokenizer: Tokenizer, text: str) -> None:
    bad, good = read_lines(tmp_path, tokenizer, [text, line("b", prompt="x")])
    assert bad.error.code == "invalid_request_error" and bad.error.line == 1
    assert good[0].custom_id == "b"


def test_a_broken_line_still_gives_the_custom_id_it_begins_with(tmp_path: Path, tokenizer: Tokenizer) -> None:
    (bad,) = read_lines(tmp_path, tokenizer, ['{"custom_id": "a\\u00e9", "body": {"prompt"'])
    assert bad.custom_id == "a\u00e9"


def test_row_seeds_follow_the_job_seed_and_the_row(tmp_path: Path, tokenizer: Tokenizer) -> None:
    lines = [line("a", prompt="x"), line("b", prompt="x"), line("c", prompt="x", seed=5)]
    one, again, other = (
        [found[0].sampling.seed for found in read_lines(tmp_path, tokenizer, lines, RequestLimits(64, 512, job_seed=s))]
        for s in (0, 0, 1))
    assert one == again and one[0] != one[1] and one[0] != other[0]
    assert one[2] == other[2] == 5
    assert all(0 <= seed < 2**64 for seed in one)


def test_the_shipped_example_is_forty_good_rows(tokenizer: Tokenizer) -> None:
    path = Path(__file__).parent.parent / "examples" / "requests.jsonl"
    index = scan_requests(path)
    with RequestReader(path, index, tokenizer, RequestLimits(8192, 512, model_names=("demo",))) as reader:
        found = [reader.read(row) for row in range(len(index))]
    assert len(found) >= 40
    assert [one for one in found if isinstance(one, RowRefused)] == []


def test_a_row_read_again_with_its_ids_is_the_same_and_no_template_is_run(
    tmp_path: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "input.jsonl"
    chat = {"messages": [{"role": "user", "content": "hi"}], "tools": [], "documents": []}
    lines = [line("a", CHAT, **chat), line("b", prompt=["one", "two"], n=2, add_special_tokens=False),
             line("c", prompt="x", unknown=1), line("d", CHAT, messages=[{"role": 1}])]  # fmt: skip
    path.write_text("\n".join(json.dumps(entry) for entry in lines))
    index = scan_requests(path)
    assert index.first_prompt().tolist() == [0, 1, 3, 4, 5]
    with RequestReader(path, index, tokenizer, LIMITS) as reader:
        first = [reader.read(row) for row in range(4)]
        for name in ("encode", "render_chat"):
            monkeypatch.setattr(Tokenizer, name, None)
        for row, before in enumerate(first):
            known = [one.prompt for one in before] if isinstance(before, tuple) else [np.zeros(1, np.int32)]
            again = reader.read(row, known)
            assert type(again) is type(before) is (tuple if row < 2 else RowRefused)
            if isinstance(before, tuple) and isinstance(again, tuple):
                assert [one.prompt.tolist() for one in again] == [one.prompt.tolist() for one in before]
                assert [replace(one, prompt=NO_IDS) for one in again] == [replace(one, prompt=NO_IDS) for one in before]
            else:
                assert again == before
        with pytest.raises(InputError, match=r"4 samples of 2 prompts .* asks for 2 of 1"):
            reader.read(1, [np.zeros(1, np.int32)])
