"""The forward pass of one rank, cut at the boundaries where coroutines stop.

`attend` and `feed_forward` are the two modules of a layer (option B of the paper: attention yields, experts combine);
both update hidden rows in place, so what a yielded sequence must keep between them is its rows and nothing else.  Who
calls them, in which micro-batches and how often, is the executor's affair; the model holds weights and no sequence.

A rank holds everything but the routed experts, of which it reads only its own.  Weights that do not fit come from a
ring (`weight_ring`): the modules that own them are then built over the ring's memory for each use, which copies nothing
where the form of the weights allows.  Whoever calls goes through the layers in order and uses each once a sweep (all
micro-batches inside one `attention_of`, one `feed_forward`, one `head`); else weights are read again.

T tokens, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Generic, Protocol, TypeVar

import torch
from torch.nn import functional

from bgmpi.architecture import Architecture, Kind
from bgmpi.attention import Attention, ReadWeight, Rotary, build_attention
from bgmpi.io.model_files import ModelFiles, check_files
from bgmpi.kernels.backend import AttentionPlan, Backend, Experts, Linear
from bgmpi.moe import DenseFeedForward, FeedForward, SparseFeedForward
from bgmpi.tensor_names import tensor_name
from bgmpi.weight_plan import Part, Unit, weight_units
from bgmpi.weight_ring import WeightRing

_REMEMBERED = 64
#: Files begin their tensors at any multiple of 8 bytes.  A matrix whose rows begin inside a cache line of so many bytes
#: costs matrix units up to a quarter of their speed, so one that stays is copied once.
_LINE = 64
_Built = TypeVar("_Built", bound=Callable[..., torch.Tensor])


class Attend(Protocol):
    """The attention of one layer, its weights at hand."""

    def __call__(
        self, hidden: torch.Tensor, positions: torch.Tensor, plan: AttentionPlan, layer_pages: torch.Tensor
    ) -> None:
        """Add attention to hidden [T, D] in place and write the tokens' KV (see `Model.attend`)."""


class Streamed(Generic[_Built]):
    """A module whose weights come from the ring: built for each use, gone behind it."""

    def __init__(
        self, weights: Callable[[], AbstractContextManager[ReadWeight]], build: Callable[[ReadWeight], _Built]
    ) -> None:
        self._weights, self._build = weights, build

    @contextmanager
    def opened(self) -> Iterator[_Built]:
        """Wait for the weights; the module must not be called behind the block."""
        with self._weights() as read:
            yield self._build(read)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Use the module once."""
        with self.opened() as module:
            return module(x)


class StreamedExperts:
    """The experts of one layer, of which some or all come from the ring (see `ExpertSource`)."""

    def __init__(self, ring: WeightRing, units: list[Unit], read: ReadWeight) -> None:
        self._ring, self._units = ring, units
        self._kept = {
            place: (read("expert_gate", "expert_up", expert=unit.expert), read("expert_down", expert=unit.expert))
            for place, unit in enumerate(units) if not ring.streams(unit)
        }

    def take(self, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return gate_up [2 * I, D] and down [D, I] of a local expert."""
        if expert in self._kept:
            return self._kept[expert]
        unit = self._units[expert]
        weights = self._ring.take(unit)
        gate_up, down = unit.groups
        return weights[gate_up], weights[down]

    def give(self, expert: int) -> None:
        """Let the ring read over this expert."""
        if expert not in self._kept:
            self._ring.give(self._units[expert])


