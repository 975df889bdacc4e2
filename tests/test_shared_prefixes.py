"""Laws of shared prefixes on a rank: computed once, shared rightly, kept as long as needed and no longer.

Two ranks of a node run without a model, and what lies in every page, at home and on a device, is written down: at each
place of a page the hash of all tokens up to there, which is what KV is a function of. So a page that is shared wrongly,
freed too early, or written by somebody who borrows it, is seen by whoever reads it next.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from moving_ranks import Broken

from bgmpi.backlog import Entry
from bgmpi.errors import BgmpiError
from bgmpi.eviction import Way
from bgmpi.kernels.cpu import CpuBackend
from bgmpi.kv_places import KvPlaces
from bgmpi.kv_stream import KvStream
from bgmpi.migration import _receive, parcel_of
from bgmpi.request import Request, Sampling
from bgmpi.sequence_manager import SequenceManager
from bgmpi.shared_prefixes import NO_ONE, Prefix, SharedPrefixes
from bgmpi.transcript import Transcript

PAGE_TOKENS = 4
TIERS: dict[str, dict[str, Any]] = {
    "in place": {},
    "small device": {"device_pages": 9, "streamed_most": 40},
    "device": {"device_pages": 25, "streamed_most": 40},
    "device, others wait": {"device_pages": 14, "streamed_most": 14, "stream": False},
}
#: The prefixes of the made-up job: tokens and parent, by number.  Not all end where a page ends.
TREE = {0: (6, NO_ONE), 1: (13, 0), 2: (8, 0), 3: (15, 1), 4: (5, NO_ONE)}


def tokens_of(number: int) -> list[int]:
    depth, parent = TREE[number]
    before = tokens_of(parent) if parent != NO_ONE else []
    return before + [10 * number + place for place in range(len(before), depth)]


def path_of(number: int) -> tuple[Prefix, ...]:
    if number == NO_ONE:
        return ()
    depth, parent = TREE[number]
    return (*path_of(parent), Prefix(number, depth))


def hashes(tokens: list[int]) -> list[int]:
    """Return what KV at each place is a function of."""
    answer, so_far = [], 17
    for token in tokens:
        so_far = hash((so_far, token))
        answer.append(so_far)
    return answer


class Node:
    """The memory of a node: what stands at every place of every page, int64 [pages, one layer, PAGE_TOKENS]."""

    def __init__(self) -> None:
        self.home = torch.zeros(1100, 1, PAGE_TOKENS, dtype=torch.int64)
        self.near = True
        self.broken = False
        self.page_bytes = 1

    def same_node(self, rank: int) -> bool:
        return self.near

    def fetch(self, rank: int, theirs: np.ndarray, mine: np.ndarray) -> Any:
        if self.broken:
            return Broken(BgmpiError("the copy failed"))
        self.home[mine] = self.home[theirs]
        return Broken.__new__(Arrived)


class Arrived(Broken):
    def wait(self) -> None:
        pass


class Ranks(RuleBasedStateMachine):
    """Two ranks, and a rank 0 that may have more of some prefixes for each."""

    def __init__(self) -> None:
        super().__init__()
        self.node = Node()
        self.names = 0
        self.ended: list[int] = []
        #: the prefixes of which rank 0 has more for a rank
        self.more: list[set[int]] = [set(), set()]

    @initialize(pages=st.integers(14, 40), slots=st.integers(1, 6), budget=st.integers(6, 24),
                tier=st.sampled_from([*TIERS]))
    def open(self, pages: int, slots: int, budget: int, tier: str) -> None:
        places = [
            KvPlaces(slots=slots, page_tokens=PAGE_TOKENS, pages=pages, first=1000 * rank, **TIERS[tier])
            for rank in range(2)
        ]
        self.ranks = [SequenceManager(one, slots=slots, budget=budget, most_tokens=100) for one in places]
        self.streams = [
            KvStream(CpuBackend(None, 1), self.node.home, device_pages=TIERS[tier].get("device_pages"), buffer_pages=0,
                     buffers=0, spill=None)
            for _ in range(2)
        ]  # fmt: skip

    @rule(rank=st.integers(0, 1), behind=st.sampled_from([NO_ONE, *TREE]), more=st.booleans(),
          sizes=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=5))
    def admit(self, rank: int, behind: int, more: bool, sizes: list[tuple[int, int]]) -> None:
        """Prompts that go on behind one prefix; rank 0 has more of it, or not."""
        shared = tokens_of(behind) if behind != NO_ONE else []
        for number, (own, new) in enumerate(sizes):
            name, self.names = self.names, self.names + 1
            path = tuple(
                Prefix(one.number, one.depth, number < len(sizes) - 1 or self.has_more(rank, one.number, behind, more))
                for one in path_of(behind)
            )  # fmt: skip
            self.more[rank] = self.more[rank] - {one.number for one in path} | {one.number for one in path if one.more}
            prompt = np.array([*shared, *(1000 * name + i for i in range(own))], np.int32)
            self.ranks[rank].prefixes.enter(name, path, told=True)
            self.ranks[rank].admit([Entry(name, prompt, len(prompt), len(prompt) + new, prefixes=path)])

    def has_more(self, rank: int, number: int, behind: int, more: bool) -> bool:
        """Say whether rank 0 has more of a prefix: of one that goes on behind it, or of itself."""
        others = self.more[rank] - {one.number for one in path_of(behind)}
        return more or any(number in (one.number for one in path_of(other)) for other in others)

    @rule(rank=st.integers(0, 1), numbers=st.sets(st.sampled_from([*TREE])))
    def close(self, rank: int, numbers: set[int]) -> None:
        whole = {one for one in TREE if any(above.number in numbers for above in path_of(one))}
        self.more[rank] -= whole
        self.ranks[rank].prefixes.close(whole)

    @rule(rank=st.integers(0, 1), steps=st.integers(1, 6))
    def run(self, rank: int, steps: int) -> None:
        self.boundary(rank)
        for _ in range(steps):
            self.step(rank)

    def boundary(self, rank: int) -> None:
        manager, stream = self.ranks[rank], self.streams[rank]
        while (eviction := manager.evict()) is not None:
            if eviction.way is Way.DEMOTE:
                stream.demote(manager.places, eviction.slots, manager.active_set.with_kv[eviction.slots])
            manager.evicted(eviction)
            manager.check()
        self.refill(rank)

    def refill(self, rank: int) -> None:
        manager, stream = self.ranks[rank], self.streams[rank]
        manager.refill()
        stream.copy_home(manager.take_copies())
        ready = manager.promote()
        if len(ready):
            stream.promote(manager.places, ready, manager.active_set.with_kv[ready])
            manager.promoted(ready)
        manager.check()

    def step(self, rank: int) -> None:
        manager = self.ranks[rank]
        plan = manager.plan()
        if plan is None:
            return
        active = manager.active_set
        for number, (slot, before, count) in enumerate(
            zip(plan.slots.tolist(), plan.before.tolist(), np.diff(plan.first).tolist(), strict=True)
        ):
            right = torch.tensor(hashes(active.tokens[slot, : active.known[slot]].tolist()))
            resident = number < plan.resident
            row = (manager.places.compute if resident else manager.kv).row(slot)
            pages = self.streams[rank].pages_of(0) if resident else self.node.home[:, 0]
            places = torch.from_numpy(row).long().repeat_interleave(PAGE_TOKENS) * PAGE_TOKENS
            places += torch.arange(len(places)) % PAGE_TOKENS
            have = pages.flatten()[places[:before]] if resident else self.node.home.flatten()[places[:before]]
            assert torch.equal(have, right[:before]), f"sequence {active.sequence[slot]} reads wrong KV"
            new = places[before : before + count]
            pages[new // PAGE_TOKENS, new % PAGE_TOKENS] = right[before : before + count]
        slots = plan.slots[plan.emits]
        none = np.zeros(len(slots), bool)
        ended = manager.commit(plan, (7 * active.known[slots]).astype(np.int32), none, none)
        self.ended += active.sequence[ended.slots].tolist()
        manager.retire(ended)
        manager.check()
        self.refill(rank)

    @rule(rank=st.integers(0, 1), mask=st.integers(1, 31))
    def suspend(self, rank: int, mask: int) -> None:
        manager = self.ranks[rank]
        chosen = manager.active[[mask >> place % 5 & 1 == 1 for place in range(len(manager.active))]]
        if manager.places.device is not None:
            resident = chosen[manager.places.resident[chosen]]
            self.streams[rank].demote(manager.places, resident, manager.active_set.with_kv[resident])
            manager.places.end_demotion(resident)
        manager.suspend(manager.active_set.sequence[chosen])

    @rule(rank=st.integers(0, 1))
    def combine(self, rank: int) -> None:
        backlog = self.ranks[rank].backlog
        backlog.combine(np.array(list(backlog._held), np.int64))

    @rule(source=st.integers(0, 1), mask=st.integers(1, 31), way=st.sampled_from(["near", "far", "broken"]))
    def migrate(self, source: int, mask: int, way: str) -> None:
        mine, theirs = self.ranks[source], self.ranks[1 - source]
        self.suspend(source, mask)
        self.node.near, self.node.broken = way == "near", way == "broken"
        names = [one.sequence for place, one in enumerate(mine.backlog) if mask >> place % 5 & 1]
        transcript = Transcript(Request(0, "", "", np.empty(0, np.int32), 1, Sampling(0)), 0, 0.0, False)
        parcels = [parcel_of(one, transcript, mine.prefixes) for one in mine.leave(np.array(names, np.int64))]
        taken, _ = _receive(parcels, source, self.node, theirs)  # type: ignore[arg-type]
        for _, entry, _ in taken:
            theirs.arrive(entry)
        given = {parcel.sequence: pages for parcel, _, pages in taken}
        for name in names:
            if name in given:
                mine.gone(name, given[name])
            else:
                mine.stay(name)

    @invariant()
    def every_law_holds(self) -> None:
        if not hasattr(self, "ranks"):
            return
        for manager in self.ranks:
            manager.check()
            parked = sum(len(one.home) for one in manager.backlog)
            assert manager.kv.parked == parked + manager.prefixes.pages, "a parked page is nobody's"

    def teardown(self) -> None:
        """Everybody ends within a bound, and then nothing is left but what rank 0 has more of."""
        if not hasattr(self, "ranks"):
            return
        for rank, manager in enumerate(self.ranks):
            self.combine(rank)
            rounds = 60 + 30 * self.names
            while len(manager.active) or manager.backlog:
                self.boundary(rank)
                self.step(rank)
                rounds -= 1
                assert rounds, f"{len(manager.backlog)} sequences wait for ever"
            manager.prefixes.close(TREE)
            assert len(manager.prefixes) == 0, "a prefix stays after its last member ended"
            for pool in (manager.places.home, manager.places.device, manager.places.disk):
                assert pool is None or pool.free == pool.pages
        assert sorted(self.ended) == list(range(self.names))


def test_pages_are_shared_rightly_and_freed_in_any_history() -> None:
    run_state_machine_as_test(
        Ranks, settings=settings(max_examples=60, stateful_step_count=25, deadline=None,
                                 phases=(Phase.explicit, Phase.generate)))  # fmt: skip


@pytest.mark.faults
@pytest.mark.timeout(900)
def test_pages_are_shared_rightly_and_freed_in_many_histories() -> None:
    run_state_machine_as_test(Ranks, settings=settings(max_examples=2000, stateful_step_count=60, deadline=None))


# --- one by one -----------------------------------------------------------------------------------------------------


def group(*suffixes: int, behind: int = 1, new: int = 4) -> list[Entry]:
    shared = tokens_of(behind)
    return [
        Entry(name, np.array([*shared, *(100 * name + i for i in range(own))], np.int32), len(shared) + own,
              len(shared) + own + new, prefixes=path_of(behind))
        for name, own in enumerate(suffixes)
    ]  # fmt: skip


def admitted(entries: list[Entry], *, pages: int = 64, slots: int = 8, budget: int = 64) -> SequenceManager:
    places = KvPlaces(slots=slots, page_tokens=PAGE_TOKENS, pages=pages)
    manager = SequenceManager(places, slots=slots, budget=budget, most_tokens=100)
    for one in entries:
        manager.prefixes.enter(one.sequence, one.prefixes, told=True)
    manager.admit(entries)
    manager.refill()
    return manager


def step(manager: SequenceManager) -> list[int]:
    """Make a step; -> the tokens that each sequence computed."""
    plan = manager.plan()
    assert plan is not None
    drawn = int(plan.emits.sum())
    ended = manager.commit(plan, np.full(drawn, 3, np.int32), np.zeros(drawn, bool), np.zeros(drawn, bool))
    manager.retire(ended)
    if ended.published or len(ended.slots):
        manager.refill()
    manager.check()
    return np.diff(plan.first).tolist()


def test_a_prefix_is_computed_once_and_the_others_begin_behind_it() -> None:
    manager = admitted(group(2, 3, 4))
    assert step(manager) == [13 + 2], "the first carries, the others wait"
    assert step(manager) == [1, 3, 4], "and begin at the token behind the prefix, in the same round"
    assert manager.tokens.reused == 2 * 13
    assert manager.tokens.prompt == 13 + 2 + 3 + 4


def test_full_pages_are_the_same_and_the_tail_is_copied() -> None:
    manager = admitted(group(2, 3))
    step(manager)
    first, second = (manager.kv.row(slot).tolist() for slot in manager.active.tolist())
    assert first[:3] == second[:3] and not set(first[3:]) & set(second[3:])
    copies = manager.take_copies()
    assert copies[0][0] == first[1], "the tail of the prefix of 6 tokens"
    assert (first[3], copies[1][1]) == copies[1], "the tail of the one of 13, as its carrier computed it"
    assert copies[2] == (copies[1][1], second[3])


def test_a_prefix_lasts_until_its_last_member_ended() -> None:
    entries = group(2, 3, new=1)
    entries[1] = Entry(1, entries[1].tokens, entries[1].prompt, entries[1].prompt + 3, prefixes=entries[1].prefixes)
    manager = admitted(entries)
    step(manager)
    assert manager.active_set.sequence[manager.active].tolist() == [1], "the carrier ended"
    assert len(manager.prefixes) == 2
    for _ in range(3):
        step(manager)
    assert not len(manager.active) and len(manager.prefixes) == 0 and manager.kv.free == 64


def test_a_prefix_of_which_rank_0_has_more_waits_for_them() -> None:
    entries = group(2, new=1, behind=4)
    manager = admitted([])
    manager.prefixes.enter(0, (Prefix(4, 5, more=True),), told=True)
    manager.admit(entries)
    manager.refill()
    step(manager)
    assert len(manager.prefixes) == 1 and manager.kv.free == 64 - 2
    manager.prefixes.close([4])
    assert len(manager.prefixes) == 0 and manager.kv.free == 64


def test_a_carrier_that_yields_lets_another_carry() -> None:
    manager = admitted(group(20, 20), budget=8)
    step(manager)
    manager.suspend(np.array([0]))
    manager.refill()
    assert manager.active_set.sequence[manager.active].tolist() == [1]
    assert step(manager) == [8]


def test_groups_do_not_wait_for_one_another() -> None:
    others = [Entry(10 + one.sequence, one.tokens + 500, one.prompt, one.most, prefixes=(Prefix(9, 13),))
              for one in group(2, 2)]  # fmt: skip
    manager = admitted([*group(2, 2), *others])
    assert manager.active_set.sequence[manager.active].tolist() == [0, 10]


def test_whoever_has_other_tokens_than_the_prefix_computes_all_of_them() -> None:
    entries = group(3, 3)
    wrong = entries[1].tokens.copy()
    wrong[2] += 1
    manager = admitted([entries[0], Entry(1, wrong, entries[1].prompt, entries[1].most, prefixes=path_of(1))])
    step(manager)
    assert step(manager) == [1, 16]
    assert manager.tokens.reused == 0


def test_nobody_enters_where_nothing_is_shared() -> None:
    prefixes = SharedPrefixes(KvPlaces(slots=1, page_tokens=4, pages=4).home)
    prefixes.enter(3, (), told=True)
    prefixes.leave(3)
    assert prefixes.path(3) == () and len(prefixes) == 0
