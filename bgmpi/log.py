"""Says how a line of the log looks, and who may write one.

Rank 0 tells the story; the others speak only from WARNING on, because a thousand ranks that say the same thing hide the
one that does not (conventions, "Logs").  Every line carries UTC time, level and `rank/host` and is one line: carriage
returns would break the prefixing of launchers.  Nothing happens at import; rooms ask `logging.getLogger("bgmpi.x")`.
"""

from __future__ import annotations

import logging
import sys
import time
from typing import TextIO

ERASE_TO_END = "\x1b[K"


class LineFormatter(logging.Formatter):
    """Formats `2026-01-31T12:00:00.123Z INFO 0/node1 message`; the lines of a traceback follow indented."""

    converter = staticmethod(time.gmtime)

    def __init__(self, rank: int, host: str, *, erase: bool = False) -> None:
        """Keep whose lines these are; `erase` wipes what a progress bar left to the right of a line."""
        super().__init__(f"%(asctime)s.%(msecs)03dZ %(levelname)s {rank}/{host} %(message)s", "%Y-%m-%dT%H:%M:%S")
        self._end = ERASE_TO_END if erase else ""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as text without carriage returns or a line break at its end."""
        return "\n    ".join(line + self._end for line in super().format(record).splitlines())


def configure(rank: int, host: str, level: str = "info", stream: TextIO | None = None) -> logging.Logger:
    """Make the logger `bgmpi` write to `stream` (stderr when None) for this rank, and return it.  Local.

    `level` holds on rank 0; other ranks are at WARNING or above, but `debug` holds everywhere.  Calling it again
    replaces the earlier setting.
    """
    out = sys.stderr if stream is None else stream
    wanted = getattr(logging, level.upper())
    logger = logging.getLogger("bgmpi")
    for old in list(logger.handlers):
        logger.removeHandler(old)
    handler = logging.StreamHandler(out)
    handler.setFormatter(LineFormatter(rank, host, erase=out.isatty()))
    logger.addHandler(handler)
    logger.setLevel(wanted if rank == 0 or wanted == logging.DEBUG else max(wanted, logging.WARNING))
    logger.propagate = False
    return logger
