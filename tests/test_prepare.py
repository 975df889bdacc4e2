"""How much KV memory a rank takes, decided from numbers alone."""

from __future__ import annotations

import pytest

from bgmpi.config import Config, resolve
from bgmpi.errors import UsageError
from bgmpi.prepare import available_memory, pages_that_fit


def config(*words: str) -> Config:
    return resolve(words, {})


def test_the_pool_is_a_share_of_free_memory_over_the_nodes_ranks() -> None:
    asked = config("--gpu-memory-utilization", "0.5", "--max-num-seqs", "100")
    assert pages_that_fit(asked, one_page=1000, context=6400, node_ranks=4, available=8_000_000) == 1000


def test_the_pool_is_no_larger_than_all_sequences_at_full_length_need() -> None:
    asked = config("--max-num-seqs", "3", "--page-tokens", "10")
    assert pages_that_fit(asked, one_page=8, context=95, node_ranks=1, available=1 << 40) == 30


def test_kv_memory_is_taken_as_it_is_said() -> None:
    asked = config("--host-kv-memory", "10k")
    assert pages_that_fit(asked, one_page=1000, context=64000, node_ranks=9, available=1) == 10


def test_a_pool_without_a_page_is_refused_and_says_the_flag() -> None:
    with pytest.raises(UsageError, match=r"hold no page of 2,000 bytes; raise --host-kv-memory"):
        pages_that_fit(config("--host-kv-memory", "1k"), one_page=2000, context=64, node_ranks=1, available=1 << 30)


def test_a_context_that_was_asked_for_and_does_not_fit_is_refused() -> None:
    asked = config("--host-kv-memory", "1k", "--max-model-len", "1280")
    with pytest.raises(UsageError, match="needs 2,000 bytes of KV"):
        pages_that_fit(asked, one_page=100, context=1280, node_ranks=1, available=1)


def test_slurms_limit_counts_when_it_is_the_least() -> None:
    assert available_memory({"SLURM_MEM_PER_NODE": "3"}) == 3 << 20
    assert available_memory({"SLURM_MEM_PER_NODE": "0"}) == available_memory({})
