"""One rank's sequence manager without a device: what a rank does at a page boundary and in a step, with made-up tokens.

The token of a sequence at a place is a function of both, so whoever has its tokens can tell whether they are right.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bgmpi.backlog import Entry
from bgmpi.eviction import Hold
from bgmpi.kv_places import KvPlaces
from bgmpi.sequence_manager import SequenceManager

TIERS: dict[str, dict[str, Any]] = {
    "in place": {},
    "device, streamed decode": {"device_pages": 5, "streamed_most": 15},
    "device, others wait": {"device_pages": 15, "streamed_most": 15, "stream": False},
    "disk": {"disk_pages": 30, "streamed_most": 15},
    "small disk": {"disk_pages": 5, "streamed_most": 15},
    "device and disk": {"device_pages": 6, "disk_pages": 40, "streamed_most": 15},
}


def entry(sequence: int, prompt: int, new: int, level: int = 0) -> Entry:
    return Entry(sequence, np.arange(prompt, dtype=np.int32), prompt, prompt + new, level=level)


def make(
    slots: int = 4, pages: int = 64, page_tokens: int = 4, budget: int = 16, hold: Hold = Hold.LONGEST, **places: Any
) -> SequenceManager:
    kv = KvPlaces(slots=slots, page_tokens=page_tokens, pages=pages, **places)
    return SequenceManager(kv, slots=slots, budget=budget, most_tokens=200, hold=hold)


def boundary(manager: SequenceManager) -> list[int]:
    """Do what a rank does at a page boundary, bytes left out; -> the sequences that gave up their KV."""
    gave_up: list[int] = []
    for _ in range(200):
        eviction = manager.evict()
        if eviction is None:
            break
        names = manager.active_set.sequence[eviction.slots].tolist()
        if manager.evicted(eviction):
            gave_up += names
        manager.check()
    else:
        raise AssertionError("evictions without end")
    manager.refill()
    if len(back := manager.recall()):
        manager.recalled(back)
    manager.check()
    manager.promoted(manager.promote())
    manager.check()
    return gave_up


def advance(manager: SequenceManager, stop_after: dict[int, int] | None = None) -> list[tuple[int, int]]:
    """Make one step with made-up tokens; -> (sequence, tokens known) of those that ended."""
    plan = manager.plan()
    assert plan is not None
    slots = plan.slots[plan.emits]
    tokens = (manager.active_set.sequence[slots] * 1000 + manager.active_set.known[slots]).astype(np.int32)
    decoded = manager.active_set.known[slots] - manager.active_set.prompt[slots] + 1
    limits = np.array([(stop_after or {}).get(int(s), 10**9) for s in manager.active_set.sequence[slots]])
    ended = manager.commit(plan, tokens, decoded >= limits, np.zeros(len(slots), bool))
    names = [(int(manager.active_set.sequence[s]), int(manager.active_set.known[s])) for s in ended.slots]
    manager.retire(ended)
    manager.check()
    return names


def run_to_end(manager: SequenceManager, stops: dict[int, int]) -> dict[int, int]:
    """Run rounds of one page until all ended; -> tokens known at the end by sequence."""
    ended: dict[int, int] = {}
    for _ in range(2000):
        boundary(manager)
        if not len(manager.active):
            assert len(manager.backlog) == 0
            return ended
        for _ in range(manager.kv.page_tokens):
            if manager.plan() is None:
                break
            for name, known in advance(manager, stops):
                assert name not in ended
                ended[name] = known
            manager.refill()
            manager.promoted(manager.promote())
    raise AssertionError("livelock: 2,000 rounds and not all sequences ended")
