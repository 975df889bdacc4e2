"""What rank 0 keeps of shared prefixes while it reads rows: whose turn it is by worth, and who is still to come.

It joins the plan to the order of its units, to the lengths of answers that the order goes by, and to the ledger.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from bgmpi.answer_lengths import AnswerLengths
from bgmpi.fairness import Wishes
from bgmpi.prefix_ledger import PrefixLedger
from bgmpi.primitives import Counts, Ids
from bgmpi.share_plan import UNIT_SEQUENCES, SharePlan
from bgmpi.tokenising import NO_CAP, Prompts
from bgmpi.unit_costs import own_tokens
from bgmpi.unit_order import UnitOrder

#: Rounds between two sortings of what is left.
_SORT_ROUNDS = 8


class Sharing:
    """The plan at work.

    rows: int64 [n], those to be read; most: tokens that a sequence can become at most.
    """

    def __init__(self, prompts: Prompts, plan: SharePlan, rows: Ids, wishes: Wishes, most: int) -> None:
        self.ledger = PrefixLedger(plan, prompts.weight)
        self._plan, self._weight, self._first = plan, prompts.weight, prompts.first
        self._caps = caps_of(prompts, rows, most).astype(np.int32)
        self._sequences = _by_row(prompts.weight, prompts.first)[rows].astype(np.int32)
        prefill = _by_row(own_tokens(plan, prompts.weight, prompts.store.lengths), prompts.first)[rows]
        leading = _leading(plan, prompts.first)[rows]
        self.order = UnitOrder(
            rows, plan.unit[leading], plan.node[leading], plan.parent, prefill, by_units(wishes)
        )  # fmt: skip
        self._lengths = AnswerLengths()
        self._rounds = 0
        self._sort()

    def learn(self, answered: Iterable[Counts]) -> None:
        """Take one round's answers, int64 [k, 2] each, and sort what is left anew where they tell something new."""
        ended = [one for one in answered if len(one)]
        if ended:
            self._lengths.learn(np.concatenate(ended))
        self._rounds += 1
        if self._rounds >= _SORT_ROUNDS and self._lengths.moved(self._sorted_by):
            self._sort()

    def covered(self, prompt: int, seen: set[int]) -> int:
        """Return how many tokens of a prompt lie under nodes of `seen`, and put its own there."""
        path = self._plan.path(prompt)
        shared = next((int(self._plan.depth[node]) for node in reversed(path) if node in seen), 0)
        seen.update(path)
        return shared

    def refuse(self, row: int) -> None:
        """Note that a row's sequences will never come."""
        for prompt in range(int(self._first[row]), int(self._first[row + 1])):
            self.ledger.leave(prompt, int(self._weight[prompt]))

    def _sort(self) -> None:
        self._sorted_by, self._rounds = self._lengths.share, 0
        self.order.sort(self._sequences * self._lengths.expected(self._caps))


def by_units(wishes: Wishes) -> Wishes:
    """Return wishes whose bound on waiting counts units, of at most UNIT_SEQUENCES rows, where no row asks for a place;
    else, and for the input's order, it counts rows."""
    if wishes.priority is not None or wishes.deadline is not None or not wishes.ageing:
        return wishes
    return replace(wishes, ageing=(wishes.ageing + 1) * UNIT_SEQUENCES - 1)


def sharing_of(prompts: Prompts | None, rows: Ids, wishes: Wishes, most: int) -> Sharing | None:
    """Return the sharing of a job, None where nothing is shared."""
    if prompts is None or prompts.plan is None:
        return None
    return Sharing(prompts, prompts.plan, rows, wishes, most)


def caps_of(prompts: Prompts, rows: Ids, most: int) -> Counts:
    """Return the most tokens that an answer of each row can have, by its first prompt, int64 [n]."""
    room = most - prompts.store.lengths[prompts.first[rows]].astype(np.int64)
    asked = prompts.cap[rows].astype(np.int64)
    return np.maximum(np.where(asked == NO_CAP, room, np.minimum(asked, room)), 0)


def _by_row(values: NDArray[np.int64] | NDArray[np.int32], first: Ids) -> Counts:
    """Sum values of prompts by row, int64 [rows].  Every row has a prompt."""
    return np.add.reduceat(values, first[:-1], dtype=np.int64) if len(first) > 1 else np.empty(0, np.int64)


def _leading(plan: SharePlan, first: Ids) -> Ids:
    """Return each row's first prompt that has a unit, its first one where none has, int64 [rows]."""
    if len(first) == len(plan.unit) + 1:  # one prompt a row
        return first[:-1]
    numbers = np.arange(len(plan.unit))
    found = np.minimum.reduceat(np.where(plan.unit >= 0, numbers, len(numbers)), first[:-1])
    return np.where(found < first[1:], found, first[:-1])
