"""Laws of segments: whole or not there, named or not counted, and lost to no kill."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import h5py
import numpy as np
import pytest
from results_for_tests import answer, error, logprobs

from bgmpi.errors import InternalError
from bgmpi.io.collected import collect
from bgmpi.io.journal import read_journal
from bgmpi.io.segments import Segment, SegmentWriter, parts_folder

WRITER = """
import sys
import numpy as np
from bgmpi.io.segments import SegmentWriter
from bgmpi.request import Answer, Finish
writer = SegmentWriter(sys.argv[1], 0)
row = 0
while True:
    for _ in range(20):
        writer.add(Answer(row, 0, f"id-{row}", Finish.STOP, 1, np.arange(row % 50, dtype=np.int32), "x" * (row % 97)))
        row += 1
    writer.flush()
    print(row, flush=True)
"""


def test_a_segment_is_plain_hdf5(tmp_path: Path) -> None:
    with SegmentWriter(tmp_path, 3) as writer:
        for row in (4, 2, 9):
            writer.add(answer(row, logprobs=logprobs(3, 2, row)))
    entry = read_journal(tmp_path).entries[0]
    with h5py.File(tmp_path / entry.name, "r") as file:
        assert file["samples/row"][:].tolist() == [4, 2, 9]
        assert file["tokens/offsets"][:].tolist() == [0, 3, 6, 9]
        assert file["tokens/values"][3:6].tolist() == answer(2).tokens.tolist()
        assert file["logprobs/top_ids"].shape == (18,)
    assert entry.records == 3


def test_no_column_is_a_variable_length_string(tmp_path: Path) -> None:
    with SegmentWriter(tmp_path, 0) as writer:
        writer.add(answer(0))
    kinds: list[str] = []
    with h5py.File(tmp_path / read_journal(tmp_path).entries[0].name, "r") as file:
        file.visititems(lambda _, item: kinds.append(item.dtype.kind) if isinstance(item, h5py.Dataset) else None)
    assert set(kinds) <= set("iuf")


def test_an_empty_flush_writes_nothing(tmp_path: Path) -> None:
    with SegmentWriter(tmp_path, 0) as writer:
        assert writer.flush() is None
    assert list(tmp_path.glob("*.h5")) == []
    assert len(collect(tmp_path).row) == 0


def test_a_segment_is_due_by_bytes_or_by_age(tmp_path: Path) -> None:
    now = [100.0]
    writer = SegmentWriter(tmp_path, 0, segment_bytes=10_000, segment_seconds=30, clock=lambda: now[0])
    assert not writer.due
    writer.add(answer(0))
    assert not writer.flush_if_due()
    now[0] += 30
    assert writer.flush_if_due() and writer.buffered == 0
    now[0] += 1000
    assert not writer.due  # age counts from the oldest buffered answer, and there is none
    writer.add(answer(1, length=2000))
    assert writer.due
    writer.close()


def test_two_attempts_on_one_folder_never_meet(tmp_path: Path) -> None:
    for attempt in range(3):
        with SegmentWriter(tmp_path, 0) as writer:
            writer.add(answer(attempt))
    left = collect(tmp_path)
    assert sorted(left.row.tolist()) == [0, 1, 2]


def test_finished_tells_rows_samples_and_errors(tmp_path: Path) -> None:
    with SegmentWriter(tmp_path, 0) as writer:
        writer.add(answer(7, 1))
        writer.flush()
        writer.add(error(3))
        writer.add(error(5, -1))
    left = collect(tmp_path)
    order = np.argsort(left.row)
    assert left.row[order].tolist() == [3, 5, 7]
    assert left.sample[order].tolist() == [0, -1, 1]
    assert left.is_error[order].tolist() == [True, True, False]
    assert (left.row.dtype, left.sample.dtype, left.is_error.dtype) == (np.int64, np.int32, np.bool_)


def test_a_failing_block_still_saves_what_was_finished(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="model"), SegmentWriter(tmp_path, 0) as writer:
        writer.add(answer(1))
        raise ValueError("the model failed")
    assert collect(tmp_path).row.tolist() == [1]


def test_an_answer_that_contradicts_itself_is_refused(tmp_path: Path) -> None:
    with SegmentWriter(tmp_path, 0) as writer:
        with pytest.raises(InternalError, match="row 1"):
            writer.add(answer(1, error=error(1).error))
        with pytest.raises(InternalError, match="whole row"):
            writer.add(answer(1, -1))
        writer.add(answer(1, logprobs=logprobs(2, 1)))
        with pytest.raises(InternalError, match="row 1 sample 0: logprobs/chosen has 2 values, expected 3"):
            writer.flush()
        writer._buffer.clear()


def test_many_segments_need_few_open_files(tmp_path: Path) -> None:
    with SegmentWriter(tmp_path, 0) as writer:
        for row in range(30):
            writer.add(answer(row))
            writer.flush()
    segments = [Segment(tmp_path / entry.name) for entry in read_journal(tmp_path).entries]
    before = len(os.listdir("/proc/self/fd"))
    assert [int(segment.table().fixed["samples/row"][0]) for segment in segments] == list(range(30))
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_foreign_file_is_no_segment(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.attrs["format"] = "other"
    with pytest.raises(InternalError, match=r"x\.h5: expected bgmpi-segment 1, got other"):
        Segment(tmp_path / "x.h5")


def test_the_parts_lie_beside_the_output() -> None:
    assert parts_folder("out/results.h5") == Path("out/results.h5.parts")


@pytest.mark.parametrize("delay", [0.0, 0.013, 0.037, 0.071, 0.11])
def test_a_kill_at_any_instant_loses_no_journalled_row(tmp_path: Path, delay: float) -> None:
    command = [sys.executable, "-c", WRITER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        told = int(writer.stdout.readline())  # at least one segment is there
        time.sleep(delay)
        writer.send_signal(signal.SIGKILL)
        told = max(
            [told, *(int(line) for line in writer.stdout.read().splitlines(keepends=True) if line.endswith("\n"))]
        )
    left = collect(tmp_path)
    assert left.journal.damaged == ()
    assert sorted(left.row.tolist()) == list(range(len(left.row)))
    assert len(left.row) >= told  # what the writer said it had saved is saved
    for entry in left.journal.entries:
        with h5py.File(tmp_path / entry.name, "r") as file:
            rows, cuts = file["samples/row"][:], file["tokens/offsets"][:]
            assert np.array_equal(np.diff(cuts), rows % 50)
            assert len(file["text/values"]) == int((rows % 97).sum())
