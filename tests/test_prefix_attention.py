"""Attention behind shared pages: the same as with private copies of them, whatever the tree, the heads and the company.

A case is a tree of labels: sequences whose leading labels are equal have the same pages there.  `shared` numbers pages
by label, `private` gives every sequence a copy of its own, in one and the same pool.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from bgmpi.kernels import reference
from bgmpi.kernels.cpu import CpuBackend

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
#: Largest difference, relative to the largest number of the result.
CLOSE = {torch.float32: 3e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}
#: Query heads, key heads (0: latent), width: grouped, one head a group, one group, and blocks that no vector divides.
SHAPES = [
    (16, 4, 64), (4, 4, 32), (8, 1, 40), (6, 2, 24), (71, 1, 8), (130, 2, 9), (16, 0, 72), (37, 0, 40), (4, 0, 17),
]


@dataclass
class Case:
    """Sequences by the labels of their leading pages, the tokens that they have behind those, and their new tokens."""

    labels: list[list[int]]
    behind: list[int]
    new: list[int]
    page_tokens: int

    def __post_init__(self) -> None:
        page = self.page_tokens
        self.first = np.concatenate([[0], np.cumsum(self.new)]).astype(np.int32)
        self.before = np.array([len(a) * page + b for a, b in zip(self.labels, self.behind, strict=True)], np.int32)
        held = [-(-int(b + n) // page) for b, n in zip(self.before, self.new, strict=True)]
        numbers = iter(np.random.default_rng(5).permutation(2 * sum(held)).astype(np.int32))
        self.private = np.full((len(held), max(held, default=0) + 1), -1, np.int32)
        for row, count in zip(self.private, held, strict=True):
            row[:count] = [next(numbers) for _ in range(count)]
        self.shared, self.pool, self.copies = self.private.copy(), 2 * sum(held), []
        one = {label: next(numbers) for label in sorted({label for row in self.labels for label in row})}
        for s, row in enumerate(self.labels):
            for k, label in enumerate(row):
                self.shared[s, k] = one[label]
                self.copies.append((int(self.private[s, k]), int(one[label])))

    def fill(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return pages [pool, *shape] of noise, in which a label's pages are copies of one another."""
        pages = torch.randn(self.pool, *shape, generator=torch.Generator().manual_seed(1)).to(dtype)
        for copy, label in self.copies:
            pages[copy] = pages[label]
        return pages


class Deed:
    """Attention of one case's new tokens, by any backend and page table."""

    def __init__(self, case: Case, heads: int, groups: int, width: int, dtype: torch.dtype, scale: float = 0.0) -> None:
        self.case, self.groups, self.value = case, groups, max(1, width - 8)
        self.scale = scale or width**-0.5
        shape = (2, groups, case.page_tokens, width) if groups else (case.page_tokens, width)
        self.pages = case.fill(shape, dtype)
        tokens = int(case.first[-1])
        self.query = torch.randn(tokens, heads, width, generator=torch.Generator().manual_seed(2)).to(dtype)

    def by(self, backend: CpuBackend, table: NDArray[np.int32], window: int = 0) -> torch.Tensor:
        plan = backend.plan_attention(self.case.first, self.case.before, table, self.case.page_tokens)
        if self.groups:
            return backend.attend(self.query, self.pages, plan, self.scale, window)
        return backend.attend_latent(self.query, self.pages, plan, self.scale, self.value)

    def expected(self) -> torch.Tensor:
        case, query, scale = self.case, self.query, self.scale
        if self.groups:
            return reference.attend(query, self.pages, case.first, case.before, case.private, scale, 0)
        return reference.attend_latent(query, self.pages, case.first, case.before, case.private, scale, self.value)


def assert_close(got: torch.Tensor, expected: torch.Tensor) -> None:
    if not expected.numel():
        return
    gap, largest = (got.double() - expected.double()).abs().max(), expected.double().abs().max()
    assert gap <= CLOSE[got.dtype] * largest, f"max |got - expected| = {gap:.3g}, max |expected| = {largest:.3g}"


