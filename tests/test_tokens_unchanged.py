"""The crown test: the same job gives the same tokens, whatever moves (design law 7).

One job mixes greedy and sampled rows, samples, penalties, biases, stop texts and long prompts.  It is run on 1 to 4
ranks, with micro-batches from one token up, with expert batches smaller and larger than what gathers, with atomic
passes, with prompts cut into tiny chunks, with so few slots that refills never stop, and with so little KV memory that
sequences are made to yield and computed again.  The reference is one rank with the default shape.
"""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import checkpoints
import h5py
import jobs
import launch
import pytest
from tokenizers_for_tests import make_tokenizer

FAMILIES = ("mixtral", "deepseek_v3", "llama")

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
    return [
        {"prompt": prompt, "max_tokens": 4 + 7 * (i % 6), "ignore_eos": i % 3 == 0, **extras[i % len(extras)]}
        for i, prompt in enumerate(jobs.prompts(24, longest=60, seed=11))
    ]


def page_bytes(family: str, folder: Path, page_tokens: int) -> int:
    """Return the bytes of one float32 page over all layers."""
    from bgmpi.families import read_architecture
    from bgmpi.io.model_files import open_model_files

    arch = read_architecture(open_model_files(folder).config)
    return arch.cached * page_tokens * arch.layers * 4


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, dict[str, list[list[int]]]]:
    """The models' folder, the request file, and each family's tokens on one rank with the default shape."""
    root = tmp_path_factory.mktemp("crown")
    requests = jobs.write_requests(root / "requests.jsonl", bodies())
    for family in FAMILIES:
        (root / family).mkdir()
        checkpoints.make(family, root / family)
        make_tokenizer(root / family)
    words = [_words(root, requests, family, root / f"{family}.h5", []) for family in FAMILIES]
    jobs.run_jobs(1, words, root)
    return root, requests, {family: jobs.tokens_of(root / f"{family}.h5") for family in FAMILIES}


def _words(root: Path, requests: Path, family: str, output: Path, shape: list[str]) -> list[str | Path]:
    return ["--model", root / family, "-i", requests, "-o", output, "--dtype", "float32", "--check", *shape]


def test_the_job_is_worth_its_name(work: tuple[Path, Path, dict[str, list[list[int]]]]) -> None:
    """Rows end at different lengths and sampled rows differ from greedy ones, else the crown would prove nothing."""
    for family in FAMILIES:
        tokens = work[2][family]
        assert len(tokens) == 24 + 2 * 3
        assert len({len(ids) for ids in tokens}) >= 5
        assert len({tuple(ids) for ids in tokens}) >= 25


@launch.on_ranks(1, 2, 3, 4)
def test_tokens_do_not_depend_on_ranks_micro_batches_chunks_or_slots(
    work: tuple[Path, Path, dict[str, list[list[int]]]], ranks: int, tmp_path: Path
) -> None:
    root, requests, expected = work
    cases = [(family, name) for family in FAMILIES for name in SHAPES]
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
        pool = ["--page-tokens", "4", "--host-kv-memory", str(ranks * 28 * page_bytes(family, root / family, 4))]
        words.append(_words(root, requests, family, tmp_path / f"{family}.h5", pool))
    ended = jobs.run_jobs(ranks, words, tmp_path)
    for family in FAMILIES:
        assert jobs.tokens_of(tmp_path / f"{family}.h5") == expected[family], f"{family} on {ranks} ranks"
    preempted = [int(count) for count in re.findall(r"(\d+) preempted", ended.stderr)]
    assert max(preempted) > 0, f"the pool was not small enough to make anybody yield: {ended}"


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
