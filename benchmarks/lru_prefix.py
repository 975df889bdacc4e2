"""What an LRU cache of KV pages computes of a job: the prefix cache of online engines, simulated to stand beside ours.

As vLLM's automatic prefix caching does it: a page that a prompt fills is known by its content and all that stands
before it.  A sequence that begins takes the longest run of known pages, never the one with the prompt's last token
alone, and computes the rest; its pages are known from then on, so who begins in the same step already finds them.
While it runs it holds the pages of its prompt and answer.  When it ends they join the queue of free pages, the last
ones first, and stay known until their turn comes to be taken for something else.

Sequences begin in the order of the input, as long as the next one finds its pages and fewer than `running` run; an
answer takes a step a token, prefill takes no step.  Kinder to the cache than life in two ways: pages of an answer are
held from the begin, so nothing is ever preempted and computed again; and no page is lost to rounding up chunks.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

ONCE = -1  # a page that nobody will ask for: of an answer, or not full


@dataclass(frozen=True, slots=True)
class Ask:
    """A sequence.  prompt: int32 [tokens]; answer: tokens it will generate.  n samples are n of these."""

    prompt: NDArray[np.int32]
    answer: int


@dataclass(slots=True)
class PageCache:
    """Pages, by what is in them.

    free: pages that nobody holds, the next one to be taken first: its content, or a negative number of its own;
    holders: how many hold each content that is held.
    """

    pages: int
    free: OrderedDict[int, None] = field(init=False)
    holders: dict[int, int] = field(default_factory=dict)
    blank: int = 0

    def __post_init__(self) -> None:
        """Begin with blank pages."""
        self.free = OrderedDict()
        for _ in range(self.pages):
            self._free_blank()

    def hits(self, contents: Sequence[int]) -> int:
        """Return how many of these are known, from the first on without a gap."""
        return next((n for n, one in enumerate(contents) if one not in self.holders and one not in self.free),
                    len(contents))  # fmt: skip

    def take(self, contents: Sequence[int], hits: int, once: int) -> list[int] | None:
        """Hold a page of each content, of which the first `hits` are known, and some for ONCE; None when they do not
        fit."""
        waiting = sum(one not in self.holders for one in contents[:hits])
        if len(contents) - hits + once > len(self.free) - waiting:
            return None
        held = [self._hold(one) for one in contents[:hits]]
        for one in contents[hits:]:
            if one in self.holders:  # known behind a gap, and somebody's: computed again into a page of its own
                once += 1
                continue
            if one not in self.free:
                self.free.popitem(last=False)
            held.append(self._hold(one))
        for _ in range(once):
            self.free.popitem(last=False)
        return held + [ONCE] * once

    def let_go(self, held: Sequence[int]) -> None:
        """Free what `take` gave, the last page first."""
        for one in reversed(held):
            if one == ONCE:
                self._free_blank()
                continue
            self.holders[one] -= 1
            if not self.holders[one]:
                del self.holders[one]
                self.free[one] = None

    def _hold(self, content: int) -> int:
        self.free.pop(content, None)
        self.holders[content] = self.holders.get(content, 0) + 1
        return content

    def _free_blank(self) -> None:
        self.blank += 1
        self.free[-self.blank] = None


def lru_prefill(asks: Iterable[Ask], *, pages: int, page_tokens: int, running: int) -> int:
    """Return the prefill tokens that are computed.

    pages: of the cache; running: the most sequences at once.  ValueError for a sequence that the cache cannot hold.
    """
    cache, names = PageCache(pages), dict[tuple[int, bytes], int]()
    computed, now = 0, 0
    ends: list[tuple[int, int, list[int]]] = []  # step, order, pages held
    for order, ask in enumerate(asks):
        contents = _contents(ask.prompt, page_tokens, names)
        once = -(-(len(ask.prompt) + ask.answer) // page_tokens) - len(contents)
        if len(contents) + once > pages:
            raise ValueError(f"LRU cache: sequence {order} needs {len(contents) + once} pages of {pages}; give it more")
        held = None
        while held is None:
            if len(ends) < running:
                hits = cache.hits(contents[: (len(ask.prompt) - 1) // page_tokens])
                held = cache.take(contents, hits, once)
            if held is None:
                now, _, ended = heapq.heappop(ends)
                cache.let_go(ended)
        computed += len(ask.prompt) - hits * page_tokens
        heapq.heappush(ends, (now + ask.answer, order, held))
    return computed


def _contents(prompt: NDArray[np.int32], page_tokens: int, names: dict[tuple[int, bytes], int]) -> list[int]:
    """Name each full page by its tokens and the page before it."""
    contents, before = [], -1
    for end in range(page_tokens, len(prompt) + 1, page_tokens):
        before = names.setdefault((before, prompt[end - page_tokens : end].tobytes()), len(names))
        contents.append(before)
    return contents
