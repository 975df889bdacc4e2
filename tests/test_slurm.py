"""Laws of the Slurm scripts, on a real Slurm of four virtual nodes: the job's answers and exit code are the program's.

Virtual nodes count as different nodes for MPI.  The scripts' own manners (folders, quoting, missing settings; public
cases C77 and C78) are tried with a stand-in for the program, so that each takes two seconds.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest
from launch import Ended, bgmpi, launch
from virtual_nodes import virtual_nodes

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]

SCRIPTS = Path(__file__).parents[1] / "slurm"
NODES = 4
STAND_IN = """#!/bin/sh
echo "stand-in rank $SLURM_PROCID of $SLURM_NTASKS:$(printf ' <%s>' "$@")"
if [ "$SLURM_PROCID" = 1 ]; then
    if [ -n "${STAND_IN_ABORT:-}" ]; then echo "$STAND_IN_ABORT" > "$RUN_CODE_FILE"; kill -9 $$; fi
    exit "${STAND_IN_CODE:-0}"
fi
if [ -n "${STAND_IN_KILLED:-}" ]; then
    if [ "$SLURM_PROCID" = "$STAND_IN_KILLED" ]; then kill -9 $$; fi
    exec sleep 300
fi
sleep 1
"""


@dataclass(frozen=True, slots=True)
class Cluster:
    """A running cluster, as the environment that its commands need."""

    environment: Mapping[str, str]

    def sbatch(
        self, folder: Path, words: Sequence[str | Path], *, env: Mapping[str, str | None] | None = None,
        limit: float = 120,
    ) -> tuple[Ended, str]:  # fmt: skip
        """Submit from `folder` and wait; return how sbatch ended (its exit code is the job's) and the job's log."""
        argv = ["sbatch", "--wait", "--output=job.log", *words]
        ended = launch(argv, cwd=folder, env={**self.environment, **(env or {})}, limit=limit)
        log = folder / "job.log"
        return ended, log.read_text() if log.exists() else ""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with virtual_nodes(NODES) as nodes:
        yield Cluster(nodes.environment)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from checkpoints import make
    from tokenizers_for_tests import make_tokenizer

    return make_tokenizer(make("mixtral", tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def requests(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twenty greedy completions of mixed length."""
    path = tmp_path_factory.mktemp("input") / "requests.jsonl"
    lines = [
        {
            "custom_id": f"row-{row}", "method": "POST", "url": "/v1/completions",
            "body": {"prompt": [3 + (7 * row + k) % 400 for k in range(1 + 5 * (row % 7))], "max_tokens": 4 + row % 9,
                     "temperature": 0, "ignore_eos": True},
        }
        for row in range(20)
    ]  # fmt: skip
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, model: Path, requests: Path) -> list[list[int]]:
    """What one rank answers without any launcher."""
    path = tmp_path_factory.mktemp("alone") / "results.h5"
    bgmpi(0, "run", "--model", model, "--input-file", requests, "--output-file", path, expect=0)
    answers = tokens(path)
    assert [len(row) for row in answers] == [4 + row % 9 for row in range(20)]
    return answers


@pytest.fixture
def stand_in(tmp_path: Path) -> Path:
    """A folder with spaces in its name that holds the scripts and a venv whose bgmpi only tells its arguments."""
    root = tmp_path / "a place with spaces"
    program = root / ".venv" / "bin" / "bgmpi"
    program.parent.mkdir(parents=True)
    program.write_text(STAND_IN)
    program.chmod(0o755)
    shutil.copytree(SCRIPTS, root / "slurm")
    (root / "work").mkdir()
    return root


def tokens(path: Path) -> list[list[int]]:
    """Generated ids of every row, read with h5py alone."""
    import h5py

    with h5py.File(path) as file:
        assert file.attrs["complete"] == 1
        offsets, values = file["tokens/offsets"][:], file["tokens/values"][:]
        return [values[start:stop].tolist() for start, stop in pairwise(offsets)]


def settings() -> dict[str, str | None]:
    return {"RUN_VENV": str(Path(sys.executable).parents[1]), "BGMPI_THREADS": "1"}


@pytest.mark.parametrize("ranks_a_node", [1, 2])
def test_four_nodes_answer_what_one_rank_answers(
    cluster: Cluster, tmp_path: Path, model: Path, requests: Path, alone: list[list[int]], ranks_a_node: int
) -> None:
    ended, log = cluster.sbatch(
        tmp_path,
        ["-N", str(NODES), f"--ntasks-per-node={ranks_a_node}", SCRIPTS / "run_batch.sh", "--output-file", "out.h5"],
        env={**settings(), "BGMPI_MODEL": str(model), "BGMPI_INPUT_FILE": str(requests)},
        limit=200,
    )
    assert ended.returncode == 0, f"{ended}\n{log}"
    assert f"{NODES * ranks_a_node} ranks on {NODES} nodes" in log
    assert tokens(tmp_path / "out.h5") == alone


def test_a_missing_model_ends_the_job_with_its_own_code(cluster: Cluster, tmp_path: Path, requests: Path) -> None:
    ended, log = cluster.sbatch(
        tmp_path, ["-N", "2", "--ntasks-per-node=1", SCRIPTS / "run_batch.sh"],
        env={**settings(), "BGMPI_MODEL": str(tmp_path / "no model"), "BGMPI_INPUT_FILE": str(requests)},
    )  # fmt: skip
    assert ended.returncode == 66, f"{ended}\n{log}"
    assert "no model" in log


