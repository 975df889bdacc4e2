"""Pages on their way: which come from where, which go back where, and that bytes are the same afterwards."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bgmpi.backlog import Entry
from bgmpi.kv_places import KvPlaces
from bgmpi.kv_stream import KvStream, passage

PAGE = 4
LAYERS = 3


def entry(sequence: int, tokens: int, most: int) -> Entry:
    return Entry(sequence, np.zeros(tokens, np.int32), tokens, most)


def slots(*names: int) -> np.ndarray:
    return np.array(names, np.int64)


class Late:
    """The receipt of a copy that happens only when somebody waits."""

    def __init__(self, deed: Any) -> None:
        self.deed = deed

    def done(self) -> bool:
        return self.deed is None

    def wait(self) -> None:
        if self.deed is not None:
            self.deed()
            self.deed = None


class LateBackend:
    """Copies pages as late as a receipt allows: who touches them without waiting sees the old ones."""

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)

    def copy_pages(self, target: torch.Tensor, to: np.ndarray, source: torch.Tensor, of: np.ndarray) -> Late:
        taken = source[torch.from_numpy(of)].clone()
        return Late(lambda: target.__setitem__(torch.from_numpy(to), taken))


class LateDisk:
    """A disk tier in memory; a page is read as it was last written, as `KvSpill` promises."""

    def __init__(self, pages: int) -> None:
        self.cells = torch.full((LAYERS, pages, 2), -2.0)

    def write(self, layer: int, to: np.ndarray, source: torch.Tensor, of: np.ndarray) -> Late:
        self.cells[layer, torch.from_numpy(to)] = source[torch.from_numpy(of)]
        return Late(lambda: None)

    def read(self, layer: int, of: np.ndarray, target: torch.Tensor, to: np.ndarray) -> Late:
        taken = self.cells[layer, torch.from_numpy(of)].clone()
        return Late(lambda: target.__setitem__(torch.from_numpy(to), taken))


def test_a_page_comes_from_home_else_from_disk_and_goes_to_disk_where_it_has_a_place() -> None:
    places = KvPlaces(slots=2, page_tokens=PAGE, pages=20, disk_pages=10, streamed_most=10)
    assert places.open(0, entry(0, 11, 40), 0)
    places.begin_spill(0, 2)
    places.end_spill(slots(0))
    places.begin_spill(0, 1)
    one = passage(places, slots(0), slots(11), slots(1))
    assert one.table.tolist() == [[0, 1, 2]]
    assert (one.at_disk.tolist(), one.at_home.tolist()) == ([0, 1], [2])
    assert (one.at_back_disk.tolist(), one.at_back_home.tolist()) == ([2], [])


def test_pages_that_hold_nothing_yet_do_not_come_and_only_touched_ones_go_back() -> None:
    places = KvPlaces(slots=2, page_tokens=PAGE, pages=20, device_pages=4, streamed_most=10)
    assert places.open(1, entry(0, 10, 40), 0)
    one = passage(places, slots(1), slots(5), slots(5))
    assert one.at_home.tolist() == [0, 1]
    assert one.at_back_home.tolist() == [1, 2]


def stream_of(places: KvPlaces, disk: LateDisk | None, device_pages: int | None) -> tuple[KvStream, torch.Tensor]:
    home = torch.full((places.home.pages, LAYERS, 2), -3.0)
    backend: Any = LateBackend()
    kv = KvStream(backend, home, device_pages=device_pages, buffer_pages=60, buffers=2, spill=disk)  # type: ignore[arg-type]
    return kv, home


@given(st.lists(st.integers(1, 40), min_size=1, max_size=5), st.integers(0, 6), st.integers(1, 5))
@settings(deadline=None, max_examples=80)
def test_every_layer_of_every_step_sees_all_that_was_written_before(
    lengths: list[int], spilled: int, steps: int
) -> None:
    """Each token writes its own number into its page; later steps must find the sums of all earlier ones."""
    places = KvPlaces(slots=5, page_tokens=PAGE, pages=80, disk_pages=30, streamed_most=20)
    disk = LateDisk(30)
    kv, _ = stream_of(places, disk, None)
    names = np.arange(len(lengths), dtype=np.int64)
    for slot, length in enumerate(lengths):
        assert places.open(slot, entry(slot, length, length + steps), 0)
    before = np.zeros(len(lengths), np.int64)
    count = np.array(lengths, np.int64)
    for _ in range(steps):
        batches = [
            SimpleNamespace(passage=passage(places, part, before[part], count[part]))
            for part in np.array_split(names, min(2, len(names)))
            if len(part)
        ]
        parts = [part for part in np.array_split(names, min(2, len(names))) if len(part)]
        kv.settle()
        kv.begin(batches)
        for layer in range(LAYERS):
            for part, batch in zip(parts, batches, strict=True):
                pages = kv.next_pages()
                for row, slot in enumerate(part.tolist()):
                    for token in range(int(before[slot] + count[slot])):
                        cell = pages[batch.passage.table[row, token // PAGE]]
                        if token < before[slot]:
                            assert cell[0] == 100 * layer + slot, "what an earlier step wrote is gone"
                        cell[0] = 100 * layer + slot
                kv.give_back()
        before, count = before + count, np.ones(len(names), np.int64)
        kv.settle()
        for slot in names.tolist()[:spilled]:
            full = int(places.can_spill(slots(slot), before[slot : slot + 1])[0])
            if full and places.begin_spill(slot, full):
                kv.spill(places, slots(slot))
                places.end_spill(slots(slot))
        places.grow(names, before + 1)
        places.check(names, before)


def test_what_goes_home_and_comes_back_is_the_same() -> None:
    places = KvPlaces(slots=2, page_tokens=PAGE, pages=20, device_pages=8, streamed_most=10)
    kv, home = stream_of(places, None, 8)
    assert places.open(0, entry(0, 10, 30), 0)
    held = places.home.table[0, :3].astype(np.int64)
    home[torch.from_numpy(held)] = torch.arange(3.0)[:, None, None] + 1
    assert places.begin_promotion(0, 11, 30, 0)
    assert kv.promote(places, slots(0), slots(10)) == 3 * kv.page_bytes
    places.end_promotion(slots(0), slots(10))
    on_device = places.compute.table[0, :3].astype(np.int64)
    assert (kv.pages_of(1)[torch.from_numpy(on_device)][:, 0] == torch.arange(3.0) + 1).all()
    kv.pages_of(0)[int(on_device[2])] = 9.0
    assert kv.demote(places, slots(0), slots(12)) == kv.page_bytes, "full pages that are at home already do not travel"
    places.end_demotion(slots(0))
    assert home[int(held[2]), 0, 0] == 9.0
    assert home[int(held[0]), 0, 0] == 1.0


def test_what_comes_home_from_the_disk_is_only_what_was_ever_written_there() -> None:
    """A new sequence may have disk pages that its first tokens are still to fill."""
    places = KvPlaces(slots=1, page_tokens=PAGE, pages=4, disk_pages=8, streamed_most=4)
    assert places.home.claim(3) is not None
    assert places.open(0, entry(0, 13, 14), 0)
    assert places.disk is not None and places.disk.held[0] == 3
    disk = LateDisk(8)
    kv, home = stream_of(places, disk, None)
    disk.cells[:, places.disk.table[0, 0]] = 5.0
    places.home.release(np.arange(1, 4, dtype=np.int32))
    assert places.begin_recall(0, 0)
    assert kv.recall(places, slots(0), np.array([3])) == kv.page_bytes
    pages = places.home.table[0, :4]
    assert (home[pages[0]] == 5.0).all()
    assert (home[pages[1:]] == -3.0).all()
