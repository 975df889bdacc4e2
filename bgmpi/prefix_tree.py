"""Finds every prefix that two or more sequences of a job share: a compact radix tree over token ids (paper B1).

Built in two strokes.  While prompts are tokenised, `add` keeps a hash of each of their pages (`page_hashes`) and no
token.  `build` sorts the prompts (`prefix_order`), reading the few pages that decide; the tree is then the stretches of
the order whose prompts share more tokens than those around them: one pass with a stack over the neighbours' shared
lengths.  Depths are exact to the token, not to the page.

The tree is arrays, no object a node.  It ends where sharing ends: what one sequence alone has is no node.  Rejected:
inserting prompts one by one (an object a node, the search for a child at each, and all tokens in memory).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bgmpi.page_hashes import PageHashes
from bgmpi.prefix_order import PageReader, PrefixOrder, prefix_order

__all__ = ["PageReader", "PrefixTree", "PrefixTreeBuilder"]


@dataclass(frozen=True, slots=True)
class PrefixTree:
    """All shared prefixes of a job: m nodes, each the prefix of at least two sequences, parents before children.

    depth: tokens of the prefix, int32 [m]; parent: the next shorter one, int32 [m], -1 for none; members: sequences
    that begin with it, int64 [m].  node: the longest prefix of each prompt, int32 [prompts], -1 for none.  order:
    prompts in the order of their tokens, int64 [those with sequences]: those of weight 0 are left out.  begin, end: the
    members' stretch of `order`, int64 [m].
    """

    depth: NDArray[np.int32]
    parent: NDArray[np.int32]
    members: NDArray[np.int64]
    node: NDArray[np.int32]
    order: NDArray[np.int64]
    begin: NDArray[np.int64]
    end: NDArray[np.int64]

    def parent_depth(self) -> NDArray[np.int32]:
        """Return the depth of each node's parent, int32 [m], 0 where there is none."""
        return np.append(self.depth, np.int32(0))[self.parent]


class PrefixTreeBuilder:
    """Takes the shareable parts of a job's prompts, in any order, and makes the tree."""

    def __init__(self, prompts: int, page_tokens: int) -> None:
        self._hashes = PageHashes(prompts, page_tokens)

    def add(self, prompts: NDArray[np.int64], lengths: NDArray[np.int64], tokens: NDArray[np.int32]) -> None:
        """Take the shareable parts of some prompts, one behind the other; keeps 8 bytes a page.

        prompts, lengths: int64 [k]; tokens: int32 [sum of lengths].  A prompt that is never added shares nothing.
        """
        self._hashes.add(prompts, lengths, tokens)

    def build(self, weight: NDArray[np.int32], read: PageReader, beat: Callable[[], None] = lambda: None) -> PrefixTree:
        """Return the tree.

        weight: sequences of each prompt that are still to be computed, int32 [prompts]; read: the prompts' tokens,
        asked for some pages only, each call at most `prefix_order.READ_PAGES` pages; beat: called every now and then.
        """
        self._hashes.close()
        present = np.flatnonzero(weight > 0)
        order = prefix_order(self._hashes, present, read, beat)
        beat()
        return _tree(order, self._hashes.lengths, weight)


def _tree(order: PrefixOrder, lengths: NDArray[np.int64], weight: NDArray[np.int32]) -> PrefixTree:
    """Make the tree of sorted prompts.  A prompt of two or more sequences stands twice, so it shares its whole length
    with its like."""
    mine = weight[order.prompts].astype(np.int64)
    copies = np.minimum(mine, 2)
    source = np.repeat(np.arange(len(mine)), copies)
    common = np.where(np.diff(source, prepend=-1) == 0, lengths[order.prompts[source]], order.common[source])
    depth, parent, begin, end, at = _intervals(common)
    preorder = np.lexsort((depth, begin))
    number = np.empty(len(preorder) + 1, np.int32)
    number[preorder] = np.arange(len(preorder))
    number[-1] = -1  # parent -1 stays -1
    begin, end = source[begin[preorder]], source[end[preorder] - 1] + 1
    before = np.concatenate([[0], np.cumsum(mine)])
    node = np.full(len(weight), -1, np.int32)
    node[order.prompts[source]] = number[_deepest(common, at)]
    return PrefixTree(
        depth[preorder].astype(np.int32), number[parent[preorder]], before[end] - before[begin], node, order.prompts,
        begin, end,
    )  # fmt: skip


def _intervals(common: NDArray[np.int64]) -> tuple[NDArray[np.int64], ...]:
    """Return the maximal stretches [begin, end) whose neighbours share at least `depth` > 0 tokens, as a tree.

    depth, parent, begin, end: int64 [m], numbered as they are found; at: int64 [n], the deepest stretch that holds both
    a place and the one before it, -1 for none.
    """
    depth, parent, begin, end = array("q"), array("q"), array("q"), array("q")
    at = array("q", bytes(8 * len(common)))
    open_nodes, open_depths = [-1], [0]
    for place, shared in enumerate([*common.tolist(), 0]):
        first, inner = place - 1, -1
        while open_depths[-1] > shared:
            inner = open_nodes.pop()
            open_depths.pop()
            first, end[inner] = begin[inner], place
            parent[inner] = open_nodes[-1]
        if open_depths[-1] < shared:
            if inner >= 0:
                parent[inner] = len(depth)
            open_nodes.append(len(depth))
            open_depths.append(shared)
            depth.append(shared)
            begin.append(first)
            end.append(-1)
            parent.append(-1)
        if place < len(at):
            at[place] = open_nodes[-1]
    return tuple(np.array(one, np.int64) for one in (depth, parent, begin, end, at))


def _deepest(common: NDArray[np.int64], at: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the deepest stretch that holds each place: with the one before it or with the one behind it."""
    behind, deeper = np.append(at[1:], -1), np.append(common[1:], 0)
    return np.where(common >= deeper, at, behind)
