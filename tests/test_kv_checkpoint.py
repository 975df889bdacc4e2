"""KV comes back from disk bit for bit, or not at all; never under other tokens."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from bgmpi.io.kv_checkpoint import (
    KvIndex,
    KvToSave,
    hash_of,
    kv_path,
    load_kv,
    read_index,
    read_rate,
    save_kv,
)
from bgmpi.io.segments import attempt_of

FACTS = "model bfloat16 4"


def store_of(pages: int) -> torch.Tensor:
    return torch.randn(pages, 2, 2, 3, 4, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)


def saved(path: Path, store: torch.Tensor) -> KvIndex:
    found = [
        KvToSave(7, 0, np.arange(9, dtype=np.int32), np.array([4, 1, 8])),
        KvToSave(2, 1, np.arange(3, dtype=np.int32), np.array([0])),
    ]
    assert save_kv(path, FACTS, found, store, 1234.0) == 4 * store[0].numel() * 2
    index = read_index(path, FACTS)
    assert isinstance(index, KvIndex)
    return index


def test_pages_come_back_bit_for_bit_at_other_places(tmp_path: Path) -> None:
    store, path = store_of(10), kv_path(tmp_path, 3, 5)
    index = saved(path, store)
    assert attempt_of(path.name) == 3 and index.row.tolist() == [7, 2] and index.sample.tolist() == [0, 1]
    assert index.prefill_rate == 1234.0 and index.page_bytes == store[0].numel() * 2 and read_rate(path) > 0
    other = torch.zeros_like(store)
    first, second = index.saved
    assert (first.with_kv, second.with_kv) == (9, 3) and first.tokens == hash_of(np.arange(9, dtype=np.int32))
    assert load_kv(first, other, np.array([2, 9, 5])) and load_kv(second, other, np.array([3]))
    assert torch.equal(other[[2, 9, 5, 3]].view(torch.int16), store[[4, 1, 8, 0]].view(torch.int16))
    assert not other[[0, 1, 4, 6, 7, 8]].any()


def test_other_tokens_have_another_hash() -> None:
    tokens = np.arange(100, dtype=np.int32)
    other = tokens.copy()
    other[50] += 1
    assert len({hash_of(tokens), hash_of(other), hash_of(tokens[:99]), hash_of(tokens[::-1])}) == 4


@pytest.mark.parametrize("fault", ["page", "cut", "gone"])
def test_damaged_kv_is_not_used(tmp_path: Path, fault: str, caplog: pytest.LogCaptureFixture) -> None:
    store, path = store_of(10), kv_path(tmp_path, 1, 0)
    first = saved(path, store).saved[0]
    if fault == "page":
        with h5py.File(path, "r+") as file:
            file["pages"][1, 5] ^= 1
    elif fault == "cut":
        path.write_bytes(path.read_bytes()[:700])
    else:
        path.unlink()
    other = torch.zeros_like(store)
    assert not load_kv(first, other, np.array([1, 2, 3])) and not other.any()
    assert "computed again" in caplog.text


def test_kv_of_another_model_or_version_is_named_and_not_read(tmp_path: Path) -> None:
    path = kv_path(tmp_path, 1, 0)
    saved(path, store_of(10))
    assert "another model" in str(read_index(path, "other"))
    path.write_bytes(b"no HDF5")
    assert "cannot be read" in str(read_index(path, FACTS))
