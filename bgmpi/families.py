"""Families as data: what a `config.json` means, and what its checkpoint calls each tensor.

A family is one row of `FAMILIES`: which keys it speaks, what silence means, which names its tensors have.  Reading is
one function for all of them.

Pure: no files, no tensors.  A new family of the same build is a new row; a new mechanism is a new field in
`bgmpi.architecture` first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Any

from bgmpi.architecture import Architecture, GroupScore, Kind, Latent, Moe, Rope, RopeKind, Scoring
from bgmpi.config_reader import MOST, Config, Reader
from bgmpi.errors import InputError


class Window(Enum):
    """When a family's `sliding_window` is in force (`layer_types`, where given, says it layer by layer)."""

    NEVER = 0
    ALWAYS = 1
    LATE_LAYERS = 2
    EARLY_EVEN_LAYERS = 3
    SWITCHED = 4


class Sparse(Enum):
    """How a family says which layers are sparse."""

    EVERY = 0
    STEP = 1
    AFTER_DENSE = 2


@dataclass(frozen=True, slots=True)
class Bias:
    """Whether projections have biases: the config key that says so and its default; `key` "" means always `default`."""

    key: str = ""
    default: bool = False
    output: bool = False


@dataclass(frozen=True, slots=True)
class Experts:
    """How a family speaks of its experts: config keys, and the meaning of silence."""

    count: tuple[str, ...]
    width: str
    layers: Sparse
    top_k: int = 2
    normalise: bool = False
    normalise_key: str = "norm_topk_prob"
    shared_width: str = ""
    shared_count: str = ""
    shared_gate: bool = False
    method: str = ""


@dataclass(frozen=True, slots=True)
class Family:
    """One family.  `defaults` is what silence means where it is not what most families mean."""

    names: Mapping[str, str]
    theta: float = 10000.0
    bias: Bias = Bias()
    dense_bias: bool = False
    qk_norm: bool = False
    window: Window = Window.NEVER
    silent_window: int = 0
    latent: bool = False
    experts: Experts | None = None
    head: int = 0
    norm_eps: float = 1e-6
    predicts_ahead: bool = False
    neutral: Mapping[str, Any] = field(default_factory=dict)


_LAYER = "model.layers.{layer}."
_COMMON = {
    "embed": "model.embed_tokens.weight",
    "final_norm": "model.norm.weight",
    "head": "lm_head.weight",
    "attention_norm": _LAYER + "input_layernorm.weight",
    "feed_norm": _LAYER + "post_attention_layernorm.weight",
    "output": _LAYER + "self_attn.o_proj.weight",
    "output_bias": _LAYER + "self_attn.o_proj.bias",
    "gate": _LAYER + "mlp.gate_proj.weight",
    "up": _LAYER + "mlp.up_proj.weight",
    "down": _LAYER + "mlp.down_proj.weight",
    "gate_bias": _LAYER + "mlp.gate_proj.bias",
    "up_bias": _LAYER + "mlp.up_proj.bias",
    "down_bias": _LAYER + "mlp.down_proj.bias",
}
_GROUPED = {
    "query": _LAYER + "self_attn.q_proj.weight",
    "key": _LAYER + "self_attn.k_proj.weight",
    "value": _LAYER + "self_attn.v_proj.weight",
    "query_bias": _LAYER + "self_attn.q_proj.bias",
    "key_bias": _LAYER + "self_attn.k_proj.bias",
    "value_bias": _LAYER + "self_attn.v_proj.bias",
    "query_norm": _LAYER + "self_attn.q_norm.weight",
    "key_norm": _LAYER + "self_attn.k_norm.weight",
}
_LATENT = {
    "query": _LAYER + "self_attn.q_proj.weight",
    "query_down": _LAYER + "self_attn.q_a_proj.weight",
    "query_down_bias": _LAYER + "self_attn.q_a_proj.bias",
    "query_down_norm": _LAYER + "self_attn.q_a_layernorm.weight",
    "query_up": _LAYER + "self_attn.q_b_proj.weight",
    "kv_down": _LAYER + "self_attn.kv_a_proj_with_mqa.weight",
    "kv_down_bias": _LAYER + "self_attn.kv_a_proj_with_mqa.bias",
    "kv_down_norm": _LAYER + "self_attn.kv_a_layernorm.weight",
    "kv_up": _LAYER + "self_attn.kv_b_proj.weight",
}
_EXPERTS = {
    "router": _LAYER + "mlp.gate.weight",
    "selection_bias": _LAYER + "mlp.gate.e_score_correction_bias",
    "expert_gate": _LAYER + "mlp.experts.{expert}.gate_proj.weight",
    "expert_up": _LAYER + "mlp.experts.{expert}.up_proj.weight",
    "expert_down": _LAYER + "mlp.experts.{expert}.down_proj.weight",
}
_MIXTRAL_EXPERTS = {
    "router": _LAYER + "block_sparse_moe.gate.weight",
    "expert_gate": _LAYER + "block_sparse_moe.experts.{expert}.w1.weight",
    "expert_up": _LAYER + "block_sparse_moe.experts.{expert}.w3.weight",
    "expert_down": _LAYER + "block_sparse_moe.experts.{expert}.w2.weight",
}


