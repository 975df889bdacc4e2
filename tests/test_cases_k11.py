"""Public faults of kind K11: launchers (C73); C77 and C78 are in test_slurm.py."""

from __future__ import annotations

import json
from pathlib import Path

import launch


def test_c73_a_rank_whose_launcher_mpi_does_not_join_ends_at_once_and_writes_nothing(tmp_path: Path) -> None:
    """Four tasks were started, this is the third, and MPI sees a world of one: all four would write the same file."""
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "hi"}}
    (tmp_path / "in.jsonl").write_text(json.dumps(line))
    words = ["run", "--model", tmp_path, "-i", tmp_path / "in.jsonl", "-o", tmp_path / "out.h5"]
    for task in ("2", "0"):
        env = {"SLURM_NTASKS": "4", "SLURM_PROCID": task, "SLURM_STEP_ID": "0"}
        ended = launch.bgmpi(0, *words, env=env, limit=60, expect=2)
        # Only the first task speaks: four times the same sentence would hide who said it.
        assert ("--mpi=pmi2" in ended.stderr and "--allow-rank-mismatch" in ended.stderr) == (task == "0")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl"]
    ended = launch.bgmpi(0, *words, "--allow-rank-mismatch", env=env, limit=60, expect=66)
    assert "config.json" in ended.stderr
