"""Laws of transcripts: a sequence that moves to another rank, at whatever token, answers exactly as one that stayed."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers_for_tests import make_sentencepiece_tokenizer, make_tokenizer

from bgmpi.errors import InternalError
from bgmpi.io.tokenizer import open_tokenizer
from bgmpi.request import Answer, Finish, Request, Sampling
from bgmpi.transcript import TranscriptParcel, close_transcript, open_transcript, pack, unpack
from bgmpi.world import decode, encode

PROMPT = np.array([84, 72, 69, 495, 67], np.int32)


@pytest.fixture(scope="module")
def bytewise(tmp_path_factory):
    return open_tokenizer(make_tokenizer(tmp_path_factory.mktemp("bytes")))


@pytest.fixture(scope="module")
def pieces(tmp_path_factory):
    return open_tokenizer(make_sentencepiece_tokenizer(tmp_path_factory.mktemp("pieces")))


def request(**asks) -> Request:
    return Request(7, "r7", "/v1/completions", PROMPT, 3, Sampling(seed=2**64 - 1, **asks))


def moved(transcript, tokenizer, generated):
    """Let a transcript cross ranks, as bytes."""
    parcel = decode(encode(pack(transcript)), TranscriptParcel)
    return unpack(parcel, tokenizer, np.array(generated, np.int32))


def live(asks: Request, tokenizer, tokens: list[int], moves: set[int], *, ended_by_token: bool = False) -> Answer:
    """Live through `tokens` as a rank would, moving before token i for each i in `moves`, until a stop text comes."""
    sampling, draw = asks.sampling, np.random.default_rng(1)
    transcript, said, finish, prompt = open_transcript(asks, 2, 0.25, tokenizer), [], Finish.LENGTH, 0
    for index, token in enumerate(tokens):
        if index in moves:
            transcript = moved(transcript, tokenizer, said)
        if transcript.prompt_logprobs is not None and prompt < len(PROMPT) - 1:
            prompt += 1
            transcript.prompt_logprobs.add(*_probabilities(draw, sampling.prompt_logprobs))
        if transcript.logprobs is not None:
            transcript.logprobs.add(*_probabilities(draw, sampling.logprobs + 2))
        if not said:
            transcript.first_token_s = 0.5
        said.append(token)
        last = ended_by_token and index == len(tokens) - 1
        if last:
            finish, transcript.stop_reason = Finish.STOP, token
        if transcript.stream is not None and (not last or sampling.include_stop):
            reason = transcript.stream.push(token)
            if reason is not None:
                finish, transcript.stop_reason = Finish.STOP, reason
                break
    return close_transcript(transcript, np.array(said, np.int32), finish, ended_by_token, 9.0, tokenizer)


def _probabilities(draw, width):
    return (draw.normal(size=1).astype(np.float32), draw.integers(0, 500, (1, width)).astype(np.int32),
            draw.normal(size=(1, width)).astype(np.float32))


def same(one: Answer, other: Answer) -> None:
    for field in fields(Answer):
        a, b = getattr(one, field.name), getattr(other, field.name)
        if hasattr(a, "chosen"):
            assert [(x.dtype, x.shape, x.tobytes()) for x in (a.chosen, a.top_ids, a.top)] == [
                (x.dtype, x.shape, x.tobytes()) for x in (b.chosen, b.top_ids, b.top)], field.name
        else:
            np.testing.assert_equal(b, a, field.name)


def everywhere(asks: Request, tokenizer, tokens: list[int], **how) -> Answer:
    """Return the answer of who stayed, having held it against moves before each token, and before all of them."""
    stayed = live(asks, tokenizer, tokens, set(), **how)
    for moves in (*({index} for index in range(len(tokens))), set(range(len(tokens)))):
        same(stayed, live(asks, tokenizer, tokens, moves, **how))
    return stayed


ASKS = {
    "plain": {},
    "a stop text over the move": {"stop": ("brown", "zzz")},
    "shown": {"stop": ("brown",), "include_stop": True},
    "not before so many tokens": {"stop": ("quick", "over"), "min_tokens": 8},
    "an added token as text": {"stop": ("<|end|>",), "skip_special_tokens": False},
    "echo": {"echo": True, "stop": ("dog",)},
    "log-probabilities": {"logprobs": 3, "prompt_logprobs": 2, "stop": ("fox",)},
    "log-probabilities of none but the chosen": {"logprobs": 0, "prompt_logprobs": 0},
    "a cap of its own": {"max_tokens": 40},
}


@pytest.mark.parametrize("name", ASKS)
def test_who_moves_before_any_token_answers_as_who_stayed(bytewise, name):
    tokens = bytewise.encode("the quick brown fox jumps over the dog \u00fc \U0001f600").tolist()
    tokens.insert(3, bytewise.added["<|user|>"])
    tokens.insert(9, bytewise.added["<|end|>"])
    everywhere(request(**ASKS[name]), bytewise, tokens)


def test_the_stop_text_of_a_moved_sequence_ends_it_where_it_lies(bytewise):
    tokens = bytewise.encode("a quick brown fox").tolist()
    assert everywhere(request(stop=("k bro",)), bytewise, tokens).text == "a quic"
    shown = everywhere(request(stop=("k bro",), include_stop=True), bytewise, tokens)
    assert (shown.text, shown.stop_reason, shown.finish) == ("a quick bro", "k bro", Finish.STOP)


@pytest.mark.parametrize("include_stop", [False, True])
def test_a_stop_token_after_a_move_is_shown_only_where_asked(bytewise, include_stop):
    tokens = [*bytewise.encode("well then").tolist(), bytewise.added["<|end|>"]]
    asks = request(stop=("zzz",), stop_token_ids=(tokens[-1],), include_stop=include_stop, skip_special_tokens=False)
    answer = everywhere(asks, bytewise, tokens, ended_by_token=True)
    assert answer.text == "well then" + ("<|end|>" if include_stop else "")
    assert answer.stop_reason == tokens[-1]


def test_half_a_character_and_the_first_space_survive_a_move(bytewise, pieces):
    emoji = bytewise.encode("\U0001f600\u00e9").tolist()
    assert everywhere(request(stop=("zzz",)), bytewise, emoji).text == "\U0001f600\u00e9"
    words = pieces.encode("the an then on").tolist()
    assert everywhere(request(stop=("zzz",)), pieces, words).text == "the an then on"


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 499), min_size=1, max_size=24), st.sets(st.integers(0, 23)),
       st.lists(st.text("abth er", min_size=1, max_size=3), min_size=1, max_size=3), st.booleans(), st.booleans())
def test_whatever_is_said_and_wherever_it_moves_the_answer_is_the_same(bytewise, tokens, moves, stop, shown, skip):
    asks = request(stop=tuple(stop), include_stop=shown, skip_special_tokens=skip, logprobs=1)
    same(live(asks, bytewise, tokens, set()), live(asks, bytewise, tokens, moves))


def test_who_moves_before_its_first_token_has_not_been_greeted(bytewise):
    transcript = moved(open_transcript(request(logprobs=2, prompt_logprobs=1), 1, 0.5, bytewise), bytewise, [])
    assert np.isnan(transcript.first_token_s) and transcript.default_cap and transcript.sample == 1
    assert transcript.logprobs.count == 0 and transcript.prompt_logprobs.count == 1
    assert transcript.request.prompt.dtype == np.int32 and transcript.request.sampling == request(
        logprobs=2, prompt_logprobs=1).sampling


def test_packing_leaves_the_transcript_of_the_source_as_it_was(bytewise):
    """A copy that fails or is called off must leave the source intact."""
    tokens = bytewise.encode("the quick").tolist()
    transcript = open_transcript(request(stop=("zzz",), logprobs=1), 0, 0.0, bytewise)
    for token in tokens:
        transcript.stream.push(token)
        transcript.logprobs.add(*_probabilities(np.random.default_rng(token), 1))
    before = (transcript.stream.text, transcript.logprobs.count)
    pack(transcript)
    assert (transcript.stream.text, transcript.logprobs.count) == before == ("the quick", len(tokens))


def test_a_sequence_that_has_ended_has_no_business_to_move(bytewise):
    tokens = bytewise.encode("the quick").tolist()
    with pytest.raises(InternalError, match="row 7, sample 0 moved"):
        moved(open_transcript(request(stop=("e q",)), 0, 0.0, bytewise), bytewise, tokens)
