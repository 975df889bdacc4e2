"""What crosses ranks arrives as it left, and what one rank alone cannot do ends on all of them."""

from __future__ import annotations

import launch
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from bgmpi.head import Orders
from bgmpi.primitives import Admit, Moved, Reported, Run, Stop
from bgmpi.rank import Work
from bgmpi.request import Request, Sampling
from bgmpi.tally import Counts, Moves
from bgmpi.world import decode, encode


@given(hnp.arrays(np.int64, st.integers(0, 50)), st.integers(0, 2**64 - 1), st.text(max_size=20))
@settings(deadline=None, max_examples=50)
def test_orders_arrive_as_they_left(ids: np.ndarray, seed: int, custom_id: str) -> None:
    request = Request(3, custom_id, "/v1/completions", ids.astype(np.int32), 2, Sampling(seed, logit_bias=((1, 2.5),)))
    sent = Orders([Admit(ids), Run(7, more=True), Stop()], [Work(request, [4, 5], [0, 1], 99, 0.25)])
    got = decode(encode(sent), Orders)
    assert [type(one) for one in got.instructions] == [Admit, Run, Stop]
    np.testing.assert_array_equal(got.instructions[0].sequences, ids)  # type: ignore[union-attr]
    assert got.instructions[1] == sent.instructions[1] or got.instructions[1].more  # type: ignore[union-attr]
    work = got.work[0]
    assert (work.sequences, work.samples, work.most, work.queued_s) == ([4, 5], [0, 1], 99, 0.25)
    assert work.request.sampling == request.sampling
    assert work.request.custom_id == custom_id
    assert work.request.prompt.dtype == np.int32
    np.testing.assert_array_equal(work.request.prompt, request.prompt)
    work.request.prompt.sort()


def test_reports_and_counts_arrive_as_they_left() -> None:
    report = Reported(1, (Moved(1, np.arange(3)), Moved(5, np.arange(0))), 4, 9, 2, 0, seconds=0.5)
    got = decode(encode(report), Reported)
    assert [(m.state, m.sequences.tolist()) for m in got.moves] == [(1, [0, 1, 2]), (5, [])]
    assert (got.free_pages, got.seconds) == (4, 0.5)
    back = decode(encode(Counts(np.arange(4), Moves(1, 2, 3, 4))), Counts)
    assert (back.routed.tolist(), back.moves) == ([0, 1, 2, 3], Moves(1, 2, 3, 4))


def test_another_kind_of_message_is_refused() -> None:
    with pytest.raises(msgspec.ValidationError):
        decode(encode({"instructions": 3}), Orders)


@launch.on_ranks(2, 3)
def test_rounds_reach_every_rank_whatever_their_size(ranks: int) -> None:
    def body() -> None:
        import numpy as np

        from bgmpi.world import decode, open_world

        with open_world() as world:
            for size in (0, 1, 1000, 300_000):
                gathered = world.gather({"rank": world.rank, "data": "x" * (size * world.rank)})
                if world.rank == 0:
                    assert gathered is not None
                    heard = [decode(one, dict) for one in gathered]
                    assert [one["rank"] for one in heard] == list(range(world.size))
                    assert [len(one["data"]) for one in heard] == [size * rank for rank in range(world.size)]
                values = [[rank] * (rank * size) for rank in range(world.size)] if world.rank == 0 else None
                assert world.scatter(values, list[int]) == [world.rank] * (world.rank * size)
            assert world.broadcast("word" if world.rank == 0 else None, str) == "word"
            counts = world.all_gather_counts(np.array([world.rank, 7], np.int64))
            assert counts.tolist() == [[rank, 7] for rank in range(world.size)]

    launch.python_on_ranks(ranks, body)


@launch.on_ranks(3)
def test_the_first_failing_ranks_error_is_raised_on_every_rank(ranks: int) -> None:
    def body() -> None:
        from bgmpi.errors import BgmpiError, ExitCode, MissingError
        from bgmpi.world import open_world

        with open_world() as world:
            try:
                world.agree(MissingError(f"no file {world.rank}") if world.rank else None)
            except BgmpiError as error:
                assert error.agreed
                assert error.exit_code == ExitCode.MISSING
                assert str(error).startswith("rank 1/")
                assert str(error).endswith("no file 1")
                print(f"raised on {world.rank}")
            world.agree(None)

    ended = launch.python_on_ranks(ranks, body)
    # What several ranks print at once may run together.
    assert sorted(ended.stdout.replace("\n", "").split("raised on ")) == ["", "0", "1", "2"]


@launch.on_ranks(1, 2, 3, 4)
def test_groups_are_the_whole_world_and_full_neighbourhoods_of_powers_of_two(ranks: int) -> None:
    def body() -> None:
        import numpy as np

        from bgmpi.world import open_world

        with open_world() as world:
            groups = world.groups()
            pairs = {(2 * k, 2) for k in range(world.size // 2)} if world.size > 2 else set()
            mine = {(first, size) for first, size in pairs if first <= world.rank < first + size}
            assert set(groups) == {(0, world.size)} | mine
            for (first, size), group in groups.items():
                assert (group.first, group.size, group.rank) == (first, size, world.rank - first)
                counts = np.arange(size, dtype=np.int64) * 3
                send = np.full(3 * group.rank, 10 + group.rank, np.uint8)
                receive = np.zeros(int(counts.sum()), np.uint8)
                group.all_gather_bytes(send, counts, receive)
                assert receive.tolist() == [10 + member for member in range(size) for _ in range(3 * member)]
                for root in range(size):
                    buffer = np.full(5, world.rank, np.uint8)
                    group.broadcast_bytes(buffer, root)
                    assert buffer.tolist() == [first + root] * 5
                everyone = group.all_gather_counts(np.array([world.rank, 7], np.int64))
                assert everyone.tolist() == [[first + member, 7] for member in range(size)]

    launch.python_on_ranks(ranks, body)


@launch.on_ranks(1, 3)
def test_memory_of_a_window_can_be_written_at_once_and_is_freed_by_all(ranks: int) -> None:
    def body() -> None:
        import numpy as np

        from bgmpi.world import open_world

        with open_world() as world:
            assert world.node_of.tolist() == [0] * world.size
            for _ in range(2):
                window = world.allocate(8 + world.rank)
                memory = np.frombuffer(window.tomemory(), np.uint8)
                assert len(memory) == 8 + world.rank
                memory[:] = 1
                window.Unlock_all()
                window.Free()

    launch.python_on_ranks(ranks, body)
