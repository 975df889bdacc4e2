"""Attention over pages on the CPU: who reads which pages, and in which order.

Sequences with a few new tokens (decode) are rows of one ragged kernel call: a task is some neighbouring rows, one block
of heads that share keys, and at most `SPAN` cached tokens, so each page is read once for all its heads, long sequences
spread over the threads, and the order of a row's sums depends on its own place alone.  Sequences with many new tokens
(prefill) are products: their pages are laid out one behind the other and torch's fused attention does the rest, in an
order of its own; so under `--deterministic` all rows go through the kernel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from bgmpi.errors import InternalError
from bgmpi.kernels import cpu_attention_kernels as kernels
from bgmpi.kernels.cpu_layers import ALONE, KIND
from bgmpi.kernels.team import Team, bits

#: Sequences with at most so many new tokens go through the ragged kernel.
FEW_NEW = 4
#: Heads that share a latent row are computed in blocks of so many.
LATENT_BLOCK = 16
#: Neighbouring rows share a task of at most so many queries (rows x heads) and so many rows.
QUERIES, ROWS_TOGETHER = 64, 16


@dataclass(frozen=True, slots=True)
class Tasks:
    """Tasks and joins of one ragged call, see `kernels.attend` and `join_parts`."""

    tasks: NDArray[np.int64]
    joins: NDArray[np.int64]
    parts: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """The many new tokens of one sequence."""

    begin: int
    end: int
    before: int
    pages: torch.Tensor


@dataclass(frozen=True, slots=True)
class Places:
    """Where one layer keeps what one block of heads reads, in bytes (see words 4 - 9 of `kernels.attend`)."""

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
        few_new: int = FEW_NEW,
    ) -> None:
        """few_new: sequences with at most so many new tokens go through the ragged kernel."""
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
        self._token = np.flatnonzero((count <= few_new)[sequence])
        self._sequence, self._seen = sequence[self._token], position[self._token] + 1
        self.chunks = [
            Chunk(int(first[s]), int(first[s + 1]), int(kv_before[s]), torch.from_numpy(self.pages[s].astype(np.int64)))
            for s in np.flatnonzero(count > few_new)
        ]
        self._tasks: dict[tuple[int, int], Tasks] = {}
        self._masks: dict[tuple[int, int], torch.Tensor] = {}

    def tasks(self, groups: int, window: int, together: int) -> Tasks:
        """Return the tasks of the ragged rows for this many head blocks; computed once a micro-batch."""
        kept = self._tasks.get((groups, window))
        if kept is None:
            kept = self._tasks[groups, window] = self._find_tasks(groups, window, together)
        return kept

    def mask(self, chunk: Chunk, begin: int, window: int) -> torch.Tensor:
        """Say which cached tokens from `begin` on each new token sees: bool [t, n].  Computed once a micro-batch."""
        kept = self._masks.get((chunk.begin, window))
        if kept is None:
            new = torch.arange(chunk.before, chunk.before + chunk.end - chunk.begin)[:, None]
            cached = torch.arange(begin, chunk.before + chunk.end - chunk.begin)[None]
            kept = cached <= new
            if window > 0:
                kept &= cached > new - window
            self._masks[chunk.begin, window] = kept
        return kept

    def _find_tasks(self, groups: int, window: int, together: int) -> Tasks:
        span, seen = kernels.SPAN, self._seen
        begin = np.maximum(seen - window, 0) if window > 0 else np.zeros_like(seen)
        lowest, spans = begin // span, (seen - 1) // span - begin // span + 1  # [rows]
        long = spans > 1
        before = np.cumsum(np.where(long, spans, 0)) - np.where(long, spans, 0)  # parts of earlier rows, a group
        # Neighbours share a task while they are of one sequence, one stretch of `together` places, and the same spans.
        kinds = np.stack([self._sequence, (seen - 1) // together, lowest])
        head = np.flatnonzero(np.append(True, (kinds[:, 1:] != kinds[:, :-1]).any(0))[: len(seen)])
        rows = np.diff(np.append(head, len(seen)))
        row, rows = np.repeat(head, spans[head]), np.repeat(rows, spans[head])
        ordinal = np.arange(len(row)) - np.repeat(np.cumsum(spans[head]) - spans[head], spans[head])
        bottom = (lowest[row] + ordinal) * span
        row, rows, ordinal, bottom = (np.repeat(array, groups) for array in (row, rows, ordinal, bottom))
        group = np.tile(np.arange(groups), len(row) // max(groups, 1))
        part = np.where(long[row], before[row] * groups + group * spans[row] + ordinal, -1)
        tasks = np.stack([
            self._token[row], self._sequence[row], np.maximum(bottom, begin[row]),
            np.minimum(bottom + span, seen[row] + rows - 1), group, part, rows, seen[row], spans[row] * groups,
        ], axis=1).astype(np.int64)
        joined = np.repeat(np.flatnonzero(long), groups)
        group = np.tile(np.arange(groups), int(long.sum()))
        joins = np.stack([
            self._token[joined], group, before[joined] * groups + group * spans[joined], spans[joined]
        ], axis=1).astype(np.int64)
        return Tasks(np.ascontiguousarray(tasks), np.ascontiguousarray(joins), int(spans[long].sum()) * groups)


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
    work = plan.tasks(-(-heads // places.block), window, places.rows)
    count = len(work.tasks)
    if count == 0:
        return
    parts = torch.empty(work.parts * places.block * (places.value_width + 2))
    team.run(
        kernels.attend, query.data_ptr(), query.stride(0) * size, result.data_ptr(), layer_pages.data_ptr(),
        places.page_step, places.key_group_step, places.value_offset, places.value_group_step, places.row_step,
        plan.pages.ctypes.data, plan.pages.shape[1], plan.page_tokens, work.tasks.ctypes.data, count,
        places.key_width, places.value_width, kind, size, bits(scale), heads, places.block, parts.data_ptr(), window,
        places.rows,
    )
    if work.parts:
        team.run(kernels.join_parts, parts.data_ptr(), work.joins.ctypes.data, len(work.joins), result.data_ptr(),
                 places.value_width, kind, size, heads, places.block)


def attend_chunk(
    query: torch.Tensor, cached: tuple[torch.Tensor, torch.Tensor], plan: CpuPlan, chunk: Chunk, begin: int,
    scale: float, window: int,
) -> torch.Tensor:
    """Attend query [t, H, W] to keys and values [G, n, W], which begin at cached token `begin` -> [t, H, W]."""
    key, value = (part[None].repeat_interleave(query.shape[1] // part.shape[0], 1) for part in cached)
    whole = begin == 0 and chunk.before == 0 and not 0 < window < len(query)
    rows = query.transpose(0, 1)[None]
    if whole:
        answer = functional.scaled_dot_product_attention(rows, key, value, is_causal=True, scale=scale)
    else:
        mask = plan.mask(chunk, begin, window)
        answer = functional.scaled_dot_product_attention(rows, key, value, attn_mask=mask, scale=scale)
    return answer[0].transpose(0, 1)


def first_page(chunk: Chunk, page_tokens: int, window: int) -> int:
    """Return the ordinal of the first page that any new token of the chunk sees."""
    return max(0, chunk.before + 1 - window) // page_tokens if window > 0 else 0


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
