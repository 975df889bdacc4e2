"""Laws of attempts: rows are known again by what they say, and what is damaged costs only what depends on it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from bgmpi.errors import UsageError
from bgmpi.io.attempts import (
    LOCK,
    RowMap,
    alone,
    begin_attempt,
    begin_removal,
    next_number,
    read_attempts,
    row_maps,
)
from bgmpi.io.publish import remove_parts
from bgmpi.io.request_index import scan_requests

SETTINGS = {"model": "m", "seed": "0"}


def contents(*numbers: int) -> NDArray[np.uint64]:
    return np.array(numbers, np.uint64)


def begin(folder: Path, number: int, sha: str, content: NDArray[np.uint64], retry: bool = False) -> None:
    folder.mkdir(exist_ok=True)
    begin_attempt(folder, number, SETTINGS, sha * 32, content, retry_failed=retry)


def test_the_same_input_needs_no_map_and_another_one_is_matched_by_content(tmp_path: Path) -> None:
    begin(tmp_path, 1, "aa", contents(10, 20, 30))
    begin(tmp_path, 2, "bb", contents(30, 10, 40))
    attempts, damaged = read_attempts(tmp_path)
    assert [one.number for one in attempts] == [1, 2] and not damaged
    assert attempts[0].settings == SETTINGS and attempts[0].rows == 3
    maps, lost = row_maps(tmp_path, attempts, "bb" * 32, contents(30, 10, 40))
    assert not lost and maps[2] == RowMap()
    assert maps[1].rows is not None and maps[1].rows.tolist() == [1, -1, 0]


def test_errors_of_attempts_before_a_retry_do_not_count(tmp_path: Path) -> None:
    for number, retry in ((1, False), (2, True), (3, False)):
        begin(tmp_path, number, "aa", contents(1), retry)
    maps, _ = row_maps(tmp_path, read_attempts(tmp_path)[0], "aa" * 32, contents(1))
    assert {number: how.errors for number, how in maps.items()} == {1: False, 2: True, 3: True}


def test_a_damaged_manifest_or_rows_file_costs_its_attempt_alone_and_is_told(tmp_path: Path) -> None:
    begin(tmp_path, 1, "aa", contents(1, 2))
    begin(tmp_path, 2, "bb", contents(1, 2, 3))
    begin(tmp_path, 3, "cc", contents(1))
    (tmp_path / "attempt-0001.json").write_bytes(b'{"number": 1, "sett')
    rows = tmp_path / ("rows-" + "bb" * 8 + ".h5")
    rows.write_bytes(rows.read_bytes()[:100])
    attempts, damaged = read_attempts(tmp_path)
    assert [one.number for one in attempts] == [2, 3] and "attempt-0001.json" in damaged[0]
    maps, lost = row_maps(tmp_path, attempts, "cc" * 32, contents(1))
    assert list(maps) == [3] and "answers of attempt 2 do not count" in lost[0]


def test_a_number_is_never_used_twice_whatever_is_left(tmp_path: Path) -> None:
    assert next_number(tmp_path / "nowhere") == 1
    for name in ("journal-0004-abc-r00000.jsonl", "attempt-0002.json", ".segment-0006-abc-r00000-000001.h5.tmp", "x"):
        (tmp_path / name).touch()
    assert next_number(tmp_path) == 7


def test_parts_that_were_half_removed_count_for_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "parts"
    for number in (1, 2):
        begin(folder, number, "aa", contents(1))
    with monkeypatch.context() as patch:

        def killed(path: Path) -> None:
            if path.name == "attempt-0002.json":
                raise KeyboardInterrupt
            path.unlink()

        patch.setattr("bgmpi.io.publish.remove_if_there", killed)
        with pytest.raises(KeyboardInterrupt):
            remove_parts(folder)
    assert (folder / "attempt-0002.json").exists() and read_attempts(folder) == ((), ())
    remove_parts(folder)
    assert not folder.exists()
    remove_parts(folder)


def test_two_jobs_never_write_one_output(tmp_path: Path) -> None:
    warnings: list[str] = []
    opens = "from pathlib import Path\nfrom bgmpi.io.attempts import alone\n"
    hold = opens + f"with alone(Path({str(tmp_path)!r}), []):\n    "
    with alone(tmp_path, warnings):
        ended = subprocess.run([sys.executable, "-c", hold + "pass"], capture_output=True, text=True, check=False)
        assert ended.returncode and "is in use by process" in ended.stderr and "two jobs must not" in ended.stderr
        with pytest.raises(UsageError, match="is in use by process"), alone(tmp_path, []):
            pass
    assert not warnings
    # A holder that was killed holds nothing.
    kill = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    assert subprocess.run([sys.executable, "-c", hold + kill], check=False).returncode == -9
    with alone(tmp_path, warnings):
        assert (tmp_path / LOCK).exists()


def test_rows_are_known_again_in_another_order_and_equal_lines_are_told_apart(tmp_path: Path) -> None:
    lines = [b'{"custom_id": "a", "body": 1}', b"null", b'{"custom_id": "b", "body": 2}', b"null", b"null"]
    one, other = tmp_path / "one.jsonl", tmp_path / "other.jsonl"
    one.write_bytes(b"\n".join(lines))
    other.write_bytes(b"\n\n".join([lines[2], b'{"custom_id": "c", "body": 1}', lines[1], lines[0] + b"  ", lines[3]]))
    before, now = scan_requests(one).content, scan_requests(other).content
    assert len(set(before.tolist())) == 5
    assert now[0] == before[2] and now[3] == before[0]
    assert now[1] not in before
    assert now[[2, 4]].tolist() == before[[1, 3]].tolist()


def test_a_line_longer_than_the_limit_is_known_again_too(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_bytes(b'{"custom_id": "a", "x": "' + b"y" * 5000 + b'"}\n{"custom_id": "b"}\n')
    first = scan_requests(path, max_line_bytes=1000).content
    again = scan_requests(path, max_line_bytes=1000).content
    path.write_bytes(path.read_bytes().replace(b"yyy", b"yzy", 1))
    edited = scan_requests(path, max_line_bytes=1000).content
    assert first.tolist() == again.tolist()
    assert first[0] != edited[0] and first[1] == edited[1]


def test_a_removal_that_was_interrupted_leaves_no_attempt_to_go_on_with(tmp_path: Path) -> None:
    folder = tmp_path / "parts"
    for number in (1, 2):
        begin(folder, number, "aa", contents(1, 2))
    begin_removal(folder)
    assert read_attempts(folder) == ((), ())
    remove_parts(folder)
    assert not folder.exists()
    begin(folder, 1, "aa", contents(1, 2))
    assert [one.number for one in read_attempts(folder)[0]] == [1]
