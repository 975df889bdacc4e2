"""In which order rows are read: urgent ones first, nobody for ever behind; as arrays, in front of toy ranks, on real
ones."""

from __future__ import annotations

from pathlib import Path

import checkpoints
import h5py
import jobs
import launch
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks_for_tests import Toy, live
from tokenizers_for_tests import make_tokenizer

from bgmpi.coroutine import State
from bgmpi.errors import RowError
from bgmpi.fairness import Wishes, age_key, aged, latest_turns, level_of, levels_of, turns_of
from bgmpi.intake import Intake
from bgmpi.io.requests import RowRefused
from bgmpi.primitives import Arrived, Reported, Restored
from bgmpi.recovery import Left
from bgmpi.request import Answer, Request, Sampling
from bgmpi.scheduler import Rules, Scheduler

NEVER = float("inf")


@st.composite
def wishes(draw: st.DrawFn, most: int = 60) -> Wishes:
    count = draw(st.integers(0, most))
    priority = draw(st.lists(st.integers(-3, 3), min_size=count, max_size=count))
    deadline = draw(st.lists(st.sampled_from([NEVER, NEVER, 1.0, 2.0, 3.0]), min_size=count, max_size=count))
    return Wishes(np.array(priority, np.int32), np.array(deadline, np.float32), draw(st.integers(0, 5)))


def rows_of(asked: Wishes) -> int:
    assert asked.priority is not None
    return len(asked.priority)


@given(st.permutations(range(40)), st.integers(0, 50))
def test_no_row_waits_longer_than_the_bound_whatever_the_strict_order(strict: list[int], ageing: int) -> None:
    order = aged(np.array(strict), ageing)
    turn = np.empty(40, np.int64)
    turn[order] = np.arange(40)  # raises unless each is named once
    assert sorted(order.tolist()) == list(range(40))
    assert (turn <= latest_turns(40, ageing)).all()
    for place in range(40):
        assert (order[: turn[place]] > place).sum() <= ageing * (place + 1)


def test_the_bound_is_reached() -> None:
    assert aged(np.arange(9)[::-1], 2).tolist() == [8, 7, 0, 6, 5, 1, 4, 3, 2]
    assert latest_turns(9, 2).tolist() == [2, 5, 8, 8, 8, 8, 8, 8, 8]


@given(wishes())
def test_a_turn_is_the_most_urgent_rows_unless_it_is_the_oldest_rows(asked: Wishes) -> None:
    assert asked.priority is not None and asked.deadline is not None
    left = list(range(rows_of(asked)))
    for turn, row in enumerate(turns_of(np.arange(len(left)), asked).rows.tolist()):
        urgent = min(left, key=lambda one: (asked.priority[one], asked.deadline[one], one))
        assert row == (left[0] if turn % (asked.ageing + 1) == asked.ageing else urgent)
        left.remove(row)
    assert not left


@given(wishes())
def test_the_level_is_the_most_urgent_that_is_left_and_never_falls(asked: Wishes) -> None:
    assert asked.priority is not None
    turns = turns_of(np.arange(rows_of(asked)), asked)
    dense = np.unique(asked.priority, return_inverse=True)[1][turns.rows]
    assert turns.level.tolist() == [min(dense[turn:].tolist()) for turn in range(len(dense))]
    assert (np.diff(turns.level) >= 0).all()


def test_where_nobody_is_more_urgent_rows_are_read_as_they_stand() -> None:
    rows = np.array([3, 4, 9])
    for asked in (Wishes(), Wishes(np.full(10, 7, np.int32), None, 3), Wishes(np.arange(10, 0, -1, np.int32), None, 0)):
        turns = turns_of(rows, asked)
        assert turns.rows.tolist() == [3, 4, 9] and turns.level[0] == 0
    turned = turns_of(rows, Wishes(np.arange(10, 0, -1, np.int32), None, 9))
    assert turned.rows.tolist() == [9, 4, 3] and turned.level.tolist() == [0, 1, 2]


def test_a_key_puts_the_more_urgent_before_the_earlier() -> None:
    keys = [age_key(0, 5), age_key(0, 2**39), age_key(1, 0), age_key(2**31 - 1, 2**39)]
    assert keys == sorted(keys) and [level_of(key) for key in keys] == [0, 0, 1, 2**31 - 1]
    assert levels_of(np.array(keys)).tolist() == [0, 0, 1, 2**31 - 1]


