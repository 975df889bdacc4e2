"""Whole jobs under `--deterministic`: ids and log-probabilities are equal to the last bit, in bfloat16.

A sparse and a latent family run on 1 to 4 ranks: in tiny micro-batches and chunks, in atomic passes, with all
primitives by force, with KV in place, streamed, in memory so small that sequences are computed again, and on a disk,
with weights through a ring and with several threads; then a rank is killed and others go on. The reference is one rank
with the default shape. A second job shares prefixes on two levels, and its reference computes each prompt by itself.
Without the flag most of these differ in bits; `test_tokens_unchanged` says what then holds.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import checkpoints
import h5py
import jobs
import launch
import pytest
from kill_at import kill_words
from test_tokens_unchanged import LONGEST, architecture, bodies, shared_bodies
from tokenizers_for_tests import make_tokenizer

from bgmpi.trace import read_deeds

FAMILIES = ("qwen2_moe", "deepseek_v3")
BITS = ("tokens/offsets", "tokens/values", "logprobs/chosen", "logprobs/top_ids", "logprobs/top_values",
        "prompt_logprobs/chosen", "prompt_logprobs/top_values")
Answers = dict[str, bytes]


def answers(path: Path) -> Answers:
    """Return ids and log-probabilities of a results file as bytes."""
    with h5py.File(path, "r") as file:
        assert file.attrs["complete"] == 1
        assert len(file["logprobs/chosen"]) and len(file["prompt_logprobs/chosen"])
        return {name: file[name][:].tobytes() for name in BITS}


def rows() -> list[dict[str, Any]]:
    """Return the crown's rows; all but those with samples want log-probabilities, some those of their prompts."""
    wishes = [
        body | ({} if "n" in body else {"logprobs": 3}) | ({"echo": True, "logprobs": 1} if i % 7 == 0 else {})
        for i, body in enumerate(bodies())
    ]
    return [wish | {"max_tokens": min(wish["max_tokens"], 60)} for wish in wishes]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, dict[str, Answers]]:
    """The models' folder, the request file, and each family's answers on one rank with the default shape."""
    root = tmp_path_factory.mktemp("deterministic")
    requests = jobs.write_requests(root / "requests.jsonl", rows())
    for family in FAMILIES:
        (root / family).mkdir()
        make_tokenizer(checkpoints.make(family, root / family))
    jobs.run_jobs(1, [words(root, requests, family, root / f"{family}.h5") for family in FAMILIES], root)
    return root, requests, {family: answers(root / f"{family}.h5") for family in FAMILIES}


def words(root: Path, requests: Path, family: str, output: Path, *more: str) -> list[str | Path]:
    return ["--model", root / family, "-i", requests, "-o", output, "--dtype", "bfloat16", "--deterministic", "--check",
            *more]


