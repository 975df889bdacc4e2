"""The disk tier of KV: what was written is what is read, in any order, on full disks and across closes."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from bgmpi.errors import BgmpiError, ExitCode, InternalError, MissingError, WriteError
from bgmpi.io.kv_spill import KvSpill, Traffic, _bounds
from bgmpi.io.spill_file import BLOCK, PIECES, SpillFile, _rest, free_bytes

LAYERS = 3
PAGES = 64


def ints(*numbers: int) -> NDArray[np.int64]:
    return np.array(numbers, dtype=np.int64)


def memory(pages: int, page_bytes: int, *, shift: int = 0) -> torch.Tensor:
    """Random bytes [pages, page_bytes] whose first byte lies `shift` bytes behind a block's begin."""
    room = torch.empty(pages * page_bytes + 2 * BLOCK, dtype=torch.uint8)
    first = -room.data_ptr() % BLOCK + shift
    filled = room[first : first + pages * page_bytes].view(pages, page_bytes)
    return filled.random_(0, 256)


@pytest.fixture(params=[True, False], ids=["direct", "cached"])
def direct(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.mark.parametrize("page_bytes", [BLOCK, 3 * BLOCK, 512, 6000, 1], ids=str)
@pytest.mark.parametrize("shift", [0, 64], ids=["aligned", "shifted"])
def test_pages_come_back_byte_for_byte(tmp_path: Path, direct: bool, page_bytes: int, shift: int) -> None:
    source, target = memory(PAGES, page_bytes, shift=shift), memory(PAGES, page_bytes, shift=shift)
    random = np.random.default_rng(1)
    spill = KvSpill(tmp_path, 0, pages=PAGES, layers=LAYERS, page_bytes=page_bytes, direct=direct)
    places = [(random.permutation(PAGES), random.permutation(PAGES)) for _ in range(LAYERS)]
    for layer, (disk, mine) in enumerate(places):
        spill.write(layer, disk, source, mine).wait()
    for layer, (disk, mine) in enumerate(places):
        back = random.permutation(PAGES)
        spill.read(layer, disk, target, back).wait()
        assert torch.equal(target[back], source[mine])
    assert spill.reads.bytes == spill.writes.bytes == LAYERS * PAGES * page_bytes
    spill.close()


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_read_gives_what_the_last_write_before_it_wrote(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Many operations on few pages are asked for at once and awaited in any order; a dict tells what must come back."""
    page_bytes = data.draw(st.sampled_from([BLOCK, 100]))
    direct, threads = data.draw(st.booleans()), data.draw(st.integers(1, 3))
    pages, layers = 6, 2
    spill = KvSpill(
        tmp_path_factory.getbasetemp(), 0, pages=pages, layers=layers, page_bytes=page_bytes, threads=threads,
        direct=direct,
    )  # fmt: skip
    wanted: dict[tuple[int, int], torch.Tensor] = {}
    receipts, checks = [], []
    chosen = st.lists(st.integers(0, pages - 1), unique=True)
    for layer, numbers, write in data.draw(
        st.lists(st.tuples(st.integers(0, layers - 1), chosen, st.booleans()), max_size=20)
    ):
        there = [page for page in numbers if write or (layer, page) in wanted]
        held = memory(pages, page_bytes)
        mine = np.random.default_rng(len(there)).permutation(pages)[: len(there)]
        if write:
            receipts.append(spill.write(layer, np.array(there, np.int64), held, mine))
            wanted |= {(layer, page): held[one] for page, one in zip(there, mine.tolist(), strict=True)}
        else:
            receipts.append(spill.read(layer, np.array(there, np.int64), held, mine))
            checks += [(held[one], wanted[layer, page]) for page, one in zip(there, mine.tolist(), strict=True)]
    for receipt in data.draw(st.permutations(receipts)):
        receipt.wait()
        assert receipt.done()
    assert all(torch.equal(got, want) for got, want in checks)
    spill.close()


def test_a_layer_of_the_page_major_store_moves_in_place(tmp_path: Path, direct: bool) -> None:
    store = memory(PAGES * LAYERS, 2 * BLOCK).view(torch.bfloat16).view(PAGES, LAYERS, 2, 2, 8, -1)
    back = torch.zeros_like(store)
    spill = KvSpill(tmp_path, 0, pages=PAGES, layers=LAYERS, page_bytes=2 * BLOCK, direct=direct)
    every = np.arange(PAGES)
    for layer in range(LAYERS):
        spill.write(layer, every, store[:, layer], every).wait()
        spill.read(layer, every[::2], back[:, layer], every[::2]).wait()
    assert torch.equal(back[::2].view(torch.uint8), store[::2].view(torch.uint8))
    assert not back[1::2].any()
    spill.close()


def test_a_read_waits_for_a_write_of_its_page_that_is_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_write, moved = threading.Event(), []
    move = SpillFile.move

    def slow(self: SpillFile, cell: int, addresses: NDArray[np.uint64], *, write: bool) -> None:
        if write:
            assert may_write.wait(10)
        moved.append("write" if write else f"read {cell}")
        move(self, cell, addresses, write=write)

    source, target = memory(PAGES, BLOCK), memory(PAGES, BLOCK)
    spill = KvSpill(tmp_path, 0, pages=PAGES, layers=1, page_bytes=BLOCK)
    spill.write(0, ints(7), source, ints(7)).wait()
    monkeypatch.setattr(SpillFile, "move", slow)
    writing = spill.write(0, ints(5), source, ints(1))
    other = spill.read(0, ints(7), target, ints(7))
    other.wait()
    same = spill.read(0, ints(5), target, ints(2))
    assert not writing.done() and not same.done()
    may_write.set()
    same.wait()
    assert moved == ["read 7", "write", "read 5"]
    assert torch.equal(target[2], source[1]) and torch.equal(target[7], source[7])
    spill.close()


def test_no_file_is_left_or_seen(tmp_path: Path, direct: bool) -> None:
    spill = KvSpill(tmp_path, 0, pages=PAGES, layers=1, page_bytes=BLOCK, direct=direct)
    spill.write(0, np.arange(PAGES), memory(PAGES, BLOCK), np.arange(PAGES)).wait()
    assert not list(tmp_path.iterdir())
    spill.close()
    assert not list(tmp_path.iterdir())


def test_a_kill_leaves_no_file(tmp_path: Path) -> None:
    program = (
        "import os, sys, signal, numpy as np, torch\n"
        "from bgmpi.io.kv_spill import KvSpill\n"
        "spill = KvSpill(sys.argv[1], 0, pages=64, layers=1, page_bytes=4096)\n"
        "spill.write(0, np.arange(64), torch.ones(64, 4096, dtype=torch.uint8), np.arange(64))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    killed = subprocess.run([sys.executable, "-P", "-c", program, str(tmp_path)], timeout=60, check=False)
    assert killed.returncode == -9
    assert not list(tmp_path.iterdir())


def test_the_file_takes_only_the_room_that_was_written(tmp_path: Path) -> None:
    spill = KvSpill(tmp_path, 0, pages=1 << 20, layers=4, page_bytes=BLOCK)
    spill.write(3, ints(1 << 19), memory(1, BLOCK), ints(0)).wait()
    assert os.fstat(spill._file._file.fileno()).st_blocks * 512 <= 64 * BLOCK
    spill.close()


@contextmanager
def files_no_longer_than(size: int) -> Iterator[None]:
    """Let the kernel refuse writes beyond `size` bytes, as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_fails_the_write_and_nothing_else(tmp_path: Path, direct: bool) -> None:
    source, target = memory(PAGES, BLOCK), memory(PAGES, BLOCK)
    every = np.arange(PAGES)
    spill = KvSpill(tmp_path, 3, pages=PAGES, layers=1, page_bytes=BLOCK, direct=direct)
    spill.write(0, every[:4], source, every[:4]).wait()
    told = rf"rank 3: --kv-spill {tmp_path}: .*errno 27.*245760 bytes needed"
    with files_no_longer_than(8 * BLOCK):
        failed = spill.write(0, every[4:], source, every[4:])
        with pytest.raises(WriteError, match=told) as caught:
            failed.wait()
    assert caught.value.exit_code == ExitCode.WRITE
    assert failed.done()
    spill.read(0, every[:4], target, every[:4]).wait()
    assert torch.equal(target[:4], source[:4])
    with pytest.raises(InternalError, match="no write of them has succeeded"):
        spill.read(0, every[2:6], target, every[2:6]).wait()
    spill.write(0, every[4:], source, every[4:]).wait()
    spill.read(0, every, target, every).wait()
    assert torch.equal(target, source)
    spill.close()


def test_a_read_behind_a_write_that_fails_fails_too(tmp_path: Path) -> None:
    held = memory(PAGES, BLOCK)
    spill = KvSpill(tmp_path, 0, pages=PAGES, layers=1, page_bytes=BLOCK)
    spill.write(0, ints(20), held, ints(0)).wait()
    with files_no_longer_than(8 * BLOCK):
        writing, reading = spill.write(0, ints(20), held, ints(1)), spill.read(0, ints(20), held, ints(2))
        with pytest.raises(InternalError, match="disk pages"):
            reading.wait()
        with pytest.raises(WriteError):
            writing.wait()
    spill.close()


def test_a_disk_that_gives_no_bytes_back_is_told(tmp_path: Path, direct: bool) -> None:
    held = memory(PAGES, BLOCK)
    spill = KvSpill(tmp_path, 0, pages=PAGES, layers=1, page_bytes=BLOCK, direct=direct)
    spill.write(0, ints(20), held, ints(0)).wait()
    os.ftruncate(spill._file._file.fileno(), BLOCK)
    with pytest.raises(BgmpiError, match="cannot read 4096 bytes of KV back") as caught:
        spill.read(0, ints(20), held, ints(0)).wait()
    assert not isinstance(caught.value, WriteError)
    spill.close()


def test_after_a_loss_in_the_page_cache_nothing_is_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = memory(PAGES, BLOCK)
    spill = KvSpill(tmp_path, 0, pages=PAGES, layers=1, page_bytes=BLOCK, direct=False)
    spill.write(0, ints(1), held, ints(1)).wait()

    def lost(handle: int) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fdatasync", lost)
        with pytest.raises(WriteError, match="errno 5"):
            spill.write(0, ints(2), held, ints(2)).wait()
    with pytest.raises(WriteError, match="errno 5"):
        spill.write(0, ints(3), held, ints(3)).wait()
    with pytest.raises(BgmpiError, match="errno 5"):
        spill.read(0, ints(1), held, ints(1)).wait()
    spill.close()


def test_a_file_system_that_refuses_direct_requests_is_used_through_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transfer = SpillFile._transfer

    def refusing(self: SpillFile, pieces: NDArray[np.uint64], offset: int, *, write: bool) -> None:
        if self.direct:
            raise OSError(22, "Invalid argument")
        transfer(self, pieces, offset, write=write)

    monkeypatch.setattr(SpillFile, "_transfer", refusing)
    spill = KvSpill(tmp_path, 0, pages=PAGES, layers=1, page_bytes=100)
    assert not spill.direct
    source, target = memory(PAGES, 100), memory(PAGES, 100)
    spill.write(0, np.arange(PAGES), source, np.arange(PAGES)).wait()
    spill.read(0, np.arange(PAGES), target, np.arange(PAGES)).wait()
    assert torch.equal(source, target)
    spill.close()


def test_close_fails_what_is_under_way_and_touches_no_memory_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, leave = threading.Event(), threading.Event()
    move = SpillFile.move

    def slow(self: SpillFile, cell: int, addresses: NDArray[np.uint64], *, write: bool) -> None:
        entered.set()
        assert leave.wait(10)
        move(self, cell, addresses, write=write)

    monkeypatch.setattr(SpillFile, "move", slow)
    held = memory(PAGES, BLOCK)
    spill = KvSpill(tmp_path, 0, pages=PAGES, layers=1, page_bytes=BLOCK, threads=1)
    first = spill.write(0, ints(0), held, ints(0))
    half = spill.write(0, ints(1, 3, 5), held, ints(1, 2, 3))
    last = spill.write(0, ints(9), held, ints(4))
    assert entered.wait(10)
    closing = threading.Thread(target=spill.close)
    closing.start()
    while not spill._closed:
        pass
    assert not first.done()
    leave.set()
    closing.join(10)
    first.wait()
    for receipt in (half, last):
        with pytest.raises(BgmpiError, match="closed before"):
            receipt.wait()
    spill.close()
    with pytest.raises(InternalError, match="closed"):
        spill.write(0, ints(0), held, ints(0))


def test_a_thread_that_fails_leaves_no_receipt_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: SpillFile, cell: int, addresses: NDArray[np.uint64], *, write: bool) -> None:
        raise MemoryError

    monkeypatch.setattr(SpillFile, "move", broken)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    spill = KvSpill(tmp_path, 0, pages=PAGES, layers=1, page_bytes=BLOCK, threads=1)
    with pytest.raises(InternalError, match="thread of the disk tier failed"):
        spill.write(0, ints(0), memory(1, BLOCK), ints(0)).wait()
    spill.close()


@pytest.mark.parametrize("disk, mine, layer", [
    (ints(PAGES), ints(0), 0), (ints(-1), ints(0), 0), (ints(0), ints(PAGES), 0), (ints(0), ints(-1), 0),
    (ints(0, 1), ints(0), 0), (ints(4, 2, 4), ints(0, 1, 2), 0), (ints(0), ints(0), LAYERS), (ints(0), ints(0), -1),
])  # fmt: skip
def test_page_numbers_that_are_none_are_refused_before_memory_is_touched(
    tmp_path: Path, disk: NDArray[np.int64], mine: NDArray[np.int64], layer: int
) -> None:
    spill = KvSpill(tmp_path, 0, pages=PAGES, layers=LAYERS, page_bytes=BLOCK)
    with pytest.raises(InternalError):
        spill.write(layer, disk, memory(PAGES, BLOCK), mine)
    spill.close()


def test_memory_of_another_shape_is_refused(tmp_path: Path) -> None:
    spill = KvSpill(tmp_path, 0, pages=PAGES, layers=1, page_bytes=BLOCK)
    for held in (memory(2, 100), memory(2, 2 * BLOCK)[:, ::2], memory(2, BLOCK).to("meta")):
        with pytest.raises(InternalError, match="a page to spill must be"):
            spill.read(0, ints(0), held, ints(0))
    spill.close()


def test_no_pages_are_moved_at_once(tmp_path: Path) -> None:
    spill = KvSpill(tmp_path, 0, pages=PAGES, layers=1, page_bytes=BLOCK)
    receipt = spill.read(0, ints(), memory(0, BLOCK), ints())
    assert receipt.done()
    receipt.wait()
    spill.close()


def test_a_folder_that_is_no_good_is_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(MissingError, match="nowhere is not a folder"):
        KvSpill(tmp_path / "nowhere", 0, pages=1, layers=1, page_bytes=BLOCK)
    with pytest.raises(MissingError, match="errno 2"):
        free_bytes(tmp_path / "nowhere")
    with files_no_longer_than(BLOCK), pytest.raises(WriteError, match="ulimit -f"):
        KvSpill(tmp_path, 0, pages=PAGES, layers=1, page_bytes=BLOCK)
    with pytest.raises(WriteError, match="name a folder that can be written"):
        KvSpill("/proc", 0, pages=1, layers=1, page_bytes=BLOCK)


def test_free_bytes_are_those_of_an_ordinary_user(tmp_path: Path) -> None:
    room = os.statvfs(tmp_path)
    assert free_bytes(tmp_path) == pytest.approx(room.f_bavail * room.f_frsize, rel=0.1)


@given(st.lists(st.integers(0, 40), max_size=60), st.integers(1, 5))
def test_requests_are_runs_of_neighbours_as_long_as_allowed(numbers: list[int], most: int) -> None:
    pages = np.sort(np.array(numbers, dtype=np.int64))
    bounds = _bounds(pages, most)
    assert bounds[0] == 0 and bounds[-1] == len(pages) and (np.diff(bounds) > 0).all()
    runs = np.split(pages, bounds[1:-1]) if len(pages) else []
    for run in runs:
        assert len(run) <= most and (np.diff(run) == 1).all()
    for run, following in pairwise(runs):
        assert len(run) == most or following[0] != run[-1] + 1


@given(st.lists(st.integers(1, 50), min_size=1, max_size=10), st.data())
def test_a_request_that_was_half_done_goes_on_where_it_stopped(sizes: list[int], data: st.DataObject) -> None:
    pieces = np.array([[1000 * place, size] for place, size in enumerate(sizes)], dtype=np.uint64)
    moved = data.draw(st.integers(1, sum(sizes)))

    def every_byte(of: NDArray[np.uint64]) -> list[int]:
        return [byte for address, size in of.tolist() for byte in range(address, address + size)]

    assert every_byte(_rest(pieces, moved)) == every_byte(pieces)[moved:]


def test_large_requests_keep_the_kernels_limit_of_pieces(tmp_path: Path) -> None:
    pages = 2 * PIECES + 3
    source, target = memory(pages, 64), memory(pages, 64)
    spill = KvSpill(tmp_path, 0, pages=pages, layers=1, page_bytes=64, direct=False)
    every, mine = np.arange(pages), np.random.default_rng(0).permutation(pages)
    spill.write(0, every, source, mine).wait()
    spill.read(0, every, target, mine).wait()
    assert torch.equal(source, target)
    assert spill.writes.requests == 3
    spill.close()


def test_seconds_of_overlapping_requests_count_once() -> None:
    traffic = Traffic()
    traffic.begin(1.0)
    traffic.begin(2.0)
    traffic.end(3.0, 10, 1)
    traffic.end(5.0, 30, 2)
    traffic.begin(9.0)
    traffic.end(10.0, 10, 1)
    assert (traffic.bytes, traffic.seconds, traffic.requests, traffic.rate) == (50, 5.0, 4, 10.0)
