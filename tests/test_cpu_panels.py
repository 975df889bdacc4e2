"""Products by panels of bfloat16 rows: right for every shape, and a row's bits are its own."""

from __future__ import annotations

import pytest
import torch

from bgmpi.errors import InternalError
from bgmpi.kernels import reference
from bgmpi.kernels.cpu_panel_kernels import BLOCK_PAIRS, GROUP
from bgmpi.kernels.cpu_panels import PanelExperts, PanelLinear, can_turn, turned
from bgmpi.kernels.panel_code import PANEL_ROWS
from bgmpi.kernels.team import Team
from bgmpi.kernels.vector_code import compiled_for_pairs

pytestmark = pytest.mark.skipif(not compiled_for_pairs(), reason="this machine has no pair product")

#: Wider than one block of columns, and no multiple of anything.
DEEP = 2 * BLOCK_PAIRS + 38


@pytest.fixture(scope="module", params=[1, 3])
def team(request: pytest.FixtureRequest) -> Team:
    return Team(request.param)


def draw(seed: int, *shape: int) -> torch.Tensor:
    return (0.3 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).bfloat16()


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 6, 7, GROUP, GROUP + 1, 3 * GROUP - 5])
@pytest.mark.parametrize(("rows", "width"), [(16, 2), (64, 32), (130, 74), (65, DEEP)])
def test_a_linear_layer_is_x_times_the_weight_plus_the_bias(team: Team, rows: int, width: int, tokens: int) -> None:
    x, weight, bias = draw(1, tokens, width), draw(2, rows, width), draw(3, rows)
    exact = x.double() @ weight.double().T
    for given, wanted in ((None, exact), (bias, exact + bias.double())):
        got = PanelLinear.of(team, weight, given)(x)
        assert got.shape == (tokens, rows)
        assert (got.double() - wanted).abs().max() <= 1e-2 * wanted.abs().max()


def test_small_whole_numbers_come_out_exactly(team: Team) -> None:
    drawn = torch.Generator().manual_seed(4)
    x, weight = (torch.randint(-3, 4, shape, generator=drawn).bfloat16() for shape in ((9, 70), (33, 70)))
    exact = x.double() @ weight.double().T
    assert exact.abs().max() < 256
    assert torch.equal(PanelLinear.of(team, weight, None)(x).double(), exact)


@pytest.mark.parametrize("width", [96, DEEP])
def test_a_row_of_a_linear_layer_has_the_same_bits_in_any_company(team: Team, width: int) -> None:
    x, linear = draw(5, 2 * GROUP + 3, width), PanelLinear.of(team, draw(6, 70, width), draw(7, 70))
    alone = torch.cat([linear(row) for row in x.split(1)])
    for begin, end in ((0, len(x)), (0, 7), (1, 6), (3, GROUP + 5)):
        assert torch.equal(linear(x[begin:end]), alone[begin:end])


def test_some_rows_of_a_weight_are_a_view_and_give_the_bits_of_the_whole(team: Team) -> None:
    x, whole = draw(8, 11, 48), PanelLinear.of(team, draw(9, 200, 48), draw(10, 200))
    for start, stop in ((0, 200), (0, 1), (63, 65), (64, 128), (10, 190), (199, 200), (50, 50)):
        part = whole.rows(start, stop)
        assert part._panels.data_ptr() == whole._panels.data_ptr()
        assert torch.equal(part(x), whole(x)[:, start:stop])
    assert torch.equal(whole.rows(20, 150).rows(50, 100)(x), whole(x)[:, 70:120])
    with pytest.raises(InternalError, match=r"asked for \[100, 131\) of a weight with 130 rows"):
        whole.rows(20, 150).rows(100, 131)


def test_rows_that_lie_apart_and_no_rows_are_taken(team: Team) -> None:
    wide, linear = draw(11, 7, 100), PanelLinear.of(team, draw(12, 40, 30), None)
    assert torch.equal(linear(wide[:, 20:50]), linear(wide[:, 20:50].contiguous()))
    assert torch.equal(linear(wide[:, 20:50].T.contiguous().T), linear(wide[:, 20:50].contiguous()))
    assert linear(wide[:0, :30]).shape == (0, 40)


def test_another_number_format_or_width_is_refused(team: Team) -> None:
    linear = PanelLinear.of(team, draw(13, 40, 30), None)
    for x in (torch.zeros(2, 30), torch.zeros(2, 32, dtype=torch.bfloat16)):
        with pytest.raises(InternalError, match="dtype and width must be equal"):
            linear(x)


def test_only_bfloat16_of_even_width_and_enough_rows_is_laid_in_panels() -> None:
    assert can_turn(draw(14, 16, 32))
    assert not can_turn(draw(14, 16, 31))
    assert not can_turn(draw(14, 15, 32))
    assert not can_turn(draw(14, 16, 32).float())


def test_a_panel_holds_its_rows_pair_of_columns_by_pair(team: Team) -> None:
    weight = torch.arange(2 * 70 * 36, dtype=torch.int16).view(140, 36)
    panels = turned(team, weight.view(torch.bfloat16), parts=2).view(torch.int16).view(2, 2, -1, PANEL_ROWS, 2)
    for part in range(2):
        for row in range(70):
            held = panels[part, row // PANEL_ROWS, :, row % PANEL_ROWS].reshape(-1)
            assert torch.equal(held[:36], weight[part * 70 + row])
            assert not held[36:].any()


def experts_of(hidden: int, inner: int, count: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    return ([draw(20 + e, 2 * inner, hidden) for e in range(count)],
            [draw(60 + e, hidden, inner) for e in range(count)])


@pytest.mark.parametrize(("hidden", "inner"), [(32, 16), (70, 130), (96, DEEP), (DEEP, 66)])
def test_experts_equal_the_reference_and_a_token_has_the_same_bits_in_any_company(
    team: Team, hidden: int, inner: int
) -> None:
    gate_up, down = experts_of(hidden, inner, 5)
    experts, tokens = PanelExperts(team, gate_up, down), 2 * GROUP
    drawn = torch.Generator().manual_seed(15)
    x, share = draw(16, tokens, hidden), torch.rand(tokens, 2, generator=drawn)
    expert = torch.stack([torch.randperm(5, generator=drawn)[:2] for _ in range(tokens)]).int()
    expert[3, 0] = expert[4] = -1  # elsewhere
    expert[: GROUP + 20, 1] = 5 - 1  # more than a group of tokens for one expert
    got, wanted = experts(x, expert, share), reference.experts(x, expert, share, gate_up, down).double()
    assert (got.double() - wanted).abs().max() <= 2e-2 * wanted.abs().max()
    for some in (slice(0, 1), slice(3, 5), slice(2, 9), slice(7, 7 + GROUP)):
        assert torch.equal(experts(x[some], expert[some], share[some]), got[some])
