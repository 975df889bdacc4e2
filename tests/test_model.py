"""Logits of every family equal transformers' in float32, however the tokens are cut into chunks, pages and batches."""

from __future__ import annotations

import checkpoints
import pytest
import torch
from paged_forward import PagedRun, logits_of, open_model, random_ids, reference_logits

from bgmpi.io.model_files import ModelFiles, open_model_files

TOLERANCE = 5e-5
BF16_GAP = 0.5
TOKENS = 23

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 10000.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 16, "rope_theta": 10000.0}
LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}

VARIANTS: dict[str, tuple[str, dict]] = {
    "llama llama3 rope": ("llama", {"rope_parameters": LLAMA3}),
    "llama linear rope": ("llama", {"rope_parameters": LINEAR}),
    "llama yarn rope": ("llama", {"rope_parameters": YARN}),
    "llama tied, biases": ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "llama odd sizes": ("llama", {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 10,
                                  "vocab_size": 509, "intermediate_size": 97, "hidden_size": 66}),
    "mistral window": ("mistral", {"sliding_window": 5}),
    "qwen2 late windows": ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen3 bias, layer types": ("qwen3", {
        "attention_bias": True, "use_sliding_window": True, "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention"]}),
    "qwen2_moe step 2": ("qwen2_moe", {"mlp_only_layers": [], "decoder_sparse_step": 2, "norm_topk_prob": True}),
    "qwen2_moe window, no bias": ("qwen2_moe", {
        "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 3, "qkv_bias": False}),
    "qwen3_moe plain weights, window": ("qwen3_moe", {
        "norm_topk_prob": False, "use_sliding_window": True, "sliding_window": 5, "mlp_only_layers": [1]}),
    "deepseek_v2 greedy, whole queries": ("deepseek_v2", {"topk_method": "greedy", "q_lora_rank": None}),
    "deepseek_v2 yarn": ("deepseek_v2", {"rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}}),
    "deepseek_v3 halves, biases": ("deepseek_v3", {"rope_interleave": False, "attention_bias": True}),
    "deepseek_v3 whole queries, biases": ("deepseek_v3", {"q_lora_rank": None, "attention_bias": True}),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Return a function that makes a family's checkpoint once and answers with (folder, reference)."""
    known: dict[str, tuple] = {}

    def get(family: str, **overrides):
        key = f"{family} {sorted(overrides.items(), key=str)}"
        if key not in known:
            folder = checkpoints.make(family, tmp_path_factory.mktemp("checkpoint"), **overrides)
            known[key] = folder, checkpoints.reference(folder)
        return known[key]

    return get


def gap(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got - wanted).abs().max())


@pytest.mark.parametrize("family", checkpoints.FAMILIES)
def test_logits_equal_the_reference_in_one_go_in_chunks_and_token_by_token(made, family):
    folder, reference = made(family)
    model, ids = open_model(folder), random_ids(TOKENS)
    wanted = reference_logits(reference, ids)
    assert wanted.abs().max() > 2, "logits too small for a tolerance to mean anything"
    for chunks in ((), (7, 9, 7), (9, *[1] * 14)):
        assert gap(logits_of(model, ids, chunks), wanted) < TOLERANCE


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_of_the_config_equal_the_reference(made, variant):
    family, overrides = VARIANTS[variant]
    folder, reference = made(family, **overrides)
    model, ids = open_model(folder), random_ids(TOKENS, overrides.get("vocab_size", 512))
    wanted = reference_logits(reference, ids)
    for chunks in ((), (9, 8, *[1] * 6)):
        assert gap(logits_of(model, ids, chunks), wanted) < TOLERANCE


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3"])
def test_greedy_tokens_equal_those_of_generate(made, family):
    folder, reference = made(family)
    model, prompt = open_model(folder), random_ids(9)
    with torch.no_grad():
        wanted = reference.generate(
            prompt[None], max_new_tokens=40, do_sample=False, eos_token_id=None, pad_token_id=0)[0, 9:].tolist()
    run, tokens, fed = PagedRun(model, 1, 64), [], prompt
    for _ in wanted:
        tokens.append(int(run.step([fed])[0][-1].argmax()))
        fed = torch.tensor(tokens[-1:])
    assert tokens == wanted


@pytest.mark.parametrize("family", ["llama", "mixtral", "deepseek_v3"])
def test_neighbours_in_a_batch_do_not_matter(made, family):
    model = open_model(made(family)[0])
    prompts = [random_ids(tokens, seed=tokens) for tokens in (1, 5, 17)]
    run = PagedRun(model, 3, 24)
    first = run.step(prompts)
    mixed = run.step([prompts[0][:1], prompts[1][:4], prompts[2][:1]])
    for prompt, begun, went_on, more in zip(prompts, first, mixed, (1, 4, 1), strict=True):
        alone = logits_of(model, torch.cat([prompt, prompt[:more]]))
        assert gap(torch.cat([begun, went_on]), alone) < TOLERANCE


@pytest.mark.parametrize("page_tokens", [1, 3, 64])
def test_the_size_of_pages_does_not_matter(made, page_tokens):
    model, ids = open_model(made("qwen3")[0]), random_ids(TOKENS)
    assert gap(logits_of(model, ids, (11, 12), page_tokens), logits_of(model, ids)) < TOLERANCE


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3"])
def test_bf16_stays_within_its_gap(made, family):
    folder, reference = made(family)
    ids = random_ids(TOKENS)
    got = logits_of(open_model(folder, torch.bfloat16), ids).log_softmax(-1)
    wanted = reference_logits(reference, ids).log_softmax(-1)
    # A near tie in the router may send a token elsewhere; the middle of the tokens must not notice.
    assert float((got - wanted).abs().amax(-1).median()) < BF16_GAP
    assert torch.isfinite(got).all()


@pytest.mark.parametrize("spelling", ["type", "rope_type"])
def test_old_spellings_of_the_config_give_the_same_model(made, tmp_path, spelling):
    folder, reference = made("llama", rope_parameters=LLAMA3)
    inner = {key: value for key, value in LLAMA3.items() if key not in ("rope_type", "rope_theta")}
    for path in folder.iterdir():
        (tmp_path / path.name).symlink_to(path)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    checkpoints.edit_config(
        tmp_path, remove=("rope_parameters", "dtype"), rope_theta=10000.0, torch_dtype="float32",
        rope_scaling=inner | {spelling: "llama3"},
    )
    ids = random_ids(TOKENS)
    assert gap(logits_of(open_model(tmp_path), ids), reference_logits(reference, ids)) < TOLERANCE


def test_positions_may_be_reused_from_step_to_step(made):
    """The look-up of rotary tables is remembered by tensor, and begins anew with the first layer."""
    model = open_model(made("llama")[0])
    positions, backend = torch.zeros(1, dtype=torch.int64), model.backend
    wanted = logits_of(model, random_ids(5))
    run = PagedRun(model, 1, 8)
    for number, token in enumerate(random_ids(5)):
        positions.fill_(number)
        plan = backend.plan_attention(*_one(number, run), run.page_tokens)
        hidden = model.embed(token[None])
        for layer in range(model.layers):
            model.attend(layer, hidden, positions, plan, run.pools[layer])
            model.feed_forward(layer, hidden)
        assert gap(model.logits(hidden)[0], wanted[number]) < TOLERANCE


def _one(before: int, run: PagedRun):
    import numpy as np

    held = run.pages.copy()
    held[:, before // run.page_tokens + 1 :] = -1
    return np.array([0, 1], np.int32), np.array([before], np.int32), held


def test_a_rank_reads_only_the_experts_that_it_owns(made, monkeypatch):
    folder, _ = made("mixtral")
    asked: list[str] = []
    read = ModelFiles.read

    def spy(self, name, allow_nonfinite=False):
        asked.append(name)
        return read(self, name, allow_nonfinite)

    monkeypatch.setattr(ModelFiles, "read", spy)
    owned = []
    for rank in range(3):
        asked.clear()
        open_model(folder, rank=rank, ranks=3)
        owned.append({int(name.split(".experts.")[1].split(".")[0]) for name in asked if ".experts." in name})
        assert set(open_model_files(folder).names()) - set(asked) == {
            name for name in open_model_files(folder).names()
            if ".experts." in name and int(name.split(".experts.")[1].split(".")[0]) not in owned[-1]
        }
    assert owned == [{0, 1, 2}, {3, 4, 5}, {6, 7}]


def test_pages_and_collectives_follow_the_architecture(made):
    model = open_model(made("deepseek_v3")[0])
    assert model.page_shape(64) == (64, 24)
    assert [model.is_collective(layer) for layer in range(4)] == [False, True, True, True]
    assert open_model(made("llama")[0]).page_shape(64) == (2, 2, 64, 8)


def test_tokens_are_counted_by_expert(made):
    model = open_model(made("mixtral")[0])
    logits_of(model, random_ids(TOKENS))
    assert model.routed.dtype == torch.int64
    assert int(model.routed.sum()) == TOKENS * 2 * model.layers


@pytest.mark.parametrize("family", ["llama", "mixtral", "qwen2_moe", "deepseek_v3"])
def test_no_tokens_are_a_batch_too(made, family):
    model = open_model(made(family)[0])
    hidden = torch.empty(0, 64)
    for layer in range(model.layers):
        model.feed_forward(layer, hidden)
    assert model.logits(hidden).shape == (0, 512)
