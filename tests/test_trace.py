"""Laws of the trace: what was written comes back, so every decision can be replayed."""

from __future__ import annotations

from typing import get_args

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bgmpi.errors import InputError
from bgmpi.primitives import Admit, Arrived, Event, Instruction, Moved, Run, Stop
from bgmpi.trace import TraceWriter, read_trace

NUMBERS = st.integers(-(2**62), 2**62)
ARRAYS = st.lists(NUMBERS, max_size=5).map(lambda values: np.array(values, np.int64))
FIELDS = {
    int: NUMBERS,
    bool: st.booleans(),
    float: st.floats(allow_nan=False, allow_infinity=False),
    tuple[Moved, ...]: st.lists(st.builds(Moved, NUMBERS, ARRAYS), max_size=3).map(tuple),
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
    assert plain(back.events) == plain(events)
    assert plain(back.instructions) == plain(instructions)


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


@pytest.mark.parametrize("content", [b"", b"{}\n", b"not json\n", b'{"format":"bgmpi-trace","version":99}\n'])
def test_what_is_no_trace_of_this_version_is_refused(tmp_path, content):
    (tmp_path / "t").write_bytes(content)
    with pytest.raises(InputError, match="bgmpi-trace"):
        list(read_trace(tmp_path / "t"))


def test_a_bad_line_in_the_middle_is_named(tmp_path):
    path = tmp_path / "t"
    with TraceWriter(path) as trace:
        trace.round(0, 0.0, [], [])
    bad = b'{"round": 1, "seconds": 0, "events": [{"type": "Nobody"}], "instructions": []}\n'
    path.write_bytes(path.read_bytes() + bad)
    with pytest.raises(InputError, match=r"line 3.*Nobody"):
        list(read_trace(path))
