"""Tiny random checkpoints of every family, made and read back by transformers: the oracle nobody here wrote.

`make` writes a Hugging Face folder with a fixed seed, `reference` loads it as transformers' model in float32.  The
weights are drawn wide enough for logits to differ clearly; norms, biases and routers are random too, so that leaving
one out shows.  Importing this module does nothing.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from bgmpi.architecture import Architecture
from bgmpi.errors import UsageError
from bgmpi.weight_plan import plan_weights, weight_bytes

FAMILIES: tuple[str, ...] = (
    "llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3", "kimi_k2",
)

_BASE: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2,
    "intermediate_size": 96, "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None,
}
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 8, "kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 16, "n_routed_experts": 16, "n_shared_experts": 1, "num_experts_per_tok": 4, "n_group": 4,
    "topk_group": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1,
}
_OWN: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": None, "head_dim": 8},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen2_moe": {
        "num_hidden_layers": 3, "num_experts": 12, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 48, "mlp_only_layers": [0],
    },
    "qwen3_moe": {
        "head_dim": 16, "num_experts": 12, "num_experts_per_tok": 4, "moe_intermediate_size": 32,
        "norm_topk_prob": True,
    },
    "deepseek_v2": _LATENT | {"num_hidden_layers": 3, "topk_method": "group_limited_greedy", "n_shared_experts": 2,
                              "routed_scaling_factor": 1.5},
    "deepseek_v3": _LATENT | {"num_hidden_layers": 4, "routed_scaling_factor": 2.5, "norm_topk_prob": True},
    "kimi_k2": _LATENT | {"num_hidden_layers": 3, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.8,
                          "norm_topk_prob": True},
}
_CLASSES = {
    "llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3", "mixtral": "Mixtral",
    "qwen2_moe": "Qwen2Moe", "qwen3_moe": "Qwen3Moe", "deepseek_v2": "DeepseekV2", "deepseek_v3": "DeepseekV3",
    "kimi_k2": "DeepseekV3",
}


def _classes(family: str) -> tuple[Any, Any]:
    import transformers

    name = _CLASSES[family]
    return getattr(transformers, f"{name}Config"), getattr(transformers, f"{name}ForCausalLM")


def build(family: str, seed: int = 0, **overrides: Any) -> Any:
    """Return transformers' model of a family with random weights, in float32."""
    config_class, model_class = _classes(family)
    config = config_class(**(_BASE | _OWN[family] | overrides))
    config._attn_implementation = "eager"
    model = model_class(config).eval()
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in sorted(model.state_dict().items()):
            noise = torch.randn(tensor.shape, generator=draw)
            if name.endswith("e_score_correction_bias"):
                tensor.copy_(0.1 * noise)
            elif "norm" in name:
                tensor.copy_(1.0 + 0.1 * noise)
            else:
                tensor.copy_(0.15 * noise)
    return model


def make(
    family: str, folder: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32, shards: int = 1, **overrides: Any
) -> Path:
    """Write a checkpoint of `family` into `folder` and return it; `overrides` are config keys.

    `shards` > 1 writes about that many files and an index.
    """
    model = build(family, seed, **overrides).to(dtype)
    size = sum(tensor.numel() * tensor.element_size() for tensor in model.state_dict().values())
    _quietly(model.save_pretrained, folder, max_shard_size=-(-size // shards) if shards > 1 else "5GB")
    if family == "kimi_k2":
        edit_config(folder, model_type="kimi_k2")
    return folder


def edit_config(folder: Path, remove: tuple[str, ...] = (), **changes: Any) -> None:
    """Change keys of a checkpoint's config.json and leave its weights alone."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for key in remove:
        config.pop(key, None)
    path.write_text(json.dumps(config | changes))


def reference(folder: Path) -> Any:
    """Load a checkpoint as transformers' model, float32, eager attention."""
    config = json.loads((folder / "config.json").read_text())
    config_class, model_class = _classes(config["model_type"])
    if config["model_type"] == "kimi_k2":
        config["model_type"] = "deepseek_v3"
    known = config_class.from_dict(config)
    return _quietly(
        model_class.from_pretrained, folder, config=known, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def _quietly(call: Any, *arguments: Any, **options: Any) -> Any:
    from transformers.utils import logging

    logging.disable_progress_bar()
    return call(*arguments, **options)


def least_budget(arch: Architecture, rank: int, ranks: int, itemsize: int = 4) -> int:
    """Return the least bytes of weights that are not refused on a rank: everything streams, the ring holds one unit of
    the largest."""
    low, high = 1, weight_bytes(arch, rank, ranks, itemsize)
    while low < high:
        middle = (low + high) // 2
        try:
            plan_weights(arch, rank, ranks, itemsize, middle)
            high = middle
        except UsageError:
            low = middle + 1
    return low
