"""What an attempt does with what earlier ones left: every case of the decision, and who has ended."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from bgmpi.errors import UsageError
from bgmpi.recovery import Found, Rows, Start, differences, ended_sequences, how_to_start, restoring_pays

SAME = {"model": "a", "temperature": "0.0"}
OTHER = {"model": "a", "temperature": "0.7"}


def start(found: Found, resume: str = "auto", overwrite: bool = False, **more: bool) -> Start:
    return how_to_start(found, SAME, resume=resume, overwrite=overwrite, **{"requeued": False, **more})


def at(**facts: Any) -> Found:
    return Found("r.h5", "r.h5.parts", **facts)


NONE = at()
PARTS = at(parts=SAME)
OTHER_PARTS = at(parts=OTHER)
WHOLE = at(exists=True, whole=True, settings=SAME, rows=Rows(10))
WHOLE_WITH_ERRORS = at(exists=True, whole=True, settings=SAME, rows=Rows(10, failed=2))
OTHER_INPUT = at(exists=True, settings=SAME, rows=Rows(8, new=3, gone=2))
OTHER_INPUT_OLD_FILE = at(exists=True, settings=SAME)
OTHER_SETTINGS = at(exists=True, whole=True, settings=OTHER, rows=Rows(10))
FOREIGN = at(exists=True)


@pytest.mark.parametrize(
    ("found", "words", "expected"),
    [
        (NONE, {}, Start.FRESH),
        (NONE, {"resume": "never"}, Start.FRESH),
        (NONE, {"resume": "force"}, Start.FRESH),
        (PARTS, {}, Start.RESUME),
        (PARTS, {"overwrite": True}, Start.RESUME),  # the same words again, by a batch system
        (PARTS, {"resume": "must"}, Start.RESUME),
        (PARTS, {"resume": "never", "overwrite": True}, Start.FRESH),
        (OTHER_PARTS, {"resume": "force"}, Start.RESUME),
        (OTHER_PARTS, {"overwrite": True}, Start.FRESH),
        (WHOLE, {}, Start.NOTHING),
        (WHOLE, {"resume": "must"}, Start.NOTHING),
        (WHOLE, {"overwrite": True}, Start.FRESH),
        (WHOLE, {"overwrite": True, "requeued": True}, Start.NOTHING),
        (OTHER_INPUT, {"overwrite": True}, Start.FRESH),
        (OTHER_SETTINGS, {"overwrite": True, "requeued": True}, Start.FRESH),
        (FOREIGN, {"overwrite": True}, Start.FRESH),
        (FOREIGN, {"overwrite": True, "resume": "force"}, Start.FRESH),
        (PARTS, {"retry_failed": True}, Start.RESUME),
        (WHOLE, {"retry_failed": True}, Start.NOTHING),
        (WHOLE, {"resume": "must", "overwrite": True}, Start.NOTHING),
        (WHOLE_WITH_ERRORS, {}, Start.NOTHING),
        (WHOLE_WITH_ERRORS, {"retry_failed": True}, Start.REOPEN),
        (WHOLE_WITH_ERRORS, {"retry_failed": True, "resume": "must"}, Start.REOPEN),
        (WHOLE_WITH_ERRORS, {"retry_failed": True, "overwrite": True}, Start.FRESH),
        (OTHER_INPUT, {"resume": "must"}, Start.REOPEN),
        (OTHER_INPUT, {"resume": "force"}, Start.REOPEN),
        (OTHER_INPUT, {"resume": "must", "overwrite": True}, Start.REOPEN),
        (OTHER_INPUT_OLD_FILE, {"overwrite": True}, Start.FRESH),
        (OTHER_SETTINGS, {"resume": "force"}, Start.REOPEN),
    ],
)
def test_how_an_attempt_starts(found: Found, words: dict[str, Any], expected: Start) -> None:
    assert start(found, **words) is expected


@pytest.mark.parametrize(
    ("found", "words", "told"),
    [
        (NONE, {"resume": "must"}, "nothing to go on with"),
        (PARTS, {"resume": "never"}, "r.h5.parts exists; pass --overwrite"),
        (OTHER_PARTS, {}, "temperature was 0.7, is 0.0.*--resume force.*--overwrite"),
        (OTHER_PARTS, {"resume": "must", "overwrite": True}, "temperature was 0.7, is 0.0"),
        (WHOLE, {"resume": "never"}, "r.h5 exists; pass --overwrite"),
        (OTHER_INPUT, {}, "3 rows .* new or edited, 2 .* are gone, 8 have .*--resume must to keep.*--overwrite"),
        (OTHER_INPUT, {"retry_failed": True}, "are new or edited"),
        (OTHER_INPUT_OLD_FILE, {}, "cannot be told, .*before outputs had hashes of their rows; pass --overwrite"),
        (OTHER_INPUT_OLD_FILE, {"resume": "must"}, "before outputs had hashes"),
        (OTHER_SETTINGS, {}, "is not the answer to this job, .*temperature was 0.7, is 0.0.*--resume force to keep"),
        (OTHER_SETTINGS, {"resume": "must", "overwrite": True}, "temperature was 0.7, is 0.0"),
        (FOREIGN, {}, "is not the answer to this job; pass --overwrite"),
        (FOREIGN, {"resume": "must"}, "is not the answer to this job; pass --overwrite"),
        (FOREIGN, {"resume": "force"}, "is not the answer to this job; pass --overwrite"),
    ],
)
def test_what_only_the_user_can_decide_is_refused(found: Found, words: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        start(found, **words)


def test_differences_name_both_values_and_what_is_missing() -> None:
    assert differences({"a": "1", "b": "2"}, {"b": "3", "c": "4"}) == [
        "a was 1, is not set", "b was 2, is 3", "c was not set, is 4"
    ]
    assert differences(SAME, dict(SAME)) == []


def test_answers_end_sequences_and_a_refusal_its_whole_row() -> None:
    first = np.array([0, 1, 4, 6])
    row = np.array([1, 1, 2, 0, 1])
    sample = np.array([0, 2, -1, 0, 7], np.int32)  # sample 7 of row 1: a row that had more samples once
    done, failed = ended_sequences(first, row, sample, np.array([False, True, True, False, False]))
    assert done.tolist() == [True, True, False, False, False, False]
    assert failed.tolist() == [False, False, False, True, True, True]


def test_no_answers_end_nothing() -> None:
    none = np.empty(0, np.int64)
    done, failed = ended_sequences(np.array([0, 2]), none, none.astype(np.int32), none.astype(bool))
    assert not done.any() and not failed.any() and len(done) == 2


def test_kv_is_read_only_where_that_is_faster_than_computing_it() -> None:
    size, tokens = np.array([1000, 1000, 10]), np.array([10, 100, 1])
    assert restoring_pays(size, tokens, 100.0, 5.0).tolist() == [False, True, True]
    assert restoring_pays(size, tokens, 1.0, float("nan")).all()
