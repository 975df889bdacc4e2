"""Configs are read, known to be harmless, or refused by name; tensors are called what checkpoints call them."""

from __future__ import annotations

import math

import pytest

from bgmpi.architecture import GroupScore, Kind, Rope, RopeKind, Scoring, split_experts
from bgmpi.errors import ExitCode, InputError
from bgmpi.families import FAMILIES, read_architecture
from bgmpi.tensor_names import expected_tensors, ignored_tensor, tensor_name

BASE = {
    "model_type": "llama", "vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 2, "intermediate_size": 96, "max_position_embeddings": 256,
}
LATENT = BASE | {
    "model_type": "deepseek_v3", "kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 12, "n_routed_experts": 16, "n_shared_experts": 1, "num_experts_per_tok": 4, "n_group": 4,
    "topk_group": 2, "moe_intermediate_size": 32,
}
QWEN_MOE = BASE | {
    "model_type": "qwen2_moe", "num_experts": 12, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
}
MIXTRAL = BASE | {"model_type": "mixtral", "num_local_experts": 8}

# The parts that decide, as the hub's files of these models spell them.
PUBLISHED = {
    "Llama-3.1-8B": {
        "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 1,
        "eos_token_id": [1, 2], "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
        "intermediate_size": 14336, "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "llama",
        "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                         "original_max_position_embeddings": 8192, "rope_type": "llama3"},
        "rope_theta": 500000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "transformers_version": "4.43.0", "use_cache": True, "vocab_size": 128256,
    },
    "SmolLM2-135M": {
        "architectures": ["LlamaForCausalLM"], "attention_bias": False, "bos_token_id": 1, "eos_token_id": 2,
        "hidden_act": "silu", "hidden_size": 576, "initializer_range": 0.04, "intermediate_size": 1536,
        "is_llama_config": True, "max_position_embeddings": 8192, "mlp_bias": False, "model_type": "llama",
        "num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3, "pad_token_id": 2,
        "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_interleaved": False, "rope_scaling": None,
        "rope_theta": 100000, "tie_word_embeddings": True, "vocab_size": 49152,
        "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}},
    },
    "Qwen2.5-7B with YaRN": {
        "architectures": ["Qwen2ForCausalLM"], "hidden_act": "silu", "hidden_size": 3584, "intermediate_size": 18944,
        "max_position_embeddings": 32768, "max_window_layers": 28, "model_type": "qwen2", "num_attention_heads": 28,
        "num_hidden_layers": 28, "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
        "sliding_window": 131072, "tie_word_embeddings": False, "use_sliding_window": False, "use_mrope": False,
        "vocab_size": 152064,
        "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"},
    },
    "Mixtral-8x7B": {
        "architectures": ["MixtralForCausalLM"], "attention_dropout": 0.0, "hidden_act": "silu", "hidden_size": 4096,
        "intermediate_size": 14336, "max_position_embeddings": 32768, "model_type": "mixtral",
        "num_attention_heads": 32, "num_experts_per_tok": 2, "num_hidden_layers": 32, "num_key_value_heads": 8,
        "num_local_experts": 8, "output_router_logits": False, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.02, "sliding_window": None, "tie_word_embeddings": False, "vocab_size": 32000,
    },
    "Qwen3-30B-A3B": {
        "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "decoder_sparse_step": 1, "head_dim": 128,
        "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 6144, "max_position_embeddings": 40960,
        "max_window_layers": 48, "mlp_only_layers": [], "model_type": "qwen3_moe", "moe_intermediate_size": 768,
        "norm_topk_prob": True, "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8,
        "num_hidden_layers": 48, "num_key_value_heads": 4, "output_router_logits": False, "rms_norm_eps": 1e-06,
        "rope_scaling": None, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001, "sliding_window": None,
        "tie_word_embeddings": False, "use_sliding_window": False, "vocab_size": 151936,
    },
    "DeepSeek-V3": {
        "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": False, "auto_map": {"AutoConfig": "x.Y"},
        "bos_token_id": 0, "eos_token_id": 1, "ep_size": 1, "first_k_dense_replace": 3, "hidden_act": "silu",
        "hidden_size": 7168, "intermediate_size": 18432, "kv_lora_rank": 512, "max_position_embeddings": 163840,
        "model_type": "deepseek_v3", "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8,
        "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 128,
        "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128, "num_nextn_predict_layers": 1,
        "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
        "quantization_config": {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
                                "weight_block_size": [128, 128]},
        "rms_norm_eps": 1e-06,
        "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
                         "original_max_position_embeddings": 4096, "type": "yarn"},
        "rope_theta": 10000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "tie_word_embeddings": False,
        "topk_group": 4, "topk_method": "noaux_tc", "v_head_dim": 128, "vocab_size": 129280,
    },
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_are_read(name):
    arch = read_architecture(PUBLISHED[name])
    assert arch.layers == PUBLISHED[name]["num_hidden_layers"]
    assert arch.vocab == PUBLISHED[name]["vocab_size"]


