"""A model computed by a group of ranks answers the same bits as one rank, and each keeps the KV of its own heads."""

from __future__ import annotations

from pathlib import Path

import checkpoints
import launch
import pytest
import torch
from paged_forward import open_model
from sharded_forward import compare, on_threads, open_on_rank

from bgmpi.errors import InternalError
from bgmpi.kernels import cpu_group
from bgmpi.shard import Shard

FORMS = {
    "float32": (torch.float32, None), "bfloat16": (torch.bfloat16, None),
    "bfloat16 without tiles": (torch.bfloat16, False),
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 10000.0}
VARIANTS: dict[str, tuple[str, dict]] = {
    "one key-value head": ("llama", {"num_key_value_heads": 1}),
    "as many key-value heads": ("llama", {"num_key_value_heads": 8}),
    "fewer heads than members": ("llama", {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 24}),
    "odd sizes": ("llama", {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 10, "vocab_size": 509,
                            "intermediate_size": 97, "hidden_size": 66}),
    "tied, biases": ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "window": ("mistral", {"sliding_window": 5}),
    "narrow blocks": ("qwen2_moe", {"intermediate_size": 20, "shared_expert_intermediate_size": 10}),
    "latent, whole queries, biases": ("deepseek_v3", {"q_lora_rank": None, "attention_bias": True}),
    "latent, few heads": ("deepseek_v3", {"num_attention_heads": 2, "num_key_value_heads": 2}),
    "latent, yarn": ("deepseek_v2", {"rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}}),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Return a function that makes a family's checkpoint once."""
    known: dict[str, Path] = {}

    def get(family: str, **overrides) -> Path:
        key = f"{family} {sorted(overrides.items(), key=str)}"
        if key not in known:
            known[key] = checkpoints.make(family, tmp_path_factory.mktemp("checkpoint"), **overrides)
        return known[key]

    return get


def hold_to_the_whole(folder: Path, members: int, form: str, leader: int = 0, threads: int = 1) -> None:
    on_threads(members, lambda group: compare(open_on_rank(folder, group, *FORMS[form], threads), group, leader))


@pytest.mark.parametrize("family", checkpoints.FAMILIES)
def test_shards_answer_the_same_bits_as_the_whole_model(made, family: str) -> None:
    hold_to_the_whole(made(family), 3, "bfloat16 without tiles", leader=2)


@pytest.mark.parametrize(("members", "form"), [(3, "bfloat16"), (5, "float32")])
@pytest.mark.parametrize("variant", VARIANTS)
def test_shards_of_odd_models_answer_the_same_bits(made, variant: str, members: int, form: str) -> None:
    family, overrides = VARIANTS[variant]
    hold_to_the_whole(made(family, **overrides), members, form)


@launch.on_ranks(2, 3, 4)
def test_groups_of_real_ranks_answer_the_same_bits_also_beside_others(made, ranks: int) -> None:
    def body() -> None:
        import sys

        sys.path.append(sys.argv[1])
        import numpy as np
        import torch
        from sharded_forward import compare, open_on_rank

        from bgmpi.world import open_world

        with open_world() as world:
            groups = world.groups()
            pair = groups.get((world.rank // 2 * 2, 2))
            for number, folder in enumerate(sys.argv[2:]):
                model = open_on_rank(folder, world, (torch.float32, torch.bfloat16)[(number + world.size) % 2])
                compare(model, groups[0, world.size], world.size - 1)
                if world.size > 2:
                    compare(model, pair, 0)
            # One rank speaks for all: what several print at once may run together.
            through = len(world.all_gather_counts(np.ones(1, np.int64)))
            if world.rank == 0:
                print(f"equal on {through}")

    folders = [made(family) for family in checkpoints.FAMILIES]
    ended = launch.python_on_ranks(ranks, body, Path(__file__).parent, *folders, limit=120)
    assert ended.stdout.split() == ["equal", "on", str(ranks)]


def test_a_model_that_streams_its_weights_is_never_split(made) -> None:
    model = open_model(made("llama"))
    model._ring = object()

    def body(group) -> None:
        with pytest.raises(InternalError, match="stream through a ring"):
            Shard(model, group, 0)

    on_threads(1, body)


def test_a_shard_is_not_split_again(made) -> None:
    model = open_model(made("llama"))

    def body(group) -> None:
        with pytest.raises(InternalError, match="split the whole model instead"):
            Shard(model, group, 0)._head.rows(0, 1)

    on_threads(2, body)


@pytest.mark.parametrize("tokens", [0, 1, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gathered_columns_lie_in_the_order_of_the_members(tokens: int, dtype: torch.dtype) -> None:
    widths = (3, 0, 4)
    whole = torch.randn(tokens, 7, generator=torch.Generator().manual_seed(0)).to(dtype)

    def body(group) -> torch.Tensor:
        part = whole.split(widths, 1)[group.rank]
        with pytest.raises(InternalError, match="must name all members' widths"):
            cpu_group.gather_columns(part, group, (3, 9, 5) if group.rank == 1 else (9, 9, 9))
        return cpu_group.gather_columns(part, group, widths)

    for got in on_threads(3, body):
        assert torch.equal(got, whole)


def test_spread_rows_are_those_of_the_root() -> None:
    def body(group) -> None:
        rows = torch.full((2, 3), float(group.rank))
        cpu_group.spread(rows, group, 1)
        assert (rows == 1).all()
        with pytest.raises(InternalError, match="must be contiguous"):
            cpu_group.spread(rows.T, group, 1)

    on_threads(2, body)