def group(members: int, pages: int, behind: int = 3, page_tokens: int = 16, new: int = 1) -> Case:
    labels = [list(range(pages))] * members
    return Case(labels, [behind + 5 * m for m in range(members)], [new] * members, page_tokens)


@pytest.fixture(scope="module")
def backend() -> CpuBackend:
    return CpuBackend(None, 1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "groups", "width"), SHAPES)
def test_shared_pages_give_what_private_copies_give(
    backend: CpuBackend, heads: int, groups: int, width: int, dtype: torch.dtype
) -> None:
    tree = [[0, 1, 2, 3, 4, *range(10, 60)], [0, 1, 2, 3, 4, *range(10, 60)], [0, 1, 2, 3, 4, 5, 6, 7, 8, 9], [0, 1],
            [100], [0, 1, 2, 3, 4, 5, 6, 7, 8, 9], [0, 1, 2, 3, 4, *range(10, 40)], [], [100, *range(200, 230)]]
    case = Case(tree, [3, 40, 600, 0, 17, 33, 1, 20, 5], [1, 4, 2, 1, 1, 3, 1, 1, 30], 16)
    deed = Deed(case, heads, groups, width, dtype)
    got = deed.by(backend, case.shared)
    assert_close(got, deed.by(backend, case.private))
    assert_close(got, deed.expected())


