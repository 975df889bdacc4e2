"""Who must make room where pages run short, and how.

Of the least urgent it is whom the hold policy names: the longest decoded (the paper) or the shortest (its released
code, and what benchmarks/hold_policy.py shows to be better by one to five percent where answers differ in length). On a
device the yielded KV goes home; at home its full pages go to the disk tier; where there is none the sequence gives its
KV up and computes it again, its tokens are kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from bgmpi.active_set import ActiveSet
from bgmpi.errors import InternalError
from bgmpi.kv_places import KvPlaces


class Hold(StrEnum):
    """Who yields first when pages run short."""

    LONGEST = "longest-decoded"
    SHORTEST = "shortest-decoded"


class Way(StrEnum):
    """What becomes of the KV of slots that must make room: DEMOTE: device to home, GIVE_UP: thrown away, SPILL: full
    pages from home to disk."""

    DEMOTE = "demote"
    GIVE_UP = "give up"
    SPILL = "spill"


@dataclass(frozen=True, slots=True)
class Eviction:
    """Slots int64 [k] that must make room, and how.  Nothing has changed yet but what `evicted` commits."""

    way: Way
    slots: NDArray[np.int64]


def choose_spills(active: ActiveSet, places: KvPlaces, pages: int) -> Eviction | None:
    """Hold disk pages for the full pages of those that have most at home, until `pages` would become free."""
    slots = active.slots
    full = places.can_spill(slots, active.with_kv[slots])
    chosen: list[int] = []
    for place in np.argsort(-full, kind="stable").tolist():
        slot, count = int(slots[place]), int(full[place])
        if pages <= 0 or not count or not places.begin_spill(slot, count):
            break
        chosen.append(slot)
        pages -= count
    return Eviction(Way.SPILL, np.array(chosen, np.int64)) if chosen else None


def choose_victim(active: ActiveSet, candidates: NDArray[np.int64], hold: Hold) -> NDArray[np.int64]:
    """Choose who yields of `candidates`, int64 [k], of the least urgent by the hold policy, the youngest of equals:
    slots int64 [1].  InternalError without candidates."""
    if not len(candidates):
        raise InternalError(f"sequence {active.sequence[active.slots[0]]} is alone and has no page left")
    level = active.level(candidates)
    candidates = candidates[level == level.max()]
    decoded = active.decoded(candidates)
    best = decoded.max() if hold is Hold.LONGEST else decoded.min()
    victim: NDArray[np.int64] = candidates[decoded == best][-1:]
    return victim
