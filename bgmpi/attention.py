"""Attention of one layer over paged KV: grouped-query attention and multi-head latent attention.

Each class takes its weights once, fuses what reads the same input into one product, and is then called with the tokens
of a micro-batch.  Latent attention stays compressed: a token caches one latent row, and instead of unfolding keys and
values of a million cached tokens, the query is projected into the latent space and the result out of it ("absorbed").
DeepSeek's checkpoints pair rotary columns 2i and 2i + 1; their rows are reordered at load, so one convention of
`Backend.rotate` (column i pairs with i + r) serves every family.

Knows shapes and weights, no sequences, ranks or files.  T tokens, H query heads, G key-value heads, W head width,
D hidden, L cached latent columns, r rotary frequencies.
"""

from __future__ import annotations

import math
from typing import Protocol

import torch

from bgmpi.architecture import Architecture, Rope, RopeKind
from bgmpi.kernels.backend import AttentionPlan, Backend

# DeepSeek's inner norms do not follow the config's rms_norm_eps.
_LATENT_NORM_EPS = 1e-6


class ReadWeight(Protocol):
    """How a layer asks for its weights: by role, on the device and in the model's dtype unless it says another.  Those
    of several roles come joined by rows, as one contiguous tensor."""

    def __call__(self, *roles: str, expert: int = 0, dtype: torch.dtype | None = None) -> torch.Tensor: ...


def rope_frequencies(rope: Rope) -> torch.Tensor:
    """Return the angle that each rotary column pair turns per token, float32 [width / 2]."""
    base = 1.0 / rope.theta ** (torch.arange(0, rope.width, 2, dtype=torch.float32) / rope.width)
    match rope.kind:
        case RopeKind.DEFAULT:
            return base
        case RopeKind.LINEAR:
            return base / rope.factor
        case RopeKind.LLAMA3:
            return _llama3(rope, base)
        case RopeKind.YARN:
            return _yarn(rope, base)


def _llama3(rope: Rope, base: torch.Tensor) -> torch.Tensor:
    """Stretch slow frequencies by the factor, keep fast ones, blend between."""
    turns = rope.original * base / (2 * math.pi)
    keep = ((turns - rope.low) / (rope.high - rope.low)).clamp(0, 1)
    return (1 - keep) * base / rope.factor + keep * base


