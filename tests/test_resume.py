"""Going on after kills: with any number of ranks, edited inputs, damaged files and tried-again errors.

Every test compares with an unbroken run of the same job, which is one row after another the same answers.  Kills at
every instant are test_fault_matrix's.
"""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import checkpoints
import h5py
import jobs
import launch
import numpy as np
import pytest
from kill_at import kill_words
from tokenizers_for_tests import make_tokenizer

from bgmpi.io.attempts import read_attempts
from bgmpi.io.collected import collect
from bgmpi.io.segments import parts_folder

Answers = list[list[int]]


def bodies() -> list[dict[str, Any]]:
    """Rows that end at different times, greedy and sampled, some with samples, log-probabilities, stop texts."""
    extras: list[dict[str, Any]] = [
        {"temperature": 0}, {"temperature": 0.9, "seed": 3}, {"temperature": 1.1, "n": 2},
        {"temperature": 0.7, "logprobs": 2}, {"temperature": 1.0, "stop": ["zq"]},
    ]
    return [
        {"prompt": prompt, "max_tokens": 3 + 9 * (i % 5), "ignore_eos": True, **extras[i % len(extras)]}
        for i, prompt in enumerate(jobs.prompts(20, longest=40, seed=5))
    ]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Answers]:
    """A sparse model, the requests, and what an unbroken run answers."""
    root = tmp_path_factory.mktemp("resume")
    model = make_tokenizer(checkpoints.make("mixtral", root / "model"))
    requests = jobs.write_requests(root / "r.jsonl", [*bodies(), {"prompt": "x", "max_tokens": -1}])
    jobs.run_jobs(1, [words(model, requests, root / "whole.h5")], root)
    return model, requests, jobs.tokens_of(root / "whole.h5")


def words(model: Path, requests: Path, output: Path, *more: str) -> list[str | Path]:
    """Return the words behind `bgmpi run`: segments and progress are written in every round of at most 4 steps."""
    return ["--model", model, "-i", requests, "-o", output, "--dtype", "float32", "--checkpoint-interval", "0",
            "--page-tokens", "4", "--max-num-seqs", "4", "--check", "--progress", "off", *more]


def run(
    ranks: int, *arguments: str | Path, before: tuple[str | Path, ...] = (), expect: int | None = None
) -> launch.Ended:
    """Run the program, or what stands before it, on so many ranks."""
    argv = [*(before or (launch.script("bgmpi"),)), "run", *arguments]
    return launch.launch(argv, expect=expect) if ranks == 1 else launch.mpiexec(ranks, argv, expect=expect)


def finished(output: Path) -> set[tuple[int, int]]:
    """Return (row, sample) of every answer that valid segments hold, each once."""
    found = collect(parts_folder(output))
    named = list(zip(found.row.tolist(), found.sample.tolist(), strict=True))
    assert len(named) == len(set(named))
    return set(named)


@launch.on_ranks(2, 3)
def test_any_number_of_ranks_goes_on_where_a_killed_rank_left_the_others(
    work: tuple[Path, Path, Answers], ranks: int, tmp_path: Path
) -> None:
    model, requests, expected = work
    output = tmp_path / "out.h5"
    known: set[tuple[int, int]] = set()
    for turn, (size, victim) in enumerate([(ranks, ranks - 1), (5 - ranks, 0), (ranks, "all")]):
        deadly = tuple(kill_words(victim, "bgmpi.executor:Executor.step", "before", 12 + turn))
        ended = run(size, *words(model, requests, output), before=deadly)
        assert ended.returncode not in (0, 2, 3), ended
        now = finished(output)
        assert known <= now
        known = now
    assert known
    run(4 - ranks, *words(model, requests, output, "--resume", "must"), expect=3)
    assert jobs.tokens_of(output) == expected


def test_unfinished_answers_go_on_where_they_were(work: tuple[Path, Path, Answers], tmp_path: Path) -> None:
    """Tokens that a checkpoint holds are not drawn again, and log-probabilities and times are those of one run."""
    model, requests, expected = work
    output = tmp_path / "out.h5"
    run(1, *words(model, requests, output), before=tuple(kill_words(0, "bgmpi.executor:Executor.step", "before", 25)))
    metrics = tmp_path / "metrics.jsonl"
    ended = run(1, *words(model, requests, output, "--metrics-file", str(metrics)), expect=3)
    assert jobs.tokens_of(output) == expected
    (told,) = [line for line in ended.stdout.splitlines() if line.startswith("finish")]
    assert sum(int(one.split()[0]) for one in told.removeprefix("finish").split(",")) == len(expected) - 1
    generated = json.loads(metrics.read_text().splitlines()[-1])["generated_tokens"]
    left = int(ended.stderr.split("are begun with ")[1].split()[0])
    assert left > 0
    with h5py.File(output, "r") as file:
        total = len(file["tokens/values"])
        first, done = file["samples/first_token"][:], file["samples/done"][:]
        chosen, cuts, width = file["logprobs/chosen"][:], file["tokens/offsets"][:], file["samples/top_logprobs"][:]
    assert generated < total - left + 1
    good = ~np.isnan(done)
    assert (first[good] <= done[good]).all()
    for sample in np.flatnonzero(width >= 0):
        assert np.isfinite(chosen[cuts[sample] : cuts[sample + 1]]).all()