class Model:
    """All layers of one model on one rank."""

    def __init__(
        self, arch: Architecture, files: ModelFiles, backend: Backend, dtype: torch.dtype, rank: int, ranks: int,
        allow_nonfinite: bool = False, ring: WeightRing | None = None, beat: Callable[[], None] = lambda: None,
    ) -> None:
        """Read the weights that this rank needs, as `dtype`.  Local: a rank may fail alone, so agree afterwards.

        ring: where the units come from that it streams; None: all weights are read here and stay; beat: is called
        after each tensor.  Raises InputError
        for names or shapes that do not fit (before reading any data) and for NaN or Inf.
        """
        check_files(arch, files)
        self.arch, self.backend, self.dtype, self.layers = arch, backend, dtype, arch.layers
        self.routed = torch.zeros(arch.moe.experts if arch.moe else 0, dtype=torch.int64, device=backend.device)
        self._files, self._allow_nonfinite, self._beat = files, allow_nonfinite, beat
        self._rotary = Rotary(arch.rope, backend.device)
        self._turns: dict[int, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
        self._smalls: dict[tuple[int, tuple[str, ...]], torch.Tensor] = {}
        self._embedding = self._read("embed")
        self._final_norm = self._read("final_norm")
        self._ring, self._ranks = ring, (rank, ranks)
        self._units = self._units_of_layers()
        self._head = self._build_head()
        self._attention_norms = [self._read("attention_norm", layer) for layer in range(arch.layers)]
        self._feed_norms = [self._read("feed_norm", layer) for layer in range(arch.layers)]
        self._attention: list[Attention | Streamed[Attention]] = []
        self._feed: list[FeedForward] = []
        for layer in range(arch.layers):
            self._attention.append(self._build(Part.ATTENTION, layer, partial(build_attention, arch, layer)))
            self._feed.append(self._build_feed(layer))

    # --- building -------------------------------------------------------------------------------------------------

    def _units_of_layers(self) -> Mapping[tuple[Part, int], list[Unit]]:
        found: dict[tuple[Part, int], list[Unit]] = {}
        for unit in weight_units(self.arch, *self._ranks) if self._ring is not None else ():
            found.setdefault((unit.part, unit.layer), []).append(unit)
        return found

    def _build(
        self, part: Part, layer: int, build: Callable[[ReadWeight, Backend], _Built]
    ) -> _Built | Streamed[_Built]:
        """Build a module over weights that stay, or one that comes from the ring."""
        units = self._units.get((part, layer), [])
        if self._ring is None or not any(self._ring.streams(unit) for unit in units):
            return build(partial(self._read_of_layer, layer), self.backend)
        return Streamed(partial(self._streamed, self._ring, units[0]), lambda read: build(read, self.backend))

    def _build_head(self) -> Linear | Streamed[Linear]:
        if self.arch.tied:
            return self.backend.linear(self._embedding)
        return self._build(Part.HEAD, 0, lambda read, backend: backend.linear(read("head")))

    def _build_feed(self, layer: int) -> FeedForward:
        moe = self.arch.moe
        if moe is None or not self.is_collective(layer):
            return self._build(Part.DENSE, layer, partial(DenseFeedForward, bias=self.arch.dense_bias))
        shared = self._build(Part.SHARED, layer, partial(DenseFeedForward, prefix="shared_")) if moe.shared else None
        read = partial(self._read_of_layer, layer)
        return SparseFeedForward(
            moe, read, self.backend, *self._ranks, self.routed, self._streamed_experts(layer, read), shared
        )

    def _streamed_experts(self, layer: int, read: ReadWeight) -> Experts | None:
        """Return the experts of a layer when some of them stream, else None."""
        units = self._units.get((Part.EXPERT, layer), [])
        if self._ring is None or not any(self._ring.streams(unit) for unit in units):
            return None
        return self.backend.experts_in_turn(StreamedExperts(self._ring, units, read), len(units))

    @contextmanager
    def _streamed(self, ring: WeightRing, unit: Unit) -> Iterator[ReadWeight]:
        """Take a unit from the ring; what is not in it, norms and biases, was read before and stays."""
        weights = ring.take(unit)

        def read(*roles: str, expert: int = 0, dtype: torch.dtype | None = None) -> torch.Tensor:
            found = weights.get(roles)
            return self._small(unit.layer, *roles) if found is None else found

        try:
            yield read
        finally:
            ring.give(unit)

    def _small(self, layer: int, *roles: str) -> torch.Tensor:
        if (layer, roles) not in self._smalls:
            self._smalls[layer, roles] = self._read_of_layer(layer, *roles)
        return self._smalls[layer, roles]

    def _read_of_layer(
        self, layer: int, *roles: str, expert: int = 0, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        if len(roles) == 1:
            return self._read(roles[0], layer, expert, dtype)
        return torch.cat([self._stored(role, layer, expert, dtype) for role in roles])

    def _read(
        self, role: str, layer: int = 0, expert: int = 0, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        here = self._stored(role, layer, expert, dtype)
        return here.clone() if here.ndim > 1 and here.data_ptr() % _LINE else here

    def _stored(self, role: str, layer: int, expert: int, dtype: torch.dtype | None) -> torch.Tensor:
        raw = self._files.read(tensor_name(self.arch, role, layer, expert), self._allow_nonfinite)
        self._beat()
        return raw.to(self.backend.device, dtype or self.dtype)

    # --- a sweep --------------------------------------------------------------------------------------------------

    @property
    def streams(self) -> bool:
        """Whether weights pass through a ring, so that every module must be used once in each sweep."""
        return self._ring is not None

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

    @contextmanager
    def attention_of(self, layer: int) -> Iterator[Attend]:
        """Have the attention of `layer` at hand for all micro-batches of a sweep, also for none.  Local.

        What the block gets is called as `attend` without its layer, and not behind the block.
        """
        module = self._attention[layer]
        if not isinstance(module, Streamed):
            yield partial(self._attend, module, layer)
            return
        with module.opened() as built:
            yield partial(self._attend, built, layer)

    def attend(
        self, layer: int, hidden: torch.Tensor, positions: torch.Tensor, plan: AttentionPlan, layer_pages: torch.Tensor
    ) -> None:
        """Add attention of `layer` to hidden [T, D] in place and write the tokens' KV.  Local.

        positions int64 [T]; do not change them in place before the last layer has used them.
        layer_pages [pages, *page_shape].
        """
        with self.attention_of(layer) as attend:
            attend(hidden, positions, plan, layer_pages)

    def _attend(
        self, module: Attention, layer: int, hidden: torch.Tensor, positions: torch.Tensor, plan: AttentionPlan,
        layer_pages: torch.Tensor,
    ) -> None:
        cos, sin = self._turn(layer, positions)
        x = self.backend.rms_norm(hidden, self._attention_norms[layer], self.arch.norm_eps)
        hidden += module(x, cos, sin, plan, layer_pages)

    def feed_forward(self, layer: int, hidden: torch.Tensor) -> None:
        """Add the feed-forward part of `layer` to hidden [T, D] in place.

        Collective over all ranks where `is_collective(layer)`, also with T = 0; else Local.
        """
        hidden += self._feed[layer](self.backend.rms_norm(hidden, self._feed_norms[layer], self.arch.norm_eps))

    @contextmanager
    def head(self) -> Iterator[Callable[[torch.Tensor], torch.Tensor]]:
        """Have the output head at hand for all rows of a step, also for none: as `logits`, in as many parts as the
        caller likes.  Local."""
        if not isinstance(self._head, Streamed):
            yield partial(self._logits, self._head)
            return
        with self._head.opened() as built:
            yield partial(self._logits, built)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Turn hidden [n, D] -> float32 [n, vocab].  Local."""
        with self.head() as logits:
            return logits(hidden)

    def _logits(self, head: Linear, hidden: torch.Tensor) -> torch.Tensor:
        return head(self.backend.rms_norm(hidden, self._final_norm, self.arch.norm_eps)).float()

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
