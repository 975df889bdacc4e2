"""Synthetic work for the benchmarks: models with random weights and requests whose lengths follow a stated law.

A benchmark needs work that is the same everywhere and costs what real work costs: real shapes, and answer lengths with
the heavy tail that makes stragglers.  What the tokens say does not matter, so weights are random and every answer runs
to its cap (ignore_eos, greedy).  Lengths stand at even quantiles of their law, so a small job has the law's tail by
construction and not by luck; a fixed seed shuffles them.

Made once into the user's cache folder, under a name that hashes every parameter and RECIPE; a folder appears whole or
not at all.  `python benchmarks/work.py` makes all of them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers

from bgmpi.api import run_batch
from bgmpi.config import resolve
from bgmpi.io.demo_model import cache_folder
from bgmpi.report import Summary

#: Raise it when the same parameters come to mean other bytes.
RECIPE = 1
FIRST_TOKEN = 3
_WORTH_REPEATING = 1 << 20
_SPREAD = 0.02  # standard deviation of weights, as checkpoints of this size are initialised


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A sparse model of the Mixtral family, bfloat16."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head: int
    experts: int
    active: int
    inner: int
    vocab: int
    positions: int = 2048

    def config(self) -> dict[str, Any]:
        """Return the checkpoint's config.json."""
        return {
            "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "hidden_size": self.hidden,
            "num_hidden_layers": self.layers, "num_attention_heads": self.heads, "num_key_value_heads": self.kv_heads,
            "head_dim": self.head, "num_local_experts": self.experts, "num_experts_per_tok": self.active,
            "intermediate_size": self.inner, "vocab_size": self.vocab, "max_position_embeddings": self.positions,
            "rope_theta": 10000.0, "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False,
            "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2, "sliding_window": None,
        }

    def layer_shapes(self, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield name and shape of every tensor of a layer."""
        name, keys = f"model.layers.{layer}", self.kv_heads * self.head
        yield f"{name}.input_layernorm.weight", (self.hidden,)
        yield f"{name}.post_attention_layernorm.weight", (self.hidden,)
        yield f"{name}.self_attn.q_proj.weight", (self.heads * self.head, self.hidden)
        yield f"{name}.self_attn.k_proj.weight", (keys, self.hidden)
        yield f"{name}.self_attn.v_proj.weight", (keys, self.hidden)
        yield f"{name}.self_attn.o_proj.weight", (self.hidden, self.heads * self.head)
        yield f"{name}.block_sparse_moe.gate.weight", (self.experts, self.hidden)
        for expert in range(self.experts):
            one = f"{name}.block_sparse_moe.experts.{expert}"
            yield f"{one}.w1.weight", (self.inner, self.hidden)
            yield f"{one}.w3.weight", (self.inner, self.hidden)
            yield f"{one}.w2.weight", (self.hidden, self.inner)

    def outer_shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield name and shape of every tensor outside the layers."""
        yield "model.embed_tokens.weight", (self.vocab, self.hidden)
        yield "lm_head.weight", (self.vocab, self.hidden)
        yield "model.norm.weight", (self.hidden,)


@dataclass(frozen=True, slots=True)
class LargeShape(ModelShape):
    """A model of many gigabytes, made quickly: of matrices of one shape only `drawn` are drawn, and repeat."""

    drawn: int = 4


@dataclass(frozen=True, slots=True)
class Lengths:
    """How long prompts and answers are, in tokens.

    Prompts: uniform from `shortest` to `longest`.  Answers: log-normal with `median` up to `p95`, beyond it the
    logarithm grows linearly with the quantile to p95 * `p99_ratio` at 99 % and p95 * `most_ratio` at 100 %.
    """

    requests: int
    shortest: int
    longest: int
    median: float
    p95: float
    p99_ratio: float = 3.78
    most_ratio: float = 9.2
    seed: int = 20260101

    def prompts(self) -> NDArray[np.int64]:
        """Return the prompt lengths, int64 [requests]."""
        even = np.linspace(self.shortest, self.longest, self.requests).round().astype(np.int64)
        return np.random.default_rng(self.seed).permutation(even)

    def answers(self) -> NDArray[np.int64]:
        """Return the answer lengths, int64 [requests]."""
        even = answer_quantiles(self, np.linspace(0.0, 1.0, self.requests)).round().astype(np.int64)
        return np.random.default_rng(self.seed + 1).permutation(even.clip(min=1))


@dataclass(frozen=True, slots=True)
class Work:
    """One job: a model and its requests."""

    name: str
    shape: ModelShape
    lengths: Lengths


WORK_A = Work(
    "a",
    ModelShape(hidden=1024, layers=12, heads=16, kv_heads=4, head=64, experts=16, active=2, inner=1536, vocab=32000),
    Lengths(requests=128, shortest=32, longest=256, median=24, p95=96),
)
#: 8.7 GB of weights, 32 KiB of KV a token.
WORK_B = Work(
    "b",
    LargeShape(hidden=2048, layers=16, heads=16, kv_heads=4, head=128, experts=16, active=2, inner=2560, vocab=32000),
    Lengths(requests=704, shortest=64, longest=64, median=32, p95=32, p99_ratio=1.0, most_ratio=1.0),
)
SMALL = Work(
    "small",
    ModelShape(hidden=768, layers=6, heads=12, kv_heads=4, head=64, experts=16, active=2, inner=1024, vocab=32000),
    Lengths(requests=128, shortest=8, longest=48, median=16, p95=32, p99_ratio=1.5, most_ratio=2.0),
)


def answer_quantiles(lengths: Lengths, quantiles: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the answer lengths at `quantiles` of the law, in tokens."""
    normal = NormalDist()
    sigma = np.log(lengths.p95 / lengths.median) / normal.inv_cdf(0.95)
    body = [lengths.median * np.exp(sigma * normal.inv_cdf(max(q, 1e-9))) for q in np.minimum(quantiles, 0.95).tolist()]
    ends = np.log(lengths.p95 * np.array([1.0, lengths.p99_ratio, lengths.most_ratio]))
    tail = np.exp(np.interp(quantiles, [0.95, 0.99, 1.0], ends))
    return np.where(quantiles <= 0.95, body, tail)


def make_work(work: Work, cache: Path | None = None) -> tuple[Path, Path]:
    """Return the model folder and the request file of `work`, making what the cache lacks."""
    root = cache_folder(cache) / "benchmarks"
    root.mkdir(parents=True, exist_ok=True)
    model = root / f"model-{_hash(asdict(work.shape))}"
    if not model.exists():
        with tempfile.TemporaryDirectory(prefix=".making-", dir=root) as scratch:
            _publish(_write_model(work.shape, Path(scratch) / "model"), model)
    requests = root / f"requests-{_hash({**asdict(work.lengths), 'vocab': work.shape.vocab})}.jsonl"
    if not requests.exists():
        with tempfile.TemporaryDirectory(prefix=".making-", dir=root) as scratch:
            _publish(write_requests(work.lengths, work.shape.vocab, Path(scratch) / "requests"), requests)
    return model, requests


def write_requests(lengths: Lengths, vocab: int, path: Path) -> Path:
    """Write one greedy completion of random ids a line, each to run to its cap; return `path`."""
    draw = np.random.default_rng(lengths.seed + 2)
    with open(path, "w") as file:
        for number, (prompt, answer) in enumerate(zip(lengths.prompts(), lengths.answers(), strict=True)):
            body = {
                "prompt": draw.integers(FIRST_TOKEN, vocab, int(prompt)).tolist(), "max_tokens": int(answer),
                "temperature": 0, "ignore_eos": True,
            }
            one = {"custom_id": f"r{number}", "method": "POST", "url": "/v1/completions", "body": body}
            file.write(json.dumps(one) + "\n")
    return path


def run_job(model: Path, requests: Path, output: Path, threads: int, *words: str) -> Summary:
    """Run one job in this process, quietly, with further `words` of `bgmpi run`.  One rank."""
    quiet = "--overwrite", "--progress", "off", "--log-level", "warning"
    files = "--model", str(model), "--input-file", str(requests), "--output-file", str(output)
    return run_batch(resolve([*files, "--threads", str(threads), *quiet, *words], {}))


def _write_model(shape: ModelShape, folder: Path) -> Path:
    """Write a checkpoint in Hugging Face layout, one shard a layer so that little memory is needed."""
    folder.mkdir()
    draw = torch.Generator().manual_seed(20260101)
    shards = [dict(shape.outer_shapes()), *(dict(shape.layer_shapes(layer)) for layer in range(shape.layers))]
    random = _Repeated(shape.drawn) if isinstance(shape, LargeShape) else _random
    where, size = {}, 0
    for number, tensors in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        held = {name: random(dimensions, draw) for name, dimensions in tensors.items()}
        save_file(held, folder / file, metadata={"format": "pt"})
        where.update(dict.fromkeys(held, file))
        size += sum(tensor.nbytes for tensor in held.values())
    index = {"metadata": {"total_size": size}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(shape.config(), indent=1))
    _write_tokenizer(shape.vocab, folder / "tokenizer.json")
    return folder


def _random(dimensions: tuple[int, ...], draw: torch.Generator) -> torch.Tensor:
    if len(dimensions) == 1:
        return torch.ones(dimensions, dtype=torch.bfloat16)
    return torch.empty(dimensions, dtype=torch.bfloat16).normal_(0.0, _SPREAD, generator=draw)


class _Repeated:
    """Draws the first matrices of each shape and repeats them; small ones are always drawn."""

    def __init__(self, drawn: int) -> None:
        self._drawn = drawn
        self._held: dict[tuple[int, ...], list[torch.Tensor]] = {}
        self._asked: dict[tuple[int, ...], int] = {}

    def __call__(self, dimensions: tuple[int, ...], draw: torch.Generator) -> torch.Tensor:
        if prod(dimensions) < _WORTH_REPEATING:
            return _random(dimensions, draw)
        held = self._held.setdefault(dimensions, [])
        number = self._asked[dimensions] = self._asked.get(dimensions, -1) + 1
        if len(held) < self._drawn:
            held.append(_random(dimensions, draw))
        return held[number % self._drawn].clone()  # one file may not hold the same memory twice


def _write_tokenizer(vocab: int, path: Path) -> None:
    """Write a tokenizer in which every id is a word of its own."""
    words = {"<unk>": 0, "<s>": 1, "</s>": 2, **{f"w{number}": number for number in range(FIRST_TOKEN, vocab)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.save(str(path))


def _publish(made: Path, target: Path) -> None:
    """Rename `made` to `target`; where another process was first, its equal one stays."""
    try:
        made.rename(target)
    except OSError:
        if not target.exists():
            raise


def _hash(parameters: dict[str, Any]) -> str:
    named = json.dumps({"recipe": RECIPE, **parameters}, sort_keys=True)
    return hashlib.sha256(named.encode()).hexdigest()[:12]


def main() -> None:
    """Make the works and say what they hold."""
    parser = argparse.ArgumentParser(description="Make the benchmarks' models and requests in the cache folder.")
    parser.add_argument("--quick", action="store_true", help="only the small one")
    parser.add_argument("--large", action="store_true", help="also the one of 9 GB")
    asked = parser.parse_args()
    for work in (SMALL,) if asked.quick else (SMALL, WORK_A, *((WORK_B,) if asked.large else ())):
        model, requests = make_work(work)
        size = sum(file.stat().st_size for file in model.iterdir())
        answers = work.lengths.answers()
        p50, p95, p99 = np.percentile(answers, (50, 95, 99))
        print(
            f"work {work.name}: {size / 1e9:.2f} GB in {model.name}; {requests.name}: {len(answers)} requests, "
            f"{work.lengths.prompts().sum()} prompt tokens, {answers.sum()} answer tokens "
            f"(median {p50:.0f}, P95 {p95:.0f}, P99 {p99:.0f}, most {answers.max()})"
        )


if __name__ == "__main__":
    main()
