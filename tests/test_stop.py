"""A job that is told to stop ends with 75 on all ranks, loses nothing, and goes on where it stood."""

from __future__ import annotations

import re
import shutil
import time
from pathlib import Path

import h5py
import jobs
import launch
import pytest
from signal_at import signal_words
from test_resume import Answers, finished, run, words, work
from test_tokens_unchanged import shared_bodies

from bgmpi.io.segments import parts_folder

__all__ = ["work"]

STEP = "bgmpi.executor:Executor.step"


def check_stopped(output: Path) -> int:
    """Every file of a stopped job opens; -> how many tokens of unfinished answers are saved."""
    assert not output.exists()
    tokens = 0
    for path in parts_folder(output).glob("*.h5"):
        with h5py.File(path, "r") as file:
            if path.name.startswith("progress-"):
                tokens += len(file["tokens/values"])
    return tokens


@pytest.mark.parametrize(("number", "victim", "ranks", "further"), [
    ("TERM", 0, 1, 2),
    pytest.param("USR1", 1, 2, 1, marks=pytest.mark.mpi(2)),
    pytest.param("TERM", 2, 3, 4, marks=pytest.mark.mpi(3)),
    pytest.param("USR1", "all", 3, 3, marks=[pytest.mark.mpi(3), pytest.mark.faults]),
])  # fmt: skip
def test_a_signal_in_any_step_stops_all_ranks_and_loses_nothing(
    work: tuple[Path, Path, Answers], tmp_path: Path, number: str, victim: int | str, ranks: int, further: int
) -> None:
    model, requests, expected = work
    output = tmp_path / "out.h5"
    ended = run(ranks, *words(model, requests, output, "--checkpoint-interval", "600"), expect=75,
                before=signal_words(victim, number, STEP, 9))
    assert f"SIG{number} came to rank" in ended.stderr and "run again to go on" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert check_stopped(output) > 0 and finished(output)
    begun = f"{len(finished(output)) - 1} are done"  # all but the refused row
    ended = run(further, *words(model, requests, output), expect=3)
    assert begun in ended.stderr and "are begun with" in ended.stderr
    assert jobs.tokens_of(output) == expected


def test_signals_without_end_change_nothing_to_the_last_instruction(
    work: tuple[Path, Path, Answers], tmp_path: Path
) -> None:
    model, requests, expected = work
    output = tmp_path / "out.h5"
    storm = "(while kill -USR1 $PPID; do sleep 0.01; done) 2> /dev/null &"
    run(1, *words(model, requests, output), expect=75, before=signal_words(0, storm, STEP, 9))
    assert check_stopped(output) > 0
    run(1, *words(model, requests, output), expect=3)
    assert jobs.tokens_of(output) == expected


@pytest.mark.mpi(2)
@pytest.mark.parametrize("victim", [0, 1])
def test_a_signal_while_loading_ends_all_ranks_with_75(
    work: tuple[Path, Path, Answers], tmp_path: Path, victim: int
) -> None:
    model, requests, _ = work
    output = tmp_path / "out.h5"
    before = signal_words(victim, "TERM", "bgmpi.model:Model.__init__")
    began = time.monotonic()
    ended = run(2, *words(model, requests, output), before=before, expect=75)
    assert "SIGTERM came before the first step" in ended.stderr
    assert time.monotonic() - began < 60 and not output.exists()


@pytest.mark.parametrize(("margin", "left", "code"), [("1h", 1800, 75), ("1s", 1800, 3), ("0", 0, 3)])
def test_the_wall_time_stops_a_job_in_time(
    work: tuple[Path, Path, Answers], tmp_path: Path, margin: str, left: int, code: int
) -> None:
    model, requests, expected = work
    output = tmp_path / "out.h5"
    before = ("env", f"SLURM_JOB_END_TIME={int(time.time()) + left}", launch.script("bgmpi"))
    ended = run(1, *words(model, requests, output, "--stop-before-walltime", margin), before=before, expect=code)
    if code == 75:
        assert "wall time ends in" in ended.stderr
        ended = run(1, *words(model, requests, output), expect=3)
    assert jobs.tokens_of(output) == expected


