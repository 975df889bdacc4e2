"""A page number means one place on a node, and a page fetched from another node is byte for byte the same."""

from __future__ import annotations

from collections.abc import Iterator

import launch
import pytest
from hypothesis import given
from hypothesis import strategies as st
from virtual_nodes import Nodes, virtual_nodes

from bgmpi.io.host_store import segment_bytes
from bgmpi.io.windows import GRAIN


@given(st.integers(1, 500), st.integers(1, 200_000), st.integers(0, 10**6))
def test_a_segment_is_whole_pages_of_both_kinds_and_holds_all_rows(pages: int, page: int, rows: int) -> None:
    size = segment_bytes(pages, page, rows)
    assert size % page == size % GRAIN == 0
    assert size >= pages * page + rows
    assert size - (pages * page + rows) < page * GRAIN


def numbers_and_places() -> None:
    import numpy as np
    import torch

    from bgmpi.errors import InternalError
    from bgmpi.io.host_store import HostStore
    from bgmpi.world import open_world

    with open_world() as world:
        for page_shape, dtype in (((2, 3, 4, 8), torch.bfloat16), ((5, 24), torch.float32), ((7, 3), torch.float16)):
            with HostStore(
                world, pages=10 + world.node_rank, layers=3, page_shape=page_shape, dtype=dtype, hidden_rows=4, hidden=9
            ) as store:
                assert store.pages == 10
                assert store.tensor.shape == (store.node_pages, 3, *page_shape)
                assert store.rows.shape == (4, 9)
                assert store.tensor.dtype == store.rows.dtype == dtype
                stride = store.node_pages // world.node_size
                assert store.first == world.node_rank * stride
                own = slice(store.first, store.first + store.pages)
                store.tensor[own] = 1 + world.rank
                store.rows.fill_(50)
                world.barrier()
                mates = np.flatnonzero(world.node_of == world.node_of[world.rank])
                for place, mate in enumerate(mates.tolist()):
                    assert store.same_node(mate)
                    assert (store.tensor[place * stride :][: store.pages] == 1 + mate).all()
                world.barrier()
                assert (store.rows == 50).all()
                store.layer(1)[own] = 7
                assert (store.tensor[own, 1] == 7).all()
                assert (store.tensor[own, [0, 2]] == 1 + world.rank).all()
                assert store.layer(2)[0].is_contiguous()
                store.check(np.arange(store.first, store.first + store.pages))
                for wrong in (-1, store.first + store.pages, store.node_pages):
                    try:
                        store.check(np.array([store.first, wrong]))
                    except InternalError as error:
                        assert f"page {wrong} is none of the node" in str(error)
                    else:
                        raise AssertionError(f"page {wrong} passed")
                world.barrier()


def pages_from_everywhere() -> None:
    import os

    import numpy as np
    import torch

    from bgmpi.io.host_store import HostStore
    from bgmpi.world import open_world

    with open_world() as world:
        assert len(set(world.node_of.tolist())) == int(os.environ.get("SLURM_NNODES", "1"))
        pages, layers = 24, 3
        # Nodes differ in how much room they have.
        pages += 8 * int(world.node_of[world.rank])
        for page_shape in ((2, 4, 8, 16), (16, 40)):
            with HostStore(
                world, pages=pages, layers=layers, page_shape=page_shape, dtype=torch.bfloat16, hidden_rows=3, hidden=5
            ) as store:
                def held(rank: int, number: int, shape: tuple[int, ...] = (layers, *page_shape)) -> torch.Tensor:
                    random = np.random.default_rng([rank, number]).integers(0, 2**16, shape, np.uint16)
                    return torch.from_numpy(random.view(np.int16))

                raw = store.tensor.view(torch.int16)
                raw.view(store.node_pages, -1)[store.first :][: store.pages].zero_()
                for number in range(12):
                    raw[store.first + number] = held(world.rank, number)
                store.sync()
                firsts = world.all_gather_counts(np.array([store.first], np.int64))[:, 0]
                order = np.random.default_rng(world.rank)
                for rank in range(world.size):
                    theirs = order.permutation(12)[:7]
                    mine = 12 + order.permutation(12)[:7]
                    if rank % 2:
                        theirs, mine = np.arange(2, 9), np.arange(13, 20)
                    receipt = store.fetch(rank, theirs + firsts[rank], mine + store.first)
                    receipt.wait()
                    for number, place in zip(theirs.tolist(), mine.tolist(), strict=True):
                        assert torch.equal(raw[store.first + place], held(rank, number)), (rank, number)
                    others = np.setdiff1d(np.arange(12, store.pages), mine) + store.first
                    assert not raw[torch.from_numpy(others)].any()
                    raw[store.first + 12 : store.first + store.pages].zero_()
                    if len(page_shape) == 4:
                        store.fetch_heads(rank, theirs + firsts[rank], mine + store.first, slice(1, 3)).wait()
                        for number, place in zip(theirs.tolist(), mine.tolist(), strict=True):
                            got = raw[store.first + place]
                            assert torch.equal(got[:, :, 1:3], held(rank, number)[:, :, 1:3])
                            assert not got[:, :, [0, 3]].any()
                        raw[store.first + 12 : store.first + store.pages].zero_()
                assert all(torch.equal(raw[store.first + number], held(world.rank, number)) for number in range(12))
                world.barrier()


def heads_of_a_latent_page() -> None:
    import numpy as np
    import torch

    from bgmpi.errors import InternalError
    from bgmpi.io.host_store import HostStore
    from bgmpi.world import open_world

    with open_world() as world, HostStore(world, pages=2, layers=1, page_shape=(4, 4), dtype=torch.float32) as store:
        try:
            store.fetch_heads(0, np.array([0]), np.array([1]), slice(0, 1))
        except InternalError as error:
            assert "has no KV heads; fetch it whole" in str(error)
        else:
            raise AssertionError("a latent page has heads")
        try:
            store.fetch(0, np.array([2]), np.array([1]))
        except InternalError as error:
            assert "page 2 is none of the node of rank 0: each of its ranks has 2 pages" in str(error)
        else:
            raise AssertionError("fetched a page that is none")


@launch.on_ranks(1, 2, 3)
def test_a_number_is_the_same_page_to_all_ranks_of_a_node_and_rows_are_beside_all_pages(ranks: int) -> None:
    launch.python_on_ranks(ranks, numbers_and_places)


@launch.on_ranks(1, 2, 3, 4)
def test_pages_fetched_from_any_rank_are_the_same_bytes_and_nothing_else_changes(ranks: int) -> None:
    launch.python_on_ranks(ranks, pages_from_everywhere)


@launch.on_ranks(1)
def test_what_is_no_page_and_what_has_no_heads_is_refused(ranks: int) -> None:
    launch.python_on_ranks(ranks, heads_of_a_latent_page)


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with virtual_nodes(4) as started:
        yield started


@pytest.mark.slurm
@pytest.mark.parametrize(("count", "ranks"), [(2, 3), (2, 4), (4, 4)])
def test_pages_fetched_from_another_node_are_the_same_bytes(nodes: Nodes, count: int, ranks: int) -> None:
    nodes.python(count, ranks, pages_from_everywhere)


@pytest.mark.slurm
def test_numbers_begin_anew_on_every_node(nodes: Nodes) -> None:
    nodes.python(2, 4, numbers_and_places)
