"""Matrix tiles: exact products at every edge, the same bits in any company, plain weights left where they are."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from numba import carray

from bgmpi.errors import InternalError, UsageError
from bgmpi.kernels import cpu, reference
from bgmpi.kernels.cpu import CpuBackend
from bgmpi.kernels.cpu_tiles import TileExperts, TileLinear, Tiles, ask_for_tiles
from bgmpi.kernels.task_code import arrive, draw, wait_for
from bgmpi.kernels.team import Team, source_stamp, stamped

needs_tiles = pytest.mark.skipif(not ask_for_tiles(), reason="this machine has no bfloat16 matrix tiles")


def whole_numbers(*shape: int) -> torch.Tensor:
    """Small whole numbers: every sum of their products is exact in float32."""
    return torch.randint(-8, 9, shape).bfloat16()


@pytest.fixture(scope="module")
def tiles() -> Tiles:
    return Tiles(Team(1))


@needs_tiles
@pytest.mark.parametrize("tokens", [1, 2, 15, 16, 17, 31, 32, 33, 48, 256, 257, 300])
@pytest.mark.parametrize(("rows", "width"), [(16, 32), (48, 64), (49, 96), (160, 33), (5, 62), (1, 1), (513, 32)])
def test_products_of_whole_numbers_are_exact(tiles: Tiles, rows: int, width: int, tokens: int) -> None:
    torch.manual_seed(1)
    x, weight, bias = whole_numbers(tokens, width), whole_numbers(rows, width), whole_numbers(rows)
    exact = x.float() @ weight.float().T + bias.float()
    assert torch.equal(TileLinear(tiles, weight, bias)(x), exact.bfloat16())


@needs_tiles
def test_a_row_of_x_may_lie_inside_a_wider_one(tiles: Tiles) -> None:
    wide, weight = whole_numbers(20, 3 * 64), whole_numbers(32, 64)
    expected = (wide[:, 64:128].float() @ weight.float().T).bfloat16()
    assert torch.equal(TileLinear(tiles, weight, None)(wide[:, 64:128]), expected)
    assert torch.equal(TileLinear(tiles, weight, None)(wide[:, 64:128].t().contiguous().t()), expected)


@needs_tiles
def test_a_token_is_bit_equal_alone_and_in_any_company(tiles: Tiles) -> None:
    torch.manual_seed(2)
    linear = TileLinear(tiles, torch.randn(80, 352).bfloat16(), None)
    gate_up = [torch.randn(2 * 96, 64).bfloat16() for _ in range(3)]
    experts = TileExperts(tiles, gate_up, [torch.randn(64, 96).bfloat16() for _ in range(3)])
    x, y, weight = torch.randn(300, 352).bfloat16(), torch.randn(300, 64).bfloat16(), torch.rand(300, 2)
    expert = torch.rand(300, 3).argsort(1)[:, :2].int()
    products, sums = linear(x), experts(y, expert, weight)
    for begin, end in ((0, 1), (7, 9), (100, 116), (1, 18), (200, 233), (20, 299)):
        assert torch.equal(linear(x[begin:end]), products[begin:end])
        assert torch.equal(experts(y[begin:end], expert[begin:end], weight[begin:end]), sums[begin:end])


@needs_tiles
@pytest.mark.parametrize("tokens", [1, 16, 40, 600])
def test_experts_share_out_their_tasks_and_keep_every_bit(tokens: int) -> None:
    torch.manual_seed(3)
    gate_up, down = (
        [torch.randn(2 * 160, 96).mul(0.2).bfloat16() for _ in range(4)],
        [torch.randn(96, 160).mul(0.2).bfloat16() for _ in range(4)],
    )
    x, share = torch.randn(tokens, 96).bfloat16(), torch.rand(tokens, 2)
    expert = torch.tensor([[0, 3]] * tokens, dtype=torch.int32)  # experts 1 and 2 have nothing to do
    results = [TileExperts(Tiles(Team(threads)), gate_up, down)(x, expert, share) for threads in (1, 2, 3)]
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
    expected = reference.experts(x, expert, share, gate_up, down).float()
    assert (results[0].float() - expected).abs().max() <= 2e-2 * expected.abs().max()


def shifted(weight: torch.Tensor, by: int) -> torch.Tensor:
    """The weight where it begins `by` bytes behind a multiple of 64, as a file may have it."""
    size = weight.numel()
    room = torch.empty(size + 64, dtype=torch.bfloat16)
    begin = (-room.data_ptr() % 64 + by) // 2
    return room[begin : begin + size].view(weight.shape).copy_(weight)


@needs_tiles
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("tokens", [1, 64, 65, 97, 1100])
def test_where_a_weight_begins_changes_no_bit(tokens: int, threads: int) -> None:
    torch.manual_seed(4)
    tiles = Tiles(Team(threads))
    weight, bias = torch.randn(1000, 352).bfloat16(), torch.randn(1000)
    gate_up, down = torch.randn(2 * 544, 96).bfloat16(), torch.randn(96, 544).bfloat16()
    x, y = torch.randn(tokens, 352).bfloat16(), torch.randn(tokens, 96).bfloat16()
    expert, share = torch.zeros(tokens, 1, dtype=torch.int32), torch.rand(tokens, 1)
    results = [
        (
            TileLinear(tiles, shifted(weight, by), bias)(x),
            TileExperts(tiles, [shifted(gate_up, by)], [shifted(down, by)])(y, expert, share),
        )
        for by in (0, 2, 8, 56)
    ]
    for linear, experts in results[1:]:
        assert torch.equal(linear, results[0][0])
        assert torch.equal(experts, results[0][1])


@needs_tiles
def test_infinity_and_nan_stay_with_their_token(tiles: Tiles) -> None:
    x = torch.randn(20, 64).bfloat16()
    x[3, 1], x[17, 9] = torch.inf, torch.nan
    result = TileLinear(tiles, torch.rand(32, 64).bfloat16() + 0.5, None)(x)
    assert (result[3] == torch.inf).all()
    assert result[17].isnan().all()
    assert result[[t for t in range(20) if t not in (3, 17)]].isfinite().all()


@needs_tiles
def test_plain_weights_stay_where_they_are(tiles: Tiles) -> None:
    weight, gate_up, down = (torch.ones(shape).bfloat16() for shape in ((48, 64), (2 * 32, 64), (64, 32)))
    linear, experts = TileLinear(tiles, weight, None), TileExperts(tiles, [gate_up], [down])
    x, ones = torch.ones(1, 64).bfloat16(), torch.ones(1, 1)
    before = linear(x), experts(x, torch.zeros(1, 1, dtype=torch.int32), ones)
    for own in (weight, gate_up, down):
        own.zero_()
    after = linear(x), experts(x, torch.zeros(1, 1, dtype=torch.int32), ones)
    assert all(result.all() for result in before)
    assert not any(result.any() for result in after)


@needs_tiles
def test_a_wrong_width_kind_or_expert_is_refused(tiles: Tiles) -> None:
    linear = TileLinear(tiles, torch.zeros(16, 32).bfloat16(), None)
    with pytest.raises(InternalError, match="dtype and width must be equal"):
        linear(torch.zeros(1, 32))
    with pytest.raises(InternalError, match="dtype and width must be equal"):
        linear(torch.zeros(1, 31).bfloat16())
    experts = TileExperts(tiles, [torch.zeros(64, 32).bfloat16()], [torch.zeros(32, 32).bfloat16()])
    x, share, one = torch.zeros(1, 32).bfloat16(), torch.ones(1, 1), torch.ones(1, 1, dtype=torch.int32)
    with pytest.raises(InternalError, match="an expert number is 1, this rank owns 1"):
        experts(x, one, share)
    with pytest.raises(InternalError, match=r"expert torch.int64.* expected torch.bfloat16"):
        experts(x, one.long(), share)
    with pytest.raises(InternalError, match=r"x is torch.bfloat16 \(1, 31\).* expected torch.bfloat16 \[T, 32\]"):
        experts(x[:, :31], one - 1, share)


def test_asking_for_tiles_where_there_are_none_is_a_usage_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "ask_for_tiles", lambda: False)
    with pytest.raises(UsageError, match="has no bfloat16 matrix tiles"):
        CpuBackend(None, 1, tiles=True)


def steps(p: int) -> None:
    """1 arrived (0), 2 tasks, 3 numbers int64 [tasks]: task i adds 1 to what task i - 1 left.  All wait in one line."""
    word = carray(p, 4, np.int64)
    numbers = carray(p, 4 + word[2], np.int64)
    while True:
        task = draw(word.ctypes.data)
        if task >= word[2]:
            break
        wait_for(word.ctypes.data + 8, task)
        numbers[4 + task] = task + (numbers[3 + task] if task > 0 else 0)
        arrive(word.ctypes.data + 8)


def test_a_task_sees_all_that_arrived_before_it_also_from_many_threads() -> None:
    count = 5000
    words = np.zeros(4 + count, np.int64)
    words[2] = count
    _, call = Team(1)._compile(steps)
    threads = [threading.Thread(target=call, args=(words.ctypes.data,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert (words[4:] == np.cumsum(np.arange(count))).all()


def test_a_kernel_is_kept_under_another_name_after_an_edit_of_any_source_beside_it(tmp_path: Path) -> None:
    names = []
    for text in ("first", "second", "first"):
        (tmp_path / "emitted.py").write_text(text)
        source_stamp.cache_clear()
        kept = stamped(steps, tmp_path)
        assert kept.__code__ is steps.__code__  # type: ignore[attr-defined]
        names.append(kept.__qualname__)  # type: ignore[attr-defined]
    source_stamp.cache_clear()
    assert names[0] == names[2] != names[1]
