"""Prompts are read back as they were put in, by any number, whole or by page; a full disk says where and what to do."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bgmpi.errors import InternalError, WriteError
from bgmpi.io import prompt_store
from bgmpi.io.prompt_store import PromptStore


@given(st.lists(st.integers(1, 20), min_size=1, max_size=20), st.randoms(use_true_random=False), st.integers(1, 7))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_prompts_are_read_as_they_were_put_in(tmp_path: Path, lengths: list[int], random, page: int) -> None:
    ids = [np.array([random.randrange(1000) for _ in range(length)], np.int32) for length in lengths]
    order = list(range(len(ids)))
    random.shuffle(order)
    with PromptStore(tmp_path, len(ids) + 1) as store:
        while order:
            some = [order.pop() for _ in range(min(len(order), random.randrange(1, 4)))]
            found = np.concatenate([ids[one] for one in some])
            store.append(np.array(some), np.array([lengths[one] for one in some]), found)
            assert store.read(some[0]).tolist() == ids[some[0]].tolist()
        assert not os.listdir(tmp_path)
        assert store.lengths.tolist() == [*lengths, 0] and not len(store.read(len(ids)))
        asked = np.array([random.randrange(len(ids)) for _ in range(5)])
        shareable = np.array([random.randrange(lengths[one] + 1) for one in asked.tolist()])
        for ordinal in range(4):
            for got, one, most in zip(store.pages(asked, ordinal, page, shareable), asked.tolist(), shareable.tolist(),
                                      strict=True):
                there = ids[one][:most][ordinal * page :][:page].tolist()
                assert got.tolist() == there + [-1] * (page - len(there))


def test_what_gathers_is_written_when_it_is_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_store, "_BUFFER", 64)
    written: list[int] = []
    write_all = PromptStore._flush
    monkeypatch.setattr(PromptStore, "_flush", lambda self: (written.append(self._pending_bytes), write_all(self)))
    with PromptStore(tmp_path, 9) as store:
        for prompt in range(9):
            store.append(np.array([prompt]), np.array([5]), np.arange(5, dtype=np.int32))
        assert written == [80, 80]


def test_a_full_disk_says_where_and_what_to_do(tmp_path: Path) -> None:
    with PromptStore(tmp_path, 1) as store:
        store.append(np.array([0]), np.array([3]), np.arange(3, dtype=np.int32))
        full = os.open("/dev/full", os.O_RDWR)
        os.dup2(full, store._file.fileno())
        os.close(full)
        with pytest.raises(WriteError, match=f"cannot write in {tmp_path}.*12 bytes.*--prefix-sharing off") as told:
            store.read(0)
        assert f"errno {errno.ENOSPC}" in str(told.value)
    with pytest.raises(WriteError, match="nowhere"):
        PromptStore(tmp_path / "nowhere", 1)


def test_lengths_that_do_not_meet_the_tokens_are_a_fault(tmp_path: Path) -> None:
    with PromptStore(tmp_path, 1) as store, pytest.raises(InternalError):
        store.append(np.array([0]), np.array([3]), np.arange(4, dtype=np.int32))
