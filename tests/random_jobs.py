"""Draws jobs with small random memories, tiers, drills and shapes, runs them, and compares every token.

What no hand-written case thought of: a seed gives a model, options and a number of ranks, all small enough that pages
run short, tiers fill, and primitives meet each other.  All jobs of a draw pass through the program's own command line,
with all laws checked in every step, and must give the tokens of one rank with the default shape.  A job that hangs
fails with the stacks of its ranks (launch).

As a program it goes on for a while: python random_jobs.py SECONDS [SEED].
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import checkpoints
import jobs
from commands import run_commands
from tokenizers_for_tests import make_tokenizer

from bgmpi.architecture import Architecture
from bgmpi.families import read_architecture
from bgmpi.io.model_files import open_model_files
from bgmpi.weight_plan import weight_bytes

FAMILIES = ("llama", "mixtral", "deepseek_v3")
#: Tokens of the longest sequence.
LONGEST = 60


@dataclass(frozen=True, slots=True)
class Work:
    """Models, requests, and the tokens that each model must give."""

    root: Path
    requests: Path
    expected: dict[str, list[list[int]]]


def bodies() -> list[dict[str, Any]]:
    """Return rows that ask for all that travels with a sequence, two long answers, and one long prompt."""
    extras: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.8, "seed": 42, "logprobs": 1},
        {"temperature": 0.7, "min_p": 0.05, "n": 2},
        {"temperature": 1.0, "frequency_penalty": 0.4, "stop": ["ab", "e "]},
    ]
    rows = [
        {"prompt": prompt, "max_tokens": 2 + 4 * (i % 4), "ignore_eos": i % 3 == 0, **extras[i % len(extras)]}
        for i, prompt in enumerate(jobs.prompts(6, longest=30, seed=3))
    ]
    last = {"ignore_eos": True, "temperature": 0.9, "logprobs": 2}
    scored = {"prompt": list(range(7, 109, 3)), "echo": True, "logprobs": 1, "temperature": 0}
    return [
        *rows,
        {**last, "prompt": [7, 11, 13], "max_tokens": 24, "seed": 5},
        {**last, "prompt": [9, 11], "max_tokens": 36, "seed": 6},
        {**scored, "max_tokens": LONGEST - len(scored["prompt"]), "ignore_eos": True},
    ]


def make_work(root: Path, families: tuple[str, ...] = FAMILIES) -> Work:
    """Write models and requests, and let one rank answer them."""
    requests = jobs.write_requests(root / "requests.jsonl", bodies())
    commands = []
    for family in families:
        (root / family).mkdir()
        make_tokenizer(checkpoints.make(family, root / family))
        commands.append(_words(root, requests, family, root / f"{family}.h5", []))
    for ran in run_commands(1, commands, root):
        assert ran.code == 0, ran.stderr
    return Work(root, requests, {family: jobs.tokens_of(root / f"{family}.h5") for family in families})


def draw(seed: int, ranks: int, folder: Path, arch: Architecture) -> list[str]:
    """Return the options of one job."""
    dice = random.Random(seed)
    pick, often = dice.choice, lambda share: dice.random() < share
    page_tokens = pick([1, 2, 4, 8, 16, 64])
    page = arch.cached * page_tokens * arch.layers * 4
    full = -(-LONGEST // page_tokens)
    words = ["--page-tokens", str(page_tokens), "--max-model-len", str(LONGEST)]
    slots = pick([1, 2, 3, 5, 9])
    words += ["--max-num-seqs", str(slots), "--hold-policy", pick(["shortest-decoded", "longest-decoded"])]
    if often(0.5):
        words += ["--max-num-batched-tokens", str(pick([slots, slots + 1, 16, 40]))]
    if often(0.5):
        words += ["--b-attn", str(pick([1, 3, 8, 20]))]
    if often(0.75):
        words += ["--host-kv-memory", str(ranks * pick([full, full + 1, full + 3, 2 * full, 3 * full]) * page)]
    device, spill, ring = often(0.5), often(0.4), often(0.2)
    if device:
        stream = pick(["auto", "on"] if spill else ["auto", "on", "off"])
        buffer = (3 if spill else 2) * full * page // arch.layers
        pool = full * page if stream == "off" else pick([0, page, full * page // 2])
        words += ["--device-memory", str(buffer + pool + pick([0, page, full * page])), "--stream-kv", stream]
    if spill:
        words += ["--kv-spill", str(folder), "--kv-spill-bytes", str(_cells(arch, page) * pick([2, full, 5 * full]))]
    if ring and (least := _least_weights(arch, ranks)) is not None:
        words += ["--weight-memory", str(least + pick([0, 40_000, 200_000]))]
    else:
        ring = False
    if not ring and often(0.4):
        words += ["--b-moe", str(pick([1, 5, 16]))]
    elif not (ring or device or spill) and often(0.3):
        words += ["--yield-points", "off"]
    drills = [f"{what}={pick([1, 2, 3])}" for what in ("yield", "migrate", "partition") if often(0.6)]
    if drills:
        words += ["--drill", ",".join(drills)]
    for what in ("--migrate", "--partition"):
        if often(0.15):
            words += [what, "off"]
    return words


def run_draws(work: Work, seeds: list[int], ranks: int, folder: Path, *, limit: float = 60) -> None:
    """Run one job a seed in one launch; raise AssertionError with its words when one does not give its tokens."""
    families = sorted(work.expected)
    cases = []
    for seed in seeds:
        family = random.Random(seed + 1).choice(families)
        arch = read_architecture(open_model_files(work.root / family).config)
        cases.append((seed, family, folder / f"{seed}-{ranks}.h5", draw(seed, ranks, folder, arch)))
    commands = [_words(work.root, work.requests, family, output, words) for _, family, output, words in cases]
    listing = "\n".join(f"seed {seed}: {family} on {ranks} ranks {' '.join(words)}" for seed, family, _, words in cases)
    try:
        ended = run_commands(ranks, commands, folder, limit=limit)
    except AssertionError as error:
        done = [seed for seed, _, output, _ in cases if output.exists()]
        raise AssertionError(f"done: {done}; of\n{listing}\n{error}") from error
    for ran, (seed, family, output, words) in zip(ended, cases, strict=True):
        told = f"seed {seed}: {family} on {ranks} ranks {' '.join(words)}\n{ran.stderr}"
        assert ran.code == 0, told
        assert jobs.tokens_of(output) == work.expected[family], told
        output.unlink()


def _words(root: Path, requests: Path, family: str, output: Path, more: list[str]) -> list[str | Path]:
    return ["run", "--model", root / family, "-i", requests, "-o", output, "--dtype", "float32", "--check", *more]


def _cells(arch: Architecture, page: int) -> int:
    """Return the bytes of one page of all layers on a disk."""
    return -(-page // arch.layers // 4096) * 4096 * arch.layers


def _least_weights(arch: Architecture, ranks: int) -> int | None:
    """Return the least bytes of weights with which every rank can run and some must read them anew."""
    least = max(checkpoints.least_budget(arch, rank, ranks) for rank in range(ranks))
    return least if least < min(weight_bytes(arch, rank, ranks, 4) for rank in range(ranks)) else None


def main(seconds: float, seed: int) -> None:
    """Go on for that long, ten jobs a launch, and tell every failure."""
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="random-jobs-") as folder:
        work = make_work(Path(folder))
        while time.monotonic() - begun < seconds:
            ranks = 1 + seed % 3
            try:
                run_draws(work, list(range(10 * seed, 10 * seed + 10)), ranks, Path(folder), limit=240)
                print(f"{seed}: fine, {time.monotonic() - begun:.0f} s", flush=True)
            except AssertionError as error:
                print(f"{seed}: FAILED\n{error}\n=====", flush=True)
            seed += 1


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)
