"""Experts whose weights come one after another give the bits of experts whose weights stay."""

from __future__ import annotations

import pytest
import torch

from bgmpi.errors import InternalError
from bgmpi.kernels.cpu import CpuBackend
from bgmpi.kernels.cpu_tiles import ask_for_tiles

HIDDEN, INNER, EXPERTS = 96, 80, 5


class Source:
    """Hands out weights from one place only, which the next expert overwrites, and writes down who asked."""

    def __init__(self, gate_up: list[torch.Tensor], down: list[torch.Tensor]) -> None:
        self.weights = list(zip(gate_up, down, strict=True))
        self.place = [torch.empty_like(one) for one in self.weights[0]] if self.weights else []
        self.told: list[tuple[str, int]] = []

    def take(self, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.told.append(("take", expert))
        for place, one in zip(self.place, self.weights[expert], strict=True):
            place.copy_(one)
        return self.place[0], self.place[1]

    def give(self, expert: int) -> None:
        self.told.append(("give", expert))
        for place in self.place:
            place.fill_(torch.nan)


def draw(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (0.3 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


def weights(dtype: torch.dtype, inner: int = INNER) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    return ([draw(e, 2 * inner, HIDDEN, dtype=dtype) for e in range(EXPERTS)],
            [draw(50 + e, HIDDEN, inner, dtype=dtype) for e in range(EXPERTS)])


IN_ORDER = [(deed, expert) for expert in range(EXPERTS) for deed in ("take", "give")]
FORMS = [(torch.float32, False), (torch.float16, False), (torch.bfloat16, False),
         pytest.param(torch.bfloat16, True, marks=pytest.mark.skipif(not ask_for_tiles(), reason="no matrix tiles"))]


@pytest.mark.parametrize("tokens", [1, 3, 40, 300])
@pytest.mark.parametrize("inner", [INNER, 37])
@pytest.mark.parametrize(("dtype", "tiles"), FORMS)
def test_results_are_those_of_resident_experts_to_the_bit(dtype, tiles, inner, tokens):
    backend = CpuBackend(None, 1, tiles)
    gate_up, down = weights(dtype, inner)
    source = Source(gate_up, down)
    x = draw(7, tokens, HIDDEN, dtype=dtype)
    drawn = torch.Generator().manual_seed(tokens)
    # Uneven loads, an expert without tokens, and tokens of which some or all experts live elsewhere.
    expert = torch.randint(-1, EXPERTS - 1, (tokens, 3), generator=drawn, dtype=torch.int32).sort(1)[0]
    expert[:, 1:][expert[:, 1:] == expert[:, :-1]] = -1
    weight = torch.rand(tokens, 3, generator=drawn)
    got = backend.experts_in_turn(source, EXPERTS)(x, expert, weight)
    assert torch.equal(got, backend.experts(gate_up, down)(x, expert, weight))
    assert source.told == IN_ORDER


def test_every_expert_is_taken_and_given_back_also_without_tokens():
    source = Source(*weights(torch.float32))
    turn = CpuBackend(None, 1).experts_in_turn(source, EXPERTS)
    empty = turn(torch.empty(0, HIDDEN), torch.empty(0, 2, dtype=torch.int32), torch.empty(0, 2))
    assert empty.shape == (0, HIDDEN) and source.told == IN_ORDER
    nobody = turn(torch.ones(4, HIDDEN), torch.full((4, 2), -1, dtype=torch.int32), torch.ones(4, 2))
    assert torch.equal(nobody, torch.zeros(4, HIDDEN)) and source.told == 2 * IN_ORDER


def test_a_rank_without_experts_takes_nothing():
    turn = CpuBackend(None, 1).experts_in_turn(Source([], []), 0)
    got = turn(torch.ones(4, HIDDEN), torch.full((4, 2), -1, dtype=torch.int32), torch.ones(4, 2))
    assert torch.equal(got, torch.zeros(4, HIDDEN))


def test_numbers_of_another_kind_or_another_rank_are_refused():
    source = Source(*weights(torch.float32))
    turn = CpuBackend(None, 1).experts_in_turn(source, EXPERTS)
    expert, weight = torch.zeros(2, 1, dtype=torch.int32), torch.ones(2, 1)
    with pytest.raises(InternalError, match=r"x is torch\.float16, the weights are torch\.float32"):
        turn(torch.ones(2, HIDDEN, dtype=torch.float16), expert, weight)
    with pytest.raises(InternalError, match=r"expected torch\.int32"):
        turn(torch.ones(2, HIDDEN), expert.long(), weight)
    with pytest.raises(InternalError, match="this rank owns 5"):
        turn(torch.ones(2, HIDDEN), expert + 9, weight)
