"""A disk that fills while a job runs: exit 74 with path and bytes, nothing torn, and it goes on later (case C62)."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import checkpoints
import jobs
import launch
import pytest
from tokenizers_for_tests import make_tokenizer

#: Runs in a mount namespace of its own.  Words: the small disk, where results are copied to, then those of `bgmpi run`.
DRIVER = """
import glob, json, re, shutil, subprocess, sys
from pathlib import Path
import h5py

disk, copy, program = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
ballast, folder = disk / "ballast", disk / "out.h5.parts"
ballast.write_bytes(bytes(int(json.loads(program.pop()))))
ended = subprocess.run(program, capture_output=True, text=True)
assert ended.returncode == 74, (ended.returncode, ended.stderr)
told = re.search(r"cannot write (\\S+): No space left on device \\(errno 28\\); (\\d+) bytes needed", ended.stderr)
assert told and told[1].startswith(str(folder)) and int(told[2]) > 0, ended.stderr
entries = [json.loads(line) for path in folder.glob("journal-*") for line in path.read_text().splitlines()]
segments = [entry for entry in entries if entry["kind"] == "segment"]
rows = []
for entry in segments:
    with h5py.File(folder / entry["name"], "r") as file:
        assert len(file["samples/row"]) == entry["records"]
        rows += zip(file["samples/row"][:].tolist(), file["samples/sample"][:].tolist())
assert rows and not list(folder.glob(".*.tmp")) and not (disk / "out.h5").exists()
ballast.unlink()
ended = subprocess.run(program, capture_output=True, text=True)
assert ended.returncode == 0, (ended.returncode, ended.stderr)
assert f"{len(rows)} are done, 0 are errors" in ended.stderr, ended.stderr
assert not folder.exists()
shutil.copy(disk / "out.h5", copy)
print("finished before:", json.dumps(rows))
"""


@pytest.mark.slow
def test_c62_a_job_on_a_full_disk_ends_with_74_and_goes_on_when_there_is_room(tmp_path: Path) -> None:
    model = make_tokenizer(checkpoints.make("mixtral", tmp_path / "model"))
    bodies = [
        {"prompt": prompt, "max_tokens": 4 + 5 * (i % 4), "ignore_eos": True, "temperature": 0.9, "n": 1 + i % 2}
        for i, prompt in enumerate(jobs.prompts(24, longest=30, seed=3))
    ]
    requests = jobs.write_requests(tmp_path / "r.jsonl", bodies)
    disk, whole, copy = tmp_path / "disk", tmp_path / "whole.h5", tmp_path / "copy.h5"
    disk.mkdir()
    common = ["--model", model, "-i", requests, "--dtype", "float32", "--max-num-seqs", "4", "--page-tokens", "4",
              "--checkpoint-interval", "0", "--progress", "off"]  # fmt: skip
    program = [launch.script("bgmpi"), "run", *common, "-o", disk / "out.h5"]
    mount = f'mount -t tmpfs -o size=2m none {disk} && exec {sys.executable} -c "$@"'
    small = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mount, "sh", DRIVER]
    try:
        ended = launch.launch([*small, disk, copy, *program, "1750000"])
    except FileNotFoundError:
        pytest.skip("unshare is not installed, so no small disk can be made")
    if "unshare" in ended.stderr or "mount:" in ended.stderr:
        pytest.skip(f"this system lets an ordinary user mount no small disk: {ended.stderr.strip()}")
    assert "finished before:" in ended.stdout, ended
    jobs.run_jobs(1, [[*common, "-o", whole]], tmp_path)
    assert jobs.tokens_of(copy) == jobs.tokens_of(whole)
    assert Counter(len(row) for row in jobs.tokens_of(copy)).total() == sum(1 + i % 2 for i in range(24))
