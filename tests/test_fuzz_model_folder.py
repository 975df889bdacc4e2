"""Any bytes as a model folder: it opens, or is refused with a sentence that names file and tensor, before memory is
allocated in proportion to what it claims; and nothing outside of the folder is ever read."""

from __future__ import annotations

import copy
import json
import resource
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import checkpoints
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from odd_json import damaged
from tokenizers_for_tests import make_tokenizer

from bgmpi.attention import rope_frequencies
from bgmpi.config import Config
from bgmpi.errors import ExitCode, InputError, MissingError
from bgmpi.families import read_architecture
from bgmpi.io.model_files import INDEX, ModelFiles, check_files, open_model_files
from bgmpi.io.tokenizer import open_tokenizer
from bgmpi.tensor_names import expected_tensors

CONFIG = {
    "model_type": "llama", "vocab_size": 16, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "intermediate_size": 12, "max_position_embeddings": 32,
}
SHAPES = expected_tensors(read_architecture(CONFIG))
WIDTH = {"F32": 4, "BF16": 2, "F16": 2, "F64": 8, "I64": 8, "U8": 1, "BOOL": 1, "F8_E4M3": 1}
#: Bytes of address space that opening a folder of a few kilobytes may take; a lie of gigabytes runs into it.
ROOM = 1 << 30


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("model")


