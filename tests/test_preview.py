"""`bgmpi plan` says what is shared and what that saves, from the input alone."""

from __future__ import annotations

import json
from pathlib import Path

import checkpoints
import launch
import pytest
from tokenizers_for_tests import make_tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(checkpoints.make("mixtral", tmp_path_factory.mktemp("plan") / "model"))


def write(path: Path, bodies: list[dict[str, object]]) -> Path:
    lines = [{"custom_id": f"r{at}", "method": "POST", "url": "/v1/completions", "body": body}
             for at, body in enumerate(bodies)]  # fmt: skip
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return path


def said(ended: launch.Ended) -> dict[str, str]:
    return {line[:17].strip(): line[17:].strip() for line in ended.stdout.splitlines()}


def test_a_plan_tells_what_sharing_would_save(model: Path, tmp_path: Path) -> None:
    head = list(range(3, 43))
    bodies: list[dict[str, object]] = [{"prompt": [*head, 50 + at, 60 + at], "max_tokens": 4} for at in range(5)]
    bodies += [{"prompt": [400, 401], "n": 2, "max_tokens": 1}, {"prompt": [], "max_tokens": 1}]
    requests = write(tmp_path / "r.jsonl", bodies)
    words = ["plan", "--model", model, "-i", requests, "-o", tmp_path / "o.h5", "--page-tokens", "8"]
    found = said(launch.bgmpi(0, *words, expect=0))
    # 5 x 42 and 2 x 2 tokens; computed 40 + 5 x 2 and 2 + 1.
    assert found["rows"] == "7, of them 1 refused" and found["sequences"] == "7, of 6 prompts"
    assert (found["prompt tokens"], found["answer tokens"]) == ("214", "22 at most")
    for name in ("multi-level", "one-level", "one-level, greedy"):
        assert found[name] == "53 prompt tokens to compute, 75.2% saved"
    assert found["shared prefixes"] == "2, in 2 units"
    assert found["largest groups"] == "5 x 40 tokens, 2 x 1 tokens"
    assert found["KV of the largest"] == "10 pages of 8 tokens at most"
    found = said(launch.bgmpi(0, *words, "--prefix-sharing", "off", expect=0))
    assert found["multi-level"].endswith("(this job would not: --prefix-sharing off)")
    assert not (tmp_path / "o.h5").exists() and not (tmp_path / "o.h5.parts").exists()


def test_a_plan_of_nothing_shared_and_of_nothing_at_all(model: Path, tmp_path: Path) -> None:
    requests = write(tmp_path / "r.jsonl", [{"prompt": [3, 4]}, {"prompt": [5, 6]}])
    words = ["plan", "--model", model, "-o", tmp_path / "o.h5", "-i"]
    found = said(launch.bgmpi(0, *words, requests, expect=0))
    assert found["multi-level"] == "4 prompt tokens to compute, 0.0% saved"
    assert found["shared prefixes"] == "0, in 2 units" and "largest groups" not in found
    found = said(launch.bgmpi(0, *words, write(tmp_path / "empty.jsonl", []), expect=0))
    assert (found["rows"], found["sequences"]) == ("0", "0, of 0 prompts")


def test_a_plan_fails_as_a_run_does(tmp_path: Path) -> None:
    ended = launch.bgmpi(0, "plan", "--model", tmp_path, "-i", tmp_path / "none.jsonl", "-o", tmp_path / "o", expect=66)
    assert "none.jsonl: no such file" in ended.stderr and not ended.stdout
    assert "options of bgmpi run" in launch.bgmpi(0, "plan", "--help", expect=0).stdout
