"""Public faults of kind K10 (durability and HDF5) that segments, journal and publishing must not repeat."""

from __future__ import annotations

import subprocess
import sys
import tracemalloc
from pathlib import Path

import h5py
import numpy as np
import pytest
from results_for_tests import (
    PROVENANCE,
    answer,
    assert_same,
    assert_same_array,
    error,
    publish_answers,
    write_segments,
)

from bgmpi.errors import InputError, WriteError
from bgmpi.io.collected import collect
from bgmpi.io.journal import read_journal
from bgmpi.io.publish import publish
from bgmpi.io.results import open_results
from bgmpi.io.segments import SegmentWriter, parts_folder

FULL_DISK = """
import sys
from pathlib import Path
import h5py
import numpy as np
from bgmpi.errors import WriteError
from bgmpi.io.publish import Provenance, publish
from bgmpi.io.results import open_results
from bgmpi.io.collected import collect
from bgmpi.io.segments import SegmentWriter, parts_folder
from bgmpi.request import Answer, Finish

disk = Path(sys.argv[1])
output = disk / "results.h5"
folder = parts_folder(output)
ballast = disk / "ballast"
ballast.write_bytes(bytes(1_600_000))
rng = np.random.default_rng(0)
tokens = rng.integers(0, 2**31, (500, 200), dtype=np.int32)

def run(rows):
    with SegmentWriter(folder, 0) as writer:
        for row in rows:
            writer.add(Answer(row, 0, f"id-{row}", Finish.STOP, 1, tokens[row], "t" * 40))
            if writer.buffered == 50:
                writer.flush()

def told(error, path, needed):
    assert error.exit_code == 74, error.exit_code
    assert str(path) in str(error) and "No space left" in str(error), error
    assert needed < int(str(error).split("; ")[1].split(" bytes needed")[0]), error

try:
    run(range(500))
except WriteError as error:
    told(error, folder / "segment-", 50_000)
else:
    raise SystemExit("the disk did not fill")
left = collect(folder)
assert 0 < len(left.row) < 500 and not left.journal.damaged and not list(folder.glob(".*"))
for entry in left.journal.entries:
    with h5py.File(folder / entry.name, "r") as file:
        assert len(file["samples/row"]) == entry.records

ballast.unlink()
run(sorted(set(range(500)) - set(left.row.tolist())))
ballast.write_bytes(bytes(700_000))
arguments = (folder, output, Provenance("m", "0"), 500, np.ones(500, np.int32))
try:
    publish(*arguments)
except WriteError as error:
    told(error, output, 400_000)
else:
    raise SystemExit("the disk did not fill while publishing")
assert not output.exists() and not list(disk.glob(".*"))
ballast.unlink()
publish(*arguments)
with open_results(output) as results:
    assert len(results) == 500
    for number, row in enumerate(results.rows()):
        assert row.samples[0].tokens.tolist() == tokens[number].tolist()
print("survived a full disk")
"""

SIZE_LIMIT = """
import resource
import sys
import numpy as np
from bgmpi.errors import WriteError
from bgmpi.io.publish import Provenance, publish
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
try:
    publish(sys.argv[1], sys.argv[2], Provenance("m", "0"), 100, np.ones(100, np.int32))
except WriteError as error:
    print(int(error.exit_code), error)
"""

HOLDER = """
import sys, h5py
with h5py.File(sys.argv[1], "r+") as file:
    print("held", flush=True)
    sys.stdin.read()
    print(sorted(file))
"""


def _columns(path: Path) -> dict[str, bytes]:
    found: dict[str, bytes] = {}

    def keep(name: str, item: object) -> None:
        if isinstance(item, h5py.Dataset):
            found[name] = item[:].tobytes()

    with h5py.File(path, "r") as file:
        file.visititems(keep)
    return found


