"""Arrays on a real Slurm: each task is one shard of the input, whatever its id, and the merged file is that of one job
(case C75)."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import checkpoints
import jobs
import pytest
from launch import Ended, bgmpi, launch
from tokenizers_for_tests import make_tokenizer
from virtual_nodes import Nodes, virtual_nodes

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]

SCRIPT = Path(__file__).parents[1] / "slurm" / "run_batch.sh"


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with virtual_nodes(2) as found:
        yield found


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A model and ten rows drawn at random, none with a seed of its own."""
    root = tmp_path_factory.mktemp("array")
    model = make_tokenizer(checkpoints.make("mixtral", root / "model"))
    bodies = [
        {"prompt": prompt, "max_tokens": 4 + i % 5, "ignore_eos": True, "temperature": 0.9}
        for i, prompt in enumerate(jobs.prompts(10, longest=30))
    ]
    requests = jobs.write_requests(root / "r.jsonl", bodies)
    return {"BGMPI_MODEL": str(model), "BGMPI_INPUT_FILE": str(requests), "BGMPI_DTYPE": "float32",
            "BGMPI_THREADS": "1", "RUN_VENV": str(Path(sys.executable).parents[1])}  # fmt: skip


def sbatch(nodes: Nodes, settings: dict[str, str], folder: Path, *words: str) -> tuple[Ended, dict[str, str]]:
    """Submit the script from `folder` and wait; -> how sbatch ended, and the log of each task by its id."""
    options = [word for word in words if word.startswith(("--array", "-N", "--ntasks"))]
    argv = ["sbatch", "--wait", "--output=job-%a.log", *options, SCRIPT, *(one for one in words if one not in options)]
    ended = launch(argv, cwd=folder, env={**nodes.environment, **settings}, limit=200)
    logs = {path.stem.partition("-")[2]: path.read_text() for path in folder.glob("job-*.log")}
    return ended, logs


def test_c75_tasks_of_an_array_are_shards_and_their_merged_outputs_are_those_of_one_job(
    nodes: Nodes, settings: dict[str, str], tmp_path: Path
) -> None:
    bgmpi(0, "run", "-o", tmp_path / "whole.h5", env=dict(settings), expect=0)
    ended, logs = sbatch(nodes, settings, tmp_path, "--array=3-5:2%1", "-N2", "--ntasks-per-node=1")
    assert ended.returncode == 0 and sorted(logs) == ["3", "5"], f"{ended}\n{logs}"
    assert "shard 0/2 of the input: 5 of its 10 rows" in logs["3"] and "2 ranks on 2 nodes" in logs["3"]
    assert "shard 1/2 of the input: 5 of its 10 rows" in logs["5"]
    names = [f"results.shard-000{number}-of-0002.h5" for number in range(2)]
    assert sorted(path.name for path in tmp_path.glob("results*")) == names
    bgmpi(0, "merge", tmp_path / "results.h5", expect=0)
    assert jobs.tokens_of(tmp_path / "results.h5") == jobs.tokens_of(tmp_path / "whole.h5")


def test_c75_a_spare_array_task_is_told_what_to_pass_and_a_shard_can_be_run_again_by_name(
    nodes: Nodes, settings: dict[str, str], tmp_path: Path
) -> None:
    ended, logs = sbatch(nodes, settings, tmp_path, "--array=1")
    assert ended.returncode == 2 and "of how many shards is it one? pass --shard K/N" in logs["1"], f"{ended}\n{logs}"
    ended, logs = sbatch(nodes, settings, tmp_path, "--array=1", "--shard", "1/4")
    assert ended.returncode == 0 and "shard 1/4 of the input: 3 of its 10 rows" in logs["1"], f"{ended}\n{logs}"
    missing = bgmpi(0, "merge", tmp_path / "results.h5", expect=66)
    assert "3 of 4 shards missing: 0, 2, 3" in missing.stderr
