"""The shared prefixes of a rank: which are computed, by whom, where their KV lies, and how long it stays."""

from __future__ import annotations

from msgspec import Struct


class Prefix(Struct, frozen=True):
    """A prefix that several prompts of the job begin with.

    number: its name in the job; depth: its tokens, counted from the prompt's begin; more: rank 0 still has sequences
    that share it.
    """

    number: int
    depth: int
    more: bool = False
