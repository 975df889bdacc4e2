"""Bytes of another rank are read in place on a node and by one-sided gets between nodes, and are the right ones."""

from __future__ import annotations

from collections.abc import Iterator

import launch
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from virtual_nodes import Nodes, virtual_nodes

from bgmpi.io.windows import _joined


@given(st.data())
def test_joined_pieces_hold_the_same_bytes_each_within_a_segment(data: st.DataObject) -> None:
    size, per_segment, segments = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 4)), 3
    segment = size * per_segment
    places = per_segment * segments
    source = data.draw(st.lists(st.integers(0, places - 1), max_size=places, unique=True))
    target = data.draw(st.permutations(range(places)))[: len(source)]
    pieces = list(zip(*_joined(np.array(source, np.int64) * size, np.array(target, np.int64) * size, size, segment),
                      strict=True))  # fmt: skip
    wanted = {(t * size + i, s * size + i) for s, t in zip(source, target, strict=True) for i in range(size)}
    got = [(t + i, s + i) for s, t, length in pieces for i in range(length)]
    assert len(got) == len(wanted)
    assert set(got) == wanted
    assert all(s // segment == (s + length - 1) // segment for s, _, length in pieces)


def test_neighbouring_pieces_travel_as_one() -> None:
    source, target = np.arange(8, dtype=np.int64)[::-1] * 10, np.arange(100, 108, dtype=np.int64)[::-1] * 10
    assert _joined(source, target, 10, 40) == ([0, 40], [1000, 1040], [40, 40])


def block_of_a_node() -> None:
    import os

    import numpy as np

    from bgmpi.io.windows import GRAIN, Window
    from bgmpi.world import open_world

    with open_world() as world:
        assert len(set(world.node_of.tolist())) == int(os.environ.get("SLURM_NNODES", "1"))
        for size in (GRAIN, 3 * GRAIN):
            with Window(world, size) as window:
                assert window.own.ctypes.data % GRAIN == 0
                assert len(window.own) == size
                assert len(window.node) == size * world.node_size
                assert window.node_offset == size * world.node_rank
                window.own[:] = world.rank + 1
                window.sync()
                world.barrier()
                mates = np.flatnonzero(world.node_of == world.node_of[world.rank])
                assert [window.same_node(rank) for rank in range(world.size)] == [r in mates for r in range(world.size)]
                assert (window.node.reshape(-1, size) == mates[:, None] + 1).all()
                world.barrier()
                first = window.node.reshape(-1, size)[(world.node_rank + 1) % world.node_size]
                first[7] = 100 + world.rank
                world.barrier()
                assert window.own[7] == 100 + mates[world.node_rank - 1]
                world.barrier()


def pieces_of_every_rank() -> None:
    import numpy as np

    from bgmpi.errors import InternalError
    from bgmpi.io.windows import GRAIN, Window
    from bgmpi.world import open_world

    with open_world() as world:
        # Nodes differ in size; what lies where is told by every rank's random numbers.
        sizes = (1 + world.node_of) * GRAIN
        window = Window(world, int(sizes[world.rank]))
        assert (window.sizes == sizes).all()
        bytes_of = [np.random.default_rng(rank).integers(0, 255, sizes[rank], np.uint8) for rank in range(world.size)]
        window.own[:] = bytes_of[world.rank]
        window.sync()
        world.barrier()
        order = np.random.default_rng(9 + world.rank)
        for rank in range(world.size):
            mates = np.flatnonzero(world.node_of == world.node_of[rank])
            block = np.concatenate([bytes_of[mate] for mate in mates])
            for size in (1, 512, GRAIN):
                offsets = order.permutation(len(block) // size)[: max(1, len(block) // size // 2)] * size
                places = order.permutation(len(offsets) + 3)[: len(offsets)] * size
                target = np.zeros((len(offsets) + 3) * size, np.uint8)
                receipt = window.get(rank, offsets, size, target, places)
                if size == 512:
                    while not receipt.done():
                        pass
                receipt.wait()
                assert receipt.done()
                expected = np.zeros_like(target).reshape(-1, size)
                expected[places // size] = block.reshape(-1, size)[offsets // size]
                assert (target.reshape(-1, size) == expected).all()
            whole = np.empty(len(block), np.uint8)
            none = np.empty(0, np.int64)
            window.get(rank, np.zeros(1, np.int64), int(sizes[rank]), whole, np.zeros(1, np.int64)).wait()
            window.get(rank, none, 8, whole, none).wait()
            for offset, place in ((-1, 0), (len(block) - 7, 0), (0, -1), (0, len(whole) - 7)):
                try:
                    window.get(rank, np.array([offset]), 8, whole, np.array([place]))
                except InternalError as error:
                    assert "are not in the" in str(error)
                else:
                    raise AssertionError(f"read {offset} to {place}")
        world.barrier()
        window.close()
        window.close()
        try:
            window.get(0, np.zeros(1, np.int64), 1, np.zeros(1, np.uint8), np.zeros(1, np.int64))
        except InternalError as error:
            assert "closed" in str(error)
        else:
            raise AssertionError("read from a closed window")


def segments_that_do_not_touch() -> None:
    import numpy as np

    from bgmpi.io.windows import GRAIN, Window
    from bgmpi.world import open_world

    class Apart:
        def __init__(self, raw: object, broken: bool) -> None:
            self.raw, self.broken = raw, broken

        def __getattr__(self, name: str) -> object:
            if name == "Shared_query" and self.broken:
                raise NotImplementedError("no such call in this MPI")
            return getattr(self.raw, name)

    with open_world() as world:
        # One rank alone sees it: all must still agree.
        allocate = world.allocate
        world.allocate = lambda size: Apart(allocate(size), broken=world.rank == 1)  # type: ignore[method-assign]
        with Window(world, GRAIN) as window:
            shared = [window.same_node(rank) for rank in range(world.size)]
            assert shared == [rank == world.rank for rank in range(world.size)]
            assert window.node is window.own
            assert window.node_offset == 0
            window.own[:] = world.rank + 1
            window.sync()
            world.barrier()
            target = np.zeros(2, np.uint8)
            for rank in range(world.size):
                window.get(rank, np.array([GRAIN - 2]), 2, target, np.array([0])).wait()
                assert target.tolist() == [rank + 1] * 2
            world.barrier()


@launch.on_ranks(1, 2, 3, 4)
def test_the_segments_of_a_node_are_one_array_in_rank_order(ranks: int) -> None:
    launch.python_on_ranks(ranks, block_of_a_node)


@launch.on_ranks(1, 2, 3)
def test_gets_bring_the_bytes_that_were_asked_for_and_no_others(ranks: int) -> None:
    launch.python_on_ranks(ranks, pieces_of_every_rank)


@launch.on_ranks(3)
def test_segments_that_do_not_touch_are_other_nodes_to_each_other(ranks: int) -> None:
    ended = launch.python_on_ranks(ranks, segments_that_do_not_touch)
    assert "does not lay a node's segments behind each other" in ended.stderr


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with virtual_nodes(4) as started:
        yield started


@pytest.mark.slurm
@pytest.mark.parametrize(("count", "ranks"), [(2, 2), (2, 3), (2, 4), (4, 4)])
def test_between_nodes_gets_bring_the_same_bytes(nodes: Nodes, count: int, ranks: int) -> None:
    nodes.python(count, ranks, block_of_a_node)
    nodes.python(count, ranks, pieces_of_every_rank)
