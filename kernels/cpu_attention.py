"""Attention over pages on the CPU: plans of micro-batches, places of keys and values, and the one call that runs it.

Sequences with a few new tokens (decode) are rows of one ragged kernel call: a task is some neighbouring rows, one block
of heads that share keys, and at most `SPAN` cached tokens, so each page is read once for all its heads, long sequences
spread over the threads, and the order of a row's sums depends on its own place alone.  Where sequences begin with the
same page numbers, those pages are read once for all of them, with the queries side by side in lanes.  Sequences with
many new tokens (prefill) go through lanes as well, some neighbouring tokens and the heads that share keys at a time;
only what is seen is computed.  Which task reads what is told in `cpu_attention_tasks`.

In lanes the order of a row's sums depends on the stretch that is shared, so under `--deterministic` no pages are looked
at for equal numbers and all rows are rows of decode.

Rejected for prefill: torch's fused attention over pages laid out and repeated for all heads, a third as fast and more
memory than the pages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bgmpi.errors import InternalError
from bgmpi.kernels import cpu_attention_kernels as kernels
from bgmpi.kernels.cpu_attention_tasks import Heads, Rows, Tasks, find_tasks
from bgmpi.kernels.cpu_layers import ALONE, KIND
from bgmpi.kernels.shared_pages import find_stretches
from bgmpi.kernels.team import Team, bits

#: Sequences with at most so many new tokens are rows of decode.
FEW_NEW = 4
#: Heads that share a latent row are computed in blocks of so many.
LATENT_BLOCK = 16
#: Neighbouring rows share a task of at most so many queries (rows x heads) and so many rows.
QUERIES, ROWS_TOGETHER = 64, 16


@dataclass(frozen=True, slots=True)
class Places:
    """Where one layer keeps what one block of heads reads, in bytes (see words 6 - 10 of `kernels.attend`)."""

    page_step: int
    key_group_step: int
    value_offset: int
    value_group_step: int
    row_step: int
    key_width: int
    value_width: int
    block: int

    @property
    def rows(self) -> int:
        """How many neighbouring rows share a task: a power of two, because a task must not cross a span."""
        return 1 << (max(1, min(ROWS_TOGETHER, QUERIES // self.block)).bit_length() - 1)


class CpuPlan:
    """One micro-batch: offsets, page numbers, the place of every new token, and the tasks of its attention."""

    def __init__(
        self, first: NDArray[np.int32], kv_before: NDArray[np.int32], pages: NDArray[np.int32], page_tokens: int,
        few_new: int = FEW_NEW, share: bool = True,
    ) -> None:
        """few_new: sequences with at most so many new tokens are rows of decode.  share: whether to look for pages that
        more than one sequence begins with, and attend to them once for all."""
        self.tokens = int(first[-1])
        self.sequences = len(kv_before)
        self.page_tokens = page_tokens
        self.pages: NDArray[np.int32] = np.ascontiguousarray(pages, np.int32)
        count = np.diff(first).astype(np.int64)
        sequence = np.repeat(np.arange(self.sequences), count)
        position = np.arange(self.tokens) + np.repeat(kv_before - first[:-1].astype(np.int64), count)
        self.highest_page = int(self.pages.max(initial=-1))
        held = (self.pages >= 0).sum(1)
        needed = (kv_before + count + page_tokens - 1) // page_tokens
        if (held < needed).any():
            lacking = int(np.flatnonzero(held < needed)[0])
            raise InternalError(
                f"plan_attention: sequence {lacking} of the micro-batch has {held[lacking]} pages and needs "
                f"{needed[lacking]} of {page_tokens} tokens; reserve pages before planning"
            )
        self.page: NDArray[np.int64] = self.pages[sequence, position // page_tokens].astype(np.int64)
        self.slot: NDArray[np.int64] = position % page_tokens
        rows, small = Rows(np.arange(self.tokens), sequence, position + 1), (count <= few_new)[sequence]
        self._few, self._many = rows.of(small), rows.of(~small)
        able = np.where(share & (count > 0) & (count <= few_new), kv_before // page_tokens, 0)
        self._stretches = find_stretches(self.pages, able, page_tokens)
        self._tasks: dict[tuple[Heads, int], Tasks] = {}

    def tasks(self, heads: Heads, window: int) -> Tasks:
        """Return the tasks for these heads; computed once a micro-batch."""
        kept = self._tasks.get((heads, window))
        if kept is None:
            stretches = [] if window > 0 else self._stretches
            kept = find_tasks(self._few, self._many, self.sequences, stretches, heads, window)
            self._tasks[heads, window] = kept
        return kept


def steps_of(layer_pages: torch.Tensor) -> tuple[int, ...]:
    """Return the bytes from one page to the next, and so on down to the rows of a page.

    Pages may be a view of a wider whole (one layer of all layers' pages, some of the heads); only a page's rows must
    lie one behind the other.
    """
    if layer_pages.stride(-1) != 1 or layer_pages.stride(-2) != layer_pages.shape[-1]:
        raise InternalError(
            f"pages {tuple(layer_pages.shape)} have strides {layer_pages.stride()}; the rows of a page must lie one "
            "behind the other, so the last two must be its width and 1"
        )
    size = layer_pages.element_size()
    return tuple(step * size for step in layer_pages.stride()[:-1])


def grouped_places(layer_pages: torch.Tensor, heads: int) -> Places:
    """Describe pages [P, 2, G, page_tokens, W]."""
    page, half, group, row = steps_of(layer_pages)
    groups, width = layer_pages.shape[2], layer_pages.shape[4]
    if heads % groups:
        raise InternalError(f"attend: {heads} query heads over {groups} key-value heads; each must have as many")
    return Places(page, group, half, group, row, width, width, heads // groups)


def latent_places(layer_pages: torch.Tensor, heads: int, value_width: int) -> Places:
    """Describe pages [P, page_tokens, L]."""
    page, row = steps_of(layer_pages)
    return Places(page, 0, 0, 0, row, layer_pages.shape[2], value_width, min(heads, LATENT_BLOCK))


def attend_rows(
    team: Team, query: torch.Tensor, layer_pages: torch.Tensor, plan: CpuPlan, places: Places, scale: float,
    window: int, result: torch.Tensor,
) -> None:
    """Fill the rows of sequences with few new tokens in result [T, H, value width]."""
    check_fit("attend", query, layer_pages, plan)
    heads, kind, size = query.shape[1], KIND[query.dtype], query.element_size()
    work = plan.tasks(Heads(heads, places.block, places.rows), window)
    if plan.tokens == 0:
        return
    parts = torch.empty(work.parts * places.block * (places.value_width + 2))
    team.run(
        kernels.attend, 0, query.data_ptr(), query.stride(0) * size, result.data_ptr(), layer_pages.data_ptr(),
        places.page_step, places.key_group_step, places.value_offset, places.value_group_step, places.row_step,
        plan.pages.ctypes.data, plan.pages.shape[1], plan.page_tokens, work.rows.ctypes.data, len(work.rows),
        work.lanes.ctypes.data, len(work.lanes), work.listed.ctypes.data, len(work.listed), work.joins.ctypes.data,
        len(work.joins), places.key_width, places.value_width, kind, size, bits(scale), heads, places.block,
        parts.data_ptr(), window, places.rows,
    )


def check_fit(deed: str, rows: torch.Tensor, layer_pages: torch.Tensor, plan: CpuPlan) -> None:
    """Raise InternalError unless rows [T, ..] and the pages are what the plan and the kernels take for granted."""
    if rows.dtype != layer_pages.dtype or rows.shape[0] != plan.tokens or layer_pages.shape[0] <= plan.highest_page:
        raise InternalError(
            f"{deed}: {rows.shape[0]} tokens of {rows.dtype} over {layer_pages.shape[0]} pages of {layer_pages.dtype}; "
            f"the plan has {plan.tokens} tokens and pages up to {plan.highest_page}; dtypes must be equal"
        )


def append_rows(team: Team, source: torch.Tensor, pages: torch.Tensor, plan: CpuPlan) -> None:
    """Write source [T, G, W] into its places in pages [P, G, page_tokens, W]."""
    check_fit("append", source, pages, plan)
    page_step, group_step, row_step = steps_of(pages)
    if source.stride(-1) != 1:
        source = source.contiguous()
    size = source.element_size()
    tokens, groups, _ = source.shape
    run: Any = team.run if source.numel() > ALONE else team.run_alone
    run(kernels.append, source.data_ptr(), source.stride(0) * size, source.stride(1) * size,
        pages.data_ptr(), page_step, group_step, row_step, plan.page.ctypes.data,
        plan.slot.ctypes.data, tokens, groups)
