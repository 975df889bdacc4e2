"""The CPU behind the seam against the slow reference: every call and dtype, ragged and empty batches, 1 to 4 ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from bgmpi.errors import InternalError, UsageError
from bgmpi.kernels import open_backend, reference
from bgmpi.kernels.cpu import CpuBackend

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
#: Largest difference to the reference, relative to the largest number of the result.
CLOSE = {torch.float32: 3e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def assert_close(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert got.shape == expected.shape
    assert got.dtype == expected.dtype
    if expected.numel():
        gap, largest = (got.double() - expected.double()).abs().max(), expected.double().abs().max()
        assert gap <= CLOSE[got.dtype] * largest, f"max |got - expected| = {gap:.3g}, max |expected| = {largest:.3g}"


FORMS = {
    "as the machine has it": lambda: CpuBackend(None, 1),
    "without tiles": lambda: CpuBackend(None, 1, tiles=False),
    "without tiles and panels": lambda: CpuBackend(None, 1, tiles=False, panels=False),
}


@pytest.fixture(scope="module", params=FORMS)
def backend(request: pytest.FixtureRequest) -> CpuBackend:
    return FORMS[request.param]()


class Batch:
    """A random micro-batch: pages in random order, spare pages and columns between and behind."""

    def __init__(self, new: list[int], before: list[int], page_tokens: int = 16) -> None:
        random = np.random.default_rng(3)
        self.first = np.concatenate([[0], np.cumsum(new)]).astype(np.int32)
        self.before = np.array(before, np.int32)
        needed = [-(-(n + b) // page_tokens) for n, b in zip(new, before, strict=True)]
        self.pool = sum(needed) + 3
        self.page_tokens = page_tokens
        self.pages = np.full((len(new), max(needed, default=0) + 1), -1, np.int32)
        numbers = iter(random.permutation(self.pool))
        for sequence, count in enumerate(needed):
            self.pages[sequence, :count] = [next(numbers) for _ in range(count)]
        self.tokens = int(self.first[-1])

    def plan(self, backend: CpuBackend):  # type: ignore[no-untyped-def]
        return backend.plan_attention(self.first, self.before, self.pages, self.page_tokens)


BATCHES = {
    "decode": ([1, 1, 1, 1], [0, 5, 300, 31]),
    "prefill": ([40, 5, 17], [0, 0, 0]),
    "decode and chunks of prefill together": ([1, 33, 3, 1, 20, 2], [70, 15, 16, 15, 100, 0]),
    "longer than one span": ([1, 1, 3], [513, 1400, 1022]),
    "sequences without new tokens": ([0, 2, 0, 7], [4, 9, 0, 3]),
    "nothing": ([], []),
}


@pytest.mark.parametrize("window", [0, 1, 9, 600])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", BATCHES)
def test_grouped_attention_equals_the_reference(
    backend: CpuBackend, name: str, dtype: torch.dtype, window: int
) -> None:
    torch.manual_seed(1)
    batch = Batch(*BATCHES[name])
    plan = batch.plan(backend)
    pages = torch.randn(batch.pool, 2, 2, 16, 24).to(dtype)
    query = torch.randn(batch.tokens, 6, 24).to(dtype)
    expected = reference.attend(query, pages, batch.first, batch.before, batch.pages, 0.2, window)
    assert_close(backend.attend(query, pages, plan, 0.2, window), expected)


@pytest.mark.parametrize("heads", [2, 17])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", BATCHES)
def test_latent_attention_equals_the_reference(backend: CpuBackend, name: str, dtype: torch.dtype, heads: int) -> None:
    torch.manual_seed(2)
    batch = Batch(*BATCHES[name])
    plan = batch.plan(backend)
    pages = torch.randn(batch.pool, 16, 40).to(dtype)
    query = torch.randn(batch.tokens, heads, 40).to(dtype)
    expected = reference.attend_latent(query, pages, batch.first, batch.before, batch.pages, 0.2, 32)
    assert_close(backend.attend_latent(query, pages, plan, 0.2, 32), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_append_writes_each_new_token_into_its_place_and_nothing_else(backend: CpuBackend, dtype: torch.dtype) -> None:
    batch = Batch([1, 33, 0, 3], [70, 15, 4, 16])
    plan = batch.plan(backend)
    fused = torch.randn(batch.tokens, 5 * 8).to(dtype)  # a view into it, as a model has it
    key, value = fused[:, 8:24].view(-1, 2, 8), fused[:, 24:].view(-1, 2, 8)
    pages = torch.randn(batch.pool, 2, 2, 16, 8).to(dtype)
    latent_pages = torch.randn(batch.pool, 16, 8).to(dtype)
    expected, latent_expected = pages.clone(), latent_pages.clone()
    for sequence, before in enumerate(batch.before):
        for token in range(batch.first[sequence], batch.first[sequence + 1]):
            position = int(before) + token - int(batch.first[sequence])
            page, slot = batch.pages[sequence, position // 16], position % 16
            expected[page, 0, :, slot], expected[page, 1, :, slot] = key[token], value[token]
            latent_expected[page, slot] = fused[token, :8]
    backend.append(key, value, pages, plan)
    backend.append_latent(fused[:, :8], latent_pages, plan)
    assert torch.equal(pages, expected)
    assert torch.equal(latent_pages, latent_expected)


@pytest.mark.parametrize("window", [0, 40])
@pytest.mark.parametrize("dtype", DTYPES)
def test_pages_may_be_one_layer_and_some_heads_of_a_wider_whole(
    backend: CpuBackend, dtype: torch.dtype, window: int
) -> None:
    batch = Batch([1, 33, 3, 20], [700, 15, 16, 100])
    plan = batch.plan(backend)
    store = torch.randn(batch.pool, 3, 2, 5, 16, 24).to(dtype)  # page, layer, keys and values, head, token, column
    view, before = store[:, 1, :, 1:3], store.clone()
    alone = view.contiguous()
    query = torch.randn(batch.tokens, 6, 24).to(dtype)
    key, value = torch.randn(2, batch.tokens, 2, 24).to(dtype)
    for pages in (view, alone):
        backend.append(key, value, pages, plan)
    assert torch.equal(view, alone)
    assert torch.equal(backend.attend(query, view, plan, 0.2, window), backend.attend(query, alone, plan, 0.2, window))
    before[:, 1, :, 1:3] = alone
    assert torch.equal(store, before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_latent_pages_may_be_one_layer_of_all(backend: CpuBackend, dtype: torch.dtype) -> None:
    batch = Batch([1, 33, 3, 20], [700, 15, 16, 100])
    plan = batch.plan(backend)
    store = torch.randn(batch.pool, 3, 16, 40).to(dtype)
    view, before = store[:, 2], store.clone()
    alone = view.contiguous()
    query, latent = torch.randn(batch.tokens, 6, 40).to(dtype), torch.randn(batch.tokens, 40).to(dtype)
    for pages in (view, alone):
        backend.append_latent(latent, pages, plan)
    assert torch.equal(view, alone)
    assert torch.equal(
        backend.attend_latent(query, view, plan, 0.2, 32), backend.attend_latent(query, alone, plan, 0.2, 32)
    )
    before[:, 2] = alone
    assert torch.equal(store, before)


def test_pages_whose_rows_lie_apart_are_refused(backend: CpuBackend) -> None:
    plan = backend.plan_attention(np.array([0, 1], np.int32), np.array([0], np.int32), np.array([[0]], np.int32), 16)
    with pytest.raises(InternalError, match="rows of a page must lie one behind the other"):
        backend.attend(torch.zeros(1, 2, 8), torch.zeros(1, 2, 2, 16, 9)[..., :8], plan, 1.0, 0)
    with pytest.raises(InternalError, match="3 query heads over 2 key-value heads"):
        backend.attend(torch.zeros(1, 3, 8), torch.zeros(1, 2, 2, 16, 8), plan, 1.0, 0)


def test_a_decode_row_is_bit_equal_alone_and_in_company(backend: CpuBackend) -> None:
    pages = torch.randn(200, 2, 2, 16, 16)
    query = torch.randn(3, 4, 16)
    together = Batch([1, 1, 1], [700, 3, 40])
    all_rows = backend.attend(query, pages, together.plan(backend), 0.3, 0)
    for row in range(3):
        alone = backend.plan_attention(
            np.array([0, 1], np.int32), together.before[row : row + 1], together.pages[row : row + 1], 16
        )
        assert torch.equal(backend.attend(query[row : row + 1], pages, alone, 0.3, 0)[0], all_rows[row])


def test_a_plan_without_enough_pages_is_refused(backend: CpuBackend) -> None:
    with pytest.raises(InternalError, match="sequence 1 of the micro-batch has 1 pages and needs 2"):
        backend.plan_attention(
            np.array([0, 1, 2], np.int32), np.array([0, 16], np.int32), np.array([[0, -1], [1, -1]], np.int32), 16
        )


def test_pages_outside_the_pool_are_refused(backend: CpuBackend) -> None:
    plan = backend.plan_attention(np.array([0, 1], np.int32), np.array([0], np.int32), np.array([[7]], np.int32), 16)
    with pytest.raises(InternalError, match="pages up to 7"):
        backend.attend(torch.zeros(1, 2, 8), torch.zeros(7, 2, 2, 16, 8), plan, 1.0, 0)


@pytest.mark.parametrize("tokens", [0, 1, 3, 8, 33, 70])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(64, 32), (37, 1001), (1, 7)])
def test_linear_is_x_times_the_weight_plus_the_bias(
    backend: CpuBackend, rows: int, width: int, dtype: torch.dtype, tokens: int
) -> None:
    torch.manual_seed(3)
    x, weight, bias = torch.randn(tokens, width).to(dtype), torch.randn(rows, width).to(dtype), torch.randn(rows)
    expected = torch.nn.functional.linear(x.double(), weight.double())
    assert_close(backend.linear(weight)(x), expected.to(dtype))
    bias = bias.to(dtype)
    assert_close(backend.linear(weight, bias)(x), (expected + bias.double()).to(dtype))


@pytest.mark.parametrize("tokens", [0, 1, 7, 60, 300])
@pytest.mark.parametrize("dtype", DTYPES)
def test_experts_equal_the_reference_with_tokens_that_have_none_here(
    backend: CpuBackend, dtype: torch.dtype, tokens: int
) -> None:
    torch.manual_seed(4)
    gate_up = [(torch.randn(2 * 24, 40) * 0.3).to(dtype) for _ in range(5)]
    down = [(torch.randn(40, 24) * 0.3).to(dtype) for _ in range(5)]
    x, weight = torch.randn(tokens, 40).to(dtype), torch.rand(tokens, 3)
    expert = torch.rand(tokens, 5).argsort(1)[:, :3].int()
    expert[torch.rand(tokens, 3) < 0.3] = -1
    got = backend.experts(gate_up, down)(x, expert, weight)
    assert_close(got, reference.experts(x, expert, weight, gate_up, down))
    assert not got[(expert < 0).all(1)].any()


def test_a_rank_without_experts_answers_zeros(backend: CpuBackend) -> None:
    none = torch.full((4, 2), -1, dtype=torch.int32)
    assert torch.equal(backend.experts([], [])(torch.randn(4, 8), none, torch.rand(4, 2)), torch.zeros(4, 8))


def test_an_expert_number_that_is_not_local_is_refused(backend: CpuBackend) -> None:
    experts = backend.experts([torch.zeros(4, 8)], [torch.zeros(8, 2)])
    with pytest.raises(InternalError, match="this rank owns 1"):
        experts(torch.zeros(1, 8), torch.ones(1, 1, dtype=torch.int32), torch.ones(1, 1))


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_gate_and_rotation_equal_their_formulas(backend: CpuBackend, dtype: torch.dtype) -> None:
    torch.manual_seed(5)
    x, weight = (torch.randn(300, 3, 40) * 3).to(dtype), torch.randn(40).to(dtype)
    wide = x.float()
    normal = weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)).to(dtype)
    assert_close(backend.rms_norm(x, weight, 1e-5), normal)
    gate, up = x.view(300, 120).double().chunk(2, -1)
    assert_close(backend.silu_mul(x.view(300, 120)), (torch.nn.functional.silu(gate) * up).to(dtype))
    angle = torch.rand(300, 16) * 6
    low, high = wide[..., :16], wide[..., 16:32]
    cos, sin = angle.cos(), angle.sin()
    expected = torch.cat([low * cos[:, None] - high * sin[:, None], high * cos[:, None] + low * sin[:, None]], -1)
    rotated = backend.rotate(x.clone(), cos, sin)
    assert_close(rotated[..., :32], expected.to(dtype))
    assert torch.equal(rotated[..., 32:], x[..., 32:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_not_a_number_is_never_hidden(backend: CpuBackend, dtype: torch.dtype) -> None:
    x = torch.randn(6, 64).to(dtype)
    x[2, 5] = torch.nan
    poisoned = torch.tensor([False, False, True, False, False, False])
    weight = torch.randn(64, 64).to(dtype)
    expert, share = torch.zeros(6, 1, dtype=torch.int32), torch.ones(6, 1)
    gate_up, down = [torch.randn(2 * 32, 64).to(dtype)], [torch.randn(64, 32).to(dtype)]
    plan = Batch([1] * 6, [20] * 6).plan(backend)
    pages = torch.randn(16, 2, 1, 16, 64).to(dtype)
    for result in (
        backend.linear(weight)(x), backend.rms_norm(x, torch.ones(64, dtype=dtype), 1e-6),
        backend.experts(gate_up, down)(x, expert, share), backend.attend(x[:, None], pages, plan, 0.1, 0)[:, 0],
    ):
        assert torch.equal(result.isnan().all(1), poisoned)
        assert torch.equal(result.isnan().any(1), poisoned)


def test_a_copy_is_done_at_once_and_refuses_other_shapes(backend: CpuBackend) -> None:
    target, source = backend.empty((2, 3), torch.float32), torch.randn(2, 3)
    receipt = backend.copy(target, source)
    assert receipt.done()
    receipt.wait()
    assert torch.equal(target, source)
    with pytest.raises(InternalError, match="must be the same"):
        backend.copy(target, torch.zeros(3, 2))


def test_two_threads_and_one_thread_give_the_same_bits() -> None:
    torch.manual_seed(6)
    gate_up, down = [torch.randn(2 * 96, 256) for _ in range(3)], [torch.randn(256, 96) for _ in range(3)]
    x, weight = torch.randn(8, 256), torch.randn(300, 256)
    expert, share = torch.randint(0, 3, (8, 1), dtype=torch.int32), torch.rand(8, 1)
    batch, pages = Batch([1] * 8, [600, 0, 31, 32, 900, 5, 64, 7]), torch.randn(120, 2, 2, 16, 64)
    results = []
    for threads in (1, 2):
        one = CpuBackend(None, threads)
        results.append((
            one.linear(weight)(x), one.experts(gate_up, down)(x, expert, share),
            one.attend(x.view(8, 4, 64), pages, batch.plan(one), 0.1, 0),
        ))
    torch.set_num_threads(1)
    for alone, shared in zip(*results, strict=True):
        assert torch.equal(alone, shared)


def test_an_unknown_device_or_no_thread_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="'tpu' is not known; expected one of: cpu"):
        open_backend("tpu", None, 1)
    with pytest.raises(UsageError, match="threads=0"):
        open_backend("cpu", None, 0)


class Board:
    """A collective between threads of one process: each writes its piece on the board, all meet, each reads its own."""

    def __init__(self, size: int) -> None:
        self.meet = threading.Barrier(size, timeout=20)
        self.pieces: list[list[NDArray[np.uint8]]] = [[] for _ in range(size)]
        self.counts: list[NDArray[np.int64]] = [np.zeros(0, np.int64)] * size


class OnBoard:
    """One rank's side of a Board; a `Collective`."""

    def __init__(self, board: Board, rank: int) -> None:
        self.board, self.rank, self.size = board, rank, len(board.pieces)

    def all_to_all_counts(self, counts: NDArray[np.int64]) -> NDArray[np.int64]:
        self.board.counts[self.rank] = counts
        self.board.meet.wait()
        received = np.array([self.board.counts[rank][self.rank] for rank in range(self.size)])
        self.board.meet.wait()
        return received

    def all_to_all_bytes(
        self, send: NDArray[np.uint8], send_counts: NDArray[np.int64], receive: NDArray[np.uint8],
        receive_counts: NDArray[np.int64],
    ) -> None:
        assert send.dtype == receive.dtype == np.uint8
        assert (len(send), len(receive)) == (send_counts.sum(), receive_counts.sum())
        self.board.pieces[self.rank] = np.split(send, np.cumsum(send_counts)[:-1])
        self.board.meet.wait()
        mine = [self.board.pieces[rank][self.rank] for rank in range(self.size)]
        assert [len(piece) for piece in mine] == list(receive_counts)
        receive[:] = np.concatenate(mine)
        self.board.meet.wait()


