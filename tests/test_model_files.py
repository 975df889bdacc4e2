"""A model folder is opened without being read, and its names, shapes and packing are settled before any weight is."""

from __future__ import annotations

import json
from pathlib import Path

import checkpoints
import pytest
import torch
from safetensors.torch import save_file

from bgmpi.errors import ExitCode, InputError, MissingError
from bgmpi.families import read_architecture
from bgmpi.io.model_files import check_files, open_dummy_files, open_model_files, unpack_blocks

CONFIG = {
    "model_type": "llama", "vocab_size": 16, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "intermediate_size": 12, "max_position_embeddings": 32,
}
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def write(folder: Path, tensors: dict[str, torch.Tensor], config: dict | None = None, shards: int = 1) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config or CONFIG))
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return folder
    places = {}
    for number in range(shards):
        name = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        part = dict(sorted(tensors.items())[number::shards])
        save_file(part, folder / name)
        places |= dict.fromkeys(part, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return folder


def llama() -> dict[str, torch.Tensor]:
    from bgmpi.tensor_names import expected_tensors

    return {name: torch.randn(shape) for name, shape in expected_tensors(read_architecture(CONFIG)).items()}


@pytest.mark.parametrize("shards", [1, 3])
def test_tensors_come_out_as_they_went_in(tmp_path, shards):
    tensors = llama()
    files = open_model_files(write(tmp_path / "m", tensors, shards=shards))
    assert sorted(files.names()) == sorted(tensors)
    assert all(torch.equal(files.tensor(name), tensor) for name, tensor in tensors.items())
    assert all(files.shape(name) == tuple(tensor.shape) for name, tensor in tensors.items())
    check_files(read_architecture(files.config), files)
    assert files.notes == [] and files.generation_config == {}


def test_a_tensor_is_mapped_not_read(tmp_path):
    files = open_model_files(write(tmp_path / "m", {"big": torch.ones(64, 1 << 18)}))

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    before = resident()
    tensor = files.tensor("big")
    assert resident() - before < 16 << 20
    assert float(tensor[3, 5]) == 1.0


def test_the_generation_config_is_read_where_there_is_one(tmp_path):
    folder = write(tmp_path / "m", llama())
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    assert open_model_files(folder).generation_config == {"eos_token_id": [1, 2]}


def test_the_hash_follows_the_content(tmp_path):
    tensors = llama()
    first = open_model_files(write(tmp_path / "a", tensors)).index_hash
    assert open_model_files(write(tmp_path / "b", tensors)).index_hash == first
    other = {name: tensor + 1 for name, tensor in tensors.items()}
    assert open_model_files(write(tmp_path / "c", other)).index_hash != first
    assert open_model_files(write(tmp_path / "d", tensors, CONFIG | {"rope_theta": 5.0})).index_hash != first
    assert len(first) == 64


def test_a_folder_or_config_that_is_not_there_is_missing(tmp_path):
    with pytest.raises(MissingError, match="model folder"):
        open_model_files(tmp_path / "none")
    with pytest.raises(MissingError, match=r"config\.json"):
        open_model_files(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", '"text"', "\ufeff{}x"])
def test_a_malformed_config_is_malformed_input(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(InputError, match=r"config\.json"):
        open_model_files(tmp_path)


@pytest.mark.parametrize("text", ["{}", '{"weight_map": {}}', '{"weight_map": {"a": 1}}', "nothing"])
def test_a_malformed_index_is_malformed_input(tmp_path, text):
    folder = write(tmp_path / "m", llama(), shards=2)
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(InputError, match="index"):
        open_model_files(folder)


def test_other_weight_files_are_named_when_none_is_known(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(MissingError, match=r"pytorch_model\.bin"):
        open_model_files(tmp_path)


@pytest.mark.parametrize(("change", "told"), [
    (lambda held: held.pop("model.norm.weight"), "1 missing: model.norm.weight"),
    (lambda held: held.update(extra=torch.ones(2)), "1 unused: extra"),
    (lambda held: held.update({"model.norm.weight": torch.ones(9)}), r"model.norm.weight expected \[8\], got \[9\]"),
])
def test_every_difference_from_the_config_is_named(tmp_path, change, told):
    tensors = llama()
    change(tensors)
    files = open_model_files(write(tmp_path / "m", tensors))
    with pytest.raises(InputError, match=told) as caught:
        check_files(read_architecture(files.config), files)
    assert caught.value.exit_code == ExitCode.INPUT


def test_what_is_rightly_unused_is_noted_once(tmp_path):
    config = CONFIG | {"tie_word_embeddings": True}
    files = open_model_files(write(tmp_path / "m", llama(), config))
    for _ in range(2):
        check_files(read_architecture(files.config), files)
    assert len(files.notes) == 1 and "tied" in files.notes[0]


def packed(weight: torch.Tensor, rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pack float32 [N, K] block by block -> (fp8, scales, what they mean in float32)."""
    scale = torch.empty(-(-weight.shape[0] // rows), -(-weight.shape[1] // columns))
    small, meant = torch.empty_like(weight, dtype=torch.float8_e4m3fn), torch.empty_like(weight)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            at = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
            scale[i, j] = weight[at].abs().max() / 448
            small[at] = (weight[at] / scale[i, j]).to(torch.float8_e4m3fn)
            meant[at] = small[at].float() * scale[i, j]
    return small, scale, meant


@pytest.mark.parametrize("shape", [(256, 128), (320, 200), (5, 3), (128, 129)])
def test_c53_blocks_are_unpacked_also_where_the_edge_cuts_them(shape):
    small, scale, meant = packed(torch.randn(shape), 128, 128)
    assert torch.equal(unpack_blocks(small, scale, (128, 128), "w"), meant)


def test_c53_an_fp8_checkpoint_with_cut_blocks_equals_its_unpacked_twin_on_any_ranks(tmp_path):
    import checkpoints
    from paged_forward import logits_of, open_model, random_ids
    from safetensors.torch import load_file

    from bgmpi.kernels import open_backend
    from bgmpi.model import Model

    plain = checkpoints.make("mixtral", tmp_path / "plain", intermediate_size=320, num_local_experts=4)
    tensors, config = load_file(plain / "model.safetensors"), json.loads((plain / "config.json").read_text())
    small: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if ".experts." in name or "_proj." in name:
            small[name], small[f"{name}_scale_inv"], tensors[name] = packed(tensor, 128, 128)
        else:
            small[name] = tensor
    twin = write(tmp_path / "twin", tensors, config)
    fp8 = write(tmp_path / "fp8", small, config | {"quantization_config": FP8})
    ids = random_ids(11)
    assert torch.equal(logits_of(open_model(fp8), ids), logits_of(open_model(twin), ids))
    files = open_model_files(fp8)
    for rank in range(2):
        Model(read_architecture(files.config), files, open_backend("cpu", None, 1), torch.float32, rank, 2)


def test_packed_tensors_need_scales_that_fit(tmp_path):
    small, scale, _ = packed(torch.randn(256, 128), 128, 128)
    config = CONFIG | {"quantization_config": FP8}
    with pytest.raises(InputError, match="w is fp8 but has no w_scale_inv"):
        open_model_files(write(tmp_path / "a", {"w": small}, config))
    files = open_model_files(write(tmp_path / "b", {"w": small, "w_scale_inv": scale[:1].clone()}, config))
    with pytest.raises(InputError, match=r"w_scale_inv: expected shape \[2, 1\].*got \[1, 1\]"):
        files.tensor("w")


def test_a_scale_without_its_packed_tensor_is_a_tensor_like_any_other(tmp_path):
    files = open_model_files(write(tmp_path / "m", llama() | {"model.norm.weight_scale_inv": torch.ones(1)}))
    with pytest.raises(InputError, match=r"1 unused: model\.norm\.weight_scale_inv"):
        check_files(read_architecture(files.config), files)


def test_dummy_weights_need_no_file_and_are_the_same_on_every_rank(tmp_path: Path) -> None:
    checkpoints.make("mixtral", tmp_path)
    for file in tmp_path.glob("*.safetensors*"):
        file.unlink()
    shapes = {"model.norm.weight": (8,), "a.weight": (4, 8), "b.weight": (4, 8)}
    first, second = open_dummy_files(tmp_path), open_dummy_files(tmp_path)
    for files in (first, second):
        files.promise(shapes)
    assert torch.equal(first.read("a.weight"), second.read("a.weight"))
    assert not torch.equal(first.read("a.weight"), first.read("b.weight"))
    assert torch.equal(first.read("model.norm.weight"), torch.ones(8))
