"""Ragged data of the few slots that have any: stop ids, biases, token counts.

Most sequences ask for none of these, some for a handful, and a repetition penalty needs every distinct token of the
sequence.  Arrays over all slots would be as wide as the widest, so a slot gets a row only while it has data; rows and
width grow by doubling, and everything is given back when the last slot goes.  All columns of one SlotRows have the same
ragged shape, padded to the right.

It knows nothing of what the columns mean.  Rejected: a dictionary of per-slot arrays, which costs Python per sequence
at every step.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from bgmpi.errors import InternalError


class SlotRows:
    """Columns [slots, ragged].  `columns` names each column's dtype and the value of its padding."""

    def __init__(self, slots: int, columns: dict[str, tuple[Any, Any]]) -> None:
        self._columns = columns
        self._row: NDArray[np.int64] = np.full(slots, -1, np.int64)
        self._forget()

    def _forget(self) -> None:
        self.width = 0
        self.length: NDArray[np.int64] = np.zeros(0, np.int64)
        self._free: list[int] = []
        self._data = {name: np.full((0, 0), pad, dtype) for name, (dtype, pad) in self._columns.items()}

    def __len__(self) -> int:
        return len(self.length) - len(self._free)

    def put(self, slot: int, **values: NDArray[Any]) -> None:
        """Give a slot its data: one array [k] a column, all of one length."""
        if self._row[slot] >= 0:
            raise InternalError(f"slot {slot} already holds data; clear it before it is placed again")
        length = len(next(iter(values.values())))
        if not self._free:
            self._grow_rows()
        self._grow_width(length)
        row = self._free.pop()
        self._row[slot] = row
        self.length[row] = length
        for name, data in self._data.items():
            data[row, :length] = values[name]

    def drop(self, slot: int) -> None:
        """Forget a slot's data; a slot without any is fine."""
        row = int(self._row[slot])
        if row < 0:
            return
        self._row[slot] = -1
        self.length[row] = 0
        for name, data in self._data.items():
            data[row] = self._columns[name][1]
        self._free.append(row)
        if not len(self):
            self._forget()

    def take(self, slots: NDArray[np.int64], name: str) -> NDArray[Any]:
        """Return one column of slots [n] that all have data, padded to the widest of them: [n, w]."""
        rows = self._row[slots]
        return self._data[name][rows, : int(self.length[rows].max(initial=0))]

    def flat(self, slots: NDArray[np.int64]) -> tuple[NDArray[np.int64], dict[str, NDArray[Any]]]:
        """Return all data of slots [n], end to end and without padding: which of `slots` each entry belongs to, int64
        [entries], and the columns, [entries] each.  Slots without data bring none."""
        which = np.flatnonzero(self._row[slots] >= 0)
        rows = self._row[slots[which]]
        owner, column = np.nonzero(np.arange(self.width) < self.length[rows, None])
        return which[owner], {name: data[rows[owner], column] for name, data in self._data.items()}

    def has(self, slots: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Say which of slots [n] have data."""
        return self._row[slots] >= 0

    def count(self, slots: NDArray[np.int64], key: str, keys: NDArray[Any], counter: str) -> None:
        """Add one to column `counter` where column `key` of slots [n] equals keys [n]; append the keys not found, with
        a count of one and padding in any other column.  Each slot at most once."""
        if not len(slots):
            return
        rows = self._row[slots]
        self._grow_width(int(self.length[rows].max()) + 1)
        hits = self._data[key][rows] == keys[:, None]
        found = hits.any(axis=1)
        columns = np.where(found, hits.argmax(axis=1), self.length[rows])
        self._data[key][rows, columns] = keys
        self._data[counter][rows, columns] += 1
        self.length[rows] += ~found

    def _grow_rows(self) -> None:
        old = len(self.length)
        new = max(4, 2 * old)
        self.length = np.concatenate((self.length, np.zeros(new - old, np.int64)))
        self._free.extend(range(new - 1, old - 1, -1))
        self._resize(new, self.width)

    def _grow_width(self, needed: int) -> None:
        if needed > self.width:
            self.width = max(8, needed, 2 * self.width)
            self._resize(len(self.length), self.width)

    def _resize(self, rows: int, width: int) -> None:
        for name, (dtype, pad) in self._columns.items():
            old = self._data[name]
            new = np.full((rows, width), pad, dtype)
            new[: old.shape[0], : old.shape[1]] = old
            self._data[name] = new
