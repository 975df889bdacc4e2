"""The whole program on models whose answers are known: text, stops, log-probabilities, penalties, faults, tight memory.

Two oracles: transformers in float32 for numbers, and a chain (see commands.py), a model that says a known token after
each token, for everything that hangs on a certain sequence of tokens.  The public faults of kinds K3, K4 and K9 that
need a running engine are held here.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import checkpoints
import numpy as np
import pytest
import torch
from commands import Ran, line, make_chain, run_commands
from tokenizers import Tokenizer
from tokenizers_for_tests import make_tokenizer

from bgmpi.io.results import open_results
from bgmpi.request import Answer, Finish

SMILE = "\U0001f600".encode()
#: tokens that only stand before others: the prompts of the chain
STOP_AT, EMOJI, ENDS, ADDED, NO_TEXT, FAULT, FLAT = 300, 310, 320, 350, 360, 370, 372
BAD, EVEN = 371, 374


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A chain with end-of-sequence ids 7 and 9 (generation_config), 7 (config) and 5 (tokenizer)."""
    folder = tmp_path_factory.mktemp("chain")
    make_tokenizer(folder, eos_id=5)
    vocab = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab()
    single = {byte: vocab[letter] for byte, letter in _letters().items()}
    ways = [
        [STOP_AT, vocab["AB"], vocab["CD"], vocab["EF"], 380],
        [EMOJI, *(single[byte] for byte in SMILE), single[ord("!")], single[ord("?")]],
        [ENDS, 7, 9, 5, 11, 330],
        [ADDED, vocab["th"], vocab["he"], 499, vocab["in"]],
        [NO_TEXT, 505],
        [FAULT, vocab["an"], vocab["er"], BAD, vocab["on"]],
        [FLAT, vocab["re"], EVEN],
    ]
    follows = {before: after for way in ways for before, after in pairwise(way)}
    make_chain(folder, follows, eos_token_id=7)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 9]}))
    return folder


