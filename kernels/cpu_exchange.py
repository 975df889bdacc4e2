"""Expert exchange on the CPU: which token goes to which rank, and how its rows travel.

A token goes once to each rank that owns at least one of its experts, however many it owns: the exchange carries hidden
rows, not pairs.  One row is x, the local expert numbers (-1 = not there) and the weights, so one counts and one bytes
all-to-all carry everything; give_back is one bytes all-to-all of result rows.  Parts of a token are summed in rank
order in float32, so the sum does not depend on who answers first.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from bgmpi.kernels import cpu_exchange_kernels as kernels
from bgmpi.kernels.backend import Collective
from bgmpi.kernels.cpu_layers import ALONE, KIND
from bgmpi.kernels.team import Team


@dataclass(slots=True)
class CpuExchanged:
    """Tokens that came in one exchange, and the way back: rows of each token [T, A] and counts by rank."""

    x: torch.Tensor
    expert: torch.Tensor
    weight: torch.Tensor
    rows: NDArray[np.int64] | None
    sent: NDArray[np.int64]
    received: NDArray[np.int64]


def stay(x: torch.Tensor, expert: torch.Tensor, weight: torch.Tensor, local: torch.Tensor) -> CpuExchanged:
    """Let one rank keep its own tokens."""
    here = local.index_select(0, expert.reshape(-1)).view_as(expert)
    nothing = np.zeros(0, np.int64)
    return CpuExchanged(x, here, weight, None, nothing, nothing)


def send(
    team: Team, collective: Collective, x: torch.Tensor, expert: torch.Tensor, weight: torch.Tensor,
    owner: torch.Tensor, local: torch.Tensor,
) -> CpuExchanged:
    """Collective over the expert ranks.  See Backend.exchange."""
    x, expert, weight = x.contiguous(), expert.contiguous(), weight.contiguous()
    (tokens, active), ranks = expert.shape, collective.size
    wide = x.shape[1] * x.element_size()
    each = wide + 8 * active
    counts, token, rank, rows = (np.empty(size, np.int64) for size in (ranks, *[tokens * active] * 3))
    team.run_alone(kernels.route, expert.data_ptr(), owner.data_ptr(), tokens, active, ranks, counts.ctypes.data,
                   token.ctypes.data, rank.ctypes.data, rows.ctypes.data)
    count = int(counts.sum())
    leaving = np.empty(count * each, np.uint8)
    run = team.run if leaving.size > 2 * ALONE else team.run_alone
    run(kernels.pack_rows, x.data_ptr(), wide, expert.data_ptr(), weight.data_ptr(), owner.data_ptr(),
        local.data_ptr(), active, token.ctypes.data, rank.ctypes.data, count, leaving.ctypes.data)
    incoming = collective.all_to_all_counts(counts)
    came = int(incoming.sum())
    arrived = np.empty(came * each, np.uint8)
    collective.all_to_all_bytes(leaving, counts * each, arrived, incoming * each)
    new_x = torch.empty(came, x.shape[1], dtype=x.dtype)
    new_expert, new_weight = torch.empty(came, active, dtype=torch.int32), torch.empty(came, active)
    run = team.run if arrived.size > 2 * ALONE else team.run_alone
    run(kernels.unpack_rows, arrived.ctypes.data, wide, active, came, new_x.data_ptr(), new_expert.data_ptr(),
        new_weight.data_ptr())
    return CpuExchanged(new_x, new_expert, new_weight, rows.reshape(tokens, active), counts, incoming)


def return_rows(
    collective: Collective, y: torch.Tensor, received: NDArray[np.int64], sent: NDArray[np.int64]
) -> torch.Tensor:
    """Collective over the expert ranks.  Send rows y [received rows, D] back whence they came -> [sent rows, D]."""
    y = y.contiguous()
    each = y.shape[1] * y.element_size()
    parts = torch.empty(int(sent.sum()), y.shape[1], dtype=y.dtype)
    collective.all_to_all_bytes(
        y.view(torch.uint8).view(-1).numpy(), received * each, parts.view(torch.uint8).view(-1).numpy(), sent * each
    )
    return parts


def send_back(team: Team, collective: Collective, exchanged: CpuExchanged, y: torch.Tensor) -> torch.Tensor:
    """Collective over the expert ranks.  See Backend.give_back."""
    assert exchanged.rows is not None, "tokens that stayed have no way back"
    parts = return_rows(collective, y, exchanged.received, exchanged.sent)
    width, size = parts.shape[1], parts.element_size()
    tokens, active = exchanged.rows.shape
    result = torch.empty(tokens, width, dtype=parts.dtype)
    run = team.run if parts.numel() > ALONE else team.run_alone
    run(kernels.sum_parts, parts.data_ptr(), exchanged.rows.ctypes.data, tokens, active, width, KIND[parts.dtype], size,
        result.data_ptr())
    return result
