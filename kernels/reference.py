"""What each kernel means, in the slowest and most obvious way.

The tests hold every fast kernel against these functions, and a reader who wants to know what `attend` or `experts`
promise reads them here: one loop over sequences or experts, whole matrices, float32 throughout.  Nothing that runs a
job imports this file.  The letters are those of `backend.py`.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray


def gather_pages(pages: torch.Tensor, numbers: NDArray[np.int32], tokens: int) -> torch.Tensor:
    """Lay a sequence's pages [.., page_tokens, W] one behind the other -> [.., tokens, W] float32."""
    held = [pages[int(number)] for number in numbers if number >= 0]
    return torch.cat(held, dim=-2)[..., :tokens, :].float()


def seen(new: int, before: int, window: int) -> torch.Tensor:
    """Say which of before + new cached tokens each new token sees: bool [new, before + new]."""
    position = torch.arange(before, before + new)[:, None]
    cached = torch.arange(before + new)[None, :]
    visible = cached <= position
    return visible & (cached > position - window) if window > 0 else visible


def attend(
    query: torch.Tensor, layer_pages: torch.Tensor, first: NDArray[np.int32], kv_before: NDArray[np.int32],
    pages: NDArray[np.int32], scale: float, window: int,
) -> torch.Tensor:
    """query [T, H, W], layer_pages [P, 2, G, page_tokens, W] -> [T, H, W] in query's dtype."""
    result = torch.empty_like(query)
    groups = layer_pages.shape[2]
    for sequence in range(len(kv_before)):
        begin, end, before = int(first[sequence]), int(first[sequence + 1]), int(kv_before[sequence])
        if begin == end:
            continue
        both = gather_pages(layer_pages, pages[sequence], before + end - begin)
        key, value = (half.repeat_interleave(query.shape[1] // groups, dim=0) for half in both)  # [H, n, W]
        score = query[begin:end].float().transpose(0, 1) @ key.transpose(1, 2) * scale  # [H, t, n]
        score.masked_fill_(~seen(end - begin, before, window), -torch.inf)
        result[begin:end] = (score.softmax(-1) @ value).transpose(0, 1).to(query.dtype)
    return result


def attend_latent(
    query: torch.Tensor, layer_pages: torch.Tensor, first: NDArray[np.int32], kv_before: NDArray[np.int32],
    pages: NDArray[np.int32], scale: float, value_width: int,
) -> torch.Tensor:
    """query [T, H, L], layer_pages [P, page_tokens, L] -> [T, H, value_width] in query's dtype."""
    result = query.new_empty(*query.shape[:2], value_width)
    for sequence in range(len(kv_before)):
        begin, end, before = int(first[sequence]), int(first[sequence + 1]), int(kv_before[sequence])
        if begin == end:
            continue
        latent = gather_pages(layer_pages, pages[sequence], before + end - begin)  # [n, L]
        score = query[begin:end].float().transpose(0, 1) @ latent.T * scale  # [H, t, n]
        score.masked_fill_(~seen(end - begin, before, 0), -torch.inf)
        result[begin:end] = (score.softmax(-1) @ latent[:, :value_width]).transpose(0, 1).to(query.dtype)
    return result


def experts(
    x: torch.Tensor, expert: torch.Tensor, weight: torch.Tensor, gate_up: list[torch.Tensor], down: list[torch.Tensor]
) -> torch.Tensor:
    """x [T, D], expert int32 [T, A] (-1 = not here), weight float32 [T, A] -> [T, D] in x's dtype.

    Each expert works in x's dtype; the sum over a token's experts is float32, in ascending expert order.
    """
    total = torch.zeros(x.shape, dtype=torch.float32)
    for number, (first, second) in enumerate(zip(gate_up, down, strict=True)):
        token, place = (expert == number).nonzero(as_tuple=True)
        gate, up = torch.nn.functional.linear(x[token], first).chunk(2, dim=-1)
        y = torch.nn.functional.linear(torch.nn.functional.silu(gate) * up, second)
        total.index_add_(0, token, y.float() * weight[token, place, None])
    return total.to(x.dtype)


def exchange_and_give_back(
    x: list[torch.Tensor], expert: list[torch.Tensor], weight: list[torch.Tensor], owner: torch.Tensor,
    gate_up: list[torch.Tensor], down: list[torch.Tensor],
) -> list[torch.Tensor]:
    """What all ranks together compute: rank r's tokens x[r] through the experts of every rank -> its [T, D].

    Each rank that owns experts of a token answers with one part in x's dtype; parts are summed in rank order in
    float32.
    """
    results = []
    for tokens, chosen, share in zip(x, expert, weight, strict=True):
        total = torch.zeros(tokens.shape, dtype=torch.float32)
        for rank in range(len(x)):
            here = torch.where(owner[chosen.long()] == rank, chosen, -1)
            total += experts(tokens, here, share, gate_up, down).float()
        results.append(total.to(tokens.dtype))
    return results