def _letters() -> dict[int, str]:
    """Return the letter that byte-level tokenizers write for each byte."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {byte: chr(byte) for byte in plain} | {byte: chr(256 + at) for at, byte in enumerate(others)}


def answers(path: Path) -> dict[str, Answer]:
    """Return the first sample of every row by custom_id."""
    with open_results(path) as results:
        return {row.custom_id: row.samples[0] for row in results.rows()}


def run_rows(
    model: Path, folder: Path, rows: dict[str, dict[str, Any]], *more: str, name: str = "rows"
) -> list[str | Path]:
    """Write a request file of greedy rows and return the command that runs it."""
    path = folder / f"{name}.jsonl"
    path.write_text("".join(line(key, {"temperature": 0} | body) + "\n" for key, body in rows.items()))
    paths = ["--model", model, "-i", path, "-o", folder / f"{name}.h5"]
    return ["run", *paths, "--dtype", "float32", "--check", *more]


# --- stops and text ---------------------------------------------------------------------------------------------------

STOPS: dict[str, dict[str, Any]] = {
    "c20-cde": {"prompt": [STOP_AT], "max_tokens": 8, "stop": ["CDE"]},
    "c20-two": {"prompt": [STOP_AT], "max_tokens": 8, "stop": ["EF", "BCD"]},
    "c20-shown": {"prompt": [STOP_AT], "max_tokens": 8, "stop": ["CDE"], "include_stop_str_in_output": True},
    "c21": {"prompt": [STOP_AT], "max_tokens": 8, "stop_token_ids": ["EF"]},
    "c21-shown": {"prompt": [STOP_AT], "max_tokens": 8, "stop_token_ids": ["EF"], "include_stop_str_in_output": True},
    "c21-and-text": {"prompt": [STOP_AT], "max_tokens": 8, "stop_token_ids": ["EF"], "stop": ["none"]},
    "c22-whole": {"prompt": [EMOJI], "max_tokens": 4},
    "c22-cut": {"prompt": [EMOJI], "max_tokens": 2},
    "c22-cut-stop": {"prompt": [EMOJI], "max_tokens": 2, "stop": ["none"]},
    "c22-stop": {"prompt": [EMOJI], "max_tokens": 8, "stop": ["!"]},
    "c24-7": {"prompt": [ENDS], "max_tokens": 8},
    "c24-9": {"prompt": [7], "max_tokens": 8},
    "c24-5": {"prompt": [9], "max_tokens": 8},
    "c24-ignore": {"prompt": [ENDS], "max_tokens": 8, "ignore_eos": True, "stop_token_ids": [11]},
    "c24-only": {"prompt": [ENDS], "max_tokens": 8, "ignore_eos": True},
    "c81": {"prompt": [ADDED], "max_tokens": 8, "stop": ["<|end|>"]},
    "c81-none": {"prompt": [ADDED], "max_tokens": 4},
    "c23": {"prompt": [NO_TEXT], "max_tokens": 1},
    "bias": {"prompt": [STOP_AT], "max_tokens": 3, "logit_bias": {"40": 100}},
    "bias-eos": {"prompt": [STOP_AT], "max_tokens": 8, "logit_bias": {"9": 100}},
    "min": {"prompt": [STOP_AT], "max_tokens": 8, "min_tokens": 5, "logit_bias": {"9": 100}},
    "min-stop-id": {"prompt": [STOP_AT], "max_tokens": 8, "min_tokens": 3, "stop_token_ids": ["EF"]},
    "min-text": {"prompt": [STOP_AT], "max_tokens": 4, "min_tokens": 4, "stop": ["C"]},
    "echo": {"prompt": "hello ", "max_tokens": 1, "echo": True, "logit_bias": {"40": 100}},
}


@pytest.fixture(scope="module")
def stops(chain: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Answer]:
    folder = tmp_path_factory.mktemp("stops")
    vocab = Tokenizer.from_file(str(chain / "tokenizer.json")).get_vocab()
    rows = {
        key: body | {"stop_token_ids": [vocab.get(id, id) for id in body["stop_token_ids"]]}
        if "stop_token_ids" in body else body
        for key, body in STOPS.items()
    }  # fmt: skip
    (ran,) = run_commands(1, [run_rows(chain, folder, rows)], folder)
    assert ran.code == 0, ran.stderr
    return answers(folder / "rows.h5")


@pytest.mark.parametrize(
    ("row", "text", "tokens", "finish", "reason"),
    [
        ("c20-cde", "AB", 3, "STOP", "CDE"),
        ("c20-two", "A", 2, "STOP", "BCD"),
        ("c20-shown", "ABCDE", 3, "STOP", "CDE"),
        ("c21", "ABCD", 3, "STOP", "EF"),
        ("c21-shown", "ABCDEF", 3, "STOP", "EF"),
        ("c21-and-text", "ABCD", 3, "STOP", "EF"),
        ("c22-whole", "\U0001f600", 4, "LENGTH", None),
        ("c22-cut", "\ufffd", 2, "LENGTH", None),
        ("c22-cut-stop", "\ufffd", 2, "LENGTH", None),
        ("c22-stop", "\U0001f600", 5, "STOP", "!"),
        ("c24-7", "", 1, "STOP", None),
        ("c24-9", "", 1, "STOP", None),
        ("c24-5", "", 1, "STOP", None),
        ("c81", "thhe", 3, "STOP", "<|end|>"),
        ("c81-none", "thhein", 4, "LENGTH", None),
    ],
)
def test_stops_and_cuts_leave_clean_text_and_every_id(
    stops: dict[str, Answer], chain: Path, row: str, text: str, tokens: int, finish: str, reason: str | int | None
) -> None:
    if reason == "EF":
        reason = Tokenizer.from_file(str(chain / "tokenizer.json")).token_to_id("EF")
    answer = stops[row]
    assert (answer.text, len(answer.tokens), answer.finish.name) == (text, tokens, finish)
    assert answer.stop_reason == reason


def test_c22_the_ids_of_half_a_character_are_kept(stops: dict[str, Answer]) -> None:
    assert stops["c22-cut"].tokens.tolist() == stops["c22-whole"].tokens.tolist()[:2]


def test_c24_ends_are_a_union_and_ignoring_them_leaves_own_stop_ids(stops: dict[str, Answer]) -> None:
    assert [stops[f"c24-{end}"].tokens.tolist() for end in (7, 9, 5)] == [[7], [9], [5]]
    ignored = stops["c24-ignore"]
    assert (ignored.tokens.tolist(), ignored.finish, ignored.stop_reason) == ([7, 9, 5, 11], Finish.STOP, 11)
    assert stops["c24-only"].tokens.tolist()[:5] == [7, 9, 5, 11, 330] and stops["c24-only"].finish is Finish.LENGTH


def test_c23_the_likeliest_id_without_a_text_is_not_taken(stops: dict[str, Answer]) -> None:
    assert stops["c23"].tokens[0] < 500


def test_a_bias_forces_and_min_tokens_holds_back_every_kind_of_end(stops: dict[str, Answer]) -> None:
    assert stops["bias"].tokens.tolist() == [40, 40, 40]
    assert stops["bias-eos"].tokens.tolist() == [9]
    held = stops["min"].tokens.tolist()
    assert len(held) == 6 and held[-1] == 9 and not {5, 7, 9} & set(held[:5])
    assert len(stops["min-stop-id"].tokens) > 3
    assert (stops["min-text"].finish, len(stops["min-text"].tokens)) == (Finish.LENGTH, 4)


def test_an_echo_is_the_prompt_and_then_the_answer(stops: dict[str, Answer]) -> None:
    assert stops["echo"].text.startswith("hello ") and len(stops["echo"].text) == len("hello ") + 1
    assert stops["echo"].prompt_logprobs is None


# --- numbers ----------------------------------------------------------------------------------------------------------

PROMPT = [(11 * at) % 470 + 20 for at in range(50)]
SHORT = PROMPT[:9]
CONTEXT = 256
BIAS = {"40": 5, "41": 4}  # two favourites, so that penalties have something to push down


@dataclass(frozen=True)
class Numbers:
    """A random llama, its reference, and what one launch computed on it."""

    model: Any
    folder: Path
    ran: list[Ran]

    def logits(self, tokens: list[int]) -> torch.Tensor:
        with torch.no_grad():
            rows: torch.Tensor = self.model(torch.tensor([tokens])).logits[0]
        return rows

    def expected(self, tokens: list[int]) -> np.ndarray[Any, Any]:
        """Return log-probabilities of the token after each of `tokens`, [tokens, vocab]."""
        return torch.log_softmax(self.logits(tokens), -1).numpy()


@pytest.fixture(scope="module")
def numbers(tmp_path_factory: pytest.TempPathFactory) -> Numbers:
    root = tmp_path_factory.mktemp("numbers")
    folder = make_tokenizer(checkpoints.make("llama", root / "model", seed=2))
    scored: dict[str, dict[str, Any]] = {
        "echo": {"prompt": PROMPT, "max_tokens": 3, "echo": True, "logprobs": 1, "ignore_eos": True},
        "prompt": {"prompt": PROMPT, "max_tokens": 1, "prompt_logprobs": 4},
        "none": {"prompt": PROMPT, "max_tokens": 0, "echo": True, "logprobs": 2},
        "answer": {"prompt": SHORT, "max_tokens": 20, "logprobs": 5, "ignore_eos": True},
    }
    rows: dict[str, dict[str, Any]] = scored | {
        "uncapped": {"prompt": SHORT, "ignore_eos": True},
        "beyond": {"prompt": SHORT, "ignore_eos": True, "max_tokens": 1000},
        "repetition": {"prompt": SHORT, "max_tokens": 24, "ignore_eos": True, "repetition_penalty": 1.7,
                       "logit_bias": BIAS},
        "penalties": {"prompt": SHORT, "max_tokens": 24, "ignore_eos": True, "presence_penalty": 1.5,
                      "frequency_penalty": 0.8, "logit_bias": BIAS},
        "n": {"prompt": SHORT, "max_tokens": 6, "ignore_eos": True, "n": 3, "temperature": 1.5, "seed": 9},
        "n-again": {"prompt": SHORT, "max_tokens": 6, "ignore_eos": True, "n": 3, "temperature": 1.5, "seed": 9},
        "lists": {"prompt": [SHORT, PROMPT, [3]], "max_tokens": 4, "ignore_eos": True, "n": 2},
        "texts": {"prompt": ["hello", "the "], "max_tokens": 4, "ignore_eos": True},
        "solo-0": {"prompt": SHORT, "max_tokens": 4, "ignore_eos": True},
        "solo-1": {"prompt": PROMPT, "max_tokens": 4, "ignore_eos": True},
        "solo-2": {"prompt": [3], "max_tokens": 4, "ignore_eos": True},
        "solo-text": {"prompt": "the ", "max_tokens": 4, "ignore_eos": True},
    }  # fmt: skip
    commands: list[list[str | Path]] = [
        run_rows(folder, root, rows, "--max-model-len", str(CONTEXT)),
        run_rows(folder, root, scored, "--max-num-seqs", "8", "--max-num-batched-tokens", "16", name="chunks"),
        ["export", root / "rows.h5", "-o", root / "rows.jsonl", "--tokenizer", folder],
    ]
    ran = run_commands(1, commands, root)
    assert [one.code for one in ran] == [0, 0, 0], ran
    return Numbers(checkpoints.reference(folder), root, ran)


def test_log_probabilities_equal_the_reference(numbers: Numbers) -> None:
    answer = answers(numbers.folder / "rows.h5")["answer"]
    tokens = answer.tokens.tolist()
    expected = numbers.expected(SHORT + tokens)[len(SHORT) - 1 : -1]
    assert answer.logprobs is not None and len(tokens) == 20
    np.testing.assert_allclose(answer.logprobs.chosen, expected[range(20), tokens], atol=1e-4)
    drawable = expected[:, :500]  # the tokenizer has no more ids
    best = np.sort(drawable, axis=1)[:, ::-1][:, :5]
    np.testing.assert_allclose(answer.logprobs.top, best, atol=1e-4)
    np.testing.assert_allclose(
        np.take_along_axis(drawable, answer.logprobs.top_ids.astype(np.int64), 1), best, atol=1e-4
    )


@pytest.mark.parametrize("name", ["rows", "chunks"])
@pytest.mark.parametrize("row", ["echo", "prompt", "none"])
def test_c31_prompt_log_probabilities_equal_the_reference_in_one_chunk_and_in_many(
    numbers: Numbers, name: str, row: str
) -> None:
    answer = answers(numbers.folder / f"{name}.h5")[row]
    scored = answer.prompt_logprobs
    assert scored is not None and len(scored.chosen) == 50
    assert np.isnan(scored.chosen[0]) and (scored.top_ids[0] == -1).all()
    expected = numbers.expected(PROMPT)[:-1]
    np.testing.assert_allclose(scored.chosen[1:], expected[range(49), PROMPT[1:]], atol=1e-4)
    best = np.sort(expected[:, :500], axis=1)[:, ::-1][:, : scored.top.shape[1]]
    np.testing.assert_allclose(scored.top[1:], best, atol=1e-4)


def test_c31_exported_echo_has_an_entry_for_every_token_and_null_for_the_first(numbers: Numbers) -> None:
    lines = [json.loads(one) for one in (numbers.folder / "rows.jsonl").read_text().splitlines()]
    bodies = {one["custom_id"]: one["response"]["body"] for one in lines}
    echoed = bodies["echo"]["choices"][0]["logprobs"]
    assert len(echoed["tokens"]) == 53 and echoed["token_logprobs"][0] is None and echoed["top_logprobs"][0] is None
    assert all(isinstance(one, float) for one in echoed["token_logprobs"][1:])
    assert bodies["none"]["usage"]["completion_tokens"] == 0
    assert bodies["none"]["choices"][0]["finish_reason"] == "length"


def test_c34_the_only_hidden_cap_is_the_context_and_it_is_counted(numbers: Numbers) -> None:
    found = answers(numbers.folder / "rows.h5")
    for row, hidden in (("uncapped", True), ("beyond", False)):
        assert (len(found[row].tokens), found[row].finish) == (CONTEXT - len(SHORT), Finish.LENGTH)
        assert found[row].default_cap is hidden
    assert "1 samples ended at a length that their request did not set" in numbers.ran[0].stdout


def test_penalties_equal_the_reference(numbers: Numbers) -> None:
    from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

    found = answers(numbers.folder / "rows.h5")
    repeated = RepetitionPenaltyLogitsProcessor(1.7)

    def repetition(tokens: list[int], scores: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = repeated(torch.tensor([tokens]), scores[None])[0]
        return result

    def presence_and_frequency(tokens: list[int], scores: torch.Tensor) -> torch.Tensor:
        counts = torch.bincount(torch.tensor(tokens[len(SHORT) :], dtype=torch.int64), minlength=len(scores))
        return scores - 1.5 * (counts > 0) - 0.8 * counts

    for row, penalise in (("repetition", repetition), ("penalties", presence_and_frequency)):
        tokens = list(SHORT)
        for _ in range(24):
            scores = penalise(tokens, numbers.logits(tokens)[-1])
            for token, value in BIAS.items():
                scores[int(token)] += value
            tokens.append(int(scores[:500].argmax()))
        assert found[row].tokens.tolist() == tokens[len(SHORT) :], row
    assert found["penalties"].tokens.tolist() != found["repetition"].tokens.tolist()


def test_samples_of_a_row_differ_and_come_again(numbers: Numbers) -> None:
    with open_results(numbers.folder / "rows.h5") as results:
        rows = {row.custom_id: row for row in results.rows()}
    first, again = ([answer.tokens.tolist() for answer in rows[name].samples] for name in ("n", "n-again"))
    assert first == again
    assert len({tuple(tokens) for tokens in first}) == 3


def test_a_list_of_prompts_has_n_choices_for_each_in_order(numbers: Numbers) -> None:
    with open_results(numbers.folder / "rows.h5") as results:
        rows = {row.custom_id: row for row in results.rows()}
    solo = [rows[f"solo-{at}"].samples[0].tokens.tolist() for at in range(3)]
    got = rows["lists"]
    assert [answer.tokens.tolist() for answer in got.samples] == [one for one in solo for _ in range(2)]
    assert [answer.sample for answer in got.samples] == list(range(6))
    assert rows["texts"].samples[1].tokens.tolist() == rows["solo-text"].samples[0].tokens.tolist()
    lines = [json.loads(one) for one in (numbers.folder / "rows.jsonl").read_text().splitlines()]
    body = next(one for one in lines if one["custom_id"] == "lists")["response"]["body"]
    assert [choice["index"] for choice in body["choices"]] == list(range(6))
    assert body["usage"] == {"prompt_tokens": 60, "completion_tokens": 24, "total_tokens": 84}


# --- faults and tight memory ------------------------------------------------------------------------------------------

_BAD_LOGITS = f"""
import torch
from bgmpi.model import Model
from contextlib import contextmanager
whole = Model.head
@contextmanager
def faulty(self):
    with whole(self) as logits:
        def some_bad(hidden):
            rows = logits(hidden)
            at = rows.argmax(1)
            rows[at == {BAD}] = torch.nan
            rows[at == {EVEN}] = 0.0
            return rows
        yield some_bad
