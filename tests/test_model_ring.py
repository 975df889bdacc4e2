"""A model whose weights stream through a ring answers as the one whose weights stay, for every family and budget."""

from __future__ import annotations

import checkpoints
import numpy as np
import pytest
import torch
from paged_forward import PagedRun, random_ids

from bgmpi import weight_plan
from bgmpi.errors import InputError
from bgmpi.families import read_architecture
from bgmpi.io.layer_files import LayerFiles
from bgmpi.io.model_files import ModelFiles, open_dummy_files, open_model_files
from bgmpi.kernels.cpu import CpuBackend
from bgmpi.model import Model
from bgmpi.tensor_names import expected_tensors
from bgmpi.weight_plan import Part, plan_weights, weight_bytes, weight_units
from bgmpi.weight_ring import WeightRing

CHUNKS = (5, 1, 40, 1, 1)
LEAST = 0


def stream(
    files: ModelFiles, budget: int, dtype: torch.dtype = torch.float32, *, direct: bool = True,
    tiles: bool | None = None, rank: int = 0, ranks: int = 1, allow_nonfinite: bool = False,
    deterministic: bool = False,
) -> tuple[Model, WeightRing]:
    """Open a model with `budget` bytes for weights (LEAST: as few as may be) on one thread, and its ring."""
    arch = read_architecture(files.config)
    budget = budget or least_budget(files, dtype, rank, ranks)
    plan = plan_weights(arch, rank, ranks, dtype.itemsize, budget)
    assert plan.streamed
    ring = WeightRing(arch, plan, LayerFiles(files, dtype, direct=direct), allow_nonfinite=allow_nonfinite)
    backend = CpuBackend(None, 1, tiles, deterministic)
    return Model(arch, files, backend, dtype, rank, ranks, allow_nonfinite, ring), ring


def least_budget(files: ModelFiles, dtype: torch.dtype, rank: int = 0, ranks: int = 1) -> int:
    """Return the least budget that is not refused."""
    return checkpoints.least_budget(read_architecture(files.config), rank, ranks, dtype.itemsize)


def logits(model: Model, chunks: tuple[int, ...] = CHUNKS, sequences: int = 2) -> torch.Tensor:
    """Feed sequences in chunks and return all logits."""
    run = PagedRun(model, sequences, sum(chunks), 8)
    ids = [random_ids(sum(chunks), seed=seed) for seed in range(sequences)]
    found, begin = [], 0
    for size in chunks:
        found += run.step([one[begin : begin + size] for one in ids])
        begin += size
    return torch.cat(found)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Return a function that makes a family's checkpoint once, in several shards."""
    known: dict[tuple[str, torch.dtype], ModelFiles] = {}

    def make(family: str, dtype: torch.dtype = torch.float32) -> ModelFiles:
        if (family, dtype) not in known:
            folder = checkpoints.make(family, tmp_path_factory.mktemp(family), dtype=dtype, shards=3)
            known[family, dtype] = open_model_files(folder)
        return known[family, dtype]

    return make


def resident(
    files: ModelFiles, dtype: torch.dtype, tiles: bool | None = None, deterministic: bool = False
) -> Model:
    return Model(read_architecture(files.config), files, CpuBackend(None, 1, tiles, deterministic), dtype, 0, 1)


