"""Rotary frequencies equal transformers' for every kind; latent attention stays compressed and loses nothing."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from bgmpi.architecture import Rope, RopeKind
from bgmpi.attention import LatentAttention, Rotary, build_attention, rope_frequencies
from bgmpi.families import read_architecture
from bgmpi.kernels import open_backend

LLAMA = {
    "model_type": "llama", "vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 96, "max_position_embeddings": 256,
}
LATENT = LLAMA | {
    "model_type": "deepseek_v2", "num_key_value_heads": 4, "kv_lora_rank": 12, "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6, "v_head_dim": 14, "n_routed_experts": 0, "moe_intermediate_size": 32,
    "num_experts_per_tok": 1,
}
ROPES = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 64},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "yarn, one ramp column": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64,
                              "beta_fast": 4, "beta_slow": 4},
    "yarn, everything said": {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 64,
                              "beta_fast": 16, "beta_slow": 2, "mscale": 0.7, "mscale_all_dim": 1.0,
                              "truncate": False},
    "yarn, own magnitude": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64,
                            "attention_factor": 1.25},
}


@pytest.mark.parametrize("kind", ROPES)
def test_frequencies_and_magnitude_equal_the_reference(kind):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    asked = ROPES[kind] | {"rope_theta": 5000.0}
    theirs = LlamaRotaryEmbedding(LlamaConfig(**{**LLAMA, "rope_parameters": dict(asked)}))
    ours = read_architecture(LLAMA | {"rope_parameters": asked}).rope
    assert torch.allclose(rope_frequencies(ours), theirs.inv_freq, rtol=1e-6, atol=0)
    assert ours.magnitude == pytest.approx(theirs.attention_scaling, rel=1e-12)


def test_tables_grow_and_keep_what_they_said():
    rotary = Rotary(Rope(RopeKind.DEFAULT, 10000.0, 8), torch.device("cpu"))
    early = torch.arange(5)
    cos, _ = rotary(early)
    far_cos, far_sin = rotary(torch.tensor([100_000]))
    assert torch.equal(rotary(early)[0], cos)
    angle = 100_000 * rope_frequencies(rotary.rope)
    assert torch.allclose(far_cos[0], angle.cos()) and torch.allclose(far_sin[0], angle.sin())
    assert rotary(torch.empty(0, dtype=torch.int64))[0].shape == (0, 4)


def weights(shapes: dict[str, tuple[int, ...]]):
    """Return a reader of random weights, the same for the same role."""
    draw = torch.Generator().manual_seed(0)
    made = {role: torch.randn(shape, generator=draw) * 0.2 for role, shape in shapes.items()}

    def read(*roles: str, expert: int = 0, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.cat([made[role] for role in roles])

    return made, read


def unfolded(made, arch, x: torch.Tensor) -> torch.Tensor:
    """Latent attention as the paper writes it first: every cached token's keys and values unfolded."""
    latent, tokens = arch.latent, len(x)
    down = x @ made["kv_down"].T
    compressed = torch.nn.functional.rms_norm(down[:, : latent.rank], (latent.rank,), made["kv_down_norm"], 1e-6)
    both = (compressed @ made["kv_up"].T).view(tokens, arch.heads, -1)
    keys, values = both.split((latent.nope, latent.value), -1)
    query = (x @ made["query"].T).view(tokens, arch.heads, -1)
    turn = torch.polar(torch.ones(tokens, latent.rope // 2),
                       torch.arange(tokens)[:, None] * rope_frequencies(arch.rope))[:, None]

    def rotated(part: torch.Tensor) -> torch.Tensor:
        pairs = torch.view_as_complex(part.reshape(*part.shape[:-1], -1, 2).contiguous())
        return torch.view_as_real(pairs * turn).flatten(-2)

    shared = rotated(down[:, None, latent.rank :]).expand(-1, arch.heads, -1)
    keys = torch.cat([keys, shared], -1)
    query = torch.cat([query[..., : latent.nope], rotated(query[..., latent.nope :])], -1)
    score = torch.einsum("qhw,khw->hqk", query, keys) * arch.scale
    score.masked_fill_(torch.ones(tokens, tokens).triu(1).bool(), -torch.inf)
    return torch.einsum("hqk,khv->qhv", score.softmax(-1), values).reshape(tokens, -1) @ made["output"].T


def test_absorbed_latent_attention_equals_the_unfolded_one():
    arch = read_architecture(LATENT)
    assert arch.latent is not None
    made, read = weights({
        "query": (64, 64), "kv_down": (18, 64), "kv_down_norm": (12,), "kv_up": (96, 12), "output": (64, 56),
    })
    backend = open_backend("cpu", None, 1)
    attention = build_attention(arch, 0, read, backend)
    assert isinstance(attention, LatentAttention)
    x = torch.randn(9, 64, generator=torch.Generator().manual_seed(1))
    pages = torch.zeros(3, 4, 18)
    plan = backend.plan_attention(np.array([0, 9], np.int32), np.zeros(1, np.int32), np.array([[2, 0, 1]], np.int32), 4)
    got = attention(x, *Rotary(arch.rope, backend.device)(torch.arange(9)), plan, pages)
    assert torch.allclose(got, unfolded(made, arch, x), atol=1e-5)
    assert pages.shape[-1] == arch.cached == arch.latent.rank + arch.latent.rope


def test_the_score_scale_reaches_the_kernel():
    arch = read_architecture(LLAMA)
    _, read = weights({"query": (64, 64), "key": (32, 64), "value": (32, 64), "output": (64, 64)})
    backend = open_backend("cpu", None, 1)
    x, turn = torch.randn(5, 64), Rotary(arch.rope, backend.device)(torch.arange(5))
    plan = backend.plan_attention(np.array([0, 5], np.int32), np.zeros(1, np.int32), np.array([[0]], np.int32), 8)
    pages = torch.zeros(1, 2, 2, 8, 16)
    usual = build_attention(arch, 0, read, backend)(x, *turn, plan, pages)
    flat = build_attention(dataclasses.replace(arch, scale=0.0), 0, read, backend)(x, *turn, plan, pages)
    assert not torch.allclose(usual, flat)