Model.head = faulty
"""


@pytest.mark.mpi(2)
def test_c82_bad_logits_end_their_own_row_with_the_tokens_before(chain: Path, tmp_path: Path) -> None:
    usual = {"max_tokens": 5, "ignore_eos": True}
    rows: dict[str, dict[str, Any]] = {f"good-{at}": {"prompt": [400 + 3 * at]} | usual for at in range(4)}
    rows |= {"bad": {"prompt": [FAULT]} | usual, "even": {"prompt": [FLAT]} | usual}
    rows |= {"bad-stop": {"prompt": [FAULT], "stop": ["no"], "logprobs": 2} | usual}
    rows |= {"bad-sampled": {"prompt": [FAULT], "temperature": 0.5, "n": 2} | usual}
    (tmp_path / "limited").mkdir()
    limited = run_rows(chain, tmp_path / "limited", rows, "--max-errors", "2")
    ran, stopped = run_commands(2, [run_rows(chain, tmp_path, rows), limited], tmp_path, before=_BAD_LOGITS)
    assert ran.code == 3, ran.stderr
    assert stopped.code == 70 and "3 of 8 rows have failed, 3 of them while they were computed" in stopped.stderr
    assert not (tmp_path / "limited" / "rows.h5").exists()
    assert "3 failed" in ran.stdout and "numeric_fault" in ran.stdout
    with open_results(tmp_path / "rows.h5") as results:
        found = {row.custom_id: row for row in results.rows()}
    for at in range(4):
        start = 400 + 3 * at
        assert found[f"good-{at}"].samples[0].tokens.tolist() == list(range(start + 1, start + 6))
    for name in ("bad", "bad-stop", "bad-sampled"):
        error = found[name].error
        assert error is not None and error.code == "numeric_fault" and "finite" in error.message
        assert all(len(answer.tokens) == 2 and answer.text == "aner" for answer in found[name].samples)
        assert all(answer.finish is Finish.ERROR for answer in found[name].samples)
    even = found["even"]
    assert even.error is None and len(even.samples[0].tokens) == 5


#: what survives a yield only when it is kept or rebuilt: logs, penalties, streams, and where a draw stands
KEPT: list[dict[str, Any]] = [
    {},
    {"temperature": 0.9, "seed": 6},
    {"echo": True, "logprobs": 2},
    {"temperature": 0.9, "seed": 7, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    {"stop": ["never said"], "logit_bias": {"40": 3}},
    {"min_tokens": 150},
    {"prompt_logprobs": 1, "temperature": 1.3, "seed": 8, "top_k": 50},
    {"logprobs": 0, "stop_token_ids": [499]},
]


@pytest.mark.mpi(2)
def test_c60_a_pool_for_three_of_eight_sequences_gives_the_same_answers_and_says_what_it_cost(tmp_path: Path) -> None:
    """On each of two ranks, with and without experts that keep them in lockstep."""
    token = 2 * 2 * 8 * 4 * 2  # bytes of KV: key and value, heads, width, float32, layers
    pool = 3 * 14 * 16  # three sequences of 210 tokens in pages of 16
    usual = {"max_tokens": 200, "ignore_eos": True}
    rows: dict[str, dict[str, Any]] = {
        f"r{at}": {"prompt": PROMPT[at % 8 : at % 8 + 10]} | usual | KEPT[at % 8] for at in range(16)
    }
    giant: dict[str, dict[str, Any]] = {"giant": {"prompt": PROMPT, "max_tokens": 1000, "ignore_eos": True}}
    small = ["--host-kv-memory", str(2 * pool * token), "--page-tokens", "16"]
    commands = []
    for family in ("llama", "mixtral"):
        model = make_tokenizer(checkpoints.make(family, tmp_path / family, max_position_embeddings=2048))
        commands.append(run_rows(model, tmp_path, rows, name=f"{family}-roomy"))
        commands.append(run_rows(model, tmp_path, rows | giant, *small, name=f"{family}-tight"))
    ran = run_commands(2, commands, tmp_path)
    assert [one.code for one in ran] == [0, 3, 0, 3], ran
    for at, family in enumerate(("llama", "mixtral")):
        roomy, tight = ran[2 * at : 2 * at + 2]
        assert "preemptions" in tight.stdout and "computed twice" in tight.stdout, tight.stdout
        assert "computed twice" not in roomy.stdout
        got = answers(tmp_path / f"{family}-tight.h5")
        error = got.pop("giant").error
        assert error is not None and error.code == "insufficient_kv_memory"
        assert "1050" in error.message and str(pool) in error.message
        assert_same(got, answers(tmp_path / f"{family}-roomy.h5"))


def assert_same(got: dict[str, Answer], expected: dict[str, Answer]) -> None:
    assert list(got) == list(expected)
    for name, one in expected.items():
        assert got[name].tokens.tolist() == one.tokens.tolist(), name
        assert got[name].text == one.text
        for kept, whole in ((got[name].logprobs, one.logprobs), (got[name].prompt_logprobs, one.prompt_logprobs)):
            assert (kept is None) == (whole is None)
            if kept is not None and whole is not None:
                np.testing.assert_allclose(kept.chosen, whole.chosen, atol=1e-4)
                np.testing.assert_allclose(kept.top, whole.top, atol=1e-4)
