"""Choosing among scores: ranking, lanes and the inverse of a cumulative sum, against plain numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bgmpi.token_choice import LANE, draw_from_all, first_maximum, leading, whole_lanes

NEVER = float("-inf")


def plainly_ranked(row: np.ndarray) -> list[int]:
    return [i for i in np.argsort(-row, kind="stable").tolist() if row[i] > NEVER]


@pytest.mark.parametrize("vocab", [1, 64, 130, 1000])
@pytest.mark.parametrize("count", [0, 1, 5, 2000])
def test_leading_scores_come_in_order_and_none_is_missed(vocab: int, count: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    # Few distinct values of either sign, so that ties are everywhere; some scores are impossible.
    scores = torch.randint(-6, 7, (20, vocab), generator=generator).float() / 3
    scores[torch.rand(20, vocab, generator=generator) < 0.2] = NEVER
    values, ids = leading(
        whole_lanes(scores, torch.arange(20)), np.full(20, count), np.full(20, 0.5 if count == 0 else NEVER, np.float32)
    )
    for row in range(20):
        plain = scores[row].numpy()
        order = plainly_ranked(plain)
        found = [i for i in ids[row].tolist() if i >= 0]
        assert found == order[: len(found)]
        assert values[row, : len(found)].tolist() == plain[found].tolist()
        assert (values[row, len(found) :] == NEVER).all()
        wanted = min(count, len(order)) if count else sum(plain[i] >= 0.5 for i in order)
        assert len(found) >= wanted


def test_minus_zero_and_zero_are_equal_scores() -> None:
    scores = torch.full((1, LANE), -1.0)
    scores[0, 4], scores[0, 9] = -0.0, 0.0
    assert leading(scores, np.array([2]), np.array([NEVER], np.float32))[1][0, :2].tolist() == [4, 9]
    assert int(first_maximum(scores)[1]) == 4


def test_drawing_from_all_inverts_the_cumulative_sum_in_order_of_id() -> None:
    vocab, count = 777, 400
    row = torch.randn(vocab, generator=torch.Generator().manual_seed(1)) * 2
    row[torch.arange(0, vocab, 3)] = NEVER
    reach = np.cumsum(np.exp(row.double().numpy()))
    uniform = (np.arange(count) + 0.5) / count
    expected = np.searchsorted(reach, uniform * reach[-1], side="right")
    scores = whole_lanes((row - row.max()).expand(count, -1), torch.arange(count))
    assert np.array_equal(draw_from_all(scores, torch.from_numpy(uniform)).numpy(), expected)


@pytest.mark.parametrize("at", [0, 63, 64, 200])
def test_the_ends_of_the_interval_never_draw_the_impossible(at: int) -> None:
    row = torch.full((2, 256), NEVER)
    row[:, at] = 0.0
    uniform = torch.tensor([0.0, 1.0 - 2.0**-52], dtype=torch.float64)
    assert draw_from_all(row, uniform).tolist() == [at, at]
