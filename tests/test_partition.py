"""PARTITION: a group shares one sequence, each member the KV of its own heads, and its leader has all of it afterwards.

Who shares runs on real windows with real sequence managers and made-up KV, byte for byte; a group that cannot be made
changes nothing.  Then whole jobs are drilled where a group is hardest: prompts that are still being scored, and KV on
a device.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import checkpoints
import jobs
import launch
import pytest
from tokenizers_for_tests import make_tokenizer
from virtual_nodes import Nodes, virtual_nodes

from bgmpi.trace import read_deeds

pytestmark = pytest.mark.timeout(200)


@pytest.fixture(autouse=True)
def bodies_import_from_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)


# --- on ranks -------------------------------------------------------------------------------------------------------


def together_and_alone_again() -> None:
    import numpy as np
    from moving_ranks import Mover, far

    from bgmpi.partition import shard, unshard
    from bgmpi.primitives import Partition
    from bgmpi.world import open_world

    with open_world() as world:
        groups = world.groups()
        everyone = groups[0, world.size]
        splits = {
            "own heads": lambda member: slice(member * 4 // world.size, (member + 1) * 4 // world.size),
            "a head of several": lambda member: slice(member // 2 * 2, member // 2 * 2 + 2 if world.size > 2 else 4),
            "all of everything": lambda member: None,
        }
        for copies in (False, True):
            for heads in splits.values():
                for leader in (0, world.size - 1):
                    with Mover(world) as mover:
                        if copies:
                            far(mover.store, world.rank)
                        manager, leads, name = mover.manager, world.rank == leader, np.array([5])
                        mover.raw[mover.store.first : mover.store.first + mover.store.pages] = 99
                        world.barrier()
                        if leads:
                            mover.admit(5, 9, 60)
                            mover.run(2)
                            mover.moves()
                        for steps in (1, 6, 3):
                            sharded = shard(Partition(5, leader, 0, world.size), everyone, heads, mover.store, manager)
                            assert sharded is not None
                            assert sharded.leads == leads
                            since = int(manager.active_set.with_kv[manager.active_set.slots_of(name)[0]])
                            assert sharded.since == since
                            mover.heads = heads(everyone.rank) or slice(None)
                            mover.check_bytes()
                            mover.run(steps)
                            mover.check_bytes()
                            others = 0 if heads(0) is None else (world.size - 1)
                            moved = unshard(sharded, mover.store, manager)
                            mover.heads = slice(None)
                            if leads:
                                fresh = manager.kv.held[manager.active_set.slots_of(name)[0]] - since // 4
                                assert moved == others * (fresh * mover.store.page_bytes // world.size)
                            else:
                                assert not moved
                                manager.forget(5)
                            mover.check_bytes()
                            mover.check_node()
                            assert mover.here() == ({5} if leads else set())
                            assert not mover.moves(), "who only follows is never told of"
                            mover.run(2)
                            mover.check_bytes()
                            world.barrier()
                        if leads:
                            assert int(manager.active_set.known[manager.active[0]]) == 9 + 2 + 10 + 3 * 2
                        else:
                            assert manager.kv.free == manager.kv.pages


def a_group_that_cannot_be() -> None:
    import numpy as np
    from moving_ranks import Mover, far, raises

    from bgmpi.errors import BgmpiError
    from bgmpi.partition import shard, unshard
    from bgmpi.primitives import Partition
    from bgmpi.world import open_world

    with open_world() as world:
        everyone = world.groups()[0, world.size]
        last, leads = world.size - 1, world.rank == 0
        order = Partition(5, 0, 0, world.size)

        def heads(member: int) -> slice:
            return slice(member * 4 // world.size, (member + 1) * 4 // world.size)

        def begins(mover: Mover) -> None:
            if leads:
                mover.admit(5, 9, 60)
                mover.run(2)
            world.barrier()

        def refused(mover: Mover, willing: bool = True) -> None:
            before = mover.here()
            free = mover.manager.kv.free
            mover.moves()
            assert shard(order, everyone, heads, mover.store, mover.manager, willing=willing) is None
            assert (mover.here(), mover.manager.kv.free, mover.moves()) == (before, free, [])
            mover.check_node()
            mover.check_bytes()
            world.barrier()
            mover.run(2)
            mover.check_bytes()
            world.barrier()

        def accepted(mover: Mover) -> None:
            sharded = shard(order, everyone, heads, mover.store, mover.manager)
            assert sharded is not None
            mover.heads = heads(everyone.rank)
            mover.run(2)
            unshard(sharded, mover.store, mover.manager)
            mover.heads = slice(None)
            if not leads:
                mover.manager.forget(5)
            mover.check_bytes()
            mover.check_node()
            world.barrier()

        # The last rank can never hold it; those between have, and must let go.
        small = {"device_pages": 2, "streamed_most": 3} if world.rank == last else {}
        with Mover(world, **small) as mover:
            begins(mover)
            refused(mover)
            if world.rank == last:
                mover.manager.places.device = None
            accepted(mover)
        # The last rank has pages in use just now.
        with Mover(world) as mover:
            begins(mover)
            held = mover.manager.kv.claim(22) if world.rank == last else None
            mover.manager.kv.parked -= 22 if held is not None else 0
            before = mover.manager.kv.free
            assert shard(order, everyone, heads, mover.store, mover.manager) is None
            assert mover.manager.kv.free == before
            if held is not None:
                mover.manager.kv.parked += 22
                mover.manager.kv.release(held)
            accepted(mover)
        # The last rank has something else to do, and then the leader has.
        for busy in (last, 0):
            with Mover(world) as mover:
                begins(mover)
                if world.rank == busy:
                    mover.admit(7, 3, 20)
                refused(mover)
                world.barrier()
        # The leader has KV on a disk, and does not want to.
        with Mover(world, disk_pages=8, streamed_most=24) as mover:
            begins(mover)
            refused(mover, willing=False)
            if leads:
                slots = mover.manager.active_set.slots_of(np.array([5]))
                assert mover.manager.places.begin_spill(int(slots[0]), 2)
                mover.manager.places.end_spill(slots)
            before = mover.manager.kv.free
            assert shard(order, everyone, heads, mover.store, mover.manager) is None
            assert mover.manager.kv.free == before
            mover.check_node()
            world.barrier()
        # A copy fails on the last rank only.
        with Mover(world) as mover:
            begins(mover)
            if world.rank == last:
                far(mover.store, world.rank)
                fetch, mover.store.fetch_heads = mover.store.fetch_heads, raises(BgmpiError("the wire was cut"))
            refused(mover)
            if world.rank == last:
                mover.store.fetch_heads = fetch
            accepted(mover)


# --- tests ----------------------------------------------------------------------------------------------------------


@launch.on_ranks(2, 3, 4)
def test_members_keep_the_kv_of_their_heads_and_the_leader_gets_all_of_it_back(ranks: int) -> None:
    launch.python_on_ranks(ranks, together_and_alone_again)


@launch.on_ranks(2, 3)
def test_a_group_that_cannot_be_made_changes_nothing_on_any_rank(ranks: int) -> None:
    launch.python_on_ranks(ranks, a_group_that_cannot_be)


@launch.on_ranks(2)
def test_a_group_waits_for_the_prompt_to_be_scored_and_meets_kv_on_a_device(ranks: int, tmp_path: Path) -> None:
    """One long prompt with log-probabilities, computed four tokens a step while a group is asked for in every round."""
    model = make_tokenizer(checkpoints.make("mixtral", tmp_path / "model"))
    body = {"prompt": list(range(5, 65)), "max_tokens": 40, "ignore_eos": True, "temperature": 0}
    rows = [body | {"echo": True, "logprobs": 1}]
    requests = jobs.write_requests(tmp_path / "requests.jsonl", rows)

    def words(name: str, *more: str) -> list[str | Path]:
        paths = ["--model", model, "-i", requests, "-o", tmp_path / f"{name}.h5", "--trace", tmp_path / f"{name}.trace"]
        return [*paths, "--dtype", "float32", "--check", "--page-tokens", "4", "--max-model-len", "128", *more]

    page = 4 * 2 * 2 * 8 * 4 * 2
    shapes = {
        "tiny steps": ["--max-num-batched-tokens", "4", "--max-num-seqs", "2"],
        "device": ["--device-memory", str(32 * page // 2 * 2 + 40 * page)],
        "small device": ["--device-memory", str(32 * page // 2 * 2 + 20 * page)],
    }
    jobs.run_jobs(1, [words("alone")], tmp_path)
    jobs.run_jobs(
        ranks, [words(name, "--drill", "partition=1", *more) for name, more in shapes.items()], tmp_path, limit=100
    )
    for name in shapes:
        assert jobs.tokens_of(tmp_path / f"{name}.h5") == jobs.tokens_of(tmp_path / "alone.h5"), name
        groups = [deed for deed in read_deeds(tmp_path / f"{name}.trace") if deed.what == "partition"]
        assert any(deed.bytes for deed in groups), f"{name}: no leader ever got KV back from its group"


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with virtual_nodes(2) as started:
        yield started


@pytest.mark.slurm
def test_a_group_over_two_nodes_keeps_every_byte(nodes: Nodes) -> None:
    nodes.python(2, 4, together_and_alone_again)
    nodes.python(2, 2, a_group_that_cannot_be)
