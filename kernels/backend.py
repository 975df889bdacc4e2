"""THE seam: everything the model asks of a device, in about a dozen calls.

Above this file the names of devices and kernel compilers do not occur; below it nothing is known of sequences, rounds
or files.  A backend is chosen once, in `bgmpi.kernels.open_backend`.

Legend: T tokens, S sequences, H query heads, G key-value heads, W head width, D hidden, E experts of this rank,
A experts a token activates, I expert width, P pages in the pool, R ranks.  A page holds `page_tokens` tokens.

Copies are asynchronous: `copy` answers with a receipt, and neither side may be touched before `Receipt.wait`.  A
backend that completes at once returns a receipt that is already done.

KV pages of one layer, the layout that every tier (device, host, disk, window) shares:
  grouped-query attention  [P, 2, G, page_tokens, W]   keys, then values
  latent attention (MLA)   [P, page_tokens, L]         compressed KV, then the rotated key part
so one page of one layer is always one contiguous piece of bytes.  Calls on the pages of one layer also take a view of
a wider whole (one layer of all layers' pages, some key-value heads): every step but a page's last two may be any.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray


class Receipt(Protocol):
    """Proof of an asynchronous copy."""

    def done(self) -> bool:
        """Say whether the copy has ended.  Local, never blocks."""

    def wait(self) -> None:
        """Return once the copy has ended.  Local."""


class Linear(Protocol):
    """A weight prepared for this device."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, K] -> x @ weight.T + bias, [T, N], in x's dtype."""

    def rows(self, start: int, stop: int) -> Linear:
        """Return the weight's output rows [start, stop), maybe none, as a Linear of their own.

        It answers the same bits in its columns as the whole would, and shares the weight where its form allows.
        """


class HeadLinear(Protocol):
    """One weight a head, prepared for this device."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, H, K] -> x[:, h] @ weight[h].T of every head, [T, H, N], in x's dtype."""

    def heads(self, start: int, stop: int) -> HeadLinear:
        """Return the weights of heads [start, stop), as views."""