def test_deepseek_v3_is_read_to_the_last_choice():
    arch = read_architecture(PUBLISHED["DeepSeek-V3"])
    assert arch.kinds.count(Kind.DENSE) == 3
    assert arch.latent is not None and arch.moe is not None
    assert arch.cached == 576
    assert (arch.moe.groups, arch.moe.top_groups, arch.moe.group_score) == (8, 4, GroupScore.BEST_TWO)
    assert (arch.moe.scoring, arch.moe.selection_bias, arch.moe.scaling) == (Scoring.SIGMOID, True, 2.5)
    assert arch.scale == pytest.approx(192**-0.5 * (0.1 * math.log(40) + 1) ** 2)
    assert arch.rope.magnitude == 1.0
    assert arch.positions == 163840


def test_kimi_k2_is_the_same_family_as_deepseek_v3():
    assert FAMILIES["kimi_k2"] is FAMILIES["deepseek_v3"]


@pytest.mark.parametrize("kind", ["gpt2", None, "", "Llama", 7])
def test_an_unknown_family_is_refused_with_those_known(kind):
    with pytest.raises(InputError, match="known: llama, mistral") as caught:
        read_architecture(BASE | {"model_type": kind})
    assert caught.value.exit_code == ExitCode.INPUT


def test_a_model_that_does_not_generate_is_refused():
    with pytest.raises(InputError, match="LlamaForSequenceClassification"):
        read_architecture(BASE | {"architectures": ["LlamaForSequenceClassification"]})


def test_an_unread_key_is_refused_by_name():
    with pytest.raises(InputError, match=r"embedding_multiplier = 12.0"):
        read_architecture(BASE | {"embedding_multiplier": 12.0})


@pytest.mark.parametrize("key", ["clip_qkv", "attn_logit_softcapping"])
def test_an_unread_key_that_says_nothing_is_accepted(key):
    assert read_architecture(BASE | {key: None}).layers == 4


def test_a_key_is_harmless_only_at_its_neutral_value():
    assert read_architecture(BASE | {"model_type": "mistral", "mlp_bias": False}).layers == 4
    with pytest.raises(InputError, match="mlp_bias"):
        read_architecture(BASE | {"model_type": "mistral", "mlp_bias": True})


@pytest.mark.parametrize(
    "change", [{"hidden_size": "64"}, {"hidden_size": 0}, {"num_hidden_layers": True}, {"vocab_size": None},
               {"rms_norm_eps": "small"}, {"tie_word_embeddings": 1}, {"hidden_act": "gelu"},
               {"num_key_value_heads": 3}, {"head_dim": 7}]
)
def test_a_malformed_value_is_refused_by_its_key(change):
    (key,) = change
    with pytest.raises(InputError, match=key if key != "head_dim" else "even"):
        read_architecture(BASE | change)


@pytest.mark.parametrize("packing", [{"quant_method": "awq"}, {"quant_method": "fp8"}, "int8",
                                     {"quant_method": "fp8", "weight_block_size": [128, 0]}])
def test_unknown_packing_is_refused(packing):
    with pytest.raises(InputError, match="quantization_config"):
        read_architecture(BASE | {"quantization_config": packing})


def test_head_width_is_explicit_or_shared_out():
    assert read_architecture(BASE).head == 8
    assert read_architecture(BASE | {"head_dim": 16}).scale == 0.25
    assert read_architecture(BASE | {"model_type": "qwen3"}).head == 128


def test_biases_follow_the_family_and_its_key():
    def biases(**changes):
        arch = read_architecture(BASE | changes)
        return arch.qkv_bias, arch.output_bias

    assert biases() == (False, False)
    assert biases(attention_bias=True) == (True, True)
    assert biases(model_type="qwen2") == (True, False)
    assert biases(model_type="qwen3", attention_bias=True) == (True, True)
    arch = read_architecture(QWEN_MOE | {"qkv_bias": False})
    assert (arch.qkv_bias, arch.output_bias) == (False, False)


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        ({"model_type": "mistral", "sliding_window": 8}, (8, 8, 8, 8)),
        ({"model_type": "mistral", "sliding_window": None}, (0, 0, 0, 0)),
        ({"model_type": "mistral"}, (4096,) * 4),
        ({"model_type": "qwen2", "sliding_window": 8}, (0, 0, 0, 0)),
        ({"model_type": "qwen2", "sliding_window": 8, "use_sliding_window": True, "max_window_layers": 3},
         (0, 0, 0, 8)),
        ({"model_type": "qwen3", "sliding_window": 8, "use_sliding_window": True,
          "layer_types": ["sliding_attention", "full_attention"] * 2}, (8, 0, 8, 0)),
        (QWEN_MOE | {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 2}, (8, 0, 0, 0)),
        (MIXTRAL | {"sliding_window": 8}, (8, 8, 8, 8)),
    ],
)
def test_windows_follow_the_family(config, windows):
    assert read_architecture(BASE | config).windows == windows


def test_layer_types_that_are_not_known_are_refused():
    with pytest.raises(InputError, match="layer_types"):
        read_architecture(BASE | {"model_type": "qwen3", "layer_types": ["linear_attention"] * 4})


