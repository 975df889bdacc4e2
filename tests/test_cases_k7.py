"""Public faults of kind K7 (parallel shape): sizes that no number of ranks divides (C51, C52, C54).

C53 (fp8 blocks that do not meet a rank's slice) is in test_model_files.py: experts are whole on a rank, never sliced.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import checkpoints
import jobs
import launch
import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer
from tokenizers_for_tests import make_tokenizer

from bgmpi.io.results import open_results
from bgmpi.request import Answer

VOCAB = 509
SAMPLES, LENGTH = 50, 40


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models whose sizes fit no count of ranks: a prime vocabulary with a token for every id, 2 and 3 KV heads."""
    root = tmp_path_factory.mktemp("k7")
    odd = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3}
    made = {
        "prime": checkpoints.make("mixtral", root / "prime", vocab_size=VOCAB),
        "two": checkpoints.make("llama", root / "two"),
        "three": checkpoints.make("llama", root / "three", **odd),
    }
    for folder in made.values():
        make_tokenizer(folder)
    path = str(made["prime"] / "tokenizer.json")
    tokenizer = Tokenizer.from_file(path)
    tokenizer.add_tokens([AddedToken(f"<|{at}|>") for at in range(VOCAB - 500)])
    tokenizer.save(path)
    return made


def run_all(models: dict[str, Path], ranks: int, folder: Path) -> None:
    """Run every job of this file on `ranks` ranks in one launch."""
    hot = {"temperature": 5, "seed": 4, "n": SAMPLES, "max_tokens": LENGTH, "ignore_eos": True, "logprobs": 2}
    greedy = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
    prompts = jobs.prompts(7, longest=20)
    rows: dict[str, list[dict[str, Any]]] = {
        "hot": [{"prompt": prompts[0]} | hot],
        "seven": [{"prompt": prompt} | greedy for prompt in prompts],
        "five": [{"prompt": prompt} | greedy for prompt in prompts[:5]],
        "one": [{"prompt": prompts[0]} | greedy],
        "none": [],
    }
    shapes = [("prime", "hot"), ("two", "seven"), ("three", "seven"), ("prime", "five"), ("prime", "one"),
              ("two", "one"), ("prime", "none"), ("two", "none")]  # fmt: skip
    words = []
    for model, name in shapes:
        requests = jobs.write_requests(folder / f"{name}.jsonl", rows[name])
        output = folder / f"{model}-{name}.h5"
        words.append(["--model", models[model], "-i", requests, "-o", output, "--dtype", "float32", "--check"])
    jobs.run_jobs(ranks, words, folder)


def samples(path: Path) -> list[Answer]:
    with open_results(path) as results:
        return [answer for row in results.rows() for answer in row.samples]


@pytest.fixture(scope="module")
def alone(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one rank answers."""
    folder = tmp_path_factory.mktemp("alone")
    run_all(models, 1, folder)
    return folder


def test_c51_every_id_of_a_prime_vocabulary_and_no_other_is_sampled_hot(alone: Path) -> None:
    answers = samples(alone / "prime-hot.h5")
    drawn = np.concatenate([answer.tokens for answer in answers])
    assert len(answers) == SAMPLES and len(drawn) == SAMPLES * LENGTH
    assert drawn.min() >= 0 and drawn.max() < VOCAB and (drawn >= 500).any()
    for answer in answers:
        assert answer.logprobs is not None and np.isfinite(answer.logprobs.chosen).all()
        assert answer.logprobs.top_ids.max() < VOCAB


@launch.on_ranks(2, 3, 4)
def test_c51_c52_c54_no_count_of_ranks_changes_an_answer(
    models: dict[str, Path], alone: Path, ranks: int, tmp_path: Path
) -> None:
    """C51 prime vocabulary, C52 fewer KV heads than ranks, C54 fewer requests than ranks and none at all."""
    run_all(models, ranks, tmp_path)
    outputs = sorted(path.name for path in alone.glob("*.h5"))
    assert len(outputs) == 8
    for name in outputs:
        assert jobs.tokens_of(tmp_path / name) == jobs.tokens_of(alone / name), name
    for many, one in zip(samples(tmp_path / "prime-hot.h5"), samples(alone / "prime-hot.h5"), strict=True):
        assert many.logprobs is not None and one.logprobs is not None
        np.testing.assert_allclose(many.logprobs.chosen, one.logprobs.chosen, atol=1e-4)
    for name in ("prime-none.h5", "two-none.h5"):
        with open_results(tmp_path / name) as results:
            assert len(results) == 0 and results.attributes["complete"] == 1
