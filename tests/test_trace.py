"""Laws of the trace: decisions come back as they were, so each can be replayed; every deed leaves a line of its own."""

from __future__ import annotations

import json
from typing import get_args

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bgmpi.coroutine import State
from bgmpi.errors import InputError
from bgmpi.primitives import (
    NOBODY,
    Admit,
    Arrived,
    Deed,
    Event,
    InputEnded,
    Instruction,
    Moved,
    Refused,
    Reported,
    Run,
    Stop,
)
from bgmpi.trace import TraceWriter, is_trace, read_deeds, read_trace

NUMBERS = st.integers(-(2**62), 2**62)
ARRAYS = st.lists(NUMBERS, max_size=5).map(lambda values: np.array(values, np.int64))
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
FIELDS = {
    int: NUMBERS,
    bool: st.booleans(),
    float: FLOATS,
    str: st.text(max_size=5),
    tuple[Moved, ...]: st.lists(st.builds(Moved, st.sampled_from(State).map(int), ARRAYS), max_size=3).map(tuple),
    tuple[Deed, ...]: st.lists(st.builds(Deed, st.text(), FLOATS, FLOATS, ARRAYS, NUMBERS), max_size=3).map(tuple),
}


def records(union) -> st.SearchStrategy:
    return st.one_of([
        st.builds(kind, **{f.name: FIELDS.get(f.type, ARRAYS) for f in msgspec.structs.fields(kind)})
        for kind in get_args(union)
    ])


def plain(value) -> object:
    if isinstance(value, np.ndarray):
        return value.dtype, value.tolist()
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if isinstance(value, msgspec.Struct):
        return type(value), {name: plain(getattr(value, name)) for name in value.__struct_fields__}
    return value


@given(st.lists(records(Event), max_size=4), st.lists(st.lists(records(Instruction), max_size=3), max_size=3))
def test_every_record_comes_back_as_it_was(tmp_path_factory, events, instructions):
    path = tmp_path_factory.mktemp("trace") / "t.jsonl"
    with TraceWriter(path) as trace:
        trace.round(3, 1.25, events, instructions)
    (back,) = read_trace(path)
    assert (back.round, back.seconds) == (3, 1.25)
    without = [msgspec.structs.replace(one, deeds=()) if isinstance(one, Reported) else one for one in events]
    assert plain(back.events) == plain(without)
    assert plain(back.instructions) == plain(instructions)


def report(rank: int, deeds: tuple[Deed, ...] = (), moves: tuple[Moved, ...] = ()) -> Reported:
    return Reported(rank, moves, 0, 0, 0, 0, deeds=deeds)


def test_every_deed_and_every_event_leaves_a_flat_line_before_the_line_of_its_round(tmp_path):
    path, ids = tmp_path / "t", np.array([7, 4])
    events = [
        Arrived(ids, ids, ids), Refused(ids[:1]), InputEnded(),
        report(1, (Deed("migrate", 2.0, 0.5, ids, 4096), Deed("run", 1.0, 0.75, NOBODY)), (Moved(State.DONE, ids),)),
    ]
    with TraceWriter(path) as trace:
        trace.round(3, 5.0, events, [[], [Run(64)]])
    *lines, last = [json.loads(line) for line in path.read_text().splitlines()[1:]]
    columns = ("time", "rank", "what", "sequences", "bytes", "seconds")
    assert [line.pop("line") for line in lines] == ["deed"] * 6 and last["line"] == "round"
    assert all(tuple(line) == columns for line in lines)
    assert [tuple(line.values()) for line in lines] == [
        (5.0, 0, "arrived", [7, 4], 0, 0.0), (5.0, 0, "refused", [7], 0, 0.0), (5.0, 0, "input_ended", [], 0, 0.0),
        (1.0, 1, "run", [], 0, 0.75), (2.0, 1, "migrate", [7, 4], 4096, 0.5), (5.0, 1, "done", [7, 4], 0, 0.0),
    ]
    assert last["events"][3]["deeds"] == []


