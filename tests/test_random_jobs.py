"""A few seeded draws of random_jobs.py: whatever memories, tiers, drills and shapes, the tokens are the same."""

from __future__ import annotations

from pathlib import Path

import launch
import pytest
import random_jobs


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> random_jobs.Work:
    return random_jobs.make_work(tmp_path_factory.mktemp("work"))


@launch.on_ranks(1, 2)
def test_random_memories_tiers_drills_and_shapes_change_no_token(
    work: random_jobs.Work, ranks: int, tmp_path: Path
) -> None:
    random_jobs.run_draws(work, [ranks * 100 + i for i in range(3)], ranks, tmp_path, limit=120)
