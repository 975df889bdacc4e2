"""Which answers of several attempts count."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from results_for_tests import answer, error

from bgmpi.io.attempts import GONE, RowMap
from bgmpi.io.collected import begun, collect
from bgmpi.io.journal import PROGRESS_KEPT
from bgmpi.io.segments import SEGMENT_VERSION, SegmentWriter, attempt_of
from bgmpi.request import Answer, Finish


def write(folder: Path, attempt: int, *answers: Answer, rank: int = 0) -> None:
    with SegmentWriter(folder, rank, attempt=attempt) as writer:
        for one in answers:
            writer.add(one)


def named(folder: Path, maps: dict[int, RowMap] | None = None) -> list[tuple[int, int, bool]]:
    found = collect(folder, maps)
    return sorted(zip(found.row.tolist(), found.sample.tolist(), found.is_error.tolist(), strict=True))


def unfinished(row: int, sample: int, length: int) -> Answer:
    return answer(row, sample, length, finish=Finish.UNFINISHED, text="", done_s=float("nan"))


def test_a_name_tells_its_attempt(tmp_path: Path) -> None:
    write(tmp_path, 37, answer(0))
    assert [attempt_of(path.name) for path in tmp_path.glob("segment-*")] == [37]
    assert attempt_of("segment-x.h5") == 0


def test_rows_of_an_older_input_are_found_in_the_present_one_and_those_that_left_it_do_not_count(
    tmp_path: Path,
) -> None:
    write(tmp_path, 1, answer(0), answer(1), answer(2), answer(2, 1))
    write(tmp_path, 2, answer(1))
    maps = {1: RowMap(np.array([GONE, 3, 0])), 2: RowMap()}
    assert named(tmp_path, maps) == [(0, 0, False), (0, 1, False), (1, 0, False), (3, 0, False)]


def test_errors_that_are_tried_again_do_not_count(tmp_path: Path) -> None:
    write(tmp_path, 1, answer(0), error(1), error(2, -1))
    assert named(tmp_path, {1: RowMap()}) == [(0, 0, False), (1, 0, True), (2, -1, True)]
    assert named(tmp_path, {1: RowMap(errors=False)}) == [(0, 0, False)]


def test_of_several_attempts_the_newest_counts_also_where_it_refused_a_whole_row(tmp_path: Path) -> None:
    write(tmp_path, 2, answer(0, length=2), answer(1), answer(1, 1), error(2, -1))
    write(tmp_path, 1, answer(0, length=1), error(1, -1), answer(2))
    write(tmp_path, 3, answer(0, length=3))
    assert named(tmp_path) == [(0, 0, False), (1, 0, False), (1, 1, False), (2, -1, True)]
    found = collect(tmp_path)
    at = int(np.flatnonzero(found.row == 0)[0])
    assert attempt_of(found.segments[found.segment[at]].path.name) == 3


def test_two_answers_of_one_attempt_are_both_kept_for_the_law_to_find(tmp_path: Path) -> None:
    write(tmp_path, 1, answer(0))
    write(tmp_path, 1, answer(0), rank=1)
    assert len(named(tmp_path)) == 2


def test_an_attempt_that_nothing_is_known_of_is_damaged(tmp_path: Path) -> None:
    write(tmp_path, 1, answer(0))
    found = collect(tmp_path, {})
    assert not len(found.row) and "nothing is known of attempt 1" in found.damaged[0]


def test_only_the_last_progress_of_a_writer_is_there_and_the_longest_of_all_counts(tmp_path: Path) -> None:
    writers = [SegmentWriter(tmp_path, rank, attempt=1) for rank in (0, 1)]
    writers[0].save_progress([unfinished(0, 0, 2), unfinished(1, 0, 9)])
    for _ in range(PROGRESS_KEPT):
        writers[0].save_progress([unfinished(0, 0, 4), unfinished(2, 1, 3)])
    writers[1].save_progress([unfinished(2, 1, 5)])
    writers[1].add(answer(3))
    for writer in writers:
        writer.close()
    assert len(list(tmp_path.glob("progress-*"))) == PROGRESS_KEPT + 1
    maps = {1: RowMap()}
    found = begun(maps, collect(tmp_path, maps))
    assert {name: len(one.tokens) for name, one in found.items()} == {(0, 0): 4, (2, 1): 5}
    write(tmp_path, 2, answer(0))
    maps = {1: RowMap(np.array([5, 5, GONE, 5])), 2: RowMap()}
    assert not begun(maps, collect(tmp_path, maps)).keys() - {(5, 0)}


def test_files_of_another_version_are_named_and_the_others_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for attempt, version in ((1, 99), (2, SEGMENT_VERSION)):
        monkeypatch.setattr("bgmpi.io.segments.SEGMENT_VERSION", version)
        with SegmentWriter(tmp_path, 0, attempt=attempt) as writer:
            writer.add(answer(attempt))
            writer.flush()
            writer.save_progress([unfinished(5 * attempt, 0, 4)])
    maps = {1: RowMap(), 2: RowMap()}
    found = collect(tmp_path, maps)
    assert found.row.tolist() == [2] and list(begun(maps, found)) == [(10, 0)]
    named = sorted(sentence.split("-")[0] for sentence in found.damaged)
    assert named == ["progress", "segment"]
    assert all("expected bgmpi-segment 1, got bgmpi-segment 99" in sentence for sentence in found.damaged)
    assert "nothing is known of attempt 2" in " ".join(collect(tmp_path, {1: RowMap()}).damaged)


def test_a_sequence_that_moved_is_in_its_old_ranks_progress_until_the_new_rank_has_saved_it(tmp_path: Path) -> None:
    old, new = (SegmentWriter(tmp_path, rank, attempt=1) for rank in (0, 1))
    old.save_progress([unfinished(0, 0, 7), unfinished(1, 0, 2)])
    for tokens in (3, 4):  # at most twice, before the rank that it went to has saved it
        old.save_progress([unfinished(1, 0, tokens)])
        maps = {1: RowMap()}
        found = begun(maps, collect(tmp_path, maps))
        assert {name: len(one.tokens) for name, one in found.items()} == {(0, 0): 7, (1, 0): tokens}
    new.save_progress([unfinished(0, 0, 9)])
    old.save_progress([unfinished(1, 0, 5)])
    found = begun(maps, collect(tmp_path, maps))
    assert {name: len(one.tokens) for name, one in found.items()} == {(0, 0): 9, (1, 0): 5}
    for writer in (old, new):
        writer.close()


def test_a_sequence_that_ended_later_has_no_progress(tmp_path: Path) -> None:
    with SegmentWriter(tmp_path, 0) as writer:
        writer.save_progress([unfinished(0, 0, 2), unfinished(1, 0, 2)])
    write(tmp_path, 2, answer(0))
    maps = {1: RowMap(), 2: RowMap()}
    assert list(begun(maps, collect(tmp_path, maps))) == [(1, 0)]
