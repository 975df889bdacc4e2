"""Whole commands of the program, many in one launch, and a model whose every word is known beforehand.

A test of the finished program wants to type `bgmpi ...` dozens of times, and a start costs seconds.  `run_commands`
starts Python once (on any number of ranks) and calls the command line's own `main` for each command, one after the
other, so exit codes, streams and files are those a user gets; `before` is source that runs first, to inject a fault.

`make_chain` writes a checkpoint that says, after token t, the token that a map gives: its layers add nothing to the
residual stream, and the head's row of a successor is the embedding of its predecessor.
"""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import checkpoints
import launch
import torch
from safetensors.torch import load_file, save_file

_SOURCE = """
import json, sys
from bgmpi.cli import main
from bgmpi.launcher import launch_rank
import os
rank = launch_rank(os.environ) or 0
for at, words in enumerate(json.loads(open(sys.argv[1]).read())):
    code = main(words)
    for stream in (sys.stdout, sys.stderr):
        if rank == 0:
            stream.write(f"@@ end of command {at}: {code}\\n")
        stream.flush()
"""


@dataclass(frozen=True, slots=True)
class Ran:
    """What one command left."""

    code: int
    stdout: str
    stderr: str


def run_commands(
    ranks: int, commands: Sequence[Sequence[str | Path]], folder: Path, *, before: str = "", limit: float = 240
) -> list[Ran]:
    """Run the commands (words after `bgmpi`) one after the other in one launch on `ranks` ranks."""
    listing = folder / f"commands-{ranks}.json"
    listing.write_text(json.dumps([[str(word) for word in words] for words in commands]))
    argv = [sys.executable, "-m", "mpi4py", "-c", textwrap.dedent(before) + _SOURCE, listing]
    started = launch.launch if ranks == 1 else lambda words, **kinds: launch.mpiexec(ranks, words, **kinds)
    ended = started(argv, limit=limit, expect=0)
    parts = [_cut(text, len(commands)) for text in (ended.stdout, ended.stderr)]
    return [Ran(code, out, err) for (out, code), (err, _) in zip(*parts, strict=True)]


def _cut(text: str, count: int) -> list[tuple[str, int]]:
    found = []
    for at in range(count):
        piece, mark, text = text.partition(f"@@ end of command {at}: ")
        assert mark, f"command {at} left no mark in {piece!r}"
        code, _, text = text.partition("\n")
        found.append((piece, int(code)))
    return found


def line(custom_id: Any, body: Mapping[str, Any], url: str = "/v1/completions", **more: Any) -> str:
    """Return one line of an input file."""
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": dict(body), **more})


def make_chain(folder: Path, follows: Mapping[int, int], **overrides: Any) -> Path:
    """Write a llama that says `follows[t]` after token t, and t + 1 (round the vocabulary) where that is free."""
    checkpoints.make("llama", folder, **overrides)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    vocab, hidden = tensors["model.embed_tokens.weight"].shape
    embedding = torch.randn((vocab, hidden), generator=torch.Generator().manual_seed(3))
    head = torch.zeros(vocab, hidden)
    taken = set(follows.values())
    for token in range(vocab):
        after = follows.get(token, (token + 1) % vocab)
        if token in follows or after not in taken:
            head[after] += embedding[token]
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
        elif name == "model.norm.weight":
            tensor.fill_(1.0)
    tensors |= {"model.embed_tokens.weight": embedding, "lm_head.weight": head}
    save_file(tensors, path)
    return folder
