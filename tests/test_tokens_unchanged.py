"""The crown test: the same job gives the same tokens, whatever moves (design law 7).

One job mixes greedy and sampled rows, samples, penalties, biases, stop texts and long prompts.  It is run on 1 to 4
ranks, with micro-batches from one token up, with expert batches smaller and larger than what gathers, with atomic
passes, with prompts cut into tiny chunks, with so few slots that refills never stop, and with so little KV memory that
sequences are made to yield and computed again.  Then every family is moved: sequences are yielded and combined,
migrated, and run over groups of ranks, by drill and all at once, with KV in place, on a small device, in host memory,
on disk, and with weights that pass through a ring.  The reference is one rank with the default shape.

A second job is made of prompts that share: documents, sections in them, questions about those, equal prompts, and
samples of one.  Its reference shares nothing.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from pathlib import Path
from typing import Any

import checkpoints
import h5py
import jobs
import launch
import numpy as np
import pytest
from tokenizers_for_tests import make_tokenizer

from bgmpi.architecture import Architecture
from bgmpi.families import read_architecture
from bgmpi.io.model_files import open_model_files
from bgmpi.trace import read_deeds

FAMILIES = ("mixtral", "deepseek_v3", "llama")
#: The longest sequence of the job, so that device budgets need not make room for the model's whole context.
LONGEST = 144

SHAPES: dict[str, list[str]] = {
    "default": [],
    "b_attn=1": ["--b-attn", "1"],
    "b_attn=7 b_moe=3": ["--b-attn", "7", "--b-moe", "3"],
    "b_attn=16 b_moe=40": ["--b-attn", "16", "--b-moe", "40"],
    "atomic b_attn=5": ["--yield-points", "off", "--b-attn", "5"],
    "chunks of 9": ["--max-num-batched-tokens", "9", "--max-num-seqs", "4"],
    "2 slots, pages of 4": ["--max-num-seqs", "2", "--page-tokens", "4"],
}


def bodies() -> list[dict[str, Any]]:
    """Return rows that ask for everything that could depend on its neighbours."""
    extras: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.8, "seed": 42},
        {"temperature": 1.2, "top_p": 0.9, "top_k": 40},
        {"temperature": 0, "repetition_penalty": 1.3, "presence_penalty": 0.5},
        {"temperature": 0.7, "min_p": 0.05, "n": 3},
        {"temperature": 0, "logit_bias": {"17": 4.0, "18": -100}},
        {"temperature": 1.0, "frequency_penalty": 0.4, "stop": ["ab", "e "]},
        {"temperature": 0, "min_tokens": 12, "stop_token_ids": [5, 9, 200]},
    ]
    rows = [
        {"prompt": prompt, "max_tokens": 4 + 7 * (i % 6), "ignore_eos": i % 3 == 0, **extras[i % len(extras)]}
        for i, prompt in enumerate(jobs.prompts(24, longest=60, seed=11))
    ]
    # Two stragglers, one of them the last alone.
    straggler = {"prompt": [7, 11, 13], "ignore_eos": True, "temperature": 0.9, "logprobs": 2}
    return [*rows, {**straggler, "max_tokens": 90, "seed": 5}, {**straggler, "max_tokens": 120, "seed": 6}]


def shared_bodies() -> list[dict[str, Any]]:
    """Return rows whose prompts share prefixes on two levels, none of which ends where a page ends, in mixed order."""
    random = np.random.default_rng(23)

    def words(count: int) -> list[int]:
        return [int(word) for word in random.integers(3, 500, count)]

    rows = []
    for document in range(3):
        begin = words(37 + document)
        for _ in range(2):
            section = [*begin, *words(13)]
            rows += [{"prompt": [*section, *words(1 + 3 * i)], "temperature": 0.0} for i in range(3)]
            rows.append({"prompt": section, "n": 3, "temperature": 0.9})
        rows += [{"prompt": begin, "temperature": 0.0}, {"prompt": begin, "temperature": 1.1, "logprobs": 2}]
    rows.append({"prompt": [*begin, *words(5)], "prompt_logprobs": 1, "temperature": 0.0})
    rows.append({"prompt": words(30), "n": 5, "temperature": 0.7, "stop": ["ab", "e "]})
    for number, row in enumerate(rows):
        row |= {"seed": number, "max_tokens": 3 + 5 * (number % 5), "ignore_eos": number % 2 == 0}
    return [rows[int(place)] for place in random.permutation(len(rows))]


def architecture(folder: Path) -> Architecture:
    """Return what the model in `folder` is."""
    return read_architecture(open_model_files(folder).config)


def page_bytes(folder: Path, page_tokens: int) -> int:
    """Return the bytes of one float32 page over all layers."""
    arch = architecture(folder)
    return arch.cached * page_tokens * arch.layers * 4


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, dict[str, list[list[int]]]]:
    """The models' folder, the request file, and each family's tokens on one rank with the default shape."""
    root = tmp_path_factory.mktemp("crown")
    requests = jobs.write_requests(root / "requests.jsonl", bodies())
    for family in checkpoints.FAMILIES:
        (root / family).mkdir()
        checkpoints.make(family, root / family)
        make_tokenizer(root / family)
    words = [_words(root, requests, family, root / f"{family}.h5", []) for family in checkpoints.FAMILIES]
    jobs.run_jobs(1, words, root)
    return root, requests, {family: jobs.tokens_of(root / f"{family}.h5") for family in checkpoints.FAMILIES}


def _words(root: Path, requests: Path, family: str, output: Path, shape: list[str]) -> list[str | Path]:
    return ["--model", root / family, "-i", requests, "-o", output, "--dtype", "float32", "--check", *shape]


def test_the_job_is_worth_its_name(work: tuple[Path, Path, dict[str, list[list[int]]]]) -> None:
    """Rows end at different lengths and sampled rows differ from greedy ones, else the crown would prove nothing."""
    for tokens in work[2].values():
        assert len(tokens) == 26 + 2 * 3
        assert len({len(ids) for ids in tokens}) >= 5
        assert len({tuple(ids) for ids in tokens}) >= 25


@launch.on_ranks(1, 2, 3, 4)
def test_tokens_do_not_depend_on_ranks_micro_batches_chunks_or_slots(
    work: tuple[Path, Path, dict[str, list[list[int]]]], ranks: int, tmp_path: Path
) -> None:
    """On three and four ranks, which two cores must share, every second case each."""
    root, requests, expected = work
    cases = [(family, name) for family in FAMILIES for name in SHAPES]
    if ranks > 2:
        cases = cases[ranks % 2 :: 2]
    words = [
        _words(root, requests, family, tmp_path / f"{i}.h5", SHAPES[name]) for i, (family, name) in enumerate(cases)
    ]
    jobs.run_jobs(ranks, words, tmp_path)
    for i, (family, name) in enumerate(cases):
        assert jobs.tokens_of(tmp_path / f"{i}.h5") == expected[family], f"{family} on {ranks} ranks, {name}"


@launch.on_ranks(1, 3)
def test_tokens_do_not_depend_on_forced_yields(
    work: tuple[Path, Path, dict[str, list[list[int]]]], ranks: int, tmp_path: Path
) -> None:
    root, requests, expected = work
    words = []
    for family in FAMILIES:
        pool = ["--page-tokens", "4", "--host-kv-memory", str(ranks * 36 * page_bytes(root / family, 4))]
        words.append(_words(root, requests, family, tmp_path / f"{family}.h5", pool))
    ended = jobs.run_jobs(ranks, words, tmp_path)
    for family in FAMILIES:
        assert jobs.tokens_of(tmp_path / f"{family}.h5") == expected[family], f"{family} on {ranks} ranks"
    preempted = [int(count) for count in re.findall(r"(\d+) preempted", ended.stderr)]
    assert max(preempted) > 0, f"the pool was not small enough to make anybody yield: {ended}"


def small_tiers(family: str, folder: Path, ranks: int, spill: Path) -> dict[str, list[str]]:
    """Return the words of each way to keep KV where it does not fit, with what is to be forced there."""
    page = page_bytes(folder, 4)
    buffer = -(-LONGEST // 4) * page // architecture(folder).layers
    everything = "yield=2,migrate=3,partition=1"
    pages = ["--page-tokens", "4", "--max-model-len", str(LONGEST)]
    home = ["--host-kv-memory", str(ranks * 48 * page)]
    weights = max(checkpoints.least_budget(architecture(folder), rank, ranks) for rank in range(ranks))
    return {
        "in place": [*pages, "--drill", "yield=1,migrate=1,partition=1"],
        "partition alone": [*pages, "--drill", "partition=1", "--b-attn", "8"],
        "small device": [*pages, "--drill", everything, "--device-memory", str(2 * buffer + 40 * page)],
        "small device, others wait": [
            *pages, "--drill", everything, "--device-memory", str(2 * buffer + 44 * page), "--stream-kv", "off",
            "--hold-policy", "longest-decoded",
        ],
        "disk": [*pages, "--drill", everything, *home, "--kv-spill", str(spill)],
        "device and disk": [
            *pages, "--drill", everything, *home, "--kv-spill", str(spill), "--device-memory",
            str(3 * buffer + 20 * page),
        ],
        "weights in a ring": [
            *pages, "--drill", "yield=2,migrate=2", "--weight-memory", str(weights),
        ],
    }


@pytest.fixture(scope="module")
def shared(
    work: tuple[Path, Path, dict[str, list[list[int]]]],
) -> tuple[Path, Path, dict[str, list[list[int]]]]:
    """The models' folder, the requests that share, and each family's tokens when nothing is shared."""
    root = work[0]
    requests = jobs.write_requests(root / "shared.jsonl", shared_bodies())
    words = [
        _words(root, requests, family, root / f"{family}-alone.h5", ["--prefix-sharing", "off", "--page-tokens", "4"])
        for family in checkpoints.FAMILIES
    ]
    ended = jobs.run_jobs(1, words, root)
    assert "sharing prefixes" not in ended.stderr
    return root, requests, {family: jobs.tokens_of(root / f"{family}-alone.h5") for family in checkpoints.FAMILIES}


@pytest.mark.timeout(660)
@launch.on_ranks(1, 2, 3, 4)
def test_tokens_do_not_depend_on_shared_prefixes(
    shared: tuple[Path, Path, dict[str, list[list[int]]]], ranks: int, tmp_path: Path
) -> None:
    """Shared on all levels or on one, in place, with small chunks, and in every tier with all primitives by force.  One
    rank has all families, each in one further way; more ranks have some, in more ways."""
    root, requests, expected = shared
    cases, words = [], []
    for place, family in enumerate(checkpoints.FAMILIES):
        if ranks > 1 and (place + ranks) % 3:
            continue
        tiers = small_tiers(family, root / family, ranks, tmp_path)
        ways = {
            "on all levels": ["--page-tokens", "4"],
            "on one level": ["--page-tokens", "4", "--prefix-sharing", "one-level"],
            "chunks of 9": ["--page-tokens", "4", "--max-num-batched-tokens", "9", "--max-num-seqs", "4"],
            "large pages": [],
            **tiers,
        }
        others = [name for name in ways if name != "on all levels"]
        turn = 3 * place + 5 * ranks
        further = [others[(turn + more) % len(others)] for more in range(1 if ranks == 1 else 2)]
        for name in ["on all levels", *further]:
            output = tmp_path / f"{len(cases)}.h5"
            cases.append((family, name, output))
            words.append(_words(root, requests, family, output, ways[name]))
    ended = jobs.run_jobs(ranks, words, tmp_path, limit=600)
    assert ended.stderr.count("sharing prefixes leaves") == len(cases)
    for family, name, output in cases:
        assert jobs.tokens_of(output) == expected[family], f"{family} on {ranks} ranks, shared {name}"


@pytest.mark.timeout(660)
@launch.on_ranks(1, 2, 3, 4)
def test_tokens_do_not_depend_on_where_sequences_and_their_kv_go(
    work: tuple[Path, Path, dict[str, list[list[int]]]], ranks: int, tmp_path: Path
) -> None:
    """All primitives by force x tiers of KV x all families, half of them on three ranks and half on four, which two
    cores must share.  The tiers of a family alternate with the ranks."""
    root, requests, expected = work
    cases, words = [], []
    for place, family in enumerate(checkpoints.FAMILIES):
        if ranks > 2 and (place + ranks) % 2:
            continue
        tiers = small_tiers(family, root / family, ranks, tmp_path)
        turn = ranks + (place if ranks <= 2 else place // 2)
        chosen = ["in place", *[name for i, name in enumerate(tiers) if i and (i + turn) % 6 == 0]]
        for name in chosen:
            output = tmp_path / f"{len(cases)}.h5"
            cases.append((family, name, output))
            words.append(_words(root, requests, family, output, [*tiers[name], "--trace", f"{output}.trace"]))
    jobs.run_jobs(ranks, words, tmp_path, limit=600)
    done: Counter[str] = Counter()
    for family, name, output in cases:
        assert jobs.tokens_of(output) == expected[family], f"{family} on {ranks} ranks, {name}"
        deeds = Counter(deed.what for deed in read_deeds(f"{output}.trace"))
        if name != "partition alone":
            assert deeds["yield"], f"{family} on {ranks} ranks, {name}: nobody was made to yield"
        if name == "in place" and ranks > 1:
            assert deeds["migrate"] and deeds["partition"], f"{family} on {ranks} ranks: {deeds}"
        done += deeds
    assert {"combine", "spill"} <= done.keys()


def test_the_order_of_the_input_changes_no_row(
    work: tuple[Path, Path, dict[str, list[list[int]]]], tmp_path: Path
) -> None:
    """Rows without a seed of their own are keyed by their number, so only seeded and greedy rows are compared."""
    root = work[0]
    rows = [body | {"seed": 100 + i} for i, body in enumerate(bodies())]
    ahead = jobs.write_requests(tmp_path / "ahead.jsonl", rows)
    behind = jobs.write_requests(tmp_path / "behind.jsonl", rows[::-1])
    outputs = [tmp_path / "ahead.h5", tmp_path / "behind.h5"]
    words = [_words(root, f, "mixtral", o, []) for f, o in zip((ahead, behind), outputs, strict=True)]
    jobs.run_jobs(1, words, tmp_path)
    by_row = []
    for output in outputs:
        with h5py.File(output, "r") as file:
            first = file["rows/first_sample"][:]
        tokens = jobs.tokens_of(output)
        by_row.append([tokens[a:b] for a, b in itertools.pairwise(first)])
    assert by_row[0] == by_row[1][::-1]
