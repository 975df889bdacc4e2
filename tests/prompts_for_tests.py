"""Small jobs with shared prefixes: prompts of few letters, their tree as the program builds it, and a slow twin."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from bgmpi.prefix_tree import PrefixTree, PrefixTreeBuilder

Prefix = tuple[int, ...]


@dataclass(frozen=True)
class Prompts:
    """Shareable parts of a job's prompts, the sequences of each, and the tokens of a page."""

    tokens: list[Prefix]
    weights: list[int]
    page_tokens: int = 3

    @property
    def weight(self) -> NDArray[np.int32]:
        return np.array(self.weights, np.int32)

    @property
    def length(self) -> NDArray[np.int64]:
        """Of the whole prompts: one token more than what can be shared."""
        return np.array([len(one) + 1 for one in self.tokens], np.int64)

    def read(self, prompts: NDArray[np.int64], ordinal: int) -> NDArray[np.int32]:
        """Be the reader of pages."""
        pages = np.full((len(prompts), self.page_tokens), -1, np.int32)
        for page, prompt in zip(pages, prompts.tolist(), strict=True):
            part = self.tokens[prompt][ordinal * self.page_tokens :][: self.page_tokens]
            page[: len(part)] = part
        return pages

    def builder(self, order: list[int] | None = None, at_once: int = 3) -> PrefixTreeBuilder:
        """Add the prompts, a few at once, in this order."""
        builder = PrefixTreeBuilder(len(self.tokens), self.page_tokens)
        order = order or list(range(len(self.tokens)))
        for first in range(0, len(order), at_once):
            some = order[first : first + at_once]
            lengths = np.array([len(self.tokens[one]) for one in some], np.int64)
            joined = np.array([token for one in some for token in self.tokens[one]], np.int32)
            builder.add(np.array(some, np.int64), lengths, joined)
        return builder

    def tree(self) -> PrefixTree:
        return self.builder().build(self.weight, self.read)

    def shared(self) -> dict[Prefix, int]:
        """Return every prefix at which a compact tree has a node, with the sequences that begin with it: found by
        trying all."""
        count: dict[Prefix, int] = {}
        goes_on: dict[Prefix, set[int]] = {}
        for tokens, weight in zip(self.tokens, self.weights, strict=True):
            for end in range(1, len(tokens) + 1) if weight else ():
                prefix = tokens[:end]
                count[prefix] = count.get(prefix, 0) + weight
                # An end is a way of its own on which a prefix goes on, so that a prefix of another prompt is a node.
                goes_on.setdefault(prefix, set()).add(tokens[end] if end < len(tokens) else -1)
        return {one: n for one, n in count.items() if n > 1 and (len(goes_on[one]) > 1 or -1 in goes_on[one])}


def jobs(most_prompts: int = 12, most_weight: int = 3) -> st.SearchStrategy[Prompts]:
    """Draw jobs of short prompts of two or three letters, equal and empty ones among them, and such without sequences;
    long heads are shared often."""
    letters = st.integers(0, 2)
    heads = st.lists(st.lists(letters, max_size=9).map(tuple), min_size=1, max_size=3)

    def prompts(some: list[Prefix]) -> st.SearchStrategy[Prompts]:
        one = st.tuples(st.sampled_from([(), *some]), st.lists(letters, max_size=5).map(tuple)).map(
            lambda parts: parts[0] + parts[1]
        )
        pair = st.tuples(one, st.integers(0, most_weight))
        return st.builds(
            lambda pairs, page: Prompts([tokens for tokens, _ in pairs], [weight for _, weight in pairs], page),
            st.lists(pair, max_size=most_prompts), st.integers(2, 4),
        )  # fmt: skip

    return heads.flatmap(prompts)
