"""A page that several borrow has one twin on the device, from the first who comes to the last who goes."""

from __future__ import annotations

import numpy as np
import pytest

from bgmpi.device_twins import DeviceTwins
from bgmpi.errors import InternalError
from bgmpi.paged_kv import PagedKV


def pages(*numbers: int) -> np.ndarray:
    return np.array(numbers, np.int32)


def test_the_first_brings_it_the_others_find_it_and_the_last_gives_it_back() -> None:
    device = PagedKV(8, 2, 4)
    twins = DeviceTwins(device)
    assert twins.missing(pages(40, 41)) == 2
    first = twins.borrow(pages(40, 41), spare=0)
    assert first is not None and twins.missing(pages(40, 41, 42)) == 1
    second = twins.borrow(pages(40, 41, 42), spare=0)
    assert second is not None and second[:2].tolist() == first.tolist() and device.free == 5
    twins.check(pages(40, 41, 40, 41, 42))
    twins.give_back(pages(40, 41, 42))
    assert device.free == 6
    twins.give_back(pages(40, 41))
    assert device.free == 8 and twins.missing(pages(40)) == 1
    device.check()


def test_without_room_nothing_changes() -> None:
    device = PagedKV(3, 2, 4)
    twins = DeviceTwins(device)
    assert twins.borrow(pages(5, 6), spare=2) is None
    assert twins.missing(pages(5, 6)) == 2 and device.free == 3
    twins.check(pages())


def test_readers_that_are_not_there_are_found() -> None:
    twins = DeviceTwins(PagedKV(4, 2, 4))
    twins.borrow(pages(1), spare=0)
    with pytest.raises(InternalError, match="readers of twins"):
        twins.check(pages(1, 1))
    with pytest.raises(InternalError, match="readers of twins"):
        twins.check(pages())