def shapes(folder: Path, ranks: int, spill: Path) -> dict[str, list[str]]:
    """Return the words of each way to run the job."""
    arch = architecture(folder)
    page = arch.cached * 4 * arch.layers * 2
    buffer = -(-LONGEST // 4) * page // arch.layers
    weights = max(checkpoints.least_budget(arch, rank, ranks, 2) for rank in range(ranks))
    pages = ["--page-tokens", "4", "--max-model-len", str(LONGEST)]
    everything = [*pages, "--drill", "yield=2,migrate=3,partition=1"]
    chunks = ["--b-attn", "7", "--b-moe", "3", "--max-num-batched-tokens", "11", "--max-num-seqs", "5"]
    return {
        "everything by force": [*pages, "--drill", "yield=1,migrate=1,partition=1"],
        "tiny batches and chunks": chunks,
        "streamed KV": [*everything, "--device-memory", str(2 * buffer + 40 * page)],
        "computed again": ["--page-tokens", "4", "--host-kv-memory", str(ranks * 36 * page)],
        "disk": [*everything, "--host-kv-memory", str(ranks * 48 * page), "--kv-spill", str(spill), *chunks],
        "weights in a ring": [*pages, "--drill", "yield=2,migrate=2", "--weight-memory", str(weights)],
        "atomic passes, 2 threads": ["--yield-points", "off", "--b-attn", "5", "--threads", "2"],
    }


@pytest.mark.timeout(660)
@pytest.mark.parametrize("ranks", [
    pytest.param(1, marks=pytest.mark.faults),
    pytest.param(2, marks=[pytest.mark.mpi(2), pytest.mark.faults]),
    pytest.param(3, marks=pytest.mark.mpi(3)),
    pytest.param(4, marks=[pytest.mark.mpi(4), pytest.mark.faults]),
])  # fmt: skip
def test_every_bit_is_the_same_whatever_the_job_goes_through(
    work: tuple[Path, Path, dict[str, Answers]], ranks: int, tmp_path: Path
) -> None:
    """Both families are moved by force on all ranks; of the six other shapes, a family meets two on every number."""
    root, requests, expected = work
    cases, commands, deeds = [], [], set()
    for place, family in enumerate(FAMILIES):
        ways = shapes(root / family, ranks, tmp_path)
        for name in [name for i, name in enumerate(ways) if i == 0 or (i + place + ranks) % 3 == 0]:
            output = tmp_path / f"{len(cases)}.h5"
            cases.append((family, name, output))
            commands.append(words(root, requests, family, output, *ways[name], "--trace", f"{output}.trace"))
    jobs.run_jobs(ranks, commands, tmp_path, limit=600)
    for family, name, output in cases:
        got = answers(output)
        wrong = [part for part in BITS if got[part] != expected[family][part]]
        assert not wrong, f"{family} on {ranks} ranks, {name}: other bits in {wrong}"
        deeds |= {deed.what for deed in read_deeds(f"{output}.trace")}
    assert {"yield"} | ({"migrate", "partition"} if ranks > 1 else set()) <= deeds, deeds


@pytest.mark.timeout(660)
@pytest.mark.parametrize("ranks", [1, pytest.param(3, marks=pytest.mark.mpi(3))])
def test_every_bit_is_the_same_on_hit_and_miss(
    work: tuple[Path, Path, dict[str, Answers]], ranks: int, tmp_path: Path
) -> None:
    """Each prompt by itself on one rank; shared on all levels and on one, by force, in tiny chunks and streamed, which
    the families do in turn."""
    root = work[0]
    wishes = [body | {"logprobs": 2} if "n" not in body else body for body in shared_bodies()]
    requests = jobs.write_requests(tmp_path / "shared.jsonl", wishes)
    alone, cases = [], []
    for place, family in enumerate(FAMILIES):
        ways = shapes(root / family, ranks, tmp_path)
        alone.append(words(root, requests, family, tmp_path / f"{family}.h5", "--prefix-sharing", "off"))
        ways["on one level"] = ["--prefix-sharing", "one-level", *ways["tiny batches and chunks"]]
        turn = ("streamed KV", "tiny batches and chunks")[(place + ranks) % 2]
        chosen = ("everything by force", turn, "on one level")
        cases += [(family, name, ways[name]) for name in chosen]
    jobs.run_jobs(1, alone, tmp_path)
    commands = [words(root, requests, family, tmp_path / f"{i}.h5", *way) for i, (family, _, way) in enumerate(cases)]
    ended = jobs.run_jobs(ranks, commands, tmp_path, limit=600)
    assert ended.stderr.count("sharing prefixes leaves") == len(cases)
    for number, (family, name, _) in enumerate(cases):
        got, expected = answers(tmp_path / f"{number}.h5"), answers(tmp_path / f"{family}.h5")
        wrong = [part for part in BITS if got[part] != expected[part]]
        assert not wrong, f"{family} on {ranks} ranks, {name}: other bits in {wrong}"


@pytest.mark.faults
@launch.on_ranks(2)
def test_a_killed_job_goes_on_to_the_same_bits_on_another_number_of_ranks(
    work: tuple[Path, Path, dict[str, Answers]], ranks: int, tmp_path: Path
) -> None:
    root, requests, expected = work
    for family, more in zip(FAMILIES, (1, 3), strict=True):
        output = tmp_path / f"{family}.h5"
        often = ["--checkpoint-interval", "0", "--page-tokens", "4", "--max-num-seqs", "4", "--progress", "off"]
        command = ["run", *words(root, requests, family, output, *often)]
        dying = launch.mpiexec(ranks, [*kill_words(1, "bgmpi.executor:Executor.step", "after", 14), *command])
        assert dying.returncode, dying
        ended = launch.mpiexec(more, [launch.script("bgmpi"), *command], expect=3)
        assert int(re.findall(r"(\d+) are begun", ended.stderr)[0]) > 0, ended
        got = answers(output)
        assert [part for part in BITS if got[part] != expected[family][part]] == [], f"{family}: {ended}"
