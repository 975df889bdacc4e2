"""Public faults of kind K5: mixture-of-experts and attention numerics (C35 to C45)."""

from __future__ import annotations

import dataclasses

import checkpoints
import pytest
import torch
from paged_forward import logits_of, open_model, random_ids, reference_logits

from bgmpi.architecture import GroupScore, Kind, Moe, Scoring
from bgmpi.attention import rope_frequencies
from bgmpi.errors import InputError
from bgmpi.families import read_architecture
from bgmpi.kernels.cpu import CpuBackend
from bgmpi.moe import Router

TOLERANCE = 5e-5
BACKEND = CpuBackend(None, 1)
HIDDEN = 64
V3 = Moe(16, 4, 32, Scoring.SIGMOID, True, 4, 2, GroupScore.BEST_TWO, 2.5, True)
LLAMA = {
    "model_type": "llama", "vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 2, "intermediate_size": 96, "max_position_embeddings": 256,
}


def equals_reference(folder, tokens: int = 20, chunks=(9, 7, 4)) -> None:
    ids, reference = random_ids(tokens), checkpoints.reference(folder)
    wanted = reference_logits(reference, ids)
    model = open_model(folder)
    for cut in ((), chunks):
        assert float((logits_of(model, ids, cut) - wanted).abs().max()) < TOLERANCE


def reference_router(moe: Moe, weight: torch.Tensor, bias: torch.Tensor):
    """Return transformers' own DeepSeek-V3 router with these weights."""
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

    config = checkpoints.build("deepseek_v3").config
    config.n_routed_experts, config.num_experts_per_tok = moe.experts, moe.top_k
    config.n_group, config.topk_group = moe.groups, moe.top_groups
    config.routed_scaling_factor, config.norm_topk_prob = moe.scaling, moe.normalise
    router = DeepseekV3TopkRouter(config)
    with torch.no_grad():
        router.weight.copy_(weight)
        router.e_score_correction_bias.copy_(bias)
    return router


def test_c35_the_selection_bias_alters_who_is_chosen_and_not_the_weights():
    draw = torch.Generator().manual_seed(0)
    weight, x = torch.randn(16, HIDDEN, generator=draw), torch.randn(50, HIDDEN, generator=draw)
    bias = torch.zeros(16)
    without, _ = Router(V3, weight, bias.clone(), BACKEND)(x)
    bias[3] = 5.0
    expert, share = Router(V3, weight, bias, BACKEND)(x)
    assert (expert == 3).any(1).all() and not (without == 3).any(1).all()
    scores = (x.double() @ weight.double().T).sigmoid()
    for token in range(50):
        unbiased = scores[token, expert[token].long()]
        assert share[token].tolist() == pytest.approx((2.5 * unbiased / unbiased.sum()).tolist(), rel=1e-5)


def test_c36_the_selection_bias_stays_float32_from_the_file_to_the_choice(tmp_path):
    folder = checkpoints.make("deepseek_v3", tmp_path, dtype=torch.bfloat16)
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    bias = 6.817 + 0.001 * torch.arange(16, dtype=torch.float32)
    for name in tensors:
        if name.endswith("e_score_correction_bias"):
            tensors[name] = bias.clone()
    save_file(tensors, folder / "model.safetensors")
    router = open_model(folder, torch.bfloat16)._feed[1].router
    assert router.bias.dtype == torch.float32 and torch.equal(router.bias, bias)
    assert len(set(bias.bfloat16().tolist())) < 16, "the case needs a bias that bfloat16 would merge"
    weight = tensors["model.layers.1.mlp.gate.weight"].float()
    x = torch.randn(1000, HIDDEN, generator=torch.Generator().manual_seed(1)).bfloat16()
    with torch.no_grad():
        _, _, wanted = reference_router(V3, weight, bias)(x)
    assert torch.equal(router(x)[0].sort(-1)[0], wanted.sort(-1)[0].int())


