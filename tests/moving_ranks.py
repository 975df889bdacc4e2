"""Ranks whose sequences move: real windows, stores and sequence managers, with made-up tokens and KV.

What a page must hold is a function of (sequence, page, layer, head), so any rank can tell whether bytes are right.
Bodies of tests run it on ranks: `python_on_ranks` and `virtual_nodes` ship a function's source, which imports this
(the folder of tests is then on PYTHONPATH).  It knows nothing of models, scheduling or pytest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from bgmpi.backlog import Entry
from bgmpi.io.host_store import HostStore
from bgmpi.io.tokenizer import Tokenizer
from bgmpi.kv_places import KvPlaces
from bgmpi.migration import Migrated, migrate
from bgmpi.primitives import Migrate
from bgmpi.request import Request, Sampling
from bgmpi.sequence_manager import SequenceManager
from bgmpi.transcript import Transcript, open_transcript
from bgmpi.world import World

PAGE_TOKENS = 4
LAYERS = 3
#: K and V, four heads, a page of tokens, eight numbers.
PAGE = (2, 4, PAGE_TOKENS, 8)
Pages = np.ndarray[Any, np.dtype[np.int64]]


def content(sequence: int, ordinal: int, with_kv: int) -> torch.Tensor:
    """Return what page `ordinal` of a sequence with so many tokens of KV holds, int16 [LAYERS, *PAGE]."""
    random = np.random.default_rng([sequence, ordinal])
    page = random.integers(-(2**15), 2**15, (LAYERS, *PAGE), np.int16)
    page[:, :, :, max(0, with_kv - ordinal * PAGE_TOKENS) :] = 0
    return torch.from_numpy(page)


class Mover:
    """One rank.  pages: KV pages; the other words are those of `KvPlaces`."""

    def __init__(self, world: World, tokenizer: Tokenizer | None = None, *, pages: int = 24, slots: int = 4,
                 layers: int = LAYERS, page: tuple[int, ...] = PAGE, **places: Any) -> None:
        self.world, self.tokenizer = world, tokenizer
        self.store = HostStore(world, pages=pages, layers=layers, page_shape=page, dtype=torch.bfloat16)
        self.raw = self.store.tensor.view(torch.int16)
        kv = KvPlaces(slots=slots, page_tokens=PAGE_TOKENS, pages=self.store.pages, first=self.store.first, **places)
        self.manager = SequenceManager(kv, slots=slots, budget=64, most_tokens=200)
        self.live: dict[int, Transcript] = {}
        self.computed: list[int] = []
        #: the heads whose KV this rank computes, while it is one of a group
        self.heads = slice(None)

    def __enter__(self) -> Mover:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if error is None:
            self.raw = torch.empty(0)
            self.store.close()

    def admit(
        self, sequence: int, prompt: int, most: int, sampling: Sampling | None = None, *, level: int = 0
    ) -> None:
        """Take a sequence with a made-up prompt into the backlog."""
        tokens = np.arange(sequence, sequence + prompt, dtype=np.int32) % 400
        if self.tokenizer is not None:
            asks = sampling or Sampling(seed=sequence)
            request = Request(sequence, f"r{sequence}", "/v1/completions", tokens, 1, asks)
            self.live[sequence] = open_transcript(request, 0, 0.25, self.tokenizer)
        self.manager.admit([Entry(sequence, tokens, prompt, most, level=level)])

    def boundary(self) -> None:
        """Make room, refill; no bytes move, because nothing here has a device."""
        while (eviction := self.manager.evict()) is not None:
            self.manager.evicted(eviction)
        self.manager.refill()

    def step(self) -> None:
        """Make one step: each sequence's new KV is written, and its next token made up."""
        plan = self.manager.plan()
        if plan is None:
            return
        slots = plan.slots[plan.emits]
        self.computed += (self.manager.active_set.sequence[plan.slots]).tolist()
        none = np.zeros(len(slots), bool)
        active = self.manager.active_set
        tokens = ((active.sequence[slots] + active.known[slots]) % 400).astype(np.int32)
        ended = self.manager.commit(plan, tokens, none, none)
        for slot in plan.slots.tolist():
            self.write(slot)
        self.manager.retire(ended)
        self.manager.check()

    def write(self, slot: int) -> None:
        """Fill all pages of a slot that have KV."""
        for _, page, right in self._pages(slot):
            self.raw[page][:, :, self.heads] = right[:, :, self.heads]

    def _pages(self, slot: int) -> Iterator[tuple[int, int, torch.Tensor]]:
        """Yield ordinal, number and right content of the pages with KV that a slot has at home."""
        kv, with_kv = self.manager.kv, int(self.manager.active_set.with_kv[slot])
        for ordinal in range(int(kv.base[slot]), kv.pages_for(with_kv)):
            page = int(kv.table[slot, ordinal - kv.base[slot]])
            yield ordinal, page, content(int(self.manager.active_set.sequence[slot]), ordinal, with_kv)

    def run(self, steps: int) -> None:
        """Make a round of steps."""
        self.boundary()
        for _ in range(steps):
            self.step()

    def suspend(self, *sequences: int, resume: bool = False) -> None:
        """Hold active sequences, or (resume) let them queue."""
        names = np.array(sequences, np.int64)
        self.manager.suspend(names)
        if resume:
            self.manager.backlog.combine(names)

    def migrate(self, orders: list[Migrate]) -> Migrated:
        """Collective over the world."""
        assert self.tokenizer is not None
        return migrate(orders, world=self.world, store=self.store, manager=self.manager, live=self.live,
                       tokenizer=self.tokenizer)

    def waiting(self) -> dict[int, Entry]:
        """Return what is not active here."""
        return {entry.sequence: entry for entry in self.manager.backlog}

    def here(self) -> set[int]:
        """Return all sequences of this rank."""
        return {*self.waiting(), *self.manager.active_set.sequence[self.manager.active].tolist()}

    def moves(self) -> list[tuple[int, list[int]]]:
        """Return what the next report would tell."""
        return [(moved.state, sorted(moved.sequences.tolist())) for moved in self.manager.take_moves()]

    def check_bytes(self) -> None:
        """Prove the KV of every sequence of this rank, active or not, byte for byte."""
        for entry in self.manager.backlog:
            assert len(entry.home) == self.manager.kv.pages_for(entry.with_kv) - len(entry.disk)
            for ordinal, page in enumerate(entry.home.tolist(), len(entry.disk)):
                right = content(entry.sequence, ordinal, entry.with_kv)
                assert torch.equal(self.raw[page], right), f"sequence {entry.sequence}, page {ordinal} ({page})"
        for slot in self.manager.active.tolist():
            for ordinal, page, right in self._pages(slot):
                name = self.manager.active_set.sequence[slot]
                same = torch.equal(self.raw[page][:, :, self.heads], right[:, :, self.heads])
                assert same, f"sequence {name}, page {ordinal} ({page})"

    def check_node(self) -> None:
        """Collective over the world: every page number of every node has exactly one holder, pools kept their size, and
        every sequence has one owner."""
        self.manager.check()
        kv = self.manager.kv
        parked = [page for entry in self.manager.backlog for page in entry.home.tolist()]
        assert kv.parked == len(parked)
        mine = [*kv._stack[: kv._unheld].tolist(), *kv.table[kv.table >= 0].tolist(), *parked]
        assert len(mine) == kv.pages == self.store.pages, f"{len(mine)} numbers, the pool has {kv.pages}"
        self.store.check(np.array(mine, np.int64))
        padded = np.full(100, -1, np.int64)
        padded[: len(mine)] = mine
        everyone = self.world.all_gather_counts(padded)
        node = everyone[self.world.node_of == self.world.node_of[self.world.rank]]
        numbers = node[node >= 0]
        assert len(np.unique(numbers)) == len(numbers), "a page number has two holders"
        names = np.full(100, -1, np.int64)
        names[: len(self.here())] = sorted(self.here())
        owned = self.world.all_gather_counts(names)
        assert len(np.unique(owned[owned >= 0])) == (owned >= 0).sum(), "a sequence has two owners"


def orders(*moves: tuple[Sequence[int], int, int]) -> list[Migrate]:
    """Return migrations (sequences, source, target)."""
    return [Migrate(np.array(names, np.int64), source, target) for names, source, target in moves]


def far(store: HostStore, me: int) -> None:
    """Let all other ranks count as those of other nodes, so that their pages are copied."""
    store.same_node = lambda rank: rank == me  # type: ignore[method-assign]


class Broken:
    """The receipt of a copy that failed."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        raise self.error


def raises(error: Exception) -> Callable[..., Broken]:
    """Return a fetch whose receipt raises."""
    return lambda *_: Broken(error)
