"""Ragged slot data against the plain dictionary that it replaces."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bgmpi.errors import InternalError
from bgmpi.slot_rows import SlotRows

SLOTS = 6
COLUMNS = {"id": (np.int64, -1), "seen": (np.int32, 0)}


def compare(rows: SlotRows, model: dict[int, dict[int, int]]) -> None:
    assert len(rows) == len(model)
    slots = np.arange(SLOTS)
    assert rows.has(slots).tolist() == [slot in model for slot in range(SLOTS)]
    which, data = rows.flat(slots[::-1])
    found = [(int(slots[::-1][w]), int(i), int(n)) for w, i, n in zip(which, data["id"], data["seen"], strict=True)]
    expected = [(slot, i, n) for slot in reversed(range(SLOTS)) for i, n in model.get(slot, {}).items()]
    assert found == expected
    held = np.array(sorted(model), np.int64)
    for slot, padded in zip(held.tolist(), rows.take(held, "id"), strict=True):
        ids = list(model[slot])
        assert padded.tolist() == ids + [-1] * (len(padded) - len(ids))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("pdc"), st.integers(0, SLOTS - 1), st.integers(0, 12)), max_size=60))
def test_rows_hold_what_a_dictionary_would_hold(moves: list[tuple[str, int, int]]) -> None:
    rows = SlotRows(SLOTS, COLUMNS)
    model: dict[int, dict[int, int]] = {}
    for move, slot, number in moves:
        if move == "p" and slot not in model:
            model[slot] = {key: key + 1 for key in range(number)}
            rows.put(slot, id=np.arange(number), seen=np.arange(1, number + 1))
        elif move == "d":
            model.pop(slot, None)
            rows.drop(slot)
        elif move == "c":
            held = np.array(sorted(model), np.int64)
            rows.count(held, "id", held + number, "seen")
            for one in held.tolist():
                model[one][one + number] = model[one].get(one + number, 0) + 1
        compare(rows, model)


def test_everything_is_given_back_with_the_last_slot() -> None:
    rows = SlotRows(SLOTS, COLUMNS)
    rows.put(1, id=np.arange(1000), seen=np.ones(1000))
    rows.drop(1)
    assert rows.width == 0 and len(rows.length) == 0


def test_a_slot_with_data_is_not_overwritten() -> None:
    rows = SlotRows(SLOTS, COLUMNS)
    rows.put(1, id=np.arange(2), seen=np.ones(2))
    with pytest.raises(InternalError, match="slot 1 already holds"):
        rows.put(1, id=np.arange(2), seen=np.ones(2))
