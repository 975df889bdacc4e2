"""Runs a Model over paged KV as an executor would: in chunks, over several sequences, pages in no order."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from bgmpi.architecture import Architecture
from bgmpi.families import read_architecture
from bgmpi.io.model_files import ModelFiles, open_model_files
from bgmpi.kernels import open_backend
from bgmpi.model import Model


def open_model(
    folder, dtype: torch.dtype = torch.float32, rank: int = 0, ranks: int = 1, deterministic: bool = False
) -> Model:
    """Open a checkpoint on the CPU with one thread."""
    files: ModelFiles = open_model_files(folder)
    arch: Architecture = read_architecture(files.config)
    return Model(arch, files, open_backend("cpu", None, 1, deterministic), dtype, rank, ranks)


def random_ids(tokens: int, vocab: int = 512, seed: int = 0) -> torch.Tensor:
    """Draw token ids, int64 [tokens]."""
    return torch.randint(3, vocab, (tokens,), generator=torch.Generator().manual_seed(seed))


class PagedRun:
    """Sequences with their KV in scattered pages; `step` feeds each some tokens and answers with all their logits."""

    def __init__(self, model: Model, sequences: int, longest: int, page_tokens: int = 4) -> None:
        self.model, self.page_tokens = model, page_tokens
        each = -(-longest // page_tokens)
        pages = np.random.default_rng(0).permutation(sequences * each).astype(np.int32)
        self.pages = pages.reshape(sequences, each)
        self.before = np.zeros(sequences, np.int32)
        shape = model.page_shape(page_tokens)
        self.pools = [torch.full((pages.size, *shape), 7.0, dtype=model.dtype) for _ in range(model.layers)]

    def step(self, tokens: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Feed tokens[s] int64 [t_s] -> logits float32 [t_s, vocab] of each sequence."""
        counts = [len(part) for part in tokens]
        first = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        positions = torch.cat(
            [torch.arange(before, before + count) for before, count in zip(self.before.tolist(), counts, strict=True)]
        )
        used = -(-(self.before + counts) // self.page_tokens)
        held = np.where(np.arange(self.pages.shape[1]) < used[:, None], self.pages, -1).astype(np.int32)
        plan = self.model.backend.plan_attention(first, self.before.copy(), held, self.page_tokens)
        hidden = self.model.embed(torch.cat(list(tokens)))
        for layer in range(self.model.layers):
            self.model.attend(layer, hidden, positions, plan, self.pools[layer])
            self.model.feed_forward(layer, hidden)
        self.before += np.asarray(counts, np.int32)
        return list(self.model.logits(hidden).split(counts))


def logits_of(model: Model, ids: torch.Tensor, chunks: Sequence[int] = (), page_tokens: int = 4) -> torch.Tensor:
    """Return the logits of one sequence fed in `chunks` (one chunk when empty), float32 [T, vocab]."""
    run = PagedRun(model, 1, len(ids), page_tokens)
    return torch.cat([run.step([part])[0] for part in ids.split(list(chunks) or [len(ids)])])


def reference_logits(reference, ids: torch.Tensor) -> torch.Tensor:
    """Return what transformers' model answers for one sequence, float32 [T, vocab]."""
    with torch.no_grad():
        return reference(ids[None]).logits[0]
