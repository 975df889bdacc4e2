"""Any bytes in the folder of parts: journals, manifests and segments are read, or named and skipped, never an
exception; what is whole counts, whatever lies beside it."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import h5py
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from odd_json import damaged
from results_for_tests import answer, logprobs

from bgmpi.errors import InternalError
from bgmpi.io.attempts import begin_attempt, read_attempts, row_maps
from bgmpi.io.collected import begun, collect
from bgmpi.io.journal import Entry, file_sha256, read_journal
from bgmpi.io.segments import Segment, SegmentWriter

CONTENT = np.arange(8, dtype=np.uint64)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two attempts of eight rows: one segment a row of attempt 1 and 2, and what rows 6 and 7 have so far."""
    folder = tmp_path_factory.mktemp("whole")
    for attempt, rows in ((1, (0, 1, 2)), (2, (3, 4, 5))):
        begin_attempt(folder, attempt, {"model": "tiny"}, str(attempt) * 64, CONTENT, retry_failed=False)
        writer = SegmentWriter(folder, 0, attempt=attempt)
        for row in rows:
            writer.add(answer(row, logprobs=logprobs(3, 2, row)))
            writer.flush()
        writer.save_progress([answer(5 + attempt, length=4)])
        writer.close()
    return folder


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("place") / "parts"


def copied(whole: Path, place: Path) -> Path:
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(whole, place)
    return place


def found(folder: Path) -> tuple[set[int], set[int], list[str]]:
    """Return rows that are finished, rows that are begun, and all sentences, read as a resumed job reads them."""
    attempts, damaged_ = read_attempts(folder)
    maps, lost = row_maps(folder, attempts, "2" * 64, CONTENT)
    all_ = collect(folder, maps)
    unfinished = begun(folder, maps, all_)
    told = [*damaged_, *lost, *all_.damaged, *all_.journal.damaged, *all_.journal.torn]
    assert len(np.unique(all_.row)) == len(all_.row), "a row counts twice"
    return set(all_.row.tolist()), {row for row, _ in unfinished}, told


def test_what_is_whole_is_found(whole: Path) -> None:
    assert found(whole) == ({0, 1, 2, 3, 4, 5}, {6, 7}, [])


@given(data=st.data())
@settings(max_examples=120)
def test_damage_costs_what_it_hit_and_is_told(whole: Path, place: Path, data: st.DataObject) -> None:
    folder = copied(whole, place)
    path = data.draw(st.sampled_from(sorted(folder.iterdir())))
    before = path.read_bytes()
    after = data.draw(damaged(before))
    path.write_bytes(after)
    rows, unfinished, told = found(folder)
    attempt = 1 if "-0001-" in path.name or "0001.json" in path.name else 2
    safe = {3, 4, 5} if attempt == 1 else {0, 1, 2}
    if path.name.startswith("rows-"):
        safe = {3, 4, 5}
    elif path.name.startswith("segment"):
        safe = {0, 1, 2, 3, 4, 5} - {int(row) for row in Segment(whole / path.name).table().fixed["samples/row"]}
    elif path.name.startswith("progress"):
        safe = {0, 1, 2, 3, 4, 5}
    assert safe <= rows <= {0, 1, 2, 3, 4, 5} and unfinished <= {6, 7, *range(6)} - rows
    if rows | unfinished != set(range(8)):
        assert told or path.name.startswith("rows-"), path.name


