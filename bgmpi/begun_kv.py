"""Which begun sequences get their KV back from disk, and which compute it again (rank 0's matter).

By estimated seconds: bytes over the rate at which the files are read here, measured now, against tokens over the rate
of prefill that the attempt before measured.  The choice is logged.  A file that cannot be used costs nothing but that.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from bgmpi.io.attempts import RowMap
from bgmpi.io.kv_checkpoint import PATTERNS, read_index, read_rate
from bgmpi.io.segments import attempt_of
from bgmpi.primitives import Ids
from bgmpi.recovery import Left, restoring_pays
from bgmpi.request import SavedKv

_LOG = logging.getLogger("bgmpi.begun_kv")


def choose_kv(facts: str, folder: Path, maps: Mapping[int, RowMap], left: Left, first: Ids) -> None:
    """Give what is begun the KV that earlier attempts saved of it, where reading it is cheaper than computing it.

    facts: what KV depends on beside tokens; maps: how the rows of each attempt are numbered now; first: int64
    [rows + 1], each row's first sequence.
    """
    best: dict[int, tuple[SavedKv, int]] = {}
    rate = float("nan")
    for path in sorted(folder.glob(PATTERNS[0])):
        number = attempt_of(path.name)
        index = read_index(path, facts) if number in maps else f"{path.name}: its attempt is not known"
        if isinstance(index, str):
            _LOG.warning("%s", index)
            continue
        rate = rate if np.isnan(index.prefill_rate) else index.prefill_rate
        row = maps[number].now(index.row)
        for sequence, saved in zip((first[row] + index.sample).tolist(), index.saved, strict=True):
            # Behind the last sequence where the row is gone: nobody there has begun.
            if sequence in left.begun and (sequence not in best or best[sequence][0].with_kv < saved.with_kv):
                best[sequence] = saved, saved.pages * index.page_bytes
    if not best:
        return
    size = np.array([size for _, size in best.values()], np.int64)
    tokens = np.array([saved.with_kv for saved, _ in best.values()], np.int64)
    speed = read_rate(Path(next(iter(best.values()))[0].path))
    pays = restoring_pays(size, tokens, speed, rate)
    for (sequence, (saved, _)), restored in zip(best.items(), pays.tolist(), strict=True):
        if restored:
            left.begun[sequence].kv = saved
    _LOG.info(
        "KV of %d begun sequences is read (%.1f MB at %.0f MB/s: about %.2f s), of %d more it was saved and is "
        "computed again (%d tokens at %.0f tok/s: about %.2f s), of %d it was not saved",
        pays.sum(), size[pays].sum() / 1e6, speed / 1e6, size[pays].sum() / speed, (~pays).sum(), tokens[~pays].sum(),
        rate, tokens[~pays].sum() / rate if not pays.all() else 0.0, len(left.begun) - len(pays),
    )  # fmt: skip
