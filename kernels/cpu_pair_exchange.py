"""The expert exchange under `--deterministic`: every expert's part comes home, and home sums them.

Elsewhere a rank sums what its experts made of a token and sends one row back, so that who owns which expert decides how
the sum is grouped.  Here a token still travels once to each rank, but there it stands once for every expert of that
rank, each a row with one expert of weight one; these rows come back, rounded to the model's dtype as on one rank, and
the token's home sums them in float32 in ascending expert number, as one rank that owns all experts would.  Way back
there are as many rows as active experts, not as many as ranks: that is what it costs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from bgmpi.kernels import cpu_exchange
from bgmpi.kernels import cpu_exchange_kernels as kernels
from bgmpi.kernels.backend import Collective
from bgmpi.kernels.cpu_layers import ALONE, KIND
from bgmpi.kernels.team import Team


@dataclass(slots=True)
class PairExchanged:
    """Pairs that came in one exchange, and the way back: what home asked of which expert, pairs by rank."""

    x: torch.Tensor
    expert: torch.Tensor
    weight: torch.Tensor
    asked: torch.Tensor
    shares: torch.Tensor
    rows: NDArray[np.int64]
    sent: NDArray[np.int64]
    received: NDArray[np.int64]


def send(
    team: Team, collective: Collective, x: torch.Tensor, expert: torch.Tensor, weight: torch.Tensor,
    owner: torch.Tensor, local: torch.Tensor,
) -> PairExchanged:
    """Collective over the expert ranks.  See Backend.exchange; x [N, D], expert [N, 1], weight ones [N, 1]."""
    came = cpu_exchange.send(team, collective, x, expert, weight, owner, local)
    token, column = (came.expert >= 0).nonzero(as_tuple=True)
    ends = np.cumsum(came.received)
    received = np.diff(np.searchsorted(token.numpy(), np.concatenate([[0], ends])))
    # Parts come back by rank, then token, then column, which is the order that a stable sort by rank gives.
    ranks = torch.where(expert >= 0, owner[expert.long()], collective.size).reshape(-1).numpy()
    order = np.argsort(ranks, kind="stable")
    rows = np.empty(len(order), np.int64)
    rows[order] = np.arange(len(order))
    sent = np.bincount(ranks, minlength=collective.size + 1)[: collective.size].astype(np.int64)
    here = came.expert[token, column][:, None].contiguous()
    return PairExchanged(
        came.x.index_select(0, token), here, torch.ones(len(token), 1), expert.contiguous(), weight.contiguous(), rows,
        sent, received.astype(np.int64),
    )


def send_back(team: Team, collective: Collective, exchanged: PairExchanged, y: torch.Tensor) -> torch.Tensor:
    """Collective over the expert ranks.  See Backend.give_back; y [N, D]."""
    parts = cpu_exchange.return_rows(collective, y, exchanged.received, exchanged.sent)
    tokens, active = exchanged.asked.shape
    width, size = parts.shape[1], parts.element_size()
    result = torch.empty(tokens, width, dtype=parts.dtype)
    run = team.run if parts.numel() > ALONE else team.run_alone
    run(kernels.sum_pairs, parts.data_ptr(), exchanged.rows.ctypes.data, exchanged.asked.data_ptr(),
        exchanged.shares.data_ptr(), tokens, active, width, KIND[parts.dtype], size, result.data_ptr())
    return result
