"""Drawing tokens: each filter against Hugging Face's, the independence of rows, stops, edits and log-probabilities."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from bgmpi.errors import InternalError
from bgmpi.request import Sampling
from bgmpi.sampling import Drawn, Sampler

NONE = np.zeros(0, np.int32)
PROMPT = np.array([1, 2, 3], np.int32)
GREEDY = Sampling(seed=1, temperature=0.0)


def sampler_of(
    wishes: list[Sampling], vocab: int, *, tokenizer_vocab: int | None = None, eos: tuple[int, ...] = ()
) -> Sampler:
    sampler = Sampler(len(wishes), vocab, vocab if tokenizer_vocab is None else tokenizer_vocab, eos, "cpu")
    for slot, wish in enumerate(wishes):
        sampler.place(slot, wish, 0, PROMPT, NONE)
    return sampler


def draw(sampler: Sampler, logits: torch.Tensor, slots: Any = None, position: int = 0) -> Drawn:
    chosen = np.arange(len(logits)) if slots is None else np.asarray(slots)
    return sampler.draw(logits.clone(), chosen, np.full(len(chosen), position))


def many_draws(wish: Sampling, row: torch.Tensor, count: int) -> NDArray[np.int32]:
    """Draw one token for each of `count` samples of one row of logits [V]."""
    sampler = Sampler(count, len(row), len(row), (), "cpu")
    for slot in range(count):
        sampler.place(slot, wish, slot, PROMPT, NONE)
    return draw(sampler, row.expand(count, -1)).tokens


def assert_follows(tokens: NDArray[np.int32], expected: NDArray[np.float64]) -> None:
    """Fail if an impossible token was drawn or the chi-square statistic is beyond about its 99.9 % quantile."""
    found = np.bincount(tokens, minlength=len(expected))
    assert found[expected == 0].sum() == 0
    wanted = expected * len(tokens)
    common = wanted >= 5
    found = np.append(found[common], found[~common].sum())
    wanted = np.append(wanted[common], wanted[~common].sum())
    found, wanted = found[wanted > 0], wanted[wanted > 0]
    freedom = max(len(wanted) - 1, 1)
    statistic = float(((found - wanted) ** 2 / wanted).sum())
    bound = freedom * (1 - 2 / (9 * freedom) + 3.09 * np.sqrt(2 / (9 * freedom))) ** 3
    assert statistic < bound, f"chi-square {statistic:.1f} with {freedom} degrees of freedom, bound {bound:.1f}"


# --- which token --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", [1, 5, 63, 64, 65, 509, 4096])
def test_greedy_takes_the_largest_and_of_equals_the_lowest_id(vocab: int) -> None:
    logits = torch.randint(0, 5, (50, vocab), generator=torch.Generator().manual_seed(vocab)).float()
    tokens = draw(sampler_of([GREEDY] * 50, vocab), logits).tokens
    assert np.array_equal(tokens, logits.numpy().argmax(1))


@pytest.mark.parametrize(
    ("wish", "warpers"),
    [
        ({}, []),
        ({"temperature": 0.6}, [TemperatureLogitsWarper(0.6)]),
        ({"temperature": 3.0}, [TemperatureLogitsWarper(3.0)]),
        ({"top_k": 7}, [TopKLogitsWarper(7)]),
        ({"top_p": 0.7}, [TopPLogitsWarper(0.7)]),
        ({"top_p": 0.999}, [TopPLogitsWarper(0.999)]),
        ({"top_k": 9, "top_p": 0.6}, [TopKLogitsWarper(9), TopPLogitsWarper(0.6)]),
        ({"top_k": 300, "top_p": 0.6}, [TopKLogitsWarper(300), TopPLogitsWarper(0.6)]),
        ({"min_p": 0.1}, [MinPLogitsWarper(0.1)]),
        ({"min_p": 0.01, "top_k": 12, "top_p": 0.9},
         [MinPLogitsWarper(0.01), TopKLogitsWarper(12), TopPLogitsWarper(0.9)]),
        ({"min_p": 0.02, "top_p": 0.8, "temperature": 1.3},
         [TemperatureLogitsWarper(1.3), MinPLogitsWarper(0.02), TopPLogitsWarper(0.8)]),
    ],
)  # fmt: skip
def test_tokens_follow_the_distribution_that_hugging_face_filters(wish: dict[str, Any], warpers: list[Any]) -> None:
    row = torch.randn(700, generator=torch.Generator().manual_seed(3)) * 2
    scores = row[None]
    for warper in warpers:
        scores = warper(None, scores)
    expected = scores.double().softmax(-1)[0].numpy()
    assert_follows(many_draws(Sampling(seed=11, **wish), row, 2500), expected)


def test_top_k_keeps_exactly_k_of_equal_scores_the_lowest_ids() -> None:
    row = torch.full((300,), -5.0)
    row[[7, 70, 150, 151, 299]] = 2.0
    assert set(many_draws(Sampling(seed=2, top_k=3), row, 200).tolist()) == {7, 70, 150}
    assert set(many_draws(Sampling(seed=2, top_k=1), row, 50).tolist()) == {7}


def test_top_p_keeps_the_token_that_crosses_the_share() -> None:
    row = torch.tensor([0.5, 0.3, 0.2]).log()
    assert set(many_draws(Sampling(seed=5, top_p=0.4), row, 200).tolist()) == {0}
    assert set(many_draws(Sampling(seed=5, top_p=0.6), row, 200).tolist()) == {0, 1}
    assert set(many_draws(Sampling(seed=5, top_p=1e-9), row, 20).tolist()) == {0}
    assert set(many_draws(Sampling(seed=5, top_p=0.5), torch.zeros(4), 200).tolist()) == {0, 1}


def test_top_p_reaches_into_a_flat_tail() -> None:
    row = torch.cat((torch.tensor([0.5]), torch.full((63,), 0.5 / 63))).log()
    assert set(many_draws(Sampling(seed=5, top_p=0.505), row, 1500).tolist()) == {0, 1}


def test_all_equal_logits_draw_every_token_alike() -> None:
    for wish in (Sampling(seed=3), Sampling(seed=3, top_p=0.9999999), Sampling(seed=3, min_p=1.0)):
        assert_follows(many_draws(wish, torch.zeros(130), 4000), np.full(130, 1 / 130))


# --- independence -------------------------------------------------------------------------------------------------


def mixed_wishes(count: int) -> list[Sampling]:
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {},
        {"temperature": 0.7, "top_k": 20, "top_p": 0.8},
        {"top_p": 0.95},
        {"top_p": 0.9, "logprobs": 4},
        {"temperature": 2.0, "min_p": 0.02},
        {"repetition_penalty": 1.3, "frequency_penalty": 0.3, "logit_bias": ((5, 4.0),)},
        {"temperature": 0.0, "presence_penalty": 0.5, "min_tokens": 3, "logprobs": 0},
        {"top_k": 3000},
    ]
    return [Sampling(seed=100 + i, **kinds[i % len(kinds)]) for i in range(count)]


def bits_of(drawn: Drawn, i: int, k: int) -> tuple[Any, ...]:
    chosen = b"" if drawn.chosen is None else drawn.chosen[i].tobytes()
    top = b"" if drawn.top is None else drawn.top[i, :k].tobytes()
    return int(drawn.tokens[i]), bool(drawn.stopped[i]), chosen, top


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("vocab", [509, 32_000])
def test_a_row_gives_the_same_bits_alone_and_in_any_batch(vocab: int, threads: int) -> None:
    wishes = mixed_wishes(36)
    logits = torch.randn(36, vocab, generator=torch.Generator().manual_seed(1)) * 3
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        whole = draw(sampler_of(wishes, vocab), logits)
        order = np.random.default_rng(4).permutation(36)
        shuffled = draw(sampler_of(wishes, vocab), logits[order], order)
        for place, row in enumerate(order):
            assert bits_of(shuffled, place, 4) == bits_of(whole, int(row), 4)
        for row, wish in enumerate(wishes):
            alone = draw(sampler_of([wish], vocab), logits[row : row + 1])
            assert alone.tokens[0] == whole.tokens[row]
            if wish.logprobs is not None:
                assert bits_of(alone, 0, wish.logprobs) == bits_of(whole, row, wish.logprobs)
    finally:
        torch.set_num_threads(before)


def test_samples_and_positions_of_one_row_draw_different_tokens() -> None:
    row = torch.zeros(10_000)
    assert len(set(many_draws(Sampling(seed=8), row, 50).tolist())) > 45
    sampler = sampler_of([Sampling(seed=8)], 10_000)
    over_time = [int(draw(sampler, row[None], position=p).tokens[0]) for p in range(50)]
    assert len(set(over_time)) > 45


def test_a_sequence_that_comes_back_draws_what_it_would_have_drawn() -> None:
    wish = Sampling(seed=4, repetition_penalty=1.4, frequency_penalty=0.7, presence_penalty=0.2, top_p=0.9)
    logits = torch.randn(12, 200, generator=torch.Generator().manual_seed(2)) * 2
    stayed = sampler_of([wish], 200)
    expected = [int(draw(stayed, logits[p : p + 1], position=p).tokens[0]) for p in range(12)]
    for gone in (1, 5, 11):
        back = Sampler(3, 200, 200, (), "cpu")
        back.place(2, wish, 0, PROMPT, np.array(expected[:gone], np.int32))
        assert [int(draw(back, logits[p : p + 1], [2], p).tokens[0]) for p in range(gone, 12)] == expected[gone:]


def test_a_cleared_slot_leaves_nothing_to_the_next_sequence() -> None:
    rich = Sampling(
        seed=-1, repetition_penalty=2.0, logit_bias=((3, 100.0),), min_tokens=9, stop_token_ids=(4,), ignore_eos=True,
        logprobs=3, top_k=5, min_p=0.1,
    )  # fmt: skip
    logits = torch.randn(1, 100, generator=torch.Generator().manual_seed(6))
    logits[0, 4] = 50.0
    used = sampler_of([rich], 100, eos=(4,))
    draw(used, logits)
    used.clear(0)
    used.clear(0)
    for plain in (GREEDY, Sampling(seed=3)):
        used.place(0, plain, 0, PROMPT, NONE)
        ours, fresh = draw(used, logits), draw(sampler_of([plain], 100, eos=(4,)), logits)
        assert bits_of(ours, 0, 0) == bits_of(fresh, 0, 0)
        assert ours.tokens[0] == 4 and ours.stopped[0] and ours.chosen is None
        used.clear(0)


# --- edits --------------------------------------------------------------------------------------------------------


def test_repetition_penalty_is_that_of_hugging_face() -> None:
    logits = torch.randn(40, 90, generator=torch.Generator().manual_seed(5)) * 2
    sampler = Sampler(1, 90, 90, (), "cpu")
    sampler.place(0, Sampling(seed=0, temperature=0.0, repetition_penalty=1.7), 0, PROMPT, NONE)
    past = PROMPT.tolist()
    for position in range(40):
        row = logits[position : position + 1]
        expected = int(RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([past]), row.clone()).argmax())
        assert int(draw(sampler, row, position=position).tokens[0]) == expected
        past.append(expected)


def test_frequency_and_presence_count_generated_tokens_only() -> None:
    row = torch.tensor([[0.0, 9.0, 8.9, 8.0]])
    wish = Sampling(seed=0, temperature=0.0, frequency_penalty=0.25, presence_penalty=0.3)
    sampler = Sampler(1, 4, 4, (), "cpu")
    sampler.place(0, wish, 0, np.array([1, 1, 1], np.int32), NONE)
    tokens = [int(draw(sampler, row, position=p).tokens[0]) for p in range(7)]
    # Scores of 1 and 2 after each: 9.0 8.9 | 8.45 8.9 | 8.45 8.35 | 8.2 8.35 | 8.2 8.1 | 7.95 8.1 | then 3 has 8.0
    assert tokens == [1, 2, 1, 2, 1, 2, 3]


def test_a_bias_can_force_and_forbid() -> None:
    logits = torch.zeros(3, 70)
    logits[:, 5] = 1.0
    wishes = [
        Sampling(seed=0, logit_bias=((69, 100.0), (3, -100.0))),
        Sampling(seed=0, temperature=0.0, logit_bias=((5, -100.0), (5, 0.0))),
        GREEDY,
    ]
    assert draw(sampler_of(wishes, 70), logits).tokens.tolist() == [69, 0, 5]


def test_ends_wait_for_min_tokens() -> None:
    logits = torch.zeros(1, 20)
    logits[0, [6, 7, 8]] = torch.tensor([3.0, 5.0, 4.0])
    sampler = sampler_of([replace(GREEDY, min_tokens=2, stop_token_ids=(8,))], 20, eos=(7,))
    drawn = [draw(sampler, logits, position=p) for p in range(3)]
    assert [int(d.tokens[0]) for d in drawn] == [6, 6, 7]
    assert [bool(d.stopped[0]) for d in drawn] == [False, False, True]


def test_an_id_without_a_text_is_never_drawn() -> None:
    logits = torch.zeros(2, 512)
    logits[:, 500:] = 90.0
    wishes = [Sampling(seed=1, temperature=5.0, logit_bias=((505, 100.0),), logprobs=3), GREEDY]
    sampler = sampler_of(wishes, 512, tokenizer_vocab=500)
    for position in range(50):
        drawn = draw(sampler, logits, position=position)
        assert (drawn.tokens < 500).all()
        assert drawn.top_ids is not None and drawn.top_ids.max() < 500


# --- ends ---------------------------------------------------------------------------------------------------------


def test_any_end_of_sequence_stops_and_a_stop_id_is_named() -> None:
    logits = torch.full((5, 30), -9.0)
    for row, token in enumerate((7, 9, 11, 7, 12)):
        logits[row, token] = 9.0
    own = replace(GREEDY, stop_token_ids=(11, 7))
    wishes = [GREEDY, own, own, replace(own, ignore_eos=True), replace(GREEDY, ignore_eos=True)]
    drawn = draw(sampler_of(wishes, 30, eos=(7, 9, 12)), logits)
    assert drawn.tokens.tolist() == [7, 9, 11, 7, 12]
    assert drawn.stopped.tolist() == [True, True, True, True, False]
    assert drawn.stop_token.tolist() == [-1, -1, 11, 7, -1]


# --- log-probabilities --------------------------------------------------------------------------------------------


def test_logprobs_are_those_of_the_raw_logits() -> None:
    logits = torch.randn(4, 700, generator=torch.Generator().manual_seed(9)) * 3
    raw = torch.log_softmax(logits.double(), 1)
    wishes = [
        Sampling(seed=1, temperature=0.3, top_k=2, logprobs=5, logit_bias=((8, 30.0),)),
        GREEDY,
        replace(GREEDY, logprobs=0),
        Sampling(seed=2, logprobs=2, repetition_penalty=5.0),
    ]
    drawn = draw(sampler_of(wishes, 700), logits)
    assert drawn.chosen is not None and drawn.top is not None and drawn.top_ids is not None
    assert drawn.top.shape == (4, 5)
    for row, k in ((0, 5), (2, 0), (3, 2)):
        assert drawn.chosen[row] == pytest.approx(float(raw[row, int(drawn.tokens[row])]), abs=1e-5)
        best = raw[row].topk(5)
        assert drawn.top_ids[row].tolist() == best.indices[:k].tolist() + [-1] * (5 - k)
        assert np.allclose(drawn.top[row, :k], best.values[:k], atol=1e-5)
        assert np.isnan(drawn.top[row, k:]).all()
    assert np.isnan(drawn.chosen[1]) and (drawn.top_ids[1] == -1).all()


def test_prompt_logprobs_do_not_depend_on_slices() -> None:
    logits = torch.randn(50, 509, generator=torch.Generator().manual_seed(7))
    targets = np.arange(50, dtype=np.int32)
    sampler = Sampler(1, 509, 509, (), "cpu")
    kept = logits.clone()
    chosen, top_ids, top = sampler.prompt_logprobs(logits, targets, 3)
    assert torch.equal(kept, logits)
    reference = torch.log_softmax(logits, 1)
    assert np.allclose(chosen, reference[torch.arange(50), torch.arange(50)], atol=1e-5)
    assert np.array_equal(top_ids, reference.topk(3).indices)
    for at in range(0, 50, 16):
        parts = sampler.prompt_logprobs(logits[at : at + 16], targets[at : at + 16], 3)
        for part, of in zip(parts, (chosen, top_ids, top), strict=True):
            assert np.array_equal(part, of[at : at + 16])


def test_equal_logprobs_rank_by_id() -> None:
    sampler = Sampler(1, 200, 200, (), "cpu")
    logits = torch.zeros(1, 200)
    logits[0, [150, 20]] = 1.0
    assert sampler.prompt_logprobs(logits, np.array([0], np.int32), 4)[1].tolist() == [[20, 150, 0, 1]]


def test_fewer_possible_ids_than_asked_are_padded() -> None:
    logits = torch.full((1, 100), float("-inf"))
    logits[0, :2] = 0.0
    chosen, top_ids, top = Sampler(1, 100, 100, (), "cpu").prompt_logprobs(logits, np.array([5], np.int32), 4)
    assert chosen[0] == -np.inf
    assert top_ids.tolist() == [[0, 1, -1, -1]]
    assert np.isnan(top[0, 2:]).all()


def test_logprobs_of_bad_logits_are_nan() -> None:
    logits = torch.zeros(1, 100)
    logits[0, 3] = float("nan")
    chosen, top_ids, top = Sampler(1, 100, 100, (), "cpu").prompt_logprobs(logits, np.array([5], np.int32), 2)
    assert np.isnan(chosen[0]) and np.isnan(top).all() and (top_ids == -1).all()


# --- misuse -------------------------------------------------------------------------------------------------------


def test_misuse_is_told() -> None:
    sampler = sampler_of([GREEDY], 50)
    with pytest.raises(InternalError, match="already holds"):
        sampler.place(0, GREEDY, 0, PROMPT, NONE)
    with pytest.raises(InternalError, match="expected"):
        draw(sampler, torch.zeros(1, 49))
    with pytest.raises(InternalError, match="expected"):
        draw(sampler, torch.zeros(1, 50, dtype=torch.bfloat16))
    sampler.clear(0)
    with pytest.raises(InternalError, match="hold no sequence"):
        draw(sampler, torch.zeros(1, 50))


def test_an_empty_batch_is_fine() -> None:
    drawn = draw(sampler_of(mixed_wishes(9), 100), torch.zeros(0, 100))
    assert len(drawn.tokens) == 0 and len(drawn.fault) == 0