@pytest.mark.parametrize(
    ("config", "sparse"),
    [
        (MIXTRAL, [0, 1, 2, 3]),
        (QWEN_MOE, [0, 1, 2, 3]),
        (QWEN_MOE | {"mlp_only_layers": [0], "decoder_sparse_step": 2}, [1, 3]),
        (QWEN_MOE | {"num_experts": 0}, []),
        (LATENT | {"first_k_dense_replace": 1}, [1, 2, 3]),
        (LATENT | {"first_k_dense_replace": 0}, [0, 1, 2, 3]),
        (LATENT | {"first_k_dense_replace": 1, "moe_layer_freq": 2}, [2]),
    ],
)
def test_sparse_layers_follow_the_config(config, sparse):
    kinds = read_architecture(config).kinds
    assert [layer for layer, kind in enumerate(kinds) if kind is Kind.SPARSE] == sparse


def test_routers_of_deepseek_v2_and_v3_differ():
    v3 = read_architecture(LATENT).moe
    v2 = read_architecture(LATENT | {"model_type": "deepseek_v2", "topk_method": "group_limited_greedy"}).moe
    plain = read_architecture(LATENT | {"model_type": "deepseek_v2"}).moe
    assert v3 is not None and v2 is not None and plain is not None
    assert (v3.scoring, v3.selection_bias, v3.group_score, v3.groups) == (
        Scoring.SIGMOID, True, GroupScore.BEST_TWO, 4)
    assert (v2.scoring, v2.selection_bias, v2.group_score, v2.groups) == (Scoring.SOFTMAX, False, GroupScore.BEST, 4)
    assert plain.groups == 1


@pytest.mark.parametrize("change", [{"num_experts_per_tok": 17}, {"n_group": 3}, {"n_group": 8, "topk_group": 1},
                                    {"topk_method": "magic"}, {"scoring_func": "relu"}])
def test_impossible_routing_is_refused(change):
    with pytest.raises(InputError):
        read_architecture(LATENT | change)


def test_a_context_stretched_by_yarn_is_as_long_as_it_says():
    rope = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    assert read_architecture(BASE | {"rope_scaling": rope}).positions == 1024
    assert read_architecture(BASE | {"rope_scaling": rope, "max_position_embeddings": 1024}).positions == 1024


def test_a_yarn_factor_left_out_is_the_ratio_of_the_lengths():
    rope = {"type": "yarn", "factor": None, "original_max_position_embeddings": 64}
    assert read_architecture(BASE | {"rope_scaling": rope}).rope.factor == 4.0


def test_contradicting_rope_settings_are_refused():
    linear = {"rope_type": "linear", "factor": 2.0}
    with pytest.raises(InputError, match="contradict"):
        read_architecture(BASE | {"rope_scaling": linear, "rope_parameters": linear | {"factor": 4.0}})


def test_silence_means_default_rope_with_the_family_theta():
    assert read_architecture(BASE).rope == Rope(RopeKind.DEFAULT, 10000.0, 8)
    assert read_architecture(MIXTRAL).rope.theta == 1e6


def test_a_factor_must_be_there_where_the_kind_needs_one():
    with pytest.raises(InputError, match="factor"):
        read_architecture(BASE | {"rope_scaling": {"type": "linear"}})


def test_layers_behind_the_last_are_ignored_only_where_models_predict_ahead():
    latent, dense = read_architecture(LATENT), read_architecture(BASE)
    assert ignored_tensor(latent, "model.layers.4.eh_proj.weight")
    assert ignored_tensor(latent, "model.layers.5.eh_proj.weight") is None
    assert ignored_tensor(latent, "model.layers.3.mlp.gate.weight") is None
    assert ignored_tensor(dense, "model.layers.4.mlp.up_proj.weight") is None


def test_a_head_is_ignored_only_where_it_is_tied():
    assert ignored_tensor(read_architecture(BASE | {"tie_word_embeddings": True}), "lm_head.weight")
    assert ignored_tensor(read_architecture(BASE), "lm_head.weight") is None
    assert "lm_head.weight" not in expected_tensors(read_architecture(BASE | {"tie_word_embeddings": True}))


def test_names_are_those_of_the_family():
    mixtral, latent = read_architecture(MIXTRAL), read_architecture(LATENT)
    assert tensor_name(mixtral, "expert_down", 1, 2) == "model.layers.1.block_sparse_moe.experts.2.w2.weight"
    assert tensor_name(latent, "expert_down", 1, 2) == "model.layers.1.mlp.experts.2.down_proj.weight"


@pytest.mark.parametrize(
    ("experts", "ranks", "sizes"), [(8, 3, [3, 3, 2]), (2, 4, [1, 1, 0, 0]), (8, 1, [8]), (16, 4, [4] * 4)]
)
def test_experts_split_evenly_without_gaps(experts, ranks, sizes):
    spans = split_experts(experts, ranks)
    assert [end - begin for begin, end in spans] == sizes
    assert [number for begin, end in spans for number in range(begin, end)] == list(range(experts))
