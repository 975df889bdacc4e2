"""The token ids of all prompts of a job, in a file without a name: written once, read by number (rank 0).

All prompts are tokenised before the first round, to find what they share; a job of a million long ones does not fit in
memory, and tokenising them twice would cost as much again.  So their ids lie on the disk that takes the results, in the
order in which they came, and memory keeps 12 bytes a prompt.  The file lives no longer than its process: it has no name
from the start, so after any kill the kernel takes it back.

Reads go through the page cache and nothing is synced: what is lost with the process is not needed any more.
"""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import numpy as np
from numpy.typing import NDArray

from bgmpi.errors import InternalError, WriteError

_TOKEN = np.dtype(np.int32)
#: Bytes that gather before they are written.
_BUFFER = 4 << 20
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class PromptStore:
    """Token ids of `prompts` prompts, in an unnamed file in `folder`; a context manager.

    lengths: tokens of each, int32 [prompts], 0 for those that were not put in.
    """

    def __init__(self, folder: Path | str, prompts: int) -> None:
        """Open an empty store.  Raises WriteError."""
        self.folder = Path(folder)
        self.lengths: NDArray[np.int32] = np.zeros(prompts, np.int32)
        self._begin: NDArray[np.int64] = np.zeros(prompts, np.int64)
        self._tokens = 0
        self._pending: list[bytes] = []
        self._pending_bytes = 0
        try:
            self._file: IO[bytes] = tempfile.TemporaryFile(  # noqa: SIM115 - close() closes it
                buffering=0, prefix="bgmpi-prompts-", dir=self.folder
            )
        except OSError as error:
            raise self._failure(error) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Let the file go.  May be called twice."""
        self._file.close()

    @property
    def closed(self) -> bool:
        """Whether it was let go."""
        return self._file.closed

    def append(self, prompts: NDArray[np.int64], lengths: NDArray[np.int64], tokens: NDArray[np.int32]) -> None:
        """Put in prompts, int64 [k], of these lengths, int64 [k]; their tokens, int32 [sum], one after the other.

        Raises WriteError.
        """
        if lengths.sum() != len(tokens):
            raise InternalError(f"{len(tokens)} tokens for prompts of {int(lengths.sum())}")
        ends = self._tokens + np.cumsum(lengths)
        self._begin[prompts] = ends - lengths
        self.lengths[prompts] = lengths
        self._tokens += len(tokens)
        self._pending.append(tokens.astype(_TOKEN, copy=False).tobytes())
        self._pending_bytes += len(self._pending[-1])
        if self._pending_bytes >= _BUFFER:
            self._flush()

    def read(self, prompt: int) -> NDArray[np.int32]:
        """Return the ids of one prompt, int32 [its length].  Raises WriteError where what came before cannot be
        written."""
        self._flush()
        ids = np.empty(int(self.lengths[prompt]), _TOKEN)
        self._fill(ids, int(self._begin[prompt]))
        return ids

    def pages(
        self, prompts: NDArray[np.int64], ordinal: int, page_tokens: int, shareable: NDArray[np.int64]
    ) -> NDArray[np.int32]:
        """Return the ids of page `ordinal` of some prompts, int32 [k, page_tokens]; -1 behind the first `shareable`
        tokens, int64 [k], of each."""
        self._flush()
        found = np.full((len(prompts), page_tokens), -1, _TOKEN)
        first = ordinal * page_tokens
        counts = np.clip(shareable - first, 0, page_tokens)
        begins = self._begin[prompts] + first
        for place in np.argsort(begins, kind="stable").tolist():
            if counts[place]:
                self._fill(found[place, : counts[place]], int(begins[place]))
        return found

    def _fill(self, ids: NDArray[np.int32], begin: int) -> None:
        """Read tokens from number `begin` of the file on."""
        view, offset = ids.data.cast("B"), begin * _TOKEN.itemsize
        while view:
            got = os.preadv(self._file.fileno(), [view], offset)
            if not got:
                raise InternalError(f"the prompts' file in {self.folder} ends at byte {offset}")
            view, offset = view[got:], offset + got

    def _flush(self) -> None:
        if not self._pending:
            return
        view = memoryview(b"".join(self._pending))
        self._pending, self._pending_bytes = [], 0
        try:
            while view:
                view = view[self._file.write(view) :]
        except OSError as error:
            raise self._failure(error) from error

    def _failure(self, error: OSError) -> WriteError:
        needed = f"the prompts' token ids take {self._tokens * _TOKEN.itemsize} bytes so far"
        advice = "make room there" if error.errno in _NO_SPACE else "see to that"
        return WriteError(
            f"cannot write in {self.folder}: {error.strerror} (errno {error.errno}); {needed}; {advice}, or pass "
            "--prefix-sharing off, which keeps none"
        )
