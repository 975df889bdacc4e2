"""Which tensors a checkpoint must hold, what it calls them, and what it may hold beside them.

The roles follow from the `Architecture` alone, the names from its family's row.  Loading compares this list with the
folder before any weight is read: a tensor left unfilled or unused is an error that names it (cases C45, C48).
"""

from __future__ import annotations

from collections.abc import Iterator

from bgmpi.architecture import Architecture, Kind, Latent, Moe
from bgmpi.families import FAMILIES

Shape = tuple[int, ...]


def tensor_name(arch: Architecture, role: str, layer: int = 0, expert: int = 0) -> str:
    """Return what the checkpoint calls a tensor."""
    return FAMILIES[arch.family].names[role].format(layer=layer, expert=expert)


def expected_tensors(arch: Architecture) -> dict[str, Shape]:
    """Return every tensor that a checkpoint of `arch` must hold, with its shape."""
    hidden, vocab = arch.hidden, arch.vocab
    roles: dict[str, Shape] = {"embed": (vocab, hidden), "final_norm": (hidden,)}
    if not arch.tied:
        roles["head"] = (vocab, hidden)
    expected = {tensor_name(arch, role): shape for role, shape in roles.items()}
    attention = dict(_attention_roles(arch))
    for layer, kind in enumerate(arch.kinds):
        feed = dict(_dense_roles(arch) if kind is Kind.DENSE else _sparse_roles(arch))
        expected |= {tensor_name(arch, role, layer): shape for role, shape in (attention | feed).items()}
        if kind is Kind.SPARSE and arch.moe:
            for role, shape in _expert_roles(arch.moe, hidden):
                expected |= {tensor_name(arch, role, layer, expert): shape for expert in range(arch.moe.experts)}
    return expected


def _attention_roles(arch: Architecture) -> Iterator[tuple[str, Shape]]:
    """Yield what every layer's attention holds."""
    hidden = arch.hidden
    yield from (("attention_norm", (hidden,)), ("feed_norm", (hidden,)))
    if arch.output_bias:
        yield "output_bias", (hidden,)
    if arch.latent:
        yield from _latent_roles(arch, arch.latent)
        return
    queries, keys = arch.heads * arch.head, arch.kv_heads * arch.head
    yield "output", (hidden, queries)
    for role, rows in (("query", queries), ("key", keys), ("value", keys)):
        yield role, (rows, hidden)
        if arch.qkv_bias:
            yield f"{role}_bias", (rows,)
    if arch.qk_norm:
        yield from (("query_norm", (arch.head,)), ("key_norm", (arch.head,)))


def _latent_roles(arch: Architecture, latent: Latent) -> Iterator[tuple[str, Shape]]:
    """Yield what latent attention holds."""
    hidden, heads = arch.hidden, arch.heads
    yield "output", (hidden, heads * latent.value)
    if latent.query_rank:
        yield "query_down", (latent.query_rank, hidden)
        yield "query_down_norm", (latent.query_rank,)
        yield "query_up", (heads * arch.head, latent.query_rank)
        if arch.qkv_bias:
            yield "query_down_bias", (latent.query_rank,)
    else:
        yield "query", (heads * arch.head, hidden)
    yield "kv_down", (latent.cached, hidden)
    yield "kv_down_norm", (latent.rank,)
    yield "kv_up", (heads * (latent.nope + latent.value), latent.rank)
    if arch.qkv_bias:
        yield "kv_down_bias", (latent.cached,)


def _dense_roles(arch: Architecture) -> Iterator[tuple[str, Shape]]:
    """Yield what a dense layer's feed-forward part holds."""
    yield from (("gate", (arch.dense_width, arch.hidden)), ("up", (arch.dense_width, arch.hidden)))
    yield "down", (arch.hidden, arch.dense_width)
    if arch.dense_bias:
        yield from (("gate_bias", (arch.dense_width,)), ("up_bias", (arch.dense_width,)))
        yield "down_bias", (arch.hidden,)


def _sparse_roles(arch: Architecture) -> Iterator[tuple[str, Shape]]:
    """Yield what a sparse layer holds beside its experts."""
    moe = arch.moe
    assert moe is not None, "a sparse layer without experts"
    yield "router", (moe.experts, arch.hidden)
    if moe.selection_bias:
        yield "selection_bias", (moe.experts,)
    if moe.shared:
        yield from (("shared_gate", (moe.shared, arch.hidden)), ("shared_up", (moe.shared, arch.hidden)))
        yield "shared_down", (arch.hidden, moe.shared)
    if moe.shared_gate:
        yield "shared_switch", (1, arch.hidden)


def _expert_roles(moe: Moe, hidden: int) -> tuple[tuple[str, Shape], ...]:
    """Return what one expert holds."""
    return (
        ("expert_gate", (moe.width, hidden)), ("expert_up", (moe.width, hidden)), ("expert_down", (hidden, moe.width))
    )


def ignored_tensor(arch: Architecture, name: str) -> str | None:
    """Say why a tensor of the checkpoint is rightly not used, None when it should be (case C48)."""
    if name.endswith("rotary_emb.inv_freq"):
        return "rotary frequencies are computed"
    if arch.tied and name == tensor_name(arch, "head"):
        return "the output head is tied to the embedding"
    start = name.removeprefix("model.layers.")
    number = start.split(".", 1)[0]
    if start != name and number.isdigit() and arch.layers <= int(number) < arch.layers + arch.extra_layers:
        return "layers that predict further tokens are not used"
    return None
