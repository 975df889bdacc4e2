"""Pages arrive whole and where they were sent, and nothing beside them changes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bgmpi.errors import InternalError
from bgmpi.kernels import open_backend
from bgmpi.kernels.backend import Backend
from bgmpi.kernels.cpu_page_kernels import PIECE, run_copy
from bgmpi.kernels.team import Team

INT64 = np.int64


@pytest.fixture(scope="module")
def backend() -> Backend:
    return open_backend("cpu", None, 1)


@pytest.fixture(scope="module", params=[1, 2])
def team(request: pytest.FixtureRequest) -> Team:
    threads: int = request.param
    return Team(threads)


@pytest.mark.parametrize("size", [1, 100, 4096, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE // 2, (1 << 20) + 12])
def test_pages_of_any_size_arrive_whole_and_alone(team: Team, size: int) -> None:
    count = max(4, 3 * PIECE // size // 2)
    source = torch.randint(0, 255, (count + 2, size), dtype=torch.uint8)
    before = torch.randint(0, 255, (count + 3, size), dtype=torch.uint8)
    order = np.random.default_rng(size)
    of, to = order.permutation(count + 2)[:count], order.permutation(count + 3)[:count]
    target = before.clone()
    run_copy(team, target, to, source, of)
    expected = before.clone()
    expected[torch.from_numpy(to)] = source[torch.from_numpy(of)]
    assert torch.equal(target, expected)


@given(data=st.data())
@settings(deadline=None, max_examples=40)
def test_one_layer_of_a_store_moves_to_and_from_a_buffer_of_that_layer(backend: Backend, data: st.DataObject) -> None:
    pages, layers = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 4))
    shape = (2, data.draw(st.integers(1, 3)), 4, data.draw(st.integers(1, 7)))
    layer = data.draw(st.integers(0, layers - 1))
    store = torch.randn(pages, layers, *shape).bfloat16()
    buffer = torch.zeros(12, *shape, dtype=torch.bfloat16)
    of = np.array(data.draw(st.lists(st.integers(0, pages - 1), max_size=12)), INT64)
    to = np.array(data.draw(st.permutations(range(12)))[: len(of)], INT64)
    receipt = backend.copy_pages(buffer, to, store[:, layer], of)
    receipt.wait()
    assert receipt.done()
    expected = torch.zeros_like(buffer)
    expected[torch.from_numpy(to)] = store[:, layer][torch.from_numpy(of)]
    assert torch.equal(buffer, expected)
    back = torch.zeros_like(store)
    once, where = np.unique(of, return_index=True)
    backend.copy_pages(back[:, layer], once, buffer, to[where]).wait()
    assert torch.equal(back[:, layer][torch.from_numpy(once)], store[:, layer][torch.from_numpy(once)])
    assert back.count_nonzero() == back[:, layer][torch.from_numpy(once)].count_nonzero()


def test_no_pages_are_a_copy_too(backend: Backend) -> None:
    none = np.empty(0, INT64)
    backend.copy_pages(torch.zeros(0, 3), none, torch.zeros(2, 3), none).wait()


def test_what_does_not_fit_together_is_refused(backend: Backend) -> None:
    target, source, one = torch.zeros(3, 2, 4), torch.zeros(5, 2, 4), np.array([1])
    cases = [
        (target, np.array([3]), source, one, "target pages 3 to 3, but there are 3"),
        (target, one, source, np.array([-1]), "source pages -1 to -1, but there are 5"),
        (target, np.array([0, 1]), source, one, "1 pages to copy to 2 places"),
        (target.half(), one, source, one, "dtype and all but the first dimension"),
        (torch.zeros(3, 2, 5), one, source, one, "dtype and all but the first dimension"),
        (target, one, torch.zeros(5, 4, 2).mT, one, "a page of source is not contiguous"),
    ]
    for to, to_pages, of, of_pages, words in cases:
        with pytest.raises(InternalError, match=words):
            backend.copy_pages(to, to_pages, of, of_pages)