def on_ranks(size: int, rank_body: Callable[[CpuBackend, int], torch.Tensor]) -> list[torch.Tensor]:
    board = Board(size)
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(lambda rank: rank_body(CpuBackend(OnBoard(board, rank), 1), rank), range(size)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [[5], [4, 9], [7, 0, 3], [0, 0, 0], [1, 2, 3, 40]])
def test_tokens_go_once_to_each_rank_of_their_experts_and_come_back_summed(
    tokens: list[int], dtype: torch.dtype
) -> None:
    torch.manual_seed(7)
    ranks, experts = len(tokens), 5
    owner = torch.tensor([0, ranks - 1, 0, min(1, ranks - 1), 0], dtype=torch.int32)  # uneven; some ranks own none
    owned = [[e for e in range(experts) if owner[e] == rank] for rank in range(ranks)]
    local = torch.tensor([owned[int(owner[e])].index(e) for e in range(experts)], dtype=torch.int32)
    gate_up = [(torch.randn(2 * 6, 8) * 0.5).to(dtype) for _ in range(experts)]
    down = [(torch.randn(8, 6) * 0.5).to(dtype) for _ in range(experts)]
    x = [torch.randn(count, 8).to(dtype) for count in tokens]
    expert = [torch.rand(count, experts).argsort(1)[:, :2].int() for count in tokens]
    weight = [torch.rand(count, 2) for count in tokens]
    arrived = [0] * ranks

    def body(backend: CpuBackend, rank: int) -> torch.Tensor:
        mine = backend.experts([gate_up[e] for e in owned[rank]], [down[e] for e in owned[rank]])
        exchanged = backend.exchange(x[rank], expert[rank], weight[rank], owner, local)
        arrived[rank] = len(exchanged.x)
        return backend.give_back(exchanged, mine(exchanged.x, exchanged.expert, exchanged.weight))

    results = on_ranks(ranks, body)
    for got, expected in zip(
        results, reference.exchange_and_give_back(x, expert, weight, owner, gate_up, down), strict=True
    ):
        assert_close(got, expected)
    places = [owner[chosen.long()] for chosen in expert]
    assert arrived == [sum(int((place == rank).any(1).sum()) for place in places) for rank in range(ranks)]


