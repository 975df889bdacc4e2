"""Sorts the prompts of a job by their tokens and tells how many tokens each shares with the one before it.

From the first page on, page by page: prompts that agree so far form a segment of the order.  At a page only segments of
two or more are looked at, and only where their hashes of the page differ are tokens read: of one prompt for each
distinct page.  These are sorted within their segment, which splits into smaller ones, and are compared with their
neighbours token by token.  Every page read makes a new segment or a prompt that is done, so at most two pages a prompt
are read over the whole job, however long the prompts are; and memory is a few numbers a prompt, beside the pages of
one batch of segments.

A prompt that ends is smaller than one that goes on.  Equal prompts stay neighbours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from bgmpi.errors import InternalError
from bgmpi.page_hashes import PageHashes

BATCH_PROMPTS = 1 << 18  # of segments that are split together; a larger segment is split alone
READ_PAGES = 1 << 14  # asked of the reader at once


class PageReader(Protocol):
    """Gives the tokens of page `ordinal` of each prompt, int32 [k, page_tokens], -1 behind a prompt's shareable end."""

    def __call__(self, prompts: NDArray[np.int64], ordinal: int) -> NDArray[np.int32]: ...


@dataclass(frozen=True, slots=True)
class PrefixOrder:
    """Prompts in the order of their tokens.

    prompts: int64 [n]; common: int64 [n], tokens that each shares with the one before it, 0 for the first.
    """

    prompts: NDArray[np.int64]
    common: NDArray[np.int64]


def prefix_order(
    hashes: PageHashes, prompts: NDArray[np.int64], read: PageReader, beat: Callable[[], None]
) -> PrefixOrder:
    """Sort these prompts.

    prompts: int64 [n], which, each once; read: their tokens; beat: called every now and then, to show life.
    InternalError when the reader's pages are not those that were hashed.
    """
    unknown = -1
    order = PrefixOrder(prompts.copy(), np.full(len(prompts), unknown, np.int64))
    begins, ends, ordinal = np.zeros(1, np.int64), np.full(1, len(prompts)), 0
    while len(begins) and len(prompts):
        batches = _batches(begins, ends)
        found = [_Split(hashes, order, read, beat, ordinal).split(begins[part], ends[part]) for part in batches]
        begins, ends = (np.concatenate(bounds) for bounds in zip(*found, strict=True))
        ordinal += 1
    lengths = hashes.lengths[order.prompts]
    np.copyto(order.common, lengths, where=order.common == unknown)  # equal to the one before it
    np.minimum(order.common, lengths, out=order.common)  # both bounds hold even where hashes collide
    np.minimum(order.common[1:], lengths[:-1], out=order.common[1:])
    order.common[:1] = 0
    return order


@dataclass(frozen=True, slots=True)
class _Split:
    """Splits segments by their page `ordinal`; what prefix_order() was given goes along."""

    hashes: PageHashes
    order: PrefixOrder
    read: PageReader
    beat: Callable[[], None]
    ordinal: int

    def split(self, begins: NDArray[np.int64], ends: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Sort these segments of the order and return begins and ends of those that are left to be split."""
        self.beat()
        places = stretches(begins, ends - begins)
        starts = _starts(ends - begins)
        longest = np.maximum.reduceat(self.hashes.lengths[self.order.prompts[places]], starts, dtype=np.int64)
        more = (longest > self.ordinal * self.hashes.page_tokens) & (ends - begins > 1)
        begins, ends, places = begins[more], ends[more], places[np.repeat(more, ends - begins)]
        if not len(begins):
            return begins, ends
        spans, starts = ends - begins, _starts(ends - begins)
        keys = self.hashes.of(self.order.prompts[places], self.ordinal)
        alike = np.logical_and.reduceat(keys == np.repeat(keys[starts], spans), starts)
        apart = np.repeat(~alike, spans)
        split = self._regroup(places[apart], np.repeat(np.arange(len(begins)), spans)[apart], keys[apart])
        return np.concatenate([begins[alike], split[0]]), np.concatenate([ends[alike], split[1]])

    def _regroup(
        self, places: NDArray[np.int64], segment: NDArray[np.int64], keys: NDArray[np.uint64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Sort prompts within their segments by the page that has the hash `keys`; return the segments they form now.

        places: where in the order they stand, ascending; all [k].
        """
        if not len(places):
            return places, places
        by = np.lexsort((keys, segment))
        heads = _heads(segment[by], keys[by])
        sizes = np.diff(heads, append=len(by))
        prompts = self.order.prompts[places[by]]
        page_order, common = self._sorted_pages(prompts[heads], segment[by[heads]])
        self.order.prompts[places] = prompts[stretches(heads[page_order], sizes[page_order])]
        sizes = sizes[page_order]
        begins = places[_starts(sizes)]
        inner = common >= 0
        self.order.common[begins[inner]] = self.ordinal * self.hashes.page_tokens + common[inner]
        return begins, begins + sizes

    def _sorted_pages(
        self, prompts: NDArray[np.int64], segment: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the order of these prompts by (segment, page), and how many tokens each shares with the one before it.

        The second is in the new order, -1 for the first of a segment.  Both int64 [k].
        """
        width = self.hashes.page_tokens
        pages = np.zeros((len(prompts), width), ">u4")  # bytes then compare like numbers; 0 behind the end
        going_on = np.flatnonzero(self.hashes.lengths[prompts] > self.ordinal * width)
        for start in range(0, len(going_on), READ_PAGES):
            piece = going_on[start : start + READ_PAGES]
            pages[piece] = self.read(prompts[piece], self.ordinal) + 1
            self.beat()
        by = np.argsort(pages.view(f"S{4 * width}")[:, 0])
        by = by[np.argsort(segment[by], kind="stable")]
        common = np.full(len(by), -1, np.int64)
        inner = np.flatnonzero(np.diff(segment[by]) == 0) + 1
        for start in range(0, len(inner), READ_PAGES):
            now = inner[start : start + READ_PAGES]
            differ = pages[by[now]] != pages[by[now - 1]]
            common[now] = differ.argmax(axis=1)
            if not differ.any(axis=1).all():
                raise InternalError(f"prefixes: page {self.ordinal} of two prompts was hashed unlike but is read alike")
        return by, common


def stretches(begins: NDArray[np.int64], sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return begins[0], begins[0] + 1, .. (sizes[0] of them), begins[1], ..; int64 [sum of sizes]."""
    result: NDArray[np.int64] = np.arange(int(sizes.sum())) + np.repeat(begins - _starts(sizes), sizes)
    return result


def _starts(sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return where each stretch begins when they stand one behind the other, int64 [k]."""
    result: NDArray[np.int64] = np.cumsum(sizes) - sizes
    return result


def _heads(segment: NDArray[np.int64], keys: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Return where a new pair (segment, key) begins, in arrays sorted by it."""
    new = np.ones(len(keys), bool)
    new[1:] = (np.diff(segment) != 0) | (keys[1:] != keys[:-1])
    return np.flatnonzero(new)


def _batches(begins: NDArray[np.int64], ends: NDArray[np.int64]) -> Iterator[slice]:
    """Cut the segments into batches of about BATCH_PROMPTS prompts."""
    batch = _starts(ends - begins) // BATCH_PROMPTS
    cuts = [0, *(np.flatnonzero(np.diff(batch)) + 1).tolist(), len(begins)]
    yield from (slice(begin, end) for begin, end in pairwise(cuts))