def test_a_launcher_that_mpi_does_not_join_is_a_usage_error(
    cluster: Cluster, tmp_path: Path, model: Path, requests: Path
) -> None:
    ended, log = cluster.sbatch(
        tmp_path, ["-N", "2", "--ntasks-per-node=1", SCRIPTS / "run_batch.sh"],
        env={**settings(), "RUN_MPI": "none", "BGMPI_MODEL": str(model), "BGMPI_INPUT_FILE": str(requests)},
    )  # fmt: skip
    assert ended.returncode == 2, f"{ended}\n{log}"
    assert "pmi2" in log


@pytest.mark.parametrize("code", [0, 3, 74])
def test_c77_the_scripts_exit_code_is_that_of_the_program(cluster: Cluster, stand_in: Path, code: int) -> None:
    ended, log = cluster.sbatch(
        stand_in / "work", ["-N", "4", "../slurm/run_batch.sh"], env={"STAND_IN_CODE": str(code)}
    )
    assert ended.returncode == code, f"{ended}\n{log}"
    assert [path.name for path in (stand_in / "work").iterdir()] == ["job.log"]


def test_c77_a_rank_that_aborts_by_a_signal_can_note_its_code_before(cluster: Cluster, stand_in: Path) -> None:
    ended, log = cluster.sbatch(stand_in / "work", ["-N", "4", "../slurm/run_batch.sh"], env={"STAND_IN_ABORT": "70"})
    assert ended.returncode == 70, f"{ended}\n{log}"


def test_c76_a_killed_rank_ends_the_script_and_frees_the_allocation(cluster: Cluster, stand_in: Path) -> None:
    """The others would work on for five minutes."""
    ended, log = cluster.sbatch(
        stand_in / "work", ["-N", "4", "../slurm/run_batch.sh"],
        env={"STAND_IN_KILLED": "3", "RUN_ON_STOP": "exit"}, limit=90,
    )  # fmt: skip
    assert ended.returncode >= 128, f"{ended}\n{log}"  # 137, or what srun says of the others that it ended
    assert ended.seconds < 60


@pytest.mark.parametrize("way", ["relative path", "absolute path", "sh", "other folder"])
def test_c78_the_script_finds_its_settings_and_keeps_words_whole(cluster: Cluster, stand_in: Path, way: str) -> None:
    script = stand_in / "slurm" / "run_batch.sh"
    words: dict[str, list[str | Path]] = {
        "relative path": ["../slurm/run_batch.sh"],
        "absolute path": [script],
        "sh": ["--wrap", f"sh '{script}' --input-file 'a/b c.jsonl'"],
        "other folder": ["--chdir", stand_in, "../slurm/run_batch.sh"],
    }
    arguments = [] if way == "sh" else ["--input-file", "a/b c.jsonl"]
    log_here = ["--output", str(stand_in / "work" / "job.log")]
    ended, log = cluster.sbatch(stand_in / "work", ["-N", "2", *log_here, *words[way], *arguments])
    assert ended.returncode == 0, f"{ended}\n{log}"
    assert "stand-in rank 1 of 2: <run> <--input-file> <a/b c.jsonl>" in log
    assert re.search(r"run_batch: srun .*--mpi=pmi2 .*run --input-file 'a/b c\.jsonl'", log)


def test_c78_a_missing_setting_is_named(cluster: Cluster, stand_in: Path, tmp_path: Path) -> None:
    ended, log = cluster.sbatch(stand_in / "work", ["../slurm/run_batch.sh"], env={"RUN_VENV": "/no/venv"})
    assert (ended.returncode, "set RUN_VENV" in log) == (2, True), log
    lone = tmp_path / "lone.sh"
    shutil.copy(SCRIPTS / "run_batch.sh", lone)
    ended, log = cluster.sbatch(tmp_path, [lone])
    assert (ended.returncode, "set RUN_ENV" in log) == (2, True), log


def test_c78_outside_of_slurm_the_script_says_how_to_start_it() -> None:
    ended = launch(["sh", SCRIPTS / "run_batch.sh"], expect=2)
    assert "start it with sbatch" in ended.stderr


def test_a_second_start_changes_nothing_and_status_tells(cluster: Cluster) -> None:
    own = {"LOCAL_CLUSTER_DIR": str(Path(cluster.environment["SLURM_CONF"]).parent)}
    assert "already up" in launch([SCRIPTS / "local_cluster.sh", "start", str(NODES)], env=own, expect=0).stdout
    assert "n4" in launch([SCRIPTS / "local_cluster.sh", "status"], env=own, expect=0).stdout


def test_a_stopped_cluster_is_down_and_leaves_no_daemon(tmp_path_factory: pytest.TempPathFactory) -> None:
    with tempfile.TemporaryDirectory(prefix="bgmpi-slurm-") as folder:
        own = {"LOCAL_CLUSTER_DIR": folder}
        script = SCRIPTS / "local_cluster.sh"
        launch([script, "start", "1"], env=own, limit=60, expect=0)
        launch([script, "stop"], env=own, limit=60, expect=0)
        assert "down" in launch([script, "status"], env=own, expect=1).stderr
        assert not list((Path(folder) / "run").glob("*.pid"))
        running = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
        assert not [words for words in running if folder.encode() in words]