def _shared(word: str) -> dict[str, str]:
    return {
        "shared_gate": _LAYER + f"mlp.{word}.gate_proj.weight",
        "shared_up": _LAYER + f"mlp.{word}.up_proj.weight",
        "shared_down": _LAYER + f"mlp.{word}.down_proj.weight",
        "shared_switch": _LAYER + f"mlp.{word}_gate.weight",
    }


_DENSE_NAMES = _COMMON | _GROUPED
_DEEPSEEK_NAMES = _COMMON | _LATENT | _EXPERTS | _shared("shared_experts")
_DEEPSEEK_V3 = Family(
    names=_DEEPSEEK_NAMES,
    bias=Bias("attention_bias", output=True),
    latent=True,
    experts=Experts(
        ("n_routed_experts",), "moe_intermediate_size", Sparse.AFTER_DENSE, top_k=8, normalise=True,
        shared_count="n_shared_experts", method="noaux_tc",
    ),
    predicts_ahead=True,
)

FAMILIES: Mapping[str, Family] = MappingProxyType({
    "llama": Family(names=_DENSE_NAMES, bias=Bias("attention_bias", output=True), dense_bias=True),
    "mistral": Family(names=_DENSE_NAMES, window=Window.ALWAYS, silent_window=4096),
    "qwen2": Family(names=_DENSE_NAMES, bias=Bias(default=True), window=Window.LATE_LAYERS,
                    silent_window=4096, neutral={"use_mrope": False}),
    "qwen3": Family(names=_DENSE_NAMES, bias=Bias("attention_bias", output=True), qk_norm=True,
                    window=Window.LATE_LAYERS, silent_window=4096, head=128),
    "mixtral": Family(
        names=_DENSE_NAMES | _MIXTRAL_EXPERTS, theta=1e6, window=Window.ALWAYS, norm_eps=1e-5,
        experts=Experts(
            ("num_local_experts",), "intermediate_size", Sparse.EVERY, normalise=True, normalise_key=""
        ),
    ),
    "qwen2_moe": Family(
        names=_DENSE_NAMES | _EXPERTS | _shared("shared_expert"), bias=Bias("qkv_bias", default=True),
        window=Window.EARLY_EVEN_LAYERS, silent_window=4096,
        experts=Experts(
            ("num_experts",), "moe_intermediate_size", Sparse.STEP, top_k=4,
            shared_width="shared_expert_intermediate_size", shared_gate=True,
        ),
    ),
    "qwen3_moe": Family(
        names=_DENSE_NAMES | _EXPERTS, bias=Bias("attention_bias", output=True), qk_norm=True, window=Window.SWITCHED,
        silent_window=4096,
        experts=Experts(("num_experts", "num_local_experts"), "moe_intermediate_size", Sparse.STEP, top_k=8),
    ),
    "deepseek_v2": Family(
        names=_DEEPSEEK_NAMES, bias=Bias("attention_bias", output=True), latent=True,
        experts=Experts(
            ("n_routed_experts",), "moe_intermediate_size", Sparse.AFTER_DENSE, top_k=6,
            shared_count="n_shared_experts", method="greedy",
        ),
        predicts_ahead=True,
    ),
    "deepseek_v3": _DEEPSEEK_V3,
    "kimi_k2": _DEEPSEEK_V3,
})