@pytest.mark.parametrize("family", ["deepseek_v3", "deepseek_v2"])
@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("scaling", [1.0, 2.5])
def test_c37_c38_the_scaling_factor_is_applied_once_whether_or_not_weights_are_normalised(family, normalise, scaling):
    config = LLAMA | {
        "model_type": family, "kv_lora_rank": 16, "q_lora_rank": None, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
        "v_head_dim": 16, "n_routed_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 32,
        "norm_topk_prob": normalise, "routed_scaling_factor": scaling,
    }
    moe = read_architecture(config).moe
    assert moe is not None
    weight, x = torch.randn(16, HIDDEN), torch.randn(30, HIDDEN)
    expert, share = Router(moe, weight, torch.zeros(16) if moe.selection_bias else None, BACKEND)(x)
    logits = x @ weight.T
    scores = logits.sigmoid() if moe.scoring is Scoring.SIGMOID else logits.softmax(-1)
    unscaled = scores.gather(1, expert.long())
    if normalise:
        unscaled = unscaled / unscaled.sum(-1, keepdim=True)
        assert torch.allclose(share.sum(-1), torch.full((30,), scaling), rtol=1e-5)
    assert torch.allclose(share, scaling * unscaled, rtol=1e-4)


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("scaling", [1.0, 2.5])
def test_c37_layers_equal_the_reference_for_every_scaling(tmp_path, normalise, scaling):
    equals_reference(
        checkpoints.make("deepseek_v3", tmp_path, norm_topk_prob=normalise, routed_scaling_factor=scaling))


def test_c39_tiny_scores_under_a_large_bias_keep_their_weights():
    router = Router(V3, torch.zeros(16, HIDDEN), torch.full((16,), 12.0), BACKEND)
    _, share = router.choose(-18 + 0.1 * torch.randn(20, 16))
    assert torch.allclose(share.sum(-1), torch.full((20,), 2.5), rtol=1e-5) and (share > 0).all()
    expert, share = router.choose(torch.full((20, 16), -200.0))
    assert torch.isfinite(share).all() and (expert >= 0).all()
    expert, share = router.choose(torch.full((20, 16), -80.0))
    assert torch.isfinite(share).all()


def test_c40_experts_equal_in_bf16_are_told_apart_by_float32():
    weight = torch.randn(8, HIDDEN, generator=torch.Generator().manual_seed(0)) * 0.01
    weight[5] = 1.0
    weight[2] = weight[5] - 1e-4
    assert torch.equal(weight[2].bfloat16(), weight[5].bfloat16())
    x = torch.ones(3, HIDDEN, dtype=torch.bfloat16)
    expert, _ = Router(Moe(8, 2, 32), weight, None, BACKEND)(x)
    assert expert.tolist() == [[5, 2]] * 3


@pytest.mark.parametrize("experts", [8, 12, 60, 257])
def test_c40_an_exact_tie_goes_to_the_lower_expert_at_every_batch_size(experts):
    draw = torch.Generator().manual_seed(0)
    weight = torch.randn(experts, HIDDEN, generator=draw)
    weight[experts - 1] = weight[1]
    x = torch.randn(300, HIDDEN, generator=draw)
    router = Router(Moe(experts, 1, 32), weight, None, BACKEND)
    whole, _ = router(x)
    assert not (whole == experts - 1).any() and (whole == 1).any()
    for tokens in (1, 2, 3, 7, 64):
        assert torch.equal(torch.cat([router(part)[0] for part in x.split(tokens)]), whole)


YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 40.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize("mscale", [{"mscale": 1.0, "mscale_all_dim": 1.0}, {"mscale": 0.707, "mscale_all_dim": 0.707},
                                    {}, {"mscale": 1.0, "mscale_all_dim": 0.707}])
@pytest.mark.parametrize("family", ["deepseek_v3", "deepseek_v2"])
def test_c41_latent_attention_has_the_softmax_correction_of_yarn(tmp_path, family, mscale):
    folder = checkpoints.make(
        family, tmp_path, rope_parameters=YARN | mscale, max_position_embeddings=2560, num_hidden_layers=2)
    scale = open_model(folder).arch.scale
    corrected = (0.1 * mscale.get("mscale_all_dim", 0) * torch.tensor(40.0).log().item() + 1) ** 2
    assert scale == pytest.approx(24**-0.5 * corrected)
    equals_reference(folder, 200, (150, 30, 20))


SCALINGS = {
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 16},
}


