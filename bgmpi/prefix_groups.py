"""Collapses a prefix tree to one level: which prefixes to compute when a prompt may begin with at most one of them.

A node that is used costs its whole depth, for nothing below another one is shared; a prompt takes the deepest used node
on its path, and costs what it has beyond that.  `best_groups` finds the cheapest choice: a dynamic programme over
(subtree, carried prefix), exact.  `lifted_groups` is what BatchLLM does (paper B2): bottom-up, one grandchild at a
time, so that a choice is judged by the tokens it duplicates at that moment; it is here to be compared with.

Both say which nodes are used, bool [m].
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bgmpi.prefix_tree import PrefixTree


def best_groups(tree: PrefixTree) -> NDArray[np.bool_]:
    """Return the used nodes of least cost.

    With a carried prefix of d tokens (the deepest used node above, d = 0 for none) a subtree costs, against nothing
    shared, cost(v, d) = min(depth(v) + below(v, depth(v)), below(v, d)), where below(v, d) is the sum of cost(child, d)
    minus d for each sequence that ends at v itself.  below falls with d, so v is used up to some d of its path, and
    that number is all that is kept of it.  The d of a node are the depths on its path: one vector, one row a level.
    """
    parent, depth, direct = tree.parent.tolist(), tree.depth.tolist(), _direct(tree).tolist()
    level = _levels(parent)
    deepest = max(level, default=-1) + 1
    path = np.zeros(deepest + 1, np.int64)  # [0] nothing carried, then the depth of each node on the path
    on_path = [-1] * deepest
    below = [np.zeros(row + 2, np.int64) for row in range(deepest)]
    used_up_to = [0] * len(parent)
    for node in reversed(range(len(parent))):
        row, up = level[node], node
        while up >= 0 and on_path[level[up]] != up:
            on_path[level[up]], path[level[up] + 1] = up, depth[up]
            up = parent[up]
        mine = below[row]
        mine -= direct[node] * path[: row + 2]
        use = depth[node] + int(mine[-1])
        used_up_to[node] = int(np.count_nonzero(mine[:-1] > use))
        if row:
            below[row - 1] += np.minimum(mine[:-1], use)
        mine[:] = 0
    return _choose(parent, level, used_up_to)


def _choose(parent: list[int], level: list[int], used_up_to: list[int]) -> NDArray[np.bool_]:
    """Walk down: a node is used when the level that its path carries, 0 for none, is below `used_up_to`."""
    used = np.zeros(len(parent), bool)
    carried = [0] * (len(parent) + 1)  # the last one stands for the parent of a root
    for node, above in enumerate(parent):
        used[node] = carried[above] < used_up_to[node]
        carried[node] = level[node] + 1 if used[node] else carried[above]
    return used


def lifted_groups(tree: PrefixTree) -> NDArray[np.bool_]:
    """Return the used nodes as BatchLLM's greedy finds them.

    Bottom-up, of each node c: every child g for which (leaves(g) - 1) * len(g) > len(c) is lifted beside c, with c's
    tokens duplicated; if one child is left, c is merged into it.  What stands at the top in the end is used.
    """
    parent, depth = tree.parent.tolist(), tree.depth.tolist()
    direct = [*_direct(tree).tolist(), 0]  # the last ones stand for the top, above all roots
    children: list[list[int]] = [[] for _ in direct]
    leaves = [0] * len(parent)
    above_depth = tree.parent_depth().tolist()
    for node in reversed(range(len(parent))):
        above = parent[node]
        stay: list[int] = []
        for child in children[node]:
            gain = (leaves[child] - 1) * (depth[child] - depth[node]) - (depth[node] - above_depth[node])
            (children[above] if gain > 0 else stay).append(child)
        children[node] = stay
        leaves[node] = direct[node] + sum(leaves[child] for child in stay)
        if len(stay) + direct[node] > 1:
            children[above].append(node)
        else:
            children[above] += stay
            direct[above] += direct[node]
    used = np.zeros(len(parent), bool)
    used[children[-1]] = True
    return used


def _direct(tree: PrefixTree) -> NDArray[np.int64]:
    """Return how many sequences end at each node itself, int64 [m]."""
    inner = tree.parent >= 0
    direct = tree.members.copy()
    np.subtract.at(direct, tree.parent[inner], tree.members[inner])
    return direct


def _levels(parent: list[int]) -> list[int]:
    """Return how many nodes stand above each."""
    level = [-1] * (len(parent) + 1)  # the last one stands for the parent of a root
    for node, above in enumerate(parent):
        level[node] = level[above] + 1
    return level[:-1]
