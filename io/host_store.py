"""The node's memory as the home of all KV: every page of every sequence that has one (paper A2).

A rank brings `pages` pages to its node's block.  A page is one page of all layers, contiguous, in the layout that
every tier shares (kernels/backend.py), and pages are numbered over the whole node, rank by rank.  So a number means the
same page to all ranks of a node, and a sequence moves between them by handing its numbers over.  Between nodes pages
are fetched by one-sided gets; a number is always one of the node that holds the page.

Behind a rank's pages lie the rows of its hidden states.  They take the place of the last few page numbers of its range,
which nobody ever holds, so that the block stays one regular array.

It knows numbers and bytes; who owns a page, and when it may be freed, is the sequence manager's.
"""

from __future__ import annotations

from math import lcm, prod
from types import TracebackType
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray

from bgmpi.errors import BgmpiError, InternalError
from bgmpi.io.windows import GRAIN, Copies, Window
from bgmpi.world import World

Pages = NDArray[np.int64]


class HostStore:
    """The pages of a node, and the hidden rows of this rank.

    pages: how many are this rank's to begin with; first: the number of its first; node_pages: numbers of the node.
    tensor: [node_pages, layers, *page_shape]; rows: [hidden_rows, hidden]; both in `dtype`, uninitialised.
    """

    def __init__(
        self, world: World, *, pages: int, layers: int, page_shape: tuple[int, ...], dtype: torch.dtype,
        hidden_rows: int = 0, hidden: int = 0,
    ) -> None:  # fmt: skip
        """Collective over the world.  pages: what this rank has room for; a node's ranks all get the least of theirs.
        layers, page_shape, dtype, hidden: equal everywhere; hidden_rows: the same on all ranks of a node."""
        asked = world.all_gather_counts(np.array([pages, hidden_rows], np.int64))
        here = world.node_of == world.node_of[world.rank]
        if (asked[here, 1] != hidden_rows).any():
            raise InternalError(f"hidden rows of a node's ranks differ: {asked[here, 1].tolist()}")
        self.pages = int(asked[here, 0].min())
        self.layers, self.page_shape, self.dtype = layers, page_shape, dtype
        self.page_bytes = layers * prod(page_shape) * dtype.itemsize
        rows_bytes = hidden_rows * hidden * dtype.itemsize
        size = segment_bytes(self.pages, self.page_bytes, rows_bytes)
        self._window = Window(world, size)
        block = self._window.node
        self.node_pages = len(block) // self.page_bytes
        self.first = self._window.node_offset // self.page_bytes
        self.tensor = torch.from_numpy(block).view(dtype).view(self.node_pages, layers, *page_shape)
        behind = self._window.own[self.pages * self.page_bytes :][:rows_bytes]
        self.rows = torch.from_numpy(behind).view(dtype).view(hidden_rows, hidden)
        least = [int(asked[world.node_of == first, 0].min()) for first in world.node_of]
        self._pages_of = np.array(least, np.int64)
        self._rank = world.rank

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        # Freeing is collective: with an error that not all ranks have, the world ends them, and nobody may wait here.
        if error is None or (isinstance(error, BgmpiError) and error.agreed):
            self.close()

    def layer(self, number: int) -> torch.Tensor:
        """Return the pages of one layer, [node_pages, *page_shape], a view whose pages are strided."""
        return self.tensor[:, number]

    def same_node(self, rank: int) -> bool:
        """Say whether that rank's pages are in `tensor` under the numbers it gives them."""
        return self._window.same_node(rank)

    def fetch(self, rank: int, theirs: Pages, mine: Pages) -> Copies:
        """Begin to copy whole pages from the node of `rank`: theirs int64 [k], numbers of that node; mine int64 [k],
        numbers of this one.  One-sided: no rank there does anything.  Neighbouring pages travel together."""
        self._check(rank, theirs)
        self._check(self._rank, mine)
        one = self.page_bytes
        return self._window.get(rank, theirs * one, one, self._window.node, mine * one)

    def fetch_heads(self, rank: int, theirs: Pages, mine: Pages, heads: slice) -> Copies:
        """Begin to copy of each page only the keys and values of these KV heads (see `fetch`), to the same place in the
        page here.  For grouped-query attention; a latent page has no heads."""
        if len(self.page_shape) != 4:
            raise InternalError(f"fetch_heads: a page of shape {self.page_shape} has no KV heads; fetch it whole")
        self._check(rank, theirs)
        self._check(self._rank, mine)
        kinds, groups, *one_head = self.page_shape
        head = prod(one_head) * self.dtype.itemsize
        begin, end, _ = heads.indices(groups)
        within = np.arange(self.layers * kinds) * (groups * head) + begin * head
        source, target = ((pages[:, None] * self.page_bytes + within).ravel() for pages in (theirs, mine))
        return self._window.get(rank, source, (end - begin) * head, self._window.node, target)

    def sync(self) -> None:
        """Let what this rank wrote be seen by fetches of other nodes that come behind a later collective."""
        self._window.sync()

    def check(self, pages: Pages) -> None:
        """Raise InternalError unless all these numbers are pages of this node.  Local."""
        self._check(self._rank, pages)

    def close(self) -> None:
        """Collective over the world: free the memory.  No tensor over it may be touched afterwards."""
        self.tensor = self.rows = torch.empty(0, dtype=self.dtype)
        self._window.close()

    def _check(self, rank: int, numbers: Pages) -> None:
        own, block = int(self._pages_of[rank]), self._window.block_bytes(rank)
        stride = int(self._window.sizes[rank]) // self.page_bytes
        wrong = (numbers < 0) | (numbers >= block // self.page_bytes) | (numbers % stride >= own)
        if wrong.any():
            raise InternalError(
                f"page {numbers[wrong][0]} is none of the node of rank {rank}: each of its ranks has {own} pages, "
                f"numbered from multiples of {stride} on, up to {block // self.page_bytes}"
            )


def segment_bytes(pages: int, page_bytes: int, rows_bytes: int) -> int:
    """Return the bytes of a segment: pages, then rows, up to a multiple of both a page and GRAIN; pure."""
    whole = lcm(page_bytes, GRAIN)
    return -(-(pages * page_bytes + rows_bytes) // whole) * whole
