"""An output that is published goes on: error rows tried again, rows added or edited, and no good answer touched
(cases C70 and C71)."""

from __future__ import annotations

import json
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import checkpoints
import commands
import h5py
import jobs
import launch
import numpy as np
import pytest
from kill_at import kill_words
from results_for_tests import PROVENANCE, answer, error, logprobs, write_segments
from tokenizers_for_tests import make_tokenizer

from bgmpi.errors import WriteError
from bgmpi.io.attempts import RowMap, read_attempts
from bgmpi.io.collected import collect
from bgmpi.io.publish import publish, remove_parts
from bgmpi.io.published_answers import PublishedAnswers
from bgmpi.io.reopen import PublishedRows, reopen
from bgmpi.io.segments import parts_folder

SMALL = ("--host-kv-memory", "10k")  # too little for the longest rows: they become error rows


def words(model: Path, requests: Path, output: Path, *more: str) -> list[str | Path]:
    return ["--model", model, "-i", requests, "-o", output, "--dtype", "float32", "--checkpoint-interval", "0",
            "--page-tokens", "4", "--max-num-seqs", "4", "--check", "--progress", "off", *more]  # fmt: skip


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(checkpoints.make("mixtral", tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    """Sixteen rows of mixed kinds, one of them with three samples, and one that is always refused."""
    extras: list[dict[str, Any]] = [
        {"temperature": 0}, {"temperature": 1.1, "n": 3}, {"temperature": 0.7, "logprobs": 2},
    ]  # fmt: skip
    bodies = [
        {"prompt": prompt, "max_tokens": 3 + 9 * (i % 5), "ignore_eos": True, "seed": i, **extras[i % 3]}
        for i, prompt in enumerate(jobs.prompts(16, longest=40, seed=5))
    ]
    bodies.append({"prompt": "x", "max_tokens": -1})
    fixed = {"method": "POST", "url": "/v1/completions"}
    return [{"custom_id": f"r{i}", **fixed, "body": body} for i, body in enumerate(bodies)]


def answers(path: Path) -> dict[str, tuple[bytes, ...]]:
    """What every good row has, by custom_id: all that one row of all columns holds, times too."""
    found: dict[str, tuple[bytes, ...]] = {}
    whole = PublishedAnswers(path)
    for entry in np.flatnonzero(~whole.is_error).tolist():
        table = whole.table(entry, entry + 1)
        name = table.values["rows/custom_id/values"].tobytes().decode() + f"/{int(whole.sample[entry])}"
        columns = {path: column for path, column in table.columns().items() if path != "samples/row"}
        found[name] = tuple(columns[path].tobytes() for path in sorted(columns))
    return found


# --- without a model ------------------------------------------------------------------------------------------------


def columns(path: Path) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    with h5py.File(path, "r") as file:
        file.visititems(
            lambda name, item: found.__setitem__(name, item[:].tobytes()) if isinstance(item, h5py.Dataset) else None
        )
    return found


def test_what_was_published_is_published_again_bit_for_bit(tmp_path: Path) -> None:
    output, content = tmp_path / "r.h5", np.arange(5, dtype=np.uint64)
    mixed = [answer(0, logprobs=logprobs(3, 2)), error(1, -1), answer(2), error(2, 1), answer(2, 2), answer(3)]
    mixed.append(error(4))
    samples = np.array([1, 4, 3, 1, 1], np.int32)  # row 1 was refused
    folder = write_segments(output, mixed)
    publish(folder, output, PROVENANCE, 5, samples, content=content)
    before = columns(output)
    remove_parts(folder)
    rows = PublishedRows("ab" * 32, content, np.array([0, 1, 1, 0, 1], bool))
    reopen(PublishedAnswers(output), folder, {"model": "m"}, rows, 12.5)
    (attempt,), damaged = read_attempts(folder)
    assert (attempt.number, attempt.settings, attempt.rows, damaged) == (1, {"model": "m"}, 5, ())
    found = collect(folder, {1: RowMap()})
    assert [entry.seconds for entry in found.journal.entries] == [12.5]
    publish(folder, output, PROVENANCE, 5, samples, content=content, maps={1: RowMap()})
    assert columns(output) == before
    kept = collect(folder, {1: RowMap(errors=False)})
    assert sorted(zip(kept.row.tolist(), kept.sample.tolist(), strict=True)) == [(0, 0), (2, 0), (2, 2), (3, 0)]


def test_answers_that_were_taken_back_in_part_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "r.h5"
    folder = write_segments(output, [answer(row) for row in range(9)])
    content = np.arange(9, dtype=np.uint64)
    publish(folder, output, PROVENANCE, 9, np.ones(9, np.int32), content=content)
    remove_parts(folder)
    monkeypatch.setattr("bgmpi.io.reopen._BLOCK_BYTES", 600)

    def full(*_: object, **__: object) -> None:
        raise WriteError("no space")

    monkeypatch.setattr("bgmpi.io.reopen.begin_attempt", full)
    with pytest.raises(WriteError):
        reopen(PublishedAnswers(output), folder, {}, PublishedRows("ab" * 32, content, np.zeros(9, bool)), 0.0)
    assert len(list(folder.glob("segment-*"))) > 2 and not read_attempts(folder)[0]
    assert len(columns(output)) > 40


# --- whole jobs -----------------------------------------------------------------------------------------------------


def test_c71_only_error_rows_of_a_published_output_are_tried_again(
    model: Path, rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    requests, output, whole = write_rows(tmp_path / "r.jsonl", rows), tmp_path / "out.h5", tmp_path / "whole.h5"
    errors = ("--error-file", str(tmp_path / "errors.jsonl"))
    first, _ = commands.run_commands(
        1, [["run", *words(model, requests, output, *SMALL)], ["run", *words(model, requests, whole)]], tmp_path
    )
    assert first.code == 3
    before, old = answers(output), output.read_bytes()
    assert 0 < len(before) < len(answers(whole)) - 2
    # A kill while the errors are tried again: the published file is the old one, byte for byte.
    retry = words(model, requests, output, "--retry-failed", *errors)
    ended = launch.launch([*kill_words(0, "bgmpi.executor:Executor.step", "before", 9), "run", *retry])
    assert ended.returncode == -signal.SIGKILL and output.read_bytes() == old, ended
    assert f"of 27 sequences {len(before)} are done, 0 are errors" in ended.stderr
    ran = commands.run_commands(
        1, [["run", *retry], ["run", *words(model, requests, output)], ["run", *retry]], tmp_path
    )
    assert [one.code for one in ran] == [3, 3, 3]
    assert "nothing is left to do" in ran[1].stderr and "of 27 sequences 26 are done, 0 are errors" in ran[2].stderr
    after = answers(output)
    assert {name: after[name] for name in before} == before and after.keys() == answers(whole).keys()
    assert jobs.tokens_of(output) == jobs.tokens_of(whole)
    assert not parts_folder(output).exists()
    assert [json.loads(line)["custom_id"] for line in (tmp_path / "errors.jsonl").read_text().splitlines()] == ["r16"]


@launch.on_ranks(1, 2)
def test_c70_new_and_edited_rows_join_a_published_output_and_the_others_keep_their_answers(
    model: Path, rows: list[dict[str, Any]], tmp_path: Path, ranks: int
) -> None:
    requests, output, fresh = write_rows(tmp_path / "r.jsonl", rows), tmp_path / "out.h5", tmp_path / "fresh.h5"
    jobs.run_jobs(ranks, [words(model, requests, output)], tmp_path)
    before, old = answers(output), output.read_bytes()
    changed = json.loads(json.dumps(rows))
    changed[1]["body"]["max_tokens"] = 7
    del changed[5]
    changed.append({**rows[0], "custom_id": "new", "body": {**rows[0]["body"], "prompt": [9, 8, 7]}})
    changed.reverse()
    write_rows(requests, changed)
    ran = commands.run_commands(
        ranks,
        [
            ["run", *words(model, requests, output)],
            ["run", *words(model, requests, output, "--resume", "must", "--temperature", "0.5")],
            ["run", *words(model, requests, output, "--resume", "must")],
            ["run", *words(model, requests, fresh)],
        ],
        tmp_path,
    )
    assert [one.code for one in ran] == [2, 2, 3, 3]
    told = "2 rows of the input are new or edited, 2 of its rows are gone, 15 have their answers there"
    assert told in ran[0].stderr and "--resume must" in ran[0].stderr
    assert "temperature was None, is 0.5" in ran[1].stderr or "temperature was" in ran[1].stderr
    sequences = sum(row["body"].get("n", 1) for row in changed)
    assert f"of {sequences} sequences {sequences - 5} are done, 1 are errors" in ran[2].stderr
    after = answers(output)
    kept = [name for name in before if name.partition("/")[0] not in ("r1", "r5")]
    assert {name: after[name] for name in kept} == {name: before[name] for name in kept}
    assert jobs.tokens_of(output) == jobs.tokens_of(fresh) and output.read_bytes() != old
    with h5py.File(output, "r") as file, h5py.File(fresh, "r") as other:
        assert file["rows/content"][:].tolist() == other["rows/content"][:].tolist()
        assert file["rows/custom_id/values"][:].tobytes().decode().startswith("newr16r15")


@pytest.mark.faults
@pytest.mark.parametrize(
    ("site", "when", "count"),
    [
        ("bgmpi.model:Model.__init__", "before", 1),
        ("bgmpi.io.segments:write_durably", "before", 1),
        ("bgmpi.io.attempts:write_durably", "before", 2),
        ("bgmpi.io.attempts:write_durably", "before", 3),
        ("bgmpi.executor:Executor.step", "before", 5),
        ("bgmpi.io.publish:_write_block", "before", 1),
        ("bgmpi.head:remove_parts", "before", 1),
        ("bgmpi.io.publish:remove_if_there", "after", 2),
    ],
)
def test_a_kill_at_any_instant_of_going_on_with_a_published_output_loses_nothing(
    model: Path, rows: list[dict[str, Any]], tmp_path: Path, site: str, when: str, count: int
) -> None:
    requests, output, whole = write_rows(tmp_path / "r.jsonl", rows), tmp_path / "out.h5", tmp_path / "whole.h5"
    commands.run_commands(
        1, [["run", *words(model, requests, output, *SMALL)], ["run", *words(model, requests, whole)]], tmp_path
    )
    before = answers(output)
    retry = words(model, requests, output, "--retry-failed")
    ended = launch.launch([*kill_words(0, site, when, count), "run", *retry])
    assert ended.returncode == -signal.SIGKILL, ended
    held = answers(output)
    assert {name: held[name] for name in before} == before
    launch.bgmpi(0, "run", *retry, expect=3)
    after = answers(output)
    assert {name: after[name] for name in before} == before
    assert jobs.tokens_of(output) == jobs.tokens_of(whole) and not parts_folder(output).exists()
