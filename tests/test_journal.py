"""Laws of the journal: only whole lines count, and only segments that are there unchanged."""

from __future__ import annotations

from pathlib import Path

import pytest

from bgmpi.errors import WriteError
from bgmpi.io.journal import Entry, JournalWriter, file_sha256, read_journal


def _segment(folder: Path, name: str, data: bytes) -> Entry:
    path = folder / name
    path.write_bytes(data)
    return Entry(name, 2, len(data), file_sha256(path))


def test_every_appended_record_is_read_back_in_order(tmp_path: Path) -> None:
    entries = tuple(_segment(tmp_path, f"s{i}.h5", bytes([i] * 9)) for i in range(3))
    journal = JournalWriter(tmp_path / "journal-a.jsonl")
    for entry in entries:
        journal.append(entry)
    reading = read_journal(tmp_path)  # also while the writer is still open
    journal.close()
    assert reading.entries == entries
    assert reading.damaged == reading.torn == ()


def test_a_missing_folder_names_nothing(tmp_path: Path) -> None:
    assert read_journal(tmp_path / "nowhere").entries == ()


@pytest.mark.parametrize("cut", [1, 2, 30])
def test_a_torn_last_line_is_ignored_and_told(tmp_path: Path, cut: int) -> None:
    journal = JournalWriter(tmp_path / "journal-a.jsonl")
    first, second = _segment(tmp_path, "a.h5", b"1"), _segment(tmp_path, "b.h5", b"2")
    journal.append(first)
    journal.append(second)
    journal.close()
    data = journal.path.read_bytes()
    journal.path.write_bytes(data[:-cut])
    reading = read_journal(tmp_path)
    assert reading.entries == (first,)
    assert len(reading.torn) == 1 and "journal-a.jsonl line 2" in reading.torn[0]


def test_a_line_that_is_no_record_spares_the_lines_around_it(tmp_path: Path) -> None:
    journal = JournalWriter(tmp_path / "journal-a.jsonl")
    first, second = _segment(tmp_path, "a.h5", b"1"), _segment(tmp_path, "b.h5", b"2")
    journal.append(first)
    journal.append(second)
    journal.close()
    lines = journal.path.read_bytes().splitlines(keepends=True)
    journal.path.write_bytes(lines[0] + b'{"name": "c.h5", "records": "\xff\n' + lines[1])
    reading = read_journal(tmp_path)
    assert reading.entries == (first, second)
    assert "line 2" in reading.torn[0]


def test_missing_short_and_changed_segments_are_named(tmp_path: Path) -> None:
    journal = JournalWriter(tmp_path / "journal-a.jsonl")
    for name in ("good", "gone", "short", "changed"):
        journal.append(_segment(tmp_path, f"{name}.h5", b"12345678"))
    journal.close()
    (tmp_path / "gone.h5").unlink()
    (tmp_path / "short.h5").write_bytes(b"1234")
    (tmp_path / "changed.h5").write_bytes(b"12345679")
    reading = read_journal(tmp_path)
    assert [entry.name for entry in reading.entries] == ["good.h5"]
    told = "\n".join(reading.damaged)
    assert "gone.h5 (2 answers, named by journal-a.jsonl): missing" in told
    assert "short.h5" in told and "4 bytes, 8 were written" in told
    assert "changed.h5" in told and "sha256" in told


def test_a_name_that_leaves_the_folder_is_damage(tmp_path: Path) -> None:
    (tmp_path / "parts").mkdir()
    outside = _segment(tmp_path, "x.h5", b"1")
    journal = JournalWriter(tmp_path / "parts" / "journal-a.jsonl")
    journal.append(Entry("../x.h5", 1, outside.bytes, outside.sha256))
    journal.close()
    assert read_journal(tmp_path / "parts").entries == ()


def test_a_journal_is_never_taken_over(tmp_path: Path) -> None:
    JournalWriter(tmp_path / "journal-a.jsonl").close()
    with pytest.raises(WriteError, match=r"journal-a\.jsonl"):
        JournalWriter(tmp_path / "journal-a.jsonl")


def test_an_append_after_a_failed_one_leaves_no_trace_of_it(tmp_path: Path) -> None:
    journal = JournalWriter(tmp_path / "journal-a.jsonl")
    with open(journal.path, "ab") as half:  # what a full disk leaves: part of a line
        half.write(b'{"name":"half')
    entry = _segment(tmp_path, "a.h5", b"1")
    journal.append(entry)
    journal.close()
    reading = read_journal(tmp_path)
    assert reading.entries == (entry,) and reading.torn == ()
