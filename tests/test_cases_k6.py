"""Public faults of kind K6: the checkpoint folder (C46 to C50)."""

from __future__ import annotations

import json
from pathlib import Path

import checkpoints
import pytest
import torch
from paged_forward import logits_of, open_model, random_ids
from safetensors.torch import load_file, save_file

from bgmpi.errors import ExitCode, InputError, MissingError
from bgmpi.families import read_architecture
from bgmpi.io.model_files import INDEX, ModelFiles, check_files, open_model_files
from bgmpi.kernels import open_backend
from bgmpi.model import Model


def shards_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("model-*.safetensors"))


def checked(folder: Path) -> ModelFiles:
    files = open_model_files(folder)
    check_files(read_architecture(files.config), files)
    return files


def edit_weights(folder: Path, **changes: torch.Tensor) -> Path:
    tensors = load_file(folder / "model.safetensors") | {name.replace("__", "."): t for name, t in changes.items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_c46_a_shard_that_is_not_there_is_missing_by_name(tmp_path):
    folder = checkpoints.make("mixtral", tmp_path, shards=3)
    assert len(shards_of(folder)) >= 3
    lost = shards_of(folder)[1]
    lost.unlink()
    with pytest.raises(MissingError, match=lost.name) as caught:
        open_model_files(folder)
    assert caught.value.exit_code == ExitCode.MISSING


def test_c46_an_empty_folder_is_missing_its_config(tmp_path):
    with pytest.raises(MissingError, match=r"config\.json"):
        open_model_files(tmp_path)


@pytest.mark.parametrize("share", [0.5, 0.0001, 0.0])
def test_c46_a_shard_cut_short_is_malformed_by_name(tmp_path, share):
    folder = checkpoints.make("mixtral", tmp_path, shards=3)
    cut = shards_of(folder)[1]
    cut.write_bytes(cut.read_bytes()[: int(share * cut.stat().st_size)])
    with pytest.raises(InputError, match=cut.name) as caught:
        open_model_files(folder)
    assert caught.value.exit_code == ExitCode.INPUT


def test_c47_a_stray_file_is_named_and_not_used(tmp_path):
    folder = checkpoints.make("llama", tmp_path, shards=2)
    wanted = logits_of(open_model(folder), random_ids(7))
    save_file({"model.norm.weight": torch.full((64,), 9.0)}, folder / "model-00009-of-00009.safetensors")
    files = checked(folder)
    assert len(files.notes) == 1 and "model-00009-of-00009.safetensors" in files.notes[0]
    assert torch.equal(logits_of(open_model(folder), random_ids(7)), wanted)


def test_c47_a_renamed_shard_is_missing_and_its_new_name_stray(tmp_path):
    folder = checkpoints.make("llama", tmp_path, shards=2)
    shard = shards_of(folder)[0]
    shard.rename(folder / "other.safetensors")
    with pytest.raises(MissingError, match=shard.name):
        open_model_files(folder)


def test_c47_an_index_entry_that_its_shard_lacks_is_malformed(tmp_path):
    folder = checkpoints.make("llama", tmp_path, shards=2)
    index = json.loads((folder / INDEX).read_text())
    first, second = (path.name for path in shards_of(folder)[:2])
    name = next(name for name, shard in index["weight_map"].items() if shard == first)
    index["weight_map"][name] = second
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(InputError, match=name):
        open_model_files(folder)


def test_c47_a_tensor_that_the_index_does_not_name_is_noted_and_not_used(tmp_path):
    folder = checkpoints.make("llama", tmp_path, shards=2)
    shard = shards_of(folder)[0]
    save_file(load_file(shard) | {"surplus": torch.ones(3)}, shard)
    files = checked(folder)
    assert any("surplus" in note for note in files.notes) and "surplus" not in files.names()


@pytest.mark.parametrize("key", [1, None])
def test_c48_a_layer_that_predicts_ahead_is_ignored_with_one_note(tmp_path, key):
    folder = checkpoints.make("deepseek_v3", tmp_path)
    wanted = logits_of(open_model(folder), random_ids(7))
    edit_weights(folder, model__layers__4__eh_proj__weight=torch.ones(64, 128),
                 model__layers__4__mlp__gate__weight=torch.ones(16, 64))
    checkpoints.edit_config(folder, num_nextn_predict_layers=key)
    files = checked(folder)
    assert len(files.notes) == 1 and "2 tensors not used" in files.notes[0]
    assert torch.equal(logits_of(open_model(folder), random_ids(7)), wanted)


def test_c48_with_62_layers_layer_61_is_kept(tmp_path):
    folder = checkpoints.make(
        "deepseek_v3", tmp_path, num_hidden_layers=62, n_routed_experts=4, n_group=1, topk_group=1,
        num_experts_per_tok=2, hidden_size=16, num_attention_heads=1, num_key_value_heads=1, moe_intermediate_size=8,
        intermediate_size=8, vocab_size=32,
    )
    model = open_model(folder)
    assert model.layers == 62 and checked(folder).notes == []
    wanted = logits_of(model, random_ids(3, 32))
    edit_weights(folder, **{"model.layers.61.mlp.shared_experts.down_proj.weight": torch.ones(16, 8)})
    assert not torch.equal(logits_of(open_model(folder), random_ids(3, 32)), wanted)


@pytest.mark.parametrize(("family", "name", "bad"), [
    ("deepseek_v3", "model.layers.2.mlp.gate.e_score_correction_bias", float("nan")),
    ("llama", "lm_head.weight", float("inf")),
    ("llama", "model.embed_tokens.weight", -float("inf")),
])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_c49_a_number_that_is_not_finite_is_refused_by_tensor_and_count(tmp_path, family, name, bad, dtype):
    folder = checkpoints.make(family, tmp_path, dtype=dtype)
    tensor = load_file(folder / "model.safetensors")[name]
    tensor.view(-1)[3] = bad
    edit_weights(folder, **{name: tensor})
    with pytest.raises(InputError, match=f"{name} has 1 of {tensor.numel()} numbers") as caught:
        open_model(folder)
    assert caught.value.exit_code == ExitCode.INPUT
    files = open_model_files(folder)
    Model(read_architecture(files.config), files, open_backend("cpu", None, 1), torch.float32, 0, 1, True)


def test_c50_an_empty_tensor_is_noted_and_does_no_harm(tmp_path):
    folder = checkpoints.make("llama", tmp_path)
    wanted = logits_of(open_model(folder), random_ids(7))
    edit_weights(folder, extra=torch.empty(0))
    files = checked(folder)
    assert len(files.notes) == 1 and "extra" in files.notes[0]
    assert torch.equal(logits_of(open_model(folder), random_ids(7)), wanted)
