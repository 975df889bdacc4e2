"""Who holds a file, and who may write what a job leaves (case C63)."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from results_for_tests import answer, publish_answers

from bgmpi.cli import main
from bgmpi.config import resolve
from bgmpi.errors import UsageError
from bgmpi.io.attempts import alone, begin_attempt
from bgmpi.io.locks import held_by
from bgmpi.io.openai_lines import export
from bgmpi.io.segments import SegmentWriter, parts_folder
from bgmpi.prepare import check_output

WRITER = """
import sys, h5py
with h5py.File(sys.argv[1], "r+") as file:
    print("held", flush=True)
    sys.stdin.read()
"""
READER = WRITER.replace('"r+"', '"r"')
LOCKER = """
import fcntl, sys
with open(sys.argv[1], "r+") as file:
    fcntl.flock(file, fcntl.LOCK_EX)
    print("held", flush=True)
    sys.stdin.read()
"""


@contextmanager
def held(source: str, path: Path) -> Iterator[int]:
    """Let another process hold `path`; -> its PID."""
    with subprocess.Popen(
        [sys.executable, "-c", source, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        yield holder.pid
        assert holder.stdin is not None
        holder.stdin.close()
        assert holder.wait(30) == 0


def test_c63_a_job_does_not_begin_while_another_process_writes_its_output_or_its_error_file(tmp_path: Path) -> None:
    output, errors = tmp_path / "r.h5", tmp_path / "e.jsonl"
    publish_answers(output, [answer(0)], [1])
    errors.write_text("older lines\n")
    config = resolve(["-o", str(output), "--error-file", str(errors)], {})
    check_output(config)
    for flag, path, source in (("--output-file", output, WRITER), ("--error-file", errors, LOCKER)):
        with held(source, path) as pid:
            told = rf"{flag} {path} is held open for writing by (process {pid} \(\S+\)|another process)"
            with pytest.raises(UsageError, match=told + ".*HDF5_USE_FILE_LOCKING=FALSE"):
                check_output(config)
        check_output(config)
    assert errors.read_text() == "older lines\n"
    with held(READER, output):
        check_output(config)


def test_the_holder_is_named_where_the_kernel_tells_and_the_switch_of_hdf5_turns_it_off(tmp_path: Path) -> None:
    path = tmp_path / "r.h5"
    publish_answers(path, [answer(0)], [1])
    assert held_by(path, {}) is None and held_by(tmp_path / "none", {}) is None and held_by(tmp_path, {}) is None
    with held(WRITER, path) as pid:
        found = held_by(path, {})
        assert found is not None
        if str(pid) in Path("/proc/locks").read_text():
            assert f"process {pid} (python" in found
        assert held_by(path, {"HDF5_USE_FILE_LOCKING": "false"}) is None


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077, 0o000])
def test_what_a_job_leaves_has_the_rights_of_the_umask_and_is_never_for_everybody_to_change(
    tmp_path: Path, umask: int
) -> None:
    before = os.umask(umask)
    try:
        assert main(["merge", str(tmp_path / "nothing"), "-o", str(tmp_path / "x")]) == 66  # the program's own start
        effective = os.umask(umask)
        os.umask(effective)
        output = tmp_path / "out" / "r.h5"
        output.parent.mkdir()
        folder = parts_folder(output)
        with alone(folder, []):
            begin_attempt(folder, 2, {}, "ab" * 32, np.zeros(1, np.uint64), retry_failed=False)
            with SegmentWriter(folder, 1, attempt=2) as writer:
                writer.save_progress([answer(0)])
        publish_answers(output, [answer(0)], [1])
        export(output, tmp_path / "out" / "lines.jsonl")
    finally:
        os.umask(before)
    assert effective == umask | stat.S_IWOTH
    left = [*output.parent.rglob("*"), output.parent]
    assert len(left) >= 9
    for path in left:
        mode = stat.S_IMODE(path.stat().st_mode)
        whole = 0o777 if path.is_dir() else 0o664 if path.name == "lock" else 0o666
        assert mode == whole & ~effective, f"{path} {mode:o}"
