"""Public faults of kind K2 (one request must never end or bend another), at the level of the reader."""

from __future__ import annotations

import json
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers_for_tests import make_tokenizer

from bgmpi.io.requests import RequestLimits, RequestReader, RowRefused, scan_requests
from bgmpi.io.tokenizer import Tokenizer, open_tokenizer

LIMITS = RequestLimits(max_model_len=64, vocab=512)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return open_tokenizer(make_tokenizer(tmp_path_factory.mktemp("tok")))


@pytest.fixture(scope="module")
def bos_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return open_tokenizer(make_tokenizer(tmp_path_factory.mktemp("tok"), bos=True))


def read_all(folder: Path, tokenizer: Tokenizer, bodies: list[dict[str, Any]]) -> list[Any]:
    path = folder / "x.jsonl"
    lines = [json.dumps({"custom_id": f"r{at}", "method": "POST", "url": "/v1/completions", "body": body})
             for at, body in enumerate(bodies)]
    path.write_text("\n".join(lines))
    index = scan_requests(path)
    with RequestReader(path, index, tokenizer, LIMITS) as reader:
        return [reader.read(row) for row in range(len(index))]


def refused(found: list[Any]) -> list[bool]:
    return [isinstance(one, RowRefused) for one in found]


def test_c10_one_prompt_over_the_limit_is_one_error_row_with_both_numbers(tmp_path: Path, tokenizer: Tokenizer) -> None:
    fine = {"prompt": "hi", "max_tokens": 4}
    found = read_all(tmp_path, tokenizer, [fine, fine, {"prompt": [5] * 100}, fine])
    assert refused(found) == [False, False, True, False]
    assert found[2].error.code == "context_length_exceeded"
    assert " 64 " in found[2].error.message and " 100 " in found[2].error.message


def test_c11_short_long_short_is_three_aligned_rows(tmp_path: Path, tokenizer: Tokenizer) -> None:
    found = read_all(tmp_path, tokenizer, [{"prompt": "hi"}, {"prompt": [5] * 100}, {"prompt": "he"}])
    assert [one.row if isinstance(one, RowRefused) else one[0].row for one in found] == [0, 1, 2]
    assert [one.custom_id if isinstance(one, RowRefused) else one[0].custom_id for one in found] == ["r0", "r1", "r2"]


def test_c12_a_prompt_needs_room_for_one_token(tmp_path: Path, tokenizer: Tokenizer) -> None:
    found = read_all(tmp_path, tokenizer, [{"prompt": [5] * size, "max_tokens": 10} for size in (63, 64, 65)])
    assert refused(found) == [False, True, True]
    assert {one.error.code for one in found[1:]} == {"context_length_exceeded"}
    assert found[0][0].sampling.max_tokens == 10


def test_c13_an_empty_prompt_runs_only_on_a_bos(tmp_path: Path, tokenizer: Tokenizer, bos_tokenizer: Tokenizer) -> None:
    bodies = [{"prompt": "hi"}, {"prompt": ""}, {"prompt": "hi"}]
    found = read_all(tmp_path, tokenizer, bodies)
    assert refused(found) == [False, True, False]
    assert (found[1].error.code, found[1].error.param) == ("invalid_request_error", "prompt")
    assert read_all(tmp_path, bos_tokenizer, bodies)[1][0].prompt.tolist() == [495]


def test_c14_max_tokens_zero_is_a_prefill_and_odd_values_are_error_rows(tmp_path: Path, tokenizer: Tokenizer) -> None:
    found = read_all(tmp_path, tokenizer, [
        {"prompt": "hi", "max_tokens": 0}, {"prompt": "hi", "max_tokens": 0, "prompt_logprobs": 1},
        {"prompt": [5] * 64, "max_tokens": 0}, {"prompt": [5] * 65, "max_tokens": 0},
        *({"prompt": "hi", "max_tokens": odd} for odd in (-1, 2.5, "4"))])
    assert refused(found) == [False, False, False, True, True, True, True]
    assert found[0][0].sampling.max_tokens == 0
    assert found[1][0].sampling.prompt_logprobs == 1
    assert {one.error.param for one in found[4:]} == {"max_tokens"}


def test_c15_logit_bias_past_the_vocabulary_is_an_error_row(tmp_path: Path, tokenizer: Tokenizer) -> None:
    full = open_tokenizer(make_tokenizer(tmp_path / "tok"))
    full.known = lambda vocab: np.ones(vocab, bool)  # type: ignore[method-assign]
    biases = [{"512": 5}, {"-1": 5}, {"abc": 5}, {"511": 5}]
    found = read_all(tmp_path, full, [{"prompt": "hi", "logit_bias": bias} for bias in biases])
    assert refused(found) == [True, True, True, False]
    assert found[3][0].sampling.logit_bias == ((511, 5.0),)


def test_c16_huge_top_logprobs_is_an_error_row_and_huge_top_k_no_filter(tmp_path: Path, tokenizer: Tokenizer) -> None:
    found = read_all(tmp_path, tokenizer, [
        {"prompt": "hi", "logprobs": 1000000}, {"prompt": "hi", "top_k": 9999999}, {"prompt": "hi", "temperature": 0}])
    assert refused(found) == [True, False, False]
    assert found[1][0].sampling.top_k == 0
    assert found[2][0].sampling.temperature == 0


SCHEMAS = [
    {"type": "json_schema", "json_schema": {"name": "a", "schema": {"properties": "bar"}}},
    {"type": "json_schema", "json_schema": {"name": "b", "schema": {"type": "integer", "maximum": 20000000000}}},
    {"type": "json_object"},
]


def test_c17_constrained_answers_are_refused_whether_their_schema_is_faulty_or_not(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    bodies = [{"prompt": "hi", "response_format": schema} for schema in SCHEMAS]
    found = read_all(tmp_path, tokenizer, [*bodies, {"prompt": "hi", "guided_regex": "("}, {"prompt": "hi"}])
    assert refused(found) == [True] * 4 + [False]
    assert all(one.error.code == "invalid_request_error" and "not supported" in one.error.message for one in found[:4])


def test_c18_a_row_has_the_same_outcome_in_every_order(tmp_path: Path, tokenizer: Tokenizer) -> None:
    bodies = [{"prompt": "hi", "response_format": SCHEMAS[1]}, {"prompt": "hi", "response_format": SCHEMAS[0]},
              {"prompt": "hi", "seed": 1}]
    outcomes = set()
    for order in permutations(range(3)):
        found = read_all(tmp_path, tokenizer, [bodies[at] for at in order])
        by_body = {at: found[place] for place, at in enumerate(order)}
        outcomes.add(tuple(by_body[at].error.param if isinstance(by_body[at], RowRefused) else
                           by_body[at][0].sampling for at in range(3)))
    assert len(outcomes) == 1


def test_c80_nothing_shorter_than_its_prompts_is_dropped(tmp_path: Path, tokenizer: Tokenizer) -> None:
    found = read_all(tmp_path, tokenizer, [{"prompt": ["hi", "he", "ho"], "max_tokens": [4, 5]}])
    assert found[0].error.param == "max_tokens"
