"""MIGRATE: whoever moves is the same sequence on its new rank, byte for byte; whoever cannot move lost nothing.

The choreography runs on real windows with real sequence managers and made-up tokens: within a node (page numbers change
owners, nothing is copied), with copies, and between virtual Slurm nodes.  Then whole jobs are drilled over nodes and
must give the tokens of one rank.  Nodes get equally many ranks: where they do not, MPICH 5.0 was seen to fail in
MPI_Init under Slurm's pmi2, now and then.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import checkpoints
import jobs
import launch
import pytest
from tokenizers_for_tests import make_tokenizer
from virtual_nodes import Nodes, virtual_nodes

from bgmpi.trace import read_deeds

pytestmark = pytest.mark.timeout(200)


@pytest.fixture(autouse=True)
def bodies_import_from_here(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
    monkeypatch.setenv("TOKENIZER", str(make_tokenizer(tmp_path_factory.mktemp("tokenizer"))))


# --- on ranks -------------------------------------------------------------------------------------------------------


def once_around() -> None:
    import os

    import numpy as np
    from moving_ranks import Mover, far, orders

    from bgmpi.coroutine import State
    from bgmpi.io.tokenizer import open_tokenizer
    from bgmpi.world import open_world

    with open_world() as world:
        tokenizer = open_tokenizer(os.environ["TOKENIZER"])
        for copies in (False, True):
            with Mover(world, tokenizer) as mover:
                if copies:
                    far(mover.store, world.rank)
                begin = 10 * world.rank
                held, queued, stays, never = begin + 1, begin + 2, begin + 3, begin + 4
                for name, prompt in ((held, 9), (queued, 6), (stays, 3)):
                    mover.admit(name, prompt, prompt + 30)
                mover.run(3)
                mover.admit(never, 5, 9, level=2)
                mover.suspend(held)
                mover.suspend(queued, resume=True)
                mover.moves()
                mover.check_node()
                known = {name: len(entry.tokens) for name, entry in mover.waiting().items()}
                assert known == {held: 12, queued: 9, never: 5}
                for turn in range(world.size):
                    going = [[10 * ((rank - turn) % world.size) + i for i in (1, 2, 4)] for rank in range(world.size)]
                    done = mover.migrate(
                        orders(*((names, rank, (rank + 1) % world.size) for rank, names in enumerate(going)))
                    )
                    came = going[(world.rank - 1) % world.size]
                    assert sorted(done.arrived.tolist()) == came
                    pages = 0 if mover.store.same_node((world.rank - 1) % world.size) else 3 + 2
                    assert done.bytes == pages * mover.store.page_bytes
                    assert mover.here() == {stays, *came} == set(mover.live)
                    mover.check_node()
                    mover.check_bytes()
                    assert sorted(mover.moves()) == [(State.WAITING, came[2:]), (State.YIELDED, came[:2])]
                    first = came[0]
                    entries = mover.waiting()
                    for name, size, with_kv, started in (
                        (first, 12, 11, True), (first + 1, 9, 8, True), (first + 3, 5, 0, False)
                    ):  # fmt: skip
                        entry = entries[name]
                        prompt = {1: 9, 2: 6, 4: 5}[name % 10]
                        assert (entry.prompt, entry.with_kv, entry.started) == (prompt, with_kv, started)
                        assert entry.tokens.tolist() == [(name + i) % 400 for i in range(size)]
                        assert entry.most == prompt + (4 if name % 10 == 4 else 30)
                        assert entry.level == (2 if name % 10 == 4 else 0)
                    mover.step()  # who stays goes on, and its new KV harms nobody's
                    world.barrier()
                    mover.check_bytes()
                mover.run(2)
                assert mover.here() == {stays, held, queued, never}
                assert sorted(set(mover.computed[-8:])) == [held, queued, stays, never]
                mover.check_node()
                mover.check_bytes()
                assert np.all(mover.manager.active_set.with_kv[mover.manager.active] > 0)
                world.barrier()


def nobody_loses_what_cannot_move() -> None:
    import os

    import numpy as np
    from moving_ranks import Mover, far, orders, raises

    from bgmpi.coroutine import State
    from bgmpi.errors import BgmpiError
    from bgmpi.io.tokenizer import open_tokenizer
    from bgmpi.world import open_world

    with open_world() as world:
        last = world.size - 1
        tokenizer = open_tokenizer(os.environ["TOKENIZER"])

        def source_keeps(mover: Mover, names: list[int]) -> None:
            """Try to move `names` from the last rank to rank 0, which does not take them."""
            before = mover.waiting()
            free, parked = mover.manager.kv.free, mover.manager.kv.parked
            texts = dict(mover.live)
            mover.moves()
            done = mover.migrate(orders((names, last, 0)))
            assert not len(done.arrived)
            assert not done.bytes
            after = mover.waiting()
            assert after.keys() == before.keys()
            for name, entry in after.items():
                assert entry.home.tolist() == before[name].home.tolist()
                assert (entry.with_kv, entry.started) == (before[name].with_kv, before[name].started)
            assert (mover.manager.kv.free, mover.manager.kv.parked) == (free, parked)
            assert mover.live == texts
            assert mover.moves() == ([(State.YIELDED, names)] if world.rank == last else [])
            mover.check_node()
            mover.check_bytes()

        def has_some(mover: Mover) -> None:
            """Let the last rank hold two sequences with KV."""
            if world.rank == last:
                mover.admit(71, 9, 40)
                mover.admit(72, 6, 40)
                mover.run(2)
                mover.suspend(71)
                mover.suspend(72, resume=True)
            mover.check_node()

        def goes_on(mover: Mover) -> None:
            if world.rank == last:
                mover.run(3)
                assert {71, 72} <= set(mover.manager.active_set.sequence[mover.manager.active].tolist())
                mover.check_bytes()
            mover.check_node()

        # No room: rank 0 is full.
        with Mover(world, tokenizer, pages=16) as mover:
            has_some(mover)
            if world.rank == 0:
                mover.admit(1, 55, 64)
                mover.run(1)
                assert mover.manager.kv.free < 2
            source_keeps(mover, [71, 72])
            goes_on(mover)
            # Room for one of the two: the other stays.
            if world.rank == 0:
                mover.suspend(1)
                mover.manager.gone(mover.manager.leave(np.array([1]))[0].sequence, np.empty(0, np.int32))
                del mover.live[1]
                mover.admit(2, 38, 64)
                mover.run(1)
                mover.moves()
            if world.rank == last:
                mover.suspend(71, 72)
                mover.moves()
            done = mover.migrate(orders(([71, 72], last, 0)))
            expected = {0: [(State.YIELDED, [72])], last: [(State.YIELDED, [71])]}
            if world.rank == 0:
                assert done.arrived.tolist() == [72]
            assert mover.moves() == expected.get(world.rank, [])
            mover.check_node()
            mover.check_bytes()
            world.barrier()

        # Too long for the target, at all times.
        small = {"device_pages": 2, "streamed_most": 5} if world.rank == 0 else {}
        with Mover(world, tokenizer, **small) as mover:
            has_some(mover)
            source_keeps(mover, [71, 72])
            goes_on(mover)
            world.barrier()

        # The copy fails.
        with Mover(world, tokenizer) as mover:
            has_some(mover)
            if world.rank == 0:
                far(mover.store, 0)
                fetch, mover.store.fetch = mover.store.fetch, raises(BgmpiError("the wire was cut"))
            source_keeps(mover, [71, 72])
            goes_on(mover)
            if world.rank == last:
                mover.suspend(71, 72)
            if world.rank == 0:
                mover.store.fetch = fetch
            done = mover.migrate(orders(([71, 72], last, 0)))
            assert sorted(done.arrived.tolist()) == ([71, 72] if world.rank == 0 else [])
            mover.check_node()
            mover.check_bytes()
            world.barrier()


def disk_is_given_up() -> None:
    import os

    import numpy as np
    from moving_ranks import Mover, orders

    from bgmpi.coroutine import State
    from bgmpi.io.tokenizer import open_tokenizer
    from bgmpi.world import open_world

    with open_world() as world:
        tokenizer = open_tokenizer(os.environ["TOKENIZER"])
        for room in (True, False):
            with Mover(world, tokenizer, pages=16, disk_pages=8, streamed_most=16) as mover:
                manager = mover.manager
                if world.rank == 1:
                    mover.admit(5, 17, 40)
                    mover.run(2)
                    slots = manager.active_set.slots_of(np.array([5]))
                    assert manager.places.begin_spill(int(slots[0]), 3)
                    manager.places.end_spill(slots)
                    mover.suspend(5)
                    assert manager.places.disk is not None and manager.places.disk.parked == 3
                    mover.moves()
                if world.rank == 0 and not room:
                    small = manager.places
                    small.device, small.streamed_most = manager.kv, 2
                    assert not manager.takes(40)
                mover.migrate(orders(([5], 1, 0)))
                owner = 0 if room else 1
                if world.rank == 0 and not room:
                    small.device = None
                if world.rank == owner:
                    entry = mover.waiting()[5]
                    assert (entry.with_kv, len(entry.home), len(entry.disk), entry.started) == (0, 0, 0, True)
                    assert entry.tokens.tolist() == [(5 + i) % 400 for i in range(19)]
                    assert mover.moves() == [(State.YIELDED, [5])]
                    mover.run(2)
                    assert manager.active_set.known[manager.active].tolist() == [21]
                    assert manager.tokens.wasted == (0 if room else 18)
                if world.rank == 1:
                    assert manager.places.disk is not None and manager.places.disk.free == 8
                mover.check_node()
                mover.check_bytes()
                world.barrier()


def transcripts_travel() -> None:
    import os

    import numpy as np
    from moving_ranks import Mover, orders

    from bgmpi.io.tokenizer import open_tokenizer
    from bgmpi.request import Finish, Sampling
    from bgmpi.transcript import close_transcript, open_transcript
    from bgmpi.world import open_world

    with open_world() as world:
        tokenizer = open_tokenizer(os.environ["TOKENIZER"])
        words = tokenizer.encode("the quick brown fox").tolist()
        asks = Sampling(seed=2**64 - 1, stop=("k bro",), logprobs=2, prompt_logprobs=1, max_tokens=90)
        with Mover(world, tokenizer, slots=1) as mover:
            manager, name = mover.manager, 6

            def says(token: int, mover: Mover = mover, name: int = name) -> str | int | None:
                """Let the sequence say a token, as a rank does; it becomes one of those that travel."""
                one, text = np.full(1, -token / 7, np.float32), mover.live[name]
                assert text.logprobs is not None and text.stream is not None
                text.logprobs.add(one, np.full((1, 3), token, np.int32), np.full((1, 3), token / 3, np.float32))
                plan = manager.plan()
                assert plan is not None
                none = np.zeros(1, bool)
                manager.commit(plan, np.array([token], np.int32), none, none)
                mover.write(int(plan.slots[0]))
                return text.stream.push(token)

            half = len(tokenizer.encode("the quic").tolist())
            if world.rank == 0:
                mover.admit(name, 5, 90, asks)
                mover.boundary()
                pieces = mover.live[name].prompt_logprobs
                assert pieces is not None
                four = np.arange(4, dtype=np.float32)
                pieces.add(four, four.astype(np.int32)[:, None], four[:, None])
                mover.live[name].first_token_s = 0.5
                for token in words[:half]:
                    assert says(token) is None
                mover.suspend(name)
            mover.migrate(orders(([name], 0, 1)))
            if world.rank == 1:
                mover.boundary()
                reason = None
                for token in words[half:]:
                    reason = reason or says(token)
                    if reason:
                        break
                assert reason == "k bro"
                mover.live[name].stop_reason = reason
                slot = int(manager.active[0])
                tokens = manager.active_set.tokens[slot, 5 : manager.active_set.known[slot]].copy()
                answer = close_transcript(mover.live[name], tokens, Finish.STOP, False, 9.0, tokenizer)
                assert (answer.text, answer.stop_reason, answer.first_token_s) == ("the quic", "k bro", 0.5)
                assert tokens.tolist() == words[: len(tokens)]
                assert answer.logprobs is not None and answer.prompt_logprobs is not None
                assert answer.logprobs.top_ids.tolist() == [[token] * 2 for token in tokens.tolist()]
                assert np.array_equal(answer.logprobs.chosen, np.array([-t / 7 for t in tokens.tolist()], np.float32))
                assert answer.prompt_logprobs.chosen[1:].tolist() == [0, 1, 2, 3]
                assert open_transcript(mover.live[name].request, 0, 0, tokenizer).request.sampling == asks
            else:
                assert name not in mover.live
            world.barrier()


def at_random() -> None:
    import os

    import numpy as np
    from moving_ranks import Mover, far, orders

    from bgmpi.io.tokenizer import open_tokenizer
    from bgmpi.world import open_world

    with open_world() as world:
        tokenizer = open_tokenizer(os.environ["TOKENIZER"])
        for seed in range(6):
            everywhere = np.random.default_rng(seed)
            with Mover(world, tokenizer, pages=int(everywhere.integers(14, 30)), slots=3) as mover:
                if seed % 3 == 2:
                    far(mover.store, world.rank)
                for i in range(6):
                    mover.admit(10 * world.rank + i, 1 + (5 * i + world.rank) % 13, 40)
                for _ in range(12):
                    mover.run(4)
                    active = mover.manager.active_set.sequence[mover.manager.active].tolist()
                    mover.suspend(*active[::2], resume=bool(everywhere.integers(2)))
                    mine = np.full(64, -1, np.int64)
                    standing = sorted(mover.waiting())
                    mine[: len(standing)] = standing
                    moves = []
                    for rank, names in enumerate(world.all_gather_counts(mine)):
                        names = names[names >= 0]
                        chosen = names[everywhere.random(len(names)) < 0.6].tolist()
                        target = (rank + int(everywhere.integers(1, max(2, world.size)))) % world.size
                        if chosen and target != rank:
                            moves.append((chosen, rank, target))
                    mover.migrate(orders(*moves))
                    mover.manager.backlog.combine(np.array(sorted(mover.manager.backlog._held), np.int64))
                    mover.check_node()
                    mover.check_bytes()
                    assert set(mover.live) >= mover.here()
                    world.barrier()


# --- tests ----------------------------------------------------------------------------------------------------------


@launch.on_ranks(2, 3, 4)
def test_who_goes_once_around_all_ranks_comes_back_the_same(ranks: int) -> None:
    """Page numbers change owners, then the same with copies."""
    launch.python_on_ranks(ranks, once_around)


@launch.on_ranks(2, 3)
def test_who_finds_no_room_is_too_long_or_whose_copy_fails_stays_as_it_was(ranks: int) -> None:
    launch.python_on_ranks(ranks, nobody_loses_what_cannot_move)


@launch.on_ranks(2)
def test_kv_on_disk_is_given_up_and_the_sequence_computes_it_again(ranks: int) -> None:
    launch.python_on_ranks(ranks, disk_is_given_up)


@launch.on_ranks(2)
def test_texts_and_log_probabilities_go_on_where_they_stood(ranks: int) -> None:
    launch.python_on_ranks(ranks, transcripts_travel)


@launch.on_ranks(2, 4)
def test_random_moves_of_random_sequences_keep_every_byte_and_page(ranks: int) -> None:
    launch.python_on_ranks(ranks, at_random)


# --- between nodes --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with virtual_nodes(4) as started:
        yield started


@pytest.mark.slurm
@pytest.mark.parametrize(("count", "ranks"), [(2, 4), (4, 4)])
def test_who_goes_once_around_all_nodes_comes_back_the_same(nodes: Nodes, count: int, ranks: int) -> None:
    nodes.python(count, ranks, once_around)


@pytest.mark.slurm
def test_between_nodes_nobody_loses_what_cannot_move(nodes: Nodes) -> None:
    nodes.python(2, 4, nobody_loses_what_cannot_move)
    nodes.python(2, 4, at_random)


@pytest.mark.slurm
@pytest.mark.parametrize(("count", "ranks"), [(2, 4), (4, 4)])
def test_a_job_drilled_over_nodes_gives_the_tokens_of_one_rank(
    nodes: Nodes, count: int, ranks: int, tmp_path: Path
) -> None:
    families = ("mixtral", "deepseek_v3")
    rows: list[dict[str, Any]] = [
        {"prompt": prompt, "max_tokens": 6 + 9 * (i % 4), "ignore_eos": True, "temperature": i % 2, "logprobs": 1}
        for i, prompt in enumerate(jobs.prompts(10, longest=40, seed=2))
    ]
    requests = jobs.write_requests(tmp_path / "requests.jsonl", rows)
    words: list[list[str | Path]] = []
    for family in families:
        make_tokenizer(checkpoints.make(family, tmp_path / family))
        paths = ["--model", tmp_path / family, "-i", requests, "--dtype", "float32", "--check", "--page-tokens", "4"]
        words.append([*paths, "-o", tmp_path / f"{family}.h5"])
    jobs.run_jobs(1, words, tmp_path)
    drilled = [
        [*one[:-1], tmp_path / f"{family}-drilled.h5", "--drill", "migrate=1,yield=1,partition=1", "--trace",
         tmp_path / f"{family}.trace"]
        for family, one in zip(families, words, strict=True)
    ]  # fmt: skip
    listing = tmp_path / "drilled.json"
    listing.write_text(json.dumps([[str(word) for word in one] for one in drilled]))
    srun = ["srun", "--kill-on-bad-exit=1", "--mpi=pmi2", f"--nodes={count}", f"--ntasks={ranks}"]
    launch.launch(
        [*srun, sys.executable, "-m", "mpi4py", "-c", jobs._SOURCE, listing], env=nodes.environment, limit=150, expect=0
    )
    for family in families:
        assert jobs.tokens_of(tmp_path / f"{family}-drilled.h5") == jobs.tokens_of(tmp_path / f"{family}.h5"), family
        deeds = list(read_deeds(tmp_path / f"{family}.trace"))
        assert any(deed.bytes for deed in deeds if deed.what == "migrate"), "nothing was copied between nodes"
        assert any(deed.what == "partition" for deed in deeds)
