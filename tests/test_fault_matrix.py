"""The kill matrix: whoever is killed, whenever, on any launcher and number of ranks, nothing is lost and none doubled.

`make test` makes a few kills; `make test-faults` all of them, prints the table and writes it to .build/fault-matrix/.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

import checkpoints
import h5py
import jobs
import pytest
from fault_lives import Job, Outcome, as_json, live, table, text, words_of
from fault_matrix import PHASES, VICTIMS, Instant, Kill, kills, random_kills, signals
from fault_slurm import SlurmStart
from kill_at import find
from launch import launch, script
from tokenizers_for_tests import make_tokenizer
from virtual_nodes import virtual_nodes

LEAST_KILLS = 200


def bodies() -> list[dict[str, Any]]:
    """Rows that end at different times, greedy and sampled, some with samples, log-probabilities, stop texts."""
    extras: list[dict[str, Any]] = [
        {"temperature": 0}, {"temperature": 0.9, "seed": 3}, {"temperature": 1.1, "n": 2},
        {"temperature": 0.7, "logprobs": 2}, {"temperature": 1.0, "stop": ["zq"]},
    ]
    rows = [
        {"prompt": prompt, "max_tokens": 3 + 9 * (i % 5), "ignore_eos": True, **extras[i % len(extras)]}
        for i, prompt in enumerate(jobs.prompts(24, longest=40, seed=5))
    ]
    for group in range(4):
        shared = [10 * group + word for word in range(3, 25)]
        rows += [
            {"prompt": [*shared, 100 + own], "max_tokens": 4 + 5 * own, "temperature": 0.5 * own, "ignore_eos": True}
            for own in range(3)
        ]
    # A straggler, so that ranks are grouped around it and part again before it ends.
    return [*rows, {"prompt": [7, 5, 3], "max_tokens": 90, "temperature": 0.8, "ignore_eos": True, "logprobs": 1}]


def make_job(root: Path) -> Job:
    """Make the model and the requests, and let them run unbroken."""
    model = make_tokenizer(checkpoints.make("mixtral", root / "model"))
    asked = [*bodies(), {"prompt": "x", "max_tokens": -1}]
    requests = jobs.write_requests(root / "requests.jsonl", asked)
    launch([script("bgmpi"), *words_of(Job(model, requests, [], [], None), root / "whole.h5", 0, "")], expect=3)
    first = [0]
    for body in asked:
        first.append(first[-1] + body.get("n", 1))
    with h5py.File(root / "whole.h5") as file:
        chosen = file["logprobs/chosen"][:]
    return Job(model, requests, first, jobs.tokens_of(root / "whole.h5"), chosen)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return make_job(tmp_path_factory.mktemp("matrix"))


@dataclass(slots=True)
class Seen:
    """All that the tests of this file saw, by piece of the matrix; told at the end of the session."""

    folder: Path
    outcomes: dict[str, list[Outcome]] = field(default_factory=dict)

    def note(self, piece: str, some: list[Outcome]) -> None:
        """Keep what a piece came to, in a file too."""
        self.outcomes[piece] = some
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / f"{piece.replace(', ', '-').replace(' ', '-')}.json").write_bytes(as_json(some))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the table."""
        everyone = [one for some in self.outcomes.values() for one in some]
        terminalreporter.write_line(f"\n{text(table(everyone))}\n" if everyone else "")


@pytest.fixture(scope="module")
def seen(request: pytest.FixtureRequest) -> Seen:
    seen = Seen(request.config.rootpath / ".build" / "fault-matrix")
    request.config.pluginmanager.register(seen, "fault-matrix")
    return seen


def require(outcomes: Sequence[Outcome]) -> None:
    """Fail with all that broke a law, and where a kill at a named site never happened."""
    told = [fault for one in outcomes for fault in one.faults]
    missed = [one.kill for one in outcomes if not one.struck and one.kill.instant.when != "ms"]
    told += [f"no start ever came to {kill}" for kill in missed]
    assert not told, "\n".join(told)


