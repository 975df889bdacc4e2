"""Whatever is shared, and in whatever order rows are read for it, answers are the same; on real ranks."""

from __future__ import annotations

from pathlib import Path

import checkpoints
import h5py
import jobs
import launch
import numpy as np
from tokenizers_for_tests import make_tokenizer


@launch.on_ranks(2)
def test_answers_are_the_same_with_prefixes_shared_or_not(ranks: int, tmp_path: Path) -> None:
    model = make_tokenizer(checkpoints.make("mixtral", tmp_path / "model"))
    random = np.random.default_rng(5)
    heads = [random.integers(3, 400, size=size).tolist() for size in (18, 9)]
    heads.append(heads[0] + random.integers(3, 400, size=7).tolist())
    bodies = [
        {"prompt": heads[at % 3] + [5 + at], "max_tokens": 3 + at % 5, "n": 1 + (at % 7 == 0), "temperature": 0.8,
         "ignore_eos": True}
        for at in range(30)
    ]  # fmt: skip
    bodies[4]["prompt"] = [heads[1], heads[2]]
    bodies[9]["unknown"] = 1
    bodies[11]["priority"] = -1
    requests = jobs.write_requests(tmp_path / "r.jsonl", bodies)
    words = ["--model", model, "-i", requests, "--dtype", "float32", "--max-num-seqs", "4", "--page-tokens", "4",
             "--check", "--progress", "off"]
    modes = ("off", "multi-level", "one-level")
    outputs = [tmp_path / f"{mode}.h5" for mode in modes]
    each = [[*words, "--prefix-sharing", mode, "-o", out] for mode, out in zip(modes, outputs, strict=True)]
    ended = jobs.run_jobs(ranks, each, tmp_path)
    plain, *shared = [jobs.tokens_of(output) for output in outputs]
    assert shared == [plain, plain], ended
    assert ended.stderr.count("sharing prefixes leaves") == 2, ended
    with h5py.File(outputs[1], "r") as file:
        assert file["errors/row"][:].tolist() == [9]
