"""Keeps a 64-bit hash of every page of every prompt, so that a job's prompts can be compared without their tokens.

A page is hashed by itself: a sum of its tokens plus one, each times a random odd number of its place (multilinear), and
a final mix.  So the last page, which may be short, is like no page that goes on: behind the end stand zeros.  A million
prompts of 1,000 tokens are then 128 MB where their tokens would be 4 GB, and the tokens pass by once, in whatever order
the ranks bring them.

The random numbers come from a fixed seed, so every run and every rank hashes alike.  Equal hashes are taken for equal
pages; two that differ agree by chance once in about 2^63 pairs, and on purpose for who knows the seed.  Who acts on it
must bear that: sharing is checked against the tokens where a prefix is used, so a collision costs some saving and never
a wrong token.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bgmpi.errors import InternalError

SEED = 0x9E3779B97F4A7C15
NO_PAGE = 0  # the hash of the page behind a prompt's last one; no page has it
PIECE_PAGES = 2048  # hashed in one go, so that what lies between stays in the cache


class PageHashes:
    """The page hashes of a job's prompts.

    lengths: tokens of each prompt that are hashed, int64 [prompts], 0 for one that was never added.
    """

    def __init__(self, prompts: int, page_tokens: int) -> None:
        self.page_tokens = page_tokens
        self.lengths: NDArray[np.int64] = np.zeros(prompts, np.int64)
        self._first: NDArray[np.int64] = np.full(prompts, -1, np.int64)
        self._pieces: list[NDArray[np.uint64]] = []
        self._count = 0
        numbers = np.random.default_rng(SEED).integers(0, 1 << 64, page_tokens, np.uint64, endpoint=False)
        self._factors = numbers | np.uint64(1)

    def add(self, prompts: NDArray[np.int64], lengths: NDArray[np.int64], tokens: NDArray[np.int32]) -> None:
        """Hash prompts whose tokens stand one behind the other.

        prompts, lengths: int64 [k]; tokens: int32 [sum of lengths].  InternalError when a prompt comes twice or the
        lengths do not add up.
        """
        if int(lengths.sum()) != len(tokens):
            raise InternalError(f"prefixes: {len(prompts)} prompts of {int(lengths.sum())} tokens, got {len(tokens)}")
        if len(np.unique(prompts)) < len(prompts) or (self._first[prompts] >= 0).any():
            raise InternalError(f"prefixes: a prompt among {prompts[:8].tolist()}.. was added before")
        pages = -(-lengths // self.page_tokens)
        last = np.cumsum(pages)
        self.lengths[prompts] = lengths
        self._first[prompts] = self._count + last - pages
        ends = np.cumsum(lengths)
        ordinal = np.arange(int(pages.sum())) - np.repeat(last - pages, pages)
        begins = np.repeat(ends - lengths, pages) + ordinal * self.page_tokens
        sizes = np.minimum(np.repeat(ends, pages) - begins, self.page_tokens)
        for start in range(0, len(begins), PIECE_PAGES):
            piece = slice(start, start + PIECE_PAGES)
            self._pieces.append(self._hash(begins[piece], sizes[piece], tokens))
        self._count += len(begins)

    def close(self) -> None:
        """Join the pieces; nothing can be added afterwards without closing again."""
        self._pieces = [np.concatenate([*self._pieces, np.empty(0, np.uint64)])]

    def of(self, prompts: NDArray[np.int64], ordinal: int) -> NDArray[np.uint64]:
        """Return the hash of page `ordinal` of each, uint64 [k], NO_PAGE where a prompt ends before it."""
        found = np.full(len(prompts), NO_PAGE, np.uint64)
        has = self.lengths[prompts] > ordinal * self.page_tokens
        found[has] = self._pieces[0][self._first[prompts[has]] + ordinal]
        return found

    def _hash(
        self, begins: NDArray[np.int64], sizes: NDArray[np.int64], tokens: NDArray[np.int32]
    ) -> NDArray[np.uint64]:
        """Hash neighbouring pages that begin at `begins` and have `sizes` tokens, at least one each."""
        stretch = tokens[begins[0] : begins[-1] + sizes[-1]].astype(np.uint64)
        stretch += np.uint64(1)
        starts = begins - begins[0]
        stretch *= self._factors[np.arange(len(stretch)) - np.repeat(starts, sizes)]
        return _mixed(np.add.reduceat(stretch, starts))


def _mixed(value: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Spread every bit over all others (the finaliser of splitmix64); never NO_PAGE."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.maximum(value ^ (value >> np.uint64(31)), np.uint64(NO_PAGE + 1))