@pytest.mark.parametrize("family", checkpoints.FAMILIES)
def test_a_streamed_model_answers_as_a_resident_one(family, made):
    files = made(family)
    model, ring = stream(files, LEAST)
    with ring:
        got = logits(model)
    # The last bits differ where a library takes another path on this processor; those of --deterministic do not.
    torch.testing.assert_close(got, logits(resident(files, torch.float32)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", ["qwen2_moe", "kimi_k2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_deterministic_streamed_model_answers_the_same_bits(family, dtype, made):
    """Also where a library's product would depend on where in memory a weight begins."""
    files = made(family, dtype=dtype)
    model, ring = stream(files, LEAST, dtype, deterministic=True)
    with ring:
        got = logits(model)
    assert torch.equal(got, logits(resident(files, dtype, deterministic=True)))


@pytest.mark.parametrize("family", ["llama", "mixtral", "qwen2_moe", "deepseek_v3"])
@pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
def test_it_does_not_matter_how_much_of_it_streams(family, share, made, monkeypatch):
    monkeypatch.setattr(weight_plan, "WANTED", 0)
    files = made(family)
    least, whole = least_budget(files, torch.float32), weight_bytes(read_architecture(files.config), 0, 1, 4)
    model, ring = stream(files, int(least + share * (whole - least)))
    with ring:
        got = logits(model)
    assert torch.equal(got, logits(resident(files, torch.float32)))


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("tiles", [None, False])
@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3", "qwen2"])
def test_bf16_weights_stream_too(family, tiles, direct, made):
    files = made(family, dtype=torch.bfloat16)
    model, ring = stream(files, LEAST, torch.bfloat16, tiles=tiles, direct=direct)
    with ring:
        got = logits(model)
    assert torch.equal(got, logits(resident(files, torch.bfloat16, tiles)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_bf16_files_are_computed_in_another_precision(dtype, made):
    files = made("mixtral", dtype=torch.bfloat16)
    model, ring = stream(files, LEAST, dtype)
    with ring:
        got = logits(model)
    assert torch.equal(got, logits(resident(files, dtype)))


def test_dummy_weights_stream(made, tmp_path):
    dummy = open_dummy_files(made("qwen3_moe").folder)
    dummy.promise(expected_tensors(read_architecture(dummy.config)))
    model, ring = stream(dummy, LEAST)
    with ring:
        got = logits(model)
    assert torch.equal(got, logits(resident(dummy, torch.float32)))


def test_a_rank_without_tokens_goes_through_the_ring_with_the_others(made):
    files = made("qwen2_moe")
    model, ring = stream(files, LEAST)
    with ring:
        wanted = logits(resident(files, torch.float32))
        empty = torch.empty(0, 64)
        for _ in range(3):
            for layer in range(model.layers):
                with model.attention_of(layer):
                    pass
                model.feed_forward(layer, empty)
            assert model.logits(empty).shape == (0, 512)
        assert torch.equal(logits(model), wanted)


def test_micro_batches_share_the_weights_of_a_layer_and_rows_those_of_the_head(made):
    files = made("mistral")
    model, ring = stream(files, LEAST)
    plain = resident(files, torch.float32)
    with ring:
        hidden = [0.1 * torch.ones(6, 64), 0.1 * torch.ones(6, 64)]
        for place, one in enumerate((model, plain)):
            for layer in range(one.layers):
                pages = torch.zeros(2, *one.page_shape(4))
                with one.attention_of(layer) as attend:
                    for start in (0, 4):
                        rows = hidden[place][start : start + 4]
                        first, before = np.array([0, len(rows)], np.int32), np.array([start], np.int32)
                        cut = one.backend.plan_attention(first, before, np.array([[0, 1]], np.int32), 4)
                        attend(rows, torch.arange(start, start + len(rows)), cut, pages)
                one.feed_forward(layer, hidden[place])
        with model.head() as head:
            parts = torch.cat([head(part) for part in hidden[0].split(4)])
    assert torch.equal(hidden[0], hidden[1]) and torch.equal(parts, plain.logits(hidden[1]))


def test_a_rank_streams_its_own_experts_only(made):
    files = made("mixtral")
    arch = read_architecture(files.config)
    _, ring = stream(files, LEAST, rank=1, ranks=3)
    with ring:
        mine = [unit for unit in weight_units(arch, 1, 3) if unit.part is Part.EXPERT and unit.layer == 0]
        others = [unit for unit in weight_units(arch, 0, 3) if unit.part is Part.EXPERT]
        assert [unit.expert for unit in mine] == [3, 4, 5]
        assert all(map(ring.streams, mine)) and not any(map(ring.streams, others))


def test_layers_that_are_left_out_cost_reading_and_change_nothing(made):
    files = made("llama")
    model, ring = stream(files, LEAST)
    plain = resident(files, torch.float32)
    with ring:
        for layer in (1, 0, 0):
            rows = [torch.ones(2, 64), torch.ones(2, 64)]
            model.feed_forward(layer, rows[0])
            plain.feed_forward(layer, rows[1])
            assert torch.equal(*rows)
        assert torch.equal(logits(model), logits(plain))


def test_a_failing_read_reaches_whoever_asked_for_the_layer(made, monkeypatch):
    files = made("mixtral")
    model, ring = stream(files, LEAST)
    with ring:
        logits(model)
        monkeypatch.setattr(LayerFiles, "read", lambda *_, **__: (_ for _ in ()).throw(InputError("a disk gone bad")))
        with pytest.raises(InputError, match="a disk gone bad"):
            for _ in range(2):
                logits(model)
