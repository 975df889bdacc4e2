"""All prompts become token ids before the first round, spread over the ranks, so that what they share is known ahead.

Rank 0 deals out small pieces of its index; each rank that can open the input reads and tokenises its rows and hands the
ids back, a few MB a round from all together, so no rank holds more.  While the others are at work rank 0 puts away what
came last, on disk (`PromptStore`) and as hashes (`PrefixTreeBuilder`), and reads a piece of its own.  A rank whose node
lacks the input, or has another tokenizer, takes no part.

A row that is refused here leaves nothing behind; it becomes an error row when its turn comes.  Who was asked to stop is
heard at the end of each piece, as in other stages before the first step.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import get_args

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from bgmpi.errors import InputError, InternalError, MissingError
from bgmpi.io.prompt_store import PromptStore
from bgmpi.io.request_index import RequestIndex
from bgmpi.io.requests import RowRefused
from bgmpi.prefix_tree import PrefixTree, PrefixTreeBuilder
from bgmpi.prepare import Job, together
from bgmpi.primitives import Ids
from bgmpi.share_plan import Mode, SharePlan, sequences_of_unit, share_plan
from bgmpi.world import World, decode

#: Bytes of the input that all ranks read in one round, those of one rank at least, and its rows at most.
_ROUND_BYTES, _LEAST_BYTES, _MOST_ROWS = 4 << 20, 1 << 14, 4096
#: max_tokens of a row that sets none.
NO_CAP = -1
_MOST_CAP = 2**31 - 1
_LOG = logging.getLogger("bgmpi.tokenising")


class Piece(Struct):
    """Rows of the input for one rank to read: columns of the index, [k]."""

    offset: NDArray[np.int64]
    length: NDArray[np.int64]
    line: NDArray[np.int64]
    samples: NDArray[np.int32]
    prompts: NDArray[np.int32]


class Dealt(Struct):
    """What a rank is to read, None once no rank has anything left."""

    piece: Piece | None


class Found(Struct):
    """What a piece holds.

    lengths: tokens of each prompt, int32 [prompts], 0 throughout a row that is refused; tokens: int32 [sum]; cap:
    max_tokens of each row, int32 [k], NO_CAP where it sets none; shareable: whether its prompts may share, bool [k].
    """

    lengths: NDArray[np.int32]
    tokens: NDArray[np.int32]
    cap: NDArray[np.int32]
    shareable: NDArray[np.bool_]


_NO_IDS, _NO_COUNTS = np.empty(0, np.int64), np.empty(0, np.int32)
_NOTHING = Piece(_NO_IDS, _NO_IDS, _NO_IDS, _NO_COUNTS, _NO_COUNTS)
_NOTHING_FOUND = Found(_NO_COUNTS, _NO_COUNTS, _NO_COUNTS, np.empty(0, bool))


@dataclass(slots=True)
class Prompts:
    """The prompts of a job as rank 0 has them.

    first: each row's first prompt, int64 [rows + 1]; cap: max_tokens of each row, int32 [rows], NO_CAP where it sets
    none or was not read; weight: sequences of each prompt to be computed, int32 [prompts], 0 where it was refused;
    plan: what is shared, None where nothing is.
    """

    store: PromptStore
    first: Ids
    cap: NDArray[np.int32]
    weight: NDArray[np.int32]
    plan: SharePlan | None = None

    def known(self, row: int) -> list[NDArray[np.int32]] | None:
        """Return the ids of a row's prompts, None where they are not here."""
        numbers = range(int(self.first[row]), int(self.first[row + 1]))
        return [self.store.read(number) for number in numbers] if self.store.lengths[numbers[0]] else None


def read_prompts(
    job: Job, world: World, ended: NDArray[np.bool_] | None, folder: Path, stack: ExitStack
) -> Prompts | None:
    """Collective over the world: tokenise the job and plan what is shared; -> all prompts, on rank 0, unless prefixes
    are not to be shared.

    ended: sequences that earlier attempts ended, bool [sequences], on rank 0; folder: where the ids may lie.
    """
    if job.config.prefix_sharing == "off":
        return None
    begun = time.perf_counter()
    gathered = tokenise(job, world, ended, folder, stack)
    read = time.perf_counter()

    def plan() -> Prompts | None:
        if gathered is None:
            return None
        prompts, tree = gathered.prompts, gathered.tree(world.pulse.beat)
        prompts.plan = worthwhile(share_plan(
            tree, prompts.weight, prompts.store.lengths.astype(np.int64), mode=mode_of(job.config.prefix_sharing),
            unit_sequences=sequences_of_unit(int(prompts.weight.sum()), world.size),
        ))  # fmt: skip
        _tell(prompts, read - begun, time.perf_counter() - read)
        return prompts

    return together(world, plan)