@given(wishes(30), st.data(), st.integers(1, 4), st.integers(1, 3))
@settings(deadline=None, max_examples=40)
def test_every_row_starts_within_the_bound_in_rounds(
    asked: Wishes, data: st.DataObject, ranks: int, slots: int
) -> None:
    """While a row waits, in each round one that was read before it makes a step; so it waits at most as many rounds as
    those have tokens, and they are at most as many as the bound says."""
    count = rows_of(asked)
    lengths = data.draw(st.lists(st.integers(1, 20), min_size=count, max_size=count))
    order = turns_of(np.arange(count), asked).rows.tolist()
    toy = Toy(lengths, ranks, slots, pages=slots * 5)
    scheduler = Scheduler(count, ranks, Rules(round_steps=64, page_tokens=64))
    started: dict[int, int] = {}

    def watch(events: list[object], _: list[list[object]]) -> None:
        for event in events:
            for moved in event.moves if isinstance(event, Reported) else ():
                if moved.state == State.ACTIVE:
                    for name in moved.sequences.tolist():
                        started.setdefault(name, scheduler.round_number)

    live(scheduler, toy, [20] * count, watch=watch, order=order)
    assert len(started) == count
    before = 0
    for turn, row in enumerate(order):
        assert started[row] <= 3 + before <= 3 + 20 * int(latest_turns(count, asked.ageing)[row])
        assert turn <= latest_turns(count, asked.ageing)[row]
        before += lengths[row]


class FewRows:
    """Reads rows of one prompt token and two samples; the row 3 is refused."""

    def read(self, row: int, known: object = None) -> tuple[Request, ...] | RowRefused:
        if row == 3:
            return RowRefused(3, "r3", "", RowError("invalid_request_error", "no"))
        return (Request(row, f"r{row}", "", np.zeros(1, np.int32), 2, Sampling(0, max_tokens=4)),)


def test_rows_are_read_in_their_turns_and_ranks_are_told_how_urgent_they_are() -> None:
    refused: list[Answer] = []
    done = np.zeros(12, bool)
    done[[8, 9, 10]] = True  # row 4 whole, a sample of row 5
    intake = Intake(
        FewRows(), np.arange(0, 14, 2), left=Left(done, np.zeros(12, bool)), context=64, pool=64, strict=False,
        clock=lambda: 0.0, refuse=refused.append,
        wishes=Wishes(np.array([5, 5, 2, 2, -9, 2], np.int32), None, 2),
    )
    first = intake.read(2)
    assert [type(event) for event in first] == [Restored, Arrived] and not refused
    assert isinstance(first[1], Arrived) and first[1].sequences.tolist() == [4, 5]
    rest = [event for event in intake.read(99) if isinstance(event, Arrived)]
    assert [event.sequences.tolist() for event in rest] == [[0, 1, 11, 2, 3]]
    assert [answer.row for answer in refused] == [3]
    work = intake.take(np.array([4, 5, 0, 1, 11, 2, 3]))
    assert [(one.request.row, one.level) for one in work] == [(2, 0), (0, 0), (5, 0), (1, 1)]


# --- on real ranks ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(checkpoints.make("mixtral", tmp_path_factory.mktemp("fair") / "model"))


@launch.on_ranks(2)
def test_urgent_rows_behind_many_others_are_answered_early_with_the_same_tokens(
    ranks: int, model: Path, tmp_path: Path
) -> None:
    bulk = [{"prompt": prompt, "max_tokens": 12, "ignore_eos": True} for prompt in jobs.prompts(40, longest=20)]
    soon = [{**body, "priority": -1} for body in bulk[:4]]
    sooner = {**bulk[4], "priority": -1, "deadline_s": 3600}
    late = {**bulk[5], "priority": 1, "deadline_s": 0}
    wrong = [{**bulk[0], "priority": 1.5}, {**bulk[0], "deadline_s": -1}]
    requests = jobs.write_requests(tmp_path / "r.jsonl", [late, *bulk, *soon, sooner, *wrong])
    words = ["--model", model, "-i", requests, "--dtype", "float32", "--max-num-seqs", "2", "--page-tokens", "4",
             "--check", "--progress", "off"]
    plain, fair, shared = tmp_path / "plain.h5", tmp_path / "fair.h5", tmp_path / "shared.h5"
    alone = ["--prefix-sharing", "off"]
    ended = jobs.run_jobs(ranks, [
        [*words, "-o", plain, "--ageing", "0"], [*words, "-o", fair, "--ageing", "3", *alone],
        [*words, "-o", shared, "--ageing", "3"],
    ], tmp_path)  # fmt: skip
    assert jobs.tokens_of(plain) == jobs.tokens_of(fair) == jobs.tokens_of(shared), ended
    assert "sharing prefixes leaves" in ended.stderr
    with h5py.File(fair, "r") as file:
        queued, done = file["samples/queued"][:], file["samples/done"][:]
        assert file["errors/row"][:].tolist() == [46, 47]
        assert file["errors/param/values"][:].tobytes().decode() == "prioritydeadline_s"
    # Turns: the one with a deadline, two urgent ones, the oldest row; two urgent ones, a plain one, the oldest.
    assert queued[45] <= queued[41] and queued[42] <= queued[0] <= queued[43] <= queued[44] <= queued[40]
    assert (np.sort(done[:41])[8:] > done[41:46].max()).all()
    with h5py.File(shared, "r") as file:
        done = file["samples/done"][:]
    assert (np.sort(done[:41])[8:] > done[41:46].max()).all()
    with h5py.File(plain, "r") as file:
        done = file["samples/done"][:]
    assert done[41:46].min() > np.median(done[:41])
