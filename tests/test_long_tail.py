"""Laws of the tail: who runs over which ranks, when it is worth it, and that nothing flaps."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from ranks_for_tests import Toy, live

from bgmpi.long_tail import LongTail, Tail, TailRules, choose, group_sizes, toward
from bgmpi.primitives import Migrate, Partition, Reported
from bgmpi.scheduler import Rules, Scheduler
from bgmpi.step_times import StepTimes

RULES = TailRules(shares={2: 0.56, 3: 0.42, 4: 0.36, 8: 0.3}, switch_seconds=0.01)


def measured(alone: dict[int, float], sharded: dict[int, float] | None = None, rules: TailRules = RULES) -> StepTimes:
    times = StepTimes(rules.shares, rules.lockstep)
    for size, each in ((1, alone), *((size, {1: value}) for size, value in (sharded or {}).items())):
        for count, seconds in each.items():
            one = Reported(0, (), 9, 9, 9, 0, steps=10, generated_tokens=10 * count, seconds=10 * seconds)
            for _ in range(2):
                times.note([one], np.array([size]))
    return times


def tail(
    owner: list[int], remaining: list[int], ranks: int, *, groups: dict[int, tuple[int, int]] | None = None,
    free: int = 100,
) -> Tail:
    """Stragglers 0.. on these ranks; groups: which of them are sharded over [first, first + size)."""
    count = len(owner)
    places = [(groups or {}).get(i, (owner[i], 1)) for i in range(count)]
    sharded = np.array([i in (groups or {}) for i in range(count)])
    return Tail(
        np.arange(count), np.array(owner), ~sharded, sharded, np.array([f for f, _ in places]),
        np.array([s for _, s in places]), np.array(remaining), np.full(count, 3), np.full(ranks, free),
    )


def chosen(stand: Tail, times: StepTimes, rules: TailRules = RULES, **may: bool) -> list[tuple[int, int]]:
    may = {"may_move": True, "may_shard": True} | may
    return list(choose(stand, times, rules, **may).places)


TIMES = measured({1: 0.02, 2: 0.03, 4: 0.05})


@pytest.mark.parametrize(
    ("ranks", "sizes"), [(1, []), (2, [2]), (3, [2, 3]), (4, [2, 4]), (6, [2, 4, 6]), (8, [2, 4, 8])]
)
def test_groups_are_powers_of_two_and_the_whole_world(ranks: int, sizes: list[int]) -> None:
    assert group_sizes(ranks) == sizes


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_a_lone_straggler_runs_over_all_ranks(ranks: int) -> None:
    assert chosen(tail([1], [500], ranks), TIMES) == [(0, ranks)]


def test_a_short_remainder_stays_alone() -> None:
    assert chosen(tail([1], [63], 4), TIMES) == [(1, 1)]


def test_a_straggler_stays_alone_where_gathers_cost_more_than_the_split_saves() -> None:
    dear = TailRules(shares={2: 1.5, 4: 2.1})
    assert chosen(tail([1], [5000], 4), measured({1: 0.02}, rules=dear), dear) == [(1, 1)]


def test_nothing_is_decided_before_anything_was_measured() -> None:
    assert chosen(tail([0, 0], [500, 500], 4), StepTimes(RULES.shares, False)) == [(0, 1), (0, 1)]


def test_what_a_group_really_took_counts_more_than_what_was_predicted() -> None:
    slow = measured({1: 0.02}, {4: 0.5, 2: 0.5})
    assert chosen(tail([1], [500], 4, groups={0: (0, 4)}), slow) == [(1, 1)]


def test_several_stragglers_spread_evenly_over_the_ranks() -> None:
    places = chosen(tail([0, 0, 0, 0, 0, 0, 0, 1], [500] * 8, 4), measured({1: 0.02, 4: 0.05, 8: 0.1}))
    assert sorted(first for first, size in places) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert {size for _, size in places} == {1}


def test_the_longest_of_three_gets_the_spare_rank_of_four() -> None:
    assert chosen(tail([0, 1, 2], [500, 2000, 500], 4), TIMES)[1] == (0, 2)
    assert sorted(chosen(tail([0, 1, 2], [500, 2000, 500], 4), TIMES)) == [(0, 2), (2, 1), (3, 1)]


def test_without_migration_nobody_changes_its_rank() -> None:
    places = chosen(tail([0, 1, 2], [500, 2000, 500], 4), TIMES, may_move=False)
    assert all(first <= owner < first + size for owner, (first, size) in zip([0, 1, 2], places, strict=True))


def test_nobody_moves_to_a_rank_without_pages() -> None:
    assert chosen(tail([0, 0], [500, 500], 2, free=2), TIMES) == [(0, 1), (0, 1)]


def test_the_way_from_one_group_to_a_larger_one_leads_over_running_alone() -> None:
    wanted = choose(tail([1], [500], 4, groups={0: (0, 2)}), TIMES, RULES, may_move=True, may_shard=True)
    assert wanted.places == ((0, 4),)
    orders, reached = toward(wanted, tail([1], [500], 4, groups={0: (0, 2)}))
    assert [(o.leader, o.first, o.size) for o in orders if isinstance(o, Partition)] == [(1, 1, 1)] and not reached
    orders, reached = toward(wanted, tail([1], [500], 4))
    assert [(o.first, o.size) for o in orders if isinstance(o, Partition)] == [(0, 4)] and not reached
    orders, reached = toward(wanted, tail([1], [500], 4, groups={0: (0, 4)}))
    assert not orders and reached


def test_a_group_waits_until_the_others_have_left_its_ranks() -> None:
    stand = tail([0, 1], [2000, 500], 3)
    wanted = choose(stand, TIMES, RULES, may_move=True, may_shard=True)
    assert wanted.places == ((0, 2), (2, 1))
    orders, _ = toward(wanted, stand)
    assert [(o.source, o.target) for o in orders if isinstance(o, Migrate)] == [(1, 2)]
    assert not any(isinstance(o, Partition) for o in orders)
    orders, _ = toward(wanted, tail([0, 2], [2000, 500], 3))
    assert [(o.first, o.size) for o in orders if isinstance(o, Partition)] == [(0, 2)]


def test_two_boundaries_must_agree() -> None:
    decisions = LongTail(RULES, may_move=True, may_shard=True)
    assert decisions.decide(tail([1], [500], 4), TIMES) == [] and decisions.near
    assert decisions.decide(tail([0, 1], [500, 500], 4), TIMES) == []
    assert decisions.decide(tail([1], [500], 4), TIMES) == []
    assert len(decisions.decide(tail([1], [480], 4), TIMES)) == 1 and decisions.under_way


@given(
    st.lists(st.integers(1, 5000), min_size=1, max_size=8), st.integers(2, 8), st.integers(0, 10_000), st.booleans()
)
@example([64], 2, 411, False)  # the last switch begins late
@settings(deadline=None, max_examples=40)
def test_it_never_flaps_whatever_the_clocks_say(remaining: list[int], ranks: int, seed: int, lockstep: bool) -> None:
    """Every switch is carried out; times jump by a factor of a thousand; nobody ends."""
    source = random.Random(seed)
    rules = TailRules(shares=RULES.shares, lockstep=lockstep)
    decisions, times = LongTail(rules, may_move=True, may_shard=True), StepTimes(rules.shares, lockstep)
    owner = [source.randrange(ranks) for _ in remaining]
    groups: dict[int, tuple[int, int]] = {}
    switches, begun, lasted = 0, False, 0
    for _ in range(60):
        led = np.array([0 if any(f <= r < f + s for f, s in groups.values()) else 1 for r in range(ranks)])
        for name, (_, size) in groups.items():
            led[owner[name]] = size
        reports = [
            Reported(r, (), 9, 9, 9, 0, steps=4, generated_tokens=4 * max(1, owner.count(r)),
                     seconds=10 ** source.uniform(-4, -1))
            for r in range(ranks) if r in owner
        ]
        times.note(reports, led)
        orders = decisions.decide(tail(owner, remaining, ranks, groups=groups), times)
        switches += decisions.under_way and not begun
        begun = decisions.under_way
        lasted = lasted + 1 if begun else 0
        assert lasted <= rules.patience
        for order in orders:
            if isinstance(order, Migrate):
                for name in order.sequences.tolist():
                    assert owner[name] == order.source and name not in groups
                    owner[name] = order.target
            elif order.size == 1:
                del groups[order.sequence]
            else:
                members = range(order.first, order.first + order.size)
                assert [n for n, rank in enumerate(owner) if rank in members] == [order.sequence]
                groups[order.sequence] = (order.first, order.size)
    assert switches <= rules.changes


def tail_job(ranks: int, partition: bool) -> tuple[Toy, float]:
    """One straggler twenty times the median; a group of n takes 1 / n of the time and a little."""
    lengths = [30 + i % 7 for i in range(60)] + [640]
    toy = Toy(lengths, ranks, slots=16, pages=400,
              seconds=lambda active, size: (0.004 + 0.001 * active) / size + (0.0003 if size > 1 else 0.0))
    rules = Rules(round_steps=64, page_tokens=64, migrate=True, partition=partition, tail=RULES)
    live(Scheduler(len(lengths), ranks, rules), toy, [700] * len(lengths))
    return toy, toy.clock


def test_a_job_with_one_straggler_ends_sooner_over_groups_and_switches_once() -> None:
    (toy, soon), (_, late) = tail_job(4, True), tail_job(4, False)
    assert toy.seen["partition"] == 1 and toy.seen["alone"] == 0
    assert soon < 0.55 * late


def test_groups_grow_as_the_tail_shrinks() -> None:
    lengths = [30] * 20 + [400, 700]
    toy = Toy(lengths, 4, slots=16, pages=400)
    sizes = []
    live(
        Scheduler(len(lengths), 4, Rules(64, 64, migrate=True, partition=True, tail=RULES)), toy, [800] * len(lengths),
        watch=lambda events, said: sizes.extend(o.size for o in said[0] if isinstance(o, Partition)),
    )
    assert sorted(sizes) == [1, 2, 2, 4] and sizes[-2:] == [1, 4]