def _yarn(rope: Rope, base: torch.Tensor) -> torch.Tensor:
    """Blend stretched and unstretched frequencies over a ramp of columns (YaRN, arXiv 2309.00071)."""

    def column(turns: float) -> float:
        return rope.width * math.log(rope.original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = column(rope.beta_fast), column(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.width - 1)
    ramp = (torch.arange(rope.width // 2, dtype=torch.float32) - low) / max(high - low, 0.001)
    stretch = ramp.clamp(0, 1)
    return base / rope.factor * stretch + base * (1 - stretch)


class Rotary:
    """Cosine and sine of every position, in tables that grow with the longest position seen."""

    def __init__(self, rope: Rope, device: torch.device) -> None:
        self.rope = rope
        self.frequencies = rope_frequencies(rope)
        self.device = device
        self._cos = self._sin = torch.empty(0, rope.width // 2, device=device)

    def __call__(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Look up positions int64 [T] -> cosine, sine float32 [T, r]."""
        longest = int(positions.max()) + 1 if len(positions) else 0
        if longest > len(self._cos):
            self._grow(longest)
        return self._cos[positions], self._sin[positions]

    def _grow(self, tokens: int) -> None:
        size = 1 << max(10, (tokens - 1).bit_length())
        angle = torch.arange(size, dtype=torch.float32)[:, None] * self.frequencies
        self._cos = (angle.cos() * self.rope.magnitude).to(self.device)
        self._sin = (angle.sin() * self.rope.magnitude).to(self.device)


class Attention(Protocol):
    """Attention of one layer, projections included."""

    def __call__(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, plan: AttentionPlan, layer_pages: torch.Tensor
    ) -> torch.Tensor:
        """Mix x [T, D] -> [T, D]; the new tokens' KV is written into `layer_pages` first."""


def build_attention(arch: Architecture, layer: int, read: ReadWeight, backend: Backend) -> Attention:
    """Take one layer's attention weights."""
    kind = LatentAttention if arch.latent else GroupedAttention
    return kind(arch, layer, read, backend)


class GroupedAttention:
    """Multi-head, grouped-query and multi-query attention."""

    def __init__(self, arch: Architecture, layer: int, read: ReadWeight, backend: Backend) -> None:
        self.backend = backend
        self.heads, self.kv_heads, self.width = arch.heads, arch.kv_heads, arch.head
        self.scale, self.eps, self.window = arch.scale, arch.norm_eps, arch.windows[layer]
        bias = read("query_bias", "key_bias", "value_bias") if arch.qkv_bias else None
        self.qkv = backend.linear(read("query", "key", "value"), bias)
        self.output = backend.linear(read("output"), read("output_bias") if arch.output_bias else None)
        self.norms = (read("query_norm"), read("key_norm")) if arch.qk_norm else None

    def __call__(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, plan: AttentionPlan, layer_pages: torch.Tensor
    ) -> torch.Tensor:
        """Mix x [T, D] -> [T, D]; the new tokens' KV is written into `layer_pages` first."""
        backend, heads, keys = self.backend, self.heads, self.heads + self.kv_heads
        qkv = self.qkv(x).view(-1, keys + self.kv_heads, self.width)  # [T, H + 2G, W]
        if self.norms:
            qkv[:, :heads] = backend.rms_norm(qkv[:, :heads], self.norms[0], self.eps)
            qkv[:, heads:keys] = backend.rms_norm(qkv[:, heads:keys], self.norms[1], self.eps)
        backend.rotate(qkv[:, :keys], cos, sin)
        backend.append(qkv[:, heads:keys], qkv[:, keys:], layer_pages, plan)
        seen = backend.attend(qkv[:, :heads], layer_pages, plan, self.scale, self.window)  # [T, H, W]
        return self.output(seen.reshape(-1, heads * self.width))


class LatentAttention:
    """Multi-head latent attention in absorbed form (DeepSeek-V2, section 2.1)."""

    def __init__(self, arch: Architecture, layer: int, read: ReadWeight, backend: Backend) -> None:
        latent = arch.latent
        assert latent is not None, "latent attention of an architecture without it"
        self.backend, self.scale, self.heads = backend, arch.scale, arch.heads
        self.rank, self.rope, self.query_rank = latent.rank, latent.rope, latent.query_rank
        self.value = latent.value
        order = _halves_order(latent.rope) if latent.interleaved else torch.arange(latent.rope)
        # The rotary columns of a query head come first, where `Backend.rotate` looks for them.
        head_order = torch.cat([latent.nope + order, torch.arange(latent.nope)])
        query = read("query_up" if latent.query_rank else "query")
        query = query.view(arch.heads, arch.head, -1)[:, head_order.to(query.device)].reshape(query.shape)
        kv_order = torch.cat([torch.arange(latent.rank), latent.rank + order]).to(query.device)
        kv_down = read("kv_down")[kv_order]
        kv_bias = read("kv_down_bias")[kv_order] if arch.qkv_bias else None
        first, first_bias = query, kv_bias
        if latent.query_rank:
            first = read("query_down")
            first_bias = torch.cat([read("query_down_bias"), kv_bias]) if kv_bias is not None else None
            self.query_norm = read("query_down_norm")
            self.query_up = backend.linear(query)
        elif kv_bias is not None:
            first_bias = torch.cat([kv_bias.new_zeros(len(query)), kv_bias])
        self.split = len(first)
        self.down = backend.linear(torch.cat([first, kv_down]), first_bias)
        self.kv_norm = read("kv_down_norm")
        unfold = read("kv_up").view(arch.heads, latent.nope + latent.value, latent.rank)
        self.keys_in = backend.head_linear(unfold[:, : latent.nope].transpose(1, 2))  # [H, rank, nope]
        self.values_out = backend.head_linear(unfold[:, latent.nope :])  # [H, value, rank]
        self.output = backend.linear(read("output"), read("output_bias") if arch.output_bias else None)

    def __call__(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, plan: AttentionPlan, layer_pages: torch.Tensor
    ) -> torch.Tensor:
        """Mix x [T, D] -> [T, D]; the new tokens' latent rows are written into `layer_pages` first."""
        backend, tokens = self.backend, len(x)
        query, kv = self.down(x).split((self.split, self.rank + self.rope), dim=1)
        latent = torch.empty_like(kv, memory_format=torch.contiguous_format)  # [T, L]
        latent[:, : self.rank] = backend.rms_norm(kv[:, : self.rank].contiguous(), self.kv_norm, _LATENT_NORM_EPS)
        latent[:, self.rank :] = kv[:, self.rank :]
        backend.rotate(latent[:, None, self.rank :], cos, sin)
        backend.append_latent(latent, layer_pages, plan)
        if self.query_rank:
            query = self.query_up(backend.rms_norm(query.contiguous(), self.query_norm, _LATENT_NORM_EPS))
        query = backend.rotate(query.reshape(tokens, self.heads, -1), cos, sin)  # [T, H, rope + nope]
        absorbed = latent.new_empty(tokens, self.heads, self.rank + self.rope)  # [T, H, L]
        absorbed[..., : self.rank] = self.keys_in(query[..., self.rope :])
        absorbed[..., self.rank :] = query[..., : self.rope]
        seen = backend.attend_latent(absorbed, layer_pages, plan, self.scale, self.rank)  # [T, H, rank]
        return self.output(self.values_out(seen).reshape(tokens, -1))  # from [T, H, value]


def _halves_order(width: int) -> torch.Tensor:
    """Return the order that takes column pairs (2i, 2i + 1) to (i, i + width / 2), int64 [width]."""
    return torch.arange(width).view(-1, 2).T.reshape(-1)