def test_one_rank_exchanges_without_a_copy(backend: CpuBackend) -> None:
    x, expert, weight = torch.randn(3, 8), torch.zeros(3, 2, dtype=torch.int32), torch.rand(3, 2)
    zero = torch.zeros(1, dtype=torch.int32)
    exchanged = backend.exchange(x, expert, weight, zero, zero)
    assert exchanged.x is x
    y = torch.randn(3, 8)
    assert backend.give_back(exchanged, y) is y


@pytest.mark.parametrize("tokens", [0, 1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 31, 32, 33, 40, 48, 63, 64])
@pytest.mark.parametrize("dtype", DTYPES)
def test_some_rows_of_a_weight_answer_the_same_bits_as_the_whole(
    backend: CpuBackend, dtype: torch.dtype, tokens: int
) -> None:
    torch.manual_seed(8)
    for rows, width in ((64, 64), (200, 352), (33, 48), (513, 96), (40, 61)):
        weight, x = torch.randn(rows, width).to(dtype), torch.randn(tokens, width).to(dtype)
        for bias in (None, torch.randn(rows).to(dtype)):
            whole = backend.linear(weight, bias)
            expected = whole(x)
            for start, stop in ((0, rows), (0, rows // 3), (5, 6), (7, 30), (rows // 2, rows), (rows, rows)):
                part = whole.rows(start, stop)
                assert torch.equal(part(x), expected[:, start:stop])
                assert torch.equal(part.rows(0, stop - start)(x), expected[:, start:stop])


@pytest.mark.parametrize("threads", [1, 2])
def test_some_rows_of_a_large_weight_answer_the_same_bits_on_any_number_of_threads(threads: int) -> None:
    for dtype in DTYPES[:2]:
        backend = CpuBackend(None, threads)
        whole = backend.linear(torch.randn(1536, 1024, generator=torch.Generator().manual_seed(1)).to(dtype))
        for tokens in (1, 16, 40, 64, 100):
            x = torch.randn(tokens, 1024).to(dtype)
            expected = whole(x)
            for start, stop in ((0, 512), (512, 1023), (1023, 1536)):
                assert torch.equal(whole.rows(start, stop)(x), expected[:, start:stop])


def test_rows_share_the_memory_of_plain_weights(backend: CpuBackend) -> None:
    weight = torch.ones(64, 32)
    part = backend.linear(weight).rows(16, 48)
    weight.zero_()
    assert not part(torch.ones(1, 32)).any()
    with pytest.raises(InternalError, match=r"asked for \[40, 65\) of a weight with 64 rows"):
        backend.linear(weight).rows(40, 65)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", BATCHES)
def test_some_heads_attend_to_the_same_bits_as_all(backend: CpuBackend, name: str, dtype: torch.dtype) -> None:
    batch = Batch(*BATCHES[name])
    plan = batch.plan(backend)
    pages, latent = torch.randn(batch.pool, 2, 2, 16, 24).to(dtype), torch.randn(batch.pool, 16, 40).to(dtype)
    query, wide = torch.randn(batch.tokens, 12, 24).to(dtype), torch.randn(batch.tokens, 12, 40).to(dtype)
    whole = backend.attend(query, pages, plan, 0.2, 0)
    whole_latent = backend.attend_latent(wide, latent, plan, 0.2, 32)
    for first, last, group in ((0, 6, slice(0, 1)), (6, 12, slice(1, 2)), (2, 5, slice(0, 1)), (11, 12, slice(1, 2))):
        some = backend.attend(query[:, first:last], pages[:, :, group], plan, 0.2, 0)
        assert torch.equal(some, whole[:, first:last])
        some = backend.attend_latent(wide[:, first:last], latent, plan, 0.2, 32)
        assert torch.equal(some, whole_latent[:, first:last])