@pytest.fixture(autouse=True)
def little_room() -> Iterator[None]:
    """Let whatever allocates by a lie fail at once."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def header(shapes: dict[str, tuple[int, ...]] = SHAPES, dtype: str = "F32") -> dict[str, Any]:
    """Return what a safetensors file says of these tensors, laid end to end."""
    told, end = {}, 0
    for name, shape in shapes.items():
        size = int(np.prod(shape)) * WIDTH[dtype]
        told[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    return told


def file_of(told: Any, data: bytes | None = None, length: int | None = None) -> bytes:
    """Return a safetensors file with that header."""
    text = told if isinstance(told, bytes) else json.dumps(told).encode()
    if data is None:
        data = bytes(max((one["data_offsets"][1] for one in told.values()), default=0))
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def write(folder: Path, weights: dict[str, bytes], index: bytes | None, config: Any = CONFIG) -> Path:
    for old in folder.iterdir():
        old.unlink()
    (folder / "config.json").write_text(json.dumps(config))
    for name, data in weights.items():
        (folder / name).write_bytes(data)
    if index is not None:
        (folder / INDEX).write_bytes(index)
    return folder


def opened(folder: Path) -> ModelFiles:
    """Open a folder as a job does; every tensor of one that is accepted can be read whole and lies in its file."""
    files = open_model_files(folder)
    check_files(read_architecture(files.config), files)
    for name in SHAPES:
        assert files.tensor(name).numel() == np.prod(SHAPES[name])
        stored = files.stored(name)
        if stored is not None:
            assert stored.path.parent == folder and stored.offset >= 0
            assert stored.offset + stored.size <= stored.path.stat().st_size
    return files


def refused(folder: Path) -> str:
    """Open a folder that must be refused; return the sentence."""
    with pytest.raises((InputError, MissingError)) as caught:
        opened(folder)
    assert caught.value.exit_code in (ExitCode.INPUT, ExitCode.MISSING)
    return str(caught.value)


def attempt(folder: Path) -> None:
    """Open a folder that may be anything."""
    try:
        opened(folder)
    except (InputError, MissingError) as error:
        assert str(folder) in str(error) or "config.json" in str(error)


# --- weights ----------------------------------------------------------------------------------------------------------

LIES: dict[str, dict[str, Any]] = {
    "overlapping": {"data_offsets": [0, 512]}, "negative": {"data_offsets": [-4, 508]},
    "backwards": {"data_offsets": [512, 0]}, "out of the file": {"data_offsets": [1 << 40, (1 << 40) + 512]},
    "beyond 64 bits": {"data_offsets": [1 << 70, 1 << 71]}, "not numbers": {"data_offsets": ["0", "512"]},
    "one offset": {"data_offsets": [0]}, "no offsets": {"data_offsets": None},
    "a huge shape": {"shape": [1 << 40, 1 << 20]}, "a shape that overflows": {"shape": [1 << 62, 4]},
    "a negative shape": {"shape": [-8]}, "another shape": {"shape": [2, 4]}, "a flat shape": {"shape": []},
    "another dtype": {"dtype": "F16"}, "no dtype of this world": {"dtype": "F7"}, "dtype null": {"dtype": None},
    "empty": {"shape": [0], "data_offsets": [544, 544]},
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("indexed", [False, True])
def test_a_header_that_lies_is_refused_by_file_or_tensor(folder: Path, lie: str, indexed: bool) -> None:
    told = header()
    data = file_of(told)[8 + len(json.dumps(told)) :]
    told["model.norm.weight"] |= LIES[lie]
    name = "a.safetensors" if indexed else "model.safetensors"
    index = json.dumps({"weight_map": dict.fromkeys(told, name)}).encode() if indexed else None
    sentence = refused(write(folder, {name: file_of(told, data)}, index))
    assert name in sentence or "model.norm.weight" in sentence


@pytest.mark.parametrize("length", [0, 1, 7, 1 << 20, 1 << 40, (1 << 64) - 1])
def test_a_header_length_that_lies_is_refused_by_file(folder: Path, length: int) -> None:
    sentence = refused(write(folder, {"model.safetensors": file_of(header(), length=length)}, None))
    assert "model.safetensors" in sentence and "fetch it again" in sentence


@pytest.mark.parametrize("dtype", ["I64", "U8", "BOOL"])
def test_weights_that_are_no_fractions_are_refused_by_name(folder: Path, dtype: str) -> None:
    told = header(dtype=dtype)
    sentence = refused(write(folder, {"model.safetensors": file_of(told)}, None))
    assert dtype in sentence and "model.embed_tokens.weight" in sentence


OUTSIDE = ("../secret.safetensors", "/etc/passwd", "", ".", "..", "a/../../secret.safetensors", "x\0y", "n" * 300,
           "./model.safetensors", "sub/model.safetensors", "\ud800")  # fmt: skip


@pytest.mark.parametrize("place", OUTSIDE, ids=range(len(OUTSIDE)))
def test_an_index_reads_nothing_outside_of_its_folder(tmp_path: Path, folder: Path, place: str) -> None:
    (folder.parent / "secret.safetensors").write_bytes(file_of(header()))
    told = {"weight_map": dict.fromkeys(SHAPES, "a.safetensors") | {"model.norm.weight": place}}
    sentence = refused(write(folder, {"a.safetensors": file_of(header())}, json.dumps(told).encode()))
    assert INDEX in sentence
    (folder.parent / "secret.safetensors").unlink()


def test_a_link_in_the_folder_is_followed_as_caches_make_them(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(file_of(header()))
    write(folder, {}, None)
    (folder / "model.safetensors").symlink_to(tmp_path / "blob")
    assert sorted(open_model_files(folder).names()) == sorted(SHAPES)


INDICES = (b"", b"[]", b"null", b"{", b'{"weight_map": []}', b'{"weight_map": {}}', b'{"weight_map": {"a": 1}}',
           b'{"weight_map": {"a": ["x"]}}', b"\xff\xfe", b"[" * 100_000, b'{"a":' * 100_000, b"9" * 5000,
           b'{"weight_map": null}', b'{"weight_map": {"model.norm.weight": "config.json"}}')  # fmt: skip


@pytest.mark.parametrize("index", INDICES, ids=range(len(INDICES)))
def test_an_index_of_another_kind_is_refused_by_name(folder: Path, index: bytes) -> None:
    sentence = refused(write(folder, {"a.safetensors": file_of(header())}, index))
    assert INDEX in sentence or "config.json" in sentence


@given(data=st.data())
@settings(max_examples=300)
def test_damaged_weights_and_indices_are_opened_or_refused(folder: Path, data: st.DataObject) -> None:
    told = header()
    weights = file_of(told)
    index = json.dumps({"metadata": {"total_size": 9}, "weight_map": dict.fromkeys(told, "a.safetensors")}).encode()
    match data.draw(st.integers(0, 3)):
        case 0:
            index = data.draw(damaged(index))
        case 1:
            weights = data.draw(damaged(weights))
        case 2:
            text = data.draw(damaged(json.dumps(told).encode()))
            weights = file_of(text, weights[8 + len(json.dumps(told)) :])
        case _:
            one = told[data.draw(st.sampled_from(sorted(told)))]
            key = data.draw(st.sampled_from(sorted(one)))
            one[key] = data.draw(st.one_of(st.lists(st.integers(-2, 700), max_size=3), st.sampled_from(sorted(WIDTH)),
                                           st.integers(), st.none()))
            weights = file_of(json.dumps(told).encode(), bytes(1000))
    attempt(write(folder, {"a.safetensors": weights}, index))


@pytest.mark.parametrize("packing", [{"weight_block_size": [0, 0]}, {"weight_block_size": [128]}, {}, [], "fp8",
                                     {"weight_block_size": [128, 128], "quant_method": "fp8"}])
def test_packed_weights_without_scales_that_fit_are_refused(folder: Path, packing: Any) -> None:
    config = CONFIG | {"quantization_config": packing}
    refused(write(folder, {"model.safetensors": file_of(header(dtype="F8_E4M3"))}, None, config))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth", "consolidated.00.pth", "model.ckpt"])
def test_a_folder_of_pickles_is_refused_saying_why(folder: Path, name: str) -> None:
    sentence = refused(write(folder, {name: b"\x80\x02."}, None))
    assert name in sentence and "run code" in sentence and "safetensors" in sentence


# --- configs ----------------------------------------------------------------------------------------------------------

ODD = (None, True, -1, 0, 1, 2, 3, 10**9, 10**400, 0.5, -0.0, 1e308, float("nan"), float("inf"), "", "x", "128", [],
       {}, [1], [[]], {"a": 1}, [None] * 3, "full_attention")  # fmt: skip
ROPES = ({"type": "linear"}, {"rope_type": "yarn", "factor": 4.0}, {"rope_type": "llama3", "factor": 8.0,
         "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64})  # fmt: skip
ROPE_KEYS = ("factor", "rope_theta", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor",
             "mscale", "mscale_all_dim", "beta_fast", "beta_slow", "attention_factor", "type", "rope_type",
             "truncate")  # fmt: skip
MORE = ("layer_types", "mlp_only_layers", "architectures", "sliding_window", "rope_theta", "torch_dtype",
        "quantization_config", "rope_scaling", "model_type", "original_max_position_embeddings", "max_window_layers",
        "use_sliding_window", "n_group", "topk_group", "scoring_func", "first_k_dense_replace", "head_dim")  # fmt: skip


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    """Draw a config of some family with a few odd values."""
    family = draw(st.sampled_from(checkpoints.FAMILIES))
    config: dict[str, Any] = copy.deepcopy(
        {"model_type": family} | checkpoints._BASE | checkpoints._OWN[family] | {"torch_dtype": "bfloat16"})
    if draw(st.booleans()):
        config["rope_scaling"] = draw(st.sampled_from(ROPES)) | {}
        if draw(st.booleans()):
            config["rope_scaling"][draw(st.sampled_from(ROPE_KEYS))] = draw(st.sampled_from(ODD))
    for key in draw(st.lists(st.sampled_from((*sorted(config), *MORE)), max_size=2)):
        config[key] = draw(st.sampled_from(ODD))
    return config


@given(config=configs())
@settings(max_examples=400)
@example(config=CONFIG | {"num_hidden_layers": 2**31 - 1})
@example(config={"model_type": "mixtral"} | checkpoints._BASE | {"num_local_experts": 2**31 - 1})
@example(config=CONFIG | {"architectures": 3})
@example(config=CONFIG | {"rope_theta": 10**400})
def test_any_config_is_an_architecture_or_refused_by_key(config: dict[str, Any]) -> None:
    try:
        arch = read_architecture(config)
    except InputError as error:
        assert str(error).startswith("config.json")
        return
    assert len(expected_tensors(arch)) < 1_000_000
    if arch.rope.width < 1 << 20:
        assert rope_frequencies(arch.rope).isfinite().all()


@given(found=st.dictionaries(st.sampled_from(["temperature", "top_p", "top_k", "min_p", "repetition_penalty",
                                              "eos_token_id"]), st.sampled_from(ODD)))
def test_any_generation_config_gives_defaults_or_is_refused_by_key(found: dict[str, Any]) -> None:
    try:
        config = Config().with_model_defaults(found)
    except InputError as error:
        assert str(error).startswith("generation_config.json: ")
        return
    assert config.temperature is not None and config.temperature >= 0


# --- tokenizers -------------------------------------------------------------------------------------------------------


@given(data=st.data())
@settings(max_examples=40)
def test_a_damaged_tokenizer_is_opened_or_refused(folder: Path, data: st.DataObject) -> None:
    for old in folder.iterdir():
        old.unlink()
    make_tokenizer(folder)
    name = data.draw(st.sampled_from(["tokenizer.json", "tokenizer_config.json", "tokenizer_config.json"]))
    path = folder / name
    if data.draw(st.booleans()):
        path.write_bytes(data.draw(damaged(path.read_bytes())))
    else:
        settings_ = json.loads((folder / "tokenizer_config.json").read_text())
        more = ("add_bos_token", "bos_token", "additional_special_tokens")
        changed = {data.draw(st.sampled_from([*sorted(settings_), *more])): data.draw(st.sampled_from(ODD))}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings_ | changed))
    try:
        open_tokenizer(folder).encode("AB CD")
    except InputError as error:
        assert str(folder) in str(error) or "chat template" in str(error)