def test_c62_a_full_disk_is_exit_74_with_path_and_bytes_and_resumes(tmp_path: Path) -> None:
    mount = f'mount -t tmpfs -o size=2m none {tmp_path} && exec {sys.executable} -c "$0" {tmp_path}'
    command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mount, FULL_DISK]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except FileNotFoundError:
        pytest.skip("unshare is not installed, so no small disk can be made")
    if "unshare" in ran.stderr or "mount:" in ran.stderr:
        pytest.skip(f"this system lets an ordinary user mount no small disk: {ran.stderr.strip()}")
    assert "survived a full disk" in ran.stdout, ran.stderr


def test_c62_a_file_size_limit_while_publishing_is_exit_74_and_the_old_file_stays(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    answers = [answer(row, tokens=rng.integers(0, 2**31, 2000, dtype=np.int32)) for row in range(100)]
    folder = write_segments(tmp_path / "r.h5", answers)
    (tmp_path / "r.h5").write_bytes(b"older results")
    command = [sys.executable, "-c", SIZE_LIMIT, str(folder), str(tmp_path / "r.h5")]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout.startswith(f"74 cannot write {tmp_path / 'r.h5'}: File too large"), ran.stdout + ran.stderr
    assert "bytes needed" in ran.stdout
    assert (tmp_path / "r.h5").read_bytes() == b"older results"
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_c62_answers_that_could_not_be_written_stay_buffered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = SegmentWriter(tmp_path, 0)
    writer.add(answer(0))
    with monkeypatch.context() as patch:
        patch.setattr("bgmpi.io.durable.os.replace", _fail_with(28))
        with pytest.raises(WriteError, match=r"segment-.* \(errno 28\); \d+ bytes needed, \d+ bytes free"):
            writer.flush()
    assert writer.buffered == 1 and len(collect(tmp_path).row) == 0
    writer.close()
    assert collect(tmp_path).row.tolist() == [0]


def _fail_with(number: int) -> object:
    def fail(*_: object) -> None:
        raise OSError(number, "the disk says no")

    return fail


@pytest.mark.parametrize(
    ("number", "advice"), [(11, "HDF5_USE_FILE_LOCKING=FALSE"), (37, "HDF5_USE_FILE_LOCKING"), (30, "read-only")]
)
def test_c63_lock_and_read_only_errors_name_path_and_switch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, advice: str
) -> None:
    folder = write_segments(tmp_path / "r.h5", [answer(0)])
    monkeypatch.setattr("bgmpi.io.durable.os.replace", _fail_with(number))
    with pytest.raises(WriteError, match=rf"{tmp_path}/r\.h5.*{advice}"):
        publish(folder, tmp_path / "r.h5", PROVENANCE, 1, np.ones(1, np.int32))


def test_c63_a_file_held_by_another_process_is_told_and_never_truncated(tmp_path: Path) -> None:
    path = tmp_path / "r.h5"
    publish_answers(path, [answer(0)], [1])
    folder = parts_folder(path)
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None and holder.stdin is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(InputError, match=r"r\.h5 is locked.*HDF5_USE_FILE_LOCKING"):
            open_results(path)
        publish(folder, path, PROVENANCE, 1, np.ones(1, np.int32))  # takes the name, not the bytes
        holder.stdin.close()
        assert "'rows'" in holder.stdout.read()
        assert holder.wait(timeout=30) == 0
    with open_results(path) as results:
        assert results.text(0) == "text of row 0 sample 0"


def test_c64_ranks_without_rows_and_uneven_lengths_make_the_file_of_one_rank(tmp_path: Path) -> None:
    answers = [answer(row, length=length) for row, length in enumerate((0, 1, 10_000))]
    publish_answers(tmp_path / "four.h5", answers, [1] * 3, ranks=4)
    publish_answers(tmp_path / "one.h5", answers, [1] * 3, ranks=1)
    assert _columns(tmp_path / "four.h5") == _columns(tmp_path / "one.h5")
    with open_results(tmp_path / "four.h5") as results:
        assert [len(results.tokens(row)) for row in range(3)] == [0, 1, 10_000]