@pytest.mark.parametrize("kind", SCALINGS)
def test_c42_one_rope_in_three_spellings_has_equal_frequencies(kind):
    inner = SCALINGS[kind]
    spellings = [
        {"rope_theta": 5e5, "rope_scaling": inner | {"type": kind}},
        {"rope_theta": 5e5, "rope_scaling": inner | {"rope_type": kind}},
        {"rope_parameters": inner | {"rope_type": kind, "rope_theta": 5e5}},
        {"rope_scaling": inner | {"type": kind, "rope_type": kind, "rope_theta": 5e5}},
    ]
    ropes = [read_architecture(LLAMA | spelled).rope for spelled in spellings]
    assert len(set(ropes)) == 1 and ropes[0].theta == 5e5
    assert not torch.equal(rope_frequencies(ropes[0]), rope_frequencies(read_architecture(LLAMA).rope))


@pytest.mark.parametrize("rope", [
    {"type": "dynamic", "factor": 2.0}, {"rope_type": "longrope", "factor": 2.0}, {"type": "mrope"},
    {"type": "linear", "factor": 2.0, "mrope_section": [1, 2]}, {"rope_type": "default", "factor": 2.0},
    {"type": "yarn", "factor": 2.0, "partial_rotary_factor": 0.5},
])
def test_c42_an_unknown_kind_of_rope_or_an_unread_key_is_refused(rope):
    for spelled in ("rope_scaling", "rope_parameters"):
        with pytest.raises(InputError, match="rope"):
            read_architecture(LLAMA | {spelled: rope})


@pytest.mark.parametrize("window", [None, 8, 4096])
def test_c43_the_window_is_off_when_null_and_never_sees_further_when_on(tmp_path, window):
    folder = checkpoints.make("mixtral", tmp_path, sliding_window=window)
    equals_reference(folder)
    model, ids = open_model(folder), random_ids(20)
    other = ids.clone()
    other[0] = (ids[0] + 100) % 512
    changed = (logits_of(model, ids) != logits_of(model, other)).any(1)
    # Two layers of window 8 pass a token's influence on to the next 14 tokens at most.
    assert changed[0] and (bool(changed[15:].any()) is (window != 8))


def test_c44_an_explicit_head_width_is_followed(tmp_path):
    folder = checkpoints.make("llama", tmp_path, head_dim=16)
    model = open_model(folder)
    assert model.arch.scale == 16**-0.5 and model.page_shape(4) == (2, 2, 4, 16)
    equals_reference(folder)


C45 = {
    "qwen2_moe": ("qwen2_moe", {"num_hidden_layers": 4, "mlp_only_layers": [0], "decoder_sparse_step": 2}, [1, 3]),
    "first dense 1": ("deepseek_v3", {"first_k_dense_replace": 1}, [1, 2, 3]),
    "first dense 0": ("deepseek_v3", {"first_k_dense_replace": 0}, [0, 1, 2, 3]),
    "no shared expert": ("deepseek_v3", {"n_shared_experts": 0}, [1, 2, 3]),
    "two shared experts": ("deepseek_v3", {"n_shared_experts": 2}, [1, 2, 3]),
    "whole queries": ("deepseek_v3", {"q_lora_rank": None}, [1, 2, 3]),
}


@pytest.mark.parametrize("case", C45)
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_c45_layer_kinds_follow_the_config(tmp_path, case):
    family, overrides, sparse = C45[case]
    folder = checkpoints.make(family, tmp_path, **overrides)
    kinds = open_model(folder).arch.kinds
    assert [layer for layer, kind in enumerate(kinds) if kind is Kind.SPARSE] == sparse
    equals_reference(folder)


@pytest.mark.parametrize(("family", "change", "named"), [
    ("deepseek_v3", {"first_k_dense_replace": 0}, "model.layers.0.mlp.experts.0.down_proj.weight"),
    ("deepseek_v3", {"n_shared_experts": 0}, "shared_experts.down_proj"),
    ("qwen2_moe", {"mlp_only_layers": [0, 1]}, "model.layers.1.mlp.gate_proj.weight"),
    ("mixtral", {"num_local_experts": 4}, "experts.4.w1"),
    ("llama", {"num_hidden_layers": 1}, "model.layers.1.input_layernorm.weight"),
])
def test_c45_a_tensor_left_unused_or_unfilled_is_refused_by_name(tmp_path, family, change, named):
    folder = checkpoints.make(family, tmp_path)
    checkpoints.edit_config(folder, remove=("layer_types",), **change)
    with pytest.raises(InputError, match=named):
        open_model(folder)


def test_c45_an_architecture_says_whole_what_the_model_is():
    arch = read_architecture(LLAMA)
    assert dataclasses.replace(arch, layers=3) != arch and hash(arch) == hash(read_architecture(LLAMA))