# What a config may ask for before a single tensor was seen: lists of layers and of experts are made of these.
_MOST_LAYERS = 1 << 14
_MOST_EXPERTS = 1 << 20

_ROPE_KEYS: Mapping[RopeKind, frozenset[str]] = MappingProxyType({
    RopeKind.DEFAULT: frozenset(),
    RopeKind.LINEAR: frozenset({"factor"}),
    RopeKind.LLAMA3: frozenset(
        {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
    ),
    RopeKind.YARN: frozenset(
        {"factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale",
         "mscale_all_dim", "truncate"}
    ),
})


def read_architecture(config: Config) -> Architecture:
    """Translate a `config.json` dict.  Raises InputError for an unknown family, a malformed or an unread key."""
    name, family = _family(config)
    read = Reader(config)
    layers = read.integer("num_hidden_layers", most=_MOST_LAYERS)
    heads = read.integer("num_attention_heads")
    hidden = read.integer("hidden_size")
    positions = read.integer("max_position_embeddings", 2048)
    latent = _latent(read) if family.latent else None
    head = latent.nope + latent.rope if latent else _head(read, family, hidden, heads)
    rope, sharpen, positions = _rope(read, family, latent.rope if latent else head, positions)
    _quantisation(read)
    moe, kinds = _moe(read, family, layers)
    bias = read.flag(family.bias.key, family.bias.default) if family.bias.key else family.bias.default
    arch = Architecture(
        family=name, vocab=read.integer("vocab_size"), hidden=hidden, layers=layers, positions=positions, kinds=kinds,
        windows=_windows(read, family, layers), heads=heads,
        kv_heads=read.integer("num_key_value_heads", heads), head=head,
        scale=head**-0.5 * (sharpen if latent else 1.0), rope=rope,
        norm_eps=read.number("rms_norm_eps", family.norm_eps),
        dense_width=read.integer("intermediate_size", least=1 if Kind.DENSE in kinds else 0), latent=latent, moe=moe,
        qkv_bias=bias, output_bias=bias and family.bias.output,
        dense_bias=family.dense_bias and read.flag("mlp_bias", False), qk_norm=family.qk_norm,
        tied=read.flag("tie_word_embeddings", False),
        extra_layers=max(1, read.integer("num_nextn_predict_layers", 1, 0)) if family.predicts_ahead else 0,
    )
    read.word("hidden_act", "silu", ("silu", "swish"))
    read.check_all_read(family.neutral)
    if not latent and arch.heads % arch.kv_heads:
        raise InputError(
            f"config.json: num_attention_heads {arch.heads} is not a multiple of num_key_value_heads {arch.kv_heads}"
        )
    return arch


def _family(config: Config) -> tuple[str, Family]:
    """Find the row of a config; refuse what is unknown, naming what is known."""
    name = config.get("model_type")
    known = ", ".join(FAMILIES)
    if not isinstance(name, str) or name not in FAMILIES:
        raise InputError(f"config.json: model_type {name!r} is not known; known: {known}")
    built = config.get("architectures") or []
    built = built if isinstance(built, list) else [built]
    if built and not any(str(one).endswith("ForCausalLM") for one in built):
        raise InputError(f"config.json: architecture {built[0]!r} does not generate text; known: {known} (ForCausalLM)")
    return name, FAMILIES[name]


def _head(read: Reader, family: Family, hidden: int, heads: int) -> int:
    """Read the width of a head: explicit, or the hidden width shared out."""
    head = read.integer("head_dim", family.head or max(1, hidden // heads))
    if head % 2:
        raise InputError(f"config.json: a head is {head} wide, but rotary positions need an even width")
    return head


def _latent(read: Reader) -> Latent:
    """Read the widths of latent attention."""
    read.take("head_dim")
    return Latent(
        rank=read.integer("kv_lora_rank"), query_rank=read.integer("q_lora_rank", 0, 0),
        nope=read.integer("qk_nope_head_dim"), rope=read.integer("qk_rope_head_dim"),
        value=read.integer("v_head_dim"), interleaved=read.flag("rope_interleave", True),
    )


def _quantisation(read: Reader) -> None:
    """Accept fp8 weights with block scales, refuse every other packing."""
    packing = read.take("quantization_config")
    if packing is None:
        return
    block = packing.get("weight_block_size") if isinstance(packing, dict) else None
    squares = isinstance(block, list) and len(block) == 2 and all(isinstance(size, int) and size > 0 for size in block)
    if not squares or packing.get("quant_method") != "fp8":
        raise InputError(
            f"config.json: quantization_config {packing!r} is not known; known: quant_method 'fp8' with "
            f"weight_block_size of two whole numbers, or unquantised weights"
        )


# --- rotary positions ---------------------------------------------------------------------------------------------


def _rope(read: Reader, family: Family, width: int, positions: int) -> tuple[Rope, float, int]:
    """Read rotary positions in any spelling -> (rope, factor on the scores of latent attention, context length)."""
    old, new = read.take("rope_scaling"), read.take("rope_parameters")
    if old and new and old != new:
        raise InputError(f"config.json: rope_scaling {old!r} and rope_parameters {new!r} contradict each other")
    asked = new or old or {}
    if not isinstance(asked, dict):
        raise InputError(f"config.json: rope settings must be an object, got {asked!r}")
    inner = Reader(asked, "config.json, rope settings")
    inner.read |= {"type", "rope_type"}
    spelled = asked.get("rope_type") or asked.get("type") or "default"
    if spelled not in list(RopeKind):
        raise InputError(f"config.json: rope kind {spelled!r} is not known; known: {', '.join(RopeKind)}")
    kind = RopeKind(spelled)
    theta = inner.positive("rope_theta", read.positive("rope_theta", family.theta))
    outer = read.take("original_max_position_embeddings")
    inner.read |= _ROPE_KEYS[kind]
    inner.check_all_read({})
    if kind is RopeKind.DEFAULT:
        return Rope(kind, theta, width), 1.0, positions
    if kind is RopeKind.LINEAR:
        return Rope(kind, theta, width, factor=inner.positive("factor")), 1.0, positions
    original = read.integer("original_max_position_embeddings") if outer else inner.integer(
        "original_max_position_embeddings", positions)
    if kind is RopeKind.LLAMA3:
        rope = Rope(
            kind, theta, width, factor=inner.positive("factor"), original=original,
            low=inner.positive("low_freq_factor"), high=inner.positive("high_freq_factor"),
        )
        if rope.low >= rope.high:
            raise InputError(f"config.json, rope settings: low_freq_factor {rope.low:g} must be below high_freq_factor "
                             f"{rope.high:g}")
        return rope, 1.0, positions
    factor = inner.positive("factor", positions / original)
    magnitude, sharpen = _yarn_factors(inner, factor)
    rope = Rope(
        kind, theta, width, factor=factor, original=original, beta_fast=inner.number("beta_fast", 32.0) or 32.0,
        beta_slow=inner.number("beta_slow", 1.0) or 1.0, truncate=inner.flag("truncate", True), magnitude=magnitude,
    )
    if not 1 <= original * factor <= MOST or theta <= 1 or min(rope.beta_fast, rope.beta_slow) <= 0:
        raise InputError(f"config.json, rope settings: factor {factor:g} on {original} tokens, rope_theta {theta:g}, "
                         f"beta_fast {rope.beta_fast:g} and beta_slow {rope.beta_slow:g} give no frequencies")
    return rope, sharpen, max(positions, int(original * factor))


def _yarn_factors(inner: Reader, factor: float) -> tuple[float, float]:
    """Return YaRN's factor on cosine and sine, and latent attention's factor on scores (case C41)."""

    def grown(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    part, whole = inner.number("mscale", 0.0), inner.number("mscale_all_dim", 0.0)
    if part < 0 or whole < 0:
        raise InputError(f"{inner.where}: 'mscale' {part:g} and 'mscale_all_dim' {whole:g} must not be below zero")
    inferred = grown(part) / grown(whole) if part and whole else grown(1.0)
    return inner.number("attention_factor", inferred), grown(whole) ** 2 if whole else 1.0


# --- layers -------------------------------------------------------------------------------------------------------


def _windows(read: Reader, family: Family, layers: int) -> tuple[int, ...]:
    """Read each layer's attention window, 0 for none (case C43)."""
    types = read.words("layer_types")
    if family.window is Window.NEVER:
        if types is not None and set(types) != {"full_attention"}:
            raise InputError(f"config.json: layer_types {types!r} is not known of this family: it has no window")
        return (0,) * layers
    silent = 0 if "sliding_window" in read.config else family.silent_window
    width = read.integer("sliding_window", silent, 0)
    on = family.window is Window.ALWAYS or read.flag("use_sliding_window", False)
    first = 0 if family.window is Window.ALWAYS else read.integer("max_window_layers", 28, 0)
    if types is not None:
        if len(types) != layers or not set(types) <= {"full_attention", "sliding_attention"}:
            raise InputError(f"config.json: layer_types must name {layers} full_attention or sliding_attention layers")
        slides = [kind == "sliding_attention" for kind in types]
    elif family.window is Window.LATE_LAYERS:
        slides = [layer >= first for layer in range(layers)]
    elif family.window is Window.EARLY_EVEN_LAYERS:
        slides = [layer % 2 == 0 and layer < first for layer in range(layers)]
    else:
        slides = [True] * layers
    return tuple(width if on and slide else 0 for slide in slides)


def _moe(read: Reader, family: Family, layers: int) -> tuple[Moe | None, tuple[Kind, ...]]:
    """Read the experts and which layers have them (case C45)."""
    keys = family.experts
    if keys is None:
        return None, (Kind.DENSE,) * layers
    counts = [read.integer(key, 0, 0) for key in keys.count]
    experts, top_k = max(counts), read.integer("num_experts_per_tok", keys.top_k)
    sparse = _sparse_layers(read, keys.layers, layers) if experts else set()
    kinds = tuple(Kind.SPARSE if layer in sparse else Kind.DENSE for layer in range(layers))
    width = read.integer(keys.width)
    shared = read.integer(keys.shared_width, 0, 0) if keys.shared_width else 0
    shared += width * read.integer(keys.shared_count, 0, 0) if keys.shared_count else 0
    normalise = read.flag(keys.normalise_key, keys.normalise) if keys.normalise_key else keys.normalise
    choice = _choice(read, keys, experts)
    if not experts:
        return None, kinds
    if experts * layers > _MOST_EXPERTS:
        raise InputError(f"config.json: {experts} experts in {layers} layers are more than any model has")
    if top_k > experts:
        raise InputError(f"config.json: num_experts_per_tok {top_k} is more than the {experts} experts")
    moe = Moe(experts=experts, top_k=top_k, width=width, normalise=normalise, shared=shared,
              shared_gate=keys.shared_gate and shared > 0, **choice)
    if moe.groups > 1 and (experts % moe.groups or top_k > experts // moe.groups * moe.top_groups):
        raise InputError(
            f"config.json: {experts} experts in n_group {moe.groups}, topk_group {moe.top_groups} cannot give "
            f"{top_k} experts a token"
        )
    return moe, kinds


def _sparse_layers(read: Reader, rule: Sparse, layers: int) -> set[int]:
    """Return the numbers of the sparse layers."""
    every = set(range(layers))
    if rule is Sparse.EVERY:
        return every
    if rule is Sparse.STEP:
        step = read.integer("decoder_sparse_step", 1)
        return {layer for layer in every if (layer + 1) % step == 0} - set(read.words("mlp_only_layers") or ())
    first, step = read.integer("first_k_dense_replace", 0, 0), read.integer("moe_layer_freq", 1)
    return {layer for layer in every if layer >= first and layer % step == 0}


def _choice(read: Reader, keys: Experts, experts: int) -> dict[str, Any]:
    """Read how DeepSeek's routers choose; other families choose the plain top k of a softmax."""
    if not keys.method:
        return {}
    method = read.word("topk_method", keys.method, ("greedy", "group_limited_greedy", "noaux_tc"))
    biased = method == "noaux_tc"
    scoring = read.word("scoring_func", "sigmoid" if biased else "softmax", tuple(Scoring))
    groups, top_groups = read.integer("n_group", 1), read.integer("topk_group", 1)
    if method == "greedy" or top_groups >= groups:
        groups = top_groups = 1
    return {
        "scoring": Scoring(scoring), "groups": groups, "top_groups": top_groups, "selection_bias": biased,
        "group_score": GroupScore.BEST_TWO if biased else GroupScore.BEST,
        "scaling": read.number("routed_scaling_factor", 2.5 if biased else 1.0),
    }
