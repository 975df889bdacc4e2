"""Laws of merging: one file as one job would have written it, or nothing and a word why (case C75)."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from results_for_tests import PROVENANCE, answer, error, logprobs, write_segments

from bgmpi.cli import main
from bgmpi.errors import InputError, MissingError, UsageError
from bgmpi.input_shard import InputShard
from bgmpi.io.columns import from_answers
from bgmpi.io.merge import find_shards, merge, whole_name
from bgmpi.io.publish import publish, remove_parts
from bgmpi.io.published_answers import PublishedAnswers
from bgmpi.request import Answer, Finish

SETTINGS = {"model": "m", "seed": "0"}


def rows_of_every_kind(count: int) -> list[list[Answer]]:
    """Rows with one sample or three, refused ones, ones with an error among good samples, and all that can be asked."""
    two, four = np.arange(2, dtype=np.int32), np.arange(4, dtype=np.int32)
    kinds = [
        lambda row: [answer(row, logprobs=logprobs(3, 2), stop_reason="stop é")],
        lambda row: [answer(row, sample, length=row % 5 + sample) for sample in range(3)],
        lambda row: [error(row, -1)],
        lambda row: [answer(row), replace(error(row, 1), tokens=two), answer(row, 2, default_cap=True)],
        lambda row: [replace(error(row, code="numeric_fault"), tokens=four, text="half")],
        lambda row: [answer(row, prompt=np.arange(row % 3, dtype=np.int32), stop_reason=7, finish=Finish.LENGTH)],
    ]
    return [kinds[(7 * row) % len(kinds)](row) for row in range(count)]


def write(path: Path, rows: Sequence[Sequence[Answer]], shard: InputShard | None = None, *,
          settings: Mapping[str, str] = SETTINGS, **changes: Any) -> Path:  # fmt: skip
    """Publish rows (of the whole input), or one shard of them under the shard's name."""
    total = len(rows)
    content = np.arange(total, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    attributes: dict[str, Any] = {"nonfinite_allowed": 0}
    mine = list(range(total))
    if shard is not None:
        path = Path(shard.file_name(str(path)))
        mine = mine[shard.number :: shard.count]
        attributes |= {"shard": shard.number, "shards": shard.count, "input_rows": total}
    answers = [replace(one, row=place) for place, row in enumerate(mine) for one in rows[row]]
    documents = {**PROVENANCE.documents, "settings": json.dumps(dict(settings))}
    about = replace(PROVENANCE, attributes=attributes, documents=documents, **changes)
    folder = write_segments(path, answers)
    samples = np.array([len(rows[row]) for row in mine], np.int32)
    publish(folder, path, about, len(mine), samples, content=content[mine])
    remove_parts(folder)
    return path


def columns(path: Path) -> dict[str, tuple[str, bytes]]:
    """Every dataset but the provenance: its type and bytes."""
    found: dict[str, tuple[str, bytes]] = {}
    with h5py.File(path, "r") as file:
        file.visititems(
            lambda name, item: found.__setitem__(name, (str(item.dtype), item[:].tobytes()))
            if isinstance(item, h5py.Dataset) and not name.startswith("provenance/") else None
        )  # fmt: skip
    return found


@pytest.mark.parametrize(("total", "count"), [(0, 2), (1, 3), (10, 4), (37, 1), (37, 2), (37, 5)])
def test_c75_merged_shards_are_the_file_of_one_job(tmp_path: Path, total: int, count: int) -> None:
    rows = rows_of_every_kind(total)
    whole = write(tmp_path / "whole.h5", rows)
    shards = [write(tmp_path / "r.h5", rows, InputShard(number, count)) for number in range(count)]
    done = merge([str(path) for path in reversed(shards)], tmp_path / "merged.h5")
    assert columns(tmp_path / "merged.h5") == columns(whole)
    with h5py.File(whole) as one, h5py.File(tmp_path / "merged.h5") as other:
        kept = set(one.attrs) - {"created_utc", "layout"}
        assert {name: other.attrs[name] for name in kept} == {name: one.attrs[name] for name in kept}
        assert set(other.attrs) == set(one.attrs) and json.loads(other.attrs["layout"])["shards"] == count
        about = json.loads(other["provenance/shards"][:].tobytes())
        assert [one["shard"] for one in about] == list(range(count)) and about[0]["config"] == {"max_tokens": 4}
        assert other["provenance/settings"][:].tobytes() == one["provenance/settings"][:].tobytes()
    failed = sum(any(one.error is not None for one in row) for row in rows)
    assert (done.rows, done.errors) == (total, failed)
    assert all(path.exists() for path in shards)


def test_a_published_file_gives_back_the_columns_of_its_segments_bit_for_bit(tmp_path: Path) -> None:
    rows = rows_of_every_kind(23)
    path = write(tmp_path / "r.h5", rows)
    published = PublishedAnswers(path)
    flat = [one for row in rows for one in row]
    expected = from_answers([replace(one, sample=-1) if len(rows[one.row]) == 1 and one.error else one for one in flat])
    assert published.is_error.tolist() == [one.error is not None for one in flat]
    assert published.bytes.sum() > 100 * len(flat)
    whole = published.table(0, len(flat))
    blocks = list(published.blocks(1000))
    assert len(blocks) > 3 and sum(block.entries for block in blocks) == len(flat)
    for name, column in expected.columns().items():
        got = whole.columns()[name]
        assert got.dtype == column.dtype and got.tobytes() == column.tobytes(), name
    some = np.array([5, 9, 3, 3])
    for name, column in expected.take(some).columns().items():
        assert published.take(some).columns()[name].tobytes() == column.tobytes(), name


def test_a_file_that_is_replaced_while_it_is_read_is_told(tmp_path: Path) -> None:
    path = write(tmp_path / "r.h5", rows_of_every_kind(5))
    published = PublishedAnswers(path)
    write(tmp_path / "r.h5", rows_of_every_kind(6))
    with pytest.raises(InputError, match="was replaced while it was read"):
        published.table(0, 1)


def test_c75_a_missing_shard_is_named_and_also_whether_it_has_begun(tmp_path: Path) -> None:
    rows = rows_of_every_kind(10)
    for number in (0, 3):
        write(tmp_path / "r.h5", rows, InputShard(number, 4))
    (tmp_path / "r.shard-0002-of-0004.h5.parts").mkdir()
    with pytest.raises(MissingError, match=r"2 of 4 shards missing: 1, 2 .*not ended yet: \S*-0002-of-0004.h5.parts"):
        merge([str(tmp_path / "r.h5")], tmp_path / "merged.h5")
    assert not (tmp_path / "merged.h5").exists()


def test_files_of_different_jobs_are_refused_by_what_differs(tmp_path: Path) -> None:
    rows = rows_of_every_kind(10)
    first = write(tmp_path / "a.h5", rows, InputShard(0, 2))
    others = {
        "seed is 0 and 1": write(tmp_path / "b.h5", rows, InputShard(1, 2), settings={**SETTINGS, "seed": "1"}),
        "input_sha256 is abab": write(tmp_path / "c.h5", rows, InputShard(1, 2), input_sha256="cd" * 32),
        "input_rows is 10 and 11": write(tmp_path / "d.h5", rows_of_every_kind(11), InputShard(1, 2)),
        "is one of 2, .* is one of 3": write(tmp_path / "e.h5", rows, InputShard(1, 3)),
        "shard 0/2 is there twice": write(tmp_path / "f.h5", rows, InputShard(0, 2)),
        "is no shard": write(tmp_path / "g.h5", rows),
    }
    for told, other in others.items():
        with pytest.raises(UsageError, match=told):
            merge([str(first), str(other)], tmp_path / "merged.h5")
    assert not (tmp_path / "merged.h5").exists()


def test_a_shard_that_is_not_complete_or_lacks_rows_is_malformed(tmp_path: Path) -> None:
    rows = rows_of_every_kind(10)
    paths = [write(tmp_path / "r.h5", rows, InputShard(number, 2)) for number in range(2)]
    with h5py.File(paths[1], "r+") as file:
        file.attrs["complete"] = 0
    with pytest.raises(InputError, match="is not complete"):
        merge([str(tmp_path / "r.h5")], tmp_path / "merged.h5")
    for path in paths:
        with h5py.File(path, "r+") as file:
            file.attrs["complete"], file.attrs["input_rows"] = 1, 12
    with pytest.raises(InputError, match="shard 0/2 of 12 rows has 6, and 5 are there"):
        merge([str(tmp_path / "r.h5")], tmp_path / "merged.h5")


def test_shards_are_named_one_by_one_by_a_pattern_or_by_the_name_that_all_were_given(tmp_path: Path) -> None:
    rows = rows_of_every_kind(4)
    paths = [write(tmp_path / "r[1].h5", rows, InputShard(number, 2)) for number in range(2)]
    name, pattern = str(tmp_path / "r[1].h5"), str(tmp_path / "r*.shard-*.h5")
    assert find_shards([str(path) for path in paths]) == find_shards([name]) == find_shards([pattern]) == paths
    assert find_shards([pattern, name, str(paths[1])]) == paths
    assert whole_name([name]) == name
    for words in ([pattern], [str(path) for path in paths]):
        with pytest.raises(UsageError, match="name the output"):
            whole_name(words)
    with pytest.raises(MissingError, match="no shards of that name"):
        find_shards([str(tmp_path / "other.h5")])


def test_an_output_that_is_there_or_belongs_to_a_job_is_not_touched(tmp_path: Path) -> None:
    rows = rows_of_every_kind(4)
    paths = [write(tmp_path / "r.h5", rows, InputShard(number, 2)) for number in range(2)]
    words = [str(path) for path in paths]
    with pytest.raises(UsageError, match="is one of the shards"):
        merge(words, paths[0], overwrite=True)
    output = tmp_path / "r.h5"
    output.write_bytes(b"mine")
    with pytest.raises(UsageError, match="exists; pass --overwrite"):
        merge(words, output)
    (tmp_path / "r.h5.parts").mkdir()
    with pytest.raises(UsageError, match=r"a job that writes .* has not ended"):
        merge(words, output, overwrite=True)
    (tmp_path / "r.h5.parts").rmdir()
    assert output.read_bytes() == b"mine"
    merge(words, output, overwrite=True)
    assert len(columns(output)) > 30


def test_the_command_ends_as_a_run_does_and_writes_failed_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = [[answer(row)] for row in range(4)]
    for rows, name, code in ((good, "good.h5", 0), (rows_of_every_kind(8), "mixed.h5", 3)):
        for number in range(2):
            write(tmp_path / name, rows, InputShard(number, 2))
        errors = tmp_path / f"{name}.errors"
        assert main(["merge", str(tmp_path / name), "--error-file", str(errors)]) == code
        failed = sum(any(one.error is not None for one in row) for row in rows)
        assert f"{len(rows) - failed} good, {failed} failed" in capsys.readouterr().out
        assert [json.loads(line)["custom_id"] for line in errors.read_text().splitlines()] == [
            row[0].custom_id for row in rows if any(one.error is not None for one in row)
        ]
    ids = []
    for name in ("mixed.shard-0000-of-0002.h5", "mixed.shard-0001-of-0002.h5", "mixed.h5"):
        assert main(["export", str(tmp_path / name), "-o", str(tmp_path / f"{name}.jsonl")]) == 0
        ids.append({json.loads(line)["id"] for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()})
    assert ids[0] | ids[1] == ids[2] and not ids[0] & ids[1]
    capsys.readouterr()
    assert main(["inspect", str(tmp_path / "good.shard-0001-of-0002.h5")]) == 0
    assert "shard     1 of 2, of 4 rows" in capsys.readouterr().out
    assert main(["inspect", str(tmp_path / "good.h5")]) == 0 and "shard  " not in capsys.readouterr().out
    assert main(["merge", str(tmp_path / "good.h5")]) == 2
    (tmp_path / "good.shard-0001-of-0002.h5").unlink()
    assert main(["merge", str(tmp_path / "good.h5"), "--overwrite"]) == 66
    assert main(["merge", str(tmp_path / "nothing.h5"), "-o", str(tmp_path / "x.h5")]) == 66


@pytest.mark.slow
def test_merging_holds_blocks_and_not_the_whole_job_in_memory(tmp_path: Path) -> None:
    rows = [[answer(row, length=20_000)] for row in range(400)]  # 64 MB of tokens and log-probability columns
    for number in range(3):
        write(tmp_path / "r.h5", rows, InputShard(number, 3))
    del rows
    tracemalloc.start()
    merge([str(tmp_path / "r.h5")], tmp_path / "r.h5", block_bytes=1 << 20)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 << 20
