"""What a step computes, and how it is chosen from the active set.

Prefill and decode are not told apart.  An active sequence has `known` tokens of which the first `with_kv` are in the
cache; a step computes missing ones: single missing tokens first, then chunks, until its budget is spent.  So every
decoding sequence advances in every step and prompts fill what is left of it (continuous batching, chunked prefill).

Pure numpy.  Choosing may hold disk pages for what the step will fill, nothing else changes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bgmpi.active_set import ActiveSet
from bgmpi.kv_places import KvPlaces


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one step computes.  S sequences, T tokens.

    slots int64 [S]; first int32 [S + 1], token offsets; before int32 [S], tokens already in the cache; ids, positions
    int64 [T]; emits bool [S], the sequences whose last known token is in this step and that draw a next one.  The first
    `resident` sequences have their KV where they compute, the others are streamed.
    """

    slots: NDArray[np.int64]
    first: NDArray[np.int32]
    before: NDArray[np.int32]
    ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    emits: NDArray[np.bool_]
    resident: int


def plan_step(active: ActiveSet, places: KvPlaces, budget: int) -> StepPlan | None:
    """Choose what the next step computes, at most `budget` tokens; None when nothing can run."""
    slots = active.slots
    missing = active.missing(slots)
    if not places.stream:
        runs = places.resident[slots] | (missing > 1)
        slots, missing = slots[runs], missing[runs]
    if not len(slots):
        return None
    resident = places.resident[slots]
    count = missing
    if (missing != 1).any():
        slots, missing, resident = _sorted(missing > 1, slots, missing, resident)
        count = np.clip(budget - (np.cumsum(missing) - missing), 0, missing)
        slots, count, resident = slots[count > 0], count[count > 0], resident[count > 0]
    if not resident.all():
        slots, count, resident = _sorted(~resident, slots, count, resident)
        places.reserve_disk(slots[~resident], active.with_kv[slots[~resident]] + count[~resident])
    before = active.with_kv[slots]
    first = np.zeros(len(slots) + 1, np.int32)
    np.cumsum(count, out=first[1:])
    which = np.repeat(slots, count)
    positions = np.arange(first[-1]) + np.repeat(before - first[:-1], count)
    ids = active.tokens[which, positions].astype(np.int64)
    known = active.known[slots]
    emits = (before + count == known) & (known < active.most[slots])
    return StepPlan(slots, first, before.astype(np.int32), ids, positions, emits, int(resident.sum()))


def _sorted(late: NDArray[np.bool_], *arrays: NDArray[Any]) -> tuple[NDArray[Any], ...]:
    """Return the arrays with the `late` places behind the others, each part in its order."""
    order = np.argsort(late, kind="stable")
    return tuple(array[order] for array in arrays)
