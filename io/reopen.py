"""A published file goes on: its answers become the segments of a first attempt again.

What published files lack to go on is where their rows are in another input; the hashes of `rows/content` tell it.  The
segments are written first and the attempt's manifest last, so a kill between leaves segments that nobody counts, and
the next attempt begins here again.  The published file itself is only read: it stays whole until the job's new one
takes its place.  Rejected: publishing from the old file directly.  It would save the room of the segments, but every
later attempt would have to know whether the file at the output's place is still the one whose answers were counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bgmpi.input_shard import InputShard
from bgmpi.io.attempts import begin_attempt
from bgmpi.io.published_answers import PublishedAnswers
from bgmpi.io.request_index import RequestIndex, input_key
from bgmpi.io.results_file import Results
from bgmpi.io.segments import SegmentWriter

#: The number of the attempt that published answers become.
FIRST = 1
_BLOCK_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class PublishedRows:
    """The rows of a published file.  key: tells its input (RequestIndex.key); content: uint64 [rows], hashes of their
    lines, None where they cannot be told; failed: bool [rows]."""

    key: str
    content: NDArray[np.uint64] | None
    failed: NDArray[np.bool_]


def published_rows(results: Results, index: RequestIndex) -> PublishedRows:
    """Return the rows of a published file; one without hashes has those of the present input where that is the same."""
    about = results.attributes
    shard = InputShard(int(about["shard"]), int(about["shards"])) if "shard" in about else None
    key = input_key(str(about.get("input_sha256")), shard)
    content = results.column("rows/content").astype(np.uint64) if results.has("rows/content") else None
    if content is None and key == index.key:
        content = index.content
    return PublishedRows(key, content, results.status != 0)


def reopen(
    answers: PublishedAnswers, folder: Path, settings: Mapping[str, str], rows: PublishedRows, seconds: float
) -> None:
    """Write the answers of a published file as those of attempt FIRST in an empty `folder`; raise WriteError.

    settings: what they depend on; seconds: of the job that they took.
    """
    assert rows.content is not None
    with SegmentWriter(folder, 0, attempt=FIRST, clock=lambda: seconds) as writer:
        for table in answers.blocks(_BLOCK_BYTES):
            writer.write(table)
    begin_attempt(folder, FIRST, settings, rows.key, rows.content, retry_failed=False)
