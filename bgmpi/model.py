"""The forward pass of one rank, cut at the boundaries where coroutines stop.

`attend` and `feed_forward` are the two modules of a layer (option B of the paper: attention yields, experts combine);
both update hidden rows in place, so what a yielded sequence must keep between them is its rows and nothing else.  Who
calls them, in which micro-batches and how often, is the executor's affair; the model holds weights and no sequence.

A rank holds everything but the routed experts, of which it reads only its own.  T tokens, D hidden.
"""

from __future__ import annotations

from functools import partial

import torch
from torch.nn import functional

from bgmpi.architecture import Architecture, Kind
from bgmpi.attention import ReadWeight, Rotary, build_attention
from bgmpi.io.model_files import ModelFiles, check_files
from bgmpi.kernels.backend import AttentionPlan, Backend
from bgmpi.moe import DenseFeedForward, SparseFeedForward
from bgmpi.tensor_names import tensor_name

_REMEMBERED = 64


class Model:
    """All layers of one model on one rank."""

    def __init__(
        self, arch: Architecture, files: ModelFiles, backend: Backend, dtype: torch.dtype, rank: int, ranks: int,
        allow_nonfinite: bool = False,
    ) -> None:
        """Read the weights that this rank needs, as `dtype`.  Local: a rank may fail alone, so agree afterwards.

        Raises InputError for names or shapes that do not fit (before reading any data) and for NaN or Inf.
        """
        check_files(arch, files)
        self.arch, self.backend, self.dtype, self.layers = arch, backend, dtype, arch.layers
        self.routed = torch.zeros(arch.moe.experts if arch.moe else 0, dtype=torch.int64, device=backend.device)
        self._files, self._allow_nonfinite = files, allow_nonfinite
        self._rotary = Rotary(arch.rope, backend.device)
        self._turns: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
        self._embedding = self._read("embed")
        self._final_norm = self._read("final_norm")
        self._head = backend.linear(self._embedding if arch.tied else self._read("head"))
        self._attention_norms = [self._read("attention_norm", layer) for layer in range(arch.layers)]
        self._feed_norms = [self._read("feed_norm", layer) for layer in range(arch.layers)]
        self._attention, self._feed = [], []
        for layer, kind in enumerate(arch.kinds):
            read: ReadWeight = partial(self._read_of_layer, layer)
            self._attention.append(build_attention(arch, layer, read, backend))
            self._feed.append(self._build_feed(kind, read, rank, ranks))

    def _build_feed(self, kind: Kind, read: ReadWeight, rank: int, ranks: int) -> DenseFeedForward | SparseFeedForward:
        moe = self.arch.moe
        if kind is Kind.SPARSE and moe is not None:
            return SparseFeedForward(moe, read, self.backend, rank, ranks, self.routed)
        return DenseFeedForward(read, self.backend, bias=self.arch.dense_bias)

    def _read_of_layer(self, layer: int, role: str, expert: int = 0, dtype: torch.dtype | None = None) -> torch.Tensor:
        return self._read(role, layer, expert, dtype)

    def _read(
        self, role: str, layer: int = 0, expert: int = 0, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        raw = self._files.read(tensor_name(self.arch, role, layer, expert), self._allow_nonfinite)
        return raw.to(self.backend.device, dtype or self.dtype)

    def is_collective(self, layer: int) -> bool:
        """Say whether `feed_forward` of this layer exchanges tokens: its layer is sparse."""
        return self.arch.kinds[layer] is Kind.SPARSE

    def page_shape(self, page_tokens: int) -> tuple[int, ...]:
        """Return the shape of one page of one layer, in `dtype` (see kernels/backend.py)."""
        if self.arch.latent:
            return page_tokens, self.arch.latent.cached
        return 2, self.arch.kv_heads, page_tokens, self.arch.head

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Look up ids int64 [T] -> hidden [T, D].  Local."""
        return functional.embedding(ids, self._embedding)

    def attend(
        self, layer: int, hidden: torch.Tensor, positions: torch.Tensor, plan: AttentionPlan, layer_pages: torch.Tensor
    ) -> None:
        """Add attention of `layer` to hidden [T, D] in place and write the tokens' KV.  Local.

        positions int64 [T]; do not change them in place before the last layer has used them.
        layer_pages [pages, *page_shape].
        """
        cos, sin = self._turn(layer, positions)
        x = self.backend.rms_norm(hidden, self._attention_norms[layer], self.arch.norm_eps)
        hidden += self._attention[layer](x, cos, sin, plan, layer_pages)

    def feed_forward(self, layer: int, hidden: torch.Tensor) -> None:
        """Add the feed-forward part of `layer` to hidden [T, D] in place.

        Collective over all ranks where `is_collective(layer)`, also with T = 0; else Local.
        """
        hidden += self._feed[layer](self.backend.rms_norm(hidden, self._feed_norms[layer], self.arch.norm_eps))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Turn hidden [n, D] -> float32 [n, vocab].  Local."""
        return self._head(self.backend.rms_norm(hidden, self._final_norm, self.arch.norm_eps)).float()

    def _turn(self, layer: int, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosine and sine of the positions, looked up once a micro-batch.

        The first layer always looks up anew, so a caller may reuse its tensor from step to step.  Remembered entries
        hold their positions, so that no other tensor can take the same identity.
        """
        found = self._turns.get(id(positions)) if layer else None
        if found is None:
            if len(self._turns) >= _REMEMBERED:
                self._turns.clear()
            found = (positions, *self._rotary(positions))
            self._turns[id(positions)] = found
        return found[1], found[2]