@given(data=st.data())
@settings(max_examples=120)
def test_a_journal_of_any_lines_keeps_the_whole_ones_among_them(whole: Path, place: Path, data: st.DataObject) -> None:
    """Whole lines doubled, out of order and interleaved with anything count once each."""
    folder = copied(whole, place)
    journals = sorted(folder.glob("journal-*"))
    good = [line for path in journals for line in path.read_bytes().splitlines() if b"segment-" in line]
    junk = st.one_of(st.binary(max_size=30), st.sampled_from(good).flatmap(damaged), st.sampled_from(ODD_LINES))
    lines = data.draw(st.lists(st.one_of(st.sampled_from(good), junk), max_size=10))
    for path in journals:
        path.unlink()
    (folder / "journal-x.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    rows, _, _ = found(folder)
    kept = {msgspec.json.decode(line, type=Entry).name for line in lines if line in good}
    assert {one.name for one in read_journal(folder).entries} >= kept
    assert len(rows) >= len(kept)


def line_of(name: str, **more: object) -> bytes:
    return json.dumps({"name": name, "records": 1, "bytes": 9, "sha256": "0", **more}).encode()


NAMES = ("../outside.h5", "/etc/passwd", "", ".", "..", "a/b.h5", "x\0y", "n" * 5000, "-r", "~", "*.h5", "\u00e9.h5",
         "lock")  # fmt: skip
ODD_LINES = (
    *(line_of(name) for name in NAMES), line_of("a.h5", records=-1), line_of("a.h5", bytes=-1), b"[]", b"null", b"{}",
    line_of("a.h5", bytes=10**40), line_of("a.h5", kind="other"), line_of("a.h5", seconds="x"), b"[" * 20_000,
    b'{"a":' * 20_000, b'{"name":"\\ud800","records":1,"bytes":1,"sha256":"0"}', b"\xff\xfe", b"\x00" * 100,
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES, ids=range(len(NAMES)))
def test_a_journal_reads_nothing_outside_of_its_folder(tmp_path: Path, name: str) -> None:
    (tmp_path / "outside.h5").write_bytes(b"123456789")
    folder = tmp_path / "parts"
    folder.mkdir()
    facts = {"bytes": 9, "sha256": file_sha256(tmp_path / "outside.h5")}
    (folder / "lock").write_bytes(b"another")
    (folder / "journal-a.jsonl").write_bytes(line_of(name, **facts) + b"\n")
    reading = read_journal(folder)
    assert reading.entries == () and len(reading.damaged) == 1


def test_a_link_to_a_whole_file_elsewhere_is_no_segment(tmp_path: Path) -> None:
    (tmp_path / "outside.h5").write_bytes(b"123456789")
    folder = tmp_path / "parts"
    folder.mkdir()
    (folder / "segment-a.h5").symlink_to(tmp_path / "outside.h5")
    facts = {"bytes": 9, "sha256": file_sha256(tmp_path / "outside.h5")}
    (folder / "journal-a.jsonl").write_bytes(line_of("segment-a.h5", **facts) + b"\n")
    assert "a link" in read_journal(folder).damaged[0]


def test_a_journal_copied_by_hand_counts_its_segments_once(whole: Path, place: Path) -> None:
    folder = copied(whole, place)
    journal = next(folder.glob("journal-*"))
    shutil.copy(journal, folder / "journal-backup.jsonl")
    rows, unfinished, told = found(folder)
    assert rows == {0, 1, 2, 3, 4, 5} and unfinished == {6, 7} and all("second time" in one for one in told)


def test_a_manifest_under_another_number_maps_nobodys_rows(whole: Path, place: Path) -> None:
    folder = copied(whole, place)
    shutil.copy(folder / "attempt-0001.json", folder / "attempt-0002.json")
    rows, _, told = found(folder)
    assert rows == {0, 1, 2} and any("attempt-0002.json" in one for one in told)


ODD_FILES: dict[str, Callable[[Path], object]] = {
    "a folder": Path.mkdir, "a pipe that nobody writes": os.mkfifo,
    "a link to itself": lambda path: path.symlink_to(path),
    "a dangling link": lambda path: path.symlink_to("gone"),
}  # fmt: skip


@pytest.mark.parametrize("kind", ODD_FILES)
@pytest.mark.parametrize("name", ["journal-x.jsonl", "attempt-0007.json", f"rows-{'1' * 16}.h5"])
def test_what_is_no_file_is_named_and_skipped(whole: Path, place: Path, kind: str, name: str) -> None:
    folder = copied(whole, place)
    (folder / name).unlink(missing_ok=True)
    ODD_FILES[kind](folder / name)
    rows, _, told = found(folder)
    assert rows >= {3, 4, 5} and told


# --- segments ---------------------------------------------------------------------------------------------------------


def edited(whole: Path, place: Path, change: Callable[[h5py.File], None]) -> Path:
    """Return a copy of a segment with a change, which no hash tells."""
    path = place.with_name("segment.h5")
    shutil.copy(next(whole.glob("segment-*.h5")), path)
    with h5py.File(path, "r+") as file:
        change(file)
    return path


def replaced(name: str, data: object, **kinds: object) -> Callable[[h5py.File], None]:
    def change(file: h5py.File) -> None:
        del file[name]
        file.create_dataset(name, data=data, **kinds)

    return change


def as_group(file: h5py.File) -> None:
    del file["samples/row"]
    file.create_group("samples/row")


FORGED: dict[str, Callable[[h5py.File], None]] = {
    "a column is not there": lambda file: file.__delitem__("samples/row"),
    "a column is a group": as_group,
    "another dtype": replaced("samples/row", np.zeros(1, np.float32)),
    "another length": replaced("samples/row", np.zeros(2, np.int64)),
    "a table": replaced("samples/row", np.zeros((1, 1), np.int64)),
    "a scalar": replaced("samples/row", np.int64(3)),
    "compressed": replaced("samples/row", np.array([5], np.int64), chunks=(1,), compression="gzip"),
    "offsets that go back": replaced("tokens/offsets", np.array([0, -3], np.int64)),
    "offsets past the values": replaced("tokens/offsets", np.array([0, 1 << 40], np.int64)),
    "offsets that begin late": replaced("tokens/offsets", np.array([1, 3], np.int64)),
    "values too few": replaced("tokens/values", np.zeros(2, np.int32)),
    "records is a text": lambda file: file.attrs.__setitem__("records", "many"),
    "records is a lie": lambda file: file.attrs.__setitem__("records", 1 << 40),
    "records is below zero": lambda file: file.attrs.__setitem__("records", -1),
    "no version": lambda file: file.attrs.__delitem__("format_version"),
}


@pytest.mark.parametrize("name", FORGED)
def test_a_segment_whose_columns_do_not_fit_is_refused_by_its_path(whole: Path, place: Path, name: str) -> None:
    with pytest.raises(InternalError, match=r"segment\.h5"):
        Segment(edited(whole, place, FORGED[name]))


@given(data=st.data())
@settings(max_examples=200)
def test_a_damaged_segment_is_refused_or_has_columns_that_fit(whole: Path, place: Path, data: st.DataObject) -> None:
    """Without the journal's hash; with it no damaged segment is opened at all."""
    path = place.with_name("damaged.h5")
    image = bytearray(next(whole.glob("segment-*.h5")).read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        image[data.draw(st.integers(0, len(image) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(bytes(image[: data.draw(st.sampled_from([len(image), len(image), len(image) // 2, 100, 0]))]))
    try:
        table = Segment(path).table()
    except InternalError as error:
        assert "damaged.h5" in str(error)
        return
    assert all(len(column) == table.entries for column in table.fixed.values())
    for name, values in table.values.items():
        cuts = table.offsets[name.rpartition("/")[0] + "/offsets"] if name.endswith("/values") else None
        assert cuts is None or "top" in name or (len(values) == cuts[-1] and all(
            a <= b for a, b in itertools.pairwise(cuts.tolist())))
