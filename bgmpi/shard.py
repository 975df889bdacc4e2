"""One model computed by a group of ranks together: PARTITION of the paper (section 5.4), for the last stragglers.

Every member holds all weights but the routed experts anyway, so a shard is the same model with other parts: views of
whole output rows, and a gather behind each.  No sum is split, so each number is computed by one member exactly as one
rank alone would, and tokens are bit-equal by construction.  All members hold the whole hidden rows of the same tokens.

Attention: own heads, gathered, own rows of the output weight, gathered; a member keeps the KV of its own key-value
heads, in pages as wide as ever (latent attention: everything, on every member).  Dense block and shared expert: own
rows of gate and up, gathered, own rows of down, gathered.  Routed experts stay where they are, spread over the world:
only the leader, who owns the sequences, brings tokens to the exchange, and its result is spread in the group.

Refuses to know sequences, pages and who leads for how long.  Rejected: splitting the input columns of every second
weight, with half the gathers, because partial sums would then depend on the size of the group.
"""

from __future__ import annotations

import copy
from collections.abc import Collection

import torch

from bgmpi.attention import Attention, GroupedAttention, LatentAttention
from bgmpi.errors import InternalError
from bgmpi.head_split import Span, heads_of, kept_heads, split_rows, widths
from bgmpi.kernels.backend import AttentionPlan, Backend, Group, Linear
from bgmpi.model import Model, Streamed
from bgmpi.moe import DenseFeedForward, FeedForward, SparseFeedForward


class Part:
    """A Linear that is part of a shard."""

    def rows(self, start: int, stop: int) -> Linear:
        """Refuse: only whole models are split."""
        raise InternalError(f"rows [{start}, {stop}) of a shard's weight were asked for; split the whole model instead")

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, K] -> [T, N]."""
        raise NotImplementedError


class OwnRows(Part):
    """Some spans of a weight's output rows beside one another: x [T, K] -> [T, rows of the spans]."""

    def __init__(self, whole: Linear, spans: tuple[Span, ...]) -> None:
        self._parts = [whole.rows(*span) for span in spans]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Local."""
        return torch.cat([part(x) for part in self._parts], 1)


class SplitRows(Part):
    """A weight whose output rows are split over the group: x [T, K] -> [T, N], whole on every member."""

    def __init__(self, whole: Linear, rows: int, backend: Backend, group: Group) -> None:
        spans = split_rows(rows, group.size)
        self._part, self._widths = whole.rows(*spans[group.rank]), widths(spans)
        self._backend, self._group = backend, group

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Collective over the group."""
        return self._backend.gather_columns(self._part(x), self._group, self._widths)


