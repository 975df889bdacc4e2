"""`bgmpi plan` says what is shared and what that saves, from the input alone."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import checkpoints
import launch
from tokenizers_for_tests import make_tokenizer

#: Calls the command line once for each list of words, and writes down code and output of each.
COMMANDS = """
import contextlib, io, json, sys
from bgmpi.cli import main
ended = []
for words in json.loads(sys.argv[1]):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(words)
    ended.append((code, out.getvalue(), err.getvalue()))
print(json.dumps(ended))
"""


def call(*commands: Sequence[str | Path]) -> list[tuple[int, str, str]]:
    """Run commands in one process -> the exit code, the output and the errors of each."""
    listing = json.dumps([[str(word) for word in words] for words in commands])
    ended = launch.launch([sys.executable, "-c", COMMANDS, listing], expect=0)
    return [(code, out, err) for code, out, err in json.loads(ended.stdout)]


def write(path: Path, bodies: list[dict[str, object]]) -> Path:
    lines = [{"custom_id": f"r{at}", "method": "POST", "url": "/v1/completions", "body": body}
             for at, body in enumerate(bodies)]  # fmt: skip
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return path


def said(text: str) -> dict[str, str]:
    return {line[:17].strip(): line[17:].strip() for line in text.splitlines()}


def test_a_plan_tells_what_sharing_would_save_and_fails_as_a_run_does(tmp_path: Path) -> None:
    model = make_tokenizer(checkpoints.make("mixtral", tmp_path / "model"))
    head = list(range(3, 43))
    bodies: list[dict[str, object]] = [{"prompt": [*head, 50 + at, 60 + at], "max_tokens": 4} for at in range(5)]
    bodies += [{"prompt": [400, 401], "n": 2, "max_tokens": 1}, {"prompt": [], "max_tokens": 1}]
    requests = write(tmp_path / "r.jsonl", bodies)
    apart = write(tmp_path / "apart.jsonl", [{"prompt": [3, 4]}, {"prompt": [5, 6]}])
    empty = write(tmp_path / "empty.jsonl", [])
    words = ["plan", "--model", model, "-o", tmp_path / "o.h5", "--page-tokens", "8", "-i"]
    ended = call(
        [*words, requests], [*words, requests, "--prefix-sharing", "off"], [*words, apart], [*words, empty],
        [*words, tmp_path / "none.jsonl"], ["plan", "--help"],
    )  # fmt: skip
    assert [code for code, _, _ in ended] == [0, 0, 0, 0, 66, 0], ended
    found, off, alone, nothing = (said(out) for _, out, _ in ended[:4])
    # 5 x 42 and 2 x 2 tokens; computed 40 + 5 x 2 and 2 x 2, for a token is not worth sharing.
    assert found["rows"] == "7, of them 1 refused" and found["sequences"] == "7, of 6 prompts"
    assert (found["prompt tokens"], found["answer tokens"]) == ("214", "22 at most")
    for name in ("multi-level", "one-level"):
        assert found[name] == "54 prompt tokens to compute, 74.8% saved"
    assert found["one-level, greedy"] == "53 prompt tokens to compute, 75.2% saved"
    assert found["shared prefixes"] == "1, in 2 units"
    assert found["largest groups"] == "5 x 40 tokens"
    assert found["KV of the largest"] == "10 pages of 8 tokens at most"
    assert off["multi-level"] == found["multi-level"] + " (this job would not: --prefix-sharing off)"
    assert alone["multi-level"] == "4 prompt tokens to compute, 0.0% saved"
    assert alone["shared prefixes"] == "0, in 2 units" and "largest groups" not in alone
    assert (nothing["rows"], nothing["sequences"]) == ("0", "0, of 0 prompts")
    assert "none.jsonl: no such file" in ended[4][2] and not ended[4][1]
    assert "options of bgmpi run" in ended[5][1]
    assert not (tmp_path / "o.h5").exists() and not (tmp_path / "o.h5.parts").exists()
