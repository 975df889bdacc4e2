"""The front door to results: what a reader of a published file needs, in one import.

`open_results` gives numpy columns and rows, `inspect` a summary for people.  How segments, journal and publishing work
is behind other doors (`segments`, `journal`, `publish`), because a reader must never need them.
"""

from __future__ import annotations

from bgmpi.io.results_file import Results, RowResult, open_results
from bgmpi.io.summary import inspect

__all__ = ["Results", "RowResult", "inspect", "open_results"]
