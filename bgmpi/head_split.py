"""Which part of a layer each member of a group has when the group computes one model together (PARTITION).

Every weight is split by output rows only, so a split is a list of neighbouring spans, one a member, some perhaps empty.
Query heads follow the key-value heads that they read: as long as there is one for each member, members get whole
key-value heads, and none is kept twice; with more members than key-value heads each member has exactly one, and its
query heads are dealt out among those who share it.  So a member's query heads always read equally many key-value heads
each, and the cache of a page is read by as few members as can be.

Pure numbers: knows neither weights nor ranks.  Rejected: dealing out query heads alone (8 heads in pairs of key-value
heads over 3 members: the middle one would read both caches and be the slowest).
"""

from __future__ import annotations

from dataclasses import dataclass

from bgmpi.architecture import Architecture
from bgmpi.architecture import split_experts as split_evenly

Span = tuple[int, int]

#: Rows that stay together: as many as a matrix tile has, so that no tile is computed twice.
ROWS_TOGETHER = 16


@dataclass(frozen=True, slots=True)
class HeadShare:
    """The heads of one member: query heads [first, behind the last) and the key-value heads that they read."""

    query: Span
    kv: Span


def split_heads(heads: int, kv_heads: int, members: int) -> tuple[HeadShare, ...]:
    """Split query heads and their key-value heads over the members; a member without query heads keeps none."""
    each = heads // kv_heads
    if members <= kv_heads:
        return tuple(
            HeadShare((first * each, last * each), (first, last)) for first, last in split_evenly(kv_heads, members)
        )
    shares = []
    for kv, (first, last) in enumerate(split_evenly(members, kv_heads)):
        for begin, end in split_evenly(each, last - first):
            shares.append(HeadShare((kv * each + begin, kv * each + end), (kv, kv + 1 if end > begin else kv)))
    return tuple(shares)


def heads_of(arch: Architecture, members: int) -> tuple[HeadShare, ...]:
    """Split the heads of a model; latent attention keeps one cache for all heads, so its key-value spans are empty."""
    if arch.latent:
        return tuple(HeadShare(span, (0, 0)) for span in split_evenly(arch.heads, members))
    return split_heads(arch.heads, arch.kv_heads, members)


def kept_heads(arch: Architecture, members: int, member: int) -> slice | None:
    """Return the key-value heads of a page that a member keeps, None where it keeps whole pages (latent attention)."""
    return None if arch.latent else slice(*heads_of(arch, members)[member].kv)


def split_rows(rows: int, members: int) -> tuple[Span, ...]:
    """Split output rows of a weight over the members, `ROWS_TOGETHER` at a time."""
    parts = split_evenly(-(-rows // ROWS_TOGETHER), members)
    return tuple((min(first * ROWS_TOGETHER, rows), min(last * ROWS_TOGETHER, rows)) for first, last in parts)


def widths(spans: tuple[Span, ...], width: int = 1) -> tuple[int, ...]:
    """Return how many columns each span gives, `width` an entry."""
    return tuple((last - first) * width for first, last in spans)
