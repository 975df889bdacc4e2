"""Memory options as a user meets them: what cannot be is refused with what to do, and what fails ends the job cleanly.

Whole commands through the program's own command line.  Faults of disk and memory are put in beneath the program: the
file behind the disk tier says that no space is left, an allocation says that no memory is.
"""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path
from typing import Any

import checkpoints
import commands
import jobs
import launch
import pytest
from commands import run_commands
from tokenizers_for_tests import make_tokenizer

from bgmpi.io.results import open_results
from bgmpi.io.segments import parts_folder

#: One float32 page of 16 tokens: keys and values of two heads of eight numbers in two layers.
PAGE = 16 * 2 * 2 * 8 * 4 * 2
CONTEXT = 96

#: the disk is full after so many requests of writing
_FULL_DISK = """
import errno, itertools, os
from bgmpi.io.spill_file import SpillFile
whole, counter = SpillFile.move, itertools.count()
def move(self, cell, addresses, *, write):
    if write and next(counter) >= int(os.environ["FULL_AFTER"]):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    whole(self, cell, addresses, write=write)
SpillFile.move = move
"""
#: no memory is left in the so manieth step of rank 0; whoever steps again after that is told so
_NO_MEMORY = """
import itertools, os
import torch
from bgmpi.executor import Executor
whole, counter = Executor.step, itertools.count()
def step(self, plan, most):
    number = next(counter)
    if number >= 40 and os.environ.get("PMI_RANK", "0") == "0":
        assert number == 40, "tried again in place"
        torch.empty(1 << 55, dtype=torch.uint8)
    return whole(self, plan, most)
Executor.step = step
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(checkpoints.make("llama", tmp_path_factory.mktemp("model")))


def bodies(count: int = 10) -> list[dict[str, Any]]:
    return [
        {"prompt": prompt, "max_tokens": 30, "ignore_eos": True, "temperature": 0}
        for prompt in jobs.prompts(count, longest=40, seed=4)
    ]


def words(model: Path, folder: Path, output: str, *more: str | Path | int) -> list[str | Path]:
    requests = folder / "requests.jsonl"
    if not requests.exists():
        jobs.write_requests(requests, bodies())
    paths = ["--model", model, "-i", requests, "-o", folder / output, "--dtype", "float32", "--check"]
    shape = ["--page-tokens", "16", "--max-model-len", str(CONTEXT)]
    return ["run", *paths, *shape, *[str(word) for word in more]]


def test_what_is_too_small_or_contradicts_itself_is_refused_and_says_what_to_do(model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    disk = ["--kv-spill", tmp_path]
    cases: list[tuple[list[str | Path | int], int, list[str]]] = [
        (["--host-kv-memory", 5 * PAGE], 2, ["hold 5 pages", "a sequence needs 6", "raise --host-kv-memory"]),
        (["--device-memory", 1000], 2, ["--device-memory 1,000", f"needs {6 * PAGE:,} bytes", "raise it"]),
        (["--device-memory", 6 * PAGE, "--stream-kv", "off"], 2, [f"needs {12 * PAGE:,} bytes"]),
        (["--weight-memory", 1000], 2, ["--weight-memory 1,000", "give at least"]),
        (["--weight-memory", 420_000, "--b-moe", 4], 2, ["--b-moe 4", "raise --weight-memory"]),
        (["--weight-memory", 420_000, "--yield-points", "off"], 2, ["--yield-points off", "raise --weight-memory"]),
        (["--device-memory", "1M", "--yield-points", "off"], 2, ["leave --device-memory out"]),
        ([*disk, "--yield-points", "off"], 2, ["leave --kv-spill out"]),
        ([*disk, "--stream-kv", "off"], 2, ["--stream-kv off", "leave --kv-spill out"]),
        ([*disk, "--kv-spill-bytes", 1], 2, ["--kv-spill-bytes 1", "needs 8,192 bytes on disk"]),
        (["--kv-spill-bytes", "1M"], 2, ["--kv-spill DIR must name the folder"]),
        (["--kv-spill", tmp_path / "nowhere"], 66, [f"--kv-spill {tmp_path}/nowhere", "must be a folder that exists"]),
        (["--kv-spill", tmp_path / "file"], 66, [f"--kv-spill {tmp_path}/file", "not a folder"]),
        (["--kv-spill", "/proc"], 74, ["--kv-spill /proc", "0 bytes are free", "name another folder"]),
        (["--kv-spill", "/proc", "--kv-spill-bytes", "1M"], 74, ["--kv-spill /proc", "bytes needed"]),
    ]
    ran = run_commands(1, [words(model, tmp_path, "x.h5", *more) for more, _, _ in cases], tmp_path)
    for one, (more, code, said) in zip(ran, cases, strict=True):
        assert one.code == code, f"{more}\n{one.stderr}"
        error = one.stderr.partition("bgmpi: error: ")[2]
        assert all(word in error for word in said), f"{more}\n{error}"
        assert "Traceback" not in one.stderr
    assert not (tmp_path / "x.h5").exists()
    assert not parts_folder(tmp_path / "x.h5").exists(), "a job that never began leaves nothing to stumble over"


def test_a_sequence_that_no_tier_can_hold_is_an_error_row_and_the_others_finish(model: Path, tmp_path: Path) -> None:
    """Without --max-model-len the model's context need not fit; whoever fits nowhere is refused at admission."""
    rows = bodies(6)
    rows[2] |= {"prompt": list(range(5, 200)), "max_tokens": 4}
    rows[4] |= {"max_tokens": 400}
    requests = jobs.write_requests(tmp_path / "giants.jsonl", rows)
    few = ["--host-kv-memory", str(9 * PAGE)]
    tiers: dict[str, list[str | Path]] = {
        "roomy": [],
        "home": [*few],
        "device": [*few, "--device-memory", str(9 * PAGE)],
        "device, others wait": [*few, "--device-memory", str(18 * PAGE), "--stream-kv", "off"],
        "disk": [*few, "--kv-spill", tmp_path],
    }
    listing: list[list[str | Path]] = []
    for name, more in tiers.items():
        paths = ["--model", model, "-i", requests, "-o", tmp_path / f"{name}.h5", "--dtype", "float32", "--check"]
        listing.append(["run", *paths, "--page-tokens", "16", *more])
    for name, one in zip(tiers, run_commands(1, listing, tmp_path), strict=True):
        assert one.code == (0 if name == "roomy" else 3), f"{name}: {one.stderr}"
    expected = jobs.tokens_of(tmp_path / "roomy.h5")
    for name in list(tiers)[1:]:
        with open_results(tmp_path / f"{name}.h5") as results:
            for at, row in enumerate(results.rows()):
                if at in (2, 4):
                    assert row.error is not None, f"{name}: row {at} should be refused"
                    assert row.error.code == "insufficient_kv_memory"
                    assert "raise --host-kv-memory" in row.error.message
                else:
                    assert row.samples[0].tokens.tolist() == expected[at], f"{name}: row {at}"


