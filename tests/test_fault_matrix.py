"""The kill matrix: whoever is killed, whenever, on any launcher and number of ranks, nothing is lost and none doubled.

`make test` makes a few kills; `make test-faults` all of them, prints the table and writes it to
.build/fault-matrix.json.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import zip_longest
from pathlib import Path
from typing import Any

import checkpoints
import h5py
import jobs
import pytest
from fault_lives import ROUND_STEPS, SLOTS, Job, Outcome, as_json, live, start_here, table, text, words_of
from fault_matrix import PHASES, VICTIMS, Instant, Kill, kills, random_kills
from kill_at import find
from launch import launch, script
from tokenizers_for_tests import make_tokenizer

LEAST_KILLS = 200


def bodies() -> list[dict[str, Any]]:
    """Rows that end at different times, greedy and sampled, some with samples, log-probabilities, stop texts."""
    extras: list[dict[str, Any]] = [
        {"temperature": 0}, {"temperature": 0.9, "seed": 3}, {"temperature": 1.1, "n": 2},
        {"temperature": 0.7, "logprobs": 2}, {"temperature": 1.0, "stop": ["zq"]},
    ]
    return [
        {"prompt": prompt, "max_tokens": 3 + 9 * (i % 5), "ignore_eos": True, **extras[i % len(extras)]}
        for i, prompt in enumerate(jobs.prompts(24, longest=40, seed=5))
    ]


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
