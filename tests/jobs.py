"""Jobs for the tests that move: input files, and several whole runs inside one launch.

A launch costs seconds and a tiny job tenths of one, so `run_jobs` runs many jobs one after the other in the same
processes, on any number of ranks; what they left is read with plain h5py.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import h5py
import launch
import numpy as np

_SOURCE = """
import json, sys
from bgmpi.api import run_batch
from bgmpi.config import resolve
for words in json.loads(open(sys.argv[1]).read()):
    run_batch(resolve(words, {}))
"""


def write_requests(path: Path, bodies: Sequence[Mapping[str, Any]], url: str = "/v1/completions") -> Path:
    """Write one line a body, with custom_ids r0, r1, ..."""
    lines = [
        json.dumps({"custom_id": f"r{i}", "method": "POST", "url": url, "body": dict(body)})
        for i, body in enumerate(bodies)
    ]
    path.write_text("".join(line + "\n" for line in lines))
    return path


def run_jobs(ranks: int, jobs: Sequence[Sequence[str | Path]], folder: Path, *, limit: float = 300) -> launch.Ended:
    """Run jobs (the words of `bgmpi run` each) one after the other on `ranks` ranks in one launch."""
    listing = folder / f"jobs-{ranks}.json"
    listing.write_text(json.dumps([[str(word) for word in words] for words in jobs]))
    argv = [sys.executable, "-m", "mpi4py", "-c", _SOURCE, listing]
    if ranks == 1:
        return launch.launch(argv, limit=limit, expect=0)
    return launch.mpiexec(ranks, argv, limit=limit, expect=0)


def tokens_of(path: Path) -> list[list[int]]:
    """Return the generated ids of every sample of a results file, in input order."""
    with h5py.File(path, "r") as file:
        assert file.attrs["complete"] == 1
        offsets, values = file["tokens/offsets"][:], file["tokens/values"][:]
    return [values[a:b].tolist() for a, b in itertools.pairwise(offsets)]


def prompts(count: int, *, longest: int = 70, vocab: int = 500, seed: int = 7) -> list[list[int]]:
    """Return `count` prompts of random ids, of mixed length from 1 to `longest`."""
    random = np.random.default_rng(seed)
    return [random.integers(3, vocab, size=random.integers(1, longest + 1)).tolist() for _ in range(count)]
