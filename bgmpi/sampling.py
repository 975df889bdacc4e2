"""The sampler: what each active sequence asks for, and one draw for all of them.

Wishes lie in arrays over slots, so a step draws for B sequences with a fixed number of array operations.  Nothing is
paid for what no row of the batch asks: a batch of plain greedy rows is one pass for the maxima.

Law 7 rests here: a drawn token depends on its row's logits and on (row seed, sample, position), on nothing else, so
draws have no state to save at a YIELD; token counts of penalties are rebuilt from the tokens at `place`.  Logits that
are not numbers are never drawn from: the row gets a fault, its neighbours do not notice.

Order: log-probabilities (of the raw logits, over all ids of the head), edits (bgmpi/logit_edits.py), temperature,
min_p, top_k, top_p.  Ids beyond the tokenizer are never drawn.  Knows nothing of text: stop texts are the
detokeniser's.  Rejected: a generator per sequence, whose state would have to travel with it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum

import numpy as np
import torch
from numpy.typing import NDArray

from bgmpi.errors import InternalError
from bgmpi.keyed_random import uniforms
from bgmpi.logit_edits import LogitEdits
from bgmpi.request import Sampling
from bgmpi.slot_rows import SlotRows
from bgmpi.token_choice import draw_from_all, draw_from_leading, first_maximum, leading, mass_of, whole_lanes

GREEDY_BELOW = 1e-5
_ONE_64 = (1 << 64) - 1


class _Wish(IntEnum):
    """What a slot may ask beyond the plain greedy token; columns of `Sampler._wishes`."""

    DRAW = 0
    FILTER = 1
    EDIT = 2
    LOGPROBS = 3
    STOP_IDS = 4


@dataclass(frozen=True, slots=True)
class Drawn:
    """What one draw gave, in the order of its rows.

    tokens int32 [B]: -1 at a fault.  stopped bool [B]: the token ends the sequence.  stop_token int32 [B]: the row's
    own stop id that it hit, -1 where none or end-of-sequence.  fault bool [B]: the logits held NaN or +Inf, or nothing
    that could be drawn.  If any row of the batch asked for log-probabilities: chosen float32 [B], NaN where not asked;
    top_ids int32 [B, k], top float32 [B, k], k the most that any row asked for, padded with -1 and NaN.
    """

    tokens: NDArray[np.int32]
    stopped: NDArray[np.bool_]
    stop_token: NDArray[np.int32]
    fault: NDArray[np.bool_]
    chosen: NDArray[np.float32] | None = None
    top_ids: NDArray[np.int32] | None = None
    top: NDArray[np.float32] | None = None


class Sampler:
    """Draws tokens for the sequences in `slots` places.

    vocab: ids of the model's head; tokenizer_vocab: ids below it have a text, only they are drawn; eos: all ids that
    end a sequence; device: where logits will lie.
    """

    def __init__(
        self, slots: int, vocab: int, tokenizer_vocab: int, eos: tuple[int, ...], device: torch.device | str
    ) -> None:
        self._vocab = vocab
        self._drawable = min(vocab, tokenizer_vocab)
        self._device = torch.device(device)
        self._eos: NDArray[np.int64] = np.array(eos, np.int64)
        self._edits = LogitEdits(slots, self._drawable, self._eos)
        self._stop_ids = SlotRows(slots, {"id": (np.int64, -1)})
        self._placed: NDArray[np.bool_] = np.zeros(slots, np.bool_)
        self._wishes: NDArray[np.bool_] = np.zeros((slots, len(_Wish)), np.bool_)
        self._wished: NDArray[np.int64] = np.zeros(len(_Wish), np.int64)
        self._seed: NDArray[np.uint64] = np.zeros(slots, np.uint64)
        self._sample: NDArray[np.int64] = np.zeros(slots, np.int64)
        self._temperature: NDArray[np.float32] = np.ones(slots, np.float32)
        self._top_p: NDArray[np.float64] = np.ones(slots, np.float64)
        self._top_k: NDArray[np.int64] = np.zeros(slots, np.int64)
        self._min_p: NDArray[np.float64] = np.zeros(slots, np.float64)
        self._ignore_eos: NDArray[np.bool_] = np.zeros(slots, np.bool_)
        self._logprobs: NDArray[np.int64] = np.zeros(slots, np.int64)

    def place(
        self,
        slot: int,
        sampling: Sampling,
        sample: int,
        prompt: NDArray[np.int32],
        generated: NDArray[np.int32],
    ) -> None:
        """Put a sequence into a free slot.

        prompt, generated: int32 [tokens]; `generated` is not empty when a sequence comes back.  Raises InternalError if
        the slot is taken.
        """
        if self._placed[slot]:
            raise InternalError(f"sampler slot {slot} already holds a sequence; clear it first")
        self._placed[slot] = True
        self._seed[slot] = sampling.seed & _ONE_64
        self._sample[slot] = sample
        self._ignore_eos[slot] = sampling.ignore_eos
        wishes = self._wishes[slot]
        wishes[_Wish.EDIT] = self._edits.place(slot, sampling, prompt, generated)
        if sampling.temperature >= GREEDY_BELOW:
            self._place_filters(slot, sampling)
        if sampling.logprobs is not None:
            wishes[_Wish.LOGPROBS] = True
            self._logprobs[slot] = min(sampling.logprobs, self._drawable)
        if sampling.stop_token_ids:
            wishes[_Wish.STOP_IDS] = True
            self._stop_ids.put(slot, id=np.array(sampling.stop_token_ids, np.int64))
        self._wished += wishes

    def _place_filters(self, slot: int, sampling: Sampling) -> None:
        self._temperature[slot] = sampling.temperature
        self._top_p[slot] = sampling.top_p
        self._min_p[slot] = sampling.min_p
        # As many as there are is no limit; so are 0 and the -1 of some clients.
        self._top_k[slot] = sampling.top_k if 0 < sampling.top_k < self._drawable else 0
        self._wishes[slot, _Wish.DRAW] = True
        self._wishes[slot, _Wish.FILTER] = (
            self._top_k[slot] > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0
        )

    def clear(self, slot: int) -> None:
        """Forget the sequence in `slot`; an empty slot is fine."""
        self._wished -= self._wishes[slot]
        self._wishes[slot] = False
        self._placed[slot] = False
        self._edits.clear(slot)
        self._stop_ids.drop(slot)

    def draw(self, logits: torch.Tensor, slots: NDArray[np.int64], positions: NDArray[np.int64]) -> Drawn:
        """Draw the next token of each row.  Local.

        logits float32 [B, vocab], used as scratch: worthless afterwards.  slots int64 [B], each at most once.
        positions int64 [B]: how many tokens the sequence has generated before this one.
        """
        self._check(logits, slots)
        live = logits[:, : self._drawable]
        largest, choice = first_maximum(live)
        fault = ~self._sound(logits, largest)
        if not self._wished.any():
            return self._finish(choice, fault, slots)
        wishes = self._wishes[slots]
        asked = np.flatnonzero(wishes[:, _Wish.LOGPROBS])
        # Raw, hence before any edit.
        raw = self._logprobs_of(logits, asked) if len(asked) else None
        edited = bool(wishes[:, _Wish.EDIT].any())
        if edited:
            self._edits.apply(live, slots, positions)
            largest, choice = first_maximum(live)
            fault |= ~largest.isfinite()
        if wishes[:, _Wish.DRAW].any():
            self._draw_rows(live, largest, choice, wishes & ~fault.cpu().numpy()[:, None], slots, positions)
        drawn = self._finish(choice, fault, slots)
        if edited:
            good = ~drawn.fault
            self._edits.count(slots[good], drawn.tokens[good])
        return drawn if raw is None else self._with_logprobs(drawn, raw, asked, slots)

    def _finish(self, choice: torch.Tensor, fault: torch.Tensor, slots: NDArray[np.int64]) -> Drawn:
        tokens: NDArray[np.int32] = torch.where(fault, -1, choice).int().cpu().numpy()
        stopped = (tokens[:, None] == self._eos).any(1) & ~self._ignore_eos[slots]
        stop_token = np.full(len(tokens), -1, np.int32)
        if self._wished[_Wish.STOP_IDS]:
            rows = np.flatnonzero(self._stop_ids.has(slots) & ~stopped & (tokens >= 0))
            ids = self._stop_ids.take(slots[rows], "id")
            rows = rows[(ids == tokens[rows, None]).any(1)]
            stop_token[rows] = tokens[rows]
            stopped[rows] = True
        return Drawn(tokens, stopped, stop_token, fault.cpu().numpy())

    def _with_logprobs(
        self, drawn: Drawn, raw: torch.Tensor, asked: NDArray[np.int64], slots: NDArray[np.int64]
    ) -> Drawn:
        """Add the log-probabilities raw [n, W] of rows asked int64 [n]; a fault has none."""
        counts = np.zeros(len(slots), np.int64)
        counts[asked] = self._logprobs[slots[asked]]
        width = int(counts.max())
        counts[drawn.fault] = 0
        chosen = np.full(len(slots), np.nan, np.float32)
        top_ids = np.full((len(slots), width), -1, np.int32)
        top = np.full((len(slots), width), np.nan, np.float32)
        chosen[asked] = self._at(raw, drawn.tokens[asked].clip(min=0))
        chosen[drawn.fault] = np.nan
        top_ids[asked], top[asked] = self._most_likely(raw, width)
        beyond = np.arange(width) >= counts[:, None]
        top_ids[beyond] = -1
        top[beyond] = np.nan
        return replace(drawn, chosen=chosen, top_ids=top_ids, top=top)

    def _check(self, logits: torch.Tensor, slots: NDArray[np.int64]) -> None:
        shape = (len(slots), self._vocab)
        if logits.shape != shape or logits.dtype != torch.float32:
            raise InternalError(
                f"sampler: logits are {tuple(logits.shape)} {logits.dtype}, expected {shape} float32"
            )
        if not self._placed[slots].all():
            empty = slots[~self._placed[slots]].tolist()
            raise InternalError(f"sampler: slots {empty} are drawn for but hold no sequence; place them first")

    def _sound(self, logits: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
        """Say which rows hold no NaN, no +Inf, and anything to draw: largest [B] of the drawable ids -> bool [B]."""
        sound = largest.isfinite()
        if self._drawable < self._vocab:
            sound &= logits[:, self._drawable :].amax(1) < float("inf")
        return sound

    def _draw_rows(
        self,
        live: torch.Tensor,
        largest: torch.Tensor,
        choice: torch.Tensor,
        wishes: NDArray[np.bool_],
        slots: NDArray[np.int64],
        positions: NDArray[np.int64],
    ) -> None:
        """Replace the greedy `choice` of the rows that draw."""
        uniform = uniforms(self._seed[slots], self._sample[slots], positions)
        draws, filters = wishes[:, _Wish.DRAW], wishes[:, _Wish.FILTER]
        for rows, filtered in ((np.flatnonzero(draws & ~filters), False), (np.flatnonzero(draws & filters), True)):
            if not len(rows):
                continue
            at = self._to(rows)
            owner = slots[rows]
            # The maximum goes first, so that no small temperature overflows.
            scores = whole_lanes(live, at).sub_(largest[at, None]).div_(self._to(self._temperature[owner])[:, None])
            number = uniform[rows]
            if filtered:
                asked = self._min_p[owner], self._top_k[owner], self._top_p[owner]
                choice[at] = self._to(draw_from_leading(scores, number, *asked))
            else:
                choice[at] = draw_from_all(scores, self._to(number))

    def prompt_logprobs(
        self, logits: torch.Tensor, targets: NDArray[np.int32], k: int
    ) -> tuple[NDArray[np.float32], NDArray[np.int32], NDArray[np.float32]]:
        """Return the log-probabilities of known next tokens.  Local; rows may come in slices of any size.

        logits float32 [m, vocab], left as they are; targets int32 [m] -> chosen float32 [m], top_ids int32 [m, k], top
        float32 [m, k], most likely first, equal ones by id, padded with -1 and NaN where fewer than k are possible.
        k above the drawable ids is cut to them.  Rows with NaN or +Inf have NaN throughout.
        """
        rows = np.arange(len(targets))
        logprobs = self._logprobs_of(logits, rows)
        top_ids, top = self._most_likely(logprobs, min(k, self._drawable))
        return self._at(logprobs, targets), top_ids, top

    def _logprobs_of(self, logits: torch.Tensor, rows: NDArray[np.int64]) -> torch.Tensor:
        """Return the log-probabilities of rows int64 [n] of logits [*, vocab], float32 [n, W]."""
        scores = whole_lanes(logits, self._to(rows))
        scores.sub_(scores.amax(1, keepdim=True))
        return scores.sub_(mass_of(scores).log().float()[:, None])

    def _at(self, logprobs: torch.Tensor, tokens: NDArray[np.int32]) -> NDArray[np.float32]:
        """Return the log-probabilities float32 [n] of tokens int32 [n] in logprobs [n, W]."""
        chosen = logprobs.gather(1, self._to(tokens.astype(np.int64))[:, None])
        values: NDArray[np.float32] = chosen.squeeze(1).cpu().numpy()
        return values

    def _most_likely(
        self, logprobs: torch.Tensor, k: int
    ) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Return the k most likely drawable ids int32 [n, k] and their log-probabilities, padded with -1 and NaN."""
        count = len(logprobs)
        top_ids = np.full((count, k), -1, np.int32)
        top = np.full((count, k), np.nan, np.float32)
        if not k or not count:
            return top_ids, top
        if self._drawable < self._vocab:
            logprobs = whole_lanes(logprobs[:, : self._drawable], torch.arange(count, device=self._device))
        values, ids = leading(logprobs, np.full(count, k), np.full(count, -np.inf, np.float32))
        found = min(k, values.shape[1])
        top_ids[:, :found] = ids[:, :found]
        top[:, :found] = values[:, :found]
        top[top_ids < 0] = np.nan
        return top_ids, top

    def _to(self, array: NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)
