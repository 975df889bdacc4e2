"""Memory does not grow with the input: many rows (C05) and one huge row (C06), measured in the running program."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import checkpoints
import jobs
import numpy as np
import pytest
from commands import line, run_commands
from tokenizers_for_tests import make_tokenizer

from bgmpi.io.results import open_results

ROWS = 20_000
HUGE = 100_000_000
LIMIT = 64 << 20  # the default of --max-line-bytes

#: writes resident bytes and ended sequences at every round to the file named by the environment
_WATCH = """
import json, os, resource
from bgmpi.head import Head
whole = Head.decide
def decide(self, reports):
    said = whole(self, reports)
    resident = int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()
    with open(os.environ["WATCHED"], "a") as file:
        file.write(json.dumps([self._scheduler.ended, resident]) + "\\n")
    return said
Head.decide = decide
"""
#: writes the highest resident bytes so far after every job
_HIGHEST = """
import os, resource
import bgmpi.api
whole = bgmpi.api.run_batch
def run_batch(config, stop):
    summary = whole(config, stop)
    with open(os.environ["WATCHED"], "a") as file:
        file.write(f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}\\n")
    return summary
bgmpi.api.run_batch = run_batch
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(checkpoints.make("llama", tmp_path_factory.mktemp("memory"), num_hidden_layers=1))


@pytest.mark.slow
def test_c05_memory_at_the_end_is_that_at_a_tenth(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    padding = "x" * 1900
    with open(tmp_path / "many.jsonl", "w") as file:
        for row in range(ROWS):
            body = {"prompt": [row % 480 + 3], "max_tokens": 1, "temperature": 0, "metadata": {"padding": padding}}
            file.write(line(f"row-{row}", body) + "\n")
    watched = tmp_path / "watched"
    monkeypatch.setenv("WATCHED", str(watched))
    paths = ["--model", model, "-i", tmp_path / "many.jsonl", "-o", tmp_path / "many.h5"]
    (ran,) = run_commands(1, [["run", *paths, "--dtype", "float32", "--segment-bytes", "1M"]], tmp_path, before=_WATCH)
    assert ran.code == 0, ran.stderr
    ended, resident = np.array([json.loads(one) for one in watched.read_text().splitlines()]).T
    tenth = int(resident[np.searchsorted(ended, ROWS // 10)])
    assert ended[-1] == ROWS
    assert int(resident[-1]) - tenth < 300e6, f"{tenth:,} bytes at a tenth, {int(resident[-1]):,} at the end"
    assert len(jobs.tokens_of(tmp_path / "many.h5")) == ROWS


def test_c06_a_huge_line_is_an_error_row_and_takes_no_more_than_four_times_itself(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good: dict[str, Any] = {"prompt": "hi", "max_tokens": 4, "temperature": 0}
    around = [line("a", good), line("b", good)]
    (tmp_path / "two.jsonl").write_text("\n".join(around))
    huge = line("huge", good | {"prompt": "PUT IT HERE"}).split("PUT IT HERE")
    with open(tmp_path / "three.jsonl", "w") as file:
        file.write(f"{around[0]}\n{huge[0]}")
        for _ in range(100):
            file.write("the " * (HUGE // 400))
        file.write(f"{huge[1]}\n{around[1]}\n")
    watched = tmp_path / "watched"
    monkeypatch.setenv("WATCHED", str(watched))

    def run(source: str, output: str, *more: str) -> list[str | Path]:
        paths = ["--model", model, "-i", tmp_path / f"{source}.jsonl", "-o", tmp_path / f"{output}.h5"]
        return ["run", *paths, "--dtype", "float32", *more]

    commands = [run("two", "two"), run("three", "cut"), run("three", "read", "--max-line-bytes", "200M")]
    ran = run_commands(1, commands, tmp_path, before=_HIGHEST)
    assert [one.code for one in ran] == [0, 3, 3], ran
    two, cut, read = (int(one) for one in watched.read_text().splitlines())
    assert cut - two < 2.2 * LIMIT, f"of a line over --max-line-bytes no more is held, but it took {cut - two:,} bytes"
    assert read - two < 4.2 * HUGE, f"the line took {read - two:,} bytes"
    expected = jobs.tokens_of(tmp_path / "two.h5")
    for name, code in (("cut", "invalid_request_error"), ("read", "context_length_exceeded")):
        with open_results(tmp_path / f"{name}.h5") as results:
            rows = list(results.rows())
        assert [rows[at].samples[0].tokens.tolist() for at in (0, 2)] == expected
        assert rows[1].error is not None and (rows[1].error.code, rows[1].error.line) == (code, 2)
        assert rows[1].custom_id == "huge"
