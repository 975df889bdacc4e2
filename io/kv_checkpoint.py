"""KV of unfinished sequences on disk, so that a later attempt need not compute it again.

One plain HDF5 file a rank and checkpoint, there whole or not at all: pages as the store has them (uint8 [pages,
page_bytes]), those that several sequences share once, and, by sequence, which are its own. KV depends on tokens alone,
so each sequence carries a hash of the tokens that its KV is of: whoever restores compares it with the tokens that it
goes on with, and no order of attempts, no other number of ranks and no edited input can bring wrong KV together with
right tokens. Each page has a checksum, looked at when it is read; the journal does not hash these files, because they
can be as large as the node's memory.

It knows bytes and names, nothing of who should save or restore.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import time
import zlib
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy as np
import torch
from numpy.typing import NDArray

from bgmpi.io.durable import HdfSink, replacing
from bgmpi.request import SavedKv

FORMAT, VERSION = "bgmpi-kv", 2
PATTERNS = ("kv-*.h5", ".kv-*.writing")
#: Pages gathered at once, and bytes that are read to measure a rate.
_BLOCK, _SAMPLE = 64, 32 << 20
_LOG = logging.getLogger("bgmpi.kv_checkpoint")


@dataclass(frozen=True, slots=True)
class KvIndex:
    """Whose KV a file has: row int64 [k] as its attempt numbered them, sample int32 [k], saved.

    page_bytes: of one page; prefill_rate: tokens a second that the rank computed in prefill, NaN where it was not
    measured.
    """

    row: NDArray[np.int64]
    sample: NDArray[np.int32]
    saved: tuple[SavedKv, ...]
    page_bytes: int
    prefill_rate: float


@dataclass(frozen=True, slots=True)
class KvToSave:
    """One sequence: its row and sample, the tokens int32 [with_kv] whose KV it is, and its pages in the store."""

    row: int
    sample: int
    tokens: NDArray[np.int32]
    pages: NDArray[np.int64]


def hash_of(tokens: NDArray[np.int32]) -> int:
    """Return a 63-bit hash of tokens."""
    digest = hashlib.blake2b(np.ascontiguousarray(tokens, "<i4").tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def kv_path(folder: Path, attempt: int, rank: int) -> Path:
    """Return a new name for a file of this attempt's rank."""
    return folder / f"kv-{attempt:04d}-{secrets.token_hex(6)}-r{rank:05d}.h5"


def save_kv(path: Path, facts: str, found: list[KvToSave], store: torch.Tensor, prefill_rate: float) -> int:
    """Write the KV of these sequences out of `store` [pages, ...]; -> bytes of KV.  Raises WriteError.

    facts: what KV depends on beside tokens, as text.
    """
    named = np.concatenate([np.empty(0, np.int64), *(one.pages for one in found)])
    pages, places = _once(named)
    cuts = np.cumsum([0, *(len(one.pages) for one in found)])
    page_bytes = store[0].numel() * store.element_size()
    temporary = path.with_name(f".{path.name}.writing")
    with replacing(path, temporary, len(pages) * page_bytes) as place, HdfSink(place) as sink:
        with h5py.File(sink, "w") as file:
            file.attrs.update(format=FORMAT, format_version=VERSION, facts=facts, prefill_rate=prefill_rate)
            file["row"] = np.array([one.row for one in found], np.int64)
            file["sample"] = np.array([one.sample for one in found], np.int32)
            file["with_kv"] = np.array([len(one.tokens) for one in found], np.int64)
            file["tokens"] = np.array([hash_of(one.tokens) for one in found], np.int64)
            file["first"] = cuts.astype(np.int64)
            file["places"] = places
            data = file.create_dataset("pages", (len(pages), page_bytes), np.uint8)
            sums = np.empty(len(pages), np.uint32)
            for start in range(0, len(pages), _BLOCK):
                some = torch.from_numpy(pages[start : start + _BLOCK])
                block = store[some].reshape(len(some), -1).view(torch.uint8).numpy()
                data[start : start + len(some)] = block
                sums[start : start + len(some)] = [zlib.crc32(one) for one in block]
                sink.check()
            file["sums"] = sums
        sink.check()
    return len(pages) * page_bytes


def read_index(path: Path, facts: str) -> KvIndex | str:
    """Return whose KV a file has, or one sentence that says why it cannot be used."""
    try:
        with h5py.File(path, "r", locking=False) as file:
            if (file.attrs.get("format"), file.attrs.get("format_version")) != (FORMAT, VERSION):
                return f"{path.name} is no file of KV of this version: that KV is computed again"
            if file.attrs.get("facts") != facts:
                return f"{path.name} has KV of another model or other pages: it is computed again"
            first, with_kv, tokens = (file[name][:].tolist() for name in ("first", "with_kv", "tokens"))
            saved = tuple(
                SavedKv(str(path), first[i], first[i + 1] - first[i], with_kv[i], tokens[i])
                for i in range(len(with_kv))
            )
            rate = float(file.attrs["prefill_rate"])
            return KvIndex(file["row"][:], file["sample"][:], saved, int(file["pages"].shape[1]), rate)
    except (OSError, KeyError, ValueError, IndexError) as error:
        return f"{path.name} cannot be read: its KV is computed again ({error})"


def read_rate(path: Path) -> float:
    """Measure bytes a second that the pages of a file are read at."""
    begun = time.perf_counter()
    with h5py.File(path, "r", locking=False) as file:
        data = file["pages"]
        size: int = data[: max(1, _SAMPLE // data.shape[1])].nbytes
    return size / max(time.perf_counter() - begun, 1e-9)


def _once(pages: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the different page numbers in the order of their first mention, and the place of each mention there."""
    _, first, which = np.unique(pages, return_index=True, return_inverse=True)
    order = np.argsort(first)
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    return pages[first[order]], place[which]


def load_kv(saved: SavedKv, store: torch.Tensor, pages: NDArray[np.int64], *, skip: int = 0) -> bool:
    """Read a sequence's pages, but for the first `skip`, into `pages` of the store; False, and a warning, where they
    cannot be read or are damaged."""
    try:
        with h5py.File(saved.path, "r", locking=False) as file:
            places, which = np.unique(file["places"][saved.first + skip : saved.first + saved.pages],
                                      return_inverse=True)
            block, sums = file["pages"][places][which], file["sums"][places][which]
    except (OSError, KeyError, ValueError, IndexError, TypeError) as error:
        _LOG.warning("KV in %s cannot be read and is computed again: %s", saved.path, error)
        return False
    whole = block.shape == (len(pages), store[0].numel() * store.element_size())
    if not whole or [zlib.crc32(one) for one in block] != sums.tolist():
        _LOG.warning("KV in %s is damaged and is computed again", saved.path)
        return False
    store[torch.from_numpy(pages)] = torch.from_numpy(block).view(store.dtype).view(len(block), *store.shape[1:])
    return True