def test_too_many_errors_stop_the_job_and_more_patience_publishes_it(
    work: tuple[Path, Path, Answers], tmp_path: Path
) -> None:
    model, requests, expected = work
    output = tmp_path / "out.h5"
    ended = run(1, *words(model, requests, output, "--max-errors", "0"), expect=65)
    assert "1 of 21 rows have failed, 0 of them" in ended.stderr and not output.exists()
    run(1, *words(model, requests, output, "--max-errors", "5%"), expect=3)
    assert jobs.tokens_of(output) == expected


@pytest.mark.parametrize("memory", [(), pytest.param(("--device-memory", "48k"), marks=pytest.mark.faults)])
def test_saved_kv_is_read_back_unless_it_is_of_other_tokens_and_the_answers_are_the_same(
    work: tuple[Path, Path, Answers], tmp_path: Path, memory: tuple[str, ...]
) -> None:
    model, requests, expected = work
    output = tmp_path / "out.h5"
    run(1, *words(model, requests, output, "--checkpoint-kv", "stop", *memory), expect=75,
        before=signal_words(0, "TERM", STEP, 9))
    (path,) = parts_folder(output).glob("kv-*.h5")
    wrong = tmp_path / "wrong.h5"
    shutil.copytree(parts_folder(output), parts_folder(wrong))
    with h5py.File(parts_folder(wrong) / path.name, "r+") as file:
        count, tokens = len(file["with_kv"]), int(file["with_kv"][:].sum())
        file["tokens"][...] = file["tokens"][...] + 1
    computed = []
    for one in (output, wrong):
        ended = run(1, *words(model, requests, one, *memory), expect=3)
        assert f"KV of {count} begun sequences is read" in ended.stderr
        assert jobs.tokens_of(one) == expected and not parts_folder(one).exists()
        (prompt,) = re.findall(r"([\d,]+) prompt,", ended.stdout)
        computed.append(int(prompt.replace(",", "")))
    assert 0 < computed[1] - computed[0] <= tokens


@pytest.mark.parametrize("further", [1, pytest.param(2, marks=pytest.mark.mpi(2))])
def test_what_sequences_share_is_saved_once_and_read_back_once(
    work: tuple[Path, Path, Answers], tmp_path: Path, further: int
) -> None:
    """Stopped while groups decode; the pages that members borrow are in the file once, and once in memory again."""
    model, output = work[0], tmp_path / "out.h5"
    requests = jobs.write_requests(tmp_path / "shared.jsonl", shared_bodies())
    alone = tmp_path / "alone.h5"
    run(1, *words(model, requests, alone, "--prefix-sharing", "off"), expect=0)
    pages = ("--page-tokens", "4", "--max-num-seqs", "64")
    run(1, *words(model, requests, output, "--checkpoint-kv", "stop", *pages), expect=75,
        before=signal_words(0, "TERM", STEP, 6))
    (path,) = parts_folder(output).glob("kv-*.h5")
    with h5py.File(path, "r") as file:
        count, saved, named, tokens = (len(file["row"]), len(file["pages"]), len(file["places"]), file["with_kv"][:])
    assert named >= tokens.sum() / 4 and saved < 0.6 * named
    ended = run(further, *words(model, requests, output, *pages), expect=0)
    assert f"KV of {count} begun sequences is read" in ended.stderr
    assert jobs.tokens_of(output) == jobs.tokens_of(alone)
    (prompt,) = re.findall(r"([\d,]+) prompt,", ended.stdout)
    assert int(prompt.replace(",", "")) < sum(len(body["prompt"]) for body in shared_bodies()) / 4, "computed again"
