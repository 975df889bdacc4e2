"""Laws of page hashes: a page's hash is that of its tokens, whoever stands beside it."""

from __future__ import annotations

import numpy as np
import pytest

from bgmpi import page_hashes
from bgmpi.page_hashes import NO_PAGE, PageHashes


def hashed(*prompts: list[int], page_tokens: int = 4) -> PageHashes:
    hashes = PageHashes(len(prompts), page_tokens)
    lengths = np.array([len(prompt) for prompt in prompts], np.int64)
    hashes.add(np.arange(len(prompts)), lengths, np.array([token for prompt in prompts for token in prompt], np.int32))
    hashes.close()
    return hashes


def pages(hashes: PageHashes, ordinal: int) -> list[int]:
    return hashes.of(np.arange(len(hashes.lengths)), ordinal).tolist()


def test_equal_pages_have_equal_hashes_wherever_they_stand() -> None:
    hashes = hashed([1, 2, 3, 4, 5], [], [9, 9, 9, 9, 1, 2, 3, 4, 5])
    assert pages(hashes, 0)[0] == pages(hashes, 1)[2]
    assert pages(hashes, 1)[0] == pages(hashes, 2)[2]


def test_order_length_and_every_token_count() -> None:
    one_page = [[1, 2, 3, 4], [2, 1, 3, 4], [1, 2, 3], [1, 2, 3, 0], [0, 1, 2, 3], [0], [0, 0], [0, 0, 0, 0]]
    assert len(set(pages(hashed(*one_page), 0))) == len(one_page)


def test_behind_the_last_token_there_is_no_page_and_no_page_has_its_hash() -> None:
    hashes = hashed([], [1, 2, 3, 4], [1, 2, 3, 4, 5])
    assert [one == NO_PAGE for one in pages(hashes, 0)] == [True, False, False]
    assert [one == NO_PAGE for one in pages(hashes, 1)] == [True, True, False]


def test_pieces_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [list(range(n)) for n in range(20)]
    whole = [pages(hashed(*prompts), ordinal) for ordinal in range(6)]
    monkeypatch.setattr(page_hashes, "PIECE_PAGES", 3)
    assert whole == [pages(hashed(*prompts), ordinal) for ordinal in range(6)]


def test_distinct_pages_have_distinct_hashes() -> None:
    draw = np.random.default_rng(1).integers(0, 4, (50_000, 16), np.int32)
    hashes = PageHashes(len(draw), 16)
    hashes.add(np.arange(len(draw)), np.full(len(draw), 16), draw.ravel())
    hashes.close()
    assert len(np.unique(hashes.of(np.arange(len(draw)), 0))) == len(np.unique(draw, axis=0))