def test_rounded_shares_lose_no_more_than_torchs_own_attention(backend: CpuBackend) -> None:
    deed, exact = (Deed(group(12, 100), 16, 4, 64, torch.bfloat16) for _ in range(2))
    exact.query = exact.query.float()  # so that the reference does not round its result
    case, wanted, by_torch = deed.case, exact.expected(), torch.empty_like(deed.query)
    for s, before in enumerate(case.before):
        held = reference.gather_pages(deed.pages, case.private[s], int(before) + 1).bfloat16()  # [2, G, n, W]
        key, value = held.repeat_interleave(4, dim=1)[:, None]
        row = deed.query[s, None, :, None]
        by_torch[s] = torch.nn.functional.scaled_dot_product_attention(row, key, value)[0, :, 0]
    ours, theirs, plain = (
        (got.float() - wanted).square().mean().sqrt()
        for got in (deed.by(backend, case.shared), by_torch, deed.by(backend, case.private))
    )
    assert plain <= ours <= 1.05 * theirs


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Up to three levels of prefixes, groups of up to 20, suffixes and new tokens of any size, in any order."""
    page_tokens = draw(st.sampled_from([4, 16, 24, 64]))
    most = 700 // page_tokens
    fresh, sequences = iter(range(10**6)), []
    for _ in range(draw(st.integers(1, 3))):
        paths = [[next(fresh) for _ in range(draw(st.integers(0, most)))]]
        for _ in range(draw(st.integers(0, 2))):
            paths.append(draw(st.sampled_from(paths)) + [next(fresh) for _ in range(draw(st.integers(0, most // 2)))])
        sequences += [draw(st.sampled_from(paths)) for _ in range(draw(st.integers(1, 20)))]
    sequences = draw(st.permutations(sequences))
    behind = [draw(st.integers(0, 2 * page_tokens)) for _ in sequences]
    new = [draw(st.sampled_from([0, 1, 1, 1, 2, 4, 21])) for _ in sequences]
    return Case(list(sequences), behind, new, page_tokens)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cases(), st.sampled_from(SHAPES), st.sampled_from(DTYPES))
def test_any_tree_of_prefixes_gives_what_private_copies_give(
    backend: CpuBackend, case: Case, shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    deed = Deed(case, *shape, dtype)
    assert_close(deed.by(backend, case.shared), deed.by(backend, case.private))


@pytest.mark.parametrize("scale", [1e-9, 3.0, 40.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_may_lie_far_apart_or_be_all_the_same(backend: CpuBackend, dtype: torch.dtype, scale: float) -> None:
    deed = Deed(group(5, 40), 6, 2, 24, dtype, scale)
    got = deed.by(backend, deed.case.shared).double()
    wanted = deed.expected().double()
    assert (got - wanted).abs().max() <= max(CLOSE[dtype], 2e-5 * scale) * wanted.abs().max()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "groups", "width"), [(16, 4, 64), (37, 0, 40)])
def test_threads_change_no_bit(heads: int, groups: int, width: int, dtype: torch.dtype) -> None:
    deed = Deed(Case([[*range(50)]] * 7 + [[]], [3] * 8, [1] * 6 + [3, 40], 16), heads, groups, width, dtype)
    try:
        results = [deed.by(CpuBackend(None, threads), deed.case.shared) for threads in (1, 2, 3)]
    finally:
        torch.set_num_threads(1)
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "groups", "width"), [(16, 4, 64), (3, 3, 8), (37, 0, 40)])
def test_a_members_bits_do_not_depend_on_the_other_members(
    backend: CpuBackend, heads: int, groups: int, width: int, dtype: torch.dtype
) -> None:
    case = Case([[*range(45)]] * 20 + [[*range(100, 130)]] * 2, [1 + s for s in range(22)], [1] * 22, 16)
    deed = Deed(case, heads, groups, width, dtype)
    whole, query = deed.by(backend, case.shared), deed.query
    for chosen in ([0, 19], [5, 21, 3, 20, 4], list(range(19, -1, -1))):
        deed.query, case.first = query[chosen], np.arange(len(chosen) + 1, dtype=np.int32)
        before, case.before = case.before, case.before[chosen]
        assert torch.equal(deed.by(backend, case.shared[chosen]), whole[chosen])
        case.before = before


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "groups", "width"), [(16, 4, 64), (37, 0, 40)])
def test_what_is_not_finite_in_one_member_does_not_reach_the_others(
    backend: CpuBackend, heads: int, groups: int, width: int, dtype: torch.dtype, bad: float
) -> None:
    deed = Deed(group(9, 20), heads, groups, width, dtype)
    good = deed.by(backend, deed.case.shared)
    deed.query[2] = bad
    deed.pages[int(deed.case.shared[5, 20])] = bad  # of sequence 5 alone
    got = deed.by(backend, deed.case.shared)
    others = [0, 1, 3, 4, 6, 7, 8]
    assert torch.equal(got[others], good[others])
    assert not got[[2, 5]].isfinite().any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_under_a_window_nothing_is_shared(backend: CpuBackend, dtype: torch.dtype) -> None:
    deed = Deed(group(6, 30), 8, 2, 16, dtype)
    for window in (1, 100, 700):
        assert torch.equal(deed.by(backend, deed.case.shared, window), deed.by(backend, deed.case.private, window))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [0, 1, 50, 300])
def test_a_prompt_behind_a_prefix_gets_what_the_reference_says(
    backend: CpuBackend, dtype: torch.dtype, window: int
) -> None:
    case = Case([[*range(20)], [*range(20)], [], [7]], [9, 0, 0, 2], [100, 70, 333, 5], 16)
    for heads, groups, width in ((16, 4, 64), (3, 3, 10), (71, 1, 8)):
        deed = Deed(case, heads, groups, width, dtype)
        wanted = reference.attend(deed.query, deed.pages, case.first, case.before, case.private, deed.scale, window)
        assert_close(deed.by(backend, case.shared, window), wanted)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_prompts_bits_do_not_depend_on_what_else_is_in_the_batch(backend: CpuBackend, dtype: torch.dtype) -> None:
    case = Case([[*range(20)], [*range(20)], []], [9, 0, 0], [100, 1, 33], 16)
    deed = Deed(case, 16, 4, 64, dtype)
    whole = deed.by(backend, case.shared)
    plan = backend.plan_attention(np.array([0, 100], np.int32), case.before[:1], case.private[:1], 16)
    assert torch.equal(backend.attend(deed.query[:100], deed.pages, plan, deed.scale, 0), whole[:100])