def run_broken(
    ranks: int, fault: str, command: list[str | Path], folder: Path, expect: int, env: dict[str, str | None]
) -> launch.Ended:
    """Run one command with a fault put in; it must end by itself with `expect` as the launch's code."""
    source = f"{textwrap.dedent(fault)}\nimport sys\nfrom bgmpi.cli import main\nsys.exit(main(sys.argv[1:]))\n"
    argv: list[str | Path] = [sys.executable, "-m", "mpi4py", "-c", source, *command]
    if ranks == 1:
        return launch.launch(argv, limit=60, expect=expect, env=env, cwd=folder)
    return launch.mpiexec(ranks, argv, limit=60, expect=expect, env=env, cwd=folder)


@launch.on_ranks(1, 2)
@pytest.mark.parametrize("after", [0, 12])
def test_a_disk_that_is_full_in_the_middle_ends_the_job_with_its_path_and_bytes(
    model: Path, ranks: int, after: int, tmp_path: Path
) -> None:
    memory = ["--host-kv-memory", ranks * 7 * PAGE, "--kv-spill", tmp_path, "--segment-bytes", 1]
    command = words(model, tmp_path, "x.h5", *memory)
    ended = run_broken(ranks, _FULL_DISK, command, tmp_path, 74, {"FULL_AFTER": str(after)})
    assert f"--kv-spill {tmp_path}: cannot write KV: No space left on device" in ended.stderr, ended
    assert "bytes needed" in ended.stderr and "lower --kv-spill-bytes" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert not (tmp_path / "x.h5").exists()


@launch.on_ranks(1, 2)
def test_out_of_memory_ends_the_job_at_once_and_what_is_written_can_be_read(
    model: Path, ranks: int, tmp_path: Path
) -> None:
    command = words(model, tmp_path, "x.h5", "--max-num-seqs", 2, "--segment-bytes", 1)
    ended = run_broken(ranks, _NO_MEMORY, command, tmp_path, 1, {})
    assert "out of memory (" in ended.stderr and "lower --host-kv-memory" in ended.stderr, ended
    assert "Traceback" not in ended.stderr
    segments = sorted(parts_folder(tmp_path / "x.h5").glob("segment-*.h5"))
    assert segments, list(parts_folder(tmp_path / "x.h5").iterdir())
    import h5py

    for segment in segments:
        with h5py.File(segment) as file:
            assert len(file["tokens/values"][:]) > 0
    alone = words(model, tmp_path, "x.h5", "--overwrite")
    (again,) = commands.run_commands(1, [alone], tmp_path)
    assert again.code == 0, again.stderr
