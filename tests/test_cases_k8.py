"""Public faults of kind K8 (collective progress): idle and hot experts, a rank that fails or sleeps (C55 to C58)."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import checkpoints
import jobs
import launch
import pytest
import torch
from commands import run_commands
from safetensors.torch import load_file, save_file
from stall_at import stall_words
from tokenizers_for_tests import make_tokenizer

from bgmpi.io.collected import collect
from bgmpi.io.segments import parts_folder
from bgmpi.world import CODE_FILE

BIAS = "mlp.gate.e_score_correction_bias"
TOKENS = 5
EQUAL = [(13 * at) % 480 + 3 for at in range(16)]


def make_routed(folder: Path, *, chosen: int = 1, hot: bool) -> Path:
    """Write a model of 16 experts, `chosen` of them a token; `hot`: always the first ones, by the selection bias."""
    checkpoints.make("kimi_k2", folder, num_experts_per_tok=chosen)
    make_tokenizer(folder)
    if hot:
        path = folder / "model.safetensors"
        tensors = load_file(path)
        for name in [name for name in tensors if name.endswith(BIAS)]:
            tensors[name] = torch.zeros_like(tensors[name])
            tensors[name][:chosen] = 100
        save_file(tensors, path, metadata={"format": "pt"})
    return folder


def greedy(folder: Path, prompt: list[int], count: int) -> list[int]:
    """Return the reference's answer; ids without a text are never taken."""
    model, tokens = checkpoints.reference(folder), list(prompt)
    with torch.no_grad():
        for _ in range(count):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1, :500].argmax()))
    return tokens[len(prompt) :]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("k8")
    return {
        "spread": make_routed(root / "spread", hot=False),
        "hot": make_routed(root / "hot", hot=True),
        "few": make_routed(root / "few", chosen=4, hot=True),
    }


@pytest.fixture(scope="module")
def expected(models: dict[str, Path]) -> dict[str, tuple[list[int], list[int]]]:
    """The reference's answers to one token and to the prompt of 16."""
    return {name: (greedy(folder, [77], TOKENS), greedy(folder, EQUAL, TOKENS)) for name, folder in models.items()}


@launch.on_ranks(1, 4)
def test_c55_c56_idle_and_hot_experts_give_the_answers_of_the_reference(
    models: dict[str, Path], expected: dict[str, tuple[list[int], list[int]]], ranks: int, tmp_path: Path
) -> None:
    """C55: one token for 16 experts, and all tokens for expert 0; C56: 64 equal prompts of 16 tokens, 1,024 in all."""
    usual = {"temperature": 0, "max_tokens": TOKENS, "ignore_eos": True}
    one = jobs.write_requests(tmp_path / "one.jsonl", [{"prompt": [77]} | usual])
    many = jobs.write_requests(tmp_path / "many.jsonl", [{"prompt": EQUAL} | usual] * 64)
    small = ["--max-num-seqs", "32", "--max-num-batched-tokens", "128", "--b-attn", "48", "--b-moe", "40"]
    shapes: dict[str, tuple[str, Path, list[str]]] = {
        "spread-one": ("spread", one, []),
        "hot-one": ("hot", one, []),
        "hot-many": ("hot", many, []),
        "few-many": ("few", many, small),
    }
    commands: list[list[str | Path]] = [
        ["run", "--model", models[name], "-i", requests, "-o", tmp_path / f"{key}.h5", "--dtype", "float32", "--check",
         *more]
        for key, (name, requests, more) in shapes.items()
    ]  # fmt: skip
    ran = dict(zip(shapes, run_commands(ranks, commands, tmp_path), strict=True))
    assert {key: one.code for key, one in ran.items()} == dict.fromkeys(shapes, 0), ran
    for key, (name, requests, _) in shapes.items():
        alone, together = expected[name]
        assert jobs.tokens_of(tmp_path / f"{key}.h5") == ([alone] if requests is one else [together] * 64), key
    assert "the busiest 16.00 times that" in ran["hot-many"].stdout
    assert "the busiest 4.00 times that" in ran["few-many"].stdout


# --- C57: one rank fails ----------------------------------------------------------------------------------------------

_AT_STEP_3 = """
import os, signal, sys
from bgmpi.executor import Executor
whole, made = Executor.step, []
def step(self, *arguments):
    made.append(1)
    if len(made) == 3 and os.environ["PMI_RANK"] == RANK:
        FAULT
    return whole(self, *arguments)
Executor.step = step
"""
_AT_ROW_5 = """
import sys
from bgmpi.io.requests import RequestReader
whole = RequestReader.read
def read(self, row, known=None):
    if row == 5:
        raise OSError("injected: the disk went away")
    return whole(self, row, known)
RequestReader.read = read
"""
_FULL_DISK = """
import os, sys
from bgmpi.errors import WriteError
from bgmpi.io.segments import SegmentWriter
whole = SegmentWriter.flush
def flush(self):
    if os.environ["PMI_RANK"] == "1":
        raise WriteError("injected: the disk is full")
    return whole(self)
SegmentWriter.flush = flush
"""
_RUN = """
from bgmpi.cli import main
sys.exit(main())
"""


