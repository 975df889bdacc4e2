"""The ring hands out every unit in sweep order with the right bytes, tells what went wrong where it did, and ends."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import checkpoints
import pytest
import torch

from bgmpi.errors import InputError, InternalError
from bgmpi.families import read_architecture
from bgmpi.io.layer_files import LayerFiles
from bgmpi.io.model_files import open_model_files
from bgmpi.weight_plan import WeightPlan, plan_weights, weight_bytes
from bgmpi.weight_ring import WeightRing


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return checkpoints.make("mixtral", tmp_path_factory.mktemp("mixtral"), shards=3)


def plan_of(folder: Path, ring_units: int) -> tuple[WeightPlan, object, object]:
    """Stream everything through a ring that holds about so many experts."""
    files = open_model_files(folder)
    arch = read_architecture(files.config)
    plan = plan_weights(arch, 0, 1, 4, weight_bytes(arch, 0, 1, 4) - 1)
    room = 1 << 20 if not ring_units else ring_units * 90_112
    return WeightPlan(plan.resident_bytes, plan.streamed, max(room, 140_000 // 4096 * 4096)), arch, files


def sweep(ring: WeightRing, plan: WeightPlan, arch, files) -> None:
    for unit in plan.streamed:
        weights = ring.take(unit)
        assert list(weights) == list(unit.groups)
        for group, got in weights.items():
            assert torch.equal(got, torch.cat([files.tensor(name) for name in unit.names(arch, group)]))
        ring.give(unit)


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("ring_units", [1, 2, 5, 0])
def test_every_sweep_brings_every_unit_with_its_own_numbers(folder, ring_units, direct):
    plan, arch, files = plan_of(folder, ring_units)
    with WeightRing(arch, plan, LayerFiles(files, torch.float32, direct=direct)) as ring:
        for _ in range(4):
            sweep(ring, plan, arch, files)


def test_several_units_may_be_out_and_come_back_in_order(folder):
    plan, arch, files = plan_of(folder, 8)
    first, second = plan.streamed[:2]
    with WeightRing(arch, plan, LayerFiles(files, torch.float32)) as ring:
        kept = ring.take(first)[first.groups[0]]
        ring.take(second)
        with pytest.raises(InternalError, match="not the oldest"):
            ring.give(second)
        assert torch.equal(kept, torch.cat([files.tensor(name) for name in first.names(arch, first.groups[0])]))
        ring.give(first)
        ring.give(second)


def test_units_that_nobody_asks_for_are_passed_over(folder):
    plan, arch, files = plan_of(folder, 2)
    with WeightRing(arch, plan, LayerFiles(files, torch.float32)) as ring:
        for unit in (*plan.streamed[1::3], plan.streamed[0], *plan.streamed[-2:], plan.streamed[2]):
            got = ring.take(unit)[unit.groups[0]]
            assert torch.equal(got, torch.cat([files.tensor(name) for name in unit.names(arch, unit.groups[0])]))
            ring.give(unit)
        sweep(ring, plan, arch, files)


def test_asking_for_what_does_not_stream_or_passing_over_what_is_out_is_a_fault(folder):
    plan, arch, files = plan_of(folder, 2)
    with WeightRing(arch, plan, LayerFiles(files, torch.float32)) as ring:
        other = dataclasses.replace(plan.streamed[0], layer=99)
        assert ring.streams(plan.streamed[0]) and not ring.streams(other)
        with pytest.raises(InternalError, match="stays in memory or is another rank's"):
            ring.take(other)
        ring.take(plan.streamed[0])
        with pytest.raises(InternalError, match="are taken"):
            ring.take(plan.streamed[2])


def test_reading_runs_ahead_until_the_ring_is_full(folder):
    plan, arch, files = plan_of(folder, 5)
    layer = LayerFiles(files, torch.float32)
    with WeightRing(arch, plan, layer) as ring:
        deadline = time.monotonic() + 10
        before = -1
        while before != layer.bytes_read and time.monotonic() < deadline:
            before = layer.bytes_read
            time.sleep(0.05)
        assert plan.ring_bytes / 2 < before <= plan.ring_bytes
        ring.take(plan.streamed[0])


def test_what_fails_in_a_reader_is_raised_where_its_unit_is_taken(folder, tmp_path):
    copy = tmp_path / "cut"
    copy.mkdir()
    for file in folder.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    plan, arch, files = plan_of(copy, 2)
    with WeightRing(arch, plan, LayerFiles(files, torch.float32)) as ring:
        sweep(ring, plan, arch, files)
        ring.take(plan.streamed[0])
        for shard in copy.glob("*.safetensors"):
            os.truncate(shard, 4096)
        ring.give(plan.streamed[0])
        with pytest.raises(InputError, match="cut while the job ran"):
            for unit in (*plan.streamed[1:], *plan.streamed):
                ring.take(unit)
                ring.give(unit)


@pytest.mark.parametrize("allowed", [True, False])
def test_bad_numbers_are_found_in_the_first_sweep_unless_allowed(tmp_path, allowed):
    model = checkpoints.build("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[3, 4] = torch.inf
    model.save_pretrained(tmp_path)
    files = open_model_files(tmp_path)
    arch = read_architecture(files.config)
    plan = plan_weights(arch, 0, 1, 4, weight_bytes(arch, 0, 1, 4) - 1)
    with WeightRing(arch, plan, LayerFiles(files, torch.float32), allow_nonfinite=allowed) as ring:
        def run() -> None:
            for unit in plan.streamed:
                ring.take(unit)
                ring.give(unit)

        if allowed:
            run()
        else:
            with pytest.raises(InputError, match=r"layers\.1\.mlp\.down_proj\.weight has 1 of"):
                run()


def test_closing_ends_the_readers_also_after_an_exception_and_twice(folder):
    plan, arch, files = plan_of(folder, 2)
    ring = WeightRing(arch, plan, LayerFiles(files, torch.float32))
    with pytest.raises(ZeroDivisionError), ring:
        ring.take(plan.streamed[0])
        raise ZeroDivisionError
    ring.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("bgmpi-weights")]


def test_readers_leave_the_threads_of_the_rank_alone(folder):
    plan, arch, files = plan_of(folder, 2)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with WeightRing(arch, plan, LayerFiles(files, torch.float32)) as ring:
            sweep(ring, plan, arch, files)
            assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_a_process_ends_although_nobody_closed_the_ring(folder):
    source = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from pathlib import Path
import torch
from test_weight_ring import plan_of
from bgmpi.io.layer_files import LayerFiles
from bgmpi.weight_ring import WeightRing
plan, arch, files = plan_of(Path({str(folder)!r}), 2)
ring = WeightRing(arch, plan, LayerFiles(files, torch.float32))
ring.take(plan.streamed[0])
raise SystemExit(5)
"""
    ended = subprocess.run([sys.executable, "-c", source], timeout=60, check=False)
    assert ended.returncode == 5
