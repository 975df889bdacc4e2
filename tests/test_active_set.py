"""Laws of the rows of a rank's active sequences."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bgmpi.active_set import ActiveSet
from bgmpi.backlog import Entry
from bgmpi.errors import InternalError


def entry(sequence: int, prompt: int = 3, new: int = 5) -> Entry:
    return Entry(sequence, np.arange(prompt, dtype=np.int32) + sequence, prompt, prompt + new)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 50)), max_size=60))
def test_the_oldest_stand_first_and_every_slot_has_one_use(turns: list[tuple[bool, int]]) -> None:
    active = ActiveSet(5, most_tokens=100)
    inside: dict[int, int] = {}
    for order, (comes, draw) in enumerate(turns):
        if comes and active.free:
            expected = active.next_free()
            assert active.place(1000 * (draw % 7) + order, entry(order)) == expected
            inside[order] = 1000 * (draw % 7) + order
        elif inside and not comes:
            gone = sorted(inside)[draw % len(inside)]
            active.remove(active.slots_of(np.array([gone])))
            del inside[gone]
        active.check()
        assert active.sequence[active.slots].tolist() == sorted(inside, key=inside.__getitem__)
        assert active.free == 5 - len(inside)
    for name in inside:
        slot = int(active.slots_of(np.array([name]))[0])
        assert active.tokens[slot, :3].tolist() == [name, name + 1, name + 2]


def test_a_longer_sequence_widens_the_rows_and_changes_no_token() -> None:
    active = ActiveSet(2, most_tokens=5000)
    first = active.place(0, entry(0, prompt=200))
    second = active.place(1, entry(1, prompt=3000))
    assert active.tokens[first, :200].tolist() == list(range(200))
    assert active.tokens[second, :3000].tolist() == list(range(1, 3001))


def test_wider_rows_take_along_only_what_is_in_use() -> None:
    active = ActiveSet(3, most_tokens=5000)
    left, kept = active.place(0, entry(0, prompt=200)), active.place(1, entry(1, prompt=150))
    active.remove(np.array([left]))
    active._widen(3000)
    assert active.tokens[kept, :150].tolist() == list(range(1, 151))
    assert not active.tokens[left].any()


def test_what_is_missing_decoded_and_generated_follows_from_the_counts() -> None:
    active = ActiveSet(2, most_tokens=100)
    slot = active.place(0, entry(7, prompt=4, new=9))
    slots = np.array([slot])
    assert active.missing(slots).tolist() == [4]
    active.tokens[slot, 4:6] = 70, 71
    active.known[slot], active.with_kv[slot] = 6, 5
    assert active.missing(slots).tolist() == [1]
    assert active.decoded(slots).tolist() == [2]
    assert active.generated(slot).tolist() == [70, 71]


def test_a_stranger_and_impossible_counts_are_faults() -> None:
    active = ActiveSet(2, most_tokens=100)
    slot = active.place(0, entry(7))
    with pytest.raises(InternalError, match=r"sequences \[8\] are not active"):
        active.slots_of(np.array([7, 8]))
    active.with_kv[slot] = 99
    with pytest.raises(InternalError, match="with_kv <= known <= most"):
        active.check()