@pytest.mark.slow
def test_c66_many_short_repetitive_texts_take_less_than_two_megabytes(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    tokens = np.full(40, 17, np.int32)
    times = rng.random((100_000, 2)) * 3600  # the worst case: no two times are alike
    answers = [
        answer(row, tokens=tokens, text="x" * 40, first_token_s=times[row, 0], done_s=times[row, 1])
        for row in range(100_000)
    ]
    published = publish_answers(tmp_path / "r.h5", answers, [1] * 100_000)
    assert published.bytes == (tmp_path / "r.h5").stat().st_size < 2 << 20
    with open_results(tmp_path / "r.h5") as results:
        assert results.text(99_999) == "x" * 40
        assert results.column("text/values").tobytes() == b"x" * 4_000_000


@pytest.mark.slow
def test_c66_huge_single_values_come_back_byte_equal(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    text = rng.integers(32, 127, 40 << 20, dtype=np.uint8).tobytes().decode()
    prompt = rng.integers(0, 2**31, 10 << 20, dtype=np.int32)
    answers = [answer(0, text=text), answer(1, prompt=prompt), answer(2, custom_id="i" * (1 << 20)), answer(3)]
    publish_answers(tmp_path / "r.h5", answers, [1] * 4)
    with open_results(tmp_path / "r.h5") as results:
        assert results.text(0) == text
        assert_same_array(results.row(1).samples[0].prompt, prompt, "prompt")
        assert results.row(2).custom_id == "i" * (1 << 20)
        assert_same(results.row(3).samples[0], answer(3))


@pytest.mark.parametrize("where", ["in the record", "in a character", "before the newline"])
def test_c68_a_torn_journal_line_redoes_that_record_and_keeps_all_others(tmp_path: Path, where: str) -> None:
    output = tmp_path / "r.h5"
    folder = parts_folder(output)
    with SegmentWriter(folder, 0) as writer:
        for row in range(6):
            writer.add(answer(row))
            if row % 2:
                writer.flush()
    journal = next(folder.glob("journal-*"))
    data = journal.read_bytes()
    cut = {"in the record": data[:-40], "in a character": data[:-40] + b"\xc3", "before the newline": data[:-1]}
    journal.write_bytes(cut[where])
    left = collect(folder)
    assert left.row.tolist() == [0, 1, 2, 3]
    line, segment = left.journal.torn
    assert "line 3 has no end" in line and "is named by no journal" in segment
    with SegmentWriter(folder, 0) as writer:
        for row in sorted(set(range(6)) - set(left.row.tolist())):
            writer.add(answer(row))
    assert read_journal(folder).torn == (line, segment)
    publish(folder, output, PROVENANCE, 6, np.ones(6, np.int32))
    with open_results(output) as results:
        assert [row.row for row in results.rows()] == list(range(6))


def test_c71_a_large_row_and_an_error_row_survive_into_a_later_attempt(tmp_path: Path) -> None:
    output = tmp_path / "r.h5"
    large = answer(0, tokens=np.arange(1 << 21, dtype=np.int32), text="y" * (8 << 20))
    with SegmentWriter(parts_folder(output), 0) as writer:
        writer.add(large)
        writer.add(error(1))
    left = collect(parts_folder(output))
    assert dict(zip(left.row.tolist(), left.is_error.tolist(), strict=True)) == {0: False, 1: True}
    with SegmentWriter(parts_folder(output), 0) as writer:
        writer.add(answer(2))
    publish(parts_folder(output), output, PROVENANCE, 3, np.ones(3, np.int32))
    with open_results(output) as results:
        assert_same(results.row(0).samples[0], large)
        assert_same(results.row(1).samples[0], error(1))


@pytest.mark.slow
def test_publishing_holds_blocks_and_not_the_whole_job_in_memory(tmp_path: Path) -> None:
    answers = [answer(row, length=20_000) for row in range(400)]  # 64 MB of tokens and log-probability columns
    folder = write_segments(tmp_path / "r.h5", answers, segment_bytes=4 << 20)
    del answers
    tracemalloc.start()
    publish(folder, tmp_path / "r.h5", PROVENANCE, 400, np.ones(400, np.int32), block_bytes=1 << 20)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 << 20
