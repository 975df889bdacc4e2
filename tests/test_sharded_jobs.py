"""A job in shards answers bit for bit what one job answers, and its merged file goes on as that job's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import checkpoints
import commands
import h5py
import jobs
import numpy as np
import pytest
from tokenizers_for_tests import make_tokenizer

from bgmpi.input_shard import InputShard
from bgmpi.io.merge import merge

TIMES = ("samples/queued", "samples/first_token", "samples/done")


def bodies() -> list[dict[str, Any]]:
    """Rows without a seed of their own, most of them drawn at random."""
    extras: list[dict[str, Any]] = [
        {"temperature": 1.1, "n": 2}, {"temperature": 0}, {"temperature": 0.8, "logprobs": 2},
    ]  # fmt: skip
    return [
        {"prompt": prompt, "max_tokens": 3 + 4 * (i % 4), "ignore_eos": True, **extras[i % 3]}
        for i, prompt in enumerate(jobs.prompts(16, longest=40, seed=5))
    ]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """A sparse model, requests of which two are bad, and the file of an unsharded job."""
    root = tmp_path_factory.mktemp("sharded")
    model = make_tokenizer(checkpoints.make("mixtral", root / "model"))
    requests = jobs.write_requests(root / "r.jsonl", [*bodies(), {"prompt": "x", "max_tokens": -1}, {"prompt": 7}])
    jobs.run_jobs(1, [words(model, requests, root / "whole.h5")], root)
    return model, requests, root / "whole.h5"


def words(model: Path, requests: Path, output: Path, *more: str) -> list[str | Path]:
    return ["--model", model, "-i", requests, "-o", output, "--dtype", "float32", "--seed", "11", "--check",
            "--progress", "off", *more]  # fmt: skip


def assert_same_answers(path: Path, expected: Path) -> None:
    """Every dataset is there with the same bytes, but for times, and log-probabilities within rounding."""
    with h5py.File(path, "r") as one, h5py.File(expected, "r") as other:
        names: list[str] = []
        other.visititems(lambda name, item: names.append(name) if isinstance(item, h5py.Dataset) else None)
        assert len(names) > 40
        for name in names:
            if name.startswith("provenance/") or name in TIMES:
                assert name in one
            elif other[name].dtype == np.float32:
                np.testing.assert_allclose(one[name][:], other[name][:], rtol=1e-4, err_msg=name)
            else:
                assert one[name][:].tobytes() == other[name][:].tobytes(), name


def test_shards_answer_what_one_job_answers_also_where_a_shard_has_no_row(
    work: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    model, requests, whole = work
    output, errors = tmp_path / "out.h5", str(tmp_path / "errors.jsonl")
    thirds = [words(model, requests, output, "--shard", f"{number}/3", "--error-file", errors) for number in range(3)]
    ran = commands.run_commands(
        1,
        [
            *(["run", *third] for third in thirds),
            ["merge", output],
            ["run", *words(model, requests, output)],
            ["run", *words(model, requests, output, "--shard", "20/2000")],
            ["merge", output, "--overwrite"],
        ],
        tmp_path,
    )  # fmt: skip
    assert [one.code for one in ran] == [0, 3, 3, 3, 3, 0, 2], ran
    assert_same_answers(output, whole)
    with h5py.File(whole) as one, h5py.File(tmp_path / "out.shard-0001-of-0003.h5") as shard:
        about = [int(shard.attrs[name]) for name in ("shard", "shards", "input_rows", "n_rows")]
        assert about == [1, 3, 18, 6]
        assert shard.attrs["input_sha256"] == one.attrs["input_sha256"]
        assert shard["rows/content"][:].tolist() == one["rows/content"][1::3].tolist()
    lines = [path.read_text().splitlines() for path in sorted(tmp_path.glob("errors.shard-*-of-0003.jsonl"))]
    assert [[json.loads(line)["custom_id"] for line in own] for own in lines] == [[], ["r16"], ["r17"]]
    assert "nothing is left to do" in ran[4].stderr  # the merged file is this job's answer
    assert "2000 shards: many sites" in ran[5].stderr and "0 of its 18 rows" in ran[5].stderr
    assert "of another number of shards are beside this one, which is 20/2000: out.shard-0000-of-0003" in ran[5].stderr
    assert "shards of different jobs" in ran[6].stderr and "of another number" not in ran[2].stderr


@pytest.mark.mpi(2)
def test_shards_on_several_ranks_are_merged_with_those_of_one(work: tuple[Path, Path, Path], tmp_path: Path) -> None:
    model, requests, whole = work
    output = tmp_path / "out-{shard}.h5"
    for ranks, number in ((2, 0), (1, 1)):
        jobs.run_jobs(ranks, [words(model, requests, output, "--shard", f"{number}/2")], tmp_path)
    merge([str(tmp_path / "out-*.h5")], tmp_path / "out.h5")
    assert_same_answers(tmp_path / "out.h5", whole)
    assert InputShard(1, 2).file_name(str(output)) == str(tmp_path / "out-0001.h5")
    assert np.array_equal(jobs.tokens_of(tmp_path / "out-0001.h5")[0], jobs.tokens_of(whole)[2])