def mode_of(word: str) -> Mode:
    """Return the mode of sharing that the option names."""
    found: Mode | None = next((mode for mode in get_args(Mode) if mode == word), None)
    if found is None:
        raise InternalError(f"prefix sharing {word!r} is no mode of a plan")
    return found


def worthwhile(plan: SharePlan) -> SharePlan | None:
    """Return the plan, None where it shares nothing."""
    return plan if plan.computed < plan.logical else None


def tokenise(
    job: Job, world: World, ended: NDArray[np.bool_] | None, folder: Path, stack: ExitStack
) -> Gathered | None:
    """Collective over the world: read and tokenise all rows with a sequence that has not ended; -> on rank 0."""
    gathered = together(world, lambda: _gathered(job, ended, folder, stack))
    with ExitStack() as readers:
        reader = _open_reader(job, world, readers)
        takes = np.flatnonzero(world.all_gather_counts(np.array([reader is not None], np.int64))[:, 0])
        if len(takes) < world.size:
            _LOG.info(
                "%d of %d ranks take no part in tokenising: the input, or the job's tokenizer, is not on their nodes",
                world.size - len(takes), world.size,
            )  # fmt: skip
        dealt: list[Ids] = []
        back: list[Found] = []
        while True:
            before, dealt = dealt, gathered.deal(takes, world.size) if gathered is not None else []
            piece = world.scatter(gathered.pieces(dealt) if gathered is not None else None, Dealt).piece
            mine = together(world, partial(_put_away_and_read, gathered, before, back, reader, piece, world.pulse.beat))
            if mine is None:
                return gathered
            everyone = world.gather(mine)
            back = [decode(one, Found) for one in everyone] if everyone is not None else []


def _put_away_and_read(
    gathered: Gathered | None, dealt: list[Ids], found: list[Found], reader: PieceReader | None, piece: Piece | None,
    beat: Callable[[], None],
) -> Found | None:  # fmt: skip
    """Local.  Put away what was found in the rows dealt before, read the next piece, None once there is none."""
    if gathered is not None:
        gathered.take(dealt, found)
    if piece is None:
        return None
    return reader.read(piece, beat) if reader is not None else _NOTHING_FOUND


