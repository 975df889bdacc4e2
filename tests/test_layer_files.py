"""Tensors come out of a folder bit by bit as they went in, however they lie in their files, whatever they become, and
whichever way the file system lets them be read."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from bgmpi.errors import InputError
from bgmpi.io import layer_files
from bgmpi.io.layer_files import BLOCK, LayerFiles, aligned_buffer
from bgmpi.io.model_files import ModelFiles, open_dummy_files, open_model_files

NAMES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


def write(folder: Path, tensors: dict[str, torch.Tensor], shift: int = 0, name: str = "model.safetensors") -> Path:
    """Write a file whose first tensor begins `shift` bytes behind a block's beginning; tensors follow without gaps."""
    header: dict[str, object] = {}
    end = 0
    for key, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        header[key] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [end, end + size]}
        end += size
    words = json.dumps(header).encode()
    words += b" " * ((shift - 8 - len(words)) % BLOCK)
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    with (folder / name).open("wb") as file:
        file.write(struct.pack("<Q", len(words)) + words)
        for tensor in tensors.values():
            file.write(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return folder


def random(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def read(files: ModelFiles, names: list[str], dtype: torch.dtype, **options) -> torch.Tensor:
    """Read into a place between two fences that must stay."""
    layer = LayerFiles(files, dtype, **{"direct": True, **options})
    room = layer.room(names)
    buffer = aligned_buffer(room + 2 * BLOCK)
    buffer[:] = 7
    got = layer.read(names, buffer[BLOCK : BLOCK + room], allow_nonfinite=False)
    assert np.all(buffer[:BLOCK] == 7) and np.all(buffer[BLOCK + room :] == 7), "written outside its place"
    assert layer.seconds > 0
    if all(files.stored(name) is not None for name in names):
        assert layer.bytes_read == sum(files.stored(name).size for name in names)
    inside = got.data_ptr() - buffer.ctypes.data
    assert inside >= BLOCK and inside + got.numel() * got.element_size() <= BLOCK + room
    layer.close()
    return got.clone()


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("shift", [0, 2, 8, 1000, 4095, 3])
def test_a_tensor_is_read_wherever_it_begins_and_as_whatever_it_is_wanted(tmp_path, shift, dtype, direct):
    tensors = {"a": random(33, 65), "b": random(7, 65, seed=1)}
    files = open_model_files(write(tmp_path / "m", tensors, shift))
    for name, tensor in tensors.items():
        assert torch.equal(read(files, [name], dtype, direct=direct), tensor.to(dtype))


@pytest.mark.parametrize("rows", [(4, 2, 2), (3, 5, 1), (64, 32, 32), (1, 1, 1)])
@pytest.mark.parametrize("width", [2048, 512, 65])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_tensors_are_joined_by_rows_in_the_order_asked_for(tmp_path, rows, width, dtype):
    tensors = {f"t{place}": random(count, width, seed=place) for place, count in enumerate(rows)}
    files = open_model_files(write(tmp_path / "m", tensors, 24))
    for order in (["t0", "t1", "t2"], ["t2", "t0", "t1"]):
        wanted = torch.cat([tensors[name] for name in order]).to(dtype)
        assert torch.equal(read(files, order, dtype), wanted)


def test_tensors_of_several_shards_and_dtypes_are_joined(tmp_path):
    folder = tmp_path / "m"
    parts = {"x": random(5, 96), "y": random(3, 96, dtype=torch.float32, seed=2), "z": random(2, 96, seed=3)}
    for place, (name, tensor) in enumerate(parts.items()):
        write(folder, {name: tensor}, 8 * place, f"{name}.safetensors")
    places = {name: f"{name}.safetensors" for name in parts}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    files = open_model_files(folder)
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(read(files, list(parts), dtype), torch.cat([one.to(dtype) for one in parts.values()]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shift", [16, 17])
def test_tensors_larger_than_a_request_are_read_in_several(tmp_path, monkeypatch, shift, dtype):
    monkeypatch.setattr(layer_files, "REQUEST", 4 * BLOCK)
    tensor = random(61, 1031)
    files = open_model_files(write(tmp_path / "m", {"a": tensor}, shift))
    assert torch.equal(read(files, ["a"], dtype), tensor.to(dtype))


def test_a_vector_keeps_its_shape(tmp_path):
    files = open_model_files(write(tmp_path / "m", {"a": random(100)}))
    assert read(files, ["a"], torch.bfloat16).shape == (100,)


def test_reading_past_the_page_cache_is_told_apart_from_mapping(tmp_path, monkeypatch):
    files = open_model_files(write(tmp_path / "m", {"a": random(9, 64)}, 40))
    ways = {}
    real = os.open

    def refuse(path, flags, *rest, **more):
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return real(path, flags, *rest, **more)

    for way in ("as it is", "refused at opening", "refused at reading"):
        with monkeypatch.context() as patch:
            if way == "refused at opening":
                patch.setattr(os, "open", refuse)
            elif way == "refused at reading":
                patch.setattr(os, "preadv", lambda *_: (_ for _ in ()).throw(OSError(22, "Invalid argument")))
            layer = LayerFiles(files, torch.bfloat16)
            place = aligned_buffer(layer.room(["a"]))
            assert torch.equal(layer.read(["a"], place), files.tensor("a"))
            ways[way] = layer.direct
            layer.close()
    assert not ways["refused at opening"] and not ways["refused at reading"]


def test_packed_and_made_up_weights_are_read_too(tmp_path):
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"quantization_config": {"weight_block_size": [16, 16]}}))
    packed = random(32, 48, dtype=torch.float32).to(torch.float8_e4m3fn)
    save_file({"w": packed, "w_scale_inv": torch.rand(2, 3) + 0.5}, folder / "model.safetensors")
    files = open_model_files(folder)
    assert torch.equal(read(files, ["w"], torch.bfloat16), files.tensor("w").bfloat16())
    dummy = open_dummy_files(folder)
    dummy.promise({"p": (4, 24), "q": (2, 24)})
    wanted = torch.cat([dummy.tensor("p"), dummy.tensor("q")])
    assert torch.equal(read(dummy, ["p", "q"], torch.float32), wanted)


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_file_cut_while_the_job_runs_is_named(tmp_path, direct, dtype):
    folder = write(tmp_path / "m", {"a": random(64, 512), "b": random(64, 512)}, 8)
    files = open_model_files(folder)
    files.stored("a")
    os.truncate(folder / "model.safetensors", 70_000)
    with pytest.raises(InputError, match=r"model\.safetensors: it ends at byte .* cut while the job ran"):
        read(files, ["b"], dtype, direct=direct)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_disk_that_fails_is_named_with_the_file(tmp_path, monkeypatch, dtype):
    files = open_model_files(write(tmp_path / "m", {"a": random(64, 512)}, 8))
    real = os.preadv

    def fail(handle, buffers, offset):
        if offset:
            raise OSError(5, "Input/output error")
        return real(handle, buffers, offset)

    layer = LayerFiles(files, dtype)
    place = aligned_buffer(layer.room(["a"]))
    monkeypatch.setattr(layer_files, "REQUEST", BLOCK)
    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(InputError, match=r"model\.safetensors: reading weights at byte .*Input/output error"):
        layer.read(["a"], place)


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bad_numbers_are_found_when_looked_for(tmp_path, direct, dtype):
    tensor = random(64, 512)
    tensor[63, 511] = torch.nan
    files = open_model_files(write(tmp_path / "m", {"good": random(8, 512), "a": tensor}, 8))
    with pytest.raises(InputError, match="tensor a has 1 of 32768 numbers that are NaN or Inf"):
        read(files, ["good", "a"], dtype, direct=direct)
    layer = LayerFiles(files, dtype, direct=direct)
    assert layer.read(["a"], aligned_buffer(layer.room(["a"])), allow_nonfinite=True).isnan().sum() == 1