class Experts(Protocol):
    """The gated feed-forward experts that this rank owns, prepared for this device (E may be 0)."""

    def __call__(self, x: torch.Tensor, expert: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Run each token through its local experts and sum: x [T, D], expert int32 [T, A] (local number, -1 = not
        here), weight float32 [T, A] -> [T, D] in x's dtype, zero rows for tokens without a local expert.

        T may be 0.
        """


class ExpertSource(Protocol):
    """Where the weights of routed experts come from that do not stay in memory."""

    def take(self, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return gate_up [2 * I, D] (gate rows first) and down [D, I] of a local expert, there until `give`."""

    def give(self, expert: int) -> None:
        """Say that nothing reads the weights of this expert any more."""


class AttentionPlan(Protocol):
    """Which tokens of which sequences one micro-batch holds, uploaded once and used by every layer."""

    tokens: int
    sequences: int


class Exchanged(Protocol):
    """The tokens that came to this rank in one exchange, and the way back for their results.

    x [N, D], expert int32 [N, A] (local number, -1 = not here), weight float32 [N, A].
    """

    x: torch.Tensor
    expert: torch.Tensor
    weight: torch.Tensor


class Collective(Protocol):
    """What a backend needs of the world to move bytes between ranks; `bgmpi.world` provides it."""

    rank: int
    size: int

    def all_to_all_counts(self, counts: NDArray[np.int64]) -> NDArray[np.int64]:
        """Collective.  counts int64 [R], what I send to each rank -> int64 [R], what each sends to me."""

    def all_to_all_bytes(
        self, send: NDArray[np.uint8], send_counts: NDArray[np.int64], receive: NDArray[np.uint8],
        receive_counts: NDArray[np.int64],
    ) -> None:
        """Collective.  Flat byte buffers, counts in bytes, ranks' pieces in rank order without gaps."""


class Group(Protocol):
    """Ranks [first, first + size) of the world that compute one model together; `bgmpi.world` provides it.

    `rank` is this rank's number in the group.
    """

    first: int
    rank: int
    size: int

    def all_gather_bytes(
        self, send: NDArray[np.uint8], counts: NDArray[np.int64], receive: NDArray[np.uint8]
    ) -> None:
        """Collective over the group.  Gather everybody's flat bytes on every member, in the members' order without
        gaps; counts int64 [size], what each member sends."""

    def broadcast_bytes(self, buffer: NDArray[np.uint8], root: int) -> None:
        """Collective over the group.  Fill every member's flat buffer with member `root`'s; equally long everywhere."""


class Backend(Protocol):
    """One device of one rank.

    deterministic: every call gives a row the same bits whatever other rows share the call or wait on other ranks, and
    however many ranks and threads there are; chosen when the backend is opened.  Else so only where a call says it.
    """

    name: str
    device: torch.device
    deterministic: bool

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return uninitialised device memory."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> Receipt:
        """Begin copying `source` into `target` (same shape and dtype, either may be host memory)."""

    def copy_pages(
        self, target: torch.Tensor, target_pages: NDArray[np.int64], source: torch.Tensor,
        source_pages: NDArray[np.int64],
    ) -> Receipt:  # fmt: skip
        """Begin copying page source_pages[i] of source [Q, *page] to page target_pages[i] of target [P, *page], int64
        [k] each.  Either may be host memory and strided between pages; a page is contiguous.  Target pages are
        distinct, and none is copied from."""

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None, *, steady: bool = False) -> Linear:
        """Prepare weight [N, K] and bias [N]; the argument is not kept when the prepared form replaces it.

        steady: a row's numbers depend on that row alone, as all do that a deterministic backend computes."""

    def head_linear(self, weight: torch.Tensor) -> HeadLinear:
        """Prepare weight [H, N, K], of which head h has its own."""

    def experts(self, gate_up: list[torch.Tensor], down: list[torch.Tensor]) -> Experts:
        """Prepare E experts: gate_up [2 * I, D] each (gate rows first), down [D, I] each; activation SiLU."""

    def experts_in_turn(self, source: ExpertSource, count: int) -> Experts:
        """Prepare `count` experts whose weights come one after another: every call takes and gives back each of
        0 .. count - 1 in order, also without tokens.  Results are those of `experts`."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x [..., D] -> normalised in float32, scaled, in x's dtype."""

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """gate_up [T, 2 * I] -> silu(gate) * up, [T, I]."""

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Rotate x [T, heads, W] in place in its first 2 * r columns and return it; the halves convention of Hugging
        Face (column i pairs with i + r).  cos, sin float32 [T, r]."""

    def plan_attention(
        self, first: NDArray[np.int32], kv_before: NDArray[np.int32], pages: NDArray[np.int32], page_tokens: int
    ) -> AttentionPlan:
        """Prepare a micro-batch.  first int32 [S + 1]: token offsets of the sequences; kv_before int32 [S]: tokens
        already in the cache; pages int32 [S, widest]: page numbers, -1 behind the last.  Sequences whose rows begin
        with the same numbers share those pages; as far as they lie before all new tokens, a device may attend to them
        once for all, unless deterministic.  No page that a new token goes into may be shared."""

    def append(
        self, key: torch.Tensor, value: torch.Tensor, layer_pages: torch.Tensor, plan: AttentionPlan
    ) -> None:
        """Write key, value [T, G, W] of the new tokens into their places."""

    def append_latent(self, latent: torch.Tensor, layer_pages: torch.Tensor, plan: AttentionPlan) -> None:
        """Write latent [T, L] of the new tokens into their places."""

    def attend(
        self, query: torch.Tensor, layer_pages: torch.Tensor, plan: AttentionPlan, scale: float, window: int
    ) -> torch.Tensor:
        """Causal attention of query [T, H, W] over each sequence's pages (its new tokens included) -> [T, H, W].
        `window` > 0: each token sees the last `window` tokens including itself; 0: all."""

    def attend_latent(
        self, query: torch.Tensor, layer_pages: torch.Tensor, plan: AttentionPlan, scale: float, value_width: int
    ) -> torch.Tensor:
        """Causal attention of query [T, H, L] over latent pages; the values are the first `value_width` columns ->
        [T, H, value_width]."""

    def exchange(self, x: torch.Tensor, expert: torch.Tensor, weight: torch.Tensor, owner: torch.Tensor,
                 local: torch.Tensor) -> Exchanged:
        """Collective over the expert ranks, also with T = 0.  Send each token once to every rank that owns one of its
        experts.  x [T, D], expert int32 [T, A] (global numbers), weight float32 [T, A]; owner, local int32 [experts]:
        rank and local number of every expert."""

    def give_back(self, exchanged: Exchanged, y: torch.Tensor) -> torch.Tensor:
        """Collective over the expert ranks.  Send y [N, D] back; -> [T, D], each token's parts summed in rank order
        in float32; deterministic: those of its experts, in ascending number."""

    def gather_columns(self, part: torch.Tensor, group: Group, widths: tuple[int, ...]) -> torch.Tensor:
        """Collective over the group, but for T = 0.  part [T, n], this member's columns; widths: every member's n ->
        [T, sum of widths], the members' columns beside one another."""

    def spread(self, rows: torch.Tensor, group: Group, root: int) -> None:
        """Collective over the group, unless empty.  Overwrite contiguous rows with those of member `root`."""