class Gathered:
    """Rank 0's side: deals out rows, takes prompts.  rows: int64 [n], those to be read."""

    def __init__(self, job: Job, index: RequestIndex, ended: NDArray[np.bool_], store: PromptStore) -> None:
        first = index.first_prompt()
        weight = _weights(index, ended)
        self.prompts = Prompts(store, first, np.full(len(index), NO_CAP, np.int32), np.zeros_like(weight))
        self._index = index
        self._page_tokens = job.config.page_tokens
        self._builder = PrefixTreeBuilder(int(first[-1]), job.config.page_tokens)
        self._shareable: NDArray[np.int32] = np.zeros(len(weight), np.int32)
        self._wanted = weight
        self._rows = np.flatnonzero(np.add.reduceat(weight, first[:-1])) if len(weight) else np.empty(0, np.int64)
        self._next = 0

    def deal(self, takes: NDArray[np.int64], ranks: int) -> list[Ids]:
        """Return the rows that each rank is to read next, none for a rank that takes no part."""
        most = max(_LEAST_BYTES, _ROUND_BYTES // len(takes))
        dealt: list[Ids] = [self._rows[:0]] * ranks
        for rank in takes.tolist():
            rows = self._rows[self._next : self._next + _MOST_ROWS]
            count = int(np.searchsorted(np.cumsum(self._index.length[rows]), most, side="right"))
            dealt[rank] = rows[: max(1, count)]
            self._next += len(dealt[rank])
        return dealt

    def pieces(self, dealt: list[Ids]) -> list[Dealt]:
        """Return what ranks must know of these rows."""
        if not any(len(rows) for rows in dealt):
            return [Dealt(None)] * len(dealt)
        columns = [getattr(self._index, name) for name in Piece.__struct_fields__]
        return [Dealt(Piece(*(column[rows] for column in columns))) for rows in dealt]

    def take(self, dealt: list[Ids], read: list[Found]) -> None:
        """Put away what the ranks found in the rows that were dealt to them.  Raises WriteError."""
        for rows, found in zip(dealt, read, strict=True):
            if len(rows):
                self._put_away(rows, found)

    def tree(self, beat: Callable[[], None]) -> PrefixTree:
        """Return the tree of all that was taken."""
        store, page, shareable = self.prompts.store, self._page_tokens, self._shareable
        return self._builder.build(
            self.prompts.weight,
            lambda prompts, ordinal: store.pages(prompts, ordinal, page, shareable[prompts].astype(np.int64)),
            beat,
        )

    def _put_away(self, rows: Ids, found: Found) -> None:
        counts = self._index.prompts[rows].astype(np.int64)
        numbers = np.repeat(self.prompts.first[rows] - (np.cumsum(counts) - counts), counts) + np.arange(counts.sum())
        good = np.flatnonzero(found.lengths)
        numbers, lengths = numbers[good], found.lengths[good].astype(np.int64)
        self.prompts.cap[rows] = found.cap
        self.prompts.store.append(numbers, lengths, found.tokens)
        self.prompts.weight[numbers] = self._wanted[numbers]
        # A prompt's last token is always computed, for what comes behind it.
        shared = np.where(np.repeat(found.shareable, counts)[good], lengths - 1, 0)
        within = np.arange(len(found.tokens)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        kept = within < np.repeat(shared, lengths)
        self._shareable[numbers] = shared
        self._builder.add(numbers, shared, found.tokens[kept])


def _gathered(job: Job, ended: NDArray[np.bool_] | None, folder: Path, stack: ExitStack) -> Gathered | None:
    if job.index is None or ended is None:
        return None
    store = stack.enter_context(PromptStore(folder, int(job.index.prompts.sum())))
    return Gathered(job, job.index, ended, store)


def _weights(index: RequestIndex, ended: NDArray[np.bool_]) -> NDArray[np.int32]:
    """Return how many sequences of each prompt have not ended, int32 [prompts]."""
    each = np.repeat(index.samples // index.prompts, index.prompts)
    bounds = np.concatenate(([0], np.cumsum(each, dtype=np.int64)))
    left = np.concatenate(([0], np.cumsum(~ended, dtype=np.int64)))
    return np.diff(left[bounds]).astype(np.int32)


class _Facts(Struct):
    """What a rank must know to read rows as rank 0 would: bytes of the input, of its longest line, what spells it."""

    size: int
    max_line_bytes: int
    tokenizer: str


class PieceReader:
    """Reads and tokenises pieces of the input.  Local."""

    def __init__(self, job: Job, facts: _Facts, stack: ExitStack) -> None:
        """Open the input.  Raises MissingError where it is not on this node, InputError where it is another one."""
        self._facts = facts
        self._reader = stack.enter_context(job.reader(self._index(_NOTHING)))

    def read(self, piece: Piece, beat: Callable[[], None]) -> Found:
        """Return what the piece holds.  Raises InputError when the file is not the one that was scanned."""
        self._reader.turn_to(self._index(piece))
        lengths = np.zeros(int(piece.prompts.sum()), np.int32)
        cap = np.full(len(piece.offset), NO_CAP, np.int32)
        shareable = np.ones(len(piece.offset), bool)
        tokens: list[NDArray[np.int32]] = [np.empty(0, np.int32)]
        for row, end in enumerate(np.cumsum(piece.prompts).tolist()):
            found = self._reader.read(row)
            beat()
            if isinstance(found, RowRefused):
                continue
            ids = [one.prompt for one in found]
            lengths[end - len(ids) : end] = [len(one) for one in ids]
            tokens += ids
            sampling = found[0].sampling
            cap[row] = NO_CAP if sampling.max_tokens is None else min(sampling.max_tokens, _MOST_CAP)
            shareable[row] = sampling.prompt_logprobs is None
        return Found(lengths, np.concatenate(tokens), cap, shareable)

    def _index(self, piece: Piece) -> RequestIndex:
        return RequestIndex(
            piece.offset, piece.length, piece.line, piece.samples, piece.prompts,
            np.zeros(len(piece.offset), np.uint64), self._facts.size, "", 0, self._facts.max_line_bytes,
        )  # fmt: skip


def _open_reader(job: Job, world: World, stack: ExitStack) -> PieceReader | None:
    """Collective over the world: open the input; -> None where it, or the job's tokenizer, is not there."""
    index = job.index
    spoken = sha256(f"{job.tokenizer.hash} {job.tokenizer.chat_template_text}".encode()).hexdigest()
    facts = world.broadcast(_Facts(index.size, index.max_line_bytes, spoken) if index is not None else None, _Facts)

    def opened() -> PieceReader | None:
        try:
            return PieceReader(job, facts, stack) if facts.tokenizer == spoken else None
        except (MissingError, InputError):
            if world.rank == 0:
                raise
            return None

    return together(world, opened)


def _tell(prompts: Prompts, reading: float, planning: float) -> None:
    plan, count = prompts.plan, int(np.count_nonzero(prompts.weight))
    if plan is None:
        _LOG.info("%d prompts read in %.1f s; none share a prefix (looked in %.1f s)", count, reading, planning)
        return
    _LOG.info(
        "%d prompts of %d tokens read in %.1f s: sharing prefixes leaves %d to compute and saves %.1f %% (at most "
        "%.1f %%), in %d units; planned in %.1f s", count, plan.logical, reading, plan.computed,
        100 * (1 - plan.computed / plan.logical), 100 * (1 - plan.optimum / plan.logical), plan.units, planning,
    )  # fmt: skip
