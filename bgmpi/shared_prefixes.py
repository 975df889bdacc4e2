"""The shared prefixes of a rank: who computes each, where its KV lies, and how long it stays (paper B3).

A prefix is computed once, as part of a sequence's own prompt: the first that begins with it is its carrier, and who
comes after waits.  When the carrier's KV reaches the prefix's end, its full pages are lent to the prefix, and a copy of
the page that the prefix does not fill, the tail, is kept beside them.  Everybody else then borrows the full pages, gets
the tail copied into a page of its own, and computes what is left.  Nobody ever writes into a page that is borrowed: a
sequence writes behind its prefix only.

Prefixes lie within one another; each holds the pages that its parent does not.  Two counts decide how long it stays.
`members`: sequences on this rank, in whatever state, that begin with it.  It is dissolved when there is none and rank 0
has no further one.  `links`: sequences whose KV goes on behind it, and prefixes that do.  Without links its KV may be
thrown away where memory is short, and is then computed again by the next member.

Tokens are compared before anything is shared, so a tree that was wrong (two pages with one hash) costs time only.
Pure numpy: it says which pages; `rank` copies bytes, before the next step.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from bgmpi.errors import InternalError
from bgmpi.paged_kv import PagedKV, Pages

NO_ONE = -1


class Prefix(Struct, frozen=True):
    """A prefix that several prompts of the job begin with.

    number: its name in the job; depth: its tokens, counted from the prompt's begin; more: rank 0 still has sequences
    that share it.
    """

    number: int
    depth: int
    more: bool = False


@dataclass(frozen=True, slots=True)
class Start:
    """How a sequence without KV may begin.

    borrowed: full pages of prefixes, int32; with_kv: tokens whose KV it then has; tail: the page whose begin is to be
    copied into its first own page, link: the prefix behind which it goes on; each NO_ONE for none.
    """

    borrowed: Pages
    with_kv: int
    tail: int
    link: int


@dataclass(slots=True)
class _Held:
    """A prefix as this rank has it.  tokens int32 [depth] and pages int32 (those that the parent lacks) once ready."""

    number: int
    depth: int
    parent: int
    more: bool
    members: int = 0
    links: int = 0
    carrier: int = NO_ONE
    ready: bool = False
    tail: int = NO_ONE
    pages: Pages = field(default_factory=lambda: np.empty(0, np.int32))
    tokens: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))


class SharedPrefixes:
    """The prefixes of one rank; `kv`: the pool in which their pages are parked."""

    def __init__(self, kv: PagedKV) -> None:
        self._kv = kv
        self._held: dict[int, _Held] = {}
        self._path: dict[int, tuple[Prefix, ...]] = {}
        #: the prefix behind which the KV of each sequence goes on
        self._link: dict[int, int] = {}
        #: the slot of each carrier, and the first prefix that it has still to reach
        self._carried: dict[int, tuple[int, int]] = {}

    def __len__(self) -> int:
        return len(self._held)

    @property
    def pages(self) -> int:
        """Pages that all prefixes have together."""
        return sum(len(held.pages) + (held.tail != NO_ONE) for held in self._held.values())

    # --- who is here ----------------------------------------------------------------------------------------------

    def enter(self, sequence: int, prefixes: tuple[Prefix, ...], *, told: bool) -> None:
        """Note a sequence that came to this rank, and what its prompt begins with, shallow before deep.  told: rank 0
        gave it, so whether it has more of them is known."""
        if not prefixes:
            return
        parent = NO_ONE
        for one in prefixes:
            held = self._held.get(one.number)
            if held is None:
                held = self._held[one.number] = _Held(one.number, one.depth, parent, more=False)
            held.members += 1
            held.more = one.more if told else held.more
            parent = one.number
        self._path[sequence] = prefixes

    def leave(self, sequence: int) -> None:
        """Note that a sequence ended, or runs elsewhere now; what only it needed is given back."""
        path = self._path.pop(sequence, None)
        if path is None:
            return
        self.unlink(sequence)
        for one in reversed(path):
            held = self._held[one.number]
            held.members -= 1
            self._dissolve_if_over(held)

    def close(self, numbers: Iterable[int]) -> None:
        """Note that rank 0 has no further sequence that shares these."""
        for number in sorted(numbers, reverse=True):
            held = self._held.get(number)
            if held is not None:
                held.more = False
                self._dissolve_if_over(held)

    def path(self, sequence: int) -> tuple[Prefix, ...]:
        """Return what a sequence of this rank shares."""
        return self._path.get(sequence, ())

    # --- how a sequence begins ------------------------------------------------------------------------------------

    def begin(self, sequence: int, tokens: NDArray[np.int32]) -> Start | None:
        """Say how a sequence without KV may begin now; None while another computes what it shares."""
        ready, missing = self._reach(sequence, tokens)
        if missing is not None and missing.carrier != NO_ONE:
            return None
        if ready is None:
            return Start(np.empty(0, np.int32), 0, NO_ONE, NO_ONE)
        pages = self._kv.page_tokens
        whole = ready.depth // pages * pages
        with_kv = ready.depth if ready.tail != NO_ONE else whole
        return Start(self.pages_of(ready.number), with_kv, ready.tail, ready.number)

    def borrowed_by(self, sequence: int) -> Pages:
        """Return the full pages that stand before those of a sequence that has KV, int32."""
        return self.pages_of(self._link.get(sequence, NO_ONE))

    def begun(self, sequence: int, slot: int, tokens: NDArray[np.int32]) -> None:
        """Note that a sequence is active now, with the KV that it had or that `begin` gave it.  It carries what it
        shares beyond that, unless another does."""
        path = self._path.get(sequence)
        if path is None:
            return
        link = self._link.get(sequence, NO_ONE)
        ahead = [self._held[one.number] for one in path]
        ahead = [held for held in ahead if link == NO_ONE or held.depth > self._held[link].depth]
        # Whoever goes on with pages of its own where another's are shared by now could not lend what comes behind.
        if not ahead or ahead[0].ready or any(held.carrier != NO_ONE for held in ahead):
            return
        for held in ahead:
            held.carrier = sequence
        self._carried[sequence] = slot, ahead[0].number

    def unlink(self, sequence: int) -> None:
        """Note that a sequence lost its KV, or its slot: it carries nothing any more and borrows nothing."""
        self.put_down(sequence)
        number = self._link.pop(sequence, NO_ONE)
        if number != NO_ONE:
            self._held[number].links -= 1

    def put_down(self, sequence: int) -> None:
        """Note that a sequence does not go on for now, so that another may carry what it has not reached."""
        if self._carried.pop(sequence, None) is None:
            return
        for one in self._path[sequence]:
            if self._held[one.number].carrier == sequence:
                self._held[one.number].carrier = NO_ONE

    # --- what a carrier reaches -----------------------------------------------------------------------------------

    def carriers(self) -> list[tuple[int, int]]:
        """Return the sequences that compute what others wait for, and their slots."""
        return [(sequence, slot) for sequence, (slot, _) in self._carried.items()]

    def reached(self, sequence: int, with_kv: int) -> bool:
        """Say whether the KV of a sequence reaches the end of the next prefix that it carries."""
        carried = self._carried.get(sequence)
        return carried is not None and with_kv >= self._held[carried[1]].depth

    def publish(self, sequence: int, tokens: NDArray[np.int32], spare: int) -> tuple[int, int] | None:
        """Let others share the prefix that a carrier's KV has reached; its full pages are lent.

        spare: pages that must stay free.  -> (page, page): the first is to be copied to the second before the next
        step; None where no page is free for the tail or there is none: then who comes computes it.
        """
        slot, number = self._carried[sequence]
        held, kv = self._held[number], self._kv
        before, full = self._depth_of(held.parent) // kv.page_tokens, held.depth // kv.page_tokens
        if kv.borrowed[slot] != before:
            raise InternalError(
                f"sequence {sequence} borrows {kv.borrowed[slot]} pages, prefix {number} begins behind {before}"
            )
        held.tokens = tokens[: held.depth].copy()
        held.pages = kv.lend(slot, full - before)
        copied = None
        if held.depth % kv.page_tokens:
            claimed = kv.claim(1, spare)
            if claimed is not None:
                held.tail = int(claimed[0])
                copied = int(kv.table[slot, full]), held.tail
        self._make_ready(held)
        self.link(sequence, number)
        behind = [one.number for one in self._path[sequence] if one.depth > held.depth]
        if behind:
            self._carried[sequence] = slot, behind[0]
        else:
            del self._carried[sequence]
        return copied

    # --- a prefix that comes from elsewhere -----------------------------------------------------------------------

    def has(self, number: int) -> bool:
        """Say whether the KV of a prefix is here."""
        held = self._held.get(number)
        return held is not None and held.ready

    def is_of(self, number: int, tokens: NDArray[np.int32]) -> bool:
        """Say whether a prefix that is here is the begin of these tokens, int32 [n]."""
        held = self._held[number]
        return np.array_equal(held.tokens, tokens[: held.depth])

    def pages_of(self, number: int) -> Pages:
        """Return the full pages of a prefix from the prompt's begin on, int32; none of NO_ONE."""
        pieces = [np.empty(0, np.int32)]
        while number != NO_ONE:
            held = self._held[number]
            pieces.append(held.pages)
            number = held.parent
        return np.concatenate(pieces[::-1])

    def behind(self, sequence: int) -> list[int]:
        """Return the prefixes behind which a sequence's KV goes on, shallow before deep."""
        number, numbers = self._link.get(sequence, NO_ONE), list[int]()
        while number != NO_ONE:
            numbers.append(number)
            number = self._held[number].parent
        return numbers[::-1]

    def own_pages(self, number: int) -> tuple[Pages, int]:
        """Return the full pages that a prefix has beside its parent's, and its tail."""
        held = self._held[number]
        return held.pages, held.tail

    def link_of(self, sequence: int) -> int:
        """Return the prefix behind which a sequence's own pages go on, NO_ONE for none."""
        return self._link.get(sequence, NO_ONE)

    def install(self, number: int, tokens: NDArray[np.int32], pages: Pages, tail: int) -> None:
        """Take the KV of a prefix whose parent is ready, in parked pages that are the prefix's from now on."""
        held = self._held[number]
        if held.ready or (held.parent != NO_ONE and not self._held[held.parent].ready):
            raise InternalError(f"prefix {number} is installed twice, or before the one that it goes on from")
        held.tokens, held.pages, held.tail = tokens[: held.depth].copy(), pages, tail
        carrier = held.carrier
        self._make_ready(held)
        if carrier != NO_ONE:
            self.put_down(carrier)

    def reach(self, sequence: int, tokens: NDArray[np.int32], with_kv: int) -> int:
        """Return the deepest prefix that is here and ends within the first `with_kv` tokens of a sequence, NO_ONE for
        none."""
        number = NO_ONE
        for one in self._path.get(sequence, ()):
            if one.depth > with_kv or not self.has(one.number) or not self.is_of(one.number, tokens):
                break
            number = one.number
        return number

    def adopt(self, sequence: int, tokens: NDArray[np.int32], with_kv: int, pages: Pages) -> int:
        """Let the KV of a sequence that came from disk go on behind the prefixes that are here, and those that are not
        here, and that nobody computes, take theirs from it; -> how many of its pages they took.

        pages: parked, with the KV of tokens behind the full pages of `reach` up to `with_kv`.  A tail stays with the
        sequence: who comes next computes it.
        """
        link, taken = self.reach(sequence, tokens, with_kv), 0
        for one in self._path.get(sequence, ()):
            held = self._held[one.number]
            if one.depth > with_kv or (not held.ready and held.carrier != NO_ONE):
                break
            if held.ready:
                if not self.is_of(one.number, tokens):
                    break
                continue
            size = held.depth // self._kv.page_tokens - self._depth_of(held.parent) // self._kv.page_tokens
            self.install(one.number, tokens, pages[taken : taken + size], NO_ONE)
            taken += size
            link = one.number
        if link != NO_ONE:
            self.link(sequence, link)
        return taken

    def link(self, sequence: int, number: int) -> None:
        """Note that the KV of a sequence goes on behind this prefix from now on, which is here."""
        old = self._link.get(sequence, NO_ONE)
        if old != NO_ONE:
            self._held[old].links -= 1
        self._link[sequence] = number
        self._held[number].links += 1

    # --- memory is short ------------------------------------------------------------------------------------------

    def strip(self, *, tails: bool) -> bool:
        """Throw away the KV of the prefix that was last needed by nobody, or (tails) of a tail; False when there is
        none."""
        for held in reversed(self._held.values()):
            if held.ready and not held.links and not tails:
                self._give_back(held)
                return True
            if tails and held.tail != NO_ONE:
                self._kv.release(np.array([held.tail], np.int32))
                held.tail = NO_ONE
                return True
        return False

    def check(self) -> None:
        """Raise InternalError unless the counts are those of the sequences here, and pages agree with depths."""
        members, links = dict.fromkeys(self._held, 0), dict.fromkeys(self._held, 0)
        for path in self._path.values():
            for one in path:
                members[one.number] += 1
        for number in self._link.values():
            links[number] += 1
        parked = 0
        for held in self._held.values():
            if held.ready and held.parent != NO_ONE:
                links[held.parent] += 1
            size = held.depth // self._kv.page_tokens - self._depth_of(held.parent) // self._kv.page_tokens
            if len(held.pages) != (size if held.ready else 0) or (held.tail != NO_ONE and not held.ready):
                raise InternalError(f"prefix {held.number} has {len(held.pages)} pages, and is ready: {held.ready}")
            if held.carrier != NO_ONE and (held.ready or held.carrier not in self._carried):
                raise InternalError(f"prefix {held.number} is carried by {held.carrier}, which carries nothing")
            if not held.members and not held.more:
                raise InternalError(f"prefix {held.number} has no member any more and is still here")
            parked += len(held.pages) + (held.tail != NO_ONE)
        for held in self._held.values():
            if (held.members, held.links) != (members[held.number], links[held.number]):
                raise InternalError(
                    f"prefix {held.number} counts {held.members} members and {held.links} links, "
                    f"has {members[held.number]} and {links[held.number]}"
                )
        if parked > self._kv.parked:
            raise InternalError(f"prefixes have {parked} pages, and {self._kv.parked} are parked")

    # --- inside ---------------------------------------------------------------------------------------------------

    def _reach(self, sequence: int, tokens: NDArray[np.int32]) -> tuple[_Held | None, _Held | None]:
        """Return the deepest prefix of a sequence that is here, and the next one, which is not; None for none."""
        ready = None
        for one in self._path.get(sequence, ()):
            held = self._held[one.number]
            if not held.ready:
                return ready, held
            if not self.is_of(one.number, tokens):
                return ready, None
            ready = held
        return ready, None

    def _make_ready(self, held: _Held) -> None:
        held.ready, held.carrier = True, NO_ONE
        if held.parent != NO_ONE:
            self._held[held.parent].links += 1

    def _depth_of(self, number: int) -> int:
        return 0 if number == NO_ONE else self._held[number].depth

    def _dissolve_if_over(self, held: _Held) -> None:
        if not held.members and not held.more:
            if held.ready:
                self._give_back(held)
            del self._held[held.number]

    def _give_back(self, held: _Held) -> None:
        if held.links:
            raise InternalError(f"prefix {held.number} should go, and {held.links} others go on behind it")
        tail = [] if held.tail == NO_ONE else [held.tail]
        self._kv.release(np.concatenate((held.pages, np.array(tail, np.int32))))
        held.pages, held.tokens = np.empty(0, np.int32), np.empty(0, np.int32)
        held.ready, held.tail = False, NO_ONE
        if held.parent != NO_ONE:
            self._held[held.parent].links -= 1