class JoinColumns(Part):
    """Gathers what the members computed and hands the whole to the next weight.

    own: which of this member's columns count.
    """

    def __init__(
        self, behind: SplitRows, columns: tuple[int, ...], backend: Backend, group: Group, own: slice | None = None
    ) -> None:
        self._behind, self._columns, self._own = behind, columns, own
        self._backend, self._group = backend, group

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Collective over the group.  x [T, own columns] -> [T, N]."""
        own = x if self._own is None else x[:, self._own]
        return self._behind(self._backend.gather_columns(own, self._group, self._columns))


class OwnHeads:
    """Grouped-query attention of a member: its heads, over their part of every page."""

    def __init__(self, attention: GroupedAttention, kv: slice) -> None:
        self._attention, self._kv = attention, kv

    def __call__(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, plan: AttentionPlan, layer_pages: torch.Tensor
    ) -> torch.Tensor:
        """Collective over the group.  Mix x [T, D] -> [T, D]; KV of the own heads alone is written."""
        return self._attention(x, cos, sin, plan, layer_pages[:, :, self._kv])


class NoHeads:
    """Attention of a member for whom no head was left: it has its rows of the output weight alone."""

    def __init__(self, output: Linear) -> None:
        self._output = output

    def __call__(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, plan: AttentionPlan, layer_pages: torch.Tensor
    ) -> torch.Tensor:
        """Collective over the group.  Mix x [T, D] -> [T, D]; no KV is written."""
        return self._output(x[:, :0])


class SplitSparse:
    """A sparse layer: the leader's tokens visit the routed experts, the shared expert is split."""

    def __init__(
        self, whole: SparseFeedForward, shared: FeedForward | None, backend: Backend, group: Group, leader: int
    ) -> None:
        self._whole, self._shared = whole, shared
        self._backend, self._group, self._leader = backend, group, leader

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Collective over the expert ranks and over the group.  x [T, D], equal on all members -> [T, D]."""
        leads = self._group.rank == self._leader
        came = self._whole.visit(x if leads else x[:0])
        routed = came if leads else torch.empty_like(x)
        self._backend.spread(routed, self._group, self._leader)
        return routed if self._shared is None else self._whole.add_shared(x, routed, self._shared(x))


class Shard(Model):
    """This rank's part of a model that its group computes together; called as the Model is, by all members alike.

    All members bring the same tokens.  `attend`, `feed_forward` and `logits` are collective over the group, and
    `feed_forward` of a sparse layer over all ranks as well; results are whole and equal on every member.
    """

    def __init__(self, model: Model, group: Group, leader: int, layers: Collection[int] | None = None) -> None:
        """Take views of the model's weights, in milliseconds where these are plain rows.  Local.

        leader: the member that owns the sequences and alone brings tokens to the routed experts; layers: those that are
        split, None for all, if no other is ever asked for.
        """
        self.__dict__.update(model.__dict__)
        if self._ring is not None:
            raise InternalError(
                "a model whose weights stream through a ring was to be split over a group; only weights that stay can "
                "be, so partition must be off with a weight memory"
            )
        self.group, self.leader = group, leader
        self._shares = heads_of(self.arch, group.size)
        assert not isinstance(self._head, Streamed), "only a ring streams"
        self._head = self._split_rows(self._head, self.arch.vocab)
        self._attention, self._feed = attention, feed = [*self._attention], [*self._feed]
        for layer in range(self.layers) if layers is None else layers:
            attention[layer] = self._split_attention(attention[layer])
            feed[layer] = self._split_feed(feed[layer])

    def own_heads(self, member: int) -> slice | None:
        """Return the key-value heads whose part of every page a member keeps; None: all of every page.  Local."""
        return kept_heads(self.arch, self.group.size, member)

    def _split_rows(self, whole: Linear, rows: int) -> SplitRows:
        return SplitRows(whole, rows, self.backend, self.group)

    def _join(self, whole: Linear, columns: tuple[int, ...], own: slice | None = None) -> JoinColumns:
        behind = self._split_rows(whole, self.arch.hidden)
        return JoinColumns(behind, columns, self.backend, self.group, own)

    def _split_attention(self, whole: Attention | Streamed[Attention]) -> Attention:
        if isinstance(whole, LatentAttention):
            return self._split_latent(whole)
        assert isinstance(whole, GroupedAttention), "attention is grouped or latent"
        return self._split_grouped(whole)

    def _split_grouped(self, whole: GroupedAttention) -> OwnHeads | NoHeads:
        width, keys = whole.width, whole.heads
        values = keys + whole.kv_heads
        output = self._join(whole.output, widths(tuple(share.query for share in self._shares), width))
        (first, last), (kv_first, kv_last) = (share := self._shares[self.group.rank]).query, share.kv
        if first == last:
            return NoHeads(output)
        part = copy.copy(whole)
        part.heads, part.kv_heads, part.output = last - first, kv_last - kv_first, output
        heads = (first, last), (keys + kv_first, keys + kv_last), (values + kv_first, values + kv_last)
        part.qkv = OwnRows(whole.qkv, tuple((begin * width, end * width) for begin, end in heads))
        return OwnHeads(part, slice(kv_first, kv_last))

    def _split_latent(self, whole: LatentAttention) -> LatentAttention:
        """Every member computes and keeps the whole latent rows.

        It computes at least two heads, of which only its own count: the library's product for a lone head adds in
        another order than that for many.
        """
        first, last = self._shares[self.group.rank].query
        begin = max(0, min(first, whole.heads - 2)) if last - first < 2 else first
        end = min(whole.heads, max(last, begin + 2))
        query_width, value_width = self.arch.head, whole.value
        part = copy.copy(whole)
        part.heads = end - begin
        part.keys_in, part.values_out = whole.keys_in.heads(begin, end), whole.values_out.heads(begin, end)
        rows = begin * query_width, end * query_width
        if whole.query_rank:
            part.query_up = whole.query_up.rows(*rows)
        else:
            part.split = rows[1] - rows[0]
            part.down = OwnRows(whole.down, (rows, (whole.split, whole.split + whole.rank + whole.rope)))
        own = slice((first - begin) * value_width, (last - begin) * value_width)
        part.output = self._join(
            whole.output, widths(tuple(share.query for share in self._shares), value_width), own
        )
        return part

    def _split_feed(self, whole: FeedForward) -> FeedForward:
        if isinstance(whole, SparseFeedForward):
            shared = None if whole.shared is None else self._split_dense(whole.shared, whole.moe.shared)
            return SplitSparse(whole, shared, self.backend, self.group, self.leader)
        return self._split_dense(whole, self.arch.dense_width)

    def _split_dense(self, whole: FeedForward, inner: int) -> DenseFeedForward:
        assert isinstance(whole, DenseFeedForward), "a feed-forward part is dense or sparse"
        spans = split_rows(inner, self.group.size)
        first, last = spans[self.group.rank]
        part = copy.copy(whole)
        part.gate_up = OwnRows(whole.gate_up, ((first, last), (inner + first, inner + last)))
        part.down = self._join(whole.down, widths(spans))
        return part
