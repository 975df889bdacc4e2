"""Answers are expected to be as long as their cap, until some have ended that tell otherwise."""

from __future__ import annotations

import numpy as np

from bgmpi.answer_lengths import AnswerLengths


def test_a_cap_is_believed_until_answers_end() -> None:
    lengths = AnswerLengths()
    caps = np.array([0, 1, 7, 512, 2**31 - 1])
    assert lengths.expected(caps).tolist() == caps.tolist()
    before = lengths.share
    lengths.learn(np.array([[512, 10]] * 50))
    assert lengths.moved(before) and not lengths.moved(lengths.share)
    found = lengths.expected(np.array([512, 600, 400, 1024]))
    assert 10 < found[0] < 40 and found[1] / 600 == found[0] / 512, "one bucket, one share"
    assert found[2:].tolist() == [400, 1024]


def test_nothing_and_little_change_nothing() -> None:
    lengths = AnswerLengths()
    before = lengths.share
    lengths.learn(np.empty(0, np.int64))
    lengths.learn(np.array([[100, 95]]))
    assert not lengths.moved(before)
