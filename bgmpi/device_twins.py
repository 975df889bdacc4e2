"""Pages of shared prefixes on the device: each lies there once, however many resident sequences borrow it.

A page that is borrowed at home has a twin on the device while somebody resident reads it.  The first who comes brings
it, the last who goes gives it back.  Who borrows a page borrows all before it, so the pages that already have a twin
are always the first ones of a row.  Pure numpy; who copies the bytes is told how many twins are there already.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bgmpi.errors import InternalError
from bgmpi.paged_kv import PagedKV, Pages

NONE = -1


class DeviceTwins:
    """Twins in the pool `device`, in which they are parked.

    twin, readers: int32 [numbers at home], the page on the device or NONE, and how many resident slots borrow it.
    """

    def __init__(self, device: PagedKV) -> None:
        self._device = device
        self.twin: Pages = np.full(0, NONE, np.int32)
        self.readers: NDArray[np.int32] = np.zeros(0, np.int32)

    def missing(self, home: Pages) -> int:
        """Return how many of these pages, a row's first ones at home, int32 [k], have no twin."""
        self._grow(home)
        return int((self.twin[home] == NONE).sum())

    def borrow(self, home: Pages, spare: int) -> Pages | None:
        """Count one more reader of these pages and claim twins for those that have none -> the twins, int32 [k]; None
        and no change where fewer pages than that and `spare` are free."""
        lacking = home[len(home) - self.missing(home) :]
        claimed = self._device.claim(len(lacking), spare)
        if claimed is None:
            return None
        self.twin[lacking] = claimed
        self.readers[home] += 1
        return self.twin[home].copy()

    def give_back(self, home: Pages) -> None:
        """Count one reader less of these pages; twins without one are free."""
        self.readers[home] -= 1
        over = home[self.readers[home] == 0]
        self._device.release(self.twin[over])
        self.twin[over] = NONE

    def check(self, borrowed: Pages) -> None:
        """Raise InternalError unless readers are those of `borrowed`, int32 [n]: all pages at home whose twins resident
        slots borrow."""
        self._grow(borrowed)
        counted = np.bincount(borrowed, minlength=len(self.readers))
        if not np.array_equal(counted, self.readers) or ((self.twin == NONE) != (counted == 0)).any():
            raise InternalError("the readers of twins on the device are not the slots that borrow them")
        if self._device.parked != int((self.twin != NONE).sum()):
            raise InternalError(f"{self._device.parked} pages are parked on the device, twins are fewer or more")

    def _grow(self, home: Pages) -> None:
        more = int(home.max(initial=-1)) + 1 - len(self.twin)
        if more > 0:
            self.twin = np.concatenate((self.twin, np.full(more, NONE, np.int32)))
            self.readers = np.concatenate((self.readers, np.zeros(more, np.int32)))
