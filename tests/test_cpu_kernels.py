"""The vector code and the small kernels, number by number: rounding, tails, order, and what is not finite."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numba import carray

from bgmpi.kernels import cpu_dot_kernels, cpu_expert_kernels
from bgmpi.kernels.cpu_layers import KIND, Pairs
from bgmpi.kernels.team import Team, bits
from bgmpi.kernels.vector_code import exponential, narrow, widen

SPECIAL = [0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-40, 3e38, 65504.0, 1.00390625, 1.01171875, -7.5]


def exponential_kernel(p: int) -> None:
    """1 source, 2 target, 3 count."""
    word = carray(p, 4, np.int64)
    exponential(word[1], word[2], word[3], np.float32(1.0), np.float32(0.0))


def convert_kernel(p: int) -> None:
    """1 source of the kind, 2 float32 target, 3 rounded target, 4 count, 5 kind."""
    word = carray(p, 6, np.int64)
    widen(word[1], word[2], word[4], word[5])
    narrow(word[2], word[3], word[4], word[5])


@pytest.fixture(scope="module")
def team() -> Team:
    return Team(1)


def test_exponential_is_right_to_the_last_places_and_at_the_ends(team: Team) -> None:
    ends = torch.tensor([-torch.inf, -200.0, 0.0, 89.0, torch.inf, torch.nan])
    x = torch.cat([torch.linspace(-87, 88, 100_003), ends])
    y = torch.empty_like(x)
    team.run_alone(exponential_kernel, x.data_ptr(), y.data_ptr(), len(x))
    exact = x.double().exp()
    assert ((y[:-6].double() - exact[:-6]).abs() / exact[:-6]).max() < 3e-7
    assert y[-6:-1].tolist() == [0.0, 0.0, 1.0, torch.inf, torch.inf]
    assert y[-1].isnan()


@pytest.mark.parametrize("dtype", KIND)
def test_numbers_widen_exactly_and_round_to_nearest_even_as_torch_does(team: Team, dtype: torch.dtype) -> None:
    x = torch.cat([torch.tensor(SPECIAL), torch.randn(1000) * 100])
    source, wide, back = x.to(dtype), torch.empty_like(x), torch.empty(len(x), dtype=dtype)
    team.run_alone(convert_kernel, source.data_ptr(), wide.data_ptr(), back.data_ptr(), len(x), KIND[dtype])
    assert torch.equal(wide.nan_to_num(9.0), source.float().nan_to_num(9.0))
    assert torch.equal(wide.isnan(), source.isnan())
    assert torch.equal(back.isnan(), source.isnan())
    assert torch.equal(back.nan_to_num(9.0), source.nan_to_num(9.0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_small_linear_rounds_its_float32_sum_as_torch_does(team: Team, dtype: torch.dtype) -> None:
    x = torch.cat([torch.tensor(SPECIAL), torch.randn(5000) * 10, torch.tensor([1 + 2.0**-9, 1 + 3 * 2.0**-9])])
    one = torch.ones(1, 1, dtype=dtype)
    result = torch.empty(len(x), 1, dtype=dtype)
    team.run(
        cpu_dot_kernels.linear, x.data_ptr(), 4, 0, one.data_ptr(), 0, result.data_ptr(), len(x), 1, 1, 1, KIND[dtype],
        2, 4,
    )
    expected = x.to(dtype)
    assert torch.equal(result[:, 0].isnan(), expected.isnan())
    assert torch.equal(result[:, 0].nan_to_num(9.0), expected.nan_to_num(9.0))


def test_a_dot_product_is_bit_equal_for_any_number_of_tokens(team: Team) -> None:
    x, weight = torch.randn(9, 77), torch.randn(10, 77)
    results = []
    for tokens in range(1, 10):
        result = torch.empty(tokens, 10)
        team.run(
            cpu_dot_kernels.linear, x.data_ptr(), 4 * 77, 0, weight.data_ptr(), 0, result.data_ptr(), tokens, 1, 77, 10,
            0, 4, 4,
        )
        results.append(result[0])
    assert all(torch.equal(result, results[0]) for result in results)


def test_pairs_are_sorted_by_expert_then_token(team: Team) -> None:
    expert = torch.tensor([[3, 0], [-1, 3], [0, 1], [-1, -1]], dtype=torch.int32)
    pairs = Pairs(team, expert, 5)
    assert pairs.bounds == [0, 2, 3, 3, 5, 5]
    assert pairs.active == [0, 1, 3]
    assert pairs.tokens.tolist() == [0, 2, 2, 0, 1]
    assert pairs.most == 2


def test_a_token_sums_its_experts_in_ascending_order_whatever_the_router_named_first(team: Team) -> None:
    large, small = 3.0e7, 1.0
    y = torch.tensor([[large], [small], [-large]])  # experts 0, 1, 2: (large + small) - large loses the small one
    addresses = np.array([y.data_ptr() + 4 * e for e in range(3)])
    lost = (np.float32(large) + np.float32(small)) - np.float32(large)
    for order in ([0, 1, 2], [2, 0, 1], [1, 2, 0]):
        expert, weight, result = torch.tensor([order], dtype=torch.int32), torch.ones(1, 3), torch.empty(1, 1)
        pairs = Pairs(team, expert, 3)
        team.run(cpu_expert_kernels.combine, expert.data_ptr(), weight.data_ptr(), pairs.first, pairs.place,
                 pairs.column, addresses.ctypes.data, 0, 4, result.data_ptr(), 1, 3, 1, 0, 4)
        assert result.item() == lost



def test_bits_carry_a_float_through_a_word() -> None:
    for number in (0.125, -3.5e-300, np.inf):
        assert np.int64(bits(number)).view(np.float64) == number