def test_edited_new_and_reordered_rows_find_their_answers(work: tuple[Path, Path, Answers], tmp_path: Path) -> None:
    model, requests, _ = work
    output = tmp_path / "out.h5"
    mine = tmp_path / "mine.jsonl"
    rows = [json.loads(line) for line in requests.read_text().splitlines()]
    for number, row in enumerate(rows):  # a row without a seed is keyed by its number
        row["body"].setdefault("seed", number)
    mine.write_text("".join(json.dumps(row) + "\n" for row in rows))
    in_order = words(model, mine, output, "--ageing", "0")
    run(1, *in_order, before=tuple(kill_words(0, "bgmpi.executor:Executor.step", "before", 25)))
    kept = [row for row, sample in finished(output) if sample >= 0]
    assert 1 in kept
    rows[1]["body"]["max_tokens"] = 7
    rows.append({**rows[0], "custom_id": "new", "body": {**rows[0]["body"], "prompt": [9, 8, 7]}})
    rows.reverse()
    mine.write_text("".join(json.dumps(row) + "\n" for row in rows))
    ended = run(1, *words(model, mine, output), expect=3)
    assert f"{len(kept) - kept.count(1)} are done" in ended.stderr, ended
    fresh = tmp_path / "fresh.h5"
    run(1, *words(model, mine, fresh), expect=3)
    assert jobs.tokens_of(output) == jobs.tokens_of(fresh)
    with h5py.File(output, "r") as file:
        assert file["rows/custom_id/values"][:].tobytes().decode().startswith("newr20r19")


def test_changed_settings_are_refused_unless_forced(work: tuple[Path, Path, Answers], tmp_path: Path) -> None:
    model, requests, expected = work
    output = tmp_path / "out.h5"
    run(1, *words(model, requests, output), before=tuple(kill_words(0, "bgmpi.executor:Executor.step", "before", 20)))
    ended = run(1, *words(model, requests, output, "--max-tokens", "5"), expect=2)
    assert "max_tokens was None, is 5" in ended.stderr and "--resume force" in ended.stderr
    run(1, *words(model, requests, output, "--max-tokens", "5", "--resume", "force"), expect=3)
    assert jobs.tokens_of(output) == expected  # every row brings its own


def test_the_whole_answer_is_not_computed_again(work: tuple[Path, Path, Answers], tmp_path: Path) -> None:
    model, requests, expected = work
    output = tmp_path / "out.h5"
    run(1, *words(model, requests, output), expect=3)
    stamp = output.stat().st_mtime_ns
    ended = run(1, *words(model, requests, output), expect=3)
    assert "nothing is left to do" in ended.stderr and output.stat().st_mtime_ns == stamp
    assert "completed in" in ended.stdout and "1 invalid_request_error" in ended.stdout
    ended = run(1, *words(model, requests, output, "--resume", "never"), expect=2)
    assert "pass --overwrite" in ended.stderr
    run(1, *words(model, requests, output, "--overwrite"), expect=3)
    assert output.stat().st_mtime_ns != stamp and jobs.tokens_of(output) == expected


def test_a_damaged_segment_costs_its_rows_and_is_named(work: tuple[Path, Path, Answers], tmp_path: Path) -> None:
    model, requests, expected = work
    output = tmp_path / "out.h5"
    in_order = words(model, requests, output, "--ageing", "0")
    run(1, *in_order, before=tuple(kill_words(0, "bgmpi.executor:Executor.step", "before", 30)))
    segments = sorted(parts_folder(output).glob("segment-*.h5"))
    assert len(segments) >= 3
    segments[0].unlink()
    data = bytearray(segments[1].read_bytes())
    data[len(data) // 2] ^= 1
    segments[1].write_bytes(data)
    ended = run(1, *words(model, requests, output), expect=3)
    assert f"{segments[0].name}" in ended.stderr and "missing" in ended.stderr
    assert f"{segments[1].name}" in ended.stderr and "sha256 differs" in ended.stderr
    assert jobs.tokens_of(output) == expected


def test_errors_are_tried_again_only_when_asked(work: tuple[Path, Path, Answers], tmp_path: Path) -> None:
    model, requests, expected = work
    output = tmp_path / "out.h5"
    small = ("--host-kv-memory", "16k")  # too little for the longest rows: they become error rows
    deadly = tuple(kill_words(0, "bgmpi.io.publish:_write_block"))
    ended = run(1, *words(model, requests, output, *small), before=deadly)
    assert ended.returncode == -signal.SIGKILL, ended
    found = collect(parts_folder(output))
    assert int(found.is_error.sum()) > 1
    number = len(read_attempts(parts_folder(output))[0])
    ended = run(1, *words(model, requests, output, "--retry-failed"), expect=3)
    assert number == 1 and jobs.tokens_of(output) == expected
