"""Rows arrive by units with what they share, ranks are told who still comes, and refused rows keep nobody waiting."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bgmpi.errors import RowError
from bgmpi.fairness import Wishes
from bgmpi.intake import Intake
from bgmpi.io.prompt_store import PromptStore
from bgmpi.io.requests import RowRefused
from bgmpi.prefix_tree import PrefixTreeBuilder
from bgmpi.primitives import Arrived, InputEnded, Refused
from bgmpi.recovery import Left
from bgmpi.request import Answer, Request, Sampling
from bgmpi.share_plan import share_plan
from bgmpi.tokenising import Prompts

PAGE = 4
Rows = list[tuple[list[list[int]], int]]


class KnownRows:
    """Reads rows whose prompts are known; those of `bad` are refused."""

    def __init__(self, rows: Rows, cap: Sequence[int], bad: set[int]) -> None:
        self.rows, self.cap, self.bad = rows, cap, bad
        self.read_rows: list[int] = []

    def read(self, row: int, known: Sequence[np.ndarray] | None = None) -> tuple[Request, ...] | RowRefused:
        self.read_rows.append(row)
        if row in self.bad:
            return RowRefused(row, f"r{row}", "", RowError("invalid_request_error", "no"))
        prompts, samples = self.rows[row]
        assert known is not None and [one.tolist() for one in known] == prompts
        return tuple(Request(row, f"r{row}", "", ids, samples, Sampling(0, max_tokens=self.cap[row])) for ids in known)


def intake_of(
    folder: Path, rows: Rows, *, ended: Sequence[int] = (), bad: set[int] | None = None, wishes: Wishes | None = None,
    cap: Sequence[int] | None = None, pool: int = 99, unit_sequences: int = 64, hidden: set[int] | None = None,
) -> tuple[Intake, KnownRows, list[Answer]]:  # fmt: skip
    """Make an intake.  hidden: rows that were refused when all were tokenised."""
    counts = [len(prompts) for prompts, _ in rows]
    first = np.concatenate(([0], np.cumsum([len(prompts) * samples for prompts, samples in rows])))
    done = np.zeros(first[-1], bool)
    done[list(ended)] = True
    flat = [ids for at, (prompts, _) in enumerate(rows) for ids in prompts]
    store = PromptStore(folder, len(flat))
    builder = PrefixTreeBuilder(len(flat), PAGE)
    prompts = Prompts(
        store, np.concatenate(([0], np.cumsum(counts))), np.array(cap or [9] * len(rows), np.int32),
        np.zeros(len(flat), np.int32),
    )  # fmt: skip
    sequence = number = 0
    for row, (texts, samples) in enumerate(rows):
        for ids in texts:
            if row not in (hidden or set()):
                tokens = np.array(ids, np.int32)
                store.append(np.array([number]), np.array([len(ids)]), tokens)
                builder.add(np.array([number]), np.array([len(ids) - 1]), tokens[:-1])
                prompts.weight[number] = int((~done[sequence : sequence + samples]).sum())
            sequence, number = sequence + samples, number + 1
    shareable = np.maximum(store.lengths.astype(np.int64) - 1, 0)
    tree = builder.build(prompts.weight, lambda some, page: store.pages(some, page, PAGE, shareable[some]))
    prompts.plan = share_plan(
        tree, prompts.weight, store.lengths.astype(np.int64), mode="multi-level", least_tokens=1,
        unit_sequences=unit_sequences
    )
    reader, answers = KnownRows(rows, prompts.cap.tolist(), (bad or set()) | (hidden or set())), []
    intake = Intake(
        reader, first, left=Left(done, np.zeros_like(done)), context=64, pool=pool, strict=False, clock=lambda: 0.0,
        refuse=answers.append, wishes=wishes or Wishes(ageing=99), prompts=prompts,
    )  # fmt: skip
    return intake, reader, answers


def arrived(events: list) -> Arrived:
    return next(event for event in events if isinstance(event, Arrived))


HEAD = [1, 2, 3, 4, 5, 6]


def test_a_unit_arrives_whole_and_says_what_its_first_one_computes(tmp_path: Path) -> None:
    rows: Rows = [([[*HEAD, 10 + at]], 1) for at in range(3)] + [([[50, 51, 52]], 2), ([[60, 61]], 1)]
    rows = [rows[at] for at in (0, 3, 1, 4, 2)]
    intake, reader, _ = intake_of(tmp_path, rows, cap=[30, 1, 30, 1, 30])
    one = arrived(intake.read(1))
    # Worth: 90 answer tokens for 9 of prompt; 2 for 4; 1 for 2.
    assert reader.read_rows == [0, 2, 4] and one.sequences.tolist() == [0, 3, 5]
    assert one.prompt.tolist() == [7, 7, 7] and one.shared.tolist() == [0, 6, 6]
    assert len(set(one.unit.tolist())) == 1 and len(one.unit) == 3
    events = intake.read(99)
    rest = arrived(events)
    assert rest.sequences.tolist() == [1, 2, 4] and rest.shared.tolist() == [0, 2, 0]
    assert rest.unit[0] == rest.unit[1] != rest.unit[2] and isinstance(events[-1], InputEnded)
    work = intake.take(np.array([0, 3, 5]))
    assert [[(one.depth, one.more) for one in item.prefixes] for item in work] == [[(6, False)]] * 3
    assert [item.prefixes for item in intake.take(np.array([4]))] == [()]
    assert intake.take_closed() == []


def test_ranks_are_told_who_still_comes_and_hear_when_nobody_does(tmp_path: Path) -> None:
    rows: Rows = [([[*HEAD, at]], 1) for at in range(4)]
    intake, _, answers = intake_of(tmp_path, rows, bad={3})
    events = intake.read(99)
    assert [event.sequences.tolist() for event in events if isinstance(event, Refused)] == [[3]] and len(answers) == 1
    first, second = intake.take(np.array([0, 1])), intake.take(np.array([2]))
    assert [item.prefixes[0].more for item in first] == [True, True] and intake.take_closed() == [0]
    assert [item.prefixes[0].more for item in second] == [False] and intake.take_closed() == []


def test_rows_refused_last_close_what_was_open(tmp_path: Path) -> None:
    rows: Rows = [([[*HEAD, at]], 1) for at in range(3)]
    # Row 2 fits no rank, and is read after the others were handed over.
    intake, _, answers = intake_of(
        tmp_path, rows, cap=[1, 1, 60], pool=20, wishes=Wishes(np.array([0, 0, 1], np.int32), None, 99)
    )
    assert arrived(intake.read(2)).sequences.tolist() == [0, 1]
    assert [item.prefixes[0].more for item in intake.take(np.array([0, 1]))] == [True, True]
    assert intake.take_closed() == [] and not answers
    intake.read(1)
    assert len(answers) == 1 and intake.take_closed() == [0]


def test_rows_refused_ahead_and_sequences_ended_before_count_for_nobody(tmp_path: Path) -> None:
    rows: Rows = [([[*HEAD, 9]], 3), ([[*HEAD, 8]], 1), ([[*HEAD, 7]], 1), ([[*HEAD, 6]], 1)]
    intake, reader, answers = intake_of(tmp_path, rows, ended=[1, 3], hidden={3})
    one = arrived(intake.read(99))
    assert sorted(one.sequences.tolist()) == [0, 2, 4] and 1 not in reader.read_rows and len(answers) == 1
    work = intake.take(one.sequences)
    assert not any(prefix.more for item in work for prefix in item.prefixes) and intake.take_closed() == []


def test_prompts_of_one_row_come_with_its_first_ones_unit(tmp_path: Path) -> None:
    rows: Rows = [([[*HEAD, 9], [70, 71, 72]], 2), ([[70, 71, 73]], 1), ([[*HEAD, 8]], 1)]
    intake, _, _ = intake_of(tmp_path, rows, cap=[9, 1, 9])
    one = arrived(intake.read(1))
    assert sorted(one.sequences.tolist()) == [0, 1, 2, 3, 5]
    assert len(set(one.unit.tolist())) == 1
    work = intake.take(one.sequences)
    open_nodes = {prefix.number for item in work for prefix in item.prefixes if prefix.more}
    assert len(open_nodes) == 1, "the second prompt's prefix, of which row 1 comes later"
    last = arrived(intake.read(1)).sequences
    assert last.tolist() == [4] and not any(prefix.more for prefix in intake.take(last)[0].prefixes)
    assert intake.take_closed() == list(open_nodes)


def test_the_order_follows_answers_that_end(tmp_path: Path) -> None:
    rows: Rows = [([[at, 99]], 2) for at in range(40)]
    caps = [30, 60] * 20
    intake, reader, _ = intake_of(tmp_path, rows, cap=caps)
    intake.read(6)
    assert all(at % 2 for at in reader.read_rows), "the longer caps first"
    for _ in range(8):
        intake.learn([np.array([[60, 3], [30, 29]] * 20)])
    del reader.read_rows[:]
    intake.read(6)
    assert reader.read_rows and not any(at % 2 for at in reader.read_rows)


def test_without_a_plan_rows_come_as_ever(tmp_path: Path) -> None:
    rows: Rows = [([[at, 1]], 1) for at in range(4)]
    intake, reader, _ = intake_of(tmp_path, rows)
    assert intake._prompts is not None
    plain = Intake(
        reader, intake.first, left=Left(np.zeros(4, bool), np.zeros(4, bool)), context=64, pool=64, strict=False,
        clock=lambda: 0.0, refuse=lambda _: None,
        prompts=Prompts(intake._prompts.store, intake._prompts.first, intake._prompts.cap, intake._prompts.weight),
    )  # fmt: skip
    one = arrived(plain.read(99))
    assert one.sequences.tolist() == [0, 1, 2, 3] and not len(one.unit) and not len(one.shared)
    assert intake._prompts.store.closed, "nothing is left to read"
    assert all(not item.prefixes for item in plain.take(one.sequences)) and plain.take_closed() == []
