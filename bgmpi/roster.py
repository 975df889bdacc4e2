"""Rank 0's list of who is where: state, owner, work and progress of every sequence, and sums of them a rank.

The scheduler decides; this notes what it ordered and what the ranks report, and refuses what cannot be.  A rank's
report is exact at a round's end, because nothing happens on it between the report and its next instructions; so what
is ordered is noted at once, and only what a rank does by itself, and the arrival of a moving sequence, is reported.

Sequences are rows of arrays.  A report may hold hundreds of small moves, so all moves of a round are joined and done
in waves: the first move of every sequence, then the second of those that made two (rejected: one by one, which cost
more than the decision itself).

Invariant (laws 3 and 5): every live sequence of a rank has one owner; a moving one stays its source's until the target
reports it; the sums equal the table.  `check` proves it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bgmpi.coroutine import State, StateTable
from bgmpi.errors import InternalError
from bgmpi.primitives import Arrived, Ids, Migrate, Partition, Reported

#: A guess at the tokens of an answer whose cap is longer: a cap says little about an answer's real length.
USUAL_ANSWER = 1024
_NOWHERE = ALONE = -1


def _these(*states: State) -> NDArray[np.bool_]:
    """Return a table, bool [states], that says which states are among `states`: one look-up a sequence."""
    table = np.zeros(len(State), bool)
    table[list(states)] = True
    table.flags.writeable = False
    return table


_LIVE = _these(State.ACTIVE, State.YIELDED, State.MOVING, State.SHARDED)
_ENDED = _these(State.DONE, State.FAILED)
_RUNNING = _these(State.ACTIVE, State.SHARDED)


class Roster:
    """Who is where.  sequences: number of sequences of the job; ranks: number of ranks.

    count: sequences that each rank owns by state, int64 [ranks, states]; work: sum of their `effort`, float64 [ranks];
    incoming: sequences on their way to each rank, int64 [ranks]; groups: the ranks [first, first + size) over which a
    sharded sequence runs.
    """

    def __init__(self, sequences: int, ranks: int) -> None:
        self.table = StateTable(sequences)
        self.ranks = ranks
        self.round_number = 0
        self.prompt: NDArray[np.int32] = np.zeros(sequences, np.int32)
        self.cap: NDArray[np.int32] = np.zeros(sequences, np.int32)
        #: tokens of the prompt that another sequence computes
        self.shared: NDArray[np.int32] = np.zeros(sequences, np.int32)
        #: equal for neighbours that should be on one rank, -1 for who stands alone
        self.unit: NDArray[np.int32] = np.full(sequences, ALONE, np.int32)
        #: work of each sequence, in decode steps, by a guess
        self.effort: NDArray[np.float32] = np.zeros(sequences, np.float32)
        #: yielded by order, until Combine or Migrate names it
        self.held: NDArray[np.bool_] = np.zeros(sequences, bool)
        self.count: NDArray[np.int64] = np.zeros((ranks, len(State)), np.int64)
        self.work: NDArray[np.float64] = np.zeros(ranks)
        self.incoming: NDArray[np.int64] = np.zeros(ranks, np.int64)
        self.groups: dict[int, tuple[int, int]] = {}
        #: (source, target) of every sequence of the last reports that could not move
        self.failed_moves: list[tuple[int, int]] = []
        #: sequences of the last reports whose group could not be made, or fell apart
        self.failed_groups: list[int] = []
        self._target: NDArray[np.int32] = np.full(sequences, _NOWHERE, np.int32)
        self._decoded: NDArray[np.int32] = np.zeros(sequences, np.int32)
        #: steps its rank had made when `_decoded` was right
        self._mark: NDArray[np.int64] = np.zeros(sequences, np.int64)
        self._steps: NDArray[np.int64] = np.zeros(ranks, np.int64)

    # --- questions ------------------------------------------------------------------------------------------------

    @property
    def ended(self) -> int:
        """Sequences that are done or failed."""
        return int(self.table.counts[State.DONE] + self.table.counts[State.FAILED])

    @property
    def owned(self) -> NDArray[np.int64]:
        """Sequences that each rank owns, in whatever state, int64 [ranks]."""
        owned: NDArray[np.int64] = self.count.sum(axis=1)
        return owned

    def of_state(self, *states: State) -> Ids:
        """Return the sequences of a rank that are in one of `states`, ascending."""
        return np.flatnonzero((self.table.owner >= 0) & _these(*states)[self.table.state])

    def decoded(self, names: Ids) -> NDArray[np.int64]:
        """Return how many tokens each has generated: as last reported, and one for every step since."""
        running = _RUNNING[self.table.state[names]]
        since = np.where(running, self._steps[self.table.owner[names]] - self._mark[names], 0)
        return np.minimum(self._decoded[names] + since, self.cap[names])

    def remaining(self, names: Ids) -> NDArray[np.int64]:
        """Guess how many tokens each will still generate: what is missing to a usual answer, or as many as it has when
        that is more (long answers tend to go on), never more than its cap leaves."""
        decoded, cap = self.decoded(names), self.cap[names].astype(np.int64)
        guess = np.maximum(np.minimum(cap, USUAL_ANSWER) - decoded, decoded)
        return np.clip(guess, 1, np.maximum(1, cap - decoded))

    def pages(self, names: Ids, page_tokens: int) -> NDArray[np.int64]:
        """Return the pages of its own that each needs to go on, int64."""
        whole = -(-(self.prompt[names] + self.decoded(names)) // page_tokens)
        return whole - self.shared[names] // page_tokens + 1

    def bound_for(self, names: Ids) -> NDArray[np.int64]:
        """Return the rank where each will be when this round's moves are done, int64."""
        return np.where(self._target[names] >= 0, self._target[names], self.table.owner[names]).astype(np.int64)

    def in_groups(self) -> NDArray[np.bool_]:
        """Say which ranks are members of a sharded sequence's group, bool [ranks]."""
        member = np.zeros(self.ranks, bool)
        for first, size in self.groups.values():
            member[first : first + size] = True
        return member

    # --- what is ordered ------------------------------------------------------------------------------------------

    def arrive(self, event: Arrived) -> None:
        """Note sequences that were read."""
        names, prompt, cap = event.sequences, event.prompt, event.cap
        self.prompt[names] = prompt
        self.cap[names] = cap
        if len(event.decoded):
            self._decoded[names] = event.decoded
        if len(event.shared):
            self.shared[names] = event.shared
        if len(event.unit):
            self.unit[names] = event.unit
        computed = prompt - self.shared[names]
        self.effort[names] = computed / 8 + np.minimum(cap - self._decoded[names], USUAL_ANSWER)

    def give(self, names: Ids, ranks: NDArray[np.int64]) -> None:
        """Note that waiting sequences were given to a rank each."""
        self.table.owner[names] = ranks
        self.count[:, State.WAITING] += np.bincount(ranks, minlength=self.ranks)
        self.work += np.bincount(ranks, weights=self.effort[names], minlength=self.ranks)

    def hold(self, names: Ids) -> None:
        """Note that active sequences were told to yield."""
        self.move(names, State.YIELDED)
        self.held[names] = True

    def depart(self, move: Migrate) -> None:
        """Note that suspended or waiting sequences were told to move; they are their source's until one reports."""
        names = move.sequences
        if move.source == move.target or (self.table.owner[names] != move.source).any():
            raise InternalError(f"{move} does not move sequences of rank {move.source} to another rank")
        self.move(names, State.MOVING)
        self.held[names] = False
        self._target[names] = move.target
        self.incoming[move.target] += len(names)

    def regroup(self, order: Partition) -> None:
        """Note that an active sequence was told to run over a group, or (size 1) a sharded one to run alone again."""
        name, ranks = order.sequence, slice(order.first, order.first + order.size)
        if order.size == 1:
            self.move(np.array([name]), State.YIELDED)
            return
        others = int(self.owned[ranks].sum() + self.incoming[ranks].sum()) - 1
        if not order.first <= order.leader < order.first + order.size or self.table.owner[name] != order.leader:
            raise InternalError(f"{order}: the leader must own the sequence and be one of the group")
        if others or self.in_groups()[ranks].any():
            raise InternalError(f"{order}: the group has {others} other sequences; its ranks must have none")
        self.move(np.array([name]), State.SHARDED)
        self.groups[name] = (order.first, order.size)

    # --- what is reported -----------------------------------------------------------------------------------------

    def report(self, reports: Sequence[Reported]) -> None:
        """Note what became of each rank's sequences, oldest move first."""
        self.failed_moves.clear()
        self.failed_groups.clear()
        moves = [(one.rank, moved) for one in reports for moved in one.moves if len(moved.sequences)]
        if moves:
            names = np.concatenate([moved.sequences for _, moved in moves])
            sizes = [len(moved.sequences) for _, moved in moves]
            ranks = np.repeat([rank for rank, _ in moves], sizes)
            states = np.repeat([moved.state for _, moved in moves], sizes)
            for wave in _waves(names):
                self._note(names[wave], states[wave], ranks[wave])
        for one in reports:
            self._steps[one.rank] += one.steps
            if len(one.active):
                self._decoded[one.active] = one.decoded
                self._mark[one.active] = self._steps[one.rank]

    def move(self, names: Ids, states: State | NDArray[np.int64]) -> None:
        """Move sequences, each at most once, and keep every sum."""
        before = self.table.state[names]
        decoded = self.decoded(names)
        after = np.broadcast_to(np.asarray(states), before.shape)
        self.table.move(names, after, round_number=self.round_number)
        owners = self.table.owner[names]
        self._decoded[names] = decoded
        self._mark[names] = self._steps[owners]
        self._add(owners, before, -1)
        ended = _ENDED[after]
        self._add(owners[~ended], after[~ended], 1)
        if ended.any():
            gone, was = names[ended], owners[ended]
            self.work -= np.bincount(
                was[was >= 0], weights=self.effort[gone[was >= 0]], minlength=self.ranks
            )
            self.table.owner[gone] = -1
            self.held[gone] = False
        for name in names[before == State.SHARDED].tolist():
            del self.groups[name]

    def check(self) -> None:
        """Raise InternalError unless owners, sums and groups agree with the table (laws 3 and 5)."""
        self.table.check()
        state, owner = self.table.state, self.table.owner
        if (_LIVE[state] & (owner < 0)).any():
            raise InternalError("a live sequence has no owner")
        if (_ENDED[state] & (owner >= 0)).any():
            raise InternalError("an ended sequence has an owner")
        have = owner >= 0
        real = np.bincount(owner[have] * len(State) + state[have], minlength=self.count.size).reshape(self.count.shape)
        self._same("sequences a rank and state", real, self.count)
        work = np.bincount(owner[have], weights=self.effort[have], minlength=self.ranks)
        self._same("work a rank", np.round(work), np.round(self.work))
        moving = state == State.MOVING
        if not np.array_equal(moving, self._target >= 0):
            raise InternalError("the moving sequences are not those with a target")
        self._same("incoming a rank", np.bincount(self._target[moving], minlength=self.ranks), self.incoming)
        if (self.held & (state != State.YIELDED)).any():
            raise InternalError("a sequence is held and not yielded")
        self._check_groups()

    # --- inside ---------------------------------------------------------------------------------------------------

    def _note(self, names: Ids, states: NDArray[np.int64], ranks: NDArray[np.int64]) -> None:
        moving = self.table.state[names] == State.MOVING
        if moving.any():
            self._land(names[moving], ranks[moving])
        strange = np.flatnonzero(self.table.owner[names] != ranks)
        if len(strange):
            name, rank = int(names[strange[0]]), int(ranks[strange[0]])
            raise InternalError(
                f"rank {rank} reports sequence {name} of rank {self.table.owner[name]}; "
                f"story: {self.table.story(name)}"
            )
        astray = names[self.held[names] & (states == State.ACTIVE)]
        if len(astray):
            raise InternalError(f"sequence {astray[0]} runs, though it was told to yield and nothing resumed it")
        self.failed_groups.extend(
            names[(self.table.state[names] == State.SHARDED) & (states == State.YIELDED)].tolist()
        )
        self.move(names, states)

    def _land(self, names: Ids, ranks: NDArray[np.int64]) -> None:
        """A target that reports a moving sequence becomes its owner; a source that does keeps it."""
        target, source = self._target[names], self.table.owner[names]
        here = target == ranks
        stayed = source == ranks
        self.failed_moves.extend(zip(source[stayed].tolist(), target[stayed].tolist(), strict=True))
        self._add(source[here], np.full(int(here.sum()), State.MOVING), -1)
        self._add(target[here], np.full(int(here.sum()), State.MOVING), 1)
        effort = self.effort[names[here]]
        self.work -= np.bincount(source[here], weights=effort, minlength=self.ranks)
        self.work += np.bincount(target[here], weights=effort, minlength=self.ranks)
        self.table.owner[names[here]] = target[here]
        settled = here | stayed
        self.incoming -= np.bincount(target[settled], minlength=self.ranks)
        self._target[names[settled]] = _NOWHERE

    def _add(self, owners: NDArray[np.int32], states: NDArray[np.integer[Any]], sign: int) -> None:
        mine = owners >= 0
        flat = owners[mine].astype(np.int64) * len(State) + states[mine]
        self.count += sign * np.bincount(flat, minlength=self.count.size).reshape(self.count.shape)

    def _check_groups(self) -> None:
        sharded = np.flatnonzero(self.table.state == State.SHARDED).tolist()
        if sorted(self.groups) != sharded:
            raise InternalError(f"sharded sequences {sharded}, groups of {sorted(self.groups)}")
        member = np.zeros(self.ranks, bool)
        for name, (first, size) in self.groups.items():
            ranks = slice(first, first + size)
            if member[ranks].any() or self.owned[ranks].sum() != 1 or self.incoming[ranks].any():
                raise InternalError(f"the ranks [{first}, {first + size}) of sequence {name} have other sequences")
            member[ranks] = True

    def _same(self, what: str, real: NDArray[Any], counted: NDArray[Any]) -> None:
        if not np.array_equal(real, counted):
            raise InternalError(f"{what}: table {real.tolist()}, counted {counted.tolist()}")


def _waves(names: Ids) -> Iterator[Ids]:
    """Yield places in `names` such that each wave has every name at most once, a name's earlier places first."""
    order = np.argsort(names, kind="stable")
    ordered = names[order]
    begins = np.r_[True, ordered[1:] != ordered[:-1]]
    turn = np.arange(len(names)) - np.flatnonzero(begins)[np.cumsum(begins) - 1]
    of_place = np.empty(len(names), np.int64)
    of_place[order] = turn
    for wave in range(int(turn.max()) + 1 if len(turn) else 0):
        yield np.flatnonzero(of_place == wave)
