"""The whole program on a tiny model: every kind of bad input in one file, and every way in which a job cannot begin.

The public faults of kinds K1, K2 and K12 are held here on what a user gets: exit codes, the HDF5 file, exported lines
and the words on the screen.  "Unharmed" means that good rows have the ids of a file that holds only them.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import checkpoints
import h5py
import jobs
import launch
import pytest
import torch
from commands import Ran, line, run_commands
from safetensors.torch import load_file, save_file
from tokenizers_for_tests import make_tokenizer

from bgmpi.api import run_batch
from bgmpi.config import resolve
from bgmpi.errors import UsageError
from bgmpi.io.results import open_results

CHAT = "/v1/chat/completions"
CONTEXT = 64
REFUSED, TOO_LONG = "invalid_request_error", "context_length_exceeded"


def chat(custom_id: Any, content: str = "hi", url: str = CHAT, method: str = "POST", **body: Any) -> str:
    whole = {"messages": [{"role": "user", "content": content}], "max_tokens": 4, "temperature": 0} | body
    return line(custom_id, whole, url, method=method)


def text(custom_id: Any, prompt: Any, **body: Any) -> str:
    return line(custom_id, {"prompt": prompt, "max_tokens": 4, "temperature": 0} | body)


@dataclass(frozen=True)
class Line:
    """A physical line of the mixed file: its code is "" for a good row, None for no row at all."""

    content: str
    code: str | None = ""


def ids(count: int) -> list[int]:
    return [(7 * at) % 480 + 3 for at in range(count)]


MIXED = [
    Line(chat("c01-a")),
    Line("", None),
    Line("   ", None),
    Line(chat("c01-b", seed=11, temperature=0.9)),
    Line("[1,2,3]", REFUSED),
    Line('"hello"', REFUSED),
    Line("null", REFUSED),
    Line('{"custom_id":"c02-x","method":"POST","url":"/v1/completions","body":"str"}', REFUSED),
    Line('{"custom_id":"c02-cut","method":', REFUSED),
    Line(text("  ", "hi"), REFUSED),
    Line('{"method":"POST","url":"/v1/completions","body":{"prompt":"hi"}}', REFUSED),
    Line(text(7, "hi"), REFUSED),
    Line(chat("c07-url", url="/v1/images"), REFUSED),
    Line(chat("c07-stream", stream=True), REFUSED),
    Line(chat("c07-get", method="GET"), REFUSED),
    Line(text("c09", "X").replace('"X"', '"a\\ud835b"')),
    Line(text("c10-long", ids(100)), TOO_LONG),
    Line(text("c10-good", ids(10))),
    Line(text("c12-63", ids(63), max_tokens=10)),
    Line(text("c12-64", ids(64), max_tokens=10), TOO_LONG),
    Line(text("c12-65", ids(65), max_tokens=10), TOO_LONG),
    Line(text("c13-empty", ""), REFUSED),
    Line(text("c14-0", "hello", max_tokens=0)),
    Line(text("c14-0-echo", "hello", max_tokens=0, echo=True, logprobs=1)),
    Line(text("c14-minus", "hi", max_tokens=-1), REFUSED),
    Line(text("c14-half", "hi", max_tokens=2.5), REFUSED),
    Line(text("c14-text", "hi", max_tokens="4"), REFUSED),
    Line(text("c15-512", "hi", logit_bias={"512": 5}), REFUSED),
    Line(text("c15-minus", "hi", logit_bias={"-1": 5}), REFUSED),
    Line(text("c15-abc", "hi", logit_bias={"abc": 5}), REFUSED),
    Line(text("c15-499", "hi", logit_bias={"499": 5})),
    Line(chat("c16-logprobs", logprobs=True, top_logprobs=1_000_000), REFUSED),
    Line(text("c16-top-k", "hi", temperature=0.7, top_k=9_999_999, seed=5)),
    Line(text("c16-no-filter", "hi", temperature=0.7, seed=5)),
    Line(text("c23-505", "hi", logit_bias={"505": 100}), REFUSED),
    Line(text("c80", ["a", "b", "c"], max_tokens=[1, 2]), REFUSED),
    Line(chat("last", "the end", temperature=0.8, seed=3)),
]
ROWS = [one for one in MIXED if one.code is not None]
GOOD = [one for one in MIXED if one.code == ""]


@dataclass(frozen=True)
class Job:
    """What the serial run found, by name of the command."""

    folder: Path
    model: Path
    ran: dict[str, Ran]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    root = tmp_path_factory.mktemp("end-to-end")
    model = make_tokenizer(checkpoints.make("llama", root / "model"))
    broken = make_tokenizer(checkpoints.make("llama", root / "broken"), chat_template=False)
    weights = load_file(broken / "model.safetensors")
    weights["lm_head.weight"][3, 4] = torch.nan
    save_file(weights, broken / "model.safetensors")
    garbled = root / "garbled"
    garbled.mkdir()
    (garbled / "config.json").write_text("{")
    (root / "bad.toml").write_text("max_num_seqs = ")
    for name, content in {
        "mixed": "\n".join(one.content for one in MIXED),
        "good": "\n".join(one.content for one in GOOD),
        "twice": "\n".join([chat("b"), chat("a", "one"), "", chat("a", "two")]),
        "empty": "",
        "blank": "\n  \n",
        "chat": chat("a"),
        "text": text("a", "hi"),
        "again": text("a", "hi") + '\n{"custom_id":"c02","body":3}\n',
    }.items():
        (root / f"{name}.jsonl").write_text(content)
    (root / "again.h5").write_bytes(b"old results")
    (root / "there.h5").write_bytes(b"somebody's results")

    def run(name: str, *more: str | Path, model: Path = model, out: str | None = None) -> list[str | Path]:
        paths = ["--model", model, "-i", root / f"{name}.jsonl", "-o", root / f"{out or name}.h5"]
        return ["run", *paths, "--dtype", "float32", "--check", *more]

    def export(name: str) -> list[str | Path]:
        return ["export", root / f"{name}.h5", "-o", root / f"{name}.out.jsonl", "--tokenizer", model]

    commands: dict[str, list[str | Path]] = {
        "mixed": run("mixed", "--max-model-len", str(CONTEXT)),
        "export": export("mixed"),
        "inspect": ["inspect", root / "mixed.h5", "--rows", "40"],
        "good": run("good", "--max-model-len", str(CONTEXT)),
        "twice": run("twice", model=root / "nowhere"),
        "no model": run("chat", model=root / "nowhere", out="x"),
        "no input": run("nothing", out="x"),
        "unknown flag": run("chat", "--max-num-seq", "4", out="x"),
        "foreign flag": run("chat", "-tp", "2", out="x"),
        "bad toml": run("chat", "--config", root / "bad.toml", out="x"),
        "no toml": run("chat", "--config", root / "none.toml", out="x"),
        "bad config": run("chat", model=garbled, out="x"),
        "exists": run("chat", out="there"),
        "no folder": run("chat", out="none/x"),
        "no trace folder": run("chat", "--trace", root / "none" / "t", out="x"),
        "no metrics folder": run("chat", "--metrics-file", root / "none" / "t", out="x"),
        "no errors folder": run("chat", "--error-file", root / "none" / "t", out="x"),
        "errors over results": run("chat", "--error-file", root / "x.h5", out="x"),
        "results over input": ["run", "--model", model, "-i", root / "chat.jsonl", "-o", root / "chat.jsonl",
                               "--overwrite"],
        "no template": run("chat", model=broken, out="x"),
        "nan": run("text", model=broken, out="x"),
        "no kv": run("text", "--host-kv-memory", "100", out="x"),
        "context": run("text", "--max-model-len", "100000", out="x"),
        "empty": run("empty"),
        "export empty": export("empty"),
        "inspect empty": ["inspect", root / "empty.h5"],
        "blank": run("blank"),
        "strict": run("mixed", "--max-model-len", str(CONTEXT), "--strict", out="strict"),
        "again": run("again", "--overwrite", "--error-file", root / "again.errors.jsonl"),
        "template": run("chat", "--chat-template", "{{ messages[0].content }}", out="template"),
    }
    ran = run_commands(1, list(commands.values()), root)
    return Job(root, model, dict(zip(commands, ran, strict=True)))


def good_ids(path: Path) -> dict[str, list[list[int]]]:
    with open_results(path) as results:
        return {
            row.custom_id: [answer.tokens.tolist() for answer in row.samples]
            for row in results.rows()
            if row.error is None
        }


def check_mixed(path: Path, good: Path) -> None:
    """Hold a results file of the mixed input: one outcome a row, its code and line, and good rows unharmed."""
    lines = [at for at, one in enumerate(MIXED, start=1) if one.code is not None]
    with open_results(path) as results:
        rows = list(results.rows())
        assert results.attributes["complete"] == 1
    assert len(rows) == len(ROWS)
    for row, expected, at in zip(rows, ROWS, lines, strict=True):
        if not expected.code:
            assert row.error is None, row
            continue
        assert row.error is not None, expected.content
        assert (row.error.code, row.error.line) == (expected.code, at), row.error
        assert f"line {at}" in row.error.message
    assert good_ids(path) == good_ids(good)
    assert list(good_ids(path)) == [json.loads(one.content)["custom_id"] for one in GOOD]


def test_every_bad_row_is_an_error_row_with_its_line_and_good_rows_are_unharmed(job: Job) -> None:
    assert job.ran["mixed"].code == 3, job.ran["mixed"].stderr
    assert job.ran["good"].code == 0, job.ran["good"].stderr
    check_mixed(job.folder / "mixed.h5", job.folder / "good.h5")
    bad = len(ROWS) - len(GOOD)
    assert f"{len(ROWS)}: {len(GOOD)} good, {bad} failed" in job.ran["mixed"].stdout
    assert f"{bad - 3} {REFUSED}, 3 {TOO_LONG}" in job.ran["mixed"].stdout
    assert "surrogate" in job.ran["mixed"].stderr


def test_plain_h5py_finds_the_errors_of_the_mixed_file(job: Job) -> None:
    with h5py.File(job.folder / "mixed.h5", "r") as file:
        status = h5py.check_enum_dtype(file["rows/status"].dtype)
        assert file["rows/status"][:].tolist() == [status["error" if one.code else "done"] for one in ROWS]
        assert len(file["errors/row"]) == len(ROWS) - len(GOOD)
        assert "line" in file["errors"]


def test_c12_a_prompt_one_short_of_the_limit_has_one_token_and_c14_none(job: Job) -> None:
    with open_results(job.folder / "mixed.h5") as results:
        rows = {row.custom_id: row.samples[0] for row in results.rows() if row.error is None}
    assert (len(rows["c12-63"].tokens), rows["c12-63"].finish.name) == (1, "LENGTH")
    for name in ("c14-0", "c14-0-echo"):
        assert (len(rows[name].tokens), rows[name].finish.name) == (0, "LENGTH")
    echoed = rows["c14-0-echo"]
    assert echoed.text == "hello"
    assert echoed.prompt_logprobs is not None and len(echoed.prompt_logprobs.chosen) == len(echoed.prompt)
    assert rows["c16-top-k"].tokens.tolist() == rows["c16-no-filter"].tokens.tolist()


def test_c08_exported_lines_speak_both_dialects_and_join_on_custom_id(job: Job) -> None:
    assert job.ran["export"].code == 0
    out = [json.loads(one) for one in (job.folder / "mixed.out.jsonl").read_bytes().decode().splitlines()]
    errors = [json.loads(one) for one in (job.folder / "mixed.out.errors.jsonl").read_bytes().decode().splitlines()]
    assert [one["custom_id"] for one in out] == [json.loads(one.content)["custom_id"] for one in GOOD]
    assert all(one["error"] is None and one["response"]["status_code"] == 200 for one in out)
    bad = [(at, one) for at, one in enumerate(MIXED, start=1) if one.code]
    assert [one["error"]["line"] for one in errors] == [at for at, _ in bad]
    assert [one["error"]["code"] for one in errors] == [one.code for _, one in bad]
    for one in errors:
        assert one["response"]["status_code"] == 400
        assert "choices" not in one["response"]["body"]
        assert one["response"]["body"]["error"]["message"] == one["error"]["message"]
    named = {one["custom_id"] for one in errors}
    assert {"c02-x", "c02-cut", "c07-url", "c10-long", "c13-empty", "c23-505", None} <= named
    long = next(one for one in errors if one["custom_id"] == "c10-long")["error"]["message"]
    assert "64" in long and "100" in long
    prefill = next(one for one in out if one["custom_id"] == "c14-0")["response"]["body"]
    assert prefill["usage"]["completion_tokens"] == 0
    assert prefill["choices"][0]["finish_reason"] == "length"


def test_the_summary_of_a_file_with_errors_can_be_inspected(job: Job) -> None:
    assert job.ran["inspect"].code == 0
    assert TOO_LONG in job.ran["inspect"].stdout and "c02-x" in job.ran["inspect"].stdout


@pytest.mark.mpi(2)
def test_the_console_script_gives_the_same_answers_on_two_ranks(job: Job, tmp_path: Path) -> None:
    paths = ["--model", job.model, "-i", job.folder / "mixed.jsonl", "-o", tmp_path / "mixed.h5"]
    ended = launch.bgmpi(2, "run", *paths, "--dtype", "float32", "--max-model-len", str(CONTEXT), "--check", limit=100)
    assert ended.returncode == 3, ended
    check_mixed(tmp_path / "mixed.h5", job.folder / "good.h5")
    assert ended.stdout.count("rows ") == 1, "only rank 0 prints the summary"
    assert sorted(os.listdir(tmp_path)) == ["mixed.h5"], "segments are removed when the file is published"


def test_strict_stops_at_the_first_bad_line(job: Job) -> None:
    assert job.ran["strict"].code == 65
    assert "bgmpi: error: --strict: line 5: " in job.ran["strict"].stderr
    assert not (job.folder / "strict.h5").exists()


def test_overwriting_replaces_the_results_and_error_rows_are_written_on_request(job: Job) -> None:
    assert job.ran["again"].code == 3, job.ran["again"].stderr
    assert list(good_ids(job.folder / "again.h5")) == ["a"]
    errors = [json.loads(one) for one in (job.folder / "again.errors.jsonl").read_text().splitlines()]
    assert [(one["custom_id"], one["error"]["line"]) for one in errors] == [("c02", 2)]


def test_c80_a_list_of_limits_is_refused_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--max-tokens"):
        resolve(["--model", "m", "-i", "three-prompts.jsonl", "--max-tokens", "4,4"], {})
    with pytest.raises(UsageError, match="max_tokens"):
        resolve(["--model", "m"], {}, "max_tokens = [4, 4]")
    with pytest.raises(UsageError, match="--input-file"):
        run_batch(resolve(["--model", str(tmp_path)], {}))


# --- jobs that cannot begin -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "code", "told"),
    [
        pytest.param("twice", 65, ["lines 2 and 4", "'a'"], id="c03-before-the-model-is-even-looked-for"),
        ("no model", 66, ["nowhere"]),
        ("no input", 66, ["nothing.jsonl"]),
        ("unknown flag", 2, ["--max-num-seq"]),
        ("foreign flag", 2, ["-tp"]),
        ("bad toml", 2, ["TOML"]),
        ("no toml", 66, ["none.toml"]),
        ("bad config", 65, ["config.json"]),
        ("exists", 2, ["there.h5", "--overwrite"]),
        ("no folder", 66, ["none"]),
        ("no trace folder", 66, ["--trace"]),
        ("no metrics folder", 66, ["--metrics-file"]),
        ("no errors folder", 66, ["--error-file"]),
        ("errors over results", 2, ["--output-file and --error-file"]),
        ("results over input", 2, ["--input-file and --output-file"]),
        pytest.param("no template", 2, ["--chat-template"], id="c26-before-weights-that-would-be-refused"),
        pytest.param("nan", 65, ["lm_head.weight", "--allow-nonfinite"], id="c49-weights-that-are-refused"),
        ("no kv", 2, ["--host-kv-memory"]),
        ("context", 2, ["--max-model-len"]),
    ],
)
def test_a_job_that_cannot_begin_says_why_and_leaves_nothing(
    job: Job, command: str, code: int, told: list[str]
) -> None:
    ran = job.ran[command]
    assert ran.code == code, ran
    errors = [one for one in ran.stderr.splitlines() if one.startswith("bgmpi: error: ")]
    assert len(errors) == 1 and all(word in errors[0] for word in told), ran.stderr
    assert "Traceback" not in ran.stderr
    left = {path.name for path in job.folder.iterdir() if path.name.startswith(("x.h5", "there.h5", "twice.h5"))}
    assert left <= {"there.h5"}
    assert (job.folder / "there.h5").read_bytes() == b"somebody's results"


@pytest.mark.parametrize("name", ["empty", "blank"])
def test_c54_an_empty_input_is_a_good_job_of_no_rows(job: Job, name: str) -> None:
    assert job.ran[name].code == 0, job.ran[name].stderr
    with open_results(job.folder / f"{name}.h5") as results:
        assert len(results) == 0 and results.attributes["complete"] == 1


def test_c54_an_empty_results_file_is_exported_and_inspected(job: Job) -> None:
    assert (job.ran["export empty"].code, job.ran["inspect empty"].code) == (0, 0)
    assert (job.folder / "empty.out.jsonl").read_text() == ""


def test_c26_a_template_on_the_command_line_serves_chats(job: Job) -> None:
    assert job.ran["template"].code == 0, job.ran["template"].stderr
    with open_results(job.folder / "template.h5") as results:
        assert results.row(0).samples[0].prompt_tokens == 1
        assert results.document("chat_template") == "{{ messages[0].content }}"


# --- many ranks, many batches -----------------------------------------------------------------------------------------


@pytest.mark.mpi(3)
def test_three_ranks_fail_together_go_on_and_keep_every_row_in_its_place(job: Job, tmp_path: Path) -> None:
    """C79 (order after failures), C72 (two batches, one process), C54, and agreed errors of collective stages."""
    prompts = [ids(5 + at) for at in range(10)]
    bad = (2, 7)
    ten = [
        text(f"r{at}", prompt, max_tokens=30 - 3 * at, ignore_eos=True, n=0 if at in bad else 1)
        for at, prompt in enumerate(prompts)
    ]
    again = [text(f"r{9 - at}", prompt, max_tokens=3, ignore_eos=True) for at, prompt in enumerate(prompts)]
    solo = [text("only", prompts[4], max_tokens=30, ignore_eos=True)]
    for name, rows in (("ten", ten), ("again", again), ("solo", solo)):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows) + "\n")

    def run(source: Path, out: str, *more: str | Path, model: Path = job.model) -> list[str | Path]:
        paths = ["--model", model, "-i", source, "-o", tmp_path / f"{out}.h5"]
        return ["run", *paths, "--dtype", "float32", "--check", *more]

    ran = run_commands(
        3,
        [
            run(job.folder / "mixed.jsonl", "mixed", "--max-model-len", str(CONTEXT)),
            run(job.folder / "twice.jsonl", "x"),
            run(job.folder / "text.jsonl", "x", model=job.folder / "broken"),
            run(job.folder / "chat.jsonl", "x", model=job.folder / "nowhere"),
            run(tmp_path / "ten.jsonl", "ten"),
            run(tmp_path / "again.jsonl", "again"),
            run(tmp_path / "solo.jsonl", "solo"),
            run(job.folder / "empty.jsonl", "empty"),
        ],
        tmp_path,
    )
    assert [one.code for one in ran] == [3, 65, 65, 66, 3, 0, 0, 0], ran
    assert ran[1].stderr.count("bgmpi: error: ") == 1
    check_mixed(tmp_path / "mixed.h5", job.folder / "good.h5")
    with open_results(tmp_path / "ten.h5") as results:
        assert results.status.tolist() == [int(at in bad) for at in range(10)]
        assert results.custom_ids == [f"r{at}" for at in range(10)]
        lengths = [len(results.tokens(at)) for at in range(10)]
        assert lengths == [0 if at in bad else 30 - 3 * at for at in range(10)]
        fourth = results.tokens(4).tolist()
        first = [results.tokens(at).tolist()[:3] for at in range(10)]
    with open_results(tmp_path / "solo.h5") as results:
        assert results.tokens(0).tolist()[: len(fourth)] == fourth
    with open_results(tmp_path / "again.h5") as results:
        assert results.custom_ids == [f"r{9 - at}" for at in range(10)]
        second = [results.tokens(at).tolist() for at in range(10)]
    assert [two for at, two in enumerate(second) if at not in bad] == [
        one for at, one in enumerate(first) if at not in bad
    ]
    assert jobs.tokens_of(tmp_path / "empty.h5") == []