def mixed(*lists: Sequence[Kill]) -> list[Kill]:
    """Take from each list in turn, so that a job goes on with another number of ranks each time."""
    return [kill for kills in zip_longest(*lists) for kill in kills if kill is not None]


def everything() -> Mapping[str, list[Kill]]:
    """Return the whole matrix, in the pieces that one test each makes."""
    return {
        "one rank": kills("alone", 1, rounds=6),
        "mpiexec, two ranks and one": mixed(kills("mpiexec", 2), kills("mpiexec", 1)[2::3]),
        "mpiexec, four ranks and two": mixed(kills("mpiexec", 4), kills("mpiexec", 2, turn=2)[::3]),
        "any time, one rank": random_kills("alone", 1, 24, seed=1),
        "any time, several": mixed(random_kills("mpiexec", 2, 12, seed=2), random_kills("mpiexec", 4, 6, seed=3)),
        "signals, one rank": [*signals("alone", 1), *random_kills("alone", 1, 6, seed=6, asks=True)],
        "signals, several": [*signals("mpiexec", 2), *random_kills("mpiexec", 4, 6, seed=7, asks=True)],
        "slurm, several nodes": mixed(kills("slurm", 2, nodes=2, turn=5), random_kills("slurm", 4, 4, seed=4, nodes=2)),
        "slurm, one node": mixed(kills("slurm", 2, turn=1)[1::2], random_kills("slurm", 1, 2, seed=5)),
    }


def instants() -> list[Instant]:
    return [instant for phase in PHASES for instant in phase.instants]


def test_every_site_of_the_matrix_is_there() -> None:
    for instant in instants():
        owner, name, _ = find(instant.site)
        assert callable(getattr(owner, name)), instant


def test_the_matrix_has_every_instant_and_victim_and_enough_kills() -> None:
    pieces = everything()
    made = [kill for piece in pieces.values() for kill in piece if not kill.asks]
    assert len(made) >= LEAST_KILLS
    assert set(instants()) <= {kill.instant for kill in made}
    for phase in PHASES:
        victims = {(kill.launcher, kill.victim) for kill in made if kill.phase == phase.name}
        assert {("mpiexec", name) for name in ("0", "1", "3", *VICTIMS["mpiexec"])} <= victims, phase
        assert {("slurm", name) for name in ("1", *VICTIMS["slurm"])} <= victims, phase


def test_a_few_kills_lose_and_double_nothing(job: Job, tmp_path: Path) -> None:
    """Some of those on one rank, in one job: `make test-faults` makes all of them."""
    wanted = ("decode", "segment not in journal", "journal line", "publication")
    require(live(job, [kill for kill in kills("alone", 1, turn=5) if kill.phase in wanted], tmp_path))


@pytest.mark.faults
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("piece", [name for name in everything() if "slurm" not in name])
def test_no_kill_loses_or_doubles_a_row(piece: str, job: Job, seen: Seen, tmp_path: Path) -> None:
    wanted = everything()[piece]
    streams = 1 if any(kill.ranks > 1 for kill in wanted) else 2  # of one rank each, side by side
    with ThreadPoolExecutor(streams) as side_by_side:
        parts = [side_by_side.submit(live, job, wanted[at::streams], tmp_path / str(at)) for at in range(streams)]
        outcomes = [one for part in parts for one in part.result()]
    seen.note(piece, outcomes)
    require(outcomes)


@pytest.mark.faults
@pytest.mark.slurm
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("piece", [name for name in everything() if "slurm" in name])
def test_no_kill_under_slurm_loses_or_doubles_a_row(piece: str, job: Job, seen: Seen, tmp_path: Path) -> None:
    with virtual_nodes(4) as nodes:
        outcomes = live(job, everything()[piece], tmp_path, SlurmStart(nodes.environment, tmp_path / "stand-in"))
    seen.note(piece, outcomes)
    require(outcomes)
