"""Decides which prefixes of a job are computed once, and which prompts go to one rank together.

Of the whole tree every edge is worth sharing in tokens; an edge shorter than `least_tokens` is not worth its
bookkeeping and is folded into its parent, so the prompts behind it compute it each.  Multi-level keeps all that is
left: a prompt begins with a chain of prefixes, each computed once behind the one above it.  One-level keeps what
`prefix_groups.best_groups` says: a prompt begins with at most one, which is computed from the prompt's begin.

Units: a prefix that lives on two ranks is computed on both, so what shares should stay together; but a subtree that is
larger than a rank can take at once gains nothing by waiting for room.  So a unit is a maximal subtree of at most
`unit_sequences`; what a larger node has beside such subtrees is gathered in the order of the tree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from bgmpi.errors import UsageError
from bgmpi.prefix_groups import best_groups
from bgmpi.prefix_tree import PrefixTree

Mode = Literal["multi-level", "one-level"]
#: Tokens of an edge that are worth sharing: fewer are what templates begin with, and would tie all rows of a job
#: together for next to nothing.
LEAST_TOKENS = 16
#: Sequences of a unit, and how many units each rank should find at least: a few large groups should keep all ranks
#: busy, though each then computes what they share.
UNIT_SEQUENCES, UNITS_A_RANK = 64, 2


@dataclass(frozen=True, slots=True)
class SharePlan:
    """What is shared, K nodes, and the units, in the order of the tree.

    depth: tokens of a node's prefix, int32 [K]; parent: the node whose KV it continues, int32 [K], -1 for none; node:
    the deepest node that a prompt begins with, int32 [prompts], -1 for none.  unit: of each prompt, int32 [prompts],
    -1 for one without sequences; units: how many.  Prefill tokens: logical without sharing, computed with this plan,
    optimum when every edge of the whole tree is computed once.
    """

    depth: NDArray[np.int32]
    parent: NDArray[np.int32]
    node: NDArray[np.int32]
    unit: NDArray[np.int32]
    units: int
    logical: int
    computed: int
    optimum: int

    def path(self, prompt: int) -> list[int]:
        """Return the nodes that a prompt begins with, shallow before deep."""
        nodes = []
        node = int(self.node[prompt])
        while node >= 0:
            nodes.append(node)
            node = int(self.parent[node])
        return nodes[::-1]


def share_plan(
    tree: PrefixTree,
    weight: NDArray[np.int32],
    length: NDArray[np.int64],
    *,
    mode: Mode,
    least_tokens: int = LEAST_TOKENS,
    unit_sequences: int = UNIT_SEQUENCES,
) -> SharePlan:
    """Return the plan.

    weight: sequences of each prompt still to be computed, as the tree was built with; length: tokens of the whole
    prompt, int64 [prompts]; least_tokens: of an edge; unit_sequences: the most sequences of a unit.  UsageError for an
    unknown mode.
    """
    kept = pruned(tree, _long_edges(tree, least_tokens))
    match mode:
        case "multi-level":
            parent = kept.parent
        case "one-level":
            kept = pruned(kept, best_groups(kept))
            parent = np.full(len(kept.depth), -1, np.int32)
        case _:
            raise UsageError(f"prefix sharing: mode is {mode!r}, expected multi-level or one-level")
    unit, units = _units(kept, weight, unit_sequences)
    return SharePlan(
        kept.depth, parent, kept.node, unit, units,
        logical=int((weight * length).sum()),
        computed=prefill_tokens(kept.depth, parent, kept.node, weight, length),
        optimum=prefill_tokens(tree.depth, tree.parent, tree.node, weight, length),
    )  # fmt: skip


def prefill_tokens(
    depth: NDArray[np.int32], parent: NDArray[np.int32], node: NDArray[np.int32], weight: NDArray[np.int32],
    length: NDArray[np.int64],
) -> int:  # fmt: skip
    """Return the tokens that are computed when every node is computed once, behind its parent."""
    from_zero = np.append(depth, np.int32(0)).astype(np.int64)  # [-1]: no node
    edges = from_zero[:-1] - from_zero[parent]
    return int(edges.sum() + (weight * (length - from_zero[node])).sum())


def one_level_tokens(
    tree: PrefixTree, used: NDArray[np.bool_], weight: NDArray[np.int32], length: NDArray[np.int64]
) -> int:
    """Return the prefill tokens when each prompt shares the deepest of the `used` nodes, bool [m], on its path."""
    kept = pruned(tree, used)
    return prefill_tokens(kept.depth, np.full(len(kept.depth), -1, np.int32), kept.node, weight, length)


def sums_below(
    parent: NDArray[np.int32], node: NDArray[np.int32], weight: NDArray[np.integer[Any]]
) -> NDArray[np.int64]:
    """Sum the weights of all that hangs on each node or below it, int64 [K].

    parent: int32 [K], -1 for none; node: int32 [n], on which each hangs, -1 for none; weight: [n].
    """
    nodes = len(parent)
    here = np.bincount(node[node >= 0], weight[node >= 0], nodes).astype(np.int64)
    below, above = here.copy(), parent.copy()
    while (inner := np.flatnonzero(above >= 0)).size:
        below += np.bincount(above[inner], here[inner], nodes).astype(np.int64)
        here, above = here[inner], parent[above[inner]]
    return below


def pruned(tree: PrefixTree, keep: NDArray[np.bool_]) -> PrefixTree:
    """Return the tree without some nodes: what hung on them hangs on the next one above that is kept.

    keep: bool [m].
    """
    nobody = len(keep)
    above = np.append(np.where(keep, np.arange(nobody), tree.parent), nobody)  # the kept one, or a step towards it
    above[above < 0] = nobody
    while not np.array_equal(above, further := above[above]):
        above = further
    number = np.append(np.cumsum(keep) - 1, -1).astype(np.int32)[above]  # of the kept one, by old node; [-1] is -1
    return PrefixTree(
        tree.depth[keep], number[tree.parent[keep]], tree.members[keep], number[tree.node], tree.order,
        tree.begin[keep], tree.end[keep],
    )  # fmt: skip


def _long_edges(tree: PrefixTree, least_tokens: int) -> NDArray[np.bool_]:
    """Return which nodes lie at least so many tokens behind the next one above that is kept, bool [m]."""
    keep = tree.depth - tree.parent_depth() >= least_tokens
    short = np.flatnonzero(~keep)
    kept_depth = np.append(tree.depth, np.int32(0))  # of the deepest kept one on a node's path; [-1]: none
    for node, parent in zip(short.tolist(), tree.parent[short].tolist(), strict=True):
        above = kept_depth[parent]
        keep[node] = tree.depth[node] - above >= least_tokens
        if not keep[node]:
            kept_depth[node] = above
    return keep


def _units(tree: PrefixTree, weight: NDArray[np.int32], most: int) -> tuple[NDArray[np.int32], int]:
    """Return the unit of each prompt, int32 [prompts], and how many units there are."""
    begins, owner = _pieces(tree, most)
    sequences = np.add.reduceat(weight[tree.order], begins, dtype=np.int64) if len(begins) else begins
    new = np.ones(len(begins), bool)
    loose = np.flatnonzero(owner >= 0)
    beside = np.diff(owner, prepend=-1) == 0  # the piece before it hangs on the same node
    gathered = 0
    for piece, size, may_join in zip(loose.tolist(), sequences[loose].tolist(), beside[loose].tolist(), strict=True):
        new[piece] = not (may_join and gathered + size <= most)
        gathered = size if new[piece] else gathered + size
    unit = np.full(len(weight), -1, np.int32)
    spans = np.diff(begins, append=len(tree.order))
    unit[tree.order] = np.repeat(np.cumsum(new) - 1, spans)
    return unit, int(new.sum())


def _pieces(tree: PrefixTree, most: int) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Cut the order into what is never parted: maximal subtrees of at most so many sequences, and prompts elsewhere.

    Returns where each begins, int64 [pieces], and the larger node it hangs on, int32 [pieces], -1 for none.
    """
    small = np.append(tree.members <= most, False)  # [-1]: no node is no subtree
    tops = np.flatnonzero(small[:-1] & ~small[tree.parent])
    place = np.zeros(len(tree.order) + 1, np.int64)
    place[tree.begin[tops]] += 1
    np.subtract.at(place, tree.end[tops], 1)
    first = np.cumsum(place)[:-1] == 0
    first[tree.begin[tops]] = True
    owner = tree.node[tree.order]
    owner[tree.begin[tops]] = tree.parent[tops]
    begins = np.flatnonzero(first)
    return begins, owner[begins]


def sequences_of_unit(sequences: int, ranks: int) -> int:
    """Return the most sequences of a unit in a job with so many of them."""
    if ranks == 1:
        return UNIT_SEQUENCES
    return max(1, min(UNIT_SEQUENCES, sequences // (UNITS_A_RANK * ranks)))