@given(st.lists(st.builds(Deed, st.text(), FLOATS, FLOATS, ARRAYS, NUMBERS), max_size=5))
def test_deeds_come_back_as_they_were_oldest_first(tmp_path_factory, deeds):
    path = tmp_path_factory.mktemp("trace") / "t.jsonl"
    with TraceWriter(path) as trace:
        trace.round(0, 0.0, [report(2, tuple(deeds))], [[]])
    back = [(one.rank, one.what, one.time, one.seconds, plain(one.sequences), one.bytes) for one in read_deeds(path)]
    assert back == [(2, one.what, one.begun, one.seconds, plain(one.sequences), one.bytes)
                    for one in sorted(deeds, key=lambda one: one.begun)]


def test_a_sequence_costs_little_file_over_its_life(tmp_path):
    path, many = tmp_path / "t", np.arange(900_000, 1_000_000)
    moves = (Moved(State.ACTIVE, many), Moved(State.DONE, many))
    with TraceWriter(path) as trace:
        trace.round(0, 0.0, [Arrived(many, many % 100, many % 100)], [[Admit(many)]])
        trace.round(1, 0.0, [report(0, moves=moves)], [[]])
    assert path.stat().st_size / len(many) < 100


def test_a_file_is_known_to_be_a_trace_by_its_first_line(tmp_path):
    TraceWriter(tmp_path / "t").close()
    (tmp_path / "old").write_bytes(b'{"format":"bgmpi-trace","version":1}\n')
    (tmp_path / "other").write_bytes(b"\x89HDF\r\n\x1a\n bgmpi-trace")
    (tmp_path / "empty").touch()
    assert [is_trace(tmp_path / name) for name in ("t", "old", "other", "empty")] == [True, True, False, False]


def test_arrays_come_back_as_int64_also_when_empty(tmp_path):
    with TraceWriter(tmp_path / "t") as trace:
        trace.round(0, 0.0, [], [[Admit(np.empty(0, np.int64))]])
    (back,) = read_trace(tmp_path / "t")
    assert back.instructions[0][0].sequences.dtype == np.int64


def test_numpy_numbers_are_written_as_numbers(tmp_path):
    with TraceWriter(tmp_path / "t") as trace:
        trace.round(np.int64(1), np.float64(0.5), [], [[Run(np.int64(64))], [Stop()]])
    (back,) = read_trace(tmp_path / "t")
    assert back.round == 1 and plain(back.instructions) == plain([[Run(64)], [Stop()]])


def test_a_line_torn_by_a_kill_is_left_out_and_the_rest_is_kept(tmp_path):
    path = tmp_path / "t"
    ids = np.arange(3)
    with TraceWriter(path) as trace:
        for number in range(3):
            trace.round(number, float(number), [Arrived(ids, ids, ids)], [[Run(1)]])
    whole = path.read_bytes()
    for cut in range(1, 40):
        path.write_bytes(whole[:-cut])
        assert [one.round for one in read_trace(path)] == [0, 1]
        assert len(list(read_deeds(path))) == 3


@pytest.mark.parametrize("content", [b"", b"{}\n", b"not json\n", b'{"format":"bgmpi-trace","version":99}\n'])
def test_what_is_no_trace_of_this_version_is_refused(tmp_path, content):
    (tmp_path / "t").write_bytes(content)
    with pytest.raises(InputError, match="bgmpi-trace"):
        list(read_trace(tmp_path / "t"))
    with pytest.raises(InputError, match="bgmpi-trace"):
        list(read_deeds(tmp_path / "t"))


def test_a_bad_line_in_the_middle_is_named(tmp_path):
    path = tmp_path / "t"
    with TraceWriter(path) as trace:
        trace.round(0, 0.0, [], [])
    bad = b'{"line": "round", "round": 1, "seconds": 0, "events": [{"type": "Nobody"}], "instructions": []}\n'
    path.write_bytes(path.read_bytes() + bad)
    with pytest.raises(InputError, match=r"line 3.*Nobody"):
        list(read_trace(path))
