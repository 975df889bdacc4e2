"""A rank that stands still ends the job, whatever it stands still in, and the rank, its host and phase are named.

The stacks that are printed, the exit code and what can be gone on with are looked at in each case; and that nothing is
left of the launch: a stopped process, or one in a call that never returns, would be an orphan.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

import checkpoints
import jobs
import launch
import pytest
from stall_at import stall_words
from tokenizers_for_tests import make_tokenizer
from virtual_nodes import virtual_nodes

from bgmpi.io.collected import collect
from bgmpi.io.segments import parts_folder
from bgmpi.world import CODE_FILE

STEP = "bgmpi.executor:Executor.step"
#: Time that a stuck rank has here, and what may pass until all have left: telling, and what srun waits before SIGKILL.
LIMIT, LATER = 3.0, 12.0


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, list[list[int]]]:
    """A model, requests, and their answers; kernels are compiled now, so that no step takes long later."""
    root = tmp_path_factory.mktemp("stuck")
    model = make_tokenizer(checkpoints.make("mixtral", root / "model"))
    bodies = [{"prompt": [at + 3], "max_tokens": 2 + 12 * at, "temperature": 0, "ignore_eos": True} for at in range(8)]
    requests = jobs.write_requests(root / "r.jsonl", bodies)
    jobs.run_jobs(1, [words(model, requests, root / "whole.h5")[1:]], root)
    return model, requests, jobs.tokens_of(root / "whole.h5")


def words(model: Path, requests: Path, output: Path, *more: str) -> list[str | Path]:
    return ["run", "--model", model, "-i", requests, "-o", output, "--dtype", "float32", "--page-tokens", "4",
            "--checkpoint-interval", "0", "--heartbeat", f"{LIMIT:g}", *more]


def orphans(output: Path) -> list[int]:
    """Return the processes that still have this output among their words."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if str(output).encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return [one for one in found if one != os.getpid()]


def stuck(argv: list[str | Path], output: Path, **settings: str) -> tuple[launch.Ended, float]:
    """Launch, and return how it ended and how long after the rank got stuck."""
    code = output.with_name("code")
    ended = launch.launch(argv, limit=90, env={**settings, CODE_FILE: str(code)})
    now = time.time()
    begun = re.search(r"stuck at (\d+\.\d+)", ended.stderr)
    assert begun, ended
    assert ended.returncode not in (0, 2, 3) and code.read_text() == "75", ended
    assert not orphans(output)
    return ended, now - float(begun[1])


@pytest.fixture(scope="module")
def nodes() -> Iterator[dict[str, str]]:
    with virtual_nodes(3) as cluster:
        yield dict(cluster.environment)


CASES = {
    "asleep in a step": (1, STEP, "sleep", 9, "rank 1/", "a step"),
    "asleep while publishing": (0, "bgmpi.io.publish:_write_block", "sleep", 1, "rank 0/", "publishing"),
    "asleep while writing": (1, "bgmpi.io.segments:write_durably", "sleep", 3, "rank 1/", "writing a segment"),
    "stopped": (1, STEP, "stop", 9, "rank 1/", None),
    "rank 0 stopped": (0, STEP, "stop", 9, "rank 0/", None),
    "in a call that never lets go": (1, STEP, "hold", 9, "rank 1/", None),
    "rank 0 in a call that never lets go": (0, STEP, "hold", 9, "rank 0/", None),
}


@pytest.mark.faults
@pytest.mark.parametrize("launcher", ["mpiexec", "srun"])
@pytest.mark.parametrize("name", CASES)
def test_a_rank_that_stands_still_is_named_and_ends_the_job(
    work: tuple[Path, Path, list[list[int]]],
    request: pytest.FixtureRequest,
    name: str,
    launcher: str,
    tmp_path: Path,
) -> None:
    model, requests, expected = work
    output = tmp_path / "out.h5"
    rank, site, how, count, told, phase = CASES[name]
    argv = [*stall_words(rank, site, how, count), *words(model, requests, output)]
    settings: dict[str, str] = {}
    if launcher == "mpiexec":
        argv = [launch.script("mpiexec"), "-n", "3", *argv]
    else:
        settings = request.getfixturevalue("nodes")
        argv = ["srun", "--kill-on-bad-exit=1", "--mpi=pmi2", "--nodes=3", "--ntasks=3", *argv]
    ended, seconds = stuck(argv, output, **settings)
    (last, *_) = [line for line in ended.stderr.splitlines() if " ERROR " in line]
    assert f"ERROR {'1/' if told == 'rank 0/' and how != 'sleep' else '0/'}" in last, ended
    assert last.split(" ", 3)[3].startswith(told) and "all ranks" not in last, ended
    if phase is not None:
        assert f"'{phase}'" in last and re.search(rf"{told}\S+: +File \S+ line \d+ in stand_still", ended.stderr), ended
    else:
        assert "has not answered" in last, ended
    assert LIMIT <= seconds < LIMIT + LATER, ended
    print(f"{name} under {launcher}: {seconds:.1f} s from standing still to the end, limit {LIMIT:g} s")
    assert len(collect(parts_folder(output)).row)
    jobs.run_jobs(1, [words(model, requests, output)[1:]], tmp_path)
    assert jobs.tokens_of(output) == expected


@pytest.mark.faults
def test_a_lone_rank_watches_itself(work: tuple[Path, Path, list[list[int]]], tmp_path: Path) -> None:
    model, requests, _ = work
    output = tmp_path / "out.h5"
    ended, seconds = stuck([*stall_words(0, STEP, "sleep", 9), *words(model, requests, output)], output)
    assert "ERROR 0/" in ended.stderr and "in stand_still" in ended.stderr and ended.returncode == 75
    assert LIMIT <= seconds < LIMIT + LATER, ended


@pytest.mark.faults
def test_mpi_that_does_not_start_ends_all_and_shows_where(
    work: tuple[Path, Path, list[list[int]]], tmp_path: Path
) -> None:
    model, requests, _ = work
    words_ = words(model, requests, tmp_path / "out.h5", "--startup-timeout", "2")
    argv = [*stall_words(1, "bgmpi.world:World.__init__", "hold"), *words_]
    ended = launch.mpiexec(2, argv, limit=60)
    assert ended.returncode not in (0, 2, 3) and "Timeout (0:00:02)!" in ended.stderr, ended
    assert "open_world" in ended.stderr, ended


@pytest.mark.faults
def test_off_means_that_nobody_watches(work: tuple[Path, Path, list[list[int]]], tmp_path: Path) -> None:
    model, requests, _ = work
    argv = [*stall_words(1, STEP, "sleep", 9), *words(model, requests, tmp_path / "out.h5", "--heartbeat", "off")]
    with pytest.raises(launch.LaunchHung) as hung:
        launch.mpiexec(2, argv, limit=15)
    assert "stuck at" in str(hung.value) and "has not gone on" not in str(hung.value)
