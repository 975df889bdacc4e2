"""Under `--deterministic` a row's bits depend on that row alone: every operator, every family, all number formats.

Each operator gets some rows one by one and then the same rows at the head, in the middle and at the end of batches of
many sizes; every bit must be the same.  What torch itself computes for a row (softmax, exponentials, sums) is held to
the same law here, because the model relies on it.  Whole models are fed at once, in chunks, and beside others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import checkpoints
import numpy as np
import pytest
import torch
from paged_forward import PagedRun, open_model, random_ids
from sharded_forward import ThreadGroup, on_threads

from bgmpi.architecture import Moe, Rope, RopeKind, Scoring
from bgmpi.attention import Rotary
from bgmpi.kernels.cpu import CpuBackend
from bgmpi.moe import Router, SparseFeedForward, sigmoid
from bgmpi.sampling import Sampler

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZES = (1, 2, 3, 5, 8, 17, 31, 33, 64, 100, 131)
ROWS = 140
HIDDEN, INNER, EXPERTS = 96, 40, 12
Call = Callable[[torch.Tensor], torch.Tensor]


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.3).to(dtype)


def hold(call: Call) -> None:
    """Raise AssertionError unless the rows whose numbers `call` takes get the same bits in any company."""
    alone = torch.cat([call(torch.tensor([row])) for row in range(ROWS)])
    for size in SIZES:
        for begin in (0, 3, ROWS - size):
            together = call(torch.arange(begin, begin + size) % ROWS)
            wanted = alone[torch.arange(begin, begin + size) % ROWS]
            wrong = (together != wanted).flatten(1).any(1).nonzero().flatten().tolist()
            assert not wrong, f"{size} rows from {begin} on: rows {wrong} of them have other bits than alone"


def operators(backend: CpuBackend, dtype: torch.dtype) -> dict[str, Call]:
    """Return operators as functions of row numbers."""
    x, wide = noise(ROWS, HIDDEN, dtype=dtype), noise(ROWS, 700, dtype=dtype)
    heads = noise(ROWS, 6, 40, dtype=dtype)
    gate_up = [noise(2 * INNER, HIDDEN, seed=e, dtype=dtype) for e in range(EXPERTS)]
    down = [noise(HIDDEN, INNER, seed=50 + e, dtype=dtype) for e in range(EXPERTS)]
    chosen = torch.stack([torch.randperm(EXPERTS, generator=torch.Generator().manual_seed(r)) for r in range(ROWS)])
    expert, share = chosen[:, :3].int().contiguous(), noise(ROWS, 3, seed=9).abs()
    few = expert.clone()
    few[:, 0] = 2  # one expert with many tokens
    linear = backend.linear(noise(130, HIDDEN, dtype=dtype), noise(130, dtype=dtype))
    deep = backend.linear(noise(33, 700, dtype=dtype))
    of_heads = backend.head_linear(noise(6, 24, 32, dtype=dtype))
    experts = backend.experts(gate_up, down)
    norm, switch = noise(HIDDEN, dtype=dtype), backend.linear(noise(1, HIDDEN, dtype=dtype))
    cos, sin = noise(ROWS, 8, seed=3), noise(ROWS, 8, seed=4)
    return {
        "linear": lambda rows: linear(x[rows]),
        "rows of a linear": lambda rows: linear.rows(17, 90)(x[rows]),
        "deep linear": lambda rows: deep(wide[rows]),
        "linear of heads": lambda rows: of_heads(heads[rows][..., 8:]),
        "experts": lambda rows: experts(x[rows], expert[rows], share[rows]),
        "a busy expert": lambda rows: experts(x[rows], few[rows], share[rows]),
        "norm": lambda rows: backend.rms_norm(x[rows], norm, 1e-6),
        "gate": lambda rows: backend.silu_mul(x[rows]),
        "rotation": lambda rows: backend.rotate(heads[rows], cos[rows], sin[rows]),
        "switch": lambda rows: sigmoid(switch(x[rows]).float()).to(dtype),
    }


def routers(backend: CpuBackend) -> dict[str, Call]:
    """Return the weights of chosen experts, and their numbers behind them, as functions of row numbers."""
    kinds = {
        "sigmoid": Moe(60, 5, 16, Scoring.SIGMOID, True, 4, 2, scaling=2.5),
        "softmax": Moe(60, 5, 16), "normalised softmax": Moe(60, 5, 16, normalise=True),
    }
    x, found = noise(ROWS, HIDDEN, seed=6), {}
    for name, moe in kinds.items():
        router = Router(moe, noise(60, HIDDEN, seed=7), None, backend)
        found[name] = lambda rows, router=router: torch.cat([*router(x[rows])[::-1]], 1)
    return found


def logprobs(backend: CpuBackend) -> dict[str, Call]:
    """Return what the sampler makes of logits, as a function of row numbers."""
    logits, found = noise(ROWS, 2500, seed=8) * 20, {}
    sampler = Sampler(1, 2500, 2400, (), "cpu")

    def of(rows: torch.Tensor) -> torch.Tensor:
        chosen, _, top = sampler.prompt_logprobs(logits[rows], (rows.numpy() * 7 % 2400).astype(np.int32), 4)
        return torch.from_numpy(np.column_stack([chosen, top]))

    found["log-probabilities"] = of
    return found


@pytest.mark.parametrize(("dtype", "panels"), [*((dtype, True) for dtype in DTYPES), (torch.bfloat16, False)])
def test_every_operator_gives_a_row_the_same_bits_in_any_company(dtype: torch.dtype, panels: bool) -> None:
    backend = CpuBackend(None, 1, deterministic=True, panels=panels)
    for name, call in (operators(backend, dtype) | routers(backend) | logprobs(backend)).items():
        try:
            hold(call)
        except AssertionError as error:
            raise AssertionError(f"{name}, {dtype}: {error}") from None


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_number_of_threads_changes_no_bit(dtype: torch.dtype) -> None:
    rows = torch.arange(ROWS)
    try:
        results = [
            {name: call(rows) for name, call in (operators(backend, dtype) | logprobs(backend)).items()}
            for backend in (CpuBackend(None, threads, deterministic=True) for threads in (1, 2, 3))
        ]
    finally:
        torch.set_num_threads(1)
    for name, wanted in results[0].items():
        assert all(torch.equal(other[name], wanted) for other in results[1:]), name


def test_angles_do_not_depend_on_how_far_their_table_reaches() -> None:
    rope = Rope(RopeKind.DEFAULT, 10000.0, 24)
    short, long = Rotary(rope, torch.device("cpu")), Rotary(rope, torch.device("cpu"))
    far = torch.tensor([5000])
    long(far)
    for near in (torch.arange(1000), torch.tensor([7])):
        assert all(torch.equal(a, b) for a, b in zip(short(near), long(near), strict=True))


#: Query heads, key heads (0: latent), width, window.
ATTENTION = [(8, 2, 32, 0), (4, 4, 16, 0), (6, 1, 40, 90), (12, 2, 24, 7), (4, 0, 40, 0), (20, 0, 72, 0)]
LENGTH = 560


def attend(
    heads: int, groups: int, width: int, window: int, dtype: torch.dtype, page_tokens: int, chunks: Sequence[int],
    sequences: int = 1,
) -> torch.Tensor:
    """Compute a sequence of LENGTH tokens in chunks, beside others that go along -> [LENGTH, heads, width]."""
    backend = CpuBackend(None, 1, deterministic=True)
    each = -(-LENGTH // page_tokens)
    pages = np.random.default_rng(page_tokens).permutation(sequences * each).astype(np.int32).reshape(sequences, each)
    query, key, value = (noise(sequences, LENGTH, n, width, seed=n, dtype=dtype) for n in (heads, groups or 1, 99))
    if sequences > 1:
        alone = [noise(1, LENGTH, n, width, seed=n, dtype=dtype) for n in (heads, groups or 1, 99)]
        query[0], key[0], value[0] = (one[0] for one in alone)
    shape = (pages.size, 2, groups, page_tokens, width) if groups else (pages.size, page_tokens, width)
    pool, done, results = torch.full(shape, torch.nan, dtype=dtype), 0, []
    for count in [*chunks, LENGTH - sum(chunks)]:
        now = slice(done, done + count)
        held = np.where(np.arange(each) < -(-(done + count) // page_tokens), pages, -1).astype(np.int32)
        first, before = np.arange(sequences + 1, dtype=np.int32) * count, np.full(sequences, done, np.int32)
        plan = backend.plan_attention(first, before, held, page_tokens)
        rows, keys, values = (part[:, now].flatten(0, 1) for part in (query, key, value))
        if groups:
            backend.append(keys, values[:, :groups], pool, plan)
            result = backend.attend(rows, pool, plan, width**-0.5, window)
        else:
            backend.append_latent(keys[:, 0], pool, plan)
            result = backend.attend_latent(rows, pool, plan, width**-0.5, width - 8)
        results.append(result[:count])
        done += count
    return torch.cat(results)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "groups", "width", "window"), ATTENTION)
def test_attention_does_not_depend_on_chunks_neighbours_or_page_size(
    heads: int, groups: int, width: int, window: int, dtype: torch.dtype
) -> None:
    kind = heads, groups, width, window, dtype
    token_by_token = attend(*kind, 64, [1] * (LENGTH - 1))
    for page_tokens, chunks, sequences in (
        (64, [], 1), (64, [1] * 20 + [5, 17, 64, 100, 1], 1), (64, [9] * 60, 3), (4, [100] * 5, 2), (48, [33] * 16, 1),
        (256, [511, 1, 1], 2),
    ):
        got = attend(*kind, page_tokens, chunks, sequences)
        assert torch.equal(got, token_by_token), f"pages of {page_tokens}, {len(chunks)} chunks, {sequences} sequences"


#: New tokens of each of some sequences behind a prefix: decode, prefill, both.
HIT_OR_MISS = {"decode": [1, 1, 1, 2], "prefill": [70, 33, 5, 120], "both": [1, 64, 3, 1]}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", HIT_OR_MISS)
@pytest.mark.parametrize(("heads", "groups", "width"), [(8, 2, 32), (4, 4, 16), (20, 0, 72)])
def test_a_prefix_on_shared_pages_gives_the_bits_of_private_ones_and_of_the_whole_prompt(
    heads: int, groups: int, width: int, name: str, dtype: torch.dtype
) -> None:
    backend, page_tokens, prefix, new = CpuBackend(None, 1, deterministic=True), 16, 35, HIT_OR_MISS[name]
    before, each = prefix * page_tokens, prefix + 8
    private = np.random.default_rng(1).permutation(4 * each).astype(np.int32).reshape(4, each)
    shared = private.copy()
    shared[:, :prefix] = private[2, :prefix]
    pool = noise(4 * each, *((2, groups, page_tokens, width) if groups else (page_tokens, width)), dtype=dtype)
    pool[private[:, :prefix].astype(np.int64)] = pool[private[2, :prefix].astype(np.int64)]

    def attend_to(table: np.ndarray, chosen: list[int], cached: int) -> torch.Tensor:
        """Attend from `cached` on; what is computed again in front of the new tokens is left out of the result."""
        counts = [before - cached + new[s] for s in chosen]
        plan = backend.plan_attention(
            np.concatenate([[0], np.cumsum(counts)]).astype(np.int32), np.full(len(chosen), cached, np.int32),
            table[chosen], page_tokens,
        )
        rows = torch.cat([noise(before + new[s], heads, width, seed=s, dtype=dtype)[cached:] for s in chosen])
        result = (backend.attend(rows, pool, plan, width**-0.5, 0) if groups
                  else backend.attend_latent(rows, pool, plan, width**-0.5, width - 8))
        return torch.cat([part[before - cached :] for part in result.split(counts)])

    hit = attend_to(shared, [0, 1, 2, 3], before)
    assert torch.equal(hit, attend_to(private, [0, 1, 2, 3], before)), "private copies of the same pages"
    assert torch.equal(hit, attend_to(private, [0, 1, 2, 3], 0)), "all prompts computed from their begin"
    alone = torch.cat([attend_to(shared, [s], before) for s in range(4)])
    assert torch.equal(hit, alone), "one sequence after another"


def sparse(dtype: torch.dtype, backend: CpuBackend, rank: int, ranks: int) -> SparseFeedForward:
    """Build a sparse layer with a switched shared expert, as one rank of all."""
    moe = Moe(EXPERTS, 4, INNER, normalise=True, shared=INNER, shared_gate=True)
    shapes = {
        "router": (EXPERTS, HIDDEN), "expert_gate": (INNER, HIDDEN), "expert_up": (INNER, HIDDEN),
        "expert_down": (HIDDEN, INNER), "shared_gate": (INNER, HIDDEN), "shared_up": (INNER, HIDDEN),
        "shared_down": (HIDDEN, INNER), "shared_switch": (1, HIDDEN),
    }

    def read(*roles: str, expert: int = 0, dtype: torch.dtype = dtype) -> torch.Tensor:
        parts = [noise(*shapes[role], seed=100 * expert + list(shapes).index(role), dtype=dtype) for role in roles]
        return torch.cat(parts)

    return SparseFeedForward(moe, read, backend, rank, ranks, torch.zeros(EXPERTS, dtype=torch.int64))


@pytest.mark.parametrize("ranks", [2, 3, 5])
@pytest.mark.parametrize("dtype", DTYPES)
def test_experts_on_many_ranks_answer_the_bits_of_one_rank(dtype: torch.dtype, ranks: int) -> None:
    x = noise(61, HIDDEN, seed=1, dtype=dtype)
    whole = sparse(dtype, CpuBackend(None, 1, deterministic=True), 0, 1)(x)

    def one(group: ThreadGroup) -> torch.Tensor:
        layer = sparse(dtype, CpuBackend(group, 1, deterministic=True), group.rank, ranks)
        mine = x[:0] if group.rank == ranks - 1 else x[group.rank :: ranks - 1]  # the last brings nothing
        return layer(mine)

    for rank, part in enumerate(on_threads(ranks, one)[:-1]):
        assert torch.equal(part, whole[rank :: ranks - 1])


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("deterministic")
    return {family: checkpoints.make(family, root / family) for family in checkpoints.FAMILIES}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", checkpoints.FAMILIES)
def test_a_model_gives_a_sequence_the_same_bits_however_it_is_fed(
    folders: dict[str, Path], family: str, dtype: torch.dtype
) -> None:
    model = open_model(folders[family], dtype, deterministic=True)
    ids, others = random_ids(90), [random_ids(90, seed=seed) for seed in (1, 2)]
    run = PagedRun(model, 1, 90, 64)
    token_by_token = torch.cat([run.step([part])[0] for part in ids.split(1)])
    for chunks, page_tokens in (([90], 64), ([3, 40, 1, 46], 4), ([33, 32, 25], 16)):
        run = PagedRun(model, 3, 90, page_tokens)
        fed = [[ids, *others][sequence].split(chunks) for sequence in range(3)]
        # The others follow one chunk behind, so that prefill and decode of different lengths share a batch.
        nothing = ids[:0]
        steps = [
            [fed[0][k] if k < len(chunks) else nothing, *(part[k - 1] if k else nothing for part in fed[1:])]
            for k in range(len(chunks) + 1)
        ]
        got = torch.cat([run.step(step)[0] for step in steps])
        assert torch.equal(got, token_by_token), f"chunks {chunks}, pages of {page_tokens}"
