"""What a model is, in numbers: the one description that every room above reads.

A `config.json` speaks in the dialect of its family; `bgmpi.families` translates it once into an `Architecture`, and
from there on nobody asks for a family again: attention, routing and loading follow these fields alone.  All records
are frozen plain data without arrays, so they can be compared, hashed, logged and sent to other ranks.

Rejected: one class a family.  Twenty families differ in some thirty choices; the choices are the fields here.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise


class Kind(StrEnum):
    """The feed-forward part of a layer: one dense block, or experts behind a router."""

    DENSE = "dense"
    SPARSE = "sparse"


class Scoring(StrEnum):
    """How router logits become weights."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"


class GroupScore(StrEnum):
    """What a group of experts is worth when only the best groups may be chosen from."""

    BEST = "best"
    BEST_TWO = "best_two"


class RopeKind(StrEnum):
    """How rotary frequencies are stretched beyond the length the model was first trained on."""

    DEFAULT = "default"
    LINEAR = "linear"
    LLAMA3 = "llama3"
    YARN = "yarn"


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary positions.

    `width` columns of each head are rotated, `width / 2` frequencies.  `factor` stretches; `original` is the first
    training length in tokens; `low`, `high` are llama3's frequency factors; `beta_fast`, `beta_slow`, `truncate` and
    `magnitude` (a factor on cosine and sine) are YaRN's.  Fields that the kind does not use keep their defaults.
    """

    kind: RopeKind
    theta: float
    width: int
    factor: float = 1.0
    original: int = 0
    low: float = 1.0
    high: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    magnitude: float = 1.0


@dataclass(frozen=True, slots=True)
class Latent:
    """Multi-head latent attention: widths in columns.

    `rank` is the width of the compressed KV that is cached, beside `rope` rotated key columns.  `query_rank` 0 means
    that queries are not compressed.  `nope` and `value` are the widths of a head's unrotated part and of its values.
    `interleaved` says that the checkpoint pairs rotary columns 2i and 2i + 1 instead of i and i + width / 2.
    """

    rank: int
    query_rank: int
    nope: int
    rope: int
    value: int
    interleaved: bool = True

    @property
    def cached(self) -> int:
        """Columns that the cache holds for one token of one layer."""
        return self.rank + self.rope


@dataclass(frozen=True, slots=True)
class Moe:
    """The sparse layers.

    A token goes to `top_k` of `experts` experts of width `width`.  `normalise` makes its weights sum to one, then
    `scaling` multiplies them.  With `groups` > 1 only the experts of the best `top_groups` groups can be chosen, a
    group being worth `group_score`.  `selection_bias`: a float32 bias decides who is chosen, never how much it weighs.
    `shared` > 0 is the width of the expert that every token visits, scaled by a sigmoid when `shared_gate`.
    """

    experts: int
    top_k: int
    width: int
    scoring: Scoring = Scoring.SOFTMAX
    normalise: bool = False
    groups: int = 1
    top_groups: int = 1
    group_score: GroupScore = GroupScore.BEST
    scaling: float = 1.0
    selection_bias: bool = False
    shared: int = 0
    shared_gate: bool = False


@dataclass(frozen=True, slots=True)
class Architecture:
    """One model.

    `kinds` and `windows` have an entry a layer; a window of 0 sees all tokens, w > 0 the last w including its own.
    `scale` multiplies attention scores.  `head` is the width of a query, key and value head (unused with `latent`,
    which has widths of its own).  `positions` is the longest context in tokens.  `extra_layers` says how many layers
    behind the last (for predicting further tokens) a checkpoint may hold without their being used.
    """

    family: str
    vocab: int
    hidden: int
    layers: int
    positions: int
    kinds: tuple[Kind, ...]
    windows: tuple[int, ...]
    heads: int
    kv_heads: int
    head: int
    scale: float
    rope: Rope
    norm_eps: float
    dense_width: int
    latent: Latent | None = None
    moe: Moe | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    dense_bias: bool = False
    qk_norm: bool = False
    tied: bool = False
    extra_layers: int = 0

    @property
    def cached(self) -> int:
        """Numbers that the cache holds for one token of one layer."""
        return self.latent.cached if self.latent else 2 * self.kv_heads * self.head


def split_experts(experts: int, ranks: int) -> tuple[tuple[int, int], ...]:
    """Split `experts` contiguously over `ranks`: (first, behind the last) of each rank, the first ranks taking one
    more where it does not divide; ranks beyond the experts own none."""
    base, more = divmod(experts, ranks)
    ends = [rank * base + min(rank, more) for rank in range(ranks + 1)]
    return tuple(pairwise(ends))
