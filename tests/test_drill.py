"""Laws of drills: forced primitives are legal, happen, and nothing is lost by them."""

from __future__ import annotations

import numpy as np
import pytest
from ranks_for_tests import Toy, live

from bgmpi import values
from bgmpi.drill import Drill
from bgmpi.scheduler import Rules, Scheduler


@pytest.mark.parametrize(("text", "drill"), [
    ("yield=3", Drill(yields=3)),
    (" Partition=1, migrate=20 ", Drill(migrations=20, partitions=1)),
    ("yield=1,migrate=2,partition=3", Drill(1, 2, 3)),
    (None, Drill()),
])
def test_a_drill_is_read(text: str | None, drill: Drill) -> None:
    assert Drill.parse(text) == drill
    if text is not None:
        assert Drill.parse(values.drill(text)) == drill


@pytest.mark.parametrize(
    "text", ["", "yield", "yield=0", "yield=-1", "yield=x", "yield=1,yield=2", "run=3", "yield=1;", 7]
)
def test_a_wrong_drill_is_refused_with_what_is_expected(text: object) -> None:
    with pytest.raises(ValueError, match="expected yield=K,migrate=K,partition=K"):
        values.drill(text)


def test_half_yield_and_the_other_half_the_next_time() -> None:
    active = [np.arange(5), np.arange(5, 6), np.arange(0)]
    drill = Drill(yields=2)
    assert [one.tolist() for one in drill.to_yield(2, active)] == [[1, 3], [], []]
    assert [one.tolist() for one in drill.to_yield(3, active)] == [[], [], []]
    assert [one.tolist() for one in drill.to_yield(4, active)] == [[0, 2, 4], [5], []]


def test_nobody_is_sent_where_no_page_is_free() -> None:
    need = [np.full(4, 2)] * 2
    moves = Drill(migrations=1).to_migrate(
        4, [np.arange(4), np.arange(4, 8)], need, np.array([1, 2]), np.zeros(2, bool)
    )
    assert [(m.source, m.target, m.sequences.tolist()) for m in moves] == [(0, 1, [0])]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6])
def test_every_forced_primitive_happens_and_every_sequence_ends(ranks: int) -> None:
    lengths = [20 + 7 * (i % 13) for i in range(40)] + [400]
    toy = Toy(lengths, ranks, slots=8, pages=200)
    rules = Rules(round_steps=8, page_tokens=64)
    live(Scheduler(len(lengths), ranks, rules, Drill(3, 5, 4)), toy, [500] * len(lengths))
    assert toy.seen["yield"] > 10 and toy.seen["combine"] > 0
    if ranks > 1:
        assert toy.seen["migrate"] > 5 and toy.seen["partition"] > 2 and toy.seen["alone"] > 1


def test_a_model_that_cannot_be_sharded_is_never_partitioned() -> None:
    lengths = [30, 200]
    toy = Toy(lengths, 2, slots=8, pages=200)
    rules = Rules(round_steps=8, page_tokens=64, partition=True, shardable=False)
    live(Scheduler(2, 2, rules, Drill(partitions=1)), toy, [500] * 2)
    assert toy.seen["partition"] == 0
