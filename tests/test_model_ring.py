"""A model whose weights stream through a ring answers as the one whose weights stay, for every family and budget."""

from __future__ import annotations

import checkpoints
import pytest
import torch
from paged_forward import PagedRun, random_ids

from bgmpi.errors import UsageError
from bgmpi.families import read_architecture
from bgmpi.io.layer_files import LayerFiles
from bgmpi.io.model_files import ModelFiles, open_model_files
from bgmpi.kernels.cpu import CpuBackend
from bgmpi.model import Model
from bgmpi.weight_plan import plan_weights, weight_bytes
from bgmpi.weight_ring import WeightRing

CHUNKS = (5, 1, 40, 1, 1)
LEAST = 0


def stream(
    files: ModelFiles, budget: int, dtype: torch.dtype = torch.float32, *, direct: bool = True,
    tiles: bool | None = None, rank: int = 0, ranks: int = 1, allow_nonfinite: bool = False,
) -> tuple[Model, WeightRing]:
    """Open a model with `budget` bytes for weights (LEAST: as few as may be) on one thread, and its ring."""
    arch = read_architecture(files.config)
    budget = budget or least_budget(files, dtype, rank, ranks)
    plan = plan_weights(arch, rank, ranks, dtype.itemsize, budget)
    assert plan.streamed
    ring = WeightRing(arch, plan, LayerFiles(files, dtype, direct=direct), allow_nonfinite=allow_nonfinite)
    backend = CpuBackend(None, 1, tiles)
    return Model(arch, files, backend, dtype, rank, ranks, allow_nonfinite, ring), ring


def least_budget(files: ModelFiles, dtype: torch.dtype, rank: int = 0, ranks: int = 1) -> int:
    """Return a budget with room for two units only, tiny as the models are."""
    arch = read_architecture(files.config)
    low, high = 0, weight_bytes(arch, rank, ranks, dtype.itemsize)
    while high - low > 1:
        middle = (low + high) // 2
        try:
            plan_weights(arch, rank, ranks, dtype.itemsize, middle)
            high = middle
        except UsageError:
            low = middle
    return high


def logits(model: Model, chunks: tuple[int, ...] = CHUNKS, sequences: int = 2) -> torch.Tensor:
    """Feed two sequences in chunks; a last sweep without any token."""
    run = PagedRun(model, sequences, sum(chunks), 8)
    ids = [random_ids(sum(chunks), seed=seed) for seed in range(sequences)]
    found, begin = [], 0
    for size in chunks:
        found += run.step([one[begin : begin + size] for one in ids])
        begin += size
    return torch.cat(found)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    def make(family: str, **options):
        return open_model_files(checkpoints.make(family, tmp_path_factory.mktemp(family), **options))

    return make


def resident(files: ModelFiles, dtype: torch.dtype, tiles: bool | None = None) -> Model:
    return Model(read_architecture(files.config), files, CpuBackend(None, 1, tiles), dtype, 0, 1)


@pytest.mark.parametrize("family", checkpoints.FAMILIES)
def test_a_streamed_model_answers_as_a_resident_one(family, made):
    files = made(family, shards=3)
    model, ring = stream(files, LEAST)
    with ring:
        got = logits(model)
    wanted = logits(resident(files, torch.float32))
    print(family, torch.equal(got, wanted), float((got - wanted).abs().max()))
    assert torch.allclose(got, wanted, atol=1e-5)
