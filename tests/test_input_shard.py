"""Laws of shards of an input: which rows, which files, and where in a Slurm array a task stands (case C75)."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from bgmpi.config import resolve
from bgmpi.errors import UsageError
from bgmpi.input_shard import InputShard, read_shard, shard_of, shard_pattern, this_shard


def array(ids: list[int], task: int, step: int | None = None) -> Mapping[str, str]:
    """What Slurm tells the task of an array of these ids."""
    told = {"ID": task, "COUNT": len(ids), "MIN": min(ids), "MAX": max(ids)} | ({"STEP": step} if step else {})
    return {f"SLURM_ARRAY_TASK_{word}": str(value) for word, value in told.items()}


@pytest.mark.parametrize("count", [1, 2, 3, 4, 11, 1500])
@pytest.mark.parametrize("total", [0, 1, 10, 100])
def test_c75_shards_are_disjoint_complete_and_even(count: int, total: int) -> None:
    shards = [InputShard(number, count) for number in range(count)]
    rows = [list(range(total))[shard.number :: shard.count] for shard in shards]
    assert sorted(row for own in rows for row in own) == list(range(total))
    assert [shard.rows(total) for shard in shards] == [len(own) for own in rows]
    assert max(map(len, rows)) - min(map(len, rows)) <= 1


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("results.h5", "results.shard-0002-of-0004.h5"),
        ("/a.b/c/errors", "/a.b/c/errors.shard-0002-of-0004"),
        ("dir/.hidden", "dir/.hidden.shard-0002-of-0004"),
        ("a.b.jsonl", "a.b.shard-0002-of-0004.jsonl"),
        ("{shard}/r.h5", "0002/r.h5"),
        ("r-{shard}-{shards}.h5", "r-0002-0004.h5"),
        ("/dev/stderr", "/dev/stderr"),
    ],
)
def test_files_carry_the_number_of_their_shard(name: str, expected: str) -> None:
    assert InputShard(2, 4).file_name(name) == expected


def test_c75_no_two_shards_write_the_same_file_and_a_pattern_finds_them() -> None:
    from fnmatch import fnmatchcase

    names = {InputShard(number, 1500).file_name("out/r.h5") for number in range(1500)}
    assert len(names) == 1500
    assert all(fnmatchcase(name, shard_pattern("out/r.h5")) for name in names)


@pytest.mark.parametrize(
    ("ids", "step"),
    [([0, 1, 2, 3], 1), ([3, 5, 7, 9], 2), ([1000, 1001], 1), ([0, 4, 8], None), ([7, 8], None)],
)
def test_c75_a_tasks_shard_is_its_rank_among_the_ids_of_its_array(ids: list[int], step: int | None) -> None:
    found = [this_shard(None, array(ids, task, step)) for task in ids]
    assert found == [InputShard(place, len(ids)) for place in range(len(ids))]


@pytest.mark.parametrize(
    "environ",
    [
        array([1, 3, 7], 3, 1),  # what Slurm tells of --array=1,3,7
        array([1, 3], 3, 1),  # two failed tasks of an earlier array, started again
        array([1, 3, 7], 3),
        array([0, 4], 2),
        array([2], 2, 1),
        array([0], 0, 1),
        {"SLURM_ARRAY_TASK_ID": "2"},
        {**array([0, 1], 1), "SLURM_ARRAY_TASK_COUNT": "many"},
        {**array([0, 1], 1), "SLURM_ARRAY_TASK_ID": "9"},
        {**array([0, 1], 1), "SLURM_ARRAY_TASK_COUNT": "0"},
    ],
)
def test_a_task_whose_place_cannot_be_told_is_refused_and_told_what_to_pass(environ: Mapping[str, str]) -> None:
    with pytest.raises(UsageError, match=r"--shard K/N for shard K .*--shard off"):
        this_shard(None, environ)
    assert this_shard("off", environ) is None
    assert this_shard("2/4", environ) == InputShard(2, 4)


def test_outside_of_an_array_nothing_is_sharded_unasked() -> None:
    assert this_shard(None, {"SLURM_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": ""}) is None


@pytest.mark.parametrize("word", ["4/4", "1", "-1/4", "0/0", "a/b", "1/", "1 2/40", "", 3, None])
def test_a_word_that_is_no_shard_is_refused(word: object) -> None:
    with pytest.raises(ValueError, match="expected K/N with K from 0"):
        read_shard(word)


def test_words_of_shards_read_back() -> None:
    typed = ("0/1", " 2 / 4 ", "OFF", "none", "007/9")
    assert [read_shard(word) for word in typed] == ["0/1", "2/4", "off", "off", "7/9"]
    assert shard_of(str(InputShard(3, 9))) == InputShard(3, 9) and shard_of("off") is None and shard_of(None) is None


def test_the_configuration_names_every_written_file_after_its_shard_and_says_who_chose_it() -> None:
    words = ["--error-file", "e.jsonl", "--metrics-file", "m.jsonl", "--trace", "t.jsonl"]
    by_flag = resolve([*words, "--shard", "1/2"], {})
    mark = "shard-0001-of-0002"
    assert [by_flag.output_file, by_flag.error_file, by_flag.metrics_file, by_flag.trace] == [
        f"results.{mark}.h5", f"e.{mark}.jsonl", f"m.{mark}.jsonl", f"t.{mark}.jsonl",
    ]  # fmt: skip
    assert by_flag.source("shard") == "flag" and by_flag.input_file is None
    by_slurm = resolve(words, array([0, 1], 1, 1))
    assert (by_slurm.shard, by_slurm.source("shard")) == ("1/2", "environment")
    assert by_slurm.output_file == by_flag.output_file
    assert resolve([*words, "--shard", "off"], array([0, 1], 1, 1)).output_file == "results.h5"
    assert resolve(words, {"BGMPI_SHARD": "1/2"}).trace == by_flag.trace


def test_a_name_that_waits_for_a_shard_is_refused_without_one() -> None:
    with pytest.raises(UsageError, match=r"--output-file r\{shard\}.h5.*pass --shard"):
        resolve(["-o", "r{shard}.h5"], {})