def at_step_3(rank: int, fault: str) -> str:
    return _AT_STEP_3.replace("RANK\"] == RANK", f'RANK"] == "{rank}"').replace("FAULT", fault)


@pytest.mark.parametrize(
    ("ranks", "family", "fault", "code", "told"),
    [
        pytest.param(
            2,
            "mixtral",
            at_step_3(1, 'raise RuntimeError("injected: a kernel broke")'),
            70,
            ["rank 1/", "RuntimeError: injected: a kernel broke", "Traceback"],
            id="raise-on-rank-1",
            marks=pytest.mark.mpi(2),
        ),
        pytest.param(
            3, "llama", at_step_3(2, "os.kill(os.getpid(), signal.SIGKILL)"), None, [],
            id="kill-rank-2", marks=pytest.mark.mpi(3),
        ),
        pytest.param(
            2, "llama", _AT_ROW_5, None, ["rank 0/", "injected: the disk went away"],
            id="read-error-on-rank-0", marks=pytest.mark.mpi(2),
        ),
        pytest.param(
            3, "llama", _FULL_DISK, 74, ["rank 1/", "injected: the disk is full"],
            id="full-disk-on-rank-1", marks=pytest.mark.mpi(3),
        ),
    ],
)  # fmt: skip
def test_c57_a_rank_that_fails_alone_ends_all_and_is_named(
    tmp_path: Path, ranks: int, family: str, fault: str, code: int | None, told: list[str]
) -> None:
    model = make_tokenizer(checkpoints.make(family, tmp_path / "model"))
    short = [{"prompt": [at + 3], "max_tokens": 1, "temperature": 0} for at in range(6)]
    long = [{"prompt": [at + 3], "max_tokens": 300, "temperature": 0, "ignore_eos": True} for at in range(6)]
    requests = jobs.write_requests(tmp_path / "r.jsonl", short + long)
    output = tmp_path / "out.h5"
    argv = ["run", "--model", model, "-i", requests, "-o", output, "--dtype", "float32", "--checkpoint-interval", "0"]
    said = tmp_path / ("code" if code else "none/code")  # a code that cannot be kept must not keep the job alive
    words = [sys.executable, "-c", fault + _RUN, *argv]
    ended = launch.mpiexec(ranks, words, limit=60, env={CODE_FILE: str(said)})
    # The launcher may tell the code of a rank that it killed itself; the file has that of the rank that failed.
    assert ended.returncode not in (0, 2, 3), ended
    assert (int(said.read_text()) if said.exists() else None) == code, ended
    assert all(word in ended.stderr for word in told), ended
    if fault.count("SIGKILL"):  # a killed rank says nothing: launcher and kernel name a process, the log has its rank
        named = re.search(r"PID (\d+)", ended.stdout)
        assert named and "signal 9" in ended.stdout, ended
        assert f"is PID {named[1]}" in ended.stderr, ended
    assert not output.exists()
    if fault is not _AT_ROW_5:
        kept = set(collect(parts_folder(output)).row.tolist())
        assert kept and kept <= set(range(6)), "rows that ended before the fault are in segments"
    jobs.run_jobs(1, [[str(word) for word in argv[1:]]], tmp_path)
    assert [len(tokens) for tokens in jobs.tokens_of(output)] == [1] * 6 + [300] * 6, "and the job goes on with them"


# --- C58: one rank sleeps ---------------------------------------------------------------------------------------------


@pytest.mark.mpi(3)
def test_c58_a_rank_asleep_in_load_is_named_and_the_job_does_not_wait_for_ever(tmp_path: Path) -> None:
    model = make_tokenizer(checkpoints.make("llama", tmp_path / "model"))
    requests = jobs.write_requests(tmp_path / "r.jsonl", [{"prompt": [3], "max_tokens": 1}])
    argv = ["run", "--model", model, "-i", requests, "-o", tmp_path / "out.h5", "--dtype", "float32"]
    asleep = [*stall_words(1, "bgmpi.model:Model.__init__"), *argv, "--heartbeat", "30", "--startup-timeout", "15"]
    ended = launch.mpiexec(3, asleep, limit=60, env={CODE_FILE: str(tmp_path / "code")})
    assert ended.returncode not in (0, 2, 3) and (tmp_path / "code").read_text() == "75", ended
    late = [line.split(" ", 3) for line in ended.stderr.splitlines() if "'loading weights'" in line]
    assert late[0][1] == "WARNING" and late[-1][1] == "ERROR", ended
    assert all(speaker.startswith("0/") and text.startswith("rank 1/") for _, _, speaker, text in late), ended
    assert "after 15 s the job ends (--startup-timeout)" in late[0][3], ended
    assert re.search(r"rank 1/\S+: +File \S+ line \d+ in stand_still", ended.stderr), "where it sleeps"
