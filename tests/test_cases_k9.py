"""Public faults of kind K9: memory that grows with what a row asks for (C59, C61); C60 is in
test_end_to_end_answers.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import checkpoints
import jobs
import numpy as np
import pytest
from commands import run_commands
from tokenizers_for_tests import make_tokenizer

from bgmpi.io.results import open_results

#: Writes by how many bytes each job raised the highest resident size of the process.
_RAISED = """
import os, resource
import bgmpi.api
whole = bgmpi.api.run_batch
def highest():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
def run_batch(config, stop):
    before = highest()
    summary = whole(config, stop)
    with open(os.environ["WATCHED"], "a") as file:
        file.write(f"{highest() - before}\\n")
    return summary
bgmpi.api.run_batch = run_batch
"""
VOCAB, CONTEXT = 32_000, 4096
TOKENS = [token % 490 + 3 for token in range(2048)]


def test_c59_prompt_log_probabilities_never_need_tokens_times_vocabulary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2,048 tokens x 32,000 ids are 262 MB in float32, and a softmax of them as much again: not even one such block."""
    model = make_tokenizer(checkpoints.make(
        "llama", tmp_path / "model", vocab_size=VOCAB, max_position_embeddings=CONTEXT, num_hidden_layers=1))
    plain: dict[str, Any] = {"prompt": TOKENS, "max_tokens": 1, "temperature": 0}
    monkeypatch.setenv("WATCHED", str(tmp_path / "raised"))
    commands = []
    for name, body in (("plain", plain), ("scored", plain | {"prompt_logprobs": 20})):
        requests = jobs.write_requests(tmp_path / f"{name}.jsonl", [body])
        commands.append(["run", "--model", model, "-i", requests, "-o", tmp_path / f"{name}.h5", "--dtype", "float32",
                         "--max-num-batched-tokens", "2048"])
    ran = run_commands(1, commands, tmp_path, before=_RAISED)
    assert [one.code for one in ran] == [0, 0], ran
    _, raised = (int(one) for one in (tmp_path / "raised").read_text().splitlines())
    assert raised < 220e6, f"{raised:,} bytes more than without log-probabilities"
    assert jobs.tokens_of(tmp_path / "plain.h5") == jobs.tokens_of(tmp_path / "scored.h5")
    with open_results(tmp_path / "scored.h5") as results:
        scored = next(iter(results.rows())).samples[0].prompt_logprobs
    assert scored is not None and scored.top.shape == (2048, 20)
    assert np.isnan(scored.chosen[0]) and (scored.chosen[1:] <= 0).all()


def test_c61_long_rows_behind_many_short_ones_have_the_memory_that_they_need(tmp_path: Path) -> None:
    """The pool holds the short rows easily and one long row barely; nobody sizes it by what came first."""
    model = make_tokenizer(checkpoints.make("llama", tmp_path / "model"))
    usual = {"temperature": 0, "ignore_eos": True}
    short = [{"prompt": [3 + row % 480] * 10, "max_tokens": 2, **usual} for row in range(500)]
    long = [{"prompt": [3 + (7 * row + at) % 480 for at in range(480)], "max_tokens": 32, **usual} for row in range(5)]
    token = 2 * 2 * 8 * 4 * 2  # bytes of KV: key and value, heads, width, float32, layers
    commands: list[list[str | Path]] = []
    for name, bodies in (("all", short + long), ("long", long)):
        requests = jobs.write_requests(tmp_path / f"{name}.jsonl", bodies)
        tight = ["--host-kv-memory", str(560 * token), "--page-tokens", "16"] if name == "all" else []
        commands.append(["run", "--model", model, "-i", requests, "-o", tmp_path / f"{name}.h5", "--dtype", "float32",
                         "--check", *tight])
    ran = run_commands(1, commands, tmp_path)
    assert [one.code for one in ran] == [0, 0], ran
    found = jobs.tokens_of(tmp_path / "all.h5")
    assert found[500:] == jobs.tokens_of(tmp_path / "long.h5")
    assert [len(tokens) for tokens in found] == [2] * 500 + [32] * 5
